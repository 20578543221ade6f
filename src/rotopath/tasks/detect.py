"""Detect: find objects of one or several classes, such as mitoses, as points.

Detections are the peaks of a smoothed probability map. A detection can be a true positive if it is at most
`MATCH_RADIUS_UM` away from an annotated point of the same class; `rotopath.metrics.matching.match_points` describes the
rules for counting true positives. Each class has its own threshold, chosen to give the highest F1 on the validation
set. With a single class, the network has one channel. With several classes, it has a channel for each class, and a last
channel for positions without any object.
"""

import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree
from skimage.morphology import local_maxima

from rotopath.data import Sample
from rotopath.data.annotations import mask_areas, read_points
from rotopath.data.sampling import Ints, ObjectBalancedSampler, ObjectPositions, Sampler, SamplerSettings
from rotopath.data.splits import select_cases
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import Point
from rotopath.inference.dense import Prediction
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.inference.tiling import Grid, Run, Tile, run_here
from rotopath.metrics.classification import f1_terms, interval_unit, score_interval, sum_by_case
from rotopath.metrics.matching import (
    Counts,
    Floats,
    PointMatches,
    PointRule,
    best_f1_threshold,
    count_at_threshold,
    froc_curve,
    match_points,
    pool_matches,
)
from rotopath.tasks.classify import WindowTask, balance_labels, require_every_class
from rotopath.tasks.task import (
    HardExample,
    Map,
    OperatingPoint,
    Scores,
    TrainingWindow,
    check_numbers,
    expect_threshold,
)

MATCH_RADIUS_UM = 7.5  # 30 px at 0.25 µm/px
SMOOTH_UM = 1.5  # standard deviation of the Gaussian filter that smooths the maps; 6 px at 0.25 µm/px
MERGE_UM = 7.5  # peaks closer than this are merged: they may be the two halves of a dividing cell
MIN_SCORE = 0.01  # lower peaks are ignored, because an image has thousands of them
GAUSSIAN_REACH = 4  # radius of the Gaussian filter, in standard deviations (the default of scipy)
PLATEAU_REACH = 5  # outputs added to the halo, because a peak may be a plateau of several equal values


@dataclass(frozen=True)
class Detections:
    """Detected points with their scores and classes."""

    positions: Floats  # (d, 2) rows and columns in pixels
    scores: Floats  # (d,) smoothed probabilities at the peaks
    classes: Ints  # (d,) class indices

    def select(self, indices: NDArray[np.generic]) -> "Detections":
        """Return the detections at the given indices, or where a boolean mask is true."""
        return Detections(self.positions[indices], self.scores[indices], self.classes[indices])


@dataclass(frozen=True)
class FieldEvidence:
    """Annotated points and candidates of one image (field), from which the scores are computed."""

    name: str
    case: str  # name of the patient; empty if unknown
    truth: Floats  # (t, 2) rows and columns of the annotated points in pixels
    truth_classes: Ints  # (t,) class indices
    detections: Detections  # the candidates: detections with a score of at least MIN_SCORE, see `Detect.decode`
    radius_px: float  # maximum distance between a true positive and its annotated point


