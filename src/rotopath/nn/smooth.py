"""Smoothing of images before they are lifted."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TIMES = 2  # the more, the finer the detail that is left; each adds a pixel to the reach


class Smooth2d(nn.Module):
    """Takes out the finest detail of images, which pixels hold in some directions only. (B, C, H, W) → (B, C, H, W).

    A wave of four pixels is left about three quarters of its height in any direction, one of two pixels along an axis
    nothing, which kernels could learn to amplify again. Where taps 1 2 1 along both axes would leave the share b of a
    wave, this leaves 1 - (1 - b)². Images go on beyond their edges as they end.

    >>> stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(1, 1, 8, 8)
    >>> rp.nn.Smooth2d()(stripes)[0, 0, 4]
    tensor([0.2500, 0.5625, 0.5000, 0.5000, 0.5000, 0.5000, 0.4375, 0.7500])
    """

    REACH = TIMES
    taps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("taps", _taps(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        around = F.pad(x, (self.REACH,) * 4, mode="replicate")
        return F.conv2d(around, self.taps.to(x).expand(channels, 1, -1, -1), groups=channels)


def _taps() -> Tensor:
    """(2·REACH + 1, 2·REACH + 1), exact in float32."""
    line = torch.tensor([1.0, 2.0, 1.0]) / 4
    taken = -line[:, None] * line
    taken[1, 1] += 1
    taps = taken[None, None]
    for _ in range(TIMES - 1):
        taps = F.conv2d(taps, taken[None, None], padding=2)
    taps = -taps[0, 0]
    taps[TIMES, TIMES] += 1
    return taps
