"""Thresholds worth trying: one for every way in which scores can be cut in two."""

import numpy as np
from numpy.typing import NDArray


def cuts(scores: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each distinct score, rising, a threshold that admits it and all above: halfway down to the next lower one.

    >>> from rotopath.metrics.thresholds import cuts
    >>> cuts(np.array([3.0, 1.0, 2.0, 1.0])).tolist()
    [1.0, 1.5, 2.5]
    """
    distinct = np.unique(scores)
    lower = np.concatenate([distinct[:1], distinct[:-1]])
    middle = lower + (distinct - lower) / 2
    return np.where(middle > lower, middle, distinct)  # nothing lies between two neighbouring floats
