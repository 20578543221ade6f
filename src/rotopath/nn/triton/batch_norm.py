"""Batch norm on a GPU, alone or together with a residual sum, an activation and max pooling.

`compute_statistics` reads the features once, `apply` reads them once more and writes only the output, and
`compute_gradients` reads the features and the gradient of the output twice, and writes only the gradients of the
features and of the residual. All functions take features (B, C, N, H, W) that are contiguous channels-last, for which
`can_normalize` in `rotopath.nn.triton` returns True.

Arguments of the Triton kernels; all arrays are contiguous in the order B, H, W, C, N:

- `x`: features, read as a matrix with one row per pixel and one column per channel and orientation. `rows` is B·H·W,
  `columns` is C·N, and `height` and `width` are H and W. Without a pool, every k rows may be joined into one row
  (`_Matrix`). Then `rows` is B·H·W / k, and `columns` is k·C·N. `period` is always C·N.
- `residual`: features like x that are added after batch norm, or None. Not with a pool.
- `y`: output after max pooling over windows of S × S pixels, read as a matrix with `outputs` rows. S = 1 is no pool.
- `dy`, `dx`, `d_residual`: gradients of the loss with respect to y, x and the residual.
- `statistics`: mean of each channel, then 1 / √(variance + ε) of each channel (2, C).
- `weight`, `bias`: of the batch norm (C,). `d_parameters`: gradients of the loss with respect to both (2, C).
- `running_mean`, `running_variance`: running statistics (C,) of the batch norm, or None. `batches`: the number of
  batches that they were computed from, or None.
- `sums`: two kinds of partial sums (2, `programs`, `columns`). A launch takes longer with more arguments, so that
  arrays of the same kind are one argument.
- ACTIVATION: the function after batch norm and residual sum, one of the numbers in ACTIVATIONS. With a pool, ReLU.

Sums over rows have two stages. In the first, each program adds up `steps` tiles of rows, and writes its partial sums of
each column. In the second, one program per channel adds up all partial sums in the columns of the channel.

ROWS and COLUMNS are the size of a tile. BLOCK is the number of columns of a channel, and PROGRAMS is `programs`. Both
are rounded up to a power of 2, as Triton requires.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from rotopath.nn.features import empty_features
from rotopath.nn.triton import divide_up, jit, next_power_of_2

COLUMNS = 128  # maximum number of columns of a tile
TILE = 4096  # elements of a tile: rows times columns
UNIT = 16  # rows of memory that start at multiples of this number of elements are read fastest
MAX_PROGRAMS = 1024  # maximum number of programs that sum rows in parallel
ACTIVATIONS = {"none": 0, "relu": 1, "silu": 2, "gelu": 3}


class _Matrix(NamedTuple):
    """Features read as a matrix, and its division into tiles. If C·N is not a multiple of UNIT, rows are joined."""

    rows: int
    columns: int  # a multiple of C·N
    tile_rows: int
    tile_columns: int
    grid: tuple[int, int]  # number of tiles


def compute_statistics(x: Tensor, norm: nn.BatchNorm3d) -> Tensor:
    """Return the mean and the inverse standard deviation (2, C) of features x, and update the running statistics."""
    channels, n = x.shape[1:3]
    matrix = _as_matrix(x.shape)
    programs, steps = split_rows(matrix.rows, matrix.tile_rows)
    sums = torch.empty(2, programs, matrix.columns, device=x.device, dtype=torch.float32)
    statistics = torch.empty(2, channels, device=x.device, dtype=torch.float32)
    _sum_columns_kernel[programs, matrix.grid[1]](
        x=x,
        sums=sums,
        rows=matrix.rows,
        columns=matrix.columns,
        steps=steps,
        ROWS=matrix.tile_rows,
        COLUMNS=matrix.tile_columns,
    )
    _reduce_statistics_kernel[channels,](
        x=x,
        sums=sums,
        statistics=statistics,
        batches=norm.num_batches_tracked,
        running_mean=norm.running_mean,
        running_variance=norm.running_var,
        programs=programs,
        rows=matrix.rows,
        momentum=norm.momentum,
        eps=norm.eps,
        columns=matrix.columns,
        period=channels * n,
        N=n,
        BLOCK=next_power_of_2(matrix.columns // channels),
        PROGRAMS=next_power_of_2(programs),
    )
    return statistics


def running_statistics(norm: nn.BatchNorm3d) -> Tensor:
    """Return the running mean and the inverse running standard deviation (2, C), in float32."""
    assert norm.running_mean is not None
    statistics = torch.empty(2, norm.num_features, device=norm.running_mean.device, dtype=torch.float32)
    _running_statistics_kernel[divide_up(norm.num_features, COLUMNS),](
        running_mean=norm.running_mean,
        running_variance=norm.running_var,
        statistics=statistics,
        channels=norm.num_features,
        eps=norm.eps,
        COLUMNS=COLUMNS,
    )
    return statistics


def apply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    statistics: Tensor,
    activation: str = "none",
    pool: int = 1,
) -> Tensor:
    """Apply batch norm, a residual sum, an activation and max pooling over pool × pool pixels to features x.

    `statistics` (2, C) are the mean and the inverse standard deviation of the batch norm.
    """
    batch, channels, n, height, width = x.shape
    y = empty_features((batch, channels, n, height // pool, width // pool), x)
    matrix = _as_matrix(y.shape, join=pool == 1)
    _forward_kernel[matrix.grid](
        x=x,
        residual=residual,
        y=y,
        statistics=statistics,
        weight=weight,
        bias=bias,
        outputs=matrix.rows,
        columns=matrix.columns,
        period=channels * n,
        height=height,
        width=width,
        N=n,
        S=pool,
        ACTIVATION=ACTIVATIONS[activation],
        ROWS=matrix.tile_rows,
        COLUMNS=matrix.tile_columns,
    )
    return y


def compute_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    y: Tensor | None,
    statistics: Tensor,
    from_batch: bool,
    activation: str = "none",
    pool: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients with respect to x, weight, bias and residual, from `dy`, that with respect to the output.

    `from_batch` is whether the statistics are those of x, and not running statistics. If a residual was added, give it,
    or the output `y` if the activation is ReLU.
    """
    channels, n, height, width = x.shape[1:]
    matrix = _as_matrix(dy.shape, join=pool == 1)
    dy = dy.permute(0, 3, 4, 1, 2).contiguous()
    programs, steps = split_rows(matrix.rows, matrix.tile_rows)
    sums = torch.empty(2, programs, matrix.columns, device=x.device, dtype=torch.float32)
    inputs = {"x": x, "dy": dy, "residual": residual, "y": y, "weight": weight, "bias": bias}
    inputs["statistics"] = statistics
    sizes = {"outputs": matrix.rows, "columns": matrix.columns, "period": channels * n}
    sizes |= {"height": height, "width": width, "N": n, "S": pool}
    sizes |= {"ACTIVATION": ACTIVATIONS[activation], "ROWS": matrix.tile_rows, "COLUMNS": matrix.tile_columns}
    _sum_gradients_kernel[programs, matrix.grid[1]](sums=sums, steps=steps, **inputs, **sizes)
    d_parameters = reduce_gradients(sums, channels, n)
    dx = empty_features(x.shape, x)
    d_residual = None if residual is None and y is None else empty_features(x.shape, x)
    _backward_kernel[matrix.grid](
        dx=dx,
        d_residual=d_residual,
        d_parameters=d_parameters,
        count=x.numel() // channels,
        FROM_BATCH=from_batch,
        **inputs,
        **sizes,
    )
    return dx, d_parameters[0], d_parameters[1], d_residual


