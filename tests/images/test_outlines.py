"""Outlines are exact, smoothed outlines valid, shapes those of slow reference code, and stains those drawn."""

import math
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import ndimage
from skimage.draw import polygon2mask
from skimage.measure import label, regionprops_table

from rotopath.images import outlines as outlines_module
from rotopath.images import stain
from rotopath.images.outlines import (
    DECIMALS,
    Polygon,
    fill_outline,
    measure_coverage,
    measure_objects,
    measure_shapes,
    signed_area,
    smooth_outlines,
    trace_outlines,
)

LABELS = hnp.arrays(
    np.int32, st.tuples(st.integers(1, 9), st.integers(1, 9)), elements=st.sampled_from([0, 0, 1, 2, 7])
)
COARSE_LABELS = LABELS.map(lambda labels: labels.repeat(3, axis=0).repeat(2, axis=1))


def draw_blobs(seed: int, size: int = 160, blur_px: float = 4.0, level: float = 0.25) -> np.ndarray:
    """Return a label map of smooth blobs of all sizes, 1 px wide and less, long, bent, and at the edge of the map."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(size, size)), blur_px, mode="wrap")
    blobs: np.ndarray = label(noise > level * noise.std(), connectivity=1)  # type: ignore[no-untyped-call]
    return blobs.astype(np.int32)


def disc(row: float, column: float, number: int, radius: float) -> np.ndarray:
    rows, columns = np.mgrid[:80, :80]
    return (number * ((rows - row) ** 2 + (columns - column) ** 2 <= radius**2)).astype(np.int32)


# Outlines


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
    (with_hole,) = trace_outlines(labels)[1]
    (filled,) = trace_outlines(labels, fill_holes=True)[1]
    assert len(with_hole.holes) == 1
    assert with_hole.area_px == 23
    assert filled.holes == ()
    assert filled.area_px == 25
    assert signed_area(with_hole.holes[0]) == -2


def test_pixels_that_touch_at_a_corner_are_two_parts() -> None:
    parts = trace_outlines(np.eye(2, dtype=np.int32))[1]
    assert [part.area_px for part in parts] == [1, 1]


def test_a_hole_that_touches_the_outside_is_a_separate_ring() -> None:
    labels = np.ones((4, 4), np.int32)
    labels[0, 0] = labels[1, 1] = 0
    (polygon,) = trace_outlines(labels)[1]
    assert sorted(signed_area(ring) for ring in polygon.rings) == [-1, 15]


@settings(deadline=None, max_examples=300)
@given(LABELS | COARSE_LABELS, st.booleans())
def test_filling_outlines_returns_the_label_map(labels: np.ndarray, fill_holes: bool) -> None:
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
@given(LABELS | COARSE_LABELS)
def test_rings_are_simple_and_follow_the_right_hand_rule(labels: np.ndarray) -> None:
    for polygons in trace_outlines(labels).values():
        for polygon in polygons:
            assert signed_area(polygon.outer) > 0
            assert all(signed_area(hole) < 0 for hole in polygon.holes)
            for ring in polygon.rings:
                assert len({tuple(corner) for corner in ring.tolist()}) == len(ring) >= 4
                steps = np.roll(ring, -1, axis=0) - ring
                assert ((steps != 0).sum(axis=1) == 1).all()  # along a row or a column
                assert ((steps != 0) != np.roll(steps != 0, 1, axis=0)).all()  # the direction changes at each vertex


@settings(deadline=None, max_examples=100, derandomize=True)
@given(st.lists(st.tuples(st.floats(-3, 23), st.floats(-3, 23)), min_size=3, max_size=7))
def test_any_polygon_is_filled_by_the_even_odd_rule(corners: list[tuple[float, float]]) -> None:
    ring = np.round(np.array(corners), 2) + np.array([0.003, 0.0071])  # so that no center of a pixel is on an edge
    filled = fill_outline([Polygon(ring)], (20, 20))
    assert np.array_equal(filled, polygon2mask((20, 20), ring - 0.5))


def test_the_offset_is_the_corner_of_the_filled_mask() -> None:
    square = Polygon(np.array([(10.0, 20.0), (10, 24), (13, 24), (13, 20)]))
    mask = fill_outline([square], (6, 6), offset_px=(8, 19))
    assert np.argwhere(mask).min(axis=0).tolist() == [2, 1]
    assert mask.sum() == 12
    assert fill_outline([square], (2, 2), offset_px=(100, 100)).sum() == 0


def test_an_empty_label_map_has_no_outlines() -> None:
    assert trace_outlines(np.zeros((4, 5), np.int32)) == {}
    assert trace_outlines(np.zeros((0, 5), np.int32)) == {}


def test_ten_thousand_nuclei_are_traced_separately() -> None:
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


# Smooth outlines


def to_hundredths(ring: np.ndarray) -> list[tuple[int, int]]:
    """Return the vertices of a ring as whole numbers, and check that they are rounded as in files."""
    scaled = ring * 10**DECIMALS
    assert np.abs(scaled - np.rint(scaled)).max() < 1e-6
    return [(int(row), int(column)) for row, column in np.rint(scaled)]


def check_ring(ring: np.ndarray) -> None:
    """Check, with whole numbers and pair by pair, that a ring is simple and that each vertex is needed."""
    corners = to_hundredths(ring)
    count = len(corners)
    assert count == len(set(corners)) >= 3

    def turn(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> int:
        product = (b[0] - a[0]) * (c[1] - a[1]) - (b[1] - a[1]) * (c[0] - a[0])
        return (product > 0) - (product < 0)

    def is_between(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
        inside = all(min(a[axis], b[axis]) <= c[axis] <= max(a[axis], b[axis]) for axis in (0, 1))
        return turn(a, b, c) == 0 and inside

    edges = [(corners[i], corners[(i + 1) % count]) for i in range(count)]
    for i in range(count):
        assert turn(corners[i - 1], corners[i], corners[(i + 1) % count]) != 0, "on a line with its neighbors"
    for (i, (a, b)), (j, (c, d)) in combinations(enumerate(edges), 2):
        if j - i in (1, count - 1):
            continue
        crosses = turn(a, b, c) * turn(a, b, d) < 0 and turn(c, d, a) * turn(c, d, b) < 0
        touches = is_between(a, b, c) or is_between(a, b, d) or is_between(c, d, a) or is_between(c, d, b)
        assert not crosses
        assert not touches


def is_valid_ring(ring: np.ndarray) -> bool:
    try:
        check_ring(ring)
    except AssertionError:
        return False
    return True


def test_the_check_of_rings_finds_what_is_wrong() -> None:
    check_ring(np.array([(0.0, 0), (0, 4), (4, 4), (4, 0)]))
    for wrong in (
        [(0, 0), (4, 4), (0, 4), (4, 0)],  # crosses itself
        [(0, 0), (0, 2), (0, 4), (4, 4)],  # a vertex on a line
        [(0, 0), (0, 4), (0, 4), (4, 4)],  # two equal vertices
        [(0, 0), (0, 8), (8, 8), (0, 4), (8, 0)],  # touches itself
    ):
        with pytest.raises(AssertionError):
            check_ring(np.array(wrong, float))


@settings(deadline=None, max_examples=100)
@given(
    labels=LABELS | COARSE_LABELS | st.integers(0, 999).map(lambda seed: draw_blobs(seed, size=40, blur_px=1.5)),
    offset=st.tuples(*[st.floats(0, 1e5).map(lambda number: round(number, 1))] * 2),
    scale=st.sampled_from([0.05, 0.5, 1.0, 1.9841, 4.0]),
    fill_holes=st.booleans(),
)
def test_every_smoothed_outline_is_valid(
    labels: np.ndarray, offset: tuple[float, float], scale: float, fill_holes: bool
) -> None:
    traced = trace_outlines(labels, offset, scale, fill_holes)
    smoothed = smooth_outlines(traced, scale)
    assert list(smoothed) == list(traced)
    for number, polygons in smoothed.items():
        if polygons == traced[number]:
            continue
        (polygon,), (exact,) = polygons, traced[number]
        assert polygon.holes == exact.holes == ()
        check_ring(polygon.outer)
        assert polygon.area_px == pytest.approx(exact.area_px, rel=0.0201)
        for axis in (0, 1):
            assert polygon.outer[:, axis].min() >= exact.outer[:, axis].min() - 0.0051
            assert polygon.outer[:, axis].max() <= exact.outer[:, axis].max() + 0.0051


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=8))
def test_a_ring_is_known_to_be_simple_only_if_it_is(corners: list[tuple[int, int]]) -> None:
    rings = outlines_module._drop_straight(outlines_module._Rings(np.array(corners), np.array([len(corners)])))
    if len(rings.vertices) == 0:
        return
    (is_simple,) = outlines_module._are_simple(rings)
    is_valid = is_valid_ring(rings.vertices / 100)
    points = rings.vertices.tolist()
    has_line = any(
        (b[0] - a[0]) * (c[1] - a[1]) == (b[1] - a[1]) * (c[0] - a[0]) for a, b, c in combinations(points, 3)
    )
    assert is_simple <= is_valid
    assert is_simple == is_valid or has_line, "only rings with three corners on a line may be reported wrongly"


@pytest.mark.parametrize("seed", range(3))
def test_shapely_accepts_all_outlines_as_they_are_in_files(seed: int) -> None:
    shapely = pytest.importorskip("shapely")
    traced = trace_outlines(draw_blobs(seed, blur_px=2), (3.37, 1000.5), 0.81)
    count = 0
    for outlines in (traced, smooth_outlines(traced, 0.81)):
        for polygons in outlines.values():
            parts = [
                shapely.Polygon(polygon.outer.round(DECIMALS), [hole.round(DECIMALS) for hole in polygon.holes])
                for polygon in polygons
            ]
            assert all(part.is_valid for part in parts)
            count += 1
    assert count > 100


def test_nuclei_have_few_vertices_and_the_same_area() -> None:
    """Ellipses of 250 to 850 px, which is what nuclei have at 0.25 µm/px; nearly none keeps its exact outline."""
    labels = np.zeros((400, 400), np.int32)
    rows, columns = np.mgrid[:400, :400]
    random = np.random.default_rng(0)
    for number, (row, column) in enumerate(((r, c) for r in range(25, 400, 50) for c in range(25, 400, 50)), 1):
        angle, a, ratio = random.uniform(0, math.pi), random.uniform(10, 16), random.uniform(0.65, 1)
        down, right = rows - row - random.random(), columns - column - random.random()
        along, across = (
            down * math.sin(angle) + right * math.cos(angle),
            down * math.cos(angle) - right * math.sin(angle),
        )
        labels[(along / a) ** 2 + (across / (a * ratio)) ** 2 < 1] = number
    traced = trace_outlines(labels)
    smoothed = smooth_outlines(traced)
    for number, (polygon,) in smoothed.items():
        (exact,) = traced[number]
        assert 12 <= len(polygon.outer) <= 40 < len(exact.outer) * 2
        assert polygon.area_px == pytest.approx(exact.area_px, rel=0.005)
        filled, pixels = fill_outline([polygon], labels.shape), labels == number
        assert (filled & pixels).sum() / (filled | pixels).sum() > 0.95


def test_outlines_that_cannot_be_smoothed_stay_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = np.zeros((40, 40), np.int32)
    labels[2, 2:30] = 1  # one pixel wide
    labels[5:8, 5:8] = labels[5:8, 9:12] = 2  # two parts
    labels[15:30, 15:30] = 3  # a hole
    labels[20:22, 20:22] = 0
    rows, columns = np.mgrid[:40, :40]
    labels[(rows - 32) ** 2 + (columns - 8) ** 2 < 36] = 4  # a disc
    labels[30:39, 20:30] = 5  # a rectangle, which loses too much area at its corners
    traced = trace_outlines(labels)
    smoothed = smooth_outlines(traced)
    assert [number for number in traced if smoothed[number] == traced[number]] == [1, 2, 3, 5]
    monkeypatch.setattr(outlines_module, "MAX_TESTED_VERTICES", 11)
    assert smooth_outlines(traced) == traced
    assert smooth_outlines({}) == {}


def test_a_smoothed_outline_does_not_depend_on_its_position_and_on_other_objects() -> None:
    labels = draw_blobs(1)
    traced = trace_outlines(labels)
    together = smooth_outlines(traced)
    for number, polygons in traced.items():
        moved = smooth_outlines(trace_outlines(labels == number, (17, 1000)))
        if len(polygons) == 1 and not polygons[0].holes:
            np.testing.assert_allclose(moved[1][0].outer - (17, 1000), together[number][0].outer, atol=1e-9)
    assert len(together) > 20


# Measurements


@pytest.mark.parametrize("seed", range(3))
def test_shapes_are_those_of_scikit_image(seed: int) -> None:
    labels = draw_blobs(seed, blur_px=2.5)
    names = ("area", "axis_major_length", "axis_minor_length", "eccentricity", "orientation", "perimeter_crofton")
    expected = regionprops_table(labels, properties=(*names, "solidity"))  # type: ignore[no-untyped-call]
    shapes = measure_shapes(labels, 0.5)
    assert len(shapes["area_um2"]) == labels.max() > 20
    np.testing.assert_allclose(shapes["area_um2"], expected["area"] / 4)
    np.testing.assert_allclose(shapes["major_axis_um"], expected["axis_major_length"] / 2, atol=1e-9)
    np.testing.assert_allclose(shapes["minor_axis_um"], expected["axis_minor_length"] / 2, atol=1e-6)
    np.testing.assert_allclose(shapes["eccentricity"], expected["eccentricity"], atol=1e-6)
    np.testing.assert_allclose(shapes["perimeter_um"], expected["perimeter_crofton"] / 2)
    has_axis = expected["eccentricity"] > 0.1
    angles = np.degrees(expected["orientation"]) + 90 - shapes["orientation_deg"]  # theirs are measured from vertical
    assert np.abs((angles + 90) % 180 - 90)[has_axis].max() < 1e-6
    assert shapes["orientation_deg"].min() >= 0
    assert shapes["orientation_deg"].max() < 180
    large = expected["area"] > 30  # scikit-image counts the pixels of the hull; here the hull is a polygon
    assert np.abs(shapes["solidity"] - expected["solidity"])[large].max() < 0.05


def test_shapes_of_known_objects() -> None:
    rows, columns = np.mgrid[:100, :100]
    labels = np.zeros((100, 100), np.int32)
    labels[(rows - 30) ** 2 + (columns - 30) ** 2 < 20**2] = 1  # a disc
    labels[60:64, 10:50] = 2  # a horizontal bar
    labels[70:95, 70:95] = 3  # an L: a square without a smaller square
    labels[70:85, 80:95] = 0
    labels[np.abs(rows + columns - 120) < 3] = 4  # a rising diagonal
    labels[0, 99] = 5
    shapes = {name: values.tolist() for name, values in measure_shapes(labels, 0.5).items()}
    assert shapes["perimeter_um"][0] == pytest.approx(2 * math.pi * 10, rel=0.02)
    assert shapes["major_axis_um"][0] == pytest.approx(20, rel=0.01)
    assert shapes["eccentricity"][0] < 0.05
    assert shapes["solidity"][:2] == pytest.approx([1, 1], abs=0.02)
    assert shapes["orientation_deg"][1] == 0
    assert shapes["orientation_deg"][3] == pytest.approx(45)
    assert shapes["major_axis_um"][1] / shapes["minor_axis_um"][1] == pytest.approx(10, rel=0.05)
    hull = 25**2 - 15**2 / 2
    assert shapes["solidity"][2] == pytest.approx((25**2 - 15**2) / hull, abs=0.02)
    assert (shapes["area_um2"][4], shapes["eccentricity"][4], shapes["solidity"][4]) == (0.25, 0, 1)


def test_an_empty_label_map_has_no_shapes() -> None:
    assert all(values.shape == (0,) for values in measure_shapes(np.zeros((4, 5), np.int32), 0.5).values())


def test_the_hull_is_that_of_all_corners_in_any_order() -> None:
    """A comb and a spiral, whose boundaries bend inwards many times."""
    labels = np.zeros((60, 60), np.int32)
    labels[5:50:4, 5:40] = 1
    labels[5:50, 5:8] = 1
    labels[10:12, 45:55] = labels[10:40, 53:55] = labels[38:40, 43:55] = labels[15:40, 43:45] = 2
    expected = regionprops_table(labels, properties=("solidity",))["solidity"]  # type: ignore[no-untyped-call]
    np.testing.assert_allclose(measure_shapes(labels, 1.0)["solidity"], expected, atol=0.02)


def paint_stains(labels: np.ndarray, hematoxylin: np.ndarray, eosin: np.ndarray) -> np.ndarray:
    """Return pixels (3, H, W) of tissue whose objects have the given densities of the two stains."""
    densities = np.stack([hematoxylin[labels], eosin[labels]], axis=-1)
    intensity = stain.WHITE * np.exp(-densities @ stain.REFERENCE_STAINS.T) - 1
    return intensity.round().clip(0, 255).transpose(2, 0, 1).astype(np.float32)


def test_objects_have_the_stains_and_the_shapes_that_were_drawn() -> None:
    labels = np.maximum(disc(20, 20, 1, radius=8), disc(50, 50, 2, radius=16))
    pixels = paint_stains(labels, np.array([0.1, 1.5, 0.5]), np.array([0.9, 0.2, 0.7]))
    lighter = paint_stains(labels, np.array([0.1, 1.5, 0.1]), np.array([0.9, 0.2, 0.7]))
    columns = np.arange(80)[None]
    pixels[:, (labels == 2) & (columns > 50)] = lighter[:, (labels == 2) & (columns > 50)]
    foreground = np.where(labels == 1, np.float32(0.75), np.float32(0.5))
    measured = measure_objects(labels, foreground, None, pixels, 0.5)
    assert list(measured) == [
        *("area_um2", "perimeter_um", "major_axis_um", "minor_axis_um", "eccentricity", "orientation_deg", "solidity"),
        *("hematoxylin_mean", "hematoxylin_sd", "eosin_mean", "eosin_sd", "probability"),
    ]
    areas = np.bincount(labels.ravel())[1:]
    assert measured["area_um2"].tolist() == (areas / 4).tolist()
    fraction = ((labels == 2) & (columns > 50)).sum() / areas[1]
    mean = 0.5 - 0.4 * fraction
    assert measured["hematoxylin_mean"] == pytest.approx([1.5, mean], abs=0.02)
    assert measured["hematoxylin_sd"] == pytest.approx([0, 0.4 * np.sqrt(fraction * (1 - fraction))], abs=0.01)
    assert measured["eosin_mean"] == pytest.approx([0.2, 0.7], abs=0.02)
    assert measured["eosin_sd"] == pytest.approx([0, 0], abs=0.03)
    assert measured["probability"].tolist() == [0.75, 0.5]
    deviations = measure_objects(labels, foreground, foreground / 2, pixels, 0.5)["deviation"]
    assert deviations.tolist() == [0.375, 0.25]


def test_measurements_do_not_depend_on_the_surroundings() -> None:
    random = np.random.default_rng(0)
    labels = np.maximum(disc(20, 30, 1, radius=7.5), disc(52, 50, 2, radius=11))
    pixels = random.integers(0, 256, (3, 80, 80)).astype(np.float32)
    foreground = random.random((80, 80), np.float32)
    together = measure_objects(labels, foreground, foreground, pixels, 0.25)
    cut = (slice(40, 70), slice(37, 64))
    alone = measure_objects(labels[cut] // 2, foreground[cut], foreground[cut], pixels[:, *cut], 0.25)
    assert {name: values[1] for name, values in together.items()} == {name: value for name, (value,) in alone.items()}


def test_a_label_map_without_objects_has_no_measurements() -> None:
    empty = np.zeros((5, 6), np.float32)
    measured = measure_objects(empty.astype(np.int32), empty, empty, np.zeros((3, 5, 6), np.float32), 0.25)
    assert all(values.shape == (0,) for values in measured.values())


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 9999), height=st.floats(0.6, 9.9), width=st.floats(0.6, 9.9), vertices=st.integers(3, 9))
def test_the_coverage_of_pixels_is_their_area_inside(seed: int, height: float, width: float, vertices: int) -> None:
    """As counted at many positions in each pixel. Stars reach beyond the image, and have a hole."""
    rng = np.random.default_rng(seed)
    angles = np.sort(rng.uniform(0, 2 * np.pi, vertices))
    directions = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    center = rng.uniform(0, 10, 2)
    if np.diff(np.append(angles, angles[0] + 2 * np.pi)).max() > 3:
        return  # the center is outside
    outer = center + directions * rng.uniform(2, 9, (vertices, 1))
    hole = (center + directions * rng.uniform(0.2, 0.6, (vertices, 1)))[::-1]
    polygon = Polygon(outer, (hole,))
    covered = measure_coverage([polygon], (height, width))
    steps = 40
    shape = covered.shape
    samples = fill_outline([Polygon(outer * steps, (hole * steps,))], (round(height * steps), round(width * steps)))
    padded = np.zeros((shape[0] * steps, shape[1] * steps))
    rows, columns = (min(size, full) for size, full in zip(samples.shape, padded.shape, strict=True))
    padded[:rows, :columns] = samples[:rows, :columns]
    expected = padded.reshape(shape[0], steps, shape[1], steps).mean(axis=(1, 3))
    np.testing.assert_allclose(covered, expected, atol=0.06)
    whole = measure_coverage([polygon], (40.0, 40.0))
    if outer.min() > 0:
        assert whole.sum() == pytest.approx(polygon.area_px)
    assert covered.min() >= 0
    assert covered.max() <= 1 + 1e-9
