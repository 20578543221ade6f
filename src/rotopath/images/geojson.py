"""Trace the outlines of objects in label maps, and read and write objects as GeoJSON files for QuPath.

A label map (H, W) contains an object number at each pixel, and 0 for background. An object may have several parts. A
part is a connected component: its pixels are connected by their sides, not only by their corners. The outline of an
object has a polygon for each part. A polygon has an outer ring and a ring for each hole; a ring is a closed line. The
vertices of traced outlines are corners of pixels. Their coordinates are (row, column), as in QuPath: pixel (0, 0)
extends from (0, 0) to (1, 1). If a traced outline is filled, the result is exactly the pixels of the object.

GeoJSON files are FeatureCollections (RFC 7946) and are written atomically. Objects in memory have coordinates (row,
column) in pixels of level 0. Positions in GeoJSON files are (x, y), that is (column, row).
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import UUID

import numpy as np
from numpy.typing import NDArray
from skimage.measure import label

from rotopath.images.files import UnreadableFileError
from rotopath.writing import atomic_file

DECIMALS = 2  # coordinates in files are rounded to a hundredth of a pixel
HEAD, TAIL = '{"type": "FeatureCollection", "features": [\n', "\n]}\n"
DETECTION_TYPES = ("detection", "cell", "tile")  # QuPath types that are read as "detection"; all others are annotations
EAST, SOUTH, WEST, NORTH = range(4)
STEPS = np.array([(0, 1), (1, 0), (0, -1), (-1, 0)])  # (rows, columns) of one step in each of these directions

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


@dataclass(frozen=True)
class SlideObject:
    """An object on a slide, with coordinates in pixels of level 0."""

    shape: Point | tuple[Polygon, ...]  # a position, or the polygons of an outline
    kind: Literal["detection", "annotation"] = "detection"  # in QuPath, users can edit annotations but not detections
    class_name: str = ""  # "" for an object without a class
    color: tuple[int, int, int] | None = None  # (red, green, blue) of the class
    measurements: Mapping[str, float] = field(default_factory=dict)

    @property
    def center(self) -> tuple[float, float]:
        """Position (row, column) of a point, or of the center of the bounding box of an outline."""
        if isinstance(self.shape, Point):
            return self.shape.row, self.shape.column
        corners = np.concatenate([polygon.outer for polygon in self.shape])
        row, column = (corners.min(axis=0) + corners.max(axis=0)) / 2
        return float(row), float(column)

    @property
    def id(self) -> UUID:
        """Identifier, computed from the kind, class and shape: an object has the same identifier in every file."""
        return self._identify(_make_geometry(self.shape))

    def _identify(self, geometry: dict[str, Any]) -> UUID:
        """Return the identifier. `geometry` is the GeoJSON geometry of the object, in pixels of level 0."""
        content = json.dumps([self.kind, self.class_name, geometry])
        return UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=5)

    def to_feature(self, origin_px: tuple[float, float] = (0, 0)) -> dict[str, Any]:
        """Return the object as a GeoJSON feature.

        `origin_px` (row, column), in pixels of level 0, is subtracted from all coordinates. Raises ValueError if a
        coordinate or a measurement is NaN or infinite.
        """
        properties: dict[str, Any] = {"objectType": self.kind}
        if self.class_name:
            color = {} if self.color is None else {"color": list(self.color)}
            properties["classification"] = {"name": self.class_name, **color}
        if self.measurements:
            properties["measurements"] = {name: float(value) for name, value in self.measurements.items()}
            if not all(map(math.isfinite, properties["measurements"].values())):
                raise ValueError(
                    f"An object has NaN or infinite measurements: {dict(self.measurements)}; remove these measurements."
                )
        geometry = _make_geometry(self.shape)
        identifier = str(self._identify(geometry))
        if any(origin_px):
            geometry = _make_geometry(self.shape, origin_px)
        return {"type": "Feature", "id": identifier, "geometry": geometry, "properties": properties}


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


def signed_area(ring: Ring) -> float:
    """Return the area inside a ring in px²: positive if the ring runs clockwise on the screen, otherwise negative."""
    rows, columns = (ring - ring[0]).T
    return float(columns @ _next_vertices(rows) - rows @ _next_vertices(columns)) / 2


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
    width = parts.shape[1] + 1
    ends = starts + (STEPS @ (width, 1))[directions]
    # Link each edge to the next edge of the ring. At each corner, as many edges of a part end as start. The edges are
    # therefore sorted twice by part and corner: once by the corner at which they end, and once by the corner at which
    # they start. Edges at the same index in both orders are linked. Where two pixels touch only at a corner, two edges
    # end and two start. They may be linked either way, because `_split_ring` splits the ring at this corner.
    owner_key = owners * (math.prod(parts.shape) + sum(parts.shape) + 1)
    following = np.empty_like(starts)
    following[np.argsort(owner_key + ends, kind="stable")] = np.argsort(owner_key + starts, kind="stable")
    next_of, direction_of, start_of, owner_of = (values.tolist() for values in (following, directions, starts, owners))
    is_visited = bytearray(len(next_of))
    for first in range(len(next_of)):
        if is_visited[first]:
            continue
        ring, edge, direction = [], first, direction_of[first]
        while not is_visited[edge]:
            is_visited[edge] = True
            edge = next_of[edge]
            if direction_of[edge] != direction:
                ring.append(start_of[edge])
                direction = direction_of[edge]
        for simple_ring in _split_ring(ring):
            corners = np.stack(np.divmod(np.array(simple_ring), width), axis=1)
            yield owner_of[first], corners.astype(np.float64)


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


# Writing GeoJSON


def write_geojson(path: Path, objects: Iterable[SlideObject], origin_px: tuple[float, float] = (0, 0)) -> int:
    """Write objects to a GeoJSON file, one on each line, and return the number of objects.

    `origin_px` (row, column) is subtracted from all coordinates; for QuPath, pass `slide.origin_px`.
    """
    count = 0
    with atomic_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(HEAD)
        for item in objects:
            file.write(",\n" if count else "")
            file.write(json.dumps(item.to_feature(origin_px), ensure_ascii=False, allow_nan=False))
            count += 1
        file.write(TAIL)
    return count


def _make_geometry(shape: Point | tuple[Polygon, ...], origin_px: tuple[float, float] = (0, 0)) -> dict[str, Any]:
    """Convert a shape to a GeoJSON geometry. `origin_px` (row, column) is subtracted from all coordinates."""
    if isinstance(shape, Point):
        return {"type": "Point", "coordinates": _to_positions(np.array([shape], np.float64), origin_px)[0]}
    polygons = [[_close(_to_positions(ring, origin_px)) for ring in polygon.rings] for polygon in shape]
    if len(polygons) == 1:
        return {"type": "Polygon", "coordinates": polygons[0]}
    return {"type": "MultiPolygon", "coordinates": polygons}


def _to_positions(vertices: Ring, origin_px: tuple[float, float]) -> list[list[float]]:
    """Convert vertices (row, column) to positions [x, y], rounded to `DECIMALS` decimals.

    `origin_px` (row, column) is subtracted from the vertices. Coordinates are integers if all of them are whole numbers
    after rounding. Raises ValueError if a coordinate is NaN or infinite.
    """
    positions = np.round(vertices[:, ::-1] - origin_px[::-1], DECIMALS)
    if not np.isfinite(positions).all():
        raise ValueError(
            f"An object has NaN or infinite coordinates (row, column): {vertices.tolist()}; remove this object."
        )
    whole = positions.astype(np.int64)
    return (whole if np.array_equal(whole, positions) else positions).tolist()  # type: ignore[no-any-return]


def _close(positions: list[list[float]]) -> list[list[float]]:
    """Repeat the first position at the end of a ring, as GeoJSON requires."""
    return [*positions, positions[0]]


# Reading GeoJSON


def read_geojson(path: Path, origin_px: tuple[float, float] = (0, 0)) -> list[SlideObject]:
    """Read the objects of a GeoJSON file that this package or QuPath has written.

    `origin_px` (row, column) is added to all coordinates, to convert them to pixels of level 0. Raises
    `UnreadableFileError` if the file or one of its features cannot be used.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableFileError(path, "does not exist.") from None
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read ({error.strerror}).") from None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UnreadableFileError(path, f"is cut off or not valid JSON ({error}); export it again.") from None
    features = content.get("features", [content]) if isinstance(content, dict) else content
    if not isinstance(features, list):
        raise UnreadableFileError(
            path, "is not GeoJSON: expected a FeatureCollection or a list of features; export it again as GeoJSON."
        )
    objects: list[SlideObject] = []
    for number, feature in enumerate(features, 1):
        try:
            objects.extend(_parse_feature(feature, origin_px))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = error if isinstance(error, _UnknownShapeError) else f"{type(error).__name__}: {error}"
            raise UnreadableFileError(
                path, f"has a feature, number {number}, that cannot be used ({reason}); correct or remove this feature."
            ) from None
    return objects


