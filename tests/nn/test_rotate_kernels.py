"""The kernel that rotates base weights against the einsum of `rotopath.group`; interpreted if there is no GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import DEVICE, TOLERANCE, features, use_kernels
from torch import Tensor

import rotopath as rp
from rotopath.nn import triton

pytest.importorskip("triton")
from rotopath.nn.triton import rotate_kernels

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing interpreted kernels would take minutes

Calls = list[tuple[object, ...]]


def make_layer(is_group: bool, *args: object, **options: object) -> rp.nn.LiftConv2d | rp.nn.GroupConv2d:
    layer = (rp.nn.GroupConv2d if is_group else rp.nn.LiftConv2d)(*args, **{"bias": False} | options)
    return layer.to(DEVICE)


def rotate(layer: rp.nn.LiftConv2d | rp.nn.GroupConv2d, dtype: torch.dtype) -> Tensor:
    return rotate_kernels.rotate(layer.weight, layer.rotation, layer.reflections, dtype)


@settings(deadline=None, max_examples=20)
@given(
    is_group=st.booleans(),
    in_channels=st.integers(1, 5),
    channels=st.integers(1, 3),
    n=st.sampled_from([1, 2, 3, 4, 6, 8]),
    side=st.sampled_from([1, 3, 5, triton.MAX_KERNEL_SIZE]),
    kernel=st.sampled_from(rp.group.KERNELS),
    reflections=st.booleans(),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
)
def test_kernels_and_gradients_match_the_rotation_map(
    is_group: bool,
    in_channels: int,
    channels: int,
    n: int,
    side: int,
    kernel: str,
    reflections: bool,
    dtype: torch.dtype,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    layer = make_layer(is_group, in_channels, channels, side, n, kernel=kernel, reflections=reflections)
    exact = make_layer(is_group, in_channels, channels, side, n, kernel=kernel, reflections=reflections).double()
    exact.load_state_dict(layer.state_dict())
    actual, expected = rotate(layer, dtype), exact.kernels()
    assert actual.dtype == dtype
    assert actual.permute(0, 2, 3, 1).is_contiguous()
    torch.testing.assert_close(actual.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    gradient = torch.randn(actual.shape, device=DEVICE).to(dtype)
    actual.backward(gradient)
    expected.backward(gradient.double())
    torch.testing.assert_close(layer.weight.grad.double(), exact.weight.grad, atol=1e-4, rtol=1e-4)


def test_inputs_in_several_tiles() -> None:
    """The last tile is not full."""
    layer = make_layer(True, 9, 2, 3, 8)
    assert 2 * rotate_kernels.COLUMNS < 9 * 8
    assert 9 * 8 % rotate_kernels.COLUMNS
    actual, expected = rotate(layer, torch.float32), layer.kernels()
    torch.testing.assert_close(actual, expected)
    gradient = torch.randn_like(actual)
    (actual_gradient,) = torch.autograd.grad(actual, layer.weight, gradient)
    (expected_gradient,) = torch.autograd.grad(expected, layer.weight, gradient)
    torch.testing.assert_close(actual_gradient, expected_gradient, atol=1e-4, rtol=1e-4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of the kernel, by layers that treat every input as if it were on a GPU."""
    calls: Calls = []
    real = rotate_kernels.compute
    monkeypatch.setattr(rotate_kernels, "compute", lambda *args: calls.append(args) or real(*args))
    monkeypatch.setattr(triton, "can_run_on", lambda _: True)
    monkeypatch.setattr(triton, "can_lift", lambda *_: False)
    return calls


@pytest.mark.parametrize("is_group", [False, True])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_use_the_kernel(is_group: bool, groups: int, dtype: torch.dtype, calls: Calls) -> None:
    layer = make_layer(is_group, 2, 4, 3, 4, groups=groups).to(dtype)
    x = torch.rand(1, 2, *[4] * is_group, 6, 6, device=DEVICE).to(dtype)
    with torch.no_grad():
        kernels = layer.double().kernels()
        expected = torch.nn.functional.conv2d(x.double().flatten(1, -3), kernels, groups=groups).unflatten(1, (4, 4))
        actual = layer.to(dtype)(x)
    assert actual.dtype == dtype
    assert len(calls) == 1
    torch.testing.assert_close(actual.double(), expected, atol=2 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_the_memory_layout_of_weights_does_not_matter(calls: Calls) -> None:
    layer = make_layer(True, 2, 3, 3, 4)
    kernels = layer.kernels()
    layer.to(memory_format=torch.channels_last)
    assert not layer.weight.is_contiguous()
    torch.testing.assert_close(layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)), kernels)
    assert len(calls) == 1


def test_second_derivatives(calls: Calls) -> None:
    def second_derivative(layer: rp.nn.GroupConv2d, kernels: Tensor) -> Tensor:
        loss = kernels.pow(3).sum()
        (first,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), layer.weight)
        return second

    layer = make_layer(True, 2, 3, 3, 4)
    actual = second_derivative(layer, layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)))
    assert len(calls) == 2, "for the kernels, and for the gradient of their gradient"
    torch.testing.assert_close(actual, second_derivative(layer, layer.kernels()), atol=1e-4, rtol=1e-4)


def test_weights_may_change_before_the_backward_pass(calls: Calls) -> None:
    """As with torch's own operations: the gradient of a linear map does not need its input."""
    layer = make_layer(True, 2, 3, 3, 4)
    total = layer.kernels_for(torch.zeros(1, 8, 5, 5, device=DEVICE)).sum()
    with torch.no_grad():
        layer.weight.add_(1)
    total.backward()
    assert len(calls) == 1


