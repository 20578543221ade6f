"""Pools that blur as filters along an axis, in blocks of as many pixels as their stride.

In: a pool. Out: what each of its outputs, one a block, takes of the pixels about it.

Root mean squares over blurred windows, behind a line and ReLU or alone, in one pass each way, in Triton.

In: features as in `statistics`. Out: what the layers give one after another. Means over windows, smoothed and thinned
out, are one filter along each axis: an output weighs the block of S × S pixels at its place and the eight about it.
Programs walk down an image and keep sums of three rows of outputs, so that every row of features is taken once.

Batch norm, ReLU and blurred root mean squares, and the gradients of all three.

In: features as rows (pixels) by columns (channels by orientations). Out: what the layers give one after another.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.pool import FAINT, GroupAvgPool2d
from rotopath.nn.triton.batch_norm import COLUMNS, divide, find_gradients, find_statistics, load_line, recall, track


class Filter(NamedTuple):
    """Windows of `size` px at every pixel, blurred by so many taps, of which one in `size` is kept."""

    size: int
    blur: int


def find_both_weights(x: Tensor, pool: Filter) -> tuple[Tensor, Tensor]:
    """Those of rows and of columns."""
    down, across = (_find_weights(pixels // pool.size, pool, x.device) for pixels in x.shape[1:3])
    return down, across


@cache
def _find_weights(blocks: int, pool: Filter, device: torch.device) -> Tensor:
    """What the output at each block along an axis takes of the pixels in it and next to it, (blocks + 2, 3 · size).

    0 beyond the rim.
    """
    few, size = min(blocks, 5), pool.size  # of more, all in the middle are alike
    pixels = few * size
    single = torch.eye(pixels, dtype=torch.float64).view(pixels, 1, 1, pixels, 1).expand(-1, -1, -1, -1, size)
    seen = GroupAvgPool2d(size, blur=pool.blur).double()(single).view(pixels, few)
    windows = F.pad(seen, (0, 0, size, size)).unfold(0, 3 * size, size)  # (blocks, outputs, 3 · size)
    weights = windows.diagonal(dim1=0, dim2=1).T  # (outputs, 3 · size)
    weights = torch.cat([weights[: few // 2], weights[few // 2].expand(blocks - few + 1, -1), weights[few // 2 + 1 :]])
    return F.pad(weights, (0, 0, 1, 1)).to(device, torch.float32).contiguous()


FORWARD_TILE, BACKWARD_TILE = 512, 1024  # numbers side by side: strips of an image, and their columns
BLOCKS = 64  # at most, that a program walks down
WARPS = 4
FLAT = 4096  # numbers of a tile that has no neighbours


@triton.jit
def _find_place(item, strips, wide, down, chunks, chunk, ROWS: tl.constexpr):
    """The strips of a tile, those of them that there are, image and place in it; where to walk from, and to."""
    strip = item // chunks * ROWS + tl.arange(0, ROWS)
    there = strip < strips
    strip = tl.minimum(strip, strips - 1)  # others do again what the last does
    start = (item % chunks * chunk).to(tl.int64)
    return there, (strip // wide).to(tl.int64), strip % wide, start, tl.minimum(start + chunk, down)


@triton.jit
def _forward(
    x, y, mean, inverse, weight, bias, weights_down, weights_across,
    faint, strips, columns, down, across, chunks, chunk,
    NORM: tl.constexpr, N: tl.constexpr, S: tl.constexpr,
    UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Strips are two outputs wide, which share pixels. There are down × across outputs in an image."""
    columns = columns // UNIT * UNIT  # so that the compiler knows how many numbers can be read at once
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < columns)[None, :]
    if NORM:
        factor, shift = load_line(mean, inverse, weight, bias, column // N, column < columns)
    there, image, left, start, stop = _find_place(
        tl.program_id(0), strips, (across + 1) // 2, down, chunks, chunk, ROWS
    )
    left *= 2
    seen = there[:, None] & inside
    both = (there & (left + 1 < across))[:, None] & inside
    features = x + (image * down * S * across * S)[:, None] * columns + column[None, :]
    answers = y + (image * down * across + left)[:, None] * columns + column[None, :]
    left_above = tl.zeros([ROWS, COLUMNS], tl.float32)  # sums of the outputs above a row of blocks, and at its height
    right_above = tl.zeros([ROWS, COLUMNS], tl.float32)
    left_here = tl.zeros([ROWS, COLUMNS], tl.float32)
    right_here = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.maximum(start - 1, 0), tl.minimum(stop + 1, down)):
        left_below = tl.zeros([ROWS, COLUMNS], tl.float32)
        right_below = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in range(S):
            left_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
            right_sum = tl.zeros([ROWS, COLUMNS], tl.float32)
            for j in tl.static_range(4 * S):
                # Beyond the rim a pixel counts nothing; that at the rim is read in its place.
                pixel = tl.minimum(tl.maximum((left - 1) * S + j, 0), across * S - 1)
                place = features + (pixel * columns)[:, None] + (block * S + i) * across * S * columns
                value = tl.load(place, mask=inside).to(tl.float32)
                if NORM:
                    value = value * factor[None, :] + shift[None, :]
                    value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                square = value * value
                if j < 3 * S:
                    left_sum += tl.load(weights_across + (left + 1) * 3 * S + j)[:, None] * square
                if j >= S:
                    right_sum += tl.load(weights_across + (left + 2) * 3 * S + j - S)[:, None] * square
            to_above = tl.load(weights_down + (block * 3 + 2) * S + i)
            to_here = tl.load(weights_down + ((block + 1) * 3 + 1) * S + i)
            to_below = tl.load(weights_down + (block + 2) * 3 * S + i)
            left_above += to_above * left_sum
            left_here += to_here * left_sum
            left_below += to_below * left_sum
            right_above += to_above * right_sum
            right_here += to_here * right_sum
            right_below += to_below * right_sum
        if block > start:
            place = answers + (block - 1) * across * columns
            tl.store(place, tl.sqrt(left_above + faint) - tl.sqrt(faint), mask=seen)
            tl.store(place + columns, tl.sqrt(right_above + faint) - tl.sqrt(faint), mask=both)
        left_above, right_above = left_here, right_here
        left_here, right_here = left_below, right_below
    if stop == down:
        place = answers + (stop - 1) * across * columns
        tl.store(place, tl.sqrt(left_above + faint) - tl.sqrt(faint), mask=seen)
        tl.store(place + columns, tl.sqrt(right_above + faint) - tl.sqrt(faint), mask=both)


