"""Classification into two classes: accuracy, ranking, calibration.

In: labels 0 and 1, and scores, higher for class 1. Out: numbers, and the threshold with the highest accuracy.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from rotopath.evaluation.thresholds import cuts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
CALIBRATION_BINS = 15


def accuracy(labels: Ints, scores: Floats, threshold: float) -> float:
    """The share of inputs on the right side of the threshold."""
    return float(((scores >= threshold) == (labels == 1)).mean())


def best_threshold(labels: Ints, scores: Floats) -> float:
    """The threshold with the highest accuracy; the one nearest to ½ of equals."""
    candidates = np.append(cuts(scores), np.nextafter(scores.max(), np.inf))  # the last one admits nothing
    positives, negatives = np.sort(scores[labels == 1]), np.sort(scores[labels != 1])
    right = len(positives) - np.searchsorted(positives, candidates) + np.searchsorted(negatives, candidates)
    best = candidates[right == right.max()]
    return float(best[np.abs(best - 0.5).argmin()])


def auc(labels: Ints, scores: Floats) -> float:
    """The chance that an input of class 1 has a higher score than one of class 0; ties count half."""
    positives, negatives = int((labels == 1).sum()), int((labels != 1).sum())
    if not positives or not negatives:
        return float("nan")
    ranks = rankdata(scores)[labels == 1].sum() - positives * (positives + 1) / 2
    return float(ranks / (positives * negatives))


def calibration(labels: Ints, probabilities: Floats, bins: int = CALIBRATION_BINS) -> tuple[Floats, Floats, Ints]:
    """In equal bins of probability: the mean probability, the share of class 1, and how many there are."""
    which = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    counts = np.bincount(which, minlength=bins)
    filled = counts > 0
    predicted = np.bincount(which, probabilities, minlength=bins)[filled] / counts[filled]
    observed = np.bincount(which, labels == 1, minlength=bins)[filled] / counts[filled]
    return predicted, observed, counts[filled]


def calibration_error(labels: Ints, probabilities: Floats, bins: int = CALIBRATION_BINS) -> float:
    """The expected calibration error: how far shares are from probabilities, on average over inputs."""
    predicted, observed, counts = calibration(labels, probabilities, bins)
    return float((np.abs(predicted - observed) * counts).sum() / counts.sum())
