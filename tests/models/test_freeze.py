"""`freeze` returns plain layers with the same outputs, or a clear error for what has no plain counterpart."""

import copy
import pickle
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import TypeVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn
from torch.nn.utils import parametrizations, prune

import rotopath as rp
from rotopath.inference import predict, predict_patches
from rotopath.inference.dense import MixedNetwork
from rotopath.models import FrozenNetwork, Network
from rotopath.models.freeze.plain_layers import BlurredPool2d, CenterCrop2d, ChannelNorm2d, OrientationPool2d, Scale2d
from rotopath.nn.project import PROJECTIONS

pytestmark = pytest.mark.slow

BUILDERS = {"mitosis": rp.models.mitosis, "nuclei": rp.models.nuclei, "tumor": rp.models.tumor}
TOLERANCE = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float32: 1e-5, torch.float64: 1e-12}
HALVES = (torch.float16, torch.bfloat16)
PLAIN_TYPES = (FrozenNetwork, rp.nn.Smooth2d, BlurredPool2d, CenterCrop2d, ChannelNorm2d, OrientationPool2d, Scale2d)
DTYPES = (torch.float32, torch.float64)
CPU = torch.device("cpu")
Model = TypeVar("Model", bound=nn.Module)

every_network = pytest.mark.parametrize("name", BUILDERS)
every_half = pytest.mark.parametrize("dtype", HALVES, ids=["float16", "bfloat16"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


def randomize(model: Model) -> Model:
    """Give batch norms and biases random values, so that mistakes in folding change the output."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d | nn.BatchNorm3d) and module.running_mean is not None:
            module.running_mean.normal_(std=0.5)
            module.running_var.uniform_(0.5, 2)
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim == 1:
                nn.init.uniform_(parameter, *((0.5, 1.5) if name == "weight" else (-0.5, 0.5)))
            elif isinstance(module, rp.nn.Project):
                nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def difference(frozen: nn.Module, model: nn.Module, *inputs: Tensor) -> float:
    """Largest difference between the outputs, relative to outputs above 1."""
    with torch.no_grad():
        result, expected = frozen(*[x.clone() for x in inputs]), model(*[x.clone() for x in inputs])
    assert result.shape == expected.shape
    assert result.dtype == expected.dtype
    return float((result - expected).abs().max() / expected.abs().max().clamp(min=1))


def layer_types(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if not isinstance(module, fx.GraphModule)}


def is_plain(model: nn.Module) -> bool:
    return all(kind in PLAIN_TYPES or kind.__module__.startswith("torch.nn.") for kind in layer_types(model))


@every_network
@pytest.mark.parametrize("orientations", [1, 4, 8])
@every_dtype
def test_frozen_networks_return_the_same_logits(name: str, orientations: int, dtype: torch.dtype) -> None:
    net = randomize(BUILDERS[name](orientations).to(dtype))
    frozen = rp.freeze(net)
    field, step = net.receptive_field, net.architecture.size_step
    for batch, rows, columns in ((1, 0, 0), (2, 1, 3)):
        x = torch.rand(batch, 3, field + rows * step, field + columns * step, dtype=dtype)
        assert difference(frozen, net, x) < TOLERANCE[dtype]
    assert is_plain(frozen)
    assert not layer_types(frozen) & {nn.BatchNorm2d, Scale2d}, "batch norm is folded into the convolutions"
    assert isinstance(frozen, FrozenNetwork)
    assert not frozen.training
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@every_network
@pytest.mark.parametrize("reflections", [False, True])
@pytest.mark.parametrize("projection", ["attention", "fourier"])
def test_learned_projections_are_frozen(name: str, reflections: bool, projection: str) -> None:
    for orientations in (1, 4):
        net = randomize(BUILDERS[name](orientations, projection=projection, reflections=reflections).double())
        frozen = rp.freeze(net)
        x = torch.rand(2, 3, net.receptive_field, net.receptive_field, dtype=torch.float64)
        assert difference(frozen, net, x) < 1e-12
        assert is_plain(frozen)
        if orientations == 4:
            nn.init.zeros_(next(net.project.parameters()))
            assert difference(frozen, net, x) > 1e-6, "the weights of the projection matter"


def test_a_projection_with_other_orientations_is_refused() -> None:
    model = nn.Sequential(rp.nn.LiftConv2d(3, 2, 3, 4), rp.nn.Project("fourier", 2, 8))
    with pytest.raises(
        ValueError, match=r"freeze\(\) cannot translate '_?1'.*: Project has 8 orientations, but its input has 4"
    ):
        rp.freeze(model)


@every_network
@every_dtype
def test_faithful_networks_are_frozen(name: str, dtype: torch.dtype) -> None:
    net = randomize(BUILDERS[name](4, preset="faithful").to(dtype))
    frozen = rp.freeze(net)
    field, step = net.receptive_field, net.architecture.size_step
    x = torch.rand(2, 3, field + step, field + 2 * step, dtype=dtype)
    assert difference(frozen, net, x) < TOLERANCE[dtype]
    assert is_plain(frozen)
    assert frozen.architecture.rim == net.architecture.rim > 0


def test_layers_of_a_frozen_network() -> None:
    layers = rp.freeze(rp.models.mitosis(8)).layers
    assert isinstance(layers, nn.Sequential)
    stage = [nn.Conv2d, nn.MaxPool2d, nn.ReLU]  # the pool first, so that ReLU processes a quarter of the pixels
    head = [nn.Conv2d, nn.ReLU, nn.Conv2d, OrientationPool2d, nn.ReLU, nn.Conv2d]
    assert [type(layer) for layer in layers] == [*stage * 3, *head]
    assert all(layer.inplace for layer in layers if isinstance(layer, nn.ReLU))
    widths = [layer.out_channels for layer in layers if isinstance(layer, nn.Conv2d)]
    assert widths == [64, 64, 64, 64, 128, 1]
    assert all(
        layer.weight.is_contiguous(memory_format=torch.channels_last) for layer in layers if hasattr(layer, "weight")
    )
    assert OrientationPool2d not in layer_types(rp.freeze(rp.models.mitosis(1))), "one orientation needs no projection"


@every_network
def test_features_stay_channels_last(name: str) -> None:
    frozen = rp.freeze(BUILDERS[name](4))
    outputs: dict[str, Tensor] = {}
    for path, layer in frozen.layers.named_children():
        if not isinstance(layer, CenterCrop2d):  # which returns a view
            layer.register_forward_hook(lambda _layer, _x, y, path=path: outputs.update({path: y}))
    side = frozen.receptive_field + 2 * frozen.architecture.size_step
    frozen(torch.rand(2, 3, side, side))
    assert [path for path, y in outputs.items() if not y.is_contiguous(memory_format=torch.channels_last)] == []


@every_network
def test_frozen_networks_are_equivariant_to_rotation_by_90_degrees(name: str) -> None:
    frozen = rp.freeze(randomize(BUILDERS[name](8)).double())
    x = torch.rand(2, 3, frozen.receptive_field, frozen.receptive_field, dtype=torch.float64)
    assert rp.equivariance_error(frozen, x) < 1e-10
    ordinary = rp.freeze(randomize(BUILDERS[name](1)).double())
    assert rp.equivariance_error(ordinary, x) > 0.01, "a network of one orientation is not equivariant"


@every_network
def test_the_original_is_not_changed_and_shares_no_memory(name: str) -> None:
    net = randomize(BUILDERS[name](4)).train()
    before = copy.deepcopy(net.state_dict())
    frozen = rp.freeze(net)
    assert net.training
    for parameter in frozen.parameters():
        nn.init.zeros_(parameter)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    assert all(parameter.requires_grad for parameter in net.parameters())


def test_freezing_uses_running_statistics_also_in_training_mode() -> None:
    net = randomize(nn.Sequential(rp.models.tumor(4), nn.Dropout(0.5)))
    x = torch.rand(2, 3, 88, 88)
    assert difference(rp.freeze(copy.deepcopy(net).train()), net, x) < 1e-5


def test_frozen_networks_scale_bytes() -> None:
    for dtype in DTYPES:
        net = randomize(rp.models.mitosis(4).to(dtype))
        images = torch.randint(0, 256, (2, 3, 68, 76), dtype=torch.uint8)
        assert difference(rp.freeze(net), net, images) < TOLERANCE[dtype]


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(1, 3, 65, 68),
        torch.zeros(1, 3, 68, 110),
        torch.zeros(1, 3, 68, 110, dtype=torch.uint8),
        torch.zeros(1, 4, 68, 68),
        torch.zeros(3, 68, 68),
        torch.zeros(1, 3, 68, 68, dtype=torch.int64),
        [1, 2],
    ],
    ids=["small", "off the grid", "bytes off the grid", "channels", "no batch", "int64", "list"],
)
def test_wrong_images_get_the_same_error_message(x: Tensor) -> None:
    net = rp.models.mitosis(4)
    with pytest.raises(ValueError) as original:  # noqa: PT011
        net(x)
    with pytest.raises(ValueError) as frozen:  # noqa: PT011
        rp.freeze(net)(x)
    assert str(frozen.value) == str(original.value)


@every_network
def test_predict_accepts_a_frozen_network(name: str) -> None:
    net = randomize(BUILDERS[name](4))
    frozen = rp.freeze(net)
    image = np.random.default_rng(0).integers(0, 256, (70, 51, 3), dtype=np.uint8)
    result, expected = (predict(model, image, CPU, rotations=2, tile_px=100) for model in (frozen, net))
    np.testing.assert_allclose(result.probabilities, expected.probabilities, atol=1e-5)
    assert (result.stride_px, result.first_px) == (expected.stride_px, expected.first_px)
    if name != "nuclei":
        windows = torch.randint(0, 256, (3, 3, 100, 100), dtype=torch.uint8)
        np.testing.assert_allclose(predict_patches(frozen, windows, 4), predict_patches(net, windows, 4), atol=1e-5)
    assert repr(frozen).startswith(f"{name}(\n  orientations=4")
    assert (frozen.stride, frozen.receptive_field) == (net.stride, net.receptive_field)
    assert frozen.nearest_sizes(200) == net.nearest_sizes(200)


def test_freezing_a_frozen_network_copies_it() -> None:
    frozen = rp.freeze(randomize(rp.models.mitosis(4)))
    again = rp.freeze(frozen)
    assert again is not frozen
    assert difference(again, frozen, torch.rand(1, 3, 68, 68)) == 0


# User modules


class Residual(nn.Module):
    def __init__(self, channels: int, orientations: int, in_place: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(
            rp.nn.GroupConv2d(channels, channels, 3, orientations, padding="same", bias=False),
            rp.nn.GroupBatchNorm2d(channels),
            nn.ReLU(in_place),
            rp.nn.GroupConv2d(channels, channels, 3, orientations, padding=1, padding_mode="circular"),
            rp.nn.GroupBatchNorm2d(channels, affine=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        y += x
        return F.relu(y)


class UNet(nn.Module):
    def __init__(self, orientations: int = 4) -> None:
        super().__init__()
        n = orientations
        self.lift = rp.nn.LiftConv2d(3, 4, 3, n, padding=1, padding_mode="reflect")
        self.norm = rp.nn.GroupBatchNorm2d(4)
        self.down = rp.nn.GroupMaxPool2d(2)
        self.body = nn.Sequential(Residual(4, n, in_place=True), rp.nn.GroupDropout2d(0.5), rp.nn.GroupLayerNorm2d(4))
        self.up = rp.nn.GroupUpsample2d(2, mode="bilinear")
        self.join = rp.nn.GroupConv2d(8, 6, 5, n, dilation=2, groups=2)
        self.act = nn.PReLU(6)
        self.project = rp.nn.Project("max")
        self.head = nn.Sequential(nn.Conv2d(6, 5, 1), nn.BatchNorm2d(5), nn.ReLU(), nn.Dropout2d(), nn.Conv2d(5, 2, 1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        first = torch.relu(self.norm(self.lift(x)))
        x = self.up(self.body(self.down(first)))
        _, channels, n, height, width = x.shape
        x = rp.nn.concatenate([x, rp.nn.center_crop(first, *x.shape[-2:])]) * (channels / n)
        features = self.act(self.join(x))
        maps = self.head(self.project(features))
        return {"maps": maps, "features": rp.nn.center_crop(features, height - 10, width=width - 10) * 2.0}


@every_dtype
@pytest.mark.parametrize("orientations", [1, 3, 8])
def test_a_u_net_with_skips_and_several_outputs(orientations: int, dtype: torch.dtype) -> None:
    model = randomize(UNet(orientations).to(dtype))
    frozen = rp.freeze(model)
    x = torch.rand(2, 3, 16, 20, dtype=dtype)
    with torch.no_grad():
        result, expected = frozen(x), model(x)
    assert result.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert is_plain(frozen)


def test_blocks_on_features_keep_five_axes() -> None:
    model = randomize(Residual(4, 6))
    frozen = rp.freeze(model)
    assert difference(frozen, model, torch.randn(2, 4, 6, 7, 9)) < 1e-5
    layer = rp.nn.GroupConv2d(4, 2, 3, 6, stride=2, padding=1)
    assert difference(rp.freeze(layer), layer, torch.randn(2, 4, 6, 7, 9)) < 1e-5
    lift = rp.nn.LiftConv2d(3, 2, 5, 8)
    assert difference(rp.freeze(lift), lift, torch.randn(2, 3, 7, 9)) < 1e-5
    assert type(next(rp.freeze(lift).children())) is nn.Conv2d


class Shared(nn.Module):
    """A convolution used twice, and features that are read after a ReLU has changed them in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = rp.nn.LiftConv2d(3, 4, 3, 4)
        self.conv = rp.nn.GroupConv2d(4, 4, 3, 4, padding=1)
        self.norms = nn.ModuleList(rp.nn.GroupBatchNorm2d(4) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.pool = rp.nn.GroupMaxPool2d(2)
        self.project = rp.nn.Project("mean")

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for norm in self.norms:
            x = norm(self.conv(x))
        kept = x
        y = self.pool(self.relu(x))
        return self.project(y) + self.project(self.pool(kept - 1)) + self.project(self.pool(self.norms[0](kept)))


def test_layers_used_twice_and_changes_in_place() -> None:
    model = randomize(Shared())
    assert difference(rp.freeze(model), model, torch.randn(2, 3, 10, 12)) < 1e-5


class Aliased(nn.Module):
    """Two names for one tensor, which += changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.norm, self.project = rp.nn.LiftConv2d(3, 2, 3, 4), rp.nn.GroupBatchNorm2d(2), rp.nn.Project()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        other = x
        x += 1
        x *= x.shape[-1]
        return self.project(self.norm(other)) - self.project(x)


def test_changes_in_place_affect_other_names_of_a_tensor() -> None:
    model = randomize(Aliased())
    assert difference(rp.freeze(model), model, torch.randn(2, 3, 8, 8)) < 1e-5


class Reader(nn.Module):
    """Features that are read again after a ReLU that does not work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.relu, self.project = rp.nn.LiftConv2d(3, 2, 3, 4), nn.ReLU(), rp.nn.Project()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        y = self.relu(x)
        return self.project(y) - self.project(-x)


def test_relu_is_not_in_place_where_its_input_is_read_again() -> None:
    model = Reader()
    assert difference(rp.freeze(model), model, torch.randn(2, 3, 8, 8)) < 1e-6


class InPlaceOnSlice(nn.Module):
    """ReLU in place on a slice of features that are read again afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.pool, self.relu = rp.nn.LiftConv2d(3, 2, 3, 4), rp.nn.GroupMaxPool2d(2), nn.ReLU(inplace=True)
        self.project = rp.nn.Project("mean")

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        middle = self.pool(self.relu(x[..., 2:-2, 2:-2]))
        return self.project(rp.nn.center_crop(x, 2, 2)) + self.project(middle)


def test_a_slice_can_be_changed_in_place() -> None:
    model = InPlaceOnSlice()
    assert difference(rp.freeze(model), model, torch.randn(2, 3, 10, 10)) < 1e-6


def test_a_pool_with_indices_stays_after_relu() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2, return_indices=True))
    x = torch.randn(1, 3, 10, 10)
    for result, expected in zip(rp.freeze(model)(x), model(x), strict=True):
        torch.testing.assert_close(result, expected)


class Reused(nn.Module):
    """A projection of one orientation, which is a copy and is changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.project = rp.nn.LiftConv2d(3, 2, 3, 1), rp.nn.Project("max")

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        y = self.project(x)
        y.relu_()
        return y + self.project(x)


def test_a_projection_of_one_orientation_is_not_aliased() -> None:
    model = Reused()
    assert difference(rp.freeze(model), model, torch.randn(2, 3, 8, 8)) < 1e-6


class Ensemble(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.members = nn.ModuleList([rp.models.mitosis(n) for n in (1, 4)])
        self.weight = nn.Parameter(torch.tensor([0.25, 0.75]))

    def forward(self, x: Tensor) -> Tensor:
        members = torch.stack([torch.sigmoid(member(x)) for member in self.members], dim=-1)
        return (members * self.weight).sum(dim=-1)


def test_networks_inside_modules() -> None:
    model = randomize(Ensemble())
    frozen = rp.freeze(model)
    x = torch.rand(2, 3, 68, 76)
    assert difference(frozen, model, x) < 1e-5
    assert is_plain(frozen)
    with pytest.raises(ValueError, match=r"mitosis accepts image sides of 68 \+ 8·k px .*, but got 70 px"):
        frozen(x[..., :70])


def test_parametrized_layers_are_frozen() -> None:
    model = randomize(nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 4), nn.ReLU(), rp.nn.Project()))
    parametrizations.spectral_norm(model[0])
    x = torch.rand(1, 3, 8, 8)
    assert difference(rp.freeze(model), model.eval(), x) < 1e-5


BLOCKS = ("conv", "grouped", "dilated", "strided", "relu", "gelu", "prelu", "batch", "group", "layer", "max", "average")
BLOCKS += ("blurred", "rms", "blurred rms", "smoothed rms", "up", "smooth", "drop", "residual", "skip", "crop")


class RandomNetwork(nn.Module):
    """Layers in random order, with residual blocks and skip connections."""

    def __init__(self, blocks: list[str], orientations: int, projection: str) -> None:
        super().__init__()
        n, c = orientations, 4
        layers: dict[str, Callable[[], nn.Module]] = {
            "conv": lambda: rp.nn.GroupConv2d(c, c, 3, n, padding="same"),
            "grouped": lambda: rp.nn.GroupConv2d(c, c, 3, n, padding=1, groups=2, bias=False, padding_mode="replicate"),
            "dilated": lambda: rp.nn.GroupConv2d(c, c, 3, n, padding=2, dilation=2),
            "strided": lambda: rp.nn.GroupConv2d(c, c, 3, n, stride=2, padding=1),
            "relu": lambda: nn.ReLU(inplace=True),
            "gelu": nn.GELU,
            "prelu": lambda: nn.PReLU(c),
            "batch": lambda: rp.nn.GroupBatchNorm2d(c),
            "group": lambda: rp.nn.GroupNorm2d(2, c),
            "layer": lambda: rp.nn.GroupLayerNorm2d(c),
            "group of orientation": lambda: rp.nn.GroupNorm2d(2, c, per_orientation=True),
            "layer of orientation": lambda: rp.nn.GroupLayerNorm2d(c, per_orientation=True),
            "scale": lambda: rp.nn.ChannelScale(c, init=0.5),
            "filter": lambda: rp.nn.GroupFilter2d(torch.ones(3, 3) / 9, padding=1),
            "depth": lambda: rp.nn.StochasticDepth(0.5),
            "transposed": lambda: rp.nn.GroupConvTranspose2d(c, c, 3, n, stride=2, padding=1),
            "max": lambda: rp.nn.GroupMaxPool2d(3, stride=2, padding=1),
            "average": lambda: rp.nn.GroupAvgPool2d(3, stride=1, padding=1),
            "blurred": lambda: rp.nn.GroupMaxPool2d(3, stride=2, padding=1, blur=3),
            "rms": lambda: rp.nn.GroupAvgPool2d(3, stride=2, padding=1, power=2),
            "blurred rms": lambda: rp.nn.GroupAvgPool2d(1, stride=2, blur=5, power=2),
            "smoothed rms": lambda: rp.nn.GroupAvgPool2d(1, blur=3, power=2),
            "up": lambda: rp.nn.GroupUpsample2d(2),
            "smooth": lambda: rp.nn.GroupUpsample2d(2, mode="bilinear"),
            "drop": lambda: rp.nn.GroupDropout2d(0.3),
            "residual": lambda: Residual(c, n),
            "skip": lambda: rp.nn.GroupConv2d(2 * c, c, 1, n),
            "crop": nn.Identity,
        }
        self.blocks = blocks
        self.lift = rp.nn.LiftConv2d(3, c, 3, n, padding=1)
        self.layers = nn.ModuleList(layers[block]() for block in blocks)
        self.project = rp.nn.Project(projection, c, n)
        self.head = nn.Conv2d(c, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for block, layer in zip(self.blocks, self.layers, strict=True):
            if block == "crop":
                x = rp.nn.center_crop(x, x.shape[-2] - 2, x.size(-1) - 2)
            elif block == "skip":
                x = layer(rp.nn.concatenate((x, x * 0.5)))
            else:
                x = layer(x)
        return self.head(self.project(x))


@settings(max_examples=60, deadline=None)
@given(
    blocks=st.lists(st.sampled_from(BLOCKS), max_size=6),
    orientations=st.integers(1, 5),
    projection=st.sampled_from(PROJECTIONS),
    seed=st.integers(0, 1000),
)
def test_random_modules(blocks: list[str], orientations: int, projection: str, seed: int) -> None:
    torch.manual_seed(seed)
    model = randomize(RandomNetwork(blocks, orientations, projection).double())
    x = torch.rand(2, 3, 17, 9, dtype=torch.float64)
    try:
        model(x)
    except ValueError:  # the size does not fit this order of layers
        return
    frozen = rp.freeze(model)
    assert difference(frozen, model, x) < 1e-12
    assert is_plain(frozen)


# Errors


class Calls(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.lift, self.project, self.act = rp.nn.LiftConv2d(3, 2, 3, 4), rp.nn.Project(), act

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.act(self.lift(x)))


class Branches(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Calls(lambda x: x.softmax(dim=2)), r"cannot translate 'softmax'.* SE\(2\) features is not known; use layers"),
        (Calls(lambda x: F.interpolate(x, scale_factor=2.0)), "cannot translate 'interpolate'"),
        (Calls(lambda x: torch.cat([x, x], dim=2)), "this call concatenates along axis 2, but SE"),
        (Calls(lambda x: x[:, 1:]), r"only be sliced along rows and columns; use x\[..., top:bottom, left:right\]"),
        (Calls(lambda x: x + x.mean()), "'mean'"),
        (
            Calls(nn.Softmax(dim=1)),
            r"'act' in act: Softmax cannot be applied to SE\(2\) features; use a layer of rp.nn",
        ),
        (Calls(rp.nn.GroupConv2d(2, 2, 3, 8)), "GroupConv2d has 8 orientations, but its input has 4"),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), rp.nn.GroupMaxPool2d(2)),
            r"cannot be determined, because the model has no SE\(2\) convolution",
        ),
        (
            nn.Sequential(rp.models.tumor(4), rp.nn.GroupMaxPool2d(2)),
            r"GroupMaxPool2d expects SE\(2\) features, but got an image or projected maps; put LiftConv2d before it",
        ),
        (
            nn.Sequential(rp.nn.LiftConv2d(3, 2, 3, 4), rp.models.tumor(4)),
            r"tumor expects images, but got SE\(2\) features",
        ),
        (
            nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)),
            "BatchNorm2d has no running statistics",
        ),
        (Branches(), r"cannot trace forward\(\) of Branches .* remove branches that depend on the values of a tensor"),
        (
            nn.Sequential(prune.random_unstructured(rp.nn.LiftConv2d(3, 2, 3, 4), "weight", 0.5)),
            "does not support hooks, but 0 has some; remove them first .*prune.remove",
        ),
    ],
)
def test_errors_name_what_cannot_be_frozen(model: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        rp.freeze(model)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


# TorchScript and torch.compile


@pytest.fixture(scope="module", params=[*((name, "paper") for name in BUILDERS), ("nuclei", "faithful")])
def pair(request: pytest.FixtureRequest) -> tuple[rp.models.Network, nn.Module]:
    torch.manual_seed(0)
    name, preset = request.param
    net = randomize(BUILDERS[name](4, preset=preset))
    return net, rp.freeze(net)


def images_of_several_sizes(net: rp.models.Network) -> list[Tensor]:
    field, step = net.receptive_field, net.architecture.size_step
    return [torch.rand(b, 3, field + i * step, field + j * step) for b, i, j in ((1, 0, 0), (3, 2, 1))]


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_accepts_any_size(pair: tuple[rp.models.Network, nn.Module], how: str) -> None:
    net, frozen = pair
    images = images_of_several_sizes(net)
    compiled = torch.jit.script(frozen) if how == "script" else torch.jit.trace(frozen, images[-1])
    for x in images:
        assert difference(compiled, net, x) < 1e-5
    if how == "script":
        x = (images[0] * 255).byte()
        assert difference(compiled, net, x) < 1e-5


def test_torch_compile_needs_one_graph() -> None:
    net = randomize(rp.models.mitosis(4))
    compiled = torch.compile(rp.freeze(net), fullgraph=True, backend="eager")
    assert difference(compiled, net, images_of_several_sizes(net)[0]) < 1e-5


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The TorchScript type system:UserWarning")  # torch.fx's own graph modules
def test_frozen_user_modules_can_be_scripted_and_copied() -> None:
    model = randomize(
        nn.Sequential(rp.nn.LiftConv2d(3, 4, 3, 4), Residual(4, 4), rp.nn.GroupNorm2d(2, 4), rp.nn.Project())
    )
    frozen = rp.freeze(model)
    for other in (torch.jit.script(frozen), copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen))):
        for size in (8, 11):
            assert difference(other, model, torch.rand(2, 3, size, size)) < 1e-5


