"""Outlines are exact and valid; GeoJSON follows RFC 7946 and QuPath, and reading it returns the same objects."""

import csv
import gzip
import io
import json
import pickle
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from rotopath.images import UnreadableFileError
from rotopath.images.geojson import SlideObject, read_geojson, write_geojson, write_rows
from rotopath.images.outlines import Point, Polygon, signed_area, trace_outlines

SQUARE = Polygon(np.array([(10.0, 20.0), (10, 24), (13, 24), (13, 20)]))
COLOR = '[{"geometry": null, "properties": {"classification": {"color": [1, %s, 3]}}}]'  # in JSON
LABELS = hnp.arrays(
    np.int32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([0, 0, 1, 2, 7])
)
COARSE_LABELS = LABELS.map(lambda labels: labels.repeat(3, axis=0).repeat(2, axis=1))
DENSE_LABELS = hnp.arrays(
    np.int32, st.tuples(st.integers(1, 8), st.integers(1, 8)), elements=st.sampled_from([0, 1, 1, 2])
)
OUTLINES = DENSE_LABELS.map(trace_outlines).filter(bool).map(lambda outlines: next(iter(outlines.values())))
HUNDREDTHS = st.integers(-(10**6), 10**6).map(lambda number: number / 100)
OBJECTS = st.builds(
    SlideObject,
    shape=st.builds(Point, HUNDREDTHS, HUNDREDTHS) | OUTLINES,
    kind=st.sampled_from(["detection", "annotation"]),
    class_name=st.sampled_from(["Tumor", "Mitose µ", 'a "quoted" one']),
    color=st.none() | st.tuples(*[st.integers(0, 255)] * 3),
    measurements=st.dictionaries(st.sampled_from(["score", "area_um2"]), st.floats(-1e9, 1e9)),
)


def check_rfc_7946(content: dict[str, Any]) -> None:
    """Check sections 3.1 to 3.3: required members, closed rings, and the right-hand rule."""
    assert content["type"] == "FeatureCollection"
    assert isinstance(content["features"], list)
    for feature in content["features"]:
        assert feature["type"] == "Feature"
        assert isinstance(feature["properties"], dict)
        geometry = feature["geometry"]
        assert set(geometry) == {"type", "coordinates"}
        if geometry["type"] == "Point":
            _check_position(geometry["coordinates"])
            continue
        assert geometry["type"] in ("Polygon", "MultiPolygon")
        is_multi = geometry["type"] == "MultiPolygon"
        for polygon in geometry["coordinates"] if is_multi else [geometry["coordinates"]]:
            for index, ring in enumerate(polygon):
                assert len(ring) >= 4
                assert ring[0] == ring[-1]
                for position in ring:
                    _check_position(position)
                x, y = np.array(ring, float).T
                twice_the_area = (x[:-1] * y[1:] - x[1:] * y[:-1]).sum()
                assert twice_the_area > 0 if index == 0 else twice_the_area < 0  # outer rings counterclockwise


def _check_position(position: Any) -> None:
    assert len(position) == 2
    assert all(isinstance(number, int | float) for number in position)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(objects=st.lists(OBJECTS, max_size=6), origin=st.tuples(*[st.integers(0, 5000)] * 2))
def test_reading_returns_the_objects_that_were_written(
    tmp_path: Path, objects: list[SlideObject], origin: tuple[int, int]
) -> None:
    path = tmp_path / "a.geojson"
    assert write_geojson(path, iter(objects), origin) == len(objects)
    content = json.loads(path.read_text(encoding="utf-8"))
    check_rfc_7946(content)
    read = read_geojson(path, origin)
    assert len(read) == len(objects)
    for expected, item in zip(objects, read, strict=True):
        assert item.id == expected.id
        assert (item.kind, item.class_name, item.color) == (expected.kind, expected.class_name, expected.color)
        assert item.measurements == expected.measurements
        if isinstance(expected.shape, Point):
            assert item.shape == pytest.approx(expected.shape, abs=1e-6)
        else:
            assert item.shape == expected.shape


