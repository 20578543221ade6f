"""Read the annotated objects of an image: points, or a label map with a class for each object.

`read_points` and `read_objects` convert the annotations to a requested pixel spacing. `parse_points` and
`parse_objects` keep the pixel spacing of the image file, and also return a message for each invalid point or object in
the annotation file. Points come from CSV or GeoJSON files. Label maps come from image files, or are painted from the
outlines in GeoJSON or Aperio XML files.

A label map (H, W) contains the object number of each pixel, and 0 for background. Positions are (row, column) in
pixels; (0, 0) is the center of the upper left pixel. Classes are names in this module; a task converts them to class
numbers.

In GeoJSON files, outlines of QuPath's class "Ignore*" are areas in which objects are not annotated, or are ambiguous.
They and outlines of the class "Region*" are no objects, and neither are predictions that a person has rejected.
Ignored areas have positions as in GeoJSON: (0, 0) is the upper left corner of the image.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.draw import polygon2mask
from skimage.measure import points_in_poly

from rotopath.data.dataset import (
    PixelBox,
    Row,
    Sample,
    TableError,
    read_csv,
    read_table,
    resampling_factor,
    sample_size_px,
    scale_size,
)
from rotopath.images.files import UnreadableFileError, expect_file, is_plausible, read_labels
from rotopath.images.geojson import IGNORED_CLASS, REGION_CLASS, SlideObject, read_geojson
from rotopath.images.outlines import Point, Polygon, fill_outline, make_polygon

GEOJSON_SUFFIXES = (".geojson", ".json")
GEOJSON_KEPT = 4  # files whose objects are kept in memory, if several images share them
# Accepted names of the columns of CSV files with points.
ROW_NAMES, COLUMN_NAMES, CLASS_NAMES = ("row", "y"), ("column", "col", "x"), ("class", "label", "type")

PointRow = tuple[str, float, float, str]  # line or feature for messages ("line 3"), row, column, class name


class AnnotationError(UnreadableFileError):
    """Raised if an annotation file cannot be used."""


@dataclass(frozen=True)
class Points:
    """Positions and classes of annotated objects."""

    positions: NDArray[np.float64]  # (k, 2): row and column in pixels
    classes: tuple[str, ...]  # (k,): class name of each point; an empty string if the point has no class
    ignored: tuple[tuple[Polygon, ...], ...] = ()  # outline of each ignored area
    outside: tuple[tuple[float, float], ...] = ()  # positions outside the image, which are left out

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Objects:
    """Pixels and classes of annotated objects."""

    labels: NDArray[np.int32]  # (H, W): object number of each pixel, 0 for background
    classes: dict[int, str]  # class name by object number; objects without a class are left out
    ignored: tuple[tuple[Polygon, ...], ...] = ()  # outline of each ignored area

    @property
    def numbers(self) -> list[int]:
        """The numbers of all objects, in increasing order."""
        numbers: list[int] = np.unique(self.labels[self.labels > 0]).tolist()
        return numbers


# Points


def read_points(sample: Sample, spacing_um_px: float) -> Points:
    """Read the annotated points of a sample. Positions are in pixels of the image resampled to `spacing_um_px`.

    A sample without an annotation file has no points. Raises UnreadableFileError if the image file or the annotation
    file cannot be read. Raises AnnotationError, a type of UnreadableFileError, if any point in the file is invalid.
    """
    points, faults = parse_points(sample)
    if faults:
        raise AnnotationError(sample.annotations[0], f"cannot be used: {faults[0]}")
    # Resampling scales the distance from the image corner, which is half a pixel from the center of the first pixel.
    factor = resampling_factor(sample, spacing_um_px)
    return Points(
        (points.positions + 0.5) * factor - 0.5,
        points.classes,
        tuple(transform_outline(area, factor) for area in points.ignored),
    )


def parse_points(sample: Sample) -> tuple[Points, list[str]]:
    """Read all valid points of a sample, in pixels of the image file; also return a message for each invalid point.

    A point is invalid if it is outside the image, or if its row or column is not a number. A sample without an
    annotation file has no points.
    """
    if not sample.annotations:
        return Points(np.empty((0, 2)), ()), []
    path = sample.annotations[0]
    height, width = sample_size_px(sample)
    ignored: tuple[tuple[Polygon, ...], ...] = ()
    faults: list[str] = []
    if path.suffix.lower() in GEOJSON_SUFFIXES:
        rows, ignored = _list_points(read_sample_objects(sample, path))
    else:
        rows, faults = _read_csv_points(path)
    if sample.box is not None:  # centers of outlines at the edge may be outside
        rows = [row for row in rows if 0 <= row[1] + 0.5 < height and 0 <= row[2] + 0.5 < width]
    inside, outside = [], []
    for source, row, column, name in rows:
        if -0.5 <= row < height and -0.5 <= column < width:  # whole numbers are centers of pixels
            inside.append((row, column, name))
        else:
            outside.append((row, column))
            faults.append(
                f"{source} has an object at row {row:g}, column {column:g}, outside the image of {height} × {width} px "
                f"(height × width); check that positions are in pixels, and that row and column are not swapped."
            )
    positions = np.array([(row, column) for row, column, _ in inside], np.float64).reshape(-1, 2)
    return Points(positions, tuple(name for *_, name in inside), ignored, tuple(outside)), faults


def read_sample_objects(sample: Sample, path: Path) -> list[tuple[int, SlideObject]]:
    """Read the objects of a GeoJSON file and their numbers in it, from 1.

    Positions are relative to the upper left corner of the sample. If the sample is a rectangle, only the objects in it
    are returned. If it surrounds a region of another shape, only the objects in the region are returned, and the area
    outside the region is an additional ignored area.
    """
    if sample.box is None:
        return list(enumerate(read_geojson(path), 1))
    top, left, height, width = sample.box
    all_objects = _read_geojson_once(path, path.stat().st_mtime_ns if path.exists() else 0)
    regions: list[tuple[Polygon, ...]] = []
    for item in all_objects:
        if item.class_name == REGION_CLASS and not isinstance(item.shape, Point):
            upper, first, lower, last = item.bounds_px
            if upper <= top + 1 and first <= left + 1 and lower >= top + height - 1 and last >= left + width - 1:
                regions.append(item.shape)
    outlines = [transform_outline(region, 1.0, (top, left)) for region in regions]
    is_partial = bool(outlines) and not any(fill_outline(outline, (height, width)).all() for outline in outlines)
    objects = []
    for number, item in enumerate(all_objects, 1):
        if item.class_name == REGION_CLASS or not is_in_region(item, sample.box, regions[0] if is_partial else None):
            continue
        if isinstance(item.shape, Point):
            shape: Point | tuple[Polygon, ...] = Point(item.shape.row - top, item.shape.column - left)
        else:
            shape = transform_outline(item.shape, 1.0, (top, left))
        objects.append((number, replace(item, shape=shape)))
    if is_partial:
        corners = np.array([(0, 0), (0, width), (height, width), (height, 0)], np.float64)
        # Positions inside of an odd number of outlines are ignored: those in the rectangle, but not in the region.
        ignored = SlideObject((make_polygon(corners), *outlines[0]), "annotation", IGNORED_CLASS)
        objects.append((len(all_objects) + 1, ignored))
    return objects


def is_in_region(item: SlideObject, box: PixelBox, region: tuple[Polygon, ...] | None, by_center: bool = False) -> bool:
    """Return whether a point is in a region, or any part of an outline; if `by_center`, whether its center is.

    `box` is the rectangle around the region, or a part of it. `region` is None if the region is a rectangle.
    """
    top, left, height, width = box
    if by_center or isinstance(item.shape, Point):
        row, column = item.center
        if not (top <= row < top + height and left <= column < left + width):
            return False
        positions = np.array([item.center])
    else:
        upper, first, lower, last = item.bounds_px
        if not (upper < top + height and lower > top and first < left + width and last > left):
            return False
        positions = np.concatenate([polygon.outer for polygon in item.shape])
        if region is not None:  # an object may contain a part of the edge of the region
            edges = np.concatenate([polygon.outer for polygon in region])
            if np.all((edges > (upper, first)) & (edges < (lower, last)), axis=1).any():
                return True
    return region is None or bool(_find_positions_inside(region, positions).any())


def _find_positions_inside(outline: tuple[Polygon, ...], positions: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each position (n, 2) is inside an outline, by the even-odd rule."""
    rings = [ring for polygon in outline for ring in polygon.rings]
    inside: NDArray[np.bool_] = np.sum([points_in_poly(positions, ring) for ring in rings], axis=0) % 2 == 1  # type: ignore[no-untyped-call]
    return inside


