"""Replace each layer of `rp.nn` by a plain layer that computes the same in evaluation mode.

`replace_image_layer` is for layers applied to images or to projected maps (B, C, H, W). `replace_group_layer` is for
layers applied to SE(2) features (B, C, N, H, W). The plain layer is a layer of torch or, if torch has no layer that
computes the same, one of the classes of this module.

Plain layers store features (B, C, N, H, W) as (B, C·N, H, W): the N orientations of a channel are adjacent. In this
package, N is the length of the orientation axis, including the reflected entries of layers with reflections. All plain
layers can be scripted, traced and exported for any batch size, height and width.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # type: ignore[attr-defined]

from rotopath.models.trace import DROPOUTS, POINTWISE_LAYERS
from rotopath.nn import (
    ChannelNorm2d,
    ChannelScale,
    GroupAdaptiveAvgPool2d,
    GroupAdaptiveMaxPool2d,
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupConvTranspose2d,
    GroupDropout2d,
    GroupFilter2d,
    GroupLayerNorm2d,
    GroupMaxPool2d,
    GroupNorm2d,
    GroupUpsample2d,
    LiftConv2d,
    Project,
    StochasticDepth,
    center_crop,
)
from rotopath.nn.pool import blur_and_subsample, smooth_sqrt
from rotopath.nn.project import project_attention, project_fourier, project_max

# Layers that accept SE(2) features only.
GROUP_LAYERS = (
    GroupAdaptiveAvgPool2d,
    GroupAdaptiveMaxPool2d,
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupConvTranspose2d,
    GroupDropout2d,
    GroupLayerNorm2d,
    GroupMaxPool2d,
    GroupNorm2d,
    GroupUpsample2d,
    Project,
)


def replace_image_layer(layer: nn.Module) -> tuple[nn.Module, int | None]:
    """Return the plain counterpart of a layer applied to images or projected maps, and N of the layer's output.

    For a lifting convolution, N is the length of the output's orientation axis. For other layers, it is None, because
    their output has no orientation axis. Raises ValueError if the layer accepts SE(2) features only.
    """
    match layer:
        case LiftConv2d():
            return _plain_conv(layer, layer.in_channels), layer.order
        case nn.BatchNorm2d():
            return Scale2d(*_batch_norm_affine(layer)), None
        case ChannelScale():
            return _plain_scale(layer, 1), None
        case GroupFilter2d():
            return _plain_filter(layer), None
        case StochasticDepth():
            return nn.Identity(), None
        case nn.Conv2d():
            plain = copy.deepcopy(layer)
            return plain.to(memory_format=torch.channels_last), None  # type: ignore[call-overload]
        case _ if isinstance(layer, DROPOUTS):
            return nn.Identity(), None
        case _ if isinstance(layer, GROUP_LAYERS):
            raise ValueError(
                f"{_class_name(layer)} expects SE(2) features, but got an image or projected maps; put LiftConv2d "
                f"before it"
            )
    return copy.deepcopy(layer), None


def replace_group_layer(layer: nn.Module, orientations: int) -> tuple[nn.Module, int | None]:
    """Return the plain counterpart of a layer applied to SE(2) features, and N of the layer's output.

    `orientations` is N of the features. N of the output is the same, or None for `Project`, which removes the
    orientation axis. Raises ValueError if the layer cannot be applied to these features.
    """
    n = orientations
    match layer:
        case GroupConv2d():
            if layer.order != n:
                raise ValueError(_describe_wrong_orientations(layer, layer.order, n))
            return _plain_conv(layer, layer.in_channels * n), n
        case GroupConvTranspose2d():
            if layer.order != n:
                raise ValueError(_describe_wrong_orientations(layer, layer.order, n))
            return _plain_transposed_conv(layer), n
        case GroupBatchNorm2d():
            factor, shift = _batch_norm_affine(layer)
            return Scale2d(factor.repeat_interleave(n), shift.repeat_interleave(n)), n
        case ChannelScale():
            return _plain_scale(layer, n), n
        case GroupFilter2d():
            return _plain_filter(layer), n
        case StochasticDepth():
            return nn.Identity(), n
        case GroupNorm2d() | GroupLayerNorm2d() if layer.per_orientation:
            return OrientationNorm2d(layer, n), n
        case GroupNorm2d():
            return _plain_group_norm(layer, n), n
        case GroupLayerNorm2d():
            weight, bias = (values.detach().repeat_interleave(n) for values in (layer.weight, layer.bias))
            norm = ChannelNorm2d(len(weight), layer.eps)
            norm.weight, norm.bias = nn.Parameter(weight), nn.Parameter(bias)
            return norm, n
        case GroupMaxPool2d() | GroupAvgPool2d():
            return _plain_pool(layer), n
        case GroupUpsample2d():
            return nn.Upsample(scale_factor=float(layer.scale), mode=layer.mode), n
        case GroupAdaptiveAvgPool2d():
            return nn.AdaptiveAvgPool2d(layer.size), n
        case GroupAdaptiveMaxPool2d():
            return nn.AdaptiveMaxPool2d(layer.size), n
        case Project():
            return _plain_projection(layer, n), None
        case nn.PReLU():
            repeats = 1 if layer.num_parameters == 1 else n
            prelu = nn.PReLU(layer.num_parameters * repeats)
            prelu.weight = nn.Parameter(layer.weight.detach().repeat_interleave(repeats))
            return prelu, n
        case nn.Identity():
            return nn.Identity(), n
        case _ if isinstance(layer, DROPOUTS):
            return nn.Identity(), n
        case _ if isinstance(layer, POINTWISE_LAYERS):
            return copy.deepcopy(layer), n
    raise ValueError(
        f"{_class_name(layer)} cannot be applied to SE(2) features; use a layer of rp.nn or an elementwise layer such "
        f"as ReLU, or put the layer rp.nn.Project before it, which removes the orientation axis"
    )


def fold_scale(conv: nn.Conv2d, scale: "Scale2d") -> nn.Conv2d:
    """Return one convolution that computes `scale(conv(x))`."""
    factor, shift = (values.flatten().double().cpu() for values in (scale.factor, scale.shift))
    folded = copy.deepcopy(conv)
    weight = conv.weight.double().cpu() * factor[:, None, None, None]
    bias = shift if conv.bias is None else conv.bias.double().cpu() * factor + shift
    folded.weight = nn.Parameter(weight.to(conv.weight).contiguous(memory_format=torch.channels_last))
    folded.bias = nn.Parameter(bias.to(conv.weight))
    return folded


def is_traced_or_exported() -> bool:
    """Return whether torch.jit.trace or torch.export records the running code. Recorded code must not check sizes."""
    return bool(is_tracing()) or torch.compiler.is_exporting()  # type: ignore[no-untyped-call]


class OrientationPool2d(nn.Module):
    """Reduce the N orientations of each channel to one value, as `rp.nn.Project` does: (B, C·N, H, W) → (B, C, H, W).

    `orientations` is N. `mode` is "max", "mean", "attention" or "fourier". `learned` contains the learned weights of
    `Project`: (C,) for "attention", (C, K) for "fourier" with K frequencies, and None for the other modes. `waves` is
    the result of `group.fourier_map` for "fourier", and None for the other modes.
    """

    learned: Tensor
    waves: Tensor

    def __init__(
        self, orientations: int, mode: str, learned: Tensor | None = None, waves: Tensor | None = None
    ) -> None:
        super().__init__()
        self.orientations = orientations
        self.mode = mode
        self.register_buffer("learned", _clone_or_ones(learned), persistent=learned is not None)
        self.register_buffer("waves", _clone_or_ones(waves), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # The orientation axis is made the last axis in memory, because reducing over the last axis is fast. The result
        # is channels-last, like the input.
        rows = torch.unflatten(x.permute(0, 2, 3, 1), 3, [-1, self.orientations])  # (B, H, W, C, N), a view
        if self.mode == "max":
            pooled = project_max(rows)
        elif self.mode == "attention":
            pooled = project_attention(rows, self.learned)
        elif self.mode == "fourier":
            pooled = project_fourier(rows, self.waves, self.learned)
        else:
            pooled = rows.mean(dim=4)
        return pooled.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.orientations}, {self.mode!r}"


class BlurredPool2d(nn.Module):
    """Pool maps (B, C, H, W) over windows of `size` × `size` px, with or without a blur.

    `stride` and `padding` are in px. `mode` is "max", "mean" or "rms" (root mean square). `taps` (n,) are the weights
    of the blur filter along one axis; None means no blur. With a blur, there is a window at every pixel, and the
    results are blurred and then subsampled with the stride. For "rms", the square root is computed last, after the
    blur.
    """

    taps: Tensor

    def __init__(self, size: int, stride: int, padding: int, mode: str, taps: Tensor | None) -> None:
        super().__init__()
        self.size, self.stride, self.padding, self.mode = size, stride, padding, mode
        self.blurs = taps is not None
        self.window_stride = 1 if self.blurs else stride
        self.register_buffer("taps", _clone_or_ones(taps), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "max":
            pooled = F.max_pool2d(x, self.size, self.window_stride, self.padding)
        else:
            values = x.square() if self.mode == "rms" else x
            pooled = F.avg_pool2d(values, self.size, self.window_stride, self.padding)
        if self.blurs:
            pooled = blur_and_subsample(pooled, self.taps, self.stride)
        return smooth_sqrt(pooled) if self.mode == "rms" else pooled

    def extra_repr(self) -> str:
        return f"{self.size}, stride={self.stride}, padding={self.padding}, {self.mode!r}, taps={len(self.taps)}"


class FixedFilter2d(nn.Module):
    """Filter each map of (B, C, H, W) with the same fixed `taps` (k, k). `stride` and `padding` are in px."""

    taps: Tensor

    def __init__(self, taps: Tensor, stride: int, padding: int) -> None:
        super().__init__()
        self.stride, self.padding = stride, padding
        self.register_buffer("taps", taps.detach().clone()[None, None])

    def forward(self, x: Tensor) -> Tensor:
        channels = x.size(1)
        taps = self.taps.to(x).expand(channels, -1, -1, -1)
        return F.conv2d(x, taps, None, self.stride, self.padding, groups=channels)

    def extra_repr(self) -> str:
        return f"{self.taps.shape[-1]}, stride={self.stride}, padding={self.padding}"


class Scale2d(nn.Module):
    """Scale and shift each channel of maps (B, C, H, W), as a batch norm in evaluation mode does.

    `factor` and `shift` have one value per channel, (C,): y = factor · x + shift.
    """

    factor: Tensor
    shift: Tensor

    def __init__(self, factor: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.view(-1, 1, 1))
        self.register_buffer("shift", shift.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.factor)

    def extra_repr(self) -> str:
        return str(self.factor.shape[0])


class OrientationNorm2d(nn.Module):
    """Normalize each of the N orientations of maps (B, C·N, H, W) by itself, as norms with `per_orientation` do.

    `norm` is the norm of `rp.nn`: a `GroupLayerNorm2d`, which normalizes each pixel over the channels, or a
    `GroupNorm2d`, which normalizes groups of channels over all pixels (`groups`; 0 for a layer norm).
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, norm: GroupNorm2d | GroupLayerNorm2d, orientations: int) -> None:
        super().__init__()
        self.orientations, self.eps = orientations, norm.eps
        self.groups = norm.num_groups if isinstance(norm, GroupNorm2d) else 0
        channels = norm.num_channels if isinstance(norm, GroupNorm2d) else norm.channels
        ones = torch.ones(channels) if norm.weight is None else norm.weight.detach()
        self.register_buffer("weight", ones.clone())
        self.register_buffer("bias", torch.zeros_like(ones) if norm.bias is None else norm.bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        maps = torch.unflatten(x, 1, [-1, self.orientations])  # (B, C, N, H, W)
        if self.groups == 0:
            rows = maps.permute(0, 2, 3, 4, 1)  # (B, N, H, W, C)
            normalized = F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps)
            return normalized.permute(0, 4, 1, 2, 3).flatten(1, 2)
        samples = maps.transpose(1, 2)  # (B, N, C, H, W)
        normalized = F.group_norm(samples.flatten(0, 1), self.groups, self.weight, self.bias, self.eps)
        return torch.unflatten(normalized, 0, [-1, self.orientations]).transpose(1, 2).flatten(1, 2)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, orientations={self.orientations}, groups={self.groups}, eps={self.eps}"


