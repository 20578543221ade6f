"""Rehearse studies/paper.toml, the complete study of the paper, on small files in the layouts of the official data.

.venv/bin/python tools/rehearse.py FOLDER [options of `rotopath study run`]

The files are synthetic tissue: 23 cases of AMIDA13 with two fields each, 24 fields of Kumar et al., and the six HDF5
files of PCam with few patches. Everything else is as with the official data: both commands of the study, all parts,
amounts of training data, networks and seeds, the baselines that find hard examples, the lengths of all trainings, the
evaluations with and without rotated inputs, and the report. On a CPU, shorten the trainings with options such as
`--set tumor.set.steps=2`.

FOLDER has the data, the runs and the report. The same command resumes an interrupted rehearsal. At the end, this
program checks that all of it is there, and writes `rehearsal.csv`: a row for each part of the study.
"""

import csv
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

from rotopath import runs
from rotopath.data import open_data
from rotopath.evaluation import evaluation_file, read_scores
from rotopath.recipe import read_recipe
from rotopath.studies.jobs import baseline_folder, list_results
from rotopath.studies.plan import SPLIT, Part, read_study
from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor
from rotopath.writing import atomic_file

STUDY = Path(__file__).parent.parent / "studies" / "paper.toml"
HPF_PX, FIELD_PX = 320, 160  # sides of fields; those of AMIDA13 have 2,000 px, and those of Kumar et al. 1,000
PATCHES = {"train": 160, "valid": 64, "test": 64}


def make_data(folder: Path) -> None:
    """Write the three datasets where the recipes of the study expect them, unless they are there."""
    makers: dict[str, Callable[[Path], None]] = {
        "mitosis": partial(make_mitosis, fields_per_case=2, size_px=HPF_PX),
        "nuclei": partial(make_nuclei, size_px=FIELD_PX),
        "tumor": partial(make_tumor, patches=PATCHES),
    }
    for name, make in makers.items():
        if not (folder / name).exists():
            make(folder / name)


def check_part(part: Part, folder: Path) -> dict[str, object]:
    """Return the row of the table for one part. Raises AssertionError if a file is missing, or cannot be right.

    `folder` is that of the part. Every run must have its results, and as many validation losses as its epochs.
    """
    jobs = [part.job(n, regime, seed) for n in part.orientations for regime in part.regimes for seed in part.seeds]
    epochs, rotated, scored = [], 0, 0
    for job in jobs:
        run = folder.parent / job.name
        for path in list_results(run, job.recipe.orientations, job.rotations):
            assert path.exists(), f"{path} is missing"
        scores = read_scores(evaluation_file(run, SPLIT), SPLIT)
        assert scores["rotation"]["cases"], f"{run} was not evaluated with rotated inputs"
        assert evaluation_file(run, SPLIT).with_suffix(".npz").exists(), f"{run} has no predictions for figures"
        assert read_recipe(run / runs.RECIPE) == job.recipe, f"{run} has another recipe"
        with (run / runs.LOG).open(newline="") as file:
            losses = [row["validation_loss"] for row in csv.DictReader(file) if row["validation_loss"]]
        assert 1 <= len(losses) <= job.recipe.epochs, f"{run} has {len(losses)} validation losses"
        epochs.append(len(losses))
        scored += 1
        rotated += job.rotations > 1
    examples = []
    for regime in part.regimes if part.recipe.mining else ():
        mined = baseline_folder(part.job(part.orientations[0], regime, part.seeds[0]).recipe, folder) / runs.MINED
        shared = mined.read_text()
        examples.append(len(shared.splitlines()) - 1)
        for job in jobs:
            if job.recipe.regime == regime:
                used = (folder.parent / job.name / runs.MINED).read_text()
                assert used == shared, f"{job.name} used other hard examples than those of its baseline"
    data = open_data(folder.parent.parent.parent / part.recipe.data, part.recipe.kind.annotated)
    return {
        "part": part.name,
        "data": data.source,
        "images": len(data.samples),
        "trainings": len(jobs),
        "steps of an epoch": part.recipe.steps,
        "epochs": f"{min(epochs)} to {max(epochs)}",
        "baselines": len(examples),
        "hard examples": f"{min(examples)} to {max(examples)}" if examples else "–",
        "evaluations": scored,
        "with rotated inputs": rotated,
    }


def main(folder: Path, options: Sequence[str]) -> None:
    make_data(folder / "data")
    rotopath = [sys.executable, "-m", "rotopath"]
    ended = subprocess.run([*rotopath, "study", "run", str(STUDY), *options], cwd=folder, check=False)
    if ended.returncode:
        raise SystemExit(ended.returncode)
    subprocess.run([*rotopath, "study", "report", "runs/paper"], cwd=folder, check=True)
    pairs = list(pairwise(options))
    changes = [value for option, value in pairs if option == "--set"]
    parts = [value for option, value in pairs if option == "--part"]
    plan = read_study(STUDY, changes, parts)
    rows = [check_part(part, folder / "runs" / "paper" / part.name) for part in plan.parts]
    report = folder / "runs" / "paper" / "report"
    with (report / "results.csv").open(newline="") as file:
        count = len(list(csv.DictReader(file)))
    expected = sum(int(str(row["evaluations"])) + int(str(row["with rotated inputs"])) for row in rows)
    assert count == expected, f"the report has {count} results; expected {expected}"
    page = (report / "report.html").read_text()
    assert all(part.name in page for part in plan.parts), "the report lacks a part"
    out = folder / "rehearsal.csv"
    with atomic_file(out) as unfinished, unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(out.read_text())


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit("Expected a folder, and optionally options of `rotopath study run`.")
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])
