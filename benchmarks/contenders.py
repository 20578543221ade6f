"""Networks to compare with those of rotopath: the same stages and channels, built without the layers of rotopath.

They map images (B, 3, H, W) to logits. `PlainCNN` is an ordinary CNN of the same width: in each layer, it has as many
channels as the network of rotopath has channels times orientations. `straightforward` is a simple implementation of the
SE(2,N) network with layers of torch. `Steerable` uses escnn or e2cnn, and `by_se2cnn` uses se2cnn, if they are
installed. All except `PlainCNN` lack skip connections, so they support the mitosis and tumor networks only.

Axes in comments: B images, C input channels, O output channels, N orientations, k × k pixels of a kernel.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath import group
from rotopath.models import Architecture
from rotopath.models.architecture import UPSAMPLING_FACTOR
from rotopath.models.protocols import IMAGE_CHANNELS


class PlainCNN(nn.Module):
    """An ordinary CNN with the stages of an architecture and its channels multiplied by `orientations`, channels-last.

    With `norm`, a batch norm follows each convolution, as in training. Otherwise each convolution has a bias, as if
    batch norm had been folded into it. With `relu_last`, ReLU follows the pool, which leaves fewer values to compute. A
    stage keeps ReLU before its pool if a skip connection reads its output before the pool.
    """

    def __init__(self, table: Architecture, orientations: int, norm: bool = True, relu_last: bool = False) -> None:
        super().__init__()
        self.table = table
        skips = {stage.skip for stage in table.stages}
        self.relu_last = [relu_last and stage not in skips for stage in range(len(table.stages))]
        wide = tuple(c * orientations for c in table.channels(orientations))
        read = [IMAGE_CHANNELS if i == 0 else table.in_channels(i, wide) for i in range(len(wide))]
        self.stages = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(read[i], wide[i], stage.kernel, bias=not norm),
                nn.BatchNorm2d(wide[i]) if norm else nn.Identity(),
            )
            for i, stage in enumerate(table.stages)
        )
        self.pools = nn.ModuleList(nn.MaxPool2d(s.pool) if s.pool > 1 else nn.Identity() for s in table.stages)
        self.relu = nn.ReLU(inplace=True)
        self.up = nn.Upsample(scale_factor=UPSAMPLING_FACTOR)
        self.head = nn.Conv2d(wide[-1], table.outputs, 1)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        before_pools: list[Tensor] = []
        steps = zip(self.table.stages, self.stages, self.pools, self.relu_last, strict=True)
        for stage, layers, pool, relu_last in steps:
            if stage.skip is not None:
                x = self.up(x)
                skip = before_pools[stage.skip]
                margin = (skip.shape[-1] - x.shape[-1]) // 2
                x = torch.cat([x, skip[..., margin:-margin, margin:-margin]], dim=1)
            x = layers(x)
            x = x if relu_last else self.relu(x)
            before_pools.append(x)
            x = pool(x)
            x = self.relu(x) if relu_last else x
        logits: Tensor = self.head(x)
        return logits


class GridSampleConv2d(nn.Module):
    """A simple lifting or group convolution, which rotates all kernels with `grid_sample` in every forward pass."""

    grid: Tensor
    disc: Tensor

    def __init__(self, read: int, channels: int, size: int, orientations: int, lifts: bool) -> None:
        super().__init__()
        self.n, self.lifts = orientations, lifts
        fan_in = read * (1 if lifts else orientations) * size**2
        shape = (channels, read, *(() if lifts else (orientations,)), size, size)
        self.weight = nn.Parameter(torch.randn(shape) * math.sqrt(2 / fan_in))
        radians = [math.radians(angle) for angle in group.angles(orientations)]
        rotations = torch.tensor([[[math.cos(a), -math.sin(a), 0], [math.sin(a), math.cos(a), 0]] for a in radians])
        self.register_buffer("grid", F.affine_grid(rotations, [orientations, 1, size, size], align_corners=True))
        self.register_buffer("disc", group.disc_mask(size).float())

    def forward(self, x: Tensor) -> Tensor:
        flat = (self.weight * self.disc).flatten(0, -3)  # (O·C, k, k), or (O·C·N, k, k)
        rotated = F.grid_sample(flat.expand(self.n, *flat.shape), self.grid, align_corners=True)
        rotated = rotated.view(self.n, *self.weight.shape)  # (N, O, C, …, k, k)
        if not self.lifts:
            rotated = torch.stack([kernel.roll(i, dims=2) for i, kernel in enumerate(rotated)])
            x = x.flatten(1, 2)
        kernels = rotated.transpose(0, 1).flatten(0, 1)  # (O·N, C, …, k, k)
        y = F.conv2d(x, kernels if self.lifts else kernels.flatten(1, 2))
        return torch.unflatten(y, 1, (-1, self.n))


def straightforward(table: Architecture, orientations: int) -> nn.Module:
    """Return a network of `GridSampleConv2d` on features (B, C, N, H, W). Norms and pools are torch's 3D layers."""

    def convolve(read: int, channels: int, size: int, first: bool) -> nn.Module:
        return GridSampleConv2d(read, channels, size, orientations, lifts=first)

    return _in_volumes(table, orientations, convolve)


