"""`equivariant` converts plain CNNs: exact, with as many weights, projected at the right place, or a clear error."""

import copy
import io
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_networks import BasicBlock, DenseNet, ResNet18, UNet
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations

import rotopath as rp
from rotopath.models.convert import Converter
from rotopath.models.convert.group_layers import ConversionOptions, Width, plain_channels, resolve_parts, tie
from rotopath.nn.pool import pad_evenly, resize
from rotopath.nn.project import PROJECTIONS

pytestmark = pytest.mark.slow

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (lambda: ResNet18((24, 48, 48)), 33),
    "densenet": (DenseNet, 16),
    "unet": (UNet, 16),
    "unet with bilinear resizing": (lambda: UNet(transposed=False), 16),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def count_weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def images(size: int, channels: int = 3) -> Tensor:
    return torch.rand(2, channels, size, size + 16, dtype=torch.float64)


def called_layers(net: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in net.graph.nodes if node.op == "call_module"]


@every_network
@pytest.mark.parametrize("orientations", [4, 8])
def test_converted_networks_are_exact_and_keep_the_number_of_weights(name: str, orientations: int) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, orientations)
    x = images(size)
    assert net(x).shape == plain(x).shape
    assert abs(count_weights(net) / count_weights(plain) - 1) < 0.03
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    assert rp.equivariance_error(plain.eval(), x) > 1e-5, "the plain network is not equivariant"


@every_network
def test_converted_networks_can_be_frozen(name: str) -> None:
    build, size = NETWORKS[name]
    net = rp.equivariant(build().double(), 4).train()
    x = images(size)
    for _ in range(3):
        net(x)
    net.eval()
    frozen = rp.freeze(net)
    torch.testing.assert_close(frozen(x), net(x))
    assert not any(type(module).__module__.startswith("rotopath.nn") for module in frozen.modules())


@every_network
@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize("projection", ["attention", "fourier"])
def test_learned_projections_are_exact(name: str, projection: str, reflections: bool) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, 4, projection=projection, reflections=reflections)
    assert abs(count_weights(net) / count_weights(plain) - 1) < 0.04
    projections = [module for module in net.modules() if isinstance(module, rp.nn.Project)]
    assert {module.mode for module in projections} == {projection}
    for parameter in nn.ModuleList(projections).parameters():
        assert parameter.dtype == torch.float64
        nn.init.normal_(parameter)
    x = images(size)
    assert rp.equivariance_error(net.train(), x) < 1e-10
    if reflections:
        assert rp.equivariance_error(net, x, 0, flip=True) < 1e-10
    net.eval()
    torch.testing.assert_close(rp.freeze(net)(x), net(x))


