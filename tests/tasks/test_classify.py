"""Classify: scores counted by hand, of one class and of several, the best threshold, labels, and what is mined."""

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
from rotopath.metrics.bootstrap import FEWEST_CASES
from rotopath.tasks import TUMOR, Class, Classify, Frame, Overrides, make_task
from rotopath.tasks.classify import PatchEvidence

LABELS, PROBABILITIES = (0, 0, 1, 1, 0), (0.1, 0.6, 0.5, 0.9, 0.2)
GLEASON = Classify(
    "classify", (Class("Benign", (1, 2, 3)), Class("Three", (4, 5, 6)), Class("Four", (7, 8, 9))), spacing_um_px=1.0
)
# Of six patches four are right: one of class 0 is taken for 1, and one of class 2 for 0.
THREE_CLASSES = (
    (0, (0.7, 0.2, 0.1)),
    (0, (0.4, 0.5, 0.1)),
    (1, (0.1, 0.8, 0.1)),
    (2, (0.6, 0.1, 0.3)),
    (2, (0.2, 0.2, 0.6)),
    (2, (0.1, 0.0, 0.9)),
)


def patches(labels: tuple[int, ...], probabilities: tuple[float, ...], slides: str = "") -> list[PatchEvidence]:
    """`slides` has a letter for each patch."""
    cases = slides or [""] * len(labels)
    rows = zip(cases, labels, probabilities, strict=True)
    return [PatchEvidence(f"patch {i}", case, label, (value,)) for i, (case, label, value) in enumerate(rows)]


def of_three(slides: str = "") -> list[PatchEvidence]:
    cases = slides or [""] * len(THREE_CLASSES)
    rows = zip(cases, THREE_CLASSES, strict=True)
    return [PatchEvidence(f"patch {i}", case, label, values) for i, (case, (label, values)) in enumerate(rows)]


def labelled(label: str | None) -> Sample:
    return Sample(Path("a.png"), "a.png", "", "test", 1.0, label=label)


# One class


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


def test_slides_are_drawn_where_they_are_known() -> None:
    """All of three slides is right and all of three others wrong: the mean over six draws of either, or by patch."""
    right = (0.9,) * 60 + (0.1,) * 60
    evidence = patches((1,) * 120, right, "".join(letter * 20 for letter in "abcdef"))
    by_slide = TUMOR.score(evidence, {"threshold": 0.5})
    assert by_slide["interval_over"] == "slides"
    assert by_slide["wrong"] is None
    assert TUMOR.tally(by_slide) == {slide: (20 if slide in "abc" else 0, 20) for slide in "abcdef"}
    low, high = by_slide["accuracy_interval"]  # type: ignore[misc]
    assert (low, high) == (pytest.approx(1 / 6), pytest.approx(5 / 6)), "of six tosses of a coin"
    unknown = [PatchEvidence(each.name, "", each.label, each.probabilities) for each in evidence]
    by_patch = TUMOR.score(unknown, {"threshold": 0.5})
    assert (by_patch["interval_over"], by_patch["slides"]) == ("patches", None)
    assert list(TUMOR.tally(by_patch).values()) == [(1, 1)] * 60 + [(0, 1)] * 60
    low, high = by_patch["accuracy_interval"]  # type: ignore[misc]
    assert 0.38 < low < 0.5 < high < 0.62


def test_few_slides_or_one_class_cannot_tell() -> None:
    scores = TUMOR.score(patches((0, 0), (0.2, 0.7), "aa"), {"threshold": 0.5})
    assert scores["accuracy_interval"] is None
    assert scores["auc"] is None
    assert scores["auc_interval"] is None
    json.dumps(scores, allow_nan=False)
    labels, probabilities = (0, 1) * FEWEST_CASES, (0.1, 0.9) * FEWEST_CASES
    slides = "".join(letter * 2 for letter in "abcdefgh"[:FEWEST_CASES])
    enough = TUMOR.score(patches(labels, probabilities, slides), {"threshold": 0.5})
    assert enough["accuracy_interval"] == [1, 1]
    fewer = TUMOR.score(patches(labels[:-2], probabilities[:-2], slides[:-2]), {"threshold": 0.5})
    assert (fewer["accuracy_interval"], fewer["auc_interval"]) == (None, None)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10).map(lambda i: i / 10)), min_size=1, max_size=20),
)
def test_no_threshold_beats_the_chosen_point(drawn: list[tuple[int, float]]) -> None:
    labels, probabilities = zip(*drawn, strict=True)
    evidence = patches(labels, probabilities, "a" * len(labels))
    point = TUMOR.choose_point(evidence)

    def accuracy(threshold: float) -> float:
        decided = TUMOR.decide(np.array(probabilities)[:, None], {"threshold": threshold})
        return float(np.mean(decided == np.array(labels)))

    best = accuracy(point["threshold"])
    assert best == max(accuracy(threshold) for threshold in np.linspace(-0.05, 1.05, 45))
    assert best == TUMOR.score(evidence, point)["accuracy"]
    json.dumps(point, allow_nan=False)
    assert TUMOR.check_point(point) == point, "the file of a model may hold it"


