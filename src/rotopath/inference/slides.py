"""A trained network over a whole slide: objects as they are found, a heat map, and a summary.

In: a network with its operating point, and an open slide. Out: one pass over the tissue; memory does not grow with the
slide, since maps and what tiles cut apart wait in files of a folder that the caller gives.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from rotopath.data.collection import Task
from rotopath.images import Slide, Tissue, find_tissue
from rotopath.images.geojson import SlideObject
from rotopath.images.tissue import SPACING_UM_PX
from rotopath.inference.canvas import Canvas
from rotopath.inference.dense import TILE_PX
from rotopath.inference.finding import CELLS, FINDERS, HALOS, blank, deviation, foreground, heat, output_frame
from rotopath.inference.layout import Span
from rotopath.inference.preparing import MixedNetwork
from rotopath.inference.tiles import Grid, Tile, predict_tiles
from rotopath.models import Network

MARGIN_UM = 32  # around tissue, so that no object at its edge is cut
TILE_PX_OF_GPUS = 2 * TILE_PX  # of smaller ones a GPU would wait for Python, which launches kernels one by one
Seen = Callable[[int, int], None]  # told how many tiles are done, and how many there are


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
    """What is applied: a network in eval mode on its device, and the operating point of its task."""

    task: Task
    network: Network
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

    rotations: int = 1  # of every tile, over which probabilities are averaged, and their deviation is told
    tile_px: int | None = None
    everywhere: bool = False  # also where there seems to be no tissue


class SlidePass:
    """One pass over a slide. Ask for `objects` first, to the end; maps and numbers are complete after that."""

    def __init__(self, model: Model, slide: Slide, folder: Path, options: Options) -> None:
        self.model, self.slide, self.options = model, slide, options
        self.tissue: Tissue = _all_of(slide) if options.everywhere else find_tissue(slide)
        self._near = self.tissue.widened(MARGIN_UM)
        self.canvas = Canvas(slide, model.task, self.tissue)
        cell = CELLS[model.task]
        self.grid = Grid(model.network, self.canvas, options.tile_px or model.tile_px, HALOS[model.task], cell)
        self._finder = FINDERS[model.task](self.grid, model.point, folder)
        rows, columns = (-(-size // cell) for size in self.grid.size)
        self.heat = MapFile(folder / "heat", (rows, columns))
        self.deviation = MapFile(folder / "deviation", (rows, columns)) if options.rotations > 1 else None
        self.cell_um = cell * self.grid.stride_px * self.canvas.spacing_um_px  # the side of a heat map's pixel
        self._count, self._area_mm2 = 0, 0.0

    def objects(self, seen: Seen = lambda _done, _all: None) -> Iterator[SlideObject]:
        """Everything that is found, as it is found; the summary is of what was read."""
        self._count, self._area_mm2 = 0, 0.0
        for one in self._find(seen):
            self._count += 1
            self._area_mm2 += one.measurements.get("area_mm2", 0.0)
            yield one

    def summary(self) -> dict[str, float]:
        """What is told about the slide in a few numbers; densities are per area of tissue."""
        tissue_mm2 = self.tissue.area_mm2
        told: dict[str, float] = {"tissue_mm2": tissue_mm2, "objects": self._count}
        if self.model.task == "tumor":
            share = self._area_mm2 / tissue_mm2 if tissue_mm2 else 0.0
            return told | {"tumor_mm2": self._area_mm2, "tumor_share": min(1.0, share)}
        name = {"mitosis": "mitoses", "nuclei": "nuclei"}[self.model.task]
        return told | {f"{name}_per_mm2": self._count / tissue_mm2 if tissue_mm2 else 0.0}

    def _find(self, seen: Seen) -> Iterator[SlideObject]:
        wanted = [tile for tile in self.grid.tiles if self._is_wanted(*tile)]
        cell = CELLS[self.model.task]
        tiles = predict_tiles(self.grid, wanted, self.model.device, self.options.rotations)
        for done, tile in enumerate(map(self._blank_glass, tiles), 1):
            self.heat.write(*heat(tile, foreground(tile.probabilities), cell))
            if self.deviation is not None and (spread := deviation(tile)) is not None:
                self.deviation.write(*heat(tile, spread, cell))
            yield from self._finder.take(tile)
            seen(done, len(wanted))
        yield from self._finder.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.heat.close()
        if self.deviation is not None:
            self.deviation.close()

    def _is_wanted(self, rows: Span, columns: Span) -> bool:
        down, across = (self.grid.extent_um(span, axis) for axis, span in enumerate((rows, columns)))
        return self._near.touches(down.start, across.start, down.size, across.size)

    def _blank_glass(self, tile: Tile) -> Tile:
        """Away from tissue there is nothing, whether a tile happens to reach there or not."""
        down, across = (self.grid.places_um(span, axis) for axis, span in enumerate(tile.around))
        near = self._near.at(down, across)
        if near.all():
            return tile
        spread = None if tile.deviations is None else np.where(near, tile.deviations, np.float32(0))
        return tile._replace(probabilities=blank(tile.probabilities, ~near), deviations=spread)


def heat_frame(one: SlidePass) -> tuple[tuple[float, float], float]:
    """Where the heat map's first corner lies on level 0, and the side of its pixels there."""
    corner, side = output_frame(one.grid)
    return corner, side * CELLS[one.model.task]


def _all_of(slide: Slide) -> Tissue:
    return Tissue(np.ones(slide.size_at(SPACING_UM_PX), bool), SPACING_UM_PX)
