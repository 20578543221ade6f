"""Blurred root-mean-square pooling on a GPU, alone or after batch norm and ReLU.

`blur` replaces `GroupAvgPool2d(size, blur=…, power=2)`; `norm_relu_blur` replaces batch norm, ReLU and that pool. Both
read the features once for the output and write only the output. Batch norm in training reads the features once more,
for the statistics. The backward pass writes the gradient of the features, an array of the size of the output, and small
sums.

Method: an image is divided into *blocks* of S × S pixels, where S is the window and the stride of the pool. Each block
has one output. The pool averages the squares over a window at every pixel, blurs the averages and subsamples them.
Together, these operations are one filter per axis. The blur has at most 2 · S + 1 taps, so the filter of an output
covers only its own block and the eight neighboring blocks. The output is √(m + ε) - √ε, where the *mean square* m is
the sum of the squares weighted by the filter. `_compute_weights` returns the filter weights along one axis; they differ
at the borders.

Tiles: a program processes vertical *strips* of images, block by block from top to bottom. A strip is two outputs wide
in the forward pass and one pixel wide in the backward pass. Pixels of a block contribute to three rows of outputs: that
of the block above, that of the block itself ("here") and that of the block below. The forward pass keeps partial sums
for these three rows, and the backward pass keeps their gradients, so that a strip is read once. Long strips are divided
into *chunks* of blocks.

Arguments of the Triton kernels; all arrays are contiguous:

- `x`: features (B, H, W, C, N), read as a matrix with one row per pixel and `columns` = C·N columns.
- `y`: output (B, H/S, W/S, C, N). `blocks_down` is H/S and `blocks_across` is W/S.
- `dy`, `dx`: gradients of the loss with respect to y and to x.
- `d_mean_square`: gradient dy / √(m + ε) with respect to m/2, shaped like y. The gradient with respect to a pixel is
  its value times the sum over outputs of filter weight times `d_mean_square`, without a factor of 2.
- `weights_down`, `weights_across`: filter weights along height and width, from `_compute_weights`.
- `mean`, `inverse_std`, `weight`, `bias`, `d_weight`, `d_bias`, `sums`, `products`: as in `batch_norm`. They are None
  without batch norm.
- `strips`: number of strips in the batch. `chunks`: number of chunks of a strip. `chunk`: number of blocks in a chunk.

ROWS and COLUMNS are the numbers of strips and columns in a tile. UNIT is a power of 2 that divides `columns`.
If NORM, batch norm and ReLU are applied before the pool.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rotopath.nn.pool import SQRT_EPS, GroupAvgPool2d
from rotopath.nn.triton import divide_up, jit, next_power_of_2
from rotopath.nn.triton.batch_norm import (
    COLUMNS,
    load_scale_shift,
    reduce_gradients,
    split_rows,
)

FORWARD_TILE, BACKWARD_TILE = 512, 1024  # size of a tile: number of strips times number of columns
MAX_BLOCKS = 64  # maximum number of blocks in a chunk
WARPS = 4
FLAT_TILE = 4096  # elements per program of an elementwise kernel


class Filter(NamedTuple):
    """Root-mean-square pool: windows of size × size px at every pixel, `blur` taps of blur per axis, stride `size`."""

    size: int
    blur: int


class _Tiling(NamedTuple):
    """Division of a batch of features among programs."""

    tiles: int  # number of tiles, each with `rows` strips
    chunks: int  # number of chunks of each strip
    chunk: int  # number of blocks in a chunk
    unit: int  # power of 2 that divides the number of columns
    rows: int  # number of strips in a tile
    columns: int  # number of columns in a tile


def norm_relu_blur(
    x: Tensor, weight: Tensor, bias: Tensor, statistics: Tensor, from_batch: bool, pool: GroupAvgPool2d
) -> Tensor:
    """Apply batch norm, ReLU and `pool` to features (B, C, N, H, W). Returns features (B, C, N, H/S, W/S).

    `pool` computes the blurred root mean square over pixels, for each channel and orientation, with stride S.
    `statistics` (2, C) are the mean and the inverse standard deviation of the batch norm, and `from_batch` is whether
    they are those of x, and not running statistics.
    """
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), contiguous
    y: Tensor = NormReluBlur.apply(rows, filter_of(pool), weight, bias, statistics, from_batch)
    return y.permute(0, 3, 4, 1, 2)


def blur(x: Tensor, pool: GroupAvgPool2d) -> Tensor:
    """Apply a root-mean-square pool to features (B, C, N, H, W)."""
    y: Tensor = NormReluBlur.apply(x.permute(0, 3, 4, 1, 2), filter_of(pool), None, None, None, False)
    return y.permute(0, 3, 4, 1, 2)


def filter_of(pool: GroupAvgPool2d) -> Filter:
    """Return the sizes of the window and of the blur of a pool as a `Filter`."""
    return Filter(pool.size, pool.blur)


class NormReluBlur(torch.autograd.Function):
    """Autograd function: blurred root-mean-square pool of x (B, H, W, C, N).

    Batch norm and ReLU are applied to x before the pool, unless `statistics` is None.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        pool: Filter,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Tensor | None,
        from_batch: bool,
    ) -> Tensor:
        parameters = () if statistics is None else (*statistics, weight, bias)
        y = apply(x, pool, parameters)
        ctx.pool, ctx.from_batch = pool, from_batch
        ctx.save_for_backward(x, y, *parameters)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, *parameters = ctx.saved_tensors
        d_mean_square = divide_by_root(gradients[0], y)
        if not parameters:
            return compute_gradient(x, d_mean_square, ctx.pool), None, None, None, None, None
        partial_sums = sum_gradients(x, d_mean_square, ctx.pool, parameters)
        d_weight, d_bias = reduce_gradients(partial_sums, *x.shape[3:])
        _, _, weight, bias = parameters
        # Running statistics do not depend on x, so no gradient passes through them.
        through_statistics = (d_weight, d_bias) if ctx.from_batch else d_weight.new_zeros(2, len(d_weight)).unbind()
        dx = compute_gradient(x, d_mean_square, ctx.pool, parameters, through_statistics)
        return dx, None, d_weight.to(weight), d_bias.to(bias), None, None


