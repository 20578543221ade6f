"""Classify: predict one class for each window, such as tumor or normal; on a slide, outline the regions of each class.

With a single class, the network predicts the probability that the class is present. The class is predicted as present
if this probability reaches a threshold, which is chosen to give the highest accuracy on the validation set. With
several classes, the network predicts a probability for each class, and the most probable class is the prediction.
"""

import math
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from rotopath.data import DataError, Dataset, Finding, Sample
from rotopath.data.sampling import ClassBalancedSampler, ImageSampler, Ints, Sampler, SamplerSettings
from rotopath.data.splits import select_fraction
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import trace_outlines
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.inference.tiling import Grid, Run, Tile, run_here
from rotopath.metrics.classification import (
    Floats,
    auc_interval,
    balanced_accuracy,
    best_accuracy_threshold,
    binary_or_macro_auc,
    calibration_error,
    confusion_matrix,
    reliability_curve,
    score_each_class,
    score_interval,
    sum_by_case,
)
from rotopath.metrics.matching import remove_small
from rotopath.tasks.task import (
    HardExample,
    Loss,
    LossWeights,
    Map,
    OperatingPoint,
    Scores,
    Task,
    TrainingWindow,
    check_numbers,
    expect_area,
    format_area,
)

# The smallest region that is outlined on a slide: a square of 24 × 24 µm if there is an output every 12 µm
MIN_REGION_OUTPUTS = 4
LARGEST_TEST_SET = 10**7  # more images than this in a file of scores are a mistake; PCam has 32,768


