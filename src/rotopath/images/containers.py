"""Find out what slide files contain, without reading pixels: images, axes, levels, and DICOM series.

A file may contain several images (series), of which the largest is the main one. `readers` opens it. An image has axes:
rows (Y), columns (X), colors (S), and perhaps channels (C), focal planes (Z) or time points (T).
"""

import logging
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rotopath.environment import install_command
from rotopath.images.files import UnreadableFileError, UnreadableImageError, expect_file

OPENSLIDE_SUFFIXES = {".svs", ".ndpi", ".ndpis", ".mrxs", ".scn", ".svslide", ".bif", ".vms", ".vmu", ".czi", ".dcm"}
SLIDE_SUFFIXES = OPENSLIDE_SUFFIXES | {".qptiff"}
COLOR_DTYPES = ("uint8", "uint16")  # data types of files whose values are gray levels or colors
AXES_NAMES = {
    "C": "channels",
    "S": "colors",
    "Z": "focal planes",
    "T": "time points",
}  # axes along which an image must have length 1
RGB = ("FF0000", "00FF00", "0000FF")  # colors of the channels of an OME-Zarr image that has RGB pixels
RGB_LABEL = r"(channel)?[ _:]*\d*|r(ed)?|g(reen)?|b(lue)?"  # names of these channels; others are names of dyes
UM_PER_UNIT = {"nanometer": 1e-3, "micrometer": 1.0, "millimeter": 1e3}  # units of axes in OME-Zarr
TRANSFORMS = "coordinateTransformations"  # key of OME-Zarr
DICOM_HEADER_BYTES = 2**16  # the identifier of the series is in this part of a DICOM file


class SizedImage(NamedTuple):
    """One of several images in a file."""

    name: str
    size_px: tuple[int, int]  # rows and columns


@dataclass(frozen=True)
class FileContents:
    """What a file contains besides the levels of its main image."""

    format: str  # vendor or file format
    reader: str  # package that reads the file, and its version
    associated: tuple[SizedImage, ...] = ()  # photographs of the glass slide and reduced images, such as its label
    others: tuple[SizedImage, ...] = ()  # other images (series), which are not read
    notes: tuple[str, ...] = ()  # sentences about other facts that the file states, such as fluorescence


def is_slide_folder(path: Path) -> bool:
    """Return whether a folder is one slide: an OME-Zarr image, or the DICOM files of one series and no other slides."""
    if not path.is_dir():
        return False
    if is_zarr(path):
        return True
    try:
        slides = [file for file in path.iterdir() if file.suffix.lower() in SLIDE_SUFFIXES]
    except PermissionError:
        return False
    return len(keep_one_file_per_series(slides)) == 1 and slides[0].suffix.lower() == ".dcm"


# TIFF


class TiffSeries(NamedTuple):
    """An image in a TIFF file, with all its levels."""

    name: str
    axes: str  # such as "YXS", in the order of `shape`
    shape: tuple[int, ...]
    dtype: str
    level_count: int
    page: int  # number of its first page in the file, from 0
    channels: tuple[str, ...]  # names of the channels, if the file states them
    description: str  # image description of the first page
    format: str  # such as "OME-TIFF"

    @property
    def size_px(self) -> tuple[int, int]:
        """Number of rows and of columns."""
        return self.shape[self.axes.index("Y")], self.shape[self.axes.index("X")]


def list_series(path: Path) -> list[TiffSeries]:
    """Return the images in a TIFF file; an empty list for other files."""
    from tifffile import TiffFile

    log = logging.getLogger("tifffile")
    was_disabled = log.disabled
    log.disabled = True  # tifffile would log errors of the file, which the next library reports
    try:
        with TiffFile(path) as tiff:
            kinds = ("OME" if tiff.is_ome else "QPI" if tiff.is_qpi else "ImageJ" if tiff.is_imagej else "", "TIFF")
            return [
                TiffSeries(
                    name=series.name,
                    axes=series.axes,
                    shape=tuple(series.shape),
                    dtype=series.dtype.name if series.dtype else "",
                    level_count=len(series.levels),
                    page=series.keyframe.index,
                    channels=_find_channel_names(series, tiff.ome_metadata or ""),
                    description=series.keyframe.description,
                    format="-".join(filter(None, kinds)),
                )
                for series in tiff.series
                if "Y" in series.axes and "X" in series.axes
            ]
    except Exception:  # tifffile raises errors of any type for damaged bytes
        return []
    finally:
        log.disabled = was_disabled


