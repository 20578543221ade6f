"""Score classifications, and compute confidence intervals of any score by bootstrap.

Scores of classifications are the best threshold, AUC, confusion matrix, balanced accuracy and calibration.

An input is what is classified, such as a patch. `labels` (n,) are the true class indices of n inputs. `predicted` (n,)
are the predicted class indices. With two classes, scores are (n,), and a higher score means class 1. With K classes,
scores and probabilities are (n, K): one for each input and class.

A bootstrap resamples cases with replacement. A case is a patient or, for patches, a slide. Cases are resampled instead
of images, because images of one patient are not independent. Results, such as true and false positives, are counted in
each image, and the counts are added up for each case. The score is then computed for many resampled sets of cases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

RESAMPLES = 1000  # number of resampled sets
MIN_CASES = 5  # with fewer cases, there are too few different resampled sets for a useful interval
CALIBRATION_BINS = 15  # number of equal intervals of the probability from 0 to 1


def candidate_thresholds(scores: Floats) -> Floats:
    """Return one threshold for each distinct score, in increasing order.

    The threshold for a score accepts this score and all higher scores. It is halfway between this score and the next
    lower score. The threshold for the lowest score is this score itself: scores equal to a threshold are accepted.

    >>> from rotopath.metrics.classification import candidate_thresholds
    >>> candidate_thresholds(np.array([3.0, 1.0, 2.0, 1.0])).tolist()
    [1.0, 1.5, 2.5]
    """
    distinct = np.unique(scores)
    lower = np.concatenate([distinct[:1], distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    return np.where(middle > lower, middle, distinct)  # no number is between two adjacent floats


def best_accuracy_threshold(labels: Ints, scores: Floats) -> float:
    """Return the score threshold with the highest accuracy, for labels (n,), which are 0 or 1, and scores (n,).

    Inputs whose score is at least the threshold are predicted as class 1. If several thresholds have the highest
    accuracy, the threshold nearest to 0.5 is returned.
    """
    accepts_none = np.nextafter(scores.max(), np.inf)
    candidates = np.append(candidate_thresholds(scores), accepts_none)
    positives, negatives = np.sort(scores[labels == 1]), np.sort(scores[labels != 1])
    correct = len(positives) - np.searchsorted(positives, candidates) + np.searchsorted(negatives, candidates)
    best = candidates[correct == correct.max()]
    return float(best[np.abs(best - 0.5).argmin()])


def auc(labels: Ints, scores: Floats) -> float:
    """Return the area under the ROC curve (AUC) for labels (n,), which are 0 or 1, and scores (n,).

    The AUC is the probability that an input of class 1 has a higher score than an input of class 0. Equal scores count
    half. The AUC is NaN if only one class is present, or if a score is NaN.
    """
    if np.isnan(scores).any():
        return float("nan")
    positives, negatives = np.sort(scores[labels == 1]), np.sort(scores[labels != 1])
    if not len(positives) or not len(negatives):
        return float("nan")
    below, at_most = (int(np.searchsorted(negatives, positives, side).sum()) for side in ("left", "right"))
    return (below + at_most) / (2 * len(positives) * len(negatives))


def macro_auc(labels: Ints, scores: Floats) -> float:
    """Return the AUC of each class against all other classes, averaged over the classes that are present in `labels`.

    `labels` are (n,), and `scores` (n, K). The result is NaN if only one class is present.

    >>> from rotopath.metrics.classification import macro_auc
    >>> macro_auc(np.array([0, 1, 2]), np.eye(3))
    1.0
    """
    per_class = [auc((labels == k).astype(np.int64), scores[:, k]) for k in range(scores.shape[1])]
    known = [value for value in per_class if not np.isnan(value)]
    return float(np.mean(known)) if known else float("nan")


def binary_or_macro_auc(labels: Ints, probabilities: Floats) -> float:
    """Return the AUC for labels (n,) and probabilities (n, K).

    For K = 1, there are two classes, and the only column is the probability of class 1. The result is then the AUC of
    class 1 against class 0. For K > 1, it is the mean AUC of each class against all other classes (`macro_auc`).
    """
    return auc(labels, probabilities[:, 0]) if probabilities.shape[1] == 1 else macro_auc(labels, probabilities)


def auc_interval(labels: Ints, probabilities: Floats, units: Sequence[str]) -> list[float] | None:
    """Return the 95 % confidence interval [low, high] of `binary_or_macro_auc`.

    The bootstrap resamples units, such as slides, instead of inputs. `units` (n,) has the name of the unit of each
    input. Returns None if only one class is present, if there are fewer than MIN_CASES units, or if each resampled set
    of units has only one class.
    """
    _, unit_indices = np.unique(np.array(units), return_inverse=True)
    order = np.argsort(unit_indices, kind="stable")
    inputs_of = np.split(order, np.cumsum(np.bincount(unit_indices))[:-1])
    if len(inputs_of) < MIN_CASES or len(set(labels.tolist())) < 2:
        return None

    def score(drawn: Ints) -> float:
        inputs = np.concatenate([inputs_of[i] for i in drawn])
        return binary_or_macro_auc(labels[inputs], probabilities[inputs])

    low, high = bootstrap_interval(score, len(inputs_of))
    return None if math.isnan(low) or math.isnan(high) else [low, high]


def score_each_class(
    names: Sequence[str], confusion: Ints, labels: Ints, probabilities: Floats
) -> dict[str, dict[str, float | None]]:
    """Return the scores of each class by class name: its number of images, precision, recall, F1 and AUC.

    Each score compares one class with all other classes together. A score is None if it is undefined, such as the
    recall of a class without images. `names` are the K class names. `confusion` (K, K) is the result of
    `confusion_matrix`. `labels` are (n,), and `probabilities` (n, K).
    """
    scores = {}
    for i, name in enumerate(names):
        correct, actual, predicted = int(confusion[i, i]), int(confusion[i].sum()), int(confusion[:, i].sum())
        area = auc((labels == i).astype(np.int64), probabilities[:, i])
        scores[name] = {
            "images": actual,
            "precision": correct / predicted if predicted else None,
            "recall": correct / actual if actual else None,
            "f1": 2 * correct / (actual + predicted) if actual + predicted else None,
            "auc": None if math.isnan(area) else area,
        }
    return scores


def confusion_matrix(labels: Ints, predicted: Ints, classes: int) -> Ints:
    """Return the confusion matrix (K, K): rows are true classes, columns are predicted classes.

    An entry is the number of inputs with this true class and this predicted class. `classes` is the number K.

    >>> from rotopath.metrics.classification import confusion_matrix
    >>> confusion_matrix(np.array([0, 1, 1]), np.array([0, 0, 1]), 2).tolist()
    [[1, 0], [1, 1]]
    """
    matrix = np.zeros((classes, classes), np.int64)
    np.add.at(matrix, (labels, predicted), 1)
    return matrix


def balanced_accuracy(labels: Ints, predicted: Ints, classes: int) -> float:
    """Return the mean recall over the classes that are present in `labels`. `classes` is the number of all classes."""
    matrix = confusion_matrix(labels, predicted, classes)
    present = matrix.sum(axis=1) > 0
    return float((matrix.diagonal()[present] / matrix[present].sum(axis=1)).mean())


def reliability_curve(labels: Ints, probabilities: Floats, bins: int = CALIBRATION_BINS) -> tuple[Floats, Floats, Ints]:
    """Compare predicted probabilities with observed fractions of class 1, in `bins` equal intervals from 0 to 1.

    `labels` (n,) are 0 or 1, and `probabilities` (n,) are the probabilities of class 1. Returns three arrays with one
    entry for each interval that contains a probability: the mean probability, the observed fraction of class 1, and the
    number of inputs.
    """
    indices = np.minimum((probabilities * bins).astype(np.int64), bins - 1)
    counts = np.bincount(indices, minlength=bins)
    filled = counts > 0
    predicted = np.bincount(indices, probabilities, minlength=bins)[filled] / counts[filled]
    observed = np.bincount(indices, labels == 1, minlength=bins)[filled] / counts[filled]
    return predicted, observed, counts[filled]


def calibration_error(labels: Ints, probabilities: Floats, bins: int = CALIBRATION_BINS) -> float:
    """Return the expected calibration error (ECE), for the arguments of `reliability_curve`.

    The ECE is the absolute difference between the mean probability and the observed fraction of class 1 in each
    interval, averaged over the intervals. The weight of an interval is its number of inputs.
    """
    predicted, observed, counts = reliability_curve(labels, probabilities, bins)
    return float((np.abs(predicted - observed) * counts).sum() / counts.sum())


# Confidence intervals


def bootstrap_interval(
    score: Callable[[NDArray[np.int64]], float], units: int, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """Return the bootstrap confidence interval (low, high) of a score, with the confidence level `level`.

    `units` is the number of units that are resampled, such as patients. `score` is a function that takes the indices
    (units,) of resampled units and returns the score of these units. An index may occur more than once. Scores that are
    NaN are ignored; if all scores are NaN, the result is (NaN, NaN). `seed` is the seed of the resampling.
    """
    generator = np.random.default_rng(seed)
    scores = [score(generator.integers(units, size=units)) for _ in range(RESAMPLES)]
    low, high = np.nanquantile(scores, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def score_interval(score: Callable[[Numbers], float], sums: Numbers) -> list[float] | None:
    """Return the 95 % confidence interval [low, high] of a score that is computed from counts.

    `sums` (cases, k) has k counts for each case. `score` is a function that takes k numbers (k,), the total counts of a
    resampled set of cases, and returns the score, or NaN if the score is undefined. Returns None if there are fewer
    than MIN_CASES cases, or if all scores are NaN.
    """
    if len(sums) < MIN_CASES:
        return None
    low, high = bootstrap_interval(lambda drawn: score(sums[drawn].sum(axis=0)), len(sums))
    return None if math.isnan(low) or math.isnan(high) else [low, high]


def sum_by_case(cases: Sequence[str], counts: Numbers) -> tuple[list[str], Numbers]:
    """Add up the counts of the images of each case, and return the sorted case names and the sums (cases, k).

    `cases` (n,) has the case name of each of n images. `counts` (n, k) has k counts for each image.
    """
    names, indices = np.unique(np.array(cases), return_inverse=True)
    sums = np.zeros((len(names), counts.shape[1]))
    np.add.at(sums, indices, counts)
    return names.tolist(), sums


class HasCase(Protocol):
    """Any object that names an image and its case. If the case is unknown, `case` is empty or equals `name`."""

    @property
    def name(self) -> str: ...
    @property
    def case(self) -> str: ...


class ImageCase(NamedTuple):
    """Names of an image and of its case, without the pixels and predictions of the image, to save memory."""

    name: str
    case: str


def interval_unit(images: Sequence[HasCase]) -> str:
    """Return the unit that confidence intervals resample: "images" if all cases are unknown, otherwise "patients"."""
    return "images" if all(image.case in ("", image.name) for image in images) else "patients"


def f1_terms(counts: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Return the numerator and the denominator of F1 for each case, by the name of the case.

    For each case, `counts` has "hits" (true positives), "false" (false positives) and "missed" (false negatives). The
    F1 over all cases is the sum of the numerators divided by the sum of the denominators.
    """
    return {
        case: (2 * values["hits"], 2 * values["hits"] + values["false"] + values["missed"])
        for case, values in sorted(counts.items())
    }
