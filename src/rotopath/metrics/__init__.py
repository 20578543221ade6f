"""Score predictions, compute confidence intervals of scores, and measure equivariance.

`classification` and `matching` compare predictions with the ground truth; `classification` also computes confidence
intervals of scores by bootstrap.
`equivariance` compares the outputs of a model for an input and for the rotated input. `layer_errors` does so for each
layer.
"""

from rotopath.metrics.equivariance import equivariance_error, smooth_images, untrained_errors
from rotopath.metrics.layer_errors import equivariance_report
from rotopath.metrics.matching import aggregated_jaccard, find_overlaps

__all__ = [
    "aggregated_jaccard",
    "equivariance_error",
    "equivariance_report",
    "find_overlaps",
    "smooth_images",
    "untrained_errors",
]
