"""Triton kernels for NVIDIA GPUs, and functions that decide whether a layer can use them.

In this package, a *Triton kernel* is a function that runs on the GPU, and a *kernel* is a convolution kernel. *Lifting*
is the convolution (`LiftConv2d`) of images (B, C', H, W) with rotated kernels. It returns features (B, C, N, H, W) for
N orientations, which include the reflected orientations if there are any.

| module | computes | conditions |
|---|---|---|
| `rotate_kernels` | rotated kernels from base weights, and the gradients of the base weights | `can_rotate` |
| `lift`, `patches` | lifting | `can_lift` |
| `lift`, `patches` | lifting, batch norm, ReLU and a pool | `can_lift`, `can_use_norm` |
| `batch_norm` | batch norm, residual sum, activation and max pooling | `can_normalize` |
| `blur_pool` | blurred root-mean-square pooling | `has_supported_layout` |
| `blur_pool` | batch norm, ReLU and blurred root-mean-square pooling | `can_normalize` |

All rows also require `can_run_on(x)`. The modules import Triton, which may not be installed. Other code therefore
imports a module only after it has checked the conditions. If they are not met, torch computes the same result.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from rotopath.nn.features import is_being_recorded, is_channels_last

if TYPE_CHECKING:
    from rotopath.nn.conv import LiftConv2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TAPS = 127  # largest kernel_size² · in_channels of a lifting layer; with a constant tap, it fills a tile of 128
MAX_KERNEL_SIZE = 7  # for larger kernels, the matrix that rotates base weights does not fit in one tile
MIN_LIFT_CAPABILITY = (8, 0)  # the Ampere generation; older GPUs have too little shared memory for lifting


def can_run_on(x: Tensor) -> bool:
    """Return whether Triton kernels can be launched on this tensor.

    Triton must be installed. x must be a plain `torch.Tensor` on a GPU, without a tangent of forward-mode
    differentiation. torch must not be compiling, tracing or transforming (torch.func) the running code.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cuda
        and not is_being_recorded()
        and not has_tangent(x)
        and is_installed()
    )


def supports_device(device: torch.device) -> bool:
    """Return whether all Triton kernels of this package can run on this device.

    If so, a network processes large images faster with its SE(2) layers than after freezing it to a plain CNN.
    """
    return device.type == "cuda" and is_installed() and torch.cuda.get_device_capability(device) >= MIN_LIFT_CAPABILITY


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a context manager that makes the GPU of x the current one, on which Triton kernels are launched."""
    context: AbstractContextManager[None] = torch.cuda.device_of(x)
    return context


def can_normalize(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Return whether the Triton kernels can apply this batch norm to features x (B, C, N, H, W)."""
    return has_supported_layout(x) and can_use_norm(norm, x.numel() // norm.num_features)


def can_use_norm(norm: nn.BatchNorm3d, values: int) -> bool:
    """Return whether the Triton kernels can apply this batch norm to features with `values` values per channel.

    `values` is B·N·H·W for features (B, C, N, H, W).

    In training, the Triton kernels compute the statistics of the batch, which requires at least two values per channel.
    In evaluation, they use the running statistics.
    """
    if not norm.training:
        return norm.affine and norm.running_mean is not None
    return (
        norm.affine
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and norm.track_running_stats == (norm.running_mean is not None)
        and values > 1
    )


def has_supported_layout(x: Tensor) -> bool:
    """Return whether features x (B, C, N, H, W) are not empty, contiguous channels-last and of a supported data type.

    Contiguous channels-last means that the order of the axes in memory is B, H, W, C, N.
    """
    return x.dtype in DTYPES and x.numel() > 0 and is_channels_last(x)


def can_lift(x: Tensor, layer: "LiftConv2d") -> bool:
    """Return whether the Triton kernels can apply this lifting layer to images x (B, C', H, W).

    The layer must have stride 1, no padding, dilation, groups, bias or pool, and at most MAX_TAPS taps. It must compute
    in half precision. The gradient with respect to x is not computed, so x must not require it.
    """
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (
        (layer.stride, layer.padding, layer.dilation, layer.groups, layer.pool) == (1, 0, 1, 1, 1)
        and layer.bias is None
        and layer.kernel_size**2 * layer.in_channels <= MAX_TAPS
        and not x.requires_grad
        and compute_dtype(x) in (torch.bfloat16, torch.float16)
        and (torch.is_autocast_enabled("cuda") or layer.weight.dtype == x.dtype)
        and layer.weight.device == x.device
        and x.numel() > 0
        and extent < 2**31  # the Triton kernels compute offsets in x with 32 bits
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= MIN_LIFT_CAPABILITY)
    )


def can_rotate(x: Tensor, weight: Tensor, kernel_size: int) -> bool:
    """Return whether a Triton kernel can compute the rotated kernels of a convolution of x from base weights."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device == x.device
        and weight.dtype in DTYPES
        and kernel_size <= MAX_KERNEL_SIZE
        and not has_tangent(weight)
    )


class LaunchableKernel:
    """A compiled Triton kernel, launched as `kernel[grid](**arguments)`.

    For each launch, Triton finds out which compiled variant of the kernel fits the arguments. In a network of small
    layers, a GPU waits for that. This class remembers the variant for arguments with the same values, data types and
    alignment.
    """

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._names: list[str] = kernel.arg_names
        self._variants: dict[tuple[Any, ...], Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], **arguments: Any) -> None:
        values = [arguments[name] for name in self._names]
        # A variant may assume that an address is a multiple of 16, or that a whole number has a certain value.
        key = tuple([(v.dtype, v.get_device(), v.data_ptr() % 16) if isinstance(v, Tensor) else v for v in values])
        variant = self._variants.get(key)
        if variant is not None:
            variant[*grid, *(1,) * (3 - len(grid))](*values)
        else:
            self._variants[key] = self._kernel[grid](**arguments)  # None in Triton's interpreter


def jit(function: Callable[..., None]) -> LaunchableKernel:
    """Decorator: compile a function to a Triton kernel when it is launched for the first time."""
    import triton

    return LaunchableKernel(triton.jit(function))


def divide_up(dividend: int, divisor: int) -> int:
    """Return the quotient of two whole numbers, rounded up, in less time than `triton.cdiv`."""
    return -(-dividend // divisor)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not below a positive whole number."""
    return 1 << (number - 1).bit_length()


def compute_dtype(x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """Return the data type in which a convolution of x computes.

    It is the data type of autocast if autocast is enabled and x is not float64. Otherwise it is the data type of
    `weight`, or that of x if no weight is given.
    """
    casts = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cuda") if casts else (x if weight is None else weight).dtype


def has_tangent(x: Tensor) -> bool:
    """Return whether x is a dual tensor, which has a tangent for torch's forward-mode differentiation."""
    return unpack_dual(x).tangent is not None


@cache
def is_installed() -> bool:
    """Return whether the package Triton is installed."""
    return find_spec("triton") is not None
