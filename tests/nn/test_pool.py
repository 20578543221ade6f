"""Pooling, smoothing, upsampling, cropping and joining against known answers."""

import math

import pytest
import torch
from torch import nn

import rotopath as rp


@pytest.mark.parametrize("arguments", [(2,), (3, 1), (4, 2, 1)], ids=str)
def test_pools_match_torch_on_every_map(arguments: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4, 12, 8)
    for pool, reference in (
        (rp.nn.GroupMaxPool2d(*arguments), nn.MaxPool2d(*arguments)),
        (rp.nn.GroupAvgPool2d(*arguments), nn.AvgPool2d(*arguments)),
    ):
        expected = torch.stack([reference(x[:, :, i]) for i in range(4)], dim=2)
        torch.testing.assert_close(pool(x), expected)


def test_padding_of_more_than_half_a_window_is_refused() -> None:
    with pytest.raises(ValueError, match="at most half its window; got a padding of 2 px for a window of 2 px"):
        rp.nn.GroupMaxPool2d(2, padding=2)


def test_blur_is_a_binomial_filter_between_window_and_stride() -> None:
    x = torch.randn(1, 2, 3, 8, 8, dtype=torch.float64)
    taps = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64) / 4
    for pool, windows in (
        (rp.nn.GroupMaxPool2d(2, blur=3), nn.functional.max_pool2d(x.flatten(0, 1), 2, 1)),
        (rp.nn.GroupAvgPool2d(2, blur=3), nn.functional.avg_pool2d(x.flatten(0, 1), 2, 1)),
    ):
        windows = windows.view(1, 2, 3, 7, 7)
        expected = torch.zeros(1, 2, 3, 4, 4, dtype=torch.float64)
        for row in range(4):
            for column in range(4):
                total = 0.0
                for i in range(3):
                    for j in range(3):
                        r, c = 2 * row + i - 1, 2 * column + j - 1
                        if 0 <= r < 7 and 0 <= c < 7:  # taps beyond the border have no weight
                            total += float(taps[i] * taps[j])
                            expected[..., row, column] += taps[i] * taps[j] * windows[..., r, c]
                expected[..., row, column] /= total
        torch.testing.assert_close(pool(x), expected)


def test_blurred_pools_preserve_constants_and_sizes() -> None:
    for size in (2, 3):
        for blur in (3, 5, 7):
            for pool in (rp.nn.GroupMaxPool2d(size, blur=blur), rp.nn.GroupAvgPool2d(size, blur=blur)):
                y = pool(torch.full((1, 1, 4, 6 * size, size), 3.0))
                torch.testing.assert_close(y, torch.full((1, 1, 4, 6, 1), 3.0))


def test_the_root_mean_square_has_finite_gradients_everywhere() -> None:
    pool = rp.nn.GroupAvgPool2d(2, power=2)
    x = torch.tensor([[0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 0.0, -5.0]]).view(1, 1, 1, 2, 4).requires_grad_()
    y = pool(x)
    torch.testing.assert_close(y.flatten(), torch.tensor([0.0, 12.5**0.5]), atol=2e-3, rtol=0)
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[..., :2].any()


def test_wrong_blurs_and_powers_are_refused() -> None:
    with pytest.raises(ValueError, match="'blur' of GroupMaxPool2d must be an odd number; got 4"):
        rp.nn.GroupMaxPool2d(2, blur=4)
    with pytest.raises(ValueError, match="'blur' of GroupAvgPool2d must be a whole number, 1 or more; got 0"):
        rp.nn.GroupAvgPool2d(2, blur=0)
    with pytest.raises(ValueError, match="'power' of GroupAvgPool2d must be 1 or 2; got 3"):
        rp.nn.GroupAvgPool2d(2, power=3)


def test_repr_lists_options_that_differ_from_the_default() -> None:
    assert repr(rp.nn.GroupMaxPool2d(2)) == "GroupMaxPool2d(2, stride=2, padding=0)"
    expected = "GroupAvgPool2d(2, stride=2, padding=0, blur=3, power=2)"
    assert repr(rp.nn.GroupAvgPool2d(2, blur=3, power=2)) == expected


