"""What a network promises: where its outputs lie, found out for any module, and answers that are the same in tiles."""

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
def test_the_papers_networks_say_where_their_outputs_lie(name: str) -> None:
    assert ARCHITECTURES[name].geometry == getattr(rp.models, name)().geometry == PAPER[name]


@pytest.mark.parametrize(
    ("name", "size", "outputs", "block", "lost", "around"),
    [("mitosis", 84, 3, 1, 60, 68), ("nuclei", 60, 20, 4, 40, 44), ("tumor", 100, 2, 1, 76, 88)],
)
def test_known_numbers_of_outputs(name: str, size: int, outputs: int, block: int, lost: int, around: int) -> None:
    geometry = PAPER[name]
    assert geometry.output_size(size) == outputs
    assert (geometry.block, geometry.lost_px, geometry.surrounded_px) == (block, lost, around)
    assert geometry.output_size(geometry.smallest_px) == block


def test_a_rim_is_seen_around_the_smallest_window() -> None:
    geometry = rp.models.tumor(preset="faithful").geometry
    assert geometry.rim == 2
    assert geometry.surrounded_px == 88 + 2 * 2 * 12


@every_network
@every_preset
def test_a_geometry_counts_as_its_architecture_does(name: str, preset: str) -> None:
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
def test_sizes_off_the_grid_are_refused_with_the_nearest(size: int, sentence: str) -> None:
    assert not PAPER["tumor"].fits(size)
    with pytest.raises(ValueError, match=f"An image side of {size} px is off the network's grid; {sentence}"):
        PAPER["tumor"].output_size(size)


@given(geometry=geometries(), size=st.integers(0, 600))
def test_nearest_sizes_fit_and_are_neighbours(geometry: Geometry, size: int) -> None:
    found = geometry.nearest_sizes(size)
    assert all(geometry.fits(each) for each in found)
    if geometry.fits(size):
        assert found == (size,)
    elif size < geometry.smallest_px:
        assert found == (geometry.smallest_px,)
    else:
        below, above = found
        assert below < size < above
        assert not any(geometry.fits(each) for each in range(below + 1, above))


@given(geometry=geometries(), steps=st.integers(0, 30))
def test_outputs_lie_a_stride_apart(geometry: Geometry, steps: int) -> None:
    size = geometry.smallest_px + steps * geometry.step_px
    assert geometry.fits(size)
    assert geometry.output_size(size) * geometry.stride_px == size - geometry.lost_px


@pytest.mark.parametrize("name", ["outputs", "smallest_px", "step_px", "stride_px"])
def test_numbers_below_1_are_refused(name: str) -> None:
    numbers = {"outputs": 1, "smallest_px": 8, "step_px": 4, "stride_px": 4}
    with pytest.raises(ValueError, match=f"{name} is 1 or more; got 0"):
        Geometry(**numbers | {name: 0})


def test_steps_are_multiples_of_strides() -> None:
    with pytest.raises(ValueError, match="multiple of its stride; got 6 px and 4 px"):
        Geometry(1, 8, 6, 4)


def test_a_rim_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match=r"rim .*-1"):
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
        "of a point",
        "5",
        "5 padded",
        "dilated",
        "and pool",
        "padded and pool",
        "of patches",
        "looks back",
        "down and up",
        "down and up by 3",
        "residual",
        "one window",
        "two",
    ],
)
def test_geometries_of_small_modules(module: nn.Module, window_px: int, expected: Geometry) -> None:
    torch.manual_seed(0)
    assert measure_geometry(module, window_px) == expected
    dense = make_dense(module, 3, window_px)
    assert isinstance(dense, DenseModule)
    assert dense.geometry == expected


@every_network
@every_preset
@pytest.mark.parametrize("orientations", [1, 4])
def test_what_is_measured_is_what_networks_declare_or_more_cautious(name: str, preset: str, orientations: int) -> None:
    """Outputs of a block share their window, and of these the outermost see further than is said of the smallest."""
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
    named = {
        "pool": lambda: nn.MaxPool2d(2),
        "relu": nn.LeakyReLU,
        "smooth": lambda: nn.AvgPool2d(3, 1, 1),
        "norm": lambda: nn.BatchNorm2d(3),
    }
    made = [named[each]() if isinstance(each, str) else convolve(each[0], each[1], 1, each[2]) for each in layers]
    return nn.Sequential(*made).eval()


