"""Tissue is found beside pen, black borders and dust, and in images of nothing but tissue or glass."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drawn_slides import draw_slide
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from scipy import ndimage

from rotopath.images import find_tissue, open_slide
from rotopath.images.geojson import Point, Polygon, SlideObject
from rotopath.images.slides import as_slide
from rotopath.images.tissue import (
    Outline,
    Region,
    Tissue,
    mask_pen,
    mask_tissue,
    measure_focus,
    select_outlines,
)
from rotopath.synthetic.lymph_nodes import render_slide
from rotopath.synthetic.mitoses import render_mitosis_field
from rotopath.synthetic.organs import render_organ_field

EOSIN, HEMATOXYLIN, PALE, DAB = (224, 150, 190), (110, 80, 150), (238, 214, 230), (150, 105, 80)
SIZE = (200, 240)
DISC = np.hypot(*np.ogrid[-100:100, -90:150]) < 55  # tissue of 0.6 mm²


def draw(tissue: tuple[int, int, int] = EOSIN, glass: tuple[int, int, int] = (243, 243, 243)) -> np.ndarray:
    image = np.where(DISC[..., None], np.array(tissue), np.array(glass)).astype(float)
    image += np.random.default_rng(0).normal(0, 3, (*SIZE, 1))
    return image.clip(0, 255).astype(np.uint8)


def agreement(mask: np.ndarray, truth: np.ndarray = DISC) -> float:
    return float((mask & truth).sum() / max((mask | truth).sum(), 1))


@pytest.mark.parametrize("tissue", [EOSIN, HEMATOXYLIN, PALE, DAB, (150, 160, 200), (150, 150, 150)])
@pytest.mark.parametrize("glass", [(243, 243, 243), (255, 255, 255), (216, 216, 216), (240, 236, 214)])
def test_tissue_of_any_stain_is_found_on_any_glass(tissue: tuple[int, int, int], glass: tuple[int, int, int]) -> None:
    if tissue == PALE and glass[0] == 216:
        pytest.skip("the glass is darker than the tissue")
    assert agreement(mask_tissue(draw(tissue, glass), 8.0)) > 0.9


@pytest.mark.parametrize("glass", [255, 243, 216])
def test_an_image_of_glass_only_has_no_tissue(glass: int) -> None:
    noise = np.random.default_rng(0).normal(0, 3, (*SIZE, 3))
    assert not mask_tissue((glass + noise).clip(0, 255).astype(np.uint8), 8.0).any()
    assert not mask_tissue(np.full((*SIZE, 3), glass, np.uint8), 8.0).any()
    assert not mask_tissue(np.zeros((*SIZE, 3), np.uint8), 8.0).any()


@pytest.mark.parametrize("tissue", [EOSIN, HEMATOXYLIN, PALE, (150, 150, 150)])
def test_an_image_of_tissue_only_is_all_tissue(tissue: tuple[int, int, int]) -> None:
    noise = np.random.default_rng(0).normal(0, 3, (*SIZE, 1))
    assert mask_tissue((np.array(tissue) + noise).clip(0, 255).astype(np.uint8), 8.0).all()


@pytest.mark.parametrize("case", [1, 4, 9])
def test_a_synthetic_field_is_all_tissue(tmp_path: Path, case: int) -> None:
    image, _ = render_mitosis_field(0, case, 0, 512)
    Image.fromarray(image).save(tmp_path / "field.png")
    with open_slide(tmp_path / "field.png", 0.25) as slide:
        tissue = find_tissue(slide)
        assert tissue.mask.shape == (16, 16)
        assert tissue.mask.mean() > 0.95
        assert find_tissue(slide, 2.0).mask.mean() > 0.9
        assert tissue.stain_doubt == ""


@pytest.mark.parametrize("seed", range(3))
def test_synthetic_slides_and_organs_look_like_h_and_e(seed: int) -> None:
    lymph_node, _ = render_slide(np.random.default_rng(seed))
    organ, _ = render_organ_field(seed, ("breast", "kidney", "liver")[seed], seed, 512)
    for image, spacing in ((lymph_node, 1.0), (organ, 0.25)):
        with as_slide(image, spacing) as slide:
            assert find_tissue(slide).stain_doubt == ""


def test_pale_and_dark_tissue_are_found_together() -> None:
    """Otsu's threshold alone would separate the dark tissue from the pale, which would be lost."""
    image = draw(PALE)
    image[60:140, 60:100] = HEMATOXYLIN
    assert agreement(mask_tissue(image, 8.0)) > 0.9


