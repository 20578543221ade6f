"""Cut images and slides into overlapping tiles, and run a network on them.

- Output: one position of the map that the network returns, with K logits or probabilities. Neighboring outputs are one
  stride apart.
- Tile: a rectangle of outputs.
- Overlap: the pixels around a tile that the network reads in addition to the pixels of the tile, because an output
  depends on pixels around its position (the receptive field). With the overlap, the outputs of a tile are the same as
  for the whole image.
- Frame: a rectangle of pixels with sides that are valid for the network: `smallest_px` plus a multiple of `step_px`.
  Frames may extend beyond the image, which is reflected there.
- Block: the outputs that are added along a side of a frame if this side becomes longer by `step_px`. A frame always
  contains complete blocks.
- Rim: outputs along the edges of a frame that depend on the padding of the network's layers. They are computed but not
  used, except at the edges of the image.
- Halo: outputs around a tile that are returned with the tile, because objects near the border of the tile depend on
  them.

`Geometry` has the sizes of frames, blocks and the rim. The task defines the halo. With several rotations (test-time
augmentation), each frame is rotated and predicted, the maps are rotated back, and the results are averaged.
"""

import gc
import math
import os
import pickle
import signal
import sys
import time
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from io import FileIO
from mmap import mmap
from multiprocessing import parent_process
from pathlib import Path
from threading import Lock, Thread, local
from typing import Any, NamedTuple, Protocol, TypeVar, cast
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rotopath import group
from rotopath.data.dataset import DataError
from rotopath.environment import count_cores, limit_processes, worker_context
from rotopath.group.rotation import SPLINE_REACH
from rotopath.models import DenseNetwork, Geometry
from rotopath.nn import center_crop
from rotopath.writing import temporary_folder

LARGE_BYTES = 2**16  # arrays of at least this size are handed to other processes in blocks of memory
ALIGNMENT = 64  # in these blocks, arrays start at multiples of this number of bytes
TILE_PX = 1024  # default for the largest side that a network reads at once; with 8 orientations this needs about 1.5 GB
SWITCH_S = 5e-4  # time after which a thread lets other threads use Python
READERS = min(16, max(2, count_cores()))  # threads that read the next tiles; each needs a few megabytes for a tile


class Span(NamedTuple):
    """A range of rows or columns, in pixels or outputs, from `start` to `stop` - 1.

    A span may extend beyond the image.
    """

    start: int
    stop: int

    def widened(self, by: int) -> "Span":
        """Return the span extended by `by` pixels or outputs at both ends, or shortened if `by` is negative."""
        return Span(self.start - by, self.stop + by)

    def shifted(self, by: int) -> "Span":
        """Return the span with `by` added to `start` and `stop`."""
        return Span(self.start + by, self.stop + by)

    def within(self, whole: "Span") -> slice:
        """Return the slice of this span in an array whose rows or columns are those of the larger span `whole`."""
        return slice(self.start - whole.start, self.stop - whole.start)

    @property
    def size(self) -> int:
        return self.stop - self.start


Pixels = NDArray[np.uint8]
Frame = tuple[Span, Span]  # rows and columns of a frame, in pixels of the image
ReadPixels = Callable[[Span, Span], Tensor]  # reads rows and columns as pixels (B, 3, h, w), reflected beyond edges
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Generator[Any]]  # calls a function for each item, like `map`
Activation = Callable[[Tensor], Tensor]  # from logits (B, K, h, w) to probabilities of the same shape
Item = TypeVar("Item")
Predict = Callable[[Tensor], Tensor]  # from the pixels of a frame (B, 3, H, W) to probabilities (B, K, h, w)


# Outputs along one side of an image


@dataclass(frozen=True)
class Layout:
    """Positions of the outputs of a network along one side (height or width) of an image.

    The frame is the range of pixels that the network reads to predict the whole image. The frame extends beyond both
    edges of the image by the same number of pixels, or by one pixel more beyond the bottom or right edge.
    """

    frame_px: Span  # the frame; pixel 0 is the first pixel of the image
    outputs: int  # number of outputs in the frame
    kept: Span  # outputs that are on the image, counted from the first output of the frame
    first_px: float  # position on the image of the first kept output; the center of the first pixel is at 0

    def frame_of(self, geometry: Geometry, outputs: Span) -> Span:
        """Return the range of pixels that the network reads to compute a range of outputs.

        `outputs` are counted from the first output of the frame, and must consist of complete blocks.
        """
        stride = geometry.stride_px
        pixels = Span(outputs.start * stride, outputs.stop * stride + geometry.margins_px)
        return pixels.shifted(self.frame_px.start)


