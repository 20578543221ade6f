"""Plain CNNs made equivariant: exact, as many weights, the projection in its place, and sentences for the rest."""

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
from rotopath.models.convert import counterparts as widths
from rotopath.models.convert.counterparts import Width
from rotopath.nn.project import PROJECTIONS

NETWORKS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "resnet": (lambda: ResNet18((24, 48, 48)), 33),
    "densenet": (DenseNet, 16),
    "unet": (UNet, 16),
    "unet between pixels": (lambda: UNet(transposed=False), 16),
}
every_network = pytest.mark.parametrize("name", NETWORKS)


def weights(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def images(size: int, channels: int = 3) -> Tensor:
    return torch.rand(2, channels, size, size + 16, dtype=torch.float64)


def calls(net: fx.GraphModule) -> list[str]:
    return [str(node.target) for node in net.graph.nodes if node.op == "call_module"]


@every_network
@pytest.mark.parametrize("orientations", [4, 8])
def test_networks_are_exact_with_as_many_weights(name: str, orientations: int) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, orientations)
    x = images(size)
    assert net(x).shape == plain(x).shape
    assert abs(weights(net) / weights(plain) - 1) < 0.03
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    assert rp.equivariance_error(plain.eval(), x) > 1e-5, "the plain one does not turn"


@every_network
def test_networks_are_frozen_to_plain_ones(name: str) -> None:
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
def test_networks_with_learned_projections(name: str, projection: str, reflections: bool) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, 4, projection=projection, reflections=reflections)
    assert abs(weights(net) / weights(plain) - 1) < 0.04
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
    """Features of two widths, both of which are answers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.project, self.second = nn.Conv2d(3, 6, 3), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 10, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.project(self.first(x).relu())
        return x, self.second(x)


def test_each_value_has_a_projection_of_its_own() -> None:
    net = rp.equivariant(Outputs(), 4, "channels", projection="attention")
    assert calls(net) == ["first", "project", "project_layer", "second", "project_layer_2"]
    found = [module.channels for module in net.modules() if isinstance(module, rp.nn.Project)]
    assert found == [6, 10]
    assert [y.shape[1] for y in net(torch.rand(1, 3, 12, 12))] == [6, 10]


def test_a_whole_resnet_18_keeps_its_weights() -> None:
    plain = ResNet18()
    net = rp.equivariant(plain, 8)
    assert abs(weights(net) / weights(plain) - 1) < 0.01
    stem = net.get_submodule("conv1")
    assert isinstance(stem, rp.nn.LiftConv2d)
    assert abs(stem.out_channels - 64 / 8**0.5) < 1.5
    assert rp.equivariance_error(net.eval(), torch.rand(1, 3, 33, 65)) < 1e-5
    of_width: dict[int, set[int]] = {}
    for name, module in net.named_modules():
        if isinstance(module, rp.nn.GroupConv2d):
            of_width.setdefault(plain.get_submodule(name).out_channels, set()).add(module.out_channels)
    assert set(of_width) == {64, 128, 256, 512}
    assert all(len(found) == 1 for found in of_width.values()), "one factor, where that is near enough"


def test_small_networks_are_widened_here_and_there() -> None:
    """5 or 6 channels in place of 16, everywhere, would be a fifth too few weights or an eighth too many."""
    convolutions = [nn.Conv2d(16 if i else 3, 16, 3) for i in range(7)]
    plain = nn.Sequential(*convolutions, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2))
    net = rp.equivariant(plain, 8)
    assert abs(weights(net) / weights(plain) - 1) < 0.03
    assert {net.get_submodule(str(i)).out_channels for i in range(7)} == {5, 6}


def test_channels_and_maps_are_kept_when_asked() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 32, 3), nn.BatchNorm2d(32), nn.Conv2d(32, 2, 1))
    for keep, first, second in (("channels", 16, 32), ("maps", 2, 4)):
        net = rp.equivariant(plain, 8, keep)
        lift, conv, head = (net.get_submodule(name) for name in ("0", "2", "4"))
        assert (lift.out_channels, conv.in_channels, conv.out_channels) == (first, first, second)
        assert (type(head), head.in_channels, head.out_channels) == (nn.Conv2d, second, 2)


def test_weights_are_counted_without_building() -> None:
    from rotopath.models.convert import Converter
    from rotopath.models.convert.counterparts import ConversionOptions

    for module in (DenseNet(), UNet(), ResNet18((8, 16)), Tricks()):
        for projection in PROJECTIONS:
            converter = Converter(module, ConversionOptions(4, "bilinear", projection, "keep"))
            chosen = converter.choose_widths("maps")
            net = converter.write(chosen, "Net")
            assert converter._count(chosen) == sum(weight.numel() for weight in net.parameters() if weight.ndim)


# Where the projection goes.


def test_the_projection_comes_before_the_gathering_of_positions() -> None:
    order = calls(rp.equivariant(ResNet18((8, 16)), 4))
    assert order[-3:] == ["project", "avgpool", "fc"]


def test_the_last_map_of_a_dense_network_reads_what_is_projected() -> None:
    net = rp.equivariant(UNet(8), 4)
    assert calls(net)[-2:] == ["project", "out"]
    assert type(net.get_submodule("out")) is nn.Conv2d


def test_a_convolution_may_be_the_classifier() -> None:
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 5, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    ).double()
    net = rp.equivariant(plain, 4)
    assert calls(net) == ["0", "1", "project", "2", "3", "4"]
    assert rp.equivariance_error(net, images(9)) < 1e-10


def test_convolutions_further_back_stay_on_features() -> None:
    """A 1×1 convolution before the pool is no classifier if Linear follows."""
    plain = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 16, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
    )
    net = rp.equivariant(plain, 4)
    assert calls(net) == ["0", "1", "2", "project", "3", "5"]
    assert isinstance(net.get_submodule("1"), rp.nn.GroupConv2d)


def test_a_backbone_is_projected_at_its_end() -> None:
    net = rp.equivariant(
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 3)).double(), 4, projection="mean"
    )
    assert calls(net) == ["0", "1", "2", "project"]
    assert net(images(9)).shape == (2, 6, 5, 21)
    assert rp.equivariance_error(net, images(9)) < 1e-10


# What networks are made of.


class Gate(nn.Module):
    """Channels are weighed by what the whole image says, positions by what their neighbourhood does."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.squeeze, self.excite = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)
        self.where = nn.Conv2d(channels, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        weight = torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3), keepdim=True)))))
        x = x * weight
        return x * self.where(x).sigmoid()


