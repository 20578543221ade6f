"""A contact sheet: some images of every split of a data set, with their annotations drawn in.

In: a dataset and a file name. Out: a figure, three rows of tiles at the model's spacing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from numpy.typing import NDArray

from rotopath.data.annotations import read_objects, read_points
from rotopath.data.dataset import Annotated, DataError, Dataset, Sample, read_image
from rotopath.data.splits import SPLITS
from rotopath.reports.figures import GREY, INK, save_figure
from rotopath.tasks import Example
from rotopath.tasks.detect import HIT_UM

Tile = Callable[[Axes], None]  # draws one
ACROSS = 6
CAPTION_LETTERS = 36
TILE_PX: Mapping[Annotated, int] = {"points": 192, "objects": 192, "labels": 96}
FINEST_UM_PX: Mapping[Annotated, float] = {"points": 0.25, "objects": 0.25, "labels": 1.0}  # of tiles
TILE_INCHES = 2.0
CENTRE_PX = 32  # the middle of a PCam patch, which its label speaks of
LEGENDS: Mapping[Annotated, str] = {
    "points": "circles: {objects}, with the " + f"{HIT_UM:g} µm within which a detection counts as a hit",
    "objects": "outlines: {objects}",
    "labels": "each with its class; squares: the part of a PCam patch that its label speaks of",
}
MARK = "#facc15"  # yellow: no stain has it
CLASS_MARKS = (MARK, "#22d3ee", "#a3e635", "#fb7185", "#f97316", "#c084fc", "#ffffff", "#000000")  # in turn


def draw_contact_sheet(dataset: Dataset, path: Path, seed: int = 0) -> Path:
    """Draw the figure into a file, whole or not at all; gives the path back."""
    rows = [(split, chosen) for split in SPLITS if (chosen := _choose(dataset, split, seed))]
    if not rows:
        raise DataError(f"{dataset.root} has no images to show; run `rotopath data check` on it.")
    spacing, marks = _choose_spacing(dataset), Marks()
    tiles = [
        (split, [partial(_draw_tile, dataset, sample, spacing, marks) for sample in chosen]) for split, chosen in rows
    ]
    legend = f"{_legend(dataset)}; tiles of up to {TILE_PX[dataset.annotated]} px at {spacing:g} µm/px"
    return _draw_sheet(f"{dataset.source}: {dataset.annotated}", legend, tiles, marks, path)


def draw_examples(dataset: Dataset, examples: Sequence[Example], spacing: float, path: Path) -> Path:
    """Draw the worst of a run's hard examples, each with how sure the baseline was of the wrong answer."""
    samples = {sample.name: sample for sample in dataset.samples}
    rows, marks = [], Marks()
    for first in range(0, min(len(examples), 3 * ACROSS), ACROSS):
        chosen = examples[first : first + ACROSS]
        tiles = []
        for example in chosen:
            middle = np.array([example.row, example.column], float) if dataset.annotated == "points" else None
            note = f"{example.score:.2f}, "
            sample = samples[example.image]
            tiles.append(partial(_draw_tile, dataset, sample, spacing, marks, middle=middle, note=note))
        rows.append((f"{first + 1} to {first + len(chosen)}", tiles))
    legend = f"the worst of {len(examples)}, with the baseline's error; {_legend(dataset)}"
    return _draw_sheet(f"{dataset.source}: hard examples", legend, rows, marks, path)


def _legend(dataset: Dataset) -> str:
    return LEGENDS[dataset.annotated].format(objects=dataset.objects)


def _choose_spacing(dataset: Dataset) -> float:
    """The finest spacing of the images, but no finer than a tile shows well."""
    finest = min(sample.spacing_um_px for sample in dataset.samples)
    return max(finest, FINEST_UM_PX[dataset.annotated])


class Marks(dict[str, str]):
    """The colour of each class, in the order in which they are met; no class has the usual one."""

    def of(self, name: str) -> str:
        return self.setdefault(name, CLASS_MARKS[len(self) % len(CLASS_MARKS)]) if name else CLASS_MARKS[0]


