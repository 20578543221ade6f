"""Robustness: known scatter, decisions that change, and the angles."""

import numpy as np
import pytest

from rotopath.metrics.equivariance import Robustness, list_angles, measure_robustness


def measure(probabilities: np.ndarray, threshold: float) -> Robustness:
    return measure_robustness(probabilities, probabilities >= threshold)


def test_known_answers() -> None:
    probabilities = np.array([[0.1, 0.4, 0.9], [0.1, 0.6, 0.7]])  # two angles, three inputs
    found = measure(probabilities, 0.5)
    assert found.deviation == pytest.approx((0 + 0.1 + 0.1) / 3)
    assert found.changed == pytest.approx(1 / 3)
    assert measure(probabilities, 0.8).changed == pytest.approx(1 / 3)
    assert measure(probabilities, 0.05).changed == 0


def test_a_prediction_at_the_threshold_counts_as_above() -> None:
    assert measure(np.array([[0.5], [0.9]]), 0.5).changed == 0
    assert measure(np.array([[0.5], [0.4]]), 0.5).changed == 1


def test_decisions_between_several_classes_change_when_the_class_does() -> None:
    """Whatever the numbers of the classes are: from the first to the last, and between those above the first."""
    probabilities = np.full((3, 4), 0.6)
    decisions = np.array([[0, 1, 2, 1], [0, 2, 2, 1], [2, 2, 2, 1]])
    assert measure_robustness(probabilities, decisions) == Robustness(deviation=0.0, changed=0.5)


def test_what_never_changes_is_perfect() -> None:
    still = np.repeat(np.random.default_rng(0).random((1, 50), np.float32), 16, axis=0)
    found = measure(still, 0.5)
    assert found.deviation == pytest.approx(0, abs=1e-7)
    assert found.changed == 0


def test_pixels_of_maps_count_like_inputs() -> None:
    maps = np.random.default_rng(0).random((4, 5, 6))
    assert measure(maps, 0.5) == measure(maps.reshape(4, -1), 0.5)


def test_fair_angles_lie_between_the_papers() -> None:
    paper, fair = list_angles(fair=False), list_angles()
    assert len(paper) == len(fair) == 16
    assert [angle for angle in paper if angle % 90 == 0] == [0, 90, 180, 270]
    assert not [angle for angle in fair if angle % 90 == 0]
    assert np.allclose(np.subtract(fair, paper), 11.25)
    assert np.allclose(np.diff(fair), 22.5)


@pytest.mark.parametrize("shape", [(3,), (0, 4), (4, 0)])
def test_nothing_to_compare_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(angles, inputs\)"):
        measure(np.zeros(shape), 0.5)


def test_every_probability_has_a_decision() -> None:
    with pytest.raises(ValueError, match=r"got shapes \(4, 3\) and \(4, 2\)"):
        measure_robustness(np.zeros((4, 3)), np.zeros((4, 2), bool))
