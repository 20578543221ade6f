"""Open the dataset PCam: patches of lymph nodes, with or without tumor at the center of the patch.

The dataset folder contains the HDF5 files `camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5`, and optionally the
tables `..._meta.csv` with the slide of each patch. Kaggle distributes PCam in another form: the folder contains
`train/ID.tif` (one file for each patch) and `train_labels.csv`, and optionally a `split.csv` with the columns `id` and
`split`. This module reads only labels and tables; pixels are read when they are needed.
"""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rotopath.data.dataset import (
    IMAGE_SUFFIXES,
    Dataset,
    Finding,
    Sample,
    TableError,
    UnreadableHdf5Error,
    count_and_list,
    find_files,
    index_by_stem,
    read_hdf5_rows,
    read_hdf5_shape,
    read_table,
)
from rotopath.data.splits import SPLITS, read_split_file, split_fractions
from rotopath.images.files import UnreadableFileError

SPACING_UM_PX = 0.972  # level 2 of slides scanned at 0.243 µm/px
CLASSES = ("normal", "tumor")
SPLIT_SEED = 0  # for random splits in Kaggle's form, which has no published split
# Fraction of the patches of each class in each split, for these random splits.
KAGGLE_SPLIT = {"train": 0.8, "valid": 0.1, "test": 0.1}
KAGGLE_LABELS = "train_labels.csv"
PUBLISHED = {"train": {"images": 262_144}, "valid": {"images": 32_768}, "test": {"images": 32_768}}


# HDF5 files


def is_pcam(root: Path) -> bool:
    """Return whether a folder contains HDF5 files of PCam."""
    return any(root.glob("camelyonpatch_level_2_split_*"))


def open_pcam(root: Path) -> Dataset:
    """Open the patches of the published splits, from HDF5 files.

    Splits with a missing or faulty file are left out, and reported in `findings` of the returned dataset.
    """
    samples: list[Sample] = []
    findings: list[Finding] = []
    for split in SPLITS:
        try:
            samples += _open_split(root, split)
        except UnreadableFileError as error:
            findings.append(Finding.from_error(error, root))
    if not all(sample.case for sample in samples):
        message = (
            "without a *_meta.csv file for each split, the slides of patches are unknown, and rotopath cannot check "
            "that no slide is in two splits; for this check, add the missing *_meta.csv files."
        )
        findings.append(Finding("", message, is_problem=False))
    return Dataset("labels", "PCam", root, tuple(samples), tuple(findings), PUBLISHED, classes=CLASSES)


def _open_split(root: Path, split: str) -> list[Sample]:
    """Return the samples of a split. Raises UnreadableFileError if one of its files is missing or faulty."""
    images, labels = (root / f"camelyonpatch_level_2_split_{split}_{key}.h5" for key in "xy")
    for path in (images, labels):
        if not path.exists() and (packed := path.with_name(f"{path.name}.gz")).exists():
            raise UnreadableHdf5Error(packed, f"is still compressed; unpack it with `gunzip {packed.name}`.")
    shape, label_shape = read_hdf5_shape(images, "x"), read_hdf5_shape(labels, "y")
    if len(shape) != 4 or shape[3] != 3:
        raise UnreadableHdf5Error(images, f"contains an array of shape {shape}; expected (n, 96, 96, 3).")
    if label_shape[:1] != shape[:1] or int(np.prod(label_shape)) != shape[0]:
        raise UnreadableHdf5Error(
            images,
            f"has {shape[0]} patches, but the labels in {labels.name} have shape {label_shape}; download both again.",
        )
    values = _read_labels(labels, shape[0])
    slides = _read_slides(images.with_name(images.name.replace("_x.h5", "_meta.csv")), shape[0])
    return [
        Sample(images, f"{images.name}[{i}]", slides[i], split, SPACING_UM_PX, row=i, label=CLASSES[values[i]])
        for i in range(shape[0])
    ]


