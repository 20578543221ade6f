"""Augmentation: known results of every change, and annotations that move with their image."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rotopath import group
from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, DrawnChanges, augment, change_stains
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
