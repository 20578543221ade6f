"""How well a model keeps its symmetry."""

from rotopath.evaluation.equivariance import equivariance_error, smooth_images, untrained_errors

__all__ = ["equivariance_error", "smooth_images", "untrained_errors"]
