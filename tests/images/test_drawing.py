"""Overlays show a heat map and objects at the right positions in the right colors; strokes follow their angles."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rotopath.images import drawing
from rotopath.images.drawing import (
    CROP_PX,
    CROPS_PER_ROW,
    INK,
    MARGIN_PX,
    MAX_HEAT_OPACITY,
    MIN_CROP_UM,
    ORIENTATION_SCALE,
    WARNING_INK,
    Caption,
    DrawnAs,
    HeatMap,
    draw_crops,
    draw_orientations,
    draw_overlay,
    reduce_slide,
    scale_bar_um,
)
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import Point, Polygon
from rotopath.images.slides import as_slide

RED, BLUE, GREEN = (200, 0, 0), (0, 0, 200), (0, 200, 0)
TITLE = Caption("slide.svs")
BELOW_PX = 2 * MARGIN_PX + drawing.FONT_PX + MARGIN_PX // 2  # height of the band with the scale bar
WHITE = 240
GRAY = np.full((12, 12, 3), 128, dtype=np.uint8)


def framed_overlay(
    heat: np.ndarray,
    top_class: np.ndarray | None = None,
    objects: tuple[SlideObject, ...] = (),
    drawn_as: DrawnAs = "regions",
    caption: Caption = TITLE,
    spacing_um_px: float = 1.0,
    size: tuple[int, int] = (100, 200),
) -> np.ndarray:
    with as_slide(np.full((*size, 3), WHITE, np.uint8), spacing_um_px) as slide:
        classes = None if top_class is None else top_class.astype(np.float32)
        heat_map = HeatMap(heat.astype(np.float32), classes, ((0.0, 0.0), size[1] / heat.shape[1]))
        image = draw_overlay(
            reduce_slide(slide), heat_map, [("tumor", RED), ("stroma", BLUE)], objects, drawn_as, caption
        )
    return np.asarray(image)


def overlay(*args: Any, **kwargs: Any) -> np.ndarray:
    """The overlay of a slide of 100 × 200 px, without its caption and scale bar."""
    framed = framed_overlay(*args, **kwargs)
    top = framed.shape[0] - 100 - BELOW_PX
    return framed[top : top + 100, :200]


# Heat maps and objects


def test_opacity_follows_the_probability() -> None:
    image = overlay(np.array([[0.0, 0.0, 1.0, 1.0]] * 2))
    assert (image[50, 20] == WHITE).all()
    expected = WHITE + MAX_HEAT_OPACITY * (np.array(RED) - WHITE)
    assert np.abs(image[50, 180] - expected).max() <= 2


def test_each_pixel_has_the_color_of_its_most_probable_class() -> None:
    heat, top_class = np.ones((2, 4)), np.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    image = overlay(heat, top_class).astype(int)
    for row, column in np.ndindex(2, 4):
        red, _, blue = image[25 + 50 * row, 25 + 50 * column]
        assert (blue > red) == bool(top_class[row, column]), (row, column)
    edge = image[25, 45:55]
    assert not np.isclose(edge[:, 0], edge[:, 2], atol=20).any(), "colors of classes are not mixed"


def test_a_single_class_has_the_first_color() -> None:
    red, green, blue = overlay(np.ones((2, 4)))[50, 100].astype(int)
    assert red > green == blue


def test_objects_have_their_own_color_or_else_the_first() -> None:
    for color, expected in ((GREEN, GREEN), (None, RED)):
        mitosis = SlideObject(Point(50.0, 100.0), "detection", "x", color, {})
        image = overlay(np.zeros((2, 4)), objects=(mitosis,))
        drawn = image[(image != WHITE).any(axis=2)]
        assert {tuple(color) for color in drawn.tolist()} == {expected, drawing.PAPER}, "rings have a white edge"


def square(top: float, left: float, side: float, kind: str = "detection", **measurements: float) -> SlideObject:
    corners = np.array([(top, left), (top, left + side), (top + side, left + side), (top + side, left)])
    return SlideObject((Polygon(corners),), kind, "tumor", GREEN, measurements)


@pytest.mark.parametrize(
    ("drawn_as", "spacing_um_px", "has_heat", "has_outline"),
    [
        ("regions", 1.0, True, True),
        ("outlines", 1.0, False, True),
        ("points", 1.0, False, True),
        ("regions", 3.0, True, False),
        ("outlines", 3.0, True, False),
        ("points", 3.0, False, False),
    ],
)
def test_only_regions_and_invisible_outlines_tint_the_tissue(
    drawn_as: DrawnAs, spacing_um_px: float, has_heat: bool, has_outline: bool
) -> None:
    image = overlay(np.ones((2, 4)), objects=(square(40, 40, 20),), drawn_as=drawn_as, spacing_um_px=spacing_um_px)
    assert (image[5, 5] != WHITE).any() == has_heat
    assert (image == GREEN).all(axis=2).any() == has_outline


def test_the_caption_and_the_scale_bar_are_outside_of_the_slide() -> None:
    plain = framed_overlay(np.zeros((2, 4)))
    assert (plain == RED).all(axis=2).any(), "the legend has the color of each class"
    assert (plain == BLUE).all(axis=2).any()
    assert not (plain == WARNING_INK).all(axis=2).any()
    warned = framed_overlay(np.zeros((2, 4)), caption=Caption("slide.svs", ["a " * 100], ["it is not H&E"]))
    assert (warned == WARNING_INK).all(axis=2).any()
    assert warned.shape[0] > plain.shape[0], "more text needs more space"
    for image in (plain, warned):
        slide = image[image.shape[0] - BELOW_PX - 100 : image.shape[0] - BELOW_PX, :200]
        assert (slide == WHITE).all()


@pytest.mark.parametrize(("size", "spacing_um_px", "length_px"), [((100, 200), 1.0, 50), ((50, 3200), 0.5, 200 / 1.0)])
def test_the_scale_bar_has_the_length_that_it_states(
    size: tuple[int, int], spacing_um_px: float, length_px: float
) -> None:
    image = framed_overlay(np.zeros((2, 4)), size=size, spacing_um_px=spacing_um_px)
    band = (image[image.shape[0] - BELOW_PX + MARGIN_PX + 8] == INK).all(axis=1)
    ends = np.flatnonzero(np.diff(np.concatenate([[0], band.astype(int), [0]])))
    assert ends[1] - ends[0] == pytest.approx(length_px, abs=1.5)


def test_scale_bars_have_round_lengths() -> None:
    lengths = [scale_bar_um(longest) for longest in np.geomspace(1, 1e5, 200)]
    assert all(
        length <= longest * (1 + 1e-9) for length, longest in zip(lengths, np.geomspace(1, 1e5, 200), strict=True)
    )
    assert sorted(set(lengths))[:5] == [1, 2, 5, 10, 20]
    assert all(later >= earlier for earlier, later in pairwise(lengths))


def test_without_other_fonts_units_are_written_in_ascii(monkeypatch: pytest.MonkeyPatch) -> None:
    load = drawing.ImageFont.truetype

    def load_only_from_memory(font: object, *args: Any, **kwargs: Any) -> object:
        if isinstance(font, str):
            raise OSError(font)
        return load(font, *args, **kwargs)

    drawing._load_font.cache_clear()
    monkeypatch.setattr(drawing.ImageFont, "truetype", load_only_from_memory)
    written = []
    monkeypatch.setattr(drawing.ImageDraw.ImageDraw, "text", lambda _, __, text, **___: written.append(text))
    framed_overlay(np.zeros((2, 4)), caption=Caption("slide.svs", ["2 per mm²"]))
    drawing._load_font.cache_clear()
    assert written == ["slide.svs", "2 per mm2", "tumor", "stroma", "50 um"]


def test_crops_are_centered_on_their_objects_and_large_enough() -> None:
    pixels = np.full((400, 400, 3), WHITE, np.uint8)
    pixels[100:120, 200:220] = RED
    pixels[300:380, 300:380] = BLUE
    small, large = square(100, 200, 20, score=0.9), square(300, 300, 80, score=0.8)
    corner = SlideObject(Point(0.0, 0.0), "annotation", "tumor", GREEN, {"score": 0.7})
    with as_slide(pixels, 0.5) as slide:
        sheet = np.asarray(
            draw_crops(slide, {"Highest score": [(7, small), (8, large), (9, corner)], "None": []}, "score")
        )
    assert sheet.shape[1] == CROPS_PER_ROW * (CROP_PX + MARGIN_PX) + MARGIN_PX
    top = int(np.flatnonzero((sheet == RED).all(axis=2).any(axis=1)).mean().round()) - CROP_PX // 2
    crops = [sheet[top : top + CROP_PX, MARGIN_PX + i * (CROP_PX + MARGIN_PX) :][:, :CROP_PX] for i in range(3)]
    for crop, color, fraction in ((crops[0], RED, 10 / MIN_CROP_UM), (crops[1], BLUE, 1 / 1.5)):
        mask = np.abs(crop.astype(int) - color).max(axis=2) < 60
        rows, columns = np.nonzero(mask)
        assert np.ptp(rows) == pytest.approx(fraction * CROP_PX, abs=4)
        assert (rows.mean(), columns.mean()) == pytest.approx((CROP_PX / 2 - 0.5,) * 2, abs=2)


def test_an_outline_or_marks_at_the_edges_show_which_object_a_crop_is_about() -> None:
    pixels = np.full((400, 400, 3), RED, np.uint8)
    outlined, point = (
        square(192, 192, 16, score=0.9),
        SlideObject(Point(200.0, 200.0), "annotation", "m", RED, {"score": 1}),
    )
    with as_slide(pixels, 0.25) as slide:
        sheet = np.asarray(draw_crops(slide, {"Highest score": [(1, outlined), (2, point)]}, "score"))
    top = int(np.flatnonzero((sheet == RED).all(axis=2).any(axis=1))[0])
    first, second = (sheet[top : top + CROP_PX, MARGIN_PX + i * (CROP_PX + MARGIN_PX) :][:, :CROP_PX] for i in (0, 1))
    rows, columns = np.nonzero((first != RED).any(axis=2))
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (56, 72, 56, 72)
    assert len(rows) == 4 * 16, "a thin line"
    middle = CROP_PX // 2
    assert all(
        (second[row, column] == INK).all() for row, column in ((0, middle), (middle, 0), (-1, middle), (middle, -1))
    )
    inside = second[drawing.TICK_PX + 2 : -drawing.TICK_PX - 2, drawing.TICK_PX + 2 : -drawing.TICK_PX - 2]
    assert (inside == RED).all(), "nothing is drawn on the object"


def test_outlines_are_wider_where_nuclei_are_large() -> None:
    widths = [
        (overlay(np.ones((2, 4)), objects=(square(40, 40, 20),), drawn_as="outlines", spacing_um_px=um)[50] == GREEN)
        .all(axis=1)
        .sum()
        for um in (0.25, 1.0)
    ]
    assert widths == [4, 2], "the left and the right side"


# Orientation fields


def is_stroke(image: object) -> NDArray[np.bool_]:
    """The pixels that are not gray."""
    mask: NDArray[np.bool_] = np.abs(np.asarray(image).astype(int) - 128).max(axis=2) > 60
    return mask


def draw_stroke(angle: float, line_angle: float = 0.0, size: int = 12, every_px: int = 12) -> NDArray[np.bool_]:
    """The pixels of a single stroke at row 4, column 6 of the maps."""
    strengths = np.zeros((size, size))
    strengths[4, 6] = 1.0
    angles = np.full((size, size), angle)
    image = draw_orientations(GRAY, strengths, angles, every_px, line_angle=line_angle)
    assert np.asarray(image).shape == (12 * ORIENTATION_SCALE, 12 * ORIENTATION_SCALE, 3)
    return is_stroke(image)


def extent(mask: NDArray[np.bool_]) -> tuple[float, float]:
    """Height and width of the masked region."""
    rows, columns = np.nonzero(mask)
    return float(np.ptp(rows)), float(np.ptp(columns))


def test_strokes_are_vertical_at_0_and_rotate_counterclockwise() -> None:
    vertical, horizontal = extent(draw_stroke(0.0)), extent(draw_stroke(math.pi / 2))
    assert vertical[0] > 10 * ORIENTATION_SCALE > 2 * ORIENTATION_SCALE > vertical[1]
    assert horizontal[1] > 10 * ORIENTATION_SCALE > 2 * ORIENTATION_SCALE > horizontal[0]
    rows, columns = np.nonzero(draw_stroke(math.pi / 4))  # from top left to bottom right
    assert np.corrcoef(rows, columns)[0, 1] > 0.9
    rows, columns = np.nonzero(draw_stroke(0.0, line_angle=-math.pi / 4))
    assert np.corrcoef(rows, columns)[0, 1] < -0.9


@pytest.mark.parametrize("size", [12, 10, 8])
def test_maps_are_centered_on_the_image(size: int) -> None:
    rows, columns = np.nonzero(draw_stroke(0.3, size=size, every_px=4))
    margin = (12 - size) // 2
    assert rows.mean() + 0.5 == pytest.approx((margin + 4.5) * ORIENTATION_SCALE, abs=1)
    assert columns.mean() + 0.5 == pytest.approx((margin + 6.5) * ORIENTATION_SCALE, abs=1)


def test_opposite_angles_are_drawn_alike() -> None:
    strengths = np.ones((12, 12))
    first, second = (draw_orientations(GRAY, strengths, np.full((12, 12), angle)) for angle in (0.7, 0.7 + math.pi))
    assert np.array_equal(np.asarray(first), np.asarray(second))


def test_weak_strokes_are_left_out() -> None:
    strength = np.full((12, 12), 0.1)
    strength[:6, :6] = 1.0
    mask = is_stroke(draw_orientations(GRAY, strength, np.zeros((12, 12))))
    assert mask[: 6 * ORIENTATION_SCALE, : 6 * ORIENTATION_SCALE].any()
    assert not mask[8 * ORIENTATION_SCALE :].any()
    empty = draw_orientations(GRAY, np.zeros((12, 12)), np.zeros((12, 12)))
    assert np.array_equal(np.asarray(empty), np.full((48, 48, 3), 128))


@pytest.mark.parametrize(
    ("image", "strength", "angle", "sentence"),
    [
        (GRAY / 255, np.ones((12, 12)), np.ones((12, 12)), r"expects an image \(H, W, 3\) of uint8; got an image of"),
        (GRAY, np.ones((4, 12, 12)), np.ones((4, 12, 12)), r"of the same shape \(h, w\); got the shapes \(4, 12, 12\)"),
        (GRAY, np.ones((12, 12)), np.ones((10, 10)), r"got the shapes \(12, 12\) and \(10, 10\)"),
        (GRAY, np.ones((11, 12)), np.ones((11, 12)), r"\(11, 12\) px cannot be centered on the image of \(12, 12\) px"),
        (GRAY, np.ones((14, 14)), np.ones((14, 14)), r"\(14, 14\) px cannot be centered on the image of \(12, 12\) px"),
    ],
)
def test_maps_that_do_not_fit_are_refused_in_one_sentence(
    image: np.ndarray, strength: np.ndarray, angle: np.ndarray, sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        draw_orientations(image, strength, angle)


def test_cells_have_at_least_one_pixel() -> None:
    with pytest.raises(ValueError, match="`every_px` of 1 or more; got 0"):
        draw_orientations(GRAY, np.ones((12, 12)), np.ones((12, 12)), every_px=0)
