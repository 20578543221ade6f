"""Datasets of annotated images, and training batches made from them.

A dataset is a public benchmark in its official folder layout, your own images, or synthetic images of tissue. The
module `formats` opens and checks datasets of all formats. The module `batches` makes training batches.
"""

from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, augment
from rotopath.data.batches import Batches
from rotopath.data.dataset import Annotated, DataError, Dataset, Finding, Sample, problems, read_image
from rotopath.data.formats import Check, check, open_data
from rotopath.data.importing import export_data, import_data

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
    "export_data",
    "import_data",
    "open_data",
    "problems",
    "read_image",
]
