"""Batches: sampled, cut out, and augmented on the device.

In: pictures of one split, and what the model wants. Out: for any step its batch, the same bytes from any cache and with
any number of workers; an epoch is a range of steps, and one that was interrupted goes on with those that are left.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import copy
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from rotopath import group
from rotopath.data.annotations import read_points
from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, Changes, augment
from rotopath.data.collection import MODEL_SPACING_UM_PX, DataError, Picture, Task
from rotopath.data.pixels import Cache, Pixels, Reader, open_pixels
from rotopath.data.sampling import Ints, MiddleWindows, MitosisWindows, NucleiWindows, Sampler, TumorWindows
from rotopath.images.files import UnreadableFileError
from rotopath.nn import center_crop

BATCH: Mapping[Task, int] = {"mitosis": 64, "nuclei": 16, "tumor": 64}  # as in the paper
CPU = torch.device("cpu")


class Batch(NamedTuple):
    """Windows as they were cut out, and what is to happen to them."""

    windows: Tensor  # (B, 3 or 4, s, s) bytes: red, green, blue, and for nuclei a map of classes
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

        Targets are labels (B,), or for nuclei maps of classes (B, t, t). Workers read ahead where pixels are in files.
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
        images, classes = augment(windows, batch.changes.to(device), self._window_px)
        if classes is None:
            return images, batch.labels.to(device, non_blocking=True)
        target_px = self._target_px or self._window_px
        return images, center_crop(classes, target_px, target_px)


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


def sampled_batches(
    task: Task,
    pictures: Sequence[Picture],
    window_px: int,
    target_px: int | None = None,
    batch: int | None = None,
    augmentation: Augmentation = NO_AUGMENTATION,
    seed: int = 0,
    cache: Cache = "auto",
    device: torch.device = CPU,
    mined: Ints | None = None,
) -> Batches:
    """Balanced batches of random windows, as a task is trained on: over classes, or for nuclei over patients.

    `mined` adds examples that a model found hard: indices of patches (tumor), or (image, row, column) of places that
    are no mitoses.
    """
    batch = BATCH[task] if batch is None else batch
    if batch < 1 or seed < 0:
        raise DataError(f"A batch has 1 or more windows, and a seed is 0 or more; got {batch} and {seed}.")
    if mined is not None and len(mined) and not 0 <= mined.reshape(len(mined), -1)[:, 0].max() < len(pictures):
        raise DataError(f"The mined examples name images that are not among the {len(pictures)} of the training set.")
    pixels = open_pixels(pictures, reader_of(task), cache, device)
    sizes = pixels.sizes_px
    sampler: Sampler
    if task == "tumor":
        sampler = TumorWindows(_labels(pictures), sizes, window_px, batch, seed, mined)
    elif task == "mitosis":
        points = [read_points(picture, MODEL_SPACING_UM_PX[task]) for picture in pictures]
        sampler = MitosisWindows(points, sizes, window_px, batch, seed, mined)
    else:
        patients = [picture.case for picture in pictures]
        sampler = NucleiWindows(patients, sizes, window_px, target_px or window_px, batch, seed)
    return Batches(pixels, sampler, window_px, target_px, augmentation, seed)


def middle_batches(
    pictures: Sequence[Picture], window_px: int, batch: int = 256, cache: Cache = "auto", device: torch.device = CPU
) -> tuple[Batches, range]:
    """The middle of every patch, in order, for validation and testing, and the steps that bring each of them once."""
    pixels = open_pixels(pictures, reader_of("tumor"), cache, device)
    sampler = MiddleWindows(_labels(pictures), pixels.sizes_px, window_px, batch)
    return Batches(pixels, sampler, window_px), range(len(sampler))


def reader_of(task: Task) -> Reader:
    """How the paper's networks want their images: stains normalised for nuclei only."""
    nuclei = task == "nuclei"
    return Reader(MODEL_SPACING_UM_PX[task], normalise_stain=nuclei, with_nuclei=nuclei)


def _labels(pictures: Sequence[Picture]) -> Ints:
    return np.array([picture.label for picture in pictures], np.int64)
