"""SE(2,N), the group of translations and N rotations: the single home of geometry.

In: a kernel size, a number of orientations, base weights. Out: rotated kernels, turned images and features,
and the sizes on which pixel grids survive a rotation. Angles run counter-clockwise as seen on screen (rows
grow downwards), which is the direction of `torch.rot90(x, 1, (-2, -1))`.
"""

import math
from functools import lru_cache
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional


def angles(orientations: int) -> list[float]:
    """The angles of the rotations in degrees, θᵢ = 360·i / N.

    >>> rp.group.angles(4)
    [0.0, 90.0, 180.0, 270.0]
    """
    check_orientations(orientations)
    return [360 * i / orientations for i in range(orientations)]


def disc(size: int) -> Tensor:
    """Which positions of a size × size kernel lie on the disc that all rotations share.

    >>> int(rp.group.disc(5).sum())
    21
    """
    if size < 1 or size % 2 == 0:
        raise ValueError(f"kernel_size must be odd and at least 1, so that it has a centre to turn about; got {size}.")
    squared = _offsets(size) ** 2
    return squared[:, None] + squared[None, :] <= (size / 2) ** 2


def rotation_map(size: int, orientations: int) -> Tensor:
    """The linear map from base weights to rotated kernels, (N, size², P), in float64.

    Row r of slice i holds what entry r of the kernel turned by θᵢ reads from the P base weights on the disc, by
    bilinear interpolation. A turn by 90° permutes the rows of the map, so it is exact wherever N allows it.
    """
    check_orientations(orientations)
    mask = disc(size).flatten()
    offsets = _offsets(size)
    x = offsets.repeat(size)  # (size²,) to the right
    y = -offsets.repeat_interleave(size)  # (size²,) upwards
    slices = []
    for i in range(orientations):
        # Only the part of the angle below 90° is computed in floating point; whole quarter turns permute.
        quarters, rest = divmod(4 * i, orientations)
        angle = math.pi / 2 * rest / orientations
        source_x = math.cos(angle) * x + math.sin(angle) * y
        source_y = math.cos(angle) * y - math.sin(angle) * x
        reads = _hats(-source_y, offsets)[:, :, None] * _hats(source_x, offsets)[:, None, :]  # (size², size, size)
        reads = reads.flatten(1)[:, mask] * mask[:, None]  # (size², P)
        slices.append(torch.rot90(reads.view(size, size, -1), quarters, (0, 1)).flatten(0, 1))
    return torch.stack(slices)


def effective_taps(size: int, orientations: int, correlation: float) -> float:
    """How many base weights a rotated kernel brings to bear on a patch, averaged over orientations.

    Interpolation, and the rim of the disc, pass on less than the variance of all P base weights at angles off the
    pixel grid: 86 % of it at 45° (5×5) where the patch is constant, 43 % where its pixels are uncorrelated.
    `correlation` tells where between the two a patch lies.
    """
    rotation = rotation_map(size, orientations)
    constant = rotation.sum(dim=1).square().sum(dim=1).mean()
    uncorrelated = rotation.square().sum(dim=(1, 2)).mean()
    return float(correlation * constant + (1 - correlation) * uncorrelated)


def orientation_shift(orientations: int, device: torch.device | None = None) -> Tensor:
    """The θ part of the shift-twist, (N, N): output orientation i reads input j with kernel slice (j - i) mod N."""
    steps = torch.arange(orientations, device=device)
    return (steps[None, :] - steps[:, None]) % orientations


def lift_kernels(weight: Tensor, rotation: Tensor) -> Tensor:
    """Base weights (O, C, P) of a lifting layer to the weights (O·N, C, n, n) of an ordinary convolution."""
    kernels = torch.einsum("ocp,irp->oirc", weight, rotation)
    return _as_conv2d_weight(kernels)


def group_kernels(weight: Tensor, rotation: Tensor) -> Tensor:
    """Base weights (O, C, N, P) of a group convolution to the weights (O·N, C·N, n, n) of an ordinary one."""
    shift = orientation_shift(weight.shape[2], weight.device)
    twisted = weight[:, :, shift]  # (O, C, N, N, P), the two N for output and input orientation
    kernels = torch.einsum("ocijp,irp->oircj", twisted, rotation).flatten(3)  # (O, N, n², C·N)
    return _as_conv2d_weight(kernels)


