"""Outlines: objects of a label map as polygons along the edges of their pixels, and polygons as pixels again.

In: object numbers (H, W). Out: for each object its parts, each an outer ring and the rings of its holes. Vertices are
rows and columns at the corners of pixels, as QuPath counts: pixel (0, 0) lies between (0, 0) and (1, 1).
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from skimage.measure import label

Ring = NDArray[np.float64]  # (k, 2) rows and columns; the last vertex is joined to the first one
EAST, SOUTH, WEST, NORTH = range(4)
STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # (row, column)


@dataclass(frozen=True, eq=False)
class Polygon:
    """One part of an object: nothing in it is joined by a corner only.

    Outer rings turn as x does towards y, and holes the other way: the right-hand rule of GeoJSON.
    """

    outer: Ring
    holes: tuple[Ring, ...] = ()

    @property
    def rings(self) -> tuple[Ring, ...]:
        return (self.outer, *self.holes)

    @property
    def area_px(self) -> float:
        return sum(signed_area(ring) for ring in self.rings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Polygon) or len(self.holes) != len(other.holes):
            return False
        return all(np.array_equal(mine, its) for mine, its in zip(self.rings, other.rings, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(ring.tobytes() for ring in self.rings))


def trace_outlines(
    labels: NDArray[np.integer], offset_px: tuple[float, float] = (0, 0), scale: float = 1.0, fill_holes: bool = False
) -> dict[int, tuple[Polygon, ...]]:
    """The parts of each object, by its number: exact, so that `fill_outline` gives the same pixels again.

    Vertices are multiplied by the scale and then moved by the offset, to places of level 0 for instance. Holes are kept
    where they are wanted: a tumor has them, a nucleus has none.
    """
    parts: NDArray[np.int64] = label(labels, background=0, connectivity=1)  # type: ignore[no-untyped-call]
    numbers = np.zeros(int(parts.max(initial=0)) + 1, np.int64)
    numbers[parts.ravel()] = labels.ravel()
    rings: defaultdict[int, list[Ring]] = defaultdict(list)
    for part, ring in _rings(parts):
        rings[part].append(ring)
    outlines: defaultdict[int, list[Polygon]] = defaultdict(list)
    for part in sorted(rings):
        placed = [ring * scale + offset_px for ring in sorted(rings[part], key=signed_area, reverse=True)]
        outer, *holes = placed  # the only ring of a part with an area above 0, and those below it
        outlines[int(numbers[part])].append(Polygon(outer, () if fill_holes else tuple(holes)))
    return {number: tuple(outlines[number]) for number in sorted(outlines)}


def fill_outline(
    polygons: Iterable[Polygon], size_px: tuple[int, int], offset_px: tuple[float, float] = (0, 0)
) -> NDArray[np.bool_]:
    """The pixels (H, W) whose centres lie inside, by the even-odd rule; the offset is the corner of the first one."""
    height, width = size_px
    crossings = np.zeros((height, width + 1), np.int64)
    for polygon in polygons:
        for ring in polygon.rings:
            _count_crossings(crossings, ring - offset_px)
    inside: NDArray[np.bool_] = np.cumsum(crossings[:, :width], axis=1) % 2 == 1
    return inside


def _ahead(ring: Ring) -> Ring:
    """For each vertex the next one, and the first for the last."""
    return np.concatenate([ring[1:], ring[:1]])


def signed_area(ring: Ring) -> float:
    """In pixels; above 0 where the ring turns as x does towards y."""
    rows, columns = (ring - ring[0]).T
    return float(columns @ _ahead(rows) - rows @ _ahead(columns)) / 2


def _rings(parts: NDArray[np.int64]) -> Iterator[tuple[int, Ring]]:
    """The closed rings around and inside each part, with its pixels to the right of the way, corners only."""
    owners, ways, starts = _edges(parts)
    width = parts.shape[1] + 1
    ends = starts + (STEPS @ (width, 1))[ways]
    # As many edges of a part end at a corner as start there: the first one there goes on as the first one from there.
    # Two do where pixels meet at a corner only, and however they go on, the ring is split there.
    owned = owners * (math.prod(parts.shape) + sum(parts.shape) + 1)
    following = np.empty_like(starts)
    following[np.argsort(owned + ends, kind="stable")] = np.argsort(owned + starts, kind="stable")
    next_of, way_of, start_of, owner_of = (values.tolist() for values in (following, ways, starts, owners))
    met = bytearray(len(next_of))
    for first in range(len(next_of)):
        if met[first]:
            continue
        ring, edge, way = [], first, way_of[first]
        while not met[edge]:
            met[edge] = True
            edge = next_of[edge]
            if way_of[edge] != way:
                ring.append(start_of[edge])
                way = way_of[edge]
        for simple in _split(ring):
            yield owner_of[first], np.stack(np.divmod(np.array(simple), width), axis=1).astype(np.float64)


def _edges(parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """All edges between a part and something else: its number, the way along the edge, and the corner it starts at.

    Corners are counted row by row, one more in each row than there are pixels.
    """
    width = parts.shape[1] + 1
    around = np.pad(parts, 1)
    owners, ways, starts = [], [], []
    above, below = around[:-1, 1:-1], around[1:, 1:-1]  # of each horizontal edge
    before, after = around[1:-1, :-1], around[1:-1, 1:]  # of each vertical edge
    for owner, other, way, shift in (
        (below, above, EAST, 0),
        (before, after, SOUTH, 0),
        (above, below, WEST, 1),
        (after, before, NORTH, width),
    ):
        rows, columns = np.nonzero((owner != other) & (owner > 0))
        owners.append(owner[rows, columns])
        ways.append(np.full(len(rows), way))
        starts.append(rows * width + columns + shift)
    return np.concatenate(owners), np.concatenate(ways), np.concatenate(starts)


def _split(ring: list[int]) -> Iterator[list[int]]:
    """The ring cut where it meets itself at a corner, so that each piece is simple: a hole that touches the outside."""
    if len(set(ring)) == len(ring):
        yield ring
        return
    walked: list[int] = []
    at: dict[int, int] = {}
    for corner in ring:
        if corner in at:
            loop = walked[at[corner] :]
            yield loop
            for left in loop:
                del at[left]
            del walked[len(walked) - len(loop) :]
        at[corner] = len(walked)
        walked.append(corner)
    yield walked


def _count_crossings(crossings: NDArray[np.int64], ring: Ring) -> None:
    """Add 1 in each row to the first pixel whose centre lies beyond an edge of the ring."""
    height, last = crossings.shape[0], crossings.shape[1] - 1
    ahead = _ahead(ring)
    first = np.ceil(np.minimum(ring[:, 0], ahead[:, 0]) - 0.5).clip(0, height).astype(np.int64)
    stop = np.ceil(np.maximum(ring[:, 0], ahead[:, 0]) - 0.5).clip(0, height).astype(np.int64)
    counts = stop - first
    edges = np.repeat(np.arange(len(ring)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edges]
    (row0, column0), (row1, column1) = ring[edges].T, ahead[edges].T
    columns = column0 + (rows + 0.5 - row0) / (row1 - row0) * (column1 - column0)
    np.add.at(crossings, (rows, np.ceil(columns - 0.5).clip(0, last).astype(np.int64)), 1)
