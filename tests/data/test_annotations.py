"""Annotations of objects and their classes: points and outlines in CSV tables, label maps and GeoJSON."""

import json
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from layouts import box, kumar, outline_xml, pixels, truncate, write_csv, write_image, write_text

from rotopath.data.annotations import AnnotationError, parse_objects, parse_points, read_objects, read_points
from rotopath.data.dataset import DataError, Sample, TableError, problems
from rotopath.data.formats import check, open_data
from rotopath.images.files import UnreadableFileError
from rotopath.images.geojson import SlideObject, write_geojson
from rotopath.images.outlines import trace_outlines
from rotopath.tasks import Detect, Segment, make_task

Ring = list[tuple[float, float]]


def sample(root: Path, annotation: Path, size: tuple[int, int] = (60, 80), spacing: float = 0.25) -> Sample:
    image = write_image(root / "a.png", pixels(*size))
    return Sample(image, "a.png", "7", "train", spacing, annotations=(annotation,))


def feature(kind: str, coordinates: object, name: str = "") -> dict[str, object]:
    about = {"objectType": "annotation"} | ({"classification": {"name": name}} if name else {})
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": about}


def square(top: float, left: float, side: float) -> Ring:
    """Return corners (x, y) of a closed ring; whole numbers are corners of pixels."""
    x, y = left, top
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]


def geojson(root: Path, *features: dict[str, object], name: str = "a.geojson") -> Path:
    return write_text(root / name, json.dumps({"type": "FeatureCollection", "features": features}))


# Points in a CSV file


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
@pytest.mark.parametrize("names", [("row", "column", "class"), ("Y", "X", "Type"), ("y", " col ", "LABEL")])
def test_point_columns_are_identified_by_name(tmp_path: Path, names: tuple[str, ...], order: tuple[int, ...]) -> None:
    lines = [names, ("10", "20", "mitosis"), ("30.5", "40", ""), ("5", "79", "other")]
    path = write_csv(tmp_path / "a.csv", [[line[i] for i in order] for line in lines])
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30.5, 40], [5, 79]]
    assert points.classes == ("mitosis", "", "other")
    assert len(points) == 3


def test_other_columns_are_ignored_and_classes_are_optional(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", "id,x,y,score\n7,20,10,0.9\n8,40,30,0.1\n\n")
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40]]
    assert points.classes == ("", "")


def test_points_without_a_header_are_row_and_column(tmp_path: Path) -> None:
    """As in AMIDA13, whose third column is the confidence of the annotators."""
    path = write_text(tmp_path / "a.csv", "10,20,0.9\n30,40\n")
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40]]
    assert points.classes == ("", "")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mitosis,ten,20", "line 3 has row 'ten' and column '20'; expected two numbers in pixels."),
        ("mitosis,10", "line 3 has row '10' and column ''; expected two numbers in pixels."),
        (
            "mitosis,60,10",
            "line 3 has an object at row 60, column 10, outside the image of 60 × 80 px (height × width); check "
            "that positions are in pixels, and that row and column are not swapped.",
        ),
        ("mitosis,nan,10", "line 3 has an object at row nan, column 10, outside the image of 60 × 80 px"),
    ],
)
def test_invalid_lines_below_a_header_are_reported_and_others_are_used(tmp_path: Path, line: str, message: str) -> None:
    path = write_text(tmp_path / "a.csv", f"class,row,column\na,10,20\n{line}\nb,30,40\n")
    points, faults = parse_points(sample(tmp_path, path))
    assert len(faults) == 1
    assert faults[0].startswith(message)
    assert points.classes == ("a", "b")
    with pytest.raises(AnnotationError, match="cannot be used: line 3"):
        read_points(sample(tmp_path, path), 0.25)


def test_points_with_classes_are_scaled_with_their_image(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", "class,column,row\na,20,10\n")
    points = read_points(sample(tmp_path, path), 0.5)
    assert points.positions.tolist() == [[4.75, 9.75]]
    assert points.classes == ("a",)


def test_points_are_counted_by_class(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / f"{name}.png", pixels(60, 80, ord(name)))
    write_text(tmp_path / "a.csv", "row,column,class\n1,1,tumor\n2,2,stroma\n3,3,tumor\n")
    write_text(tmp_path / "b.csv", "row,column,class\n1,1,fat\n")
    rows = [("a.png", "a.csv", "train", 1), ("b.png", "b.csv", "test", 1)]
    dataset = open_data(
        write_csv(tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), *rows]), "points"
    )
    counts = check(dataset).counts
    assert counts["train"] == {"images": 1, "cases": 1, "objects": 3, "tumor": 2, "stroma": 1}
    assert Detect.find_classes(dataset) == ("fat", "stroma", "tumor")
    assert make_task("detect", annotated_classes=Detect.find_classes(dataset)).outputs == 4


