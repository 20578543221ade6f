"""Outlines: objects of a label map as polygons along the edges of their pixels, and polygons as pixels again.

In: object numbers (H, W). Out: for each object its parts, each an outer ring and the rings of its holes. Vertices are
rows and columns at the corners of pixels, as QuPath counts: pixel (0, 0) lies between (0, 0) and (1, 1).

GeoJSON as QuPath reads and writes it: what was found on a slide, in pixels of level 0.

In: objects, as they come: outlines or points with a class and measurements. Out: a FeatureCollection after RFC 7946,
whole or not there at all; and objects again. Rows and columns here are y and x there.
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


DECIMALS = 2  # of coordinates: no outline is known to a hundredth of a pixel
HEAD, TAIL = '{"type": "FeatureCollection", "features": [\n', "\n]}\n"
DETECTIONS = ("detection", "cell", "tile")  # what else QuPath has are annotations


class Point(NamedTuple):
    """A place; whole numbers are corners of pixels, and the centre of the first one is (0.5, 0.5)."""

    row: float
    column: float


@dataclass(frozen=True)
class SlideObject:
    """Something on a slide: detections are many and fixed, annotations few and for people to edit."""

    shape: Point | tuple[Polygon, ...]  # the parts of an outline
    kind: Literal["detection", "annotation"] = "detection"
    class_name: str = ""
    color: tuple[int, int, int] | None = None  # of the class
    measurements: Mapping[str, float] = field(default_factory=dict)

    @property
    def id(self) -> UUID:
        """The same for the same place and class, whenever it is written and whatever was measured."""
        return self._identify(_geometry(self.shape))

    def _identify(self, geometry: dict[str, Any]) -> UUID:
        about = json.dumps([self.kind, self.class_name, geometry])
        return UUID(bytes=hashlib.sha256(about.encode()).digest()[:16], version=5)

    def to_feature(self, origin_px: tuple[float, float] = (0, 0)) -> dict[str, Any]:
        """A GeoJSON feature, places counted from the origin."""
        properties: dict[str, Any] = {"objectType": self.kind}
        if self.class_name:
            color = {} if self.color is None else {"color": list(self.color)}
            properties["classification"] = {"name": self.class_name, **color}
        if self.measurements:
            properties["measurements"] = {name: float(value) for name, value in self.measurements.items()}
            if not all(map(math.isfinite, properties["measurements"].values())):
                raise ValueError(f"JSON has finite numbers only, but an object measures {dict(self.measurements)}.")
        geometry = _geometry(self.shape)
        identity = str(self._identify(geometry))
        if any(origin_px):
            geometry = _geometry(self.shape, origin_px)
        return {"type": "Feature", "id": identity, "geometry": geometry, "properties": properties}


def write_geojson(path: Path, objects: Iterable[SlideObject], origin_px: tuple[float, float] = (0, 0)) -> int:
    """Write objects as they come, one a line, and return their number.

    The origin is where the reader of the file begins to count: `slide.origin_px` for QuPath.
    """
    count = 0
    with atomic_file(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(HEAD)
        for one in objects:
            file.write(",\n" if count else "")
            file.write(json.dumps(one.to_feature(origin_px), ensure_ascii=False, allow_nan=False))
            count += 1
        file.write(TAIL)
    return count


def read_geojson(path: Path, origin_px: tuple[float, float] = (0, 0)) -> list[SlideObject]:
    """The objects of a file, from here or from QuPath; places count from level 0 if the file's origin is given."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnreadableFileError(path, "does not exist.") from None
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read ({error.strerror}).") from None
    except ValueError as error:  # also of bytes that are no UTF-8
        raise UnreadableFileError(path, f"is cut off or no GeoJSON ({error}); export it anew.") from None
    features = content.get("features", [content]) if isinstance(content, dict) else content
    if not isinstance(features, list):
        raise UnreadableFileError(path, "is no GeoJSON: expected is a FeatureCollection, or a list of features.")
    objects: list[SlideObject] = []
    for number, feature in enumerate(features, 1):
        try:
            objects.extend(_objects(feature, origin_px))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            reason = f"{type(error).__name__}: {error}" if not isinstance(error, _UnknownShapeError) else error
            raise UnreadableFileError(
                path, f"has a feature, number {number}, that cannot be used ({reason})."
            ) from None
    return objects


