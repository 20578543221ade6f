"""Open your own images: those that a CSV manifest lists, or patches in one folder for each class.

A manifest has the column `image`, one column with annotations, and optionally `group` (the patient), `split`, `spacing`
(pixel spacing in µm/px) and `organ`. Paths are relative to the folder of the manifest. The column with annotations is
`label`, the class of a whole image; or `points` or `outlines`, a file of objects (GeoJSON, CSV of positions, label map,
or Aperio XML); or `annotation`, a file of objects whose type follows from the files; or `regions`, a GeoJSON file of
outlined regions with classes.

Rows may be whole slides. If the objects of an image are annotated only in areas, outlined with the class "Region*" in
its GeoJSON file, each of these areas is an image of the dataset. In regions with classes, each square of a grid is an
image with a label. Their pixels are read from the slide when they are needed.

Class folders are the layout of torchvision's ImageFolder. The class of a patch is the name of its folder:
`CLASS/IMAGE`, or `train/CLASS/IMAGE` if each split has a folder. An optional `split.csv` has the columns `image`,
`split` and, optionally, `group` (the patient). The splits in this file have priority over the folders of splits.
"""

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path

import numpy as np
from scipy import ndimage

from rotopath.data.annotations import GEOJSON_SUFFIXES, is_in_region, is_rectangle, transform_outline
from rotopath.data.dataset import (
    IMAGE_SUFFIXES,
    Annotated,
    DataError,
    Dataset,
    Finding,
    PixelBox,
    Row,
    Sample,
    annotated_size_px,
    find_files,
    image_spacing_um_px,
    read_table,
)
from rotopath.data.splits import SPLITS, find_split, read_split_file, split_fractions
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, is_plausible
from rotopath.images.geojson import IGNORED_CLASS, REGION_CLASS, SlideObject, read_geojson
from rotopath.images.outlines import Point, fill_outline

MANIFEST_FILE = "manifest.csv"
MANIFEST = "manifest"  # source of a dataset that is described by a manifest
# Fraction of the patients in each split, for random splits if the manifest has no column `split`. For class folders
# without splits: fraction of the images.
FRACTIONS = {"train": 0.6, "valid": 0.2, "test": 0.2}
SPLIT_SEED = 0
# Names of folders, in lower case, that show that a dataset has another format.
NOT_CLASSES = {"image", "images", "img", "imgs", "mask", "masks", "label", "labels", "annotation", "annotations"}
MAX_SIDE_PX = 4096  # larger regions are divided into several images
COARSE_PX = 256  # resolution at which empty parts of regions are found
PATCH_UM = 128.0  # side of the squares in regions with classes
CELLS = 8  # a square has so many cells along a side, for which it is computed whether they are in the region
MIN_COVERED = 0.75  # fraction of a square that must be in the region
# Columns with annotations. A manifest has one of them; None means that the type follows from the files.
ANNOTATION_COLUMNS: Mapping[str, Annotated | None] = {
    "label": "labels",
    "annotation": None,
    "points": "points",
    "outlines": "objects",
    "regions": "labels",
}


def open_manifest(path: Path, default_spacing_um_px: float | None = None) -> Dataset:
    """Open the images of all valid rows, and report each invalid row as a finding.

    `default_spacing_um_px` is the pixel spacing of an image if neither the manifest nor the image file specifies its
    pixel spacing. If `default_spacing_um_px` is None, the row of such an image is invalid.

    Raises DataError if the manifest lists no images, or does not have exactly one of `ANNOTATION_COLUMNS`. Also raises
    DataError if the column `annotation` lists no files, or both CSV files and other files.
    """
    table = read_table(path, ("image",))
    if not table:
        raise DataError(f"{path} lists no images; add a line for each image.")
    column, annotated = _find_annotated(path, table)
    samples: list[Sample] = []
    findings: list[Finding] = []
    splits = _assign_splits(table)
    first_lines: dict[str, int] = {}
    for line, row in table:
        try:
            if (first := first_lines.setdefault(_normalize_path(row), line)) != line:
                raise DataError(f"{row['image']!r} is listed already in line {first}; list each image once.")
            sample = _make_sample(path.parent, row, column, annotated, splits[line], default_spacing_um_px)
            parts, notes = _cut_squares(sample) if column == "regions" else _cut_regions(sample, annotated)
            samples += parts
            findings += notes
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(path.name, f"line {line}: {error}"))
    if column not in ("label", "regions"):
        findings += _find_missing_regions(samples)
    return Dataset(annotated, MANIFEST, path.parent, tuple(samples), tuple(findings))


