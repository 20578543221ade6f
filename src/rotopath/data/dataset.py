"""Small CSV tables with a header: lists of splits, labels and manifests.

In: a path and the columns that it must have. Out: its rows with their line numbers; or one sentence about the file.

HDF5 files, read a few rows at a time, from any number of processes.

In: a path and the name of a data set. Out: its shape, or some of its rows; or one sentence about the file.

A dataset of annotated images: which files there are, whose they are, and which split they belong to.

In: what a reader of one benchmark found in a folder. Out: samples that can be read one by one, at any spacing, and
findings: sentences about what is wrong with the files or worth knowing about them.

What the readers of benchmark folders share: finding files, and a `split.csv` that a person may put beside them.
"""

import csv
import os
from collections.abc import Collection as AbstractCollection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rotopath.images.files import UnreadableFileError

if TYPE_CHECKING:
    import h5py
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Literal

from rotopath.data.splits import SPLITS
from rotopath.images.files import read_rgb, resample

Row = dict[str, str]
HEAD_CHARACTERS = 10_000


class TableError(UnreadableFileError):
    """A file that is no table, or lacks columns that it should have."""


def read_table(path: Path, required: AbstractCollection[str]) -> list[tuple[int, Row]]:
    """(line, row) of each row that is not empty; names of columns in lower case, cells without spaces around them."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            start = file.read(HEAD_CHARACTERS)
            file.seek(0)
            reader = csv.reader(file, delimiter=find_delimiter(start))
            rows = [(reader.line_num, [cell.strip() for cell in cells]) for cells in reader]
    except FileNotFoundError:
        raise TableError(path, "does not exist.") from None
    except (UnicodeDecodeError, csv.Error):
        raise TableError(path, "is no text that can be read; save it as a CSV file in UTF-8.") from None
    except OSError as error:
        raise TableError(path, f"cannot be read ({error.strerror}).") from None
    rows = [(line, cells) for line, cells in rows if any(cells)]
    header = [name.lower() for name in rows[0][1]] if rows else []
    if missing := [name for name in required if name not in header]:
        raise TableError(path, f"has no column {missing[0]!r}; its first line must name {' and '.join(required)}.")
    table = []
    for line, cells in rows[1:]:
        if any(cells[len(header) :]):
            raise TableError(path, f"has {len(cells)} cells in line {line}, but {len(header)} columns.")
        table.append((line, dict(zip(header, cells + [""] * len(header), strict=False))))
    return table


def find_delimiter(text: str) -> str:
    """What separates the columns: spreadsheets of many countries write semicolons."""
    header = next((line for line in text.splitlines() if line.strip(",;\t ")), "")
    return max(",;\t", key=header.count)


class UnreadableHdf5Error(UnreadableFileError):
    """An HDF5 file that is damaged, or lacks what it should hold."""


def shape_of(path: Path, key: str) -> tuple[int, ...]:
    """The shape of a data set of bytes, without reading it."""
    found = _dataset(path, key)
    if found.dtype != np.uint8:
        raise UnreadableHdf5Error(path, f"holds {found.dtype} under {key!r}, where bytes (uint8) are expected.")
    return tuple(int(length) for length in found.shape)


def read_rows(path: Path, key: str, start: int, stop: int) -> NDArray[np.uint8]:
    """Rows `start` to `stop` of a data set."""
    try:
        rows: NDArray[np.uint8] = _dataset(path, key)[start:stop]
    except OSError as error:
        raise UnreadableHdf5Error(
            path, f"is damaged at rows {start} to {stop - 1} of {key!r} ({error}); download it anew."
        ) from None
    return rows


def _dataset(path: Path, key: str) -> "h5py.Dataset":
    try:
        written_ns = path.stat().st_mtime_ns
    except FileNotFoundError:
        raise UnreadableHdf5Error(path, "does not exist.") from None
    return _opened_dataset(path, key, os.getpid(), written_ns)


@lru_cache(maxsize=16)
def _opened_dataset(path: Path, key: str, process: int, written_ns: int) -> "h5py.Dataset":  # noqa: ARG001
    """Opened once a process, because forked workers must not share a handle; anew when the file was written anew."""
    import h5py

    try:
        file = h5py.File(path, "r")
    except OSError as error:
        raise UnreadableHdf5Error(path, f"is no HDF5 file, or a damaged one ({error}); download it anew.") from None
    found: Any = file.get(key)
    if not isinstance(found, h5py.Dataset):
        keys = ", ".join(map(repr, file)) or "nothing"
        file.close()
        raise UnreadableHdf5Error(path, f"has no data set {key!r}; it holds {keys}.")
    return found


Annotated = Literal["labels", "points", "objects"]  # a class for each image, positions, or outlines of objects
SYNTHETIC = "SYNTHETIC.txt"  # a file that tells made tissue from a benchmark in the same layout
ROWS_AT_ONCE = 1024  # of an HDF5 file
SAME_SPACING = 0.05  # scanners of one magnification differ by less; resampling by so little only blurs


class DataError(ValueError):
    """Data that cannot be used, said in one sentence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said about a file: a problem, which stops its use, or a note, with which rotopath can live."""

    file: str  # relative to the root; empty where the whole dataset is meant
    sentence: str
    is_problem: bool = True

    @classmethod
    def of(cls, error: UnreadableFileError, root: Path) -> "Finding":
        path = Path(error.path)
        return cls(path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path), error.fault)

    def __str__(self) -> str:
        return f"{self.file}: {self.sentence}" if self.file else self.sentence


@dataclass(frozen=True, slots=True)
class Sample:
    """One annotated image: a file, or a row of an HDF5 file."""

    path: Path
    name: str  # as messages call it
    case: str  # the patient; never in two splits
    split: str
    spacing_um_px: float
    row: int | None = None  # in an HDF5 file
    label: str | None = None  # its class, where the whole image has one
    annotations: tuple[Path, ...] = ()  # of its objects; the first one counts, further ones are for comparison
    stratum: str = ""  # organ, where regimes are taken of each


@dataclass(frozen=True)
class Dataset:
    """Everything that a folder or a manifest holds: images of one kind of annotation."""

    annotated: Annotated
    source: str
    root: Path
    samples: tuple[Sample, ...]
    findings: tuple[Finding, ...] = ()  # of the layout; those of file contents are found by `check`
    published: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # counts of the paper, by split
    objects: str = "objects"  # what annotated objects are called
    classes: tuple[str, ...] = ()  # of labels, where the source itself names them in an order

    def split(self, name: str) -> tuple[Sample, ...]:
        """The samples of one split; at least one."""
        found = tuple(sample for sample in self.samples if sample.split == name)
        if not found:
            raise DataError(f"{self.root} has no images in the split {name!r}; run `rotopath data check` on it.")
        return found


def read_image(sample: Sample, spacing_um_px: float) -> NDArray[np.uint8]:
    """The pixels (H, W, 3) at a spacing, resampled where the sample's own differs."""
    return resample(read_run([sample])[0], scale(sample, spacing_um_px))


