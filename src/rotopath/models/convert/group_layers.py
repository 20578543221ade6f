"""Choose the channels of a converted network, and build the SE(2,N) counterpart of each plain layer.

The numbers of channels are unknown at first. A `Width` is one such unknown number. `tie` makes widths equal where sums
and skip connections require equal numbers. `fit_widths` then scales all widths by one common factor, so that the
network has about the required number of weights.

`build_counterpart` takes a layer of torch, the kinds of its input and output, and the new numbers of channels. It
returns a layer of `rp.nn` or of torch, or raises ValueError with the reason why the layer has no counterpart.
"""

import copy
import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

from torch import nn

from rotopath import group
from rotopath.models.convert.nodes import ValueKind
from rotopath.nn import (
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupDropout2d,
    GroupMaxPool2d,
    GroupNorm2d,
    GroupUpsample2d,
    LiftConv2d,
    Project,
)
from rotopath.nn.project import Projection

WEIGHTS_TOLERANCE = 0.02  # if the number of weights differs from the target by a larger fraction, widen single layers
SCALE_FACTORS = 400  # number of candidates for the common factor


@dataclass(frozen=True)
class ConversionOptions:
    """Options of `equivariant`, except `keep`. They are explained there."""

    orientations: int
    kernel: group.Kernel
    projection: Projection
    strides: str
    reflections: bool = False

    @property
    def order(self) -> int:
        """Length of the orientation axis: N, or 2N with reflections."""
        return group.order(self.orientations, self.reflections)


# Channels


class Width:
    """Unknown number of channels. Layers that must have the same number of channels share a `Width`.

    The channels of a value are a tuple of widths: one width for the output of most layers, several for a concatenation.
    """

    def __init__(self, plain: int, scales: bool = False, fixed: bool = False) -> None:
        self.plain = plain  # channels in the plain network
        self.scales = scales  # whether the common factor scales this width; True for channels of features
        self.fixed = fixed  # whether the number stays `plain` even if `scales` is True, as for the network's outputs
        self.multiple = 1  # the new number must be a multiple of this, for grouped convolutions
        self.parts: Channels = ()  # widths that replaced this one when it was tied to others

    def scaled(self, factor: float) -> int:
        """Return the number of channels in the new network: `plain` · `factor`, rounded to a multiple of `multiple`.

        If `fixed` is True or `scales` is False, the number is `plain`.
        """
        if self.fixed or not self.scales:
            return self.plain
        return self.multiple * max(1, round(self.plain * factor / self.multiple))


Channels = tuple[Width, ...]


def resolve_parts(channels: Iterable[Width]) -> Channels:
    """Return the channels with current widths only.

    `tie` splits a width into smaller ones, or merges it into another one, and stores the new widths in `parts`. Such a
    width is replaced by its parts; all others are kept.
    """
    return tuple(part for width in channels for part in (resolve_parts(width.parts) if width.parts else (width,)))


def plain_channels(channels: Channels) -> int:
    """Return the total number of channels that a tuple of widths has in the plain network."""
    return sum(width.plain for width in channels)