class _UnknownShapeError(ValueError):
    pass


def _geometry(shape: Point | tuple[Polygon, ...], origin_px: tuple[float, float] = (0, 0)) -> dict[str, Any]:
    if isinstance(shape, Point):
        return {"type": "Point", "coordinates": _positions(np.array([shape], np.float64), origin_px)[0]}
    polygons = [[_close(_positions(ring, origin_px)) for ring in polygon.rings] for polygon in shape]
    if len(polygons) == 1:
        return {"type": "Polygon", "coordinates": polygons[0]}
    return {"type": "MultiPolygon", "coordinates": polygons}


def _positions(places: Ring, origin_px: tuple[float, float]) -> list[list[float]]:
    """As [x, y], without the decimals that whole numbers do not need."""
    positions = np.round(places[:, ::-1] - origin_px[::-1], DECIMALS)
    if not np.isfinite(positions).all():
        raise ValueError(f"JSON has finite numbers only, but an object lies at {places.tolist()}.")
    whole = positions.astype(np.int64)
    return (whole if np.array_equal(whole, positions) else positions).tolist()  # type: ignore[no-any-return]


def _close(positions: list[list[float]]) -> list[list[float]]:
    return [*positions, positions[0]]


def _objects(feature: Any, origin_px: tuple[float, float]) -> Iterator[SlideObject]:
    """One object, or one for each point of a MultiPoint, which is how QuPath keeps points that belong together."""
    about = feature.get("properties") or {}
    kind: Literal["detection", "annotation"] = (
        "detection" if about.get("objectType", about.get("object_type")) in DETECTIONS else "annotation"
    )
    name, color = _class(about.get("classification") or {})
    measured = about.get("measurements") or {}
    if isinstance(measured, list):  # before QuPath 0.4
        measured = {one["name"]: one["value"] for one in measured}
    numbers = {str(key): float(value) for key, value in measured.items() if value is not None}
    for shape in _shapes(feature["geometry"], origin_px):
        yield SlideObject(shape, kind, name, color, numbers)


def _class(classification: Mapping[str, Any]) -> tuple[str, tuple[int, int, int] | None]:
    names = classification.get("names") or [classification.get("name") or ""]
    color = classification.get("color")
    if (packed := classification.get("colorRGB")) is not None:  # before QuPath 0.4
        color = [packed >> 16 & 255, packed >> 8 & 255, packed & 255]
    if color is None:
        return ": ".join(names), None
    red, green, blue = (int(value) for value in color)
    return ": ".join(names), (red, green, blue)


def _shapes(geometry: Mapping[str, Any], origin_px: tuple[float, float]) -> Iterator[Point | tuple[Polygon, ...]]:
    kind, coordinates = geometry["type"], geometry["coordinates"]
    if kind in ("Point", "MultiPoint"):
        for x, y, *_ in [coordinates] if kind == "Point" else coordinates:
            yield Point(float(y) + origin_px[0], float(x) + origin_px[1])
    elif kind in ("Polygon", "MultiPolygon"):
        polygons = [coordinates] if kind == "Polygon" else coordinates
        if not polygons:
            raise _UnknownShapeError("its MultiPolygon has no parts")
        yield tuple(_polygon(rings, origin_px) for rings in polygons)
    else:
        raise _UnknownShapeError(f"its shape is a {kind}; polygons and points can be read")


def _polygon(rings: list[Any], origin_px: tuple[float, float]) -> Polygon:
    """Others may turn their rings as they like."""
    outer, *holes = (_ring(ring, origin_px) for ring in rings)
    return Polygon(
        outer if signed_area(outer) >= 0 else outer[::-1],
        tuple(hole if signed_area(hole) <= 0 else hole[::-1] for hole in holes),
    )


def _ring(positions: list[Any], origin_px: tuple[float, float]) -> Ring:
    ring = np.array([(y, x) for x, y, *_ in positions], np.float64)
    if not np.isfinite(ring).all():
        raise _UnknownShapeError("a coordinate is no finite number")
    if len(ring) < 4 or not np.array_equal(ring[0], ring[-1]):
        raise _UnknownShapeError("a ring has to end where it began, with three corners at least")
    return ring[:-1] + origin_px