def find_spacing(path: Path, name: str, text: str, default_um_px: float | None) -> float:
    """Return the pixel spacing of an image in µm/px.

    The pixel spacing is `text`, a cell of the manifest. If `text` is empty, the pixel spacing is read from the image
    file at `path`. If the image file does not specify a pixel spacing, `default_um_px` is returned. `name` is the name
    of the image in messages. Raises DataError if `text` is not a plausible number, or if no pixel spacing is specified.
    Raises UnreadableFileError if the image file must be read, but cannot be read.
    """
    if not text:
        if spacing := image_spacing_um_px(path) or default_um_px:
            return spacing
        raise DataError(
            f"{name!r} does not specify its pixel spacing (µm/px); set `data_spacing_um_px` in the recipe, or use "
            f"--spacing-um-px with `rotopath data`, or add a column `spacing` to the manifest."
        )
    try:
        spacing = float(text)
    except ValueError:
        spacing = 0.0
    if not is_plausible(spacing):
        low, high = PLAUSIBLE_UM_PX
        raise DataError(f"the column `spacing` is {text!r}; expected a number from {low:g} to {high:g} (µm/px).")
    return spacing


def _find_annotated(path: Path, table: list[tuple[int, Row]]) -> tuple[str, Annotated]:
    """Return the column with annotations of the manifest at `path`, and the type of annotation.

    For the column `annotation`, the type follows from the suffixes and contents of the annotation files. `table`
    contains the rows of the manifest. Raises DataError if the type is not clear.
    """
    columns = [name for name in ANNOTATION_COLUMNS if name in table[0][1]]
    if len(columns) != 1:
        names = " and ".join(f"`{name}`" for name in columns)
        raise DataError(
            f"{path} needs either a column `label` (the class of each image) or a column `annotation`, `points` or "
            f"`outlines` (a file with the objects of each image) or `regions` (a file with outlined areas of each "
            f"class), but only one of them; it has {names or 'none'}."
        )
    if (annotated := ANNOTATION_COLUMNS[columns[0]]) is not None:
        return columns[0], annotated
    files = [Path(row["annotation"]) for _, row in table if row["annotation"]]
    suffixes = {file.suffix.lower() for file in files}
    if suffixes and suffixes <= set(GEOJSON_SUFFIXES):
        return columns[0], _find_annotated_in_geojson([path.parent / file for file in files])
    if suffixes == {".csv"}:
        return columns[0], "points"
    if suffixes and ".csv" not in suffixes:
        return columns[0], "objects"
    raise DataError(
        f"{path} lists annotation files of these types: {', '.join(sorted(suffixes)) or 'none'}; use either CSV files "
        f"only (positions of objects), or label maps, XML and GeoJSON only (outlines of objects)."
    )


def _find_annotated_in_geojson(files: list[Path]) -> Annotated:
    """Return "points" if the first file with any object contains only points, else "objects"."""
    for file in files:
        try:
            objects = [item for item in read_geojson(file) if item.is_object]
        except UnreadableFileError:
            continue  # `check` reports this file
        if objects:
            return "points" if all(isinstance(item.shape, Point) for item in objects) else "objects"
    return "objects"


def _assign_splits(table: list[tuple[int, Row]]) -> dict[int, str]:
    """Return a dictionary from line numbers of the manifest to splits.

    Splits come from the column `split`. If there is no such column, the patients are divided at random within each
    class. The class of a patient here is the most frequent class of the patient's images.
    """
    if "split" in table[0][1]:
        return {line: row["split"] for line, row in table}
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for _, row in table:
        labels[_find_group(row)][row.get("label", "")] += 1
    strata = {group: counts.most_common(1)[0][0] for group, counts in labels.items()}
    splits = split_fractions(strata, FRACTIONS, SPLIT_SEED)
    return {line: splits[_find_group(row)] for line, row in table}


def _find_group(row: Row) -> str:
    """Return the patient of an image, or the path of the image if the patient is unknown."""
    return row.get("group") or _normalize_path(row)


def _normalize_path(row: Row) -> str:
    """Return the path of a row's image in normal form: `a.png` for both `a.png` and `./a.png`."""
    return os.path.normpath(row["image"])


