"""Freeze an SE(2,N) network to a plain CNN with the same outputs.

`freeze` takes one of the paper's networks, or any module built from `rp.nn`. It returns a module of plain layers:
convolutions whose weights are the rotated kernels, with batch norm folded into these weights. Plain layers store
features (B, C, N, H, W) as tensors (B, C·N, H, W).

`freeze` has three steps:

1. Trace the module. The result is a graph with one node for each call of a layer, function or method.
2. Translate each node to plain layers (modules `translate` and `plain_layers`).
3. Simplify the new graph (`simplify`).
"""

import copy
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import overload

import torch
from torch import Tensor, fx, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]  # imported by name, because scripted functions may not contain "# type:" comments

from rotopath.models.freeze.plain_layers import OrientationPool2d, Scale2d, fold_scale, is_traced_or_exported
from rotopath.models.freeze.translate import Translator
from rotopath.models.network import ArchitectureNetwork
from rotopath.models.trace import active_autocasts, expect_no_hooks, is_layer

# Layers and functions that return a new tensor, not a view of an existing tensor. Therefore the next layer may
# overwrite their output.
ALLOCATING_LAYERS = (nn.Conv2d, nn.MaxPool2d, OrientationPool2d, Scale2d)
ALLOCATING_FUNCTIONS: tuple[Callable[..., object], ...] = (torch.cat, torch.add, operator.add)


@overload
def freeze(model: ArchitectureNetwork) -> "FrozenNetwork": ...
@overload
def freeze(model: nn.Module) -> nn.Module: ...
def freeze(model: nn.Module) -> nn.Module:
    """Return a plain CNN with the same outputs as `model`.

    The weights of its convolutions are the rotated kernels of `model`. The plain CNN computes the outputs of
    `model` in evaluation mode, even if `model` is in training mode: batch norm uses running statistics and is folded
    into convolutions where possible, and dropout is removed. `model` is not changed. A `Network` becomes a
    `FrozenNetwork`, with the same geometry and the same checks of images. Other modules lose their checks of image
    sizes. Every layer keeps its dtype.

    Raises ValueError if `model` has hooks, if a layer or function has no plain counterpart, or if `forward()` enables
    `torch.autocast`; run the frozen model within autocast instead. If `forward()` disables autocast for some layers,
    the frozen model does not disable it. Several threads may freeze models, and use other models, at the same time.
    Exception: models compiled by `torch.compile` cannot be used while a model is being frozen.

    >>> net = rp.models.tumor(orientations=8).eval()
    >>> x = torch.rand(2, 3, 88, 100)
    >>> torch.allclose(rp.freeze(net)(x), net(x), atol=1e-5)
    True
    """
    if isinstance(model, FrozenNetwork):
        return copy.deepcopy(model)
    expect_no_hooks(model)
    with torch.no_grad(), _autocast_disabled():
        model = copy.deepcopy(model).eval()  # in evaluation mode, code for training is not traced
        if is_layer(model):
            model = nn.Sequential(model)
        plain = Translator(model, freeze).translate()
        simplify(plain)
    layers = _as_sequential(plain).requires_grad_(False).eval()
    return FrozenNetwork(model, layers).eval() if isinstance(model, ArchitectureNetwork) else layers


