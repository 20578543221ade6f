"""Pooling, smoothing, upsampling, cropping and padding of images and features, and concatenation along channels.

All pools refuse sizes that their windows do not cover exactly. The pools of torch ignore the remaining pixels at one
end. That is not equivariant: after a rotation, they ignore other pixels.

Plain pooling with a stride is exact only for rotations by multiples of 90°, because its windows are tied to the pixel
grid. The argument `blur` of a pool reduces the error for other angles: it places a window at every pixel, smooths the
results with a binomial filter of `blur` taps along each axis, and then subsamples. At the borders of a map, the filter
uses only the taps inside the map, and their weights are rescaled to sum to 1.
"""

import math
from collections.abc import Sequence
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from rotopath import group
from rotopath.nn import fuse, triton
from rotopath.nn.features import (
    SizeError,
    check_choice,
    check_features,
    check_grid,
    check_whole_number,
    merge_orientations,
    split_orientations,
)

MAX_POOL_SIZE = 11  # px; the largest window whose argmax (0 … 120) fits in int8
SQRT_EPS = 1e-6  # added to a mean square before taking the square root, so that the gradient at 0 is finite


class _GroupPool2d(nn.Module):
    """Base class of the pools: checks the window, stride, padding and blur, and blurs results."""

    taps: Tensor

    def __init__(self, size: int, stride: int | None = None, padding: int = 0, blur: int = 1) -> None:
        super().__init__()
        stride = size if stride is None else stride
        check_whole_number(self, size=size, stride=stride, blur=blur)
        check_whole_number(self, minimum=0, padding=padding)
        if padding > size // 2:
            raise ValueError(
                f"The padding of {type(self).__name__} must be at most half its window; got a padding of {padding} px "
                f"for a window of {size} px."
            )
        if blur % 2 == 0:
            raise ValueError(f"The argument 'blur' of {type(self).__name__} must be an odd number; got {blur}.")
        self.size = size
        self.stride = stride
        self.padding = padding
        self.blur = blur
        if blur > 1:
            binomial = torch.tensor([float(math.comb(blur - 1, i)) for i in range(blur)])
            self.register_buffer("taps", binomial / 2 ** (blur - 1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self)
        check_grid(x, self, self.size, self.stride, self.padding)
        fused = fuse.pool_deferred(x, self)
        return self._pool(fuse.finish(x)) if fused is None else fused

    def _pool(self, x: Tensor) -> Tensor:
        """Pool features (B, C, N, H, W) that are not deferred."""
        raise NotImplementedError

    @property
    def _window_stride(self) -> int:
        return self.stride if self.blur == 1 else 1

    def _blur(self, pooled: Tensor) -> Tensor:
        return pooled if self.blur == 1 else blur_and_subsample(pooled, self.taps, self.stride)

    def extra_repr(self) -> str:
        blur = "" if self.blur == 1 else f", blur={self.blur}"
        return f"{self.size}, stride={self.stride}, padding={self.padding}{blur}"


class GroupMaxPool2d(_GroupPool2d):
    """Max pooling over windows of size × size pixels. (B, C, N, H, W) → (B, C, N, H', W').

    H' = (H + 2 · padding - size) / stride + 1. The default stride is `size`, for which H' = H / size without padding.
    With `blur`, the maxima are computed at every pixel, smoothed with a binomial filter of `blur` × `blur` taps, and
    then subsampled.

    >>> pool = rp.nn.GroupMaxPool2d(2)
    >>> pool(torch.zeros(1, 8, 4, 64, 64)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def _pool(self, x: Tensor) -> Tensor:
        pooled = F.max_pool2d(merge_orientations(x), self.size, self._window_stride, self.padding)
        return split_orientations(self._blur(pooled), x.shape[2])


class GroupAvgPool2d(_GroupPool2d):
    """Average pooling over windows of size × size pixels. (B, C, N, H, W) → (B, C, N, H', W').

    H' = (H + 2 · padding - size) / stride + 1. The default stride is `size`, for which H' = H / size without padding.
    Padding adds zeros, which count in the mean. With `power=2`, the result is the root mean square instead of the mean:
    a smooth function in which high values weigh more. With `blur`, the means (or mean squares) are computed at every
    pixel, smoothed with a binomial filter of `blur` × `blur` taps, and then subsampled. The root is taken last.

    >>> pool = rp.nn.GroupAvgPool2d(2, blur=3, power=2)
    >>> pool(torch.zeros(1, 8, 4, 64, 64)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def __init__(self, size: int, stride: int | None = None, padding: int = 0, blur: int = 1, power: int = 1) -> None:
        super().__init__(size, stride, padding, blur)
        check_choice(self, (1, 2), power=power)
        self.power = power

    def _pool(self, x: Tensor) -> Tensor:
        if is_fusible_rms(self) and triton.can_run_on(x) and triton.has_supported_layout(x):
            from rotopath.nn.triton import blur_pool

            with triton.on_device_of(x):
                return blur_pool.blur(x, self)
        maps = merge_orientations(x)
        if self.power == 2:
            maps = maps.square()
        pooled = self._blur(F.avg_pool2d(maps, self.size, self._window_stride, self.padding))
        if self.power == 2:
            pooled = smooth_sqrt(pooled)
        return split_orientations(pooled, x.shape[2])

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.power == 1 else f", power={self.power}")


class _GroupAdaptivePool2d(nn.Module):
    """Base class of the adaptive pools: `size` is the height and width of the output, in pixels."""

    def __init__(self, size: int) -> None:
        super().__init__()
        check_whole_number(self, size=size)
        self.size = size

    def extra_repr(self) -> str:
        return str(self.size)


class GroupAdaptiveAvgPool2d(_GroupAdaptivePool2d):
    """Average features over size × size windows that cover any height and width. (B, C, N, H, W) → (B, C, N, s, s).

    s is `size`. Windows may overlap, and lie symmetrically in the map, so that every height and width is exact. With
    `size=1`, each map is reduced to its mean.

    >>> rp.nn.GroupAdaptiveAvgPool2d(1)(torch.zeros(2, 8, 4, 17, 23)).shape
    torch.Size([2, 8, 4, 1, 1])
    """

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self)
        return split_orientations(F.adaptive_avg_pool2d(merge_orientations(x), self.size), x.shape[2])


