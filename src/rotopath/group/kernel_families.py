"""Compute rotated kernels from learned base weights, with one of three kernel families.

A kernel has size × size entries and P base weights, which are learned. P is the number of entries inside the disc of
diameter `size` (`disc_mask`), or size² for "square" (`count_taps`). The rotated kernel is a matrix (size², P) times the
base weights. A kernel family is a function that returns this matrix, in float64, for a size and a counter-clockwise
angle in radians:

- "bilinear" interpolates the base weights, as in the paper of Lafarge et al. (arXiv:2002.08725).
- "square" also interpolates, and has base weights for the corners of the kernel, so that its kernels at multiples of
  90° are those of ordinary convolutions. At other angles, corners leave the kernel and are lost.
- "gaussian" and "harmonic" rotate smooth basis functions. The base weights are their coefficients. The sizes of
  "harmonic" are odd.

N is the number of orientations. G is the length of the orientation axis: N, or 2N with reflections. To add a family,
write such a function, add it to KERNEL_FAMILIES, and add its name to `Kernel`.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor
from torch.nn.functional import avg_pool2d, one_hot, pad

from rotopath.group.grid import (
    centered_coordinates,
    check_orientations,
    disc_mask,
    orientation_shift,
    rotated_coordinates,
)

Kernel = Literal["bilinear", "gaussian", "harmonic", "square"]
KERNELS = get_args(Kernel)

MAX_TWISTED = 2**20  # largest number of kernel entries that `write_group_kernels` computes in one step

# Standard deviation of the Gaussians of the family "gaussian", in px. Narrower Gaussians nearly vanish between pixels;
# wider Gaussians overlap too much.
GAUSSIAN_PX = 0.6

# The kernels of the family "harmonic" are optimized for a statistical model of images: Gaussian blobs of several sizes
# plus weak white noise. Each size is twice the size before, because natural images look alike on all scales. The noise
# represents details that do not rotate with the image.
BLOBS_PX = (1.0, 2.0, 4.0, 8.0)  # standard deviations of the blobs
NOISE = 1e-4  # variance of the noise
GAIN_EXPONENT = 1 / 12  # harmonics are multiplied by their energy to this power, which favors smooth harmonics
QUADRANT_ANGLES = 16  # number of angles from 0° to 90° over which the response to rotated images is averaged


# From base weights to the weights of an ordinary convolution


def count_taps(size: int, kernel: str = "bilinear") -> int:
    """Return P, the number of base weights of a kernel of size × size entries in the family `kernel`.

    >>> rp.group.count_taps(5), rp.group.count_taps(5, "square")
    (21, 25)
    """
    check_kernel(size, kernel)
    return size * size if kernel == "square" else int(disc_mask(size).sum())


def check_kernel(size: int, kernel: str) -> None:
    """Raise ValueError if the family `kernel` has no kernels of size × size entries."""
    if kernel == "harmonic" and size % 2 == 0:
        raise ValueError(
            f"kernel='harmonic' needs an odd kernel_size, so that the kernel has a center pixel; got {size}. Use "
            f"another size, or kernel='gaussian'."
        )


def rotation_map(size: int, orientations: int, kernel: str = "bilinear", reflections: bool = False) -> Tensor:
    """Return the matrices (G, size², P), in float64, that convert base weights to the kernels of all orientations.

    Matrix i times the base weights (P,) is the kernel (size²,) rotated by θᵢ = 360°·i / N. With reflections, matrix
    N + i times the base weights is the kernel flipped left to right and then rotated by θᵢ. `kernel` is the name of the
    kernel family. Rotations by multiples of 90° and flips only permute the rows of a matrix, and are therefore exact.
    """
    check_orientations(orientations)
    if kernel not in KERNEL_FAMILIES:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, KERNEL_FAMILIES))}; got {kernel!r}.")
    check_kernel(size, kernel)
    slices = []
    for i in range(orientations):
        # Only the remainder below 90° is computed with sine and cosine; rotations by 90° permute the entries.
        quarters, rest = divmod(4 * i, orientations)
        weights = KERNEL_FAMILIES[kernel](size, math.pi / 2 * rest / orientations)  # (size², P)
        slices.append(torch.rot90(weights.view(size, size, -1), quarters, (0, 1)).flatten(0, 1))
    if reflections:
        # A flip followed by the rotation by θᵢ equals the rotation by -θᵢ followed by the flip.
        flipped = [slices[-i % orientations].view(size, size, -1).flip(1) for i in range(orientations)]
        slices += [weights.flatten(0, 1) for weights in flipped]
    return torch.stack(slices)


def average_map(rotation: Tensor, window: int) -> Tensor:
    """Return the matrices (G, m², P) that convert base weights to averaged kernels, of size m = n + window - 1.

    `rotation` (G, n², P) is the result of `rotation_map` for the kernel size n. An averaged kernel is the mean of a
    kernel shifted to `window` × `window` positions. The convolution with an averaged kernel therefore returns the mean,
    over windows of `window` × `window` positions, of the results of the convolution with the kernel itself.
    """
    orders, entries, taps = rotation.shape
    size = math.isqrt(entries)
    kernels = rotation.mT.reshape(-1, 1, size, size)
    averaged = avg_pool2d(pad(kernels, (window - 1,) * 4), window, stride=1)
    return averaged.view(orders, taps, -1).mT.contiguous()


def lift_kernels(weight: Tensor, rotation: Tensor) -> Tensor:
    """Return the weights (O·G, C, n, n) of an ordinary convolution that computes the same as a lifting convolution.

    `weight` (O, C, P) are the base weights, for O output and C input channels. `rotation` (G, n², P) is the result of
    `rotation_map` for the kernel size n.
    """
    kernels = torch.einsum("ocp,irp->oirc", weight, rotation)
    return _as_conv2d_weight(kernels)


def group_kernels(weight: Tensor, rotation: Tensor, reflections: bool = False) -> Tensor:
    """Return the weights (O·G, C·G, n, n) of an ordinary convolution that computes the same as a group convolution.

    `weight` (O, C, G, P) are the base weights, for O output and C input channels. `rotation` (G, n², P) is the result
    of `rotation_map` for the kernel size n and the same `reflections`.
    """
    outputs, inputs, order, _ = weight.shape
    shift = orientation_shift(order // 2 if reflections else order, weight.device, reflections)
    # Entry (g, s, h) is 1 if output orientation g reads input orientation h with slice s of the base weights. Products
    # with these matrices move the slices; their gradients are much faster to compute than those of indexing.
    permutations = one_hot(shift, order).mT.to(weight)
    slices = weight.permute(0, 3, 1, 2).flatten(2)  # (O, P, C·G)
    rotated = rotation.flatten(0, 1) @ slices  # (O, G·n², C·G): every slice, rotated to every output orientation
    kernels = rotated.view(outputs, order, -1, order) @ permutations  # (O, G, n²·C, G)
    return _as_conv2d_weight(kernels.view(outputs, order, rotation.shape[1], inputs * order))


def write_group_kernels(weight: Tensor, rotation: Tensor, reflections: bool, out: Tensor | None = None) -> Tensor:
    """Return the same as `group_kernels`, without gradients. On the CPU, this is faster.

    `out` is the result of an earlier call for weights of the same shape. Its memory is used for the new kernels, which
    saves the time to allocate it.
    """
    outputs, inputs, order, taps = weight.shape
    entries = rotation.shape[1]
    shape = (outputs, order, entries, inputs, order)
    kernels = weight.new_empty(shape) if out is None else out.permute(0, 2, 3, 1).view(shape)
    slices = weight.permute(0, 3, 1, 2)  # (O, P, C, G)
    if _is_twisted_at_once(kernels, reflections):
        doubled = torch.cat([slices, slices], dim=-1).flatten(2)  # (O, P, C·2G)
        rotated = rotation.flatten(0, 1) @ doubled  # (O, G·n², C·2G)
        kernels.copy_(_twist(rotated.view(outputs, order, entries, inputs, 2 * order)))
    else:
        rotated = weight.new_empty(outputs, entries, inputs, order)
        slices = slices.reshape(outputs, taps, inputs * order)
        for g, sources in enumerate(_slices_by_orientation(order, reflections)):
            torch.matmul(rotation[g], slices, out=rotated.view(outputs, entries, -1))
            _permute_last_axis(rotated, sources, out=kernels[:, g])
    return _as_conv2d_weight(kernels.flatten(3)) if out is None else out


def group_kernels_gradient(d_kernels: Tensor, rotation: Tensor, reflections: bool) -> Tensor:
    """Return the gradient of the loss with respect to the base weights (O, C, G, P) of `group_kernels`, contiguous.

    `d_kernels` (O·G, C·G, n, n) is the gradient with respect to the kernels. On the CPU, this is faster than autograd.
    """
    order, entries, taps = rotation.shape
    maps = d_kernels.permute(0, 2, 3, 1).reshape(-1, order, entries, d_kernels.shape[1] // order, order)
    outputs, inputs = maps.shape[0], maps.shape[3]
    if _is_twisted_at_once(maps, reflections):
        rotated = maps.new_zeros(outputs, order, entries, inputs, 2 * order)
        _twist(rotated).copy_(maps)
        doubled = rotation.flatten(0, 1).T @ rotated.view(outputs, order * entries, -1)  # (O, P, C·2G)
        d_slices = doubled.view(outputs, taps, inputs, 2, order).sum(dim=3)
    else:
        rotated = torch.empty_like(maps[:, 0])
        products = maps.new_zeros(outputs, taps, inputs * order)
        for g, sources in enumerate(_slices_by_orientation(order, reflections)):
            inverse = sorted(range(order), key=sources.__getitem__)
            _permute_last_axis(maps[:, g], inverse, out=rotated)
            products.baddbmm_(rotation[g].T.expand(outputs, -1, -1), rotated.flatten(2))
        d_slices = products.view(outputs, taps, inputs, order)
    # In the layout of the weights, as optimizers and DDP expect. `contiguous` would keep other strides of an axis of 1.
    return d_slices.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format)


def _is_twisted_at_once(kernels: Tensor, reflections: bool) -> bool:
    """Return whether `_twist` is used for kernels (O, G, n², C, G). It needs memory for twice as many values."""
    return kernels.numel() <= MAX_TWISTED and not reflections


def _twist(doubled: Tensor) -> Tensor:
    """Return the slices of base weights that each output orientation reads, as a view (O, G, n², C, G).

    `doubled` (O, G, n², C, 2G) contains the rotated slices twice, one after another. Output orientation g reads input
    orientation s with slice s - g modulo G. This is entry G + s - g of the last axis, so that a step along the axis of
    output orientations goes back by one entry.
    """
    outputs, order, entries, inputs, _ = doubled.shape
    output_stride, order_stride, *strides = doubled.stride()
    return doubled.as_strided(
        (outputs, order, entries, inputs, order), (output_stride, order_stride - 1, *strides), order
    )


@lru_cache(maxsize=64)
def _slices_by_orientation(order: int, reflections: bool) -> list[list[int]]:
    """Return the table of `orientation_shift`, for G = `order`, as lists.

    For each output orientation, there is a list with the index of the slice of base weights for each input orientation.
    """
    shift = orientation_shift(order // 2 if reflections else order, torch.device("cpu"), reflections)
    slices: list[list[int]] = shift.tolist()
    return slices


def _permute_last_axis(x: Tensor, sources: list[int], out: Tensor) -> None:
    """Compute `out[..., i] = x[..., sources[i]]` for all i."""
    count, first = len(sources), sources[0]
    if sources == [(first + i) % count for i in range(count)]:  # two blocks, which are faster to copy
        out[..., : count - first] = x[..., first:]
        out[..., count - first :] = x[..., :first]
    else:
        out.copy_(x.index_select(-1, torch.tensor(sources)))


def _as_conv2d_weight(kernels: Tensor) -> Tensor:
    """Reshape kernels (O, G, n², C) to the weights of a convolution (O·G, C, n, n), channels-last in memory."""
    outputs, orientations, entries, inputs = kernels.shape
    size = 1
    while size * size < entries:  # torch.compile does not support math.isqrt of a size that it treats as a variable
        size += 1
    # `contiguous` is needed for a single orientation, for which `reshape` keeps the memory layout of the einsum.
    return kernels.reshape(outputs * orientations, size, size, inputs).contiguous().permute(0, 3, 1, 2)


def effective_taps(size: int, orientations: int, correlation: float, kernel: str = "bilinear") -> float:
    """Return the effective number of base weights of a rotated kernel, which weight initialization uses as fan-in.

    This number is the variance of the kernel's output for base weights and pixels of variance 1, averaged over the
    orientations. `correlation` is the correlation of the pixels under the kernel, from 0 (uncorrelated) to 1 (equal).

    For "bilinear", the result is at most P, because interpolation at angles other than multiples of 90° reduces the
    variance. For a 5 × 5 kernel at 45°, it reduces the variance to 86 % for equal pixels, and to 43 % for uncorrelated
    pixels. For "gaussian" and "harmonic", the result can be greater than P.
    """
    rotation = rotation_map(size, orientations, kernel)
    constant = rotation.sum(dim=1).square().sum(dim=1).mean()
    uncorrelated = rotation.square().sum(dim=(1, 2)).mean()
    return float(correlation * constant + (1 - correlation) * uncorrelated)


# The families


def bilinear_map(size: int, radians: float) -> Tensor:
    """Return the matrix (size², P) of bilinear interpolation for a rotation by `radians`, counter-clockwise.

    The base weights are the entries, inside the disc, of the kernel at 0°.
    """
    mask = disc_mask(size).flatten()
    return square_map(size, radians)[:, mask] * mask[:, None]


def square_map(size: int, radians: float) -> Tensor:
    """Return the matrix (size², size²) of bilinear interpolation for a rotation by `radians`, counter-clockwise.

    The base weights are all entries of the kernel at 0°. Outside the kernel, its entries count as 0.
    """
    x, y = rotated_coordinates(size, radians)
    grid = centered_coordinates(size)
    rows, columns = _interpolation_weights(-y, grid), _interpolation_weights(x, grid)  # (size², size) each
    return (rows[:, :, None] * columns[:, None, :]).flatten(1)


def _interpolation_weights(coordinates: Tensor, grid: Tensor) -> Tensor:
    """Return the weights (n, k) of linear interpolation at `coordinates` (n,) between the points of `grid` (k,)."""
    distance = (coordinates[:, None] - grid[None, :]).abs()
    # Rounding errors of about 1e-15 are removed, so that a coordinate on a grid point has one nonzero weight only.
    nearest = distance.round()
    distance = torch.where((distance - nearest).abs() < 1e-9, nearest, distance)
    return (1 - distance).clamp(min=0)


def gaussian_map(size: int, radians: float) -> Tensor:
    """Return the matrix (size², P) of P Gaussians for a rotation by `radians`, counter-clockwise.

    The centers of the Gaussians rotate with the kernel. At 0°, each entry inside the disc is the center of one
    Gaussian, and the matrix has the same norm as the matrix of `bilinear_map`.
    """
    mask = disc_mask(size).flatten()
    center_x, center_y = (axis[mask] for axis in rotated_coordinates(size))

    def sample(radians: float) -> Tensor:
        x, y = rotated_coordinates(size, radians)
        squared = (x[:, None] - center_x) ** 2 + (y[:, None] - center_y) ** 2  # (size², P)
        return torch.exp(-squared / (2 * GAUSSIAN_PX**2)) * mask[:, None]

    return sample(radians) * (math.sqrt(len(center_x)) / float(sample(0.0).norm()))


def harmonic_map(size: int, radians: float) -> Tensor:
    """Return the matrix (size², P) of circular harmonics, which are complex kernels, for a rotation by `radians`.

    Rotating a harmonic of frequency m by θ multiplies it by exp(-imθ). The real part and the imaginary part of a
    harmonic have one base weight each, and a rotation mixes only these two parts. A harmonic of frequency 0 is real,
    and has one base weight. The norm of the matrix does not depend on the angle.
    """
    kernels, frequencies = circular_harmonics(size)
    rotated = kernels * torch.polar(torch.ones_like(frequencies), -frequencies * radians)
    pairs = math.sqrt(2) * rotated[:, frequencies > 0]
    return torch.cat([rotated[:, frequencies == 0].real, pairs.real, pairs.imag], dim=1)


KERNEL_FAMILIES: dict[str, Callable[[int, float], Tensor]] = {
    "bilinear": bilinear_map,
    "gaussian": gaussian_map,
    "harmonic": harmonic_map,
    "square": square_map,
}


# Circular harmonics on pixels


class _Harmonic(NamedTuple):
    """A kernel that approximates a circular harmonic of frequency m on the pixel grid.

    The response of the kernel to an image has an exact part: rotating the image by θ multiplies this part by exp(imθ).
    """

    fraction: float  # fraction of the response's energy that is in the exact part
    energy: float  # energy of the exact part
    frequency: int  # m
    kernel: Tensor  # (size²,), complex, of norm 1


@lru_cache(maxsize=16)
def circular_harmonics(size: int) -> tuple[Tensor, Tensor]:
    """Return the complex kernels (size², K) of the K harmonics that rotate most exactly, and their frequencies (K,).

    A harmonic of frequency 0 needs one base weight, every other harmonic needs two. The K harmonics need P base weights
    in total; if only one is left, a harmonic of frequency 0 is chosen. Harmonics that rotate more exactly, and smoother
    harmonics, are multiplied by larger factors. Finally, all kernels are multiplied by a common factor, so that the
    matrix of `harmonic_map` has the same norm as the matrix of `bilinear_map` at 0°.
    """
    candidates = [harmonic for frequency in range(2 * size - 1) for harmonic in _find_harmonics(size, frequency)]
    taps = left = int(disc_mask(size).sum())
    chosen = []
    for harmonic in sorted(candidates, key=lambda harmonic: -harmonic.fraction):
        needed = 2 if harmonic.frequency else 1
        if needed <= left:
            chosen.append(harmonic)
            left -= needed
    chosen.sort(key=lambda harmonic: harmonic.frequency)  # a stable sort: within a frequency the best stays first
    frequencies = torch.tensor([float(harmonic.frequency) for harmonic in chosen], dtype=torch.float64, device="cpu")
    kernels = torch.stack(
        [harmonic.kernel * harmonic.fraction * harmonic.energy**GAIN_EXPONENT for harmonic in chosen], dim=1
    )
    energy = (kernels.abs().square() * (1 + (frequencies > 0))).sum()
    return kernels * torch.sqrt(taps / energy), frequencies


def _find_harmonics(size: int, frequency: int) -> list[_Harmonic]:
    """Return orthonormal kernels of one frequency, sorted from the most exact rotation to the least exact rotation.

    A kernel is a circular harmonic of frequency m if rotating the image by θ multiplies the response of the kernel by
    exp(imθ). On pixels, only a fraction of the response behaves in this way. For images of known covariance, this
    fraction of the response's energy is a quotient of two quadratic forms (`harmonic_part` and `total`). The kernels
    with the largest fractions are therefore the solutions of an eigenvalue problem.
    """
    basis = _symmetric_kernels(size, frequency)  # (size², Q)
    covariance = image_covariance(size)
    noise = NOISE * torch.eye(basis.shape[1], dtype=torch.float64, device="cpu")
    total = (basis.mH @ covariance[0] @ basis).real + noise
    phases = torch.polar(torch.ones_like(_quadrant_angles()), frequency * _quadrant_angles())
    harmonic_part = (basis.mH @ torch.tensordot(phases, covariance, dims=1) @ basis).real / QUADRANT_ANGLES
    whiten = torch.linalg.inv(torch.linalg.cholesky(total))
    fractions, vectors = torch.linalg.eigh(whiten @ harmonic_part @ whiten.T)
    vectors, _ = torch.linalg.qr((whiten.T @ vectors).flip(1))
    # The signs of eigenvectors and of QR are arbitrary, and may differ between machines. They are fixed here, so that
    # trained base weights give the same kernels on every machine.
    radius = torch.complex(*rotated_coordinates(size)).abs()
    reference = torch.stack([radius ** (frequency + 2 * i) for i in range(basis.shape[1])], dim=1)
    reference = (basis.mH @ (_phase_factors(size, frequency)[:, None] * reference)).real
    vectors = vectors * torch.sign((reference * vectors).sum(dim=0))
    energies = (vectors * (harmonic_part @ vectors)).sum(dim=0)
    kernels = (basis @ vectors.to(basis)).unbind(dim=1)
    return [
        _Harmonic(float(fraction), float(energy), frequency, kernel)
        for fraction, energy, kernel in zip(fractions.flip(0), energies, kernels, strict=True)
    ]


def _symmetric_kernels(size: int, frequency: int) -> Tensor:
    """Return Q complex kernels (size², Q), a basis of all kernels that rotate by 90° and flip as harmonics do.

    Such a kernel of frequency m is multiplied by (-i)ᵐ if it is rotated by 90° counter-clockwise, and is complex
    conjugated if it is flipped up-down. The harmonics are linear combinations of this basis with real coefficients.
    """
    x, y = rotated_coordinates(size)
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    # 1 or -1, with opposite signs for a pixel and its mirror image; 0 for pixels on an axis of reflection.
    handedness = torch.sign(x * y * (x.square() - y.square()))
    phases = _phase_factors(size, frequency)
    columns = []
    for a in range(size // 2 + 1):
        for b in range(a + 1):
            orbit = (far == a) & (near == b)  # pixels that rotations by 90° and reflections map onto each other
            if a == 0 and frequency % 4:
                continue  # a rotation by 90° does not move the center pixel, so its entry must be 0
            columns.append(phases * orbit)
            if 0 < b < a:
                columns.append(1j * phases * handedness * orbit)
    basis = torch.stack(columns, dim=1)
    return basis / basis.abs().square().sum(dim=0).sqrt()


def _phase_factors(size: int, frequency: int) -> Tensor:
    """Return exp(imφ) (size²,) for the frequency m and the polar angle φ of each kernel entry, seen from the center."""
    angle = torch.complex(*rotated_coordinates(size)).angle()
    return torch.polar(torch.ones_like(angle), frequency * angle)


@lru_cache(maxsize=16)
def image_covariance(size: int) -> Tensor:
    """Return the covariances (angles, size², size²) between the pixels of a random image and of its rotated copies.

    The axes are the angles of `_quadrant_angles`, the pixels of the image (size × size), and the pixels of the image
    rotated by this angle. The image consists of random Gaussian blobs with the standard deviations BLOBS_PX.
    """
    point = torch.complex(*rotated_coordinates(size))
    rotated = point * torch.polar(torch.ones_like(_quadrant_angles()), _quadrant_angles())[:, None]  # (angles, size²)
    squared = (point[:, None] - rotated[:, None, :]).abs().square()
    covariance = torch.stack([torch.exp(-squared / (2 * blob) ** 2) for blob in BLOBS_PX]).mean(dim=0)
    return covariance.to(torch.complex128)


def _quadrant_angles() -> Tensor:
    """Return QUADRANT_ANGLES equally spaced angles from 0° to less than 90°, in radians.

    Larger angles are not needed, because rotations by 90° are exact.
    """
    return math.pi / 2 / QUADRANT_ANGLES * torch.arange(QUADRANT_ANGLES, dtype=torch.float64, device="cpu")
