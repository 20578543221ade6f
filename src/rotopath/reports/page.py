"""A report as one HTML file, with its figures inside, that opens anywhere.

In: headings, paragraphs, tables and pictures. Out: the page.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from PIL import Image

from rotopath.writing import write_text

CSS_PX_PER_INCH = 96
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 46rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .3rem .6rem; text-align: right; white-space: nowrap; }
tbody tr:nth-child(even) { background: #f9fafb; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border-bottom: 1px solid #9ca3af; }
img { max-width: 100%; height: auto; } footer { color: #4b5563; font-size: .85rem; margin-top: 3rem; }
details { margin: 1rem 0; } summary { cursor: pointer; } pre { background: #f9fafb; padding: 1rem; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: text, and perhaps a table (its first row is the head), a picture, or text to unfold.

    Without a title it goes on with the one before.
    """

    title: str
    text: str
    table: Sequence[Sequence[str]] = ()
    picture: Path | None = None
    details: str = ""


def write_page(path: Path, title: str, lead: str, sections: Sequence[Section], footer: str) -> Path:
    """Write the page, whole or not at all; gives the path back."""
    body = "\n".join(_section(section) for section in sections)
    text = f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{escape(title)}</title>
<style>{STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{escape(lead)}</p>
{body}
<footer>{escape(footer)}</footer>
</body>
</html>
"""
    write_text(path, text)
    return path


def _section(section: Section) -> str:
    parts = [f"<h2>{escape(section.title)}</h2>"] if section.title else []
    parts.append(f"<p>{escape(section.text)}</p>")
    if section.table:
        head, *rows = section.table
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        table = f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>"
        parts.append(f'<div class="scroll">{table}</div>')
    if section.picture is not None:
        data = base64.b64encode(section.picture.read_bytes()).decode()
        with Image.open(section.picture) as image:
            width = round(image.width * CSS_PX_PER_INCH / image.info.get("dpi", (CSS_PX_PER_INCH,))[0])
        parts.append(f'<img alt="{escape(section.title)}" width="{width}" src="data:image/png;base64,{data}">')
    if section.details:
        parts.append(f"<details><summary>The recipe</summary><pre>{escape(section.details)}</pre></details>")
    return "\n".join(parts)