class GroupAdaptiveMaxPool2d(_GroupAdaptivePool2d):
    """Maximum over size × size windows that cover any height and width. (B, C, N, H, W) → (B, C, N, s, s).

    s is `size`. The windows are those of `GroupAdaptiveAvgPool2d`.

    >>> rp.nn.GroupAdaptiveMaxPool2d(7)(torch.zeros(2, 8, 4, 17, 23)).shape
    torch.Size([2, 8, 4, 7, 7])
    """

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self)
        return split_orientations(F.adaptive_max_pool2d(merge_orientations(x), self.size), x.shape[2])


class GroupFilter2d(nn.Module):
    """Filter each map of images or features with fixed taps, as anti-aliased networks do before they subsample.

    (B, C, H, W) → (B, C, H', W'), or (B, C, N, H, W) → (B, C, N, H', W'). `taps` (k, k) is the filter. It must equal
    its rotation by 90°, as binomial filters do. With `pool` = s, the output is averaged over windows of s × s pixels.

    >>> binomial = torch.outer(torch.tensor([1.0, 2.0, 1.0]), torch.tensor([1.0, 2.0, 1.0])) / 16
    >>> rp.nn.GroupFilter2d(binomial, stride=2, padding=1)(torch.zeros(1, 8, 4, 17, 17)).shape
    torch.Size([1, 8, 4, 9, 9])
    """

    taps: Tensor

    def __init__(self, taps: Tensor, stride: int = 1, padding: int = 0, pool: int = 1) -> None:
        super().__init__()
        check_whole_number(self, stride=stride, pool=pool)
        check_whole_number(self, minimum=0, padding=padding)
        if taps.ndim != 2 or taps.shape[0] != taps.shape[1] or not group.equals_its_rotation(taps):
            raise ValueError(
                f"The taps of GroupFilter2d must be a square matrix that equals its rotation by 90°; got a tensor of "
                f"shape {tuple(taps.shape)}. Use a filter that is the same along rows and columns."
            )
        self.register_buffer("taps", taps.detach().clone())
        self.stride, self.padding, self.pool = stride, padding, pool

    def forward(self, x: Tensor) -> Tensor:
        check_grid(x, self, self.taps.shape[0], self.stride, self.padding)
        maps = merge_orientations(x) if x.ndim == 5 else x
        weight = self.taps.to(maps).expand(maps.shape[1], 1, -1, -1)
        y = F.conv2d(maps, weight, None, self.stride, self.padding, groups=maps.shape[1])
        if self.pool > 1:
            check_grid(y, self, self.pool, self.pool, 0)
            y = F.avg_pool2d(y, self.pool)
        return split_orientations(y, x.shape[2]) if x.ndim == 5 else y

    def extra_repr(self) -> str:
        return f"{self.taps.shape[0]}, stride={self.stride}, padding={self.padding}, pool={self.pool}"


