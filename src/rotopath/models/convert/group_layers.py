"""Choose the numbers of channels of a converted network, and build the SE(2,N) counterpart of each plain layer.

The plain network is the network to convert, and a plain layer is one of its layers. A `Width` is a number of channels
in the converted network that is not chosen yet. `tie` makes widths equal if a sum or skip connection requires equal
numbers of channels. `scale_widths` multiplies the plain network's numbers of channels by one common factor.
`fit_widths` searches for the factor for which the converted network has about the required number of weights.

`build_counterpart` takes a plain layer, the kinds of its input and output, and the new numbers of channels. It returns
a layer of `rp.nn` or of torch, or raises ValueError with the reason why the plain layer has no counterpart.
"""

import copy
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from math import prod
from typing import Any

from torch import nn

from rotopath import group
from rotopath.models.convert.nodes import ValueKind
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
)
from rotopath.nn.project import Projection

# Fraction of the target number of weights. If the number of weights differs from the target by more than this fraction,
# `fit_widths` adds channels to single layers.
WEIGHTS_TOLERANCE = 0.02
SCALE_FACTORS = 400  # number of steps between the smallest and the largest common factor that `fit_widths` tries


@dataclass(frozen=True)
class ConversionOptions:
    """Options of `equivariant`, without `keep`. The docstring of `equivariant` explains them."""

    orientations: int
    kernel: group.Kernel
    projection: Projection
    strides: str
    reflections: bool = False
    copies: bool = False  # whether the weights of the plain network are copied
    smooth: bool = False  # whether pools and strides smooth before they subsample

    def kernel_for(self, size: int) -> group.Kernel:
        """Return the kernel family of a convolution: "bilinear" in place of "harmonic" if the kernel size is even."""
        return "bilinear" if self.kernel == "harmonic" and size % 2 == 0 else self.kernel

    def blur_for(self, stride: int) -> int:
        """Return the number of taps of the blur of a pool: 1, no blur, without `smooth` or without a stride."""
        return 2 * stride + 1 if self.smooth and stride > 1 else 1

    @property
    def order(self) -> int:
        """Length of the orientation axis: N, or 2N with reflections."""
        return group.order(self.orientations, self.reflections)


# Channels


class Width:
    """Number of channels in the converted network that is not chosen yet.

    Layers that must have the same number of channels share one `Width`. The channels of a value are a tuple of widths
    (`Channels`): one width for the output of most layers, several widths for a concatenation.
    """

    def __init__(self, plain: int, scales: bool = False, fixed: bool = False) -> None:
        self.plain = plain  # number of channels in the plain network
        self.scales = scales  # whether the common factor scales this width; True for channels of features
        self.fixed = fixed  # whether the number stays `plain` even if `scales` is True, as for the network's outputs
        self.multiple = 1  # the new number must be a multiple of this number, for grouped convolutions
        self.parts: Channels = ()  # the widths that replace this width after `tie`; empty if it is not replaced

    def scaled(self, factor: float) -> int:
        """Return the number of channels in the converted network for the common factor `factor`.

        This number is `factor` times the number of channels in the plain network, rounded to a multiple of `multiple`.
        If the factor does not apply (`fixed` is True or `scales` is False), it is the number in the plain network.
        """
        if self.fixed or not self.scales:
            return self.plain
        return self.multiple * max(1, round(self.plain * factor / self.multiple))


Channels = tuple[Width, ...]


def resolve_parts(channels: Iterable[Width]) -> Channels:
    """Return `channels` with each width that has `parts` replaced by these parts.

    `tie` replaces a width by another width, or by several widths with the same sum, and stores them in `parts`.
    """
    return tuple(part for width in channels for part in (resolve_parts(width.parts) if width.parts else (width,)))


def plain_channels(channels: Channels) -> int:
    """Return the total number of channels of a tuple of widths in the plain network."""
    return sum(width.plain for width in channels)


