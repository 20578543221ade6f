"""Small CSV tables with a header: lists of splits, labels and manifests.

In: a path and the columns that it must have. Out: its rows with their line numbers; or one sentence about the file.
"""

import csv
from collections.abc import Collection
from pathlib import Path

from rotopath.images.files import UnreadableFileError

Row = dict[str, str]
HEAD_CHARACTERS = 10_000


class TableError(UnreadableFileError):
    """A file that is no table, or lacks columns that it should have."""


def read_table(path: Path, required: Collection[str]) -> list[tuple[int, Row]]:
    """(line, row) of each row that is not empty; names of columns in lower case, cells without spaces around them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS)
            file.seek(0)
            reader = csv.reader(file, delimiter=find_delimiter(start))
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError:
        raise TableError(path, "does not exist.") from None
    except (UnicodeDecodeError, csv.Error):
        raise TableError(path, "is no text that can be read; save it as a CSV file in UTF-8.") from None
    except OSError as error:
        raise TableError(path, f"cannot be read ({error.strerror}).") from None
    rows = [(line, cells) for line, cells in rows if any(cells)]
    header = [name.lower() for name in rows[0][1]] if rows else []
    if missing := [name for name in required if name not in header]:
        raise TableError(path, f"has no column {missing[0]!r}; its first line must name {' and '.join(required)}.")
    table = []
    for line, cells in rows[1:]:
        if any(cells[len(header) :]):
            raise TableError(path, f"has {len(cells)} cells in line {line}, but {len(header)} columns.")
        table.append((line, dict(zip(header, cells + [""] * len(header), strict=False))))
    return table


def find_delimiter(text: str) -> str:
    """What separates the columns: spreadsheets of many countries write semicolons."""
    header = next((line for line in text.splitlines() if line.strip(",;\t ")), "")
    return max(",;\t", key=header.count)