def is_fusible_max(pool: nn.Module) -> TypeGuard[GroupMaxPool2d]:
    """Return whether a pool is a max pool that can be fused with batch norm and ReLU."""
    return (
        type(pool) is GroupMaxPool2d
        and (pool.stride, pool.padding, pool.blur) == (pool.size, 0, 1)
        and pool.size <= MAX_POOL_SIZE
    )


def is_fusible_rms(pool: nn.Module) -> TypeGuard[GroupAvgPool2d]:
    """Return whether a pool is a root-mean-square pool that a Triton kernel can compute, alone or fused."""
    return (
        type(pool) is GroupAvgPool2d
        and (pool.stride, pool.padding, pool.power) == (pool.size, 0, 2)
        and pool.blur <= 2 * pool.size + 1
    )


class Smooth2d(nn.Module):
    """Smooth images to remove the finest detail, which a pixel grid can represent in some directions only.

    (B, C, H, W) → (B, C, H, W). The image is padded with copies of its border pixels. Waves with a period of four
    pixels keep about three quarters of their amplitude in every direction. Waves with a period of two pixels along an
    axis are removed completely, so that later kernels cannot amplify them. The frequency response is 1 - (1 - b)²,
    where b is the response of the binomial filter with taps 1 2 1 along both axes.

    >>> stripes = torch.tensor([0.0, 1.0]).repeat(4).expand(1, 1, 8, 8)
    >>> rp.nn.Smooth2d()(stripes)[0, 0, 4]
    tensor([0.2500, 0.5625, 0.5000, 0.5000, 0.5000, 0.5000, 0.4375, 0.7500])
    """

    REACH = 2
    TAPS = (  # in 1/256
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
        padded = F.pad(x, (self.REACH,) * 4, mode="replicate")
        return F.conv2d(padded, self.taps.to(x).expand(channels, 1, -1, -1), groups=channels)


class GroupUpsample2d(nn.Module):
    """Upsample height and width by the whole number s = `scale`. (B, C, N, H, W) → (B, C, N, s·H, s·W).

    `mode` is the interpolation: "nearest" or "bilinear".

    >>> up = rp.nn.GroupUpsample2d(2, mode="bilinear")
    >>> up(torch.zeros(1, 8, 4, 16, 16)).shape
    torch.Size([1, 8, 4, 32, 32])
    """

    def __init__(self, scale: int, mode: str = "nearest") -> None:
        super().__init__()
        check_whole_number(self, scale=scale)
        check_choice(self, ("nearest", "bilinear"), mode=mode)
        self.scale = scale
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self)
        enlarged = F.interpolate(merge_orientations(x), scale_factor=float(self.scale), mode=self.mode)
        return split_orientations(enlarged, x.shape[2])

    def extra_repr(self) -> str:
        return f"{self.scale}, mode={self.mode!r}"


