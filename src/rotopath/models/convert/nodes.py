"""Classify the nodes of a plain network, and choose where the converted network lifts images and projects features.

A node is one call of a layer, function or method in the graph that torch.fx traced. Lifting computes features with N
orientations from an image. The projection reduces features over their orientations, for example to the maximum.

`classify_node` returns the `Operation` of a node, such as a convolution, a pool or a pointwise function. It raises
ValueError if the behavior of the node under rotation is not known. `assign_kinds` then chooses the `ValueKind` of each
node's output: an image that is not lifted yet, SE(2) features, values without orientations, or a number.
"""

import inspect
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.trace import (
    CONCATENATIONS,
    DROPOUTS,
    POINTWISE_FUNCTIONS,
    POINTWISE_LAYERS,
    POINTWISE_METHODS,
    RELUS,
    get_attribute,
    is_size,
)
from rotopath.nn import ChannelNorm2d, ChannelScale, GroupFilter2d, StochasticDepth, center_crop
from rotopath.nn.pool import reduce_channels, shuffle_channels, take_channels

# Role of each layer of torch in the conversion. Functions have further roles, such as "pad" (`classify_node`).
LAYER_ROLES: dict[type[nn.Module] | tuple[type[nn.Module], ...], str] = {
    nn.Conv2d: "convolution",
    nn.ConvTranspose2d: "transposed",
    (nn.BatchNorm2d, nn.GroupNorm, nn.InstanceNorm2d, ChannelNorm2d): "norm",
    (nn.MaxPool2d, nn.AvgPool2d, GroupFilter2d): "window",
    (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d): "adaptive",
    (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d): "resize",
    (*POINTWISE_LAYERS, nn.PReLU, nn.Identity, ChannelScale): "pointwise",
    (*DROPOUTS, StochasticDepth): "dropout",
    nn.Flatten: "flatten",
    nn.Linear: "linear",
    (nn.Softmax, nn.Softmax2d, nn.LogSoftmax, nn.BatchNorm1d, nn.LayerNorm): "plain",
}
LAYER_OF_FUNCTION: dict[Callable[..., Any], type[nn.Module]] = {
    F.max_pool2d: nn.MaxPool2d,
    torch.max_pool2d: nn.MaxPool2d,
    F.avg_pool2d: nn.AvgPool2d,
    F.adaptive_avg_pool2d: nn.AdaptiveAvgPool2d,
    F.adaptive_max_pool2d: nn.AdaptiveMaxPool2d,
    F.dropout: nn.Dropout,
    F.dropout2d: nn.Dropout2d,
}
# Functions that take, reorder or reduce channels, and thus commute with rotation → role.
CHANNEL_FUNCTIONS = {take_channels: "take", shuffle_channels: "shuffle", reduce_channels: "reduce"}
GLOBAL_POOLS = {"mean": nn.AdaptiveAvgPool2d, "amax": nn.AdaptiveMaxPool2d}  # mean or maximum over all positions
PLAIN_FUNCTIONS = ("softmax", "log_softmax", "argmax", "squeeze", "normalize")  # for values without orientations
FLATTEN_FUNCTIONS = ("flatten", "view", "reshape")
PLAIN_ROLES = ("flatten", "linear", "plain", "output")  # roles that need values without orientations
# Roles of operations that are equivariant both before and after the projection.
MOVABLE_ROLES = ("pointwise", "dropout", "norm", "adaptive", "resize", "pad", "crop", "take", "shuffle")
# Roles of operations that commute with a mean over orientations, because they are linear (in evaluation mode).
LINEAR_ROLES = ("dropout", "adaptive", "resize", "pad", "crop", "take", "shuffle")


class ValueKind(Enum):
    """What a node of the graph returns: an image, SE(2) features, values without orientations, or a number."""

    IMAGE = "image"  # an image, or maps computed from it before lifting
    FEATURES = "features"  # SE(2) features, with an orientation axis
    PLAIN = "plain"  # maps or vectors after the projection, without an orientation axis
    NUMBER = "number"  # a size or a constant


