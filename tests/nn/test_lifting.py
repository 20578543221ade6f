"""Lifting, batch norm, ReLU and pooling in one pass, against the layers; interpreted where there is no GPU."""

import copy

import pytest
import torch
from for_kernels import DEVICE, norm_of
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import fuse, gpu
from rotopath.nn.triton import batch_norm

pytest.importorskip("triton")
from rotopath.nn.triton import lift, patches
from rotopath.nn.triton.blur_pool import Filter

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
if DEVICE.type == "cuda":  # Triton's interpreter multiplies no matrices of them
    TOLERANCE[torch.bfloat16] = 3e-2


def images(shape: tuple[int, ...], seed: int, dtype: torch.dtype, channels_last: bool = False) -> Tensor:
    x = torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    return x.to(memory_format=torch.channels_last) if channels_last else x


def kernels_of(columns: int, channels: int, side: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """In float32, and in float64 what they are in a lesser precision."""
    kernels = torch.randn(columns, channels, side, side, generator=torch.Generator().manual_seed(seed)) / side
    kernels = kernels.to(DEVICE)
    return kernels.requires_grad_(), kernels.detach().to(dtype).double().requires_grad_()


def one_after_another(x: Tensor, kernels: Tensor, norm: nn.Module, pool: int) -> Tensor:
    lifted = nn.functional.conv2d(x.double(), kernels).unflatten(1, (norm.num_features, -1))
    return rp.nn.GroupMaxPool2d(pool)(norm(lifted).relu())


def assert_close(got: Tensor, expected: Tensor, tolerance: float) -> None:
    scale = expected.abs().max().clamp(min=1e-3)
    torch.testing.assert_close(got.double() / scale, expected / scale, atol=tolerance, rtol=0)


@settings(deadline=None, max_examples=14)
@given(
    batch=st.integers(1, 3),
    read=st.integers(1, 4),
    channels=st.integers(1, 20),
    n=st.sampled_from([1, 2, 3, 8]),
    side=st.sampled_from([1, 3, 5]),
    outputs=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    pool=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    channels_last=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_one_pass_gives_what_the_layers_give(
    batch: int,
    read: int,
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
    assume(batch * n * outputs[0] * outputs[1] * pool**2 >= 8)  # of fewer values rounding changes the variance
    x = images((batch, read, height, width), seed, dtype, channels_last)
    kernels, exact = kernels_of(channels * n, read, side, seed, dtype)
    norm, reference = norm_of(channels), norm_of(channels, torch.float64)
    y, expected = lift.lift_norm_relu_pool(x, kernels, norm, pool), one_after_another(x, exact, reference, pool)
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
        got, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(got, value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_tiles_go_on_where_others_end(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several programs, of several tiles each, the last of which are empty."""
    monkeypatch.setattr(batch_norm, "PROGRAMS", 3)
    monkeypatch.setattr(patches, "SUMMING", 3)
    monkeypatch.setattr(patches, "OUTPUTS", 16)
    monkeypatch.setattr(patches, "WINDOWS", 16)
    monkeypatch.setattr(patches, "PATCHES", 16)
    x = images((2, 3, 18, 22), 0, dtype)
    kernels, exact = kernels_of(17 * 8, 3, 5, 0, dtype)
    norm, reference = norm_of(17), norm_of(17, torch.float64)
    y, expected = lift.lift_norm_relu_pool(x, kernels, norm, 2), one_after_another(x, exact, reference, 2)
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy.double())
    assert_close(kernels.grad, exact.grad, 1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_lifting_alone_is_a_convolution(dtype: torch.dtype) -> None:
    x = images((2, 3, 9, 12), 0, dtype)
    kernels, exact = kernels_of(40, 3, 5, 0, dtype)
    y, expected = lift.lift(x, kernels, 8), nn.functional.conv2d(x.double(), exact).unflatten(1, (5, 8))
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    y.backward(dy := torch.randn_like(y))
    expected.backward(dy.double())
    assert_close(kernels.grad, exact.grad, 1e-3)


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
def test_in_evaluation_running_statistics_count(precision: torch.dtype) -> None:
    """Also those of a network that was cast: they are as few digits have them, and what follows from them is not."""
    x = images((2, 3, 10, 12), 0, torch.float32)
    kernels, exact = kernels_of(24, 3, 3, 0, torch.float32)
    norm = norm_of(3).eval()
    norm.running_mean.copy_(torch.tensor([0.1, -0.2, 3.3]))
    norm.running_var.copy_(torch.tensor([0.5, 1.0, 0.01]))
    norm.to(precision)
    reference = copy.deepcopy(norm).double()
    with torch.no_grad():
        got, expected = lift.lift_norm_relu_pool(x, kernels, norm, 2), one_after_another(x, exact, reference, 2)
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("build", [rp.models.nuclei, rp.models.tumor])
@pytest.mark.parametrize("training", [True, False])
def test_networks_give_the_same_either_way(
    build: type[nn.Module], training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(fuse: bool) -> list[Tensor]:
        monkeypatch.setattr(fuse, "can_lift", lambda x, *_: fuse and x.ndim == 4)
        torch.manual_seed(0)
        net = build(orientations=2).to(DEVICE).train(training)
        y = net(torch.rand(1, 3, net.architecture.input_px, net.architecture.input_px, device=DEVICE))
        if not training:
            return [y.detach()]
        (y * torch.randn(y.shape, device=DEVICE)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    for got, expected in zip(answers(fuse=True), answers(fuse=False), strict=True):
        assert_close(got, expected.double(), 1e-3)


def test_what_is_no_number_is_not_hidden() -> None:
    x = images((2, 3, 8, 8), 0, torch.float32)
    x[0, 0, 0, 0] = torch.nan
    kernels, _ = kernels_of(8, 3, 3, 0, torch.float32)
    assert lift.lift_norm_relu_pool(x, kernels, norm_of(2), 2).isnan().all()


def test_what_cannot_be_lifted_goes_through_the_layer() -> None:
    def lift(*args: int, **options: object) -> rp.nn.LiftConv2d:
        return rp.nn.LiftConv2d(*args, **{"bias": False} | options).to(DEVICE, torch.bfloat16)

    x = images((1, 3, 12, 12), 0, torch.bfloat16)
    assert gpu.can_lift(x, lift(3, 4, 5, 8))
    for others in (x.float(), x.clone().requires_grad_(), x[:0]):
        assert not gpu.can_lift(others, lift(3, 4, 5, 8))
    for by_channel, can in ((2**29, True), (2**30, False)):  # windows of a large image: places are far apart
        far = torch.empty_strided(x.shape, (0, by_channel, 12, 1), dtype=x.dtype, device="meta")
        assert gpu.can_lift(far, lift(3, 4, 5, 8).to("meta")) == can
    assert not gpu.can_lift(x, lift(3, 4, 5, 8).float()), "torch has a sentence for that"
    for other in (
        lift(3, 4, 5, 8, bias=True),
        lift(3, 4, 5, 8, padding=2),
        lift(3, 4, 5, 8, dilation=2),
        lift(3, 4, 7, 8),  # 147 numbers under it
        lift(3, 6, 5, 8, groups=3),
    ):
        assert not gpu.can_lift(x, other)
    assert not fuse.can_lift(x.cpu(), lift(3, 4, 5, 8).cpu(), rp.nn.GroupBatchNorm2d(4), nn.ReLU())


def test_batch_norm_that_the_kernels_do_not_know_goes_through_the_layer() -> None:
    norm = rp.nn.GroupBatchNorm2d(4)
    assert gpu.can_use(norm, 2)
    assert not gpu.can_use(norm, 1), "which torch has a sentence for"
    assert not gpu.can_use(norm.eval(), 2), "gradients are asked for"
    with torch.no_grad():
        assert gpu.can_use(norm, 1)
        assert not gpu.can_use(rp.nn.GroupBatchNorm2d(4, track_running_stats=False).eval(), 2)
    assert gpu.can_use(rp.nn.GroupBatchNorm2d(4, track_running_stats=False), 2)
    norm.train().track_running_stats = False  # buffers are there, and are to be left alone
    assert not gpu.can_use(norm, 2)


def test_patches_are_wide_enough_for_products_of_matrices() -> None:
    """On a GPU they have 16 terms at least, which Triton's interpreter does not ask for."""
    cuts = {3: (16, 0), 15: (16, 0), 16: (32, 0), 27: (32, 0), 36: (32, 16), 75: (64, 16), 100: (128, 0)}
    assert {taps: patches._cut(taps) for taps in cuts} == cuts
    for taps in range(1, gpu.LARGEST_PATCH + 1):
        assert taps < sum(patches._cut(taps)) <= max(16, 2 * taps)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_blurred_roots_are_taken_along(dtype: torch.dtype, training: bool) -> None:
    x = images((2, 3, 14, 16), 0, dtype)
    kernels, exact = kernels_of(3 * 8, 3, 5, 0, dtype)
    norm, reference = norm_of(3).train(training), norm_of(3, torch.float64).train(training)
    pool = rp.nn.GroupAvgPool2d(2, blur=5, power=2).to(DEVICE, torch.float64)
    with torch.set_grad_enabled(training):
        y = lift.lift_norm_relu_pool(x, kernels, norm, Filter(2, 5))
        lifted = nn.functional.conv2d(x.double(), exact).unflatten(1, (3, 8))
        expected = pool(reference(lifted).relu())
    torch.testing.assert_close(y.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if training:
        y.backward(dy := torch.randn_like(y))
        expected.backward(dy.double())
        for got, value in (
            (kernels.grad, exact.grad),
            (norm.weight.grad, reference.weight.grad),
            (norm.bias.grad, reference.bias.grad),
            (norm.running_var, reference.running_var),
        ):
            assert_close(got, value, max(1e-3, TOLERANCE[dtype]))
