"""Segment: outline objects such as nuclei, by a watershed from seeds inside the objects.

For each pixel, the network predicts the probabilities of three parts: inside an object, border of an object, and
background. With several classes, the network also predicts the probability of each class. All pixels of an object get
the same class. On slides, objects in one tile are found at once, and objects in regions that cross borders between
tiles after the last tile.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, islice, pairwise, product
from pathlib import Path
from typing import Any, NamedTuple, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from scipy import ndimage
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from skimage.segmentation import watershed
from torch import Tensor

from rotopath.data import DataError, Sample
from rotopath.data.annotations import Objects, mask_areas, read_objects
from rotopath.data.batches import Bytes, SampleReader
from rotopath.data.sampling import Ints, ObjectCenteredSampler, PatientBalancedSampler, Sampler, SamplerSettings
from rotopath.data.splits import select_per_stratum
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import measure_objects, smooth_outlines, trace_outlines
from rotopath.images.pyramid import MapFile
from rotopath.inference.dense import Prediction
from rotopath.inference.slide_pass import ObjectFinder
from rotopath.inference.tiling import Grid, Run, Span, Tile, run_here
from rotopath.metrics.classification import ImageCase, f1_terms
from rotopath.metrics.matching import (
    ObjectCounts,
    OverlapRule,
    Overlaps,
    compare_label_maps,
    find_overlaps,
    match_objects,
    remove_small,
    score_objects,
)
from rotopath.tasks.task import (
    Loss,
    LossWeights,
    Map,
    OperatingPoint,
    Scores,
    Task,
    TrainingWindow,
    check_numbers,
    expect_area,
    expect_threshold,
)

Labels = NDArray[np.int32]

# Each pixel belongs to one of these parts. The first three channels of the network are their probabilities.
PARTS = ("inside", "border", "background")
INSIDE, BORDER, BACKGROUND = range(3)
NO_CLASS = 255  # value of pixels outside of all objects, in target maps of classes, and of pixels in ignored areas
BORDER_UM = 0.5  # width of the border, which belongs to the object: 2 px at 0.25 µm/px
MIN_SEED_UM2 = 1.25  # smaller seeds are ignored, because they would split objects; 20 px at 0.25 µm/px
# Values of the operating point. On the validation set, all combinations of INSIDE_TRIED and BACKGROUND_TRIED are tried
# first, and then the neighbors of the best combination in THRESHOLDS, until no neighbor is better. So the best values
# are not at an end of those tried. The least area of an object is a fraction of the median area in its field.
THRESHOLDS = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.9875)
INSIDE_TRIED = (0.3, 0.5, 0.7, 0.9)
BACKGROUND_TRIED = (0.1, 0.3, 0.5, 0.7)
LEAST_FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
PREFERRED = (0.5, 0.5, 0.3)  # of operating points that are equally good, the one nearest to these values is chosen
# The largest image that counts as a field: its objects are compared with their own median area. On larger images, such
# as slides, `least_px` of the operating point is used. 2048 × 2048 px are 0.26 mm² at 0.25 µm/px.
MAX_FIELD_PX = 2**22
LARGEST_PX = 2**24  # largest bounding box of a merged region, in px²: 1 mm² at 0.25 µm/px, far larger than a nucleus
REGIONS_AT_ONCE = 32  # number of merged regions that are handed over to another process together
TILES_IN_MEMORY = 16  # number of tiles whose files are cached while regions are merged

NO_COUNTS = ObjectCounts(0, 0, 0, 0.0)


@dataclass(frozen=True)
class ObjectEvidence:
    """Annotated objects and predicted maps of one image, from which the scores are computed."""

    name: str
    case: str  # name of the patient; empty if unknown
    truth: Labels  # (H, W), label map: the number of the annotated object at each pixel, 0 for background
    truth_classes: Ints  # class index of each object number; entry 0 (background) is not used
    prediction: Prediction  # maps (K, H, W), which can be decoded at any operating point
    ignored: NDArray[np.bool_] | None = None  # (H, W), mask of the ignored areas; None: no such area


class Segment(Task):
    """Task of outlining objects, such as nuclei, of one or several classes."""

    kind = "segment"
    annotated = "objects"
    score_name = "f1"
    default_network = "nuclei"
    default_batch = 16
    default_spacing_um_px = 0.25
    prediction_type = "map"
    robustness_inputs = "fields"
    rules = get_args(OverlapRule)
    regime_unit = "fields of each organ"
    drawn_as = "outlines"
    heatmap_cell = 16
    needs_pixels = True
    scores_one_by_one = True

    @property
    def outputs(self) -> int:
        return len(PARTS) + (0 if self.is_single else len(self.classes))

    @property
    def output_names(self) -> tuple[str, ...]:
        return PARTS if self.is_single else (*PARTS, *self.class_names)

    @property
    def activation(self) -> str:
        classes = f" over the first three channels, and another over the {len(self.classes)} channels of classes"
        return "softmax" if self.is_single else f"softmax{classes}"

    def to_probabilities(self, logits: Tensor) -> Tensor:
        """Convert logits (B, K, h, w) to probabilities of the same shape.

        Softmax is applied to the first three channels, which are the parts (inside, border, background). With several
        classes, the other channels are the classes, and a separate softmax is applied to them.
        """
        parts = logits[:, : len(PARTS)].softmax(dim=1)
        return parts if self.is_single else torch.cat([parts, logits[:, len(PARTS) :].softmax(dim=1)], dim=1)

    # Data

    def check_window(self, window: TrainingWindow) -> None:
        """Raise DataError unless the network has an output for every pixel."""
        if window.stride_px != 1:
            raise DataError(
                f"Objects are segmented pixel by pixel, but the network has an output every {window.stride_px} px; use "
                f"a network with stride 1, such as 'nuclei' or 'unet'."
            )

    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        """Return `amount` randomly selected samples of each organ."""
        self.require_regime(amount)
        if unknown := [sample.name for sample in samples if not sample.stratum]:
            raise DataError(
                f"The key 'regime' selects a number of training images of each organ, but the organ of {unknown[0]} "
                f"is not known; write the organ of each image in a column `organ` of the split.csv or the manifest of "
                f"the dataset, or remove 'regime' from the recipe."
            )
        names = set(select_per_stratum({sample.name: sample.stratum for sample in samples}, int(amount), seed))
        return tuple(sample for sample in samples if sample.name in names)

    def read_objects(self, sample: Sample) -> tuple[Labels, Ints]:
        """Return the annotated objects: a label map (H, W), and an array with the class index of each object number.

        A label map contains the number of the object at each pixel, or 0 for background. Objects of classes that do not
        belong to the task become background. Entry 0 of the array is not used.
        """
        return self._index_classes(sample, read_objects(sample, self.spacing_um_px))

    def _index_classes(self, sample: Sample, objects: Objects) -> tuple[Labels, Ints]:
        """Convert objects with class names to the label map and the class indices that `read_objects` returns."""
        classes = np.zeros(int(objects.labels.max(initial=0)) + 1, np.int64)
        is_other = np.zeros(len(classes), bool)
        for number in objects.numbers:
            index = self.class_index(objects.classes.get(number, ""), sample)
            is_other[number] = index is None
            classes[number] = 0 if index is None else index
        return np.where(is_other[objects.labels], 0, objects.labels) if is_other.any() else objects.labels, classes

    def targets(self, sample: Sample) -> Bytes:
        """Return the target maps of a sample: (H, W, 1) for a single class, (H, W, 2) for several classes.

        The first map contains the part of each pixel (inside, border or background), as an index into PARTS. The second
        map contains the class index of each pixel, or NO_CLASS outside of all objects. Pixels in ignored areas have
        NO_CLASS in both maps, and do not contribute to the loss.
        """
        objects = read_objects(sample, self.spacing_um_px)
        labels, classes = self._index_classes(sample, objects)
        parts = part_map(labels, max(1, round(BORDER_UM / self.spacing_um_px)))
        class_map = np.where(labels > 0, classes[labels], NO_CLASS).astype(np.uint8)
        if (ignored := mask_areas(objects.ignored, labels.shape)) is not None:
            parts[ignored] = class_map[ignored] = NO_CLASS
        return np.dstack([parts] if self.is_single else [parts, class_map])

    # Training

    @property
    def reader(self) -> SampleReader:
        return SampleReader(self.spacing_um_px, self.stain, self.targets, 1 if self.is_single else 2)

    def count_windows(self, samples: Sequence[Sample], window: TrainingWindow) -> int:
        """Return the total area of the images, divided by the area that the network predicts in a window."""
        area_px = sum(math.prod(self.reader.without_targets.size_px(sample)) for sample in samples)
        return int(area_px / window.target_px**2)

    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        """Return a sampler that draws the same number of windows from each patient.

        If the sampler is to be balanced, half of the windows are around objects instead, the same number of each class.
        The argument `mined` (hard examples) is not used.
        """
        del mined
        patients = [sample.case or sample.name for sample in samples]
        sampler = PatientBalancedSampler(patients, settings, window.target_px)
        if settings.sampler != "balanced":
            return sampler
        centers, classes = [], []
        for image, sample in enumerate(samples):
            labels, indices = self.read_objects(sample)
            for number, box in enumerate(ndimage.find_objects(labels), 1):
                if box is not None:
                    centers.append((image, *((side.start + side.stop - 1) / 2 for side in box)))
                    classes.append(indices[number])
        return ObjectCenteredSampler(
            sampler,
            np.array(centers, np.float64).reshape(-1, 3),
            np.array(classes, np.int64),
            self.class_names,
            settings,
            window.target_px,
        )

    def make_loss(self, samples: Sequence[Sample], weights: LossWeights | None = None) -> Loss:
        """Return the loss: the weighted cross-entropy of the parts (inside, border, background).

        With several classes, the weighted cross-entropy of the classes is added. The weights are computed from the
        annotations of `samples`: rare parts and rare classes have higher weights (see `balancing_weights`). If
        `weights` is "equal", all weights are 1.
        """
        maps = [self.targets(sample) for sample in samples]
        part_weights = torch.from_numpy(balancing_weights([target[..., 0] for target in maps], PARTS))
        if weights == "equal":
            part_weights = torch.ones_like(part_weights)
        if self.is_single:
            return lambda logits, targets: weighted_cross_entropy(logits, targets, part_weights.to(logits))
        class_weights = torch.from_numpy(balancing_weights([target[..., 1] for target in maps], self.class_names))
        if weights == "equal":
            class_weights = torch.ones_like(class_weights)

        def loss(logits: Tensor, targets: Tensor) -> Tensor:
            parts, classes = logits[:, : len(PARTS)], logits[:, len(PARTS) :]
            part_loss = weighted_cross_entropy(parts, targets[:, 0], part_weights.to(logits))
            return part_loss + weighted_cross_entropy(classes, targets[:, 1], class_weights.to(logits))

        return loss

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the fraction of pixels with a correctly predicted part (inside, border or background)."""
        parts = targets if targets.ndim == 3 else targets[:, 0]
        known = (parts != NO_CLASS).double()  # pixels in ignored areas have no part
        return (logits[:, : len(PARTS)].argmax(dim=1) == parts).double().sum() / known.sum().clamp(min=1)

    # From maps to objects

    def decode(self, prediction: Prediction, point: OperatingPoint) -> Labels:
        """Convert predicted maps to a label map (H, W) of objects.

        The foreground consists of the pixels whose probability of background is below `point["background"]`. Seeds are
        connected groups of foreground pixels whose probability of inside is at least `point["inside"]`; groups with an
        area below MIN_SEED_UM2 are ignored. A watershed grows each seed to an object, until the objects cover the
        foreground. A connected component of the foreground without a seed becomes one object. Objects that are smaller
        than `find_least_px` returns are removed.
        """
        grown = self.grow(prediction, point["inside"], point["background"])
        return remove_small(grown, self.find_least_px(np.bincount(grown.ravel())[1:], grown.size, point))

    def find_least_px(self, areas_px: NDArray[np.integer], image_px: int, point: OperatingPoint) -> float:
        """Return the area in px² below which objects of an image are removed.

        It is the fraction `point["least_fraction"]` of the median area of the objects in the image. If the operating
        point does not have it, or if the image is too large for a field, it is `point["least_px"]`. `areas_px` contains
        the areas of all objects, and `image_px` is the number of pixels of the image.
        """
        if not self.is_field(image_px, point):
            return point["least_px"]
        return point["least_fraction"] * self._median_area_px(areas_px)

    def is_field(self, image_px: int, point: OperatingPoint) -> bool:
        """Return whether the least area of objects is relative to the objects of an image of this number of pixels."""
        return "least_fraction" in point and image_px <= MAX_FIELD_PX

    def _median_area_px(self, areas_px: NDArray[np.integer]) -> float:
        """Return the median area of objects in px²; 0 if there are none. Specks smaller than a seed are not objects."""
        objects = areas_px[areas_px >= MIN_SEED_UM2 / self.spacing_um_px**2]
        return float(np.median(objects)) if len(objects) else 0.0

    def decide_classes(self, labels: Labels, probabilities: Map) -> Ints:
        """Return the class index of each object number: the class with the highest mean probability in the object.

        `labels` (H, W) is the label map of the objects; `probabilities` (K, H, W) are all channels. Entry 0 of the
        result stands for the background, and is not used.
        """
        count = int(labels.max(initial=0))
        classes = np.zeros(count + 1, np.int64)
        if count and not self.is_single:
            numbers = np.arange(1, count + 1)
            means = [ndimage.mean(class_map, labels, numbers) for class_map in probabilities[len(PARTS) :]]
            classes[1:] = np.argmax(means, axis=0)
        return classes

    def grow(self, prediction: Prediction, min_inside: float, max_background: float) -> Labels:
        """Convert predicted maps to a label map (H, W) of objects. Unlike `decode`, do not remove small objects.

        `min_inside` and `max_background` are the values of `point["inside"]` and `point["background"]` in `decode`.
        """
        inside, border, background = (prediction.probabilities[i] for i in (INSIDE, BORDER, BACKGROUND))
        regions, count = ndimage.label(background < max_background)
        labels, _ = ndimage.label((inside >= min_inside) & (regions > 0))
        seeds = remove_small(labels, MIN_SEED_UM2 / self.spacing_um_px**2)
        # All pixels of a region with one seed get the number of this seed. Thin objects may consist of border pixels
        # only, so a region without a seed becomes one object, too. Only other regions need the slower watershed.
        pixels, total = np.flatnonzero(seeds), int(seeds.max(initial=0))
        region_of_seed = np.zeros(total + 1, np.int64)
        region_of_seed[seeds.ravel()[pixels]] = regions.ravel()[pixels]
        seed_count = np.bincount(region_of_seed[1:], minlength=count + 1)
        numbers = total + np.arange(count + 1, dtype=np.int32)
        numbers[region_of_seed[1:]] = np.arange(1, total + 1)
        numbers[0] = 0
        is_shared = seed_count > 1
        numbers[is_shared] = 0
        grown: Labels = numbers[regions]
        if is_shared.any():
            grown += watershed(border, seeds, mask=is_shared[regions])  # type: ignore[no-untyped-call]
        return grown

    # Evaluation

    def collect_evidence(self, prediction: Prediction, sample: Sample) -> ObjectEvidence:
        """Return the annotated objects and the predicted maps of an image."""
        objects = read_objects(sample, self.spacing_um_px)
        truth, classes = self._index_classes(sample, objects)
        if (size := prediction.probabilities.shape[1:]) != truth.shape:
            raise ValueError(
                f"The annotations of {sample.name} have {truth.shape[0]} × {truth.shape[1]} px, but the predicted maps "
                f"have {size[0]} × {size[1]} px; use the same pixel spacing for both."
            )
        ignored = mask_areas(objects.ignored, truth.shape)
        return ObjectEvidence(sample.name, sample.case, remove_ignored(truth, ignored), classes, prediction, ignored)

    def choose_operating_point(self, evidence: Iterable[ObjectEvidence], rule: str | None = None) -> dict[str, float]:
        """Return the operating point with the highest F1, computed over the objects of all images together.

        The two thresholds are searched as described at THRESHOLDS, each with all LEAST_FRACTIONS. Of several operating
        points with the highest F1, the one nearest to PREFERRED is returned. `least_px`, the least area on images that
        are too large for a field, is the best fraction of the median area of the objects in all images together.
        """
        overlap_rule = cast(OverlapRule, self.resolve_rule(rule))
        fields = list(evidence)
        medians_px: dict[tuple[float, float], float] = {}  # by the two thresholds: of the objects of all images
        counts: dict[tuple[float, float, float], ObjectCounts] = {}
        candidates = list(product(INSIDE_TRIED, BACKGROUND_TRIED))
        while candidates:
            for pair in candidates:
                found = [self._find_overlaps(field, *pair) for field in fields]
                medians_px[pair] = self._median_area_px(np.concatenate([np.empty(0, np.int64), *(a for _, a in found)]))
                for field, (overlaps, areas_px) in zip(fields, found, strict=True):
                    is_field = field.truth.size <= MAX_FIELD_PX
                    median_px = self._median_area_px(areas_px) if is_field else medians_px[pair]
                    for fraction in LEAST_FRACTIONS:
                        large = overlaps.without_small(fraction * median_px)
                        point = (*pair, fraction)
                        counts[point] = counts.get(point, NO_COUNTS) + match_objects(large, overlap_rule)
            best = max(counts, key=lambda point: (counts[point].f1, -_distance_to_preferred(point)))
            near = product(_list_neighbors(best[0]), _list_neighbors(best[1]))
            candidates = [pair for pair in near if pair not in medians_px]
        inside, background, fraction = best
        least_px = round(fraction * medians_px[inside, background], 1)
        return {"inside": inside, "background": background, "least_fraction": fraction, "least_px": least_px}

    def _find_overlaps(self, field: ObjectEvidence, min_inside: float, max_background: float) -> tuple[Overlaps, Ints]:
        """Return the overlaps of the annotated and the predicted objects of an image, and all predicted areas."""
        grown = self.grow(field.prediction, min_inside, max_background)
        areas_px = np.bincount(grown.ravel())[1:].astype(np.int64)
        return find_overlaps(field.truth, remove_ignored(grown, field.ignored)), areas_px

    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        bounds = {"inside": (0.0, 1.0), "background": (0.0, 1.0), "least_px": (0.0, 1e9)}
        if isinstance(point, Mapping) and "least_fraction" in point:  # models of earlier versions do not have it
            bounds["least_fraction"] = (0.0, 1.0)
        return check_numbers(point, bounds)

    def score(self, evidence: Iterable[ObjectEvidence], point: OperatingPoint, rule: str | None = None) -> Scores:
        """Return F1 and PQ over all objects, and AJI, AJI+ and Dice averaged over images.

        F1 and AJI have 95 % confidence intervals. These scores ignore the classes of objects. With several classes, the
        entry "classes" contains F1 and PQ of each class, computed from the objects of this class only. "macro_f1" and
        "macro_pq" are then the means of F1 and PQ over the classes.
        """
        overlap_rule = cast(OverlapRule, self.resolve_rule(rule))
        images: list[ImageCase] = []  # only names are kept, because the maps of all images may not fit in memory
        counts: list[ObjectCounts] = []
        agreements: list[dict[str, float]] = []
        counts_by_class = [NO_COUNTS] * len(self.classes)
        for field in evidence:
            labels = remove_ignored(self.decode(field.prediction, point), field.ignored)
            images.append(ImageCase(field.name, field.case))
            counts.append(match_objects(find_overlaps(field.truth, labels), overlap_rule))
            agreements.append(compare_label_maps(field.truth, labels))
            if not self.is_single:
                classes = self.decide_classes(labels, field.prediction.probabilities)
                for index in range(len(self.classes)):
                    truth = np.where(field.truth_classes[field.truth] == index, field.truth, 0)
                    predicted = np.where(classes[labels] == index, labels, 0)
                    counts_by_class[index] += match_objects(find_overlaps(truth, predicted), overlap_rule)
        if not images:
            raise ValueError("There are no images to score; choose a split that contains annotated images.")
        scores: Scores = {
            "rule": overlap_rule,
            "point": dict(point),
            **score_objects(images, counts, agreements),
        }
        if not self.is_single:
            by_class = dict(zip(self.class_names, [count.to_scores() for count in counts_by_class], strict=True))
            for key in ("f1", "pq"):
                scores[f"macro_{key}"] = float(np.mean([class_scores[key] for class_scores in by_class.values()]))
            scores["classes"] = by_class
        return scores

    @classmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        """Return the numerator and the denominator of F1 for each case."""
        return f1_terms(scores["cases"])

    def maps_for_report(self, maps: Map) -> dict[str, Map]:
        return {"objects": self.foreground_map(maps), "borders": maps[BORDER]}

    # Slides

    def adjust_operating_point(
        self, point: OperatingPoint, threshold: float | None = None, min_area_um2: float | None = None
    ) -> dict[str, float]:
        """Return the operating point with the thresholds that a user has chosen.

        `threshold` is the probability that a pixel belongs to an object, 1 - probability of background, from which a
        pixel belongs to the foreground. `point["inside"]`, which separates objects that touch, is kept.
        """
        adjusted = dict(point)
        if threshold is not None:
            adjusted["background"] = round(1 - expect_threshold(threshold), 9)  # 1 - 0.9 is 0.1
        if min_area_um2 is not None:
            # Rounded, so that an area of a whole number of pixels is not just above this number.
            adjusted["least_px"] = round(expect_area(min_area_um2) / self.spacing_um_px**2, 6)
            adjusted.pop("least_fraction", None)  # this area applies to fields too
        return adjusted

    def describe_operating_point(self, point: OperatingPoint) -> str:
        area = f"minimum area {point['least_px'] * self.spacing_um_px**2:.4g} µm²"
        if "least_fraction" in point:
            area += f", in fields {point['least_fraction']:.4g} of the median area"
        return f"threshold {1 - point['background']:.4g}, {area}"

    @property
    def measurement_names(self) -> tuple[str, ...]:
        pixel = np.ones((1, 1), np.float32)
        return tuple(measure_objects(pixel.astype(np.int32), pixel, None, np.stack([pixel] * 3), 1.0))

    def make_object_finder(self, grid: Grid, point: OperatingPoint, folder: Path) -> ObjectFinder:
        """Return an object finder that finds the objects of each tile. Temporary files are written to `folder`.

        Objects in regions that cross tile borders are found after the last tile.
        """
        return InstanceFinder(self, grid, point, folder)

    def class_maps(self, maps: Map) -> Map:
        """Return, for each class, the probability that a pixel belongs to an object of this class: (classes, h, w)."""
        foreground = self.foreground_map(maps)[None]
        return foreground if self.is_single else foreground * maps[len(PARTS) :]

    def foreground_map(self, maps: Map) -> Map:
        foreground: Map = 1 - maps[BACKGROUND]
        return foreground

    def foreground_deviation(self, deviations: Map) -> Map:
        """Return the standard deviation (h, w) of the foreground probability, which is 1 - background probability."""
        background: Map = deviations[BACKGROUND]
        return background

    @property
    def background_probabilities(self) -> tuple[float, ...]:
        return (0.0, 0.0, 1.0, *(0.0 for _ in range(self.outputs - len(PARTS))))


