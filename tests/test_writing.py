"""Atomic files and folders: complete or not there at all, whenever the process that writes them dies."""

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest
from sharing import hold_elsewhere

from rotopath import writing
from rotopath.writing import atomic_file, atomic_folder

KILLED = 9
# Replaces the folder argv[1], but dies before system call number argv[2] of the kinds argv[3:].
PROGRAM = f"""
import os, sys
from pathlib import Path
from rotopath.writing import atomic_folder

left = int(sys.argv[2])
kinds = sys.argv[3:]

def count_down(call):
    def counted(*arguments, **options):
        global left
        left -= 1
        if left < 0:
            os._exit({KILLED})  # as SIGKILL does: nothing is cleaned up
        return call(*arguments, **options)
    return counted

for kind in kinds:
    setattr(os, kind, count_down(getattr(os, kind)))
with atomic_folder(Path(sys.argv[1])) as unfinished:
    (unfinished / "a.txt").write_text("new")
    (unfinished / "maps").mkdir()
    (unfinished / "maps/b.txt").write_text("new")
"""
RENAMES = ("rename", "replace")
ALL_CHANGES = (*RENAMES, "fsync", "mkdir", "unlink", "rmdir")


def fill(folder: Path, text: str) -> None:
    (folder / "maps").mkdir(parents=True)
    for name in ("a.txt", "maps/b.txt"):
        (folder / name).write_text(text)


def fill_twice(folder: Path) -> None:
    """Fill a folder, then fail because all files exist already."""
    fill(folder, "new")
    fill(folder, "new")


