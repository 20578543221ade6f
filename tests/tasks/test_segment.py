"""Segment: targets, decoding of objects and their classes, the best operating point, and scores counted by hand."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from layouts import box, outline_xml, pixels, write_csv, write_image, write_text
from PIL import Image
from scipy import ndimage
from skimage.segmentation import watershed

from rotopath.data.annotations import paint_labels
from rotopath.data.dataset import DataError, Sample
from rotopath.data.sampling import SamplerSettings
from rotopath.images.geojson import IGNORED_CLASS, SlideObject, write_geojson
from rotopath.images.outlines import make_polygon
from rotopath.inference import Prediction
from rotopath.synthetic import organs
from rotopath.tasks import NUCLEI, Class, Overrides, Segment, TrainingWindow, make_task
from rotopath.tasks.segment import (
    BACKGROUND,
    BACKGROUND_TRIED,
    BORDER,
    INSIDE,
    LEAST_FRACTIONS,
    NO_CLASS,
    PARTS,
    THRESHOLDS,
    ObjectEvidence,
    balancing_weights,
    part_map,
    weighted_cross_entropy,
)

CELLS = Segment(
    "segment", (Class("Epithelial", (1, 2, 3)), Class("Lymphocyte", (4, 5, 6))), 0.25, uses_class_names=True
)
EPITHELIAL, LYMPHOCYTE = range(2)
POINT = {"inside": 0.5, "background": 0.5, "least_px": 45}


def disc(row: float, column: float, number: int = 1, radius: float = 10, size: int = 80) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size]
    return (number * ((rows - row) ** 2 + (columns - column) ** 2 <= radius**2)).astype(np.int32)


def predict_nearly_perfectly(labels: np.ndarray, blur_px: float = 0.7, noise: float = 0.0, seed: int = 0) -> Prediction:
    """Return what a nearly perfect network predicts: the true parts, blurred and with noise."""
    planes = np.eye(3)[part_map(labels)].transpose(2, 0, 1)
    planes += noise * np.random.default_rng(seed).normal(size=planes.shape)
    planes = np.stack([ndimage.gaussian_filter(plane, blur_px) for plane in planes]).clip(0.001)
    return Prediction((planes / planes.sum(axis=0)).astype(np.float32), 1, (0.0, 0.0))


def field(truth: np.ndarray, labels: np.ndarray, case: str = "1", name: str = "") -> ObjectEvidence:
    classes = np.zeros(int(truth.max()) + 1, np.int64)
    return ObjectEvidence(
        name or f"field {case}", case, truth.astype(np.int32), classes, predict_nearly_perfectly(labels)
    )


def iou(a: np.ndarray, b: np.ndarray) -> float:
    return float((a & b).sum() / (a | b).sum())


def annotated(root: Path, labels: np.ndarray, *classes: tuple[int, str], spacing: float = 0.25) -> Sample:
    """Write a sample with a label map and, if there are classes, their table."""
    image = write_image(root / "a.png", pixels(*labels.shape))
    annotation = write_image(root / "map.png", labels)
    if classes:
        write_csv(root / "map.csv", [("object", "class"), *classes])
    return Sample(image, "a.png", "7", "test", spacing, annotations=(annotation,))


# Targets of a single class


def test_a_square_nucleus_has_a_border_of_two_pixels() -> None:
    labels = np.zeros((12, 14), int)
    labels[2:10, 3:12] = 4
    expected = np.full((12, 14), BACKGROUND)
    expected[2:10, 3:12] = BORDER
    expected[4:8, 5:10] = INSIDE
    assert np.array_equal(part_map(labels), expected)


def test_touching_nuclei_have_borders_towards_each_other_and_none_at_the_edge_of_the_image() -> None:
    labels = np.array([[1] * 6 + [2] * 6] * 5)
    assert part_map(labels).tolist() == [[INSIDE] * 4 + [BORDER] * 4 + [INSIDE] * 4] * 5
    assert part_map(labels, border_px=1).tolist() == [[INSIDE] * 5 + [BORDER] * 2 + [INSIDE] * 5] * 5


@given(arrays(np.int32, (9, 9), elements=st.integers(0, 3)))
def test_inside_and_border_make_up_the_nuclei(labels: np.ndarray) -> None:
    parts = part_map(labels)
    assert parts.dtype == np.uint8
    assert np.array_equal(parts != BACKGROUND, labels > 0)
    for row, column in np.argwhere(parts == INSIDE):
        around = labels[max(row - 1, 0) : row + 2, max(column - 1, 0) : column + 2]
        assert (around == labels[row, column]).all()


def test_balancing_weights_give_every_part_the_same_weight() -> None:
    maps = [np.array([[0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 2, 2]], np.uint8)]
    weights = balancing_weights(maps, PARTS)
    assert (weights * [6, 4, 2]).tolist() == pytest.approx([4, 4, 4])  # of 12 pixels


def test_balancing_weights_need_every_part() -> None:
    with pytest.raises(DataError, match="have no pixel of class 'background'; every class is needed"):
        balancing_weights([np.array([[0, 1]], np.uint8)], PARTS)


# A single class


def test_touching_nuclei_are_separated() -> None:
    truth = np.maximum(disc(30, 30, 1), disc(30, 50, 2))
    assert ndimage.label(truth)[1] == 1, "they do touch"
    labels = NUCLEI.decode(predict_nearly_perfectly(truth), POINT)
    assert labels.max() == 2
    assert labels.dtype == np.int32
    for number in (1, 2):
        nucleus = labels == labels[30, 30 if number == 1 else 50]
        assert iou(nucleus, truth == number) > 0.95


def test_nuclei_without_a_border_in_between_are_one_object() -> None:
    both = (np.maximum(disc(30, 30, 1), disc(30, 50, 1)) > 0).astype(np.int32)
    joined = ndimage.binary_closing(both, iterations=8).astype(np.int32)
    assert NUCLEI.decode(predict_nearly_perfectly(joined), POINT).max() == 1


def test_touching_nuclei_are_separated_at_the_highest_border_probability() -> None:
    """The separation follows the ridge of the border probability, not the middle between the seeds."""
    planes = np.zeros((3, 60, 60), np.float32)
    planes[BACKGROUND] = 1
    planes[:, 10:50, 10:50] = np.array([0.9, 0.1, 0.0])[:, None, None]
    planes[:, 10:50, 20:30] = np.array([0.4, 0.6, 0.0])[:, None, None]
    planes[:, 10:50, 28] = np.array([0.1, 0.9, 0.0])[:, None]  # far from the middle
    labels = NUCLEI.decode(Prediction(planes, 1, (0.0, 0.0)), POINT)
    assert labels.max() == 2
    assert (labels[10:50, 10:28] == labels[30, 12]).all()
    assert (labels[10:50, 29:50] == labels[30, 40]).all()
    assert labels[30, 12] != labels[30, 40]
    assert (labels[10:50, 10:50] > 0).all()
    assert labels.sum() == labels[10:50, 10:50].sum()


def test_objects_below_the_minimum_area_are_removed() -> None:
    labels = NUCLEI.decode(
        predict_nearly_perfectly(np.maximum(disc(30, 30, 1), disc(60, 60, 2, radius=3)), blur_px=0.3), POINT
    )
    assert labels.max() == 1
    assert labels[60, 60] == 0


def test_pure_background_has_no_objects() -> None:
    labels = NUCLEI.decode(predict_nearly_perfectly(np.zeros((40, 30), np.int32)), POINT)
    assert labels.shape == (40, 30)
    assert labels.max() == 0


def test_the_effect_of_each_threshold() -> None:
    truth = disc(40, 40, 1, radius=15)
    prediction = predict_nearly_perfectly(truth, blur_px=2)
    areas = [(NUCLEI.decode(prediction, POINT | {"background": t}) > 0).sum() for t in (0.2, 0.5, 0.8)]
    assert areas[0] < areas[1] < areas[2], "a higher background threshold makes nuclei larger"
    assert NUCLEI.decode(prediction, POINT | {"background": 0.0}).max() == 0
    pair = predict_nearly_perfectly(np.maximum(disc(30, 30, 1), disc(30, 50, 2)))
    counts = [NUCLEI.decode(pair, POINT | {"inside": t}).max() for t in (0.0, 0.5)]
    assert counts == [1, 2], "seeds that include the border merge both nuclei"


def test_the_minimum_area_adapts_to_the_nuclei_of_the_validation_set() -> None:
    """A speck is removed if it is a false positive, and kept if it is a nucleus."""
    speck, nuclei = disc(12, 12, 3, radius=5), np.maximum(disc(50, 55, 1, radius=14), disc(22, 52, 2, radius=12))
    without_speck = NUCLEI.choose_operating_point([field(nuclei, np.maximum(nuclei, speck))])
    assert without_speck["least_px"] > 80
    with_speck = NUCLEI.choose_operating_point([field(np.maximum(nuclei, speck), np.maximum(nuclei, speck))])
    assert with_speck["least_px"] < 140
    assert with_speck["least_fraction"] < without_speck["least_fraction"]


def test_the_least_area_is_relative_to_the_objects_of_a_field() -> None:
    """A tenth of the median: fields of small nuclei keep them, where an area in pixels would remove all of them."""
    point = POINT | {"least_px": 150, "least_fraction": 0.5}
    large = np.maximum.reduce([disc(20, 20, 1, radius=12), disc(55, 20, 2, radius=12), disc(50, 60, 3, radius=5)])
    small = np.maximum.reduce([disc(20, 20, 1, radius=6), disc(55, 20, 2, radius=6), disc(50, 60, 3, radius=5)])
    for labels, count in ((large, 2), (small, 3)):
        assert NUCLEI.decode(predict_nearly_perfectly(labels), point).max() == count
    with_area = {key: value for key, value in point.items() if key != "least_fraction"}  # as in earlier versions
    assert NUCLEI.decode(predict_nearly_perfectly(small), with_area).max() == 0
    assert NUCLEI.check_operating_point(with_area) == with_area
    assert NUCLEI.check_operating_point(point) == point
    areas = np.array([400, 400, 90])
    assert NUCLEI.find_least_px(areas, 1000 * 1000, point) == 200
    assert NUCLEI.find_least_px(areas, 5000 * 5000, point) == 150, "a slide is no field"
    assert NUCLEI.find_least_px(np.array([400, 400, 90, 2, 3, 2, 1]), 10**6, point) == 200, "specks do not count"
    assert NUCLEI.adjust_operating_point(point, min_area_um2=2) == POINT | {"least_px": 32}
    assert "in fields 0.5 of the median area" in NUCLEI.describe_operating_point(point)


def test_the_best_operating_point_is_not_at_an_end_of_the_values_that_were_tried() -> None:
    """Each nucleus is in a wide ring that a lower threshold removes; that of the third one is below all at first."""
    truth, background = np.zeros((80, 240), np.int32), np.ones((80, 240))
    for number, ring in enumerate((0.45, 0.15, 0.08)):
        tile = np.s_[:, 80 * number : 80 * (number + 1)]
        truth[tile] = disc(40, 40, number + 1, radius=14)
        background[tile] = np.where(disc(40, 40, radius=21) > 0, ring, 1)
    background[truth > 0] = 0.01
    planes = np.stack([1 - background, 0 * background, background]).astype(np.float32)
    evidence = replace(field(truth, truth), prediction=Prediction(planes, 1, (0.0, 0.0)))
    point = NUCLEI.choose_operating_point([evidence])
    assert NUCLEI.score([evidence], point)["f1"] == 1
    assert point["background"] == 0.05 < min(BACKGROUND_TRIED)
    at_first = NUCLEI.score([evidence], point | {"background": min(BACKGROUND_TRIED)})
    assert at_first["f1"] == pytest.approx(2 / 3)


def test_slender_nuclei_without_an_inside_are_segmented() -> None:
    truth = np.zeros((80, 80), np.int32)
    truth[20:24, 10:50] = 1
    assert INSIDE not in part_map(truth)
    labels = NUCLEI.decode(predict_nearly_perfectly(truth, blur_px=0.3), POINT)
    assert labels.max() == 1
    assert iou(labels > 0, truth > 0) > 0.9


def test_perfect_maps_of_synthetic_tissue_are_decoded_to_the_true_nuclei() -> None:
    """The synthetic tissue has touching nuclei. Against flipped annotations the score is low."""
    evidence, flipped = [], []
    for organ in organs.ORGANS:
        _, nuclei = organs.render_organ_field(3, organ, 1, 384)
        labels, _ = paint_labels(organs.outline_visible_nuclei(nuclei, 384), 384, 384)
        classes = np.zeros(labels.max() + 1, np.int64)
        evidence.append(ObjectEvidence(organ, organ, labels, classes, predict_nearly_perfectly(labels)))
        upside_down = np.ascontiguousarray(labels[::-1])
        flipped.append(ObjectEvidence(organ, organ, upside_down, classes, predict_nearly_perfectly(labels)))
    scores = NUCLEI.score(evidence, POINT)
    assert scores["hits"] > 200  # type: ignore[operator]
    assert scores["f1"] > 0.97  # type: ignore[operator]
    assert scores["aji"] > 0.95  # type: ignore[operator]
    assert NUCLEI.score(flipped, POINT)["f1"] < 0.3  # type: ignore[operator]


@given(seed=st.integers(0, 10**6), inside=st.sampled_from([0.3, 0.5, 0.8]), background=st.sampled_from([0.3, 0.6]))
def test_objects_are_those_of_a_watershed_of_all_regions(seed: int, inside: float, background: float) -> None:
    """The watershed is left out where a region has one seed or none, which must not change the objects."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=(3, 60, 70)), (0, 2.5, 2.5))
    maps = torch.from_numpy(noise * 25).softmax(dim=0).float().numpy()
    objects = NUCLEI.grow(Prediction(maps, 1, (0, 0)), inside, background)
    regions, _ = ndimage.label(maps[2] < background)
    seeds, _ = ndimage.label((regions > 0) & (maps[0] >= inside))
    areas = np.bincount(seeds.ravel())
    seeds[areas[seeds] < 20] = 0
    without = ~np.isin(regions, regions[seeds > 0])
    markers = np.where(without & (regions > 0), regions + seeds.max(), seeds)
    expected = watershed(maps[1], markers, mask=regions > 0)
    pairs = set(zip(objects.ravel().tolist(), expected.ravel().tolist(), strict=True))
    assert len(pairs) == len(np.unique(objects)) == len(np.unique(expected)), "the same objects, by other numbers"


