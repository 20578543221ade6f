"""Batch norm, ReLU and the blurred root of mean squares in one pass each way, in Triton.

In: features as in `kernels`. Out: what the layers give one after another. Means over windows, smoothed and thinned out,
are one filter along each axis: an output weighs the block of S × S pixels at its place and the eight about it. Programs
walk down an image and keep sums of three rows of outputs, so that every row of features is taken once.
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.kernels import COLUMNS, divide, find_gradients, find_statistics, load_line
from rotopath.nn.pool import FAINT, GroupAvgPool2d

TILE = 2048  # numbers side by side, in a row of pixels and its columns
BLOCKS = 16  # at most, that a program walks down
WARPS = 4
FLAT = 4096  # numbers of a tile that has no neighbours


@triton.jit
def _find_blocks(item, blocks, chunks, chunk):
    """Where a program starts to walk down, and where it stops."""
    start = item % chunks * chunk
    return start, tl.minimum(start + chunk, blocks)


@triton.jit
def _forward(
    x, y, mean, inverse, weight, bias, weights_down, weights_across,
    faint, strips, columns, down, across, chunks, chunk,
    N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Strips are columns of outputs; there are down × across of these in an image."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    factor, shift = load_line(mean, inverse, weight, bias, column // N, inside)
    start, stop = _find_blocks(tl.program_id(0), down, chunks, chunk)
    strip = tl.program_id(0) // chunks * ROWS + tl.arange(0, ROWS)
    seen = (strip < strips)[:, None] & inside[None, :]
    image, place = (strip // across).to(tl.int64), strip % across
    answers = y + (image * down * across + place)[:, None] * columns + column[None, :]
    above = tl.zeros([ROWS, COLUMNS], tl.float32)  # sums of the outputs in the row above the block, and at its place
    here = tl.zeros([ROWS, COLUMNS], tl.float32)
    for block in range(tl.maximum(start - 1, 0), tl.minimum(stop + 1, down)):
        below = tl.zeros([ROWS, COLUMNS], tl.float32)
        for i in tl.static_range(S):
            row = ((image * down + block) * S + i) * across * S
            line = tl.zeros([ROWS, COLUMNS], tl.float32)
            for j in tl.static_range(3 * S):
                # Beyond the rim a pixel counts nothing; that at the rim is read in its place.
                pixel = tl.minimum(tl.maximum((place - 1) * S + j, 0), across * S - 1)
                value = tl.load(x + (row + pixel)[:, None] * columns + column[None, :], mask=seen, other=0.0)
                value = value.to(tl.float32) * factor[None, :] + shift[None, :]
                value = tl.maximum(value, 0.0, propagate_nan=tl.PropagateNan.ALL)
                line += tl.load(weights_across + (place + 1) * 3 * S + j)[:, None] * value * value
            above += tl.load(weights_down + (block * 3 + 2) * S + i) * line
            here += tl.load(weights_down + ((block + 1) * 3 + 1) * S + i) * line
            below += tl.load(weights_down + (block + 2) * 3 * S + i) * line
        if block > start:
            found = tl.sqrt(above + faint) - tl.sqrt(faint)
            tl.store(answers + (block - 1) * across * columns, found, mask=seen)
        above = here
        here = below
    if stop == down:
        found = tl.sqrt(above + faint) - tl.sqrt(faint)
        tl.store(answers + (down - 1) * across * columns, found, mask=seen)


@triton.jit
def _divide_by_root(dy, y, halved, count, root, FLAT: tl.constexpr):
    """The gradient of half the mean square, from that of its root."""
    place = tl.program_id(0).to(tl.int64) * FLAT + tl.arange(0, FLAT)
    seen = place < count
    gradient = tl.load(dy + place, mask=seen, other=0.0).to(tl.float32)
    tl.store(halved + place, gradient / (tl.load(y + place, mask=seen, other=0.0).to(tl.float32) + root), mask=seen)


@triton.jit
def _spread(halved, weights_across, output_row, pixel, column, seen, columns, across, S: tl.constexpr):
    """What a row of outputs gives to pixels, but for the weights of rows."""
    total = tl.zeros(seen.shape, tl.float32)
    for k in tl.static_range(3):  # an output sees a pixel in the first, second or third of its blocks
        output = pixel // S + 1 - k
        weight = tl.load(weights_across + ((output + 1) * 3 + k) * S + pixel % S)
        output = tl.minimum(tl.maximum(output, 0), across - 1)  # beyond the rim, weights are 0
        place = (output_row * across + output)[:, None] * columns + column[None, :]
        total += weight[:, None] * tl.load(halved + place, mask=seen, other=0.0).to(tl.float32)
    return total


@triton.jit
def _backward(
    x, halved, dx, mean, inverse, weight, bias, d_weight, d_bias, sums, products, weights_down, weights_across,
    strips, columns, down, across, chunks, chunk, steps, count,
    WRITE: tl.constexpr, N: tl.constexpr, S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Strips are columns of pixels. At first only the sums are found that the gradient of each feature takes."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    channel = column // N
    factor, shift = load_line(mean, inverse, weight, bias, channel, inside)
    middle = tl.load(mean + channel, mask=inside, other=0.0)
    scale = tl.load(inverse + channel, mask=inside, other=0.0)
    if WRITE:
        level = tl.load(d_bias + channel, mask=inside, other=0.0) / count
        slope = tl.load(d_weight + channel, mask=inside, other=0.0) / count * scale
    else:
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        total_of_products = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in range(steps):
        item = tl.program_id(0) * steps + step
        start, stop = _find_blocks(item, down, chunks, chunk)
        strip = item // chunks * ROWS + tl.arange(0, ROWS)
        seen = (strip < strips)[:, None] & inside[None, :]
        image, pixel = (strip // (across * S)).to(tl.int64), strip % (across * S)
        row = image * down + tl.maximum(start - 1, 0)
        above = _spread(halved, weights_across, row, pixel, column, seen, columns, across, S)
        here = _spread(halved, weights_across, image * down + start, pixel, column, seen, columns, across, S)
        for block in range(start, stop):
            row = image * down + tl.minimum(block + 1, down - 1)
            below = _spread(halved, weights_across, row, pixel, column, seen, columns, across, S)
            for i in tl.static_range(S):
                row = (image * down + block) * S + i
                place = (row * across * S + pixel)[:, None] * columns + column[None, :]
                value = tl.load(x + place, mask=seen, other=0.0).to(tl.float32)
                gradient = tl.load(weights_down + (block * 3 + 2) * S + i) * above
                gradient += tl.load(weights_down + ((block + 1) * 3 + 1) * S + i) * here
                gradient += tl.load(weights_down + (block + 2) * 3 * S + i) * below
                gradient *= tl.maximum(value * factor[None, :] + shift[None, :], 0.0)
                value -= middle[None, :]
                if WRITE:
                    found = factor[None, :] * (gradient - level[None, :] - value * slope[None, :])
                    tl.store(dx + place, found, mask=seen)
                else:
                    total += gradient
                    total_of_products += gradient * value
            above = here
            here = below
    if not WRITE:
        place = tl.program_id(0) * columns + column
        tl.store(sums + place, tl.sum(total, axis=0), mask=inside)
        tl.store(products + place, tl.sum(total_of_products, axis=0) * scale, mask=inside)


def norm_relu_blur(x: Tensor, norm: nn.BatchNorm3d, size: int, blur: int) -> Tensor:
    """Batch norm by the statistics of the batch, ReLU, and root mean squares over windows, of features (B, C, N, H, W).

    Windows at every pixel are smoothed by at most 2 · size + 1 taps before one in `size` is kept.
    """
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as it lies in memory
    statistics = (norm.running_mean, norm.running_var)
    y: Tensor = NormReluBlur.apply(rows, norm.weight, norm.bias, *statistics, norm.momentum, norm.eps, size, blur)
    return y.permute(0, 3, 4, 1, 2)


class NormReluBlur(torch.autograd.Function):
    """Batch norm by the statistics of the batch, ReLU, and blurred root mean squares of features (B, H, W, C, N)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        momentum: float,
        eps: float,
        size: int,
        blur: int,
    ) -> Tensor:
        statistics = find_statistics(x, running_mean, running_variance, momentum, eps)
        batch, height, width, channels, n = x.shape
        down, across, columns = height // size, width // size, channels * n
        weights = (_find_weights(down, size, blur, x.device), _find_weights(across, size, blur, x.device))
        y = torch.empty(batch, down, across, channels, n, device=x.device, dtype=x.dtype)
        tiles, chunks, chunk, tile = _cut(batch * across, down, columns)
        _forward[tiles * chunks, triton.cdiv(columns, tile[1])](
            *(x, y, *statistics, weight, bias, *weights, FAINT, batch * across, columns, down, across, chunks, chunk),
            *(n, size, *tile),
            num_warps=WARPS,
        )
        ctx.save_for_backward(x, y, statistics, weight, bias, *weights)
        ctx.size = size
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, y, statistics, weight, bias, *weights = ctx.saved_tensors
        size, dy = ctx.size, gradients[0].contiguous()
        # Of y, rounding takes no more digits than it has: the root is greater. Halves of 16 bits would overflow.
        exact = torch.bfloat16 if dy.dtype == torch.bfloat16 else torch.float32
        halved = torch.empty_like(dy, dtype=exact)
        _divide_by_root[triton.cdiv(dy.numel(), FLAT),](dy, y, halved, dy.numel(), math.sqrt(FAINT), FLAT)
        batch, height, width, channels, n = x.shape
        down, across, columns = height // size, width // size, channels * n
        tiles, chunks, chunk, tile = _cut(batch * width, down, columns)
        shape = (batch * width, columns, down, across, chunks, chunk)
        programs, steps = divide(tiles * chunks, 1)
        partial = torch.empty(2, programs, columns, device=x.device, dtype=torch.float32)
        dx = torch.empty_like(x)

        def walk(programs: int, steps: int, d_line: Tensor, write: bool) -> None:
            _backward[programs, triton.cdiv(columns, tile[1])](
                *(x, halved, dx, *statistics, weight, bias, *d_line, *partial, *weights, *shape, steps),
                *(batch * height * width * n, write, n, size, *tile),
                num_warps=WARPS,
            )

        walk(programs, steps, statistics, write=False)  # in the place of gradients, which are not known yet
        d_line = find_gradients(partial, channels)
        walk(tiles * chunks, 1, d_line, write=True)
        return dx, d_line[0].to(weight.dtype), d_line[1].to(bias.dtype), None, None, None, None, None, None