@settings(max_examples=12, deadline=None)
@given(layers=st.lists(LAYERS, min_size=1, max_size=5), window_px=st.integers(20, 26), seed=st.integers(0, 99))
def test_tiles_of_a_measured_module_give_the_same_as_the_whole(
    layers: list[tuple[int, int, int] | str], window_px: int, seed: int
) -> None:
    if layers.count("pool") > 2:
        layers = [each for each in layers if each != "pool"]
    module = build(layers, seed).double()
    try:
        module(torch.zeros(1, 3, window_px, window_px).double())
    except RuntimeError:
        assume(False)  # too many layers for such a window
    network = make_dense(module, 3, window_px)
    geometry = network.geometry
    image = np.random.default_rng(seed).integers(0, 256, (61, 74, 3), np.uint8)
    tile_px = geometry.surrounded_px + 3 * geometry.step_px
    whole, tiled = (predict(network, image, CPU, tile_px=side).probabilities for side in (1024, tile_px))
    np.testing.assert_allclose(whole, tiled, atol=1e-6)


class WholeImage(nn.Module):
    """A map that is normalised by all of the image."""

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
        return x + torch.linspace(0, 1, x.shape[-1], dtype=x.dtype, device=x.device)  # knows where it is


@pytest.mark.parametrize("over", ["mean", "attention", "norm", "position"])
def test_maps_that_depend_on_the_whole_image_are_refused(over: str) -> None:
    with pytest.raises(ValueError, match=r"^WholeImage gives a map .* cannot be computed tile by tile; use layers"):
        make_dense(WholeImage(over), 3, 16)
    assert measure_geometry(WholeImage(over), 16) is None


def test_layers_that_hide_what_they_read_are_found_out() -> None:
    """Pixels that are not a number do not spoil their answers; yet these do not move with the image near edges."""

    class Hides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = convolve(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.nan_to_num(x))

    with pytest.raises(ValueError, match="Hides"):
        make_dense(Hides(), 3, 16)


# Modules that say it themselves


class Declares(nn.Module):
    geometry = Geometry(2, 7, 5, 5, rim=1)

    def forward(self, _: Tensor) -> Tensor:
        raise AssertionError("taken at its word, it is not called")


def test_a_module_that_says_its_geometry_is_taken_at_its_word() -> None:
    module = Declares()
    assert make_dense(module, 2) is module
    assert isinstance(module, DenseNetwork)
    network = rp.models.tumor(outputs=4)
    assert make_dense(network, 4, window_px=123) is network
    assert isinstance(network, DenseNetwork)


def test_wrong_numbers_of_outputs_are_refused() -> None:
    for module in (Declares(), nn.Conv2d(3, 2, 3), nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 2))):
        name = type(module).__name__
        with pytest.raises(ValueError, match=f"{name} gives 2 logits, where the task needs 5; build it with outputs=5"):
            make_dense(module, 5, 16)


# Windows


class Windows(nn.Module):
    """One answer for a window of 12 px, which depends on where everything lies in it."""

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
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_a_window_module_is_slid_over_the_image(
    maps: bool, stride_px: int | None, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocols, "WINDOWS_AT_ONCE_PX", at_once * 12 * 12)
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


def test_gradients_go_through_windows() -> None:
    dense = make_dense(Windows(), 2)
    dense(torch.rand(1, 3, 24, 24)).sum().backward()
    assert all(each.grad is not None for each in dense.parameters())


def test_the_side_of_windows_is_given_or_said() -> None:
    assert isinstance(Windows(), WindowNetwork)
    with pytest.raises(ValueError, match="Flatten does not say the side of its windows; give it as 'window_px'"):
        make_dense(nn.Flatten(), 2)
    with pytest.raises(ValueError, match=r"^Windows does not take windows of 16 × 16 px: .*mat1 and mat2.*\.$"):
        make_dense(Windows(), 2, window_px=16)


def test_windows_of_one_answer_lie_about_its_middle() -> None:
    """The darkest of three spots is seen where it is."""

    class Middle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 4 - 8 * x[:, :1, 5:7, 5:7].mean(dim=(2, 3))

    image = np.full((50, 64, 3), 255, np.uint8)
    image[20:24, 40:44] = 0
    found = predict(make_dense(Middle().eval(), 1, 12, 2), image, CPU)
    seen = np.argwhere(found.probabilities[0] > 0.5)
    np.testing.assert_allclose(found.positions(seen.astype(float)).mean(axis=0), (21.5, 41.5), atol=1)


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
def test_a_geometry_can_be_told_from_others_by_shapes(wrong: dict[str, int], window_px: int) -> None:
    module = nn.Sequential(convolve(3), nn.MaxPool2d(2))
    right = measure_geometry(module, 16)
    assert right == Geometry(3, 4, 2, 2)
    told = has_geometry(module, replace(right, **wrong), window_px, slides=False)
    assert told == (not wrong and window_px == 16)
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
def test_windows_may_have_any_stride_and_nothing_else_of_their_own(change: dict[str, int], is_right: bool) -> None:
    right = make_dense(Windows(), 2).geometry
    assert has_geometry(Windows(), replace(right, **change), 12, slides=True) == is_right
    assert not has_geometry(Windows(), right, 14, slides=True)
    assert not has_geometry(Windows(), right, 12, slides=False)


