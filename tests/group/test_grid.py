"""Group elements and pixel grids: the laws of the group, and known answers."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rotopath import group

groups = {"orientations": st.integers(1, 12), "reflections": st.booleans()}


@pytest.mark.parametrize("orientations", [0, -4, 2.5])
def test_the_number_of_orientations_is_a_positive_whole_number(orientations: int) -> None:
    with pytest.raises(ValueError, match="whole number, 1 or more"):
        group.rotation_map(5, orientations)


@given(**groups)
@settings(deadline=None)
def test_the_multiplication_table_satisfies_the_group_axioms(orientations: int, reflections: bool) -> None:
    table = group.multiplication_table(orientations, reflections)
    entries = torch.arange(group.order(orientations, reflections))
    assert len(entries) == (1 + reflections) * orientations
    for row in (*table, *table.T):  # closed, and every equation has one solution
        assert torch.equal(row.sort().values, entries)
    assert torch.equal(table[0], entries)
    assert torch.equal(table[:, 0], entries)
    inverse = group.inverses(orientations, reflections)
    assert (table[entries, inverse] == 0).all()
    assert (table[inverse, entries] == 0).all()
    # (g h) k = g (h k)
    assert torch.equal(table[table], table[:, table])


@given(orientations=st.integers(1, 12))
@settings(deadline=None)
def test_the_product_of_two_reflections_is_a_rotation(orientations: int) -> None:
    table = group.multiplication_table(orientations, reflections=True)
    reflected = slice(orientations, None)
    assert (table[reflected, reflected] < orientations).all()
    assert (table[reflected, :orientations] >= orientations).all()
    i = torch.arange(orientations)
    assert torch.equal(table[reflected, reflected], (i[:, None] - i[None, :]) % orientations), "Rᵢ M Rⱼ M = Rᵢ₋ⱼ"


def transform(x: Tensor, entry: int, orientations: int) -> Tensor:
    """Apply an entry of the orientation axis to images: perhaps a flip, then a rotation."""
    flipped = group.flip(x) if entry >= orientations else x
    return group.rotate(flipped, 360 * (entry % orientations) / orientations)


@pytest.mark.parametrize("orientations", [1, 2, 4])
def test_the_multiplication_table_composes_transforms_of_images(orientations: int) -> None:
    x = torch.randn(1, 1, 5, 5)
    table = group.multiplication_table(orientations, reflections=True)
    for g in range(2 * orientations):
        for h in range(2 * orientations):
            both = transform(transform(x, h, orientations), g, orientations)
            assert torch.equal(both, transform(x, int(table[g, h]), orientations))


def test_orientation_shift_of_four_rotations() -> None:
    assert group.orientation_shift(4).tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]


def test_orientation_shift_without_reflections_is_a_difference_modulo_n() -> None:
    steps = torch.arange(6)
    assert torch.equal(group.orientation_shift(6), (steps[None, :] - steps[:, None]) % 6)
    first_half = group.orientation_shift(6, reflections=True)[:6, :6]
    assert torch.equal(first_half, group.orientation_shift(6))


@pytest.mark.parametrize(("size", "kept"), [(1, 1), (3, 9), (5, 21), (7, 37), (9, 69)])
def test_the_disc_mask_has_as_many_entries_as_in_the_paper(size: int, kept: int) -> None:
    mask = group.disc_mask(size)
    assert int(mask.sum()) == kept
    assert torch.equal(mask, torch.rot90(mask))
    assert torch.equal(mask, mask.T)


@pytest.mark.parametrize("size", [0, -3])
def test_kernels_without_entries_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1; got {size}"):
        group.disc_mask(size)


def test_the_disc_of_an_even_kernel_has_no_corners() -> None:
    assert group.disc_mask(2).all()
    assert group.disc_mask(4).sum() == 12
    assert not group.disc_mask(4)[::3, ::3].any()


@given(
    size=st.integers(1, 40),
    window=st.integers(1, 7),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
)
@settings(deadline=None, max_examples=300)
def test_output_size_counts_symmetric_windows_and_refuses_others(
    size: int, window: int, stride: int, padding: int, dilation: int
) -> None:
    reach = dilation * (window - 1)
    starts = range(-padding, size + padding - reach, stride)
    mirrored = sorted(size - 1 - start - reach for start in starts)
    if starts and mirrored == list(starts):
        assert group.output_size(size, window, stride, padding, dilation) == len(starts)
    else:
        with pytest.raises(ValueError, match="px") as error:
            group.output_size(size, window, stride, padding, dilation)
        offered = [
            int(number)
            for number in re.findall(r"use (?:at least )?(\d+)(?: or (\d+))? px", str(error.value))[0]
            if number
        ]
        assert all(group.output_size(good, window, stride, padding, dilation) for good in offered if good > 0)