def test_features_have_the_form_that_qupath_expects(tmp_path: Path) -> None:
    tumor = SlideObject((SQUARE,), "annotation", "Tumor", (200, 0, 0), {"score": 0.75})
    write_geojson(tmp_path / "a.geojson", [tumor, SlideObject(Point(7.5, 3.25))], origin_px=(0, 4))
    first, second = json.loads((tmp_path / "a.geojson").read_text())["features"]
    assert UUID(first.pop("id")) == tumor.id
    assert first == {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [[[16, 10], [20, 10], [20, 13], [16, 13], [16, 10]]]},
        "properties": {
            "objectType": "annotation",
            "classification": {"name": "Tumor", "color": [200, 0, 0]},
            "measurements": {"score": 0.75},
        },
    }
    assert second["geometry"] == {"type": "Point", "coordinates": [-0.75, 7.5]}
    assert second["properties"] == {"objectType": "detection"}


def test_several_parts_are_a_multipolygon_and_holes_are_rings(tmp_path: Path) -> None:
    labels = np.zeros((9, 9), np.int32)
    labels[:5, :5] = 1
    labels[2, 2] = 0
    labels[7, 7] = 1
    write_geojson(tmp_path / "a.geojson", [SlideObject(trace_outlines(labels)[1])])
    geometry = json.loads((tmp_path / "a.geojson").read_text())["features"][0]["geometry"]
    assert geometry["type"] == "MultiPolygon"
    assert [len(rings) for rings in geometry["coordinates"]] == [2, 1]


def test_ids_depend_on_shape_and_class_but_not_on_measurements() -> None:
    tumor = SlideObject((SQUARE,), class_name="Tumor", measurements={"score": 0.5})
    assert tumor.id == SlideObject((SQUARE,), class_name="Tumor", measurements={"score": 0.6}, color=(1, 2, 3)).id
    assert tumor.id != SlideObject((SQUARE,), class_name="Stroma").id
    assert tumor.id != SlideObject((Polygon(SQUARE.outer + 1),), class_name="Tumor").id
    assert str(tumor.id) == "3d53e0bf-ecf7-5257-b127-8c3db974efd1"  # the same in every version


@pytest.mark.parametrize("origin", [(0, 0), (30, 50)])
def test_rendered_objects_are_written_without_further_computation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, origin: tuple[int, int]
) -> None:
    def write(item: SlideObject, name: str, from_px: tuple[int, int]) -> tuple[bytes, str]:
        write_geojson(tmp_path / name, [item], from_px)
        table = io.StringIO()
        assert list(write_rows([item], table, from_px)) == [item]
        return (tmp_path / name).read_bytes(), table.getvalue()

    item = SlideObject((SQUARE,), "detection", 'a "µ", b', (1, 2, 3), {"score": 0.5})
    expected, elsewhere = write(item, "expected.geojson", origin), write(item, "other.geojson", (7, 7))
    item.render(origin)
    received = pickle.loads(pickle.dumps(item))  # as from another process
    assert write(received, "again.geojson", (7, 7)) == elsewhere, "texts for another origin are not used"
    monkeypatch.setattr("rotopath.images.geojson._make_geometry", None)
    monkeypatch.setattr("rotopath.images.geojson.to_row", None)
    assert write(received, "a.geojson", origin) == expected


def test_coordinates_are_rounded_to_a_hundredth_of_a_pixel(tmp_path: Path) -> None:
    ring = SQUARE.outer * 1.01203
    write_geojson(tmp_path / "a.geojson", [SlideObject((Polygon(ring),))])
    assert "20.2406" not in (tmp_path / "a.geojson").read_text()
    (read,) = read_geojson(tmp_path / "a.geojson")
    assert not isinstance(read.shape, Point)
    assert np.abs(read.shape[0].outer - ring).max() <= 0.00501


def test_objects_are_written_one_by_one(tmp_path: Path) -> None:
    sizes: list[int] = []

    def objects() -> Iterator[SlideObject]:
        for row in range(2000):
            (unfinished,) = tmp_path.glob("*.unfinished")
            sizes.append(unfinished.stat().st_size)
            yield SlideObject(Point(row, 0), measurements={"score": 0.5})

    assert write_geojson(tmp_path / "a.geojson", objects()) == 2000
    assert len(set(sizes)) > 5


@pytest.mark.parametrize("bad", [{"score": float("nan")}, {"score": float("inf")}])
def test_numbers_that_json_does_not_have_are_refused_and_leave_no_file(tmp_path: Path, bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"has NaN or infinite coordinates \(row, column\): \[\[1.0, nan\]\]; remove"):
        write_geojson(tmp_path / "a.geojson", [SlideObject(Point(1, float("nan")))])
    with pytest.raises(ValueError, match=r"has NaN or infinite measurements: \{'score': (nan|inf)\}; remove"):
        write_geojson(tmp_path / "a.geojson", [SlideObject(Point(1, 1)), SlideObject(Point(1, 1), measurements=bad)])
    assert list(tmp_path.iterdir()) == []


