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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.trace import LayerTracer, expect_no_hooks, get_attribute, is_layer, is_size, trace_graph
from rotopath.nn import ChannelNorm2d, ChannelScale, GroupFilter2d, StochasticDepth
from rotopath.nn.pool import reduce_channels, shuffle_channels, take_channels

# Sides of the example image in px, in the order in which they are tried: sizes for which common networks compute whole
# windows in every layer, then smaller and larger ones.
EXAMPLE_SIZES = (225, 224, 299, 65, 64, 33, 32, 16, 9, 512)
LAZY_PX = 225  # side of the image that creates the weights of lazy layers
CHECK_PX = 17  # side of the random maps on which a layer of another library is compared with a layer of torch
# Layers of other libraries that drop whole samples in training. They are known by name, and `drop_prob` or `p`.
SAMPLE_DROPOUTS = ("DropPath", "StochasticDepth")
SAME_PADDING = ("Conv2dSame", "Conv2dSamePadding", "Conv2dStaticSamePadding", "Conv2dDynamicSamePadding")
# Layers of torch from which other libraries derive layers of the same function, with their own `forward`.
DERIVED = (nn.BatchNorm2d, nn.GroupNorm, nn.LayerNorm, nn.Linear, nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.Dropout)
ATTENTION_ATTRIBUTES = ("qkv", "q_proj", "in_proj_weight", "query", "to_qkv", "q")
NO_EXAMPLE = object()  # example of a node whose value cannot be computed
SAME_VALUE = ("contiguous",)  # methods that do not change values


def standardize(module: nn.Module, as_maps: bool = False) -> tuple[nn.Module, fx.Graph]:
    """Return a copy of a module and its graph, rewritten with standard layers and functions.

    With `as_maps`, all vectors are maps of 1 × 1 px, up to the outputs of the network. Raises ValueError if the module
    has hooks or attention, if it cannot be traced, or if its `forward()` differs between training and evaluation mode.
    """
    expect_no_attention(module)
    _create_lazy_weights(module)
    expect_no_hooks(module, "equivariant")
    module = _replace_layers(copy.deepcopy(module))
    for path, layer in module.named_modules():
        if path and (base := _derived_from(layer)) is not None:
            _expect_same_output(layer, base, path)
    graph, other = (_trace_with_example(module.train(mode)) for mode in (True, False))
    if _describe_graph(graph) != _describe_graph(other):
        raise ValueError(
            f"equivariant() cannot convert {type(module).__name__}, because its forward() differs between training "
            f"and evaluation mode; use the same code for both modes (dropout layers are supported), and switch "
            f"auxiliary outputs for training off."
        )
    return module, Standardizer(module, other, as_maps).rewrite()


def expect_no_attention(module: nn.Module) -> None:
    """Raise ValueError if a module contains attention between positions, as in vision transformers."""
    for path, layer in module.named_modules():
        name = type(layer).__name__
        is_attention = isinstance(layer, nn.MultiheadAttention) or (
            ("attention" in name.lower() or "attn" in name.lower())
            and any(hasattr(layer, attribute) for attribute in ATTENTION_ATTRIBUTES)
        )
        if is_attention:
            raise ValueError(
                f"equivariant() cannot convert {type(module).__name__}, because {path or 'it'} ({name}) is attention "
                f"between positions, which has no SE(2) counterpart in rotopath; convert a network of convolutions."
            )


# Tracing


