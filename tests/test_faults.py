"""The comparison of `tools/faults.py`: it notices other content and other files, and ignores times."""

import json
import os
import zipfile
from pathlib import Path

import faults
import pytest

MEMBERS = {"data.pkl": b"weights", "version": b"3"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of a case, with the files of a command."""
    for name in ("out/run", "out/run/tensorboard", "tmp"):
        (tmp_path / name).mkdir(parents=True)
    run = tmp_path / "out/run"
    (run / "metrics.json").write_text(json.dumps({"auc": 0.5, "seconds": 3, "trained": {"begun": "today", "seed": 1}}))
    (run / "log.csv").write_text("step,loss,images_per_second\n1,0.5,20\n")
    (run / "heatmap.ome.tif").write_bytes(b"<OME UUID='urn:uuid:0a1b2c3d-0000-1111-2222-0123456789ab'>pixels")
    (run / "weights.safetensors").write_bytes(b"weights")
    with zipfile.ZipFile(run / "model.pt", "w") as file:
        for name, content in MEMBERS.items():
            file.writestr(name, content)
    return tmp_path


def test_times_and_identifiers_are_not_compared(folder: Path) -> None:
    expected, run = faults.read_files(folder / "out"), folder / "out/run"
    (run / "metrics.json").write_text(
        json.dumps({"auc": 0.5, "seconds": 9, "trained": {"begun": "later", "seed": 1}}, indent=2)
    )
    (run / "log.csv").write_text("step,loss,images_per_second\n1,0.5,7\n")
    (run / "heatmap.ome.tif").write_bytes(b"<OME UUID='urn:uuid:ffffffff-0000-1111-2222-0123456789ab'>pixels")
    (run / "tensorboard/events.2").touch()
    assert faults.compare(expected, folder) == ([], [])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.json", b'{"auc": 0.6, "seconds": 3, "trained": {"begun": "today", "seed": 1}}'),
        ("log.csv", b"step,loss,images_per_second\n1,0.6,20\n"),
        ("heatmap.ome.tif", b"<OME UUID='urn:uuid:0a1b2c3d-0000-1111-2222-0123456789ab'>pixel."),
        ("weights.safetensors", b"weights."),
    ],
)
def test_other_content_is_noticed(name: str, content: bytes, folder: Path) -> None:
    expected = faults.read_files(folder / "out")
    (folder / "out/run" / name).write_bytes(content)
    assert faults.compare(expected, folder) == ([f"run/{name}"], [])
    (folder / "out/run" / name).unlink()
    assert faults.compare(expected, folder) == ([f"run/{name}"], [])


def test_other_files_are_noticed(folder: Path) -> None:
    expected = faults.read_files(folder / "out")
    (folder / "out/.run.lock").touch()
    (folder / "tmp/rotopath-1").mkdir()
    (folder / "tmp" / faults.DASK).mkdir()  # Dask always leaves it
    assert faults.compare(expected, folder) == ([], [".run.lock", "tmp/rotopath-1"])


def test_all_kills_are_one_hundred() -> None:
    counts = [
        round(command.kills * faults.CASES[fault]) for command in faults.COMMANDS for fault in ("SIGKILL", "SIGTERM")
    ]
    assert sum(counts) == 100
    assert len(faults.COMMANDS) == 7


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="only Linux lists processes there")
def test_processes_that_a_process_has_started_are_found() -> None:
    assert os.getpid() in faults.list_descendants(os.getppid())
    assert os.getppid() not in faults.list_descendants(os.getpid())
