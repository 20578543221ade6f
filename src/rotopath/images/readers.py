"""Open slide and image files, and read their levels, pixel sizes and pixels.

A level is one resolution of a slide. Level 0 is the highest resolution. `open_reader` opens a file with OpenSlide, with
tiffslide (for TIFF pyramids of which OpenSlide does not read all levels), with zarr (for OME-Zarr folders), or with
Pillow (for ordinary images). Errors of these libraries are converted to an `UnreadableImageError`, whose message is one
sentence.
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from rotopath.images.containers import (
    COLOR_DTYPES,
    OPENSLIDE_SUFFIXES,
    FileContents,
    SizedImage,
    TiffSeries,
    errors_in_one_sentence,
    expect_color_dtype,
    expect_one_image,
    find_dicom_slide,
    find_largest,
    is_dicom,
    is_zarr,
    list_series,
    list_zarr_images,
    missing_package,
    read_ndpi_fluorescence,
)
from rotopath.images.files import UnreadableImageError, expect_file, parse_pixel_size_um, pixel_size_um, read_rgb

BLOCK_PX = 512  # side of the blocks that `_OpenSlideReader` caches
MAX_SIDE_PX = 2**24  # 4 m at 0.25 µm/px; a larger slide is damaged
SHAPE_TOLERANCE = 0.25  # largest difference between sides of a level and those of level 0, as a fraction of the side
MAX_CACHED_BLOCKS = 64  # these blocks need 48 MB
WHITE = 255


class Level(NamedTuple):
    """One resolution of a slide."""

    size_px: tuple[int, int]  # rows and columns
    downsample: float  # side of a pixel of this level, in pixels of level 0


class SlideReader(Protocol):
    """An open slide or image file. Several threads may read at the same time; close it after all have finished."""

    levels: tuple[Level, ...]
    pixel_size_um: tuple[float, float] | None  # height and width of a pixel of level 0; None if the file states none
    origin_px: tuple[int, int]  # row and column of level 0 at which the scanned region begins

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Read a rectangle of pixels (height, width, 3) from a level.

        `level` is the index of the level in `levels`. All other arguments are in pixels of this level. The rectangle
        must not extend beyond the level.
        """

    def describe(self) -> FileContents:
        """Return the format of the file, the package that reads it, and the other images in it."""
        ...

    def close(self) -> None: ...


def open_reader(path: Path) -> SlideReader:
    """Open a file, or a folder that is a slide, with the library that reads the most of its levels.

    Raises UnreadableImageError if no library can read the file, or if the required library is not installed, or if the
    sizes of the slide and its levels are implausible.
    """
    reader = _choose_reader(path)
    fault = ""
    if max(reader.levels[0].size_px) > MAX_SIDE_PX:
        fault = f"states a side of more than {MAX_SIDE_PX} px, which no slide has"
    elif wrong := [level for level in reader.levels if not _has_shape_of(reader.levels[0], level)]:
        (rows, columns), (rows0, columns0) = wrong[0].size_px, reader.levels[0].size_px
        fault = f"is damaged: a level of {columns} × {rows} px cannot show an image of {columns0} × {rows0} px"
    if fault:
        reader.close()
        raise UnreadableImageError(path, f"{fault}; download or export it again.")
    return reader


def _has_shape_of(first: Level, level: Level) -> bool:
    """Return whether a level has the shape of the first one. After a damaged header, it may not."""
    pairs = zip(level.size_px, first.size_px, strict=True)
    return all(abs(side - side0 / level.downsample) <= SHAPE_TOLERANCE * side + 2 for side, side0 in pairs)


def _choose_reader(path: Path) -> SlideReader:
    """Open a slide, as `open_reader` does, of any size."""
    if not path.exists():
        raise UnreadableImageError(path, "does not exist.")
    expect_file(path)
    if is_zarr(path):
        return _OmeZarrReader(path)
    if path.is_dir():
        path = find_dicom_slide(path)
    with errors_in_one_sentence(path):
        path.open("rb").close()  # the libraries do not distinguish files without permission from damaged files
    is_slide = path.suffix.lower() in OPENSLIDE_SUFFIXES
    try:
        import openslide
    except ModuleNotFoundError:  # also raised if the Python package is installed, but not the OpenSlide library
        series = list_series(path)
        if is_slide or any(image.level_count > 1 for image in series):
            raise missing_package(path, "OpenSlide") from None
        return _open_tiff(path, series) if series else _read_image(path)
    with errors_in_one_sentence(path):
        vendor = openslide.OpenSlide.detect_format(path)
    if vendor not in (None, "generic-tiff"):
        return _OpenSlideReader(path)
    if series := list_series(path):
        return _open_tiff(path, series)
    if is_dicom(path):
        raise UnreadableImageError(path, "is a DICOM file, but not of a whole slide; choose a whole slide.")
    if is_slide:
        raise UnreadableImageError(
            path, "is damaged, or not in a slide format that OpenSlide reads; download or export it again."
        )
    return _read_image(path)


