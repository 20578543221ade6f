"""Annotations of objects and their classes: points and outlines, in tables, label maps and GeoJSON."""

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
from rotopath.images.geojson import SlideObject, trace_outlines, write_geojson
from rotopath.tasks import Detect, Segment, make_task

Ring = list[tuple[float, float]]


def sample(root: Path, annotation: Path, size: tuple[int, int] = (60, 80), spacing: float = 0.25) -> Sample:
    image = write_image(root / "a.png", pixels(*size))
    return Sample(image, "a.png", "7", "train", spacing, annotations=(annotation,))


def feature(kind: str, coordinates: object, name: str = "") -> dict[str, object]:
    about = {"objectType": "annotation"} | ({"classification": {"name": name}} if name else {})
    return {"type": "Feature", "geometry": {"type": kind, "coordinates": coordinates}, "properties": about}


def square(top: float, left: float, side: float) -> Ring:
    """Corners as x and y, the last one the first again; whole numbers are corners of pixels."""
    x, y = left, top
    return [(x, y), (x + side, y), (x + side, y + side), (x, y + side), (x, y)]


def geojson(root: Path, *features: dict[str, object], name: str = "a.geojson") -> Path:
    return write_text(root / name, json.dumps({"type": "FeatureCollection", "features": features}))


# Points in a CSV file


@pytest.mark.parametrize("order", list(permutations((0, 1, 2))))
@pytest.mark.parametrize("names", [("row", "column", "class"), ("Y", "X", "Type"), ("y", " col ", "LABEL")])
def test_columns_of_points_are_found_by_their_names_in_any_order(
    tmp_path: Path, names: tuple[str, ...], order: tuple[int, ...]
) -> None:
    lines = [names, ("10", "20", "mitosis"), ("30.5", "40", ""), ("5", "79", "other")]
    path = write_csv(tmp_path / "a.csv", [[line[i] for i in order] for line in lines])
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30.5, 40], [5, 79]]
    assert points.classes == ("mitosis", "", "other")
    assert len(points) == 3


def test_further_columns_are_left_alone_and_a_class_is_not_needed(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.csv", "id,x,y,score\n7,20,10,0.9\n8,40,30,0.1\n\n")
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40]]
    assert points.classes == ("", "")


def test_without_a_header_rows_come_first_and_there_are_no_classes(tmp_path: Path) -> None:
    """As in AMIDA13, whose third column is how sure the annotators were."""
    path = write_text(tmp_path / "a.csv", "10,20,0.9\n30,40\n")
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40]]
    assert points.classes == ("", "")


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("mitosis,ten,20", "line 3 has row 'ten' and column '20', where numbers in pixels are expected."),
        ("mitosis,10", "line 3 has row '10' and column '', where numbers in pixels are expected."),
        (
            "mitosis,60,10",
            "line 3 places an object at row 60, column 10, outside of the image of 60 × 80 px (rows come first).",
        ),
        ("mitosis,nan,10", "line 3 places an object at row nan, column 10, outside of the image of 60 × 80 px"),
    ],
)
def test_bad_lines_below_a_header_are_named_and_the_others_count(tmp_path: Path, line: str, sentence: str) -> None:
    path = write_text(tmp_path / "a.csv", f"class,row,column\na,10,20\n{line}\nb,30,40\n")
    points, faults = parse_points(sample(tmp_path, path))
    assert len(faults) == 1
    assert faults[0].startswith(sentence)
    assert points.classes == ("a", "b")
    with pytest.raises(AnnotationError, match="cannot be used: line 3"):
        read_points(sample(tmp_path, path), 0.25)


def test_points_with_classes_move_with_the_image_to_another_spacing(tmp_path: Path) -> None:
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
    assert make_task("detect", found=Detect.find_classes(dataset)).outputs == 4


# GeoJSON


