"""Circular harmonics on pixels: the kernels that stay the most like themselves when an image turns under them.

A kernel u is a harmonic of frequency m if a turn of the image by θ multiplies its response by exp(imθ). On pixels none
is, quite. But for images of known covariance the share of the response that does so is a quotient of two quadratic
forms, and its best kernels are eigenvectors.

Families of kernels: what the entries of a kernel turned by an angle read from its base weights.

In: an odd size and an angle in radians. Out: a matrix (size², P) in float64, with P the number of positions on the
disc, so that every family has the same number of weights.

Base weights to rotated kernels: one fixed linear map, and the shift along θ that belongs to it.
"""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from rotopath.group.grid import check_orientations, disc, offsets, orientation_shift, positions

# What images are taken to be: blobs of every size, octaves apart, as natural images are alike on all scales; and a
# little white noise, for all that does not turn along, such as the kinks that a ReLU leaves between pixels.
BLOBS_PX = (1.0, 2.0, 4.0, 8.0)
NOISE = 1e-4
LOUDNESS = 1 / 12  # of a harmonic grows as this power of the energy that it sees: the smoother, the louder
TURNS = 16  # in a quarter of a circle, over which frequencies are told apart


class _Mode(NamedTuple):
    share: float  # of the response to images that turns as it should
    energy: float  # of that part of the response
    frequency: int
    kernel: Tensor  # (size²,), complex, of norm 1


@lru_cache(maxsize=16)
def harmonics(size: int) -> tuple[Tensor, Tensor]:
    """The best harmonics for as many base weights as lie on the disc: (size², K) complex, and their frequencies (K,).

    Those of m = 0 are real and take one weight, all others two. All together are as loud as bilinear kernels
    at 0°; single ones are the louder the more faithful and the smoother they are.
    """
    modes = [mode for frequency in range(2 * size - 1) for mode in _find_modes(size, frequency)]
    taps = left = int(disc(size).sum())
    chosen = []
    for mode in sorted(modes, key=lambda mode: -mode.share):
        needed = 2 if mode.frequency else 1
        if needed <= left:
            chosen.append(mode)
            left -= needed
    chosen.sort(key=lambda mode: mode.frequency)  # within a frequency the best stays first
    frequencies = torch.tensor([float(mode.frequency) for mode in chosen], dtype=torch.float64, device="cpu")
    kernels = torch.stack([mode.kernel * mode.share * mode.energy**LOUDNESS for mode in chosen], dim=1)
    energy = (kernels.abs().square() * (1 + (frequencies > 0))).sum()
    return kernels * torch.sqrt(taps / energy), frequencies


def _find_modes(size: int, frequency: int) -> list[_Mode]:
    """Orthonormal kernels of one frequency, the best first."""
    basis = _symmetric_kernels(size, frequency)  # (size², Q)
    covariance = _covariance(size)
    noise = NOISE * torch.eye(basis.shape[1], dtype=torch.float64, device="cpu")
    whole = (basis.mH @ covariance[0] @ basis).real + noise
    phases = torch.polar(torch.ones_like(_turns()), frequency * _turns())
    turning = (basis.mH @ torch.tensordot(phases, covariance, dims=1) @ basis).real / TURNS
    whiten = torch.linalg.inv(torch.linalg.cholesky(whole))
    shares, vectors = torch.linalg.eigh(whiten @ turning @ whiten.T)
    vectors, _ = torch.linalg.qr((whiten.T @ vectors).flip(1))
    # Neither eigenvectors nor QR have a sign of their own, and learned weights must mean the same on every machine.
    radius = torch.complex(*positions(size)).abs()
    reference = torch.stack([radius ** (frequency + 2 * i) for i in range(basis.shape[1])], dim=1)
    reference = (basis.mH @ (_phases(size, frequency)[:, None] * reference)).real
    vectors = vectors * torch.sign((reference * vectors).sum(dim=0))
    energies = (vectors * (turning @ vectors)).sum(dim=0)
    kernels = (basis @ vectors.to(basis)).unbind(dim=1)
    return [
        _Mode(float(share), float(energy), frequency, kernel)
        for share, energy, kernel in zip(shares.flip(0), energies, kernels, strict=True)
    ]