class Detect(WindowTask):
    """Task of detecting objects of one or several classes, such as mitoses, as points."""

    kind = "detect"
    annotated = "points"
    score_name = "f1"
    default_network = "mitosis"
    default_spacing_um_px = 0.25
    prediction_type = "map"
    rules = get_args(PointRule)
    drawn_as = "points"
    object_score = "score"
    regime_unit = "cases"
    can_mine = True

    @property
    def outputs(self) -> int:
        return 1 if self.is_single else len(self.classes) + 1

    @property
    def output_names(self) -> tuple[str, ...]:
        return self.class_names if self.is_single else (*self.class_names, self.background_name)

    @property
    def match_radius_px(self) -> float:
        """Maximum distance, in pixels, between a true positive and its annotated point."""
        return MATCH_RADIUS_UM / self.spacing_um_px

    @property
    def threshold_names(self) -> tuple[str, ...]:
        """Names of the thresholds in the operating point, one for each class."""
        return ("threshold",) if self.is_single else tuple(f"threshold {name}" for name in self.class_names)

    # Data and training

    def read_points(self, sample: Sample) -> tuple[Floats, Ints]:
        """Return the positions (k, 2) and the class indices (k,) of the annotated points of a sample.

        Positions are (row, column) in pixels of the image at the pixel spacing of the task. Points of classes that do
        not belong to the task are left out, and points in ignored areas.
        """
        points = read_points(sample, self.spacing_um_px)
        indices = [self.class_index(name, sample) for name in points.classes]
        known = np.array([index is not None for index in indices], bool)
        if points.ignored:
            mask = mask_areas(points.ignored, self.reader.size_px(sample))
            assert mask is not None
            known &= ~find_inside(mask, points.positions)
        return points.positions[known], np.array([i for i, k in zip(indices, known, strict=True) if k], np.int64)

    def read_ignored(self, sample: Sample) -> NDArray[np.bool_] | None:
        """Return a mask (H, W) of the ignored areas of a sample at the pixel spacing of the task; None: no such area.

        Windows without an object do not have their centers there, and objects there are not scored.
        """
        areas = read_points(sample, self.spacing_um_px).ignored
        return mask_areas(areas, self.reader.size_px(sample)) if areas else None

    def find_label_weights(self, samples: Sequence[Sample]) -> NDArray[np.float32]:
        """Return the weight of each label in a balanced loss: of the classes, and 1 for windows without an object."""
        if self.is_single:
            return np.ones(2, np.float32)  # half of the windows are around objects
        labels = np.concatenate([self.read_points(sample)[1] for sample in samples])
        return np.append(balance_labels(labels), np.float32(1))

    def check_training(self, samples: Sequence[Sample]) -> None:
        """Raise DataError if a class has no annotated point in the training samples."""
        labels = np.concatenate([np.empty(0, np.int64), *(self.read_points(sample)[1] for sample in samples)])
        require_every_class(self.class_names, labels)

    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Return all samples of `amount` randomly selected cases."""
        self.require_regime(amount)
        cases = set(select_cases((sample.case for sample in samples), int(amount), seed))
        return tuple(sample for sample in samples if sample.case in cases)

    def count_windows(self, samples: Sequence[Sample], window: TrainingWindow) -> int:
        """Return twice the number of annotated points, because half of the windows of a batch are at such points."""
        del window
        return 2 * sum(len(self.read_points(sample)[0]) for sample in samples)

    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler that draws half of the windows at annotated points.

        The centers of the other windows are farther than `match_radius_px` from all annotated points. If there are hard
        examples (`mined`), half of these other windows are centered on hard examples.
        """
        positions, classes = zip(*(self.read_points(sample) for sample in samples), strict=True)
        absent_label = 0 if self.is_single else len(self.classes)
        ignored = [self.read_ignored(sample) for sample in samples]
        objects = ObjectPositions(
            positions, classes, self.class_names, absent_label, clearance_px=self.match_radius_px, ignored=ignored
        )
        return ObjectBalancedSampler(objects, settings, mined, jitter_px=window.stride_px // 2)

    def find_hard_examples(self, evidence: Sequence[FieldEvidence], max_examples: int) -> list[HardExample]:
        """Return up to `max_examples` false positives, the highest score first.

        In this method, a false positive is a candidate that is farther than `match_radius_px` from all annotated
        points, of any class.
        """
        examples = []
        for field in evidence:
            merged = self.merge(field.detections)
            for (row, column), score in zip(merged.positions, merged.scores, strict=True):
                if not (np.hypot(*(field.truth - (row, column)).T) <= field.radius_px).any():
                    examples.append(HardExample(field.name, round(float(row)), round(float(column)), float(score)))
        return sorted(examples, key=lambda example: -example.score)[:max_examples]

    # From maps to detections

    def find_peaks(self, prediction: Prediction, point: OperatingPoint | None = None) -> Detections:
        """Return the peaks whose scores reach the threshold of their class. An object may have several peaks.

        `prediction` contains the probability maps (K, h, w). `point` contains the thresholds; a threshold below
        MIN_SCORE is replaced by MIN_SCORE. If `point` is None, all thresholds are MIN_SCORE.
        """
        sigma_px = SMOOTH_UM / self.spacing_um_px
        peaks = []
        for index, name in enumerate(self.threshold_names):
            threshold = MIN_SCORE if point is None else max(MIN_SCORE, point[name])
            peaks.append(_find_peaks(prediction, index, sigma_px, threshold))
        return _concatenate(peaks)

    def merge(self, detections: Detections) -> Detections:
        """Return one detection for each object, sorted from the highest score to the lowest.

        A detection is removed if a kept detection with a higher score, of any class, is closer than MERGE_UM.
        """
        order = np.argsort(-detections.scores, kind="stable")
        if not len(order):
            return detections
        radius_px = np.nextafter(MERGE_UM / self.spacing_um_px, 0)  # detections exactly MERGE_UM apart are not merged
        nearby = cKDTree(detections.positions).query_ball_point(detections.positions, radius_px)
        is_free = np.ones(len(order), bool)
        kept = []
        for index in order:
            if is_free[index]:
                kept.append(index)
                is_free[nearby[index]] = False
        return detections.select(np.array(kept, np.int64))

    def decode(self, prediction: Prediction, point: OperatingPoint | None = None) -> Detections:
        """Return the detections at the operating point `point`, one for each object, or candidates if `point` is None.

        Candidates are peaks with a score of at least MIN_SCORE; thresholds are applied to them later. With a single
        class, they are merged to one for each object (see `merge`). With several classes, they are not merged yet,
        because a candidate below the threshold of its class could remove a candidate of another class. They must be
        merged after the thresholds are applied.
        """
        peaks = self.find_peaks(prediction, point)
        return self.merge(peaks) if point is not None or self.is_single else peaks

    # Evaluation

    def collect_evidence(self, prediction: Prediction, sample: Sample) -> FieldEvidence:
        """Return the annotated points of an image, and its candidates: peaks with a score of at least MIN_SCORE.

        Candidates in ignored areas are left out.
        """
        truth, classes = self.read_points(sample)
        candidates = self.decode(prediction)
        if (ignored := self.read_ignored(sample)) is not None:
            candidates = candidates.select(~find_inside(ignored, candidates.positions))
        return FieldEvidence(sample.name, sample.case, truth, classes, candidates, self.match_radius_px)

    def choose_operating_point(self, evidence: Sequence[FieldEvidence], rule: str | None = None) -> dict[str, float]:
        """Return for each class the threshold with the highest F1 of this class, computed over all images together."""
        point_rule = cast(PointRule, self.resolve_rule(rule))
        return {
            name: best_f1_threshold(self._match_candidates(evidence, index, point_rule))
            for index, name in enumerate(self.threshold_names)
        }

    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        return check_numbers(point, dict.fromkeys(self.threshold_names, (0.0, 1.0)))

    def score(self, evidence: Sequence[FieldEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return F1, precision and recall over all images and for each case, and a 95 % confidence interval of F1.

        With a single class, the FROC curve is also returned. With several classes, these scores are computed from the
        true positives, false positives and false negatives of all classes together. The entry "classes" then contains
        the scores and the FROC curve of each class, and "macro_f1" is the mean F1 of the classes.
        """
        if not evidence:
            raise ValueError("There are no images to score; choose a split that contains annotated images.")
        point_rule = cast(PointRule, self.resolve_rule(rule))
        accepted = [self._accept(field.detections, point) for field in evidence]
        rows = np.zeros((len(self.classes), len(evidence), 3))  # TP, FP and FN by class and image
        for index, name in enumerate(self.threshold_names):
            for i, (field, detections) in enumerate(zip(evidence, accepted, strict=True)):
                counts = count_at_threshold(_match_class(field, index, point_rule, detections), point[name])
                rows[index, i] = counts.true_positives, counts.false_positives, counts.false_negatives
        cases, sums = sum_by_case([field.case or field.name for field in evidence], rows.sum(axis=0))
        scores: Scores = {
            "rule": point_rule,
            **point,
            "images": len(evidence),
            **Counts(*map(int, sums.sum(axis=0))).to_scores(),
            "f1_interval": score_interval(lambda total: Counts(*map(int, total)).f1, sums),
            "interval_over": interval_unit(evidence),
            "cases": {case: Counts(*map(int, total)).to_scores() for case, total in zip(cases, sums, strict=True)},
        }
        curves = [
            froc_curve(self._match_candidates(evidence, index, point_rule), len(evidence))
            for index in range(len(self.classes))
        ]
        if self.is_single:
            return scores | {"froc": curves[0]}
        totals = zip(self.class_names, rows.sum(axis=1), strict=True)
        by_class = {name: Counts(*map(int, total)).to_scores() for name, total in totals}
        scores["macro_f1"] = float(np.mean([class_scores["f1"] for class_scores in by_class.values()]))
        scores["classes"] = {
            name: {**class_scores, "froc": curve}
            for (name, class_scores), curve in zip(by_class.items(), curves, strict=True)
        }
        return scores

    @classmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return the numerator and the denominator of F1 for each case."""
        return f1_terms(scores["cases"])

    def _accept(self, candidates: Detections, point: OperatingPoint) -> Detections:
        """Return the candidates that reach the thresholds of their classes, merged to one for each object."""
        thresholds = np.array([point[name] for name in self.threshold_names])
        accepted = candidates.select(candidates.scores >= thresholds[candidates.classes])
        return accepted if self.is_single else self.merge(accepted)

    def _match_candidates(self, evidence: Sequence[FieldEvidence], index: int, rule: PointRule) -> PointMatches:
        """Match the candidates of one class in all images to the annotated points of this class.

        `index` is the class index; `rule` is the rule for counting true positives. Candidates of other classes do not
        affect the result, even if they are close to candidates of this class.
        """
        matches = []
        for field in evidence:
            candidates = field.detections.select(field.detections.classes == index)
            matches.append(_match_class(field, index, rule, self.merge(candidates)))
        return pool_matches(matches)

    # Slides

    def adjust_operating_point(
        self, point: OperatingPoint, threshold: float | None = None, min_area_um2: float | None = None
    ) -> dict[str, float]:
        """Return the operating point with the thresholds that a user has chosen. `threshold` is for all classes."""
        adjusted = super().adjust_operating_point(point, min_area_um2=min_area_um2)
        if threshold is None:
            return adjusted
        return dict.fromkeys(self.threshold_names, expect_threshold(threshold))

    @property
    def measurement_names(self) -> tuple[str, ...]:
        return ("score",)

    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object finder that collects the peaks of all tiles of a slide, and merges them at the end."""
        del folder  # temporary files are not needed: peaks are few and fit in memory
        return PeakFinder(self, grid, point)

    def halo(self, stride_px: int) -> int:
        """Return the width, in outputs, of the margin around a tile that can affect the peaks in the tile.

        The Gaussian filter reads outputs of this margin. A peak that is a plateau of several equal values can extend
        into the margin. `stride_px` is the distance between two adjacent outputs, in pixels.
        """
        return math.ceil(GAUSSIAN_REACH * SMOOTH_UM / self.spacing_um_px / stride_px) + PLATEAU_REACH

    def class_maps(self, maps: Map) -> Map:
        return maps[: len(self.classes)]

    @property
    def background_probabilities(self) -> tuple[float, ...]:
        return (0.0,) if self.is_single else (*(0.0 for _ in self.classes), 1.0)


Peak = tuple[float, float, int, float, float]  # row, column, class, score, standard deviation over rotations


class PeakFinder:
    """Collects the peaks of a slide tile by tile, and merges them to one peak for each object after the last tile.

    Because peaks are merged at the end, detections do not depend on the tile size, even at tile borders.
    """

    def __init__(self, task: Detect, grid: Grid, point: OperatingPoint) -> None:
        self._task, self._grid, self._point = task, grid, point

    def find(self, tiles: Iterable[Tile], run: Run = run_here) -> Generator[SlideObject]:
        """Find the peaks of all tiles, merge them, and yield the detections of the slide."""
        found: list[Peak] = []
        has_deviation = False
        with closing(run(self._search_tile, tiles)) as results:
            for peaks_of_tile, is_measured in results:
                found += peaks_of_tile
                has_deviation = is_measured  # the same for all tiles
        rows = sorted(found)  # so that the order of detections does not depend on the tiles
        peaks = np.array(rows, np.float64).reshape(-1, 5)
        deviation_at = {(row, column, index): deviation for row, column, index, _, deviation in rows}
        merged = self._task.merge(Detections(peaks[:, :2], peaks[:, 3], peaks[:, 2].astype(np.int64)))
        for position, score, index in zip(merged.positions, merged.scores, merged.classes.tolist(), strict=True):
            measurements = {"score": float(score)}
            if has_deviation:
                measurements["deviation"] = deviation_at[(*position.tolist(), index)]
            # In `positions`, (0, 0) is the center of the first pixel. In shapes, it is the corner of the first pixel.
            row, column = (position + 0.5) * self._grid.level0_px
            object_class = self._task.classes[index]
            shape = Point(row, column)
            yield SlideObject(shape, "annotation", object_class.name, object_class.color, measurements)

    def _search_tile(self, tile: Tile) -> tuple[list[Peak], bool]:
        """Return the peaks of a tile, and whether the tile has standard deviations."""
        grid, (rows, columns) = self._grid, tile.with_halo
        top, left = (
            first + span.start * grid.stride_px for first, span in zip(grid.first_px, (rows, columns), strict=True)
        )
        prediction = Prediction(tile.probabilities, grid.stride_px, (top, left))
        peaks = self._task.find_peaks(prediction, self._point)
        found: list[Peak] = []
        for position, score, index in zip(peaks.positions, peaks.scores, peaks.classes.tolist(), strict=True):
            # Halves are always rounded up (not to even numbers), so that each peak belongs to exactly one tile.
            row, column = np.floor((position - grid.first_px) / grid.stride_px + 0.5).astype(int)
            if tile.rows.start <= row < tile.rows.stop and tile.columns.start <= column < tile.columns.stop:
                deviation = 0.0
                if tile.deviations is not None:
                    deviation = float(tile.deviations[index, row - rows.start, column - columns.start])
                found.append((*position.tolist(), index, float(score), deviation))
        return found, tile.deviations is not None


# Peaks


def _find_peaks(prediction: Prediction, index: int, sigma_px: float, threshold: float) -> Detections:
    """Return the peaks of one class: the local maxima of its smoothed map with a value of at least `threshold`.

    `index` is the class index. `sigma_px` is the standard deviation of the Gaussian filter, in pixels of the image.
    """
    values = prediction.probabilities[index].astype(np.float64)
    smooth = ndimage.gaussian_filter(values, sigma_px / prediction.stride_px, mode="nearest")
    # Adjacent maxima of equal value (a plateau) are one peak, at their center. A constant map has no peak.
    peaks = local_maxima(smooth)  # type: ignore[no-untyped-call]
    plateaus, count = ndimage.label(peaks, np.ones((3, 3)))
    numbers = range(1, count + 1)
    centers = np.array(ndimage.center_of_mass(plateaus > 0, plateaus, numbers)).reshape(-1, 2)
    scores = np.asarray(ndimage.maximum(smooth, plateaus, numbers), np.float64).reshape(-1)
    high = scores >= threshold
    positions = prediction.positions(centers[high] + _subpixel_offsets(smooth, centers[high]))
    return Detections(positions, scores[high], np.full(int(high.sum()), index, np.int64))


def _subpixel_offsets(values: Floats, peaks: Floats) -> Floats:
    """Return offsets (k, 2), in outputs, that refine the positions of peaks to fractions of an output.

    `values` (h, w) is the map; `peaks` (k, 2) are the rows and columns of its peaks. Along each axis, the offset is the
    distance from the peak to the maximum of the parabola through the peak and its two neighbors, at most half an
    output. The offset is 0 at the edge of the map, and for plateaus whose center is between two outputs.
    """
    offsets = np.zeros_like(peaks)
    nearest = peaks.astype(np.int64)
    for axis, size in enumerate(values.shape):
        inner = (nearest == peaks).all(axis=1) & (nearest[:, axis] > 0) & (nearest[:, axis] < size - 1)
        center, step = nearest[inner], np.eye(2, dtype=np.int64)[axis]
        before, middle, after = (values[tuple((center + k * step).T)] for k in (-1, 0, 1))
        curvature = 2 * middle - before - after
        is_curved = curvature > 0
        top = np.zeros(len(center))
        top[is_curved] = (after - before)[is_curved] / (2 * curvature[is_curved])
        offsets[inner, axis] = top.clip(-0.5, 0.5)
    return offsets


def _concatenate(parts: Sequence[Detections]) -> Detections:
    return Detections(
        np.concatenate([part.positions for part in parts]),
        np.concatenate([part.scores for part in parts]),
        np.concatenate([part.classes for part in parts]),
    )


# Scores


def _match_class(field: FieldEvidence, index: int, rule: PointRule, detections: Detections) -> PointMatches:
    """Match the detections of one class in one image to the annotated points of this class.

    `index` is the class index. `detections` may contain detections of other classes, which are ignored.
    """
    detected = detections.select(detections.classes == index)
    truth = field.truth[field.truth_classes == index]
    return match_points(truth, detected.positions, detected.scores, field.radius_px, rule)


def find_inside(mask: NDArray[np.bool_], positions: Floats) -> NDArray[np.bool_]:
    """Return whether the pixel at each of the positions (n, 2), rows and columns, is true in a mask (H, W)."""
    rows, columns = (
        np.clip(np.floor(axis + 0.5).astype(int), 0, side - 1)
        for axis, side in zip(positions.T, mask.shape, strict=True)
    )
    inside: NDArray[np.bool_] = mask[rows, columns]
    return inside
