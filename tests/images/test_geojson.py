"""GeoJSON: after RFC 7946 and as QuPath has it, and the same objects back."""

import json
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
from rotopath.images.geojson import (
    Point,
    Polygon,
    SlideObject,
    read_geojson,
    signed_area,
    trace_outlines,
    write_geojson,
)

SQUARE = Polygon(np.array([(10.0, 20.0), (10, 24), (13, 24), (13, 20)]))
HUNDREDTHS = st.integers(-(10**6), 10**6).map(lambda number: number / 100)
LABELS = hnp.arrays(np.int32, st.tuples(st.integers(1, 8), st.integers(1, 8)), elements=st.sampled_from([0, 1, 1, 2]))
OUTLINES = LABELS.map(trace_outlines).filter(bool).map(lambda outlines: next(iter(outlines.values())))
OBJECTS = st.builds(
    SlideObject,
    shape=st.builds(Point, HUNDREDTHS, HUNDREDTHS) | OUTLINES,
    kind=st.sampled_from(["detection", "annotation"]),
    class_name=st.sampled_from(["Tumor", "Mitose µ", 'a "quoted" one']),
    color=st.none() | st.tuples(*[st.integers(0, 255)] * 3),
    measurements=st.dictionaries(st.sampled_from(["score", "area_um2"]), st.floats(-1e9, 1e9)),
)


def check_rfc_7946(content: dict[str, Any]) -> None:
    """The structure of sections 3.1 to 3.3: what each member is, closed rings, and the right-hand rule."""
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
        many = geometry["type"] == "MultiPolygon"
        for polygon in geometry["coordinates"] if many else [geometry["coordinates"]]:
            for index, ring in enumerate(polygon):
                assert len(ring) >= 4
                assert ring[0] == ring[-1]
                for position in ring:
                    _check_position(position)
                x, y = np.array(ring, float).T
                twice_the_area = (x[:-1] * y[1:] - x[1:] * y[:-1]).sum()
                assert twice_the_area > 0 if index == 0 else twice_the_area < 0  # counterclockwise outside


def _check_position(position: Any) -> None:
    assert len(position) == 2
    assert all(isinstance(number, int | float) for number in position)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(objects=st.lists(OBJECTS, max_size=6), origin=st.tuples(*[st.integers(0, 5000)] * 2))
def test_the_same_objects_come_back(tmp_path: Path, objects: list[SlideObject], origin: tuple[int, int]) -> None:
    path = tmp_path / "a.geojson"
    assert write_geojson(path, iter(objects), origin) == len(objects)
    content = json.loads(path.read_text(encoding="utf-8"))
    check_rfc_7946(content)
    back = read_geojson(path, origin)
    assert len(back) == len(objects)
    for one, other in zip(objects, back, strict=True):
        assert one.id == other.id
        assert (one.kind, one.class_name, one.color) == (other.kind, other.class_name, other.color)
        assert one.measurements == other.measurements
        if isinstance(one.shape, Point):
            assert other.shape == pytest.approx(one.shape, abs=1e-6)
        else:
            assert other.shape == one.shape


def test_it_is_what_qupath_expects(tmp_path: Path) -> None:
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


def test_parts_are_a_multipolygon_and_holes_are_rings(tmp_path: Path) -> None:
    labels = np.zeros((9, 9), np.int32)
    labels[:5, :5] = 1
    labels[2, 2] = 0
    labels[7, 7] = 1
    write_geojson(tmp_path / "a.geojson", [SlideObject(trace_outlines(labels)[1])])
    geometry = json.loads((tmp_path / "a.geojson").read_text())["features"][0]["geometry"]
    assert geometry["type"] == "MultiPolygon"
    assert [len(rings) for rings in geometry["coordinates"]] == [2, 1]


