"""Objects on slides, and the files in which they are written: GeoJSON for QuPath, which is also read, and tables.

GeoJSON files are FeatureCollections (RFC 7946) and are written atomically. Objects in memory have coordinates (row,
column) in pixels of level 0. Positions in files are (x, y), that is (column, row).
"""

import csv
import gzip
import hashlib
import io
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple, TextIO, cast
from uuid import UUID

import numpy as np
from numpy.typing import NDArray

from rotopath.environment import import_for_tables
from rotopath.images.files import UnreadableFileError, expect_file
from rotopath.images.outlines import DECIMALS, Point, Polygon, Ring, make_polygon
from rotopath.writing import atomic_file, parse_json

HEAD, TAIL = '{"type": "FeatureCollection", "features": [\n', "\n]}\n"
COLUMNS = ("number", "id", "class", "x_px", "y_px")  # first columns of tables of objects
ROWS_AT_ONCE = 20_000  # rows of a Parquet table that are written at once
GZIP_LEVEL = 6  # higher levels take twice as long, and save 1 %
DETECTION_TYPES = ("detection", "cell", "tile")  # QuPath types that are read as "detection"; all others are annotations
# Classes of QuPath that are not classes of objects: areas that are left out, and areas in which objects are annotated.
IGNORED_CLASS, REGION_CLASS = "Ignore*", "Region*"
ACCEPTED = "accepted"  # measurement of an object that a person has reviewed: 1, or 0 if the person has rejected it
MAX_JSON_BYTES = 2**30  # of a file that is read at once
MAX_LINES_BYTES = 2**32  # of a file that is read line by line: four million nuclei
MAX_COORDINATE_PX = 1e9  # larger than any slide

ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False)  # `json.dumps` would make one for each object


@dataclass(frozen=True)
class SlideObject:
    """An object on a slide, with coordinates in pixels of level 0."""

    shape: Point | tuple[Polygon, ...]  # a position, or the polygons of an outline
    kind: Literal["detection", "annotation"] = "detection"  # in QuPath, users can edit annotations but not detections
    class_name: str = ""  # "" for an object without a class
    color: tuple[int, int, int] | None = None  # (red, green, blue) of the class
    measurements: Mapping[str, float] = field(default_factory=dict)

    @property
    def is_rejected(self) -> bool:
        """Whether a person has rejected this prediction: its measurement "accepted" is 0."""
        return self.measurements.get(ACCEPTED) == 0

    @property
    def is_object(self) -> bool:
        """Whether this is an object: neither an ignored area nor a region, and not rejected by a person."""
        return self.class_name not in (IGNORED_CLASS, REGION_CLASS) and not self.is_rejected

    @property
    def center(self) -> tuple[float, float]:
        """Position (row, column) of a point, or of the center of the bounding box of an outline."""
        top, left, bottom, right = self.bounds_px
        return (top + bottom) / 2, (left + right) / 2

    @property
    def id(self) -> UUID:
        """Identifier, computed from the kind, class and shape: an object has the same identifier in every file."""
        return UUID(self.id_text)

    @cached_property
    def id_text(self) -> str:
        """The identifier as text."""
        content = f"{json.dumps([self.kind, self.class_name])[:-1]}, {self._geometry}]"
        return str(UUID(bytes=hashlib.sha256(content.encode()).digest()[:16], version=5))

    @cached_property
    def _geometry(self) -> str:
        return json.dumps(_make_geometry(self.shape))

    def render(self, origin_px: tuple[float, float] = (0, 0)) -> None:
        """Compute now what tables and GeoJSON files contain. The object keeps it, also in another process.

        `origin_px` (row, column) is that of the files.
        """
        texts = _Texts(tuple(origin_px), self.to_feature(origin_px), _format_row(self, origin_px))
        vars(self)["_texts"] = texts  # not an attribute that can be set: objects are frozen
        vars(self).pop("_geometry")  # it need not be sent to another process, because the feature contains it

    def _find_texts(self, origin_px: tuple[float, float]) -> "_Texts | None":
        """Return the texts of `render` if they were computed for this origin of the files, else None."""
        texts: _Texts | None = vars(self).get("_texts")
        return texts if texts is not None and texts.origin_px == tuple(origin_px) else None

    @cached_property
    def bounds_px(self) -> tuple[float, float, float, float]:
        """Top, left, bottom and right of the bounding box."""
        if isinstance(self.shape, Point):
            return (*self.shape, *self.shape)
        vertices = np.concatenate([polygon.outer for polygon in self.shape])
        return (*vertices.min(axis=0).tolist(), *vertices.max(axis=0).tolist())

    def to_feature(self, origin_px: tuple[float, float] = (0, 0), decimals: int | None = DECIMALS) -> str:
        """Return the object as the text of a GeoJSON feature.

        `origin_px` (row, column), in pixels of level 0, is subtracted from all coordinates, which are then rounded to
        `decimals`; None keeps all decimals. Raises ValueError if a coordinate or a measurement is NaN or infinite.
        """
        if decimals == DECIMALS and (texts := self._find_texts(origin_px)) is not None:
            return texts.feature
        if decimals == DECIMALS and not any(origin_px):
            return self._write_feature(self._geometry)
        return self._write_feature(json.dumps(_make_geometry(self.shape, origin_px, decimals)))

    def to_line(self, number: int, origin_px: tuple[float, float] = (0, 0)) -> str:
        """Return the object as a line of a CSV table (`write_rows`), in which it has this number."""
        texts = self._find_texts(origin_px)
        return f"{number},{_format_row(self, origin_px) if texts is None else texts.row}"

    def _write_feature(self, geometry: str) -> str:
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
        content = ENCODER.encode(properties)
        return f'{{"type": "Feature", "id": "{self.id_text}", "geometry": {geometry}, "properties": {content}}}'


