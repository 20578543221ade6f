"""Detect: objects found as the peaks of maps of probabilities, as mitoses are.

A detection within `HIT_UM` of an object of its class is a hit. Each class has a threshold of its own, the one with the
highest F1 on the validation set. With a single class a network gives one logit; with several, one for each class and a
last one for none of them.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree
from skimage.morphology import local_maxima
from torch import Tensor

from rotopath.data import DataError, Sample
from rotopath.data.annotations import read_points
from rotopath.data.sampling import Ints, ObjectWindows, Sampler
from rotopath.data.splits import take_cases
from rotopath.images.geojson import Point, SlideObject
from rotopath.inference.dense import Prediction
from rotopath.inference.slide_pass import Grid, Tile
from rotopath.metrics.bootstrap import Numbers, find_interval, name_unit, sum_by_case, tally_objects
from rotopath.metrics.matching import Counts, Matches, Rule, best_threshold, count, match, pool
from rotopath.tasks.classify import (
    binary_cross_entropy,
    cross_entropy,
    expect_every_class,
    expect_one_answer,
    window_accuracy,
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
    count_objects,
    describe_objects,
    expect_numbers,
    expect_regime,
    take_rule,
)

HIT_UM = 7.5  # 30 px at 0.25 µm/px
SMOOTH_UM = 1.5  # deviation of the Gaussian: 6 px at 0.25 µm/px, a little less than the stride of the paper's network
MERGE_UM = 7.5  # two peaks closer than this are one object, such as the two halves of a cell that divides
LEAST_SCORE = 0.01  # of a candidate: no operating point lies lower, and there would be thousands in an image
REACH_DEVIATIONS = 4  # of the Gaussian, that it reads of a map to either side
PLATEAU_REACH = 5  # outputs further, for plateaus of a few outputs
FROC_POINTS = 200


@dataclass(frozen=True)
class Detections:
    """Positions (d, 2), as rows and columns in pixels; scores (d,), which fall; numbers of classes (d,)."""

    positions: NDArray[np.float64]
    scores: NDArray[np.float64]
    classes: NDArray[np.int64]

    def take(self, chosen: NDArray[np.generic]) -> "Detections":
        """Some of them, by their numbers or by a mask."""
        return Detections(self.positions[chosen], self.scores[chosen], self.classes[chosen])


@dataclass(frozen=True)
class FieldEvidence:
    """One image: where its objects are, and where candidates were seen."""

    name: str
    case: str
    truth: NDArray[np.float64]  # (t, 2)
    truth_classes: NDArray[np.int64]  # (t,)
    detections: Detections
    radius_px: float  # within which a detection is a hit


class Detect(Task):
    """Points of K classes."""

    kind = "detect"
    annotated = "points"
    score_name = "f1"
    default_network = "mitosis"
    default_spacing_um_px = 0.25
    answers = "map"
    rules = get_args(Rule)
    regime_unit = "cases"
    can_mine = True

    @property
    def outputs(self) -> int:
        return 1 if self.is_single else len(self.classes) + 1

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names if self.is_single else (*self.class_names, self.absent)

    @property
    def activation(self) -> str:  # type: ignore[override]
        return "sigmoid" if self.is_single else "softmax"

    @property
    def hit_px(self) -> float:
        """The radius within which a detection is a hit."""
        return HIT_UM / self.spacing_um_px

    # Training

    def read_points(self, sample: Sample) -> tuple[NDArray[np.float64], Ints]:
        """Positions (k, 2) and classes (k,) of the annotated objects that are of one of the task's classes."""
        points = read_points(sample, self.spacing_um_px)
        classes = [self.class_of(name, sample) for name in points.classes]
        kept = np.array([number is not None for number in classes], bool)
        return points.positions[kept], np.array([number for number in classes if number is not None], np.int64)

    def make_sampler(
        self, samples: Sequence[Sample], sizes_px: Ints, frame: Frame, batch: int, seed: int, mined: Ints | None
    ) -> Sampler:
        points, labels = zip(*(self.read_points(sample) for sample in samples), strict=True)
        return ObjectWindows(
            points,
            labels,
            self.class_names,
            0 if self.is_single else len(self.classes),
            sizes_px,
            frame.window_px,
            batch,
            seed,
            self.hit_px,
            mined,
            jitter_px=frame.stride_px // 2,
        )

    def check_frame(self, frame: Frame) -> None:
        expect_one_answer(frame)

    def check_training(self, samples: Sequence[Sample]) -> None:
        labels = np.concatenate([np.empty(0, np.int64), *(self.read_points(sample)[1] for sample in samples)])
        expect_every_class(self.class_names, labels)

    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        del samples
        return binary_cross_entropy if self.is_single else cross_entropy

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return window_accuracy(logits, targets)

    def take_regime(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        expect_regime(self, amount)
        try:
            cases = set(take_cases((sample.case for sample in samples), int(amount), seed))
        except ValueError as error:
            raise DataError(str(error)) from None
        return tuple(sample for sample in samples if sample.case in cases)

    def mine(self, evidence: Sequence[FieldEvidence], most: int) -> list[Example]:
        """Detections where there is no object, the surest first."""
        found = [
            Example(each.name, round(float(row)), round(float(column)), float(score))
            for each, merged in ((each, self.merge(each.detections)) for each in evidence)
            for (row, column), score in zip(merged.positions, merged.scores, strict=True)
            if not (np.hypot(*(each.truth - (row, column)).T) <= each.radius_px).any()
        ]
        return sorted(found, key=lambda example: -example.score)[:most]

    # Evaluation

    def find_peaks(self, prediction: Prediction, point: OperatingPoint | None = None) -> Detections:
        """All peaks that reach the thresholds, also those of one object. Each depends on the map within the halo."""
        found = [
            _find_peaks(prediction, number, SMOOTH_UM / self.spacing_um_px, self._threshold(number, point))
            for number in range(len(self.classes))
        ]
        return _join(found)

    def merge(self, found: Detections) -> Detections:
        """The highest first, and of several that are close together that one only, whatever their classes."""
        return _merge(found, MERGE_UM / self.spacing_um_px)

    def decode(self, prediction: Prediction, point: OperatingPoint | None = None) -> Detections:
        """The detections at an operating point; without one, all candidates that are worth keeping.

        Candidates of several classes are merged later, when thresholds have said which of them take part.
        """
        peaks = self.find_peaks(prediction, point)
        return self.merge(peaks) if point is not None or self.is_single else peaks

    def examine(self, prediction: Prediction, sample: Sample) -> FieldEvidence:
        truth, classes = self.read_points(sample)
        return FieldEvidence(sample.name, sample.case, truth, classes, self.decode(prediction), self.hit_px)

    def choose_point(self, evidence: Sequence[FieldEvidence], rule: str | None = None) -> dict[str, float]:
        """For each class the threshold with the highest F1, all images pooled."""
        chosen = cast(Rule, take_rule(self, rule))
        return {
            key: best_threshold(self._pool_candidates(evidence, number, chosen))
            for number, key in enumerate(self._keys)
        }

    def check_point(self, point: Mapping[str, object]) -> dict[str, float]:
        return expect_numbers(point, dict.fromkeys(self._keys, (0.0, 1.0)))

    def score(self, evidence: Sequence[FieldEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """F1, precision and recall over all images and of each case, the interval of F1 over cases, and FROC curves.

        With several classes these are the counts of all classes together; `classes` has each of them.
        """
        if not evidence:
            raise ValueError("There are no fields to score.")
        chosen = cast(Rule, take_rule(self, rule))
        decided = [self._at_point(each.detections, point) for each in evidence]
        rows = np.zeros((len(self.classes), len(evidence), 3))
        for number, key in enumerate(self._keys):
            for i, (each, found) in enumerate(zip(evidence, decided, strict=True)):
                counted = count(_match(each, number, chosen, found), point[key])
                rows[number, i] = counted.hits, counted.false, counted.missed
        cases, sums = sum_by_case([each.case or each.name for each in evidence], rows.sum(axis=0))
        scores: Scores = {
            "rule": chosen,
            **point,
            "images": len(evidence),
            **_describe(sums.sum(axis=0)),
            "f1_interval": find_interval(lambda total: _counts(total).f1, sums),
            "interval_over": name_unit(evidence),
            "cases": {case: _describe(total) for case, total in zip(cases, sums, strict=True)},
        }
        curves = [
            _froc(self._pool_candidates(evidence, number, chosen), len(evidence)) for number in range(len(self.classes))
        ]
        if self.is_single:
            return scores | {"froc": curves[0]}
        described = {name: _describe(rows[k].sum(axis=0)) for k, name in enumerate(self.class_names)}
        scores["macro_f1"] = float(np.mean([each["f1"] for each in described.values()]))
        scores["classes"] = {
            name: {**each, "froc": curve} for (name, each), curve in zip(described.items(), curves, strict=True)
        }
        return scores

    @classmethod
    def tally(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return tally_objects(scores["cases"])

    @property
    def _keys(self) -> tuple[str, ...]:
        """The names of the thresholds, class by class."""
        return ("threshold",) if self.is_single else tuple(f"threshold {name}" for name in self.class_names)

    def _threshold(self, number: int, point: OperatingPoint | None) -> float:
        return LEAST_SCORE if point is None else max(LEAST_SCORE, point[self._keys[number]])

    def _at_point(self, found: Detections, point: OperatingPoint) -> Detections:
        thresholds = np.array([point[key] for key in self._keys])
        kept = found.take(found.scores >= thresholds[found.classes])
        return kept if self.is_single else self.merge(kept)

    def _pool_candidates(self, evidence: Sequence[FieldEvidence], number: int, rule: Rule) -> Matches:
        """The candidates of one class in all images, matched as if there were no other classes."""
        found = [self.merge(each.detections.take(each.detections.classes == number)) for each in evidence]
        return pool([_match(each, number, rule, mine) for each, mine in zip(evidence, found, strict=True)])

    # Slides

    def make_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> Finder:
        del folder  # objects are few
        return PeakFinder(self, grid, point)

    def halo(self, stride_px: int) -> int:
        return math.ceil(REACH_DEVIATIONS * SMOOTH_UM / self.spacing_um_px / stride_px) + PLATEAU_REACH

    def class_maps(self, maps: Map) -> Map:
        return maps[: len(self.classes)]

    @property
    def nothing(self) -> tuple[float, ...]:
        return (0.0,) if self.is_single else (*(0.0 for _ in self.classes), 1.0)

    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        return count_objects(self, counts, areas_mm2, tissue_mm2)

    def describe(self, summary: Mapping[str, float]) -> str:
        return describe_objects(self, summary)


class PeakFinder:
    """Peaks of the smoothed maps; those of one object are merged in the end, wherever tiles cut it."""

    def __init__(self, task: Detect, grid: Grid, point: OperatingPoint) -> None:
        self._task, self._grid, self._point = task, grid, point
        self._found: list[tuple[float, float, int, float, float]] = []  # row, column, class, score, deviation
        self._rotated = False

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        grid = self._grid
        first = tuple(grid.first_px[axis] + span.start * grid.stride_px for axis, span in enumerate(tile.around))
        here = Prediction(tile.probabilities, grid.stride_px, (first[0], first[1]))
        peaks = self._task.find_peaks(here, self._point)
        self._rotated = tile.deviations is not None
        for position, score, number in zip(peaks.positions, peaks.scores, peaks.classes.tolist(), strict=True):
            # Halves are rounded up in every tile, so that each peak is one tile's.
            row, column = np.floor((position - grid.first_px) / grid.stride_px + 0.5).astype(int)
            if tile.rows.start <= row < tile.rows.stop and tile.columns.start <= column < tile.columns.stop:
                spread = 0.0
                if tile.deviations is not None:
                    spread = float(tile.deviations[number, row - tile.around[0].start, column - tile.around[1].start])
                self._found.append((*position.tolist(), number, float(score), spread))
        yield from ()

    def finish(self) -> Iterator[SlideObject]:
        rows = sorted(self._found)  # in an order that tiles have no part in
        found = np.array(rows, np.float64).reshape(-1, 5)
        spread_of = {(row, column, number): spread for row, column, number, _, spread in rows}
        merged = self._task.merge(Detections(found[:, :2], found[:, 3], found[:, 2].astype(np.int64)))
        for position, score, number in zip(merged.positions, merged.scores, merged.classes.tolist(), strict=True):
            measured = {"score": float(score)}
            if self._rotated:
                measured["deviation"] = spread_of[(*position.tolist(), number)]
            row, column = (position + 0.5) * self._grid.canvas.level0_px
            each = self._task.classes[number]
            yield SlideObject(Point(row, column), "annotation", each.name, each.color, measured)


def _find_peaks(prediction: Prediction, number: int, smooth_px: float, threshold: float) -> Detections:
    sigma = smooth_px / prediction.stride_px
    smooth = ndimage.gaussian_filter(prediction.probabilities[number].astype(np.float64), sigma, mode="nearest")
    # A peak may be a plateau of equal values, which is one candidate; a map that is flat all over has none.
    peaks = local_maxima(smooth)  # type: ignore[no-untyped-call]
    plateaus, total = ndimage.label(peaks, np.ones((3, 3)))
    indices = np.array(ndimage.center_of_mass(plateaus > 0, plateaus, range(1, total + 1))).reshape(-1, 2)
    scores = np.asarray(ndimage.maximum(smooth, plateaus, range(1, total + 1)), np.float64).reshape(-1)
    high = scores >= threshold
    positions = prediction.positions(indices[high] + _offsets(smooth, indices[high]))
    return Detections(positions, scores[high], np.full(int(high.sum()), number, np.int64))


def _merge(found: Detections, radius_px: float) -> Detections:
    order = np.argsort(-found.scores, kind="stable")
    if not len(order):
        return found
    nearby = cKDTree(found.positions).query_ball_point(found.positions, np.nextafter(radius_px, 0))
    free = np.ones(len(order), bool)
    kept = []
    for candidate in order:
        if free[candidate]:
            kept.append(candidate)
            free[nearby[candidate]] = False
    return found.take(np.array(kept, np.int64))


def _join(found: Sequence[Detections]) -> Detections:
    if len(found) == 1:
        return found[0]
    return Detections(
        np.concatenate([each.positions for each in found]),
        np.concatenate([each.scores for each in found]),
        np.concatenate([each.classes for each in found]),
    )


def _match(evidence: FieldEvidence, number: int, rule: Rule, found: Detections) -> Matches:
    """Detections of a class against the objects of that class."""
    mine = found.take(found.classes == number)
    truth = evidence.truth[evidence.truth_classes == number]
    return match(truth, mine.positions, mine.scores, evidence.radius_px, rule)


def _counts(total: Numbers) -> Counts:
    hits, false, missed = (int(value) for value in total)
    return Counts(hits, false, missed)


def _describe(total: Numbers) -> dict[str, float]:
    counts = _counts(total)
    return {
        "f1": counts.f1,
        "precision": counts.precision,
        "recall": counts.recall,
        "hits": counts.hits,
        "false": counts.false,
        "missed": counts.missed,
    }


def _froc(matches: Matches, images: int) -> list[dict[str, float]]:
    """The corners of the FROC curve, where one more object is found, and its end; some of them if there are many."""
    found, false = matches.found_at[np.isfinite(matches.found_at)], matches.false
    if not len(found) and not len(false):
        return []
    corners = np.unique(np.append(found, min([*found, *false])))[::-1]  # falling
    chosen = np.unique(np.linspace(0, len(corners) - 1, min(len(corners), FROC_POINTS)).round().astype(int))
    counted = [(float(threshold), count(matches, threshold)) for threshold in corners[chosen]]
    return [
        {"threshold": threshold, "false_per_image": each.false / images, "sensitivity": each.recall}
        for threshold, each in counted
    ]


def _offsets(values: NDArray[np.float64], peaks: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far (k, 2) the true peaks lie from the highest values: the tops of parabolas through both neighbours.

    A plateau, or a peak at the rim of the map, stays where it is.
    """
    offsets = np.zeros_like(peaks)
    nearest = peaks.astype(np.int64)
    for axis, size in enumerate(values.shape):
        inner = (nearest == peaks).all(axis=1) & (nearest[:, axis] > 0) & (nearest[:, axis] < size - 1)
        here, step = nearest[inner], np.eye(2, dtype=np.int64)[axis]
        before, middle, after = (values[tuple((here + k * step).T)] for k in (-1, 0, 1))
        bend = 2 * middle - before - after
        sharp = bend > 0
        top = np.zeros(len(here))
        top[sharp] = (after - before)[sharp] / (2 * bend[sharp])
        offsets[inner, axis] = top.clip(-0.5, 0.5)
    return offsets
