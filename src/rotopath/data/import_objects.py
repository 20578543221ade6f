"""Read annotated objects from the files of other software: GeoJSON, COCO, CSV tables and Aperio XML; and write COCO.

Each function returns an `Annotation` for each image that the file describes. All objects are `SlideObject`s: positions
are (row, column) in pixels, and (0, 0) is the upper left corner of the image, as in GeoJSON and COCO. Nothing is
rounded. `importing` finds the images.
"""

import csv
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from scipy.spatial import KDTree

from rotopath.data.annotations import (
    GEOJSON_SUFFIXES,
    AnnotationError,
    is_rectangle,
    read_aperio_outlines,
    read_aperio_spacing_um_px,
)
from rotopath.data.dataset import DataError, Finding, Sample, annotated_size_px, count_and_list, read_csv
from rotopath.data.import_masks import MAX_MASK_PX, decode_runs, encode_runs
from rotopath.images.files import UnreadableFileError
from rotopath.images.geojson import (
    IGNORED_CLASS,
    MAX_COORDINATE_PX,
    REGION_CLASS,
    SlideObject,
    has_line_per_feature,
    parse_geojson,
    read_geojson,
    read_json,
)
from rotopath.images.outlines import Point, Polygon, fill_outline, make_polygon, trace_outlines
from rotopath.writing import is_unchanged

# Words in the names of columns, by what the column contains. Other words are ignored if they are in FILLER_WORDS.
COLUMN_WORDS = {
    "row": ("row", "y"),
    "column": ("column", "col", "x"),
    "class": ("class", "classification", "label", "type", "category"),
    "image": ("image", "file", "filename", "slide", "tile", "patch", "field", "crop"),
    "object": ("object", "instance", "nucleus", "cell"),
}
FILLER_WORDS = {
    "centroid",
    "center",
    "centre",
    "position",
    "pos",
    "px",
    "pixel",
    "pixels",
    "um",
    "name",
    "path",
    "number",
}
# Columns with these words come from software that counts positions from the corner of the first pixel, not its center.
CORNER_WORDS = {"centroid", "px", "um"}
JSON_SUFFIXES = (*GEOJSON_SUFFIXES, ".geojson.gz", ".json.gz")
RESULTS = ["objects.geojson", "summary.json"]  # in each folder of results that `rotopath predict` writes
TABLE = "objects.csv"  # with the predicted objects, also after `objects.geojson` was corrected
SAME_PX = 0.5  # an object of which the bounding box has moved less than this is where it was predicted
MAX_RESULTS_LISTED = 20
COORDINATE_DECIMALS = 6  # in exported COCO files: width + x - x is the width again


@dataclass(frozen=True)
class Annotation:
    """The annotated objects of one image, as a file of other software describes them."""

    path: Path  # the annotation file
    image: str  # name or path of the image in the file; empty if the file describes the image of the same name
    objects: tuple[SlideObject, ...]
    boxes: int = 0  # number of objects of which only the bounding box is annotated
    size_px: tuple[int, int] | None = None  # height and width of the image, if the file states it
    spacing_um_px: float | None = None
    is_in_um: bool = False  # positions are in µm instead of pixels
    counts_from_origin: bool = False  # positions are relative to the origin of a slide, as in files of QuPath
    row: Mapping[str, str] = field(default_factory=dict)  # group and split, if the file states them
    notes: tuple[Finding, ...] = ()


class Classes(NamedTuple):
    """Class names from a table without positions, for objects in label maps."""

    path: Path
    names: dict[str, dict[int, str]]  # class name by image (empty: the image of the same name) and object number


def read_json_objects(path: Path) -> list[Annotation] | None:
    """Read a GeoJSON or COCO file. Returns None if a JSON file has another content."""
    if has_line_per_feature(path):
        return [Annotation(path, "", tuple(read_geojson(path)), counts_from_origin=True)]
    content = read_json(path)
    if isinstance(content, dict) and {"images", "annotations"} <= content.keys():
        return _parse_coco(path, content)
    kind = content.get("type") if isinstance(content, dict) else None
    is_geojson = isinstance(content, list) or kind in ("FeatureCollection", "Feature")
    if not is_geojson and path.name.endswith((".json", ".json.gz")):
        return None
    return [Annotation(path, "", tuple(parse_geojson(path, content)), counts_from_origin=True)]


