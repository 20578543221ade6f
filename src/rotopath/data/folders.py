"""What the readers of benchmark folders share: finding files, and a `split.csv` that a person may put beside them."""

from collections.abc import Collection, Sequence
from pathlib import Path

from rotopath.data.collection import Finding
from rotopath.data.splits import SPLITS
from rotopath.data.tables import read_table

IMAGE_SUFFIXES = frozenset({".tif", ".tiff", ".png", ".jpg", ".jpeg"})
NAMED_AT_MOST = 5


def files_in(folder: Path | None, suffixes: Collection[str]) -> list[Path]:
    """All files with one of the suffixes, at any depth, in order; hidden ones (`._x.tif` of a Mac) are left out."""
    if folder is None or not folder.is_dir():
        return []
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in suffixes and not path.name.startswith(".") and path.is_file()
    )


def read_splits(root: Path, key: str) -> tuple[dict[str, dict[str, str]] | None, list[Finding]]:
    """The rows of `split.csv` by their key, and what is wrong with it; None where there is no such file."""
    path = root / "split.csv"
    if not path.is_file():
        return None, []
    rows: dict[str, dict[str, str]] = {}
    findings = []
    for line, row in read_table(path, (key, "split")):
        if row["split"] not in SPLITS:
            sentence = f"line {line} has the split {row['split']!r}; choose from {', '.join(SPLITS)}."
        elif row[key] in rows:
            sentence = f"line {line} lists {row[key]!r} a second time."
        else:
            rows[row[key]] = row
            continue
        findings.append(Finding(path.name, sentence))
    return rows, findings


def listed(names: Sequence[str], what: str) -> str:
    """How many there are, and the names of the first few.

    >>> from rotopath.data.folders import listed
    >>> listed(["01"], "case"), listed(["a", "b", "c", "d", "e", "f"], "field")
    ('1 case (01)', '6 fields (a, b, c, d, e, ...)')
    """
    shown = ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"
