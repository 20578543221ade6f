"""How a network's outputs come to lie on an image of any size, and how an image is divided into tiles.

In: a network and a size. Out: spans of pixels that the network has to see, on its pooling grid, and spans of outputs.

Regions that the seams between tiles cut through, put together again.

In: tiles, row by row, with the regions that they see and the pixels of those that touch a seam. Out: whole regions,
once all tiles are there. Pixels wait in files; memory knows which regions are one, and no more.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.models import Geometry


class Span(NamedTuple):
    """A stretch along one side, in pixels or outputs, of which some may lie outside of the image."""

    start: int
    stop: int

    def widened(self, by: int) -> "Span":
        return Span(self.start - by, self.stop + by)

    def moved(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)

    def within(self, whole: "Span") -> slice:
        """Where it lies in a longer one."""
        return slice(self.start - whole.start, self.stop - whole.start)

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """How outputs come to lie along one side of an image."""

    frame_px: Span  # that the network sees, on the pooling grid and about the middle of the image
    outputs: int  # in that frame
    kept: Span  # those outputs that lie on the image
    first_px: float  # of the first one that is kept

    def seen_px(self, geometry: Geometry, outputs: Span) -> Span:
        """The pixels that the network sees for some outputs, whole blocks of them."""
        stride = geometry.stride_px
        return Span(outputs.start * stride, outputs.stop * stride + geometry.lost_px).moved(self.frame_px.start)


def lay_out(geometry: Geometry, size_px: int) -> Layout:
    """The layout of outputs along a side of `size_px` pixels, which is mirrored beyond its ends."""
    framed = geometry.nearest_sizes(size_px + geometry.lost_px)[-1]
    # As much on either side, so that a rotated image gets a rotated frame: exactly, where an even number is added.
    before = (framed - size_px) // 2
    outputs, stride = geometry.output_size(framed), geometry.stride_px
    first = (framed - 1 - (outputs - 1) * stride) / 2 - before
    places = first + stride * np.arange(outputs)
    on_image = np.flatnonzero((places >= -0.5) & (places <= size_px - 0.5))
    kept = Span(int(on_image[0]), int(on_image[-1]) + 1)
    return Layout(Span(-before, framed - before), outputs, kept, float(places[kept.start]))


def divide(
    geometry: Geometry, wanted: Span, outputs: int, tile_px: int, multiple: int = 1
) -> Iterator[tuple[Span, Span]]:
    """Where tiles lie along a side, in outputs: all of one size but for the last, however many there are.

    The second span of each is what the network has to answer for it: blocks of outputs on the pooling grid, and
    further, where outputs feel the edge of a tile. Tiles begin at multiples of `multiple` from the first output.
    """
    if tile_px < geometry.smallest_px:
        raise ValueError(f"Tiles have at least the {geometry.smallest_px} px that an answer needs; got {tile_px}.")
    block = geometry.block
    rim = -(-geometry.rim // block) * block
    uneven = 0 if wanted.start % block == multiple % block == 0 else 2 * (block - 1)
    most = max(multiple, geometry.output_size(geometry.nearest_sizes(tile_px)[0]) - 2 * rim - uneven)
    for start in range(wanted.start, wanted.stop, step := most - most % multiple):
        tile = Span(start, min(start + step, wanted.stop))
        yield tile, cover(geometry, tile, outputs)


def cover(geometry: Geometry, wanted: Span, outputs: int) -> Span:
    """What the network has to answer, of all outputs, for some that are wanted to be as they are in the whole image."""
    block = geometry.block
    rim = -(-geometry.rim // block) * block
    first, last = wanted.start // block * block, -(-wanted.stop // block) * block
    return Span(max(0, first - rim), min(outputs, last + rim))


LARGEST_PX = 2**24  # of a rectangle around a region; what is larger than a square millimetre is not one nucleus
Part = tuple[int, int]  # the number of a tile, and of a region in it


class Region(NamedTuple):
    """A rectangle, and the values (k, h, w) of one region in it; others are what they are where there is nothing."""

    top: int
    left: int
    values: NDArray[np.float32]


class Seams:
    """`size` are the rows and columns of everything; `nothing` the values (k,) of a pixel that is in no region."""

    def __init__(self, size: tuple[int, ...], nothing: Sequence[float], folder: Path) -> None:
        self._size, self._folder = size, folder
        self._nothing = np.asarray(nothing, np.float32)
        self._parents: dict[Part, Part] = {}
        self._tiles: list[tuple[Span, Span]] = []
        self._below: dict[tuple[int, int], tuple[int, NDArray[np.int32]]] = {}  # by the tile's last row, first column
        self._beside: dict[tuple[int, int], tuple[int, NDArray[np.int32]]] = {}  # by its last column, first row
        self._read = lru_cache(maxsize=16)(self._read_from_file)

    def take(
        self, rows: Span, columns: Span, mask: NDArray[np.bool_], values: NDArray[np.float32]
    ) -> NDArray[np.bool_]:
        """Keep what touches a seam of the tile for later; gives where the regions are that are whole already."""
        regions, _ = ndimage.label(mask)
        number = len(self._tiles)
        self._tiles.append((rows, columns))
        edges = [
            edge
            for edge, is_seam in (
                (regions[0], rows.start > 0),
                (regions[-1], rows.stop < self._size[0]),
                (regions[:, 0], columns.start > 0),
                (regions[:, -1], columns.stop < self._size[1]),
            )
            if is_seam
        ]
        cut = np.unique(np.concatenate(edges or [regions[:0, 0]]))
        cut = cut[cut > 0]
        self._parents |= {(number, int(region)): (number, int(region)) for region in cut}
        self._join(number, regions[0], self._below.pop((rows.start, columns.start), None))
        self._join(number, regions[:, 0], self._beside.pop((columns.start, rows.start), None))
        self._below[rows.stop, columns.start] = (number, regions[-1])
        self._beside[columns.stop, rows.start] = (number, regions[:, -1])
        is_cut = np.isin(regions, cut)
        places = np.flatnonzero(is_cut)
        np.savez(
            self._folder / f"{number}.npz",
            places=places,
            regions=regions.ravel()[places],
            values=values.reshape(len(values), -1)[:, places],
        )
        return mask & ~is_cut

    def finish(self) -> Iterator[Region]:
        """All regions that were cut, each once and whole."""
        groups: defaultdict[Part, list[Part]] = defaultdict(list)
        for part in self._parents:
            groups[self._root(part)].append(part)
        for parts in groups.values():
            yield from self._put_together([self._piece(part) for part in parts])

    def _put_together(self, pieces: list[tuple[NDArray[np.int64], NDArray[np.float32]]]) -> Iterator[Region]:
        """One region; if that would be too large, each piece by itself."""
        places = np.concatenate([one for one, _ in pieces], axis=1)  # (2, pixels)
        top, left = places.min(axis=1)
        height, width = places.max(axis=1) + 1 - (top, left)
        if height * width > LARGEST_PX and len(pieces) > 1:
            for piece in pieces:
                yield from self._put_together([piece])
            return
        values = np.concatenate([one for _, one in pieces], axis=1)  # (k, pixels)
        whole = np.empty((len(values), height, width), np.float32)
        whole[:] = self._nothing[:, None, None]
        whole[:, places[0] - top, places[1] - left] = values
        yield Region(int(top), int(left), whole)

    def _piece(self, part: Part) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Rows and columns (2, pixels), and values (k, pixels), of a region in a tile."""
        number, region = part
        places, regions, values = self._read(number)
        here = regions == region
        rows, columns = self._tiles[number]
        down, across = np.divmod(places[here], columns.size)
        return np.stack([down + rows.start, across + columns.start]), values[:, here]

    def _read_from_file(self, number: int) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.float32]]:
        with np.load(self._folder / f"{number}.npz") as kept:
            return kept["places"], kept["regions"], kept["values"]

    def _join(self, number: int, edge: NDArray[np.int32], neighbour: tuple[int, NDArray[np.int32]] | None) -> None:
        """Regions on both sides of a seam are one where their pixels are beside each other."""
        if neighbour is None:
            return
        other, other_edge = neighbour
        both = (edge > 0) & (other_edge > 0)
        for mine, its in np.unique(np.stack([edge[both], other_edge[both]]), axis=1).T.tolist():
            self._parents[self._root((number, mine))] = self._root((other, its))

    def _root(self, part: Part) -> Part:
        while self._parents[part] != part:
            self._parents[part] = self._parents[self._parents[part]]
            part = self._parents[part]
        return part
