"""Slides on workers: what a worker is told means the same in whatever folder it runs."""

from pathlib import Path

import pytest

from rotopath.inference.slide_pass import PassOptions
from rotopath.studies.slides import _command


def test_the_folder_of_a_run_goes_before_a_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def told(run: str) -> str:
        return _command(run, Path("a.svs"), Path("out"), PassOptions(), None, None, None)[1]

    assert told("tumor-pcam-n8") == "tumor-pcam-n8"
    (tmp_path / "tumor-pcam-n8").mkdir()
    assert told("tumor-pcam-n8") == str(tmp_path / "tumor-pcam-n8")


def test_a_worker_is_told_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.svs").symlink_to(tmp_path / "scan-1.svs")
    words = _command("m", Path("a.svs"), Path("out"), PassOptions(rotations=4, everywhere=True), 0.5, "cpu", "32")
    slide, out = str(tmp_path / "a.svs"), str(tmp_path / "out")
    assert words[:7] == ["predict", "m", slide, "--out", out, "--rotations", "4"]
    assert words[7:] == ["--everywhere", "--spacing-um-px", "0.5", "--device", "cpu", "--precision", "32"]