@triton.jit
def _divide_by_root(dy, y, halved, count, root, FLAT: tl.constexpr):
    """The gradient of half the mean square, from that of its root."""
    place = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    seen = place < count
    gradient = tl.load(dy + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(halved + place, gradient / (tl.load(y + place, mask=seen, other=0.0).to(tl.float32) + root), mask=seen)


@triton.jit
def _spread(before, at, behind, weight_before, weight_at, weight_behind, row, inside):
    """What a row of outputs gives to pixels, but for the weights of rows: the outputs next to and at each."""
    total = weight_before[:, None] * tl.load(before + row, mask=inside).to(tl.float32)
    total += weight_at[:, None] * tl.load(at + row, mask=inside).to(tl.float32)
    return total + weight_behind[:, None] * tl.load(behind + row, mask=inside).to(tl.float32)


@triton.jit
def _backward(
    x, halved, dx, mean, inverse, weight, bias, d_weight, d_bias, sums, products, weights_down, weights_across,
    strips, columns, down, across, chunks, chunk, steps, count,
    NORM: tl.constexpr, WRITE: tl.constexpr,
    N: tl.constexpr, S: tl.constexpr, UNIT: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Strips are one pixel wide. Of batch norm, the sums that gradients take are found first."""
    columns = columns // UNIT * UNIT  # so that the compiler knows how many numbers can be read at once
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < columns)[None, :]
    if NORM:
        factor, shift = load_line(mean, inverse, weight, bias, column // N, column < columns)
        middle = tl.load(mean + column // N, mask=column < columns, other=0.0)
        scale = tl.load(inverse + column // N, mask=column < columns, other=0.0)
        if d_bias is not None:
            level = tl.load(d_bias + column // N, mask=column < columns, other=0.0) / count
            slope = tl.load(d_weight + column // N, mask=column < columns, other=0.0) / count * scale
    if not WRITE:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        item = tl.program_id(0) * steps + step
        there, image, pixel, start, stop = _find_place(item, strips, across * S, down, chunks, chunk, ROWS)
        seen = there[:, None] & inside
        features = (image * down * S * across * S + pixel)[:, None] * columns + column[None, :]
        output = pixel // S
        outputs = halved + (image * down * across)[:, None] * columns + column[None, :]
        before = outputs + (tl.maximum(output - 1, 0) * columns)[:, None]  # beyond the rim its weight is 0
        at = outputs + (output * columns)[:, None]
        behind = outputs + (tl.minimum(output + 1, across - 1) * columns)[:, None]
        share = weights_across + pixel % S
        weight_before = tl.load(share + (output * 3 + 2) * S, mask=there, other=0.0)
        weight_at = tl.load(share + ((output + 1) * 3 + 1) * S, mask=there, other=0.0)
        weight_behind = tl.load(share + (output + 2) * 3 * S, mask=there, other=0.0)
        length = across * columns  # of a row of outputs
        row = tl.maximum(start - 1, 0) * length
        above = _spread(before, at, behind, weight_before, weight_at, weight_behind, row, inside)
        here = _spread(before, at, behind, weight_before, weight_at, weight_behind, start * length, inside)
        for block in range(start, stop):
            row = tl.minimum(block + 1, down - 1) * length
            below = _spread(before, at, behind, weight_before, weight_at, weight_behind, row, inside)
            for i in tl.static_range(S):
                place = features + (block * S + i) * length * S
                value = tl.load(x + place, mask=inside).to(tl.float32)
                gradient = tl.load(weights_down + (block * 3 + 2) * S + i) * above
                gradient += tl.load(weights_down + ((block + 1) * 3 + 1) * S + i) * here
                gradient += tl.load(weights_down + (block + 2) * 3 * S + i) * below
                if NORM:
                    gradient *= tl.maximum(value * factor[None, :] + shift[None, :], 0.0)
                    value -= middle[None, :]
                else:
                    gradient *= value
                if WRITE:
                    if d_bias is not None:
                        gradient = factor[None, :] * (gradient - level[None, :] - value * slope[None, :])
                    tl.store(dx + place, gradient, mask=seen)
                else:
                    total += gradient
                    total_of_products += gradient * value
            above = here
            here = below
    if not WRITE:
        place = tl.program_id(0) * columns + column
        tl.store(sums + place, tl.sum(total, axis=0), mask=column < columns)
        tl.store(products + place, tl.sum(total_of_products, axis=0) * scale, mask=column < columns)


def apply(x: Tensor, pool: Filter, line: Sequence[Tensor] = ()) -> Tensor:
    """The pool, behind ReLU and batch norm by a line: mean, inverse deviation, weight and bias of each channel."""
    batch, height, width, channels, n = x.shape
    down, across, columns = height // pool.size, width // pool.size, channels * n
    y = x.new_empty(batch, down, across, channels, n)
    strips = batch * triton.cdiv(across, 2)
    tiles, chunks, chunk, tile = _cut(FORWARD_TILE, strips, down, columns)
    _forward[tiles * chunks, triton.cdiv(columns, tile[-1])](
        *(x, y, *(line or 4 * (None,)), *find_both_weights(x, pool)),
        *(FAINT, strips, columns, down, across, chunks, chunk),
        *(bool(line), n, pool.size, *tile),
        num_warps=WARPS,
    )
    return y


def halve(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of half the mean square, from that of the answer."""
    # As y has it, rounded, the root is as exact as y. Its inverse may be 1000, which is much for float16.
    halved = torch.empty_like(y, dtype=torch.bfloat16 if dy.dtype == torch.bfloat16 else torch.float32)
    _divide_by_root[triton.cdiv(y.numel(), FLAT),](dy.contiguous(), y, halved, y.numel(), math.sqrt(FAINT), FLAT)
    return halved


def find_sums(x: Tensor, halved: Tensor, pool: Filter, line: Sequence[Tensor]) -> Tensor:
    """Sums by parts of the gradient behind the line, and of its products with normalised features, (2, parts, C·N)."""
    tiles, shape, tile = _cut_back(x, pool.size)
    programs, steps = divide(tiles, 1)
    sums = torch.empty(2, programs, x.shape[3] * x.shape[4], device=x.device, dtype=torch.float32)
    _backward[programs, triton.cdiv(sums.shape[2], tile[-1])](
        *(x, halved, None, *line, None, None, *sums, *find_both_weights(x, pool), *shape, steps, 0),
        *(True, False, x.shape[4], pool.size, *tile),
        num_warps=WARPS,
    )
    return sums


def find_gradient(
    x: Tensor, halved: Tensor, pool: Filter, line: Sequence[Tensor] = (), d_line: Sequence[Tensor] = ()
) -> Tensor:
    """That of the features, for gradients of weight and bias; without them that behind the line, if there is one."""
    tiles, shape, tile = _cut_back(x, pool.size)
    gradient = torch.empty_like(x)
    count = x.numel() // x.shape[3]
    given = (*(line or 4 * (None,)), *(d_line or 2 * (None,)), None, None)
    _backward[tiles, triton.cdiv(x.shape[3] * x.shape[4], tile[-1])](
        *(x, halved, gradient, *given, *find_both_weights(x, pool), *shape, 1, count),
        *(bool(line), True, x.shape[4], pool.size, *tile),
        num_warps=WARPS,
    )
    return gradient


def _cut_back(x: Tensor, size: int) -> tuple[int, tuple[int, ...], tuple[int, int, int]]:
    """Tiles of features whose gradients are looked for; what they are cut from, and how; unit, rows and columns."""
    batch, height, width, channels, n = x.shape
    tiles, chunks, chunk, tile = _cut(BACKWARD_TILE, batch * width, height // size, channels * n)
    return tiles * chunks, (batch * width, channels * n, height // size, width // size, chunks, chunk), tile


def _cut(numbers: int, strips: int, down: int, columns: int) -> tuple[int, int, int, tuple[int, int, int]]:
    """Tiles side by side, chunks that each strip is cut into, blocks of a chunk; unit, rows and columns of a tile."""
    across = min(triton.next_power_of_2(columns), COLUMNS)
    rows = numbers // across
    chunks = triton.cdiv(down, BLOCKS)
    return triton.cdiv(strips, rows), chunks, triton.cdiv(down, chunks), (min(columns & -columns, 16), rows, across)


def norm_relu_blur(x: Tensor, norm: nn.BatchNorm3d, pool: GroupAvgPool2d) -> Tensor:
    """Batch norm, ReLU, and a pool of power 2, of features (B, C, N, H, W); without gradients in evaluation."""
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as it lies in memory
    if norm.training:
        y: Tensor = NormReluBlur.apply(rows, filter_of(pool), norm.weight, norm.bias, *track(norm))
    else:
        y = apply(rows, filter_of(pool), recall(norm))
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
        y = apply(x, pool, line)
        ctx.pool, ctx.given = pool, 2 + (0 if weight is None else 2 + len(tracked))
        ctx.save_for_backward(x, y, *line)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, *line = ctx.saved_tensors
        given = (x, halve(gradients[0], y), ctx.pool, line)
        if not line:
            return (find_gradient(*given), *[None] * (ctx.given - 1))
        d_weight, d_bias = find_gradients(find_sums(*given), x.shape[3])
        dx = find_gradient(*given, (d_weight, d_bias))
        return (dx, None, d_weight.to(line[2]), d_bias.to(line[2]), *[None] * (ctx.given - 4))
