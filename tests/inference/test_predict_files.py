"""Prediction of files: a folder for each, written atomically; finished files are skipped, bad ones stop nothing."""

import csv
import errno
import gc
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch
import untrained_runs
from hypothesis import example, given
from hypothesis import strategies as st
from layouts import write_image
from PIL import Image
from scanner_files import write_dicom, write_mirax, write_ome_zarr
from scipy import ndimage
from sharing import hold_elsewhere, pipe_at
from test_pretrained import draw_tissue
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath import pretrained, runs, writing
from rotopath.cli import app
from rotopath.data import DataError
from rotopath.images import geojson
from rotopath.images.drawing import WARNING_INK
from rotopath.images.geojson import SlideObject, read_geojson, write_geojson
from rotopath.images.outlines import Point, Polygon, fill_outline
from rotopath.images.pyramid import MapWriter, StoredMap
from rotopath.inference import predict_files, tiling
from rotopath.inference.slide_pass import Model, SlidePass
from rotopath.metrics import smooth_images

pytestmark = pytest.mark.slow

MODEL = "tumor-pcam-n8"
DONE: dict[str, Any] = {"spacing_um_px": 1.0, "device": "cpu"}
FILES = {"heatmap.ome.tif", "objects.csv", "objects.geojson", "overlay.png", "quality.png", "summary.json"}


def tissue(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return clouds of pink and purple."""
    smooth = smooth_images(1, max(height, width), blur_px=4, seed=seed)[0, :1, :height, :width]
    clouds = np.asarray(smooth.permute(1, 2, 0)).clip(-2, 2) / 2
    return (np.array([190, 110, 170]) + clouds * np.array([40, 60, 30])).astype(np.uint8)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


@pytest.fixture
def images(tmp_path: Path) -> Path:
    write_image(tmp_path / "images" / "a.png", tissue(130, 150))
    write_image(tmp_path / "images" / "b.tif", tissue(40, 50, 1))  # smaller than the receptive field
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
        assert {str(region.id) for region in objects} == {row["id"] for row in rows}
        assert summary["about"]["model"] == MODEL
        assert summary["about"]["precision"] == ("16" if torch.cuda.is_available() else "32")
    with tifffile.TiffFile(out / "a.png" / "heatmap.ome.tif") as heat:
        assert heat.is_ome
        assert heat.pages[0].shape == (11, 13)
    with Image.open(out / "a.png" / "overlay.png") as overlay:
        assert overlay.width >= 150
        assert overlay.height > 130, "there is a caption above the image"


@pytest.mark.parametrize("has_roi", [False, True])
def test_nuclei_have_numbers_in_a_label_map(has_roi: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in objects.csv, also if several tiles were predicted; levels of the pyramid contain no other numbers."""
    monkeypatch.setattr(Model, "tile_px", 300)
    image = np.tile(draw_tissue(), (3, 2, 1))[:600, :600]
    write_image(tmp_path / "a.png", image)
    options: dict[str, Any] = {"spacing_um_px": 0.25, "device": "cpu", "everywhere": True}
    if has_roi:  # objects outside are neither in the tables nor in the label map
        corners = np.array([(150, 150), (150, 450), (450, 450), (450, 150)], float)
        write_geojson(tmp_path / "roi.geojson", [SlideObject((Polygon(corners),), "annotation")])
        options["roi"] = tmp_path / "roi.geojson"
    (outcome,) = rp.predict("nuclei-kumar-n8", tmp_path / "a.png", tmp_path / "out", **options)
    assert {path.name for path in outcome.folder.iterdir()} == FILES | {"labels.ome.tif", "crops.png"}
    with (outcome.folder / "objects.csv").open() as file:
        rows = list(csv.DictReader(file))
    with tifffile.TiffFile(outcome.folder / "labels.ome.tif") as file:
        (series,) = file.series
        assert 'PhysicalSizeX="0.25"' in (file.ome_metadata or "")
        labels, *levels = [level.asarray() for level in series.levels]
    assert labels.shape == (600, 600)
    assert labels.dtype == np.uint32
    assert [level.shape for level in levels] == [(300, 300)]
    assert np.array_equal(levels[0], labels[::2, ::2])
    numbers = [int(row["number"]) for row in rows]
    assert numbers == list(range(1, len(rows) + 1))
    assert len(rows) > 5
    low, high = (150, 450) if has_roi else (0, 600)
    assert all(low <= float(row[axis]) <= high for row in rows for axis in ("x_px", "y_px"))
    areas = np.bincount(labels.ravel(), minlength=len(rows) + 1)[1:] * 0.25**2
    np.testing.assert_allclose(areas, [float(row["area_um2"]) for row in rows], rtol=1e-4)
    objects = read_geojson(outcome.folder / "objects.geojson")
    for row, nucleus in zip(rows, objects, strict=True):
        assert row["id"] == str(nucleus.id)
        measured = {name: float(row[name]) for name in nucleus.measurements}
        assert measured == pytest.approx(dict(nucleus.measurements), rel=1e-5)
        assert isinstance(nucleus.shape, tuple)
        filled = fill_outline(nucleus.shape, (600, 600))
        own = labels == int(row["number"])
        assert (filled & own).sum() / own.sum() > 0.8


def test_memory_does_not_grow_with_the_number_of_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only those that are drawn and cropped are kept."""
    monkeypatch.setattr(predict_files, "MAX_DRAWN", 40)
    counts: list[int] = []

    def make_objects(_: SlidePass, __: object) -> Iterator[SlideObject]:
        for i in range(3000):
            if i % 1000 == 0:
                counts.append(sum(isinstance(item, SlideObject) for item in gc.get_objects()))
            corners = np.array([(1, 1), (1, 9), (9, 9)]) + 10 * np.array(divmod(i, 60))
            item = SlideObject((Polygon(corners),), "detection", "Nucleus", None, {"probability": i % 997 / 997})
            item.render()
            yield item

    monkeypatch.setattr(SlidePass, "objects", make_objects)
    write_image(tmp_path / "a.png", tissue(100, 100))
    (outcome,) = rp.predict("nuclei-kumar-n8", tmp_path / "a.png", tmp_path / "out", spacing_um_px=0.25, device="cpu")
    assert outcome.state == "done"
    assert len((outcome.folder / "objects.csv").read_text().splitlines()) == 3001
    assert max(counts) - counts[0] <= 40 + 2 * predict_files.CROP_COUNT + 5


def test_coordinates_on_a_stage_start_at_the_scanned_region(tmp_path: Path) -> None:
    """As in QuPath, which shows only the scanned region."""
    pytest.importorskip("openslide")
    scan = write_mirax(tmp_path / "a.mrxs", tissue(256, 256), (8, 12), first_tile=(4, 8), spacing_um_px=0.972)
    assert call(MODEL, scan, "--out", tmp_path / "out").exit_code == 0
    folder = tmp_path / "out" / "a.mrxs"
    assert json.loads((folder / "summary.json").read_text())["slide"]["origin_px"] == [4 * 256, 8 * 256]
    with (folder / "objects.csv").open() as file:
        coordinates = [float(row[name]) for row in csv.DictReader(file) for name in ("x_px", "y_px")]
    for region in read_geojson(folder / "objects.geojson"):
        assert isinstance(region.shape, tuple)
        coordinates.extend(np.concatenate([polygon.outer for polygon in region.shape]).ravel().tolist())
    assert coordinates
    assert min(coordinates) > -44, "half a window extends beyond the region"
    assert max(coordinates) < 300


def test_onnx_runtime_finds_the_same_objects(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    command = (MODEL, images / "a.png", "--spacing-um-px", 1.0, "--device", "cpu")
    for backend in ("torch", "onnxruntime"):
        result = call(*command, "--out", tmp_path / backend, "--backend", backend)
        assert result.exit_code == 0, result.output
    ours, theirs = (
        list(read_geojson(tmp_path / name / "a.png" / "objects.geojson")) for name in ("torch", "onnxruntime")
    )
    assert [item.id for item in ours] == [item.id for item in theirs]
    refused = call(*command, "--out", tmp_path / "none", "--backend", "jax")
    assert refused.exit_code == 2
    assert "There is no backend 'jax'" in " ".join(refused.output.split())
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize("model", ["nuclei-kumar-n8", "mitosis-amida13-n8"])
def test_workers_find_the_same_objects(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "tile_px", 300)
    write_image(tmp_path / "a.png", np.tile(draw_tissue(), (2, 1, 1))[:360, :360])
    options = {"spacing_um_px": 0.25, "device": "cpu", "everywhere": True, "rotations": 2}
    tables, labels = [], []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        (outcome,) = rp.predict(model, tmp_path / "a.png", out, workers=workers, **options)  # type: ignore[arg-type]
        assert outcome.state == "done", outcome.reason
        tables.append((outcome.folder / "objects.csv").read_text())
        if (outcome.folder / "labels.ome.tif").exists():
            labels.append(tifffile.imread(outcome.folder / "labels.ome.tif"))
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) > 1
    assert len(labels) in (0, 2)
    if labels:
        np.testing.assert_array_equal(*labels)


def test_the_profile_accounts_for_the_time_and_the_pixels(images: Path, tmp_path: Path) -> None:
    command = (MODEL, images / "a.png", "--spacing-um-px", 1.0, "--device", "cpu", "--everywhere")
    result = call(*command, "--out", tmp_path / "out", "--profile")
    summary = json.loads((tmp_path / "out" / "a.png" / "summary.json").read_text())
    stages = summary["seconds_of_stages"]
    assert tuple(stages) == predict_files.STAGES
    assert all(seconds >= 0 for seconds in stages.values())
    consecutive = sum(stages[stage] for stage in ("tissue", "network", "maps", "objects", "files"))
    assert consecutive == pytest.approx(summary["seconds"], abs=0.06), "the other stages run in threads"
    assert stages["stains"] == 0, "the model reads the pixels as they are"
    assert summary["predicted_mpx"] == pytest.approx(11 * 13 * 12**2 / 1e6, abs=1e-3)
    printed = [line.split()[0] for line in result.output.splitlines() if line.strip()]
    assert set(predict_files.STAGES) <= set(printed)
    assert "Mpx/s" in result.output
    assert "Packages and model loaded in " in result.output
    assert "Mpx/s" not in call(*command, "--out", tmp_path / "quiet").output


def test_finished_files_are_skipped_unless_options_differ(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = (MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0)
    call(*first)
    written = (out / "a.png" / "summary.json").stat().st_mtime_ns
    assert "skipped, already done" in call(*first).output
    assert (out / "a.png" / "summary.json").stat().st_mtime_ns == written
    again = call(*first, "--rotations", 4)
    assert "already done" not in again.output
    assert (out / "a.png" / "deviation.ome.tif").exists()


def test_results_of_any_precision_are_kept_unless_another_one_is_requested(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slide may have been predicted on a GPU, or before summaries contained the precision."""
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    path = tmp_path / "out" / "a.png" / "summary.json"
    with monkeypatch.context() as patched:  # the CPU can compute in half precision, but is not offered
        patched.setattr(runs, "_choose_dtype", lambda _device, _precision: torch.bfloat16)
        assert call(*words).exit_code == 0
    assert json.loads(path.read_text())["about"]["precision"] == "16"
    assert "skipped, already done" in call(*words).output
    assert "already done" not in call(*words, "--precision", 32).output
    summary = json.loads(path.read_text())
    assert summary["about"].pop("precision") == "32"
    assert "skipped, already done" in call(*words, "--precision", 32).output
    path.write_text(json.dumps(summary))
    assert "skipped, already done" in call(*words).output
    assert "already done" not in call(*words, "--precision", 32).output


@pytest.mark.parametrize(("key", "value"), [("warnings", 7), ("warnings", [7]), ("sentence", {})])
def test_a_summary_with_values_of_another_type_is_replaced(
    key: str, value: object, images: Path, tmp_path: Path
) -> None:
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    assert call(*words).exit_code == 0
    path = tmp_path / "out/a.png/summary.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    again = call(*words)
    assert again.exit_code == 0, again.output
    assert "already done" not in again.output
    assert json.loads(path.read_text())[key] != value


@pytest.mark.parametrize("name", sorted(FILES))
def test_damaged_results_are_predicted_again(name: str, images: Path, tmp_path: Path) -> None:
    command = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    assert call(*command).exit_code == 0
    path = tmp_path / "out/a.png" / name
    content = path.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0x80]) + content[middle + 1 :]  # no longer UTF-8
    for damaged in (content[:middle], flipped, None):
        path.unlink()
        if damaged is not None:
            path.write_bytes(damaged)
        elif name == "summary.json":
            continue  # then the folder is refused, because its other files may not be results
        if name == "summary.json" and len(damaged or b"") == len(content):
            continue  # a change of one letter in a summary need not be noticed
        assert "already" not in call(*command).output
        assert len(path.read_bytes()) > middle
        assert [outcome.state for outcome in rp.predict(MODEL, images / "a.png", tmp_path / "out", **DONE)] == [
            "skipped"
        ]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize("name", ["summary.json", "objects.geojson"])