def _symmetric_kernels(size: int, frequency: int) -> Tensor:
    """A basis of the kernels that turn exactly by 90°, and that a reflection turns into their conjugates: (size², Q).

    All harmonics on the square are real combinations of these, which leaves their phase no choice.
    """
    x, y = positions(size)
    far, near = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    hand = torch.sign(x * y * (x.square() - y.square()))  # which of a point and its mirror image; 0 on the mirrors
    phases = _phases(size, frequency)
    columns = []
    for a in range(size // 2 + 1):
        for b in range(a + 1):
            orbit = (far == a) & (near == b)
            if a == 0 and frequency % 4:
                continue  # the centre stands still
            columns.append(phases * orbit)
            if 0 < b < a:
                columns.append(1j * phases * hand * orbit)
    basis = torch.stack(columns, dim=1)
    return basis / basis.abs().square().sum(dim=0).sqrt()


def _phases(size: int, frequency: int) -> Tensor:
    """exp(imφ) at every position."""
    angle = torch.complex(*positions(size)).angle()
    return torch.polar(torch.ones_like(angle), frequency * angle)


@lru_cache(maxsize=16)
def _covariance(size: int) -> Tensor:
    """Of the images at two positions, the second one turned: (TURNS, size², size²)."""
    place = torch.complex(*positions(size))
    turned = place * torch.polar(torch.ones_like(_turns()), _turns())[:, None]  # (TURNS, size²)
    squared = (place[:, None] - turned[:, None, :]).abs().square()
    covariance = torch.stack([torch.exp(-squared / (2 * blob) ** 2) for blob in BLOBS_PX]).mean(dim=0)
    return covariance.to(torch.complex128)


def _turns() -> Tensor:
    """Angles in the first quadrant, which stand for those in all, as the kernels turn exactly by 90°."""
    return math.pi / 2 / TURNS * torch.arange(TURNS, dtype=torch.float64, device="cpu")


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


def rotation_map(size: int, orientations: int, kernel: str = "bilinear", reflections: bool = False) -> Tensor:
    """The linear map from base weights to rotated kernels, (N, size², P), in float64; with reflections (2N, size², P).

    Row r of slice i holds what entry r of the kernel turned by θᵢ reads from the P base weights, by one of the families
    of KERNELS. A turn by 90° permutes the rows of the map, so it is exact wherever N allows it; and so does a
    reflection, whatever N is: mirrored, then turned by θᵢ, is turned by -θᵢ, then mirrored.
    """
    check_orientations(orientations)
    if kernel not in FAMILIES:
        raise ValueError(f"kernel must be one of {', '.join(map(repr, FAMILIES))}; got {kernel!r}.")
    slices = []
    for i in range(orientations):
        # Only the part of the angle below 90° is computed in floating point; whole quarter turns permute.
        quarters, rest = divmod(4 * i, orientations)
        reads = FAMILIES[kernel](size, math.pi / 2 * rest / orientations)  # (size², P)
        slices.append(torch.rot90(reads.view(size, size, -1), quarters, (0, 1)).flatten(0, 1))
    if reflections:
        mirrored = [slices[-i % orientations].view(size, size, -1).flip(1) for i in range(orientations)]
        slices += [each.flatten(0, 1) for each in mirrored]
    return torch.stack(slices)


def effective_taps(size: int, orientations: int, correlation: float, kernel: str = "bilinear") -> float:
    """How many base weights a rotated kernel brings to bear on a patch, averaged over orientations.

    Bilinear interpolation, and the rim of the disc, pass on less than the variance of all P base weights at angles off
    the pixel grid: 86 % of it at 45° (5×5) where the patch is constant, 43 % where its pixels are uncorrelated.
    `correlation` tells where between the two a patch lies.
    """
    rotation = rotation_map(size, orientations, kernel)
    constant = rotation.sum(dim=1).square().sum(dim=1).mean()
    uncorrelated = rotation.square().sum(dim=(1, 2)).mean()
    return float(correlation * constant + (1 - correlation) * uncorrelated)


def lift_kernels(weight: Tensor, rotation: Tensor) -> Tensor:
    """Base weights (O, C, P) of a lifting layer to the weights (O·N, C, n, n) of an ordinary convolution."""
    kernels = torch.einsum("ocp,irp->oirc", weight, rotation)
    return _as_conv2d_weight(kernels)


def group_kernels(weight: Tensor, rotation: Tensor, reflections: bool = False) -> Tensor:
    """Base weights (O, C, N, P) of a group convolution to the weights (O·N, C·N, n, n) of an ordinary one.

    With reflections, N here counts all entries of the orientation axis.
    """
    orientations = weight.shape[2] // 2 if reflections else weight.shape[2]
    shift = orientation_shift(orientations, weight.device, reflections)
    twisted = weight[:, :, shift]  # (O, C, N, N, P), the two N for output and input orientation
    kernels = torch.einsum("ocijp,irp->oircj", twisted, rotation).flatten(3)  # (O, N, n², C·N)
    return _as_conv2d_weight(kernels)


def _as_conv2d_weight(kernels: Tensor) -> Tensor:
    """(O, N, n², C) to (O·N, C, n, n), channels last in memory."""
    size = math.isqrt(kernels.shape[2])
    outputs, orientations, _, inputs = kernels.shape
    # Where there is one orientation only, reshaping alone would leave them as einsum did.
    return kernels.reshape(outputs * orientations, size, size, inputs).contiguous().permute(0, 3, 1, 2)
