"""All tasks: training regimes, thresholds that a user chooses, and plausible densities."""

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
from rotopath.tasks import MITOSIS, NUCLEI, PAPER, TUMOR, Overrides, Task, make_task


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
    assert [PAPER[task].describe_regime(1) for task in ("mitosis", "nuclei")] == ["1 case", "1 field of each organ"]


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


# Thresholds and classes that a user chooses

THREE = Overrides(classes=("fat", "Stroma", "tumor"))
NUCLEI_POINT = {"inside": 0.6, "background": 0.1, "least_px": 110}


@pytest.mark.parametrize("task", [MITOSIS, TUMOR])
def test_a_threshold_replaces_that_of_the_model(task: Task) -> None:
    point = {"threshold": 0.4}
    assert task.adjust_operating_point(point) == point
    assert task.adjust_operating_point(point, 0.8) == {"threshold": 0.8}
    assert point == {"threshold": 0.4}


def test_the_threshold_of_several_detected_classes_is_that_of_each_class() -> None:
    task = make_task("detect", THREE)
    point = dict.fromkeys(task.threshold_names, 0.4)  # type: ignore[attr-defined]
    assert task.adjust_operating_point(point) == point
    assert task.adjust_operating_point(point, 0.7) == dict.fromkeys(point, 0.7)


def test_the_threshold_of_outlines_is_a_probability_of_foreground_and_their_area_is_in_pixels() -> None:
    assert NUCLEI.adjust_operating_point(NUCLEI_POINT) == NUCLEI_POINT
    assert NUCLEI.adjust_operating_point(NUCLEI_POINT, 0.9) == NUCLEI_POINT, "1 - 0.1, without rounding errors"
    assert NUCLEI.adjust_operating_point(NUCLEI_POINT, 0.3, 20) == NUCLEI_POINT | {"background": 0.7, "least_px": 320}
    finer = replace(NUCLEI, spacing_um_px=0.1)
    assert finer.adjust_operating_point(NUCLEI_POINT, min_area_um2=0.3)["least_px"] == 30, "not 30.000000000000004"


@pytest.mark.parametrize(
    ("task", "threshold", "area", "sentence"),
    [
        (MITOSIS, 1.1, None, "The threshold is 1.1, but it is a probability; choose a number from 0 to 1"),
        (TUMOR, float("nan"), None, "The threshold is nan"),
        (NUCLEI, -0.1, None, "The threshold is -0.1"),
        (NUCLEI, None, -1, "The minimum area is -1 µm²; choose a finite number, 0 or more"),
        (TUMOR, None, float("inf"), "The minimum area is inf µm²"),
        (MITOSIS, None, 20, "The objects of the task mitosis have no area; leave out the minimum area"),
        (make_task("classify", THREE), 0.5, None, "The model has 3 classes, of which the most probable one"),
    ],
)
def test_thresholds_that_a_task_cannot_use_are_refused(
    task: Task, threshold: float | None, area: float | None, sentence: str
) -> None:
    point = {MITOSIS: {"threshold": 0.5}, TUMOR: {"threshold": 0.5}, NUCLEI: NUCLEI_POINT}.get(task, {})
    with pytest.raises(DataError, match=sentence):
        task.adjust_operating_point(point, threshold, area)


def test_classes_are_named_in_any_spelling_and_order() -> None:
    task = make_task("segment", THREE)
    assert task.resolve_classes([]) == ()
    assert task.resolve_classes("fat") == ("fat",)
    assert task.resolve_classes(["TUMOR", " stroma"]) == ("Stroma", "tumor")
    with pytest.raises(DataError, match="The model has no class 'gland'; choose from fat, Stroma, tumor"):
        task.resolve_classes(["fat", "gland"])


# Plausible densities


@pytest.mark.parametrize(
    ("name", "per_mm2", "sentence"),
    [
        ("mitosis", 0, ""),
        ("mitosis", 40, ""),
        ("mitosis", 556, "556 mitoses per mm² are not plausible: tissue has at most about 100"),
        ("nuclei", 30_672, ""),
        ("nuclei", 50_000, "at most about 40,000"),
        ("nuclei", 3, "at least about 20"),
    ],
)
def test_densities_that_do_not_occur_in_tissue_are_reported(name: str, per_mm2: float, sentence: str) -> None:
    task = PAPER[name]

    def find(tissue_mm2: float) -> str:
        counts = Counter({task.class_names[0]: round(per_mm2 * tissue_mm2)})
        summary = task.summarize(counts, Counter(), tissue_mm2)
        return task.find_implausible_density({"tissue_mm2": tissue_mm2, **summary})

    assert sentence in find(1.0)
    assert bool(sentence) == bool(find(1.0))
    assert find(0.05) == "", "too little tissue to be sure"


def test_other_tasks_have_no_implausible_density() -> None:
    for task in (TUMOR, make_task("detect", THREE)):
        names = task.class_names
        summary = task.summarize(Counter(dict.fromkeys(names, 10**6)), Counter(dict.fromkeys(names, 1)), 1.0)
        assert task.find_implausible_density({"tissue_mm2": 1.0, **summary}) == ""


def test_the_papers_tasks_and_normalized_stains_are_about_h_and_e() -> None:
    assert all(task.expects_he for task in PAPER.values())
    assert make_task("segment", Overrides(stain="macenko")).expects_he
    assert not make_task("segment").expects_he
