"""A trained network applied: to images and single windows, and to whole slides tile by tile.

In: a network in eval mode, and pixels at its spacing. Out: probabilities and where they lie; objects; results.
"""

from rotopath.inference.dense import (
    Prediction,
    predict,
    predict_batch,
    predict_patches,
    predict_rotated,
    predict_rotations,
)

__all__ = ["Prediction", "predict", "predict_batch", "predict_patches", "predict_rotated", "predict_rotations"]
