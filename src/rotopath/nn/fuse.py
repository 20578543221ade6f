"""Compute batch norm together with the operations that follow it, in few passes over memory, in any module.

To *fuse* operations means to compute them together, without writing the result of each one to memory. A layer that can
be fused with what follows returns a `Deferred` tensor: a tensor whose values have not been computed yet. It records the
operations that can be fused, such as ReLU, and computes all of them when a value is needed. Everything else, such as a
convolution, an in-place change, `print` or `torch.save`, gets the computed tensor. So any code gets the values and
gradients of the separate layers, up to rounding, and nothing has to be switched on.

| fused operations | device | used in | data type |
|---|---|---|---|
| lifting, batch norm, ReLU, pool | GPU | training; evaluation without gradients | half |
| batch norm, residual sum, ReLU, SiLU or GELU | GPU | training and evaluation | half, float32 |
| batch norm, ReLU, pool | GPU | training and evaluation | half, float32 |
| batch norm, residual sum, ReLU | CPU | training | float32, float64 |
| batch norm, ReLU, max pool | CPU | training | float32, float64 |

"half" is float16 or bfloat16. The residual sum is the addition of features of the same shape and data type. Pools are
max pools without blur and, on a GPU, root-mean-square pools, both with a stride equal to the window. Features must be
channels-last. Nothing is deferred under torch.compile, torch.func, an export, a dispatch mode or inference mode, and
nothing after layers with forward hooks. What is fused is decided in `rotopath.nn.norm` and `rotopath.nn.conv`, which
return `Pending` operations. The GPU kernels are in `rotopath.nn.triton`.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.nn.modules.module import _has_any_global_hook  # private; tests/nn/test_fuse.py tests that it still works
from torch.utils._python_dispatch import _get_current_dispatch_mode  # private; tested in tests/nn/test_fuse.py

from rotopath.nn.features import channels_last_strides, is_being_recorded

_is_enabled: ContextVar[bool] = ContextVar("fusion", default=True)
_is_recording: ContextVar[bool] = ContextVar("recording", default=False)  # of a CUDA graph that finishes its outputs


@contextmanager
def disable_fusion() -> Iterator[None]:
    """Return a context manager in which layers compute their outputs at once, each on its own.

    >>> with rp.nn.disable_fusion():
    ...     type(rp.nn.GroupBatchNorm2d(2)(torch.randn(1, 2, 4, 8, 8)))
    <class 'torch.Tensor'>
    """
    token = _is_enabled.set(False)
    try:
        yield
    finally:
        _is_enabled.reset(token)


@contextmanager
def allow_in_graphs() -> Iterator[None]:
    """Return a context manager in which operations may be deferred while a CUDA graph is recorded.

    The caller must finish all tensors that are read after the recording.
    """
    token = _is_recording.set(True)
    try:
        yield
    finally:
        _is_recording.reset(token)


def finish(x: Tensor) -> Tensor:
    """Return x with its values computed. Tensors that are not deferred are returned as they are.

    Call this before features are used several times, for example by a pool and by a skip connection. Otherwise, fused
    operations may be computed once for each use.
    """
    return x.finish() if type(x) is Deferred else x


class Pending(Protocol):
    """Operations that have been called, but not computed yet. They have one result: features (B, C, N, H, W).

    The methods that return "Pending or None" return None if an operation cannot be computed together with these.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the result."""

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """All tensors that the result is computed from. The first has the data type and device of the result."""

    def compute(self) -> Tensor:
        """Compute the result, with gradients if they are enabled."""

    def activate(self, activation: str) -> "Pending | None":
        """Return these operations followed by "relu", "silu" or "gelu", or None."""

    def add(self, residual: Tensor) -> "Pending | None":
        """Return these operations followed by the sum with `residual`, or None."""

    def normalize(self, norm: nn.Module) -> "Pending | None":
        """Return these operations followed by a batch norm, or None."""

    def pool(self, pool: nn.Module) -> Tensor | None:
        """Compute the result of these operations followed by a pool, or return None."""


def defer(pending: Pending, layer: nn.Module) -> Tensor:
    """Return the result of operations of which `layer` is the last: deferred if possible, or else computed."""
    if (
        not _is_enabled.get()
        or is_being_recorded()
        or _get_current_dispatch_mode() is not None
        or any(x.is_inference() for x in pending.inputs)  # they do not count in-place changes
        or has_forward_hooks(layer)
        or (pending.inputs[0].is_cuda and torch.cuda.is_current_stream_capturing() and not _is_recording.get())
    ):
        return pending.compute()
    return _State(pending).make_tensor()


def normalize_deferred(x: Tensor, norm: nn.Module) -> Tensor | None:
    """Return x after a batch norm if x is deferred and its operations can be fused with batch norm, otherwise None."""
    state = _unfinished_state_of(x)
    pending = None if state is None or has_forward_hooks(norm) else state.pending.normalize(norm)
    return None if state is None or pending is None else state.follow(pending)


def pool_deferred(x: Tensor, pool: nn.Module) -> Tensor | None:
    """Return x after a pool if x is deferred and its operations can be fused with the pool, otherwise None."""
    state = _unfinished_state_of(x)
    if state is None:
        return None
    state.check_inputs()
    return state.pending.pool(pool)


class _State:
    """What a deferred tensor consists of: its pending operations or, later, their result.

    It is an object of its own, because the autograd history of a deferred tensor must not refer to the tensor.
    """

    __slots__ = ("finished", "inputs", "is_grad_enabled", "pending", "successor", "versions")

    def __init__(self, pending: Pending) -> None:
        self.pending = pending
        self.inputs = pending.inputs
        self.versions = [x._version for x in self.inputs]
        self.is_grad_enabled = torch.is_grad_enabled()  # when the operations were called
        self.finished: Tensor | None = None  # the result, once it is computed
        self.successor: _State | None = None  # state after an in-place operation on this tensor

    def make_tensor(self) -> "Deferred":
        """Return a deferred tensor with this state."""
        if self.is_grad_enabled and any(x.requires_grad for x in self.inputs):
            result: Deferred = _Defer.apply(self, *self.inputs)  # type: ignore[no-untyped-call]
            return result
        return Deferred(self)

    def follow(self, pending: Pending) -> "Deferred":
        """Return a deferred tensor with operations that follow those of this state."""
        self.check_inputs()
        return _State(pending).make_tensor()

    def finish(self) -> Tensor:
        """Return the result. It is computed once, with gradients if they were enabled when it was deferred."""
        if self.finished is None:
            self.check_inputs()
            with torch.set_grad_enabled(self.is_grad_enabled):
                self.finished = self.pending.compute()
            del self.pending  # frees its inputs, unless they are needed for gradients
        return self.finished

    def check_inputs(self) -> None:
        """Raise RuntimeError if an input was changed in place since it was read."""
        if self.versions != [x._version for x in self.inputs]:
            raise RuntimeError(
                "The input, the residual or the weights of a batch norm were changed in place before its output was "
                "used. Call rp.nn.finish(output) before the change."
            )


class _Defer(torch.autograd.Function):
    """Autograd function that returns a deferred tensor. `backward` computes the gradients of the pending operations.

    `backward` runs only if the deferred tensor was read by code for which torch does not call
    `Deferred.__torch_function__`, such as another autograd function. All other code reads the finished result, which
    has an autograd history of its own.
    """

    @staticmethod
    def forward(ctx: Any, state: _State, *_: Tensor) -> Tensor:
        ctx.state, ctx.pending = state, state.pending
        return Deferred(state)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        state: _State = ctx.state
        if state.successor is not None:
            raise RuntimeError(
                "The output of a batch norm was changed in place before an autograd function used it. Call "
                "rp.nn.finish(output) before the change."
            )
        needed = [x for x, is_needed in zip(state.inputs, ctx.needs_input_grad[1:], strict=True) if is_needed]
        state.check_inputs()
        create_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            y = ctx.pending.compute()
        results = iter(torch.autograd.grad(y, needed, gradients[0], create_graph=create_graph))
        return None, *[next(results) if is_needed else None for is_needed in ctx.needs_input_grad[1:]]


class Deferred(Tensor):
    """Features whose values are computed when they are needed. See the docstring of this module.

    It has a shape, a data type, a device and an autograd history, but no memory of its own.
    """

    _state: _State
    _copy: Tensor | None = None  # with the history of this tensor, if it is not that of the state

    @staticmethod
    def __new__(cls, state: _State) -> "Deferred":
        shape, like = state.pending.shape, state.inputs[0]
        strides = channels_last_strides(shape)
        self = Tensor._make_wrapper_subclass(cls, shape, strides, dtype=like.dtype, device=like.device)
        self._state = state
        return self

    def finish(self) -> Tensor:
        """Return the computed tensor, after all in-place operations on this one."""
        state = self._last
        with DisableTorchFunctionSubclass():
            if not self.requires_grad or state.is_grad_enabled:
                return state.finish()
            # An autograd function has returned this tensor. Its history belongs to the tensor, not to the state.
            if self._copy is None:
                with torch.enable_grad():
                    self._copy = self.clone()
            return self._copy

    @property
    def _last(self) -> _State:
        """State after all in-place operations on this tensor."""
        state = self._state
        while state.successor is not None:
            state = state.successor
        return state

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        fused = _FUSED.get(func)
        if fused is not None and (result := fused(*args, **kwargs)) is not None:
            return result
        if func in _METADATA and args[0]._last.finished is None:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        return func(*finish_all(args), **finish_all(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Compute an operation that torch calls from C++, without `__torch_function__`, below autograd."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} cannot change the output of a batch norm in place; call rp.nn.finish(x) first.")
        with torch.no_grad():
            return func(*finish_all(args, detach=True), **finish_all(kwargs or {}, detach=True))


def finish_all(values: Any, detach: bool = False) -> Any:
    """Replace the deferred tensors in nested lists, tuples and dicts by computed ones."""
    if type(values) is Deferred:
        return values._last.finish().detach() if detach else values.finish()
    if isinstance(values, dict):
        return {key: finish_all(value, detach) for key, value in values.items()}
    if type(values) in (tuple, list):
        return type(values)([finish_all(value, detach) for value in values])
    return values


def _unfinished_state_of(x: Tensor) -> _State | None:
    """Return the state of x if x is deferred, not finished, and was created in the current grad mode."""
    if type(x) is not Deferred:
        return None
    state = x._last
    is_open = state.finished is None and state.is_grad_enabled == torch.is_grad_enabled()
    return state if is_open else None


def _activation(name: str, in_place: bool = False) -> Callable[..., Tensor | None]:
    """Return a function that defers the activation `name` if its input is deferred, and otherwise returns None."""

    def activate(x: Tensor, inplace: bool = in_place, approximate: str = "none") -> Tensor | None:
        state = _unfinished_state_of(x)
        pending = None if state is None or approximate != "none" else state.pending.activate(name)
        if state is None or pending is None:
            return None
        result = state.follow(pending)
        if inplace:
            state.successor = result._state
        return result

    return activate


def _add(x: Tensor, other: Any, *, alpha: float = 1) -> Tensor | None:
    """Return x + alpha · other as a deferred tensor, or None if torch must compute the sum.

    The sum is deferred if alpha is 1, and if the operations of one term can be followed by the addition of the other.
    """
    if alpha != 1 or x is other or not isinstance(other, Tensor):
        return None
    if (x.shape, x.dtype, x.device) != (other.shape, other.dtype, other.device):
        return None
    for term, residual in ((x, other), (other, x)):
        state = _unfinished_state_of(term)
        if state is None or _unfinished_state_of(residual) is state:
            continue
        pending = state.pending.add(finish(residual))
        if pending is not None:
            return state.follow(pending)
    return None


def _add_in_place(x: Tensor, other: Any, *, alpha: float = 1) -> Tensor | None:
    """Return x after `x += alpha · other` as a deferred tensor, or None if torch must change the values of x."""
    state = _unfinished_state_of(x)
    result = None if state is None else _add(x, other, alpha=alpha)
    if state is not None and result is not None and state.finished is None:
        state.successor = result._state  # type: ignore[attr-defined]
        return result
    return None


_FUSED: dict[Callable[..., Any], Callable[..., Tensor | None]] = {
    torch.relu: _activation("relu"),
    Tensor.relu: _activation("relu"),
    F.relu: _activation("relu"),
    torch.relu_: _activation("relu", in_place=True),
    Tensor.relu_: _activation("relu", in_place=True),
    F.silu: _activation("silu"),
    F.gelu: _activation("gelu"),
    torch.add: _add,
    Tensor.add: _add,
    Tensor.__add__: _add,
    Tensor.__radd__: _add,
    Tensor.add_: _add_in_place,
    Tensor.__iadd__: _add_in_place,
}

_METADATA = {
    Tensor.shape.__get__,  # type: ignore[attr-defined]
    Tensor.dtype.__get__,  # type: ignore[attr-defined]
    Tensor.device.__get__,
    Tensor.ndim.__get__,  # type: ignore[attr-defined]
    Tensor.is_cuda.__get__,  # type: ignore[attr-defined]
    Tensor.is_meta.__get__,  # type: ignore[attr-defined]
    Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.__len__,
}


def has_forward_hooks(layer: nn.Module) -> bool:
    """Return whether forward hooks read the output of this layer. They may keep it and ask for its gradients."""
    hooks = layer._forward_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return bool(hooks or _has_any_global_hook())  # type: ignore[no-untyped-call]