def test_upsampling_matches_torch_on_every_map() -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    for mode in ("nearest", "bilinear"):
        expected = torch.stack([nn.Upsample(scale_factor=3, mode=mode)(x[:, :, i]) for i in range(4)], dim=2)
        torch.testing.assert_close(rp.nn.GroupUpsample2d(3, mode)(x), expected)
    with pytest.raises(ValueError, match="'scale' of GroupUpsample2d must be a whole number"):
        rp.nn.GroupUpsample2d(1.5)
    with pytest.raises(ValueError, match="'mode' of GroupUpsample2d must be 'nearest' or 'bilinear'; got 'cubic'"):
        rp.nn.GroupUpsample2d(2, "cubic")


def test_center_crop_returns_the_center_or_refuses() -> None:
    x = torch.arange(6.0).expand(1, 1, 1, 6, 6)
    assert rp.nn.center_crop(x, 2, 4)[0, 0, 0].tolist() == [[1, 2, 3, 4]] * 2
    for size in (3, 8):
        with pytest.raises(ValueError, match=f"cannot crop 6 × 6 px to {size} × 6 px"):
            rp.nn.center_crop(x, size, 6)


def test_concatenate_joins_channels_of_each_orientation() -> None:
    a, b = torch.randn(2, 3, 4, 5, 5), torch.randn(2, 1, 4, 5, 5)
    assert torch.equal(rp.nn.concatenate([a, b]), torch.cat([a, b], dim=1))
    for other in ((2, 1, 8, 5, 5), (2, 1, 4, 6, 5), (2, 1, 5, 5)):
        with pytest.raises(ValueError, match="equal N, H and W; got tensors of shapes"):
            rp.nn.concatenate([a, torch.randn(other)])


# Smooth2d.


@pytest.mark.parametrize(("across", "down"), [(0.5, 0), (0.5, 0.3), (0.5, 0.5), (0.25, 0), (0.2, 0.15), (0.4, 0.1)])
def test_smoothing_keeps_the_documented_fraction_of_waves(across: float, down: float) -> None:
    position = torch.arange(32, dtype=torch.float64)
    wave = torch.exp(2j * math.pi * (across * position + down * position[:, None])).real.view(1, 1, 32, 32)
    binomial = (math.cos(math.pi * across) * math.cos(math.pi * down)) ** 2
    kept = 1 - (1 - binomial) ** 2
    smoothed = rp.nn.Smooth2d()(wave)
    torch.testing.assert_close(smoothed[..., 2:-2, 2:-2], kept * wave[..., 2:-2, 2:-2], atol=1e-12, rtol=0)


def test_smoothing_keeps_waves_of_four_pixels_alike_in_all_directions() -> None:
    angles = torch.linspace(0, math.pi / 4, 9, dtype=torch.float64)
    position = torch.arange(64, dtype=torch.float64) - 32
    phase = angles.cos()[:, None, None] * position + angles.sin()[:, None, None] * position[:, None]
    amplitudes = rp.nn.Smooth2d()((0.5 * math.pi * phase).cos()[:, None])[:, 0, 32, 32]
    assert amplitudes[0] == pytest.approx(0.75)
    assert (amplitudes - 0.75).abs().max() < 0.025, "taps -1 4 10 4 -1 along each axis would keep 0.1 more at 45°"


def test_smoothing_preserves_constant_images_up_to_their_edges() -> None:
    image = torch.rand(2, 3, 1, 1).expand(-1, -1, 9, 12)
    torch.testing.assert_close(rp.nn.Smooth2d()(image), image)


def test_smoothing_is_equivariant() -> None:
    image = torch.rand(2, 3, 17, 24, dtype=torch.float64)
    assert rp.equivariance_error(rp.nn.Smooth2d(), image) < 1e-12


def test_smoothing_lowers_the_equivariance_error_on_fine_images() -> None:
    torch.manual_seed(0)
    lift = rp.nn.LiftConv2d(3, 8, 5, orientations=8, kernel="harmonic")
    fine = rp.metrics.smooth_images(4, 65, blur_px=0.4)
    plain, smoothed = (rp.equivariance_error(net, fine, 45) for net in (lift, nn.Sequential(rp.nn.Smooth2d(), lift)))
    assert smoothed < plain / 3