# Objects of slides. A region is a connected component of the foreground, and may contain several objects.


class Rectangle(NamedTuple):
    """The outputs in a rectangle of the slide, with k channels.

    The channels are the K probabilities, then red, green and blue of the pixel, and then, if the slide is predicted at
    several rotations, the standard deviation of the foreground probability over the rotations.
    """

    top: int  # first row of the rectangle on the slide
    left: int
    values: Map  # (k, h, w)


class FoundObjects(NamedTuple):
    """The objects in a rectangle of outputs."""

    top: int  # first row of the rectangle on the slide
    left: int
    labels: Labels  # (h, w), label map: object i has the number i + 1
    objects: list[SlideObject]
    areas_px: Ints  # of each object, as a number of outputs

    def select(self, is_kept: NDArray[np.bool_]) -> "FoundObjects":
        """Return the objects for which the mask is true."""
        numbers = np.zeros(len(is_kept) + 1, self.labels.dtype)
        numbers[1:][is_kept] = 1 + np.arange(is_kept.sum())
        kept = [item for item, wanted in zip(self.objects, is_kept.tolist(), strict=True) if wanted]
        return FoundObjects(self.top, self.left, numbers[self.labels], kept, self.areas_px[is_kept])


class TileParts(NamedTuple):
    """The parts of regions in one tile, without their pixels, as `split_tile` returns them."""

    rows: Span  # of the tile on the slide
    columns: Span
    total: int  # number of parts; they have the numbers 1 to `total`
    edges: tuple[Labels, ...]  # part number of each output along the top, bottom, left and right edge; 0: no part
    boxes: Ints  # (total, 4): top, left, bottom and right of the bounding box of each part, on the slide


