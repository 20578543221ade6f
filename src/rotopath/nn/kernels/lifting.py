"""Lifting with batch norm, ReLU and pooling, and the gradients of all four.

In: images, and kernels turned to all orientations. Out: what the layers give one after another. Lifting is linear: its
statistics, and the part of its gradient that batch norm adds, follow from the second moments of the image's patches.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.kernels import moments, patches, strips
from rotopath.nn.kernels.filters import Filter
from rotopath.nn.kernels.statistics import recall, track


def lift(x: Tensor, kernels: Tensor, orientations: int) -> Tensor:
    """Images (B, C', H, W) and kernels (C·N, C', k, k) to features (B, C, N, H, W), in the precision of the images."""
    y: Tensor = Lift.apply(x, kernels)
    return torch.unflatten(y, -1, (-1, orientations)).permute(0, 3, 4, 1, 2)


Pool = int | Filter  # maxima over windows of that size, or root mean squares by a filter


def lift_norm_relu_pool(x: Tensor, kernels: Tensor, norm: nn.BatchNorm3d, pool: Pool = 1) -> Tensor:
    """The same, with batch norm, ReLU and a pool."""
    n = kernels.shape[0] // norm.num_features
    if norm.training:
        y: Tensor = LiftNormReluPool.apply(x, kernels, norm.weight, norm.bias, pool, *track(norm))
    else:
        mean, inverse, weight, bias = recall(norm)
        line = torch.stack([weight * inverse, bias - mean * weight * inverse]).repeat_interleave(n, 1)
        y, *_ = _apply(x, _flatten(kernels, x), (mean, inverse, weight, bias), line, pool)
    return torch.unflatten(y, -1, (-1, n)).permute(0, 3, 4, 1, 2)


class Lift(torch.autograd.Function):
    """Correlation of images (B, C', H, W) with kernels (C·N, C', k, k): features (B, H, W, C·N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.like = kernels.new_empty(0, *kernels.shape[1:])
        return patches.lift(x, _flatten(kernels, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        products = patches.find_products(x, gradients[0], ctx.like.shape[-1])
        return None, _unflatten(products[: math.prod(ctx.like.shape[1:])].t(), ctx.like)


class LiftNormReluPool(torch.autograd.Function):
    """The same, with batch norm by the statistics of the batch, ReLU and pooling."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernels: Tensor, weight: Tensor, bias: Tensor, pool: Pool, *tracked: Any
    ) -> Tensor:
        flat = _flatten(kernels, x)
        sums, count = patches.find_moments(x, kernels.shape[-1])
        statistics, line, products = moments.find_line(sums, count, flat, weight, bias, *tracked)
        mean, inverse = statistics.float() if isinstance(pool, Filter) else statistics
        y, *kept = _apply(x, flat, (mean, inverse, weight, bias), line, pool, remember=True)
        ctx.save_for_backward(x, flat, weight, bias, sums, statistics, products, *kept)
        ctx.like, ctx.count, ctx.pool = kernels.new_empty(0, *kernels.shape[1:]), count, pool
        ctx.given = 5 + len(tracked)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, flat, weight, bias, sums, statistics, products, *kept = ctx.saved_tensors
        gradient, side = gradients[0].contiguous(), ctx.like.shape[-1]
        if isinstance(ctx.pool, Filter):
            lifted, y = kept
            line = (*statistics.float(), weight, bias)
            gradient = strips.find_gradient(lifted, strips.halve(gradient, y), ctx.pool, line)
            found = patches.find_products(x, gradient.flatten(-2), side)
        else:
            found = patches.find_products(x, gradient, side, ctx.pool, *kept)
        d_flat, d_weight, d_bias = moments.find_gradients(
            found, sums, ctx.count, flat, weight, statistics, products, ctx.like.dtype
        )
        return None, _unflatten(d_flat, ctx.like), d_weight, d_bias, *[None] * (ctx.given - 4)


def _apply(
    x: Tensor, flat: Tensor, norm: tuple[Tensor, ...], line: Tensor, pool: Pool, remember: bool = False
) -> tuple[Tensor, ...]:
    """Features (B, H, W, C·N), and what gradients need, for mean, inverse deviation, weight and bias of batch norm.

    The line is what they come to for each column.
    """
    if isinstance(pool, Filter):
        lifted = patches.lift(x, flat).unflatten(-1, (len(norm[0]), -1))
        y = strips.apply(lifted, pool, norm)
        return y.flatten(-2), lifted, y
    y, winners = patches.lift_and_pool(x, flat, line, pool, remember)
    return (y,) if winners is None else (y, winners)


def _flatten(kernels: Tensor, x: Tensor) -> Tensor:
    """Kernels (C·N, C', k, k) as taps (C·N, k·k·C') in the precision of the images."""
    return kernels.permute(0, 2, 3, 1).flatten(1).to(x.dtype).contiguous()


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    channels, side, _ = like.shape[1:]
    return torch.unflatten(flat, 1, (side, side, channels)).permute(0, 3, 1, 2).to(like.dtype)
