"""Trace the outlines of objects in label maps, smooth the outlines, and measure the objects.

A label map (H, W) contains an object number at each pixel, and 0 for background. An object may have several parts. A
part is a connected component: its pixels are connected by their sides, not only by their corners. The outline of an
object has a polygon for each part. A polygon has an outer ring and a ring for each hole; a ring is a closed line. The
vertices of traced outlines are corners of pixels. Their coordinates are (row, column), as in QuPath: pixel (0, 0)
extends from (0, 0) to (1, 1). If a traced outline is filled, the result is exactly the pixels of the object. Smoothed
outlines have fewer vertices, which are not at corners of pixels, and the same area up to rounding.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import pi
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from skimage.measure import label

from rotopath.images.stain import stain_densities

DECIMALS = 2  # coordinates in files are rounded to a hundredth of a pixel, and vertices of smoothed outlines as well
EAST, SOUTH, WEST, NORTH = range(4)
STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # (rows, columns) of one step in each of these directions
SMOOTHING_STEPS = 4  # a Gaussian with a standard deviation of 1.4 sides of pixels: stairs disappear, shapes do not
VERTEX_SPACING = 3.0  # distance between vertices of smoothed outlines, in pixels: nuclei at 0.25 µm/px have 20 to 40
MIN_VERTICES = 12  # smallest number of vertices of a smoothed outline
GROWTH_STEPS = 4  # rounds in which smoothed outlines grow to the area that they had before
MAX_SHRINKAGE = 0.25  # objects that smoothing changes by a larger fraction of their area are too thin to be smoothed
MAX_AREA_CHANGE = 0.02  # largest change of the area by all steps, as a fraction
MAX_TESTED_VERTICES = 512  # larger outlines, which are not those of cells, are not smoothed: the test would take long
MEASURED_DECIMALS = 4  # of shapes (µm, µm², fractions) and stains of objects

Ring = NDArray[np.float64]  # (vertices, 2), rows and columns; the last vertex is connected to the first


class Point(NamedTuple):
    """A position in pixels. Whole numbers are corners of pixels: the center of the first pixel is (0.5, 0.5)."""

    row: float
    column: float


@dataclass(frozen=True, eq=False)
class Polygon:
    """Outline of one part of an object: an outer ring, and a ring for each hole.

    On the screen, the outer ring runs clockwise and has a positive `signed_area`. Holes run counter-clockwise and have
    a negative `signed_area`. This is the right-hand rule of GeoJSON, in coordinates with y pointing down.
    """

    outer: Ring
    holes: tuple[Ring, ...] = ()

    @property
    def rings(self) -> tuple[Ring, ...]:
        """The outer ring, then the holes."""
        return (self.outer, *self.holes)

    @property
    def area_px(self) -> float:
        """Area without the holes, in px²."""
        return sum(signed_area(ring) for ring in self.rings)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Polygon) or len(self.holes) != len(other.holes):
            return False
        return all(np.array_equal(ours, theirs) for ours, theirs in zip(self.rings, other.rings, strict=True))

    def __hash__(self) -> int:
        return hash(tuple(ring.tobytes() for ring in self.rings))


# From a label map to outlines and back


def trace_outlines(
    labels: NDArray[np.integer], offset_px: tuple[float, float] = (0, 0), scale: float = 1.0, fill_holes: bool = False
) -> dict[int, tuple[Polygon, ...]]:
    """Trace the outlines of all objects in a label map (H, W).

    Returns a dictionary from object numbers to outlines. An outline is a tuple with one polygon for each part of the
    object. Vertices (row, column) are multiplied by `scale`. Then `offset_px` (row, column) is added, for example to
    convert vertices to pixels of level 0. With `fill_holes`, polygons have no holes.

    >>> labels = np.zeros((4, 6), np.int32)
    >>> labels[1:3, 2:5] = 7
    >>> trace_outlines(labels)[7][0].outer.tolist()
    [[1.0, 5.0], [3.0, 5.0], [3.0, 2.0], [1.0, 2.0]]
    """
    parts: NDArray[np.int64] = label(labels, background=0, connectivity=1)  # type: ignore[no-untyped-call]
    numbers = np.zeros(int(parts.max(initial=0)) + 1, np.int64)  # object number of each part
    numbers[parts.ravel()] = labels.ravel()
    rings: defaultdict[int, list[Ring]] = defaultdict(list)
    for part, ring in _trace_rings(parts):
        rings[part].append(ring)
    outlines: defaultdict[int, list[Polygon]] = defaultdict(list)
    for part in sorted(rings):
        # The outer ring is the only ring with a positive signed area, so it comes first.
        outer, *holes = (ring * scale + offset_px for ring in sorted(rings[part], key=signed_area, reverse=True))
        outlines[int(numbers[part])].append(Polygon(outer, () if fill_holes else tuple(holes)))
    return {number: tuple(outlines[number]) for number in sorted(outlines)}


def fill_outline(
    polygons: Iterable[Polygon], size_px: tuple[int, int], offset_px: tuple[float, float] = (0, 0)
) -> NDArray[np.bool_]:
    """Return a mask (H, W) that is true at pixels with their centers inside the polygons.

    `size_px` is (H, W). `offset_px` is the (row, column) of the upper left corner of the mask, in the coordinates of
    the polygons. Where polygons overlap, the even-odd rule applies: pixels inside two polygons are false.
    """
    height, width = size_px
    crossings = np.zeros((height, width + 1), np.int64)
    for polygon in polygons:
        for ring in polygon.rings:
            _count_crossings(crossings, ring - offset_px)
    inside: NDArray[np.bool_] = np.cumsum(crossings[:, :width], axis=1) % 2 == 1
    return inside


def measure_coverage(polygons: Iterable[Polygon], size: tuple[float, float]) -> NDArray[np.float64]:
    """Return the area of each pixel that is inside of polygons which do not overlap, exactly.

    `size` (height, width) is that of the image. It may be fractional: the last row and the last column are then parts
    of pixels, and the result has as many rows and columns as complete and partial pixels.
    """
    covered = np.zeros((math.ceil(size[0]), math.ceil(size[1])))
    for polygon in polygons:
        rings = [_clip_ring(ring, size) for ring in polygon.rings]
        if not len(rings[0]):
            continue
        top, left = np.floor(rings[0].min(axis=0)).astype(int)
        bottom, right = np.minimum(np.ceil(rings[0].max(axis=0)).astype(int), covered.shape)
        # `areas` are parts of pixels to the right of an edge, and `steps` what the edge adds to all pixels beyond.
        areas, steps = np.zeros((2, bottom - top + 1, right - left + 2))
        for ring in rings:
            _add_edges(areas, steps, ring - (top, left))
        inside = np.abs(areas + np.cumsum(steps, axis=1))[: bottom - top, : right - left]
        covered[top:bottom, left:right] += inside
    return covered


def clamp_outline(polygons: Iterable[Polygon], size: tuple[float, float]) -> tuple[Polygon, ...]:
    """Move vertices beyond the edges of an image (height, width) to the edges.

    This cuts outlines along the sides of cells of a grid at the edges, if each cell reaches into the image.
    """
    return tuple(
        Polygon(outer, tuple(holes))
        for outer, *holes in ([ring.clip(0, size) for ring in polygon.rings] for polygon in polygons)
    )


def _clip_ring(ring: Ring, size: tuple[float, float]) -> Ring:
    """Return the part of a ring on an image, by the algorithm of Sutherland and Hodgman; empty if it is off the image.

    Parts of a concave ring may be connected along the edge of the image, which changes no area.
    """
    for axis, limit, sign in ((0, 0.0, 1), (0, size[0], -1), (1, 0.0, 1), (1, size[1], -1)):
        if not len(ring):
            break
        following = _next_vertices(ring)
        inside, next_inside = sign * (ring[:, axis] - limit) >= 0, sign * (following[:, axis] - limit) >= 0
        crosses = inside != next_inside
        span = np.where(crosses, following[:, axis] - ring[:, axis], 1)
        crossing = ring + ((limit - ring[:, axis]) / span)[:, None] * (following - ring)
        crossing[:, axis] = limit
        vertices = np.stack([ring, crossing], axis=1).reshape(-1, 2)
        ring = vertices[np.stack([inside, crosses], axis=1).ravel()]
    return ring


def _add_edges(areas: NDArray[np.float64], steps: NDArray[np.float64], ring: Ring) -> None:
    """Add the edges of a ring to the arrays of `measure_coverage`, in place."""
    change = _next_vertices(ring) - ring
    # Where edges enter another pixel: numbers of the edges, and fractions of their length
    numbers = [np.arange(len(ring)).repeat(2)]
    fractions = [np.tile([0.0, 1.0], len(ring))]
    for start, length in zip(ring.T, change.T, strict=True):
        first = np.floor(np.minimum(start, start + length)) + 1
        counts = (np.ceil(np.maximum(start, start + length)) - first).clip(0).astype(int)
        edges = np.repeat(np.arange(len(ring)), counts)
        lines = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edges]
        numbers.append(edges)
        fractions.append((lines - start[edges]) / length[edges])
    edges, ends = np.concatenate(numbers), np.concatenate(fractions).clip(0, 1)
    order = np.lexsort((ends, edges))
    edges, ends = edges[order], ends[order]
    is_same = edges[1:] == edges[:-1]
    edges, begins, ends = edges[1:][is_same], ends[:-1][is_same], ends[1:][is_same]
    middles = ring[edges] + ((begins + ends) / 2)[:, None] * change[edges]
    heights = (ends - begins) * change[edges, 0]
    rows, columns = np.floor(middles).astype(int).T
    np.add.at(areas, (rows, columns), heights * (columns + 1 - middles[:, 1]))
    np.add.at(steps, (rows, columns + 1), heights)


def signed_area(ring: Ring) -> float:
    """Return the area inside a ring in px²: positive if the ring runs clockwise on the screen, otherwise negative."""
    rows, columns = (ring - ring[0]).T
    return float(columns @ _next_vertices(rows) - rows @ _next_vertices(columns)) / 2


def make_polygon(outer: Ring, holes: Iterable[Ring] = ()) -> Polygon:
    """Return the polygon of rings that run in any direction; rings are reversed where `Polygon` requires it."""
    return Polygon(
        outer if signed_area(outer) >= 0 else outer[::-1],
        tuple(hole if signed_area(hole) <= 0 else hole[::-1] for hole in holes),
    )


def _next_vertices(ring: Ring) -> Ring:
    """Return the vertices (k, 2) of a ring, or one of their coordinates (k,), with the first entry moved to the end."""
    return np.concatenate([ring[1:], ring[:1]])


def _trace_rings(parts: NDArray[np.int64]) -> Iterator[tuple[int, Ring]]:
    """Trace the outer rings of all parts, and the rings around their holes.

    `parts` (H, W) has the part number of each pixel, and 0 for background. Yields the part number and the vertices of
    each ring. On the screen, outer rings run clockwise and rings around holes run counter-clockwise, so that the part
    is always to the right of the direction of travel. Only corners at which the ring changes direction are vertices.
    """
    owners, directions, starts = _find_edges(parts)
    if not len(starts):
        return
    width = parts.shape[1] + 1
    ends = starts + (STEPS @ (width, 1))[directions]
    # Link each edge to the next edge of the ring. At each corner, as many edges of a part end as start. The edges are
    # therefore sorted twice by part and corner: once by the corner at which they end, and once by the corner at which
    # they start. Edges at the same index in both orders are linked. Where two pixels touch only at a corner, two edges
    # end and two start. They may be linked either way, because `_split_ring` splits the ring at this corner.
    owner_key = owners * (math.prod(parts.shape) + sum(parts.shape) + 1)
    following = np.empty_like(starts)
    following[np.argsort(owner_key + ends, kind="stable")] = np.argsort(owner_key + starts, kind="stable")
    rings, order = _order_cycles(following)
    # The first edge of a ring follows the last one of the ring, each other edge the one before it.
    first = np.flatnonzero(np.diff(rings, prepend=-1))
    before = np.arange(-1, len(order) - 1)
    before[first] = np.append(first[1:], len(order)) - 1
    is_corner = directions[order] != directions[order[before]]
    corners, owners, rings = starts[order[is_corner]], owners[order[is_corner]], rings[is_corner]
    by_ring_and_corner = np.lexsort((corners, rings))
    is_repeated = (np.diff(corners[by_ring_and_corner]) == 0) & (np.diff(rings[by_ring_and_corner]) == 0)
    passes_twice = set(rings[by_ring_and_corner[1:][is_repeated]].tolist())
    vertices = np.stack(np.divmod(corners, width), axis=1).astype(np.float64)
    bounds = [*np.flatnonzero(np.diff(rings, prepend=-1)).tolist(), len(rings)]
    for ring, (start, stop) in enumerate(pairwise(bounds)):
        owner = int(owners[start])
        if ring not in passes_twice:
            yield owner, vertices[start:stop]
            continue
        for simple_ring in _split_ring(corners[start:stop].tolist()):
            yield owner, np.stack(np.divmod(np.array(simple_ring), width), axis=1).astype(np.float64)


def _order_cycles(following: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the items of a permutation cycle by cycle, as arrays (n,) of the number of the cycle and of the item.

    `following` is the next item of each item. Cycles are sorted by their lowest item. Each cycle begins after this
    item, and ends with it.
    """
    items = np.arange(len(following))
    _, labels = connected_components(coo_array((np.ones(len(items), bool), (items, following))), directed=False)
    lowest = np.zeros(len(items), np.int64)  # of each label
    lowest[labels[::-1]] = items[::-1]
    last = lowest[labels]  # the item with which the cycle of each item ends
    # Steps from each item to the last one of its cycle. All items jump on until they arrive, twice as far every time.
    steps, jump = (last != items).astype(np.int64), np.where(last == items, items, following)
    while (jump != last).any():
        steps, jump = steps + steps[jump], jump[jump]
    is_last = last == items
    sizes = np.bincount(labels)[labels[is_last]]
    numbers = (np.cumsum(is_last) - 1)[last]  # number of the cycle of each item
    order = np.empty_like(items)
    order[(np.cumsum(sizes) - 1)[numbers] - steps] = items
    return numbers[order], order


