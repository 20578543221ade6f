"""What the readers of benchmark folders share: finding files, and a `split.csv` that a person may put beside them."""

import os
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

from rotopath.data.collection import Finding
from rotopath.data.splits import SPLITS
from rotopath.data.tables import Row, read_table

IMAGE_SUFFIXES = frozenset({".tif", ".tiff", ".png", ".jpg", ".jpeg"})
SPLIT_FILE = "split.csv"
NAMED_AT_MOST = 5


def files_in(folder: Path | None, suffixes: Collection[str]) -> list[Path]:
    """All files with one of the suffixes, at any depth, in order; hidden ones (`._x.tif` of a Mac) are left out."""
    if folder is None:
        return []
    return sorted(
        Path(parent) / name
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if Path(name).suffix.lower() in suffixes and not name.startswith(".")
    )


def by_stem(root: Path, paths: Iterable[Path]) -> tuple[dict[str, Path], list[Finding]]:
    """Files by their names without endings; of two with the same name the first counts, and the other is a finding."""
    found: dict[str, Path] = {}
    findings = []
    for path in paths:
        if (twin := found.setdefault(path.stem, path)) != path:
            sentence = f"there is {twin.relative_to(root).as_posix()} of the same name; this one is left out."
            findings.append(Finding(path.relative_to(root).as_posix(), sentence))
    return found, findings


def read_splits(
    root: Path, column: str, present: Collection[str], key_of: Callable[[str], str] = str
) -> tuple[dict[str, Row] | None, list[Finding]]:
    """The rows of `split.csv` for what is present, by their keys, and all findings; None without such a file."""
    path = root / SPLIT_FILE
    if not path.is_file():
        return None, []
    rows: dict[str, Row] = {}
    findings = []
    for line, row in read_table(path, (column, "split")):
        key = key_of(row[column])
        if row["split"] not in SPLITS:
            sentence = f"line {line} has the split {row['split']!r}; choose from {', '.join(SPLITS)}."
        elif key in rows:
            sentence = f"line {line} lists {row[column]!r} a second time."
        else:
            rows[key] = row
            continue
        findings.append(Finding(path.name, sentence))
    if absent := sorted(rows.keys() - set(present)):
        findings.append(Finding(path.name, f"it lists {listed(absent, column)} that the folder does not hold."))
    if unlisted := sorted(set(present) - rows.keys()):
        findings.append(left_out(unlisted, column))
    return {key: row for key, row in rows.items() if key in present}, findings


def left_out(names: Sequence[str], column: str) -> Finding:
    """That something has no split, and what to do about it."""
    sentence = f"{listed(names, column)} without a split: left out; a split.csv ({column},split) gives them a place."
    return Finding("", sentence, is_problem=False)


def listed(names: Sequence[str], what: str) -> str:
    """How many there are, and the names of the first few.

    >>> from rotopath.data.folders import listed
    >>> listed(["01"], "case"), listed(["a", "b", "c", "d", "e", "f"], "field")
    ('1 case (01)', '6 fields (a, b, c, d, e, ...)')
    """
    shown = ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"