def _read_labels(path: Path, count: int) -> NDArray[np.uint8]:
    """Read the labels (count,) of the patches of a split: 0 is normal, 1 is tumor."""
    labels = read_hdf5_rows(path, "y", 0, count).reshape(-1)
    if (wrong := np.flatnonzero(labels > 1)).size:
        raise UnreadableHdf5Error(
            path, f"has the label {labels[wrong[0]]} at row {wrong[0]}; expected 0 (normal) or 1 (tumor)."
        )
    return labels


def _read_slides(meta: Path, count: int) -> list[str]:
    """Return the slide of each of `count` patches, or empty strings if the file `meta` does not exist."""
    if not meta.is_file():
        return [""] * count
    slides = [row["wsi"] for _, row in read_table(meta, ("wsi",))]
    if len(slides) != count:
        raise TableError(meta, f"has {len(slides)} rows, but there are {count} patches; download it again.")
    return slides


# Kaggle's form


def is_kaggle(root: Path) -> bool:
    """Return whether a folder contains PCam in the form of Kaggle."""
    return (root / KAGGLE_LABELS).is_file()


def open_kaggle(root: Path) -> Dataset:
    """Open all patches that have a label and a split. The other patches are reported in `findings`, and left out.

    Splits come from `split.csv`. Without this file, splits are random within each class.
    """
    images, findings = index_by_stem(root, find_files(root / "train", IMAGE_SUFFIXES))
    labels, label_findings = _read_kaggle_labels(root / KAGGLE_LABELS, images)
    findings += label_findings
    if unlabeled := sorted(images.keys() - labels.keys()):
        message = (
            f"images without a label are left out: {count_and_list(unlabeled, 'image')}; to use them, add their labels "
            f"to {KAGGLE_LABELS}."
        )
        findings.append(Finding("train", message, is_problem=False))
    table, split_findings = read_split_file(root, "id", labels)
    findings += split_findings
    if table is None:
        strata = {identifier: str(CLASSES.index(label)) for identifier, label in labels.items()}
        splits = split_fractions(strata, KAGGLE_SPLIT, SPLIT_SEED)
        message = (
            "the slides are unknown in Kaggle's form: patches of one slide may be in two splits, and scores may be too "
            "high; to prevent this, add a split.csv (id,split) that keeps each slide in one split."
        )
        findings.append(Finding("", message, is_problem=False))
    else:
        splits = {identifier: row["split"] for identifier, row in table.items()}
    samples = [
        Sample(images[i], images[i].relative_to(root).as_posix(), "", splits[i], SPACING_UM_PX, label=labels[i])
        for i in sorted(splits)
    ]
    return Dataset("labels", "PCam in Kaggle's form", root, tuple(samples), tuple(findings), classes=CLASSES)


def _read_kaggle_labels(path: Path, images: dict[str, Path]) -> tuple[dict[str, str], list[Finding]]:
    """Return the class of each labeled image by ID, and findings about invalid lines.

    `images` maps the ID of each image to its path. Labels without an image are left out and reported as a finding.
    """
    labels: dict[str, str] = {}
    findings: list[Finding] = []
    without_image: list[str] = []
    for line, row in read_table(path, ("id", "label")):
        identifier, label = row["id"], row["label"]
        if identifier not in images:
            without_image.append(identifier)
            continue
        if label not in ("0", "1"):
            message = f"line {line} has the label {label!r}; expected 0 (normal) or 1 (tumor)."
        elif identifier in labels:
            message = f"line {line} repeats {identifier!r}; list it once."
        else:
            labels[identifier] = CLASSES[int(label)]
            continue
        findings.append(Finding(path.name, message))
    if without_image:
        findings.append(
            Finding(
                path.name,
                f"there is no image in train for {count_and_list(without_image, 'label')}; add the images, or "
                f"remove the labels.",
            )
        )
    return labels, findings