class _Texts(NamedTuple):
    """What files with a certain origin contain about an object."""

    origin_px: tuple[float, ...]
    feature: str
    row: str  # of a CSV table, without the number


# Writing GeoJSON


def write_geojson(path: Path, objects: Iterable[SlideObject], origin_px: tuple[float, float] = (0, 0)) -> int:
    """Write objects to a GeoJSON file, one on each line, and return the number of objects.

    If the file name ends in ".gz", the file is compressed, as QuPath reads it. Only one object at a time is in memory.
    `origin_px` (row, column) is subtracted from all coordinates; for QuPath, pass `slide.origin_px`.
    """
    parts = 0
    with ExitStack() as stack:
        raw: IO[bytes] = stack.enter_context(stack.enter_context(atomic_file(path)).open("wb"))
        if path.suffix == ".gz":  # the same objects give the same bytes: neither the time nor the file name is written
            raw = cast(IO[bytes], stack.enter_context(gzip.GzipFile("", "wb", GZIP_LEVEL, raw, mtime=0)))
        file = stack.enter_context(io.TextIOWrapper(raw, encoding="utf-8", newline="\n"))
        for text in _format_geojson(objects, origin_px, DECIMALS):
            file.write(text)
            parts += 1
    return parts - 2  # without the beginning and the end


def format_geojson(objects: Iterable[SlideObject]) -> str:
    """Return the text of a GeoJSON file with objects, whose coordinates are not rounded."""
    return "".join(_format_geojson(objects, (0, 0), None))


def _format_geojson(
    objects: Iterable[SlideObject], origin_px: tuple[float, float], decimals: int | None
) -> Iterator[str]:
    """Yield the beginning of a GeoJSON file, a line for each object, and the end of the file."""
    yield HEAD
    for number, item in enumerate(objects):
        yield (",\n" if number else "") + item.to_feature(origin_px, decimals)
    yield TAIL


def _make_geometry(
    shape: Point | tuple[Polygon, ...], origin_px: tuple[float, float] = (0, 0), decimals: int | None = DECIMALS
) -> dict[str, Any]:
    """Convert a shape to a GeoJSON geometry. `origin_px` (row, column) is subtracted from all coordinates."""
    if isinstance(shape, Point):
        return {"type": "Point", "coordinates": _to_positions(np.array([shape], np.float64), origin_px, decimals)[0]}
    polygons = [[_close(_to_positions(ring, origin_px, decimals)) for ring in polygon.rings] for polygon in shape]
    if len(polygons) == 1:
        return {"type": "Polygon", "coordinates": polygons[0]}
    return {"type": "MultiPolygon", "coordinates": polygons}


def _to_positions(vertices: Ring, origin_px: tuple[float, float], decimals: int | None) -> list[list[float]]:
    """Convert vertices (row, column) to positions [x, y], rounded to `decimals`; None keeps all decimals.

    `origin_px` (row, column) is subtracted from the vertices. Coordinates are integers if all of them are whole numbers
    after rounding. Raises ValueError if a coordinate is NaN or infinite.
    """
    positions = vertices[:, ::-1] - origin_px[::-1]
    if decimals is not None:
        positions = np.round(positions, decimals)
    if not np.isfinite(positions).all():
        raise ValueError(
            f"An object has NaN or infinite coordinates (row, column): {vertices.tolist()}; remove this object."
        )
    whole = positions.astype(np.int64)
    return (whole if np.array_equal(whole, positions) else positions).tolist()  # type: ignore[no-any-return]


def _close(positions: list[list[float]]) -> list[list[float]]:
    """Repeat the first position at the end of a ring, as GeoJSON requires."""
    return [*positions, positions[0]]


