"""Open a dataset of any known format, and check its contents.

`check` reads everything and also looks for mistakes that make annotations useless: exchanged rows and columns, outlines
that are shifted against the image, a wrong pixel spacing, the same image in two splits, and objects of one pixel. Most
annotated objects are nuclei, or contain nuclei, which are dark in the red channel; the checks compare the brightness at
the annotated positions with that at other positions of the same image.

`FORMATS` is the table of all formats. To add a format:

1. Write `data/my_format.py` with two functions. `is_my_format(root)` returns whether a folder has the format; it uses
   file names only and reads no file. `open_my_format(root)` returns a `Dataset` and reports faulty files as findings.
   If some images do not specify their pixel spacing, `open_my_format` also has the parameter `spacing_um_px`. kumar.py
   is an example; dataset.py contains functions for all formats.
2. Add a row to `FORMATS`.
3. In tests/layouts.py, add a function that writes a tiny dataset in the format. Add tests to
   tests/data/test_my_format.py.
4. Describe the format in docs/data.md.
"""

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.amida13 import is_amida13, open_amida13
from rotopath.data.annotations import AnnotationError, Objects, Points, parse_objects, parse_points
from rotopath.data.dataset import (
    SYNTHETIC_MARKER,
    Annotated,
    DataError,
    Dataset,
    Finding,
    Sample,
    count_and_list,
    group_for_reading,
    image_spacing_um_px,
    read_together,
)
from rotopath.data.kumar import is_kumar, open_kumar
from rotopath.data.manifest import MANIFEST_FILE, is_class_folders, open_class_folders, open_manifest
from rotopath.data.pcam import is_kaggle, is_pcam, open_kaggle, open_pcam
from rotopath.data.splits import SPLITS, find_leaks
from rotopath.images.files import UnreadableFileError, is_plausible
from rotopath.metrics.matching import aggregated_jaccard


@dataclass(frozen=True)
class Format:
    """A dataset format: one row of the table `FORMATS`."""

    example: str  # description of a folder in this format, for error messages
    detect: Callable[[Path], bool]  # returns whether a folder has this format
    open: Callable[[Path, float | None], Dataset]  # takes the folder, and the pixel spacing of images that specify none
    fallback: bool = False  # whether the format is tried only if no other format fits the folder or a subfolder


# A manifest comes first, because it has priority over the layout of the files beside it.
FORMATS = (
    Format(
        "a folder with a manifest.csv",
        lambda root: (root / MANIFEST_FILE).is_file(),
        lambda root, spacing_um_px: open_manifest(root / MANIFEST_FILE, spacing_um_px),
    ),
    Format(
        "the unpacked folders of AMIDA13 (mitoses_image_data_part_1, mitoses_ground_truth)",
        is_amida13,
        lambda root, _: open_amida13(root),
    ),
    Format(
        "the files of PCam (camelyonpatch_level_2_split_train_x.h5, ...)",
        is_pcam,
        lambda root, _: open_pcam(root),
    ),
    Format(
        "PCam as on Kaggle (train, train_labels.csv)",
        is_kaggle,
        lambda root, _: open_kaggle(root),
    ),
    Format(
        "Kumar or MoNuSeg (Tissue Images, Annotations)",
        is_kumar,
        lambda root, _: open_kumar(root),
    ),
    Format(
        "a folder of patches for each class",
        is_class_folders,
        open_class_folders,
        fallback=True,
    ),
)

ANNOTATION_KINDS: Mapping[Annotated, str] = {
    "labels": "a class for each image",
    "points": "positions of objects",
    "objects": "outlines of objects",
}


IGNORED = "ignored areas"  # their name in tables of counts
SPACING_TOLERANCE = 0.1
RARE = 10  # a class with fewer objects in the training images is reported
RADIUS_UM = 1.5  # of the area around a point whose brightness is measured
FAR_UM = 6.0  # positions that are compared must be this far apart
CERTAIN = 3.0  # standard errors by which a mean difference must exceed 0
GLASS = 215  # brightness of the darkest channel above which an area is empty background
MIN_POINTS, MIN_OBJECTS = 10, 20  # with fewer objects, nothing is concluded
DIAMETER = 1.1283791670955126  # of a disc with an area of 1
MAX_SHIFT_UM = 8.0  # outlines are moved by up to this distance
MIN_SHIFT_UM = 0.75
MIN_GAIN = 0.08  # of the correlation; 20 times larger than in correctly annotated images
MIN_BEST = 0.25  # correlation after the move
# A common shift of images is reported if it is smaller: the number of images, and the fraction that agree
MIN_IMAGES, MIN_AGREEING = 5, 0.8
MIN_COMMON_UM, MIN_COMMON_GAIN = 0.45, 0.02
MIN_COVER = 0.01  # images in which objects cover less than this fraction are too uncertain
MAX_MEASURED_PX = 2048  # side of the part of an image in which the fit of outlines is measured
# Range of plausible median diameters of nuclei: of their outlines, and of the dark objects around points, which
# are measured as slightly larger. A pixel spacing that is wrong by a factor of 2 is outside, except for small nuclei.
PLAUSIBLE_UM: Mapping[Annotated, tuple[float, float]] = {"objects": (3.1, 7.5), "points": (3.6, 10.0)}
SCALES_PX = tuple(2 ** (step / 6) for step in range(28))  # standard deviations at which dark objects are measured
MAX_POINTS_MEASURED = 50  # of an image
CORNER = 0.05  # as a fraction of the height or width of an image
MAX_COVERED = 0.1  # fraction of outlines that others cover
MAX_SPECKS = 0.02  # fraction of objects of one pixel


