"""How sure a score is: confidence intervals by drawing patients again, with replacement.

In: a score as a function of which patients take part. Out: the interval that holds the middle 95 % of redrawn scores.
"""

from collections.abc import Callable

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
