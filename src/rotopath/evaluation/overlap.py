"""How well two maps of numbered objects agree.

In: two label maps (H, W), 0 for background. Out: overlaps of their objects, and scores made from them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


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


def overlaps(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> Overlaps:
    """All pairs of objects that overlap; any numbers may name the objects."""
    if truth.shape != predicted.shape:
        raise ValueError(f"Two label maps of one image must have one size; got {truth.shape} and {predicted.shape}.")
    truth_numbers, truth_index, truth_areas = np.unique(truth, return_inverse=True, return_counts=True)
    numbers, index, areas = np.unique(predicted, return_inverse=True, return_counts=True)
    pairs, shared = np.unique(truth_index.ravel() * len(numbers) + index.ravel(), return_counts=True)
    rows, columns = np.divmod(pairs, len(numbers))
    objects = (truth_numbers[rows] != 0) & (numbers[columns] != 0)
    # Background sorts among the numbers, at 0; the numbering of objects closes the gap that it leaves.
    truth_place, place = np.cumsum(truth_numbers != 0) - 1, np.cumsum(numbers != 0) - 1
    return Overlaps(
        truth_areas[truth_numbers != 0],
        areas[numbers != 0],
        truth_place[rows[objects]],
        place[columns[objects]],
        shared[objects],
    )


def aggregated_jaccard(truth: NDArray[np.integer], predicted: NDArray[np.integer]) -> float:
    """AJI after Kumar et al. (2017): shared pixels of best matches over their unions and all that matched nothing.

    >>> a = np.array([[1, 1, 0, 2]])
    >>> rp.evaluation.aggregated_jaccard(a, np.array([[5, 0, 0, 3]]))
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
