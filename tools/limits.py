"""Measure how much two things limit the F1 of a nuclei model: the least area of objects, and annotated slivers.

OMP_NUM_THREADS=1 .venv/bin/python tools/limits.py nuclei-kumar-n8 data/sample-nuclei results/earlier/limits.csv

The arguments are a model, a dataset with a validation and a test set, and the CSV to write. Its first row has the
scores at the operating point of the model, the second those at an operating point that is chosen again on the
validation set: its least area of objects is relative to each field. In the other rows, annotated nuclei with less than
a fraction of the median area in their field are ignored, with what is predicted there, on both sets.
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from rotopath import runs
from rotopath.data import open_data
from rotopath.evaluation import gather_evidence
from rotopath.tasks.segment import ObjectEvidence, Segment
from rotopath.writing import atomic_file

FRACTIONS = (0.05, 0.1, 0.2)  # of the median area in a field, below which an annotated nucleus counts as a sliver


def ignore_slivers(field: ObjectEvidence, fraction: float) -> tuple[ObjectEvidence, int]:
    """Return a field whose smallest annotated objects are ignored, and the number of these objects."""
    areas = np.bincount(field.truth.ravel())
    areas[0] = 0
    is_sliver = (areas > 0) & (areas < fraction * np.median(areas[areas > 0]))
    ignored = is_sliver[field.truth] | (False if field.ignored is None else field.ignored)
    truth = np.where(is_sliver[field.truth], 0, field.truth)
    return replace(field, truth=truth, ignored=ignored), int(is_sliver.sum())


def main() -> None:
    if len(sys.argv) != 4:
        raise SystemExit("Expected a model, a dataset, and the CSV to write.")
    run, dataset, out = runs.load(sys.argv[1]), open_data(sys.argv[2], "objects"), Path(sys.argv[3])
    task = run.task
    assert isinstance(task, Segment), "this program is for models that outline objects"
    evidence: dict[str, list[ObjectEvidence]] = {
        split: gather_evidence(task, run.network, dataset.split(split), torch.device("cpu"))
        for split in ("valid", "test")
    }
    rows = [make_row("the operating point of the model", task, evidence, run.point, 0)]
    rows.append(make_row("chosen again, with a relative least area", task, evidence, None, 0))
    for fraction in FRACTIONS:
        fields = {split: [ignore_slivers(field, fraction) for field in evidence[split]] for split in evidence}
        kept = {split: [field for field, _ in pairs] for split, pairs in fields.items()}
        count = sum(number for _, number in fields["test"])
        rows.append(make_row(f"and without nuclei below {fraction:.0%} of the median area", task, kept, None, count))
    with atomic_file(out) as unfinished, unfinished.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    print(out.read_text())


def make_row(
    name: str,
    task: Segment,
    evidence: Mapping[str, Sequence[ObjectEvidence]],
    point: Mapping[str, float] | None,
    count: int,
) -> dict[str, object]:
    """Return a row: F1 on both sets, at this operating point or at one chosen on the validation set."""
    point = task.choose_operating_point(evidence["valid"]) if point is None else point
    scores = {split: task.score(evidence[split], point) for split in evidence}
    return {
        "operating point": name,
        "ignored nuclei (test)": count,
        "validation F1": f"{scores['valid']['f1']:.3f}",
        "test F1": f"{scores['test']['f1']:.3f}",
        "test PQ": f"{scores['test']['pq']:.3f}",
    }


if __name__ == "__main__":
    main()
