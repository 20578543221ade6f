"""Lifting and group convolutions against torch's convolutions, their definition, and wrong arguments and inputs."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rotopath as rp
from rotopath import group


def test_four_orientations_are_rotations_of_one_kernel_by_90_degrees() -> None:
    lift = rp.nn.LiftConv2d(1, 1, 3, 4)
    x = torch.randn(1, 1, 9, 9)
    kernel = lift.weight.detach().view(1, 1, 3, 3)
    for i, lifted in enumerate(lift(x).unbind(dim=2)):
        expected = F.conv2d(x, torch.rot90(kernel, i, (-2, -1)), lift.bias)
        torch.testing.assert_close(lifted, expected)


def test_one_orientation_is_an_ordinary_convolution_on_the_disc() -> None:
    conv = rp.nn.GroupConv2d(3, 4, 5, 1)
    kernel = torch.zeros(4, 3, 5, 5)
    kernel[:, :, group.disc_mask(5)] = conv.weight.detach()[:, :, 0]
    x = torch.randn(2, 3, 1, 12, 12)
    torch.testing.assert_close(conv(x)[:, :, 0], F.conv2d(x[:, :, 0], kernel, conv.bias))


def test_group_convolution_follows_the_definition() -> None:
    """Σ_c Σ_θ' of ordinary correlations with the rotated slice θ' - θ."""
    n = 8
    conv = rp.nn.GroupConv2d(2, 3, 5, n, dtype=torch.float64)
    nn.init.normal_(conv.bias)
    x = torch.randn(2, 2, n, 11, 13, dtype=torch.float64)
    rotation = group.rotation_map(5, n)
    expected = torch.zeros(2, 3, n, 7, 9, dtype=torch.float64)
    for theta in range(n):
        for theta_in in range(n):
            kernel = (conv.weight.detach()[:, :, (theta_in - theta) % n] @ rotation[theta].T).view(3, 2, 5, 5)
            expected[:, :, theta] += F.conv2d(x[:, :, theta_in], kernel)
        expected[:, :, theta] += conv.bias.detach()[:, None, None]
    torch.testing.assert_close(conv(x), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2, "padding": 2},
        {"padding": "same", "dilation": 2},
        {"padding": "valid"},
        {"groups": 2},
        {"padding": 2, "padding_mode": "reflect"},
        {"padding": 2, "padding_mode": "replicate"},
        {"padding": "same", "padding_mode": "circular"},
    ],
    ids=str,
)
def test_options_have_the_meaning_of_torch(options: dict[str, object]) -> None:
    n = 4
    conv = rp.nn.GroupConv2d(4, 6, 5, n, **options)
    nn.init.normal_(conv.bias)
    torch_conv = nn.Conv2d(4 * n, 6 * n, 5, **options)
    with torch.no_grad():
        torch_conv.weight.copy_(conv.kernels())
        torch_conv.bias.copy_(conv.bias.repeat_interleave(n))
    x = torch.randn(2, 4, n, 13, 13)
    torch.testing.assert_close(conv(x).flatten(1, 2), torch_conv(x.flatten(1, 2)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("padding_mode", ["zeros", "reflect"])
@pytest.mark.parametrize(("kernel_size", "padding", "pool"), [(3, 1, 2), (7, 3, 2), (5, 2, 3), (1, 0, 4)])
@pytest.mark.parametrize("layer", [rp.nn.LiftConv2d, rp.nn.GroupConv2d])
def test_a_pool_in_the_layer_equals_a_mean_pool_after_it(
    layer: type[nn.Module], kernel_size: int, padding: int, pool: int, padding_mode: str
) -> None:
    options = {"padding": padding, "padding_mode": padding_mode, "dtype": torch.float64}
    conv, pooled = layer(4, 6, kernel_size, 8, **options), layer(4, 6, kernel_size, 8, pool=pool, **options)
    nn.init.normal_(conv.bias)
    pooled.load_state_dict(conv.state_dict())
    x = torch.randn(2, 4, *([8] if layer is rp.nn.GroupConv2d else []), 12, 24, dtype=torch.float64)
    torch.testing.assert_close(pooled(x), rp.nn.GroupAvgPool2d(pool)(conv(x)))
    network = nn.Sequential(*([] if layer is rp.nn.LiftConv2d else [rp.nn.LiftConv2d(3, 4, 3, 8, padding=1)]), pooled)
    images = torch.randn(2, 4 if layer is rp.nn.LiftConv2d else 3, 12, 24, dtype=torch.float64)
    network = network.double().eval()
    torch.testing.assert_close(rp.freeze(network)(images), network(images))


@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize("orientations", [1, 2, 3, 8])
@pytest.mark.parametrize("max_twisted", [0, 2**18])
def test_kernels_on_the_cpu_equal_those_of_every_device(
    orientations: int, reflections: bool, max_twisted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group.kernel_families, "MAX_TWISTED", max_twisted)
    order = group.order(orientations, reflections)
    weight = torch.randn(2, 3, order, 9, dtype=torch.float64, requires_grad=True)
    rotation = group.rotation_map(3, orientations, "bilinear", reflections)
    kernels = group.write_group_kernels(weight.detach(), rotation, reflections)
    expected = group.group_kernels(weight, rotation, reflections)
    assert kernels.stride() == expected.stride()
    torch.testing.assert_close(kernels, expected.detach())
    before = kernels.data_ptr()
    overwritten = group.write_group_kernels(-weight.detach(), rotation, reflections, out=kernels)
    assert overwritten.data_ptr() == before
    torch.testing.assert_close(overwritten, -expected.detach())
    d_kernels = torch.randn_like(expected)
    gradient = group.group_kernels_gradient(d_kernels, rotation, reflections)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, weight, d_kernels)[0])
    assert gradient.stride() == weight.stride()


@pytest.mark.parametrize("options", [{}, {"padding": 1, "stride": 2}, {"groups": 2, "reflections": True}, {"pool": 2}])
def test_convolution_on_the_cpu_passes_gradcheck(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    conv = rp.nn.GroupConv2d(2, 2, 3, 4, dtype=torch.float64, **options)
    n = conv.order
    x = torch.randn(1, 2, n, 4 + ("stride" in options), 4 + ("stride" in options), dtype=torch.float64)

    def apply(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.func.functional_call(conv, {"weight": weight, "bias": bias}, x)

    inputs = [value.detach().requires_grad_() for value in (x, conv.weight, conv.bias)]
    assert torch.autograd.gradcheck(apply, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(apply, inputs, fast_mode=True)
    assert conv._stored is not None, "and the layer has kept the memory of its kernels"


def test_gradients_are_those_of_the_weights_in_the_forward_pass() -> None:
    """The layer keeps the memory of its kernels, and a second forward pass overwrites them."""
    conv, x = rp.nn.GroupConv2d(2, 3, 3, 4), torch.randn(1, 2, 4, 6, 6, requires_grad=True)
    weights = [torch.randn_like(conv.weight, requires_grad=True) for _ in range(2)]
    outputs = [torch.func.functional_call(conv, {"weight": weight}, x) for weight in weights]
    for weight, output in zip(weights, outputs, strict=True):
        expected = convolve(x, weight, conv)
        torch.testing.assert_close(output, expected)
        gradients, expected_gradients = (torch.autograd.grad(y.square().sum(), (x, weight)) for y in (output, expected))
        torch.testing.assert_close(gradients, expected_gradients)


def test_layers_train_after_inference_mode_and_in_it() -> None:
    conv, x = rp.nn.GroupConv2d(2, 3, 3, 4), torch.randn(1, 2, 4, 6, 6)
    with torch.inference_mode():
        expected = conv(x)
    for layer in (conv, conv.eval(), copy.deepcopy(conv).train()):
        y = layer(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
    with torch.inference_mode():
        torch.testing.assert_close(conv(x.clone()), expected)


def convolve(x: Tensor, weight: Tensor, conv: rp.nn.GroupConv2d) -> Tensor:
    """Return the output of `conv` with other base weights, computed by torch."""
    kernels = group.group_kernels(weight, conv.rotation.to(weight))
    y = F.conv2d(x.flatten(1, 2), kernels, conv.bias.repeat_interleave(conv.order))
    return y.unflatten(1, (conv.out_channels, conv.order))


def test_evaluation_without_gradients_rotates_kernels_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    write = group.write_group_kernels
    monkeypatch.setattr(group, "write_group_kernels", lambda *args, **kwargs: calls.append(1) or write(*args, **kwargs))
    conv, x = rp.nn.GroupConv2d(2, 3, 3, 4).eval(), torch.randn(1, 2, 4, 6, 6)
    with torch.no_grad():
        first = conv(x)
        assert torch.equal(conv(x), first)
        assert len(calls) == 1
        for change in (
            lambda: conv.weight.data.mul_(2),  # torch's version counters do not see this change
            lambda: conv.load_state_dict({name: value + 1 for name, value in conv.state_dict().items()}),
            lambda: conv.double(),
            lambda: setattr(conv, "weight", nn.Parameter(torch.randn_like(conv.weight))),
        ):
            change()
            x = x.to(conv.weight)
            expected = convolve(x, conv.weight, conv)
            calls.clear()
            for _ in range(2):
                torch.testing.assert_close(conv(x), expected)
            assert len(calls) == 1
    conv.train()(x)
    conv(x)
    assert len(calls) == 3, "and in training, they are computed at every call"
    assert copy.deepcopy(conv)._stored is None
    assert "_stored" not in str(conv.state_dict())


def test_the_bias_is_shared_over_orientations() -> None:
    conv = rp.nn.GroupConv2d(2, 3, 3, 8)
    nn.init.zeros_(conv.weight)
    nn.init.normal_(conv.bias)
    y = conv(torch.randn(1, 2, 8, 5, 5))
    assert torch.equal(y, conv.bias.detach()[None, :, None, None, None].expand_as(y))


def test_gradients_pass_gradcheck() -> None:
    conv = rp.nn.GroupConv2d(2, 2, 3, 8, dtype=torch.float64)
    lift = rp.nn.LiftConv2d(2, 2, 3, 8, dtype=torch.float64)
    up = rp.nn.GroupConvTranspose2d(2, 2, 3, 4, stride=2, dtype=torch.float64)
    for layer, shape in ((conv, (1, 2, 8, 4, 4)), (lift, (1, 2, 4, 4)), (up, (1, 2, 4, 3, 3))):
        x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

        def apply(x: Tensor, weight: Tensor, bias: Tensor, layer: nn.Module = layer) -> Tensor:
            return torch.func.functional_call(layer, {"weight": weight, "bias": bias}, x)

        assert torch.autograd.gradcheck(apply, (x, layer.weight, layer.bias))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_transposed_convolution_with_one_orientation_is_that_of_torch(groups: int) -> None:
    conv = rp.nn.GroupConvTranspose2d(4, 6, 3, 1, stride=2, padding=1, groups=groups, kernel="square")
    plain = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=groups)
    with torch.no_grad():
        plain.weight.copy_(conv.transposed_kernels())
        plain.bias.copy_(conv.bias)
    x = torch.randn(2, 4, 5, 6)
    torch.testing.assert_close(conv(x[:, :, None])[:, :, 0], plain(x))
    kernel = plain.weight[0, 0]  # of the first input and output channel, as torch stores it: rotated by 180°
    torch.testing.assert_close(conv.weight[0, 0, 0].view(3, 3), kernel.flip(0, 1))


def test_a_square_kernel_has_weights_at_its_corners() -> None:
    conv = rp.nn.LiftConv2d(1, 1, 5, 8, kernel="square")
    assert conv.weight.shape[-1] == 25
    torch.testing.assert_close(conv.kernels()[0].flatten(), conv.weight.flatten())
    torch.testing.assert_close(conv.kernels()[2], conv.kernels()[0].rot90(1, (1, 2)))


def test_features_stay_channels_last() -> None:
    stack = nn.Sequential(
        rp.nn.LiftConv2d(3, 6, 5, 8),
        rp.nn.GroupBatchNorm2d(6),
        nn.ReLU(),
        rp.nn.GroupMaxPool2d(2),
        rp.nn.GroupConv2d(6, 4, 3, 8),
        rp.nn.GroupUpsample2d(2),
        rp.nn.GroupLayerNorm2d(4),
        rp.nn.GroupAvgPool2d(2),
        rp.nn.GroupDropout2d(0.5),
        rp.nn.GroupMaxPool2d(2, blur=3),
        rp.nn.GroupAvgPool2d(2, blur=3, power=2),
    )
    x = torch.randn(2, 3, 24, 24)
    for layer in stack:
        x = layer(x)
        folded = x.flatten(1, 2)
        assert folded.data_ptr() == x.data_ptr(), f"{layer} returned a layout that flatten has to copy"
        assert folded.is_contiguous(memory_format=torch.channels_last), f"{layer} lost channels-last"


def expected_gain(layer: nn.Module, x: Tensor) -> float:
    """Return the ratio of mean squares after and before the layer and a ReLU, in expectation over random weights."""
    size = layer.kernel_size
    maps = x.flatten(0, 2 if x.ndim == 5 else 1)[:, None]
    padding = (size // 2,) * 4
    patches = nn.functional.unfold(nn.functional.pad(maps, padding, mode="circular"), size)  # (maps, n², L)
    reads = torch.einsum("irp,mrl->mipl", layer.rotation, patches).square().sum(dim=2).mean()
    terms = layer.weight[0, ..., 0].numel()  # channels and orientations that an output sums over
    weight_variance = float(layer.weight.detach().square().mean())
    return 0.5 * terms * weight_variance * float(reads / x.square().mean())


def variance_over_twenty_layers(size: int, orientations: int, kernel: str = "bilinear") -> list[float]:
    """Return the expected mean square after each layer, averaged over orientations, for images of mean square 1."""
    x = rp.metrics.smooth_images(count=2, size=12)
    expected = [1.0]
    for i in range(20):
        convolution = rp.nn.GroupConv2d if i else rp.nn.LiftConv2d
        layer = convolution(x.shape[1], 24, size, orientations, padding="same", padding_mode="circular", kernel=kernel)
        expected.append(expected[-1] * expected_gain(layer, x))
        with torch.no_grad():
            x = layer(x).relu()
    return expected


@pytest.mark.parametrize("size", [1, 3, 5])
@pytest.mark.parametrize("orientations", [1, 4, 8, 16])
def test_activations_keep_their_variance_over_twenty_layers(size: int, orientations: int) -> None:
    for variance in variance_over_twenty_layers(size, orientations):
        assert 0.75 < variance < 1.33


@pytest.mark.parametrize("kernel", ["gaussian", "harmonic"])
def test_smooth_kernels_keep_the_variance_too(kernel: str) -> None:
    for variance in variance_over_twenty_layers(5, 8, kernel):
        assert 0.6 < variance < 1.7


def test_the_expected_gain_matches_a_layer_with_many_channels() -> None:
    """Checks the expectation used by the tests above."""
    for convolution, x in (
        (rp.nn.LiftConv2d, torch.rand(2, 3, 8, 8)),
        (rp.nn.GroupConv2d, torch.rand(2, 3, 8, 8, 8)),
    ):
        layer = convolution(3, 4096, 3, 8, padding="same", padding_mode="circular")
        measured = layer(x).relu().detach().square().mean() / x.square().mean()
        assert expected_gain(layer, x) == pytest.approx(float(measured), rel=0.1)


@pytest.mark.parametrize("taps", [21, 15], ids=["kept positions", "white noise"])
def test_other_fan_ins_change_the_variance(taps: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a fan-in of all base weights, or one for uncorrelated signals, fails."""
    monkeypatch.setattr(group, "effective_taps", lambda *_: taps)
    assert not 0.5 < variance_over_twenty_layers(5, 8)[-1] < 2


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_initialization_counts_the_channels_of_a_group(groups: int) -> None:
    conv = rp.nn.GroupConv2d(16, 64, 5, 4, groups=groups)
    assert float(conv.weight.detach().std()) == pytest.approx((2 / (16 / groups * 4 * 21)) ** 0.5, rel=0.05)
    assert not conv.bias.any()


