"""A trained network over a whole slide: objects as they are found, a heat map, and a summary.

In: a network with its operating point, and an open slide. Out: one pass over the tissue; memory does not grow with the
slide, since maps and what tiles cut apart wait in files of a folder that the caller gives.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath.images import Slide, Tissue, find_tissue
from rotopath.images.geojson import SlideObject
from rotopath.images.stain import Stain
from rotopath.inference.canvas import Canvas
from rotopath.inference.dense import TILE_PX
from rotopath.inference.layout import Span
from rotopath.inference.preparing import MixedNetwork
from rotopath.inference.tiles import Grid, Tile, predict_tiles
from rotopath.models import DenseNetwork

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
class Options:
    """How a slide is looked at."""

    rotations: int = 1  # of every tile, over which probabilities are averaged, and their deviation is computed
    tile_px: int | None = None
    everywhere: bool = False  # also where there seems to be no tissue


class SlidePass:
    """One pass over a slide. Ask for `objects` first, to the end; maps and numbers are complete after that."""

    def __init__(self, model: Model, slide: Slide, folder: Path, options: Options) -> None:
        self.model, self.slide, self.options = model, slide, options
        task = model.task
        self.tissue: Tissue = find_tissue(slide)
        self._near = None if options.everywhere else self.tissue.widened(task.margin_um)
        self.canvas = Canvas(slide, task.spacing_um_px, task.stain, self.tissue)
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
