"""Pixels: reading images with their resolution, and taming their stain."""

from rotopath.images.files import (
    UnreadableFileError,
    UnreadableImageError,
    read_labels,
    read_rgb,
    resample,
    spacing_um_px,
)
from rotopath.images.stain import macenko

__all__ = [
    "UnreadableFileError",
    "UnreadableImageError",
    "macenko",
    "read_labels",
    "read_rgb",
    "resample",
    "spacing_um_px",
]