def test_examine_takes_the_label(tmp_path: Path) -> None:
    sample = Sample(tmp_path / "x.h5", "x.h5[3]", "slide 1", "test", 0.972, row=3, label="tumor")
    assert TUMOR.examine(np.array([0.25], np.float32), sample) == PatchEvidence("x.h5[3]", "slide 1", 1, (0.25,))
    with pytest.raises(DataError, match=r"^a.png has no label; expected is one of 0 \(normal\), 1 \(Tumor\)\.$"):
        TUMOR.examine(np.array([0.25]), Sample(tmp_path / "a.png", "a.png", "", "test", 1.0))


def test_no_patches_are_refused() -> None:
    for ask in (TUMOR.choose_point, lambda none: TUMOR.score(none, {"threshold": 0.5})):
        with pytest.raises(ValueError, match="no patches"):
            ask([])


def test_loss_is_that_of_one_logit() -> None:
    logits = torch.randn(6, 1, 1, 1, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    loss = TUMOR.make_loss([])(logits, labels)
    loss.backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad.flatten(), (logits.detach().flatten().sigmoid() - labels) / 6)
    right = (logits.flatten() > 0) == (labels == 1)
    assert TUMOR.accuracy(logits, labels) == right.double().mean()


def test_windows_in_which_a_network_answers_more_than_once_are_refused() -> None:
    TUMOR.check_frame(Frame(88, 8, 8))
    with pytest.raises(DataError, match="in windows of 96 px the network gives 2 × 2; set 'window_px' to the smallest"):
        TUMOR.check_frame(Frame(96, 16, 8))
    with pytest.raises(ValueError, match=r"needs one answer"):
        TUMOR.make_loss([])(torch.zeros(3, 1, 2, 2), torch.tensor([0, 1, 1]))


def test_the_interval_of_auc_redraws_slides() -> None:
    """Slides that are each perfectly ranked within themselves, but not between each other."""
    rows = [(slide, label, i / 10 + label / 20) for i, slide in enumerate("abcde") for label in (0, 1)]
    evidence = [PatchEvidence(f"p{i}", case, label, (p,)) for i, (case, label, p) in enumerate(rows)]
    found = TUMOR.score(evidence, {"threshold": 0.5})
    assert found["auc"] == pytest.approx(15 / 25)
    low, high = found["auc_interval"]  # type: ignore[misc]
    assert found["auc"] < high, "a slide that is drawn often is perfect by itself"
    assert low <= found["auc"]
    assert low >= 0.5, "a pair of two slides is right in one order and wrong in the other, one of a slide always right"
    one = TUMOR.score(evidence[:2], {"threshold": 0.5})
    assert one["auc_interval"] is None


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
    assert task.label_of(labelled(label)) == number
    assert task.labels([labelled(label)]).tolist() == [number]


def test_names_that_are_numbers_stay_names() -> None:
    """Grades 3, 4 and 5 are no positions in a list of them."""
    grades = make_task("classify", Overrides(classes=("3", "4", "5", "0")))
    assert isinstance(grades, Classify)
    assert [grades.label_of(labelled(name)) for name in ("3", "5", "0")] == [0, 2, 3]
    with pytest.raises(DataError, match="has the label '1'"):
        grades.label_of(labelled("1"))


@pytest.mark.parametrize("label", ["five", "3", "-1", "1.0", "other", "", None])
def test_an_unknown_label_is_refused_in_one_sentence(label: str | None) -> None:
    with pytest.raises(DataError) as caught:
        GLEASON.label_of(labelled(label))
    found = f"has the label {label!r}" if label else "has no label"
    assert str(caught.value) == f"a.png {found}; expected is one of 0 (Benign), 1 (Three), 2 (Four)."


def manifest(root: Path, *labels: str) -> Path:
    for i in range(len(labels)):
        write_image(root / f"{i}.png", pixels(9, 9, i))
    rows = [(f"{i}.png", label, f"g{i}", "test", 1) for i, label in enumerate(labels)]
    return write_csv(root / "manifest.csv", [("image", "label", "group", "split", "spacing"), *rows])


