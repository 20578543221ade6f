"""Rotated kernels: exact at 90°, equal to an oracle in between, and the gain and conditioning of each family."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from torch import Tensor

from rotopath import group
from rotopath.group import kernel_families
from rotopath.group.kernel_families import circular_harmonics

SIZES = (1, 3, 5, 7, 9)

odd_sizes = st.integers(0, 5).map(lambda k: 2 * k + 1)
orientation_counts = st.integers(1, 24)


def condition_number(rotation: Tensor) -> float:
    values = torch.linalg.svdvals(rotation.flatten(0, -2))
    return float(values[0] / values[-1])


# All families


@pytest.mark.parametrize("kernel", group.KERNELS)
@pytest.mark.parametrize("size", SIZES)
def test_every_family_has_as_many_weights_as_the_disc_or_the_square_has_entries(size: int, kernel: str) -> None:
    rotation = group.rotation_map(size, 8, kernel)
    taps = size**2 if kernel == "square" else int(group.disc_mask(size).sum())
    assert rotation.shape == (8, size**2, taps)
    assert group.count_taps(size, kernel) == taps
    assert rotation.dtype == torch.float64


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(
        ValueError, match="kernel must be one of 'bilinear', 'gaussian', 'harmonic', 'square'; got 'cubic'"
    ):
        group.rotation_map(5, 8, "cubic")


@given(odd_sizes, orientation_counts, st.sampled_from(group.KERNELS))
@settings(deadline=None, max_examples=60)
def test_rotations_by_90_and_180_degrees_are_exact_permutations(size: int, orientations: int, kernel: str) -> None:
    rotation = group.rotation_map(size, orientations, kernel).unflatten(1, (size, size))
    for parts in (4, 2, 1):
        if orientations % parts == 0:
            rotated = torch.rot90(rotation, 4 // parts, (1, 2)).roll(orientations // parts, dims=0)
            assert torch.equal(rotated, rotation)


@pytest.mark.parametrize("orientations", [1, 2, 4])
@pytest.mark.parametrize("kernel", group.KERNELS)
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_the_kernels_of_all_entries_are_rotated_and_flipped_copies_of_the_first(
    size: int, kernel: str, orientations: int
) -> None:
    rotation = group.rotation_map(size, orientations, kernel, reflections=True)
    weights = torch.randn(rotation.shape[2], dtype=torch.float64)
    kernels = (rotation @ weights).view(-1, size, size)
    for entry, transformed in enumerate(kernels):
        flipped = group.flip(kernels[0]) if entry >= orientations else kernels[0]
        expected = group.rotate(flipped, 360 * (entry % orientations) / orientations)
        torch.testing.assert_close(transformed, expected)


@given(orientations=st.integers(1, 12), kernel=st.sampled_from(group.KERNELS), size=st.sampled_from([3, 5]))
@settings(deadline=None, max_examples=30)
def test_reflected_kernels_are_exact_for_every_n(orientations: int, kernel: str, size: int) -> None:
    """Flipping the pixels of entry g makes entry M g."""
    rotation = group.rotation_map(size, orientations, kernel, reflections=True).unflatten(1, (size, size))
    table = group.multiplication_table(orientations, reflections=True)
    assert torch.equal(rotation.flip(2), rotation[table[orientations]])
    if orientations % 4 == 0:
        assert torch.equal(torch.rot90(rotation, 1, (1, 2)), rotation[table[orientations // 4]])


# Weights of an ordinary convolution


@pytest.mark.parametrize(("size", "orientations"), [(1, 8), (3, 4), (5, 8), (5, 3), (7, 6)])
def test_kernels_agree_with_the_definition(size: int, orientations: int) -> None:
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


def test_kernels_are_channels_last_in_memory() -> None:
    weight = torch.randn(2, 3, 4, 21, dtype=torch.float64)
    rotation = group.rotation_map(5, 4)
    assert group.group_kernels(weight, rotation).is_contiguous(memory_format=torch.channels_last)
    assert group.lift_kernels(weight[:, :, 0], rotation).is_contiguous(memory_format=torch.channels_last)


def test_effective_taps_are_all_taps_on_the_grid_and_fewer_in_between() -> None:
    for correlation in (0.0, 0.5, 1.0):
        assert group.effective_taps(5, 4, correlation) == pytest.approx(21)
        assert group.effective_taps(1, 16, correlation) == pytest.approx(1)
    assert group.effective_taps(5, 16, 1.0) == pytest.approx(0.877 * 21, rel=1e-3)
    assert group.effective_taps(5, 16, 0.0) == pytest.approx(0.556 * 21, rel=1e-3)


# Bilinear kernels


@given(odd_sizes, orientation_counts)
@settings(deadline=None, max_examples=30)
def test_bilinear_kernels_agree_with_interpolation_by_scipy(size: int, orientations: int) -> None:
    """The oracle rotates one dense kernel at a time, with its own coordinates and interpolation."""
    mask = group.disc_mask(size).numpy()
    weights = np.random.default_rng(0).normal(size=int(mask.sum()))
    base = np.zeros((size, size))
    base[mask] = weights
    rows, columns = np.indices((size, size)) - size // 2
    kernels = group.rotation_map(size, orientations) @ torch.from_numpy(weights)
    for i, kernel in enumerate(kernels):
        source = np.exp(-2j * np.pi * i / orientations) * (columns - 1j * rows)
        coordinates = np.stack([-source.imag, source.real]) + size // 2
        expected = ndimage.map_coordinates(np.pad(base, 2), coordinates + 2, order=1) * mask
        np.testing.assert_allclose(kernel.reshape(size, size), expected, atol=1e-9)


@given(odd_sizes, orientation_counts)
@settings(deadline=None, max_examples=30)
def test_the_bilinear_map_has_no_rounding_errors(size: int, orientations: int) -> None:
    rotation = group.rotation_map(size, orientations)
    mask = group.disc_mask(size).flatten()
    assert torch.equal(rotation[0, mask], torch.eye(int(mask.sum()), dtype=torch.float64))
    assert not rotation[:, ~mask].any()
    entries = rotation[rotation != 0]
    assert entries.min() > 1e-9, "entries that are only rounding errors"
    assert rotation.sum(dim=2).max() <= 1 + 1e-12


def test_a_known_kernel_rotates_counter_clockwise() -> None:
    kernels = group.rotation_map(3, 4) @ torch.arange(9, dtype=torch.float64)
    assert kernels[1].reshape(3, 3).tolist() == [[2, 5, 8], [1, 4, 7], [0, 3, 6]]


def test_bilinear_kernels_lose_gain_at_45_degrees() -> None:
    gains = group.rotation_map(5, 8).square().sum(dim=(1, 2)) / 21
    assert gains[0] == 1
    assert gains[1] < 0.5


# Harmonic kernels


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("orientations", [3, 8, 12, 16])
def test_harmonic_kernels_have_the_same_gain_at_every_angle(size: int, orientations: int) -> None:
    rotation = group.rotation_map(size, orientations, "harmonic")
    taps = rotation.shape[2]
    torch.testing.assert_close(rotation.square().sum(dim=(1, 2)), torch.full((orientations,), float(taps)).double())
    constant = rotation.sum(dim=1).square().sum(dim=1)
    torch.testing.assert_close(constant, constant[:1].expand(orientations))


@pytest.mark.parametrize(("size", "most"), [(1, 1.0), (3, 4.0), (5, 3.2), (7, 3.6), (9, 7.5)])
def test_harmonic_kernels_are_well_conditioned(size: int, most: float) -> None:
    for orientations in (8, 16):
        assert condition_number(group.rotation_map(size, orientations, "harmonic")) <= most + 1e-9


def test_every_base_weight_of_harmonic_kernels_matters_at_every_single_angle() -> None:
    for rotation in group.rotation_map(5, 16, "harmonic"):
        assert condition_number(rotation) < 11
    averaged = group.rotation_map(5, 8, "bilinear")[1]
    assert condition_number(averaged) > 1e6, "at 45° interpolation averages neighbors, whose differences are lost"


@pytest.mark.parametrize("size", SIZES)
def test_rotating_a_harmonic_kernel_is_an_orthogonal_map_of_its_weights(size: int) -> None:
    """M(θ) = M(0) ρ(θ), with ρ a representation: ρ(θ)ρ(θ) = ρ(2θ)."""
    rotation = group.rotation_map(size, 16, "harmonic")
    taps = rotation.shape[2]
    representation = torch.linalg.pinv(rotation[0]) @ rotation  # (16, P, P)
    torch.testing.assert_close(rotation[0] @ representation, rotation)
    identity = torch.eye(taps, dtype=torch.float64).expand(16, -1, -1)
    torch.testing.assert_close(representation @ representation.mT, identity)
    torch.testing.assert_close(representation[1] @ representation[1], representation[2])
    # The fourth step is a rotation by 90°, which permutes pixels.
    torch.testing.assert_close(torch.matrix_power(representation[1], 4), representation[4])


def test_the_frequencies_of_5x5_kernels() -> None:
    _, frequencies = circular_harmonics(5)
    assert frequencies.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]
    assert int((1 + (frequencies > 0)).sum()) == 21


def test_the_phase_of_the_response_to_a_wave_rotates_with_the_frequency_of_the_harmonic() -> None:
    """The response to exp(iω·x) rotated by α is exp(-imα) times the response to the wave at 0°."""
    kernels, frequencies = circular_harmonics(5)
    x, y = torch.meshgrid(*[torch.arange(-2.0, 3.0, dtype=torch.float64)] * 2, indexing="xy")
    angles = torch.arange(32, dtype=torch.float64) * math.tau / 32
    along = angles.cos()[:, None] * x.flatten() - angles.sin()[:, None] * y.flatten()  # (32, 25)
    responses = torch.exp(0.7j * along) @ kernels.conj()  # (32, K), at a ninth of the sampling frequency
    power = torch.fft.fft(responses, dim=0).abs().square()
    fractions = power / power.sum(dim=0)
    for k, m in enumerate(frequencies.int()):
        if m < 4:  # at higher frequencies the pixel grid begins to matter
            assert fractions[-m, k] > 0.999, f"m = {m}"


def test_harmonics_are_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other rounding errors must not change a sign, a phase or the order."""
    expected = {size: group.rotation_map(size, 8, "harmonic") for size in SIZES}
    image_covariance, called = kernel_families.image_covariance, set()

    def with_rounding_errors(size: int) -> Tensor:
        called.add(size)
        exact = image_covariance(size)
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        return exact * (1 + 1e-15 * (noise + noise.mT))

    monkeypatch.setattr(kernel_families, "image_covariance", with_rounding_errors)
    circular_harmonics.cache_clear()
    try:
        for size in SIZES:
            torch.testing.assert_close(group.rotation_map(size, 8, "harmonic"), expected[size], atol=1e-7, rtol=0)
    finally:
        circular_harmonics.cache_clear()
    assert called == set(SIZES)


def test_the_first_harmonic_is_a_round_spot() -> None:
    """It leaves out the corners of the square only because the fit prefers what rotates exactly."""
    kernels, _ = circular_harmonics(5)
    spot = kernels[:, 0].real.view(5, 5)
    assert not kernels[:, 0].imag.any()
    torch.testing.assert_close(spot, spot.T)
    assert spot[0, 0] < 0.05 * spot.max()
    assert spot[group.disc_mask(5)].min() > 0.5 * spot.max()
