"""Open a dataset of any known format, and check its contents.

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

import os
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from scipy import ndimage

from rotopath.data.amida13 import is_amida13, open_amida13
from rotopath.data.annotations import AnnotationError, Objects, parse_objects, parse_points
from rotopath.data.class_folders import is_class_folders, open_class_folders
from rotopath.data.dataset import (
    SYNTHETIC_MARKER,
    Annotated,
    DataError,
    Dataset,
    Finding,
    Sample,
    group_for_reading,
    read_together,
)
from rotopath.data.kumar import is_kumar, open_kumar
from rotopath.data.manifest import MANIFEST_FILE, open_manifest
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
            raise DataError(f"{path} is a file, but not a CSV manifest; expected a folder or a CSV manifest.")
        return open_manifest(path, spacing_um_px)
    if (known := _find_format(path)) is not None:
        return known.open(path, spacing_um_px)
    # Unpacking an archive often adds one level of folders.
    subfolders = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    matches = [(folder, known) for folder in subfolders if (known := _find_format(folder)) is not None]
    if len(matches) > 1:
        folders = ", ".join(str(folder) for folder, _ in matches)
        raise DataError(f"{path} contains more than one dataset ({folders}); choose one of these folders.")
    fallbacks = ((folder, known) for folder in (path, *subfolders) for known in FORMATS if known.fallback)
    match = (
        matches[0] if matches else next(((folder, known) for folder, known in fallbacks if known.detect(folder)), None)
    )
    if match is None:
        fault = "is empty" if not any(path.iterdir()) else "is not a dataset of a known format"
        raise DataError(f"{path} {fault}; expected {'; or '.join(known.example for known in FORMATS)}.")
    folder, known = match
    return known.open(folder, spacing_um_px)


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

    objects: Counter[str] = field(default_factory=Counter)  # objects[name]; names: `dataset.objects`, and classes
    findings: list[Finding] = field(default_factory=list)  # problems and notes
    agreement: dict[str, float] = field(default_factory=dict)  # by image name, as in `Check.agreement`


def check(dataset: Dataset, on_progress: Callable[[int], object] = lambda _: None) -> Check:
    """Read every image and annotation of a dataset, count them, and collect all problems and notes.

    `on_progress` is a function that is called with the number of samples that were read since its previous call.
    """
    counts = {split: Counter[str]() for split in SPLITS}
    findings = list(dataset.findings)
    agreement: dict[str, float] = {}
    for sample in dataset.samples:
        counts[sample.split]["images"] += 1
    for split in SPLITS:
        cases = {sample.case for sample in dataset.samples if sample.split == split}
        counts[split]["cases"] = len(cases - {""})
    groups = group_for_reading(dataset.samples)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for group, contents in zip(groups, pool.map(partial(_check_group, dataset), groups), strict=True):
            counts[group[0].split].update(contents.objects)
            findings += contents.findings
            agreement |= contents.agreement
            on_progress(len(group))
    findings += _find_empty_splits(dataset)
    return Check(dataset, counts, tuple(findings), agreement)


def _find_empty_splits(dataset: Dataset) -> list[Finding]:
    """Return a note for each split without images, or a problem if the dataset has no images at all."""
    if not dataset.samples:
        return [Finding("", "the dataset contains no image that can be used.")]
    present = {sample.split for sample in dataset.samples}
    return [Finding("", f"the split {s!r} contains no images.", is_problem=False) for s in SPLITS if s not in present]


def _check_group(dataset: Dataset, samples: list[Sample]) -> _Contents:
    """Read the images and the annotations of a group of samples; return counts and findings."""
    contents = _Contents()
    try:
        read_together(samples)
    except UnreadableFileError as error:
        contents.findings.append(Finding.from_error(error, dataset.root))
        return contents
    if dataset.annotated == "labels":
        contents.objects.update(sample.label or "" for sample in samples)
    elif dataset.annotated == "points":
        _check_points(samples[0], dataset, contents)
    else:
        _check_objects(samples[0], dataset, contents)
    return contents


def _check_points(sample: Sample, dataset: Dataset, contents: _Contents) -> None:
    """Read the annotation file of a sample; count its points, and add the counts and all findings to `contents`."""
    try:
        points, faults = parse_points(sample)
    except UnreadableFileError as error:
        contents.findings.append(Finding.from_error(error, dataset.root))
        return
    contents.objects[dataset.objects] += len(points)
    contents.objects.update(name for name in points.classes if name)
    errors = [AnnotationError(sample.annotations[0], fault) for fault in faults]
    contents.findings += [Finding.from_error(error, dataset.root) for error in errors]


def _check_objects(sample: Sample, dataset: Dataset, contents: _Contents) -> None:
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
        left_out = [Finding.from_error(AnnotationError(annotation, fault), dataset.root) for fault in faults]
        contents.findings += [replace(finding, is_problem=False) for finding in left_out]
        if annotation == sample.annotations[0]:
            contents.objects[dataset.objects] += len(objects.numbers)
            contents.objects.update(objects.classes.values())
            if (parts := _count_parts_of_single_object(objects)) > 1:
                fault = (
                    f"has {parts} separate objects with the same number, which count as one; give each object its own "
                    f"number."
                )
                contents.findings.append(Finding.from_error(AnnotationError(annotation, fault), dataset.root))
    if len(label_maps) == 2:
        contents.agreement[sample.name] = aggregated_jaccard(*label_maps)


def _count_parts_of_single_object(objects: Objects) -> int:
    """Return the number of connected components of a label map with a single object number; for other maps, return 1.

    More than one component means that the file is a mask in which objects were not numbered.
    """
    return int(ndimage.label(objects.labels)[1]) if len(objects.numbers) == 1 else 1