class Operation(NamedTuple):
    """What a node does.

    `role` is one of the words in `LAYER_ROLES`, such as "convolution", or another word that `classify_node` sets, such
    as "pad". `layer` is the layer that the node calls. For some functions, it is a layer with the same output as the
    function. For all other nodes, `layer` is None. `constant` is the parameter or buffer of the module that the node
    reads; None for all other nodes.
    """

    role: str
    layer: nn.Module | None = None
    constant: Tensor | None = None

    def is_pointwise_conv(self) -> bool:
        """Return whether the operation is a 1 × 1 convolution with stride 1 and without padding.

        Such a convolution computes each output pixel from one input pixel, and therefore commutes with rotation.
        """
        conv = self.layer
        if not isinstance(conv, nn.Conv2d) or conv.padding not in ("same", "valid", (0, 0)):
            return False
        return set(conv.kernel_size) == set(conv.stride) == {1}


def classify_node(node: fx.Node, model: nn.Module) -> Operation:
    """Return the operation of a node in the graph of `model`.

    Raises ValueError if the behavior of the node under rotation is not known.
    """
    if node.op in ("placeholder", "output"):
        return Operation(node.op)
    if node.op == "get_attr":
        return _classify_constant(node, model)
    if node.op == "call_module":
        return _classify_layer(model.get_submodule(str(node.target)))
    if is_size(node):
        return Operation("size")
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    pointwise = POINTWISE_FUNCTIONS if node.op == "call_function" else POINTWISE_METHODS
    if node.target in LAYER_OF_FUNCTION:
        return _classify_layer(_make_layer(node))
    if node.target is F.interpolate:
        return _classify_resize(node.kwargs.get("size", node.args[1] if len(node.args) > 1 else None), node.kwargs)
    if node.target is F.pad:
        return _classify_pad(node)
    if node.target in CONCATENATIONS:
        return Operation("concatenation")
    if node.target is center_crop:
        return Operation("crop")
    if node.target in CHANNEL_FUNCTIONS:
        return Operation(CHANNEL_FUNCTIONS[node.target])
    if node.target in RELUS or node.target in pointwise:
        return Operation("pointwise")
    if name in GLOBAL_POOLS and _reduces_height_and_width(node):
        keeps_axes = node.kwargs.get("keepdim", len(node.args) > 2 and node.args[2])
        return Operation("adaptive", GLOBAL_POOLS[name](1)) if keeps_axes else Operation("plain")
    if name in FLATTEN_FUNCTIONS and _flattens_to_vectors(node):
        return Operation("flatten")
    if name in PLAIN_FUNCTIONS:
        return Operation("plain")
    raise ValueError(
        "its behavior under rotation of the image is not known; use only the layers and functions listed in "
        "docs/equivariant.md"
    )


def assign_kinds(operations: Mapping[fx.Node, Operation], linear_head: bool = False) -> dict[fx.Node, ValueKind]:
    """Return the kind of each node's output, which determines where images are lifted and features are projected.

    A convolution that reads an image lifts it to features, unless the convolution is 1 × 1 with stride 1 and without
    padding. The projection comes as late as possible: before operations that need values without orientations, such as
    `Linear`, or before the output. There are two exceptions:

    - An adaptive pool near the end, such as a mean over all positions, comes after the projection. The orientations are
      then reduced at each position separately.
    - A 1 × 1 convolution near the end comes after the projection if no other convolution and no `Linear` follows it,
      because this convolution is then the classifier.

    With `linear_head`, only operations that commute with a mean over orientations come after the projection. The
    network then computes the mean of its outputs over orientations.

    Raises ValueError if no convolution lifts the image.
    """
    kinds: dict[fx.Node, ValueKind] = {}
    for node, operation in operations.items():
        kinds[node] = _kind_if_projected_late(node, operation, kinds)
    if ValueKind.FEATURES not in kinds.values():
        raise ValueError(
            "equivariant() needs a convolution larger than 1×1 that reads the image, but the module has none; add such "
            "a convolution, or use the module without conversion."
        )
    for node in reversed(kinds):
        is_last = all(kinds[user] is ValueKind.PLAIN for user in _value_users(node, kinds))
        if kinds[node] is ValueKind.FEATURES and is_last:
            for head in _find_head(node, operations, kinds, linear_head):
                kinds[head] = ValueKind.PLAIN
    return kinds


