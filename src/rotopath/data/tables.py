"""Small CSV tables with a header: lists of splits, labels and manifests.

In: a path and the columns that it must have. Out: its rows with their line numbers; or one sentence about the file.
"""

import csv
from collections.abc import Collection
from pathlib import Path

from rotopath.images.files import UnreadableFileError


class TableError(UnreadableFileError):
    """A file that is no table, or lacks columns that it should have."""


def read_table(path: Path, required: Collection[str]) -> list[tuple[int, dict[str, str]]]:
    """(line, row) of each row that is not empty; names of columns in lower case, cells without spaces around them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file)
            header = [name.strip().lower() for name in next(reader, [])]
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError:
        raise TableError(path, "does not exist.") from None
    except (UnicodeDecodeError, csv.Error):
        raise TableError(path, "is no text table; a CSV file with a header is expected.") from None
    if missing := [name for name in required if name not in header]:
        raise TableError(
            path,
            f"has no column {missing[0]!r}; its first line must name {' and '.join(required)}.",
        )
    table = []
    for line, cells in rows:
        if not any(cells):
            continue
        if len(cells) > len(header):
            raise TableError(path, f"has {len(cells)} cells in line {line}, but {len(header)} columns.")
        table.append((line, dict(zip(header, cells + [""] * (len(header) - len(cells)), strict=True))))
    return table
