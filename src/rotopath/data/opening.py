"""Opening data: finds out what a folder or a file holds, and calls its reader.

In: the path that a person points at. Out: a collection, or one sentence about why there is none.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from rotopath.data.amida13 import is_amida13, open_amida13
from rotopath.data.class_folders import is_class_folders, open_class_folders
from rotopath.data.collection import SYNTHETIC, Annotated, Collection, DataError, Finding
from rotopath.data.kumar import is_kumar, open_kumar
from rotopath.data.manifest import open_manifest
from rotopath.data.pcam import is_kaggle, is_pcam, open_kaggle, open_pcam
from rotopath.data.splits import leaks
from rotopath.images.files import is_plausible

Open = Callable[[Path, float | None], Collection]  # given the root, and the spacing of images that do not say theirs
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


def open_data(path: Path | str, annotated: Annotated | None = None, spacing_um_px: float | None = None) -> Collection:
    """The collection at a path: a folder of a benchmark, also one level above it, a folder of classes, or a manifest.

    With `annotated`, data with annotations of another kind is refused. `spacing_um_px` is that of images of one's own
    that do not say theirs.
    """
    if spacing_um_px is not None and not is_plausible(spacing_um_px):
        raise DataError(f"The spacing is {spacing_um_px:g} µm/px, but microscopes have 0.05 to 5.")
    collection = _open(Path(path), spacing_um_px)
    if (collection.root / SYNTHETIC).exists():
        collection = replace(collection, source=f"{collection.source} (synthetic)")
    if annotated is not None and collection.annotated != annotated:
        raise DataError(
            f"{path} ({collection.source}) holds {HOLDS[collection.annotated]}, where {HOLDS[annotated]} are needed; "
            f"choose other data, or another task."
        )
    shared = leaks((picture.case, picture.split) for picture in collection.pictures if picture.case)
    return replace(collection, findings=(*collection.findings, *(Finding("", sentence) for sentence in shared)))


def _open(path: Path, spacing_um_px: float | None) -> Collection:
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
