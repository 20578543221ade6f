"""Figures of a study: scores by network and training data, learning curves, answers as inputs turn.

In: summaries and results, and what their run folders keep. Out: each figure as PNG and PDF. Colours are those of
Okabe and Ito, which people with any colour vision can tell apart.
"""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rotopath import runs
from rotopath.evaluation import evaluation_file
from rotopath.reports.figures import GREY, INK, save_figure
from rotopath.studies.job import SPLIT
from rotopath.studies.results import StudyResult, Summary

COLOURS = {1: "#d55e00", 4: "#56b4e9", 8: "#0072b2", 16: "#009e73"}
TURNED, OTHERS = "#e69f00", ("#cc79a7", "#000000", "#f0e442")
WHITE_TO_RED = LinearSegmentedColormap.from_list("deviation", ["#ffffff", "#d55e00", "#7f0000"])
PATCHES, FIELDS = 6, 2  # that are shown
MOST_DEVIATION = 0.3  # the red end of maps
SCORES = {"f1": "F1"}  # names of scores as people write them; others are written as they are


def colour(orientations: int, rotations: int = 1) -> str:
    if rotations > 1:
        return TURNED
    return COLOURS.get(orientations) or OTHERS[orientations % len(OTHERS)]


def draw_scores(summaries: Sequence[Summary], score: str, regimes: Mapping[float | None, str], path: Path) -> Path:
    """Scores by training data: a box from a deviation below the mean to one above, and every seed as a dot."""
    labels = list(dict.fromkeys(one.group.label for one in summaries))
    wide = max(1.3 * len(labels), 1.2 + 0.42 * len(labels) * len(regimes))  # for the legend, and for the boxes
    figure = Figure(figsize=(wide, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(labels)
    for one in summaries:
        place = list(regimes).index(one.group.regime) + (labels.index(one.group.label) - (len(labels) - 1) / 2) * width
        ink = colour(one.group.orientations, one.group.rotations)
        spread = 0.0 if np.isnan(one.deviation) else one.deviation
        bottom = one.mean.value - spread
        box = Rectangle((place - 0.4 * width, bottom), 0.8 * width, 2 * spread, facecolor=ink, alpha=0.25, linewidth=0)
        axes.add_patch(box)
        axes.plot([place - 0.4 * width, place + 0.4 * width], [one.mean.value] * 2, color=ink, linewidth=2.2)
        values = [result.score for result in one.results]
        named = one.group.label if one.group.regime == next(iter(regimes)) else None
        axes.plot([place] * len(values), values, "o", color=ink, markersize=3.5, label=named)
    axes.set_xticks(range(len(regimes)), list(regimes.values()))
    axes.set_ylabel(f"{SCORES.get(score, score)} on the test set", color=INK)
    _tidy(axes)
    axes.tick_params(axis="x", length=0)
    figure.legend(loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return _save(figure, path)


def draw_curves(results: Sequence[StudyResult], path: Path) -> Path:
    """The loss on validation windows after each epoch, a line a run."""
    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    seen = set()
    for one in results:
        n = one.recipe.orientations
        steps, losses = _validation(one.folder / runs.LOG)
        axes.plot(steps, losses, color=colour(n), linewidth=1.2, label=None if n in seen else f"N={n}")
        seen.add(n)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("steps", color=INK)
    axes.set_ylabel("validation loss", color=INK)
    _tidy(axes)
    figure.legend(loc="outside lower center", ncols=len(seen), frameon=False, fontsize=9)
    return _save(figure, path)


def draw_polar(results: Sequence[StudyResult], classes: Sequence[str], path: Path) -> Path | None:
    """Windows on which the first network scatters most, and what each network says as they turn."""
    kept = {f"N={one.recipe.orientations}": (one, _turned(one)) for one in results}
    if not kept or any(found is None or "fair" not in found for _, found in kept.values()):
        return None
    first = next(iter(kept.values()))[1]
    assert first is not None
    shown = len(first["images"])
    chosen = np.argsort(-first["fair"][:, :shown].std(axis=0), kind="stable")[:PATCHES]
    figure = Figure(figsize=(1.75 * len(chosen), 4.3), dpi=150, facecolor="white")
    for c, number in enumerate(chosen):
        left, across = c / len(chosen), 1 / len(chosen)
        image = figure.add_axes((left + 0.14 * across, 0.56, 0.72 * across, 0.36))
        image.imshow(first["images"][number])
        image.set_axis_off()
        image.set_title(_name_label(classes, int(first["labels"][number])), size=9, color=GREY)
        axes = figure.add_axes((left + 0.08 * across, 0.11, 0.84 * across, 0.42), projection="polar")
        for name, (one, found) in kept.items():
            assert found is not None
            angles = np.deg2rad([*found["fair_degrees"], found["fair_degrees"][0]])
            values = [*found["fair"][:, number], found["fair"][0, number]]
            label = name if c == 0 else None
            axes.plot(angles, values, color=colour(one.recipe.orientations), linewidth=1.5, label=label)
        axes.set(ylim=(0, 1), yticks=[0.5, 1.0], xticks=[])
        axes.set_yticklabels([])
    figure.legend(loc="lower center", ncols=len(kept), frameon=False, fontsize=9)
    return _save(figure, path)


def _name_label(classes: Sequence[str], label: int) -> str:
    return classes[label] if label < len(classes) else ""


def draw_maps(results: Sequence[StudyResult], path: Path) -> Path | None:
    """Borders of objects, or objects, as images rotate, re-aligned: the mean of all angles, the deviation in red."""
    kept = [(one, _turned(one)) for one in results]
    if not kept or any(found is None or "objects_mean" not in found for _, found in kept):
        return None
    shown = "borders" if all(found and "borders_mean" in found for _, found in kept) else "objects"
    rows = 2 * FIELDS
    figure = Figure(figsize=(2.0 * (len(kept) + 1), 2.0 * rows + 0.3), dpi=100, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, len(kept) + 1, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for k, (one, found) in enumerate(kept):
        assert found is not None
        for f in range(min(FIELDS, len(found["images"]))):
            if k == 0:
                grid[2 * f, 0].imshow(found["images"][f])
            mean, deviation = (found[f"{shown}_{name}"][f].astype(np.float32) for name in ("mean", "deviation"))
            grid[2 * f, k + 1].imshow(mean, cmap="gray_r", vmin=0, vmax=1)
            grid[2 * f + 1, k + 1].imshow(deviation, cmap=WHITE_TO_RED, vmin=0, vmax=MOST_DEVIATION)
        grid[0, k + 1].set_title(f"N={one.recipe.orientations}", size=10, color=INK)
    for f in range(FIELDS):
        grid[2 * f + 1, 0].text(
            *(0.98, 0.5), "above: mean over angles\nhere: deviation", ha="right", va="center", size=8, color=GREY
        )
    return _save(figure, path)


def _turned(result: StudyResult) -> Mapping[str, NDArray[Any]] | None:
    """The answers to turned inputs that a run folder keeps, if it does."""
    path = evaluation_file(result.folder, SPLIT).with_suffix(".npz")
    if not path.exists():
        return None
    with np.load(path, allow_pickle=False) as kept:
        return dict(kept)


def _validation(log: Path) -> tuple[list[int], list[float]]:
    with log.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["validation_loss"]]
    return [int(row["step"]) for row in rows], [float(row["validation_loss"]) for row in rows]


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GREY)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _save(figure: Figure, path: Path) -> Path:
    """As PDF for papers, and as PNG for the page; gives the latter."""
    save_figure(figure, path.with_suffix(".pdf"))
    return save_figure(figure, path.with_suffix(".png"))