# Opening


def open_data(path: Path | str, annotated: Annotated | None = None, spacing_um_px: float | None = None) -> Dataset:
    """Open the dataset at a path: a folder in a known format, its parent folder, or a CSV manifest.

    `annotated` is the required type of annotation; None allows any type. `spacing_um_px` is the pixel spacing of images
    in class folders or in a manifest for which no spacing is specified. Problems of file names and tables, and patients
    or slides with images in several splits, are reported in `findings` of the returned dataset. Raises DataError if
    there is no usable dataset at the path, or if the dataset has another type of annotation. Raises UnreadableFileError
    if a table is damaged.
    """
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        raise DataError(f"The pixel spacing given for {path} is {spacing_um_px:g} µm/px; expected 0.05 to 5 µm/px.")
    dataset = _open(Path(path), spacing_um_px)
    if (dataset.root / SYNTHETIC_MARKER).exists():
        dataset = replace(dataset, source=f"{dataset.source} (synthetic)")
    if annotated is not None and dataset.annotated != annotated:
        raise DataError(
            f"{path} ({dataset.source}) contains {ANNOTATION_KINDS[dataset.annotated]}; expected "
            f"{ANNOTATION_KINDS[annotated]}; choose other data, or another task."
        )
    leaks = find_leaks((sample.case, sample.split) for sample in dataset.samples if sample.case)
    return replace(dataset, findings=(*dataset.findings, *(Finding("", message) for message in leaks)))


def _open(path: Path, spacing_um_px: float | None) -> Dataset:
    """Open the dataset at a path, without the checks of `open_data`.

    A file must be a CSV manifest. For a folder, the formats are tried in this order: formats without `fallback` for the
    folder, the same formats for its subfolders, and then formats with `fallback` for the folder and its subfolders.
    Raises DataError if no format fits, or if formats without `fallback` fit several subfolders.
    """
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    if not path.is_dir():
        if path.suffix.lower() != ".csv":
            raise DataError(
                f"{path} is a file, but not a CSV manifest; expected a folder or a CSV manifest; `rotopath data "
                f"import` writes a manifest from files of other software."
            )
        return open_manifest(path, spacing_um_px)
    match = _match_format(path)
    if match is None:
        fault = "is empty" if not any(path.iterdir()) else "is not a dataset of a known format"
        raise DataError(
            f"{path} {fault}; expected {'; or '.join(known.example for known in FORMATS)}; `rotopath data "
            f"import` reads other formats, such as those of QuPath and COCO."
        )
    folder, known = match
    return known.open(folder, spacing_um_px)


def is_dataset(path: Path) -> bool:
    """Return whether a path is a CSV file or a folder in a known format, so that `open_data` reads it."""
    return path.suffix.lower() == ".csv" if not path.is_dir() else _match_format(path) is not None


def _match_format(path: Path) -> tuple[Path, Format] | None:
    """Return the first format that fits a folder or one of its subfolders, and the folder that it fits, or None.

    Raises DataError if formats without `fallback` fit several subfolders.
    """
    if (known := _find_format(path)) is not None:
        return path, known
    # Unpacking an archive often adds one level of folders.
    subfolders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    matches = [(folder, known) for folder in subfolders if (known := _find_format(folder)) is not None]
    if len(matches) > 1:
        folders = ", ".join(str(folder) for folder, _ in matches)
        raise DataError(f"{path} contains more than one dataset ({folders}); choose one of these folders.")
    fallbacks = ((folder, known) for folder in (path, *subfolders) for known in FORMATS if known.fallback)
    return (
        matches[0] if matches else next(((folder, known) for folder, known in fallbacks if known.detect(folder)), None)
    )


def _find_format(folder: Path) -> Format | None:
    """Return the first format that fits the folder, or None. Formats with `fallback` are not tried."""
    return next((known for known in FORMATS if not known.fallback and known.detect(folder)), None)


# Checking


@dataclass(frozen=True)
class Check:
    """Result of checking a dataset: counts and findings."""

    dataset: Dataset
    counts: dict[str, Counter[str]]  # counts[split][name]; names: "images", "cases", `dataset.objects`, and classes
    findings: tuple[Finding, ...]  # problems and notes
    # Aggregated Jaccard index between label map and outlines, by image name, for images that have both files.
    agreement: dict[str, float]


