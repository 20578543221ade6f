"""Files that are whole or not there at all: written under another name, and renamed when they are on the disk.

In: the path of a file to be. Out: a name to write to in the meantime.
"""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` once it is written and on the disk."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def replaced_folder(path: Path) -> Iterator[Path]:
    """A folder to fill with files, which takes the place of `path` once all of them are written and on the disk."""
    path = path.absolute()  # "." has no name to derive others from
    unfinished, before = (path.with_name(f".{path.name}.{state}") for state in ("unfinished", "before"))
    shutil.rmtree(unfinished, ignore_errors=True)  # of one that was killed
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        for written in unfinished.iterdir():
            with written.open("rb+") as file:
                os.fsync(file.fileno())
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
            path.rename(before)
        unfinished.rename(path)
        shutil.rmtree(before, ignore_errors=True)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
