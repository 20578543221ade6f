"""Make training batches: a sampler chooses windows; the windows are cut from the images and augmented.

`Batches` returns the batch of any training step. The content of a batch does not depend on the cache mode or on the
number of workers. An epoch is a range of steps; an interrupted epoch resumes with the remaining steps.

The cache mode states where decoded images are kept: in GPU memory ("device"), in RAM ("memory"), or nowhere ("none").
With "none", images are decoded from their files for each batch. Where a window extends beyond an image, the image is
continued by reflection at its edge.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader
from torch.utils.data import Dataset as TorchDataset

from rotopath import group
from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, DrawnChanges, augment
from rotopath.data.dataset import (
    DataError,
    Sample,
    group_for_reading,
    read_image,
    read_together,
    resampling_factor,
    sample_size_px,
    scale_size,
)
from rotopath.data.sampling import Ints, Sampler, Windows
from rotopath.environment import count_cores, limit_processes
from rotopath.images.files import UnreadableFileError
from rotopath.images.stain import Stain, macenko
from rotopath.nn import center_crop

Cache = Literal["auto", "device", "memory", "none"]
Bytes = NDArray[np.uint8]

CPU = torch.device("cpu")
CACHE_FRACTION = 0.5  # fraction of free memory that cached images may occupy
ASSUMED_FREE_BYTES = 4 * 2**30  # assumed if free memory cannot be measured
KEPT_BYTES = 2**29  # RAM in each process for recently decoded images, with the cache mode "none"
MAX_COPIED_PIXELS = 2**24  # approximate number of pixels that are copied to the device at once


# Batches


class Batch(NamedTuple):
    """Windows before augmentation, and the random changes that augmentation will apply to them."""

    windows: Tensor  # (B, 3 + k, s, s) bytes: red, green, blue, and k target maps
    labels: Tensor  # (B,) class numbers; ignored if there are target maps
    changes: DrawnChanges


class Batches:
    """The batches of all steps of a training, or of a validation.

    `batches[step]` returns a batch before augmentation; `batches.load(steps)` yields augmented images and targets.

    `pixels` holds the images, `sampler` chooses the windows, and `window_px` is the side of a window. Target maps are
    cropped to their central squares with a side of `target_px`; None means `window_px`. `augmentation` and `seed`
    determine the random changes; by default, windows are not changed.
    """

    def __init__(
        self,
        pixels: "Pixels",
        sampler: Sampler,
        window_px: int,
        target_px: int | None = None,
        augmentation: Augmentation = NO_AUGMENTATION,
        seed: int = 0,
    ) -> None:
        self.pixels, self.sampler, self.augmentation = pixels, sampler, augmentation
        self._window_px, self._target_px, self._seed = window_px, target_px, seed
        self._cut_px = augmentation.cut_px(window_px)
        self._rank, self._ranks = 0, 1

    def shard(self, rank: int, count: int) -> "Batches":
        """Return the batches of one training process, which contain only this process's windows.

        There are `count` processes. Process `rank` (0 to count - 1) has windows rank, rank + count, and so on, of the
        batch of all processes.
        """
        part = copy(self)
        part._rank, part._ranks = rank, count
        return part

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step, before augmentation.

        If the augmentation moves pixels from outside a square with a side of `window_px` into this square, such as
        rotations by any angle do, the windows are larger than `window_px`.
        """
        windows = self.sampler.draw(step)
        margin = (self._cut_px - self._window_px) // 2
        windows = windows._replace(tops=windows.tops - margin, lefts=windows.lefts - margin)
        changes = self.augmentation.draw(len(windows.images), np.random.default_rng([self._seed, 3, step]))
        windows, changes = windows.shard(self._rank, self._ranks), changes.shard(self._rank, self._ranks)
        return Batch(self.pixels.cut(windows, self._cut_px), torch.from_numpy(windows.labels), changes)

    def load(
        self, steps: Iterable[int], device: torch.device = CPU, workers: int = 0
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the augmented images and the targets of each step in `steps`, on the device.

        Images are floats (B, 3, s, s) from 0 to 1, with s = `window_px`. Targets are class numbers (B,). If the images
        have target maps, targets are maps instead: (B, t, t) for one map and (B, k, t, t) for k maps, with
        t = `target_px`. With the cache mode "none", `workers` processes (at most one for each CPU core) read batches
        ahead of time. With the other cache modes, `workers` has no effect.
        """
        read_ahead = workers > 0 and self.pixels.in_files
        batches = self._read_ahead(steps, device, workers) if read_ahead else (self[step] for step in steps)
        for batch in batches:
            yield self.move_and_augment(batch, device)

    def move_and_augment(self, batch: Batch, device: torch.device) -> tuple[Tensor, Tensor]:
        """Move a batch to the device and augment the batch there; return images and targets as `load` does."""
        windows = batch.windows.to(device, non_blocking=True)
        images, maps = augment(windows, batch.changes.to(device), self._window_px)
        if maps is None:
            return images, batch.labels.to(device, non_blocking=True)
        target_px = self._target_px or self._window_px
        targets = center_crop(maps, target_px, target_px)
        return images, targets[:, 0] if targets.shape[1] == 1 else targets

    def _read_ahead(self, steps: Iterable[int], device: torch.device, workers: int) -> Iterator[Batch]:
        """Yield the batch of each step. While the caller uses a batch, worker processes read the next batches."""
        loader = DataLoader(
            _BatchesOrErrors(self),
            batch_size=None,
            sampler=steps,
            num_workers=limit_processes(min(workers, count_cores())),
            pin_memory=device.type == "cuda",
            generator=torch.Generator(),  # separate, so that reading does not affect other random numbers
        )
        for batch in loader:
            if isinstance(batch, UnreadableFileError):
                raise batch
            yield batch


class _BatchesOrErrors(TorchDataset[Batch | UnreadableFileError]):
    """Batches by step, for torch's DataLoader. An error about an unreadable file is returned instead of raised.

    If a worker process raised the error, DataLoader would add a traceback to the error message.
    """

    def __init__(self, batches: Batches) -> None:
        super().__init__()
        self._batches = batches

    def __getitem__(self, step: int) -> Batch | UnreadableFileError:
        try:
            return self._batches[step]
        except UnreadableFileError as error:
            return error


# Reading samples


@dataclass(frozen=True)
class SampleReader:
    """Read samples as arrays of bytes (H, W, 3 + k): red, green, blue and k target maps."""

    spacing_um_px: float  # pixel spacing of the arrays
    stain: Stain = "none"  # stain normalization of the images
    targets: Callable[[Sample], Bytes] | None = None  # returns target maps (H, W, k) at `spacing_um_px`; None: no maps
    target_maps: int = 0  # number k of target maps

    def read(self, sample: Sample) -> Bytes:
        """Read the image of a sample and its target maps as one array (H, W, 3 + k)."""
        return self.prepare(sample, read_image(sample, self.spacing_um_px))

    def prepare(self, sample: Sample, image: Bytes) -> Bytes:
        """Return the image (H, W, 3) of a sample as an array (H, W, 3 + k).

        The image has the pixel spacing of this reader. Its stains are normalized if `stain` is "macenko". The last k
        channels of the array are the target maps of the sample.
        """
        if self.stain == "macenko":
            image = macenko(image)
        return image if self.targets is None else np.dstack([image, self.targets(sample)])

    @property
    def without_targets(self) -> "SampleReader":
        """A reader that reads the same images without target maps."""
        return SampleReader(self.spacing_um_px, self.stain)

    def size_px(self, sample: Sample) -> tuple[int, int]:
        """Return (height, width) of a sample at the pixel spacing of this reader, without decoding the image."""
        return scale_size(sample_size_px(sample), resampling_factor(sample, self.spacing_um_px))


def load_images(samples: Sequence[Sample], reader: SampleReader) -> list[Bytes]:
    """Read all samples with several threads; return an array (H, W, 3 + k) for each sample, as `reader.read` does."""

    def load_group(members: list[Sample]) -> list[Bytes]:
        images = read_together(members, reader.spacing_um_px)
        return [reader.prepare(sample, image) for sample, image in zip(members, images, strict=True)]

    with ThreadPoolExecutor(count_cores()) as pool:
        return [image for images in pool.map(load_group, group_for_reading(samples)) for image in images]


# Caches


class Pixels(Protocol):
    """Images from which windows are cut. The images are in GPU memory, in RAM or, not yet decoded, in files."""

    sizes_px: Ints  # (n, 2): height and width of each image
    in_files: bool  # whether images are decoded from files for each batch, so that workers are useful

    def cut(self, windows: Windows, size_px: int) -> Tensor:
        """Cut B square windows with a side of `size_px` from the images.

        Returns bytes (B, 3 + k, size_px, size_px): red, green, blue and k target maps.
        """
        ...


def open_pixels(samples: Sequence[Sample], reader: SampleReader, cache: Cache, device: torch.device) -> Pixels:
    """Open the images of samples with a cache mode. "auto" is the fastest mode for which there is enough free memory.

    With the cache modes "device" and "memory", all images are read now. With "device", they are kept on `device`.
    Raises DataError if there are no samples, or if the cache mode is unknown.
    """
    if not samples:
        raise DataError("There are no images to cut windows from; run `rotopath data check` on the dataset.")
    if cache not in get_args(Cache):
        raise DataError(f"Unknown cache mode {cache!r}; choose from {', '.join(get_args(Cache))}.")
    if cache in ("auto", "none"):
        sizes = np.array([reader.size_px(sample) for sample in samples], np.int64)
        if cache == "auto":
            cache = choose_cache(int(sizes.prod(axis=1).sum()) * (3 + reader.target_maps), device)
        if cache == "none":
            return HostPixels(DecodedOnDemand(samples, reader), sizes)
    images = load_images(samples, reader)
    if cache == "device":
        return DevicePixels(images, device)
    return HostPixels(images, np.array([image.shape[:2] for image in images], np.int64))


def choose_cache(size_bytes: int, device: torch.device) -> Cache:
    """Return the fastest possible cache mode for decoded images of `size_bytes` bytes in total.

    The mode is "device" if `device` is a GPU and the images fit into half of its free memory, else "memory" if they fit
    into half of the free RAM, else "none".
    """
    if device.type == "cuda" and size_bytes <= CACHE_FRACTION * torch.cuda.mem_get_info(device)[0]:
        return "device"
    return "memory" if size_bytes <= CACHE_FRACTION * _free_bytes() else "none"


def _free_bytes() -> int:
    """Return the RAM available without swapping, in bytes, or a low estimate if psutil is not installed."""
    try:
        import psutil  # installed with the extra `train`; prediction does not need it
    except ModuleNotFoundError:
        return ASSUMED_FREE_BYTES
    return int(psutil.virtual_memory().available)


class HostPixels:
    """Images in RAM or in files, from which windows are cut one by one on the CPU."""

    def __init__(self, images: "Sequence[Bytes] | DecodedOnDemand", sizes_px: Ints) -> None:
        self._images, self.sizes_px = images, sizes_px
        self.in_files = isinstance(images, DecodedOnDemand)

    def cut(self, windows: Windows, size_px: int) -> Tensor:
        corners = zip(windows.images.tolist(), windows.tops.tolist(), windows.lefts.tolist(), strict=True)
        cut = [cut_window(self._images[image], top, left, size_px) for image, top, left in corners]
        return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2)


class DecodedOnDemand:
    """Images in files, which are decoded when needed. Recently decoded images are kept in RAM, up to KEPT_BYTES."""

    def __init__(self, samples: Sequence[Sample], reader: SampleReader) -> None:
        self._samples, self._reader = samples, reader
        self._kept: dict[int, Bytes] = {}
        self._kept_bytes = 0

    def __getitem__(self, index: int) -> Bytes:
        if index not in self._kept:
            image = self._kept[index] = self._reader.read(self._samples[index])
            self._kept_bytes += image.nbytes
            while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                self._kept_bytes -= self._kept.pop(next(iter(self._kept))).nbytes
        return self._kept[index]


class DevicePixels:
    """Images concatenated in one tensor on a device; a single indexing operation cuts all windows of a batch."""

    def __init__(self, images: Sequence[Bytes], device: torch.device) -> None:
        self.in_files = False
        self.sizes_px = np.array([image.shape[:2] for image in images], np.int64)
        starts = np.concatenate([[0], np.cumsum(self.sizes_px.prod(axis=1))])
        self._flat = torch.empty((int(starts[-1]), images[0].shape[2]), dtype=torch.uint8, device=device)
        # Many small images are copied at once, to save time. Large images are copied one by one, to save memory.
        for _, block in groupby(range(len(images)), lambda i: int(starts[i]) // MAX_COPIED_PIXELS):
            members = list(block)
            pixels = np.concatenate([images[i].reshape(-1, images[i].shape[2]) for i in members])
            self._flat[starts[members[0]] : starts[members[0]] + len(pixels)] = torch.from_numpy(pixels)
        self._starts = starts[:-1]

    def cut(self, windows: Windows, size_px: int) -> Tensor:
        # All indices are sent in one copy and few GPU operations are used, because starting an operation takes longer
        # than the operation itself.
        sizes, corners = self.sizes_px[windows.images], np.stack([windows.tops, windows.lefts], axis=1)  # (B, 2)
        starts, widths = self._starts[windows.images], sizes[:, 1]
        steps = torch.arange(size_px, device=self._flat.device)
        if ((corners >= 0) & (corners + size_px <= sizes)).all():
            starts = starts + corners[:, 0] * widths + corners[:, 1]
            device_starts, device_widths = self._copy(np.stack([starts, widths]))[:, :, None]  # (B, 1) each
            rows, columns = device_starts + steps * device_widths, steps  # (B, s), (s,)
        else:
            copied = self._copy(np.stack([starts, widths, *corners.T, sizes[:, 0]]))[:, :, None]
            device_starts, device_widths, tops, lefts, device_heights = copied
            rows = device_starts + group.reflect_index(tops + steps, device_heights) * device_widths
            columns = group.reflect_index(lefts + steps, device_widths)[:, None, :]
        return self._flat[rows[:, :, None] + columns].permute(0, 3, 1, 2)  # (B, C, s, s), channels-last

    def _copy(self, numbers: Ints) -> Tensor:
        return torch.from_numpy(numbers).to(self._flat.device, non_blocking=True)


def cut_window(image: Bytes, top: int, left: int, size_px: int) -> Bytes:
    """Return a window (size_px, size_px, C) of an image (H, W, C).

    The first row of the window is row `top` of the image, and its first column is column `left` of the image. Where the
    window extends beyond the image, the image is continued by reflection at its edges.
    """
    height, width = image.shape[:2]
    if top >= 0 and left >= 0 and top + size_px <= height and left + size_px <= width:
        return image[top : top + size_px, left : left + size_px]
    rows = group.reflect_index(torch.arange(top, top + size_px), height).numpy()
    columns = group.reflect_index(torch.arange(left, left + size_px), width).numpy()
    reflected: Bytes = image[rows[:, None], columns]
    return reflected
