"""Augmentation: known results of every change, and annotations that move with their image."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from rotopath import group
from rotopath.data.augmentation import (
    NO_AUGMENTATION,
    Augmentation,
    DrawnChanges,
    augment,
    blur_each,
    change_stains,
    compress_each,
    interpolate_shifts,
)
from rotopath.images.stain import REFERENCE_STAINS, WHITE


def changes(count: int, **parts: torch.Tensor) -> DrawnChanges:
    nothing = NO_AUGMENTATION.draw(count, np.random.default_rng(0))
    return nothing._replace(**parts)


def windows(count: int, planes: int, size: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, planes, size, size), dtype=torch.uint8)


def test_eight_symmetries_of_a_small_square() -> None:
    """Transposed or not, and rotated counter-clockwise by quarter turns: written out by hand."""
    square = torch.tensor([[1, 2], [3, 4]])
    expected = [
        [[1, 2], [3, 4]],
        [[2, 4], [1, 3]],
        [[4, 3], [2, 1]],
        [[3, 1], [4, 2]],
        [[1, 3], [2, 4]],
        [[3, 4], [1, 2]],
        [[4, 2], [3, 1]],
        [[2, 1], [4, 3]],
    ]
    rotated = group.apply_symmetries(square.expand(8, 3, 2, 2), torch.arange(8))
    assert rotated[:, 0].tolist() == expected
    assert torch.equal(rotated[:, 0], rotated[:, 2])


def test_only_squares_have_all_symmetries() -> None:
    with pytest.raises(ValueError, match="Only squares have all eight symmetries; got images of 3 × 4 px"):
        group.apply_symmetries(torch.zeros(1, 3, 3, 4), torch.zeros(1, dtype=torch.long))


def test_image_and_annotation_move_together() -> None:
    """A dark spot in the image and the same spot in the class map stay at the same position."""
    window = torch.full((64, 4, 31, 31), 255, dtype=torch.uint8)
    window[:, 3] = 0
    window[:, :3, 8:11, 12:15] = 0
    window[:, 3, 8:11, 12:15] = 2
    drawn = Augmentation(free_rotation=True, brightness=0.2, stain=0.2).draw(64, np.random.default_rng(1))
    images, classes = augment(window, drawn, 31)
    assert classes is not None
    assert classes.shape == (64, 1, 31, 31)
    dark = [center_of_mass(image.sum(dim=0).amax() - image.sum(dim=0)) for image in images]
    marked = [center_of_mass((marks == 2).float()) for (marks,) in classes]
    assert dark == [pytest.approx(position, abs=0.5) for position in marked]
    assert np.ptp(marked, axis=0).min() > 10, "spots move far"


def center_of_mass(weights: torch.Tensor) -> tuple[float, float]:
    """Return the center of mass of the pixels above half of the maximum."""
    row, column = torch.nonzero(weights > weights.max() / 2).float().mean(dim=0).tolist()
    return row, column


def test_symmetries_move_image_and_classes_exactly_alike() -> None:
    window = windows(16, 3, 12)
    window = torch.cat([window, window[:, :1] // 100], dim=1)  # classes computed from the red channel
    drawn = Augmentation(brightness=0.0).draw(16, np.random.default_rng(2))
    images, classes = augment(window, drawn, 12)
    assert torch.equal(classes, (images[:, :1] * 255).round().long() // 100)
    assert len(set(drawn.symmetries.tolist())) > 4


@pytest.mark.parametrize("quarters", [0, 1, 2, 3])
def test_free_rotation_by_quarter_turns_is_exact(quarters: int) -> None:
    window = windows(2, 4, 30)
    window[:, 3] %= 3
    drawn = changes(2, degrees=torch.full((2,), 90.0 * quarters))
    images, classes = augment(window, drawn, 20)
    expected = torch.rot90(window[:, :, 5:25, 5:25], quarters, (-2, -1))
    assert torch.allclose(images, expected[:, :3] / 255, atol=1 / 255)
    assert torch.equal(classes, expected[:, 3:].long())


def test_several_target_maps_move_together_and_keep_their_numbers() -> None:
    """Rotation takes the number of the nearest pixel, so no number between 2 and 255 appears."""
    window = windows(8, 5, 40)
    window[:, 3] %= 3
    window[:, 4] = torch.where(window[:, 3] == 2, 255, window[:, 3])
    _, targets = augment(window, Augmentation(free_rotation=True).draw(8, np.random.default_rng(4)), 24)
    assert targets is not None
    assert targets.shape == (8, 2, 24, 24)
    assert targets.dtype == torch.int64
    assert set(targets[:, 1].unique().tolist()) == {0, 1, 255}
    assert torch.equal(targets[:, 1], torch.where(targets[:, 0] == 2, 255, targets[:, 0]))


def test_free_rotation_is_counter_clockwise() -> None:
    spot = torch.zeros(1, 1, 81, 81)
    spot[0, 0, 38:43, 53:58] = 1  # to the right of the center
    rotated = group.rotate_each(spot, torch.tensor([45.0]))[0, 0]
    along = 15 / 2**0.5
    assert center_of_mass(rotated) == pytest.approx((40 - along, 40 + along), abs=0.2), "up and to the right"
    assert center_of_mass(group.rotate(spot, 45.0)[0, 0]) == pytest.approx(center_of_mass(rotated), abs=0.2)


@given(st.integers(1, 200), st.floats(0, 360))
def test_covering_square_contains_the_rotated_square(size: int, degrees: float) -> None:
    covering = group.covering_size(size)
    assert (covering - size) % 2 == 0
    corner = np.exp(1j * np.deg2rad(degrees)) * (1 + 1j) * size / 2
    assert max(abs(corner.real), abs(corner.imag)) <= covering / 2 + 1e-9
    assert covering <= size * 2**0.5 + 2


def test_brightness_shifts_each_channel_and_is_clamped() -> None:
    window = torch.tensor([0, 100, 250], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 4, 4)
    images, _ = augment(window, changes(1, brightness=torch.tensor([[-0.1, 0.2, 0.1]])), 4)
    assert images[0, :, 0, 0].tolist() == pytest.approx([0, 100 / 255 + 0.2, 1])


def test_stains_change_by_their_factors() -> None:
    """A pixel made of known amounts of two stains becomes the pixel made of the changed amounts."""
    amounts, factors = np.array([0.9, 0.4]), np.array([1.3, 0.5])
    before, after = (WHITE * np.exp(-REFERENCE_STAINS @ a) - 1 for a in (amounts, amounts * factors))
    pixel = torch.from_numpy(before / 255).float().view(1, 3, 1, 1)
    changed = change_stains(pixel, torch.from_numpy(factors).float()[None])
    assert (changed.flatten() * 255).tolist() == pytest.approx(after.tolist(), abs=0.01)


def test_factors_of_one_and_white_pixels_change_nothing() -> None:
    images = torch.rand(4, 3, 5, 5)
    assert torch.allclose(change_stains(images, torch.ones(4, 2)), images, atol=1e-5)
    white = torch.full((1, 3, 2, 2), (WHITE - 1) / 255)
    assert torch.allclose(change_stains(white, torch.tensor([[2.0, 0.1]])), white, atol=1e-5)


def test_disabling_one_change_does_not_affect_the_others() -> None:
    everything = Augmentation(free_rotation=True, stain=0.1)
    full = everything.draw(50, np.random.default_rng(7))
    less = Augmentation(transpose=False).draw(50, np.random.default_rng(7))
    assert torch.equal(less.symmetries, full.symmetries % 4)
    assert torch.equal(less.brightness, full.brightness)
    assert less.degrees is None
    assert less.stains is None
    assert set(full.symmetries.tolist()) == set(range(8))
    assert full.brightness.abs().max() <= 0.1


def test_no_augmentation_changes_nothing() -> None:
    window = windows(3, 3, 9)
    images, classes = augment(window, changes(3), 9)
    assert torch.equal(images, window.float() / 255)
    assert classes is None


@pytest.mark.parametrize("settings", [{"brightness": 1.0}, {"stain": -0.1}, {"stain": 2.0}])
def test_amounts_must_be_fractions(settings: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a fraction from 0 to below 1"):
        Augmentation(**settings)


# Scale, elastic deformation, blur and JPEG compression


def test_new_changes_do_not_affect_the_others() -> None:
    """Recipes that do not use them give the same images as before, and each keeps its own random values."""
    off = Augmentation().draw(6, np.random.default_rng(5))
    assert off[4:] == (None, None, None, None)
    everything = Augmentation(scale=0.1, elastic=4, blur=1.5, jpeg=50).draw(6, np.random.default_rng(5))
    assert torch.equal(everything.symmetries, off.symmetries)
    assert torch.equal(everything.brightness, off.brightness)
    for name, alone in (
        ("scales", Augmentation(scale=0.1)),
        ("shifts", Augmentation(elastic=4)),
        ("blurs", Augmentation(blur=1.5)),
        ("qualities", Augmentation(jpeg=50)),
    ):
        drawn = alone.draw(6, np.random.default_rng(5))
        assert torch.equal(getattr(drawn, name), getattr(everything, name))
        assert len(getattr(drawn.shard(1, 2), name)) == 3
        assert sum(values is not None for values in drawn[4:]) == 1
    assert 0.9 <= everything.scales.min() < everything.scales.max() <= 1.1
    assert 50 <= everything.qualities.min() < everything.qualities.max() <= 100


def test_enlarging_by_two_repeats_every_pixel_of_the_annotation() -> None:
    window = windows(2, 4, 24)
    _, classes = augment(window, changes(2, scales=torch.full((2,), 2.0)), 24)
    expected = window[:, 3:, 6:18, 6:18].repeat_interleave(2, 2).repeat_interleave(2, 3)
    assert torch.equal(classes, expected.long())
    ramp = torch.arange(24, dtype=torch.uint8).view(1, 1, 24, 1).expand(1, 3, 24, 24) * 10
    images, _ = augment(ramp, changes(1, scales=torch.full((1,), 2.0)), 12)
    rows = 11.5 + (torch.arange(12) - 5.5) / 2  # rows of the image at which the result has its pixels
    assert torch.allclose(images[0, 0, :, 3] * 255, 10 * rows, atol=0.51), "bytes are rounded"


def test_pixels_move_by_the_interpolated_shifts() -> None:
    """On a ramp, the change of a value is proportional to the shift; the annotation has the value of the same pixel."""
    size, shifts = 33, Augmentation(elastic=6).draw(1, np.random.default_rng(2)).shifts
    assert shifts is not None
    inside = interpolate_shifts(shifts, size)
    assert inside[:, :, 16, 16].abs().max() < 1e-6, "the center does not move"
    assert interpolate_shifts(shifts, 34)[:, :, 16:18, 16:18].mean(dim=(2, 3)).abs().max() < 1e-6
    assert 1 < inside.abs().max() <= 6
    rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    for axis, ramp in enumerate((rows, columns)):
        window = (7 * ramp).to(torch.uint8).expand(1, 4, size, size)
        images, maps = augment(window, changes(1, shifts=shifts), size)
        source = ramp + inside[0, axis]
        middle = (slice(7, -7), slice(7, -7))
        assert torch.allclose((images[0, 0] * 255)[middle], 7 * source[middle], atol=0.51)
        nearest = 7 * source[middle].round()
        assert maps is not None
        is_clear = (source[middle] - source[middle].floor() - 0.5).abs() > 1e-3  # else both neighbors are nearest
        assert torch.equal(maps[0, 0][middle][is_clear], nearest.long()[is_clear])


def test_image_and_annotation_move_together_by_all_changes_of_geometry() -> None:
    window = torch.full((64, 4, 71, 71), 255, dtype=torch.uint8)
    window[:, 3] = 0
    window[:, :3, 28:31, 32:35] = 0
    window[:, 3, 28:31, 32:35] = 2
    augmentation = Augmentation(free_rotation=True, brightness=0.0, scale=0.2, elastic=5)
    images, classes = augment(window, augmentation.draw(64, np.random.default_rng(1)), 31)
    assert classes is not None
    dark = [center_of_mass(1 - image[0]) for image in images]
    marked = [center_of_mass((marks == 2).float()) for (marks,) in classes]
    assert dark == [pytest.approx(position, abs=0.6) for position in marked]
    assert np.ptp(marked, axis=0).min() > 8, "spots move far"


def test_an_object_in_the_center_stays_there_so_that_the_label_of_a_window_stays_right() -> None:
    window = torch.full((32, 3, 61, 61), 255, dtype=torch.uint8)
    window[:, :, 29:32, 29:32] = 0
    augmentation = Augmentation(free_rotation=True, brightness=0.0, scale=0.3, elastic=4)
    images, _ = augment(window, augmentation.draw(32, np.random.default_rng(3)), 31)
    for image in images:
        assert center_of_mass(1 - image[0]) == pytest.approx((15, 15), abs=0.75)


@given(st.integers(8, 130), st.floats(0, 0.49), st.booleans())
def test_the_cut_square_contains_all_pixels_of_the_window(size: int, scale: float, rotate: bool) -> None:
    augmentation = Augmentation(scale=scale, elastic=3.2, free_rotation=rotate)
    cut = augmentation.cut_px(size)
    assert (cut - size) % 2 == 0
    assert cut >= size / (1 - scale) * (2**0.5 if rotate else 1) + 2 * 3.2
    assert NO_AUGMENTATION.cut_px(size) == size


def test_blur_spreads_a_point_by_its_standard_deviation() -> None:
    images = torch.zeros(3, 3, 41, 41)
    images[:, :, 20, 20] = 1
    sigmas = torch.tensor([0.0, 1.0, 2.5])
    blurred = blur_each(images, sigmas)
    assert torch.allclose(blurred.sum(dim=(2, 3)), torch.ones(3, 3), atol=1e-5)
    distances = (torch.arange(41) - 20.0) ** 2
    spread = (blurred[:, 0].sum(dim=2) * distances).sum(dim=1).sqrt()
    assert torch.allclose(spread, sigmas, atol=0.03)
    assert torch.equal(blurred[0], images[0])


@pytest.mark.parametrize("quality", [20, 50, 90])
def test_compression_agrees_with_that_of_pillow(quality: int) -> None:
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(1, 3, 9, 9, generator=generator)
    image = (torch.nn.functional.interpolate(coarse, (50, 61), mode="bicubic").clamp(0, 1) * 255).round() / 255
    file = io.BytesIO()
    pixels = (image[0] * 255).byte().permute(1, 2, 0).numpy()
    Image.fromarray(pixels).save(file, "JPEG", quality=quality, subsampling=0)
    expected = np.asarray(Image.open(file)).astype(np.int64)
    own = (compress_each(image, torch.tensor([float(quality)]))[0] * 255).permute(1, 2, 0).numpy()
    error, change = np.abs(own - expected).mean(), np.abs(expected - pixels).mean()
    assert error < 1
    assert change > (3 if quality < 90 else 1), "much more than the error"


@pytest.mark.parametrize(
    ("name", "value"), [("scale", 0.5), ("scale", -0.1), ("elastic", 11), ("blur", -1), ("jpeg", 9), ("jpeg", 101)]
)
def test_amounts_out_of_bounds_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"The augmentation '{name}' is {value}; expected a "):
        Augmentation(**{name: value})
