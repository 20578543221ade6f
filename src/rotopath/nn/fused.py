"""Layers that follow each other, computed in one pass where that is faster: batch norm, ReLU and max pooling.

In: SE(2) features in training, on a GPU for Triton's kernels, on the CPU for torch's. Out: what the layers give one
after another, to rounding. Everywhere else (compile, export, other dtypes and layouts) the layers are the way.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from rotopath.nn import cpu
from rotopath.nn.norm import GroupBatchNorm2d
from rotopath.nn.pool import GroupMaxPool2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(x: Tensor, norm: nn.Module, relu: nn.Module) -> bool:
    """Whether `norm_relu_pool` does for these features (B, C, N, H, W) what these two layers do."""
    # In evaluation the features are not looked at: `freeze` follows the network with none.
    if not norm.training or type(norm) is not GroupBatchNorm2d or type(relu) is not nn.ReLU or _hooked(norm, relu):
        return False
    return cpu.can_normalise(x, norm) or (
        x.is_cuda and _has_triton() and _fits(x, norm) and not torch.compiler.is_compiling()
    )


def can_pool(pool: nn.Module) -> bool:
    """Whether a layer is the plain maximum that `norm_relu_pool` takes along."""
    return (
        type(pool) is GroupMaxPool2d
        and (pool.stride, pool.padding, pool.blur) == (pool.size, 0, 1)
        and not _hooked(pool)
    )


def norm_relu_pool(x: Tensor, norm: nn.Module, pool: int = 1) -> Tensor:
    """Batch norm by the statistics of the batch, ReLU, and the maximum over windows of pool × pool."""
    assert isinstance(norm, GroupBatchNorm2d)
    if x.shape[-2] % pool or x.shape[-1] % pool:
        raise ValueError(f"Windows of {pool} do not cover features of {x.shape[-2]} × {x.shape[-1]} px evenly.")
    if not x.is_cuda:
        return cpu.norm_relu_pool(x, norm, pool=pool)
    from rotopath.nn import kernels

    return kernels.norm_relu_pool(x, norm, pool)


def _fits(x: Tensor, norm: nn.Module) -> bool:
    return (
        type(norm) is GroupBatchNorm2d
        and norm.affine
        and norm.training
        and norm.momentum is not None
        and x.dtype in DTYPES
        and norm.weight.dtype == torch.float32
        and x.numel() > norm.num_features  # of a single value there is no variance, and torch says so
        and x.permute(0, 3, 4, 1, 2).is_contiguous()
    )


def _hooked(*layers: nn.Module) -> bool:
    """Whether someone looks at what goes into a layer or comes out of it."""
    return any(
        layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
        for layer in layers
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
