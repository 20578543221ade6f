"""SE(2)-equivariant layers: images (B, C, H, W) are lifted to features (B, C, N, H, W) and projected back.

N is the number of orientations. Torch's pointwise activations, such as `nn.ReLU`, apply to features unchanged.
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
