"""Open your own images, which are listed in a CSV manifest.

A manifest has the column `image`, either the column `label` or the column `annotation`, and optionally `group` (the
patient), `split`, `spacing` (pixel spacing in µm/px) and `organ`. Paths are relative to the folder of the manifest. A
`label` is the class of a whole image. An `annotation` is a file of points (CSV, or GeoJSON of points) or of outlines
(label map, Aperio XML, or GeoJSON of polygons).
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

from rotopath.data.annotations import GEOJSON_SUFFIXES
from rotopath.data.dataset import Annotated, DataError, Dataset, Finding, Row, Sample, read_table
from rotopath.data.splits import SPLITS, split_fractions
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, is_plausible, spacing_um_px
from rotopath.images.geojson import read_geojson
from rotopath.images.outlines import Point

MANIFEST_FILE = "manifest.csv"
# Fraction of the patients in each split, for random splits if the manifest has no column `split`. For class folders
# without splits: fraction of the images.
FRACTIONS = {"train": 0.6, "valid": 0.2, "test": 0.2}
SPLIT_SEED = 0


def open_manifest(path: Path, default_spacing_um_px: float | None = None) -> Dataset:
    """Open the images of all valid rows, and report each invalid row as a finding.

    `default_spacing_um_px` is the pixel spacing of an image if neither the manifest nor the image file specifies its
    pixel spacing. If `default_spacing_um_px` is None, the row of such an image is invalid.

    Raises DataError if the manifest lists no images, or if it has both or neither of the columns `label` and
    `annotation`. Also raises DataError if the column `annotation` lists no files, or both CSV files and other files.
    """
    table = read_table(path, ("image",))
    if not table:
        raise DataError(f"{path} lists no images; add a line for each image.")
    annotated = _find_annotated(path, table)
    samples: list[Sample] = []
    findings: list[Finding] = []
    splits = _assign_splits(table)
    first_lines: dict[str, int] = {}
    for line, row in table:
        try:
            if (first := first_lines.setdefault(_normalize_path(row), line)) != line:
                raise DataError(f"{row['image']!r} is listed already in line {first}; list each image once.")
            samples.append(_make_sample(path.parent, row, annotated, splits[line], default_spacing_um_px))
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(path.name, f"line {line}: {error}"))
    return Dataset(annotated, "manifest", path.parent, tuple(samples), tuple(findings))


def find_spacing(path: Path, name: str, text: str, default_um_px: float | None) -> float:
    """Return the pixel spacing of an image in µm/px.

    The pixel spacing is `text`, a cell of the manifest. If `text` is empty, the pixel spacing is read from the image
    file at `path`. If the image file does not specify a pixel spacing, `default_um_px` is returned. `name` is the name
    of the image in messages. Raises DataError if `text` is not a plausible number, or if no pixel spacing is specified.
    Raises UnreadableFileError if the image file must be read, but cannot be read.
    """
    if not text:
        if spacing := spacing_um_px(path) or default_um_px:
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


def _find_annotated(path: Path, table: list[tuple[int, Row]]) -> Annotated:
    """Return the type of annotation of the manifest at `path`: "labels", "points" or "objects".

    The type follows from the columns, and from the suffixes and contents of the annotation files. `table` contains the
    rows of the manifest. Raises DataError if the type is not clear.
    """
    columns = table[0][1].keys()
    if ("label" in columns) == ("annotation" in columns):
        raise DataError(
            f"{path} needs either a column `label` (the class of each image) or a column `annotation` (a file with the "
            f"objects of each image), but not both."
        )
    if "label" in columns:
        return "labels"
    files = [Path(row["annotation"]) for _, row in table if row["annotation"]]
    suffixes = {file.suffix.lower() for file in files}
    if suffixes and suffixes <= set(GEOJSON_SUFFIXES):
        return _find_annotated_in_geojson([path.parent / file for file in files])
    if suffixes == {".csv"}:
        return "points"
    if suffixes and ".csv" not in suffixes:
        return "objects"
    raise DataError(
        f"{path} lists annotation files of these types: {', '.join(sorted(suffixes)) or 'none'}; use either CSV files "
        f"only (positions of objects), or label maps, XML and GeoJSON only (outlines of objects)."
    )


def _find_annotated_in_geojson(files: list[Path]) -> Annotated:
    """Return "points" if the first file with any object contains only points, else "objects"."""
    for file in files:
        try:
            objects = read_geojson(file)
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


def _make_sample(folder: Path, row: Row, annotated: Annotated, split: str, default_um_px: float | None) -> Sample:
    """Return the sample of a row of the manifest in `folder`.

    Raises DataError if the row is invalid, or UnreadableFileError if the image file cannot be read.
    """
    if not row["image"]:
        raise DataError("the column `image` is empty; write the path of the image.")
    if split not in SPLITS:
        raise DataError(f"the column `split` is {split!r}; choose from {', '.join(SPLITS)}.")
    path = folder / row["image"]
    label: str | None = None
    annotations: tuple[Path, ...] = ()
    if annotated == "labels":
        if not (label := row["label"]):
            raise DataError("the column `label` is empty; write the class of the image.")
    elif row["annotation"]:
        annotations = (folder / row["annotation"],)
        if not annotations[0].is_file():
            raise DataError(f"the annotation file {row['annotation']!r} does not exist; correct its path.")
    elif annotated == "objects":
        raise DataError("the column `annotation` is empty; an image without objects needs a label map of zeros.")
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
