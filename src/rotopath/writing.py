"""Write files and folders atomically: a file or folder has a temporary name until all its content is on the disk.

If the process is killed at any time, the final path contains the complete old content or the complete new content, or
does not exist. The final path never contains incomplete content. What a killed process leaves has a name that begins
with a dot, and is removed by the next process that writes to the path.

A lock keeps several processes and threads from writing to a path at the same time.
"""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

from filelock import FileLock, Timeout

MAX_DIGITS = 20  # of whole numbers in JSON files; that is enough for 64 bits
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)  # errors of file systems without locks
READ_ONLY = (errno.EACCES, errno.EPERM, errno.EROFS)  # errors of folders in which no file can be created
TEMPORARY = "rotopath-"  # start of the names of temporary folders
BUSY_AFTER_S = 2.0  # a process that was killed holds its locks for a moment


class BusyError(Exception):
    """Raised if another process or thread writes to a path. The message is one sentence, and names its process."""

    def __init__(self, path: Path, process_id: str) -> None:
        super().__init__(
            f"Another process (ID {process_id}) is writing to {path}; wait until it has ended, or choose another path "
            f"with --out."
        )
        self.process_id = process_id


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary file that replaces the file `path` at the end of the `with` block.

    The caller writes the temporary file. If the block raises an error, the temporary file is removed and `path` is not
    changed. The name of the temporary file depends only on `path`, so that the next process overwrites the unfinished
    file of a killed process. If another process or thread is writing the file, wait until it has finished.
    """
    unfinished = path.with_name(f".{path.name}.unfinished")
    with _acquire(path, None):
        try:
            yield unfinished
            _sync_file(unfinished)
            unfinished.replace(path)
        except BaseException:  # not `finally`, because another process may use the temporary path after the rename
            unfinished.unlink(missing_ok=True)
            raise
    _sync_folder(path.parent)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield the path of a temporary folder that replaces the folder `path` at the end of the `with` block.

    The caller writes files in the temporary folder. If the block raises an error, the temporary folder is removed and
    `path` is not changed. If the process is killed while it replaces an old folder, `path` may be missing. The complete
    new folder then has a temporary name, and `recover_folder` or the next call of `atomic_folder` renames it to `path`.
    Only one process at a time may write to a path: hold its lock (`hold_lock`).
    """
    path, unfinished, finished = _state_paths(path)
    _replace_with_finished(path)  # finishes the work of an earlier process that was killed
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        yield unfinished
        _sync_tree(unfinished)
        if path.exists():
            _rename(unfinished, finished)  # a later process uses the new folder, even if this process is killed now
            _replace_with_finished(path)
        else:
            _rename(unfinished, path)
    finally:
        recover_folder(path)  # an interrupt (Ctrl+C) may occur between the renames
        shutil.rmtree(unfinished, ignore_errors=True)


def recover_folder(path: Path) -> Path:
    """Rename a complete new folder to `path` if the process that wrote the folder was killed before it could do this.

    Call this function before you read the folder. The function does nothing if `path` exists, or if there is no
    complete new folder. Returns `path`.
    """
    resolved, _, finished = _state_paths(path)
    if not resolved.exists():
        with suppress(FileNotFoundError):  # there is no complete folder, or another process has just renamed it
            _rename(finished, resolved)
    return path


def remove_leftovers(path: Path) -> None:
    """Remove what a killed process has left beside a file or folder, unless another process is writing to it."""
    if _lock_file(path).exists():
        with suppress(BusyError, OSError), hold_lock(path):
            recover_folder(path)
            shutil.rmtree(_state_paths(path)[1], ignore_errors=True)


@contextmanager
def hold_lock(path: Path, wait_s: float | None = BUSY_AFTER_S) -> Iterator[None]:
    """Context manager: hold the lock of a file or folder, so that no other process or thread writes to it.

    Raises BusyError if another process does not release the lock within `wait_s` seconds; None waits without end. The
    operating system releases the lock when the process ends, also if the process is killed. A thread may hold the same
    lock several times. There is no lock on a file system without locks, and in a folder in which this process may not
    create files, such as that of a volume of a container.

    For the path NAME, the lock file is `.NAME.lock` in the same folder. The process ID is in a separate file
    `.NAME.pid`, because on Windows other processes cannot read a locked file. Both files are removed at the end.
    """
    path = path.resolve()
    path.parent.mkdir(parents=True, exist_ok=True)
    owner = _owner_file(path)
    try:
        with _acquire(path, wait_s) as is_new:
            try:
                if is_new:
                    owner.write_text(str(os.getpid()))
                yield
            finally:
                if is_new:
                    owner.unlink(missing_ok=True)
    except Timeout:
        raise BusyError(path, read_owner(path)) from None


def read_owner(path: Path) -> str:
    """Return the ID of the process that holds the lock of a path, or "unknown" if it has just ended."""
    try:
        return _owner_file(path).read_text() or "unknown"
    except OSError:
        return "unknown"


def _owner_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.pid")


@contextmanager
def _acquire(path: Path, wait_s: float | None, required: bool = False) -> Iterator[bool]:
    """Context manager: acquire the lock of a path, and yield whether this thread holds it now but did not before.

    Raises Timeout if another process or thread does not release the lock within `wait_s` seconds. Where no lock is
    possible (see `hold_lock`), there is none, or an OSError if it is `required`.
    """
    file = _lock_file(path)
    with ExitStack() as stack:
        is_new = False
        try:
            # With fallback_to_soft=True, filelock would create an ordinary file on file systems without locks. If the
            # process is killed, this file would remain and block the path forever. With is_singleton=True, a thread
            # can acquire a lock that it holds.
            lock = FileLock(file, fallback_to_soft=False, is_singleton=True)
            stack.enter_context(lock.acquire(timeout=-1 if wait_s is None else wait_s))
            is_new = lock.lock_counter == 1
        except OSError as error:
            if isinstance(error, Timeout):
                raise
            if error.errno in NO_LOCKS:
                file.unlink(missing_ok=True)  # other processes would take it for that of a killed process
            elif error.errno not in READ_ONLY or file.exists():  # it may be the lock of another user
                raise
            if required:
                raise
        try:
            yield is_new
        finally:
            if is_new:  # while the lock is held: filelock notices if a file was removed before it acquired the lock
                with suppress(PermissionError):  # Windows does not remove open files
                    file.unlink(missing_ok=True)


