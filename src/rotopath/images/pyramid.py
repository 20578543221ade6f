"""Pyramids: large maps and pictures as tiled OME-TIFF, which QuPath, Bio-Formats and `open_slide` read in parts.

In: rows of pixels as they come, (h, W) or (h, W, 3), float32 or uint8. Out: a file that is whole or not there at all.
Memory holds a row of tiles; the lower resolutions wait in temporary files, a third of the pixels in all.
"""

import math
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import chain, zip_longest
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray
from tifffile import TiffWriter

from rotopath.writing import atomic_file

TILE_PX = 512
UM_PER_CM = 1e4
MOST_CLASSIC_BYTES = 2**31  # above it, places in a file may not fit into the 32 bits of a classic TIFF
Pixels = NDArray[Any]


def write_pyramid(
    path: Path, bands: Iterable[Pixels], size_px: tuple[int, int], spacing_um_px: float, name: str = ""
) -> None:
    """Write a map or a picture of that size, whose bands lie below each other; a band may be a memory-mapped array.

    Each level has half the resolution of the one before it, down to a single tile; its pixels are means of four.
    """
    incoming = iter(bands)
    first = next(incoming, None)
    if first is None or min(size_px) < 1:
        raise ValueError(f"A pyramid of {size_px[0]} × {size_px[1]} px was given no pixels; it needs one at least.")
    if first.dtype not in (np.float32, np.uint8) or first.shape[2:] not in ((), (3,)):
        raise ValueError(
            f"A pyramid takes bands (h, W) or (h, W, 3) of float32 or uint8; got {first.shape} of {first.dtype}."
        )
    shape = (*size_px, *first.shape[2:])
    shapes = _level_shapes(shape)
    size_um = {f"PhysicalSize{axis}": spacing_um_px for axis in "XY"}
    units = {f"PhysicalSize{axis}Unit": "µm" for axis in "XY"}
    about = {"axes": "YXS"[: len(shape)], **size_um, **units} | ({"Name": name} if name else {})
    large = first.dtype.itemsize * math.prod(shape) > MOST_CLASSIC_BYTES
    with ExitStack() as stack:
        tiff = TiffWriter(stack.enter_context(atomic_file(path)), bigtiff=large, ome=True)
        stack.enter_context(tiff)
        # Files without a name, which go when they are closed; the halves of a level are the rows of the next one.
        halves = [stack.enter_context(tempfile.TemporaryFile(dir=path.parent)) for _ in shapes[1:]]
        rows = _tile_rows(chain([first], incoming), shape, first.dtype)
        for level, (size, half) in enumerate(zip_longest(shapes, halves)):
            per_cm = UM_PER_CM / (spacing_um_px * 2**level)
            tiff.write(
                _tiles(rows, half),
                shape=size,
                dtype=first.dtype,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb" if len(shape) == 3 else "minisblack",
                compression="adobe_deflate",
                resolution=(per_cm, per_cm),
                resolutionunit="CENTIMETER",
                software="rotopath",
                **({"subfiletype": 1} if level else {"subifds": len(halves), "metadata": about}),
            )
            if half is not None:
                rows = _read_rows(half, shapes[level + 1], first.dtype)


def _level_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Of all levels, the largest first; rounded up, so that no pixel is left out."""
    shapes = [shape]
    while max(shapes[-1][:2]) > TILE_PX:
        height, width = shapes[-1][:2]
        shapes.append((-(-height // 2), -(-width // 2), *shape[2:]))
    return shapes


def _tile_rows(bands: Iterable[Pixels], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Pixels]:
    """The same pixels in bands that are as high as a tile, save the last one."""
    height = shape[0]
    row = np.empty((min(TILE_PX, height), *shape[1:]), dtype)
    filled = done = 0
    for band in bands:
        if band.shape[1:] != shape[1:] or band.dtype != dtype or done + filled + len(band) > height:
            raise ValueError(
                f"A pyramid of {' × '.join(map(str, shape))} {dtype} got a band of {band.shape} {band.dtype} below "
                f"row {done + filled}, which does not fit."
            )
        taken = 0
        while taken < len(band):
            part = band[taken : taken + len(row) - filled]
            row[filled : filled + len(part)] = part
            filled, taken = filled + len(part), taken + len(part)
            if filled == len(row):
                yield row
                done, filled = done + filled, 0
                row = np.empty((min(TILE_PX, height - done), *shape[1:]), dtype)
    if done < height:
        raise ValueError(f"A pyramid of {height} rows got {done + filled} only.")


def _read_rows(file: IO[bytes], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Iterator[Pixels]:
    """Bands as high as a tile, from the file that their level was written to."""
    file.seek(0)
    for top in range(0, shape[0], TILE_PX):
        size = (min(TILE_PX, shape[0] - top), *shape[1:])
        yield np.frombuffer(file.read(math.prod(size) * dtype.itemsize), dtype).reshape(size)


def _tiles(rows: Iterable[Pixels], half: IO[bytes] | None) -> Iterator[Pixels]:
    """All tiles, row by row; on the way, half of the resolution is put aside for the next level."""
    for row in rows:
        if half is not None:
            half.write(_halve(row).tobytes())
        for left in range(0, row.shape[1], TILE_PX):
            yield row[:, left : left + TILE_PX]


def _halve(pixels: Pixels) -> Pixels:
    """Means of two by two pixels; at odd edges, of those that are there."""
    odd_rows, odd_columns = pixels.shape[0] % 2, pixels.shape[1] % 2
    around = np.pad(pixels, [(0, odd_rows), (0, odd_columns), *[(0, 0)] * (pixels.ndim - 2)], mode="edge")
    parts = around.reshape(around.shape[0] // 2, 2, around.shape[1] // 2, 2, *pixels.shape[2:])
    mean: NDArray[np.float32] = parts.mean(axis=(1, 3), dtype=np.float32)
    return mean.round().astype(np.uint8) if pixels.dtype == np.uint8 else mean
