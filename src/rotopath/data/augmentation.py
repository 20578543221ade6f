"""Augmentation: every window of a batch turned, transposed and coloured in a way of its own.

In: a batch of bytes, and changes drawn for it. Out: floats from 0 to 1, and class maps that moved along. What is drawn
depends on a seed only; what is computed runs on whichever device the batch is on.
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


class Changes(NamedTuple):
    """What happens to each of B windows."""

    symmetries: Tensor  # (B,) of the square, 0 to 7
    degrees: Tensor | None  # (B,) of a free rotation
    stains: Tensor | None  # (B, 2) factors of hematoxylin and eosin
    brightness: Tensor  # (B, 3) added to red, green and blue, in units of full brightness

    def to(self, device: torch.device) -> "Changes":
        return Changes(
            self.symmetries.to(device, non_blocking=True),
            None if self.degrees is None else self.degrees.to(device, non_blocking=True),
            None if self.stains is None else self.stains.to(device, non_blocking=True),
            self.brightness.to(device, non_blocking=True),
        )

    def shard(self, rank: int, count: int) -> "Changes":
        """Every `count`-th window's, from that of number `rank`."""
        return Changes(*(None if one is None else one[rank::count] for one in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Augmentation:
    """How much windows are changed; as it stands, the paper's transpositions, quarter turns and brightness."""

    transpose: bool = True
    quarter_turns: bool = True
    free_rotation: bool = False  # by any angle, for baselines that are to learn what others have built in
    brightness: float = 0.1  # the largest shift of a channel, of full brightness
    stain: float = 0.0  # the largest change of a stain's strength, as a fraction of it

    def __post_init__(self) -> None:
        for name, amount in (("brightness", self.brightness), ("stain", self.stain)):
            if not 0 <= amount < 1:
                raise ValueError(f"The augmentation {name!r} is a fraction from 0 to below 1; got {amount}.")

    def draw(self, count: int, generator: np.random.Generator) -> Changes:
        """Changes for `count` windows. Switching one kind off leaves what is drawn for the others as it was."""
        transposed, quarters = generator.integers(2, size=count), generator.integers(4, size=count)
        degrees = generator.uniform(0, 360, count)
        stains = generator.uniform(1 - self.stain, 1 + self.stain, (count, 2))
        brightness = generator.uniform(-self.brightness, self.brightness, (count, 3))
        return Changes(
            torch.from_numpy(4 * transposed * self.transpose + quarters * self.quarter_turns),
            torch.from_numpy(degrees).float() if self.free_rotation else None,
            torch.from_numpy(stains).float() if self.stain else None,
            torch.from_numpy(brightness).float(),
        )


NO_AUGMENTATION = Augmentation(transpose=False, quarter_turns=False, brightness=0.0)


def augment(windows: Tensor, changes: Changes, size_px: int) -> tuple[Tensor, Tensor | None]:
    """Windows (B, 3 + k, s, s) of bytes to images (B, 3, size, size) of floats, and k target maps that move along.

    Windows may be larger than `size_px`, for the corners of a free rotation to come from; the middle is kept.
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
    """Images (B, 3, H, W) with hematoxylin and eosin made stronger or weaker by factors (B, 2); white stays white."""
    stains, unmixing = (matrix.to(images) for matrix in _stain_matrices())
    factors = torch.cat([factors, torch.ones_like(factors[:, :1])], dim=1)  # what is neither stays
    change = torch.einsum("rs,bs,sc->brc", stains, factors, unmixing)  # (B, 3, 3), from densities to densities
    density = -torch.log((255 * images + 1) / WHITE)
    changed = torch.einsum("brc,bchw->brhw", change, density)
    return (WHITE * torch.exp(-changed) - 1) / 255


@cache
def _stain_matrices() -> tuple[Tensor, Tensor]:
    """Densities of hematoxylin, eosin and what is at right angles to both, as columns; and the inverse."""
    rest = np.cross(REFERENCE_STAINS[:, 0], REFERENCE_STAINS[:, 1])
    stains = np.column_stack([REFERENCE_STAINS, rest / np.linalg.norm(rest)])
    return torch.from_numpy(stains), torch.from_numpy(np.linalg.inv(stains))
