"""Compare additions to the paper's design: the scores of each addition, and its differences from the paper's design.

.venv/bin/python tools/additions.py runs/beyond [runs/samples/tumor] results/beyond.csv

The first argument is the folder of a study. Its part `paper` is the paper's design, and each other part is an addition.
The second argument is optional: a part of another study with the same recipe. Of that part, the table also lists the
runs on all training data whose number of orientations N occurs in the first study. The last argument is the CSV to
write. It has one row for each network: a part and its N. Differences are computed between runs of the same seed.
"""

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, stdev

import numpy as np

from rotopath import runs
from rotopath.model_file import RunError
from rotopath.models.protocols import unwrap
from rotopath.recipe import find_changed_key
from rotopath.studies.results import StudyResult, estimate, margin, read_results
from rotopath.writing import atomic_file

PAPER, SAME = "paper", "equal weights"  # name of the baseline part; name in the table for the runs of the other study
# Order of the rows; all other parts come last.
PARTS = (PAPER, "faithful", "harmonic", "rms-blur", "reflections", "attention", "fourier", "channels", "float32")
# Recipe keys that may differ between runs; all others must equal those of the paper's design.
MAY_DIFFER = ("orientations", "network_options", "precision", "seed")
LAST_STEPS = 500  # number of training steps over which the training loss is averaged
NONE = "–"  # entry of the table without a value

Networks = dict[tuple[str, int], list[StudyResult]]  # (part, N) → runs that differ only in their seeds


@dataclass(frozen=True)
class Measure:
    """A column of the table, such as the accuracy. `read` returns the number of one run."""

    name: str
    read: Callable[[StudyResult], float]
    digits: int
    factor: float = 1.0  # multiplied with the number before it is printed; 100 for percentages

    def format_mean(self, results: Sequence[StudyResult]) -> str:
        """Format the mean and the standard deviation over seeds."""
        values = [self.factor * self.read(result) for result in results]
        text = f"{mean(values):.{self.digits}f}"
        return f"{text} ± {stdev(values):.{self.digits}f}" if len(values) > 1 else text

    def format_difference(self, ours: Sequence[StudyResult], others: Sequence[StudyResult]) -> str:
        """Format the mean of the differences, run by run, with its 95 % confidence interval over seeds."""
        pairs = zip(ours, others, strict=True)
        values = np.array([self.factor * (self.read(our) - self.read(other)) for our, other in pairs])
        difference, half_width = float(values.mean()), margin(values)
        text = format_signed(difference, self.digits)
        if len(values) == 1:
            return text
        return f"{text} {format_interval(difference - half_width, difference + half_width, self.digits)}"


def format_interval(low: float, high: float, digits: int) -> str:
    return f"[{format_signed(low, digits)}, {format_signed(high, digits)}]"


