"""Freezing: a network of SE(2,N) layers as the plain CNN that it is once its kernels are rotated.

In: one of the three networks, or any module built of `rp.nn`. Out: torch's own layers on tensors (B, C·N, H, W), with
batch norm folded into the convolutions, that give the same answers.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import overload

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]  # in a script such a comment would be read as a type

from rotopath.models.following import expect_no_hooks, find_autocasts, is_layer
from rotopath.models.network import Network
from rotopath.models.plain import is_recorded
from rotopath.models.promise import IMAGE_CHANNELS
from rotopath.models.simplifying import simplify
from rotopath.models.translating import Translator
from rotopath.nn import expect


class FrozenNetwork(Network):
    """A network of plain layers, with the sizes and the manners of the one that it was frozen from."""

    __jit_unused_properties__ = ("geometry", "receptive_field", "stride")
    white: Tensor

    def __init__(self, network: Network, layers: nn.Module) -> None:
        nn.Module.__init__(self)  # its layers are others than a network's
        self.architecture = network.architecture
        self.orientations = network.orientations
        self.layers = layers
        white = torch.tensor(255.0).to(next(layers.parameters(), torch.ones(())))
        self.register_buffer("white", white, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  # alone: only then a script leaves out what is below
            if not is_recorded():
                x = self._expect_images(x)
        if x.dtype == torch.uint8:
            x = x / self.white  # cast and scaled in one pass
        return self.compute_logits(x)

    def compute_logits(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x)  # (B, K, H', W')
        return logits

    @torch.jit.unused
    def _expect_images(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dtype == torch.uint8:
            x = x / self.white
        expect.image(x, self, IMAGE_CHANNELS)
        expect.brightness(x, self)
        for size in x.shape[-2:]:
            self.architecture.expect_size(size)
        return x


@overload
def freeze(model: Network) -> FrozenNetwork: ...
@overload
def freeze(model: nn.Module) -> nn.Module: ...
def freeze(model: nn.Module) -> nn.Module:
    """The model as a plain CNN: kernels rotated once, batch norm folded, torch's own layers, the same answers.

    Freezing is for evaluation: whatever mode the model is in, running statistics count and dropout is gone. The model
    itself is not changed. A `Network` gives a `FrozenNetwork`, which predicts, and refuses sizes, as it does; of other
    modules only the layers are carried over, and no longer the checks of sizes.

    Every layer keeps its dtype: a model in halves is frozen in halves. A forward that switches `torch.autocast` on is
    refused; put autocast around the frozen model instead. A part for which the forward switches autocast off is no
    longer kept out of it. Several threads may freeze at once, and use other models meanwhile, but not compiled ones.

    >>> net = rp.models.tumor(orientations=8).eval()
    >>> x = torch.rand(2, 3, 88, 100)
    >>> torch.allclose(rp.freeze(net)(x), net(x), atol=1e-5)
    True
    """
    if isinstance(model, FrozenNetwork):
        return copy.deepcopy(model)
    expect_no_hooks(model)
    with torch.no_grad(), _without_autocast():
        model = copy.deepcopy(model).eval()  # of which no branch for training is followed
        if is_layer(model):
            model = nn.Sequential(model)
        plain = Translator(model, freeze).translate()
        simplify(plain)
    layers = _as_sequential(plain).requires_grad_(False).eval()
    return FrozenNetwork(model, layers).eval() if isinstance(model, Network) else layers


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Kernels are rotated in the dtype of the weights, whoever freezes."""
    with ExitStack() as switched_off:
        for device in find_autocasts():
            switched_off.enter_context(torch.autocast(device, enabled=False))
        yield


def _as_sequential(module: fx.GraphModule) -> nn.Module:
    """Layers that follow each other in single file, as torch writes them; other graphs stay as they are."""
    first, *steps, last = module.graph.nodes
    before = first
    for node in (*steps, last):
        if node.args != (before,) or node.kwargs or node.op not in ("call_module", "output"):
            return module
        before = node
    return nn.Sequential(OrderedDict((str(node.target), module.get_submodule(str(node.target))) for node in steps))