# GeoJSON


def test_geojson_points_count_from_the_corner_of_the_first_pixel(tmp_path: Path) -> None:
    """Positions count from its center, and rows come first; a MultiPoint is several points."""
    path = geojson(
        tmp_path,
        feature("Point", [20.5, 10.5], "mitosis"),
        feature("MultiPoint", [[40.5, 30.5], [1, 2]], "other"),
        feature("Point", [0.5, 0.5]),
    )
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40], [1.5, 0.5], [0, 0]]
    assert points.classes == ("mitosis", "other", "other", "")


def test_bounding_boxes_are_read_as_their_centers(tmp_path: Path) -> None:
    """Some datasets of points, such as MIDOG, contain boxes."""
    path = geojson(tmp_path, feature("Polygon", [square(10, 20, 11)], "mitosis"))
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[15, 25]]
    assert points.classes == ("mitosis",)


def test_point_outside_of_the_image_is_reported(tmp_path: Path) -> None:
    path = geojson(tmp_path, feature("Point", [20.5, 10.5]), feature("Point", [10.5, 60.5], "late"))
    points, faults = parse_points(sample(tmp_path, path))
    assert points.positions.tolist() == [[10, 20]]
    assert faults == [
        "feature 2 has an object at row 60, column 10, outside the image of 60 × 80 px (height × width); check that "
        "positions are in pixels, and that row and column are not swapped."
    ]


def test_polygons_are_painted_with_holes_and_classes(tmp_path: Path) -> None:
    path = geojson(
        tmp_path,
        feature("Polygon", [square(10, 20, 8), square(12, 22, 2)], "tumor"),
        feature("MultiPolygon", [[square(40, 5, 3)], [square(50, 5, 3)]]),
        feature("Polygon", [square(30, 76, 10)], "stroma"),
    )
    expected = np.zeros((60, 80), np.int32)
    expected[10:18, 20:28] = 1
    expected[12:14, 22:24] = 0
    expected[40:43, 5:8] = expected[50:53, 5:8] = 2
    expected[30:40, 76:80] = 3
    objects, faults = parse_objects(sample(tmp_path, path), path)
    assert np.array_equal(objects.labels, expected)
    assert objects.labels.dtype == np.int32
    assert objects.classes == {1: "tumor", 3: "stroma"}, "the second polygon has no class"
    assert objects.numbers == [1, 2, 3]
    assert faults == []


def test_first_polygon_keeps_overlapping_pixels(tmp_path: Path) -> None:
    """A completely hidden polygon has no number, and the next one keeps its own class."""
    path = geojson(
        tmp_path,
        feature("Polygon", [square(10, 10, 8)], "a"),
        feature("Polygon", [square(12, 12, 3)], "hidden"),
        feature("Polygon", [square(14, 14, 8)], "b"),
    )
    objects, faults = parse_objects(sample(tmp_path, path), path)
    assert np.bincount(objects.labels.ravel())[1:].tolist() == [64, 64 - 16]
    assert (objects.labels[15, 15], objects.labels[20, 20]) == (1, 2)
    assert objects.classes == {1: "a", 2: "b"}
    assert faults == ["feature 2 is left out: earlier features cover all of its pixels."]


def test_features_that_cannot_be_painted_are_noted_and_others_are_used(tmp_path: Path) -> None:
    path = geojson(
        tmp_path,
        feature("Point", [4, 4], "a"),
        feature("Polygon", [square(100, 100, 5)], "a"),
        feature("Polygon", [square(-50, 3, 5)], "a"),
        feature("Polygon", [square(3, 3, 5)], "a"),
    )
    rows = [("a.png", path.name, "train", 1)]
    sample(tmp_path, path)
    result = check(open_data(write_csv(tmp_path / "m.csv", [("image", "annotation", "split", "spacing"), *rows])))
    assert problems(result.findings) == []
    assert [str(finding) for finding in result.findings][:3] == [
        "a.geojson: feature 1 is left out: it is a point, not a polygon.",
        "a.geojson: feature 2 is left out: it covers no pixel of the image.",
        "a.geojson: feature 3 is left out: it covers no pixel of the image.",
    ]
    assert result.counts["train"] == {"images": 1, "cases": 1, "objects": 1, "a": 1}


