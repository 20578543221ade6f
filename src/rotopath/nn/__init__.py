"""Layers that know rotations: images (B, C, H, W) are lifted to features (B, C, N, H, W), and projected back.

Point-wise activations are torch's own: `nn.ReLU` and its kin act on features as they are.
"""

from rotopath.nn.conv import GroupConv2d, LiftConv2d
from rotopath.nn.norm import GroupBatchNorm2d, GroupDropout2d, GroupLayerNorm2d, GroupNorm2d
from rotopath.nn.pool import GroupAvgPool2d, GroupMaxPool2d, Smooth2d
from rotopath.nn.project import Project, orientation_field
from rotopath.nn.resize import GroupUpsample2d, center_crop, concatenate

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
