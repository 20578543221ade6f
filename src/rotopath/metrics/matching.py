"""Detection of small objects: which detections hit, and what that is worth at any threshold.

In: true places, detected places and their scores. Out: matches from which F1, precision and recall at every threshold,
and the best threshold follow.

How well two maps of numbered objects agree.

In: two label maps (H, W), 0 for background. Out: overlaps of their objects, and scores made from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy import sparse
from scipy.optimize import linear_sum_assignment

from rotopath.metrics.classification import cuts

Floats = NDArray[np.float64]
Rule = Literal["amida13", "one-to-one"]


@dataclass(frozen=True)
class Matches:
    """For each true object, the highest threshold at which it is found; for each false detection, its score."""

    found_at: Floats  # (t,); -inf for an object that no threshold finds
    false: Floats  # (f,)


@dataclass(frozen=True)
class Counts:
    """Hits, false detections and misses at a threshold."""

    hits: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        return self.hits / (self.hits + self.false) if self.hits + self.false else 0.0

    @property
    def recall(self) -> float:
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 0.0

    @property
    def f1(self) -> float:
        """2·TP / (2·TP + FP + FN); 1 where there is nothing to find and nothing is found."""
        total = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / total if total else 1.0


def match(truth: Floats, detected: Floats, scores: Floats, radius_px: float, rule: Rule = "amida13") -> Matches:
    """Match the detections (d, 2) of an image with its objects (t, 2), within a radius.

    AMIDA13 counts several detections of one object once, and does not punish the surplus. One to one, as in MIDOG, the
    highest score goes first and takes the nearest object that is free; the surplus is false.
    """
    distance = np.hypot(*(truth[:, None] - detected[None]).transpose(2, 0, 1)).reshape(len(truth), len(detected))
    near = distance <= radius_px
    found_at = np.full(len(truth), -np.inf)
    if rule == "amida13":
        for i, hits in enumerate(near):
            found_at[i] = scores[hits].max(initial=-np.inf)
        return Matches(found_at, scores[~near.any(axis=0)])
    # A lower threshold only adds detections behind those that were matched already, so one pass serves all thresholds.
    false = []
    for j in np.argsort(-scores, kind="stable"):
        free = near[:, j] & np.isneginf(found_at)
        if free.any():
            found_at[np.where(free, distance[:, j], np.inf).argmin()] = scores[j]
        else:
            false.append(scores[j])
    return Matches(found_at, np.array(false, np.float64))


def pool(matches: Sequence[Matches]) -> Matches:
    """The matches of several images, taken together."""
    return Matches(
        np.concatenate([one.found_at for one in matches] or [np.empty(0)]),
        np.concatenate([one.false for one in matches] or [np.empty(0)]),
    )


def count(matches: Matches, threshold: float) -> Counts:
    """What happens when detections with at least this score count."""
    hits = int((matches.found_at >= threshold).sum())
    return Counts(hits, int((matches.false >= threshold).sum()), len(matches.found_at) - hits)


def best_threshold(matches: Matches) -> float:
    """The threshold with the highest F1; the highest one of equals."""
    candidates = cuts(_scores(matches))
    if not len(candidates):
        return 0.5
    hits = len(matches.found_at) - np.searchsorted(np.sort(matches.found_at), candidates)
    false = len(matches.false) - np.searchsorted(np.sort(matches.false), candidates)
    f1 = 2 * hits / np.maximum(hits + false + len(matches.found_at), 1)
    return float(candidates[f1 == f1.max()][-1])


def _scores(matches: Matches) -> Floats:
    return np.concatenate([matches.found_at[np.isfinite(matches.found_at)], matches.false])


HitRule = Literal["iou", "area", "own-area"]


@dataclass(frozen=True)
class Overlaps:
    """Pairs of objects that share pixels, with the numbers 0, 1, ... of the objects in either map."""

    truth_areas: NDArray[np.int64]  # (t,)
    predicted_areas: NDArray[np.int64]  # (p,)
    truth: NDArray[np.int64]  # (k,) objects of the pairs
    predicted: NDArray[np.int64]  # (k,)
    shared: NDArray[np.int64]  # (k,) pixels in common

    @property
    def iou(self) -> NDArray[np.float64]:
        union = self.truth_areas[self.truth] + self.predicted_areas[self.predicted] - self.shared
        return self.shared / union

    def without_small(self, least_px: float) -> "Overlaps":
        """As if predicted objects of fewer pixels were not there."""
        large = self.predicted_areas >= least_px
        kept = large[self.predicted]
        place = np.cumsum(large) - 1
        return Overlaps(
            self.truth_areas,
            self.predicted_areas[large],
            self.truth[kept],
            place[self.predicted[kept]],
            self.shared[kept],
        )


def overlaps(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> Overlaps:
    """All pairs of objects that overlap; any numbers from 1 may name the objects."""
    if truth.shape != predicted.shape:
        raise ValueError(f"Two label maps of one image must have one size; got {truth.shape} and {predicted.shape}.")
    shape = (int(truth.max(initial=0)) + 1, int(predicted.max(initial=0)) + 1)
    pixels = np.ones(truth.size, np.int64)
    table = sparse.coo_array((pixels, (truth.ravel(), predicted.ravel())), shape).tocsr()  # which adds up equal pairs
    truth_areas, areas = table.sum(axis=1), table.sum(axis=0)
    truth_areas[0] = areas[0] = 0  # background is no object
    # Numbers that no pixel has leave gaps, which the numbering of objects closes.
    truth_place, place = np.cumsum(truth_areas > 0) - 1, np.cumsum(areas > 0) - 1
    pairs = table.tocoo()
    rows, columns = pairs.coords
    objects = (rows > 0) & (columns > 0)
    return Overlaps(
        truth_areas[truth_areas > 0],
        areas[areas > 0],
        truth_place[rows[objects]],
        place[columns[objects]],
        pairs.data[objects],
    )


def aggregated_jaccard(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """AJI after Kumar et al. (2017): shared pixels of best matches over their unions and all that matched nothing.

    >>> a = np.array([[1, 1, 0, 2]])
    >>> rp.metrics.aggregated_jaccard(a, np.array([[5, 0, 0, 3]]))
    0.6666666666666666
    """
    found = overlaps(truth, predicted)
    best = np.full(len(found.truth_areas), -1)  # the pair with the highest IoU of each true object
    for pair in np.argsort(found.iou, kind="stable"):
        best[found.truth[pair]] = pair
    matched = best[best >= 0]
    used = np.zeros(len(found.predicted_areas), bool)
    used[found.predicted[matched]] = True
    shared = found.shared[matched].sum()
    areas = found.truth_areas.sum() + found.predicted_areas[found.predicted[matched]].sum()
    union = areas - shared + found.predicted_areas[~used].sum()
    return float(shared / union) if union else 1.0


def aggregated_jaccard_plus(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """AJI+: as AJI, but each predicted object serves one true object only, matched for the highest sum of IoUs."""
    found = overlaps(truth, predicted)
    pairs = _best_pairs(found)
    shared = found.shared[pairs].sum()
    union = found.truth_areas.sum() + found.predicted_areas.sum() - shared
    return float(shared / union) if union else 1.0


@dataclass(frozen=True)
class ObjectMatches:
    """One-to-one matches of objects, of which scores are made; those of several images add up."""

    hits: int
    false: int
    missed: int
    iou_sum: float  # of the hits

    def __add__(self, other: "ObjectMatches") -> "ObjectMatches":
        return ObjectMatches(
            self.hits + other.hits, self.false + other.false, self.missed + other.missed, self.iou_sum + other.iou_sum
        )

    @property
    def f1(self) -> float:
        total = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / total if total else 1.0

    @property
    def panoptic_quality(self) -> float:
        """F1 times the mean IoU of the hits."""
        total = 2 * self.hits + self.false + self.missed
        return 2 * self.iou_sum / total if total else 1.0


def match_objects(found: Overlaps, rule: HitRule = "iou") -> ObjectMatches:
    """Match objects that share half of their union, of the true one's area ("area") or the found one's ("own-area")."""
    share = {
        "iou": found.iou,
        "area": found.shared / found.truth_areas[found.truth],
        "own-area": found.shared / found.predicted_areas[found.predicted],
    }[rule]
    truth_free, predicted_free = np.ones(len(found.truth_areas), bool), np.ones(len(found.predicted_areas), bool)
    hits, iou_sum = 0, 0.0
    for pair in np.argsort(-share, kind="stable"):
        if share[pair] < 0.5:
            break
        i, j = found.truth[pair], found.predicted[pair]
        if truth_free[i] and predicted_free[j]:
            truth_free[i] = predicted_free[j] = False
            hits, iou_sum = hits + 1, iou_sum + float(found.iou[pair])
    return ObjectMatches(hits, int(predicted_free.sum()), int(truth_free.sum()), iou_sum)


def dice(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """Twice the pixels that both call an object, over those that either does; 1 where neither does."""
    total = (truth > 0).sum() + (predicted > 0).sum()
    return float(2 * ((truth > 0) & (predicted > 0)).sum() / total) if total else 1.0


def _best_pairs(found: Overlaps) -> NDArray[np.int64]:
    """The pairs of a one-to-one matching with the highest sum of IoUs."""
    shape = (len(found.truth_areas), len(found.predicted_areas))
    pair_at = np.full(shape, -1)
    pair_at[found.truth, found.predicted] = np.arange(len(found.shared))
    iou = np.zeros(shape)
    iou[found.truth, found.predicted] = found.iou
    rows, columns = linear_sum_assignment(iou, maximize=True)
    chosen = pair_at[rows, columns]
    kept: NDArray[np.int64] = chosen[chosen >= 0]
    return kept