def is_rectangle(shape: tuple[Polygon, ...]) -> bool:
    """Return whether an outline is a rectangle with sides along rows and columns."""
    if len(shape) != 1 or shape[0].holes or len(shape[0].outer) != 4:
        return False
    steps = np.diff(shape[0].outer, axis=0, append=shape[0].outer[:1])
    return bool(((steps == 0).sum(axis=1) == 1).all())


@lru_cache(GEOJSON_KEPT)
def _read_geojson_once(path: Path, modified_ns: int) -> tuple[SlideObject, ...]:  # noqa: ARG001
    """Read the objects of a GeoJSON file, which many samples may share."""
    return tuple(read_geojson(path))


def _list_points(objects: Sequence[tuple[int, SlideObject]]) -> tuple[list[PointRow], tuple[tuple[Polygon, ...], ...]]:
    """Return the points and the ignored areas among the objects of a GeoJSON file.

    An object with an outline becomes one point: the center of its bounding box.
    """
    rows: list[PointRow] = []
    for i, item in objects:
        if item.is_object:
            row, column = item.center
            # (0, 0) is the corner of the first pixel in GeoJSON, but the center of this pixel in `Points`.
            rows.append((f"feature {i}", row - 0.5, column - 0.5, item.class_name))
    return rows, _find_ignored(objects)