def format_signed(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # adding 0.0 converts -0.0 to 0.0


def read_rotation_score(name: str) -> Callable[[StudyResult], float]:
    """Return a function that reads from a run how much predictions change when inputs are rotated.

    `name` is "deviation" (standard deviation over angles) or "changed" (fraction of changed decisions).
    """

    def read(result: StudyResult) -> float:
        if "rotation" not in result.scores:
            command = f"rotopath evaluate {result.folder} --robustness"
            raise RunError(f"{result.folder} was evaluated without rotated inputs; run `{command}`.")
        return float(result.scores["rotation"]["fair"][name])

    return read


def read_validation_score(name: str) -> Callable[[StudyResult], float]:
    """Return a function that reads the score `name` on the validation set from a run."""

    def read(result: StudyResult) -> float:
        return float(json.loads((result.folder / runs.METRICS).read_text(encoding="utf-8"))["valid"][name])

    return read


def read_loss(result: StudyResult) -> float:
    """Return the mean training loss of the last steps of a run."""
    with (result.folder / runs.LOG).open(newline="") as file:
        return mean([float(row["loss"]) for row in csv.DictReader(file)][-LAST_STEPS:])


ACCURACY = Measure("accuracy", lambda result: float(result.scores["accuracy"]), 4)
AUC = Measure("AUC", lambda result: float(result.scores["auc"]), 4)
DEVIATION = Measure("deviation over angles", read_rotation_score("deviation"), 4)
CHANGED = Measure("changed decisions, %", read_rotation_score("changed"), 1, 100)
LOSS = Measure("training loss", read_loss, 3)
VALIDATION = (
    Measure("validation accuracy", read_validation_score("accuracy"), 4),
    Measure("validation AUC", read_validation_score("auc"), 4),
)


def read_networks(study: Path, beside: Path | None = None) -> Networks:
    """Return the networks of a study, the paper's design first, then those of `beside`, a part of another study.

    Raises RunError if the study does not have exactly one baseline network, or if recipes differ in any key that is not
    in MAY_DIFFER.
    """
    networks: Networks = {}
    for result in sorted((result for result in read_results(study) if result.rotations == 1), key=_sort_key):
        networks.setdefault((result.part, result.recipe.orientations), []).append(result)
    bases = [results for (part, _), results in networks.items() if part == PAPER]
    if len(bases) != 1:
        raise RunError(f"{study} has {len(bases)} networks in its part {PAPER!r}; expected one, as the baseline.")
    if beside is not None:
        orientations = {n for _, n in networks}
        for result in read_results(beside.parent):
            on_all_data = result.rotations == 1 and result.recipe.regime in (None, 1)
            if result.part == beside.name and on_all_data and result.recipe.orientations in orientations:
                regime = bases[0][0].recipe.regime  # both 1 and None mean all of the data
                result = replace(result, recipe=replace(result.recipe, regime=regime))
                networks.setdefault((SAME, result.recipe.orientations), []).append(result)
    for results in networks.values():
        for result in results:
            _check_comparable(result, bases[0][0])
    return networks


def _sort_key(result: StudyResult) -> tuple[int, str, int]:
    rank = PARTS.index(result.part) if result.part in PARTS else len(PARTS)
    return rank, result.part, result.recipe.seed


def _check_comparable(result: StudyResult, base: StudyResult) -> None:
    """Raise RunError if the recipe of a run differs from that of the baseline `base` in a key not in MAY_DIFFER."""
    comparable = replace(result.recipe, **{key: getattr(base.recipe, key) for key in MAY_DIFFER})
    if key := find_changed_key(comparable, base.recipe):
        raise RunError(
            f"{result.folder} and {base.folder} differ in {key!r}, so they cannot be compared; use the same recipe."
        )


def tabulate(networks: Networks) -> list[dict[str, str]]:
    """Return the rows of the table, one for each network."""
    base = next(results for (part, _), results in networks.items() if part == PAPER)
    base_by_seed = {result.recipe.seed: result for result in base}
    measures = (ACCURACY, AUC, DEVIATION, CHANGED, LOSS, *VALIDATION)
    return [
        {
            "part": part,
            "N": str(n),
            "weights": str(count_weights(results[0])),
            "steps": str(results[0].recipe.epochs * results[0].recipe.steps),
            "seeds": str(len(results)),
            **{measure.name: measure.format_mean(results) for measure in measures},
            **compare(results, {} if results is base else base_by_seed),
        }
        for (part, n), results in networks.items()
    ]


def compare(results: Sequence[StudyResult], base_by_seed: Mapping[int, StudyResult]) -> dict[str, str]:
    """Return the columns with differences from the paper's design, between runs of the same seed.

    `base_by_seed` contains the runs of the paper's design. Without a common seed, the columns have no values.
    """
    ours = [result for result in results if result.recipe.seed in base_by_seed]
    others = [base_by_seed[result.recipe.seed] for result in ours]
    over_patches = estimate(ours, others) if ours else None
    return {
        f"{ACCURACY.name} minus {PAPER}": ACCURACY.format_difference(ours, others) if ours else NONE,
        "with other patches": (
            format_interval(over_patches.low, over_patches.high, ACCURACY.digits) if over_patches else NONE
        ),
        **{
            f"{measure.name.split(' ')[0]} minus {PAPER}": measure.format_difference(ours, others) if ours else NONE
            for measure in (AUC, DEVIATION, CHANGED)
        },
    }


def count_weights(result: StudyResult) -> int:
    """Return the number of weights of the network of a run."""
    return sum(weight.numel() for weight in unwrap(runs.load(result.folder).network).parameters())


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit("Expected the folder of a study, optionally a part of another study, and the CSV to write.")
    study, *beside = map(Path, sys.argv[1:-1])
    try:
        rows = tabulate(read_networks(study, *beside))
    except RunError as error:
        raise SystemExit(str(error)) from None
    out = Path(sys.argv[-1])
    with atomic_file(out) as unfinished, unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    print(out.read_text())


if __name__ == "__main__":
    main()
