"""Spatial pooling of SE(2) features. Sizes that a window grid does not cover evenly are refused, never cropped."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn import expect


class _GroupPool2d(nn.Module):
    def __init__(self, size: int, stride: int | None = None, padding: int = 0) -> None:
        super().__init__()
        stride = size if stride is None else stride
        expect.whole(self, size=size, stride=stride)
        expect.whole(self, least=0, padding=padding)
        if padding > size // 2:
            raise ValueError(
                f"{type(self).__name__} pads by at most half its window; got {padding} for a window of {size}."
            )
        self.size = size
        self.stride = stride
        self.padding = padding

    def _fold(self, x: Tensor) -> Tensor:
        expect.features(x, self)
        expect.on_grid(x, self, self.size, self.stride, self.padding)
        return x.flatten(1, 2)  # (B, C·N, H, W)

    def extra_repr(self) -> str:
        return f"{self.size}, stride={self.stride}, padding={self.padding}"


class GroupMaxPool2d(_GroupPool2d):
    """Maximum over windows of each orientation's map. (B, C, N, H, W) → (B, C, N, H/s, W/s).

    >>> pool = rp.nn.GroupMaxPool2d(2)
    >>> pool(torch.zeros(1, 8, 4, 64, 64)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(self._fold(x), self.size, self.stride, self.padding)
        return torch.unflatten(pooled, 1, x.shape[1:3])


class GroupAvgPool2d(_GroupPool2d):
    """Mean over windows of each orientation's map. (B, C, N, H, W) → (B, C, N, H/s, W/s).

    >>> pool = rp.nn.GroupAvgPool2d(3, stride=2, padding=1)
    >>> pool(torch.zeros(1, 8, 4, 65, 65)).shape
    torch.Size([1, 8, 4, 33, 33])
    """

    def forward(self, x: Tensor) -> Tensor:
        pooled = F.avg_pool2d(self._fold(x), self.size, self.stride, self.padding)
        return torch.unflatten(pooled, 1, x.shape[1:3])