def _find_edges(parts: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Find the edges of each part: the sides of its pixels that separate the part from its surroundings.

    `parts` (H, W) has the part number of each pixel, and 0 for background. Returns three arrays with an entry for each
    edge: the part number, the direction (EAST, SOUTH, WEST or NORTH), and the number of the corner at which the edge
    starts. Corners of pixels are numbered row by row; there are W + 1 corners in a row.
    """
    width = parts.shape[1] + 1
    padded = np.pad(parts, 1)
    owners, directions, starts = [], [], []
    above, below = padded[:-1, 1:-1], padded[1:, 1:-1]  # parts above and below each horizontal edge
    before, after = padded[1:-1, :-1], padded[1:-1, 1:]  # parts left and right of each vertical edge
    for owner, neighbor, direction, shift in (
        (below, above, EAST, 0),
        (before, after, SOUTH, 0),
        (above, below, WEST, 1),
        (after, before, NORTH, width),
    ):
        rows, columns = np.nonzero((owner != neighbor) & (owner > 0))
        owners.append(owner[rows, columns])
        directions.append(np.full(len(rows), direction))
        starts.append(rows * width + columns + shift)
    return np.concatenate(owners), np.concatenate(directions), np.concatenate(starts)


def _split_ring(ring: list[int]) -> Iterator[list[int]]:
    """Split a ring that passes some corners twice into rings that pass each corner only once.

    Rings are lists of corner numbers, as in `_find_edges`.
    """
    if len(set(ring)) == len(ring):
        yield ring
        return
    path: list[int] = []
    position: dict[int, int] = {}
    for corner in ring:
        if corner in position:
            loop = path[position[corner] :]
            yield loop
            for passed in loop:
                del position[passed]
            del path[len(path) - len(loop) :]
        position[corner] = len(path)
        path.append(corner)
    yield path


def _count_crossings(crossings: NDArray[np.int64], ring: Ring) -> None:
    """Add the crossings of a ring with rows of pixels to `crossings` (H, W + 1), in place.

    Where an edge of the ring crosses the center line of a row of pixels, 1 is added in this row, at the first pixel
    whose center is at the crossing or to the right of the crossing. Column W counts the crossings to the right of all
    pixel centers.
    """
    height, last = crossings.shape[0], crossings.shape[1] - 1
    following = _next_vertices(ring)
    first = np.ceil(np.minimum(ring[:, 0], following[:, 0]) - 0.5).clip(0, height).astype(np.int64)
    stop = np.ceil(np.maximum(ring[:, 0], following[:, 0]) - 0.5).clip(0, height).astype(np.int64)
    counts = stop - first
    edges = np.repeat(np.arange(len(ring)), counts)
    rows = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + first[edges]
    (row0, column0), (row1, column1) = ring[edges].T, following[edges].T
    columns = column0 + (rows + 0.5 - row0) / (row1 - row0) * (column1 - column0)
    np.add.at(crossings, (rows, np.ceil(columns - 0.5).clip(0, last).astype(np.int64)), 1)


# Smooth outlines


def smooth_outlines(
    outlines: Mapping[int, tuple[Polygon, ...]], pixel_px: float = 1.0
) -> dict[int, tuple[Polygon, ...]]:
    """Return smooth outlines with fewer vertices, and the same areas, for outlines that `trace_outlines` has returned.

    `pixel_px` is the `scale` with which the outlines were traced. A vertex is placed about every `VERTEX_SPACING`
    pixels of the label map, at a position rounded to `DECIMALS`. Every returned ring is simple: it does not touch or
    cross itself, and no vertex is between its two neighbors on a straight line. It is inside the bounding box of the
    traced ring. Some outlines are returned unchanged: those of several parts, those with holes, and those of objects so
    thin that a smooth ring would be another shape.

    >>> rows, columns = np.mgrid[:30, :30]
    >>> disc = ((rows - 14.5) ** 2 + (columns - 14.5) ** 2 < 100).astype(np.int32)
    >>> (traced,) = trace_outlines(disc)[1]
    >>> (smooth,) = smooth_outlines({1: (traced,)})[1]
    >>> len(traced.outer), len(smooth.outer), round(smooth.area_px / traced.area_px, 3)
    (44, 21, 1.0)
    """
    numbers = [number for number, polygons in outlines.items() if len(polygons) == 1 and not polygons[0].holes]
    smoothed = _smooth_rings([outlines[number][0].outer for number in numbers], pixel_px) if numbers else []
    rings = {number: ring for number, ring in zip(numbers, smoothed, strict=True) if ring is not None}
    return {number: (Polygon(rings[number]),) if number in rings else polygons for number, polygons in outlines.items()}


class _Rings(NamedTuple):
    """Rings in one array, so that all of them are computed at once."""

    vertices: NDArray[Any]  # (n, 2): the vertices of the first ring, then those of the second ring, and so on
    sizes: NDArray[np.int64]  # (rings,): number of vertices of each ring

    @property
    def starts(self) -> NDArray[np.int64]:
        """Index (rings,) of the first vertex of each ring."""
        return np.asarray(np.cumsum(self.sizes) - self.sizes)

    @property
    def owners(self) -> NDArray[np.int64]:
        """Number (n,) of the ring of each vertex."""
        return np.repeat(np.arange(len(self.sizes)), self.sizes)

    def neighbors(self, steps: int) -> NDArray[np.int64]:
        """Return the index (n,) of the vertex that is `steps` vertices ahead on the same ring, for each vertex."""
        starts, sizes = np.repeat(self.starts, self.sizes), np.repeat(self.sizes, self.sizes)
        return np.asarray(starts + (np.arange(len(self.vertices)) - starts + steps) % sizes)

    def sum(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """Return the sum (rings,) over each ring of values (n,)."""
        return np.asarray(np.bincount(self.owners, values, minlength=len(self.sizes)), np.float64)

    def areas(self) -> NDArray[np.float64]:
        """Return the signed area (rings,) of each ring, as `signed_area`."""
        following = self.vertices[self.neighbors(1)]
        return self.sum(_cross(self.vertices, following)) / -2

    def keep(self, is_kept: NDArray[np.bool_]) -> "_Rings":
        """Return the rings with some of their vertices: those for which `is_kept` (n,) is true."""
        return _Rings(self.vertices[is_kept], self.sum(is_kept).astype(np.int64))


def _smooth_rings(rings: Sequence[Ring], pixel_px: float) -> list[Ring | None]:
    """Return the smooth ring of each traced ring, or None if it would not be simple, or would not have its area."""
    origins = np.stack([ring[0] for ring in rings])
    sizes = np.array([len(ring) for ring in rings])
    # Corners relative to the first corner are whole numbers of pixels. The result thus does not depend on the position
    # of the object, except for the rounding at the end.
    corners = _Rings(np.rint((np.concatenate(rings) - np.repeat(origins, sizes, axis=0)) / pixel_px), sizes)
    areas = corners.areas()
    curves = _soften(_to_midpoints(corners))
    points = _space_evenly(curves)
    is_similar = np.abs(points.areas() - areas) <= MAX_SHRINKAGE * areas
    # Smoothing shrinks objects. They grow again about their centers, but not out of their bounding boxes, because an
    # object at the edge of a slide would then extend beyond the slide. What this cuts off needs a little more growth.
    owners = points.owners
    low, high = (ends.reduceat(corners.vertices, corners.starts)[owners] for ends in (np.minimum, np.maximum))
    for _ in range(GROWTH_STEPS):
        growth = np.sqrt(areas / np.where(is_similar, points.areas(), areas))[owners, None]
        centers = np.stack([points.sum(axis) for axis in points.vertices.T], axis=1) / points.sizes[:, None]
        grown = (points.vertices - centers[owners]) * growth + centers[owners]
        points = points._replace(vertices=grown.clip(low, high))
    # From here on, coordinates are whole numbers of the unit in which files are written, so that tests are exact.
    unit = 10**DECIMALS
    rounded = np.rint((points.vertices * pixel_px + origins[owners]) * unit).astype(np.int64)
    rounded_origins = np.rint(origins * unit).astype(np.int64)
    final = _drop_straight(_Rings(rounded - rounded_origins[owners], points.sizes))
    scaled_areas = areas * (pixel_px * unit) ** 2
    is_good = is_similar & (final.sizes >= 3) & (np.abs(final.areas() - scaled_areas) <= MAX_AREA_CHANGE * scaled_areas)
    is_good &= _are_simple(final)
    vertices = (final.vertices + rounded_origins[final.owners]) / unit
    parts = np.split(vertices, final.starts[1:])
    return [part if good else None for part, good in zip(parts, is_good.tolist(), strict=True)]


def _to_midpoints(corners: _Rings) -> _Rings:
    """Return the midpoints of all sides of pixels along traced rings; `corners` are in pixels."""
    steps = corners.vertices[corners.neighbors(1)] - corners.vertices
    lengths = np.abs(steps).sum(axis=1).astype(np.int64)  # number of sides of pixels between two corners
    edges = np.repeat(np.arange(len(lengths)), lengths)
    along = np.arange(len(edges)) - np.repeat(np.cumsum(lengths) - lengths, lengths) + 0.5
    midpoints = corners.vertices[edges] + along[:, None] * np.sign(steps)[edges]
    return _Rings(midpoints, corners.sum(lengths).astype(np.int64))


def _soften(rings: _Rings) -> _Rings:
    """Replace each vertex by the weighted mean of itself (1/2) and its neighbors (1/4), `SMOOTHING_STEPS` times."""
    vertices, before, after = rings.vertices, rings.neighbors(-1), rings.neighbors(1)
    for _ in range(SMOOTHING_STEPS):
        vertices = (vertices[before] + 2 * vertices + vertices[after]) / 4
    return rings._replace(vertices=vertices)


def _space_evenly(rings: _Rings) -> _Rings:
    """Place new vertices along the rings at equal distances of about `VERTEX_SPACING`, at least `MIN_VERTICES`."""
    steps = rings.vertices[rings.neighbors(1)] - rings.vertices
    lengths = np.maximum(np.hypot(*steps.T), 1e-9)  # above 0, for the division below
    ends = np.cumsum(lengths)
    ring_lengths = rings.sum(lengths)
    ring_starts = ends[rings.starts] - lengths[rings.starts]
    sizes = np.maximum(MIN_VERTICES, np.ceil(ring_lengths / VERTEX_SPACING)).astype(np.int64)
    owners = np.repeat(np.arange(len(sizes)), sizes)
    index = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    distances = ring_starts[owners] + index * (ring_lengths / sizes)[owners]
    edges = np.searchsorted(ends, distances, side="right")
    edges = edges.clip(rings.starts[owners], (rings.starts + rings.sizes - 1)[owners])
    fractions = (distances - ends[edges] + lengths[edges]) / lengths[edges]
    return _Rings(rings.vertices[edges] + fractions[:, None] * steps[edges], sizes)


def _drop_straight(rings: _Rings) -> _Rings:
    """Drop vertices that are equal to the vertex before them, or on a line with their two neighbors.

    `rings` has whole numbers. A ring without an area loses all of its vertices.
    """
    while True:
        before, after = rings.vertices[rings.neighbors(-1)], rings.vertices[rings.neighbors(1)]
        is_new = (rings.vertices != before).any(axis=1)
        if is_new.all():  # only then, a vertex on a line is not one of two equal vertices
            is_new = _cross(rings.vertices - before, after - rings.vertices) != 0
            if is_new.all():
                return rings
        rings = rings.keep(is_new)


def _are_simple(rings: _Rings) -> NDArray[np.bool_]:
    """Return whether each ring (rings,) is known to be simple: no two of its edges touch, except neighboring edges.

    `rings` has whole numbers, and no three consecutive vertices on a line. A few simple rings are reported as not
    simple: those with edges that are on one line, and those with more than `MAX_TESTED_VERTICES` vertices.
    """
    is_tested = rings.sizes <= MAX_TESTED_VERTICES
    rings = _Rings(rings.vertices[is_tested[rings.owners]], rings.sizes[is_tested])
    has_crossing = np.zeros(len(rings.sizes), bool)
    owners, following = rings.owners, rings.vertices[rings.neighbors(1)]
    for steps in range(2, int(rings.sizes.max(initial=0)) // 2 + 1):
        first = np.flatnonzero(rings.sizes[owners] >= 2 * steps)
        second = rings.neighbors(steps)[first]
        a, b, c, d = rings.vertices[first], following[first], rings.vertices[second], following[second]
        is_apart = _are_same_side(a, b, c, d) | _are_same_side(c, d, a, b)
        has_crossing[owners[first[~is_apart]]] = True
    is_simple = np.zeros(len(is_tested), bool)
    is_simple[is_tested] = ~has_crossing
    return is_simple


def _are_same_side(
    start: NDArray[np.int64], end: NDArray[np.int64], first: NDArray[np.int64], second: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return whether two points (n, 2) are on the same side of the line through `start` and `end`, and not on it."""
    sides = (np.sign(_cross(end - start, point - start)) for point in (first, second))
    return np.asarray(np.prod(list(sides), axis=0) > 0)


def _cross(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Return the cross products (n,) of vectors (n, 2)."""
    return np.asarray(first[:, 0] * second[:, 1] - first[:, 1] * second[:, 0])


# Measurements


def measure_shapes(labels: NDArray[np.integer], spacing_um_px: float) -> dict[str, NDArray[np.float64]]:
    """Measure the shape of each object in a label map (H, W). Objects have the numbers 1 to n, without gaps.

    Returns a dictionary from names to arrays (n,):

    - "area_um2": area of the pixels.
    - "perimeter_um": length of the boundary, from the number of times that lines in 4 directions cross the boundary
      (Crofton's formula). Unlike the number of sides of pixels, this is not longer for slanted boundaries.
    - "major_axis_um", "minor_axis_um": axes of the ellipse with the same second moments.
    - "eccentricity": of this ellipse, from 0 (a circle) to 1.
    - "orientation_deg": angle between the horizontal axis of the image and the major axis, counter-clockwise, from 0 to
      below 180.
    - "solidity": area divided by the area of the convex hull, at most 1.

    The values do not depend on the position of an object in the map, nor on other objects.
    """
    padded = np.pad(labels, 1)
    rows, columns = np.nonzero(padded)
    indices = padded[rows, columns].astype(np.int64) - 1
    count = int(indices.max(initial=-1)) + 1
    areas = np.bincount(indices, minlength=count).astype(np.float64)
    # Positions relative to one pixel of the object are small whole numbers, whose sums are exact.
    first = np.zeros(count, np.int64)
    first[indices[::-1]] = np.arange(len(indices))[::-1]
    down, right = rows - rows[first[indices]], columns - columns[first[indices]]

    def mean(values: NDArray[np.int64]) -> NDArray[np.float64]:
        return np.bincount(indices, values, minlength=count) / areas

    center_row, center_column = mean(down), mean(right)
    variance_row, variance_column = mean(down**2) - center_row**2, mean(right**2) - center_column**2
    covariance = mean(down * right) - center_row * center_column
    middle, spread = (variance_row + variance_column) / 2, np.hypot((variance_row - variance_column) / 2, covariance)
    major, minor = middle + spread, np.maximum(middle - spread, 0)  # variances along the two axes
    # Rows point down, so the covariance of the coordinates x and y, with y pointing up, is that of the pixels negated.
    angle = np.degrees(np.arctan2(-2 * covariance, variance_column - variance_row)) / 2
    return {
        "area_um2": areas * spacing_um_px**2,
        "perimeter_um": _measure_perimeters(padded, count) * spacing_um_px,
        "major_axis_um": 4 * np.sqrt(major) * spacing_um_px,
        "minor_axis_um": 4 * np.sqrt(minor) * spacing_um_px,
        "eccentricity": np.sqrt(1 - np.divide(minor, major, out=np.ones(count), where=major > 0)),
        "orientation_deg": np.where(angle < 0, angle + 180, angle),
        "solidity": np.minimum(1, areas / _measure_hulls(padded, count)),
    }


def measure_objects(
    labels: NDArray[np.integer],
    foreground: NDArray[np.float32],
    deviation: NDArray[np.float32] | None,
    pixels: NDArray[np.float32],
    spacing_um_px: float,
) -> dict[str, NDArray[np.float64]]:
    """Measure the shape and the stain of each object in a label map (H, W). Objects have the numbers 1 to n.

    `foreground` (H, W) is the probability of the foreground, `deviation` (H, W) its standard deviation over rotations,
    and `pixels` (3, H, W) are the pixels as the network reads them, from 0 to 255. Returns a dictionary from the names
    of measurements to arrays (n,): those of `measure_shapes`, then mean and standard deviation of the optical densities
    of hematoxylin and of eosin over the pixels of each object, then the mean probability, and then the mean deviation,
    unless it is None. All but the last two are rounded to `MEASURED_DECIMALS` decimals.
    """
    measured = measure_shapes(labels, spacing_um_px)
    is_object = labels > 0
    numbers = labels[is_object].astype(np.int64) - 1
    counts = np.bincount(numbers)

    def mean(values: NDArray[np.floating]) -> NDArray[np.float64]:
        return np.asarray(np.bincount(numbers, values) / counts)

    densities = stain_densities(pixels[:, is_object].T.astype(np.uint8))  # (pixels of all objects, 2)
    for stain, density in zip(("hematoxylin", "eosin"), densities.T, strict=True):
        measured[f"{stain}_mean"] = mean(density)
        measured[f"{stain}_sd"] = np.sqrt(mean((density - measured[f"{stain}_mean"][numbers]) ** 2))
    measured = {name: np.round(values, MEASURED_DECIMALS) for name, values in measured.items()}
    measured["probability"] = mean(foreground[is_object])
    return measured if deviation is None else measured | {"deviation": mean(deviation[is_object])}


def _measure_perimeters(padded: NDArray[np.integer], count: int) -> NDArray[np.float64]:
    """Return the length (count,) of the boundaries of objects 1 to `count` in px, by Crofton's formula.

    `padded` is the label map with at least one pixel of background on each side.
    """
    crossings = np.zeros(count + 1)
    for here, there, distance in (  # pairs of neighboring pixels, and the distance between neighboring lines
        (padded[:, :-1], padded[:, 1:], 1),
        (padded[:-1], padded[1:], 1),
        (padded[:-1, :-1], padded[1:, 1:], math.sqrt(0.5)),
        (padded[:-1, 1:], padded[1:, :-1], math.sqrt(0.5)),
    ):
        is_boundary = here != there
        for side in (here, there):
            crossings += distance * np.bincount(side[is_boundary], minlength=count + 1)
    return np.asarray(crossings[1:] * pi / 8)


def _measure_hulls(padded: NDArray[np.integer], count: int) -> NDArray[np.float64]:
    """Return the area (count,) in px² of the convex hull of the midpoints of all sides of the pixels of each object.

    `padded` is the label map with at least one pixel of background on each side. The left and the right chain of a hull
    are computed separately, for all objects at once.
    """
    hulls = np.zeros(count)
    for side in (-1, 1):  # left, right
        neighbors = np.concatenate([padded[:, side:], padded[:, :side]], axis=1)  # the pixels to this side
        rows, columns = np.nonzero((padded > 0) & (padded != neighbors))
        indices = padded[rows, columns].astype(np.int64) - 1
        # All coordinates are doubled, so that midpoints of sides are whole numbers.
        heights = np.concatenate([2 * rows + step for step in (-1, 0, 1)])
        reach = np.concatenate([2 * columns, 2 * columns + side, 2 * columns])
        keys = np.tile(indices, 3) * (2 * len(padded)) + heights
        order = np.lexsort((-side * reach, keys))  # the point that is farthest to this side is the first of its height
        chosen = order[np.diff(keys[order], prepend=-1) > 0]
        hulls += side * _integrate_chain(np.tile(indices, 3)[chosen], heights[chosen], reach[chosen], side, count)
    return hulls / 4


def _integrate_chain(
    owners: NDArray[np.int64], heights: NDArray[np.int64], reach: NDArray[np.int64], side: int, count: int
) -> NDArray[np.float64]:
    """Return the integral (count,) over the height of the convex chain around points, for each object.

    The points are sorted by object (`owners`) and by `heights`. `reach` is their coordinate along rows. The chain is to
    the right of all points if `side` is 1, to their left if `side` is -1.
    """
    while True:
        # A point between two others, and not beyond the line through them, is not on the hull. Dropping all such points
        # at once is correct, because their neighbors were points of the object, too.
        run, rise = heights[1:] - heights[:-1], side * (reach[1:] - reach[:-1])
        is_inside = (owners[:-2] == owners[2:]) & (rise[:-1] * run[1:] <= rise[1:] * run[:-1])
        if not is_inside.any():
            break
        kept = np.concatenate([[True], ~is_inside, [True]])
        owners, heights, reach = owners[kept], heights[kept], reach[kept]
    is_same = owners[1:] == owners[:-1]
    areas = ((heights[1:] - heights[:-1]) * (reach[1:] + reach[:-1]) / 2)[is_same]
    return np.asarray(np.bincount(owners[1:][is_same], areas, minlength=count), np.float64)