def _kind_if_projected_late(node: fx.Node, operation: Operation, kinds: Mapping[fx.Node, ValueKind]) -> ValueKind:
    """Return the kind of a node's output if the projection comes as late as possible.

    The result does not include the two exceptions of `assign_kinds`. `kinds` contains the kinds of the outputs of all
    nodes before this node in the graph.
    """
    input_kinds = {kinds[source] for source in node.all_input_nodes} - {ValueKind.NUMBER}
    if operation.role in ("size", "constant"):
        return ValueKind.NUMBER
    if operation.role == "placeholder":
        return ValueKind.IMAGE
    if not input_kinds:
        return ValueKind.NUMBER
    if operation.role in PLAIN_ROLES or ValueKind.PLAIN in input_kinds or len(input_kinds) > 1:
        return ValueKind.PLAIN
    lifts = operation.role in ("convolution", "transposed") and not operation.is_pointwise_conv()
    return ValueKind.FEATURES if lifts else input_kinds.pop()


def _find_head(
    last: fx.Node, operations: Mapping[fx.Node, Operation], kinds: Mapping[fx.Node, ValueKind], is_linear: bool
) -> list[fx.Node]:
    """Return the nodes that `assign_kinds` moves after the projection; an empty list if no node is moved.

    `last` is a node directly before a projection. The list starts with `last` and goes backward through the graph: each
    further node computes the input of the node before it in the list. The list ends with the adaptive pool or the
    classifier (the last 1 × 1 convolution). If both are moved, it ends with the one that the network calls first. If
    `is_linear`, only linear operations are moved.
    """
    has_classifier = any(_is_linear_map(operations[node]) for node in _descendants(last) if node in operations)
    chain: list[fx.Node] = []
    length = 0  # number of nodes in the chain that are moved
    node = last
    while all(user in chain or kinds[user] is ValueKind.PLAIN for user in _value_users(node, kinds)):
        operation = operations[node]
        is_classifier = operation.is_pointwise_conv() and not has_classifier
        if operation.role not in (LINEAR_ROLES if is_linear else MOVABLE_ROLES) and not is_classifier:
            break
        if is_linear and isinstance(operation.layer, nn.AdaptiveMaxPool2d):
            break
        chain.append(node)
        if operation.role == "adaptive" or is_classifier:
            length = len(chain)
        has_classifier = has_classifier or is_classifier
        sources = [source for source in node.all_input_nodes if kinds[source] is ValueKind.FEATURES]
        if len(sources) != 1:
            break
        node = sources[0]
    return chain[:length]


def _is_linear_map(operation: Operation) -> bool:
    return isinstance(operation.layer, nn.Linear | nn.Conv2d)


def _value_users(node: fx.Node, kinds: Mapping[fx.Node, ValueKind]) -> list[fx.Node]:
    """Return the nodes that read the output of `node`, without nodes that read only the size of this output."""
    return [user for user in node.users if kinds[user] is not ValueKind.NUMBER]


def _descendants(node: fx.Node) -> set[fx.Node]:
    """Return all nodes whose values depend on the output of a node."""
    descendants: set[fx.Node] = set()
    stack = list(node.users)
    while stack:
        if (user := stack.pop()) not in descendants:
            descendants.add(user)
            stack += user.users
    return descendants


# Classification of layers and functions


def _classify_layer(layer: nn.Module) -> Operation:
    for layer_types, role in LAYER_ROLES.items():
        if isinstance(layer, layer_types):
            if nn.utils.parametrize.is_parametrized(layer):
                raise ValueError(
                    "its weights are parametrized; call torch.nn.utils.parametrize.remove_parametrizations first"
                )
            if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) != (1, -1):
                raise ValueError(
                    f"it flattens axes {layer.start_dim} to {layer.end_dim}, but it must flatten all axes except the "
                    f"batch axis; use Flatten()"
                )
            if getattr(layer, "return_indices", False):
                raise ValueError("it returns indices, which is not supported; use return_indices=False")
            if role == "resize":
                return _classify_resize(layer.size, vars(layer), layer)
            return Operation(role, layer)
    if type(layer).__module__.startswith("rotopath."):
        raise ValueError("it is already a layer of rotopath; pass a module with torch layers only")
    raise ValueError(
        f"{type(layer).__name__} has no SE(2) counterpart; replace this layer by one listed in docs/equivariant.md, or "
        f"apply it outside the converted module"
    )