def split_tile(
    size: tuple[int, ...], folder: Path, number: int, spans: tuple[Span, Span], mask: NDArray[np.bool_], values: Map
) -> tuple[NDArray[np.bool_], TileParts]:
    """Split the regions of a tile into complete regions and parts, and store the outputs of the parts in a file.

    A region that touches no border to another tile is complete. Any other region of the tile may have parts in several
    tiles. `size` is the number of rows and columns of outputs on the slide, `number` counts the tiles from 0, and
    `spans` are the rows and columns of the tile. `mask` (h, w) is true in regions, and `values` (k, h, w) are the
    channels. Returns a mask (h, w) of the complete regions, and the parts, which `Seams.join` takes.
    """
    rows, columns = spans
    regions, count = ndimage.label(mask)
    is_cut = np.zeros(count + 1, bool)
    is_border = (rows.start > 0, rows.stop < size[0], columns.start > 0, columns.stop < size[1])
    for edge, border in zip(_edges(regions), is_border, strict=True):
        is_cut[edge] |= border
    is_cut[0] = False
    part_numbers = np.where(is_cut, np.cumsum(is_cut), 0).astype(np.int32)[regions]
    pixels = np.flatnonzero(part_numbers)
    in_parts = values.reshape(len(values), -1)[:, pixels]
    np.savez(folder / f"{number}.npz", pixels=pixels, part_numbers=part_numbers.ravel()[pixels], values=in_parts)
    edges = tuple(edge.copy() for edge in _edges(part_numbers))
    boxes = [
        (down.start + rows.start, across.start + columns.start, down.stop + rows.start, across.stop + columns.start)
        for down, across in ndimage.find_objects(part_numbers)
    ]
    parts = TileParts(rows, columns, len(boxes), edges, np.array(boxes, np.int64).reshape(-1, 4))
    return mask & (part_numbers == 0), parts


