"""Define what a task is: a class with all decisions that depend on what a network learns.

A kind of task is a subclass of `Task` in one file: `Classify`, `Detect` or `Segment`. To add a kind, derive a class
from `Task`, set its class variables, and implement its abstract methods; the other methods have defaults. Name the
class in a recipe as `task = "package.module:Class"`, or by its `kind` after `rotopath.tasks.register`. Training,
evaluation and prediction work with any kind. Only reports that show published scores refer to particular kinds.

The methods of `Task` are in the order in which they are called: classes, network, data, training, evaluation, slides.
`tests/test_custom_task.py` has a complete example.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rotopath.data import Annotated, DataError, Dataset, Finding, Sample
from rotopath.data.annotations import parse_objects, parse_points
from rotopath.data.batches import SampleReader
from rotopath.data.sampling import Ints, Sampler, SamplerSettings
from rotopath.images.files import UnreadableFileError
from rotopath.images.stain import Stain
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.inference.tiling import Grid, activate

Color = tuple[int, int, int]  # red, green, blue, 0 to 255
Loss = Callable[[Tensor, Tensor], Tensor]  # from logits and targets to a scalar tensor
Map = NDArray[np.float32]
Evidence = Any  # prediction and ground truth of one image, from which scores are computed; each kind has its own type
Scores = dict[str, object]  # can be written as JSON
OperatingPoint = Mapping[str, float]  # the decision thresholds of a model, by name


@dataclass(frozen=True)
class Class:
    """Name of a class, and the color in which its objects are drawn."""

    name: str
    color: Color


class TrainingWindow(NamedTuple):
    """Size of the square training windows, and of the area that the outputs of a network cover; sides in pixels."""

    window_px: int  # side of a window
    target_px: int  # side of the central area of the window for which the network has outputs
    stride_px: int  # distance between two adjacent outputs


class HardExample(NamedTuple):
    """A mistake of a trained network: the image, the position in pixels, and how confident the network was."""

    image: str  # name of the sample
    row: int  # row and column are 0 if the mistake concerns the whole image
    column: int
    score: float  # higher is worse


@dataclass(frozen=True)
class Task(ABC):
    """A task with its classes, pixel spacing and stain normalization. A subclass is a kind of task."""

    name: str  # "tumor", or the name of the kind
    classes: tuple[Class, ...]
    spacing_um_px: float  # pixel spacing of the images that the network reads
    stain: Stain = "none"  # stain normalization of these images
    background_name: str = "other"  # name for pixels and objects that belong to none of the classes
    objects_name: str = "objects"  # plural noun for summaries, such as "mitoses"
    uses_class_names: bool = False  # if False, annotated objects of any class belong to the first class

    # Every kind sets these
    kind: ClassVar[str]
    annotated: ClassVar[Annotated]  # type of the required annotations: "labels", "points" or "objects"
    score_name: ClassVar[str]  # key of the main score, by which operating points and checkpoints are selected
    default_network: ClassVar[str]
    prediction_type: ClassVar[Literal["window", "map"]]  # type of the prediction that `collect_evidence` receives
    # Defaults that a kind may change
    default_batch: ClassVar[int] = 64
    default_spacing_um_px: ClassVar[float] = 0.5
    robustness_inputs: ClassVar[Literal["windows", "fields"]] = "windows"  # images that are rotated to test robustness
    rules: ClassVar[tuple[str, ...]] = ()  # which predictions count as true positives; the first is the default
    regime_unit: ClassVar[str] = "images"  # unit of a regime, which is a reduced amount of training data
    can_mine: ClassVar[bool] = False  # whether `find_hard_examples` is implemented
    heatmap_cell: ClassVar[int] = 1  # number of outputs along each side of a heat-map pixel

    def __post_init__(self) -> None:
        if not self.classes:
            raise ValueError("The task has no classes; a task must have one class or more.")
        names = [name.casefold() for name in self.class_names]
        if len(set(names)) < len(names):
            raise ValueError(f"The classes of a task must have different names; got {', '.join(self.class_names)}.")

    # Classes

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the classes, in order."""
        return tuple(member.name for member in self.classes)

    @property
    def colors(self) -> tuple[Color, ...]:
        """Colors of the classes, in order."""
        return tuple(member.color for member in self.classes)

    @property
    def is_single(self) -> bool:
        """Whether the task has a single class."""
        return len(self.classes) == 1

    def class_index(self, name: str, sample: Sample) -> int | None:
        """Convert the class name of an annotated object to a class index, or to None if the task has no such class.

        With a single class, objects without a class name have index 0. With several classes, they raise DataError.
        """
        if not self.uses_class_names or (self.is_single and not name):
            return 0
        if not name:
            raise DataError(
                f"{sample.name} has an object without a class, but the task has the classes "
                f"{', '.join(self.class_names)}; name the class of every object."
            )
        names = [known.casefold() for known in self.class_names]
        return names.index(name.casefold()) if name.casefold() in names else None

    @classmethod
    def find_classes(cls, dataset: Dataset) -> tuple[str, ...]:
        """Return the class names in the annotations of a dataset. They are used if a recipe does not set 'classes'.

        Labels keep the order of the dataset; classes of points and objects are sorted by name.
        """
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
        """Number of output channels of the network, K."""

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """Names of the K outputs, for exported models and figures."""

    @property
    def activation(self) -> str:
        """Name of the activation function in `to_probabilities`, for the description of exported models."""
        return "sigmoid" if self.outputs == 1 else "softmax"

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (B, K, h, w) to probabilities of the same shape: by sigmoid if K = 1, else by softmax."""
        return activate(logits)

    # Data: these checks run before the training writes its first file

    def check_data(self, dataset: Dataset) -> list[Finding]:
        """Report problems in the annotations of a dataset, such as unknown classes; reports nothing by default."""
        del dataset
        return []

    def check_training(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the task cannot be learned from these training samples."""

    def check_window(self, window: TrainingWindow) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the outputs of a network for a training window do not fit the task."""

    # Regimes: training with a reduced amount of data

    @abstractmethod
    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Select the training samples of a regime. For the same seed, a smaller subset is part of every larger one."""

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        """Check `amount`, the amount of training data of a regime.

        Returns None if it is valid, otherwise a description of valid amounts, such as "a whole number of images".
        """
        is_whole = amount >= 1 and float(amount).is_integer()
        return None if is_whole else f"a whole number of {cls.regime_unit}"

    @classmethod
    def describe_regime(cls, amount: float) -> str:
        """Return the amount of a regime with its unit, such as "20 images", for reports."""
        return f"{amount:g} {cls.regime_unit}"

    def require_regime(self, amount: float) -> None:
        """Raise DataError if `amount` is not valid for a regime."""
        if expected := self.check_regime(amount):
            raise DataError(f"The regime (amount of training data) of {self.name} must be {expected}; got {amount:g}.")

    # Training

    @property
    def reader(self) -> SampleReader:
        """Object that reads the pixels of a sample and, if the task needs them, its target maps."""
        return SampleReader(self.spacing_um_px, self.stain)

    def image_targets(self, samples: Sequence[Sample]) -> Ints:
        """Return one target for each image, such as its class index, (n,); zeros by default."""
        return np.zeros(len(samples), np.int64)

    @abstractmethod
    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler, which chooses the windows of each training batch.

        `settings` contains the image sizes, the batch size and the seed. `mined` is the array that
        `examples_for_sampler` returned, or None if the recipe does not mine hard examples.
        """

    @abstractmethod
    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        """Return the loss, a function of logits (B, K, h, w) and targets.

        Targets are one number for each window (B,). If `reader` reads target maps, they are (B, h, w) for one map and
        (B, k, h, w) for k maps. The training samples may determine the loss, for example the weights of the classes.
        """

    @abstractmethod
    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the accuracy of a training batch, a scalar tensor for the log, from the arguments of the loss."""

    def find_hard_examples(self, evidence: Sequence[Evidence], max_examples: int) -> list[HardExample]:
        """Return the worst mistakes of a baseline network, worst first, and no more than `max_examples`.

        `evidence` has what `collect_evidence` returned for each training sample. The method is called if the recipe
        mines hard examples; this requires `can_mine`.
        """
        del evidence, max_examples
        raise DataError(f"Hard examples cannot be mined for tasks of the kind {self.kind!r}; remove 'mining'.")

    def examples_for_sampler(self, examples: Ints) -> Ints:
        """Convert hard examples (k, 3), with columns image index, row and column, to `mined` for `make_sampler`."""
        return examples

    # Evaluation

    @abstractmethod
    def collect_evidence(self, prediction: Any, sample: Sample) -> Evidence:
        """Combine the prediction and the ground truth of one sample, for `score`.

        If `prediction_type` is "window", the prediction is an array of probabilities (K,). If it is "map", it is a
        `rotopath.inference.Prediction` with maps (K, h, w) of the whole image.
        """

    @abstractmethod
    def choose_operating_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        """Return the thresholds with the best main score. `evidence` is that of the validation set."""

    @abstractmethod
    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        """Return the operating point in a model file; raise ValueError if its names or values do not fit the task."""

    @abstractmethod
    def score(self, evidence: Sequence[Evidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return all scores of a split at an operating point. The main score is `scores[score_name]`.

        `rule` decides which predictions count as true positives; None means the first of `rules`.
        """

    @classmethod
    @abstractmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return a numerator and a denominator for each case, from the result of `score`, as read from its file.

        The main score is the sum of the numerators divided by the sum of the denominators. Studies resample the cases
        to compute 95 % confidence intervals.
        """

    def resolve_rule(self, rule: str | None) -> str:
        """Return the given rule for counting true positives, or the default rule if none is given.

        Raises DataError if the task has no such rule.
        """
        if rule is None:
            return self.rules[0] if self.rules else ""
        if rule not in self.rules:
            remedy = f"choose from {', '.join(self.rules)}" if self.rules else "leave it out, since this task has none"
            raise DataError(f"The task {self.name} has no rule {rule!r} for counting true positives; {remedy}.")
        return rule

    def decide(self, probabilities: NDArray[np.floating], point: OperatingPoint) -> NDArray[np.generic]:
        """Convert probabilities (..., K) to decisions (...,), to measure how often rotation changes a decision.

        By default, the decision is the class with the highest probability; if K = 1, it is whether the probability
        reaches the threshold.
        """
        if probabilities.shape[-1] == 1:
            return np.asarray(probabilities[..., 0] >= point["threshold"])
        return np.asarray(probabilities.argmax(axis=-1))

    def maps_for_report(self, maps: Map) -> dict[str, Map]:
        """Convert probabilities (K, h, w) to the named maps (h, w) that a report shows. One name must be "objects"."""
        return {"objects": self.foreground_map(maps)}

    # Slides

    @abstractmethod
    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object that receives the predicted tiles of one slide and yields the detected objects.

        `grid` defines the positions of the outputs, `point` the thresholds. Temporary files may be put in `folder`.
        """

    def halo(self, stride_px: int) -> int:
        """Return the number of outputs around a tile that are needed to find the objects in it; 0 by default."""
        del stride_px
        return 0

    @abstractmethod
    def class_maps(self, maps: Map) -> Map:
        """Convert the probabilities of all outputs (K, h, w) to probabilities of the classes (classes, h, w)."""

    def foreground_map(self, maps: Map) -> Map:
        """Convert probabilities (K, h, w) to the heat map: the probability (h, w) that any class is present."""
        foreground: Map = self.class_maps(maps).sum(axis=0)
        return foreground

    def foreground_deviation(self, deviations: Map) -> Map:
        """Return the standard deviation over rotations of the heat map, (h, w), from that of all outputs, (K, h, w)."""
        largest: Map = deviations.max(axis=0)
        return largest

    @property
    def tissue_margin_um(self) -> float:
        """Width, in µm, of the predicted margin around tissue, so that objects at the edge of tissue are complete."""
        return 32.0

    @property
    @abstractmethod
    def background_probabilities(self) -> tuple[float, ...]:
        """Probabilities (K,) of background, for regions of a slide that are not predicted."""

    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        """Summarize a slide, from number and area of the objects of each class. "objects" is a required key.

        By default, returns number and density per mm² of tissue of the objects, also for each of several classes.
        """
        del areas_mm2
        total = sum(counts.values())
        summary = {"objects": total, f"{self.objects_name}_per_mm2": total / tissue_mm2 if tissue_mm2 else 0.0}
        if not self.is_single:
            for name in self.class_names:
                density = counts[name] / tissue_mm2 if tissue_mm2 else 0.0
                summary |= {name: counts[name], f"{name}_per_mm2": density}
        return summary

    def describe_summary(self, summary: Mapping[str, float]) -> str:
        """Return one line of text for a summary that also contains "tissue_mm2"."""
        count = int(summary["objects"])
        name = self.class_names[0].lower() if count == 1 and self.is_single else self.objects_name
        by_class = "" if self.is_single else ", ".join(f"{summary[name]:,.0f} {name}" for name in self.class_names)
        density = f"{summary[f'{self.objects_name}_per_mm2']:,.1f} per mm²"
        tissue = f"{format_area(summary['tissue_mm2'])} of tissue"
        return f"{count:,} {name}{f' ({by_class})' if by_class else ''}, {density} in {tissue}"


def format_area(mm2: float) -> str:
    """Format an area in mm² with two decimals, or below 0.1 mm² with two significant digits.

    >>> from rotopath.tasks.task import format_area
    >>> format_area(12.3456), format_area(0.0156)
    ('12.35 mm²', '0.016 mm²')
    """
    return f"{mm2:.2f} mm²" if mm2 >= 0.1 or mm2 == 0 else f"{mm2:.2g} mm²"


def check_numbers(point: Mapping[str, object], bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Check an operating point and return it.

    `bounds` has the lowest and the highest value for each name. Raises ValueError if a name is missing, unknown, or has
    a value outside of its bounds.
    """
    if not isinstance(point, Mapping) or set(point) != set(bounds):
        got = ", ".join(map(str, point)) if isinstance(point, Mapping) and point else "nothing"
        raise ValueError(f"an operating point has {', '.join(bounds) or 'no numbers'}; got {got}")
    numbers: dict[str, float] = {}
    for name, (low, high) in bounds.items():
        value = point[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(
                f"{name!r} of the operating point is {value!r}; a number from {low:g} to {high:g} is needed"
            )
        numbers[name] = value
    return numbers