@settings(deadline=None, max_examples=50)
@given(labels=arrays(np.int32, (9, 11), elements=st.integers(0, 3)))
def test_written_objects_are_read_back_unchanged(tmp_path_factory: pytest.TempPathFactory, labels: np.ndarray) -> None:
    """Every pixel is the same, also of objects with several parts and holes; only numbers may differ."""
    root = tmp_path_factory.mktemp("round")
    outlines = trace_outlines(labels)
    write_geojson(root / "a.geojson", [SlideObject(parts, class_name=f"c{k}") for k, parts in outlines.items()])
    objects, faults = parse_objects(sample(root, root / "a.geojson", labels.shape), root / "a.geojson")
    back = np.array([0, *outlines])
    assert np.array_equal(back[objects.labels], labels)
    assert [objects.classes[i] for i in objects.numbers] == [f"c{number}" for number in outlines]
    assert faults == []


@pytest.mark.parametrize("suffix", [".geojson", ".json", ".GeoJSON"])
def test_manifest_detects_points_and_polygons_in_geojson(tmp_path: Path, suffix: str) -> None:
    """The first file with any object decides; an image may have no objects."""
    for name in "ab":
        write_image(tmp_path / f"{name}.png", pixels(60, 80, ord(name)))
    geojson(tmp_path, name=f"a{suffix}")
    rows = [(f"{name}.png", f"{name}{suffix}", "train", 0.25) for name in "ab"]
    path = write_csv(tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), *rows])
    for shape, kind, count in (
        (feature("Point", [3.5, 3.5], "x"), "points", 1),
        (feature("Polygon", [square(3, 3, 4)], "x"), "objects", 1),
    ):
        geojson(tmp_path, shape, name=f"b{suffix}")
        result = check(open_data(path))
        assert result.dataset.annotated == kind
        assert problems(result.findings) == []
        assert result.counts["train"] == {"images": 2, "cases": 2, "objects": count, "x": 1}
        assert (Detect if kind == "points" else Segment).find_classes(result.dataset) == ("x",)


def test_damaged_geojson_is_reported_and_other_files_are_counted(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / f"{name}.png", pixels(60, 80, ord(name)))
        geojson(tmp_path, feature("Polygon", [square(3, 3, 4)], "x"), name=f"{name}.geojson")
    truncate(tmp_path / "a.geojson")
    rows = [(f"{name}.png", f"{name}.geojson", "train", 0.25) for name in "ab"]
    write_csv(tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), *rows])
    result = check(open_data(tmp_path))
    (message,) = (str(finding) for finding in problems(result.findings))
    assert message.startswith("a.geojson: is cut off or not valid JSON")
    assert result.counts["train"] == {"images": 2, "cases": 2, "objects": 1, "x": 1}
    with pytest.raises(
        DataError, match=r"a\.geojson is cut off or not valid JSON.* Run `rotopath data check` on the data"
    ):
        Segment.find_classes(result.dataset)


def test_resampled_polygons_keep_numbers_and_classes(tmp_path: Path) -> None:
    path = geojson(tmp_path, feature("Polygon", [square(10, 20, 8)], "a"), feature("Polygon", [square(30, 20, 4)], "b"))
    objects = read_objects(sample(tmp_path, path), 0.5)
    expected = np.zeros((30, 40), int)
    expected[5:9, 10:14], expected[15:17, 10:12] = 1, 2
    assert np.array_equal(objects.labels, expected)
    assert objects.classes == {1: "a", 2: "b"}


# Label maps and their class tables


def label_map(root: Path, *table: tuple[object, ...]) -> Sample:
    """Write a label map with the objects 3 and 300, and its class table."""
    labels = np.zeros((60, 80), np.uint16)
    labels[5:10, 5:10], labels[20:30, 20:30] = 3, 300
    path = write_image(root / "maps/a.png", labels)
    if table:
        write_csv(root / "maps/a.csv", table)
    return sample(root, path)


def test_class_table_of_a_label_map(tmp_path: Path) -> None:
    """Rows and columns may be in any order; other columns and unknown numbers are ignored."""
    table = (("area", "Class", "OBJECT"), (100, "tumor", 300), (1, "gone", 4), (25, "stroma", 3))
    objects, faults = parse_objects(labeled := label_map(tmp_path, *table), labeled.annotations[0])
    assert objects.classes == {3: "stroma", 300: "tumor"}
    assert objects.numbers == [3, 300]
    assert faults == []
    assert read_objects(labeled, 0.5).classes == {3: "stroma", 300: "tumor"}