def test_scores_counted_by_hand() -> None:
    """The first field has a true positive, a false negative and a false positive; the second a true positive."""
    truth = np.maximum(disc(20, 20, 1), disc(20, 60, 2))
    predicted = np.maximum(disc(20, 20, 1), disc(60, 60, 2))
    evidence = [field(truth, predicted, "1"), field(disc(40, 40), disc(40, 40), "2")]
    scores = NUCLEI.score(evidence, POINT)
    assert [scores[key] for key in ("rule", "hits", "false", "missed")] == ["iou", 2, 1, 1]
    assert NUCLEI.score_terms(scores) == {"1": (2, 4), "2": (2, 2)}
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
    assert scores["mean_f1"] == pytest.approx((first["f1"] + second["f1"]) / 2) != scores["f1"]
    assert scores["pq"] == pytest.approx((2 * first["pq"] * 2 + second["pq"] * 2 * 1) / (4 + 2), abs=0.01)
    assert (scores["f1_interval"], scores["aji_interval"]) == (None, None), "two cases are too few"
    assert "classes" not in scores
    json.dumps(scores, allow_nan=False)


def test_intervals_resample_cases() -> None:
    """Three cases have a true positive and three a false one: with h true ones in a resample, F1 is 2h / (6 + h)."""
    empty = np.zeros((80, 80), np.int32)
    evidence = [field(disc(40, 40), disc(40, 40), case) for case in "abc"]
    evidence += [field(empty, disc(40, 40), case) for case in "def"]
    scores = NUCLEI.score(evidence, POINT)
    assert scores["f1_interval"] == [pytest.approx(2 / 7), pytest.approx(10 / 11)], "h is one and five of six"
    assert scores["aji_interval"] == [pytest.approx(1 / 6, abs=0.01), pytest.approx(5 / 6, abs=0.05)]
    assert NUCLEI.score(evidence[1:-1], POINT)["f1_interval"] is None, "four cases are too few"


