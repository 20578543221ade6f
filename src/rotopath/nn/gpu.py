"""Which layers Triton's kernels do the work of on a GPU, and for which tensors; for all others torch does it."""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from rotopath.nn.conv import LiftConv2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST_PATCH = 127  # numbers under a kernel: with one that counts, as many as a tile of patches has columns


def takes(x: Tensor) -> bool:
    """Whether kernels can be launched on a tensor: it is one of numbers, on a GPU, and nobody records what is done."""
    return (
        type(x) is Tensor
        and x.is_cuda
        and _has_triton()
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
    )


def at(x: Tensor) -> AbstractContextManager[None]:
    """Launches kernels on the GPU where a tensor lies; of several, it need not be the current one."""
    place: AbstractContextManager[None] = torch.cuda.device_of(x)  # type: ignore[no-untyped-call]
    return place


def can_normalise(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Whether `kernels` can do this batch norm for these features; by running statistics without gradients only."""
    return norm.affine and lies_well(x) and (_can_train(x, norm) if norm.training else can_evaluate(norm))


def can_evaluate(norm: nn.BatchNorm3d) -> bool:
    """Whether nothing is learned, and batch norm is a line that is known before."""
    return not torch.is_grad_enabled() and norm.running_mean is not None


def lies_well(x: Tensor) -> bool:
    """Whether features (B, C, N, H, W) lie in memory as convolutions leave them, in a precision that kernels have."""
    return x.dtype in DTYPES and x.permute(0, 3, 4, 1, 2).is_contiguous()


def can_lift(x: Tensor, lift: "LiftConv2d") -> bool:
    """Whether `lifting` can do this convolution for these images: of few numbers under a kernel, in half precision."""
    return (
        (lift.stride, lift.padding, lift.dilation, lift.groups) == (1, 0, 1, 1)
        and lift.bias is None
        and lift.kernel_size**2 * lift.in_channels <= LARGEST_PATCH
        and not x.requires_grad  # an image is where gradients end
        and precision(x) in (torch.bfloat16, torch.float16)
        and x.numel() < 2**31  # places in it are counted in 32 bits
    )


def precision(x: Tensor) -> torch.dtype:
    """What a convolution computes in."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype


def _can_train(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    # Of a single value there is no variance, and torch says so.
    return norm.momentum is not None and norm.weight.dtype == torch.float32 and x.numel() > norm.num_features


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
