"""Layers that are equivariant to rotations: lifting, group convolution, normalization, pooling and projection.

A layer is equivariant if rotating its input rotates its output in the same way. Shapes are (B, C, H, W) for images and
maps, and (B, C, N, H, W) for SE(2) features: batch, channels, orientations, height and width. Features have one value
for each of N orientations at every pixel and channel; with reflections, the orientation axis has 2N entries.

`LiftConv2d` computes features from images. Layers whose names start with `Group` take and return features. `Project`
reduces features to maps. `Smooth2d` smooths images. Pointwise layers of torch, such as `nn.ReLU`, can be applied to
features directly.
"""

from rotopath.nn.conv import GroupConv2d, GroupConvTranspose2d, LiftConv2d
from rotopath.nn.fuse import disable_fusion, finish
from rotopath.nn.graphs import record_step
from rotopath.nn.norm import (
    ChannelNorm2d,
    ChannelScale,
    GroupBatchNorm2d,
    GroupDropout2d,
    GroupLayerNorm2d,
    GroupNorm2d,
    StochasticDepth,
)
from rotopath.nn.pool import (
    GroupAdaptiveAvgPool2d,
    GroupAdaptiveMaxPool2d,
    GroupAvgPool2d,
    GroupFilter2d,
    GroupMaxPool2d,
    GroupUpsample2d,
    Smooth2d,
    center_crop,
    concatenate,
)
from rotopath.nn.project import Project, orientation_field

__all__ = [
    "ChannelNorm2d",
    "ChannelScale",
    "GroupAdaptiveAvgPool2d",
    "GroupAdaptiveMaxPool2d",
    "GroupAvgPool2d",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupConvTranspose2d",
    "GroupDropout2d",
    "GroupFilter2d",
    "GroupLayerNorm2d",
    "GroupMaxPool2d",
    "GroupNorm2d",
    "GroupUpsample2d",
    "LiftConv2d",
    "Project",
    "Smooth2d",
    "StochasticDepth",
    "center_crop",
    "concatenate",
    "disable_fusion",
    "finish",
    "orientation_field",
    "record_step",
]
