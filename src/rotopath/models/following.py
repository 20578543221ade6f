"""What a module does, written down by `torch.fx` as a graph in which every layer is one step.

In: a module in evaluation mode. Out: its graph; or one sentence about what cannot be followed.
"""

import operator
from collections.abc import Callable, Iterator

from torch import fx, nn

from rotopath.models.network import Network


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


class Follower(fx.Tracer):
    """Takes the layers of torch and of rotopath, and whole networks, for single steps, and looks into all others."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:  # noqa: ARG002
        return isinstance(m, Network) or is_layer(m)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Value(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        return iter([obj[i] for i in range(len(obj))])  # type: ignore[index]


def is_layer(module: nn.Module) -> bool:
    """Whether torch or rotopath wrote its forward; a subclass that leaves that as it is, such as a parametrised one."""
    home = type(module).forward.__module__ or ""  # none for what an interpreter was handed as text
    return home.startswith(("torch.nn.", "rotopath.nn.")) and not isinstance(module, nn.Sequential)


def follow(module: nn.Module, who: str = "freeze") -> fx.Graph:
    """The graph of a module's forward, or of the part of a network's that comes behind its checks."""
    follower = Follower()
    if isinstance(module, Network):
        follower.traced_func_name = "compute_logits"
    try:
        return follower.trace(module)
    except Exception as error:  # of any kind: it is the user's code that runs, on values it was not written for
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{who} cannot follow the forward of {type(module).__name__} ({reason}); it may use layers and functions, "
            f"but no decisions that hang on a tensor."
        ) from error


def expect_no_hooks(model: nn.Module, who: str = "freeze") -> None:
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            raise ValueError(
                f"{who} carries over layers, and not hooks, but {name or type(model).__name__} has some; remove them "
                f"first (those of pruning by torch.nn.utils.prune.remove)."
            )