class ExampleTracer(LayerTracer):
    """Tracer that also computes what each node returns for an example image, as tensors on the device "meta".

    The example is in `node.meta["example"]`. Branches that depend on the size of the image are traced for the example.
    The traced module must be on the device "meta".
    """

    proxy_buffer_attributes = True  # buffers are read by nodes, as parameters are

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.image = image
        self.failures = 0
        self.is_computing = False  # while an example is computed, nothing is recorded

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or _derived_from(m) is not None

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_computing:
            return forward(*args, **kwargs)
        if _derived_from(m) is None:
            return super().call_module(m, forward, args, kwargs)
        x = super().call_module(m, forward, args, kwargs)
        for step in (getattr(m, "drop", None), getattr(m, "act", None)):  # norms with an activation, as in timm
            if isinstance(step, nn.Module):
                x = self.call_module(step, step.forward, (x,), {})
        return x

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return attr_val if self.is_computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_proxy(self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **options: Any) -> Any:
        example = self._compute(kind, target, args, kwargs)
        if kind == "call_method" and target in ("dim", "ndimension") and isinstance(example, int):
            return example
        proxy = super().create_proxy(kind, target, args, kwargs, *rest, **options)
        proxy.node.meta["example"] = example
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ExampleProxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        example = obj.node.meta.get("example", NO_EXAMPLE)
        if isinstance(example, bool | int | float | str | tuple | list | None):
            return bool(example)
        return bool(super().to_bool(obj))

    def iter(self, obj: fx.Proxy) -> Any:
        example = obj.node.meta.get("example")
        if isinstance(example, tuple | list | Tensor):
            return iter([obj[i] for i in range(len(example))])  # type: ignore[index]
        return super().iter(obj)

    def _compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what a new node returns for the example, or NO_EXAMPLE."""
        if kind == "placeholder":
            return args[0] if args else self.image
        self.is_computing = True
        try:
            args, kwargs = fx.node.map_aggregate((args, kwargs), _example_of)  # type: ignore[misc]
            if kind == "get_attr":
                return get_attribute(self.root, target)
            if kind == "call_module":
                layer = self.root.get_submodule(target)
                base = _derived_from(layer)
                return (base.forward(layer, *args) if base and base is not nn.LayerNorm else
                        args[0].clone() if base else layer.forward(*args, **kwargs))
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs) if kind == "call_function" else NO_EXAMPLE
        except Exception:  # of any kind: forward() is user code, and this node may not fit the example
            self.failures += 1
            return NO_EXAMPLE
        finally:
            self.is_computing = False


class ExampleProxy(fx.Proxy):
    """Proxy that knows its number of axes and its length."""

    def __len__(self) -> int:
        example = self.node.meta.get("example")
        if isinstance(example, tuple | list | Tensor):
            return len(example)
        target, args = self.node.target, self.node.args
        index = args[1] if target is operator.getitem else None
        if isinstance(index, slice) and isinstance(index.start, int) and index.start < 0 and index.stop is None:
            return -index.start
        raise TypeError("the number of axes of a tensor is not known during tracing; write x.shape[-2:] for H and W")

    def __getattr__(self, name: str) -> Any:
        example = self.node.meta.get("example")
        if name == "ndim" and isinstance(example, Tensor):
            return example.ndim
        return super().__getattr__(name)

    def __iadd__(self, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.iadd, (self, other), {})

    def __isub__(self, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.isub, (self, other), {})

    def __imul__(self, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.imul, (self, other), {})

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", operator.itruediv, (self, other), {})


def _example_of(value: Any) -> Any:
    if not isinstance(value, fx.Proxy):
        return value
    example = value.node.meta.get("example", NO_EXAMPLE)
    if example is NO_EXAMPLE:
        raise ValueError("no example")
    return example


def _trace_with_example(module: nn.Module) -> fx.Graph:
    """Return the graph of a module, traced for the first size in `EXAMPLE_SIZES` for which all nodes have an example.

    If there is no such size, return the graph with the fewest nodes without example.
    """
    meta = copy.deepcopy(module).to("meta")
    channels = next((m.in_channels for m in module.modules() if isinstance(m, nn.Conv2d | nn.ConvTranspose2d)), 3)
    dtype = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
    graphs: list[tuple[int, fx.Graph]] = []
    error: ValueError | None = None
    for size in EXAMPLE_SIZES:
        image = torch.empty(2, channels, size, size, device="meta", dtype=dtype)
        tracer = ExampleTracer(image)
        try:
            with torch.no_grad():
                graph = trace_graph(meta, "equivariant", tracer)
        except ValueError as failure:
            error = error or failure
            continue
        graphs.append((tracer.failures, graph))
        if tracer.failures == 0:
            break
    if not graphs:
        assert error is not None
        raise error
    return min(graphs, key=lambda pair: pair[0])[1]


def _describe_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node.target, node.name, *map(str, node.all_input_nodes)) for node in graph.nodes]


# Layers of other libraries


def _create_lazy_weights(module: nn.Module) -> None:
    """Create the weights of lazy layers, which cannot be copied without, by running the module on a white image."""
    lazy = [path for path, m in module.named_modules() if any(map(nn.parameter.is_lazy, m.parameters(recurse=False)))]
    if not lazy:
        return
    first = next((m for m in module.modules() if type(m) is nn.Conv2d), None)
    modes = {m: m.training for m in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(torch.ones(1, first.in_channels if first else 3, LAZY_PX, LAZY_PX))
    except Exception as failure:  # of any kind: forward() is user code
        raise ValueError(
            f"equivariant() cannot convert {lazy[0]!r}: it is lazy and has no weights yet; run the network once on an "
            f"image before you convert it."
        ) from failure
    finally:
        for m, training in modes.items():
            m.training = training


def _replace_layers(module: nn.Module) -> nn.Module:
    """Replace layers of a module in place that need no tracing: `SyncBatchNorm`, and dropout of samples."""
    for path, layer in list(module.named_modules()):
        new: nn.Module | None = None
        if isinstance(layer, nn.SyncBatchNorm):
            new = nn.BatchNorm2d(layer.num_features, layer.eps, layer.momentum, layer.affine, layer.track_running_stats)
            new = new.to(next((t for t in layer.state_dict().values() if t.is_floating_point()), torch.ones(())))
            new.load_state_dict(layer.state_dict())
            for name in ("drop", "act"):  # timm's SyncBatchNormAct
                if hasattr(layer, name):
                    new.add_module(name, getattr(layer, name))
                    new.__class__ = _NormAct
        elif type(layer).__name__ in SAMPLE_DROPOUTS and not list(layer.children()):
            p = getattr(layer, "drop_prob", getattr(layer, "p", 0.0))
            new = StochasticDepth(float(p or 0.0))
        if new is not None and path:
            module.set_submodule(path, new.train(layer.training))
    return module


class _NormAct(nn.BatchNorm2d):
    """Batch norm followed by the layers `drop` and `act`."""

    def forward(self, input: Tensor) -> Tensor:
        x: Tensor = self.act(self.drop(super().forward(input)))
        return x


def _derived_from(layer: nn.Module) -> Any:
    """Return the type of torch that computes the same as a layer of another library; None for other modules.

    The layer is an object of a subclass of this type, which has its own `forward`.
    """
    if is_layer(layer):
        return None
    base = next((base for base in DERIVED if isinstance(layer, base)), None)
    if base is nn.Conv2d and type(layer).__name__ not in SAME_PADDING:
        return None  # for example weight standardization
    return base


def _expect_same_output(layer: nn.Module, base: Any, path: str) -> None:
    """Compare a layer of another library with the layer of torch that stands for it, on random maps.

    Raises ValueError if the outputs differ.
    """
    plain = standard_layer(layer)
    channels = next((getattr(layer, name) for name in ("in_channels", "num_features", "num_channels", "in_features")
                     if hasattr(layer, name)), 4)  # fmt: skip
    if base is nn.LayerNorm:
        channels = layer.normalized_shape[-1]
    weight = next((p for p in layer.parameters()), torch.ones(()))
    x = torch.randn(2, channels, CHECK_PX, CHECK_PX).to(weight)
    was_training = layer.training
    try:
        with torch.no_grad():
            expected = layer.eval()(x if base is not nn.Linear else x.movedim(1, -1))
            actual = plain.eval()(x)
            for step in (getattr(layer, "drop", None), getattr(layer, "act", None)):
                actual = step(actual) if isinstance(step, nn.Module) else actual
            actual = actual if base is not nn.Linear else actual.movedim(1, -1)
    except Exception as failure:
        raise ValueError(_describe_unlike(layer, base, path)) from failure
    finally:
        layer.train(was_training)
    tolerance = 1e-3 * float(expected.abs().max())
    if actual.shape != expected.shape or not torch.allclose(actual, expected, rtol=0, atol=tolerance):
        raise ValueError(_describe_unlike(layer, base, path))


def _describe_unlike(layer: nn.Module, base: Any, path: str) -> str:
    return (
        f"equivariant() cannot convert {path!r}: {type(layer).__name__} does not compute the same as "
        f"{base.__name__}, from which it is derived; replace it by a layer of torch."
    )


def standard_layer(layer: nn.Module) -> nn.Module:
    """Return a layer of torch that computes the same as `layer` on maps (B, C, H, W), with the same weights.

    For a `Conv2d` with the padding of TensorFlow, the padding is (k - 1)/2 px at each end. This is the same where
    the windows fit the image, and symmetric elsewhere.
    """
    match layer:
        case nn.Conv2d() if type(layer).__name__ in SAME_PADDING:
            padding = tuple(d * (k - 1) // 2 for k, d in zip(layer.kernel_size, layer.dilation, strict=True))
            conv = nn.Conv2d(layer.in_channels, layer.out_channels, layer.kernel_size, layer.stride, padding,
                             layer.dilation, layer.groups, layer.bias is not None, device="meta")  # fmt: skip
            conv.weight, conv.bias = layer.weight, layer.bias
            return conv
        case nn.Linear():
            return linear_as_conv(layer, 1)
        case nn.LayerNorm():
            return _channel_norm(layer)
        case nn.MaxPool2d():
            padding = layer.padding if is_layer(layer) else _half(layer.kernel_size)
            return nn.MaxPool2d(layer.kernel_size, layer.stride, padding, layer.dilation, ceil_mode=layer.ceil_mode)
        case nn.AvgPool2d():
            padding = layer.padding if is_layer(layer) else _half(layer.kernel_size)
            return nn.AvgPool2d(
                layer.kernel_size, layer.stride, padding, layer.ceil_mode, layer.count_include_pad
            )
        case _ if (base := _derived_from(layer)) is not None:
            return _cast(layer, base)
    return layer


def _cast(layer: nn.Module, base: type[nn.Module]) -> nn.Module:
    """Return a layer of the class `base` with the weights and options of `layer`, and without submodules."""
    plain = copy.copy(layer)
    plain.__class__ = base
    plain._modules = {}
    return plain


def linear_as_conv(layer: nn.Linear, size: int) -> nn.Conv2d:
    """Return the convolution, with a kernel of size × size px, that computes the same as `layer` on flattened maps."""
    channels = layer.in_features // size**2
    conv = nn.Conv2d(channels, layer.out_features, size, bias=layer.bias is not None, device="meta")
    conv.weight = nn.Parameter(layer.weight.detach().view(layer.out_features, channels, size, size))
    if layer.bias is not None:
        conv.bias = nn.Parameter(layer.bias.detach())
    return conv


def _channel_norm(layer: nn.LayerNorm) -> ChannelNorm2d:
    norm = ChannelNorm2d(layer.normalized_shape[-1], layer.eps)
    if layer.weight is not None:
        norm.weight = nn.Parameter(layer.weight.detach())
    norm.bias = nn.Parameter(torch.zeros_like(norm.weight) if layer.bias is None else layer.bias.detach())
    return norm


def _half(size: Any) -> Any:
    return tuple((s - 1) // 2 for s in size) if isinstance(size, tuple) else (size - 1) // 2


# Rewriting


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

    def _layer(self, node: fx.Node) -> nn.Module | None:
        return self.module.get_submodule(str(node.target)) if node.op == "call_module" else None

    def _reads_flattened_map(self, node: fx.Node) -> bool:
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

    def _rewrite(self, node: fx.Node) -> Any:
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

    def _copy(self, node: fx.Node) -> Any:
        if node.op == "call_method" and node.target in SAME_VALUE:
            return self.values[node.args[0]]  # type: ignore[index]
        sources = [s for s in node.all_input_nodes if s in self.forms]
        if sources and not is_size(node):
            self.forms[node] = self.forms[sources[0]]
        for constant in [s for s in node.all_input_nodes if s in self.constants]:
            value = self.constants[constant]
            if isinstance(value, Tensor) and value.numel() > 1:
                return self._scale_channels(node, constant)
        return self.new.node_copy(node, self._value)

    def _value(self, node: fx.Node) -> Any:
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

    def _flattened(self, node: fx.Node) -> Any:
        """Return the new value of a node for the output of the network: vectors are vectors again."""
        value, form = self._value(node), self.forms.get(node)
        if form == "vector" or isinstance(form, int):
            flat = self.new.call_function(torch.flatten, (value, 1))
            flat.meta["example"] = node.meta.get("example")
            return flat
        if form == "rows":
            raise ValueError("equivariant() needs outputs (B, C, H, W) or (B, C), but an output is (B, H, W, C).")
        return value

    def _is_constant(self, node: fx.Node) -> bool:
        sources = node.all_input_nodes
        return bool(sources) and all(source in self.constants for source in sources)

    def _fold(self, node: fx.Node) -> None:
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
                self.constants[node] = node.target(*args, **kwargs)  # type: ignore[operator]

    def _copy_size(self, node: fx.Node) -> Any:
        """Copy a node that reads a size. Axes of values in another form are renumbered."""
        source = node.all_input_nodes[0]
        form = self.forms.get(source)
        if form == "rows" and not is_size(source):
            sizes = [self.new.call_method("size", (self.values[source], axis)) for axis in (0, 2, 3, 1)]
            for new, size in zip(sizes, source.meta["example"].shape, strict=True):
                new.meta["example"] = size
            return tuple(sizes) if node.target != "size" or len(node.args) < 2 else sizes[node.args[1]]  # type: ignore[index]
        args = fx.map_arg(node.args, self._value)
        if isinstance(args[0], tuple) and node.target is operator.getitem:
            return args[0][args[1]]  # type: ignore[index]
        return self.new.create_node(node.op, node.target, args, fx.map_arg(node.kwargs, self._value))

    # Layers

    def _rewrite_layer(self, node: fx.Node, layer: nn.Module) -> Any:
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
        if isinstance(layer, nn.LayerNorm) and len(layer.normalized_shape) == 1:
            if form in ("rows", "vector") or _derived_from(layer):
                return self._call(node, _channel_norm(layer), source)
        if isinstance(layer, nn.BatchNorm1d) and form == "vector":
            norm = copy.copy(layer)
            norm.__class__ = nn.BatchNorm2d
            return self._call(node, norm, source)
        if _derived_from(layer) is nn.Linear:
            return self._call(node, _cast(layer, nn.Linear), source)
        if _derived_from(layer):
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

    def _call(self, node: fx.Node, layer: nn.Module, source: fx.Node) -> fx.Node:
        """Set the layer at the path of a node, and return a new node that calls it."""
        if (old := self.module.get_submodule(str(node.target))) is not layer:
            for name, child in old.named_children():  # `drop` and `act` of norms, which other nodes call
                layer.add_module(name, child)
            self.module.set_submodule(str(node.target), layer)
        return self.new.call_module(str(node.target), (self._value(source),))

    def _add_layer(self, path: str, layer: nn.Module, source: fx.Node) -> fx.Node:
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

    def _rewrite_flatten(self, node: fx.Node) -> Any:
        return self._flatten(node) or self._regroup(node)

    def _rewrite_view(self, node: fx.Node) -> Any:
        return self._flatten(node) or self._regroup(node)

    _rewrite_reshape = _rewrite_view
    _rewrite_squeeze = _rewrite_view
    _rewrite_unsqueeze = _rewrite_view
    _rewrite_expand = _rewrite_view
    _rewrite_expand_as = _rewrite_view

    def _flatten(self, node: fx.Node) -> Any:
        """Rewrite a change between vectors (B, C) and maps (B, C, k, k)."""
        source = node.all_input_nodes[0]
        before, after = self._shape(source), self._shape(node)
        if before is None or after is None or before[0] != after[0]:
            return None
        form = self.forms.get(source)
        if before == after:
            return self._value(source)
        if len(before) == 4 and len(after) == 2 and node in self.gates and form != "rows":
            if before[2] == before[3] and after[1] == math.prod(before[1:]):
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

    def _drop_form(self, node: fx.Node, form: Any = None) -> None:
        self.forms.pop(node, None)
        if form is not None:
            self.forms[node] = form

    def _regroup(self, node: fx.Node) -> Any:
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

    def _rewrite_transpose(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        form = self.forms.get(source)
        if isinstance(form, tuple) and form[0] == "groups" and set(node.args[1:]) == {1, 2}:
            self.forms[node] = ("shuffled", form[1])
            return self._value(source)
        return None

    def _rewrite_permute(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        dims = node.args[1] if len(node.args) == 2 else node.args[1:]
        dims = tuple(dims or node.kwargs.get("dims", ()))  # type: ignore[arg-type]
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

    def _rewrite_mean(self, node: fx.Node, name: str = "mean") -> Any:
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

    def _rewrite_amax(self, node: fx.Node) -> Any:
        return self._rewrite_mean(node, "amax")

    def _rewrite_max(self, node: fx.Node) -> Any:
        axis = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
        if not isinstance(axis, int) or len(self._shape(node.all_input_nodes[0]) or ()) != 4 or axis % 4 != 1:
            return None
        self.forms[node] = "maximum"
        return self.new.call_function(reduce_channels, (self._value(node.all_input_nodes[0]), "max"))

    def _rewrite_split(self, node: fx.Node) -> Any:
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

    def _rewrite_getitem(self, node: fx.Node) -> Any:
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

    def _rewrite_layer_norm(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        names = ["normalized_shape", "weight", "bias", "eps"]
        options = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        if self.forms.get(source) not in ("rows", "vector") or len(options["normalized_shape"]) != 1:  # type: ignore[arg-type]
            return None
        norm = ChannelNorm2d(options["normalized_shape"][0], options.get("eps", 1e-5))  # type: ignore[index, arg-type]
        for name in ("weight", "bias"):
            if isinstance(parameter := options.get(name), fx.Node):
                setattr(norm, name, nn.Parameter(self.constants[parameter].detach()))
        return self._add_layer(f"{node.name}_norm", norm, source)

    def _rewrite_linear(self, node: fx.Node) -> Any:
        source = node.all_input_nodes[0]
        parameters = [self.constants.get(p) for p in node.args[1:] if isinstance(p, fx.Node)]
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

    def _rewrite_conv2d(self, node: fx.Node) -> Any:
        """Rewrite a convolution with a fixed filter, the same for all channels, as in anti-aliased networks."""
        names = ["weight", "bias", "stride", "padding", "dilation", "groups"]
        options = dict(zip(names, node.args[1:], strict=False)) | dict(node.kwargs)
        source, weight = node.all_input_nodes[0], options["weight"]
        value = self.constants.get(weight) if isinstance(weight, fx.Node) else weight
        weight_path = str(weight.target) if isinstance(weight, fx.Node) and weight.op == "get_attr" else ""
        expanded = value is None and isinstance(weight, fx.Node) and weight.target == "expand"
        if expanded:
            value = self.constants.get(weight.args[0])  # type: ignore[union-attr, arg-type]
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

    def _scale_channels(self, node: fx.Node, constant: fx.Node) -> Any:
        """Rewrite a product or sum of maps and one number a channel as a layer."""
        value: Tensor = self.constants[constant]
        maps = next(source for source in node.all_input_nodes if source not in self.constants)
        shape, form = self._shape(maps), self.forms.get(maps)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        name = name.rstrip("_").removeprefix("i")
        if shape is None or name not in ("mul", "add", "sub", "truediv", "div"):
            raise_at(node, f"it reads a tensor of shape {tuple(value.shape)}, which must have one number a channel")
        axis = -1 if form == "rows" else 1
        full = value.expand(torch.broadcast_shapes(value.shape, (1,) * len(shape)))
        if full.numel() != shape[axis] or full.shape[axis] != shape[axis] or node.args[0] is constant and name in (
            "sub", "truediv", "div"
        ):  # fmt: skip
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


def make_square(conv: nn.Conv2d) -> nn.Conv2d:
    """Return a convolution with a square kernel that computes the same as `conv`, for example 7 × 7 in place of 1 × 7.

    The kernel is surrounded by zeros. If the paddings of the square kernel would differ, return `conv` itself.
    """
    height, width = conv.kernel_size
    if height == width or isinstance(conv.padding, str) or len(set(conv.stride)) > 1 or len(set(conv.dilation)) > 1:
        return conv
    size = max(height, width)
    if (size - height) % 2 or (size - width) % 2 or conv.padding_mode != "zeros":
        return conv
    extra = [(size - k) // 2 for k in (height, width)]
    padding = {p + conv.dilation[0] * e for p, e in zip(conv.padding, extra, strict=True)}
    if len(padding) > 1:
        return conv
    square = nn.Conv2d(conv.in_channels, conv.out_channels, size, conv.stride, padding.pop(), conv.dilation,
                       conv.groups, conv.bias is not None, device="meta")  # fmt: skip
    square.plain_weights = sum(p.numel() for p in conv.parameters())  # type: ignore[assignment]
    square.weight = nn.Parameter(F.pad(conv.weight.detach(), (extra[1], extra[1], extra[0], extra[0])))
    square.bias = conv.bias
    return square


def raise_at(node: fx.Node, reason: str) -> Any:
    """Raise ValueError with the name of a function's node and of the module that calls it."""
    stack: Mapping[str, Any] = node.meta.get("nn_module_stack", {})
    scope = next(reversed(stack), "")
    raise ValueError(f"equivariant() cannot convert {node.name!r}{f' in {scope}' if scope else ''}: {reason}.")


def _single(value: Any) -> int:
    numbers: Sequence[int] = value if isinstance(value, tuple | list) else (value,)
    if len(set(numbers)) > 1:
        raise ValueError("equivariant() needs the same stride and padding for height and width.")
    return int(numbers[0])
