"""Base weights to rotated kernels: one fixed linear map, and the shift along θ that belongs to it."""

import math

import torch
from torch import Tensor

from rotopath.group.elements import orientation_shift
from rotopath.group.families import FAMILIES
from rotopath.group.grid import check_orientations


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
