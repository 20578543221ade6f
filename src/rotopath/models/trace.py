"""Trace modules with `torch.fx`: record their `forward()` as a graph, which `equivariant` and `freeze` need.

A node of the graph is one call of a layer, function or method. `trace_graph` returns the graph, or raises ValueError
with the reason why `forward()` cannot be traced.

While torch.fx traces a module, it replaces methods of `nn.Module` for all threads of the process. Therefore only one
thread can trace at a time. Other threads may use modules meanwhile: these modules run as usual and are not recorded.
Only modules compiled by `torch.compile` raise an error if they run during tracing.
"""

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from threading import RLock, get_ident
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.amp import autocast_mode

from rotopath.models.network import ArchitectureNetwork

# Layers, functions and methods that process each element of a tensor independently. They commute with rotation, and can
# be applied to features stored as (B, C, N, H, W) or as (B, C·N, H, W).
POINTWISE_LAYERS = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
POINTWISE_FUNCTIONS: frozenset[object] = frozenset().union(
    {operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.pos},
    {operator.iadd, operator.isub, operator.imul, operator.itruediv},
    {torch.add, torch.sub, torch.mul, torch.div, torch.neg, torch.abs, torch.exp, torch.square, torch.sqrt},
    {torch.sigmoid, torch.tanh, torch.clamp, torch.maximum, torch.minimum, torch.clone, torch.detach},
    {F.celu, F.elu, F.gelu, F.hardsigmoid, F.hardswish, F.hardtanh, F.leaky_relu, F.mish, F.relu6, F.selu, F.silu},
    {F.softplus, F.sigmoid, F.tanh},
)
POINTWISE_METHODS = frozenset().union(
    {"add", "sub", "mul", "div", "neg", "abs", "exp", "square", "sqrt", "sigmoid", "tanh", "clamp"},
    {"add_", "sub_", "mul_", "div_", "neg_", "sigmoid_", "tanh_", "clamp_"},
    {"maximum", "minimum", "clone", "detach"},
)
# Functions and methods that compute a ReLU → whether they always overwrite their input.
RELUS = {torch.relu: False, F.relu: False, torch.relu_: True, F.relu_: True, "relu": False, "relu_": True}
CONCATENATIONS = (torch.cat, torch.concat, torch.concatenate)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)

AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")
TRACE_LOCK = RLock()  # held while a thread traces


def trace_graph(module: nn.Module, caller: str = "freeze", tracer: "LayerTracer | None" = None) -> fx.Graph:
    """Return the graph of `module.forward()`. For the paper's networks, the graph does not contain the image checks.

    `caller` is the name of the calling function for error messages: "freeze" or "equivariant". `tracer` records the
    graph; by default a new `LayerTracer`. Raises ValueError if `forward()` cannot be traced.
    """
    with TRACE_LOCK:
        tracer = tracer or LayerTracer()
        if isinstance(module, ArchitectureNetwork):
            tracer.traced_func_name = _find_traced_method(module)
        try:
            return tracer.trace(module)
        except Exception as error:  # any kind of error: forward() is user code
            if _is_caused_by_autocast(error):
                raise ValueError(
                    f"{caller}() does not support torch.autocast, which forward() of {tracer.current_class_name()} "
                    f"uses; call {caller}() on the submodule that this forward() calls, and run the result within "
                    f"torch.autocast."
                ) from error
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            remedy = "use only layers and torch functions in forward()"
            if isinstance(module, ArchitectureNetwork) and tracer.traced_func_name == "forward":
                remedy = "call compute_logits() in forward() instead of super().forward()"
            raise ValueError(
                f"{caller}() cannot trace forward() of {type(module).__name__} ({reason}); {remedy}, and remove "
                f"branches that depend on the values of a tensor."
            ) from error


def expect_no_hooks(model: nn.Module, caller: str = "freeze") -> None:
    """Raise ValueError if a model or one of its submodules has forward hooks, which a traced graph would not contain.

    `caller` is the name of the calling function for the message: "freeze" or "equivariant".
    """
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:  # torch has no public way to list hooks
            raise ValueError(
                f"{caller}() does not support hooks, but {name or type(model).__name__} has some; remove them first "
                f"(after pruning, call torch.nn.utils.prune.remove)."
            )


def active_autocasts() -> Mapping[str, torch.dtype]:
    """Return the device types for which autocast is enabled in this thread: device type → dtype of autocast."""
    enabled = (device for device in AUTOCAST_DEVICES if torch.is_autocast_enabled(device))
    return {device: torch.get_autocast_dtype(device) for device in enabled}