def test_the_rule_can_be_chosen() -> None:
    """A prediction of twice the radius covers the whole nucleus, at an IoU of a quarter."""
    evidence = [field(disc(40, 40, 1, radius=8), disc(40, 40, 1, radius=16))]
    assert NUCLEI.score(evidence, POINT)["f1"] == 0
    area = NUCLEI.score(evidence, POINT, rule="area")
    assert (area["f1"], area["rule"]) == (1, "area")


def test_no_operating_point_has_a_higher_f1_than_the_chosen_one() -> None:
    generator = np.random.default_rng(1)
    evidence = []
    for case in ("1", "2"):
        truth = np.zeros((160, 160), np.int32)
        for number, center in enumerate(product(range(15, 150, 26), repeat=2), 1):
            row, column = np.array(center) + generator.integers(-3, 4, 2)
            truth = np.maximum(truth, disc(row, column, number, radius=generator.uniform(7, 13), size=160))
        classes = np.zeros(truth.max() + 1, np.int64)
        prediction = predict_nearly_perfectly(truth, blur_px=2.0, noise=1.2, seed=int(case))
        evidence.append(ObjectEvidence(case, case, truth, classes, prediction))
    tried = product(THRESHOLDS[4:], THRESHOLDS[3:-4], LEAST_FRACTIONS)
    points = [dict(zip(("inside", "background", "least_fraction"), values, strict=True)) for values in tried]
    grid = [NUCLEI.score(evidence, point)["f1"] for point in points[::17]]
    best = NUCLEI.score(iter(evidence), NUCLEI.choose_operating_point(iter(evidence)))["f1"]
    assert best >= max(grid)  # type: ignore[type-var,operator]
    assert best > min(grid), "the points differ"  # type: ignore[type-var,operator]


