"""Classes that describe datasets of annotated images, and functions that read their files.

Each dataset format has its own module (see formats.py). The module of a format reads the file names and tables of a
folder, and returns a `Dataset`: samples with their splits, and findings (problems and notes). Pixels are read later:
`read_image` reads one sample at any pixel spacing, and `read_together` reads a group of samples at the pixel spacing of
their files.

The second half of this module contains functions that all formats use: they list files, and read CSV tables and arrays
in HDF5 files.
"""

import csv
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotopath.images.containers import SLIDE_SUFFIXES
from rotopath.images.files import (
    ImageTooLargeError,
    UnreadableFileError,
    UnreadableImageError,
    expect_file,
    image_size_px,
    read_rgb,
    resample,
    spacing_um_px,
)
from rotopath.images.slides import Slide, as_slide, describe_slide, open_slide_once

if TYPE_CHECKING:
    import h5py

# Type of annotation: a class of each image, positions of objects, or outlines of objects.
Annotated = Literal["labels", "points", "objects"]
Row = dict[str, str]  # cells of a row of a CSV table, by column name

SYNTHETIC_MARKER = "SYNTHETIC.txt"  # a file that marks synthetic tissue in the layout of a benchmark
IMAGE_SUFFIXES = frozenset({".tif", ".tiff", ".png", ".jpg", ".jpeg"})
SAME_SPACING = 0.05  # relative differences of pixel spacings up to 5 % are ignored: resampling would only blur images
MAX_ROW_BYTES = 2**26  # largest image in an HDF5 file; those of PCam have 27,648 bytes
MAX_ROWS_PER_READ = 1024  # rows of an HDF5 file that are read at once
MAX_NAMES_LISTED = 5  # largest number of names, such as those of files, that one message lists
MAX_SLIDE_PX = 10**8  # a slide file with more pixels is not read as one image
SNIFFED_CHARACTERS = 10_000  # read from a CSV file to detect the delimiter of its columns


class DataError(ValueError):
    """Raised if data cannot be used. The message is one sentence for the user."""


class TableError(UnreadableFileError):
    """Raised if a file is not a CSV table, or lacks a required column."""


class UnreadableHdf5Error(UnreadableFileError):
    """Raised if an HDF5 file is damaged, or lacks an expected array."""


# Datasets


class PixelBox(NamedTuple):
    """A rectangle of a slide or an image, in pixels of level 0."""

    top_px: int
    left_px: int
    height_px: int
    width_px: int

    def __str__(self) -> str:
        top, left, height, width = self
        return f"[{top}:{top + height}, {left}:{left + width}]"


@dataclass(frozen=True, slots=True)
class Sample:
    """One annotated image: a file, a rectangle of a slide or an image, or a row of an HDF5 file."""

    path: Path  # image file, slide, or HDF5 file
    name: str  # for messages
    case: str  # patient (PCam: slide), whose images must all be in one split; empty if unknown
    split: str  # train, valid or test
    spacing_um_px: float  # pixel spacing of the image
    row: int | None = None  # index of the image in an HDF5 file; None for an image file
    label: str | None = None  # class name of the whole image, if the dataset has labels
    annotations: tuple[Path, ...] = ()  # files; training uses the first, `check` compares the second with it
    stratum: str = (
        ""  # organ, or empty if unknown; a reduced training set can have the same number of images of each organ
    )
    box: PixelBox | None = None  # the part of the file that is this image; None for the whole file


@dataclass(frozen=True, slots=True)
class Finding:
    """A message about a file or a dataset: a problem, which must be solved before training, or a note."""

    file: str  # path relative to the root of the dataset; empty if the message is about the whole dataset
    message: str
    is_problem: bool = True
    objects: int = 0  # number of objects that the message is about; 0 if it does not state a number

    @classmethod
    def from_error(cls, error: UnreadableFileError, root: Path) -> "Finding":
        """Convert an error about a file to a problem, with the path relative to the root of the dataset."""
        path = Path(error.path)
        return cls(path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path), error.fault)

    def __str__(self) -> str:
        return f"{self.file}: {self.message}" if self.file else self.message

    @property
    def pattern(self) -> str:
        """The message without numbers and names, which is the same for findings of the same type."""
        return re.sub(r"'[^']*'|\"[^\"]*\"|[-\d.]*\d|\b\S+[./]\w+\b", "#", self.message)


