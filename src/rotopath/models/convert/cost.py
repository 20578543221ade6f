"""Compare a converted network with the plain network: weights, multiplications, memory and equivariance error."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from rotopath.metrics import equivariance_error
from rotopath.nn import GroupConv2d, GroupConvTranspose2d, LiftConv2d


@dataclass(frozen=True)
class NetworkCost:
    """What a network costs, and how equivariant it is."""

    weights: int
    multiplications: int  # of all convolutions and linear layers, for one image
    map_bytes: int  # of the outputs of all layers, for one image, which training keeps in memory
    error_90: float  # equivariance error for rotations by 90°
    error_45: float  # and by 45°; 0 cannot be expected, because the rotation interpolates


@dataclass(frozen=True)
class ConversionReport:
    """Costs and equivariance errors of a plain network and of its counterpart, for images of one size."""

    plain: NetworkCost
    converted: NetworkCost
    image_px: tuple[int, int]  # height and width

    def __str__(self) -> str:
        a, b = self.plain, self.converted
        rows = [
            ("weights", _amount(a.weights), _amount(b.weights), _ratio(b.weights, a.weights)),
            ("multiplications an image", _amount(a.multiplications), _amount(b.multiplications),
             _ratio(b.multiplications, a.multiplications)),
            ("memory of maps an image", _amount(a.map_bytes, "B"), _amount(b.map_bytes, "B"),
             _ratio(b.map_bytes, a.map_bytes)),
            ("equivariance error at 90°", f"{a.error_90:.1e}", f"{b.error_90:.1e}", ""),
            ("equivariance error at 45°", f"{a.error_45:.1e}", f"{b.error_45:.1e}", ""),
        ]  # fmt: skip
        height, width = self.image_px
        rows.insert(0, (f"images of {height} × {width} px", "plain", "converted", ""))
        return "\n".join(f"{name:<26}  {x:>9}  {y:>9}  {z:>6}".rstrip() for name, x, y, z in rows)


def conversion_report(plain: nn.Module, converted: nn.Module, images: Tensor) -> ConversionReport:
    """Measure what a conversion cost and gained: weights, multiplications, memory and equivariance errors.

    `plain` is the network that `rp.equivariant` converted to `converted`. `images` (B, C, H, W) must have a size that
    the converted network accepts; the errors depend on their content. Both networks are measured as they are, without
    a change of their weights. Multiplications do not include the rotation of kernels, which `rp.freeze` does once.

    >>> plain = torch.nn.Sequential(torch.nn.Conv2d(3, 32, 3), torch.nn.ReLU(), torch.nn.Conv2d(32, 32, 3)).eval()
    >>> net = rp.equivariant(plain, orientations=4)
    >>> report = rp.conversion_report(plain, net, torch.rand(1, 3, 30, 30))
    >>> report.converted.multiplications > 2 * report.plain.multiplications
    True
    >>> report.converted.error_90 < 1e-5 < report.plain.error_90
    True
    """
    height, width = images.shape[-2:]
    return ConversionReport(_measure(plain, images), _measure(converted, images), (height, width))


def _measure(net: nn.Module, images: Tensor) -> NetworkCost:
    training = net.training
    net.eval()
    try:
        with torch.no_grad(), _count(net) as counts:
            net(images[:1])
        errors = [_error(net, images, angle) for angle in (90.0, 45.0)]
    finally:
        net.train(training)
    return NetworkCost(sum(p.numel() for p in net.parameters()), counts["multiplications"], counts["bytes"], *errors)


def _error(net: nn.Module, images: Tensor, angle: float) -> float:
    """Return the equivariance error of a network's output; of several outputs, the largest error."""
    with torch.no_grad():
        count = len(_tensors(net(images[:1])))
    return max(equivariance_error(partial(_output, net, i), images, angle) for i in range(count))


def _output(net: nn.Module, number: int, x: Tensor) -> Tensor:
    return _tensors(net(x))[number]


def _tensors(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    return [tensor for part in parts for tensor in _tensors(part)]


@contextmanager
def _count(net: nn.Module) -> Iterator[dict[str, int]]:
    """Return a context manager that counts multiplications, and the bytes of outputs, of the layers that run in it."""
    counts = {"multiplications": 0, "bytes": 0}

    def count(layer: nn.Module, _: Any, output: Any) -> None:
        if isinstance(output, Tensor):
            counts["bytes"] += output.numel() * output.element_size()
            counts["multiplications"] += _multiplications(layer, output)

    leaves = [module for module in net.modules() if next(module.children(), None) is None]
    hooks = [layer.register_forward_hook(count) for layer in leaves]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _multiplications(layer: nn.Module, output: Tensor) -> int:
    match layer:
        case LiftConv2d() | GroupConv2d() | GroupConvTranspose2d():
            size = layer.kernel_size if isinstance(layer, GroupConvTranspose2d) else layer.window_px
            orders = 1 if isinstance(layer, LiftConv2d) else layer.order
            values = output.numel() // (layer.stride**2 if isinstance(layer, GroupConvTranspose2d) else 1)
            return int(values * layer.in_channels // layer.groups * orders * size**2)
        case nn.Conv2d():
            return output.numel() * layer.in_channels // layer.groups * prod(layer.kernel_size)
        case nn.ConvTranspose2d():
            return output.numel() // prod(layer.stride) * layer.in_channels // layer.groups * prod(layer.kernel_size)
        case nn.Linear():
            return output.numel() * layer.in_features
    return 0


def _amount(value: float, unit: str = "") -> str:
    for prefix in ("", "k", "M", "G", "T"):
        if value < 1000:
            digits = 0 if not prefix else 1
            return f"{value:.{digits}f} {prefix}{unit}".rstrip()
        value /= 1000
    return f"{value:.0f} P{unit}"


def _ratio(value: float, reference: float) -> str:
    return f"× {value / reference:.2g}" if reference else ""
