"""Detect: peaks and their positions, the best thresholds, and scores counted by hand, of one class and of several."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import pixels, write_image, write_text

from rotopath.data.dataset import DataError, Sample
from rotopath.inference import Prediction
from rotopath.metrics.matching import Matches
from rotopath.tasks import MITOSIS, Class, Detect, Frame, Overrides, make_task
from rotopath.tasks.detect import FROC_POINTS, Detections, FieldEvidence, _froc

CELLS = Detect("detect", (Class("Mitosis", (1, 2, 3)), Class("Lymphocyte", (4, 5, 6))), 0.25, typed=True)
MITOTIC, LYMPHOCYTE = range(2)


def bumps(*places: tuple[float, float, float], size: int = 40, radius_px: float = 10) -> Prediction:
    """A map of stride 8 with smooth peaks of given heights at given pixels."""
    return Prediction(draw(*places, size=size, radius_px=radius_px)[None].astype(np.float32), 8, (3.5, 3.5))


def draw(*places: tuple[float, float, float], size: int = 40, radius_px: float = 10) -> np.ndarray:
    rows, columns = np.mgrid[:size, :size] * 8 + 3.5
    values = np.zeros((size, size))
    for row, column, height in places:
        away = (rows - row) ** 2 + (columns - column) ** 2
        values = np.maximum(values, height * np.exp(-away / (2 * radius_px**2)))
    return values


def two_maps(
    mitoses: list[tuple[float, float, float]], lymphocytes: list[tuple[float, float, float]], radius_px: float = 10
) -> Prediction:
    """Maps of two classes, and what is left for none of them."""
    maps = [draw(*places, radius_px=radius_px) for places in (mitoses, lymphocytes)]
    return Prediction(np.stack([*maps, 1 - maps[0] - maps[1]]).astype(np.float32), 8, (3.5, 3.5))


def field(truth: list[tuple[float, float]], found: list[tuple[float, float, float]], case: str = "1") -> FieldEvidence:
    """`found` as rows, columns and scores."""
    rows = np.array(found, float).reshape(-1, 3)
    positions = np.array(truth, float).reshape(-1, 2)
    detections = Detections(rows[:, :2], rows[:, 2], np.zeros(len(rows), np.int64))
    return FieldEvidence(f"{case}/field", case, positions, np.zeros(len(positions), np.int64), detections, 30)


def mixed(
    truth: list[tuple[float, float, int]], found: list[tuple[float, float, float, int]], case: str = "1"
) -> FieldEvidence:
    """The same with a class at the end of each."""
    real, seen = np.array(truth, float).reshape(-1, 3), np.array(found, float).reshape(-1, 4)
    detections = Detections(seen[:, :2], seen[:, 2], seen[:, 3].astype(np.int64))
    return FieldEvidence(f"{case}/field", case, real[:, :2], real[:, 2].astype(np.int64), detections, 30)


# One class


@pytest.mark.parametrize("place", [(100, 100), (103.5, 99.5), (97, 106), (51.3, 260.9), (160, 161.7)])
def test_peaks_are_found_between_the_positions_of_the_map(place: tuple[float, float]) -> None:
    found = MITOSIS.decode(bumps((*place, 0.9)))
    assert found.positions.shape == (1, 2)
    assert found.positions[0] == pytest.approx(place, abs=1)
    assert 0.4 < found.scores[0] < 0.9, "smoothing lowers a peak"


@pytest.mark.parametrize("place", [(0, 0), (2, 200), (318, 318), (319, 100)])
def test_peaks_at_the_rim_are_found(place: tuple[float, float]) -> None:
    found = MITOSIS.decode(bumps((*place, 0.9)))
    assert len(found.positions) == 1
    assert found.positions[0] == pytest.approx(place, abs=5)


def test_peaks_apart_are_two_and_peaks_close_together_one() -> None:
    apart = MITOSIS.decode(bumps((100, 100, 0.6), (100, 148, 0.9)))
    assert len(apart.scores) == 2
    assert apart.positions[0] == pytest.approx((100, 148), abs=1.5), "the highest first"
    close = MITOSIS.decode(bumps((100, 100, 0.6), (100, 126, 0.9), radius_px=4))
    assert len(close.scores) == 1
    assert close.positions[0] == pytest.approx((100, 126), abs=2), "the highest one stays"


def test_a_plateau_is_one_candidate_in_its_middle() -> None:
    values = np.zeros((1, 40, 40), np.float32)
    values[0, 10:21, 5:16] = 1  # after smoothing still flat in the middle
    found = MITOSIS.decode(Prediction(values, 8, (3.5, 3.5)))
    assert found.positions.tolist() == [[3.5 + 15 * 8, 3.5 + 10 * 8]]
    assert found.scores[0] == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.005, 0.7, 1.0])
def test_a_flat_map_has_no_candidates(value: float) -> None:
    found = MITOSIS.decode(Prediction(np.full((1, 9, 7), value, np.float32), 8, (3.5, 3.5)))
    assert found.positions.shape == (0, 2)
    assert found.scores.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2)])
def test_maps_of_very_small_images_are_decoded(shape: tuple[int, int]) -> None:
    values = np.linspace(0.1, 0.9, shape[0] * shape[1], dtype=np.float32).reshape(1, *shape)
    assert len(MITOSIS.decode(Prediction(values, 8, (3.5, 3.5))).scores) <= 1


def test_a_point_leaves_out_what_is_below_it() -> None:
    prediction = bumps((100, 100, 0.4), (100, 200, 0.9))
    scores = MITOSIS.decode(prediction).scores
    assert len(scores) == 2
    assert MITOSIS.decode(prediction, {"threshold": float(scores.mean())}).scores.tolist() == [scores[0]]
    assert len(MITOSIS.decode(prediction, {"threshold": float(scores[1])}).scores) == 2, (
        "a score at the threshold counts"
    )


def test_examine_reads_the_positions_at_the_models_spacing(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(160, 160))
    points = write_text(tmp_path / "a.csv", "49.5,99.5\n")
    sample = Sample(image, "a.png", "7", "test", 0.5, annotations=(points,))
    found = MITOSIS.examine(bumps((99.5, 199.5, 0.9)), sample)
    assert (found.name, found.case, found.radius_px) == ("a.png", "7", 30)
    assert found.truth.tolist() == [[99.5, 199.5]]
    assert MITOSIS.score([found], {"threshold": 0.3})["f1"] == 1
    empty = MITOSIS.examine(bumps(), Sample(image, "a.png", "7", "test", 0.5))
    assert MITOSIS.score([empty], {"threshold": 0.3})["f1"] == 1, "nothing there, nothing found"


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
    assert MITOSIS.tally(scores) == {"1": (2, 5), "2": (0, 1)}
    one_to_one = MITOSIS.score(evidence, {"threshold": 0.5}, rule="one-to-one")
    assert [one_to_one[key] for key in ("rule", "hits", "false", "missed")] == ["one-to-one", 1, 3, 2]
    assert scores["f1_interval"] is None, "two cases cannot tell"
    json.dumps(scores, allow_nan=False)


def test_the_interval_of_f1_redraws_cases() -> None:
    """Three cases with a hit and three with a false detection: of h hits among six draws, F1 is 2h / (6 + h)."""
    hits = [field([(50, 50)], [(50, 50, 0.9)], case) for case in "abc"]
    evidence = hits + [field([], [(10, 10, 0.95)], case) for case in "def"]
    scores = MITOSIS.score(evidence, {"threshold": 0.5})
    assert scores["f1"] == pytest.approx(6 / 9)
    assert scores["f1_interval"] == [pytest.approx(2 / 7), pytest.approx(10 / 11)], "one, or five, of six"
    fewer = MITOSIS.score(evidence[1:-1], {"threshold": 0.5})
    assert fewer["f1_interval"] is None, "four cases cannot tell"


def test_froc_rises_and_is_thin() -> None:
    generator = np.random.default_rng(0)
    fields = []
    for number in range(10):
        truth = [(100.0 * i, 1000.0 * number) for i in range(60)]
        found = [(*place, score) for place, score in zip(truth, generator.random(60), strict=True)]
        found += [(100.0 * i + 50, 500.0, score) for i, score in enumerate(generator.random(90) * 0.8)]
        fields.append(field(truth, found, str(number)))
    froc = MITOSIS.score(fields, {"threshold": 0.5})["froc"]
    assert isinstance(froc, list)
    assert len(froc) == FROC_POINTS
    false, found_share = ([point[key] for point in froc] for key in ("false_per_image", "sensitivity"))
    assert false == sorted(false)
    assert found_share == sorted(found_share)
    assert froc[0]["sensitivity"] == pytest.approx(1 / 600)
    assert (false[-1], found_share[-1]) == (90, 1)
    for point in froc[::40]:
        at = MITOSIS.score(fields, {"threshold": point["threshold"]})
        assert point["sensitivity"] == at["recall"]
        assert point["false_per_image"] * 10 == pytest.approx(at["false"])


numbers = st.integers(1, 19).map(lambda i: i / 20)
fields = st.lists(
    st.tuples(st.lists(numbers, max_size=4), st.lists(numbers, max_size=4), st.integers(0, 2)), min_size=1, max_size=4
)


@settings(deadline=None, max_examples=50)
@given(fields)
def test_no_threshold_beats_the_chosen_point(drawn: list[tuple[list[float], list[float], int]]) -> None:
    """Fields of mitoses that are found with some score, false detections, and mitoses that nobody finds."""
    evidence = []
    for found, false, missed in drawn:
        truth = [(100.0 * i, 0.0) for i in range(len(found) + missed)]
        seen = [(100.0 * i, 5.0, score) for i, score in enumerate(found)]
        seen += [(100.0 * i, 900.0, score) for i, score in enumerate(false)]
        evidence.append(field(truth, seen))
    for rule in ("amida13", "one-to-one"):
        best = MITOSIS.score(evidence, MITOSIS.choose_point(evidence, rule), rule)
        if not any(len(each.truth) for each in evidence):
            continue  # nothing to find, and no threshold that would be any better for what is to come
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
def test_degenerate_fields_have_scores(evidence: list[FieldEvidence]) -> None:
    scores = MITOSIS.score(evidence, MITOSIS.choose_point(evidence))
    json.dumps(scores, allow_nan=False)
    assert scores["f1"] in (0, 1)
    assert scores["f1_interval"] == (None if len(evidence) < 5 else [1, 1]), "a few cases cannot tell"


def test_no_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="no fields"):
        MITOSIS.score([], {"threshold": 0.5})


def test_loss_is_the_cross_entropy() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5]).view(3, 1, 1, 1)
    labels = torch.tensor([1, 0, 0])
    right = torch.stack(
        [logits[0, 0, 0, 0].sigmoid(), (-logits[1, 0, 0, 0]).sigmoid(), (-logits[2, 0, 0, 0]).sigmoid()]
    )
    assert MITOSIS.make_loss([])(logits, labels) == pytest.approx(-right.log().mean())
    with pytest.raises(ValueError, match=r"needs one answer"):
        MITOSIS.make_loss([])(torch.zeros(3, 1, 2, 2), labels)


@pytest.mark.parametrize("task", [MITOSIS, CELLS], ids=["one class", "two classes"])
def test_windows_in_which_a_network_answers_more_than_once_are_refused(task: Detect) -> None:
    task.check_frame(Frame(68, 8, 8))
    with pytest.raises(DataError, match="in windows of 84 px the network gives 3 × 3; set 'window_px' to the smallest"):
        task.check_frame(Frame(84, 24, 8))


def test_the_froc_of_a_few_matches_by_hand() -> None:
    """Found at 0.9 and 0.5, one never; false ones at 0.7 and 0.3, in two images."""
    points = _froc(Matches(np.array([0.9, 0.5, -np.inf]), np.array([0.7, 0.3])), images=2)
    assert [point["threshold"] for point in points] == [0.9, 0.5, 0.3]
    assert [point["false_per_image"] for point in points] == [0, 0.5, 1]
    assert [point["sensitivity"] for point in points] == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_only_detections_without_an_object_are_mined_the_surest_first() -> None:
    evidence = [
        field([(100, 100)], [(110, 100, 0.9), (300.4, 299.6, 0.7)], "1"),
        field([], [(10, 20, 0.8), (50, 50, 0.1)], "2"),
    ]
    mined = MITOSIS.mine(evidence, 2)
    assert [tuple(example) for example in mined] == [("2/field", 10, 20, 0.8), ("1/field", 300, 300, 0.7)]
    assert len(MITOSIS.mine(evidence, 9)) == 3


# Several classes


def test_every_class_has_peaks_of_its_own() -> None:
    found = CELLS.find_peaks(two_maps([(100, 100, 0.9)], [(100, 200, 0.7), (220, 60, 0.8)]))
    where = {(number, *position.round(-1)) for number, position in zip(found.classes, found.positions, strict=True)}
    assert where == {(MITOTIC, 100, 100), (LYMPHOCYTE, 100, 200), (LYMPHOCYTE, 220, 60)}
    assert len(found.scores) == 3, "and what is left for none of them has no peaks"


def test_a_network_gives_a_logit_for_each_class_and_one_for_none() -> None:
    assert (CELLS.outputs, CELLS.output_names) == (3, ("Mitosis", "Lymphocyte", "other"))
    assert (MITOSIS.outputs, MITOSIS.output_names) == (1, ("Mitosis",))
    assert CELLS.nothing == (0, 0, 1), "on glass it is none of them"
    maps = two_maps([(100, 100, 0.9)], [(100, 200, 0.7)]).probabilities
    assert np.array_equal(CELLS.class_maps(maps), maps[:2])
    assert CELLS.foreground(maps) == pytest.approx(1 - maps[2], abs=1e-6)


def test_every_class_has_a_threshold_of_its_own() -> None:
    prediction = two_maps([(100, 100, 0.9), (100, 220, 0.5)], [(220, 100, 0.9), (220, 220, 0.5)])
    candidates = CELLS.decode(prediction)
    assert sorted(candidates.classes.tolist()) == [MITOTIC, MITOTIC, LYMPHOCYTE, LYMPHOCYTE]
    middle = float(np.median(candidates.scores))
    strict = CELLS.decode(prediction, {"threshold Mitosis": middle, "threshold Lymphocyte": 0.05})
    assert sorted(strict.classes.tolist()) == [MITOTIC, LYMPHOCYTE, LYMPHOCYTE]
    other = CELLS.decode(prediction, {"threshold Mitosis": 0.05, "threshold Lymphocyte": middle})
    assert sorted(other.classes.tolist()) == [MITOTIC, MITOTIC, LYMPHOCYTE]


def test_of_two_classes_at_one_position_the_surer_one_wins() -> None:
    prediction = two_maps([(100, 100, 0.35), (220, 220, 0.6)], [(100, 108, 0.6), (220, 212, 0.35)])
    point = {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05}
    found = CELLS.decode(prediction, point)
    assert found.classes[np.argsort(found.positions[:, 0])].tolist() == [LYMPHOCYTE, MITOTIC]
    assert len(CELLS.decode(prediction).scores) == 4, "without a point every class keeps its candidates"
    sure = CELLS.decode(prediction, point | {"threshold Lymphocyte": 0.99})
    assert sure.classes.tolist() == [MITOTIC] * 2, "what does not reach its threshold wins nothing"


def test_candidates_of_two_classes_are_merged_within_7_5_um_and_no_further() -> None:
    positions = np.array([[100.0, 100.0], [100.0, 129.0], [100.0, 160.0]])
    found = CELLS.merge(Detections(positions, np.array([0.7, 0.9, 0.8]), np.array([0, 1, 0])))
    assert found.positions.tolist() == [[100, 129], [100, 160]]
    assert found.classes.tolist() == [1, 0]
    assert found.scores.tolist() == [0.9, 0.8], "the surest first"


# In the first field a mitosis is found, one is taken for a lymphocyte, and a lymphocyte is found; in the second, a
# detection of either class is false; in the third, a lymphocyte is missed.
FIELDS = (
    mixed(
        [(100, 100, MITOTIC), (300, 300, MITOTIC), (500, 500, LYMPHOCYTE)],
        [(105, 100, 0.9, MITOTIC), (300, 310, 0.7, LYMPHOCYTE), (500, 505, 0.8, LYMPHOCYTE)],
        "1",
    ),
    mixed([], [(50, 50, 0.6, MITOTIC), (400, 400, 0.65, LYMPHOCYTE)], "1"),
    mixed([(70, 70, LYMPHOCYTE)], [(70, 75, 0.3, LYMPHOCYTE)], "2"),
)
HALF = {"threshold Mitosis": 0.5, "threshold Lymphocyte": 0.5}


def test_f1_of_each_class_and_their_mean_by_hand() -> None:
    scores = CELLS.score(FIELDS, HALF)
    classes = scores["classes"]
    assert isinstance(classes, dict)
    counted = {name: tuple(each[key] for key in ("hits", "false", "missed")) for name, each in classes.items()}
    assert counted == {"Mitosis": (1, 1, 1), "Lymphocyte": (1, 2, 1)}
    assert classes["Mitosis"]["f1"] == pytest.approx(2 / 4)
    assert classes["Lymphocyte"]["f1"] == pytest.approx(2 / 5)
    assert classes["Lymphocyte"]["precision"] == pytest.approx(1 / 3)
    assert classes["Lymphocyte"]["recall"] == pytest.approx(1 / 2)
    assert scores["macro_f1"] == pytest.approx((2 / 4 + 2 / 5) / 2)
    assert [scores[key] for key in ("hits", "false", "missed")] == [2, 3, 2], "all classes together"
    assert scores["f1"] == pytest.approx(4 / 9)
    assert CELLS.tally(scores) == {"1": (4, 8), "2": (0, 1)}
    assert {key: scores[key] for key in HALF} == HALF
    assert "froc" not in scores
    # Of the two lymphocytes one is found at 0.8, before any is false, and one at 0.3, when two in three images are.
    froc = [
        (point["threshold"], point["false_per_image"], point["sensitivity"]) for point in classes["Lymphocyte"]["froc"]
    ]
    assert froc == [(0.8, 0, 0.5), (0.3, pytest.approx(2 / 3), 1)]
    json.dumps(scores, allow_nan=False)


def test_a_lower_threshold_of_one_class_changes_that_class_alone() -> None:
    classes = CELLS.score(FIELDS, HALF | {"threshold Lymphocyte": 0.2})["classes"]
    assert isinstance(classes, dict)
    counted = {name: tuple(each[key] for key in ("hits", "false", "missed")) for name, each in classes.items()}
    assert counted == {"Mitosis": (1, 1, 1), "Lymphocyte": (2, 2, 0)}


def test_an_object_that_two_classes_claim_counts_for_the_surer_one() -> None:
    """A mitosis at which a lymphocyte is seen too: one detection, right or wrong, and not one of each."""
    right = mixed([(100, 100, MITOTIC)], [(100, 100, 0.9, MITOTIC), (105, 100, 0.8, LYMPHOCYTE)])
    scores = CELLS.score([right], HALF)
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 0, 0]
    wrong = mixed([(100, 100, MITOTIC)], [(100, 100, 0.8, MITOTIC), (105, 100, 0.9, LYMPHOCYTE)])
    scores = CELLS.score([wrong], HALF)
    assert [scores[key] for key in ("hits", "false", "missed")] == [0, 1, 1]


def test_the_point_has_the_best_threshold_of_each_class() -> None:
    """Mitoses are told from others between 0.6 and 0.9, lymphocytes between 0.2 and 0.3."""
    evidence = [
        mixed(
            [(100, 100, MITOTIC), (300, 100, LYMPHOCYTE)],
            [
                (100, 100, 0.9, MITOTIC),
                (500, 100, 0.6, MITOTIC),
                (300, 100, 0.3, LYMPHOCYTE),
                (700, 1, 0.2, LYMPHOCYTE),
            ],
        )
    ]
    point = CELLS.choose_point(evidence)
    assert set(point) == {"threshold Mitosis", "threshold Lymphocyte"}
    assert 0.6 < point["threshold Mitosis"] <= 0.9
    assert 0.2 < point["threshold Lymphocyte"] <= 0.3
    assert CELLS.score(evidence, point)["f1"] == 1
    assert CELLS.check_point(point) == point
    with pytest.raises(ValueError, match="has threshold Mitosis, threshold Lymphocyte; got threshold"):
        CELLS.check_point({"threshold": 0.5})


places = st.tuples(st.integers(0, 2), st.integers(0, 2))  # 100 px apart
heights = st.integers(2, 9).map(lambda i: i / 20)


@settings(deadline=None, max_examples=40)
@given(st.dictionaries(places, heights), st.dictionaries(places, heights), st.sets(places), numbers, numbers)
def test_scores_count_what_is_found_at_the_point(
    mitoses: dict[tuple[int, int], float],
    lymphocytes: dict[tuple[int, int], float],
    truth: set[tuple[int, int]],
    first: float,
    second: float,
) -> None:
    """Cells of either class, or of both at once, at some of nine positions, where some of them really are."""
    drawn = [
        [(60.0 + 100 * row, 60.0 + 100 * column + shift, height) for (row, column), height in found.items()]
        for found, shift in ((mitoses, 0), (lymphocytes, 12))
    ]
    prediction = two_maps(*drawn)
    real = [(60.0 + 100 * row, 60.0 + 100 * column, (row + column) % 2) for row, column in sorted(truth)]
    evidence = mixed(real, [])
    evidence = FieldEvidence("f", "1", evidence.truth, evidence.truth_classes, CELLS.decode(prediction), 30)
    point = {"threshold Mitosis": first / 2, "threshold Lymphocyte": second / 2}
    scores = CELLS.score([evidence], point)
    found = CELLS.decode(prediction, point)
    called = {
        (*(np.array(position) // 100), number) for position, number in zip(found.positions, found.classes, strict=True)
    }
    there = {(row, column, (row + column) % 2) for row, column in truth}
    counted = [scores[key] for key in ("hits", "false", "missed")]
    assert counted == [len(called & there), len(called - there), len(there - called)]


def annotated(root: Path, text: str) -> Sample:
    image = write_image(root / "a.png", pixels(160, 160))
    return Sample(image, "a.png", "7", "test", 0.25, annotations=(write_text(root / "a.csv", text),))


def test_objects_of_a_class_that_the_task_does_not_have_are_background(tmp_path: Path) -> None:
    sample = annotated(tmp_path, "row,column,class\n10,120,lymphocyte\n80,80,stroma\n30,40,MITOSIS\n")
    positions, classes = CELLS.read_points(sample)
    assert positions.tolist() == [[10, 120], [30, 40]]
    assert classes.tolist() == [LYMPHOCYTE, MITOTIC], "in any case"
    seen = CELLS.examine(two_maps([(30, 40, 0.5), (80, 80, 0.5)], [(10, 120, 0.4)]), sample)
    scores = CELLS.score([seen], {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05})
    assert [scores[key] for key in ("hits", "false", "missed")] == [2, 1, 0], "what is seen at it is false"
    assert [(example.row, example.column) for example in CELLS.mine([seen], 9)] == [(80, 80)]


def test_a_task_of_one_class_takes_that_class_alone_if_classes_are_named(tmp_path: Path) -> None:
    sample = annotated(tmp_path, "row,column,class\n10,20,lymphocyte\n80,80,\n30,40,mitosis\n")
    typed = make_task("detect", Overrides(classes=("Mitosis",)))
    assert isinstance(typed, Detect)
    assert typed.read_points(sample)[0].tolist() == [[80, 80], [30, 40]], "that without a name is what is looked for"
    assert MITOSIS.read_points(sample)[0].tolist() == [[10, 20], [80, 80], [30, 40]], "the paper's task takes all"
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
    labels = torch.tensor([2, 0, 1, 2])  # the last one is none of them
    right = logits[:, :, 0, 0].log_softmax(dim=1)[torch.arange(4), labels]
    assert CELLS.make_loss([])(logits, labels) == pytest.approx(-right.mean())


# Other spacings


@pytest.mark.parametrize("spacing", [0.125, 0.5, 1.0])
def test_sizes_are_in_micrometres(spacing: float) -> None:
    """A field at another spacing is the same field: the same objects and scores, at positions in other pixels."""
    task = make_task("mitosis", Overrides(spacing_um_px=spacing))
    assert isinstance(task, Detect)
    factor = 0.25 / spacing
    assert task.hit_px == 30 * factor
    usual = bumps((100, 100, 0.6), (100, 126, 0.9), (220, 60, 0.5), radius_px=6)
    stride = round(8 * factor)
    there = task.decode(Prediction(usual.probabilities, stride, (0.0, 0.0)))
    here = MITOSIS.decode(Prediction(usual.probabilities, 8, (0.0, 0.0)))
    assert len(here.scores) == 2, "two of the three are one object"
    assert there.scores == pytest.approx(here.scores)
    assert there.positions == pytest.approx(here.positions * factor)
    assert task.halo(stride) == MITOSIS.halo(8)


def test_a_hit_is_within_7_5_um_at_any_spacing(tmp_path: Path) -> None:
    coarse = make_task("mitosis", Overrides(spacing_um_px=0.5))
    assert isinstance(coarse, Detect)
    image = write_image(tmp_path / "a.png", pixels(160, 160))
    points = write_text(tmp_path / "a.csv", "80,80\n")
    sample = Sample(image, "a.png", "7", "test", 0.5, annotations=(points,))
    for away, hits in ((13, 1), (17, 0)):
        seen = coarse.examine(
            Prediction(draw((160, 2 * (80 + away), 0.9)).astype(np.float32)[None], 4, (1.5, 1.5)), sample
        )
        assert seen.radius_px == 15
        assert seen.detections.positions[0] == pytest.approx((79.75, 79.75 + away), abs=0.5)
        assert coarse.score([seen], {"threshold": 0.1})["hits"] == hits


def test_scores_count_what_the_model_finds_also_in_a_chain_of_classes() -> None:
    """A surer mitosis hides a lymphocyte beside it, which then hides no other lymphocyte further away."""
    prediction = two_maps([(100, 100, 0.9)], [(100, 125, 0.8), (100, 150, 0.7)], radius_px=6)
    point = {"threshold Mitosis": 0.05, "threshold Lymphocyte": 0.05}
    found = CELLS.decode(prediction, point)
    assert np.allclose(found.positions, [[100, 100], [100, 150]], atol=2)
    truth = np.array([[100.0, 100.0], [100.0, 150.0]])
    evidence = FieldEvidence("field", "1", truth, np.array([MITOTIC, LYMPHOCYTE]), CELLS.decode(prediction), 30)
    scores = CELLS.score([evidence], point)
    assert (scores["hits"], scores["false"], scores["missed"]) == (2, 0, 0)