def tie(first: Channels, second: Channels) -> None:
    """Make two values, such as the terms of a sum, share the widths of their channels.

    `first` and `second` are the channels of the values. A width that corresponds to several widths of the other value
    is split into parts, until the widths correspond one to one. Raises ValueError if the two values have different
    numbers of channels in the plain network.
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
    """Return two values: the input channels and the output channels of a plain layer.

    `channels` are the channels of the value that the layer is applied to, or None if they are not known. `reads` and
    `returns` are the kinds of the layer's input and output. () as input channels means that no weight of the layer
    belongs to a channel, as for a pool. () as output channels means that the output has the channels of the input.
    """
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            inputs = _expect_channels(channels, layer.in_channels)
            if 1 < layer.groups == layer.in_channels and reads is returns:
                return inputs, inputs * (layer.out_channels // layer.in_channels)  # depthwise: repeats the tuple
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
    return (), ()


def _expect_channels(channels: Channels | None, expected: int, layer_type: str = "") -> Channels:
    """Return the input channels of a layer: `channels`, or a fixed `Width` if `channels` is None (not known).

    `expected` is the number of input channels for which the plain layer was built. Raises ValueError if `channels` have
    another number in the plain network. `layer_type` selects the message: "Linear", "LayerNorm" or "" for other layers.
    """
    if channels is None:
        return (Width(expected, fixed=True),)
    if (given := plain_channels(channels)) == expected:
        return channels
    if layer_type == "Linear" and expected % given == 0:
        raise ValueError(
            f"it reads {expected} values, which are {given} channels at {expected // given} positions, but positions "
            f"change when the image rotates; put AdaptiveAvgPool2d(1) before it, and build it with {given} inputs"
        )
    if layer_type == "LayerNorm":
        raise ValueError(f"it normalizes other axes than the {given} channels; use GroupNorm(1, {given}) for maps")
    raise ValueError(f"it expects {expected} input channels, but its input has {given}; build it for {given} channels")


def scale_widths(widths: Sequence[Width], factor: float) -> dict[Width, int]:
    """Return the new number of channels of each width (`Width.scaled`) for the common factor `factor`."""
    return {width: width.scaled(factor) for width in widths}


def fit_widths(
    widths: Sequence[Width], count: Callable[[dict[Width, int]], int], target: int, least: float
) -> dict[Width, int]:
    """Choose the number of channels of each width, so that the network has about `target` weights.

    `count` is a function that returns the number of weights of the network for a choice of channels. The first choice
    multiplies all widths by the same factor, between `least` and 1: the factor whose number of weights is closest to
    `target`. If this number differs from `target` by more than `WEIGHTS_TOLERANCE`, as in some small networks, there is
    a second choice. It starts from the largest factor whose number of weights does not exceed `target`. Then each width
    is increased by one step (`Width.multiple`), unless the number of weights would exceed `target`. Of the two choices,
    the one whose number of weights is closer to `target` is returned.
    """
    factors = [least ** (i / SCALE_FACTORS) for i in range(SCALE_FACTORS + 1)]  # decreasing
    counted = [(count(chosen), chosen) for chosen in (scale_widths(widths, factor) for factor in factors)]
    weights, best = min(counted, key=lambda candidate: abs(candidate[0] - target))
    if abs(weights - target) <= WEIGHTS_TOLERANCE * target:
        return best
    below = next((chosen for weights, chosen in counted if weights <= target), best)
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
    """Build the counterpart of a plain layer.

    `reads` and `returns` are the kinds of the layer's input and output. `inputs` and `outputs` are the numbers of input
    and output channels of the counterpart; they have no effect for layers without weights, such as pools. Raises
    ValueError if the layer has no counterpart.
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
            return _build_group_norm(GroupNorm2d, layer, inputs)
        case nn.MaxPool2d() | nn.AvgPool2d():
            return _build_pool(layer, options.strides)
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            size = _square(layer.output_size, "output_size")
            pool = nn.AdaptiveAvgPool3d if isinstance(layer, nn.AdaptiveAvgPool2d) else nn.AdaptiveMaxPool3d
            return pool((None, size, size))  # None: orientations are not pooled
        case nn.Dropout2d():
            return GroupDropout2d(layer.p, layer.inplace)
    return _build_plain(layer, inputs, outputs)


def build_projection(channels: int, module: nn.Module, options: ConversionOptions) -> Project:
    """Build a projection of features with `channels` channels, on the device and with the dtype of `module`."""
    return Project(
        options.projection, channels or None, options.orientations, options.reflections, **_device_and_dtype(module)
    )


def count_weights(
    layer: nn.Module, reads: ValueKind, returns: ValueKind, inputs: int, outputs: int, options: ConversionOptions
) -> int:
    """Return the number of weights of a layer's counterpart, without building it.

    The arguments are those of `build_counterpart`.
    """
    bias = getattr(layer, "bias", None) is not None
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            taps, axes = prod(layer.kernel_size), 1
            if returns is ValueKind.FEATURES:
                taps = _count_disc_taps(_kernel_size(layer))
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
    return sum(parameter.numel() for parameter in layer.parameters())


def _build_conv(
    layer: nn.Conv2d | nn.ConvTranspose2d,
    reads: ValueKind,
    returns: ValueKind,
    inputs: int,
    outputs: int,
    options: ConversionOptions,
) -> nn.Module:
    bias = layer.bias is not None
    if returns is not ValueKind.FEATURES:
        if isinstance(layer, nn.ConvTranspose2d) or max(layer.kernel_size) > 1 or max(layer.stride) > 1:
            raise ValueError(
                "it reads neighboring pixels of values that have no orientations; move it before operations that "
                "remove orientations (such as softmax, or a concatenation or sum of the image with features)"
            )
        groups = _group_count(layer, inputs)
        return nn.Conv2d(inputs, outputs, 1, groups=groups, bias=bias, **_device_and_dtype(layer))
    conv_type = GroupConv2d if reads is ValueKind.FEATURES else LiftConv2d
    settings: dict[str, Any] = {"orientations": options.orientations, "kernel": options.kernel, "bias": bias}
    settings |= {"groups": _group_count(layer, inputs), "padding_mode": layer.padding_mode}
    settings |= {"reflections": options.reflections, **_device_and_dtype(layer)}
    size = _kernel_size(layer)
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
    conv, pool = conv_type(inputs, outputs, size, **settings), GroupAvgPool2d(stride)
    if size == 1 and conv_type is GroupConv2d:  # the order does not change the result, and the pool first is faster
        return nn.Sequential(OrderedDict(pool=pool, conv=conv))
    return nn.Sequential(OrderedDict(conv=conv, pool=pool))