def _edges(labels: Labels) -> tuple[Labels, ...]:
    """Return the top, bottom, left and right edge of a label map."""
    return labels[0], labels[-1], labels[:, 0], labels[:, -1]


class Seams:
    """Merges the parts of regions that cross borders between tiles.

    Call `split_tile`, which may run in another process, and `join` for each tile, row by row and from left to right,
    and then `finish`. Regions are 4-connected: outputs that touch only at a corner are not connected. The outputs of
    the parts are in the files that `split_tile` writes to `folder`. Two things stay in memory: the edges of tiles that
    have no neighbor yet, and a table that states which parts are connected. `background` has a value for each of the
    first channels. Outputs outside of a merged region, but in its bounding box, get these values (other channels: 0).
    """

    def __init__(self, background: Sequence[float], folder: Path) -> None:
        self._background, self._folder = np.asarray(background, np.float32), folder
        self._tiles: list[tuple[Span, Span]] = []  # rows and columns of each tile
        self._firsts = [0]  # index of the first part of each tile, among all parts of the slide, and their number
        self._boxes: list[Ints] = [np.empty((0, 4), np.int64)]  # bounding boxes (n, 4) of the parts of each tile
        self._pairs: list[NDArray[np.integer]] = []  # (2, n): indices of parts that are connected
        # Edges of tiles whose neighbors are still to come: the index of the part at each output, or -1. The
        # key is the axis that the edge crosses, and the first row and column of the neighbor.
        self._open_edges: dict[tuple[int, int, int], NDArray[np.integer]] = {}
        self._load = lru_cache(maxsize=TILES_IN_MEMORY)(self._load_file)

    def join(self, parts: TileParts) -> None:
        """Record the parts of a tile, and which of them are connected to parts of the tiles above and to the left."""
        rows, columns = parts.rows, parts.columns
        first = self._firsts[-1]
        self._firsts.append(first + parts.total)
        self._tiles.append((rows, columns))
        self._boxes.append(parts.boxes)
        top, bottom, left, right = (np.where(edge > 0, first + edge - 1, -1) for edge in parts.edges)
        for axis, edge in enumerate((top, left)):
            neighbor = self._open_edges.pop((axis, rows.start, columns.start), None)
            if neighbor is not None:  # otherwise that tile was skipped
                pairs = np.stack([edge, neighbor])
                self._pairs.append(np.unique(pairs[:, (pairs >= 0).all(axis=0)], axis=1))
        self._open_edges[0, rows.stop, columns.start] = bottom
        self._open_edges[1, rows.start, columns.stop] = right

    def finish(self) -> Iterator[Rectangle]:
        """Merge and yield all regions that touch a border between tiles. Call this after the last tile.

        If the bounding box of a region is larger than `LARGEST_PX`, each of its parts is yielded as a separate region.
        """
        boxes = np.concatenate(self._boxes)
        pairs = np.concatenate([np.empty((2, 0), np.int64), *self._pairs], axis=1)
        count = self._firsts[-1]
        table = coo_array((np.ones(pairs.shape[1], bool), tuple(pairs)), shape=(count, count))
        regions = connected_components(table, directed=False)[1] if count else np.empty(0, np.int32)
        order = np.argsort(regions, kind="stable")
        bounds = np.flatnonzero(np.diff(regions[order], prepend=-1, append=-1))
        for start, stop in pairwise(bounds):
            indices = order[start:stop]
            top, left = boxes[indices, :2].min(axis=0).tolist()
            bottom, right = boxes[indices, 2:].max(axis=0).tolist()
            if (bottom - top) * (right - left) <= LARGEST_PX:
                yield self._merge(indices)
            else:  # such a region may be as large as the tissue, and would not fit in memory
                yield from (self._merge(indices[i : i + 1]) for i in range(len(indices)))

    def _merge(self, indices: Ints) -> Rectangle:
        """Merge the parts of one region, given by their indices, and return it in its bounding box."""
        tiles = [bisect_right(self._firsts, index) - 1 for index in indices.tolist()]
        numbers = [index - self._firsts[tile] + 1 for index, tile in zip(indices.tolist(), tiles, strict=True)]
        parts = [self._read_part(*part) for part in zip(tiles, numbers, strict=True)]
        positions = np.concatenate([positions for positions, _ in parts], axis=1)  # (2, pixels)
        top, left = positions.min(axis=1)
        height, width = positions.max(axis=1) + 1 - (top, left)
        values = np.concatenate([values for _, values in parts], axis=1)  # (k, pixels)
        box = np.zeros((len(values), height, width), np.float32)
        box[: len(self._background)] = self._background[:, None, None]
        box[:, positions[0] - top, positions[1] - left] = values
        return Rectangle(int(top), int(left), box)

    def _read_part(self, tile: int, part: int) -> tuple[NDArray[np.int64], Map]:
        """Return the part of a region in one tile: positions of outputs on the slide (2, n), and channels (k, n)."""
        starts, pixels, values = self._load(tile)
        inside = slice(starts[part], starts[part + 1])
        rows, columns = self._tiles[tile]
        down, right = np.divmod(pixels[inside], columns.size)
        return np.stack([down + rows.start, right + columns.start]), values[:, inside]

    def _load_file(self, tile: int) -> tuple[list[int], NDArray[np.int64], Map]:
        """Return what `split_tile` saved for a tile: flat indices (n,) and channels (k, n), sorted by part number.

        The first result is the first index of each part number in the other two, with one more entry at the end.
        """
        with np.load(self._folder / f"{tile}.npz") as arrays:
            pixels, part_numbers, values = arrays["pixels"], arrays["part_numbers"], arrays["values"]
        order = np.argsort(part_numbers, kind="stable")
        starts = np.searchsorted(part_numbers, np.arange(part_numbers.max(initial=0) + 2), sorter=order)
        return starts.tolist(), pixels[order], values[:, order]


