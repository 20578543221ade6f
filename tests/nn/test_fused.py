"""Batch norm, ReLU and pooling in one pass, against the layers: Triton's kernels, interpreted where there is no GPU."""

import pytest
import torch
from for_kernels import DEVICE, TOLERANCE, features, norm_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import fuse, gpu

pytest.importorskip("triton")
from rotopath.nn.triton.batch_norm import find_statistics, norm_relu_pool, track


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
def test_one_pass_gives_what_the_layers_give(
    batch: int, channels: int, n: int, outputs: tuple[int, int], pool: int, dtype: torch.dtype, seed: int
) -> None:
    shape = (batch, channels, n, outputs[0] * pool, outputs[1] * pool)
    if batch * n * shape[3] * shape[4] < 4:
        return  # too few values for a variance that rounding leaves alone
    x = features(shape, seed, dtype).requires_grad_()
    exact = x.detach().double().requires_grad_()
    norm, reference = norm_of(channels), norm_of(channels, torch.float64)
    y = norm_relu_pool(x, norm, pool)
    expected = rp.nn.GroupMaxPool2d(pool)(reference(exact).relu())
    assert y.shape == expected.shape
    assert y.dtype == dtype
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    tolerance = {"atol": TOLERANCE[dtype] * 2, "rtol": TOLERANCE[dtype]}
    torch.testing.assert_close(y.double(), expected, **tolerance)
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    (y.float() * weights).sum().backward()
    (expected * weights.to(dtype).double()).sum().backward()
    many = {"atol": TOLERANCE[dtype] * 30, "rtol": TOLERANCE[dtype] * 5}  # sums of many terms
    torch.testing.assert_close(norm.weight.grad.double(), reference.weight.grad, **many)
    torch.testing.assert_close(norm.bias.grad.double(), reference.bias.grad, **many)
    deviation = exact.detach().var(dim=(0, 2, 3, 4), unbiased=False).sqrt().clamp(max=1).view(1, -1, 1, 1, 1)
    torch.testing.assert_close(x.grad.double() * deviation, exact.grad * deviation, **tolerance)
    for name in ("running_mean", "running_var", "num_batches_tracked"):
        got, value = getattr(norm, name).double(), getattr(reference, name).double()
        torch.testing.assert_close(got, value, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei])  # as tumor is but for its widths
def test_networks_learn_the_same_either_way(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def in_one_pass(x: Tensor, norm: nn.Module, pool: rp.nn.GroupMaxPool2d | None = None) -> Tensor:
        return norm_relu_pool(x, norm, 1 if pool is None else pool.size)

    def gradients(fuse: bool) -> list[Tensor]:
        monkeypatch.setattr(fuse, "can_fuse", lambda *_: fuse)
        monkeypatch.setattr(fuse, "norm_relu_pool", in_one_pass)
        torch.manual_seed(0)
        net = build(orientations=2).to(DEVICE)
        y = net(torch.rand(1, 3, net.architecture.input_px, net.architecture.input_px, device=DEVICE))
        (y * torch.randn(y.shape, device=DEVICE)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    for got, expected in zip(gradients(fuse=True), gradients(fuse=False), strict=True):
        scale = expected.abs().max().clamp(min=1e-3)
        torch.testing.assert_close(got / scale, expected / scale, atol=1e-3, rtol=0)


@pytest.mark.parametrize("pooling", ["max", "max-blur", "rms-blur"])
def test_on_the_cpu_only_a_plain_maximum_is_fused(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []

    def in_one_pass(x: Tensor, norm: nn.Module, pool: rp.nn.GroupMaxPool2d | None = None) -> Tensor:
        pools.append(1 if pool is None else pool.size)
        return norm(x).relu() if pool is None else pool(norm(x).relu())

    net = rp.models.tumor(2, pooling=pooling)
    x = torch.rand(2, 3, 88, 88)
    expected = net(x)
    monkeypatch.setattr(fuse, "can_fuse", lambda *_: True)
    monkeypatch.setattr(fuse, "norm_relu_pool", in_one_pass)
    torch.testing.assert_close(net(x), expected)
    assert pools == ([2, 2, 3, 1, 1] if pooling == "max" else [1] * 5)


def test_large_means_keep_their_digits() -> None:
    x = torch.randn(2, 6, 6, 3, 4, device=DEVICE).mul(0.01).add(100).permute(0, 3, 4, 1, 2)
    norm, reference = norm_of(3), norm_of(3, torch.float64)
    got = norm_relu_pool(x, norm)
    torch.testing.assert_close(got.double(), reference(x.double()).relu(), atol=5e-3, rtol=0)


def test_what_cannot_be_fused_goes_through_the_layers() -> None:
    x = features((2, 3, 4, 6, 6), 0, torch.float32)
    norm = norm_of(3)
    assert gpu.can_normalise(x, norm)
    for other, layer in (
        (x.double(), norm),
        (x.contiguous(), norm),
        (x, norm_of(3).eval()),
        (x, rp.nn.GroupBatchNorm2d(3, affine=False)),
        (x, rp.nn.GroupBatchNorm2d(3, momentum=None)),
    ):
        assert not gpu.can_normalise(other, layer)
    with pytest.raises(ValueError, match="Windows of 4 do not cover features of 6 × 6 px evenly"):
        fuse.norm_relu_pool(x, norm, rp.nn.GroupMaxPool2d(4))


def test_what_is_no_number_is_not_hidden() -> None:
    x = features((1, 2, 4, 4, 4), 0, torch.float32)
    x[0, 0, 0, 0, 0] = torch.nan
    y = norm_relu_pool(x, norm_of(2), 2)
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


@pytest.mark.parametrize("place", [(0, 0, 0, 0, 0), (1, 0, 2, 3, 1)], ids=["first", "later"])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_statistics_show_what_is_no_number_as_torch_does(place: tuple[int, ...], dtype: torch.dtype) -> None:
    x = features((2, 2, 4, 4, 4), 0, dtype)
    x[place] = torch.nan
    norm, reference = norm_of(2), norm_of(2)
    mean, inverse = find_statistics(x.permute(0, 3, 4, 1, 2), *track(norm))
    line = (reference.weight, reference.bias, reference.running_mean, reference.running_var)
    _, *wanted = torch.native_batch_norm(x.float(), *line, True, reference.momentum, reference.eps)
    found = (mean, inverse, norm.running_mean, norm.running_var)
    for got, expected in zip(found, (*wanted, reference.running_mean, reference.running_var), strict=True):
        assert expected.isnan().tolist() == [True, False]
        torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5, equal_nan=True)
