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
from rotopath.nn.triton import rotate_kernels


def layer_of(reads: bool, *args: object, **options: object) -> rp.nn.LiftConv2d | rp.nn.GroupConv2d:
    layer = (rp.nn.GroupConv2d if reads else rp.nn.LiftConv2d)(*args, **{"bias": False} | options)
    return layer.to(DEVICE)


def turned_by(layer: rp.nn.LiftConv2d | rp.nn.GroupConv2d, dtype: torch.dtype) -> Tensor:
    return rotate_kernels.rotate(layer.weight, layer.rotation, layer.reflections, dtype)


@settings(deadline=None, max_examples=20)
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
    assert 2 * rotate_kernels.COLUMNS < 9 * 8
    assert 9 * 8 % rotate_kernels.COLUMNS
    got, expected = turned_by(layer, torch.float32), layer.kernels()
    torch.testing.assert_close(got, expected)
    gradient = torch.randn_like(got)
    (mine,) = torch.autograd.grad(got, layer.weight, gradient)
    (wanted,) = torch.autograd.grad(expected, layer.weight, gradient)
    torch.testing.assert_close(mine, wanted, atol=1e-4, rtol=1e-4)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Layers take features for such that kernels can be launched on; what was turned is listed."""
    calls: list[tuple[object, ...]] = []
    real = rotate_kernels.turn
    monkeypatch.setattr(rotate_kernels, "turn", lambda *given: calls.append(given) or real(*given))
    monkeypatch.setattr(gpu, "takes", lambda _: True)
    monkeypatch.setattr(gpu, "can_lift", lambda *_: False)
    return calls


@pytest.mark.parametrize("reads", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_turn_their_weights_with_it(
    reads: bool, groups: int, dtype: torch.dtype, as_on_a_gpu: list[tuple[object, ...]]
) -> None:
    layer = layer_of(reads, 2, 4, 3, 4, groups=groups).to(dtype)
    x = torch.rand(1, 2, *[4] * reads, 6, 6, device=DEVICE).to(dtype)
    with torch.no_grad():
        kernels = layer.double().kernels()
        expected = torch.nn.functional.conv2d(x.double().flatten(1, -3), kernels, groups=groups).unflatten(1, (4, 4))
        got = layer.to(dtype)(x)
    assert got.dtype == dtype
    assert len(as_on_a_gpu) == 1
    torch.testing.assert_close(got.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_how_weights_lie_in_memory_does_not_matter(as_on_a_gpu: list[tuple[object, ...]]) -> None:
    layer = layer_of(True, 2, 3, 3, 4)
    kernels = layer.kernels()
    layer.to(memory_format=torch.channels_last)
    assert not layer.weight.is_contiguous()
    torch.testing.assert_close(layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)), kernels)
    assert len(as_on_a_gpu) == 1


def test_gradients_have_gradients(as_on_a_gpu: list[tuple[object, ...]]) -> None:
    def second(layer: rp.nn.GroupConv2d, kernels: Tensor) -> Tensor:
        loss = kernels.pow(3).sum()
        (first,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        (found,) = torch.autograd.grad(first.pow(2).sum(), layer.weight)
        return found

    layer = layer_of(True, 2, 3, 3, 4)
    got = second(layer, layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)))
    assert len(as_on_a_gpu) == 1
    torch.testing.assert_close(got, second(layer, layer.kernels()), atol=1e-4, rtol=1e-4)


def test_weights_may_change_before_gradients_are_asked_for(as_on_a_gpu: list[tuple[object, ...]]) -> None:
    """As they may with torch's own: a linear map does not need what it was given."""
    layer = layer_of(True, 2, 3, 3, 4)
    total = layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    total.backward()
    assert len(as_on_a_gpu) == 1


def test_what_someone_else_makes_of_the_weights_counts(as_on_a_gpu: list[tuple[object, ...]]) -> None:
    class Doubled(rp.nn.GroupConv2d):
        def kernels(self) -> Tensor:
            return 2 * super().kernels()

    x = torch.zeros(1, 8, 5, 5, device=DEVICE)
    layer = Doubled(2, 3, 3, 4, bias=False).to(DEVICE)
    assert layer.kernels_for(x).equal(layer.kernels())
    layer = layer_of(True, 2, 3, 3, 4)
    layer.kernels = lambda: torch.ones(12, 8, 3, 3, device=DEVICE)
    assert layer.kernels_for(x).equal(layer.kernels())
    assert not as_on_a_gpu


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # of torch, for its dual numbers
def test_weights_that_the_kernels_do_not_know_are_left_to_torch() -> None:
    class Special(Tensor): ...

    x, weight = torch.zeros(1, 3, 9, 9), torch.zeros(2, 3, 21)
    assert gpu.can_turn(x, torch.nn.Parameter(weight), 5)
    assert gpu.can_turn(x, weight.half(), 5)
    for other in (weight.double(), weight.to("meta"), weight.as_subclass(Special)):
        assert not gpu.can_turn(x, other, 5)
    assert not gpu.can_turn(x, weight, gpu.LARGEST_KERNEL + 2)
    with torch.autograd.forward_ad.dual_level():
        assert not gpu.can_turn(x, torch.autograd.forward_ad.make_dual(weight, weight), 5)


def test_the_precision_is_that_of_autocast_or_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    assert gpu.precision(x) == torch.float16
    assert gpu.precision(x, weight) == torch.float32, "which torch has a sentence for"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    assert gpu.precision(x) == gpu.precision(x, weight) == torch.bfloat16
    assert gpu.precision(x.double(), weight.double()) == torch.float64
