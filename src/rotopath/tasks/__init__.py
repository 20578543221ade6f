"""Kinds and tasks by name; the paper's three tasks are rows of a table.

In: the name of a task or a kind, and perhaps classes, a spacing and a stain of one's own. Out: the task.

Tasks: what is learnt, and every decision that depends on it. A kind is one class in one file.

In: annotated samples, and what a network answered about them. Out: targets and losses, objects, operating points, and
scores that can be written as JSON.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rotopath.images.stain import Stain
from rotopath.models.registry import import_named
from rotopath.tasks.classify import Classify
from rotopath.tasks.detect import Detect
from rotopath.tasks.segment import Segment
from rotopath.tasks.task import PALETTE, Class, Color, Example, Finder, Frame, Task

TUMOR = Classify("tumor", (Class("Tumor", (230, 159, 0)),), spacing_um_px=1.0, absent="normal")
MITOSIS = Detect(
    "mitosis", (Class("Mitosis", (0, 114, 178)),), spacing_um_px=0.25, absent="no mitosis", plural="mitoses"
)
NUCLEI = Segment(
    "nuclei",
    (Class("Nucleus", (0, 158, 115)),),
    spacing_um_px=0.25,
    stain="macenko",
    absent="background",
    plural="nuclei",
)
PAPER: Mapping[str, Task] = {task.name: task for task in (MITOSIS, NUCLEI, TUMOR)}
KINDS: dict[str, type[Task]] = {kind.kind: kind for kind in (Classify, Detect, Segment)}


def register(kind: type[Task]) -> type[Task]:
    """Make a kind of task known by its name; for use as a decorator."""
    KINDS[kind.kind] = kind
    return kind


def find_kind(name: str) -> type[Task]:
    """The kind of a task of the paper's, a kind itself, or the class that `package.module:Class` names."""
    if name in PAPER:
        return type(PAPER[name])
    if name in KINDS:
        return KINDS[name]
    if ":" not in name:
        known = [*PAPER, *KINDS]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}."
        raise ValueError(f"There is no task {name!r}; {hint}")
    found = import_named(name)
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise ValueError(f"The task {name!r} is no class of rotopath.tasks.Task.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__)[:3])
        raise ValueError(f"The task {name!r} does not decide everything that a kind has to ({missing}, ...).")
    return found


@dataclass(frozen=True)
class Overrides:
    """What a recipe says about a task; what is left out is the task's own."""

    classes: tuple[str, ...] = ()
    colors: tuple[Color, ...] = ()
    spacing_um_px: float | None = None
    stain: Stain | None = None


def make_task(name: str, overrides: Overrides = Overrides(), found: Sequence[str] = ()) -> Task:  # noqa: B008
    """The task of that name; classes that nobody names are those that were `found` in the data.

    >>> rp.tasks.make_task("tumor").class_names, rp.tasks.make_task("detect", found=["b", "a"]).class_names
    (('Tumor',), ('b', 'a'))
    """
    kind = find_kind(name)
    if name in PAPER and not overrides.classes:
        task = PAPER[name]
    else:
        names = overrides.classes or tuple(found)
        colors = (*overrides.colors, *PALETTE[len(overrides.colors) :])
        classes = tuple(Class(each, colors[i % len(colors)]) for i, each in enumerate(names or ("object",)))
        usual = PAPER.get(name)
        absent, plural = (usual.absent, usual.plural) if usual else ("other", "objects")
        spacing, stain = (usual.spacing_um_px, usual.stain) if usual else (kind.default_spacing_um_px, "none")
        task = kind(name, classes, spacing, stain, absent, plural, typed=bool(names))
    if overrides.spacing_um_px is not None:
        task = replace(task, spacing_um_px=overrides.spacing_um_px)
    return task if overrides.stain is None else replace(task, stain=overrides.stain)


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