def _make_sample(
    folder: Path, row: Row, column: str, annotated: Annotated, word: str, default_um_px: float | None
) -> Sample:
    """Return the sample of a row of the manifest in `folder`.

    `column` is the column with annotations. `word` is a word for the split of the row.

    Raises DataError if the row is invalid, or UnreadableFileError if the image file cannot be read.
    """
    if not row["image"]:
        raise DataError("the column `image` is empty; write the path of the image.")
    if (split := find_split(word)) is None:
        raise DataError(f"the column `split` is {word!r}; choose from {', '.join(SPLITS)}.")
    path = folder / row["image"]
    label: str | None = None
    annotations: tuple[Path, ...] = ()
    if column == "label":
        if not (label := row["label"]):
            raise DataError("the column `label` is empty; write the class of the image.")
    elif row[column]:
        annotations = (folder / row[column],)
        if not annotations[0].is_file():
            raise DataError(f"the annotation file {row[column]!r} does not exist; correct its path.")
    elif annotated != "points":
        raise DataError(
            f"the column `{column}` is empty; an image without {column} needs a GeoJSON file without features, or a "
            f"label map of zeros."
        )
    return Sample(
        path,
        row["image"],
        case=_find_group(row),
        split=split,
        spacing_um_px=find_spacing(path, row["image"], row.get("spacing", ""), default_um_px),
        label=label,
        annotations=annotations,
        stratum=row.get("organ", ""),
    )


# Parts of slides


def _find_missing_regions(samples: Sequence[Sample]) -> list[Finding]:
    """Return a note if some images have outlines of the class "Region*", and others are used as a whole."""
    images = {sample.path: sample for sample in samples}
    whole = [sample.name for sample in images.values() if sample.box is None]
    if len(whole) in (0, len(images)):
        return []
    message = (
        f"{len(whole)} of {len(images)} images have no outline of the class Region*, and are used as a whole: all of "
        f"their objects must be annotated, first: {whole[0]}."
    )
    return [Finding("", message, is_problem=False)]


def _cut_regions(sample: Sample, annotated: Annotated) -> tuple[list[Sample], list[Finding]]:
    """Return a sample for each outline of the class "Region*" in the annotation file of a sample; and notes.

    Without such outlines, the sample is returned as it is. Regions that are higher or wider than MAX_SIDE_PX become
    several samples. `annotated` is the type of annotation of the dataset.
    """
    path = sample.annotations[0] if sample.annotations else None
    if path is None or path.suffix.lower() not in GEOJSON_SUFFIXES or not _contains(path, REGION_CLASS):
        return [sample], []
    try:
        objects = read_geojson(path)
    except UnreadableFileError:
        return [sample], []  # `check` reports this file
    regions = [item for item in objects if item.class_name == REGION_CLASS and not isinstance(item.shape, Point)]
    if not regions:
        return [sample], []
    height, width = annotated_size_px(sample.path)
    boxes: list[PixelBox] = []
    outside = {number: item for number, item in enumerate(objects, 1) if item.is_object}
    count = len(outside)
    for item in regions:
        assert not isinstance(item.shape, Point)
        outline = None if is_rectangle(item.shape) else item.shape
        # A pixel belongs to a region if its center is inside.
        top, left, bottom, right = (int(np.ceil(value - 0.5)) for value in item.bounds_px)
        rows, columns = (max(top, 0), min(bottom, height)), (max(left, 0), min(right, width))
        for (upper, lower), (first, last) in product(_divide(*rows), _divide(*columns)):
            box = PixelBox(upper, first, lower - upper, last - first)
            factor = min(1.0, COARSE_PX / max(box.height_px, box.width_px))
            coarse = transform_outline(item.shape, factor, (upper, first))
            if box not in boxes and fill_outline(coarse, (COARSE_PX, COARSE_PX)).any():
                boxes.append(box)
                by_center = annotated == "points"
                outside = {k: other for k, other in outside.items() if not is_in_region(other, box, outline, by_center)}
    notes = []
    if outside:
        part = "with their centers" if annotated == "points" else "completely"
        message = (
            f"objects {part} outside of the regions (Region*) are not used: {len(outside)} of {count}, first: feature "
            f"{next(iter(outside))}."
        )
        notes.append(Finding(sample.name, message, is_problem=False, objects=len(outside)))
    if not boxes:
        message = "the regions (Region*) are outside of the image, which is not used."
        notes.append(Finding(sample.name, message, is_problem=False))
    return [_cut(sample, box) for box in boxes], notes