def test_files_of_qupath_and_other_software_are_read(tmp_path: Path) -> None:
    """A list of features, older property names, rings that run the other way, and points of one annotation."""
    reversed_ring = [[0, 0], [0, 5], [5, 5], [5, 0], [0, 0]]
    features = [
        {
            "type": "Feature",
            "id": "PathCellObject",
            "geometry": {"type": "Polygon", "coordinates": [reversed_ring]},
            "properties": {
                "object_type": "cell",
                "classification": {"name": "Immune", "colorRGB": -6895466},
                "measurements": [{"name": "Area", "value": 25}, {"name": "none", "value": None}],
            },
        },
        {
            "type": "Feature",
            "geometry": {"type": "MultiPoint", "coordinates": [[1, 2], [3, 4]]},
            "properties": {"classification": {"names": ["Tumor", "Positive"]}},
        },
    ]
    (tmp_path / "a.json").write_text(json.dumps(features))
    cell, *points = read_geojson(tmp_path / "a.json")
    assert cell.kind == "detection"
    assert cell.color == (150, 200, 150)
    assert cell.measurements == {"Area": 25}
    assert not isinstance(cell.shape, Point)
    assert signed_area(cell.shape[0].outer) == 25
    assert [point.shape for point in points] == [Point(2, 1), Point(4, 3)]
    assert {(point.kind, point.class_name) for point in points} == {("annotation", "Tumor: Positive")}


def test_a_measurement_that_is_nan_has_no_value(tmp_path: Path) -> None:
    """As QuPath writes it."""
    geometry = '"geometry": {"type": "Point", "coordinates": [1, 2]}'
    (tmp_path / "a.geojson").write_text(f'[{{{geometry}, "properties": {{"measurements": {{"a": NaN, "b": 1.5}}}}}}]')
    (point,) = read_geojson(tmp_path / "a.geojson")
    assert point.measurements == {"b": 1.5}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"type": "FeatureCollection", "features": [', "is cut off or not valid JSON"),
        ('{"features": 3}', "is not GeoJSON: expected a FeatureCollection"),
        ("3", "is not GeoJSON: expected a FeatureCollection"),
        ('[{"geometry": null}]', "has a feature, number 1, that cannot be used"),
        ('[{"type": Infinity, "geometry": {"type": "Point", "coordinates": [1, 2]}}]', "its type is inf; expected"),
        (COLOR % "Infinity", "the color of a class is"),
        (COLOR % "NaN", "the color of a class is"),
        (COLOR % "256", "the color of a class is"),
        (
            '[{"geometry": {"type": "LineString", "coordinates": []}}]',
            "its geometry is a LineString; expected Point, MultiPoint, Polygon or MultiPolygon",
        ),
        (
            '[{"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 1]]]}}]',
            "must end at its first",
        ),
        ('[{"geometry": {"type": "Polygon", "coordinates": []}}]', "cannot be used"),
        ('[{"geometry": {"type": "Point", "coordinates": ["a", "b"]}}]', "cannot be used"),
        ('[{"geometry": {"type": "Point", "coordinates": [1, NaN]}}]', "a coordinate that is NaN or infinite"),
        ('[{"geometry": {"type": "Point", "coordinates": [1, 1e999]}}]', "a coordinate that is NaN or infinite"),
        ('[{"geometry": {"type": "Point", "coordinates": [1, ' + "9" * 400 + "]}}]", "a number has 400 digits"),
        ("[" * 100_000, "it is nested too deeply"),
    ],
)
def test_invalid_files_are_refused_in_one_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.geojson").write_text(text)
    with pytest.raises(UnreadableFileError, match=sentence):
        read_geojson(tmp_path / "a.geojson")


