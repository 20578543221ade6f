"""Draw the figures of a study: scores, learning curves, and predictions for rotated inputs.

Every figure is written as PNG and as PDF. The colors are the palette of Okabe and Ito, which people with any color
vision can distinguish. N is the number of orientations of a network. An amount of training data is called a *regime*.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from rotopath import runs
from rotopath.data.dataset import read_table
from rotopath.model_file import RunError
from rotopath.reports.figures import GRAY, INK, save_figure
from rotopath.studies.results import StudyResult, Summary

COLORS = {1: "#d55e00", 4: "#56b4e9", 8: "#0072b2", 16: "#009e73"}  # by number of orientations
TTA_COLOR, OTHER_COLORS = "#e69f00", ("#cc79a7", "#000000", "#f0e442")
WHITE_TO_RED = LinearSegmentedColormap.from_list("deviation", ["#ffffff", "#e31a1c", "#7f0000"])
WINDOWS_SHOWN, FIELDS_SHOWN = 6, 2  # numbers of windows and of fields (annotated images) in the figures
MAX_STEP = 10**12  # largest number of a step in a log
MAX_DEVIATION = 0.3  # standard deviation at the red end of the color scale
DARKEST = 0.6  # how much a mean of 1 darkens a map with mean and deviation; less than 1, so that red remains visible
SCORE_LABELS = {"f1": "F1"}  # labels of scores in figures, where they differ from the names


def draw_scores(summaries: Sequence[Summary], score: str, regimes: Mapping[float | None, str], path: Path) -> Path:
    """Draw the scores of each network for each regime, and return the path of the PNG file.

    A line is the mean over seeds, a box extends one standard deviation above and below the mean, and each seed is a
    dot. `score` is the name of the score. `regimes` maps each regime (None: all training data) to its label below the
    x axis, in the order of the axis.
    """
    labels = list(dict.fromkeys(summary.condition.label for summary in summaries))
    inches = max(1.3 * len(labels), 1.2 + 0.42 * len(labels) * len(regimes))  # wide enough for legend and boxes
    figure = Figure(figsize=(inches, 4.0), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(labels)
    for summary in summaries:
        condition = summary.condition
        x = list(regimes).index(condition.regime) + (labels.index(condition.label) - (len(labels) - 1) / 2) * width
        left, right = x - 0.4 * width, x + 0.4 * width
        color = _color_of(condition.orientations, condition.rotations)
        mean, deviation = summary.mean.value, 0.0 if np.isnan(summary.deviation) else summary.deviation
        box = Rectangle((left, mean - deviation), right - left, 2 * deviation, facecolor=color, alpha=0.25, linewidth=0)
        axes.add_patch(box)
        axes.plot([left, right], [mean, mean], color=color, linewidth=2.2)
        scores = [result.score for result in summary.results]
        label = condition.label if condition.regime == next(iter(regimes)) else None
        axes.plot([x] * len(scores), scores, "o", color=color, markersize=3.5, label=label)
    axes.set_xticks(range(len(regimes)), list(regimes.values()))
    axes.set_ylabel(f"{SCORE_LABELS.get(score, score)} on the test set", color=INK)
    _style(axes)
    axes.tick_params(axis="x", length=0)
    figure.legend(loc="outside lower center", ncols=len(labels), frameon=False, fontsize=9)
    return _save_as_pdf_and_png(figure, path)


def draw_curves(results: Sequence[StudyResult], path: Path) -> Path:
    """Draw the validation loss over the training steps, with a line for each run. Return the path of the PNG file."""
    figure = Figure(figsize=(6.4, 3.6), dpi=150, layout="constrained")
    axes = figure.add_subplot()
    in_legend = set()
    for result in results:
        n = result.recipe.orientations
        steps, losses = _read_validation_losses(result.folder / runs.LOG)
        axes.plot(steps, losses, color=_color_of(n), linewidth=1.2, label=None if n in in_legend else f"N={n}")
        in_legend.add(n)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.set_xlabel("steps", color=INK)
    axes.set_ylabel("validation loss", color=INK)
    _style(axes)
    figure.legend(loc="outside lower center", ncols=len(in_legend), frameon=False, fontsize=9)
    return _save_as_pdf_and_png(figure, path)


def draw_rotated_windows(results: Sequence[StudyResult], classes: Sequence[str], path: Path) -> Path | None:
    """Draw up to WINDOWS_SHOWN windows, and below each window a polar plot of its predictions at all angles.

    In a polar plot, the angle is the rotation of the window, and the radius is the predicted probability. `results`
    contains one result for each network, smallest N first. Only windows whose pixels were saved can be drawn; which of
    them are drawn does not depend on any prediction (`choose_windows`). `classes[i]` is the class name of windows with
    the label i. Returns the path of the PNG file. Returns None if a network has no predictions for rotated windows, or
    if `results` is empty.
    """
    predictions = _read_all_rotated(results, "fair")
    if predictions is None:
        return None
    first = predictions[0][1]
    windows = choose_windows(first["labels"][: len(first["images"])])
    figure = Figure(figsize=(1.75 * len(windows), 4.3), dpi=150, facecolor="white")
    for c, window in enumerate(windows):
        left, width = c / len(windows), 1 / len(windows)
        image = figure.add_axes((left + 0.14 * width, 0.56, 0.72 * width, 0.36))
        image.imshow(first["images"][window])
        image.set_axis_off()
        label = int(first["labels"][window])
        image.set_title(classes[label] if label < len(classes) else "", size=9, color=GRAY)
        axes = figure.add_axes((left + 0.08 * width, 0.11, 0.84 * width, 0.42), projection="polar")
        for n, rotated in predictions:
            angles = np.deg2rad([*rotated["fair_degrees"], rotated["fair_degrees"][0]])
            probabilities = [*rotated["fair"][:, window], rotated["fair"][0, window]]
            axes.plot(angles, probabilities, color=_color_of(n), linewidth=1.5, label=f"N={n}" if c == 0 else None)
        axes.set(ylim=(0, 1), yticks=[0.5, 1.0], xticks=[])
        axes.set_yticklabels([])
    figure.legend(loc="lower center", ncols=len(predictions), frameon=False, fontsize=9)
    return _save_as_pdf_and_png(figure, path)


def choose_windows(labels: NDArray[np.integer]) -> list[int]:
    """Return the indices of up to WINDOWS_SHOWN windows: of each label in turn, the first one that is not chosen yet.

    `labels` contains the label of each window. The highest label, such as a tumor or a mitosis, is first if a task has
    two labels.
    """
    waiting = [np.flatnonzero(labels == label).tolist() for label in np.unique(labels)[::-1]]
    chosen: list[int] = []
    while len(chosen) < min(WINDOWS_SHOWN, len(labels)):
        for indices in waiting:
            if indices and len(chosen) < WINDOWS_SHOWN:
                chosen.append(indices.pop(0))
    return chosen


def draw_maps(results: Sequence[StudyResult], path: Path) -> Path | None:
    """Draw how much the predicted maps of fields (annotated images) change when the fields are rotated.

    `results` contains one result for each network. Each field was rotated by many angles and predicted, and the maps
    were rotated back. The figure shows the central squares of the first FIELDS_SHOWN fields, in three rows for each
    field. The first row contains the image and, for each network, the mean map over angles (gray) with the standard
    deviation over angles (white to red) in the same map, as the paper draws them (`blend_maps`). The next two rows
    contain the mean and the standard deviation alone. The maps contain probabilities of object borders, or of objects
    if the task has no borders. Returns the path of the PNG file. Returns None if a network has no predictions for
    rotated fields, or if `results` is empty.
    """
    predictions = _read_all_rotated(results, "objects_mean")
    if predictions is None:
        return None
    shown = "borders" if all("borders_mean" in rotated for _, rotated in predictions) else "objects"
    rows, columns = 3 * FIELDS_SHOWN, len(predictions) + 1
    figure = Figure(figsize=(2.0 * columns, 2.0 * rows + 0.3), dpi=100, layout="constrained", facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for f, image in enumerate(predictions[0][1]["images"][:FIELDS_SHOWN]):
        grid[3 * f, 0].imshow(image)
    for k, (n, rotated) in enumerate(predictions, 1):
        for f in range(min(FIELDS_SHOWN, len(rotated["images"]))):
            mean, deviation = (rotated[f"{shown}_{name}"][f].astype(np.float32) for name in ("mean", "deviation"))
            grid[3 * f, k].imshow(blend_maps(mean, deviation))
            grid[3 * f + 1, k].imshow(mean, cmap="gray_r", vmin=0, vmax=1)
            grid[3 * f + 2, k].imshow(deviation, cmap=WHITE_TO_RED, vmin=0, vmax=MAX_DEVIATION)
        grid[0, k].set_title(f"N={n}", size=10, color=INK)
    for f in range(FIELDS_SHOWN):
        for row, text in enumerate(("mean over angles", "standard deviation"), 1):
            grid[3 * f + row, 0].text(0.98, 0.5, text, ha="right", va="center", size=8, color=GRAY)
        grid[3 * f + 1, 0].text(0.98, 0.97, "above: both in one map", ha="right", va="top", size=8, color=GRAY)
    return _save_as_pdf_and_png(figure, path)


def blend_maps(mean: NDArray[np.floating], deviation: NDArray[np.floating]) -> NDArray[np.float64]:
    """Return a color image (h, w, 3) of a mean map (white to gray) and a map of standard deviations (white to red).

    The two colors are multiplied: a pixel that is always predicted is gray, and one that changes with the angle is red.
    """
    red = np.asarray(WHITE_TO_RED(np.clip(deviation / MAX_DEVIATION, 0, 1)), np.float64)[..., :3]
    colors: NDArray[np.float64] = red * (1 - DARKEST * np.clip(mean, 0, 1)[..., None])
    return colors


def _read_all_rotated(results: Sequence[StudyResult], key: str) -> list[tuple[int, Mapping[str, NDArray[Any]]]] | None:
    """Read the predictions for rotated inputs of each network. `results` contains one result for each network.

    Returns a pair for each network: its N, and its arrays by name. Returns None if the file of a result does not exist
    or does not contain the array `key`, or if there are no results.
    """
    predictions: dict[int, Mapping[str, NDArray[Any]]] = {}
    for result in results:
        arrays = result.read_rotated()
        if key not in arrays:
            return None
        predictions[result.recipe.orientations] = arrays
    return list(predictions.items()) or None


def _read_validation_losses(log: Path) -> tuple[list[int], list[float]]:
    """Return two lists with a number for each epoch in a training log: the last step, and the validation loss."""
    rows = [row for _, row in read_table(log, ("step", "validation_loss")) if row["validation_loss"]]
    try:
        steps, losses = [int(row["step"]) for row in rows], [float(row["validation_loss"]) for row in rows]
        if not np.isfinite(losses).all() or any(not 0 <= step <= MAX_STEP for step in steps):
            raise ValueError("a number is negative, too large or not finite")
    except ValueError as error:
        raise RunError(f"{log} is damaged ({error}). Restore the file from a copy, or train again.") from None
    return steps, losses


def _color_of(orientations: int, rotations: int = 1) -> str:
    """Return the color for networks with this number of orientations.

    `rotations` above 1 means test-time augmentation. The color is then the same for all numbers of orientations.
    """
    if rotations > 1:
        return TTA_COLOR
    return COLORS.get(orientations) or OTHER_COLORS[orientations % len(OTHER_COLORS)]


def _style(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=GRAY)
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)


def _save_as_pdf_and_png(figure: Figure, path: Path) -> Path:
    """Write a figure as PDF for papers and as PNG for the HTML report, and return the path of the PNG file."""
    save_figure(figure, path.with_suffix(".pdf"))
    return save_figure(figure, path.with_suffix(".png"))
