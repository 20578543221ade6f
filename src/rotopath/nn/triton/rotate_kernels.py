"""Compute the rotated kernels of a convolution on a GPU in one launch.

`rotate` computes convolution kernels from base weights and the rotation map of `rotopath.group`. The kernels are
channels-last and in the data type of the convolution. With small batches, a layer spends most of its time on launching
small operations. The forward pass and the backward pass are therefore one launch each.

Sizes: O output channels, C input channels, N orientations (including the reflected ones, if any), n × n entries of a
kernel, and P base weights (*taps*), from which the entries of a kernel are computed.

Method: the base weights of a group convolution have one *slice* of P taps for each input orientation. For input channel
c, input orientation h, output channel o and output orientation g, the kernel is the product of a matrix and a slice:

    kernels[o·N + g, :, :, c·N + h] = rotation[g] · weight[o, c, slices[g, h]]

The backward pass is the transposed operation, where `sources` is the inverse of `slices`:

    d_weight[o, c, s] = sum over g of rotation[g]ᵀ · d_kernels[o·N + g, :, :, c·N + sources[g, s]]

For lifting, there is one input orientation and one slice: h and s are 0, and c·N is replaced by c.

Arguments of the Triton kernels; all arrays are contiguous:

- `weight`, `d_weight`: base weights (O, C, P) for lifting or (O, C, N, P) for group convolution, and their gradient.
- `columns`: C for lifting, C·N for group convolution. The base weights are read as a matrix (O · columns, P).
- `rotation`: rotation map (N, n², P). It has one matrix from base weights to kernel entries for each orientation.
- `kernels`, `d_kernels`: rotated kernels (O·N, n, n, columns), and their gradient.
- `slices`, `sources`: tables (output orientations, input orientations) of `_orientation_tables`.
- `taps` is P, `entries` is n². OUT_ORIENTATIONS is N, IN_ORIENTATIONS is N, or 1 for lifting.
- TAPS and ENTRIES are `taps` and `entries`, rounded up to the size of a tile. COLUMNS is the number of columns of a
  tile.
"""

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotopath.group import orientation_shift
from rotopath.nn.triton import divide_up, jit, next_power_of_2

COLUMNS = 32  # columns of a tile


class _Sizes(NamedTuple):
    """Sizes of base weights, kernels and tiles."""

    columns: int  # number of input channels times number of input orientations
    taps: int  # number of base weights of a kernel, P
    entries: int  # number of entries of a kernel, n²
    output_orientations: int
    input_orientations: int  # 1 for lifting
    tile_taps: int
    tile_entries: int


