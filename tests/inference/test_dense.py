"""Prediction: in the right place, the same in tiles, and turned inputs turned back."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from eyes import Eye, Pessimist
from torch import Tensor

import rotopath as rp
from rotopath import group
from rotopath.inference import (
    predict,
    predict_batch,
    predict_patches,
    predict_rotated,
    predict_rotations,
)
from rotopath.metrics import smooth_images
from rotopath.models.architecture import MITOSIS, NUCLEI, TUMOR, Architecture
from rotopath.models.network import Network
from rotopath.nn import center_crop

CPU = torch.device("cpu")
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


def brightest(network: Network, image: np.ndarray, **options: int) -> tuple[float, float]:
    """The centre of what is seen of a spot, in pixels of the image."""
    found = predict(network, image, CPU, **options)
    weights = found.probabilities[0].astype(float)
    weights = np.where(weights > 0.05, weights, 0)
    rows, columns = np.mgrid[: weights.shape[0], : weights.shape[1]]
    centre = [(weights * index).sum() / weights.sum() for index in (rows, columns)]
    row, column = found.positions(np.array([centre]))[0]
    return row, column


@pytest.mark.parametrize(("height", "width"), [(160, 160), (157, 131), (96, 203)])
@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI, TUMOR], ids=lambda a: a.name)
def test_a_spot_is_seen_where_it_is(architecture: Architecture, height: int, width: int) -> None:
    for row, column in ((60, 70.5), (45.2, 52.8)):
        seen = brightest(Eye(architecture), spot(height, width, row, column, radius=9))
        assert seen == pytest.approx((row, column), abs=0.5)


@pytest.mark.parametrize("rotations", [4, 8, 16])
@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
def test_a_spot_stays_where_it_is_when_turned_images_are_turned_back(
    architecture: Architecture, rotations: int
) -> None:
    for height, width in ((90, 110), (101, 74)):
        seen = brightest(Eye(architecture), spot(height, width, 40, 30, radius=8), rotations=rotations)
        assert seen == pytest.approx((40, 30), abs=0.5)


@pytest.mark.parametrize("architecture", [MITOSIS, NUCLEI], ids=lambda a: a.name)
@pytest.mark.parametrize("place", [(0, 0), (1, 108), (98, 0), (99, 109), (50, 109)])
def test_spots_at_the_edges_are_seen_as_bright_as_they_are(
    architecture: Architecture, place: tuple[float, float]
) -> None:
    for rotations in (1, 8):
        found = predict(Eye(architecture), spot(100, 110, *place, radius=10), CPU, rotations=rotations)
        peak = np.array([np.unravel_index(found.probabilities[0].argmax(), found.probabilities[0].shape)], float)
        reach = found.stride_px / 2 + (1 if rotations > 1 else 0)
        assert np.abs(found.positions(peak)[0] - place).max() <= reach
        dimmer = 0.75 if architecture is MITOSIS else 0.95
        scale = 1 if architecture is MITOSIS else 2  # the stub's softmax halves
        assert scale * found.probabilities[0].max() > dimmer * 250 / 255


@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 9), (8, 16), (60, 61), (100, 143)])
def test_outputs_cover_the_image(height: int, width: int) -> None:
    image = textured(height, width)
    nuclei = predict(Eye(NUCLEI), image, CPU)
    assert nuclei.probabilities.shape == (3, height, width)
    assert (nuclei.stride_px, nuclei.first_px) == (1, (0, 0))
    assert np.allclose(2 * nuclei.probabilities[0], image.mean(axis=2) / 255, atol=1e-5)
    mitosis = predict(Eye(MITOSIS), image, CPU)
    assert mitosis.stride_px == 8
    for size, count, first in zip((height, width), mitosis.probabilities.shape[1:], mitosis.first_px, strict=True):
        places = first + 8 * np.arange(count)
        assert np.abs(np.arange(size)[:, None] - places).min(axis=1).max() <= 4
        assert places[0] >= -0.5
        assert places[-1] <= size - 0.5


@pytest.mark.parametrize("name", ["mitosis", "nuclei"])
def test_real_outputs_lie_in_the_middle_of_what_changes_them(name: str) -> None:
    """The stub above says where outputs ought to lie; here a pixel is changed and the real network's outputs move."""
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


