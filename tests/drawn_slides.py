"""Draw whole slides for tests and benchmarks: white glass, islands of tissue, and marks at known positions.

A tile of glass is compressed once and written wherever there is no island. So a slide of 40,000 × 40,000 px takes
seconds, and no more memory than its islands.
"""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tifffile

GLASS = (244, 244, 244)
STROMA = (226, 160, 196)
MARK = (40, 20, 90)
MARK_PX = 16  # side
PLAIN_PX = 32  # margin of one color around a mark, so that nothing else shifts its measured center


@dataclass(frozen=True)
class DrawnSlide:
    """A slide file, and what is drawn on it."""

    path: Path
    size_px: tuple[int, int]
    spacing_um_px: float
    islands: tuple[tuple[int, int, int], ...]  # top, left and side, in pixels of level 0
    marks: tuple[tuple[float, float], ...]  # centers: row and column at level 0; whole numbers are edges of pixels


def draw_slide(
    path: Path,
    size_px: tuple[int, int] = (1536, 2048),
    islands: tuple[tuple[int, int, int], ...] = ((256, 256, 512), (700, 1300, 640)),
    spacing_um_px: float = 0.25,
    factor: int = 4,
    levels: int = 3,
    tile_px: int = 256,
    seed: int = 0,
) -> DrawnSlide:
    """Write a pyramidal TIFF that OpenSlide opens. Each island has five marks; islands must not overlap."""
    rng = np.random.default_rng(seed)
    drawn = [_draw_island(rng, side) for _, _, side in islands]
    marks = [
        (top + row + MARK_PX / 2, left + column + MARK_PX / 2)
        for (top, left, _), (_, corners) in zip(islands, drawn, strict=True)
        for row, column in corners
    ]

    def make_tiles(step: int) -> Iterator[bytes]:
        pasted = [
            (_reduce(island, top, left, step), -(-top // step), -(-left // step))
            for (top, left, _), (island, _) in zip(islands, drawn, strict=True)
        ]
        return _tiles(pasted, *(size // step for size in size_px), tile_px)

    write_levels(path, make_tiles, size_px, spacing_um_px, factor, levels, tile_px)
    return DrawnSlide(path, size_px, spacing_um_px, islands, tuple(marks))


def write_levels(
    path: Path,
    make_tiles: Callable[[int], Iterator[bytes]],
    size_px: tuple[int, int],
    spacing_um_px: float,
    factor: int,
    levels: int,
    tile_px: int,
) -> None:
    """Write a pyramidal TIFF that OpenSlide opens. Each level is smaller than the one before by `factor`.

    `make_tiles` returns the tiles of a level, row by row, each compressed by zlib. Its argument is the side of a pixel
    of the level, in pixels of level 0.
    """
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for level in range(levels):
            step = factor**level
            pixels_per_cm = 1e4 / (spacing_um_px * step)
            tiff.write(
                make_tiles(step),
                shape=(*(size // step for size in size_px), 3),
                dtype=np.uint8,
                tile=(tile_px, tile_px),
                photometric="rgb",
                compression="adobe_deflate",
                resolution=(pixels_per_cm, pixels_per_cm),
                resolutionunit="CENTIMETER",
                subfiletype=1 if level else 0,
                metadata=None,
            )


def _draw_island(rng: np.random.Generator, side: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Return pink pixels with coarse and fine noise, and the upper left corners of the marks."""
    corners = []
    grain = rng.integers(-12, 13, (side, side), dtype=np.int8)
    grain += rng.integers(-20, 21, (-(-side // 32),) * 2, dtype=np.int8).repeat(32, 0).repeat(32, 1)[:side, :side]
    island = np.stack([(np.int16(value) + grain).clip(0, 235).astype(np.uint8) for value in STROMA], axis=2)
    plain = MARK_PX + 2 * PLAIN_PX
    free = side // 5 - plain
    for cell in rng.permutation(25)[:5]:  # of a grid of 5 × 5, so that marks are apart
        top, left = (int(corner * (side // 5) + rng.integers(free)) for corner in divmod(cell, 5))
        island[top : top + plain, left : left + plain] = STROMA
        top, left = top + PLAIN_PX, left + PLAIN_PX
        island[top : top + MARK_PX, left : left + MARK_PX] = MARK
        corners.append((top, left))
    return island, corners


def _reduce(island: np.ndarray, top: int, left: int, step: int) -> np.ndarray:
    """Return the island at a lower level; each pixel is a mean. Margins that do not fill a pixel are left out."""
    skip_rows, skip_columns = -top % step, -left % step
    kept = island[skip_rows:, skip_columns:]
    rows, columns = kept.shape[0] // step, kept.shape[1] // step
    squares = kept[: rows * step, : columns * step].reshape(rows, step, columns, step, 3)
    return squares.mean(axis=(1, 3), dtype=np.float32).round().astype(np.uint8)


def _tiles(pasted: list[tuple[np.ndarray, int, int]], rows: int, columns: int, tile_px: int) -> Iterator[bytes]:
    """Yield the compressed tiles of a level, row by row."""
    glass = np.full((tile_px, tile_px, 3), GLASS, np.uint8)
    empty = zlib.compress(glass.tobytes())
    for top in range(0, rows, tile_px):
        for left in range(0, columns, tile_px):
            tile = None
            for island, island_top, island_left in pasted:
                first = max(top, island_top), max(left, island_left)
                last = (
                    min(top + tile_px, island_top + island.shape[0]),
                    min(left + tile_px, island_left + island.shape[1]),
                )
                if first[0] < last[0] and first[1] < last[1]:
                    tile = glass.copy() if tile is None else tile
                    part = island[
                        first[0] - island_top : last[0] - island_top, first[1] - island_left : last[1] - island_left
                    ]
                    tile[first[0] - top : last[0] - top, first[1] - left : last[1] - left] = part
            yield empty if tile is None else zlib.compress(tile.tobytes(), level=1)