class Gated(nn.Module):
    """All channels are multiplied by one channel, and by one number."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.gate = rp.nn.LiftConv2d(3, 5, 3, 4), rp.nn.GroupConv2d(5, 1, 3, 4, padding="same")
        self.strength = nn.Parameter(torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        y = x * torch.sigmoid(self.gate(x))
        y *= self.gate(x)
        return x + self.strength * y


@every_dtype
def test_single_channels_and_numbers_are_broadcast(dtype: torch.dtype) -> None:
    model = randomize(Gated().to(dtype))
    assert difference(rp.freeze(model), model, torch.rand(2, 3, 9, 11, dtype=dtype)) < TOLERANCE[dtype]


# Other dtypes


@every_network
@every_half
def test_half_precision_networks_stay_in_half_precision(name: str, dtype: torch.dtype) -> None:
    net = randomize(BUILDERS[name](4)).to(dtype)
    frozen = rp.freeze(net)
    side = net.receptive_field + net.architecture.size_step
    images = torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8)
    for x in (images, images.to(dtype) / 255):
        assert difference(frozen, net, x) < TOLERANCE[dtype]
    assert {parameter.dtype for parameter in frozen.parameters()} == {dtype}


class Preactivated(nn.Module):
    """Norms before convolutions, into which they cannot be folded."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.head = rp.nn.LiftConv2d(3, 4, 3, 4), nn.Conv2d(4, 2, 1)
        self.norms = nn.ModuleList(rp.nn.GroupBatchNorm2d(4) for _ in range(2))
        self.convs = nn.ModuleList(rp.nn.GroupConv2d(4, 4, 3, 4, padding="same") for _ in range(2))
        self.project, self.last = rp.nn.Project(), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = x + conv(torch.relu(norm(x)))
        return self.head(self.last(self.project(x)))


