"""The paper's networks as modules that map images to logits. They are built from the tables in `architecture`."""

from collections import OrderedDict
from typing import Unpack

import torch
from torch import Tensor, nn

from rotopath.models.architecture import (
    MITOSIS,
    NUCLEI,
    TUMOR,
    UPSAMPLING_FACTOR,
    Architecture,
    Choices,
    Preset,
    Stage,
)
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
    fuse,
)
from rotopath.nn.checks import check_brightness, check_image


def mitosis(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the mitosis detector: one logit every 8 px, for a mitotic figure at the center of a window of 68 px.

    `preset` is "paper" or "faithful", which has smaller equivariance errors for angles between multiples of 90°.
    `choices` are options (`Choices`); they override those of the preset.
    """
    return Network(MITOSIS.choose(preset, **choices), orientations)


def nuclei(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the U-Net for nuclei: logits of inside, border and background at each pixel, except a margin of 20 px.

    `preset` is "paper" or "faithful", which has smaller equivariance errors for angles between multiples of 90°.
    `choices` are options (`Choices`); they override those of the preset.
    """
    return Network(NUCLEI.choose(preset, **choices), orientations)


def tumor(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the tumor classifier: one logit every 12 px, for tumor in a window of 88 px.

    `preset` is "paper" or "faithful", which has smaller equivariance errors for angles between multiples of 90°.
    `choices` are options (`Choices`); they override those of the preset.
    """
    return Network(TUMOR.choose(preset, **choices), orientations)


class ArchitectureNetwork(nn.Module):
    """Base class of `Network` and `FrozenNetwork`, with the geometry and the image checks of an `Architecture`."""

    def __init__(self, architecture: Architecture, orientations: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.orientations = orientations

    @property
    def geometry(self) -> Geometry:
        """Receptive field, stride and valid image sizes, as inference needs them."""
        return self.architecture.geometry

    @property
    def receptive_field(self) -> int:
        """Side, in px, of the window that one logit depends on. It is also the smallest image side."""
        return self.architecture.receptive_field

    @property
    def stride(self) -> int:
        """Distance between neighboring logits, in image px."""
        return self.architecture.stride

    def fits(self, size: int) -> bool:
        """Return whether an image side, in px, is on the pooling grid: every pool divides its input exactly."""
        return self.architecture.fits(size)

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """Return `size` if it is on the pooling grid, otherwise the next smaller (if any) and the next larger side."""
        return self.architecture.nearest_sizes(size)

    def output_size(self, size: int) -> int:
        """Side of the map of logits for an image side of `size` px. Raises ValueError if `size` is not valid."""
        return self.architecture.output_size(size)

    def check_images(self, x: Tensor) -> None:
        """Raise ValueError unless x contains floating-point images (B, 3, H, W) of a valid size.

        Also raise ValueError for images on the CPU with values up to 255 instead of 1. This is not checked on a GPU.
        """
        check_image(x, self, IMAGE_CHANNELS)
        check_brightness(x, self)
        for size in x.shape[-2:]:
            self.architecture.expect_size(size)

    def extra_repr(self) -> str:
        mirrored = ", reflections=True" if self.architecture.reflections else ""
        return f"orientations={self.orientations}{mirrored}"

    def _get_name(self) -> str:
        return self.architecture.name  # for error messages and repr


class Network(ArchitectureNetwork):
    """One of the paper's networks: maps images (B, 3, H, W) to logits (B, K, H', W').

    Each of the H' × W' output positions has K logits for one window of `receptive_field` px. Windows are `stride` px
    apart. Images are floats from 0 to 1, or bytes (uint8), which the network scales to 0 … 1. `fits` and
    `nearest_sizes` report which heights and widths are valid.

    >>> net = rp.models.tumor(orientations=8)
    >>> net.receptive_field, net.stride, net.nearest_sizes(200)
    (88, 12, (196, 208))
    >>> net(torch.zeros(1, 3, 100, 208)).shape
    torch.Size([1, 1, 2, 11])
    """

    def __init__(self, architecture: Architecture, orientations: int) -> None:
        super().__init__(architecture, orientations)
        channels = architecture.channels(orientations)
        self.stages = nn.ModuleList()
        for i, stage in enumerate(architecture.stages):
            convolution = GroupConv2d if i else LiftConv2d
            layers: OrderedDict[str, nn.Module] = OrderedDict()
            layers["conv"] = convolution(
                architecture.in_channels(i, channels),
                channels[i],
                stage.kernel,
                orientations,
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
            self.up = GroupUpsample2d(UPSAMPLING_FACTOR, architecture.upsampling)
        self.project = Project(architecture.projection, channels[-1], orientations, architecture.reflections)
        self.head = nn.Sequential()
        self.head.add_module("conv", nn.Conv2d(channels[-1], architecture.outputs, 1, bias=not architecture.head_norm))
        if architecture.head_norm:
            self.head.add_module("norm", nn.BatchNorm2d(architecture.outputs))

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(x, Tensor) and x.dtype == torch.uint8:
            x = x.to(next(self.parameters()).dtype) / 255
        self.check_images(x)
        return self.compute_logits(x)

    def compute_logits(self, x: Tensor) -> Tensor:
        """Apply the layers to images (B, 3, H, W) without checking them. `freeze` traces this method, not `forward`."""
        read_later = {stage.skip for stage in self.architecture.stages}
        skips: dict[int, Tensor] = {}
        x = self.smooth(x)
        for i, (stage, layers, pool) in enumerate(zip(self.architecture.stages, self.stages, self.pools, strict=True)):
            if stage.skip is not None:
                x = self.up(x)
                x = concatenate([x, center_crop(skips.pop(stage.skip), *x.shape[-2:])])
            conv, norm, relu = (layers.get_submodule(name) for name in ("conv", "norm", "relu"))
            if i in read_later:
                skips[i] = fuse.run_stage(x, conv, norm, relu)  # (B, C, N, H, W)
                x = fuse.run_pool(skips[i], pool)
            else:
                x = fuse.run_stage(x, conv, norm, relu, pool)
        logits: Tensor = self.head(self.project(x))  # (B, K, H', W')
        return logits


def _build_pool(architecture: Architecture, stage: Stage) -> nn.Module:
    if stage.pool == 1:
        return nn.Identity()
    if architecture.pooling == "rms-blur":
        return GroupAvgPool2d(stage.pool, blur=architecture.blur_taps(stage), power=2)
    return GroupMaxPool2d(stage.pool, blur=architecture.blur_taps(stage))