def reduce_gradients(sums: Tensor, channels: int, n: int) -> Tensor:
    """Return the gradients (2, C) of the weight and the bias of a batch norm from partial sums (2, programs, columns).

    `sums[0]` are sums of the gradient with respect to the output of the batch norm, for the bias. `sums[1]` are sums of
    this gradient times the normalized features, for the weight. There are C·N columns, or a multiple of this number.
    """
    programs, columns = sums.shape[1:]
    d_parameters = sums.new_empty(2, channels)
    _reduce_gradients_kernel[channels,](
        sums=sums,
        d_parameters=d_parameters,
        programs=programs,
        columns=columns,
        period=channels * n,
        N=n,
        BLOCK=next_power_of_2(columns // channels),
        PROGRAMS=next_power_of_2(programs),
    )
    return d_parameters


def split_rows(rows: int, tile_rows: int, max_programs: int | None = None) -> tuple[int, int]:
    """Divide rows into tiles of `tile_rows` rows, and the tiles among at most `max_programs` programs.

    Returns the number of programs and the number of tiles per program. `max_programs` is by default MAX_PROGRAMS.
    """
    tiles = divide_up(rows, tile_rows)
    steps = divide_up(tiles, MAX_PROGRAMS if max_programs is None else max_programs)
    return divide_up(tiles, steps), steps


@lru_cache(maxsize=1024)
def _as_matrix(shape: torch.Size, join: bool = True) -> _Matrix:
    """Read channels-last features (B, C, N, H, W) as a matrix. If `join`, rows may be joined to reach a UNIT."""
    batch, channels, n, height, width = shape
    rows, columns = batch * height * width, channels * n
    joined = UNIT // math.gcd(columns, UNIT)
    if join and rows % joined == 0:
        rows, columns = rows // joined, columns * joined
    tile_columns = min(next_power_of_2(columns), COLUMNS)
    tile_rows = TILE // tile_columns
    return _Matrix(
        rows, columns, tile_rows, tile_columns, (divide_up(rows, tile_rows), divide_up(columns, tile_columns))
    )


@jit
def _sum_columns_kernel(x, sums, rows, columns, steps, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Write, for each column of x, the sum of its values and the sum of their squares over the rows of this program.

    The first row of x is subtracted from every row before summing. Otherwise, sums of squares would lose precision
    where the mean is large.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    origin = tl.load(x + column, mask=column_mask, other=0.0).to(tl.float32)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)  # summed over ROWS after the loop: each such sum synchronizes threads
    total_of_squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        row = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & column_mask[None, :]
        offset = row.to(tl.int64)[:, None] * columns + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32) - origin[None, :]
        value = tl.where(mask, value, 0.0)  # masked values were -origin
        total += value
        total_of_squares += value * value
    offset = tl.program_id(0) * columns + column
    squares = sums + tl.num_programs(0) * columns
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


