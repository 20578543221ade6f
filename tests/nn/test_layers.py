"""Norms, pools, up-sampling, dropout, projection and joins against known answers."""

import pytest
import torch
from torch import nn

import rotopath as rp


def test_batch_norm_shares_statistics_over_batch_space_and_orientation() -> None:
    norm = rp.nn.GroupBatchNorm2d(3, momentum=1.0)
    x = torch.randn(4, 3, 8, 5, 6) * torch.arange(1, 9).view(8, 1, 1) + 2
    y = norm(x)
    over = (0, 2, 3, 4)
    torch.testing.assert_close(y.mean(over), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var(over, correction=0), torch.ones(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(norm.running_mean, x.mean(over))
    torch.testing.assert_close(norm.running_var, x.var(over))
    reference = nn.BatchNorm3d(3)
    reference.load_state_dict(norm.state_dict())
    torch.testing.assert_close(norm.eval()(x), reference.eval()(x))


def test_batch_norm_can_be_synchronised_by_torch() -> None:
    converted = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(rp.nn.GroupBatchNorm2d(3)))
    assert isinstance(converted[0], nn.SyncBatchNorm)
    x = torch.randn(2, 3, 4, 5, 5)
    torch.testing.assert_close(converted.eval()(x), rp.nn.GroupBatchNorm2d(3).eval()(x))


def test_group_norm_normalises_groups_over_orientations_and_space() -> None:
    x = torch.randn(3, 6, 8, 5, 5) * torch.arange(1, 9).view(8, 1, 1) + 1
    y = rp.nn.GroupNorm2d(2, 6)(x).unflatten(1, (2, 3))
    torch.testing.assert_close(y.mean((2, 3, 4, 5)), torch.zeros(3, 2), atol=1e-5, rtol=0)
    torch.testing.assert_close(y.var((2, 3, 4, 5), correction=0), torch.ones(3, 2), atol=1e-4, rtol=0)


def test_layer_norm_normalises_each_position() -> None:
    norm = rp.nn.GroupLayerNorm2d(6, eps=0.1)
    x = torch.randn(3, 6, 8, 5, 4) * torch.arange(1, 9).view(8, 1, 1) + 1  # orientations of unequal scale
    together = x.permute(0, 3, 4, 1, 2)
    expected = nn.functional.layer_norm(together, (6, 8), eps=0.1).permute(0, 3, 4, 1, 2)
    torch.testing.assert_close(norm(x), expected)
    nn.init.constant_(norm.weight, 2.0)
    norm.bias.data[:] = torch.arange(6)
    assert norm(torch.zeros(1, 6, 8, 2, 2))[0, 5].unique().tolist() == [5.0]


@pytest.mark.parametrize("arguments", [(2,), (3, 1), (4, 2, 1)], ids=str)
def test_pools_are_torchs_on_every_map(arguments: tuple[int, ...]) -> None:
    x = torch.randn(2, 3, 4, 12, 8)
    for ours, theirs in (
        (rp.nn.GroupMaxPool2d(*arguments), nn.MaxPool2d(*arguments)),
        (rp.nn.GroupAvgPool2d(*arguments), nn.AvgPool2d(*arguments)),
    ):
        expected = torch.stack([theirs(x[:, :, i]) for i in range(4)], dim=2)
        torch.testing.assert_close(ours(x), expected)


def test_pools_refuse_more_padding_than_half_a_window() -> None:
    with pytest.raises(ValueError, match="at most half its window; got 2 for a window of 2"):
        rp.nn.GroupMaxPool2d(2, padding=2)


def test_a_blur_is_a_binomial_filter_between_windows_and_stride() -> None:
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
                        if 0 <= r < 7 and 0 <= c < 7:  # what is not there has no weight
                            total += float(taps[i] * taps[j])
                            expected[..., row, column] += taps[i] * taps[j] * windows[..., r, c]
                expected[..., row, column] /= total
        torch.testing.assert_close(pool(x), expected)


def test_blurred_pools_keep_constants_and_sizes() -> None:
    for size in (2, 3):
        for blur in (3, 5, 7):
            for pool in (rp.nn.GroupMaxPool2d(size, blur=blur), rp.nn.GroupAvgPool2d(size, blur=blur)):
                y = pool(torch.full((1, 1, 4, 6 * size, size), 3.0))
                torch.testing.assert_close(y, torch.full((1, 1, 4, 6, 1), 3.0))


def test_a_root_mean_square_has_a_slope_everywhere() -> None:
    pool = rp.nn.GroupAvgPool2d(2, power=2)
    x = torch.tensor([[0.0, 0.0, 3.0, 4.0], [0.0, 0.0, 0.0, -5.0]]).view(1, 1, 1, 2, 4).requires_grad_()
    y = pool(x)
    torch.testing.assert_close(y.flatten(), torch.tensor([0.0, 12.5**0.5]), atol=2e-3, rtol=0)
    y.sum().backward()
    assert x.grad.isfinite().all()
    assert not x.grad[..., :2].any()


def test_wrong_blurs_and_powers_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="GroupMaxPool2d needs an odd number of taps to blur about a pixel; got 4"):
        rp.nn.GroupMaxPool2d(2, blur=4)
    with pytest.raises(ValueError, match="blur as one whole number, 1 or more; got 0"):
        rp.nn.GroupAvgPool2d(2, blur=0)
    with pytest.raises(ValueError, match="knows power 1 or 2; got 3"):
        rp.nn.GroupAvgPool2d(2, power=3)