def _find_ignored(objects: Sequence[tuple[int, SlideObject]]) -> tuple[tuple[Polygon, ...], ...]:
    """Return the outlines of the ignored areas among the objects of a GeoJSON file."""
    return tuple(
        item.shape for _, item in objects if item.class_name == IGNORED_CLASS and not isinstance(item.shape, Point)
    )


def mask_areas(areas: Sequence[tuple[Polygon, ...]], size_px: tuple[int, int]) -> NDArray[np.bool_] | None:
    """Return a mask (H, W) of the pixels with their centers inside any of the areas, or None if there are no areas."""
    if not areas:
        return None
    mask = np.zeros(size_px, bool)
    for area in areas:
        mask |= fill_outline(area, size_px)
    return mask


def transform_outline(
    outline: tuple[Polygon, ...], factor: float, corner: tuple[float, float] = (0, 0)
) -> tuple[Polygon, ...]:
    """Subtract a position from all positions in an outline, and multiply them by a factor."""
    return tuple(
        Polygon((polygon.outer - corner) * factor, tuple((hole - corner) * factor for hole in polygon.holes))
        for polygon in outline
    )


def _read_csv_points(path: Path) -> tuple[list[PointRow], list[str]]:
    """Read the points of a CSV file; also return a message for each invalid line.

    If the first line contains names for the row and the column, `_read_named_columns` reads the file. Otherwise, the
    file has no header: each line begins with the row and the column in pixels, and has no class.
    """
    lines = read_csv(path)
    header = [cell.lower() for cell in lines[0][1]] if lines else []
    if any(name in header for name in ROW_NAMES) and any(name in header for name in COLUMN_NAMES):
        return _read_named_columns(path)
    rows: list[PointRow] = []
    faults: list[str] = []
    for line, cells in lines:
        try:
            row, column = (float(cell) for cell in cells[:2])
        except ValueError:
            faults.append(f"line {line} is {','.join(cells)!r}; expected row and column in pixels, such as `120,45`.")
            continue
        rows.append((f"line {line}", row, column, ""))
    return rows, faults