def _cut(strips: int, down: int, columns: int) -> tuple[int, int, int, tuple[int, int]]:
    """Tiles side by side, chunks that each strip is cut into, blocks of a chunk, and rows and columns of a tile."""
    across = min(triton.next_power_of_2(columns), COLUMNS)
    rows = TILE // across
    chunks = triton.cdiv(down, BLOCKS)
    return triton.cdiv(strips, rows), chunks, triton.cdiv(down, chunks), (rows, across)


@cache
def _find_weights(outputs: int, size: int, blur: int, device: torch.device) -> Tensor:
    """What each output along an axis takes of the pixels in three blocks, (outputs + 2, 3 · size); 0 beyond the rim."""
    pixels = outputs * size
    single = torch.eye(pixels, dtype=torch.float64).view(pixels, 1, 1, pixels, 1).expand(-1, -1, -1, -1, size)
    seen = GroupAvgPool2d(size, blur=blur).double()(single).view(pixels, outputs)
    windows = F.pad(seen, (0, 0, size, size)).unfold(0, 3 * size, size)  # (blocks, outputs, 3 · size)
    weights = windows.diagonal(dim1=0, dim2=1).T  # (outputs, 3 · size)
    return F.pad(weights, (0, 0, 1, 1)).to(device, torch.float32).contiguous()
