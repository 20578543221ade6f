"""Keep large maps in files, and write maps and images as image pyramids.

`MapFile` is a temporary file of a map, which is written and read in rectangles. `MapWriter` writes the
outputs of a network to a compressed file, from which `StoredMap` reads any rectangle. `write_pyramid` writes a tiled
OME-TIFF file with several resolution levels. QuPath, Bio-Formats and `open_slide` read parts of these files
quickly. It reads a map or an image tile by tile: arrays (h, w) or (h, w, 3) of float32 or uint8, or label maps (h, w)
of uint32. Level 0 has the full resolution. Memory does not grow with the map. The pixels of the other levels are kept
in temporary files, which together need a third of the uncompressed size of level 0. Files are written atomically.
"""

import io
import json
import math
import tempfile
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import IO, Any, NamedTuple, Self
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
from numpy.typing import DTypeLike, NDArray
from tifffile import TiffWriter

from rotopath.environment import count_cores
from rotopath.images.files import UnreadableFileError, expect_file
from rotopath.writing import atomic_file, parse_json

TILE_PX = 512  # side of the square tiles
UM_PER_CM = 1e4
MAX_CLASSIC_BYTES = 2**31  # for a larger level 0, a BigTIFF is written: offsets in a classic TIFF have only 32 bits
SQUARE_PX = 128  # side of the squares of a `MapFile`: 64 kB
BLOCK_PX, CACHED_BLOCKS = 512, 24  # stored maps are compressed in blocks; 24 blocks of three channels need 75 MB
COMPRESSORS = min(16, max(4, count_cores()))  # number of threads that compress blocks and tiles
ABOUT, MASK = "about.json", "mask.npy"  # names of the other parts of a stored map
MAX_ABOUT_BYTES, MAX_MASK_BYTES = 2**20, 2**28  # a mask has a pixel for each 8 µm: 2**28 are over 100 cm²
Pixels = NDArray[Any]
# Reads pixels (h, w) or (h, w, 3) in a range of rows and of columns, each as (start, stop)
ReadPart = Callable[[tuple[int, int], tuple[int, int]], Pixels]


class _Band(NamedTuple):
    """The part of a rectangle of a `MapFile` that is in one row of squares."""

    position: int  # position in the file of the first of these squares
    squares: int  # number of squares, which are contiguous in the file
    inside: tuple[slice, slice]  # rows and columns of the part, in the pixels of these squares
    rows: slice  # rows of the part, in the rectangle


