"""Hard example mining: find the worst mistakes of a baseline network on the training images.

The module `loop` first trains a baseline network. `mine_hard_examples` writes the worst mistakes of this network to the
file `mined.csv` in the run folder, one row per mistake, the worst first. These are the hard examples. In the training
that follows, the sampler draws windows at the positions of the hard examples more often.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rotopath.data import DataError, Sample
from rotopath.data.dataset import read_table
from rotopath.data.sampling import Ints
from rotopath.evaluation import gather_evidence
from rotopath.models import DenseNetwork
from rotopath.tasks import HardExample, Task
from rotopath.writing import write_text

MINED = "mined.csv"
MINED_COLUMNS = ("image", "row", "column", "score")


def mine_hard_examples(
    task: Task, network: DenseNetwork, samples: Sequence[Sample], device: torch.device, max_examples: int, path: Path
) -> None:
    """Write the worst mistakes of a baseline network on the training samples `samples` to the CSV file `path`.

    `network` is the baseline network. At most `max_examples` mistakes are written, the worst first.
    """
    evidence = gather_evidence(task, network, samples, device)
    write_hard_examples(path, task.find_hard_examples(evidence, max_examples))


def write_hard_examples(path: Path, examples: Sequence[HardExample]) -> None:
    """Write hard examples to a CSV file, in the given order."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(MINED_COLUMNS)
    writer.writerows((example.image, example.row, example.column, f"{example.score:.6f}") for example in examples)
    write_text(path, text.getvalue())


def read_hard_examples(path: Path) -> list[HardExample]:
    """Read hard examples from a CSV file, in the order in which they were written."""
    return [
        HardExample(row["image"], int(row["row"]), int(row["column"]), float(row["score"]))
        for _, row in read_table(path, MINED_COLUMNS)
    ]


def index_hard_examples(examples: Sequence[HardExample], task: Task, samples: Sequence[Sample]) -> Ints:
    """Convert hard examples to the array `mined` for the sampler of the task (`Task.make_sampler`).

    The array (n, 3) has the columns image index, row and column; row and column are in pixels. For tasks that classify
    whole images, the array (n,) contains only the image index. The image index i stands for `samples[i]`. Raises
    DataError if the image of a hard example is not among the samples.
    """
    index_of = {sample.name: index for index, sample in enumerate(samples)}
    if unknown := [example.image for example in examples if example.image not in index_of]:
        raise DataError(
            f"The image {unknown[0]!r} of a hard example in {MINED} is not among the training images; restore the "
            f"data, or choose another folder with --out."
        )
    positions = [(index_of[example.image], example.row, example.column) for example in examples]
    return task.examples_for_sampler(np.array(positions, np.int64).reshape(-1, 3))
