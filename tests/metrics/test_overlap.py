"""Scores of label maps: known answers, degenerate cases, and slow implementations from the definitions."""

from itertools import permutations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rotopath.metrics.matching import (
    HitRule,
    ObjectMatches,
    aggregated_jaccard,
    aggregated_jaccard_plus,
    dice,
    match_objects,
    overlaps,
)


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


def disc(row: float, column: float, number: int, radius: float = 10, size: int = 60) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size]
    return number * ((rows - row) ** 2 + (columns - column) ** 2 <= radius**2)


def test_shifted_discs_hit_until_they_are_too_far() -> None:
    """Discs of radius 10: by the areas of their lenses, IoU 0.5 is passed between a shift of 5 and one of 6 px."""
    truth = disc(20, 20, 1)
    for shift, hits in ((0, 1), (5, 1), (6, 0), (25, 0)):
        found = match_objects(overlaps(truth, disc(20, 20 + shift, 7)))
        assert (found.hits, found.false, found.missed) == (hits, 1 - hits, 1 - hits), shift
    area = match_objects(overlaps(truth, disc(20, 27, 7)), "area")
    assert area.hits == 1, "over half of its area is covered at a shift of 7"


@pytest.mark.parametrize(
    ("radius", "hits"), [(4, {"own-area": 1}), (10, {"iou": 1, "area": 1, "own-area": 1}), (20, {"area": 1})]
)
def test_rules_differ_in_whose_half_it_is(radius: float, hits: dict[HitRule, int]) -> None:
    """About the same centre: a small object lies within the nucleus, and a large one holds it."""
    found = overlaps(disc(30, 30, 1), disc(30, 30, 1, radius))
    assert {rule: match_objects(found, rule).hits for rule in get_args(HitRule)} == {
        "iou": 0,
        "area": 0,
        "own-area": 0,
    } | hits


def test_one_large_object_hits_one_nucleus_only() -> None:
    truth = disc(15, 15, 1, 6) + disc(15, 30, 2, 6)
    found = match_objects(overlaps(truth, np.ones((60, 60), int)), "area")
    assert found == ObjectMatches(1, 0, 1, pytest.approx(113 / 3600))


def test_two_halves_of_a_nucleus_are_one_hit_at_most() -> None:
    truth = np.array([[1, 1, 1, 1]])
    assert match_objects(overlaps(truth, np.array([[1, 1, 2, 2]]))).hits == 1
    assert match_objects(overlaps(truth, np.array([[1, 1, 2, 3]]))).f1 == pytest.approx(2 / 4)


def slow_pq(truth: np.ndarray, predicted: np.ndarray) -> float:
    ious = []
    for i in set(truth.flat) - {0}:
        for j in set(predicted.flat) - {0}:
            iou = ((truth == i) & (predicted == j)).sum() / ((truth == i) | (predicted == j)).sum()
            if iou > 0.5:
                ious.append(iou)
    t, p = len(set(truth.flat) - {0}), len(set(predicted.flat) - {0})
    return sum(ious) / (len(ious) + (t - len(ious)) / 2 + (p - len(ious)) / 2) if t + p else 1.0


def slow_aji_plus(truth: np.ndarray, predicted: np.ndarray) -> set[float]:
    """Of every one-to-one assignment with the highest sum of IoUs, which may be several."""
    t, p = sorted(set(truth.flat) - {0}), sorted(set(predicted.flat) - {0})
    best, answers = -1.0, set()
    width = max(len(t), len(p))
    for order in permutations(range(width), len(t)):
        shared = total = 0.0
        for i, k in zip(t, order, strict=True):
            if k < len(p):
                both = ((truth == i) & (predicted == p[k])).sum()
                shared += both
                total += both / ((truth == i) | (predicted == p[k])).sum()
        union = (truth > 0).sum() + (predicted > 0).sum() - shared
        score = float(shared / union) if union else 1.0
        if total > best + 1e-9:
            best, answers = total, {score}
        elif total > best - 1e-9:
            answers.add(score)
    return answers


@given(maps, maps)
def test_aji_plus_agrees_with_its_definition(truth: np.ndarray, predicted: np.ndarray) -> None:
    answer = aggregated_jaccard_plus(truth, predicted)
    assert any(answer == pytest.approx(score) for score in slow_aji_plus(truth, predicted))


@given(maps, maps)
def test_panoptic_quality_agrees_with_its_definition(truth: np.ndarray, predicted: np.ndarray) -> None:
    """An IoU of exactly one half is a hit here and none there, so maps that have one are left out."""
    found = overlaps(truth, predicted)
    if (found.iou == 0.5).any():
        return
    assert match_objects(found).panoptic_quality == pytest.approx(slow_pq(truth, predicted))


def test_degenerate_maps() -> None:
    empty, one = np.zeros((3, 3), int), np.eye(3, dtype=int)
    for score in (aggregated_jaccard_plus, dice):
        assert score(empty, empty) == 1
        assert score(one, empty) == score(empty, one) == 0
        assert score(one, 5 * one) == 1
    nothing = match_objects(overlaps(empty, empty))
    assert nothing.f1 == nothing.panoptic_quality == 1
    wrong = match_objects(overlaps(one, empty)) + match_objects(overlaps(empty, one))
    assert wrong == ObjectMatches(0, 1, 1, 0.0)
    assert wrong.f1 == wrong.panoptic_quality == 0


def test_dice_counts_pixels() -> None:
    assert dice(np.array([[1, 1, 0, 2]]), np.array([[3, 0, 0, 3]])) == pytest.approx(2 * 2 / 5)
