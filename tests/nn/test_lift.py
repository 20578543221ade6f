"""The kernels of lifting, batch norm, ReLU and pooling against the layers; interpreted on the CPU without a GPU."""

import copy

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, make_norm, use_kernels
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import triton

pytest.importorskip("triton")
from rotopath.nn.triton import batch_norm, lift, patches

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing interpreted kernels would take minutes

ROUNDING = 2e-6  # of values after batch norm in float32
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
if DEVICE.type == "cuda":  # Triton's interpreter cannot multiply matrices of bfloat16
    TOLERANCE[torch.bfloat16] = 3e-2


def make_images(shape: tuple[int, ...], seed: int, dtype: torch.dtype, channels_last: bool = False) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def make_kernels(columns: int, channels: int, side: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return kernels in float32, and the same rounded to `dtype`, in float64."""
    kernels = torch.randn(columns, channels, side, side, generator=torch.Generator().manual_seed(seed)) / side
    kernels = kernels.to(DEVICE)
    return kernels.requires_grad_(), kernels.detach().to(dtype).double().requires_grad_()


def apply_fused(x: Tensor, kernels: Tensor, norm: nn.BatchNorm3d, pool: nn.Module) -> Tensor:
    """Apply lifting, batch norm, ReLU and a pool by the Triton kernels, on any device."""
    pending = lift.PendingLift(x, kernels, len(kernels) // norm.num_features).normalize(norm)
    assert pending is not None
    y = pending.activate("relu").pool(pool)
    assert y is not None
    return y


def apply_layers(x: Tensor, kernels: Tensor, norm: nn.Module, pool: int) -> Tensor:
    lifted = nn.functional.conv2d(x.double(), kernels).unflatten(1, (norm.num_features, -1))
    return rp.nn.GroupMaxPool2d(pool)(norm(lifted).relu())


def has_near_tie(x: Tensor, kernels: Tensor, norm: nn.Module, pool: int) -> bool:
    """Return whether rounding to float32 can decide which value of a window is the maximum, or whether it is above 0.

    The gradient then goes to another patch, and cannot be compared.
    """
    lifted = nn.functional.conv2d(x.double(), kernels.detach()).unflatten(1, (norm.num_features, -1))
    values = rp.nn.finish(copy.deepcopy(norm)(lifted)).detach().flatten(0, 2)[:, None]
    windows = nn.functional.unfold(values, pool, stride=pool)  # (maps, values of a window, windows)
    first = windows.amax(dim=1)
    is_near = (windows >= first[:, None] - ROUNDING).sum(dim=1) > 1
    return bool((is_near & (first > 0)).any() or (first.abs() < ROUNDING).any())


def assert_close(actual: Tensor, expected: Tensor, tolerance: float) -> None:
    """Compare relative to the largest expected value."""
    scale = expected.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(actual.double() / scale, expected / scale, atol=tolerance, rtol=0)


@settings(deadline=None, max_examples=14)
@given(
    batch=st.integers(1, 3),
    in_channels=st.integers(1, 4),
    channels=st.integers(1, 20),
    n=st.sampled_from([1, 2, 3, 8]),
    side=st.sampled_from([1, 3, 5]),
    outputs=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    pool=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    channels_last=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_lift_norm_relu_pool_matches_the_layers(
    batch: int,
    in_channels: int,
    channels: int,
    n: int,
    side: int,
    outputs: tuple[int, int],
    pool: int,
    dtype: torch.dtype,
    channels_last: bool,
    seed: int,
) -> None:
    height, width = (size * pool + side - 1 for size in outputs)
    assume(batch * n * outputs[0] * outputs[1] * pool**2 >= 8)  # with fewer values, rounding changes the variance
    x = make_images((batch, in_channels, height, width), seed, dtype, channels_last)
    kernels, exact = make_kernels(channels * n, in_channels, side, seed, dtype)
    norm, reference = make_norm(channels), make_norm(channels, torch.float64)
    assume(not has_near_tie(x, exact, reference, pool))
    y, expected = apply_fused(x, kernels, norm, rp.nn.GroupMaxPool2d(pool)), apply_layers(x, exact, reference, pool)
    assert y.shape == expected.shape
    assert y.dtype == dtype
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y)
    y.backward(dy)
    expected.backward(dy.double())
    deviation = reference.running_var.sqrt().clamp(max=1).repeat_interleave(n).view(-1, 1, 1, 1)
    assert_close(kernels.grad * deviation, exact.grad * deviation, 1e-3)
    assert_close(norm.weight.grad, reference.weight.grad, 1e-3)
    assert_close(norm.bias.grad, reference.bias.grad, 1e-3)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        actual, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(actual, value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_several_programs_of_several_tiles_each(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last tiles are empty."""
    monkeypatch.setattr(batch_norm, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(patches, "MAX_SUM_PROGRAMS", 3)
    monkeypatch.setattr(patches, "LIFT_ROWS", 16)
    monkeypatch.setattr(patches, "POOL_ROWS", 16)
    monkeypatch.setattr(patches, "MOMENT_ROWS", 16)
    x = make_images((2, 3, 12, 14), 0, dtype)
    kernels, exact = make_kernels(17 * 8, 3, 5, 0, dtype)
    norm, reference = make_norm(17), make_norm(17, torch.float64)
    y, expected = apply_fused(x, kernels, norm, rp.nn.GroupMaxPool2d(2)), apply_layers(x, exact, reference, 2)
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy.double())
    assert_close(kernels.grad, exact.grad, 1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lifting_alone_is_a_convolution(dtype: torch.dtype) -> None:
    x = make_images((2, 3, 9, 12), 0, dtype)
    kernels, exact = make_kernels(40, 3, 5, 0, dtype)
    y, expected = lift.lift(x, kernels, 8), nn.functional.conv2d(x.double(), exact).unflatten(1, (5, 8))
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy.double())
    assert_close(kernels.grad, exact.grad, 1e-3)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_evaluation_uses_running_statistics(precision: torch.dtype) -> None:
    """A batch norm that was cast to bfloat16 is rounded itself, but the computation with it is not."""
    x = make_images((2, 3, 10, 12), 0, torch.float32)
    kernels, exact = make_kernels(24, 3, 3, 0, torch.float32)
    norm = make_norm(3).eval()
    norm.running_mean.copy_(torch.tensor([0.1, -0.2, 3.3]))
    norm.running_var.copy_(torch.tensor([0.5, 1.0, 0.01]))
    norm.to(precision)
    reference = copy.deepcopy(norm).double()
    with torch.no_grad():
        actual, expected = apply_fused(x, kernels, norm, rp.nn.GroupMaxPool2d(2)), apply_layers(x, exact, reference, 2)
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)