def rotate(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
    """Return the rotated kernels of a convolution, in the data type `dtype`, from its base weights.

    For lifting, the base weights are (O, C, P) and the kernels (O·N, C, n, n). For group convolution, the base weights
    are (O, C, N, P) and the kernels (O·N, C·N, n, n). `rotation` is the rotation map (N, n², P).
    """
    kernels: Tensor = RotateKernels.apply(weight, rotation, reflections, dtype)
    return kernels.permute(0, 3, 1, 2)


@torch.library.custom_op("rotopath::rotate_kernels", mutates_args=())
def rotate_in_graph(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
    """Return the result of `rotate`, contiguous. Torch's compiler calls this operator without looking into it."""
    with torch.cuda.device_of(weight):
        return compute(weight, rotation, reflections, dtype).permute(0, 3, 1, 2).contiguous()


@torch.library.custom_op("rotopath::rotate_kernels_back", mutates_args=())
def _rotate_back_in_graph(
    d_kernels: Tensor, rotation: Tensor, reflections: bool, shape: list[int], dtype: torch.dtype
) -> Tensor:
    """Return the gradient of the base weights, which have the given shape and data type, from that of the kernels."""
    with torch.cuda.device_of(d_kernels):
        return compute_gradient(d_kernels.permute(0, 2, 3, 1), rotation, reflections, torch.Size(shape), dtype)


@rotate_in_graph.register_fake
def _(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:  # noqa: ARG001
    sizes = _sizes_of(weight.shape, rotation)
    side = math.isqrt(sizes.entries)
    return weight.new_empty((len(weight) * sizes.output_orientations, sizes.columns, side, side), dtype=dtype)


@_rotate_back_in_graph.register_fake
def _(
    d_kernels: Tensor,
    rotation: Tensor,  # noqa: ARG001
    reflections: bool,  # noqa: ARG001
    shape: list[int],
    dtype: torch.dtype,
) -> Tensor:
    return d_kernels.new_empty(shape, dtype=dtype)


def _save_for_gradients(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:  # noqa: ARG001
    weight, rotation, reflections, _ = inputs
    ctx.save_for_backward(rotation)
    ctx.reflections, ctx.shape, ctx.dtype = reflections, list(weight.shape), weight.dtype


def _compute_gradients(ctx: Any, d_kernels: Tensor) -> tuple[Tensor | None, ...]:
    (rotation,) = ctx.saved_tensors
    return _rotate_back_in_graph(d_kernels, rotation, ctx.reflections, ctx.shape, ctx.dtype), None, None, None


rotate_in_graph.register_autograd(_compute_gradients, setup_context=_save_for_gradients)


class RotateKernels(torch.autograd.Function):
    """Autograd function: rotate base weights with a rotation map (N, n², P) to kernels (O·N, n, n, columns).

    The sizes are those of the module docstring. The last axis of the kernels has one column for each input channel and
    input orientation.
    """

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.shape, ctx.dtype = reflections, weight.shape, weight.dtype
        return compute(weight, rotation, reflections, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_weight = RotateKernelsBackward.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.shape, ctx.dtype)
        return d_weight, None, None, None


class RotateKernelsBackward(torch.autograd.Function):
    """Autograd function: compute the gradient of the base weights from the gradient of the kernels.

    It applies the transposed rotation map. Its own backward pass therefore applies the rotation map: `RotateKernels`.
    """

    @staticmethod
    def forward(
        ctx: Any, d_kernels: Tensor, rotation: Tensor, reflections: bool, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.dtype = reflections, d_kernels.dtype
        return compute_gradient(d_kernels, rotation, reflections, shape, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return RotateKernels.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.dtype), None, None, None, None


def compute(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
    """Return the kernels (O·N, n, n, columns) in the data type `dtype`."""
    sizes = _sizes_of(weight.shape, rotation)
    slices, _ = _orientation_tables(sizes.output_orientations, sizes.input_orientations, reflections, rotation.device)
    side = math.isqrt(sizes.entries)
    outputs = len(weight) * sizes.output_orientations
    kernels = torch.empty(outputs, side, side, sizes.columns, device=weight.device, dtype=dtype)
    _rotate_kernel[outputs, divide_up(sizes.columns, COLUMNS)](
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


def compute_gradient(
    d_kernels: Tensor, rotation: Tensor, reflections: bool, shape: torch.Size, dtype: torch.dtype
) -> Tensor:
    """Return the gradient of base weights of a shape and data type from that of the kernels (O·N, n, n, columns)."""
    sizes = _sizes_of(shape, rotation)
    _, sources = _orientation_tables(sizes.output_orientations, sizes.input_orientations, reflections, rotation.device)
    d_weight = torch.empty(shape, device=d_kernels.device, dtype=dtype)
    _rotate_back_kernel[len(d_weight), divide_up(sizes.columns, COLUMNS)](
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


def _sizes_of(shape: torch.Size, rotation: Tensor) -> _Sizes:
    """Return the sizes for base weights of this shape and a rotation map (N, n², P) to kernels of n × n entries."""
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
    """Return the tables `slices` and `sources`, both (output orientations, input orientations).

    To compute output orientation g, slice `slices[g, h]` of the base weights is applied to input orientation h.
    `sources[g, s]` is the inverse: the input orientation to which slice s is applied. The numbers of orientations
    include the reflected ones.
    """
    with torch.inference_mode(False):
        # Computed on the CPU, because values computed while a CUDA graph is recorded exist only after it is replayed.
        orientations = output_orientations // 2 if reflections else output_orientations
        shift = orientation_shift(orientations, torch.device("cpu"), reflections)
        slices = (shift[:, :input_orientations] % input_orientations).int()
        return slices.to(device), slices.argsort(dim=1).int().to(device)


def _tile_size(size: int) -> int:
    return max(16, next_power_of_2(size))  # tl.dot requires at least 16


@triton.jit
def _load_map(rotation, orientation, taps, entries, TAPS: tl.constexpr, ENTRIES: tl.constexpr):
    """Load the rotation map of one orientation as a tile (ENTRIES, TAPS)."""
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    mask = (entry < entries)[:, None] & (tap < taps)[None, :]
    offset = (orientation * entries + entry)[:, None] * taps + tap[None, :]
    return tl.load(rotation + offset, mask=mask, other=0.0).to(tl.float32)


@jit
def _rotate_kernel(
    weight, rotation, slices, kernels, columns, taps, entries,
    OUT_ORIENTATIONS: tl.constexpr, IN_ORIENTATIONS: tl.constexpr,
    TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the rotated kernels of one output channel o and one output orientation g, for a tile of columns.

    `output` is o·N + g, and `column` is c·N + h. `row` is the row of the matrix of base weights that contains slice
    `slices[g, h]` of input channel c and output channel o.
    """
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


@jit
def _rotate_back_kernel(
    d_kernels, rotation, sources, d_weight, columns, taps, entries,
    OUT_ORIENTATIONS: tl.constexpr, IN_ORIENTATIONS: tl.constexpr,
    TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the base weights of one output channel, summed over all output orientations.

    `row` is c·N + s, for slice s of input channel c. `column` is c·N + sources[g, s].
    """
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
