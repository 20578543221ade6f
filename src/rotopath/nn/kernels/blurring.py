"""Batch norm, ReLU and blurred root mean squares, and the gradients of all three.

In: features as rows (pixels) by columns (channels by orientations). Out: what the layers give one after another.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.kernels import strips
from rotopath.nn.kernels.filters import Filter
from rotopath.nn.kernels.statistics import find_gradients, find_statistics, recall, track
from rotopath.nn.pool import GroupAvgPool2d


def norm_relu_blur(x: Tensor, norm: nn.BatchNorm3d, pool: GroupAvgPool2d) -> Tensor:
    """Batch norm, ReLU, and a pool of power 2, of features (B, C, N, H, W); without gradients in evaluation."""
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as it lies in memory
    if norm.training:
        y: Tensor = NormReluBlur.apply(rows, filter_of(pool), norm.weight, norm.bias, *track(norm))
    else:
        y = strips.apply(rows, filter_of(pool), recall(norm))
    return y.permute(0, 3, 4, 1, 2)


def blur(x: Tensor, pool: GroupAvgPool2d) -> Tensor:
    """The same pool alone."""
    y: Tensor = NormReluBlur.apply(x.permute(0, 3, 4, 1, 2), filter_of(pool))
    return y.permute(0, 3, 4, 1, 2)


def filter_of(pool: GroupAvgPool2d) -> Filter:
    return Filter(pool.size, pool.blur)


class NormReluBlur(torch.autograd.Function):
    """Blurred root mean squares of features (B, H, W, C, N), behind batch norm and ReLU if there are weights."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        pool: Filter,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        *tracked: Any,
    ) -> Tensor:
        line = () if weight is None else (*find_statistics(x, *tracked), weight, bias)
        y = strips.apply(x, pool, line)
        ctx.pool, ctx.given = pool, 2 + (0 if weight is None else 2 + len(tracked))
        ctx.save_for_backward(x, y, *line)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, *line = ctx.saved_tensors
        given = (x, strips.halve(gradients[0], y), ctx.pool, line)
        if not line:
            return (strips.find_gradient(*given), *[None] * (ctx.given - 1))
        d_weight, d_bias = find_gradients(strips.find_sums(*given), x.shape[3])
        dx = strips.find_gradient(*given, (d_weight, d_bias))
        return (dx, None, d_weight.to(line[2]), d_bias.to(line[2]), *[None] * (ctx.given - 4))