@every_half
def test_float32_norms_in_half_precision_networks(dtype: torch.dtype) -> None:
    model = randomize(Preactivated()).to(dtype)
    for norm in (*model.norms, model.last):
        norm.float()
    assert difference(rp.freeze(model), model, torch.rand(2, 3, 9, 11, dtype=dtype)) < TOLERANCE[dtype]


class Casts(nn.Module):
    """Casts images and features: lifting, a convolution and the head have three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = rp.nn.LiftConv2d(3, 2, 3, 4).bfloat16()
        self.gate = rp.nn.GroupConv2d(2, 1, 3, 4, padding="same")
        self.conv = rp.nn.GroupConv2d(2, 2, 3, 4, padding="same").double()
        self.head = nn.Conv2d(2, 1, 1).bfloat16()
        self.project = rp.nn.Project()

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        y = self.lift((x * 2 - 1 + x).to(torch.bfloat16)).to(dtype, memory_format=torch.channels_last_3d)
        y = y * self.gate(y).type_as(y)
        y = self.conv(y.double()).to(y)
        return self.head(self.project(y).bfloat16()).float()


def test_casts_are_kept() -> None:
    model = randomize(Casts())
    x = torch.rand(2, 3, 9, 11)
    assert difference(rp.freeze(model), model, x) < TOLERANCE[torch.bfloat16]
    assert rp.freeze(model)(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64], ids=["float16", "bfloat16", "float64"])
def test_a_head_of_another_dtype_fails_as_in_the_original(dtype: torch.dtype) -> None:
    net = randomize(rp.models.mitosis(4))
    net.head.to(dtype)
    frozen = rp.freeze(net)
    x = torch.rand(1, 3, 68, 76)
    for model in (net, frozen):
        with pytest.raises(RuntimeError, match=r"Input type \(float\) and bias type .* should be the same"):
            model(x)
    if dtype in HALVES:
        with torch.autocast("cpu", torch.bfloat16):
            assert difference(frozen, net, x) < TOLERANCE[torch.bfloat16]


def test_autocast_around_freezing_has_no_effect() -> None:
    net = randomize(rp.models.mitosis(4))
    parametrizations.spectral_norm(net.stages[0].conv)
    net.eval()
    expected = rp.freeze(net).state_dict()
    with torch.autocast("cpu", torch.bfloat16):
        result = rp.freeze(net).state_dict()
        assert torch.is_autocast_enabled("cpu")
    for key, value in expected.items():
        torch.testing.assert_close(result[key], value, rtol=0, atol=0)


class Autocasts(nn.Module):
    def __init__(self, inside: nn.Module, device: str | None = None, enabled: bool = True) -> None:
        super().__init__()
        self.inside, self.device, self.enabled = inside, device, enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(self.device or x.device.type, torch.bfloat16, enabled=self.enabled):
            y = self.inside(x)
        return y.float()


class Decorated(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor) -> Tensor:
        return self.inside(x)


@pytest.mark.parametrize(
    ("wrap", "name"),
    [
        (lambda net: MixedNetwork(net, torch.float16), "MixedNetwork"),
        (lambda net: MixedNetwork(rp.freeze(net), torch.bfloat16), "MixedNetwork"),
        (lambda net: nn.Sequential(MixedNetwork(net, torch.bfloat16), nn.Sigmoid()), "MixedNetwork"),
        (Autocasts, "Autocasts"),
        (lambda net: Autocasts(net, "cpu"), "Autocasts"),
        (lambda _: Autocasts(Residual(4, 4), "cpu"), "Autocasts"),
        (lambda net: nn.Sequential(Autocasts(net)), "Autocasts"),
        (lambda net: nn.Sequential(Autocasts(net, "cpu")), "Autocasts"),
        (Decorated, "Decorated"),
    ],
    ids=[
        "mixed",
        "mixed and frozen",
        "mixed inside",
        "of x",
        "of the cpu",
        "of layers",
        "of x inside",
        "inside",
        "decorated",
    ],
)
def test_autocast_in_a_forward_is_refused(wrap: Callable[[nn.Module], nn.Module], name: str) -> None:
    model = wrap(randomize(rp.models.mitosis(4)))
    with pytest.raises(ValueError, match="autocast") as error:
        rp.freeze(model)
    assert str(error.value) == (
        f"freeze() does not support torch.autocast, which forward() of {name} uses; call freeze() on the submodule "
        f"that this forward() calls, and run the result within torch.autocast."
    )
    assert not torch.is_autocast_enabled("cpu")


def test_the_workaround_for_autocast_in_a_forward_works() -> None:
    net = randomize(rp.models.mitosis(4))
    x = torch.rand(1, 3, 68, 76)
    for wrap in (Autocasts, lambda inside: MixedNetwork(inside, torch.bfloat16)):
        assert difference(wrap(rp.freeze(net)), wrap(net), x) < TOLERANCE[torch.bfloat16]


def test_equivariant_refuses_autocast_with_the_same_message() -> None:
    with pytest.raises(ValueError, match=r"^equivariant\(\) does not support torch.autocast, which"):
        rp.equivariant(Autocasts(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1))))


def test_disabled_autocast_is_dropped() -> None:
    model = Autocasts(randomize(rp.models.mitosis(4)), "cpu", enabled=False)
    assert difference(rp.freeze(model), model, torch.rand(1, 3, 68, 76)) < 1e-5


# Networks with an overridden forward


class Probabilities(Network):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.compute_logits(x))


class Doubled(Network):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def test_an_overridden_forward_is_frozen() -> None:
    model = randomize(Probabilities(rp.models.mitosis(4).architecture, 4))
    frozen = rp.freeze(model)
    assert isinstance(frozen, FrozenNetwork)
    assert difference(frozen, model, torch.rand(1, 3, 68, 76)) < 1e-5


def test_an_overridden_forward_may_not_call_the_original() -> None:
    with pytest.raises(
        ValueError, match=r"forward\(\) of Doubled .* compute_logits\(\) in forward\(\) instead of .*, and"
    ):
        rp.freeze(Doubled(rp.models.mitosis(4).architecture, 4))


# Threads


@pytest.fixture
def _many_switches() -> Iterator[None]:
    """Switch between threads very often, so that races show."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(usual)


