"""Merge connected regions that cross the borders between tiles.

A region is a connected component of the mask of the whole slide. A region that touches no border to another tile is
complete, and `split_tile` returns it immediately. Any other region may have parts in several tiles; a part is a
connected component of the mask of one tile. `Seams` receives the parts of all tiles, row by row, and merges them after
the last tile. Until then, their pixels are kept in temporary files. Two things stay in memory: the edges of tiles, and
a table that states which parts belong to the same region. Points, such as mitoses, are merged in `tasks.detect`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.inference.tiling import Span

LARGEST_PX = 2**24  # largest bounding box of a merged region, in px²: 1 mm² at 0.25 µm/px, far larger than a nucleus
TILES_IN_MEMORY = 16  # number of tiles whose files are cached while regions are merged
PartKey = tuple[int, int]  # key of a part of a region: tile number, number of the part in this tile
Edge = tuple[int, NDArray[np.int32]]  # tile number, part number of each pixel along one edge of the tile (0: no part)


class MergedRegion(NamedTuple):
    """The values of one merged region, in its bounding box on the whole map.

    Pixels of the box that are outside the region have the fill values `background` of `Seams`.
    """

    top: int  # first row of the box
    left: int  # first column of the box
    values: NDArray[np.float32]  # (k, h, w): k channels


class TileParts(NamedTuple):
    """The parts of regions in one tile, without their pixels, as `split_tile` returns them."""

    rows: Span  # of the tile on the whole map
    columns: Span
    number: int  # of the tile
    cut: list[int]  # numbers of the parts that touch a border to another tile
    edges: tuple[NDArray[np.int32], ...]  # part number of each pixel along the top, bottom, left and right edge


def split_tile(
    size: tuple[int, ...],
    folder: Path,
    number: int,
    spans: tuple[Span, Span],
    mask: NDArray[np.bool_],
    values: NDArray[np.float32],
) -> tuple[NDArray[np.bool_], TileParts]:
    """Split the regions of a tile into complete regions and others, and store the pixels of the others in a file.

    A region is complete if it touches no border to another tile. `size` and `folder` are those of `Seams`, and `number`
    counts the tiles from 0. `spans` are the rows and columns of the whole map that the tile covers. `mask` (h, w) is
    true in regions. `values` (k, h, w) are the k channels of the tile. Returns a mask (h, w) of the complete regions,
    and the arguments of `Seams.join`. This function may run in another process than `Seams`.
    """
    rows, columns = spans
    part_numbers, _ = ndimage.label(mask)
    edges = (part_numbers[0], part_numbers[-1], part_numbers[:, 0], part_numbers[:, -1])
    is_inside = (rows.start > 0, rows.stop < size[0], columns.start > 0, columns.stop < size[1])
    inner_edges = [edge for edge, inside in zip(edges, is_inside, strict=True) if inside]
    cut = np.unique(np.concatenate(inner_edges or [part_numbers[:0, 0]]))
    cut = cut[cut > 0]
    is_cut = np.isin(part_numbers, cut)
    pixels = np.flatnonzero(is_cut)
    np.savez(
        folder / f"{number}.npz",
        pixels=pixels,
        part_numbers=part_numbers.ravel()[pixels],
        values=values.reshape(len(values), -1)[:, pixels],
    )
    parts = TileParts(rows, columns, number, cut.tolist(), tuple(edge.copy() for edge in edges))
    return mask & ~is_cut, parts


class Seams:
    """Collects regions from tiles, and merges the parts of regions that cross borders between tiles.

    Call `split_tile` and `join` for each tile, row by row and from left to right, and then `finish`. `size` is the
    number of rows and of columns of the whole map. `background` has a fill value for each of the k channels, for pixels
    that are in the bounding box of a `MergedRegion` but outside the region. Regions are 4-connected: pixels that touch
    only at a corner are not connected. Temporary files are written to `folder`.
    """

    def __init__(self, size: tuple[int, ...], background: Sequence[float], folder: Path) -> None:
        self._size, self._folder = size, folder
        self._background = np.asarray(background, np.float32)
        # Union-find forest of the parts that touch a border to another tile. It maps each part to another part of the
        # same region. The root, which is the part that represents the region, is mapped to itself.
        self._parents: dict[PartKey, PartKey] = {}
        self._tiles: list[tuple[Span, Span]] = []  # rows and columns of each tile
        self._bottom_edges: dict[tuple[int, int], Edge] = {}  # key: row below the tile, first column
        self._right_edges: dict[tuple[int, int], Edge] = {}  # key: column right of the tile, first row
        self._load = lru_cache(maxsize=TILES_IN_MEMORY)(self._load_file)

    def join(self, parts: TileParts) -> None:
        """Record the parts of a tile, and which of them are connected to parts of the tiles above and to the left."""
        rows, columns, number, cut, (top, bottom, left, right) = parts
        self._tiles.append((rows, columns))
        self._parents |= {(number, part): (number, part) for part in cut}
        self._join_edges(number, top, self._bottom_edges.pop((rows.start, columns.start), None))
        self._join_edges(number, left, self._right_edges.pop((columns.start, rows.start), None))
        self._bottom_edges[rows.stop, columns.start] = (number, bottom)
        self._right_edges[columns.stop, rows.start] = (number, right)

    def finish(self) -> Iterator[MergedRegion]:
        """Merge and yield all regions that touch a border between tiles. Call this after the last tile."""
        groups: defaultdict[PartKey, list[PartKey]] = defaultdict(list)
        for key in self._parents:
            groups[self._find_root(key)].append(key)
        for keys in groups.values():
            yield from self._merge([self._read_part(key) for key in keys])

    def _merge(self, parts: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Iterator[MergedRegion]:
        """Merge the parts of one region, as `_read_part` returns them, and yield the region.

        If the bounding box of the region is larger than `LARGEST_PX`, each part is yielded as a separate region.
        """
        positions = np.concatenate([positions for positions, _ in parts], axis=1)  # (2, pixels)
        top, left = positions.min(axis=1)
        height, width = positions.max(axis=1) + 1 - (top, left)
        if height * width > LARGEST_PX and len(parts) > 1:
            for part in parts:
                yield from self._merge([part])
            return
        values = np.concatenate([values for _, values in parts], axis=1)  # (k, pixels)
        box = np.empty((len(values), height, width), np.float32)
        box[:] = self._background[:, None, None]
        box[:, positions[0] - top, positions[1] - left] = values
        yield MergedRegion(int(top), int(left), box)

    def _read_part(self, key: PartKey) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the part of a region in one tile: pixel positions on the whole map (2, pixels) and values (k, pixels).

        `key` is the number of the tile and the number of the part in this tile.
        """
        number, part = key
        pixels, part_numbers, values = self._load(number)
        inside = part_numbers == part
        rows, columns = self._tiles[number]
        down, right = np.divmod(pixels[inside], columns.size)
        return np.stack([down + rows.start, right + columns.start]), values[:, inside]

    def _load_file(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        """Return three arrays that `split_tile` saved for a tile: flat indices, part numbers and values of pixels.

        Indices and part numbers are (pixels,), and values are (k, pixels).
        """
        with np.load(self._folder / f"{number}.npz") as arrays:
            return arrays["pixels"], arrays["part_numbers"], arrays["values"]

    def _join_edges(self, number: int, edge: NDArray[np.int32], neighbor: Edge | None) -> None:
        """Record which parts in a tile and in a neighboring tile are connected across the border between the tiles.

        `number` is the number of the tile. `edge` has the part number of each pixel of this tile along the border (0:
        no part). `neighbor` is the tile number and the edge of the tile on the other side of the border, or None if
        that tile was not added.
        """
        if neighbor is None:
            return
        neighbor_number, neighbor_edge = neighbor
        touching = (edge > 0) & (neighbor_edge > 0)
        pairs = np.unique(np.stack([edge[touching], neighbor_edge[touching]]), axis=1)
        for part, neighbor_part in pairs.T.tolist():
            self._parents[self._find_root((number, part))] = self._find_root((neighbor_number, neighbor_part))

    def _find_root(self, key: PartKey) -> PartKey:
        """Return the key of the root, which is the part that represents the region of the part `key`.

        This also shortens the path from the part to the root in `_parents`, so that later calls are faster.
        """
        while self._parents[key] != key:
            self._parents[key] = self._parents[self._parents[key]]
            key = self._parents[key]
        return key
