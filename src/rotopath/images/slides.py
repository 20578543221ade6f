"""Read rectangles of pixels from whole slides and ordinary images, at any pixel spacing.

`open_slide` opens a file as a `Slide`. `Slide.read` returns a rectangle of pixels, an array (h, w, 3) of uint8. The
position and size of the rectangle are in pixels at the requested pixel spacing (µm/px). A pixel has the same value in
every rectangle that contains it (up to rounding), so that adjacent tiles show no seams. Level 0 is the highest
resolution in a file.
"""

import math
import os
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath.images.containers import FileContents
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableImageError, is_plausible
from rotopath.images.readers import WHITE, ImageReader, Level, SlideReader, open_reader

LEVEL_TOLERANCE = 1.02  # a level is fine enough if its pixel spacing is at most this times the requested pixel spacing
SQUARE_TOLERANCE = 1.01  # pixels are treated as square up to this ratio of their sides
# If the requested pixel spacing differs from that of a level by less than this fraction, pixels are not resampled. The
# error is at most 0.1 px on a side of 100,000 px.
SAME_SCALE = 1e-6
CONTRADICTION = 0.01  # a given pixel spacing contradicts the file if it differs from that of the file by over 1 %
LARGE_PX = 16_384  # without reduced levels, slides with a longer side take long to search for tissue
LANCZOS_PX = 3  # radius of the filter, in pixels before or after resampling, whichever are larger
KEPT_OPEN = 64  # slides that a process keeps open
BLOCK_PX = 2048  # to limit memory, larger rectangles are resampled in blocks of this side, in pixels of the level


