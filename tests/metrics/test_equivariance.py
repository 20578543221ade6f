"""Equivariance errors and robustness: known values, and models that are left unchanged."""

import copy
import math
from statistics import median

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath.metrics.equivariance import Robustness, measure_robustness, robustness_angles

# Equivariance


def test_known_equivariance_errors() -> None:
    x = torch.randn(2, 3, 8, 8)
    assert rp.equivariance_error(lambda x: 2 * x, x) == 0
    assert rp.equivariance_error(lambda x: x * 0, x) == 0
    ramp = torch.arange(8.0).view(1, 1, 1, 8)
    expected = (ramp - torch.rot90(ramp.expand(1, 1, 8, 8), 1, (-2, -1))).norm() / ramp.expand(1, 1, 8, 8).norm()
    assert rp.equivariance_error(lambda _: ramp.expand(1, 1, 8, 8), x) == pytest.approx(float(expected))


def test_the_error_is_infinite_if_the_expected_output_is_zero() -> None:
    calls = iter([torch.zeros(1, 1, 2, 2), torch.ones(1, 1, 2, 2)])
    assert rp.equivariance_error(lambda _: next(calls), torch.zeros(1, 1, 2, 2)) == math.inf


def test_off_the_pixel_grid_an_isotropic_filter_has_a_small_error_and_a_directed_one_a_large_one() -> None:
    y, x = torch.meshgrid(torch.arange(-6.0, 7), torch.arange(-6.0, 7), indexing="ij")
    round_kernel = torch.exp(-(x**2 + y**2) / 8)
    for angle in (45.0, 22.5, -30.0):
        for kernel, low, high in ((round_kernel, 0, 0.005), (round_kernel * x, 0.2, 3)):
            images = rp.metrics.smooth_images(2, 65, channels=1)
            error = rp.equivariance_error(lambda t, k=kernel: nn.functional.conv2d(t, k[None, None]), images, angle)
            assert low <= error < high


def test_more_orientations_have_a_smaller_error_off_the_pixel_grid() -> None:
    images = rp.metrics.smooth_images(4, 65)

    def error(orientations: int) -> float:
        def build() -> nn.Module:
            return nn.Sequential(rp.nn.LiftConv2d(3, 8, 5, orientations), nn.ReLU(), rp.nn.Project("mean"))

        return median(rp.metrics.untrained_errors(build, images, 22.5))

    assert error(16) < error(4) / 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_the_error_is_rounding_for_every_dtype(dtype: torch.dtype) -> None:
    layer = rp.nn.LiftConv2d(1, 2, 3, 4, dtype=dtype)
    error = rp.equivariance_error(layer, torch.randn(1, 1, 8, 8).to(dtype))
    assert error < 100 * torch.finfo(dtype).eps


def test_the_model_and_the_random_state_are_left_unchanged() -> None:
    net = nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 4), rp.nn.GroupBatchNorm2d(4), rp.nn.GroupDropout2d(0.5)).train()
    before = copy.deepcopy(net.state_dict())
    state = torch.get_rng_state()
    rp.equivariance_error(net, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name])


def test_outputs_without_positions_must_not_change() -> None:
    x = rp.metrics.smooth_images(2, 33).double()
    for angle in (90.0, 45.0):
        assert rp.equivariance_error(lambda x: x.square().mean((2, 3)), x, angle) < 1e-2
        assert rp.equivariance_error(lambda x: x[:, :, 8].mean(2), x, angle) > 0.1


def test_models_may_work_in_place_and_draw_random_numbers() -> None:
    x = torch.randn(1, 2, 8, 8)
    before = x.clone()
    assert rp.equivariance_error(lambda x: x.add_(1), x) < 1e-6
    assert torch.equal(x, before)
    assert rp.equivariance_error(rp.nn.GroupDropout2d(0.5), torch.randn(2, 8, 4, 6, 6)) == 0


def test_untrained_errors_set_the_mode_and_leave_the_random_state() -> None:
    def build() -> nn.Module:
        return nn.Sequential(rp.nn.LiftConv2d(1, 4, 3, 4), rp.nn.GroupDropout2d(0.99))

    state = torch.get_rng_state()
    x = rp.metrics.smooth_images(2, 16, channels=1)
    errors = rp.metrics.untrained_errors(build, x, draws=3)
    assert errors == sorted(errors) == rp.metrics.untrained_errors(build, x, draws=3)
    assert all(errors)
    assert rp.metrics.untrained_errors(build, x, draws=3, training=True) == [0, 0, 0]  # all channels dropped
    assert torch.equal(torch.get_rng_state(), state)


