"""The group of turns and mirror images: its laws, as tables and as permutations of pixels."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rotopath import group

groups = {"orientations": st.integers(1, 12), "reflections": st.booleans()}


@given(**groups)
@settings(deadline=None)
def test_the_table_is_that_of_a_group(orientations: int, reflections: bool) -> None:
    table = group.products(orientations, reflections)
    entries = torch.arange(group.order(orientations, reflections))
    assert len(entries) == (1 + reflections) * orientations
    for row in (*table, *table.T):  # closed, and every equation has one solution
        assert torch.equal(row.sort().values, entries)
    assert torch.equal(table[0], entries)
    assert torch.equal(table[:, 0], entries)
    back = group.inverses(orientations, reflections)
    assert (table[entries, back] == 0).all()
    assert (table[back, entries] == 0).all()
    # (g h) k = g (h k)
    assert torch.equal(table[table], table[:, table])


@given(orientations=st.integers(1, 12))
@settings(deadline=None)
def test_two_reflections_are_a_rotation(orientations: int) -> None:
    table = group.products(orientations, reflections=True)
    mirrored = slice(orientations, None)
    assert (table[mirrored, mirrored] < orientations).all()
    assert (table[mirrored, :orientations] >= orientations).all()
    turn = torch.arange(orientations)
    assert torch.equal(table[mirrored, mirrored], (turn[:, None] - turn[None, :]) % orientations), "Rᵢ M Rⱼ M = Rᵢ₋ⱼ"


def test_turns_alone_shift_as_they_did() -> None:
    steps = torch.arange(6)
    assert torch.equal(group.orientation_shift(6), (steps[None, :] - steps[:, None]) % 6)
    halves = group.orientation_shift(6, reflections=True)[:6, :6]
    assert torch.equal(halves, group.orientation_shift(6))


def act(x: Tensor, entry: int, orientations: int) -> Tensor:
    """An entry of the axis on images: mirrored or not, then turned."""
    turned = group.flip(x) if entry >= orientations else x
    return group.rotate(turned, 360 * (entry % orientations) / orientations)


@pytest.mark.parametrize("orientations", [1, 2, 4])
def test_the_table_is_what_pixels_do(orientations: int) -> None:
    x = torch.randn(1, 1, 5, 5)
    table = group.products(orientations, reflections=True)
    for g in range(2 * orientations):
        for h in range(2 * orientations):
            both = act(act(x, h, orientations), g, orientations)
            assert torch.equal(both, act(x, int(table[g, h]), orientations))


@pytest.mark.parametrize("orientations", [1, 2, 4])
@pytest.mark.parametrize("kernel", group.KERNELS)
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_kernels_of_all_entries_are_permutations_of_one(size: int, kernel: str, orientations: int) -> None:
    rotation = group.rotation_map(size, orientations, kernel, reflections=True)
    weights = torch.randn(rotation.shape[2], dtype=torch.float64)
    kernels = (rotation @ weights).view(-1, size, size)
    for entry, turned in enumerate(kernels):
        torch.testing.assert_close(turned, act(kernels[0], entry, orientations))


@given(orientations=st.integers(1, 12), kernel=st.sampled_from(group.KERNELS), size=st.sampled_from([3, 5]))
@settings(deadline=None, max_examples=30)
def test_mirrored_kernels_are_exact_for_every_n(orientations: int, kernel: str, size: int) -> None:
    """A flip of the pixels takes entry g to M g."""
    rotation = group.rotation_map(size, orientations, kernel, reflections=True).unflatten(1, (size, size))
    mirrored = group.products(orientations, reflections=True)[orientations]
    assert torch.equal(rotation.flip(2), rotation[mirrored])
    if orientations % 4 == 0:
        quarter = group.products(orientations, reflections=True)[orientations // 4]
        assert torch.equal(torch.rot90(rotation, 1, (1, 2)), rotation[quarter])


@pytest.mark.parametrize("orientations", [1, 4, 8])
def test_features_turn_and_flip_by_the_table(orientations: int) -> None:
    """(L_g F)(x, h) = F(g⁻¹x, g⁻¹h)."""
    x = torch.randn(1, 2, 2 * orientations, 5, 5)
    shift = group.orientation_shift(orientations, reflections=True)
    assert torch.equal(group.flip_features(x), group.flip(x)[:, :, shift[orientations]])
    assert torch.equal(group.flip_features(group.flip_features(x)), x)
    if orientations > 1:
        turned = group.rotate_features(x, 90, reflections=True)
        assert torch.equal(turned, group.rotate(x, 90)[:, :, shift[orientations // 4]])
        there = group.flip_features(turned)
        assert torch.equal(there, group.rotate_features(group.flip_features(x), -90, reflections=True)), "M R = R⁻¹ M"


def test_an_odd_axis_has_no_mirrored_half() -> None:
    with pytest.raises(ValueError, match=r"an even number of entries .* got 5"):
        group.flip_features(torch.zeros(1, 1, 5, 3, 3))