def _read_named_columns(path: Path) -> tuple[list[PointRow], list[str]]:
    """Read the points of a CSV file with a header; also return a message for each invalid line.

    The header contains `row` (or `y`), `column` (or `col`, or `x`), and optionally `class` (or `label`, or `type`).
    """
    rows: list[PointRow] = []
    faults: list[str] = []
    for line, cells in read_table(path, ()):
        row, column = _find_cell(cells, ROW_NAMES), _find_cell(cells, COLUMN_NAMES)
        try:
            rows.append((f"line {line}", float(row), float(column), _find_cell(cells, CLASS_NAMES)))
        except ValueError:
            faults.append(f"line {line} has row {row!r} and column {column!r}; expected two numbers in pixels.")
    return rows, faults


def _find_cell(row: Row, names: Sequence[str]) -> str:
    """Return the cell in the first column of `names` that the row has, or an empty string if the row has none."""
    return next((row[name] for name in names if name in row), "")


# Objects


def read_objects(sample: Sample, spacing_um_px: float) -> Objects:
    """Read the label map (H, W) of a sample, resampled to `spacing_um_px`, and the classes of the objects.

    The sample must have an annotation file; if it has two, the first is read. Outlines that cannot be painted into the
    label map, for example because they cover no pixel, are left out. Raises UnreadableFileError if the image file or
    the annotation file cannot be used.
    """
    objects, _ = parse_objects(sample, sample.annotations[0])
    factor = resampling_factor(sample, spacing_um_px)
    if factor == 1:
        return objects
    height, width = scale_size((objects.labels.shape[0], objects.labels.shape[1]), factor)
    # Nearest neighbor: interpolation would mix object numbers.
    resized = Image.fromarray(objects.labels).resize((width, height), Image.Resampling.NEAREST)
    return Objects(
        np.array(resized), objects.classes, tuple(transform_outline(area, factor) for area in objects.ignored)
    )


def parse_objects(sample: Sample, annotation: Path) -> tuple[Objects, list[str]]:
    """Read the objects of an annotation file, as a label map of the size of the sample's image file.

    Also returns a message for each object that is left out. Raises UnreadableFileError if the whole file cannot be
    used, for example because a label map does not have the size of the image.
    """
    height, width = sample_size_px(sample)
    suffix = annotation.suffix.lower()
    if suffix == ".xml":
        labels, faults = paint_labels(read_aperio_outlines(annotation), height, width)
        return Objects(labels, {}), faults
    if suffix in GEOJSON_SUFFIXES:
        return _paint_geojson(read_sample_objects(sample, annotation), height, width)
    labels = read_labels(annotation)
    if labels.shape != (height, width):
        raise AnnotationError(
            annotation,
            f"is a label map of {labels.shape[0]} × {labels.shape[1]} px, but the image has {height} × {width} px "
            f"(height × width); export a label map of the size of the image.",
        )
    return Objects(labels, _read_class_table(annotation, labels)), []


def class_table_path(label_map: Path) -> Path:
    """Return the path of the optional CSV table with the classes of a label map: `NAME.csv` for `NAME.png`."""
    return label_map.with_suffix(".csv")