@dataclass(frozen=True)
class InstanceSearch:
    """Finds the objects in a tile or in a region that crosses tile borders. It can be sent to another process."""

    task: Segment
    grid: Grid
    point: OperatingPoint
    folder: Path  # for the outputs of regions that cross tile borders

    @property
    def is_field(self) -> bool:
        """Whether the least area of objects is relative to the objects of the image, see `Segment.find_least_px`."""
        return self.task.is_field(self.grid.size[0] * self.grid.size[1], self.point)

    def search_tile(self, item: tuple[int, Tile]) -> tuple[TileParts, FoundObjects]:
        """Find the objects of the regions that are completely inside a tile, and return the parts of other regions.

        `item` is the number of the tile and the tile.
        """
        number, tile = item
        if tile.pixels is None:
            raise ValueError(
                "Objects are measured on the pixels of a tile; call `predict_tiles` with with_pixels=True."
            )
        channels: list[NDArray[Any]] = [tile.probabilities, tile.pixels.transpose(2, 0, 1)]
        if tile.deviations is not None:
            channels.append(self.task.foreground_deviation(tile.deviations)[None])
        values = np.concatenate(channels, dtype=np.float32)
        mask = values[BACKGROUND] < self.point["background"]
        is_complete, parts = split_tile(self.grid.size, self.folder, number, (tile.rows, tile.columns), mask, values)
        for channel, background in zip(values, self.task.background_probabilities, strict=False):
            np.copyto(channel, background, where=~is_complete)
        return parts, self.search(Rectangle(tile.rows.start, tile.columns.start, values))

    def search_all(self, rectangles: Sequence[Rectangle]) -> list[FoundObjects]:
        """Find the objects in several rectangles."""
        return [self.search(rectangle) for rectangle in rectangles]

    def search(self, rectangle: Rectangle) -> FoundObjects:
        """Find the objects in a rectangle of outputs."""
        task, grid, (top, left, values) = self.task, self.grid, rectangle
        maps, pixels, deviations = np.split(values, [task.outputs, task.outputs + 3])
        labels = task.grow(Prediction(maps, grid.stride_px, (0, 0)), self.point["inside"], self.point["background"])
        # In a field, the least area depends on all objects, see `InstanceFinder`.
        labels = remove_small(labels, 1 if self.is_field else self.point["least_px"])
        classes = task.decide_classes(labels, maps)
        deviation = deviations[0] if len(deviations) else None
        spacing_um = grid.stride_px * grid.spacing_um_px
        measured = measure_objects(labels, task.foreground_map(maps), deviation, pixels, spacing_um)
        corner, side = grid.output_frame(top, left)
        outlines = smooth_outlines(trace_outlines(labels, corner, side, fill_holes=True), side)
        objects = []
        for number, polygons in outlines.items():
            measurements = {name: float(column[number - 1]) for name, column in measured.items()}
            object_class = task.classes[classes[number]]
            item = SlideObject(polygons, "detection", object_class.name, object_class.color, measurements)
            item.render(grid.origin_px)  # here, so that workers do it
            objects.append(item)
        areas_px = np.bincount(labels.ravel(), minlength=len(objects) + 1)[1:].astype(np.int64)
        return FoundObjects(top, left, labels.astype(np.min_scalar_type(len(objects))), objects, areas_px)


