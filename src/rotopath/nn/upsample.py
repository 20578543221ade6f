"""Spatial up-sampling of SE(2) features by whole factors."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

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


def resize(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Images (B, C, H, W) or features (B, C, N, H, W) at another size, as by `torch.nn.functional.interpolate`.

    Nearest neighbours lie alike from both ends only where a size is a whole multiple of the other; others are refused.

    >>> rp.nn.upsample.resize(torch.zeros(1, 8, 4, 29, 29), size=(57, 57), mode="bilinear").shape
    torch.Size([1, 8, 4, 57, 57])
    """
    if has_torch_function((x,)):
        whole: Tensor = handle_torch_function(resize, (x,), x, size, scale_factor, mode, align_corners)
        return whole
    maps = x.flatten(1, 2) if x.ndim == 5 else x
    resized = F.interpolate(maps, size, scale_factor, mode, align_corners)
    for before, after in zip(x.shape[-2:], resized.shape[-2:], strict=True):
        if mode.startswith("nearest") and after % before:
            raise ValueError(
                f"resize in mode {mode!r} takes sizes to whole multiples of themselves, but got {before} px to become "
                f"{after} px; use mode='bilinear'."
            )
    return torch.unflatten(resized, 1, x.shape[1:3]) if x.ndim == 5 else resized