@pytest.mark.parametrize("truth", [np.zeros((80, 80), int), disc(40, 40)], ids=["none", "one"])
@pytest.mark.parametrize("labels", [np.zeros((80, 80), int), disc(40, 40)], ids=["none", "one"])
def test_fields_with_one_or_no_object_have_scores(truth: np.ndarray, labels: np.ndarray) -> None:
    evidence = [field(truth, labels)]
    point = NUCLEI.choose_operating_point(evidence)
    scores = NUCLEI.score(evidence, point)
    json.dumps(scores, allow_nan=False)
    assert scores["f1"] == float(truth.max() == labels.max())
    assert scores["f1_interval"] is None, "one case is too few"
    if not labels.any():
        assert point == {"inside": 0.5, "background": 0.5, "least_fraction": 0.3, "least_px": 0}, "all are equal"


def test_empty_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        NUCLEI.score([], POINT)


def test_evidence_has_nuclei_at_the_spacing_of_the_model(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(40, 40))
    Image.fromarray(disc(20, 20, 3, radius=5, size=40).astype(np.uint16)).save(tmp_path / "map.png")
    sample = Sample(image, "a.png", "7", "test", 0.5, annotations=(tmp_path / "map.png",))
    evidence = NUCLEI.collect_evidence(predict_nearly_perfectly(disc(40.5, 40.5, 1, radius=10)), sample)
    assert (evidence.name, evidence.case, evidence.truth.shape) == ("a.png", "7", (80, 80))
    assert NUCLEI.score([evidence], POINT)["f1"] == 1
    with pytest.raises(ValueError, match="have 40 × 40 px, but the predicted maps have 80 × 80 px"):
        make_task("nuclei", Overrides(spacing_um_px=0.5)).collect_evidence(
            predict_nearly_perfectly(disc(40, 40)), sample
        )


def test_the_weighted_cross_entropy_by_hand() -> None:
    assert PARTS.index("border") == BORDER == 1 != INSIDE
    logits = torch.zeros(1, 3, 1, 2)
    logits[0, 0] = 2.0
    targets = torch.tensor([[[0, 1]]])
    log_probabilities = logits.log_softmax(dim=1)[0, [0, 1], 0, [0, 1]]
    assert weighted_cross_entropy(logits, targets, torch.ones(3)) == pytest.approx(-log_probabilities.mean())
    weighted = weighted_cross_entropy(logits, targets, torch.tensor([1.0, 3.0, 1.0]))
    assert weighted == pytest.approx(-(log_probabilities[0] + 3 * log_probabilities[1]) / 2)