class _UnknownShapeError(ValueError):
    """The geometry of a feature is unsupported or invalid. `read_geojson` repeats the message in its own error."""


def _parse_feature(feature: Any, origin_px: tuple[float, float]) -> Iterator[SlideObject]:
    """Yield the object of a GeoJSON feature, or one object for each point of a MultiPoint (QuPath writes MultiPoints).

    `origin_px` (row, column) is added to all coordinates.
    """
    properties = feature.get("properties") or {}
    object_type = properties.get("objectType", properties.get("object_type"))
    kind: Literal["detection", "annotation"] = "detection" if object_type in DETECTION_TYPES else "annotation"
    class_name, color = _parse_classification(properties.get("classification") or {})
    values = properties.get("measurements") or {}
    if isinstance(values, list):  # before QuPath 0.4
        values = {item["name"]: item["value"] for item in values}
    measurements = {str(name): float(value) for name, value in values.items() if value is not None}
    for shape in _parse_geometry(feature["geometry"], origin_px):
        yield SlideObject(shape, kind, class_name, color, measurements)


def _parse_classification(classification: Mapping[str, Any]) -> tuple[str, tuple[int, int, int] | None]:
    """Return the name ("" if missing) and the color (red, green, blue; None if missing) of an object's class."""
    names = classification.get("names") or [classification.get("name") or ""]
    color = classification.get("color")
    if (packed := classification.get("colorRGB")) is not None:  # before QuPath 0.4
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    if color is None:
        return ": ".join(names), None
    red, green, blue = (int(value) for value in color)
    return ": ".join(names), (red, green, blue)