# `resize` and the functions below call handle_torch_function, as torch's own functions do. So
# torch.fx records each call of them as one operation.


def resize(
    x: Tensor,
    size: int | Sequence[int] | None = None,
    scale_factor: float | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
) -> Tensor:
    """Resize images (B, C, H, W) or features (B, C, N, H, W).

    The arguments are those of `torch.nn.functional.interpolate`. With nearest-neighbor interpolation, raises ValueError
    unless the new height and width are whole multiples of the old ones. For other sizes, the interpolation is not
    equivariant: in the mirror image of x, it selects other pixels than in x.

    >>> rp.nn.pool.resize(torch.zeros(1, 8, 4, 29, 29), size=(57, 57), mode="bilinear").shape
    torch.Size([1, 8, 4, 57, 57])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(resize, (x,), x, size, scale_factor, mode, align_corners)
        return result
    maps = merge_orientations(x) if x.ndim == 5 else x
    resized = F.interpolate(maps, size, scale_factor, mode, align_corners)
    for before, after in zip(x.shape[-2:], resized.shape[-2:], strict=True):
        if mode.startswith("nearest") and after % before:
            raise SizeError(
                f"resize in mode {mode!r} needs a new size that is a whole multiple of the old size; "
                f"got {before} px and a new size of {after} px. Use mode='bilinear'."
            )
    return split_orientations(resized, x.shape[2]) if x.ndim == 5 else resized


def center_crop(x: Tensor, height: int, width: int) -> Tensor:
    """Crop maps (..., H, W) to the height × width pixels at their center.

    Raises ValueError unless H - height and W - width are even and not negative, and height and width are at least 1.

    >>> rp.nn.center_crop(torch.zeros(1, 8, 4, 24, 24), 16, 16).shape
    torch.Size([1, 8, 4, 16, 16])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(center_crop, (x,), x, height, width)
        return result
    margins = x.shape[-2] - height, x.shape[-1] - width
    if any(margin < 0 or margin % 2 for margin in margins) or min(height, width) < 1:
        raise ValueError(
            f"center_crop removes the same number of pixels at both ends, so it cannot crop "
            f"{x.shape[-2]} × {x.shape[-1]} px to {height} × {width} px; choose a height and a width that are smaller "
            f"by even numbers of pixels."
        )
    top, left = margins[0] // 2, margins[1] // 2
    return x[..., top : top + height, left : left + width]