def test_repr_lists_options_that_differ_from_the_default() -> None:
    assert repr(rp.nn.LiftConv2d(3, 8, 5, 8)) == "LiftConv2d(3, 8, kernel_size=5, orientations=8)"
    conv = rp.nn.GroupConv2d(
        8, 8, 3, 4, stride=2, padding=1, groups=8, bias=False, padding_mode="reflect", kernel="harmonic"
    )
    assert repr(conv) == (
        "GroupConv2d(8, 8, kernel_size=3, orientations=4, stride=2, padding=1, groups=8, "
        "padding_mode='reflect', kernel='harmonic', bias=False)"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"orientations": 0}, r"orientations must be a whole number, 1 or more .* got 0"),
        ({"kernel_size": 4, "kernel": "harmonic"}, r"kernel='harmonic' needs an odd kernel_size, .* got 4"),
        ({"kernel_size": 4, "padding": "same"}, r"accepts padding 'same' for odd kernels only"),
        (
            {"kernel_size": (3, 5)},
            r"'kernel_size' of .* must be a whole number, 1 or more, the same for height and width; got \(3, 5\)",
        ),
        ({"stride": 0}, r"'stride' of .* must be a whole number, 1 or more; got 0"),
        ({"stride": (1, 2)}, r"'stride' of .* must be a whole number"),
        ({"padding": -1}, r"'padding' of .* must be a whole number, 0 or more"),
        ({"padding": "full"}, r"The argument 'padding' of .* must be 'same' or 'valid'; got 'full'"),
        ({"padding": "same", "stride": 2}, r"accepts padding 'same' at stride 1 only; got stride 2"),
        (
            {"kernel": "cubic"},
            r"'kernel' of .* must be 'bilinear' or 'gaussian' or 'harmonic' or 'square'; got 'cubic'",
        ),
        ({"padding_mode": "mirror"}, r"'padding_mode' of .* must be 'zeros' or .* got 'mirror'"),
        ({"pool": 0}, r"'pool' of .* must be a whole number, 1 or more; got 0"),
        ({"pool": 2, "stride": 2}, r"pool=2 needs stride=1 and dilation=1; got stride=2 and dilation=1"),
        ({"groups": 3}, r"multiples of the number of groups; got 4 input channels, 8 output channels and 3 groups"),
        ({"in_channels": 0}, r"'in_channels' of .* must be a whole number, 1 or more; got 0"),
    ],
    ids=str,
)
@pytest.mark.parametrize("layer", [rp.nn.LiftConv2d, rp.nn.GroupConv2d])
def test_wrong_arguments_are_refused(layer: type[nn.Module], arguments: dict[str, object], message: str) -> None:
    defaults = {"in_channels": 4, "out_channels": 8, "kernel_size": 5, "orientations": 8}
    with pytest.raises(ValueError, match=message):
        layer(**(defaults | arguments))


