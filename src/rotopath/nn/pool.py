"""Spatial pooling of SE(2) features. Sizes that a window grid does not cover evenly are refused, never cropped.

What one pixel in two keeps depends on where it lies, which turns with the image by multiples of 90° only. With `blur`,
windows lie at every pixel, and are smoothed by a binomial filter of that many taps before any are left out. At the rim
of a map some taps find nothing, and the others count for them.

Smoothing of images before they are lifted.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn import expect

FAINT = 1e-6  # a mean square below which its root is made a parabola, so that it has a slope at 0


def thin_out(pooled: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Blur what was pooled at every pixel of maps (B, C, H, W), and keep one in `stride`."""
    taps = taps.to(pooled)
    channels, reach = pooled.shape[1], taps.shape[0] // 2
    filters = (taps[:, None] * taps).expand(channels, 1, -1, -1)
    blurred = F.conv2d(pooled, filters, stride=stride, padding=reach, groups=channels)
    line = taps.view(1, 1, -1)
    rows = F.conv1d(torch.ones_like(pooled[:1, :1, :, 0]), line, stride=stride, padding=reach)
    columns = F.conv1d(torch.ones_like(pooled[:1, :1, 0]), line, stride=stride, padding=reach)
    return blurred / (rows[..., None] * columns[:, :, None]).to(blurred)


def root(mean_square: Tensor, faint: float = FAINT) -> Tensor:
    """The square root, with a slope at 0."""
    found: Tensor = torch.sqrt(mean_square + faint) - math.sqrt(faint)
    return found


class _GroupPool2d(nn.Module):
    taps: Tensor

    def __init__(self, size: int, stride: int | None = None, padding: int = 0, blur: int = 1) -> None:
        super().__init__()
        stride = size if stride is None else stride
        expect.whole(self, size=size, stride=stride, blur=blur)
        expect.whole(self, least=0, padding=padding)
        if padding > size // 2:
            raise ValueError(
                f"{type(self).__name__} pads by at most half its window; got {padding} for a window of {size}."
            )
        if blur % 2 == 0:
            raise ValueError(f"{type(self).__name__} needs an odd number of taps to blur about a pixel; got {blur}.")
        self.size = size
        self.stride = stride
        self.padding = padding
        self.blur = blur
        if blur > 1:
            binomial = torch.tensor([float(math.comb(blur - 1, i)) for i in range(blur)])
            self.register_buffer("taps", binomial / 2 ** (blur - 1), persistent=False)

    def _fold(self, x: Tensor) -> Tensor:
        expect.features(x, self)
        expect.on_grid(x, self, self.size, self.stride, self.padding)
        return x.flatten(1, 2)  # (B, C·N, H, W)

    @property
    def _window_stride(self) -> int:
        return self.stride if self.blur == 1 else 1

    def _thin_out(self, pooled: Tensor) -> Tensor:
        return pooled if self.blur == 1 else thin_out(pooled, self.taps, self.stride)

    def extra_repr(self) -> str:
        blur = "" if self.blur == 1 else f", blur={self.blur}"
        return f"{self.size}, stride={self.stride}, padding={self.padding}{blur}"


class GroupMaxPool2d(_GroupPool2d):
    """Maximum over windows of each orientation's map. (B, C, N, H, W) → (B, C, N, H/s, W/s).

    With `blur`, the maxima at every pixel are blurred by that many taps before one in s is kept.

    >>> pool = rp.nn.GroupMaxPool2d(2)
    >>> pool(torch.zeros(1, 8, 4, 64, 64)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(self._fold(x), self.size, self._window_stride, self.padding)
        return torch.unflatten(self._thin_out(pooled), 1, x.shape[1:3])


class GroupAvgPool2d(_GroupPool2d):
    """Mean over windows of each orientation's map. (B, C, N, H, W) → (B, C, N, H/s, W/s).

    With `power=2` it is the root of the mean square, which favours high values as a maximum does, but smoothly. With
    `blur`, the means at every pixel are blurred by that many taps before one in s is kept.

    >>> pool = rp.nn.GroupAvgPool2d(2, blur=3, power=2)
    >>> pool(torch.zeros(1, 8, 4, 64, 64)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def __init__(self, size: int, stride: int | None = None, padding: int = 0, blur: int = 1, power: int = 1) -> None:
        super().__init__(size, stride, padding, blur)
        expect.choice(self, (1, 2), power=power)
        self.power = power

    def forward(self, x: Tensor) -> Tensor:
        folded = self._fold(x)
        if self.power == 2:
            folded = folded.square()
        pooled = self._thin_out(F.avg_pool2d(folded, self.size, self._window_stride, self.padding))
        if self.power == 2:
            pooled = root(pooled)
        return torch.unflatten(pooled, 1, x.shape[1:3])

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.power == 1 else f", power={self.power}")


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