class CenterCrop2d(nn.Module):
    """Crop maps (..., H, W) to the `height` × `width` px at their center.

    Raises ValueError for sizes that `rp.nn.center_crop` does not accept. If the layer was scripted, traced or exported,
    the sizes are not checked.
    """

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        if not is_scripting():  # noqa: SIM102  # TorchScript skips the block only if this `if` is separate
            if not is_traced_or_exported():
                return center_crop(x, height, width)
        top, left = (x.size(-2) - height) // 2, (x.size(-1) - width) // 2
        return x[..., top : top + height, left : left + width]


def _plain_conv(layer: LiftConv2d | GroupConv2d, in_channels: int) -> nn.Conv2d:
    """Return a plain convolution whose weights are the rotated kernels of `layer`.

    The plain convolution has `in_channels` input channels and C'·N output channels, where C' is the number of output
    channels of `layer`, and N the length of its orientation axis. If `layer` includes a mean pool (argument `pool`),
    the weights of the plain convolution are averaged kernels, which include this pool, and its stride is that of the
    pool.
    """
    kernels = layer.kernels().detach()
    conv = nn.Conv2d(
        in_channels,
        layer.out_channels * layer.order,
        layer.window_px,
        layer.stride * layer.pool,
        layer.padding,
        layer.dilation,
        layer.groups,
        bias=layer.bias is not None,
        padding_mode=layer.padding_mode,  # type: ignore[arg-type]
        device="meta",
    )
    conv.weight = nn.Parameter(kernels.contiguous(memory_format=torch.channels_last))
    if layer.bias is not None:
        conv.bias = nn.Parameter(layer.bias.detach().repeat_interleave(layer.order))
    return conv