@pytest.mark.parametrize(
    ("layer", "shape", "message"),
    [
        (rp.nn.LiftConv2d(3, 4, 5, 8), (1, 4, 9, 9), "LiftConv2d was built for 3 input channels, but got 4"),
        (rp.nn.LiftConv2d(3, 4, 5, 8), (1, 3, 8, 9, 9), "LiftConv2d takes images .* use a Group layer"),
        (rp.nn.LiftConv2d(3, 4, 5, 8), (3, 9, 9), r"LiftConv2d takes images \(B, C, H, W\), but got .* \(3, 9, 9\)"),
        (rp.nn.LiftConv2d(3, 4, 5, 8), (1, 3, 9, 4), "LiftConv2d on 9 × 4 px: .* use at least 5 px"),
        (rp.nn.GroupConv2d(3, 4, 5, 8), (1, 4, 8, 9, 9), "GroupConv2d was built for 3 input channels, but got 4"),
        (rp.nn.GroupConv2d(3, 4, 5, 8), (1, 3, 4, 9, 9), "GroupConv2d was built for 8 orientations, but got 4"),
        (rp.nn.GroupConv2d(3, 4, 5, 8), (1, 3, 9, 9), "GroupConv2d takes SE.* lift it first with LiftConv2d"),
        (rp.nn.GroupConv2d(3, 4, 3, 8, stride=2), (1, 3, 8, 9, 12), "not cover .* 12 px exactly, .* use 11 or 13 px"),
        (
            rp.nn.LiftConv2d(3, 4, 7, 8, padding=2),
            (1, 3, 2, 9),
            "does not fit into an input side of 2 px padded by 2 px; use at least 3",
        ),
        (rp.nn.LiftConv2d(3, 4, 5, 8, padding=2, padding_mode="reflect"), (1, 3, 9, 2), "needs sides of 3 px or more"),
        (
            rp.nn.LiftConv2d(3, 4, 5, 8, padding=2, padding_mode="circular"),
            (1, 3, 9, 1),
            "sides of 2 px or more; got 9 × 1",
        ),
        (rp.nn.GroupMaxPool2d(2), (1, 3, 8, 61, 60), "GroupMaxPool2d on 61 × 60 px: .* use 60 or 62 px"),
        (rp.nn.GroupAvgPool2d(2), (1, 3, 60, 60), "GroupAvgPool2d takes SE.* lift it first"),
        (rp.nn.GroupBatchNorm2d(4), (1, 3, 8, 9, 9), "GroupBatchNorm2d was built for 4 input channels, but got 3"),
        (rp.nn.GroupNorm2d(2, 4), (1, 4, 9, 9), "GroupNorm2d takes SE"),
        (rp.nn.GroupLayerNorm2d(4), (1, 4, 9, 9), "GroupLayerNorm2d takes SE"),
        (rp.nn.GroupDropout2d(0.5), (1, 4, 9, 9), "GroupDropout2d takes SE"),
        (rp.nn.GroupUpsample2d(2), (1, 4, 9, 9), "GroupUpsample2d takes SE"),
        (rp.nn.Project("max"), (1, 4, 9, 9), "Project takes SE"),
    ],
    ids=str,
)
def test_wrong_inputs_are_refused(layer: nn.Module, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layer(torch.zeros(shape))


@pytest.mark.parametrize(
    ("layer", "shape"), [(rp.nn.LiftConv2d(3, 4, 5, 8), (1, 3, 9, 9)), (rp.nn.Project(), (1, 4, 8, 9, 9))]
)
def test_arrays_and_bytes_are_refused(layer: nn.Module, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"takes a torch.Tensor, but got ndarray"):
        layer(np.zeros(shape))
    with pytest.raises(ValueError, match=r"takes floating point numbers, but got torch.uint8; .* x.float\(\) / 255"):
        layer(torch.zeros(shape, dtype=torch.uint8))


@pytest.mark.parametrize("orientations", [1, 2, 8])
@pytest.mark.parametrize("kernel_size", [1, 5])
def test_outputs_are_channels_last_for_every_n(orientations: int, kernel_size: int) -> None:
    lift = rp.nn.LiftConv2d(3, 6, kernel_size, orientations, bias=False)
    conv = rp.nn.GroupConv2d(6, 6, kernel_size, orientations, bias=False)
    features = lift(torch.rand(2, 3, 12, 12))
    for y in (features, conv(features)):
        assert y.permute(0, 3, 4, 1, 2).is_contiguous()