def _read_class_table(label_map: Path, labels: NDArray[np.int32]) -> dict[int, str]:
    """Return the class name of each object number in a label map, or an empty dictionary if there is no table.

    The columns of the table are `object` (object number) and `class`. Raises TableError unless each object has exactly
    one class.
    """
    path = class_table_path(label_map)
    if not path.is_file():
        return {}
    classes: dict[int, str] = {}
    for line, row in read_table(path, ("object", "class")):
        if not row["object"].isdecimal() or not row["class"]:
            raise TableError(path, f"needs an object number and a class in line {line}, such as `17,lymphocyte`.")
        if classes.setdefault(int(row["object"]), row["class"]) != row["class"]:
            raise TableError(path, f"has a second class for object {row['object']} in line {line}; keep one class.")
    present = np.unique(labels[labels > 0]).tolist()
    if missing := [number for number in present if number not in classes]:
        raise TableError(path, f"has no class for object {missing[0]} of {label_map.name}; list every object.")
    return {number: classes[number] for number in present}


def _paint_geojson(objects: Sequence[tuple[int, SlideObject]], height: int, width: int) -> tuple[Objects, list[str]]:
    """Paint polygons into a label map (height, width); also return a message for each object that is left out.

    Painted objects are numbered from 1, in the given order. Where polygons overlap, a pixel belongs to the first of the
    overlapping polygons.
    """
    labels = np.zeros((height, width), np.int32)
    classes: dict[int, str] = {}
    faults: list[str] = []
    for i, item in objects:
        if not item.is_object:
            continue
        if isinstance(item.shape, Point):
            faults.append(f"feature {i} is left out: it is a point, not a polygon.")
            continue
        # GeoJSON coordinates start at the corner of the first pixel, as `fill_outline` expects: no shift is needed.
        corners = np.concatenate([polygon.outer for polygon in item.shape])
        top, left = np.floor(corners.min(axis=0)).clip(0).astype(int)
        bottom, right = np.minimum(np.ceil(corners.max(axis=0)), (height, width)).astype(int)
        if bottom <= top or right <= left:
            faults.append(f"feature {i} is left out: it covers no pixel of the image.")
            continue
        box = labels[top:bottom, left:right]
        free = fill_outline(item.shape, (bottom - top, right - left), (float(top), float(left))) & (box == 0)
        if not free.any():
            faults.append(f"feature {i} is left out: earlier features cover all of its pixels.")
            continue
        number = len(classes) + 1
        box[free] = number
        classes[number] = item.class_name
    named = {number: name for number, name in classes.items() if name}
    return Objects(labels, named, _find_ignored(objects)), faults


# Outlines in Aperio XML


@dataclass(frozen=True)
class Outline:
    """The outline of one object in an Aperio XML file."""

    region: str  # Id of the region in the file
    vertices: NDArray[np.float64]  # (k, 2): x (right), y (down) in pixels; (0, 0): center of the upper left pixel
    class_name: str = ""


def read_aperio_outlines(path: Path) -> tuple[Outline, ...]:
    """Read all outlines of an Aperio XML file, in file order. Regions that ImageScope marks as holes are left out."""
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    expect_file(path)
    try:
        root = defusedxml.ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except ParseError as error:
        raise AnnotationError(path, f"is incomplete or not XML ({error}); download or export it again.") from None
    except DefusedXmlException as error:
        raise AnnotationError(
            path, f"contains XML entities ({type(error).__name__}), which may be harmful; export it without them."
        ) from None
    except OSError as error:
        raise AnnotationError(path, f"cannot be read ({error.strerror}).") from None
    except (ValueError, LookupError) as error:
        raise AnnotationError(path, f"has an encoding that XML does not support ({error}); save it as UTF-8.") from None
    if root is None or root.tag != "Annotations":
        start = "nothing" if root is None else f"<{root.tag}>"
        raise AnnotationError(
            path,
            f"is not an Aperio annotation: it begins with {start}, not with <Annotations>; export it as Aperio XML.",
        )
    return tuple(
        _parse_outline(region, _find_class(layer), path)
        for layer in root.iter("Annotation")
        for region in layer.iter("Region")
        if region.get("NegativeROA", "0") == "0"
    )


