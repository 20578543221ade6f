"""What the moments of the patches of images tell about their lifting: batch norm's line, and gradients, in Triton.

In: sums over patches, by parts, and kernels as rows of taps. Out: the statistics of what lifting gives, which is never
looked at itself; and the gradients of kernels and of batch norm. In float64, since means are taken from squares.

Lifting with batch norm, ReLU and pooling, and the gradients of all four.

In: images, and kernels turned to all orientations. Out: what the layers give one after another. Lifting is linear: its
statistics, and the part of its gradient that batch norm adds, follow from the second moments of the image's patches.
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.triton import blur_pool, patches
from rotopath.nn.triton.batch_norm import move_along, recall, track
from rotopath.nn.triton.blur_pool import Filter

FEW, NUMBERS = 32, 128  # parts that are added up at once, and numbers side by side
AT_ONCE = 64  # orientations by rows of moments that are looked at at once
WARPS = 8


@triton.jit
def _add_up(partial, total, parts, numbers, FEW: tl.constexpr, NUMBERS: tl.constexpr):
    number = tl.program_id(0) * NUMBERS + tl.arange(0, NUMBERS)
    inside = (number < numbers)[None, :]
    sums = tl.zeros([FEW, NUMBERS], tl.float64)
    for first in range(0, parts, FEW):
        part = first + tl.arange(0, FEW)
        place = part.to(tl.int64)[:, None] * numbers + number[None, :]
        sums += tl.load(partial + place, mask=(part < parts)[:, None] & inside, other=0.0).to(tl.float64)
    tl.store(total + number, tl.sum(sums, axis=0), mask=number < numbers)


@triton.jit
def _load_lines(flat, column, taps, tap, n, N: tl.constexpr):
    inside = (n < N)[:, None] & (tap < taps)[None, :]
    return tl.load(flat + column[:, None] * taps + tap[None, :], mask=inside, other=0.0).to(tl.float64)


@triton.jit
def _find_line(
    moments, flat, weight, bias, mean, inverse, factor, shift, products,
    batches, running_mean, running_variance, taps, patches, momentum, eps,
    WIDE: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, TAPS: tl.constexpr, SOME: tl.constexpr,
):  # fmt: skip
    """Of one channel: statistics over all its orientations, the line for each, and its kernels times the moments."""
    channel = tl.program_id(0)
    n, tap = tl.arange(0, N_BLOCK), tl.arange(0, TAPS)
    column = channel * N + n
    lines = _load_lines(flat, column, taps, tap, n, N)
    sums = tl.load(moments + taps * WIDE + tap, mask=tap < taps, other=0.0)
    count = tl.zeros([], tl.float64) + patches
    means = tl.sum(lines * sums[None, :], axis=1) / count
    scattered = tl.zeros([N_BLOCK], tl.float64)
    for first in range(0, taps, SOME):
        row = first + tl.arange(0, SOME)
        place = row[:, None] * WIDE + tap[None, :]
        squares = tl.load(moments + place, mask=(row < taps)[:, None] & (tap < taps)[None, :], other=0.0)
        product = tl.sum(lines[:, None, :] * squares[None, :, :], axis=2)  # (N, SOME)
        here = tl.load(moments + taps * WIDE + row, mask=row < taps, other=0.0)
        apart = product - means[:, None] * here[None, :]
        scattered += tl.sum(_load_lines(flat, column, taps, row, n, N) * apart, axis=1)
        tl.store(
            products + column[:, None] * WIDE + row[None, :], product, mask=(n < N)[:, None] & (row < taps)[None, :]
        )
    average = tl.sum(means, axis=0) / N
    apart = tl.where(n < N, means - average, 0.0)
    variances = tl.maximum(scattered / count, 0.0, propagate_nan=tl.PropagateNan.ALL) + apart * apart
    variance = tl.sum(variances, axis=0) / N
    scale = 1.0 / tl.sqrt(variance + eps)
    tl.store(mean + channel, average)
    tl.store(inverse + channel, scale)
    slope = tl.load(weight + channel).to(tl.float64) * scale
    level = tl.load(bias + channel).to(tl.float64) - average * slope
    tl.store(factor + column, slope + tl.zeros([N_BLOCK], tl.float64), mask=n < N)
    tl.store(shift + column, level + tl.zeros([N_BLOCK], tl.float64), mask=n < N)
    values = count * N
    move_along(batches, running_mean, running_variance, channel, average, variance * values / (values - 1), momentum)


@triton.jit
def _find_gradients(
    sums_of_products, moments, flat, weight, mean, inverse, products, d_flat, d_weight, d_bias, columns, taps, patches,
    WIDE: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Of one channel, from the sums of taps times the gradient behind batch norm."""
    channel = tl.program_id(0)
    n, tap = tl.arange(0, N_BLOCK), tl.arange(0, TAPS)
    column = channel * N + n
    inside = (n < N)[:, None] & (tap < taps)[None, :]
    lines = _load_lines(flat, column, taps, tap, n, N)
    gradients = tl.load(sums_of_products + tap[None, :] * columns + column[:, None], mask=inside, other=0.0)
    middle, scale = tl.load(mean + channel), tl.load(inverse + channel)
    level = tl.sum(tl.load(sums_of_products + taps * columns + column, mask=n < N, other=0.0), axis=0)
    slope = scale * (tl.sum(tl.sum(gradients * lines, axis=1), axis=0) - middle * level)
    tl.store(d_bias + channel, level)
    tl.store(d_weight + channel, slope)
    # What batch norm takes from each gradient: its mean, and what goes along with the normalised feature.
    values = (tl.zeros([], tl.float64) + patches) * N
    sums = tl.load(moments + taps * WIDE + tap, mask=tap < taps, other=0.0)[None, :]
    along = tl.load(products + column[:, None] * WIDE + tap[None, :], mask=inside, other=0.0) - middle * sums
    gradients -= level / values * sums + slope / values * scale * along
    gradients *= tl.load(weight + channel).to(tl.float64) * scale
    tl.store(d_flat + column[:, None] * taps + tap[None, :], gradients, mask=inside)


