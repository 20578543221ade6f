"""Overlays: a heat map in the colours of its classes, where it lies on the slide, and objects in their own."""

import numpy as np

from rotopath.images.drawing import STRONGEST, draw_overlay
from rotopath.images.geojson import Point, SlideObject
from rotopath.images.slides import as_slide

RED, BLUE, GREEN = (200, 0, 0), (0, 0, 200), (0, 200, 0)
WHITE = 240


def draw(
    heat: np.ndarray, winner: np.ndarray | None = None, objects: tuple[SlideObject, ...] = (), side: float = 50
) -> np.ndarray:
    with as_slide(np.full((100, 200, 3), WHITE, np.uint8), 1.0) as slide:
        values = None if winner is None else winner.astype(np.float32)
        sample = draw_overlay(slide, heat.astype(np.float32), values, ((0.0, 0.0), side), (RED, BLUE), objects)
    return np.asarray(sample)


def test_strength_is_the_probability() -> None:
    sample = draw(np.array([[0.0, 0.0, 1.0, 1.0]] * 2))
    assert (sample[50, 20] == WHITE).all()
    expected = WHITE + STRONGEST * (np.array(RED) - WHITE)
    assert np.abs(sample[50, 180] - expected).max() <= 2


def test_each_place_has_the_colour_of_its_likeliest_class() -> None:
    heat, winner = np.ones((2, 4)), np.array([[0, 1, 1, 0], [1, 1, 0, 0]])
    sample = draw(heat, winner).astype(int)
    for row, column in np.ndindex(2, 4):
        red, _, blue = sample[25 + 50 * row, 25 + 50 * column]
        assert (blue > red) == bool(winner[row, column]), (row, column)
    edge = sample[25, 45:55]
    assert not np.isclose(edge[:, 0], edge[:, 2], atol=20).any(), "classes do not run into each other"


def test_a_single_class_has_the_first_colour() -> None:
    red, green, blue = draw(np.ones((2, 4)))[50, 100].astype(int)
    assert red > green == blue


def test_objects_have_their_own_colour_or_else_the_first() -> None:
    for color, expected in ((GREEN, GREEN), (None, RED)):
        ring = SlideObject(Point(50.0, 100.0), "detection", "x", color, {})
        sample = draw(np.zeros((2, 4)), objects=(ring,))
        drawn = sample[(sample != WHITE).any(axis=2)]
        assert len(drawn)
        assert (drawn == expected).all()
