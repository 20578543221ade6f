"""Whole slides drawn for tests and benchmarks: white glass, islands of tissue, and marks at known places.

A tile of glass is compressed once and written wherever there is no island, so that 40,000 × 40,000 px take seconds, and
no more memory than the islands.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tifffile

GLASS = (244, 244, 244)
STROMA = (226, 160, 196)
MARK = (40, 20, 90)
MARK_PX = 16  # a side
CALM_PX = 32  # around a mark, of one colour, so that nothing else draws its centre away


@dataclass(frozen=True)
class DrawnSlide:
    path: Path
    size_px: tuple[int, int]
    spacing_um_px: float
    islands: tuple[tuple[int, int, int], ...]  # top, left and side, in pixels of level 0
    marks: tuple[tuple[float, float], ...]  # centres, row and column at level 0, whole numbers at edges of pixels


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
    """A pyramidal TIFF that OpenSlide opens; each island has five marks. Islands must not overlap."""
    rng = np.random.default_rng(seed)
    drawn = [_draw_island(rng, side) for _, _, side in islands]
    marks = [
        (top + row + MARK_PX / 2, left + column + MARK_PX / 2)
        for (top, left, _), (_, places) in zip(islands, drawn, strict=True)
        for row, column in places
    ]
    with tifffile.TiffWriter(path, bigtiff=True) as tiff:
        for level in range(levels):
            shrink = factor**level
            rows, columns = (size // shrink for size in size_px)
            pasted = [
                (_shrink(sample, top, left, shrink), -(-top // shrink), -(-left // shrink))
                for (top, left, _), (sample, _) in zip(islands, drawn, strict=True)
            ]
            per_cm = 1e4 / (spacing_um_px * shrink)
            tiff.write(
                _tiles(pasted, rows, columns, tile_px),
                shape=(rows, columns, 3),
                dtype=np.uint8,
                tile=(tile_px, tile_px),
                photometric="rgb",
                compression="adobe_deflate",
                resolution=(per_cm, per_cm),
                resolutionunit="CENTIMETER",
                subfiletype=1 if level else 0,
                metadata=None,
            )
    return DrawnSlide(path, size_px, spacing_um_px, islands, tuple(marks))


def _draw_island(rng: np.random.Generator, side: int) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Pink of a coarse and a fine grain, and the upper left corners of its marks."""
    places = []
    grain = rng.integers(-12, 13, (side, side), dtype=np.int8)
    grain += rng.integers(-20, 21, (-(-side // 32),) * 2, dtype=np.int8).repeat(32, 0).repeat(32, 1)[:side, :side]
    sample = np.stack([(np.int16(value) + grain).clip(0, 235).astype(np.uint8) for value in STROMA], axis=2)
    calm = MARK_PX + 2 * CALM_PX
    room = side // 5 - calm
    for cell in rng.permutation(25)[:5]:  # of a grid of 5 × 5, so that marks keep apart
        top, left = (int(corner * (side // 5) + rng.integers(room)) for corner in divmod(cell, 5))
        sample[top : top + calm, left : left + calm] = STROMA
        top, left = top + CALM_PX, left + CALM_PX
        sample[top : top + MARK_PX, left : left + MARK_PX] = MARK
        places.append((top, left))
    return sample, places


def _shrink(sample: np.ndarray, top: int, left: int, shrink: int) -> np.ndarray:
    """The island's pixels of a level, each the mean of those that it covers; rims that fill none are left out."""
    skip_rows, skip_columns = -top % shrink, -left % shrink
    kept = sample[skip_rows:, skip_columns:]
    rows, columns = kept.shape[0] // shrink, kept.shape[1] // shrink
    parts = kept[: rows * shrink, : columns * shrink].reshape(rows, shrink, columns, shrink, 3)
    return parts.mean(axis=(1, 3), dtype=np.float32).round().astype(np.uint8)


def _tiles(pasted: list[tuple[np.ndarray, int, int]], rows: int, columns: int, tile_px: int) -> Iterator[bytes]:
    glass = np.full((tile_px, tile_px, 3), GLASS, np.uint8)
    empty = zlib.compress(glass.tobytes())
    for top in range(0, rows, tile_px):
        for left in range(0, columns, tile_px):
            tile = None
            for sample, at_row, at_column in pasted:
                first = max(top, at_row), max(left, at_column)
                last = min(top + tile_px, at_row + sample.shape[0]), min(left + tile_px, at_column + sample.shape[1])
                if first[0] < last[0] and first[1] < last[1]:
                    tile = glass.copy() if tile is None else tile
                    part = sample[first[0] - at_row : last[0] - at_row, first[1] - at_column : last[1] - at_column]
                    tile[first[0] - top : last[0] - top, first[1] - left : last[1] - left] = part
            yield empty if tile is None else zlib.compress(tile.tobytes(), level=1)
