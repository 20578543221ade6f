"""Sums over the rows of features, in Triton: the statistics of batch norm, and the gradients of its weights.

In: features as rows (pixels) by columns (channels by orientations), which is how they lie in memory. Out: what batch
norm needs of each channel. Many programs each sum up a part, and a last one for each channel adds up what they found.

Batch norm, ReLU and max pooling in one pass each way, in Triton.

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

COLUMNS = 128  # of a tile
PROGRAMS = 1024  # at most, that sum up columns; each writes what it has found
ROWS, WARPS = 32, 4  # of a tile, and that read it


@triton.jit
def _sum_columns(x, pivot, sums, squares, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums and sums of squares of the columns, less a pivot, which keeps digits where means are large."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    origin = tl.load(pivot + column, mask=inside, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # rows are added up at the end, since it takes all threads to do it
    total_of_squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        seen = (row < rows)[:, None] & inside[None, :]
        place = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32) - origin[None, :]
        value = tl.where(seen, value, 0.0)
        total += value
        total_of_squares += value * value
    place = tl.program_id(0) * columns + column
    tl.store(sums + place, tl.sum(total, axis=0), mask=inside)
    tl.store(squares + place, tl.sum(total_of_squares, axis=0), mask=inside)


@triton.jit
def move_along(batches, running_mean, running_variance, channel, mean, variance, momentum):
    """Running statistics, by those of a batch; and the count of batches."""
    if running_mean is not None:
        old = tl.load(running_mean + channel).to(mean.dtype)
        tl.store(running_mean + channel, old + momentum * (mean - old))
        old = tl.load(running_variance + channel).to(variance.dtype)
        tl.store(running_variance + channel, old + momentum * (variance - old))
    if batches is not None and channel == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _find_statistics(
    pivot, sums, squares, mean, inverse, batches, running_mean, running_variance, programs, rows, momentum, eps,
    N: tl.constexpr, N_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Mean and inverse deviation of one channel, over all its columns; running statistics move along."""
    channel = tl.program_id(0)
    columns = tl.num_programs(0) * N
    orientation = tl.arange(0, N_BLOCK)
    column = channel * N + orientation
    program = tl.arange(0, PROGRAMS)
    seen = (program < programs)[:, None] & (orientation < N)[None, :]
    place = program[:, None] * columns + column[None, :]
    total = tl.sum(tl.load(sums + place, mask=seen, other=0.0), axis=0)
    total_of_squares = tl.sum(tl.load(squares + place, mask=seen, other=0.0), axis=0)
    origin = tl.load(pivot + column, mask=orientation < N, other=0.0).to(tl.float32)
    means = tl.where(orientation < N, origin + total / rows, 0.0)
    average = tl.sum(means, axis=0) / N
    apart = tl.where(orientation < N, means - average, 0.0)
    scattered = tl.sum(total_of_squares - total * total / rows + apart * apart * rows, axis=0)
    count = rows * N
    variance = tl.maximum(scattered, 0.0, propagate_nan=tl.PropagateNan.ALL) / count
    tl.store(mean + channel, average)
    tl.store(inverse + channel, 1.0 / tl.sqrt(variance + eps))
    move_along(batches, running_mean, running_variance, channel, average, variance * count / (count - 1), momentum)


@triton.jit
def _find_gradients(
    sums, products, d_weight, d_bias, programs,
    N: tl.constexpr, N_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """The gradients of one channel's weight and bias, over all its columns."""
    channel = tl.program_id(0)
    columns = tl.num_programs(0) * N
    orientation = tl.arange(0, N_BLOCK)
    program = tl.arange(0, PROGRAMS)
    seen = (program < programs)[:, None] & (orientation < N)[None, :]
    place = program[:, None] * columns + (channel * N + orientation)[None, :]
    tl.store(d_bias + channel, tl.sum(tl.load(sums + place, mask=seen, other=0.0)))
    tl.store(d_weight + channel, tl.sum(tl.load(products + place, mask=seen, other=0.0)))


def find_statistics(
    x: Tensor,
    batches: Tensor | None,
    running_mean: Tensor | None,
    running_variance: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    """Mean and inverse deviation (2, C) of the channels of features (B, H, W, C, N); running statistics move along."""
    batch, height, width, channels, n = x.shape
    rows, columns = batch * height * width, channels * n
    programs, steps = divide(rows, ROWS)
    partial = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
    statistics = torch.empty(2, channels, device=x.device, dtype=torch.float32)
    _sum_columns[programs, triton.cdiv(columns, COLUMNS)](
        *(x, x, *partial, rows, columns, steps, ROWS, COLUMNS), num_warps=WARPS
    )
    _find_statistics[channels,](
        *(x, *partial, *statistics, batches, running_mean, running_variance, programs, rows, momentum, eps),
        *(n, triton.next_power_of_2(n), triton.next_power_of_2(programs)),
    )
    return statistics


def track(norm: nn.BatchNorm3d) -> tuple[Tensor | None, Tensor | None, Tensor | None, float | None, float]:
    """The count of batches and the running statistics of a batch norm, which move along, by how much, and its eps."""
    return norm.num_batches_tracked, norm.running_mean, norm.running_var, norm.momentum, norm.eps


def recall(norm: nn.BatchNorm3d) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Mean and inverse deviation by the running statistics, weight and bias, in float32."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    inverse = (norm.running_var.float() + norm.eps).rsqrt()
    return norm.running_mean.float(), inverse, norm.weight.float(), norm.bias.float()


def find_gradients(partial: Tensor, channels: int) -> Tensor:
    """Gradients (2, C) of weight and bias, from the sums and products that each program found (2, programs, C·N)."""
    programs, n = partial.shape[1], partial.shape[2] // channels
    d_line = partial.new_empty(2, channels)
    _find_gradients[channels,](*partial, *d_line, programs, n, *map(triton.next_power_of_2, (n, programs)))
    return d_line


def divide(rows: int, of_a_tile: int, among: int | None = None) -> tuple[int, int]:
    """How many programs, and how many tiles each of them sums up."""
    tiles = triton.cdiv(rows, of_a_tile)
    steps = triton.cdiv(tiles, PROGRAMS if among is None else among)
    return triton.cdiv(tiles, steps), steps


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
