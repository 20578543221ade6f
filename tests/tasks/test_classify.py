"""Classify: scores counted by hand for one and several classes, the best threshold, labels, and hard examples."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import pixels, write_csv, write_image

from rotopath.data.dataset import DataError, Sample
from rotopath.data.formats import open_data
from rotopath.evaluation import open_task_data
from rotopath.metrics.classification import MIN_CASES
from rotopath.tasks import TUMOR, Class, Classify, Overrides, TrainingWindow, make_task
from rotopath.tasks.classify import MIN_REGION_OUTPUTS, PatchEvidence, remove_speckle

LABELS, PROBABILITIES = (0, 0, 1, 1, 0), (0.1, 0.6, 0.5, 0.9, 0.2)
GLEASON = Classify(
    "classify", (Class("Benign", (1, 2, 3)), Class("Three", (4, 5, 6)), Class("Four", (7, 8, 9))), spacing_um_px=1.0
)
# Four of six patches are correct: one of class 0 is predicted as 1, and one of class 2 as 0.
THREE_CLASSES = (
    (0, (0.7, 0.2, 0.1)),
    (0, (0.4, 0.5, 0.1)),
    (1, (0.1, 0.8, 0.1)),
    (2, (0.6, 0.1, 0.3)),
    (2, (0.2, 0.2, 0.6)),
    (2, (0.1, 0.0, 0.9)),
)


def patches(labels: tuple[int, ...], probabilities: tuple[float, ...], slides: str = "") -> list[PatchEvidence]:
    """Return a patch for each label; `slides` has a letter for the slide of each patch."""
    cases = slides or [""] * len(labels)
    rows = zip(cases, labels, probabilities, strict=True)
    return [PatchEvidence(f"patch {i}", case, label, (value,)) for i, (case, label, value) in enumerate(rows)]


def patches_of_three_classes(slides: str = "") -> list[PatchEvidence]:
    cases = slides or [""] * len(THREE_CLASSES)
    rows = zip(cases, THREE_CLASSES, strict=True)
    return [PatchEvidence(f"patch {i}", case, label, values) for i, (case, (label, values)) in enumerate(rows)]


def sample_with(label: str | None) -> Sample:
    return Sample(Path("a.png"), "a.png", "", "test", 1.0, label=label)


# A single class


def test_scores_counted_by_hand() -> None:
    scores = TUMOR.score(patches(LABELS, PROBABILITIES), {"threshold": 0.5})
    assert scores["accuracy"] == 0.8
    assert scores["auc"] == pytest.approx(5 / 6)
    assert scores["balanced_accuracy"] == pytest.approx((2 / 3 + 1) / 2)
    assert scores["confusion"] == {"classes": ["normal", "Tumor"], "rows_are_truth": [[2, 1], [0, 2]]}
    assert (scores["threshold"], scores["images"], scores["tumor_images"]) == (0.5, 5, 2)
    assert scores["calibration_error"] == pytest.approx((0.1 + 0.6 + 0.5 + 0.1 + 0.2) / 5)
    reliability = scores["reliability"]
    assert isinstance(reliability, list)
    assert [point["count"] for point in reliability] == [1, 1, 1, 1, 1]
    assert reliability[0] == {"predicted": pytest.approx(0.1), "observed": 0, "count": 1}
    assert "classes" not in scores
    assert "normal_images" not in scores
    json.dumps(scores, allow_nan=False)


def test_intervals_resample_slides_if_they_are_known() -> None:
    """Three slides are correct and three are wrong: intervals over slides are wider than intervals over patches."""
    probabilities = (0.9,) * 60 + (0.1,) * 60
    evidence = patches((1,) * 120, probabilities, "".join(letter * 20 for letter in "abcdef"))
    by_slide = TUMOR.score(evidence, {"threshold": 0.5})
    assert by_slide["interval_over"] == "slides"
    assert by_slide["wrong"] is None
    assert TUMOR.score_terms(by_slide) == {slide: (20 if slide in "abc" else 0, 20) for slide in "abcdef"}
    low, high = by_slide["accuracy_interval"]  # type: ignore[misc]
    assert (low, high) == (pytest.approx(1 / 6), pytest.approx(5 / 6)), "as of six tosses of a coin"
    unknown = [PatchEvidence(patch.name, "", patch.label, patch.probabilities) for patch in evidence]
    by_patch = TUMOR.score(unknown, {"threshold": 0.5})
    assert (by_patch["interval_over"], by_patch["slides"]) == ("patches", None)
    assert list(TUMOR.score_terms(by_patch).values()) == [(1, 1)] * 60 + [(0, 1)] * 60
    low, high = by_patch["accuracy_interval"]  # type: ignore[misc]
    assert 0.38 < low < 0.5 < high < 0.62


def test_there_is_no_interval_for_few_slides_or_a_single_class() -> None:
    scores = TUMOR.score(patches((0, 0), (0.2, 0.7), "aa"), {"threshold": 0.5})
    assert scores["accuracy_interval"] is None
    assert scores["auc"] is None
    assert scores["auc_interval"] is None
    json.dumps(scores, allow_nan=False)
    labels, probabilities = (0, 1) * MIN_CASES, (0.1, 0.9) * MIN_CASES
    slides = "".join(letter * 2 for letter in "abcdefgh"[:MIN_CASES])
    enough = TUMOR.score(patches(labels, probabilities, slides), {"threshold": 0.5})
    assert enough["accuracy_interval"] == [1, 1]
    fewer = TUMOR.score(patches(labels[:-2], probabilities[:-2], slides[:-2]), {"threshold": 0.5})
    assert (fewer["accuracy_interval"], fewer["auc_interval"]) == (None, None)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10).map(lambda i: i / 10)), min_size=1, max_size=20),
)
def test_no_threshold_has_a_higher_accuracy_than_the_operating_point(drawn: list[tuple[int, float]]) -> None:
    labels, probabilities = zip(*drawn, strict=True)
    evidence = patches(labels, probabilities, "a" * len(labels))
    point = TUMOR.choose_operating_point(evidence)

    def accuracy(threshold: float) -> float:
        decided = TUMOR.decide(np.array(probabilities)[:, None], {"threshold": threshold})
        return float(np.mean(decided == np.array(labels)))

    best = accuracy(point["threshold"])
    assert best == max(accuracy(threshold) for threshold in np.linspace(-0.05, 1.05, 45))
    assert best == TUMOR.score(evidence, point)["accuracy"]
    json.dumps(point, allow_nan=False)
    assert TUMOR.check_operating_point(point) == point, "a model file may contain it"


def test_evidence_has_the_label_of_the_sample(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "x.h5", "x.h5[3]", "slide 1", "test", 0.972, row=3, label="tumor")
    assert TUMOR.collect_evidence(np.array([0.25], np.float32), sample) == PatchEvidence(
        "x.h5[3]", "slide 1", 1, (0.25,)
    )
    with pytest.raises(DataError, match=r"^a.png has no label; expected one of 0 \(normal\), 1 \(Tumor\)\.$"):
        TUMOR.collect_evidence(np.array([0.25]), Sample(tmp_path / "a.png", "a.png", "", "test", 1.0))


def test_empty_evidence_is_refused() -> None:
    for function in (TUMOR.choose_operating_point, lambda none: TUMOR.score(none, {"threshold": 0.5})):
        with pytest.raises(ValueError, match="no patches"):
            function([])


def test_the_loss_of_a_single_class_is_the_binary_cross_entropy() -> None:
    logits = torch.randn(6, 1, 1, 1, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    loss = TUMOR.make_loss([])(logits, labels)
    loss.backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad.flatten(), (logits.detach().flatten().sigmoid() - labels) / 6)
    correct = (logits.flatten() > 0) == (labels == 1)
    assert TUMOR.accuracy(logits, labels) == correct.double().mean()


def test_windows_with_more_than_one_output_are_refused() -> None:
    TUMOR.check_window(TrainingWindow(88, 8, 8))
    with pytest.raises(DataError, match="in windows of 96 px the network has 2 × 2 outputs; set 'window_px'"):
        TUMOR.check_window(TrainingWindow(96, 16, 8))
    with pytest.raises(ValueError, match="needs one output"):
        TUMOR.make_loss([])(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1]))


def test_the_interval_of_the_auc_resamples_slides() -> None:
    """Each slide by itself is ranked perfectly, but patches of different slides are not."""
    rows = [(slide, label, i / 10 + label / 20) for i, slide in enumerate("abcde") for label in (0, 1)]
    evidence = [PatchEvidence(f"p{i}", case, label, (p,)) for i, (case, label, p) in enumerate(rows)]
    scores = TUMOR.score(evidence, {"threshold": 0.5})
    assert scores["auc"] == pytest.approx(15 / 25)
    low, high = scores["auc_interval"]  # type: ignore[misc]
    assert scores["auc"] < high, "resamples that repeat one slide have a higher AUC"
    assert low <= scores["auc"]
    assert low >= 0.5, "pairs within a slide are always in order, and those of two slides half of the time"
    single_slide = TUMOR.score(evidence[:2], {"threshold": 0.5})
    assert single_slide["auc_interval"] is None


# Labels


@pytest.mark.parametrize(
    ("task", "label", "number"),
    [
        (TUMOR, "tumor", 1),
        (TUMOR, "TUMOR", 1),
        (TUMOR, "Normal", 0),
        (TUMOR, "0", 0),
        (TUMOR, "1", 1),
        (GLEASON, "benign", 0),
        (GLEASON, "THREE", 1),
        (GLEASON, "Four", 2),
        (GLEASON, "2", 2),
    ],
)
def test_a_label_is_a_name_in_any_case_or_a_number(task: Classify, label: str, number: int) -> None:
    assert task.label_index(sample_with(label)) == number
    assert task.image_targets([sample_with(label)]).tolist() == [number]


def test_class_names_that_are_numbers_are_not_indices() -> None:
    """Grades 3, 4 and 5 are names and not indices of a list of classes."""
    grades = make_task("classify", Overrides(classes=("3", "4", "5", "0")))
    assert isinstance(grades, Classify)
    assert [grades.label_index(sample_with(name)) for name in ("3", "5", "0")] == [0, 2, 3]
    with pytest.raises(DataError, match="has the label '1'"):
        grades.label_index(sample_with("1"))


@pytest.mark.parametrize("label", ["five", "3", "-1", "1.0", "other", "", None])
def test_an_unknown_label_is_refused(label: str | None) -> None:
    with pytest.raises(DataError) as caught:
        GLEASON.label_index(sample_with(label))
    actual = f"has the label {label!r}" if label else "has no label"
    assert str(caught.value) == f"a.png {actual}; expected one of 0 (Benign), 1 (Three), 2 (Four)."


def manifest(root: Path, *labels: str) -> Path:
    for i in range(len(labels)):
        write_image(root / f"{i}.png", pixels(9, 9, i))
    rows = [(f"{i}.png", label, f"g{i}", "test", 1) for i, label in enumerate(labels)]
    return write_csv(root / "manifest.csv", [("image", "label", "group", "split", "spacing"), *rows])


def test_labels_of_data_are_checked_against_the_task(tmp_path: Path) -> None:
    path = manifest(tmp_path, "0", "2", "tumor", "2", "stroma")
    findings = TUMOR.check_data(open_data(path))
    expected = "expected one of 0 (normal), 1 (Tumor)."
    assert [str(finding) for finding in findings] == [
        f"1.png has the label '2'; {expected}",
        f"4.png has the label 'stroma'; {expected}",
    ], "one finding for each label"
    with pytest.raises(DataError) as caught:
        open_task_data(TUMOR, path)
    assert str(caught.value) == f"{path} does not fit the task tumor: 1.png has the label '2'; {expected}"


def test_data_with_the_labels_of_the_task_is_opened(tmp_path: Path) -> None:
    path = manifest(tmp_path, "0", "1", "Tumor", "NORMAL")
    assert TUMOR.image_targets(open_task_data(TUMOR, path).samples).tolist() == [0, 1, 1, 0]


def test_classes_are_read_from_the_data_if_the_recipe_has_none(tmp_path: Path) -> None:
    dataset = open_data(manifest(tmp_path, "stroma", "tumor", "fat", "tumor"))
    names = Classify.find_classes(dataset)
    assert names == ("fat", "stroma", "tumor")
    task = make_task("classify", annotated_classes=names)
    assert (task.class_names, task.outputs, task.output_names) == (names, 3, names)
    assert task.check_data(dataset) == []
    assert task.image_targets(dataset.samples).tolist() == [1, 2, 0, 2]
    assert len(set(task.colors)) == 3


def test_classes_need_different_names_and_there_is_at_least_one() -> None:
    with pytest.raises(ValueError, match="must have different names; got Fat, fat"):
        make_task("classify", Overrides(classes=("Fat", "fat")))
    with pytest.raises(ValueError, match="one class or more"):
        Classify("classify", (), 1.0)


# Several classes


def test_scores_of_three_classes_counted_by_hand() -> None:
    scores = GLEASON.score(patches_of_three_classes(), {})
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["balanced_accuracy"] == pytest.approx((1 / 2 + 1 + 2 / 3) / 3)
    confusion = scores["confusion"]
    assert confusion == {"classes": ["Benign", "Three", "Four"], "rows_are_truth": [[1, 1, 0], [0, 1, 0], [1, 0, 2]]}
    assert [scores[f"{name}_images"] for name in ("benign", "three", "four")] == [2, 1, 3]
    # 7 of the 2 · 4 pairs of class 0 and others are in order: 0.4 is below the 0.6 of the fourth patch.
    # All of the 1 · 5 pairs of class 1 are in order, and all of the 3 · 3 pairs of class 2.
    assert scores["auc"] == pytest.approx((7 / 8 + 1 + 1) / 3)
    assert scores["classes"] == {
        "Benign": {
            "images": 2,
            "precision": pytest.approx(1 / 2),
            "recall": pytest.approx(1 / 2),
            "f1": pytest.approx(1 / 2),
            "auc": pytest.approx(7 / 8),
        },
        "Three": {"images": 1, "precision": pytest.approx(1 / 2), "recall": 1, "f1": pytest.approx(2 / 3), "auc": 1},
        "Four": {"images": 3, "precision": 1, "recall": pytest.approx(2 / 3), "f1": pytest.approx(4 / 5), "auc": 1},
    }
    # The probability of the predicted class, and whether it is correct.
    confidence, correct = np.array([0.7, 0.5, 0.8, 0.6, 0.6, 0.9]), np.array([1, 0, 1, 0, 1, 1])
    pair = abs((confidence[3] + confidence[4]) / 2 - 1 / 2) * 2  # in one bin
    alone = np.abs(confidence - correct)[[0, 1, 2, 5]].sum()
    assert scores["calibration_error"] == pytest.approx((pair + alone) / 6)
    assert (scores["wrong"], scores["slides"]) == ([1, 3], None)
    assert "threshold" not in scores
    json.dumps(scores, allow_nan=False)


def test_score_terms_of_slides_with_several_classes() -> None:
    scores = GLEASON.score(patches_of_three_classes("aabbcc"), {})
    assert GLEASON.score_terms(scores) == {"a": (1, 2), "b": (1, 2), "c": (2, 2)}
    assert scores["accuracy_interval"] is None, "three slides are too few"


def test_several_classes_need_no_threshold() -> None:
    evidence = patches_of_three_classes()
    assert GLEASON.choose_operating_point(evidence) == {}
    assert GLEASON.check_operating_point({}) == {}
    with pytest.raises(ValueError, match="the operating point must contain no numbers; got threshold"):
        GLEASON.check_operating_point({"threshold": 0.5})
    with pytest.raises(ValueError, match="the operating point must contain threshold; got nothing"):
        TUMOR.check_operating_point({})
    decided = GLEASON.decide(np.array([patch.probabilities for patch in evidence]), {})
    assert decided.tolist() == [0, 1, 1, 0, 2, 2]


def test_scores_are_defined_for_classes_that_are_absent_or_never_predicted() -> None:
    """Means over classes leave out the classes whose score is undefined."""
    rows = [(0, (0.8, 0.1, 0.1)), (1, (0.3, 0.6, 0.1)), (1, (0.9, 0.1, 0.0))]
    scores = GLEASON.score([PatchEvidence("p", "", label, values) for label, values in rows], {})
    classes = scores["classes"]
    assert isinstance(classes, dict)
    assert classes["Four"] == {"images": 0, "precision": None, "recall": None, "f1": None, "auc": None}
    assert scores["balanced_accuracy"] == pytest.approx((1 + 1 / 2) / 2)
    # One of two pairs of class 0 is in order; of the two of class 1 one is, and the other is a tie.
    assert scores["auc"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    json.dumps(scores, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(1, 20), min_size=3, max_size=3)), min_size=1, max_size=25
    )
)
def test_scores_of_several_classes_agree_with_their_definitions(drawn: list[tuple[int, list[int]]]) -> None:
    evidence = [
        PatchEvidence(f"p{i}", "abc"[i % 3], label, tuple(weight / sum(weights) for weight in weights))
        for i, (label, weights) in enumerate(drawn)
    ]
    scores = GLEASON.score(evidence, {})
    confusion = np.array(scores["confusion"]["rows_are_truth"])  # type: ignore[index]
    predictions = [int(np.argmax(patch.probabilities)) for patch in evidence]
    for truth in range(3):
        for predicted in range(3):
            pairs = zip(evidence, predictions, strict=True)
            expected = sum(patch.label == truth and k == predicted for patch, k in pairs)
            assert confusion[truth, predicted] == expected
    assert scores["accuracy"] == pytest.approx(confusion.trace() / len(evidence))
    terms = GLEASON.score_terms(scores).values()
    ratio = sum(correct for correct, _ in terms) / sum(count for _, count in terms)
    assert ratio == pytest.approx(scores["accuracy"])
    recalls = [row["recall"] for row in scores["classes"].values() if row["recall"] is not None]  # type: ignore[attr-defined]
    assert scores["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    areas = []
    for k in range(3):
        own = [patch.probabilities[k] for patch in evidence if patch.label == k]
        others = [patch.probabilities[k] for patch in evidence if patch.label != k]
        if own and others:
            areas.append(np.mean([(a > b) + (a == b) / 2 for a in own for b in others]))
    assert scores["auc"] == (pytest.approx(np.mean(areas)) if areas else None)


def test_the_loss_of_several_classes_is_the_cross_entropy() -> None:
    logits = torch.randn(4, 3, 1, 1)
    labels = torch.tensor([2, 0, 1, 2])
    log_probabilities = logits[:, :, 0, 0].log_softmax(dim=1)[torch.arange(4), labels]
    assert GLEASON.make_loss([])(logits, labels) == pytest.approx(-log_probabilities.mean())
    predicted = logits[:, :, 0, 0].argmax(dim=1)
    assert GLEASON.accuracy(logits, labels) == (predicted == labels).double().mean()
    assert torch.allclose(GLEASON.to_probabilities(logits).sum(dim=1), torch.ones(4, 1, 1))
    assert torch.equal(TUMOR.to_probabilities(logits[:, :1]), logits[:, :1].sigmoid())


# Hard examples


def test_only_misclassified_patches_are_hard_examples() -> None:
    """Correct patches are no hard examples, even if fewer are misclassified than requested."""
    evidence = patches((0, 0, 0, 1, 1, 1), (0.1, 0.9, 0.6, 0.2, 0.8, 0.49))
    mined = TUMOR.find_hard_examples(evidence, 100)
    assert [example.image for example in mined] == ["patch 1", "patch 3", "patch 2", "patch 5"], "the worst first"
    assert [example.score for example in mined] == pytest.approx([0.9, 0.8, 0.6, 0.51])
    assert {(example.row, example.column) for example in mined} == {(0, 0)}
    assert TUMOR.find_hard_examples(patches((0, 1), (0.4, 0.6)), 100) == []


def test_every_class_has_an_equal_part_of_the_hard_examples() -> None:
    evidence = patches((0,) * 6 + (1,) * 2, (0.95, 0.94, 0.93, 0.92, 0.91, 0.1, 0.4, 0.9))
    assert [example.image for example in TUMOR.find_hard_examples(evidence, 4)] == ["patch 0", "patch 1", "patch 6"]


def test_hard_examples_of_several_classes() -> None:
    """The second patch is none: it is correct, although its probability is below one half."""
    rows = [(0, (0.1, 0.3, 0.6)), (0, (0.4, 0.3, 0.3)), (1, (0.45, 0.44, 0.11)), (2, (0.0, 0.1, 0.9))]
    evidence = [PatchEvidence(f"patch {i}", "", label, values) for i, (label, values) in enumerate(rows)]
    mined = GLEASON.find_hard_examples(evidence, 100)
    assert [(example.image, pytest.approx(example.score)) for example in mined] == [("patch 0", 0.9), ("patch 2", 0.56)]
    examples = np.array([[4, 0, 0], [1, 0, 0]])
    assert GLEASON.examples_for_sampler(examples).tolist() == [4, 1], "indices of images"


# Regions on slides


def test_speckle_is_removed_and_small_holes_are_filled() -> None:
    drawn = [
        "#....####.",
        "..##.#..#.",
        "..##.####.",
        ".......###",
        "###...#.#.",
        "..........",
        "######...#",
        "#....#...#",
        "#....#...#",
        "######...#",
    ]
    expected = [
        ".....####.",
        "..##.####.",
        "..##.####.",
        ".......###",
        "........#.",
        "..........",
        "######...#",
        "#....#...#",
        "#....#...#",
        "######...#",
    ]
    mask, cleaned = (np.array([[cell == "#" for cell in row] for row in rows]) for rows in (drawn, expected))
    assert MIN_REGION_OUTPUTS == 4
    np.testing.assert_array_equal(remove_speckle(mask), cleaned)
    np.testing.assert_array_equal(remove_speckle(cleaned), cleaned)
    for quarters in (1, 2, 3):
        np.testing.assert_array_equal(remove_speckle(np.rot90(mask, quarters)), np.rot90(cleaned, quarters))


def test_an_image_of_few_outputs_is_a_region_if_all_of_them_agree() -> None:
    assert remove_speckle(np.ones((1, 1), bool)).all()
    assert remove_speckle(np.ones((1, 3), bool)).all()
    assert not remove_speckle(np.array([[True, False], [True, True]])).any()


def test_a_balanced_loss_weights_rare_labels_higher() -> None:
    samples = [Sample(Path("x.png"), str(i), "", "train", 1.0, label=label) for i, label in enumerate("0001")]
    logits, labels = torch.randn(2, 1, 1, 1), torch.tensor([0, 1])
    each = torch.nn.functional.binary_cross_entropy_with_logits(logits.flatten(), labels.float(), reduction="none")
    expected = (each * torch.tensor([4 / 6, 4 / 2])).mean()
    assert TUMOR.make_loss(samples, weights="balanced")(logits, labels) == pytest.approx(expected)
    assert TUMOR.make_loss(samples, weights="equal")(logits, labels) == pytest.approx(each.mean())
