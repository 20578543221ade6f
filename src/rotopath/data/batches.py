"""Where the pixels of a data set live while a model trains: in files, in memory, or on the GPU.

In: samples and how to read them. Out: any windows of them as bytes (B, C, s, s), the same from each of the three.
Windows that reach beyond an image see it mirrored at its edge.

Batches: windows cut out where a sampler says, and augmented on the device.

In: pixels and a sampler, which a task makes. Out: for any step its batch, the same bytes from any cache and with any
number of workers; an epoch is a range of steps, and an interrupted one resumes with those that are left.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from rotopath import group
from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, Changes, augment
from rotopath.data.dataset import DataError, Sample, read_run, runs, scale, shape_of
from rotopath.data.sampling import Ints, Sampler, Windows
from rotopath.group import mirror
from rotopath.images.files import UnreadableFileError, image_size_px, resample
from rotopath.images.stain import Stain, macenko
from rotopath.nn import center_crop

Cache = Literal["auto", "device", "memory", "none"]
Bytes = NDArray[np.uint8]
FREE_SHARE = 0.5  # of the memory that is free, pixels may take so much
KEPT_BYTES = 2**29  # of decoded images, in each process, where they live in files
COPIED_PIXELS = 2**24  # to the device at once
UNKNOWN_FREE_BYTES = 4 * 2**30


class Pixels(Protocol):
    """Images from which windows are cut."""

    sizes_px: Ints  # (n, 2)
    in_files: bool  # so that it pays to read ahead

    def windows(self, places: Windows, size_px: int) -> Tensor: ...


@dataclass(frozen=True)
class SampleReader:
    """How samples become planes (H, W, 3 + k): at which spacing, with which stain, with which target maps."""

    spacing_um_px: float
    stain: Stain = "none"
    targets: Callable[[Sample], Bytes] | None = None  # (H, W, k) of a sample, at the spacing
    maps: int = 0  # k

    def planes(self, sample: Sample) -> Bytes:
        return self.finish(sample, read_run([sample])[0])

    def finish(self, sample: Sample, image: Bytes) -> Bytes:
        """From pixels as they are in the file."""
        image = resample(image, scale(sample, self.spacing_um_px))
        if self.stain == "macenko":
            image = macenko(image)
        return image if self.targets is None else np.dstack([image, self.targets(sample)])

    @property
    def image_only(self) -> "SampleReader":
        """The same without target maps."""
        return SampleReader(self.spacing_um_px, self.stain)

    def size_px(self, sample: Sample) -> tuple[int, int]:
        """The size at this reader's spacing, without decoding the image."""
        if sample.row is None:
            height, width = image_size_px(sample.path)
        else:
            _, height, width, _ = shape_of(sample.path, "x")
        factor = scale(sample, self.spacing_um_px)
        return max(1, round(height * factor)), max(1, round(width * factor))


class HostPixels:
    """Images from which windows are cut one by one: a list in memory, or anything that can be indexed like one."""

    def __init__(self, images: "Sequence[Bytes] | DecodedOnDemand", sizes_px: Ints) -> None:
        self._images, self.sizes_px = images, sizes_px
        self.in_files = isinstance(images, DecodedOnDemand)

    def windows(self, places: Windows, size_px: int) -> Tensor:
        cut = [
            _window(self._images[image], top, left, size_px)
            for image, top, left in zip(*(part.tolist() for part in places[:3]), strict=True)
        ]
        return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2)


class DecodedOnDemand:
    """Images that stay in their files, but for some that were decoded last."""

    def __init__(self, samples: Sequence[Sample], reader: SampleReader) -> None:
        self._pictures, self._reader = samples, reader
        self._kept: dict[int, Bytes] = {}
        self._kept_bytes = 0

    def __getitem__(self, index: int) -> Bytes:
        if index not in self._kept:
            image = self._kept[index] = self._reader.planes(self._pictures[index])
            self._kept_bytes += image.nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
        return self._kept[index]


