"""Annotated images: the benchmarks in their official layouts, one's own, and synthetic ones; and batches of them."""

from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, augment
from rotopath.data.batches import Batches
from rotopath.data.check import Check, check
from rotopath.data.collection import Annotated, Collection, DataError, Finding, Picture, problems, read_image
from rotopath.data.opening import open_data

__all__ = [
    "NO_AUGMENTATION",
    "Annotated",
    "Augmentation",
    "Batches",
    "Check",
    "Collection",
    "DataError",
    "Finding",
    "Picture",
    "augment",
    "check",
    "open_data",
    "problems",
    "read_image",
]