class WindowTask(Task):
    """Base class of `Classify` and `Detect`, whose training windows have one label each.

    The network therefore returns a map of 1 × 1 positions for a training window. The loss is binary cross-entropy for a
    task with a single class, and cross-entropy over all channels for a task with several classes.
    """

    def check_window(self, window: TrainingWindow) -> None:
        """Raise DataError unless the network returns a map of 1 × 1 positions for a training window."""
        positions = window.target_px // window.stride_px
        if positions != 1:
            raise DataError(
                f"A training window must have one output, but in windows of {window.window_px} px the network has "
                f"{positions} × {positions} outputs; set 'window_px' to the smallest window that the network accepts."
            )

    def make_loss(self, samples: Sequence[Sample], weights: LossWeights | None = None) -> Loss:
        """Return the loss: cross-entropy, averaged over the windows of a batch.

        By default, all windows have equal weights. If `weights` is "balanced", rare classes have higher weights.
        """
        if weights != "balanced":
            return binary_cross_entropy if self.is_single else cross_entropy
        by_label = torch.from_numpy(self.find_label_weights(samples))
        function = binary_cross_entropy if self.is_single else cross_entropy
        return lambda logits, labels: function(logits, labels, by_label.to(logits)[labels])

    def find_label_weights(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """Return the weight of each label in a balanced loss: n / (k · n_l) for k labels and n_l of n images."""
        return balance_labels(self.image_targets(samples))

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the fraction of correctly classified windows in a batch, as a scalar tensor.

        `logits` are (B, K, 1, 1) or (B, K); `targets` (B,) are the correct class indices. If K = 1, a target is 1 if
        the class is present and 0 if not, and the class is predicted as present if the logit is above 0.
        """
        if logits.shape[1] == 1:
            return ((logits.flatten() > 0) == (targets == 1)).double().mean()
        return (logits.flatten(1).argmax(dim=1) == targets).double().mean()


@dataclass(frozen=True, slots=True)
class PatchEvidence:
    """Predicted probabilities and true label of one patch, from which the scores are computed."""

    name: str
    case: str  # name of the slide that contains the patch; empty if unknown
    label: int  # index of the true label in `Classify.label_names`
    probabilities: tuple[float, ...]  # (K,), one for each class


class Classify(WindowTask):
    """Task of predicting the class of each window or, with a single class, whether this class is present."""

    kind = "classify"
    annotated = "labels"
    score_name = "accuracy"
    default_network = "tumor"
    default_spacing_um_px = 1.0
    prediction_type = "window"
    regime_unit = "of each class"
    can_mine = True
    cuts_at_roi = True

    @property
    def outputs(self) -> int:
        return len(self.classes)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels 0, 1, … of images. With a single class, 0 is the background and 1 is the class."""
        return (self.background_name, self.class_names[0]) if self.is_single else self.class_names

    def label_index(self, sample: Sample) -> int:
        """Convert the label of a sample to an index of `label_names`.

        The label may be one of these names, in upper or lower case, or the index itself if none of the names is a
        number. Raises DataError if the sample has no label or an unknown label.
        """
        names = [name.casefold() for name in self.label_names]
        text = (sample.label or "").casefold()
        if text in names:
            return names.index(text)
        if text.isdecimal() and int(text) < len(names) and not any(name.isdecimal() for name in names):
            return int(text)
        expected = ", ".join(f"{i} ({name})" for i, name in enumerate(self.label_names))
        actual = f"has the label {sample.label!r}" if sample.label else "has no label"
        raise DataError(f"{sample.name} {actual}; expected one of {expected}.")

    # Data

    def check_data(self, dataset: Dataset) -> list[Finding]:
        """Return a problem for each different label in the dataset that `label_index` does not accept."""
        first_samples: dict[str | None, Sample] = {}
        for sample in dataset.samples:
            first_samples.setdefault(sample.label, sample)
        findings = []
        for sample in first_samples.values():
            try:
                self.label_index(sample)
            except DataError as error:
                findings.append(Finding("", str(error)))
        return findings

    def check_training(self, samples: Sequence[Sample]) -> None:
        """Raise DataError unless each of `label_names` is the label of at least one training sample."""
        require_every_class(self.label_names, self.image_targets(samples))

    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Return randomly selected samples: the fraction `amount` of the samples of each label, but at least one."""
        return tuple(samples[i] for i in select_fraction(self.image_targets(samples), amount, seed))

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        return None if 0 < amount <= 1 else "a fraction of each class, above 0 and up to 1"

    @classmethod
    def describe_regime(cls, amount: float) -> str:
        return f"{amount:.0%}"

    # Training

    def image_targets(self, samples: Sequence[Sample]) -> Ints:
        return np.array([self.label_index(sample) for sample in samples], np.int64)

    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler that draws the same number of windows of every label, unless it is to be natural.

        If a label has hard examples (`mined`, indices of samples), half of its windows are from these samples.
        """
        del window
        if settings.sampler == "natural":
            return ImageSampler(self.image_targets(samples), settings, mined)
        return ClassBalancedSampler(self.image_targets(samples), self.label_names, settings, mined)

    def find_hard_examples(self, evidence: Sequence[PatchEvidence], max_examples: int) -> list[HardExample]:
        """Return the worst misclassified patches, the worst first.

        A patch is worse if the predicted probability of its true label is lower. If there are L labels, at most
        `max_examples` // L patches of each label are returned.
        """
        examples: list[HardExample] = []
        per_label = max_examples // len(self.label_names)
        for label in range(len(self.label_names)):
            wrong = [
                HardExample(patch.name, 0, 0, 1 - self._probability_of_label(patch))
                for patch in evidence
                if patch.label == label and self._is_wrong(patch)
            ]
            examples += sorted(wrong, key=lambda example: -example.score)[:per_label]
        return sorted(examples, key=lambda example: -example.score)

    def examples_for_sampler(self, examples: Ints) -> Ints:
        return examples[:, 0]

    def _probability_of_label(self, patch: PatchEvidence) -> float:
        """Return the probability that the model predicted for the true label of a patch."""
        if not self.is_single:
            return patch.probabilities[patch.label]
        present = patch.probabilities[0]
        return present if patch.label == 1 else 1 - present

    def _is_wrong(self, patch: PatchEvidence) -> bool:
        """Return whether the most probable label of a patch is not its true label. The operating point is not used."""
        if self.is_single:
            return self._probability_of_label(patch) < 0.5
        return int(np.argmax(patch.probabilities)) != patch.label

    # Evaluation

    def collect_evidence(self, prediction: NDArray[np.floating], sample: Sample) -> PatchEvidence:
        probabilities = tuple(float(value) for value in np.atleast_1d(prediction))
        return PatchEvidence(sample.name, sample.case, self.label_index(sample), probabilities)

    def choose_operating_point(self, evidence: Sequence[PatchEvidence], rule: str | None = None) -> dict[str, float]:
        """Return the threshold with the highest accuracy, as {"threshold": value}. `rule` is ignored.

        With several classes, there is no threshold, and the dictionary is empty.
        """
        del rule
        labels, probabilities = _stack_evidence(evidence)
        return {"threshold": best_accuracy_threshold(labels, probabilities[:, 0])} if self.is_single else {}

    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        # If it is most accurate to classify all patches as background, even those with a probability of 1, the best
        # threshold is just above 1.
        return check_numbers(point, {"threshold": (0.0, math.nextafter(1.0, 2.0))} if self.is_single else {})

    def score(self, evidence: Sequence[PatchEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return accuracy, AUC, confusion matrix and calibration. `rule` is ignored.

        Accuracy and AUC have 95 % confidence intervals. To compute these intervals, slides are resampled. If the slides
        of the patches are unknown, patches are resampled.
        """
        del rule
        labels, probabilities = _stack_evidence(evidence)
        decided = self.decide(probabilities, point).astype(np.int64)
        correct = decided == labels
        # If every patch has a different case, the cases are names of patches, and the slides are unknown.
        cases = [patch.case for patch in evidence]
        by_slide = all(cases) and len(set(cases)) < len(cases)
        units = cases if by_slide else [str(i) for i in range(len(evidence))]
        names, sums = sum_by_case(units, np.stack([correct, np.ones(len(correct))], axis=1))
        slides = dict(zip(names, sums.tolist(), strict=True))  # for each slide: [correct patches, all patches]
        scores: Scores = {**point, "images": len(evidence)}
        for i, name in enumerate(self.label_names):
            if not (self.is_single and i == 0):
                scores[f"{name.lower()}_images"] = int((labels == i).sum())
        area = binary_or_macro_auc(labels, probabilities)
        confusion = confusion_matrix(labels, decided, len(self.label_names))
        scores |= {
            "accuracy": float(correct.mean()),
            "accuracy_interval": score_interval(lambda total: float(total[0] / total[1]), sums),
            "interval_over": "slides" if by_slide else "patches",
            "balanced_accuracy": balanced_accuracy(labels, decided, len(self.label_names)),
            "slides": slides if by_slide else None,
            "wrong": None if by_slide else np.flatnonzero(~correct).tolist(),  # indices of patches
            "auc": None if math.isnan(area) else area,
            "auc_interval": auc_interval(labels, probabilities, units),
            "confusion": {"classes": list(self.label_names), "rows_are_truth": confusion.tolist()},
        }
        if self.is_single:
            calibrated = labels, probabilities[:, 0]
        else:
            scores["classes"] = score_each_class(self.label_names, confusion, labels, probabilities)
            calibrated = correct.astype(np.int64), probabilities.max(axis=1)  # probability of the predicted class
        return scores | {
            "calibration_error": calibration_error(*calibrated),
            "reliability": [
                {"predicted": float(predicted), "observed": float(observed), "count": int(count)}
                for predicted, observed, count in zip(*reliability_curve(*calibrated), strict=True)
            ],
        }

    @classmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return the number of correctly classified patches and the number of all patches of each slide.

        If the slides are unknown, return these two numbers for each patch: 1 or 0, and 1.
        """
        if scores["slides"] is not None:
            return {slide: (correct, patches) for slide, (correct, patches) in scores["slides"].items()}
        if (images := scores["images"]) > LARGEST_TEST_SET:
            raise ValueError(f"{images} images are more than {LARGEST_TEST_SET}")
        wrong = set(scores["wrong"])
        return {str(i): (float(i not in wrong), 1.0) for i in range(images)}

    # Slides

    def adjust_operating_point(
        self, point: OperatingPoint, threshold: float | None = None, min_area_um2: float | None = None
    ) -> dict[str, float]:
        """Return the operating point with the thresholds that a user has chosen.

        With several classes there is no threshold, because the most probable class is the prediction.
        """
        if threshold is not None and not self.is_single:
            raise DataError(
                f"The model has {len(self.classes)} classes, of which the most probable one is the prediction; leave "
                f"out the threshold."
            )
        adjusted = super().adjust_operating_point(point, threshold)
        return adjusted if min_area_um2 is None else {**adjusted, "min_area_um2": expect_area(min_area_um2)}

    def describe_operating_point(self, point: OperatingPoint) -> str:
        if not self.is_single:
            return "none, because the most probable class is the prediction"
        return super().describe_operating_point(point)

    @property
    def measurement_names(self) -> tuple[str, ...]:
        return ("area_mm2", "probability")

    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object finder that collects the tiles of a slide, and outlines regions after the last tile."""
        del folder  # temporary files are not needed: the maps fit in memory, because one output covers many pixels
        return RegionFinder(self, grid, point)

    def class_maps(self, maps: Map) -> Map:
        return maps

    def foreground_map(self, maps: Map) -> Map:
        """Return the probability (h, w) of the most probable class."""
        highest: Map = maps.max(axis=0)
        return highest

    @property
    def tissue_margin_um(self) -> float:
        """Width, in µm, of the margin around tissue that is also predicted.

        With several classes the width is 0, because the model would predict one of the classes also for empty glass.
        """
        return super().tissue_margin_um if self.is_single else 0.0

    @property
    def background_probabilities(self) -> tuple[float, ...]:
        return (0.0,) * self.outputs

    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        """Return the number of all regions, and the area of the tissue in those of each class.

        The area is given in mm² (such as "tumor_mm2"), and as a fraction of the area of tissue (such as "tumor_share").
        """
        summary: dict[str, float] = {"objects": sum(counts.values())}
        for name in areas_mm2:
            part = min(1.0, areas_mm2[name] / tissue_mm2) if tissue_mm2 else 0.0  # rounding may exceed 1
            summary |= {f"{name.lower()}_mm2": areas_mm2[name], f"{name.lower()}_share": part}
        return summary

    def describe_summary(self, summary: Mapping[str, float]) -> str:
        shares = {name.lower(): summary.get(f"{name.lower()}_share") for name in self.class_names}
        parts = ", ".join(f"{name} in {share:.1%}" for name, share in shares.items() if share is not None)
        return f"{parts} of {format_area(summary['tissue_mm2'])} of tissue"


class RegionFinder:
    """Collects the maps of a slide tile by tile, and outlines the regions of each class after the last tile.

    `tissue_mm2` is the area of the tissue at each output. It must be set before the regions are found.
    """

    def __init__(self, task: Classify, grid: Grid, point: OperatingPoint) -> None:
        self._task, self._grid, self._point = task, grid, point
        self._maps = np.zeros((task.outputs, *grid.size), np.float32)
        self._deviation = np.zeros(grid.size, np.float32)
        self.tissue_mm2 = np.zeros(grid.size)
        self._has_deviation = False

    def find(self, tiles: Iterable[Tile], run: Run = run_here) -> Generator[SlideObject]:
        """Copy the tiles into maps and then, after the last tile, yield the regions of each class."""
        del run  # outlining a few large regions is fast
        for tile in tiles:
            area = (slice(*tile.rows), slice(*tile.columns))
            self._maps[:, *area] = tile.probabilities[:, *tile.core]
            if tile.deviations is not None:
                self._has_deviation = True
                self._deviation[area] = self._task.foreground_deviation(tile.deviations)[tile.core]
        yield from self._outline_regions()

    def _outline_regions(self) -> Iterator[SlideObject]:
        """Yield the regions of the first class, then those of the second class, and so on.

        A region is a set of connected outputs with the same predicted class. Its outline may have holes. Regions of
        fewer than `MIN_REGION_OUTPUTS` outputs are dropped, and smaller holes are filled.
        """
        grid, task = self._grid, self._task
        best = np.zeros(grid.size, np.int64) if task.is_single else self._maps.argmax(axis=0)
        # Outputs that were not predicted, such as glass, have probabilities of 0. They belong to no class.
        least = max(self._point["threshold"] if task.is_single else 0.0, np.finfo(np.float32).tiny)
        output_um = grid.stride_px * grid.spacing_um_px
        min_area_um2 = self._point.get("min_area_um2", 0.0)
        for index, region_class in enumerate(task.classes):
            regions, _ = ndimage.label(remove_speckle((best == index) & (self._maps[index] >= least)))
            regions = remove_small(regions, min_area_um2 / output_um**2)
            count = int(regions.max(initial=0))
            numbers = np.arange(1, count + 1)
            probability = ndimage.mean(self._maps[index], regions, numbers)
            deviation = ndimage.mean(self._deviation, regions, numbers)
            areas_mm2 = np.bincount(regions.ravel(), self.tissue_mm2.ravel(), minlength=count + 1)[1:]
            for number, polygons in trace_outlines(regions, *grid.output_frame()).items():
                measurements = {"area_mm2": areas_mm2[number - 1], "probability": probability[number - 1]}
                if self._has_deviation:
                    measurements["deviation"] = deviation[number - 1]
                yield SlideObject(polygons, "annotation", region_class.name, region_class.color, measurements)


def remove_speckle(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return a mask (h, w) without regions, and without holes, of fewer than `MIN_REGION_OUTPUTS` outputs.

    In a mask with fewer outputs, regions must cover the whole mask. Regions and holes are 4-connected. Background that
    reaches the edge of the mask is not a hole.
    """
    least = min(MIN_REGION_OUTPUTS, mask.size)
    regions, _ = ndimage.label(mask)
    kept = remove_small(regions, least) > 0
    holes, _ = ndimage.label(~kept)
    edge = np.concatenate([holes[0], holes[-1], holes[:, 0], holes[:, -1]])
    is_filled = np.bincount(holes.ravel()) < least
    is_filled[0] = False
    is_filled[edge] = False
    filled: NDArray[np.bool_] = kept | is_filled[holes]
    return filled


# Losses


def binary_cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean binary cross-entropy of logits (B, 1, 1, 1) or (B, 1) and labels (B,), 0 or 1.

    `weights` (B,) are factors for the losses of the windows.
    """
    _require_one_position(logits, labels)
    return F.binary_cross_entropy_with_logits(logits.flatten(), labels.to(logits.dtype), weights)


def cross_entropy(logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean cross-entropy of logits (B, K, 1, 1) or (B, K) and class indices (B,).

    `weights` (B,) are factors for the losses of the windows.
    """
    _require_one_position(logits, labels)
    if weights is None:
        return F.cross_entropy(logits.flatten(1), labels)
    return (F.cross_entropy(logits.flatten(1), labels, reduction="none") * weights).mean()


def balance_labels(labels: Ints) -> NDArray[np.float32]:
    """Return a weight for each label from 0 to the highest: higher for rare labels, and 1 on average over `labels`."""
    counts = np.bincount(labels)
    return np.asarray(len(labels) / (len(counts) * np.maximum(counts, 1)), np.float32)


def _require_one_position(logits: Tensor, labels: Tensor) -> None:
    """Raise ValueError unless logits (B, K, 1, 1) or (B, K) have one position for each of the labels (B,)."""
    if logits.shape[:1] != labels.shape or logits.shape[2:].numel() != 1:
        raise ValueError(
            f"The logits have the shape {tuple(logits.shape)}, but each of the {len(labels)} labels needs one output; "
            f"train on windows of the size of the network's receptive field."
        )


def require_every_class(names: Sequence[str], labels: Ints) -> None:
    """Raise DataError if a class does not occur in the labels of the training data.

    `names` are the class names; `labels` (n,) are indices of these names.
    """
    for index, name in enumerate(names):
        if not (labels == index).any():
            raise DataError(
                f"No training image has an annotation of class {name!r}; every class is needed, so add annotations of "
                f"this class, or change 'classes' in the recipe."
            )


def _stack_evidence(evidence: Sequence[PatchEvidence]) -> tuple[Ints, Floats]:
    """Return the labels (n,) and the probabilities (n, K) of n patches. Raises ValueError if there are no patches."""
    if not evidence:
        raise ValueError("There are no patches to score; choose a split that contains patches.")
    labels = np.array([patch.label for patch in evidence], np.int64)
    return labels, np.array([patch.probabilities for patch in evidence], np.float64)