def test_without_a_class_table_objects_have_no_classes(tmp_path: Path) -> None:
    assert read_objects(label_map(tmp_path), 0.25).classes == {}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ((("object", "class"), (300, "tumor")), "has no class for object 3 of a.png; list every object."),
        (
            (("object", "class"), (300, "tumor"), ("three", "stroma")),
            "needs an object number and a class in line 3, such as `17,lymphocyte`.",
        ),
        (
            (("object", "class"), (3, ""), (300, "tumor")),
            "needs an object number and a class in line 2, such as `17,lymphocyte`.",
        ),
        (
            (("object", "class"), (-3, "stroma"), (300, "tumor")),
            "needs an object number and a class in line 2, such as `17,lymphocyte`.",
        ),
        (((3, "stroma"), (300, "tumor")), "has no column 'object'; its first line must contain 'object' and 'class'."),
    ],
    ids=["missing object", "no number", "no class", "negative", "no header"],
)
def test_invalid_class_tables_are_refused(tmp_path: Path, table: tuple[tuple[object, ...], ...], message: str) -> None:
    labeled = label_map(tmp_path, *table)
    with pytest.raises(TableError) as caught:
        parse_objects(labeled, labeled.annotations[0])
    assert str(caught.value) == f"{tmp_path}/maps/a.csv {message}"
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "maps/a.png", "train", 0.25)]
    result = check(open_data(write_csv(tmp_path / "manifest.csv", rows)))
    assert [str(finding) for finding in problems(result.findings)] == [f"maps/a.csv: {message}"]


def test_label_maps_of_kumar_may_have_class_tables(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    labels = np.zeros((40, 40), np.uint16)
    labels[5:11, 8:14], labels[20:26, 22:28] = 1, 2
    write_image(tmp_path / "Label Maps/a.png", labels)
    write_csv(tmp_path / "Label Maps/a.csv", [("object", "class"), (1, "lymphocyte"), (2, "epithelial")])
    result = check(open_data(tmp_path))
    assert problems(result.findings) == []
    assert result.counts["train"] == {"images": 1, "cases": 1, "nuclei": 2, "lymphocyte": 1, "epithelial": 1}
    assert result.counts["valid"] == {"images": 1, "cases": 1, "nuclei": 2}, "outlines in XML name no classes"
    assert Segment.find_classes(result.dataset) == ("epithelial", "lymphocyte")


def test_image_without_objects_needs_no_classes(tmp_path: Path) -> None:
    path = write_image(tmp_path / "map.png", np.zeros((60, 80), np.uint8))
    write_csv(tmp_path / "map.csv", [("object", "class")])
    objects = read_objects(sample(tmp_path, path), 0.25)
    assert (objects.numbers, objects.classes) == ([], {})


def test_aperio_outlines_have_no_classes(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.xml", outline_xml(box(5, 8, 6)))
    objects = read_objects(sample(tmp_path, path), 0.25)
    assert (objects.numbers, objects.classes) == ([1], {})


@pytest.mark.parametrize("name", ["a.csv", "a.geojson"])
def test_missing_file_is_named_in_the_message(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableFileError, match=rf"{name} does not exist\.$"):
        read_points(sample(tmp_path, tmp_path / name), 0.25)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
def test_columns_may_be_separated_by_commas_semicolons_or_tabs(tmp_path: Path, separator: str, header: bool) -> None:
    lines = [["row", "column", "class"]] * header + [["3", "4", "cell"], ["5", "6", "cell"]]
    text = "\n".join(separator.join(line if header else line[:2]) for line in lines)
    points, faults = parse_points(sample(tmp_path, write_text(tmp_path / "a.csv", text)))
    assert faults == []
    assert points.positions.tolist() == [[3, 4], [5, 6]]


def test_invalid_shapes_are_refused(tmp_path: Path) -> None:
    for kind, coordinates, message in (
        ("MultiPolygon", [], "has no polygons"),
        ("Polygon", [[[0, 0], [0, 9], [float("nan"), 9], [0, 0]]], "does not allow the number NaN"),
    ):
        path = geojson(tmp_path, feature(kind, coordinates))
        with pytest.raises(UnreadableFileError, match=message):
            parse_objects(sample(tmp_path, path), path)


def test_object_with_two_classes_is_refused(tmp_path: Path) -> None:
    labeled = label_map(tmp_path, ("object", "class"), (1, "a"), (1, "b"), (2, "a"))
    with pytest.raises(UnreadableFileError, match="has a second class for object 1 in line 3"):
        parse_objects(labeled, labeled.annotations[0])