class FrozenNetwork(ArchitectureNetwork):
    """One of the paper's networks as plain layers: maps images (B, 3, H, W) to logits (B, K, H', W').

    `network` is the original network. The frozen network has the same geometry and the same image checks. `layers` is
    the plain CNN.
    """

    __jit_unused_properties__ = ("geometry", "receptive_field", "stride")  # TorchScript cannot compile these properties
    white: Tensor  # 255, the value of white in uint8 images

    def __init__(self, network: ArchitectureNetwork, layers: nn.Module) -> None:
        super().__init__(network.architecture, network.orientations)
        self.layers = layers
        white = torch.tensor(255.0).to(next(layers.parameters(), torch.ones(())))
        self.register_buffer("white", white, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not is_scripting():  # noqa: SIM102  # TorchScript skips the block only if this `if` is separate
            if not is_traced_or_exported():
                x = self._scale_and_check(x)
        if x.dtype == torch.uint8:
            x = x / self.white  # one pass over memory to cast and scale
        return self.compute_logits(x)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Apply the layers to images (B, 3, H, W) without checking the images, and return logits (B, K, H', W')."""
        logits: Tensor = self.layers(x)  # (B, K, H', W')
        return logits

    @torch.jit.unused
    def _scale_and_check(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dtype == torch.uint8:
            x = x / self.white
        self.check_images(x)
        return x


def simplify(module: fx.GraphModule) -> None:
    """Simplify a graph of plain layers in place, without changing what the graph computes.

    The graph must call each layer only once. There are five simplifications:

    - Sizes that no node reads are removed.
    - Each `Scale2d` directly after a convolution is folded into the convolution.
    - Each `OrientationPool2d` over a single orientation is removed.
    - Each ReLU directly before max pools is moved after the pools, where there are fewer values to process.
    - A ReLU overwrites its input if the input is a new tensor that no other node reads.

    A `Scale2d` that is not folded is followed by a cast, if the module has parameters with another dtype than this
    `Scale2d`. The cast returns the output of the `Scale2d` in the dtype of the `Scale2d`'s input.
    """
    dtypes = {parameter.dtype for parameter in module.parameters()}
    for node in reversed(module.graph.nodes):
        if not node.users and node.target in ("size", operator.floordiv):
            module.graph.erase_node(node)
    nodes: list[fx.Node] = list(module.graph.nodes)
    for node in nodes:
        layer = _get_layer(module, node)
        if isinstance(layer, Scale2d):
            if not _fold_into_conv(module, node, layer) and dtypes - {layer.factor.dtype}:
                _cast_to_input_dtype(module, node)
        elif isinstance(layer, OrientationPool2d) and layer.orientations == 1 and _is_only_user(node):
            _erase(module, node)  # its output equals its input
    for node in list(module.graph.nodes):
        if isinstance(_get_layer(module, node), nn.ReLU):
            _move_after_max_pools(module, node)
    for node in module.graph.nodes:
        layer = _get_layer(module, node)
        if isinstance(layer, nn.ReLU) and _can_be_overwritten(module, node.args[0]):
            layer.inplace = True
    module.delete_all_unused_submodules()
    module.recompile()


def _fold_into_conv(module: fx.GraphModule, node: fx.Node, scale: Scale2d) -> bool:
    """Fold `scale`, the layer that `node` calls, into the convolution directly before `node`, and return True.

    If there is no convolution directly before `node`, or if other nodes read the output of this convolution too, change
    nothing and return False.
    """
    source = node.args[0]
    assert isinstance(source, fx.Node)
    conv = _get_layer(module, source)
    if type(conv) is not nn.Conv2d or not _is_only_user(node):
        return False
    setattr(module, str(source.target), fold_scale(conv, scale))
    _erase(module, node)
    return True


def _cast_to_input_dtype(module: fx.GraphModule, node: fx.Node) -> None:
    """Cast the output of the `Scale2d` that `node` calls to the dtype of its input, as batch norm does.

    Without the cast, a float32 `Scale2d` would return float32 for float16 inputs.
    """
    with module.graph.inserting_after(node):
        cast = module.graph.call_method("type_as", (node, node.args[0]))
    node.replace_all_uses_with(cast, delete_user_cb=lambda user: user is not cast)


def _move_after_max_pools(module: fx.GraphModule, relu: fx.Node) -> None:
    """Move a ReLU after the max pools that directly follow it, if no other node reads the input or output of the ReLU.

    Afterwards, the pools read values before the ReLU, and the ReLU returns what the last pool returned before.
    """
    source, layer = relu.args[0], _get_layer(module, relu)
    assert isinstance(source, fx.Node)
    assert isinstance(layer, nn.ReLU)
    if layer.inplace and not _can_be_overwritten(module, source):
        return  # other nodes may use the tensor that this ReLU overwrites
    while (pool := _get_only_user(relu)) and _is_only_user(relu) and _is_maximum(_get_layer(module, pool)):
        pool.replace_input_with(relu, source)
        pool.replace_all_uses_with(relu)
        relu.replace_input_with(source, pool)
        pool.append(relu)
        source = pool


def _is_maximum(layer: nn.Module | None) -> bool:
    """Return whether a layer only computes maxima, so that it may be exchanged with a ReLU before it."""
    if isinstance(layer, nn.MaxPool2d):
        return not layer.return_indices
    return isinstance(layer, OrientationPool2d) and layer.mode == "max"


def _can_be_overwritten(module: fx.GraphModule, node: object) -> bool:
    """Return whether the output of a node is a new tensor (not a view) that at most one other node reads."""
    if not isinstance(node, fx.Node) or len(node.users) > 1:
        return False
    return isinstance(_get_layer(module, node), ALLOCATING_LAYERS) or node.target in ALLOCATING_FUNCTIONS


def _get_only_user(node: fx.Node) -> fx.Node | None:
    """Return the only node that reads the output of a node, or None if no node or several nodes read it."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def _is_only_user(node: fx.Node) -> bool:
    """Return whether no other node than `node` reads the first input of `node`."""
    return _get_only_user(node.all_input_nodes[0]) is node


def _get_layer(module: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    return module.get_submodule(str(node.target)) if node.op == "call_module" else None


def _erase(module: fx.GraphModule, node: fx.Node) -> None:
    """Remove a node from the graph, and connect all nodes that read its output to its first input instead."""
    node.replace_all_uses_with(node.all_input_nodes[0])
    module.graph.erase_node(node)


def _as_sequential(module: fx.GraphModule) -> nn.Module:
    """Return the layers as an nn.Sequential if they form a chain, otherwise return the graph module itself."""
    first, *nodes, last = module.graph.nodes
    before = first
    for node in (*nodes, last):
        if node.args != (before,) or node.kwargs or node.op not in ("call_module", "output"):
            return module
        before = node
    return nn.Sequential(OrderedDict((str(node.target), module.get_submodule(str(node.target))) for node in nodes))


@contextmanager
def _autocast_disabled() -> Iterator[None]:
    """Return a context manager that disables autocast, so that kernels are rotated in the dtype of their weights."""
    with ExitStack() as stack:
        for device in active_autocasts():
            stack.enter_context(torch.autocast(device, enabled=False))
        yield