@dataclass
class _Contents:
    """Result of checking one group of samples, which are read together: counts and findings."""

    path: Path  # of the first image file
    name: str  # of this file, for messages
    objects: Counter[str] = field(default_factory=Counter)  # objects[name]; names: `dataset.objects`, and classes
    findings: list[Finding] = field(default_factory=list)  # problems and notes
    agreement: dict[str, float] = field(default_factory=dict)  # by image name, as in `Check.agreement`
    digests: list[tuple[str, str, bytes]] = field(
        default_factory=list
    )  # name and split of an image, hash of its pixels
    first_unnamed: str = ""  # position of the first object without a class, for messages; empty if there is none
    unnamed: int = 0  # number of objects without a class
    areas_px: list[int] = field(default_factory=list)  # of all objects with outlines
    # The diameters of the objects of each image, and the pixel spacing that its file specifies, if any, divided by that
    # of the dataset.
    diameters_um: list[tuple[NDArray[np.float64], float | None]] = field(default_factory=list)
    points: int = 0  # number of points
    # How much darker an image is at a point than at a random position; at a point than with row and column exchanged;
    # and at the exchanged position than at a random position.
    darker_than_random: list[float] = field(default_factory=list)
    darker_than_swapped: list[float] = field(default_factory=list)
    swapped_darker_than_random: list[float] = field(default_factory=list)
    more_contrast_than_random: list[float] = field(default_factory=list)  # of the dark objects at points
    on_glass: int = 0  # number of points on empty background
    outside: list[bool] = field(
        default_factory=list
    )  # of each point outside the image: whether it is inside if swapped
    spans: list[tuple[float, float]] = field(default_factory=list)  # lowest and highest position, from 0 to 1, by axis
    fits: list["_Fit"] = field(default_factory=list)  # of each image with outlines


@dataclass(frozen=True)
class _Fit:
    """Correlation of the outlines of an image with the darkness of its pixels."""

    name: str
    correlation: float  # at the annotated positions
    swapped: float  # with rows and columns exchanged
    best: float  # the highest correlation, if the outlines are moved
    down_px: int  # the move with the highest correlation
    right_px: int
    spacing_um_px: float


def check(dataset: Dataset, on_progress: Callable[[int], object] = lambda _: None) -> Check:
    """Read every image and annotation of a dataset, count them, and collect all problems and notes.

    `on_progress` is a function that is called with the number of samples that were read since its previous call.
    """
    counts: dict[str, Counter[str]] = {split: Counter() for split in SPLITS}
    findings = list(dataset.findings)
    agreement: dict[str, float] = {}
    for sample in dataset.samples:
        counts[sample.split]["images"] += 1
    for split in SPLITS:
        cases = {sample.case for sample in dataset.samples if sample.split == split}
        counts[split]["cases"] = len(cases - {""})
    groups = group_for_reading(dataset.samples)
    findings += _compare_spacings(dataset)
    evidence: list[_Contents] = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for group, contents in zip(groups, pool.map(partial(_check_group, dataset), groups), strict=True):
            counts[group[0].split].update(contents.objects)
            findings += contents.findings
            agreement |= contents.agreement
            evidence.append(contents)
            on_progress(len(group))
    findings += _find_empty_splits(dataset)
    findings += [*_find_faulty_classes(dataset, counts), *_find_unnamed(dataset, counts, evidence)]
    findings += [*_find_copies(evidence), *_find_misplaced_points(evidence)]
    findings += [*_find_misplaced_outlines(evidence), *_find_specks(evidence)]
    if dataset.annotated != "labels" and sum(counts[split][dataset.objects] for split in SPLITS) >= MIN_OBJECTS:
        findings += [*_find_wrong_spacing(dataset.annotated, evidence), *_find_wrong_scale(evidence)]
    return Check(dataset, counts, tuple(findings), agreement)


def _find_empty_splits(dataset: Dataset) -> list[Finding]:
    """Return a note for each split without images, or a problem if the dataset has no images at all."""
    if not dataset.samples:
        return [Finding("", "the dataset contains no image that can be used.")]
    present = {sample.split for sample in dataset.samples}
    return [Finding("", f"the split {s!r} contains no images.", is_problem=False) for s in SPLITS if s not in present]


def _check_group(dataset: Dataset, samples: list[Sample]) -> _Contents:
    """Read the images and the annotations of a group of samples; return counts and findings."""
    contents = _Contents(samples[0].path, samples[0].name.removesuffix(f" {samples[0].box}"))
    try:
        images = read_together(samples)
    except UnreadableFileError as error:
        contents.findings.append(Finding.from_error(error, dataset.root))
        return contents
    for sample, image in zip(samples, images, strict=True):
        if image.min() < image.max():  # images of empty background may be equal
            digest = hashlib.blake2b(image.tobytes(), digest_size=16).digest()
            contents.digests.append((sample.name, sample.split, digest))
    if dataset.annotated == "labels":
        contents.objects.update(sample.label or "" for sample in samples)
    elif dataset.annotated == "points":
        _check_points(samples[0], images[0], dataset, contents)
    else:
        _check_objects(samples[0], images[0], dataset, contents)
    return contents


