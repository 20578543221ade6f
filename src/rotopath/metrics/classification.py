"""Thresholds worth trying: one for every way in which scores can be cut in two.

Classification: accuracy, ranking, confusion, calibration.

In: numbers of classes, and scores, higher for the likelier class. Out: numbers, and, of two classes, the threshold with
the highest accuracy.
"""

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata


def cuts(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each distinct score, rising, a threshold that admits it and all above: halfway down to the next lower one.

    >>> from rotopath.metrics.classification import cuts
    >>> cuts(np.array([3.0, 1.0, 2.0, 1.0])).tolist()
    [1.0, 1.5, 2.5]
    """
    distinct = np.unique(scores)
    lower = np.concatenate([distinct[:1], distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    return np.where(middle > lower, middle, distinct)  # nothing lies between two neighbouring floats


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


def macro_auc(labels: Ints, scores: Floats) -> float:
    """The mean over classes of the AUC of each against all others, for scores (n, K); of those that have both.

    >>> from rotopath.metrics.classification import macro_auc
    >>> macro_auc(np.array([0, 1, 2]), np.eye(3))
    1.0
    """
    each = [auc((labels == k).astype(np.int64), scores[:, k]) for k in range(scores.shape[1])]
    known = [value for value in each if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def confusion_matrix(labels: Ints, decided: Ints, classes: int) -> Ints:
    """How many inputs of each class (rows) were taken for each class (columns).

    >>> from rotopath.metrics.classification import confusion_matrix
    >>> confusion_matrix(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [[1, 0], [1, 1]]
    """
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, decided), 1)
    return matrix


def balanced_accuracy(labels: Ints, decided: Ints, classes: int) -> float:
    """The mean over classes of the fraction of its inputs that were recognised; of classes that there are."""
    matrix = confusion_matrix(labels, decided, classes)
    present = matrix.sum(axis=1) > 0
    return float((matrix.diagonal()[present] / matrix[present].sum(axis=1)).mean())


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
