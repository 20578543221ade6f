"""Waves along the orientation axis, their crests, and the lines of a kernel."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotopath import group


@settings(deadline=None)
@given(orientations=st.integers(1, 17), seed=st.integers(0, 100))
def test_amplitudes_are_those_of_the_fourier_transform(orientations: int, seed: int) -> None:
    values = torch.randn(orientations, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    amplitudes = torch.einsum("g,gpk->pk", values, group.amplitude_map(orientations)).square().sum(0).sqrt()
    expected = torch.fft.rfft(values).abs()[1 : group.frequencies(orientations) + 1] * 2 / orientations
    torch.testing.assert_close(amplitudes, expected)


def test_a_peak_between_two_equal_values_is_in_the_middle_of_them() -> None:
    values = torch.tensor([1.0, 3.0, 3.0, 1.0, 0.0, 0.0, 0.0, 0.0])
    assert group.find_peak(values)[1].item() == pytest.approx(1.5 * math.pi / 4, abs=1e-6)
    around = torch.tensor([3.0, 1.0, 0.0, 0.0, 0.0, 0.0, 1.0, 3.0])
    assert group.find_peak(around)[1].item() == pytest.approx(7.5 * math.pi / 4, abs=1e-6)


def test_of_two_halves_the_higher_peak_counts() -> None:
    low, high = torch.tensor([2.0, 1.0, 0.0, 1.0]), torch.tensor([0.0, 1.0, 3.0, 1.0])
    for values in (torch.cat([low, high]), torch.cat([high, low])):
        largest, angle = group.find_peak(values, reflections=True)
        assert (largest.item(), angle.item()) == pytest.approx((3.0, math.pi))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_angles_have_the_dtype_of_the_values(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 0.0, 0.0], dtype=dtype)
    assert [each.dtype for each in group.find_peak(values)] == [dtype, dtype]


def test_the_lines_of_a_kernel_turn_with_it() -> None:
    kernel = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    angle = group.line_angle(kernel)
    turned = group.line_angle(torch.rot90(kernel, 1, (-2, -1)))
    assert ((turned - angle) % math.pi - math.pi / 2).abs().max() < 1e-12
    mirrored = group.line_angle(kernel.flip(-1))
    torch.testing.assert_close(mirrored, -angle)


@pytest.mark.parametrize("degrees", [-60, -20, 0, 30, 75])
def test_the_lines_of_a_wave_lie_across_it(degrees: float) -> None:
    x, y = torch.meshgrid(torch.arange(-10.0, 11), torch.arange(10.0, -11, -1), indexing="xy")
    across = x * math.cos(math.radians(degrees)) + y * math.sin(math.radians(degrees))
    wave = torch.cos(0.4 * across) * torch.exp(-(x**2 + y**2) / 18)
    assert math.degrees(group.line_angle(wave[None])) == pytest.approx(degrees, abs=1.5)
