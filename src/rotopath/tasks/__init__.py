"""The three tasks, one file each with the same functions: loss, decode, examine, choose_point, score, tally.

In: what a network answered about annotated pictures. Out: objects, the operating point that the validation set prefers,
and scores that can be written as JSON.
"""

from collections.abc import Mapping
from types import ModuleType

from rotopath.data.collection import Task
from rotopath.tasks import mitosis, nuclei, tumor
from rotopath.tasks.prediction import Prediction

TASKS: Mapping[Task, ModuleType] = {"mitosis": mitosis, "nuclei": nuclei, "tumor": tumor}

__all__ = ["TASKS", "Prediction", "mitosis", "nuclei", "tumor"]
