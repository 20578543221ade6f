"""Prediction of files: a folder for each, complete or not there; what is done is skipped, what is bad stops nobody."""

import csv
import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
from layouts import write_image
from PIL import Image
from scanner_files import write_mirax
from typer.testing import CliRunner, Result

from rotopath import predicting, pretrained, runs
from rotopath.cli import app
from rotopath.images.geojson import SlideObject, read_geojson
from rotopath.inference.slide_pass import SlidePass
from rotopath.metrics import smooth_images
from rotopath.model_file import RunError

MODEL = "tumor-pcam-n8"
FILES = {"heatmap.ome.tif", "objects.csv", "objects.geojson", "overlay.png", "summary.json"}


def tissue(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Pink and purple clouds."""
    smooth = smooth_images(1, max(height, width), blur_px=4, seed=seed)[0, :1, :height, :width]
    clouds = np.asarray(smooth.permute(1, 2, 0)).clip(-2, 2) / 2
    return (np.array([190, 110, 170]) + clouds * np.array([40, 60, 30])).astype(np.uint8)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_image(tmp_path / "images" / "a.png", tissue(130, 150))
    write_image(tmp_path / "images" / "b.tif", tissue(40, 50, 1))  # smaller than what one answer sees
    (tmp_path / "images" / "notes.txt").write_text("no image")
    return tmp_path / "images"


def test_a_folder_of_images(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = call(MODEL, images, "--out", out, "--spacing-um-px", 1.0)
    assert result.exit_code == 0, result.output
    assert "a.png: tumor in" in result.output
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "b.tif"]
    for folder in out.iterdir():
        assert {path.name for path in folder.iterdir()} == FILES
        summary = json.loads((folder / "summary.json").read_text())
        objects = read_geojson(folder / "objects.geojson")
        with (folder / "objects.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert len(objects) == len(rows) == summary["objects"]
        assert summary["tumor_share"] <= 1
        assert {str(one.id) for one in objects} == {row["id"] for row in rows}
        assert summary["about"]["model"] == MODEL
        assert summary["about"]["precision"] == ("16" if torch.cuda.is_available() else "32")
    with tifffile.TiffFile(out / "a.png" / "heatmap.ome.tif") as heat:
        assert heat.is_ome
        assert heat.pages[0].shape == (11, 13)
    with Image.open(out / "a.png" / "overlay.png") as overlay:
        assert overlay.size == (150, 130)


def test_places_on_a_stage_are_counted_from_where_its_scan_begins(tmp_path: Path) -> None:
    """As QuPath counts them, which shows the scanned region alone."""
    pytest.importorskip("openslide")
    scan = write_mirax(tmp_path / "a.mrxs", tissue(256, 256), (8, 12), first_tile=(4, 8), spacing_um_px=0.972)
    assert call(MODEL, scan, "--out", tmp_path / "out").exit_code == 0
    found = tmp_path / "out" / "a.mrxs"
    assert json.loads((found / "summary.json").read_text())["slide"]["origin_px"] == [4 * 256, 8 * 256]
    with (found / "objects.csv").open() as file:
        places = [float(row[name]) for row in csv.DictReader(file) for name in ("x_px", "y_px")]
    for one in read_geojson(found / "objects.geojson"):
        assert isinstance(one.shape, tuple)
        places.extend(np.concatenate([polygon.outer for polygon in one.shape]).ravel().tolist())
    assert places
    assert min(places) > -44, "a window reaches half of its side beyond"
    assert max(places) < 300


def test_what_is_done_is_skipped_unless_it_was_asked_for_otherwise(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = (MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0)
    call(*first)
    written = (out / "a.png" / "summary.json").stat().st_mtime_ns
    assert "done before, skipped" in call(*first).output
    assert (out / "a.png" / "summary.json").stat().st_mtime_ns == written
    again = call(*first, "--rotations", 4)
    assert "done before" not in again.output
    assert (out / "a.png" / "deviation.ome.tif").exists()


def test_any_precision_is_done_unless_another_one_is_asked_for(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a slide may have been predicted on a GPU, or before precisions were told."""
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    place = tmp_path / "out" / "a.png" / "summary.json"
    with monkeypatch.context() as patched:  # halves are not for CPUs, but can be had
        patched.setattr(runs, "_choose_dtype", lambda _device, _precision: torch.bfloat16)
        assert call(*words).exit_code == 0
    assert json.loads(place.read_text())["about"]["precision"] == "16"
    assert "done before, skipped" in call(*words).output
    assert "done before" not in call(*words, "--precision", 32).output
    summary = json.loads(place.read_text())
    assert summary["about"].pop("precision") == "32"
    assert "done before, skipped" in call(*words, "--precision", 32).output
    place.write_text(json.dumps(summary))
    assert "done before, skipped" in call(*words).output
    assert "done before" not in call(*words, "--precision", 32).output


def test_a_slide_that_was_cut_off_is_done_again(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(predicting, "write_pyramid", fail)
        assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0).exit_code == 130
    assert not (out / "a.png").exists(), "nothing is half there"
    (out / ".a.png.unfinished").mkdir()  # as one that was killed leaves it
    assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0).exit_code == 0
    assert [path.name for path in out.iterdir()] == ["a.png"]