# Writing tables


def write_rows(
    objects: Iterable[SlideObject],
    table: TextIO,
    origin_px: tuple[float, float] = (0, 0),
    measurement_names: Sequence[str] = (),
) -> Iterator[SlideObject]:
    """Write each object as a row of a CSV table, then yield the object.

    The columns are those of `to_row`. `origin_px` (row, column), in pixels of level 0, is subtracted from coordinates.
    `measurement_names` are the columns of measurements of a table without rows.
    """
    rows, has_head = csv.writer(table, lineterminator="\n"), False
    for number, item in enumerate(objects, 1):
        if not has_head:
            rows.writerow([*COLUMNS, *item.measurements])
            has_head = True
        table.write(item.to_line(number, origin_px))
        yield item
    if not has_head:
        rows.writerow([*COLUMNS, *measurement_names])


def _format_row(item: SlideObject, origin_px: tuple[float, float]) -> str:
    """Return the line of an object in a CSV table, without its number, which is the first column."""
    first = list(to_row(item, 0, origin_px).values())[1 : len(COLUMNS)]
    with io.StringIO() as line:
        csv.writer(line, lineterminator="\n").writerow(first + [f"{value:.6g}" for value in item.measurements.values()])
        return line.getvalue()


def write_parquet(
    objects: Iterable[SlideObject],
    path: Path,
    origin_px: tuple[float, float] = (0, 0),
    measurement_names: Sequence[str] = (),
) -> Iterator[SlideObject]:
    """Write each object as a row of a Parquet table, and yield the object.

    The columns are those of `write_rows`, with the types int64 (number), string (id, class) and float64. The table is
    complete when the iterator is exhausted. Only `ROWS_AT_ONCE` rows are in memory. Raises ModuleNotFoundError if
    pyarrow is not installed.
    """
    pyarrow, parquet = import_for_tables("pyarrow"), import_for_tables("pyarrow.parquet")
    types = {"number": pyarrow.int64(), "id": pyarrow.string(), "class": pyarrow.string()}

    def make_schema(names: Iterable[str]) -> Any:
        return pyarrow.schema([(name, types.get(name, pyarrow.float64())) for name in names])

    rows: list[dict[str, str | int | float]] = []
    with ExitStack() as stack:
        writer = None
        for number, item in enumerate(objects, 1):
            rows.append(to_row(item, number, origin_px))
            if writer is None:
                writer = stack.enter_context(parquet.ParquetWriter(path, make_schema(rows[0])))
            if len(rows) == ROWS_AT_ONCE:
                writer.write_table(pyarrow.Table.from_pylist(rows, writer.schema))
                rows.clear()
            yield item
        if writer is None:
            writer = stack.enter_context(parquet.ParquetWriter(path, make_schema([*COLUMNS, *measurement_names])))
        writer.write_table(pyarrow.Table.from_pylist(rows, writer.schema))


def to_row(item: SlideObject, number: int, origin_px: tuple[float, float] = (0, 0)) -> dict[str, str | int | float]:
    """Return an object as a row of a table: a dictionary from the names of columns to values.

    The columns are `COLUMNS`, and then the measurements. "number" counts the objects of a slide from 1. "x_px" and
    "y_px" are the center of the bounding box, in pixels of level 0, minus `origin_px` (row, column).
    """
    x, y = item.center[1] - origin_px[1], item.center[0] - origin_px[0]
    first = (number, item.id_text, item.class_name, round(x, DECIMALS), round(y, DECIMALS))
    return {**dict(zip(COLUMNS, first, strict=True)), **item.measurements}


# Reading GeoJSON


def read_geojson(path: Path, origin_px: tuple[float, float] = (0, 0)) -> list[SlideObject]:
    """Read the objects of a GeoJSON file that this package or QuPath has written; a file named *.gz is decompressed.

    `origin_px` (row, column) is added to all coordinates, to convert them to pixels of level 0. A file of this package
    is read line by line, and may therefore have up to `MAX_LINES_BYTES`; for other files, see `read_json`. Raises
    `UnreadableFileError` if the file or one of its features cannot be used.
    """
    if has_line_per_feature(path):
        with suppress(OSError, EOFError, zlib.error, ValueError, RecursionError), _open(path) as file:
            return list(_read_lines(path, file, origin_px))
    return parse_geojson(path, read_json(path), origin_px)  # this also explains what is wrong with a damaged file


def has_line_per_feature(path: Path) -> bool:
    """Return whether a file begins as those of `write_geojson`, which have a line for each feature."""
    try:
        with _open(path) as file:
            return file.read(len(HEAD)) == HEAD.encode()
    except (OSError, EOFError, zlib.error):
        return False


