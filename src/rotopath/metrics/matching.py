"""Match predictions to the ground truth, and compute F1, PQ, AJI, AJI+, Dice and the FROC curve.

For points, detections are matched to annotated points. F1 and the FROC curve are computed from the numbers of true
positives, false positives and false negatives at score thresholds. For objects, predicted objects are matched to
annotated objects. F1, panoptic quality (PQ), the aggregated Jaccard index (AJI, AJI+) and the Dice coefficient are
computed from two label maps (H, W): 0 is background, and all pixels with the same other number are one object. A
matching rule, such as "one-to-one", defines which predictions count as true positives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from rotopath.metrics.classification import (
    HasCase,
    Numbers,
    candidate_thresholds,
    interval_unit,
    score_interval,
    sum_by_case,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
PointRule = Literal["amida13", "one-to-one"]
OverlapRule = Literal["iou", "area", "own-area"]

MIN_OVERLAP = 0.5  # objects match if they share at least this fraction of an area; the matching rule defines which area
FROC_POINTS = 200  # maximum number of points of a FROC curve


@dataclass(frozen=True)
class Counts:
    """Numbers of true positives (TP), false positives (FP) and false negatives (FN)."""

    true_positives: int
    false_positives: int
    false_negatives: int

    @property
    def precision(self) -> float:
        """TP / (TP + FP); 0 if nothing was predicted."""
        predicted = self.true_positives + self.false_positives
        return self.true_positives / predicted if predicted else 0.0

    @property
    def recall(self) -> float:
        """TP / (TP + FN); 0 if nothing is annotated."""
        actual = self.true_positives + self.false_negatives
        return self.true_positives / actual if actual else 0.0

    @property
    def f1(self) -> float:
        """2·TP / (2·TP + FP + FN); 1 if nothing is annotated and nothing was predicted."""
        total = 2 * self.true_positives + self.false_positives + self.false_negatives
        return 2 * self.true_positives / total if total else 1.0

    def to_scores(self) -> dict[str, float]:
        """Return F1, precision, recall and the counts. The keys are their names in result files."""
        return {"f1": self.f1, "precision": self.precision, "recall": self.recall, **self._named_counts()}

    def _named_counts(self) -> dict[str, float]:
        return {"hits": self.true_positives, "false": self.false_positives, "missed": self.false_negatives}


# Points


@dataclass(frozen=True)
class PointMatches:
    """Matches of detections to t annotated points, with f false positives.

    `count_at_threshold` computes TP, FP and FN at any score threshold from these matches.
    """

    detected_at: Floats  # (t,) highest score threshold at which each annotated point is detected; -inf if never
    false_scores: Floats  # (f,) scores of the detections without a match


def match_points(
    truth: Floats, detected: Floats, scores: Floats, radius_px: float, rule: PointRule = "amida13"
) -> PointMatches:
    """Match the detections of an image to annotated points at a distance of up to `radius_px` pixels.

    `truth` (t, 2) are the annotated points and `detected` (d, 2) the detections, as (row, column) in pixels. `scores`
    (d,) are the scores of the detections. `rule` is the matching rule:

    - "amida13", of the AMIDA13 challenge: an annotated point is a true positive if at least one detection is within the
      radius. Several detections of one point count once.
    - "one-to-one", as in the MIDOG challenge: a detection matches at most one point. Detections are matched in the
      order of their scores, the highest first, each to the nearest point within the radius that has no match yet.

    With both rules, detections without a match are false positives.
    """
    distance = np.hypot(*(truth[:, None] - detected[None]).transpose(2, 0, 1)).reshape(len(truth), len(detected))
    near = distance <= radius_px
    detected_at = np.full(len(truth), -np.inf)
    if rule == "amida13":
        for i, in_reach in enumerate(near):
            detected_at[i] = scores[in_reach].max(initial=-np.inf)
        return PointMatches(detected_at, scores[~near.any(axis=0)])
    # One pass is enough for all thresholds: detections with lower scores do not change matches of higher scores.
    false_scores = []
    for j in np.argsort(-scores, kind="stable"):
        free = near[:, j] & np.isneginf(detected_at)
        if free.any():
            detected_at[np.where(free, distance[:, j], np.inf).argmin()] = scores[j]
        else:
            false_scores.append(scores[j])
    return PointMatches(detected_at, np.array(false_scores, np.float64))


def pool_matches(matches: Sequence[PointMatches]) -> PointMatches:
    """Combine the matches of several images into one `PointMatches`."""
    return PointMatches(
        np.concatenate([image.detected_at for image in matches] or [np.empty(0)]),
        np.concatenate([image.false_scores for image in matches] or [np.empty(0)]),
    )


def count_at_threshold(matches: PointMatches, threshold: float) -> Counts:
    """Return the counts of true positives, false positives and false negatives at a score threshold.

    Detections with scores below `threshold` are ignored.
    """
    true_positives = int((matches.detected_at >= threshold).sum())
    false_positives = int((matches.false_scores >= threshold).sum())
    return Counts(true_positives, false_positives, len(matches.detected_at) - true_positives)


def best_f1_threshold(matches: PointMatches) -> float:
    """Return the score threshold with the highest F1; 0.5 if there are no detections.

    If several thresholds have the highest F1, the highest of these thresholds is returned.
    """
    detected = matches.detected_at[np.isfinite(matches.detected_at)]
    candidates = candidate_thresholds(np.concatenate([detected, matches.false_scores]))
    if not len(candidates):
        return 0.5
    true_positives = len(matches.detected_at) - np.searchsorted(np.sort(matches.detected_at), candidates)
    false_positives = len(matches.false_scores) - np.searchsorted(np.sort(matches.false_scores), candidates)
    f1 = 2 * true_positives / np.maximum(true_positives + false_positives + len(matches.detected_at), 1)
    return float(candidates[f1 == f1.max()][-1])


def froc_curve(matches: PointMatches, images: int) -> list[dict[str, float]]:
    """Return the FROC curve: sensitivity against false positives per image, from the highest threshold to the lowest.

    `images` is the number of images. Each entry of the list has "threshold", "false_per_image" and "sensitivity", which
    is the recall. There is one entry for each threshold at which a further annotated point is detected, and one entry
    for the lowest score. If these are more than FROC_POINTS entries, FROC_POINTS of them are returned, evenly
    distributed over the list. Without detections, the list is empty.
    """
    detected, false = matches.detected_at[np.isfinite(matches.detected_at)], matches.false_scores
    if not len(detected) and not len(false):
        return []
    corners = np.unique(np.append(detected, min([*detected, *false])))[::-1]
    selected = np.unique(np.linspace(0, len(corners) - 1, min(len(corners), FROC_POINTS)).round().astype(int))
    curve = []
    for threshold in corners[selected]:
        counts = count_at_threshold(matches, threshold)
        false_per_image = counts.false_positives / images
        curve.append({"threshold": float(threshold), "false_per_image": false_per_image, "sensitivity": counts.recall})
    return curve


# Objects of label maps


@dataclass(frozen=True)
class Overlaps:
    """Areas of annotated and predicted objects, and all pairs of annotated and predicted objects that share pixels.

    Objects are numbered from 0, without gaps, in the order of their numbers in the label maps.
    """

    truth_areas: Ints  # (t,) area of each annotated object, in px²
    predicted_areas: Ints  # (p,) area of each predicted object, in px²
    truth: Ints  # (k,) index of the annotated object of each pair
    predicted: Ints  # (k,) index of the predicted object of each pair
    intersection: Ints  # (k,) shared area of each pair, in px²

    @property
    def iou(self) -> Floats:
        """The intersection over union (k,) of each pair."""
        union = self.truth_areas[self.truth] + self.predicted_areas[self.predicted] - self.intersection
        return self.intersection / union

    def without_small(self, least_px: float) -> "Overlaps":
        """Return the overlaps without predicted objects of fewer than `least_px` pixels.

        The result is the same as that of `remove_small` and then `find_overlaps`, but this method is faster.
        """
        large = self.predicted_areas >= least_px
        kept = large[self.predicted]
        new_number = np.cumsum(large) - 1
        return Overlaps(
            self.truth_areas,
            self.predicted_areas[large],
            self.truth[kept],
            new_number[self.predicted[kept]],
            self.intersection[kept],
        )


def remove_small(labels: NDArray[np.integer], min_px: float) -> NDArray[np.int32]:
    """Return a label map (H, W) without objects of fewer than `min_px` pixels, with other objects renumbered from 1."""
    is_large = np.bincount(labels.ravel()) >= min_px
    is_large[0] = False
    numbers = np.cumsum(is_large, dtype=np.int32) * is_large
    kept: NDArray[np.int32] = numbers[labels].astype(np.int32)
    return kept


def find_overlaps(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> Overlaps:
    """Return the areas of the objects in two label maps (H, W) of one image, and all pairs of objects that overlap.

    A pair consists of an annotated and a predicted object. In a label map, 0 is background, and all pixels with the
    same other number are one object. Raises ValueError if the shapes of the maps differ.
    """
    if truth.shape != predicted.shape:
        raise ValueError(
            f"The label maps have the shapes {truth.shape} and {predicted.shape}, but two label maps of one image must "
            f"have the same size; resize one of the maps."
        )
    shape = (int(truth.max(initial=0)) + 1, int(predicted.max(initial=0)) + 1)
    is_object = (truth > 0) | (predicted > 0)  # for speed: most pixels are background in both maps
    truth, predicted = truth[is_object], predicted[is_object]
    pixels = np.ones(truth.size, np.int64)
    table = sparse.coo_array((pixels, (truth, predicted)), shape).tocsr()  # sums duplicate pairs
    truth_areas, predicted_areas = table.sum(axis=1), table.sum(axis=0)
    truth_areas[0] = predicted_areas[0] = 0  # background is not an object
    # The numbers in label maps may have gaps; objects are renumbered from 0 without gaps.
    new_truth, new_predicted = np.cumsum(truth_areas > 0) - 1, np.cumsum(predicted_areas > 0) - 1
    pairs = table.tocoo()
    rows, columns = pairs.coords
    objects = (rows > 0) & (columns > 0)
    return Overlaps(
        truth_areas[truth_areas > 0],
        predicted_areas[predicted_areas > 0],
        new_truth[rows[objects]],
        new_predicted[columns[objects]],
        pairs.data[objects],
    )


@dataclass(frozen=True)
class ObjectCounts(Counts):
    """Numbers of TP, FP and FN for objects that are matched one to one. `+` adds the counts of two images."""

    iou_sum: float  # sum of the intersections over union (IoU) of all matched pairs

    def __add__(self, other: "ObjectCounts") -> "ObjectCounts":
        return ObjectCounts(
            self.true_positives + other.true_positives,
            self.false_positives + other.false_positives,
            self.false_negatives + other.false_negatives,
            self.iou_sum + other.iou_sum,
        )

    @property
    def panoptic_quality(self) -> float:
        """PQ: F1 times the mean IoU of the matched pairs; 1 if nothing is annotated and nothing was predicted."""
        total = 2 * self.true_positives + self.false_positives + self.false_negatives
        return 2 * self.iou_sum / total if total else 1.0

    def to_scores(self) -> dict[str, float]:
        """Return F1, PQ and the counts. The keys are their names in result files."""
        return {"f1": self.f1, "pq": self.panoptic_quality, **self._named_counts()}


def match_objects(overlaps: Overlaps, rule: OverlapRule = "iou") -> ObjectCounts:
    """Match annotated and predicted objects one to one, and return the counts.

    Two objects can match if they share at least half of an area. `rule` defines this area: the union of both objects
    ("iou"), the annotated object ("area") or the predicted object ("own-area"). Pairs are matched in the order of the
    shared fraction of this area, the largest first.
    """
    overlap = {
        "iou": overlaps.iou,
        "area": overlaps.intersection / overlaps.truth_areas[overlaps.truth],
        "own-area": overlaps.intersection / overlaps.predicted_areas[overlaps.predicted],
    }[rule]
    truth_free = np.ones(len(overlaps.truth_areas), bool)
    predicted_free = np.ones(len(overlaps.predicted_areas), bool)
    true_positives, iou_sum = 0, 0.0
    for pair in np.argsort(-overlap, kind="stable"):
        if overlap[pair] < MIN_OVERLAP:
            break
        i, j = overlaps.truth[pair], overlaps.predicted[pair]
        if truth_free[i] and predicted_free[j]:
            truth_free[i] = predicted_free[j] = False
            true_positives, iou_sum = true_positives + 1, iou_sum + float(overlaps.iou[pair])
    return ObjectCounts(true_positives, int(predicted_free.sum()), int(truth_free.sum()), iou_sum)


def aggregated_jaccard(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """Return the aggregated Jaccard index (AJI) of two label maps (H, W), after Kumar et al. (2017).

    Each annotated object is matched to the overlapping predicted object with the highest intersection over union (IoU).
    A predicted object may be matched to several annotated objects. AJI is a fraction. Its numerator is the sum of the
    intersections of all matched pairs. Its denominator is the sum of the unions of these pairs, plus the areas of all
    annotated and predicted objects without a match. AJI is 1 if both maps have no objects.

    >>> truth = np.array([[1, 1, 0, 2]])
    >>> rp.metrics.aggregated_jaccard(truth, np.array([[5, 0, 0, 3]]))
    0.6666666666666666
    """
    overlaps = find_overlaps(truth, predicted)
    best = np.full(len(overlaps.truth_areas), -1)  # pair with the highest IoU for each annotated object; -1 if no pair
    for pair in np.argsort(overlaps.iou, kind="stable"):
        best[overlaps.truth[pair]] = pair
    matched = best[best >= 0]
    used = np.zeros(len(overlaps.predicted_areas), bool)
    used[overlaps.predicted[matched]] = True
    intersection = overlaps.intersection[matched].sum()
    areas = overlaps.truth_areas.sum() + overlaps.predicted_areas[overlaps.predicted[matched]].sum()
    union = areas - intersection + overlaps.predicted_areas[~used].sum()
    return float(intersection / union) if union else 1.0


def aggregated_jaccard_plus(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """Return AJI+ of two label maps (H, W).

    AJI+ is computed like AJI, but objects are matched one to one, with the highest possible sum of IoUs.
    """
    overlaps = find_overlaps(truth, predicted)
    pairs = _best_pairs(overlaps)
    intersection = overlaps.intersection[pairs].sum()
    union = overlaps.truth_areas.sum() + overlaps.predicted_areas.sum() - intersection
    return float(intersection / union) if union else 1.0


def dice(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """Return the Dice coefficient of the foregrounds of two label maps (H, W); 1 if both maps have no objects."""
    total = (truth > 0).sum() + (predicted > 0).sum()
    return float(2 * ((truth > 0) & (predicted > 0)).sum() / total) if total else 1.0


def compare_label_maps(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> dict[str, float]:
    """Return AJI, AJI+ and Dice of two label maps (H, W). The keys are their names in result files."""
    return {
        "aji": aggregated_jaccard(truth, predicted),
        "aji_plus": aggregated_jaccard_plus(truth, predicted),
        "dice": dice(truth, predicted),
    }


def score_objects(
    images: Sequence[HasCase], counts: Sequence[ObjectCounts], agreements: Sequence[Mapping[str, float]]
) -> dict[str, object]:
    """Return the scores of objects in several images. The keys are their names in result files.

    F1 and PQ are computed over all images, for each case and for each image; "mean_f1" is the mean F1 of the images.
    AJI, AJI+ and Dice are computed for each image and averaged over images. F1 and AJI have 95 % confidence intervals.
    For each image, `counts` contains the result of `match_objects`, and `agreements` the result of
    `compare_label_maps`.
    """
    # Columns: TP, FP, FN, sum of IoUs, AJI, AJI+, Dice, and 1, whose sum is the number of images.
    rows = [(*astuple(count), *scores.values(), 1) for count, scores in zip(counts, agreements, strict=True)]
    names, sums = sum_by_case([image.case or image.name for image in images], np.array(rows, np.float64))
    total = sums.sum(axis=0)
    aji, aji_plus, mean_dice = total[4:7] / total[7]
    return {
        **_to_counts(total).to_scores(),
        "f1_interval": score_interval(lambda total: _to_counts(total).f1, sums),
        "mean_f1": sum(count.f1 for count in counts) / len(counts),
        "interval_over": interval_unit(images),
        "aji": float(aji),
        "aji_interval": score_interval(lambda total: float(total[4] / total[7]), sums),
        "aji_plus": float(aji_plus),
        "dice": float(mean_dice),
        "cases": {name: _to_counts(row).to_scores() for name, row in zip(names, sums, strict=True)},
        "images": {
            image.name: count.to_scores() | dict(scores)
            for image, count, scores in zip(images, counts, agreements, strict=True)
        },
    }


def _to_counts(row: Numbers) -> ObjectCounts:
    """Return the `ObjectCounts` of an array whose first four numbers are TP, FP, FN and the sum of IoUs."""
    return ObjectCounts(int(row[0]), int(row[1]), int(row[2]), float(row[3]))


def _best_pairs(overlaps: Overlaps) -> Ints:
    """Match objects one to one with the highest possible sum of IoUs, and return the matched pairs.

    The pairs are returned as indices into the arrays (k,) of `overlaps`.
    """
    shape = (len(overlaps.truth_areas), len(overlaps.predicted_areas))
    pair_at = np.full(shape, -1)
    pair_at[overlaps.truth, overlaps.predicted] = np.arange(len(overlaps.intersection))
    iou = np.zeros(shape)
    iou[overlaps.truth, overlaps.predicted] = overlaps.iou
    rows, columns = linear_sum_assignment(iou, maximize=True)
    assigned = pair_at[rows, columns]
    overlapping: Ints = assigned[assigned >= 0]
    return overlapping
