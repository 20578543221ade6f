"""Spatial up-sampling of SE(2) features by whole factors."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn import expect


class GroupUpsample2d(nn.Module):
    """Enlarges each orientation's map by a whole factor. (B, C, N, H, W) → (B, C, N, sH, sW).

    >>> up = rp.nn.GroupUpsample2d(2, mode="bilinear")
    >>> up(torch.zeros(1, 8, 4, 16, 16)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def __init__(self, scale: int, mode: str = "nearest") -> None:
        super().__init__()
        expect.whole(self, scale=scale)
        expect.choice(self, ("nearest", "bilinear"), mode=mode)
        self.scale = scale
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        expect.features(x, self)
        enlarged = F.interpolate(x.flatten(1, 2), scale_factor=float(self.scale), mode=self.mode)
        return torch.unflatten(enlarged, 1, x.shape[1:3])

    def extra_repr(self) -> str:
        return f"{self.scale}, mode={self.mode!r}"
