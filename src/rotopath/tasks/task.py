"""Base class of tasks. A task defines all that depends on what a network learns: targets, loss, scores, objects.

A kind of task is a subclass of `Task` in one file: `Classify`, `Detect` or `Segment`. To add a kind, derive a class
from `Task`, set its class variables, and implement its abstract methods; the other methods have defaults. Name the
class in a recipe as `task = "package.module:Class"`, or by its `kind` after `rotopath.tasks.register`.

The methods of `Task` are in the order in which they are called: classes, network, data, training, evaluation, slides.
`tests/test_custom_task.py` has a complete example. Training, evaluation and prediction work with any kind.

A network returns K channels at h × w positions of an image. These positions are called outputs.
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
Map = NDArray[np.float32]  # values at all outputs: (h, w), or (channels, h, w)
Evidence = Any  # prediction and ground truth of one image, from which scores are computed; each kind has its own type
Scores = dict[str, object]  # can be written as JSON
OperatingPoint = Mapping[str, float]  # the decision thresholds of a model, by name


@dataclass(frozen=True)
class Class:
    """Name of a class, and the color in which its objects are drawn."""

    name: str
    color: Color


class TrainingWindow(NamedTuple):
    """Size, in pixels, of the square training windows, and of the area in a window that the network predicts."""

    window_px: int  # side of a window
    target_px: int  # side of the central area of a window for which the network has outputs
    stride_px: int  # distance between two adjacent outputs


class HardExample(NamedTuple):
    """A mistake of a baseline network: the image, the position in pixels, and how confident the network was."""

    image: str  # name of the sample
    row: int  # row and column are 0 if the mistake concerns the whole image
    column: int
    score: float  # confidence of the network in its wrong prediction; higher is worse


@dataclass(frozen=True)
class Task(ABC):
    """A task with its classes, pixel spacing and stain normalization. Each kind of task is a subclass."""

    name: str  # the key `task` of the recipe: "tumor", a kind such as "classify", or "package.module:Class"
    classes: tuple[Class, ...]
    spacing_um_px: float  # pixel spacing of the images that the network reads
    stain: Stain = "none"  # stain normalization of these images
    background_name: str = "other"  # name for images, pixels and positions that belong to none of the classes
    objects_name: str = "objects"  # plural noun for summaries, such as "mitoses"
    uses_class_names: bool = False  # if False, annotated objects of any class belong to the first class

    # Every kind sets these
    kind: ClassVar[str]  # name of the kind, such as "classify", for recipes and model files
    annotated: ClassVar[Annotated]  # type of the required annotations: "labels", "points" or "objects"
    score_name: ClassVar[str]  # key of the main score, by which studies and reports compare models
    default_network: ClassVar[str]  # registered name of the network for recipes that name none
    prediction_type: ClassVar[Literal["window", "map"]]  # type of the prediction that `collect_evidence` receives
    # Defaults that a kind may change
    default_batch: ClassVar[int] = 64  # windows per batch
    default_spacing_um_px: ClassVar[float] = 0.5  # pixel spacing if the recipe sets none
    robustness_inputs: ClassVar[Literal["windows", "fields"]] = "windows"  # what is rotated to measure robustness
    rules: ClassVar[tuple[str, ...]] = ()  # names of the rules for counting true positives; the first is the default
    regime_unit: ClassVar[str] = "images"  # unit of a regime (reduced amount of training data)
    can_mine: ClassVar[bool] = False  # whether `find_hard_examples` is implemented
    heatmap_cell: ClassVar[int] = 1  # side of a heat-map pixel, in outputs

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
        """Return the class index of an annotated object with the class `name`, or None if the task has no such class.

        If `uses_class_names` is False, the index of every object is 0. If the name is empty, the index is 0 for a task
        with a single class; for a task with several classes, DataError is raised. The error message names `sample`.
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
        """Return the class names in the annotations of a dataset.

        A task has these classes if neither the recipe nor the task itself defines classes. Class names of images are in
        the order of `dataset.classes`; names that `dataset.classes` does not contain follow, sorted. Class names of
        objects are sorted.
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
        """Number K of channels that the network returns at each position."""

    @property
    @abstractmethod
    def output_names(self) -> tuple[str, ...]:
        """Names of the K channels, for exported models and figures."""

    @property
    def activation(self) -> str:
        """Name of the activation function in `to_probabilities`, for the description of exported models."""
        return "sigmoid" if self.outputs == 1 else "softmax"

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (B, K, h, w) to probabilities of the same shape: by sigmoid if K = 1, else by softmax."""
        return activate(logits)

    # Data: these checks run before the training writes its first file

    def check_data(self, dataset: Dataset) -> list[Finding]:
        """Return problems in the annotations of a dataset, such as unknown classes; none by default."""
        del dataset
        return []

    def check_training(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the task cannot be learned from these training samples."""

    def check_window(self, window: TrainingWindow) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the outputs of a network for a training window do not fit the task."""

    # Regimes: training with a reduced amount of data

    @abstractmethod
    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Return a random subset of the samples for a regime.

        `amount` is the amount of training data, in the unit of `describe_regime`. For the same seed, a smaller subset
        is part of every larger one.
        """

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        """Check `amount`, the amount of training data of a regime.

        Returns None if `amount` is valid, otherwise a description of valid amounts, such as "a whole number of images".
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
        """Return an array (n,) with a target for each of n images, such as the class index; zeros by default."""
        return np.zeros(len(samples), np.int64)

    @abstractmethod
    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler that chooses the windows of each training batch.

        `settings` contains the size of each image, the batch size and the seed; `window` contains the size of a window
        and of the area in it that the network predicts. `mined` is the array that `examples_for_sampler` returned, or
        None if the recipe does not mine hard examples.
        """

    @abstractmethod
    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        """Return the loss, a function of logits (B, K, h, w) and targets.

        Targets are one number for each window (B,). If `reader` reads target maps, targets are (B, h, w) for one map
        and (B, k, h, w) for k maps. The loss may depend on the training samples, for example to weight rare classes.
        """

    @abstractmethod
    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the accuracy of a validation batch, a scalar tensor for the log. See `make_loss` for the arguments."""

    def find_hard_examples(self, evidence: Sequence[Evidence], max_examples: int) -> list[HardExample]:
        """Return up to `max_examples` mistakes of a baseline network, the worst first.

        `evidence` contains the result of `collect_evidence` for each training sample. This method is only called if the
        recipe mines hard examples, which requires that `can_mine` is True.
        """
        del evidence, max_examples
        raise DataError(f"Hard examples cannot be mined for tasks of the kind {self.kind!r}; set mining=false.")

    def examples_for_sampler(self, examples: Ints) -> Ints:
        """Convert hard examples to the argument `mined` of `make_sampler`; by default, return them unchanged.

        `examples` (k, 3) have the columns image index, row and column.
        """
        return examples

    # Evaluation

    @abstractmethod
    def collect_evidence(self, prediction: Any, sample: Sample) -> Evidence:
        """Return the evidence of one sample: its prediction together with its ground truth, for `score`.

        If `prediction_type` is "window", the prediction is an array of probabilities (K,). If it is "map", it is a
        `rotopath.inference.Prediction` with maps (K, h, w) of the whole image.
        """

    @abstractmethod
    def choose_operating_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        """Return the thresholds with the best scores on the validation set. `evidence` and `rule` are as in `score`."""

    @abstractmethod
    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        """Check the operating point of a model file, and return it. Raises ValueError if it does not fit the task."""

    @abstractmethod
    def score(self, evidence: Sequence[Evidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return all scores of a split at an operating point. The main score is `scores[score_name]`.

        `rule` is the name of the rule for counting true positives; None means the first of `rules`.
        """

    @classmethod
    @abstractmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return a numerator and a denominator of the main score for each case.

        `scores` is the result of `score`, read from a JSON file. The main score is the sum of the numerators divided by
        the sum of the denominators. Studies resample the cases to compute 95 % confidence intervals.
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

        By default, the decision is the index of the channel with the highest probability. If K = 1, the decision is
        instead whether the probability reaches the threshold.
        """
        if probabilities.shape[-1] == 1:
            return np.asarray(probabilities[..., 0] >= point["threshold"])
        return np.asarray(probabilities.argmax(axis=-1))

    def maps_for_report(self, maps: Map) -> dict[str, Map]:
        """Convert probabilities (K, h, w) to a dictionary of the maps (h, w) that reports show.

        The map "objects" is required: the probability that an object of any class is present. Robustness is measured on
        this map. Other names are free.
        """
        return {"objects": self.foreground_map(maps)}

    # Slides

    @abstractmethod
    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object finder: it receives the predicted tiles of one slide, and yields the detected objects.

        `grid` defines the positions of the outputs, `point` the thresholds. `folder` is for temporary files.
        """

    def halo(self, stride_px: int) -> int:
        """Return the width, in outputs, of the margin around a tile that is needed to find the objects in the tile.

        The default is 0. `stride_px` is the distance between two adjacent outputs, in pixels.
        """
        del stride_px
        return 0

    @abstractmethod
    def class_maps(self, maps: Map) -> Map:
        """Convert the probabilities of all K channels (K, h, w) to probabilities of the classes (classes, h, w)."""

    def foreground_map(self, maps: Map) -> Map:
        """Convert probabilities (K, h, w) to the heat map: the probability (h, w) that any class is present."""
        foreground: Map = self.class_maps(maps).sum(axis=0)
        return foreground

    def foreground_deviation(self, deviations: Map) -> Map:
        """Convert standard deviations (K, h, w) over rotations to one map (h, w): by default, the largest of the K."""
        largest: Map = deviations.max(axis=0)
        return largest

    @property
    def tissue_margin_um(self) -> float:
        """Width, in µm, of the margin around tissue that is also predicted, to complete objects at the edge."""
        return 32.0

    @property
    @abstractmethod
    def background_probabilities(self) -> tuple[float, ...]:
        """Probabilities (K,) that regions of a slide receive if they are not predicted, such as glass."""

    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        """Return the summary of a slide: values by name. The value "objects" is required: the number of all objects.

        `counts` and `areas_mm2` are the number and the total area of the objects of each class; `tissue_mm2` is the
        area of the tissue. By default, the summary contains the number and the density (per mm² of tissue) of all
        objects and, if there are several classes, of the objects of each class.
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
        """Return one line of text for a summary to which the area of tissue was added as "tissue_mm2"."""
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

    `bounds` contains the lowest and the highest valid value for each name. Raises ValueError if `point` lacks a name,
    has a name that is not in `bounds`, or has a value outside of the bounds.
    """
    if not isinstance(point, Mapping) or set(point) != set(bounds):
        got = ", ".join(map(str, point)) if isinstance(point, Mapping) and point else "nothing"
        raise ValueError(f"the operating point must contain {', '.join(bounds) or 'no numbers'}; got {got}")
    numbers: dict[str, float] = {}
    for name, (low, high) in bounds.items():
        value = point[name]
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(
                f"{name!r} of the operating point is {value!r}; a number from {low:g} to {high:g} is needed"
            )
        numbers[name] = value
    return numbers