def lay_out(geometry: Geometry, size_px: int) -> Layout:
    """Return the layout of the outputs along an image side of `size_px` pixels. The outputs cover the whole side.

    >>> from rotopath.inference.tiling import lay_out
    >>> from rotopath.models import Geometry
    >>> lay_out(Geometry(outputs=1, smallest_px=88, step_px=12, stride_px=12), 100)
    Layout(frame_px=Span(start=-42, stop=142), outputs=9, kept=Span(start=0, stop=9), first_px=1.5)
    """
    frame_size = geometry.nearest_sizes(size_px + geometry.margins_px)[-1]
    # The frame is centered on the image, so that the frame of a rotated image is the rotated frame. The two
    # centers are half a pixel apart if the number of added pixels is odd.
    before = (frame_size - size_px) // 2
    outputs, stride = geometry.output_size(frame_size), geometry.stride_px
    first = (frame_size - 1 - (outputs - 1) * stride) / 2 - before
    positions = first + stride * np.arange(outputs)
    on_image = np.flatnonzero((positions >= -0.5) & (positions <= size_px - 0.5))
    kept = Span(int(on_image[0]), int(on_image[-1]) + 1)
    return Layout(Span(-before, frame_size - before), outputs, kept, float(positions[kept.start]))


def divide(
    geometry: Geometry, wanted: Span, outputs: int, tile_px: int, multiple: int = 1
) -> Iterator[tuple[Span, Span]]:
    """Divide the range `wanted` of outputs along an image side into tiles whose frames are at most `tile_px` long.

    `outputs` is the number of all outputs along the side. Yields two spans for each tile: the outputs of the tile, and
    the outputs that the network has to compute for this tile. The second span also contains the outputs that
    `add_overlap` adds: those that complete the blocks of the tile, and the rim. All tiles except the last have the same
    number of outputs, a multiple of `multiple`. If a tile of `multiple` outputs needs more than `tile_px` pixels, tiles
    have `multiple` outputs, and longer frames. Raises ValueError if `tile_px` is smaller than the network's smallest
    image.
    """
    if tile_px < geometry.smallest_px:
        raise ValueError(
            f"The tile size is {tile_px} px, but the network needs tiles of at least {geometry.smallest_px} px; pass a "
            f"larger tile_px."
        )
    if outputs * geometry.stride_px + geometry.margins_px <= tile_px:
        yield wanted, Span(0, outputs)  # one tile covers the whole side
        return
    block = geometry.block
    # If tiles do not consist of complete blocks, `add_overlap` extends them by up to block - 1 outputs at each end.
    unaligned = 0 if wanted.start % block == multiple % block == 0 else 2 * (block - 1)
    largest = geometry.output_size(geometry.nearest_sizes(tile_px)[0]) - 2 * _rim(geometry) - unaligned
    step = max(multiple, largest - largest % multiple)
    for start in range(wanted.start, wanted.stop, step):
        tile = Span(start, min(start + step, wanted.stop))
        yield tile, add_overlap(geometry, tile, outputs)


def add_overlap(geometry: Geometry, tile: Span, outputs: int) -> Span:
    """Return the range of outputs that the network has to compute for `tile`, a range of outputs along an image side.

    The tile is extended to complete blocks, and then by the rim (the outputs that padding affects), but not beyond the
    first and the last output of the image side. The values of the tile's outputs are then the same as for the whole
    image. `outputs` is the number of all outputs along the side.
    """
    block, rim = geometry.block, _rim(geometry)
    start, stop = tile.start // block * block, -(-tile.stop // block) * block
    return Span(max(0, start - rim), min(outputs, stop + rim))


