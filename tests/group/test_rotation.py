"""Rotations of images and features, and angles along the orientation axis."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from rotopath import group

# Images


def test_rotate_by_multiples_of_90_degrees_is_rot90() -> None:
    x = torch.randn(2, 3, 5, 7)
    assert torch.equal(group.rotate(x, 90), torch.rot90(x, 1, (-2, -1)))
    assert torch.equal(group.rotate(x, -90), torch.rot90(x, 3, (-2, -1)))
    assert torch.equal(group.rotate(x, 720), x)


@pytest.mark.parametrize("shape", [(41, 41), (40, 40), (41, 61), (60, 41)])
def test_rotate_moves_a_spot_to_its_known_position(shape: tuple[int, int]) -> None:
    """A spot 10 px to the right of the center, rotated by θ, is at 10 (cos θ, -sin θ) (column, row)."""
    height, width = shape
    y, x = torch.meshgrid(torch.arange(height) - (height - 1) / 2, torch.arange(width) - (width - 1) / 2, indexing="ij")
    spot = torch.exp(-((x - 10) ** 2 + y**2) / 8).double()[None, None]
    for angle in (30.0, 45.0, 200.0, -15.0):
        rotated = group.rotate(spot, angle)[0, 0]
        assert rotated.shape == shape
        theta = torch.deg2rad(torch.tensor(angle, dtype=torch.float64))
        column, row = 10 * torch.cos(theta), -10 * torch.sin(theta)
        mass = rotated / rotated.sum()
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
    near_the_edge = (np.abs(np.stack([coordinates + 0.5, coordinates - limits])) < 1e-9).any(axis=(0, 1))
    rotated = group.rotate(torch.from_numpy(x), angle).numpy()
    if rotated.shape == x.shape:
        for actual, image in zip(rotated, x, strict=True):
            expected = ndimage.map_coordinates(image, coordinates, order=3, mode="mirror") * inside
            np.testing.assert_allclose(actual[~near_the_edge], expected[~near_the_edge], atol=1e-8)


def test_rotate_keeps_the_dtype() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        assert group.rotate(torch.ones(1, 1, 8, 8, dtype=dtype), 45).dtype == dtype


# Features


def test_rotate_features_also_shifts_the_orientation_axis() -> None:
    x = torch.randn(2, 3, 8, 6, 6)
    rotated = group.rotate_features(x, 90)
    assert torch.equal(rotated[:, :, 2], torch.rot90(x[:, :, 0], 1, (-2, -1)))
    assert torch.equal(group.rotate_features(rotated, 270), x)
    with pytest.raises(ValueError, match=r"in steps of 45°, but got 30°; use a multiple of 45°"):
        group.rotate_features(x, 30)


def test_features_rotate_by_every_angle_of_their_group() -> None:
    for orientations in range(1, 65):
        x = torch.arange(orientations).view(1, 1, -1, 1, 1).double()
        for i, angle in enumerate(group.angles(orientations)):
            assert group.rotate_features(x, angle)[0, 0, i].round() == 0


@pytest.mark.parametrize("orientations", [1, 4, 8])
def test_features_rotate_and_flip_as_the_orientation_shift_says(orientations: int) -> None:
    """(L_g F)(x, h) = F(g⁻¹x, g⁻¹h)."""
    x = torch.randn(1, 2, 2 * orientations, 5, 5)
    shift = group.orientation_shift(orientations, reflections=True)
    assert torch.equal(group.flip_features(x), group.flip(x)[:, :, shift[orientations]])
    assert torch.equal(group.flip_features(group.flip_features(x)), x)
    if orientations > 1:
        rotated = group.rotate_features(x, 90, reflections=True)
        assert torch.equal(rotated, group.rotate(x, 90)[:, :, shift[orientations // 4]])
        flipped = group.flip_features(rotated)
        assert torch.equal(flipped, group.rotate_features(group.flip_features(x), -90, reflections=True)), "M R = R⁻¹ M"


def test_features_with_an_odd_orientation_axis_cannot_be_flipped() -> None:
    with pytest.raises(ValueError, match=r"an even number of entries .* got 5"):
        group.flip_features(torch.zeros(1, 1, 5, 3, 3))


# The orientation axis as a circle


@settings(deadline=None)
@given(orientations=st.integers(1, 17), seed=st.integers(0, 100))
def test_amplitudes_agree_with_the_fourier_transform(orientations: int, seed: int) -> None:
    values = torch.randn(orientations, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    amplitudes = torch.einsum("g,gpk->pk", values, group.fourier_map(orientations)).square().sum(0).sqrt()
    expected = torch.fft.rfft(values).abs()[1 : group.count_frequencies(orientations) + 1] * 2 / orientations
    torch.testing.assert_close(amplitudes, expected)


def test_the_peak_between_two_equal_values_is_halfway() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert group.interpolate_peak(values)[1].item() == pytest.approx(1.5 * math.pi / 4, abs=1e-6)
    around = torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3.0])
    assert group.interpolate_peak(around)[1].item() == pytest.approx(7.5 * math.pi / 4, abs=1e-6)


def test_with_reflections_the_higher_peak_of_both_halves_is_returned() -> None:
    low, high = torch.tensor([2.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0, 1.0])
    for values in (torch.cat([low, high]), torch.cat([high, low])):
        largest, angle = group.interpolate_peak(values, reflections=True)
        assert (largest.item(), angle.item()) == pytest.approx((3.0, math.pi))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_peak_has_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    assert [result.dtype for result in group.interpolate_peak(values)] == [dtype, dtype]


# The lines that a kernel responds to


def test_the_line_angle_of_a_kernel_rotates_with_it() -> None:
    kernel = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    angle = group.line_angle(kernel)
    rotated = group.line_angle(torch.rot90(kernel, 1, (-2, -1)))
    assert ((rotated - angle) % math.pi - math.pi / 2).abs().max() < 1e-12
    flipped = group.line_angle(kernel.flip(-1))
    torch.testing.assert_close(flipped, -angle)


@pytest.mark.parametrize("degrees", [-60, -20, 0, 30, 75])
def test_the_line_angle_of_a_plane_wave_is_that_of_its_crests(degrees: float) -> None:
    x, y = torch.meshgrid(torch.arange(-10.0, 11), torch.arange(10.0, -11, -1), indexing="xy")
    across = x * math.cos(math.radians(degrees)) + y * math.sin(math.radians(degrees))
    wave = torch.cos(0.4 * across) * torch.exp(-(x**2 + y**2) / 18)
    assert math.degrees(group.line_angle(wave[None])) == pytest.approx(degrees, abs=1.5)