class Outputs(nn.Module):
    """Two outputs with different numbers of channels."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.project, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 10, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.project(self.first(x).relu())
        return x, self.second(x)


def test_each_projected_value_has_its_own_projection() -> None:
    net = rp.equivariant(Outputs(), 4, "channels", projection="attention")
    assert called_layers(net) == ["first", "project", "project_layer", "second", "project_layer_2"]
    channels = [module.channels for module in net.modules() if isinstance(module, rp.nn.Project)]
    assert channels == [6, 10]
    assert [y.shape[1] for y in net(torch.rand(1, 3, 12, 12))] == [6, 10]


def test_resnet_18_keeps_its_number_of_weights() -> None:
    plain = ResNet18()
    net = rp.equivariant(plain, 8)
    assert abs(count_weights(net) / count_weights(plain) - 1) < 0.01
    stem = net.get_submodule("conv1")
    assert isinstance(stem, rp.nn.LiftConv2d)
    assert abs(stem.out_channels - 64 / 8**0.5) < 1.5
    assert rp.equivariance_error(net.eval(), torch.rand(1, 3, 33, 65)) < 1e-5
    widths: dict[int, set[int]] = {}  # of the plain network → of the converted one
    for name, module in net.named_modules():
        if isinstance(module, rp.nn.GroupConv2d):
            widths.setdefault(plain.get_submodule(name).out_channels, set()).add(module.out_channels)
    assert set(widths) == {64, 128, 256, 512}
    assert all(len(converted) == 1 for converted in widths.values()), "one factor scales all layers"


def test_single_layers_of_small_networks_are_widened() -> None:
    """With 5 channels everywhere instead of 16, a fifth of the weights is missing; with 6, an eighth is too much."""
    convolutions = [nn.Conv2d(16 if i else 3, 16, 3) for i in range(7)]
    plain = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    net = rp.equivariant(plain, 8)
    assert abs(count_weights(net) / count_weights(plain) - 1) < 0.03
    assert {net.get_submodule(str(i)).out_channels for i in range(7)} == {5, 6}


def test_keep_channels_and_keep_maps() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 2, 1))
    for keep, first, second in (("channels", 16, 32), ("maps", 2, 4)):
        net = rp.equivariant(plain, 8, keep)
        lift, conv, head = (net.get_submodule(name) for name in ("0", "2", "4"))
        assert (lift.out_channels, conv.in_channels, conv.out_channels) == (first, first, second)
        assert (type(head), head.in_channels, head.out_channels) == (nn.Conv2d, second, 2)


def test_counted_weights_equal_those_of_the_built_network() -> None:
    for module in (DenseNet(), UNet(), ResNet18((8, 16)), Tricks()):
        for projection in PROJECTIONS:
            converter = Converter(module, ConversionOptions(4, "bilinear", projection, "keep"))
            chosen = converter.choose_widths("maps")
            net = converter.write(chosen, "Net")
            assert converter.count_weights(chosen) == sum(weight.numel() for weight in net.parameters() if weight.ndim)


# Position of the projection


def test_the_projection_comes_before_a_pool_over_all_positions() -> None:
    order = called_layers(rp.equivariant(ResNet18((8, 16)), 4))
    assert order[-3:] == ["project", "avgpool", "fc"]


def test_the_last_convolution_of_a_dense_network_comes_after_the_projection() -> None:
    net = rp.equivariant(UNet(8), 4)
    assert called_layers(net)[-2:] == ["project", "out"]
    assert type(net.get_submodule("out")) is nn.Conv2d


def test_a_1x1_convolution_can_be_the_classifier() -> None:
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    net = rp.equivariant(plain, 4)
    assert called_layers(net) == ["0", "1", "project", "2", "3", "4"]
    assert rp.equivariance_error(net, images(9)) < 1e-10


def test_a_1x1_convolution_before_a_linear_classifier_stays_on_features() -> None:
    """Because then Linear is the classifier."""
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    )
    net = rp.equivariant(plain, 4)
    assert called_layers(net) == ["0", "1", "2", "project", "3", "5"]
    assert isinstance(net.get_submodule("1"), rp.nn.GroupConv2d)


def test_a_backbone_is_projected_at_its_output() -> None:
    net = rp.equivariant(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).double(), 4, projection="mean"
    )
    assert called_layers(net) == ["0", "1", "2", "project"]
    assert net(images(9)).shape == (2, 6, 5, 21)
    assert rp.equivariance_error(net, images(9)) < 1e-10


# Building blocks


class Gate(nn.Module):
    """Weights channels by a mean over the image, and positions by a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.where = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = x * weight
        return x * self.where(x).sigmoid()


