"""Prediction of images and windows: outputs are at the right positions; networks are prepared for a device."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from stub_networks import BrightnessNetwork, DarkestPixelNetwork
from torch import Tensor

import rotopath as rp
from rotopath import group, pretrained
from rotopath.inference import (
    dense,
    predict,
    predict_batch,
    predict_patches,
    predict_rotated,
    predict_rotations,
)
from rotopath.inference.dense import MixedNetwork, prepare
from rotopath.inference.tiling import compute_probabilities
from rotopath.metrics import smooth_images
from rotopath.models import FrozenNetwork
from rotopath.models.architecture import ARCHITECTURES, MITOSIS, NUCLEI, TUMOR, Architecture
from rotopath.models.network import Network
from rotopath.models.protocols import make_dense
from rotopath.models.registry import build_network
from rotopath.nn import center_crop, triton

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # a sweep of numbers: tracing it would take minutes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16  # which CPUs compute fast
BUILD: dict[str, Callable[[int], Network]] = {
    "mitosis": rp.models.mitosis,
    "nuclei": rp.models.nuclei,
    "tumor": rp.models.tumor,
}


def textured(height: int, width: int, seed: int = 0) -> np.ndarray:
    side = max(height, width)
    smooth = smooth_images(1, side, blur_px=3, seed=seed)[0, :, :height, :width]
    return ((smooth * 40 + 128).clamp(0, 255)).byte().permute(1, 2, 0).numpy()


def spot(height: int, width: int, row: float, column: float, radius: float = 6) -> np.ndarray:
    rows, columns = np.mgrid[:height, :width]
    bright = 250 * np.exp(-((rows - row) ** 2 + (columns - column) ** 2) / (2 * radius**2))
    return np.repeat(bright[..., None], 3, axis=2).astype(np.uint8)


def untrained(name: str, orientations: int) -> Network:
    torch.manual_seed(1)
    network = BUILD[name](orientations).eval()
    with torch.no_grad():  # logits that vary, so that a mistake shows
        network.head[0].weight.mul_(5)
    return network


def build(architecture: Architecture) -> Network:
    torch.manual_seed(3)
    return Network(architecture, 4).eval()


def locate_spot(network: Network, image: np.ndarray, **options: int) -> tuple[float, float]:
    """Return the center of the spot that the network predicts, in pixels of the image."""
    prediction = predict(network, image, CPU, **options)
    weights = prediction.probabilities[0].astype(float)
    weights = np.where(weights > 0.05, weights, 0)
    rows, columns = np.mgrid[: weights.shape[0], : weights.shape[1]]
    center = [(weights * index).sum() / weights.sum() for index in (rows, columns)]
    row, column = prediction.positions(np.array([center]))[0]
    return row, column


@pytest.mark.parametrize(("height", "width"), [(160, 160), (157, 131), (96, 203)])
@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI, TUMOR], ids=lambda a: a.name)
def test_a_spot_is_predicted_at_its_position(architecture: Architecture, height: int, width: int) -> None:
    for row, column in ((60, 70.5), (45.2, 52.8)):
        position = locate_spot(BrightnessNetwork(architecture), spot(height, width, row, column, radius=9))
        assert position == pytest.approx((row, column), abs=0.5)


@pytest.mark.parametrize("rotations", [4, 8, 16])
@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
def test_a_spot_keeps_its_position_when_images_are_rotated_and_maps_rotated_back(
    architecture: Architecture, rotations: int
) -> None:
    for height, width in ((90, 110), (101, 74)):
        position = locate_spot(
            BrightnessNetwork(architecture), spot(height, width, 40, 30, radius=8), rotations=rotations
        )
        assert position == pytest.approx((40, 30), abs=0.5)


@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
@pytest.mark.parametrize("position", [(0, 0), (1, 108), (98, 0), (99, 109), (50, 109)])
def test_spots_at_the_edges_are_predicted_as_bright_as_elsewhere(
    architecture: Architecture, position: tuple[float, float]
) -> None:
    for rotations in (1, 8):
        prediction = predict(
            BrightnessNetwork(architecture), spot(100, 110, *position, radius=10), CPU, rotations=rotations
        )
        peak = np.array(
            [np.unravel_index(prediction.probabilities[0].argmax(), prediction.probabilities[0].shape)], float
        )
        reach = prediction.stride_px / 2 + (1 if rotations > 1 else 0)
        assert np.abs(prediction.positions(peak)[0] - position).max() <= reach
        dimming = 0.75 if architecture is MITOSIS else 0.95
        scale = 1 if architecture is MITOSIS else 2  # the stub's softmax halves
        assert scale * prediction.probabilities[0].max() > dimming * 250 / 255


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 9), (8, 16), (60, 61), (100, 143)])
def test_outputs_cover_the_image(height: int, width: int) -> None:
    image = textured(height, width)
    nuclei = predict(BrightnessNetwork(NUCLEI), image, CPU)
    assert nuclei.probabilities.shape == (3, height, width)
    assert (nuclei.stride_px, nuclei.first_px) == (1, (0, 0))
    assert np.allclose(2 * nuclei.probabilities[0], image.mean(axis=2) / 255, atol=1e-5)
    mitosis = predict(BrightnessNetwork(MITOSIS), image, CPU)
    assert mitosis.stride_px == 8
    for size, count, first in zip((height, width), mitosis.probabilities.shape[1:], mitosis.first_px, strict=True):
        positions = first + 8 * np.arange(count)
        assert np.abs(np.arange(size)[:, None] - positions).min(axis=1).max() <= 4
        assert positions[0] >= -0.5
        assert positions[-1] <= size - 0.5


@pytest.mark.parametrize("name", ["mitosis", "nuclei"])
def test_outputs_are_at_the_center_of_the_pixels_that_change_them(name: str) -> None:
    """The stub above defines where outputs should be; here a pixel changes outputs of the real network."""
    network = untrained(name, 1).double()
    image = textured(120, 136)
    before = predict(network, image, CPU)
    block = network.output_size(network.receptive_field)  # outputs that share their window
    reach = network.receptive_field / 2 + (block - 1) / 2
    offsets = []
    for row, column in ((50, 61), (57, 66), (63, 72), (70, 55)):
        changed = image.copy()
        changed[row, column] = 255 - changed[row, column]
        moved = np.argwhere(np.abs(predict(network, changed, CPU).probabilities - before.probabilities).max(0) > 1e-9)
        offset = before.positions(moved.astype(float)) - (row, column)
        assert np.abs(offset).max() <= reach
        offsets.append((offset.min(axis=0) + offset.max(axis=0)) / 2)
    assert np.abs(np.mean(offsets, axis=0)).max() <= before.stride_px / 2


def test_full_maps_have_an_output_for_every_pixel() -> None:
    """They contain the outputs of the coarse map; the others equal those of the coarse map of a shifted image."""
    network, image = untrained("mitosis", 1), textured(116, 124)
    stride = network.stride
    coarse, full = (predict(network, image, CPU, full=full) for full in (False, True))
    assert (full.stride_px, full.first_px) == (1, coarse.first_px)
    assert np.abs(full.probabilities[:, ::stride, ::stride] - coarse.probabilities).max() < 1e-5
    tiled = predict(network, image, CPU, full=True, tile_px=100)
    assert np.abs(full.probabilities - tiled.probabilities).max() < 1e-5
    for row, column in ((5, 0), (0, 3), (7, 2)):
        shifted = predict(network, image[row:, column:], CPU)
        inside = [  # away from edges, which are reflected
            (i, j)
            for i, j in np.ndindex(*shifted.probabilities.shape[1:])
            if all(
                network.receptive_field / 2 + 8 < position < size - network.receptive_field / 2 - 8
                for position, size in zip(
                    shifted.positions(np.array([[i, j]]))[0], shifted_size(image, row, column), strict=True
                )
            )
        ]
        assert inside
        for i, j in inside:
            index = shifted.positions(np.array([[i, j]]))[0] + (row, column) - full.first_px
            probability = full.probabilities[0, round(index[0]), round(index[1])]
            assert probability == pytest.approx(shifted.probabilities[0, i, j], abs=1e-5)


def shifted_size(image: np.ndarray, row: int, column: int) -> tuple[int, int]:
    return image.shape[0] - row, image.shape[1] - column


@pytest.mark.parametrize(("name", "orientations"), [("mitosis", 4), ("nuclei", 8)])
@pytest.mark.parametrize(("height", "width"), [(80, 80), (64, 98)])
def test_rotations_by_90_degrees_change_nothing_for_an_equivariant_network(
    name: str, orientations: int, height: int, width: int
) -> None:
    """Except for sides that need an odd number of pixels more, such as 63: their center is not on the pooling grid."""
    network, image = untrained(name, orientations), textured(height, width)
    once, four = (predict(network, image, CPU, rotations).probabilities for rotations in (1, 4))
    assert np.abs(once - four).max() < 1e-5
    rotated = predict(network, np.rot90(image).copy(), CPU).probabilities
    assert np.abs(rotated - np.rot90(once, axes=(1, 2))).max() < 1e-5


@pytest.mark.parametrize("name", ["mitosis", "nuclei"])
def test_four_rotations_make_a_plain_network_invariant_to_them(name: str) -> None:
    network, image = untrained(name, 1), textured(64, 98)
    for rotations, exact in ((1, False), (4, True), (8, True)):
        upright = predict(network, image, CPU, rotations).probabilities
        rotated = predict(network, np.rot90(image).copy(), CPU, rotations).probabilities
        error = np.abs(rotated - np.rot90(upright, axes=(1, 2))).max()
        assert (error < 1e-4) == exact, (rotations, error)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (80, 80), (41, 150)])
def test_no_rotated_window_lacks_pixels(height: int, width: int) -> None:
    """A white image stays white everywhere at any rotation; one dark pixel in a window would change an output."""
    white = np.full((height, width, 3), 255, np.uint8)
    for architecture in (MITOSIS, NUCLEI):
        for maps in predict_rotations(DarkestPixelNetwork(architecture), white[None], CPU, (0, 10, 45, 80, 135, 200)):
            assert maps[0, 0].min() > 0.99
    for size in (88, 96, 160):
        patches = torch.full((2, 3, size, size), 255, dtype=torch.uint8)
        assert predict_rotated(DarkestPixelNetwork(TUMOR), patches, (0, 10, 45, 80, 135, 200)).min() > 0.99


def test_images_of_a_batch_do_not_influence_each_other() -> None:
    network = rp.models.mitosis(4).eval()
    images = np.random.default_rng(0).integers(0, 256, (3, 75, 90, 3), np.uint8)
    for rotations in (1, 8):
        together = predict_batch(network, images, CPU, rotations)
        for image, prediction in zip(images, together, strict=True):
            alone = predict(network, image, CPU, rotations)
            assert prediction.first_px == alone.first_px
            np.testing.assert_allclose(prediction.probabilities, alone.probabilities, atol=1e-6)
    assert not np.allclose(together[0].probabilities, together[1].probabilities, atol=1e-4)


def test_predictions_are_averaged_over_rotations() -> None:
    network, image = untrained("mitosis", 1), textured(72, 90)
    maps = [batch[0] for batch in predict_rotations(network, image[None], CPU, group.angles(8))]
    assert len(maps) == 8
    assert np.allclose(predict(network, image, CPU, 8).probabilities, np.mean(maps, axis=0), atol=1e-6)
    assert np.abs(maps[1] - maps[0]).max() > 1e-4
    assert all(((probabilities >= 0) & (probabilities <= 1)).all() for probabilities in maps)


def test_an_equivariant_network_also_varies_less_at_angles_that_interpolate() -> None:
    """At 45° pixels are interpolated; eight orientations then change little, one orientation changes a lot."""
    image = textured(88, 88)
    spread = {}
    for orientations in (1, 8):
        network = untrained("nuclei", orientations)
        upright, rotated = predict_rotations(network, image[None], CPU, (0, 45))
        spread[orientations] = np.abs(upright - rotated).mean() / upright.std()
    assert spread[8] < 0.5 * spread[1]


def test_patches_are_rotated_about_their_center() -> None:
    network = untrained("tumor", 4)
    patches = torch.from_numpy(np.stack([textured(96, 96, seed) for seed in range(3)])).permute(0, 3, 1, 2)
    once = predict_patches(network, patches)
    assert once.shape == (3, 1)
    direct = network(center_crop(patches, 88, 88)).sigmoid().flatten(1).detach().numpy()
    assert np.allclose(once, direct, atol=1e-6)
    assert np.allclose(predict_patches(network, patches, 4), once, atol=1e-5)
    assert np.allclose(predict_patches(network, center_crop(patches, 88, 88)), once)
    angles = predict_rotated(network, patches, [0, 90, 45])
    assert angles.shape == (3, 3, 1)
    assert np.abs(angles[0] - angles[1]).max() < 1e-5
    plain = predict_rotated(untrained("tumor", 1), patches, [0, 90])
    assert np.abs(plain[0] - plain[1]).max() > 1e-4, "a plain network is not invariant"


def test_several_outputs_have_probabilities_by_softmax() -> None:
    """Unless another activation is given; over rotations they are averaged."""
    torch.manual_seed(1)
    network = rp.models.tumor(1, outputs=3).eval()
    patches = torch.from_numpy(np.stack([textured(88, 88, seed) for seed in range(2)])).permute(0, 3, 1, 2)
    logits = network(patches).flatten(1).detach()
    np.testing.assert_allclose(predict_patches(network, patches), logits.softmax(dim=1).numpy(), atol=1e-6)
    rotated = predict_rotated(network, patches, group.angles(4))
    assert rotated.shape == (4, 2, 3)
    np.testing.assert_allclose(predict_patches(network, patches, 4), rotated.mean(axis=0), atol=1e-6)
    own = predict_patches(network, patches, activation=torch.sigmoid)
    np.testing.assert_allclose(own, logits.sigmoid().numpy(), atol=1e-6)
    image = textured(100, 112)
    whole = predict(network, image, CPU, tile_px=100, activation=torch.sigmoid)
    assert whole.probabilities.shape[0] == 3
    assert np.abs(whole.probabilities.sum(axis=0) - 1).max() > 1e-3
    assert np.abs(predict(network, image, CPU).probabilities.sum(axis=0) - 1).max() < 1e-5


@pytest.mark.parametrize("name", ["mitosis", "tumor"])
def test_a_window_is_predicted_as_the_same_position_in_an_image(name: str) -> None:
    """Also where filters read beyond the receptive field, which alone has another prediction."""
    torch.manual_seed(0)
    network = getattr(rp.models, name)(4, kernel="harmonic", pooling="rms-blur", smoothing=True).eval()
    side = network.geometry.context_px
    image = textured(side + 2 * network.stride, side + 4 * network.stride)
    logits = network(torch.from_numpy(image).permute(2, 0, 1)[None])
    rim = network.geometry.rim
    assert logits.shape[-2:] == (2 * rim + 3, 2 * rim + 5)
    window = torch.from_numpy(image[network.stride :][:side, network.stride :][:, :side].copy()).permute(2, 0, 1)[None]
    in_image = logits[0, 0, rim + 1, rim + 1].sigmoid().item()
    assert predict_patches(network, window).item() == pytest.approx(in_image, abs=1e-6)
    alone = center_crop(window, network.receptive_field, network.receptive_field)
    assert abs(network(alone).sigmoid().item() - in_image) > 1e-4


def test_rotated_windows_contain_the_pixels_around_them() -> None:
    """A ramp to the right, rotated by 45°, keeps its center; the corners of the window are pixels from around it."""
    inputs: list[Tensor] = []

    class Recorder(BrightnessNetwork):
        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x)
            return super().forward(x)

    large = torch.linspace(0, 1, 140).expand(1, 3, 140, 140)
    predict_rotated(Recorder(MITOSIS), large, [45])
    corner_to_corner = inputs[0][0, 0].diagonal()  # by 45° counter-clockwise, the ramp rises along the other diagonal
    assert corner_to_corner.std() < 1e-3
    other = inputs[0][0, 0].flip(0).diagonal()
    assert torch.allclose(other.diff(), torch.full_like(other[1:], 2**0.5 / 139), atol=1e-3)


def test_bytes_and_floats_are_predicted_alike() -> None:
    network = untrained("mitosis", 1)
    images = torch.from_numpy(textured(100, 100)).permute(2, 0, 1)[None]
    angles = [0, 11.25]
    assert np.allclose(
        predict_rotated(network, images, angles), predict_rotated(network, images / 255, angles), atol=1e-6
    )


def test_wrong_arguments_are_refused_in_one_sentence() -> None:
    network, image = untrained("mitosis", 1), textured(80, 80)
    with pytest.raises(ValueError, match=r"network\.eval\(\)"):
        predict(rp.models.mitosis(1).train(), image, CPU)
    with pytest.raises(ValueError, match=r"shape \(H, W, 3\)"):
        predict(network, image[..., 0], CPU)
    with pytest.raises(ValueError, match="at least 68 px"):
        predict(network, image, CPU, tile_px=50)
    for side in (60, 69):
        with pytest.raises(ValueError, match="side S of 68 px"):
            predict_rotated(network, torch.zeros(1, 3, side, side), [0])
    with pytest.raises(ValueError, match="but this network returns a map of"):
        predict_rotated(untrained("nuclei", 1), torch.zeros(1, 3, 60, 60), [0])


@pytest.mark.parametrize("preset", ["paper", "faithful"])
@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_half_precision_rounds_and_returns_float32(task: str, preset: str) -> None:
    network = build(ARCHITECTURES[task].choose(preset))
    image = textured(100, 130, 1)
    exact = predict(network, image, CPU).probabilities
    for form in (network, rp.freeze(network)):
        rounded = predict(MixedNetwork(form, HALF), image, CPU).probabilities
        assert rounded.dtype == np.float32
        error = np.abs(rounded - exact).max()
        assert 1e-5 < error < 3e-2, "it is rounded, but not wrong"


@pytest.mark.parametrize("name", pretrained.list_pretrained())
def test_float16_is_wide_enough_for_the_pretrained_models(name: str) -> None:
    network, image = rp.load(name).network, textured(100, 100, 1)
    exact = predict(network, image, CPU).probabilities
    for form in (network, rp.freeze(network)):
        rounded = predict(MixedNetwork(form, torch.float16), image, CPU).probabilities
        assert np.abs(rounded - exact).max() < 1e-2


def test_probabilities_near_1_are_computed_in_float32() -> None:
    class Sure(BrightnessNetwork):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).fill_(7.5).to(HALF)

    probabilities = compute_probabilities(MixedNetwork(Sure(MITOSIS), HALF), torch.zeros(1, 3, 68, 68))
    assert float(probabilities) == pytest.approx(0.999447, abs=1e-6), "in half precision it would be 1"


def test_networks_are_frozen_for_the_cpu() -> None:
    network = build(TUMOR)
    assert isinstance(prepare(network, CPU), FrozenNetwork)
    mixed = prepare(network, CPU, HALF)
    assert isinstance(mixed, MixedNetwork)
    assert isinstance(mixed.network, FrozenNetwork)
    assert not mixed.training


def test_networks_keep_their_layers_on_devices_with_triton_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "supports_device", lambda _device: True)
    network = build(TUMOR).train()
    ready = prepare(network, CPU)
    assert type(ready) is Network
    assert not ready.training
    assert network.training, "the given network is not changed"
    assert not set(map(id, ready.parameters())) & set(map(id, network.parameters())), "nor are its weights shared"
    mixed = prepare(network, CPU, HALF)
    assert isinstance(mixed, MixedNetwork)
    assert type(mixed.network) is Network
    assert not mixed.network.training


@pytest.mark.parametrize(
    ("device", "installed", "capability", "supported"),
    [
        (CPU, True, (9, 0), False),
        (CUDA, True, (9, 0), True),
        (CUDA, False, (9, 0), False),
        (CUDA, True, (7, 5), False),
    ],
)
def test_triton_kernels_run_on_gpus_from_ampere_on_if_triton_is_installed(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, installed: bool, capability: tuple[int, int], supported: bool
) -> None:
    monkeypatch.setattr(triton, "is_installed", lambda: installed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert triton.supports_device(device) is supported


# ONNX Runtime


@pytest.mark.parametrize("name", ["nuclei", "resnet18"])
def test_onnx_runtime_predicts_the_same_as_torch(name: str) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    if name == "resnet18":
        network = make_dense(build_network(name, 2, 4, {"width": 16}).eval(), 2, window_px=64, stride_px=32)
    else:
        network = untrained(name, 4)
    ready = prepare(network, CPU, backend="onnxruntime")
    assert ready.geometry == network.geometry
    assert not ready.training
    image = textured(140, 150)
    for rotations in (1, 2):  # bytes at multiples of 90°, floats at other angles
        expected, actual = (predict(net, image, CPU, 2 * rotations) for net in (network, ready))
        assert actual.first_px == expected.first_px
        np.testing.assert_allclose(actual.probabilities, expected.probabilities, atol=1e-4)


def test_threads_can_convert_to_onnx_at_the_same_time() -> None:
    """Torch's exporter replaces functions for all threads."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    network = make_dense(torch.nn.Conv2d(3, 1, 5).eval(), 1, window_px=16)
    images = torch.rand(1, 3, 20, 20)
    with ThreadPoolExecutor(3) as threads:
        made = [*threads.map(lambda _: prepare(network, CPU, backend="onnxruntime"), range(3))]
    for ready in made:
        torch.testing.assert_close(ready(images), network(images), rtol=1e-4, atol=1e-4)


def test_a_network_that_onnx_computes_differently_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    load, network = dense.load_onnx, make_dense(torch.nn.Conv2d(3, 1, 5).eval(), 1, window_px=16)
    prepare(network, CPU, backend="onnxruntime")
    monkeypatch.setattr(dense, "load_onnx", lambda content: lambda images: load(content)(images) + 0.01)
    with pytest.raises(ValueError, match=r"computes logits that differ by 0\.01 from those of torch; use the backend"):
        prepare(network, CPU, backend="onnxruntime")
    monkeypatch.setattr(dense, "load_onnx", lambda content: lambda images: load(content)(images) * torch.nan)
    with pytest.raises(ValueError, match="computes logits that differ by nan"):
        prepare(network, CPU, backend="onnxruntime")


def test_a_network_that_cannot_be_converted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no such\noperator.")

    monkeypatch.setattr(dense, "to_onnx", fail)
    with pytest.raises(ValueError, match=r"converted to ONNX \(no such operator\); use the backend 'torch'"):
        prepare(untrained("tumor", 4), CPU, backend="onnxruntime")