def apply(x: Tensor, pool: Filter, parameters: Sequence[Tensor] = ()) -> Tensor:
    """Apply a root-mean-square pool to features x (B, H, W, C, N), after batch norm and ReLU if `parameters` are given.

    The parameters are the mean, inverse standard deviation, weight and bias (C,) of the batch norm.
    """
    batch, height, width, channels, n = x.shape
    blocks_down, blocks_across, columns = height // pool.size, width // pool.size, channels * n
    y = x.new_empty(batch, blocks_down, blocks_across, channels, n)
    strips = batch * divide_up(blocks_across, 2)
    tiling = _tile(FORWARD_TILE, strips, blocks_down, columns)
    mean, inverse_std, weight, bias = parameters or (None, None, None, None)
    weights_down, weights_across = _weights_of(x, pool)
    _forward_kernel[tiling.tiles * tiling.chunks, divide_up(columns, tiling.columns)](
        x=x,
        y=y,
        mean=mean,
        inverse_std=inverse_std,
        weight=weight,
        bias=bias,
        weights_down=weights_down,
        weights_across=weights_across,
        eps=SQRT_EPS,
        strips=strips,
        columns=columns,
        blocks_down=blocks_down,
        blocks_across=blocks_across,
        chunks=tiling.chunks,
        chunk=tiling.chunk,
        NORM=bool(parameters),
        N=n,
        S=pool.size,
        UNIT=tiling.unit,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        num_warps=WARPS,
    )
    return y


def divide_by_root(dy: Tensor, y: Tensor) -> Tensor:
    """Return the gradient with respect to half the mean square, dy / √(mean square + ε), from dy and the output y."""
    # The root is y + √ε, so it is as precise as y. Its inverse can be as large as 1 / √ε = 1000, so that the result can
    # exceed the range of float16. Therefore, it is stored in float32, or in bfloat16, which has the same range.
    d_mean_square = torch.empty_like(y, dtype=torch.bfloat16 if dy.dtype == torch.bfloat16 else torch.float32)
    _divide_by_root_kernel[divide_up(y.numel(), FLAT_TILE),](
        dy=dy.contiguous(),
        y=y,
        d_mean_square=d_mean_square,
        count=y.numel(),
        root_eps=math.sqrt(SQRT_EPS),
        FLAT_TILE=FLAT_TILE,
    )
    return d_mean_square


