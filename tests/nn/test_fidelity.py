"""Equivariance errors between multiples of 90°: small with faithful kernels and pools, larger with plain ones."""

from collections.abc import Callable
from functools import partial
from statistics import median

import pytest
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.metrics import smooth_images, untrained_errors

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # a sweep of numbers: tracing it would take minutes

ESCNN = 0.018  # error of two layers of steerable kernels of escnn
ESCNN_POOLED = 0.094  # with a pool between the layers


def two_layers(kernel: str, orientations: int = 8, *between: Callable[[], nn.Module]) -> nn.Module:
    lift = rp.nn.LiftConv2d(3, 4, 5, orientations, bias=False, kernel=kernel)
    conv = rp.nn.GroupConv2d(4, 4, 5, orientations, bias=False, kernel=kernel)
    return nn.Sequential(lift, *(build() for build in between), conv)


def error(build: Callable[[], nn.Module], angle: float) -> float:
    x: Tensor = smooth_images(count=2, size=64)
    return median(untrained_errors(build, x, angle, draws=5))


@pytest.mark.parametrize(("orientations", "angle"), [(8, 45), (12, 30), (16, 22.5)])
def test_two_layers_of_harmonic_kernels_are_as_faithful_as_steerable_ones(orientations: int, angle: float) -> None:
    assert error(partial(two_layers, "harmonic", orientations), angle) < ESCNN


def test_other_kernels_are_less_faithful() -> None:
    assert error(partial(two_layers, "bilinear"), 45) > 0.1
    assert ESCNN < error(partial(two_layers, "gaussian"), 45) < 0.1


def test_harmonic_kernels_rotated_in_the_wrong_direction_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    correct = group.rotation_map
    monkeypatch.setattr(group, "rotation_map", lambda *options: correct(*options)[[0, 7, 6, 5, 4, 3, 2, 1]])
    assert error(partial(two_layers, "harmonic"), 45) > 0.1


POOLS: dict[str, Callable[[], nn.Module]] = {
    "rms-blur": lambda: rp.nn.GroupAvgPool2d(2, blur=5, power=2),
    "max-blur": lambda: rp.nn.GroupMaxPool2d(2, blur=5),
    "max": lambda: rp.nn.GroupMaxPool2d(2),
}


def test_smooth_pools_have_a_third_of_the_error_of_steerable_kernels_with_a_plain_pool() -> None:
    errors = [error(partial(two_layers, "harmonic", 8, nn.ReLU, pool), 45) for pool in POOLS.values()]
    assert errors[0] < ESCNN_POOLED / 3
    assert errors == sorted(errors)


def test_smooth_pools_of_size_3_halve_the_error_of_plain_pools() -> None:
    plain, smooth = (
        error(partial(two_layers, "harmonic", 8, nn.ReLU, partial(build, 3, blur=blur)), 45)
        for build, blur in ((rp.nn.GroupMaxPool2d, 1), (partial(rp.nn.GroupAvgPool2d, power=2), 7))
    )
    assert smooth < plain / 2


def test_plain_pools_and_plain_kernels_are_less_faithful() -> None:
    assert error(partial(two_layers, "harmonic", 8, nn.ReLU, POOLS["max"]), 45) > ESCNN_POOLED / 3
    assert error(partial(two_layers, "bilinear", 8, nn.ReLU, POOLS["rms-blur"]), 45) > ESCNN_POOLED / 3


def test_bilinear_upsampling_is_more_faithful_than_nearest() -> None:
    nearest, bilinear = (
        error(partial(two_layers, "harmonic", 8, nn.ReLU, partial(rp.nn.GroupUpsample2d, 2, mode)), 45)
        for mode in ("nearest", "bilinear")
    )
    assert bilinear < 0.03
    assert bilinear < nearest / 2


def test_a_smooth_pool_with_a_stride_is_more_faithful_than_a_strided_convolution() -> None:
    x = smooth_images(2, 64, channels=32, blur_px=1.0).view(2, 4, 8, 64, 64)[..., :63, :63]

    def strided() -> nn.Module:
        return nn.Sequential(
            rp.nn.GroupConv2d(4, 4, 5, 8, stride=2, kernel="harmonic"), rp.nn.GroupConv2d(4, 4, 5, 8, kernel="harmonic")
        )

    def smooth() -> nn.Module:
        return nn.Sequential(
            rp.nn.GroupConv2d(4, 4, 5, 8, kernel="harmonic"),
            rp.nn.GroupAvgPool2d(1, stride=2, blur=5),
            rp.nn.GroupConv2d(4, 4, 5, 8, kernel="harmonic"),
        )

    errors = [median(untrained_errors(build, x, 45, draws=3)) for build in (strided, smooth)]
    assert errors[1] < errors[0] / 2


def test_the_faithful_preset_has_a_lower_error_at_45_degrees() -> None:
    x = smooth_images(8, 68)
    paper, faithful = (
        median(untrained_errors(partial(rp.models.mitosis, 8, preset=preset), x, 45, draws=5))
        for preset in ("paper", "faithful")
    )
    assert faithful < paper / 3