def add_up(partial: Tensor) -> Tensor:
    """The sum over the first axis, in float64."""
    total = torch.empty(partial.shape[1:], device=partial.device, dtype=torch.float64)
    _add_up[triton.cdiv(total.numel(), NUMBERS),](partial, total, len(partial), total.numel(), FEW, NUMBERS)
    return total


def find_line(
    moments: Tensor,
    patches: int,
    flat: Tensor,
    weight: Tensor,
    bias: Tensor,
    batches: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and inverse deviation (2, C), factor and shift of each column (2, C·N), and kernels times moments.

    Of the lifting by kernels (C·N, taps), from the moments of so many patches; running statistics move along.
    """
    columns, taps = flat.shape
    n = columns // len(weight)
    statistics = torch.empty(2, len(weight), device=flat.device, dtype=torch.float64)
    line = torch.empty(2, columns, device=flat.device, dtype=torch.float32)
    products = torch.empty(columns, len(moments), device=flat.device, dtype=torch.float64)
    block = int(triton.next_power_of_2(n))
    _find_line[len(weight),](
        *(moments, flat, weight, bias, *statistics, *line, products),
        *(batches, running_mean, running_variance, taps, patches, momentum, eps),
        *(len(moments), n, block, int(triton.next_power_of_2(taps)), max(1, AT_ONCE // block)),
        num_warps=WARPS,
    )
    return statistics, line, products


def find_gradients(
    sums: Tensor,
    moments: Tensor,
    patches: int,
    flat: Tensor,
    weight: Tensor,
    statistics: Tensor,
    products: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Those of kernels (C·N, taps), and of batch norm's weight and bias, from sums (taps, C·N) behind batch norm."""
    columns, taps = flat.shape
    n = columns // len(weight)
    d_flat = torch.empty_like(flat, dtype=dtype)
    d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
    _find_gradients[len(weight),](
        *(sums, moments, flat, weight, *statistics, products, d_flat, d_weight, d_bias, columns, taps, patches),
        *(len(moments), n, *(int(triton.next_power_of_2(number)) for number in (n, taps))),
        num_warps=WARPS,
    )
    return d_flat, d_weight, d_bias


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
        statistics, line, products = find_line(sums, count, flat, weight, bias, *tracked)
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
            gradient = blur_pool.find_gradient(lifted, blur_pool.halve(gradient, y), ctx.pool, line)
            found = patches.find_products(x, gradient.flatten(-2), side)
        else:
            found = patches.find_products(x, gradient, side, ctx.pool, *kept)
        d_flat, d_weight, d_bias = find_gradients(
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
        y = blur_pool.apply(lifted, pool, norm)
        return y.flatten(-2), lifted, y
    y, winners = patches.lift_and_pool(x, flat, line, pool, remember)
    return (y,) if winners is None else (y, winners)


def _flatten(kernels: Tensor, x: Tensor) -> Tensor:
    """Kernels (C·N, C', k, k) as taps (C·N, k·k·C') in the precision of the images."""
    return kernels.permute(0, 2, 3, 1).flatten(1).to(x.dtype).contiguous()


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    channels, side, _ = like.shape[1:]
    return torch.unflatten(flat, 1, (side, side, channels)).permute(0, 3, 1, 2).to(like.dtype)
