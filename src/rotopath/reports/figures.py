"""What all figures share: their colours, and how they reach the disk."""

import warnings
from pathlib import Path

from matplotlib.figure import Figure

INK, GREY = "#111827", "#4b5563"


def save_figure(figure: Figure, path: Path) -> Path:
    """Write a figure, whole or not at all, into a folder that is made if need be; gives the path back."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing from font")  # a name in another script: boxes will do
            figure.savefig(unfinished, format=path.suffix.removeprefix("."))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path