@pytest.mark.parametrize(
    "pen", [(30, 60, 170), (90, 120, 200), (40, 140, 80), (210, 30, 40), (255, 0, 0), (25, 25, 30)]
)
def test_pen_is_not_tissue_and_does_not_hide_tissue(pen: tuple[int, int, int]) -> None:
    image = draw(PALE)
    image[:, 180:225] = pen
    image[180:190] = pen
    mask = mask_tissue(image, 8.0)
    assert agreement(mask) > 0.9
    assert mask[:, 185:220].mean() < 0.02


def test_black_borders_are_not_tissue() -> None:
    image = draw()
    image[:20] = image[-10:] = image[:, :15] = 0
    mask = mask_tissue(image, 8.0)
    assert agreement(mask) > 0.9
    assert not mask[:19].any()


def test_specks_are_dropped_and_holes_are_filled() -> None:
    image = draw()
    image[5:8, 200:203] = HEMATOXYLIN  # dust
    image[90:100, 80:90] = 243  # a vessel
    image[70:75, 70:75] = 0  # a fold
    mask = mask_tissue(image, 8.0)
    assert ndimage.label(mask)[1] == 1
    assert ndimage.label(~mask)[1] == 1
    image = draw()
    image[75:125, 65:115] = 243  # 0.16 mm² of glass in the middle
    assert not mask_tissue(image, 8.0)[90:110, 80:100].any()


def test_dark_pixels_of_synthetic_lymph_nodes_are_tissue() -> None:
    """Lymph nodes with glass and fat: pixels that are clearly darker than glass are tissue."""
    for seed in range(3):
        image, _ = render_slide(np.random.default_rng(seed))
        small = np.asarray(Image.fromarray(image).resize((48, 48), Image.Resampling.BOX))
        mask = mask_tissue(small, 8.0)
        dark = small.min(axis=2) < 190
        assert mask[dark].mean() > 0.97


