"""Divide samples into training, validation and test sets, and select reduced training sets.

The items that are divided are samples, or the cases (patients) of the samples. Splits come from a `split.csv` of the
user, or are drawn at random within strata. A stratum is a group of items, such as all items of an organ or of a class.
The same seed gives the same result on every machine and for any order of the items.

A regime is a reduced amount of training data. For the same seed, the training set of a smaller regime is a subset of
the training set of a larger regime.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rotopath.data.dataset import DataError, Finding, Row, count_and_list, read_table

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
SPLIT_WORDS: Mapping[
    str, Split
] = {  # words for the splits in tables and in names of folders; upper and lower case are the same
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("valid", "val", "validation"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
SPLIT_FILE = "split.csv"

AMIDA13_VALID_CASES = frozenset({3, 5, 7, 10})  # with 92 mitoses, as in Lafarge et al. (arXiv:2002.08725)
AMIDA13_TRAIN_CASES = frozenset(range(1, 13)) - AMIDA13_VALID_CASES
AMIDA13_TEST_CASES = frozenset(range(13, 24))

KUMAR_FIELDS = {"train": 3, "valid": 1, "test": 2}  # number of fields (images) of each organ in each split


# Splits


def find_split(word: str) -> Split | None:
    """Return the split that a word means, or None for other words.

    >>> find_split("val"), find_split("Training"), find_split("tests")
    ('valid', 'train', None)
    """
    return SPLIT_WORDS.get(word.strip().casefold())


def amida13_split(case: int) -> str:
    """Return the published split of one of the 23 cases of AMIDA13."""
    if case in AMIDA13_TRAIN_CASES:
        return "train"
    if case in AMIDA13_VALID_CASES:
        return "valid"
    if case in AMIDA13_TEST_CASES:
        return "test"
    raise ValueError(f"AMIDA13 has cases 1 to 23; got case {case}.")


def split_strata(strata: Mapping[str, str], counts: Mapping[str, int], seed: int) -> dict[str, str]:
    """Divide the items of every stratum at random, with a fixed number of items in each split.

    `strata` maps each item to its stratum; `counts` maps each split to the number of items that it receives from every
    stratum. Returns the split of each item. Raises ValueError unless every stratum has exactly as many items as the sum
    of `counts`.
    """
    splits: dict[str, str] = {}
    for stratum, items in _group_by_stratum(strata).items():
        if len(items) != sum(counts.values()):
            parts = ", ".join(f"{count} {split}" for split, count in counts.items())
            raise ValueError(
                f"A split into {parts} needs exactly {sum(counts.values())} items in each stratum (such as an organ), "
                f"but {stratum!r} has {len(items)}; provide your own split."
            )
        names = [split for split, count in counts.items() for _ in range(count)]
        splits.update(zip(_shuffle(items, seed, stratum), names, strict=True))
    return splits


def split_fractions(strata: Mapping[str, str], fractions: Mapping[str, float], seed: int) -> dict[str, str]:
    """Divide the items of every stratum at random, with a fixed fraction of items in each split.

    `strata` maps each item to its stratum; `fractions` maps each split to its fraction. Returns the split of each item.

    Every split except the first in `fractions` receives its fraction of the items of a stratum, rounded down. It
    receives at least one item if the stratum has at least as many items as there are splits. The first split receives
    the remaining items.
    """
    first, *others = fractions
    splits: dict[str, str] = {}
    for stratum, items in _group_by_stratum(strata).items():
        minimum = 1 if len(items) >= len(fractions) else 0
        names = [split for split in others for _ in range(max(minimum, int(fractions[split] * len(items))))]
        names += [first] * (len(items) - len(names))
        splits.update(zip(_shuffle(items, seed, stratum), names, strict=True))
    return splits


def read_split_file(
    root: Path, column: str, present: Collection[str], key_of: Callable[[str], str] = str
) -> tuple[dict[str, Row] | None, list[Finding]]:
    """Read the `split.csv` of a folder; return a dictionary from items to rows, and findings about the file.

    `column` is the name of the column with the items (case, image or id). `key_of` converts a cell of this column to
    the name of an item. `present` are the names of the items in the folder.

    Invalid rows, and rows of items that are not in the folder, are left out and reported as problems. Items in the
    folder that have no row are reported as a note. If the file does not exist, None is returned instead of the
    dictionary.
    """
    path = root / SPLIT_FILE
    if not path.is_file():
        return None, []
    rows: dict[str, Row] = {}
    findings = []
    for line, row in read_table(path, (column, "split")):
        key = key_of(row[column])
        if (split := find_split(row["split"])) is None:
            message = f"line {line} has the split {row['split']!r}; choose from {', '.join(SPLITS)}."
        elif key in rows:
            message = f"line {line} repeats {row[column]!r}; list it once."
        else:
            rows[key] = {**row, "split": split}
            continue
        findings.append(Finding(path.name, message))
    if missing := sorted(rows.keys() - set(present)):
        findings.append(
            Finding(
                path.name,
                f"lists {count_and_list(missing, column)} that the folder does not contain; correct these lines.",
            )
        )
    if unlisted := sorted(set(present) - rows.keys()):
        findings.append(note_without_split(unlisted, column))
    return {key: row for key, row in rows.items() if key in present}, findings


def note_without_split(names: Sequence[str], column: str) -> Finding:
    """Return a note that the items `names` have no split and are left out; `column` is their column in split.csv."""
    message = (
        f"{column}s without a split are left out: {count_and_list(names, column)}; to use them, add them to a "
        f"{SPLIT_FILE} ({column},split)."
    )
    return Finding("", message, is_problem=False)


def find_leaks(splits: Iterable[tuple[str, str]]) -> list[str]:
    """Return a message for every patient or slide that has images in several splits.

    `splits` contains the pair (patient or slide, split) of each image.
    """
    splits_of: dict[str, set[str]] = defaultdict(set)
    for patient, split in splits:
        splits_of[patient].add(split)
    return [
        f"patient or slide {patient} is in {' and '.join(s for s in SPLITS if s in patient_splits)}; move all of its "
        f"images to one split."
        for patient, patient_splits in sorted(splits_of.items())
        if len(patient_splits) > 1
    ]


# Regimes


def select_cases(cases: Iterable[str], count: int, seed: int) -> list[str]:
    """Select `count` cases at random. Returns the selected cases, sorted.

    For the same seed, a smaller selection is a subset of a larger one.

    >>> from rotopath.data.splits import select_cases
    >>> few, more = (select_cases(["01", "02", "04", "06", "08"], count, seed=0) for count in (2, 4))
    >>> len(few), len(more), set(few) <= set(more)
    (2, 4, True)
    """
    cases = sorted(set(cases))
    if not 1 <= count <= len(cases):
        raise DataError(
            f"The `regime` (amount of training data) is {count} cases; expected 1 to {len(cases)}, the number of "
            f"training cases."
        )
    return sorted(_shuffle(cases, seed)[:count])


def select_per_stratum(strata: Mapping[str, str], count: int, seed: int) -> list[str]:
    """Select `count` items of every stratum at random; `strata` maps each item to its stratum.

    Returns the selected items, sorted. For the same seed, a smaller selection is a subset of a larger one.
    """
    selected: list[str] = []
    for stratum, items in _group_by_stratum(strata).items():
        if not 1 <= count <= len(items):
            raise DataError(
                f"The `regime` (amount of training data) is {count} images of each organ; expected 1 to "
                f"{len(items)}, the number of training images of the organ {stratum!r}."
            )
        selected += _shuffle(items, seed, stratum)[:count]
    return sorted(selected)


def select_fraction(labels: NDArray[np.integer], fraction: float, seed: int) -> NDArray[np.int64]:
    """Select a fraction of the items of every class at random, at least one item of each class.

    `labels` contains the class number of each item. Returns indices into `labels`, in increasing order. For the same
    seed, a smaller selection is a subset of a larger one.
    """
    if not 0 < fraction <= 1:
        raise DataError(
            f"The `regime` (amount of training data) is {fraction}; expected a fraction of the training set above 0 "
            f"and up to 1."
        )
    selected = []
    for label in np.unique(labels):
        indices = np.flatnonzero(labels == label)
        order = _generator(seed, int(label)).permutation(len(indices))
        selected.append(indices[order[: max(1, round(fraction * len(indices)))]])
    return np.sort(np.concatenate(selected)).astype(np.int64) if selected else np.empty(0, np.int64)


def _group_by_stratum(strata: Mapping[str, str]) -> dict[str, list[str]]:
    """Return a dictionary from each stratum to its items. Both the strata and the items of a stratum are sorted."""
    groups: dict[str, list[str]] = defaultdict(list)
    for item in sorted(strata):
        groups[strata[item]].append(item)
    return dict(sorted(groups.items()))


def _shuffle(items: Sequence[str], seed: int, *context: Hashable) -> list[str]:
    """Return the items in a random order, which depends on the seed and `context` but not on the given order."""
    ordered = sorted(items)
    return [ordered[i] for i in _generator(seed, *context).permutation(len(ordered))]


def _generator(seed: int, *context: Hashable) -> np.random.Generator:
    """Return a random generator for `context`, such as the name of a stratum.

    For the same seed, the generators of different contexts are independent.
    """
    return np.random.default_rng([seed, *(byte for word in context for byte in str(word).encode())])
