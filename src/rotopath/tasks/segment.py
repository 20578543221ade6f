"""Segment: objects pixel by pixel, as nuclei are, grown from seeds inside of them up to their borders.

A network says of each pixel whether it is inside of an object, at its border, or background; with several classes,
also which class an object here would be. The class of an object is decided once for all of its pixels.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from skimage.segmentation import watershed
from torch import Tensor

from rotopath.data import DataError, Sample
from rotopath.data.annotations import Objects, read_objects
from rotopath.data.batches import Bytes, SampleReader
from rotopath.data.sampling import GroupWindows, Ints, Sampler
from rotopath.data.splits import take_of_each
from rotopath.images.geojson import SlideObject, trace_outlines
from rotopath.inference.dense import Prediction
from rotopath.inference.slide_pass import Grid, Tile
from rotopath.inference.tiling import Seams
from rotopath.metrics.bootstrap import Named, Numbers, find_interval, name_unit, sum_by_case, tally_objects
from rotopath.metrics.matching import (
    HitRule,
    ObjectMatches,
    Overlaps,
    aggregated_jaccard,
    aggregated_jaccard_plus,
    dice,
    match_objects,
    overlaps,
)
from rotopath.tasks.task import (
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
    fraction,
    take_rule,
    target_bytes,
    to_device,
)

PARTS = ("inside", "border", "background")  # the first three logits
INSIDE, BORDER, BACKGROUND = range(3)
UNKNOWN = 255  # the class of pixels that are in no object
BORDER_UM = 0.5  # how deep the border reaches into an object: 2 px at 0.25 µm/px
LEAST_SEED_UM2 = 1.25  # smaller ones are specks inside of an object that has a seed already: 20 px at 0.25 µm/px
INSIDE_TRIED = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
BACKGROUND_TRIED = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)
LEAST_UM2_TRIED = (2.8125, 5.0, 6.875, 8.75, 10.625)  # discs of about 2 to 4 µm across; 45 to 170 px at 0.25 µm/px
NOTHING = ObjectMatches(0, 0, 0, 0.0)
Labels = NDArray[np.int32]


@dataclass(frozen=True)
class ObjectEvidence:
    """One image: its objects, and the probabilities from which any thresholds make objects."""

    name: str
    case: str
    truth: Labels  # (H, W)
    truth_classes: NDArray[np.int64]  # by object number; that of 0 means nothing
    prediction: Prediction


class Segment(Task):
    """Instances of K classes."""

    kind = "segment"
    annotated = "objects"
    score_name = "f1"
    default_network = "nuclei"
    default_batch = 16
    default_spacing_um_px = 0.25
    answers = "map"
    rotated = "fields"
    rules = get_args(HitRule)
    regime_unit = "fields of each organ"
    heat_cell = 16

    @property
    def outputs(self) -> int:
        return len(PARTS) + (0 if self.is_single else len(self.classes))

    @property
    def output_names(self) -> tuple[str, ...]:
        return PARTS if self.is_single else (*PARTS, *self.class_names)

    @property
    def activation(self) -> str:  # type: ignore[override]
        types = "" if self.is_single else f", and of the {len(self.classes)} classes by themselves"
        return f"softmax{f' of the first three{types}' if types else ''}"

    def probabilities(self, logits: Tensor) -> Tensor:
        parts = logits[:, : len(PARTS)].softmax(dim=1)
        return parts if self.is_single else torch.cat([parts, logits[:, len(PARTS) :].softmax(dim=1)], dim=1)

    # Training

    def read_objects(self, sample: Sample) -> tuple[Labels, NDArray[np.int64]]:
        """The label map of the task's objects, and their classes by number (that of 0 means nothing)."""
        return self._number(read_objects(sample, self.spacing_um_px), sample)

    def _number(self, objects: Objects, sample: Sample) -> tuple[Labels, NDArray[np.int64]]:
        classes = np.zeros(int(objects.labels.max(initial=0)) + 1, np.int64)
        if not self.typed:
            return objects.labels, classes
        dropped = np.zeros(len(classes), bool)
        for number in objects.numbers:
            found = self.class_of(objects.classes.get(number, ""), sample)
            dropped[number] = found is None
            classes[number] = 0 if found is None else found
        return (np.where(dropped[objects.labels], 0, objects.labels) if dropped.any() else objects.labels), classes

    def targets(self, sample: Sample) -> Bytes:
        """The target maps (H, W, k): inside, border or background; with several classes, that of the object here."""
        labels, classes = self.read_objects(sample)
        parts = part_map(labels, max(1, round(BORDER_UM / self.spacing_um_px)))
        return target_bytes([parts] if self.is_single else [parts, np.where(labels > 0, classes[labels], UNKNOWN)])

    @property
    def reader(self) -> SampleReader:
        return SampleReader(self.spacing_um_px, self.stain, self.targets, 1 if self.is_single else 2)

    def make_sampler(
        self, samples: Sequence[Sample], sizes_px: Ints, frame: Frame, batch: int, seed: int, mined: Ints | None
    ) -> Sampler:
        del mined
        patients = [sample.case or sample.name for sample in samples]
        return GroupWindows(patients, sizes_px, frame.window_px, frame.target_px, batch, seed)

    def check_frame(self, frame: Frame) -> None:
        if frame.stride_px != 1:
            raise DataError(
                f"Objects are segmented pixel by pixel, but the network answers every {frame.stride_px} px; use one "
                f"such as 'nuclei' or 'unet'."
            )

    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        """Cross-entropy in which all parts, and all classes, count alike in these samples."""
        maps = [self.targets(sample) for sample in samples]
        parts = part_weights(each[..., 0] for each in maps)
        if self.is_single:
            return lambda logits, targets: weighted_cross_entropy(logits, targets, to_device(parts, logits))
        types = self._class_weights([each[..., 1] for each in maps])

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            split = len(PARTS)
            found = weighted_cross_entropy(logits[:, :split], targets[:, 0], to_device(parts, logits))
            return found + weighted_cross_entropy(logits[:, split:], targets[:, 1], to_device(types, logits))

        return loss

    def _class_weights(self, maps: Sequence[Bytes]) -> NDArray[np.float32]:
        """Weights (K,) with which every class has the same part of a mean over all pixels, background included."""
        counts = np.zeros(UNKNOWN + 1)
        for each in maps:
            counts += np.bincount(each.ravel(), minlength=UNKNOWN + 1)
        present = counts[: len(self.classes)]
        if missing := [name for name, pixels in zip(self.class_names, present, strict=True) if not pixels]:
            raise DataError(f"The training images have no object of class {missing[0]!r}; every class is needed.")
        return np.asarray(counts.sum() / (len(self.classes) * present), np.float32)

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = targets if targets.ndim == 3 else targets[:, 0]
        return fraction(logits[:, : len(PARTS)].argmax(dim=1) == parts)

    def take_regime(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        expect_regime(self, amount)
        if bare := [sample.name for sample in samples if not sample.stratum]:
            raise DataError(f"A regime takes fields of each organ, but that of {bare[0]} is not known; list it.")
        try:
            names = set(take_of_each({sample.name: sample.stratum for sample in samples}, int(amount), seed))
        except ValueError as error:
            raise DataError(str(error)) from None
        return tuple(sample for sample in samples if sample.name in names)

    # Evaluation

    def decode(self, prediction: Prediction, point: OperatingPoint) -> Labels:
        """A label map: seeds are surely inside, objects are what is not surely background, borders are where they meet.

        The point's "inside" is the least probability of a seed, its "background" the least of what is no object, and
        its "least_px" the area below which an object is debris.
        """
        return drop_small(self._grow(prediction, point["inside"], point["background"]), point["least_px"])

    def decide_classes(self, labels: Labels, probabilities: Map) -> NDArray[np.int64]:
        """The class of each object, by its number: the likeliest on average over its pixels. That of 0 is no object."""
        count = int(labels.max(initial=0))
        classes = np.zeros(count + 1, np.int64)
        if count and not self.is_single:
            numbers = np.arange(1, count + 1)
            means = [ndimage.mean(each, labels, numbers) for each in probabilities[len(PARTS) :]]
            classes[1:] = np.argmax(means, axis=0)
        return classes

    def _grow(self, prediction: Prediction, least_inside: float, least_background: float) -> Labels:
        inside, border, background = (prediction.probabilities[i] for i in (INSIDE, BORDER, BACKGROUND))
        regions, count = ndimage.label(background < least_background)
        labels, _ = ndimage.label((regions > 0) & (inside >= least_inside))
        seeds = drop_small(labels, LEAST_SEED_UM2 / self.spacing_um_px**2)
        # Slender objects are all border: a region without any seed is an object of its own.
        seeded = np.bincount(regions[seeds > 0], minlength=count + 1) > 0
        alone = np.where(seeded, 0, np.arange(count + 1))[regions]
        seeds = np.where(alone > 0, alone + seeds.max(), seeds)
        grown: Labels = watershed(border, seeds, mask=regions > 0)  # type: ignore[no-untyped-call]
        return grown

    def examine(self, prediction: Prediction, sample: Sample) -> ObjectEvidence:
        truth, classes = self.read_objects(sample)
        if prediction.probabilities.shape[1:] != truth.shape:
            raise ValueError(
                f"{sample.name} has objects on {truth.shape[0]} × {truth.shape[1]} px, but was predicted on "
                f"{prediction.probabilities.shape[1]} × {prediction.probabilities.shape[2]} px; use one spacing for "
                f"both."
            )
        return ObjectEvidence(sample.name, sample.case, truth, classes, prediction)

    def choose_point(self, evidence: Iterable[ObjectEvidence], rule: str | None = None) -> dict[str, float]:
        """Of a grid of thresholds those with the highest F1 over the objects of all images; of equals nearest to ½."""
        chosen = cast(HitRule, take_rule(self, rule))
        tried = sorted(product(INSIDE_TRIED, BACKGROUND_TRIED), key=lambda pair: sum(abs(each - 0.5) for each in pair))
        areas = [round(area / self.spacing_um_px**2) for area in LEAST_UM2_TRIED]
        points = [(*pair, least_px) for pair in tried for least_px in areas]
        matches = dict.fromkeys(points, NOTHING)
        for each in evidence:
            for pair in tried:
                found = _overlaps(each.truth, self._grow(each.prediction, *pair))
                for least_px in areas:
                    matches[*pair, least_px] += match_objects(found.without_small(least_px), chosen)
        best = max(points, key=lambda point: matches[point].f1)  # the first of equals
        return dict(zip(("inside", "background", "least_px"), best, strict=True))

    def check_point(self, point: Mapping[str, object]) -> dict[str, float]:
        return expect_numbers(point, {"inside": (0.0, 1.0), "background": (0.0, 1.0), "least_px": (0.0, 1e9)})

    def score(self, evidence: Iterable[ObjectEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """F1 and PQ over all objects, means over images of AJI, AJI+ and Dice, and intervals of F1 and AJI over cases.

        With several classes, `classes` has F1 and PQ of each, for which an object and its match are of that class.
        """
        chosen = cast(HitRule, take_rule(self, rule))
        images: dict[str, dict[str, float]] = {}
        cases: list[str] = []
        rows: list[tuple[float, ...]] = []
        by_class = [NOTHING] * len(self.classes)
        known: list[Named] = []
        for each in evidence:
            known.append(Named(each.name, each.case))
            labels = self.decode(each.prediction, point)
            found = match_objects(_overlaps(each.truth, labels), chosen)
            images[each.name] = _describe(found) | {
                "aji": aggregated_jaccard(each.truth, labels),
                "aji_plus": aggregated_jaccard_plus(each.truth, labels),
                "dice": dice(each.truth, labels),
            }
            cases.append(each.case or each.name)
            means = [images[each.name][key] for key in ("aji", "aji_plus", "dice")]
            rows.append((found.hits, found.false, found.missed, found.iou_sum, *means, 1))
            classes = self.decide_classes(labels, each.prediction.probabilities)
            for number in range(len(self.classes) if not self.is_single else 0):
                truth, mine = (
                    np.where(kinds[values] == number, values, 0)
                    for kinds, values in ((each.truth_classes, each.truth), (classes, labels))
                )
                by_class[number] += match_objects(_overlaps(truth, mine), chosen)
        if not rows:
            raise ValueError("There are no fields to score.")
        names, sums = sum_by_case(cases, np.array(rows, np.float64))
        total = sums.sum(axis=0)
        aji, aji_plus, overlap = total[4:7] / total[7]
        scores: Scores = {
            "rule": chosen,
            "point": dict(point),
            **_describe(_matches(total)),
            "f1_interval": find_interval(lambda drawn: _matches(drawn).f1, sums),
            "interval_over": name_unit(known),
            "aji": float(aji),
            "aji_interval": find_interval(lambda drawn: float(drawn[4] / drawn[7]), sums),
            "aji_plus": float(aji_plus),
            "dice": float(overlap),
            "cases": {name: _describe(_matches(each)) for name, each in zip(names, sums, strict=True)},
            "images": images,
        }
        if not self.is_single:
            described = {name: _describe(found) for name, found in zip(self.class_names, by_class, strict=True)}
            for key in ("f1", "pq"):
                scores[f"macro_{key}"] = float(np.mean([each[key] for each in described.values()]))
            scores["classes"] = described
        return scores

    @classmethod
    def tally(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return tally_objects(scores["cases"])

    # Slides

    def make_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> Finder:
        return InstanceFinder(self, grid, point, folder)

    def class_maps(self, maps: Map) -> Map:
        there: Map = 1 - maps[BACKGROUND][None]
        return there if self.is_single else there * maps[len(PARTS) :]

    def foreground(self, maps: Map) -> Map:
        found: Map = 1 - maps[BACKGROUND]
        return found

    def report_maps(self, maps: Map) -> dict[str, Map]:
        return {"objects": self.foreground(maps), "borders": maps[BORDER]}

    def deviation(self, deviations: Map) -> Map:
        found: Map = deviations[BACKGROUND]  # what is left of the foreground deviates as much
        return found

    @property
    def nothing(self) -> tuple[float, ...]:
        return (0.0, 0.0, 1.0, *(0.0 for _ in range(self.outputs - len(PARTS))))

    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        return count_objects(self, counts, areas_mm2, tissue_mm2)

    def describe(self, summary: Mapping[str, float]) -> str:
        return describe_objects(self, summary)


class InstanceFinder:
    """Objects are grown within connected regions that are no background, each of which is decoded whole."""

    def __init__(self, task: Segment, grid: Grid, point: OperatingPoint, folder: Path) -> None:
        self._task, self._grid, self._point = task, grid, point
        nothing = (*task.nothing, 0.0)  # the last one is the deviation
        self._nothing = np.array(nothing, np.float32)[:, None, None]
        self._seams = Seams(grid.size, nothing, folder)
        self._rotated = False

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        self._rotated = tile.deviations is not None
        none = np.zeros_like(tile.probabilities[0])
        spread = none if tile.deviations is None else self._task.deviation(tile.deviations)
        values = np.concatenate([tile.probabilities, spread[None]])
        mask = values[BACKGROUND] < self._point["background"]
        whole = self._seams.take(tile.rows, tile.columns, mask, values)
        yield from self._decode(np.where(whole, values, self._nothing), tile.rows.start, tile.columns.start)

    def finish(self) -> Iterator[SlideObject]:
        for region in self._seams.finish():
            yield from self._decode(region.values, region.top, region.left)

    def _decode(self, values: Map, top: int, left: int) -> Iterator[SlideObject]:
        task, grid = self._task, self._grid
        maps = values[:-1]
        labels = task.decode(Prediction(maps, grid.stride_px, (0, 0)), self._point)
        classes = task.decide_classes(labels, maps)
        numbers = np.arange(1, labels.max() + 1)
        probability = ndimage.mean(task.foreground(maps), labels, numbers)
        spread = ndimage.mean(values[-1], labels, numbers)
        areas = np.bincount(labels.ravel(), minlength=len(numbers) + 1)[1:] * grid.canvas.spacing_um_px**2
        for number, parts in trace_outlines(labels, *grid.output_frame(top, left), fill_holes=True).items():
            measured = {"area_um2": areas[number - 1], "probability": probability[number - 1]}
            if self._rotated:
                measured["deviation"] = spread[number - 1]
            each = task.classes[classes[number]]
            yield SlideObject(parts, "detection", each.name, each.color, measured)


def part_map(labels: NDArray[np.integer], border_px: int = 2) -> Bytes:
    """The part that each pixel is; the border are those pixels of an object with anything else within `border_px`.

    Inside and border together are the objects; where the image ends is no border.
    """
    steps = np.arange(-border_px, border_px + 1)
    near = steps[:, None] ** 2 + steps[None, :] ** 2 <= border_px**2
    lowest = ndimage.minimum_filter(labels, footprint=near, mode="nearest")
    highest = ndimage.maximum_filter(labels, footprint=near, mode="nearest")
    return np.where(labels == 0, BACKGROUND, np.where(lowest == highest, INSIDE, BORDER)).astype(np.uint8)


def part_weights(maps: Iterable[Bytes]) -> NDArray[np.float32]:
    """Weights (3,) with which every part counts alike in the loss: inverse frequencies, 1 for the mean pixel."""
    counts = np.zeros(len(PARTS))
    for each in maps:
        counts += np.bincount(each.ravel(), minlength=len(PARTS))
    if missing := [name for name, pixels in zip(PARTS, counts, strict=True) if pixels == 0]:
        raise ValueError(f"Class weights need pixels of every class, but the images have none of {missing[0]!r}.")
    return np.asarray(counts.sum() / (len(PARTS) * counts), np.float32)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Cross-entropy of logits (B, K, h, w) and numbers (B, h, w), each pixel weighted by the weight of its number.

    It is the mean over pixels, and not over weights, so that the losses of the parts of a batch make up that of it.
    Pixels of an unknown class count as 0.
    """
    return F.cross_entropy(logits, targets, weights, reduction="none", ignore_index=UNKNOWN).mean()


def drop_small(labels: NDArray[np.integer], least_px: float) -> Labels:
    """Without the objects that have fewer pixels, and those that are left numbered from 1."""
    large = np.bincount(labels.ravel()) >= least_px
    large[0] = False
    numbers = np.cumsum(large, dtype=np.int32) * large
    kept: Labels = numbers[labels].astype(np.int32)
    return kept


def _overlaps(truth: Labels, labels: Labels) -> Overlaps:
    objects = (truth > 0) | (labels > 0)  # the rest counts for nothing, and costs most
    return overlaps(truth[objects], labels[objects])


def _matches(total: Numbers) -> ObjectMatches:
    hits, false, missed = (int(value) for value in total[:3])
    return ObjectMatches(hits, false, missed, float(total[3]))


def _describe(found: ObjectMatches) -> dict[str, float]:
    return {
        "f1": found.f1,
        "pq": found.panoptic_quality,
        "hits": found.hits,
        "false": found.false,
        "missed": found.missed,
    }
