"""Fused layers have the values and gradients of separate layers, in any module and whatever reads their outputs."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import rotopath as rp
from rotopath.models.backbones import resnet18, unet
from rotopath.nn import fuse, norm
from rotopath.nn.fuse import Deferred
from rotopath.nn.pool import MAX_POOL_SIZE, is_fusible_max, is_fusible_rms

pytestmark = pytest.mark.slow

Result = list[Tensor]


def features(*shape: int, seed: int = 0) -> Tensor:
    """Return random channels-last features (B, C, N, H, W) in float64 that require gradients."""
    batch, channels, n, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height, width, channels, n, generator=generator, dtype=torch.float64)
    return x.permute(0, 3, 4, 1, 2).requires_grad_()


def make_norm(channels: int = 3) -> rp.nn.GroupBatchNorm2d:
    layer = rp.nn.GroupBatchNorm2d(channels).double()
    nn.init.uniform_(layer.weight, -1, 1)
    nn.init.uniform_(layer.bias, -1, 1)
    return layer


def make_stack() -> nn.Sequential:
    """Return layers as a user would stack them."""
    return nn.Sequential(
        rp.nn.LiftConv2d(3, 4, 3, 4, padding=1, bias=False),
        rp.nn.GroupBatchNorm2d(4),
        nn.ReLU(inplace=True),
        rp.nn.GroupMaxPool2d(2),
        rp.nn.GroupConv2d(4, 5, 3, 4, padding=1),
        rp.nn.GroupBatchNorm2d(5),
        nn.SiLU(),
        rp.nn.GroupAvgPool2d(2, blur=3, power=2),
        rp.nn.GroupConv2d(5, 5, 1, 4),
        rp.nn.GroupBatchNorm2d(5),
        nn.ReLU(),
        rp.nn.Project("max"),
        nn.Conv2d(5, 2, 1),
    )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {  # with the side of an image
    "mitosis": (lambda: rp.models.mitosis(4), 68),
    "nuclei": (lambda: rp.models.nuclei(4), 60),
    "tumor": (lambda: rp.models.tumor(4), 88),
    "faithful": (lambda: rp.models.nuclei(4, preset="faithful"), 68),
    "stack": (make_stack, 16),
    "resnet": (lambda: rp.equivariant(resnet18(2, 16), 4, keep="maps", strides="pool"), 64),
    "unet": (lambda: rp.equivariant(unet(2, 8, 3), 4, keep="maps"), 16),
}


def compute(network: Callable[[], nn.Module], side: int, training: bool) -> Result:
    """Return outputs, gradients, running statistics, and outputs in evaluation without gradients."""
    torch.manual_seed(0)
    net = network().double().train(training)
    x = torch.rand(2, 3, side, side, dtype=torch.float64, requires_grad=True)
    y = net(x)
    (y * torch.randn(y.shape, dtype=torch.float64)).sum().backward()
    with torch.no_grad():
        evaluated = net.eval()(x)
    return [y, x.grad, *(parameter.grad for parameter in net.parameters()), *net.buffers(), evaluated]


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_networks_have_the_same_results_with_and_without_fusion(
    name: str, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = norm._apply_on_cpu
    monkeypatch.setattr(norm, "_apply_on_cpu", lambda *args: calls.append(args) or real(*args))
    fused = compute(*NETWORKS[name], training)
    assert bool(calls) == training, "on the CPU, layers are fused in training"
    with rp.nn.disable_fusion():
        separate = compute(*NETWORKS[name], training)
    for actual, expected in zip(fused, separate, strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-6)


# What is fused, counted by the calls that apply a batch norm with what follows.


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, str, int]]:
    """For each call: whether there is a residual, the activation, and the side of the pool."""
    calls = []
    real = norm._apply_on_cpu

    def apply(x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, *args: Any) -> Any:
        calls.append((residual is not None, args[-1].activation, args[-1].pool))
        return real(x, weight, bias, residual, *args)

    monkeypatch.setattr(norm, "_apply_on_cpu", apply)
    return calls


def test_a_network_of_the_paper_takes_one_pass_for_each_stage(passes: list[object]) -> None:
    rp.models.tumor(2)(torch.rand(2, 3, 88, 88)).sum()
    assert passes == [(False, "relu", size) for size in (2, 2, 3, 1, 1)]


def test_features_for_a_pool_and_a_skip_connection_are_computed_once(passes: list[object]) -> None:
    rp.equivariant(unet(2, 8, 2), 4, keep="maps")(torch.rand(2, 3, 16, 16)).sum()
    assert passes == [(False, "relu", 1)] * 6


def test_a_residual_block_takes_two_passes(passes: list[object]) -> None:
    net = rp.equivariant(resnet18(2, 16), 4, keep="maps", strides="pool")
    net(torch.rand(2, 3, 64, 64)).sum()
    assert passes.count((True, "relu", 1)) == 8
    assert passes.count((False, "relu", 1)) == 9
    assert passes.count((False, "none", 1)) == 3, "of the shortcuts"


@pytest.mark.parametrize(
    ("operation", "expected"),
    [
        (lambda x, _: x.relu(), (False, "relu", 1)),
        (lambda x, _: torch.relu_(x), (False, "relu", 1)),
        (lambda x, _: F.relu(x, inplace=True), (False, "relu", 1)),
        (lambda x, _: nn.ReLU(inplace=True)(x), (False, "relu", 1)),
        (lambda x, _: rp.nn.GroupMaxPool2d(2)(x.relu()), (False, "relu", 2)),
        (lambda x, r: (x + r).relu(), (True, "relu", 1)),
        (lambda x, _: F.silu(x), (False, "none", 1)),  # on a GPU only
        (lambda x, _: rp.nn.GroupMaxPool2d(2)(x), (False, "none", 1)),
        (lambda x, _: rp.nn.GroupMaxPool2d(2, blur=3)(x.relu()), (False, "relu", 1)),
        (lambda x, _: rp.nn.GroupAvgPool2d(2, blur=3, power=2)(x.relu()), (False, "relu", 1)),  # on a GPU only
        (lambda x, _: x.sigmoid().relu(), (False, "none", 1)),
        (lambda x, r: torch.add(x, r, alpha=2).relu(), (False, "none", 1)),
        (lambda x, r: (x + r[:1]).relu(), (False, "none", 1)),  # of another shape
        (lambda x, r: (x + r.contiguous()).relu(), (False, "none", 1)),  # in another layout
        (lambda x, _: x.relu().relu(), (False, "relu", 1)),
    ],
)
def test_the_operations_in_the_table_are_fused(
    operation: Callable[[Tensor, Tensor], Tensor], expected: object, passes: list[object]
) -> None:
    x, residual = features(2, 3, 4, 6, 6), features(2, 3, 4, 6, 6, seed=1)
    layer = make_norm()
    y = fuse.finish(operation(layer(x), residual))
    assert passes == [expected]
    with rp.nn.disable_fusion():
        torch.testing.assert_close(y, operation(layer(x), residual))


def test_the_largest_fused_pool_has_an_argmax_that_fits_in_int8() -> None:
    assert (MAX_POOL_SIZE + 1) ** 2 > torch.iinfo(torch.int8).max >= MAX_POOL_SIZE**2 - 1
    assert is_fusible_max(rp.nn.GroupMaxPool2d(MAX_POOL_SIZE))
    assert not is_fusible_max(rp.nn.GroupMaxPool2d(MAX_POOL_SIZE + 1))
    for other in (rp.nn.GroupMaxPool2d(2, blur=3), rp.nn.GroupMaxPool2d(3, 2, 1), rp.nn.GroupAvgPool2d(2), nn.ReLU()):
        assert not is_fusible_max(other)


def test_all_pools_of_the_faithful_preset_can_be_fused_on_a_gpu() -> None:
    networks = [build(2, preset="faithful") for build in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor)]
    pools = [pool for net in networks for pool in net.pools if not isinstance(pool, nn.Identity)]
    assert len(pools) == 8
    assert all(is_fusible_rms(pool) for pool in pools)
    for options in ({"blur": 5}, {"stride": 1, "power": 2}, {"blur": 7, "power": 2}, {"padding": 1, "power": 2}):
        assert not is_fusible_rms(rp.nn.GroupAvgPool2d(2, **options))


def test_uneven_windows_are_refused() -> None:
    with pytest.raises(ValueError, match="windows of 4 px at stride 4 do not cover"):
        rp.nn.GroupMaxPool2d(4)(make_norm()(features(2, 3, 4, 6, 6)).relu())


# Deferred tensors, read by any code

STEPS: dict[str, Callable[[list[Tensor]], Tensor]] = {  # each is called with all tensors so far, the newest last
    "relu": lambda t: t[-1].relu(),
    "relu in place": lambda t: torch.relu_(t[-1]),
    "add": lambda t: t[-1] + t[0],
    "add two": lambda t: t[-1] + t[len(t) // 2],
    "add in place": lambda t: t[-1].add_(t[0]),
    "add a number in place": lambda t: t[-1].add_(0.5),
    "scale in place": lambda t: t[-1].mul_(0.5),
    "norm": lambda t: make_norm()(t[-1]),
    "negate": lambda t: -t[-1],
    "view": lambda t: t[-1].flatten(1, 2).unflatten(1, (3, 4)),
    "detach and add": lambda t: t[-1] + t[-1].detach(),
    "clone": lambda t: t[-1].clone(),
    "return to an earlier one": lambda t: t[len(t) // 2] * 1.5,
}


@settings(deadline=None, max_examples=150)
@given(steps=st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=7), with_gradients=st.booleans())
def test_random_programs_have_the_same_results(steps: list[str], with_gradients: bool) -> None:
    def run() -> Result | str:
        torch.manual_seed(0)
        leaf = features(2, 3, 4, 4, 4)
        tensors = [leaf * 1.0]
        try:
            with torch.set_grad_enabled(with_gradients):
                tensors.append(make_norm()(tensors[0]))
                for step in steps:
                    tensors.append(STEPS[step](tensors))
                total = sum((i + 1) * x.square().sum() for i, x in enumerate(tensors))
            if with_gradients:
                total.backward()
        except RuntimeError:
            return "torch refuses in-place changes of what a gradient needs"
        return [x.detach() for x in tensors] + ([leaf.grad] if with_gradients else [])

    fused = run()
    with rp.nn.disable_fusion():
        separate = run()
    if isinstance(fused, str) or isinstance(separate, str):
        assert isinstance(fused, str) or with_gradients, "without gradients, torch allows all changes"
        return
    for actual, expected in zip(fused, separate, strict=True):
        torch.testing.assert_close(actual, expected)


def save_and_load(x: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(x.detach(), file)
    file.seek(0)
    loaded: Tensor = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0, 1],
        lambda x: torch.stack([x, x]),
        lambda x: torch.from_numpy(x.detach().numpy()),
        lambda x: torch.as_tensor(x.tolist()),
        lambda x: copy.deepcopy(x.detach()),
        save_and_load,
        lambda x: x.to(torch.float32),
        lambda x: torch.where(x > 0, x, 0),
        lambda x: x.new_ones(2) * x.sum(),
        lambda x: torch.cat([x, x], dim=1),
        lambda x: F.dropout(x, 0.0),
        lambda x: torch.einsum("bcnhw->bc", x),
        lambda x: torch.zeros(2, 3, 4, 6, 6, dtype=torch.float64).copy_(x),
        lambda x: nn.Conv3d(3, 2, 1).double().requires_grad_(False)(x) * 0 + x.mean(),
        lambda x: rp.nn.Project("max")(x),
        lambda x: torch.utils.dlpack.from_dlpack(x.detach()),
        lambda x: x.unbind()[1],
        lambda x: next(iter(x)),
        lambda x: torch.ones(6, 6, dtype=torch.float64) @ x,
        lambda x: torch.utils.data.default_collate([x, x]),
        lambda x: torch.vmap(torch.sin)(x),
    ],
)
def test_any_code_gets_the_values(read: Callable[[Tensor], Tensor]) -> None:
    layer, x = make_norm(), features(2, 3, 4, 6, 6)
    y = layer(x).relu()
    assert type(y) is Deferred
    actual = read(y)
    assert type(actual) is Tensor
    with rp.nn.disable_fusion():
        torch.testing.assert_close(actual, read(layer(x).relu()), check_dtype=True)
    assert repr(y) == repr(fuse.finish(y))


def test_shape_and_type_are_known_without_computing(passes: list[object]) -> None:
    y = make_norm()(features(2, 3, 4, 6, 6)).relu()
    assert isinstance(y, Tensor)
    assert (y.shape, y.dtype, y.ndim, y.numel(), len(y), y.requires_grad) == (
        (2, 3, 4, 6, 6),
        torch.float64,
        5,
        864,
        2,
        True,
    )
    assert not passes
    assert y.stride() == fuse.finish(y).stride()
    assert len(passes) == 1
    assert y.is_contiguous() == fuse.finish(y).is_contiguous()
    assert len(passes) == 1, "it is computed once"


def test_an_input_that_was_changed_in_place_is_refused() -> None:
    x = features(2, 3, 4, 6, 6).detach()
    y = make_norm()(x)
    x.zero_()
    with pytest.raises(RuntimeError, match=r"Call rp\.nn\.finish\(output\) before the change"):
        y.sum()
    x = features(2, 3, 4, 6, 6).detach()
    y = rp.nn.finish(make_norm()(x))
    expected = y.clone()
    x.zero_()
    assert torch.equal(y, expected)


def test_gradients_of_intermediate_features_and_hooks_on_them() -> None:
    def run() -> Result:
        torch.manual_seed(0)
        layer, seen = make_norm(), []
        y = layer(features(2, 3, 4, 6, 6))
        z = y.relu()
        z.retain_grad()
        z.register_hook(seen.append)
        (z * 3).square().sum().backward()
        (alone,) = torch.autograd.grad(layer(features(2, 3, 4, 6, 6)).relu().square().sum(), layer.weight)
        return [z.grad, *seen, alone]

    fused = run()
    with rp.nn.disable_fusion():
        for actual, expected in zip(fused, run(), strict=True):
            torch.testing.assert_close(actual, expected)


class Sine(torch.autograd.Function):
    """A user's autograd function, for which torch does not call `Deferred.__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0].cos()


