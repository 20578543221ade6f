"""The base class `Task`. A task defines the targets, the loss, the scores, and the objects that are found on slides.

A kind of task is a subclass of `Task`: `Classify`, `Detect` or `Segment`. To add a kind, derive a class from `Task`,
set the class variables that have no default, and implement the abstract methods. Name the class in a recipe as
`task = "package.module:Class"`. If the class is registered with `rotopath.tasks.register`, its `kind` is enough, as in
`task = "classify"`; kinds of this package are in `rotopath.tasks.KINDS`. Training, evaluation and prediction then work
with this kind. `tests/test_custom_task.py` has a complete example. The methods of `Task` are in the order of use:
classes, network, data, training, evaluation, slides.

A network maps images (B, 3, H, W) to logits (B, K, h, w): K channels at h × w positions. In comments and docstrings, an
*output* is one of these positions. The property `Task.outputs` is the number K.
"""

import re
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
from rotopath.images.drawing import Color, DrawnAs
from rotopath.images.files import UnreadableFileError
from rotopath.images.stain import Stain
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.inference.tiling import Grid, activate

Loss = Callable[[Tensor, Tensor], Tensor]  # from logits and targets to a scalar tensor
LossWeights = Literal["balanced", "equal"]  # whether rare classes have higher weights in the loss
Map = NDArray[np.float32]  # a value at each output (h, w), or several channels (channels, h, w)
Evidence = Any  # prediction and ground truth of one image, from which scores are computed; each kind has its own type
Scores = dict[str, object]  # scores by name; all values can be written as JSON
OperatingPoint = Mapping[str, float]  # the decision thresholds of a model, by name

HE_TASKS = ("mitosis", "nuclei", "tumor")  # names of tasks that are always about H&E
# Plausible densities of objects, per mm² of tissue of a slide or a field: lowest and highest, by name of the task.
# - mitosis: MIDOG++ (Aubreville et al., Scientific Data 2023) has 11,937 mitotic figures in regions of 503 tumors. If a
#   region has 2 mm², this is 12 per mm² on average. The highest value is eight times as high.
# - nuclei: the fields of Kumar et al. have 4,704 to 30,672 nuclei per mm². At the highest value, cells are 5.6 µm wide
#   without any space between them. Even fat and scars have more nuclei than the lowest value.
PLAUSIBLE_PER_MM2 = {"mitosis": (0.0, 100.0), "nuclei": (20.0, 40_000.0)}
MIN_DENSITY_MM2 = 0.1  # in less tissue than this, a few objects more or less change the density much


@dataclass(frozen=True)
class Class:
    """Name of a class, and the color in which its objects are drawn."""

    name: str
    color: Color


class TrainingWindow(NamedTuple):
    """Sizes, in pixels, of the square training windows, and of the area in each window that the network predicts."""

    window_px: int  # side of a window
    target_px: int  # side of the central area of a window for which the network has outputs
    stride_px: int  # distance between two adjacent outputs


class HardExample(NamedTuple):
    """A mistake of a baseline network on a training image: a position that the sampler should draw more often.

    The baseline network is a network that was trained before, without hard examples.
    """

    image: str  # name of the sample
    row: int  # in pixels; row and column are 0 if the whole image was misclassified
    column: int
    score: float  # predicted probability of the wrong answer; the highest is the worst mistake


