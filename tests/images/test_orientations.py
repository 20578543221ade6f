"""Strokes lie along the angles, in the right places; and sentences for maps that do not fit."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from rotopath.images.drawing import SCALE, draw_orientations

GREY = np.full((12, 12, 3), 128, dtype=np.uint8)


def ink(angle: float, own_angle: float = 0.0, size: int = 12, every_px: int = 12) -> NDArray[np.bool_]:
    """Where a single stroke at row 4, column 6 of the maps leaves its colour."""
    strengths = np.zeros((size, size))
    strengths[4, 6] = 1.0
    angles = np.full((size, size), angle)
    sample = np.asarray(draw_orientations(GREY, strengths, angles, every_px, own_angle=own_angle)).astype(int)
    assert sample.shape == (12 * SCALE, 12 * SCALE, 3)
    marked: NDArray[np.bool_] = np.abs(sample - 128).max(axis=2) > 60
    return marked


def extent(marked: NDArray[np.bool_]) -> tuple[float, float]:
    """Heights and widths of what is marked."""
    rows, columns = np.nonzero(marked)
    return float(np.ptp(rows)), float(np.ptp(columns))


def test_strokes_are_upright_at_0_and_turn_counter_clockwise() -> None:
    upright, lying = extent(ink(0.0)), extent(ink(math.pi / 2))
    assert upright[0] > 10 * SCALE > 2 * SCALE > upright[1]
    assert lying[1] > 10 * SCALE > 2 * SCALE > lying[0]
    rows, columns = np.nonzero(ink(math.pi / 4))  # from top left to bottom right, as up turned to the left is
    assert np.corrcoef(rows, columns)[0, 1] > 0.9
    rows, columns = np.nonzero(ink(0.0, own_angle=-math.pi / 4))
    assert np.corrcoef(rows, columns)[0, 1] < -0.9


@pytest.mark.parametrize("size", [12, 10, 8])
def test_strokes_stand_in_the_middle_of_the_image(size: int) -> None:
    rows, columns = np.nonzero(ink(0.3, size=size, every_px=4))
    margin = (12 - size) // 2
    assert rows.mean() + 0.5 == pytest.approx((margin + 4.5) * SCALE, abs=1)
    assert columns.mean() + 0.5 == pytest.approx((margin + 6.5) * SCALE, abs=1)


def test_a_stroke_and_its_opposite_are_drawn_alike() -> None:
    strengths = np.ones((12, 12))
    one, other = (draw_orientations(GREY, strengths, np.full((12, 12), turn)) for turn in (0.7, 0.7 + math.pi))
    assert np.array_equal(np.asarray(one), np.asarray(other))


def test_what_is_faint_is_left_out() -> None:
    field = np.full((12, 12), 0.1)
    field[:6, :6] = 1.0
    marked = np.abs(np.asarray(draw_orientations(GREY, field, np.zeros((12, 12)))).astype(int) - 128).max(axis=2) > 60
    assert marked[: 6 * SCALE, : 6 * SCALE].any()
    assert not marked[8 * SCALE :].any()
    nothing = draw_orientations(GREY, np.zeros((12, 12)), np.zeros((12, 12)))
    assert np.array_equal(np.asarray(nothing), np.full((48, 48, 3), 128))


@pytest.mark.parametrize(
    ("image", "strength", "angle", "sentence"),
    [
        (GREY / 255, np.ones((12, 12)), np.ones((12, 12)), r"takes an image \(H, W, 3\) of bytes; got float64"),
        (GREY, np.ones((4, 12, 12)), np.ones((4, 12, 12)), r"of one channel, \(H, W\) both; got \(4, 12, 12\)"),
        (GREY, np.ones((12, 12)), np.ones((10, 10)), r"got \(12, 12\) and \(10, 10\)"),
        (GREY, np.ones((11, 12)), np.ones((11, 12)), r"\(11, 12\) do not in \(12, 12\) px; crop"),
        (GREY, np.ones((14, 14)), np.ones((14, 14)), r"\(14, 14\) do not in \(12, 12\) px; crop"),
    ],
)
def test_mistakes_get_a_sentence(image: np.ndarray, strength: np.ndarray, angle: np.ndarray, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        draw_orientations(image, strength, angle)


def test_strokes_need_some_room() -> None:
    with pytest.raises(ValueError, match="every_px as 1 or more; got 0"):
        draw_orientations(GREY, np.ones((12, 12)), np.ones((12, 12)), every_px=0)