def sum_gradients(x: Tensor, d_mean_square: Tensor, pool: Filter, parameters: Sequence[Tensor]) -> Tensor:
    """Return partial sums (2, programs, C·N), first for the gradient of the bias and then for that of the weight.

    Bias and weight are those of the batch norm. The arguments are those of `compute_gradient`.
    """
    return _backward(x, d_mean_square, pool, parameters, d_parameters=(), write=False)


def compute_gradient(
    x: Tensor,
    d_mean_square: Tensor,
    pool: Filter,
    parameters: Sequence[Tensor] = (),
    d_parameters: Sequence[Tensor] = (),
) -> Tensor:
    """Return the gradient with respect to x (B, H, W, C, N), or with respect to the output of batch norm.

    `d_mean_square` is the result of `divide_by_root`. `parameters` are those of `apply`, and `d_parameters` are the
    gradients of the weight and the bias of the batch norm.

    - Without `parameters`, there is no batch norm. Returns the gradient with respect to x.
    - With `parameters` and `d_parameters`, returns the gradient with respect to x.
    - With `parameters` only, returns the gradient with respect to the output of batch norm, which has the shape of x.
    """
    return _backward(x, d_mean_square, pool, parameters, d_parameters, write=True)


def _backward(
    x: Tensor,
    d_mean_square: Tensor,
    pool: Filter,
    parameters: Sequence[Tensor],
    d_parameters: Sequence[Tensor],
    write: bool,
) -> Tensor:
    """Return the result of `compute_gradient` if `write` is True, or else that of `sum_gradients`."""
    batch, height, width, channels, n = x.shape
    blocks_down, blocks_across, columns = height // pool.size, width // pool.size, channels * n
    tiling = _tile(BACKWARD_TILE, batch * width, blocks_down, columns)
    tiles = tiling.tiles * tiling.chunks
    mean, inverse_std, weight, bias = parameters or (None, None, None, None)
    d_weight, d_bias = d_parameters or (None, None)
    weights_down, weights_across = _weights_of(x, pool)
    if write:
        programs, steps = tiles, 1
        result = dx = torch.empty_like(x)
        sums = products = None
    else:
        programs, steps = split_rows(tiles, 1)
        result = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
        sums, products = result
        dx = None
    _backward_kernel[programs, divide_up(columns, tiling.columns)](
        x=x,
        d_mean_square=d_mean_square,
        dx=dx,
        mean=mean,
        inverse_std=inverse_std,
        weight=weight,
        bias=bias,
        d_weight=d_weight,
        d_bias=d_bias,
        sums=sums,
        products=products,
        weights_down=weights_down,
        weights_across=weights_across,
        strips=batch * width,
        columns=columns,
        blocks_down=blocks_down,
        blocks_across=blocks_across,
        chunks=tiling.chunks,
        chunk=tiling.chunk,
        steps=steps,
        count=x.numel() // channels,
        NORM=bool(parameters),
        WRITE=write,
        N=n,
        S=pool.size,
        UNIT=tiling.unit,
        ROWS=tiling.rows,
        COLUMNS=tiling.columns,
        num_warps=WARPS,
    )
    return result


def _tile(elements: int, strips: int, blocks_down: int, columns: int) -> _Tiling:
    """Divide `strips` strips, each of `blocks_down` blocks, and `columns` columns among programs.

    `elements` is the size of a tile: its number of strips times its number of columns. Strips of more than MAX_BLOCKS
    blocks are divided into chunks.
    """
    tile_columns = min(next_power_of_2(columns), COLUMNS)
    tile_rows = elements // tile_columns
    chunks = divide_up(blocks_down, MAX_BLOCKS)
    return _Tiling(
        tiles=divide_up(strips, tile_rows),
        chunks=chunks,
        chunk=divide_up(blocks_down, chunks),
        unit=min(columns & -columns, 16),
        rows=tile_rows,
        columns=tile_columns,
    )


