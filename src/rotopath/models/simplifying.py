"""A graph of plain layers, with fewer and cheaper passes over memory and the same answers.

In: a graph module whose layers are each called once. Out: the same module, changed.
"""

import operator
from collections.abc import Callable

import torch
from torch import fx, nn

from rotopath.models.plain import OrientationPool2d, Scale2d
from rotopath.models.replacing import fold

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
