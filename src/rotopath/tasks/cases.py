"""What tasks share when they score: counts put together by patient, and intervals from redrawn patients.

In: what was counted in each picture. Out: the sums of each case, and the middle 95 % of a score of redrawn sums, or
nothing where a single case cannot tell. A task's main score is a ratio of sums over cases, which `tally` gives.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rotopath.evaluation.bootstrap import confidence_interval

Numbers = NDArray[np.float64]


def sum_by_case(cases: Sequence[str], counts: Numbers) -> tuple[list[str], Numbers]:
    """The names of the cases in order, and what was counted in the pictures (n, k) of each, (cases, k)."""
    names, which = np.unique(np.array(cases), return_inverse=True)
    sums = np.zeros((len(names), counts.shape[1]))
    np.add.at(sums, which, counts)
    return names.tolist(), sums


def tally_objects(counts: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Hits, false and missed of each case as the two numbers whose sums over cases have F1 as their ratio."""
    return {
        case: (2 * one["hits"], 2 * one["hits"] + one["false"] + one["missed"]) for case, one in sorted(counts.items())
    }


def find_interval(score: Callable[[Numbers], float], sums: Numbers) -> list[float] | None:
    """The interval of a score of sums (k,) over cases, for the sums of each case (cases, k)."""
    if len(sums) < 2:
        return None
    low, high = confidence_interval(lambda drawn: score(sums[drawn].sum(axis=0)), len(sums))
    return None if math.isnan(low) or math.isnan(high) else [low, high]
