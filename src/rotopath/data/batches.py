"""Batches: windows cut out where a sampler says, and augmented on the device.

In: pixels and a sampler, which a task makes. Out: for any step its batch, the same bytes from any cache and with any
number of workers; an epoch is a range of steps, and an interrupted one resumes with those that are left.
"""

import os
from collections.abc import Iterable, Iterator
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rotopath import group
from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, Changes, augment
from rotopath.data.pixels import Pixels
from rotopath.data.sampling import Sampler
from rotopath.images.files import UnreadableFileError
from rotopath.nn import center_crop

CPU = torch.device("cpu")


class Batch(NamedTuple):
    """Windows as they were cut out, and what is to happen to them."""

    windows: Tensor  # (B, 3 + k, s, s) bytes: red, green, blue, and k target maps
    labels: Tensor  # (B,)
    changes: Changes


class Batches(Dataset[Batch]):
    """All batches that there will ever be: `batches[step]` is the one of that step."""

    def __init__(
        self,
        pixels: Pixels,
        sampler: Sampler,
        window_px: int,
        target_px: int | None = None,
        augmentation: Augmentation = NO_AUGMENTATION,
        seed: int = 0,
    ) -> None:
        self.pixels, self.sampler, self.augmentation = pixels, sampler, augmentation
        self._window_px, self._target_px, self._seed = window_px, target_px, seed
        # The corners of a window that is turned freely come from around it.
        self._cut_px = group.covering_size(window_px) if augmentation.free_rotation else window_px
        self._rank, self._shares = 0, 1

    def share(self, rank: int, count: int) -> "Batches":
        """The same batches, but only every `count`-th window of each, for one of several processes."""
        part = copy(self)
        part._rank, part._shares = rank, count
        return part

    def __getitem__(self, step: int) -> Batch:
        """The batch of a step."""
        places = self.sampler.places(step)
        margin = (self._cut_px - self._window_px) // 2
        places = places._replace(tops=places.tops - margin, lefts=places.lefts - margin)
        changes = self.augmentation.draw(len(places.images), np.random.default_rng([self._seed, 3, step]))
        places, changes = places.share(self._rank, self._shares), changes.share(self._rank, self._shares)
        return Batch(self.pixels.windows(places, self._cut_px), torch.from_numpy(places.labels), changes)

    def load(
        self, steps: Iterable[int], device: torch.device = CPU, workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Images (B, 3, s, s) from 0 to 1 and their targets, for the steps in their order, augmented on the device.

        Targets are labels (B,), or target maps (B, t, t), or (B, k, t, t) where there are several. Workers read ahead
        where pixels are in files.
        """
        read_ahead = workers > 0 and self.pixels.in_files
        batches = self._read_ahead(steps, device, workers) if read_ahead else (self[step] for step in steps)
        for batch in batches:
            yield self.finish(batch, device)

    def _read_ahead(self, steps: Iterable[int], device: torch.device, workers: int) -> Iterator[Batch]:
        loader = DataLoader(
            _CarryingErrors(self),
            batch_size=None,
            sampler=steps,
            num_workers=min(workers, count_cores()),
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # its own, so that reading data leaves the model's random numbers alone
        )
        for batch in loader:
            if isinstance(batch, UnreadableFileError):
                raise batch
            yield batch

    def finish(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """A batch moved to the device and augmented there."""
        windows = batch.windows.to(device, non_blocking=True)
        images, maps = augment(windows, batch.changes.to(device), self._window_px)
        if maps is None:
            return images, batch.labels.to(device, non_blocking=True)
        target_px = self._target_px or self._window_px
        targets = center_crop(maps, target_px, target_px)
        return images, targets[:, 0] if targets.shape[1] == 1 else targets


class _CarryingErrors(Dataset[Batch | UnreadableFileError]):
    """Hands an unreadable file over as it is; a worker that raised it would wrap the sentence into a traceback."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __getitem__(self, step: int) -> Batch | UnreadableFileError:
        try:
            return self._batches[step]
        except UnreadableFileError as error:
            return error


def count_cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