@jit
def _running_statistics_kernel(
    running_mean, running_variance, statistics, channels, eps, COLUMNS: tl.constexpr
):  # fmt: skip
    """Write the running mean and the inverse running standard deviation of `channels` = C channels."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = channel < channels
    variance = tl.load(running_variance + channel, mask=mask, other=1.0).to(tl.float32)
    tl.store(statistics + channel, tl.load(running_mean + channel, mask=mask, other=0.0), mask=mask)
    tl.store(statistics + channels + channel, 1.0 / tl.sqrt(variance + eps), mask=mask)


@triton.jit
def _columns_of_channel(channel, columns, period, N: tl.constexpr, BLOCK: tl.constexpr):
    """Return the indices (BLOCK,) of the columns that belong to one channel, and a mask.

    If BLOCK is larger than the number of these columns, the mask is False for the surplus indices.
    """
    item = tl.arange(0, BLOCK)
    return item // N * period + channel * N + item % N, item < columns // period * N


@jit
def _reduce_statistics_kernel(
    x, sums, statistics, batches, running_mean, running_variance, programs, rows, momentum, eps,
    columns, period, N: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the mean and inverse standard deviation of one channel, and update its running statistics.

    Both are computed from the partial sums of `_sum_columns_kernel`, which has subtracted the first row from all rows.
    """
    channel = tl.program_id(0)
    column, exists = _columns_of_channel(channel, columns, period, N, BLOCK)
    program = tl.arange(0, PROGRAMS)
    mask = (program < programs)[:, None] & exists[None, :]
    offset = program[:, None] * columns + column[None, :]
    total = tl.sum(tl.load(sums + offset, mask=mask, other=0.0), axis=0)
    squares = sums + programs * columns
    total_of_squares = tl.sum(tl.load(squares + offset, mask=mask, other=0.0), axis=0)
    origin = tl.load(x + column, mask=exists, other=0.0).to(tl.float32)
    column_means = tl.where(exists, origin + total / rows, 0.0)
    column_count = columns // period * N
    average = tl.sum(column_means, axis=0) / column_count
    deviation = tl.where(exists, column_means - average, 0.0)
    # Sum of the squared deviations of all values from the mean of the channel. A column contributes the squared
    # deviations from its own mean, and `rows` times the squared deviation of its mean from that of the channel.
    squared_deviations = tl.sum(total_of_squares - total * total / rows + deviation * deviation * rows, axis=0)
    count = (rows * column_count).to(tl.float32)
    variance = tl.maximum(squared_deviations, 0.0, propagate_nan=tl.PropagateNan.ALL) / count
    tl.store(statistics + channel, average)
    tl.store(statistics + period // N + channel, 1.0 / tl.sqrt(variance + eps))
    unbiased = variance * count / (count - 1)
    update_running_statistics(batches, running_mean, running_variance, channel, average, unbiased, momentum)


@jit
def _reduce_gradients_kernel(
    sums, d_parameters, programs, columns, period,
    N: tl.constexpr, BLOCK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the weight and the bias of one channel.

    They are computed from the partial sums of `_sum_gradients_kernel`: the first for the bias, then for the weight.
    """
    channel = tl.program_id(0)
    column, exists = _columns_of_channel(channel, columns, period, N, BLOCK)
    program = tl.arange(0, PROGRAMS)
    mask = (program < programs)[:, None] & exists[None, :]
    offset = program[:, None] * columns + column[None, :]
    products = sums + programs * columns
    tl.store(d_parameters + channel, tl.sum(tl.load(products + offset, mask=mask, other=0.0)))
    tl.store(d_parameters + period // N + channel, tl.sum(tl.load(sums + offset, mask=mask, other=0.0)))


@triton.jit
def load_scale_shift(mean, inverse_std, weight, bias, channel, mask):
    """Return the batch norm of the channels with indices `channel` as scale and shift: y = scale · x + shift.

    Where `mask` is False, the channel does not exist, and scale and shift are 0.
    """
    scale = tl.load(weight + channel, mask=mask, other=0.0).to(tl.float32)
    scale *= tl.load(inverse_std + channel, mask=mask, other=0.0)
    shift = tl.load(bias + channel, mask=mask, other=0.0).to(tl.float32)
    shift -= tl.load(mean + channel, mask=mask, other=0.0) * scale
    return scale, shift


@triton.jit
def _first_row_of_window(output, height, width, S: tl.constexpr):
    """Return, for each row `output` of y, the row of x that is the top left pixel of its window of S × S pixels."""
    if S == 1:
        first = output.to(tl.int64)
    else:
        out_width = width // S
        out_height = height // S
        out_column = output % out_width
        rest = output // out_width
        out_row = rest % out_height
        image = rest // out_height
        first = (image.to(tl.int64) * height + out_row * S) * width + out_column * S
    return first


@triton.jit
def _activate(z, ACTIVATION: tl.constexpr):
    """Apply the activation to values z. NaN stays NaN."""
    if ACTIVATION == 1:
        z = tl.maximum(z, 0.0, propagate_nan=tl.PropagateNan.ALL)
    elif ACTIVATION == 2:
        z = z * tl.sigmoid(z)
    elif ACTIVATION == 3:
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    return z


@triton.jit
def _multiply_by_slope(gradient, z, ACTIVATION: tl.constexpr):
    """Return the gradient with respect to z, from the gradient with respect to the activation of z."""
    if ACTIVATION == 1:
        gradient = tl.where(z <= 0.0, 0.0, gradient)
    elif ACTIVATION == 2:
        sigmoid = tl.sigmoid(z)
        gradient *= sigmoid * (1.0 + z * (1.0 - sigmoid))
    elif ACTIVATION == 3:
        density = tl.exp(-0.5 * z * z) * 0.3989422804014327
        gradient *= 0.5 * (1.0 + tl.erf(z * 0.7071067811865476)) + z * density
    return gradient


@triton.jit
def _load_before_activation(value, residual, y, offset, mask, scale, shift):
    """Return the sums z of batch norm and residual, for values of x. With `y`, values of the same sign as z."""
    if y is not None:
        z = tl.load(y + offset, mask=mask, other=0.0).to(tl.float32)
    else:
        z = value * scale[None, :] + shift[None, :]
        if residual is not None:
            z += tl.load(residual + offset, mask=mask, other=0.0).to(tl.float32)
    return z


@jit
def _forward_kernel(
    x, residual, y, statistics, weight, bias, outputs, columns, period, height, width,
    N: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of the output y."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    inverse_std = statistics + period // N
    scale, shift = load_scale_shift(statistics, inverse_std, weight, bias, column % period // N, column_mask)
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (output < outputs)[:, None] & column_mask[None, :]
    first = _first_row_of_window(output, height, width, S)
    if S == 1:
        offset = first[:, None] * columns + column[None, :]
        value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
        z = _load_before_activation(value, residual, None, offset, mask, scale, shift)
        result = _activate(z, ACTIVATION)
    else:
        result = tl.zeros([ROWS, COLUMNS], tl.float32)  # starting at 0 applies ReLU
        for i in tl.static_range(S):
            for j in tl.static_range(S):
                offset = (first + i * width + j)[:, None] * columns + column[None, :]
                value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
                normalized = value * scale[None, :] + shift[None, :]
                result = tl.maximum(result, normalized, propagate_nan=tl.PropagateNan.ALL)
    tl.store(y + output.to(tl.int64)[:, None] * columns + column[None, :], result, mask=mask)


@jit
def _sum_gradients_kernel(
    x, dy, residual, y, statistics, weight, bias, sums, outputs, columns, period, height, width, steps,
    N: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write partial sums, over rows of dy, for the gradients of the bias and, as `products`, of the weight.

    The gradient of the bias is the sum of the gradient with respect to the output of batch norm. The gradient of the
    weight is the sum of this gradient times the normalized x. For each window, only the pixel that max pooling selected
    contributes, and only if ReLU passed its value.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    channel = column % period // N
    inverse_std = statistics + period // N
    scale, shift = load_scale_shift(statistics, inverse_std, weight, bias, channel, column_mask)
    center = tl.load(statistics + channel, mask=column_mask, other=0.0)
    inverse = tl.load(inverse_std + channel, mask=column_mask, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        output = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        mask = (output < outputs)[:, None] & column_mask[None, :]
        first = _first_row_of_window(output, height, width, S)
        offset = output.to(tl.int64)[:, None] * columns + column[None, :]
        gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
        if S == 1:
            selected = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
            z = _load_before_activation(selected, residual, y, offset, mask, scale, shift)
            gradient = _multiply_by_slope(gradient, z, ACTIVATION)
        else:
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
            gradient = tl.where(is_positive, gradient, 0.0)
        gradient = tl.where(mask, gradient, 0.0)
        total += gradient
        total_of_products += gradient * (selected - center[None, :])
    offset = tl.program_id(0) * columns + column
    products = sums + tl.num_programs(0) * columns
    tl.store(sums + offset, tl.sum(total, axis=0), mask=column_mask)
    tl.store(products + offset, tl.sum(total_of_products, axis=0) * inverse, mask=column_mask)


@jit
def _backward_kernel(
    x, dy, residual, y, dx, d_residual, statistics, weight, bias, d_parameters,
    outputs, columns, period, height, width, count, FROM_BATCH: tl.constexpr,
    N: tl.constexpr, S: tl.constexpr, ACTIVATION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write a tile of dx, the gradient with respect to x, and of that with respect to the residual.

    `count` = B·H·W·N is the number of values of a channel. In each window, dy is passed to the pixel that max pooling
    selected. If FROM_BATCH, mean and variance depend on x, and the gradients of weight and bias are needed.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    channel = column % period // N
    inverse_std = statistics + period // N
    scale, shift = load_scale_shift(statistics, inverse_std, weight, bias, channel, column_mask)
    center = tl.load(statistics + channel, mask=column_mask, other=0.0)
    inverse = tl.load(inverse_std + channel, mask=column_mask, other=0.0)
    if FROM_BATCH:
        d_bias = d_parameters + period // N
        mean_gradient = tl.load(d_bias + channel, mask=column_mask, other=0.0) / count
        slope = tl.load(d_parameters + channel, mask=column_mask, other=0.0) / count * inverse
    else:
        mean_gradient = center * 0.0
        slope = center * 0.0
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (output < outputs)[:, None] & column_mask[None, :]
    first = _first_row_of_window(output, height, width, S)
    dy_offset = output.to(tl.int64)[:, None] * columns + column[None, :]
    gradient = tl.load(dy + dy_offset, mask=mask, other=0.0).to(tl.float32)
    if S == 1:
        value = tl.load(x + dy_offset, mask=mask, other=0.0).to(tl.float32)
        z = _load_before_activation(value, residual, y, dy_offset, mask, scale, shift)
        gradient = _multiply_by_slope(gradient, z, ACTIVATION)
        if d_residual is not None:
            tl.store(d_residual + dy_offset, gradient, mask=mask)
        centered = value - center[None, :]
        d_input = scale[None, :] * (gradient - mean_gradient[None, :] - centered * slope[None, :])
        tl.store(dx + dy_offset, d_input, mask=mask)
    else:
        maximum = tl.zeros([ROWS, COLUMNS], tl.float32)
        argmax = tl.full([ROWS, COLUMNS], -1, tl.int32)
        for i in tl.static_range(S):
            for j in tl.static_range(S):
                offset = (first + i * width + j)[:, None] * columns + column[None, :]
                value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)
                normalized = value * scale[None, :] + shift[None, :]
                larger = normalized > maximum
                maximum = tl.where(larger, normalized, maximum)
                argmax = tl.where(larger, i * S + j, argmax)
        for i in tl.static_range(S):
            for j in tl.static_range(S):
                offset = (first + i * width + j)[:, None] * columns + column[None, :]
                value = tl.load(x + offset, mask=mask, other=0.0).to(tl.float32)  # in L2 cache
                centered = value - center[None, :]
                routed = tl.where(argmax == i * S + j, gradient, 0.0)
                d_input = scale[None, :] * (routed - mean_gradient[None, :] - centered * slope[None, :])
                tl.store(dx + offset, d_input, mask=mask)
