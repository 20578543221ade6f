"""Which layers Triton's kernels do the work of on a GPU, and for which tensors; for all others torch does it."""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

if TYPE_CHECKING:
    from rotopath.nn.conv import LiftConv2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_PATCH = 127  # numbers under a kernel: with one that counts, as many as a tile of patches has columns
LARGEST_KERNEL = 7  # pixels a side, whose map is a tile
LIFTS = (8, 0)  # the generation of GPUs (Ampere) from which on the tiles of lifting fit into a multiprocessor


def takes(x: Tensor) -> bool:
    """Whether kernels can be launched on a tensor: it is one of numbers, on a GPU, and nobody records what is done."""
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cuda
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and unpack_dual(x).tangent is None  # type: ignore[no-untyped-call]
        and _has_triton()
    )


def serves(device: torch.device) -> bool:
    """Whether all kernels can be launched on a device; for large images they are the faster way."""
    return device.type == "cuda" and _has_triton() and torch.cuda.get_device_capability(device) >= LIFTS


def at(x: Tensor) -> AbstractContextManager[None]:
    """Launches kernels on the GPU where a tensor lies; of several, it need not be the current one."""
    place: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return place


def can_normalise(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Whether `kernels` can do this batch norm for these features."""
    return lies_well(x) and can_use(norm, x.numel() // norm.num_features)


def can_use(norm: nn.BatchNorm3d, values: int) -> bool:
    """Whether kernels can do what this batch norm does for so many values of each channel.

    In training by the statistics of the batch, which a single value does not have; in evaluation by running ones, as a
    line that is known before and that nothing is learned of.
    """
    if not norm.training:
        return norm.affine and norm.running_mean is not None and not torch.is_grad_enabled()
    return (
        norm.affine
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and norm.track_running_stats == (norm.running_mean is not None)
        and values > 1
    )


def lies_well(x: Tensor) -> bool:
    """Whether features (B, C, N, H, W) lie in memory as convolutions leave them, in a precision that kernels have."""
    return x.dtype in DTYPES and x.numel() > 0 and x.permute(0, 3, 4, 1, 2).is_contiguous()


def can_lift(x: Tensor, lift: "LiftConv2d") -> bool:
    """Whether `lifting` can do this convolution for these images: of few numbers under a kernel, in half precision."""
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (
        (lift.stride, lift.padding, lift.dilation, lift.groups) == (1, 0, 1, 1)
        and lift.bias is None
        and lift.kernel_size**2 * lift.in_channels <= LARGEST_PATCH
        and not x.requires_grad  # an image is where gradients end
        and precision(x) in (torch.bfloat16, torch.float16)
        and (torch.is_autocast_enabled("cuda") or lift.weight.dtype == x.dtype)
        and lift.weight.device == x.device
        and x.numel() > 0
        and extent < 2**31  # places are counted in 32 bits
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= LIFTS)
    )


def can_turn(x: Tensor, weight: Tensor, kernel_size: int) -> bool:
    """Whether `turning` can turn these base weights, for a convolution of x."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device == x.device
        and weight.dtype in DTYPES
        and kernel_size <= LARGEST_KERNEL
        and unpack_dual(weight).tangent is None  # type: ignore[no-untyped-call]
    )


def precision(x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """What a convolution computes in; without autocast it takes images and weights as they are."""
    casts = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cuda") if casts else (x if weight is None else weight).dtype


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
