"""Make files once that several test processes read, hold locks as another process does, and put pipes into folders."""

import fcntl
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from rotopath.writing import hold_lock


def make_once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder with the files that `make` writes. The first process makes them while the others wait."""
    base = factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / name
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "made").exists():
            make(folder)
            (folder / "made").touch()
    return folder


@contextmanager
def hold_elsewhere(path: Path) -> Iterator[None]:
    """Hold the lock of a path in another thread, which excludes this thread as a process would."""
    lock = hold_lock(path, 0)
    with ThreadPoolExecutor(1) as thread:
        thread.submit(lock.__enter__).result()
        try:
            yield
        finally:
            thread.submit(lock.__exit__, None, None, None).result()


@contextmanager
def pipe_at(path: Path, longest_s: int = 30) -> Iterator[None]:
    """Replace a file by a pipe, and fail if the block waits: a pipe waits until another program writes to it."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail(f"the program waits for the pipe {path}"))
    signal.alarm(longest_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
