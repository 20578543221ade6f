"""Annotated images: the benchmarks in their official layouts, one's own, and synthetic ones; and batches of them."""

from rotopath.data.augmentation import NO_AUGMENTATION, Augmentation, augment
from rotopath.data.batches import Batches, middle_batches, sampled_batches
from rotopath.data.check import Check, check
from rotopath.data.collection import (
    MODEL_SPACING_UM_PX,
    Collection,
    DataError,
    Finding,
    Picture,
    Task,
    problems,
    read_image,
)
from rotopath.data.opening import open_data
from rotopath.data.regime import take_regime

__all__ = [
    "MODEL_SPACING_UM_PX",
    "NO_AUGMENTATION",
    "Augmentation",
    "Batches",
    "Check",
    "Collection",
    "DataError",
    "Finding",
    "Picture",
    "Task",
    "augment",
    "check",
    "middle_batches",
    "open_data",
    "problems",
    "read_image",
    "sampled_batches",
    "take_regime",
]
