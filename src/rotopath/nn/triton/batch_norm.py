"""Batch norm, ReLU and max pooling on a GPU, as one fused operation.

`norm_relu_pool` replaces the three layers where `can_normalize` in `rotopath.nn.triton` returns True. The forward pass
reads the features once for the output and, in training, once before that for the statistics. It writes only the output.
The backward pass reads the features and the gradient of the output twice, and writes only the gradient of the features.

Arguments of the Triton kernels; all arrays are contiguous:

- `x`: features (B, H, W, C, N), read as a matrix with one row per pixel and one column per channel and orientation.
  `rows` is B·H·W, `columns` is C·N, and `height` and `width` are H and W.
- `y`: output (B, H/S, W/S, C, N) of max pooling over windows of S × S pixels, read as a matrix with `outputs` rows.
- `dy`, `dx`: gradients of the loss with respect to y and to x, with the shapes of y and x.
- `mean`, `inverse_std`, `weight`, `bias`: batch norm of each channel (C,), with `inverse_std` = 1 / √(variance + ε).
- `d_weight`, `d_bias`: gradients of the loss with respect to weight and bias (C,).
- `running_mean`, `running_variance`: running statistics (C,) of the batch norm, or None. `batches`: the number of
  batches that they were computed from, or None.
- `sums`, `squares`, `products`: partial sums (`programs`, C·N).

Sums over rows have two stages. In the first, each program adds up `steps` tiles of rows. In the second, one program per
channel adds up the partial sums of all `programs` of the first stage and of the N columns of the channel.

ROWS and COLUMNS are the size of a tile. N_BLOCK and PROGRAMS are N and `programs`, rounded up to a power of 2, as
Triton requires.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

COLUMNS = 128  # columns of a tile
ROWS, WARPS = 32, 4  # rows of a tile, and number of warps of a program of `_sum_columns_kernel`
MAX_PROGRAMS = 1024  # maximum number of programs that sum rows in parallel


def norm_relu_pool(x: Tensor, norm: nn.BatchNorm3d, pool: int = 1) -> Tensor:
    """Apply batch norm, ReLU and max pooling over pool × pool pixels to features (B, C, N, H, W).

    In training, this updates the running statistics of the batch norm. In evaluation, the result has no gradients.
    """
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), contiguous
    if norm.training:
        y: Tensor = NormReluPool.apply(rows, norm.weight, norm.bias, norm, pool)
    else:
        mean, inverse_std, weight, bias = running_parameters(norm)
        y = _apply(rows, torch.stack([mean, inverse_std]), weight, bias, pool)
    return y.permute(0, 3, 4, 1, 2)


class NormReluPool(torch.autograd.Function):
    """Autograd function: batch norm with the statistics of the batch, ReLU and max pooling of x (B, H, W, C, N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm3d, pool: int) -> Tensor:
        statistics = compute_statistics(x, norm)
        y = _apply(x, statistics, weight, bias, pool)
        ctx.save_for_backward(x, statistics, weight, bias)
        ctx.pool = pool
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, statistics, weight, bias = ctx.saved_tensors
        dy, pool = gradients[0].contiguous(), ctx.pool
        batch, height, width, channels, n = x.shape
        outputs, columns = batch * (height // pool) * (width // pool), channels * n
        programs, steps = split_rows(outputs, ROWS)
        partial_sums = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
        column_tiles = triton.cdiv(columns, COLUMNS)
        _sum_gradients_kernel[programs, column_tiles](
            x=x,
            dy=dy,
            mean=statistics[0],
            inverse_std=statistics[1],
            weight=weight,
            bias=bias,
            sums=partial_sums[0],
            products=partial_sums[1],
            outputs=outputs,
            columns=columns,
            height=height,
            width=width,
            steps=steps,
            N=n,
            S=pool,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
        d_weight, d_bias = reduce_gradients(partial_sums, channels)
        dx = torch.empty_like(x)
        _backward_kernel[triton.cdiv(outputs, ROWS), column_tiles](
            x=x,
            dy=dy,
            dx=dx,
            mean=statistics[0],
            inverse_std=statistics[1],
            weight=weight,
            bias=bias,
            d_weight=d_weight,
            d_bias=d_bias,
            outputs=outputs,
            columns=columns,
            height=height,
            width=width,
            count=batch * height * width * n,
            N=n,
            S=pool,
            ROWS=ROWS,
            COLUMNS=COLUMNS,
        )
        return dx, d_weight.to(weight.dtype), d_bias.to(bias.dtype), None, None


def _apply(x: Tensor, statistics: Tensor, weight: Tensor, bias: Tensor, pool: int) -> Tensor:
    """Apply batch norm, ReLU and max pooling to features x (B, H, W, C, N).

    `statistics` (2, C) are the mean and the inverse standard deviation of the batch norm.
    """
    batch, height, width, channels, n = x.shape
    y = torch.empty(batch, height // pool, width // pool, channels, n, device=x.device, dtype=x.dtype)
    outputs, columns = batch * (height // pool) * (width // pool), channels * n
    _forward_kernel[triton.cdiv(outputs, ROWS), triton.cdiv(columns, COLUMNS)](
        x=x,
        y=y,
        mean=statistics[0],
        inverse_std=statistics[1],
        weight=weight,
        bias=bias,
        outputs=outputs,
        columns=columns,
        height=height,
        width=width,
        N=n,
        S=pool,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )
    return y


def compute_statistics(x: Tensor, norm: nn.BatchNorm3d) -> Tensor:
    """Return the mean and the inverse standard deviation (2, C) of features x (B, H, W, C, N).

    This also updates the running statistics of the batch norm, if it has any.
    """
    batch, height, width, channels, n = x.shape
    rows, columns = batch * height * width, channels * n
    programs, steps = split_rows(rows, ROWS)
    sums, squares = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
    statistics = torch.empty(2, channels, device=x.device, dtype=torch.float32)
    _sum_columns_kernel[programs, triton.cdiv(columns, COLUMNS)](
        x=x,
        pivot=x,
        sums=sums,
        squares=squares,
        rows=rows,
        columns=columns,
        steps=steps,
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
    _reduce_statistics_kernel[channels,](
        pivot=x,
        sums=sums,
        squares=squares,
        mean=statistics[0],
        inverse_std=statistics[1],
        batches=norm.num_batches_tracked,
        running_mean=norm.running_mean,
        running_variance=norm.running_var,
        programs=programs,
        rows=rows,
        momentum=norm.momentum,
        eps=norm.eps,
        N=n,
        N_BLOCK=triton.next_power_of_2(n),
        PROGRAMS=triton.next_power_of_2(programs),
    )
    return statistics


def running_parameters(norm: nn.BatchNorm3d) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the running mean, the inverse running standard deviation, the weight and the bias (C,), in float32."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    inverse_std = (norm.running_var.float() + norm.eps).rsqrt()
    return norm.running_mean.float(), inverse_std, norm.weight.float(), norm.bias.float()


def reduce_gradients(partial_sums: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return the gradients (C,) of the weight and the bias of a batch norm from partial sums (2, programs, C·N).

    `partial_sums[0]` are sums of the gradient with respect to the output of the batch norm, for the bias.
    `partial_sums[1]` are sums of this gradient times the normalized features, for the weight.
    """
    programs, n = partial_sums.shape[1], partial_sums.shape[2] // channels
    d_weight, d_bias = partial_sums.new_empty(2, channels)
    _reduce_gradients_kernel[channels,](
        sums=partial_sums[0],
        products=partial_sums[1],
        d_weight=d_weight,
        d_bias=d_bias,
        programs=programs,
        N=n,
        N_BLOCK=triton.next_power_of_2(n),
        PROGRAMS=triton.next_power_of_2(programs),
    )
    return d_weight, d_bias


def split_rows(rows: int, tile_rows: int, max_programs: int | None = None) -> tuple[int, int]:
    """Divide rows into tiles of `tile_rows` rows, and the tiles among at most `max_programs` programs.

    Returns the number of programs and the number of tiles per program. `max_programs` is by default MAX_PROGRAMS.
    """
    tiles = triton.cdiv(rows, tile_rows)
    steps = triton.cdiv(tiles, MAX_PROGRAMS if max_programs is None else max_programs)
    return triton.cdiv(tiles, steps), steps


@triton.jit
def _sum_columns_kernel(x, pivot, sums, squares, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write, for each column of x, the sum of its values and the sum of their squares over the rows of this program.

    The first row of x, `pivot`, is subtracted from every row before summing. Otherwise, sums of squares would lose
    precision where the mean is large.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    origin = tl.load(pivot + column, mask=column_mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # summed over ROWS after the loop: each such sum synchronizes threads
    total_of_squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask[None, :]
        offset = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) - origin[None, :]
        value = tl.where(mask, value, 0.0)  # masked values were -pivot
        total += value
        total_of_squares += value * value
    offset = tl.program_id(0) * columns + column
    tl.store(sums + offset, tl.sum(total, axis=0), mask=column_mask)
    tl.store(squares + offset, tl.sum(total_of_squares, axis=0), mask=column_mask)


@triton.jit
def update_running_statistics(batches, running_mean, running_variance, channel, mean, variance, momentum):
    """Update the running statistics of one channel with `mean` and `variance`, the statistics of the batch.

    `variance` is the unbiased variance. For channel 0, this also adds 1 to the number `batches`.
    """
    if running_mean is not None:
        old = tl.load(running_mean + channel).to(mean.dtype)
        tl.store(running_mean + channel, old + momentum * (mean - old))
        old = tl.load(running_variance + channel).to(variance.dtype)
        tl.store(running_variance + channel, old + momentum * (variance - old))
    if batches is not None and channel == 0:
        tl.store(batches, tl.load(batches) + 1)


@triton.jit
def _reduce_statistics_kernel(
    pivot, sums, squares, mean, inverse_std, batches, running_mean, running_variance, programs, rows, momentum, eps,
    N: tl.constexpr, N_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the mean and inverse standard deviation of one channel, and update its running statistics.

    Both are computed from the partial sums of `_sum_columns_kernel`, which has subtracted `pivot` from all rows.
    """
    channel = tl.program_id(0)
    columns = tl.num_programs(0) * N
    orientation = tl.arange(0, N_BLOCK)
    column = channel * N + orientation
    program = tl.arange(0, PROGRAMS)
    mask = (program < programs)[:, None] & (orientation < N)[None, :]
    offset = program[:, None] * columns + column[None, :]
    total = tl.sum(tl.load(sums + offset, mask=mask, other=0.0), axis=0)
    total_of_squares = tl.sum(tl.load(squares + offset, mask=mask, other=0.0), axis=0)
    origin = tl.load(pivot + column, mask=orientation < N, other=0.0).to(tl.float32)
    column_means = tl.where(orientation < N, origin + total / rows, 0.0)
    average = tl.sum(column_means, axis=0) / N
    deviation = tl.where(orientation < N, column_means - average, 0.0)
    # Sum of the squared deviations of all values from the mean of the channel. A column contributes the squared
    # deviations from its own mean, and `rows` times the squared deviation of its mean from that of the channel.
    squared_deviations = tl.sum(total_of_squares - total * total / rows + deviation * deviation * rows, axis=0)
    count = rows * N
    variance = tl.maximum(squared_deviations, 0.0, propagate_nan=tl.PropagateNan.ALL) / count
    tl.store(mean + channel, average)
    tl.store(inverse_std + channel, 1.0 / tl.sqrt(variance + eps))
    unbiased = variance * count / (count - 1)
    update_running_statistics(batches, running_mean, running_variance, channel, average, unbiased, momentum)


@triton.jit
def _reduce_gradients_kernel(
    sums, products, d_weight, d_bias, programs,
    N: tl.constexpr, N_BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the weight and the bias of one channel.

    They are computed from partial sums: `sums` for the bias, and `products` for the weight.
    """
    channel = tl.program_id(0)
    columns = tl.num_programs(0) * N
    orientation = tl.arange(0, N_BLOCK)
    program = tl.arange(0, PROGRAMS)
    mask = (program < programs)[:, None] & (orientation < N)[None, :]
    offset = program[:, None] * columns + (channel * N + orientation)[None, :]
    tl.store(d_bias + channel, tl.sum(tl.load(sums + offset, mask=mask, other=0.0)))
    tl.store(d_weight + channel, tl.sum(tl.load(products + offset, mask=mask, other=0.0)))


@triton.jit
def load_scale_shift(mean, inverse_std, weight, bias, channel, mask):
    """Return the batch norm of the channels with indices `channel` as scale and shift: y = scale · x + shift.

    Where `mask` is False, the channel does not exist, and scale and shift are 0.
    """
    scale = tl.load(inverse_std + channel, mask=mask, other=0.0) * tl.load(weight + channel, mask=mask, other=0.0)
    shift = tl.load(bias + channel, mask=mask, other=0.0) - tl.load(mean + channel, mask=mask, other=0.0) * scale
    return scale, shift


@triton.jit
def _first_row_of_window(output, height, width, S: tl.constexpr):
    """Return, for each row `output` of y, the row of x that is the top left pixel of its window of S × S pixels."""
    out_width = width // S
    out_height = height // S
    out_column = output % out_width
    rest = output // out_width
    out_row = rest % out_height
    image = rest // out_height
    return (image.to(tl.int64) * height + out_row * S) * width + out_column * S


@triton.jit
def _forward_kernel(
    x, y, mean, inverse_std, weight, bias, outputs, columns, height, width,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the output y: batch norm, ReLU and max pooling of x."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    scale, shift = load_scale_shift(mean, inverse_std, weight, bias, column // N, column_mask)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (output < outputs)[:, None] & column_mask[None, :]
    first = _first_row_of_window(output, height, width, S)
    maximum = tl.zeros([ROWS, COLUMNS], tl.float32)  # starting at 0 applies ReLU
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            offset = (first + i * width + j)[:, None] * columns + column[None, :]
            value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
            normalized = value * scale[None, :] + shift[None, :]
            maximum = tl.maximum(maximum, normalized, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + output.to(tl.int64)[:, None] * columns + column[None, :], maximum, mask=mask)


@triton.jit
def _sum_gradients_kernel(
    x, dy, mean, inverse_std, weight, bias, sums, products, outputs, columns, height, width, steps,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write partial sums, over rows of dy, for the gradients of the bias (`sums`) and of the weight (`products`).

    The gradient of the bias is the sum of the gradient with respect to the output of batch norm. The gradient of the
    weight is the sum of this gradient times the normalized x. For each window, only the pixel that max pooling selected
    contributes, and only if ReLU passed its value.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    scale, shift = load_scale_shift(mean, inverse_std, weight, bias, column // N, column_mask)
    center = tl.load(mean + column // N, mask=column_mask, other=0.0)
    inverse = tl.load(inverse_std + column // N, mask=column_mask, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        output = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (output < outputs)[:, None] & column_mask[None, :]
        first = _first_row_of_window(output, height, width, S)
        maximum = tl.zeros([ROWS, COLUMNS], tl.float32)
        selected = tl.zeros([ROWS, COLUMNS], tl.float32)  # value of x that max pooling selects
        is_positive = tl.zeros([ROWS, COLUMNS], tl.int1)  # whether ReLU passes the selected value
        for i in tl.static_range(S):
            for j in tl.static_range(S):
                offset = (first + i * width + j)[:, None] * columns + column[None, :]
                value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
                normalized = value * scale[None, :] + shift[None, :]
                larger = normalized > maximum
                maximum = tl.where(larger, normalized, maximum)
                selected = tl.where(larger, value, selected)
                is_positive = is_positive | larger
        gradient = tl.load(dy + output.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
        gradient = tl.where(is_positive & mask, gradient.to(tl.float32), 0.0)
        total += gradient
        total_of_products += gradient * (selected - center[None, :])
    offset = tl.program_id(0) * columns + column
    tl.store(sums + offset, tl.sum(total, axis=0), mask=column_mask)
    tl.store(products + offset, tl.sum(total_of_products, axis=0) * inverse, mask=column_mask)


@triton.jit
def _backward_kernel(
    x, dy, dx, mean, inverse_std, weight, bias, d_weight, d_bias, outputs, columns, height, width, count,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of dx, the gradient with respect to x, from dy and the gradients of weight and bias.

    `count` = B·H·W·N is the number of values of a channel. In each window, dy is passed to the pixel that max pooling
    selected. The gradients of weight and bias are needed because the mean and the variance of the batch depend on x.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    channel = column // N
    scale, shift = load_scale_shift(mean, inverse_std, weight, bias, channel, column_mask)
    center = tl.load(mean + channel, mask=column_mask, other=0.0)
    inverse = tl.load(inverse_std + channel, mask=column_mask, other=0.0)
    mean_gradient = tl.load(d_bias + channel, mask=column_mask, other=0.0) / count
    slope = tl.load(d_weight + channel, mask=column_mask, other=0.0) / count * inverse
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (output < outputs)[:, None] & column_mask[None, :]
    first = _first_row_of_window(output, height, width, S)
    maximum = tl.zeros([ROWS, COLUMNS], tl.float32)
    argmax = tl.full([ROWS, COLUMNS], -1, tl.int32)
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            offset = (first + i * width + j)[:, None] * columns + column[None, :]
            normalized = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) * scale[None, :] + shift[None, :]
            larger = normalized > maximum
            maximum = tl.where(larger, normalized, maximum)
            argmax = tl.where(larger, i * S + j, argmax)
    gradient = tl.load(dy + output.to(tl.int64)[:, None] * columns + column[None, :], mask=mask, other=0.0)
    gradient = gradient.to(tl.float32)
    for i in tl.static_range(S):
        for j in tl.static_range(S):
            offset = (first + i * width + j)[:, None] * columns + column[None, :]
            centered = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) - center[None, :]  # in L2 cache
            routed = tl.where(argmax == i * S + j, gradient, 0.0)
            d_input = scale[None, :] * (routed - mean_gradient[None, :] - centered * slope[None, :])
            tl.store(dx + offset, d_input, mask=mask)