def test_labels_of_data_are_checked_against_the_task(tmp_path: Path) -> None:
    path = manifest(tmp_path, "0", "2", "tumor", "2", "stroma")
    findings = TUMOR.check_data(open_data(path))
    expected = "expected is one of 0 (normal), 1 (Tumor)."
    assert [str(finding) for finding in findings] == [
        f"1.png has the label '2'; {expected}",
        f"4.png has the label 'stroma'; {expected}",
    ], "once for each label"
    with pytest.raises(DataError) as caught:
        open_task_data(TUMOR, path)
    assert str(caught.value) == f"{path} does not fit the task tumor: 1.png has the label '2'; {expected}"


def test_data_with_the_labels_of_the_task_is_opened(tmp_path: Path) -> None:
    path = manifest(tmp_path, "0", "1", "Tumor", "NORMAL")
    assert TUMOR.labels(open_task_data(TUMOR, path).samples).tolist() == [0, 1, 1, 0]


def test_classes_that_nobody_names_are_those_of_the_data(tmp_path: Path) -> None:
    dataset = open_data(manifest(tmp_path, "stroma", "tumor", "fat", "tumor"))
    found = Classify.find_classes(dataset)
    assert found == ("fat", "stroma", "tumor")
    task = make_task("classify", found=found)
    assert (task.class_names, task.outputs, task.output_names) == (found, 3, found)
    assert task.check_data(dataset) == []
    assert task.labels(dataset.samples).tolist() == [1, 2, 0, 2]
    assert len(set(task.colors)) == 3


def test_classes_have_different_names_and_one_at_least() -> None:
    with pytest.raises(ValueError, match="have different names; got Fat, fat"):
        make_task("classify", Overrides(classes=("Fat", "fat")))
    with pytest.raises(ValueError, match="one class or more"):
        Classify("classify", (), 1.0)


# Several classes


def test_scores_of_three_classes_counted_by_hand() -> None:
    scores = GLEASON.score(of_three(), {})
    assert scores["accuracy"] == pytest.approx(4 / 6)
    assert scores["balanced_accuracy"] == pytest.approx((1 / 2 + 1 + 2 / 3) / 3)
    confusion = scores["confusion"]
    assert confusion == {"classes": ["Benign", "Three", "Four"], "rows_are_truth": [[1, 1, 0], [0, 1, 0], [1, 0, 2]]}
    assert [scores[f"{name}_images"] for name in ("benign", "three", "four")] == [2, 1, 3]
    # Of the 2 · 4 pairs of class 0 and others, 7 are in order: 0.4 is below the 0.6 of the fourth patch.
    # Of the 1 · 5 pairs of class 1, all are; of the 3 · 3 of class 2, all are.
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
    # The class that wins has these probabilities, and is right or not.
    sure, right = np.array([0.7, 0.5, 0.8, 0.6, 0.6, 0.9]), np.array([1, 0, 1, 0, 1, 1])
    pair = abs((sure[3] + sure[4]) / 2 - 1 / 2) * 2  # in one bin
    alone = np.abs(sure - right)[[0, 1, 2, 5]].sum()
    assert scores["calibration_error"] == pytest.approx((pair + alone) / 6)
    assert (scores["wrong"], scores["slides"]) == ([1, 3], None)
    assert "threshold" not in scores
    json.dumps(scores, allow_nan=False)


def test_slides_of_several_classes_are_tallied() -> None:
    scores = GLEASON.score(of_three("aabbcc"), {})
    assert GLEASON.tally(scores) == {"a": (1, 2), "b": (1, 2), "c": (2, 2)}
    assert scores["accuracy_interval"] is None, "of three slides"


def test_the_likeliest_of_several_classes_wins_without_a_threshold() -> None:
    evidence = of_three()
    assert GLEASON.choose_point(evidence) == {}
    assert GLEASON.check_point({}) == {}
    with pytest.raises(ValueError, match="an operating point has no numbers; got threshold"):
        GLEASON.check_point({"threshold": 0.5})
    with pytest.raises(ValueError, match="an operating point has threshold; got nothing"):
        TUMOR.check_point({})
    decided = GLEASON.decide(np.array([each.probabilities for each in evidence]), {})
    assert decided.tolist() == [0, 1, 1, 0, 2, 2]