def read_xml_objects(path: Path) -> Annotation:
    """Read an Aperio XML file, such as those of MoNuSeg and MoNuSAC. Regions of fewer than 3 vertices are left out."""
    outlines = read_aperio_outlines(path)
    notes = tuple(
        Finding(str(path), f"region {outline.region} is left out: it has fewer than 3 vertices.", is_problem=False)
        for outline in outlines
        if len(outline.vertices) < 3
    )
    # Whole numbers are centers of pixels in these files.
    objects = tuple(
        SlideObject((make_polygon(outline.vertices[:, ::-1] + 0.5),), "annotation", outline.class_name)
        for outline in outlines
        if len(outline.vertices) >= 3
    )
    return Annotation(path, "", objects, spacing_um_px=read_aperio_spacing_um_px(path), notes=notes)


# Corrections of predictions


def describe_corrections(paths: Sequence[Path]) -> list[Finding]:
    """Return notes about files `objects.geojson` in folders of results: which of them a person has corrected, and how.

    Predictions that nobody has corrected become annotations like the others. Other GeoJSON files in the folders, which
    are not read, are a problem: they may be the corrections. Results of versions that recorded no checksums of files
    are left out.
    """
    untouched, corrected, findings = [], [], []
    for path in paths:
        entries = (entry.name for entry in path.parent.iterdir())
        if others := sorted(name for name in entries if name.endswith(JSON_SUFFIXES) and name not in RESULTS):
            message = f"is not read, but only {path.name} beside it; if it contains the corrections, rename it."
            findings.append(Finding(str(path.with_name(others[0])), message))
        try:
            files = read_json(path.with_name(RESULTS[1]))["files"]
            if is_unchanged(path, files[path.name]):
                untouched.append(path.parent.name)
                continue
            table = path.with_name(TABLE)
            changes = _compare(table, path) if is_unchanged(table, files[TABLE]) else ""
        except (UnreadableFileError, OSError, KeyError, TypeError, ValueError, AttributeError):
            continue
        corrected.append(f"{path.parent.name} ({changes})" if changes else path.parent.name)
    unchecked = (
        "as predicted, and become annotations; if nobody has checked them, delete their folders, and import again"
    )
    for names, what in ((untouched, unchecked), (corrected, "corrected")):
        if names:
            listed = ", ".join(names[:MAX_RESULTS_LISTED]) + (", ..." if len(names) > MAX_RESULTS_LISTED else "")
            message = f"{len(names)} of {len(paths)} files of results are {what}: {listed}."
            findings.append(Finding("", message, is_problem=False))
    return findings


def _compare(table: Path, path: Path) -> str:
    """Return how many objects of a GeoJSON file are deleted, added and changed, compared with a table of predictions.

    Objects are the same if their identifiers are, which QuPath keeps, or else their positions. An object is changed if
    its class or its position is another.
    """
    with table.open(newline="", encoding="utf-8") as file:
        predicted = {row["id"]: (row["class"], float(row["x_px"]), float(row["y_px"])) for row in csv.DictReader(file)}
    total, counts, others = len(predicted), Counter[str](), []
    content = read_json(path)
    for feature in content.get("features", [content]) if isinstance(content, dict) else content:
        for item in parse_geojson(path, [feature]):
            if item.class_name in (IGNORED_CLASS, REGION_CLASS):
                continue
            own = (item.class_name, item.center[1], item.center[0])
            if (before := predicted.pop(str(feature.get("id")), None)) is None:
                others.append(own)
            elif before[0] != own[0] or np.hypot(before[1] - own[1], before[2] - own[2]) > SAME_PX:
                counts["changed"] += 1
    rest = list(predicted.values())
    if rest and others:
        positions = np.array([where for _, *where in others])
        distances, nearest = KDTree([where for _, *where in rest]).query(positions, distance_upper_bound=SAME_PX)
        same = {int(j): i for i, (distance, j) in enumerate(zip(distances, nearest, strict=True)) if distance < np.inf}
        counts["changed"] += sum(others[i][0] != rest[j][0] for j, i in same.items())
        counts["deleted"] -= len(same)
        counts["added"] -= len(same)
    counts["deleted"] += len(rest)
    counts["added"] += len(others)
    changes = ", ".join(f"{counts[key]} {key}" for key in ("deleted", "added", "changed") if counts[key])
    return f"{changes or 'no object deleted, added or moved'} of {total} predicted"


