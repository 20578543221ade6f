"""Where the pixels of a data set live while a model trains: in files, in memory, or on the GPU.

In: pictures and how to read them. Out: any windows of them as bytes (B, C, s, s), the same from each of the three.
Windows that reach beyond an image see it mirrored at its edge.
"""

import os
import re
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, Protocol, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath.data import hdf5
from rotopath.data.collection import DataError, Picture, read_run, runs, scale
from rotopath.data.sampling import Ints, Places
from rotopath.group import mirror
from rotopath.images.files import image_size_px, resample
from rotopath.images.stain import Stain, macenko

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

    def windows(self, places: Places, size_px: int) -> Tensor: ...


@dataclass(frozen=True)
class Reader:
    """How pictures become planes (H, W, 3 + k): at which spacing, with which stain, with which target maps."""

    spacing_um_px: float
    stain: Stain = "none"
    targets: Callable[[Picture], Bytes] | None = None  # (H, W, k) of a picture, at the spacing
    maps: int = 0  # k

    def planes(self, picture: Picture) -> Bytes:
        return self.finish(picture, read_run([picture])[0])

    def finish(self, picture: Picture, image: Bytes) -> Bytes:
        """From pixels as they are in the file."""
        image = resample(image, scale(picture, self.spacing_um_px))
        if self.stain == "macenko":
            image = macenko(image)
        return image if self.targets is None else np.dstack([image, self.targets(picture)])

    @property
    def image_only(self) -> "Reader":
        """The same without target maps."""
        return Reader(self.spacing_um_px, self.stain)

    def size_px(self, picture: Picture) -> tuple[int, int]:
        """The size at this reader's spacing, without decoding the image."""
        if picture.row is None:
            height, width = image_size_px(picture.path)
        else:
            _, height, width, _ = hdf5.shape_of(picture.path, "x")
        factor = scale(picture, self.spacing_um_px)
        return max(1, round(height * factor)), max(1, round(width * factor))


class HostPixels:
    """Images from which windows are cut one by one: a list in memory, or anything that can be indexed like one."""

    def __init__(self, images: "Sequence[Bytes] | DecodedOnDemand", sizes_px: Ints) -> None:
        self._images, self.sizes_px = images, sizes_px
        self.in_files = isinstance(images, DecodedOnDemand)

    def windows(self, places: Places, size_px: int) -> Tensor:
        cut = [
            _window(self._images[image], top, left, size_px)
            for image, top, left in zip(*(part.tolist() for part in places[:3]), strict=True)
        ]
        return torch.from_numpy(np.stack(cut)).permute(0, 3, 1, 2)


class DecodedOnDemand:
    """Images that stay in their files, but for some that were decoded last."""

    def __init__(self, pictures: Sequence[Picture], reader: Reader) -> None:
        self._pictures, self._reader = pictures, reader
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

    def windows(self, places: Places, size_px: int) -> Tensor:
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


def open_pixels(pictures: Sequence[Picture], reader: Reader, cache: Cache, device: torch.device) -> Pixels:
    """The pictures' pixels where `cache` says; with "auto", on the device or in memory if they fit, else in files."""
    if not pictures:
        raise DataError("There are no images to take windows from.")
    if cache not in get_args(Cache):
        raise DataError(f"There is no cache {cache!r}; choose from {', '.join(get_args(Cache))}.")
    if cache in ("auto", "none"):
        sizes = np.array([reader.size_px(picture) for picture in pictures], np.int64)
        if cache == "auto":
            cache = choose_cache(int(sizes.prod(axis=1).sum()) * (3 + reader.maps), device)
        if cache == "none":
            return HostPixels(DecodedOnDemand(pictures, reader), sizes)
    images = load(pictures, reader)
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


def load(pictures: Sequence[Picture], reader: Reader) -> list[Bytes]:
    """All pictures, read by several threads."""

    def load_run(run: list[Picture]) -> list[Bytes]:
        return [reader.finish(picture, image) for picture, image in zip(run, read_run(run), strict=True)]

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return [image for images in pool.map(load_run, runs(pictures)) for image in images]


def _window(image: Bytes, top: int, left: int, size_px: int) -> Bytes:
    height, width = image.shape[:2]
    if top >= 0 and left >= 0 and top + size_px <= height and left + size_px <= width:
        return image[top : top + size_px, left : left + size_px]
    rows = mirror(torch.arange(top, top + size_px), height).numpy()
    columns = mirror(torch.arange(left, left + size_px), width).numpy()
    mirrored: Bytes = image[rows[:, None], columns]
    return mirrored
