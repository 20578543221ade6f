"""A collection of annotated images: which files there are, whose they are, and which split they belong to.

In: what a reader of one benchmark found in a folder. Out: pictures that can be read one by one, at any spacing, and
findings: sentences about what is wrong with the files or worth knowing about them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from rotopath.data import hdf5
from rotopath.images.files import UnreadableFileError, read_rgb, resample

Annotated = Literal["labels", "points", "objects"]  # a class for each image, positions, or outlines of objects
SYNTHETIC = "SYNTHETIC.txt"  # a file that tells made tissue from a benchmark in the same layout
ROWS_AT_ONCE = 1024  # of an HDF5 file
SAME_SPACING = 0.05  # scanners of one magnification differ by less; resampling by so little only blurs


class DataError(ValueError):
    """Data that cannot be used, said in one sentence."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What is to be said about a file: a problem, which stops its use, or a note, with which rotopath can live."""

    file: str  # relative to the root; empty where the whole collection is meant
    sentence: str
    is_problem: bool = True

    @classmethod
    def of(cls, error: UnreadableFileError, root: Path) -> "Finding":
        path = Path(error.path)
        return cls(path.relative_to(root).as_posix() if path.is_relative_to(root) else str(path), error.fault)

    def __str__(self) -> str:
        return f"{self.file}: {self.sentence}" if self.file else self.sentence


@dataclass(frozen=True, slots=True)
class Picture:
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
class Collection:
    """Everything that a folder or a manifest holds: images of one kind of annotation."""

    annotated: Annotated
    source: str
    root: Path
    pictures: tuple[Picture, ...]
    findings: tuple[Finding, ...] = ()  # of the layout; those of file contents are found by `check`
    published: Mapping[str, Mapping[str, int]] = field(default_factory=dict)  # counts of the paper, by split
    objects: str = "objects"  # what annotated objects are called
    classes: tuple[str, ...] = ()  # of labels, where the source itself names them in an order

    def split(self, name: str) -> tuple[Picture, ...]:
        """The pictures of one split; at least one."""
        found = tuple(picture for picture in self.pictures if picture.split == name)
        if not found:
            raise DataError(f"{self.root} has no images in the split {name!r}; run `rotopath data check` on it.")
        return found


def read_image(picture: Picture, spacing_um_px: float) -> NDArray[np.uint8]:
    """The pixels (H, W, 3) at a spacing, resampled where the picture's own differs."""
    return resample(read_run([picture])[0], scale(picture, spacing_um_px))


def read_run(run: Sequence[Picture]) -> list[NDArray[np.uint8]]:
    """The pixels of pictures that `runs` put together, as they are in the file."""
    first = run[0]
    if first.row is None:
        return [read_rgb(first.path)]
    return list(hdf5.read_rows(first.path, "x", first.row, first.row + len(run)))


def runs(pictures: Sequence[Picture]) -> list[list[Picture]]:
    """Pictures that are read at once: single files, and consecutive rows of an HDF5 file, not too many."""

    def run_of(position: int, picture: Picture) -> tuple[Path, str, int, int]:
        return picture.path, picture.split, (picture.row or 0) - position, position // ROWS_AT_ONCE

    grouped = groupby(enumerate(pictures), lambda pair: run_of(*pair))
    return [[picture for _, picture in run] for _, run in grouped]


def scale(picture: Picture, spacing_um_px: float) -> float:
    """The factor by which a picture grows at another spacing; exactly 1 where the two are practically the same."""
    factor = picture.spacing_um_px / spacing_um_px
    return 1.0 if abs(factor - 1) <= SAME_SPACING else factor


def problems(findings: Iterable[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.is_problem]