def _plain_transposed_conv(layer: GroupConvTranspose2d) -> nn.ConvTranspose2d:
    n = layer.order
    conv = nn.ConvTranspose2d(
        layer.in_channels * n,
        layer.out_channels * n,
        layer.kernel_size,
        layer.stride,
        layer.padding,
        groups=layer.groups,
        bias=layer.bias is not None,
        dilation=layer.dilation,
        device="meta",
    )
    conv.weight = nn.Parameter(layer.transposed_kernels().detach().contiguous())
    if layer.bias is not None:
        conv.bias = nn.Parameter(layer.bias.detach().repeat_interleave(n))
    return conv


def _plain_scale(layer: ChannelScale, orientations: int) -> "Scale2d":
    factor = layer.weight.detach().repeat_interleave(orientations)
    shift = torch.zeros_like(factor) if layer.bias is None else layer.bias.detach().repeat_interleave(orientations)
    return Scale2d(factor, shift)


def _plain_filter(layer: GroupFilter2d) -> nn.Module:
    plain = FixedFilter2d(layer.taps, layer.stride, layer.padding)
    return plain if layer.pool == 1 else nn.Sequential(plain, nn.AvgPool2d(layer.pool))


def _plain_pool(layer: GroupMaxPool2d | GroupAvgPool2d) -> nn.Module:
    size, stride, padding = layer.size, layer.stride, layer.padding
    mode = "max" if isinstance(layer, GroupMaxPool2d) else "mean" if layer.power == 1 else "rms"
    if layer.blur == 1 and mode != "rms":
        return nn.MaxPool2d(size, stride, padding) if mode == "max" else nn.AvgPool2d(size, stride, padding)
    return BlurredPool2d(size, stride, padding, mode, layer.taps if layer.blur > 1 else None)


