"""Files and folders that are whole or not there at all: written under another name, and renamed once on the disk.

In: the path of a file or folder to be. Out: a name to write to in the meantime.
"""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A name to write to, which takes the place of `path` once it is written and on the disk.

    The name is the same in all processes, so that the next writer removes the file of one that was killed. Only one
    process at a time may therefore write a path.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        yield unfinished
        _sync_file(unfinished)
        unfinished.replace(path)
    except BaseException:  # else the name is free again, and may be another process's by now
        unfinished.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A folder to fill, which takes the place of `path` once all that is in it is written and on the disk.

    Only one process at a time may write a path. If it is killed, either the old folder is whole, or the new one, which
    `recover_folder` and the next writer put in place.
    """
    path, unfinished, finished = _name_states(path)
    _put_in_place(path)  # after a process that was killed before it could
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _sync_tree(unfinished)
        if path.exists():
            _rename(unfinished, finished)  # from here on the new folder counts, whatever happens
            _put_in_place(path)
        else:
            _rename(unfinished, path)
    finally:
        recover_folder(path)  # an interrupt may come between the renames
        shutil.rmtree(unfinished, ignore_errors=True)


def recover_folder(path: Path) -> Path:
    """Put a folder in place whose writer was killed between taking the old one away and renaming it; gives `path`.

    Readers call it before they look for a folder. If there is one, or none was finished, it does nothing.
    """
    place, _, finished = _name_states(path)
    if not place.exists():
        with suppress(FileNotFoundError):  # none was finished, or another process has put it in place
            _rename(finished, place)
    return path


def _put_in_place(path: Path) -> None:
    """Let the finished folder, if there is one, take the place of the old one, and remove that."""
    path, unfinished, finished = _name_states(path)
    if not finished.exists():
        return
    if path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        _rename(path, unfinished)  # never restored: it may be half removed when a process is killed
    recover_folder(path)
    shutil.rmtree(unfinished, ignore_errors=True)


def _name_states(path: Path) -> tuple[Path, Path, Path]:
    """The path of a folder, and its names before it takes that place: while it is filled, and when it is whole."""
    path = path.resolve()  # "." has no name to derive others from, and a link stays a link
    return path, path.with_name(f".{path.name}.unfinished"), path.with_name(f".{path.name}.finished")


def _rename(old: Path, new: Path) -> None:
    """Rename a folder, and wait until that is on the disk, so that renames get there in order."""
    old.rename(new)
    _sync_folder(new.parent)


def _sync_tree(folder: Path) -> None:
    """Wait until all files of a folder, at any depth, are on the disk, and the names of them."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not (path := Path(place, name)).is_symlink():  # a link is in its folder's list of names
                _sync_file(path)
        _sync_folder(Path(place))


def _sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb+" if os.name == "nt" else "rb") as file:  # Windows asks for the right to write
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where that is possible."""
    with suppress(OSError):  # Windows opens no folders, and some network file systems do not sync them
        number = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(number)
        finally:
            os.close(number)


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file, whole or not at all."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file, whole or not at all; numbers that JSON does not have are an error."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
