"""Small synthetic datasets of all three tasks, which tests of several modules read."""

import csv
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor
from rotopath.synthetic.nuclei import Nuclei, NucleusType, sample_nuclei

SMALL_PX = 192
FEW_PATCHES = {"train": 24, "valid": 12, "test": 13}

MAKERS: dict[str, Callable[[Path, int], None]] = {
    "mitosis": lambda out, seed: make_mitosis(out, seed, fields_per_case=2, size_px=SMALL_PX),
    "nuclei": lambda out, seed: make_nuclei(out, seed, size_px=SMALL_PX),
    "tumor": lambda out, seed: make_tumor(out, seed, patches=FEW_PATCHES),
}


def read_rows(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """Read the rows of a CSV, which must have exactly these columns."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == columns, path
    return rows


def sample_nucleus(kind: NucleusType, center: complex) -> Nuclei:
    """Sample one nucleus at a position, at 0.25 µm/px."""
    return sample_nuclei(np.random.default_rng(0), kind, np.array([center], np.complex64), 0.25)