# Modules that cannot be used


class Fails(nn.Module):
    def __init__(self, answer: object) -> None:
        super().__init__()
        self.conv, self.answer = convolve(3), answer

    def forward(self, x: Tensor) -> object:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer(self.conv(x)) if callable(self.answer) else self.answer


@pytest.mark.parametrize(
    ("error", "reason"), [(KeyError("stem"), "'stem'"), (ValueError("my windows\n  are even."), "my windows are even")]
)
def test_modules_that_fail_are_refused_with_their_own_reason(error: Exception, reason: str) -> None:
    with pytest.raises(ValueError, match="does not take") as refused:
        make_dense(Fails(error), 3, 16)
    assert str(refused.value) == f"Fails does not take windows of 16 × 16 px: {reason}."


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        (lambda x: {"out": x}, "dict"),
        (lambda x: (x, x), "tuple"),
        (lambda x: x.flatten(2), "a tensor of shape (2, 3, 196)"),
        (lambda x: x.flatten(0, 1)[None], "a tensor of shape (1, 6, 14, 14)"),
        (lambda x: x.mean(), "a tensor of shape ()"),
    ],
    ids=["dict", "tuple", "3 axes", "batch", "number"],
)
def test_answers_that_are_no_logits_are_refused(answer: object, given: str) -> None:
    with pytest.raises(ValueError, match="logits") as refused:
        make_dense(Fails(answer), 3, 16)
    assert str(refused.value) == f"Fails has to give logits (B, K) or (B, K, h, w); it gave {given}."


def test_oblong_answers_to_square_windows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Fails answers to a square window with logits of shape \(2, 3, 14, 5\)"):
        make_dense(Fails(lambda x: x[..., :5]), 3, 16)


def test_a_module_of_grey_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^Conv2d does not take windows of 16 × 16 px: .*1 channels, but got 3"):
        make_dense(nn.Conv2d(1, 2, 3), 2, 16)


class SquaresOnly(Fails):
    def forward(self, x: Tensor) -> object:
        if x.shape[2] != x.shape[3]:
            raise ValueError("squares only")
        return super().forward(x)


@pytest.mark.parametrize("module", [SquaresOnly(lambda x: x), convolve(7, stride=7)], ids=["squares", "steps of 7"])
def test_maps_that_cannot_be_measured_are_refused_by_name(module: nn.Module) -> None:
    """Where only squares are taken, or image sizes follow each other by a step that is not tried."""
    with pytest.raises(ValueError, match=f"^{type(module).__name__} "):
        make_dense(module, 3, 70)


def test_a_module_that_casts_its_images_is_measured_or_refused_by_name() -> None:
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


class Fickle(nn.Module):
    """Has buffers that change when it is called, and layers that draw random numbers."""

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
def test_the_module_is_left_as_it_is(maps: bool, training: bool, dtype: torch.dtype) -> None:
    module = Fickle(maps).to(dtype).train(training)
    module.conv.requires_grad_(False)
    before = copy.deepcopy(module.state_dict())
    grad = [each.requires_grad for each in module.parameters()]
    state = torch.get_rng_state()
    dense = make_dense(module, 3, 16)
    assert torch.equal(torch.get_rng_state(), state), "nor are random numbers drawn"
    assert unwrap(dense) is module
    assert dense.training is training
    assert [each.training for each in module.modules()] == [training] * 4
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)
    assert [each.requires_grad for each in module.parameters()] == grad
    assert {each.device for each in module.parameters()} == {CPU}


@pytest.mark.parametrize("maps", [True, False], ids=["maps", "windows"])
def test_layers_that_are_kept_in_evaluation_stay_there(maps: bool) -> None:
    """As batch norms are whose statistics shall not change in a training."""
    module = Fickle(maps).train()
    module.norm.eval()
    make_dense(module, 3, 16)
    assert module.training
    assert not module.norm.training


def test_another_module_may_take_its_place() -> None:
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
