"""Published splits by their numbers; regimes by their properties: nested, stratified, repeatable, free of leaks."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotopath.data import splits

MITOSES = [73, 37, 18, 224, 6, 96, 68, 3, 2, 0, 15, 8, 3, 16, 66, 9, 6, 212, 2, 0, 115, 72, 32]  # of AMIDA13's cases
KNOWN_CASES = ["04", "06", "08", "11"]
KNOWN_FRACTION = [2, 9, 10, 17]
ORGANS = {f"{organ}-{i}": organ for organ in ("breast", "kidney", "liver", "prostate") for i in range(6)}


def test_amida13_is_split_as_in_the_paper() -> None:
    mitoses = dict.fromkeys(splits.SPLITS, 0)
    cases = dict.fromkeys(splits.SPLITS, 0)
    for case, count in enumerate(MITOSES, 1):
        mitoses[splits.amida13_split(case)] += count
        cases[splits.amida13_split(case)] += 1
    assert mitoses == {"train": 458, "valid": 92, "test": 533}
    assert cases == {"train": 8, "valid": 4, "test": 11}
    for unknown in (0, 24):
        with pytest.raises(ValueError, match=f"cases 1 to 23; got case {unknown}"):
            splits.amida13_split(unknown)


@pytest.mark.parametrize("seed", range(5))
def test_kumar_is_split_by_organ(seed: int) -> None:
    split = splits.split_strata(ORGANS, splits.KUMAR_FIELDS, seed)
    assert set(split) == set(ORGANS)
    for organ in set(ORGANS.values()):
        names = [split[item] for item in ORGANS if ORGANS[item] == organ]
        assert sorted(names) == ["test", "test", "train", "train", "train", "valid"]


def test_organs_draw_independently_and_seeds_differ() -> None:
    split = splits.split_strata(ORGANS, splits.KUMAR_FIELDS, seed=0)
    patterns = {tuple(split[f"{organ}-{i}"] for i in range(6)) for organ in ("breast", "kidney", "liver", "prostate")}
    assert len(patterns) > 1
    assert split != splits.split_strata(ORGANS, splits.KUMAR_FIELDS, seed=1)


def test_a_stratum_of_another_size_is_refused() -> None:
    with pytest.raises(ValueError, match=r"3 train, 1 valid, 2 test needs 6 items of each kind, but 'liver' has 5"):
        splits.split_strata({k: v for k, v in ORGANS.items() if k != "liver-0"}, splits.KUMAR_FIELDS, seed=0)


def test_the_published_regimes_are_nested() -> None:
    cases = [f"{case:02d}" for case in sorted(splits.AMIDA13_TRAIN_CASES)]
    larger = set(cases)
    for count in splits.AMIDA13_REGIMES:
        taken = splits.take_cases(cases, count, seed=3)
        assert len(taken) == count
        assert set(taken) <= larger
        larger = set(taken)
    train = {k: v for k, v in ORGANS.items() if k[-1] in "012"}
    larger = set(train)
    for count in splits.KUMAR_REGIMES:
        taken = splits.take_of_each(train, count, seed=3)
        assert len(taken) == 4 * count
        assert {organ: sum(ORGANS[t] == organ for t in taken) for organ in set(ORGANS.values())} == dict.fromkeys(
            set(ORGANS.values()), count
        )
        assert set(taken) <= larger
        larger = set(taken)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_fractions_are_nested_and_stratified(labels: list[int], seed: int) -> None:
    array = np.array(labels)
    larger = set(range(len(labels)))
    for fraction in splits.PCAM_REGIMES:
        taken = splits.take_fraction(array, fraction, seed)
        assert taken.tolist() == sorted(set(taken.tolist()))
        assert set(taken.tolist()) <= larger
        for label in set(labels):
            count = labels.count(label)
            assert (array[taken] == label).sum() == max(1, round(fraction * count))
        larger = set(taken.tolist())


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=12), st.integers(0, 99), st.randoms())
@settings(deadline=None, max_examples=50)
def test_the_order_of_the_items_does_not_matter(items: set[str], seed: int, random: object) -> None:
    shuffled = sorted(items)
    random.shuffle(shuffled)
    count = len(items) // 2
    assert splits.take_cases(shuffled, count, seed) == splits.take_cases(sorted(items), count, seed)


def test_the_same_seed_gives_the_same_answer_everywhere() -> None:
    """Written down once: a change here would silently change everybody's regimes."""
    cases = [f"{case:02d}" for case in sorted(splits.AMIDA13_TRAIN_CASES)]
    assert splits.take_cases(cases, 4, seed=0) == KNOWN_CASES
    assert splits.take_fraction(np.arange(20) % 2, 0.25, seed=0).tolist() == KNOWN_FRACTION


def test_impossible_regimes_are_refused() -> None:
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"takes 1 to 2 of the training cases; got {count}"):
            splits.take_cases(["a", "b"], count, seed=0)
        with pytest.raises(ValueError, match=f"1 to 2 of the training items of 'x'; got {count}"):
            splits.take_of_each({"a": "x", "b": "x"}, count, seed=0)
    for fraction in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="above 0 and up to 1"):
            splits.take_fraction(np.zeros(4, int), fraction, seed=0)


def test_patients_in_two_splits_are_named() -> None:
    pairs = [("p1", "train"), ("p1", "train"), ("p2", "test"), ("p2", "train"), ("p3", "valid")]
    assert splits.leaks(pairs) == ["patient p2 is in train and test; each must be in one split only."]
    assert splits.leaks([("p1", "train"), ("p2", "test")]) == []
