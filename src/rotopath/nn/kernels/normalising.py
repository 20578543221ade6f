"""Batch norm, ReLU and max pooling in one pass each way, in Triton.

In: features as rows (pixels) by columns (channels by orientations), which is how they lie in memory. Out: what the
three layers give one after another. Forward, features are read twice and the answer is written once; backward, they are
read twice and their gradient is written once; nothing between the layers ever reaches memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.kernels.statistics import COLUMNS, divide, find_gradients, find_statistics, recall, track

ROWS = 32  # of a tile


@triton.jit
def _place_window(output, height, width, S: tl.constexpr):
    """The first row of the features under each output of the pool, which has S × S windows."""
    out_width = width // S
    out_height = height // S
    across = output % out_width
    rest = output // out_width
    down = rest % out_height
    image = rest // out_height
    return (image.to(tl.int64) * height + down * S) * width + across * S


@triton.jit
def load_line(mean, inverse, weight, bias, channel, inside):
    """The line that batch norm is: a factor, and what it adds."""
    factor = tl.load(inverse + channel, mask=inside, other=0.0) * tl.load(weight + channel, mask=inside, other=0.0)
    shift = tl.load(bias + channel, mask=inside, other=0.0) - tl.load(mean + channel, mask=inside, other=0.0) * factor
    return factor, shift


@triton.jit
def _forward(
    x, y, mean, inverse, weight, bias, outputs, columns, height, width,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    factor, shift = load_line(mean, inverse, weight, bias, column // N, inside)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seen = (output < outputs)[:, None] & inside[None, :]
    first = _place_window(output, height, width, S)
    highest = tl.zeros([ROWS, COLUMNS], tl.float32)  # ReLU lets nothing below pass
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            place = (first + i * width + j)[:, None] * columns + column[None, :]
            value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
            here = value * factor[None, :] + shift[None, :]
            highest = tl.maximum(highest, here, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + output.to(tl.int64)[:, None] * columns + column[None, :], highest, mask=seen)


@triton.jit
def _sum_gradients(
    x, dy, mean, inverse, weight, bias, sums, products, outputs, columns, height, width, steps,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums over columns of the gradient behind batch norm, and of its products with the normalised features."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    factor, shift = load_line(mean, inverse, weight, bias, column // N, inside)
    middle = tl.load(mean + column // N, mask=inside, other=0.0)
    scale = tl.load(inverse + column // N, mask=inside, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        output = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        seen = (output < outputs)[:, None] & inside[None, :]
        first = _place_window(output, height, width, S)
        highest = tl.zeros([ROWS, COLUMNS], tl.float32)
        chosen = tl.zeros([ROWS, COLUMNS], tl.float32)  # the feature that was the highest, if it passed
        passed = tl.zeros([ROWS, COLUMNS], tl.int1)
        for i in tl.static_range(S):
            for j in tl.static_range(S):
                place = (first + i * width + j)[:, None] * columns + column[None, :]
                value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
                here = value * factor[None, :] + shift[None, :]
                higher = here > highest
                highest = tl.where(higher, here, highest)
                chosen = tl.where(higher, value, chosen)
                passed = passed | higher
        gradient = tl.load(dy + output.to(tl.int64)[:, None] * columns + column[None, :], mask=seen, other=0.0)
        gradient = tl.where(passed & seen, gradient.to(tl.float32), 0.0)
        total += gradient
        total_of_products += gradient * (chosen - middle[None, :])
    place = tl.program_id(0) * columns + column
    tl.store(sums + place, tl.sum(total, axis=0), mask=inside)
    tl.store(products + place, tl.sum(total_of_products, axis=0) * scale, mask=inside)


@triton.jit
def _backward(
    x, dy, dx, mean, inverse, weight, bias, d_weight, d_bias, outputs, columns, height, width, count,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    channel = column // N
    factor, shift = load_line(mean, inverse, weight, bias, channel, inside)
    middle = tl.load(mean + channel, mask=inside, other=0.0)
    scale = tl.load(inverse + channel, mask=inside, other=0.0)
    level = tl.load(d_bias + channel, mask=inside, other=0.0) / count
    slope = tl.load(d_weight + channel, mask=inside, other=0.0) / count * scale
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    seen = (output < outputs)[:, None] & inside[None, :]
    first = _place_window(output, height, width, S)
    highest = tl.zeros([ROWS, COLUMNS], tl.float32)
    winner = tl.full([ROWS, COLUMNS], -1, tl.int32)
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            place = (first + i * width + j)[:, None] * columns + column[None, :]
            here = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) * factor[None, :] + shift[None, :]
            higher = here > highest
            highest = tl.where(higher, here, highest)
            winner = tl.where(higher, i * S + j, winner)
    gradient = tl.load(dy + output.to(tl.int64)[:, None] * columns + column[None, :], mask=seen, other=0.0)
    gradient = gradient.to(tl.float32)
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            place = (first + i * width + j)[:, None] * columns + column[None, :]
            value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) - middle[None, :]  # from the cache
            here = tl.where(winner == i * S + j, gradient, 0.0)
            tl.store(dx + place, factor[None, :] * (here - level[None, :] - value * slope[None, :]), mask=seen)


def norm_relu_pool(x: Tensor, norm: nn.BatchNorm3d, pool: int = 1) -> Tensor:
    """Batch norm, ReLU, and the maximum over windows, of features (B, C, N, H, W); without gradients in evaluation."""
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as it lies in memory
    if norm.training:
        y: Tensor = NormReluPool.apply(rows, norm.weight, norm.bias, pool, *track(norm))
    else:
        mean, inverse, weight, bias = recall(norm)
        y = _apply(rows, torch.stack([mean, inverse]), weight, bias, pool)
    return y.permute(0, 3, 4, 1, 2)


class NormReluPool(torch.autograd.Function):
    """Batch norm by the statistics of the batch, ReLU, and max pooling of features (B, H, W, C, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, pool: int, *tracked: Any) -> Tensor:
        statistics = find_statistics(x, *tracked)
        y = _apply(x, statistics, weight, bias, pool)
        ctx.save_for_backward(x, statistics, weight, bias)
        ctx.pool, ctx.tracked = pool, len(tracked)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics, weight, bias = ctx.saved_tensors
        dy, pool = gradients[0].contiguous(), ctx.pool
        batch, height, width, channels, n = x.shape
        outputs, columns = batch * (height // pool) * (width // pool), channels * n
        programs, steps = divide(outputs, ROWS)
        partial = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
        across = triton.cdiv(columns, COLUMNS)
        shape = (outputs, columns, height, width)
        _sum_gradients[programs, across](
            *(x, dy, *statistics, weight, bias, *partial, *shape, steps, n, pool, ROWS, COLUMNS)
        )
        d_line = find_gradients(partial, channels)
        dx = torch.empty_like(x)
        _backward[triton.cdiv(outputs, ROWS), across](
            *(x, dy, dx, *statistics, weight, bias, *d_line, *shape, batch * height * width * n),
            *(n, pool, ROWS, COLUMNS),
        )
        return dx, d_line[0].to(weight.dtype), d_line[1].to(bias.dtype), *[None] * (1 + ctx.tracked)


def _apply(x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """The line that batch norm is, ReLU and max pooling, for mean and inverse deviation (2, C) of each channel."""
    batch, height, width, channels, n = x.shape
    y = torch.empty(batch, height // pool, width // pool, channels, n, device=x.device, dtype=x.dtype)
    outputs, columns = batch * (height // pool) * (width // pool), channels * n
    _forward[triton.cdiv(outputs, ROWS), triton.cdiv(columns, COLUMNS)](
        *(x, y, *statistics, weight, bias, outputs, columns, height, width, n, pool, ROWS, COLUMNS)
    )
    return y