def find_largest(sizes_px: Sequence[tuple[int, int]]) -> int:
    """Return the index of the image with the most pixels, given the rows and columns of each; the first if equal."""
    return max(range(len(sizes_px)), key=lambda index: math.prod(sizes_px[index]))


def read_ndpi_fluorescence(path: Path) -> str | None:
    """Return the name of the fluorescence filter that an NDPI file states, or None."""
    from tifffile import TiffFile

    try:
        with TiffFile(path) as tiff:
            name = (tiff.pages.first.ndpi_tags or {}).get("Fluorescence")
    except Exception:  # tifffile raises errors of any type for files that OpenSlide can read, but tifffile cannot
        return None
    return str(name) if name else None


def _find_channel_names(series: Any, ome_xml: str) -> tuple[str, ...]:
    """Return the names of the channels of a series that tifffile has read, from OME or QPI metadata.

    `ome_xml` is the OME metadata of the file. Returns an empty tuple if the names are unknown.
    """
    if "C" not in series.axes:
        return ()
    names = re.findall(r'<Channel\b[^>]*\bName="([^"]*)"', ome_xml)
    if series.kind == "qpi":
        found = [re.search(r"<Name>([^<]+)</Name>", page.description) for page in series.pages if page is not None]
        names = [name[1] for name in found if name]
    return tuple(names) if len(names) == series.shape[series.axes.index("C")] else ()


# OME-Zarr


class ZarrImage:
    """An image in an OME-Zarr folder (versions 0.1 to 0.5). `group` is its Zarr group."""

    def __init__(self, group: Any) -> None:
        ome = _read_ome(group)
        multiscale = ome["multiscales"][0]
        self.version = str(ome.get("version", multiscale.get("version", ""))).strip()
        self.levels = [group[dataset["path"]] for dataset in multiscale["datasets"]]  # arrays, largest first
        self.shape: tuple[int, ...] = self.levels[0].shape
        self.dtype = self.levels[0].dtype.name
        axes = multiscale.get("axes", "tczyx")  # versions 0.1 and 0.2 do not state the axes, and 0.3 only their names
        names = [axis["name"] if isinstance(axis, dict) else axis for axis in axes]
        self.axes = "".join(name[0].upper() for name in names)
        y, x = self.axes.index("Y"), self.axes.index("X")
        self.sizes_px = [(level.shape[y], level.shape[x]) for level in self.levels]
        units = [UM_PER_UNIT.get(axis.get("unit", "")) if isinstance(axis, dict) else None for axis in axes]
        steps = (*multiscale["datasets"][0].get(TRANSFORMS, ()), *multiscale.get(TRANSFORMS, ()))
        sides = [math.prod(float(step["scale"][axis]) for step in steps if "scale" in step) for axis in (y, x)]
        self.pixel_size_um: tuple[float, float] | None = None  # height and width; None if the folder states none
        if (um_y := units[y]) is not None and (um_x := units[x]) is not None:
            self.pixel_size_um = (sides[0] * um_y, sides[1] * um_x)
        # Three channels may be the colors of an RGB image or three fluorescent dyes; only their names and display
        # colors distinguish them.
        channels = ome.get("omero", {}).get("channels", [])
        self.channels = tuple(str(channel.get("label", "")) for channel in channels)
        colors = tuple(str(channel.get("color", color)).upper() for channel, color in zip(channels, RGB, strict=False))
        is_rgb = all(re.fullmatch(RGB_LABEL, label, re.IGNORECASE) for label in self.channels) and colors in (RGB, ())
        self.color_axes = self.axes.replace("C", "S") if is_rgb else self.axes  # like the axes of a TIFF file


def is_zarr(path: Path) -> bool:
    """Return whether a path is a Zarr folder (version 2 or 3 of the format)."""
    return path.is_dir() and any((path / name).exists() for name in (".zattrs", ".zgroup", ".zarray", "zarr.json"))


def list_zarr_images(root: Any) -> dict[str, ZarrImage]:
    """Return the images in an OME-Zarr folder, by the names of their subfolders; "" is the folder itself.

    `root` is the Zarr group of the folder. Several images are in subfolders, as bioformats2raw writes them.
    """
    if "multiscales" in _read_ome(root):
        return {"": ZarrImage(root)}
    groups = {name: root[name] for name in sorted(root.group_keys())}
    return {name: ZarrImage(group) for name, group in groups.items() if "multiscales" in _read_ome(group)}


