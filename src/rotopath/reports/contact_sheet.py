"""A contact sheet: some images of every split of a data set, with their annotations drawn in.

In: a collection and a file name. Out: a figure, three rows of tiles at the model's spacing.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from numpy.typing import NDArray

from rotopath.data.annotations import read_nuclei, read_points
from rotopath.data.collection import MODEL_SPACING_UM_PX, Collection, DataError, Picture, read_image
from rotopath.data.pcam import CLASSES
from rotopath.data.sampling import NEGATIVE_BEYOND_PX
from rotopath.data.splits import SPLITS
from rotopath.reports.figures import GREY, INK, save_figure
from rotopath.training.mining import Example

Tile = Callable[[Axes], None]  # draws one
ACROSS = 6
CAPTION_LETTERS = 36
TILE_PX = {"mitosis": 192, "nuclei": 192, "tumor": 96}
TILE_INCHES = 2.0
MARK = "#facc15"  # yellow: no stain has it
CENTRE_PX = 32  # the middle of a PCam patch, which its label speaks of
LEGENDS = {
    "mitosis": f"circles: mitoses, with the {NEGATIVE_BEYOND_PX} px within which a detection counts as a hit",
    "nuclei": "outlines: nuclei",
    "tumor": "each with its class; squares: the part of a PCam patch that its label speaks of",
}


def draw_contact_sheet(collection: Collection, path: Path, seed: int = 0) -> Path:
    """Draw the figure into a file, whole or not at all; gives the path back."""
    rows = [(split, chosen) for split in SPLITS if (chosen := _choose(collection, split, seed))]
    if not rows:
        raise DataError(f"{collection.root} has no images to show; run `rotopath data check` on it.")
    spacing = MODEL_SPACING_UM_PX[collection.task]
    tiles = [
        (split, [partial(_draw_tile, collection, picture, spacing) for picture in chosen]) for split, chosen in rows
    ]
    legend = f"{LEGENDS[collection.task]}; tiles of up to {TILE_PX[collection.task]} px at {spacing:g} µm/px"
    return _draw_sheet(f"{collection.source}: {collection.task}", legend, tiles, path)


def draw_examples(collection: Collection, examples: Sequence[Example], path: Path) -> Path:
    """Draw the worst of a run's hard examples, each with how sure the baseline was of the wrong answer."""
    pictures = {picture.name: picture for picture in collection.pictures}
    spacing = MODEL_SPACING_UM_PX[collection.task]
    rows = []
    for first in range(0, min(len(examples), 3 * ACROSS), ACROSS):
        chosen = examples[first : first + ACROSS]
        tiles = []
        for one in chosen:
            middle = np.array([one.row, one.column], float) if collection.task == "mitosis" else None
            note = f"{one.score:.2f}, "
            tiles.append(partial(_draw_tile, collection, pictures[one.image], spacing, middle=middle, note=note))
        rows.append((f"{first + 1} to {first + len(chosen)}", tiles))
    legend = f"the worst of {len(examples)}, with the baseline's error; {LEGENDS[collection.task]}"
    return _draw_sheet(f"{collection.source}: hard examples", legend, rows, path)


def _draw_sheet(title: str, legend: str, rows: Sequence[tuple[str, Sequence[Tile]]], path: Path) -> Path:
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
    return save_figure(figure, path)


def _choose(collection: Collection, split: str, seed: int) -> list[Picture]:
    """A handful of pictures: of as many cases, or classes, as there are, and rather with objects than without."""
    pictures = [picture for picture in collection.pictures if picture.split == split]
    shuffled = [pictures[i] for i in np.random.default_rng(seed).permutation(len(pictures))]
    seen: Counter[str | int | None] = Counter()
    ranks: dict[Picture, tuple[int, bool]] = {}
    for picture in shuffled:
        kind = picture.label if collection.task == "tumor" else picture.case
        ranks[picture] = (seen[kind], not picture.annotations)
        seen[kind] += 1
    return sorted(shuffled, key=ranks.__getitem__)[:ACROSS]


def _draw_tile(
    collection: Collection,
    picture: Picture,
    spacing_um_px: float,
    axes: Axes,
    middle: NDArray[np.float64] | None = None,
    note: str = "",
) -> None:
    """A picture about its first object, or about a given place, with all its annotations."""
    image = read_image(picture, spacing_um_px)
    points = read_points(picture, spacing_um_px) if collection.task == "mitosis" else np.empty((0, 2))
    if middle is None:
        middle = points[0] if len(points) else (np.array(image.shape[:2]) - 1) / 2
    top, left, size = _tile(image.shape[:2], middle, TILE_PX[collection.task])
    axes.imshow(image, interpolation="lanczos")
    for row, column in points:
        axes.add_patch(Circle((column, row), NEGATIVE_BEYOND_PX, fill=False, color=MARK, linewidth=1.2))
    if collection.task == "nuclei":
        labels = read_nuclei(picture, spacing_um_px)[top : top + size, left : left + size]
        for number in np.unique(labels[labels > 0]):
            outlined = np.pad(labels == number, 1)
            edges = np.arange(-1, outlined.shape[0] - 1) + top, np.arange(-1, outlined.shape[1] - 1) + left
            axes.contour(edges[1], edges[0], outlined, levels=[0.5], colors=MARK, linewidths=0.9)
    if collection.source.startswith("PCam"):
        x, y = (np.array([image.shape[1], image.shape[0]]) - CENTRE_PX) / 2 - 0.5
        axes.add_patch(Rectangle((x, y), CENTRE_PX, CENTRE_PX, fill=False, color=MARK, linewidth=1.0))
    axes.set(xlim=(left - 0.5, left + size - 0.5), ylim=(top + size - 0.5, top - 0.5), xticks=[], yticks=[])
    axes.set_frame_on(False)
    axes.set_xlabel(note + _caption(picture), size=6, color=GREY, labelpad=2, parse_math=False)


def _tile(shape: tuple[int, ...], middle: NDArray[np.float64], size: int) -> tuple[int, int, int]:
    """Upper left corner and side of a square about the middle that lies inside of the image."""
    size = min(size, *shape)
    top, left = (int(np.clip(m - size / 2, 0, side - size)) for m, side in zip(middle, shape, strict=True))
    return top, left, size


def _caption(picture: Picture) -> str:
    """The class, and as much of the name's end as fits under a tile."""
    name = "/".join(picture.name.removeprefix("camelyonpatch_level_2_split_").split("/")[-2:])
    if len(name) > CAPTION_LETTERS:
        name = name.rpartition("/")[2][-CAPTION_LETTERS:]
    return name if picture.label is None else f"{CLASSES[picture.label]}, {name}"