@pytest.mark.parametrize(("name", "tile_px"), [("mitosis", 84), ("nuclei", 60), ("nuclei", 101), ("tumor", 100)])
def test_tiles_give_the_same_where_filters_reach_beyond_them(name: str, tile_px: int) -> None:
    network = BUILD[name](2, preset="faithful").eval()
    image = np.random.default_rng(0).integers(0, 256, (100, 80, 3), dtype=np.uint8)
    whole, tiled = (predict(network, image, CPU, tile_px=side) for side in (None, tile_px))
    assert np.abs(whole.probabilities - tiled.probabilities).max() < 1e-5


def test_full_maps_have_an_answer_for_every_pixel() -> None:
    """Those of a coarse map are among them, and others are what the coarse map of a shifted image has."""
    network, image = untrained("mitosis", 1), textured(116, 124)
    stride = network.stride
    coarse, full = (predict(network, image, CPU, full=full) for full in (False, True))
    assert (full.stride_px, full.first_px) == (1, coarse.first_px)
    assert np.abs(full.probabilities[:, ::stride, ::stride] - coarse.probabilities).max() < 1e-5
    tiled = predict(network, image, CPU, full=True, tile_px=100)
    assert np.abs(full.probabilities - tiled.probabilities).max() < 1e-5
    for row, column in ((5, 0), (0, 3), (7, 2)):
        shifted = predict(network, image[row:, column:], CPU)
        inside = [  # away from edges, which are mirrored
            (i, j)
            for i, j in np.ndindex(*shifted.probabilities.shape[1:])
            if all(
                network.receptive_field / 2 + 8 < place < size - network.receptive_field / 2 - 8
                for place, size in zip(
                    shifted.positions(np.array([[i, j]]))[0], shifted_size(image, row, column), strict=True
                )
            )
        ]
        assert inside
        for i, j in inside:
            at = shifted.positions(np.array([[i, j]]))[0] + (row, column) - full.first_px
            seen = full.probabilities[0, round(at[0]), round(at[1])]
            assert seen == pytest.approx(shifted.probabilities[0, i, j], abs=1e-5)


def shifted_size(image: np.ndarray, row: int, column: int) -> tuple[int, int]:
    return image.shape[0] - row, image.shape[1] - column


@pytest.mark.parametrize(
    ("name", "tile_px", "rotations"),
    [
        ("mitosis", 84, 1),
        ("mitosis", 150, 1),
        ("nuclei", 60, 1),
        ("nuclei", 101, 1),
        ("mitosis", 84, 8),
        ("nuclei", 101, 8),
    ],
)
def test_tiles_give_the_same_as_the_whole(name: str, tile_px: int, rotations: int) -> None:
    network, image = untrained(name, 2), textured(90, 123)
    whole = predict(network, image, CPU, rotations)
    tiled = predict(network, image, CPU, rotations, tile_px)
    assert whole.probabilities.shape == tiled.probabilities.shape
    assert whole.first_px == tiled.first_px
    assert whole.probabilities.std() > 1e-3, "or there would be nothing to see"
    assert np.abs(whole.probabilities - tiled.probabilities).max() < 1e-5


def test_no_tile_is_larger_than_asked_for() -> None:
    eye = Eye(NUCLEI)
    predict(eye, textured(300, 200), CPU, tile_px=101)
    assert max(max(size) for size in eye.seen) <= 101
    assert len(eye.seen) == 5 * 4, "60 outputs of a tile, 300 × 200 in all"


