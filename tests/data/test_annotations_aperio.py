"""Aperio XML files of ImageScope: known outlines, and messages about damaged files."""

import gc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotopath.data.annotations import (
    AnnotationError,
    Outline,
    paint_labels,
    read_aperio_outlines,
    read_aperio_spacing_um_px,
)


def xml(*polygons: list[tuple[float, float]], negative: tuple[int, ...] = ()) -> str:
    regions = "".join(
        f'<Region Id="{i}" NegativeROA="{int(i in negative)}"><Attributes/><Vertices>'
        + "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in polygon)
        + "</Vertices></Region>"
        for i, polygon in enumerate(polygons, 1)
    )
    headers = '<RegionAttributeHeaders><AttributeHeader Id="9999" Name="Region"/></RegionAttributeHeaders>'
    return (
        f'<Annotations MicronsPerPixel="0.252000"><Annotation Id="1"><Regions>{headers}{regions}</Regions>'
        "</Annotation></Annotations>"
    )


def square(left: float, top: float, side: float) -> list[tuple[float, float]]:
    return [(left, top), (left + side, top), (left + side, top + side), (left, top + side)]


def outline(vertices: list[tuple[float, float]], region: str = "1") -> Outline:
    return Outline(region, np.array(vertices, np.float64).reshape(-1, 2))


def test_outlines_and_spacing_are_read_in_order(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(xml(square(2, 3, 4), square(10.5, 1.25, 2)))
    assert read_aperio_spacing_um_px(tmp_path / "a.xml") == 0.252
    outlines = read_aperio_outlines(tmp_path / "a.xml")
    assert [o.region for o in outlines] == ["1", "2"]
    assert outlines[1].vertices.tolist() == [[10.5, 1.25], [12.5, 1.25], [12.5, 3.25], [10.5, 3.25]]


def test_holes_are_left_out_and_a_missing_spacing_is_none(tmp_path: Path) -> None:
    text = xml(square(0, 0, 5), square(1, 1, 2), negative=(2,)).replace(' MicronsPerPixel="0.252000"', "")
    (tmp_path / "a.xml").write_text(text)
    assert len(read_aperio_outlines(tmp_path / "a.xml")) == 1
    assert read_aperio_spacing_um_px(tmp_path / "a.xml") is None


def test_square_covers_pixels_whose_centers_are_inside() -> None:
    labels, faults = paint_labels((outline(square(1.5, 2.5, 3)),), 8, 10)
    expected = np.zeros((8, 10), int)
    expected[3:6, 2:5] = 1
    assert np.array_equal(labels, expected)
    assert labels.dtype == np.int32
    assert faults == []


def test_first_outline_keeps_overlapping_pixels() -> None:
    labels, faults = paint_labels((outline(square(0.5, 0.5, 4)), outline(square(2.5, 2.5, 4))), 8, 8)
    assert labels[3, 3] == 1
    assert labels[5, 5] == 2
    assert np.bincount(labels.ravel()).tolist() == [64 - 16 - 12, 16, 12]
    assert faults == []


def test_outlines_are_cut_at_the_edge_of_the_image() -> None:
    labels, faults = paint_labels((outline(square(-3.5, -3.5, 6)), outline(square(5.5, 5.5, 40))), 8, 8)
    assert np.bincount(labels.ravel()).tolist() == [64 - 9 - 4, 9, 4]
    assert faults == []


def test_self_crossing_outline_is_filled_on_both_sides() -> None:
    bow_tie = [(0.5, 0.5), (8.5, 8.5), (8.5, 0.5), (0.5, 8.5)]
    labels, faults = paint_labels((outline(bow_tie),), 10, 10)
    assert labels[4, 1] == labels[4, 8] == 1
    assert labels[1, 4] == labels[8, 4] == 0
    assert faults == []


@pytest.mark.parametrize(
    ("vertices", "fault"),
    [
        ([], "region 7 is left out: it has 0 vertices; at least 3 are needed."),
        ([(1, 1), (5, 5)], "region 7 is left out: it has 2 vertices; at least 3 are needed."),
        ([(1, 1), (3, 3), (5, 5)], "region 7 is left out: it is a line or a point, without an area."),
        ([(2, 2), (2, 2), (2, 2)], "region 7 is left out: it is a line or a point, without an area."),
        (square(2.2, 2.2, 0.5), "region 7 is left out: it covers no pixel of the image."),
        (square(50, 50, 5), "region 7 is left out: it covers no pixel of the image."),
        (square(-50, 2, 5), "region 7 is left out: it covers no pixel of the image."),
        (square(3, 3, 2), "region 7 is left out: earlier regions cover all of its pixels."),
    ],
)
def test_outlines_that_cannot_be_painted_are_reported_and_not_numbered(
    vertices: list[tuple[float, float]], fault: str
) -> None:
    first = outline(square(2.5, 2.5, 4) if "earlier regions" in fault else square(6.5, 6.5, 2))
    last = outline(square(10.5, 10.5, 3), "9")
    labels, faults = paint_labels((first, outline(vertices, "7"), last), 16, 16)
    assert faults == [fault]
    assert labels[12, 12] == 2
    assert labels.max() == 2


BOMB = '<!DOCTYPE a [<!ENTITY b "boom"><!ENTITY c "&b;&b;&b;&b;">]><Annotations>&c;</Annotations>'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (xml(square(0, 0, 3))[:150], "is incomplete or not XML"),
        ("", "is incomplete or not XML"),
        ("row,col\n3,4\n", "is incomplete or not XML"),
        (BOMB, "contains XML entities"),
        (
            '<!DOCTYPE a SYSTEM "http://example.com/a.dtd"><Annotations>&x;</Annotations>',
            "contains XML entities|is incomplete",
        ),
        ("<annotation><object/></annotation>", "is not an Aperio annotation: it begins with <annotation>"),
        (xml(square(0, 0, 3)).replace('X="3"', 'X="three"', 1), "has X='three' in a <Vertex>; expected a number"),
        (xml(square(0, 0, 3)).replace('Y="3"', 'Y="nan"', 1), "has Y='nan' in a <Vertex>"),
        (xml(square(0, 0, 3)).replace('X="3" ', "", 1), "has X='' in a <Vertex>"),
        ('<?xml version="1.0" encoding="gb2312"?><Annotations/>', "has an encoding that XML does not support"),
        ('<?xml version="1.0" encoding="klingon"?><Annotations/>', "has an encoding|is incomplete"),
    ],
    ids=["cut off", "empty", "csv", "bomb", "external", "other xml", "text", "nan", "missing", "chinese", "klingon"],
)
def test_damaged_files_are_named_in_the_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "bad.xml").write_text(text)
    with pytest.raises(AnnotationError, match=rf"bad.xml ({message})"):
        read_aperio_outlines(tmp_path / "bad.xml")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are not listed here")
