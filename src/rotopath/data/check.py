"""Checking data: reads every image and annotation, counts them, and collects all that is wrong.

In: a collection. Out: counts by split, findings in the order of the files, and how well two annotations of the same
image agree where there are two.
"""

import os
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

from scipy import ndimage

from rotopath.data.annotations import Objects, parse_objects, parse_points
from rotopath.data.aperio import AnnotationError
from rotopath.data.collection import Collection, Finding, Picture, read_run, runs
from rotopath.data.splits import SPLITS
from rotopath.images.files import UnreadableFileError
from rotopath.metrics.overlap import aggregated_jaccard


@dataclass(frozen=True)
class Check:
    """What a collection holds, and what is wrong with it."""

    collection: Collection
    counts: dict[str, Counter[str]]  # by split: images, cases, and objects or images of each class
    findings: tuple[Finding, ...]
    agreement: dict[str, float]  # AJI of label map and outlines, by image


@dataclass
class _Contents:
    """What was found inside of one or several pictures."""

    objects: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    agreement: dict[str, float] = field(default_factory=dict)


def check(collection: Collection, progress: Callable[[int], object] = lambda _: None) -> Check:
    """Read everything; `progress` is told how many pictures were just done."""
    counts = {split: Counter[str]() for split in SPLITS}
    findings = list(collection.findings)
    agreement: dict[str, float] = {}
    for picture in collection.pictures:
        counts[picture.split]["images"] += 1
    for split in SPLITS:
        cases = {picture.case for picture in collection.pictures if picture.split == split}
        counts[split]["cases"] = len(cases - {""})
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        read_together = runs(collection.pictures)
        for run, contents in zip(read_together, pool.map(partial(_read, collection), read_together), strict=True):
            counts[run[0].split].update(contents.objects)
            findings += contents.findings
            agreement |= contents.agreement
            progress(len(run))
    findings += _emptiness(collection)
    return Check(collection, counts, tuple(findings), agreement)


def _emptiness(collection: Collection) -> list[Finding]:
    """That there is nothing, or nothing in some split."""
    if not collection.pictures:
        return [Finding("", "there is not a single image that can be used.")]
    present = {picture.split for picture in collection.pictures}
    return [Finding("", f"no image is in the split {s!r}.", is_problem=False) for s in SPLITS if s not in present]


def _read(collection: Collection, run: list[Picture]) -> _Contents:
    contents = _Contents()
    try:
        read_run(run)
    except UnreadableFileError as error:
        contents.findings.append(Finding.of(error, collection.root))
        return contents
    if collection.annotated == "labels":
        contents.objects.update(picture.label or "" for picture in run)
    elif collection.annotated == "points":
        _read_points(run[0], collection, contents)
    else:
        _read_objects(run[0], collection, contents)
    return contents


def _read_points(picture: Picture, collection: Collection, contents: _Contents) -> None:
    root = collection.root
    try:
        points, faults = parse_points(picture)
    except UnreadableFileError as error:
        contents.findings.append(Finding.of(error, root))
        return
    contents.objects[collection.objects] += len(points)
    contents.objects.update(name for name in points.classes if name)
    contents.findings += [Finding.of(AnnotationError(picture.annotations[0], fault), root) for fault in faults]


def _read_objects(picture: Picture, collection: Collection, contents: _Contents) -> None:
    """All annotations are read, though only the first one counts: what is wrong with the others is worth knowing."""
    root = collection.root
    maps = []
    for annotation in picture.annotations:
        try:
            objects, faults = parse_objects(picture, annotation)
        except UnreadableFileError as error:
            contents.findings.append(Finding.of(error, root))
            continue
        maps.append(objects.labels)
        left_out = [Finding.of(AnnotationError(annotation, fault), root) for fault in faults]
        contents.findings += [replace(finding, is_problem=False) for finding in left_out]
        if annotation == picture.annotations[0]:
            contents.objects[collection.objects] += len(objects.numbers)
            contents.objects.update(objects.classes.values())
            if (parts := _count_joined(objects)) > 1:
                fault = f"gives all of its {parts} objects one number, so they count as one; number them."
                contents.findings.append(Finding.of(AnnotationError(annotation, fault), root))
    if len(maps) == 2:
        contents.agreement[picture.name] = aggregated_jaccard(*maps)


def _count_joined(objects: Objects) -> int:
    """How many parts a single object has; 1 where there are several objects."""
    return int(ndimage.label(objects.labels)[1]) if len(objects.numbers) == 1 else 1
