"""Outlines: known answers, and label maps that come back pixel by pixel."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage
from skimage.draw import polygon2mask

from rotopath.images.geojson import Polygon, fill_outline, signed_area, trace_outlines

LABELS = hnp.arrays(
    np.int32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([0, 0, 1, 2, 7])
)
COARSE = LABELS.map(lambda labels: labels.repeat(3, axis=0).repeat(2, axis=1))


def test_a_rectangle_has_four_corners() -> None:
    labels = np.zeros((6, 8), np.int32)
    labels[1:4, 2:7] = 5
    (polygon,) = trace_outlines(labels)[5]
    assert {tuple(corner) for corner in polygon.outer.tolist()} == {(1, 2), (1, 7), (4, 7), (4, 2)}
    assert len(polygon.outer) == 4
    assert polygon.area_px == 15
    (moved,) = trace_outlines(labels, offset_px=(100, 1000), scale=2)[5]
    assert np.array_equal(moved.outer, polygon.outer * 2 + (100, 1000))


def test_holes_are_kept_or_filled() -> None:
    labels = np.ones((5, 5), np.int32)
    labels[2, 1:3] = 0
    (kept,) = trace_outlines(labels)[1]
    (filled,) = trace_outlines(labels, fill_holes=True)[1]
    assert len(kept.holes) == 1
    assert kept.area_px == 23
    assert filled.holes == ()
    assert filled.area_px == 25
    assert signed_area(kept.holes[0]) == -2


def test_pixels_that_touch_at_a_corner_are_two_parts() -> None:
    parts = trace_outlines(np.eye(2, dtype=np.int32))[1]
    assert [part.area_px for part in parts] == [1, 1]


def test_a_hole_that_touches_the_outside_is_a_ring_of_its_own() -> None:
    labels = np.ones((4, 4), np.int32)
    labels[0, 0] = labels[1, 1] = 0
    (polygon,) = trace_outlines(labels)[1]
    assert sorted(signed_area(ring) for ring in polygon.rings) == [-1, 15]


@settings(deadline=None, max_examples=300)
@given(LABELS | COARSE, st.booleans())
def test_label_maps_come_back(labels: np.ndarray, fill_holes: bool) -> None:
    outlines = trace_outlines(labels, fill_holes=fill_holes)
    assert set(outlines) == set(np.unique(labels)) - {0}
    for number, polygons in outlines.items():
        pixels = labels == number
        parts, count = ndimage.label(pixels)
        assert len(polygons) == count
        if not fill_holes:
            assert np.array_equal(fill_outline(polygons, labels.shape), pixels)
            assert sum(polygon.area_px for polygon in polygons) == pixels.sum()
        for polygon in polygons:
            filled = fill_outline([polygon], labels.shape)
            part = parts == parts[tuple(np.argwhere(filled & pixels)[0])]
            assert np.array_equal(filled, ndimage.binary_fill_holes(part) if fill_holes else part)


@settings(deadline=None, max_examples=200)
@given(LABELS | COARSE)
def test_rings_are_simple_and_turn_by_the_right_hand_rule(labels: np.ndarray) -> None:
    for polygons in trace_outlines(labels).values():
        for polygon in polygons:
            assert signed_area(polygon.outer) > 0
            assert all(signed_area(hole) < 0 for hole in polygon.holes)
            for ring in polygon.rings:
                assert len({tuple(corner) for corner in ring.tolist()}) == len(ring) >= 4
                steps = np.roll(ring, -1, axis=0) - ring
                assert ((steps != 0).sum(axis=1) == 1).all()  # along rows or columns
                assert ((steps != 0) != np.roll(steps != 0, 1, axis=0)).all()  # and a corner at each vertex


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.floats(-3, 23), st.floats(-3, 23)), min_size=3, max_size=7))
def test_any_polygon_is_filled_by_the_even_odd_rule(corners: list[tuple[float, float]]) -> None:
    ring = np.round(np.array(corners), 2) + np.array([0.003, 0.0071])  # so that no centre of a pixel lies on an edge
    filled = fill_outline([Polygon(ring)], (20, 20))
    assert np.array_equal(filled, polygon2mask((20, 20), ring - 0.5))


def test_filling_begins_at_the_offset() -> None:
    square = Polygon(np.array([(10.0, 20.0), (10, 24), (13, 24), (13, 20)]))
    mask = fill_outline([square], (6, 6), offset_px=(8, 19))
    assert np.argwhere(mask).min(axis=0).tolist() == [2, 1]
    assert mask.sum() == 12
    assert fill_outline([square], (2, 2), offset_px=(100, 100)).sum() == 0


def test_an_empty_map_has_no_outlines() -> None:
    assert trace_outlines(np.zeros((4, 5), np.int32)) == {}
    assert trace_outlines(np.zeros((0, 5), np.int32)) == {}


def test_ten_thousand_nuclei_are_told_apart() -> None:
    rows, columns = np.mgrid[:2000, :2000]
    disc = (rows % 20 - 10) ** 2 + (columns % 20 - 10) ** 2 < 64
    labels = np.where(disc, rows // 20 * 100 + columns // 20 + 1, 0).astype(np.int32)
    outlines = trace_outlines(labels)
    assert len(outlines) == 10_000
    for number in (1, 5_050, 10_000):
        assert np.array_equal(fill_outline(outlines[number], labels.shape), labels == number)


def test_polygons_are_equal_when_their_rings_are() -> None:
    square = np.array([(0.0, 0.0), (0, 1), (1, 1), (1, 0)])
    assert Polygon(square) == Polygon(square.copy())
    assert hash(Polygon(square)) == hash(Polygon(square.copy()))
    assert Polygon(square) != Polygon(square + 1)
    assert Polygon(square) != Polygon(square, (square[::-1],))
    assert Polygon(square) != "square"
    assert Polygon(square).area_px == pytest.approx(1)