def _find_class(layer: Element) -> str:
    """Return the class of the regions in a layer of an Aperio XML file, or an empty string.

    The class is the name of the layer, or the name of its first attribute (as in MoNuSAC), unless this is the
    attribute "Description" of ImageScope.
    """
    attribute = layer.find("Attributes/Attribute")
    name = "" if attribute is None else attribute.get("Name", "")
    return layer.get("Name", "").strip() or ("" if name == "Description" else name.strip())


def read_aperio_spacing_um_px(path: Path) -> float | None:
    """Read the pixel spacing (µm/px) from the root element of an Aperio XML file.

    Returns None if the spacing is missing or implausible, or if the file cannot be read.
    """
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    expect_file(path)
    try:
        with path.open("rb") as file:
            for _, root in defusedxml.ElementTree.iterparse(file, events=("start",)):
                spacing = _parse_number(root, "MicronsPerPixel", path)
                return spacing if is_plausible(spacing) else None
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError):
        pass
    return None


def paint_labels(outlines: tuple[Outline, ...], height: int, width: int) -> tuple[NDArray[np.int32], list[str]]:
    """Paint outlines into a label map (height, width); also return a message for each outline that is left out.

    Objects are numbered from 1 in the order of the outlines. A pixel belongs to the outline that contains its center.
    Where outlines overlap, a pixel belongs to the first of the overlapping outlines.
    """
    labels = np.zeros((height, width), np.int32)
    faults: list[str] = []
    number = 0
    for outline in outlines:
        if len(outline.vertices) < 3:
            faults.append(
                f"region {outline.region} is left out: it has {len(outline.vertices)} vertices; at least 3 are needed."
            )
            continue
        if np.linalg.matrix_rank(outline.vertices - outline.vertices[0]) < 2:
            faults.append(f"region {outline.region} is left out: it is a line or a point, without an area.")
            continue
        rows, columns = _find_pixels_inside(outline.vertices, height, width)
        free = labels[rows, columns] == 0
        if not len(rows):
            faults.append(f"region {outline.region} is left out: it covers no pixel of the image.")
        elif not free.any():
            faults.append(f"region {outline.region} is left out: earlier regions cover all of its pixels.")
        else:
            number += 1
            labels[rows[free], columns[free]] = number
    return labels, faults


def _parse_outline(region: Element, class_name: str, path: Path) -> Outline:
    vertices = [
        (_parse_number(vertex, "X", path), _parse_number(vertex, "Y", path)) for vertex in region.iter("Vertex")
    ]
    return Outline(region.get("Id", "?"), np.array(vertices, np.float64).reshape(-1, 2), class_name)


def _parse_number(element: Element, attribute: str, path: Path) -> float:
    """Return an attribute of an XML element as a number. Raises AnnotationError if this is not possible."""
    text = element.get(attribute, "")
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise AnnotationError(path, f"has {attribute}={text!r} in a <{element.tag}>; expected a number.")
    return number


def _find_pixels_inside(
    vertices: NDArray[np.float64], height: int, width: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the rows and columns of all pixels whose centers are inside an outline, by the even-odd rule.

    By the even-odd rule, a point is inside if a line from the point outwards crosses the outline an odd number of
    times. `vertices` (k, 2) are x and y in pixels; (0, 0) is the center of the upper left pixel.
    """
    left, top = np.floor(vertices.min(axis=0)).clip(0).astype(int)
    right, bottom = np.minimum(np.floor(vertices.max(axis=0)) + 1, (width, height)).astype(int)
    if right <= left or bottom <= top:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    # Whole-number coordinates are pixel centers here: for images that also have a label map, the painted outlines then
    # agree with the label map.
    mask = polygon2mask((bottom - top, right - left), vertices[:, ::-1] - (top, left))  # type: ignore[no-untyped-call]
    rows, columns = np.nonzero(mask)
    return rows + top, columns + left
