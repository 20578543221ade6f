"""Normalization and dropout against known answers, and batch norm on the CPU against torch's layers."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import rotopath as rp
from rotopath.nn.norm import can_normalize_on_cpu

RELU_AND_POOL = pytest.mark.parametrize(("relu", "pool"), [(True, 1), (False, 1), (True, 2)])


def features(batch: int, channels: int, n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Return float64 features (B, C, N, H, W), channels-last as after a convolution; orientations differ in mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height, width, channels, n, generator=generator, dtype=torch.float64)
    x = 2 * x + 5 * torch.rand(channels, n, generator=generator, dtype=torch.float64)
    return x.permute(0, 3, 4, 1, 2)


def make_norm(channels: int, kind: type[nn.BatchNorm3d] = rp.nn.GroupBatchNorm2d) -> nn.BatchNorm3d:
    norm = kind(channels, momentum=0.3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.weight[1::2] *= -1  # reverses the order of features
        norm.bias.copy_(torch.linspace(0.55, -0.45, channels))  # a bias of 0 would leave ReLU at the mean to rounding
    return norm


def apply_fused(
    x: Tensor, norm: rp.nn.GroupBatchNorm2d, relu: bool = True, pool: int = 1, residual: Tensor | None = None
) -> Tensor:
    """Apply batch norm, a residual sum, ReLU and max pooling as the layers do, in one function."""
    pending = norm._start(x, on_gpu=False)
    pending = pending if residual is None else pending.add(residual)
    pending = pending.activate("relu") if relu else pending
    y = pending.compute() if pool == 1 else pending.pool(rp.nn.GroupMaxPool2d(pool))
    assert y is not None
    return y


def apply_layers(x: Tensor, norm: nn.BatchNorm3d, relu: bool, pool: int) -> Tensor:
    y = norm(x)
    return nn.functional.max_pool3d(y.relu() if relu else y, (1, pool, pool))


# Layers against known answers.


def test_batch_norm_shares_statistics_over_batch_space_and_orientation() -> None:
    norm = rp.nn.GroupBatchNorm2d(3, momentum=1.0)
    x = torch.randn(4, 3, 8, 5, 6) * torch.arange(1, 9).view(8, 1, 1) + 2
    y = norm(x)
    axes = (0, 2, 3, 4)
    torch.testing.assert_close(y.mean(axes), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(axes, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(norm.running_mean, x.mean(axes))
    torch.testing.assert_close(norm.running_var, x.var(axes))
    reference = nn.BatchNorm3d(3)
    reference.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm.eval()(x), reference.eval()(x))


def test_batch_norm_can_be_converted_to_sync_batch_norm() -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(rp.nn.GroupBatchNorm2d(3)))
    assert isinstance(converted[0], nn.SyncBatchNorm)
    x = torch.randn(2, 3, 4, 5, 5)
    torch.testing.assert_close(converted.eval()(x), rp.nn.GroupBatchNorm2d(3).eval()(x))


def test_group_norm_normalizes_groups_over_orientations_and_space() -> None:
    x = torch.randn(3, 6, 8, 5, 5) * torch.arange(1, 9).view(8, 1, 1) + 1
    y = rp.nn.GroupNorm2d(2, 6)(x).unflatten(1, (2, 3))
    torch.testing.assert_close(y.mean((2, 3, 4, 5)), torch.zeros(3, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((2, 3, 4, 5), correction=0), torch.ones(3, 2), atol=1e-4, rtol=0)


def test_layer_norm_normalizes_each_position() -> None:
    norm = rp.nn.GroupLayerNorm2d(6, eps=0.1)
    x = torch.randn(3, 6, 8, 5, 4) * torch.arange(1, 9).view(8, 1, 1) + 1  # orientations of unequal scale
    rows = x.permute(0, 3, 4, 1, 2)
    expected = nn.functional.layer_norm(rows, (6, 8), eps=0.1).permute(0, 3, 4, 1, 2)
    torch.testing.assert_close(norm(x), expected)
    nn.init.constant_(norm.weight, 2.0)
    norm.bias.data[:] = torch.arange(6)
    assert norm(torch.zeros(1, 6, 8, 2, 2))[0, 5].unique().tolist() == [5.0]


def test_dropout_zeroes_whole_channels() -> None:
    y = rp.nn.GroupDropout2d(0.5)(torch.ones(8, 16, 4, 3, 3))
    fields = y.flatten(2)
    assert torch.equal(fields.amin(2), fields.amax(2))
    assert set(fields[:, :, 0].unique().tolist()) == {0.0, 2.0}


# Batch norm, ReLU and max pooling on the CPU against torch's layers one after another.


@settings(deadline=None, max_examples=40)
@example(shape=(1, 5, 8), outputs=(1, 2), pool=1, relu=True, ties=True, dtype=torch.float64, seed=1)  # one is the mean
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 6), st.sampled_from([1, 2, 3, 8])),
    outputs=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    pool=st.integers(1, 3),
    relu=st.booleans(),
    ties=st.booleans(),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 10**6),
)
def test_norm_relu_pool_matches_the_layers(
    shape: tuple[int, int, int],
    outputs: tuple[int, int],
    pool: int,
    relu: bool,
    ties: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    sizes = (*shape, outputs[0] * pool, outputs[1] * pool)
    if shape[0] * shape[2] * sizes[3] * sizes[4] < 4:
        return  # with so few values, rounding changes the variance
    exact = features(*sizes, seed=seed)
    if ties:
        exact = exact.round()
    x = exact.to(dtype).requires_grad_()
    exact.requires_grad_()
    norm, reference = make_norm(shape[1]).to(dtype), make_norm(shape[1], nn.BatchNorm3d)
    relu = relu or pool > 1  # pools are fused after ReLU only
    y, expected = apply_fused(x, norm, relu, pool), apply_layers(exact, reference, relu, pool)
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    assert not y._is_view()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(y, expected), (x.grad, exact.grad)]
    pairs += [(getattr(norm, name).grad, getattr(reference, name).grad) for name in ("weight", "bias")]
    pairs += [(getattr(norm, name), getattr(reference, name)) for name in ("running_mean", "running_var")]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    for actual, value in pairs:
        torch.testing.assert_close(actual.double(), value, atol=tolerance, rtol=tolerance)
    assert norm.num_batches_tracked == reference.num_batches_tracked == 1


@RELU_AND_POOL
def test_first_and_second_derivatives_pass_gradcheck(relu: bool, pool: int) -> None:
    norm = make_norm(2)
    inputs = tuple(t.detach().requires_grad_() for t in (features(2, 2, 2, 4, 2), norm.weight, norm.bias))
    del norm.weight, norm.bias  # so that plain tensors can replace the parameters

    def apply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm.weight, norm.bias = weight, bias
        return apply_fused(x, norm, relu, pool)

    assert gradcheck(apply, inputs)
    assert gradgradcheck(apply, inputs)


@pytest.mark.parametrize("relu", [True, False])
def test_derivatives_with_a_residual_pass_gradcheck(relu: bool) -> None:
    norm = make_norm(2)
    x, residual = (features(2, 2, 2, 3, 2, seed).requires_grad_() for seed in (0, 1))

    def apply(x: Tensor, residual: Tensor) -> Tensor:
        return apply_fused(x, norm, relu, residual=residual)

    expected = make_norm(2, nn.BatchNorm3d)(x) + residual
    torch.testing.assert_close(apply(x, residual), expected.relu() if relu else expected)
    assert gradcheck(apply, (x, residual))
    assert gradgradcheck(apply, (x, residual))


def test_second_derivatives_of_the_weight_alone() -> None:
    norm, x = make_norm(2), features(2, 2, 2, 4, 4)
    (gradient,) = torch.autograd.grad(apply_fused(x, norm).square().sum(), norm.weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), norm.weight)
    assert gradient.shape == second.shape == (2,)


@RELU_AND_POOL
def test_incoming_gradients_are_not_changed(relu: bool, pool: int) -> None:
    y = apply_fused(features(2, 3, 4, 6, 6).requires_grad_(), make_norm(3), relu, pool)
    gradient = torch.randn_like(y)
    before = gradient.clone()
    y.backward(gradient)
    assert torch.equal(gradient, before)


def test_large_means_keep_precision() -> None:
    x = torch.randn(2, 6, 6, 3, 4).mul(0.01).add(100).permute(0, 3, 4, 1, 2)
    expected = make_norm(3, nn.BatchNorm3d)(x.double()).relu()
    torch.testing.assert_close(apply_fused(x, make_norm(3).float()).double(), expected, atol=5e-3, rtol=0)


def test_nan_reaches_the_output() -> None:
    x = features(1, 2, 4, 4, 4)
    x[0, 0, 0, 0, 0] = torch.nan
    y = apply_fused(x, make_norm(2), pool=2)
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


def test_relu_can_change_the_output_in_place() -> None:
    x, norm = features(2, 3, 4, 6, 6).requires_grad_(), make_norm(3)
    y = nn.ReLU(inplace=True)(norm(x))
    assert y.grad_fn is not None
    y.square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    make_norm(3, nn.BatchNorm3d)(expected).relu().square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_unsupported_inputs_are_left_to_torch() -> None:
    x = features(2, 3, 4, 6, 6)
    norm = make_norm(3)
    assert can_normalize_on_cpu(x, norm)
    for other, layer in (
        (x.float(), norm),
        (x.contiguous(), norm),
        (x.to("meta"), make_norm(3).to("meta")),
        (nn.Parameter(x), norm),  # a subclass of Tensor
        (x, make_norm(3).eval()),
        (x, rp.nn.GroupBatchNorm2d(3, affine=False).double()),
        (x, rp.nn.GroupBatchNorm2d(3, momentum=None).double()),
        (x.bfloat16(), make_norm(3).bfloat16()),
        (x[:1, :, :1, :1, :1], norm),
    ):
        assert not can_normalize_on_cpu(other, layer)


def dual_tangent(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(f(forward_ad.make_dual(x, x.cos()))).tangent


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vmap": lambda f, x: torch.func.vmap(f, randomness="error")(x[None])[0],
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (x.cos(),))[1],
    "dual": dual_tangent,
    "compiled": lambda f, x: torch.compile(f, fullgraph=True, backend="aot_eager")(x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # raised by torch in jvp
def test_torch_can_transform_batch_norm(transform: str) -> None:
    x = features(2, 3, 4, 6, 6)
    norm, reference = (make_norm(3, kind) for kind in (rp.nn.GroupBatchNorm2d, nn.BatchNorm3d))
    for layer in (norm, reference):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None  # transforms forbid changes in place
    actual, expected = (TRANSFORMS[transform](layer, x) for layer in (norm, reference))
    torch.testing.assert_close(actual, expected)
