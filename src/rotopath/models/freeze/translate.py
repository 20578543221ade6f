"""The graph of a module that works on SE(2) features, as one that works on ordinary tensors (B, C·N, H, W).

In: a module in evaluation mode. Out: a graph module of plain layers, step by step the same; or one sentence about the
first step that has no such counterpart.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from rotopath.models.freeze.plain_layers import GROUP_LAYERS, CenterCrop2d, replace_group_layer, replace_image_layer
from rotopath.models.network import Network
from rotopath.models.trace import follow
from rotopath.nn import GroupConv2d, LiftConv2d, center_crop, concatenate
from rotopath.nn.resize import pad_evenly, resize

# What acts on every number by itself, so that (B, C, N, H, W) and (B, C·N, H, W) are alike to it.
POINTWISE = {
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.pos),
    *(operator.iadd, operator.isub, operator.imul, operator.itruediv),
    *(torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.abs, torch.exp, torch.square, torch.sqrt),
    *(torch.sigmoid, torch.tanh, torch.clamp, torch.maximum, torch.minimum, torch.clone, torch.detach),
    *(F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.mish, F.relu6, F.selu, F.silu),
    *(F.softplus, F.sigmoid, F.tanh),
}
POINTWISE_METHODS = {
    *("add", "sub", "mul", "div", "neg", "abs", "exp", "square", "sqrt", "sigmoid", "tanh", "clamp", "maximum"),
    *("add_", "sub_", "mul_", "div_", "neg_", "sigmoid_", "tanh_", "clamp_", "minimum", "clone", "detach"),
}
CASTS = ("to", "type", "type_as", "float", "half", "bfloat16", "double")
UNCHECKED: dict[object, Callable[..., Any]] = {resize: F.interpolate, pad_evenly: F.pad}
RELUS = {torch.relu: False, F.relu: False, torch.relu_: True, F.relu_: True, "relu": False, "relu_": True}  # in place?


class Translator:
    """Goes through the graph of a module, and puts the plain layer of each step into a new one.

    What stands for a value is a node of the new graph, a number, or a tuple of those; `self.turned` knows for which
    values the axis of channels holds orientations too, and how many.
    """

    def __init__(self, model: nn.Module, freeze_network: Callable[[Network], nn.Module]) -> None:
        self.model = model
        self.freeze_network = freeze_network
        self.graph = fx.Graph()
        self.layers = nn.Module()
        self.networks: dict[fx.Node, nn.Module] = {}
        self.values: dict[fx.Node, Any] = {}
        self.turned: dict[fx.Node, int] = {}

    def translate(self) -> fx.GraphModule:
        nodes = follow(self.model).nodes
        for node in nodes:  # networks first: what cannot be frozen in them is said in a sentence of its own
            if isinstance(network := self._layer(node), Network):
                self.networks[node] = self.freeze_network(network)
        for node in nodes:
            try:
                self.values[node] = getattr(self, f"_{node.op}")(node)
            except ValueError as error:
                where = next(reversed(node.meta.get("nn_module_stack", {})), "")
                place = f" in {where}" if where else ""
                raise ValueError(
                    f"freeze cannot carry over {node.name!r}{place}: {str(error).rstrip('.')}; use layers and "
                    f"functions of rp.nn, or freeze the parts around it."
                ) from None
        return fx.GraphModule(self.layers, self.graph, f"Frozen{type(self.model).__name__}")

    def _placeholder(self, node: fx.Node) -> Any:
        given = self.graph.node_copy(node, self._new)
        orientations = self._expected_orientations(node)
        if orientations is None:
            return given
        self.turned[node] = orientations
        return self.graph.call_method("flatten", (given, 1, 2))  # a view of features that lie channels-last

    def _expected_orientations(self, node: fx.Node) -> int | None:
        """Those of an input that a layer of features is the first to read; none for images."""
        readers = [node]
        for reader in readers:  # grows as it goes
            layer = self._layer(reader)
            if isinstance(layer, LiftConv2d | Network):
                return None
            if isinstance(layer, GROUP_LAYERS) or reader.target is concatenate:
                known = {m.order for m in self.model.modules() if isinstance(m, LiftConv2d | GroupConv2d)}
                if len(known) != 1:
                    raise ValueError(
                        f"the number of orientations it has cannot be told from layers with {known or 'none'}"
                    )
                return int(known.pop())
            if not is_size(reader):
                users = [user for user in sorted(reader.users) if not _asks_for_type(user, reader)]
                readers += [user for user in users if user not in readers]
        return None

    def _get_attr(self, node: fx.Node) -> Any:
        found: Any = self.model
        for name in str(node.target).split("."):
            found = getattr(found, name)
        self.layers.register_buffer(name := _free(node.name), found.detach().clone())
        return self.graph.get_attr(name)

    def _call_module(self, node: fx.Node) -> Any:
        layer = self.model.get_submodule(str(node.target))
        orientations = self._orientations(node)
        if isinstance(layer, Network):
            if orientations is not None:
                raise ValueError("a network reads images, but is given SE(2) features")
            return self._call(self.networks[node], node)
        if orientations is None:
            plain, given = replace_image_layer(layer)
        else:
            plain, given = replace_group_layer(layer, orientations)
        if given is not None:
            self.turned[node] = given
        if type(plain) is nn.Identity:
            return self._new(node.all_input_nodes[0])
        return self._call(plain, node)

    def _call_function(self, node: fx.Node) -> Any:
        orientations = self._orientations(node)
        if node.target is getattr and orientations is not None:
            if node.args[1] == "shape":
                return self._shape(node.all_input_nodes[0])
            if node.args[1] in ("dtype", "device"):
                return self.graph.node_copy(node, self._new)
        if node.target is operator.getitem and isinstance(known := self._new(node.args[0]), tuple):
            return known[node.args[1]]  # type: ignore[index]
        if node.target is center_crop:
            self._keep(node, orientations)
            return self._call(CenterCrop2d(), node)
        if node.target in UNCHECKED:
            self._keep(node, orientations)
            return self.graph.call_function(UNCHECKED[node.target], self._new(node.args), self._new(node.kwargs))
        if node.target in RELUS:
            in_place = RELUS[node.target] or node.kwargs.get("inplace", False) or True in node.args[1:]
            return self._relu(node, orientations, bool(in_place))
        if orientations is None:
            if node.target is concatenate:
                raise ValueError("concatenate joins SE(2) features, but is given images")
            return self.graph.node_copy(node, self._new)
        if node.target in (concatenate, torch.cat, torch.concat, torch.concatenate):
            return self._concatenate(node, orientations)
        if node.target is operator.getitem:
            return self._crop(node, orientations)
        if node.target not in POINTWISE:
            raise ValueError("what it does to SE(2) features is not known")
        return self._act_on_each(node, orientations)

    def _call_method(self, node: fx.Node) -> Any:
        if node.target in CASTS:
            return self._cast(node)
        orientations = self._orientations(node)
        if node.target in RELUS:
            return self._relu(node, orientations, RELUS[node.target])
        if orientations is None:
            return self.graph.node_copy(node, self._new)
        if node.target == "size":
            sizes = self._shape(node.all_input_nodes[0])
            return sizes[node.args[1]] if len(node.args) > 1 else sizes  # type: ignore[index]
        if node.target == "contiguous":  # of layout alone, which is not the network's here
            self._keep(node, orientations)
            return self._new(node.args[0])
        if node.target not in POINTWISE_METHODS:
            raise ValueError("what it does to SE(2) features is not known")
        return self._act_on_each(node, orientations)

    def _output(self, node: fx.Node) -> Any:
        def unfold(each: fx.Node) -> Any:
            value = self._new(each)
            if each not in self.turned:
                return value
            return self.graph.call_method("unflatten", (value, 1, [-1, self.turned[each]]))  # a view

        return self.graph.output(fx.map_arg(node.args[0], unfold))

    def _relu(self, node: fx.Node, orientations: int | None, in_place: bool) -> fx.Node:
        self._keep(node, orientations)
        self.layers.add_module(name := _free(node.name), nn.ReLU(in_place))
        return self.graph.call_module(name, (self._new(node.all_input_nodes[0]),))

    def _cast(self, node: fx.Node) -> fx.Node:
        """Another precision or device. What is cast keeps its orientations, whichever tensor it is cast like."""
        orientations = self.turned.get(node.all_input_nodes[0])
        self._keep(node, orientations)
        kwargs = dict(node.kwargs)
        if orientations is not None:
            kwargs.pop("memory_format", None)  # of five axes, where there are four here
        return self.graph.call_method(str(node.target), self._new(node.args), self._new(kwargs))

    def _concatenate(self, node: fx.Node, orientations: int) -> fx.Node:
        parts = node.args[0] if node.args else next(iter(node.kwargs.values()))
        dim = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else 0) if node.target is not concatenate else 1
        if dim not in (1, -4):
            raise ValueError(f"SE(2) features are joined along their channels, axis 1, and not along axis {dim}")
        self._expect_alike(node)
        self._keep(node, orientations)
        return self.graph.call_function(torch.cat, (self._new(parts),), {"dim": 1})

    def _crop(self, node: fx.Node, orientations: int) -> fx.Node:
        index: Any = node.args[1]
        spatial = isinstance(index, tuple) and len(index) == 3 and index[0] is ...
        if not spatial or not all(isinstance(part, slice) for part in index[1:]):
            raise ValueError("of SE(2) features rows and columns may be cut, as by x[..., top:bottom, left:right]")
        self._keep(node, orientations)
        return self.graph.node_copy(node, self._new)

    def _act_on_each(self, node: fx.Node, orientations: int) -> fx.Node:
        self._expect_alike(node)
        self._keep(node, orientations)
        if len({self._is_single(each) for each in node.all_input_nodes if each in self.turned}) == 1:
            return self.graph.node_copy(node, self._new)
        # A single channel goes with every other one, orientation by orientation: (B, C, N, H, W) for a moment.
        unfolded = {
            each: self.graph.call_method("unflatten", (self._new(each), 1, [-1, orientations]))
            for each in node.all_input_nodes
            if each in self.turned
        }
        joined = self.graph.node_copy(node, lambda each: unfolded.get(each, self._new(each)))
        return self.graph.call_method("flatten", (joined, 1, 2))

    def _is_single(self, node: fx.Node) -> bool:
        """Whether features have one channel only."""
        layer = self._layer(node)
        if isinstance(layer, LiftConv2d | GroupConv2d):
            return layer.out_channels == 1
        read = [each for each in node.all_input_nodes if each in self.turned and not _asks_for_type(node, each)]
        return bool(read) and node.target not in (concatenate, torch.cat) and all(map(self._is_single, read))

    def _shape(self, node: fx.Node) -> tuple[Any, ...]:
        """The sizes (B, C, N, H, W), from those of (B, C·N, H, W)."""
        n = self.turned[node]
        batch, columns, height, width = (self.graph.call_method("size", (self._new(node), i)) for i in range(4))
        return batch, self.graph.call_function(operator.floordiv, (columns, n)), n, height, width

    def _call(self, layer: nn.Module, node: fx.Node) -> fx.Node:
        """A call of a layer of its own, named after the step that it replaces."""
        self.layers.add_module(name := _free(node.name), layer)
        args, kwargs = self._new(node.args), self._new(node.kwargs)
        if len(args) + len(kwargs) == 1:  # what the argument is called, is not the same in all layers
            args, kwargs = (*args, *kwargs.values()), {}
        return self.graph.call_module(name, args, kwargs)

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.model.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _orientations(self, node: fx.Node) -> int | None:
        """Of the SE(2) features that a step reads, if it does."""
        return next((self.turned[each] for each in node.all_input_nodes if each in self.turned), None)

    def _keep(self, node: fx.Node, orientations: int | None) -> None:
        if orientations is not None:
            self.turned[node] = orientations

    def _expect_alike(self, node: fx.Node) -> None:
        read = {
            self.turned.get(each) for each in node.all_input_nodes if not is_size(each) and not self._is_number(each)
        }
        if len(read) > 1:
            raise ValueError("it mixes SE(2) features with images, other tensors, or features of other orientations")

    def _is_number(self, node: fx.Node) -> bool:
        return node.op == "get_attr" and bool(self.layers.get_buffer(str(self.values[node].target)).numel() == 1)

    def _new(self, old: Any) -> Any:
        return fx.map_arg(old, lambda node: self.values[node])


def is_size(node: fx.Node) -> bool:
    """Whether a step gives sizes of tensors, or numbers computed from those alone."""
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return True
    read = node.all_input_nodes
    return getattr(node.target, "__module__", "") == "_operator" and bool(read) and all(map(is_size, read))


def _asks_for_type(node: fx.Node, of: fx.Node) -> bool:
    """Whether a step asks for the dtype or device of a tensor alone, as `x.dtype`, or `y.to(x)` of x."""
    if node.target is getattr:
        return node.args[1] in ("dtype", "device")
    return node.op == "call_method" and node.target in CASTS and node.args[0] is not of


def _free(name: str) -> str:
    """A name for a layer: its own, unless a module has something else by that name."""
    return f"{name}_layer" if hasattr(fx.GraphModule, name) or hasattr(nn.Sequential, name) else name
