"""With reflections, every layer is exactly equivariant to flips and rotations; deliberately wrong layers are not."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from layer_options import OPTIONS
from test_exactness import CONVOLUTIONS, LAYERS, TOLERANCE, images, replace_shift
from torch import Tensor, nn

import rotopath as rp
from rotopath import group

CASES = [(1, 0), (2, 180), (3, 0), (4, 90), (8, 90)]
every_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def features(orientations: int, size: int = 12, channels: int = 4, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(2, channels, 2 * orientations, size, size + 4, dtype=dtype)


def errors(model: Callable[[Tensor], Tensor], x: Tensor, angle: float, reflections: bool | None = None) -> list[float]:
    """Return the equivariance errors for rotations by 0° and ± the angle, with and without a flip."""
    angles = {0.0, angle, -angle}
    return [rp.equivariance_error(model, x, a, flip, reflections) for flip in (True, False) for a in angles]


@every_dtype
@pytest.mark.parametrize(("orientations", "angle"), CASES)
@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
@pytest.mark.parametrize("kernel", group.KERNELS)
def test_convolutions_are_equivariant(
    kernel: str, options: dict[str, object], orientations: int, angle: float, dtype: torch.dtype
) -> None:
    settings = {"kernel_size": 5, "orientations": orientations, "kernel": kernel, "reflections": True, **options}
    size = settings.pop("size", 12)
    lift = rp.nn.LiftConv2d(4, 4, **settings, dtype=dtype)
    conv = rp.nn.GroupConv2d(4, 4, **settings, dtype=dtype)
    for layer, x in ((lift, images(size, dtype=dtype)), (conv, features(orientations, size, dtype=dtype))):
        if layer.stride > 1:
            x = x[..., :size]
        if layer.bias is not None:
            nn.init.normal_(layer.bias)
        assert max(errors(layer, x, angle)) < TOLERANCE[dtype]


@every_dtype
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("build", LAYERS.values(), ids=LAYERS)
def test_layers_are_equivariant(build: Callable[[], nn.Module], training: bool, dtype: torch.dtype) -> None:
    layer = build().to(dtype).train(training)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for orientations, angle in ((1, 0), (4, 90), (8, 90)):
        assert max(errors(layer, features(orientations, dtype=dtype), angle, True)) < TOLERANCE[dtype]


@given(
    orientations=st.sampled_from([1, 2, 4, 8]),
    kernel_size=st.sampled_from([1, 3, 5]),
    height=st.integers(5, 14),
    width=st.integers(5, 14),
    **OPTIONS,
)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])
def test_every_input_that_a_convolution_accepts_is_exact(height: int, width: int, **options: object) -> None:
    conv = rp.nn.GroupConv2d(4, 4, **options, reflections=True, dtype=torch.float64)
    x = torch.randn(1, 4, conv.order, height, width, dtype=torch.float64)
    try:
        conv(x)
    except ValueError:
        assume(False)
    angle = {1: 0, 2: 180}.get(conv.orientations, 90)
    assert max(errors(conv, x, angle)) < 1e-10


def test_group_convolution_follows_the_definition() -> None:
    """Σ_c Σ_h of ordinary correlations of input h with slice g⁻¹h, rotated and mirrored by g."""
    n = 4
    conv = rp.nn.GroupConv2d(2, 3, 3, n, reflections=True, dtype=torch.float64)
    x = torch.randn(2, 2, 2 * n, 7, 9, dtype=torch.float64)
    base = conv.weight.detach().view(3, 2, 2 * n, 3, 3)
    y = conv(x)
    for g in range(2 * n):
        expected = torch.zeros(2, 3, 5, 7, dtype=torch.float64)
        for h in range(2 * n):
            # g⁻¹h, computed by hand: the inverse of Rᵢ is R₋ᵢ, and RᵢM is its own inverse.
            rotation, mirrored = (h % n - g % n) % n, (h >= n) != (g >= n)
            rotation = -rotation % n if g >= n else rotation
            kernel = base[:, :, rotation + n * mirrored]
            kernel = torch.rot90(kernel.flip(-1) if g >= n else kernel, g % n, (-2, -1))
            expected += F.conv2d(x[:, :, h], kernel)
        torch.testing.assert_close(y[:, :, g], expected)


def test_without_the_mirrored_half_it_equals_the_convolution_without_reflections() -> None:
    mirrored = rp.nn.GroupConv2d(2, 3, 5, 8, reflections=True, dtype=torch.float64)
    rotated = rp.nn.GroupConv2d(2, 3, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        mirrored.weight[:, :, 8:] = 0
        rotated.weight.copy_(mirrored.weight[:, :, :8])
    x = features(8, channels=2)
    torch.testing.assert_close(mirrored(x)[:, :, :8], rotated(x[:, :, :8]))


# Negative controls: errors must be detected.


def test_networks_without_reflections_are_not_equivariant_to_flips() -> None:
    stack = nn.Sequential(rp.nn.LiftConv2d(3, 4, 5, 8), nn.ReLU(), rp.nn.Project("max")).double()
    x = images(channels=3)
    assert rp.equivariance_error(stack, x) < 1e-10
    assert rp.equivariance_error(stack, x, 0, flip=True) > 0.1
    with pytest.raises(ValueError, match="Features without reflections cannot be flipped"):
        rp.equivariance_error(stack[0], x, flip=True)


def test_a_shift_that_ignores_the_mirrored_direction_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mirrored outputs that select their slices like the others."""
    conv = rp.nn.GroupConv2d(4, 4, 5, 4, reflections=True, dtype=torch.float64)
    entries = torch.arange(8)
    rotation, mirrored = entries % 4, entries // 4
    shift = (rotation[None, :] - rotation[:, None]) % 4 + 4 * (mirrored[None, :] ^ mirrored[:, None])
    replace_shift(monkeypatch, lambda *_: shift)
    assert rp.equivariance_error(conv, features(4)) < 1e-10, "rotations by 90° do not reveal it"
    assert rp.equivariance_error(conv, features(4), 0, flip=True) > 0.1


