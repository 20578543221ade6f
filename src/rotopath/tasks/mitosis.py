"""Mitosis: figures found as the peaks of a map of probabilities.

In: predictions of fields, and the places of their mitoses. Out: detections, the threshold with the highest F1, and the
scores of AMIDA13: a detection within 7.5 µm of a mitosis is a hit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree
from skimage.morphology import local_maxima
from torch import Tensor

from rotopath.data.annotations import read_points
from rotopath.data.collection import Picture
from rotopath.evaluation.detection import Counts, Matches, Rule, best_threshold, count, match, pool
from rotopath.tasks.binary import binary_cross_entropy
from rotopath.tasks.cases import Numbers, find_interval, sum_by_case, tally_objects
from rotopath.tasks.prediction import Prediction

SCORE = "f1"  # the main one
HIT_UM = 7.5  # 30 px at 0.25 µm/px
SMOOTH_PX = 6.0  # deviation of the Gaussian, a little less than the stride of the network
MERGE_PX = 30.0  # two peaks closer than this are one figure, such as the two halves of one that separates
LEAST_SCORE = 0.01  # of a candidate: no operating point lies lower, and there would be thousands in a field
PEAK_REACH = 8  # places: what the Gaussian reads of a map at a stride of 8 px, and plateaus of a few places
FROC_POINTS = 200


@dataclass(frozen=True)
class Detections:
    """Places (d, 2), as rows and columns in pixels, and scores (d,), which fall."""

    places: NDArray[np.float64]
    scores: NDArray[np.float64]


@dataclass(frozen=True)
class Evidence:
    """One field: where its mitoses are, and where candidates were seen."""

    name: str
    case: str
    truth: NDArray[np.float64]  # (t, 2)
    detections: Detections
    radius_px: float  # within which a detection is a hit


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits (B, 1, 1, 1) and labels (B,)."""
    return binary_cross_entropy(logits, targets)


def decode(prediction: Prediction, point: Mapping[str, float] | None = None) -> Detections:
    """The peaks of the smoothed map that reach the point's threshold; without a point, all that are worth keeping."""
    return merge(find_peaks(prediction, point))


def find_peaks(prediction: Prediction, point: Mapping[str, float] | None = None) -> Detections:
    """All peaks, also those that belong to one figure. Each depends on the map within `PEAK_REACH` places of it."""
    sigma = SMOOTH_PX / prediction.stride_px
    smooth = ndimage.gaussian_filter(prediction.probabilities[0].astype(np.float64), sigma, mode="nearest")
    threshold = LEAST_SCORE if point is None else max(LEAST_SCORE, point["threshold"])
    # A peak may be a plateau of equal values, which is one candidate; a map that is flat all over has none.
    peaks = local_maxima(smooth)  # type: ignore[no-untyped-call]
    plateaus, number = ndimage.label(peaks, np.ones((3, 3)))
    indices = np.array(ndimage.center_of_mass(plateaus > 0, plateaus, range(1, number + 1))).reshape(-1, 2)
    scores = np.asarray(ndimage.maximum(smooth, plateaus, range(1, number + 1)), np.float64).reshape(-1)
    high = scores >= threshold
    return Detections(prediction.places(indices[high] + _offsets(smooth, indices[high])), scores[high])


def merge(found: Detections) -> Detections:
    """The highest first, and of several that are close together that one only."""
    order = np.argsort(-found.scores, kind="stable")
    if not len(order):
        return found
    nearby = cKDTree(found.places).query_ball_point(found.places, np.nextafter(MERGE_PX, 0))
    free = np.ones(len(order), bool)
    kept = []
    for candidate in order:
        if free[candidate]:
            kept.append(candidate)
            free[nearby[candidate]] = False
    return Detections(found.places[kept], found.scores[kept])


def examine(prediction: Prediction, picture: Picture, spacing_um_px: float) -> Evidence:
    """All candidates of a field beside its mitoses."""
    truth = read_points(picture, spacing_um_px)
    return Evidence(picture.name, picture.case, truth, decode(prediction), HIT_UM / spacing_um_px)


def choose_point(evidence: Sequence[Evidence], rule: Rule = "amida13") -> dict[str, float]:
    """The threshold with the highest F1, all fields pooled."""
    return {"threshold": best_threshold(pool([_match(one, rule) for one in evidence]))}


def score(evidence: Sequence[Evidence], point: Mapping[str, float], rule: Rule = "amida13") -> dict[str, object]:
    """F1, precision and recall over all fields and of each case, the interval of F1 over cases, and the FROC curve."""
    if not evidence:
        raise ValueError("There are no fields to score.")
    matches = [_match(one, rule) for one in evidence]
    counts = [count(one, point["threshold"]) for one in matches]
    rows = np.array([(one.hits, one.false, one.missed) for one in counts], np.float64)
    cases, sums = sum_by_case([one.case or one.name for one in evidence], rows)
    pooled = pool(matches)
    return {
        "rule": rule,
        "threshold": point["threshold"],
        "images": len(evidence),
        **_describe(sums.sum(axis=0)),
        "f1_interval": find_interval(lambda total: _counts(total).f1, sums),
        "cases": {case: _describe(total) for case, total in zip(cases, sums, strict=True)},
        "froc": _froc(pooled, len(evidence)),
    }


def tally(scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """For each case the two numbers whose sums over cases have F1 as their ratio."""
    return tally_objects(scores["cases"])


def _match(evidence: Evidence, rule: Rule) -> Matches:
    found = evidence.detections
    return match(evidence.truth, found.places, found.scores, evidence.radius_px, rule)


def _counts(total: Numbers) -> Counts:
    hits, false, missed = (int(value) for value in total)
    return Counts(hits, false, missed)


def _describe(total: Numbers) -> dict[str, float]:
    counts = _counts(total)
    return {
        "f1": counts.f1,
        "precision": counts.precision,
        "recall": counts.recall,
        "hits": counts.hits,
        "false": counts.false,
        "missed": counts.missed,
    }


def _froc(matches: Matches, images: int) -> list[dict[str, float]]:
    """The corners of the FROC curve, where one more mitosis is found, and its end; some of them if there are many."""
    found, false = matches.found_at[np.isfinite(matches.found_at)], matches.false
    if not len(found) and not len(false):
        return []
    corners = np.unique(np.append(found, min([*found, *false])))[::-1]  # falling
    chosen = np.unique(np.linspace(0, len(corners) - 1, min(len(corners), FROC_POINTS)).round().astype(int))
    counted = [(float(threshold), count(matches, threshold)) for threshold in corners[chosen]]
    return [
        {"threshold": threshold, "false_per_image": one.false / images, "sensitivity": one.recall}
        for threshold, one in counted
    ]


def _offsets(values: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far (k, 2) the true peaks lie from the highest values: the tops of parabolas through both neighbours.

    A plateau, or a peak at the rim of the map, stays where it is.
    """
    offsets = np.zeros_like(peaks)
    nearest = peaks.astype(np.int64)
    for axis, size in enumerate(values.shape):
        inner = (nearest == peaks).all(axis=1) & (nearest[:, axis] > 0) & (nearest[:, axis] < size - 1)
        here, step = nearest[inner], np.eye(2, dtype=np.int64)[axis]
        before, middle, after = (values[tuple((here + k * step).T)] for k in (-1, 0, 1))
        bend = 2 * middle - before - after
        sharp = bend > 0
        top = np.zeros(len(here))
        top[sharp] = (after - before)[sharp] / (2 * bend[sharp])
        offsets[inner, axis] = top.clip(-0.5, 0.5)
    return offsets
