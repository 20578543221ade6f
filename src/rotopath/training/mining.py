"""Hard examples: what a first network gets wrong, for a second one to see more often.

In: examples that a task mined, the worst first. Out: a CSV file with the run, and numbers that its sampler takes.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rotopath.data import DataError, Picture
from rotopath.data.sampling import Ints
from rotopath.data.tables import read_table
from rotopath.tasks import Example, Task
from rotopath.writing import write_text

MINED = "mined.csv"
COLUMNS = ("image", "row", "column", "score")


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((each.image, each.row, each.column, f"{each.score:.6f}") for each in examples)
    write_text(path, text.getvalue())


def read_examples(path: Path) -> list[Example]:
    """Examples as they were written, the worst first."""
    return [
        Example(row["image"], int(row["row"]), int(row["column"]), float(row["score"]))
        for _, row in read_table(path, COLUMNS)
    ]


def number_examples(examples: Sequence[Example], task: Task, pictures: Sequence[Picture]) -> Ints:
    """Examples as the task's sampler takes them."""
    number_of = {picture.name: i for i, picture in enumerate(pictures)}
    if unknown := [each.image for each in examples if each.image not in number_of]:
        raise DataError(f"The hard example {unknown[0]!r} is not among the training images.")
    places = [(number_of[each.image], each.row, each.column) for each in examples]
    return task.number_examples(np.array(places, np.int64).reshape(-1, 3))