# COCO


def _parse_coco(path: Path, content: Mapping[str, Any]) -> list[Annotation]:
    """Return the annotations of all images in the `content` of a COCO file."""
    try:
        images = {image["id"]: image for image in content["images"]}
        names = {category["id"]: str(category["name"]) for category in content.get("categories", [])}
        items: dict[Any, list[Mapping[str, Any]]] = {number: [] for number in images}
        for item in content["annotations"]:
            for key, known in (("image_id", images), ("category_id", names)):
                if item[key] not in known:
                    raise AnnotationError(
                        path,
                        f"has an annotation with the {key} {item[key]!r}, which it does not list; export it again.",
                    )
            items[item["image_id"]].append(item)
        for image in images.values():
            _expect_inside(path, str(image["file_name"]))
        if len({image["file_name"] for image in images.values()}) < len(content["images"]):
            raise AnnotationError(path, "lists an image twice; export it again.")
    except (KeyError, TypeError, AttributeError) as error:
        raise AnnotationError(
            path, f"is not a valid COCO file ({type(error).__name__}: {error} is missing or wrong); export it again."
        ) from None
    has_corners = _has_corners(path, images, items)
    notes: tuple[Finding, ...] = ()
    if has_corners:
        message = "boxes are left, top, right, bottom, as in MIDOG; as left, top, width, height, they do not fit."
        notes = (Finding(str(path), message, is_problem=False),)
    annotations = []
    for number, image in images.items():
        objects, boxes = [], 0
        size = image.get("height"), image.get("width")
        size_px = size if all(isinstance(side, int) for side in size) else None
        for item in items[number]:
            try:
                shape, is_box = _parse_coco_shape(item, has_corners, size_px)
                name = IGNORED_CLASS if item.get("iscrowd") else names[item["category_id"]]
            except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
                raise AnnotationError(
                    path,
                    f"has an annotation, id {item.get('id')}, that cannot be used ({type(error).__name__}: {error}); "
                    f"correct or remove it.",
                ) from None
            objects.append(SlideObject(shape, "annotation", name))
            boxes += is_box
        row = {key: str(image[key]) for key in ("group", "split") if isinstance(image.get(key), str)}
        spacing = image.get("spacing_um_px")
        annotations.append(
            Annotation(
                path,
                str(image["file_name"]),
                tuple(objects),
                boxes,
                size_px,
                float(spacing) if isinstance(spacing, int | float) else None,
                row=row,
                notes=notes,
            )
        )
        notes = ()
    return annotations