def _rim(geometry: Geometry) -> int:
    """Return the width of the network's rim in outputs, rounded up to complete blocks."""
    return -(-geometry.rim // geometry.block) * geometry.block


# Frames


def activate(logits: Tensor) -> Tensor:
    """Convert logits (B, K, h, w) to probabilities of the same shape: sigmoid if K = 1, else softmax over K."""
    return logits.sigmoid() if logits.shape[1] == 1 else logits.softmax(dim=1)


@torch.no_grad()
def compute_probabilities(network: DenseNetwork, images: Tensor, activation: Activation = activate) -> Tensor:
    """Run the network once on images (B, 3, H, W) without gradients; return probabilities (B, K, h, w) in float32."""
    return activation(network(images)).float()


def expect_eval(network: DenseNetwork) -> None:
    """Raise a ValueError if the network is in training mode."""
    if network.training:
        raise ValueError(
            "The network is in training mode, in which predictions depend on the other images of a batch; call "
            "network.eval() first."
        )


def predict_frame(
    geometry: Geometry, predict: Predict, read_pixels: ReadPixels, frame: Frame, angle: float, refinement: int = 1
) -> Tensor:
    """Rotate a frame by an angle, predict the rotated frame, rotate the maps (B, K, h, w) back, and return them.

    The angle is in degrees, counter-clockwise. `frame` has the rows and the columns of the frame. `read_pixels` is the
    function that reads rows and columns of the image. `predict` is the function that computes the maps from the pixels
    of a frame; neighboring outputs of these maps are stride / `refinement` pixels apart. Rotations by multiples of 90°
    are exact. Other rotations interpolate, and read a larger area (`area_to_read`), so that the corners of the rotated
    frame contain pixels of the image. The mean of the maps over several angles is test-time augmentation.
    """
    between = angle % 90  # only this part of the rotation interpolates; the rest is a multiple of 90°
    if between == 0:
        return group.rotate(predict(group.rotate(read_pixels(*frame), angle)), -angle).clamp(0, 1)
    wide = _widen_for_rotation(geometry, frame)
    rotated = group.rotate(_read_rotated(geometry, read_pixels, wide, between), angle - between)
    maps = group.rotate(group.rotate(predict(rotated), between - angle), -between).clamp(0, 1)  # splines may overshoot
    return center_crop(maps, *((geometry.output_size(span.size) - 1) * refinement + 1 for span in frame))


def area_to_read(geometry: Geometry, frame: Frame, degrees: Sequence[float]) -> Frame:
    """Return the rows and columns of pixels that `predict_frame` reads to predict a frame at all angles `degrees`."""
    if all(angle % 90 == 0 for angle in degrees):
        return frame
    rows, columns = (span.widened(_corner_reach_px(geometry)) for span in _widen_for_rotation(geometry, frame))
    return rows, columns


def predict_in_tiles(
    network: DenseNetwork, frame: Tensor, largest_px: int, activation: Activation = activate
) -> Tensor:
    """Predict a frame (B, 3, H, W), and return probabilities (B, K, h, w).

    If a side of the frame is longer than `largest_px`, the frame is predicted in tiles.
    """
    geometry = network.geometry
    stride, margins = geometry.stride_px, geometry.margins_px
    height, width = (geometry.output_size(size) for size in frame.shape[-2:])
    maps = torch.empty(len(frame), geometry.outputs, height, width, device=frame.device)
    for rows, all_rows in divide(geometry, Span(0, height), height, largest_px, geometry.block):
        for columns, all_columns in divide(geometry, Span(0, width), width, largest_px, geometry.block):
            down, across = (slice(first * stride, last * stride + margins) for first, last in (all_rows, all_columns))
            tile = compute_probabilities(network, frame[..., down, across], activation)
            maps[..., slice(*rows), slice(*columns)] = tile[..., rows.within(all_rows), columns.within(all_columns)]
    return maps


def _widen_for_rotation(geometry: Geometry, frame: Frame) -> Frame:
    """Return a larger frame, with the same center, for rotations that interpolate.

    If the larger frame is rotated by any angle, its outputs cover all outputs of the given frame.
    """
    step, stride = geometry.step_px, geometry.stride_px
    counts = [geometry.output_size(span.size) for span in frame]
    # The diagonal of the rectangle of outputs, plus the outputs around it that spline interpolation reads.
    diagonal_px = (math.hypot(*counts) + 2 * SPLINE_REACH) * stride
    rows, columns = (
        span.widened(math.ceil((diagonal_px - count * stride) / (2 * step)) * step)
        for span, count in zip(frame, counts, strict=True)
    )
    return rows, columns


def _corner_reach_px(geometry: Geometry) -> int:
    """Return the largest number of pixels by which corners of rotated receptive fields extend beyond a frame."""
    field_px = geometry.smallest_px
    return (group.covering_size(field_px) - field_px) // 2 + geometry.step_px + SPLINE_REACH


def _read_rotated(geometry: Geometry, read_pixels: ReadPixels, frame: Frame, angle: float) -> Tensor:
    """Rotate an image about the center of a frame, and return the pixels (B, 3, h, w) of the frame, from 0 to 1.

    `angle` is in degrees (0 to 90), counter-clockwise. `read_pixels` is the function that reads rows and columns of the
    image.
    """
    rows, columns = frame
    reach_px = _corner_reach_px(geometry)
    pixels = read_pixels(rows.widened(reach_px), columns.widened(reach_px))
    rotated = group.rotate(pixels.to(torch.float32) / 255, angle).clamp(0, 1)
    return center_crop(rotated, rows.size, columns.size)


# Tiles of a slide


class Stopwatch:
    """Measures how many seconds each stage of a prediction takes.

    Several threads may measure the same stage at once. Their seconds are added, so that the sum can exceed the time
    that has passed. If a stage is measured inside another stage, its seconds do not count for the outer stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)  # by name of the stage
        self._lock = Lock()
        self._inner = local()  # per thread: seconds of the stages inside of the current stage

    def __reduce__(self) -> tuple[type["Stopwatch"], tuple[()]]:
        return Stopwatch, ()  # another process starts at 0

    def add(self, seconds: Mapping[str, float]) -> None:
        """Add seconds that another process has measured, by name of the stage."""
        with self._lock:
            for stage, value in seconds.items():
                self.seconds[stage] += value

    @contextmanager
    def measure(self, stage: str) -> Iterator[None]:
        """Context manager: add the seconds of its block to a stage."""
        outer, self._inner.seconds = getattr(self._inner, "seconds", 0.0), 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            with self._lock:
                self.seconds[stage] += elapsed - self._inner.seconds
            self._inner.seconds = outer + elapsed

    def watch(self, stage: str, items: Iterable[Item]) -> Generator[Item]:
        """Yield items, and add the seconds that it takes to make them to a stage."""
        iterator = iter(items)
        while True:
            with self.measure(stage):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item


class PixelSource(Protocol):
    """A slide or image at the pixel spacing of a network, such as `SlideView`.

    Several threads may read at once. To read in other processes, the object must be picklable.
    """

    @property
    def size_px(self) -> tuple[int, int]: ...
    @property
    def spacing_um_px(self) -> float: ...
    @property
    def level0_px(self) -> float:
        """Side of a pixel of this image, in pixels of level 0 of the slide."""

    @property
    def origin_px(self) -> tuple[int, int]:
        """Row and column of level 0 of the slide from which files count."""

    @property
    def stopwatch(self) -> Stopwatch:
        """Measures the stages of reading."""

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return the pixels (h, w, 3) of a rectangle. The image is reflected beyond its edges."""


class Tile(NamedTuple):
    """A tile with the maps of its outputs and its halo. Outputs are counted from the first output on the slide."""

    rows: Span  # rows of outputs in the tile, without its halo
    columns: Span  # columns of outputs in the tile, without its halo
    with_halo: tuple[Span, Span]  # rows and columns of the outputs in the maps below: the tile and its halo
    probabilities: NDArray[np.float32]  # (K, h, w): mean over rotations
    deviations: NDArray[np.float32] | None  # (K, h, w): standard deviation over rotations; None for one rotation
    pixels: NDArray[np.uint8] | None = None  # (h, w, 3): pixels at the positions of the outputs; None unless requested

    @property
    def core(self) -> tuple[slice, slice]:
        """Slices (rows, columns) that cut the tile, without its halo, out of the maps."""
        return self.rows.within(self.with_halo[0]), self.columns.within(self.with_halo[1])


class TileFrame(NamedTuple):
    """Rectangles of outputs and of pixels that belong to a tile, each as (rows, columns)."""

    with_halo: tuple[Span, Span]  # outputs of the tile and its halo
    outputs: tuple[Span, Span]  # outputs that the network computes: `with_halo`, and those that `add_overlap` adds
    pixels: Frame  # pixels that the network reads to compute these outputs


class Grid:
    """The grid of outputs of a network on a slide, and its division into tiles.

    `view` is the slide at the pixel spacing of the network. `tile_px` (default: 1024) is the largest side, in pixels,
    of the frame of a tile without its halo. If `tile_px` is smaller than `geometry.context_px`, or than the frame of a
    single heat-map pixel, the larger size is used. `halo` is the number of outputs added on each side of a tile.
    `multiple` is the side of a heat-map pixel, in outputs. Each tile starts at a multiple of this number, so that no
    heat-map pixel crosses a tile border.
    """

    def __init__(
        self, network: DenseNetwork, view: PixelSource, tile_px: int | None = None, halo: int = 0, multiple: int = 1
    ) -> None:
        self.network, self.view, self.halo = network, view, halo
        self.spacing_um_px, self.level0_px, self.origin_px = view.spacing_um_px, view.level0_px, view.origin_px
        self.tile_px = max(tile_px or TILE_PX, network.geometry.context_px)
        self.layouts = [lay_out(network.geometry, size) for size in view.size_px]
        self.size = tuple(layout.kept.size for layout in self.layouts)  # rows and columns of outputs on the slide
        self.stride_px = network.geometry.stride_px
        self.first_px = tuple(layout.first_px for layout in self.layouts)  # position (row, column) of the first output
        self._rows, self._columns = (
            [
                tile.shifted(-side.kept.start)
                for tile, _ in divide(network.geometry, side.kept, side.outputs, self.tile_px, multiple)
            ]
            for side in self.layouts
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "network": None, "view": None}  # other processes need neither of them

    @property
    def tiles(self) -> list[tuple[Span, Span]]:
        """The outputs (rows, columns) of all tiles, without halo, row by row."""
        return [(rows, columns) for rows in self._rows for columns in self._columns]

    def extent_um(self, outputs: Span, axis: int) -> Span:
        """Return the range in µm that a range of outputs covers on the slide; each output covers one stride.

        The range is measured from the top edge (axis 0) or the left edge (axis 1) of the slide, and extended to whole
        numbers.
        """
        edges = ((output - 0.5) * self.stride_px + self.first_px[axis] + 0.5 for output in outputs)
        start, stop = (edge * self.spacing_um_px for edge in edges)
        return Span(int(np.floor(start)), int(np.ceil(stop)))

    def positions_um(self, outputs: Span, axis: int) -> NDArray[np.float64]:
        """Return the center of each output in a range, in µm from the top edge (axis 0) or left edge (axis 1)."""
        positions_px = self.first_px[axis] + self.stride_px * np.arange(*outputs)
        return np.asarray((positions_px + 0.5) * self.spacing_um_px)

    def edges_um(self, axis: int) -> NDArray[np.float64]:
        """Return the edges of all outputs, which are one more than outputs, in µm as in `positions_um`."""
        edges_px = self.first_px[axis] + self.stride_px * (np.arange(self.size[axis] + 1) - 0.5)
        return np.asarray((edges_px + 0.5) * self.spacing_um_px)

    def output_frame(self, top: int = 0, left: int = 0) -> tuple[tuple[float, float], float]:
        """Return the square that an output covers: its top left corner (row, column), and its side (the stride).

        Corner and side are in pixels of level 0. `top` and `left` are the row and column of the output in the grid.
        """
        row, column = (
            ((start - 0.5) * self.stride_px + first + 0.5) * self.level0_px
            for start, first in zip((top, left), self.first_px, strict=True)
        )
        return (row, column), self.stride_px * self.level0_px

    def frame_of(self, rows: Span, columns: Span) -> TileFrame:
        """Return three rectangles: a tile with its halo, the outputs to compute for it, and the pixels to read for it.

        `rows` and `columns` are ranges of outputs: the tile without its halo, as in `tiles`.
        """
        geometry = self.network.geometry
        wide, computed, pixels = [], [], []
        for span, size, layout in zip((rows, columns), self.size, self.layouts, strict=True):
            with_halo = Span(max(0, span.start - self.halo), min(size, span.stop + self.halo))
            outputs = add_overlap(geometry, with_halo.shifted(layout.kept.start), layout.outputs)
            wide.append(with_halo)
            computed.append(outputs.shifted(-layout.kept.start))
            pixels.append(layout.frame_of(geometry, outputs))
        return TileFrame((wide[0], wide[1]), (computed[0], computed[1]), (pixels[0], pixels[1]))


def predict_tiles(
    grid: Grid,
    wanted: Iterable[tuple[Span, Span]],
    device: torch.device,
    rotations: int = 1,
    activation: Activation = activate,
    with_pixels: bool = False,
    run: Run | None = None,
) -> Generator[Tile]:
    """Predict the tiles `wanted`, which are all or some of `grid.tiles`, and yield them in the same order.

    With `rotations` above 1, tiles contain the mean (test-time augmentation) and the standard deviation over this
    number of rotations. With `with_pixels`, tiles contain the pixels at the positions of their outputs, as the network
    reads them. The network must be on `device`. Threads read the next tiles while the network computes or, if `run`
    calls functions in other processes, these processes. Only a few tiles are in memory at a time. Raises DataError if
    probabilities are not finite.
    """
    expect_eval(grid.network)
    degrees = group.angles(rotations)
    tiles = list(wanted)
    areas = [area_to_read(grid.network.geometry, grid.frame_of(*tile).pixels, degrees) for tile in tiles]
    with _start_readers(grid.view, run) as read:
        for (rows, columns), area, image in zip(tiles, areas, read(areas), strict=True):
            pixels = torch.from_numpy(image).permute(2, 0, 1)[None]
            tile = _predict_tile(grid, rows, columns, pixels.to(device), degrees, activation)
            yield tile._replace(pixels=_pick_pixels(grid, tile.with_halo, pixels, area)) if with_pixels else tile


@contextmanager
def _start_readers(view: PixelSource, run: Run | None) -> Iterator[Callable[[Iterable[Frame]], Iterator[Pixels]]]:
    """Context manager: yield a function that reads the pixels (h, w, 3) of rectangles of an image, in their order.

    Threads read ahead or, if `run` calls functions in other processes, these processes.
    """
    if run is None:
        with ThreadPoolExecutor(READERS) as pool:
            try:
                yield partial(_map_in_order, pool, READERS, lambda area: view.read(*area))
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        return
    read = partial(_read_in_worker, pickle.dumps(view))

    def read_all(areas: Iterable[Frame]) -> Iterator[Pixels]:
        with closing(run(read, areas)) as results:
            for pixels, seconds in results:
                view.stopwatch.add(seconds)
                yield pixels

    yield read_all


def _read_in_worker(view: bytes, area: Frame) -> tuple[Pixels, dict[str, float]]:
    """Return the pixels of a rectangle, and the seconds of each stage of reading. `view` is a pickled `PixelSource`."""
    opened = _open_view(view)
    before = dict(opened.stopwatch.seconds)
    pixels = opened.read(*area)
    return pixels, {stage: seconds - before.get(stage, 0) for stage, seconds in opened.stopwatch.seconds.items()}


@lru_cache(maxsize=1)
def _open_view(view: bytes) -> PixelSource:
    opened: PixelSource = pickle.loads(view)
    return opened


def read_tiles(
    grid: Grid,
    wanted: Iterable[tuple[Span, Span]],
    read_maps: Callable[[Span, Span], tuple[NDArray[np.float32], NDArray[np.float32] | None]],
    with_pixels: bool = False,
) -> Generator[Tile]:
    """Yield tiles like `predict_tiles`, but with stored maps in place of predicted ones.

    `read_maps` is the function that reads the probabilities (K, h, w), and the standard deviations or None, of a range
    of rows and of columns of outputs. It is called by threads.
    """

    def read(spans: tuple[Span, Span]) -> Tile:
        with_halo = grid.frame_of(*spans).with_halo
        tile = Tile(*spans, with_halo, *read_maps(*with_halo))
        if not with_pixels:
            return tile
        down, across = _find_pixels(grid, with_halo)
        area = Span(int(down[0]), int(down[-1]) + 1), Span(int(across[0]), int(across[-1]) + 1)
        pixels = torch.from_numpy(grid.view.read(*area)).permute(2, 0, 1)[None]
        return tile._replace(pixels=_pick_pixels(grid, with_halo, pixels, area))

    pool = ThreadPoolExecutor(READERS)
    try:
        yield from _map_in_order(pool, READERS, read, wanted)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _pick_pixels(grid: Grid, outputs: tuple[Span, Span], pixels: Tensor, area: Frame) -> NDArray[np.uint8]:
    """Return the pixels (h, w, 3) at the positions of outputs (rows, columns); between pixels, the nearest below right.

    `pixels` (1, 3, H, W) are the pixels of the slide in the rectangle `area`.
    """
    down, across = (indices - read.start for indices, read in zip(_find_pixels(grid, outputs), area, strict=True))
    image: NDArray[np.uint8] = pixels[0].permute(1, 2, 0).numpy()
    return pick(image, down, across)


def pick(image: NDArray[np.uint8], rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.uint8]:
    """Return the pixels of an image (H, W, 3) at all combinations of the given rows and columns.

    If the rows and the columns are evenly spaced, this is much faster than indexing with `np.ix_`, and other threads
    can run meanwhile.
    """
    slices = []
    for indices in (rows, columns):
        steps = np.diff(indices)
        if not len(steps) or steps[0] < 1 or (steps != steps[0]).any():
            return image[np.ix_(rows, columns)]
        slices.append(slice(int(indices[0]), int(indices[-1]) + 1, int(steps[0])))
    return np.ascontiguousarray(image[tuple(slices)])


def _find_pixels(grid: Grid, outputs: tuple[Span, Span]) -> tuple[NDArray[np.int64], ...]:
    """Return the rows and the columns of the pixels at the positions of outputs (rows, columns)."""
    return tuple(
        np.floor(first + grid.stride_px * np.arange(*span) + 0.5).astype(np.int64).clip(0, size - 1)
        for first, span, size in zip(grid.first_px, outputs, grid.view.size_px, strict=True)
    )


def _predict_tile(
    grid: Grid, rows: Span, columns: Span, pixels: Tensor, degrees: Sequence[float], activation: Activation
) -> Tile:
    """Predict one tile at all angles `degrees`, and return the mean and the standard deviation over the angles.

    `rows` and `columns` are ranges of outputs: the tile without its halo, as in `Grid.tiles`. `pixels` (1, 3, H, W)
    are the pixels of the slide in the area that `area_to_read` returns for the frame of this tile.
    """
    with_halo, outputs, frame = grid.frame_of(rows, columns)
    area = area_to_read(grid.network.geometry, frame, degrees)

    def read_pixels(rows_px: Span, columns_px: Span) -> Tensor:
        return pixels[..., rows_px.within(area[0]), columns_px.within(area[1])]

    # For multiples of 90°, the frame of a tile is predicted as a whole. For other angles, `predict_frame` widens the
    # frame, and the wide frame is predicted in tiles of the original size. The network thus needs the same memory at
    # all angles.
    largest_px = max(span.size for span in frame)

    def predict(rotated: Tensor) -> Tensor:
        return predict_in_tiles(grid.network, rotated, largest_px, activation)

    down, across = (span.within(computed) for span, computed in zip(with_halo, outputs, strict=True))
    rotations = (predict_frame(grid.network.geometry, predict, read_pixels, frame, angle) for angle in degrees)
    maps = torch.stack([probabilities[0, :, down, across] for probabilities in rotations])
    if not maps.isfinite().all():
        raise DataError(
            "The network predicted values that are not finite numbers: its weights are damaged, or its values are too "
            "large for 16-bit precision on a GPU. Use --precision 32, or restore the weights."
        )
    if len(degrees) == 1:
        return Tile(rows, columns, with_halo, maps[0].cpu().numpy(), None)
    deviations = maps.std(dim=0, correction=0).cpu().numpy()
    return Tile(rows, columns, with_halo, maps.mean(dim=0).cpu().numpy(), deviations)


# Other threads and processes


def compute_ahead(items: Generator[Item]) -> Generator[Item]:
    """Yield items from an iterator that runs in another thread, one item ahead.

    The other thread uses the current GPU of this thread; the first GPU is the current one of a new thread.
    """
    end = object()
    has_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    gpu = (torch.cuda.current_device(),) if has_gpu else ()
    with closing(items) as iterator, ThreadPoolExecutor(1, initializer=_use_gpu, initargs=gpu) as pool:
        waiting = pool.submit(next, iterator, end)
        while (item := waiting.result()) is not end:
            waiting = pool.submit(next, iterator, end)
            yield cast(Item, item)


def _use_gpu(gpu: int | None = None) -> None:
    if gpu is not None:
        torch.cuda.set_device(gpu)


class _Setting:
    """Context manager that changes a setting of Python while any thread is inside, and restores it after the last one.

    `change` changes the setting, and returns what `restore` needs to restore it.
    """

    def __init__(self, change: Callable[[], Any], restore: Callable[[Any], None]) -> None:
        self._change, self._restore = change, restore
        self._lock, self._inside, self._before = Lock(), 0, None

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._before = self._change()
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                self._restore(self._before)


def _switch_often() -> float:
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, SWITCH_S))
    return before