def test_the_loss_is_balanced_over_parts(tmp_path: Path) -> None:
    labels = np.zeros((12, 14), np.uint16)
    labels[2:10, 3:12] = 4
    counts = np.bincount(part_map(labels).ravel())
    assert counts.tolist() == [20, 52, 96]
    logits, targets = torch.randn(1, 3, 12, 14), torch.from_numpy(part_map(labels)).long()[None]
    loss = NUCLEI.make_loss([annotated(tmp_path, labels)])(logits, targets)
    losses = -logits.log_softmax(dim=1).gather(1, targets[:, None])[0, 0]
    means = [losses[targets[0] == part].mean() for part in range(3)]
    assert loss == pytest.approx(float(sum(means)) / 3), "the mean over parts of their mean losses"
    double = NUCLEI.make_loss([annotated(tmp_path, labels)])(logits.double(), targets)
    assert double.dtype == torch.float64


def test_networks_without_an_output_for_every_pixel_are_refused() -> None:
    NUCLEI.check_window(TrainingWindow(60, 20, 1))
    with pytest.raises(DataError, match="pixel by pixel, but the network has an output every 4 px"):
        NUCLEI.check_window(TrainingWindow(60, 20, 4))


# Several classes

SQUARES = np.zeros((60, 60), np.int32)  # four objects of 10 × 10 px
SQUARES[5:15, 5:15] = 1
SQUARES[5:15, 35:45] = 2
SQUARES[35:45, 5:15] = 3
SQUARES[35:45, 35:45] = 4
CLASSES_OF_SQUARES = np.array([0, EPITHELIAL, EPITHELIAL, LYMPHOCYTE, LYMPHOCYTE])


def predict_classes(labels: np.ndarray, classes: np.ndarray) -> Prediction:
    """Return what a network predicts that is certain of parts, 90 % certain of classes, and undecided on background."""
    parts = np.eye(3)[part_map(labels)].transpose(2, 0, 1)
    first = np.where(labels == 0, 0.5, np.where(classes[labels] == 0, 0.9, 0.1))
    return Prediction(np.concatenate([parts, [first, 1 - first]]).astype(np.float32), 1, (0.0, 0.0))


def test_a_network_has_outputs_for_parts_and_separately_for_classes() -> None:
    assert (CELLS.outputs, CELLS.output_names) == (5, (*PARTS, "Epithelial", "Lymphocyte"))
    assert (NUCLEI.outputs, NUCLEI.output_names) == (3, PARTS)
    logits = torch.randn(2, 5, 4, 4)
    probabilities = CELLS.to_probabilities(logits)
    assert torch.allclose(probabilities[:, :3], logits[:, :3].softmax(dim=1))
    assert torch.allclose(probabilities[:, 3:], logits[:, 3:].softmax(dim=1))
    assert torch.equal(NUCLEI.to_probabilities(logits[:, :3]), logits[:, :3].softmax(dim=1))
    maps = predict_classes(SQUARES, CLASSES_OF_SQUARES).probabilities
    assert CELLS.class_maps(maps)[:, 10, 10] == pytest.approx([0.9, 0.1])
    assert CELLS.class_maps(maps)[:, 0, 0].tolist() == [0, 0], "background is of no class"
    assert np.array_equal(CELLS.foreground_map(maps), SQUARES > 0)


def test_targets_are_parts_and_the_classes_of_objects(tmp_path: Path) -> None:
    """Objects 5 and 300 are of the task's classes; object 9 is of another class, and therefore background."""
    labels = np.zeros((20, 30), np.uint16)
    labels[2:10, 3:12] = 5
    labels[2:10, 15:24] = 300
    labels[12:18, 3:12] = 9
    sample = annotated(tmp_path, labels, (5, "lymphocyte"), (300, "Epithelial"), (9, "fibroblast"))
    parts, classes = np.full((20, 30), BACKGROUND), np.full((20, 30), NO_CLASS)
    for left, index in ((3, LYMPHOCYTE), (15, EPITHELIAL)):
        parts[2:10, left : left + 9] = BORDER
        parts[4:8, left + 2 : left + 7] = INSIDE
        classes[2:10, left : left + 9] = index
    targets = CELLS.targets(sample)
    assert targets.dtype == np.uint8
    assert np.array_equal(targets, np.dstack([parts, classes]))
    planes = CELLS.reader.read(sample)
    assert planes.shape == (20, 30, 5)
    assert np.array_equal(planes[..., 3:], targets)
    assert NUCLEI.targets(sample).shape == (20, 30, 1)
    assert (NUCLEI.targets(sample)[12:18, 3:12] != BACKGROUND).all(), "the paper's task uses objects of any class"


def test_a_recipe_that_names_a_single_class_ignores_objects_of_others(tmp_path: Path) -> None:
    sample = annotated(tmp_path, SQUARES.astype(np.uint16), *((i, "abca"[i - 1]) for i in range(1, 5)))
    task = make_task("segment", Overrides(classes=("A",)))
    assert isinstance(task, Segment)
    labels, classes = task.read_objects(sample)
    assert np.unique(labels).tolist() == [0, 1, 4]
    assert classes.tolist() == [0] * 5
    assert task.targets(sample).shape == (60, 60, 1)


