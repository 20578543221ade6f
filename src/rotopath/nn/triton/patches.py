"""Patches of images times turned kernels, in Triton: lifting, and the sums that its gradients are made of.

In: images, and kernels as rows of taps. Out: features as pixels by columns (channels by orientations). What lifting
gives is large; with batch norm, ReLU and max pooling behind it in the same pass, it never reaches memory.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotopath.nn.triton.batch_norm import COLUMNS, divide
from rotopath.nn.triton.lift import add_up

OUTPUTS, WINDOWS, PATCHES = 64, 32, 128  # of a tile; of one that is pooled; and of one whose moments are summed up
SUMMING = 264  # programs at most that sum up, two on each multiprocessor of a large GPU; each writes what it found


@triton.jit
def _load_patches(
    x, first, seen, by_row, by_column, by_channel,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, FROM: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Some of what lies under kernels that begin at each of these places, one row for each; behind all taps is a 1."""
    tap = FROM + tl.arange(0, TAPS)
    down, across, channel = tap // (SIDE * CHANNELS), (tap // CHANNELS) % SIDE, tap % CHANNELS
    offset = down * by_row + across * by_column + channel * by_channel
    used: tl.constexpr = SIDE * SIDE * CHANNELS
    value = tl.load(x + (first[:, None] + offset[None, :]), mask=seen[:, None] & (tap < used)[None, :], other=0.0)
    return tl.where((tap == used)[None, :], 1.0, value).to(x.dtype.element_ty)


