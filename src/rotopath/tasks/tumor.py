"""Tumor: patches with or without tumor in their middle.

In: the probability of tumor of each patch, and its label. Out: the threshold with the highest accuracy, and accuracy,
AUC and calibration.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rotopath.data.collection import DataError, Picture
from rotopath.evaluation.bootstrap import confidence_interval
from rotopath.evaluation.classification import accuracy, auc, best_threshold, calibration, calibration_error
from rotopath.tasks.binary import binary_cross_entropy
from rotopath.tasks.cases import find_interval, sum_by_case

SCORE = "accuracy"  # the main one


@dataclass(frozen=True, slots=True)
class Evidence:
    """One patch: its class, and the probability of tumor."""

    name: str
    case: str  # its slide; empty where that is not known
    label: int
    probability: float


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy of logits (B, 1, 1, 1) and labels (B,)."""
    return binary_cross_entropy(logits, targets)


def decode(prediction: float, point: Mapping[str, float]) -> int:
    """The class: 1 with tumor, 0 without."""
    return int(prediction >= point["threshold"])


def examine(prediction: float, picture: Picture, spacing_um_px: float) -> Evidence:
    """The probability of a patch beside its label."""
    del spacing_um_px  # a label holds at any
    if picture.label is None:
        raise DataError(f"{picture.name} has no label; 0 (normal) or 1 (tumor) is expected.")
    return Evidence(picture.name, picture.case, picture.label, float(prediction))


def choose_point(evidence: Sequence[Evidence]) -> dict[str, float]:
    """The threshold with the highest accuracy."""
    labels, probabilities = _columns(evidence)
    return {"threshold": best_threshold(labels, probabilities)}


def score(evidence: Sequence[Evidence], point: Mapping[str, float]) -> dict[str, object]:
    """Accuracy and its interval over slides, or over patches where a slide is not known; AUC; calibration."""
    labels, probabilities = _columns(evidence)
    right = (probabilities >= point["threshold"]) == (labels == 1)
    by_slide = all(one.case for one in evidence)
    units = [one.case for one in evidence] if by_slide else [str(i) for i in range(len(evidence))]
    names, sums = sum_by_case(units, np.stack([right, np.ones(len(right))], axis=1))
    ranking = auc(labels, probabilities)
    return {
        "threshold": point["threshold"],
        "images": len(evidence),
        "tumor_images": int((labels == 1).sum()),
        "accuracy": accuracy(labels, probabilities, point["threshold"]),
        "accuracy_interval": find_interval(lambda total: float(total[0] / total[1]), sums),
        "interval_over": "slides" if by_slide else "patches",
        "slides": dict(zip(names, sums.tolist(), strict=True)) if by_slide else None,  # patches: right ones, and all
        "wrong": None if by_slide else np.flatnonzero(~right).tolist(),  # by their numbers
        "auc": None if math.isnan(ranking) else ranking,
        "auc_interval": _auc_interval(labels, probabilities, _members(units)),
        "calibration_error": calibration_error(labels, probabilities),
        "reliability": [
            {"predicted": float(predicted), "observed": float(observed), "count": int(number)}
            for predicted, observed, number in zip(*calibration(labels, probabilities), strict=True)
        ],
    }


def tally(scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
    """For each slide, or patch where slides are not known, the two numbers whose sums have accuracy as their ratio."""
    if scores["slides"] is not None:
        return {slide: (right, patches) for slide, (right, patches) in scores["slides"].items()}
    wrong = set(scores["wrong"])
    return {str(i): (float(i not in wrong), 1.0) for i in range(scores["images"])}


def _members(units: Sequence[str]) -> list[NDArray[np.int64]]:
    """The patches of each slide, by their numbers."""
    _, which = np.unique(np.array(units), return_inverse=True)
    order = np.argsort(which, kind="stable")
    return np.split(order, np.cumsum(np.bincount(which))[:-1])


def _auc_interval(
    labels: NDArray[np.int64], probabilities: NDArray[np.float64], members: list[NDArray[np.int64]]
) -> list[float] | None:
    if len(members) < 2 or len(set(labels.tolist())) < 2:
        return None

    def redrawn(drawn: NDArray[np.int64]) -> float:
        chosen = np.concatenate([members[i] for i in drawn])
        return auc(labels[chosen], probabilities[chosen])

    return list(confidence_interval(redrawn, len(members)))


def _columns(evidence: Sequence[Evidence]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if not evidence:
        raise ValueError("There are no patches to score.")
    labels = np.array([one.label for one in evidence], np.int64)
    return labels, np.array([one.probability for one in evidence], np.float64)
