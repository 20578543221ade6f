"""AJI against known answers and a slow implementation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rotopath.evaluation import aggregated_jaccard, overlaps


def slow_aji(truth: np.ndarray, predicted: np.ndarray) -> float:
    shared = union = 0
    used = set()
    for i in set(truth.flat) - {0}:
        best, best_iou = None, 0.0
        for j in set(predicted.flat) - {0}:
            iou = ((truth == i) & (predicted == j)).sum() / ((truth == i) | (predicted == j)).sum()
            if iou > best_iou:
                best, best_iou = j, iou
        if best is None:
            union += (truth == i).sum()
            continue
        used.add(best)
        shared += ((truth == i) & (predicted == best)).sum()
        union += ((truth == i) | (predicted == best)).sum()
    union += sum((predicted == j).sum() for j in set(predicted.flat) - {0} - used)
    return float(shared / union) if union else 1.0


maps = arrays(np.int32, (5, 6), elements=st.integers(0, 4))


@given(maps, maps)
def test_aji_agrees_with_its_definition(truth: np.ndarray, predicted: np.ndarray) -> None:
    """Ties of the IoU may be broken either way, so only maps without them are compared."""
    found = overlaps(truth, predicted)
    for i in range(len(found.truth_areas)):
        of_one = np.sort(found.iou[found.truth == i])
        if len(of_one) > 1 and of_one[-1] == of_one[-2]:
            return
    assert aggregated_jaccard(truth, predicted) == pytest.approx(slow_aji(truth, predicted))


@given(maps)
def test_a_map_agrees_with_itself_whatever_the_numbers(labels: np.ndarray) -> None:
    assert aggregated_jaccard(labels, labels * 1000) == 1


def test_nothing_found_and_nothing_there() -> None:
    empty, one = np.zeros((3, 3), int), np.eye(3, dtype=int)
    assert aggregated_jaccard(empty, empty) == 1
    assert aggregated_jaccard(one, empty) == 0
    assert aggregated_jaccard(empty, one) == 0


def test_sizes_must_agree() -> None:
    with pytest.raises(ValueError, match="one size"):
        overlaps(np.zeros((3, 3), int), np.zeros((3, 4), int))
