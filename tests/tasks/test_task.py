"""All tasks: training regimes of the published sizes, invalid ones, and nested subsets."""

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
    ("task", "amounts"), [("mitosis", (8, 6, 4, 2)), ("nuclei", (3, 2, 1)), ("tumor", (1.0, 0.75, 0.5, 0.25, 0.1))]
)
def test_the_papers_regimes_have_the_right_size_and_are_nested(
    folders: dict[str, Path], task: str, amounts: tuple[float, ...], seed: int
) -> None:
    samples = open_data(folders[task]).split("train")
    subsets = [PAPER[task].select_training_subset(samples, amount, seed) for amount in amounts]
    assert subsets[0] == samples
    for larger, smaller in pairwise(subsets):
        assert set(smaller) < set(larger)
    for amount, subset in zip(amounts, subsets, strict=True):
        if task == "mitosis":
            assert len({sample.case for sample in subset}) == amount
            assert len(subset) == 2 * amount, "all fields of a case"
        elif task == "nuclei":
            assert Counter(sample.stratum for sample in subset) == dict.fromkeys(ORGANS, amount)
        else:
            assert Counter(sample.label for sample in subset) == {"normal": 20 * amount, "tumor": 20 * amount}


@pytest.mark.parametrize(
    ("task", "amount", "sentence"),
    [
        ("mitosis", 9, "is 9 cases; expected 1 to 8"),
        ("mitosis", 0, "must be a whole number of cases; got 0"),
        ("mitosis", 1.5, "must be a whole number of cases; got 1.5"),
        ("nuclei", 1.5, "must be a whole number of fields of each organ; got 1.5"),
        ("nuclei", 4, "is 4 images of each organ; expected 1 to 3"),
        ("tumor", 2, "is 2; expected a fraction of the training set above 0 and up to 1"),
        ("tumor", float("nan"), "is nan; expected a fraction of the training set above 0 and up to 1"),
    ],
)
def test_invalid_regimes_are_refused(folders: dict[str, Path], task: str, amount: float, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        PAPER[task].select_training_subset(open_data(folders[task]).split("train"), amount, 0)


@pytest.mark.parametrize("amount", [0.5, 1.5, 0, -1, float("nan"), float("inf")])
@pytest.mark.parametrize(
    ("task", "expected"), [("mitosis", "a whole number of cases"), ("nuclei", "a whole number of fields of each organ")]
)
def test_the_number_of_cases_or_fields_is_a_whole_number(task: str, expected: str, amount: float) -> None:
    """A recipe checks this before any data is opened."""
    assert PAPER[task].check_regime(amount) == expected
    assert PAPER[task].check_regime(2) is None
    assert PAPER[task].check_regime(2.0) is None


@pytest.mark.parametrize("amount", [0, -0.1, 1.01, float("nan"), float("inf")])
def test_the_amount_of_patches_is_a_fraction(amount: float) -> None:
    assert PAPER["tumor"].check_regime(amount) == "a fraction of each class, above 0 and up to 1"
    assert PAPER["tumor"].check_regime(1) is None
    assert PAPER["tumor"].check_regime(0.01) is None


def test_amounts_are_described_with_their_units() -> None:
    texts = [PAPER[task].describe_regime(amount) for task, amount in (("mitosis", 4), ("nuclei", 2), ("tumor", 0.25))]
    assert texts == ["4 cases", "2 fields of each organ", "25%"]


def test_a_fraction_is_selected_of_each_class() -> None:
    """Also if the label of a class is written in two ways, and at least one patch of a rare class."""
    task = make_task("classify", Overrides(classes=("fat", "stroma", "tumor")))
    labels = ["fat"] * 20 + ["Stroma", "1"] * 4 + ["tumor"] * 2
    samples = [Sample(Path(f"{i}.png"), f"{i}.png", "", "train", 1.0, label=label) for i, label in enumerate(labels)]
    larger = set(samples)
    for amount, counts in ((1.0, [20, 8, 2]), (0.5, [10, 4, 1]), (0.1, [2, 1, 1])):
        subset = task.select_training_subset(samples, amount, seed=0)
        assert np.bincount(task.image_targets(subset)).tolist() == counts
        assert set(subset) <= larger
        larger = set(subset)


def test_fields_of_an_unknown_organ_have_no_regime(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    samples = [replace(sample, stratum="") for sample in open_data(tmp_path).samples]
    with pytest.raises(
        DataError, match=r"training images of each organ, but the organ of Tissue Images/a.tif is not known"
    ):
        NUCLEI.select_training_subset(samples, 1, 0)
