"""A network's answers all over a canvas, tile by tile: threads read ahead while the network works.

In: a network, a canvas, and which places are worth a look. Out: tiles, row by row; memory holds a few of them.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.inference.canvas import Canvas
from rotopath.inference.dense import TILE_PX, Activate, activate, expect_eval, predict_frame, reach_px
from rotopath.inference.layout import Layout, Span, cover, divide, lay_out
from rotopath.models import DenseNetwork

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
        self, network: DenseNetwork, canvas: Canvas, tile_px: int | None = None, halo: int = 0, multiple: int = 1
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