def test_kernels_that_are_not_mirrored_fail() -> None:
    for layer, x in (
        (rp.nn.LiftConv2d(4, 4, 5, 8, reflections=True, dtype=torch.float64), images()),
        (rp.nn.GroupConv2d(4, 4, 5, 8, reflections=True, dtype=torch.float64), features(8)),
    ):
        layer.rotation = torch.cat([layer.rotation[:8], layer.rotation[:8]])
        assert rp.equivariance_error(layer, x, 0, flip=True) > 0.1


def test_reflections_are_not_treated_as_twice_the_rotations() -> None:
    """Of sixteen entries, the eight mirrored ones shift separately."""
    lift = rp.nn.LiftConv2d(4, 4, 5, 8, reflections=True, dtype=torch.float64)
    assert rp.equivariance_error(lift, images()) < 1e-10
    assert rp.equivariance_error(lift, images(), reflections=False) > 0.1


# Shapes, messages, gradients, freezing.


def test_the_orientation_axis_has_twice_the_entries() -> None:
    lift, conv = rp.nn.LiftConv2d(3, 4, 5, 8, reflections=True), rp.nn.GroupConv2d(4, 2, 3, 8, reflections=True)
    y = conv(lift(torch.zeros(1, 3, 12, 12)))
    assert y.shape == (1, 2, 16, 6, 6)
    assert "orientations=8, reflections=True" in repr(conv)
    assert (conv.orientations, conv.order, conv.weight.shape) == (8, 16, (2, 4, 16, 9))
    with pytest.raises(ValueError, match=r"was built for 16 orientations \(including reflections\), but got 8"):
        conv(torch.zeros(1, 4, 8, 9, 9))
    with pytest.raises(ValueError, match=r"'reflections' of .* must be False or True; got 'no'"):
        rp.nn.LiftConv2d(3, 4, 5, 8, reflections="no")


def test_activations_keep_their_variance() -> None:
    x = rp.metrics.smooth_images(count=4, size=24)
    stack = nn.Sequential(*(rp.nn.GroupConv2d(16, 16, 5, 4, padding="same", reflections=True) for _ in range(3)))
    with torch.no_grad():
        y = rp.nn.LiftConv2d(3, 16, 5, 4, padding="same", reflections=True)(x).relu()
        for layer in stack:
            before, y = y, layer(y).relu()
            assert 0.4 < float(y.square().mean() / before.square().mean()) < 2.5


def test_gradients_pass_gradcheck() -> None:
    conv = rp.nn.GroupConv2d(2, 2, 3, 2, reflections=True, dtype=torch.float64)
    x = torch.randn(1, 2, 4, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(conv, (x,))


def test_frozen_layers_have_the_same_outputs() -> None:
    stack = nn.Sequential(
        rp.nn.LiftConv2d(3, 6, 5, 4, reflections=True),
        rp.nn.GroupBatchNorm2d(6),
        nn.ReLU(),
        rp.nn.GroupMaxPool2d(2),
        rp.nn.GroupConv2d(6, 4, 3, 4, reflections=True),
        rp.nn.GroupLayerNorm2d(4),
        rp.nn.Project("max"),
        nn.Conv2d(4, 2, 1),
    ).double()
    x = images(24, channels=3)
    stack(x)  # updates the running statistics
    frozen = rp.freeze(stack)
    torch.testing.assert_close(frozen(x), stack.eval()(x))
    assert max(errors(frozen, x, 90)) < 1e-10
    features_only = rp.freeze(stack[3:6])  # freeze reads the length of the axis from the convolution
    torch.testing.assert_close(features_only(features(4, channels=6)[..., :12]).shape, torch.Size((2, 4, 8, 4, 4)))