def rotate(x: Tensor, angle: float) -> Tensor:
    """Turn images (..., H, W) about their centre by an angle in degrees, counter-clockwise.

    Multiples of 90° are exact and swap H and W where they must; other angles keep the frame, interpolate with cubic
    splines, and take what lies outside of the frame as zero.
    """
    if angle % 90 == 0:
        return torch.rot90(x, int(angle // 90) % 4, (-2, -1))
    return _resample_turned(x, math.radians(angle))


def rotate_features(x: Tensor, angle: float) -> Tensor:
    """Turn SE(2) features (B, C, N, H, W): rotate each map, and shift the orientation axis along."""
    orientations = x.shape[2]
    steps = angle * orientations / 360
    if abs(steps - round(steps)) > 1e-9:
        raise ValueError(
            f"Features with {orientations} orientations turn in steps of {360 / orientations:g}°, and {angle:g}° lies "
            f"between two of them; use a multiple of the step, or measure a whole network, images to images."
        )
    return rotate(x, angle).roll(round(steps), dims=2)


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


def check_orientations(orientations: int) -> None:
    if not isinstance(orientations, Integral) or orientations < 1:
        raise ValueError(
            f"orientations must be a whole number, 1 or more (1 is an ordinary CNN); got {orientations!r}."
        )


def inscribed_disc(height: int, width: int, inner: float = 1.0) -> Tensor:
    """Weights (height, width) that are 1 on the inscribed disc up to `inner` of its radius and fade to 0 at its rim."""
    y, x = _offsets(height), _offsets(width)
    radius = torch.sqrt(y[:, None] ** 2 + x[None, :] ** 2) / (min(height, width) / 2)
    if inner == 1:
        return (radius <= 1).to(torch.float64)
    progress = ((radius - inner) / (1 - inner)).clamp(0, 1)
    return (1 + torch.cos(math.pi * progress)) / 2


@lru_cache(maxsize=8)
def _symmetry_reads(size: int, device: torch.device) -> Tensor:
    """For each symmetry of the square, (8, size²): which pixel each pixel reads."""
    grid = torch.arange(size * size, device=device).view(size, size)
    turns = [torch.rot90(square, quarters, (0, 1)) for square in (grid, grid.T) for quarters in range(4)]
    return torch.stack(turns).flatten(1)


def _offsets(size: int) -> Tensor:
    """Pixel centres along an axis, measured from its middle."""
    return torch.arange(size, dtype=torch.float64, device="cpu") - (size - 1) / 2


def _hats(positions: Tensor, grid: Tensor) -> Tensor:
    """Linear interpolation weights, (positions, grid)."""
    distance = (positions[:, None] - grid[None, :]).abs()
    # Rotated grid points that meet grid points do so to 1e-15 only; a snap keeps that dust out of the map.
    nearest = distance.round()
    distance = torch.where((distance - nearest).abs() < 1e-9, nearest, distance)
    return (1 - distance).clamp(min=0)


def _as_conv2d_weight(kernels: Tensor) -> Tensor:
    """(O, N, n², C) to (O·N, C, n, n), channels last in memory."""
    size = math.isqrt(kernels.shape[2])
    outputs, orientations, _, inputs = kernels.shape
    return kernels.reshape(outputs * orientations, size, size, inputs).permute(0, 3, 1, 2)


def _resample_turned(x: Tensor, radians: float) -> Tensor:
    """Cubic spline interpolation: close enough on smooth images not to pass for an error of the model."""
    height, width = x.shape[-2:]
    device = x.device if x.is_cuda else torch.device("cpu")  # positions need float64, which not every device has
    right, up = _offsets(width).repeat(height).to(device), -_offsets(height).repeat_interleave(width).to(device)
    # Each target pixel reads at the inverse rotation.
    columns = math.cos(radians) * right + math.sin(radians) * up + (width - 1) / 2
    rows = math.sin(radians) * right - math.cos(radians) * up + (height - 1) / 2
    inside = (rows >= -0.5) & (rows <= height - 0.5) & (columns >= -0.5) & (columns <= width - 0.5)

    maps = x.reshape(-1, height, width).to(torch.promote_types(x.dtype, torch.float32))
    coefficients = _spline_filter(height).to(maps) @ maps @ _spline_filter(width).T.to(maps)
    turned = torch.zeros_like(maps).flatten(1)  # (maps, H·W)
    for row, row_weight in _spline_taps(rows, height):
        for column, column_weight in _spline_taps(columns, width):
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
