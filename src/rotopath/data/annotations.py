"""Aperio ImageScope annotations, as Kumar et al. and MoNuSeg publish them: outlines of nuclei in XML.

In: an XML file. Out: its spacing, polygons in pixels, and a label map painted from them; problems in sentences.

Annotations of objects inside images: points, and label maps with a class for each object.

In: a sample, and the spacing at which its objects are wanted. Out: positions or a label map with class names, and a
sentence for everything in the file that cannot be used. Classes are names here; a task gives them numbers.
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from skimage.draw import polygon2mask

from rotopath.data.dataset import HEAD_CHARACTERS, Row, Sample, TableError, find_delimiter, read_table, scale
from rotopath.images.files import UnreadableFileError, image_size_px, is_plausible, read_labels
from rotopath.images.geojson import Point, SlideObject, fill_outline, read_geojson


class AnnotationError(UnreadableFileError):
    """An annotation file that cannot be used."""


@dataclass(frozen=True)
class Outline:
    region: str  # its Id in the file
    vertices: NDArray[np.float64]  # (k, 2): x to the right and y downwards, in pixels, whole numbers at their centres


def read_outlines(path: Path) -> tuple[Outline, ...]:
    """All outlines of the file, in its order; regions that ImageScope marks as holes are left out."""
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    try:
        root = defusedxml.ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except ParseError as error:
        raise AnnotationError(path, f"is cut off or no XML ({error}); download or export it anew.") from None
    except DefusedXmlException as error:
        raise AnnotationError(
            path, f"holds XML entities ({type(error).__name__}), which annotations have no use for; it is not read."
        ) from None
    except OSError as error:
        raise AnnotationError(path, f"cannot be read ({error.strerror}).") from None
    except (ValueError, LookupError) as error:
        raise AnnotationError(path, f"is in an encoding that XML cannot have ({error}); save it as UTF-8.") from None
    if root is None or root.tag != "Annotations":
        found = "nothing" if root is None else f"<{root.tag}>"
        raise AnnotationError(path, f"is no Aperio annotation: it begins with {found}, not with <Annotations>.")
    regions = [region for region in root.iter("Region") if region.get("NegativeROA", "0") == "0"]
    return tuple(_outline(region, path) for region in regions)


def read_spacing_um_px(path: Path) -> float | None:
    """The spacing that the head of the file tells; None where it has none or cannot be read."""
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    try:
        with path.open("rb") as file:
            for _, root in defusedxml.ElementTree.iterparse(file, events=("start",)):
                spacing = _number(root, "MicronsPerPixel", path)
                return spacing if is_plausible(spacing) else None
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError):
        pass
    return None


def paint_labels(outlines: tuple[Outline, ...], height: int, width: int) -> tuple[NDArray[np.int32], list[str]]:
    """Object numbers (height, width), from 1 in the order of the outlines, and a sentence for each one left out.

    A pixel belongs to the outline that its centre lies in; where outlines overlap, the first one keeps it.
    """
    labels = np.zeros((height, width), np.int32)
    problems: list[str] = []
    number = 0
    for outline in outlines:
        if len(outline.vertices) < 3:
            problems.append(f"region {outline.region} has {len(outline.vertices)} vertices; an outline needs three.")
            continue
        if np.linalg.matrix_rank(outline.vertices - outline.vertices[0]) < 2:
            problems.append(f"region {outline.region} is a line or a point, without an area.")
            continue
        rows, columns = _pixels_inside(outline.vertices, height, width)
        free = labels[rows, columns] == 0
        if not len(rows):
            problems.append(f"region {outline.region} covers no pixel of the image.")
        elif not free.any():
            problems.append(f"region {outline.region} is hidden: others cover all of its pixels.")
        else:
            number += 1
            labels[rows[free], columns[free]] = number
    return labels, problems


def _outline(region: Element, path: Path) -> Outline:
    vertices = [(_number(vertex, "X", path), _number(vertex, "Y", path)) for vertex in region.iter("Vertex")]
    return Outline(region.get("Id", "?"), np.array(vertices, np.float64).reshape(-1, 2))


def _number(element: Element, attribute: str, path: Path) -> float:
    text = element.get(attribute, "")
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise AnnotationError(path, f"has {attribute}={text!r} in a <{element.tag}>, where a number is expected.")
    return number


def _pixels_inside(vertices: NDArray[np.float64], height: int, width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the pixels whose centres lie inside, by the even-odd rule."""
    left, top = np.floor(vertices.min(axis=0)).clip(0).astype(int)
    right, bottom = np.minimum(np.floor(vertices.max(axis=0)) + 1, (width, height)).astype(int)
    if right <= left or bottom <= top:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    # Pixel centres at whole numbers: so XML and label maps of the same image agree.
    mask = polygon2mask((bottom - top, right - left), vertices[:, ::-1] - (top, left))  # type: ignore[no-untyped-call]
    rows, columns = np.nonzero(mask)
    return rows + top, columns + left


