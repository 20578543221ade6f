"""Base weights to rotated kernels, and back to their gradients, in one pass each way, in Triton.

In: base weights, and the map of `group` that turns them. Out: kernels as a convolution reads them, channels last and in
its precision. Batches are small where many networks are trained, and then many small operations are what takes time.
"""

import math
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from rotopath.group import orientation_shift

COLUMNS = 32  # of a tile: input channels by their orientations


@triton.jit
def _load_map(rotation, orientation, taps, entries, TAPS: tl.constexpr, ENTRIES: tl.constexpr):
    """What the entries of a kernel at this orientation read from the base weights."""
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    inside = (entry < entries)[:, None] & (tap < taps)[None, :]
    place = (orientation * entries + entry)[:, None] * taps + tap[None, :]
    return tl.load(rotation + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _turn(
    weight, rotation, slices, kernels, columns, taps, entries,
    ORDER: tl.constexpr, READ: tl.constexpr, TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The kernels of one output channel at one orientation, for a tile of what they read."""
    output = tl.program_id(0)
    orientation = output % ORDER
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (column < columns)[None, :]
    slice_ = tl.load(slices + orientation * READ + column % READ)
    row = output // ORDER * columns + column - column % READ + slice_
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    base = tl.load(weight + row[None, :] * taps + tap[:, None], mask=(tap < taps)[:, None] & inside, other=0.0)
    turns = _load_map(rotation, orientation, taps, entries, TAPS, ENTRIES)
    turned = tl.dot(turns, base.to(tl.float32), input_precision="ieee")
    place = (output * entries + entry)[:, None] * columns + column[None, :]
    tl.store(kernels + place, turned, mask=(entry < entries)[:, None] & inside)


@triton.jit
def _turn_back(
    d_kernels, rotation, places, d_weight, columns, taps, entries,
    ORDER: tl.constexpr, READ: tl.constexpr, TAPS: tl.constexpr, ENTRIES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The gradients of the base weights of one output channel: what all orientations have made of them."""
    channel = tl.program_id(0)
    row = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = row < columns
    tap, entry = tl.arange(0, TAPS), tl.arange(0, ENTRIES)
    total = tl.zeros([COLUMNS, TAPS], tl.float32)
    for orientation in range(ORDER):
        column = row - row % READ + tl.load(places + orientation * READ + row % READ)
        place = ((channel * ORDER + orientation) * entries + entry)[None, :] * columns + column[:, None]
        gradient = tl.load(d_kernels + place, mask=inside[:, None] & (entry < entries)[None, :], other=0.0)
        turns = _load_map(rotation, orientation, taps, entries, TAPS, ENTRIES)
        total = tl.dot(gradient.to(tl.float32), turns, total, input_precision="ieee")
    place = (channel * columns + row)[:, None] * taps + tap[None, :]
    tl.store(d_weight + place, total, mask=inside[:, None] & (tap < taps)[None, :])


def rotate(weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
    """Base weights (O, C, P) or (O, C, N, P) to the weights (O·N, C, n, n) or (O·N, C·N, n, n) of a convolution."""
    kernels: Tensor = RotateKernels.apply(weight, rotation, reflections, dtype)
    return kernels.permute(0, 3, 1, 2)


class RotateKernels(torch.autograd.Function):
    """Rotated kernels (O·N, n, n, C·N) of base weights, by a map (N, n², P)."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rotation: Tensor, reflections: bool, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.shape, ctx.dtype = reflections, weight.shape, weight.dtype
        order, entries, _ = rotation.shape
        (slices, _), sizes = _prepare(weight.shape, rotation, reflections)
        columns, side = sizes[0], math.isqrt(entries)
        kernels = torch.empty(len(weight) * order, side, side, columns, device=weight.device, dtype=dtype)
        _turn[len(kernels), triton.cdiv(columns, COLUMNS)](weight.contiguous(), rotation, slices, kernels, *sizes)
        return kernels

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        d_weight = RotateKernelsBackward.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.shape, ctx.dtype)
        return d_weight, None, None, None


class RotateKernelsBackward(torch.autograd.Function):
    """The gradients of base weights, from those of kernels: the same map the other way, of which it is the gradient."""

    @staticmethod
    def forward(
        ctx: Any, d_kernels: Tensor, rotation: Tensor, reflections: bool, shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(rotation)
        ctx.reflections, ctx.dtype = reflections, d_kernels.dtype
        (_, places), sizes = _prepare(shape, rotation, reflections)
        d_weight = torch.empty(shape, device=d_kernels.device, dtype=dtype)
        _turn_back[len(d_weight), triton.cdiv(sizes[0], COLUMNS)](
            d_kernels.contiguous(), rotation, places, d_weight, *sizes
        )
        return d_weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return RotateKernels.apply(gradients[0], *ctx.saved_tensors, ctx.reflections, ctx.dtype), None, None, None, None


def _prepare(shape: torch.Size, rotation: Tensor, reflections: bool) -> tuple[tuple[Tensor, Tensor], tuple[int, ...]]:
    """Tables for base weights of a shape; and sizes: columns, taps, entries, orientations, those read, and tiles."""
    order, entries, taps = rotation.shape
    read = order if len(shape) == 4 else 1
    sizes = (math.prod(shape[1:-1]), taps, entries, order, read, _tile(taps), _tile(entries), COLUMNS)
    return _find_tables(order, read, reflections, rotation.device), sizes


@cache
def _find_tables(order: int, read: int, reflections: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which slice of the base weights each orientation reads its inputs with; and with which input it reads each."""
    with torch.inference_mode(False):
        # On the CPU first: inside a graph that is being recorded they would be numbers only once it is replayed.
        shift = orientation_shift(order // 2 if reflections else order, torch.device("cpu"), reflections)
        slices = (shift[:, :read] % read).int()
        return slices.to(device), slices.argsort(dim=1).int().to(device)


def _tile(numbers: int) -> int:
    return max(16, int(triton.next_power_of_2(numbers)))  # products of matrices have 16 terms at least