def test_a_pipe_in_place_of_a_result_is_replaced(name: str, images: Path, tmp_path: Path) -> None:
    rp.predict(MODEL, images / "a.png", tmp_path / "out", **DONE)
    path = tmp_path / "out/a.png" / name
    content = path.read_bytes()
    with pipe_at(path):
        assert [outcome.state for outcome in rp.predict(MODEL, images / "a.png", tmp_path / "out", **DONE)] == ["done"]
    assert path.is_file()
    assert len(path.read_bytes()) == pytest.approx(len(content), abs=20)  # a summary contains times


CORRECTED = {  # what a person may save; shapes that are not used here count, too
    "a point": '[{"type": "Feature", "geometry": {"type": "Point", "coordinates": [3, 4]}, "properties": {}}]',
    "a line": '{"type": "Feature", "geometry": {"type": "LineString", "coordinates": [[3, 4], [5, 6]]}}',
    "nothing": '{"type": "FeatureCollection", "features": []}',
}


@pytest.fixture
def predicted(images: Path, tmp_path: Path) -> tuple[tuple[object, ...], Path]:
    """A command that has been executed, and the file of objects that it has written."""
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    result = call(*words, "--keep-map")
    assert result.exit_code == 0, result.output
    return words, tmp_path / "out/a.png/objects.geojson"


def test_corrections_are_never_replaced(predicted: tuple[tuple[object, ...], Path]) -> None:
    """The same command keeps them, and says so; other options and models are refused."""
    words, path = predicted
    for content in CORRECTED.values():
        path.write_text(content)
        again = call(*words)
        assert again.exit_code == 0, again.output
        assert (
            f"a.png: skipped, objects.geojson has changed since the prediction, such as by corrections, and is kept; "
            f"to predict the slide again, choose another folder with --out, or delete {path.parent}.\n"
        ) in again.output
        assert path.read_text() == content
    for changes in (["--threshold", 0.9, "--reuse"], ["--embedding"], ["--rotations", 2]):
        refused = call(*words, *changes)
        assert refused.exit_code == 2
        assert "such as by corrections, which would be lost; choose another folder with --out" in refused.output
    (path.parent / "overlay.png").unlink()  # a damaged file beside it
    assert call(*words).exit_code == 2
    assert call("mitosis-amida13-n8", *words[1:]).exit_code == 2
    assert path.read_text() == content


