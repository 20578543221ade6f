"""HDF5 files, read a few rows at a time, from any number of processes.

In: a path and the name of a data set. Out: its shape, or some of its rows; or one sentence about the file.
"""

import os
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from rotopath.images.files import UnreadableFileError

if TYPE_CHECKING:
    import h5py


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