def test_a_bad_slide_stops_nobody(images: Path, tmp_path: Path) -> None:
    whole = (images / "a.png").read_bytes()
    (images / "cut.png").write_bytes(whole[: len(whole) // 2])
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 1
    assert "cut.png failed:" in result.output
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "b.tif"]
    alone = call(MODEL, images / "cut.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert alone.exit_code == 2


def allocate_too_much() -> None:
    torch.empty(2**50)  # a petabyte and more


def raise_error(error: BaseException) -> None:
    raise error


OUT_OF_MEMORY = {
    "of torch": lambda: raise_error(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")),
    "of Python": lambda: raise_error(MemoryError()),
    "of NumPy": lambda: np.empty(2**52),
    "of torch's CPU allocator": allocate_too_much,
    "of that on Windows": lambda: raise_error(RuntimeError("DefaultCPUAllocator: not enough memory: you tried")),
}


@pytest.mark.parametrize("fail", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY)
def test_a_slide_that_is_too_large_stops_nobody(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    """Whoever reports that memory is used up; nothing of that slide is left, and it is done the next time."""
    found, out = SlidePass.objects, tmp_path / "out"

    def find(self: SlidePass, *arguments: Any) -> Iterator[SlideObject]:
        yield from found(self, *arguments)
        if self.slide.size_px == (130, 150):
            fail()

    with monkeypatch.context() as patched:
        patched.setattr(SlidePass, "objects", find)
        first, second = predicting.predict(MODEL, images, out, spacing_um_px=1.0, device="cpu")
    assert (first.path.name, first.state) == ("a.png", "failed")
    assert first.reason == "memory was not enough for it; use a machine with more of it."
    assert (second.path.name, second.state) == ("b.tif", "done")
    assert [path.name for path in out.iterdir()] == ["b.tif"]
    again = predicting.predict(MODEL, images, out, spacing_um_px=1.0, device="cpu")
    assert [each.state for each in again] == ["done", "skipped"]


def test_the_command_tells_of_a_slide_that_is_too_large(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "write_pyramid", lambda *_: raise_error(MemoryError()))
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 2, "none could be done"
    assert "a.png failed: memory was not enough" in " ".join(result.output.split())


@pytest.mark.parametrize("error", [RuntimeError("Expected all tensors to be on the same device"), AssertionError()])
def test_other_errors_still_stop(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """They are mistakes of the program, of which somebody has to hear."""
    monkeypatch.setattr(predicting, "write_pyramid", lambda *_: raise_error(error))
    with pytest.raises(type(error)):
        predicting.predict(MODEL, images, tmp_path / "out", spacing_um_px=1.0)
    assert not list((tmp_path / "out").iterdir())


def test_unusual_images_are_taken_or_named(tmp_path: Path) -> None:
    plain = tissue(100, 100)
    alpha = np.dstack([plain, np.full(plain.shape[:2], 255, np.uint8)])
    Image.fromarray(alpha).save(tmp_path / "alpha.png")
    Image.fromarray(plain[..., 1]).save(tmp_path / "grey.png")
    Image.fromarray(plain[..., 1].astype(np.uint16) * 257).save(tmp_path / "deep.png")
    for name in ("alpha", "grey", "deep"):
        result = call(MODEL, tmp_path / f"{name}.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
        assert result.exit_code in (0, 2)
        assert result.exit_code == 0 or f"{name}.png" in result.output
        assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((MODEL, "a.png", "--out", "out"), "--spacing-um-px"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 40), "0.05 to 5"),
        ((MODEL, "none.svs", "--out", "out"), "does not exist"),
        ((MODEL, "empty", "--out", "out"), "has no slides"),
        (("no-such-model", "a.png", "--out", "out"), "no-such-model"),
        ((MODEL, "a.png", "--out", "a.png", "--spacing-um-px", 1), "a.png"),
        ((MODEL, "a.png", "other/a.png", "--out", "out"), "several slides named a.png"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "abacus"), "choose cpu or cuda"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "cuda:99"), "is not there"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "cpu", "--precision", 16), "for GPUs"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--precision", "bf16"), "choose '16' or '32'"),
    ],
)
def test_mistakes_get_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "a.png", tissue(100, 100))
    write_image(tmp_path / "other" / "a.png", tissue(100, 100))
    (tmp_path / "empty").mkdir()
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert sentence in result.output
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_other_things_in_a_folder_are_not_replaced(images: Path, tmp_path: Path) -> None:
    precious = tmp_path / "out" / "a.png" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    result = call(MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 2
    assert "holds something else" in result.output
    assert precious.read_text() == "years of work"


def test_blank_slides_have_results_too(tmp_path: Path) -> None:
    write_image(tmp_path / "white.png", np.full((200, 200, 3), 250, np.uint8))
    result = call(MODEL, tmp_path / "white.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 0, result.output
    assert "0.00 mm² of tissue" in result.output
    assert {path.name for path in (tmp_path / "out" / "white.png").iterdir()} == FILES
    assert read_geojson(tmp_path / "out" / "white.png" / "objects.geojson") == []


def test_slides_are_listed_once(images: Path) -> None:
    assert predicting.list_slides([images, images / "a.png"]) == [images / "a.png", images / "b.tif"]
    with pytest.raises(RunError, match="does not exist"):
        predicting.list_slides([images / "c.png"])


def test_a_cluster_gives_the_same(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a run in a folder that is named as a pretrained model, which comes first."""
    pytest.importorskip("distributed")
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained.HOME / MODEL, tmp_path / MODEL)
    told = json.loads((tmp_path / MODEL / "model.json").read_text())
    assert told["operating_point"] != {"threshold": 0.5}
    (tmp_path / MODEL / "model.json").write_text(json.dumps(told | {"operating_point": {"threshold": 0.5}}))
    (images / "cut.png").write_bytes(b"\x89PNG")
    (images / "b.tif").unlink()
    (images / "a.png").rename(tmp_path / "scan-1.png")
    (images / "a.png").symlink_to(tmp_path / "scan-1.png")
    here = call(MODEL, images, "--out", tmp_path / "here", "--spacing-um-px", 1.0, "--device", "cpu")
    there = call(
        MODEL, images, "--out", tmp_path / "there", "--spacing-um-px", 1.0, "--device", "cpu", "--cluster", "local"
    )
    assert here.exit_code == there.exit_code == 1, there.output
    failures = [re.findall("cut.png failed.*", said.output) for said in (here, there)]
    assert failures[0] == failures[1] != []
    one, other = (read_geojson(tmp_path / place / "a.png" / "objects.geojson") for place in ("here", "there"))
    assert {each.id for each in one} == {each.id for each in other}
    abouts = [
        json.loads((tmp_path / place / "a.png" / "summary.json").read_text())["about"] for place in ("here", "there")
    ]
    assert abouts[0] == abouts[1]
    assert abouts[0]["operating_point"] == {"threshold": 0.5}
