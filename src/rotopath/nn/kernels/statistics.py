"""Sums over the rows of features, in Triton: the statistics of batch norm, and the gradients of its weights.

In: features as rows (pixels) by columns (channels by orientations), which is how they lie in memory. Out: what batch
norm needs of each channel. Many programs each sum up a part, and a last one for each channel adds up what they found.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

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
