"""Matrix products of image patches on a GPU, from which `rotopath.nn.triton.lift` computes lifting and its gradients.

`lift` and `lift_and_pool` multiply patches with kernels. `lift_and_pool` also applies batch norm, ReLU and max pooling
in the same pass, so that the lifted features are not stored. `sum_products` computes the sums for the gradient of the
kernels, and `sum_moments` the sums for batch norm.

A *patch* is the part of an image that a kernel covers: k × k pixels with C' channels. Its *taps* are these k·k·C'
values in the order (row, column, channel). The taps of a kernel are its k·k·C' weights, in the same order. The patches
form a matrix (patches, taps). A *constant tap* of 1 is appended to each patch. The sum of products of the constant tap
and another factor is the plain sum of that factor.

Taps are divided into one or two tiles. T is the total size of these tiles: k·k·C' taps, the constant tap, and unused
taps, which fill the last tile.

Arguments of the Triton kernels; all arrays but x are contiguous:

- `x`: images (B, C', H, W) with any strides, given in elements. CHANNELS is C' and SIDE is k.
- `first`: for each patch of a tile, the offset in x of its first (top left) pixel.
- `flat_kernels`: the convolution kernels, flattened to (C·N, k·k·C') for C output channels and N orientations.
  `columns` is C·N.
- `y`: output (B, height, width, C·N), read as a matrix with one row per window of S × S neighboring patches and one
  column per kernel. S is 1 without pooling. `outputs` is the number of rows, B · height · width.
- `argmax`: shaped like y. It contains the position (row · S + column) of the maximum in each window, or -1 where no
  value is positive and the output of ReLU is 0.
- `scale`, `shift`: batch norm of each column (C·N,), as scale · value + shift.
- `dy`: gradient of the loss with respect to y.
- `sums`, `moments`, `partial_sums`: partial sums; the first axis has one entry per program.

ROWS and COLUMNS are the size of a tile of outputs. TAPS is the size of a tile of taps. If the taps are divided into two
tiles, MAIN and REST are their sizes; otherwise MAIN is the size of the only tile and REST is 0. Each program processes
`steps` tiles of rows.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotopath.nn.triton import divide_up, jit, next_power_of_2
from rotopath.nn.triton.batch_norm import COLUMNS, split_rows

LIFT_ROWS, POOL_ROWS, MOMENT_ROWS = 64, 32, 128  # rows of a tile: for lifting, for lifting and pooling, for moments
MAX_SUM_PROGRAMS = 264  # maximum number of programs that sum in parallel: two per multiprocessor of a large GPU
REDUCE_PARTS, REDUCE_ELEMENTS = 32, 128  # tile of `_reduce_kernel`: number of partial sums, and elements of each


def lift(x: Tensor, flat_kernels: Tensor) -> Tensor:
    """Lift images x (B, C', H, W) with `flat_kernels` (C·N, k·k·C').

    Returns features (B, H - k + 1, W - k + 1, C·N) in the data type of x.
    """
    return _lift(x, flat_kernels, scale_shift=None, pool=1, return_argmax=False)[0]


def lift_and_pool(
    x: Tensor, flat_kernels: Tensor, scale_shift: Tensor, pool: int, return_argmax: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Lift images x (B, C', H, W), and apply batch norm, ReLU and max pooling over windows of pool × pool pixels.

    `flat_kernels` are (C·N, k·k·C'), and `scale_shift` (2, C·N) is the batch norm as scale · value + shift.
    Returns features (B, height, width, C·N) and, if `return_argmax`, the argmax of the same shape, otherwise None. The
    argmax is the position of the maximum in its window as int8, or -1 where no value is positive.
    """
    return _lift(x, flat_kernels, scale_shift, pool, return_argmax)