def test_large_corrections_of_the_same_size_are_not_replaced(
    predicted: tuple[tuple[object, ...], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, path = predicted
    monkeypatch.setattr(predict_files, "HASHED_BYTES", 10)
    assert call(*words, "--threshold", 0.3).exit_code == 0
    corrected = path.read_bytes().replace(b'"Tumor"', b'"Tumos"')
    path.write_bytes(corrected)
    assert "already done" in call(*words, "--threshold", 0.3).output, "compared by size, which is fast"
    assert call(*words, "--threshold", 0.4).exit_code == 2
    assert path.read_bytes() == corrected
    monkeypatch.setattr(predict_files, "MAX_JSON_BYTES", 10)
    path.write_text("it is too large to see whether it is damaged")
    assert call(*words, "--threshold", 0.4).exit_code == 2
    assert path.read_text().startswith("it is too large")


def test_corrections_that_are_saved_during_a_prediction_are_kept(
    predicted: tuple[tuple[object, ...], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    words, path = predicted
    write = predict_files.write_pyramid

    def write_while_a_person_saves(*arguments: Any) -> None:
        write(*arguments)
        path.write_text(CORRECTED["nothing"])

    monkeypatch.setattr(predict_files, "write_pyramid", write_while_a_person_saves)
    result = call(*words, "--threshold", 0.9)
    assert result.exit_code == 2
    assert "which would be lost" in result.output
    assert path.read_text() == CORRECTED["nothing"]


@pytest.mark.parametrize("name", ["objects.geojson.gz", "my corrections.geojson"])
def test_files_that_a_person_has_added_to_results_are_kept(
    name: str, predicted: tuple[tuple[object, ...], Path]
) -> None:
    words, path = predicted
    added = path.with_name(name)
    added.write_text(CORRECTED["nothing"])
    path.with_name(".DS_Store").touch()
    assert "already done" in call(*words).output
    refused = call(*words, "--threshold", 0.9)
    assert refused.exit_code == 2
    assert f"contains {name}, which is not a result, and would be lost; move it" in refused.output
    added.unlink()
    assert call(*words, "--threshold", 0.9).exit_code == 0, "files of the system are not the work of a person"


def test_a_damaged_file_of_objects_is_predicted_again_and_set_aside(
    predicted: tuple[tuple[object, ...], Path], tmp_path: Path
) -> None:
    """It may contain corrections, if it was cut off while a person saved it. Only what would be lost is kept."""
    words, path = predicted
    content = path.read_bytes()
    for number, damaged in enumerate((b'{"features": [my corr', b'{"features": [other')):
        path.write_bytes(damaged)
        result = call(*words)
        assert result.exit_code == 0, result.output
        aside = tmp_path / "out" / f"a.png.objects.geojson.old{number or ''}"
        assert f"damaged or of unknown origin, and is kept as {aside}." in result.output
        assert aside.read_bytes() == damaged
        assert path.read_bytes() == content
    path.write_bytes(b"")
    assert call(*words).exit_code == 0
    (path.parent / "summary.json").write_text("{")
    assert "kept as" not in call(*words).output, "the new file is that of before"
    path.write_text(CORRECTED["nothing"])
    (path.parent / "summary.json").write_text("{")
    assert "kept as" in call(*words).output
    assert (tmp_path / "out/a.png.objects.geojson.old2").read_text() == CORRECTED["nothing"]
    assert len(list((tmp_path / "out").iterdir())) == 4


def test_results_of_versions_without_checksums_are_kept(images: Path, tmp_path: Path) -> None:
    rp.predict(MODEL, images / "a.png", tmp_path / "out", **DONE)
    path = tmp_path / "out/a.png/summary.json"
    summary = json.loads(path.read_text())
    assert set(summary.pop("files")) == FILES - {"summary.json"}
    path.write_text(json.dumps(summary))
    assert [outcome.state for outcome in rp.predict(MODEL, images / "a.png", tmp_path / "out", **DONE)] == ["skipped"]


def test_an_interrupted_slide_is_predicted_again(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(predict_files, "write_pyramid", fail)
        assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0).exit_code == 130
    assert not (out / "a.png").exists(), "nothing incomplete is left"
    (out / ".a.png.unfinished").mkdir()  # as a killed process leaves it
    assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0).exit_code == 0
    assert [path.name for path in out.iterdir()] == ["a.png"]


def test_a_damaged_file_does_not_stop_the_others(images: Path, tmp_path: Path) -> None:
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
def test_a_slide_that_needs_too_much_memory_does_not_stop_the_others(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fail: Callable[[], None]
) -> None:
    """Whatever reports the lack of memory. Nothing of the slide is written, and it is predicted the next time."""
    detect, out = SlidePass.objects, tmp_path / "out"

    def find(self: SlidePass, *arguments: Any) -> Iterator[SlideObject]:
        yield from detect(self, *arguments)
        if self.slide.size_px == (130, 150):
            fail()

    with monkeypatch.context() as patched:
        patched.setattr(SlidePass, "objects", find)
        first, second = rp.predict(MODEL, images, out, spacing_um_px=1.0, device="cpu")
    assert (first.path.name, first.state) == ("a.png", "failed")
    assert first.reason == "memory is too small for this slide; use a machine with more memory."
    assert (second.path.name, second.state) == ("b.tif", "done")
    assert [path.name for path in out.iterdir()] == ["b.tif"]
    again = rp.predict(MODEL, images, out, spacing_um_px=1.0, device="cpu")
    assert [outcome.state for outcome in again] == ["done", "skipped"]


def test_the_command_reports_a_slide_that_needs_too_much_memory(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predict_files, "write_pyramid", lambda *_: raise_error(MemoryError()))
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 2, "no slide was predicted"
    assert "a.png failed: memory is too small" in " ".join(result.output.split())


ERRORS = {
    "of torch": RuntimeError("Expected all tensors to be on the same device."),
    "without a message": AssertionError(),
    "of a user's class": type("DecoderCrash", (Exception,), {})("tile 7\nis bad"),
    "of the system": OSError(5, "Input/output error", "a.png"),
    "of a value": ValueError("operands could not be broadcast together"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_no_error_of_a_slide_stops_the_others(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """An unexpected error may be a bug; its type is printed, and its traceback is kept until the slide is predicted."""
    detect, out, error = SlidePass.objects, tmp_path / "out", ERRORS[kind]

    def fail(self: SlidePass, *arguments: Any) -> Iterator[SlideObject]:
        if self.slide.size_px == (130, 150):
            raise error
        yield from detect(self, *arguments)

    words = (MODEL, images, "--out", out, "--spacing-um-px", 1.0)
    with monkeypatch.context() as patched:
        patched.setattr(SlidePass, "objects", fail)
        result = call(*words)
    assert result.exit_code == 1
    lines = [line for line in result.output.splitlines() if "a.png" in line]
    assert len(lines) == 1
    assert "b.tif: tumor in" in result.output
    if kind == "of the system":
        assert lines == ["a.png failed: a.png cannot be read or written (Input/output error)."]
        assert sorted(path.name for path in out.iterdir()) == ["b.tif"]
    else:
        assert lines[0].startswith(f"a.png failed: {type(error).__name__}")
        assert lines[0].endswith(f"; the traceback is in {out / 'a.png.log'}.")
        assert sorted(path.name for path in out.iterdir()) == ["a.png.log", "b.tif"]
        assert "in fail\n    raise error" in (out / "a.png.log").read_text()
    assert call(*words).exit_code == 0
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "b.tif"]


def test_a_slide_with_a_name_that_is_too_long_does_not_stop_the_others(images: Path, tmp_path: Path) -> None:
    """The names of temporary files are a few letters longer than that of the slide."""
    name = f"{'a' * 250}.png"
    (images / "a.png").rename(images / name)
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 1
    assert f"{name} failed: its file name is too long for the names of the results; give the slide" in result.output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b.tif"]


def test_a_full_disk_stops_all_slides_in_one_sentence(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        try:
            raise OSError(28, "No space left on device")
        except OSError:
            raise RuntimeError("cannot write the tile") from None  # as libraries hide the cause

    monkeypatch.setattr(predict_files, "write_pyramid", fail)
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        f"rotopath: The disk of {tmp_path / 'out'} or of the folder for temporary files ({tempfile.gettempdir()}) is "
        f"full; free some space, and run the same command again: finished slides are skipped."
    ]
    assert not list((tmp_path / "out").iterdir())


# Applies the command to argv[3:]. When a slide is nearly finished, creates the file argv[1], and waits for argv[2].
PROGRAM = """
import signal, sys, time
from pathlib import Path
from rotopath.cli import app
from rotopath.inference import predict_files

def wait_then_write(*arguments):
    Path(sys.argv[1]).touch()
    while not Path(sys.argv[2]).exists():
        time.sleep(0.02)
    write(*arguments)

signal.signal(signal.SIGINT, signal.default_int_handler)
write, predict_files.write_pyramid = predict_files.write_pyramid, wait_then_write
app(sys.argv[3:])
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start `rotopath predict` in a process that waits before it finishes its first slide, until `go` exists."""
    processes = []

    def start_process(*words: object, go: str = "go") -> "subprocess.Popen[str]":
        reached = tmp_path / f"reached-{len(processes)}"
        command = [sys.executable, "-c", PROGRAM, str(reached), str(tmp_path / go), "predict", *map(str, words)]
        environment = os.environ | {"PYTHONPATH": str(Path(rp.__file__).parents[1]), "COLUMNS": "500"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, env=environment, text=True, **pipes)
        processes.append(process)
        while not reached.exists() and process.poll() is None:
            time.sleep(0.02)
        return process

    yield start_process
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("name", "code", "how"), [("SIGINT", 130, "interrupted"), ("SIGTERM", 143, "terminated")])
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_a_signal_leaves_nothing_behind(
    images: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"], name: str, code: int, how: str
) -> None:
    out = tmp_path / "out"
    process = start(MODEL, images, "--out", out, "--spacing-um-px", 1.0)
    assert {path.name for path in out.iterdir()} == {".a.png.lock", ".a.png.pid", ".a.png.unfinished"}
    process.send_signal(getattr(signal, name))
    time.sleep(0.1)
    (tmp_path / "go").touch()  # the signal has been received, and must have been obeyed
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code, errors
    assert errors == (
        f"rotopath: The command was {how}; run the same command again to resume the work in {out}: finished slides are "
        f"skipped.\n"
    )
    assert not list(out.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal")
def test_what_a_killed_process_leaves_is_removed_by_the_next(
    images: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    process = start(*words)
    process.kill()
    process.communicate()
    assert (tmp_path / "out" / ".a.png.unfinished" / "objects.csv").exists()
    assert call(*words).exit_code == 0
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.png"]
    for name in (".a.png.lock", ".a.png.pid"):
        (tmp_path / "out" / name).touch()  # as a process leaves it that is killed when the slide is done
    assert "already done" in call(*words).output
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["a.png"]


def test_leftovers_are_removed_unless_a_process_is_predicting_the_slide(tmp_path: Path) -> None:
    folder, lock = tmp_path / "a.png", tmp_path / ".a.png.lock"
    with hold_elsewhere(folder):
        (tmp_path / ".a.png.unfinished").mkdir()
        writing.remove_leftovers(folder)
        assert (tmp_path / ".a.png.unfinished").exists()
    lock.touch()  # as a killed process leaves it
    writing.remove_leftovers(folder)
    assert not list(tmp_path.iterdir())


def test_two_processes_share_the_slides_and_do_not_disturb_each_other(
    images: Path, tmp_path: Path, start: Callable[..., "subprocess.Popen[str]"]
) -> None:
    """The second leaves the slide of the first alone, predicts the other, and waits for the first at the end."""
    out = tmp_path / "out"
    words = (MODEL, images, "--out", out, "--spacing-um-px", 1.0)
    first, second = start(*words, go="go-1"), start(*words, go="go-2")
    assert {".a.png.unfinished", ".b.tif.unfinished"} <= {path.name for path in out.iterdir()}
    (tmp_path / "go-2").touch()
    while not (out / "b.tif").exists():
        time.sleep(0.02)
    time.sleep(0.2)
    assert second.poll() is None, "it waits for the first"
    (tmp_path / "go-1").touch()
    outputs = [process.communicate(timeout=60)[0] for process in (first, second)]
    printed = [[line for line in output.splitlines() if " slides to predict. " not in line] for output in outputs]
    assert [process.returncode for process in (first, second)] == [0, 0]
    assert printed[0][0].startswith("a.png: tumor in")
    assert printed[0][1] == "b.tif: skipped, already done"
    waiting = f"another process (ID {first.pid}) is predicting this slide; this command waits for it at the end."
    assert printed[1][0] == f"a.png: {waiting}"
    assert printed[1][1].startswith("b.tif: tumor in")
    assert printed[1][2] == "a.png: skipped, already done"
    assert sorted(path.name for path in out.iterdir()) == ["a.png", "b.tif"]
    assert all({path.name for path in folder.iterdir()} == FILES for folder in out.iterdir())


def test_a_file_system_without_locks_is_supported(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setattr(fcntl, "flock", lambda *_: raise_error(OSError(errno.ENOSYS, "Function not implemented")))
    assert call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0).exit_code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a.png", "b.tif"]


def test_a_spacing_that_contradicts_a_file_fails_that_file_only(images: Path, tmp_path: Path) -> None:
    Image.fromarray(tissue(100, 120)).save(images / "a.png", dpi=(50_800, 50_800))
    words = (MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    result = call(*words)
    assert result.exit_code == 1
    sentence = "a.png states a pixel spacing of 0.5 µm/px, but 1 µm/px was given; leave out --spacing-um-px to use that"
    assert sentence in result.output
    assert call(*words, "--override-spacing").exit_code == 0
    assert json.loads((tmp_path / "out" / "a.png" / "summary.json").read_text())["slide"]["spacing_um_px"] == 1


def test_a_folder_may_be_a_slide(tmp_path: Path) -> None:
    """In the format OME-Zarr, or as the DICOM files of one slide; other folders contain slides."""
    pytest.importorskip("zarr")
    image, slides = tissue(128, 160), tmp_path / "slides"
    slides.mkdir()
    zarr = write_ome_zarr(slides / "a.zarr", image)
    dicom = write_dicom(slides / "b", image)
    for series in ("1.2.5", "1.2.6"):
        write_dicom(slides, image, series)
    (slides / "notes").mkdir()
    loose = [slides / "1.2.5-0.dcm", slides / "1.2.6-0.dcm"]
    assert predict_files.list_slides([slides]) == [*loose, zarr, dicom]
    assert predict_files.list_slides([zarr, dicom]) == [zarr, dicom]
    out = tmp_path / "out"
    result = call(MODEL, zarr, dicom, "--out", out)
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in out.iterdir()) == ["a.zarr", "b"]


def test_unusual_images_are_predicted_or_reported(tmp_path: Path) -> None:
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


WORDS = (MODEL, "a.png", "--out", "out", "--spacing-um-px", 1)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((MODEL, "a.png", "--out", "out"), "--spacing-um-px"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 40), "0.05 to 5"),
        ((MODEL, "none.svs", "--out", "out"), "does not exist"),
        ((MODEL, "empty", "--out", "out"), "contains no slides"),
        (("no-such-model", "a.png", "--out", "out"), "no-such-model"),
        ((MODEL, "a.png", "--out", "a.png", "--spacing-um-px", 1), "a.png is a file, but the results need a folder"),
        ((MODEL, "a.png", "other/a.png", "--out", "out"), "several slides named a.png"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "abacus"), "choose cpu or cuda"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "cuda:99"), "is not available"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--device", "cpu", "--precision", 16), "for GPUs"),
        ((MODEL, "a.png", "--out", "out", "--spacing-um-px", 1, "--precision", "bf16"), "choose 16 or 32 bits"),
        ((*WORDS, "--threshold", 1.2), "choose a number from 0 to 1"),
        ((*WORDS, "--min-area-um2", -3), "choose a finite number, 0 or more"),
        ((*WORDS, "--classes", "tumor,gland"), "has no class 'gland'; choose from Tumor"),
        ((*WORDS, "--classes", ""), "The name of a class is empty; choose from Tumor, or choose no classes"),
        ((*WORDS, "--roi", "none.geojson"), "none.geojson, given with --roi, does not exist"),
        ((*WORDS, "--exclude", "empty"), "empty, given with --exclude, contains no GeoJSON file of a slide"),
        ((*WORDS, "--roi", "a.png"), "is cut off or not valid JSON"),
        ((*WORDS, "--roi", "points.geojson"), "contains no annotation with an outline"),
        ((*WORDS, "c.png", "--roi", "roi.geojson"), "--roi is one file, but there are 2 slides"),
        ((*WORDS, "--roi", "far.geojson"), "The region of interest is outside of a.png, which has 100 × 100 px"),
        (("mitosis-amida13-n8", *WORDS[1:], "--min-area-um2", 3), "have no area"),
    ],
)
def test_wrong_arguments_are_reported_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[object, ...], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_image(tmp_path / "a.png", tissue(100, 100))
    write_image(tmp_path / "c.png", tissue(100, 100))
    write_image(tmp_path / "other" / "a.png", tissue(100, 100))
    write_geojson(tmp_path / "points.geojson", [SlideObject(Point(3, 4), "annotation")])
    write_region(tmp_path / "roi.geojson", (10, 10, 90, 90))
    write_region(tmp_path / "far.geojson", (1000, 10, 1090, 90))
    (tmp_path / "empty").mkdir()
    result = call(*words)
    assert result.exit_code == 2, result.output
    assert sentence in " ".join(result.output.split())
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


def test_results_of_another_model_are_not_replaced(images: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0).exit_code == 0
    before = (out / "a.png" / "summary.json").read_bytes()
    refused = call("mitosis-amida13-n8", images / "a.png", "--out", out, "--spacing-um-px", 1.0)
    assert refused.exit_code == 2
    assert f"contains results of the model {MODEL!r}; choose another folder" in " ".join(refused.output.split())
    assert "Results:" not in refused.output
    assert (out / "a.png" / "summary.json").read_bytes() == before
    assert call(MODEL, images / "a.png", "--out", out, "--spacing-um-px", 1.0, "--threshold", 0.9).exit_code == 0
    assert (out / "a.png" / "summary.json").read_bytes() != before, "those of other options are replaced"


def test_a_threshold_of_0_selects_only_predicted_tissue(images: Path, tmp_path: Path) -> None:
    corners = np.array([(20, 20), (20, 90), (90, 90), (90, 20)], float)
    write_geojson(tmp_path / "roi.geojson", [SlideObject((Polygon(corners),), "annotation")])
    command = ("--out", tmp_path / "out", "--spacing-um-px", 1.0, "--threshold", 0, "--roi", tmp_path / "roi.geojson")
    assert call(MODEL, images / "a.png", *command).exit_code == 0
    (region,) = read_geojson(tmp_path / "out" / "a.png" / "objects.geojson")
    top, left, bottom, right = region.bounds_px
    assert min(top, left) > 20 - 12
    assert max(bottom, right) < 90 + 12


def test_other_files_in_a_folder_are_not_replaced(images: Path, tmp_path: Path) -> None:
    precious = tmp_path / "out" / "a.png" / "thesis.txt"
    precious.parent.mkdir(parents=True)
    precious.write_text("years of work")
    result = call(MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 2
    assert "contains files that are not results" in result.output
    assert precious.read_text() == "years of work"


def test_blank_slides_have_results(tmp_path: Path) -> None:
    write_image(tmp_path / "white.png", np.full((200, 200, 3), 250, np.uint8))
    result = call(MODEL, tmp_path / "white.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    assert result.exit_code == 0, result.output
    assert "0.00 mm² of tissue" in result.output
    assert {path.name for path in (tmp_path / "out" / "white.png").iterdir()} == FILES
    assert read_geojson(tmp_path / "out" / "white.png" / "objects.geojson") == []


def test_slides_are_listed_once(images: Path) -> None:
    assert predict_files.list_slides([images, images / "a.png"]) == [images / "a.png", images / "b.tif"]
    with pytest.raises(DataError, match="does not exist"):
        predict_files.list_slides([images / "c.png"])


def test_the_summary_identifies_the_model_and_the_options(images: Path, tmp_path: Path) -> None:
    """In this order, by which summaries of earlier versions are compared."""
    (outcome,) = rp.predict(MODEL, images / "a.png", tmp_path / "out", spacing_um_px=1.0, device="cpu")
    about = json.loads((outcome.folder / "summary.json").read_text())["about"]
    weights = pretrained.HOME / MODEL / "weights.safetensors"
    point = json.loads((pretrained.HOME / MODEL / "model.json").read_text())["operating_point"]
    assert list(about.items()) == [
        ("model", MODEL),
        ("task", "tumor"),
        ("classes", ["Tumor"]),
        ("network", "tumor"),
        ("orientations", 8),
        ("weights", hashlib.sha256(weights.read_bytes()).hexdigest()[:16]),
        ("operating_point", point),
        ("file", "a.png"),
        ("file_bytes", (images / "a.png").stat().st_size),
        ("spacing_um_px", 1.0),
        ("options", {"rotations": 1, "tile_px": None, "everywhere": False}),
        ("precision", "32"),
    ]


def write_region(path: Path, *boxes: tuple[float, float, float, float]) -> Path:
    """Write rectangles (left, top, right, bottom) as annotations of QuPath."""
    path.parent.mkdir(parents=True, exist_ok=True)
    corners = [[(top, left), (top, right), (bottom, right), (bottom, left)] for left, top, right, bottom in boxes]
    polygons = [Polygon(np.array(box, float)) for box in corners]
    write_geojson(path, [SlideObject((polygon,), "annotation") for polygon in polygons])
    return path


def read_about(folder: Path) -> dict[str, Any]:
    about: dict[str, Any] = json.loads((folder / "summary.json").read_text())["about"]
    return about


def test_every_option_decides_whether_a_slide_is_done(images: Path, tmp_path: Path) -> None:
    """Also the content of the GeoJSON files. A threshold that is that of the model changes nothing."""
    roi = write_region(tmp_path / "roi.geojson", (10, 10, 100, 100))
    other = write_region(tmp_path / "other" / "a.geojson", (60, 20, 90, 50))
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    assert call(*words).exit_code == 0
    about = read_about(tmp_path / "out" / "a.png")
    default = about["operating_point"]["threshold"]
    assert "already done" in call(*words, "--threshold", default).output
    for options, key, value in (
        (("--threshold", 0.7), "operating_point", {"threshold": 0.7}),
        (("--min-area-um2", 500), "operating_point", {"threshold": default, "min_area_um2": 500}),
        (("--roi", roi), "roi", None),
        (("--roi", roi, "--exclude", other), "exclude", None),
        (("--exclude", other.parent), "exclude", None),
        (("--classes", "tumor"), "options", about["options"] | {"classes": ["Tumor"]}),
    ):
        first = call(*words, *options)
        assert first.exit_code == 0, first.output
        assert "already done" not in first.output
        assert "already done" in call(*words, *options).output
        written = read_about(tmp_path / "out" / "a.png")
        assert written[key] == value or (value is None and written[key]["file"].endswith(".geojson"))
        assert "already done" not in call(*words).output, "without the option, the slide is predicted again"
    call(*words, "--roi", roi)
    write_region(roi, (10, 10, 80, 100))
    assert "already done" not in call(*words, "--roi", roi).output


def test_regions_of_several_slides_are_in_a_folder(images: Path, tmp_path: Path) -> None:
    """By the name of the slide with or without its suffix. Slides without a file are predicted whole or refused."""
    folder = tmp_path / "regions"
    write_region(folder / "a.png.geojson", (0, 0, 75, 130))
    options = (MODEL, images, "--spacing-um-px", 1.0, "--device", "cpu")
    result = call(*options, "--out", tmp_path / "refused", "--roi", folder)
    assert result.exit_code == 2
    assert "contains no region of interest for b.tif; save its annotations there as b.tif.geojson" in result.output
    assert not (tmp_path / "refused").exists()
    excluded = rp.predict(MODEL, images, tmp_path / "excluded", spacing_um_px=1.0, exclude=folder)
    write_region(folder / "b.geojson", (0, 0, 20, 20), (30, 20, 50, 40))
    inside = rp.predict(MODEL, images, tmp_path / "inside", spacing_um_px=1.0, roi=folder)
    areas = [json.loads((item.folder / "summary.json").read_text())["tissue_mm2"] for item in (*excluded, *inside)]
    expected = [75 * 130, 40 * 50, 75 * 130, 2 * 20 * 20]
    np.testing.assert_allclose(np.array(areas) * 1e6, expected, rtol=0.06)
    assert [read_about(item.folder)["roi"]["file"] for item in inside] == ["a.png.geojson", "b.geojson"]
    assert "exclude" not in read_about(excluded[1].folder)


def test_regions_start_at_the_scanned_region_as_in_qupath(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    scan = write_mirax(tmp_path / "a.mrxs", tissue(256, 256), (8, 12), first_tile=(4, 8), spacing_um_px=0.972)
    roi = write_region(tmp_path / "roi.geojson", (0, 0, 128, 256))
    (outcome,) = rp.predict(MODEL, scan, tmp_path / "out", threshold=0.01, roi=roi)
    assert outcome.state == "done", outcome.reason
    tissue_mm2 = json.loads((outcome.folder / "summary.json").read_text())["tissue_mm2"]
    assert tissue_mm2 == pytest.approx(128 * 256 * 0.972e-3**2, rel=0.02)
    (region,) = read_geojson(outcome.folder / "objects.geojson")
    corners = np.concatenate([polygon.outer for polygon in region.shape])  # type: ignore[union-attr]
    assert corners[:, 1].max() < 128 + 13, "half of the scan"
    assert corners[:, 0].max() > 200


def test_a_result_can_select_the_region_of_another_prediction(images: Path, tmp_path: Path) -> None:
    model = rp.load(MODEL)
    square = Polygon(np.array([(10, 10), (10, 90), (90, 90), (90, 10)], float))
    roi = [SlideObject((square,), "annotation")]
    result = model.predict(images / "a.png", 1.0, device="cpu", roi=roi, threshold=0.3)
    write_geojson(tmp_path / "roi.geojson", roi)
    same = model.predict(images / "a.png", 1.0, device="cpu", roi=tmp_path / "roi.geojson", threshold=0.3)
    assert result.summary == same.summary
    assert result.summary["tissue_mm2"] == pytest.approx(0.08**2, rel=0.02)
    with pytest.raises(ValueError, match="list of objects contains no annotation with an outline"):
        model.predict(images / "a.png", 1.0, roi=[SlideObject(Point(3, 4), "annotation")])
    with pytest.raises(DataError, match="choose a number from 0 to 1"):
        model.predict(images / "a.png", 1.0, threshold=1.5)


CLASSES = ("lymphocyte", "plasma cell", "tumor cell")
OTHER_OPTIONS: dict[tuple[str, int], dict[str, Any]] = {  # by model and rotations: every kind of task with 1 and with 4
    ("tumor-pcam-n8", 1): {"threshold": 0.1, "min_area_um2": 600},
    ("mitosis-amida13-n8", 1): {"threshold": 0.02},
    ("nuclei-kumar-n8", 1): {"threshold": 0.6, "min_area_um2": 20},
    ("classify", 4): {"classes": CLASSES[:2]},
    ("detect", 4): {"threshold": 0.3, "classes": CLASSES[1:]},
    ("segment", 4): {"threshold": 0.4, "min_area_um2": 2, "classes": CLASSES[1:]},
}


@pytest.mark.parametrize(("name", "rotations"), OTHER_OPTIONS)
def test_a_stored_map_gives_the_results_of_a_full_run(
    name: str, rotations: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other thresholds, classes, regions and tile sizes, for all kinds of tasks, and without running a network."""
    folder: Path | str = name
    if name in untrained_runs.POINTS:
        keys = {"segment": untrained_runs.UNET}.get(name, untrained_runs.RESNET)
        spacing = {"data_spacing_um_px": 0.25, "classes": CLASSES}
        folder = untrained_runs.make_run(tmp_path / "run", name, random_statistics=True, **keys, **spacing)
    model = rp.load(folder)
    image = np.full((300, 400, 3), 244, np.uint8)
    image[20:290, 20:320] = np.tile(draw_tissue(), (2, 2, 1))[:270, :300]
    write_image(tmp_path / "a.png", image)
    common: dict[str, Any] = {"spacing_um_px": model.task.spacing_um_px, "device": "cpu", "rotations": rotations}
    region = write_region(tmp_path / "b.geojson", (100, 100, 180, 350))
    other = OTHER_OPTIONS[name, rotations] | {"exclude": region}
    monkeypatch.setattr(Model, "tile_px", 256)
    (full,) = rp.predict(model, tmp_path / "a.png", tmp_path / "full", **common, **other)
    (default,) = rp.predict(model, tmp_path / "a.png", tmp_path / "default", **common)
    (stored,) = rp.predict(model, tmp_path / "a.png", tmp_path / "out", keep_map=True, **common)
    assert (full.state, default.state, stored.state) == ("done",) * 3, full.reason + default.reason + stored.reason
    assert_same_results(stored.folder, default.folder, is_exact=True)
    map_file = (stored.folder / "map.zip").read_bytes()
    monkeypatch.setattr(tiling, "predict_frame", lambda *_: pytest.fail("the network runs"))
    for tile_px, options, expected in ((256, other, full), (190, other, full), (1024, {}, default), (256, {}, default)):
        monkeypatch.setattr(Model, "tile_px", tile_px)
        (again,) = rp.predict(model, tmp_path / "a.png", tmp_path / "out", reuse=True, **common, **options)
        if (tile_px, options) == (190, other) or (tile_px, options) == (256, {}):
            assert again.state == "skipped"
            remove_summary(again.folder)
            (again,) = rp.predict(model, tmp_path / "a.png", tmp_path / "out", reuse=True, **common, **options)
        assert again.state == "done", again.reason
        assert_same_results(again.folder, expected.folder, is_exact=tile_px == 256 and name != "detect")
        assert (again.folder / "map.zip").read_bytes() == map_file
    full_rows, default_rows = ((outcome.folder / "objects.csv").read_text() for outcome in (full, default))
    assert full_rows != default_rows


def remove_summary(folder: Path) -> None:
    """Make the results in a folder those of another point in time, so that they are not skipped."""
    summary = json.loads((folder / "summary.json").read_text())
    summary["about"]["operating_point"] = None
    (folder / "summary.json").write_text(json.dumps(summary))


def assert_same_results(folder: Path, expected: Path, is_exact: bool) -> None:
    """Compare all objects, maps and numbers. If `is_exact` is false, the order and the rounding may differ."""
    names = sorted(path.name for path in folder.iterdir() if path.name != "map.zip")
    assert names == sorted(path.name for path in expected.iterdir())
    for name in names:
        if name.endswith(".tif"):
            maps = [tifffile.imread(parent / name) for parent in (folder, expected)]
            if name.startswith("labels") and not is_exact:
                maps = [labels > 0 for labels in maps]
            np.testing.assert_allclose(*maps, atol=0 if is_exact else 1e-5)
    tables = []
    for parent in (folder, expected):
        with (parent / "objects.csv").open() as file:
            tables.append(sorted(csv.DictReader(file), key=lambda row: row["number" if is_exact else "id"]))
    for row, other in zip(*tables, strict=True):
        assert row.keys() == other.keys()
        for key in row.keys() - ({"number"} if not is_exact else set()):
            assert row[key] == other[key] or float(row[key]) == pytest.approx(float(other[key]), rel=1e-4), key
            assert row[key] == other[key] or not is_exact
    summaries = [json.loads((parent / "summary.json").read_text()) for parent in (folder, expected)]
    for key in ("sentence", "warnings", "about", "tissue_mm2", "objects"):
        assert summaries[0][key] == summaries[1][key], key


def test_a_stored_map_is_refused_if_it_is_not_what_would_be_predicted(images: Path, tmp_path: Path) -> None:
    """Of another slide, model, spacing, precision, number of rotations or area; or missing or damaged."""
    out, image = tmp_path / "out", images / "a.png"
    words = (MODEL, image, "--out", out, "--spacing-um-px", 1.0, "--device", "cpu")
    changed = tissue(130, 150)
    changed[:, 70:] = 244
    write_image(image, changed)  # with glass, which is not predicted

    def refusal(*options: object) -> str:
        before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
        result = call(*words, "--reuse", *options)
        assert result.exit_code == 2
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
        return " ".join(result.output.split())

    assert call(*words).exit_code == 0
    assert "contains no stored map; predict the slide with --keep-map first." in refusal("--threshold", 0.7)
    assert "already done" not in call(*words, "--keep-map").output, "the same results, but the map is missing"
    assert "already done" in call(*words, "--keep-map").output
    assert "stored with rotations 1, but 4 is requested" in refusal("--rotations", 4)
    assert "does not cover the whole area" in refusal("--everywhere")
    assert "contains results of the model 'tumor-pcam-n8'" in refusal_of_model(words)
    again = (MODEL, image, "--out", out, "--spacing-um-px", 1.1, "--device", "cpu", "--reuse")
    assert "stored with spacing_um_px 1.0, but 1.1 is requested" in " ".join(call(*again).output.split())
    summary = out / "a.png" / "summary.json"
    whole = (out / "a.png" / "map.zip").read_bytes()
    bmp = images / "c.bmp"  # all images of this size have the same number of bytes
    write_image(bmp, tissue(130, 150))
    assert call(MODEL, bmp, *words[2:], "--keep-map").exit_code == 0
    write_image(bmp, changed)
    reused = call(MODEL, bmp, *words[2:], "--reuse", "--threshold", 0.7)
    assert "c.bmp has changed since its map was stored" in " ".join(reused.output.split())
    roi = write_region(tmp_path / "roi.geojson", (10, 10, 60, 60))
    assert call(*words, "--keep-map", "--roi", roi).exit_code == 0
    assert summary.exists()
    assert "does not cover the whole area to predict" in refusal()
    smaller = write_region(tmp_path / "smaller.geojson", (20, 20, 40, 40))
    assert call(*words, "--reuse", "--roi", smaller).exit_code == 0
    for content in (whole[: len(whole) // 2], b"", whole.replace(b"weights", b"WEIGHTS")):
        (out / "a.png" / "map.zip").write_bytes(content)
        assert "map.zip is damaged" in refusal("--threshold", 0.6)


@pytest.mark.parametrize("value", [7.0, -1.0, np.nan])
def test_a_map_of_other_numbers_than_probabilities_is_refused(images: Path, tmp_path: Path, value: float) -> None:
    words = (MODEL, images / "a.png", "--out", tmp_path, "--spacing-um-px", 1.0, "--device", "cpu", "--everywhere")
    assert call(*words, "--keep-map").exit_code == 0
    path = tmp_path / "a.png" / "map.zip"
    with StoredMap(path) as stored:
        about, mask = stored.about, stored.mask
    with MapWriter(path) as writer:
        writer.write(0, 0, np.full((1, 2, 2), value, np.float32))
        writer.describe(about, mask)
    refused = call(*words, "--reuse", "--threshold", 0.6)
    assert refused.exit_code == 2
    assert "values that are not probabilities" in " ".join(refused.output.split())
    with MapWriter(path) as writer:
        writer.describe({"options": []}, mask)
    assert "stored with weights None, but" in " ".join(call(*words, "--reuse", "--threshold", 0.6).output.split())


@pytest.mark.skipif(sys.platform != "linux", reason="lists open files in /proc")
def test_no_file_is_open_when_reused_results_are_replaced(
    images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows does not rename a folder with an open file."""
    words = (MODEL, images / "a.png", "--out", tmp_path, "--spacing-um-px", 1.0, "--device", "cpu", "--everywhere")
    assert call(*words, "--keep-map").exit_code == 0
    rename, renamed = writing._rename, []

    def rename_closed(old: Path, new: Path) -> None:
        open_files = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
        assert not [path for path in open_files if path.is_relative_to(old.resolve())]
        renamed.append(old)
        rename(old, new)

    monkeypatch.setattr(writing, "_rename", rename_closed)
    result = call(*words, "--reuse", "--threshold", 0.6)
    assert result.exit_code == 0, result.output
    assert len(renamed) > 1


def refusal_of_model(words: tuple[object, ...]) -> str:
    result = call("mitosis-amida13-n8", *words[1:], "--reuse")
    assert result.exit_code == 2
    return " ".join(result.output.split())


@pytest.mark.filterwarnings("ignore")  # of packages that rotopath does not require
@pytest.mark.parametrize("name", [MODEL, "nuclei-kumar-n8"])
@pytest.mark.parametrize("has_objects", [True, False])
def test_parquet_has_the_rows_and_columns_of_the_csv_table(
    name: str, has_objects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow")
    pandas = pytest.importorskip("pandas")
    monkeypatch.setattr(geojson, "ROWS_AT_ONCE", 7)
    write_image(tmp_path / "a.png", draw_tissue() if has_objects else np.full((200, 200, 3), 244, np.uint8))
    options: dict[str, Any] = {"spacing_um_px": rp.load(name).task.spacing_um_px, "device": "cpu", "threshold": 0.05}
    rp.predict(name, tmp_path / "a.png", tmp_path / "out", rotations=2, **options)
    (outcome,) = rp.predict(name, tmp_path / "a.png", tmp_path / "out", rotations=2, parquet=True, **options)
    assert outcome.state == "done", "the table was missing"
    table = pandas.read_parquet(outcome.folder / "objects.parquet")
    text = pandas.read_csv(outcome.folder / "objects.csv")
    assert list(table.columns) == list(text.columns)
    assert (len(table) > 0) == has_objects
    assert "deviation" in table.columns
    pandas.testing.assert_frame_equal(table, text, check_dtype=has_objects, rtol=1e-5)
    again = rp.load(name).predict(tmp_path / "a.png", rotations=2, **options)
    again.to_parquet(tmp_path / "a.parquet")
    again.to_csv(tmp_path / "a.csv")
    pandas.testing.assert_frame_equal(pandas.read_parquet(tmp_path / "a.parquet"), table)
    assert (tmp_path / "a.csv").read_text() == (outcome.folder / "objects.csv").read_text()
    (again,) = rp.predict(name, tmp_path / "a.png", tmp_path / "out", rotations=2, parquet=True, **options)
    assert again.state == "skipped"


@pytest.mark.parametrize("name", [MODEL, "nuclei-kumar-n8", "mitosis-amida13-n8"])
def test_the_embedding_is_written_in_the_order_of_the_table(name: str, tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", draw_tissue())
    options: dict[str, Any] = {"spacing_um_px": rp.load(name).task.spacing_um_px, "device": "cpu", "threshold": 0.05}
    rp.predict(name, tmp_path / "a.png", tmp_path / "out", keep_map=True, **options)
    (outcome,) = rp.predict(name, tmp_path / "a.png", tmp_path / "out", reuse=True, embedding=True, **options)
    assert outcome.state == "done", outcome.reason
    result = rp.load(name).predict(tmp_path / "a.png", embedding=True, **options)
    assert result.embedding is not None
    assert len(result.objects) > 0
    written = np.load(outcome.folder / "embedding.npy")
    assert written.dtype == np.float32
    np.testing.assert_array_equal(written, result.embedding)
    with (outcome.folder / "objects.csv").open() as file:
        assert [row["id"] for row in csv.DictReader(file)] == [str(item.id) for item in result.objects]
    with Image.open(outcome.folder / "overlay.png") as overlay:
        np.testing.assert_array_equal(np.asarray(overlay), np.asarray(result.show()))


def test_onnx_runtime_computes_no_embedding(images: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    words = (MODEL, images / "a.png", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
    result = call(*words, "--backend", "onnxruntime", "--embedding")
    assert result.exit_code == 2
    assert "a.png failed: ONNX Runtime computes no features; use the backend 'torch'." in result.output


def test_parquet_without_its_package_is_refused(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    result = call(MODEL, images, "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--parquet")
    assert result.exit_code == 2
    assert "This command needs the package pyarrow; install it with: pip install 'rotopath[tables]'" in result.output
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", [MODEL, "nuclei-kumar-n8", "mitosis-amida13-n8"])
def test_tables_without_objects_have_all_columns(name: str, tmp_path: Path) -> None:
    spacing = rp.load(name).task.spacing_um_px
    heads = []
    for image, threshold in ((np.full((200, 200, 3), 244, np.uint8), None), (draw_tissue(), 0.01)):
        write_image(tmp_path / "a.png", image)
        out = tmp_path / str(threshold)
        rp.predict(name, tmp_path / "a.png", out, spacing_um_px=spacing, device="cpu", threshold=threshold)
        heads.append((out / "a.png" / "objects.csv").read_text().splitlines())
    assert heads[0] == heads[1][:1]
    assert len(heads[1]) > 1


def test_warnings_are_printed_and_written(tmp_path: Path) -> None:
    """Also for a slide that is skipped; and a normal slide has none."""
    gray = np.repeat(tissue(160, 160)[..., :1], 3, axis=2)
    write_image(tmp_path / "in" / "gray.png", gray)
    write_image(tmp_path / "in" / "pink.png", tissue(160, 160))
    for state in ("tumor in", "skipped"):
        result = call(MODEL, tmp_path / "in", "--out", tmp_path / "out", "--spacing-um-px", 1.0)
        assert result.exit_code == 0
        assert f"pink.png: {state}" in result.output
        lines = [line for line in result.output.splitlines() if "Warning" in line]
        assert len(lines) == 1
        assert lines[0].startswith("gray.png: Warning: The slide does not look like H&E")
    for name, count in (("gray", 1), ("pink", 0)):
        warnings = json.loads((tmp_path / "out" / f"{name}.png" / "summary.json").read_text())["warnings"]
        assert len(warnings) == count
    with Image.open(tmp_path / "out" / "gray.png" / "overlay.png") as overlay:
        assert overlay.getpixel((0, 0)) == WARNING_INK


def test_blur_and_pen_marks_are_measured_drawn_and_reported(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    sharp = (
        np.array([190, 110, 170]) + generator.integers(-45, 46, (64, 96)).repeat(8, 0).repeat(8, 1)[..., None]
    ).clip(0)
    bad = sharp.copy()
    bad[:, :384] = ndimage.gaussian_filter(sharp[:, :384].astype(float), (5, 5, 0))
    bad[100:300, 400:700] = (30, 60, 170)
    for name, image in (("sharp", sharp), ("bad", bad)):
        write_image(tmp_path / "in" / f"{name}.png", image.astype(np.uint8))
    result = call(MODEL, tmp_path / "in", "--out", tmp_path / "out", "--spacing-um-px", 1.0, "--device", "cpu")
    summaries = [
        json.loads((tmp_path / "out" / f"{name}.png" / "summary.json").read_text()) for name in ("sharp", "bad")
    ]
    assert summaries[0]["warnings"] == []
    assert summaries[0]["quality"]["out_of_focus_share"] == 0
    assert summaries[0]["quality"]["pen_mm2"] == 0
    assert summaries[1]["quality"]["out_of_focus_share"] == pytest.approx(384 * 512 / (768 * 512 - 200 * 300), abs=0.05)
    assert summaries[1]["quality"]["pen_mm2"] == pytest.approx(0.2 * 0.3, rel=0.1)
    assert summaries[1]["quality"]["pen_share"] == pytest.approx(0.06 / (0.768 * 0.512), rel=0.1)
    focus, pen = summaries[1]["warnings"]
    assert focus.endswith("of the tissue is out of focus; results are unreliable there.")
    assert re.match(r"Pen marks cover 0\.0\d+ mm², 1\d% of the area of tissue and marks;", pen)
    assert f"bad.png: Warning: {focus}" in result.output
    with Image.open(tmp_path / "out" / "bad.png" / "quality.png") as page:
        pixels = np.asarray(page)
    top = len(pixels) - 512 - 2 * 12 - 22  # below are a margin and the scale bar
    inside = pixels[top : top + 512]
    for color, columns in (((230, 120, 0), (0, 390)), ((200, 0, 200), (395, 705))):
        where = np.flatnonzero((inside == color).all(axis=2).any(axis=0))
        assert len(where) > 5
        assert columns[0] <= where.min() < where.max() <= columns[1]


def test_results_of_earlier_versions_have_no_warnings(images: Path, tmp_path: Path) -> None:
    (outcome,) = rp.predict(MODEL, images / "a.png", tmp_path / "out", spacing_um_px=1.0)
    path = outcome.folder / "summary.json"
    summary = json.loads(path.read_text())
    del summary["warnings"]
    path.write_text(json.dumps(summary))
    (again,) = rp.predict(MODEL, images / "a.png", tmp_path / "out", spacing_um_px=1.0)
    assert (again.state, again.warnings) == ("skipped", [])


def test_files_and_memory_have_the_same_results(images: Path, tmp_path: Path) -> None:
    (outcome,) = rp.predict(MODEL, images / "a.png", tmp_path, spacing_um_px=1.0, rotations=4, device="cpu")
    result = rp.load(MODEL).predict(images / "a.png", spacing_um_px=1.0, rotations=4, device="cpu")
    written = read_geojson(outcome.folder / "objects.geojson")
    assert sorted(str(region.id) for region in written) == sorted(str(region.id) for region in result.objects)
    assert result.deviation is not None
    for name, expected in (("heatmap", result.map), ("deviation", result.deviation)):
        with tifffile.TiffFile(outcome.folder / f"{name}.ome.tif") as file:
            np.testing.assert_allclose(file.pages[0].asarray(), expected, atol=1e-6)
    with Image.open(outcome.folder / "overlay.png") as overlay:
        np.testing.assert_array_equal(np.asarray(overlay), np.asarray(result.show()))
    summary = json.loads((outcome.folder / "summary.json").read_text())
    for name, value in result.summary.items():
        assert summary[name] == pytest.approx(value, abs=1e-6)


@given(scores=st.lists(st.floats(0, 1), max_size=80))
@example([0.5] * 60)
def test_the_highest_scores_of_a_stream_are_kept(scores: list[float]) -> None:
    objects = [SlideObject(Point(i, 0), measurements={"score": score}) for i, score in enumerate(scores)]
    shortlist = predict_files._Shortlist(lambda item: item.measurements["score"])
    assert list(shortlist.watch(objects)) == objects
    first = sorted(objects, key=lambda item: -item.measurements["score"])[: predict_files.CROP_COUNT]
    assert [item for _, item in shortlist.items] == first, "the earliest objects come first in a tie"
    assert all(objects[number - 1] is item for number, item in shortlist.items)
