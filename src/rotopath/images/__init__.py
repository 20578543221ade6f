"""Read images and slides at any pixel spacing, find tissue, normalize stains, draw results, write files for QuPath."""

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