def _draw_sheet(title: str, legend: str, rows: Sequence[tuple[str, Sequence[Tile]]], marks: Marks, path: Path) -> Path:
    height = 0.75 + len(rows) * (TILE_INCHES + 0.45)
    figure = Figure(figsize=(ACROSS * (TILE_INCHES + 0.1) + 0.2, height), dpi=150, facecolor="white")
    figure.text(0.01, 1 - 0.28 / height, title, size=13, color=INK, weight="bold")
    figure.text(0.01, 1 - 0.5 / height, legend, size=8, color=GREY)
    for r, (name, tiles) in enumerate(rows):
        top = 1 - (0.75 + r * (TILE_INCHES + 0.45)) / height
        figure.text(0.01, top - 0.1 / height, name, size=9, color=INK, weight="bold")
        for c, draw in enumerate(tiles):
            left, bottom = 0.01 + c * 0.99 / ACROSS, top - (0.2 + TILE_INCHES) / height
            draw(figure.add_axes((left, bottom, 0.97 / ACROSS, TILE_INCHES / height)))
    across, row = 0.99, 0.0
    for name, color in sorted(marks.items(), reverse=True):
        width = (0.09 * len(name) + 0.25) / figure.get_figwidth()  # about that of the letters
        if across - width < 0.35:  # where the title is
            across, row = 0.99, row + 0.24
        ink = INK if sum(to_rgb(color)) > 1 else "white"
        box = {"facecolor": color, "edgecolor": GREY, "linewidth": 0.5, "pad": 2}
        figure.text(
            *(across, 1 - (0.22 + row) / height), name, size=8, color=ink, ha="right", bbox=box, parse_math=False
        )
        across -= width
    return save_figure(figure, path)


def _choose(dataset: Dataset, split: str, seed: int) -> list[Sample]:
    """A handful of samples: of as many cases, or classes, as there are, and rather with objects than without."""
    samples = [sample for sample in dataset.samples if sample.split == split]
    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    seen: Counter[str | None] = Counter()
    ranks: dict[Sample, tuple[int, bool]] = {}
    for sample in shuffled:
        kind = sample.label if dataset.annotated == "labels" else sample.case
        ranks[sample] = (seen[kind], not sample.annotations)
        seen[kind] += 1
    return sorted(shuffled, key=ranks.__getitem__)[:ACROSS]


def _draw_tile(
    dataset: Dataset,
    sample: Sample,
    spacing_um_px: float,
    marks: Marks,
    axes: Axes,
    middle: NDArray[np.float64] | None = None,
    note: str = "",
) -> None:
    """A sample about its first object, or about a given place, with all its annotations."""
    image = read_image(sample, spacing_um_px)
    points = read_points(sample, spacing_um_px) if dataset.annotated == "points" else None
    if middle is None:
        middle = points.positions[0] if points else (np.array(image.shape[:2]) - 1) / 2
    top, left, size = _tile(image.shape[:2], middle, TILE_PX[dataset.annotated])
    axes.imshow(image, interpolation="lanczos")
    for (row, column), name in zip(points.positions, points.classes, strict=True) if points else ():
        radius = HIT_UM / spacing_um_px
        axes.add_patch(Circle((column, row), radius, fill=False, color=marks.of(name), linewidth=1.2))
    if dataset.annotated == "objects":
        objects = read_objects(sample, spacing_um_px)
        labels = objects.labels[top : top + size, left : left + size]
        for number in np.unique(labels[labels > 0]):
            ink = marks.of(objects.classes.get(int(number), ""))
            outlined = np.pad(labels == number, 1)
            edges = np.arange(-1, outlined.shape[0] - 1) + top, np.arange(-1, outlined.shape[1] - 1) + left
            axes.contour(edges[1], edges[0], outlined, levels=[0.5], colors=ink, linewidths=0.9)
    if dataset.source.startswith("PCam"):
        x, y = (np.array([image.shape[1], image.shape[0]]) - CENTRE_PX) / 2 - 0.5
        axes.add_patch(Rectangle((x, y), CENTRE_PX, CENTRE_PX, fill=False, color=MARK, linewidth=1.0))
    axes.set(xlim=(left - 0.5, left + size - 0.5), ylim=(top + size - 0.5, top - 0.5), xticks=[], yticks=[])
    axes.set_frame_on(False)
    axes.set_xlabel(note + _caption(sample), size=6, color=GREY, labelpad=2, parse_math=False)


def _tile(shape: tuple[int, ...], middle: NDArray[np.float64], size: int) -> tuple[int, int, int]:
    """Upper left corner and side of a square about the middle that lies inside of the image."""
    size = min(size, *shape)
    top, left = (int(np.clip(m - size / 2, 0, side - size)) for m, side in zip(middle, shape, strict=True))
    return top, left, size


def _caption(sample: Sample) -> str:
    """The class, and as much of the name's end as fits under a tile."""
    name = "/".join(sample.name.removeprefix("camelyonpatch_level_2_split_").split("/")[-2:])
    if len(name) > CAPTION_LETTERS:
        name = name.rpartition("/")[2][-CAPTION_LETTERS:]
    return name if sample.label is None else f"{sample.label}, {name}"
