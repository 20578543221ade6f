"""The one door to every picture: whole slides and ordinary images, read at any spacing.

In: a path, and the spacing where the file does not tell it. Out: a slide, which reads rectangles given in pixels of the
spacing that is asked for, (h, w, 3) bytes. Tiles fit together: a pixel is the same whatever rectangle it is read in.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath.images.files import UnreadableImageError, is_plausible
from rotopath.images.readers import WHITE, ImageReader, Level, SlideReader, open_reader

MOST_COARSE = 1.02  # a level this much coarser than what is asked for will do
MOST_OBLONG = 1.01  # pixels whose sides differ by less are taken as square
SAME_SCALE = 1e-6  # drifts by a tenth of a pixel along the largest slides
LANCZOS_PX = 3  # its reach to either side, in pixels of the coarser grid
PIECE_PX = 2048  # of a level, read and resampled at once, so that memory stays flat


class Slide:
    """A picture with a spacing. Several threads may read it at once; close it when none does any more.

    Pixel i of a spacing s covers the interval [i·s, (i+1)·s) from the upper and from the left edge of level 0.
    """

    def __init__(self, path: Path, reader: SlideReader, spacing_um_px: float) -> None:
        self.path = path
        self.spacing_um_px = spacing_um_px  # of level 0
        self.levels: tuple[Level, ...] = reader.levels
        self.size_px = reader.levels[0].size_px  # rows and columns of level 0
        self.origin_px = reader.origin_px  # row and column of level 0 where QuPath begins to count
        self._reader = reader

    def size_at(self, spacing_um_px: float) -> tuple[int, int]:
        """Rows and columns at a spacing: of all pixels that have their centres on the slide, and at least one."""
        scale = self._expect_scale(spacing_um_px)
        rows, columns = (max(1, math.ceil(size / scale - 0.5)) for size in self.size_px)
        return rows, columns

    def read(
        self, top_px: int, left_px: int, height_px: int, width_px: int, spacing_um_px: float | None = None
    ) -> NDArray[np.uint8]:
        """A rectangle (height, width, 3), all four numbers in pixels of the spacing; without one, of level 0.

        Read from the coarsest level that is fine enough, low-passed where it is reduced, and white off the slide.
        """
        if height_px < 0 or width_px < 0:
            raise ValueError(f"A rectangle of {height_px} × {width_px} px was asked for; sides are 0 or more.")
        spacing = self.spacing_um_px if spacing_um_px is None else spacing_um_px
        level, scale = self._choose_level(spacing)
        pixels = np.full((height_px, width_px, 3), WHITE, np.uint8)
        rows, columns = self.size_at(spacing)
        last_row, last_column = min(top_px + height_px, rows), min(left_px + width_px, columns)
        step = max(1, int(PIECE_PX / scale))
        for top in range(max(top_px, 0), last_row, step):
            bottom = min(top + step, last_row)
            for left in range(max(left_px, 0), last_column, step):
                right = min(left + step, last_column)
                piece = self._read_piece(level, scale, (top, bottom), (left, right))
                pixels[top - top_px : bottom - top_px, left - left_px : right - left_px] = piece
        return pixels

    def close(self) -> None:
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _choose_level(self, spacing_um_px: float) -> tuple[int, float]:
        """The coarsest level that is fine enough, and the side of a pixel of the spacing in pixels of that level."""
        scale = self._expect_scale(spacing_um_px)
        fine = [i for i, level in enumerate(self.levels) if level.downsample <= scale * MOST_COARSE]
        chosen = max(fine, key=lambda i: self.levels[i].downsample, default=0)
        return chosen, scale / self.levels[chosen].downsample

    def _read_piece(
        self, level: int, scale: float, rows: tuple[int, int], columns: tuple[int, int]
    ) -> NDArray[np.uint8]:
        """The pixels of the spacing between two rows and two columns, all of them on the slide."""
        if abs(scale - 1) < SAME_SCALE:
            return self._read_level(level, rows, columns)
        reach = math.ceil(LANCZOS_PX * max(scale, 1)) + 1
        spans = [
            (math.floor(first * scale) - reach, math.ceil(last * scale) + reach) for first, last in (rows, columns)
        ]
        (top, bottom), (left, right) = (
            (first * scale - start, last * scale - start)
            for (first, last), (start, _) in zip((rows, columns), spans, strict=True)
        )
        # Pillow resamples bytes along one axis, rounds and clips them, and goes on with those: which axis is the first
        # depends on the shape of the piece, and seams would show. Floats are rounded once, in the end.
        pixels = self._read_level(level, *spans).astype(np.float32)
        size, box = (columns[1] - columns[0], rows[1] - rows[0]), (left, top, right, bottom)
        channels = [
            np.asarray(Image.fromarray(pixels[..., k]).resize(size, Image.Resampling.LANCZOS, box=box))
            for k in range(3)
        ]
        return np.stack(channels, axis=2).round().clip(0, WHITE).astype(np.uint8)

    def _read_level(self, level: int, rows: tuple[int, int], columns: tuple[int, int]) -> NDArray[np.uint8]:
        """Pixels of a level; those beyond its edges repeat the last ones on it, so that filters find no edge there."""
        height, width = self.levels[level].size_px
        down = np.arange(*rows).clip(0, height - 1)
        across = np.arange(*columns).clip(0, width - 1)
        top, left = int(down[0]), int(across[0])
        pixels = self._reader.read(level, top, left, int(down[-1]) + 1 - top, int(across[-1]) + 1 - left)
        if pixels.shape[:2] == (len(down), len(across)):
            return pixels
        repeated: NDArray[np.uint8] = pixels[np.ix_(down - top, across - left)]
        return repeated

    def _expect_scale(self, spacing_um_px: float) -> float:
        if not (math.isfinite(spacing_um_px) and spacing_um_px > 0):
            raise ValueError(f"A spacing of {spacing_um_px} µm/px was asked for; it has to be above 0.")
        return spacing_um_px / self.spacing_um_px


def open_slide(path: Path | str, spacing_um_px: float | None = None) -> Slide:
    """A whole slide, or an ordinary image as a slide of one level; a spacing that is given goes before the file's."""
    path = Path(path)
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        raise ValueError(f"A spacing of {spacing_um_px} µm/px is given for {path}; microscopes have 0.05 to 5.")
    reader = open_reader(path)
    try:
        spacing = _spacing(path, reader.pixel_size_um) if spacing_um_px is None else spacing_um_px
    except UnreadableImageError:
        reader.close()
        raise
    return Slide(path, reader, spacing)


