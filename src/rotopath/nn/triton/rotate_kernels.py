"""Rotate base weights to kernels on a GPU, in one pass each way.

In: base weights and the rotation map of `rotopath.group`. Out: kernels as a convolution reads them, channels-last and
in its data type. With small batches, launching many small operations takes most of the time; this is one launch.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotopath.group import orientation_shift

COLUMNS = 32  # of a tile: input channels by input orientations


class _Sizes(NamedTuple):
    """Sizes of base weights, kernels and tiles."""

    columns: int  # input channels by input orientations
    taps: int  # base weights of a kernel
    entries: int  # pixels of a kernel
    output_orientations: int
    input_orientations: int  # 1 for lifting
    tile_taps: int
    tile_entries: int


def rotate(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
    """Rotate base weights (O, C, P) or (O, C, N, P) to kernels (O·N, C, n, n) or (O·N, C·N, n, n)."""
    kernels: Tensor = RotateKernels.apply(weight, rotation, reflections, dtype)
    return kernels.permute(0, 3, 1, 2)


class RotateKernels(torch.autograd.Function):
    """Rotated kernels (O·N, n, n, C·N) of base weights, by a map (N, n², P)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.shape, ctx.dtype = reflections, weight.shape, weight.dtype
        sizes = _sizes_of(weight.shape, rotation)
        slices, _ = _orientation_tables(
            sizes.output_orientations, sizes.input_orientations, reflections, rotation.device
        )
        side = math.isqrt(sizes.entries)
        outputs = len(weight) * sizes.output_orientations
        kernels = torch.empty(outputs, side, side, sizes.columns, device=weight.device, dtype=dtype)
        _rotate_kernel[outputs, triton.cdiv(sizes.columns, COLUMNS)](
            weight=weight.contiguous(),
            rotation=rotation,
            slices=slices,
            kernels=kernels,
            columns=sizes.columns,
            taps=sizes.taps,
            entries=sizes.entries,
            OUT_ORIENTATIONS=sizes.output_orientations,
            IN_ORIENTATIONS=sizes.input_orientations,
            TAPS=sizes.tile_taps,
            ENTRIES=sizes.tile_entries,
            COLUMNS=COLUMNS,
        )
        return kernels

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_weight = RotateKernelsBackward.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.shape, ctx.dtype)
        return d_weight, None, None, None


class RotateKernelsBackward(torch.autograd.Function):
    """Gradients of base weights from gradients of kernels: the transposed map, whose own gradient is the map again."""

    @staticmethod
    def forward(
        ctx: Any, d_kernels: Tensor, rotation: Tensor, reflections: bool, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.dtype = reflections, d_kernels.dtype
        sizes = _sizes_of(shape, rotation)
        _, sources = _orientation_tables(
            sizes.output_orientations, sizes.input_orientations, reflections, rotation.device
        )
        d_weight = torch.empty(shape, device=d_kernels.device, dtype=dtype)
        _rotate_back_kernel[len(d_weight), triton.cdiv(sizes.columns, COLUMNS)](
            d_kernels=d_kernels.contiguous(),
            rotation=rotation,
            sources=sources,
            d_weight=d_weight,
            columns=sizes.columns,
            taps=sizes.taps,
            entries=sizes.entries,
            OUT_ORIENTATIONS=sizes.output_orientations,
            IN_ORIENTATIONS=sizes.input_orientations,
            TAPS=sizes.tile_taps,
            ENTRIES=sizes.tile_entries,
            COLUMNS=COLUMNS,
        )
        return d_weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return RotateKernels.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.dtype), None, None, None, None


def _sizes_of(shape: torch.Size, rotation: Tensor) -> _Sizes:
    """Return the sizes for base weights of a shape and a rotation map (N, n², P)."""
    orientations, entries, taps = rotation.shape
    return _Sizes(
        columns=math.prod(shape[1:-1]),
        taps=taps,
        entries=entries,
        output_orientations=orientations,
        input_orientations=orientations if len(shape) == 4 else 1,
        tile_taps=_tile_size(taps),
        tile_entries=_tile_size(entries),
    )


@cache
def _orientation_tables(
    output_orientations: int, input_orientations: int, reflections: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return two tables (output orientations, input orientations).

    The first contains the slice of the base weights with which an output orientation reads each input orientation. The
    second is its inverse: the input orientation that it reads with each slice.
    """
    with torch.inference_mode(False):
        # Computed on the CPU: inside a CUDA graph that is being recorded, values would exist only after a replay.
        orientations = output_orientations // 2 if reflections else output_orientations
        shift = orientation_shift(orientations, torch.device("cpu"), reflections)
        slices = (shift[:, :input_orientations] % input_orientations).int()
        return slices.to(device), slices.argsort(dim=1).int().to(device)


def _tile_size(size: int) -> int:
    return max(16, int(triton.next_power_of_2(size)))  # tl.dot requires at least 16


@triton.jit
def _load_map(rotation, orientation, taps, entries, TAPS: tl.constexpr, ENTRIES: tl.constexpr):
    """Load the rotation map (entries, taps) of one orientation."""
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    mask = (entry < entries)[:, None] & (tap < taps)[None, :]
    offset = (orientation * entries + entry)[:, None] * taps + tap[None, :]
    return tl.load(rotation + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _rotate_kernel(
    weight, rotation, slices, kernels, columns, taps, entries,
    OUT_ORIENTATIONS: tl.constexpr, IN_ORIENTATIONS: tl.constexpr,
    TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rotate the kernels of one output channel at one output orientation, for a tile of columns."""
    output = tl.program_id(0)
    orientation = output % OUT_ORIENTATIONS
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = (column < columns)[None, :]
    slice_ = tl.load(slices + orientation * IN_ORIENTATIONS + column % IN_ORIENTATIONS)
    row = output // OUT_ORIENTATIONS * columns + column - column % IN_ORIENTATIONS + slice_
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    base = tl.load(weight + row[None, :] * taps + tap[:, None], mask=(tap < taps)[:, None] & column_mask, other=0.0)
    rotation_map = _load_map(rotation, orientation, taps, entries, TAPS, ENTRIES)
    rotated = tl.dot(rotation_map, base.to(tl.float32), input_precision="ieee")
    offset = (output * entries + entry)[:, None] * columns + column[None, :]
    tl.store(kernels + offset, rotated, mask=(entry < entries)[:, None] & column_mask)


@triton.jit
def _rotate_back_kernel(
    d_kernels, rotation, sources, d_weight, columns, taps, entries,
    OUT_ORIENTATIONS: tl.constexpr, IN_ORIENTATIONS: tl.constexpr,
    TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Sum the gradients of the base weights of one output channel over all output orientations."""
    channel = tl.program_id(0)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_mask = row < columns
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    total = tl.zeros([COLUMNS, TAPS], tl.float32)
    for orientation in range(OUT_ORIENTATIONS):
        source = tl.load(sources + orientation * IN_ORIENTATIONS + row % IN_ORIENTATIONS)
        column = row - row % IN_ORIENTATIONS + source
        offset = ((channel * OUT_ORIENTATIONS + orientation) * entries + entry)[None, :] * columns + column[:, None]
        gradient = tl.load(d_kernels + offset, mask=row_mask[:, None] & (entry < entries)[None, :], other=0.0)
        rotation_map = _load_map(rotation, orientation, taps, entries, TAPS, ENTRIES)
        total = tl.dot(gradient.to(tl.float32), rotation_map, total, input_precision="ieee")
    offset = (channel * columns + row)[:, None] * taps + tap[None, :]
    tl.store(d_weight + offset, total, mask=row_mask[:, None] & (tap < taps)[None, :])