class InstanceFinder:
    """Finds the objects of a slide. Objects in regions that cross tile borders are found after the last tile.

    In a field, small objects are removed after all objects have been found, because the least area depends on them.

    `labels` is the label map of all objects that were yielded; the first one has the number 1.
    """

    def __init__(self, task: Segment, grid: Grid, point: OperatingPoint, folder: Path) -> None:
        self._search = InstanceSearch(task, grid, point, folder)
        self._seams = Seams(task.background_probabilities, folder)
        self._count = 0
        self.labels = MapFile(folder / "labels", grid.size, np.uint32)
        self.is_wanted: Callable[[SlideObject], bool] = lambda _: True

    def find(self, tiles: Iterable[Tile], run: Run = run_here) -> Generator[SlideObject]:
        """Yield the objects of each tile and then, after the last tile, those that cross tile borders."""
        with closing(self._find_all(tiles, run)) as found:
            for objects in self._remove_small(list(found)) if self._search.is_field else found:
                yield from self._paint(objects)

    def _find_all(self, tiles: Iterable[Tile], run: Run) -> Generator[FoundObjects]:
        with closing(run(self._search.search_tile, enumerate(tiles))) as results:
            for parts, found in results:
                self._seams.join(parts)
                yield found
        merged = self._seams.finish()
        batches = iter(lambda: list(islice(merged, REGIONS_AT_ONCE)), [])
        with closing(run(self._search.search_all, batches)) as results:
            yield from chain.from_iterable(results)

    def _remove_small(self, found: Sequence[FoundObjects]) -> Iterator[FoundObjects]:
        """Yield the objects of a field without those that are small compared with all of them."""
        search = self._search
        areas_px = np.concatenate([np.empty(0, np.int64), *(objects.areas_px for objects in found)])
        least_px = search.task.find_least_px(areas_px, search.grid.size[0] * search.grid.size[1], search.point)
        for objects in found:
            yield objects.select(objects.areas_px >= least_px)

    def _paint(self, found: FoundObjects) -> Iterator[SlideObject]:
        """Paint the wanted objects into the label map, and yield them."""
        is_wanted = np.array([self.is_wanted(item) for item in found.objects], bool)
        wanted = found if is_wanted.all() else found.select(is_wanted)
        numbers = np.append(0, self._count + 1 + np.arange(len(wanted.objects))).astype(np.uint32)
        self._count += len(wanted.objects)
        self.labels.paint(found.top, found.left, numbers[wanted.labels])
        yield from wanted.objects