def tie(first: Channels, second: Channels) -> None:
    """Require that two values, such as the terms of a sum, have equal numbers of channels in the converted network.

    `first` and `second` are the channels of the two values. Afterwards, `resolve_parts` returns the same `Width`
    objects for both. A width of one value that corresponds to several widths of the other value is split into parts
    (`Width.parts`). Raises ValueError if the values have different numbers of channels in the plain network.
    """
    if plain_channels(first) != plain_channels(second):
        raise ValueError(
            f"it combines {plain_channels(first)} channels with {plain_channels(second)}; use equal numbers of channels"
        )
    while first := resolve_parts(first):
        second = resolve_parts(second)
        smaller, larger = sorted((first[0], second[0]), key=lambda width: width.plain)
        if smaller is not larger:
            rest = larger.plain - smaller.plain
            smaller.scales, smaller.fixed = smaller.scales or larger.scales, smaller.fixed or larger.fixed
            smaller.multiple = math.lcm(smaller.multiple, larger.multiple)
            larger.parts = (smaller, _copy_width(larger, rest)) if rest else (smaller,)
        first, second = resolve_parts(first)[1:], resolve_parts(second)[1:]


def _copy_width(width: Width, plain: int) -> Width:
    part = Width(plain, width.scales, width.fixed)
    part.multiple = width.multiple
    return part