def test_unfit_inputs_and_outputs_are_refused() -> None:
    for wrong, got in ((torch.randn(2, 3), r"a tensor of shape \(2, 3\)"), (np.zeros((1, 3, 8, 8)), "ndarray")):
        with pytest.raises(ValueError, match=f"takes models whose input is images .* got {got}"):
            rp.equivariance_error(nn.Identity(), wrong)
    with pytest.raises(ValueError, match=r"in floating point; got a tensor of shape .* torch.uint8"):
        rp.equivariance_error(nn.Identity(), torch.zeros(1, 3, 8, 8, dtype=torch.uint8))
    with pytest.raises(ValueError, match="compares outputs of equal shape"):
        rp.equivariance_error(lambda x: x[..., :4], torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="got tuple"):
        rp.equivariance_error(lambda x: (x, x), torch.randn(2, 3, 8, 8))
    with pytest.raises(ValueError, match="steps of 90°, but got 45°"):
        rp.equivariance_error(rp.nn.LiftConv2d(1, 1, 3, 4), torch.randn(1, 1, 8, 8), 45)


def test_smooth_images_are_repeatable_and_of_unit_variance() -> None:
    images = rp.metrics.smooth_images(3, 32, seed=5)
    assert torch.equal(images, rp.metrics.smooth_images(3, 32, seed=5))
    assert not torch.equal(images, rp.metrics.smooth_images(3, 32, seed=6))
    assert images.shape == (3, 3, 32, 32)
    assert float(images.std()) == pytest.approx(1, rel=1e-3)

    def roughness(x: Tensor) -> float:
        return float((x[..., 1:] - x[..., :-1]).std())

    assert roughness(images) < 0.5 < roughness(torch.randn_like(images))


# Robustness of predictions


def measure(probabilities: np.ndarray, threshold: float) -> Robustness:
    return measure_robustness(probabilities, probabilities >= threshold)


def test_known_robustness() -> None:
    probabilities = np.array([[0.1, 0.4, 0.9], [0.1, 0.6, 0.7]])  # two angles, three inputs
    robustness = measure(probabilities, 0.5)
    assert robustness.deviation == pytest.approx((0 + 0.1 + 0.1) / 3)
    assert robustness.changed == pytest.approx(1 / 3)
    assert measure(probabilities, 0.8).changed == pytest.approx(1 / 3)
    assert measure(probabilities, 0.05).changed == 0


def test_a_probability_at_the_threshold_is_above_it() -> None:
    assert measure(np.array([[0.5], [0.9]]), 0.5).changed == 0
    assert measure(np.array([[0.5], [0.4]]), 0.5).changed == 1


def test_decisions_among_several_classes_change_with_the_class() -> None:
    """For all class numbers: from the first to the last, and among those above the first."""
    probabilities = np.full((3, 4), 0.6)
    decisions = np.array([[0, 1, 2, 1], [0, 2, 2, 1], [2, 2, 2, 1]])
    assert measure_robustness(probabilities, decisions) == Robustness(deviation=0.0, changed=0.5)


def test_predictions_that_never_change_have_no_deviation() -> None:
    still = np.repeat(np.random.default_rng(0).random((1, 50), np.float32), 16, axis=0)
    robustness = measure(still, 0.5)
    assert robustness.deviation == pytest.approx(0, abs=1e-7)
    assert robustness.changed == 0


def test_pixels_of_maps_count_as_inputs() -> None:
    maps = np.random.default_rng(0).random((4, 5, 6))
    assert measure(maps, 0.5) == measure(maps.reshape(4, -1), 0.5)


def test_fair_angles_are_halfway_between_those_of_the_paper() -> None:
    paper, fair = robustness_angles(fair=False), robustness_angles()
    assert len(paper) == len(fair) == 16
    assert [angle for angle in paper if angle % 90 == 0] == [0, 90, 180, 270]
    assert not [angle for angle in fair if angle % 90 == 0]
    assert np.allclose(np.subtract(fair, paper), 11.25)
    assert np.allclose(np.diff(fair), 22.5)


@pytest.mark.parametrize("shape", [(3,), (0, 4), (4, 0)])
def test_arrays_without_inputs_or_angles_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(angles, inputs\)"):
        measure(np.zeros(shape), 0.5)


def test_every_probability_needs_a_decision() -> None:
    with pytest.raises(ValueError, match=r"have the shape \(4, 3\) and the decisions \(4, 2\)"):
        measure_robustness(np.zeros((4, 3)), np.zeros((4, 2), bool))
