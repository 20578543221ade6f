"""Draw a contact sheet: one figure with small parts of some images of a dataset, and the annotations in these parts.

Such a part of an image is called a *tile*. `draw_contact_sheet` draws a row of tiles for each split.
`draw_hard_examples` draws tiles of hard examples: mistakes that a baseline network, trained before, makes on the
training images. `draw_augmentations` draws a tile as each type of augmentation changes it. All tiles of a sheet have
the same pixel spacing.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
from matplotlib.patches import Polygon as PolygonPatch
from numpy.typing import NDArray

from rotopath.data.annotations import read_objects, read_points
from rotopath.data.augmentation import EXAMPLES, NO_AUGMENTATION, augment
from rotopath.data.batches import cut_window
from rotopath.data.dataset import Annotated, DataError, Dataset, Sample, read_image
from rotopath.data.splits import SPLITS
from rotopath.images.outlines import Polygon
from rotopath.reports.figures import GRAY, INK, save_figure
from rotopath.tasks import HardExample
from rotopath.tasks.detect import MATCH_RADIUS_UM

COLUMNS = 6
MAX_EXAMPLE_ROWS = 3
# Largest side of a tile in px, by type of annotation
TILE_PX: Mapping[Annotated, int] = {"points": 192, "objects": 192, "labels": 96}
AUGMENTED_PX = 128  # largest side of a tile of `draw_augmentations` in px
# Smallest pixel spacing of a contact sheet in µm/px, by type of annotation
FINEST_UM_PX: Mapping[Annotated, float] = {"points": 0.25, "objects": 0.25, "labels": 1.0}
LEGENDS: Mapping[Annotated, str] = {
    "points": f"circles: {{objects}}; a detection inside a circle (radius {MATCH_RADIUS_UM:g} µm) is a true positive",
    "objects": "outlines: {objects}",
    "labels": "below a tile: class and name of the image; square (PCam): the part of a patch to which the label refers",
}
PCAM_CENTER_PX = 32  # the label of a PCam patch refers to its central 32 × 32 px
CAPTION_LETTERS = 36  # maximum number of letters of an image name below a tile
DEFAULT_COLOR = "#facc15"  # yellow, for annotations without a class; no stain has this color
COLORS = (DEFAULT_COLOR, "#22d3ee", "#a3e635", "#fb7185", "#f97316", "#c084fc", "#ffffff", "#000000")  # by class

# Sizes in inches
TILE, TILE_GAP, CAPTION, HEADER = 2.0, 0.1, 0.45, 0.75


@dataclass(frozen=True)
class SheetTile:
    """A tile of the sheet: the image, the part of the image to draw, and a note for the caption.

    `center` is the center of this part: row and column in pixels, at the pixel spacing of the sheet. None means the
    first annotated point, or the center of the image if there are no annotated points.
    """

    sample: Sample
    center: NDArray[np.float64] | None = None
    note: str = ""  # text at the start of the caption below the tile


def draw_contact_sheet(dataset: Dataset, path: Path, seed: int = 0) -> Path:
    """Draw a contact sheet with up to COLUMNS random images of each split, write it to `path`, and return `path`.

    `seed` determines which images are selected. Raises DataError if the dataset contains no images.
    """
    rows = [(split, samples) for split in SPLITS if (samples := _select_samples(dataset, split, seed))]
    if not rows:
        raise DataError(f"{dataset.root} contains no images; run `rotopath data check` on this dataset.")
    finest = min(sample.spacing_um_px for sample in dataset.samples)
    painter = TilePainter(dataset, max(finest, FINEST_UM_PX[dataset.annotated]))
    tiles = [(split, [SheetTile(sample) for sample in samples]) for split, samples in rows]
    legend = f"{_legend(dataset)}; tiles of up to {painter.tile_px} px at {painter.spacing_um_px:g} µm/px"
    figure = _draw_sheet(f"{dataset.source}: {dataset.annotated}", legend, tiles, painter)
    return save_figure(figure, path)


def draw_hard_examples(dataset: Dataset, examples: Sequence[HardExample], spacing_um_px: float, path: Path) -> Path:
    """Draw a contact sheet with the worst hard examples, write it to `path`, and return `path`.

    `examples` must be ordered by their score, highest first. The score is the confidence of the baseline network in its
    wrong prediction; it is written below each tile. `spacing_um_px` is the pixel spacing of the tiles. The positions in
    `examples` are in pixels of the same spacing.
    """
    samples = {sample.name: sample for sample in dataset.samples}
    rows = []
    for first in range(0, min(len(examples), MAX_EXAMPLE_ROWS * COLUMNS), COLUMNS):
        tiles = []
        for example in examples[first : first + COLUMNS]:
            center = np.array([example.row, example.column], float) if dataset.annotated == "points" else None
            tiles.append(SheetTile(samples[example.image], center, f"{example.score:.2f}, "))
        rows.append((f"{first + 1} to {first + len(tiles)}", tiles))
    numbers = "number below a tile: confidence of the baseline network in its wrong prediction"
    legend = f"the worst of {len(examples)} hard examples; {numbers}; {_legend(dataset)}"
    figure = _draw_sheet(f"{dataset.source}: hard examples", legend, rows, TilePainter(dataset, spacing_um_px))
    return save_figure(figure, path)


def draw_augmentations(dataset: Dataset, path: Path, seed: int = 0) -> Path:
    """Draw a part of a training image as each type of augmentation changes it, write the sheet, and return `path`.

    A row of the sheet has the original and five random changes. The annotations are changed like target maps of a
    training. `seed` selects the image and the changes. Raises DataError if the dataset contains no training image.
    """
    samples = _select_samples(dataset, "train", seed)
    if not samples:
        raise DataError(f"{dataset.root} contains no training images; run `rotopath data check` on this dataset.")
    sample = samples[0]
    spacing_um_px = max(sample.spacing_um_px, FINEST_UM_PX[dataset.annotated])
    image = read_image(sample, spacing_um_px)
    labels = np.zeros(image.shape[:2], np.int32)
    center = (np.array(image.shape[:2]) - 1) / 2
    if dataset.annotated == "objects":
        labels = read_objects(sample, spacing_um_px).labels
    elif dataset.annotated == "points":
        positions = read_points(sample, spacing_um_px).positions
        center = positions[0] if len(positions) else center
        rows, columns = np.indices(labels.shape)
        for number, (row, column) in enumerate(positions, 1):
            labels[np.hypot(rows - row, columns - column) <= MATCH_RADIUS_UM / spacing_um_px] = number
    top, left, size = _tile_corner(image.shape[:2], center, AUGMENTED_PX)
    height = HEADER + len(EXAMPLES) * (TILE + CAPTION)
    figure = Figure(figsize=(COLUMNS * (TILE + TILE_GAP) + 0.2, height), dpi=100, facecolor="white")
    figure.text(0.01, 1 - 0.28 / height, f"{dataset.source}: augmentation", size=13, color=INK, weight="bold")
    legend = (
        f"{_caption(sample)}; {size} px at {spacing_um_px:g} µm/px; left: the original; rows: keys of [augmentation]"
    )
    figure.text(0.01, 1 - 0.5 / height, legend, size=8, color=GRAY, parse_math=False)
    for row, (name, augmentation) in enumerate(EXAMPLES.items()):
        changes = augmentation.draw(COLUMNS, np.random.default_rng(seed))
        y = 1 - (HEADER + row * (TILE + CAPTION)) / height
        figure.text(0.01, y - 0.1 / height, name, size=9, color=INK, weight="bold")
        for column in range(COLUMNS):
            changed, drawn = (NO_AUGMENTATION, NO_AUGMENTATION.draw(1, np.random.default_rng(0)))
            if column:
                changed, drawn = augmentation, changes.shard(column, COLUMNS)
            cut_px = changed.cut_px(size)
            margin = (cut_px - size) // 2
            corner = top - margin, left - margin, cut_px
            # Target maps are bytes: two maps for the number of an object
            maps = [cut_window(plane[..., None].astype(np.uint8), *corner) for plane in (labels % 256, labels // 256)]
            window = np.concatenate([cut_window(image, *corner), *maps], axis=2)
            pixels, targets = augment(torch.from_numpy(window).permute(2, 0, 1)[None], drawn, size)
            assert targets is not None
            axes = figure.add_axes(
                (0.01 + column * 0.99 / COLUMNS, y - (0.2 + TILE) / height, 0.97 / COLUMNS, TILE / height)
            )
            axes.imshow(pixels[0].permute(1, 2, 0).numpy(), interpolation="lanczos")
            _draw_outlines(axes, (targets[0, 0] + 256 * targets[0, 1]).numpy(), 0, 0, lambda _: DEFAULT_COLOR)
            axes.set(xlim=(-0.5, size - 0.5), ylim=(size - 0.5, -0.5), xticks=[], yticks=[])
            axes.set_frame_on(False)
    return save_figure(figure, path)


def _legend(dataset: Dataset) -> str:
    """Return a text that explains how the annotations of a dataset are drawn."""
    return LEGENDS[dataset.annotated].format(objects=dataset.objects)


def _select_samples(dataset: Dataset, split: str, seed: int) -> list[Sample]:
    """Select up to COLUMNS random samples of a split.

    If whole images have labels, one sample of each class is selected first, then a second sample of each class, and so
    on. Otherwise, the same is done with cases instead of classes. Among the first samples of all classes or cases
    (or the second samples, and so on), those with annotations are selected first.
    """
    samples = [sample for sample in dataset.samples if sample.split == split]
    shuffled = [samples[i] for i in np.random.default_rng(seed).permutation(len(samples))]
    counts: Counter[str | None] = Counter()
    ranks: dict[Sample, tuple[int, bool]] = {}
    for sample in shuffled:
        stratum = sample.label if dataset.annotated == "labels" else sample.case
        ranks[sample] = (counts[stratum], not sample.annotations)
        counts[stratum] += 1
    return sorted(shuffled, key=ranks.__getitem__)[:COLUMNS]


# Tiles


class ClassColors(dict[str, str]):
    """Colors by class name. The first call of `color_of` for a class assigns the next color in COLORS to the class."""

    def color_of(self, name: str) -> str:
        """Return the color of the class `name`, or the default color if the name is empty."""
        return self.setdefault(name, COLORS[len(self) % len(COLORS)]) if name else DEFAULT_COLOR


@dataclass
class TilePainter:
    """Draws tiles of a dataset. All tiles have the pixel spacing `spacing_um_px` and the same class colors."""

    dataset: Dataset
    spacing_um_px: float
    colors: ClassColors = field(default_factory=ClassColors)

    @property
    def tile_px(self) -> int:
        """Largest side of a tile in pixels."""
        return TILE_PX[self.dataset.annotated]

    def draw(self, axes: Axes, tile: SheetTile) -> None:
        """Draw a tile into `axes`: a part of the image, all annotations in this part, and a caption below.

        In a PCam patch, a square shows the central part, to which the label refers.
        """
        sample = tile.sample
        image = read_image(sample, self.spacing_um_px)
        axes.imshow(image, interpolation="lanczos")
        center = (np.array(image.shape[:2]) - 1) / 2
        if self.dataset.annotated == "points":
            positions = self._draw_points(axes, sample)
            center = positions[0] if len(positions) else center
        top, left, size = _tile_corner(image.shape[:2], center if tile.center is None else tile.center, self.tile_px)
        if self.dataset.annotated == "objects":
            self._draw_objects(axes, sample, top, left, size)
        if self.dataset.source.startswith("PCam"):
            x, y = (np.array([image.shape[1], image.shape[0]]) - PCAM_CENTER_PX) / 2 - 0.5
            square = Rectangle((x, y), PCAM_CENTER_PX, PCAM_CENTER_PX, fill=False, color=DEFAULT_COLOR, linewidth=1.0)
            axes.add_patch(square)
        axes.set(xlim=(left - 0.5, left + size - 0.5), ylim=(top + size - 0.5, top - 0.5), xticks=[], yticks=[])
        axes.set_frame_on(False)
        axes.set_xlabel(tile.note + _caption(sample), size=6, color=GRAY, labelpad=2, parse_math=False)

    def _draw_points(self, axes: Axes, sample: Sample) -> NDArray[np.float64]:
        """Draw a circle around each annotated point of a sample. Return the points (n, 2): row and column in px."""
        points = read_points(sample, self.spacing_um_px)
        radius = MATCH_RADIUS_UM / self.spacing_um_px
        for (row, column), name in zip(points.positions, points.classes, strict=True):
            color = self.colors.color_of(name)
            axes.add_patch(Circle((column, row), radius, fill=False, color=color, linewidth=1.2))
        _draw_ignored(axes, points.ignored)
        return points.positions

    def _draw_objects(self, axes: Axes, sample: Sample, top: int, left: int, size: int) -> None:
        """Draw the outlines of all objects in a square of the image.

        The upper left pixel of the square is at row `top` and column `left`. `size` is the side in pixels.
        """
        objects = read_objects(sample, self.spacing_um_px)
        labels = objects.labels[top : top + size, left : left + size]
        _draw_outlines(axes, labels, top, left, lambda number: self.colors.color_of(objects.classes.get(number, "")))
        _draw_ignored(axes, objects.ignored)


def _draw_outlines(
    axes: Axes, labels: NDArray[np.integer], top: int, left: int, color_of: Callable[[int], str]
) -> None:
    """Draw the outline of each object of a label map, whose upper left pixel is at row `top` and column `left`."""
    for number in np.unique(labels[labels > 0]):
        mask = np.pad(labels == number, 1)  # without this margin, outlines would be open at the edge of the square
        rows, columns = np.arange(-1, mask.shape[0] - 1) + top, np.arange(-1, mask.shape[1] - 1) + left
        axes.contour(columns, rows, mask, levels=[0.5], colors=color_of(int(number)), linewidths=0.9)


def _draw_ignored(axes: Axes, areas: Sequence[tuple[Polygon, ...]]) -> None:
    """Draw dashed gray lines around ignored areas."""
    for ring in (ring for polygons in areas for polygon in polygons for ring in polygon.rings):
        columns_and_rows = ring[:, ::-1] - 0.5  # for matplotlib, (0, 0) is the center of the first pixel
        axes.add_patch(
            PolygonPatch(columns_and_rows, fill=False, edgecolor=GRAY, linestyle="--", linewidth=1.2, clip_on=True)
        )


def _tile_corner(shape: tuple[int, ...], center: NDArray[np.float64], size: int) -> tuple[int, int, int]:
    """Return a square around `center` (row, column) inside an image: its top row, left column and side, in pixels.

    `shape` is the height and width of the image, and `size` the side of the square. If the square extends beyond the
    edge of the image, it is moved into the image. If `size` exceeds the height or width, the square is made smaller.
    """
    size = min(size, *shape)
    top, left = (int(np.clip(c - size / 2, 0, side - size)) for c, side in zip(center, shape, strict=True))
    return top, left, size


def _caption(sample: Sample) -> str:
    """Return the caption of a tile: the label of the image, if it has one, and the last part of the image name."""
    name = "/".join(sample.name.removeprefix("camelyonpatch_level_2_split_").split("/")[-2:])
    if len(name) > CAPTION_LETTERS:
        name = name.rpartition("/")[2][-CAPTION_LETTERS:]
    return name if sample.label is None else f"{sample.label}, {name}"


# The sheet


def _draw_sheet(
    title: str, legend: str, rows: Sequence[tuple[str, Sequence[SheetTile]]], painter: TilePainter
) -> Figure:
    """Draw a sheet with a title, a legend, and rows of tiles; each row has a name and up to COLUMNS tiles."""
    height = HEADER + len(rows) * (TILE + CAPTION)
    figure = Figure(figsize=(COLUMNS * (TILE + TILE_GAP) + 0.2, height), dpi=150, facecolor="white")
    figure.text(0.01, 1 - 0.28 / height, title, size=13, color=INK, weight="bold")
    figure.text(0.01, 1 - 0.5 / height, legend, size=8, color=GRAY)
    for r, (name, tiles) in enumerate(rows):
        top = 1 - (HEADER + r * (TILE + CAPTION)) / height
        figure.text(0.01, top - 0.1 / height, name, size=9, color=INK, weight="bold")
        for c, tile in enumerate(tiles):
            left, bottom = 0.01 + c * 0.99 / COLUMNS, top - (0.2 + TILE) / height
            painter.draw(figure.add_axes((left, bottom, 0.97 / COLUMNS, TILE / height)), tile)
    _name_classes(figure, painter.colors, height)
    return figure


def _name_classes(figure: Figure, colors: Mapping[str, str], height: float) -> None:
    """Write the class names into the upper right corner of the figure, each on a background in the color of the class.

    `colors` maps class names to colors. `height` is the height of the figure in inches.
    """
    right, down = 0.99, 0.0
    for name, color in sorted(colors.items(), reverse=True):
        width = (0.09 * len(name) + 0.25) / figure.get_figwidth()  # approximate width of the name
        if right - width < 0.35:  # the name would overlap the title, so start a new line
            right, down = 0.99, down + 0.24
        figure.text(
            right,
            1 - (0.22 + down) / height,
            name,
            size=8,
            color=INK if sum(to_rgb(color)) > 1 else "white",
            ha="right",
            bbox={"facecolor": color, "edgecolor": GRAY, "linewidth": 0.5, "pad": 2},
            parse_math=False,
        )
        right -= width
