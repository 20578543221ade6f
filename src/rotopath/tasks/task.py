"""What a task decides. Each kind of task is one class, in one file; a task is an instance with classes of its own.

In: annotated samples, logits, probabilities, tiles of a slide. Out: targets, a loss, objects, scores, summaries: every
decision that depends on what is learnt. No other room asks which task it is.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath.data import Annotated, DataError, Dataset, Finding, Sample
from rotopath.data.annotations import parse_objects, parse_points
from rotopath.data.batches import Bytes, SampleReader
from rotopath.data.sampling import Ints, Sampler
from rotopath.images.files import UnreadableFileError
from rotopath.images.geojson import SlideObject
from rotopath.images.stain import Stain
from rotopath.inference.dense import activate
from rotopath.inference.slide_pass import Grid, Tile

Color = tuple[int, int, int]
# Okabe and Ito: people with any colour vision can tell them apart, also on pink and purple tissue.
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
Loss = Callable[[Tensor, Tensor], Tensor]  # of logits and targets
Map = NDArray[np.float32]
Evidence = Any  # of one sample; each kind has its own
Scores = dict[str, object]  # ready for JSON
OperatingPoint = Mapping[str, float]  # the operating point


@dataclass(frozen=True)
class Class:
    """A class by its name, and the colour that it is drawn in."""

    name: str
    color: Color


class Frame(NamedTuple):
    """The windows that a network is trained on."""

    window_px: int
    target_px: int  # side of the part in the middle that the network answers for
    stride_px: int  # from one output to the next


class Example(NamedTuple):
    """Something that a model got wrong: an image, a position in it, and how sure the model was."""

    image: str  # the sample's name
    row: int  # 0 for a whole image
    column: int
    score: float


class Finder(Protocol):
    """Finds objects on a slide: takes tiles as they come, and gives objects once they are whole."""

    def take(self, tile: Tile) -> Iterator[SlideObject]: ...
    def finish(self) -> Iterator[SlideObject]: ...


@dataclass(frozen=True)
class Task(ABC):
    """One task: its classes, and how it wants its images.

    A new kind is a subclass: it says what it is (the class variables), and decides what the abstract methods ask for.
    `register` makes it known by its name.
    """

    name: str  # "tumor", or the name of the kind
    classes: tuple[Class, ...]
    spacing_um_px: float
    stain: Stain = "none"
    absent: str = "other"  # what there is where none of the classes is
    plural: str = "objects"  # of what is found
    typed: bool = False  # whether only objects of these classes count, and all others are background

    kind: ClassVar[str]
    annotated: ClassVar[Annotated]  # what the data has to hold
    score_name: ClassVar[str]  # the main score, by which operating points and models are chosen
    default_network: ClassVar[str]
    default_batch: ClassVar[int] = 64
    default_spacing_um_px: ClassVar[float] = 0.5
    answers: ClassVar[Literal["window", "map"]]  # to an annotated image: one answer, or one at every position
    rotated: ClassVar[Literal["windows", "fields"]] = "windows"  # inputs by which robustness is measured
    rules: ClassVar[tuple[str, ...]] = ()  # ways to count hits; the first is used unless another is asked for
    regime_unit: ClassVar[str] = "images"  # what a regime counts
    heat_cell: ClassVar[int] = 1  # outputs along a side of a heat map's pixel

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("A task has one class or more.")
        names = [each.name.casefold() for each in self.classes]
        if len(set(names)) < len(names):
            raise ValueError(f"The classes of a task have different names; got {', '.join(self.class_names)}.")

    @property
    def class_names(self) -> tuple[str, ...]:
        return tuple(each.name for each in self.classes)

    @property
    def colors(self) -> tuple[Color, ...]:
        return tuple(each.color for each in self.classes)

    @property
    def is_single(self) -> bool:
        """Whether there is one class only, so that the question is yes or no."""
        return len(self.classes) == 1

    def class_of(self, name: str, sample: Sample) -> int | None:
        """The number of an annotated object's class; None for a class that the task does not have.

        A task that is not typed takes objects of any class, and one with a single class objects of no name.
        """
        if not self.typed or (self.is_single and not name):
            return 0
        if not name:
            raise DataError(
                f"{sample.name} has an object without a class, but the task has the classes "
                f"{', '.join(self.class_names)}; name the class of every object."
            )
        names = [each.casefold() for each in self.class_names]
        return names.index(name.casefold()) if name.casefold() in names else None

    @classmethod
    def find_classes(cls, dataset: Dataset) -> tuple[str, ...]:
        """The names of the classes that annotations use: in the order of the data, or by the alphabet."""
        if dataset.annotated == "labels":
            used = {sample.label or "" for sample in dataset.samples}
            ordered = [name for name in dataset.classes if name in used]
            return (*ordered, *sorted(used - set(ordered) - {""}))
        used = set()
        for sample in dataset.samples:
            try:
                if dataset.annotated == "points":
                    used.update(parse_points(sample)[0].classes)
                else:
                    used.update(parse_objects(sample, sample.annotations[0])[0].classes.values())
            except UnreadableFileError as error:
                raise DataError(f"{error} Run `rotopath data check` on the data.") from None
        return tuple(sorted(used - {""}))

    # The network

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Logits that a network has to give at each position."""

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """What each of the logits stands for."""

    activation: ClassVar[str] = "softmax"  # by which an exported model's logits become probabilities

    def probabilities(self, logits: Tensor) -> Tensor:
        """Logits (B, K, h, w) as probabilities of the same shape."""
        return activate(logits)

    # Training

    @property
    def reader(self) -> SampleReader:
        """How samples become pixels, with target maps if the task has any."""
        return SampleReader(self.spacing_um_px, self.stain)

    def labels(self, samples: Sequence[Sample]) -> Ints:
        """The targets (n,) of whole samples, where they have any."""
        return np.zeros(len(samples), np.int64)

    @abstractmethod
    def make_sampler(
        self, samples: Sequence[Sample], sizes_px: Ints, frame: Frame, batch: int, seed: int, mined: Ints | None
    ) -> Sampler:
        """Which windows make up each batch."""

    @abstractmethod
    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        """The loss, whose weights may depend on the training samples."""

    @abstractmethod
    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The fraction of right answers, for the log of a training."""

    def check_frame(self, frame: Frame) -> None:  # noqa: B027  # all windows will do, unless a kind says otherwise
        """Refuse windows for which the network does not give what the task needs."""

    def check_data(self, dataset: Dataset) -> list[Finding]:
        """What is wrong with labels, for this task: classes that it does not have, or none at all."""
        del dataset
        return []

    def check_training(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # nothing to check, for most kinds
        """Refuse training samples of which the task cannot be learnt."""

    @abstractmethod
    def take_regime(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """A smaller training set; one always lies inside of any larger one."""

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        """What is expected of a regime, where this amount is none."""
        whole = amount >= 1 and float(amount).is_integer()
        return None if whole else f"a whole number of {cls.regime_unit}"

    @classmethod
    def describe_regime(cls, amount: float) -> str:
        """An amount of training data in words."""
        return f"{amount:g} {cls.regime_unit}"

    can_mine: ClassVar[bool] = False

    def mine(self, evidence: Sequence[Evidence], most: int) -> list[Example]:
        """The worst mistakes of a first model, the worst first."""
        del evidence, most
        raise DataError(f"Hard examples cannot be mined for the kind {self.kind!r}; leave 'mining' out.")

    def number_examples(self, places: Ints) -> Ints:
        """Mined examples (k, 3), as (image, row, column), in the form that the sampler takes."""
        return places

    # Evaluation

    @abstractmethod
    def examine(self, prediction: Any, sample: Sample) -> Evidence:
        """A prediction beside the annotation: probabilities (K,) of a window, or a `Prediction` of a whole image."""

    @abstractmethod
    def choose_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        """The operating point that is best on a validation set."""

    @abstractmethod
    def check_point(self, point: Mapping[str, object]) -> dict[str, float]:
        """The operating point of a model file, if it is one of this task; else a ValueError."""

    @abstractmethod
    def score(self, evidence: Sequence[Evidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """All scores at an operating point."""

    @classmethod
    @abstractmethod
    def tally(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """For each case, or image, two numbers; the main score is the ratio of their sums."""

    def decide(self, probabilities: NDArray[np.floating], point: OperatingPoint) -> NDArray[np.generic]:
        """The decisions (..., ) that probabilities (..., K) of single positions lead to."""
        if probabilities.shape[-1] == 1:
            return np.asarray(probabilities[..., 0] >= point["threshold"])
        return np.asarray(probabilities.argmax(axis=-1))

    # Slides

    @abstractmethod
    def make_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> Finder:
        """Finds objects in the tiles of a slide; what has to wait may be kept in files of the folder."""

    def halo(self, stride_px: int) -> int:
        """Outputs around a tile that its objects depend on."""
        del stride_px
        return 0

    @abstractmethod
    def class_maps(self, maps: Map) -> Map:
        """The probability of each class (classes, h, w), of all outputs (K, h, w)."""

    def foreground(self, maps: Map) -> Map:
        """The probability (h, w) that any of the classes is there."""
        found: Map = self.class_maps(maps).sum(axis=0)
        return found

    def report_maps(self, maps: Map) -> dict[str, Map]:
        """Maps (h, w) by name that a report shows of a rotated field; the foreground always is one of them."""
        return {"objects": self.foreground(maps)}

    def deviation(self, deviations: Map) -> Map:
        """How far the foreground (h, w) scatters over rotations, of the deviations (K, h, w) of all outputs."""
        found: Map = deviations.max(axis=0)
        return found

    @property
    def margin_um(self) -> float:
        """How far around tissue is looked, so that no object at its edge is cut."""
        return 32.0

    @property
    @abstractmethod
    def nothing(self) -> tuple[float, ...]:
        """Probabilities (K,) where surely nothing is, such as on glass."""

    @abstractmethod
    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        """A slide in a few numbers, from the objects of each class and their areas."""

    @abstractmethod
    def describe(self, summary: Mapping[str, float]) -> str:
        """The summary of a slide in one line."""


def count_objects(task: Task, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
    """A summary of objects that are counted: how many, and how many for each mm² of tissue; by class if several."""
    del areas_mm2
    total = sum(counts.values())
    summary = {f"{task.plural}_per_mm2": _density(total, tissue_mm2)}
    if not task.is_single:
        for name in task.class_names:
            summary |= {name: counts[name], f"{name}_per_mm2": _density(counts[name], tissue_mm2)}
    return {"objects": total, **summary}


def describe_objects(task: Task, summary: Mapping[str, float]) -> str:
    """How many objects there are, in one line."""
    count = int(summary["objects"])
    name = task.class_names[0].lower() if count == 1 and task.is_single else task.plural
    density = f"{summary[f'{task.plural}_per_mm2']:,.1f} per mm² in {spell_area(summary['tissue_mm2'])} of tissue"
    each = ", ".join(f"{summary[each]:,.0f} {each}" for each in task.class_names) if not task.is_single else ""
    return f"{count:,} {name}{f' ({each})' if each else ''}, {density}"


def spell_area(mm2: float) -> str:
    """An area in mm², small ones with the digits that they have.

    >>> from rotopath.tasks.task import spell_area
    >>> spell_area(12.3456), spell_area(0.0156)
    ('12.35 mm²', '0.016 mm²')
    """
    return f"{mm2:.2f} mm²" if mm2 >= 0.1 or mm2 == 0 else f"{mm2:.2g} mm²"


def _density(count: int, tissue_mm2: float) -> float:
    return count / tissue_mm2 if tissue_mm2 else 0.0


def expect_numbers(point: Mapping[str, object], expected: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """An operating point with exactly the expected names, each a number within its bounds."""
    if not isinstance(point, Mapping) or set(point) != set(expected):
        got = ", ".join(map(str, point)) if isinstance(point, Mapping) and point else "nothing"
        raise ValueError(f"an operating point has {', '.join(expected) or 'no numbers'}; got {got}")
    numbers: dict[str, float] = {}
    for name, (low, high) in expected.items():
        value = point[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(
                f"{name!r} of the operating point is {value!r}; a number from {low:g} to {high:g} is needed"
            )
        numbers[name] = value
    return numbers


def expect_regime(task: Task, amount: float) -> None:
    """Refuse an amount of training data that is no regime of the task."""
    if expected := task.check_regime(amount):
        raise DataError(f"A regime of the task {task.name} is {expected}; got {amount:g}.")


def take_rule(task: Task, rule: str | None) -> str:
    """The rule by which hits are counted: the usual one, or another one of the task's."""
    if rule is None:
        return task.rules[0] if task.rules else ""
    if rule not in task.rules:
        raise DataError(f"The task {task.name} has no rule {rule!r}; choose from {', '.join(task.rules) or 'none'}.")
    return rule


def fraction(right: Tensor) -> Tensor:
    """The mean of yes and no, in double precision."""
    return right.double().mean()


def target_bytes(maps: Sequence[NDArray[np.generic]]) -> Bytes:
    """Target maps (H, W) side by side, (H, W, k)."""
    return np.dstack([np.asarray(each, np.uint8) for each in maps])


def to_device(weights: NDArray[np.float32], logits: Tensor) -> Tensor:
    return torch.from_numpy(weights).to(logits)
