"""Score predictions, compute 95 % confidence intervals, and measure how predictions change if inputs are rotated.

`classification` and `matching` compare predictions with the ground truth. `bootstrap` computes confidence intervals.
`equivariance` compares the outputs of a model for original and rotated inputs.
"""

from rotopath.metrics.equivariance import equivariance_error, smooth_images, untrained_errors
from rotopath.metrics.matching import aggregated_jaccard, find_overlaps

__all__ = ["aggregated_jaccard", "equivariance_error", "find_overlaps", "smooth_images", "untrained_errors"]