@contextmanager
def as_slide(picture: NDArray[np.uint8] | Path | str | Slide, spacing_um_px: float | None = None) -> Iterator[Slide]:
    """A slide that is open, or a file or pixels (H, W, 3) opened as one."""
    if isinstance(picture, Slide):
        yield picture
    elif isinstance(picture, Path | str):
        with open_slide(picture, spacing_um_px) as slide:
            yield slide
    else:
        pixels = np.asarray(picture)
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or 0 in pixels.shape:
            raise ValueError(f"An image is (H, W, 3) bytes; got shape {pixels.shape} of {pixels.dtype}.")
        if spacing_um_px is None:
            raise ValueError("An array does not tell how large its pixels are; give it as spacing_um_px.")
        yield Slide(Path("image"), ImageReader(pixels), spacing_um_px)


def _spacing(path: Path, size_um: tuple[float, float] | None) -> float:
    if size_um is None or not all(is_plausible(side) for side in size_um):
        raise UnreadableImageError(path, "does not tell how large its pixels are; give it as --spacing-um-px.")
    height_um, width_um = size_um
    if max(size_um) > min(size_um) * MOST_OBLONG:
        raise UnreadableImageError(
            path,
            f"has pixels {height_um:g} µm high and {width_um:g} µm wide, but they have to be square; "
            f"resample it, or give the true side as --spacing-um-px.",
        )
    return (height_um + width_um) / 2