def _freeze_objects() -> bool:
    was_frozen = gc.get_freeze_count() > 0
    gc.freeze()
    return was_frozen


def _unfreeze_objects(was_frozen: bool) -> None:
    if not was_frozen:
        gc.unfreeze()


# Threads wait at most SWITCH_S for Python, in place of 5 ms, while another thread uses it. The thread that starts the
# computations of a GPU releases Python for each of them, and waits for it each time.
switch_threads_often = _Setting(_switch_often, sys.setswitchinterval)
# The search for garbage leaves out objects that exist now, such as those of imported packages. It would walk through
# all of them again and again, because workers send many small objects.
spare_old_objects = _Setting(_freeze_objects, _unfreeze_objects)


def run_here(function: Callable[[Any], Any], items: Iterable[Any]) -> Generator[Any]:
    """Yield the results of a function for all items, in their order. Unlike the result of `map`, this can be closed."""
    yield from map(function, items)


@contextmanager
def start_workers(count: int) -> Iterator[Run | None]:
    """Context manager: yield a function that is used like `map`, and computes in `count` other processes.

    The results have the order of the items. Functions, items and results must be picklable. Only a few items per
    process are computed ahead, in another thread; close the results if they may not be used to the end. Large arrays
    are handed over in blocks of memory, which are used again: a function must not keep the arrays of its items. If
    `count` is 0, None is yielded. Raises BrokenProcessPool if a process is killed.
    """
    if not count:
        yield None
        return
    count = limit_processes(count)
    with ExitStack() as stack:
        folder = stack.enter_context(temporary_folder())
        pool = ProcessPoolExecutor(count, worker_context(), initializer=_follow_parent)

        def run(function: Callable[[Any], Any], items: Iterable[Any]) -> Generator[Any]:
            blocks = stack.enter_context(closing(_Blocks(folder)))
            # Another thread packs the next item, because writing its arrays takes time.
            with closing(compute_ahead(_pack(item, blocks.take()) for item in items)) as parcels:
                for parcel in _map_in_order(pool, count + 2, partial(_call_in_worker, function), parcels):
                    yield _unpack(parcel)
                    blocks.give_back(parcel.block)
            blocks.clear()

        try:
            yield run
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


