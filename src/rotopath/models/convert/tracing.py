"""Trace a plain network with an example image, and recognize layers of other libraries.

`trace_with_example` computes what each node of the graph returns for an example image, on torch's device "meta", which
computes shapes only. The functions of the second part return layers of torch that compute the same as layers of timm
and torchvision.
"""

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from rotopath.models.trace import LayerTracer, ValueProxy, get_attribute, is_layer, trace_graph
from rotopath.nn import ChannelNorm2d, StochasticDepth

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
        return super().is_leaf_module(m, module_qualified_name) or derived_from(m) is not None

    def call_module(self, m: nn.Module, forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.is_computing:
            return forward(*args, **kwargs)
        if derived_from(m) is None:
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

    def iter(self, obj: Any) -> Any:
        example = obj.node.meta.get("example")
        if isinstance(example, tuple | list | Tensor):
            return iter([obj[i] for i in range(len(example))])
        return super().iter(obj)

    def _compute(self, kind: str, target: Any, args: Any, kwargs: Any) -> Any:
        """Return what a new node returns for the example, or NO_EXAMPLE."""
        if kind == "placeholder":
            return args[0] if args else self.image
        self.is_computing = True
        try:
            args, kwargs = fx.node.map_aggregate((args, kwargs), _example_of)
            if kind == "get_attr":
                return get_attribute(self.root, target)
            if kind == "call_module":
                layer = self.root.get_submodule(target)
                base = derived_from(layer)
                return (
                    base.forward(layer, *args)
                    if base and base is not nn.LayerNorm
                    else args[0].clone()
                    if base
                    else layer.forward(*args, **kwargs)
                )
            if kind == "call_method":
                return getattr(args[0], target)(*args[1:], **kwargs)
            return target(*args, **kwargs) if kind == "call_function" else NO_EXAMPLE
        except Exception:  # of any kind: forward() is user code, and this node may not fit the example
            self.failures += 1
            return NO_EXAMPLE
        finally:
            self.is_computing = False


class ExampleProxy(ValueProxy):
    """Proxy that knows its number of axes and its length."""

    def __len__(self) -> int:
        example = self.node.meta.get("example")
        return len(example) if isinstance(example, tuple | list | Tensor) else super().__len__()

    def __getattr__(self, name: str) -> Any:
        example = self.node.meta.get("example")
        if name == "ndim" and isinstance(example, Tensor):
            return example.ndim
        return super().__getattr__(name)


def _example_of(value: Any) -> Any:
    if not isinstance(value, fx.Proxy):
        return value
    example = value.node.meta.get("example", NO_EXAMPLE)
    if example is NO_EXAMPLE:
        raise ValueError("no example")
    return example


def trace_with_example(module: nn.Module) -> fx.Graph:
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


def describe_graph(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node.target, node.name, *map(str, node.all_input_nodes)) for node in graph.nodes]


# Layers of other libraries


def create_lazy_weights(module: nn.Module) -> None:
    """Create the weights of lazy layers, which cannot be copied without, by running the module on a white image."""
    lazy = [path for path, m in module.named_modules() if any(map(nn.parameter.is_lazy, m.parameters(recurse=False)))]
    if not lazy:
        return
    first: Any = next((m for m in module.modules() if isinstance(m, nn.Conv2d)), None)
    modes = {m: m.training for m in module.modules()}
    try:
        with torch.no_grad():
            module.eval()(torch.ones(1, (first and first.in_channels) or 3, LAZY_PX, LAZY_PX))
    except Exception as failure:  # of any kind: forward() is user code
        raise ValueError(
            f"equivariant() cannot convert {lazy[0]!r}: it is lazy and has no weights yet; run the network once on an "
            f"image before you convert it."
        ) from failure
    finally:
        for m, training in modes.items():
            m.training = training


def replace_layers(module: nn.Module) -> nn.Module:
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

    drop: nn.Module
    act: nn.Module

    def forward(self, input: Tensor) -> Tensor:
        x: Tensor = self.act(self.drop(super().forward(input)))
        return x