def _build_pool(layer: nn.MaxPool2d | nn.AvgPool2d, strides: str) -> nn.Module:
    # ceil_mode can be ignored: it matters only for sizes with a remainder, for which rp.nn raises ValueError.
    pool_type = GroupMaxPool2d if isinstance(layer, nn.MaxPool2d) else GroupAvgPool2d
    size, stride, padding = (_square(getattr(layer, f), f) for f in ("kernel_size", "stride", "padding"))
    if isinstance(layer, nn.MaxPool2d) and _square(layer.dilation, "dilation") > 1:
        raise ValueError("dilated pools are not supported; use dilation=1")
    if isinstance(layer, nn.AvgPool2d) and (layer.divisor_override or (padding and not layer.count_include_pad)):
        raise ValueError(
            "its divisor is not the number of pixels in its window; use count_include_pad=True and no divisor_override"
        )
    if strides == "keep" or _fits_multiples_of_stride(size, stride, padding):
        return pool_type(size, stride, padding)
    return nn.Sequential(OrderedDict(window=pool_type(size, 1, padding), pool=GroupAvgPool2d(stride)))


def _build_plain(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """Build a plain layer for values without orientations, with `inputs` input and `outputs` output channels."""
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
        case nn.LayerNorm():
            return nn.LayerNorm(inputs, layer.eps, layer.elementwise_affine, **_device_and_dtype(layer))
        case nn.Linear():
            return nn.Linear(inputs, outputs, layer.bias is not None, **_device_and_dtype(layer))
        case nn.PReLU():
            return nn.PReLU(inputs if layer.num_parameters > 1 else 1, **_device_and_dtype(layer))
    return copy.deepcopy(layer)


def _build_group_norm(norm_type: Any, layer: nn.GroupNorm | nn.InstanceNorm2d, channels: int) -> nn.Module:
    """Build a norm of class `norm_type`, `nn.GroupNorm` or `GroupNorm2d`, for `channels` channels.

    An instance norm, or a group norm with one channel per group, becomes a group norm with one channel per group.
    Otherwise, the number of groups is the largest divisor of `channels` that does not exceed the old number of groups.
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


def _kernel_size(layer: nn.Conv2d | nn.ConvTranspose2d) -> int:
    size = _square(layer.kernel_size, "kernel_size")
    if isinstance(layer, nn.ConvTranspose2d):
        return size + 1 - size % 2  # odd, for the convolution that follows the up-sampling
    if size % 2 == 0:
        raise ValueError(
            f"its kernel of {size} × {size} px has no center pixel to rotate about; use an odd size, followed by a "
            f"pool if the image should become smaller"
        )
    return size


def _upsampling_factor(layer: nn.ConvTranspose2d) -> int:
    """Return the stride of a transposed convolution.

    Raises ValueError if the layer does not multiply the height and the width of every input by the stride.
    """
    stride, padding, dilation = (_square(getattr(layer, f), f) for f in ("stride", "padding", "dilation"))
    size, extra = _square(layer.kernel_size, "kernel_size"), _square(layer.output_padding, "output_padding")
    if dilation * (size - 1) + 1 + extra - 2 * padding != stride:
        raise ValueError(
            f"it does not enlarge every image by a factor of {stride}, its stride; use kernel_size={stride} without "
            f"padding or dilation, or use Upsample and Conv2d"
        )
    return stride


def _fits_multiples_of_stride(size: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Return whether the windows of a layer leave no remainder on image sides that are multiples of its stride.

    `size` is the side of the window (of a kernel or a pool), and `padding` the padding on each side. All arguments
    except `dilation` are in px.
    """
    return (2 * padding - dilation * (size - 1) - 1) % stride == 0


def _group_count(layer: nn.Conv2d | nn.ConvTranspose2d, inputs: int) -> int:
    """Return the number of groups of the new convolution, which has `inputs` input channels.

    This number is `inputs` if the plain convolution is depthwise, otherwise the number of groups of the plain
    convolution.
    """
    return inputs if 1 < layer.groups == layer.in_channels else layer.groups


def _square(value: object, name: str) -> int:
    """Return the value of a layer's option as one number, such as 3 for a kernel size of 3 or (3, 3).

    Raises ValueError with the name of the option if the value differs between height and width.
    """
    numbers: set[Any] = set(value) if isinstance(value, tuple | list) else {value}
    if len(numbers) > 1:
        raise ValueError(
            f"its {name} is {value}, which is not symmetric under rotation; use the same value for height and width"
        )
    return int(numbers.pop())


@cache
def _count_disc_taps(size: int) -> int:
    """Return the number of learned weights of a kernel of `size` px per side, for one input and one output channel.

    These are the weights of the pixels inside a disc.
    """
    return int(group.disc_mask(size).sum())


def _device_and_dtype(layer: nn.Module) -> Mapping[str, Any]:
    """Return device and dtype of a layer as keyword arguments; none if the layer has neither weights nor statistics."""
    tensors = (*layer.parameters(), *layer.buffers())
    weight = next((tensor for tensor in tensors if tensor.is_floating_point()), None)
    return {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