def _expect_inside(path: Path, name: str) -> None:
    """Raise AnnotationError if the name of an image leaves the folder of the annotation file at `path`."""
    parts = PurePosixPath(name.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in parts.parts[0] if parts.parts else True:
        raise AnnotationError(
            path, f"names the image {name!r}, outside of its folder; write paths of images relative to the folder."
        )


def _has_corners(path: Path, images: Mapping[Any, Any], items: Mapping[Any, list[Mapping[str, Any]]]) -> bool:
    """Return whether boxes are (left, top, right, bottom), as in MIDOG, instead of (left, top, width, height).

    This is so if some boxes have their centers outside of the image unless they are read as corners. If all boxes fit
    in both ways, it is so if their areas say so or, without areas, if all boxes have the same size only as corners.
    """
    boxes, sizes, areas = [], [], []
    for number, image in images.items():
        for item in items[number]:
            if item.get("bbox") and not item.get("segmentation") and not item.get("keypoints"):
                boxes.append(item["bbox"])
                sizes.append((image.get("width") or np.inf, image.get("height") or np.inf))
                areas.append(item.get("area") or np.nan)
    try:
        corners = np.array(boxes, np.float64).reshape(-1, 4)
        limits = np.array(sizes, np.float64).reshape(-1, 2)
        stated = np.array(areas, np.float64)
    except (TypeError, ValueError):
        raise AnnotationError(path, "has a bbox that is not a list of four numbers; correct or remove it.") from None
    first, second = corners[:, :2], corners[:, 2:]
    if not len(corners) or not (second > first).all() or not ((first + second) / 2 < limits).all():
        return False
    if not (first + second / 2 < limits).all():
        return True
    if np.isfinite(stated).all():
        return bool(np.allclose(stated, (second - first).prod(axis=1)) and not np.allclose(stated, second.prod(axis=1)))
    return bool(np.ptp(second - first, axis=0).max() == 0 < np.ptp(second, axis=0).max())


def _parse_coco_shape(
    item: Mapping[str, Any], has_corners: bool, size_px: tuple[int, int] | None
) -> tuple[Point | tuple[Polygon, ...], bool]:
    """Return the shape of a COCO annotation, and whether it is only a bounding box.

    `size_px` is the size of the image (height, width), if it is stated.

    The shape comes from the segmentation (polygons, or run lengths of a mask), a single keypoint, or the bounding box.
    """
    segmentation = item.get("segmentation")
    if isinstance(segmentation, Mapping):
        if size_px is not None and tuple(segmentation["size"]) != tuple(size_px):
            raise ValueError(
                f"its mask has {' × '.join(map(str, segmentation['size']))} px, but its image {size_px[0]} × "
                f"{size_px[1]} px (height × width)"
            )
        mask, offset = decode_runs(segmentation["counts"], *segmentation["size"])
        return trace_outlines(mask, offset)[1], False
    if segmentation:
        rings = [np.array(ring, np.float64).reshape(-1, 2)[:, ::-1] for ring in segmentation]
        if not all(len(ring) >= 3 and (np.abs(ring) < MAX_COORDINATE_PX).all() for ring in rings):
            raise ValueError("a polygon needs at least three vertices, with coordinates that are on the image")
        return _unite([make_polygon(ring) for ring in rings]), False
    keypoints = item.get("keypoints")
    left, top, right, bottom = (float(value) for value in item["bbox"]) if item.get("bbox") else (0.0,) * 4
    if keypoints and len(keypoints) == 3 and (right, bottom) == (0, 0):
        if not (np.abs(np.array(keypoints[:2], np.float64)) < MAX_COORDINATE_PX).all():
            raise ValueError("its keypoint is not on the image")
        return Point(float(keypoints[1]), float(keypoints[0])), False
    if not has_corners:
        right, bottom = left + right, top + bottom
    if not (right > left and bottom > top and (np.abs([left, top, right, bottom]) < MAX_COORDINATE_PX).all()):
        raise ValueError("it has neither a segmentation nor a bounding box with an area")
    box = np.array([(top, left), (top, right), (bottom, right), (bottom, left)])
    return (make_polygon(box),), True


def _unite(polygons: Sequence[Polygon]) -> tuple[Polygon, ...]:
    """Return the outline of an object that consists of polygons, which may overlap, as in pycocotools.

    The polygons of an outline must not overlap: pixels inside two of them would be outside of the object. If they do,
    the outline is that of the pixels in any of them. Raises ValueError if these polygons are too large.
    """
    if len(polygons) == 1:
        return tuple(polygons)
    corners = np.array([(polygon.outer.min(axis=0), polygon.outer.max(axis=0)) for polygon in polygons])
    low, high = corners[:, 0], corners[:, 1]
    touches = np.all((low[:, None] < high[None]) & (high[:, None] > low[None]), axis=2)
    if touches.sum() == len(polygons):  # each of them only touches itself
        return tuple(polygons)
    top, left = np.floor(low.min(axis=0)).astype(int).tolist()
    height, width = (np.ceil(high.max(axis=0)).astype(int) - (top, left)).tolist()
    if height * width > MAX_MASK_PX:
        raise ValueError(f"its polygons overlap, and are too large ({height} × {width} px)")
    count = np.zeros((height, width), np.int32)
    for polygon in polygons:
        count += fill_outline((polygon,), (height, width), (top, left))
    return tuple(polygons) if count.max() <= 1 else trace_outlines((count > 0).astype(np.int32), (top, left))[1]


def make_coco(samples: Sequence[tuple[str, Sample, Sequence[SlideObject]]], are_points: bool) -> dict[str, Any]:
    """Return the content of a COCO file with the given images: name in the file, sample and objects of each.

    If `are_points`, rectangles are written as boxes. Outlines with holes are written as run lengths of a mask.
    """
    samples = [(name, sample, [item for item in objects if not item.is_rejected]) for name, sample, objects in samples]
    names = sorted({item.class_name for *_, objects in samples for item in objects})
    numbers = {name: number for number, name in enumerate(names, 1)}
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for number, (name, sample, objects) in enumerate(samples, 1):
        height, width = annotated_size_px(sample.path)
        image = {"id": number, "file_name": name, "width": width, "height": height}
        known = {"group": sample.case, "split": sample.split, "spacing_um_px": sample.spacing_um_px}
        images.append({**image, **{key: value for key, value in known.items() if value}})
        for item in objects:
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": numbers[item.class_name],
                    "iscrowd": int(item.class_name == IGNORED_CLASS),
                    **_make_coco_shape(item, (height, width), are_points),
                }
            )
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    return {"images": images, "annotations": annotations, "categories": categories}