def derived_from(layer: nn.Module) -> Any:
    """Return the type of torch that computes the same as a layer of another library; None for other modules.

    The layer is an object of a subclass of this type, which has its own `forward`.
    """
    if is_layer(layer):
        return None
    base = next((base for base in DERIVED if isinstance(layer, base)), None)
    if base is nn.Conv2d and type(layer).__name__ not in SAME_PADDING:
        return None  # for example weight standardization
    return base


def expect_same_output(layer: Any, base: Any, path: str) -> None:
    """Compare a layer of another library with the layer of torch that stands for it, on random maps.

    Raises ValueError if the outputs differ.
    """
    plain = standard_layer(layer)
    channels = next((getattr(layer, name) for name in ("in_channels", "num_features", "num_channels", "in_features")
                     if hasattr(layer, name)), 4)  # fmt: skip
    if base is nn.LayerNorm:
        channels = layer.normalized_shape[-1]
    weight = next((p for p in layer.parameters()), torch.ones(()))
    x = torch.randn(2, channels, CHECK_PX, CHECK_PX, generator=torch.Generator().manual_seed(0)).to(weight)
    was_training = layer.training
    try:
        with torch.no_grad():
            expected = layer.eval()(x if base is not nn.Linear else x.movedim(1, -1))
            actual = plain.eval()(x)
            for name in ("drop", "act"):  # norms with an activation, as in timm
                step = getattr(layer, name, None)
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


def standard_layer(layer: Any) -> Any:
    """Return a layer of torch that computes the same as `layer` on maps (B, C, H, W), with the same weights.

    For a `Conv2d` with the padding of TensorFlow, the padding is (k - 1)/2 px at each end. This is the same where
    the windows fit the image, and symmetric elsewhere.
    """
    match layer:
        case nn.Conv2d() if type(layer).__name__ in SAME_PADDING:
            padding: Any = tuple(d * (k - 1) // 2 for k, d in zip(layer.kernel_size, layer.dilation, strict=True))
            options: Any = {name: getattr(layer, name) for name in ("kernel_size", "stride", "dilation", "groups")}
            options |= {"padding": padding, "bias": layer.bias is not None, "device": "meta"}
            conv = nn.Conv2d(layer.in_channels, layer.out_channels, **options)
            conv.weight, conv.bias = layer.weight, layer.bias
            return conv
        case nn.Linear():
            return linear_as_conv(layer, 1)
        case nn.LayerNorm():
            return channel_norm(layer)
        case nn.MaxPool2d():
            padding = layer.padding if is_layer(layer) else _half(layer.kernel_size)
            return nn.MaxPool2d(layer.kernel_size, layer.stride, padding, layer.dilation, ceil_mode=layer.ceil_mode)
        case nn.AvgPool2d():
            padding = layer.padding if is_layer(layer) else _half(layer.kernel_size)
            return nn.AvgPool2d(layer.kernel_size, layer.stride, padding, layer.ceil_mode, layer.count_include_pad)
        case _ if (base := derived_from(layer)) is not None:
            return with_class(layer, base)
    return layer


def with_class(layer: nn.Module, base: type[nn.Module]) -> nn.Module:
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


def channel_norm(layer: nn.LayerNorm) -> ChannelNorm2d:
    norm = ChannelNorm2d(layer.normalized_shape[-1], layer.eps)
    if layer.weight is not None:
        norm.weight = nn.Parameter(layer.weight.detach())
    norm.bias = nn.Parameter(torch.zeros_like(norm.weight) if layer.bias is None else layer.bias.detach())
    return norm


def _half(size: Any) -> Any:
    return tuple((s - 1) // 2 for s in size) if isinstance(size, tuple) else (size - 1) // 2


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


def make_square(conv: Any) -> Any:
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
    square.plain_weights = sum(p.numel() for p in conv.parameters())
    square.weight = nn.Parameter(F.pad(conv.weight.detach(), (extra[1], extra[1], extra[0], extra[0])))
    square.bias = conv.bias
    return square
