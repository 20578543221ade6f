"""Regimes of real collections: the published amounts, each inside of the larger ones."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from layouts import amida13, kumar, pcam

from rotopath.data.collection import DataError
from rotopath.data.kumar import ORGANS
from rotopath.data.opening import open_data
from rotopath.data.regime import take_regime
from rotopath.data.splits import AMIDA13_REGIMES, KUMAR_REGIMES, PCAM_REGIMES


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
    pictures = open_data(folders[task]).split("train")
    taken = [take_regime(task, pictures, amount, seed) for amount in amounts]  # type: ignore[arg-type]
    assert taken[0] == pictures
    for larger, smaller in pairwise(taken):
        assert set(smaller) < set(larger)
    for amount, found in zip(amounts, taken, strict=True):
        if task == "mitosis":
            assert len({picture.case for picture in found}) == amount
            assert len(found) == 2 * amount, "all fields of a case"
        elif task == "nuclei":
            assert Counter(picture.stratum for picture in found) == dict.fromkeys(ORGANS, amount)
        else:
            assert Counter(picture.label for picture in found) == {0: 20 * amount, 1: 20 * amount}


@pytest.mark.parametrize(
    ("task", "amount", "sentence"),
    [
        ("mitosis", 9, "takes 1 to 8 of the training cases; got 9"),
        ("mitosis", 0.5, "is a number of cases, a whole one; got 0.5"),
        ("nuclei", 4, "takes 1 to 3 of the training items of 'breast'; got 4"),
        ("tumor", 2, "above 0 and up to 1; got 2"),
        ("tumor", float("nan"), "above 0 and up to 1; got nan"),
        ("mitosis", float("nan"), "is a number of cases, a whole one; got nan"),
    ],
)
def test_impossible_regimes_are_refused(folders: dict[str, Path], task: str, amount: float, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        take_regime(task, open_data(folders[task]).split("train"), amount, 0)  # type: ignore[arg-type]


def test_fields_of_no_organ_have_no_regime(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    pictures = [replace(picture, stratum="") for picture in open_data(tmp_path).pictures]
    with pytest.raises(DataError, match=r"takes fields of each organ, but that of Tissue Images/a.tif is not known"):
        take_regime("nuclei", pictures, 1, 0)