def _lift(
    x: Tensor, flat_kernels: Tensor, scale_shift: Tensor | None, pool: int, return_argmax: bool
) -> tuple[Tensor, Tensor | None]:
    """Lift images. If `scale_shift` is given, also apply batch norm, ReLU and max pooling. Returns y and argmax."""
    columns, taps = flat_kernels.shape
    side = math.isqrt(taps // x.shape[1])
    height, width = ((size - side + 1) // pool for size in x.shape[-2:])
    y = x.new_empty(x.shape[0], height, width, columns)
    argmax = torch.empty_like(y, dtype=torch.int8) if return_argmax else None
    scale, shift = (None, None) if scale_shift is None else scale_shift
    outputs = y[..., 0].numel()
    rows = LIFT_ROWS if scale_shift is None else POOL_ROWS
    programs, steps = split_rows(outputs, rows)
    image_stride, row_stride, column_stride, channel_stride = _strides(x)
    main, rest = _split_taps(taps)
    _lift_kernel[programs, divide_up(columns, COLUMNS)](
        x=x,
        flat_kernels=flat_kernels,
        y=y,
        argmax=argmax,
        scale=scale,
        shift=shift,
        outputs=outputs,
        columns=columns,
        height=height,
        width=width,
        image_stride=image_stride,
        row_stride=row_stride,
        column_stride=column_stride,
        channel_stride=channel_stride,
        steps=steps,
        NORM=scale_shift is not None,
        SIDE=side,
        CHANNELS=x.shape[1],
        MAIN=main,
        REST=rest,
        S=pool,
        ROWS=rows,
        COLUMNS=COLUMNS,
    )
    return y, argmax


def sum_products(x: Tensor, dy: Tensor, side: int, pool: int = 1, argmax: Tensor | None = None) -> Tensor:
    """Return sums (T, C·N) over all patches: each tap times the gradient of each column at the patch, in float64.

    `side` is the kernel size k, and `dy` (B, height, width, C·N) is the gradient with respect to the output. Without a
    pool, each output belongs to one patch. If the output is that of a max pool, give `pool` (side of its windows) and
    `argmax`: then the patch with the maximum of a window has the gradient of this window, and all other patches have
    the gradient 0. Row k·k·C' of the result (constant tap) contains the sums of the gradients. Later rows are 0.
    """
    dy = dy.contiguous()
    _, height, width, columns = dy.shape
    outputs, taps = dy[..., 0].numel(), side * side * x.shape[1]
    programs, steps = split_rows(outputs, LIFT_ROWS, MAX_SUM_PROGRAMS)
    tile_taps = _tile_size(taps)
    partial_sums = torch.empty(programs, tile_taps, columns, device=x.device, dtype=torch.float32)
    image_stride, row_stride, column_stride, channel_stride = _strides(x)
    _sum_products_kernel[programs, divide_up(columns, COLUMNS)](
        x=x,
        dy=dy,
        argmax=argmax,
        sums=partial_sums,
        outputs=outputs,
        columns=columns,
        height=height,
        width=width,
        image_stride=image_stride,
        row_stride=row_stride,
        column_stride=column_stride,
        channel_stride=channel_stride,
        steps=steps,
        SIDE=side,
        CHANNELS=x.shape[1],
        TAPS=tile_taps,
        S=pool,
        ROWS=LIFT_ROWS,
        COLUMNS=COLUMNS,
    )
    return _reduce(partial_sums)


def sum_moments(x: Tensor, side: int) -> tuple[Tensor, int]:
    """Return, for each pair of taps, the sum of their product over all patches, and the number of patches.

    The sums are a matrix (T, T) in float64. `side` is the kernel size k. Row and column k·k·C' (constant tap) contain
    the sums of single taps. Later rows and columns are 0.
    """
    height, width = (size - side + 1 for size in x.shape[-2:])
    taps, patches = side * side * x.shape[1], x.shape[0] * height * width
    programs, steps = split_rows(patches, MOMENT_ROWS, MAX_SUM_PROGRAMS)
    main, rest = _split_taps(taps)
    partial_sums = torch.empty(programs, main + rest, main + rest, device=x.device, dtype=torch.float32)
    image_stride, row_stride, column_stride, channel_stride = _strides(x)
    _sum_moments_kernel[programs,](
        x=x,
        moments=partial_sums,
        patches=patches,
        height=height,
        width=width,
        image_stride=image_stride,
        row_stride=row_stride,
        column_stride=column_stride,
        channel_stride=channel_stride,
        steps=steps,
        SIDE=side,
        CHANNELS=x.shape[1],
        MAIN=main,
        REST=rest,
        ROWS=MOMENT_ROWS,
    )
    return _reduce(partial_sums), patches


def _reduce(partial_sums: Tensor) -> Tensor:
    """Return the sum of partial sums (programs, …) over their first axis, in float64."""
    total = torch.empty(partial_sums.shape[1:], device=partial_sums.device, dtype=torch.float64)
    _reduce_kernel[divide_up(total.numel(), REDUCE_ELEMENTS),](
        partial_sums=partial_sums,
        total=total,
        parts=len(partial_sums),
        elements=total.numel(),
        PARTS=REDUCE_PARTS,
        ELEMENTS=REDUCE_ELEMENTS,
    )
    return total


def _strides(x: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of images (B, C', H, W) in the order image, row, column, channel."""
    image, channel, row, column = x.stride()
    return image, row, column, channel


def _tile_size(taps: int) -> int:
    """Return the smallest power of 2 that holds the taps and the constant tap; `tl.dot` requires at least 16."""
    return max(16, next_power_of_2(taps + 1))


def _split_taps(taps: int) -> tuple[int, int]:
    """Return the sizes of the two tiles that hold the taps and the constant tap.

    Sizes are powers of 2. If two tiles are not smaller in total than one tile, the second size is 0.
    """
    main = _tile_size(taps) // 2
    rest = _tile_size(taps - main)
    return (main, rest) if main >= 16 and main + rest < _tile_size(taps) else (_tile_size(taps), 0)


@jit
def _reduce_kernel(partial_sums, total, parts, elements, PARTS: tl.constexpr, ELEMENTS: tl.constexpr):
    """Sum `partial_sums` (parts, elements) over the parts, and write `total` (elements,) in float64."""
    element = tl.program_id(0) * ELEMENTS + tl.arange(0, ELEMENTS)
    element_mask = (element < elements)[None, :]
    sums = tl.zeros([PARTS, ELEMENTS], tl.float64)
    for first in range(0, parts, PARTS):
        part = first + tl.arange(0, PARTS)
        offset = part.to(tl.int64)[:, None] * elements + element[None, :]
        sums += tl.load(partial_sums + offset, mask=(part < parts)[:, None] & element_mask, other=0.0).to(tl.float64)
    tl.store(total + element, tl.sum(sums, axis=0), mask=element < elements)


@triton.jit
def _load_patches(
    x, first, row_mask, row_stride, column_stride, channel_stride,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, FROM: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Load the taps FROM to FROM + TAPS - 1 of the patches at the offsets `first`, as a tile (patches, TAPS).

    `row_mask` states which patches exist. Taps of patches that do not exist are 0, except for the constant tap, which
    is 1 in every patch. Unused taps are 0.
    """
    tap = FROM + tl.arange(0, TAPS)
    row, column, channel = tap // (SIDE * CHANNELS), (tap // CHANNELS) % SIDE, tap % CHANNELS
    offset = row * row_stride + column * column_stride + channel * channel_stride
    used: tl.constexpr = SIDE * SIDE * CHANNELS
    mask = row_mask[:, None] & (tap < used)[None, :]
    value = tl.load(x + (first[:, None] + offset[None, :]), mask=mask, other=0.0)
    return tl.where((tap == used)[None, :], 1.0, value).to(x.dtype.element_ty)


@triton.jit
def _first_patch_of_window(output, height, width, image_stride, row_stride, column_stride, S: tl.constexpr):
    """Return, for each row `output` of y, the offset in x of the top left patch of its window of S × S patches."""
    out_column = output % width
    rest = output // width
    out_row = rest % height
    return (rest // height) * image_stride + out_row * S * row_stride + out_column * S * column_stride


@triton.jit
def _load_kernels(flat_kernels, column, columns, taps, FROM: tl.constexpr, TAPS: tl.constexpr):
    """Load the taps FROM to FROM + TAPS - 1 of kernels (columns, taps), as a transposed tile (TAPS, len(column)).

    `column` are the indices of the kernels to load. Taps and kernels that do not exist are 0.
    """
    tap = FROM + tl.arange(0, TAPS)
    mask = (tap < taps)[:, None] & (column < columns)[None, :]
    return tl.load(flat_kernels + column[None, :] * taps + tap[:, None], mask=mask, other=0.0)


@triton.jit
def _multiply(
    x, first, row_mask, row_stride, column_stride, channel_stride, kernels_main, kernels_rest,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Return the matrix product (patches, columns) of patches and kernels, computed from one or two tiles of taps."""
    patches = _load_patches(x, first, row_mask, row_stride, column_stride, channel_stride, SIDE, CHANNELS, 0, MAIN)
    lifted = tl.dot(patches, kernels_main, input_precision="ieee")
    if REST:
        patches = _load_patches(
            x, first, row_mask, row_stride, column_stride, channel_stride, SIDE, CHANNELS, MAIN, REST
        )
        lifted = tl.dot(patches, kernels_rest, lifted, input_precision="ieee")
    return lifted


@jit
def _lift_kernel(
    x, flat_kernels, y, argmax, scale, shift,
    outputs, columns, height, width, image_stride, row_stride, column_stride, channel_stride, steps,
    NORM: tl.constexpr, SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write tiles of lifted features y.

    If NORM, scale, shift, ReLU and max pooling are applied before y is written. argmax is written unless it is None.
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    kernels_main = _load_kernels(flat_kernels, column, columns, SIDE * SIDE * CHANNELS, 0, MAIN)
    kernels_rest = kernels_main
    if REST:
        kernels_rest = _load_kernels(flat_kernels, column, columns, SIDE * SIDE * CHANNELS, MAIN, REST)
    if NORM:
        column_scale = tl.load(scale + column, mask=column_mask, other=0.0)[None, :]
        column_shift = tl.load(shift + column, mask=column_mask, other=0.0)[None, :]
    for step in range(steps):
        output = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        row_mask = output < outputs
        first = _first_patch_of_window(output, height, width, image_stride, row_stride, column_stride, S)
        offset = output.to(tl.int64)[:, None] * columns + column[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        if NORM:
            maximum = tl.zeros([ROWS, COLUMNS], tl.float32)  # starting at 0 applies ReLU
            position = tl.full([ROWS, COLUMNS], -1, tl.int32)
            for in_window in range(S * S):
                patch = first + in_window // S * row_stride + in_window % S * column_stride
                value = _multiply(
                    x, patch, row_mask, row_stride, column_stride, channel_stride, kernels_main, kernels_rest,
                    SIDE, CHANNELS, MAIN, REST,
                )  # fmt: skip
                value = value * column_scale + column_shift
                position = tl.where(value > maximum, in_window, position)
                maximum = tl.maximum(maximum, value, propagate_nan=tl.PropagateNan.ALL)
            tl.store(y + offset, maximum, mask=mask)
            if argmax is not None:
                tl.store(argmax + offset, position.to(tl.int8), mask=mask)
        else:
            value = _multiply(
                x, first, row_mask, row_stride, column_stride, channel_stride, kernels_main, kernels_rest,
                SIDE, CHANNELS, MAIN, REST,
            )  # fmt: skip
            tl.store(y + offset, value, mask=mask)


@jit
def _sum_products_kernel(
    x, dy, argmax, sums,
    outputs, columns, height, width, image_stride, row_stride, column_stride, channel_stride, steps,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, TAPS: tl.constexpr,
    S: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the sums, over the patches of this program, of the products of all taps with the gradient.

    Without a max pool, the gradient is dy. With a max pool, the gradient is dy at the patches of the maxima, and 0 at
    all other patches. `sums` is (programs, TAPS, C·N).
    """
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = column < columns
    total = tl.zeros([TAPS, COLUMNS], tl.float32)
    for step in range(steps * S * S):  # a step is one position in the windows of a tile; dy is mostly read from a cache
        output = (tl.program_id(0) * steps + step // (S * S)) * ROWS + tl.arange(0, ROWS)
        row_mask = output < outputs
        offset = output.to(tl.int64)[:, None] * columns + column[None, :]
        mask = row_mask[:, None] & column_mask[None, :]
        gradient = tl.load(dy + offset, mask=mask, other=0.0)
        if argmax is not None:
            position = tl.load(argmax + offset, mask=mask, other=-1)
            gradient = tl.where(position == step % (S * S), gradient, 0.0).to(x.dtype.element_ty)
        first = _first_patch_of_window(output, height, width, image_stride, row_stride, column_stride, S)
        first += step % (S * S) // S * row_stride + step % S * column_stride
        patches = _load_patches(x, first, row_mask, row_stride, column_stride, channel_stride, SIDE, CHANNELS, 0, TAPS)
        total = tl.dot(tl.trans(patches), gradient, total, input_precision="ieee")
    tap = tl.program_id(0) * TAPS + tl.arange(0, TAPS)
    tl.store(sums + tap[:, None] * columns + column[None, :], total, mask=column_mask[None, :])


@jit
def _sum_moments_kernel(
    x, moments, patches, height, width, image_stride, row_stride, column_stride, channel_stride, steps,
    SIDE: tl.constexpr, CHANNELS: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the sums, over the patches of this program, of the products of all pairs of taps.

    `moments` is (programs, MAIN + REST, MAIN + REST), and `patches` is the number of patches in the batch. If REST is
    not 0, the matrix of a program has four blocks. Three are computed: MAIN × MAIN, MAIN × REST and REST × REST. The
    fourth, REST × MAIN, is the transpose of MAIN × REST.
    """
    total = tl.zeros([MAIN, MAIN], tl.float32)
    if REST:
        total_mixed = tl.zeros([MAIN, REST], tl.float32)
        total_rest = tl.zeros([REST, REST], tl.float32)
    for step in range(steps):
        patch = (tl.program_id(0) * steps + step) * ROWS + tl.arange(0, ROWS)
        first = _first_patch_of_window(patch, height, width, image_stride, row_stride, column_stride, 1)
        row_mask = patch < patches
        main = _load_patches(x, first, row_mask, row_stride, column_stride, channel_stride, SIDE, CHANNELS, 0, MAIN)
        total = tl.dot(tl.trans(main), main, total, input_precision="ieee")
        if REST:
            rest = _load_patches(
                x, first, row_mask, row_stride, column_stride, channel_stride, SIDE, CHANNELS, MAIN, REST
            )
            total_mixed = tl.dot(tl.trans(main), rest, total_mixed, input_precision="ieee")
            total_rest = tl.dot(tl.trans(rest), rest, total_rest, input_precision="ieee")
    size: tl.constexpr = MAIN + REST
    moments += tl.program_id(0) * size * size
    tap = tl.arange(0, MAIN)
    tl.store(moments + tap[:, None] * size + tap[None, :], total)
    if REST:
        other = MAIN + tl.arange(0, REST)
        tl.store(moments + tap[:, None] * size + other[None, :], total_mixed)
        tl.store(moments + other[None, :] * size + tap[:, None], total_mixed)
        tl.store(moments + other[:, None] * size + other[None, :], total_rest)