class Slide:
    """An open slide or image with a known pixel spacing.

    At a pixel spacing of s µm/px, pixel i extends from i·s to (i+1)·s µm, measured from the top or left edge of level
    0. Several threads may read from a slide at the same time; close the slide only after all threads have finished.

    >>> pixels = np.full((100, 200, 3), 255, np.uint8)
    >>> with as_slide(pixels, spacing_um_px=0.25) as slide:
    ...     slide.size_px, slide.size_at(0.5), slide.read(0, 0, 10, 20, 0.5).shape
    ((100, 200), (50, 100), (10, 20, 3))
    """

    def __init__(self, path: Path, reader: SlideReader, spacing_um_px: float) -> None:
        self.path = path
        self.spacing_um_px = spacing_um_px  # pixel spacing of level 0
        self.levels: tuple[Level, ...] = reader.levels
        self.size_px = reader.levels[0].size_px  # rows and columns of level 0
        self.origin_px = reader.origin_px  # row and column of level 0 that QuPath counts as (0, 0)
        self._reader = reader

    def __reduce__(self) -> tuple[Any, ...]:
        return open_slide, (self.path, self.spacing_um_px, True)  # another process opens the file itself

    def has_level(self, spacing_um_px: float) -> bool:
        """Return whether a level has this pixel spacing, so that pixels are read without resampling."""
        return abs(self._choose_level(spacing_um_px)[1] - 1) < SAME_SCALE

    def size_at(self, spacing_um_px: float) -> tuple[int, int]:
        """Return the number of rows and of columns at a pixel spacing, each at least 1.

        A row or column is counted if the centers of its pixels are on the slide.
        """
        scale = self._expect_scale(spacing_um_px)
        rows, columns = (max(1, math.ceil(size / scale - 0.5)) for size in self.size_px)
        return rows, columns

    def read(
        self, top_px: float, left_px: float, height_px: int, width_px: int, spacing_um_px: float | None = None
    ) -> NDArray[np.uint8]:
        """Read a rectangle of pixels (height, width, 3) at a pixel spacing, by default that of level 0.

        `top_px` and `left_px` are the position of the upper left pixel; this position and the size are in pixels of the
        given spacing. The position may be a fraction. Pixels are read from the coarsest level whose spacing is at most
        2 % above the given spacing, or from level 0 if there is no such level. If the level has another spacing, pixels
        are resampled with a low-pass filter. Pixels outside the slide are white.
        """
        if height_px < 0 or width_px < 0:
            raise ValueError(f"A rectangle of {height_px} × {width_px} px was requested; sides must be 0 or more.")
        spacing = self.spacing_um_px if spacing_um_px is None else spacing_um_px
        level, scale = self._choose_level(spacing)
        pixels = np.full((height_px, width_px, 3), WHITE, np.uint8)
        rows, columns = self.size_at(spacing)
        first_row, first_column = math.floor(top_px), math.floor(left_px)
        down, aside = top_px - first_row, left_px - first_column
        row_end, column_end = min(first_row + height_px, rows), min(first_column + width_px, columns)
        step = max(1, int(BLOCK_PX / scale))
        for top in range(max(first_row, 0), row_end, step):
            bottom = min(top + step, row_end)
            for left in range(max(first_column, 0), column_end, step):
                right = min(left + step, column_end)
                block = self._read_block(level, scale, (top + down, bottom + down), (left + aside, right + aside))
                pixels[top - first_row : bottom - first_row, left - first_column : right - first_column] = block
        return pixels

    def close(self) -> None:
        """Close the file. The slide cannot be read afterwards."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose_level(self, spacing_um_px: float) -> tuple[int, float]:
        """Choose the level from which pixels are read for a requested pixel spacing.

        This is the coarsest level whose spacing is at most 2 % (LEVEL_TOLERANCE) above the requested spacing, or level
        0 if there is no such level. Returns the index of the level, and the scale: the side of a pixel at the requested
        spacing, in pixels of the level.
        """
        scale = self._expect_scale(spacing_um_px)
        fine_enough = [i for i, level in enumerate(self.levels) if level.downsample <= scale * LEVEL_TOLERANCE]
        chosen = max(fine_enough, key=lambda i: self.levels[i].downsample, default=0)
        return chosen, scale / self.levels[chosen].downsample

    def _read_block(
        self, level: int, scale: float, rows: tuple[float, float], columns: tuple[float, float]
    ) -> NDArray[np.uint8]:
        """Read a rectangle on the slide from a level, and resample its pixels to the requested pixel spacing.

        `rows` and `columns` are ranges (first, end) that do not include `end`, in pixels at the requested spacing.
        `scale` is the side of a pixel at the requested spacing, in pixels of the level.
        """
        size = round(columns[1] - columns[0]), round(rows[1] - rows[0])
        if abs(scale - 1) < SAME_SCALE and rows[0] % 1 == columns[0] % 1 == 0:
            (top, left), (width, height) = (int(rows[0]), int(columns[0])), size
            return self._read_level(level, (top, top + height), (left, left + width))
        margin = math.ceil(LANCZOS_PX * max(scale, 1)) + 1
        spans = [
            (math.floor(first * scale) - margin, math.ceil(end * scale) + margin) for first, end in (rows, columns)
        ]
        (upper, lower), (left_edge, right_edge) = (
            (first * scale - start, end * scale - start)
            for (first, end), (start, _) in zip((rows, columns), spans, strict=True)
        )
        # Pillow resamples uint8 images along one axis, rounds the values, and then resamples along the other axis. The
        # order of the axes depends on the shape of the block, so that seams would be visible between blocks. Float
        # images are not rounded in between.
        pixels = self._read_level(level, *spans).astype(np.float32)
        box = left_edge, upper, right_edge, lower
        channels = [
            np.asarray(Image.fromarray(pixels[..., k]).resize(size, Image.Resampling.LANCZOS, box=box))
            for k in range(3)
        ]
        return np.stack(channels, axis=2).round().clip(0, WHITE).astype(np.uint8)

    def _read_level(self, level: int, rows: tuple[int, int], columns: tuple[int, int]) -> NDArray[np.uint8]:
        """Read ranges (first, end) of rows and columns of a level. Beyond the level, its edge pixels are repeated."""
        height, width = self.levels[level].size_px
        row_indices = np.arange(*rows).clip(0, height - 1)
        column_indices = np.arange(*columns).clip(0, width - 1)
        top, left = int(row_indices[0]), int(column_indices[0])
        pixels = self._reader.read(level, top, left, int(row_indices[-1]) + 1 - top, int(column_indices[-1]) + 1 - left)
        if pixels.shape[:2] == (len(row_indices), len(column_indices)):
            return pixels
        repeated: NDArray[np.uint8] = pixels[np.ix_(row_indices - top, column_indices - left)]
        return repeated

    def _expect_scale(self, spacing_um_px: float) -> float:
        """Return the side of a pixel at a pixel spacing, in pixels of level 0.

        Raises ValueError unless the spacing is above 0 and finite.
        """
        if not (math.isfinite(spacing_um_px) and spacing_um_px > 0):
            raise ValueError(f"A pixel spacing of {spacing_um_px} µm/px was requested; it must be above 0 and finite.")
        return spacing_um_px / self.spacing_um_px


def open_slide(path: Path | str, spacing_um_px: float | None = None, override_spacing: bool = False) -> Slide:
    """Open a whole slide, or an ordinary image as a slide with one level.

    `spacing_um_px` is the pixel spacing of level 0; by default it is read from the file. Raises
    `UnreadableImageError` if the file cannot be read, does not state its pixel spacing, or has pixels that are not
    square. Raises it also if `spacing_um_px` differs by more than 1 % from the spacing that the file states, unless
    `override_spacing` is True. Raises ValueError if `spacing_um_px` is implausible.
    """
    path = Path(path)
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        low, high = PLAUSIBLE_UM_PX
        raise ValueError(
            f"The pixel spacing given for {path} is {spacing_um_px} µm/px; pass a number from {low:g} to {high:g}, the "
            f"range of microscopes."
        )
    reader = open_reader(path)
    try:
        spacing = _choose_spacing(path, reader.pixel_size_um, spacing_um_px, override_spacing)
    except UnreadableImageError:
        reader.close()
        raise
    return Slide(path, reader, spacing)


def open_slide_once(path: Path, spacing_um_px: float) -> Slide:
    """Open a slide, or return it if this process has opened it before. A slide is closed after its last use.

    `spacing_um_px` is the pixel spacing of level 0.
    """
    # A changed file is opened again, and a forked process does not use the open file of its parent.
    modified_ns = path.stat().st_mtime_ns if path.exists() else 0
    return _open_once(path, spacing_um_px, modified_ns, os.getpid())


@lru_cache(KEPT_OPEN)
def _open_once(path: Path, spacing_um_px: float, modified_ns: int, process: int) -> Slide:  # noqa: ARG001
    reader = open_reader(path)
    slide = Slide(path, reader, spacing_um_px)
    weakref.finalize(slide, reader.close)
    return slide


@contextmanager
def as_slide(
    image: NDArray[np.uint8] | Path | str | Slide, spacing_um_px: float | None = None, override_spacing: bool = False
) -> Iterator[Slide]:
    """Yield a slide from an array of pixels (H, W, 3), the path of a file, or an open slide, for a `with` statement.

    `spacing_um_px` is the pixel spacing of level 0 in µm/px. It is required for an array. For a file, it is the
    argument of `open_slide`, as is `override_spacing`. For an open slide, both are ignored. A file is closed at the end
    of the `with` statement; a slide that was already open stays open.
    """
    if isinstance(image, Slide):
        yield image
    elif isinstance(image, Path | str):
        with open_slide(image, spacing_um_px, override_spacing) as slide:
            yield slide
    else:
        pixels = np.asarray(image)
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
            raise ValueError(
                f"Expected an image (H, W, 3) of uint8 that is not empty; got shape {pixels.shape} of {pixels.dtype}; "
                f"convert the image first."
            )
        if spacing_um_px is None:
            raise ValueError("An array does not state its pixel spacing; pass the spacing in µm/px as spacing_um_px.")
        yield Slide(Path("image"), ImageReader(pixels), spacing_um_px)


@dataclass(frozen=True)
class SlideDescription:
    """What a slide file contains, and what is missing for a prediction."""

    path: Path
    contents: FileContents
    levels: tuple[Level, ...]
    pixel_size_um: tuple[float, float] | None  # height and width of a pixel; None if not stated, or implausible
    missing: tuple[str, ...]  # sentences


def describe_slide(path: Path) -> SlideDescription:
    """Describe a slide file, an image, or a folder that is a slide, without reading the pixels of a slide.

    Raises UnreadableImageError if it cannot be read.
    """
    reader = open_reader(path)
    try:
        contents, size_um, missing = reader.describe(), reader.pixel_size_um, []
        if size_um is not None and not all(is_plausible(side) for side in size_um):
            size_um = None
        try:
            _expect_spacing(path, reader.pixel_size_um)
        except UnreadableImageError as error:
            missing.append(f"The file {error.fault}")
        if len(reader.levels) == 1 and max(reader.levels[0].size_px) > LARGE_PX:
            missing.append("The file contains no reduced levels, so that its tissue is found slowly.")
        return SlideDescription(path, contents, reader.levels, size_um, tuple(missing))
    finally:
        reader.close()


def _choose_spacing(
    path: Path, size_um: tuple[float, float] | None, given_um_px: float | None, override: bool
) -> float:
    """Return the pixel spacing of a file: the given spacing or, if it is None, that which the file states.

    `size_um` are the height and width of a pixel that the file states, in µm, or None. Raises UnreadableImageError if
    no spacing is known, or if the given spacing contradicts the file and `override` is False.
    """
    if given_um_px is None:
        return _expect_spacing(path, size_um)
    if size_um is not None and not override and all(is_plausible(side) for side in size_um):
        stated_um_px = max(size_um, key=lambda side: abs(side / given_um_px - 1))
        expect_equal_spacing(path, stated_um_px, given_um_px)
    return given_um_px


def expect_equal_spacing(path: Path, stated_um_px: float, given_um_px: float) -> None:
    """Raise UnreadableImageError if a given pixel spacing contradicts that which a file states."""
    if abs(stated_um_px / given_um_px - 1) > CONTRADICTION:
        raise UnreadableImageError(
            path,
            f"states a pixel spacing of {stated_um_px:.4g} µm/px, but {given_um_px:.4g} µm/px was given; leave out "
            f"--spacing-um-px to use that of the file, or add --override-spacing to use the given one.",
        )


def _expect_spacing(path: Path, size_um: tuple[float, float] | None) -> float:
    """Return the pixel spacing of a file: the mean of the height and the width of its pixels, given in µm.

    Raises UnreadableImageError if the size is missing (None) or implausible, or if the pixels are not square.
    """
    if size_um is None or not all(is_plausible(side) for side in size_um):
        raise UnreadableImageError(
            path,
            "does not state the size of its pixels, or states an implausible size; give the pixel spacing in µm/px "
            "with --spacing-um-px.",
        )
    height_um, width_um = size_um
    if max(size_um) > min(size_um) * SQUARE_TOLERANCE:
        raise UnreadableImageError(
            path,
            f"has pixels {height_um:g} µm high and {width_um:g} µm wide, but they must be square; "
            f"resample the image, or give the true pixel spacing with --spacing-um-px and --override-spacing.",
        )
    return (height_um + width_um) / 2
