"""Objects on a slide, found tile by tile: the same however the slide is cut.

In: tiles of a network's answers. Out: objects in pixels of level 0: regions with tumor, places of mitoses, outlines of
nuclei; and what a heat map shows of a tile.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.collection import Task
from rotopath.data.nuclei import BACKGROUND
from rotopath.images.geojson import Point, SlideObject
from rotopath.images.outlines import trace_outlines
from rotopath.inference.seams import Seams
from rotopath.inference.tiles import Grid, Tile
from rotopath.tasks import mitosis, nuclei
from rotopath.tasks.prediction import Prediction

# Colours that colour-blind people can tell apart, on pink and purple tissue.
COLORS: Mapping[Task, tuple[int, int, int]] = {
    "mitosis": (0, 114, 178),
    "nuclei": (0, 158, 115),
    "tumor": (230, 159, 0),
}
Map = NDArray[np.float32]


class Finder(Protocol):
    """Takes tiles as they come, and knows objects once enough of them are there."""

    def __init__(self, grid: Grid, point: Mapping[str, float], folder: Path) -> None: ...
    def take(self, tile: Tile) -> Iterator[SlideObject]: ...
    def finish(self) -> Iterator[SlideObject]: ...


def foreground(maps: Map) -> Map:
    """What a network looks for, (h, w), of all its classes (K, h, w)."""
    found: Map = maps[0] if len(maps) == 1 else 1 - maps[BACKGROUND]
    return found


def blank(maps: Map, where: NDArray[np.bool_]) -> Map:
    """Maps (K, h, w) that say nothing at some places: no foreground, and surely background."""
    nothing = np.zeros(len(maps), np.float32)
    if len(maps) > 1:
        nothing[BACKGROUND] = 1
    return np.where(where, nothing[:, None, None], maps)


def deviation(tile: Tile) -> Map | None:
    """Of the foreground, over rotations; background is what is left of it, and deviates as much."""
    if tile.deviations is None:
        return None
    found: Map = tile.deviations[0 if len(tile.deviations) == 1 else BACKGROUND]
    return found


class TumorFinder:
    """Connected regions in which the probability reaches the threshold, with their holes."""

    def __init__(self, grid: Grid, point: Mapping[str, float], folder: Path) -> None:
        del folder  # a map with one output in 12 × 12 px needs no files
        self._grid, self._threshold = grid, point["threshold"]
        self._map, self._deviation = (np.zeros(grid.size, np.float32) for _ in range(2))

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        place = (slice(*tile.rows), slice(*tile.columns))
        self._map[place] = foreground(tile.probabilities)[tile.core]
        if (spread := deviation(tile)) is not None:
            self._deviation[place] = spread[tile.core]
        yield from ()

    def finish(self) -> Iterator[SlideObject]:
        grid = self._grid
        regions, count = ndimage.label(self._map >= self._threshold)
        numbers = np.arange(1, count + 1)
        probability, spread = (ndimage.mean(one, regions, numbers) for one in (self._map, self._deviation))
        cell_um = grid.stride_px * grid.canvas.spacing_um_px
        areas = np.bincount(regions.ravel(), minlength=count + 1)[1:] * cell_um**2 / 1e6
        for number, parts in trace_outlines(regions, *output_frame(grid)).items():
            measured = {"area_mm2": areas[number - 1], "probability": probability[number - 1]}
            if self._deviation.any():
                measured["deviation"] = spread[number - 1]
            yield SlideObject(parts, "annotation", "Tumor", COLORS["tumor"], measured)


class MitosisFinder:
    """Peaks of the smoothed map; those of one figure are merged in the end, wherever tiles cut it."""

    def __init__(self, grid: Grid, point: Mapping[str, float], folder: Path) -> None:
        del folder  # figures are few
        self._grid, self._point = grid, point
        self._found: list[tuple[float, float, float, float]] = []  # row and column on the canvas, score, deviation
        self._turned = False

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        first = tuple(
            self._grid.first_px[axis] + span.start * self._grid.stride_px for axis, span in enumerate(tile.around)
        )
        seen = Prediction(tile.probabilities, self._grid.stride_px, (first[0], first[1]))
        peaks = mitosis.find_peaks(seen, self._point)
        spread = deviation(tile)
        for place, score in zip(peaks.places, peaks.scores, strict=True):
            # Halves are rounded up in every tile, so that each peak is one tile's.
            row, column = np.floor((place - self._grid.first_px) / self._grid.stride_px + 0.5).astype(int)
            if tile.rows.start <= row < tile.rows.stop and tile.columns.start <= column < tile.columns.stop:
                scatter = (
                    0.0 if spread is None else float(spread[row - tile.around[0].start, column - tile.around[1].start])
                )
                self._found.append((*place.tolist(), float(score), scatter))
        self._turned = spread is not None
        yield from ()

    def finish(self) -> Iterator[SlideObject]:
        found = np.array(sorted(self._found), np.float64).reshape(-1, 4)  # in an order that tiles have no part in
        scatter_at = {tuple(place): scatter for *place, _, scatter in found.tolist()}
        merged = mitosis.merge(mitosis.Detections(found[:, :2], found[:, 2]))
        for place, score in zip(merged.places, merged.scores, strict=True):
            measured = {"score": float(score)}
            if self._turned:
                measured["deviation"] = scatter_at[tuple(place.tolist())]
            row, column = (place + 0.5) * self._grid.canvas.level0_px
            yield SlideObject(Point(row, column), "annotation", "Mitosis", COLORS["mitosis"], measured)


class NucleiFinder:
    """Nuclei are grown within connected regions that are no background, each of which is decoded whole."""

    def __init__(self, grid: Grid, point: Mapping[str, float], folder: Path) -> None:
        self._grid, self._point = grid, point
        nothing = blank(np.zeros((grid.network.architecture.outputs, 1, 1), np.float32), np.ones((1, 1), bool))
        self._nothing = np.concatenate([nothing, np.zeros((1, 1, 1), np.float32)])  # the last one is the deviation
        self._seams = Seams(grid.size, self._nothing.ravel().tolist(), folder)
        self._turned = False

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        spread = deviation(tile)
        self._turned = spread is not None
        last = np.zeros_like(tile.probabilities[0]) if spread is None else spread
        values = np.concatenate([tile.probabilities, last[None]])
        mask = values[BACKGROUND] < self._point["background"]
        whole = self._seams.take(tile.rows, tile.columns, mask, values)
        yield from self._decode(np.where(whole, values, self._nothing), tile.rows.start, tile.columns.start)

    def finish(self) -> Iterator[SlideObject]:
        for region in self._seams.finish():
            yield from self._decode(region.values, region.top, region.left)

    def _decode(self, values: Map, top: int, left: int) -> Iterator[SlideObject]:
        labels = nuclei.decode(Prediction(values[:-1], self._grid.stride_px, (0, 0)), self._point)
        numbers = np.arange(1, labels.max() + 1)
        probability = ndimage.mean(foreground(values[:-1]), labels, numbers)
        spread = ndimage.mean(values[-1], labels, numbers)
        areas = np.bincount(labels.ravel(), minlength=len(numbers) + 1)[1:] * self._grid.canvas.spacing_um_px**2
        for number, parts in trace_outlines(labels, *output_frame(self._grid, top, left), fill_holes=True).items():
            measured = {"area_um2": areas[number - 1], "probability": probability[number - 1]}
            if self._turned:
                measured["deviation"] = spread[number - 1]
            yield SlideObject(parts, "detection", "Nucleus", COLORS["nuclei"], measured)


FINDERS: Mapping[Task, type[Finder]] = {"mitosis": MitosisFinder, "nuclei": NucleiFinder, "tumor": TumorFinder}
HALOS: Mapping[Task, int] = {"mitosis": mitosis.PEAK_REACH, "nuclei": 0, "tumor": 0}  # outputs to see around a tile
CELLS: Mapping[Task, int] = {"mitosis": 1, "nuclei": 16, "tumor": 1}  # outputs along a side of a heat map's pixel


def heat(tile: Tile, maps: Map, cell: int) -> tuple[int, int, Map]:
    """Means over cells of a map of the tile, and the first row and column of cells."""
    values = maps[tile.core].astype(np.float64)
    for axis in (0, 1):
        starts = np.arange(0, values.shape[axis], cell)
        counts = np.minimum(cell, values.shape[axis] - starts)
        values = np.add.reduceat(values, starts, axis=axis) / np.expand_dims(counts, 1 - axis)
    return tile.rows.start // cell, tile.columns.start // cell, values.astype(np.float32)


def output_frame(grid: Grid, top: int = 0, left: int = 0) -> tuple[tuple[float, float], float]:
    """Where the first output's corner lies on level 0, and how many pixels of that an output has along a side."""
    row, column = (
        ((start - 0.5) * grid.stride_px + first + 0.5) * grid.canvas.level0_px
        for start, first in zip((top, left), grid.first_px, strict=True)
    )
    return (row, column), grid.stride_px * grid.canvas.level0_px
