"""Detection of small objects: which detections hit, and what that is worth at any threshold.

In: true places, detected places and their scores. Out: matches from which F1, precision and recall at every threshold,
and the best threshold follow.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rotopath.metrics.thresholds import cuts

Floats = NDArray[np.float64]
Rule = Literal["amida13", "one-to-one"]


@dataclass(frozen=True)
class Matches:
    """For each true object, the highest threshold at which it is found; for each false detection, its score."""

    found_at: Floats  # (t,); -inf for an object that no threshold finds
    false: Floats  # (f,)


@dataclass(frozen=True)
class Counts:
    """Hits, false detections and misses at a threshold."""

    hits: int
    false: int
    missed: int

    @property
    def precision(self) -> float:
        return self.hits / (self.hits + self.false) if self.hits + self.false else 0.0

    @property
    def recall(self) -> float:
        return self.hits / (self.hits + self.missed) if self.hits + self.missed else 0.0

    @property
    def f1(self) -> float:
        """2·TP / (2·TP + FP + FN); 1 where there is nothing to find and nothing is found."""
        total = 2 * self.hits + self.false + self.missed
        return 2 * self.hits / total if total else 1.0


def match(truth: Floats, detected: Floats, scores: Floats, radius_px: float, rule: Rule = "amida13") -> Matches:
    """Match the detections (d, 2) of an image with its objects (t, 2), within a radius.

    AMIDA13 counts several detections of one object once, and does not punish the surplus. One to one, as in MIDOG, the
    highest score goes first and takes the nearest object that is free; the surplus is false.
    """
    distance = np.hypot(*(truth[:, None] - detected[None]).transpose(2, 0, 1)).reshape(len(truth), len(detected))
    near = distance <= radius_px
    found_at = np.full(len(truth), -np.inf)
    if rule == "amida13":
        for i, hits in enumerate(near):
            found_at[i] = scores[hits].max(initial=-np.inf)
        return Matches(found_at, scores[~near.any(axis=0)])
    # A lower threshold only adds detections behind those that were matched already, so one pass serves all thresholds.
    false = []
    for j in np.argsort(-scores, kind="stable"):
        free = near[:, j] & np.isneginf(found_at)
        if free.any():
            found_at[np.where(free, distance[:, j], np.inf).argmin()] = scores[j]
        else:
            false.append(scores[j])
    return Matches(found_at, np.array(false, np.float64))


def pool(matches: Sequence[Matches]) -> Matches:
    """The matches of several images, taken together."""
    return Matches(
        np.concatenate([one.found_at for one in matches] or [np.empty(0)]),
        np.concatenate([one.false for one in matches] or [np.empty(0)]),
    )


def count(matches: Matches, threshold: float) -> Counts:
    """What happens when detections with at least this score count."""
    hits = int((matches.found_at >= threshold).sum())
    return Counts(hits, int((matches.false >= threshold).sum()), len(matches.found_at) - hits)


def best_threshold(matches: Matches) -> float:
    """The threshold with the highest F1; the highest one of equals."""
    candidates = cuts(_scores(matches))
    if not len(candidates):
        return 0.5
    hits = len(matches.found_at) - np.searchsorted(np.sort(matches.found_at), candidates)
    false = len(matches.false) - np.searchsorted(np.sort(matches.false), candidates)
    f1 = 2 * hits / np.maximum(hits + false + len(matches.found_at), 1)
    return float(candidates[f1 == f1.max()][-1])


def _scores(matches: Matches) -> Floats:
    return np.concatenate([matches.found_at[np.isfinite(matches.found_at)], matches.false])