@pytest.mark.parametrize(("name", "orientations"), [("mitosis", 4), ("nuclei", 8)])
@pytest.mark.parametrize(("height", "width"), [(80, 80), (64, 98)])
def test_quarter_turns_change_nothing_for_an_equivariant_network(
    name: str, orientations: int, height: int, width: int
) -> None:
    """Sides that need an odd number of pixels, such as 63, have no middle on the pooling grid, and are not exact."""
    network, image = untrained(name, orientations), textured(height, width)
    once, four = (predict(network, image, CPU, rotations).probabilities for rotations in (1, 4))
    assert np.abs(once - four).max() < 1e-5
    turned = predict(network, np.rot90(image).copy(), CPU).probabilities
    assert np.abs(turned - np.rot90(once, axes=(1, 2))).max() < 1e-5


@pytest.mark.parametrize("name", ["mitosis", "nuclei"])
def test_four_turns_make_a_plain_network_invariant_to_them(name: str) -> None:
    network, image = untrained(name, 1), textured(64, 98)
    for rotations, exact in ((1, False), (4, True), (8, True)):
        upright = predict(network, image, CPU, rotations).probabilities
        turned = predict(network, np.rot90(image).copy(), CPU, rotations).probabilities
        error = np.abs(turned - np.rot90(upright, axes=(1, 2))).max()
        assert (error < 1e-4) == exact, (rotations, error)


@pytest.mark.parametrize(("height", "width"), [(4, 4), (80, 80), (41, 150)])
def test_no_turned_window_lacks_pixels(height: int, width: int) -> None:
    """A white image stays white all over, however it is turned; one dark pixel in a window would show."""
    white = np.full((height, width, 3), 255, np.uint8)
    for architecture in (MITOSIS, NUCLEI):
        for maps in predict_rotations(Pessimist(architecture), white[None], CPU, (0, 10, 45, 80, 135, 200)):
            assert maps[0, 0].min() > 0.99
    for size in (88, 96, 160):
        patches = torch.full((2, 3, size, size), 255, dtype=torch.uint8)
        assert predict_rotated(Pessimist(TUMOR), patches, (0, 10, 45, 80, 135, 200)).min() > 0.99


def test_images_that_go_together_are_told_apart() -> None:
    network = rp.models.mitosis(4).eval()
    images = np.random.default_rng(0).integers(0, 256, (3, 75, 90, 3), np.uint8)
    for rotations in (1, 8):
        together = predict_batch(network, images, CPU, rotations)
        for image, one in zip(images, together, strict=True):
            alone = predict(network, image, CPU, rotations)
            assert one.first_px == alone.first_px
            np.testing.assert_allclose(one.probabilities, alone.probabilities, atol=1e-6)
    assert not np.allclose(together[0].probabilities, together[1].probabilities, atol=1e-4)


def test_the_mean_is_taken_over_the_turns() -> None:
    network, image = untrained("mitosis", 1), textured(72, 90)
    maps = [one[0] for one in predict_rotations(network, image[None], CPU, group.angles(8))]
    assert len(maps) == 8
    assert np.allclose(predict(network, image, CPU, 8).probabilities, np.mean(maps, axis=0), atol=1e-6)
    assert np.abs(maps[1] - maps[0]).max() > 1e-4
    assert all(((one >= 0) & (one <= 1)).all() for one in maps)


def test_an_equivariant_network_varies_less_between_pixels_as_well() -> None:
    """Half a quarter turn resamples, yet eight orientations see nearly the same; one orientation does not."""
    image = textured(88, 88)
    spread = {}
    for orientations in (1, 8):
        network = untrained("nuclei", orientations)
        upright, turned = predict_rotations(network, image[None], CPU, (0, 45))
        spread[orientations] = np.abs(upright - turned).mean() / upright.std()
    assert spread[8] < 0.5 * spread[1]


def test_patches_are_turned_about_their_middle() -> None:
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
    assert np.abs(plain[0] - plain[1]).max() > 1e-4, "a plain network sees the difference"


