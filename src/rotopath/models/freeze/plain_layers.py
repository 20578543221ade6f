"""What a frozen network needs and torch has no module for: five layers on ordinary tensors (B, C, H, W).

Features of N orientations are (B, C·N, H, W) here, the orientations of a channel side by side. All of them can be
scripted, traced and exported with any batch, height and width.

For each layer the plain one that computes the same on (B, C·N, H, W), in evaluation.

In: a layer, and the number of orientations of what it reads (none for images). Out: torch's own layer, or one of
`plain`, and the number of orientations of what that gives.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # type: ignore[attr-defined]

from rotopath.nn import (
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupLayerNorm2d,
    GroupMaxPool2d,
    GroupNorm2d,
    GroupUpsample2d,
    LiftConv2d,
    Project,
    center_crop,
)
from rotopath.nn.pool import root, thin_out
from rotopath.nn.project import add_amplitudes, attend, highest


def is_recorded() -> bool:
    """Whether the call that runs is written down, for any size, rather than answered."""
    return bool(is_tracing()) or torch.compiler.is_exporting()  # type: ignore[no-untyped-call]


class OrientationPool2d(nn.Module):
    """Projects the N orientations of each channel, as `rp.nn.Project` does. (B, C·N, H, W) → (B, C, H, W)."""

    learned: Tensor
    waves: Tensor

    def __init__(
        self, orientations: int, mode: str, learned: Tensor | None = None, waves: Tensor | None = None
    ) -> None:
        super().__init__()
        self.orientations = orientations
        self.mode = mode
        self.register_buffer("learned", _copy(learned), persistent=learned is not None)
        self.register_buffer("waves", _copy(waves), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Over the last axis of memory, which is fast and leaves the answer channels-last; over dim 2 it would not be.
        rows = torch.unflatten(x.permute(0, 2, 3, 1), 3, [-1, self.orientations])  # (B, H, W, C, N), a view
        if self.mode == "max":
            pooled = highest(rows)
        elif self.mode == "attention":
            pooled = attend(rows, self.learned)
        elif self.mode == "fourier":
            pooled = add_amplitudes(rows, self.waves, self.learned)
        else:
            pooled = rows.mean(dim=4)
        return pooled.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.orientations}, {self.mode!r}"


def _copy(values: Tensor | None) -> Tensor:
    return torch.ones(1) if values is None else values.clone()  # scripts want a tensor in any case


class BlurredPool2d(nn.Module):
    """Maxima, means or root mean squares of windows at every pixel, blurred before one in `stride` is kept."""

    taps: Tensor

    def __init__(self, size: int, stride: int, padding: int, mode: str, taps: Tensor | None) -> None:
        super().__init__()
        self.size, self.stride, self.padding, self.mode = size, stride, padding, mode
        self.blurs = taps is not None
        self.window_stride = 1 if self.blurs else stride
        self.register_buffer("taps", _copy(taps), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "max":
            pooled = F.max_pool2d(x, self.size, self.window_stride, self.padding)
        else:
            values = x.square() if self.mode == "rms" else x
            pooled = F.avg_pool2d(values, self.size, self.window_stride, self.padding)
        if self.blurs:
            pooled = thin_out(pooled, self.taps, self.stride)
        return root(pooled) if self.mode == "rms" else pooled

    def extra_repr(self) -> str:
        return f"{self.size}, stride={self.stride}, padding={self.padding}, {self.mode!r}, taps={len(self.taps)}"


class Scale2d(nn.Module):
    """A line for each channel, y = factor · x + shift: a batch norm that no convolution could take in."""

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


class ChannelNorm2d(nn.Module):
    """A layer norm of the channels at each position, with a scale and a shift of each channel."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)  # (B, H, W, C), as it lies in memory
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class CenterCrop2d(nn.Module):
    """The middle height × width pixels of maps (..., H, W); what has no middle is refused, unless a graph is made."""

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        if not is_scripting():  # noqa: SIM102  # alone: only then a script leaves out what is below
            if not is_recorded():
                return center_crop(x, height, width)
        top, left = (x.size(-2) - height) // 2, (x.size(-1) - width) // 2
        return x[..., top : top + height, left : left + width]


GROUP_LAYERS = (
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupLayerNorm2d,
    GroupMaxPool2d,
    GroupNorm2d,
    GroupUpsample2d,
    Project,
)
POINTWISE = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
Line = tuple[Tensor, Tensor]  # factor and shift of each channel


def replace_image_layer(layer: nn.Module) -> tuple[nn.Module, int | None]:
    """What stands for a layer that reads images."""
    match layer:
        case LiftConv2d():
            return _plain_conv(layer, layer.in_channels), layer.order
        case nn.BatchNorm2d():
            return Scale2d(*_line(layer)), None
        case nn.Conv2d():
            return _keep(layer).to(memory_format=torch.channels_last), None  # type: ignore[call-overload]
        case _ if isinstance(layer, DROPOUTS):
            return nn.Identity(), None
        case _ if isinstance(layer, GROUP_LAYERS):
            raise ValueError(f"{_name(layer)} reads SE(2) features, but is given images")
    return _keep(layer), None


