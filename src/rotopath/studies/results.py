"""What came of a study, read from the files of its runs.

In: the folder of a study. Out: a result for each evaluation, and summaries over seeds, with intervals over patients and
seeds, and differences to an ordinary network that saw the same data.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from rotopath import runs
from rotopath.evaluation import evaluation_file
from rotopath.metrics.bootstrap import FEWEST_CASES
from rotopath.model_file import RunError
from rotopath.recipe import Recipe
from rotopath.studies.job import SPLIT
from rotopath.studies.plan import PLAIN

REDRAWS, AT_ONCE = 2000, 100
MIDDLE = (0.025, 0.975)


@dataclass(frozen=True)
class StudyResult:
    """One evaluation of one run."""

    part: str
    folder: Path
    recipe: Recipe
    rotations: int  # of the test images; over 1 is test-time augmentation
    scores: Mapping[str, Any]

    @property
    def score(self) -> float:
        """The main one of the task."""
        return float(self.scores[self.recipe.kind.score_name])

    @cached_property
    def tally(self) -> dict[str, tuple[float, float]]:
        """What each case adds to the two sums of which the score is the ratio."""
        return self.recipe.kind.tally(self.scores)

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        about: Mapping[str, Any] = json.loads((self.folder / runs.PROVENANCE).read_text(encoding="utf-8"))
        return about


class Condition(NamedTuple):
    """Results that differ in their seeds alone."""

    part: str
    regime: float | None
    orientations: int
    rotations: int

    @property
    def label(self) -> str:
        return f"N={self.orientations}" + (f" + {self.rotations} rotations" if self.rotations > 1 else "")


class Estimate(NamedTuple):
    """A mean over seeds, and the interval in which that of other patients and other seeds lies, at 95 %.

    Both ends are NaN where there are too few patients for an interval.
    """

    value: float
    low: float
    high: float

    @property
    def has_interval(self) -> bool:
        return not math.isnan(self.low)


@dataclass(frozen=True)
class Summary:
    """The results of a group, and how much better they are than those of ordinary networks."""

    group: Condition
    results: tuple[StudyResult, ...]  # by seed
    mean: Estimate
    deviation: float  # over seeds
    over_plain: Estimate | None  # the score minus that of N = 1, of the same seeds
    over_turned: Estimate | None  # minus that of N = 1 with test-time augmentation
    scatter: float | None  # of predictions over angles
    changed: float | None  # the share of decisions that depend on the angle


def read_results(out: Path) -> list[StudyResult]:
    """Every finished evaluation below the folder of a study, by part, training data, network and seed."""
    if not out.is_dir():
        raise RunError(f"{out} is no folder of a study: there is no such folder.")
    found = []
    for written in sorted(out.glob(f"*/*/evaluation-{SPLIT}*.json")):
        folder = written.parent
        try:
            scores = json.loads(written.read_text(encoding="utf-8"))[SPLIT]
        except (json.JSONDecodeError, KeyError):
            raise RunError(f"{written} is damaged; delete it, and run the study again.") from None
        if written == evaluation_file(folder, SPLIT, scores["rotations"]):
            recipe = runs.read_run_recipe(folder)
            found.append(StudyResult(folder.parent.name, folder, recipe, scores["rotations"], scores))
    if not found:
        raise RunError(f"{out} has no finished runs; run `rotopath study run` first.")
    return sorted(
        found, key=lambda one: (*_group(one)[:1], -(one.recipe.regime or np.inf), *_group(one)[2:], _seed(one))
    )


def summarise(results: Sequence[StudyResult]) -> list[Summary]:
    """A summary for every group, in the order of the results."""
    groups: dict[Condition, list[StudyResult]] = {}
    for one in results:
        groups.setdefault(_group(one), []).append(one)
    summaries = []
    for group, members in groups.items():
        plain = groups.get(group._replace(orientations=PLAIN, rotations=1), [])
        most = max((other.rotations for other in groups if other[:3] == (group.part, group.regime, PLAIN)), default=1)
        turned = groups.get(group._replace(orientations=PLAIN, rotations=most), []) if most > 1 else []
        at_angles = [one.scores["rotation"]["fair"] for one in members if "rotation" in one.scores]
        values = [one.score for one in members]
        summaries.append(
            Summary(
                group,
                tuple(members),
                estimate(members),
                float(np.std(values, ddof=1)) if len(values) > 1 else float("nan"),
                _difference(members, plain),
                _difference(members, turned),
                float(np.mean([one["deviation"] for one in at_angles])) if at_angles else None,
                float(np.mean([one["changed"] for one in at_angles])) if at_angles else None,
            )
        )
    return summaries


def estimate(results: Sequence[StudyResult], minus: Sequence[StudyResult] = ()) -> Estimate:
    """The mean score over seeds, or how much higher it is than that of other results of the same seeds and cases.

    What other patients would change is found by redrawing them, the same for all; what other seeds would, by Student's
    t, since of three of them redrawing tells too little. One seed alone says nothing about others, and a few patients
    nothing about other patients: then there is no interval.
    """
    cases = list(results[0].tally)
    if odd := [one for one in (*results, *minus) if one.tally.keys() != results[0].tally.keys()]:
        raise RunError(f"{odd[0].folder} was tested on other cases than {results[0].folder}; evaluate them alike.")
    ours, others = (np.array([[one.tally[case] for case in cases] for one in some]) for some in (results, minus))
    values = _values(ours, others, np.ones((1, len(cases))))[0]  # (seeds,)
    if len(cases) < FEWEST_CASES:
        return Estimate(float(values.mean()), math.nan, math.nan)
    generator = np.random.default_rng(0)
    redrawn = []
    for _ in range(0, REDRAWS, AT_ONCE):
        times = generator.multinomial(len(cases), np.full(len(cases), 1 / len(cases)), AT_ONCE).astype(np.float64)
        redrawn.append(_values(ours, others, times).mean(axis=1))
    low, high = np.nanquantile(np.concatenate(redrawn), MIDDLE) - values.mean()  # by patients
    spread = margin(values)
    most, least = 1.0, -1.0 if len(minus) else 0.0
    value = float(values.mean())
    return Estimate(
        value, max(least, value - float(np.hypot(low, spread))), min(most, value + float(np.hypot(high, spread)))
    )


def margin(values: NDArray[np.float64]) -> float:
    """How far the mean over all seeds may lie from that over these, at 95 %, by Student's t; one alone gives 0."""
    if len(values) < 2:
        return 0.0
    return float(t.ppf(MIDDLE[1], len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def _values(ours: NDArray[np.float64], others: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """Scores (draws, seeds), or differences between pairs of them."""
    return _ratios(ours, times) - (_ratios(others, times) if len(others) else 0)


def _ratios(tallies: NDArray[np.float64], times: NDArray[np.float64]) -> NDArray[np.float64]:
    """The scores (draws, seeds) of cases that are drawn so many times (draws, cases), for tallies (seeds, cases, 2)."""
    sums = np.einsum("dc,sck->dsk", times, tallies)
    with np.errstate(invalid="ignore"):
        found: NDArray[np.float64] = sums[..., 0] / sums[..., 1]
    return found


def _difference(ours: Sequence[StudyResult], others: Sequence[StudyResult]) -> Estimate | None:
    by_seed = {_seed(one): one for one in others}
    pairs = [(one, by_seed[_seed(one)]) for one in ours if _seed(one) in by_seed]
    if not pairs or any(one is other for one, other in pairs):
        return None
    mine, theirs = zip(*pairs, strict=True)
    return estimate(mine, theirs)


def _group(result: StudyResult) -> Condition:
    return Condition(result.part, result.recipe.regime, result.recipe.orientations, result.rotations)


def _seed(result: StudyResult) -> int:
    return result.recipe.seed