@dataclass(frozen=True)
class Task(ABC):
    """Base class of all kinds of tasks. An instance is a task: a kind with classes, pixel spacing and stain."""

    name: str  # the key `task` of the recipe: "tumor", a kind such as "classify", or "package.module:Class"
    classes: tuple[Class, ...]
    spacing_um_px: float  # pixel spacing of the images that the network reads
    stain: Stain = "none"  # stain normalization of these images: "none" or "macenko"
    background_name: str = "other"  # name for images, pixels and positions that belong to none of the classes
    objects_name: str = "objects"  # plural noun for summaries, such as "mitoses"
    uses_class_names: bool = False  # if False, annotated objects of any class belong to the first class

    # Every kind must set these class variables
    kind: ClassVar[str]  # name of the kind, such as "classify", for recipes and model files
    annotated: ClassVar[Annotated]  # type of the required annotations: "labels", "points" or "objects"
    score_name: ClassVar[str]  # key of the main score, by which studies and reports compare models
    default_network: ClassVar[str]  # network of recipes without the key `network`: a registered name or an import path
    prediction_type: ClassVar[Literal["window", "map"]]  # type of the prediction that `collect_evidence` receives
    # A kind may change these defaults
    default_batch: ClassVar[int] = 64  # windows per batch
    default_spacing_um_px: ClassVar[float] = 0.5  # pixel spacing if the recipe sets none
    # Inputs that are rotated to measure robustness: windows, or fields (annotated images, for which maps are predicted)
    robustness_inputs: ClassVar[Literal["windows", "fields"]] = "windows"
    rules: ClassVar[tuple[str, ...]] = ()  # names of the rules for counting true positives; the first is the default
    regime_unit: ClassVar[str] = "images"  # unit of a regime, which is a reduced amount of training data
    can_mine: ClassVar[bool] = False  # whether `find_hard_examples` is implemented
    drawn_as: ClassVar[DrawnAs] = "regions"  # how objects and the heat map are drawn on a slide (`draw_overlay`)
    object_score: ClassVar[str] = "probability"  # name of the measurement of an object that states its score
    heatmap_cell: ClassVar[int] = 1  # each heat-map pixel is the mean over cell × cell outputs
    needs_pixels: ClassVar[bool] = False  # whether `Tile.pixels` is needed to find and measure objects on slides
    # Whether objects are cut at the border of a region of interest. If not, an object is in it if its center is inside.
    cuts_at_roi: ClassVar[bool] = False

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
        """Return the class index of an annotated object with the class name `name`; None if the task has no such class.

        If `uses_class_names` is False, the index of every object is 0. An object without a class has an empty `name`:
        its index is 0 if the task has a single class; if the task has several classes, DataError is raised. `sample` is
        the image of the object, for the error message.
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

    def resolve_classes(self, names: Sequence[str]) -> tuple[str, ...]:
        """Return class names as the task spells them, in the order of its classes. Raises DataError for other names.

        `names` may also be a single name.
        """
        names = [names] if isinstance(names, str) else names
        known = {name.casefold(): name for name in self.class_names}
        if not all(name.strip() for name in names):
            raise DataError(
                f"The name of a class is empty; choose from {', '.join(self.class_names)}, or choose no classes, which "
                f"stands for all."
            )
        if unknown := [name for name in names if name.strip().casefold() not in known]:
            raise DataError(f"The model has no class {unknown[0]!r}; choose from {', '.join(self.class_names)}.")
        chosen = {known[name.strip().casefold()] for name in names}
        return tuple(name for name in self.class_names if name in chosen)

    @classmethod
    def find_classes(cls, dataset: Dataset) -> tuple[str, ...]:
        """Return the class names in the annotations of a dataset, for tasks without classes of their own.

        If images have labels, the names are in the order of `dataset.classes`, followed by all other names, sorted. If
        objects are annotated, the names are sorted.
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
        """Name of the activation function that `to_probabilities` applies, for the description of exported models."""
        return "sigmoid" if self.outputs == 1 else "softmax"

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (B, K, h, w) to probabilities of the same shape: by sigmoid if K = 1, else by softmax."""
        return activate(logits)

    # Checks of the data, before the training writes its first file

    def check_data(self, dataset: Dataset) -> list[Finding]:
        """Return the problems in the annotations of a dataset, such as unknown classes. By default, there are none."""
        del dataset
        return []

    def check_training(self, samples: Sequence[Sample]) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the task cannot be learned from the training samples. By default, nothing is checked."""

    def check_window(self, window: TrainingWindow) -> None:  # noqa: B027  # optional, so not abstract
        """Raise DataError if the task cannot use a network's outputs in a window. By default, nothing is checked."""

    # Regimes: training with a reduced amount of data

    @abstractmethod
    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Return a random subset of the training samples, for a regime (reduced amount of training data).

        `amount` is the size of the subset in the unit that `describe_regime` states. For the same seed, a smaller
        subset is contained in every larger subset.
        """

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        """Return None if `amount` is valid, otherwise a description of the valid amounts.

        `amount` is the amount of training data of a regime. An example of a description is "a whole number of images".
        """
        is_whole = amount >= 1 and float(amount).is_integer()
        return None if is_whole else f"a whole number of {cls.regime_unit}"

    @classmethod
    def describe_regime(cls, amount: float) -> str:
        """Return the amount of training data of a regime with its unit, such as "20 images", for reports."""
        unit = cls.regime_unit if amount != 1 else re.sub(r"s\b", "", cls.regime_unit, count=1)  # "1 case"
        return f"{amount:g} {unit}"

    def require_regime(self, amount: float) -> None:
        """Raise DataError if `amount` is not a valid amount of training data for a regime."""
        if expected := self.check_regime(amount):
            raise DataError(
                f"For the task {self.name}, the key 'regime' (amount of training data) must be {expected}; got "
                f"{amount:g}."
            )

    # Training

    @property
    def reader(self) -> SampleReader:
        """Object that reads the pixels of a sample and, if the task needs them, its target maps."""
        return SampleReader(self.spacing_um_px, self.stain)

    def image_targets(self, samples: Sequence[Sample]) -> Ints:
        """Return the target (n,) of each of n images, such as its class index. By default, all targets are 0."""
        return np.zeros(len(samples), np.int64)

    def count_windows(self, samples: Sequence[Sample], window: TrainingWindow) -> int:
        """Return the number of training windows that show the samples once; by default, one window for each sample."""
        del window
        return len(samples)

    @abstractmethod
    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler that chooses the windows of each training batch.

        `settings` contains the size of each image, the batch size and the seed. `window` contains the size of a window,
        and of the area in a window that the network predicts. `mined` contains hard examples, as returned by
        `examples_for_sampler`. It is None if the recipe does not mine hard examples. `settings.sampler` states how
        often each class is drawn.
        """

    @abstractmethod
    def make_loss(self, samples: Sequence[Sample], weights: LossWeights | None = None) -> Loss:
        """Return the loss, a function of logits (B, K, h, w) and targets.

        If `reader` reads no target maps, targets are (B,), one number for each window. Otherwise, they are (B, h, w)
        for one target map, and (B, k, h, w) for k target maps. `samples` are the training samples; a loss may use them,
        for example to compute weights for rare classes. `weights` states whether rare classes have higher weights; None
        means the default of the kind. It is only given if the recipe has the key `loss_weights`.
        """

    @abstractmethod
    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the accuracy of a validation batch, a scalar tensor for the log. Arguments are those of the loss."""

    def find_hard_examples(self, evidence: Sequence[Evidence], max_examples: int) -> list[HardExample]:
        """Return up to `max_examples` mistakes of a baseline network on the training samples, the worst first.

        The baseline network was trained without hard examples. `evidence` contains the result of `collect_evidence` for
        each training sample. A kind that implements this method must set `can_mine` to True. The method is only called
        if the recipe mines hard examples.
        """
        del evidence, max_examples
        raise DataError(f"Hard examples cannot be mined for tasks of the kind {self.kind!r}; set mining=false.")

    def examples_for_sampler(self, examples: Ints) -> Ints:
        """Convert an array of hard examples to the argument `mined` of `make_sampler`.

        `examples` (k, 3) has the columns image index, row and column. By default, it is returned unchanged.
        """
        return examples

    # Evaluation

    @abstractmethod
    def collect_evidence(self, prediction: Any, sample: Sample) -> Evidence:
        """Return the evidence of one sample: its prediction and its ground truth, in a form that `score` can use.

        If `prediction_type` is "window", `prediction` is an array of probabilities (K,). If `prediction_type` is "map",
        `prediction` is a `rotopath.inference.Prediction` with maps (K, h, w) of the whole image.
        """

    @abstractmethod
    def choose_operating_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        """Return the decision thresholds, by name, with the best scores on the validation set.

        `evidence` contains the result of `collect_evidence` for each validation sample; `rule` is as in `score`.
        """

    @abstractmethod
    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        """Return the operating point of a model file if it is valid for the task, otherwise raise ValueError."""

    @abstractmethod
    def score(self, evidence: Sequence[Evidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return all scores of a split at an operating point, by name. The score `score_name` is the main score.

        `evidence` contains the result of `collect_evidence` for each sample of the split. `rule` is the name of the
        rule for counting true positives; None means the first of `rules`.
        """

    @classmethod
    @abstractmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return two numbers for each case, such as a patient: the numerator and the denominator of the main score.

        The main score is the sum of all numerators divided by the sum of all denominators. Studies resample the cases
        to compute 95 % confidence intervals. `scores` is the result of `score`, read from a JSON file.
        """

    def resolve_rule(self, rule: str | None) -> str:
        """Return `rule`, a rule for counting true positives, or the default rule of the task if `rule` is None.

        The default is an empty string if the task has no rules. Raises DataError if the task does not have the rule.
        """
        if rule is None:
            return self.rules[0] if self.rules else ""
        if rule not in self.rules:
            remedy = f"choose from {', '.join(self.rules)}" if self.rules else "give no rule, as this task has none"
            raise DataError(f"The task {self.name} has no rule {rule!r} for counting true positives; {remedy}.")
        return rule

    def decide(self, probabilities: NDArray[np.floating], point: OperatingPoint) -> NDArray[np.generic]:
        """Convert probabilities (..., K) to decisions (...,), to measure how often rotation changes a decision.

        If K = 1, a decision is whether the probability reaches `point["threshold"]`. Otherwise, a decision is the index
        of the channel with the highest probability.
        """
        if probabilities.shape[-1] == 1:
            return np.asarray(probabilities[..., 0] >= point["threshold"])
        return np.asarray(probabilities.argmax(axis=-1))

    def maps_for_report(self, maps: Map) -> dict[str, Map]:
        """Convert probabilities (K, h, w) to a dictionary of the maps (h, w) that reports show.

        The map "objects" is required. It contains the probability that an object of any class is present, and is used
        to measure robustness. The dictionary may contain other maps with any names.
        """
        return {"objects": self.foreground_map(maps)}

    # Slides

    def describe_operating_point(self, point: OperatingPoint) -> str:
        """Return the thresholds of an operating point as a user can choose them (see `adjust_operating_point`)."""
        return ", ".join(f"{name} {value:.4g}" for name, value in point.items())

    @property
    def measurement_names(self) -> tuple[str, ...]:
        """Names of the measurements of the objects on slides, in order, without "deviation", for tables without rows.

        By default, there are no names: tables without rows have no columns of measurements.
        """
        return ()

    def adjust_operating_point(
        self, point: OperatingPoint, threshold: float | None = None, min_area_um2: float | None = None
    ) -> dict[str, float]:
        """Return the operating point with the thresholds that a user has chosen; None keeps those of the model.

        `threshold` is the probability, from 0 to 1, from which an object is accepted: the higher, the fewer objects.
        `min_area_um2` is the area below which outlined objects are left out. Raises DataError if a value is not valid,
        or if the task has no such threshold. By default, the only threshold is `point["threshold"]`.
        """
        if threshold is not None and "threshold" not in point:
            raise DataError(f"The task {self.name} has no threshold that can be chosen; leave out the threshold.")
        if min_area_um2 is not None:
            raise DataError(f"The objects of the task {self.name} have no area; leave out the minimum area.")
        return dict(point) if threshold is None else {**point, "threshold": expect_threshold(threshold)}

    @property
    def expects_he(self) -> bool:
        """Whether the images must be H&E. False means that their stain is not known, so that no slide is unusual."""
        return self.stain == "macenko" or self.name in HE_TASKS

    def find_implausible_density(self, summary: Mapping[str, float]) -> str:
        """Return a sentence if the density of objects does not occur in tissue, otherwise "".

        `summary` is the result of `summarize`, with "tissue_mm2" added. By default, the bounds are those in
        PLAUSIBLE_PER_MM2; a task that is not in this table has none.
        """
        low, high = PLAUSIBLE_PER_MM2.get(self.name, (0.0, float("inf")))
        density = summary.get(f"{self.objects_name}_per_mm2", low)
        if low <= density <= high or summary["tissue_mm2"] < MIN_DENSITY_MM2:
            return ""
        limit = f"at most about {high:,.0f}" if density > high else f"at least about {low:,.0f}"
        return f"{density:,.0f} {self.objects_name} per mm² are not plausible: tissue has {limit}."

    @abstractmethod
    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object finder, which receives the predicted tiles of one slide and yields the objects in them.

        `grid` contains the positions of the outputs on the slide. `point` is the operating point. The object finder may
        write temporary files to `folder`.
        """

    def halo(self, stride_px: int) -> int:
        """Return the width, in outputs, of the margin around a tile that is needed to find the objects in the tile.

        By default, the width is 0. `stride_px` is the distance between two adjacent outputs, in pixels.
        """
        del stride_px
        return 0

    @abstractmethod
    def class_maps(self, maps: Map) -> Map:
        """Convert the probabilities of all channels (K, h, w) to the probability of each class (classes, h, w)."""

    def foreground_map(self, maps: Map) -> Map:
        """Convert probabilities (K, h, w) to the heat map (h, w): the probability that any class is present."""
        foreground: Map = self.class_maps(maps).sum(axis=0)
        return foreground

    def foreground_deviation(self, deviations: Map) -> Map:
        """Convert standard deviations over rotations (K, h, w) to one map (h, w): by default, the maximum over K."""
        largest: Map = deviations.max(axis=0)
        return largest

    @property
    def tissue_margin_um(self) -> float:
        """Width, in µm, of the margin around tissue that is also predicted, so that no object is cut off."""
        return 32.0

    @property
    @abstractmethod
    def background_probabilities(self) -> tuple[float, ...]:
        """Probabilities (K,) that are used at positions of a slide that are not predicted, such as empty glass."""

    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        """Return the summary of a slide: numbers by name. The number of objects, named "objects", is required.

        `counts` and `areas_mm2` contain the number and the total area of the objects of each class. `tissue_mm2` is the
        area of the tissue. By default, the summary contains the number and the density (per mm² of tissue) of all
        objects. If there are several classes, it also contains the number and the density of the objects of each class
        in `counts`. Classes that the user has not requested are missing there; all others are there, if only with 0.
        """
        del areas_mm2
        total = sum(counts.values())
        summary = {"objects": total, f"{self.objects_name}_per_mm2": total / tissue_mm2 if tissue_mm2 else 0.0}
        if not self.is_single:
            for name in counts:
                density = counts[name] / tissue_mm2 if tissue_mm2 else 0.0
                summary |= {name: counts[name], f"{name}_per_mm2": density}
        return summary

    def describe_summary(self, summary: Mapping[str, float]) -> str:
        """Return a summary as one line of text. `summary` is the result of `summarize`, with "tissue_mm2" added."""
        count = int(summary["objects"])
        name = self.class_names[0].lower() if count == 1 and self.is_single else self.objects_name
        by_class = (
            ""
            if self.is_single
            else ", ".join(f"{summary[name]:,.0f} {name}" for name in self.class_names if name in summary)
        )
        density = f"{format_density(summary[f'{self.objects_name}_per_mm2'])} per mm²"
        tissue = f"{format_area(summary['tissue_mm2'])} of tissue"
        return f"{count:,} {name}{f' ({by_class})' if by_class else ''}, {density} in {tissue}"