def _make_coco_shape(item: SlideObject, size_px: tuple[int, int], are_points: bool) -> dict[str, Any]:
    """Return the keys of a COCO annotation that describe the shape of an object."""
    shape = item.shape
    more: dict[str, Any] = {}
    if not isinstance(shape, Point) and any(polygon.holes for polygon in shape):
        mask = fill_outline(shape, size_px)
        if mask.any():
            shape = trace_outlines(mask.astype(np.int32))[1]  # box and area are those of the mask
            more = {"segmentation": {"size": list(size_px), "counts": encode_runs(mask)}}
    top, left, bottom, right = SlideObject(shape).bounds_px
    box = [round(value, COORDINATE_DECIMALS) for value in (left, top, right - left, bottom - top)]
    if isinstance(shape, Point):
        return {"bbox": box, "area": 0, "keypoints": [shape.column, shape.row, 2], "num_keypoints": 1}
    area = round(sum(polygon.area_px for polygon in shape), COORDINATE_DECIMALS)
    if not more and not (are_points and is_rectangle(shape)):
        more = {"segmentation": [polygon.outer[:, ::-1].ravel().tolist() for polygon in shape]}
    return {"bbox": box, "area": area, **more}


# CSV


def read_table_objects(path: Path, columns: Sequence[str] | None) -> list[Annotation] | Classes | None:
    """Read a table with the positions of objects, or with the classes of the objects in label maps.

    Tables may have any delimiter. Columns are identified by their names in the header, or in `columns` if a
    table has no header.
    Returns None for a table with other columns. Raises AnnotationError if the order of the columns is not known, or if
    a line has no position.
    """
    lines = read_csv(path)
    if not lines:
        return [Annotation(path, "", ())]
    has_header = not any(_to_number(cell) is not None for cell in lines[0][1])
    header = lines[0][1] if has_header else columns
    if header is None:
        first = ", ".join(lines[0][1])
        raise AnnotationError(
            path,
            f"has no header (line 1: {first}), so the order of its columns is not known; state it with --columns, for "
            f"example --columns row,column or --columns x,y,class.",
        )
    words = [_split_words(name) for name in header]
    names = _find_columns(path, header, words)
    body = lines[1:] if has_header else lines
    if {"row", "column"} <= names.keys():
        return _read_positions(path, body, names, words)
    if {"object", "class"} <= names.keys():
        return _read_classes(path, body, names)
    if not has_header:
        raise AnnotationError(path, f"cannot be read with --columns {','.join(header)}: name a row and a column.")
    return None


def _split_words(name: str) -> set[str]:
    """Return the words in the name of a column, in lower case; "µm" becomes "um"."""
    return set(re.findall("[a-z]+", re.sub("[µμ]", "u", name.casefold())))


def _find_content(words: Iterable[str]) -> str | None:
    """Return what a column contains whose name consists of `words`: a key of COLUMN_WORDS, or None."""
    rest = [word for word in words if word not in FILLER_WORDS]
    return next((key for key, known in COLUMN_WORDS.items() if len(rest) == 1 and rest[0] in known), None)


def _find_columns(path: Path, header: Sequence[str], words: Sequence[set[str]]) -> dict[str, int]:
    """Return the index of the column with each known content. Raises AnnotationError if two columns have the same."""
    found: dict[str, list[int]] = {}
    for index, name_words in enumerate(words):
        if content := _find_content(name_words):
            found.setdefault(content, []).append(index)
    for content in ("row", "column"):
        if len(indices := found.get(content, [])) > 1:
            names = " and ".join(repr(header[index]) for index in indices)
            raise AnnotationError(
                path, f"has two columns for the {content} of an object, {names}; rename the one that is not used."
            )
    return {content: indices[0] for content, indices in found.items()}