def test_points_in_geojson_count_from_the_corner_of_the_first_pixel(tmp_path: Path) -> None:
    """Rows and columns count from its centre, and rows come first; points that belong together are one by one."""
    path = geojson(
        tmp_path,
        feature("Point", [20.5, 10.5], "mitosis"),
        feature("MultiPoint", [[40.5, 30.5], [1, 2]], "other"),
        feature("Point", [0.5, 0.5]),
    )
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[10, 20], [30, 40], [1.5, 0.5], [0, 0]]
    assert points.classes == ("mitosis", "other", "other", "")


def test_boxes_around_points_stand_for_their_middles(tmp_path: Path) -> None:
    """Where a data set of points draws boxes, as MIDOG does."""
    path = geojson(tmp_path, feature("Polygon", [square(10, 20, 11)], "mitosis"))
    points = read_points(sample(tmp_path, path), 0.25)
    assert points.positions.tolist() == [[15, 25]]
    assert points.classes == ("mitosis",)


def test_a_point_outside_of_the_image_is_named(tmp_path: Path) -> None:
    path = geojson(tmp_path, feature("Point", [20.5, 10.5]), feature("Point", [10.5, 60.5], "late"))
    points, faults = parse_points(sample(tmp_path, path))
    assert points.positions.tolist() == [[10, 20]]
    assert faults == [
        "feature 2 places an object at row 60, column 10, outside of the image of 60 × 80 px (rows come first)."
    ]


def test_polygons_are_painted_with_their_holes_and_classes(tmp_path: Path) -> None:
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
    assert objects.classes == {1: "tumor", 3: "stroma"}, "the second one has none"
    assert objects.numbers == [1, 2, 3]
    assert faults == []


def test_where_polygons_overlap_the_first_one_keeps_the_pixel(tmp_path: Path) -> None:
    """One that is hidden whole has no number, and the class of the next one is its own."""
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
    assert faults == ["feature 2 covers no pixel that is free."]


def test_what_cannot_be_painted_is_noted_and_the_others_count(tmp_path: Path) -> None:
    path = geojson(
        tmp_path,
        feature("Point", [4, 4], "a"),
        feature("Polygon", [square(100, 100, 5)], "a"),
        feature("Polygon", [square(-50, 3, 5)], "a"),
        feature("Polygon", [square(3, 3, 5)], "a"),
    )
    rows = [("a.png", path.name, "train", 1)]
    sample(tmp_path, path)
    found = check(open_data(write_csv(tmp_path / "m.csv", [("image", "annotation", "split", "spacing"), *rows])))
    assert problems(found.findings) == []
    assert [str(finding) for finding in found.findings][:3] == [
        "a.geojson: feature 1 is a point, without an area.",
        "a.geojson: feature 2 covers no pixel of the image.",
        "a.geojson: feature 3 covers no pixel of the image.",
    ]
    assert found.counts["train"] == {"images": 1, "cases": 1, "objects": 1, "a": 1}


@settings(deadline=None, max_examples=50)
@given(labels=arrays(np.int32, (9, 11), elements=st.integers(0, 3)))
def test_objects_that_were_written_are_read_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, labels: np.ndarray
) -> None:
    """Pixel by pixel, in several parts and with holes; numbers are counted anew."""
    root = tmp_path_factory.mktemp("round")
    outlines = trace_outlines(labels)
    write_geojson(root / "a.geojson", [SlideObject(parts, class_name=f"c{k}") for k, parts in outlines.items()])
    objects, faults = parse_objects(sample(root, root / "a.geojson", labels.shape), root / "a.geojson")
    back = np.array([0, *outlines])
    assert np.array_equal(back[objects.labels], labels)
    assert [objects.classes[i] for i in objects.numbers] == [f"c{number}" for number in outlines]
    assert faults == []