def is_layer(module: nn.Module) -> bool:
    """Return whether a module is a layer, which means that its `forward()` is defined in torch.nn or rotopath.nn.

    An object of a user's subclass is a layer too if the subclass inherits `forward()`. `nn.Sequential` is not a layer.
    """
    defined_in = type(module).forward.__module__ or ""  # None if the class was defined in an interpreter
    return defined_in.startswith(("torch.nn.", "rotopath.nn.")) and not isinstance(module, nn.Sequential)


def is_size(node: fx.Node) -> bool:
    """Return whether the value of a node is a size (shape or length) of a tensor, or is computed from sizes only."""
    if node.target == "size" or (node.target is getattr and node.args[1] == "shape"):
        return True
    inputs = node.all_input_nodes
    return getattr(node.target, "__module__", "") == "_operator" and bool(inputs) and all(map(is_size, inputs))


def scope_of(node: fx.Node) -> str:
    """Return the path of the layer that a node calls, such as "layer1.0.conv1".

    For a call of a function or method, return the path of the submodule whose `forward()` contains the call, or "" for
    the traced module itself.
    """
    return str(next(reversed(node.meta.get("nn_module_stack", {})), ""))


def get_attribute(module: nn.Module, path: str) -> Any:
    """Return the attribute of a module at a dotted path, such as "layer1.weight", as a `get_attr` node contains it."""
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


class LayerTracer(fx.Tracer):
    """Tracer that records each call of a layer (`is_layer`), or of one of the paper's networks, as a single node."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()  # only calls in this thread are recorded
        self.autocasts = active_autocasts()  # at the start of tracing

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return isinstance(m, ArchitectureNetwork) or is_layer(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return ValueProxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        return iter([obj[i] for i in range(len(obj))])  # type: ignore[index]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        self._expect_same_autocast()
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self._expect_same_autocast()
        return super().create_node(*args, **kwargs)

    def current_class_name(self) -> str:
        """Return the class name of the module whose `forward()` is being traced."""
        stack = [module_class.__name__ for _, module_class in self.module_stack.values()]
        return str(stack[-1] if stack else type(self.root).__name__)

    def _expect_same_autocast(self) -> None:
        """Raise AutocastError if `forward()` has switched autocast on or off, which the graph would not contain."""
        if active_autocasts() != self.autocasts:
            raise AutocastError


class ValueProxy(fx.Proxy):
    """Object that replaces a tensor, a size or a number during tracing, and records the operations on it."""

    def __len__(self) -> int:
        """Return the length of a slice such as `x.shape[-2:]`, here 2, so that `*x.shape[-2:]` can be traced.

        Raises TypeError for all other values, because the number of axes of a tensor is not known during tracing.
        """
        target, args = self.node.target, self.node.args
        index = args[1] if target is operator.getitem else None
        if isinstance(index, slice) and isinstance(index.start, int) and index.start < 0 and index.stop is None:
            return -index.start
        raise TypeError("the number of axes of a tensor is not known during tracing; write x.shape[-2:] for H and W")

    # In-place operators are recorded as such. torch.fx would record x += y as x = x + y, which would not change the
    # values of other variables for the same tensor.
    def __iadd__(self, other: object) -> fx.Proxy:
        return self._change_in_place(operator.iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        return self._change_in_place(operator.isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        return self._change_in_place(operator.imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self._change_in_place(operator.itruediv, other)

    def _change_in_place(self, function: Callable[..., object], other: object) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class AutocastError(Exception):
    """Error raised if a traced `forward()` switches torch.autocast on or off."""


def _find_traced_method(network: nn.Module) -> str:
    """Return the name of the method to trace: "compute_logits", which does not contain the image checks, or "forward".

    "forward" is returned if a subclass of the user overrides only `forward()`.
    """
    methods = ("compute_logits", "forward")
    return next(method for kind in type(network).__mro__ for method in methods if method in vars(kind))


def _is_caused_by_autocast(error: Exception) -> bool:
    """Return whether `error` was raised because a traced `forward()` uses torch.autocast.

    There are two cases: an AutocastError, or an error inside torch.autocast itself. For example,
    `torch.autocast(x.device.type)` fails during tracing, because the device is not known.
    """
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, AutocastError) or innermost.f_code.co_filename == autocast_mode.__file__
