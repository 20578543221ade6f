"""Tasks: what is learnt, and every decision that depends on it. A kind is one class in one file.

In: annotated pictures, and what a network answered about them. Out: targets and losses, objects, operating points, and
scores that can be written as JSON.
"""

from rotopath.tasks.catalog import KINDS, MITOSIS, NUCLEI, PAPER, TUMOR, Overrides, find_kind, make_task, register
from rotopath.tasks.classify import Classify
from rotopath.tasks.detect import Detect
from rotopath.tasks.segment import Segment
from rotopath.tasks.task import Class, Example, Finder, Frame, Task

__all__ = [
    "KINDS",
    "MITOSIS",
    "NUCLEI",
    "PAPER",
    "TUMOR",
    "Class",
    "Classify",
    "Detect",
    "Example",
    "Finder",
    "Frame",
    "Overrides",
    "Segment",
    "Task",
    "find_kind",
    "make_task",
    "register",
]
