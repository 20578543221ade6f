"""Annotated images: the benchmarks in their official layouts, one's own, and synthetic ones; and batches of them."""

from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, augment
from rotopath.data.batches import Batches
from rotopath.data.dataset import Annotated, DataError, Dataset, Finding, Sample, problems, read_image
from rotopath.data.formats import Check, check, open_data

__all__ = [
    "NO_AUGMENTATION",
    "Annotated",
    "Augmentation",
    "Batches",
    "Check",
    "DataError",
    "Dataset",
    "Finding",
    "Sample",
    "augment",
    "check",
    "open_data",
    "problems",
    "read_image",
]
