"""Training: one run from a recipe to a folder that holds everything about it."""

from rotopath.training.run import train

__all__ = ["train"]
