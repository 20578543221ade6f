"""Matching of points and objects: known answers, special cases, and slow implementations of the definitions."""

from itertools import permutations
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from rotopath.metrics.matching import (
    Counts,
    ObjectCounts,
    OverlapRule,
    PointMatches,
    aggregated_jaccard,
    aggregated_jaccard_plus,
    best_f1_threshold,
    count_at_threshold,
    dice,
    find_overlaps,
    froc_curve,
    match_objects,
    match_points,
    pool_matches,
)

# Points

NONE = np.empty((0, 2))
TRUTH = np.array([[100.0, 100.0], [100.0, 140.0], [300.0, 300.0]])


def points_at(*pairs: tuple[float, float]) -> np.ndarray:
    return np.array(pairs, float).reshape(-1, 2)


def test_a_detection_exactly_at_the_radius_is_a_true_positive() -> None:
    detected, scores = points_at((130, 100), (300, 330.01)), np.array([0.9, 0.8])
    matches = match_points(TRUTH, detected, scores, 30)
    assert matches.detected_at.tolist() == [0.9, -np.inf, -np.inf]
    assert matches.false_scores.tolist() == [0.8]
    assert count_at_threshold(matches, 0.5) == Counts(1, 1, 2)


def test_extra_detections_of_a_mitosis_are_ignored_by_amida13_and_false_positives_one_to_one() -> None:
    detected, scores = points_at((300, 300), (301, 300), (299, 305)), np.array([0.7, 0.9, 0.8])
    amida13 = match_points(TRUTH, detected, scores, 30)
    midog = match_points(TRUTH, detected, scores, 30, "one-to-one")
    assert count_at_threshold(amida13, 0.5) == Counts(1, 0, 2)
    assert amida13.detected_at[2] == 0.9
    assert count_at_threshold(midog, 0.5) == Counts(1, 2, 2)
    assert sorted(midog.false_scores) == [0.7, 0.8]


def test_a_detection_between_two_mitoses_matches_both_by_amida13_and_the_nearest_one_to_one() -> None:
    detected, scores = points_at((100, 118)), np.array([0.6])
    assert match_points(TRUTH, detected, scores, 30).detected_at.tolist() == [0.6, 0.6, -np.inf]
    assert match_points(TRUTH, detected, scores, 30, "one-to-one").detected_at.tolist() == [0.6, -np.inf, -np.inf]


def test_the_highest_score_is_matched_first() -> None:
    detected, scores = points_at((100, 118), (100, 119)), np.array([0.6, 0.8])
    matches = match_points(TRUTH, detected, scores, 30, "one-to-one")
    assert matches.detected_at.tolist() == [0.8, 0.6, -np.inf], "both are nearest to the first, the better one takes it"
    assert len(matches.false_scores) == 0


@pytest.mark.parametrize("rule", ["amida13", "one-to-one"])
def test_images_without_objects_or_without_detections(rule: str) -> None:
    empty = match_points(NONE, NONE, np.empty(0), 30, rule)  # type: ignore[arg-type]
    assert count_at_threshold(empty, 0.5).f1 == 1
    assert best_f1_threshold(empty) == 0.5
    missed = match_points(TRUTH, NONE, np.empty(0), 30, rule)  # type: ignore[arg-type]
    assert count_at_threshold(missed, 0.5) == Counts(0, 0, 3)
    assert count_at_threshold(missed, 0.5).f1 == count_at_threshold(missed, 0.5).precision == 0
    false = match_points(NONE, TRUTH, np.array([0.1, 0.6, 0.9]), 30, rule)  # type: ignore[arg-type]
    assert count_at_threshold(false, 0.5) == Counts(0, 2, 0)
    assert count_at_threshold(false, 0.5).f1 == count_at_threshold(false, 0.5).recall == 0


