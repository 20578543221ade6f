"""Open patches in one folder for each class, in the layout of torchvision's ImageFolder.

The class of a patch is the name of its folder: `CLASS/IMAGE`, or `train/CLASS/IMAGE` if each split has a folder. An
optional `split.csv` has the columns `image`, `split` and, optionally, `group` (the patient). The splits in this file
have priority over the folders `train`, `valid` and `test`.
"""

from pathlib import Path

from rotopath.data.dataset import IMAGE_SUFFIXES, DataError, Dataset, Finding, Sample, find_files
from rotopath.data.manifest import FRACTIONS, SPLIT_SEED, find_spacing
from rotopath.data.splits import SPLITS, read_split_file, split_fractions
from rotopath.images.files import UnreadableFileError

# Names of folders, in lower case, that show that a dataset has another format.
NOT_CLASSES = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels", "annotation", "annotations"}


def is_class_folders(root: Path) -> bool:
    """Return whether a dataset folder contains at least two class folders with images.

    The class folders are directly in `root`, or in the subfolders `train`, `valid` and `test` of `root`. The result is
    False if a folder with images has a name in NOT_CLASSES, such as `masks`: the dataset then has another format.
    """
    names = _find_class_folders(root)
    return len(names) > 1 and not any(name.casefold() in NOT_CLASSES for name in names)


def open_class_folders(root: Path, spacing_um_px: float | None = None) -> Dataset:
    """Open all images in the class folders, except images without a split.

    `spacing_um_px` is the pixel spacing of image files that do not specify their own. If it is None, the first file
    without a pixel spacing is reported as a problem in `findings` of the returned dataset, and the remaining images are
    not opened. Images that cannot be read are reported and left out.
    """
    folders_of = _find_class_folders(root)
    images = {
        path.relative_to(root).as_posix(): (label, path)
        for label, folders in folders_of.items()
        for folder in folders
        for path in find_files(folder, IMAGE_SUFFIXES)
    }
    splits, patients, findings = _assign_splits(root, {name: label for name, (label, _) in images.items()})
    samples = []
    for name in sorted(splits):
        label, path = images[name]
        try:
            spacing = find_spacing(path, name, "", spacing_um_px)
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(name, str(error).removeprefix(f"{name!r} ").removeprefix(f"{path} ")))
            if isinstance(error, DataError):
                break  # the other patches probably have no pixel spacing either; one message is enough
            continue
        samples.append(Sample(path, name, patients.get(name, ""), splits[name], spacing, label=label))
    classes = tuple(sorted(folders_of))
    return Dataset("labels", "class folders", root, tuple(samples), tuple(findings), classes=classes)


def _find_class_folders(root: Path) -> dict[str, list[Path]]:
    """Return a dictionary from class names to the folders of the class: one folder, or one folder for each split."""
    parents = [folder for split in SPLITS if (folder := root / split).is_dir()] or [root]
    classes: dict[str, list[Path]] = {}
    for parent in parents:
        for folder in sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir()):
                classes.setdefault(folder.name, []).append(folder)
    return classes


def _assign_splits(root: Path, labels: dict[str, str]) -> tuple[dict[str, str], dict[str, str], list[Finding]]:
    """Return a dictionary from images to splits, a dictionary from images to patients, and findings about the splits.

    Images are given by their paths relative to `root`. `labels` maps each image to its class.

    Splits come from `split.csv`. Without this file, they come from the folders `train`, `valid` and `test`. Without
    these folders, splits are random within each class. Images without a split are missing in the first dictionary.
    Images of unknown patients are missing in the second dictionary.
    """
    table, findings = read_split_file(root, "image", labels)
    if table is not None:
        patients = {name: row["group"] for name, row in table.items() if row.get("group")}
        return {name: row["split"] for name, row in table.items()}, patients, findings
    if any((root / split).is_dir() for split in SPLITS):
        return {name: name.partition("/")[0] for name in labels}, {}, []
    message = (
        "the patients are unknown: patches of one patient may be in two splits, and scores may be too high; to prevent "
        "this, add a split.csv (image,split,group) that keeps each patient in one split."
    )
    return split_fractions(labels, FRACTIONS, SPLIT_SEED), {}, [Finding("", message, is_problem=False)]
