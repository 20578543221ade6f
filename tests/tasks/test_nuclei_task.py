"""Nuclei: from probabilities to objects, the best thresholds, and scores counted by hand."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import pixels, write_image
from PIL import Image
from scipy import ndimage

from rotopath.data.collection import Picture
from rotopath.data.nuclei import BACKGROUND, BORDER, CLASSES, INSIDE, class_map
from rotopath.data.synthetic import organs
from rotopath.tasks import Prediction, nuclei
from rotopath.tasks.nuclei import Evidence

POINT = {"inside": 0.5, "background": 0.5, "least_px": 45}


def disc(row: float, column: float, number: int = 1, radius: float = 10, size: int = 80) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size]
    return (number * ((rows - row) ** 2 + (columns - column) ** 2 <= radius**2)).astype(np.int32)


def seen(labels: np.ndarray, blur_px: float = 0.7, noise: float = 0.0, seed: int = 0) -> Prediction:
    """What a nearly perfect network would say of a field."""
    planes = np.eye(3)[class_map(labels)].transpose(2, 0, 1)
    planes += noise * np.random.default_rng(seed).normal(size=planes.shape)
    planes = np.stack([ndimage.gaussian_filter(plane, blur_px) for plane in planes]).clip(0.001)
    return Prediction((planes / planes.sum(axis=0)).astype(np.float32), 1, (0.0, 0.0))


def field(truth: np.ndarray, labels: np.ndarray, case: str = "1", name: str = "") -> Evidence:
    return Evidence(name or f"field {case}", case, truth.astype(np.int32), seen(labels))


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


def test_two_discs_that_touch_are_two_objects() -> None:
    truth = np.maximum(disc(30, 30, 1), disc(30, 50, 2))
    assert ndimage.label(truth)[1] == 1, "they do touch"
    labels = nuclei.decode(seen(truth), POINT)
    assert labels.max() == 2
    assert labels.dtype == np.int32
    for number in (1, 2):
        found = labels == labels[30, 30 if number == 1 else 50]
        assert iou(found, truth == number) > 0.95


def test_without_a_border_between_them_they_are_one() -> None:
    both = (np.maximum(disc(30, 30, 1), disc(30, 50, 1)) > 0).astype(np.int32)
    joined = ndimage.binary_closing(both, iterations=8).astype(np.int32)
    assert nuclei.decode(seen(joined), POINT).max() == 1


def test_borders_are_where_nuclei_meet() -> None:
    """The divide follows the ridge of the border, not the middle between the seeds."""
    planes = np.zeros((3, 60, 60), np.float32)
    planes[BACKGROUND] = 1
    planes[:, 10:50, 10:50] = np.array([0.9, 0.1, 0.0])[:, None, None]
    planes[:, 10:50, 20:30] = np.array([0.4, 0.6, 0.0])[:, None, None]
    planes[:, 10:50, 28] = np.array([0.1, 0.9, 0.0])[:, None]  # far from the middle
    labels = nuclei.decode(Prediction(planes, 1, (0.0, 0.0)), POINT)
    assert labels.max() == 2
    assert (labels[10:50, 10:28] == labels[30, 12]).all()
    assert (labels[10:50, 29:50] == labels[30, 40]).all()
    assert labels[30, 12] != labels[30, 40]
    assert (labels[10:50, 10:50] > 0).all()
    assert labels.sum() == labels[10:50, 10:50].sum()


def test_specks_are_no_nuclei() -> None:
    labels = nuclei.decode(seen(np.maximum(disc(30, 30, 1), disc(60, 60, 2, radius=3)), blur_px=0.3), POINT)
    assert labels.max() == 1
    assert labels[60, 60] == 0


def test_nothing_gives_nothing() -> None:
    labels = nuclei.decode(seen(np.zeros((40, 30), np.int32)), POINT)
    assert labels.shape == (40, 30)
    assert labels.max() == 0


def test_thresholds_mean_what_they_say() -> None:
    truth = disc(40, 40, 1, radius=15)
    prediction = seen(truth, blur_px=2)
    areas = [(nuclei.decode(prediction, POINT | {"background": t}) > 0).sum() for t in (0.2, 0.5, 0.8)]
    assert areas[0] < areas[1] < areas[2], "the surer the background has to be, the larger is the nucleus"
    assert nuclei.decode(prediction, POINT | {"background": 0.0}).max() == 0
    pair = seen(np.maximum(disc(30, 30, 1), disc(30, 50, 2)))
    counts = [nuclei.decode(pair, POINT | {"inside": t}).max() for t in (0.0, 0.5)]
    assert counts == [1, 2], "seeds that take in the border merge what it divides"


def test_debris_is_what_is_smaller_than_the_nuclei_of_the_validation_set() -> None:
    """A hundred pixels too many everywhere: where nuclei are large it is dropped, where they are as small it stays."""
    speck, nucleus = disc(15, 15, 2, radius=6), disc(50, 50, 1, radius=14)
    dropped = nuclei.choose_point([field(nucleus, np.maximum(nucleus, speck))])
    assert dropped["least_px"] > 100
    kept = nuclei.choose_point([field(np.maximum(nucleus, speck), np.maximum(nucleus, speck))])
    assert kept["least_px"] < 100


def test_slender_nuclei_are_all_border_and_found_nevertheless() -> None:
    truth = np.zeros((80, 80), np.int32)
    truth[20:24, 10:50] = 1
    assert INSIDE not in class_map(truth)
    labels = nuclei.decode(seen(truth, blur_px=0.3), POINT)
    assert labels.max() == 1
    assert iou(labels > 0, truth > 0) > 0.9


def test_true_nuclei_survive_decoding() -> None:
    """Synthetic tissue, in which nuclei touch: what a perfect network says is decoded into what was there."""
    evidence, shuffled = [], []
    for organ in organs.ORGANS:
        _, drawn = organs.render_field(3, organ, 1, 384)
        labels, _ = organs.paint_labels(organs.annotate(drawn, 384), 384, 384)
        evidence.append(Evidence(organ, organ, labels, seen(labels)))
        shuffled.append(Evidence(organ, organ, np.ascontiguousarray(labels[::-1]), seen(labels)))
    scores = nuclei.score(evidence, POINT)
    assert scores["hits"] > 200  # type: ignore[operator]
    assert scores["f1"] > 0.97  # type: ignore[operator]
    assert scores["aji"] > 0.95  # type: ignore[operator]
    assert nuclei.score(shuffled, POINT)["f1"] < 0.3, "and into nothing else"  # type: ignore[operator]


def test_scores_counted_by_hand() -> None:
    """A hit, a nucleus that is missed and one that is not there; then a field with a hit."""
    truth = np.maximum(disc(20, 20, 1), disc(20, 60, 2))
    predicted = np.maximum(disc(20, 20, 1), disc(60, 60, 2))
    evidence = [field(truth, predicted, "1"), field(disc(40, 40), disc(40, 40), "2")]
    scores = nuclei.score(evidence, POINT)
    assert [scores[key] for key in ("rule", "hits", "false", "missed")] == ["iou", 2, 1, 1]
    assert nuclei.tally(scores) == {"1": (2, 4), "2": (2, 2)}
    assert scores["f1"] == pytest.approx(2 / 3)
    images = scores["images"]
    assert isinstance(images, dict)
    first, second = images["field 1"], images["field 2"]
    assert first["f1"] == pytest.approx(1 / 2)
    assert first["dice"] == pytest.approx(1 / 2, abs=0.02)
    assert first["aji"] == pytest.approx(1 / 3, abs=0.02)
    assert second["pq"] == pytest.approx(1, abs=0.05)
    for key in ("aji", "aji_plus", "dice"):
        assert scores[key] == pytest.approx((first[key] + second[key]) / 2)
    assert scores["pq"] == pytest.approx((2 * first["pq"] * 2 + second["pq"] * 2 * 1) / (4 + 2), abs=0.01)
    assert scores["f1_interval"] == [pytest.approx(1 / 2), 1]
    json.dumps(scores, allow_nan=False)


def test_the_rule_is_the_callers_choice() -> None:
    """A prediction of twice the radius: it covers the nucleus whole, at an IoU of a quarter."""
    evidence = [field(disc(40, 40, 1, radius=8), disc(40, 40, 1, radius=16))]
    assert nuclei.score(evidence, POINT)["f1"] == 0
    area = nuclei.score(evidence, POINT, rule="area")
    assert (area["f1"], area["rule"]) == (1, "area")


def test_the_chosen_point_is_the_best_of_all() -> None:
    generator = np.random.default_rng(1)
    evidence = []
    for case in ("1", "2"):
        truth = np.zeros((160, 160), np.int32)
        for number, place in enumerate(product(range(15, 150, 26), repeat=2), 1):
            row, column = np.array(place) + generator.integers(-3, 4, 2)
            truth = np.maximum(truth, disc(row, column, number, radius=generator.uniform(7, 13), size=160))
        evidence.append(Evidence(case, case, truth, seen(truth, blur_px=2.0, noise=1.2, seed=int(case))))
    tried = product(nuclei.INSIDE_TRIED, nuclei.BACKGROUND_TRIED, nuclei.LEAST_PX_TRIED)
    points = [dict(zip(("inside", "background", "least_px"), one, strict=True)) for one in tried]
    grid = [nuclei.score(evidence, point)["f1"] for point in points[::13]]
    best = nuclei.score(iter(evidence), nuclei.choose_point(iter(evidence)))["f1"]
    assert best >= max(grid)  # type: ignore[type-var,operator]
    assert best > min(grid), "the points differ"  # type: ignore[type-var,operator]


@pytest.mark.parametrize("truth", [np.zeros((80, 80), int), disc(40, 40)], ids=["none", "one"])
@pytest.mark.parametrize("labels", [np.zeros((80, 80), int), disc(40, 40)], ids=["none", "one"])
def test_degenerate_fields_have_scores(truth: np.ndarray, labels: np.ndarray) -> None:
    evidence = [field(truth, labels)]
    point = nuclei.choose_point(evidence)
    scores = nuclei.score(evidence, point)
    json.dumps(scores, allow_nan=False)
    assert scores["f1"] == float(truth.max() == labels.max())
    assert scores["f1_interval"] is None, "one case cannot tell"
    if not labels.any():
        assert point == POINT, "where nothing tells them apart, the middle"


def test_no_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="no fields"):
        nuclei.score([], POINT)


def test_examine_reads_nuclei_at_the_models_spacing(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(40, 40))
    Image.fromarray(disc(20, 20, 3, radius=5, size=40).astype(np.uint16)).save(tmp_path / "map.png")
    picture = Picture(image, "a.png", "7", "test", 0.5, annotations=(tmp_path / "map.png",))
    found = nuclei.examine(seen(disc(40.5, 40.5, 1, radius=10)), picture, 0.25)
    assert (found.name, found.case, found.truth.shape) == ("a.png", "7", (80, 80))
    assert nuclei.score([found], POINT)["f1"] == 1
    with pytest.raises(ValueError, match="40 × 40 px, but was predicted on 80 × 80 px"):
        nuclei.examine(seen(disc(40, 40)), picture, 0.5)


def test_loss_weighs_classes() -> None:
    assert CLASSES.index("border") == BORDER == 1 != INSIDE
    logits = torch.zeros(1, 3, 1, 2)
    logits[0, 0] = 2.0
    targets = torch.tensor([[[0, 1]]])
    right = logits.log_softmax(dim=1)[0, [0, 1], 0, [0, 1]]
    assert nuclei.loss(logits, targets) == pytest.approx(-right.mean())
    weighted = nuclei.loss(logits, targets, torch.tensor([1.0, 3.0, 1.0], dtype=torch.float64))
    assert weighted == pytest.approx(-(right[0] + 3 * right[1]) / 2)