def test_f1_is_pooled_over_images() -> None:
    first = PointMatches(np.array([0.9, 0.2]), np.array([0.4]))
    second = PointMatches(np.array([0.7]), np.array([0.8, 0.1]))
    pooled = pool_matches([first, second])
    assert count_at_threshold(pooled, 0.5) == Counts(2, 1, 1)
    assert count_at_threshold(pooled, 0.5).f1 == pytest.approx(2 / 3)
    assert count_at_threshold(pool_matches([]), 0.5).f1 == 1


scores = st.lists(st.integers(0, 8).map(lambda i: i / 8), max_size=12)


@given(scores, scores, st.integers(0, 3))
def test_no_threshold_has_a_higher_f1_than_the_best(detected: list[float], false: list[float], missed: int) -> None:
    matches = PointMatches(np.array(detected + [-np.inf] * missed), np.array(false))
    best = count_at_threshold(matches, best_f1_threshold(matches)).f1
    for threshold in np.linspace(-0.1, 1.1, 49):
        assert count_at_threshold(matches, threshold).f1 <= best or (not detected and not missed)


def slow_match(truth: np.ndarray, detected: np.ndarray, radius: float, rule: str) -> tuple[int, int]:
    """Return true and false positives of detections sorted by falling score, as the rules define them."""
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


points = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8).map(lambda p: points_at(*p))


@settings(deadline=None)
@given(points, points, st.sampled_from(["amida13", "one-to-one"]))
def test_counts_at_every_threshold_agree_with_matching_the_detections_above_it(
    truth: np.ndarray, detected: np.ndarray, rule: str
) -> None:
    order = np.linspace(0.95, 0.05, len(detected)) if len(detected) else np.empty(0)
    matches = match_points(truth, detected, order, 20, rule)  # type: ignore[arg-type]
    for kept in range(len(detected) + 1):
        threshold = order[kept - 1] if kept else 2.0
        hits, false = slow_match(truth, detected[:kept], 20, rule)
        assert count_at_threshold(matches, threshold) == Counts(hits, false, len(truth) - hits)


def test_the_froc_curve_of_a_few_matches_by_hand() -> None:
    """Two images, detections at 0.9 and 0.5, one missed object, and false positives at 0.7 and 0.3."""
    points = froc_curve(PointMatches(np.array([0.9, 0.5, -np.inf]), np.array([0.7, 0.3])), images=2)
    assert [point["threshold"] for point in points] == [0.9, 0.5, 0.3]
    assert [point["false_per_image"] for point in points] == [0, 0.5, 1]
    assert [point["sensitivity"] for point in points] == pytest.approx([1 / 3, 2 / 3, 2 / 3])


# Objects of label maps


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
    """Only maps without ties of the IoU are compared, because ties may be broken either way."""
    matches = find_overlaps(truth, predicted)
    for i in range(len(matches.truth_areas)):
        ious = np.sort(matches.iou[matches.truth == i])
        if len(ious) > 1 and ious[-1] == ious[-2]:
            return
    assert aggregated_jaccard(truth, predicted) == pytest.approx(slow_aji(truth, predicted))


@given(maps)
def test_the_aji_of_a_map_with_itself_is_1_for_any_object_numbers(labels: np.ndarray) -> None:
    assert aggregated_jaccard(labels, labels * 1000) == 1


def test_aji_of_empty_maps() -> None:
    empty, single = np.zeros((3, 3), int), np.eye(3, dtype=int)
    assert aggregated_jaccard(empty, empty) == 1
    assert aggregated_jaccard(single, empty) == 0
    assert aggregated_jaccard(empty, single) == 0


def test_maps_of_different_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="the same size"):
        find_overlaps(np.zeros((3, 3), int), np.zeros((3, 4), int))


def disc(row: float, column: float, number: int, radius: float = 10, size: int = 60) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size]
    return number * ((rows - row) ** 2 + (columns - column) ** 2 <= radius**2)


