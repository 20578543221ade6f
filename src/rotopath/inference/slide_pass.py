"""A slide as a network sees it: at its spacing, mirrored beyond its edges, with stains normalised if that is wanted.

In: an open slide. Out: pixels of any rectangle, and positions on the canvas as positions on level 0.

A network's answers all over a canvas, tile by tile: threads read ahead while the network works.

In: a network, a canvas, and which places are worth a look. Out: tiles, row by row; memory holds a few of them.

A trained network over a whole slide: objects as they are found, a heat map, and a summary.

In: a network with its operating point, and an open slide. Out: one pass over the tissue; memory does not grow with the
slide, since maps and what tiles cut apart wait in files of a folder that the caller gives.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.group import mirror
from rotopath.images import Slide, Tissue, find_tissue
from rotopath.images.geojson import SlideObject
from rotopath.images.stain import Stain, Stains, measure_stains
from rotopath.inference.dense import TILE_PX, Activate, MixedNetwork, activate, expect_eval, predict_frame, reach_px
from rotopath.inference.tiling import Layout, Span, cover, divide, lay_out
from rotopath.models import DenseNetwork

MEASURED_PX = 2**21  # of tissue: all of a small slide, and samples from all over a larger one
SAMPLE_PX = 256  # the side of each sample
BLOCK_PX, KEPT_BLOCKS = 512, 32  # of pixels that are read together; neighbouring tiles share some, 25 MB in all


class SlideView:
    """Rows and columns of a slide at the spacing that a network wants. Several threads may read it."""

    def __init__(self, slide: Slide, spacing_um_px: float, stain: Stain, tissue: Tissue) -> None:
        self.slide = slide
        self.spacing_um_px = spacing_um_px
        self.size_px = slide.size_at(self.spacing_um_px)
        self.level0_px = self.spacing_um_px / slide.spacing_um_px  # the side of a pixel here, in pixels of level 0
        self.stains = self._measure_stains(tissue) if stain == "macenko" else None
        self._block = lru_cache(KEPT_BLOCKS)(self._read_block)

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Pixels (h, w, 3); beyond its edges the slide is seen mirrored, as images are in training."""
        down, across = (
            mirror(torch.arange(*span), size).numpy() for span, size in zip((rows, columns), self.size_px, strict=True)
        )
        first = [int(places.min()) // BLOCK_PX for places in (down, across)]
        last = [int(places.max()) // BLOCK_PX for places in (down, across)]
        rows_of_blocks = [
            np.concatenate([self._block(i, j) for j in range(first[1], last[1] + 1)], axis=1)
            for i in range(first[0], last[0] + 1)
        ]
        whole = np.concatenate(rows_of_blocks)
        pixels: NDArray[np.uint8] = whole[np.ix_(down - first[0] * BLOCK_PX, across - first[1] * BLOCK_PX)]
        return pixels

    def _read_block(self, row: int, column: int) -> NDArray[np.uint8]:
        """Pixels are always read in the same blocks: what is resampled in another one may differ by a grey level."""
        top, left = row * BLOCK_PX, column * BLOCK_PX
        height, width = (min(BLOCK_PX, size - start) for size, start in zip(self.size_px, (top, left), strict=True))
        pixels = self.slide.read(top, left, height, width, self.spacing_um_px)
        return pixels if self.stains is None else self.stains.normalise(pixels)

    def _measure_stains(self, tissue: Tissue) -> Stains | None:
        """The stains of the slide's tissue; the glass around it has no part in how strong they are."""
        if math.prod(self.size_px) <= MEASURED_PX:
            pixels = self.slide.read(0, 0, *self.size_px, self.spacing_um_px)
            return measure_stains(pixels[self._is_tissue(tissue, Span(0, self.size_px[0]), Span(0, self.size_px[1]))])
        cells = np.argwhere(tissue.mask)
        if not len(cells):
            return None
        count = MEASURED_PX // SAMPLE_PX**2
        chosen = cells[np.linspace(0, len(cells) - 1, min(count, len(cells))).astype(int)]
        middles = np.rint((chosen + 0.5) * tissue.spacing_um_px / self.spacing_um_px).astype(int)
        samples = []
        for row, column in (middles - SAMPLE_PX // 2).tolist():
            pixels = self.slide.read(row, column, SAMPLE_PX, SAMPLE_PX, self.spacing_um_px)
            samples.append(
                pixels[self._is_tissue(tissue, Span(row, row + SAMPLE_PX), Span(column, column + SAMPLE_PX))]
            )
        return measure_stains(np.concatenate(samples))

    def _is_tissue(self, tissue: Tissue, rows: Span, columns: Span) -> NDArray[np.bool_]:
        """Which pixels of a rectangle are tissue on the slide."""
        down, across = (np.arange(*span) for span in (rows, columns))
        there = tissue.at(*(np.asarray((at + 0.5) * self.spacing_um_px, np.float64) for at in (down, across)))
        on_slide = [(at >= 0) & (at < size) for at, size in zip((down, across), self.size_px, strict=True)]
        inside: NDArray[np.bool_] = there & on_slide[0][:, None] & on_slide[1][None, :]
        return inside


READERS = 2  # threads; each tile that waits to be computed takes a few megabytes


class Tile(NamedTuple):
    """Answers to a rectangle of outputs, counted from the first one on the canvas, and somewhat around it."""

    rows: Span
    columns: Span
    around: tuple[Span, Span]  # the rectangle that the maps have
    probabilities: NDArray[np.float32]  # (K, h, w), the mean over rotations
    deviations: NDArray[np.float32] | None  # (K, h, w) over rotations, if there are several

    @property
    def core(self) -> tuple[slice, slice]:
        """The rectangle without what is around it, in the maps."""
        return self.rows.within(self.around[0]), self.columns.within(self.around[1])


class Grid:
    """Where a network's outputs, and tiles of them, lie on a canvas."""

    def __init__(
        self, network: DenseNetwork, canvas: SlideView, tile_px: int | None = None, halo: int = 0, multiple: int = 1
    ) -> None:
        self.network, self.canvas, self.halo = network, canvas, halo
        self.tile_px = max(tile_px or TILE_PX, network.geometry.surrounded_px)
        self.layouts = [lay_out(network.geometry, size) for size in canvas.size_px]
        self.size = tuple(layout.kept.size for layout in self.layouts)  # outputs on the canvas
        self.stride_px = network.geometry.stride_px
        self.first_px = tuple(layout.first_px for layout in self.layouts)
        self._rows, self._columns = (
            [
                tile.moved(-side.kept.start)
                for tile, _ in divide(network.geometry, side.kept, side.outputs, self.tile_px, multiple)
            ]
            for side in self.layouts
        )

    @property
    def tiles(self) -> list[tuple[Span, Span]]:
        return [(rows, columns) for rows in self._rows for columns in self._columns]

    def extent_um(self, outputs: Span, axis: int) -> Span:
        """What outputs stand for along rows (0) or columns (1), in whole µm."""
        edges = ((place - 0.5) * self.stride_px + self.first_px[axis] + 0.5 for place in outputs)
        start, stop = (edge * self.canvas.spacing_um_px for edge in edges)
        return Span(int(np.floor(start)), int(np.ceil(stop)))

    def places_um(self, outputs: Span, axis: int) -> NDArray[np.float64]:
        """Where outputs lie along rows (0) or columns (1)."""
        places = self.first_px[axis] + self.stride_px * np.arange(*outputs)
        return np.asarray((places + 0.5) * self.canvas.spacing_um_px)

    def around(self, outputs: Span, axis: int) -> Span:
        """With a halo, as far as there are outputs."""
        wide = outputs.widened(self.halo)
        return Span(max(0, wide.start), min(self.size[axis], wide.stop))

    def output_frame(self, top: int = 0, left: int = 0) -> tuple[tuple[float, float], float]:
        """Where the corner of an output lies on level 0, and how many pixels of that an output has along a side."""
        row, column = (
            ((start - 0.5) * self.stride_px + first + 0.5) * self.canvas.level0_px
            for start, first in zip((top, left), self.first_px, strict=True)
        )
        return (row, column), self.stride_px * self.canvas.level0_px

    def frame_px(self, outputs: Span, axis: int) -> tuple[Span, Span]:
        """The pixels that the network has to see for outputs, and the outputs that it then gives."""
        layout: Layout = self.layouts[axis]
        geometry = self.network.geometry
        answered = cover(geometry, outputs.moved(layout.kept.start), layout.outputs)
        return layout.seen_px(geometry, answered), answered.moved(-layout.kept.start)


def predict_tiles(
    grid: Grid,
    wanted: Iterable[tuple[Span, Span]],
    device: torch.device,
    rotations: int = 1,
    activation: Activate = activate,
) -> Iterator[Tile]:
    """The tiles that are wanted, in their order; the network has to be on the device."""
    expect_eval(grid.network)
    left = iter(wanted)
    degrees = group.angles(rotations)
    pin = device.type == "cuda"

    def read(tile: tuple[Span, Span]) -> Tensor:
        frame = tuple(grid.frame_px(grid.around(span, axis), axis)[0] for axis, span in enumerate(tile))
        pixels = grid.canvas.read(*reach_px(grid.network, frame, degrees))
        image = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        return image.pin_memory() if pin else image

    pool = ThreadPoolExecutor(READERS)
    waiting: deque[tuple[tuple[Span, Span], Future[Tensor]]] = deque()
    try:
        while True:
            while len(waiting) <= READERS and (tile := next(left, None)) is not None:
                waiting.append((tile, pool.submit(read, tile)))
            if not waiting:
                return
            tile, pixels = waiting.popleft()
            yield _answer(grid, tile, pixels.result().to(device, non_blocking=True), degrees, activation)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _answer(grid: Grid, tile: tuple[Span, Span], pixels: Tensor, degrees: list[float], activation: Activate) -> Tile:
    around = (grid.around(tile[0], 0), grid.around(tile[1], 1))
    frames, answered = zip(*(grid.frame_px(span, axis) for axis, span in enumerate(around)), strict=True)
    seen = reach_px(grid.network, frames, degrees)

    def look(rows_px: Span, columns_px: Span) -> Tensor:
        return pixels[..., rows_px.within(seen[0]), columns_px.within(seen[1])]

    rows, columns = (span.within(whole) for span, whole in zip(around, answered, strict=True))
    turned = (
        predict_frame(grid.network, look, frames, angle, tile_px=grid.tile_px, activation=activation)
        for angle in degrees
    )
    maps = torch.stack([each[0, :, rows, columns] for each in turned])
    if not maps.isfinite().all():
        raise ValueError(
            "Answers of the network are no finite numbers: in half precision, as on a GPU, they may be too large; "
            "try --precision 32 (or precision='32')."
        )
    deviations = maps.std(dim=0, correction=0).cpu().numpy() if len(degrees) > 1 else None
    return Tile(*tile, around, maps.mean(dim=0).cpu().numpy(), deviations)


TILE_PX_OF_GPUS = 2 * TILE_PX  # of smaller ones a GPU would wait for Python, which launches kernels one by one
OnProgress = Callable[[int, int], None]  # given how many tiles are done, and how many there are
Map = NDArray[np.float32]
Color = tuple[int, int, int]


class SlideFinder(Protocol):
    """Finds objects: takes tiles as they come, and gives objects once they are whole."""

    def take(self, tile: Tile) -> Iterator[SlideObject]: ...
    def finish(self) -> Iterator[SlideObject]: ...


class SlideTask(Protocol):
    """What a pass over a slide has to know about a task; those of `rotopath.tasks` do."""

    @property
    def name(self) -> str: ...
    @property
    def spacing_um_px(self) -> float: ...
    @property
    def stain(self) -> Stain: ...
    @property
    def colors(self) -> tuple[Color, ...]: ...
    @property
    def heat_cell(self) -> int: ...
    @property
    def margin_um(self) -> float: ...
    @property
    def nothing(self) -> tuple[float, ...]: ...
    def halo(self, stride_px: int) -> int: ...
    def probabilities(self, logits: Tensor) -> Tensor: ...
    def make_finder(self, grid: Grid, point: Mapping[str, float], folder: Path) -> SlideFinder: ...
    def class_maps(self, maps: Map) -> Map: ...
    def foreground(self, maps: Map) -> Map: ...
    def deviation(self, deviations: Map) -> Map: ...
    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]: ...
    def describe(self, summary: Mapping[str, float]) -> str: ...


class MapFile:
    """A map (rows, columns) of floats in a file, written and read in rectangles; 0 where nothing was written."""

    def __init__(self, path: Path, size: tuple[int, int]) -> None:
        self.size = size
        self._file = path.open("wb+")
        self._file.truncate(4 * math.prod(size))

    def write(self, top: int, left: int, values: NDArray[np.float32]) -> None:
        for i, row in enumerate(values):
            self._file.seek(4 * ((top + i) * self.size[1] + left))
            self._file.write(row.astype(np.float32).tobytes())

    def read(self, top: int = 0, bottom: int | None = None) -> NDArray[np.float32]:
        """Whole rows."""
        rows = (self.size[0] if bottom is None else min(bottom, self.size[0])) - top
        self._file.seek(4 * top * self.size[1])
        return np.frombuffer(self._file.read(4 * rows * self.size[1]), np.float32).reshape(rows, self.size[1])

    def bands(self, rows: int = 512) -> Iterator[NDArray[np.float32]]:
        for top in range(0, self.size[0], rows):
            yield self.read(top, top + rows)

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True)
class Model:
    """What is applied: a network in eval mode on its device, its task, and its operating point."""

    task: SlideTask
    network: DenseNetwork
    point: Mapping[str, float]
    device: torch.device

    @property
    def precision(self) -> str:
        """Of how many bits the numbers are that it computes with."""
        return "16" if isinstance(self.network, MixedNetwork) else "32"

    @property
    def tile_px(self) -> int:
        """The side of a tile that keeps its device busy."""
        return TILE_PX_OF_GPUS if self.device.type == "cuda" and self.precision == "16" else TILE_PX


@dataclass(frozen=True)
class PassOptions:
    """How a slide is looked at."""

    rotations: int = 1  # of every tile, over which probabilities are averaged, and their deviation is computed
    tile_px: int | None = None
    everywhere: bool = False  # also where there seems to be no tissue


class SlidePass:
    """One pass over a slide. Ask for `objects` first, to the end; maps and numbers are complete after that."""

    def __init__(self, model: Model, slide: Slide, folder: Path, options: PassOptions) -> None:
        self.model, self.slide, self.options = model, slide, options
        task = model.task
        self.tissue: Tissue = find_tissue(slide)
        self._near = None if options.everywhere else self.tissue.widened(task.margin_um)
        self.canvas = SlideView(slide, task.spacing_um_px, task.stain, self.tissue)
        halo, self._cell = task.halo(model.network.geometry.stride_px), task.heat_cell
        self.grid = Grid(model.network, self.canvas, options.tile_px or model.tile_px, halo, self._cell)
        self._finder = task.make_finder(self.grid, model.point, folder)
        rows, columns = (-(-size // self._cell) for size in self.grid.size)
        self.heat = MapFile(folder / "heat", (rows, columns))
        self.winner = MapFile(folder / "winner", (rows, columns)) if len(task.colors) > 1 else None
        self.deviation = MapFile(folder / "deviation", (rows, columns)) if options.rotations > 1 else None
        self.cell_um = self._cell * self.grid.stride_px * self.canvas.spacing_um_px  # the side of a heat map's pixel
        self._counts, self._areas_mm2 = Counter[str](), Counter[str]()

    def objects(self, on_progress: OnProgress = lambda _done, _all: None) -> Iterator[SlideObject]:
        """Everything that is found, as it is found; the summary is of what was read."""
        self._counts, self._areas_mm2 = Counter[str](), Counter[str]()
        for found in self._find(on_progress):
            self._counts[found.class_name] += 1
            self._areas_mm2[found.class_name] += found.measurements.get("area_mm2", 0.0)  # type: ignore[assignment]
            yield found

    def summary(self) -> dict[str, float]:
        """The slide in a few numbers; densities are per area of tissue, wherever was looked."""
        tissue_mm2 = self.tissue.area_mm2
        return {"tissue_mm2": tissue_mm2, **self.model.task.summarise(self._counts, self._areas_mm2, tissue_mm2)}

    def _find(self, on_progress: OnProgress) -> Iterator[SlideObject]:
        task = self.model.task
        wanted = [tile for tile in self.grid.tiles if self._is_wanted(*tile)]
        tiles = predict_tiles(self.grid, wanted, self.model.device, self.options.rotations, task.probabilities)
        for done, tile in enumerate(map(self._blank_glass, tiles), 1):
            top, left = tile.rows.start // self._cell, tile.columns.start // self._cell
            self.heat.write(top, left, self._mean_of_cells(tile, task.foreground(tile.probabilities)))
            if self.winner is not None:
                classes = [self._mean_of_cells(tile, each) for each in task.class_maps(tile.probabilities)]
                self.winner.write(top, left, np.argmax(classes, axis=0).astype(np.float32))
            if self.deviation is not None and tile.deviations is not None:
                self.deviation.write(top, left, self._mean_of_cells(tile, task.deviation(tile.deviations)))
            yield from self._finder.take(tile)
            on_progress(done, len(wanted))
        yield from self._finder.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for file in (self.heat, self.winner, self.deviation):
            if file is not None:
                file.close()

    @property
    def heat_frame(self) -> tuple[tuple[float, float], float]:
        """Where the heat map's first corner lies on level 0, and the side of its pixels there."""
        corner, side = self.grid.output_frame()
        return corner, side * self._cell

    def _is_wanted(self, rows: Span, columns: Span) -> bool:
        if self._near is None:
            return True
        down, across = (self.grid.extent_um(span, axis) for axis, span in enumerate((rows, columns)))
        return self._near.touches(down.start, across.start, down.size, across.size)

    def _blank_glass(self, tile: Tile) -> Tile:
        """Away from tissue there is nothing, whether a tile happens to reach there or not."""
        if self._near is None:
            return tile
        down, across = (self.grid.places_um(span, axis) for axis, span in enumerate(tile.around))
        near = self._near.at(down, across)
        if near.all():
            return tile
        nothing = np.array(self.model.task.nothing, np.float32)[:, None, None]
        spread = None if tile.deviations is None else np.where(near, tile.deviations, np.float32(0))
        return tile._replace(probabilities=np.where(near, tile.probabilities, nothing), deviations=spread)

    def _mean_of_cells(self, tile: Tile, values: Map) -> Map:
        """Means over the cells of a heat map, of the part of a map that is the tile's own."""
        means = values[tile.core].astype(np.float64)
        for axis in (0, 1):
            starts = np.arange(0, means.shape[axis], self._cell)
            counts = np.minimum(self._cell, means.shape[axis] - starts)
            means = np.add.reduceat(means, starts, axis=axis) / np.expand_dims(counts, 1 - axis)
        return means.astype(np.float32)