# Operating points


def _distance_to_preferred(point: tuple[float, float, float]) -> float:
    """Return how far an operating point is from PREFERRED."""
    return sum(abs(value - preferred) for value, preferred in zip(point, PREFERRED, strict=True))


def _list_neighbors(threshold: float) -> tuple[float, ...]:
    """Return a threshold, and those before and after it in THRESHOLDS."""
    index = THRESHOLDS.index(threshold)
    return THRESHOLDS[max(0, index - 1) : index + 2]


# Ignored areas


def remove_ignored(labels: Labels, ignored: NDArray[np.bool_] | None) -> Labels:
    """Return a label map without the objects of which at least half is in ignored areas. The others keep their numbers.

    `ignored` (H, W) is the mask of these areas; None means that there is none. Such objects are not scored.
    """
    if ignored is None:
        return labels
    areas = np.bincount(labels.ravel())
    inside = np.bincount(labels[ignored], minlength=len(areas))
    return np.where((2 * inside >= areas)[labels], 0, labels)


# Targets and loss


def part_map(labels: NDArray[np.integer], border_px: int = 2) -> Bytes:
    """Convert a label map (H, W) to a map (H, W) of the parts of objects, as indices into PARTS.

    A pixel of an object is a border pixel if another object or background is at most `border_px` away, and otherwise an
    inside pixel. Where the edge of the image cuts an object, the edge is not a border.
    """
    steps = np.arange(-border_px, border_px + 1)
    disc = steps[:, None] ** 2 + steps[None, :] ** 2 <= border_px**2
    lowest = ndimage.minimum_filter(labels, footprint=disc, mode="nearest")
    highest = ndimage.maximum_filter(labels, footprint=disc, mode="nearest")
    return np.where(labels == 0, BACKGROUND, np.where(lowest == highest, INSIDE, BORDER)).astype(np.uint8)


