"""Layers that follow each other, computed in one pass where that is faster: batch norm, ReLU and pooling.

In: SE(2) features in training, on a GPU for Triton's kernels, on the CPU for torch's. Out: what the layers give one
after another, to rounding. Everywhere else (compile, export, other dtypes and layouts) the layers are the way.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from rotopath.nn import cpu
from rotopath.nn.norm import GroupBatchNorm2d
from rotopath.nn.pool import GroupAvgPool2d, GroupMaxPool2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(x: Tensor, norm: nn.Module, relu: nn.Module) -> bool:
    """Whether `norm_relu_pool` does for these features (B, C, N, H, W) what these two layers do."""
    # In evaluation the features are not looked at: `freeze` follows the network with none.
    if not norm.training or type(norm) is not GroupBatchNorm2d or type(relu) is not nn.ReLU or _hooked(norm, relu):
        return False
    return cpu.can_normalise(x, norm) or (
        x.is_cuda and _has_triton() and _fits(x, norm) and not torch.compiler.is_compiling()
    )


def can_pool(x: Tensor, pool: nn.Module) -> bool:
    """Whether `norm_relu_pool` takes this pool along: a plain maximum or, on a GPU, the root of a mean square."""
    if not isinstance(pool, GroupMaxPool2d | GroupAvgPool2d) or _hooked(pool):
        return False
    if (pool.stride, pool.padding) != (pool.size, 0):
        return False
    if type(pool) is GroupMaxPool2d:
        return pool.blur == 1
    return type(pool) is GroupAvgPool2d and x.is_cuda and pool.power == 2 and pool.blur <= 2 * pool.size + 1


def norm_relu_pool(x: Tensor, norm: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Batch norm by the statistics of the batch, ReLU, and a pool if there is one that can be taken along."""
    assert isinstance(norm, GroupBatchNorm2d)
    assert pool is None or isinstance(pool, GroupMaxPool2d | GroupAvgPool2d)
    size = 1 if pool is None else pool.size
    if x.shape[-2] % size or x.shape[-1] % size:
        raise ValueError(f"Windows of {size} do not cover features of {x.shape[-2]} × {x.shape[-1]} px evenly.")
    if not x.is_cuda:
        return cpu.norm_relu_pool(x, norm, pool=size)
    from rotopath.nn import blurring, kernels

    if isinstance(pool, GroupAvgPool2d):
        return blurring.norm_relu_blur(x, norm, pool)
    return kernels.norm_relu_pool(x, norm, size)


def pool_alone(x: Tensor, pool: nn.Module) -> Tensor:
    """What the pool gives, in training and on a GPU in one pass where several would be slow."""
    if (
        pool.training
        and isinstance(pool, GroupAvgPool2d)
        and x.is_cuda
        and can_pool(x, pool)
        and _lies_well(x)
        and not (x.shape[-2] % pool.size or x.shape[-1] % pool.size)
        and _has_triton()
        and not torch.compiler.is_compiling()
    ):
        from rotopath.nn import blurring

        return blurring.blur(x, pool)
    pooled: Tensor = pool(x)
    return pooled


def _fits(x: Tensor, norm: nn.Module) -> bool:
    return (
        type(norm) is GroupBatchNorm2d
        and norm.affine
        and norm.training
        and norm.momentum is not None
        and norm.weight.dtype == torch.float32
        and x.numel() > norm.num_features  # of a single value there is no variance, and torch says so
        and _lies_well(x)
    )


def _lies_well(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.permute(0, 3, 4, 1, 2).is_contiguous()


def _hooked(*layers: nn.Module) -> bool:
    """Whether someone looks at what goes into a layer or comes out of it."""
    return any(
        layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
        for layer in layers
    )


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
