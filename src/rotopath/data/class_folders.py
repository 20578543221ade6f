"""Patches sorted into a folder for each class, as torchvision's ImageFolder has them.

In: `CLASS/IMAGE`, or `train/CLASS/IMAGE` with the splits above the classes, and perhaps a `split.csv` (image,split,
group), which goes before those folders. Out: a dataset of labelled patches. The class of a patch is the name of its
folder.
"""

from pathlib import Path

from rotopath.data.dataset import IMAGE_SUFFIXES, DataError, Dataset, Finding, Sample, files_in, read_splits
from rotopath.data.manifest import FRACTIONS, SPLIT_SEED, find_spacing
from rotopath.data.splits import SPLITS, split_fractions
from rotopath.images.files import UnreadableFileError

NO_CLASSES = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels", "annotation", "annotations"}


def is_class_folders(root: Path) -> bool:
    """Whether two folders or more hold images, directly below the root or below a folder for each split.

    Folders called images, masks and the like are parts of a data set of another kind, and no classes.
    """
    names = _find_classes(root)
    return len(names) > 1 and not any(name.casefold() in NO_CLASSES for name in names)


def open_class_folders(root: Path, spacing: float | None = None) -> Dataset:
    """Every image below a class; `spacing` is that of images whose files do not say their own."""
    classes = _find_classes(root)
    images = {
        path.relative_to(root).as_posix(): (name, path)
        for name, folders in classes.items()
        for folder in folders
        for path in files_in(folder, IMAGE_SUFFIXES)
    }
    splits, groups, findings = _read_splits(root, {name: label for name, (label, _) in images.items()})
    samples = []
    for name in sorted(splits):
        label, path = images[name]
        try:
            spacing_um_px = find_spacing(path, name, "", spacing)
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(name, str(error).removeprefix(f"{name!r} ").removeprefix(f"{path} ")))
            if isinstance(error, DataError):
                break  # the same is true of the others, and one sentence is enough
            continue
        samples.append(Sample(path, name, groups.get(name, ""), splits[name], spacing_um_px, label=label))
    return Dataset("labels", "class folders", root, tuple(samples), tuple(findings), classes=tuple(sorted(classes)))


def _find_classes(root: Path) -> dict[str, list[Path]]:
    """The folders of each class, by its name."""
    folders = [folder for split in SPLITS if (folder := root / split).is_dir()] or [root]
    classes: dict[str, list[Path]] = {}
    for folder in folders:
        for inside in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if any(path.suffix.lower() in IMAGE_SUFFIXES for path in inside.iterdir()):
                classes.setdefault(inside.name, []).append(inside)
    return classes


def _read_splits(root: Path, labels: dict[str, str]) -> tuple[dict[str, str], dict[str, str], list[Finding]]:
    """The split of each image, and the patient (group) of those whose patient is known."""
    table, findings = read_splits(root, "image", labels)
    if table is not None:
        groups = {name: row["group"] for name, row in table.items() if row.get("group")}
        return {name: row["split"] for name, row in table.items()}, groups, findings
    if any((root / split).is_dir() for split in SPLITS):
        return {name: name.partition("/")[0] for name in labels}, {}, []
    sentence = (
        "folders of classes name no patients: patches of one patient may be in two splits, and scores look better than "
        "they are; a split.csv (image,split,group) by patient mends it."
    )
    return split_fractions(labels, FRACTIONS, SPLIT_SEED), {}, [Finding("", sentence, is_problem=False)]
