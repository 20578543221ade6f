"""Images of one's own, listed in a CSV manifest.

In: a file with the columns `image`, `label` or `annotation`, and perhaps `group`, `split`, `spacing` (µm/px) and
`organ`; paths are relative to it. Out: a collection. Labels 0 and 1 make a tumor task, CSV annotations a mitosis task,
label maps or XML a nuclei task.
"""

import os
from collections import Counter, defaultdict
from pathlib import Path

from rotopath.data.collection import Collection, DataError, Finding, Picture, Task
from rotopath.data.splits import SPLITS, split_fractions
from rotopath.data.tables import Row, read_table
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, is_plausible, spacing_um_px

FRACTIONS = {"train": 0.6, "valid": 0.2, "test": 0.2}  # of the groups, where the manifest has no splits
SPLIT_SEED = 0


def open_manifest(path: Path) -> Collection:
    """The images of the manifest's good rows, and a finding for each bad one."""
    table = read_table(path, ("image",))
    if not table:
        raise DataError(f"{path} lists no images.")
    task = _task(path, table)
    pictures: list[Picture] = []
    findings: list[Finding] = []
    splits = _splits(table)
    seen: dict[str, int] = {}
    for line, row in table:
        try:
            if (first := seen.setdefault(_key(row), line)) != line:
                raise DataError(f"{row['image']!r} is listed already, in line {first}.")
            pictures.append(_picture(path.parent, row, task, splits[line]))
        except (DataError, UnreadableFileError) as error:
            findings.append(Finding(path.name, f"line {line}: {error}"))
    return Collection(task, "manifest", path.parent, tuple(pictures), tuple(findings))


def _task(path: Path, table: list[tuple[int, Row]]) -> Task:
    columns = table[0][1].keys()
    if ("label" in columns) == ("annotation" in columns):
        raise DataError(
            f"{path} needs either a column `label` (0 or 1, the class of an image) or a column `annotation` (a file "
            f"with the objects in it), and not both."
        )
    if "label" in columns:
        return "tumor"
    kinds = {Path(row["annotation"]).suffix.lower() for _, row in table if row["annotation"]}
    if kinds == {".csv"}:
        return "mitosis"
    if kinds and ".csv" not in kinds:
        return "nuclei"
    raise DataError(
        f"{path} has annotations of kind {', '.join(sorted(kinds)) or 'none'}; use CSV files throughout (places of "
        f"mitoses), or label maps and XML throughout (nuclei)."
    )


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


def _picture(folder: Path, row: Row, task: Task, split: str) -> Picture:
    if not row["image"]:
        raise DataError("the image is not named.")
    if split not in SPLITS:
        raise DataError(f"the split is {split!r}; choose from {', '.join(SPLITS)}.")
    path = folder / row["image"]
    label: int | None = None
    annotations: tuple[Path, ...] = ()
    if task == "tumor":
        if row["label"] not in ("0", "1"):
            raise DataError(f"the label is {row['label']!r}; 0 or 1 is expected.")
        label = int(row["label"])
    elif row["annotation"]:
        annotations = (folder / row["annotation"],)
        if not annotations[0].is_file():
            raise DataError(f"the annotation {row['annotation']!r} does not exist.")
    elif task == "nuclei":
        raise DataError("the annotation is missing; an image without nuclei needs an empty label map.")
    spacing, organ = _spacing(path, row), row.get("organ", "")
    return Picture(path, row["image"], _group(row), split, spacing, None, label, annotations, organ)


def _spacing(path: Path, row: Row) -> float:
    text = row.get("spacing", "")
    if not text:
        if (found := spacing_um_px(path)) is None:
            raise DataError(f"{row['image']!r} does not tell its resolution; write it into a column `spacing` (µm/px).")
        return found
    try:
        spacing = float(text)
    except ValueError:
        spacing = 0.0
    if not is_plausible(spacing):
        low, high = PLAUSIBLE_UM_PX
        raise DataError(f"the spacing is {text!r}; a number from {low:g} to {high:g} is expected, in µm/px.")
    return spacing
