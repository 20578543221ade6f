"""Elements of the group of rotations and reflections, and geometry of pixel grids.

SE(2) features (B, C, G, H, W) have an orientation axis with one entry for each of the G elements of the group. Without
reflections, G = N: entry i belongs to Rᵢ, the rotation by θᵢ = 360°·i / N (the cyclic group C(N)). With reflections,
G = 2N: entry N + i belongs to Rᵢ M, which is a left-right flip M followed by the rotation by θᵢ (the dihedral group
D(N), in which M Rⱼ = R₋ⱼ M). Positive angles are counter-clockwise.
"""

import math
from numbers import Integral

import torch
from torch import Tensor

# The group


def angles(orientations: int) -> list[float]:
    """Return the N rotation angles θᵢ = 360·i / N, in degrees.

    >>> rp.group.angles(4)
    [0.0, 90.0, 180.0, 270.0]
    """
    check_orientations(orientations)
    return [360 * i / orientations for i in range(orientations)]


def unit_vector(degrees: float) -> tuple[float, float]:
    """Return the vector (right, up) of length 1 at an angle, in degrees counter-clockwise from the right.

    >>> [round(part, 3) for part in rp.group.unit_vector(120)]
    [-0.5, 0.866]
    """
    return math.cos(math.radians(degrees)), math.sin(math.radians(degrees))


def check_orientations(orientations: int) -> None:
    """Raise ValueError unless the number of orientations N is a whole number of 1 or more."""
    if not isinstance(orientations, Integral) or orientations < 1:
        raise ValueError(
            f"orientations must be a whole number, 1 or more (1 is an ordinary CNN); got {orientations!r}."
        )


def order(orientations: int, reflections: bool = False) -> int:
    """Return the number of group elements G, which is the length of the orientation axis: N, or 2N with reflections.

    >>> rp.group.order(8), rp.group.order(8, reflections=True)
    (8, 16)
    """
    check_orientations(orientations)
    return 2 * orientations if reflections else orientations


