"""What each addition to the paper's design brings: scores of its runs, and differences to `paper` with the same seeds.

.venv/bin/python tools/additions.py runs/beyond [runs/samples/tumor] results/beyond.csv

In: the folder of a study whose parts are the additions; and, if one is named, a part of another study by the same
recipe, of which the runs with all training data and as many orientations are taken. Out: a CSV, one row a network.
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
from rotopath.recipe import changed_key
from rotopath.studies.results import StudyResult, estimate, margin, read_results
from rotopath.writing import atomic_file

PAPER, SAME = "paper", "equal weights"
PARTS = (PAPER, "faithful", "harmonic", "rms-blur", "reflections", "attention", "fourier", "channels", "float32")
# Keys of recipes; all others have to be those of the paper's design.
MAY_DIFFER = ("orientations", "network_options", "precision", "seed")
LAST_STEPS = 500
NONE = "–"

Networks = dict[tuple[str, int], list[StudyResult]]  # by part and orientations: runs that differ in their seeds


@dataclass(frozen=True)
class Measure:
    name: str
    read: Callable[[StudyResult], float]
    digits: int
    factor: float = 1.0  # from what is read to what is shown

    def spread(self, results: Sequence[StudyResult]) -> str:
        """Mean and deviation over seeds."""
        values = [self.factor * self.read(one) for one in results]
        shown = f"{mean(values):.{self.digits}f}"
        return f"{shown} ± {stdev(values):.{self.digits}f}" if len(values) > 1 else shown

    def minus(self, ours: Sequence[StudyResult], others: Sequence[StudyResult]) -> str:
        """The mean of paired differences, and the interval in which that of other seeds lies, at 95 %."""
        pairs = zip(ours, others, strict=True)
        values = np.array([self.factor * (self.read(one) - self.read(other)) for one, other in pairs])
        value, far = float(values.mean()), margin(values)
        shown = signed(value, self.digits)
        return f"{shown} {interval(value - far, value + far, self.digits)}" if len(values) > 1 else shown


def interval(low: float, high: float, digits: int) -> str:
    return f"[{signed(low, digits)}, {signed(high, digits)}]"


def signed(value: float, digits: int) -> str:
    return f"{round(value, digits) + 0.0:+.{digits}f}"  # 0 is added for the sign of -0


def turning(name: str) -> Callable[[StudyResult], float]:
    """A reader of how predictions change when inputs turn."""

    def read(result: StudyResult) -> float:
        if "rotation" not in result.scores:
            command = f"rotopath evaluate {result.folder} --robustness"
            raise RunError(f"{result.folder} was evaluated without turned inputs; run `{command}`.")
        return float(result.scores["rotation"]["fair"][name])

    return read


def validated(name: str) -> Callable[[StudyResult], float]:
    """A reader of scores of the validation set."""

    def read(result: StudyResult) -> float:
        return float(json.loads((result.folder / runs.METRICS).read_text(encoding="utf-8"))["valid"][name])

    return read


def read_loss(result: StudyResult) -> float:
    """The mean training loss of the last steps."""
    with (result.folder / runs.LOG).open(newline="") as file:
        return mean([float(row["loss"]) for row in csv.DictReader(file)][-LAST_STEPS:])


ACCURACY = Measure("accuracy", lambda one: float(one.scores["accuracy"]), 4)
AUC = Measure("AUC", lambda one: float(one.scores["auc"]), 4)
DEVIATION = Measure("deviation over angles", turning("deviation"), 4)
CHANGED = Measure("changed decisions, %", turning("changed"), 1, 100)
LOSS = Measure("training loss", read_loss, 3)
VALIDATION = (
    Measure("validation accuracy", validated("accuracy"), 4),
    Measure("validation AUC", validated("auc"), 4),
)


def read_networks(study: Path, beside: Path | None = None) -> Networks:
    """Those of a study, the paper's first, and those of another study's part that stand beside them."""
    found: Networks = {}
    for one in sorted((one for one in read_results(study) if one.rotations == 1), key=_order):
        found.setdefault((one.part, one.recipe.orientations), []).append(one)
    bases = [members for (part, _), members in found.items() if part == PAPER]
    if len(bases) != 1:
        raise RunError(f"{study} has {len(bases)} networks in {PAPER!r}; one, to compare others with, is expected.")
    if beside is not None:
        orientations = {n for _, n in found}
        for one in read_results(beside.parent):
            whole = one.rotations == 1 and one.recipe.regime in (None, 1)
            if one.part == beside.name and whole and one.recipe.orientations in orientations:
                regime = bases[0][0].recipe.regime  # 1 is all of the data as well as none
                one = replace(one, recipe=replace(one.recipe, regime=regime))
                found.setdefault((SAME, one.recipe.orientations), []).append(one)
    for members in found.values():
        for one in members:
            _check_alike(one, bases[0][0])
    return found


def _order(result: StudyResult) -> tuple[int, str, int]:
    place = PARTS.index(result.part) if result.part in PARTS else len(PARTS)
    return place, result.part, result.recipe.seed


def _check_alike(one: StudyResult, base: StudyResult) -> None:
    """Refuse a run that was trained otherwise than the paper's design."""
    alike = replace(one.recipe, **{key: getattr(base.recipe, key) for key in MAY_DIFFER})
    if key := changed_key(alike, base.recipe):
        raise RunError(f"{one.folder} has another {key!r} than {base.folder}, so the two cannot be compared.")


def tabulate(networks: Networks) -> list[dict[str, str]]:
    """A row for each network."""
    base = next(members for (part, _), members in networks.items() if part == PAPER)
    by_seed = {one.recipe.seed: one for one in base}
    return [
        {
            "part": part,
            "N": str(n),
            "weights": str(count_weights(members[0])),
            "steps": str(members[0].recipe.epochs * members[0].recipe.steps),
            "seeds": str(len(members)),
            **{one.name: one.spread(members) for one in (ACCURACY, AUC, DEVIATION, CHANGED, LOSS, *VALIDATION)},
            **compare(members, {} if members is base else by_seed),
        }
        for (part, n), members in networks.items()
    ]


def compare(members: Sequence[StudyResult], by_seed: Mapping[int, StudyResult]) -> dict[str, str]:
    """Differences to the paper's design, of the seeds that both have."""
    ours = [one for one in members if one.recipe.seed in by_seed]
    others = [by_seed[one.recipe.seed] for one in ours]
    wide = estimate(ours, others) if ours else None
    return {
        f"{ACCURACY.name} minus {PAPER}": ACCURACY.minus(ours, others) if ours else NONE,
        "with other patches": interval(wide.low, wide.high, ACCURACY.digits) if wide else NONE,
        **{
            f"{measure.name.split(' ')[0]} minus {PAPER}": measure.minus(ours, others) if ours else NONE
            for measure in (AUC, DEVIATION, CHANGED)
        },
    }


def count_weights(result: StudyResult) -> int:
    return sum(weight.numel() for weight in unwrap(runs.load(result.folder).network).parameters())


def main() -> None:
    if len(sys.argv) not in (3, 4):
        raise SystemExit("Name the folder of a study, a part of another one if you like, and the CSV to write.")
    study, *beside = map(Path, sys.argv[1:-1])
    try:
        rows = tabulate(read_networks(study, *beside))
    except RunError as error:
        raise SystemExit(str(error)) from None
    out = Path(sys.argv[-1])
    with atomic_file(out) as name, name.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    print(out.read_text())


if __name__ == "__main__":
    main()
