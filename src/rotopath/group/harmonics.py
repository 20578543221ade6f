"""Circular harmonics on pixels: the kernels that stay the most like themselves when an image turns under them.

A kernel u is a harmonic of frequency m if a turn of the image by θ multiplies its response by exp(imθ). On pixels none
is, quite. But for images of known covariance the share of the response that does so is a quotient of two quadratic
forms, and its best kernels are eigenvectors.
"""

import math
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from rotopath.group.grid import disc, positions

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
