"""How much predictions change when inputs turn.

In: probabilities of the same inputs at several angles, and the decisions made from them. Out: how far probabilities
scatter, and how many decisions depend on the angle.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rotopath import group

STEPS = 16  # of a full turn: the paper's π/8


@dataclass(frozen=True)
class Robustness:
    deviation: float  # the standard deviation over angles, on average over inputs
    changed: float  # the share of inputs whose decision is not the same at every angle


def list_angles(fair: bool = True) -> list[float]:
    """The angles in degrees at which inputs are compared: steps of 22.5°, offset by half a step if fair.

    The paper's own steps include multiples of 90°, which leave pixels as they are, while the others blur; between the
    steps all angles resample alike, and what is left is the network's doing.

    >>> from rotopath.metrics.robustness import list_angles
    >>> list_angles(fair=False)[:3], list_angles()[:3]
    ([0.0, 22.5, 45.0], [11.25, 33.75, 56.25])
    """
    offset = 360 / STEPS / 2 if fair else 0.0
    return [angle + offset for angle in group.angles(STEPS)]


def measure_robustness(probabilities: NDArray[np.floating], decisions: NDArray[np.generic]) -> Robustness:
    """From probabilities and decisions (angles, inputs), or of further axes, such as pixels that were rotated back."""
    if probabilities.ndim < 2 or 0 in probabilities.shape or decisions.shape != probabilities.shape:
        raise ValueError(
            f"Robustness takes probabilities and decisions (angles, inputs), one or more of each; got shapes "
            f"{probabilities.shape} and {decisions.shape}."
        )
    changed = (decisions != decisions[:1]).any(axis=0)
    return Robustness(float(probabilities.std(axis=0, dtype=np.float64).mean()), float(changed.mean()))