class Tricks(nn.Module):
    """Depthwise and grouped convolutions, other norms, a gate, two sizes, dropout, a learned number, a sum of joins."""

    def __init__(self) -> None:
        super().__init__()
        self.colours = nn.Conv2d(3, 3, 1)
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 5, padding=2), nn.GroupNorm(8, 16), nn.PReLU(16), nn.Dropout2d(0.1))
        self.depthwise = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1, groups=16), nn.InstanceNorm2d(32, affine=True))
        self.grouped = nn.Conv2d(32, 24, 3, padding="same", groups=4)
        self.gate = Gate(24)
        self.up = nn.Upsample(scale_factor=2)
        self.strength = nn.Parameter(torch.ones(()))
        self.single = nn.Conv2d(40, 40, 3, padding=1, padding_mode="reflect")
        self.head = nn.Sequential(nn.Linear(40, 12), nn.LayerNorm(12), nn.GELU(), nn.Dropout(0.1), nn.Linear(12, 2))

    def forward(self, x: Tensor) -> Tensor:
        fine = self.stem(self.colours(x))
        coarse = self.gate(self.grouped(self.depthwise(F.max_pool2d(fine, 2))))
        joined = torch.cat([fine, self.up(coarse)], 1)
        joined = joined + self.strength * self.single(joined)
        return F.log_softmax(self.head(joined.mean(dim=[2, 3])), dim=1)


@pytest.mark.parametrize("keep", ["weights", "channels", "maps"])
@pytest.mark.parametrize("kernel", ["bilinear", "harmonic"])
def test_layers_and_functions_of_all_kinds_are_exact(keep: str, kernel: str) -> None:
    plain = Tricks().double()
    net = rp.equivariant(plain, 4, keep, kernel=kernel)
    net.get_submodule("head.3").p = 0.0  # drops single numbers, of answers, which do not turn
    x = images(12)
    assert net(x).shape == (2, 2)
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
    if keep == "weights":
        assert abs(weights(net) / weights(plain) - 1) < 0.03


def test_the_image_may_be_added_to_the_answer() -> None:
    class Denoise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 3, 3, padding=1))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.net(x)

    net = rp.equivariant(Denoise().double(), 4)
    assert net(images(9)).shape == images(9).shape
    assert rp.equivariance_error(net, images(9)) < 1e-10


def test_padding_to_a_skip_is_even_or_refused() -> None:
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
    with pytest.raises(ValueError, match="as many pixels at both ends, but got 0 and 1 px"):
        rp.nn.join.pad_evenly(images(9), (0, 1, 2, 2))


