"""Tabulate F1 of nuclei by each rule for true positives, for networks with N = 1, 4, 8 and 16 orientations, as CSV.

The table has the mean and the standard deviation over seeds. Arguments: the part of a study with the runs, the regime
(amount of training data) of the runs, and the CSV to write. First evaluate the runs by the rules other than the default
rule "iou":

for RUN in runs/samples/nuclei/N*-regime3-seed?; do
    for RULE in area own-area; do rotopath evaluate $RUN --rule $RULE; done
done
.venv/bin/python tools/rules.py runs/samples/nuclei 3 results/samples/rules.csv
"""

import csv
import json
import sys
from pathlib import Path
from statistics import mean, stdev
from typing import get_args

from rotopath.evaluation import evaluation_file
from rotopath.metrics.matching import OverlapRule

ORIENTATIONS = (1, 4, 8, 16)


def read_scores(part: Path, orientations: int, regime: str, rule: str) -> list[float]:
    """Return F1 on the test set by a rule, for each seed."""
    folders = sorted(path for path in part.glob(f"N{orientations}-regime{regime}-seed*") if path.is_dir())
    files = [evaluation_file(folder, "test", rule=None if rule == "iou" else rule) for folder in folders]
    return [json.loads(file.read_text())["test"]["f1"] for file in files]


def main() -> None:
    part, regime, out = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    with out.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["N", *get_args(OverlapRule)])
        for n in ORIENTATIONS:
            by_rule = [read_scores(part, n, regime, rule) for rule in get_args(OverlapRule)]
            table.writerow([n, *(f"{mean(scores):.3f} ± {stdev(scores):.3f}" for scores in by_rule)])
    print(out.read_text())


if __name__ == "__main__":
    main()
