"""Batch norm, ReLU and blurred root mean squares in one pass, against the layers; interpreted where there is no GPU."""

import pytest
import torch
from for_kernels import DEVICE, TOLERANCE, features, norm_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import fuse

pytest.importorskip("triton")
from rotopath.nn.triton import blur_pool
from rotopath.nn.triton.blur_pool import Filter

BEND = 1e-3  # of slopes of a root near 0, where the last digit that batch norm rounds counts a thousand times


def pool_of(size: int, blur: int, dtype: torch.dtype = torch.float32) -> rp.nn.GroupAvgPool2d:
    return rp.nn.GroupAvgPool2d(size, blur=blur, power=2).to(DEVICE, dtype)


def assert_alike(x: Tensor, exact: Tensor, y: Tensor, expected: Tensor, seed: int, bend: float = 0.0) -> None:
    """Answers and the gradients of what they were found for."""
    assert y.shape == expected.shape
    assert y.dtype == x.dtype
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    tolerance = {"atol": TOLERANCE[x.dtype] * 2, "rtol": TOLERANCE[x.dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    (y.float() * weights).sum().backward()
    (expected * weights.to(x.dtype).double()).sum().backward()
    deviation = exact.detach().var(dim=(0, 2, 3, 4), unbiased=False).sqrt().clamp(max=1).view(1, -1, 1, 1, 1)
    tolerance["atol"] = max(tolerance["atol"], bend)
    torch.testing.assert_close(x.grad.double() * deviation, exact.grad * deviation, **tolerance)


def use_tiles(patch: pytest.MonkeyPatch, numbers: int, blocks: int) -> None:
    """Small ones take several programs for an image, that each walk down a part of it; large ones are soon computed."""
    patch.setattr(blur_pool, "FORWARD_TILE", numbers)
    patch.setattr(blur_pool, "BACKWARD_TILE", numbers)
    patch.setattr(blur_pool, "BLOCKS", blocks)


pools = st.sampled_from([Filter(size, blur) for size in (1, 2, 3) for blur in range(1, 2 * size + 2, 2)])


@settings(deadline=None, max_examples=14)
@given(
    batch=st.integers(1, 3),
    channels=st.sampled_from([1, 2, 5, 17]),
    n=st.sampled_from([1, 2, 3, 8]),
    outputs=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pool=pools,
    dtype=st.sampled_from(list(TOLERANCE)),
    small=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_one_pass_gives_what_the_layers_give(
    batch: int,
    channels: int,
    n: int,
    outputs: tuple[int, int],
    pool: Filter,
    dtype: torch.dtype,
    small: bool,
    seed: int,
) -> None:
    shape = (batch, channels, n, *(count * pool.size for count in outputs))
    if batch * n * shape[3] * shape[4] < 4:
        return  # too few values for a variance that rounding leaves alone
    x = features(shape, seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = norm_of(channels), norm_of(channels, torch.float64)
    with pytest.MonkeyPatch.context() as cut:
        use_tiles(cut, numbers=512 if small else 2**12, blocks=2 if small else 16)
        y = blur_pool.norm_relu_blur(x, norm, pool_of(*pool))
        expected = pool_of(*pool, dtype=torch.float64)(reference(exact).relu())
        assert_alike(x, exact, y, expected, seed, BEND)
    many = {"atol": TOLERANCE[dtype] * 30, "rtol": TOLERANCE[dtype] * 5}  # sums of many terms
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, **many)
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, **many)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        got, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(got, value, atol=1e-4, rtol=1e-4)


@settings(deadline=None, max_examples=8)
@given(
    channels=st.sampled_from([1, 2, 5, 17]),
    outputs=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    pool=pools,
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_a_pool_alone_gives_what_the_layer_gives(
    channels: int, outputs: tuple[int, int], pool: Filter, dtype: torch.dtype, seed: int
) -> None:
    sides = (count * pool.size for count in outputs)
    x = features((2, channels, 3, *sides), seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    assert_alike(x, exact, blur_pool.blur(x, pool_of(*pool)), pool_of(*pool, dtype=torch.float64)(exact), seed)


def test_many_tiles_are_summed_by_few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tiles(monkeypatch, numbers=64, blocks=2)
    monkeypatch.setattr("rotopath.nn.triton.batch_norm.PROGRAMS", 4)
    x = features((3, 3, 3, 6, 10), 0, torch.float32).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = norm_of(3), norm_of(3, torch.float64)
    expected = pool_of(2, 5, dtype=torch.float64)(reference(exact).relu())
    assert_alike(x, exact, blur_pool.norm_relu_blur(x, norm, pool_of(2, 5)), expected, 0)
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_faint_features_keep_the_slope_of_their_root(dtype: torch.dtype) -> None:
    """Roots near that of what is added below them, whose inverse is large, and lost where it is rounded too early."""
    strengths = torch.tensor([0.0, 1e-4, 1e-3, 3e-3, 1e-2]).view(1, -1, 1, 1, 1)
    x = (features((2, 5, 2, 4, 4), 0, torch.float32) * strengths.to(DEVICE)).to(dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = blur_pool.blur(x, pool_of(2, 5)), pool_of(2, 5, dtype=torch.float64)(exact)
    slopes = [torch.autograd.grad(answer.sum() * 2.0**8, leaf)[0] for answer, leaf in ((y, x), (expected, exact))]
    scale = slopes[1].abs().amax(dim=(0, 2, 3, 4), keepdim=True).clamp(min=1e-9)
    torch.testing.assert_close(slopes[0].double() / scale, slopes[1] / scale, atol=TOLERANCE[dtype], rtol=0)


def test_weights_are_the_known_ones() -> None:
    # Windows of 2, blurred by 1 4 6 4 1: five times the sum of two neighbours.
    weights = blur_pool._find_weights(5, Filter(2, 5), torch.device("cpu"))
    torch.testing.assert_close(weights[3], torch.tensor([1.0, 5, 10, 10, 5, 1]) / 32)
    # At the rim 6 4 1 are left of the taps, which count for 11.
    torch.testing.assert_close(weights[1], torch.tensor([0.0, 0, 6, 10, 5, 1]) / 22)
    torch.testing.assert_close(weights.sum(dim=1), torch.tensor([0.0, 1, 1, 1, 1, 1, 0]))


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei])  # as tumor is but for its widths
def test_faithful_networks_learn_the_same_either_way(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE.type == "cpu":
        use_tiles(monkeypatch, numbers=2**14, blocks=64)
    taken = []

    def in_one_pass(x: Tensor, norm: nn.Module, pool: rp.nn.GroupAvgPool2d | None = None) -> Tensor:
        taken.append(pool)
        return norm(x).relu() if pool is None else blur_pool.norm_relu_blur(x, norm, pool)

    def alone(x: Tensor, pool: nn.Module) -> Tensor:
        taken.append(pool)
        return blur_pool.blur(x, pool) if isinstance(pool, rp.nn.GroupAvgPool2d) else pool(x)

    def learn(fuse: bool) -> list[Tensor]:
        with monkeypatch.context() as fused_or_not:
            fused_or_not.setattr(fuse, "can_fuse", lambda *_: fuse)
            if fuse:
                fused_or_not.setattr(fuse, "can_pool", lambda _, pool: not isinstance(pool, nn.Identity))
                fused_or_not.setattr(fuse, "norm_relu_pool", in_one_pass)
                fused_or_not.setattr(fuse, "pool_alone", alone)
            torch.manual_seed(0)
            net = build(orientations=2, preset="faithful").to(DEVICE)
            y = net(torch.rand(1, 3, net.receptive_field, net.receptive_field, device=DEVICE))
            (y * torch.randn(y.shape, device=DEVICE)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    for got, expected in zip(learn(fuse=True), learn(fuse=False), strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got / scale, expected / scale, atol=1e-3, rtol=0)
    assert sum(isinstance(pool, rp.nn.GroupAvgPool2d) for pool in taken) == (2 if build is rp.models.nuclei else 3)


class OnGpu:
    """Features that say that they lie on a GPU."""

    is_cuda = True


def test_pools_that_the_kernels_know_are_taken_along() -> None:
    architectures = [build(2, preset="faithful") for build in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor)]
    known = [pool for net in architectures for pool in net.pools if not isinstance(pool, nn.Identity)]
    assert len(known) == 8
    assert all(fuse.can_pool(OnGpu(), pool) for pool in known)
    hooked = pool_of(2, 5)
    hooked.register_forward_hook(lambda *_: None)
    for other in (
        rp.nn.GroupAvgPool2d(2),
        rp.nn.GroupAvgPool2d(2, blur=5),
        rp.nn.GroupAvgPool2d(2, 1, power=2),
        rp.nn.GroupAvgPool2d(3, 2, 1, power=2),
        pool_of(2, 7),
        hooked,
        nn.Identity(),
    ):
        assert not fuse.can_pool(OnGpu(), other)


def test_pools_alone_go_through_the_layer_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 2, 2, 4, 4)
    with monkeypatch.context() as without:
        without.setattr(blur_pool, "blur", None)
        torch.testing.assert_close(fuse.pool_alone(x, pool_of(2, 5).cpu()), pool_of(2, 5).cpu()(x))
    with pytest.raises(ValueError, match="GroupAvgPool2d"):
        fuse.pool_alone(x[..., :3], pool_of(2, 5).cpu())


def test_what_is_no_number_is_not_hidden() -> None:
    x = features((1, 2, 4, 4, 4), 0, torch.float32)
    x[0, 0, 0, 0, 0] = torch.nan
    y = blur_pool.norm_relu_blur(x, norm_of(2), pool_of(2, 5))
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()