def _parse_geometry(
    geometry: Mapping[str, Any], origin_px: tuple[float, float]
) -> Iterator[Point | tuple[Polygon, ...]]:
    """Yield the shapes in a GeoJSON geometry: each of its points, or one outline that contains all of its polygons.

    The coordinates of shapes are (row, column), with `origin_px` (row, column) added.
    """
    kind, coordinates = geometry["type"], geometry["coordinates"]
    if kind in ("Point", "MultiPoint"):
        for x, y, *_ in [coordinates] if kind == "Point" else coordinates:
            yield Point(float(y) + origin_px[0], float(x) + origin_px[1])
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = [coordinates] if kind == "Polygon" else coordinates
        if not polygons:
            raise _UnknownShapeError("its MultiPolygon has no polygons")
        yield tuple(_parse_polygon(rings, origin_px) for rings in polygons)
    else:
        raise _UnknownShapeError(f"its geometry is a {kind}; expected Point, MultiPoint, Polygon or MultiPolygon")


def _parse_polygon(rings: list[Any], origin_px: tuple[float, float]) -> Polygon:
    """Convert the rings of a GeoJSON polygon to a `Polygon`. The first ring is the outer ring, the others are holes.

    A ring in a file is a list of positions [x, y]. `origin_px` (row, column) is added to all positions. If other
    software has written a ring in the opposite direction to that of `Polygon`, the ring is reversed.
    """
    outer, *holes = (_parse_ring(ring, origin_px) for ring in rings)
    return Polygon(
        outer if signed_area(outer) >= 0 else outer[::-1],
        tuple(hole if signed_area(hole) <= 0 else hole[::-1] for hole in holes),
    )


def _parse_ring(positions: list[Any], origin_px: tuple[float, float]) -> Ring:
    """Convert a closed ring of positions [x, y] to vertices (row, column), and add `origin_px` (row, column).

    The last position, which repeats the first, is left out.
    """
    ring = np.array([(y, x) for x, y, *_ in positions], np.float64)
    if not np.isfinite(ring).all():
        raise _UnknownShapeError("it has a coordinate that is NaN or infinite")
    if len(ring) < 4 or not np.array_equal(ring[0], ring[-1]):
        raise _UnknownShapeError("a ring must end at its first position and have at least three corners")
    return ring[:-1] + origin_px
