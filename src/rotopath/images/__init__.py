"""Pixels: images and slides read at a resolution, their tissue and stain, and what is drawn onto them."""

from rotopath.images.files import (
    UnreadableFileError,
    UnreadableImageError,
    read_labels,
    read_rgb,
    resample,
    spacing_um_px,
)
from rotopath.images.slides import Slide, open_slide
from rotopath.images.stain import macenko
from rotopath.images.tissue import Tissue, find_tissue

__all__ = [
    "Slide",
    "Tissue",
    "UnreadableFileError",
    "UnreadableImageError",
    "find_tissue",
    "macenko",
    "open_slide",
    "read_labels",
    "read_rgb",
    "resample",
    "spacing_um_px",
]