def test_pools_tell_what_is_unusual() -> None:
    assert repr(rp.nn.GroupMaxPool2d(2)) == "GroupMaxPool2d(2, stride=2, padding=0)"
    unusual = "GroupAvgPool2d(2, stride=2, padding=0, blur=3, power=2)"
    assert repr(rp.nn.GroupAvgPool2d(2, blur=3, power=2)) == unusual


def test_upsampling_is_torchs_on_every_map() -> None:
    x = torch.randn(2, 3, 4, 5, 6)
    for mode in ("nearest", "bilinear"):
        expected = torch.stack([nn.Upsample(scale_factor=3, mode=mode)(x[:, :, i]) for i in range(4)], dim=2)
        torch.testing.assert_close(rp.nn.GroupUpsample2d(3, mode)(x), expected)
    with pytest.raises(ValueError, match="scale as one whole number"):
        rp.nn.GroupUpsample2d(1.5)
    with pytest.raises(ValueError, match="knows mode 'nearest' or 'bilinear'; got 'cubic'"):
        rp.nn.GroupUpsample2d(2, "cubic")


def test_dropout_drops_whole_fields() -> None:
    y = rp.nn.GroupDropout2d(0.5)(torch.ones(8, 16, 4, 3, 3))
    fields = y.flatten(2)
    assert torch.equal(fields.amin(2), fields.amax(2))
    assert set(fields[:, :, 0].unique().tolist()) == {0.0, 2.0}


def test_projection_takes_the_maximum_or_the_mean_over_orientations() -> None:
    x = torch.randn(2, 3, 8, 4, 4)
    assert torch.equal(rp.nn.Project("max")(x), x.max(dim=2).values)
    torch.testing.assert_close(rp.nn.Project("mean")(x), x.mean(dim=2))
    with pytest.raises(ValueError, match="knows mode 'max' or 'mean' or 'attention' or 'fourier'; got 'median'"):
        rp.nn.Project("median")


def test_projection_shares_the_gradient_among_equal_maxima() -> None:
    x = torch.ones(1, 1, 4, 1, 1, requires_grad=True)
    rp.nn.Project("max")(x).sum().backward()
    assert x.grad.flatten().tolist() == [0.25] * 4


def test_center_crop_takes_the_middle_or_refuses() -> None:
    x = torch.arange(6.0).expand(1, 1, 1, 6, 6)
    assert rp.nn.center_crop(x, 2, 4)[0, 0, 0].tolist() == [[1, 2, 3, 4]] * 2
    for size in (3, 8):
        with pytest.raises(ValueError, match=f"cannot cut 6 × 6 px to {size} × 6 px"):
            rp.nn.center_crop(x, size, 6)


def test_concatenate_joins_channels_within_each_orientation() -> None:
    a, b = torch.randn(2, 3, 4, 5, 5), torch.randn(2, 1, 4, 5, 5)
    assert torch.equal(rp.nn.concatenate([a, b]), torch.cat([a, b], dim=1))
    for other in ((2, 1, 8, 5, 5), (2, 1, 4, 6, 5), (2, 1, 5, 5)):
        with pytest.raises(ValueError, match="equal N, H and W; got shapes"):
            rp.nn.concatenate([a, torch.randn(other)])