def _compare_spacings(dataset: Dataset) -> list[Finding]:
    """Return a note for each image file that specifies another pixel spacing than that which is used."""
    findings = []
    for sample in {sample.path: sample for sample in dataset.samples}.values():
        ratio = _find_spacing_ratio(sample)
        if ratio is None or abs(ratio - 1) <= SPACING_TOLERANCE:
            continue
        message = (
            f"the file specifies {ratio * sample.spacing_um_px:.4g} µm/px, but the dataset {sample.spacing_um_px:.4g} "
            f"µm/px, which is used; correct the dataset if the file is right."
        )
        findings.append(Finding(sample.name, message, is_problem=False))
    return findings


def _find_spacing_ratio(sample: Sample) -> float | None:
    """Return the pixel spacing that the file of a sample specifies, divided by that of the sample, or None."""
    try:
        stated = None if sample.row is not None else image_spacing_um_px(sample.path)
    except UnreadableFileError:
        return None  # reported with its pixels
    return None if stated is None else stated / sample.spacing_um_px


def _check_points(sample: Sample, image: NDArray[np.uint8], dataset: Dataset, contents: _Contents) -> None:
    """Read the annotation file of a sample; count its points, and add the counts and all findings to `contents`."""
    try:
        points, faults = parse_points(sample)
    except UnreadableFileError as error:
        contents.findings.append(Finding.from_error(error, dataset.root))
        return
    contents.objects[dataset.objects] += len(points)
    contents.objects.update(name for name in points.classes if name)
    if unnamed := [i for i, name in enumerate(points.classes) if not name]:
        row, column = points.positions[unnamed[0]]
        _add_unnamed(sample, len(unnamed), row, column, contents)
    if points.ignored:
        contents.objects[IGNORED] += len(points.ignored)
    _measure_points(sample, image, points, contents)
    errors = [AnnotationError(sample.annotations[0], fault) for fault in faults]
    contents.findings += [Finding.from_error(error, dataset.root) for error in errors]


def _check_objects(sample: Sample, image: NDArray[np.uint8], dataset: Dataset, contents: _Contents) -> None:
    """Read all annotation files of a sample; count its objects, and add the counts and all findings to `contents`.

    Only the objects in the first file are counted, because training uses only this file. Findings are about all files.
    If the sample has two readable files, the agreement of their objects is also added to `contents`.
    """
    label_maps = []
    for annotation in sample.annotations:
        try:
            objects, faults = parse_objects(sample, annotation)
        except UnreadableFileError as error:
            contents.findings.append(Finding.from_error(error, dataset.root))
            continue
        label_maps.append(objects.labels)
        covered = sum("cover all of its pixels" in fault for fault in faults)
        if covered >= MIN_POINTS and covered > MAX_COVERED * (covered + len(objects.numbers)):
            fault = (
                f"has {covered} outlines that are completely covered by earlier ones, and are left out; leave the "
                f"class of the large outlines out (`rotopath data import --classes NAME=`)."
            )
            contents.findings.append(Finding.from_error(AnnotationError(annotation, fault), dataset.root))
        left_out = [Finding.from_error(AnnotationError(annotation, fault), dataset.root) for fault in faults]
        contents.findings += [replace(finding, is_problem=False) for finding in left_out]
        if annotation == sample.annotations[0]:
            # At the edge of a region, parts of objects may cover no pixel.
            lost = [fault for fault in faults if sample.box is None or "covers no pixel" not in fault]
            if lost and not objects.numbers:
                fault = (
                    f"has no object that can be used, so that its image would be one without objects ({lost[0]}); "
                    f"correct the file, or remove the image from the dataset."
                )
                contents.findings.append(Finding.from_error(AnnotationError(annotation, fault), dataset.root))
            contents.objects[dataset.objects] += len(objects.numbers)
            contents.objects.update(objects.classes.values())
            if unnamed := [number for number in objects.numbers if number not in objects.classes]:
                row, column = np.argwhere(objects.labels == unnamed[0]).mean(axis=0)
                _add_unnamed(sample, len(unnamed), row, column, contents)
            if objects.ignored:
                contents.objects[IGNORED] += len(objects.ignored)
            areas = np.bincount(objects.labels.ravel())[1:]
            areas = areas[areas > 0]
            contents.areas_px += areas.tolist()
            _add_diameters(sample, DIAMETER * np.sqrt(areas), contents)
            contents.spans += [
                (float(indices.min()) / side, float(indices.max()) / side)
                for indices, side in zip(np.nonzero(objects.labels), objects.labels.shape, strict=True)
                if len(indices)
            ]
            if len(areas) >= MIN_POINTS and (fit := _measure_fit(sample, image, objects.labels)) is not None:
                contents.fits.append(fit)
            if (parts := _count_parts_of_single_object(objects)) > 1:
                fault = (
                    f"has {parts} separate objects with the same number, which count as one; give each object its own "
                    f"number."
                )
                contents.findings.append(Finding.from_error(AnnotationError(annotation, fault), dataset.root))
    if len(label_maps) == 2:
        contents.agreement[sample.name] = aggregated_jaccard(*label_maps)