class Layers(torch.autograd.Function):
    """A user's autograd function that returns the output of layers, with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: nn.Module) -> Tensor:  # noqa: ARG004
        return layers(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return 7 * gradients[0], None


@pytest.mark.parametrize(
    "apply",
    [
        lambda layers, x: Sine.apply(layers(x)),
        lambda layers, x: Layers.apply(x, layers),
        lambda layers, x: torch.relu_(Layers.apply(x, layers) * 1.5),
        lambda layers, x: checkpoint(layers, x, use_reentrant=True),
        lambda layers, x: checkpoint(layers, x, use_reentrant=False),
        lambda layers, x: checkpoint(lambda x: layers(x) + x, x, use_reentrant=False),
        lambda layers, x: layers(x) + torch.no_grad()(layers)(x),
        lambda layers, x: torch.enable_grad()(layers)(x),
    ],
)
def test_autograd_functions_and_checkpoints(apply: Callable[[nn.Module, Tensor], Tensor]) -> None:
    def run() -> Result:
        torch.manual_seed(0)
        layers = nn.Sequential(make_norm(), nn.ReLU(), rp.nn.GroupConv2d(3, 3, 3, 4, padding=1).double(), make_norm())
        x = features(2, 3, 4, 6, 6)
        y = apply(layers, x)
        (y.square() + y).sum().backward()
        return [y.detach(), x.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    fused = run()
    with rp.nn.disable_fusion():
        for actual, expected in zip(fused, run(), strict=True):
            torch.testing.assert_close(actual, expected)


def test_second_derivatives() -> None:
    def run() -> Result:
        torch.manual_seed(0)
        layers, x = nn.Sequential(make_norm(), nn.ReLU(), rp.nn.GroupMaxPool2d(2)), features(2, 3, 4, 4, 4)
        loss = (layers(x) + layers(x.flip(-1)).detach()).pow(3).sum()
        first = torch.autograd.grad(loss, (x, *layers.parameters()), create_graph=True)
        return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), (x, *layers.parameters()))]

    fused = run()
    with rp.nn.disable_fusion():
        for actual, expected in zip(fused, run(), strict=True):
            torch.testing.assert_close(actual, expected)


# Where nothing is deferred


def test_hooks_of_single_layers_get_tensors() -> None:
    net = make_stack()
    outputs = []
    layers = (net[1], net[2], net[3], net[5], net[10])
    for layer in layers:
        layer.register_forward_hook(lambda layer, _, output: outputs.append((layer, type(output) is Tensor)))
    net(torch.rand(2, 3, 16, 16))
    assert [layer for layer, _ in outputs] == list(layers)
    assert outputs[0][1]


def test_global_hooks_get_tensors() -> None:
    """Guards the private function of torch with which `fuse` looks for global hooks."""
    outputs = []
    handle = nn.modules.module.register_module_forward_hook(lambda *args: outputs.append(type(args[-1])))
    try:
        rp.models.tumor(2)(torch.rand(2, 3, 88, 88))
    finally:
        handle.remove()
    assert len(outputs) > 20
    assert set(outputs) == {Tensor}


@pytest.mark.parametrize(
    "register",
    [
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
    ],
    ids=["forward", "backward pre", "backward"],
)
def test_every_kind_of_hook_on_outputs_is_found(register: Callable[[nn.Module], Any]) -> None:
    """Guards the private attributes of torch's modules with which `fuse` looks for hooks."""
    layer = make_norm()
    assert type(layer(features(2, 3, 4, 6, 6))) is Deferred
    handle = register(layer)
    assert fuse.has_forward_hooks(layer)
    handle.remove()
    assert type(layer(features(2, 3, 4, 6, 6))) is Deferred


def test_dispatch_modes_and_inference_mode_get_tensors() -> None:
    """Guards the private function of torch with which `fuse` looks for dispatch modes."""
    layer, x = make_norm(), features(2, 3, 4, 6, 6)
    with FlopCounterMode(display=False):
        assert type(layer(x)) is Tensor
    with torch.inference_mode():
        assert type(layer(features(2, 3, 4, 6, 6))) is Tensor
    with rp.nn.disable_fusion():
        assert type(layer(x)) is Tensor
    assert type(layer(x)) is Deferred


def test_torch_can_compile_transform_and_export_stacked_layers() -> None:
    torch.manual_seed(0)
    net, x = make_stack().eval(), torch.rand(2, 3, 16, 16)
    expected = net(x)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.export.export(net, (x,)).module()(x), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(torch.func.vmap(net)(x[:, None])[:, 0], expected, atol=1e-5, rtol=1e-4)