@pytest.mark.parametrize("suffix", [".geojson", ".json", ".GeoJSON"])
def test_a_manifest_looks_into_geojson_for_what_it_holds(tmp_path: Path, suffix: str) -> None:
    """The first file with an object decides; an image may have none."""
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
        found = check(open_data(path))
        assert found.dataset.annotated == kind
        assert problems(found.findings) == []
        assert found.counts["train"] == {"images": 2, "cases": 2, "objects": count, "x": 1}
        assert (Detect if kind == "points" else Segment).find_classes(found.dataset) == ("x",)


def test_damaged_geojson_is_a_finding_and_the_others_count(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / f"{name}.png", pixels(60, 80, ord(name)))
        geojson(tmp_path, feature("Polygon", [square(3, 3, 4)], "x"), name=f"{name}.geojson")
    truncate(tmp_path / "a.geojson")
    rows = [(f"{name}.png", f"{name}.geojson", "train", 0.25) for name in "ab"]
    write_csv(tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), *rows])
    found = check(open_data(tmp_path))
    (sentence,) = (str(finding) for finding in problems(found.findings))
    assert sentence.startswith("a.geojson: is cut off or no GeoJSON")
    assert found.counts["train"] == {"images": 2, "cases": 2, "objects": 1, "x": 1}
    with pytest.raises(DataError, match=r"a\.geojson is cut off or no GeoJSON.* Run `rotopath data check` on the data"):
        Segment.find_classes(found.dataset)


def test_polygons_at_another_spacing_keep_their_numbers_and_classes(tmp_path: Path) -> None:
    path = geojson(tmp_path, feature("Polygon", [square(10, 20, 8)], "a"), feature("Polygon", [square(30, 20, 4)], "b"))
    objects = read_objects(sample(tmp_path, path), 0.5)
    expected = np.zeros((30, 40), int)
    expected[5:9, 10:14], expected[15:17, 10:12] = 1, 2
    assert np.array_equal(objects.labels, expected)
    assert objects.classes == {1: "a", 2: "b"}


# Label maps with a table of classes beside them


def label_map(root: Path, *table: tuple[object, ...]) -> Sample:
    """Objects 3 and 300, and what the table says about them."""
    labels = np.zeros((60, 80), np.uint16)
    labels[5:10, 5:10], labels[20:30, 20:30] = 3, 300
    path = write_image(root / "maps/a.png", labels)
    if table:
        write_csv(root / "maps/a.csv", table)
    return sample(root, path)


def test_a_table_beside_a_label_map_has_the_classes_of_its_objects(tmp_path: Path) -> None:
    """In any order, with further columns; numbers that the map does not have say nothing."""
    table = (("area", "Class", "OBJECT"), (100, "tumor", 300), (1, "gone", 4), (25, "stroma", 3))
    objects, faults = parse_objects(one := label_map(tmp_path, *table), one.annotations[0])
    assert objects.classes == {3: "stroma", 300: "tumor"}
    assert objects.numbers == [3, 300]
    assert faults == []
    assert read_objects(one, 0.5).classes == {3: "stroma", 300: "tumor"}


def test_without_a_table_objects_have_no_classes(tmp_path: Path) -> None:
    assert read_objects(label_map(tmp_path), 0.25).classes == {}


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ((("object", "class"), (300, "tumor")), "names no class for object 3 of a.png; list every object."),
        (
            (("object", "class"), (300, "tumor"), ("three", "stroma")),
            "has no object number and class in line 3, such as `17,lymphocyte`.",
        ),
        (
            (("object", "class"), (3, ""), (300, "tumor")),
            "has no object number and class in line 2, such as `17,lymphocyte`.",
        ),
        (
            (("object", "class"), (-3, "stroma"), (300, "tumor")),
            "has no object number and class in line 2, such as `17,lymphocyte`.",
        ),
        (((3, "stroma"), (300, "tumor")), "has no column 'object'; its first line must name object and class."),
    ],
    ids=["missing object", "no number", "no class", "negative", "no header"],
)
def test_a_bad_table_of_classes_is_refused_in_one_sentence(
    tmp_path: Path, table: tuple[tuple[object, ...], ...], sentence: str
) -> None:
    one = label_map(tmp_path, *table)
    with pytest.raises(TableError) as caught:
        parse_objects(one, one.annotations[0])
    assert str(caught.value) == f"{tmp_path}/maps/a.csv {sentence}"
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "maps/a.png", "train", 0.25)]
    found = check(open_data(write_csv(tmp_path / "manifest.csv", rows)))
    assert [str(finding) for finding in problems(found.findings)] == [f"maps/a.csv: {sentence}"]