def read(folder: Path) -> str | None:
    """The text in all files of a folder, which must be complete; None if there is no folder."""
    if not folder.exists():
        return None
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["a.txt", "maps", "maps/b.txt"]
    (text,) = {(folder / name).read_text() for name in ("a.txt", "maps/b.txt")}
    return text


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_until_killed(path: Path, calls: int, kinds: tuple[str, ...] = RENAMES) -> bool:
    """Replace a folder in another process that dies after a number of system calls; return whether it died."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(calls), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode == KILLED


def test_folder_with_subfolders_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "out") as unfinished:
            fill(unfinished, text)
        assert read(tmp_path / "out") == text
        assert list_names(tmp_path) == ["out"]


def test_error_while_filling_keeps_the_old_folder(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "out") as unfinished:
        fill_twice(unfinished)
    assert read(tmp_path / "out") == "old"
    assert list_names(tmp_path) == ["out"]


def test_writer_killed_between_renames_loses_nothing(tmp_path: Path) -> None:
    """The next writer has a complete folder, even if it fails itself."""
    for calls in count():
        path = tmp_path / f"{calls}" / "out"
        fill(path, "old")
        if not write_until_killed(path, calls):
            break
        with pytest.raises(ValueError, match="failed"), atomic_folder(path):
            raise ValueError("failed")
        assert read(path) in ("old", "new"), f"killed after {calls} renames"
        assert list_names(path.parent) == ["out"]
    assert calls > 1, "no process was killed between renames"


def test_reader_has_a_complete_folder_whenever_the_writer_was_killed(tmp_path: Path) -> None:
    """Kill the writer at each change to the disk; then read the folder, delete it, and write it again."""
    for calls in count():
        path = tmp_path / f"{calls}" / "out"
        fill(path, "old")
        if not write_until_killed(path, calls, ALL_CHANGES):
            break
        writing.recover_folder(path)
        assert read(path) in ("old", "new"), f"killed after {calls} changes"
        shutil.rmtree(path)
        writing.recover_folder(path)
        assert read(path) in (None, "new"), f"an old folder came back; killed after {calls} changes"
        with atomic_folder(path) as unfinished:
            fill(unfinished, "newer")
        assert read(path) == "newer"
        assert list_names(path.parent) == ["out"]
    assert calls > 10, "the program was killed at too few changes"


def test_first_folder_is_complete_or_missing_whenever_the_writer_was_killed(tmp_path: Path) -> None:
    for calls in count():
        path = tmp_path / f"{calls}" / "out"
        path.parent.mkdir()
        if not write_until_killed(path, calls, ALL_CHANGES):
            break
        writing.recover_folder(path)
        assert read(path) in (None, "new"), f"killed after {calls} changes"


def test_interrupt_between_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "out", os.rename
    fill(path, "old")

    def interrupt(old: Path, new: Path) -> None:
        rename(old, new)
        if not path.exists():
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "rename", interrupt)
    with pytest.raises(KeyboardInterrupt), atomic_folder(path) as unfinished:
        fill(unfinished, "new")
    assert read(path) in ("old", "new")
    assert list_names(tmp_path) == ["out"]


def test_reader_between_renames_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, rename = tmp_path / "out", os.rename

    def read_after(old: Path, new: Path) -> None:
        rename(old, new)
        monkeypatch.setattr(os, "rename", rename)
        writing.recover_folder(path)
        assert read(path) in ("old", "new")
        monkeypatch.setattr(os, "rename", read_after)

    for text in ("old", "new"):
        monkeypatch.setattr(os, "rename", read_after)
        with atomic_folder(path) as unfinished:
            fill(unfinished, text)
        assert read(path) == text
        assert list_names(tmp_path) == ["out"]


def test_recovery_restores_only_finished_folders(tmp_path: Path) -> None:
    writing.recover_folder(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    fill(tmp_path / ".out.unfinished", "new")  # left by a process that was killed while it filled the folder
    writing.recover_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_symbolic_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "large-disk", target_is_directory=True)
    for text in ("first", "second", "third"):
        with atomic_folder(link) as unfinished:
            fill(unfinished, text)
        assert link.is_symlink()
        assert read(tmp_path / "large-disk") == text
    assert list_names(tmp_path) == ["large-disk", "link"]


def test_working_directory_can_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with atomic_folder(Path()) as unfinished:
        fill(unfinished, "new")
    assert read(tmp_path / "out") == "new"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of the files and folders that were synced to the disk, in order."""
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: inodes.append(os.fstat(descriptor).st_ino))
    return inodes


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync folders")
def test_folder_is_synced_before_it_is_renamed(tmp_path: Path, synced: list[int]) -> None:
    fill(tmp_path / "out", "old")
    with atomic_folder(tmp_path / "out") as unfinished:
        fill(unfinished, "new")
        (unfinished / "nowhere").symlink_to("gone")  # has no content to sync
        inside = {path.lstat().st_ino for path in (unfinished, *unfinished.rglob("*")) if not path.is_symlink()}
    assert inside == set(synced[: len(inside)])
    assert synced[-1] == tmp_path.stat().st_ino


@pytest.mark.skipif(os.name == "nt", reason="Windows cannot sync folders")
def test_file_and_its_name_are_synced(tmp_path: Path, synced: list[int]) -> None:
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    assert synced == [(tmp_path / "a.txt").stat().st_ino, tmp_path.stat().st_ino]


def test_file_system_that_cannot_sync_folders_is_supported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def refuse_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(22, "Invalid argument")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    with atomic_folder(tmp_path / "out") as unfinished:
        fill(unfinished, "new")
    assert read(tmp_path / "out") == "new"


def test_error_while_writing_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_file(path) as unfinished:
        unfinished.write_text("new µ", encoding="ascii")  # opens the file, then fails
    assert unfinished.name == ".a.txt.unfinished", "a name that other code ignores"
    assert path.read_text() == "old"
    assert list_names(tmp_path) == ["a.txt"]


def test_file_that_was_not_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a.txt"):
        pass
    assert not list(tmp_path.iterdir())


def test_finished_writer_does_not_remove_the_file_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def start_another_writer(old: Path, new: Path) -> None:
        replace(old, new)
        Path(old).write_text("of another process")

    monkeypatch.setattr(os, "replace", start_another_writer)
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert unfinished.read_text() == "of another process"


