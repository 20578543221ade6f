"""Accuracy, AUC, calibration and intervals: known answers, and slow definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath.metrics.bootstrap import confidence_interval
from rotopath.metrics.classification import (
    accuracy,
    auc,
    balanced_accuracy,
    best_threshold,
    calibration,
    calibration_error,
    confusion_matrix,
    cuts,
    macro_auc,
)

LABELS = np.array([0, 0, 1, 1, 0])
SCORES = np.array([0.1, 0.6, 0.5, 0.9, 0.2])

cases = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10).map(lambda i: i / 10)), min_size=1, max_size=20)


def test_known_answers() -> None:
    assert accuracy(LABELS, SCORES, 0.5) == 0.8
    assert accuracy(LABELS, SCORES, 0.95) == 0.6
    assert auc(LABELS, SCORES) == pytest.approx(5 / 6)
    assert accuracy(LABELS, SCORES, best_threshold(LABELS, SCORES)) == 0.8


def test_one_class_alone() -> None:
    zeros = np.zeros(3, int)
    assert np.isnan(auc(zeros, np.array([0.1, 0.2, 0.3])))
    assert accuracy(zeros, SCORES[:3], best_threshold(zeros, SCORES[:3])) == 1
    assert accuracy(zeros + 1, SCORES[:3], best_threshold(zeros + 1, SCORES[:3])) == 1


@given(cases)
def test_no_threshold_beats_the_best(drawn: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(x) for x in zip(*drawn, strict=True))
    best = accuracy(labels, scores, best_threshold(labels, scores))
    assert all(accuracy(labels, scores, t) <= best for t in np.linspace(-0.05, 1.05, 45))


@given(cases)
def test_auc_is_the_share_of_pairs_in_the_right_order(drawn: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(x) for x in zip(*drawn, strict=True))
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(np.mean(pairs) if pairs else np.nan, nan_ok=True)


def test_confusions_of_three_classes() -> None:
    labels, decided = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 2, 1, 0, 2])
    assert confusion_matrix(labels, decided, 3).tolist() == [[2, 0, 1], [1, 1, 0], [0, 0, 1]]
    assert balanced_accuracy(labels, decided, 3) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert balanced_accuracy(labels, decided, 4) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3), "of classes that there are"


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_confusions_are_counted_one_by_one(drawn: list[tuple[int, int]]) -> None:
    labels, decided = (np.array(x) for x in zip(*drawn, strict=True))
    matrix = confusion_matrix(labels, decided, 3)
    assert all(matrix[i, j] == drawn.count((i, j)) for i in range(3) for j in range(3))


def test_the_macro_auc_is_the_mean_of_one_class_against_all_others() -> None:
    labels = np.array([0, 0, 1, 1, 2, 2])
    scores = np.random.default_rng(0).dirichlet((1, 1, 1), 6)
    each = [auc((labels == k).astype(int), scores[:, k]) for k in range(3)]
    assert macro_auc(labels, scores) == pytest.approx(np.mean(each))
    assert macro_auc(labels, np.eye(3)[labels]) == 1
    assert macro_auc(labels, np.full((6, 3), 1 / 3)) == 0.5
    some, of_two = labels[:4], scores[:4]
    present = [auc((some == k).astype(int), of_two[:, k]) for k in (0, 1)]
    assert macro_auc(some, of_two) == pytest.approx(np.mean(present))
    assert np.isnan(macro_auc(np.zeros(3, int), scores[:3])), "a single class is ranked against nothing"


def test_neighbouring_floats_are_still_cut_apart() -> None:
    low = 0.3
    high = np.nextafter(low, 1)
    assert (np.array([low, high]) >= cuts(np.array([low, high]))[1]).tolist() == [False, True]


def test_calibration_of_a_coin_and_of_a_braggart() -> None:
    labels = np.array([0, 1] * 50)
    assert calibration_error(labels, np.full(100, 0.5)) == pytest.approx(0)
    assert calibration_error(labels, np.full(100, 0.9)) == pytest.approx(0.4)
    assert calibration_error(labels, labels.astype(float)) == 0
    predicted, observed, counts = calibration(labels, np.where(np.arange(100) < 50, 0.05, 1.0), bins=10)
    assert predicted.tolist() == pytest.approx([0.05, 1])
    assert observed.tolist() == [0.5, 0.5]
    assert counts.tolist() == [50, 50]


def test_the_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(1).normal(size=400)
    low, high = confidence_interval(lambda drawn: float(values[drawn].mean()), 400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert confidence_interval(lambda drawn: float(values[drawn].mean()), 400) == (low, high), "same seed"


def test_patients_not_images_are_drawn() -> None:
    """Two patients of one value each: the mean is one of three values, and the interval spans them all."""
    values = np.array([0.0, 1.0])
    assert confidence_interval(lambda drawn: float(values[drawn].mean()), 2) == (0, 1)


def test_scores_that_cannot_be_computed_are_left_out() -> None:
    labels = np.array([0, 1])
    low, high = confidence_interval(lambda drawn: auc(labels[drawn], np.array([0.2, 0.8])[drawn]), 2)
    assert (low, high) == (1, 1)