def read_run(run: Sequence[Sample]) -> list[NDArray[np.uint8]]:
    """The pixels of samples that `runs` put together, as they are in the file."""
    first = run[0]
    if first.row is None:
        return [read_rgb(first.path)]
    return list(read_rows(first.path, "x", first.row, first.row + len(run)))


def runs(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Pictures that are read at once: single files, and consecutive rows of an HDF5 file, not too many."""

    def run_of(position: int, sample: Sample) -> tuple[Path, str, int, int]:
        return sample.path, sample.split, (sample.row or 0) - position, position // ROWS_AT_ONCE

    grouped = groupby(enumerate(samples), lambda pair: run_of(*pair))
    return [[sample for _, sample in run] for _, run in grouped]


def scale(sample: Sample, spacing_um_px: float) -> float:
    """The factor by which a sample grows at another spacing; exactly 1 where the two are practically the same."""
    factor = sample.spacing_um_px / spacing_um_px
    return 1.0 if abs(factor - 1) <= SAME_SPACING else factor


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_problem]


IMAGE_SUFFIXES = frozenset({".tif", ".tiff", ".png", ".jpg", ".jpeg"})
SPLIT_FILE = "split.csv"
NAMED_AT_MOST = 5


def files_in(folder: Path | None, suffixes: AbstractCollection[str]) -> list[Path]:
    """All files with one of the suffixes, at any depth, in order; hidden ones (`._x.tif` of a Mac) are left out."""
    if folder is None:
        return []
    return sorted(
        Path(parent) / name
        for parent, _, names in os.walk(folder, followlinks=True)
        for name in names
        if Path(name).suffix.lower() in suffixes and not name.startswith(".")
    )


def by_stem(root: Path, paths: Iterable[Path]) -> tuple[dict[str, Path], list[Finding]]:
    """Files by their names without endings; of two with the same name the first counts, and the other is a finding."""
    found: dict[str, Path] = {}
    findings = []
    for path in paths:
        if (twin := found.setdefault(path.stem, path)) != path:
            sentence = f"there is {twin.relative_to(root).as_posix()} of the same name; this one is left out."
            findings.append(Finding(path.relative_to(root).as_posix(), sentence))
    return found, findings


def read_splits(
    root: Path, column: str, present: AbstractCollection[str], key_of: Callable[[str], str] = str
) -> tuple[dict[str, Row] | None, list[Finding]]:
    """The rows of `split.csv` for what is present, by their keys, and all findings; None without such a file."""
    path = root / SPLIT_FILE
    if not path.is_file():
        return None, []
    rows: dict[str, Row] = {}
    findings = []
    for line, row in read_table(path, (column, "split")):
        key = key_of(row[column])
        if row["split"] not in SPLITS:
            sentence = f"line {line} has the split {row['split']!r}; choose from {', '.join(SPLITS)}."
        elif key in rows:
            sentence = f"line {line} lists {row[column]!r} a second time."
        else:
            rows[key] = row
            continue
        findings.append(Finding(path.name, sentence))
    if absent := sorted(rows.keys() - set(present)):
        findings.append(Finding(path.name, f"it lists {listed(absent, column)} that the folder does not hold."))
    if unlisted := sorted(set(present) - rows.keys()):
        findings.append(left_out(unlisted, column))
    return {key: row for key, row in rows.items() if key in present}, findings


def left_out(names: Sequence[str], column: str) -> Finding:
    """That something has no split, and what to do about it."""
    sentence = f"{listed(names, column)} without a split: left out; a split.csv ({column},split) gives them a place."
    return Finding("", sentence, is_problem=False)


def listed(names: Sequence[str], what: str) -> str:
    """How many there are, and the names of the first few.

    >>> from rotopath.data.dataset import listed
    >>> listed(["01"], "case"), listed(["a", "b", "c", "d", "e", "f"], "field")
    ('1 case (01)', '6 fields (a, b, c, d, e, ...)')
    """
    shown = ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")
    return f"{len(names)} {what}{'s' if len(names) != 1 else ''} ({shown})"