def test_a_lock_is_held_by_one_at_a_time_although_its_file_is_removed(tmp_path: Path) -> None:
    """The package filelock must notice that a lock file was removed between its opening and its locking."""
    path, counter = tmp_path / "a", tmp_path / "counter"
    counter.write_text("0")

    def count_up(_: int) -> None:
        for _ in range(50):
            with writing.hold_lock(path, None):
                counter.write_text(str(int(counter.read_text()) + 1))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(count_up, range(4)))
    assert counter.read_text() == "200"
    assert list_names(tmp_path) == ["counter"]


def test_a_lock_that_is_held_is_refused_and_its_holder_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with hold_elsewhere(path), pytest.raises(writing.BusyError) as refused, writing.hold_lock(path, 0):
        pass
    assert str(refused.value) == (
        f"Another process (ID {os.getpid()}) is writing to {path}; wait until it has ended, or choose another path "
        f"with --out."
    )
    assert list_names(tmp_path) == []


def test_a_thread_may_hold_a_lock_twice_and_write_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with writing.hold_lock(path, 0):
        with writing.hold_lock(path, 0):
            writing.write_json(path, {})
        assert list_names(tmp_path) == [".a.json.lock", ".a.json.pid", "a.json"]
    assert list_names(tmp_path) == ["a.json"]


def test_threads_may_write_the_same_file(tmp_path: Path) -> None:
    """Each writes whole content, and none removes the unfinished file of another."""
    path = tmp_path / "a.txt"

    def write_often(number: int) -> None:
        for _ in range(30):
            writing.write_text(path, f"{number}" * 1000)
            assert path.read_text() in {f"{other}" * 1000 for other in range(4)}

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(write_often, range(4)))
    assert list_names(tmp_path) == ["a.txt"]


def test_temporary_folders_of_killed_processes_are_removed_and_others_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, link = tmp_path / f"rotopath-{'0' * 32}", tmp_path / f"rotopath-{'1' * 32}"
    left.mkdir()
    (left / "heat").write_text("large")
    link.symlink_to(tmp_path)
    (tmp_path / "rotopath-results").mkdir()  # of the user
    with ThreadPoolExecutor(1) as thread:
        other = writing.temporary_folder()
        used = thread.submit(other.__enter__).result()
        with writing.temporary_folder() as folder:
            assert not left.exists()
            assert used.is_dir()
            assert folder.is_dir()
            assert folder != used
        assert not folder.exists()
        thread.submit(other.__exit__, None, None, None).result()
    assert list_names(tmp_path) == [link.name, "rotopath-results"]


def test_temporary_folders_of_one_thread_may_be_nested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with writing.temporary_folder() as outer, writing.temporary_folder() as inner:
        assert outer.is_dir()
        assert inner.is_dir()
    assert list_names(tmp_path) == []


def test_nothing_of_others_is_removed_on_a_file_system_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process can know there whether another one still uses its files."""
    fcntl = pytest.importorskip("fcntl")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    used = tmp_path / f"rotopath-{'0' * 32}"
    used.mkdir()
    (tmp_path / ".out.unfinished").mkdir()
    with writing.hold_lock(tmp_path / "out"), writing.temporary_folder():
        writing.remove_leftovers(tmp_path / "out")
    assert {".out.unfinished", used.name} == set(list_names(tmp_path))


def test_existing_folder_whose_parent_is_read_only_has_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a volume of a container. Elsewhere, and for the lock of another user, the error is reported."""
    make = os.open

    def refuse(path: str | Path, flags: int, *arguments: int, **options: int) -> int:
        if Path(path).parent == tmp_path and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return make(path, flags, *arguments, **options)

    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "open", refuse)
    with writing.hold_lock(tmp_path / "out"):
        writing.write_json(tmp_path / "out" / "a.json", {})
    assert list_names(tmp_path) == ["out"]
    assert list_names(tmp_path / "out") == ["a.json"]
    (tmp_path / ".out.lock").touch()
    with pytest.raises(PermissionError), writing.hold_lock(tmp_path / "out"):
        pass