def _classify_resize(size: Any, options: Mapping[str, Any], layer: nn.Module | None = None) -> Operation:
    """Return the operation of `F.interpolate` or of an up-sampling layer, after checks of its options.

    `size` is the option `size`, or None. `options` may contain "scale_factor" and "antialias". `layer` is None for
    `F.interpolate`. Raises ValueError if the options are not equivariant or not supported.
    """
    for value in (size, options.get("scale_factor")):
        numbers = _as_tuple(value)
        if all(isinstance(number, int | float) for number in numbers) and len(set(numbers)) > 1:
            raise ValueError(
                f"its size or scale_factor is {numbers}, which is not symmetric under rotation; use the same value for "
                f"height and width"
            )
    if options.get("antialias"):
        raise ValueError("antialias=True is not supported; use a pool to reduce the image")
    return Operation("resize", layer)


def _classify_pad(node: fx.Node) -> Operation:
    margins = node.args[1] if len(node.args) > 1 else node.kwargs["pad"]
    if not isinstance(margins, tuple | list) or len(margins) != 4:
        raise ValueError("only padding of height and width is supported; use pad(x, (left, right, top, bottom))")
    if all(isinstance(margin, int) for margin in margins) and len(set(margins)) > 1:
        raise ValueError(
            f"it pads by {tuple(margins)} px (left, right, top, bottom), which is not symmetric under rotation; use "
            f"the same padding on all sides"
        )
    return Operation("pad")


def _classify_constant(node: fx.Node, model: nn.Module) -> Operation:
    """Return the operation of a node that reads a parameter or buffer of `model`, which must be a single number."""
    constant = get_attribute(model, str(node.target))
    if constant.numel() != 1:
        raise ValueError(
            f"it is a tensor of shape {tuple(constant.shape)} that forward() reads directly; use a tensor with a "
            f"single number, or a layer such as a norm"
        )
    return Operation("constant", constant=constant)


def _make_layer(node: fx.Node) -> nn.Module:
    """Return a layer with the same output as the function that `node` calls, which must be in `LAYER_OF_FUNCTION`."""
    layer_type = LAYER_OF_FUNCTION[node.target]  # type: ignore[index]
    arguments = dict(zip(_parameter_names(node.target), node.args[1:], strict=False)) | dict(node.kwargs)
    known = inspect.signature(layer_type).parameters
    options = {name: value for name, value in arguments.items() if name in known and name != "input"}
    if any(isinstance(part, fx.Node) for value in options.values() for part in _as_tuple(value)):
        raise ValueError("its window depends on the size of the input; use a fixed kernel size, or an adaptive pool")
    return layer_type(**options)


def _parameter_names(function: object) -> list[str]:
    """Return the names of the parameters of a function in `LAYER_OF_FUNCTION`, without the first, which is the input.

    The names are written here, because `inspect` cannot read them from built-in functions.
    """
    if function in (F.dropout, F.dropout2d):
        return ["p", "training", "inplace"]
    if function is F.avg_pool2d:
        return ["kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"]
    if function in (F.adaptive_avg_pool2d, F.adaptive_max_pool2d):
        return ["output_size", "return_indices"]
    return ["kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"]


def _reduces_height_and_width(node: fx.Node) -> bool:
    """Return whether a node, which calls mean or amax, reduces the axes of height and width and no others."""
    dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return set(_as_tuple(dim)) in ({2, 3}, {-1, -2})


def _flattens_to_vectors(node: fx.Node) -> bool:
    """Return whether a node, which calls flatten, view or reshape, flattens (B, C, H, W) to (B, K)."""
    if node.target is torch.flatten or node.target == "flatten":
        start = node.kwargs.get("start_dim", node.args[1] if len(node.args) > 1 else 0)
        return bool(start == 1 and node.kwargs.get("end_dim", -1) == -1 and len(node.args) < 3)
    shape = node.args[1] if len(node.args) == 2 else node.args[1:]
    return isinstance(shape, tuple | list) and len(shape) == 2


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
