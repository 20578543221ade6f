"""Translate the graph of a module with SE(2) features (B, C, N, H, W) to plain layers on tensors (B, C·N, H, W).

`Translator` takes a module in evaluation mode and returns a graph module that computes the same. If a layer or function
has no plain counterpart, `Translator` raises ValueError with the name of this layer or function.

The *old graph* is the traced graph of the module; its nodes are *old nodes*. The *new graph* calls plain layers (module
`plain_layers`); its nodes are *new nodes*. A node is one call of a layer, function or method. N is the length of the
orientation axis of SE(2) features.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rotopath.models.freeze.plain_layers import GROUP_LAYERS, CenterCrop2d, replace_group_layer, replace_image_layer
from rotopath.models.network import ArchitectureNetwork
from rotopath.models.trace import (
    CONCATENATIONS,
    POINTWISE_FUNCTIONS,
    POINTWISE_METHODS,
    RELUS,
    get_attribute,
    is_size,
    scope_of,
    trace_graph,
)
from rotopath.nn import GroupConv2d, GroupConvTranspose2d, LiftConv2d, center_crop, concatenate
from rotopath.nn.pool import pad_evenly, reduce_channels, resize, shuffle_channels, take_channels

CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
# Functions of rp.nn that check sizes → functions of torch that compute the same without checks.
UNCHECKED_FUNCTIONS: dict[object, Callable[..., Any]] = {resize: F.interpolate, pad_evenly: F.pad}
UNKNOWN_EFFECT = (
    "the effect of this call on SE(2) features is not known; use layers and functions of rp.nn instead, or freeze the "
    "modules before and after this call separately"
)


class Translator:
    """Translate a module: visit the nodes of the old graph in order, and write the new graph.

    `freeze_network` is a function that freezes one of the paper's networks. It is called for each network of the paper
    inside the module.

    For each old node that calls a network of the paper, `networks` contains the frozen network. For each old node,
    `values` contains the new value, which replaces the output of the old node in the new graph: a new node, a number,
    or a tuple of new nodes and numbers (the size of SE(2) features). For each old node that returns SE(2) features,
    `orientations` contains N of these features.
    """

    def __init__(self, model: nn.Module, freeze_network: Callable[[ArchitectureNetwork], nn.Module]) -> None:
        self.model = model
        self.freeze_network = freeze_network
        self.graph = fx.Graph()
        self.layers = nn.Module()
        self.networks: dict[fx.Node, nn.Module] = {}
        self.values: dict[fx.Node, Any] = {}
        self.orientations: dict[fx.Node, int] = {}

    def translate(self) -> fx.GraphModule:
        """Return the new graph with its plain layers. Raises ValueError if a node cannot be translated."""
        nodes = trace_graph(self.model).nodes
        # Networks of the paper are frozen outside the `try` below, because their error messages already name the layer.
        for node in nodes:
            if isinstance(network := self._layer(node), ArchitectureNetwork):
                self.networks[node] = self.freeze_network(network)
        for node in nodes:
            try:
                self.values[node] = getattr(self, f"_translate_{node.op}")(node)
            except ValueError as error:
                scope = f" in {scope_of(node)}" if scope_of(node) else ""
                raise ValueError(f"freeze() cannot translate {node.name!r}{scope}: {str(error).rstrip('.')}.") from None
        return fx.GraphModule(self.layers, self.graph, f"Frozen{type(self.model).__name__}")

    # `translate` calls the next six methods by name. There is one method for each type of old node (`node.op`). Each
    # returns the new value of the node (`values`).

    def _translate_placeholder(self, node: fx.Node) -> Any:
        value = self.graph.node_copy(node, self._new)
        orientations = self._find_input_orientations(node)
        if orientations is None:
            return value
        self.orientations[node] = orientations
        return self.graph.call_method("flatten", (value, 1, 2))  # copies nothing if the features are channels-last

    def _translate_get_attr(self, node: fx.Node) -> Any:
        tensor = get_attribute(self.model, str(node.target))
        self.layers.register_buffer(name := _unused_name(node.name), tensor.detach().clone())
        return self.graph.get_attr(name)

    def _translate_call_module(self, node: fx.Node) -> Any:
        layer = self.model.get_submodule(str(node.target))
        orientations = self._input_orientations(node)
        if isinstance(layer, ArchitectureNetwork):
            if orientations is not None:
                raise ValueError(
                    f"{layer.architecture.name} expects images, but got SE(2) features; apply the network to images"
                )
            return self._call_layer(self.networks[node], node)
        if orientations is None:
            plain, output_orientations = replace_image_layer(layer)
        else:
            plain, output_orientations = replace_group_layer(layer, orientations)
        self._set_orientations(node, output_orientations)
        if type(plain) is nn.Identity:
            return self._new(node.all_input_nodes[0])
        return self._call_layer(plain, node)

    def _translate_call_function(self, node: fx.Node) -> Any:
        orientations = self._input_orientations(node)
        if node.target is getattr and orientations is not None:
            if node.args[1] == "shape":
                return self._feature_shape(node.all_input_nodes[0])
            if node.args[1] in ("dtype", "device"):
                return self.graph.node_copy(node, self._new)
        if node.target is operator.getitem and isinstance(sizes := self._new(node.args[0]), tuple):
            return sizes[node.args[1]]  # type: ignore[index]
        if node.target is center_crop:
            self._set_orientations(node, orientations)
            return self._call_layer(CenterCrop2d(), node)
        if node.target in UNCHECKED_FUNCTIONS:
            self._set_orientations(node, orientations)
            function = UNCHECKED_FUNCTIONS[node.target]
            return self.graph.call_function(function, self._new(node.args), self._new(node.kwargs))
        if node.target in RELUS:
            in_place = RELUS[node.target] or node.kwargs.get("inplace", False) or True in node.args[1:]
            return self._call_relu(node, orientations, bool(in_place))
        if node.target in (take_channels, shuffle_channels, reduce_channels):
            return self._select_channels(node, orientations)
        if orientations is None:
            if node.target is concatenate:
                raise ValueError(
                    "rp.nn.concatenate() expects SE(2) features, but got images or projected maps; use torch.cat()"
                )
            return self.graph.node_copy(node, self._new)
        if node.target is concatenate or node.target in CONCATENATIONS:
            return self._concatenate(node, orientations)
        if node.target is operator.getitem:
            return self._slice_pixels(node, orientations)
        if node.target not in POINTWISE_FUNCTIONS:
            raise ValueError(UNKNOWN_EFFECT)
        return self._apply_pointwise(node, orientations)

    def _translate_call_method(self, node: fx.Node) -> Any:
        if node.target in CASTS:
            return self._cast(node)
        orientations = self._input_orientations(node)
        if node.target in RELUS:
            return self._call_relu(node, orientations, RELUS[node.target])
        if orientations is None:
            return self.graph.node_copy(node, self._new)
        if node.target == "size":
            sizes = self._feature_shape(node.all_input_nodes[0])
            return sizes[node.args[1]] if len(node.args) > 1 else sizes  # type: ignore[index]
        if node.target == "contiguous":  # dropped, because plain layers choose their memory layout
            self._set_orientations(node, orientations)
            return self._new(node.args[0])
        if node.target not in POINTWISE_METHODS:
            raise ValueError(UNKNOWN_EFFECT)
        return self._apply_pointwise(node, orientations)

    def _translate_output(self, node: fx.Node) -> Any:
        def unflatten_features(output: fx.Node) -> Any:
            value = self._new(output)
            if output not in self.orientations:
                return value
            return self.graph.call_method("unflatten", (value, 1, [-1, self.orientations[output]]))

        return self.graph.output(fx.map_arg(node.args[0], unflatten_features))

    # Nodes of the new graph

    def _new(self, old: Any) -> Any:
        """Return `old`, arguments of a node of the old graph, with each old node replaced by its new value."""
        return fx.map_arg(old, lambda node: self.values[node])

    def _call_layer(self, layer: nn.Module, node: fx.Node) -> fx.Node:
        """Add a plain layer with the name of the old node `node`, and return a new node that calls this layer.

        The layer is called with the new values of the old node's arguments.
        """
        self.layers.add_module(name := _unused_name(node.name), layer)
        args, kwargs = self._new(node.args), self._new(node.kwargs)
        if len(args) + len(kwargs) == 1:  # pass by position: the plain layer may use another argument name
            args, kwargs = (*args, *kwargs.values()), {}
        return self.graph.call_module(name, args, kwargs)

    def _call_relu(self, node: fx.Node, orientations: int | None, in_place: bool) -> fx.Node:
        self._set_orientations(node, orientations)
        self.layers.add_module(name := _unused_name(node.name), nn.ReLU(in_place))
        return self.graph.call_module(name, (self._new(node.all_input_nodes[0]),))

    def _cast(self, node: fx.Node) -> fx.Node:
        """Translate a method call that changes the dtype or the device of a tensor, and keeps its orientations."""
        orientations = self.orientations.get(node.all_input_nodes[0])
        self._set_orientations(node, orientations)
        kwargs = dict(node.kwargs)
        if orientations is not None:
            kwargs.pop("memory_format", None)  # was meant for five axes, but tensors of plain layers have four
        return self.graph.call_method(str(node.target), self._new(node.args), self._new(kwargs))

    def _concatenate(self, node: fx.Node, orientations: int) -> fx.Node:
        parts = node.args[0] if node.args else next(iter(node.kwargs.values()))
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) if node.target is not concatenate else 1
        if dim not in (1, -4):
            raise ValueError(
                f"this call concatenates along axis {dim}, but SE(2) features must be concatenated along axis 1, the "
                f"channels"
            )
        self._expect_equal_orientations(node)
        self._set_orientations(node, orientations)
        return self.graph.call_function(torch.cat, (self._new(parts),), {"dim": 1})

    def _select_channels(self, node: fx.Node, orientations: int | None) -> fx.Node:
        """Translate a function of rp.nn that takes, shuffles or reduces channels, with its arguments by position."""
        x, *arguments = self._new(node.args)
        self._set_orientations(node, orientations)
        n = orientations or 1
        if node.target is take_channels:
            first, count = arguments
            return self.graph.call_method("narrow", (x, 1, first * n, count * n))
        split = self.graph.call_method("unflatten", (x, 1, [-1, n]))  # (B, C, N, H, W)
        if node.target is reduce_channels:
            name = {"mean": "mean", "max": "amax"}[arguments[0]]
            return self.graph.call_method(name, (split, 1))  # (B, N, H, W)
        grouped = self.graph.call_method("unflatten", (split, 1, [arguments[0], -1]))
        return self.graph.call_method("flatten", (self.graph.call_method("transpose", (grouped, 1, 2)), 1, 3))

    def _slice_pixels(self, node: fx.Node, orientations: int) -> fx.Node:
        index: Any = node.args[1]
        is_spatial = isinstance(index, tuple) and len(index) == 3 and index[0] is ...
        if not is_spatial or not all(isinstance(part, slice) for part in index[1:]):
            raise ValueError(
                "SE(2) features can only be sliced along rows and columns; use x[..., top:bottom, left:right]"
            )
        self._set_orientations(node, orientations)
        return self.graph.node_copy(node, self._new)

    def _apply_pointwise(self, node: fx.Node, orientations: int) -> fx.Node:
        self._expect_equal_orientations(node)
        self._set_orientations(node, orientations)
        features = [source for source in node.all_input_nodes if source in self.orientations]
        if len({self._has_single_channel(source) for source in features}) == 1:
            return self.graph.node_copy(node, self._new)
        # Some features have one channel, (B, 1, N, H, W), and others have several. To broadcast the single channel, the
        # orientation axis must be separate from the channels.
        unflattened = {
            source: self.graph.call_method("unflatten", (self._new(source), 1, [-1, orientations]))
            for source in features
        }
        result = self.graph.node_copy(node, lambda source: unflattened.get(source, self._new(source)))
        return self.graph.call_method("flatten", (result, 1, 2))

    def _feature_shape(self, node: fx.Node) -> tuple[Any, ...]:
        """Return the shape (B, C, N, H, W) of the SE(2) features that an old node returns, for use in the new graph.

        N is a number. B, C, H and W are new nodes that compute these sizes from the tensor (B, C·N, H, W).
        """
        n = self.orientations[node]
        batch, maps, height, width = (self.graph.call_method("size", (self._new(node), i)) for i in range(4))
        return batch, self.graph.call_function(operator.floordiv, (maps, n)), n, height, width

    # Properties of old nodes

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _input_orientations(self, node: fx.Node) -> int | None:
        """Return N of the first SE(2) features among the inputs of a node, or None if no input is SE(2) features."""
        return next((self.orientations[source] for source in node.all_input_nodes if source in self.orientations), None)

    def _set_orientations(self, node: fx.Node, orientations: int | None) -> None:
        if orientations is not None:
            self.orientations[node] = orientations

    def _find_input_orientations(self, node: fx.Node) -> int | None:
        """Return N of an input of the model if this input consists of SE(2) features, or None if it is an image.

        `node` is the old node of the input. The layers that read the input determine whether it is an image. N is read
        from the SE(2) convolutions of the model. Raises ValueError if they do not all have the same N, or if there are
        none.
        """
        users = [node]
        for user in users:  # the list grows during the loop, nearest nodes first
            layer = self._layer(user)
            if isinstance(layer, LiftConv2d | ArchitectureNetwork):
                return None
            if isinstance(layer, GROUP_LAYERS) or user.target is concatenate:
                orders = {
                    m.order
                    for m in self.model.modules()
                    if isinstance(m, LiftConv2d | GroupConv2d | GroupConvTranspose2d)
                }
                if len(orders) != 1:
                    convolutions = f"convolutions with {' and '.join(map(str, sorted(orders)))} orientations"
                    raise ValueError(
                        f"the number of orientations of this input of the model cannot be determined, because the "
                        f"model has {convolutions if orders else 'no SE(2) convolution'}; freeze a larger module that "
                        f"also contains the layers that compute this input"
                    )
                return int(orders.pop())
            if not is_size(user):
                following = [other for other in sorted(user.users) if not _reads_only_type(other, user)]
                users += [other for other in following if other not in users]
        return None

    def _has_single_channel(self, node: fx.Node) -> bool:
        """Return whether an old node returns SE(2) features with a single channel, (B, 1, N, H, W)."""
        layer = self._layer(node)
        if isinstance(layer, LiftConv2d | GroupConv2d | GroupConvTranspose2d):
            return layer.out_channels == 1
        if node.target in (take_channels, reduce_channels):
            return node.target is reduce_channels or bool(node.args[2] == 1)
        sources = [source for source in node.all_input_nodes if source in self.orientations]
        sources = [source for source in sources if not _reads_only_type(node, source)]
        is_joined = node.target in (concatenate, torch.cat)
        return bool(sources) and not is_joined and all(map(self._has_single_channel, sources))

    def _expect_equal_orientations(self, node: fx.Node) -> None:
        tensors = [source for source in node.all_input_nodes if not is_size(source) and not self._is_number(source)]
        orders = {self.orientations.get(source, 0) for source in tensors}  # 0: no SE(2) features
        if len(orders) > 1 and 0 in orders:
            raise ValueError(
                "this call combines SE(2) features with a tensor without orientations; apply LiftConv2d to the tensor, "
                "or Project to the features"
            )
        if len(orders) > 1:
            numbers = " and ".join(map(str, sorted(orders)))
            raise ValueError(
                f"this call combines SE(2) features with {numbers} orientations; build all layers with the same number "
                f"of orientations"
            )

    def _is_number(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and bool(self.layers.get_buffer(str(self.values[node].target)).numel() == 1)


def _reads_only_type(node: fx.Node, source: fx.Node) -> bool:
    """Return whether a node reads only the dtype or device of its input `source`.

    Examples are `source.dtype` and `y.to(source)`.
    """
    if node.target is getattr:
        return node.args[1] in ("dtype", "device")
    return node.op == "call_method" and node.target in CASTS and node.args[0] is not source


def _unused_name(name: str) -> str:
    """Return a name for a layer: `name`, or `name` + "_layer" if fx.GraphModule or nn.Sequential has that attribute."""
    return f"{name}_layer" if hasattr(fx.GraphModule, name) or hasattr(nn.Sequential, name) else name
