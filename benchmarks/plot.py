"""Draws docs/speed-HARDWARE.png from what step.py, inference.py and scaling.py have recorded on this machine.

.venv/bin/python benchmarks/plot.py [cuda]
"""

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from record import RESULTS, hardware

DOCS = RESULTS.parent / "docs"
OURS, OTHERS = "#c0392b", "#95a5a6"
Rows = list[dict[str, str]]


def read(name: str, device: str) -> Rows:
    path = RESULTS / f"{name}-{hardware(device)}-torch{torch.__version__.partition('+')[0]}.csv"
    if not path.exists():
        raise SystemExit(f"{path.name} is not there: run benchmarks/{name}.py first.")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_bars(axes: Any, rows: Rows, title: str) -> None:
    """One bar for each contender of the first batch and precision, the fastest on top."""
    first = [
        row for row in rows if all(row[key] == rows[0][key] for key in ("batch", "image", "precision") if key in row)
    ]
    first.sort(key=lambda row: -float(row["ms"]))
    colours = [OURS if row["what"].startswith("rotopath") else OTHERS for row in first]
    bars = axes.barh([row["what"] for row in first], [float(row["ms"]) for row in first], color=colours)
    axes.bar_label(bars, [f" {row['ms']}" for row in first])
    axes.set(title=title, xlabel="ms")
    axes.margins(x=0.15)


def draw_orientations(axes: Any, rows: Rows) -> None:
    for what, style in (("N, equal weights", "-"), ("N, equal channels", "--")):
        found = [row for row in rows if row["what grows"] == what]
        for name, colour in (("rotopath", OURS), ("plain", OTHERS)):
            label = f"{name}{what.removeprefix('N')}"
            milliseconds = [float(row[f"step, {name} ms"]) for row in found]
            axes.plot([int(row["N"]) for row in found], milliseconds, style, color=colour, marker="o", label=label)
    axes.set(title="step, by orientations", xlabel="N", ylabel="ms", ylim=(0, None))
    axes.legend(frameon=False)


def main(device: str = "cpu") -> None:
    step, inference, scaling = (read(name, device) for name in ("step", "inference", "scaling"))
    figure, axes = plt.subplots(1, 3, figsize=(16, 4), layout="constrained")
    draw_bars(axes[0], step, f"step, batch of {step[0]['batch']}, {step[0]['precision']}")
    draw_bars(axes[1], inference, f"inference, {inference[0]['image']}, {inference[0]['precision']}")
    draw_orientations(axes[2], scaling)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    path: Path = DOCS / f"speed-{hardware(device)}.png"
    figure.savefig(path, dpi=100)
    print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main(*sys.argv[1:])
