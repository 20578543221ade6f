"""How good a model is: scores, and how well it keeps its symmetry."""

from rotopath.evaluation.equivariance import equivariance_error, smooth_images, untrained_errors

__all__ = ["equivariance_error", "smooth_images", "untrained_errors"]
