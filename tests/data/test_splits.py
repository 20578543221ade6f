"""Published splits have the published counts; regimes are nested, stratified, reproducible and free of leaks."""

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


def test_organs_are_split_independently_and_seeds_differ() -> None:
    split = splits.split_strata(ORGANS, splits.KUMAR_FIELDS, seed=0)
    patterns = {tuple(split[f"{organ}-{i}"] for i in range(6)) for organ in ("breast", "kidney", "liver", "prostate")}
    assert len(patterns) > 1
    assert split != splits.split_strata(ORGANS, splits.KUMAR_FIELDS, seed=1)


def test_stratum_of_wrong_size_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"3 train, 1 valid, 2 test needs exactly 6 items in each stratum .*, but 'liver' has 5"
    ):
        splits.split_strata({k: v for k, v in ORGANS.items() if k != "liver-0"}, splits.KUMAR_FIELDS, seed=0)


def test_published_regimes_are_nested() -> None:
    cases = [f"{case:02d}" for case in sorted(splits.AMIDA13_TRAIN_CASES)]
    larger = set(cases)
    for count in (8, 6, 4, 2):
        selected = splits.select_cases(cases, count, seed=3)
        assert len(selected) == count
        assert set(selected) <= larger
        larger = set(selected)
    train = {k: v for k, v in ORGANS.items() if k[-1] in "012"}
    larger = set(train)
    for count in (3, 2, 1):
        selected = splits.select_per_stratum(train, count, seed=3)
        assert len(selected) == 4 * count
        assert {organ: sum(ORGANS[t] == organ for t in selected) for organ in set(ORGANS.values())} == dict.fromkeys(
            set(ORGANS.values()), count
        )
        assert set(selected) <= larger
        larger = set(selected)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=200), st.integers(0, 99))
@settings(deadline=None, max_examples=50)
def test_fractions_are_nested_and_stratified(labels: list[int], seed: int) -> None:
    array = np.array(labels)
    larger = set(range(len(labels)))
    for fraction in (1.0, 0.75, 0.5, 0.25, 0.1):
        selected = splits.select_fraction(array, fraction, seed)
        assert selected.tolist() == sorted(set(selected.tolist()))
        assert set(selected.tolist()) <= larger
        for label in set(labels):
            count = labels.count(label)
            assert (array[selected] == label).sum() == max(1, round(fraction * count))
        larger = set(selected.tolist())


@given(st.sets(st.text("abcdef", min_size=1, max_size=4), min_size=2, max_size=12), st.integers(0, 99), st.randoms())
@settings(deadline=None, max_examples=50)
def test_order_of_items_does_not_matter(items: set[str], seed: int, random: object) -> None:
    shuffled = sorted(items)
    random.shuffle(shuffled)
    count = len(items) // 2
    assert splits.select_cases(shuffled, count, seed) == splits.select_cases(sorted(items), count, seed)


def test_known_regimes_stay_the_same() -> None:
    """A change here would silently change the regimes of all users."""
    cases = [f"{case:02d}" for case in sorted(splits.AMIDA13_TRAIN_CASES)]
    assert splits.select_cases(cases, 4, seed=0) == KNOWN_CASES
    assert splits.select_fraction(np.arange(20) % 2, 0.25, seed=0).tolist() == KNOWN_FRACTION


def test_impossible_regimes_are_refused() -> None:
    for count in (0, 3):
        with pytest.raises(ValueError, match=f"is {count} cases; expected 1 to 2"):
            splits.select_cases(["a", "b"], count, seed=0)
        message = rf"is {count} images of each organ; expected 1 to 2, the number of training images of the organ 'x'"
        with pytest.raises(ValueError, match=message):
            splits.select_per_stratum({"a": "x", "b": "x"}, count, seed=0)
    for fraction in (0.0, 1.5, -0.1):
        with pytest.raises(ValueError, match="above 0 and up to 1"):
            splits.select_fraction(np.zeros(4, int), fraction, seed=0)


def test_patients_in_two_splits_are_reported() -> None:
    pairs = [("p1", "train"), ("p1", "train"), ("p2", "test"), ("p2", "train"), ("p3", "valid")]
    assert splits.find_leaks(pairs) == [
        "patient or slide p2 is in train and test; move all of its images to one split."
    ]
    assert splits.find_leaks([("p1", "train"), ("p2", "test")]) == []