def _open(path: Path) -> IO[bytes]:
    expect_file(path)
    return cast(IO[bytes], gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def _read_lines(path: Path, file: IO[bytes], origin_px: tuple[float, float]) -> Iterator[SlideObject]:
    """Yield the objects of a file that has a line for each feature. Raises ValueError if it has not, or is cut off."""
    size, line = len(file.readline()), file.readline(MAX_JSON_BYTES)
    while line.rstrip() not in (b"", b"]}"):
        size += len(line)
        if not line.endswith(b"\n") or size > MAX_LINES_BYTES:
            raise ValueError("a line is cut off, or the file is too large")
        yield from parse_geojson(path, parse_json(line.rstrip(b",\n"), only_finite=False), origin_px)
        line = file.readline(MAX_JSON_BYTES)
    if not line or file.read(1):
        raise ValueError("the file is cut off, or continues after its end")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; a file named *.gz is decompressed. Raises `UnreadableFileError` if it cannot.

    Files that are larger than `MAX_JSON_BYTES`, also after decompression, are not read.
    """
    try:
        with _open(path) as file:
            content = file.read(MAX_JSON_BYTES + 1)
        if len(content) > MAX_JSON_BYTES:
            raise UnreadableFileError(path, f"is larger than {MAX_JSON_BYTES >> 20} MB; divide it into several files.")
        return parse_json(content, only_finite=False)  # QuPath writes NaN for measurements without a value
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UnreadableFileError(path, f"is cut off or not a gzip file ({error}); compress it again.") from None
    except FileNotFoundError:
        raise UnreadableFileError(path, "does not exist.") from None
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read ({error.strerror}).") from None
    except UnreadableFileError:
        raise
    except (ValueError, RecursionError) as error:  # not JSON, not UTF-8, or lists within lists without end
        raise UnreadableFileError(path, f"is cut off or not valid JSON ({error}); export it again.") from None


def parse_geojson(path: Path, content: Any, origin_px: tuple[float, float] = (0, 0)) -> list[SlideObject]:
    """Return the objects in the `content` of the GeoJSON file at `path`, as `read_geojson` does."""
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
    if (type_name := feature.get("type", "Feature")) != "Feature":
        raise ValueError(f"its type is {type_name!r:.50}; expected 'Feature'")
    properties = feature.get("properties") or {}
    object_type = properties.get("objectType", properties.get("object_type"))
    kind: Literal["detection", "annotation"] = "detection" if object_type in DETECTION_TYPES else "annotation"
    class_name, color = _parse_classification(properties.get("classification") or {})
    values = properties.get("measurements") or {}
    if isinstance(values, list):  # before QuPath 0.4
        values = {item["name"]: item["value"] for item in values}
    measurements = {
        str(name): float(value)
        for name, value in values.items()
        if value is not None and math.isfinite(float(value))  # QuPath writes NaN for missing values
    }
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
    red, green, blue = color
    if not all(0 <= value <= 255 for value in color):  # also if a value is NaN
        raise ValueError(f"the color of a class is {color}; expected three numbers from 0 to 255")
    return ": ".join(names), (int(red), int(green), int(blue))


def _parse_geometry(
    geometry: Mapping[str, Any], origin_px: tuple[float, float]
) -> Iterator[Point | tuple[Polygon, ...]]:
    """Yield the shapes in a GeoJSON geometry: each of its points, or one outline that contains all of its polygons.

    The coordinates of shapes are (row, column), with `origin_px` (row, column) added.
    """
    kind, coordinates = geometry["type"], geometry["coordinates"]
    if kind in ("Point", "MultiPoint"):
        for x, y, *_ in [coordinates] if kind == "Point" else coordinates:
            _expect_coordinates(np.array([x, y], np.float64))
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
    return make_polygon(outer, holes)


def _parse_ring(positions: list[Any], origin_px: tuple[float, float]) -> Ring:
    """Convert a closed ring of positions [x, y] to vertices (row, column), and add `origin_px` (row, column).

    The last position, which repeats the first, is left out.
    """
    ring = np.array([(y, x) for x, y, *_ in positions], np.float64)
    _expect_coordinates(ring)
    if len(ring) < 4 or not np.array_equal(ring[0], ring[-1]):
        raise _UnknownShapeError("a ring must end at its first position and have at least three corners")
    return ring[:-1] + origin_px


def _expect_coordinates(values: NDArray[np.float64]) -> None:
    """Raise _UnknownShapeError if a coordinate is NaN, infinite, or beyond any slide."""
    if not (np.abs(values) < MAX_COORDINATE_PX).all():
        raise _UnknownShapeError("it has a coordinate that is NaN or infinite, or larger than any slide")