def test_classes_of_nuclei_lie_beside_the_label_maps_of_kumar(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    labels = np.zeros((40, 40), np.uint16)
    labels[5:11, 8:14], labels[20:26, 22:28] = 1, 2
    write_image(tmp_path / "Label Maps/a.png", labels)
    write_csv(tmp_path / "Label Maps/a.csv", [("object", "class"), (1, "lymphocyte"), (2, "epithelial")])
    found = check(open_data(tmp_path))
    assert problems(found.findings) == []
    assert found.counts["train"] == {"images": 1, "cases": 1, "nuclei": 2, "lymphocyte": 1, "epithelial": 1}
    assert found.counts["valid"] == {"images": 1, "cases": 1, "nuclei": 2}, "outlines in XML name no classes"
    assert Segment.find_classes(found.dataset) == ("epithelial", "lymphocyte")


def test_an_image_without_objects_needs_no_classes(tmp_path: Path) -> None:
    path = write_image(tmp_path / "map.png", np.zeros((60, 80), np.uint8))
    write_csv(tmp_path / "map.csv", [("object", "class")])
    objects = read_objects(sample(tmp_path, path), 0.25)
    assert (objects.numbers, objects.classes) == ([], {})


def test_outlines_of_imagescope_name_no_classes(tmp_path: Path) -> None:
    path = write_text(tmp_path / "a.xml", outline_xml(box(5, 8, 6)))
    objects = read_objects(sample(tmp_path, path), 0.25)
    assert (objects.numbers, objects.classes) == ([1], {})


@pytest.mark.parametrize("name", ["a.csv", "a.geojson"])
def test_a_missing_file_gets_a_sentence(tmp_path: Path, name: str) -> None:
    with pytest.raises(UnreadableFileError, match=rf"{name} does not exist\.$"):
        read_points(sample(tmp_path, tmp_path / name), 0.25)


@pytest.mark.parametrize("separator", [",", ";", "\t"])
@pytest.mark.parametrize("header", [True, False])
def test_spreadsheets_may_separate_columns_in_their_own_way(tmp_path: Path, separator: str, header: bool) -> None:
    lines = [["row", "column", "class"]] * header + [["3", "4", "cell"], ["5", "6", "cell"]]
    text = "\n".join(separator.join(line if header else line[:2]) for line in lines)
    points, faults = parse_points(sample(tmp_path, write_text(tmp_path / "a.csv", text)))
    assert faults == []
    assert points.positions.tolist() == [[3, 4], [5, 6]]


def test_shapes_that_are_none_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for kind, coordinates, sentence in (
        ("MultiPolygon", [], "has no parts"),
        ("Polygon", [[[0, 0], [0, 9], [float("nan"), 9], [0, 0]]], "no finite number"),
    ):
        path = geojson(tmp_path, feature(kind, coordinates))
        with pytest.raises(UnreadableFileError, match=sentence):
            parse_objects(sample(tmp_path, path), path)


def test_an_object_with_two_classes_is_refused(tmp_path: Path) -> None:
    labelled = label_map(tmp_path, ("object", "class"), (1, "a"), (1, "b"), (2, "a"))
    with pytest.raises(UnreadableFileError, match="gives object 1 a second class in line 3"):
        parse_objects(labelled, labelled.annotations[0])
