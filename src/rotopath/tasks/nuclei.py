"""Nuclei: objects grown from seeds inside of them up to their borders.

In: maps of inside, border and background, and label maps of the true nuclei. Out: label maps, the thresholds with the
highest F1 over objects, and scores. A field's evidence is large and looked at once, so that a generator of it will do.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from skimage.segmentation import watershed
from torch import Tensor

from rotopath.data.annotations import read_nuclei
from rotopath.data.collection import Picture
from rotopath.data.nuclei import BACKGROUND, BORDER, INSIDE
from rotopath.evaluation.overlap import (
    HitRule,
    ObjectMatches,
    Overlaps,
    aggregated_jaccard,
    aggregated_jaccard_plus,
    dice,
    match_objects,
    overlaps,
)
from rotopath.tasks.cases import Numbers, find_interval, sum_by_case, tally_objects
from rotopath.tasks.prediction import Prediction

SCORE = "f1"  # the main one
LEAST_SEED_PX = 20  # smaller ones are specks inside of a nucleus that has a seed already
INSIDE_TRIED = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BACKGROUND_TRIED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
LEAST_PX_TRIED = (45, 80, 110, 140, 170)  # at 0.25 µm/px discs of about 2 to 4 µm across
NOTHING = ObjectMatches(0, 0, 0, 0.0)


@dataclass(frozen=True)
class Evidence:
    """One field: its nuclei, and the probabilities from which any thresholds make objects."""

    name: str
    case: str
    truth: NDArray[np.int32]  # (H, W)
    prediction: Prediction


def loss(logits: Tensor, targets: Tensor, class_weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of logits (B, 3, h, w) and classes (B, h, w), each pixel weighted by the weight (3,) of its class.

    It is the mean over pixels, and not over weights, so that the losses of the parts of a batch make up that of it.
    """
    weights = None if class_weights is None else class_weights.to(logits)
    return F.cross_entropy(logits, targets, weights, reduction="none").mean()


def decode(prediction: Prediction, point: Mapping[str, float]) -> NDArray[np.int32]:
    """A label map: seeds are surely inside, nuclei are what is not surely background, and borders are where they meet.

    The point's "inside" is the least probability of a seed, its "background" the least of what is no nucleus, and its
    "least_px" the area below which an object is debris.
    """
    return _drop_small(_grow(prediction, point["inside"], point["background"]), point["least_px"])


def _grow(prediction: Prediction, least_inside: float, least_background: float) -> NDArray[np.int32]:
    inside, border, background = (prediction.probabilities[i] for i in (INSIDE, BORDER, BACKGROUND))
    regions, count = ndimage.label(background < least_background)
    labels, _ = ndimage.label((regions > 0) & (inside >= least_inside))
    seeds = _drop_small(labels, LEAST_SEED_PX)
    # Slender nuclei are all border: a region without any seed is a nucleus of its own.
    seeded = np.bincount(regions[seeds > 0], minlength=count + 1) > 0
    alone = np.where(seeded, 0, np.arange(count + 1))[regions]
    seeds = np.where(alone > 0, alone + seeds.max(), seeds)
    grown: NDArray[np.int32] = watershed(border, seeds, mask=regions > 0)  # type: ignore[no-untyped-call]
    return grown


def examine(prediction: Prediction, picture: Picture, spacing_um_px: float) -> Evidence:
    """The maps of a field beside its nuclei."""
    truth = read_nuclei(picture, spacing_um_px)
    if prediction.probabilities.shape[1:] != truth.shape:
        raise ValueError(
            f"{picture.name} has nuclei on {truth.shape[0]} × {truth.shape[1]} px, but was predicted on "
            f"{prediction.probabilities.shape[1]} × {prediction.probabilities.shape[2]} px; use one spacing for both."
        )
    return Evidence(picture.name, picture.case, truth, prediction)


def choose_point(evidence: Iterable[Evidence], rule: HitRule = "iou") -> dict[str, float]:
    """Of a grid of thresholds those with the highest F1 over the objects of all fields; of equals nearest to ½."""
    tried = sorted(product(INSIDE_TRIED, BACKGROUND_TRIED), key=lambda pair: sum(abs(one - 0.5) for one in pair))
    points = [(*pair, least_px) for pair in tried for least_px in LEAST_PX_TRIED]
    matches = dict.fromkeys(points, NOTHING)
    for one in evidence:
        for pair in tried:
            found = _overlaps(one.truth, _grow(one.prediction, *pair))
            for least_px in LEAST_PX_TRIED:
                matches[*pair, least_px] += match_objects(found.without_small(least_px), rule)
    best = max(points, key=lambda point: matches[point].f1)  # the first of equals
    return dict(zip(("inside", "background", "least_px"), best, strict=True))


def score(evidence: Iterable[Evidence], point: Mapping[str, float], rule: HitRule = "iou") -> dict[str, object]:
    """F1 and PQ over all objects, means over fields of AJI, AJI+ and Dice, and intervals of F1 and AJI over cases."""
    images: dict[str, dict[str, float]] = {}
    cases: list[str] = []
    rows: list[tuple[float, ...]] = []
    for one in evidence:
        labels = decode(one.prediction, point)
        found = match_objects(_overlaps(one.truth, labels), rule)
        images[one.name] = _describe(found) | {
            "aji": aggregated_jaccard(one.truth, labels),
            "aji_plus": aggregated_jaccard_plus(one.truth, labels),
            "dice": dice(one.truth, labels),
        }
        cases.append(one.case or one.name)
        means = [images[one.name][key] for key in ("aji", "aji_plus", "dice")]
        rows.append((found.hits, found.false, found.missed, found.iou_sum, *means, 1))
    if not rows:
        raise ValueError("There are no fields to score.")
    names, sums = sum_by_case(cases, np.array(rows, np.float64))
    total = sums.sum(axis=0)
    aji, aji_plus, overlap = total[4:7] / total[7]
    return {
        "rule": rule,
        "point": dict(point),
        **_describe(_matches(total)),
        "f1_interval": find_interval(lambda drawn: _matches(drawn).f1, sums),
        "aji": float(aji),
        "aji_interval": find_interval(lambda drawn: float(drawn[4] / drawn[7]), sums),
        "aji_plus": float(aji_plus),
        "dice": float(overlap),
        "cases": {name: _describe(_matches(one)) for name, one in zip(names, sums, strict=True)},
        "images": images,
    }


def tally(scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """For each case the two numbers whose sums over cases have F1 as their ratio."""
    return tally_objects(scores["cases"])


def _overlaps(truth: NDArray[np.int32], labels: NDArray[np.int32]) -> Overlaps:
    objects = (truth > 0) | (labels > 0)  # the rest counts for nothing, and costs most
    return overlaps(truth[objects], labels[objects])


def _matches(total: Numbers) -> ObjectMatches:
    hits, false, missed = (int(value) for value in total[:3])
    return ObjectMatches(hits, false, missed, float(total[3]))


def _describe(found: ObjectMatches) -> dict[str, float]:
    return {
        "f1": found.f1,
        "pq": found.panoptic_quality,
        "hits": found.hits,
        "false": found.false,
        "missed": found.missed,
    }


def _drop_small(labels: NDArray[np.int32], least_px: float) -> NDArray[np.int32]:
    """Without the objects that have fewer pixels, and those that are left numbered from 1."""
    large = np.bincount(labels.ravel()) >= least_px
    large[0] = False
    numbers = np.cumsum(large, dtype=np.int32) * large
    return numbers[labels].astype(np.int32)