def replace_group_layer(layer: nn.Module, orientations: int) -> tuple[nn.Module, int | None]:
    """What stands for a layer that reads SE(2) features."""
    n = orientations
    match layer:
        case GroupConv2d():
            if layer.order != n:
                raise ValueError(f"{_name(layer)} has {layer.order} orientations, but is given {n}")
            return _plain_conv(layer, layer.in_channels * n), n
        case GroupBatchNorm2d():
            return Scale2d(*(each.repeat_interleave(n) for each in _line(layer))), n
        case GroupNorm2d():
            return _plain_group_norm(layer, n), n
        case GroupLayerNorm2d():
            weight, bias = (each.detach().repeat_interleave(n) for each in (layer.weight, layer.bias))
            return ChannelNorm2d(weight, bias, layer.eps), n
        case GroupMaxPool2d() | GroupAvgPool2d():
            return _plain_pool(layer), n
        case GroupUpsample2d():
            return nn.Upsample(scale_factor=float(layer.scale), mode=layer.mode), n
        case nn.AdaptiveAvgPool3d(output_size=(None, *size)):
            return nn.AdaptiveAvgPool2d(tuple(size)), n
        case nn.AdaptiveMaxPool3d(output_size=(None, *size)):
            return nn.AdaptiveMaxPool2d(tuple(size)), n
        case Project():
            return _plain_projection(layer, n), None
        case nn.PReLU():
            each = 1 if layer.num_parameters == 1 else n
            wide = nn.PReLU(layer.num_parameters * each)
            wide.weight = nn.Parameter(layer.weight.detach().repeat_interleave(each))
            return wide, n
        case nn.Identity():
            return nn.Identity(), n
        case _ if isinstance(layer, DROPOUTS):
            return nn.Identity(), n
        case _ if isinstance(layer, POINTWISE):
            return _keep(layer), n
    raise ValueError(f"{_name(layer)} is given SE(2) features, and is neither a layer of rp.nn nor point-wise")


def fold(conv: nn.Conv2d, scale: Scale2d) -> nn.Conv2d:
    """The convolution that computes both."""
    factor, shift = (each.flatten().double().cpu() for each in (scale.factor, scale.shift))
    folded = copy.deepcopy(conv)
    weight = conv.weight.double().cpu() * factor[:, None, None, None]
    bias = shift if conv.bias is None else conv.bias.double().cpu() * factor + shift
    folded.weight = nn.Parameter(weight.to(conv.weight).contiguous(memory_format=torch.channels_last))
    folded.bias = nn.Parameter(bias.to(conv.weight))
    return folded


def _plain_conv(layer: LiftConv2d | GroupConv2d, in_channels: int) -> nn.Conv2d:
    kernels = layer.kernels().detach()
    conv = nn.Conv2d(
        in_channels,
        layer.out_channels * layer.order,
        layer.kernel_size,
        layer.stride,
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


def _plain_pool(layer: GroupMaxPool2d | GroupAvgPool2d) -> nn.Module:
    where = (layer.size, layer.stride, layer.padding)
    mode = "max" if isinstance(layer, GroupMaxPool2d) else "mean" if layer.power == 1 else "rms"
    if layer.blur == 1 and mode != "rms":
        return nn.MaxPool2d(*where) if mode == "max" else nn.AvgPool2d(*where)
    return BlurredPool2d(*where, mode, layer.taps if layer.blur > 1 else None)


def _plain_projection(layer: Project, orientations: int) -> OrientationPool2d:
    if layer.order not in (None, orientations):
        raise ValueError(f"{_name(layer)} has {layer.order} orientations, but is given {orientations}")
    if layer.mode == "attention":
        return OrientationPool2d(orientations, layer.mode, layer.sharpness.detach())
    if layer.mode == "fourier" and layer.weight.numel():
        return OrientationPool2d(orientations, layer.mode, layer.weight.detach(), layer.waves)
    return OrientationPool2d(orientations, "max" if layer.mode == "max" else "mean")  # of one orientation all are alike


def _plain_group_norm(layer: GroupNorm2d, orientations: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(layer.num_groups, layer.num_channels * orientations, layer.eps, layer.affine, device="meta")
    if layer.affine:
        norm.weight = nn.Parameter(layer.weight.detach().repeat_interleave(orientations))
        norm.bias = nn.Parameter(layer.bias.detach().repeat_interleave(orientations))
    return norm


def _line(norm: nn.BatchNorm2d | nn.BatchNorm3d) -> Line:
    """What batch norm does in evaluation, computed in float64 and rounded once."""
    if norm.running_mean is None or norm.running_var is None:
        raise ValueError(f"{_name(norm)} keeps no running statistics, and normalises by what it sees")
    mean, variance = norm.running_mean.double().cpu(), norm.running_var.double().cpu()
    factor = (variance + norm.eps).rsqrt()
    shift = -mean * factor
    if norm.affine:
        weight, bias = (each.detach().double().cpu() for each in (norm.weight, norm.bias))
        factor, shift = factor * weight, shift * weight + bias
    return factor.to(norm.running_mean), shift.to(norm.running_mean)


def _keep(layer: nn.Module) -> nn.Module:
    return copy.deepcopy(layer)


def _name(layer: nn.Module) -> str:
    return type(layer).__name__
