"""Rotate and flip images and features, and analyze features along their orientation axis.

Positive angles are counter-clockwise on the screen. Rotations by multiples of 90° move pixels without interpolation,
and are exact. Rotations by other angles interpolate. Features are (B, C, G, H, W), with G = N orientations, or G = 2N
with reflections. `fourier_map` and `interpolate_peak` treat the N values along the orientation axis as samples of a
function of the angle θ.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from rotopath.group.grid import centered_coordinates, check_orientations, reflect_index

SPLINE_REACH = 4  # pixels farther away contribute only about 1 % to a value that splines interpolate

# Rotate all images of a batch by the same angle


def rotate(x: Tensor, angle: float) -> Tensor:
    """Rotate images (..., H, W) about their center by an angle in degrees, counter-clockwise.

    Multiples of 90° are exact; odd multiples swap H and W. Other angles keep the size, and interpolate with cubic
    splines. Pixels of the result that come from outside the image are 0.
    """
    if angle % 90 == 0:
        return torch.rot90(x, int(angle // 90) % 4, (-2, -1))
    return _rotate_by_splines(x, math.radians(angle))


def rotate_reflected(x: Tensor, angle: float) -> Tensor:
    """Rotate images (..., H, W) as `rotate` does, but fill the corners by reflection at the edges of the images.

    The rotation by the angle modulo 90° interpolates; the remaining multiple of 90° is exact. The rotations of a
    rotated image by 0°, 90°, 180° and 270° therefore have the same pixels, at other positions.
    """
    between = angle % 90
    if between:
        height, width = x.shape[-2:]
        reach = math.ceil((math.hypot(height, width) - min(height, width)) / 2) + SPLINE_REACH
        rows, columns = (
            reflect_index(torch.arange(-reach, size + reach, device=x.device), size) for size in (height, width)
        )
        x = _rotate_by_splines(x[..., rows[:, None], columns], math.radians(between))
        x = x[..., reach:-reach, reach:-reach]
    return rotate(x, angle - between)


def rotate_features(x: Tensor, angle: float, reflections: bool = False) -> Tensor:
    """Rotate SE(2) features (B, C, N, H, W): rotate each map, and shift the orientation axis.

    The angle is in degrees, counter-clockwise, and must be a multiple of 360° / N; other angles raise ValueError. With
    `reflections`, features are (B, C, 2N, H, W), and each half of the orientation axis (without and with reflection) is
    shifted.
    """
    halves = _split_halves(x, reflections)  # (B, C, 1 or 2, N, H, W)
    orientations = halves.shape[3]
    steps = angle * orientations / 360
    if abs(steps - round(steps)) > 1e-9:
        raise ValueError(
            f"Features with {orientations} orientations rotate in steps of {360 / orientations:g}°, but got "
            f"{angle:g}°; use a multiple of {360 / orientations:g}°. To measure the equivariance at other angles, use "
            f"a network whose outputs are maps (B, C, H, W), such as a network that ends with `Project`."
        )
    return rotate(halves, angle).roll(round(steps), dims=3).flatten(2, 3)


def equals_its_rotation(kernels: Tensor) -> bool:
    """Return whether kernels (..., n, n) equal their rotation by 90°, up to rounding errors.

    >>> rp.group.equals_its_rotation(torch.ones(3, 3)), rp.group.equals_its_rotation(torch.eye(3))
    (True, False)
    """
    return torch.allclose(kernels, kernels.rot90(1, (-2, -1)), atol=1e-6)


def flip(x: Tensor) -> Tensor:
    """Flip images (..., H, W) left to right."""
    return x.flip(-1)


def flip_features(x: Tensor) -> Tensor:
    """Flip features with reflections (B, C, 2N, H, W) left to right: flip each map, and permute the orientation axis.

    Orientation i becomes -i modulo N, and the two halves of the orientation axis (without and with reflection) are
    swapped.
    """
    halves = _split_halves(flip(x), reflections=True)
    negated = halves.flip(3).roll(1, dims=3)  # the new entry i is the old entry -i
    return negated.flip(2).flatten(2, 3)


def _split_halves(x: Tensor, reflections: bool) -> Tensor:
    """Split the orientation axis of features (B, C, G, H, W). The result is (B, C, 2, N, H, W) or (B, C, 1, N, H, W).

    With `reflections`, the new axis of length 2 has the orientations without and with reflection. Otherwise, the new
    axis has length 1.
    """
    if reflections and x.shape[2] % 2:
        raise ValueError(
            f"Features with reflections have an even number of entries along the orientation axis, but got "
            f"{x.shape[2]} entries; build all layers with reflections=True."
        )
    return torch.unflatten(x, 2, (2 if reflections else 1, -1))


def _rotate_by_splines(x: Tensor, radians: float) -> Tensor:
    """Rotate images (..., H, W) by `radians` with cubic spline interpolation, which is accurate for smooth images."""
    height, width = x.shape[-2:]
    device = x.device if x.is_cuda else torch.device("cpu")  # coordinates need float64, which MPS does not have
    right = centered_coordinates(width).repeat(height).to(device)
    up = -centered_coordinates(height).repeat_interleave(width).to(device)
    # Each pixel of the result is interpolated at its coordinates in x, which are rotated in the opposite direction.
    columns = math.cos(radians) * right + math.sin(radians) * up + (width - 1) / 2
    rows = math.sin(radians) * right - math.cos(radians) * up + (height - 1) / 2
    inside = (rows >= -0.5) & (rows <= height - 0.5) & (columns >= -0.5) & (columns <= width - 0.5)

    maps = x.reshape(-1, height, width).to(torch.promote_types(x.dtype, torch.float32))
    coefficients = _spline_filter(height).to(maps) @ maps @ _spline_filter(width).T.to(maps)
    rotated = torch.zeros_like(maps).flatten(1)  # (maps, H·W)
    column_taps = _spline_taps(columns, width)
    for row, row_weight in _spline_taps(rows, height):
        for column, column_weight in column_taps:
            values = coefficients.flatten(1)[:, (row * width + column).to(x.device)]
            rotated += values * (row_weight * column_weight * inside).to(maps)
    return rotated.reshape(x.shape).to(x.dtype)


def _spline_taps(coordinates: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """Return four pairs (indices, weights) for the values of a cubic spline at `coordinates`.

    A value of the spline is the sum, over the four pairs, of the weight times the spline coefficient at the index.
    `coordinates` are along an axis of `size` samples. Indices and weights have the shape of `coordinates`.
    """
    t = coordinates - coordinates.floor()
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 1 + 3 * t * (1 + t - t**2), t**3)
    first = coordinates.floor().long() - 1
    return [(reflect_index(first + i, size), weight / 6) for i, weight in enumerate(weights)]


@lru_cache(maxsize=8)  # computing the inverse is slow, and images of one size are often rotated many times
def _spline_filter(size: int) -> Tensor:
    """Return the matrix (size, size) that converts samples to the coefficients of the cubic spline through them."""
    with torch.inference_mode(False):  # training may use the cached matrix later, and cannot use inference tensors
        samples = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        index = torch.arange(size, device="cpu")
        for step, weight in ((-1, 1 / 6), (0, 4 / 6), (1, 1 / 6)):
            samples[index, reflect_index(index + step, size)] += weight
        coefficients: Tensor = torch.linalg.inv(samples)
        return coefficients


# Rotate each image of a batch by its own angle, for augmentation


def apply_symmetries(x: Tensor, symmetries: Tensor) -> Tensor:
    """Apply to each image of a batch (B, C, H, H) one of the eight symmetries of a square.

    `symmetries` (B,) has a number s from 0 to 7 for each image. If s ≥ 4, rows and columns of the image are swapped.
    Then the image is rotated counter-clockwise by 90° · (s mod 4).
    """
    size = x.shape[-1]
    if x.shape[-2] != size:
        raise ValueError(
            f"Only squares have all eight symmetries; got images of {x.shape[-2]} × {size} px. Crop the images to "
            f"squares."
        )
    sources = _symmetry_sources(size, x.device)[symmetries]  # (B, H·H)
    # All channels of a pixel are read together. The result is channels-last in memory, for fast convolutions.
    pixels = x.permute(0, 2, 3, 1).reshape(x.shape[0], size * size, -1)  # (B, H·H, C)
    moved = pixels.gather(1, sources[:, :, None].expand_as(pixels))
    return moved.reshape(x.shape[0], size, size, -1).permute(0, 3, 1, 2)


@lru_cache(maxsize=8)
def _symmetry_sources(size: int, device: torch.device) -> Tensor:
    """Return the pixel indices (8, size²) with which `apply_symmetries` transforms images of size × size px.

    Row s contains, for each pixel of the transformed image, the index of the pixel that is copied to it from the image.
    The pixel in row y and column x of an image has the index y · size + x.
    """
    grid = torch.arange(size * size, device=device).view(size, size)
    rotated = [torch.rot90(square, quarters, (0, 1)) for square in (grid, grid.T) for quarters in range(4)]
    return torch.stack(rotated).flatten(1)


def rotate_each(x: Tensor, degrees: Tensor, nearest: bool = False) -> Tensor:
    """Rotate each image of a batch (B, C, H, W) by its own angle in `degrees` (B,), counter-clockwise.

    The interpolation is bilinear. If `nearest` is True, it is nearest-neighbor, as needed for maps of class numbers.
    Pixels of the result that come from outside the image are filled by reflection at the image border.
    """
    return warp_each(x, degrees, nearest=nearest)


def warp_each(
    x: Tensor, degrees: Tensor, scales: Tensor | None = None, shifts: Tensor | None = None, nearest: bool = False
) -> Tensor:
    """Rotate, enlarge and deform each image of a batch (B, C, H, W) in a single interpolation.

    An image is first deformed: a pixel at position p of the result comes from p plus the shift at p. `shifts`
    (B, 2, H, W) are in px, downwards and to the right; None means no deformation. The image is then enlarged by its
    factor in `scales` (B,), and rotated by its angle in `degrees` (B,) counter-clockwise, both around its center.
    `nearest` and the border are as in `rotate_each`.
    """
    angles = torch.deg2rad(degrees.to(torch.float32))
    cosine, sine, zero = angles.cos(), angles.sin(), torch.zeros_like(angles)
    if scales is not None:
        cosine, sine = cosine / scales, sine / scales
    height, width = x.shape[-2:]
    # `affine_grid` expects coordinates (x, y) from -1 to 1 along both sides of the image, with y downwards.
    rows = ((cosine, -sine * height / width, zero), (sine * width / height, cosine, zero))
    theta = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)  # (B, 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    if shifts is not None:
        grid = grid + shifts.flip(1).permute(0, 2, 3, 1) * (2 / grid.new_tensor([width, height]))
    values = x if x.is_floating_point() else x.to(torch.float32)
    mode = "nearest" if nearest else "bilinear"
    rotated = functional.grid_sample(values, grid, mode=mode, padding_mode="reflection", align_corners=False)
    return rotated if x.is_floating_point() else rotated.round().to(x.dtype)


# Functions on the circle of orientations


def count_frequencies(orientations: int) -> int:
    """Return the number of Fourier frequencies along the orientation axis that layers use: ⌊N/4⌋.

    The frequencies are k = 1 … ⌊N/4⌋, which have four or more samples per period. Higher frequencies are not used,
    because their amplitudes change more if an image is rotated by an angle between two of the N rotations.
    """
    check_orientations(orientations)
    return orientations // 4


def fourier_map(orientations: int, reflections: bool = False) -> Tensor:
    """Return the linear map (G, P, K), in float64, from an orientation axis to Fourier components of K frequencies.

    The frequencies are k = 1 … K, where K is `count_frequencies(orientations)`. Each frequency has P = 2 components:
    cosine and sine. With reflections, it has P = 4 components: cosine and sine for each half of the axis.

    The sum of the squared components over P is the squared amplitude. For example, it is a² for values a·cos(kθ - φ).
    A rotation of the features shifts the values along the axis, and does not change this sum. With reflections, the sum
    is the mean of the squared amplitudes of both halves, so that flips do not change the sum either.

    >>> values = 3 * torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> components = torch.einsum("g,gpk->pk", values.double(), rp.group.fourier_map(8))
    >>> [round(float(amplitude), 4) for amplitude in components.square().sum(0).sqrt()]
    [3.0, 0.0]
    """
    steps = torch.arange(orientations, device="cpu")
    frequencies = torch.arange(1, count_frequencies(orientations) + 1, device="cpu")
    # Steps are reduced modulo N first, so that equal angles have exactly equal cosines.
    angles = 2 * math.pi / orientations * (steps[:, None] * frequencies % orientations).double()  # (N, K)
    components = torch.stack([angles.cos(), angles.sin()], dim=1) * (2 / orientations)  # (N, 2, K)
    if not reflections:
        return components
    # Axes: entry of the orientation axis, half of this axis, cosine and sine, frequency.
    both = components.new_zeros(2 * orientations, 2, 2, len(frequencies))
    both[:orientations, 0] = both[orientations:, 1] = components / math.sqrt(2)
    return both.flatten(1, 2)


def interpolate_peak(values: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest of `values` (..., G) along the orientation axis, and its angle, both of shape (...).

    The angle is in radians from 0 to 2π, and is interpolated: at this angle, the wave b + a·cos(θ - φ) through the
    largest value and its two neighbors has its maximum. With fewer than three orientations, the angle is that of the
    largest value, without interpolation. If all values are equal, the angle is 0. With reflections, only the half of
    the orientation axis that contains the largest value is used. The returned value is not interpolated.

    >>> values = 1 + torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> round(float(rp.group.interpolate_peak(values)[1]), 4)
    0.7
    """
    halves = torch.unflatten(values, -1, (2 if reflections else 1, -1))  # (..., 1 or 2, N)
    orientations = halves.shape[-1]
    step = 2 * math.pi / orientations
    maxima, index = halves.max(dim=-1, keepdim=True)  # (..., 1 or 2, 1)
    angles = index.to(values) * step  # `to` gives angles the dtype of the values, such as bfloat16
    if orientations > 2:
        before, after = (halves.gather(-1, (index + by) % orientations) for by in (-1, 1))
        sine_part = (after - before) / (2 * math.sin(step))
        cosine_part = (2 * maxima - before - after) / (2 - 2 * math.cos(step))
        angles = angles + torch.atan2(sine_part, cosine_part)
    higher = maxima.argmax(dim=-2, keepdim=True)
    angle = angles.gather(-2, higher)[..., 0, 0] % (2 * math.pi)
    largest = values.amax(dim=-1)  # amax, because it divides the gradient equally among equal values, unlike max
    return largest, torch.where(largest > values.amin(dim=-1), angle, torch.zeros_like(angle))


