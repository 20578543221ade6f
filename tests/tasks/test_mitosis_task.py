"""Mitosis: peaks and their places, the best threshold, and scores counted by hand."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import pixels, write_image, write_text

from rotopath.data.collection import Picture
from rotopath.evaluation.detection import Matches
from rotopath.tasks import Prediction, mitosis
from rotopath.tasks.mitosis import Detections, Evidence

NONE = Detections(np.empty((0, 2)), np.empty(0))


def bumps(*places: tuple[float, float, float], size: int = 40, radius_px: float = 10) -> Prediction:
    """A map of stride 8 with smooth peaks of given heights at given pixels."""
    rows, columns = np.mgrid[:size, :size] * 8 + 3.5
    values = np.zeros((size, size))
    for row, column, height in places:
        away = (rows - row) ** 2 + (columns - column) ** 2
        values = np.maximum(values, height * np.exp(-away / (2 * radius_px**2)))
    return Prediction(values[None].astype(np.float32), 8, (3.5, 3.5))


def field(truth: list[tuple[float, float]], found: list[tuple[float, float, float]], case: str = "1") -> Evidence:
    """`found` as rows, columns and scores."""
    rows = np.array(found, float).reshape(-1, 3)
    places = np.array(truth, float).reshape(-1, 2)
    return Evidence(f"{case}/field", case, places, Detections(rows[:, :2], rows[:, 2]), 30)


@pytest.mark.parametrize("place", [(100, 100), (103.5, 99.5), (97, 106), (51.3, 260.9), (160, 161.7)])
def test_peaks_are_found_between_the_places_of_the_map(place: tuple[float, float]) -> None:
    found = mitosis.decode(bumps((*place, 0.9)))
    assert found.places.shape == (1, 2)
    assert found.places[0] == pytest.approx(place, abs=1)
    assert 0.4 < found.scores[0] < 0.9, "smoothing lowers a peak"


@pytest.mark.parametrize("place", [(0, 0), (2, 200), (318, 318), (319, 100)])
def test_peaks_at_the_rim_are_found(place: tuple[float, float]) -> None:
    found = mitosis.decode(bumps((*place, 0.9)))
    assert len(found.places) == 1
    assert found.places[0] == pytest.approx(place, abs=5)


def test_peaks_apart_are_two_and_peaks_close_together_one() -> None:
    apart = mitosis.decode(bumps((100, 100, 0.6), (100, 148, 0.9)))
    assert len(apart.scores) == 2
    assert apart.places[0] == pytest.approx((100, 148), abs=1.5), "the highest first"
    close = mitosis.decode(bumps((100, 100, 0.6), (100, 126, 0.9), radius_px=4))
    assert len(close.scores) == 1
    assert close.places[0] == pytest.approx((100, 126), abs=2), "the highest one stays"


def test_a_plateau_is_one_candidate_in_its_middle() -> None:
    values = np.zeros((1, 40, 40), np.float32)
    values[0, 10:21, 5:16] = 1  # after smoothing still flat in the middle
    found = mitosis.decode(Prediction(values, 8, (3.5, 3.5)))
    assert found.places.tolist() == [[3.5 + 15 * 8, 3.5 + 10 * 8]]
    assert found.scores[0] == pytest.approx(1)


@pytest.mark.parametrize("value", [0.0, 0.005, 0.7, 1.0])
def test_a_flat_map_has_no_candidates(value: float) -> None:
    found = mitosis.decode(Prediction(np.full((1, 9, 7), value, np.float32), 8, (3.5, 3.5)))
    assert found.places.shape == (0, 2)
    assert found.scores.shape == (0,)


@pytest.mark.parametrize("shape", [(1, 1), (1, 9), (2, 2)])
def test_maps_of_very_small_images_are_decoded(shape: tuple[int, int]) -> None:
    values = np.linspace(0.1, 0.9, shape[0] * shape[1], dtype=np.float32).reshape(1, *shape)
    assert len(mitosis.decode(Prediction(values, 8, (3.5, 3.5))).scores) <= 1


def test_a_point_leaves_out_what_is_below_it() -> None:
    prediction = bumps((100, 100, 0.4), (100, 200, 0.9))
    scores = mitosis.decode(prediction).scores
    assert len(scores) == 2
    assert mitosis.decode(prediction, {"threshold": float(scores.mean())}).scores.tolist() == [scores[0]]
    assert len(mitosis.decode(prediction, {"threshold": float(scores[1])}).scores) == 2, (
        "a score at the threshold counts"
    )


def test_examine_reads_the_places_at_the_models_spacing(tmp_path: Path) -> None:
    image = write_image(tmp_path / "a.png", pixels(160, 160))
    points = write_text(tmp_path / "a.csv", "49.5,99.5\n")
    picture = Picture(image, "a.png", "7", "test", 0.5, annotations=(points,))
    found = mitosis.examine(bumps((99.5, 199.5, 0.9)), picture, 0.25)
    assert (found.name, found.case, found.radius_px) == ("a.png", "7", 30)
    assert found.truth.tolist() == [[99.5, 199.5]]
    assert mitosis.score([found], {"threshold": 0.3})["f1"] == 1
    empty = mitosis.examine(bumps(), Picture(image, "a.png", "7", "test", 0.5), 0.25)
    assert mitosis.score([empty], {"threshold": 0.3})["f1"] == 1, "nothing there, nothing found"


def test_scores_counted_by_hand() -> None:
    evidence = [
        field([(100, 100), (300, 300)], [(110, 100, 0.9), (100, 115, 0.7), (500, 500, 0.8)], "1"),
        field([(50, 50)], [(50, 50, 0.4)], "1"),
        field([], [(10, 10, 0.95)], "2"),
    ]
    scores = mitosis.score(evidence, {"threshold": 0.5})
    assert scores["rule"] == "amida13"
    assert [scores[key] for key in ("hits", "false", "missed")] == [1, 2, 2]
    assert scores["f1"] == pytest.approx(2 / 6)
    assert scores["precision"] == pytest.approx(1 / 3)
    assert scores["recall"] == pytest.approx(1 / 3)
    cases = scores["cases"]
    assert isinstance(cases, dict)
    assert cases["1"]["f1"] == pytest.approx(2 / 5)
    assert cases["2"] == {"f1": 0, "precision": 0, "recall": 0, "hits": 0, "false": 1, "missed": 0}
    assert mitosis.tally(scores) == {"1": (2, 5), "2": (0, 1)}
    one_to_one = mitosis.score(evidence, {"threshold": 0.5}, rule="one-to-one")
    assert [one_to_one[key] for key in ("rule", "hits", "false", "missed")] == ["one-to-one", 1, 3, 2]
    low, high = scores["f1_interval"]  # type: ignore[misc]
    assert (low, high) == (0, pytest.approx(2 / 5)), "of two cases either may be drawn twice"
    json.dumps(scores, allow_nan=False)


def test_froc_rises_and_is_thin() -> None:
    generator = np.random.default_rng(0)
    fields = []
    for number in range(10):
        truth = [(100.0 * i, 1000.0 * number) for i in range(60)]
        found = [(*place, score) for place, score in zip(truth, generator.random(60), strict=True)]
        found += [(100.0 * i + 50, 500.0, score) for i, score in enumerate(generator.random(90) * 0.8)]
        fields.append(field(truth, found, str(number)))
    froc = mitosis.score(fields, {"threshold": 0.5})["froc"]
    assert isinstance(froc, list)
    assert len(froc) == mitosis.FROC_POINTS
    false, found_share = ([point[key] for point in froc] for key in ("false_per_image", "sensitivity"))
    assert false == sorted(false)
    assert found_share == sorted(found_share)
    assert froc[0]["sensitivity"] == pytest.approx(1 / 600)
    assert (false[-1], found_share[-1]) == (90, 1)
    for point in froc[::40]:
        at = mitosis.score(fields, {"threshold": point["threshold"]})
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
        best = mitosis.score(evidence, mitosis.choose_point(evidence, rule), rule)  # type: ignore[arg-type]
        if not any(len(one.truth) for one in evidence):
            continue  # nothing to find, and no threshold that would be any better for what is to come
        grid = [mitosis.score(evidence, {"threshold": t}, rule)["f1"] for t in np.linspace(0, 0.95, 39)]  # type: ignore[arg-type]
        assert best["f1"] == pytest.approx(max(grid))  # type: ignore[type-var]


@pytest.mark.parametrize(
    "evidence",
    [
        [field([], [])],
        [field([(1, 1)], [])],
        [field([], [(1, 1, 0.9)])],
        [field([], [], "1"), field([], [], "2")],
        [field([(1, 1)], [(1, 1, 0.9)])],
    ],
)
def test_degenerate_fields_have_scores(evidence: list[Evidence]) -> None:
    scores = mitosis.score(evidence, mitosis.choose_point(evidence))
    json.dumps(scores, allow_nan=False)
    assert scores["f1"] in (0, 1)
    assert (scores["f1_interval"] is None) == (len(evidence) == 1), "one case cannot tell"


def test_no_fields_are_refused() -> None:
    with pytest.raises(ValueError, match="no fields"):
        mitosis.score([], {"threshold": 0.5})


def test_loss_is_the_cross_entropy() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5]).view(3, 1, 1, 1)
    labels = torch.tensor([1, 0, 0])
    right = torch.stack(
        [logits[0, 0, 0, 0].sigmoid(), (-logits[1, 0, 0, 0]).sigmoid(), (-logits[2, 0, 0, 0]).sigmoid()]
    )
    assert mitosis.loss(logits, labels) == pytest.approx(-right.log().mean())
    with pytest.raises(ValueError, match="one logit"):
        mitosis.loss(torch.zeros(3, 1, 2, 2), labels)


def test_the_froc_of_a_few_matches_by_hand() -> None:
    """Found at 0.9 and 0.5, one never; false ones at 0.7 and 0.3, in two images."""
    points = mitosis._froc(Matches(np.array([0.9, 0.5, -np.inf]), np.array([0.7, 0.3])), images=2)
    assert [point["threshold"] for point in points] == [0.9, 0.5, 0.3]
    assert [point["false_per_image"] for point in points] == [0, 0.5, 1]
    assert [point["sensitivity"] for point in points] == pytest.approx([1 / 3, 2 / 3, 2 / 3])
