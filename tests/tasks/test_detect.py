"""Detect: peaks and their positions, the best thresholds, and scores counted by hand, for one and several classes."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import pixels, write_image, write_text

from rotopath.data.dataset import DataError, Sample
from rotopath.data.sampling import SamplerSettings
from rotopath.images.geojson import IGNORED_CLASS, SlideObject, write_geojson
from rotopath.images.outlines import Point, make_polygon
from rotopath.inference import Prediction
from rotopath.metrics.matching import FROC_POINTS
from rotopath.tasks import MITOSIS, Class, Detect, Overrides, TrainingWindow, make_task
from rotopath.tasks.detect import Detections, FieldEvidence

CELLS = Detect("detect", (Class("Mitosis", (1, 2, 3)), Class("Lymphocyte", (4, 5, 6))), 0.25, uses_class_names=True)
MITOTIC, LYMPHOCYTE = range(2)


def bumps(*peaks: tuple[float, float, float], size: int = 40, radius_px: float = 10) -> Prediction:
    """Return a map of stride 8 with smooth peaks: rows, columns and heights."""
    return Prediction(draw(*peaks, size=size, radius_px=radius_px)[None].astype(np.float32), 8, (3.5, 3.5))


def draw(*peaks: tuple[float, float, float], size: int = 40, radius_px: float = 10) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size] * 8 + 3.5
    values = np.zeros((size, size))
    for row, column, height in peaks:
        squared = (rows - row) ** 2 + (columns - column) ** 2
        values = np.maximum(values, height * np.exp(-squared / (2 * radius_px**2)))
    return values


def two_maps(
    mitoses: list[tuple[float, float, float]], lymphocytes: list[tuple[float, float, float]], radius_px: float = 10
) -> Prediction:
    """Return maps of two classes, and of neither."""
    maps = [draw(*peaks, radius_px=radius_px) for peaks in (mitoses, lymphocytes)]
    return Prediction(np.stack([*maps, 1 - maps[0] - maps[1]]).astype(np.float32), 8, (3.5, 3.5))


def field(
    truth: list[tuple[float, float]], detected: list[tuple[float, float, float]], case: str = "1"
) -> FieldEvidence:
    """Return evidence of a single class: true points, and detections as rows, columns and scores."""
    rows = np.array(detected, float).reshape(-1, 3)
    positions = np.array(truth, float).reshape(-1, 2)
    detections = Detections(rows[:, :2], rows[:, 2], np.zeros(len(rows), np.int64))
    return FieldEvidence(f"{case}/field", case, positions, np.zeros(len(positions), np.int64), detections, 30)


def field_of_classes(
    truth: list[tuple[float, float, int]], detected: list[tuple[float, float, float, int]], case: str = "1"
) -> FieldEvidence:
    """Return evidence of several classes; the last number of each tuple is the class."""
    objects, rows = np.array(truth, float).reshape(-1, 3), np.array(detected, float).reshape(-1, 4)
    detections = Detections(rows[:, :2], rows[:, 2], rows[:, 3].astype(np.int64))
    return FieldEvidence(f"{case}/field", case, objects[:, :2], objects[:, 2].astype(np.int64), detections, 30)


# A single class


@pytest.mark.parametrize("position", [(100, 100), (103.5, 99.5), (97, 106), (51.3, 260.9), (160, 161.7)])
def test_peaks_are_located_between_the_positions_of_the_map(position: tuple[float, float]) -> None:
    detections = MITOSIS.decode(bumps((*position, 0.9)))
    assert detections.positions.shape == (1, 2)
    assert detections.positions[0] == pytest.approx(position, abs=1)
    assert 0.4 < detections.scores[0] < 0.9, "smoothing lowers a peak"


@pytest.mark.parametrize("position", [(0, 0), (2, 200), (318, 318), (319, 100)])
def test_peaks_at_the_edge_are_detected(position: tuple[float, float]) -> None:
    detections = MITOSIS.decode(bumps((*position, 0.9)))
    assert len(detections.positions) == 1
    assert detections.positions[0] == pytest.approx(position, abs=5)


def test_distant_peaks_are_two_detections_and_close_ones_are_one() -> None:
    apart = MITOSIS.decode(bumps((100, 100, 0.6), (100, 148, 0.9)))
    assert len(apart.scores) == 2
    assert apart.positions[0] == pytest.approx((100, 148), abs=1.5), "the highest first"
    close = MITOSIS.decode(bumps((100, 100, 0.6), (100, 126, 0.9), radius_px=4))
    assert len(close.scores) == 1
    assert close.positions[0] == pytest.approx((100, 126), abs=2), "the highest one stays"


def test_a_plateau_is_one_candidate_at_its_center() -> None:
    values = np.zeros((1, 40, 40), np.float32)
    values[0, 10:21, 5:16] = 1  # still flat at the center after smoothing
    detections = MITOSIS.decode(Prediction(values, 8, (3.5, 3.5)))
    assert detections.positions.tolist() == [[3.5 + 15 * 8, 3.5 + 10 * 8]]
    assert detections.scores[0] == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.005, 0.7, 1.0])
def test_a_constant_map_has_no_candidates(value: float) -> None:
    detections = MITOSIS.decode(Prediction(np.full((1, 9, 7), value, np.float32), 8, (3.5, 3.5)))
    assert detections.positions.shape == (0, 2)
    assert detections.scores.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2)])
def test_maps_of_very_small_images_are_decoded(shape: tuple[int, int]) -> None:
    values = np.linspace(0.1, 0.9, shape[0] * shape[1], dtype=np.float32).reshape(1, *shape)
    assert len(MITOSIS.decode(Prediction(values, 8, (3.5, 3.5))).scores) <= 1


def test_an_operating_point_removes_detections_below_its_threshold() -> None:
    prediction = bumps((100, 100, 0.4), (100, 200, 0.9))
    scores = MITOSIS.decode(prediction).scores
    assert len(scores) == 2
    assert MITOSIS.decode(prediction, {"threshold": float(scores.mean())}).scores.tolist() == [scores[0]]
    assert len(MITOSIS.decode(prediction, {"threshold": float(scores[1])}).scores) == 2, (
        "a score at the threshold counts"
    )


def test_evidence_has_positions_at_the_spacing_of_the_model(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(160, 160))
    points = write_text(tmp_path / "a.csv", "49.5,99.5\n")
    sample = Sample(image, "a.png", "7", "test", 0.5, annotations=(points,))
    evidence = MITOSIS.collect_evidence(bumps((99.5, 199.5, 0.9)), sample)
    assert (evidence.name, evidence.case, evidence.radius_px) == ("a.png", "7", 30)
    assert evidence.truth.tolist() == [[99.5, 199.5]]
    assert MITOSIS.score([evidence], {"threshold": 0.3})["f1"] == 1
    empty = MITOSIS.collect_evidence(bumps(), Sample(image, "a.png", "7", "test", 0.5))
    assert MITOSIS.score([empty], {"threshold": 0.3})["f1"] == 1, "no object and no detection"


def test_scores_counted_by_hand() -> None:
    evidence = [
        field([(100, 100), (300, 300)], [(110, 100, 0.9), (100, 115, 0.7), (500, 500, 0.8)], "1"),
        field([(50, 50)], [(50, 50, 0.4)], "1"),
        field([], [(10, 10, 0.95)], "2"),
    ]
    scores = MITOSIS.score(evidence, {"threshold": 0.5})
    assert scores["rule"] == "amida13"
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 2, 2]
    assert scores["f1"] == pytest.approx(2 / 6)
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["recall"] == pytest.approx(1 / 3)
    cases = scores["cases"]
    assert isinstance(cases, dict)
    assert cases["1"]["f1"] == pytest.approx(2 / 5)
    assert cases["2"] == {"f1": 0, "precision": 0, "recall": 0, "hits": 0, "false": 1, "missed": 0}
    assert MITOSIS.score_terms(scores) == {"1": (2, 5), "2": (0, 1)}
    one_to_one = MITOSIS.score(evidence, {"threshold": 0.5}, rule="one-to-one")
    assert [one_to_one[key] for key in ("rule", "hits", "false", "missed")] == ["one-to-one", 1, 3, 2]
    assert scores["f1_interval"] is None, "two cases are too few"
    json.dumps(scores, allow_nan=False)


def test_the_interval_of_f1_resamples_cases() -> None:
    """Three cases have a true positive and three a false one: with h true ones in a resample, F1 is 2h / (6 + h)."""
    hits = [field([(50, 50)], [(50, 50, 0.9)], case) for case in "abc"]
    evidence = hits + [field([], [(10, 10, 0.95)], case) for case in "def"]
    scores = MITOSIS.score(evidence, {"threshold": 0.5})
    assert scores["f1"] == pytest.approx(6 / 9)
    assert scores["f1_interval"] == [pytest.approx(2 / 7), pytest.approx(10 / 11)], "h is one and five of six"
    fewer = MITOSIS.score(evidence[1:-1], {"threshold": 0.5})
    assert fewer["f1_interval"] is None, "four cases are too few"


def test_the_froc_curve_rises_and_has_a_limited_number_of_points() -> None:
    generator = np.random.default_rng(0)
    fields = []
    for number in range(10):
        truth = [(100.0 * i, 1000.0 * number) for i in range(60)]
        detected = [(*position, score) for position, score in zip(truth, generator.random(60), strict=True)]
        detected += [(100.0 * i + 50, 500.0, score) for i, score in enumerate(generator.random(90) * 0.8)]
        fields.append(field(truth, detected, str(number)))
    froc = MITOSIS.score(fields, {"threshold": 0.5})["froc"]
    assert isinstance(froc, list)
    assert len(froc) == FROC_POINTS
    false, sensitivity = ([point[key] for point in froc] for key in ("false_per_image", "sensitivity"))
    assert false == sorted(false)
    assert sensitivity == sorted(sensitivity)
    assert froc[0]["sensitivity"] == pytest.approx(1 / 600)
    assert (false[-1], sensitivity[-1]) == (90, 1)
    for point in froc[::40]:
        scores = MITOSIS.score(fields, {"threshold": point["threshold"]})
        assert point["sensitivity"] == scores["recall"]
        assert point["false_per_image"] * 10 == pytest.approx(scores["false"])


numbers = st.integers(1, 19).map(lambda i: i / 20)
fields = st.lists(
    st.tuples(st.lists(numbers, max_size=4), st.lists(numbers, max_size=4), st.integers(0, 2)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=50)
@given(fields)
def test_no_threshold_has_a_higher_f1_than_the_operating_point(
    drawn: list[tuple[list[float], list[float], int]],
) -> None:
    """Fields have mitoses that are detected with some score, false detections, and mitoses that are missed."""
    evidence = []
    for hits, false, missed in drawn:
        truth = [(100.0 * i, 0.0) for i in range(len(hits) + missed)]
        detected = [(100.0 * i, 5.0, score) for i, score in enumerate(hits)]
        detected += [(100.0 * i, 900.0, score) for i, score in enumerate(false)]
        evidence.append(field(truth, detected))
    for rule in ("amida13", "one-to-one"):
        best = MITOSIS.score(evidence, MITOSIS.choose_operating_point(evidence, rule), rule)
        if not any(len(image.truth) for image in evidence):
            continue  # without any mitosis F1 does not depend on the threshold, unless it rejects everything
        grid = [MITOSIS.score(evidence, {"threshold": t}, rule)["f1"] for t in np.linspace(0, 0.95, 39)]
        assert best["f1"] == pytest.approx(max(grid))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "evidence",
    [
        [field([], [])],
        [field([(1, 1)], [])],
        [field([], [(1, 1, 0.9)])],
        [field([], [], "1"), field([], [], "2")],
        [field([(1, 1)], [(1, 1, 0.9)])],
        [field([], [], case) for case in "12345"],
    ],
)
def test_fields_with_few_or_no_objects_have_scores(evidence: list[FieldEvidence]) -> None:
    scores = MITOSIS.score(evidence, MITOSIS.choose_operating_point(evidence))
    json.dumps(scores, allow_nan=False)
    assert scores["f1"] in (0, 1)
    assert scores["f1_interval"] == (None if len(evidence) < 5 else [1, 1]), "a few cases are too few"


def test_empty_evidence_is_refused() -> None:
    with pytest.raises(ValueError, match="no images"):
        MITOSIS.score([], {"threshold": 0.5})


def test_the_loss_of_a_single_class_is_the_binary_cross_entropy() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5]).view(3, 1, 1, 1)
    labels = torch.tensor([1, 0, 0])
    probabilities = torch.stack(
        [logits[0, 0, 0, 0].sigmoid(), (-logits[1, 0, 0, 0]).sigmoid(), (-logits[2, 0, 0, 0]).sigmoid()]
    )
    assert MITOSIS.make_loss([])(logits, labels) == pytest.approx(-probabilities.log().mean())
    with pytest.raises(ValueError, match=r"needs one output"):
        MITOSIS.make_loss([])(torch.zeros(3, 1, 2, 2), labels)


@pytest.mark.parametrize("task", [MITOSIS, CELLS], ids=["one class", "two classes"])
def test_windows_with_more_than_one_output_are_refused(task: Detect) -> None:
    task.check_window(TrainingWindow(68, 8, 8))
    with pytest.raises(DataError, match="in windows of 84 px the network has 3 × 3 outputs; set 'window_px'"):
        task.check_window(TrainingWindow(84, 24, 8))


def test_hard_examples_are_false_positives_by_falling_score() -> None:
    evidence = [
        field([(100, 100)], [(110, 100, 0.9), (300.4, 299.6, 0.7)], "1"),
        field([], [(10, 20, 0.8), (50, 50, 0.1)], "2"),
    ]
    mined = MITOSIS.find_hard_examples(evidence, 2)
    assert [tuple(example) for example in mined] == [("2/field", 10, 20, 0.8), ("1/field", 300, 300, 0.7)]
    assert len(MITOSIS.find_hard_examples(evidence, 9)) == 3


# Several classes


def test_peaks_are_searched_in_the_map_of_each_class() -> None:
    detections = CELLS.find_peaks(two_maps([(100, 100, 0.9)], [(100, 200, 0.7), (220, 60, 0.8)]))
    positions = {
        (index, *position.round(-1)) for index, position in zip(detections.classes, detections.positions, strict=True)
    }
    assert positions == {(MITOTIC, 100, 100), (LYMPHOCYTE, 100, 200), (LYMPHOCYTE, 220, 60)}
    assert len(detections.scores) == 3, "the map of neither class has no peaks"


def test_a_network_has_an_output_for_each_class_and_one_for_neither() -> None:
    assert (CELLS.outputs, CELLS.output_names) == (3, ("Mitosis", "Lymphocyte", "other"))
    assert (MITOSIS.outputs, MITOSIS.output_names) == (1, ("Mitosis",))
    assert CELLS.background_probabilities == (0, 0, 1), "glass is neither of them"
    maps = two_maps([(100, 100, 0.9)], [(100, 200, 0.7)]).probabilities
    assert np.array_equal(CELLS.class_maps(maps), maps[:2])
    assert CELLS.foreground_map(maps) == pytest.approx(1 - maps[2], abs=1e-6)


def test_every_class_has_its_own_threshold() -> None:
    prediction = two_maps([(100, 100, 0.9), (100, 220, 0.5)], [(220, 100, 0.9), (220, 220, 0.5)])
    candidates = CELLS.decode(prediction)
    assert sorted(candidates.classes.tolist()) == [MITOTIC, MITOTIC, LYMPHOCYTE, LYMPHOCYTE]
    middle = float(np.median(candidates.scores))
    strict = CELLS.decode(prediction, {"threshold Mitosis": middle, "threshold Lymphocyte": 0.05})
    assert sorted(strict.classes.tolist()) == [MITOTIC, LYMPHOCYTE, LYMPHOCYTE]
    other = CELLS.decode(prediction, {"threshold Mitosis": 0.05, "threshold Lymphocyte": middle})
    assert sorted(other.classes.tolist()) == [MITOTIC, MITOTIC, LYMPHOCYTE]


def test_at_the_same_position_the_class_with_the_higher_score_is_kept() -> None:
    prediction = two_maps([(100, 100, 0.35), (220, 220, 0.6)], [(100, 108, 0.6), (220, 212, 0.35)])
    point = {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05}
    detections = CELLS.decode(prediction, point)
    assert detections.classes[np.argsort(detections.positions[:, 0])].tolist() == [LYMPHOCYTE, MITOTIC]
    assert len(CELLS.decode(prediction).scores) == 4, "without an operating point every class keeps its candidates"
    without_lymphocytes = CELLS.decode(prediction, point | {"threshold Lymphocyte": 0.99})
    assert without_lymphocytes.classes.tolist() == [MITOTIC] * 2, "peaks below their threshold remove no others"


def test_candidates_of_two_classes_are_merged_up_to_a_distance_of_7_5_um() -> None:
    positions = np.array([[100.0, 100.0], [100.0, 129.0], [100.0, 160.0]])
    detections = CELLS.merge(Detections(positions, np.array([0.7, 0.9, 0.8]), np.array([0, 1, 0])))
    assert detections.positions.tolist() == [[100, 129], [100, 160]]
    assert detections.classes.tolist() == [1, 0]
    assert detections.scores.tolist() == [0.9, 0.8], "the highest first"


# First field: a mitosis is detected, another is detected as a lymphocyte, and a lymphocyte is detected. Second field: a
# false positive of each class. Third field: a lymphocyte is missed.
FIELDS = (
    field_of_classes(
        [(100, 100, MITOTIC), (300, 300, MITOTIC), (500, 500, LYMPHOCYTE)],
        [(105, 100, 0.9, MITOTIC), (300, 310, 0.7, LYMPHOCYTE), (500, 505, 0.8, LYMPHOCYTE)],
        "1",
    ),
    field_of_classes([], [(50, 50, 0.6, MITOTIC), (400, 400, 0.65, LYMPHOCYTE)], "1"),
    field_of_classes([(70, 70, LYMPHOCYTE)], [(70, 75, 0.3, LYMPHOCYTE)], "2"),
)
HALF = {"threshold Mitosis": 0.5, "threshold Lymphocyte": 0.5}


def test_f1_of_each_class_and_their_mean_by_hand() -> None:
    scores = CELLS.score(FIELDS, HALF)
    classes = scores["classes"]
    assert isinstance(classes, dict)
    counted = {name: tuple(row[key] for key in ("hits", "false", "missed")) for name, row in classes.items()}
    assert counted == {"Mitosis": (1, 1, 1), "Lymphocyte": (1, 2, 1)}
    assert classes["Mitosis"]["f1"] == pytest.approx(2 / 4)
    assert classes["Lymphocyte"]["f1"] == pytest.approx(2 / 5)
    assert classes["Lymphocyte"]["precision"] == pytest.approx(1 / 3)
    assert classes["Lymphocyte"]["recall"] == pytest.approx(1 / 2)
    assert scores["macro_f1"] == pytest.approx((2 / 4 + 2 / 5) / 2)
    assert [scores[key] for key in ("hits", "false", "missed")] == [2, 3, 2], "all classes together"
    assert scores["f1"] == pytest.approx(4 / 9)
    assert CELLS.score_terms(scores) == {"1": (4, 8), "2": (0, 1)}
    assert {key: scores[key] for key in HALF} == HALF
    assert "froc" not in scores
    # One of two lymphocytes is detected at 0.8, before any false positive; the other at 0.3, after two in three images.
    froc = [
        (point["threshold"], point["false_per_image"], point["sensitivity"]) for point in classes["Lymphocyte"]["froc"]
    ]
    assert froc == [(0.8, 0, 0.5), (0.3, pytest.approx(2 / 3), 1)]
    json.dumps(scores, allow_nan=False)


def test_a_lower_threshold_of_one_class_changes_only_that_class() -> None:
    classes = CELLS.score(FIELDS, HALF | {"threshold Lymphocyte": 0.2})["classes"]
    assert isinstance(classes, dict)
    counted = {name: tuple(row[key] for key in ("hits", "false", "missed")) for name, row in classes.items()}
    assert counted == {"Mitosis": (1, 1, 1), "Lymphocyte": (2, 2, 0)}


def test_an_object_detected_as_two_classes_counts_once_for_the_higher_score() -> None:
    """A mitosis is detected as mitosis and as lymphocyte: that is one detection, correct or wrong."""
    right = field_of_classes([(100, 100, MITOTIC)], [(100, 100, 0.9, MITOTIC), (105, 100, 0.8, LYMPHOCYTE)])
    scores = CELLS.score([right], HALF)
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 0, 0]
    wrong = field_of_classes([(100, 100, MITOTIC)], [(100, 100, 0.8, MITOTIC), (105, 100, 0.9, LYMPHOCYTE)])
    scores = CELLS.score([wrong], HALF)
    assert [scores[key] for key in ("hits", "false", "missed")] == [0, 1, 1]


def test_the_operating_point_has_the_best_threshold_of_each_class() -> None:
    """Thresholds between 0.6 and 0.9 separate true from false mitoses, those between 0.2 and 0.3 lymphocytes."""
    evidence = [
        field_of_classes(
            [(100, 100, MITOTIC), (300, 100, LYMPHOCYTE)],
            [
                (100, 100, 0.9, MITOTIC),
                (500, 100, 0.6, MITOTIC),
                (300, 100, 0.3, LYMPHOCYTE),
                (700, 1, 0.2, LYMPHOCYTE),
            ],
        )
    ]
    point = CELLS.choose_operating_point(evidence)
    assert set(point) == {"threshold Mitosis", "threshold Lymphocyte"}
    assert 0.6 < point["threshold Mitosis"] <= 0.9
    assert 0.2 < point["threshold Lymphocyte"] <= 0.3
    assert CELLS.score(evidence, point)["f1"] == 1
    assert CELLS.check_operating_point(point) == point
    with pytest.raises(ValueError, match="must contain threshold Mitosis, threshold Lymphocyte; got threshold"):
        CELLS.check_operating_point({"threshold": 0.5})


cells = st.tuples(st.integers(0, 2), st.integers(0, 2))  # of a grid of 100 px
heights = st.integers(2, 9).map(lambda i: i / 20)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(cells, heights), st.dictionaries(cells, heights), st.sets(cells), numbers, numbers)
def test_scores_count_the_detections_at_the_operating_point(
    mitoses: dict[tuple[int, int], float],
    lymphocytes: dict[tuple[int, int], float],
    truth: set[tuple[int, int]],
    first: float,
    second: float,
) -> None:
    """Peaks of one or both classes at some of nine positions, and objects at some of them."""
    drawn = [
        [(60.0 + 100 * row, 60.0 + 100 * column + shift, height) for (row, column), height in peaks.items()]
        for peaks, shift in ((mitoses, 0), (lymphocytes, 12))
    ]
    prediction = two_maps(*drawn)
    objects = [(60.0 + 100 * row, 60.0 + 100 * column, (row + column) % 2) for row, column in sorted(truth)]
    evidence = field_of_classes(objects, [])
    evidence = FieldEvidence("f", "1", evidence.truth, evidence.truth_classes, CELLS.decode(prediction), 30)
    point = {"threshold Mitosis": first / 2, "threshold Lymphocyte": second / 2}
    scores = CELLS.score([evidence], point)
    detections = CELLS.decode(prediction, point)
    predicted = {
        (*(np.array(position) // 100), index)
        for position, index in zip(detections.positions, detections.classes, strict=True)
    }
    actual = {(row, column, (row + column) % 2) for row, column in truth}
    counted = [scores[key] for key in ("hits", "false", "missed")]
    assert counted == [len(predicted & actual), len(predicted - actual), len(actual - predicted)]


def annotated(root: Path, text: str) -> Sample:
    image = write_image(root / "a.png", pixels(160, 160))
    return Sample(image, "a.png", "7", "test", 0.25, annotations=(write_text(root / "a.csv", text),))


def test_objects_of_unknown_classes_are_background(tmp_path: Path) -> None:
    sample = annotated(tmp_path, "row,column,class\n10,120,lymphocyte\n80,80,stroma\n30,40,MITOSIS\n")
    positions, classes = CELLS.read_points(sample)
    assert positions.tolist() == [[10, 120], [30, 40]]
    assert classes.tolist() == [LYMPHOCYTE, MITOTIC], "upper and lower case are equal"
    evidence = CELLS.collect_evidence(two_maps([(30, 40, 0.5), (80, 80, 0.5)], [(10, 120, 0.4)]), sample)
    scores = CELLS.score([evidence], {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05})
    assert [scores[key] for key in ("hits", "false", "missed")] == [2, 1, 0], (
        "a detection on the stroma is a false positive"
    )
    assert [(example.row, example.column) for example in CELLS.find_hard_examples([evidence], 9)] == [(80, 80)]


def test_a_recipe_that_names_a_single_class_ignores_objects_of_others(tmp_path: Path) -> None:
    sample = annotated(tmp_path, "row,column,class\n10,20,lymphocyte\n80,80,\n30,40,mitosis\n")
    task = make_task("detect", Overrides(classes=("Mitosis",)))
    assert isinstance(task, Detect)
    assert task.read_points(sample)[0].tolist() == [[80, 80], [30, 40]], "objects without a class name belong to it"
    assert MITOSIS.read_points(sample)[0].tolist() == [[10, 20], [80, 80], [30, 40]], (
        "the paper's task uses objects of any class"
    )
    assert MITOSIS.read_points(sample)[1].tolist() == [0, 0, 0]


@pytest.mark.parametrize("text", ["10,20\n", "row,column,class\n5,5,mitosis\n10,20,\n"], ids=["no column", "no name"])
def test_an_object_without_a_class_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError) as caught:
        CELLS.read_points(annotated(tmp_path, text))
    assert str(caught.value) == (
        "a.png has an object without a class, but the task has the classes Mitosis, Lymphocyte; name the class of "
        "every object."
    )


def test_the_loss_of_several_classes_is_the_cross_entropy() -> None:
    logits = torch.randn(4, 3, 1, 1)
    labels = torch.tensor([2, 0, 1, 2])  # 2 is neither class
    log_probabilities = logits[:, :, 0, 0].log_softmax(dim=1)[torch.arange(4), labels]
    assert CELLS.make_loss([])(logits, labels) == pytest.approx(-log_probabilities.mean())


# Other spacings


@pytest.mark.parametrize("spacing", [0.125, 0.5, 1.0])
def test_distances_are_in_micrometers(spacing: float) -> None:
    """At another spacing, detections and scores are the same, and positions are in other pixels."""
    task = make_task("mitosis", Overrides(spacing_um_px=spacing))
    assert isinstance(task, Detect)
    factor = 0.25 / spacing
    assert task.match_radius_px == 30 * factor
    prediction = bumps((100, 100, 0.6), (100, 126, 0.9), (220, 60, 0.5), radius_px=6)
    stride = round(8 * factor)
    other = task.decode(Prediction(prediction.probabilities, stride, (0.0, 0.0)))
    standard = MITOSIS.decode(Prediction(prediction.probabilities, 8, (0.0, 0.0)))
    assert len(standard.scores) == 2, "two of the three peaks are one object"
    assert other.scores == pytest.approx(standard.scores)
    assert other.positions == pytest.approx(standard.positions * factor)
    assert task.halo(stride) == MITOSIS.halo(8)


def test_the_matching_radius_is_7_5_um_at_any_spacing(tmp_path: Path) -> None:
    coarse = make_task("mitosis", Overrides(spacing_um_px=0.5))
    assert isinstance(coarse, Detect)
    image = write_image(tmp_path / "a.png", pixels(160, 160))
    points = write_text(tmp_path / "a.csv", "80,80\n")
    sample = Sample(image, "a.png", "7", "test", 0.5, annotations=(points,))
    for distance, hits in ((13, 1), (17, 0)):
        prediction = Prediction(draw((160, 2 * (80 + distance), 0.9)).astype(np.float32)[None], 4, (1.5, 1.5))
        evidence = coarse.collect_evidence(prediction, sample)
        assert evidence.radius_px == 15
        assert evidence.detections.positions[0] == pytest.approx((79.75, 79.75 + distance), abs=0.5)
        assert coarse.score([evidence], {"threshold": 0.1})["hits"] == hits


def test_scores_count_the_same_detections_as_decode_in_a_chain_of_classes() -> None:
    """A mitosis removes a lymphocyte nearby, which then does not remove another lymphocyte further away."""
    prediction = two_maps([(100, 100, 0.9)], [(100, 125, 0.8), (100, 150, 0.7)], radius_px=6)
    point = {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05}
    detections = CELLS.decode(prediction, point)
    assert np.allclose(detections.positions, [[100, 100], [100, 150]], atol=2)
    truth = np.array([[100.0, 100.0], [100.0, 150.0]])
    evidence = FieldEvidence("field", "1", truth, np.array([MITOTIC, LYMPHOCYTE]), CELLS.decode(prediction), 30)
    scores = CELLS.score([evidence], point)
    assert (scores["hits"], scores["false"], scores["missed"]) == (2, 0, 0)


def ignore_left_half(root: Path, *points: tuple[float, float, str]) -> Sample:
    """Write a sample of 160 × 160 px with points (row, column, class). An ignored area has columns 0 to 79."""
    square = (make_polygon(np.array([[0, 0], [0, 80], [160, 80], [160, 0]], float)),)
    objects = [SlideObject(square, "annotation", IGNORED_CLASS)]
    objects += [SlideObject(Point(row + 0.5, column + 0.5), "annotation", name) for row, column, name in points]
    write_geojson(root / "a.geojson", objects)
    image = write_image(root / "a.png", pixels(160, 160))
    return Sample(image, "a.png", "7", "test", 0.25, annotations=(root / "a.geojson",))


def test_objects_and_detections_in_ignored_areas_do_not_count(tmp_path: Path) -> None:
    sample = ignore_left_half(tmp_path, (30, 40, "mitosis"), (90, 120, "lymphocyte"), (10, 79, "mitosis"))
    positions, classes = CELLS.read_points(sample)
    assert positions.tolist() == [[90, 120]]
    assert classes.tolist() == [LYMPHOCYTE]
    mask = CELLS.read_ignored(sample)
    assert mask is not None
    assert mask[:, :80].all()
    assert not mask[:, 80:].any()
    prediction = two_maps([(30, 40, 0.5), (130, 20, 0.6), (40, 120, 0.5)], [(90, 120, 0.4)])
    evidence = CELLS.collect_evidence(prediction, sample)
    scores = CELLS.score([evidence], {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05})
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 1, 0], "only the objects on the right count"
    assert [(example.row, example.column) for example in CELLS.find_hard_examples([evidence], 9)] == [(40, 120)]
    assert CELLS.read_ignored(annotated(tmp_path, "row,column,class\n10,20,mitosis\n")) is None


def test_ignored_areas_are_resampled_with_the_image(tmp_path: Path) -> None:
    sample = replace(ignore_left_half(tmp_path), spacing_um_px=0.5)
    mask = CELLS.read_ignored(sample)
    assert mask is not None
    assert mask.shape == (320, 320)
    assert mask[:, :160].all()
    assert not mask[:, 160:].any()


def test_windows_without_objects_are_outside_of_ignored_areas(tmp_path: Path) -> None:
    sample = ignore_left_half(tmp_path, (90, 120, "lymphocyte"), (20, 120, "mitosis"))
    chosen = SamplerSettings(np.array([[160, 160]]), 68, 32, 0)
    windows = CELLS.make_sampler([sample], chosen, TrainingWindow(68, 8, 8), None).draw(0)
    assert (windows.lefts[windows.labels == 2] + 33 >= 79).all()


def test_a_balanced_loss_weights_rare_classes_higher(tmp_path: Path) -> None:
    rows = ["row,column,class", "10,20,mitosis", "20,90,lymphocyte", "50,20,lymphocyte", "90,90,Lymphocyte"]
    sample = annotated(tmp_path, "\n".join(rows))
    logits, labels = torch.randn(3, 3, 1, 1), torch.tensor([0, 1, 2])
    losses = -logits[:, :, 0, 0].log_softmax(dim=1)[torch.arange(3), labels]
    expected = (losses * torch.tensor([4 / 2, 4 / 6, 1])).mean()  # 4 objects, 2 classes: 4 / (2 · 1) and 4 / (2 · 3)
    assert CELLS.make_loss([sample], weights="balanced")(logits, labels) == pytest.approx(expected)
    assert CELLS.make_loss([sample], weights="equal")(logits, labels) == pytest.approx(losses.mean())