def _divide(start: int, stop: int) -> list[tuple[int, int]]:
    """Divide a range into equal parts of up to MAX_SIDE_PX. A range without a length has no parts."""
    parts = -(-(stop - start) // MAX_SIDE_PX)
    return list(pairwise(np.linspace(start, stop, parts + 1).round().astype(int).tolist())) if parts > 0 else []


def _cut_squares(sample: Sample) -> tuple[list[Sample], list[Finding]]:
    """Return a sample with a label for each square of a grid inside the classified regions of a sample; and notes.

    At least 75 % of a square (MIN_COVERED) are inside its region. A region that is too small for a square has one,
    which is around the point that is farthest from the edge of the region. Where regions overlap, the smaller one
    counts. Ignored areas belong to no region.
    """
    objects = [item for item in read_geojson(sample.annotations[0]) if not isinstance(item.shape, Point)]
    regions = sorted((item for item in objects if item.is_object), key=_find_area, reverse=True)
    if unnamed := [item for item in regions if not item.class_name]:
        raise DataError(
            f"{sample.name!r} has {len(unnamed)} regions without a class, first at row and column "
            f"{unnamed[0].center[0]:.0f}, {unnamed[0].center[1]:.0f}; give each a class, or the class Ignore*."
        )
    size_px = annotated_size_px(sample.path)
    side_px = round(PATCH_UM / sample.spacing_um_px)
    cell_px = side_px / CELLS
    shape = (int(np.ceil(size_px[0] / cell_px)), int(np.ceil(size_px[1] / cell_px)))
    numbers = np.zeros(shape, np.int32)  # of the region in each cell
    ignored = [item for item in objects if item.class_name == IGNORED_CLASS]
    for number, item in [*enumerate(regions, 1), *((0, item) for item in ignored)]:
        assert not isinstance(item.shape, Point)
        numbers[fill_outline(transform_outline(item.shape, 1 / cell_px), shape)] = number
    samples, lost = [], 0
    slices = ndimage.find_objects(numbers, len(regions))
    for number, (item, area) in enumerate(zip(regions, slices, strict=True), 1):
        if area is None:
            lost += 1
            continue
        mask = numbers[area] == number
        height, width = (-(-side // CELLS) for side in mask.shape)
        grid = np.zeros((height * CELLS, width * CELLS), bool)
        grid[: mask.shape[0], : mask.shape[1]] = mask
        covered = grid.reshape(height, CELLS, width, CELLS).mean(axis=(1, 3))
        corners = np.argwhere(covered >= MIN_COVERED) * float(CELLS)
        if not len(corners):
            depth = ndimage.distance_transform_edt(np.pad(mask, 1))[1:-1, 1:-1]
            corners = np.array([np.unravel_index(int(depth.argmax()), mask.shape)]) + 0.5 - CELLS / 2
        for row, column in corners + np.array([part.start for part in area]):
            top, left = (
                int(min(max(round(cell * cell_px), 0), max(side - side_px, 0)))
                for cell, side in zip((row, column), size_px, strict=True)
            )
            box = PixelBox(top, left, min(side_px, size_px[0]), min(side_px, size_px[1]))
            samples.append(replace(_cut(sample, box), label=item.class_name))
    notes = [f"{lost} regions are covered by others, or are tiny, and are not used."] if lost else []
    if not regions:
        notes.append("it has no regions, and is not used.")
    return samples, [Finding(sample.name, note, is_problem=False) for note in notes]


def _find_area(item: SlideObject) -> float:
    return 0.0 if isinstance(item.shape, Point) else sum(polygon.area_px for polygon in item.shape)


def _cut(sample: Sample, box: PixelBox) -> Sample:
    return replace(sample, name=f"{sample.name} {box}", box=box)


def _contains(path: Path, text: str) -> bool:
    """Return whether a file contains a text, which is faster than to parse the file."""
    try:
        return text.encode() in path.read_bytes()
    except OSError:
        return False  # `check` reports this file


# Patches in a folder for each class


def is_class_folders(root: Path) -> bool:
    """Return whether a dataset folder contains at least two class folders with images.

    The class folders are directly in `root`, or in its subfolders `train`, `valid` (or `val`) and `test`. The result is
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
    splits, patients, findings = _assign_folder_splits(root, {name: label for name, (label, _) in images.items()})
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
    parents = _find_split_folders(root) or [root]
    classes: dict[str, list[Path]] = {}
    for parent in parents:
        for folder in sorted(path for path in parent.iterdir() if path.is_dir() and not path.name.startswith(".")):
            if any(path.suffix.lower() in IMAGE_SUFFIXES for path in folder.iterdir()):
                classes.setdefault(folder.name, []).append(folder)
    return classes


def _find_split_folders(root: Path) -> list[Path]:
    """Return the subfolders whose names are words for splits, such as `train` and `val`."""
    return sorted(path for path in root.iterdir() if find_split(path.name) and path.is_dir())


def _assign_folder_splits(root: Path, labels: dict[str, str]) -> tuple[dict[str, str], dict[str, str], list[Finding]]:
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
    if _find_split_folders(root):
        return {name: find_split(name.partition("/")[0]) or "" for name in labels}, {}, []
    message = (
        "the patients are unknown: patches of one patient may be in two splits, and scores may be too high; to prevent "
        "this, add a split.csv (image,split,group) that keeps each patient in one split."
    )
    return split_fractions(labels, FRACTIONS, SPLIT_SEED), {}, [Finding("", message, is_problem=False)]
