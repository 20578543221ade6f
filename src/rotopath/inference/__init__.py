"""Apply a trained network to images in memory, to whole slides tile by tile, and to many image files.

The functions exported here take a network in evaluation mode, and images with the pixel spacing (µm/px) that the
network was trained on. They return probabilities. The modules `slide_pass`, `predict_files` and `cluster` predict
slides with a `Model` (a network with its task and decision thresholds). Their functions return or write objects, heat
maps and summaries.
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