class DevicePixels:
    """Images side by side in one tensor of a device, from which one read fetches all windows of a batch."""

    def __init__(self, images: Sequence[Bytes], device: torch.device) -> None:
        self.in_files = False
        self.sizes_px = np.array([image.shape[:2] for image in images], np.int64)
        starts = np.concatenate([[0], np.cumsum(self.sizes_px.prod(axis=1))])
        self._flat = torch.empty((int(starts[-1]), images[0].shape[2]), dtype=torch.uint8, device=device)
        # Small images are copied many at a time, large ones without a second copy of all of them.
        for _, block in groupby(range(len(images)), lambda i: int(starts[i]) // COPIED_PIXELS):
            chosen = list(block)
            pixels = np.concatenate([images[i].reshape(-1, images[i].shape[2]) for i in chosen])
            self._flat[starts[chosen[0]] : starts[chosen[0]] + len(pixels)] = torch.from_numpy(pixels)
        self._starts = starts[:-1]

    def windows(self, places: Windows, size_px: int) -> Tensor:
        """Few and small steps on the device: what a batch costs is mostly the launching of them."""
        sizes, corners = self.sizes_px[places.images], np.stack([places.tops, places.lefts], axis=1)  # (B, 2)
        first, widths = self._starts[places.images], sizes[:, 1]
        steps = torch.arange(size_px, device=self._flat.device)
        if ((corners >= 0) & (corners + size_px <= sizes)).all():
            first = first + corners[:, 0] * widths + corners[:, 1]
            first_there, widths_there = self._copied(np.stack([first, widths]))[:, :, None]  # (B, 1) each
            rows, columns = first_there + steps * widths_there, steps  # (B, s), (s,)
        else:
            copied = self._copied(np.stack([first, widths, *corners.T, sizes[:, 0]]))[:, :, None]
            first_there, widths_there, tops, lefts, heights_there = copied
            rows = first_there + mirror(tops + steps, heights_there) * widths_there
            columns = mirror(lefts + steps, widths_there)[:, None, :]
        return self._flat[rows[:, :, None] + columns].permute(0, 3, 1, 2)  # (B, C, s, s), channels last

    def _copied(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self._flat.device, non_blocking=True)


def open_pixels(samples: Sequence[Sample], reader: SampleReader, cache: Cache, device: torch.device) -> Pixels:
    """The samples' pixels where `cache` says; with "auto", on the device or in memory if they fit, else in files."""
    if not samples:
        raise DataError("There are no images to take windows from.")
    if cache not in get_args(Cache):
        raise DataError(f"There is no cache {cache!r}; choose from {', '.join(get_args(Cache))}.")
    if cache in ("auto", "none"):
        sizes = np.array([reader.size_px(sample) for sample in samples], np.int64)
        if cache == "auto":
            cache = choose_cache(int(sizes.prod(axis=1).sum()) * (3 + reader.maps), device)
        if cache == "none":
            return HostPixels(DecodedOnDemand(samples, reader), sizes)
    images = load(samples, reader)
    if cache == "device":
        return DevicePixels(images, device)
    return HostPixels(images, np.array([image.shape[:2] for image in images], np.int64))


def choose_cache(size_bytes: int, device: torch.device) -> Cache:
    """The fastest place that so many bytes fit into without crowding out the model."""
    if device.type == "cuda" and size_bytes <= FREE_SHARE * torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "memory" if size_bytes <= FREE_SHARE * _free_bytes() else "none"


def _free_bytes() -> int:
    """Memory that programs can have without swapping; a modest guess where the system does not tell."""
    try:
        text = Path("/proc/meminfo").read_text()
    except OSError:
        return UNKNOWN_FREE_BYTES
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    return int(found[1]) * 1024 if found else UNKNOWN_FREE_BYTES


def load(samples: Sequence[Sample], reader: SampleReader) -> list[Bytes]:
    """All samples, read by several threads."""

    def load_run(run: list[Sample]) -> list[Bytes]:
        return [reader.finish(sample, image) for sample, image in zip(run, read_run(run), strict=True)]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [image for images in pool.map(load_run, runs(samples)) for image in images]


def _window(image: Bytes, top: int, left: int, size_px: int) -> Bytes:
    height, width = image.shape[:2]
    if top >= 0 and left >= 0 and top + size_px <= height and left + size_px <= width:
        return image[top : top + size_px, left : left + size_px]
    rows = mirror(torch.arange(top, top + size_px), height).numpy()
    columns = mirror(torch.arange(left, left + size_px), width).numpy()
    mirrored: Bytes = image[rows[:, None], columns]
    return mirrored


CPU = torch.device("cpu")


class Batch(NamedTuple):
    """Windows as they were cut out, and what is to happen to them."""

    windows: Tensor  # (B, 3 + k, s, s) bytes: red, green, blue, and k target maps
    labels: Tensor  # (B,)
    changes: Changes


class Batches(TorchDataset[Batch]):
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

    def shard(self, rank: int, count: int) -> "Batches":
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
        places, changes = places.shard(self._rank, self._shares), changes.shard(self._rank, self._shares)
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


class _CarryingErrors(TorchDataset[Batch | UnreadableFileError]):
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
