"""Compute bootstrap confidence intervals of scores, by resampling cases with replacement.

A case is a patient or, for patches, a slide. Cases are resampled instead of images, because images of one patient are
not independent. Results, such as true and false positives, are counted in each image, and the counts are added up for
each case. The score is then computed for many resampled sets of cases.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000  # number of resampled sets
MIN_CASES = 5  # with fewer cases, there are too few different resampled sets for a useful interval

Numbers = NDArray[np.float64]


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
