"""Overlays show a heat map and objects at the right positions in the right colors; strokes follow their angles."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from rotopath.images.drawing import (
    MAX_HEAT_OPACITY,
    ORIENTATION_SCALE,
    WARNING_COLOR,
    draw_orientations,
    draw_overlay,
    draw_warnings,
)
from rotopath.images.geojson import Point, SlideObject
from rotopath.images.slides import as_slide

RED, BLUE, GREEN = (200, 0, 0), (0, 0, 200), (0, 200, 0)
WHITE = 240
GRAY = np.full((12, 12, 3), 128, dtype=np.uint8)


def overlay(
    heat: np.ndarray, top_class: np.ndarray | None = None, objects: tuple[SlideObject, ...] = (), side: float = 50
) -> np.ndarray:
    with as_slide(np.full((100, 200, 3), WHITE, np.uint8), 1.0) as slide:
        classes = None if top_class is None else top_class.astype(np.float32)
        image = draw_overlay(slide, heat.astype(np.float32), classes, ((0.0, 0.0), side), (RED, BLUE), objects)
    return np.asarray(image)


# Warnings


@pytest.mark.parametrize("size", [(60, 40), (900, 700)])
def test_warnings_are_written_at_the_top_and_in_a_frame(size: tuple[int, int]) -> None:
    image = Image.new("RGB", size, "white")
    assert draw_warnings(image, ()) is image
    marked = draw_warnings(image, ["The slide has 0.5 µm/px.", "There are 9 per mm²."])
    assert marked.size == image.size
    pixels = np.asarray(marked)
    assert (pixels[[0, -1]] == WARNING_COLOR).all()
    assert (pixels[:, [0, -1]] == WARNING_COLOR).all()
    assert (np.asarray(image) == 255).all()
    if size[0] > 100:
        assert (pixels[: size[1] // 10] == 255).all(axis=2).any(), "letters"
        assert (pixels[size[1] // 2, 20:-20] == 255).all(), "the rest stays"
        plain = draw_warnings(image, ["The slide has 0.5 um/px.", "There are 9 per mm2."])
        np.testing.assert_array_equal(pixels, np.asarray(plain), "letters that the font does not have are replaced")


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
        assert len(drawn)
        assert (drawn == expected).all()


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
