"""Figures that set networks side by side: detections on a field, and predictions as the input turns.

In: an image with its mitoses, detections, answers at several angles. Out: PNG files.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from numpy.typing import NDArray

from rotopath.evaluation import Turned
from rotopath.reports.figures import GREY, INK, save_figure

HIT, FALSE, TRUTH = "#16a34a", "#dc2626", "#facc15"
COLOURS = ("#dc2626", "#2563eb")  # of networks, in their order


def draw_detections(
    image: NDArray[np.uint8],
    truth: NDArray[np.float64],
    found: Mapping[str, NDArray[np.float64]],
    radius_px: float,
    path: Path,
) -> Path:
    """A field beside itself, once for each network: mitoses, and what the network took for one."""
    figure = Figure(figsize=(5.2 * len(found), 5.6), dpi=110, facecolor="white")
    for k, (name, places) in enumerate(found.items()):
        axes = figure.add_axes((k / len(found) + 0.005, 0.01, 0.99 / len(found), 0.91))
        axes.imshow(image)
        for row, column in truth:
            axes.add_patch(Circle((column, row), radius_px, fill=False, color=TRUTH, linewidth=1.6))
        near = (
            np.hypot(*(places[:, None] - truth[None]).transpose(2, 0, 1)).reshape(len(places), len(truth)) <= radius_px
        )
        for (row, column), hit in zip(places, near.any(axis=1), strict=True):
            axes.plot(column, row, "+", color=HIT if hit else FALSE, markersize=13, markeredgewidth=2.4)
        # Marks would move the limits, and the same field would be drawn at two scales.
        axes.set(xlim=(-0.5, image.shape[1] - 0.5), ylim=(image.shape[0] - 0.5, -0.5))
        axes.set_axis_off()
        axes.set_title(f"{name}: {int(near.any(axis=0).sum())} of {len(truth)} found", size=12, color=INK)
    return save_figure(figure, path)


def draw_polar(turned: Mapping[str, Turned], inputs: Sequence[int], path: Path) -> Path:
    """Predictions (radius, 0 to 1) of the same windows at all angles: a network that does not care draws a circle."""
    across = len(inputs)
    figure = Figure(figsize=(2.1 * across, 2.9), dpi=110, facecolor="white")
    for c, number in enumerate(inputs):
        axes = figure.add_axes((c / across + 0.015, 0.2, 0.97 / across - 0.02, 0.62), projection="polar")
        for (name, one), colour in zip(turned.items(), COLOURS, strict=False):
            angles = np.deg2rad([*one.fair_degrees, one.fair_degrees[0]])
            values = [*one.fair[:, number], one.fair[0, number]]
            axes.plot(angles, values, color=colour, linewidth=1.6, label=name if c == 0 else None)
        axes.set(ylim=(0, 1), yticks=[0.5, 1.0], xticks=[])
        axes.set_yticklabels([])
        label = next(iter(turned.values())).labels[number]
        axes.set_title("mitosis" if label else "no mitosis", size=9, color=GREY, pad=4)
    figure.legend(loc="lower center", ncols=len(turned), frameon=False, fontsize=9)
    return save_figure(figure, path)
