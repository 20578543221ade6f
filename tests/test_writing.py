"""Files and folders that are whole or not there at all, whenever the process that writes them dies."""

import os
import shutil
import stat
import subprocess
import sys
from itertools import count
from pathlib import Path

import pytest

from rotopath import writing
from rotopath.writing import atomic_file, atomic_folder

KILLED = 9
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
    """Fail where all files are there already."""
    fill(folder, "new")
    fill(folder, "new")


def read(folder: Path) -> str | None:
    """The text of all files of a folder that is whole, or None if there is no folder."""
    if not folder.exists():
        return None
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*")) == ["a.txt", "maps", "maps/b.txt"]
    (text,) = {(folder / name).read_text() for name in ("a.txt", "maps/b.txt")}
    return text


def write_until_killed(path: Path, calls: int, kinds: tuple[str, ...] = RENAMES) -> bool:
    """Replace a folder in another process, which dies before it makes one more of those calls; tells whether it did."""
    command = [sys.executable, "-c", PROGRAM, str(path), str(calls), *kinds]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (0, KILLED), done.stderr
    return done.returncode == KILLED


def test_a_folder_with_subfolders_is_replaced(tmp_path: Path) -> None:
    for text in ("old", "new"):
        with atomic_folder(tmp_path / "out") as unfinished:
            fill(unfinished, text)
        assert read(tmp_path / "out") == text
        assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    fill(tmp_path / "out", "old")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "out") as unfinished:
        fill_twice(unfinished)
    assert read(tmp_path / "out") == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_writer_that_is_killed_between_renames_loses_nothing(tmp_path: Path) -> None:
    """The next writer finds a whole folder, even if that one fails, too."""
    for calls in count():
        path = tmp_path / f"{calls}" / "out"
        fill(path, "old")
        if not write_until_killed(path, calls):
            break
        with pytest.raises(ValueError, match="failed"), atomic_folder(path):
            raise ValueError("failed")
        assert read(path) in ("old", "new"), f"killed after {calls} renames"
        assert [one.name for one in path.parent.iterdir()] == ["out"]
    assert calls > 1, "no process was killed between renames"


def test_a_reader_finds_a_whole_folder_wherever_the_writer_was_killed(tmp_path: Path) -> None:
    """At any change to the disk: a reader comes first, then somebody deletes the folder, then it is written again."""
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
        assert [one.name for one in path.parent.iterdir()] == ["out"]
    assert calls > 10, "few changes were found"


def test_a_first_folder_is_whole_or_not_there_wherever_the_writer_was_killed(tmp_path: Path) -> None:
    for calls in count():
        path = tmp_path / f"{calls}" / "out"
        path.parent.mkdir()
        if not write_until_killed(path, calls, ALL_CHANGES):
            break
        writing.recover_folder(path)
        assert read(path) in (None, "new"), f"killed after {calls} changes"


def test_an_interrupt_between_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_a_reader_that_comes_between_renames_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
        assert [one.name for one in tmp_path.iterdir()] == ["out"]


def test_recovery_makes_nothing_up(tmp_path: Path) -> None:
    writing.recover_folder(tmp_path / "out")
    assert not list(tmp_path.iterdir())
    fill(tmp_path / ".out.unfinished", "new")  # of a process that was killed while it filled it
    writing.recover_folder(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "large-disk", target_is_directory=True)
    for text in ("first", "second", "third"):
        with atomic_folder(link) as unfinished:
            fill(unfinished, text)
        assert link.is_symlink()
        assert read(tmp_path / "large-disk") == text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["large-disk", "link"]


def test_the_folder_that_one_is_in_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    monkeypatch.chdir(tmp_path / "out")
    with atomic_folder(Path()) as unfinished:
        fill(unfinished, "new")
    assert read(tmp_path / "out") == "new"


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The inodes of the files and folders that were forced to the disk, in order."""
    inodes: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda number: inodes.append(os.fstat(number).st_ino))
    return inodes


@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders")
def test_all_of_a_folder_is_on_the_disk_before_it_takes_its_place(tmp_path: Path, synced: list[int]) -> None:
    fill(tmp_path / "out", "old")
    with atomic_folder(tmp_path / "out") as unfinished:
        fill(unfinished, "new")
        (unfinished / "nowhere").symlink_to("gone")  # which has nothing to be written
        inside = {path.lstat().st_ino for path in (unfinished, *unfinished.rglob("*")) if not path.is_symlink()}
    assert inside == set(synced[: len(inside)])
    assert synced[-1] == tmp_path.stat().st_ino


@pytest.mark.skipif(os.name == "nt", reason="Windows syncs no folders")
def test_a_file_is_on_the_disk_and_its_name_too(tmp_path: Path, synced: list[int]) -> None:
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    assert synced == [(tmp_path / "a.txt").stat().st_ino, tmp_path.stat().st_ino]


def test_a_file_system_that_syncs_no_folders_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync = os.fsync

    def refuse(number: int) -> None:
        if stat.S_ISDIR(os.fstat(number).st_mode):
            raise OSError(22, "Invalid argument")
        sync(number)

    monkeypatch.setattr(os, "fsync", refuse)
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    with atomic_folder(tmp_path / "out") as unfinished:
        fill(unfinished, "new")
    assert read(tmp_path / "out") == "new"


def test_a_file_that_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError), atomic_file(path) as unfinished:
        unfinished.write_text("new µ", encoding="ascii")  # opens the file, then fails
    assert unfinished.name == ".a.txt.unfinished", "which others know as harmless"
    assert path.read_text() == "old"
    assert [one.name for one in tmp_path.iterdir()] == ["a.txt"]


def test_a_file_that_was_not_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), atomic_file(tmp_path / "a.txt"):
        pass
    assert not list(tmp_path.iterdir())


def test_a_writer_that_has_ended_removes_no_file_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace = os.replace

    def begin_another(old: Path, new: Path) -> None:
        replace(old, new)
        Path(old).write_text("of another process")

    monkeypatch.setattr(os, "replace", begin_another)
    with atomic_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("new")
    assert (tmp_path / "a.txt").read_text() == "new"
    assert unfinished.read_text() == "of another process"