ROW_NAMES, COLUMN_NAMES, CLASS_NAMES = ("row", "y"), ("column", "col", "x"), ("class", "label", "type")
GEOJSON_SUFFIXES = (".geojson", ".json")


@dataclass(frozen=True)
class Points:
    """Objects that are annotated by their positions."""

    positions: NDArray[np.float64]  # (k, 2): rows and columns, whole numbers at the centres of pixels
    classes: tuple[str, ...]  # (k,); empty where the file names no class

    def __len__(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class Objects:
    """Objects that are annotated pixel by pixel."""

    labels: NDArray[np.int32]  # (H, W): the number of the object, 0 for background
    classes: dict[int, str]  # by number; objects that the file names no class for are missing

    @property
    def numbers(self) -> list[int]:
        """The numbers of all objects, rising."""
        numbers: list[int] = np.unique(self.labels[self.labels > 0]).tolist()
        return numbers


def read_points(sample: Sample, spacing_um_px: float) -> Points:
    """The annotated points at a spacing; none where the sample has no annotation file."""
    points, faults = parse_points(sample)
    if faults:
        raise AnnotationError(sample.annotations[0], f"cannot be used: {faults[0]}")
    return Points((points.positions + 0.5) * scale(sample, spacing_um_px) - 0.5, points.classes)


def parse_points(sample: Sample) -> tuple[Points, list[str]]:
    """All points in the file that can be used, and a sentence for each line that cannot."""
    if not sample.annotations:
        return Points(np.empty((0, 2)), ()), []
    path = sample.annotations[0]
    size = image_size_px(sample.path)
    rows, faults = _read_geojson_points(path) if path.suffix.lower() in GEOJSON_SUFFIXES else _read_csv_points(path)
    inside = []
    for line, row, column, name in rows:
        if 0 <= row < size[0] and 0 <= column < size[1]:
            inside.append((row, column, name))
        else:
            faults.append(
                f"{line} places an object at row {row:g}, column {column:g}, outside of the image of "
                f"{size[0]} × {size[1]} px (rows come first)."
            )
    positions = np.array([(row, column) for row, column, _ in inside], np.float64).reshape(-1, 2)
    return Points(positions, tuple(name for *_, name in inside)), faults


def read_objects(sample: Sample, spacing_um_px: float) -> Objects:
    """The label map (H, W) of a sample's objects at a spacing, and their classes."""
    objects, _ = parse_objects(sample, sample.annotations[0])
    factor = scale(sample, spacing_um_px)
    if factor == 1:
        return objects
    height, width = (max(1, round(side * factor)) for side in objects.labels.shape)
    resized = Image.fromarray(objects.labels).resize((width, height), Image.Resampling.NEAREST)
    return Objects(np.array(resized), objects.classes)


def parse_objects(sample: Sample, annotation: Path) -> tuple[Objects, list[str]]:
    """The objects at the sample's own spacing, and a sentence for each one that was left out."""
    height, width = image_size_px(sample.path)
    suffix = annotation.suffix.lower()
    if suffix == ".xml":
        labels, faults = paint_labels(read_outlines(annotation), height, width)
        return Objects(labels, {}), faults
    if suffix in GEOJSON_SUFFIXES:
        return _paint_geojson(read_geojson(annotation), height, width)
    labels = read_labels(annotation)
    if labels.shape != (height, width):
        raise AnnotationError(
            annotation,
            f"is a map of {labels.shape[0]} × {labels.shape[1]} px, but its image has {height} × {width} px.",
        )
    return Objects(labels, _read_class_table(annotation, labels)), []


def class_table(label_map: Path) -> Path:
    """The CSV file (object,class) that may lie beside a label map, under the same name."""
    return label_map.with_suffix(".csv")


def _read_class_table(label_map: Path, labels: NDArray[np.int32]) -> dict[int, str]:
    path = class_table(label_map)
    if not path.is_file():
        return {}
    classes: dict[int, str] = {}
    for line, row in read_table(path, ("object", "class")):
        if not row["object"].isdecimal() or not row["class"]:
            raise TableError(path, f"has no object number and class in line {line}, such as `17,lymphocyte`.")
        if classes.setdefault(int(row["object"]), row["class"]) != row["class"]:
            raise TableError(path, f"gives object {row['object']} a second class in line {line}.")
    present = np.unique(labels[labels > 0]).tolist()
    if missing := [number for number in present if number not in classes]:
        raise TableError(path, f"names no class for object {missing[0]} of {label_map.name}; list every object.")
    return {number: classes[number] for number in present}


def _paint_geojson(objects: Sequence[SlideObject], height: int, width: int) -> tuple[Objects, list[str]]:
    """Polygons as a label map; where they overlap, the first one keeps the pixel, as for outlines in XML."""
    labels = np.zeros((height, width), np.int32)
    classes: dict[int, str] = {}
    faults: list[str] = []
    for i, item in enumerate(objects, 1):
        if isinstance(item.shape, Point):
            faults.append(f"feature {i} is a point, without an area.")
            continue
        # GeoJSON counts corners of pixels, so its polygons need no shift; only their box is filled.
        corners = np.concatenate([polygon.outer for polygon in item.shape])
        top, left = np.floor(corners.min(axis=0)).clip(0).astype(int)
        bottom, right = np.minimum(np.ceil(corners.max(axis=0)), (height, width)).astype(int)
        if bottom <= top or right <= left:
            faults.append(f"feature {i} covers no pixel of the image.")
            continue
        box = labels[top:bottom, left:right]
        free = fill_outline(item.shape, (bottom - top, right - left), (float(top), float(left))) & (box == 0)
        if not free.any():
            faults.append(f"feature {i} covers no pixel that is free.")
            continue
        number = len(classes) + 1
        box[free] = number
        classes[number] = item.class_name
    named = {number: name for number, name in classes.items() if name}
    return Objects(labels, named), faults


PointRow = tuple[str, float, float, str]  # where in the file, row, column, class


def _read_geojson_points(path: Path) -> tuple[list[PointRow], list[str]]:
    """Points as they are; polygons by the middle of their box."""
    rows: list[PointRow] = []
    for i, item in enumerate(read_geojson(path), 1):
        if isinstance(item.shape, Point):
            row, column = item.shape
        else:
            corners = np.concatenate([polygon.outer for polygon in item.shape])
            row, column = (corners.min(axis=0) + corners.max(axis=0)) / 2
        # GeoJSON counts from the corner of the first pixel, and positions from its centre.
        rows.append((f"feature {i}", float(row) - 0.5, float(column) - 0.5, item.class_name))
    return rows, []


def _read_csv_points(path: Path) -> tuple[list[PointRow], list[str]]:
    """Lines of `row,column`; or, below a header, columns by their names, in any order, and perhaps a class."""
    lines = _csv_lines(path)
    first = next((line for line in lines if any(cell.strip() for cell in line)), [])
    header = [cell.strip().lower() for cell in first]
    if any(name in header for name in ROW_NAMES) and any(name in header for name in COLUMN_NAMES):
        return _read_named_columns(path)
    rows: list[PointRow] = []
    faults: list[str] = []
    for number, cells in enumerate(lines, 1):
        if not any(cell.strip() for cell in cells):
            continue
        try:
            row, column = (float(cell) for cell in cells[:2])
        except ValueError:
            faults.append(f"line {number} is {','.join(cells)!r}, where a row and a column in pixels are expected.")
            continue
        rows.append((f"line {number}", row, column, ""))
    return rows, faults


def _read_named_columns(path: Path) -> tuple[list[PointRow], list[str]]:
    rows: list[PointRow] = []
    faults: list[str] = []
    for number, cells in read_table(path, ()):
        row, column = _cell(cells, ROW_NAMES), _cell(cells, COLUMN_NAMES)
        try:
            rows.append((f"line {number}", float(row), float(column), _cell(cells, CLASS_NAMES)))
        except ValueError:
            faults.append(f"line {number} has row {row!r} and column {column!r}, where numbers in pixels are expected.")
    return rows, faults


def _cell(row: Row, names: Sequence[str]) -> str:
    return next((row[name] for name in names if name in row), "")


def _csv_lines(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS)
            file.seek(0)
            return list(csv.reader(file, delimiter=find_delimiter(start)))
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except OSError as error:
        raise AnnotationError(path, f"cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, csv.Error):
        raise AnnotationError(path, "is no text, where lines of `row,column` are expected.") from None
