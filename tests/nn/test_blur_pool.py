"""The kernels of blurred root-mean-square pooling against the layers; interpreted on the CPU if there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, TOLERANCE, apply_fused, features, make_norm, use_kernels
from torch import Tensor, nn

import rotopath as rp

pytest.importorskip("triton")
from rotopath.nn.triton import blur_pool
from rotopath.nn.triton.blur_pool import Filter

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing interpreted kernels would take minutes

NEAR_ZERO = 1e-3  # tolerance of gradients of a root near 0, which magnify the rounding of batch norm a thousand times


def make_pool(size: int, blur: int, dtype: torch.dtype = torch.float32) -> rp.nn.GroupAvgPool2d:
    return rp.nn.GroupAvgPool2d(size, blur=blur, power=2).to(DEVICE, dtype)


def assert_close_with_gradients(
    x: Tensor, exact: Tensor, y: Tensor, expected: Tensor, seed: int, gradient_atol: float = 0.0
) -> None:
    """Compare outputs y of x with the expected outputs of `exact`, and the gradients of both inputs."""
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    tolerance = {"atol": TOLERANCE[x.dtype] * 2, "rtol": TOLERANCE[x.dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    (y.float() * weights).sum().backward()
    (expected * weights.to(x.dtype).double()).sum().backward()
    deviation = exact.detach().var(dim=(0, 2, 3, 4), unbiased=False).sqrt().clamp(max=1).view(1, -1, 1, 1, 1)
    tolerance["atol"] = max(tolerance["atol"], gradient_atol)
    torch.testing.assert_close(x.grad.double() * deviation, exact.grad * deviation, **tolerance)


def set_tile_sizes(monkeypatch: pytest.MonkeyPatch, elements: int, blocks: int) -> None:
    """Small tiles need several programs per image and several chunks per strip; large tiles are faster to interpret."""
    monkeypatch.setattr(blur_pool, "FORWARD_TILE", elements)
    monkeypatch.setattr(blur_pool, "BACKWARD_TILE", elements)
    monkeypatch.setattr(blur_pool, "MAX_BLOCKS", blocks)


pools = st.sampled_from([Filter(size, blur) for size in (1, 2, 3) for blur in range(1, 2 * size + 2, 2)])


@settings(deadline=None, max_examples=14)
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 5, 17]),
    n=st.sampled_from([1, 2, 3, 8]),
    outputs=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pool=pools,
    dtype=st.sampled_from(list(TOLERANCE)),
    small_tiles=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_norm_relu_blur_matches_the_layers(
    batch: int,
    channels: int,
    n: int,
    outputs: tuple[int, int],
    pool: Filter,
    dtype: torch.dtype,
    small_tiles: bool,
    seed: int,
) -> None:
    shape = (batch, channels, n, *(count * pool.size for count in outputs))
    if batch * n * shape[3] * shape[4] < 4:
        return  # with so few values, rounding changes the variance
    x = features(shape, seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = make_norm(channels), make_norm(channels, torch.float64)
    with pytest.MonkeyPatch.context() as monkeypatch:
        set_tile_sizes(monkeypatch, elements=512 if small_tiles else 2**12, blocks=2 if small_tiles else 16)
        y = apply_fused(x, norm, make_pool(*pool))
        expected = make_pool(*pool, dtype=torch.float64)(reference(exact).relu())
        assert_close_with_gradients(x, exact, y, expected, seed, NEAR_ZERO)
    sums = {"atol": TOLERANCE[dtype] * 30, "rtol": TOLERANCE[dtype] * 5}  # for sums of many terms
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, **sums)
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, **sums)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        actual, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(actual, value, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=8)
@given(
    channels=st.sampled_from([1, 2, 5, 17]),
    outputs=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pool=pools,
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_blur_alone_matches_the_layer(
    channels: int, outputs: tuple[int, int], pool: Filter, dtype: torch.dtype, seed: int
) -> None:
    sides = (count * pool.size for count in outputs)
    x = features((2, channels, 3, *sides), seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = blur_pool.blur(x, make_pool(*pool)), make_pool(*pool, dtype=torch.float64)(exact)
    assert_close_with_gradients(x, exact, y, expected, seed)


def test_few_programs_sum_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_tile_sizes(monkeypatch, elements=64, blocks=2)
    monkeypatch.setattr("rotopath.nn.triton.batch_norm.MAX_PROGRAMS", 4)
    x = features((3, 3, 3, 6, 10), 0, torch.float32).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = make_norm(3), make_norm(3, torch.float64)
    expected = make_pool(2, 5, dtype=torch.float64)(reference(exact).relu())
    assert_close_with_gradients(x, exact, apply_fused(x, norm, make_pool(2, 5)), expected, 0)
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_gradients_of_small_features_are_precise(dtype: torch.dtype) -> None:
    """Roots near √ε have a large inverse, which would lose precision if it were rounded too early."""
    strengths = torch.tensor([0.0, 1e-4, 1e-3, 3e-3, 1e-2]).view(1, -1, 1, 1, 1)
    x = (features((2, 5, 2, 4, 4), 0, torch.float32) * strengths.to(DEVICE)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = blur_pool.blur(x, make_pool(2, 5)), make_pool(2, 5, dtype=torch.float64)(exact)
    slopes = [torch.autograd.grad(output.sum() * 2.0**8, leaf)[0] for output, leaf in ((y, x), (expected, exact))]
    scale = slopes[1].abs().amax(dim=(0, 2, 3, 4), keepdim=True).clamp(min=1e-9)
    torch.testing.assert_close(slopes[0].double() / scale, slopes[1] / scale, atol=TOLERANCE[dtype], rtol=0)


def test_filter_weights_have_known_values() -> None:
    # Windows of 2 blurred by 1 4 6 4 1: sums of two neighboring taps.
    weights = blur_pool._compute_weights(5, Filter(2, 5), torch.device("cpu"))
    torch.testing.assert_close(weights[3], torch.tensor([1.0, 5, 10, 10, 5, 1]) / 32)
    # At the border, the taps 6 4 1 are left and are divided by their sum, 11.
    torch.testing.assert_close(weights[1], torch.tensor([0.0, 0, 6, 10, 5, 1]) / 22)
    torch.testing.assert_close(weights.sum(dim=1), torch.tensor([0.0, 1, 1, 1, 1, 1, 0]))


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei])  # tumor differs in its widths only
def test_faithful_networks_have_the_same_gradients_with_and_without_fusion(
    build: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    if DEVICE.type == "cpu":
        set_tile_sizes(monkeypatch, elements=2**14, blocks=64)
    calls = []
    real = blur_pool.apply
    monkeypatch.setattr(blur_pool, "apply", lambda *args: calls.append(args[1]) or real(*args))

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        net = build(orientations=2, preset="faithful").to(DEVICE)
        y = net(torch.rand(1, 3, net.receptive_field, net.receptive_field, device=DEVICE))
        (y * torch.randn(y.shape, device=DEVICE)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    with rp.nn.disable_fusion():
        separate = run()
    use_kernels(monkeypatch)
    calls.clear()
    for actual, expected in zip(run(), separate, strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(actual / scale, expected / scale, atol=1e-3, rtol=0)
    assert len(calls) == (2 if build is rp.models.nuclei else 3)


def test_nan_reaches_the_output() -> None:
    x = features((1, 2, 4, 4, 4), 0, torch.float32)
    x[0, 0, 0, 0, 0] = torch.nan
    y = apply_fused(x, make_norm(2), make_pool(2, 5))
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()
