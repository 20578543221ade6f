"""Open slide and image files, and read their levels, pixel sizes and pixels.

A level is one resolution of a slide. Level 0 is the highest resolution. `open_reader` opens a file with OpenSlide, with
tiffslide (for TIFF pyramids of which OpenSlide does not read all levels), or with Pillow (for ordinary images). Errors
of these libraries are converted to an `UnreadableImageError`, whose message is one sentence.
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

from rotopath.environment import install_command
from rotopath.images.files import UnreadableImageError, parse_pixel_size_um, pixel_size_um, read_rgb

SLIDE_SUFFIXES = {".svs", ".ndpi", ".ndpis", ".mrxs", ".scn", ".svslide", ".bif", ".vms", ".vmu", ".czi", ".dcm"}
COLOR_DTYPES = ("uint8", "uint16")  # data types of TIFF files whose values are gray levels or colors
BLOCK_PX = 512  # side of the blocks that `_OpenSlideReader` caches
MAX_CACHED_BLOCKS = 64  # these blocks need 48 MB
WHITE = 255


class Level(NamedTuple):
    """One resolution of a slide."""

    size_px: tuple[int, int]  # rows and columns
    downsample: float  # side of a pixel of this level, in pixels of level 0


class SlideReader(Protocol):
    """An open slide or image file. Several threads may read at the same time; close it after all have finished."""

    levels: tuple[Level, ...]
    pixel_size_um: tuple[float, float] | None  # height and width of a pixel of level 0; None if the file states none
    origin_px: tuple[int, int]  # row and column of level 0 at which the scanned region begins

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Read a rectangle of pixels (height, width, 3) from a level.

        `level` is the index of the level in `levels`. All other arguments are in pixels of this level. The rectangle
        must not extend beyond the level.
        """

    def close(self) -> None: ...


def open_reader(path: Path) -> SlideReader:
    """Open a file with the library that reads the most of its levels.

    Raises UnreadableImageError if no library can read the file, or if the required library is not installed.
    """
    if not path.exists():
        raise UnreadableImageError(path, "does not exist.")
    if path.is_dir():
        raise UnreadableImageError(path, "cannot be read (Is a directory).")
    is_slide = path.suffix.lower() in SLIDE_SUFFIXES
    try:
        import openslide
    except ModuleNotFoundError:  # also raised if the Python package is installed, but not the OpenSlide library
        if is_slide or _inspect_tiff(path)[0] > 1:
            raise _missing_package(path, "OpenSlide") from None
        return ImageReader(read_rgb(path), pixel_size_um(path))
    with _errors_in_one_sentence(path):
        vendor = openslide.OpenSlide.detect_format(path)
    if vendor not in (None, "generic-tiff"):
        return _OpenSlideReader(path)
    level_count, dtype = _inspect_tiff(path)
    with suppress(UnreadableImageError):  # tiffslide or Pillow may still be able to read the file
        slide = _OpenSlideReader(path)
        if len(slide.levels) >= level_count and dtype in COLOR_DTYPES:
            return slide
        slide.close()  # an OME-TIFF stores all levels but the first in sub-IFDs, which OpenSlide does not read
    if level_count > 1:
        return _TiffSlideReader(path)
    if is_slide:
        raise UnreadableImageError(
            path, "is damaged, or not in a slide format that OpenSlide reads; download or export it again."
        )
    return ImageReader(read_rgb(path), pixel_size_um(path))


# Readers


