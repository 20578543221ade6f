"""Families of kernels: what the entries of a kernel turned by an angle read from its base weights.

In: an odd size and an angle in radians. Out: a matrix (size², P) in float64, with P the number of positions on the
disc, so that every family has the same number of weights.
"""

import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rotopath.group.grid import disc, offsets, positions
from rotopath.group.harmonics import harmonics

Kernel = Literal["bilinear", "gaussian", "harmonic"]
GAUSSIAN_PX = 0.6  # narrower ones fall between pixels, wider ones can hardly be told apart


def read_bilinear(size: int, radians: float) -> Tensor:
    """Interpolation between four neighbours, as in the paper; base weights are the kernel at 0°."""
    mask = disc(size).flatten()
    x, y = positions(size, radians)
    reads = _hats(-y, offsets(size))[:, :, None] * _hats(x, offsets(size))[:, None, :]  # (size², size, size)
    return reads.flatten(1)[:, mask] * mask[:, None]


def read_gaussian(size: int, radians: float) -> Tensor:
    """A Gaussian about each position of the disc, read where the turned disc lies; as loud as bilinear at 0°."""
    mask = disc(size).flatten()
    centre_x, centre_y = (axis[mask] for axis in positions(size))

    def read(radians: float) -> Tensor:
        x, y = positions(size, radians)
        squared = (x[:, None] - centre_x) ** 2 + (y[:, None] - centre_y) ** 2  # (size², P)
        return torch.exp(-squared / (2 * GAUSSIAN_PX**2)) * mask[:, None]

    return read(radians) * (math.sqrt(len(centre_x)) / float(read(0.0).norm()))


def read_harmonic(size: int, radians: float) -> Tensor:
    """Circular harmonics, which a turn multiplies by exp(-imθ), each as its real and its imaginary part.

    So a turn is an orthogonal map of the base weights, and every angle has the same gain.
    """
    modes, frequencies = harmonics(size)
    turned = modes * torch.polar(torch.ones_like(frequencies), -frequencies * radians)
    pairs = math.sqrt(2) * turned[:, frequencies > 0]
    return torch.cat([turned[:, frequencies == 0].real, pairs.real, pairs.imag], dim=1)


FAMILIES: dict[str, Callable[[int, float], Tensor]] = {
    "bilinear": read_bilinear,
    "gaussian": read_gaussian,
    "harmonic": read_harmonic,
}
KERNELS = get_args(Kernel)


def _hats(places: Tensor, grid: Tensor) -> Tensor:
    """Linear interpolation weights, (places, grid)."""
    distance = (places[:, None] - grid[None, :]).abs()
    # Rotated grid points that meet grid points do so to 1e-15 only; a snap keeps that dust out of the map.
    nearest = distance.round()
    distance = torch.where((distance - nearest).abs() < 1e-9, nearest, distance)
    return (1 - distance).clamp(min=0)