def layer_channels(
    layer: nn.Module, channels: Channels | None, reads: ValueKind, returns: ValueKind
) -> tuple[Channels, Channels]:
    """Return the input channels and the output channels of a plain layer.

    `channels` are the channels of the layer's input; None if they are not known. `reads` and `returns` are the kinds of
    the layer's input and output. The input channels are () if no weight of the layer belongs to a channel, as for a
    pool. The output channels are () if the output has the same channels as the input.
    """
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            inputs = _expect_channels(channels, layer.in_channels)
            if 1 < layer.groups == layer.in_channels and reads is returns:
                # Depthwise: each input channel has the same number of output channels. `*` repeats the tuple.
                return inputs, inputs * (layer.out_channels // layer.in_channels)
            outputs = (Width(layer.out_channels, scales=returns is ValueKind.FEATURES),)
            for width in (*resolve_parts(inputs), *outputs):
                width.multiple = math.lcm(width.multiple, layer.groups)
            return inputs, outputs
        case nn.Linear():
            return _expect_channels(channels, layer.in_features, "Linear"), (Width(layer.out_features),)
        case nn.BatchNorm2d() | nn.BatchNorm1d() | nn.InstanceNorm2d():
            return _expect_channels(channels, layer.num_features), ()
        case nn.GroupNorm():
            return _expect_channels(channels, layer.num_channels), ()
        case nn.LayerNorm():
            return _expect_channels(channels, math.prod(layer.normalized_shape), "LayerNorm"), ()
        case nn.PReLU() if layer.num_parameters > 1:
            return _expect_channels(channels, layer.num_parameters), ()
        case ChannelScale():
            return _expect_channels(channels, layer.channels), ()
        case ChannelNorm2d():
            return _expect_channels(channels, len(layer.weight)), ()
    return (), ()


def _expect_channels(channels: Channels | None, expected: int, layer_type: str = "") -> Channels:
    """Return the input channels of a plain layer: `channels`, or a fixed `Width` if `channels` is None (not known).

    `expected` is the number of input channels of the plain layer. Raises ValueError if `channels` do not have this
    number in the plain network. `layer_type` selects the message: "Linear", "LayerNorm" or "" for other layers.
    """
    if channels is None:
        return (Width(expected, fixed=True),)
    if (given := plain_channels(channels)) == expected:
        return channels
    if layer_type == "Linear" and expected % given == 0:
        raise ValueError(
            f"it reads {expected} values, which are {given} channels at {expected // given} positions, but positions "
            f"change if the image is rotated; put AdaptiveAvgPool2d(1) before it, and build it with {given} inputs"
        )
    if layer_type == "LayerNorm":
        raise ValueError(
            f"it normalizes {expected} values, but its input has {given} channels; for maps (B, C, H, W), use "
            f"GroupNorm(1, {given})"
        )
    raise ValueError(
        f"it expects {expected} input channels, but its input has {given} channels; build it for {given} input channels"
    )


def scale_widths(widths: Sequence[Width], factor: float) -> dict[Width, int]:
    """Return the number of channels of each width in the converted network, for the common factor `factor`."""
    return {width: width.scaled(factor) for width in widths}


def fit_widths(
    widths: Sequence[Width], count: Callable[[dict[Width, int]], int], target: int, least: float
) -> dict[Width, int]:
    """Return a number of channels for each width, so that the converted network has about `target` weights.

    `count` is a function that takes the numbers of channels and returns the number of weights of the network. The first
    choice is one common factor between `least` and 1 for all widths: the factor for which the number of weights is
    closest to `target`. If this number is within `WEIGHTS_TOLERANCE` of `target`, the first choice is returned.

    Otherwise, as in some small networks, a second choice is made. It starts with the largest factor for which the
    number of weights is at most `target`. Then each width that the factor scales is increased by `Width.multiple`,
    unless the number of weights would exceed `target`. The choice with the number of weights closer to `target` is
    returned.
    """

    def scaled(i: int) -> dict[Width, int]:
        return scale_widths(widths, least ** (i / SCALE_FACTORS))

    # Factors decrease with i, and so do the numbers of weights; so the closest number is one of two neighbors.
    first = bisect_left(range(SCALE_FACTORS + 1), -target, key=lambda i: -count(scaled(i)))
    nearest = [scaled(i) for i in (first - 1, first) if 0 <= i <= SCALE_FACTORS]
    best = min(nearest, key=lambda chosen: abs(count(chosen) - target))
    if abs(count(best) - target) <= WEIGHTS_TOLERANCE * target:
        return best
    below = nearest[-1] if first <= SCALE_FACTORS else best
    for width in sorted(widths, key=lambda width: -width.plain):
        if width.scales and not width.fixed:
            wider = below | {width: below[width] + width.multiple}
            if count(wider) <= target:
                below = wider
    return min(best, below, key=lambda chosen: abs(count(chosen) - target))


# Layers


def build_counterpart(
    layer: nn.Module, reads: ValueKind, returns: ValueKind, inputs: int, outputs: int, options: ConversionOptions
) -> nn.Module:
    """Build the layer of the converted network that corresponds to a plain layer.

    `reads` and `returns` are the kinds of the new layer's input and output. `inputs` and `outputs` are its numbers of
    input and output channels; layers without weights, such as pools, ignore them. Raises ValueError if the plain layer
    has no counterpart.
    """
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return _build_conv(layer, reads, returns, inputs, outputs, options)
    if returns is not ValueKind.FEATURES:
        return _build_plain(layer, inputs, outputs)
    match layer:
        case nn.BatchNorm2d():
            statistics = {"track_running_stats": layer.track_running_stats, **_device_and_dtype(layer)}
            return GroupBatchNorm2d(inputs, layer.eps, layer.momentum, layer.affine, **statistics)
        case nn.GroupNorm() | nn.InstanceNorm2d():
            return _build_group_norm(partial(GroupNorm2d, per_orientation=options.copies), layer, inputs)
        case nn.MaxPool2d() | nn.AvgPool2d():
            return _build_pool(layer, options)
        case ChannelNorm2d():
            return GroupLayerNorm2d(inputs, layer.eps, **_device_and_dtype(layer), per_orientation=options.copies)
        case GroupFilter2d():
            return _build_filter(layer, options.strides)
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            size = _square(layer.output_size, "output_size")
            return (
                GroupAdaptiveAvgPool2d(size)
                if isinstance(layer, nn.AdaptiveAvgPool2d)
                else GroupAdaptiveMaxPool2d(size)
            )
        case nn.Dropout2d():
            return GroupDropout2d(layer.p, layer.inplace)
    return _build_plain(layer, inputs, outputs)


def build_projection(channels: int, module: nn.Module, options: ConversionOptions) -> Project:
    """Build a `Project` layer for features with `channels` channels, on the device and with the dtype of `module`."""
    return Project(
        options.projection, channels or None, options.orientations, options.reflections, **_device_and_dtype(module)
    )


def count_weights(
    layer: nn.Module, reads: ValueKind, returns: ValueKind, inputs: int, outputs: int, options: ConversionOptions
) -> int:
    """Return the number of weights of the layer that `build_counterpart` returns for the same arguments.

    This function does not build the layer, and is therefore faster.
    """
    bias = getattr(layer, "bias", None) is not None
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            taps, axes = prod(layer.kernel_size), 1
            if returns is ValueKind.FEATURES:
                taps = _count_taps(
                    _new_kernel_size(layer, options), options.kernel_for(_new_kernel_size(layer, options))
                )
                axes = options.order if reads is ValueKind.FEATURES else 1
            return outputs * (inputs // _group_count(layer, inputs) * axes * taps + bias)
        case nn.Linear():
            return outputs * (inputs + bias)
        case nn.BatchNorm2d() | nn.BatchNorm1d() | nn.GroupNorm() | nn.InstanceNorm2d():
            return 2 * inputs if layer.affine else 0
        case nn.LayerNorm():
            return 2 * inputs if layer.elementwise_affine else 0
        case nn.PReLU():
            return inputs if layer.num_parameters > 1 else 1
        case ChannelNorm2d():
            return 2 * inputs
        case ChannelScale():
            return inputs * (1 + (layer.bias is not None))
    return sum(parameter.numel() for parameter in layer.parameters())


def _build_conv(
    layer: nn.Conv2d | nn.ConvTranspose2d,
    reads: ValueKind,
    returns: ValueKind,
    inputs: int,
    outputs: int,
    options: ConversionOptions,
) -> nn.Module:
    """Build the counterpart of a convolution or transposed convolution, with the arguments of `build_counterpart`.

    A transposed convolution becomes bilinear up-sampling followed by a convolution. With the option `strides="pool"`, a
    convolution that does not accept all multiples of its stride as height and width becomes a convolution with stride 1
    and a mean pool.
    """
    bias = layer.bias is not None
    if returns is not ValueKind.FEATURES:
        if isinstance(layer, nn.ConvTranspose2d) or max(layer.kernel_size) > 1 or max(layer.stride) > 1:
            raise ValueError(
                "it reads values that have no orientations, for which only 1 × 1 convolutions with stride 1 are "
                "equivariant; move it before operations that remove orientations (such as softmax, or a concatenation "
                "or sum of the image with features)"
            )
        groups = _group_count(layer, inputs)
        return nn.Conv2d(inputs, outputs, 1, groups=groups, bias=bias, **_device_and_dtype(layer))
    conv_type = GroupConv2d if reads is ValueKind.FEATURES else LiftConv2d
    size = _new_kernel_size(layer, options)
    settings: dict[str, Any] = {"orientations": options.orientations, "kernel": options.kernel_for(size), "bias": bias}
    settings |= {"groups": _group_count(layer, inputs), "reflections": options.reflections, **_device_and_dtype(layer)}
    if isinstance(layer, nn.ConvTranspose2d) and _stays_transposed(layer, options):
        if reads is not ValueKind.FEATURES:
            raise ValueError("it reads the image; put a convolution before it")
        settings |= {name: _square(getattr(layer, name), name) for name in ("stride", "padding", "dilation")}
        return GroupConvTranspose2d(inputs, outputs, size, **settings)
    settings["padding_mode"] = layer.padding_mode
    if isinstance(layer, nn.ConvTranspose2d):
        factor = _upsampling_factor(layer)
        conv: nn.Module = conv_type(inputs, outputs, size, padding="same", **settings)
        if factor == 1:
            return conv
        up = (
            GroupUpsample2d(factor, "bilinear")
            if reads is ValueKind.FEATURES
            else nn.Upsample(scale_factor=float(factor), mode="bilinear", align_corners=False)
        )
        return nn.Sequential(OrderedDict(up=up, conv=conv))
    stride, dilation = _square(layer.stride, "stride"), _square(layer.dilation, "dilation")
    padding = layer.padding if isinstance(layer.padding, str) else _square(layer.padding, "padding")
    settings |= {"padding": padding, "dilation": dilation}
    padding_px = padding if isinstance(padding, int) else 0
    if options.strides == "keep" or _fits_multiples_of_stride(size, stride, padding_px, dilation):
        return conv_type(inputs, outputs, size, stride=stride, **settings)
    if size == 1 and conv_type is GroupConv2d:  # faster: the pool makes the input smaller, and the result is the same
        conv = conv_type(inputs, outputs, size, **settings)
        return nn.Sequential(OrderedDict(pool=_build_mean_pool(stride, options), conv=conv))
    if dilation > 1 or options.smooth:
        conv = conv_type(inputs, outputs, size, **settings)
        return nn.Sequential(OrderedDict(conv=conv, pool=_build_mean_pool(stride, options)))
    return nn.Sequential(OrderedDict(conv=conv_type(inputs, outputs, size, pool=stride, **settings)))


def _build_pool(layer: nn.MaxPool2d | nn.AvgPool2d, options: ConversionOptions) -> nn.Module:
    # ceil_mode has no effect if the windows cover the input exactly. Otherwise, layers of rp.nn raise ValueError.
    pool_type = GroupMaxPool2d if isinstance(layer, nn.MaxPool2d) else GroupAvgPool2d
    size, stride, padding = (_square(getattr(layer, f), f) for f in ("kernel_size", "stride", "padding"))
    if isinstance(layer, nn.MaxPool2d) and _square(layer.dilation, "dilation") > 1:
        raise ValueError("dilated pools are not supported; use dilation=1")
    if isinstance(layer, nn.AvgPool2d) and (layer.divisor_override or (padding and not layer.count_include_pad)):
        raise ValueError(
            "its divisor is not the number of pixels in its window; use count_include_pad=True and no divisor_override"
        )
    if options.strides == "keep" or _fits_multiples_of_stride(size, stride, padding):
        return pool_type(size, stride, padding, blur=options.blur_for(stride))
    return nn.Sequential(OrderedDict(window=pool_type(size, 1, padding), pool=_build_mean_pool(stride, options)))


def _build_mean_pool(stride: int, options: ConversionOptions) -> GroupAvgPool2d:
    """Build the mean pool that reduces the size in place of a stride."""
    return GroupAvgPool2d(stride, blur=options.blur_for(stride))


def _build_filter(layer: GroupFilter2d, strides: str) -> GroupFilter2d:
    stride, size = layer.stride, layer.taps.shape[0]
    if strides == "keep" or _fits_multiples_of_stride(size, stride, layer.padding):
        return GroupFilter2d(layer.taps, stride, layer.padding)
    return GroupFilter2d(layer.taps, 1, layer.padding, pool=stride)


def _build_plain(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Build a layer of torch for values without orientations, with `inputs` input and `outputs` output channels."""
    match layer:
        case nn.MaxPool2d() | nn.AvgPool2d():
            raise ValueError(
                "it pools the image, or values whose orientations were removed; move it after the first convolution "
                "larger than 1×1, and before operations that remove orientations, such as softmax"
            )
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            _square(layer.output_size, "output_size")
        case nn.BatchNorm2d() | nn.BatchNorm1d():
            norm_type = nn.BatchNorm2d if isinstance(layer, nn.BatchNorm2d) else nn.BatchNorm1d
            statistics = {"track_running_stats": layer.track_running_stats, **_device_and_dtype(layer)}
            return norm_type(inputs, layer.eps, layer.momentum, layer.affine, **statistics)
        case nn.GroupNorm() | nn.InstanceNorm2d():
            return _build_group_norm(nn.GroupNorm, layer, inputs)
        case ChannelNorm2d():
            return ChannelNorm2d(inputs, layer.eps, **_device_and_dtype(layer))
        case nn.LayerNorm():
            return nn.LayerNorm(inputs, layer.eps, layer.elementwise_affine, **_device_and_dtype(layer))
        case nn.Linear():
            return nn.Linear(inputs, outputs, layer.bias is not None, **_device_and_dtype(layer))
        case nn.PReLU():
            return nn.PReLU(inputs if layer.num_parameters > 1 else 1, **_device_and_dtype(layer))
        case ChannelScale():
            init = float(layer.weight.detach().mean())
            return ChannelScale(inputs, layer.bias is not None, init, **_device_and_dtype(layer))
    return copy.deepcopy(layer)


def _build_group_norm(norm_type: Any, layer: nn.GroupNorm | nn.InstanceNorm2d, channels: int) -> nn.Module:
    """Build a group norm for `channels` channels. Its class is `norm_type`: `nn.GroupNorm` or `GroupNorm2d`.

    If `layer` is an instance norm, or a group norm with one channel per group, the new norm has one channel per group.
    Otherwise, the number of groups is the largest divisor of `channels` that does not exceed `layer.num_groups`.
    """
    if isinstance(layer, nn.InstanceNorm2d):
        if layer.track_running_stats:
            raise ValueError("it keeps running statistics; use a batch norm, or track_running_stats=False")
        groups = channels
    elif layer.num_groups == layer.num_channels:
        groups = channels
    else:
        groups = max(g for g in range(1, layer.num_groups + 1) if channels % g == 0)
    norm: nn.Module = norm_type(groups, channels, layer.eps, layer.affine, **_device_and_dtype(layer))
    return norm


def _new_kernel_size(layer: nn.Conv2d | nn.ConvTranspose2d, options: ConversionOptions) -> int:
    """Return the side, in px, of the new convolution's kernel.

    If a transposed convolution becomes an ordinary one, and its kernel size is even, it is increased by 1. Raises
    ValueError if the kernel is not square.
    """
    size = _square(layer.kernel_size, "kernel_size")
    if isinstance(layer, nn.ConvTranspose2d) and not _stays_transposed(layer, options):
        return size + 1 - size % 2
    return size


def _stays_transposed(layer: nn.ConvTranspose2d, options: ConversionOptions) -> bool:
    """Return whether a transposed convolution becomes a `GroupConvTranspose2d`, and not upsampling and a convolution.

    It does if its weights are copied, or if it does not enlarge every image by exactly its stride.
    """
    extra = _square(layer.output_padding, "output_padding")
    if options.copies and extra:
        raise ValueError(
            f"its output_padding of {extra} px is added at one end only, which is not symmetric under rotation; its "
            f"weights cannot be copied, so use weights='new'"
        )
    return options.copies or not (extra or _enlarges_by_stride(layer))


def _upsampling_factor(layer: nn.ConvTranspose2d) -> int:
    """Return the factor by which a transposed convolution enlarges height and width: its stride.

    Raises ValueError if the layer does not enlarge every input by exactly this factor.
    """
    stride = _square(layer.stride, "stride")
    if not _enlarges_by_stride(layer):
        raise ValueError(
            f"it does not enlarge every image by a factor of {stride}, its stride; use kernel_size={stride} without "
            f"padding or dilation, or replace it by Upsample and Conv2d"
        )
    return stride


def _enlarges_by_stride(layer: nn.ConvTranspose2d) -> bool:
    stride, padding, dilation = (_square(getattr(layer, f), f) for f in ("stride", "padding", "dilation"))
    size, extra = _square(layer.kernel_size, "kernel_size"), _square(layer.output_padding, "output_padding")
    return dilation * (size - 1) + 1 + extra - 2 * padding == stride


def _fits_multiples_of_stride(size: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Return whether the windows of a layer exactly cover its input if height and width are multiples of the stride.

    A window is the kernel of a convolution or the window of a pool. `size` is its side, without dilation. `padding` is
    the padding at each edge of the input. All lengths are in px.
    """
    return (2 * padding - dilation * (size - 1) - 1) % stride == 0


def _group_count(layer: nn.Conv2d | nn.ConvTranspose2d, inputs: int) -> int:
    """Return the number of groups of the new convolution with `inputs` input channels.

    If the plain convolution `layer` is depthwise, this number is `inputs`. Otherwise, it is the number of groups of
    `layer`.
    """
    return inputs if 1 < layer.groups == layer.in_channels else layer.groups


def _square(value: object, name: str) -> int:
    """Return the value of a layer's option as one number: 3 for a kernel size of 3 or (3, 3).

    `name` is the name of the option, for the message. Raises ValueError if the value differs between height and width.
    """
    numbers: set[Any] = set(value) if isinstance(value, tuple | list) else {value}
    if len(numbers) > 1:
        raise ValueError(
            f"its {name} is {value}, which is not symmetric under rotation; use the same value for height and width"
        )
    return int(numbers.pop())


@cache
def _count_taps(size: int, kernel: group.Kernel) -> int:
    """Return the number of learned weights of a kernel of size × size px. This function is called often."""
    return group.count_taps(size, kernel)


def _device_and_dtype(layer: nn.Module) -> Mapping[str, Any]:
    """Return device and dtype of a layer's weights as keyword arguments; {} if it has no floating-point tensors."""
    tensors = (*layer.parameters(), *layer.buffers())
    weight = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
