"""The kernels of batch norm, residual sum, activation and max pooling; interpreted on the CPU if there is no GPU."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, TOLERANCE, apply_fused, features, make_norm, use_kernels
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import triton

pytest.importorskip("triton")
from rotopath.nn.triton import batch_norm

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing interpreted kernels would take minutes


@settings(deadline=None, max_examples=25)
@given(
    batch=st.integers(1, 3),
    channels=st.integers(1, 20),
    n=st.sampled_from([1, 2, 3, 8]),
    outputs=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    pool=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_norm_relu_pool_matches_the_layers(
    batch: int, channels: int, n: int, outputs: tuple[int, int], pool: int, dtype: torch.dtype, seed: int
) -> None:
    shape = (batch, channels, n, outputs[0] * pool, outputs[1] * pool)
    if batch * n * shape[3] * shape[4] < 4:
        return  # with so few values, rounding changes the variance
    x = features(shape, seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = make_norm(channels), make_norm(channels, torch.float64)
    y = apply_fused(x, norm, rp.nn.GroupMaxPool2d(pool))
    expected = rp.nn.GroupMaxPool2d(pool)(reference(exact).relu())
    assert y.shape == expected.shape
    assert y.dtype == dtype
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    tolerance = {"atol": TOLERANCE[dtype] * 2, "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    (y.float() * weights).sum().backward()
    (expected * weights.to(dtype).double()).sum().backward()
    sums = {"atol": TOLERANCE[dtype] * 30, "rtol": TOLERANCE[dtype] * 5}  # for sums of many terms
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, **sums)
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, **sums)
    deviation = exact.detach().var(dim=(0, 2, 3, 4), unbiased=False).sqrt().clamp(max=1).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(x.grad.double() * deviation, exact.grad * deviation, **tolerance)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        actual, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(actual, value, atol=1e-4, rtol=1e-4)


ACTIVATIONS = {"none": lambda x: x, "relu": torch.relu, "silu": F.silu, "gelu": F.gelu}


@settings(deadline=None, max_examples=25)
@given(
    channels=st.sampled_from([1, 2, 5, 17]),
    n=st.sampled_from([1, 3, 8]),
    size=st.tuples(st.integers(1, 5), st.integers(2, 5)),
    activation=st.sampled_from(list(ACTIVATIONS)),
    with_residual=st.booleans(),
    training=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_residuals_and_activations_match_the_layers(
    channels: int,
    n: int,
    size: tuple[int, int],
    activation: str,
    with_residual: bool,
    training: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    shape = (2, channels, n, *size)
    norm, reference = make_norm(channels).train(training), make_norm(channels, torch.float64).train(training)
    for layer in (norm, reference):
        layer.running_mean.fill_(4.0)
        layer.running_var.fill_(9.0)
    x = features(shape, seed, dtype).requires_grad_()
    residual = features(shape, seed + 1, dtype).sub_(4).requires_grad_() if with_residual else None
    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, residual)]
    y = apply_fused(x, norm, residual=residual, activation=activation)
    expected = reference(exact[0]) if residual is None else reference(exact[0]) + exact[1]
    expected = ACTIVATIONS[activation](expected)
    tolerance = {"atol": TOLERANCE[dtype] * 2, "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)
    # Where ReLU is at 0 up to rounding, both gradients are right.
    dy = dy * (expected.abs() > 5 * TOLERANCE[dtype]).to(dtype) if activation == "relu" else dy
    y.backward(dy)
    expected.backward(dy.double())
    deviation = exact[0].detach().var(dim=(0, 2, 3, 4), unbiased=False).sqrt().clamp(max=1).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(x.grad.double() * deviation, exact[0].grad * deviation, **tolerance)
    if residual is not None:
        torch.testing.assert_close(residual.grad.double(), exact[1].grad, **tolerance)
    sums = {"atol": TOLERANCE[dtype] * 30, "rtol": TOLERANCE[dtype] * 5}  # for sums of many terms
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, **sums)
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, **sums)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_second_derivatives_match_the_layers(activation: str) -> None:
    def second(layer: nn.Module, x: Tensor, residual: Tensor, fused: bool) -> list[Tensor]:
        if fused:
            y = apply_fused(x, layer, residual=residual, activation=activation)
        else:
            y = ACTIVATIONS[activation](layer(x) + residual)
        first = torch.autograd.grad(y.pow(3).sum(), (x, residual, layer.weight), create_graph=True)
        return list(torch.autograd.grad(sum(g.square().sum() for g in first), (x, residual, layer.weight)))

    x, residual = (features((2, 3, 2, 3, 3), seed, torch.float32).requires_grad_() for seed in (0, 1))
    exact = [t.detach().double().requires_grad_() for t in (x, residual)]
    expected = second(make_norm(3, torch.float64), *exact, fused=False)
    for actual, value in zip(second(make_norm(3), x, residual, fused=True), expected, strict=True):
        torch.testing.assert_close(actual.double() / value.abs().max(), value / value.abs().max(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei])  # tumor differs in its widths only
def test_networks_have_the_same_gradients_with_and_without_fusion(
    build: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = batch_norm.apply
    monkeypatch.setattr(batch_norm, "apply", lambda *args: calls.append(args[-1]) or real(*args))

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        net = build(orientations=2).to(DEVICE)
        y = net(torch.rand(1, 3, net.architecture.input_px, net.architecture.input_px, device=DEVICE))
        (y * torch.randn(y.shape, device=DEVICE)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    with rp.nn.disable_fusion():
        separate = run()
    use_kernels(monkeypatch)
    calls.clear()
    for actual, expected in zip(run(), separate, strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(actual / scale, expected / scale, atol=1e-3, rtol=0)
    assert calls == ([2, 2, 2, 1, 1] if build is rp.models.mitosis else [1] * 6), "sides of the pools"


def test_large_means_keep_precision() -> None:
    x = torch.randn(2, 6, 6, 3, 4, device=DEVICE).mul(0.01).add(100).permute(0, 3, 4, 1, 2)
    norm, reference = make_norm(3), make_norm(3, torch.float64)
    y = apply_fused(x, norm)
    torch.testing.assert_close(y.double(), reference(x.double()).relu(), atol=5e-3, rtol=0)


def test_kernels_refuse_what_they_do_not_support() -> None:
    x = features((2, 3, 4, 6, 6), 0, torch.float32)
    norm = make_norm(3)
    assert triton.can_normalize(x, norm)
    for other, layer in (
        (x.double(), norm),
        (x.contiguous(), norm),
        (x, rp.nn.GroupBatchNorm2d(3, affine=False)),
        (x, rp.nn.GroupBatchNorm2d(3, momentum=None)),
    ):
        assert not triton.can_normalize(other, layer)


def test_kernels_use_batch_norm_in_training_and_evaluation() -> None:
    norm = rp.nn.GroupBatchNorm2d(4)
    assert triton.can_use_norm(norm, 2)
    assert not triton.can_use_norm(norm, 1), "torch raises an error for a single value"
    assert triton.can_use_norm(norm.eval(), 1)
    assert not triton.can_use_norm(rp.nn.GroupBatchNorm2d(4, track_running_stats=False).eval(), 2)
    assert triton.can_use_norm(rp.nn.GroupBatchNorm2d(4, track_running_stats=False), 2)
    norm.train().track_running_stats = False  # the buffers exist, but must not be updated
    assert not triton.can_use_norm(norm, 2)


def test_nan_reaches_the_output() -> None:
    x = features((1, 2, 4, 4, 4), 0, torch.float32)
    x[0, 0, 0, 0, 0] = torch.nan
    y = apply_fused(x, make_norm(2), rp.nn.GroupMaxPool2d(2))
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


@pytest.mark.parametrize("position", [(0, 0, 0, 0, 0), (1, 0, 2, 3, 1)], ids=["first", "later"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_nan_reaches_the_statistics_as_in_torch(position: tuple[int, ...], dtype: torch.dtype) -> None:
    x = features((2, 2, 4, 4, 4), 0, dtype)
    x[position] = torch.nan
    norm, reference = make_norm(2), make_norm(2)
    mean, inverse_std = batch_norm.compute_statistics(x, norm)
    parameters = (reference.weight, reference.bias, reference.running_mean, reference.running_var)
    _, *expected = torch.native_batch_norm(x.float(), *parameters, True, reference.momentum, reference.eps)
    expected += [reference.running_mean, reference.running_var]
    for actual, value in zip((mean, inverse_std, norm.running_mean, norm.running_var), expected, strict=True):
        assert value.isnan().tolist() == [True, False]
        torch.testing.assert_close(actual, value, atol=1e-5, rtol=1e-5, equal_nan=True)