@pytest.mark.usefixtures("_many_switches")
def test_threads_can_freeze_at_the_same_time() -> None:
    models = [randomize(BUILDERS[name](n)) for name in BUILDERS for n in (1, 2)]
    models += [randomize(Shared()), randomize(Preactivated())]
    images = torch.rand(1, 3, 88, 88)

    def freeze_and_compare(model: nn.Module) -> float:
        side = model.nearest_sizes(80)[-1] if isinstance(model, Network) else 20
        return difference(rp.freeze(model), model, images[..., :side, :side])

    def convert_and_freeze(model: nn.Module) -> float:
        net = rp.equivariant(model, 4).eval()
        return difference(rp.freeze(net), net, images[..., :20, :20])

    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 2, 1))
    with ThreadPoolExecutor(8) as threads:
        differences = [*threads.map(freeze_and_compare, models * 3), *threads.map(convert_and_freeze, [plain] * 12)]
    assert max(differences) < 1e-5


tracing_started, may_finish = Event(), Event()


class Slow(nn.Module):
    """Blocks in the middle of its forward until the test lets it finish."""

    def __init__(self) -> None:
        super().__init__()
        self.lift, self.scale, self.project = rp.nn.LiftConv2d(3, 2, 3, 4), nn.Parameter(torch.ones(1)), rp.nn.Project()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        tracing_started.set()
        assert may_finish.wait(60)
        return self.project(x) * self.scale


def test_freezing_does_not_affect_other_threads() -> None:
    tracing_started.clear()
    may_finish.clear()
    slow, model = Slow(), randomize(Preactivated())
    x = torch.rand(1, 3, 9, 9)
    with torch.no_grad():
        expected = model(x)
    with ThreadPoolExecutor(1) as threads:
        frozen = threads.submit(rp.freeze, slow)
        try:
            assert tracing_started.wait(60)
            with torch.no_grad():
                result = model(x)
        finally:
            may_finish.set()
    torch.testing.assert_close(result, expected, rtol=0, atol=0)
    assert difference(frozen.result(), slow, x) < 1e-6
