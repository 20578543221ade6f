"""Trace a plain network, and rewrite its graph with a small set of layers and functions of torch.

Networks compute the same thing in many ways: timm has layers that normalize and activate, ConvNeXt applies `Linear` to
channels-last maps, gates of squeeze and excitation reshape vectors, ShuffleNet reshapes maps. `standardize` rewrites
all of these with the layers and functions that `nodes.classify_node` knows, so that maps are (B, C, H, W) everywhere:

- `permute` to channels-last and back is removed. `LayerNorm` and `Linear` on such maps become a layer norm over
  channels and a 1 × 1 convolution.
- Vectors that become maps again, as in gates, are maps of 1 × 1 px. `Linear` on them is a 1 × 1 convolution.
- `Linear` on flattened maps of k × k px is a convolution with a k × k kernel.
- `split`, `chunk` and slices become `take_channels`, and channel shuffles `shuffle_channels`.
- A product with one number a channel becomes the layer `ChannelScale`.
- A convolution with a kernel that is not square gets the smallest square kernel that contains it.

To know shapes, the tracer computes an example on torch's device "meta", which computes shapes only.
"""

import copy
import math
import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.convert.tracing import (
    channel_norm,
    create_lazy_weights,
    derived_from,
    describe_graph,
    expect_no_attention,
    expect_same_output,
    linear_as_conv,
    make_square,
    replace_layers,
    standard_layer,
    trace_with_example,
    with_class,
)
from rotopath.models.trace import expect_no_hooks, get_attribute, is_size, scope_of
from rotopath.nn import ChannelNorm2d, ChannelScale, GroupFilter2d
from rotopath.nn.pool import reduce_channels, shuffle_channels, take_channels

Node = Any  # an fx.Node; the type of its arguments is a union that is too wide to be of use here
SAME_VALUE = ("contiguous",)  # methods that do not change values


def standardize(module: nn.Module, as_maps: bool = False) -> tuple[nn.Module, fx.Graph]:
    """Return a copy of a module and its graph, rewritten with standard layers and functions.

    With `as_maps`, all vectors are maps of 1 × 1 px, up to the outputs of the network. Raises ValueError if the module
    has hooks or attention, if it cannot be traced, or if its `forward()` differs between training and evaluation mode.
    """
    expect_no_attention(module)
    create_lazy_weights(module)
    expect_no_hooks(module, "equivariant")
    module = replace_layers(copy.deepcopy(module))
    for path, layer in module.named_modules():
        if path and (base := derived_from(layer)) is not None:
            expect_same_output(layer, base, path)
    graph, other = (trace_with_example(module.train(mode)) for mode in (True, False))
    if describe_graph(graph) != describe_graph(other):
        raise ValueError(
            f"equivariant() cannot convert {type(module).__name__}, because its forward() differs between training "
            f"and evaluation mode; use the same code for both modes (dropout layers are supported), and switch "
            f"auxiliary outputs for training off."
        )
    return module, Standardizer(module, other, as_maps).rewrite()


