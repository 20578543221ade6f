"""Pixel grids about a centre: angles, the disc that all rotations share, and sizes that survive a rotation.

What may be done to a kernel: N turns, and with reflections as many turns of its mirror image.

Entry i of an orientation axis is Rᵢ, the turn by θᵢ; entry N + i is Rᵢ M, which mirrors left and right first. As
M Rⱼ = R₋ⱼ M, these 2N are a group: the symmetries of a polygon with N corners, the dihedral group.
"""

import math
from numbers import Integral

import torch
from torch import Tensor


def angles(orientations: int) -> list[float]:
    """The angles of the rotations in degrees, θᵢ = 360·i / N.

    >>> rp.group.angles(4)
    [0.0, 90.0, 180.0, 270.0]
    """
    check_orientations(orientations)
    return [360 * i / orientations for i in range(orientations)]


def check_orientations(orientations: int) -> None:
    if not isinstance(orientations, Integral) or orientations < 1:
        raise ValueError(
            f"orientations must be a whole number, 1 or more (1 is an ordinary CNN); got {orientations!r}."
        )


def disc(size: int) -> Tensor:
    """Which positions of a size × size kernel lie on the disc that all rotations share.

    >>> int(rp.group.disc(5).sum())
    21
    """
    if size < 1 or size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and at least 1, so that it has a centre to turn about; got {size}.")
    squared = offsets(size) ** 2
    return squared[:, None] + squared[None, :] <= (size / 2) ** 2


def inscribed_disc(height: int, width: int, inner: float = 1.0) -> Tensor:
    """Weights (height, width) that are 1 on the inscribed disc up to `inner` of its radius and fade to 0 at its rim."""
    y, x = offsets(height), offsets(width)
    radius = torch.sqrt(y[:, None] ** 2 + x[None, :] ** 2) / (min(height, width) / 2)
    if inner == 1:
        return (radius <= 1).to(torch.float64)
    progress = ((radius - inner) / (1 - inner)).clamp(0, 1)
    return (1 + torch.cos(math.pi * progress)) / 2


def covering_size(size: int) -> int:
    """The side of the smallest square with the same centre that holds a square of `size` however that is turned.

    >>> rp.group.covering_size(88)
    126
    """
    reach = math.ceil(math.sqrt(2) * size)
    return reach + (reach - size) % 2


def mirror(index: Tensor, size: int | Tensor) -> Tensor:
    """Indices beyond either end of `size` pixels, reflected about the outermost pixel.

    >>> rp.group.mirror(torch.tensor([-2, -1, 0, 1, 2, 3, 4]), 3).tolist()
    [2, 1, 0, 1, 2, 1, 0]
    """
    period = torch.as_tensor(2 * (size - 1)).clamp(min=1)
    index = index % period
    return torch.minimum(index, period - index)


def windows(size: int, window: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """How many windows lie along `size` pixels, provided that they lie alike from both ends.

    Every layer with a window asks here. A grid of windows that leaves pixels over at one end only is not mapped
    onto itself by a rotation, and a network on it is silently not equivariant; so such sizes are refused.

    >>> rp.group.windows(68, window=5), rp.group.windows(64, window=2, stride=2)
    (64, 32)
    """
    reach = dilation * (window - 1) + 1
    rest = size + 2 * padding - reach
    if rest < 0:
        padded = f" padded by {padding} px" if padding else ""
        least = reach - 2 * padding
        raise ValueError(f"a window of {reach} px does not fit into {size} px{padded}; use at least {least} px.")
    if rest % stride:
        below, above = size - rest % stride, size - rest % stride + stride
        nearest = f"{below} or {above} px" if below > 0 else f"{above} px"
        raise ValueError(
            f"{size} px is off the grid: windows of {reach} px at stride {stride} would leave pixels over at one end "
            f"only, and rotations would not be exact; use {nearest}."
        )
    return rest // stride + 1


def offsets(size: int) -> Tensor:
    """Pixel centres along an axis, measured from its middle."""
    return torch.arange(size, dtype=torch.float64, device="cpu") - (size - 1) / 2


def positions(size: int, radians: float = 0.0) -> tuple[Tensor, Tensor]:
    """Where the entries of a kernel turned by an angle come from: (size²,) to the right, and upwards."""
    x, y = offsets(size).repeat(size), -offsets(size).repeat_interleave(size)
    return math.cos(radians) * x + math.sin(radians) * y, math.cos(radians) * y - math.sin(radians) * x


def order(orientations: int, reflections: bool = False) -> int:
    """How many entries the orientation axis has.

    >>> rp.group.order(8), rp.group.order(8, reflections=True)
    (8, 16)
    """
    check_orientations(orientations)
    return 2 * orientations if reflections else orientations


def products(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """The table of the group, (G, G): which entry is g after h, from Rᵢ Mᵐ Rⱼ Mⁿ = R_{i ± j} Mᵐ⁺ⁿ, minus where m is 1.

    >>> rp.group.products(1, reflections=True).tolist()
    [[0, 1], [1, 0]]
    """
    entries = torch.arange(order(orientations, reflections), device=device)
    turn, mirrored = entries % orientations, entries // orientations
    sign = 1 - 2 * mirrored
    turns = (turn[:, None] + sign[:, None] * turn[None, :]) % orientations
    return turns + orientations * ((mirrored[:, None] + mirrored[None, :]) % 2)


def inverses(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """Which entry undoes which, (G,): the turn back; a mirrored one undoes itself."""
    entries = torch.arange(order(orientations, reflections), device=device)
    return torch.where(entries < orientations, -entries % orientations, entries)


def orientation_shift(orientations: int, device: torch.device | None = None, reflections: bool = False) -> Tensor:
    """The θ part of the shift-twist, (G, G): output entry g reads input h with kernel slice g⁻¹h.

    For turns alone that is (j - i) mod N.
    """
    return products(orientations, reflections, device)[inverses(orientations, reflections, device)]
