"""Images of one's own, listed in a CSV manifest.

In: a file with the columns `image`, `label` or `annotation`, and perhaps `group`, `split`, `spacing` (µm/px) and
`organ`; paths are relative to it. Out: a dataset. A `label` is the class of a whole image. An `annotation` is a file
of the objects in it: points (CSV or GeoJSON of points), or outlines (a label map, Aperio XML, GeoJSON of polygons).
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

from rotopath.data.annotations import GEOJSON_SUFFIXES
from rotopath.data.dataset import Annotated, DataError, Dataset, Finding, Row, Sample, read_table
from rotopath.data.splits import SPLITS, split_fractions
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, is_plausible, spacing_um_px
from rotopath.images.geojson import Point, read_geojson

FRACTIONS = {"train": 0.6, "valid": 0.2, "test": 0.2}  # of the groups, where the manifest has no splits
SPLIT_SEED = 0


def open_manifest(path: Path, spacing: float | None = None) -> Dataset:
    """The images of the manifest's good rows, and a finding for each bad one.

    `spacing` is that of images that do not say their own, in a column or in their files.
    """
    table = read_table(path, ("image",))
    if not table:
        raise DataError(f"{path} lists no images.")
    annotated = _find_annotated(path, table)
    samples: list[Sample] = []
    findings: list[Finding] = []
    splits = _splits(table)
    first_lines: dict[str, int] = {}
    for line, row in table:
        try:
            if (first := first_lines.setdefault(_key(row), line)) != line:
                raise DataError(f"{row['image']!r} is listed already, in line {first}.")
            samples.append(_picture(path.parent, row, annotated, splits[line], spacing))
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(path.name, f"line {line}: {error}"))
    return Dataset(annotated, "manifest", path.parent, tuple(samples), tuple(findings))


def _find_annotated(path: Path, table: list[tuple[int, Row]]) -> Annotated:
    columns = table[0][1].keys()
    if ("label" in columns) == ("annotation" in columns):
        raise DataError(
            f"{path} needs either a column `label` (the class of an image) or a column `annotation` (a file with the "
            f"objects in it), and not both."
        )
    if "label" in columns:
        return "labels"
    files = [Path(row["annotation"]) for _, row in table if row["annotation"]]
    suffixes = {file.suffix.lower() for file in files}
    if suffixes and suffixes <= set(GEOJSON_SUFFIXES):
        return _look_into_geojson([path.parent / file for file in files])
    if suffixes == {".csv"}:
        return "points"
    if suffixes and ".csv" not in suffixes:
        return "objects"
    raise DataError(
        f"{path} has annotations of kind {', '.join(sorted(suffixes)) or 'none'}; use CSV files throughout (positions "
        f"of objects), or label maps, XML and GeoJSON throughout (their outlines)."
    )


def _look_into_geojson(files: list[Path]) -> Annotated:
    """Points, if the first file that has any objects has points only."""
    for file in files:
        try:
            objects = read_geojson(file)
        except UnreadableFileError:
            continue  # a finding of its line
        if objects:
            return "points" if all(isinstance(item.shape, Point) for item in objects) else "objects"
    return "objects"


def _splits(table: list[tuple[int, Row]]) -> dict[int, str]:
    """The split of each line: as written, or where there is no such column by group, so that none is divided."""
    if "split" in table[0][1]:
        return {line: row["split"] for line, row in table}
    labels: dict[str, Counter[str]] = defaultdict(Counter)
    for _, row in table:
        labels[_group(row)][row.get("label", "")] += 1
    strata = {group: counts.most_common(1)[0][0] for group, counts in labels.items()}
    splits = split_fractions(strata, FRACTIONS, SPLIT_SEED)
    return {line: splits[_group(row)] for line, row in table}


def _group(row: Row) -> str:
    return row.get("group") or _key(row)


def _key(row: Row) -> str:
    """The image, however its path is spelled."""
    return os.path.normpath(row["image"])


def _picture(folder: Path, row: Row, annotated: Annotated, split: str, spacing: float | None) -> Sample:
    if not row["image"]:
        raise DataError("the image is not named.")
    if split not in SPLITS:
        raise DataError(f"the split is {split!r}; choose from {', '.join(SPLITS)}.")
    path = folder / row["image"]
    label: str | None = None
    annotations: tuple[Path, ...] = ()
    if annotated == "labels":
        if not (label := row["label"]):
            raise DataError("the label is missing; write the class of the image.")
    elif row["annotation"]:
        annotations = (folder / row["annotation"],)
        if not annotations[0].is_file():
            raise DataError(f"the annotation {row['annotation']!r} does not exist.")
    elif annotated == "objects":
        raise DataError("the annotation is missing; an image without objects needs an empty label map.")
    side, organ = find_spacing(path, row["image"], row.get("spacing", ""), spacing), row.get("organ", "")
    return Sample(path, row["image"], _group(row), split, side, None, label, annotations, organ)


def find_spacing(path: Path, name: str, text: str, otherwise: float | None) -> float:
    """The spacing of an image: as written in a table, as its file says, or else the given one."""
    if not text:
        if found := spacing_um_px(path) or otherwise:
            return found
        raise DataError(
            f"{name!r} does not say its resolution; give it as `data_spacing_um_px` in the recipe (--spacing-um-px of "
            f"`rotopath data`), or in a column `spacing` (µm/px) of a manifest."
        )
    try:
        spacing = float(text)
    except ValueError:
        spacing = 0.0
    if not is_plausible(spacing):
        low, high = PLAUSIBLE_UM_PX
        raise DataError(f"the spacing is {text!r}; a number from {low:g} to {high:g} is expected, in µm/px.")
    return spacing
