"""Smoothing of images before they are lifted."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Smooth2d(nn.Module):
    """Takes out the finest detail of images, which pixels hold in some directions only. (B, C, H, W) → (B, C, H, W).

    A wave of four pixels is left about three quarters of its height in any direction, one of two pixels along an axis
    nothing, which kernels could learn to amplify again. Where taps 1 2 1 along both axes would leave the share b of a
    wave, this leaves 1 - (1 - b)². Images go on beyond their edges as they end.

    >>> stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(1, 1, 8, 8)
    >>> rp.nn.Smooth2d()(stripes)[0, 0, 4]
    tensor([0.2500, 0.5625, 0.5000, 0.5000, 0.5000, 0.5000, 0.4375, 0.7500])
    """

    REACH = 2
    TAPS = (  # of 256
        (-1, -4, -6, -4, -1),
        (-4, 16, 40, 16, -4),
        (-6, 40, 92, 40, -6),
        (-4, 16, 40, 16, -4),
        (-1, -4, -6, -4, -1),
    )
    taps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("taps", torch.tensor(self.TAPS) / 256, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        channels = x.shape[1]
        around = F.pad(x, (self.REACH,) * 4, mode="replicate")
        return F.conv2d(around, self.taps.to(x).expand(channels, 1, -1, -1), groups=channels)