def test_file_is_closed_after_reading_its_head(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(xml(*[square(i, 0, 3) for i in range(3000)]))
    gc.collect()
    gc.disable()  # garbage collection would close the file, late and with a warning
    try:
        before = len(list(Path("/proc/self/fd").iterdir()))
        assert read_aperio_spacing_um_px(tmp_path / "a.xml") == 0.252
        assert len(list(Path("/proc/self/fd").iterdir())) == before
    finally:
        gc.enable()


@pytest.mark.parametrize("spacing", ["fine", "-0.25", "0", "nan", "50", ""])
def test_implausible_spacing_is_none(tmp_path: Path, spacing: str) -> None:
    (tmp_path / "a.xml").write_text(xml(square(0, 0, 3)).replace("0.252000", spacing))
    assert read_aperio_spacing_um_px(tmp_path / "a.xml") is None
    assert len(read_aperio_outlines(tmp_path / "a.xml")) == 1


def test_missing_file_is_named_in_the_message(tmp_path: Path) -> None:
    with pytest.raises(AnnotationError, match=r"none.xml does not exist"):
        read_aperio_outlines(tmp_path / "none.xml")


coordinates = st.floats(-20, 40, allow_nan=False)


@given(st.lists(st.lists(st.tuples(coordinates, coordinates), max_size=8), max_size=6))
@settings(deadline=None, max_examples=100)
def test_numbers_are_consecutive_and_every_outline_is_painted_or_reported(
    polygons: list[list[tuple[float, float]]],
) -> None:
    outlines = tuple(outline(polygon, str(i)) for i, polygon in enumerate(polygons))
    labels, faults = paint_labels(outlines, 20, 24)
    painted = np.unique(labels[labels > 0])
    assert painted.tolist() == list(range(1, len(painted) + 1))
    assert len(painted) + len(faults) == len(polygons)
