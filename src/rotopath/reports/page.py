"""A report as one HTML file, with its figures inside, that opens anywhere.

In: headings, paragraphs, tables and pictures. Out: the page.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rotopath.runs import write_text

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #111827; max-width: 1080px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; } p { max-width: 46rem; }
table { border-collapse: collapse; margin: 1rem 0; } th, td { padding: .3rem .9rem; text-align: right; }
th:first-child, td:first-child { text-align: left; padding-left: 0; } thead th { border-bottom: 1px solid #9ca3af; }
img { max-width: 100%; } footer { color: #4b5563; font-size: .85rem; margin-top: 3rem; }
"""


@dataclass(frozen=True)
class Section:
    """A part of the page: text, and perhaps a table (its first row is the head) or a picture."""

    title: str
    text: str
    table: Sequence[Sequence[str]] = ()
    picture: Path | None = None


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
    parts = [f"<h2>{escape(section.title)}</h2>", f"<p>{escape(section.text)}</p>"]
    if section.table:
        head, *rows = section.table
        cells = "".join(f"<th>{escape(cell)}</th>" for cell in head)
        lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
        parts.append(f"<table><thead><tr>{cells}</tr></thead><tbody>{lines}</tbody></table>")
    if section.picture is not None:
        data = base64.b64encode(section.picture.read_bytes()).decode()
        parts.append(f'<img alt="{escape(section.title)}" src="data:image/png;base64,{data}">')
    return "\n".join(parts)