def multiplication_table(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """Return the multiplication table (G, G) of the group.

    The number in row g and column h is the index of the product g·h: h is applied first, then g. The products are
    Rᵢ Mᵐ · Rⱼ Mⁿ = R_{i ± j} Mᵐ⁺ⁿ, with the plus sign for m = 0 and the minus sign for m = 1.

    >>> rp.group.multiplication_table(1, reflections=True).tolist()
    [[0, 1], [1, 0]]
    """
    entries = torch.arange(order(orientations, reflections), device=device)
    rotation, reflected = entries % orientations, entries // orientations
    sign = 1 - 2 * reflected
    rotations = (rotation[:, None] + sign[:, None] * rotation[None, :]) % orientations
    return rotations + orientations * ((reflected[:, None] + reflected[None, :]) % 2)


def inverses(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """Return, for each of the G group elements, the index of its inverse. The result is (G,).

    The inverse of a rotation by θ is the rotation by -θ. Every element with a reflection is its own inverse.
    """
    entries = torch.arange(order(orientations, reflections), device=device)
    return torch.where(entries < orientations, -entries % orientations, entries)


def orientation_shift(orientations: int, device: torch.device | None = None, reflections: bool = False) -> Tensor:
    """Return, for each pair of orientations, the index of the slice of weights that a group convolution uses (G, G).

    The learned weights of a group convolution are (output channels, input channels, G, P), with P weights per kernel.
    They have G slices along their third axis. The convolution computes output orientation g from input orientation h
    with the slice of index g⁻¹h. The result contains this index in row g and column h. Without reflections, the index
    is (h - g) mod N.
    """
    table = multiplication_table(orientations, reflections, device)
    return table[inverses(orientations, reflections, device)]


# Pixel grids


def centered_coordinates(size: int) -> Tensor:
    """Return the coordinates (size,), in pixels and float64, of `size` pixel centers along an axis centered at 0."""
    return torch.arange(size, dtype=torch.float64, device="cpu") - (size - 1) / 2


def rotated_coordinates(size: int, radians: float = 0.0) -> tuple[Tensor, Tensor]:
    """Return, for each entry of a rotated kernel of size × size entries, its coordinates in the unrotated kernel.

    The kernel is rotated by `radians`, counter-clockwise. Returns x (size²,) and y (size²,) in pixels from the center
    of the kernel, with x to the right and y upwards. For the angle 0, these are the coordinates of the entries.
    """
    x = centered_coordinates(size).repeat(size)
    y = -centered_coordinates(size).repeat_interleave(size)
    return math.cos(radians) * x + math.sin(radians) * y, math.cos(radians) * y - math.sin(radians) * x


def disc_mask(size: int) -> Tensor:
    """Return a mask (size, size) of the kernel entries whose centers are inside the disc of diameter `size`.

    Kernels have learned weights for these entries only, because other entries leave the kernel at some rotations. P is
    the number of these entries. The center of a kernel of even size is the corner between its four central entries.

    >>> int(rp.group.disc_mask(5).sum())
    21
    """
    if size < 1:
        raise ValueError(f"kernel_size must be at least 1; got {size}.")
    squared = centered_coordinates(size) ** 2
    return squared[:, None] + squared[None, :] <= (size / 2) ** 2


def inscribed_disc(height: int, width: int, inner: float = 1.0) -> Tensor:
    """Return weights (height, width), in float64, that are 1 inside the inscribed disc of an image and 0 outside.

    The inscribed disc is the largest disc around the image center that fits into the image. If the fraction `inner` is
    below 1, weights are 1 up to this fraction of the radius, and then decrease to 0 at the edge of the disc.
    """
    y, x = centered_coordinates(height), centered_coordinates(width)
    radius = torch.sqrt(y[:, None] ** 2 + x[None, :] ** 2) / (min(height, width) / 2)
    if inner == 1:
        return (radius <= 1).to(torch.float64)
    progress = ((radius - inner) / (1 - inner)).clamp(0, 1)
    return (1 + torch.cos(math.pi * progress)) / 2


def covering_size(size: int) -> int:
    """Return the side, in pixels, of the smallest square that contains a square of side `size` after every rotation.

    Both squares have the same center on the pixel grid. The difference of their sides is therefore even.

    >>> rp.group.covering_size(88)
    126
    """
    covering = math.ceil(math.sqrt(2) * size)
    return covering + (covering - size) % 2


def reflect_index(index: Tensor, size: int | Tensor) -> Tensor:
    """Map indices outside the range from 0 to `size` - 1 into this range, by reflection at its first and last index.

    >>> rp.group.reflect_index(torch.tensor([-2, -1, 0, 1, 2, 3, 4]), 3).tolist()
    [2, 1, 0, 1, 2, 1, 0]
    """
    period = torch.as_tensor(2 * (size - 1)).clamp(min=1)
    index = index % period
    return torch.minimum(index, period - index)


def output_size(size: int, window: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """Return the output size, in pixels, of a convolution or pooling layer along one axis of `size` pixels.

    `window` is the side of the kernel or of the pooling window, and `padding` the padding at each end of the axis.
    `dilation` is the distance between neighboring entries of the kernel. All lengths are in pixels.

    Raises ValueError if a window does not fit into the axis, or if the windows do not cover the axis exactly. The layer
    would then ignore the remaining pixels at one end of the axis, and would not be equivariant. The message contains
    sizes that are covered exactly.

    >>> rp.group.output_size(68, window=5), rp.group.output_size(64, window=2, stride=2)
    (64, 32)
    """
    extent = dilation * (window - 1) + 1
    free = size + 2 * padding - extent
    if free < 0:
        padded = f" padded by {padding} px" if padding else ""
        least = extent - 2 * padding
        raise ValueError(
            f"the layer's window of {extent} px does not fit into an input side of {size} px{padded}; use at least "
            f"{least} px."
        )
    if free % stride:
        below, above = size - free % stride, size - free % stride + stride
        nearest = f"{below} or {above} px" if below > 0 else f"{above} px"
        raise ValueError(
            f"windows of {extent} px at stride {stride} do not cover an input side of {size} px exactly, and a layer "
            f"that ignores the remaining pixels is not equivariant; use {nearest}."
        )
    return free // stride + 1
