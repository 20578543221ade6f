"""Networks made ready for a device: in the right form, and with answers of another precision that are float32."""

import numpy as np
import pytest
import torch
from eyes import Eye
from torch import Tensor

import rotopath as rp
from rotopath import pretrained, tasks
from rotopath.images.slides import as_slide
from rotopath.images.tissue import SPACING_UM_PX, Tissue
from rotopath.inference import predict
from rotopath.inference.dense import MixedNetwork, answer, prepare
from rotopath.inference.slide_pass import Grid, Model, SlideView, predict_tiles
from rotopath.metrics import smooth_images
from rotopath.models import FrozenNetwork, Network
from rotopath.models.architecture import ARCHITECTURES, MITOSIS, NUCLEI, TUMOR, Architecture
from rotopath.nn import gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = torch.bfloat16  # which CPUs are good at


def pixels(height: int, width: int) -> np.ndarray:
    smooth = smooth_images(1, max(height, width), blur_px=2.5, seed=1)[0, :, :height, :width]
    return (smooth * 45 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()


def untrained(architecture: Architecture) -> Network:
    torch.manual_seed(3)
    return Network(architecture, 4).eval()


@pytest.mark.parametrize("preset", ["paper", "faithful"])
@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_another_precision_rounds_and_answers_in_float32(task: str, preset: str) -> None:
    network = untrained(ARCHITECTURES[task].choose(preset))
    image = pixels(100, 130)
    exact = predict(network, image, CPU).probabilities
    for form in (network, rp.freeze(network)):
        found = predict(MixedNetwork(form, HALF), image, CPU).probabilities
        assert found.dtype == np.float32
        error = np.abs(found - exact).max()
        assert 1e-5 < error < 3e-2, "it is rounded, and no more"


@pytest.mark.parametrize("name", pretrained.list_pretrained())
def test_float16_is_wide_enough_for_what_is_published(name: str) -> None:
    network, image = rp.load(name).network, pixels(100, 100)
    exact = predict(network, image, CPU).probabilities
    for form in (network, rp.freeze(network)):
        found = predict(MixedNetwork(form, torch.float16), image, CPU).probabilities
        assert np.abs(found - exact).max() < 1e-2


@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda one: one.name)
def test_nothing_but_the_network_is_rounded(architecture: Architecture) -> None:
    """An eye has no convolution, so whatever changes was changed around it: when tiles turn, or are put together."""
    image = pixels(40, 110)
    eye = Eye(architecture)
    with as_slide(image, 0.25) as slide:
        everywhere = Tissue(np.ones(slide.size_at(SPACING_UM_PX), bool), SPACING_UM_PX)
        canvas = SlideView(slide, 0.25, "none", everywhere)
        full, half = (
            list(predict_tiles(grid, grid.tiles, CPU, rotations=8))
            for grid in (Grid(network, canvas, 90) for network in (eye, MixedNetwork(eye, HALF)))
        )
    assert len(full) == len(half) > 1
    for one, other in zip(full, half, strict=True):
        assert one.deviations is not None
        assert other.deviations is not None
        assert other.probabilities.dtype == other.deviations.dtype == np.float32
        np.testing.assert_array_equal(one.probabilities, other.probabilities)
        np.testing.assert_array_equal(one.deviations, other.deviations)


def test_probabilities_near_1_are_not_coarse() -> None:
    class Sure(Eye):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).fill_(7.5).to(HALF)

    probabilities = answer(MixedNetwork(Sure(MITOSIS), HALF), torch.zeros(1, 3, 68, 68))
    assert float(probabilities) == pytest.approx(0.999447, abs=1e-6), "in halves it would be 1"


def test_answers_that_are_no_numbers_end_in_a_sentence() -> None:
    """Products of numbers that float32 can hold may be too large for halves."""
    network = untrained(MITOSIS)
    with torch.no_grad():
        network.stages[1].conv.weight *= 1e6
    with as_slide(pixels(150, 150), 0.25) as slide:
        everywhere = Tissue(np.ones(slide.size_at(SPACING_UM_PX), bool), SPACING_UM_PX)
        canvas = SlideView(slide, 0.25, "none", everywhere)
        half, full = (Grid(made, canvas) for made in (MixedNetwork(network, torch.float16), network))
        with pytest.raises(ValueError, match=r"no finite numbers.*--precision 32"):
            list(predict_tiles(half, half.tiles, CPU))
        assert all(np.isfinite(tile.probabilities).all() for tile in predict_tiles(full, full.tiles, CPU))


def test_tiles_for_a_gpu_are_larger_in_half_precision() -> None:
    network = untrained(MITOSIS)
    sides = {
        (device.type, dtype): Model(tasks.MITOSIS, made, {}, device).tile_px
        for device in (CPU, CUDA)
        for dtype, made in ((HALF, MixedNetwork(network, HALF)), (torch.float32, network))
    }
    assert sides.pop(("cuda", HALF)) == 2048
    assert set(sides.values()) == {1024}


def test_on_the_cpu_networks_are_frozen() -> None:
    network = untrained(TUMOR)
    assert isinstance(prepare(network, CPU), FrozenNetwork)
    mixed = prepare(network, CPU, HALF)
    assert isinstance(mixed, MixedNetwork)
    assert isinstance(mixed.network, FrozenNetwork)
    assert not mixed.training


def test_where_kernels_serve_networks_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "serves", lambda _device: True)
    network = untrained(TUMOR).train()
    ready = prepare(network, CPU)
    assert type(ready) is Network
    assert not ready.training
    assert network.training, "what was given is not changed"
    assert not set(map(id, ready.parameters())) & set(map(id, network.parameters())), "nor does it move along"
    mixed = prepare(network, CPU, HALF)
    assert isinstance(mixed, MixedNetwork)
    assert type(mixed.network) is Network
    assert not mixed.network.training


@pytest.mark.parametrize(
    ("device", "triton", "capability", "served"),
    [
        (CPU, True, (9, 0), False),
        (CUDA, True, (9, 0), True),
        (CUDA, False, (9, 0), False),
        (CUDA, True, (7, 5), False),
    ],
)
def test_kernels_serve_gpus_that_are_not_too_old_where_there_is_triton(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, triton: bool, capability: tuple[int, int], served: bool
) -> None:
    monkeypatch.setattr(gpu, "_has_triton", lambda: triton)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert gpu.serves(device) is served
