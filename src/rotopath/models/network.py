"""The paper's networks as torch modules that map images to logits, built from the tables in `architecture`."""

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
    finish,
)
from rotopath.nn.features import check_brightness, check_image


def mitosis(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the mitosis detector, which returns one logit for each window of 68 × 68 px.

    Neighboring windows are 8 px apart. The logit is high if a mitotic figure is at the center of the window.

    `preset` is "paper", the network of the paper, or "faithful", a network with smaller equivariance errors for
    rotations by angles that are not multiples of 90°. `choices` are single options (`Choices`), which override the
    options of the preset.
    """
    return Network(MITOSIS.choose(preset, **choices), orientations)


def nuclei(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the U-Net for nuclei, which returns logits of three classes for each pixel: inside, border and background.

    The map of logits is smaller than the image: it has no logits for the outermost 20 px at each edge.

    `preset` is "paper", the network of the paper, or "faithful", a network with smaller equivariance errors for
    rotations by angles that are not multiples of 90°. `choices` are single options (`Choices`), which override the
    options of the preset.
    """
    return Network(NUCLEI.choose(preset, **choices), orientations)


def tumor(orientations: int = 8, preset: Preset = "paper", **choices: Unpack[Choices]) -> "Network":
    """Build the tumor classifier, which returns one logit for each window of 88 × 88 px.

    Neighboring windows are 12 px apart. The logit is high if the tissue in the window is tumor.

    `preset` is "paper", the network of the paper, or "faithful", a network with smaller equivariance errors for
    rotations by angles that are not multiples of 90°. `choices` are single options (`Choices`), which override the
    options of the preset.
    """
    return Network(TUMOR.choose(preset, **choices), orientations)


class ArchitectureNetwork(nn.Module):
    """Base class of `Network` and `FrozenNetwork`: stores an `Architecture`, and checks images.

    `orientations` is N, not counting reflections.
    """

    def __init__(self, architecture: Architecture, orientations: int) -> None:
        super().__init__()
        self.architecture = architecture
        self.orientations = orientations

    @property
    def geometry(self) -> Geometry:
        """Receptive field, stride, rim and valid image sizes of the network, for code that accepts any network."""
        return self.architecture.geometry

    @property
    def receptive_field(self) -> int:
        """Side, in px, of the window from which an output is computed. It is also the smallest valid image side.

        With some options, such as `smoothing`, a few pixels outside the window are read too (`Architecture.rim`).
        """
        return self.architecture.receptive_field

    @property
    def stride(self) -> int:
        """Distance between neighboring output positions, in image px."""
        return self.architecture.stride

    def fits(self, size: int) -> bool:
        """Return whether an image side, in px, is valid: a window fits, and the pools cover their inputs exactly."""
        return self.architecture.fits(size)

    def nearest_sizes(self, size: int) -> tuple[int, ...]:
        """Return the valid image sides nearest to `size`, in px: only `size` if it is valid, otherwise two sides.

        The two sides are the next smaller and the next larger valid side. If no smaller side is valid, only the larger
        one is returned.
        """
        return self.architecture.nearest_sizes(size)

    def output_size(self, size: int) -> int:
        """Return the side of the output map, in output positions, for an image side of `size` px.

        Raises ValueError if `size` is not valid.
        """
        return self.architecture.output_size(size)

    def check_images(self, x: Tensor) -> None:
        """Raise ValueError unless `x` contains floating-point images (B, 3, H, W) of a valid size.

        Also raise ValueError if the values seem to be from 0 to 255 instead of 0 to 1. The values are checked on the
        CPU only, and not while torch compiles or traces the network.
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

    Each of the H' × W' output positions has K logits for one window with a side of `receptive_field` px. Neighboring
    windows are `stride` px apart. Images are floats from 0 to 1, or bytes (uint8), which the network scales to floats.
    `fits` and `nearest_sizes` state which heights and widths are valid.

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
        """Apply the layers to images (B, 3, H, W) without checking the images, and return logits (B, K, H', W').

        `freeze` traces this method instead of `forward`, because the checks cannot be traced.
        """
        skip_sources = {stage.skip for stage in self.architecture.stages}
        skips: dict[int, Tensor] = {}
        x = self.smooth(x)
        for i, (stage, layers, pool) in enumerate(zip(self.architecture.stages, self.stages, self.pools, strict=True)):
            if stage.skip is not None:
                x = self.up(x)
                x = concatenate([x, center_crop(skips.pop(stage.skip), *x.shape[-2:])])
            x = layers(x)  # (B, C, N, H, W)
            if i in skip_sources:
                skips[i] = x = finish(x)
            x = pool(x)
        logits: Tensor = self.head(self.project(x))  # (B, K, H', W')
        return logits


def _build_pool(architecture: Architecture, stage: Stage) -> nn.Module:
    if stage.pool == 1:
        return nn.Identity()
    if architecture.pooling == "rms-blur":
        return GroupAvgPool2d(stage.pool, blur=architecture.blur_taps(stage), power=2)
    return GroupMaxPool2d(stage.pool, blur=architecture.blur_taps(stage))
