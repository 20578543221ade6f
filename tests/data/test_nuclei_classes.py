"""The three classes of nuclei: known answers, and what must hold of any map."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rotopath.data.nuclei import BACKGROUND, BORDER, INSIDE, class_map, class_weights


def test_a_square_nucleus_has_a_border_of_two_pixels() -> None:
    labels = np.zeros((12, 14), int)
    labels[2:10, 3:12] = 4
    expected = np.full((12, 14), BACKGROUND)
    expected[2:10, 3:12] = BORDER
    expected[4:8, 5:10] = INSIDE
    assert np.array_equal(class_map(labels), expected)


def test_touching_nuclei_have_borders_towards_each_other_and_none_at_the_edge_of_the_image() -> None:
    labels = np.array([[1] * 6 + [2] * 6] * 5)
    assert class_map(labels).tolist() == [[INSIDE] * 4 + [BORDER] * 4 + [INSIDE] * 4] * 5
    assert class_map(labels, border_px=1).tolist() == [[INSIDE] * 5 + [BORDER] * 2 + [INSIDE] * 5] * 5


@given(arrays(np.int32, (9, 9), elements=st.integers(0, 3)))
def test_inside_and_border_together_are_the_nuclei(labels: np.ndarray) -> None:
    classes = class_map(labels)
    assert classes.dtype == np.uint8
    assert np.array_equal(classes != BACKGROUND, labels > 0)
    for row, column in np.argwhere(classes == INSIDE):
        around = labels[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
        assert (around == labels[row, column]).all()


def test_weights_make_classes_count_alike() -> None:
    maps = [np.array([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 2, 2]], np.uint8)]
    weights = class_weights(maps)
    assert (weights * [6, 4, 2]).tolist() == pytest.approx([4, 4, 4])  # of 12 pixels


def test_weights_need_every_class() -> None:
    with pytest.raises(ValueError, match="the images have none of 'background'"):
        class_weights([np.array([[0, 1]], np.uint8)])