def _read_ome(group: Any) -> dict[str, Any]:
    """Return the OME metadata of a Zarr group. Version 0.5 stores them under a key of their own."""
    attributes = dict(group.attrs)
    ome: dict[str, Any] = attributes.get("ome", attributes)
    return ome


# DICOM


def is_dicom(path: Path) -> bool:
    """Return whether a file is a DICOM file, from its first bytes."""
    with path.open("rb") as file:
        return file.read(132)[128:] == b"DICM"


def keep_one_file_per_series(paths: Sequence[Path]) -> list[Path]:
    """Return the paths in order, but only the first of the DICOM files of each series in a folder.

    The levels and the label of a whole slide are separate files of one series.
    """
    kept: dict[object, Path] = {}
    for path in sorted(paths):
        series = _read_dicom_series(path) if path.suffix.lower() == ".dcm" else None
        kept.setdefault(path if series is None else (path.parent, series), path)
    return list(kept.values())


def find_dicom_slide(folder: Path) -> Path:
    """Return one of the DICOM files of the slide in a folder. OpenSlide finds the others.

    Raises UnreadableImageError if the folder does not contain exactly one slide.
    """
    slides = keep_one_file_per_series([path for path in folder.iterdir() if path.suffix.lower() == ".dcm"])
    if len(slides) != 1:
        count = f"{len(slides)} DICOM slides" if slides else "neither an OME-Zarr image nor a DICOM slide"
        raise UnreadableImageError(folder, f"is a folder that contains {count}; choose one slide.")
    return slides[0]


def _read_dicom_series(path: Path) -> bytes | None:
    """Return the identifier of the series (Series Instance UID) in a DICOM file; None if there is none."""
    try:
        expect_file(path)
        with path.open("rb") as file:
            header = file.read(DICOM_HEADER_BYTES)
    except (OSError, UnreadableFileError):
        return None
    found = re.search(rb"\x20\x00\x0e\x00UI(..)", header, re.DOTALL)
    if header[128:132] != b"DICM" or found is None:
        return None
    return header[found.end() : found.end() + int.from_bytes(found[1], "little")].rstrip(b"\0 ")


# Errors


def expect_one_image(path: Path, axes: str, shape: Sequence[int], channels: Sequence[str]) -> None:
    """Raise UnreadableImageError if an image has several channels, focal planes or time points.

    `axes` are the axes of the image, such as "YXS", and `shape` its lengths along them. `channels` are the names of the
    channels along the axis C, if the file states them.
    """
    for axis, length in zip(axes, shape, strict=True):
        if axis in "YX" or length == 1 or (axis == "S" and length <= 4):
            continue
        names = f" ({', '.join(channels)})" if axis == "C" and any(channels) else ""
        raise UnreadableImageError(
            path,
            f"contains {length} separate {AXES_NAMES.get(axis, 'images')}{names}, but must contain one gray or RGB "
            f"image; export one RGB image from it.",
        )


def expect_color_dtype(path: Path, dtype: str) -> None:
    """Raise UnreadableImageError unless a data type is one of gray levels or colors."""
    if dtype not in COLOR_DTYPES:
        raise UnreadableImageError(
            path,
            f"contains {dtype} numbers, but must contain gray or RGB values of 8 or 16 bits; export it again as an RGB "
            f"image.",
        )


def missing_package(path: Path, package: str) -> UnreadableImageError:
    """Return the error that names a package that is needed to read a file, and how to install it."""
    return UnreadableImageError(path, f"is a whole slide and needs {package}; install it: {install_command('slides')}.")


@contextmanager
def errors_in_one_sentence(path: Path) -> Iterator[None]:
    """Convert any error of a slide library to an UnreadableImageError with a message of one sentence."""
    try:
        yield
    except (UnreadableImageError, MemoryError):  # of these, the message is true as it is
        raise
    except PermissionError as error:
        raise UnreadableImageError(path, f"cannot be read ({error.strerror}).") from None
    except Exception as error:  # decoders raise errors of any type for damaged bytes
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UnreadableImageError(
            path,
            f"cannot be decoded ({reason}): it is damaged, or stored in a way that is not supported; download or "
            f"export it again.",
        ) from None