def test_ids_are_of_the_place_and_not_of_what_was_measured() -> None:
    one = SlideObject((SQUARE,), class_name="Tumor", measurements={"score": 0.5})
    assert one.id == SlideObject((SQUARE,), class_name="Tumor", measurements={"score": 0.6}, color=(1, 2, 3)).id
    assert one.id != SlideObject((SQUARE,), class_name="Stroma").id
    assert one.id != SlideObject((Polygon(SQUARE.outer + 1),), class_name="Tumor").id
    assert str(one.id) == "3d53e0bf-ecf7-5257-b127-8c3db974efd1"  # next year, too


def test_places_are_written_to_a_hundredth_of_a_pixel(tmp_path: Path) -> None:
    ring = SQUARE.outer * 1.01203
    write_geojson(tmp_path / "a.geojson", [SlideObject((Polygon(ring),))])
    assert "20.2406" not in (tmp_path / "a.geojson").read_text()
    (back,) = read_geojson(tmp_path / "a.geojson")
    assert not isinstance(back.shape, Point)
    assert np.abs(back.shape[0].outer - ring).max() <= 0.00501


def test_objects_are_written_as_they_come(tmp_path: Path) -> None:
    sizes: list[int] = []

    def objects() -> Iterator[SlideObject]:
        for row in range(2000):
            held = list(tmp_path.iterdir())
            sizes.append(held[0].stat().st_size)
            yield SlideObject(Point(row, 0), measurements={"score": 0.5})

    assert write_geojson(tmp_path / "a.geojson", objects()) == 2000
    assert len(set(sizes)) > 5


@pytest.mark.parametrize("bad", [{"score": float("nan")}, {"score": float("inf")}])
def test_what_json_has_no_words_for_leaves_nothing(tmp_path: Path, bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="but an object lies at"):
        write_geojson(tmp_path / "a.geojson", [SlideObject(Point(1, float("nan")))])
    with pytest.raises(ValueError, match="JSON has finite numbers only, but an object measures"):
        write_geojson(tmp_path / "a.geojson", [SlideObject(Point(1, 1)), SlideObject(Point(1, 1), measurements=bad)])
    assert list(tmp_path.iterdir()) == []


def test_what_qupath_and_others_write_is_read(tmp_path: Path) -> None:
    """A list instead of a dataset, older words, rings that turn the other way, and points that belong together."""
    clockwise = [[0, 0], [0, 5], [5, 5], [5, 0], [0, 0]]
    features = [
        {
            "type": "Feature",
            "id": "PathCellObject",
            "geometry": {"type": "Polygon", "coordinates": [clockwise]},
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


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"type": "FeatureCollection", "features": [', "is cut off or no GeoJSON"),
        ('{"features": 3}', "is no GeoJSON: expected is a FeatureCollection"),
        ("3", "is no GeoJSON: expected is a FeatureCollection"),
        ('[{"geometry": null}]', "has a feature, number 1, that cannot be used"),
        ('[{"geometry": {"type": "LineString", "coordinates": []}}]', "its shape is a LineString; polygons and points"),
        ('[{"geometry": {"type": "Polygon", "coordinates": [[[0, 0], [1, 0], [1, 1], [0, 1]]]}}]', "has to end where"),
        ('[{"geometry": {"type": "Polygon", "coordinates": []}}]', "cannot be used"),
        ('[{"geometry": {"type": "Point", "coordinates": ["a", "b"]}}]', "cannot be used"),
    ],
)
def test_files_that_cannot_be_used_get_a_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "a.geojson").write_text(text)
    with pytest.raises(UnreadableFileError, match=sentence):
        read_geojson(tmp_path / "a.geojson")


def test_missing_and_unreadable_files_get_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UnreadableFileError, match="does not exist"):
        read_geojson(tmp_path / "a.geojson")
    with pytest.raises(UnreadableFileError, match="cannot be read"):
        read_geojson(tmp_path)
    (tmp_path / "bytes.geojson").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UnreadableFileError, match="cut off or no GeoJSON"):
        read_geojson(tmp_path / "bytes.geojson")