@triton.jit
def _place_patch(output, height, width, by_image, by_row, by_column, S: tl.constexpr):
    """Where the first patch begins that each output of a pool of S × S windows looks at."""
    across = output % width
    rest = output // width
    down = rest % height
    return (rest // height) * by_image + down * S * by_row + across * S * by_column


@triton.jit
def _sum_moments(
    x, moments, patches, height, width, by_image, by_row, by_column, by_channel, steps,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of the products of any two taps; those with the last one are sums of the taps themselves."""
    total = tl.zeros([MAIN, MAIN], tl.float32)
    if REST:
        total_across = tl.zeros([MAIN, REST], tl.float32)
        total_of_rest = tl.zeros([REST, REST], tl.float32)
    for step in range(steps):
        patch = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        first = _place_patch(patch, height, width, by_image, by_row, by_column, 1)
        seen = patch < patches
        rows = _load_patches(x, first, seen, by_row, by_column, by_channel, SIDE, CHANNELS, 0, MAIN)
        total = tl.dot(tl.trans(rows), rows, total, input_precision="ieee")
        if REST:
            rest = _load_patches(x, first, seen, by_row, by_column, by_channel, SIDE, CHANNELS, MAIN, REST)
            total_across = tl.dot(tl.trans(rows), rest, total_across, input_precision="ieee")
            total_of_rest = tl.dot(tl.trans(rest), rest, total_of_rest, input_precision="ieee")
    wide: tl.constexpr = MAIN + REST
    moments += tl.program_id(0) * wide * wide
    tap = tl.arange(0, MAIN)
    tl.store(moments + tap[:, None] * wide + tap[None, :], total)
    if REST:
        other = MAIN + tl.arange(0, REST)
        tl.store(moments + tap[:, None] * wide + other[None, :], total_across)
        tl.store(moments + other[None, :] * wide + tap[:, None], total_across)
        tl.store(moments + other[:, None] * wide + other[None, :], total_of_rest)


@triton.jit
def _load_kernels(kernels, column, columns, taps, FROM: tl.constexpr, TAPS: tl.constexpr):
    tap = FROM + tl.arange(0, TAPS)
    inside = (tap < taps)[:, None] & (column < columns)[None, :]
    return tl.load(kernels + column[None, :] * taps + tap[:, None], mask=inside, other=0.0)


@triton.jit
def _correlate(
    x, patch, seen, by_row, by_column, by_channel, turned, rest,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    rows = _load_patches(x, patch, seen, by_row, by_column, by_channel, SIDE, CHANNELS, 0, MAIN)
    lifted = tl.dot(rows, turned, input_precision="ieee")
    if REST:
        rows = _load_patches(x, patch, seen, by_row, by_column, by_channel, SIDE, CHANNELS, MAIN, REST)
        lifted = tl.dot(rows, rest, lifted, input_precision="ieee")
    return lifted


@triton.jit
def _forward(
    x, kernels, y, winners, factor, shift,
    outputs, columns, height, width, by_image, by_row, by_column, by_channel, steps,
    NORM: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Lifts; with batch norm, ReLU and pooling also tells which of a window was the highest, or -1 if none passed."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    turned = _load_kernels(kernels, column, columns, SIDE * SIDE * CHANNELS, 0, MAIN)
    rest = turned
    if REST:
        rest = _load_kernels(kernels, column, columns, SIDE * SIDE * CHANNELS, MAIN, REST)
    if NORM:
        slope = tl.load(factor + column, mask=inside, other=0.0)[None, :]
        level = tl.load(shift + column, mask=inside, other=0.0)[None, :]
    for step in range(steps):
        output = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        seen = output < outputs
        first = _place_patch(output, height, width, by_image, by_row, by_column, S)
        place = output.to(tl.int64)[:, None] * columns + column[None, :]
        both = seen[:, None] & inside[None, :]
        if NORM:
            highest = tl.zeros([ROWS, COLUMNS], tl.float32)  # ReLU lets nothing below pass
            winner = tl.full([ROWS, COLUMNS], -1, tl.int32)
            for of_window in range(S * S):
                patch = first + of_window // S * by_row + of_window % S * by_column
                here = _correlate(
                    x, patch, seen, by_row, by_column, by_channel, turned, rest, SIDE, CHANNELS, MAIN, REST
                )
                here = here * slope + level
                winner = tl.where(here > highest, of_window, winner)
                highest = tl.maximum(highest, here, propagate_nan=tl.PropagateNan.ALL)
            tl.store(y + place, highest, mask=both)
            if winners is not None:
                tl.store(winners + place, winner.to(tl.int8), mask=both)
        else:
            here = _correlate(x, first, seen, by_row, by_column, by_channel, turned, rest, SIDE, CHANNELS, MAIN, REST)
            tl.store(y + place, here, mask=both)


@triton.jit
def _sum_products(
    x, dy, winners, sums, outputs, columns, height, width, by_image, by_row, by_column, by_channel, steps,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sums of the products of taps with the gradient in front of the pool; those with the last one are its sums."""
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    total = tl.zeros([TAPS, COLUMNS], tl.float32)
    for step in range(steps * S * S):  # gradients come from the cache for all but the first of a window
        output = (tl.program_id(0) * steps + step // (S * S)) * ROWS + tl.arange(0, ROWS)
        seen = output < outputs
        place = output.to(tl.int64)[:, None] * columns + column[None, :]
        both = seen[:, None] & inside[None, :]
        gradient = tl.load(dy + place, mask=both, other=0.0)
        if winners is not None:
            winner = tl.load(winners + place, mask=both, other=-1)
            gradient = tl.where(winner == step % (S * S), gradient, 0.0).to(x.dtype.element_ty)
        first = _place_patch(output, height, width, by_image, by_row, by_column, S)
        first += step % (S * S) // S * by_row + step % S * by_column
        rows = _load_patches(x, first, seen, by_row, by_column, by_channel, SIDE, CHANNELS, 0, TAPS)
        total = tl.dot(tl.trans(rows), gradient, total, input_precision="ieee")
    tap = tl.program_id(0) * TAPS + tl.arange(0, TAPS)
    tl.store(sums + tap[:, None] * columns + column[None, :], total, mask=inside[None, :])


def lift(x: Tensor, flat: Tensor) -> Tensor:
    """Images (B, C', H, W) and kernels (C·N, taps) to features (B, H, W, C·N)."""
    return _launch(x, flat, None, 1, remember=False)[0]


def lift_and_pool(
    x: Tensor, flat: Tensor, line: Tensor, pool: int, remember: bool = False
) -> tuple[Tensor, Tensor | None]:
    """The same behind a factor and a shift of each column, ReLU and max pooling; and what won in each window."""
    return _launch(x, flat, line, pool, remember)


def _launch(x: Tensor, flat: Tensor, line: Tensor | None, pool: int, remember: bool) -> tuple[Tensor, Tensor | None]:
    columns, taps = flat.shape
    side = math.isqrt(taps // x.shape[1])
    height, width = ((size - side + 1) // pool for size in x.shape[-2:])
    y = x.new_empty(x.shape[0], height, width, columns)
    winners = torch.empty_like(y, dtype=torch.int8) if remember else None
    factor, shift = (None, None) if line is None else line
    outputs = y[..., 0].numel()
    rows = OUTPUTS if line is None else WINDOWS
    programs, steps = divide(outputs, rows)
    _forward[programs, triton.cdiv(columns, COLUMNS)](
        *(x, flat, y, winners, factor, shift, outputs, columns, height, width, *_strides(x), steps),
        *(line is not None, side, x.shape[1], *_cut(taps), pool, rows, COLUMNS),
    )
    return y, winners


def find_products(x: Tensor, dy: Tensor, side: int, pool: int = 1, winners: Tensor | None = None) -> Tensor:
    """Sums over patches of each tap times each gradient in front of the pool, (taps + 1 and more, C·N), in float64.

    The last tap is 1; what is behind it is 0.
    """
    dy = dy.contiguous()
    _, height, width, columns = dy.shape
    outputs, taps = dy[..., 0].numel(), side * side * x.shape[1]
    programs, steps = divide(outputs, OUTPUTS, SUMMING)
    partial = torch.empty(programs, _tile(taps), columns, device=x.device, dtype=torch.float32)
    _sum_products[programs, triton.cdiv(columns, COLUMNS)](
        *(x, dy, winners, partial, outputs, columns, height, width, *_strides(x), steps),
        *(side, x.shape[1], _tile(taps), pool, OUTPUTS, COLUMNS),
    )
    return add_up(partial)


def find_moments(x: Tensor, side: int) -> tuple[Tensor, int]:
    """Sums over patches of any tap times any other (taps + 1 and more, as many), in float64; and how many patches.

    The last tap is 1, so that with it there are sums of the taps themselves; what is behind it is 0.
    """
    height, width = (size - side + 1 for size in x.shape[-2:])
    taps, patches = side * side * x.shape[1], x.shape[0] * height * width
    programs, steps = divide(patches, PATCHES, SUMMING)
    wide = sum(_cut(taps))
    partial = torch.empty(programs, wide, wide, device=x.device, dtype=torch.float32)
    _sum_moments[programs,](
        *(x, partial, patches, height, width, *_strides(x), steps, side, x.shape[1], *_cut(taps), PATCHES)
    )
    return add_up(partial), patches


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Of images, rows, columns and channels."""
    image, channel, row, column = x.stride()
    return image, row, column, channel


def _tile(taps: int) -> int:
    """A power of 2, for taps and one more; products of matrices have 16 terms at least."""
    return max(16, int(triton.next_power_of_2(taps + 1)))


def _cut(taps: int) -> tuple[int, int]:
    """Two such tiles in place of one, where less of them lies idle; the second may be 0."""
    main = _tile(taps) // 2
    rest = _tile(taps - main)
    return (main, rest) if main >= 16 and main + rest < _tile(taps) else (_tile(taps), 0)
