"""Batch norm, ReLU and max pooling on the CPU, against torch's own layers one after another."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad, gradcheck, gradgradcheck

import rotopath as rp
from rotopath.nn import fuse
from rotopath.nn.cpu import can_normalise, norm_relu_pool
from rotopath.nn.fuse import can_fuse, can_pool


def features(batch: int, channels: int, n: int, height: int, width: int, seed: int = 0) -> Tensor:
    """(B, C, N, H, W) in float64, as they lie in memory behind a convolution; orientations have means of their own."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height, width, channels, n, generator=generator, dtype=torch.float64)
    x = 2 * x + 5 * torch.rand(channels, n, generator=generator, dtype=torch.float64)
    return x.permute(0, 3, 4, 1, 2)


def norm_of(channels: int, kind: type[nn.BatchNorm3d] = rp.nn.GroupBatchNorm2d) -> nn.BatchNorm3d:
    norm = kind(channels, momentum=0.3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.weight[1::2] *= -1  # turns features upside down
        norm.bias.copy_(torch.linspace(0.55, -0.45, channels))  # never 0: at a mean ReLU would be given 0 to rounding
    return norm


def one_after_another(x: Tensor, norm: nn.BatchNorm3d, relu: bool, pool: int) -> Tensor:
    y = norm(x)
    return nn.functional.max_pool3d(y.relu() if relu else y, (1, pool, pool))


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
def test_gives_what_the_layers_give(
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
        return  # too few values for a variance that rounding leaves alone
    exact = features(*sizes, seed=seed)
    if ties:
        exact = exact.round()
    x = exact.to(dtype).requires_grad_()
    exact.requires_grad_()
    norm, reference = norm_of(shape[1]).to(dtype), norm_of(shape[1], nn.BatchNorm3d)
    y, expected = norm_relu_pool(x, norm, relu, pool), one_after_another(exact, reference, relu, pool)
    assert y.permute(0, 3, 4, 1, 2).is_contiguous()
    assert not y._is_view()
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    (y * weights).sum().backward()
    (expected * weights).sum().backward()
    pairs = [(y, expected), (x.grad, exact.grad)]
    pairs += [(getattr(norm, name).grad, getattr(reference, name).grad) for name in ("weight", "bias")]
    pairs += [(getattr(norm, name), getattr(reference, name)) for name in ("running_mean", "running_var")]
    tolerance = 1e-10 if dtype == torch.float64 else 1e-3
    for got, wanted in pairs:
        torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
    assert norm.num_batches_tracked == reference.num_batches_tracked == 1


@pytest.mark.parametrize(("relu", "pool"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_gradients_and_their_gradients(relu: bool, pool: int) -> None:
    norm = norm_of(2)
    inputs = tuple(t.detach().requires_grad_() for t in (features(2, 2, 2, 4, 2), norm.weight, norm.bias))
    del norm.weight, norm.bias  # so that tensors can stand in their places

    def answer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        norm.weight, norm.bias = weight, bias
        return norm_relu_pool(x, norm, relu, pool)

    assert gradcheck(answer, inputs)
    assert gradgradcheck(answer, inputs)


def test_weights_alone_are_given_gradients() -> None:
    norm, x = norm_of(2), features(2, 2, 2, 4, 4)
    (gradient,) = torch.autograd.grad(norm_relu_pool(x, norm).square().sum(), norm.weight, create_graph=True)
    (second,) = torch.autograd.grad(gradient.sum(), norm.weight)
    assert gradient.shape == second.shape == (2,)


@pytest.mark.parametrize(("relu", "pool"), [(True, 1), (False, 1), (True, 2), (False, 2)])
def test_gradients_that_come_in_stay_as_they_are(relu: bool, pool: int) -> None:
    y = norm_relu_pool(features(2, 3, 4, 6, 6).requires_grad_(), norm_of(3), relu, pool)
    gradient = torch.randn_like(y)
    before = gradient.clone()
    y.backward(gradient)
    assert torch.equal(gradient, before)


def test_large_means_keep_their_digits() -> None:
    x = torch.randn(2, 6, 6, 3, 4).mul(0.01).add(100).permute(0, 3, 4, 1, 2)
    expected = norm_of(3, nn.BatchNorm3d)(x.double()).relu()
    torch.testing.assert_close(norm_relu_pool(x, norm_of(3).float()).double(), expected, atol=5e-3, rtol=0)


def test_what_is_no_number_is_not_hidden() -> None:
    x = features(1, 2, 4, 4, 4)
    x[0, 0, 0, 0, 0] = torch.nan
    y = norm_relu_pool(x, norm_of(2), pool=2)
    assert y[:, 0].isnan().all()
    assert y[:, 1].isfinite().all()


def test_relu_changes_what_the_layer_gives_in_place() -> None:
    x, norm = features(2, 3, 4, 6, 6).requires_grad_(), norm_of(3)
    y = nn.ReLU(inplace=True)(norm(x))
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "ReluBackward0"  # and no copy of a slice
    y.square().sum().backward()
    expected = x.detach().clone().requires_grad_()
    norm_of(3, nn.BatchNorm3d)(expected).relu().square().sum().backward()
    torch.testing.assert_close(x.grad, expected.grad)


def test_what_cannot_be_taken_goes_through_torch() -> None:
    x = features(2, 3, 4, 6, 6)
    norm = norm_of(3)
    assert can_normalise(x, norm)
    for other, layer in (
        (x.float(), norm),
        (x.contiguous(), norm),
        (x.to("meta"), norm_of(3).to("meta")),
        (nn.Parameter(x), norm),  # a class of its own, as tensors that only record are
        (x, norm_of(3).eval()),
        (x, rp.nn.GroupBatchNorm2d(3, affine=False).double()),
        (x, rp.nn.GroupBatchNorm2d(3, momentum=None).double()),
        (x.bfloat16(), norm_of(3).bfloat16()),
        (x[:1, :, :1, :1, :1], norm),
    ):
        assert not can_normalise(other, layer)


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
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own, in jvp
def test_what_torch_does_to_functions_it_can_do_to_the_layer(transform: str) -> None:
    x = features(2, 3, 4, 6, 6)
    norm, reference = (norm_of(3, kind) for kind in (rp.nn.GroupBatchNorm2d, nn.BatchNorm3d))
    for layer in (norm, reference):
        layer.running_mean = layer.running_var = layer.num_batches_tracked = None  # no transform changes in place
    got, expected = (TRANSFORMS[transform](layer, x) for layer in (norm, reference))
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei, rp.models.tumor])
def test_networks_learn_the_same_either_way(build: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    def gradients(fused: bool) -> list[Tensor]:
        if not fused:
            monkeypatch.setattr(fuse, "can_fuse", lambda *_: False)
            monkeypatch.setattr("rotopath.nn.cpu.can_normalise", lambda *_: False)
        torch.manual_seed(0)
        net = build(orientations=4).double()
        y = net(torch.rand(2, 3, net.architecture.input_px, net.architecture.input_px, dtype=torch.float64))
        (y * torch.randn(y.shape, dtype=torch.float64)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    for got, expected in zip(gradients(fuse=True), gradients(fuse=False), strict=True):
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=1e-7)


def test_networks_hide_nothing_from_those_who_look() -> None:
    net = rp.models.tumor(2)
    x = torch.rand(2, 3, 88, 88)
    seen = []
    layers = (net.stages[0].norm, net.stages[1].relu, net.pools[2])
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: seen.append(layer))
    net(x)
    assert seen == list(layers)
    seen.clear()
    handle = nn.modules.module.register_module_forward_hook(lambda layer, *_: seen.append(layer))
    net(x)
    handle.remove()
    assert {*layers, net.stages[0].relu, net.pools[0]} <= set(seen), "also of those who look at all layers"


def test_layers_that_were_replaced_are_used() -> None:
    net = rp.models.tumor(2)
    stage, pool = net.stages[0], net.pools[0]
    x = stage.conv(torch.rand(2, 3, 88, 88))
    assert can_fuse(x, stage.norm, stage.relu)
    assert can_pool(x, pool)
    assert not can_fuse(x, stage.norm, nn.GELU())
    assert not can_fuse(x, rp.nn.GroupNorm2d(1, x.shape[1]), stage.relu)
    others = (nn.Identity(), rp.nn.GroupAvgPool2d(2), rp.nn.GroupMaxPool2d(2, blur=3), rp.nn.GroupMaxPool2d(3, 2, 1))
    assert not any(can_pool(x, other) for other in others)
    assert not can_pool(x, rp.nn.GroupAvgPool2d(2, blur=5, power=2))  # on a GPU only
