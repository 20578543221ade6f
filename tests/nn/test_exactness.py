"""Every layer with every option is exactly equivariant to rotations; deliberately wrong layers are not."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_options import OPTIONS
from torch import Tensor, nn

import rotopath as rp
from rotopath import group

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
CASES = [(2, 180), (4, 90), (6, 180), (8, 90), (12, 90), (16, 90)]


def features(orientations: int, size: int = 12, channels: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, channels, orientations, size, size + 4, dtype=dtype)


def images(size: int = 12, channels: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, channels, size, size + 4, dtype=dtype)


CONVOLUTIONS = {
    "plain": {},
    "no bias": {"bias": False},
    "1x1": {"kernel_size": 1},
    "3x3": {"kernel_size": 3},
    "7x7": {"kernel_size": 7},
    "stride": {"kernel_size": 3, "stride": 3, "padding": 1, "size": 13},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"kernel_size": 3, "dilation": 2},
    "dilated same": {"dilation": 2, "padding": "same"},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "reflect": {"padding": 2, "padding_mode": "reflect"},
    "replicate": {"padding": 2, "padding_mode": "replicate"},
    "circular": {"padding": 2, "padding_mode": "circular"},
    "pool": {"kernel_size": 3, "padding": 1, "pool": 2},
    "pool of 4": {"padding": "same", "pool": 4},
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "batch norm": lambda: rp.nn.GroupBatchNorm2d(4),
    "group norm": lambda: rp.nn.GroupNorm2d(2, 4),
    "layer norm": lambda: rp.nn.GroupLayerNorm2d(4),
    "max pool": lambda: rp.nn.GroupMaxPool2d(2),
    "overlapping max pool": lambda: rp.nn.GroupMaxPool2d(2, stride=1),
    "padded max pool": lambda: rp.nn.GroupMaxPool2d(4, stride=2, padding=1),
    "blurred max pool": lambda: rp.nn.GroupMaxPool2d(2, blur=3),
    "padded, blurred max pool": lambda: rp.nn.GroupMaxPool2d(4, stride=2, padding=1, blur=5),
    "avg pool": lambda: rp.nn.GroupAvgPool2d(2),
    "blurred avg pool": lambda: rp.nn.GroupAvgPool2d(4, blur=7),
    "root mean square pool": lambda: rp.nn.GroupAvgPool2d(2, power=2),
    "blurred root mean square pool": lambda: rp.nn.GroupAvgPool2d(2, blur=3, power=2),
    "padded avg pool": lambda: rp.nn.GroupAvgPool2d(4, stride=2, padding=2),
    "nearest": lambda: rp.nn.GroupUpsample2d(2),
    "bilinear": lambda: rp.nn.GroupUpsample2d(3, mode="bilinear"),
    "group norm of each orientation": lambda: rp.nn.GroupNorm2d(2, 4, per_orientation=True),
    "layer norm of each orientation": lambda: rp.nn.GroupLayerNorm2d(4, per_orientation=True),
    "adaptive avg pool": lambda: rp.nn.GroupAdaptiveAvgPool2d(5),
    "adaptive max pool": lambda: rp.nn.GroupAdaptiveMaxPool2d(5),
    "filter": lambda: rp.nn.GroupFilter2d(torch.ones(3, 3), padding=1, pool=2),
    "channel scale": lambda: rp.nn.ChannelScale(4),
    "stochastic depth": lambda: rp.nn.StochasticDepth(0.5),
    "dropout": lambda: rp.nn.GroupDropout2d(0.5),
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "max": lambda: rp.nn.Project("max"),
    "mean": lambda: rp.nn.Project("mean"),
    "attention": lambda: rp.nn.Project("attention", 4),
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("orientations", "angle"), CASES)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("kernel", group.KERNELS)
def test_convolutions_are_equivariant(
    kernel: str, options: dict[str, object], orientations: int, angle: float, dtype: torch.dtype
) -> None:
    settings = {"kernel_size": 5, "orientations": orientations, "kernel": kernel, **options}
    size = settings.pop("size", 12)
    lift = rp.nn.LiftConv2d(4, 8, **settings, dtype=dtype)
    conv = rp.nn.GroupConv2d(4, 8, **settings, dtype=dtype)
    for layer, x in ((lift, images(size, dtype=dtype)), (conv, features(orientations, size, dtype=dtype))):
        if layer.stride > 1:
            x = x[..., :size]
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
        assert rp.equivariance_error(layer, x, angle) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(("orientations", "angle"), CASES)
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers_are_equivariant(
    build: Callable[[], nn.Module], orientations: int, angle: float, training: bool, dtype: torch.dtype
) -> None:
    layer = build().to(dtype).train(training)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert rp.equivariance_error(layer, features(orientations, dtype=dtype), angle) < TOLERANCE[dtype]


@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize("orientations", [4, 8])
@pytest.mark.parametrize("kernel", group.KERNELS)
def test_transposed_convolutions_and_even_kernels_are_equivariant(
    kernel: str, orientations: int, reflections: bool
) -> None:
    settings = {"orientations": orientations, "kernel": kernel, "reflections": reflections, "dtype": torch.float64}
    x = features(2 * orientations if reflections else orientations)
    layers = [
        rp.nn.GroupConvTranspose2d(4, 2, 3, stride=2, padding=1, groups=2, **settings),
        rp.nn.GroupConvTranspose2d(4, 2, 5, dilation=2, bias=False, **settings),
    ]
    if kernel != "harmonic":
        layers += [
            rp.nn.GroupConvTranspose2d(4, 2, 2, stride=2, **settings),
            rp.nn.GroupConv2d(4, 2, 2, stride=2, **settings),
            rp.nn.GroupConv2d(4, 2, 4, padding=2, **settings),
        ]
    for layer in layers:
        assert rp.equivariance_error(layer, x) < 1e-10
        if reflections:
            assert rp.equivariance_error(layer, x, 0, flip=True) < 1e-10


@given(
    orientations=st.sampled_from([4, 8, 12]),
    kernel_size=st.sampled_from([1, 3, 5, 7]),
    height=st.integers(5, 16),
    width=st.integers(5, 16),
    **OPTIONS,
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_input_that_a_convolution_accepts_is_exact(height: int, width: int, **options: object) -> None:
    conv = rp.nn.GroupConv2d(4, 4, **options, dtype=torch.float64)
    x = torch.randn(1, 4, options["orientations"], height, width, dtype=torch.float64)
    try:
        conv(x)
    except ValueError:
        assume(False)
    assert rp.equivariance_error(conv, x) < 1e-10


@given(
    build=st.sampled_from([rp.nn.GroupMaxPool2d, rp.nn.GroupAvgPool2d, partial(rp.nn.GroupAvgPool2d, power=2)]),
    kernel_size=st.integers(1, 4),
    blur=st.sampled_from([1, 3, 5, 7]),
    stride=st.integers(1, 4),
    padding=st.integers(0, 2),
    height=st.integers(4, 14),
    width=st.integers(4, 14),
)
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_input_that_a_pool_accepts_is_exact(
    build: Callable[..., nn.Module],
    kernel_size: int,
    stride: int,
    padding: int,
    blur: int,
    height: int,
    width: int,
) -> None:
    assume(padding <= kernel_size // 2)
    pool = build(kernel_size, stride, padding, blur=blur)
    x = torch.randn(1, 2, 4, height, width, dtype=torch.float64)
    try:
        pool(x)
    except ValueError:
        assume(False)
    assert rp.equivariance_error(pool, x) < 1e-10


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_stack_of_layers_is_exact(training: bool) -> None:
    stack = nn.Sequential(
        rp.nn.LiftConv2d(3, 6, 5, 8),
        rp.nn.GroupBatchNorm2d(6),
        nn.ReLU(),
        rp.nn.GroupMaxPool2d(2),
        rp.nn.GroupDropout2d(0.3),
        rp.nn.GroupConv2d(6, 6, 3, 8, padding="same", groups=3),
        rp.nn.GroupLayerNorm2d(6),
        nn.SiLU(),
        rp.nn.GroupUpsample2d(2, mode="bilinear"),
        rp.nn.GroupConv2d(6, 2, 1, 8),
        rp.nn.Project("max"),
    ).double()
    assert rp.equivariance_error(stack.train(training), torch.randn(2, 3, 24, 28).double()) < 1e-10


# Negative controls: errors must be detected.


def test_a_plain_cnn_fails() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 5), nn.ReLU(), nn.Conv2d(4, 2, 5)).double()
    assert rp.equivariance_error(plain, images(channels=3)) > 0.1


def test_a_single_orientation_fails() -> None:
    net = nn.Sequential(rp.nn.LiftConv2d(3, 4, 5, 1), rp.nn.Project("max")).double()
    assert rp.equivariance_error(net, images(channels=3)) > 0.1


def replace_shift(monkeypatch: pytest.MonkeyPatch, shift: Callable[..., Tensor]) -> None:
    monkeypatch.setattr(group.kernel_families, "orientation_shift", shift)
    without_cache = group.kernel_families._slices_by_orientation.__wrapped__
    monkeypatch.setattr(group.kernel_families, "_slices_by_orientation", without_cache)
    monkeypatch.setattr(group.kernel_families, "MAX_TWISTED", 0)  # `_twist` contains the shift as strides


def test_a_group_convolution_without_shift_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    conv = rp.nn.GroupConv2d(4, 4, 5, 8, dtype=torch.float64)
    replace_shift(monkeypatch, lambda n, *_: torch.arange(n).expand(n, n))
    assert rp.equivariance_error(conv, features(8)) > 0.1


def test_a_shift_in_the_wrong_direction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices that shift against the rotation: (j + i) instead of (j - i)."""
    conv = rp.nn.GroupConv2d(4, 4, 5, 8, dtype=torch.float64)
    correct = group.orientation_shift
    replace_shift(monkeypatch, lambda n, *_: correct(n).flip(0).roll(1, 0))
    assert rp.equivariance_error(conv, features(8)) > 0.1


@pytest.mark.parametrize("kernel", group.KERNELS)
def test_kernels_rotated_in_the_wrong_direction_fail(kernel: str) -> None:
    for layer, x in (
        (rp.nn.LiftConv2d(4, 4, 5, 8, kernel=kernel, dtype=torch.float64), images()),
        (rp.nn.GroupConv2d(4, 4, 5, 8, kernel=kernel, dtype=torch.float64), features(8)),
    ):
        layer.rotation = layer.rotation[[0, 7, 6, 5, 4, 3, 2, 1]]
        assert rp.equivariance_error(layer, x) > 0.1


def test_a_pool_that_drops_a_row_fails() -> None:
    def pool(x: Tensor) -> Tensor:
        return nn.functional.max_pool3d(x, (1, 2, 2))

    assert rp.equivariance_error(pool, features(8, size=12)) < 1e-10
    assert rp.equivariance_error(pool, features(8, size=13)) > 0.1