@dataclass(frozen=True)
class Dataset:
    """All samples of a folder or manifest, with one type of annotation."""

    annotated: Annotated  # type of annotation: "labels", "points" or "objects"
    source: str  # name of the format, for display
    root: Path  # folder of the dataset or of the manifest
    samples: tuple[Sample, ...]
    findings: tuple[Finding, ...] = ()  # about file names and tables; `check` adds findings about file contents
    # Published numbers for comparison: published[split][name], with names such as "images", "cases" and "mitoses".
    published: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    objects: str = "objects"  # name of the annotated objects in tables of counts, such as mitoses
    classes: tuple[str, ...] = ()  # class names of images, if the format defines their order

    def split(self, name: str) -> tuple[Sample, ...]:
        """Return the samples of a split. Raises DataError if the split is empty."""
        samples = tuple(sample for sample in self.samples if sample.split == name)
        if not samples:
            raise DataError(
                f"{self.root} has no images in the split {name!r}; add images of other patients, or change the splits "
                f"in the column `split` of the manifest or in split.csv."
            )
        return samples


def problems(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings that are problems, without the notes."""
    return [finding for finding in findings if finding.is_problem]


def group_findings(findings: Iterable[Finding]) -> list[str]:
    """Return a line of text for each finding, or a single line for more than two findings of a type.

    This line has the number of the findings and the first of them, or the one about most objects.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings:
        groups.setdefault(finding.pattern, []).append(finding)
    return [line for group in groups.values() for line in ([_summarize(group)] if len(group) > 2 else map(str, group))]


def _summarize(group: Sequence[Finding]) -> str:
    """Return a line of text for findings of one type."""
    if objects := sum(finding.objects for finding in group):
        return f"{len(group)} times, {objects} objects, most: {max(group, key=lambda finding: finding.objects)}"
    return f"{len(group)} times, first: {group[0]}"


# Pixels of samples


def read_image(sample: Sample, spacing_um_px: float) -> NDArray[np.uint8]:
    """Read the pixels (H, W, 3) of a sample at `spacing_um_px`.

    A rectangle of a slide is read from the level that fits. The pixels are not resampled if the pixel spacing of the
    sample differs from `spacing_um_px` by 5 % or less.
    """
    return read_together([sample], spacing_um_px)[0]


def read_together(samples: Sequence[Sample], spacing_um_px: float | None = None) -> list[NDArray[np.uint8]]:
    """Read the pixels (H, W, 3) of each sample in a group at `spacing_um_px`; None: that of each sample.

    `samples` is a group as in `group_for_reading`: a single image file, or images in consecutive rows of an HDF5 file.
    """
    first = samples[0]
    if first.box is not None:
        return [_read_box(first, first.box, resampling_factor(first, spacing_um_px))]
    if first.row is not None:
        images = list(read_hdf5_rows(first.path, "x", first.row, first.row + len(samples)))
    elif not is_read_in_parts(first.path):
        images = [read_rgb(first.path)]
    else:
        height, width = annotated_size_px(first.path)
        if height * width > MAX_SLIDE_PX:
            raise UnreadableImageError(
                first.path,
                f"is a whole slide of {height} × {width} px (height × width), too large to be one image of a dataset; "
                f"outline the annotated areas in QuPath with the class Region*.",
            )
        images = [_read_box(first, PixelBox(0, 0, height, width), 1.0)]
    return [
        resample(image, resampling_factor(sample, spacing_um_px)) for sample, image in zip(samples, images, strict=True)
    ]


def _read_box(sample: Sample, box: PixelBox, factor: float) -> NDArray[np.uint8]:
    """Read a rectangle (H, W, 3) of the file of a sample, with its height and width multiplied by `factor`."""
    height, width = scale_size((box.height_px, box.width_px), factor)
    spacing_um_px = sample.spacing_um_px / factor
    top, left = box.top_px * factor, box.left_px * factor
    if is_read_in_parts(sample.path):
        image: Slide | NDArray[np.uint8] = open_slide_once(sample.path, sample.spacing_um_px)
    else:
        image = _read_rgb_once(sample.path, sample.path.stat().st_mtime_ns)
    with as_slide(image, sample.spacing_um_px) as slide:
        rows, columns = slide.size_at(spacing_um_px)
        # Half a pixel beyond the edge of the slide would be white.
        missing = [max(0, int(top) + height - rows), max(0, int(left) + width - columns)]
        pixels = slide.read(top, left, height - missing[0], width - missing[1], spacing_um_px)
    return np.pad(pixels, ((0, missing[0]), (0, missing[1]), (0, 0)), "edge") if any(missing) else pixels


@lru_cache(maxsize=4)
def _read_rgb_once(path: Path, modified_ns: int) -> NDArray[np.uint8]:  # noqa: ARG001
    """Read an image of which several samples are parts."""
    return read_rgb(path)


def is_read_in_parts(path: Path) -> bool:
    """Return whether a file is a slide, or too large to be read as a whole."""
    if path.suffix.lower() in SLIDE_SUFFIXES:
        return True
    return _is_too_large(path, path.stat().st_mtime_ns if path.exists() else 0)


@lru_cache(maxsize=4096)
def _is_too_large(path: Path, modified_ns: int) -> bool:  # noqa: ARG001
    """Return whether an image is too large to be read as a whole."""
    try:
        image_size_px(path)
    except ImageTooLargeError:
        return True
    return False


def annotated_size_px(path: Path) -> tuple[int, int]:
    """Return (height, width) of an image file, or of level 0 of a slide file, without reading its pixels."""
    return describe_slide(path).levels[0].size_px if is_read_in_parts(path) else image_size_px(path)


def sample_size_px(sample: Sample) -> tuple[int, int]:
    """Return (height, width) of a sample at its own pixel spacing, without reading its pixels."""
    if sample.box is not None:
        return sample.box.height_px, sample.box.width_px
    if sample.row is not None:
        _, height, width, _ = read_hdf5_shape(sample.path, "x")
        return height, width
    return annotated_size_px(sample.path)


def image_spacing_um_px(path: Path) -> float | None:
    """Return the pixel spacing (µm/px) that an image file or a slide file specifies, or None if there is none."""
    if is_read_in_parts(path):
        size_um = describe_slide(path).pixel_size_um
        return None if size_um is None else size_um[1]
    return spacing_um_px(path)


def group_for_reading(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Divide samples into groups that `read_together` reads at once.

    A group is a single image file, or up to MAX_ROWS_PER_READ images of the same split in consecutive rows of an HDF5
    file.
    """

    def key(position: int, sample: Sample) -> tuple[Path, str, int, int]:
        # Row minus position is constant as long as rows are consecutive.
        return sample.path, sample.split, (sample.row or 0) - position, position // MAX_ROWS_PER_READ

    groups = groupby(enumerate(samples), lambda pair: key(*pair))
    return [[sample for _, sample in group] for _, group in groups]


def resampling_factor(sample: Sample, spacing_um_px: float | None) -> float:
    """Return the factor by which the height and the width of an image change by resampling to `spacing_um_px`.

    None stands for the pixel spacing of the sample. The factor is exactly 1 if the pixel spacing of the sample differs
    from `spacing_um_px` by 5 % or less.
    """
    factor = 1.0 if spacing_um_px is None else sample.spacing_um_px / spacing_um_px
    return 1.0 if abs(factor - 1) <= SAME_SPACING else factor


def scale_size(size_px: tuple[int, int], factor: float) -> tuple[int, int]:
    """Return (height, width) of an image after resampling by a factor."""
    return max(1, round(size_px[0] * factor)), max(1, round(size_px[1] * factor))


# Files in folders


def find_files(folder: Path | None, suffixes: Collection[str]) -> list[Path]:
    """Return all files with one of the suffixes in a folder and its subfolders, sorted.

    If `folder` is None, the list is empty. Links are followed. Hidden files, such as `._x.tif` of macOS, are left out.
    `suffixes` are in lower case; suffixes of files may be in upper case.
    """
    if folder is None:
        return []
    return sorted(
        Path(parent) / name
        for parent, names in _walk(folder)
        for name in names
        if Path(name).suffix.lower() in suffixes and not name.startswith(".")
    )


def _walk(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yield the path of a folder and of each of its subfolders, and the names of the files in it.

    Links to folders are followed, except to a folder that contains the link, which would never end.
    """
    containing = {str(folder): {os.path.realpath(folder)}}  # for each folder: the folders that contain it, and itself
    for parent, subfolders, names in os.walk(folder, followlinks=True):
        above = containing.pop(parent)
        targets = {name: os.path.realpath(os.path.join(parent, name)) for name in subfolders}  # noqa: PTH118
        subfolders[:] = [name for name in subfolders if targets[name] not in above]
        containing |= {os.path.join(parent, name): above | {targets[name]} for name in subfolders}  # noqa: PTH118
        yield parent, names


def index_by_stem(root: Path, paths: Iterable[Path]) -> tuple[dict[str, Path], list[Finding]]:
    """Return a dictionary from file names without suffix to paths, and findings about repeated names.

    If several files have the same name without suffix, all but the first are left out. A finding for each of them
    contains its path relative to `root`.
    """
    files: dict[str, Path] = {}
    findings = []
    for path in paths:
        if (first := files.setdefault(path.stem, path)) != path:
            kept = first.relative_to(root).as_posix()
            message = f"is left out, because it has the same name as {kept}; rename one of the two."
            findings.append(Finding(path.relative_to(root).as_posix(), message))
    return files, findings


def count_and_list(names: Sequence[str], noun: str) -> str:
    """Return text for messages: the number of names with a noun, and the first few names.

    >>> from rotopath.data.dataset import count_and_list
    >>> count_and_list(["01"], "case"), count_and_list(["a", "b", "c", "d", "e", "f"], "field")
    ('1 case (01)', '6 fields (a, b, c, d, e, ...)')
    """
    listed = ", ".join(names[:MAX_NAMES_LISTED]) + (", ..." if len(names) > MAX_NAMES_LISTED else "")
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''} ({listed})"


# CSV tables


def read_table(path: Path, required: Collection[str]) -> list[tuple[int, Row]]:
    """Read a CSV file with a header; return (line number, row) for each row that is not empty.

    A row is a dictionary from column names in lower case to cells; missing cells are empty strings. Raises TableError
    if the file cannot be read, if a column in `required` is missing, or if a row has text beyond the last column.
    """
    rows = read_csv(path)
    header = [name.lower() for name in rows[0][1]] if rows else []
    if missing := [name for name in required if name not in header]:
        columns = " and ".join(map(repr, required))
        raise TableError(path, f"has no column {missing[0]!r}; its first line must contain {columns}.")
    table = []
    for line, cells in rows[1:]:
        if any(cells[len(header) :]):
            raise TableError(
                path,
                f"has {len(cells)} cells in line {line}, but only {len(header)} columns; remove the "
                f"additional cells, or put quotes around cells that contain the delimiter.",
            )
        table.append((line, dict(zip(header, cells + [""] * len(header), strict=False))))
    return table


def read_csv(path: Path) -> list[tuple[int, list[str]]]:
    """Read a CSV file; return (line number, cells without surrounding spaces) for each line that is not empty."""
    expect_file(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.read(SNIFFED_CHARACTERS)
            file.seek(0)
            delimiter = _find_delimiter(start)
            reader = csv.reader(file, delimiter=delimiter, skipinitialspace=delimiter == " ")
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError:
        raise TableError(path, "does not exist.") from None
    except (UnicodeDecodeError, csv.Error):
        raise TableError(path, "is not readable text; save it as a CSV file in UTF-8.") from None
    except OSError as error:
        raise TableError(path, f"cannot be read ({error.strerror}).") from None
    return [(line, cells) for line, cells in rows if any(cells)]


def _find_delimiter(text: str) -> str:
    """Return the delimiter of columns: the most frequent one in the first line with text, except that of decimals.

    Delimiters are semicolon, tab, vertical bar and comma, and a space if the line contains none of them. In a line such
    as `12,5;33,0`, the comma is a decimal comma.
    """
    header = next((line for line in text.splitlines() if line.strip(",;\t| ")), "")
    others = max(";\t|", key=header.count)
    if header.count(others) and (header.count(others) >= header.count(",") or re.search(r"\d,\d", header)):
        return others
    return "," if "," in header or " " not in header.strip() else " "


# Arrays in HDF5 files, readable from any number of processes


def read_hdf5_shape(path: Path, key: str) -> tuple[int, ...]:
    """Return the shape of the array `key` in an HDF5 file, without reading the array.

    Raises UnreadableHdf5Error if the elements of the array are not bytes (uint8).
    """
    array = _open_hdf5_array(path, key)
    with _hdf5_errors(path):
        dtype, shape = array.dtype, tuple(int(length) for length in array.shape)
    if dtype != np.uint8:
        raise UnreadableHdf5Error(
            path, f"has an array {key!r} of type {dtype}; expected bytes (uint8); download it again."
        )
    if math.prod(shape[1:]) > MAX_ROW_BYTES:
        raise UnreadableHdf5Error(path, f"is damaged: its images would have the shape {shape[1:]}; download it again.")
    return shape


def read_hdf5_rows(path: Path, key: str, start: int, stop: int) -> NDArray[np.uint8]:
    """Read rows `start` to `stop - 1`, along the first axis, of the array `key` (uint8) in an HDF5 file."""
    array = _open_hdf5_array(path, key)
    with _hdf5_errors(path, f"rows {start} to {stop - 1} of {key!r}"):
        rows: NDArray[np.uint8] = array[start:stop]
    return rows


@contextmanager
def _hdf5_errors(path: Path, part: str = "its header") -> Iterator[None]:
    """Convert any error of h5py to an UnreadableHdf5Error: damaged bytes raise errors of many types."""
    try:
        yield
    except UnreadableHdf5Error:
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UnreadableHdf5Error(path, f"is damaged at {part} ({reason}); download it again.") from None


def _open_hdf5_array(path: Path, key: str) -> "h5py.Dataset":
    """Return the array `key` in an HDF5 file, without reading its elements."""
    expect_file(path)
    try:
        modified_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        raise UnreadableHdf5Error(path, "does not exist.") from None
    return _open_once(path, key, os.getpid(), modified_ns)


@lru_cache(maxsize=16)
def _open_once(path: Path, key: str, process: int, modified_ns: int) -> "h5py.Dataset":  # noqa: ARG001
    """Open the array `key` in an HDF5 file. The function is cached, so that a process opens each file only once.

    `process` (process ID) and `modified_ns` (time of the last change of the file) are used only as keys of the cache: a
    forked process must not use the open file of its parent, and a changed file must be opened again.
    """
    import h5py

    try:
        file = h5py.File(path, "r")
    except (OSError, RuntimeError, KeyError, ValueError) as error:
        raise UnreadableHdf5Error(path, f"is not an HDF5 file, or is damaged ({error}); download it again.") from None
    with _hdf5_errors(path):
        array: Any = file.get(key)
        if not isinstance(array, h5py.Dataset):
            keys = ", ".join(map(repr, file)) or "nothing"
            file.close()
            raise UnreadableHdf5Error(path, f"has no array {key!r}; it contains {keys}; download it again.")
    return array
