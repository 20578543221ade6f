"""Triton kernels for NVIDIA GPUs, and functions that decide whether a layer can use them.

| module | computes | condition |
|---|---|---|
| `rotate_kernels` | rotated kernels from base weights, and the gradients of the base weights | `can_rotate` |
| `lift`, `patches` | lifting, alone or with batch norm, ReLU and a pool | `can_lift`, `can_use_norm` |
| `batch_norm` | batch norm, ReLU and max pooling | `can_normalize` |
| `blur_pool` | blurred root-mean-square pooling, alone or after batch norm and ReLU | `can_normalize` |

Each module also requires `can_run_on(x)`. A layer imports a module only if its conditions are met, because the modules
import Triton, which may not be installed. Otherwise the layer computes the same result with torch.
"""

from contextlib import AbstractContextManager
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

from rotopath.nn.checks import is_being_recorded

if TYPE_CHECKING:
    from rotopath.nn.conv import LiftConv2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_TAPS = 127  # kernel entries times input channels of a lifting layer; a tile holds 128: these and a constant tap
MAX_KERNEL_SIZE = 7  # the rotation map of larger kernels does not fit in one tile
MIN_LIFT_CAPABILITY = (8, 0)  # the Ampere generation; older GPUs have too little shared memory for lifting


def can_run_on(x: Tensor) -> bool:
    """Return whether Triton kernels can read this tensor.

    It must be an ordinary tensor on a GPU, and torch must not be compiling, tracing or transforming the running code.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor
        and x.is_cuda
        and not is_being_recorded()
        and not has_tangent(x)
        and _has_triton()
    )


def supports_device(device: torch.device) -> bool:
    """Return whether all kernels can run on this device.

    If so, a network with these kernels processes large images faster than a frozen network does.
    """
    return device.type == "cuda" and _has_triton() and torch.cuda.get_device_capability(device) >= MIN_LIFT_CAPABILITY


def on_device_of(x: Tensor) -> AbstractContextManager[None]:
    """Return a context manager inside which kernels are launched on the GPU of this tensor."""
    context: AbstractContextManager[None] = torch.cuda.device_of(x)
    return context


def can_normalize(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Return whether kernels can apply this batch norm to these features (B, C, N, H, W)."""
    return has_supported_layout(x) and can_use_norm(norm, x.numel() // norm.num_features)


def can_use_norm(norm: nn.BatchNorm3d, values: int) -> bool:
    """Return whether kernels can apply this batch norm to channels that have this number of values each.

    In training, the kernels compute the statistics of the batch, which needs two values or more per channel. In
    evaluation, the kernels use the running statistics and compute no gradients.
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


def has_supported_layout(x: Tensor) -> bool:
    """Return whether features (B, C, N, H, W) are contiguous channels-last and of a supported data type."""
    return x.dtype in DTYPES and x.numel() > 0 and x.permute(0, 3, 4, 1, 2).is_contiguous()


def can_lift(x: Tensor, layer: "LiftConv2d") -> bool:
    """Return whether kernels can apply this lifting layer to images x (B, C, H, W).

    The layer must have few taps, compute in half precision, and not need the gradient of the image.
    """
    extent = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return (
        (layer.stride, layer.padding, layer.dilation, layer.groups) == (1, 0, 1, 1)
        and layer.bias is None
        and layer.kernel_size**2 * layer.in_channels <= MAX_TAPS
        and not x.requires_grad
        and compute_dtype(x) in (torch.bfloat16, torch.float16)
        and (torch.is_autocast_enabled("cuda") or layer.weight.dtype == x.dtype)
        and layer.weight.device == x.device
        and x.numel() > 0
        and extent < 2**31  # kernels compute offsets with 32 bits
        and (not x.is_cuda or torch.cuda.get_device_capability(x.device) >= MIN_LIFT_CAPABILITY)
    )


def can_rotate(x: Tensor, weight: Tensor, kernel_size: int) -> bool:
    """Return whether a Triton kernel can rotate these base weights for a convolution of x."""
    return (
        type(weight) in (Tensor, nn.Parameter)
        and weight.device == x.device
        and weight.dtype in DTYPES
        and kernel_size <= MAX_KERNEL_SIZE
        and not has_tangent(weight)
    )


def compute_dtype(x: Tensor, weight: Tensor | None = None) -> torch.dtype:
    """Return the data type in which a convolution of x computes.

    It is the data type of autocast if enabled, else of the weights if given, else of x.
    """
    casts = torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return torch.get_autocast_dtype("cuda") if casts else (x if weight is None else weight).dtype


def has_tangent(x: Tensor) -> bool:
    """Return whether x is a dual tensor of torch's forward-mode differentiation."""
    return unpack_dual(x).tangent is not None


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
