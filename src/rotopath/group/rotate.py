"""Images and features turned: quarter turns exactly, other angles by interpolation.

Angles run counter-clockwise as seen on screen.

Values at N angles around a circle: the waves that they consist of, and where they are largest.

In: features whose last axis is that of orientations, mirrored ones perhaps behind the others. Out: what stays the same
when the axis shifts, and an angle that shifts along; and the angle at which a kernel itself lies.
"""

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional

from rotopath.group.grid import check_orientations, mirror, offsets


def rotate(x: Tensor, angle: float) -> Tensor:
    """Turn images (..., H, W) about their centre by an angle in degrees, counter-clockwise.

    Multiples of 90° are exact and swap H and W where they must; other angles keep the frame, interpolate with cubic
    splines, and take what lies outside of the frame as zero.
    """
    if angle % 90 == 0:
        return torch.rot90(x, int(angle // 90) % 4, (-2, -1))
    return _resample_turned(x, math.radians(angle))


def rotate_features(x: Tensor, angle: float, reflections: bool = False) -> Tensor:
    """Turn SE(2) features (B, C, N, H, W): rotate each map, and shift the orientation axis along.

    With reflections the axis has 2N entries, and both halves of it shift alike.
    """
    halves = _halves(x, reflections)  # (B, C, 1 or 2, N, H, W)
    orientations = halves.shape[3]
    steps = angle * orientations / 360
    if abs(steps - round(steps)) > 1e-9:
        raise ValueError(
            f"Features with {orientations} orientations turn in steps of {360 / orientations:g}°, and {angle:g}° lies "
            f"between two of them; use a multiple of the step, or measure a whole network, images to images."
        )
    return rotate(halves, angle).roll(round(steps), dims=3).flatten(2, 3)


def flip(x: Tensor) -> Tensor:
    """Mirror images (..., H, W) left and right."""
    return x.flip(-1)


def flip_features(x: Tensor) -> Tensor:
    """Mirror features with reflections (B, C, 2N, H, W) left and right: each map, and the orientation axis along.

    What turned one way now turns the other way, and is mirrored if it was not.
    """
    halves = _halves(flip(x), reflections=True)
    turned_back = halves.flip(3).roll(1, dims=3)  # entry i is what -i was
    return turned_back.flip(2).flatten(2, 3)


def _halves(x: Tensor, reflections: bool) -> Tensor:
    """(B, C, 1 or 2, N, H, W): the turns, and with reflections the mirrored ones."""
    if reflections and x.shape[2] % 2:
        raise ValueError(
            f"Features with reflections have an even number of entries along their orientation axis; got {x.shape[2]}."
        )
    return torch.unflatten(x, 2, (2 if reflections else 1, -1))


def apply_symmetries(x: Tensor, symmetries: Tensor) -> Tensor:
    """Turn and transpose square images (B, C, H, H), each by its own of the eight symmetries of the square.

    Symmetry s turns by 90° · (s mod 4), after a transposition if s ≥ 4.
    """
    size = x.shape[-1]
    if x.shape[-2] != size:
        raise ValueError(f"Only squares have all eight symmetries; got images of {x.shape[-2]} × {size} px.")
    reads = _symmetry_reads(size, x.device)[symmetries]  # (B, H·H)
    # One read for all channels: they lie beside each other in memory, which convolutions like as well.
    pixels = x.permute(0, 2, 3, 1).reshape(x.shape[0], size * size, -1)  # (B, H·H, C)
    turned = pixels.gather(1, reads[:, :, None].expand_as(pixels))
    return turned.reshape(x.shape[0], size, size, -1).permute(0, 3, 1, 2)


def rotate_each(x: Tensor, degrees: Tensor, nearest: bool = False) -> Tensor:
    """Turn images (B, C, H, W), each by its own angle, counter-clockwise; the frame is mirrored where it ends.

    Interpolation is bilinear, as augmentation has it; `nearest` is for maps of classes.
    """
    angles = torch.deg2rad(degrees.to(torch.float32))
    cosine, sine, none = angles.cos(), angles.sin(), torch.zeros_like(angles)
    height, width = x.shape[-2:]
    # Reading positions in coordinates that run from -1 to 1 along either side, x before y, y downwards.
    rows = ((cosine, -sine * height / width, none), (sine * width / height, cosine, none))
    theta = torch.stack([torch.stack(row, dim=1) for row in rows], dim=1)  # (B, 2, 3)
    grid = functional.affine_grid(theta, list(x.shape), align_corners=False)
    values = x if x.is_floating_point() else x.to(torch.float32)
    mode = "nearest" if nearest else "bilinear"
    turned = functional.grid_sample(values, grid, mode=mode, padding_mode="reflection", align_corners=False)
    return turned if x.is_floating_point() else turned.round().to(x.dtype)


@lru_cache(maxsize=8)
def _symmetry_reads(size: int, device: torch.device) -> Tensor:
    """For each symmetry of the square, (8, size²): which pixel each pixel reads."""
    grid = torch.arange(size * size, device=device).view(size, size)
    turns = [torch.rot90(square, quarters, (0, 1)) for square in (grid, grid.T) for quarters in range(4)]
    return torch.stack(turns).flatten(1)


def _resample_turned(x: Tensor, radians: float) -> Tensor:
    """Cubic spline interpolation: close enough on smooth images not to pass for an error of the model."""
    height, width = x.shape[-2:]
    device = x.device if x.is_cuda else torch.device("cpu")  # positions need float64, which not every device has
    right, up = offsets(width).repeat(height).to(device), -offsets(height).repeat_interleave(width).to(device)
    # Each target pixel reads at the inverse rotation.
    columns = math.cos(radians) * right + math.sin(radians) * up + (width - 1) / 2
    rows = math.sin(radians) * right - math.cos(radians) * up + (height - 1) / 2
    inside = (rows >= -0.5) & (rows <= height - 0.5) & (columns >= -0.5) & (columns <= width - 0.5)

    maps = x.reshape(-1, height, width).to(torch.promote_types(x.dtype, torch.float32))
    coefficients = _spline_filter(height).to(maps) @ maps @ _spline_filter(width).T.to(maps)
    turned = torch.zeros_like(maps).flatten(1)  # (maps, H·W)
    column_taps = _spline_taps(columns, width)
    for row, row_weight in _spline_taps(rows, height):
        for column, column_weight in column_taps:
            read = coefficients.flatten(1)[:, (row * width + column).to(x.device)]
            turned += read * (row_weight * column_weight * inside).to(maps)
    return turned.reshape(x.shape).to(x.dtype)


def _spline_taps(positions: Tensor, size: int) -> list[tuple[Tensor, Tensor]]:
    """The four coefficients that a cubic spline reads at each position, as indices and weights."""
    t = positions - positions.floor()
    weights = ((1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, 1 + 3 * t * (1 + t - t**2), t**3)
    first = positions.floor().long() - 1
    return [(mirror(first + i, size), weight / 6) for i, weight in enumerate(weights)]


@lru_cache(maxsize=8)  # an image is turned by many angles, and the inverse of a large matrix takes its time
def _spline_filter(size: int) -> Tensor:
    """The matrix that turns samples into the coefficients of the cubic spline through them."""
    with torch.inference_mode(False):  # others may need it for gradients later
        samples = torch.zeros(size, size, dtype=torch.float64, device="cpu")
        here = torch.arange(size, device="cpu")
        for step, weight in ((-1, 1 / 6), (0, 4 / 6), (1, 1 / 6)):
            samples[here, mirror(here + step, size)] += weight
        coefficients: Tensor = torch.linalg.inv(samples)
        return coefficients


def frequencies(orientations: int) -> int:
    """How many waves along θ are told apart: those that N orientations sample four times or more, k = 1 … ⌊N/4⌋.

    Faster ones, up to N/2, are as exact at steps of the group, but change their amplitudes in between.
    """
    check_orientations(orientations)
    return orientations // 4


def amplitude_map(orientations: int, reflections: bool = False) -> Tensor:
    """The map from G entries to parts of the waves of K frequencies along θ, (G, P, K): cosines and sines.

    Squares, summed over P, are squared amplitudes: a² for a cos(kθ - φ), whatever φ. A shift of the axis turns cosines
    and sines into each other, and leaves the sum. With reflections it is the mean over both halves, which a flip swaps.

    >>> values = 3 * torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> parts = torch.einsum("g,gpk->pk", values.double(), rp.group.amplitude_map(8))
    >>> [round(float(amplitude), 4) for amplitude in parts.square().sum(0).sqrt()]
    [3.0, 0.0]
    """
    turns = torch.arange(orientations, device="cpu")
    waves = torch.arange(1, frequencies(orientations) + 1, device="cpu")
    # Reduced to one turn first, so that equal angles are equal numbers.
    angles = 2 * math.pi / orientations * (turns[:, None] * waves % orientations).double()  # (N, K)
    parts = torch.stack([angles.cos(), angles.sin()], dim=1) * (2 / orientations)  # (N, 2, K)
    if not reflections:
        return parts
    mapped = parts.new_zeros(2 * orientations, 2, 2, len(waves))  # of which half, cosine and sine
    mapped[:orientations, 0] = mapped[orientations:, 1] = parts / math.sqrt(2)
    return mapped.flatten(1, 2)


def find_peak(values: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """The largest of values (..., G), and the angle from 0 to 2π at which it lies, between the samples.

    The angle is the crest of the wave b + a cos(θ - φ) through the largest value and its two neighbours. Of a wave it
    is exact, it is never farther than half a step from the largest value, and it shifts along with the axis. Of fewer
    than three orientations it is that of the largest value, and of values that are all the same it is 0.

    >>> values = 1 + torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> round(float(rp.group.find_peak(values)[1]), 4)
    0.7
    """
    halves = torch.unflatten(values, -1, (2 if reflections else 1, -1))  # (..., 1 or 2, N)
    orientations = halves.shape[-1]
    step = 2 * math.pi / orientations
    tops, at = halves.max(dim=-1, keepdim=True)  # (..., 1 or 2, 1)
    angles = at.to(values) * step  # which would be float32 otherwise
    if orientations > 2:
        before, after = (halves.gather(-1, (at + by) % orientations) for by in (-1, 1))
        slope = (after - before) / (2 * math.sin(step))
        bend = (2 * tops - before - after) / (2 - 2 * math.cos(step))
        angles = angles + torch.atan2(slope, bend)
    higher = tops.argmax(dim=-2, keepdim=True)
    angle = angles.gather(-2, higher)[..., 0, 0] % (2 * math.pi)
    largest = values.amax(dim=-1)  # shares the gradient among equal ones
    return largest, torch.where(largest > values.amin(dim=-1), angle, torch.zeros_like(angle))


def line_angle(kernel: Tensor) -> Tensor:
    """How far the lines and edges that a kernel (..., C, S, S) looks for are turned from upright, in radians (...).

    Half the angle of Σ (∂ₓk + i ∂ᵧk)², over channels and positions: from -π/2 to π/2, as lines have no direction.

    >>> bar = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> [round(float(rp.group.line_angle(turned).rad2deg())) for turned in (bar, bar.mT, torch.eye(3)[None])]
    [0, 90, 45]
    """
    around = functional.pad(kernel, (1, 1, 1, 1))
    rightwards = around.roll(-1, -1) - around.roll(1, -1)
    upwards = around.roll(1, -2) - around.roll(-1, -2)
    along, between = rightwards.square() - upwards.square(), 2 * rightwards * upwards
    return torch.atan2(between.sum((-3, -2, -1)), along.sum((-3, -2, -1))) / 2


def describe_line(angle: float) -> tuple[float, float, float]:
    """Of a line turned by so many radians from upright: the part of half a turn, and how far it leans right and up.

    >>> [round(each, 3) for each in rp.group.describe_line(1.25 * torch.pi)]
    [0.25, -0.707, 0.707]
    """
    turn = angle % math.pi
    return turn / math.pi, -math.sin(turn), math.cos(turn)
