"""Smoothing of images: which waves it leaves, and that it turns with the image."""

import math

import pytest
import torch
from torch import nn

import rotopath as rp


@pytest.mark.parametrize(("across", "down"), [(0.5, 0), (0.5, 0.3), (0.5, 0.5), (0.25, 0), (0.2, 0.15), (0.4, 0.1)])
def test_waves_are_left_the_share_that_is_said(across: float, down: float) -> None:
    at = torch.arange(32, dtype=torch.float64)
    wave = torch.exp(2j * math.pi * (across * at + down * at[:, None])).real.view(1, 1, 32, 32)
    binomial = (math.cos(math.pi * across) * math.cos(math.pi * down)) ** 2
    left = 1 - (1 - binomial) ** 2
    smoothed = rp.nn.Smooth2d()(wave)
    torch.testing.assert_close(smoothed[..., 2:-2, 2:-2], left * wave[..., 2:-2, 2:-2], atol=1e-12, rtol=0)


def test_waves_of_four_pixels_are_left_about_as_much_in_any_direction() -> None:
    angles = torch.linspace(0, math.pi / 4, 9, dtype=torch.float64)
    at = torch.arange(64, dtype=torch.float64) - 32
    phase = 0.5 * math.pi * (angles.cos()[:, None, None] * at + angles.sin()[:, None, None] * at[:, None])
    heights = rp.nn.Smooth2d()(phase.cos()[:, None])[:, 0, 32, 32]
    assert heights[0] == pytest.approx(0.75)
    assert (heights - 0.75).abs().max() < 0.025, "-1 4 10 4 -1 along each axis would leave 0.1 more at 45° than at 0°"


def test_an_even_image_stays_as_it_is_up_to_its_edges() -> None:
    image = torch.rand(2, 3, 1, 1).expand(-1, -1, 9, 12)
    torch.testing.assert_close(rp.nn.Smooth2d()(image), image)


def test_smoothing_turns_with_the_image() -> None:
    image = torch.rand(2, 3, 17, 24, dtype=torch.float64)
    assert rp.equivariance_error(rp.nn.Smooth2d(), image) < 1e-12


def test_fine_images_turn_more_faithfully_behind_it() -> None:
    torch.manual_seed(0)
    lift = rp.nn.LiftConv2d(3, 8, 5, orientations=8, kernel="harmonic")
    fine = rp.metrics.smooth_images(4, 65, blur_px=0.4)
    plain, smoothed = (rp.equivariance_error(net, fine, 45) for net in (lift, nn.Sequential(rp.nn.Smooth2d(), lift)))
    assert smoothed < plain / 3