def test_area_and_rectangles_that_contain_tissue(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    drawn = draw_slide(tmp_path / "slide.tif", (4096, 6144), ((512, 1024, 1024),))
    with open_slide(drawn.path) as slide:
        tissue = find_tissue(slide)
    assert tissue.mask.shape == (128, 192)
    assert tissue.area_mm2 == pytest.approx((1024 * 0.25e-3) ** 2, rel=0.1)
    assert tissue.touches(130, 260, 10, 10)
    assert tissue.touches(100, 200, 100, 100)  # its upper left corner
    assert not tissue.touches(0, 0, 100, 1500)
    assert not tissue.touches(420, 0, 600, 1500)
    assert not tissue.touches(-50, -50, 40, 40)
    assert tissue.touches(-1e3, -1e3, 1e4, 1e4)
    assert not tissue.touches(1e4, 1e4, 10, 10)


def test_the_smallest_overlap_with_tissue_counts() -> None:
    tissue = Tissue(np.array([[False, True], [False, False]]), 8.0)
    assert tissue.touches(7.9, 7.9, 0.2, 0.2)
    assert not tissue.touches(8.0, 8.0, 8, 8)
    assert not tissue.touches(0, 0, 8, 8)
    assert tissue.area_mm2 == pytest.approx(64e-6)


@pytest.mark.parametrize("side", [1, 2, 5])
def test_images_of_a_few_pixels(side: int) -> None:
    for tissue in (EOSIN, PALE, (150, 150, 150)):
        assert mask_tissue(np.full((side, side, 3), tissue, np.uint8), 8.0).all()
    assert not mask_tissue(np.full((side, side, 3), 250, np.uint8), 8.0).any()


def test_the_half_pixel_beyond_the_mask_equals_the_last_pixel() -> None:
    """A slide of 41.75 µm has a mask of five pixels of 8 µm, which ends at 40 µm."""
    tissue = Tissue(np.ones((5, 5), bool), 8.0)
    assert tissue.touches(40, 0, 2, 8)
    assert tissue.touches(0, 40, 8, 2)
    assert not tissue.touches(44, 0, 2, 8), "the slide ends before"
    assert tissue.is_tissue_at(np.array([39.0, 41.0]), np.array([41.0])).all()


def test_the_area_ends_where_the_slide_does() -> None:
    """41.75 × 21 µm are five by three pixels: the last row is 9.75 µm high, and the last column 5 µm wide."""
    for row, column, um2 in ((0, 0, 64), (4, 0, 9.75 * 8), (0, 2, 8 * 5), (4, 2, 9.75 * 5)):
        mask = np.zeros((5, 3), bool)
        mask[row, column] = True
        assert Tissue(mask, 8.0, (41.75, 21.0)).area_mm2 == pytest.approx(um2 / 1e6)
    whole = Tissue(np.ones((5, 3), bool), 8.0, (41.75, 21.0))
    assert whole.area_mm2 == pytest.approx(41.75 * 21 / 1e6)
    assert Tissue(mask, 8.0, (41.75, 21.0)).dilate(1000).area_mm2 == pytest.approx(whole.area_mm2)


@settings(max_examples=40, deadline=None)
@given(height=st.integers(1, 700), width=st.integers(1, 700), spacing=st.sampled_from([0.2, 0.25, 0.5, 1.0, 2.2]))
@example(height=500, width=500, spacing=0.25)
def test_an_image_of_nothing_but_tissue_has_the_area_of_the_image(height: int, width: int, spacing: float) -> None:
    with as_slide(np.full((height, width, 3), EOSIN, np.uint8), spacing) as slide:
        tissue = find_tissue(slide)
    assert tissue.mask.all()
    assert tissue.area_mm2 == pytest.approx(height * width * spacing**2 / 1e6)


def test_the_margin_has_the_given_width() -> None:
    mask = np.zeros((9, 9), bool)
    mask[4, 4] = True
    wide = Tissue(mask, 8.0).dilate(16)
    assert wide.mask[4, 2:7].all()
    assert not wide.mask[4, :2].any()
    assert wide.mask[3, 3]
    assert not wide.mask[2, 2]
    assert not Tissue(np.zeros((3, 3), bool), 8.0).dilate(16).mask.any()


# Regions


def box(top: float, left: float, bottom: float, right: float) -> np.ndarray:
    return np.array([(top, left), (top, right), (bottom, right), (bottom, left)], float)


def rectangle(*sides: float) -> Outline:
    return (Polygon(box(*sides)),)


def test_a_region_is_inside_of_any_outline_and_outside_of_holes_and_excluded_areas() -> None:
    with_hole = (Polygon(box(0, 0, 60, 60), (box(20, 20, 40, 40)[::-1],)),)
    region = Region((with_hole, rectangle(50, 50, 90, 90)), (rectangle(0, 0, 10, 100), rectangle(80, 80, 200, 200)))
    expected = np.zeros((100, 100), bool)
    expected[:60, :60] = True
    expected[20:40, 20:40] = False
    expected[50:90, 50:90] = True
    expected[:10] = False
    expected[80:, 80:] = False
    np.testing.assert_array_equal(region.contains((0.5, 0.5), 1.0, (100, 100)), expected)
    np.testing.assert_array_equal(region.contains((12.5, 7.5), 3.0, (20, 25)), expected[12:72:3, 7:82:3])
    assert [bool(region.contains(at, 1.0, (1, 1))) for at in ((15, 15), (30, 30), (85, 60), (85, 85), (-5, 5))] == [
        True,
        False,
        True,
        False,
        False,
    ]
    assert Region(None).contains((0, 0), 1.0, (3, 4)).all()


@pytest.mark.parametrize("size_px", [(4096, 6000), (1001, 2003)])
@pytest.mark.parametrize("spacing", [0.25, 0.7])
def test_the_area_of_a_region_is_that_of_its_outlines(size_px: tuple[int, int], spacing: float) -> None:
    """Neither slide is a multiple of a mask pixel."""
    with as_slide(np.full((*size_px, 3), EOSIN, np.uint8), spacing) as slide:
        tissue = find_tissue(slide)
        for sides, area_px in (
            ((100.3, 200.7, 600.1, 900.9), 499.8 * 700.2),
            ((40.3, 30.7, 61.5, 44.1), 21.2 * 13.4),
            ((-50, -50, 9000, 9000), np.prod(size_px)),
            ((size_px[0] - 300, 0, 9000, 500), 300 * 500),
        ):
            coverage = Region((rectangle(*sides),)).measure(tissue, slide)
            area_mm2 = Tissue(tissue.mask, tissue.spacing_um_px, tissue.size_um, coverage).area_mm2
            assert area_mm2 == pytest.approx(area_px * spacing**2 / 1e6, rel=1e-9)
            assert coverage.max() <= 1
        assert Region(None, (rectangle(-1, -1, 9000, 9000),)).measure(tissue, slide).max() == 0


def test_outlines_are_those_of_annotations() -> None:
    shapes = [Point(1, 2), rectangle(0, 0, 1, 1), rectangle(0, 0, 2, 2)]
    objects = [SlideObject(shapes[0], "annotation"), SlideObject(shapes[1]), SlideObject(shapes[2], "annotation")]
    assert select_outlines(objects) == (shapes[2],)


def draw_cells(size: tuple[int, int], seed: int = 0) -> np.ndarray:
    """Draw dark discs of 8 µm with sharp edges on pink, at 0.5 µm/px."""
    rng = np.random.default_rng(seed)
    image = np.full((*size, 3), (222, 178, 212), np.uint8)
    rows, columns = np.mgrid[-8:9, -8:9]
    disc = np.hypot(rows, columns) <= 8
    for row, column in rng.integers(8, [size[0] - 9, size[1] - 9], (size[0] * size[1] // 900, 2)):
        image[row - 8 : row + 9, column - 8 : column + 9][disc] = (96, 62, 140)
    return image


@pytest.mark.parametrize(("blur_um", "expected"), [(0, 0), (2, 0.25), (4, 0.25)])
@pytest.mark.parametrize("pale", [1.0, 0.3])
def test_a_planted_blur_is_out_of_focus(blur_um: float, expected: float, pale: float) -> None:
    """In a quarter of the tissue, also if the tissue is pale. Glass is not assessed."""
    image = np.full((1600, 2048, 3), 244, np.uint8)
    cells = draw_cells((1280, 2048)).astype(float)
    cells = 244 - (244 - cells) * pale
    if blur_um:
        cells[:640, :1024] = ndimage.gaussian_filter(cells[:640, :1024], (2 * blur_um, 2 * blur_um, 0))
    image[:1280] = cells.round()
    with as_slide(image, 0.5) as slide:
        tissue = find_tissue(slide)
        focus = measure_focus(slide, tissue, threads=3)
        assert focus.share == pytest.approx(expected, abs=0.01)
        assert focus.assessed_mm2 == pytest.approx(0.64 * 1.024, rel=0.02)
        assert focus.is_blurred[:5, :8].all() == (expected > 0)
        assert not focus.is_blurred[:, 8:].any()
        half = Region((tuple(Polygon(np.array(box, float)) for box in [[(0, 0), (0, 1024), (1280, 1024), (1280, 0)]]),))
        inside = measure_focus(slide, replace(tissue, coverage=half.measure(tissue, slide)))
        assert inside.share == pytest.approx(2 * expected, abs=0.02)


def test_focus_is_assessed_neither_on_plain_color_nor_on_coarse_slides() -> None:
    plain = np.full((600, 600, 3), (222, 178, 212), np.uint8)
    for image, spacing in ((plain, 0.5), (draw_cells((600, 600)), 2.0)):
        with as_slide(image, spacing) as slide:
            focus = measure_focus(slide, find_tissue(slide))
        assert (focus.assessed_mm2, focus.share) == (0, 0)


@pytest.mark.parametrize("ink", [(30, 60, 170), (30, 140, 70), (25, 22, 28)])
def test_planted_pen_marks_are_found(ink: tuple[int, int, int]) -> None:
    """On glass and on tissue, whose colors they multiply; and without marks, nothing is found."""
    image = np.full((160, 200, 3), 244, np.uint8)
    image[40:130, 30:150] = draw_cells((1440, 1920))[::16, ::16]
    assert not mask_pen(image, 8.0).any()
    assert not mask_pen(draw_cells((1440, 1920)), 0.5).any()
    mark = np.zeros((160, 200), bool)
    mark[20:60, 60:80] = mark[100:112, 100:190] = True
    marked = np.where(mark[..., None], np.array(ink) / 244 * image, image).astype(np.uint8)
    assert agreement(mask_pen(marked, 8.0), mark) > 0.98
    with as_slide(marked, 5.0) as slide:
        tissue = find_tissue(slide)
    assert tissue.pen is not None
    assert not (tissue.pen & tissue.mask).any()


def test_the_black_border_of_a_scan_is_no_pen_mark() -> None:
    image = np.full((160, 200, 3), 244, np.uint8)
    image[:, :30] = image[140:] = 10
    image[50:52, 60:64] = (30, 60, 170)  # a speck
    assert not mask_pen(image, 8.0).any()


def test_the_area_of_tissue_in_cells_is_exact() -> None:
    mask = np.zeros((4, 5), bool)
    mask[1:3, 1:4] = True
    tissue = Tissue(mask, 8.0, (30.0, 41.0))
    lines = np.array([-5.0, 3, 12, 20, 50]), np.array([0.0, 10, 12, 41, 60])
    expected = [[0, 0, 0, 0], [4 * 2, 4 * 2, 4 * 20, 0], [8 * 2, 8 * 2, 8 * 20, 0], [4 * 2, 4 * 2, 4 * 20, 0]]
    np.testing.assert_allclose(tissue.measure_cells(*lines) * 1e6, expected, atol=1e-9)
    whole = Tissue(np.ones((4, 5), bool), 8.0, (30.0, 41.0), np.full((4, 5), 0.5))
    assert whole.measure_cells(*lines).sum() == pytest.approx(whole.area_mm2)
    assert whole.measure_cells(*lines)[3, 2] * 1e6 == pytest.approx(10 * 29 / 2)