def _plain_projection(layer: Project, orientations: int) -> OrientationPool2d:
    if layer.order not in (None, orientations):
        raise ValueError(_describe_wrong_orientations(layer, layer.order, orientations))
    if layer.mode == "attention":
        return OrientationPool2d(orientations, layer.mode, layer.sharpness.detach())
    if layer.mode == "fourier" and layer.weight.numel():
        return OrientationPool2d(orientations, layer.mode, layer.weight.detach(), layer.waves)
    # With fewer than 4 rotations, "fourier" has no weights and computes the mean.
    return OrientationPool2d(orientations, "max" if layer.mode == "max" else "mean")


def _plain_group_norm(layer: GroupNorm2d, orientations: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(layer.num_groups, layer.num_channels * orientations, layer.eps, layer.affine, device="meta")
    if layer.affine:
        norm.weight = nn.Parameter(layer.weight.detach().repeat_interleave(orientations))
        norm.bias = nn.Parameter(layer.bias.detach().repeat_interleave(orientations))
    return norm


def _batch_norm_affine(norm: nn.BatchNorm2d | nn.BatchNorm3d) -> tuple[Tensor, Tensor]:
    """Return the factor (C,) and the shift (C,) of a batch norm in evaluation mode, computed in float64."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(
            f"{_class_name(norm)} has no running statistics, so its output depends on the whole batch; build it with "
            f"track_running_stats=True"
        )
    mean, variance = norm.running_mean.double().cpu(), norm.running_var.double().cpu()
    factor = (variance + norm.eps).rsqrt()
    shift = -mean * factor
    if norm.affine:
        weight, bias = (values.detach().double().cpu() for values in (norm.weight, norm.bias))
        factor, shift = factor * weight, shift * weight + bias
    return factor.to(norm.running_mean), shift.to(norm.running_mean)


def _clone_or_ones(values: Tensor | None) -> Tensor:
    return torch.ones(1) if values is None else values.clone()  # TorchScript needs a tensor even if it is not used


def _describe_wrong_orientations(layer: nn.Module, built_for: int | None, given: int) -> str:
    return (
        f"{_class_name(layer)} has {built_for} orientations, but its input has {given}; build all layers with the same "
        f"number of orientations"
    )


def _class_name(layer: nn.Module) -> str:
    return type(layer).__name__