def test_an_object_without_a_class_is_refused(tmp_path: Path) -> None:
    """Outlines of ImageScope have no class names."""
    image = write_image(tmp_path / "a.png", pixels(40, 40))
    xml = write_text(tmp_path / "a.xml", outline_xml(box(5, 8, 6)))
    sample = Sample(image, "a.png", "7", "test", 0.25, annotations=(xml,))
    with pytest.raises(DataError) as caught:
        CELLS.read_objects(sample)
    assert str(caught.value) == (
        "a.png has an object without a class, but the task has the classes Epithelial, Lymphocyte; name the class of "
        "every object."
    )
    assert NUCLEI.read_objects(sample)[0].max() == 1


def test_an_object_has_the_class_with_the_highest_mean_probability_over_its_pixels() -> None:
    """Most pixels favor one class a little and a few the other strongly: the object is of the class of the few."""
    prediction = predict_classes(SQUARES, CLASSES_OF_SQUARES)
    first = prediction.probabilities[3]
    first[5:15, 5:11], first[5:15, 11:15] = 0.45, 0.95  # on average 0.65
    first[5:15, 35:41], first[5:15, 41:45] = 0.55, 0.10  # on average 0.37
    prediction.probabilities[4] = 1 - first
    labels = CELLS.decode(prediction, POINT)
    decided = CELLS.decide_classes(labels, prediction.probabilities)
    centers = ((10, 10), (10, 40), (40, 10), (40, 40))
    assert [decided[labels[center]] for center in centers] == [EPITHELIAL, LYMPHOCYTE, LYMPHOCYTE, LYMPHOCYTE]
    assert len(decided) == 5
    assert CELLS.decide_classes(np.zeros((4, 4), np.int32), prediction.probabilities[:, :4, :4]).tolist() == [0]
    assert NUCLEI.decide_classes(labels, prediction.probabilities[:3]).tolist() == [0] * 5


def test_f1_and_pq_of_each_class_by_hand() -> None:
    """One object has an IoU of 0.8, one is predicted as the other class, one is exact, and one is missed."""
    predicted = SQUARES.copy()
    predicted[5:15, 13:15] = 0
    predicted[35:45, 35:45] = 0
    prediction = predict_classes(predicted, np.array([0, EPITHELIAL, LYMPHOCYTE, LYMPHOCYTE, LYMPHOCYTE]))
    scores = CELLS.score([ObjectEvidence("f", "1", SQUARES, CLASSES_OF_SQUARES, prediction)], POINT)
    assert scores["classes"] == {
        "Epithelial": {
            "f1": pytest.approx(2 / 3),
            "pq": pytest.approx(2 * 0.8 / 3),
            "hits": 1,
            "false": 0,
            "missed": 1,
        },
        "Lymphocyte": {"f1": pytest.approx(2 / 4), "pq": pytest.approx(2 / 4), "hits": 1, "false": 1, "missed": 1},
    }
    assert scores["macro_f1"] == pytest.approx((2 / 3 + 2 / 4) / 2)
    assert scores["macro_pq"] == pytest.approx((1.6 / 3 + 2 / 4) / 2)
    assert [scores[key] for key in ("hits", "false", "missed")] == [3, 0, 1], "for all classes together"
    assert scores["f1"] == pytest.approx(6 / 7)
    assert scores["pq"] == pytest.approx(2 * 2.8 / 7)
    assert CELLS.score_terms(scores) == {"1": (6, 7)}
    json.dumps(scores, allow_nan=False)


def test_classes_are_counted_over_all_fields() -> None:
    background = np.zeros_like(SQUARES)
    full = ObjectEvidence("a", "1", SQUARES, CLASSES_OF_SQUARES, predict_classes(SQUARES, CLASSES_OF_SQUARES))
    empty = ObjectEvidence("b", "2", SQUARES, CLASSES_OF_SQUARES, predict_classes(background, np.array([0])))
    classes = CELLS.score([full, empty], POINT)["classes"]
    assert isinstance(classes, dict)
    assert [(row["hits"], row["false"], row["missed"]) for row in classes.values()] == [(2, 0, 2)] * 2


def test_evidence_has_objects_and_their_classes(tmp_path: Path) -> None:
    """The label map has gaps in its numbers, and an object of another class."""
    numbers = np.array([0, 7, 300, 11, 12], np.uint16)
    names = ((7, "epithelial"), (300, "epithelial"), (11, "LYMPHOCYTE"), (12, "other"))
    sample = annotated(tmp_path, numbers[SQUARES], *names)
    evidence = CELLS.collect_evidence(predict_classes(SQUARES, CLASSES_OF_SQUARES), sample)
    assert {number: evidence.truth_classes[number] for number in (7, 300, 11)} == {7: 0, 300: 0, 11: 1}
    assert np.unique(evidence.truth).tolist() == [0, 7, 11, 300]
    scores = CELLS.score([evidence], POINT)
    assert [scores[key] for key in ("hits", "false", "missed")] == [3, 1, 0]
    classes = scores["classes"]
    assert isinstance(classes, dict)
    assert classes["Lymphocyte"]["f1"] == pytest.approx(2 / 3)
    assert classes["Epithelial"]["f1"] == 1


