"""Thresholds, AUC, confusion matrix and calibration: known answers, and slow implementations of the definitions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath.metrics.classification import (
    auc,
    balanced_accuracy,
    best_accuracy_threshold,
    calibration_error,
    candidate_thresholds,
    confusion_matrix,
    macro_auc,
    reliability_curve,
)

LABELS = np.array([0, 0, 1, 1, 0])
SCORES = np.array([0.1, 0.6, 0.5, 0.9, 0.2])

cases = st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10).map(lambda i: i / 10)), min_size=1, max_size=20)


def accuracy(labels: np.ndarray, scores: np.ndarray, threshold: float) -> float:
    return float(((scores >= threshold) == (labels == 1)).mean())


def test_known_answers() -> None:
    assert accuracy(LABELS, SCORES, 0.5) == 0.8
    assert accuracy(LABELS, SCORES, 0.95) == 0.6
    assert auc(LABELS, SCORES) == pytest.approx(5 / 6)
    assert accuracy(LABELS, SCORES, best_accuracy_threshold(LABELS, SCORES)) == 0.8


def test_a_single_class() -> None:
    zeros = np.zeros(3, int)
    assert np.isnan(auc(zeros, np.array([0.1, 0.2, 0.3])))


def test_a_score_that_is_nan_has_no_auc() -> None:
    assert np.isnan(auc(LABELS, np.array([0.1, 0.6, np.nan, 0.9, 0.2])))


def test_thresholds_of_a_single_class() -> None:
    zeros = np.zeros(3, int)
    assert accuracy(zeros, SCORES[:3], best_accuracy_threshold(zeros, SCORES[:3])) == 1
    assert accuracy(zeros + 1, SCORES[:3], best_accuracy_threshold(zeros + 1, SCORES[:3])) == 1


@given(cases)
def test_no_threshold_has_a_higher_accuracy_than_the_best(drawn: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(x) for x in zip(*drawn, strict=True))
    best = accuracy(labels, scores, best_accuracy_threshold(labels, scores))
    assert all(accuracy(labels, scores, t) <= best for t in np.linspace(-0.05, 1.05, 45))


@given(cases)
def test_auc_is_the_fraction_of_pairs_in_the_right_order(drawn: list[tuple[int, float]]) -> None:
    labels, scores = (np.array(x) for x in zip(*drawn, strict=True))
    pairs = [(p > n) + 0.5 * (p == n) for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(np.mean(pairs) if pairs else np.nan, nan_ok=True)


def test_confusion_matrix_of_three_classes() -> None:
    labels, predicted = np.array([0, 0, 0, 1, 1, 2]), np.array([0, 0, 2, 1, 0, 2])
    assert confusion_matrix(labels, predicted, 3).tolist() == [[2, 0, 1], [1, 1, 0], [0, 0, 1]]
    assert balanced_accuracy(labels, predicted, 3) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3)
    assert balanced_accuracy(labels, predicted, 4) == pytest.approx((2 / 3 + 1 / 2 + 1) / 3), (
        "of the classes that are present"
    )


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_the_confusion_matrix_counts_every_input(drawn: list[tuple[int, int]]) -> None:
    labels, predicted = (np.array(x) for x in zip(*drawn, strict=True))
    matrix = confusion_matrix(labels, predicted, 3)
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
    assert np.isnan(macro_auc(np.zeros(3, int), scores[:3])), "a single class has no other class to be ranked against"


def test_a_threshold_separates_adjacent_floats() -> None:
    low = 0.3
    high = np.nextafter(low, 1)
    assert (np.array([low, high]) >= candidate_thresholds(np.array([low, high]))[1]).tolist() == [False, True]


def test_calibration_of_fair_and_of_overconfident_predictions() -> None:
    labels = np.array([0, 1] * 50)
    assert calibration_error(labels, np.full(100, 0.5)) == pytest.approx(0)
    assert calibration_error(labels, np.full(100, 0.9)) == pytest.approx(0.4)
    assert calibration_error(labels, labels.astype(float)) == 0
    predicted, observed, counts = reliability_curve(labels, np.where(np.arange(100) < 50, 0.05, 1.0), bins=10)
    assert predicted.tolist() == pytest.approx([0.05, 1])
    assert observed.tolist() == [0.5, 0.5]
    assert counts.tolist() == [50, 50]
