"""Geometry against known answers, a slow oracle, and properties."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

import rotopath
from rotopath import group

odd_sizes = st.integers(0, 5).map(lambda k: 2 * k + 1)
orientation_counts = st.integers(1, 24)


@pytest.mark.parametrize(("size", "kept"), [(1, 1), (3, 9), (5, 21), (7, 37), (9, 69)])
def test_disc_keeps_the_papers_positions(size: int, kept: int) -> None:
    mask = group.disc(size)
    assert int(mask.sum()) == kept
    assert torch.equal(mask, torch.rot90(mask))
    assert torch.equal(mask, mask.T)


@pytest.mark.parametrize("size", [0, 2, 4, -3])
def test_disc_refuses_kernels_without_a_centre(size: int) -> None:
    with pytest.raises(ValueError, match=f"odd and at least 1.*got {size}"):
        group.disc(size)


@pytest.mark.parametrize("orientations", [0, -4, 2.5])
def test_orientations_are_whole_and_positive(orientations: int) -> None:
    with pytest.raises(ValueError, match="whole number, 1 or more"):
        group.rotation_map(5, orientations)


@given(odd_sizes, orientation_counts)
@settings(deadline=None, max_examples=30)
def test_rotation_map_agrees_with_interpolation_by_scipy(size: int, orientations: int) -> None:
    """The oracle rotates one dense kernel at a time, with coordinates and interpolation of its own."""
    mask = group.disc(size).numpy()
    weights = np.random.default_rng(0).normal(size=int(mask.sum()))
    base = np.zeros((size, size))
    base[mask] = weights
    rows, columns = np.indices((size, size)) - size // 2
    kernels = group.rotation_map(size, orientations) @ torch.from_numpy(weights)
    for i, kernel in enumerate(kernels):
        turn = np.exp(-2j * np.pi * i / orientations) * (columns - 1j * rows)  # where each entry comes from
        coordinates = np.stack([-turn.imag, turn.real]) + size // 2
        expected = ndimage.map_coordinates(np.pad(base, 2), coordinates + 2, order=1) * mask
        np.testing.assert_allclose(kernel.reshape(size, size), expected, atol=1e-9)


@given(odd_sizes, orientation_counts, st.sampled_from(group.KERNELS))
@settings(deadline=None, max_examples=60)
def test_turns_by_90_and_180_degrees_are_exact_permutations(size: int, orientations: int, kernel: str) -> None:
    rotation = group.rotation_map(size, orientations, kernel).unflatten(1, (size, size))
    for parts in (4, 2, 1):
        if orientations % parts == 0:
            turned = torch.rot90(rotation, 4 // parts, (1, 2)).roll(orientations // parts, dims=0)
            assert torch.equal(turned, rotation)


@given(odd_sizes, orientation_counts)
@settings(deadline=None, max_examples=30)
def test_rotation_map_is_clean(size: int, orientations: int) -> None:
    rotation = group.rotation_map(size, orientations)
    mask = group.disc(size).flatten()
    assert torch.equal(rotation[0, mask], torch.eye(int(mask.sum()), dtype=torch.float64))
    assert not rotation[:, ~mask].any()
    entries = rotation[rotation != 0]
    assert entries.min() > 1e-9, "rounding dust in the map"
    assert rotation.sum(dim=2).max() <= 1 + 1e-12


def test_90_degrees_of_a_known_kernel() -> None:
    kernels = group.rotation_map(3, 4) @ torch.arange(9, dtype=torch.float64)
    assert kernels[1].reshape(3, 3).tolist() == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]  # counter-clockwise


def test_orientation_shift_of_a_known_group() -> None:
    assert group.orientation_shift(4).tolist() == [[0, 1, 2, 3], [3, 0, 1, 2], [2, 3, 0, 1], [1, 2, 3, 0]]


@pytest.mark.parametrize(("size", "orientations"), [(1, 8), (3, 4), (5, 8), (5, 3), (7, 6)])
def test_kernels_follow_the_definition(size: int, orientations: int) -> None:
    """K(R_θ⁻¹ x, θ' - θ), one entry at a time."""
    rotation = group.rotation_map(size, orientations)
    taps = rotation.shape[2]
    weight = torch.randn(2, 3, orientations, taps, dtype=torch.float64)
    kernels = group.group_kernels(weight, rotation)
    assert kernels.shape == (2 * orientations, 3 * orientations, size, size)
    kernels = kernels.reshape(2, orientations, 3, orientations, size, size)
    for theta in range(orientations):
        for theta_in in range(orientations):
            base = weight[:, :, (theta_in - theta) % orientations]  # (2, 3, P)
            expected = torch.einsum("ocp,rp->ocr", base, rotation[theta]).reshape(2, 3, size, size)
            torch.testing.assert_close(kernels[:, theta, :, theta_in], expected)
    lifted = group.lift_kernels(weight[:, :, 0], rotation).reshape(2, orientations, 3, size, size)
    torch.testing.assert_close(lifted, torch.einsum("ocp,irp->oicr", weight[:, :, 0], rotation).reshape(lifted.shape))


def test_kernels_come_channels_last() -> None:
    weight = torch.randn(2, 3, 4, 21, dtype=torch.float64)
    rotation = group.rotation_map(5, 4)
    assert group.group_kernels(weight, rotation).is_contiguous(memory_format=torch.channels_last)
    assert group.lift_kernels(weight[:, :, 0], rotation).is_contiguous(memory_format=torch.channels_last)


def test_effective_taps_count_the_disc_on_the_grid_and_less_between() -> None:
    for correlation in (0.0, 0.5, 1.0):
        assert group.effective_taps(5, 4, correlation) == pytest.approx(21)
        assert group.effective_taps(1, 16, correlation) == pytest.approx(1)
    assert group.effective_taps(5, 16, 1.0) == pytest.approx(0.877 * 21, rel=1e-3)
    assert group.effective_taps(5, 16, 0.0) == pytest.approx(0.556 * 21, rel=1e-3)


def test_rotate_by_quarter_turns_is_rot90() -> None:
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(group.rotate(x, 90), torch.rot90(x, 1, (-2, -1)))
    assert torch.equal(group.rotate(x, -90), torch.rot90(x, 3, (-2, -1)))
    assert torch.equal(group.rotate(x, 720), x)


@pytest.mark.parametrize("shape", [(41, 41), (40, 40), (41, 61), (60, 41)])
def test_rotate_moves_a_known_spot(shape: tuple[int, int]) -> None:
    """A spot 10 px to the right of the centre stands, after a turn by θ, at 10 (cos θ, -sin θ) (column, row)."""
    height, width = shape
    y, x = torch.meshgrid(torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij")
    spot = torch.exp(-((x - 10) ** 2 + y**2) / 8).double()[None, None]
    for angle in (30.0, 45.0, 200.0, -15.0):
        turned = group.rotate(spot, angle)[0, 0]
        assert turned.shape == shape
        theta = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
        column, row = 10 * torch.cos(theta), -10 * torch.sin(theta)
        mass = turned / turned.sum()
        assert abs((mass * x).sum() - column) < 0.05
        assert abs((mass * y).sum() - row) < 0.05


@given(st.integers(1, 12), st.integers(1, 12), st.floats(-360, 360))
@settings(deadline=None, max_examples=40)
def test_rotate_agrees_with_splines_by_scipy(height: int, width: int, angle: float) -> None:
    x = np.random.default_rng(0).normal(size=(2, height, width))
    rows, columns = np.indices((height, width)) - np.array([height - 1, width - 1])[:, None, None] / 2
    source = np.exp(-1j * np.deg2rad(angle)) * (columns - 1j * rows)
    coordinates = np.stack([-source.imag + (height - 1) / 2, source.real + (width - 1) / 2])
    limits = np.array([height, width])[:, None, None] - 0.5
    inside = ((coordinates >= -0.5) & (coordinates <= limits)).all(axis=0)
    near_the_rim = (np.abs(np.stack([coordinates + 0.5, coordinates - limits])) < 1e-9).any(axis=(0, 1))
    turned = group.rotate(torch.from_numpy(x), angle).numpy()
    if turned.shape == x.shape:
        for got, image in zip(turned, x, strict=True):
            expected = ndimage.map_coordinates(image, coordinates, order=3, mode="mirror") * inside
            np.testing.assert_allclose(got[~near_the_rim], expected[~near_the_rim], atol=1e-8)


def test_rotate_keeps_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert group.rotate(torch.ones(1, 1, 8, 8, dtype=dtype), 45).dtype == dtype


def test_rotate_features_shifts_orientations_along() -> None:
    x = torch.randn(2, 3, 8, 6, 6)
    turned = group.rotate_features(x, 90)
    assert torch.equal(turned[:, :, 2], torch.rot90(x[:, :, 0], 1, (-2, -1)))
    assert torch.equal(group.rotate_features(turned, 270), x)
    with pytest.raises(ValueError, match=r"steps of 45°, and 30° lies between"):
        group.rotate_features(x, 30)


def test_features_turn_by_every_angle_of_their_group() -> None:
    for orientations in range(1, 65):
        x = torch.arange(orientations).view(1, 1, -1, 1, 1).double()
        for i, angle in enumerate(group.angles(orientations)):
            assert group.rotate_features(x, angle)[0, 0, i].round() == 0


@given(
    size=st.integers(1, 40),
    window=st.integers(1, 7),
    stride=st.integers(1, 4),
    padding=st.integers(0, 3),
    dilation=st.integers(1, 3),
)
@settings(deadline=None, max_examples=300)
def test_windows_lie_symmetrically_or_are_refused(
    size: int, window: int, stride: int, padding: int, dilation: int
) -> None:
    reach = dilation * (window - 1)
    starts = range(-padding, size + padding - reach, stride)
    mirrored = sorted(size - 1 - start - reach for start in starts)
    if starts and mirrored == list(starts):
        assert group.windows(size, window, stride, padding, dilation) == len(starts)
    else:
        with pytest.raises(ValueError, match="px") as error:
            group.windows(size, window, stride, padding, dilation)
        offered = [
            int(number)
            for number in re.findall(r"use (?:at least )?(\d+)(?: or (\d+))? px", str(error.value))[0]
            if number
        ]
        assert all(group.windows(good, window, stride, padding, dilation) for good in offered if good > 0)


def test_geometry_has_a_single_home() -> None:
    source = Path(rotopath.__file__).parent
    pattern = re.compile(r"rot90|\.roll\(|math\.pi|np\.pi|\b(cos|sin|atan2|radians)\(|grid_sample|affine_grid")
    strays = [
        f"{path.relative_to(source)}:{number}"
        for path in source.rglob("*.py")
        if path.parent.name != "group"
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line)
    ]
    assert not strays, f"angles and rotations belong into group: {strays}"
