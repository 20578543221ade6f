"""What a network learns about nuclei: for each pixel, whether it is inside of one, at its border, or background.

In: label maps. Out: maps of three classes, from which nuclei that touch can be told apart, and weights that make the
classes count alike.
"""

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

CLASSES = ("inside", "border", "background")  # in the order of the network's logits
INSIDE, BORDER, BACKGROUND = range(3)
BORDER_PX = 2  # how deep the border reaches into a nucleus, at 0.25 µm/px


def class_map(labels: NDArray[np.integer], border_px: int = BORDER_PX) -> NDArray[np.uint8]:
    """The class of each pixel; the border are those pixels of a nucleus that have anything else within `border_px`.

    Inside and border together are the nuclei; where the image ends is no border.
    """
    steps = np.arange(-border_px, border_px + 1)
    near = steps[:, None] ** 2 + steps[None, :] ** 2 <= border_px**2
    lowest = ndimage.minimum_filter(labels, footprint=near, mode="nearest")
    highest = ndimage.maximum_filter(labels, footprint=near, mode="nearest")
    return np.where(labels == 0, BACKGROUND, np.where(lowest == highest, INSIDE, BORDER)).astype(np.uint8)


def class_weights(maps: Iterable[NDArray[np.uint8]]) -> NDArray[np.float32]:
    """Weights (3,) with which every class has the same share of the loss: inverse frequencies, 1 for the mean pixel."""
    counts = np.zeros(len(CLASSES))
    for one in maps:
        counts += np.bincount(one.ravel(), minlength=len(CLASSES))
    if missing := [name for name, count in zip(CLASSES, counts, strict=True) if count == 0]:
        raise ValueError(f"Class weights need pixels of every class, but the images have none of {missing[0]!r}.")
    return np.asarray(counts.sum() / (len(CLASSES) * counts), np.float32)
