"""Splits and regimes as published: which case trains, validates or tests, and smaller training sets inside larger ones.

In: cases, strata or labels, and a seed. Out: names of splits, or the items of a regime. The same seed gives the same
answer on any machine and whatever the order of the items, and a smaller regime always lies inside a larger one.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SPLITS = ("train", "valid", "test")

AMIDA13_VALID_CASES = frozenset({3, 5, 7, 10})  # with 92 mitoses, as in the paper
AMIDA13_TRAIN_CASES = frozenset(range(1, 13)) - AMIDA13_VALID_CASES
AMIDA13_TEST_CASES = frozenset(range(13, 24))
AMIDA13_REGIMES = (8, 6, 4, 2)  # training cases

KUMAR_FIELDS = {"train": 3, "valid": 1, "test": 2}  # of the six fields of an organ
KUMAR_REGIMES = (3, 2, 1)  # training fields of an organ

PCAM_REGIMES = (1.0, 0.75, 0.5, 0.25, 0.1)  # of the training patches of each class


def amida13_split(case: int) -> str:
    """The split of one of AMIDA13's 23 cases."""
    if case in AMIDA13_TRAIN_CASES:
        return "train"
    if case in AMIDA13_VALID_CASES:
        return "valid"
    if case in AMIDA13_TEST_CASES:
        return "test"
    raise ValueError(f"AMIDA13 has cases 1 to 23; got case {case}.")


def split_strata(strata: Mapping[str, str], counts: Mapping[str, int], seed: int) -> dict[str, str]:
    """The split of each item, so many of every stratum: `strata` maps items to theirs, `counts` splits to numbers."""
    splits: dict[str, str] = {}
    for stratum, items in _grouped(strata).items():
        if len(items) != sum(counts.values()):
            raise ValueError(
                f"A split into {_listed(counts)} needs {sum(counts.values())} items of each kind, "
                f"but {stratum!r} has {len(items)}; give a split of your own."
            )
        names = [split for split, count in counts.items() for _ in range(count)]
        splits.update(zip(_shuffled(items, seed, stratum), names, strict=True))
    return splits


def split_fractions(strata: Mapping[str, str], fractions: Mapping[str, float], seed: int) -> dict[str, str]:
    """The split of each item, such fractions of every stratum; the first split takes what rounding leaves over.

    Each split gets one item at least of a stratum that has enough of them.
    """
    first, *others = fractions
    splits: dict[str, str] = {}
    for stratum, items in _grouped(strata).items():
        least = 1 if len(items) >= len(fractions) else 0
        names = [split for split in others for _ in range(max(least, int(fractions[split] * len(items))))]
        names += [first] * (len(items) - len(names))
        splits.update(zip(_shuffled(items, seed, stratum), names, strict=True))
    return splits


def take_cases(cases: Iterable[str], count: int, seed: int) -> list[str]:
    """`count` of the cases, in their sorted order; the ones of a smaller count are among those of a larger."""
    cases = sorted(set(cases))
    if not 1 <= count <= len(cases):
        raise ValueError(f"A regime takes 1 to {len(cases)} of the training cases; got {count}.")
    return sorted(_shuffled(cases, seed)[:count])


def take_of_each(strata: Mapping[str, str], count: int, seed: int) -> list[str]:
    """`count` items of every stratum, nested like `take_cases`."""
    taken: list[str] = []
    for stratum, items in _grouped(strata).items():
        if not 1 <= count <= len(items):
            raise ValueError(f"A regime takes 1 to {len(items)} of the training items of {stratum!r}; got {count}.")
        taken += _shuffled(items, seed, stratum)[:count]
    return sorted(taken)


def take_fraction(labels: NDArray[np.integer], fraction: float, seed: int) -> NDArray[np.int64]:
    """Positions, in rising order, of a fraction of each class, one at least, nested like `take_cases`."""
    if not 0 < fraction <= 1:
        raise ValueError(f"A regime takes a fraction of the training set above 0 and up to 1; got {fraction}.")
    taken = []
    for label in np.unique(labels):
        positions = np.flatnonzero(labels == label)
        order = _generator(seed, int(label)).permutation(len(positions))
        taken.append(positions[order[: max(1, round(fraction * len(positions)))]])
    return np.sort(np.concatenate(taken)).astype(np.int64) if taken else np.empty(0, np.int64)


def leaks(splits: Iterable[tuple[str, str]]) -> list[str]:
    """A sentence for every patient that (patient, split) pairs put into more than one split."""
    found: dict[str, set[str]] = defaultdict(set)
    for patient, split in splits:
        found[patient].add(split)
    return [
        f"patient {patient} is in {' and '.join(s for s in SPLITS if s in names)}; each must be in one split only."
        for patient, names in sorted(found.items())
        if len(names) > 1
    ]


def _grouped(strata: Mapping[str, str]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = defaultdict(list)
    for item in sorted(strata):
        groups[strata[item]].append(item)
    return dict(sorted(groups.items()))


def _shuffled(items: Sequence[str], seed: int, *context: Hashable) -> list[str]:
    """The items in a random order that is the same for the same set of items."""
    ordered = sorted(items)
    return [ordered[i] for i in _generator(seed, *context).permutation(len(ordered))]


def _generator(seed: int, *context: Hashable) -> np.random.Generator:
    """Random numbers for one purpose: strata and classes draw independently of each other."""
    return np.random.default_rng([seed, *(b for word in context for b in str(word).encode())])


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in counts.items())
