"""Write the pages of results from their templates: every number on them comes from a CSV file in the folder results.

.venv/bin/python tools/pages.py

A page such as `results/tumor.md` is the text of `results/templates/tumor.md`, in which these fields are replaced. FILE
is a CSV file in results, without its suffix, and WHERE selects rows: `column=value; column=value`.

- `{{FILE | WHERE | COLUMN}}`: a cell. Exactly one row must be selected. A fourth part formats the cell: `mean` leaves
  out what follows the mean, `percent` writes a fraction as a percentage, and `answer` whether a difference is above 0.
- `{{let NAME = FILE | WHERE}}`: after this line, `{{NAME | COLUMN}}` is a cell of that row.
- `{{table | FILE | WHERE | COLUMN; COLUMN = title; …}}`, alone in a line: a table of the selected rows.
- `{{pivot | FILE | WHERE | COLUMN = title | COLUMN | COLUMN}}`, alone in a line: a table with a row for each value of
  the first of these columns, a column for each value of the second, and in its cells the third. Several columns may be
  joined: `N + rotations`.

Lines that follow each other are a paragraph, or an item of a list, and are wrapped again. A test renders the pages
again, and compares them with those in the folder.
"""

import csv
import re
import textwrap
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from rotopath.studies.results import Estimate, decide

RESULTS = Path(__file__).parent.parent / "results"
WIDTH = 100  # longest line of a paragraph
NO_TEXT = ("|", "#", "<!--", "![", "{{let", "{{table", "{{pivot")  # lines that begin so are no part of a paragraph
NOTHING = "–"
FIELD = re.compile(r"\{\{(.+?)\}\}")
Row = Mapping[str, str]


class TemplateError(ValueError):
    """Raised for a field of a template that selects no cell, or several."""


def render(template: str, results: Path = RESULTS) -> str:
    """Return the text of a page. `results` is the folder of the CSV files."""
    names: dict[str, Row] = {}
    lines: list[str] = []
    paragraph: list[str] = []

    def end_paragraph() -> None:
        text = " ".join(line.strip() for line in paragraph).replace(" %", "\N{NO-BREAK SPACE}%")
        indent = "  " if text.startswith("- ") else ""
        wrapped = textwrap.wrap(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        lines.extend(line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped)
        paragraph.clear()

    in_code = False
    for line in template.splitlines():
        is_code = in_code or line.startswith("```")
        in_code ^= line.startswith("```")
        is_text = bool(line) and not is_code and not line.startswith(NO_TEXT)
        if not is_text or line.startswith("- "):
            end_paragraph()
        if match := re.fullmatch(r"\{\{let (\w+) = (.+)\}\}", line):
            file, where = _split(match[2], 2)
            names[match[1]] = _select_one(results, file, where)
        elif match := re.fullmatch(r"\{\{(table|pivot) \|(.+)\}\}", line):
            lines += (_make_table if match[1] == "table" else _make_pivot)(results, match[2])
        else:
            text = FIELD.sub(lambda found: _read_cell(found[1], names, results), line)
            (paragraph if is_text else lines).append(text)
    end_paragraph()
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)) + "\n"


def _read_cell(field: str, names: Mapping[str, Row], results: Path) -> str:
    """Return the text of a field that is a cell."""
    parts = [part.strip() for part in field.split("|")]
    if parts[0] in names:
        row, (column, *form) = names[parts[0]], parts[1:]
    else:
        if len(parts) not in (3, 4):
            raise TemplateError(f"{field!r} has {len(parts)} parts; expected 3.")
        file, where, column, *form = parts
        row = _select_one(results, file, where)
    if column not in row:
        raise TemplateError(f"There is no column {column!r} for {{{{{field}}}}}; choose from {', '.join(row)}.")
    text = row[column]
    match form:
        case []:
            return text
        case ["mean"]:
            return re.split(r" [±\[]", text)[0]
        case ["answer"]:
            numbers = [float(number) for number in re.findall(r"[-+][\d.]+", text)]
            return decide(Estimate(*numbers))
        case ["percent"]:
            return f"{100 * float(text):.1f} %"
        case _:
            raise TemplateError(f"The format {form} of {{{{{field}}}}} is unknown.")


def _make_table(results: Path, field: str) -> list[str]:
    """Return the lines of a table of rows."""
    file, where, columns = _split(field, 3)
    titles = _read_titles(columns)
    rows = [[row[column] or NOTHING for column in titles] for row in _select(results, file, where)]
    return _format_table(file, list(titles.values()), rows)


def _make_pivot(results: Path, field: str) -> list[str]:
    """Return the lines of a table with a row and a column for each value of two columns."""
    file, where, first, second, cell = _split(field, 5)
    ((row_key, title),) = _read_titles(first).items()
    rows: dict[str, dict[str, str]] = {}
    for row in _select(results, file, where):
        cells = rows.setdefault(_join(row, row_key), {})
        column = _join(row, second)
        if column in cells:
            raise TemplateError(f"Several rows of {file} have {_join(row, row_key)!r} and {column!r}.")
        cells[column] = row[cell]
    columns = list(dict.fromkeys(column for cells in rows.values() for column in cells))
    columns = [column for column in columns if any(cells.get(column, NOTHING) != NOTHING for cells in rows.values())]
    body = [[name, *(cells.get(column) or NOTHING for column in columns)] for name, cells in rows.items()]
    return _format_table(file, [title, *columns], body)


def _join(row: Row, columns: str) -> str:
    """Return the values of several columns as one text, such as "N=1, 16 rotations"."""
    names = [name.strip() for name in columns.split("+")]
    if names == ["N", "rotations"]:
        rotated = f", {row['rotations']} rotations" if row["rotations"] != "1" else ""
        return f"N={row['N']}{rotated}"
    return ", ".join(row[name] for name in names)


def _format_table(file: str, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [list(titles), ["---"] * len(titles), *rows]
    lines = ["| " + " | ".join(row) + " |" for row in cells]
    lines[1] = "|" + "---|" * len(titles)
    return [f"<!-- from {file}.csv -->", *lines]


def _read_titles(columns: str) -> dict[str, str]:
    """Return the titles of columns by their names, from a text such as "N; mean ± deviation = F1"."""
    pairs = (column.partition(" = ") for column in columns.split(";"))
    return {name.strip(): (title or name).strip() for name, _, title in pairs}


def _select_one(results: Path, file: str, where: str) -> Row:
    rows = _select(results, file, where)
    if len(rows) != 1:
        raise TemplateError(f"{len(rows)} rows of {file}.csv have {where}; expected one.")
    return rows[0]


def _select(results: Path, file: str, where: str) -> list[Row]:
    """Return the rows of a CSV file whose columns have these values. An empty text selects all rows."""
    wanted = dict(pair.strip().split("=", 1) for pair in where.split(";") if pair.strip())
    rows = _read(results / f"{file}.csv")
    if unknown := [name for name in wanted if name not in rows[0]]:
        raise TemplateError(f"{file}.csv has no column {unknown[0]!r}; choose from {', '.join(rows[0])}.")
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


@cache
def _read(path: Path) -> list[Row]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def _split(field: str, count: int) -> list[str]:
    parts = [part.strip() for part in field.split("|")]
    if len(parts) != count:
        raise TemplateError(f"{field!r} has {len(parts)} parts; expected {count}.")
    return parts


def main() -> None:
    for template in sorted((RESULTS / "templates").glob("*.md")):
        (RESULTS / template.name).write_text(render(template.read_text(encoding="utf-8")), encoding="utf-8")
        print(RESULTS / template.name)


if __name__ == "__main__":
    main()