def _read_positions(
    path: Path, lines: Sequence[tuple[int, list[str]]], names: Mapping[str, int], words: Sequence[set[str]]
) -> list[Annotation]:
    """Return the annotations of a table with positions: one, or one for each image that the table names."""
    position_words = words[names["row"]] | words[names["column"]]
    shift = 0.0 if position_words & CORNER_WORDS else 0.5  # whole numbers are centers of pixels
    objects: dict[str, list[SlideObject]] = {}
    faults = []
    for line, cells in lines:
        values = {name: cells[index] if index < len(cells) else "" for name, index in names.items()}
        row, column = _to_number(values["row"]), _to_number(values["column"])
        if row is None or column is None:
            faults.append(f"line {line} has row {values['row']!r} and column {values['column']!r}")
            continue
        shape = Point(row + shift, column + shift)
        objects.setdefault(values.get("image", ""), []).append(
            SlideObject(shape, "annotation", values.get("class", ""))
        )
    if faults:
        count = f"{len(faults)} lines do not have two numbers, first: " if len(faults) > 1 else ""
        raise AnnotationError(path, f"cannot be used: {count}{faults[0]}; expected two numbers.")
    if not objects and "image" not in names:
        objects[""] = []
    is_in_um = "um" in position_words
    return [Annotation(path, image, tuple(items), is_in_um=is_in_um) for image, items in objects.items()]


def _read_classes(path: Path, lines: Sequence[tuple[int, list[str]]], names: Mapping[str, int]) -> Classes:
    """Return the classes of a table with the number and the class of each object."""
    classes: dict[str, dict[int, str]] = {}
    for line, cells in lines:
        values = {name: cells[index] if index < len(cells) else "" for name, index in names.items()}
        if not values["object"].isdecimal() or not values["class"]:
            raise AnnotationError(path, f"needs an object number and a class in line {line}, such as `17,lymphocyte`.")
        of_image = classes.setdefault(values.get("image", ""), {})
        if of_image.setdefault(int(values["object"]), values["class"]) != values["class"]:
            raise AnnotationError(path, f"has a second class for object {values['object']} in line {line}; keep one.")
    return Classes(path, classes)


def _to_number(text: str) -> float | None:
    """Return a cell as a number, with a point or a comma before the decimals; None if it is not a plausible number."""
    try:
        number = float(text.replace(",", "."))
    except ValueError:
        return None
    return number if abs(number) < MAX_COORDINATE_PX else None


# Classes


def parse_classes(text: str | None) -> dict[str, str]:
    """Return the new name of each class in a text such as "1=tumor,2=stroma,3=": an empty name removes the class.

    In "=tumor", the old name is empty: this is the class of objects that have none.
    """
    renamed: dict[str, str] = {}
    for part in (text or "").split(",") if text else ():
        old, equals, new = part.partition("=")
        if not equals or not part.strip(" ="):
            raise DataError(
                f"--classes contains {part!r}; expected OLD=NEW, or OLD= to leave out the class OLD, or =NEW for "
                f"objects without a class."
            )
        renamed[old.strip()] = new.strip()
    return renamed


def rename_classes(annotation: Sequence[SlideObject], renamed: Mapping[str, str]) -> list[SlideObject]:
    """Return objects with new class names, without the objects whose class has an empty new name."""
    kept = []
    for item in annotation:
        name = renamed.get(item.class_name, item.class_name)
        if name or not item.class_name:
            kept.append(
                item
                if name == item.class_name
                else SlideObject(item.shape, item.kind, name, item.color, item.measurements)
            )
    return kept


def expect_known_classes(renamed: Mapping[str, str], present: Collection[str]) -> None:
    """Raise DataError if a class that is renamed does not exist. The class "" is that of objects without a class."""
    names = sorted(set(present) - {""})
    if unknown := [name for name in renamed if name not in present]:
        fault = (
            f"renames {unknown[0]!r}, but the sources have no such class"
            if unknown[0]
            else f"contains '={renamed['']}', but the sources have nothing without a class"
        )
        raise DataError(f"--classes {fault}; they have {count_and_list(names, 'class') if names else 'no classes'}.")
