"""Draw docs/speed-HARDWARE.png from the results of step.py, inference.py, scaling.py and library.py on one machine.

.venv/bin/python benchmarks/plot.py [nvidia-h200-torch2.11.0]

The argument is the hardware and the torch version, as in the names of the files in results/. The default is the CPU of
this machine.
"""

import csv
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from record import RESULTS, hardware

MAX_COLUMNS = 3  # of panels
DOCS = RESULTS.parent / "docs"
OURS, OTHERS, LIGHT = "#c0392b", "#95a5a6", "#ced6d8"
Rows = list[dict[str, str]]


def read(name: str, machine: str) -> Rows:
    """Return the rows of the CSV of a benchmark. If it does not exist, print a message and return no rows."""
    path = RESULTS / f"{name}-{machine}.csv"
    if not path.exists():
        print(f"{path.name} does not exist, so it is left out; run benchmarks/{name}.py to create it.")
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def draw_bars(axes: Any, rows: Rows, title: str) -> None:
    """Draw one bar for each network, the fastest on top.

    Only rows with the batch size, image size and precision of the first row are drawn.
    """
    first = [
        row for row in rows if all(row[key] == rows[0][key] for key in ("batch", "image", "precision") if key in row)
    ]
    first.sort(key=lambda row: -float(row["ms"]))
    colors = [OURS if row["what"].startswith("rotopath") else OTHERS for row in first]
    bars = axes.barh([row["what"] for row in first], [float(row["ms"]) for row in first], color=colors)
    axes.bar_label(bars, [f" {row['ms']}" for row in first])
    axes.set(title=title, xlabel="ms")
    axes.margins(x=0.15)


def draw_orientations(axes: Any, rows: Rows) -> None:
    """Draw the time of a step over the number of orientations, for rotopath and for the plain CNN."""
    for what, style in (("N, equal weights", "-"), ("N, equal channels", "--")):
        selected = [row for row in rows if row["what grows"] == what]
        for name, color in (("rotopath", OURS), ("plain", OTHERS)):
            label = f"{name}{what.removeprefix('N')}"
            milliseconds = [float(row[f"step, {name} ms"]) for row in selected]
            axes.plot([int(row["N"]) for row in selected], milliseconds, style, color=color, marker="o", label=label)
    orientations = sorted({int(row["N"]) for row in rows})
    axes.set(title="step, by orientations", xlabel="N", ylabel="ms", ylim=(0, None), xticks=orientations)
    axes.legend(frameon=False)


def draw_library(axes: Any, rows: Rows, mode: str) -> None:
    """Draw the time of each network of the library, compared with the plain CNN, for our layers and other libraries."""
    networks = list(dict.fromkeys(row["network"] for row in rows))
    names = {"rotopath": OURS, "escnn": OTHERS, "e2cnn": LIGHT}
    ratios = {(row["network"], row["what"]): float(row["× plain CNN"]) for row in rows if row["mode"] == mode}
    for i, (name, color) in enumerate(names.items()):
        measured = [(j, ratios[network, name]) for j, network in enumerate(networks) if (network, name) in ratios]
        bars = axes.bar(
            [j + 0.27 * (i - 1) for j, _ in measured], [y for _, y in measured], 0.25, color=color, label=name
        )
        axes.bar_label(bars, fmt="%.2f")
    axes.axhline(1, color="black", linewidth=1)
    axes.set(title=f"networks of the library, {mode}", ylabel="× plain CNN", xticks=range(len(networks)))
    axes.set_xticklabels(networks)
    axes.margins(y=0.15)
    axes.legend(frameon=False)


def main(machine: str = f"{hardware()}-torch{torch.__version__.partition('+')[0]}") -> None:
    names = ("step", "inference", "scaling", "library")
    step, inference, scaling, library = tables = [read(name, machine) for name in names]
    count = sum(map(bool, tables)) + bool(library)  # the library has a panel for steps and one for inference
    if not count:
        raise SystemExit(
            f"results/ has no measurements of {machine}; run the benchmarks first, or name another machine."
        )
    rows, columns = -(-count // MAX_COLUMNS), min(count, MAX_COLUMNS)
    size = (16 / 3 * columns + 1, 4.5 * rows)
    figure, grid = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for panel in grid.flat[count:]:
        panel.remove()
    axes = iter(grid.flat[:count])
    if step:
        draw_bars(next(axes), step, f"step, batch of {step[0]['batch']}, {step[0]['precision']}")
    if inference:
        draw_bars(next(axes), inference, f"inference, {inference[0]['image']}, {inference[0]['precision']}")
    if scaling:
        draw_orientations(next(axes), scaling)
    if library:
        draw_library(next(axes), library, "eager")
        draw_library(next(axes), library, "inference")
    for panel in grid.flat[:count]:
        panel.spines[["top", "right"]].set_visible(False)
    path: Path = DOCS / f"speed-{machine.partition('-torch')[0]}.png"
    figure.savefig(path, dpi=100)
    print(path.relative_to(DOCS.parent))


if __name__ == "__main__":
    main(*sys.argv[1:])