def test_several_outputs_have_probabilities_each() -> None:
    """By a softmax, unless a task has an activation of its own; over rotations their mean."""
    torch.manual_seed(1)
    network = rp.models.tumor(1, outputs=3).eval()
    patches = torch.from_numpy(np.stack([textured(88, 88, seed) for seed in range(2)])).permute(0, 3, 1, 2)
    logits = network(patches).flatten(1).detach()
    np.testing.assert_allclose(predict_patches(network, patches), logits.softmax(dim=1).numpy(), atol=1e-6)
    turned = predict_rotated(network, patches, group.angles(4))
    assert turned.shape == (4, 2, 3)
    np.testing.assert_allclose(predict_patches(network, patches, 4), turned.mean(axis=0), atol=1e-6)
    own = predict_patches(network, patches, activation=torch.sigmoid)
    np.testing.assert_allclose(own, logits.sigmoid().numpy(), atol=1e-6)
    image = textured(100, 112)
    whole = predict(network, image, CPU, tile_px=100, activation=torch.sigmoid)
    assert whole.probabilities.shape[0] == 3
    assert np.abs(whole.probabilities.sum(axis=0) - 1).max() > 1e-3
    assert np.abs(predict(network, image, CPU).probabilities.sum(axis=0) - 1).max() < 1e-5


@pytest.mark.parametrize("name", ["mitosis", "tumor"])
def test_a_window_is_answered_as_the_same_place_in_an_image(name: str) -> None:
    """Also where filters read beyond the receptive field, which by itself is answered otherwise."""
    torch.manual_seed(0)
    network = getattr(rp.models, name)(4, kernel="harmonic", pooling="rms-blur", smoothing=True).eval()
    side = network.geometry.surrounded_px
    image = textured(side + 2 * network.stride, side + 4 * network.stride)
    logits = network(torch.from_numpy(image).permute(2, 0, 1)[None])
    rim = network.geometry.rim
    assert logits.shape[-2:] == (2 * rim + 3, 2 * rim + 5)
    window = torch.from_numpy(image[network.stride :][:side, network.stride :][:, :side].copy()).permute(2, 0, 1)[None]
    there = logits[0, 0, rim + 1, rim + 1].sigmoid().item()
    assert predict_patches(network, window).item() == pytest.approx(there, abs=1e-6)
    alone = center_crop(window, network.receptive_field, network.receptive_field)
    assert abs(network(alone).sigmoid().item() - there) > 1e-4


def test_turned_windows_see_what_surrounds_them() -> None:
    """A ramp to the right, turned by 45°, still has its middle in the middle; a window's corners come from outside."""
    seen: list[Tensor] = []

    class Recorder(Eye):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x)
            return super().forward(x)

    large = torch.linspace(0, 1, 140).expand(1, 3, 140, 140)
    predict_rotated(Recorder(MITOSIS), large, [45])
    corner_to_corner = seen[0][0, 0].diagonal()  # by 45° counter-clockwise, the ramp rises along the other diagonal
    assert corner_to_corner.std() < 1e-3
    other = seen[0][0, 0].flip(0).diagonal()
    assert torch.allclose(other.diff(), torch.full_like(other[1:], 2**0.5 / 139), atol=1e-3)


def test_bytes_and_floats_are_the_same_images() -> None:
    network = untrained("mitosis", 1)
    images = torch.from_numpy(textured(100, 100)).permute(2, 0, 1)[None]
    angles = [0, 11.25]
    assert np.allclose(
        predict_rotated(network, images, angles), predict_rotated(network, images / 255, angles), atol=1e-6
    )


def test_mistakes_are_named() -> None:
    network, image = untrained("mitosis", 1), textured(80, 80)
    with pytest.raises(ValueError, match=r"network\.eval\(\)"):
        predict(rp.models.mitosis(1).train(), image, CPU)
    with pytest.raises(ValueError, match=r"\(H, W, 3\) of bytes"):
        predict(network, image[..., 0], CPU)
    with pytest.raises(ValueError, match="at least the 68 px"):
        predict(network, image, CPU, tile_px=50)
    for side in (60, 69):
        with pytest.raises(ValueError, match="68 px are cut out"):
            predict_rotated(network, torch.zeros(1, 3, side, side), [0])
    with pytest.raises(ValueError, match="a map for the smallest window"):
        predict_rotated(untrained("nuclei", 1), torch.zeros(1, 3, 60, 60), [0])
