"""Spatial up-sampling of SE(2) features by whole factors.

Joining features of two branches, as in a U-Net: crop to the centre, or pad, and concatenate channels.
"""

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


def center_crop(x: Tensor, height: int, width: int) -> Tensor:
    """The middle height × width pixels of maps (..., H, W); an odd surplus has no middle and is refused.

    >>> rp.nn.center_crop(torch.zeros(1, 8, 4, 24, 24), 16, 16).shape
    torch.Size([1, 8, 4, 16, 16])
    """
    if has_torch_function(
        (x,)
    ):  # as torch's own functions do: what follows a program, as torch.fx, meets this one whole
        cropped: Tensor = handle_torch_function(center_crop, (x,), x, height, width)
        return cropped
    margins = x.shape[-2] - height, x.shape[-1] - width
    if any(margin < 0 or margin % 2 for margin in margins) or min(height, width) < 1:
        raise ValueError(
            f"center_crop takes the same number of pixels off both ends, so it cannot cut "
            f"{x.shape[-2]} × {x.shape[-1]} px to {height} × {width} px; leave an even number over, and keep one."
        )
    top, left = margins[0] // 2, margins[1] // 2
    return x[..., top : top + height, left : left + width]


def pad_evenly(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Maps (..., H, W) with `pad` = (left, right, top, bottom) pixels around them, the same number at both ends.

    >>> rp.nn.join.pad_evenly(torch.zeros(1, 8, 4, 14, 14), (1, 1, 0, 0)).shape
    torch.Size([1, 8, 4, 14, 16])
    """
    if has_torch_function((x,)):
        padded: Tensor = handle_torch_function(pad_evenly, (x,), x, pad, mode, value)
        return padded
    left, right, top, bottom = pad
    if left != right or top != bottom:
        raise ValueError(
            f"pad_evenly puts as many pixels at both ends, but got {left} and {right} px to the left and right, {top} "
            f"and {bottom} px above and below; use sizes that leave an even number over."
        )
    return F.pad(x, (left, right, top, bottom), mode, value)


def concatenate(features: Sequence[Tensor]) -> Tensor:
    """SE(2) features (B, Cᵢ, N, H, W) of equal N, H and W to (B, ΣCᵢ, N, H, W), kept channels-last in memory.

    >>> rp.nn.concatenate([torch.zeros(1, 8, 4, 16, 16), torch.zeros(1, 2, 4, 16, 16)]).shape
    torch.Size([1, 10, 4, 16, 16])
    """
    if has_torch_function(features):
        whole: Tensor = handle_torch_function(concatenate, features, features)
        return whole
    first = features[0]
    if any(x.ndim != 5 or x.shape[2:] != first.shape[2:] for x in features):
        shapes = ", ".join([str(tuple(x.shape)) for x in features])
        raise ValueError(f"concatenate takes SE(2) features (B, C, N, H, W) of equal N, H and W; got shapes {shapes}.")
    joined = torch.cat([x.flatten(1, 2) for x in features], dim=1)
    return torch.unflatten(joined, 1, (-1, first.shape[2]))