def test_a_class_that_is_never_there_or_never_called_has_scores() -> None:
    """The mean over classes leaves it out, where it says nothing."""
    rows = [(0, (0.8, 0.1, 0.1)), (1, (0.3, 0.6, 0.1)), (1, (0.9, 0.1, 0.0))]
    scores = GLEASON.score([PatchEvidence("p", "", label, values) for label, values in rows], {})
    classes = scores["classes"]
    assert isinstance(classes, dict)
    assert classes["Four"] == {"images": 0, "precision": None, "recall": None, "f1": None, "auc": None}
    assert scores["balanced_accuracy"] == pytest.approx((1 + 1 / 2) / 2)
    # Class 0 is above one of two others, and class 1 above, or level with, the only patch of class 0.
    assert scores["auc"] == pytest.approx((1 / 2 + 3 / 4) / 2)
    json.dumps(scores, allow_nan=False)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.lists(st.integers(1, 20), min_size=3, max_size=3)), min_size=1, max_size=25
    )
)
def test_numbers_of_several_classes_agree_with_each_other(drawn: list[tuple[int, list[int]]]) -> None:
    evidence = [
        PatchEvidence(f"p{i}", "abc"[i % 3], label, tuple(weight / sum(weights) for weight in weights))
        for i, (label, weights) in enumerate(drawn)
    ]
    scores = GLEASON.score(evidence, {})
    confusion = np.array(scores["confusion"]["rows_are_truth"])  # type: ignore[index]
    decided = [int(np.argmax(each.probabilities)) for each in evidence]
    for truth in range(3):
        for called in range(3):
            expected = sum(each.label == truth and k == called for each, k in zip(evidence, decided, strict=True))
            assert confusion[truth, called] == expected
    assert scores["accuracy"] == pytest.approx(confusion.trace() / len(evidence))
    tallied = GLEASON.tally(scores).values()
    assert sum(right for right, _ in tallied) / sum(count for _, count in tallied) == pytest.approx(scores["accuracy"])
    recalls = [each["recall"] for each in scores["classes"].values() if each["recall"] is not None]  # type: ignore[attr-defined]
    assert scores["balanced_accuracy"] == pytest.approx(np.mean(recalls))
    pairs = []
    for k in range(3):
        own = [each.probabilities[k] for each in evidence if each.label == k]
        others = [each.probabilities[k] for each in evidence if each.label != k]
        if own and others:
            pairs.append(np.mean([(a > b) + (a == b) / 2 for a in own for b in others]))
    assert scores["auc"] == (pytest.approx(np.mean(pairs)) if pairs else None)


def test_the_loss_of_several_classes_is_the_cross_entropy() -> None:
    logits = torch.randn(4, 3, 1, 1)
    labels = torch.tensor([2, 0, 1, 2])
    right = logits[:, :, 0, 0].log_softmax(dim=1)[torch.arange(4), labels]
    assert GLEASON.make_loss([])(logits, labels) == pytest.approx(-right.mean())
    likeliest = logits[:, :, 0, 0].argmax(dim=1)
    assert GLEASON.accuracy(logits, labels) == (likeliest == labels).double().mean()
    assert torch.allclose(GLEASON.probabilities(logits).sum(dim=1), torch.ones(4, 1, 1))
    assert torch.equal(TUMOR.probabilities(logits[:, :1]), logits[:, :1].sigmoid())


# Hard examples


def test_only_patches_that_were_taken_for_another_class_are_mined() -> None:
    """Right ones are no hard examples, however few wrong ones there are."""
    evidence = patches((0, 0, 0, 1, 1, 1), (0.1, 0.9, 0.6, 0.2, 0.8, 0.49))
    mined = TUMOR.mine(evidence, 100)
    assert [example.image for example in mined] == ["patch 1", "patch 3", "patch 2", "patch 5"], "the worst first"
    assert [example.score for example in mined] == pytest.approx([0.9, 0.8, 0.6, 0.51])
    assert {(example.row, example.column) for example in mined} == {(0, 0)}
    assert TUMOR.mine(patches((0, 1), (0.4, 0.6)), 100) == []


def test_every_class_has_its_part_of_what_is_mined() -> None:
    evidence = patches((0,) * 6 + (1,) * 2, (0.95, 0.94, 0.93, 0.92, 0.91, 0.1, 0.4, 0.9))
    assert [example.image for example in TUMOR.mine(evidence, 4)] == ["patch 0", "patch 1", "patch 6"]


def test_of_several_classes_those_are_mined_whose_own_is_not_the_likeliest() -> None:
    """The second patch is right at less than one half, and stays out."""
    rows = [(0, (0.1, 0.3, 0.6)), (0, (0.4, 0.3, 0.3)), (1, (0.45, 0.44, 0.11)), (2, (0.0, 0.1, 0.9))]
    evidence = [PatchEvidence(f"patch {i}", "", label, values) for i, (label, values) in enumerate(rows)]
    mined = GLEASON.mine(evidence, 100)
    assert [(example.image, pytest.approx(example.score)) for example in mined] == [("patch 0", 0.9), ("patch 2", 0.56)]
    places = np.array([[4, 0, 0], [1, 0, 0]])
    assert GLEASON.number_examples(places).tolist() == [4, 1], "as the sampler takes them"
