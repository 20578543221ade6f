"""Layers that follow each other, computed in one pass where that is faster: batch norm, ReLU and max pooling.

In: SE(2) features on a GPU, in training. Out: what the layers give one after another, to rounding.
Everywhere else (CPU, compile, export, other dtypes and layouts) the layers themselves are the way.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from rotopath.nn.norm import GroupBatchNorm2d

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def can_fuse(x: Tensor, norm: torch.nn.Module) -> bool:
    """Whether `norm_relu_pool` takes these features (B, C, N, H, W) and this batch norm."""
    # In evaluation the features are not looked at: `freeze` follows the network with none.
    return norm.training and x.is_cuda and _has_triton() and _fits(x, norm) and not torch.compiler.is_compiling()


def _fits(x: Tensor, norm: torch.nn.Module) -> bool:
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


def norm_relu_pool(x: Tensor, norm: torch.nn.Module, pool: int = 1) -> Tensor:
    """Batch norm by the statistics of the batch, ReLU, and the maximum over windows of pool × pool."""
    from rotopath.nn.kernels import NormReluPool

    assert isinstance(norm, GroupBatchNorm2d)
    if x.shape[-2] % pool or x.shape[-1] % pool:
        raise ValueError(f"Windows of {pool} do not cover features of {x.shape[-2]} × {x.shape[-1]} px evenly.")
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as it lies in memory
    statistics = (norm.running_mean, norm.running_var)
    y: Tensor = NormReluPool.apply(rows, norm.weight, norm.bias, *statistics, norm.momentum, norm.eps, pool)  # type: ignore[no-untyped-call]
    return y.permute(0, 3, 4, 1, 2)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
