"""Augment the windows of a batch by random changes of geometry, stain, brightness and sharpness.

`Augmentation.draw` draws the random changes, separately for each window. `augment` applies the changes on the device
that holds the batch: first flips, rotations, scaling and elastic deformation, then changes of stain, brightness,
sharpness (blur) and JPEG compression. Target maps move together with their images.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from scipy.fft import dct
from torch import Tensor
from torch.nn import functional

from rotopath import group
from rotopath.images.stain import REFERENCE_STAINS, WHITE
from rotopath.nn import center_crop

ELASTIC_POINTS = 5  # random shifts along each side of a window, between which shifts are interpolated
BLUR_REACH = 3  # radius of the Gaussian filter in standard deviations
OWN_STAIN = 0.1  # default of `stain` in recipes that are not for a task of the paper


class DrawnChanges(NamedTuple):
    """Random changes for B windows. None means no change of this type."""

    symmetries: Tensor  # (B,): number s from 0 to 7; if s ≥ 4, swap rows and columns; then rotate by 90° · (s mod 4)
    degrees: Tensor | None  # (B,): angle of an additional counter-clockwise rotation
    stains: Tensor | None  # (B, 2): factors for the concentrations of hematoxylin and eosin
    brightness: Tensor  # (B, 3): added to red, green and blue, as a fraction of full brightness
    scales: Tensor | None = None  # (B,): factors by which windows are enlarged
    shifts: Tensor | None = None  # (B, 2, p, p): shifts down and right, in px, at p × p positions over the window
    blurs: Tensor | None = None  # (B,): standard deviations of the Gaussian filter in px
    qualities: Tensor | None = None  # (B,): JPEG quality, 1 to 100

    def to(self, device: torch.device) -> "DrawnChanges":
        """Return the same changes with all tensors on the device."""
        return self._map(lambda values: values.to(device, non_blocking=True))

    def shard(self, rank: int, count: int) -> "DrawnChanges":
        """Return the changes for the windows of one training process; `Windows.shard` selects the same windows.

        There are `count` processes. Process `rank` (0 to count - 1) has windows rank, rank + count, and so on.
        """
        return self._map(lambda values: values[rank::count])

    def _map(self, function: Callable[[Tensor], Tensor]) -> "DrawnChanges":
        return DrawnChanges(*(None if values is None else function(values) for values in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Augmentation:
    """Types and strengths of random changes. The defaults are those of Lafarge et al. (arXiv:2002.08725).

    >>> import numpy as np
    >>> from rotopath.data import Augmentation
    >>> Augmentation(brightness=0.2).draw(count=4, generator=np.random.default_rng(0)).brightness.shape
    torch.Size([4, 3])
    """

    transpose: bool = True  # swap rows and columns of each window with a probability of 1/2
    quarter_turns: bool = True  # rotate each window by a random multiple of 90°
    free_rotation: bool = False  # also rotate each window by a random angle; for networks that are not equivariant
    brightness: float = 0.1  # largest shift of a color channel, as a fraction of full brightness
    # Largest relative change of the concentration of a stain; 0.1 is ±10 %. None means 0; a recipe replaces it by 0.1,
    # unless its task is one of the paper.
    stain: float | None = None
    scale: float = 0.0  # largest relative change of the size of the tissue; 0.1 is ±10 %
    elastic: float = 0.0  # largest shift of a pixel by elastic deformation, in px; the center does not move
    blur: float = 0.0  # largest standard deviation of a Gaussian filter, in px
    jpeg: int = 100  # lowest quality of JPEG compression; 100: no compression

    def __post_init__(self) -> None:
        bounds = {"brightness": (0, 1), "stain": (0, 1), "scale": (0, 0.5)}
        for name, (low, high) in bounds.items():
            amount = getattr(self, name) or 0.0
            if not low <= amount < high:
                raise ValueError(f"The augmentation {name!r} is {amount}; expected a fraction from 0 to below {high}.")
        for name, low, high in (("elastic", 0, 10), ("blur", 0, 10), ("jpeg", 10, 100)):
            if not low <= getattr(self, name) <= high:
                raise ValueError(
                    f"The augmentation {name!r} is {getattr(self, name)}; expected a number from {low} to {high}."
                )

    def cut_px(self, window_px: int) -> int:
        """Return the side of the square that must be cut from an image, in px, to augment a window inside it.

        The square is larger than the window if pixels from outside the window are moved into it.
        """
        size = math.ceil(window_px / (1 - self.scale)) + 2 * math.ceil(self.elastic)
        size += (size - window_px) % 2
        return group.covering_size(size) if self.free_rotation else size

    def draw(self, count: int, generator: np.random.Generator) -> DrawnChanges:
        """Draw random changes for `count` windows.

        Enabling or disabling one type of change does not affect the random values of the other types.
        """
        transposed, quarters = generator.integers(2, size=count), generator.integers(4, size=count)
        degrees = generator.uniform(0, 360, count)
        stain = self.stain or 0.0
        stains = generator.uniform(1 - stain, 1 + stain, (count, 2))
        brightness = generator.uniform(-self.brightness, self.brightness, (count, 3))
        drawn = DrawnChanges(
            torch.from_numpy(4 * transposed * self.transpose + quarters * self.quarter_turns),
            torch.from_numpy(degrees).float() if self.free_rotation else None,
            torch.from_numpy(stains).float() if stain else None,
            torch.from_numpy(brightness).float(),
        )
        if not (self.scale or self.elastic or self.blur or self.jpeg < 100):
            return drawn
        scales, blurs, qualities = generator.uniform(size=(3, count))
        # A shift relative to that of the center is at most twice as large as a shift.
        shifts = generator.uniform(-self.elastic / 2, self.elastic / 2, (count, 2, ELASTIC_POINTS, ELASTIC_POINTS))
        return drawn._replace(
            scales=torch.from_numpy(1 + self.scale * (2 * scales - 1)).float() if self.scale else None,
            shifts=torch.from_numpy(shifts).float() if self.elastic else None,
            blurs=torch.from_numpy(self.blur * blurs).float() if self.blur else None,
            qualities=torch.from_numpy(self.jpeg + (100 - self.jpeg) * qualities).float() if self.jpeg < 100 else None,
        )


NO_AUGMENTATION = Augmentation(transpose=False, quarter_turns=False, brightness=0.0)
# Each type of change by itself, in a strength that suits most slides
EXAMPLES = {
    "transpose": Augmentation(transpose=True, quarter_turns=False, brightness=0.0),
    "quarter_turns": Augmentation(transpose=False, brightness=0.0),
    "free_rotation": Augmentation(transpose=False, quarter_turns=False, free_rotation=True, brightness=0.0),
    "brightness = 0.1": Augmentation(transpose=False, quarter_turns=False, brightness=0.1),
    "stain = 0.1": Augmentation(transpose=False, quarter_turns=False, brightness=0.0, stain=0.1),
    "scale = 0.1": Augmentation(transpose=False, quarter_turns=False, brightness=0.0, scale=0.1),
    "elastic = 4": Augmentation(transpose=False, quarter_turns=False, brightness=0.0, elastic=4.0),
    "blur = 1.5": Augmentation(transpose=False, quarter_turns=False, brightness=0.0, blur=1.5),
    "jpeg = 30": Augmentation(transpose=False, quarter_turns=False, brightness=0.0, jpeg=30),
}


def augment(windows: Tensor, changes: DrawnChanges, size_px: int) -> tuple[Tensor, Tensor | None]:
    """Apply random changes to windows (B, 3 + k, s, s) of bytes: red, green, blue, and k target maps.

    Returns the central squares of the changed windows: images (B, 3, size_px, size_px) as floats from 0 to 1, and
    target maps (B, k, size_px, size_px) as integers, or None if there are no target maps. s must be at least
    `Augmentation.cut_px(size_px)`, because pixels around the central square may move into the square.
    """
    windows = _warp(windows, changes)
    windows = group.apply_symmetries(center_crop(windows, size_px, size_px), changes.symmetries)
    images = windows[:, :3].to(torch.float32) / 255
    if changes.stains is not None:
        images = change_stains(images, changes.stains)
    images = (images + changes.brightness[:, :, None, None]).clamp(0, 1)
    if changes.blurs is not None:
        images = blur_each(images, changes.blurs)
    if changes.qualities is not None:
        images = compress_each(images, changes.qualities)
    return images, windows[:, 3:].long() if windows.shape[1] > 3 else None


def _warp(windows: Tensor, changes: DrawnChanges) -> Tensor:
    """Rotate, scale and deform windows. Images are interpolated; target maps take the value of the nearest pixel."""
    if changes.degrees is None and changes.scales is None and changes.shifts is None:
        return windows
    degrees = torch.zeros_like(changes.brightness[:, 0]) if changes.degrees is None else changes.degrees
    shifts = None if changes.shifts is None else interpolate_shifts(changes.shifts, windows.shape[-1])
    images, targets = windows[:, :3], windows[:, 3:]
    warped = [group.warp_each(images, degrees, changes.scales, shifts)]
    if targets.shape[1]:
        warped.append(group.warp_each(targets, degrees, changes.scales, shifts, nearest=True))
    return torch.cat(warped, dim=1)


def interpolate_shifts(shifts: Tensor, size_px: int) -> Tensor:
    """Interpolate shifts (B, 2, p, p) at p × p positions to shifts (B, 2, s, s) of all pixels, with s = `size_px`.

    The center of the window has no shift, so that an object there stays where it is.
    """
    smooth = functional.interpolate(shifts, (size_px, size_px), mode="bicubic", align_corners=True)
    lowest, highest = shifts.amin(dim=(1, 2, 3), keepdim=True), shifts.amax(dim=(1, 2, 3), keepdim=True)
    smooth = smooth.clamp(lowest, highest)  # bicubic interpolation may overshoot
    middle = slice((size_px - 1) // 2, size_px // 2 + 1)  # one pixel, or two if the size is even
    return smooth - smooth[:, :, middle, middle].mean(dim=(2, 3), keepdim=True)


def change_stains(images: Tensor, factors: Tensor) -> Tensor:
    """Multiply the concentrations of hematoxylin and eosin in images (B, 3, H, W) by factors (B, 2).

    Values of images are from 0 to 1. Returns the changed images.
    """
    stains, unmixing = (matrix.to(images) for matrix in _stain_matrices())
    factors = torch.cat([factors, torch.ones_like(factors[:, :1])], dim=1)  # the third component does not change
    change = torch.einsum("rs,bs,sc->brc", stains, factors, unmixing)  # (B, 3, 3), to be multiplied by densities
    density = -torch.log((255 * images + 1) / WHITE)
    changed = torch.einsum("brc,bchw->brhw", change, density)
    return (WHITE * torch.exp(-changed) - 1) / 255


@cache
def _stain_matrices() -> tuple[Tensor, Tensor]:
    """Return a matrix (3, 3) of optical densities of the reference stains, and its inverse.

    The columns of the matrix are hematoxylin, eosin, and the direction orthogonal to both; its rows are red, green and
    blue.
    """
    orthogonal = np.cross(REFERENCE_STAINS[:, 0], REFERENCE_STAINS[:, 1])
    stains = np.column_stack([REFERENCE_STAINS, orthogonal / np.linalg.norm(orthogonal)])
    return torch.from_numpy(stains), torch.from_numpy(np.linalg.inv(stains))


def blur_each(images: Tensor, sigmas: Tensor) -> Tensor:
    """Blur each image of a batch (B, 3, H, W) by a Gaussian filter with its own standard deviation (B,), in px.

    Images are continued by reflection at their edges.
    """
    count, channels, height, width = images.shape
    radius = min(math.ceil(BLUR_REACH * float(sigmas.max())), height - 1, width - 1)
    offsets = torch.arange(-radius, radius + 1, device=images.device)
    weights = torch.exp(-0.5 * (offsets / sigmas.clamp(min=1e-3)[:, None]) ** 2)
    kernels = (weights / weights.sum(dim=1, keepdim=True)).repeat_interleave(channels, dim=0)  # (B · 3, 2r + 1)
    planes = functional.pad(images.reshape(1, -1, height, width), [radius] * 4, mode="reflect")
    planes = functional.conv2d(planes, kernels[:, None, :, None], groups=count * channels)
    planes = functional.conv2d(planes, kernels[:, None, None, :], groups=count * channels)
    return planes.reshape(images.shape)


def compress_each(images: Tensor, qualities: Tensor) -> Tensor:
    """Return images (B, 3, H, W) from 0 to 1 as JPEG compression changes them, each with its own quality (B,).

    The quality is from 1 to 100. As in JPEG, blocks of 8 × 8 px of luma and chroma are transformed by a discrete cosine
    transform, and the coefficients are rounded to multiples of the steps in the standard's tables. Chroma is not
    subsampled.
    """
    to_luma, cosines, tables = (matrix.to(images) for matrix in _jpeg_matrices())
    height, width = images.shape[-2:]
    padded = functional.pad(255 * images, [0, -width % 8, 0, -height % 8], mode="replicate")
    planes = torch.einsum("yc,bchw->byhw", to_luma, padded)
    planes[:, 0] -= 128
    blocks = planes.reshape(len(images), 3, planes.shape[2] // 8, 8, -1, 8)  # (B, 3, rows, 8, columns, 8)
    percent = torch.where(qualities < 50, 5000 / qualities, 200 - 2 * qualities)  # the rule of libjpeg
    steps = ((tables * percent[:, None, None, None] + 50) / 100).floor().clamp(1, 255)[:, :, None, :, None, :]
    coefficients = torch.einsum("ui,bcriks,vs->bcrukv", cosines, blocks, cosines)
    blocks = torch.einsum("ui,bcrukv,vs->bcriks", cosines, (coefficients / steps).round() * steps, cosines)
    planes = blocks.reshape(planes.shape)
    planes[:, 0] += 128
    rgb = torch.einsum("cy,byhw->bchw", torch.linalg.inv(to_luma), planes)
    return (rgb[:, :, :height, :width].round() / 255).clamp(0, 1)


@cache
def _jpeg_matrices() -> tuple[Tensor, Tensor, Tensor]:
    """Return three arrays: from RGB to luma and two chromas (3, 3), the cosine transform (8, 8), and steps (3, 8, 8).

    The steps are those of the tables K.1 and K.2 in the JPEG standard (ITU-T T.81), for quality 50.
    """
    luma = np.array([0.299, 0.587, 0.114])
    blue, red = (np.eye(3)[2] - luma) / 1.772, (np.eye(3)[0] - luma) / 1.402
    cosines = dct(np.eye(8), axis=0, norm="ortho")
    luma_steps = [
        [16, 11, 10, 16, 24, 40, 51, 61],
        [12, 12, 14, 19, 26, 58, 60, 55],
        [14, 13, 16, 24, 40, 57, 69, 56],
        [14, 17, 22, 29, 51, 87, 80, 62],
        [18, 22, 37, 56, 68, 109, 103, 77],
        [24, 35, 55, 64, 81, 104, 113, 92],
        [49, 64, 78, 87, 103, 121, 120, 101],
        [72, 92, 95, 98, 112, 100, 103, 99],
    ]
    chroma_steps = np.full((8, 8), 99)
    chroma_steps[:4, :4] = [[17, 18, 24, 47], [18, 21, 26, 66], [24, 26, 56, 99], [47, 66, 99, 99]]
    tables = np.stack([luma_steps, chroma_steps, chroma_steps])
    return torch.from_numpy(np.stack([luma, blue, red])), torch.from_numpy(cosines), torch.from_numpy(tables)
