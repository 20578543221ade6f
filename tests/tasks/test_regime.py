"""Regimes of real collections: the published amounts, each inside of the larger ones."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from layouts import amida13, kumar, pcam

from rotopath.data.dataset import DataError, Sample
from rotopath.data.formats import open_data
from rotopath.data.kumar import ORGANS
from rotopath.data.splits import AMIDA13_REGIMES, KUMAR_REGIMES, PCAM_REGIMES
from rotopath.tasks import NUCLEI, PAPER, Overrides, make_task


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("regimes")
    names = [f"TCGA-{code}-01Z-00-DX1" for codes in ORGANS.values() for code in codes]
    return {
        "mitosis": amida13(root / "a", size=(8, 8)),
        "nuclei": kumar(root / "k", names, split_csv=False, size=8),
        "tumor": pcam(root / "p", counts=(40, 4, 4), size=8),
    }


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("task", "amounts"), [("mitosis", AMIDA13_REGIMES), ("nuclei", KUMAR_REGIMES), ("tumor", PCAM_REGIMES)]
)
def test_regimes_hold_what_they_say_and_nest(
    folders: dict[str, Path], task: str, amounts: tuple[float, ...], seed: int
) -> None:
    samples = open_data(folders[task]).split("train")
    taken = [PAPER[task].take_regime(samples, amount, seed) for amount in amounts]
    assert taken[0] == samples
    for larger, smaller in pairwise(taken):
        assert set(smaller) < set(larger)
    for amount, found in zip(amounts, taken, strict=True):
        if task == "mitosis":
            assert len({sample.case for sample in found}) == amount
            assert len(found) == 2 * amount, "all fields of a case"
        elif task == "nuclei":
            assert Counter(sample.stratum for sample in found) == dict.fromkeys(ORGANS, amount)
        else:
            assert Counter(sample.label for sample in found) == {"normal": 20 * amount, "tumor": 20 * amount}


@pytest.mark.parametrize(
    ("task", "amount", "sentence"),
    [
        ("mitosis", 9, "takes 1 to 8 of the training cases; got 9"),
        ("mitosis", 0, "is a whole number of cases; got 0"),
        ("mitosis", 1.5, "is a whole number of cases; got 1.5"),
        ("nuclei", 1.5, "is a whole number of fields of each organ; got 1.5"),
        ("nuclei", 4, "takes 1 to 3 of the training items of 'breast'; got 4"),
        ("tumor", 2, "above 0 and up to 1; got 2"),
        ("tumor", float("nan"), "above 0 and up to 1; got nan"),
    ],
)
def test_impossible_regimes_are_refused(folders: dict[str, Path], task: str, amount: float, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        PAPER[task].take_regime(open_data(folders[task]).split("train"), amount, 0)


@pytest.mark.parametrize("amount", [0.5, 1.5, 0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("task", "expected"), [("mitosis", "a whole number of cases"), ("nuclei", "a whole number of fields of each organ")]
)
def test_cases_and_fields_are_whole_numbers(task: str, expected: str, amount: float) -> None:
    """Said before any data is opened, by a recipe."""
    assert PAPER[task].check_regime(amount) == expected
    assert PAPER[task].check_regime(2) is None
    assert PAPER[task].check_regime(2.0) is None


@pytest.mark.parametrize("amount", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_patches_are_taken_by_fractions(amount: float) -> None:
    assert PAPER["tumor"].check_regime(amount) == "a fraction of each class, over 0 and up to 1,"
    assert PAPER["tumor"].check_regime(1) is None
    assert PAPER["tumor"].check_regime(0.01) is None


def test_amounts_are_said_in_words() -> None:
    said = [PAPER[task].describe_regime(amount) for task, amount in (("mitosis", 4), ("nuclei", 2), ("tumor", 0.25))]
    assert said == ["4 cases", "2 fields of each organ", "25%"]


def test_a_fraction_is_one_of_each_of_several_classes() -> None:
    """Also of a class whose label is written in two ways, and of a rare one, of which one patch at least is left."""
    task = make_task("classify", Overrides(classes=("fat", "stroma", "tumor")))
    labels = ["fat"] * 20 + ["Stroma", "1"] * 4 + ["tumor"] * 2
    samples = [Sample(Path(f"{i}.png"), f"{i}.png", "", "train", 1.0, label=label) for i, label in enumerate(labels)]
    larger = set(samples)
    for amount, counts in ((1.0, [20, 8, 2]), (0.5, [10, 4, 1]), (0.1, [2, 1, 1])):
        taken = task.take_regime(samples, amount, seed=0)
        assert np.bincount(task.labels(taken)).tolist() == counts
        assert set(taken) <= larger
        larger = set(taken)


def test_fields_of_no_organ_have_no_regime(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    samples = [replace(sample, stratum="") for sample in open_data(tmp_path).samples]
    with pytest.raises(DataError, match=r"takes fields of each organ, but that of Tissue Images/a.tif is not known"):
        NUCLEI.take_regime(samples, 1, 0)
