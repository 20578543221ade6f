"""How sure a score is: confidence intervals by drawing patients again, with replacement.

In: a score as a function of which patients take part. Out: the interval that holds the middle 95 % of redrawn scores.

What tasks share when they score: counts put together by patient, and intervals from redrawn patients.

In: what was counted in each sample. Out: the sums of each case, and the middle 95 % of a score of redrawn sums; no
interval where cases are too few for one to mean anything.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

REDRAWS = 1000


def confidence_interval(
    score: Callable[[NDArray[np.int64]], float], patients: int, seed: int = 0, level: float = 0.95
) -> tuple[float, float]:
    """`score` is given the numbers of the patients that were drawn, some of them more than once."""
    generator = np.random.default_rng(seed)
    redrawn = [score(generator.integers(patients, size=patients)) for _ in range(REDRAWS)]
    low, high = np.nanquantile(redrawn, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


Numbers = NDArray[np.float64]
FEWEST_CASES = 5  # of fewer, redrawing gives the scores of single cases again and again, and no interval


class Named(NamedTuple):
    """A sample by its name, and its case; the case is empty or the name where it is not known."""

    name: str
    case: str


class HasCase(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def case(self) -> str: ...


def name_unit(samples: Sequence[HasCase]) -> str:
    """What intervals redraw: patients, or single images where patients are not known."""
    return "images" if all(sample.case in ("", sample.name) for sample in samples) else "patients"


def sum_by_case(cases: Sequence[str], counts: Numbers) -> tuple[list[str], Numbers]:
    """The names of the cases in order, and what was counted in the samples (n, k) of each, (cases, k)."""
    names, which = np.unique(np.array(cases), return_inverse=True)
    sums = np.zeros((len(names), counts.shape[1]))
    np.add.at(sums, which, counts)
    return names.tolist(), sums


def tally_objects(counts: Mapping[str, Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    """Hits, false and missed of each case as the two numbers whose sums over cases have F1 as their ratio."""
    return {
        case: (2 * each["hits"], 2 * each["hits"] + each["false"] + each["missed"])
        for case, each in sorted(counts.items())
    }


def find_interval(score: Callable[[Numbers], float], sums: Numbers) -> list[float] | None:
    """The interval of a score of sums (k,) over cases, for the sums of each case (cases, k)."""
    if len(sums) < FEWEST_CASES:
        return None
    low, high = confidence_interval(lambda drawn: score(sums[drawn].sum(axis=0)), len(sums))
    return None if math.isnan(low) or math.isnan(high) else [low, high]
