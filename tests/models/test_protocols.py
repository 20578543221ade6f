"""Dense networks: their geometry, how it is measured for any module, and outputs that do not depend on tiling."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import rotopath as rp
from rotopath.inference import predict
from rotopath.models import ARCHITECTURES, DenseNetwork, Geometry, WindowNetwork, make_dense, protocols
from rotopath.models.protocols import (
    DenseModule,
    SlidingModule,
    has_geometry,
    measure_geometry,
    replace_module,
    unwrap,
)

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing them would take minutes

CPU = torch.device("cpu")
PAPER = {
    "mitosis": Geometry(outputs=1, smallest_px=68, step_px=8, stride_px=8, rim=0),
    "nuclei": Geometry(outputs=3, smallest_px=44, step_px=4, stride_px=1, rim=0),
    "tumor": Geometry(outputs=1, smallest_px=88, step_px=12, stride_px=12, rim=0),
}

every_network = pytest.mark.parametrize("name", PAPER)
every_preset = pytest.mark.parametrize("preset", ["paper", "faithful"])


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    stride, block = draw(st.integers(1, 12)), draw(st.integers(1, 6))
    return Geometry(1, draw(st.integers(1, 200)), stride * block, stride, draw(st.integers(0, 9)))


# Geometry


@every_network
def test_the_papers_networks_declare_their_geometry(name: str) -> None:
    assert ARCHITECTURES[name].geometry == getattr(rp.models, name)().geometry == PAPER[name]


@pytest.mark.parametrize(
    ("name", "size", "outputs", "block", "margins", "context"),
    [("mitosis", 84, 3, 1, 60, 68), ("nuclei", 60, 20, 4, 40, 44), ("tumor", 100, 2, 1, 76, 88)],
)
def test_known_output_sizes(name: str, size: int, outputs: int, block: int, margins: int, context: int) -> None:
    geometry = PAPER[name]
    assert geometry.output_size(size) == outputs
    assert (geometry.block, geometry.margins_px, geometry.context_px) == (block, margins, context)
    assert geometry.output_size(geometry.smallest_px) == block


def test_the_context_includes_the_rim() -> None:
    geometry = rp.models.tumor(preset="faithful").geometry
    assert geometry.rim == 2
    assert geometry.context_px == 88 + 2 * 2 * 12


@every_network
@every_preset
def test_geometry_and_architecture_agree_on_sizes(name: str, preset: str) -> None:
    architecture = ARCHITECTURES[name].choose(preset)
    geometry = architecture.geometry
    for size in range(1, 250):
        assert geometry.fits(size) == architecture.fits(size)
        assert geometry.nearest_sizes(size) == architecture.nearest_sizes(size)
        if geometry.fits(size):
            assert geometry.output_size(size) == architecture.output_size(size)


@pytest.mark.parametrize(
    ("size", "sentence"), [(87, "use 88 px"), (0, "use 88 px"), (99, "use 88 or 100 px"), (101, "use 100 or 112 px")]
)
def test_sizes_off_the_grid_are_refused_with_the_nearest_sizes(size: int, sentence: str) -> None:
    assert not PAPER["tumor"].fits(size)
    with pytest.raises(ValueError, match=rf"An image side of {size} px does not fit .* 88 \+ 12·k px .*; {sentence}"):
        PAPER["tumor"].output_size(size)


@given(geometry=geometries(), size=st.integers(0, 600))
def test_nearest_sizes_fit_and_are_neighbors(geometry: Geometry, size: int) -> None:
    nearest = geometry.nearest_sizes(size)
    assert all(map(geometry.fits, nearest))
    if geometry.fits(size):
        assert nearest == (size,)
    elif size < geometry.smallest_px:
        assert nearest == (geometry.smallest_px,)
    else:
        below, above = nearest
        assert below < size < above
        assert not any(map(geometry.fits, range(below + 1, above)))


@given(geometry=geometries(), steps=st.integers(0, 30))
def test_outputs_are_a_stride_apart(geometry: Geometry, steps: int) -> None:
    size = geometry.smallest_px + steps * geometry.step_px
    assert geometry.fits(size)
    assert geometry.output_size(size) * geometry.stride_px == size - geometry.margins_px


@pytest.mark.parametrize("name", ["outputs", "smallest_px", "step_px", "stride_px"])
def test_numbers_below_1_are_refused(name: str) -> None:
    numbers = {"outputs": 1, "smallest_px": 8, "step_px": 4, "stride_px": 4}
    with pytest.raises(ValueError, match=f"{name} must be 1 or more; got 0"):
        Geometry(**numbers | {name: 0})


def test_steps_must_be_multiples_of_strides() -> None:
    with pytest.raises(ValueError, match="step_px must be a multiple of its stride_px; got 6 px and 4 px"):
        Geometry(1, 8, 6, 4)


def test_a_rim_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rim, .*-1"):
        Geometry(1, 8, 4, 4, rim=-1)


# Maps


def convolve(kernel: int, padding: int = 0, stride: int = 1, dilation: int = 1, inputs: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, 3, kernel, stride, padding, dilation)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = convolve(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.conv(x))


@pytest.mark.parametrize(
    ("module", "window_px", "expected"),
    [
        (convolve(1), 16, Geometry(3, 1, 1, 1)),
        (convolve(5), 16, Geometry(3, 5, 1, 1)),
        (convolve(5, 2), 16, Geometry(3, 1, 1, 1, rim=2)),
        (convolve(3, dilation=4, padding=4), 16, Geometry(3, 1, 1, 1, rim=4)),
        (nn.Sequential(convolve(3), nn.MaxPool2d(2)), 16, Geometry(3, 4, 2, 2)),
        (nn.Sequential(convolve(3, 1), nn.MaxPool2d(4)), 16, Geometry(3, 4, 4, 4, rim=1)),
        (convolve(12, stride=12), 24, Geometry(3, 12, 12, 12)),
        (nn.Sequential(nn.ZeroPad2d((4, 0, 4, 0)), convolve(5)), 16, Geometry(3, 1, 1, 1, rim=4)),
        (nn.Sequential(nn.AvgPool2d(2), nn.Upsample(scale_factor=2)), 16, Geometry(3, 2, 2, 1, rim=1)),
        (nn.Sequential(convolve(3), nn.AvgPool2d(3), nn.Upsample(scale_factor=3)), 17, Geometry(3, 5, 3, 1, rim=2)),
        (Residual(), 16, Geometry(3, 1, 1, 1, rim=2)),
        (convolve(16), 16, Geometry(3, 16, 1, 1)),
        (nn.Sequential(convolve(5, 2), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 3, padding=1)), 8, Geometry(3, 1, 1, 1, 3)),
    ],
    ids=[
        "1",
        "5",
        "5 padded",
        "dilated",
        "and pool",
        "padded and pool",
        "patches",
        "padded on one side",
        "down and up",
        "down and up by 3",
        "residual",
        "one window",
        "two convolutions",
    ],
)
def test_measured_geometries_of_small_modules(module: nn.Module, window_px: int, expected: Geometry) -> None:
    torch.manual_seed(0)
    assert measure_geometry(module, window_px) == expected
    dense = make_dense(module, 3, window_px)
    assert isinstance(dense, DenseModule)
    assert dense.geometry == expected


@every_network
@every_preset
@pytest.mark.parametrize("orientations", [1, 2])
def test_measured_geometry_equals_the_declared_one_or_has_a_larger_rim(
    name: str, preset: str, orientations: int
) -> None:
    """Outputs of a block share one window, so the outermost of them depend on more pixels than declared."""
    torch.manual_seed(0)
    network = getattr(rp.models, name)(orientations, preset=preset)
    measured, declared = measure_geometry(network, network.architecture.input_px), network.geometry
    assert measured is not None
    assert (measured.outputs, measured.smallest_px, measured.step_px, measured.stride_px) == (
        declared.outputs,
        declared.smallest_px,
        declared.step_px,
        declared.stride_px,
    )
    assert declared.rim <= measured.rim <= declared.rim + declared.block - 1


LAYERS = st.one_of(
    st.sampled_from([(1, 0, 1), (3, 0, 1), (3, 1, 1), (5, 0, 1), (5, 2, 1), (3, 2, 2)]),  # kernel, padding, dilation
    st.sampled_from(["pool", "relu", "smooth", "norm"]),
)


def build(layers: list[tuple[int, int, int] | str], seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    layer_types = {
        "pool": lambda: nn.MaxPool2d(2),
        "relu": nn.LeakyReLU,
        "smooth": lambda: nn.AvgPool2d(3, 1, 1),
        "norm": lambda: nn.BatchNorm2d(3),
    }
    modules = [
        layer_types[layer]() if isinstance(layer, str) else convolve(layer[0], layer[1], 1, layer[2])
        for layer in layers
    ]
    return nn.Sequential(*modules).eval()


@settings(max_examples=12, deadline=None)
@given(layers=st.lists(LAYERS, min_size=1, max_size=5), window_px=st.integers(20, 26), seed=st.integers(0, 99))
def test_tiled_prediction_equals_prediction_of_the_whole_image(
    layers: list[tuple[int, int, int] | str], window_px: int, seed: int
) -> None:
    if layers.count("pool") > 2:
        layers = [layer for layer in layers if layer != "pool"]
    module = build(layers, seed).double()
    try:
        module(torch.zeros(1, 3, window_px, window_px).double())
    except RuntimeError:
        assume(False)  # too many layers for such a window
    network = make_dense(module, 3, window_px)
    geometry = network.geometry
    image = np.random.default_rng(seed).integers(0, 256, (61, 74, 3), np.uint8)
    tile_px = geometry.context_px + 3 * geometry.step_px
    whole, tiled = (predict(network, image, CPU, tile_px=side).probabilities for side in (1024, tile_px))
    np.testing.assert_allclose(whole, tiled, atol=1e-6)


class WholeImage(nn.Module):
    """A map in which every output depends on the whole image."""

    def __init__(self, over: str) -> None:
        super().__init__()
        self.conv, self.over = convolve(3, 1), over

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.over == "mean":
            return x - x.mean(dim=(2, 3), keepdim=True)
        if self.over == "attention":
            x = nn.functional.avg_pool2d(x, 8)
            flat = x.flatten(2)
            return (flat @ (flat.mT @ flat).softmax(dim=-1)).view_as(x)
        if self.over == "norm":
            return nn.functional.instance_norm(x)
        return x + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype, device=x.device)  # depends on the position


@pytest.mark.parametrize("over", ["mean", "attention", "norm", "position"])
def test_maps_that_depend_on_the_whole_image_are_refused(over: str) -> None:
    with pytest.raises(ValueError, match=r"^WholeImage returns a map .* cannot be computed tile by tile; use layers"):
        make_dense(WholeImage(over), 3, 16)
    assert measure_geometry(WholeImage(over), 16) is None


def test_modules_that_replace_nan_are_refused() -> None:
    """NaN pixels do not affect their outputs, but near edges the outputs do not move with the image."""

    class ReplacesNan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolve(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.nan_to_num(x))

    with pytest.raises(ValueError, match="ReplacesNan"):
        make_dense(ReplacesNan(), 3, 16)


# Modules that declare their geometry


class Declares(nn.Module):
    geometry = Geometry(2, 7, 5, 5, rim=1)

    def forward(self, _: Tensor) -> Tensor:
        raise AssertionError("must not be called")


def test_a_declared_geometry_is_not_measured() -> None:
    module = Declares()
    assert make_dense(module, 2) is module
    assert isinstance(module, DenseNetwork)
    network = rp.models.tumor(outputs=4)
    assert make_dense(network, 4, window_px=123) is network
    assert isinstance(network, DenseNetwork)


def test_wrong_numbers_of_outputs_are_refused() -> None:
    for module in (Declares(), nn.Conv2d(3, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))):
        name = type(module).__name__
        with pytest.raises(ValueError, match=f"{name} returns 2 logits, but the task needs 5; build it with outputs=5"):
            make_dense(module, 5, 16)


# Windows


class Windows(nn.Module):
    """One output per window of 12 px, which depends on the positions in the window."""

    window_px = 12

    def __init__(self, maps: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.head = convolve(3, 1), nn.BatchNorm2d(3), nn.Linear(3 * 12 * 12, 2)
        self.maps = maps

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.norm(self.conv(x)).flatten(1))
        return logits[..., None, None] if self.maps else logits


@pytest.mark.parametrize("maps", [False, True], ids=["logits (B, K)", "logits (B, K, 1, 1)"])
@pytest.mark.parametrize("stride_px", [None, 1, 5, 12, 15])
@pytest.mark.parametrize("batch", [1, 3, 1000])
def test_a_window_module_is_applied_as_a_sliding_window(
    maps: bool, stride_px: int | None, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "WINDOW_BATCH_PX", batch * 12 * 12)
    torch.manual_seed(0)
    module = Windows(maps).double().eval()
    dense = make_dense(module, 2, stride_px=stride_px)
    assert isinstance(dense, SlidingModule)
    assert not dense.training
    stride = stride_px or 6
    assert dense.geometry == Geometry(2, 12, stride, stride)
    height, width = 12 + 3 * stride, 12 + stride
    image = torch.rand(2, 3, height, width, dtype=torch.float64)
    logits = dense(image)
    assert logits.shape == (2, 2, dense.geometry.output_size(height), dense.geometry.output_size(width))
    for row, column in np.ndindex(*logits.shape[2:]):
        top, left = row * stride, column * stride
        by_hand = module(image[..., top : top + 12, left : left + 12]).flatten(1)
        torch.testing.assert_close(logits[..., row, column], by_hand)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("module", [Windows(), nn.Conv2d(3, 2, 3)], ids=["windows", "maps"])
def test_bytes_are_scaled(module: nn.Module, dtype: torch.dtype) -> None:
    dense = make_dense(copy.deepcopy(module).to(dtype).eval(), 2, 12)
    image = torch.randint(0, 256, (1, 3, 18, 24), dtype=torch.uint8)
    assert dense(image).dtype == dtype
    torch.testing.assert_close(dense(image), dense(image.to(dtype) / 255))


def test_gradients_flow_through_sliding_windows() -> None:
    dense = make_dense(Windows(), 2)
    dense(torch.rand(1, 3, 24, 24)).sum().backward()
    assert all(weight.grad is not None for weight in dense.parameters())


def test_the_window_size_is_an_argument_or_an_attribute() -> None:
    assert isinstance(Windows(), WindowNetwork)
    with pytest.raises(ValueError, match="Flatten does not specify the size of its windows; set 'window_px'"):
        make_dense(nn.Flatten(), 2)
    with pytest.raises(ValueError, match=r"^Windows does not accept windows of 16 × 16 px: .*mat1 and mat2.*\.$"):
        make_dense(Windows(), 2, window_px=16)


def test_a_window_output_is_at_the_center_of_its_window() -> None:
    """A dark square is detected at its position in the image."""

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 4 - 8 * x[:, :1, 5:7, 5:7].mean(dim=(2, 3))

    image = np.full((50, 64, 3), 255, np.uint8)
    image[20:24, 40:44] = 0
    result = predict(make_dense(Middle().eval(), 1, 12, 2), image, CPU)
    detected = np.argwhere(result.probabilities[0] > 0.5)
    np.testing.assert_allclose(result.positions(detected.astype(float)).mean(axis=0), (21.5, 41.5), atol=1)


@pytest.mark.parametrize(
    ("wrong", "window_px"),
    [
        ({}, 16),
        ({"outputs": 2}, 16),
        ({"smallest_px": 6}, 16),
        ({"smallest_px": 3}, 16),
        ({"step_px": 4}, 16),
        ({"stride_px": 1}, 16),
        ({"step_px": 4, "stride_px": 4}, 16),
        ({}, 15),
        ({}, 1),
    ],
    ids=str,
)
def test_has_geometry_rejects_wrong_geometries(wrong: dict[str, int], window_px: int) -> None:
    module = nn.Sequential(convolve(3), nn.MaxPool2d(2))
    right = measure_geometry(module, 16)
    assert right == Geometry(3, 4, 2, 2)
    agrees = has_geometry(module, replace(right, **wrong), window_px, slides=False)
    assert agrees == (not wrong and window_px == 16)
    assert not has_geometry(module, right, window_px, slides=True)


@pytest.mark.parametrize(
    ("change", "is_right"),
    [
        ({}, True),
        ({"step_px": 4, "stride_px": 4}, True),
        ({"outputs": 3}, False),
        ({"smallest_px": 10}, False),
        ({"step_px": 12}, False),
        ({"rim": 1}, False),
    ],
    ids=str,
)
def test_has_geometry_accepts_any_stride_of_sliding_windows(change: dict[str, int], is_right: bool) -> None:
    right = make_dense(Windows(), 2).geometry
    assert has_geometry(Windows(), replace(right, **change), 12, slides=True) == is_right
    assert not has_geometry(Windows(), right, 14, slides=True)
    assert not has_geometry(Windows(), right, 12, slides=False)


# Modules that cannot be used


class Returns(nn.Module):
    """A convolution and a function of its output; an error is raised instead."""

    def __init__(self, function: object) -> None:
        super().__init__()
        self.conv, self.function = convolve(3), function

    def forward(self, x: Tensor) -> object:
        if isinstance(self.function, Exception):
            raise self.function
        return self.function(self.conv(x)) if callable(self.function) else self.function


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyError("stem"), "'stem'"), (ValueError("my windows\n  are even."), "my windows are even")]
)
def test_errors_of_a_module_are_reported(error: Exception, reason: str) -> None:
    with pytest.raises(ValueError, match="does not accept") as refused:
        make_dense(Returns(error), 3, 16)
    assert str(refused.value) == f"Returns does not accept windows of 16 × 16 px: {reason}."


@pytest.mark.parametrize(
    ("function", "returned"),
    [
        (lambda x: {"out": x}, "dict"),
        (lambda x: (x, x), "tuple"),
        (lambda x: x.flatten(2), "a tensor of shape (2, 3, 196)"),
        (lambda x: x.flatten(0, 1)[None], "a tensor of shape (1, 6, 14, 14)"),
        (lambda x: x.mean(), "a tensor of shape ()"),
    ],
    ids=["dict", "tuple", "3 axes", "batch", "number"],
)
def test_outputs_that_are_not_logits_are_refused(function: object, returned: str) -> None:
    with pytest.raises(ValueError, match="logits") as refused:
        make_dense(Returns(function), 3, 16)
    assert str(refused.value) == f"Returns returns {returned}; it must return logits of shape (B, K) or (B, K, h, w)."


def test_oblong_outputs_for_square_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Returns returns logits of shape \(2, 3, 14, 5\) for a square window"):
        make_dense(Returns(lambda x: x[..., :5]), 3, 16)


def test_a_module_for_gray_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Conv2d does not accept windows of 16 × 16 px: .*1 channels, but got 3"):
        make_dense(nn.Conv2d(1, 2, 3), 2, 16)


class SquaresOnly(Returns):
    def forward(self, x: Tensor) -> object:
        if x.shape[2] != x.shape[3]:
            raise ValueError("squares only")
        return super().forward(x)


@pytest.mark.parametrize("module", [SquaresOnly(lambda x: x), convolve(7, stride=7)], ids=["squares", "steps of 7"])
def test_errors_name_modules_that_cannot_be_measured(module: nn.Module) -> None:
    """Modules for square images only, and modules whose step between image sizes is not a candidate."""
    with pytest.raises(ValueError, match=f"^{type(module).__name__} "):
        make_dense(module, 3, 70)


def test_a_module_that_casts_its_input_is_measured_or_named_in_the_error() -> None:
    class Casts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolve(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(x.float())

    try:
        assert make_dense(Casts(), 3, 16).geometry == Geometry(3, 1, 1, 1, rim=1)
    except ValueError as error:
        assert str(error).startswith("Casts ")  # noqa: PT017


# The module itself


class Stateful(nn.Module):
    """A buffer that changes with every call, and a layer that draws random numbers."""

    calls: Tensor

    def __init__(self, maps: bool) -> None:
        super().__init__()
        self.conv, self.norm, self.drop, self.maps = convolve(3, 1), nn.BatchNorm2d(3), nn.Dropout(), maps
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.norm(self.conv(x)))
        return x if self.maps else x.mean(dim=(2, 3))


@pytest.mark.parametrize("maps", [True, False], ids=["maps", "windows"])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_make_dense_does_not_change_the_module(maps: bool, training: bool, dtype: torch.dtype) -> None:
    module = Stateful(maps).to(dtype).train(training)
    module.conv.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    grad = [weight.requires_grad for weight in module.parameters()]
    state = torch.get_rng_state()
    dense = make_dense(module, 3, 16)
    assert torch.equal(torch.get_rng_state(), state), "and no random numbers are drawn"
    assert unwrap(dense) is module
    assert dense.training is training
    assert [layer.training for layer in module.modules()] == [training] * 4
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert [weight.requires_grad for weight in module.parameters()] == grad
    assert {weight.device for weight in module.parameters()} == {CPU}


@pytest.mark.parametrize("maps", [True, False], ids=["maps", "windows"])
def test_layers_in_evaluation_mode_stay_in_it(maps: bool) -> None:
    """Such as batch norms whose statistics are kept fixed during training."""
    module = Stateful(maps).train()
    module.norm.eval()
    make_dense(module, 3, 16)
    assert module.training
    assert not module.norm.training


def test_replace_module_and_unwrap() -> None:
    for module in (Windows(), nn.Conv2d(3, 2, 3)):
        dense = make_dense(module, 2, 12)
        other = copy.deepcopy(module)
        replaced = replace_module(dense, other)
        assert type(replaced) is type(dense)
        assert replaced.geometry == dense.geometry
        assert unwrap(replaced) is other
        assert isinstance(replaced, DenseNetwork)
    network = rp.models.mitosis(1)
    frozen = rp.freeze(network)
    assert replace_module(network, frozen) is frozen
    assert unwrap(network) is network