def _add_unnamed(sample: Sample, count: int, row: float, column: float, contents: _Contents) -> None:
    """Add the number of objects without a class in a sample to `contents`, and the position of the first of them."""
    top, left = (0, 0) if sample.box is None else sample.box[:2]
    contents.unnamed += count
    contents.first_unnamed = f"{contents.name}, row {row + top:.0f}, column {column + left:.0f}"


def _count_parts_of_single_object(objects: Objects) -> int:
    """Return the number of connected components of a label map with a single object number; for other maps, return 1.

    More than one component means that the file is a mask in which objects were not numbered.
    """
    return int(ndimage.label(objects.labels)[1]) if len(objects.numbers) == 1 else 1


# Evidence of mistakes in single images


def _measure_points(sample: Sample, image: NDArray[np.uint8], points: Points, contents: _Contents) -> None:
    """Add to `contents` how dark an image is at its annotated points, compared with other positions."""
    height, width = image.shape[:2]
    contents.outside += [0 <= column < height and 0 <= row < width for row, column in points.outside]
    radius, far = max(1, round(RADIUS_UM / sample.spacing_um_px)), FAR_UM / sample.spacing_um_px

    def measure(row: float, column: float) -> NDArray[np.uint8]:
        top, left = max(round(row) - radius, 0), max(round(column) - radius, 0)
        return image[top : top + 2 * radius + 1, left : left + 2 * radius + 1]

    contents.points += len(points)
    if len(points):
        fractions = points.positions / (height, width)
        contents.spans += zip(fractions.min(axis=0).tolist(), fractions.max(axis=0).tolist(), strict=True)
    random = np.random.default_rng(0).random((len(points), 2)) * (height - 1, width - 1)
    for (row, column), other in zip(points.positions.tolist(), random.tolist(), strict=True):
        area, area_there = measure(row, column), measure(*other)
        contents.on_glass += float(area.min(axis=2).mean()) > GLASS
        if column <= height - 1 and row <= width - 1 and abs(row - column) * 2**0.5 > far:
            swapped = measure(column, row)
            contents.darker_than_swapped.append(_compare_red(area, swapped))
            contents.swapped_darker_than_random.append(_compare_red(swapped, area_there))
        if np.hypot(other[0] - row, other[1] - column) > far:
            contents.darker_than_random.append(_compare_red(area, area_there))
    diameters_px, contrasts = _measure_dark_discs(image[..., 0], points.positions)
    _, contrasts_there = _measure_dark_discs(image[..., 0], random)
    contents.more_contrast_than_random += (contrasts - contrasts_there).tolist()
    _add_diameters(sample, diameters_px, contents)


def _add_diameters(sample: Sample, diameters_px: NDArray[np.float64], contents: _Contents) -> None:
    """Add to `contents` the diameters of the objects in an image."""
    if len(diameters_px):
        contents.diameters_um.append((diameters_px * sample.spacing_um_px, _find_spacing_ratio(sample)))