def pad_evenly(x: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """Pad maps (..., H, W) by `pad` = (left, right, top, bottom) pixels, with the arguments of `F.pad`.

    Raises ValueError unless left = right and top = bottom, because other padding is not equivariant.

    >>> rp.nn.pool.pad_evenly(torch.zeros(1, 8, 4, 14, 14), (1, 1, 0, 0)).shape
    torch.Size([1, 8, 4, 14, 16])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(pad_evenly, (x,), x, pad, mode, value)
        return result
    left, right, top, bottom = pad
    if left != right or top != bottom:
        raise SizeError(
            f"pad_evenly needs the same padding at both ends, but got {left} px left and {right} px right, {top} px at "
            f"the top and {bottom} px at the bottom; change the padding, or the size of the "
            f"input if the padding depends on it."
        )
    if x.ndim == 5 and mode != "constant":
        maps = F.pad(merge_orientations(x), (left, right, top, bottom), mode, value)
        return split_orientations(maps, x.shape[2])
    return F.pad(x, (left, right, top, bottom), mode, value)


def take_channels(x: Tensor, first: int, count: int) -> Tensor:
    """Return `count` channels of images (B, C, H, W) or features (B, C, N, H, W), from the channel `first` on.

    >>> rp.nn.pool.take_channels(torch.zeros(1, 8, 4, 14, 14), 2, 3).shape
    torch.Size([1, 3, 4, 14, 14])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(take_channels, (x,), x, first, count)
        return result
    return x[:, first : first + count]


def shuffle_channels(x: Tensor, groups: int) -> Tensor:
    """Interleave the channels of `groups` equal parts: the first channel of each part, then the second, and so on.

    x are images (B, C, H, W) or features (B, C, N, H, W), where C is a multiple of `groups`.

    >>> rp.nn.pool.shuffle_channels(torch.arange(6.0).view(1, 6, 1, 1), 2).flatten()
    tensor([0., 3., 1., 4., 2., 5.])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(shuffle_channels, (x,), x, groups)
        return result
    return torch.unflatten(x, 1, (groups, -1)).transpose(1, 2).flatten(1, 2)


def reduce_channels(x: Tensor, mode: str) -> Tensor:
    """Return the mean or the maximum over channels, (B, 1, H, W) or (B, 1, N, H, W). `mode` is "mean" or "max".

    >>> rp.nn.pool.reduce_channels(torch.zeros(1, 8, 4, 14, 14), "max").shape
    torch.Size([1, 1, 4, 14, 14])
    """
    if has_torch_function((x,)):
        result: Tensor = handle_torch_function(reduce_channels, (x,), x, mode)
        return result
    return x.mean(dim=1, keepdim=True) if mode == "mean" else x.amax(dim=1, keepdim=True)


def concatenate(features: Sequence[Tensor]) -> Tensor:
    """Concatenate SE(2) features (B, Cᵢ, N, H, W) along channels to (B, ΣCᵢ, N, H, W).

    If all inputs are channels-last in memory, the result is too.

    >>> rp.nn.concatenate([torch.zeros(1, 8, 4, 16, 16), torch.zeros(1, 2, 4, 16, 16)]).shape
    torch.Size([1, 10, 4, 16, 16])
    """
    if has_torch_function(features):
        result: Tensor = handle_torch_function(concatenate, features, features)
        return result
    first = features[0]
    if any(x.ndim != 5 or x.shape[2:] != first.shape[2:] for x in features):
        shapes = ", ".join([str(tuple(x.shape)) for x in features])
        raise ValueError(
            f"concatenate takes SE(2) features (B, C, N, H, W) with equal N, H and W; got tensors of shapes {shapes}. "
            f"Use center_crop to make H and W equal."
        )
    return split_orientations(torch.cat([merge_orientations(x) for x in features], dim=1), first.shape[2])


def blur_and_subsample(pooled: Tensor, taps: Tensor, stride: int) -> Tensor:
    """Blur maps (B, C, H, W) along both axes with the filter `taps` (n,), and keep every `stride`-th row and column.

    At the borders, only the taps inside the map are used, and their weights are rescaled to sum to 1.
    """
    taps = taps.to(pooled)
    channels, reach = pooled.shape[1], taps.shape[0] // 2
    filters = (taps[:, None] * taps).expand(channels, 1, -1, -1)
    blurred = F.conv2d(pooled, filters, stride=stride, padding=reach, groups=channels)
    line = taps.view(1, 1, -1)
    rows = F.conv1d(torch.ones_like(pooled[:1, :1, :, 0]), line, stride=stride, padding=reach)
    columns = F.conv1d(torch.ones_like(pooled[:1, :1, 0]), line, stride=stride, padding=reach)
    return blurred / (rows[..., None] * columns[:, :, None]).to(blurred)


def smooth_sqrt(mean_square: Tensor, eps: float = SQRT_EPS) -> Tensor:
    """Return √(x + ε) - √ε for x = `mean_square` and ε = `eps`.

    The result is close to √x, is 0 at x = 0, and has a finite gradient there. `eps` is an argument, because
    torch.jit.script does not support global variables.
    """
    shifted: Tensor = torch.sqrt(mean_square + eps) - math.sqrt(eps)
    return shifted