def by_se2cnn(table: Architecture, orientations: int) -> nn.Module:
    """Return a network with the convolutions of se2cnn (its PyTorch port). Norms and pools are torch's 3D layers."""
    layers = import_module("se2cnn.nn")

    def convolve(read: int, channels: int, size: int, first: bool) -> nn.Module:
        kind = layers.R2ToSE2Conv if first else layers.SE2ToSE2Conv
        layer: nn.Module = kind(read, channels, orientations, size, bias=False)
        return layer

    return _in_volumes(table, orientations, convolve)


class _MeanOfOrientations(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=2)


def _in_volumes(
    table: Architecture, orientations: int, convolve: Callable[[int, int, int, bool], nn.Module]
) -> nn.Module:
    layers: list[nn.Module] = []
    channels = table.channels(orientations)
    for i, stage in enumerate(table.stages):
        read = table.in_channels(i, channels)
        layers += [
            convolve(read, channels[i], stage.kernel, i == 0),
            nn.BatchNorm3d(channels[i]),
            nn.ReLU(inplace=True),
        ]
        if stage.pool > 1:
            layers.append(nn.MaxPool3d((1, stage.pool, stage.pool)))
    return nn.Sequential(*layers, _MeanOfOrientations(), nn.Conv2d(channels[-1], table.outputs, 1))


class _SteerableLayers:
    """Layers of escnn or e2cnn on regular fields of N rotations, with the usual names of torch."""

    def __init__(self, library: str, orientations: int) -> None:
        self.nn: Any = import_module(f"{library}.nn")
        spaces: Any = import_module(f"{library}.gspaces")
        self.space = (spaces.rot2dOnR2 if library == "escnn" else spaces.Rot2dOnR2)(orientations)
        self.images = self.nn.FieldType(self.space, IMAGE_CHANNELS * [self.space.trivial_repr])

    def __deepcopy__(self, _: object) -> "_SteerableLayers":
        return self  # it refers to modules of the library, which cannot be copied

    def regular(self, channels: int) -> Any:
        return self.nn.FieldType(self.space, channels * [self.space.regular_repr])

    def wrap(self, images: Tensor) -> Any:
        return self.nn.GeometricTensor(images, self.images)

    def convolve(
        self, read: Any, fields: Any, size: int, stride: int = 1, padding: int | None = None, relu: bool = True
    ) -> Any:
        """Return a convolution, batch norm and, if `relu`, ReLU. The padding is by default half the kernel."""
        padding = size // 2 if padding is None else padding
        steps = [self.nn.R2Conv(read, fields, size, padding=padding, stride=stride, bias=False)]
        steps.append(self.nn.InnerBatchNorm(fields))
        return self.nn.SequentialModule(*steps, *([self.nn.ReLU(fields, inplace=True)] if relu else []))


class Steerable(nn.Module):
    """A network of escnn or e2cnn: regular fields, the default basis, and the maximum over orientations at the end."""

    def __init__(self, library: str, table: Architecture, orientations: int) -> None:
        super().__init__()
        self.layers = _SteerableLayers(library, orientations)
        fields, steps = self.layers.images, []
        for stage, channels in zip(table.stages, table.channels(orientations), strict=True):
            read, fields = fields, self.layers.regular(channels)
            steps.append(self.layers.convolve(read, fields, stage.kernel, padding=0))
            if stage.pool > 1:
                steps.append(self.layers.nn.PointwiseMaxPool(fields, stage.pool))
        self.steps = self.layers.nn.SequentialModule(*steps, self.layers.nn.GroupPooling(fields))
        self.head = nn.Conv2d(channels, table.outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.steps(self.layers.wrap(x)).tensor)
        return logits

    def export(self) -> nn.Module:
        """Return the library's own export to plain layers for evaluation, channels-last."""
        exported = nn.Sequential(self.eval().steps.export(), self.head).eval()
        return exported.to(memory_format=torch.channels_last)  # type: ignore[no-any-return, call-overload]


