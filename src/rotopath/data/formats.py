"""Opening data: finds out what a folder or a file holds, and calls its reader.

In: the path that a person points at. Out: a dataset, or one sentence about why there is none.

Checking data: reads every image and annotation, counts them, and collects all that is wrong.

In: a dataset. Out: counts by split, findings in the order of the files, and how well two annotations of the same
image agree where there are two.
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
from rotopath.data.dataset import SYNTHETIC, Annotated, DataError, Dataset, Finding, Sample, read_run, runs
from rotopath.data.kumar import is_kumar, open_kumar
from rotopath.data.manifest import open_manifest
from rotopath.data.pcam import is_kaggle, is_pcam, open_kaggle, open_pcam
from rotopath.data.splits import SPLITS, leaks
from rotopath.images.files import UnreadableFileError, is_plausible
from rotopath.metrics.matching import aggregated_jaccard

Open = Callable[[Path, float | None], Dataset]  # given the root, and the spacing of images that do not say theirs
LAYOUTS: tuple[tuple[Callable[[Path], bool], Open], ...] = (
    (lambda root: (root / "manifest.csv").is_file(), lambda root, um: open_manifest(root / "manifest.csv", um)),
    (is_amida13, lambda root, _: open_amida13(root)),
    (is_pcam, lambda root, _: open_pcam(root)),
    (is_kaggle, lambda root, _: open_kaggle(root)),
    (is_kumar, lambda root, _: open_kumar(root)),
)
EXPECTED = (
    "expected are the unpacked folders of AMIDA13 (mitoses_image_data_part_1, mitoses_ground_truth), of Kumar or "
    "MoNuSeg (Tissue Images, Annotations), of PCam (camelyonpatch_level_2_split_train_x.h5, or train and "
    "train_labels.csv), a folder of patches for each class, or a manifest.csv"
)
HOLDS: Mapping[Annotated, str] = {
    "labels": "images with a class each",
    "points": "positions of objects",
    "objects": "outlines of objects",
}


def open_data(path: Path | str, annotated: Annotated | None = None, spacing_um_px: float | None = None) -> Dataset:
    """The dataset at a path: a folder of a benchmark, also one level above it, a folder of classes, or a manifest.

    With `annotated`, data with annotations of another kind is refused. `spacing_um_px` is that of images of one's own
    that do not say theirs.
    """
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        raise DataError(f"The spacing is {spacing_um_px:g} µm/px, but microscopes have 0.05 to 5.")
    dataset = _open(Path(path), spacing_um_px)
    if (dataset.root / SYNTHETIC).exists():
        dataset = replace(dataset, source=f"{dataset.source} (synthetic)")
    if annotated is not None and dataset.annotated != annotated:
        raise DataError(
            f"{path} ({dataset.source}) holds {HOLDS[dataset.annotated]}, where {HOLDS[annotated]} are needed; "
            f"choose other data, or another task."
        )
    shared = leaks((sample.case, sample.split) for sample in dataset.samples if sample.case)
    return replace(dataset, findings=(*dataset.findings, *(Finding("", sentence) for sentence in shared)))


def _open(path: Path, spacing_um_px: float | None) -> Dataset:
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    if path.is_file():
        if path.suffix.lower() != ".csv":
            raise DataError(f"{path} is a file, but no CSV manifest; give a folder or a manifest.")
        return open_manifest(path, spacing_um_px)
    if (here := _layout(path)) is not None:
        return here(path, spacing_um_px)
    # An archive often unpacks into a folder of its own, one level further down.
    inside = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    found = [(root, layout) for root in inside if (layout := _layout(root)) is not None]
    if len(found) > 1:
        places = ", ".join(str(root) for root, _ in found)
        raise DataError(f"{path} holds more than one data set ({places}); give the folder of one.")
    if not found:  # a folder for each class is what is left, here or one level further down
        for root in (path, *inside):
            if is_class_folders(root):
                return open_class_folders(root, spacing_um_px)
        what = "is empty" if not any(path.iterdir()) else "is no data set that is known here"
        raise DataError(f"{path} {what}; {EXPECTED}.")
    root, layout = found[0]
    return layout(root, spacing_um_px)


def _layout(root: Path) -> Open | None:
    """The reader of a folder; a manifest goes before what it may lie in."""
    return next((open_layout for is_layout, open_layout in LAYOUTS if is_layout(root)), None)


@dataclass(frozen=True)
class Check:
    """What a dataset holds, and what is wrong with it."""

    dataset: Dataset
    counts: dict[str, Counter[str]]  # by split: images, cases, and objects or images of each class
    findings: tuple[Finding, ...]
    agreement: dict[str, float]  # AJI of label map and outlines, by image


@dataclass
class _Contents:
    """What was found inside of one or several samples."""

    objects: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    agreement: dict[str, float] = field(default_factory=dict)


def check(dataset: Dataset, progress: Callable[[int], object] = lambda _: None) -> Check:
    """Read everything; `progress` is told how many samples were just done."""
    counts = {split: Counter[str]() for split in SPLITS}
    findings = list(dataset.findings)
    agreement: dict[str, float] = {}
    for sample in dataset.samples:
        counts[sample.split]["images"] += 1
    for split in SPLITS:
        cases = {sample.case for sample in dataset.samples if sample.split == split}
        counts[split]["cases"] = len(cases - {""})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read_together = runs(dataset.samples)
        for run, contents in zip(read_together, pool.map(partial(_read, dataset), read_together), strict=True):
            counts[run[0].split].update(contents.objects)
            findings += contents.findings
            agreement |= contents.agreement
            progress(len(run))
    findings += _emptiness(dataset)
    return Check(dataset, counts, tuple(findings), agreement)


def _emptiness(dataset: Dataset) -> list[Finding]:
    """That there is nothing, or nothing in some split."""
    if not dataset.samples:
        return [Finding("", "there is not a single image that can be used.")]
    present = {sample.split for sample in dataset.samples}
    return [Finding("", f"no image is in the split {s!r}.", is_problem=False) for s in SPLITS if s not in present]


def _read(dataset: Dataset, run: list[Sample]) -> _Contents:
    contents = _Contents()
    try:
        read_run(run)
    except UnreadableFileError as error:
        contents.findings.append(Finding.of(error, dataset.root))
        return contents
    if dataset.annotated == "labels":
        contents.objects.update(sample.label or "" for sample in run)
    elif dataset.annotated == "points":
        _read_points(run[0], dataset, contents)
    else:
        _read_objects(run[0], dataset, contents)
    return contents


def _read_points(sample: Sample, dataset: Dataset, contents: _Contents) -> None:
    root = dataset.root
    try:
        points, faults = parse_points(sample)
    except UnreadableFileError as error:
        contents.findings.append(Finding.of(error, root))
        return
    contents.objects[dataset.objects] += len(points)
    contents.objects.update(name for name in points.classes if name)
    contents.findings += [Finding.of(AnnotationError(sample.annotations[0], fault), root) for fault in faults]


def _read_objects(sample: Sample, dataset: Dataset, contents: _Contents) -> None:
    """All annotations are read, though only the first one counts: what is wrong with the others is worth knowing."""
    root = dataset.root
    maps = []
    for annotation in sample.annotations:
        try:
            objects, faults = parse_objects(sample, annotation)
        except UnreadableFileError as error:
            contents.findings.append(Finding.of(error, root))
            continue
        maps.append(objects.labels)
        left_out = [Finding.of(AnnotationError(annotation, fault), root) for fault in faults]
        contents.findings += [replace(finding, is_problem=False) for finding in left_out]
        if annotation == sample.annotations[0]:
            contents.objects[dataset.objects] += len(objects.numbers)
            contents.objects.update(objects.classes.values())
            if (parts := _count_joined(objects)) > 1:
                fault = f"gives all of its {parts} objects one number, so they count as one; number them."
                contents.findings.append(Finding.of(AnnotationError(annotation, fault), root))
    if len(maps) == 2:
        contents.agreement[sample.name] = aggregated_jaccard(*maps)


def _count_joined(objects: Objects) -> int:
    """How many parts a single object has; 1 where there are several objects."""
    return int(ndimage.label(objects.labels)[1]) if len(objects.numbers) == 1 else 1
