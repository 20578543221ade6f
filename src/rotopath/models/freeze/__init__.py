"""Freezing: a network of SE(2,N) layers as the plain CNN that it is once its kernels are rotated.

In: one of the three networks, or any module built of `rp.nn`. Out: torch's own layers on tensors (B, C·N, H, W), with
batch norm folded into the convolutions, that give the same answers.

A graph of plain layers, with fewer and cheaper passes over memory and the same answers.

In: a graph module whose layers are each called once. Out: the same module, changed.
"""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import overload

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]  # in a script such a comment would be read as a type

from rotopath.models.freeze.plain_layers import OrientationPool2d, Scale2d, fold, is_recorded
from rotopath.models.freeze.translate import Translator
from rotopath.models.network import Network
from rotopath.models.protocols import IMAGE_CHANNELS
from rotopath.models.trace import expect_no_hooks, find_autocasts, is_layer
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


FRESH_LAYERS = (nn.Conv2d, nn.MaxPool2d, OrientationPool2d, Scale2d)  # give new memory, that nobody else looks at
FRESH_FUNCTIONS: tuple[Callable[..., object], ...] = (torch.cat, torch.add, operator.add)


def simplify(module: fx.GraphModule) -> None:
    """Fold lines into convolutions, take maxima before ReLU, which there has less to do, and let that work in place."""
    dtypes = {parameter.dtype for parameter in module.parameters()}
    for node in reversed(module.graph.nodes):
        if not node.users and node.target in ("size", operator.floordiv):
            module.graph.erase_node(node)  # sizes that nobody asked for
    steps: list[fx.Node] = list(module.graph.nodes)
    for node in steps:
        layer = _layer(module, node)
        if isinstance(layer, Scale2d):
            if not _fold_into_conv(module, node, layer) and dtypes - {layer.factor.dtype}:
                _keep_dtype(module, node)
        elif isinstance(layer, OrientationPool2d) and layer.orientations == 1 and _reads_alone(node):
            _erase(module, node)  # a copy that nobody can tell from what it copies
    for node in list(module.graph.nodes):
        if isinstance(_layer(module, node), nn.ReLU):
            _sink(module, node)
    for node in module.graph.nodes:
        layer = _layer(module, node)
        if isinstance(layer, nn.ReLU) and _is_fresh(module, node.args[0]):
            layer.inplace = True
    module.delete_all_unused_submodules()
    module.recompile()


def _fold_into_conv(module: fx.GraphModule, node: fx.Node, scale: Scale2d) -> bool:
    """Let the convolution before a line compute both, if nothing else reads it; returns whether it does."""
    before = node.args[0]
    assert isinstance(before, fx.Node)
    conv = _layer(module, before)
    if type(conv) is not nn.Conv2d or not _reads_alone(node):
        return False
    setattr(module, str(before.target), fold(conv, scale))
    _erase(module, node)
    return True


def _keep_dtype(module: fx.GraphModule, node: fx.Node) -> None:
    """Batch norm answers in the dtype of what it reads, halves say, where a line of float32 would give float32."""
    with module.graph.inserting_after(node):
        cast = module.graph.call_method("type_as", (node, node.args[0]))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _erase(module: fx.GraphModule, node: fx.Node) -> None:
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)


def _sink(module: fx.GraphModule, relu: fx.Node) -> None:
    """Swap ReLU with the maxima that follow it. Both are read by one step only, so nobody sees the difference."""
    before, layer = relu.args[0], _layer(module, relu)
    assert isinstance(before, fx.Node)
    assert isinstance(layer, nn.ReLU)
    if layer.inplace and not _is_fresh(module, before):
        return  # it may change a part of what others read
    while (after := _only_user(relu)) and _reads_alone(relu) and _is_maximum(_layer(module, after)):
        after.replace_input_with(relu, before)
        after.replace_all_uses_with(relu)
        relu.replace_input_with(before, after)
        after.append(relu)
        before = after


def _is_maximum(layer: nn.Module | None) -> bool:
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    return isinstance(layer, OrientationPool2d) and layer.mode == "max"


def _is_fresh(module: fx.GraphModule, node: object) -> bool:
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return False
    return isinstance(_layer(module, node), FRESH_LAYERS) or node.target in FRESH_FUNCTIONS


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


def _reads_alone(node: fx.Node) -> bool:
    return _only_user(node.all_input_nodes[0]) is node


def _layer(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None