def _open_tiff(path: Path, series: Sequence[TiffSeries]) -> SlideReader:
    """Open the largest of the images in a TIFF file that has no format of a slide scanner."""
    main = find_largest([image.size_px for image in series])
    image = series[main]
    expect_one_image(path, image.axes, image.shape, image.channels)
    if main == 0 and image.dtype in COLOR_DTYPES:
        with suppress(UnreadableImageError, ModuleNotFoundError):  # tiffslide or Pillow may still read the file
            slide = _OpenSlideReader(path)
            if len(slide.levels) >= image.level_count:
                slide.pixel_size_um = parse_pixel_size_um(image.description) or slide.pixel_size_um
                return slide
            slide.close()  # an OME-TIFF stores all levels but the first in sub-IFDs, which OpenSlide does not read
    if image.level_count > 1:
        expect_color_dtype(path, image.dtype)
        return _TiffSlideReader(path, series, main)
    return _read_image(path, series, main)


# Readers


class ImageReader:
    """Reads an image in memory (H, W, 3) as if it were a slide with one level."""

    origin_px = (0, 0)

    def __init__(
        self,
        pixels: NDArray[np.uint8],
        pixel_size_um: tuple[float, float] | None = None,
        contents: FileContents | None = None,
    ) -> None:
        self._pixels = pixels
        self.pixel_size_um = pixel_size_um
        self._contents = contents or FileContents("array", "rotopath")
        height, width = pixels.shape[:2]
        self.levels: tuple[Level, ...] = (Level((height, width), 1.0),)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        assert level == 0
        return self._pixels[top : top + height, left : left + width]

    def describe(self) -> FileContents:
        return self._contents

    def close(self) -> None:
        pass


