"""Hard examples: what a first network gets wrong, for a second one to see more often.

In: a trained baseline and the training pictures. Out: examples, the worst first, kept in a CSV file with the run.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rotopath import runs
from rotopath.assessment import gather
from rotopath.data import Picture, Task
from rotopath.data.collection import DataError
from rotopath.data.sampling import NEGATIVE_BEYOND_PX, Ints
from rotopath.data.tables import read_table
from rotopath.models import Network

MINED = "mined.csv"
COLUMNS = ("image", "row", "column", "score")


@dataclass(frozen=True)
class Example:
    """A patch, or a place in a field, and how sure the baseline was of the wrong answer."""

    image: str  # the picture's name
    row: int  # 0 for a patch
    column: int
    score: float


def mine(task: Task, network: Network, pictures: Sequence[Picture], most: int, device: torch.device) -> list[Example]:
    """The worst mistakes on the training pictures: false mitoses, or patches of either class on the wrong side."""
    evidence = gather(task, network, pictures, device)
    if task == "mitosis":
        found = [
            Example(one.name, round(float(row)), round(float(column)), float(score))
            for one in evidence
            for (row, column), score in zip(one.detections.places, one.detections.scores, strict=True)
            if not (np.hypot(*(one.truth - (row, column)).T) <= NEGATIVE_BEYOND_PX).any()
        ]
        return sorted(found, key=lambda example: -example.score)[:most]
    examples: list[Example] = []
    for label in (0, 1):
        wrong = [Example(e.name, 0, 0, abs(e.probability - label)) for e in evidence if e.label == label]
        examples += sorted(wrong, key=lambda example: -example.score)[: most // 2]
    return sorted(examples, key=lambda example: -example.score)


def write_examples(path: Path, examples: Sequence[Example]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows((one.image, one.row, one.column, f"{one.score:.6f}") for one in examples)
    runs.write_text(path, text.getvalue())


def read_examples(path: Path) -> list[Example]:
    """Examples as they were written, the worst first."""
    return [
        Example(row["image"], int(row["row"]), int(row["column"]), float(row["score"]))
        for _, row in read_table(path, COLUMNS)
    ]


def number_examples(examples: Sequence[Example], task: Task, pictures: Sequence[Picture]) -> Ints:
    """Examples as sampling takes them: numbers of patches (k,), or (image, row, column) of places (k, 3)."""
    number_of = {picture.name: i for i, picture in enumerate(pictures)}
    if unknown := [one.image for one in examples if one.image not in number_of]:
        raise DataError(f"The hard example {unknown[0]!r} is not among the training images.")
    places = [(number_of[one.image], one.row, one.column) for one in examples]
    found = np.array(places, np.int64).reshape(-1, 3)
    return found if task == "mitosis" else found[:, 0]
