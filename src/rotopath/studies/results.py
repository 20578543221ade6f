"""Read the results of a study from the files of its runs, and summarize them over seeds.

`read_results` returns one result for each evaluation. `summarize` averages results that differ only in the seed, with
95 % confidence intervals over cases and seeds, and compares each network with an ordinary CNN (N=1) that was trained
on the same data. N is the number of orientations.

A *case* is a patient, or, for patches, a slide. If patients or slides are unknown, each image or patch is a case.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from rotopath import runs
from rotopath.evaluation import evaluation_file, read_scores
from rotopath.metrics.classification import MIN_CASES
from rotopath.model_file import RunError, read_json
from rotopath.recipe import NetworkOptions, Recipe, find_changed_key
from rotopath.studies.plan import PLAIN, SPLIT

RESAMPLES, RESAMPLES_PER_BATCH = 2000, 100  # bootstrap: number of resamples in total, and number computed at a time
RESTORE = "Restore the file from a copy, or train again."
PROVENANCE_TYPES = {  # of the values that reports use
    **dict.fromkeys(("begun", "finished", "rotopath", "packages.torch", "hardware.device"), str),
    "data.source": str,
    "data.fingerprint": str,
    "data.images": int,
}
INTERVAL = (0.025, 0.975)  # quantiles of a 95 % confidence interval


@dataclass(frozen=True)
class StudyResult:
    """The result of one evaluation of one run on the test set."""

    part: str  # name of the part of the study
    folder: Path  # run folder
    recipe: Recipe
    rotations: int  # above 1: the predictions were averaged over this many rotations (test-time augmentation)
    scores: Mapping[str, Any]  # all scores by name

    @property
    def score(self) -> float:
        """The main score of the task."""
        return float(self.scores[self.recipe.kind.score_name])

    @property
    def condition(self) -> "Condition":
        """The settings of this evaluation except for the seed: part, regime, orientations and rotations."""
        return Condition(self.part, self.recipe.regime, self.recipe.orientations, self.rotations)

    @cached_property
    def score_terms(self) -> dict[str, tuple[float, float]]:
        """The numerator and the denominator of the main score for each case, by name of the case.

        The main score is the sum of all numerators divided by the sum of all denominators.
        """
        return self.recipe.kind.score_terms(self.scores)

    @cached_property
    def scatter_terms(self) -> dict[str, tuple[float, float]]:
        """Two numbers for each case: the sum of the scatter of its inputs, and the number of inputs.

        The scatter of an input is the standard deviation of its predicted probability over rotation angles. Evaluations
        of earlier versions have no numbers for cases. There, each input in the file for figures is a case: a window, or
        a field. Without this file, everything is one case. If the scatter was not measured, there are no cases.
        """
        if (cases := self.scores.get("rotation", {}).get("cases")) is not None:
            return {case: (float(total), float(count)) for case, (total, count) in cases.items()}
        arrays = self.read_rotated()
        if "fair" in arrays:
            deviations = arrays["fair"].std(axis=0, dtype=np.float64)  # (windows,)
        elif "objects_deviation" in arrays:
            deviations = arrays["objects_deviation"].astype(np.float64).mean(axis=(1, 2))  # (fields,)
        else:
            mean = self.scores.get("rotation", {}).get("fair", {}).get("deviation")
            deviations = np.array([] if mean is None else [mean])
        return {str(i): (float(deviation), 1.0) for i, deviation in enumerate(deviations)}

    def read_rotated(self) -> Mapping[str, NDArray[Any]]:
        """Return the predictions for rotated inputs, arrays by name; {} if there is no file. They are for figures."""
        path = evaluation_file(self.folder, SPLIT).with_suffix(".npz")
        if not path.exists():
            return {}
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return dict(arrays)
        except Exception as error:  # damaged bytes raise errors of many types
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RunError(f"{path} is damaged ({reason}). Evaluate the run again with --robustness.") from None

    @cached_property
    def validation_score(self) -> float:
        """The main score on the validation set. Raises RunError if the file with it is damaged."""
        path, name = self.folder / runs.METRICS, self.recipe.kind.score_name
        scores = read_json(path).get("valid")
        value = scores.get(name) if isinstance(scores, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise RunError(f"{path} is damaged: {name!r} must be a number from 0 to 1; got {value!r:.40}. {RESTORE}")
        return float(value)

    @cached_property
    def provenance(self) -> Mapping[str, Any]:
        """The provenance of the training, from the run folder: software versions, dataset, hardware and times."""
        return read_json(self.folder / runs.PROVENANCE)


class Condition(NamedTuple):
    """The settings of an evaluation except for the seed. Results with equal conditions are averaged."""

    part: str
    regime: float | None  # amount of training data, see `studies.plan.Part`; None: all training data
    orientations: int
    rotations: int  # number of rotations for test-time augmentation; 1: no test-time augmentation

    @property
    def label(self) -> str:
        """Name for tables and figures, such as "N=1 + 8 rotations"."""
        return f"N={self.orientations}" + (f" + {self.rotations} rotations" if self.rotations > 1 else "")


class Estimate(NamedTuple):
    """A mean over seeds, with its 95 % confidence interval over cases and seeds."""

    value: float  # the mean
    low: float  # lower end of the interval; NaN if there are too few cases for an interval
    high: float  # upper end of the interval; NaN if `low` is NaN

    @property
    def has_interval(self) -> bool:
        """Whether there are enough cases for an interval."""
        return not math.isnan(self.low)


@dataclass(frozen=True)
class Summary:
    """Summary of all seeds of one condition, compared with an ordinary CNN (N=1).

    `over_plain` and `over_rotated` are mean differences over seeds: the main score of this condition minus the main
    score of an ordinary CNN with the same seed and the same training data. A difference is None if the study has no
    such result of an ordinary CNN, or if this condition would be compared with itself. If the ordinary CNN was
    evaluated with several numbers of rotations, `over_rotated` is the difference to the largest of these numbers.

    `scatter` and `changed` are means over seeds, or None if robustness to rotation was not measured.
    """

    condition: Condition
    results: tuple[StudyResult, ...]  # one for each seed
    mean: Estimate  # of the main score
    deviation: float  # standard deviation of the main score over seeds; NaN for one seed
    over_plain: Estimate | None  # difference to N=1 without test-time augmentation
    over_rotated: Estimate | None  # difference to N=1 with test-time augmentation
    scatter: float | None  # standard deviation of predicted probabilities over rotation angles, mean over inputs
    changed: float | None  # fraction of inputs whose decision is not the same at all rotation angles


def read_results(out: Path) -> list[StudyResult]:
    """Read all finished evaluations in the study folder `out`.

    The results are ordered by part, amount of training data (largest first), orientations, rotations and seed. Raises
    RunError if the folder does not exist, if there are no results, or if a file is damaged.
    """
    if not out.is_dir():
        raise RunError(f"The folder {out} does not exist; choose the folder of a study.")
    results = []
    for path in sorted(out.glob(f"*/*/evaluation-{SPLIT}*.json")):
        folder = path.parent
        scores = read_scores(path, SPLIT)
        if path == evaluation_file(folder, SPLIT, scores["rotations"]):  # else: scores for another rule or dataset
            recipe = runs.read_run_recipe(folder)
            result = StudyResult(folder.parent.name, folder, recipe, scores["rotations"], scores)
            _check_scores(result, path)
            results.append(result)
    if not results:
        raise RunError(f"{out} contains no finished runs; run `rotopath study run` first.")
    return sorted(results, key=_sort_key)


def _check_scores(result: StudyResult, path: Path) -> None:
    """Raise RunError unless the main score and the terms of which it consists are finite numbers in their range.

    `path` is the file with the scores.
    """
    name = result.recipe.kind.score_name
    value, fault = result.scores.get(name), ""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
        fault = f"{name!r} must be a number from 0 to 1; got {value!r:.40}"
    else:
        try:
            terms = np.array(list(result.score_terms.values()), np.float64).reshape(-1, 2)
            if not np.isfinite(terms).all() or (terms < 0).any():
                fault = "the score of a case is negative or not finite"
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, IndexError, MemoryError) as error:
            fault = f"the scores of the cases cannot be read ({type(error).__name__}: {error})"
    if fault:
        raise RunError(f"{path} is damaged: {fault}. Delete the file, and run the study again.")


def check_provenance(result: StudyResult) -> None:
    """Raise RunError unless the provenance of a run has all values that reports use, of the right type."""
    path, provenance = result.folder / runs.PROVENANCE, result.provenance
    for key, expected in PROVENANCE_TYPES.items():
        value: Any = provenance
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        if type(value) is not expected:
            what = "a whole number" if expected is int else "a string"
            raise RunError(f"{path} is damaged: the key {key!r} must be {what}; got {value!r:.40}. {RESTORE}")
    try:
        datetime.fromisoformat(provenance["finished"]) - datetime.fromisoformat(provenance["begun"])
    except (ValueError, TypeError) as error:  # not a date, or only one of them has a time zone
        raise RunError(f"{path} is damaged: the times of the training are wrong ({error}). {RESTORE}") from None


def summarize(results: Sequence[StudyResult]) -> list[Summary]:
    """Return one summary for each condition, in the order in which conditions occur in the results."""
    by_condition: dict[Condition, list[StudyResult]] = {}
    for result in results:
        by_condition.setdefault(result.condition, []).append(result)
    summaries = []
    for condition, members in by_condition.items():
        plain = condition._replace(orientations=PLAIN, rotations=1)
        most_rotations = max((other.rotations for other in by_condition if other[:3] == plain[:3]), default=1)
        augmented = plain._replace(rotations=most_rotations)
        robustness = [result.scores["rotation"]["fair"] for result in members if "rotation" in result.scores]
        scores = [result.score for result in members]
        summaries.append(
            Summary(
                condition=condition,
                results=tuple(members),
                mean=estimate(members),
                deviation=float(np.std(scores, ddof=1)) if len(scores) > 1 else math.nan,
                over_plain=_compare(members, by_condition.get(plain, [])),
                over_rotated=_compare(members, by_condition.get(augmented, [])) if most_rotations > 1 else None,
                scatter=float(np.mean([angles["deviation"] for angles in robustness])) if robustness else None,
                changed=float(np.mean([angles["changed"] for angles in robustness])) if robustness else None,
            )
        )
    return summaries


# The paper's claims


Answer = Literal["yes", "no", "not decided"]
# Regimes, by task, for which the paper claims that less training data is enough
LESS_DATA_CLAIMS: Mapping[str, Sequence[float]] = {"tumor": (0.75, 0.5, 0.25)}


@dataclass(frozen=True)
class Claim:
    """A claim of Lafarge et al. (2020), checked on one part of a study.

    `difference` is the difference of which the claim states that it is above 0. `is_stated` is whether the paper states
    the claim for this task; otherwise it is the same question, asked for another task or amount of training data.
    """

    part: str
    text: str  # such as "N=8 scores above N=1"
    is_stated: bool
    difference: Estimate
    seeds: int  # number of seeds of the networks that are compared

    @property
    def answer(self) -> Answer:
        """Whether the claim holds on these data. One seed decides nothing: it does not show how other seeds differ."""
        return decide(self.difference) if self.seeds > 1 else "not decided"


def decide(difference: Estimate) -> Answer:
    """Answer whether a difference is above 0.

    "yes" or "no" if the whole 95 % confidence interval is above or below 0, "not decided" if it contains 0, or if there
    is no interval.

    >>> from rotopath.studies.results import Estimate, decide
    >>> decide(Estimate(0.03, 0.01, 0.05)), decide(Estimate(0.03, -0.01, 0.07)), decide(Estimate(-0.03, -0.05, -0.01))
    ('yes', 'not decided', 'no')
    """
    if difference.has_interval and difference.low > 0:
        return "yes"
    if difference.has_interval and difference.high < 0:
        return "no"
    return "not decided"


def check_claims(results: Sequence[StudyResult]) -> list[Claim]:
    """Check the claims of the paper on each part of a study. Claims about networks that a part lacks are left out."""
    by_condition: dict[Condition, list[StudyResult]] = {}
    for result in results:
        by_condition.setdefault(result.condition, []).append(result)
    claims = []
    for part in dict.fromkeys(result.part for result in results):
        conditions = [condition for condition in by_condition if condition.part == part]
        members = by_condition[conditions[0]]
        task, kind = members[0].recipe.task, members[0].recipe.kind
        full = conditions[0].regime  # the largest one
        rotations = max(condition.rotations for condition in conditions if condition.regime == full)

        def find(n: int, regime: float | None, rotations: int = 1, part: str = part) -> Sequence[StudyResult]:
            return by_condition.get(Condition(part, regime, n, rotations), [])

        plain, rotated = find(PLAIN, full), find(PLAIN, full, rotations) if rotations > 1 else []
        checks = [
            ("N=8 scores above N=1", True, find(8, full), plain),
            ("N=8 scores above N=1 with rotated inputs", True, find(8, full), rotated),
            ("N=4 scores above N=1 with rotated inputs", True, find(4, full), rotated),
            ("N=16 scores below N=8", True, find(8, full), find(16, full)),
        ]
        for regime in dict.fromkeys(condition.regime for condition in conditions):
            if regime is not None and full is not None and regime < full:
                less, more = kind.describe_regime(regime), kind.describe_regime(full)
                for n in (4, 8):
                    text = f"N={n} with {less} scores above N=1 with {more} and rotated inputs"
                    checks.append((text, regime in LESS_DATA_CLAIMS.get(task, ()), find(n, regime), rotated))
        for text, is_stated, ours, others in checks:
            if (difference := _compare(ours, others)) is not None:
                claims.append(Claim(part, text, is_stated, difference, _count_common_seeds(ours, others)))
        text, eight = "predictions of N=8 scatter less under rotation than those of N=1", find(8, full)
        if (difference := _compare(plain, eight, lambda result: result.scatter_terms)) is not None:
            claims.append(Claim(part, text, True, difference, _count_common_seeds(plain, eight)))
    return claims


def _count_common_seeds(results: Sequence[StudyResult], others: Sequence[StudyResult]) -> int:
    return len({result.recipe.seed for result in results} & {other.recipe.seed for other in others})


# Designs


@dataclass(frozen=True)
class DesignComparison:
    """Runs of two parts of a study that differ only in the options of their networks, compared seed by seed."""

    base: tuple[StudyResult, ...]  # networks with the default options, such as the paper's design
    changed: tuple[StudyResult, ...]  # networks with other options, the same seeds in the same order

    @property
    def options(self) -> dict[str, Any]:
        """The options of the networks `changed` that differ from the default."""
        default = self.base[0].recipe.network_options
        options = self.changed[0].recipe.network_options
        return {key: value for key, value in options.items() if value != default.get(key)}

    def compare(self, terms: "ReadTerms | None" = None) -> Estimate | None:
        """Return the difference of the main score, or of the mean with these terms: `changed` minus `base`."""
        return _compare(self.changed, self.base, terms or (lambda result: result.score_terms))


def find_designs(results: Sequence[StudyResult]) -> list[DesignComparison]:
    """Return all pairs of networks with default and other options whose recipes are otherwise equal, no rotations."""
    groups: dict[tuple[str, Recipe], dict[int, StudyResult]] = {}  # without the seed
    for result in results:
        if result.rotations == 1:
            groups.setdefault((result.part, replace(result.recipe, seed=0)), {})[result.recipe.seed] = result
    pairs = []
    for (_, recipe), base in groups.items():
        if replace(recipe, network_options=NetworkOptions()) != recipe:
            continue  # it has other options than the default
        for (_, other), changed in groups.items():
            seeds = [seed for seed in base if seed in changed]
            same = replace(recipe, network_options=other.network_options)
            if seeds and other.network_options != recipe.network_options and find_changed_key(same, other) is None:
                ours = tuple(changed[seed] for seed in seeds)
                pairs.append(DesignComparison(tuple(base[seed] for seed in seeds), ours))
    return pairs


# Intervals


ReadTerms = Callable[[StudyResult], Mapping[str, tuple[float, float]]]  # returns two numbers for each case of a result


def estimate(
    results: Sequence[StudyResult],
    minus: Sequence[StudyResult] = (),
    terms: ReadTerms = lambda result: result.score_terms,
) -> Estimate:
    """Return the mean of the main score over seeds, with its 95 % confidence interval.

    `terms` returns the two numbers of each case from which the score is computed, see `StudyResult.score_terms`. Others
    give other means, such as that of the scatter.

    `results` contains one result for each seed. If `minus` is not empty, return the mean difference instead: the score
    of each result minus the score of the result with the same seed in `minus`. Both sequences must have the same seeds,
    in the same order.

    The interval combines two sources of variation, cases and seeds (root of the sum of squares). The variation over
    cases is estimated by a bootstrap, which draws the same cases for all results. The variation over seeds is estimated
    by Student's t, because a bootstrap of three seeds gives an interval that is too narrow. With one seed, the interval
    is over cases only. With fewer than `MIN_CASES` cases, the ends of the interval are NaN. Raises RunError if the runs
    were tested on different cases.
    """
    terms_of = {id(result): terms(result) for result in (*results, *minus)}
    cases = list(terms_of[id(results[0])])
    for other in (*results, *minus):
        if terms_of[id(other)].keys() != terms_of[id(results[0])].keys():
            raise RunError(
                f"{other.folder} was tested on different cases than {results[0].folder}; evaluate both "
                f"runs on the same data."
            )
    ours, others = (
        np.array([[terms_of[id(result)][case] for case in cases] for result in group]) for group in (results, minus)
    )
    values = _differences(ours, others, np.ones((1, len(cases))))[0]  # (seeds,)
    value = float(values.mean())
    if len(cases) < MIN_CASES:
        return Estimate(value, math.nan, math.nan)
    generator = np.random.default_rng(0)
    resampled = []
    for _ in range(0, RESAMPLES, RESAMPLES_PER_BATCH):
        counts = generator.multinomial(len(cases), np.full(len(cases), 1 / len(cases)), RESAMPLES_PER_BATCH)
        resampled.append(_differences(ours, others, counts.astype(np.float64)).mean(axis=1))
    low, high = np.nanquantile(np.concatenate(resampled), INTERVAL) - values.mean()  # over cases, relative to the mean
    over_seeds = margin(values)
    least, most = -1.0 if len(minus) else 0.0, 1.0  # limits of a difference of two scores, or of a score
    low, high = value - float(np.hypot(low, over_seeds)), value + float(np.hypot(high, over_seeds))
    return Estimate(value, max(least, low), min(most, high))


def margin(values: NDArray[np.float64]) -> float:
    """Return the half-width of the 95 % confidence interval of the mean of `values`, by Student's t; 0 for one value.

    `values` (seeds,) contains one number for each seed.
    """
    if len(values) < 2:
        return 0.0
    return float(t.ppf(INTERVAL[1], len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))


def _compare(
    results: Sequence[StudyResult],
    others: Sequence[StudyResult],
    terms: ReadTerms = lambda result: result.score_terms,
) -> Estimate | None:
    """Return the mean difference of scores, `results` minus `others`, over the seeds that occur in both sequences.

    `terms` are those of `estimate`. Returns None if no seed occurs in both sequences, if both sequences contain the
    same results, or if a result has no terms.
    """
    by_seed = {other.recipe.seed: other for other in others}
    pairs = [(result, by_seed[result.recipe.seed]) for result in results if result.recipe.seed in by_seed]
    if not pairs or any(result is other for result, other in pairs):
        return None
    ours, theirs = zip(*pairs, strict=True)
    if not all(terms(result) for result in (*ours, *theirs)):
        return None
    return estimate(ours, theirs, terms)


def _differences(
    ours: NDArray[np.float64], others: NDArray[np.float64], counts: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return the scores of `ours` minus the scores of `others`, an array (resamples, seeds).

    `ours` and `others` (seeds, cases, 2) contain the two terms of the score for each case: numerator and denominator
    (see `StudyResult.score_terms`). If `others` is empty, nothing is subtracted. `counts` (resamples, cases) is the
    number of times that each case was drawn in each resample.
    """
    return _compute_scores(ours, counts) - (_compute_scores(others, counts) if len(others) else 0)


def _compute_scores(terms: NDArray[np.float64], counts: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the score of each seed on each resampled set of cases, an array (resamples, seeds).

    `terms` (seeds, cases, 2) contains the two terms of the score for each case. `counts` (resamples, cases) is
    the number of times that each case was drawn.
    """
    sums = np.einsum("rc,sct->rst", counts, terms)
    with np.errstate(invalid="ignore"):
        scores: NDArray[np.float64] = sums[..., 0] / sums[..., 1]
    return scores


def _sort_key(result: StudyResult) -> tuple[str, float, int, int, int]:
    """Return the sort key of a result: part, amount of training data (largest first), orientations, rotations, seed."""
    part, regime, orientations, rotations = result.condition
    return part, -(regime or np.inf), orientations, rotations, result.recipe.seed
