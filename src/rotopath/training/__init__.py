"""Training: one run from a recipe to a folder that holds everything about it."""

from rotopath.training.processes import is_first
from rotopath.training.run import name_folder, train

__all__ = ["is_first", "name_folder", "train"]