# Gradients of both sizes of pools are compared above, and those of networks with pools in `test_batch_norm.py`.
@pytest.mark.parametrize(("build", "training"), [(rp.models.nuclei, True), (rp.models.tumor, False)])
def test_networks_have_the_same_outputs_with_and_without_fusion(
    build: type[nn.Module], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        for rows in ("LIFT_ROWS", "POOL_ROWS", "MOMENT_ROWS"):  # large tiles are faster to interpret
            monkeypatch.setattr(patches, rows, 1024)
    calls = []
    real = lift.norm_relu_pool
    monkeypatch.setattr(lift, "norm_relu_pool", lambda *args: calls.append(args[-1]) or real(*args))

    def run(precision: torch.dtype = torch.float32) -> list[Tensor]:
        torch.manual_seed(0)
        net = build(orientations=2).to(DEVICE, precision).train(training)
        with torch.set_grad_enabled(training):
            y = net(torch.rand(1, 3, net.architecture.input_px, net.architecture.input_px).to(DEVICE, precision))
        if not training:
            return [y]
        (y * torch.randn(y.shape).to(y)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    precisions = torch.float64, torch.float32
    with rp.nn.disable_fusion():
        exact, separate = ([tensor.detach().double() for tensor in run(precision)] for precision in precisions)
    use_kernels(monkeypatch)
    monkeypatch.setattr(triton, "can_lift", lambda *_: True)  # in float32 too
    for actual, expected, rounded in zip(run(), exact, separate, strict=True):
        # The batch norms of a single image enlarge rounding errors, also those of separate layers.
        error = float((rounded - expected).abs().max() / expected.abs().max().clamp(min=1e-3))
        assert_close(actual, expected, max(1e-3, 2 * error))
    assert calls == [1 if build is rp.models.nuclei else 2], "side of the pool; the first stage of nuclei has none"


def test_lifting_can_be_followed_by_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    monkeypatch.setattr(triton, "can_lift", lambda *_: True)
    torch.manual_seed(0)
    layer, norm = rp.nn.LiftConv2d(3, 2, 3, 4, bias=False).to(DEVICE), make_norm(2)
    x = make_images((2, 3, 8, 8), 0, torch.float32)
    for rest in (lambda y: y + 1, lambda y: norm(y), lambda y: norm(y).sigmoid(), lambda y: norm(y) + norm(y).relu()):
        actual, weight = rest(layer(x)), layer.weight
        dy = torch.randn(actual.shape, device=DEVICE)
        (gradient,) = torch.autograd.grad(actual, weight, dy)
        with rp.nn.disable_fusion(), monkeypatch.context() as without:
            without.setattr(triton, "can_lift", lambda *_: False)
            expected = rest(layer(x))
        assert_close(actual, expected.double(), 1e-4)
        assert_close(gradient, torch.autograd.grad(expected, weight, dy)[0].double(), 1e-3)


def test_nan_reaches_the_output() -> None:
    x = make_images((2, 3, 8, 8), 0, torch.float32)
    x[0, 0, 0, 0] = torch.nan
    kernels, _ = make_kernels(8, 3, 3, 0, torch.float32)
    assert apply_fused(x, kernels, make_norm(2), rp.nn.GroupMaxPool2d(2)).isnan().all()


def test_the_kernel_refuses_what_it_does_not_support() -> None:
    def layer(*args: int, **options: object) -> rp.nn.LiftConv2d:
        return rp.nn.LiftConv2d(*args, **{"bias": False} | options).to(DEVICE, torch.bfloat16)

    x = make_images((1, 3, 12, 12), 0, torch.bfloat16)
    assert triton.can_lift(x, layer(3, 4, 5, 8))
    for others in (x.float(), x.clone().requires_grad_(), x[:0]):
        assert not triton.can_lift(others, layer(3, 4, 5, 8))
    for channel_stride, supported in ((2**29, True), (2**30, False)):  # as in a window of a large image
        strided = torch.empty_strided(x.shape, (0, channel_stride, 12, 1), dtype=x.dtype, device="meta")
        assert triton.can_lift(strided, layer(3, 4, 5, 8).to("meta")) == supported
    assert not triton.can_lift(x, layer(3, 4, 5, 8).float()), "torch raises an error for different data types"
    for other in (
        layer(3, 4, 5, 8, bias=True),
        layer(3, 4, 5, 8, padding=2),
        layer(3, 4, 5, 8, dilation=2),
        layer(3, 4, 7, 8),  # 147 taps
        layer(3, 6, 5, 8, groups=3),
    ):
        assert not triton.can_lift(x, other)
    assert not triton.can_run_on(x.cpu())


def test_tiles_of_taps_are_large_enough_for_tl_dot() -> None:
    """On a GPU, tl.dot requires 16 columns or more; Triton's interpreter does not check it."""
    splits = {3: (16, 0), 15: (16, 0), 16: (32, 0), 27: (32, 0), 36: (32, 16), 75: (64, 16), 100: (128, 0)}
    assert {taps: patches._split_taps(taps) for taps in splits} == splits
    for taps in range(1, triton.MAX_TAPS + 1):
        assert taps < sum(patches._split_taps(taps)) <= max(16, 2 * taps)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lifting_with_a_blurred_pool_matches_the_layers(dtype: torch.dtype, training: bool) -> None:
    x = make_images((2, 3, 14, 16), 0, dtype)
    kernels, exact = make_kernels(3 * 8, 3, 5, 0, dtype)
    norm, reference = make_norm(3).train(training), make_norm(3, torch.float64).train(training)
    pool = rp.nn.GroupAvgPool2d(2, blur=5, power=2).to(DEVICE, torch.float64)
    with torch.set_grad_enabled(training):
        y = apply_fused(x, kernels, norm, pool)
        lifted = nn.functional.conv2d(x.double(), exact).unflatten(1, (3, 8))
        expected = pool(reference(lifted).relu())
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if training:
        y.backward(dy := torch.randn_like(y))
        expected.backward(dy.double())
        for actual, value in (
            (kernels.grad, exact.grad),
            (norm.weight.grad, reference.weight.grad),
            (norm.bias.grad, reference.bias.grad),
            (norm.running_var, reference.running_var),
        ):
            assert_close(actual, value, max(1e-3, TOLERANCE[dtype]))
