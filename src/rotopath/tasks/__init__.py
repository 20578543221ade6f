"""Tasks that a network can learn: three kinds of tasks, and the three tasks of the paper (tumor, mitosis and nuclei).

The paper is that of Lafarge et al. (arXiv:2002.08725). A kind of task is a Python class: `Classify`, `Detect` or
`Segment`. A task is an instance of a kind. Each task has its own classes (such as tumor), pixel spacing and stain
normalization. The module `rotopath.tasks.task` explains how to add a kind.
"""

import difflib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rotopath.images.drawing import Color
from rotopath.images.stain import Stain
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.models.registry import import_object
from rotopath.tasks.classify import Classify
from rotopath.tasks.detect import Detect
from rotopath.tasks.segment import Segment
from rotopath.tasks.task import Class, HardExample, Task, TrainingWindow

# Default colors of classes: the palette of Okabe and Ito. Color-blind people can distinguish these colors, also on pink
# and purple tissue.
PALETTE: tuple[Color, ...] = (
    (230, 159, 0),
    (0, 114, 178),
    (0, 158, 115),
    (213, 94, 0),
    (86, 180, 233),
    (204, 121, 167),
    (240, 228, 66),
    (0, 0, 0),
)

TUMOR = Classify(
    "tumor",
    (Class("Tumor", (230, 159, 0)),),
    spacing_um_px=1.0,
    background_name="normal",
)
MITOSIS = Detect(
    "mitosis",
    (Class("Mitosis", (0, 114, 178)),),
    spacing_um_px=0.25,
    background_name="no mitosis",
    objects_name="mitoses",
)
NUCLEI = Segment(
    "nuclei",
    (Class("Nucleus", (0, 158, 115)),),
    spacing_um_px=0.25,
    stain="macenko",
    background_name="background",
    objects_name="nuclei",
)
PAPER: Mapping[str, Task] = {task.name: task for task in (MITOSIS, NUCLEI, TUMOR)}
KINDS: dict[str, type[Task]] = {kind.kind: kind for kind in (Classify, Detect, Segment)}


def register(kind: type[Task]) -> type[Task]:
    """Register a kind of task, so that recipes can use its name, the class variable `kind.kind`.

    `kind` is a subclass of `Task`. It is returned unchanged, so that `register` also works as a class decorator.
    """
    KINDS[kind.kind] = kind
    return kind


def find_kind(name: str) -> type[Task]:
    """Return the kind of task that a name refers to. A kind is a subclass of `Task`.

    `name` is the name of a task of the paper ("tumor", "mitosis", "nuclei"), the name of a kind, such as "classify", or
    the import path of a class, `package.module:Class`. Raises ValueError if there is no task, kind or class with this
    name, if the class is not a subclass of `Task`, or if the class does not implement all abstract methods.
    """
    if name in PAPER:
        return type(PAPER[name])
    if name in KINDS:
        return KINDS[name]
    if ":" not in name:
        known = [*PAPER, *KINDS]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"choose from {', '.join(known)}, or package.module:Class."
        raise ValueError(f"There is no task {name!r}; {hint}")
    kind = import_object(name)
    if not (isinstance(kind, type) and issubclass(kind, Task)):
        raise ValueError(f"The task {name!r} is not a subclass of rotopath.tasks.Task; use a subclass of it.")
    if inspect.isabstract(kind):
        missing = ", ".join(sorted(kind.__abstractmethods__))
        raise ValueError(f"The task {name!r} does not implement all methods of rotopath.tasks.Task; add {missing}.")
    return kind


@dataclass(frozen=True)
class Overrides:
    """Properties of a task that replace its defaults. An empty tuple or None keeps the default."""

    classes: tuple[str, ...] = ()  # names of the classes
    colors: tuple[Color, ...] = ()  # colors of the classes; ignored for a task of the paper if `classes` is empty
    spacing_um_px: float | None = None  # pixel spacing of the images that the network reads
    stain: Stain | None = None  # stain normalization of these images: "none" or "macenko"


def make_task(name: str, overrides: Overrides | None = None, annotated_classes: Sequence[str] = ()) -> Task:
    """Make a task from the name of a task or of a kind. The names are those of `find_kind`.

    The task has the classes `overrides.classes`. If these are empty, a task of the paper keeps its own classes, and any
    other task has the classes `annotated_classes`, which are the class names in the annotations of the data. If these
    are empty too, the task has a single class with the name "object". Classes without a color in `overrides.colors` get
    a color of `PALETTE`.

    >>> rp.tasks.make_task("tumor").class_names
    ('Tumor',)
    >>> rp.tasks.make_task("detect", annotated_classes=["b", "a"]).class_names
    ('b', 'a')
    """
    kind, overrides = find_kind(name), overrides or Overrides()
    if name in PAPER and not overrides.classes:
        task = PAPER[name]
    else:
        names = overrides.classes or tuple(annotated_classes)
        colors = (*overrides.colors, *PALETTE[len(overrides.colors) :])
        classes = tuple(Class(member, colors[i % len(colors)]) for i, member in enumerate(names or ("object",)))
        if name in PAPER:
            task = replace(PAPER[name], classes=classes, uses_class_names=bool(names))
        else:
            task = kind(name, classes, kind.default_spacing_um_px, uses_class_names=bool(names))
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
    "HardExample",
    "ObjectFinder",
    "Overrides",
    "Segment",
    "Task",
    "TrainingWindow",
    "find_kind",
    "make_task",
    "register",
]
