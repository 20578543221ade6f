"""Augment the windows of a batch by random flips, rotations, and changes of brightness and stain.

`Augmentation.draw` draws the random changes, separately for each window. `augment` applies the changes on the device
that holds the batch. Target maps are flipped and rotated together with their images.
"""

from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rotopath import group
from rotopath.images.stain import REFERENCE_STAINS, WHITE
from rotopath.nn import center_crop


class DrawnChanges(NamedTuple):
    """Random changes for B windows."""

    symmetries: Tensor  # (B,): number s from 0 to 7; if s ≥ 4, swap rows and columns; then rotate by 90° · (s mod 4)
    degrees: Tensor | None  # (B,): angle of an additional counter-clockwise rotation; None: no rotation
    stains: Tensor | None  # (B, 2): factors for the concentrations of hematoxylin and eosin; None: no change
    brightness: Tensor  # (B, 3): added to red, green and blue, as a fraction of full brightness

    def to(self, device: torch.device) -> "DrawnChanges":
        """Return the same changes with all tensors on the device."""
        return DrawnChanges(
            self.symmetries.to(device, non_blocking=True),
            None if self.degrees is None else self.degrees.to(device, non_blocking=True),
            None if self.stains is None else self.stains.to(device, non_blocking=True),
            self.brightness.to(device, non_blocking=True),
        )

    def shard(self, rank: int, count: int) -> "DrawnChanges":
        """Return the changes for the windows of one training process; `Windows.shard` selects the same windows.

        There are `count` processes. Process `rank` (0 to count - 1) has windows rank, rank + count, and so on.
        """
        return DrawnChanges(
            self.symmetries[rank::count],
            None if self.degrees is None else self.degrees[rank::count],
            None if self.stains is None else self.stains[rank::count],
            self.brightness[rank::count],
        )


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
    stain: float = 0.0  # largest relative change of the concentration of a stain; 0.1 is ±10 %

    def __post_init__(self) -> None:
        for name, amount in (("brightness", self.brightness), ("stain", self.stain)):
            if not 0 <= amount < 1:
                raise ValueError(f"The augmentation {name!r} is {amount}; expected a fraction from 0 to below 1.")

    def draw(self, count: int, generator: np.random.Generator) -> DrawnChanges:
        """Draw random changes for `count` windows.

        Enabling or disabling one type of change does not affect the random values of the other types.
        """
        transposed, quarters = generator.integers(2, size=count), generator.integers(4, size=count)
        degrees = generator.uniform(0, 360, count)
        stains = generator.uniform(1 - self.stain, 1 + self.stain, (count, 2))
        brightness = generator.uniform(-self.brightness, self.brightness, (count, 3))
        return DrawnChanges(
            torch.from_numpy(4 * transposed * self.transpose + quarters * self.quarter_turns),
            torch.from_numpy(degrees).float() if self.free_rotation else None,
            torch.from_numpy(stains).float() if self.stain else None,
            torch.from_numpy(brightness).float(),
        )


NO_AUGMENTATION = Augmentation(transpose=False, quarter_turns=False, brightness=0.0)


def augment(windows: Tensor, changes: DrawnChanges, size_px: int) -> tuple[Tensor, Tensor | None]:
    """Apply random changes to windows (B, 3 + k, s, s) of bytes: red, green, blue, and k target maps.

    Returns the central squares of the changed windows: images (B, 3, size_px, size_px) as floats from 0 to 1, and
    target maps (B, k, size_px, size_px) as integers, or None if there are no target maps. For rotations by any angle, s
    must be at least `group.covering_size(size_px)`, about √2 · `size_px`: pixels around the central square move into
    the corners of the square.
    """
    if changes.degrees is not None:
        images, targets = windows[:, :3], windows[:, 3:]
        rotated = [group.rotate_each(images, changes.degrees)]
        if targets.shape[1]:
            rotated.append(group.rotate_each(targets, changes.degrees, nearest=True))
        windows = torch.cat(rotated, dim=1)
    windows = group.apply_symmetries(center_crop(windows, size_px, size_px), changes.symmetries)
    images = windows[:, :3].to(torch.float32) / 255
    if changes.stains is not None:
        images = change_stains(images, changes.stains)
    images = (images + changes.brightness[:, :, None, None]).clamp(0, 1)
    return images, windows[:, 3:].long() if windows.shape[1] > 3 else None


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