class SteerableResNet(nn.Module):
    """The ResNet-18 of `rotopath.models.backbones` in escnn or e2cnn, with `width` / N regular fields at first."""

    def __init__(self, library: str, orientations: int, width: int = 64, outputs: int = 1) -> None:
        super().__init__()
        self.layers = _SteerableLayers(library, orientations)
        fields = self.layers.regular(width // orientations)
        self.stem = self.layers.convolve(self.layers.images, fields, 7, stride=2)
        self.pool = self.layers.nn.PointwiseMaxPool(fields, 3, stride=2, padding=1)
        self.first, self.second, self.shortcuts, self.relus = (nn.ModuleList() for _ in range(4))
        for i in range(8):  # two blocks at each of four widths
            stride = 2 if i in (2, 4, 6) else 1
            read, fields = fields, self.layers.regular(width * 2 ** (i // 2) // orientations)
            self.first.append(self.layers.convolve(read, fields, 3, stride))
            self.second.append(self.layers.convolve(fields, fields, 3, relu=False))
            shortcut = self.layers.convolve(read, fields, 1, stride, relu=False) if stride > 1 else nn.Identity()
            self.shortcuts.append(shortcut)
            self.relus.append(self.layers.nn.ReLU(fields, inplace=True))
        self.project = self.layers.nn.GroupPooling(fields)
        self.head = nn.Linear(width * 8 // orientations, outputs)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.stem(self.layers.wrap(images)))
        for first, second, shortcut, relu in zip(self.first, self.second, self.shortcuts, self.relus, strict=True):
            x = relu(second(first(x)) + shortcut(x))
        logits: Tensor = self.head(self.project(x).tensor.mean((2, 3)))
        return logits


class SteerableUNet(nn.Module):
    """The U-Net of `rotopath.models.backbones` in escnn or e2cnn, with `width` / N regular fields at first."""

    def __init__(self, library: str, orientations: int, width: int, depth: int = 4, outputs: int = 1) -> None:
        super().__init__()
        self.layers = _SteerableLayers(library, orientations)
        widths = [self.layers.regular(width * 2**i // orientations) for i in range(depth)]
        self.down = nn.ModuleList(
            self._double(read, fields) for read, fields in zip([self.layers.images, *widths[:-1]], widths, strict=True)
        )
        self.pools = nn.ModuleList(self.layers.nn.PointwiseMaxPool(fields, 2) for fields in widths[:-1])
        self.up = nn.ModuleList(self.layers.nn.R2Upsampling(fields, 2, mode="bilinear") for fields in widths[:0:-1])
        self.back = nn.ModuleList(
            self._double(widths[i - 1] + widths[i], widths[i - 1]) for i in range(depth - 1, 0, -1)
        )
        self.project = self.layers.nn.GroupPooling(widths[0])
        self.head = nn.Conv2d(width // orientations, outputs, 1)

    def _double(self, read: Any, fields: Any) -> nn.Sequential:
        return nn.Sequential(self.layers.convolve(read, fields, 3), self.layers.convolve(fields, fields, 3))

    def forward(self, images: Tensor) -> Tensor:
        x = self.layers.wrap(images)
        skips: list[Any] = []
        for i, layers in enumerate(self.down):
            x = layers(self.pools[i - 1](x) if i else x)
            skips.append(x)
        for i, (up, layers) in enumerate(zip(self.up, self.back, strict=True)):
            x = layers(self.layers.nn.tensor_directsum([skips[len(skips) - 2 - i], up(x)]))
        logits: Tensor = self.head(self.project(x).tensor)
        return logits


@cache
def peers() -> dict[str, Callable[[Architecture, int], nn.Module]]:
    """Return functions that build a network with each installed library, and print which libraries are missing."""
    builders: dict[str, Callable[[Architecture, int], nn.Module]] = {
        "escnn": lambda table, n: Steerable("escnn", table, n),
        "e2cnn": lambda table, n: Steerable("e2cnn", table, n),
        "se2cnn": by_se2cnn,
    }
    for name in list(builders):
        if find_spec(name) is None:
            print(f"{name} is not installed, so it is left out; docs/speed.md describes how to install it.")
            del builders[name]
    return builders