def _measure_dark_discs(
    red: NDArray[np.uint8], positions: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the diameters in pixels of dark objects at some positions of the red channel of an image, and contrasts.

    The diameter is that of the disc for which the Laplacian of a Gaussian has the strongest response; the contrast is
    this response.
    """
    if not len(positions):
        return np.empty(0), np.empty(0)
    kernels = _make_kernels()
    reach = (round(kernels.shape[1] ** 0.5) - 1) // 2
    if len(positions) > MAX_POINTS_MEASURED:
        positions = positions[np.linspace(0, len(positions) - 1, MAX_POINTS_MEASURED).astype(int)]
    corners = positions.round().astype(int).clip(0, np.array(red.shape) - 1)
    padded = np.pad(red, reach, "symmetric")
    windows = [padded[top : top + 2 * reach + 1, left : left + 2 * reach + 1].ravel() for top, left in corners]
    responses = np.array(windows, np.float32) @ kernels.T
    return 2 * 2**0.5 * np.array(SCALES_PX)[responses.argmax(axis=1)], responses.max(axis=1).astype(np.float64)


@lru_cache(maxsize=1)
def _make_kernels() -> NDArray[np.float32]:
    """Return the Laplacian of a Gaussian at each of SCALES_PX (scales, pixels of a window), for bright surroundings."""
    reach = round(3 * SCALES_PX[-1])
    rows, columns = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    kernels = []
    for scale in SCALES_PX:
        squared = (rows**2 + columns**2) / (2 * scale**2)
        kernel = (squared - 1) * np.exp(-squared) / scale**2
        kernels.append((kernel - kernel.mean()).ravel())
    return np.array(kernels, np.float32)


def _compare_red(first: NDArray[np.uint8], second: NDArray[np.uint8]) -> float:
    """Return how much darker the first area (h, w, 3) is than the second in the red channel, which nuclei absorb."""
    return float(second[..., 0].mean() - first[..., 0].mean())


def _measure_fit(sample: Sample, image: NDArray[np.uint8], labels: NDArray[np.int32]) -> _Fit | None:
    """Return how well a label map fits the dark objects of an image; None if it covers too little of the image."""
    height, width = (min(side, MAX_MEASURED_PX) for side in labels.shape)
    mask = (labels[:height, :width] > 0).astype(np.float64)
    if not MIN_COVER <= mask.mean() <= 1 - MIN_COVER:
        return None
    dark = ndimage.gaussian_filter(255.0 - image[:height, :width, 0], RADIUS_UM / 3 / sample.spacing_um_px)
    side = min(height, width)
    swapped = _correlate(mask[:side, :side].T, dark[:side, :side])
    mask, dark = mask - mask.mean(), dark - dark.mean()
    scale = np.sqrt((mask**2).sum() * (dark**2).sum())
    if scale == 0:
        return None
    surface = np.fft.irfft2(np.fft.rfft2(dark) * np.conj(np.fft.rfft2(mask)), mask.shape) / scale
    reach = max(1, min(round(MAX_SHIFT_UM / sample.spacing_um_px), min(height, width) // 4))
    shifts = np.arange(-reach, reach + 1)  # negative indices count from the end, where negative shifts are
    near = surface[np.ix_(shifts, shifts)]
    row, column = np.unravel_index(int(near.argmax()), near.shape)
    return _Fit(
        sample.name,
        float(near[reach, reach]),
        swapped,
        float(near.max()),
        int(row) - reach,
        int(column) - reach,
        sample.spacing_um_px,
    )


def _correlate(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Return the correlation of two images, or 0 if one of them is constant."""
    first, second = first - first.mean(), second - second.mean()
    scale = np.sqrt((first**2).sum() * (second**2).sum())
    return float((first * second).sum() / scale) if scale else 0.0


# Conclusions from all images


def _find_faulty_classes(dataset: Dataset, counts: Mapping[str, Counter[str]]) -> list[Finding]:
    """Return a note for each class with few objects, or few images, in the training set, or with none at all.

    Also return a problem for each two classes that differ only in upper and lower case.
    """
    known = {"images", "cases", dataset.objects, IGNORED}
    unit = "images" if dataset.annotated == "labels" else "objects"
    names = {name for split in SPLITS for name in counts[split]} - known
    findings = _find_similar_names(names)
    all_are_rare = sum(counts["train"][name] for name in names) < RARE**2

    def is_rare(name: str) -> bool:
        if all_are_rare:
            return counts["train"][name] == 0 and sum(counts[split][name] for split in SPLITS) >= RARE
        return counts["train"][name] < RARE

    return findings + [
        Finding(
            "",
            f"the split 'train' has too few {unit} of the class {name!r} ({counts['train'][name]}); annotate more of "
            f"them, or merge the class with another (`rotopath data import --classes`).",
            is_problem=False,
        )
        for name in sorted(names)
        if is_rare(name)
    ]


def _find_unnamed(dataset: Dataset, counts: Mapping[str, Counter[str]], evidence: Sequence[_Contents]) -> list[Finding]:
    """Return a finding about objects without a class, if others have one.

    With one class, they count as its objects. With several classes, a task that uses the names of classes refuses them
    (`Task.class_index`). The tasks of the benchmark formats do not use them.
    """
    names = {name for split in SPLITS for name in counts[split]} - {"images", "cases", dataset.objects, IGNORED}
    unnamed = sum(contents.unnamed for contents in evidence)
    if not names or not unnamed:
        return []
    total = sum(counts[split][dataset.objects] for split in SPLITS)
    first = next(contents.first_unnamed for contents in evidence if contents.unnamed)
    solution = "give them a class in QuPath, or all of them the same one with `rotopath data import --classes =NAME`"
    if len(names) > 1:
        consequence = f"a model of several classes cannot be trained with them; {solution}"
    else:
        consequence = f"they count as {min(names)!r}, the only class; if they are something else, {solution}"
    message = f"objects without a class: {unnamed} of {total}, first: {first}; {consequence}."
    return [Finding("", message, is_problem=len(names) > 1 and dataset.source.startswith("manifest"))]


def _find_similar_names(names: Collection[str]) -> list[Finding]:
    """Return a problem for each two names that differ only in upper and lower case, which a task cannot have."""
    first: dict[str, str] = {}
    return [
        Finding(
            "",
            f"the classes {known!r} and {name!r} differ only in upper and lower case; give them one name "
            f"(`rotopath data import --classes {name}={known}`), or different ones.",
        )
        for name in sorted(names)
        if (known := first.setdefault(name.casefold(), name)) != name
    ]


def _find_copies(evidence: list[_Contents]) -> list[Finding]:
    """Return a problem for each image with the same pixels as an image in another split."""
    first: dict[bytes, tuple[str, str]] = {}
    findings = []
    for name, split, digest in (item for contents in evidence for item in contents.digests):
        earlier = first.setdefault(digest, (name, split))
        if earlier[1] != split:
            message = (
                f"has the same pixels as {earlier[0]!r}, but is in the split {split!r} instead of {earlier[1]!r}; keep "
                f"one of the two."
            )
            findings.append(Finding(name, message))
    return findings


def _find_misplaced_points(evidence: list[_Contents]) -> list[Finding]:
    """Return problems and notes about points that are probably at wrong positions.

    Each file may have another order of columns. A file with few points is concluded about together with all others.
    """
    by_file: dict[Path, list[_Contents]] = {}
    for contents in evidence:
        if contents.points or contents.outside:
            by_file.setdefault(contents.path, []).append(contents)
    outside = [path for path, parts in by_file.items() if _are_outside_unless_exchanged(parts)]
    brighter = [path for path in by_file if path not in outside and _are_exchanged(by_file[path], MIN_OBJECTS)]
    others = [path for path in by_file if path not in (*outside, *brighter)]
    rest = [contents for path in others for contents in by_file[path]]
    if _are_outside_unless_exchanged(rest):
        outside, rest = outside + [path for path in others if any(part.outside for part in by_file[path])], []
    elif _are_exchanged(rest):
        brighter, rest = brighter + [path for path in others if any(part.points for part in by_file[path])], []
    findings = []
    solution = "exchange the two columns, or their names, in the annotation files of these images"
    if len(outside) + len(brighter) == len(by_file):
        solution += ", or state their order with `rotopath data import --columns`"
    if outside:
        count = sum(len(part.outside) for path in outside for part in by_file[path])
        message = (
            f"{count} objects are outside their images, but inside if row and column are exchanged, in "
            f"{count_and_list([by_file[path][0].name for path in outside], 'image')}; {solution}."
        )
        findings.append(Finding("", message))
    if brighter:
        count = sum(part.points for path in brighter for part in by_file[path])
        message = (
            f"row and column are probably exchanged in "
            f"{count_and_list([by_file[path][0].name for path in brighter], 'image')}: {count} objects are on brighter "
            f"tissue than the positions with row and column exchanged; {solution}."
        )
        findings.append(Finding("", message))
    return findings + _find_misplaced_rest(rest)


def _are_outside_unless_exchanged(parts: Sequence[_Contents]) -> bool:
    """Return whether several points are outside of their images, and all of these inside if exchanged."""
    outside = [is_inside for contents in parts for is_inside in contents.outside]
    return sum(outside) >= 3 and all(outside)


def _are_exchanged(parts: Sequence[_Contents], least: int = 0) -> bool:
    """Return whether points fit nuclei clearly better with row and column exchanged; False for fewer than `least`."""
    swapped = [value for contents in parts for value in contents.darker_than_swapped]
    there = [value for contents in parts for value in contents.swapped_darker_than_random]
    return len(swapped) >= least and _mean_error(swapped) < -CERTAIN and _mean_error(there) > CERTAIN


def _find_misplaced_rest(evidence: Sequence[_Contents]) -> list[Finding]:
    """Return a problem or a note about points on empty background, or not on dark objects."""
    findings = []
    points = sum(contents.points for contents in evidence)
    random = _mean_error([value for contents in evidence for value in contents.darker_than_random])
    glass = sum(contents.on_glass for contents in evidence)
    if points >= MIN_POINTS and glass > 0.1 * points:
        message = f"{glass} objects are on empty background (glass); check that positions are in pixels of the image."
        findings.append(Finding("", message))
    elif points >= MIN_OBJECTS and random < CERTAIN - 1:
        message = (
            f"the {points} objects are not darker than random positions, as nuclei are; if they are nuclei, check the "
            f"positions with `rotopath data show`."
        )
        findings.append(Finding("", message, is_problem=False))
    return findings


def _mean_error(values: list[float]) -> float:
    """Return the mean of values divided by its standard error; 0 if there are fewer than 5 values."""
    spread = np.std(values) if len(values) >= 5 else 0.0
    return float(np.mean(values) / spread * len(values) ** 0.5) if spread else 0.0


def _find_misplaced_outlines(evidence: list[_Contents]) -> list[Finding]:
    """Return problems and notes about images whose outlines are exchanged, shifted, or do not fit."""
    findings = []
    unfitting = []
    fits = [fit for contents in evidence for fit in contents.fits]
    common = _find_common_shift(fits)
    if common is not None:
        message = f"the outlines of most images are shifted: they fit {common}; correct the offset of the annotations."
        findings.append(Finding("", message))
    for fit in fits:
        distance_um = float(np.hypot(fit.down_px, fit.right_px)) * fit.spacing_um_px
        if fit.swapped > max(fit.correlation, 0) + 2 * MIN_GAIN:
            message = "its outlines fit the image only if rows and columns are exchanged; exchange x and y in the file."
            findings.append(Finding(fit.name, message))
        elif fit.best > fit.correlation + MIN_GAIN and fit.best > MIN_BEST and distance_um >= MIN_SHIFT_UM:
            if common is None:
                move = _describe_move(fit.down_px, fit.right_px)
                message = f"its outlines are shifted: they fit {move}; correct the offset of the annotations."
                findings.append(Finding(fit.name, message))
        elif abs(fit.correlation) < MIN_GAIN:
            unfitting.append(fit.name)
    if len(unfitting) > len(fits) / 2:
        message = (
            f"the outlines in {count_and_list(unfitting, 'image')} do not follow dark objects, as those of nuclei do; "
            f"check with `rotopath data show` that each annotation file belongs to its image."
        )
        findings.append(Finding("", message, is_problem=False))
    return findings


def _find_common_shift(fits: Sequence[_Fit]) -> str | None:
    """Return the move by which the outlines of nearly all images fit better, for a message, or None."""
    if len(fits) < MIN_IMAGES:
        return None
    moves = np.array([(fit.down_px, fit.right_px) for fit in fits])
    down, right = np.median(moves, axis=0)
    agreeing = np.abs(moves - (down, right)).max(axis=1) <= 1
    gain = float(np.median([fit.best - fit.correlation for fit in fits]))
    distance_px = float(np.hypot(down, right))
    if agreeing.mean() < MIN_AGREEING or distance_px < 2 or distance_px * fits[0].spacing_um_px < MIN_COMMON_UM:
        return None
    return _describe_move(round(down), round(right)) if gain > MIN_COMMON_GAIN else None


def _describe_move(down_px: int, right_px: int) -> str:
    """Return a text that states how outlines must be moved."""
    vertical, horizontal = "down" if down_px > 0 else "up", "right" if right_px > 0 else "left"
    return f"dark objects if they are moved {abs(down_px)} px {vertical} and {abs(right_px)} px {horizontal}"


def _find_wrong_scale(evidence: list[_Contents]) -> list[Finding]:
    """Return a problem if all objects are in the upper left part of their images."""
    lows, highs = zip(*(span for contents in evidence for span in contents.spans), strict=True)
    if min(lows) > CORNER or max(highs) > 0.5 + CORNER:  # not only in the upper left quarter, or all near the center
        return []
    message = (
        "all objects are in the upper left quarter of their images; positions are probably in µm, or in pixels of a "
        "lower resolution; convert them to pixels of the image."
    )
    return [Finding("", message)]


def _find_specks(evidence: list[_Contents]) -> list[Finding]:
    """Return a problem or a note about objects of one pixel."""
    areas = np.array([area for contents in evidence for area in contents.areas_px])
    specks = int((areas == 1).sum())
    if not specks:
        return []
    is_problem = specks >= MIN_POINTS and specks > MAX_SPECKS * len(areas)
    message = f"{specks} of {len(areas)} objects consist of one pixel; remove them if they are noise of a mask."
    return [Finding("", message, is_problem)]


def _find_wrong_spacing(annotated: Annotated, evidence: list[_Contents]) -> list[Finding]:
    """Return a problem or a note if the sizes of most objects contradict the pixel spacing.

    Objects that are too large may be correct, such as glands, unless the pixel spacing in the files contradicts them
    as well.
    """
    smallest, largest = PLAUSIBLE_UM[annotated]
    measured = [pair for contents in evidence for pair in contents.diameters_um]
    contrast = _mean_error([value for contents in evidence for value in contents.more_contrast_than_random])
    if annotated == "points" and contrast < CERTAIN:  # there may be no dark objects at the points
        return []
    low, high = _find_typical([diameters for diameters, _ in measured])
    if high >= smallest and low <= largest:
        return []
    corrected = [diameters * ratio for diameters, ratio in measured if ratio is not None]
    fits = len(corrected) > len(measured) / 2 and all(smallest <= size <= largest for size in _find_typical(corrected))
    objects = "objects" if annotated == "objects" else "the dark objects at the points"
    is_small = high < smallest
    size = "smaller than nuclei" if is_small else "larger than nuclei are in most tissue"
    reason = "; the pixel spacing in the files fits nuclei" if fits else ""
    condition = "" if fits or is_small else "if they are nuclei, "
    solution = (
        f"{condition}correct the pixel spacing (in the column `spacing` of the manifest, or with `rotopath data import "
        f"--spacing-um-px`; if the files state a wrong one, add --override-spacing)"
    )
    if not is_small and annotated == "objects" and not fits:
        solution += "; if they are areas of tissue, import them with --as regions"
    message = (
        f"the median diameter of {objects} is {high if is_small else low:.3g} µm at the stated pixel spacing: {size} "
        f"({smallest:g} to {largest:g} µm){reason}; {solution}."
    )
    return [Finding("", message, fits or is_small)]


def _find_typical(diameters: Sequence[NDArray[np.float64]]) -> tuple[float, float]:
    """Return the median of all diameters and the median over images of their medians, the smaller of the two first.

    Single images may contain many small nuclei, and many images only few objects; a spacing is wrong only if both are.
    """
    medians = np.median(np.concatenate(diameters)), np.median([np.median(of_image) for of_image in diameters])
    return float(min(medians)), float(max(medians))
