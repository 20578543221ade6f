"""Detection: hand-counted matches by both rules, and what must hold at every threshold."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotopath.metrics.matching import Counts, Matches, best_threshold, count, match, pool

NONE = np.empty((0, 2))
TRUTH = np.array([[100.0, 100.0], [100.0, 140.0], [300.0, 300.0]])


def places(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, float).reshape(-1, 2)


def test_a_detection_at_exactly_the_radius_is_a_hit() -> None:
    detected, scores = places((130, 100), (300, 330.01)), np.array([0.9, 0.8])
    found = match(TRUTH, detected, scores, 30)
    assert found.found_at.tolist() == [0.9, -np.inf, -np.inf]
    assert found.false.tolist() == [0.8]
    assert count(found, 0.5) == Counts(1, 1, 2)


def test_surplus_detections_of_one_mitosis_are_free_by_one_rule_and_false_by_the_other() -> None:
    detected, scores = places((300, 300), (301, 300), (299, 305)), np.array([0.7, 0.9, 0.8])
    amida13 = match(TRUTH, detected, scores, 30)
    midog = match(TRUTH, detected, scores, 30, "one-to-one")
    assert count(amida13, 0.5) == Counts(1, 0, 2)
    assert amida13.found_at[2] == 0.9
    assert count(midog, 0.5) == Counts(1, 2, 2)
    assert sorted(midog.false) == [0.7, 0.8]


def test_one_detection_between_two_mitoses_hits_both_or_the_nearest() -> None:
    detected, scores = places((100, 118)), np.array([0.6])
    assert match(TRUTH, detected, scores, 30).found_at.tolist() == [0.6, 0.6, -np.inf]
    assert match(TRUTH, detected, scores, 30, "one-to-one").found_at.tolist() == [0.6, -np.inf, -np.inf]


def test_the_highest_score_goes_first() -> None:
    detected, scores = places((100, 118), (100, 119)), np.array([0.6, 0.8])
    found = match(TRUTH, detected, scores, 30, "one-to-one")
    assert found.found_at.tolist() == [0.8, 0.6, -np.inf], "both are nearest to the first, the better one takes it"
    assert len(found.false) == 0


@pytest.mark.parametrize("rule", ["amida13", "one-to-one"])
def test_nothing_there_and_nothing_found(rule: str) -> None:
    empty = match(NONE, NONE, np.empty(0), 30, rule)  # type: ignore[arg-type]
    assert count(empty, 0.5).f1 == 1
    assert best_threshold(empty) == 0.5
    missed = match(TRUTH, NONE, np.empty(0), 30, rule)  # type: ignore[arg-type]
    assert count(missed, 0.5) == Counts(0, 0, 3)
    assert count(missed, 0.5).f1 == count(missed, 0.5).precision == 0
    false = match(NONE, TRUTH, np.array([0.1, 0.6, 0.9]), 30, rule)  # type: ignore[arg-type]
    assert count(false, 0.5) == Counts(0, 2, 0)
    assert count(false, 0.5).f1 == count(false, 0.5).recall == 0


def test_f1_is_pooled_over_images() -> None:
    one = Matches(np.array([0.9, 0.2]), np.array([0.4]))
    other = Matches(np.array([0.7]), np.array([0.8, 0.1]))
    pooled = pool([one, other])
    assert count(pooled, 0.5) == Counts(2, 1, 1)
    assert count(pooled, 0.5).f1 == pytest.approx(2 / 3)
    assert count(pool([]), 0.5).f1 == 1


scores = st.lists(st.integers(0, 8).map(lambda i: i / 8), max_size=12)


@given(scores, scores, st.integers(0, 3))
def test_no_threshold_beats_the_best(found: list[float], false: list[float], missed: int) -> None:
    matches = Matches(np.array(found + [-np.inf] * missed), np.array(false))
    best = count(matches, best_threshold(matches)).f1
    for threshold in np.linspace(-0.1, 1.1, 49):
        assert count(matches, threshold).f1 <= best or (not found and not missed)


def slow_match(truth: np.ndarray, detected: np.ndarray, radius: float, rule: str) -> tuple[int, int]:
    """Hits and false ones of detections that are sorted by falling score, from the words of the rules."""
    if rule == "amida13":
        hits = sum(any(np.hypot(*(t - d)) <= radius for d in detected) for t in truth)
        return hits, sum(all(np.hypot(*(t - d)) > radius for t in truth) for d in detected)
    free = list(range(len(truth)))
    hits = 0
    for d in detected:
        near = [i for i in free if np.hypot(*(truth[i] - d)) <= radius]
        if near:
            free.remove(min(near, key=lambda i: (np.hypot(*(truth[i] - d)), i)))
            hits += 1
    return hits, len(detected) - hits


points = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8).map(lambda p: places(*p))


@settings(deadline=None)
@given(points, points, st.sampled_from(["amida13", "one-to-one"]))
def test_every_threshold_agrees_with_matching_what_is_left_above_it(
    truth: np.ndarray, detected: np.ndarray, rule: str
) -> None:
    order = np.linspace(0.95, 0.05, len(detected)) if len(detected) else np.empty(0)
    found = match(truth, detected, order, 20, rule)  # type: ignore[arg-type]
    for kept in range(len(detected) + 1):
        threshold = order[kept - 1] if kept else 2.0
        hits, false = slow_match(truth, detected[:kept], 20, rule)
        assert count(found, threshold) == Counts(hits, false, len(truth) - hits)