class MapFile:
    """A map (rows, columns) of numbers in a file, written in rectangles. Pixels that are never written are 0.

    Several threads may use it at once. The file is not mapped into memory: on a full disk, writing to memory would end
    the process with the signal SIGBUS, in place of an OSError. It consists of squares with a side of `SQUARE_PX`, row
    by row. Thus, few calls of the system read or write a rectangle: one for each row of squares.

    `file` is its path, or the open, unbuffered file, and `size` (rows, columns) may also be (rows, columns, 3) for
    colors. `dtype` is float32, or for example uint32 for label maps. On most file systems, parts that are never written
    need no space.
    """

    def __init__(self, file: Path | IO[bytes], size: tuple[int, ...], dtype: DTypeLike = np.float32) -> None:
        self.size = (size[0], size[1])
        self.dtype, self._channels = np.dtype(dtype), size[2:]
        down, self._across = (-(-side // SQUARE_PX) for side in self.size)  # numbers of squares
        self._square_bytes = self.dtype.itemsize * math.prod(self._channels) * SQUARE_PX**2
        self._file: Any = file.open("wb+", buffering=0) if isinstance(file, Path) else file
        self._file.truncate(self._square_bytes * down * self._across)
        self._lock = Lock()  # of the position in the file

    def write(self, top: int, left: int, values: NDArray[Any]) -> None:
        """Write values (h, w), with the first value at row `top` and column `left`."""
        with self._lock:
            for band in self._find_bands(top, left, values.shape):
                if band.inside == (slice(0, SQUARE_PX), slice(0, band.squares * SQUARE_PX)):
                    self._save(band, values[band.rows].astype(self.dtype, copy=False))
                    continue
                pixels = self._load(band)
                pixels[band.inside] = values[band.rows]
                self._save(band, pixels)

    def paint(self, top: int, left: int, values: NDArray[Any]) -> None:
        """Write the values (h, w) that are not 0; where they are 0, the map keeps its values."""
        rows, columns = np.flatnonzero(values.any(axis=1)), np.flatnonzero(values.any(axis=0))
        if not len(rows):
            return
        used = values[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        with self._lock:
            for band in self._find_bands(top + int(rows[0]), left + int(columns[0]), used.shape):
                pixels, new = self._load(band), used[band.rows]
                pixels[band.inside] = np.where(new != 0, new, pixels[band.inside])
                self._save(band, pixels)

    def read_part(self, rows: tuple[int, int], columns: tuple[int, int]) -> NDArray[Any]:
        """Return the values in a range of rows and of columns, each as (start, stop)."""
        part = np.empty((rows[1] - rows[0], columns[1] - columns[0], *self._channels), self.dtype)
        for band in self._find_bands(rows[0], columns[0], part.shape):
            with self._lock:
                pixels = self._load(band)
            part[band.rows] = pixels[band.inside]
        return part

    def read(self, top: int = 0, bottom: int | None = None) -> NDArray[Any]:
        """Return the rows of the map from `top` to `bottom` - 1; by default all rows."""
        return self.read_part((top, self.size[0] if bottom is None else min(bottom, self.size[0])), (0, self.size[1]))

    def read_subsampled(self, step: int) -> NDArray[Any]:
        """Return the values of the map in every `step`-th row and column, without reading the whole map at once."""
        return np.concatenate([strip[::step, ::step] for strip in self.strips(512 * step)])

    def strips(self, rows: int = 512) -> Iterator[NDArray[Any]]:
        """Yield the map from top to bottom in strips of `rows` rows. The last strip may have fewer rows."""
        for top in range(0, self.size[0], rows):
            yield self.read(top, top + rows)

    def close(self) -> None:
        self._file.close()

    def _find_bands(self, top: int, left: int, shape: tuple[int, ...]) -> Iterator[_Band]:
        """Yield the parts of a rectangle, whose shape is (h, w). Raises ValueError if it is not inside of the map."""
        bottom, right = top + shape[0], left + shape[1]
        if top < 0 or left < 0 or bottom > self.size[0] or right > self.size[1]:
            raise ValueError(f"The rectangle ({top}, {left}, {bottom}, {right}) is not in a map of {self.size} pixels.")
        if left == right:
            return
        first, stop = left // SQUARE_PX, -(-right // SQUARE_PX)
        columns = slice(left - first * SQUARE_PX, right - first * SQUARE_PX)
        for row in range(top // SQUARE_PX, -(-bottom // SQUARE_PX)):
            start, end = max(top, row * SQUARE_PX), min(bottom, (row + 1) * SQUARE_PX)
            inside = slice(start - row * SQUARE_PX, end - row * SQUARE_PX), columns
            position = (row * self._across + first) * self._square_bytes
            yield _Band(position, stop - first, inside, slice(start - top, end - top))

    def _load(self, band: _Band) -> NDArray[Any]:
        """Return the pixels of the squares of a band, from left to right."""
        squares = np.empty((band.squares, SQUARE_PX, SQUARE_PX, *self._channels), self.dtype)
        content = squares.data.cast("B")
        self._file.seek(band.position)
        while content:
            if not (count := self._file.readinto(content)):
                raise EOFError("The file of a map is shorter than the map.")
            content = content[count:]
        return np.concatenate(squares, axis=1)

    def _save(self, band: _Band, pixels: NDArray[Any]) -> None:
        """Write the pixels of the squares of a band, as `_load` returns them."""
        columns = pixels.reshape(SQUARE_PX, band.squares, SQUARE_PX, *self._channels)
        squares = np.ascontiguousarray(columns.swapaxes(0, 1))
        content = squares.data.cast("B")
        self._file.seek(band.position)
        while content:
            content = content[self._file.write(content) :]


class MapWriter:
    """Writes a map of several channels to a zip file, rectangle by rectangle, without any rounding.

    Use it in a `with` statement. The parts of the file are blocks, named by the row and the column of their first
    pixel, and by their numbers of channels, rows and columns, such as "0,512,3,512,512". A block contains float32
    numbers, compressed by zlib: first the first bytes of all numbers, then the second bytes, and so on, because bytes
    in this order need less space. "mask.npy" is a mask, and "about.json" states where the map comes from.
    """

    def __init__(self, path: Path) -> None:
        self._zip = ZipFile(path, "w")
        self._pool = ThreadPoolExecutor(COMPRESSORS)
        self._waiting: deque[tuple[str, Future[bytes]]] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _type: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        try:
            while self._waiting and error is None:
                self._write_block()
        finally:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._zip.close()

    def write(self, top: int, left: int, values: NDArray[np.float32]) -> None:
        """Write values (channels, h, w), with the first value at row `top` and column `left`.

        Rectangles must not overlap. Pixels that are never written are 0.
        """
        for row, column in product(*(range(0, size, BLOCK_PX) for size in values.shape[1:])):
            block = values[:, row : row + BLOCK_PX, column : column + BLOCK_PX]
            name = ",".join(map(str, (top + row, left + column, *block.shape)))
            self._waiting.append((name, self._pool.submit(_compress, block.astype("<f4"))))
            if len(self._waiting) > 2 * COMPRESSORS:
                self._write_block()

    def describe(self, about: Mapping[str, object], mask: NDArray[np.uint8]) -> None:
        """Write where the map comes from, and a mask (rows, columns) of any size."""
        self._zip.writestr(ABOUT, json.dumps(about))
        with io.BytesIO() as content:
            np.save(content, mask, allow_pickle=False)
            self._zip.writestr(MASK, content.getvalue(), compress_type=ZIP_DEFLATED)

    def _write_block(self) -> None:
        name, compressed = self._waiting.popleft()
        self._zip.writestr(name, compressed.result())


class StoredMap:
    """A map that `MapWriter` has written. Use it in a `with` statement. Several threads may read at once.

    `about` states where the map comes from, and `mask` is its mask. Raises UnreadableFileError if the file is damaged,
    here or later. The file may come from anyone: parts that are larger than those of `MapWriter` are not read.
    """

    def __init__(self, path: Path) -> None:
        expect_file(path)
        self._path = path
        with ExitStack() as stack:
            try:
                self._zip = stack.enter_context(ZipFile(path))
                self.about: dict[str, Any] = parse_json(self._read_part(ABOUT, MAX_ABOUT_BYTES))
                mask = np.load(io.BytesIO(self._read_part(MASK, MAX_MASK_BYTES)), allow_pickle=False)
                self.mask: NDArray[np.uint8] = mask
                self._names = [name for name in self._zip.namelist() if name not in (ABOUT, MASK)]
                self._frames = np.array([name.split(",") for name in self._names], np.int64).reshape(-1, 5)
                _, _, _, heights, widths = self._frames.T
                if not isinstance(self.about, dict) or mask.dtype != np.uint8 or (self._frames < 0).any():
                    raise ValueError("a part has another type than expected")
                if (np.maximum(heights, widths) > BLOCK_PX).any():
                    raise ValueError(f"a block is larger than {BLOCK_PX} × {BLOCK_PX}")
            except Exception as error:  # zipfile, zlib and NumPy raise errors of any type for damaged bytes
                raise self._damaged(error) from None
            stack.pop_all()
        self._read_block = lru_cache(CACHED_BLOCKS)(self._decompress)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._zip.close()

    def read(self, rows: tuple[int, int], columns: tuple[int, int], channels: int) -> NDArray[np.float32]:
        """Return the values (channels, h, w) in a range of rows and of columns, each as (start, stop)."""
        values = np.zeros((channels, rows[1] - rows[0], columns[1] - columns[0]), np.float32)
        tops, lefts, _, heights, widths = self._frames.T
        touches = (tops < rows[1]) & (tops + heights > rows[0]) & (lefts < columns[1]) & (lefts + widths > columns[0])
        for index in np.flatnonzero(touches).tolist():
            top, left, _, height, width = self._frames[index].tolist()
            down, across = (
                (max(start, first), min(stop, first + size))
                for (start, stop), first, size in ((rows, top, height), (columns, left, width))
            )
            if (count := int(self._frames[index, 2])) != channels:
                raise self._damaged(ValueError(f"a block has {count} channels instead of {channels}"))
            block = self._read_block(index)
            values[:, slice(*(i - rows[0] for i in down)), slice(*(i - columns[0] for i in across))] = block[
                :, slice(*(i - top for i in down)), slice(*(i - left for i in across))
            ]
        return values

    def _decompress(self, index: int) -> NDArray[np.float32]:
        size = 4 * math.prod(self._frames[index, 2:].tolist())
        try:
            compressed = self._read_part(self._names[index], 2 * size + MAX_ABOUT_BYTES)
            content = zlib.decompressobj().decompress(compressed, size + 1)
            planes = np.frombuffer(content, np.uint8).reshape(4, -1)
            return np.ascontiguousarray(planes.T).view("<f4").reshape(self._frames[index, 2:])
        except Exception as error:  # zipfile and zlib raise errors of any type for damaged bytes
            raise self._damaged(error) from None

    def _read_part(self, name: str, max_bytes: int) -> bytes:
        """Return a part of the file. Raises ValueError if it is larger than `max_bytes`."""
        if self._zip.getinfo(name).file_size > max_bytes:
            raise ValueError(f"its part {name} is too large")
        return self._zip.read(name)

    def _damaged(self, error: Exception) -> UnreadableFileError:
        return UnreadableFileError(self._path, f"is damaged ({error}); predict the slide again, with --keep-map.")


def _compress(block: NDArray[np.float32]) -> bytes:
    """Compress numbers, the first bytes of all numbers first."""
    return zlib.compress(np.ascontiguousarray(block).view(np.uint8).reshape(-1, 4).T.tobytes(), level=1)


def write_pyramid(path: Path, pixels: MapFile | Pixels, spacing_um_px: float, name: str = "") -> None:
    """Write a map or an image as a pyramid. `spacing_um_px` is the pixel spacing of level 0, in µm/px.

    `name` is the image name in the metadata. Each further level has half the resolution of the previous level; its
    pixels are means of 2 × 2 pixels or, in label maps, the upper left of them, because the mean of two object numbers
    is another object. The last level fits in a single tile.

    Raises ValueError if a side is below 1, or unless the pixels have one or three channels of float32, uint8 or uint32.
    """
    read = pixels.read_part if isinstance(pixels, MapFile) else partial(_crop, pixels)
    shape = read((0, 0), (0, 0)).shape[2:]
    shape = (*(pixels.size if isinstance(pixels, MapFile) else pixels.shape[:2]), *shape)
    if min(shape) < 1 or pixels.dtype not in (np.float32, np.uint8, np.uint32) or shape[2:] not in ((), (3,)):
        raise ValueError(
            f"A pyramid needs pixels (h, w) or (h, w, 3) of float32, uint8 or uint32; got {shape} of {pixels.dtype}."
        )
    level_shapes = _level_shapes(shape)
    size_um = {f"PhysicalSize{axis}": spacing_um_px for axis in "XY"}
    units = {f"PhysicalSize{axis}Unit": "µm" for axis in "XY"}
    metadata = {"axes": "YXS"[: len(shape)], **size_um, **units} | ({"Name": name} if name else {})
    is_large = pixels.dtype.itemsize * math.prod(shape) > MAX_CLASSIC_BYTES
    with ExitStack() as stack:
        tiff = TiffWriter(stack.enter_context(atomic_file(path)), bigtiff=is_large, ome=True)
        stack.enter_context(tiff)
        # While a level is written, its pixels are also reduced to half the resolution. The reduced pixels are saved to
        # a temporary file, from which the next level is written.
        for level, level_shape in enumerate(level_shapes):
            reduced = None
            if level + 1 < len(level_shapes):
                file = stack.enter_context(tempfile.TemporaryFile(dir=path.parent, buffering=0))
                reduced = MapFile(file, level_shapes[level + 1], pixels.dtype)
            pixels_per_cm = UM_PER_CM / (spacing_um_px * 2**level)
            tiles = _cut_tiles(read, level_shape, reduced)
            tiff.write(
                _compress_labels(tiles) if pixels.dtype == np.uint32 else (read_tile() for read_tile in tiles),
                shape=level_shape,
                dtype=pixels.dtype,
                tile=(TILE_PX, TILE_PX),
                photometric="rgb" if len(shape) == 3 else "minisblack",
                compression="adobe_deflate",
                resolution=(pixels_per_cm, pixels_per_cm),
                resolutionunit="CENTIMETER",
                software="rotopath",
                **({"subfiletype": 1} if level else {"subifds": len(level_shapes) - 1, "metadata": metadata}),
            )
            if reduced is not None:
                read = reduced.read_part


def _crop(pixels: Pixels, rows: tuple[int, int], columns: tuple[int, int]) -> Pixels:
    return pixels[slice(*rows), slice(*columns)]


def _level_shapes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return the shapes of all levels, starting with level 0. Halves of odd sizes are rounded up: no pixel is lost."""
    shapes = [shape]
    while max(shapes[-1][:2]) > TILE_PX:
        height, width = shapes[-1][:2]
        shapes.append((-(-height // 2), -(-width // 2), *shape[2:]))
    return shapes


def _cut_tiles(read: ReadPart, shape: tuple[int, ...], reduced: MapFile | None) -> Iterator[Callable[[], Pixels]]:
    """Yield a function for each tile of a level, row by row, which reads the tile; `shape` is that of the level.

    Unless `reduced` is None, the functions also write the pixels at half the resolution there, for the next level.
    """
    for top in range(0, shape[0], TILE_PX):
        for left in range(0, shape[1], TILE_PX):
            rows, columns = (top, min(top + TILE_PX, shape[0])), (left, min(left + TILE_PX, shape[1]))
            yield partial(_read_tile, read, rows, columns, reduced)


def _read_tile(read: ReadPart, rows: tuple[int, int], columns: tuple[int, int], reduced: MapFile | None) -> Pixels:
    tile = read(rows, columns)
    if reduced is not None:
        reduced.write(rows[0] // 2, columns[0] // 2, _halve(tile))
    return tile


def _compress_labels(tiles: Iterable[Callable[[], Pixels]]) -> Iterator[bytes]:
    """Read and compress the tiles of a label map, in threads. Tiles without objects are compressed only once."""
    empty = zlib.compress(bytes(TILE_PX**2 * np.dtype(np.uint32).itemsize))

    def compress(read_tile: Callable[[], Pixels]) -> bytes:
        tile = read_tile()
        if not tile.any():
            return empty
        missing = [(0, TILE_PX - size) for size in tile.shape]  # at the bottom and right edges
        whole = np.pad(tile, missing) if any(map(any, missing)) else np.ascontiguousarray(tile)
        return zlib.compress(whole.data)

    with ThreadPoolExecutor(COMPRESSORS) as pool:
        waiting: deque[Future[bytes]] = deque()
        for read_tile in tiles:
            waiting.append(pool.submit(compress, read_tile))
            if len(waiting) > 2 * COMPRESSORS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _halve(pixels: Pixels) -> Pixels:
    """Return the means of squares of 2 × 2 pixels or, for uint32, their upper left pixels.

    If a side is odd, the last squares contain fewer pixels.
    """
    if pixels.dtype == np.uint32:
        return pixels[::2, ::2]
    odd_rows, odd_columns = pixels.shape[0] % 2, pixels.shape[1] % 2
    padded = np.pad(pixels, [(0, odd_rows), (0, odd_columns), *[(0, 0)] * (pixels.ndim - 2)], mode="edge")
    squares = padded.reshape(padded.shape[0] // 2, 2, padded.shape[1] // 2, 2, *pixels.shape[2:])
    mean: NDArray[np.float32] = squares.mean(axis=(1, 3), dtype=np.float32)
    return mean.round().astype(np.uint8) if pixels.dtype == np.uint8 else mean