def test_background_pixels_have_no_part_in_the_loss_of_classes(tmp_path: Path) -> None:
    labels = SQUARES.astype(np.uint16)
    labels[35:45, 35:40] = 0  # so that classes are not equally frequent: 200 px and 150 px
    names = ((1, "epithelial"), (2, "epithelial"), (3, "lymphocyte"), (4, "lymphocyte"))
    sample = annotated(tmp_path, labels, *names)
    loss = CELLS.make_loss([sample])
    targets = torch.from_numpy(CELLS.targets(sample)).long().permute(2, 0, 1)[None]
    logits = torch.randn(1, 5, 60, 60)

    def mean_of_means(logits: torch.Tensor, numbers: torch.Tensor, count: int) -> float:
        losses = -logits.log_softmax(dim=1)[0]
        return sum(float(losses[k][numbers == k].mean()) for k in range(count)) / count

    expected = mean_of_means(logits[:, :3], targets[0, 0], 3) + mean_of_means(logits[:, 3:], targets[0, 1], 2)
    assert loss(logits, targets) == pytest.approx(expected, rel=1e-5), "every part and every class has the same weight"
    changed = logits.clone()
    changed[:, 3:] += torch.randn(1, 2, 60, 60) * (targets[:, 1:] == NO_CLASS)
    assert loss(changed, targets) == pytest.approx(float(loss(logits, targets)), rel=1e-6)
    changed[:, 3, 10, 10] += 3
    assert float(loss(changed, targets)) < float(loss(logits, targets)) - 1e-4
    without_objects = targets.clone()
    without_objects[:, 1] = NO_CLASS
    assert torch.isfinite(loss(logits, without_objects))
    accuracy = (logits[:, :3].argmax(dim=1) == targets[:, 0]).double().mean()
    assert CELLS.accuracy(logits, targets) == accuracy


def test_balancing_weights_of_classes_by_hand(tmp_path: Path) -> None:
    maps = [np.array([[0, 0, 0, 1], [NO_CLASS] * 4], np.uint8), np.array([[1, 1, 1, NO_CLASS]], np.uint8)]
    weights = balancing_weights(maps, CELLS.class_names)  # 3 of 12 pixels are of the first class, 4 of the second
    assert weights.tolist() == pytest.approx([12 / (2 * 3), 12 / (2 * 4)])
    sample = annotated(tmp_path, SQUARES.astype(np.uint16), *((i, "lymphocyte") for i in range(1, 5)))
    with pytest.raises(DataError, match="have no pixel of class 'Epithelial'; every class is needed"):
        CELLS.make_loss([sample])


def test_the_operating_point_is_the_same_for_all_classes() -> None:
    evidence = [ObjectEvidence("f", "1", SQUARES, CLASSES_OF_SQUARES, predict_classes(SQUARES, CLASSES_OF_SQUARES))]
    point = CELLS.choose_operating_point(evidence)
    assert point == NUCLEI.choose_operating_point(evidence)
    assert CELLS.check_operating_point(point) == point


# Other spacings


@pytest.mark.parametrize(("spacing", "border_px"), [(0.125, 4), (0.25, 2), (0.5, 1), (1.0, 1)])
def test_the_border_is_half_a_micrometer_wide_and_at_least_one_pixel(
    tmp_path: Path, spacing: float, border_px: int
) -> None:
    labels = np.zeros((60, 60), np.uint16)
    labels[10:50, 10:50] = 1
    task = make_task("nuclei", Overrides(spacing_um_px=spacing))
    assert isinstance(task, Segment)
    parts = task.targets(annotated(tmp_path, labels, spacing=spacing))[..., 0]
    inside = np.argwhere(parts == INSIDE)
    assert inside.min(axis=0).tolist() == [10 + border_px] * 2
    assert inside.max(axis=0).tolist() == [49 - border_px] * 2


@pytest.mark.parametrize(("spacing", "side_px"), [(0.125, 9), (0.25, 5), (0.5, 3)])
def test_the_smallest_seed_has_1_25_square_micrometers(spacing: float, side_px: int) -> None:
    """80, 20 and 5 px: a square of this side is large enough for a seed, and a square of one pixel less is not."""
    task = make_task("nuclei", Overrides(spacing_um_px=spacing))
    assert isinstance(task, Segment)
    counts = []
    for side in (side_px - 1, side_px):
        planes = np.zeros((3, 60, 80), np.float32)
        planes[BACKGROUND] = 1
        planes[:, 10:50, 10:70] = np.array([0.1, 0.9, 0.0])[:, None, None]
        planes[:, 15:45, 15:35] = np.array([0.9, 0.1, 0.0])[:, None, None]
        planes[:, 20 : 20 + side, 50 : 50 + side] = np.array([0.9, 0.1, 0.0])[:, None, None]
        counts.append(task.decode(Prediction(planes, 1, (0.0, 0.0)), POINT).max())
    assert counts == [1, 2]


@pytest.mark.parametrize("spacing", [0.125, 0.5, 1.0])
def test_the_least_area_on_slides_is_that_of_the_validation_fields(spacing: float) -> None:
    """Fields of objects of 400 and of 900 px: the median over both fields, times the fraction."""
    task = make_task("nuclei", Overrides(spacing_um_px=spacing))
    evidence = []
    for side, count in ((20, 3), (30, 1)):
        truth = np.zeros((40, 120), np.int32)
        for number in range(count):
            truth[3 : 3 + side, 5 + 40 * number : 5 + 40 * number + side] = number + 1
        planes = np.eye(3)[np.where(truth > 0, INSIDE, BACKGROUND)].transpose(2, 0, 1).astype(np.float32)
        prediction = Prediction(planes, 1, (0.0, 0.0))
        evidence.append(ObjectEvidence(f"{side}", f"{side}", truth, np.zeros(4, np.int64), prediction))
    point = task.choose_operating_point(evidence)
    assert (point["least_fraction"], point["least_px"]) == (0.3, pytest.approx(0.3 * 400))