def _weights_of(x: Tensor, pool: Filter) -> tuple[Tensor, Tensor]:
    """Return the filter weights of a pool along the height and along the width of features x (B, H, W, C, N)."""
    down, across = (_compute_weights(pixels // pool.size, pool, x.device) for pixels in x.shape[1:3])
    return down, across


@cache
def _compute_weights(blocks: int, pool: Filter, device: torch.device) -> Tensor:
    """Return the filter weights (blocks + 2, 3 · size) along one axis of an image with this number of blocks.

    Row i + 1 belongs to output i. It has one weight for each pixel of block i - 1, block i and block i + 1. Weights of
    pixels outside the image are 0. The first and the last row are 0 too, as outputs outside the image do not exist.
    """
    few, size = min(blocks, 5), pool.size  # weights are computed for 5 blocks; with more, the middle row is repeated
    pixels = few * size
    impulses = torch.eye(pixels, dtype=torch.float64).view(pixels, 1, 1, pixels, 1).expand(-1, -1, -1, -1, size)
    responses = GroupAvgPool2d(size, blur=pool.blur).double()(impulses).view(pixels, few)  # (pixels, outputs)
    windows = F.pad(responses, (0, 0, size, size)).unfold(0, 3 * size, size)  # (blocks, outputs, 3 · size)
    weights = windows.diagonal(dim1=0, dim2=1).T  # (outputs, 3 · size)
    weights = torch.cat([weights[: few // 2], weights[few // 2].expand(blocks - few + 1, -1), weights[few // 2 + 1 :]])
    return F.pad(weights, (0, 0, 1, 1)).to(device, torch.float32).contiguous()


@triton.jit
def _locate_strips(item, strips, strips_across, blocks_down, chunks, chunk, ROWS: tl.constexpr):
    """Return the strips and the blocks of work item number `item`. A work item is one chunk of one tile of ROWS strips.

    `strips_across` is the number of strips in an image. Returns five values. The first three have one entry per strip:
    whether the strip exists, the index of its image, and the index of the strip in this image, from left to right. The
    other two are the index of the first block of the chunk, and the index of its last block plus 1.
    """
    strip = item // chunks * ROWS + tl.arange(0, ROWS)
    exists = strip < strips
    strip = tl.minimum(strip, strips - 1)  # strips that do not exist read the last strip; their results are not stored
    start = (item % chunks * chunk).to(tl.int64)
    image = (strip // strips_across).to(tl.int64)
    return exists, image, strip % strips_across, start, tl.minimum(start + chunk, blocks_down)


@jit
def _forward_kernel(
    x, y, mean, inverse_std, weight, bias, weights_down, weights_across,
    eps, strips, columns, blocks_down, blocks_across, chunks, chunk,
    NORM: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the outputs of ROWS strips, for one chunk of blocks, from top to bottom.

    A block is S × S pixels and has one output. The chunk has the blocks from `start` to `stop` - 1. A strip is two
    blocks wide: `left` is the position of the left block in the image. The outputs of both blocks read many pixels in
    common. The filter of an output also covers the neighboring blocks, so the blocks just above and below the chunk are
    read too. An output is √(m + ε) - √ε for its mean square m, and `eps` is ε.
    """
    columns = columns // UNIT * UNIT  # the same number; tells the compiler a divisor, so that it vectorizes loads
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (column < columns)[None, :]
    if NORM:
        scale, shift = load_scale_shift(mean, inverse_std, weight, bias, column // N, column < columns)
    exists, image, left, start, stop = _locate_strips(
        tl.program_id(0), strips, (blocks_across + 1) // 2, blocks_down, chunks, chunk, ROWS
    )
    left *= 2
    left_mask = exists[:, None] & column_mask
    right_mask = (exists & (left + 1 < blocks_across))[:, None] & column_mask
    features = x + (image * blocks_down * S * blocks_across * S)[:, None] * columns + column[None, :]
    outputs = y + (image * blocks_down * blocks_across + left)[:, None] * columns + column[None, :]
    # Partial sums of the mean squares of the left and the right output, in the rows of outputs above the current block,
    # at the current block (here) and below it.
    left_above = tl.zeros([ROWS, COLUMNS], tl.float32)
    right_above = tl.zeros([ROWS, COLUMNS], tl.float32)
    left_here = tl.zeros([ROWS, COLUMNS], tl.float32)
    right_here = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.maximum(start - 1, 0), tl.minimum(stop + 1, blocks_down)):
        left_below = tl.zeros([ROWS, COLUMNS], tl.float32)
        right_below = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(S):
            left_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
            right_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
            for j in tl.static_range(4 * S):  # pixels of the blocks left - 1, left, left + 1 (right) and left + 2
                # Pixels outside the image have weight 0; the pixel at the border is read instead.
                pixel = tl.minimum(tl.maximum((left - 1) * S + j, 0), blocks_across * S - 1)
                address = features + (pixel * columns)[:, None] + (block * S + i) * blocks_across * S * columns
                value = tl.load(address, mask=column_mask).to(tl.float32)
                if NORM:
                    value = value * scale[None, :] + shift[None, :]
                    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                square = value * value
                if j < 3 * S:
                    left_sum += tl.load(weights_across + (left + 1) * 3 * S + j)[:, None] * square
                if j >= S:
                    right_sum += tl.load(weights_across + (left + 2) * 3 * S + j - S)[:, None] * square
            # Row o + 1 of the weights belongs to output o, and has S weights each for the blocks o - 1, o and o + 1.
            weight_above = tl.load(weights_down + (block * 3 + 2) * S + i)
            weight_here = tl.load(weights_down + ((block + 1) * 3 + 1) * S + i)
            weight_below = tl.load(weights_down + (block + 2) * 3 * S + i)
            left_above += weight_above * left_sum
            left_here += weight_here * left_sum
            left_below += weight_below * left_sum
            right_above += weight_above * right_sum
            right_here += weight_here * right_sum
            right_below += weight_below * right_sum
        if block > start:
            address = outputs + (block - 1) * blocks_across * columns
            tl.store(address, tl.sqrt(left_above + eps) - tl.sqrt(eps), mask=left_mask)
            tl.store(address + columns, tl.sqrt(right_above + eps) - tl.sqrt(eps), mask=right_mask)
        left_above, right_above = left_here, right_here
        left_here, right_here = left_below, right_below
    if stop == blocks_down:
        address = outputs + (stop - 1) * blocks_across * columns
        tl.store(address, tl.sqrt(left_above + eps) - tl.sqrt(eps), mask=left_mask)
        tl.store(address + columns, tl.sqrt(right_above + eps) - tl.sqrt(eps), mask=right_mask)


@jit
def _divide_by_root_kernel(dy, y, d_mean_square, count, root_eps, FLAT_TILE: tl.constexpr):
    """Write dy / √(m + ε) to `d_mean_square` for each of the `count` elements, where m is the mean square.

    The root is computed from the output: √(m + ε) = y + √ε. `root_eps` is √ε.
    """
    offset = tl.program_id(0).to(tl.int64) * FLAT_TILE + tl.arange(0, FLAT_TILE)
    mask = offset < count
    gradient = tl.load(dy + offset, mask=mask, other=0.0).to(tl.float32)
    root = tl.load(y + offset, mask=mask, other=0.0).to(tl.float32) + root_eps
    tl.store(d_mean_square + offset, gradient / root, mask=mask)


@triton.jit
def _gather_row(before, at, after, weight_before, weight_at, weight_after, row, mask):
    """Return, for strips that are one pixel wide, the weighted sum of the gradients of three neighboring outputs.

    The three outputs are in one row of outputs: left of the block of the strip (`before`), at this block (`at`) and
    right of it (`after`). `before`, `at` and `after` point to their gradients in the first row of outputs. `row` is the
    offset in memory from the first row to the row that is read. `weight_before`, `weight_at` and `weight_after` are the
    filter weights of the outputs. `mask` states which columns exist.
    """
    total = weight_before[:, None] * tl.load(before + row, mask=mask).to(tl.float32)
    total += weight_at[:, None] * tl.load(at + row, mask=mask).to(tl.float32)
    return total + weight_after[:, None] * tl.load(after + row, mask=mask).to(tl.float32)


@jit
def _backward_kernel(
    x, d_mean_square, dx, mean, inverse_std, weight, bias, d_weight, d_bias, sums, products, weights_down,
    weights_across, strips, columns, blocks_down, blocks_across, chunks, chunk, steps, count,
    NORM: tl.constexpr, WRITE: tl.constexpr,
    N: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute the gradient of each pixel, for strips that are one pixel wide.

    - If WRITE, the gradients are written to dx. If NORM and `d_bias` is None, they are the gradients with respect to
      the output of batch norm, otherwise those with respect to x.
    - If not WRITE, partial sums for the gradients of the bias and the weight of batch norm are written to `sums` and
      `products`.

    A program processes `steps` work items, which are chunks of tiles of strips (see `_locate_strips`). `count` =
    B·H·W·N is the number of values of a channel.
    """
    columns = columns // UNIT * UNIT  # the same number; tells the compiler a divisor, so that it vectorizes loads
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (column < columns)[None, :]
    if NORM:
        scale, shift = load_scale_shift(mean, inverse_std, weight, bias, column // N, column < columns)
        center = tl.load(mean + column // N, mask=column < columns, other=0.0)
        inverse = tl.load(inverse_std + column // N, mask=column < columns, other=0.0)
        if d_bias is not None:
            mean_gradient = tl.load(d_bias + column // N, mask=column < columns, other=0.0) / count
            slope = tl.load(d_weight + column // N, mask=column < columns, other=0.0) / count * inverse
    if not WRITE:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        item = tl.program_id(0) * steps + step
        exists, image, pixel, start, stop = _locate_strips(
            item, strips, blocks_across * S, blocks_down, chunks, chunk, ROWS
        )
        mask = exists[:, None] & column_mask
        features = (image * blocks_down * S * blocks_across * S + pixel)[:, None] * columns + column[None, :]
        output = pixel // S
        outputs = d_mean_square + (image * blocks_down * blocks_across)[:, None] * columns + column[None, :]
        before = outputs + (tl.maximum(output - 1, 0) * columns)[:, None]  # outside the image, the weight is 0
        at = outputs + (output * columns)[:, None]
        after = outputs + (tl.minimum(output + 1, blocks_across - 1) * columns)[:, None]
        weights = weights_across + pixel % S
        weight_before = tl.load(weights + (output * 3 + 2) * S, mask=exists, other=0.0)
        weight_at = tl.load(weights + ((output + 1) * 3 + 1) * S, mask=exists, other=0.0)
        weight_after = tl.load(weights + (output + 2) * 3 * S, mask=exists, other=0.0)
        length = blocks_across * columns  # number of elements in a row of outputs
        row = tl.maximum(start - 1, 0) * length
        above = _gather_row(before, at, after, weight_before, weight_at, weight_after, row, column_mask)
        here = _gather_row(before, at, after, weight_before, weight_at, weight_after, start * length, column_mask)
        for block in range(start, stop):
            row = tl.minimum(block + 1, blocks_down - 1) * length
            below = _gather_row(before, at, after, weight_before, weight_at, weight_after, row, column_mask)
            for i in tl.static_range(S):
                offset = features + (block * S + i) * length * S
                value = tl.load(x + offset, mask=column_mask).to(tl.float32)
                gradient = tl.load(weights_down + (block * 3 + 2) * S + i) * above
                gradient += tl.load(weights_down + ((block + 1) * 3 + 1) * S + i) * here
                gradient += tl.load(weights_down + (block + 2) * 3 * S + i) * below
                if NORM:
                    gradient *= tl.maximum(value * scale[None, :] + shift[None, :], 0.0)
                    value -= center[None, :]
                else:
                    gradient *= value
                if WRITE:
                    if d_bias is not None:
                        gradient = scale[None, :] * (gradient - mean_gradient[None, :] - value * slope[None, :])
                    tl.store(dx + offset, gradient, mask=mask)
                else:
                    total += gradient
                    total_of_products += gradient * value
            above = here
            here = below
    if not WRITE:
        offset = tl.program_id(0) * columns + column
        tl.store(sums + offset, tl.sum(total, axis=0), mask=column < columns)
        tl.store(products + offset, tl.sum(total_of_products, axis=0) * inverse, mask=column < columns)