def test_files_named_gz_are_compressed(tmp_path: Path) -> None:
    objects = [SlideObject(Point(row, 0), measurements={"score": 0.5}) for row in range(1000)]
    for name in ("a.geojson", "a.geojson.gz", "b.geojson.gz"):
        assert write_geojson(tmp_path / name, iter(objects)) == 1000
    compressed = (tmp_path / "a.geojson.gz").read_bytes()
    assert gzip.decompress(compressed) == (tmp_path / "a.geojson").read_bytes()
    assert len(compressed) < (tmp_path / "a.geojson").stat().st_size / 4
    assert compressed == (tmp_path / "b.geojson.gz").read_bytes(), "neither the time nor the name is in the file"
    assert read_geojson(tmp_path / "a.geojson.gz") == read_geojson(tmp_path / "a.geojson") == objects
    for content in (compressed[:-50], compressed[:5], b"{}", b"\x1f\x8b\x08" + bytes(30)):
        (tmp_path / "c.geojson.gz").write_bytes(content)
        with pytest.raises(UnreadableFileError, match="is cut off or not a gzip file"):
            read_geojson(tmp_path / "c.geojson.gz")


@pytest.mark.parametrize("name", ["a.geojson", "a.geojson.gz"])
def test_own_files_are_read_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """So that a file of a million nuclei, which is larger than `MAX_JSON_BYTES`, can be read."""
    path, other = tmp_path / name, tmp_path / f"other-{name}"
    objects = [SlideObject((Polygon(SQUARE.outer + i),), "detection", "µ", measurements={"a": i}) for i in range(300)]
    write_geojson(path, objects, (5, 7))
    monkeypatch.setattr("rotopath.images.geojson.MAX_JSON_BYTES", 5000)
    assert read_geojson(path, (5, 7)) == objects
    content = path.read_bytes()
    lines = (gzip.decompress(content) if name.endswith("gz") else content).decode().splitlines(keepends=True)
    changed = {
        "cut off": [*lines[:100], lines[100][:50]],
        "without its end": lines[:100],
        "with more behind its end": [*lines, "3"],
        "with a damaged feature": [*lines[:100], "{},\n", *lines[100:]],
        "that begins otherwise": [" ", *lines],
    }
    for text in changed.values():  # is read at once, which these limits forbid, to explain the fault
        with gzip.open(other, "wt", encoding="utf-8") if name.endswith("gz") else other.open("w") as file:
            file.writelines(text)
        with pytest.raises(UnreadableFileError, match="is larger than"):
            read_geojson(other)
    monkeypatch.setattr("rotopath.images.geojson.MAX_LINES_BYTES", 20_000)
    with pytest.raises(UnreadableFileError, match="is larger than"):
        read_geojson(path)


@pytest.mark.parametrize("name", ["a.geojson", "a.geojson.gz"])
def test_memory_does_not_grow_with_the_number_of_objects(tmp_path: Path, name: str) -> None:
    def peak_bytes(count: int) -> int:
        objects = (SlideObject((Polygon(SQUARE.outer + i),), measurements={"score": 0.5}) for i in range(count))
        tracemalloc.start()
        try:
            with (tmp_path / "a.csv").open("w") as table:
                assert write_geojson(tmp_path / name, write_rows(objects, table)) == count
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak_bytes(10)  # caches
    assert peak_bytes(5000) < peak_bytes(50) + 200_000 < 1_000_000


def test_a_table_has_a_row_for_each_object(tmp_path: Path) -> None:
    objects = [
        SlideObject((SQUARE,), class_name="Nucleus, small", measurements={"area_um2": 12.3456789, "x": 1e-9}),
        SlideObject(Point(1234567.25, 3), class_name="Mitosis", measurements={"area_um2": 2, "x": 1234567.0}),
    ]
    with (tmp_path / "a.csv").open("w", newline="") as file:
        assert list(write_rows(iter(objects), file, (10, 20))) == objects
    with (tmp_path / "a.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert list(first) == ["number", "id", "class", "x_px", "y_px", "area_um2", "x"]
    assert list(first.values()) == [
        "1",
        str(objects[0].id),
        "Nucleus, small",
        "2.0",
        "1.5",
        "12.3457",
        "1e-09",
    ]
    assert list(second.values())[2:] == ["Mitosis", "-17.0", "1234557.25", "2", "1.23457e+06"]
    with (tmp_path / "empty.csv").open("w") as file:
        assert list(write_rows([], file)) == []
    assert (tmp_path / "empty.csv").read_text() == "number,id,class,x_px,y_px\n"


def test_missing_and_unreadable_files_are_refused_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="does not exist"):
        read_geojson(tmp_path / "a.geojson")
    with pytest.raises(UnreadableFileError, match="cannot be read"):
        read_geojson(tmp_path)
    (tmp_path / "bytes.geojson").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableFileError, match="cut off or not valid JSON"):
        read_geojson(tmp_path / "bytes.geojson")
