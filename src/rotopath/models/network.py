"""The module that any of the tables in `architecture` describes: images in, logits out."""

from collections import OrderedDict
from typing import TypedDict, Unpack

import torch
from torch import Tensor, nn

from rotopath import group
from rotopath.models.architecture import MITOSIS, NUCLEI, TUMOR, UP, Architecture, Pooling, Preset, Stage, Upsampling
from rotopath.models.protocols import IMAGE_CHANNELS, Geometry
from rotopath.nn import (
    GroupAvgPool2d,
    GroupBatchNorm2d,
    GroupConv2d,
    GroupMaxPool2d,
    GroupUpsample2d,
    LiftConv2d,
    Project,
    Smooth2d,
    center_crop,
    concatenate,
    expect,
    fuse,
)
from rotopath.nn.project import Projection


class Choices(TypedDict, total=False):
    """What a network may have instead of the choices of its preset."""

    outputs: int  # logits at each position
    kernel: group.Kernel
    pooling: Pooling
    upsampling: Upsampling
    smoothing: bool
    projection: Projection
    reflections: bool
    widths_of: int | None


class Network(nn.Module):
    """Images (B, 3, H, W) to logits (B, K, H', W'), one for every position of the receptive field on its stride.

    Images are floats from 0 to 1, or bytes (uint8), which the network scales itself. Any size on the pooling grid
    will do (`fits`, `nearest_sizes`).

    >>> net = rp.models.tumor(orientations=8)
    >>> net.receptive_field, net.stride, net.nearest_sizes(200)
    (88, 12, (196, 208))
    >>> net(torch.zeros(1, 3, 100, 208)).shape
    torch.Size([1, 1, 2, 11])
    """

    def __init__(self, architecture: Architecture, orientations: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.orientations = orientations
        channels = architecture.channels(orientations)
        self.stages = nn.ModuleList()
        for i, stage in enumerate(architecture.stages):
            convolution = GroupConv2d if i else LiftConv2d
            read = architecture.in_channels(i, channels)
            layers: OrderedDict[str, nn.Module] = OrderedDict()
            layers["conv"] = convolution(
                *(read, channels[i], stage.kernel, orientations),
                bias=False,
                kernel=architecture.kernel,
                reflections=architecture.reflections,
            )
            layers["norm"] = GroupBatchNorm2d(channels[i])
            layers["relu"] = nn.ReLU(inplace=True)
            self.stages.append(nn.Sequential(layers))
        self.smooth = Smooth2d() if architecture.smoothing else nn.Identity()
        self.pools = nn.ModuleList(_build_pool(architecture, stage) for stage in architecture.stages)
        if any(stage.skip is not None for stage in architecture.stages):
            self.up = GroupUpsample2d(UP, architecture.upsampling)
        self.project = Project(architecture.projection, channels[-1], orientations, architecture.reflections)
        self.head = nn.Sequential()
        self.head.add_module("conv", nn.Conv2d(channels[-1], architecture.outputs, 1, bias=not architecture.head_norm))
        if architecture.head_norm:
            self.head.add_module("norm", nn.BatchNorm2d(architecture.outputs))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dtype == torch.uint8:
            x = x.to(next(self.parameters()).dtype) / 255
        expect.image(x, self, IMAGE_CHANNELS)
        expect.brightness(x, self)
        for size in x.shape[-2:]:
            self.architecture.expect_size(size)
        return self.compute_logits(x)

    def compute_logits(self, x: Tensor) -> Tensor:
        """The layers one after another, for floats of a size on the grid; `freeze` follows this method."""
        read_later = {stage.skip for stage in self.architecture.stages}
        skips: dict[int, Tensor] = {}
        x = self.smooth(x)
        for i, (stage, layers, pool) in enumerate(zip(self.architecture.stages, self.stages, self.pools, strict=True)):
            if stage.skip is not None:
                x = self.up(x)
                x = concatenate([x, center_crop(skips.pop(stage.skip), *x.shape[-2:])])
            conv, norm, relu = (layers.get_submodule(name) for name in ("conv", "norm", "relu"))
            if i in read_later:
                skips[i] = fuse.run_stage(x, conv, norm, relu)
                x = fuse.pool_alone(skips[i], pool)
            else:
                x = fuse.run_stage(x, conv, norm, relu, pool)
        logits: Tensor = self.head(self.project(x))  # (B, K, H', W')
        return logits

    @property
    def geometry(self) -> Geometry:
        """Where its outputs lie on an image."""
        return self.architecture.geometry

    @property
    def receptive_field(self) -> int:
        """Side of the window, in pixels, that one logit sees; also the smallest image."""
        return self.architecture.receptive_field

    @property
    def stride(self) -> int:
        """Pixels of the image between two neighbouring logits."""
        return self.architecture.stride

    def fits(self, size: int) -> bool:
        """Whether an image of that side, in pixels, lies exactly on the pooling grid."""
        return self.architecture.fits(size)

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """The good image sides next to `size`: itself, or the ones below and above."""
        return self.architecture.nearest_sizes(size)

    def output_size(self, size: int) -> int:
        """Side of the logits for an image of that side."""
        return self.architecture.output_size(size)

    def extra_repr(self) -> str:
        mirrored = ", reflections=True" if self.architecture.reflections else ""
        return f"orientations={self.orientations}{mirrored}"

    def _get_name(self) -> str:
        return self.architecture.name  # what messages and repr call the network


def _build_pool(architecture: Architecture, stage: Stage) -> nn.Module:
    if stage.pool == 1:
        return nn.Identity()
    if architecture.pooling == "rms-blur":
        return GroupAvgPool2d(stage.pool, blur=architecture.blur(stage), power=2)
    return GroupMaxPool2d(stage.pool, blur=architecture.blur(stage))


def mitosis(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> Network:
    """Mitosis detector: the logit of a mitotic figure at the centre of each window of 68 px, every 8 px."""
    return Network(MITOSIS.choose(preset, **choices), orientations)


def nuclei(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> Network:
    """Nuclei segmentation U-Net: logits of inside, border and background for each pixel but a margin of 20 px."""
    return Network(NUCLEI.choose(preset, **choices), orientations)


def tumor(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> Network:
    """Tumor classifier: the logit of tumor for each window of 88 px, every 12 px."""
    return Network(TUMOR.choose(preset, **choices), orientations)