class _OpenSlideReader:
    """Reads a slide with OpenSlide."""

    def __init__(self, path: Path) -> None:
        import openslide

        self._path = path
        with errors_in_one_sentence(path):
            try:
                self._slide = openslide.OpenSlide(path)
            except openslide.OpenSlideError as error:
                if is_dicom(path):
                    raise _explain_dicom_error(path, error, openslide.__library_version__) from None
                raise
            sizes = [(height, width) for width, height in self._slide.level_dimensions]
            # Read once: after a damaged tile, OpenSlide raises the same error at any later call, in all threads.
            self._downsamples = self._slide.level_downsamples
            self.levels = _make_levels(sizes, self._downsamples)
            properties = self._slide.properties
            height_um, width_um = (properties.get(f"openslide.mpp-{axis}") for axis in "yx")
            self.pixel_size_um = (float(height_um), float(width_um)) if height_um and width_um else None
            top, left = (int(properties.get(f"openslide.bounds-{axis}", 0)) for axis in "yx")
            self.origin_px = (top, left)
        self._read_cached_block = lru_cache(maxsize=MAX_CACHED_BLOCKS)(self._read_block)

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Read a rectangle of a level. A pixel has the same value in every rectangle that contains it.

        OpenSlide expects the upper left corner in whole pixels of level 0, and interpolates if the corner is between
        two pixels of the level. If the downsample is not a whole number, such as 4.0001, pixel values would therefore
        depend on the corner. Levels with such a downsample are read in blocks at fixed positions, and the rectangle is
        assembled from the blocks.
        """
        if float(self._downsamples[level]).is_integer():
            return self._read_region(level, top, left, height, width)
        pixels = np.empty((height, width, 3), np.uint8)
        for row in range(top // BLOCK_PX, -(-(top + height) // BLOCK_PX)):
            for column in range(left // BLOCK_PX, -(-(left + width) // BLOCK_PX)):
                block = self._read_cached_block(level, row * BLOCK_PX, column * BLOCK_PX)
                to_rows, from_rows = _overlap(top, height, row * BLOCK_PX, block.shape[0])
                to_columns, from_columns = _overlap(left, width, column * BLOCK_PX, block.shape[1])
                pixels[to_rows, to_columns] = block[from_rows, from_columns]
        return pixels

    def describe(self) -> FileContents:
        import openslide

        properties, sizes = self._slide.properties, []
        for name in self._slide.associated_images:
            height, width = (int(properties[f"openslide.associated.{name}.{side}"]) for side in ("height", "width"))
            sizes.append(SizedImage(name, (height, width)))
        vendor, others = properties["openslide.vendor"], []
        if vendor == "generic-tiff":
            level_sizes = [level.size_px for level in self.levels]
            images = list_series(self._path)
            vendor = images[0].format
            others = [SizedImage(image.name, image.size_px) for image in images if image.size_px not in level_sizes]
        fluorescence = read_ndpi_fluorescence(self._path) if vendor == "hamamatsu" else None
        notes = () if fluorescence is None else (f"The scanner recorded fluorescence ({fluorescence}).",)
        reader = f"OpenSlide {openslide.__library_version__}"
        return FileContents(vendor, reader, tuple(sizes), tuple(others), notes)

    def close(self) -> None:
        self._slide.close()

    def _read_block(self, level: int, top: int, left: int) -> NDArray[np.uint8]:
        rows, columns = self.levels[level].size_px
        return self._read_region(level, top, left, min(BLOCK_PX, rows - top), min(BLOCK_PX, columns - left))

    def _read_region(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        downsample = self._downsamples[level]
        corner = (round(left * downsample), round(top * downsample))
        with errors_in_one_sentence(self._path):
            image = self._slide.read_region(corner, level, (width, height))
            # Pillow drops an alpha channel several times faster than NumPy.
            is_opaque = image.getchannel("A").getextrema() == (WHITE, WHITE)
            return np.asarray(image.convert("RGB")) if is_opaque else _to_rgb(np.asarray(image))


def _explain_dicom_error(path: Path, error: Exception, version: str) -> UnreadableImageError:
    """Return the error for a DICOM file that OpenSlide refuses: the file is not always damaged."""
    reason = str(error).splitlines()[0].removeprefix(f"Reading {path}: ")
    reason = reason.replace("Couldn't get image flavor", "the attribute Image Type is missing or incomplete")
    return UnreadableImageError(
        path,
        f"is a DICOM file that OpenSlide {version} cannot read ({reason}): it is incomplete, or lacks attributes that "
        f"the DICOM standard requires of a whole slide; download it again, or convert the original slide with another "
        f"program, such as wsidicomizer.",
    )


class _TiffSlideReader:
    """Reads a TIFF pyramid with tiffslide.

    Several threads may read at the same time, because tiffslide has a separate Zarr group, through which it reads the
    file, for each thread.
    """

    origin_px = (0, 0)

    def __init__(self, path: Path, series: Sequence[TiffSeries], main: int) -> None:
        try:
            from tiffslide import TiffSlide
        except ModuleNotFoundError:
            raise missing_package(path, "tiffslide") from None
        self._path, self._series, self._main = path, series, main
        with errors_in_one_sentence(path):
            self._slide = TiffSlide(path)
            sizes = [(height, width) for width, height in self._slide.level_dimensions]
            properties = self._slide.properties
            index = properties["tiffslide.series-index"]
        if index != main:
            self.close()
            raise UnreadableImageError(
                path,
                f"contains {len(series)} images, of which only number {index + 1} can be read, but the largest is "
                f"number {main + 1}; export it to a file of its own.",
            )
        self.levels = _make_levels(sizes, self._slide.level_downsamples)
        height_um, width_um = properties.get("tiffslide.mpp-y"), properties.get("tiffslide.mpp-x")
        size_um = (float(height_um), float(width_um)) if height_um and width_um else None
        self.pixel_size_um = parse_pixel_size_um(series[main].description) or size_um

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        # Rounded up, because tiffslide rounds down when it converts the corner to pixels of the level.
        downsample = self._slide.level_downsamples[level]
        x, y = (math.ceil(position * downsample - 1e-6) for position in (left, top))
        with errors_in_one_sentence(self._path):
            pixels = self._slide.read_region((x, y), level, (width, height), as_array=True)
        return _to_rgb(_to_8_bits(pixels))

    def describe(self) -> FileContents:
        others = _list_others(self._series, self._main)
        return FileContents(self._series[self._main].format, f"tiffslide {version('tiffslide')}", others=others)

    def close(self) -> None:
        self._slide.close()


class _OmeZarrReader:
    """Reads the largest image in an OME-Zarr folder with zarr, which several threads may call at the same time."""

    origin_px = (0, 0)

    def __init__(self, path: Path) -> None:
        try:
            import zarr
        except ModuleNotFoundError:
            raise missing_package(path, "zarr") from None
        self._path = path
        with errors_in_one_sentence(path):
            images = list_zarr_images(zarr.open_group(path, mode="r"))
        if not images:
            raise UnreadableImageError(
                path, "is a Zarr folder without an OME-Zarr image (multiscales); choose the folder of one image."
            )
        names = list(images)
        main = images.pop(names[find_largest([image.sizes_px[0] for image in images.values()])])
        expect_one_image(path, main.color_axes, main.shape, main.channels)
        expect_color_dtype(path, main.dtype)
        (height, width), sizes = main.sizes_px[0], main.sizes_px
        self.levels = _make_levels(sizes, tuple((height / rows + width / columns) / 2 for rows, columns in sizes))
        self.pixel_size_um = main.pixel_size_um
        self._image = main
        self._others = tuple(SizedImage(name, image.sizes_px[0]) for name, image in images.items())

    def read(self, level: int, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        spans = {"Y": slice(top, top + height), "X": slice(left, left + width), "C": slice(None)}
        with errors_in_one_sentence(self._path):
            pixels = self._image.levels[level][tuple(spans.get(axis, 0) for axis in self._image.axes)]
        kept = [axis for axis in self._image.axes if axis in spans]
        pixels = pixels.transpose([kept.index(axis) for axis in ("Y", "X", "C") if axis in kept])
        return _to_rgb(_to_8_bits(pixels.reshape(height, width, -1)))

    def describe(self) -> FileContents:
        return FileContents(f"OME-Zarr {self._image.version}".strip(), f"zarr {version('zarr')}", others=self._others)

    def close(self) -> None:
        pass


# Levels and pixels


def _make_levels(sizes: list[tuple[int, int]], downsamples: tuple[float, ...]) -> tuple[Level, ...]:
    """Return the levels from their sizes (rows, columns) and downsamples.

    Libraries compute a downsample as the ratio of two rounded sizes, for example 4.0001 instead of 4. A downsample is
    rounded to a whole number if this moves every pixel by less than one pixel of the level.
    """
    levels = []
    for size, downsample in zip(sizes, downsamples, strict=True):
        whole = round(downsample)
        drift_px = abs(downsample - whole) * max(size)  # in pixels of level 0, at the far end of the level
        levels.append(Level(size, float(whole) if drift_px < whole else downsample))
    return tuple(levels)


def _read_image(path: Path, series: Sequence[TiffSeries] = (), main: int = 0) -> ImageReader:
    """Read an image file with Pillow. Of the images `series` in a TIFF, read that with the index `main`."""
    kind, page = (series[main].format, series[main].page) if series else (path.suffix[1:].upper(), 0)
    contents = FileContents(kind, f"Pillow {version('pillow')}", others=_list_others(series, main))
    return ImageReader(read_rgb(path, page), pixel_size_um(path, page), contents)


def _list_others(series: Sequence[TiffSeries], main: int) -> tuple[SizedImage, ...]:
    """Return the images in a TIFF file except that with the index `main`."""
    return tuple(SizedImage(image.name, image.size_px) for i, image in enumerate(series) if i != main)


def _to_8_bits(pixels: NDArray[Any]) -> NDArray[np.uint8]:
    """Return colors of 8 or 16 bits as colors of 8 bits."""
    return (pixels if pixels.dtype == np.uint8 else pixels >> 8).astype(np.uint8)


def _to_rgb(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Convert gray or RGB pixels (h, w, 1 to 4), with or without alpha, to RGB (h, w, 3).

    Transparent pixels are blended with white.
    """
    channels = pixels.shape[2]
    if channels == 3:
        return pixels
    if channels == 1:
        return np.repeat(pixels, 3, axis=2)
    if channels == 2:
        pixels = pixels[..., [0, 0, 0, 1]]
    colors, alpha = pixels[..., :3], pixels[..., 3:4]
    if (alpha == WHITE).all():
        return np.ascontiguousarray(colors)
    opacity = alpha.astype(np.uint16)
    blended = (colors * opacity + WHITE * (WHITE - opacity) + WHITE // 2) // WHITE
    return blended.astype(np.uint8)


def _overlap(start: int, size: int, other_start: int, other_size: int) -> tuple[slice, slice]:
    """Return the overlap of two ranges of rows or columns, as a slice of the first and a slice of the second range.

    A range is given by its first row or column and by the number of its rows or columns.
    """
    first, end = max(start, other_start), min(start + size, other_start + other_size)
    return slice(first - start, end - start), slice(first - other_start, end - other_start)