class Tricks(nn.Module):
    """Depthwise and grouped convolutions, several norms, a gate, two sizes, dropout, a learned number, a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.colors = nn.Conv2d(3, 3, 1)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.GroupNorm(8, 16), nn.PReLU(16), nn.Dropout2d(0.1))
        self.depthwise = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, groups=16), nn.InstanceNorm2d(32, affine=True))
        self.grouped = nn.Conv2d(32, 24, 3, padding="same", groups=4)
        self.gate = Gate(24)
        self.up = nn.Upsample(scale_factor=2)
        self.strength = nn.Parameter(torch.ones(()))
        self.single = nn.Conv2d(40, 40, 3, padding=1, padding_mode="reflect")
        self.head = nn.Sequential(nn.Linear(40, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(self.colors(x))
        coarse = self.gate(self.grouped(self.depthwise(F.max_pool2d(fine, 2))))
        joined = torch.cat([fine, self.up(coarse)], 1)
        joined = joined + self.strength * self.single(joined)
        return F.log_softmax(self.head(joined.mean(dim=[2, 3])), dim=1)


@pytest.mark.parametrize("keep", ["weights", "channels", "maps"])
@pytest.mark.parametrize("kernel", ["bilinear", "harmonic"])
def test_layers_and_functions_of_all_sorts_are_exact(keep: str, kernel: str) -> None:
    plain = Tricks().double()
    net = rp.equivariant(plain, 4, keep, kernel=kernel)
    net.get_submodule("head.3").p = 0.0  # dropout of single numbers is not equivariant
    x = images(12)
    assert net(x).shape == (2, 2)
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
    if keep == "weights":
        assert abs(count_weights(net) / count_weights(plain) - 1) < 0.03


def test_the_image_can_be_added_to_the_output() -> None:
    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.net(x)

    net = rp.equivariant(Denoise().double(), 4)
    assert net(images(9)).shape == images(9).shape
    assert rp.equivariance_error(net, images(9)) < 1e-10


def test_padding_to_the_size_of_a_skip_must_be_even() -> None:
    class Pads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.out = nn.Conv2d(3, 8, 5, padding=1), nn.Conv2d(11, 1, 1)
            self.wide = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            y, x = self.conv(x), self.wide(x)
            high, wide = x.size(2) - y.size(2), x.size(3) - y.size(3)
            y = F.pad(y, [wide // 2, wide - wide // 2, high // 2, high - high // 2])
            return self.out(torch.cat([x, y], dim=1))

    net = rp.equivariant(Pads().double(), 4).eval()
    assert rp.equivariance_error(net, images(9)) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(images(9)).shape, net(images(9)).shape)
    net.get_submodule("conv").padding = 0
    net(images(9))  # two pixels at either end
    with pytest.raises(ValueError, match="needs the same padding at both ends, but got 0 px left and 1 px right"):
        pad_evenly(images(9), (0, 1, 2, 2))


def test_a_layer_that_is_called_twice_keeps_shared_weights() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.conv, self.act = nn.Conv2d(3, 9, 3), nn.Conv2d(9, 9, 3, padding=1), nn.ReLU()
            self.out = nn.Conv2d(9, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(self.act(x))
            return self.act(self.out(self.act(self.conv(self.act(self.conv(x))))))

    net = rp.equivariant(Twice().double(), 4)
    assert called_layers(net).count("conv") == 2
    assert rp.equivariance_error(net, images(9)) < 1e-10
    assert abs(count_weights(net) / count_weights(Twice()) - 1) < 0.2  # nine channels are few to choose from


def test_concatenation_along_the_last_axis_is_accepted_for_vectors_only() -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.norm(self.conv(x)).relu())
            return self.fc(torch.cat([x.mean((2, 3)), torch.flatten(F.adaptive_max_pool2d(x, 1), 1)], -1))

    net = rp.equivariant(Pools().double(), 4)
    assert rp.equivariance_error(net, images(9)) < 1e-10
    assert called_layers(net)[:3] == ["conv", "norm", "norm"]
    with pytest.raises(ValueError, match="'cat': it concatenates along axis -1"):
        rp.equivariant(Function(lambda x: torch.cat([x.softmax(1), x], -1)))


# Strides


def test_strided_convolutions_refuse_even_sizes() -> None:
    net = rp.equivariant(ResNet18((8, 16)), 4)
    with pytest.raises(ValueError, match=r"64 × 64 px, because of LiftConv2d .* 64 px exactly, .* or use 57 or 65 px"):
        net(torch.rand(1, 3, 64, 64))


def test_strides_as_pools_accept_even_sizes() -> None:
    plain = ResNet18((8, 16)).double()
    net = rp.equivariant(plain, 4, strides="pool")
    x = images(16)
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
    kinds = [type(layer) for layer in net.get_submodule("layer2.0.downsample.0")]
    assert kinds == [rp.nn.GroupAvgPool2d, rp.nn.GroupConv2d], "the pool first, which leaves fewer positions"


def test_strides_as_pools_keep_output_sizes() -> None:
    for layer in (nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 1, 2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2)):
        plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer)
        net = rp.equivariant(plain, 4, strides="pool")
        x = torch.rand(1, 3, 12, 16)
        assert net(x).shape == plain(x).shape


# Saving, copying, training


def test_state_dict_keeps_the_names_of_the_plain_network() -> None:
    plain = ResNet18((8, 16))
    net, other = rp.equivariant(plain, 4), rp.equivariant(plain, 4)
    assert set(net.state_dict()) == set(plain.state_dict())
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    x = torch.rand(1, 3, 33, 33)
    torch.testing.assert_close(other.eval()(x), net.eval()(x))
    torch.testing.assert_close(copy.deepcopy(net)(x), net(x))


def test_the_plain_module_is_not_changed() -> None:
    plain = DenseNet().eval()
    before = copy.deepcopy(plain.state_dict())
    net = rp.equivariant(plain, 4)
    assert not net.training
    assert not plain.training
    assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())
    assert {parameter.dtype for parameter in rp.equivariant(plain.double(), 4).parameters()} == {torch.float64}


def test_every_weight_gets_a_gradient() -> None:
    net = rp.equivariant(Tricks().eval(), 4)
    net(torch.rand(2, 3, 12, 12)).square().sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


# Errors


def small(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 8, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


class DiffersInTraining(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu() if self.training else self.conv(x)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            small(nn.Conv2d(8, 8, (1, 4))),
            r"cannot convert '1' \(Conv2d\): its kernel_size is \(1, 4\), .* same value for height and width",
        ),
        (small(nn.Conv2d(8, 8, 3, stride=(1, 2))), r"'1' \(Conv2d\): its stride is \(1, 2\)"),
        (
            small(nn.ConvTranspose2d(8, 8, 3, stride=2, output_padding=1)),
            r"'1' \(ConvTranspose2d\): it does not enlarge every image by a factor of 2, its",
        ),
        (small(nn.PixelShuffle(2)), r"'1' \(PixelShuffle\): PixelShuffle has no SE\(2\) counterpart"),
        (small(nn.MaxPool2d(2, return_indices=True)), r"'1' \(MaxPool2d\): it returns indices"),
        (
            small(nn.AvgPool2d(3, padding=1, count_include_pad=False)),
            r"'1' \(AvgPool2d\): its divisor is not the number of pixels in its window",
        ),
        (small(nn.AdaptiveMaxPool2d((2, 3))), r"'1' \(AdaptiveMaxPool2d\): its output_size is \(2, 3\)"),
        (
            small(nn.Upsample(scale_factor=(1, 2))),
            r"'1' \(Upsample\): its size or scale_factor is \(1.0, 2.0\), which is not symmetric under rotation",
        ),
        (small(nn.InstanceNorm2d(8, track_running_stats=True)), r"'1' \(InstanceNorm2d\): it keeps running statistics"),
        (
            small(parametrizations.weight_norm(nn.Conv2d(8, 8, 3))),
            r"'1' \(ParametrizedConv2d\): its weights are parametrized",
        ),
        (small(nn.LayerNorm((8, 9, 9))), r"'1' \(LayerNorm\): it normalizes 648 values, .* use GroupNorm\(1, 8\)"),
        (small(rp.nn.Project()), r"'1' \(Project\): it is already a layer of rotopath"),
        (
            nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 8, 3)),
            r"'0' \(MaxPool2d\): it pools the image, or values whose .*; move it",
        ),
        (nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), "needs a convolution larger than 1×1"),
        (nn.Sequential(small(), nn.Flatten(2)), "cannot convert '1'"),
        (Function(lambda x: x.flip(-1)), "cannot convert 'flip': its behavior under rotation of the image is"),
        (Function(lambda x: x[:, ::2]), "cannot convert 'getitem': its behavior"),
        (Function(lambda x: torch.cat([x, x], dim=2)), "cannot convert 'cat': it concatenates along axis 2"),
        (Function(lambda x: F.avg_pool2d(x, x.shape[-1])), "'avg_pool2d': its window depends on the size"),
        (Function(lambda x: x if x.sum() > 0 else -x), r"equivariant\(\) cannot trace forward\(\) of Function"),
        (
            DiffersInTraining(),
            r"cannot convert DiffersInTraining, because its forward\(\) differs between training and evaluation",
        ),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_errors_name_what_cannot_be_converted(module: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        rp.equivariant(module, 4)
    assert str(error.value).count("\n") == 0


def test_convolutions_after_the_projection_are_refused() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.next = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.next(torch.cat([x, self.conv(x)], 1))

    with pytest.raises(
        ValueError,
        match=r"cannot convert 'next' \(Conv2d\): it reads values that have no orientations, for which only 1 × 1",
    ):
        rp.equivariant(Mixes())


@pytest.mark.parametrize(
    "wrong", [{"keep": "size"}, {"strides": "exact"}, {"kernel": "cubic"}, {"projection": "min"}, {"orientations": 0}]
)
def test_unknown_option_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got "):
        rp.equivariant(small(), **wrong)


def test_hooks_are_refused() -> None:
    module = small()
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"equivariant\(\) does not support hooks"):
        rp.equivariant(module)


def test_resize_refuses_nearest_for_fractional_factors() -> None:
    features = torch.rand(1, 2, 4, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"got 3 px and a new size of 5 px\. Use mode='bilinear'"):
        resize(features, size=(5, 5))
    for mode, size in (("nearest", 9), ("bilinear", 5), ("bicubic", 7)):
        resized = resize(features, size=size, mode=mode)
        rotated = resize(rp.group.rotate_features(features, 90), size=size, mode=mode)
        torch.testing.assert_close(rotated, rp.group.rotate_features(resized, 90))


# Widths


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 59), max_size=4),
    factor=st.floats(0.1, 1),
    multiple=st.sampled_from([1, 2, 3]),
)
@settings(deadline=None)
def test_tied_values_get_equal_widths(sizes: list[int], cuts: set[int], factor: float, multiple: int) -> None:
    total = sum(sizes)
    ends = sorted({cut for cut in cuts if cut < total} | {total})
    first = tuple(Width(size, scales=True) for size in sizes)
    second = tuple(Width(end - start, scales=True) for start, end in zip([0, *ends], ends, strict=False))
    first[0].multiple = multiple
    tie(first, second)
    chosen = {width: width.scaled(factor) for width in (*resolve_parts(first), *resolve_parts(second))}
    assert resolve_parts(first) == resolve_parts(second)
    assert plain_channels(resolve_parts(first)) == total
    assert sum(chosen[width] for width in resolve_parts(first[:1])) % multiple == 0


def test_widths_can_be_tied_in_another_order() -> None:
    a, b = Width(2), Width(3)
    tie((a, b), (b, a))
    assert resolve_parts((a, b)) == resolve_parts((b, a))


def test_a_single_block_can_be_converted() -> None:
    block = nn.Sequential(nn.Conv2d(3, 8, 3), BasicBlock(8, 16))
    assert rp.equivariance_error(rp.equivariant(block.double(), 4), images(9)) < 1e-10


@every_network
def test_reflections_are_exact(name: str) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, 4, reflections=True)
    x = images(size)
    assert abs(count_weights(net) / count_weights(plain) - 1) < 0.03
    for training in (True, False):
        net.train(training)
        assert max(rp.equivariance_error(net, x, angle, flip=True) for angle in (0, 90)) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