def format_density(per_mm2: float) -> str:
    """Format a density with three significant digits, because the area of tissue is not known better.

    >>> from rotopath.tasks.task import format_density
    >>> format_density(5231.96), format_density(12.04), format_density(0.5), format_density(0.0)
    ('5,230', '12', '0.5', '0')
    """
    return f"{float(f'{per_mm2:.3g}'):,.10g}"


def format_area(mm2: float) -> str:
    """Format an area in mm² with two decimals, or below 0.1 mm² with two significant digits.

    >>> from rotopath.tasks.task import format_area
    >>> format_area(12.3456), format_area(0.0156)
    ('12.35 mm²', '0.016 mm²')
    """
    return f"{mm2:.2f} mm²" if mm2 >= 0.1 or mm2 == 0 else f"{mm2:.2g} mm²"


def expect_threshold(threshold: float) -> float:
    """Return the threshold that a user has chosen. Raises DataError unless it is a probability, from 0 to 1."""
    if not 0 <= threshold <= 1:
        raise DataError(f"The threshold is {threshold:g}, but it is a probability; choose a number from 0 to 1.")
    return float(threshold)


def expect_area(min_area_um2: float) -> float:
    """Return the minimum area in µm² that a user has chosen. Raises DataError unless it is 0 or more, and finite."""
    if not 0 <= min_area_um2 < float("inf"):
        raise DataError(f"The minimum area is {min_area_um2:g} µm²; choose a finite number, 0 or more.")
    return float(min_area_um2)


def check_numbers(point: Mapping[str, object], bounds: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Return the operating point `point` if it is valid, otherwise raise ValueError.

    `bounds` contains the names of all thresholds, and the lowest and the highest valid value of each. `point` must have
    exactly these names.
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
