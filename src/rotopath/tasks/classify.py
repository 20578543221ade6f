"""Classify: one class for each window, as of tumor or no tumor; on a slide, regions of each class.

With a single class the question is whether it is there: one logit, and a threshold with the highest accuracy on the
validation set. With several, each window has exactly one of them: a logit each, and the likeliest class wins.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from torch import Tensor

from rotopath.data import DataError, Dataset, Finding, Sample
from rotopath.data.sampling import ClassWindows, Ints, Sampler
from rotopath.data.splits import take_fraction
from rotopath.images.geojson import SlideObject, trace_outlines
from rotopath.inference.slide_pass import Grid, Tile
from rotopath.metrics.bootstrap import FEWEST_CASES, confidence_interval, find_interval, sum_by_case
from rotopath.metrics.classification import (
    auc,
    balanced_accuracy,
    best_threshold,
    calibration,
    calibration_error,
    confusion_matrix,
    macro_auc,
)
from rotopath.tasks.task import (
    Example,
    Finder,
    Frame,
    Loss,
    Map,
    OperatingPoint,
    Scores,
    Task,
    expect_numbers,
    fraction,
    spell_area,
)


@dataclass(frozen=True, slots=True)
class PatchEvidence:
    """One patch: the number of its class, and the probabilities of all classes."""

    name: str
    case: str  # its slide; empty where that is not known
    label: int
    probabilities: tuple[float, ...]


class Classify(Task):
    """One of K classes for a window; with a single class, whether it is there."""

    kind = "classify"
    annotated = "labels"
    score_name = "accuracy"
    default_network = "tumor"
    default_spacing_um_px = 1.0
    answers = "window"
    regime_unit = "of each class"
    can_mine = True

    @property
    def outputs(self) -> int:
        return len(self.classes)

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names

    @property
    def activation(self) -> str:  # type: ignore[override]
        return "sigmoid" if self.is_single else "softmax"

    @property
    def label_names(self) -> tuple[str, ...]:
        """What the numbers of labels stand for."""
        return (self.absent, self.class_names[0]) if self.is_single else self.class_names

    def label_of(self, sample: Sample) -> int:
        """The number of a sample's class: by name, or as a number from 0."""
        names = [name.casefold() for name in self.label_names]
        text = (sample.label or "").casefold()
        if text in names:
            return names.index(text)
        if text.isdecimal() and int(text) < len(names) and not any(name.isdecimal() for name in names):
            return int(text)
        expected = ", ".join(f"{i} ({name})" for i, name in enumerate(self.label_names))
        found = f"has the label {sample.label!r}" if sample.label else "has no label"
        raise DataError(f"{sample.name} {found}; expected is one of {expected}.")

    # Training

    def check_data(self, dataset: Dataset) -> list[Finding]:
        findings = []
        seen: set[str | None] = set()
        for sample in dataset.samples:
            if sample.label not in seen:
                seen.add(sample.label)
                try:
                    self.label_of(sample)
                except DataError as error:
                    findings.append(Finding("", str(error)))
        return findings

    def make_sampler(
        self, samples: Sequence[Sample], sizes_px: Ints, frame: Frame, batch: int, seed: int, mined: Ints | None
    ) -> Sampler:
        return ClassWindows(self.labels(samples), self.label_names, sizes_px, frame.window_px, batch, seed, mined)

    def labels(self, samples: Sequence[Sample]) -> Ints:
        return np.array([self.label_of(sample) for sample in samples], np.int64)

    def check_frame(self, frame: Frame) -> None:
        expect_one_answer(frame)

    def check_training(self, samples: Sequence[Sample]) -> None:
        expect_every_class(self.label_names, self.labels(samples))

    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        del samples
        return binary_cross_entropy if self.is_single else cross_entropy

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return window_accuracy(logits, targets)

    def take_regime(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        try:
            return tuple(samples[i] for i in take_fraction(self.labels(samples), amount, seed))
        except DataError:
            raise
        except ValueError as error:
            raise DataError(str(error)) from None

    @classmethod
    def check_regime(cls, amount: float) -> str | None:
        return None if 0 < amount <= 1 else "a fraction of each class, over 0 and up to 1,"

    @classmethod
    def describe_regime(cls, amount: float) -> str:
        return f"{amount:.0%}"

    def mine(self, evidence: Sequence[PatchEvidence], most: int) -> list[Example]:
        """Of every class the patches that were taken for another, the worst first."""
        examples: list[Example] = []
        for label in range(len(self.label_names)):
            members = [each for each in evidence if each.label == label]
            errors = [Example(each.name, 0, 0, 1 - self._probability_of(each)) for each in members]
            wrong = [error for each, error in zip(members, errors, strict=True) if self._is_wrong(each)]
            examples += sorted(wrong, key=lambda example: -example.score)[: most // len(self.label_names)]
        return sorted(examples, key=lambda example: -example.score)

    def number_examples(self, places: Ints) -> Ints:
        return places[:, 0]

    def _probability_of(self, evidence: PatchEvidence) -> float:
        """The probability that the patch is of the class that it has."""
        if not self.is_single:
            return evidence.probabilities[evidence.label]
        present = evidence.probabilities[0]
        return present if evidence.label == 1 else 1 - present

    def _is_wrong(self, evidence: PatchEvidence) -> bool:
        if self.is_single:
            return self._probability_of(evidence) < 0.5
        return int(np.argmax(evidence.probabilities)) != evidence.label

    # Evaluation

    def examine(self, prediction: NDArray[np.floating], sample: Sample) -> PatchEvidence:
        probabilities = tuple(float(each) for each in np.atleast_1d(prediction))
        return PatchEvidence(sample.name, sample.case, self.label_of(sample), probabilities)

    def choose_point(self, evidence: Sequence[PatchEvidence], rule: str | None = None) -> dict[str, float]:
        """The threshold with the highest accuracy; nothing where the likeliest of several classes wins."""
        del rule
        labels, probabilities = _columns(evidence)
        return {"threshold": best_threshold(labels, probabilities[:, 0])} if self.is_single else {}

    def check_point(self, point: Mapping[str, object]) -> dict[str, float]:
        # The best threshold may lie just above the highest probability, where nothing reaches it.
        return expect_numbers(point, {"threshold": (0.0, math.nextafter(1.0, 2.0))} if self.is_single else {})

    def score(self, evidence: Sequence[PatchEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Accuracy and its interval over slides, or over patches where a slide is not known; AUC; calibration."""
        del rule
        labels, probabilities = _columns(evidence)
        decided = self.decide(probabilities, point).astype(np.int64)
        right = decided == labels
        # A slide has several patches; where each has a name of its own, those are patches, and slides are not known.
        by_slide = all(each.case for each in evidence) and len({each.case for each in evidence}) < len(evidence)
        units = [each.case for each in evidence] if by_slide else [str(i) for i in range(len(evidence))]
        names, sums = sum_by_case(units, np.stack([right, np.ones(len(right))], axis=1))
        scores: Scores = {**point, "images": len(evidence)}
        for i, name in enumerate(self.label_names):
            if not (self.is_single and i == 0):
                scores[f"{name.lower()}_images"] = int((labels == i).sum())
        ranking = _rank(labels, probabilities)
        scores |= {
            "accuracy": float(right.mean()),
            "accuracy_interval": find_interval(lambda total: float(total[0] / total[1]), sums),
            "interval_over": "slides" if by_slide else "patches",
            "balanced_accuracy": balanced_accuracy(labels, decided, len(self.label_names)),
            "slides": dict(zip(names, sums.tolist(), strict=True))
            if by_slide
            else None,  # patches: right ones, and all
            "wrong": None if by_slide else np.flatnonzero(~right).tolist(),  # by their numbers
            "auc": None if math.isnan(ranking) else ranking,
            "auc_interval": _auc_interval(labels, probabilities, _members(units)),
        }
        confusion = confusion_matrix(labels, decided, len(self.label_names))
        scores["confusion"] = {"classes": list(self.label_names), "rows_are_truth": confusion.tolist()}
        if self.is_single:
            calibrated = labels, probabilities[:, 0]
        else:
            scores["classes"] = _describe_classes(self.label_names, confusion, labels, probabilities)
            calibrated = right.astype(np.int64), probabilities.max(axis=1)  # of the class that wins
        return scores | {
            "calibration_error": calibration_error(*calibrated),
            "reliability": [
                {"predicted": float(predicted), "observed": float(observed), "count": int(number)}
                for predicted, observed, number in zip(*calibration(*calibrated), strict=True)
            ],
        }

    @classmethod
    def tally(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """For each slide, or patch where slides are not known: right patches, and all."""
        if scores["slides"] is not None:
            return {slide: (right, patches) for slide, (right, patches) in scores["slides"].items()}
        wrong = set(scores["wrong"])
        return {str(i): (float(i not in wrong), 1.0) for i in range(scores["images"])}

    # Slides

    def make_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> Finder:
        del folder  # a map with one output in many pixels needs no files
        return RegionFinder(self, grid, point)

    def class_maps(self, maps: Map) -> Map:
        return maps

    def foreground(self, maps: Map) -> Map:
        found: Map = maps.max(axis=0)
        return found

    @property
    def margin_um(self) -> float:
        # One of several classes is everywhere, and the glass around tissue is none of them.
        return super().margin_um if self.is_single else 0.0

    @property
    def nothing(self) -> tuple[float, ...]:
        return (0.0,) * self.outputs

    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        summary: dict[str, float] = {"objects": sum(counts.values())}
        for name in self.class_names:
            part = areas_mm2[name] / tissue_mm2 if tissue_mm2 else 0.0
            summary |= {f"{name.lower()}_mm2": areas_mm2[name], f"{name.lower()}_share": min(1.0, part)}
        return summary

    def describe(self, summary: Mapping[str, float]) -> str:
        parts = ", ".join(f"{name.lower()} in {summary[f'{name.lower()}_share']:.1%}" for name in self.class_names)
        return f"{parts} of {spell_area(summary['tissue_mm2'])} of tissue"


class RegionFinder:
    """Connected regions of each class, with their holes."""

    def __init__(self, task: Classify, grid: Grid, point: OperatingPoint) -> None:
        self._task, self._grid, self._point = task, grid, point
        self._maps = np.zeros((task.outputs, *grid.size), np.float32)
        self._spread = np.zeros(grid.size, np.float32)
        self._rotated = False

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        where = (slice(*tile.rows), slice(*tile.columns))
        self._maps[:, *where] = tile.probabilities[:, *tile.core]
        if tile.deviations is not None:
            self._rotated = True
            self._spread[where] = self._task.deviation(tile.deviations)[tile.core]
        yield from ()

    def finish(self) -> Iterator[SlideObject]:
        grid, task = self._grid, self._task
        winner = np.zeros(grid.size, np.int64) if task.is_single else self._maps.argmax(axis=0)
        least = self._point["threshold"] if task.is_single else np.finfo(np.float32).tiny
        cell_um = grid.stride_px * grid.canvas.spacing_um_px
        for number, each in enumerate(task.classes):
            regions, count = ndimage.label((winner == number) & (self._maps[number] >= least))
            numbers = np.arange(1, count + 1)
            probability, spread = (
                ndimage.mean(values, regions, numbers) for values in (self._maps[number], self._spread)
            )
            areas = np.bincount(regions.ravel(), minlength=count + 1)[1:] * cell_um**2 / 1e6
            for region, parts in trace_outlines(regions, *grid.output_frame()).items():
                measured = {"area_mm2": areas[region - 1], "probability": probability[region - 1]}
                if self._rotated:
                    measured["deviation"] = spread[region - 1]
                yield SlideObject(parts, "annotation", each.name, each.color, measured)


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over windows of logits (B, 1, 1, 1) or (B, 1) and labels (B,)."""
    _expect_one_position(logits, labels)
    return F.binary_cross_entropy_with_logits(logits.flatten(), labels.to(logits.dtype))


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean over windows of logits (B, K, 1, 1) or (B, K) and numbers of classes (B,)."""
    _expect_one_position(logits, labels)
    return F.cross_entropy(logits.flatten(1), labels)


def _expect_one_position(logits: Tensor, labels: Tensor) -> None:
    if logits.shape[:1] != labels.shape or logits.shape[2:].numel() != 1:
        raise ValueError(
            f"Each of the {len(labels)} labels needs one answer, but there are logits of shape {tuple(logits.shape)}; "
            f"train on windows of the size of the receptive field."
        )


def window_accuracy(logits: Tensor, labels: Tensor) -> Tensor:
    """The fraction of windows whose likelier class is the right one."""
    if logits.shape[1] == 1:
        return fraction((logits.flatten() > 0) == (labels == 1))
    return fraction(logits.flatten(1).argmax(dim=1) == labels)


def expect_every_class(names: Sequence[str], labels: Ints) -> None:
    """Refuse training images among which a class is missing."""
    for number, name in enumerate(names):
        if not (labels == number).any():
            raise DataError(f"The training images have none of class {name!r}; every class is needed.")


def expect_one_answer(frame: Frame) -> None:
    """Refuse windows in which a network answers more than once."""
    answers = frame.target_px // frame.stride_px
    if answers != 1:
        raise DataError(
            f"A window has one answer, but in windows of {frame.window_px} px the network gives {answers} × {answers}; "
            f"set 'window_px' to the smallest window that it takes."
        )


def _columns(evidence: Sequence[PatchEvidence]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Labels (n,) and probabilities (n, K)."""
    if not evidence:
        raise ValueError("There are no patches to score.")
    labels = np.array([each.label for each in evidence], np.int64)
    return labels, np.array([each.probabilities for each in evidence], np.float64)


def _members(units: Sequence[str]) -> list[NDArray[np.int64]]:
    """The patches of each slide, by their numbers."""
    _, which = np.unique(np.array(units), return_inverse=True)
    order = np.argsort(which, kind="stable")
    return np.split(order, np.cumsum(np.bincount(which))[:-1])


def _rank(labels: NDArray[np.int64], probabilities: NDArray[np.float64]) -> float:
    return auc(labels, probabilities[:, 0]) if probabilities.shape[1] == 1 else macro_auc(labels, probabilities)


def _auc_interval(
    labels: NDArray[np.int64], probabilities: NDArray[np.float64], members: list[NDArray[np.int64]]
) -> list[float] | None:
    if len(members) < FEWEST_CASES or len(set(labels.tolist())) < 2:
        return None

    def redrawn(drawn: NDArray[np.int64]) -> float:
        chosen = np.concatenate([members[i] for i in drawn])
        return _rank(labels[chosen], probabilities[chosen])

    low, high = confidence_interval(redrawn, len(members))
    return None if math.isnan(low) or math.isnan(high) else [low, high]


def _describe_classes(
    names: Sequence[str],
    confusion: NDArray[np.int64],
    labels: NDArray[np.int64],
    probabilities: NDArray[np.float64],
) -> dict[str, dict[str, float | None]]:
    """Precision, recall, F1 and AUC of each class against all others."""
    described = {}
    for i, name in enumerate(names):
        right, present, called = (int(count) for count in (confusion[i, i], confusion[i].sum(), confusion[:, i].sum()))
        ranking = auc((labels == i).astype(np.int64), probabilities[:, i])
        described[name] = {
            "images": present,
            "precision": right / called if called else None,
            "recall": right / present if present else None,
            "f1": 2 * right / (present + called) if present + called else None,
            "auc": None if math.isnan(ranking) else ranking,
        }
    return described
