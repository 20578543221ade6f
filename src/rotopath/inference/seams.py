"""Merge connected regions that cross the borders between tiles.

`Seams` receives the tiles of a slide, row by row, each with a mask. A region is a connected component of the mask. A
region that touches no border to another tile is complete, and is returned immediately. The parts of all other regions
are merged after the last tile. Until then, the pixels of the parts are kept in files; only a table of which parts
belong together stays in memory. Points, such as mitoses, are merged in `tasks.detect`.
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

LARGEST_PX = 2**24  # largest bounding box of a merged region, in px²; 1 mm² at 0.25 µm/px, far more than a nucleus
TILES_IN_MEMORY = 16  # tiles whose files are cached while regions are merged
RegionKey = tuple[int, int]  # tile number, region number in this tile
Edge = tuple[int, NDArray[np.int32]]  # tile number, region number of each pixel along one edge of the tile (0: none)


class Region(NamedTuple):
    """The values of one region, in its bounding box on the whole map.

    Pixels of the box that are outside the region have the fill values `background` of `Seams`.
    """

    top: int  # first row of the box
    left: int  # first column of the box
    values: NDArray[np.float32]  # (k, h, w): k channels


class Seams:
    """Collects regions from tiles, and merges the parts of regions that cross borders between tiles.

    `size` is the number of rows and of columns of the whole map. `background` has a fill value for each of the k
    channels, for pixels that are in the bounding box of a `Region` but outside the region. Regions are 4-connected.
    Temporary files are written to `folder`.
    """

    def __init__(self, size: tuple[int, ...], background: Sequence[float], folder: Path) -> None:
        self._size, self._folder = size, folder
        self._background = np.asarray(background, np.float32)
        self._parents: dict[RegionKey, RegionKey] = {}  # union-find forest of the regions that touch a border
        self._tiles: list[tuple[Span, Span]] = []
        self._bottom_edges: dict[tuple[int, int], Edge] = {}  # key: row below the tile, first column
        self._right_edges: dict[tuple[int, int], Edge] = {}  # key: column right of the tile, first row
        self._load = lru_cache(maxsize=TILES_IN_MEMORY)(self._load_file)

    def add_tile(
        self, rows: Span, columns: Span, mask: NDArray[np.bool_], values: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Return a mask (h, w) of the complete regions in a tile. Store the other regions for `finish`.

        `rows` and `columns` are the rows and columns of the whole map that the tile covers. `mask` (h, w) is true in
        regions. `values` (k, h, w) are the k channels of the tile, which are copied to the merged regions. A region is
        complete if it touches no border to another tile.
        """
        regions, _ = ndimage.label(mask)
        number = len(self._tiles)
        self._tiles.append((rows, columns))
        inner_edges = [
            edge
            for edge, is_inside in (
                (regions[0], rows.start > 0),
                (regions[-1], rows.stop < self._size[0]),
                (regions[:, 0], columns.start > 0),
                (regions[:, -1], columns.stop < self._size[1]),
            )
            if is_inside
        ]
        cut = np.unique(np.concatenate(inner_edges or [regions[:0, 0]]))
        cut = cut[cut > 0]
        self._parents |= {(number, int(region)): (number, int(region)) for region in cut}
        self._join(number, regions[0], self._bottom_edges.pop((rows.start, columns.start), None))
        self._join(number, regions[:, 0], self._right_edges.pop((columns.start, rows.start), None))
        self._bottom_edges[rows.stop, columns.start] = (number, regions[-1])
        self._right_edges[columns.stop, rows.start] = (number, regions[:, -1])
        is_cut = np.isin(regions, cut)
        pixels = np.flatnonzero(is_cut)
        np.savez(
            self._folder / f"{number}.npz",
            pixels=pixels,
            regions=regions.ravel()[pixels],
            values=values.reshape(len(values), -1)[:, pixels],
        )
        return mask & ~is_cut

    def finish(self) -> Iterator[Region]:
        """Merge and yield the regions that touch a border between tiles. Call this after the last tile."""
        groups: defaultdict[RegionKey, list[RegionKey]] = defaultdict(list)
        for key in self._parents:
            groups[self._find_root(key)].append(key)
        for keys in groups.values():
            yield from self._merge([self._read_piece(key) for key in keys])

    def _merge(self, pieces: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Iterator[Region]:
        """Merge the pieces of one region, and yield the region.

        A piece is the part of the region in one tile, as `_read_piece` returns it. If the bounding box of the region is
        larger than `LARGEST_PX`, each piece is yielded as a separate region.
        """
        positions = np.concatenate([positions for positions, _ in pieces], axis=1)  # (2, pixels)
        top, left = positions.min(axis=1)
        height, width = positions.max(axis=1) + 1 - (top, left)
        if height * width > LARGEST_PX and len(pieces) > 1:
            for piece in pieces:
                yield from self._merge([piece])
            return
        values = np.concatenate([values for _, values in pieces], axis=1)  # (k, pixels)
        box = np.empty((len(values), height, width), np.float32)
        box[:] = self._background[:, None, None]
        box[:, positions[0] - top, positions[1] - left] = values
        yield Region(int(top), int(left), box)

    def _read_piece(self, key: RegionKey) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return the part of a region in one tile: pixel positions on the whole map (2, pixels) and values (k, pixels).

        `key` is the number of the tile and the number of the region in this tile.
        """
        number, region = key
        pixels, regions, values = self._load(number)
        inside = regions == region
        rows, columns = self._tiles[number]
        down, right = np.divmod(pixels[inside], columns.size)
        return np.stack([down + rows.start, right + columns.start]), values[:, inside]

    def _load_file(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        with np.load(self._folder / f"{number}.npz") as arrays:
            return arrays["pixels"], arrays["regions"], arrays["values"]

    def _join(self, number: int, edge: NDArray[np.int32], neighbor: Edge | None) -> None:
        """Mark regions of a tile and of a neighbor as parts of one region if their pixels touch across the border.

        `number` is the number of the tile. `edge` has the region number of each pixel of this tile along the border (0:
        no region). `neighbor` is the tile number and the edge of the tile on the other side of the border; None if
        there is no such tile.
        """
        if neighbor is None:
            return
        neighbor_number, neighbor_edge = neighbor
        touching = (edge > 0) & (neighbor_edge > 0)
        pairs = np.unique(np.stack([edge[touching], neighbor_edge[touching]]), axis=1)
        for region, neighbor_region in pairs.T.tolist():
            self._parents[self._find_root((number, region))] = self._find_root((neighbor_number, neighbor_region))

    def _find_root(self, key: RegionKey) -> RegionKey:
        while self._parents[key] != key:
            self._parents[key] = self._parents[self._parents[key]]
            key = self._parents[key]
        return key
