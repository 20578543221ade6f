"""Compare runs that were trained again from the same recipes, such as those of `tools/grid.sh`, and write a CSV.

.venv/bin/python tools/again.py runs/samples runs/samples-again results/samples/again.csv

The arguments are the folder of a study, a folder with some of its runs once more, and the CSV to write. It has a row
for each run in the second folder: the scores of both, and whether their weights are the same.
"""

import csv
import json
import sys
from pathlib import Path

from rotopath import runs
from rotopath.evaluation import evaluation_file, read_scores
from rotopath.model_file import MODEL, RunError
from rotopath.recipe import find_changed_key
from rotopath.studies.plan import SPLIT
from rotopath.writing import atomic_file


def compare(run: Path, again: Path) -> dict[str, str]:
    """Return the row of a run and the same run once more. Raises RunError if their recipes differ."""
    recipe = runs.read_run_recipe(run)
    if key := find_changed_key(recipe, runs.read_run_recipe(again)):
        raise RunError(f"The value of {key!r} differs in {run} and {again}; train again with the same recipe.")
    name = recipe.kind.score_name
    valid = [json.loads((folder / runs.METRICS).read_text())["valid"][name] for folder in (run, again)]
    tested = [read_scores(evaluation_file(folder, SPLIT), SPLIT) for folder in (run, again)]
    scatter = [scores["rotation"]["fair"]["deviation"] for scores in tested]
    sums = [json.loads((folder / MODEL).read_text())["weights"]["sha256"] for folder in (run, again)]
    hardware = {json.loads((folder / runs.PROVENANCE).read_text())["hardware"]["device"] for folder in (run, again)}
    return {
        "part": run.parent.name,
        "run": run.name,
        "score": name,
        "validation": f"{valid[0]:.6f}",
        "validation again": f"{valid[1]:.6f}",
        "test": f"{tested[0][name]:.6f}",
        "test again": f"{tested[1][name]:.6f}",
        "scatter": f"{scatter[0]:.6f}",
        "scatter again": f"{scatter[1]:.6f}",
        "same weights": "yes" if sums[0] == sums[1] else "no",
        "hardware": ", ".join(sorted(hardware)),
    }


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit("Expected the folder of a study, a folder with some of its runs again, and the CSV to write.")
    study, again, out = map(Path, sys.argv[1:])
    folders = sorted(path.parent for path in again.glob(f"*/*/{runs.RECIPE}"))
    try:
        rows = [compare(study / folder.relative_to(again), folder) for folder in folders]
    except RunError as error:
        raise SystemExit(str(error)) from None
    if not rows:
        raise SystemExit(f"{again} contains no finished runs.")
    with atomic_file(out) as unfinished, unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(out.read_text())


if __name__ == "__main__":
    main()