class Standardizer:
    """Rewrite the graph of a module; see the docstring of this file.

    `forms` contains what the value of an old node is, if it is not the same in the new graph: "rows" for maps (B, H, W,
    C), "vector" for vectors (B, C) that are maps (B, C, 1, 1) in the new graph, a number k for vectors that are maps of
    k × k px, and a tuple for maps whose channels are split into groups. `values` contains the new node of each old
    node, and `constants` the value of each old node that depends on parameters and numbers only.
    """

    def __init__(self, module: nn.Module, graph: fx.Graph, as_maps: bool) -> None:
        self.module = module
        self.old = graph
        self.new = fx.Graph()
        self.values: dict[fx.Node, Any] = {}
        self.forms: dict[fx.Node, Any] = {}
        self.constants: dict[fx.Node, Any] = {}
        self.as_maps = as_maps or any(map(self._reads_flattened_map, graph.nodes))
        self.gates = self._find_gates()

    def rewrite(self) -> fx.Graph:
        for node in self.old.nodes:
            value = self._rewrite(node)
            if isinstance(value, fx.Node):
                value.meta.setdefault("example", node.meta.get("example"))
                if node.op != "placeholder" and "nn_module_stack" in node.meta:
                    value.meta.setdefault("nn_module_stack", node.meta["nn_module_stack"])
            self.values[node] = value
        for node in reversed(self.new.nodes):
            unused = not node.users and node.op in ("call_function", "call_method", "get_attr")
            if unused or (node.op == "placeholder" and not node.users and node.args):
                self.new.erase_node(node)
        self.module.eval()
        return self.new

    # Shapes of the example

    def _shape(self, node: Any) -> tuple[int, ...] | None:
        example = node.meta.get("example") if isinstance(node, fx.Node) else None
        return tuple(example.shape) if isinstance(example, Tensor) else None

    def _layer(self, node: Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _reads_flattened_map(self, node: Node) -> bool:
        """Return whether a node is a `Linear` that reads a flattened map (B, C, k, k) with k > 1."""
        if not isinstance(self._layer(node), nn.Linear):
            return False
        source = node.args[0]
        while isinstance(source, fx.Node) and self._shape(source) is not None and len(self._shape(source) or ()) == 2:
            if not source.all_input_nodes:
                return False
            source = source.all_input_nodes[0]
            if isinstance(self._layer(source), nn.Linear):
                return False
        shape, flat = self._shape(source), self._shape(node.args[0])
        if shape is None or flat is None or len(shape) != 4:
            return False
        return shape[2] == shape[3] > 1 and flat[1] == math.prod(shape[1:])

    def _find_gates(self) -> set[fx.Node]:
        """Return the nodes whose values are vectors (B, C) from which maps are computed later, as in gates."""
        gates: set[fx.Node] = set()
        for node in reversed(self.old.nodes):
            shape = self._shape(node)
            if shape is None or len(shape) != 2:
                continue
            if self.as_maps or any(
                user in gates or (len(self._shape(user) or ()) == 4 and not is_size(user)) for user in node.users
            ):
                gates.add(node)
        changed = True
        while changed:  # both factors of a product are in the same form
            changed = False
            for node in self.old.nodes:
                if node in gates:
                    sources = [s for s in node.all_input_nodes if len(self._shape(s) or ()) == 2 and s not in gates]
                    changed = changed or bool(sources)
                    gates.update(sources)
        return gates

    # One method for each type of node

    def _rewrite(self, node: Node) -> Any:
        if node.op == "placeholder":
            return self.new.node_copy(node)
        if node.op == "output":
            return self.new.output(fx.map_arg(node.args[0], self._flattened))
        if node.op == "get_attr" or self._is_constant(node):
            return self._fold(node)
        if node.target is torch._assert or getattr(node.target, "__name__", "") == "_assert":
            return None
        if is_size(node):
            return self._copy_size(node)
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and source in self.forms:
            self.forms[node] = self.forms[source]
        if node.op == "call_module":
            return self._rewrite_layer(node, self.module.get_submodule(str(node.target)))
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        special = getattr(self, f"_rewrite_{name}", None)
        result = special(node) if special is not None else None
        return self._copy(node) if result is None else result

    def _copy(self, node: Node) -> Any:
        if node.op == "call_method" and node.target in SAME_VALUE:
            return self.values[node.args[0]]
        sources = [s for s in node.all_input_nodes if s in self.forms]
        if sources and not is_size(node):
            self.forms[node] = self.forms[sources[0]]
        for constant in [s for s in node.all_input_nodes if s in self.constants]:
            value = self.constants[constant]
            if isinstance(value, Tensor) and value.numel() > 1:
                return self._scale_channels(node, constant)
        return self.new.node_copy(node, self._value)

    def _value(self, node: Node) -> Any:
        value = self.values[node]
        if value is not None or node not in self.constants:
            return value
        constant = self.constants[node]
        if not isinstance(constant, Tensor):
            return constant
        name = str(node.target) if node.op == "get_attr" else f"{node.name}_constant"
        if node.op != "get_attr":
            self.module.register_buffer(name, constant)
        self.values[node] = self.new.get_attr(name)
        return self.values[node]

    def _flattened(self, node: Node) -> Any:
        """Return the new value of a node for the output of the network: vectors are vectors again."""
        value, form = self._value(node), self.forms.get(node)
        if form == "vector" or isinstance(form, int):
            flat = self.new.call_function(torch.flatten, (value, 1))
            flat.meta["example"] = node.meta.get("example")
            return flat
        if form == "rows":
            raise ValueError("equivariant() needs outputs (B, C, H, W) or (B, C), but an output is (B, H, W, C).")
        return value

    def _is_constant(self, node: Node) -> bool:
        sources = node.all_input_nodes
        return bool(sources) and all(source in self.constants for source in sources)

    def _fold(self, node: Node) -> None:
        """Compute a node that depends on parameters and numbers only."""
        if node.op == "get_attr":
            self.constants[node] = get_attribute(self.module, str(node.target))
            return
        args, kwargs = (fx.map_arg(a, lambda n: self.constants[n]) for a in (node.args, node.kwargs))
        with torch.no_grad():
            if node.op == "call_module":
                self.constants[node] = self.module.get_submodule(str(node.target))(*args)
            elif node.op == "call_method":
                self.constants[node] = getattr(args[0], str(node.target))(*args[1:], **kwargs)
            else:
                self.constants[node] = node.target(*args, **kwargs)

    def _copy_size(self, node: Node) -> Any:
        """Copy a node that reads a size. Axes of values in another form are renumbered."""
        source = node.all_input_nodes[0]
        form = self.forms.get(source)
        if form == "rows" and not is_size(source):
            sizes = [self.new.call_method("size", (self.values[source], axis)) for axis in (0, 2, 3, 1)]
            for new, size in zip(sizes, source.meta["example"].shape, strict=True):
                new.meta["example"] = size
            return tuple(sizes) if node.target != "size" or len(node.args) < 2 else sizes[node.args[1]]
        args = fx.map_arg(node.args, self._value)
        if isinstance(args[0], tuple) and node.target is operator.getitem:
            return args[0][args[1]]
        return self.new.create_node(node.op, node.target, args, fx.map_arg(node.kwargs, self._value))

    # Layers

    def _rewrite_layer(self, node: Node, layer: Any) -> Any:
        source = node.all_input_nodes[0]
        form = self.forms.get(source)
        if isinstance(layer, nn.Flatten) and (layer.start_dim, layer.end_dim) == (1, -1):
            return self._flatten(node) or self._copy(node)
        if isinstance(layer, nn.Unflatten):
            return None
        if isinstance(layer, nn.Linear) and (form == "rows" or form == "vector" or isinstance(form, int)):
            size = form if isinstance(form, int) else 1
            self.forms[node] = "vector" if form != "rows" else "rows"
            if layer.in_features % size**2 == 0:
                return self._call(node, linear_as_conv(layer, size), source)
        reads_channels = form in ("rows", "vector") or derived_from(layer)
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1 and reads_channels:
            return self._call(node, channel_norm(layer), source)
        if isinstance(layer, nn.BatchNorm1d) and form == "vector":
            return self._call(node, with_class(layer, nn.BatchNorm2d), source)
        if derived_from(layer) is nn.Linear:
            return self._call(node, with_class(layer, nn.Linear), source)
        if derived_from(layer):
            return self._call(node, standard_layer(layer), source)
        if type(layer) in (nn.ReflectionPad2d, nn.ReplicationPad2d, nn.ZeroPad2d, nn.CircularPad2d, nn.ConstantPad2d):
            mode = {nn.ReflectionPad2d: "reflect", nn.ReplicationPad2d: "replicate", nn.CircularPad2d: "circular"}
            return self.new.call_function(
                F.pad, (self._value(source), tuple(layer.padding), mode.get(type(layer), "constant"),
                        getattr(layer, "value", None)),
            )  # fmt: skip
        if isinstance(layer, nn.Conv2d) and type(layer) is nn.Conv2d:
            layer = make_square(layer)
        return self._call(node, layer, source)

    def _call(self, node: Node, layer: nn.Module, source: Node) -> fx.Node:
        """Set the layer at the path of a node, and return a new node that calls it."""
        if (old := self.module.get_submodule(str(node.target))) is not layer:
            for name, child in old.named_children():  # `drop` and `act` of norms, which other nodes call
                layer.add_module(name, child)
            self.module.set_submodule(str(node.target), layer)
        return self.new.call_module(str(node.target), (self._value(source),))

    def _add_layer(self, path: str, layer: nn.Module, source: Node) -> fx.Node:
        """Add a layer at a new path, and return a new node that calls it."""
        try:
            if not isinstance(self.module.get_submodule(path.rpartition(".")[0]), nn.Module):
                path = path.replace(".", "_")
        except AttributeError:
            path = path.replace(".", "_")
        parent, _, name = path.rpartition(".")
        owner = self.module.get_submodule(parent)
        if name in owner._parameters:
            del owner._parameters[name]
        owner._buffers.pop(name, None)
        owner.add_module(name, layer)
        return self.new.call_module(path, (self._value(source),))

    # Functions and methods, by name

    def _rewrite_flatten(self, node: Node) -> Any:
        return self._flatten(node) or self._regroup(node)

    def _rewrite_view(self, node: Node) -> Any:
        return self._flatten(node) or self._regroup(node)

    _rewrite_reshape = _rewrite_view
    _rewrite_squeeze = _rewrite_view
    _rewrite_unsqueeze = _rewrite_view
    _rewrite_expand = _rewrite_view
    _rewrite_expand_as = _rewrite_view

    def _flatten(self, node: Node) -> Any:
        """Rewrite a change between vectors (B, C) and maps (B, C, k, k)."""
        source = node.all_input_nodes[0]
        before, after = self._shape(source), self._shape(node)
        if before is None or after is None or before[0] != after[0]:
            return None
        form = self.forms.get(source)
        if before == after:
            return self._value(source)
        is_vector = len(before) == 4 and len(after) == 2 and node in self.gates and form != "rows"
        if is_vector and before[2] == before[3] and after[1] == math.prod(before[1:]):
            self.forms[node] = "vector" if before[2] == 1 else before[2]
            return self._value(source)
        if len(before) == 2 and (after == (*before, 1, 1) or after == (before[0], 1, 1, before[1])):
            self._drop_form(node, "rows" if after[1:3] == (1, 1) != after[2:] else None)
            return self._value(source)
        if form == "vector" and len(before) == 3 and after == (*before[:2], 1, 1):
            self._drop_form(node)
            return self._value(source)
        if form == "vector" and len(before) == 2 and after == (*before, 1):
            self.forms[node] = "vector"
            return self._value(source)
        if len(before) == 4 and before[2:] == after[2:] == (1, 1):
            return None
        if node.target in ("expand", "expand_as"):
            return self._value(source) if before[1] == after[1] else None
        return None

    def _drop_form(self, node: Node, form: Any = None) -> None:
        self.forms.pop(node, None)
        if form is not None:
            self.forms[node] = form

    def _regroup(self, node: Node) -> Any:
        """Rewrite one step of a channel shuffle: split the channels into groups, or merge them."""
        source = node.all_input_nodes[0]
        before, after, form = self._shape(source), self._shape(node), self.forms.get(source)
        if before is None or after is None:
            return None
        is_split = len(before) == 4 and len(after) == 5 and before[2:] == after[3:] and after[1] * after[2] == before[1]
        if form is None and is_split:
            self.forms[node] = ("groups", after[1])
            return self._value(source)
        if isinstance(form, tuple) and len(before) == 5 and len(after) == 4:
            self._drop_form(node)
            if form[0] == "groups":
                return self._value(source)
            return self.new.call_function(shuffle_channels, (self._value(source), form[1]))
        return None

    def _rewrite_transpose(self, node: Node) -> Any:
        source = node.all_input_nodes[0]
        form = self.forms.get(source)
        if isinstance(form, tuple) and form[0] == "groups" and set(node.args[1:]) == {1, 2}:
            self.forms[node] = ("shuffled", form[1])
            return self._value(source)
        return None

    def _rewrite_permute(self, node: Node) -> Any:
        source = node.all_input_nodes[0]
        dims = node.args[1] if len(node.args) == 2 else node.args[1:]
        dims = tuple(dims or node.kwargs.get("dims", ()))
        form = self.forms.get(source)
        if dims in ((0, 2, 3, 1), (0, -2, -1, 1)) and form is None:
            self.forms[node] = "rows"
        elif dims in ((0, 3, 1, 2), (0, -1, 1, 2)) and form == "rows":
            self._drop_form(node)
        elif isinstance(form, tuple) and form[0] == "groups" and dims == (0, 2, 1, 3, 4):
            self.forms[node] = ("shuffled", form[1])
        else:
            return None
        return self._value(source)

    def _rewrite_mean(self, node: Node, name: str = "mean") -> Any:
        source = node.all_input_nodes[0]
        before, after, form = self._shape(source), self._shape(node), self.forms.get(source)
        if before is None or after is None or len(before) != 4:
            return None
        axes = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        axes = {a % 4 for a in (axes if isinstance(axes, tuple | list) else [axes]) if isinstance(a, int)}
        spatial, channels = ({1, 2}, {3}) if form == "rows" else ({2, 3}, {1})
        if axes == channels and len(after) == 4:
            return self.new.call_function(reduce_channels, (self._value(source), {"mean": "mean"}.get(name, "max")))
        if axes == spatial:
            if len(after) == 4:
                if form == "rows":
                    return self.new.call_method(name, (self._value(source), (2, 3), True))
                return None
            if node in self.gates:
                self.forms[node] = "vector"
                return self.new.call_method(name, (self._value(source), (2, 3), True))
            self._drop_form(node)
            return self.new.call_method(name, (self._value(source), (2, 3)))
        return None

    def _rewrite_amax(self, node: Node) -> Any:
        return self._rewrite_mean(node, "amax")

    def _rewrite_max(self, node: Node) -> Any:
        axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(axis, int) or len(self._shape(node.all_input_nodes[0]) or ()) != 4 or axis % 4 != 1:
            return None
        self.forms[node] = "maximum"
        return self.new.call_function(reduce_channels, (self._value(node.all_input_nodes[0]), "max"))

    def _rewrite_split(self, node: Node) -> Any:
        example, source = node.meta.get("example"), node.all_input_nodes[0]
        before = self._shape(source)
        if not isinstance(example, tuple | list) or before is None:
            return None
        axis = next((i for i, size in enumerate(before) if example and example[0].shape[i] != size), 1)
        if axis != (3 if self.forms.get(source) == "rows" else 1):
            raise_at(node, f"it splits axis {axis}; only channels can be split")
        parts, first = [], 0
        for part in example:
            count = part.shape[axis]
            new = self.new.call_function(take_channels, (self._value(source), first, count))
            new.meta["example"] = part
            parts.append(new)
            first += count
        return tuple(parts)

    _rewrite_chunk = _rewrite_split

    def _rewrite_getitem(self, node: Node) -> Any:
        source: Any = node.args[0]
        index: Any = node.args[1]
        value, form = self.values.get(source), self.forms.get(source)
        if isinstance(value, tuple):
            return value[index] if isinstance(index, int) else None
        if form == "maximum":
            self._drop_form(node)
            return value if index == 0 else None
        before, after = self._shape(source), self._shape(node)
        if before is None or after is None or not isinstance(index, tuple | slice):
            return None
        parts = index if isinstance(index, tuple) else (index,)
        if form == "vector" and len(after) == 4 and after == (*before, 1, 1):
            self._drop_form(node)
            return value
        full = slice(None)
        if len(before) == len(after) == 4 and all(p in (full, ...) for i, p in enumerate(parts) if i != 1):
            if all(p in (full, ...) for p in parts) and before == after:
                return value
            if len(parts) > 1 and parts[1] == full:
                return value
            part = parts[1] if len(parts) > 1 else full
            if isinstance(part, slice) and part.step in (None, 1) and not any(
                isinstance(x, fx.Node) for x in (part.start, part.stop)
            ) and form is None:  # fmt: skip
                first, end, _ = part.indices(before[1])
                return value if (first, end) == (0, before[1]) else self.new.call_function(
                    take_channels, (value, first, end - first)
                )  # fmt: skip
        return None

    def _rewrite_layer_norm(self, node: Node) -> Any:
        source = node.all_input_nodes[0]
        names = ["normalized_shape", "weight", "bias", "eps"]
        options = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        if self.forms.get(source) not in ("rows", "vector") or len(options["normalized_shape"]) != 1:
            return None
        norm = ChannelNorm2d(options["normalized_shape"][0], options.get("eps", 1e-5))
        for name in ("weight", "bias"):
            if isinstance(parameter := options.get(name), fx.Node):
                setattr(norm, name, nn.Parameter(self.constants[parameter].detach()))
        return self._add_layer(f"{node.name}_norm", norm, source)

    def _rewrite_linear(self, node: Node) -> Any:
        source = node.all_input_nodes[0]
        parameters: list[Any] = [self.constants.get(p) for p in node.args[1:] if isinstance(p, fx.Node)]
        if not parameters or any(p is None for p in parameters):
            return None
        weight = parameters[0]
        linear = nn.Linear(weight.shape[1], weight.shape[0], len(parameters) > 1, device="meta")
        linear.weight = nn.Parameter(weight.detach())
        if len(parameters) > 1:
            linear.bias = nn.Parameter(parameters[1].detach())
        form = self.forms.get(source)
        layer = linear_as_conv(linear, 1) if form in ("rows", "vector") else linear
        return self._add_layer(f"{node.name}_linear", layer, source)

    def _rewrite_conv2d(self, node: Node) -> Any:
        """Rewrite a convolution with a fixed filter, the same for all channels, as in anti-aliased networks."""
        names = ["weight", "bias", "stride", "padding", "dilation", "groups"]
        options = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        source, weight = node.all_input_nodes[0], options["weight"]
        value: Any = self.constants.get(weight) if isinstance(weight, fx.Node) else weight
        weight_path = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        expanded = value is None and isinstance(weight, fx.Node) and weight.target == "expand"
        if expanded:
            value = self.constants.get(weight.args[0])
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter) or value.shape[1] != 1:
            raise_at(node, "its weights are computed or shared in forward(), as for weight standardization; use Conv2d")
        if not torch.allclose(value, value[:1].expand_as(value)):
            raise_at(node, "its fixed filter differs between channels; use one filter for all channels")
        stride, padding = _single(options.get("stride", 1)), _single(options.get("padding", 0))
        try:
            layer = GroupFilter2d(value[0, 0], stride, padding)
        except ValueError as error:
            raise_at(node, str(error))
        parent = weight_path.rpartition(".")[0]
        return self._add_layer(f"{parent}.filter" if parent else f"{node.name}_filter", layer, source)

    def _scale_channels(self, node: Node, constant: Node) -> Any:
        """Rewrite a product or sum of maps and one number a channel as a layer."""
        value: Tensor = self.constants[constant]
        maps = next(source for source in node.all_input_nodes if source not in self.constants)
        shape: Any = self._shape(maps)
        form = self.forms.get(maps)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        name = name.rstrip("_").removeprefix("i")
        if shape is None or name not in ("mul", "add", "sub", "truediv", "div"):
            raise_at(node, f"it reads a tensor of shape {tuple(value.shape)}, which must have one number a channel")
        axis = -1 if form == "rows" else 1
        full = value.expand((*(1,) * (len(shape) - value.ndim), *value.shape))
        if full.numel() != shape[axis] or full.shape[axis] != shape[axis] or (node.args[0] is constant and name in (
            "sub", "truediv", "div"
        )):  # fmt: skip
            raise_at(
                node,
                f"it combines maps with a tensor of shape {tuple(value.shape)} that forward() reads directly; use one "
                f"number a channel, or a layer such as a norm",
            )
        numbers = full.detach().flatten().clone()
        layer = ChannelScale(numbers.numel(), bias=name in ("add", "sub")).to(numbers)
        if name in ("mul", "truediv", "div"):
            layer.weight = nn.Parameter(numbers if name == "mul" else 1 / numbers)
        else:
            assert layer.bias is not None
            layer.bias = nn.Parameter(numbers if name == "add" else -numbers)
        origin = constant
        while origin.op != "get_attr" and len(origin.all_input_nodes) == 1:
            origin = origin.all_input_nodes[0]
        path = str(origin.target) if origin.op == "get_attr" else f"{node.name}_scale"
        return self._add_layer(path, layer, maps)


def raise_at(node: Node, reason: str) -> Any:
    """Raise ValueError with the name of a function's node and of the module that calls it."""
    scope = scope_of(node)
    raise ValueError(f"equivariant() cannot convert {node.name!r}{f' in {scope}' if scope else ''}: {reason}.")


def _single(value: Any) -> int:
    numbers = value if isinstance(value, tuple | list) else (value,)
    if len(set(numbers)) > 1:
        raise ValueError("equivariant() needs the same stride and padding for height and width.")
    return int(numbers[0])
