"""Numbers of channels as unknowns, which sums and skips of a network tie together, and a common factor for them.

In: the widths of a plain network, and which of them must be the same. Out: new widths, with about a given number
of weights.

For each plain layer its counterpart on SE(2), as wide as it is told, and how many weights that has.

In: a layer of torch, whether it reads images or features, channels in and out. Out: a layer of `rp.nn` or torch; or one
sentence about why there is none.
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
from rotopath.models.convert.steps import ValueKind
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

TOLERANCE = 0.02  # of the number of weights; beyond it single widths may differ from what the common factor makes them
FACTORS = 400  # that are tried


class Width:
    """Channels that are made, and read, together. Behind a concatenation a value has several of these."""

    def __init__(self, plain: int, scales: bool = False, fixed: bool = False) -> None:
        self.plain = plain
        self.scales = scales  # with the factor of the network, as widths of features do
        self.fixed = fixed  # as those of images and answers are, whatever else is tied to them
        self.multiple = 1
        self.parts: Channels = ()  # what it turned out to be: another width, or several

    def scaled(self, factor: float) -> int:
        if self.fixed or not self.scales:
            return self.plain
        return self.multiple * max(1, round(self.plain * factor / self.multiple))


Channels = tuple[Width, ...]


def expand(channels: Iterable[Width]) -> Channels:
    """The unknowns that are left, each in all the places where it counts."""
    return tuple(each for width in channels for each in (expand(width.parts) if width.parts else (width,)))


def plain_size(channels: Channels) -> int:
    return sum(width.plain for width in channels)


def tie(first: Channels, second: Channels) -> None:
    """Make two values equally wide, part by part; one that was made in one piece is divided where it has to be."""
    if plain_size(first) != plain_size(second):
        raise ValueError(f"it puts {plain_size(first)} channels and {plain_size(second)} together")
    while first := expand(first):
        second = expand(second)
        one, other = sorted((first[0], second[0]), key=lambda width: width.plain)
        if one is not other:
            rest = other.plain - one.plain
            for left in (one, other):
                one.scales, one.fixed = one.scales or left.scales, one.fixed or left.fixed
                one.multiple = math.lcm(one.multiple, left.multiple)
            other.parts = (one, _like(other, rest)) if rest else (one,)
        first, second = expand(first), expand(second)
        first, second = first[1:], second[1:]


def _like(width: Width, plain: int) -> Width:
    part = Width(plain, width.scales, width.fixed)
    part.multiple = width.multiple
    return part


def scale(widths: Sequence[Width], factor: float) -> dict[Width, int]:
    return {width: width.scaled(factor) for width in widths}


def keep_weights(
    widths: Sequence[Width], count: Callable[[dict[Width, int]], int], target: int, least: float
) -> dict[Width, int]:
    """Widths with about as many weights as `target`: all by one factor, from `least` to 1, if that comes near enough.

    If it does not, as in small networks, where a channel more in every layer is many weights, the largest ones that
    stay below are widened here and there.
    """
    factors = [least ** (i / FACTORS) for i in range(FACTORS + 1)]  # falling
    counted = [(count(chosen), chosen) for chosen in (scale(widths, factor) for factor in factors)]
    weights, best = min(counted, key=lambda each: abs(each[0] - target))
    if abs(weights - target) <= TOLERANCE * target:
        return best
    below = next((chosen for weights, chosen in counted if weights <= target), best)
    for width in sorted(widths, key=lambda width: -width.plain):
        if width.scales and not width.fixed:
            wider = below | {width: below[width] + width.multiple}
            if count(wider) <= target:
                below = wider
    return min(best, below, key=lambda chosen: abs(count(chosen) - target))


@dataclass(frozen=True)
class ConversionOptions:
    orientations: int
    kernel: group.Kernel
    projection: Projection
    strides: str
    reflections: bool = False

    @property
    def order(self) -> int:
        """Entries of the orientation axis."""
        return group.order(self.orientations, self.reflections)


def build(
    layer: nn.Module, reads: ValueKind, gives: ValueKind, inputs: int, outputs: int, options: ConversionOptions
) -> nn.Module:
    """What stands for a layer; inputs and outputs are channels, and count only where the layer has weights."""
    if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
        return _build_conv(layer, reads, gives, inputs, outputs, options)
    if gives is not ValueKind.FEATURES:
        return _build_plain(layer, inputs, outputs)
    match layer:
        case nn.BatchNorm2d():
            statistics = {"track_running_stats": layer.track_running_stats, **_place(layer)}
            return GroupBatchNorm2d(inputs, layer.eps, layer.momentum, layer.affine, **statistics)
        case nn.GroupNorm() | nn.InstanceNorm2d():
            return _build_group_norm(GroupNorm2d, layer, inputs)
        case nn.MaxPool2d() | nn.AvgPool2d():
            return _build_pool(layer, options.strides)
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            size = _one(layer.output_size, "output_size")
            kind = nn.AdaptiveAvgPool3d if isinstance(layer, nn.AdaptiveAvgPool2d) else nn.AdaptiveMaxPool3d
            return kind((None, size, size))  # each orientation by itself
        case nn.Dropout2d():
            return GroupDropout2d(layer.p, layer.inplace)
    return _build_plain(layer, inputs, outputs)


def build_projection(channels: int, module: nn.Module, options: ConversionOptions) -> Project:
    """The way out, with weights where those of the module are."""
    return Project(options.projection, channels or None, options.orientations, options.reflections, **_place(module))


def count(
    layer: nn.Module, reads: ValueKind, gives: ValueKind, inputs: int, outputs: int, options: ConversionOptions
) -> int:
    """The weights of the counterpart, without building it."""
    bias = getattr(layer, "bias", None) is not None
    match layer:
        case nn.Conv2d() | nn.ConvTranspose2d():
            taps, axes = prod(layer.kernel_size), 1
            if gives is ValueKind.FEATURES:
                taps = _taps(_kernel_size(layer))
                axes = options.order if reads is ValueKind.FEATURES else 1
            return outputs * (inputs // _groups(layer, inputs) * axes * taps + bias)
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
    gives: ValueKind,
    inputs: int,
    outputs: int,
    options: ConversionOptions,
) -> nn.Module:
    bias = layer.bias is not None
    if gives is not ValueKind.FEATURES:
        if isinstance(layer, nn.ConvTranspose2d) or max(layer.kernel_size) > 1 or max(layer.stride) > 1:
            raise ValueError(
                "it looks at neighbours of what has no orientations any more; give it features only, and join images "
                "and answers of the whole image to them behind it"
            )
        return nn.Conv2d(inputs, outputs, 1, groups=_groups(layer, inputs), bias=bias, **_place(layer))
    kind = GroupConv2d if reads is ValueKind.FEATURES else LiftConv2d
    settings = {"orientations": options.orientations, "kernel": options.kernel, "bias": bias, **_place(layer)}
    settings |= {"groups": _groups(layer, inputs), "padding_mode": layer.padding_mode}
    settings["reflections"] = options.reflections
    size = _kernel_size(layer)
    if isinstance(layer, nn.ConvTranspose2d):
        up = _enlarges(layer)
        conv: nn.Module = kind(inputs, outputs, size, padding="same", **settings)
        if up == 1:
            return conv
        enlarge = GroupUpsample2d(up, "bilinear") if reads is ValueKind.FEATURES else _enlarge_image(up)
        return nn.Sequential(OrderedDict(up=enlarge, conv=conv))
    stride, dilation = _one(layer.stride, "stride"), _one(layer.dilation, "dilation")
    padding = layer.padding if isinstance(layer.padding, str) else _one(layer.padding, "padding")
    settings |= {"padding": padding, "dilation": dilation}
    padding_px = padding if isinstance(padding, int) else 0
    if options.strides == "keep" or _divides(size, stride, padding_px, dilation):
        return kind(inputs, outputs, size, stride=stride, **settings)
    conv, pool = kind(inputs, outputs, size, **settings), GroupAvgPool2d(stride)
    if size == 1 and kind is GroupConv2d:  # the two commute, and fewer positions are faster
        return nn.Sequential(OrderedDict(pool=pool, conv=conv))
    return nn.Sequential(OrderedDict(conv=conv, pool=pool))


def _build_pool(layer: nn.MaxPool2d | nn.AvgPool2d, strides: str) -> nn.Module:
    kind = GroupMaxPool2d if isinstance(layer, nn.MaxPool2d) else GroupAvgPool2d
    size, stride, padding = (_one(getattr(layer, f), f) for f in ("kernel_size", "stride", "padding"))
    if isinstance(layer, nn.MaxPool2d) and _one(layer.dilation, "dilation") > 1:
        raise ValueError("it is dilated; use one that is not")
    if isinstance(layer, nn.AvgPool2d) and (layer.divisor_override or (padding and not layer.count_include_pad)):
        raise ValueError("it divides by another number than that of its window; leave its divisor as it is")
    # With ceil_mode there would be more windows where pixels are left over, and such sizes are refused anyway.
    if strides == "keep" or _divides(size, stride, padding):
        return kind(size, stride, padding)
    return nn.Sequential(OrderedDict(window=kind(size, 1, padding), pool=GroupAvgPool2d(stride)))


def _build_plain(layer: nn.Module, inputs: int, outputs: int) -> nn.Module:
    """A layer of its own on what has no orientations, or one that does not mind them."""
    match layer:
        case nn.MaxPool2d() | nn.AvgPool2d():
            raise ValueError("it pools images, and not features; put a convolution before it")
        case nn.AdaptiveAvgPool2d() | nn.AdaptiveMaxPool2d():
            _one(layer.output_size, "output_size")
        case nn.BatchNorm2d() | nn.BatchNorm1d():
            kind = nn.BatchNorm2d if isinstance(layer, nn.BatchNorm2d) else nn.BatchNorm1d
            statistics = {"track_running_stats": layer.track_running_stats, **_place(layer)}
            return kind(inputs, layer.eps, layer.momentum, layer.affine, **statistics)
        case nn.GroupNorm() | nn.InstanceNorm2d():
            return _build_group_norm(nn.GroupNorm, layer, inputs)
        case nn.LayerNorm():
            return nn.LayerNorm(inputs, layer.eps, layer.elementwise_affine, **_place(layer))
        case nn.Linear():
            return nn.Linear(inputs, outputs, layer.bias is not None, **_place(layer))
        case nn.PReLU():
            return nn.PReLU(inputs if layer.num_parameters > 1 else 1, **_place(layer))
    return copy.deepcopy(layer)


def _build_group_norm(kind: Any, layer: nn.GroupNorm | nn.InstanceNorm2d, channels: int) -> nn.Module:
    """As many groups as divide the channels, up to those of the layer; an instance norm has one for each channel."""
    if isinstance(layer, nn.InstanceNorm2d):
        if layer.track_running_stats:
            raise ValueError("it keeps running statistics; use a batch norm, or one that does not")
        groups = channels
    elif layer.num_groups == layer.num_channels:
        groups = channels
    else:
        groups = max(g for g in range(1, layer.num_groups + 1) if channels % g == 0)
    norm: nn.Module = kind(groups, channels, layer.eps, layer.affine, **_place(layer))
    return norm


def _kernel_size(layer: nn.Conv2d | nn.ConvTranspose2d) -> int:
    size = _one(layer.kernel_size, "kernel_size")
    if isinstance(layer, nn.ConvTranspose2d):
        return size + 1 - size % 2  # what follows the up-sampling needs a centre
    if size % 2 == 0:
        raise ValueError(
            f"its kernel of {size} × {size} has no pixel at its centre to turn about; use an odd size, and to make "
            f"images smaller a pool behind it"
        )
    return size


def _enlarges(layer: nn.ConvTranspose2d) -> int:
    """By which factor, if it is the same for every size."""
    stride, padding, dilation = (_one(getattr(layer, f), f) for f in ("stride", "padding", "dilation"))
    size, more = _one(layer.kernel_size, "kernel_size"), _one(layer.output_padding, "output_padding")
    if dilation * (size - 1) + 1 + more - 2 * padding != stride:
        raise ValueError(
            f"it does not enlarge every image by its stride of {stride}; use padding with which it does, or Upsample "
            f"and Conv2d"
        )
    return stride


def _enlarge_image(up: int) -> nn.Module:
    return nn.Upsample(scale_factor=float(up), mode="bilinear", align_corners=False)


def _divides(size: int, stride: int, padding: int, dilation: int = 1) -> bool:
    """Whether windows lie evenly on the sizes that the stride divides."""
    return (2 * padding - dilation * (size - 1) - 1) % stride == 0


def _groups(layer: nn.Conv2d | nn.ConvTranspose2d, inputs: int) -> int:
    """Depthwise layers stay that; others keep their number of groups."""
    return inputs if 1 < layer.groups == layer.in_channels else layer.groups


def _one(value: object, name: str) -> int:
    """The number that a layer has for height and width alike."""
    numbers: set[Any] = set(value) if isinstance(value, tuple | list) else {value}
    if len(numbers) > 1:
        raise ValueError(f"its {name} is {value}, and would not survive a quarter turn; use the same for both axes")
    return int(numbers.pop())


@cache
def _taps(size: int) -> int:
    return int(group.disc(size).sum())


def _place(layer: nn.Module) -> Mapping[str, Any]:
    numbers = (*layer.parameters(), *layer.buffers())  # statistics, where a norm has nothing else
    weight = next((each for each in numbers if each.is_floating_point()), None)
    return {} if weight is None else {"device": weight.device, "dtype": weight.dtype}