# Lines


def line_angle(kernel: Tensor) -> Tensor:
    """Return the angles (...), in radians, of the lines and edges that kernels (..., C, S, S) detect.

    Angles are counter-clockwise from vertical. They are between -π/2 and π/2, because a line rotated by π is the same
    line. The angle is half the argument of the complex sum of (∂ₓk + i ∂ᵧk)² over channels and entries of the kernel k.

    >>> bar = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> [round(float(rp.group.line_angle(kernel).rad2deg())) for kernel in (bar, bar.mT, torch.eye(3)[None])]
    [0, 90, 45]
    """
    padded = functional.pad(kernel, (1, 1, 1, 1))
    rightwards = padded.roll(-1, -1) - padded.roll(1, -1)
    upwards = padded.roll(1, -2) - padded.roll(-1, -2)
    real, imaginary = rightwards.square() - upwards.square(), 2 * rightwards * upwards
    return torch.atan2(imaginary.sum((-3, -2, -1)), real.sum((-3, -2, -1))) / 2


def line_direction(angle: float) -> tuple[float, float, float]:
    """Return three numbers (fraction, right, up) for a line at `angle`, in radians counter-clockwise from vertical.

    `fraction` is the angle modulo π, divided by π, and is from 0 to 1. (`right`, `up`) is the unit vector along the
    line.

    >>> [round(number, 3) for number in rp.group.line_direction(1.25 * torch.pi)]
    [0.25, -0.707, 0.707]
    """
    angle = angle % math.pi
    return angle / math.pi, -math.sin(angle), math.cos(angle)