class ImageReader:
    """Reads an image in memory (H, W, 3) as if it were a slide with one level."""

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
    """Reads a slide with OpenSlide."""

    def __init__(self, path: Path) -> None:
        import openslide

        self._path = path
        with _errors_in_one_sentence(path):
            self._slide = openslide.OpenSlide(path)
        sizes = [(height, width) for width, height in self._slide.level_dimensions]
        self.levels = _make_levels(sizes, self._slide.level_downsamples)
        properties = self._slide.properties
        height_um, width_um = (properties.get(f"openslide.mpp-{axis}") for axis in "yx")
        self.pixel_size_um = (float(height_um), float(width_um)) if height_um and width_um else None
        self.origin_px = (int(properties.get("openslide.bounds-y", 0)), int(properties.get("openslide.bounds-x", 0)))
        self._read_cached_block = lru_cache(maxsize=MAX_CACHED_BLOCKS)(self._read_block)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Read a rectangle of a level. A pixel has the same value in every rectangle that contains it.

        OpenSlide expects the upper left corner in whole pixels of level 0, and interpolates if the corner is between
        two pixels of the level. If the downsample is not a whole number, such as 4.0001, pixel values would therefore
        depend on the corner. Levels with such a downsample are read in blocks at fixed positions, and the rectangle is
        assembled from the blocks.
        """
        if float(self._slide.level_downsamples[level]).is_integer():
            return self._read_region(level, top, left, height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        for row in range(top // BLOCK_PX, -(-(top + height) // BLOCK_PX)):
            for column in range(left // BLOCK_PX, -(-(left + width) // BLOCK_PX)):
                block = self._read_cached_block(level, row * BLOCK_PX, column * BLOCK_PX)
                to_rows, from_rows = _overlap(top, height, row * BLOCK_PX, block.shape[0])
                to_columns, from_columns = _overlap(left, width, column * BLOCK_PX, block.shape[1])
                pixels[to_rows, to_columns] = block[from_rows, from_columns]
        return pixels

    def close(self) -> None:
        self._slide.close()

    def _read_block(self, level: int, top: int, left: int) -> NDArray[np.uint8]:
        rows, columns = self.levels[level].size_px
        return self._read_region(level, top, left, min(BLOCK_PX, rows - top), min(BLOCK_PX, columns - left))

    def _read_region(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        downsample = self._slide.level_downsamples[level]
        corner = (round(left * downsample), round(top * downsample))
        with _errors_in_one_sentence(self._path):
            return _to_rgb(np.asarray(self._slide.read_region(corner, level, (width, height))))


class _TiffSlideReader:
    """Reads a TIFF pyramid with tiffslide.

    Several threads may read at the same time, because tiffslide has a separate Zarr group, through which it reads the
    file, for each thread.
    """

    origin_px = (0, 0)

    def __init__(self, path: Path) -> None:
        try:
            from tiffslide import TiffSlide
        except ModuleNotFoundError:
            raise _missing_package(path, "tiffslide") from None
        self._path = path
        with _errors_in_one_sentence(path):
            self._slide = TiffSlide(path)
            sizes = [(height, width) for width, height in self._slide.level_dimensions]
            properties = self._slide.properties
            series = self._slide.ts_tifffile.series[properties["tiffslide.series-index"]]
        if series.axes not in ("YX", "YXS") or str(series.dtype) not in COLOR_DTYPES:
            self.close()
            raise UnreadableImageError(
                path,
                f"contains {series.dtype} numbers along the axes {series.axes}, but must contain gray or RGB values of "
                f"8 or 16 bits; export it again as an RGB image.",
            )
        self.levels = _make_levels(sizes, self._slide.level_downsamples)
        height_um, width_um = properties.get("tiffslide.mpp-y"), properties.get("tiffslide.mpp-x")
        size_um = (float(height_um), float(width_um)) if height_um and width_um else None
        self.pixel_size_um = parse_pixel_size_um(series.keyframe.description) or size_um

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        # Rounded up, because tiffslide rounds down when it converts the corner to pixels of the level.
        downsample = self._slide.level_downsamples[level]
        x, y = (math.ceil(position * downsample - 1e-6) for position in (left, top))
        with _errors_in_one_sentence(self._path):
            pixels = self._slide.read_region((x, y), level, (width, height), as_array=True)
        return _to_rgb((pixels if pixels.dtype == np.uint8 else pixels >> 8).astype(np.uint8))

    def close(self) -> None:
        self._slide.close()


# Levels and pixels


def _make_levels(sizes: list[tuple[int, int]], downsamples: tuple[float, ...]) -> tuple[Level, ...]:
    """Return the levels from their sizes (rows, columns) and downsamples.

    Libraries compute a downsample as the ratio of two rounded sizes, for example 4.0001 instead of 4. A downsample is
    rounded to a whole number if this moves every pixel by less than one pixel of the level.
    """
    levels = []
    for size, downsample in zip(sizes, downsamples, strict=True):
        whole = round(downsample)
        drift_px = abs(downsample - whole) * max(size)  # in pixels of level 0, at the far end of the level
        levels.append(Level(size, float(whole) if drift_px < whole else downsample))
    return tuple(levels)


def _to_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert gray (h, w, 1), RGB or RGBA pixels to RGB (h, w, 3). Transparent pixels are blended with white."""
    channels = pixels.shape[2]
    if channels == 3:
        return pixels
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    colors, alpha = pixels[..., :3], pixels[..., 3:4]
    if (alpha == WHITE).all():
        return np.ascontiguousarray(colors)
    opacity = alpha.astype(np.uint16)
    blended = (colors * opacity + WHITE * (WHITE - opacity) + WHITE // 2) // WHITE
    return blended.astype(np.uint8)


def _overlap(start: int, size: int, other_start: int, other_size: int) -> tuple[slice, slice]:
    """Return the overlap of two ranges of rows or columns, as a slice of the first and a slice of the second range.

    A range is given by its first row or column and by the number of its rows or columns.
    """
    first, end = max(start, other_start), min(start + size, other_start + other_size)
    return slice(first - start, end - start), slice(first - other_start, end - other_start)


def _inspect_tiff(path: Path) -> tuple[int, str]:
    """Return the number of levels and the data type of the first image in a TIFF file; 0 and "" for other files."""
    from tifffile import TiffFile

    log = logging.getLogger("tifffile")
    was_disabled = log.disabled
    log.disabled = True  # tifffile would log errors of the file, which the next library reports
    try:
        with TiffFile(path) as tiff:
            return len(tiff.series[0].levels), str(tiff.series[0].dtype)
    except Exception:  # tifffile raises errors of any type for damaged bytes
        return 0, ""
    finally:
        log.disabled = was_disabled


# Errors


def _missing_package(path: Path, package: str) -> UnreadableImageError:
    return UnreadableImageError(path, f"is a whole slide and needs {package}; install it: {install_command('slides')}.")


@contextmanager
def _errors_in_one_sentence(path: Path) -> Iterator[None]:
    """Convert any error of a slide library to an UnreadableImageError with a message of one sentence."""
    try:
        yield
    except PermissionError as error:
        raise UnreadableImageError(path, f"cannot be read ({error.strerror}).") from None
    except Exception as error:  # decoders raise errors of any type for damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableImageError(
            path, f"is damaged and cannot be decoded ({reason}); download or export it again."
        ) from None
