"""Tumor: scores counted by hand, the best threshold, and whose patches they are."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotopath.data.collection import DataError, Picture
from rotopath.tasks import tumor
from rotopath.tasks.tumor import Evidence

LABELS, PROBABILITIES = (0, 0, 1, 1, 0), (0.1, 0.6, 0.5, 0.9, 0.2)


def patches(labels: tuple[int, ...], probabilities: tuple[float, ...], slides: str = "") -> list[Evidence]:
    """`slides` has a letter for each patch."""
    cases = slides or [""] * len(labels)
    rows = zip(cases, labels, probabilities, strict=True)
    return [Evidence(f"patch {i}", case, label, probability) for i, (case, label, probability) in enumerate(rows)]


def test_scores_counted_by_hand() -> None:
    scores = tumor.score(patches(LABELS, PROBABILITIES), {"threshold": 0.5})
    assert scores["accuracy"] == 0.8
    assert scores["auc"] == pytest.approx(5 / 6)
    assert (scores["images"], scores["tumor_images"]) == (5, 2)
    assert scores["calibration_error"] == pytest.approx((0.1 + 0.6 + 0.5 + 0.1 + 0.2) / 5)
    reliability = scores["reliability"]
    assert isinstance(reliability, list)
    assert [point["count"] for point in reliability] == [1, 1, 1, 1, 1]
    assert reliability[0] == {"predicted": pytest.approx(0.1), "observed": 0, "count": 1}
    json.dumps(scores, allow_nan=False)


def test_slides_are_drawn_where_they_are_known() -> None:
    """All of one slide is right and all of the other wrong: either may be drawn twice."""
    evidence = patches((1,) * 40, (0.9,) * 20 + (0.1,) * 20, "a" * 20 + "b" * 20)
    by_slide = tumor.score(evidence, {"threshold": 0.5})
    assert by_slide["interval_over"] == "slides"
    assert tumor.tally(by_slide) == {"a": (20, 20), "b": (0, 20)}
    assert by_slide["accuracy_interval"] == [0, 1]
    unknown = [Evidence(one.name, "", one.label, one.probability) for one in evidence]
    by_patch = tumor.score(unknown, {"threshold": 0.5})
    assert (by_patch["interval_over"], by_patch["slides"]) == ("patches", None)
    assert list(tumor.tally(by_patch).values()) == [(1, 1)] * 20 + [(0, 1)] * 20
    low, high = by_patch["accuracy_interval"]  # type: ignore[misc]
    assert 0.3 < low < 0.5 < high < 0.7


def test_one_slide_or_one_class_cannot_tell() -> None:
    scores = tumor.score(patches((0, 0), (0.2, 0.7), "aa"), {"threshold": 0.5})
    assert scores["accuracy_interval"] is None
    assert scores["auc"] is None
    json.dumps(scores, allow_nan=False)


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 10).map(lambda i: i / 10)), min_size=1, max_size=20),
)
def test_no_threshold_beats_the_chosen_point(drawn: list[tuple[int, float]]) -> None:
    labels, probabilities = zip(*drawn, strict=True)
    evidence = patches(labels, probabilities)
    point = tumor.choose_point(evidence)

    def accuracy(threshold: float) -> float:
        right = [tumor.decode(one.probability, {"threshold": threshold}) == one.label for one in evidence]
        return float(np.mean(right))

    best = accuracy(point["threshold"])
    assert best == max(accuracy(threshold) for threshold in np.linspace(-0.05, 1.05, 45))
    json.dumps(point, allow_nan=False)


def test_examine_takes_the_label(tmp_path: Path) -> None:
    picture = Picture(tmp_path / "x.h5", "x.h5[3]", "slide 1", "test", 0.972, row=3, label=1)
    assert tumor.examine(np.float32(0.25), picture, 1.0) == Evidence("x.h5[3]", "slide 1", 1, 0.25)  # type: ignore[arg-type]
    with pytest.raises(DataError, match="has no label"):
        tumor.examine(0.25, Picture(tmp_path / "a.png", "a.png", "", "test", 1.0), 1.0)


def test_no_patches_are_refused() -> None:
    for ask in (tumor.choose_point, lambda none: tumor.score(none, {"threshold": 0.5})):
        with pytest.raises(ValueError, match="no patches"):
            ask([])


def test_loss_is_that_of_one_logit() -> None:
    logits = torch.randn(6, 1, 1, 1, requires_grad=True)
    labels = torch.tensor([0, 1, 1, 0, 1, 0])
    loss = tumor.loss(logits, labels)
    loss.backward()
    assert logits.grad is not None
    assert torch.allclose(logits.grad.flatten(), (logits.detach().flatten().sigmoid() - labels) / 6)


def test_the_interval_of_auc_redraws_slides() -> None:
    """Slides that are each perfectly ranked within themselves, but not between each other."""
    rows = [("a", 0, 0.1), ("a", 1, 0.2), ("b", 0, 0.7), ("b", 1, 0.8), ("c", 0, 0.4), ("c", 1, 0.5)]
    evidence = [tumor.Evidence(f"p{i}", case, label, p) for i, (case, label, p) in enumerate(rows)]
    found = tumor.score(evidence, {"threshold": 0.5})
    low, high = found["auc_interval"]  # type: ignore[misc]
    assert low <= found["auc"] < high == 1, "one slide alone, drawn three times, is perfect"
    one = tumor.score(evidence[:2], {"threshold": 0.5})
    assert one["auc_interval"] is None
