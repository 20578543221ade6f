"""Kernels that turn faithfully off the pixel grid: gains, conditioning, and the harmonics that they are made of."""

import math

import pytest
import torch
from torch import Tensor

from rotopath import group
from rotopath.group import harmonics as module
from rotopath.group.kernel_families import harmonics

SIZES = (1, 3, 5, 7, 9)


def condition(rotation: Tensor) -> float:
    values = torch.linalg.svdvals(rotation.flatten(0, -2))
    return float(values[0] / values[-1])


@pytest.mark.parametrize("kernel", group.KERNELS)
@pytest.mark.parametrize("size", SIZES)
def test_every_family_has_the_weights_of_the_disc(size: int, kernel: str) -> None:
    rotation = group.rotation_map(size, 8, kernel)
    assert rotation.shape == (8, size**2, int(group.disc(size).sum()))
    assert rotation.dtype == torch.float64


def test_unknown_families_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="kernel must be one of 'bilinear', 'gaussian', 'harmonic'; got 'cubic'"):
        group.rotation_map(5, 8, "cubic")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("orientations", [3, 8, 12, 16])
def test_harmonic_kernels_have_the_same_gain_at_every_angle(size: int, orientations: int) -> None:
    rotation = group.rotation_map(size, orientations, "harmonic")
    taps = rotation.shape[2]
    torch.testing.assert_close(rotation.square().sum(dim=(1, 2)), torch.full((orientations,), float(taps)).double())
    constant = rotation.sum(dim=1).square().sum(dim=1)
    torch.testing.assert_close(constant, constant[:1].expand(orientations))


def test_bilinear_kernels_do_not() -> None:
    gains = group.rotation_map(5, 8).square().sum(dim=(1, 2)) / 21
    assert gains[0] == 1
    assert gains[1] < 0.5


@pytest.mark.parametrize(("size", "most"), [(1, 1.0), (3, 4.0), (5, 3.2), (7, 3.6), (9, 7.5)])
def test_harmonic_kernels_are_well_conditioned(size: int, most: float) -> None:
    for orientations in (8, 16):
        assert condition(group.rotation_map(size, orientations, "harmonic")) <= most + 1e-9


def test_every_base_weight_counts_at_every_single_angle() -> None:
    for turned in group.rotation_map(5, 16, "harmonic"):
        assert condition(turned) < 11
    assert condition(group.rotation_map(5, 8, "bilinear")[1]) > 1e6, "at 45° neighbours are averaged, and lost"


@pytest.mark.parametrize("size", SIZES)
def test_turning_a_harmonic_kernel_is_an_orthogonal_map_of_its_weights(size: int) -> None:
    """M(θ) = M(0) ρ(θ), with ρ a representation: ρ(θ)ρ(θ) = ρ(2θ)."""
    rotation = group.rotation_map(size, 16, "harmonic")
    taps = rotation.shape[2]
    turns = torch.linalg.pinv(rotation[0]) @ rotation  # (16, P, P)
    torch.testing.assert_close(rotation[0] @ turns, rotation)
    torch.testing.assert_close(turns @ turns.mT, torch.eye(taps, dtype=torch.float64).expand(16, -1, -1))
    torch.testing.assert_close(turns[1] @ turns[1], turns[2])
    torch.testing.assert_close(torch.matrix_power(turns[1], 4), turns[4])  # which is a turn by 90°, of pixels


def test_the_harmonics_of_a_5x5_kernel() -> None:
    _, frequencies = harmonics(5)
    assert frequencies.tolist() == [0, 0, 0, 1, 1, 2, 2, 3, 3, 4, 5, 6]
    assert int((1 + (frequencies > 0)).sum()) == 21


def test_the_response_to_a_wave_turns_by_the_frequency_of_the_harmonic() -> None:
    """That to exp(iω·x), as the wave turns by α, is exp(-imα) times that to the upright wave."""
    kernels, frequencies = harmonics(5)
    x, y = torch.meshgrid(*[torch.arange(-2.0, 3.0, dtype=torch.float64)] * 2, indexing="xy")
    turns = torch.arange(32, dtype=torch.float64) * math.tau / 32
    along = turns.cos()[:, None] * x.flatten() - turns.sin()[:, None] * y.flatten()  # (32, 25)
    responses = torch.exp(0.7j * along) @ kernels.conj()  # (32, K), at a ninth of the sampling frequency
    power = torch.fft.fft(responses, dim=0).abs().square()
    shares = power / power.sum(dim=0)
    for k, m in enumerate(frequencies.int()):
        if m < 4:  # above it pixels begin to matter
            assert shares[-m, k] > 0.999, f"m = {m}"


def test_harmonics_mean_the_same_on_every_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding of another kind must not turn a sign, a phase or an order."""
    expected = {size: group.rotation_map(size, 8, "harmonic") for size in SIZES}
    covariance = module._covariance

    def rounded(size: int) -> Tensor:
        exact = covariance(size)
        noise = torch.randn(exact.shape, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
        return exact * (1 + 1e-15 * (noise + noise.mT))

    monkeypatch.setattr(module, "_covariance", rounded)
    harmonics.cache_clear()
    try:
        for size in SIZES:
            torch.testing.assert_close(group.rotation_map(size, 8, "harmonic"), expected[size], atol=1e-7, rtol=0)
    finally:
        harmonics.cache_clear()


def test_the_first_harmonic_is_a_round_spot() -> None:
    """Nothing tells it to leave out the corners of the square, but that they do not turn."""
    kernels, _ = harmonics(5)
    spot = kernels[:, 0].real.view(5, 5)
    assert not kernels[:, 0].imag.any()
    torch.testing.assert_close(spot, spot.T)
    assert spot[0, 0] < 0.05 * spot.max()
    assert spot[group.disc(5)].min() > 0.5 * spot.max()
