"""Readers of one file each: its levels, the size of its pixels, and the pixels of a rectangle within a level.

In: a path. Out: a reader: OpenSlide for whole slides, tiffslide for pyramids that OpenSlide sees the base of only, and
Pillow for ordinary images. What the libraries stumble over becomes a sentence about the file.
"""

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rotopath.extras import install
from rotopath.images.files import UnreadableImageError, described_pixel_size_um, pixel_size_um, read_rgb

SLIDE_SUFFIXES = {".svs", ".ndpi", ".ndpis", ".mrxs", ".scn", ".svslide", ".bif", ".vms", ".vmu", ".czi", ".dcm"}
DEPTHS = ("uint8", "uint16")
BLOCK_PX = 512  # see _OpenSlideReader.read
BLOCKS_KEPT = 64  # 48 MB
WHITE = 255


class Level(NamedTuple):
    """One resolution of a slide."""

    size_px: tuple[int, int]  # rows and columns
    downsample: float  # side of its pixels in pixels of level 0


class SlideReader(Protocol):
    """One open file. Several threads may read at once; it is closed when none does any more."""

    levels: tuple[Level, ...]
    pixel_size_um: tuple[float, float] | None  # height and width, where the file tells
    origin_px: tuple[int, int]  # row and column where the scanned region begins

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Pixels (height, width, 3) of a rectangle that lies within the level."""

    def close(self) -> None: ...


def open_reader(path: Path) -> SlideReader:
    """The reader that sees most of the file."""
    if not path.exists():
        raise UnreadableImageError(path, "does not exist.")
    if path.is_dir():
        raise UnreadableImageError(path, "cannot be read (Is a directory).")
    is_slide = path.suffix.lower() in SLIDE_SUFFIXES
    try:
        import openslide
    except ModuleNotFoundError:  # also where there is no library behind the bindings
        if is_slide or _examine_tiff(path)[0] > 1:
            raise _missing(path, "OpenSlide") from None
        return ImageReader(read_rgb(path), pixel_size_um(path))
    with _damage_in_one_sentence(path):
        vendor = openslide.OpenSlide.detect_format(path)
    if vendor not in (None, "generic-tiff"):
        return _OpenSlideReader(path)
    levels, numbers = _examine_tiff(path)
    with suppress(UnreadableImageError):  # others may read it
        slide = _OpenSlideReader(path)
        if len(slide.levels) >= levels and numbers in DEPTHS:
            return slide
        slide.close()  # OME-TIFF keeps levels below the first page of a file, where OpenSlide does not look
    if levels > 1:
        return _TiffSlideReader(path)
    if is_slide:
        raise UnreadableImageError(path, "is damaged, or no slide that OpenSlide knows; download or export it anew.")
    return ImageReader(read_rgb(path), pixel_size_um(path))


class ImageReader:
    """An ordinary image, in memory: one level."""

    origin_px = (0, 0)

    def __init__(self, pixels: NDArray[np.uint8], pixel_size_um: tuple[float, float] | None = None) -> None:
        self._pixels = pixels
        self.pixel_size_um = pixel_size_um
        height, width = pixels.shape[:2]
        self.levels: tuple[Level, ...] = (Level((height, width), 1.0),)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        assert level == 0
        return self._pixels[top : top + height, left : left + width]

    def close(self) -> None:
        pass


class _OpenSlideReader:
    """A whole slide. OpenSlide lets any number of threads read one slide, but not while it is closed."""

    def __init__(self, path: Path) -> None:
        import openslide

        self._path = path
        with _damage_in_one_sentence(path):
            self._slide = openslide.OpenSlide(path)
        sizes = [(height, width) for width, height in self._slide.level_dimensions]
        self.levels = _levels(sizes, self._slide.level_downsamples)
        about = self._slide.properties
        height_um, width_um = (about.get(f"openslide.mpp-{axis}") for axis in "yx")
        self.pixel_size_um = (float(height_um), float(width_um)) if height_um and width_um else None
        self.origin_px = (int(about.get("openslide.bounds-y", 0)), int(about.get("openslide.bounds-x", 0)))
        self._block = lru_cache(maxsize=BLOCKS_KEPT)(self._read_block)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """OpenSlide takes places in whole pixels of level 0, and interpolates between pixels of a level.

        With a downsample of 4.0001 a pixel would look otherwise in each rectangle that holds it. So such levels are
        read in blocks that lie where they lie, whichever part is asked for.
        """
        if float(self._slide.level_downsamples[level]).is_integer():
            return self._read_region(level, top, left, height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        for row in range(top // BLOCK_PX, -(-(top + height) // BLOCK_PX)):
            for column in range(left // BLOCK_PX, -(-(left + width) // BLOCK_PX)):
                block = self._block(level, row * BLOCK_PX, column * BLOCK_PX)
                into_rows, from_rows = _overlap(top, height, row * BLOCK_PX, block.shape[0])
                into_columns, from_columns = _overlap(left, width, column * BLOCK_PX, block.shape[1])
                pixels[into_rows, into_columns] = block[from_rows, from_columns]
        return pixels

    def close(self) -> None:
        self._slide.close()

    def _read_block(self, level: int, top: int, left: int) -> NDArray[np.uint8]:
        rows, columns = self.levels[level].size_px
        return self._read_region(level, top, left, min(BLOCK_PX, rows - top), min(BLOCK_PX, columns - left))

    def _read_region(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        downsample = self._slide.level_downsamples[level]
        place = (round(left * downsample), round(top * downsample))
        with _damage_in_one_sentence(self._path):
            return _lay_on_white(np.asarray(self._slide.read_region(place, level, (width, height))))


class _TiffSlideReader:
    """A pyramid in a TIFF, as tifffile sees it. Each thread has its own handle inside tiffslide."""

    origin_px = (0, 0)

    def __init__(self, path: Path) -> None:
        try:
            from tiffslide import TiffSlide
        except ModuleNotFoundError:
            raise _missing(path, "tiffslide") from None
        self._path = path
        with _damage_in_one_sentence(path):
            self._slide = TiffSlide(path)
            sizes = [(height, width) for width, height in self._slide.level_dimensions]
            about = self._slide.properties
            base = self._slide.ts_tifffile.series[about["tiffslide.series-index"]]
        if base.axes not in ("YX", "YXS") or str(base.dtype) not in DEPTHS:
            self.close()
            raise UnreadableImageError(
                path, f"holds {base.dtype} numbers along the axes {base.axes}; expected are colours of 8 or 16 bits."
            )
        self.levels = _levels(sizes, self._slide.level_downsamples)
        height_um, width_um = about.get("tiffslide.mpp-y"), about.get("tiffslide.mpp-x")
        told = (float(height_um), float(width_um)) if height_um and width_um else None
        self.pixel_size_um = described_pixel_size_um(base.keyframe.description) or told

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        # Rounded up, since tiffslide rounds down on its way back to the pixels of the level.
        x, y = (math.ceil(place * self._slide.level_downsamples[level] - 1e-6) for place in (left, top))
        with _damage_in_one_sentence(self._path):
            pixels = self._slide.read_region((x, y), level, (width, height), as_array=True)
        return _lay_on_white((pixels if pixels.dtype == np.uint8 else pixels >> 8).astype(np.uint8))

    def close(self) -> None:
        self._slide.close()


def _missing(path: Path, package: str) -> UnreadableImageError:
    return UnreadableImageError(path, f"is a whole slide, and reading it needs {package}: {install('slides')}.")


def _levels(sizes: list[tuple[int, int]], downsamples: tuple[float, ...]) -> tuple[Level, ...]:
    """Libraries divide sizes to find downsamples, which is off by as much as a size was rounded: 4.0001 is 4."""
    levels = []
    for size, downsample in zip(sizes, downsamples, strict=True):
        whole = round(downsample)
        drift = abs(downsample - whole) * max(size)  # in pixels of level 0, at the far end of the level
        levels.append(Level(size, float(whole) if drift < whole else downsample))
    return tuple(levels)


def _lay_on_white(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """RGB from grey (h, w, 1), RGB, or RGBA, whose transparency lies on white."""
    channels = pixels.shape[2]
    if channels == 3:
        return pixels
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    colours, alpha = pixels[..., :3], pixels[..., 3:4]
    if (alpha == WHITE).all():
        return np.ascontiguousarray(colours)
    share = alpha.astype(np.uint16)
    laid = (colours * share + WHITE * (WHITE - share) + WHITE // 2) // WHITE
    return laid.astype(np.uint8)


def _overlap(start: int, size: int, other_start: int, other_size: int) -> tuple[slice, slice]:
    """Where two spans meet, counted from the start of each."""
    first, last = max(start, other_start), min(start + size, other_start + other_size)
    return slice(first - start, last - start), slice(first - other_start, last - other_start)


def _examine_tiff(path: Path) -> tuple[int, str]:
    """How many levels the first image of a TIFF has, and of what numbers; 0 where it is none, or too damaged."""
    from tifffile import TiffFile

    log = logging.getLogger("tifffile")
    silent = log.disabled
    log.disabled = True  # what is wrong with a file is told by whoever reads it
    try:
        with TiffFile(path) as tiff:
            return len(tiff.series[0].levels), str(tiff.series[0].dtype)
    except Exception:  # damaged bytes, met with whatever tifffile stumbles over
        return 0, ""
    finally:
        log.disabled = silent


@contextmanager
def _damage_in_one_sentence(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise UnreadableImageError(path, f"cannot be read ({error.strerror}).") from None
    except Exception as error:  # decoders meet damaged bytes with whatever they stumble over
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableImageError(
            path, f"is damaged and cannot be decoded ({reason}); download or export it anew."
        ) from None