def balancing_weights(maps: Iterable[Bytes], names: Sequence[str]) -> NDArray[np.float32]:
    """Return a weight for each class in `names`, so that all classes contribute equally to the mean loss.

    `maps` are arrays (H, W) with the index of the class of each pixel, or NO_CLASS. The three parts (inside, border,
    background) may take the place of the classes. The weight of a class is the number of all pixels, including those
    with NO_CLASS, divided by the number of classes and by the number of pixels of the class. Raises DataError if a
    class has no pixel.
    """
    counts = np.zeros(NO_CLASS + 1)
    for target in maps:
        counts += np.bincount(target.ravel(), minlength=NO_CLASS + 1)
    present = counts[: len(names)]
    if missing := [name for name, pixels in zip(names, present, strict=True) if not pixels]:
        raise DataError(
            f"The training images have no pixel of class {missing[0]!r}; every class is needed, so add images that "
            f"contain this class."
        )
    return np.asarray(counts.sum() / (len(names) * present), np.float32)


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Return the weighted cross-entropy for logits (B, K, h, w), class indices (B, h, w) and class weights (K,).

    It is the sum of the weighted losses of all pixels, divided by the number of pixels (not by the sum of the weights).
    The loss of a batch is therefore the mean of the losses of its windows. Pixels with NO_CLASS have a loss of 0.
    """
    return F.cross_entropy(logits, targets, weights, reduction="none", ignore_index=NO_CLASS).mean()
