"""Base weights turned in one pass, against the einsum of `rotopath.group`; interpreted where there is no GPU."""

import pytest
import torch
from for_kernels import DEVICE, TOLERANCE
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import rotopath as rp
from rotopath.nn import gpu

pytest.importorskip("triton")
from rotopath.nn.kernels import turning


def layer_of(reads: bool, *args: object, **options: object) -> rp.nn.LiftConv2d | rp.nn.GroupConv2d:
    layer = (rp.nn.GroupConv2d if reads else rp.nn.LiftConv2d)(*args, **{"bias": False} | options)
    return layer.to(DEVICE)


def turned_by(layer: rp.nn.LiftConv2d | rp.nn.GroupConv2d, dtype: torch.dtype) -> Tensor:
    return turning.turn(layer.weight, layer.rotation, layer.reflections, dtype)


@settings(deadline=None, max_examples=30)
@given(
    reads=st.booleans(),
    read=st.integers(1, 5),
    channels=st.integers(1, 3),
    n=st.sampled_from([1, 2, 3, 4, 6, 8]),
    side=st.sampled_from([1, 3, 5, gpu.LARGEST_KERNEL]),
    kernel=st.sampled_from(rp.group.KERNELS),
    reflections=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_kernels_and_gradients_are_those_of_the_map(
    reads: bool,
    read: int,
    channels: int,
    n: int,
    side: int,
    kernel: str,
    reflections: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer = layer_of(reads, read, channels, side, n, kernel=kernel, reflections=reflections)
    exact = layer_of(reads, read, channels, side, n, kernel=kernel, reflections=reflections).double()
    exact.load_state_dict(layer.state_dict())
    got, expected = turned_by(layer, dtype), exact.kernels()
    assert got.dtype == dtype
    assert got.permute(0, 2, 3, 1).is_contiguous()
    torch.testing.assert_close(got.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    gradient = torch.randn(got.shape, device=DEVICE).to(dtype)
    got.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, atol=1e-4, rtol=1e-4)


def test_several_tiles_of_inputs() -> None:
    """The last of them is not full."""
    layer = layer_of(True, 9, 2, 3, 8)
    assert 2 * turning.COLUMNS < 9 * 8
    assert 9 * 8 % turning.COLUMNS
    got, expected = turned_by(layer, torch.float32), layer.kernels()
    torch.testing.assert_close(got, expected)
    gradient = torch.randn_like(got)
    (mine,) = torch.autograd.grad(got, layer.weight, gradient)
    (wanted,) = torch.autograd.grad(expected, layer.weight, gradient)
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("reads", [False, True])
def test_layers_turn_their_weights_with_it(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(reads, 2, 3, 3, 4, groups=1)
    x = torch.rand(1, 2, *[4] * reads, 6, 6, device=DEVICE)
    expected = layer(x)
    calls = []
    real = turning.turn
    monkeypatch.setattr(turning, "turn", lambda *given: calls.append(given) or real(*given))
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "can_turn", lambda *_: True)
    torch.testing.assert_close(layer(x), expected)
    assert len(calls) == 1


def test_what_someone_else_makes_of_the_weights_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    class Doubled(rp.nn.GroupConv2d):
        def kernels(self) -> Tensor:
            return 2 * super().kernels()

    layer, x = Doubled(2, 3, 3, 4, bias=False), torch.rand(1, 2, 4, 6, 6)
    expected = layer(x)
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "can_turn", lambda *_: True)
    assert layer(x).equal(expected)


@pytest.mark.skipif(DEVICE.type == "cuda", reason="asks for what a CPU has")
def test_weights_elsewhere_are_left_to_torch() -> None:
    assert not gpu.can_turn(torch.nn.Parameter(torch.zeros(2, 3, 21)), 5)