def test_a_layer_that_is_called_twice_is_shared() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lift, self.conv, self.act = nn.Conv2d(3, 9, 3), nn.Conv2d(9, 9, 3, padding=1), nn.ReLU()
            self.out = nn.Conv2d(9, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.lift(self.act(x))
            return self.act(self.out(self.act(self.conv(self.act(self.conv(x))))))

    net = rp.equivariant(Twice().double(), 4)
    assert calls(net).count("conv") == 2
    assert rp.equivariance_error(net, images(9)) < 1e-10
    assert abs(weights(net) / weights(Twice()) - 1) < 0.2  # nine channels are few to choose from


def test_vectors_are_joined_along_their_last_axis_and_maps_are_not() -> None:
    class Pools(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False), nn.Linear(16, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.norm(self.norm(self.conv(x)).relu())
            return self.fc(torch.cat([x.mean((2, 3)), torch.flatten(F.adaptive_max_pool2d(x, 1), 1)], -1))

    net = rp.equivariant(Pools().double(), 4)
    assert rp.equivariance_error(net, images(9)) < 1e-10
    assert calls(net)[:3] == ["conv", "norm", "norm"]
    with pytest.raises(ValueError, match="'cat': it joins along axis -1"):
        rp.equivariant(Function(lambda x: torch.cat([x.softmax(1), x], -1)))


# Strides.


def test_strides_lie_evenly_on_odd_sizes() -> None:
    net = rp.equivariant(ResNet18((8, 16)), 4)
    with pytest.raises(ValueError, match=r"LiftConv2d on 64 × 64 px: 64 px is off the grid: .* use 63 or 65 px"):
        net(torch.rand(1, 3, 64, 64))


def test_strides_become_pools_for_even_sizes() -> None:
    plain = ResNet18((8, 16)).double()
    net = rp.equivariant(plain, 4, strides="pool")
    x = images(16)
    for training in (True, False):
        assert rp.equivariance_error(net.train(training), x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
    kinds = [type(layer) for layer in net.get_submodule("layer2.0.downsample.0")]
    assert kinds == [rp.nn.GroupAvgPool2d, rp.nn.GroupConv2d], "few positions first"


def test_strided_maps_have_the_size_that_they_had() -> None:
    for layer in (nn.Conv2d(4, 4, 3, 2, 1), nn.Conv2d(4, 4, 1, 2), nn.MaxPool2d(3, 2, 1), nn.MaxPool2d(2)):
        plain = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), layer)
        net = rp.equivariant(plain, 4, strides="pool")
        x = torch.rand(1, 3, 12, 16)
        assert net(x).shape == plain(x).shape


# A citizen of torch.


def test_weights_are_saved_and_loaded_under_their_old_names() -> None:
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


def test_gradients_reach_every_weight() -> None:
    net = rp.equivariant(Tricks().eval(), 4)
    net(torch.rand(2, 3, 12, 12)).square().sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []


# Sentences.


def small(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


class Function(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.conv, self.function = nn.Conv2d(3, 8, 3), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.conv(x))


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).relu() if self.training else self.conv(x)


@pytest.mark.parametrize(
    ("module", "sentence"),
    [
        (
            small(nn.Conv2d(8, 8, 2, 2)),
            "cannot convert '1': its kernel of 2 × 2 has no pixel at its centre .* odd size",
        ),
        (small(nn.Conv2d(8, 8, (1, 3))), r"cannot convert '1': its kernel_size is \(1, 3\), .* same for both axes"),
        (small(nn.Conv2d(8, 8, 3, stride=(1, 2))), r"'1': its stride is \(1, 2\)"),
        (small(nn.ConvTranspose2d(8, 8, 3, stride=2)), "'1': it does not enlarge every image by its stride of 2"),
        (small(nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(392, 2)), r"'3': it reads 392 numbers, which are 8 "),
        (small(nn.PixelShuffle(2)), "'1': PixelShuffle has no counterpart"),
        (small(nn.MaxPool2d(2, return_indices=True)), "'1': it returns indices"),
        (small(nn.AvgPool2d(3, padding=1, count_include_pad=False)), "'1': it divides by another number"),
        (small(nn.AdaptiveMaxPool2d((2, 3))), r"'1': its output_size is \(2, 3\)"),
        (small(nn.Upsample(scale_factor=(1, 2))), r"'1': \(1.0, 2.0\) would not survive"),
        (small(nn.InstanceNorm2d(8, track_running_stats=True)), "'1': it keeps running statistics"),
        (small(parametrizations.weight_norm(nn.Conv2d(8, 8, 3))), "'1': its weights are parametrised"),
        (small(nn.LayerNorm((8, 9, 9))), r"'1': it normalises other axes .* use GroupNorm\(1, 8\)"),
        (small(rp.nn.Project()), "'1': it is a layer of rotopath already"),
        (nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(3, 8, 3)), "'0': it pools images"),
        (nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()), "found no convolution larger than 1×1"),
        (nn.Sequential(small(), nn.Flatten(2)), "cannot convert '1'"),
        (Function(lambda x: x.flip(-1)), "cannot convert 'flip': what it does when the image turns is not known"),
        (Function(lambda x: x[:, :4]), "cannot convert 'getitem': what it does"),
        (Function(lambda x: torch.cat([x, x], dim=2)), "cannot convert 'cat': it joins along axis 2"),
        (Function(lambda x: F.avg_pool2d(x, x.shape[-1])), "'avg_pool2d': its window hangs on the size"),
        (Function(lambda x: x if x.sum() > 0 else -x), "equivariant cannot follow the forward of Function"),
        (Decides(), "cannot convert Decides, which does something else in training"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_what_cannot_be_converted_is_named(module: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        rp.equivariant(module, 4)
    assert str(error.value).count("\n") == 0


def test_convolutions_behind_the_projection_are_refused() -> None:
    class Mixes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.next = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(11, 8, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.next(torch.cat([x, self.conv(x)], 1))

    with pytest.raises(ValueError, match="cannot convert 'next': it looks at neighbours of what has no orientations"):
        rp.equivariant(Mixes())


@pytest.mark.parametrize(
    "wrong", [{"keep": "size"}, {"strides": "exact"}, {"kernel": "cubic"}, {"projection": "min"}, {"orientations": 0}]
)
def test_wrong_choices_get_a_sentence(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="got "):
        rp.equivariant(small(), **wrong)


def test_hooks_are_refused() -> None:
    module = small()
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match="equivariant carries over layers, and not hooks"):
        rp.equivariant(module)


def test_resize_refuses_neighbours_that_lie_unevenly() -> None:
    features = torch.rand(1, 2, 4, 3, 3, dtype=torch.float64)
    with pytest.raises(ValueError, match="3 px to become 5 px; use mode='bilinear'"):
        rp.nn.upsample.resize(features, size=(5, 5))
    for mode, size in (("nearest", 9), ("bilinear", 5), ("bicubic", 7)):
        resized = rp.nn.upsample.resize(features, size=size, mode=mode)
        turned = rp.nn.upsample.resize(rp.group.rotate_features(features, 90), size=size, mode=mode)
        torch.testing.assert_close(turned, rp.group.rotate_features(resized, 90))


# Widths.


@given(
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    cuts=st.sets(st.integers(1, 59), max_size=4),
    factor=st.floats(0.1, 1),
    multiple=st.sampled_from([1, 2, 3]),
)
@settings(deadline=None)
def test_tied_values_are_equally_wide(sizes: list[int], cuts: set[int], factor: float, multiple: int) -> None:
    total = sum(sizes)
    ends = sorted({cut for cut in cuts if cut < total} | {total})
    first = tuple(Width(size, scales=True) for size in sizes)
    second = tuple(Width(end - start, scales=True) for start, end in zip([0, *ends], ends, strict=False))
    first[0].multiple = multiple
    widths.tie(first, second)
    chosen = {width: width.scaled(factor) for width in (*widths.expand(first), *widths.expand(second))}
    assert widths.expand(first) == widths.expand(second)
    assert widths.plain_size(widths.expand(first)) == total
    assert sum(chosen[width] for width in widths.expand(first[:1])) % multiple == 0


def test_a_width_may_be_tied_to_itself() -> None:
    one, two = Width(2), Width(3)
    widths.tie((one, two), (two, one))
    assert widths.expand((one, two)) == widths.expand((two, one))


def test_blocks_alone_are_modules_too() -> None:
    block = nn.Sequential(nn.Conv2d(3, 8, 3), BasicBlock(8, 16))
    assert rp.equivariance_error(rp.equivariant(block.double(), 4), images(9)) < 1e-10


@every_network
def test_reflections_are_exact_too(name: str) -> None:
    build, size = NETWORKS[name]
    plain = build().double()
    net = rp.equivariant(plain, 4, reflections=True)
    x = images(size)
    assert abs(weights(net) / weights(plain) - 1) < 0.03
    for training in (True, False):
        net.train(training)
        assert max(rp.equivariance_error(net, x, angle, flip=True) for angle in (0, 90)) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
