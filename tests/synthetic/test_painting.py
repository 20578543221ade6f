"""Tools for painting: noise of the right strength, directions without preference, points that keep their distance."""

import numpy as np
import pytest

from rotopath.synthetic.painting import drop_points_near, sample_directions, select_spaced, smooth_noise


@pytest.mark.parametrize("scale_px", [0.5, 1.0, 3.0, 17.3])
def test_smooth_noise_has_mean_0_and_standard_deviation_1(scale_px: float) -> None:
    noise = smooth_noise(np.random.default_rng(0), (500, 700), scale_px)
    assert noise.shape == (500, 700)
    assert noise.mean() == pytest.approx(0, abs=0.1)
    assert noise.std() == pytest.approx(1, abs=0.3)


def test_all_directions_are_equally_likely() -> None:
    directions = sample_directions(np.random.default_rng(0), 20_000)
    np.testing.assert_allclose(np.abs(directions), 1, rtol=1e-5)
    for harmonic in (1, 2, 4, 8):  # also no preference for the axes of the pixel grid
        assert abs((directions**harmonic).mean()) < 0.03


def test_points_near_others_are_dropped() -> None:
    points = np.array([0, 3, 6 + 1j], np.complex64)
    np.testing.assert_array_equal(drop_points_near(points, np.array([4j, 7], np.complex64), 4), [0, 3])
    np.testing.assert_array_equal(drop_points_near(points, points[:0], 4), points)


def test_selected_points_keep_their_distance_and_leave_no_gap() -> None:
    rng = np.random.default_rng(0)
    points = (rng.uniform(0, 50, 300) + 1j * rng.uniform(0, 50, 300)).astype(np.complex64)
    selected = points[select_spaced(points, 5)]
    distances = np.abs(selected[:, None] - selected) + 100 * np.eye(len(selected))
    assert distances.min() >= 5
    assert (np.abs(points[:, None] - selected).min(axis=1) < 5).all()  # no other point could be selected as well
