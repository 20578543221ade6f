"""Opening data: finds out what a folder or a file holds, and calls its reader.

In: the path that a person points at. Out: a collection, or one sentence about why there is none.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rotopath.data.amida13 import is_amida13, open_amida13
from rotopath.data.collection import SYNTHETIC, Collection, DataError, Finding, Task
from rotopath.data.kumar import is_kumar, open_kumar
from rotopath.data.manifest import open_manifest
from rotopath.data.pcam import is_kaggle, is_pcam, open_kaggle, open_pcam
from rotopath.data.splits import leaks

LAYOUTS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Collection]], ...] = (
    (lambda root: (root / "manifest.csv").is_file(), lambda root: open_manifest(root / "manifest.csv")),
    (is_amida13, open_amida13),
    (is_kumar, open_kumar),
    (is_pcam, open_pcam),
    (is_kaggle, open_kaggle),
)
EXPECTED = (
    "expected are the unpacked folders of AMIDA13 (mitoses_image_data_part_1, mitoses_ground_truth), of Kumar or "
    "MoNuSeg (Tissue Images, Annotations), of PCam (camelyonpatch_level_2_split_train_x.h5, or train and "
    "train_labels.csv), or a manifest.csv"
)


def open_data(path: Path | str, task: Task | None = None) -> Collection:
    """The collection that lies at a path: a folder of a benchmark, also one level above it, or a manifest.

    With a task given, data of another task is refused.
    """
    collection = _open(Path(path))
    if (collection.root / SYNTHETIC).exists():
        collection = replace(collection, source=f"{collection.source} (synthetic)")
    if task is not None and collection.task != task:
        raise DataError(
            f"{path} holds {collection.source} data for the task {collection.task}, but {task} is asked for; "
            f"choose another folder or the other task."
        )
    shared = leaks((picture.case, picture.split) for picture in collection.pictures if picture.case)
    return replace(collection, findings=(*collection.findings, *(Finding("", sentence) for sentence in shared)))


def _open(path: Path) -> Collection:
    if not path.exists():
        raise DataError(f"{path} does not exist.")
    if path.is_file():
        if path.suffix.lower() != ".csv":
            raise DataError(f"{path} is a file, but no CSV manifest; give a folder or a manifest.")
        return open_manifest(path)
    if (here := _layout(path)) is not None:
        return here(path)
    # An archive often unpacks into a folder of its own, one level further down.
    inside = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
    found = [(root, layout) for root in inside if (layout := _layout(root)) is not None]
    if len(found) > 1:
        places = ", ".join(str(root) for root, _ in found)
        raise DataError(f"{path} holds more than one data set ({places}); give the folder of one.")
    if not found:
        what = "is empty" if not any(path.iterdir()) else "is no data set that is known here"
        raise DataError(f"{path} {what}; {EXPECTED}.")
    root, layout = found[0]
    return layout(root)


def _layout(root: Path) -> Callable[[Path], Collection] | None:
    """The reader of a folder; a manifest goes before what it may lie in."""
    return next((open_layout for is_layout, open_layout in LAYOUTS if is_layout(root)), None)