def _map_in_order(pool: Executor, limit: int, function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
    """Yield the results of a function for all items, in their order. At most `limit` items are computed ahead."""
    waiting: deque[Future[Any]] = deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) > limit:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


class _Parcel(NamedTuple):
    """A pickled object, whose large arrays are in a block of memory (`_Blocks`)."""

    content: bytes  # without the large arrays
    block: Path
    starts: tuple[int, ...]  # position of each large array in the block
    sizes: tuple[int, ...]  # of the large arrays, in bytes
    end: int  # position behind the last array


class _Blocks:
    """Blocks of memory through which large arrays are handed to other processes and back. They are used again.

    On Linux, a block is a file in memory: no disk limits it, nothing remains of it if this process is killed, and other
    processes open it by its path in /proc. Elsewhere, it is a file in `folder`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: list[FileIO] = []
        self._free: list[Path] = []

    def take(self) -> Path:
        """Return the path of a block that is not in use."""
        if self._free:
            return self._free.pop()
        if hasattr(os, "memfd_create"):
            file = FileIO(os.memfd_create("rotopath"), "w")
            path = Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
            if os.access(path, os.W_OK):
                self._files.append(file)
                return path
            file.close()  # /proc is hidden
        path = self._folder / uuid4().hex
        self._files.append(path.open("wb", buffering=0))
        return path

    def give_back(self, path: Path) -> None:
        """Let a block be used again. Arrays that are still mapped there will change."""
        self._free.append(path)

    def clear(self) -> None:
        """Free the memory of all blocks, none of which may be in use."""
        for file in self._files:
            file.truncate(0)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _call_in_worker(function: Callable[[Any], Any], parcel: _Parcel) -> _Parcel:
    """Call a function with the object of a parcel, whose arrays stay in their block. Pack its result behind them."""
    return _pack(function(_unpack(parcel, is_mapped=True)), parcel.block, parcel.end)


def _pack(item: object, block: Path, start: int = 0) -> _Parcel:
    """Pickle an object, and write its large arrays to a block, from the position `start`."""
    large: list[memoryview] = []

    def keep_inside(buffer: pickle.PickleBuffer) -> bool:
        if buffer.raw().nbytes < LARGE_BYTES:
            return True
        large.append(buffer.raw())
        return False

    content, starts = pickle.dumps(item, protocol=5, buffer_callback=keep_inside), []
    if large:
        with block.open("r+b", buffering=0) as file:
            for buffer in large:
                starts.append(file.seek(start))
                rest = buffer
                while rest:
                    rest = rest[file.write(rest) :]
                start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
    return _Parcel(content, block, tuple(starts), tuple(buffer.nbytes for buffer in large), start)


def _unpack(parcel: _Parcel, is_mapped: bool = False) -> Any:
    """Return the object of a parcel. If `is_mapped`, its arrays are those in the block, otherwise they are copies."""
    buffers: list[Any] = []
    if parcel.sizes and is_mapped:
        whole = _map_block(parcel.block, parcel.starts[-1] + parcel.sizes[-1])
        buffers = [whole[start : start + size] for start, size in zip(parcel.starts, parcel.sizes, strict=True)]
    elif parcel.sizes:
        with parcel.block.open("rb", buffering=0) as file:
            for start, size in zip(parcel.starts, parcel.sizes, strict=True):
                file.seek(start)
                buffers.append(np.empty(size, np.uint8))
                rest = buffers[-1].data
                while rest and (count := file.readinto(rest)):
                    rest = rest[count:]
    return pickle.loads(parcel.content, buffers=buffers)


_mapped: dict[Path, memoryview] = {}  # blocks of the process that started this one, by their paths


def _map_block(path: Path, size: int) -> memoryview:
    """Return the memory of a block, at least `size` bytes. It is mapped once, because new pages take time."""
    if len(_mapped.get(path, b"")) < size:
        with path.open("r+b", buffering=0) as file:
            _mapped[path] = memoryview(mmap(file.fileno(), 0))
    return _mapped[path]


def _follow_parent() -> None:
    """Leave Ctrl-C, which a terminal sends to all processes, to the process that started this one, and end with it.

    Without this, processes would wait for work forever if the process that started them was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.freeze()  # the objects of imported packages are never garbage; to search through them takes time
    Thread(target=_exit_after_parent, daemon=True).start()


def _exit_after_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