def test_overridden_kernels_are_used(calls: Calls) -> None:
    class Doubled(rp.nn.GroupConv2d):
        def kernels(self) -> Tensor:
            return 2 * super().kernels()

    x = torch.zeros(1, 8, 5, 5, device=DEVICE)
    layer = Doubled(2, 3, 3, 4, bias=False).to(DEVICE)
    assert layer.kernels_for(x).equal(layer.kernels())
    layer = make_layer(True, 2, 3, 3, 4)
    layer.kernels = lambda: torch.ones(12, 8, 3, 3, device=DEVICE)
    assert layer.kernels_for(x).equal(layer.kernels())
    assert not calls


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # raised by torch for dual numbers
def test_unsupported_weights_are_left_to_torch() -> None:
    class Subclass(Tensor): ...

    x, weight = torch.zeros(1, 3, 9, 9), torch.zeros(2, 3, 21)
    assert triton.can_rotate(x, torch.nn.Parameter(weight), 5)
    assert triton.can_rotate(x, weight.half(), 5)
    for other in (weight.double(), weight.to("meta"), weight.as_subclass(Subclass)):
        assert not triton.can_rotate(x, other, 5)
    assert not triton.can_rotate(x, weight, triton.MAX_KERNEL_SIZE + 2)
    with torch.autograd.forward_ad.dual_level():
        assert not triton.can_rotate(x, torch.autograd.forward_ad.make_dual(weight, weight), 5)


def test_convolutions_compute_in_the_dtype_of_autocast_or_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.zeros(1, dtype=torch.float16), torch.zeros(1)
    assert triton.compute_dtype(x) == torch.float16
    assert triton.compute_dtype(x, weight) == torch.float32, "torch raises an error for different data types"
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    assert triton.compute_dtype(x) == triton.compute_dtype(x, weight) == torch.bfloat16
    assert triton.compute_dtype(x.double(), weight.double()) == torch.float64


@pytest.mark.parametrize("options", [{}, {"bias": True, "padding": 1}, {"stride": 2, "groups": 2, "reflections": True}])
@pytest.mark.parametrize("is_channels_last", [True, False])
def test_group_convolution_on_a_gpu_gives_the_results_and_gradients_of_the_rotation_map(
    options: dict[str, object], is_channels_last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(True, 4, 6, 3, 4, **options)
    shape = (2, 4, 8 if layer.reflections else 4, 7, 7)
    x = features(shape, 0, torch.float32) if is_channels_last else torch.randn(shape, device=DEVICE)
    results = []
    for on_gpu in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "can_run_on", lambda _, on_gpu=on_gpu: on_gpu)
            inputs = x.clone().requires_grad_(), layer.weight, *([] if layer.bias is None else [layer.bias])
            y = layer(inputs[0])
            first = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
            second = torch.autograd.grad(first[0].square().sum(), inputs[:2])
            results.append((y, *first, *second))
    for expected, actual in zip(*results, strict=True):
        assert actual.shape == expected.shape
        torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-4)


def test_second_derivatives_with_weights_that_are_not_those_of_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in meta-learning, and with parametrizations, which compute the weights of each call."""
    layer, x = make_layer(True, 2, 2, 3, 4), features((1, 2, 4, 5, 5), 0, torch.float32)
    results = []
    for on_gpu in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(triton, "can_run_on", lambda _, on_gpu=on_gpu: on_gpu)
            weight = (2 * layer.weight).detach().requires_grad_()
            y = torch.func.functional_call(layer, {"weight": weight}, x)
            (first,) = torch.autograd.grad(y.pow(3).sum(), weight, create_graph=True)
            results.append(torch.autograd.grad(first.square().sum(), weight)[0])
    torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=1e-4)


def test_features_of_another_data_type_than_the_weights_are_refused_as_by_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use_kernels(monkeypatch)
    layer = make_layer(True, 2, 2, 3, 4)
    with pytest.raises(RuntimeError, match="type"):
        layer(features((1, 2, 4, 5, 5), 0, torch.float16))


def test_the_output_of_a_group_convolution_can_be_changed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernels(monkeypatch)
    layer, x = make_layer(True, 2, 2, 3, 4), features((1, 2, 4, 5, 5), 0, torch.float32)
    y = layer(x)
    expected = torch.autograd.grad(y.relu().sum(), layer.weight)
    y = layer(x)
    actual = torch.autograd.grad(y.relu_().sum(), layer.weight)
    torch.testing.assert_close(actual, expected)


class CompiledStub:
    """A kernel that counts how often it is compiled, and records its launches."""

    def __init__(self) -> None:
        self.arg_names = ["x", "size", "BLOCK"]
        self.compiled: Calls = []
        self.launched: Calls = []

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        def compile_and_launch(**arguments: object) -> Variant:
            self.compiled.append((grid, *arguments.values()))
            return Variant(self)

        return compile_and_launch


class Variant:
    def __init__(self, stub: CompiledStub) -> None:
        self.stub = stub

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return lambda *values: self.stub.launched.append((grid, *values))


def test_a_kernel_is_compiled_again_only_for_other_types_alignments_and_numbers() -> None:
    stub = CompiledStub()
    kernel, x = triton.LaunchableKernel(stub), torch.zeros(64, device=DEVICE)
    kernel[2, 3](BLOCK=8, x=x, size=64)
    kernel[5,](size=64, x=x.clone(), BLOCK=8)  # in any order
    assert len(stub.compiled) == 1
    ((grid, *values),) = stub.launched
    assert grid == (5, 1, 1)
    assert values[1:] == [64, 8]  # in the order of the kernel
    for others in ({"x": x.double()}, {"x": x[1:]}, {"size": 1}, {"BLOCK": 16}, {"x": None}):
        kernel[1,](**{"x": x, "size": 64, "BLOCK": 8} | others)
    assert len(stub.compiled) == 6
    assert len(stub.launched) == 1
