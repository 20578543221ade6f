"""Measuring: what a model's answer is worth, and how it changes when the input turns."""

from rotopath.metrics.equivariance import equivariance_error, smooth_images, untrained_errors
from rotopath.metrics.matching import aggregated_jaccard, overlaps

__all__ = ["aggregated_jaccard", "equivariance_error", "overlaps", "smooth_images", "untrained_errors"]
