"""What a module does, written down by `torch.fx` as a graph in which every layer is one step.

In: a module in evaluation mode. Out: its graph; or one sentence about what cannot be followed.

While torch.fx traces, it replaces the methods of `nn.Module` that call a module and look up its weights. All threads of
the process see that. So only one thread traces at a time, and modules that other threads call answer as usual. Only
what `torch.compile` made does not run meanwhile: torch itself refuses that.
"""

import operator
import traceback
from collections.abc import Callable, Iterator, Mapping
from threading import RLock, get_ident
from typing import Any

import torch
from torch import fx, nn
from torch.amp import autocast_mode

from rotopath.models.network import Network

TRACING = RLock()  # held by the thread that traces
DEVICES = ("cpu", "cuda", "mps", "xpu")  # that have an autocast of their own


class Value(fx.Proxy):
    """What stands for a tensor, or for something that was asked of it."""

    def __len__(self) -> int:
        """Of `x.shape[-2:]` the length is known whatever x is, and so it can be handed on as `*x.shape[-2:]`."""
        target, args = self.node.target, self.node.args
        index = args[1] if target is operator.getitem else None
        if isinstance(index, slice) and isinstance(index.start, int) and index.start < 0 and index.stop is None:
            return -index.start
        raise TypeError("the number of axes of a tensor is not known here; write x.shape[-2:]")

    def __iadd__(self, other: object) -> fx.Proxy:
        return self._change(operator.iadd, other)

    def __isub__(self, other: object) -> fx.Proxy:
        return self._change(operator.isub, other)

    def __imul__(self, other: object) -> fx.Proxy:
        return self._change(operator.imul, other)

    def __itruediv__(self, other: object) -> fx.Proxy:
        return self._change(operator.itruediv, other)

    def _change(self, how: Callable[..., object], other: object) -> fx.Proxy:
        """In place, as tensors do it: torch.fx itself takes x += y for x + y, and other names of x keep the old one."""
        return self.tracer.create_proxy("call_function", how, (self, other), {})


class AutocastError(Exception):
    """A forward uses torch.autocast."""


class Follower(fx.Tracer):
    """Takes the layers of torch and of rotopath, and whole networks, for single steps, and looks into all others."""

    def __init__(self) -> None:
        super().__init__()
        self.thread = get_ident()
        self.autocasts = find_autocasts()

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return isinstance(m, Network) or is_layer(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        return iter([obj[i] for i in range(len(obj))])  # type: ignore[index]

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if get_ident() != self.thread:
            return forward(*args, **kwargs)
        self._expect_no_autocast()
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if get_ident() != self.thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        self._expect_no_autocast()
        return super().create_node(*args, **kwargs)

    def find_kind(self) -> str:
        """The class of the module whose forward runs now."""
        stack = [kind.__name__ for _, kind in self.module_stack.values()]
        return str(stack[-1] if stack else type(self.root).__name__)

    def _expect_no_autocast(self) -> None:
        """Steps are written down without the precision they run in, so a forward must not change it."""
        if find_autocasts() != self.autocasts:
            raise AutocastError


def find_autocasts() -> Mapping[str, torch.dtype]:
    """The devices for which autocast is on in this thread, and what it casts to."""
    return {device: torch.get_autocast_dtype(device) for device in DEVICES if torch.is_autocast_enabled(device)}


def is_layer(module: nn.Module) -> bool:
    """Whether torch or rotopath wrote its forward; a subclass that leaves that as it is, such as a parametrised one."""
    home = type(module).forward.__module__ or ""  # none for what an interpreter was handed as text
    return home.startswith(("torch.nn.", "rotopath.nn.")) and not isinstance(module, nn.Sequential)


def follow(module: nn.Module, who: str = "freeze") -> fx.Graph:
    """The graph of a module's forward, or of the part of a network's that comes behind its checks."""
    with TRACING:
        follower = Follower()
        if isinstance(module, Network):
            follower.traced_func_name = _choose_method(module)
        try:
            return follower.trace(module)
        except Exception as error:  # of any kind: it is the user's code that runs, on values it was not written for
            if _is_about_autocast(error):
                raise ValueError(
                    f"{who} carries over layers, and not torch.autocast, which the forward of {follower.find_kind()} "
                    f"uses; call {who} on the network inside, and put autocast around what it returns."
                ) from error
            reason = str(error).strip().partition("\n")[0].rstrip(".")
            may_use = "layers and functions"
            if isinstance(module, Network) and follower.traced_func_name == "forward":
                may_use = "layers, functions, and compute_logits in place of super().forward"
            raise ValueError(
                f"{who} cannot follow the forward of {type(module).__name__} ({reason}); it may use {may_use}, but no "
                f"decisions that hang on a tensor."
            ) from error


def _choose_method(network: Network) -> str:
    """What computes the logits behind the checks of `forward`; or `forward`, where a subclass has written another."""
    methods = ("compute_logits", "forward")
    return next(method for kind in type(network).__mro__ for method in methods if method in vars(kind))


def _is_about_autocast(error: Exception) -> bool:
    """Whether a forward has switched autocast, or has tried to by `x.device.type`, which autocast does not accept."""
    *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
    return isinstance(error, AutocastError) or innermost.f_code.co_filename == autocast_mode.__file__


def expect_no_hooks(model: nn.Module, who: str = "freeze") -> None:
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"{who} carries over layers, and not hooks, but {name or type(model).__name__} has some; remove them "
                f"first (those of pruning by torch.nn.utils.prune.remove)."
            )
