"""Which path runs a convolution, batch norm, ReLU and a pool; all paths have the same results."""

import pytest
import torch
from kernel_cases import features, make_norm
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import fuse, norm
from rotopath.nn.fuse import can_fuse_lift, can_fuse_norm, can_fuse_pool, run_pool

pytestmark = pytest.mark.slow


class OnGpu:
    """A stand-in for features on a GPU."""

    is_cuda = True


def make_blur(size: int, blur: int) -> rp.nn.GroupAvgPool2d:
    return rp.nn.GroupAvgPool2d(size, blur=blur, power=2)


@pytest.mark.parametrize("build", [rp.models.mitosis, rp.models.nuclei, rp.models.tumor])
def test_networks_have_the_same_gradients_with_and_without_fusion(
    build: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    real = norm.norm_relu_pool_on_cpu
    monkeypatch.setattr(fuse, "norm_relu_pool_on_cpu", lambda *args, **pool: calls.append(pool) or real(*args, **pool))

    def run(with_fusion: bool) -> list[Tensor]:
        if not with_fusion:
            monkeypatch.setattr(fuse, "can_fuse_norm", lambda *_: False)
            monkeypatch.setattr(norm, "can_normalize_on_cpu", lambda *_: False)
        torch.manual_seed(0)
        net = build(orientations=4).double()
        y = net(torch.rand(2, 3, net.architecture.input_px, net.architecture.input_px, dtype=torch.float64))
        (y * torch.randn(y.shape, dtype=torch.float64)).sum().backward()
        return [y, *(parameter.grad for parameter in net.parameters()), *net.buffers()]

    fused = run(with_fusion=True)
    stages = len(calls)
    assert stages > 3
    for actual, expected in zip(fused, run(with_fusion=False), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-9, rtol=1e-7)
    assert len(calls) == stages, "the second run used the layers"


@pytest.mark.parametrize("pooling", ["max", "max-blur", "rms-blur"])
def test_only_a_plain_maximum_is_fused_on_the_cpu(pooling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pools = []

    def fused(x: Tensor, norm: nn.Module, pool: rp.nn.GroupMaxPool2d | None = None) -> Tensor:
        pools.append(1 if pool is None else pool.size)
        return norm(x).relu() if pool is None else pool(norm(x).relu())

    net = rp.models.tumor(2, pooling=pooling)
    x = torch.rand(2, 3, 88, 88)
    expected = net(x)
    monkeypatch.setattr(fuse, "can_fuse_norm", lambda *_: True)
    monkeypatch.setattr(fuse, "norm_relu_pool", fused)
    torch.testing.assert_close(net(x), expected)
    assert pools == ([2, 2, 3, 1, 1] if pooling == "max" else [1] * 5)


def test_all_pools_of_the_faithful_preset_are_fused_on_a_gpu() -> None:
    networks = [build(2, preset="faithful") for build in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor)]
    pools = [pool for net in networks for pool in net.pools if not isinstance(pool, nn.Identity)]
    assert len(pools) == 8
    assert all(can_fuse_pool(OnGpu(), pool) for pool in pools)
    hooked = make_blur(2, 5)
    hooked.register_forward_hook(lambda *_: None)
    for other in (
        rp.nn.GroupAvgPool2d(2),
        rp.nn.GroupAvgPool2d(2, blur=5),
        rp.nn.GroupAvgPool2d(2, 1, power=2),
        rp.nn.GroupAvgPool2d(3, 2, 1, power=2),
        make_blur(2, 7),
        hooked,
        nn.Identity(),
    ):
        assert not can_fuse_pool(OnGpu(), other)


def test_the_largest_fused_pool_has_an_argmax_that_fits_in_int8() -> None:
    assert (fuse.MAX_POOL_SIZE + 1) ** 2 > torch.iinfo(torch.int8).max >= fuse.MAX_POOL_SIZE**2 - 1
    assert can_fuse_pool(OnGpu(), rp.nn.GroupMaxPool2d(fuse.MAX_POOL_SIZE))
    assert not can_fuse_pool(OnGpu(), rp.nn.GroupMaxPool2d(fuse.MAX_POOL_SIZE + 1))


def test_pools_alone_run_as_layers_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from rotopath.nn.triton import blur_pool

    x = torch.randn(1, 2, 2, 4, 4)
    with monkeypatch.context() as without:
        without.setattr(blur_pool, "blur", None)
        torch.testing.assert_close(run_pool(x, make_blur(2, 5)), make_blur(2, 5)(x))
    with pytest.raises(ValueError, match="GroupAvgPool2d"):
        run_pool(x[..., :3], make_blur(2, 5))


def test_replaced_layers_are_not_fused() -> None:
    net = rp.models.tumor(2)
    stage, pool = net.stages[0], net.pools[0]
    x = stage.conv(torch.rand(2, 3, 88, 88))
    assert can_fuse_norm(x, stage.norm, stage.relu)
    assert can_fuse_pool(x, pool)
    assert not can_fuse_norm(x, stage.norm, nn.GELU())
    assert not can_fuse_norm(x, rp.nn.GroupNorm2d(1, x.shape[1]), stage.relu)
    others = (nn.Identity(), rp.nn.GroupAvgPool2d(2), rp.nn.GroupMaxPool2d(2, blur=3), rp.nn.GroupMaxPool2d(3, 2, 1))
    assert not any(can_fuse_pool(x, other) for other in others)
    assert not can_fuse_pool(x, make_blur(2, 5)), "on a GPU only"
    assert not can_fuse_lift(torch.rand(2, 3, 88, 88), *stage.children()), "on a GPU only"


def test_hooks_of_single_layers_are_called() -> None:
    net = rp.models.tumor(2)
    called = []
    layers = (net.stages[0].norm, net.stages[1].relu, net.pools[2])
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: called.append(layer))
    net(torch.rand(2, 3, 88, 88))
    assert called == list(layers)


def test_global_hooks_are_called() -> None:
    """Guards the private function of torch with which `fuse` looks for global hooks."""
    net = rp.models.tumor(2)
    called = []
    handle = nn.modules.module.register_module_forward_hook(lambda layer, *_: called.append(layer))
    try:
        net(torch.rand(2, 3, 88, 88))
    finally:
        handle.remove()
    expected = {*net.stages[0].children(), *net.stages[1].children(), net.pools[0], net.pools[1]}
    assert len(expected) == 8
    assert expected <= set(called)


@pytest.mark.parametrize(
    "register",
    [
        lambda layer: layer.register_forward_pre_hook(lambda *_: None),
        lambda layer: layer.register_forward_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_pre_hook(lambda *_: None),
        lambda layer: layer.register_full_backward_hook(lambda *_: None),
    ],
    ids=["forward pre", "forward", "backward pre", "backward"],
)
def test_every_kind_of_hook_is_found(register: object) -> None:
    """Guards the private attributes of torch's modules with which `fuse` looks for hooks."""
    layer = nn.ReLU()
    assert not fuse._has_hooks(layer)
    handle = register(layer)
    assert fuse._has_hooks(layer)
    handle.remove()
    assert not fuse._has_hooks(layer)


def test_uneven_windows_are_refused() -> None:
    x = features((2, 3, 4, 6, 6), 0, torch.float32)
    with pytest.raises(ValueError, match="Windows of 4 px do not cover features of 6 × 6 px evenly"):
        fuse.norm_relu_pool(x, make_norm(3), rp.nn.GroupMaxPool2d(4))