def ignore_right_half(root: Path) -> Sample:
    """Write a sample of 40 × 80 px with a nucleus on the left, and one in an ignored area on the right."""
    area = (make_polygon(np.array([[0, 40], [0, 80], [40, 80], [40, 40]], float)),)
    objects = [SlideObject(area, "annotation", IGNORED_CLASS)]
    for left in (10, 55):
        square = np.array([[10, left], [10, left + 15], [25, left + 15], [25, left]], float)
        objects.append(SlideObject((make_polygon(square),), "annotation", "Epithelial"))
    write_geojson(root / "a.geojson", objects)
    image = write_image(root / "a.png", pixels(40, 80))
    return Sample(image, "a.png", "7", "test", 0.25, annotations=(root / "a.geojson",))


def test_pixels_in_ignored_areas_have_no_target_and_no_loss(tmp_path: Path) -> None:
    targets = CELLS.targets(ignore_right_half(tmp_path))
    assert (targets[:, 40:] == NO_CLASS).all()
    assert np.unique(targets[:, :40, 0]).tolist() == [INSIDE, BORDER, BACKGROUND]
    maps = torch.from_numpy(targets).long().permute(2, 0, 1)[None]
    logits = torch.randn(1, 5, 40, 80)
    changed = logits.clone()
    changed[..., 40:] = torch.randn(1, 5, 40, 40)
    part_weights = torch.ones(3)
    losses = [weighted_cross_entropy(values[:, :3], maps[:, 0], part_weights) for values in (logits, changed)]
    assert losses[0] == losses[1]
    assert CELLS.accuracy(logits, maps) == CELLS.accuracy(changed, maps)
    perfect = torch.nn.functional.one_hot(maps[:, 0].clamp(max=2), 5).permute(0, 3, 1, 2).float()
    assert CELLS.accuracy(perfect, maps) == 1.0
    changed[..., :40] += 1 + torch.randn(1, 5, 40, 40)
    assert losses[0] != weighted_cross_entropy(changed[:, :3], maps[:, 0], part_weights)


def test_objects_in_ignored_areas_do_not_count(tmp_path: Path) -> None:
    """A predicted object is left out if at least half of it is in such an area."""
    sample = ignore_right_half(tmp_path)
    predicted = np.zeros((40, 80), np.int32)
    predicted[10:25, 10:25] = 1  # correct
    predicted[28:38, 50:70] = 2  # in the area
    predicted[28:38, 33:45] = 3  # 7 of 12 columns are outside of the area: a false positive
    evidence = NUCLEI.collect_evidence(predict_nearly_perfectly(predicted), sample)
    assert np.unique(evidence.truth).tolist() == [0, 1]
    scores = NUCLEI.score([evidence], POINT)
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 1, 0]
    without = replace(evidence, ignored=None)
    assert NUCLEI.score([without], POINT)["false"] == 2
    assert NUCLEI.choose_operating_point([evidence])["least_px"] > 0


def test_a_balanced_sampler_shows_rare_classes_as_often_as_others(tmp_path: Path) -> None:
    labels = np.zeros((200, 200), np.uint16)
    for number in range(1, 9):
        labels[20 * number : 20 * number + 10, 10:20] = number
    labels[100:110, 180:190] = 9
    sample = annotated(tmp_path, labels, *((n, "epithelial") for n in range(1, 9)), (9, "lymphocyte"))
    counts = {}
    for name in (None, "natural", "balanced"):
        settings = SamplerSettings(np.array([[200, 200]]), 60, 16, 0, name)
        sampler = CELLS.make_sampler([sample], settings, TrainingWindow(60, 20, 1), None)
        windows = [sampler.draw(step) for step in range(20)]
        tops, lefts = (np.concatenate([getattr(w, side) for w in windows]) + 20 for side in ("tops", "lefts"))
        counts[name] = sum((labels[t : t + 20, s : s + 20] == 9).any() for t, s in zip(tops, lefts, strict=True))
    assert counts["natural"] == counts[None]
    assert counts["balanced"] >= 80 > 5 * counts["natural"], "a quarter of 320 windows"


def test_equal_weights_are_an_ordinary_cross_entropy(tmp_path: Path) -> None:
    labels = disc(40, 40).astype(np.uint16)
    sample = annotated(tmp_path, labels)
    logits, targets = torch.randn(1, 3, 80, 80), torch.from_numpy(NUCLEI.targets(sample)[None, ..., 0]).long()
    ordinary = torch.nn.functional.cross_entropy(logits, targets)
    assert NUCLEI.make_loss([sample], weights="equal")(logits, targets) == pytest.approx(ordinary)
    balanced = NUCLEI.make_loss([sample])(logits, targets)
    assert balanced == NUCLEI.make_loss([sample], weights="balanced")(logits, targets)
    assert balanced != pytest.approx(ordinary)
