"""Bootstrap intervals: known answers."""

import numpy as np
import pytest

from rotopath.metrics.classification import auc, bootstrap_interval


def test_the_interval_of_a_mean_is_as_wide_as_theory_says() -> None:
    values = np.random.default_rng(1).normal(size=400)
    low, high = bootstrap_interval(lambda drawn: float(values[drawn].mean()), 400)
    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * values.std() / 20, rel=0.1)
    assert bootstrap_interval(lambda drawn: float(values[drawn].mean()), 400) == (low, high), "same seed"


def test_units_are_resampled_with_replacement() -> None:
    """Two patients of one value each: the mean is one of three values, and the interval spans them all."""
    values = np.array([0.0, 1.0])
    assert bootstrap_interval(lambda drawn: float(values[drawn].mean()), 2) == (0, 1)


def test_resamples_without_a_score_are_left_out() -> None:
    labels = np.array([0, 1])
    low, high = bootstrap_interval(lambda drawn: auc(labels[drawn], np.array([0.2, 0.8])[drawn]), 2)
    assert (low, high) == (1, 1)