def _lock_file(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def is_disk_full(error: BaseException | None) -> bool:
    """Return whether an error, or one of the errors that caused it, means that a disk is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Yield a new folder for temporary files, and remove it at the end.

    Also remove those that killed processes of the same user have left: folders with such a name whose lock is free.
    Large maps would fill the disk otherwise. Where files cannot be locked, nothing is removed.
    """
    parent = Path(tempfile.gettempdir())
    for leftover in parent.glob(f"{TEMPORARY}*"):
        if not re.fullmatch(f"{TEMPORARY}[0-9a-f]{{32}}", leftover.name):  # it may be a user's own folder
            continue
        with suppress(OSError):  # it is used (Timeout), cannot be locked, or has just been removed
            if not hasattr(os, "getuid") or leftover.lstat().st_uid == os.getuid():
                with _acquire(leftover, 0, required=True) as is_free:
                    if is_free:  # and not held by this thread
                        shutil.rmtree(leftover, ignore_errors=True)
    folder = parent / f"{TEMPORARY}{uuid4().hex}"
    with _acquire(folder, None):  # before the folder exists, so that no other process removes it
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic_file(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    """Write a binary file atomically."""
    with atomic_file(path) as unfinished:
        unfinished.write_bytes(content)


def write_json(path: Path, content: object) -> None:
    """Write a JSON file atomically. Raises ValueError for NaN and infinite numbers, which JSON cannot contain."""
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def identify_file(path: Path, hashed_bytes: float = math.inf) -> dict[str, int | str]:
    """Return the size of a file and, if it has at most `hashed_bytes`, its SHA-256, to notice later that it changed.

    Raises OSError if there is no file, also for a pipe or a device: reading it may wait or go on without end.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file.")
    size = path.stat().st_size
    if size > hashed_bytes:
        return {"bytes": size}
    with path.open("rb") as file:
        return {"bytes": size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def is_unchanged(path: Path, identity: Mapping[str, object], hashed_bytes: float = math.inf) -> bool:
    """Return whether a file is the one that `identify_file` has described. Larger ones are compared by size only."""
    own = identify_file(path, hashed_bytes if "sha256" in identity else -1)
    return all(identity.get(key) == value for key, value in own.items())


def parse_json(content: str | bytes, only_finite: bool = True) -> Any:
    """Return the value of a JSON text from an unknown source. `write_json` writes such texts.

    Raises ValueError if the text is not valid JSON, not Unicode, or nested too deeply, or if a whole number has more
    than MAX_DIGITS digits. With `only_finite`, numbers that are NaN or infinite are refused as well.
    """
    to_float, constant = (_parse_float, _refuse_constant) if only_finite else (None, None)
    try:
        return json.loads(content, parse_constant=constant, parse_float=to_float, parse_int=_parse_whole)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(name: str) -> float:
    raise ValueError(f"JSON does not allow the number {name}")  # such as NaN, which json.loads accepts


def _parse_float(text: str) -> float:
    if not math.isfinite(value := float(text)):
        raise ValueError(f"the number {text:.20} is too large")
    return value


def _parse_whole(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"a number has {len(text)} digits, but may have {MAX_DIGITS}")
    return int(text)


def _replace_with_finished(path: Path) -> None:
    """Replace the folder NAME at `path` with the complete new folder `.NAME.finished`. If there is none, do nothing."""
    path, unfinished, finished = _state_paths(path)
    if not finished.exists():
        return
    if path.exists():
        shutil.rmtree(unfinished, ignore_errors=True)
        _rename(path, unfinished)  # a folder with this name is never read, so its removal may be interrupted
    recover_folder(path)
    shutil.rmtree(unfinished, ignore_errors=True)


def _state_paths(path: Path) -> tuple[Path, Path, Path]:
    """Return three paths of a new folder: `path` in absolute form, and two temporary paths in the same parent folder.

    The new folder has the second path (unfinished) until all its files are on the disk. If there is an old folder at
    `path`, the new folder then has the third path (finished) until it replaces the old folder.
    """
    path = path.resolve()  # gives "." a name, and follows a symbolic link, so that the link itself is not replaced
    return path, path.with_name(f".{path.name}.unfinished"), path.with_name(f".{path.name}.finished")


def _rename(old: Path, new: Path) -> None:
    """Rename a folder, and wait until the new name is on the disk. Thus, several renames reach the disk in order."""
    old.rename(new)
    _sync_folder(new.parent)


def _sync_tree(folder: Path) -> None:
    """Wait until the content and the names of all files in a folder and its subfolders are on the disk."""
    for subfolder, _, names in os.walk(folder, topdown=False):
        for name in names:
            if not (path := Path(subfolder, name)).is_symlink():  # symbolic links have no content to write
                _sync_file(path)
        _sync_folder(Path(subfolder))


def _sync_file(path: Path) -> None:
    """Wait until the content of a file is on the disk."""
    with path.open("rb+" if os.name == "nt" else "rb") as file:  # Windows requires write access
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Wait until the names of the files in a folder are on the disk, if the system supports it."""
    with suppress(OSError):  # Windows does not open folders, and some network file systems do not synchronize folders
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
