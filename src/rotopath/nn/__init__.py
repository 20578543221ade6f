"""Layers that are equivariant to rotations: lifting, group convolution, normalization, pooling and projection.

`LiftConv2d` lifts images (B, C, H, W) to SE(2) features (B, C, N, H, W), which have N orientations at every pixel.
Group layers transform features, and `Project` reduces them to maps (B, C, H, W). Pointwise layers of torch, such as
`nn.ReLU`, can be applied to features directly.
"""

from rotopath.nn.conv import GroupConv2d, LiftConv2d
from rotopath.nn.norm import GroupBatchNorm2d, GroupDropout2d, GroupLayerNorm2d, GroupNorm2d
from rotopath.nn.pool import GroupAvgPool2d, GroupMaxPool2d, GroupUpsample2d, Smooth2d, center_crop, concatenate
from rotopath.nn.project import Project, orientation_field

__all__ = [
    "GroupAvgPool2d",
    "GroupBatchNorm2d",
    "GroupConv2d",
    "GroupDropout2d",
    "GroupLayerNorm2d",
    "GroupMaxPool2d",
    "GroupNorm2d",
    "GroupUpsample2d",
    "LiftConv2d",
    "Project",
    "Smooth2d",
    "center_crop",
    "concatenate",
    "orientation_field",
]
