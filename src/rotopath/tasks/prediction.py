"""What a network says about an image, and where in the image it says it."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Prediction:
    """Probabilities on a grid of places; pixels are counted from 0, whole numbers at their centres."""

    probabilities: NDArray[np.float32]  # (K, h, w)
    stride_px: int  # from one place to the next
    first_px: tuple[float, float]  # row and column of the first place

    def places(self, indices: NDArray[np.float64]) -> NDArray[np.float64]:
        """Rows and columns of the map (k, 2), or between them, as rows and columns of the image."""
        return np.asarray(self.first_px) + self.stride_px * indices
