"""GeoJSON as QuPath reads and writes it: what was found on a slide, in pixels of level 0.

In: objects, as they come: outlines or points with a class and measurements. Out: a FeatureCollection after RFC 7946,
whole or not there at all; and objects again. Rows and columns here are y and x there.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple
from uuid import UUID

import numpy as np

from rotopath.images.files import UnreadableFileError
from rotopath.images.outlines import Polygon, Ring, signed_area
from rotopath.writing import replaced

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
    with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
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
