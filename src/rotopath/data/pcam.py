"""PCam: patches of lymph nodes, with or without tumor in their middle, as HDF5 files or in the form of Kaggle.

In: the folder with `camelyonpatch_level_2_split_{train,valid,test}_{x,y}.h5`, or with `train/ID.tif` and
`train_labels.csv`. Out: a dataset of patches, read from the files only when they are asked for.
"""

from pathlib import Path

import numpy as np

from rotopath.data.dataset import (
    IMAGE_SUFFIXES,
    Dataset,
    Finding,
    Sample,
    TableError,
    UnreadableHdf5Error,
    by_stem,
    files_in,
    listed,
    read_rows,
    read_splits,
    read_table,
    shape_of,
)
from rotopath.data.splits import SPLITS, split_fractions
from rotopath.images.files import UnreadableFileError

SPACING_UM_PX = 0.972  # level 2 of slides scanned at 0.243 µm/px
CLASSES = ("normal", "tumor")
SPLIT_SEED = 0  # for Kaggle's form, which comes without a split
KAGGLE_SPLIT = {"train": 0.8, "valid": 0.1, "test": 0.1}
PUBLISHED = {"train": {"images": 262_144}, "valid": {"images": 32_768}, "test": {"images": 32_768}}


def is_pcam(root: Path) -> bool:
    return any(root.glob("camelyonpatch_level_2_split_*"))


def open_pcam(root: Path) -> Dataset:
    """The patches of the three splits, as shipped; their slides from the `_meta.csv` files, where those are."""
    samples: list[Sample] = []
    findings: list[Finding] = []
    for split in SPLITS:
        try:
            samples += _patches(root, split)
        except UnreadableFileError as error:
            findings.append(Finding.of(error, root))
    if not all(sample.case for sample in samples):
        sentence = "without all *_meta.csv files the slides are not known, and no leak between splits can be seen."
        findings.append(Finding("", sentence, is_problem=False))
    return Dataset("labels", "PCam", root, tuple(samples), tuple(findings), PUBLISHED, classes=CLASSES)


def is_kaggle(root: Path) -> bool:
    return (root / "train_labels.csv").is_file()


def open_kaggle(root: Path) -> Dataset:
    """The labelled patches in Kaggle's form: split by `split.csv` (id,split), else at random within each class."""
    images, findings = by_stem(root, files_in(root / "train", IMAGE_SUFFIXES))
    labels: dict[str, str] = {}
    absent: list[str] = []
    for line, row in read_table(root / "train_labels.csv", ("id", "label")):
        identity, label = row["id"], row["label"]
        if identity not in images:
            absent.append(identity)
            continue
        if label not in ("0", "1"):
            sentence = f"line {line} has the label {label!r}; 0 (normal) or 1 (tumor) is expected."
        elif identity in labels:
            sentence = f"line {line} lists {identity!r} a second time."
        else:
            labels[identity] = CLASSES[int(label)]
            continue
        findings.append(Finding("train_labels.csv", sentence))
    if absent:
        findings.append(Finding("train_labels.csv", f"there is no image in train for {listed(absent, 'label')}."))
    if bare := sorted(images.keys() - labels.keys()):
        findings.append(Finding("train", f"no label for {listed(bare, 'image')}; left out.", is_problem=False))
    table, findings_of_splits = read_splits(root, "id", labels)
    findings += findings_of_splits
    if table is None:
        strata = {identity: str(CLASSES.index(label)) for identity, label in labels.items()}
        splits = split_fractions(strata, KAGGLE_SPLIT, SPLIT_SEED)
        sentence = (
            "Kaggle's form names no slides: patches of one slide may be in two splits, and scores look better than "
            "they are; a split.csv (id,split) by slide mends it."
        )
        findings.append(Finding("", sentence, is_problem=False))
    else:
        splits = {identity: row["split"] for identity, row in table.items()}
    samples = [
        Sample(images[i], images[i].relative_to(root).as_posix(), "", splits[i], SPACING_UM_PX, label=labels[i])
        for i in sorted(splits)
    ]
    return Dataset("labels", "PCam in Kaggle's form", root, tuple(samples), tuple(findings), classes=CLASSES)


def _patches(root: Path, split: str) -> list[Sample]:
    images, labels = _file(root, split, "x"), _file(root, split, "y")
    for path in (images, labels):
        if not path.exists() and (packed := path.with_name(f"{path.name}.gz")).exists():
            raise UnreadableHdf5Error(packed, f"is still packed; unpack it with `gunzip {packed.name}`.")
    shape, label_shape = shape_of(images, "x"), shape_of(labels, "y")
    if len(shape) != 4 or shape[3] != 3:
        raise UnreadableHdf5Error(images, f"holds an array of shape {shape}; (n, 96, 96, 3) is expected.")
    if label_shape[:1] != shape[:1] or int(np.prod(label_shape)) != shape[0]:
        raise UnreadableHdf5Error(images, f"has {shape[0]} patches, but {labels.name} labels of shape {label_shape}.")
    values = read_rows(labels, "y", 0, shape[0]).reshape(-1)
    if (wrong := np.flatnonzero(values > 1)).size:
        raise UnreadableHdf5Error(
            labels, f"has the label {values[wrong[0]]} at row {wrong[0]}; 0 (normal) or 1 (tumor) is expected."
        )
    slides = _slides(images.with_name(images.name.replace("_x.h5", "_meta.csv")), shape[0])
    return [
        Sample(images, f"{images.name}[{i}]", slides[i], split, SPACING_UM_PX, row=i, label=CLASSES[values[i]])
        for i in range(shape[0])
    ]


def _slides(meta: Path, count: int) -> list[str]:
    """The slide of each patch; no names where there is no such file."""
    if not meta.is_file():
        return [""] * count
    slides = [row["wsi"] for _, row in read_table(meta, ("wsi",))]
    if len(slides) != count:
        raise TableError(meta, f"has {len(slides)} rows, but there are {count} patches.")
    return slides


def _file(root: Path, split: str, key: str) -> Path:
    return root / f"camelyonpatch_level_2_split_{split}_{key}.h5"