def test_shifted_discs_match_up_to_a_known_shift() -> None:
    """By the area of their intersection, the IoU of two shifted discs of radius 10 passes 0.5 between 5 and 6 px."""
    truth = disc(20, 20, 1)
    for shift, hits in ((0, 1), (5, 1), (6, 0), (25, 0)):
        matches = match_objects(find_overlaps(truth, disc(20, 20 + shift, 7)))
        counts = (matches.true_positives, matches.false_positives, matches.false_negatives)
        assert counts == (hits, 1 - hits, 1 - hits), shift
    area = match_objects(find_overlaps(truth, disc(20, 27, 7)), "area")
    assert area.true_positives == 1, "more than half of the area is covered at a shift of 7"


@pytest.mark.parametrize(
    ("radius", "hits"), [(4, {"own-area": 1}), (10, {"iou": 1, "area": 1, "own-area": 1}), (20, {"area": 1})]
)
def test_rules_differ_in_the_area_that_is_half_covered(radius: float, hits: dict[OverlapRule, int]) -> None:
    """With the same center: a small object is inside of the nucleus, and a large one contains it."""
    matches = find_overlaps(disc(30, 30, 1), disc(30, 30, 1, radius))
    assert {rule: match_objects(matches, rule).true_positives for rule in get_args(OverlapRule)} == {
        "iou": 0,
        "area": 0,
        "own-area": 0,
    } | hits


def test_a_large_object_matches_a_single_nucleus() -> None:
    truth = disc(15, 15, 1, 6) + disc(15, 30, 2, 6)
    matches = match_objects(find_overlaps(truth, np.ones((60, 60), int)), "area")
    assert matches == ObjectCounts(1, 0, 1, pytest.approx(113 / 3600))


def test_two_halves_of_a_nucleus_are_at_most_one_match() -> None:
    truth = np.array([[1, 1, 1, 1]])
    assert match_objects(find_overlaps(truth, np.array([[1, 1, 2, 2]]))).true_positives == 1
    assert match_objects(find_overlaps(truth, np.array([[1, 1, 2, 3]]))).f1 == pytest.approx(2 / 4)


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
    """Return AJI+ for every one-to-one assignment with the highest sum of IoUs; several may have the same sum."""
    t, p = sorted(set(truth.flat) - {0}), sorted(set(predicted.flat) - {0})
    best, values = -1.0, set()
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
            best, values = total, {score}
        elif total > best - 1e-9:
            values.add(score)
    return values


@given(maps, maps)
def test_aji_plus_agrees_with_its_definition(truth: np.ndarray, predicted: np.ndarray) -> None:
    value = aggregated_jaccard_plus(truth, predicted)
    assert any(value == pytest.approx(score) for score in slow_aji_plus(truth, predicted))


@given(maps, maps)
def test_panoptic_quality_agrees_with_its_definition(truth: np.ndarray, predicted: np.ndarray) -> None:
    """Maps with an IoU of exactly 0.5 are left out: it is a match here, and none by the definition."""
    matches = find_overlaps(truth, predicted)
    if (matches.iou == 0.5).any():
        return
    assert match_objects(matches).panoptic_quality == pytest.approx(slow_pq(truth, predicted))


def test_scores_of_empty_maps() -> None:
    empty, single = np.zeros((3, 3), int), np.eye(3, dtype=int)
    for score in (aggregated_jaccard_plus, dice):
        assert score(empty, empty) == 1
        assert score(single, empty) == score(empty, single) == 0
        assert score(single, 5 * single) == 1
    nothing = match_objects(find_overlaps(empty, empty))
    assert nothing.f1 == nothing.panoptic_quality == 1
    wrong = match_objects(find_overlaps(single, empty)) + match_objects(find_overlaps(empty, single))
    assert wrong == ObjectCounts(0, 1, 1, 0.0)
    assert wrong.f1 == wrong.panoptic_quality == 0


def test_dice_counts_pixels() -> None:
    assert dice(np.array([[1, 1, 0, 2]]), np.array([[3, 0, 0, 3]])) == pytest.approx(2 * 2 / 5)
