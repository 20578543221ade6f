"""Draw a contact sheet: one figure with small parts of some images of a dataset, and the annotations in these parts.

Such a part of an image is called a *tile*. `draw_contact_sheet` draws a row of tiles for each split.
`draw_hard_examples` draws tiles of hard examples: mistakes that a baseline network, trained before, makes on the
training images. `draw_augmentations` draws a tile as each type of augmentation changes it. All tiles of a sheet have
the same pixel spacing.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from scipy import ndimage
from scipy.spatial import KDTree

from rotopath.data.annotations import Objects, Points, mask_areas, read_objects, read_points, transform_outline
from rotopath.data.augmentation import EXAMPLES, NO_AUGMENTATION, augment
from rotopath.data.batches import cut_window
from rotopath.data.dataset import Annotated, DataError, Dataset, Sample, count_and_list, read_image
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
TITLES: Mapping[Annotated, str] = {"points": "points", "objects": "outlines", "labels": "classes of images"}
LEGENDS: Mapping[Annotated, str] = {
    "points": f"circles: {{objects}}; a detection inside a circle (radius {MATCH_RADIUS_UM:g} µm) is a true positive",
    "objects": "outlines: {objects}",
    "labels": "below a tile: class and name of the image; square (PCam): the part of a patch to which the label refers",
}
CROWDED_LEGEND = "crosses in circles: {objects}"  # if most circles of MATCH_RADIUS_UM would overlap
CIRCLE = 0.35  # radius of circles then, as a fraction of the median distance from an object to the next one
MIN_RADIUS_UM = 1.5
IGNORED_LEGEND = "dashed: edges of ignored areas (Ignore*, or outside of a Region*)"
PCAM_CENTER_PX = 32  # the label of a PCam patch refers to its central 32 × 32 px
CAPTION_LETTERS = 42  # maximum number of letters of an image name below a tile
TITLE_LETTERS = 22  # maximum number of letters of the name of a folder in a title
DEFAULT_COLOR = "#facc15"  # yellow, for annotations without a class; no stain has this color
COLORS = (DEFAULT_COLOR, "#22d3ee", "#a3e635", "#fb7185", "#f97316", "#c084fc", "#ffffff", "#000000")  # by class

# Sizes in inches
TILE, TILE_GAP, CAPTION, HEADER = 2.0, 0.1, 0.45, 0.75


@dataclass(frozen=True)
class SheetTile:
    """A tile of the sheet: the image, the part of the image to draw, and a note for the caption.

    `center` is the center of this part: row and column in pixels, at the pixel spacing of the sheet. None means the
    object that has most others around it, or the center of the image if there are no annotated objects.
    """

    sample: Sample
    center: NDArray[np.float64] | None = None
    note: str = ""  # text at the start of the caption below the tile


def draw_contact_sheet(dataset: Dataset, path: Path, seed: int = 0, images: Sequence[str] = ()) -> Path:
    """Draw a contact sheet with up to COLUMNS random images of each split, write it to `path`, and return `path`.

    `seed` determines which images are selected. If `images` are names of images or of their files, the sheet has a row
    for each of them instead, with up to COLUMNS parts that show most objects. Raises DataError if the dataset contains
    no images, or not all of `images`.
    """
    if not dataset.samples:
        raise DataError(f"{dataset.root} contains no images; run `rotopath data check` on this dataset.")
    chosen = _find_samples(dataset, images)
    selected = {split: _select_samples(dataset, split, seed) for split in SPLITS}
    finest = min(sample.spacing_um_px for sample in dataset.samples)
    painter = TilePainter(dataset, max(finest, FINEST_UM_PX[dataset.annotated]))
    painter.choose_radius(chosen or [sample for samples in selected.values() for sample in samples])
    if chosen:
        rows = [
            (
                f"{sample.split}: {_caption(sample)}",
                [SheetTile(sample, center) for center in painter.find_centers(sample)],
            )
            for sample in chosen
        ]
    else:
        rows = [
            (_name_row(dataset, split, len(samples)), [SheetTile(sample) for sample in samples])
            for split, samples in selected.items()
            if samples
        ]
    legend = f"{painter.legend}; tiles of up to {painter.tile_px} px at {painter.spacing_um_px:g} µm/px"
    figure = _draw_sheet(f"{_name(dataset)}: {TITLES[dataset.annotated]}", legend, rows, painter)
    return save_figure(figure, path)


def _name_row(dataset: Dataset, split: str, count: int) -> str:
    """Return the name of a row with `count` images of a split: the split, and whether there are more images."""
    total = sum(sample.split == split for sample in dataset.samples)
    return split if count == total else f"{split} ({count} of {total} images)"


def _name(dataset: Dataset) -> str:
    """Return the name of a dataset for titles: that of its folder, and its format, unless it is a manifest."""
    name = dataset.root.resolve().name
    if len(name) > TITLE_LETTERS:
        name = f"{name[: TITLE_LETTERS - 1]}…"
    return name if dataset.source == "manifest" else f"{name}, {dataset.source}"


def _find_samples(dataset: Dataset, images: Sequence[str]) -> list[Sample]:
    """Return the samples with one of the names, in the order of the names. Raises DataError if there is none of a name.

    A name is that of a sample, or the path or the name of its file, with or without a suffix.
    """
    found: dict[Sample, None] = {}
    for image in images:
        samples = [sample for sample in dataset.samples if image in _names_of(sample)]
        if not samples:
            names = count_and_list(sorted({sample.path.name for sample in dataset.samples}), "file")
            raise DataError(f"--image {image} is no image of {dataset.root}; choose from its {names}.")
        found |= dict.fromkeys(samples)
    return list(found)


def _names_of(sample: Sample) -> tuple[str, ...]:
    name = sample.name.removesuffix(f" {sample.box}")
    return sample.name, name, str(sample.path), sample.path.name, sample.path.stem


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
    painter = TilePainter(dataset, spacing_um_px)
    legend = f"the worst of {len(examples)} hard examples; {numbers}; {painter.legend}"
    figure = _draw_sheet(f"{_name(dataset)}: hard examples", legend, rows, painter)
    return save_figure(figure, path)


def draw_augmentations(dataset: Dataset, path: Path, seed: int = 0, images: Sequence[str] = ()) -> Path:
    """Draw a part of a training image, or of the first of `images`, as each type of augmentation changes it.

    The sheet is written to `path`, which is returned.

    A row of the sheet has the original and five random changes. The annotations are changed like target maps of a
    training. `seed` selects the image and the changes. Raises DataError if the dataset contains no such image.
    """
    samples = _find_samples(dataset, images) or _select_samples(dataset, "train", seed)
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
    title = f"{_name(dataset)}: augmentation"
    figure.text(0.01, 1 - 0.28 / height, title, size=13, color=INK, weight="bold", parse_math=False)
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
    radius_um: float = MATCH_RADIUS_UM  # of the circles around points
    has_ignored: bool = False  # whether a tile that was drawn shows an ignored area

    @property
    def tile_px(self) -> int:
        """Largest side of a tile in pixels."""
        return TILE_PX[self.dataset.annotated]

    @property
    def legend(self) -> str:
        """A text that explains how annotations are drawn."""
        is_crowded = self.dataset.annotated == "points" and self.radius_um < MATCH_RADIUS_UM
        legend = CROWDED_LEGEND if is_crowded else LEGENDS[self.dataset.annotated]
        return legend.format(objects=self.dataset.objects)

    def choose_radius(self, samples: Sequence[Sample]) -> None:
        """Make the circles around points smaller if most of those in the samples overlap, such as those of nuclei."""
        if self.dataset.annotated != "points":
            return
        fields = [read_points(sample, self.spacing_um_px).positions for sample in samples]
        # The distance of a single point is infinite
        distances_px = [KDTree(field).query(field, 2)[0][:, 1] for field in fields if len(field)]
        median_um = float(np.median(np.concatenate(distances_px))) * self.spacing_um_px if distances_px else np.inf
        if median_um < 2 * MATCH_RADIUS_UM:
            self.radius_um = max(MIN_RADIUS_UM, CIRCLE * median_um)

    def find_centers(self, sample: Sample) -> list[NDArray[np.float64] | None]:
        """Return the centers of up to COLUMNS tiles of a sample that show most objects; [None] without objects."""
        positions = self._read(sample)[1]
        return list(_find_crowded(positions, self.tile_px, COLUMNS)) or [None]

    def _read(self, sample: Sample) -> tuple[Points | Objects | None, NDArray[np.float64]]:
        """Read the annotations of a sample, and the positions (n, 2) of its objects: row and column in px."""
        if self.dataset.annotated == "points":
            points = read_points(sample, self.spacing_um_px)
            return points, points.positions
        if self.dataset.annotated == "labels":
            return None, np.empty((0, 2))
        objects = read_objects(sample, self.spacing_um_px)
        boxes = [box for box in ndimage.find_objects(objects.labels) if box is not None]
        centers = [[(part.start + part.stop - 1) / 2 for part in box] for box in boxes]
        return objects, np.array(centers, np.float64).reshape(-1, 2)

    def draw(self, axes: Axes, tile: SheetTile) -> None:
        """Draw a tile into `axes`: a part of the image, all annotations in this part, and a caption below.

        In a PCam patch, a square shows the central part, to which the label refers.
        """
        sample = tile.sample
        image = read_image(sample, self.spacing_um_px)
        axes.imshow(image, interpolation="lanczos")
        annotations, positions = self._read(sample)
        center = tile.center
        if center is None:
            center = next(iter(_find_crowded(positions, self.tile_px)), (np.array(image.shape[:2]) - 1) / 2)
        top, left, size = _tile_corner(image.shape[:2], center, self.tile_px)
        if isinstance(annotations, Points):
            self._draw_points(axes, annotations)
        elif annotations is not None:
            self._draw_objects(axes, annotations, top, left, size)
        if annotations is not None and annotations.ignored:
            _draw_ignored(axes, annotations.ignored)
            mask = mask_areas([transform_outline(area, 1, (top, left)) for area in annotations.ignored], (size, size))
            self.has_ignored |= mask is not None and bool(mask.any())
        if self.dataset.source.startswith("PCam"):
            x, y = (np.array([image.shape[1], image.shape[0]]) - PCAM_CENTER_PX) / 2 - 0.5
            square = Rectangle((x, y), PCAM_CENTER_PX, PCAM_CENTER_PX, fill=False, color=DEFAULT_COLOR, linewidth=1.0)
            axes.add_patch(square)
        axes.set(xlim=(left - 0.5, left + size - 0.5), ylim=(top + size - 0.5, top - 0.5), xticks=[], yticks=[])
        axes.set_frame_on(False)
        axes.set_xlabel(tile.note + _caption(sample), size=6, color=GRAY, labelpad=2, parse_math=False)

    def _draw_points(self, axes: Axes, points: Points) -> None:
        """Draw a circle around each annotated point of a sample, and a cross at its position."""
        radius = self.radius_um / self.spacing_um_px
        for (row, column), name in zip(points.positions, points.classes, strict=True):
            color = self.colors.color_of(name)
            axes.add_patch(Circle((column, row), radius, fill=False, color=color, linewidth=1.2))
            axes.plot(column, row, "+", color=color, markersize=4, markeredgewidth=0.8)

    def _draw_objects(self, axes: Axes, objects: Objects, top: int, left: int, size: int) -> None:
        """Draw the outlines of all objects in a square of the image.

        The upper left pixel of the square is at row `top` and column `left`. `size` is the side in pixels.
        """
        labels = objects.labels[top : top + size, left : left + size]
        _draw_outlines(axes, labels, top, left, lambda number: self.colors.color_of(objects.classes.get(number, "")))


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


def _find_crowded(positions: NDArray[np.float64], size_px: int, count: int = 1) -> Iterator[NDArray[np.float64]]:
    """Yield up to `count` of the positions (n, 2): those with most others in a square of `size_px` around them.

    A position in the square of an earlier one is left out.
    """
    remaining = positions
    for _ in range(count):
        if not len(remaining):
            return
        near = KDTree(remaining).query_ball_point(remaining, size_px / 2, p=np.inf, return_length=True)
        center = remaining[int(near.argmax())]
        yield center
        remaining = remaining[np.abs(remaining - center).max(axis=1) > size_px]


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
    figure.text(0.01, 1 - 0.28 / height, title, size=13, color=INK, weight="bold", parse_math=False)
    for r, (name, tiles) in enumerate(rows):
        top = 1 - (HEADER + r * (TILE + CAPTION)) / height
        figure.text(0.01, top - 0.1 / height, name, size=9, color=INK, weight="bold", parse_math=False)
        for c, tile in enumerate(tiles):
            left, bottom = 0.01 + c * 0.99 / COLUMNS, top - (0.2 + TILE) / height
            painter.draw(figure.add_axes((left, bottom, 0.97 / COLUMNS, TILE / height)), tile)
    legend += f"; {IGNORED_LEGEND}" if painter.has_ignored else ""
    figure.text(0.01, 1 - 0.5 / height, legend, size=8, color=GRAY)
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
