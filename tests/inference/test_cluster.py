"""Slides on the workers of a cluster: the same results as here, and a worker that dies does not stop the others."""

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
from layouts import write_image
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath import pretrained
from rotopath.cli import app
from rotopath.images.geojson import Polygon, SlideObject, read_geojson, write_geojson
from rotopath.inference.cluster import ClusterError, Workers, connect, predict_on_cluster
from rotopath.inference.predict_files import FileOptions, SlideOutcome
from rotopath.inference.slide_pass import Model, PassOptions
from rotopath.runs import prepare_model

pytestmark = pytest.mark.slow

pytest.importorskip("distributed")
MODEL = "tumor-pcam-n8"
OPTIONS = FileOptions(spacing_um_px=1.0)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(100, 200, (130, 150, 3), dtype=np.uint8)
    return write_image(tmp_path / "a.png", pixels)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, ["predict", *map(str, words)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[Workers]:
    """A cluster with one worker, which is started again if it dies. A call may kill a worker once, and not twice."""
    import dask

    with dask.config.set({"distributed.scheduler.allowed-failures": 1}), connect("local", 1) as workers:
        yield workers


@pytest.fixture
def workers(cluster: Workers, monkeypatch: pytest.MonkeyPatch) -> Workers:
    """The cluster, to which `predict_on_cluster` connects instead of starting another one."""
    monkeypatch.setattr("rotopath.inference.cluster.connect", lambda *_: nullcontext(cluster))
    return cluster


def test_a_local_cluster_listens_on_this_machine_only(cluster: Workers) -> None:
    """Also its dashboard."""
    assert cluster.client.scheduler is not None
    this = psutil.Process()
    listening = [
        connection.laddr.ip
        for process in (this, *this.children(recursive=True))
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    ]
    assert len(listening) >= 4
    assert set(listening) == {"127.0.0.1"}


def predict(make_model: Callable[[], Model], slides: list[Path], out: Path) -> list[SlideOutcome]:
    outcomes = predict_on_cluster(make_model, slides, out, OPTIONS, "local", at_once=1)
    return sorted(outcomes, key=lambda outcome: outcome.path)


@pytest.mark.usefixtures("workers")
def test_results_are_the_same_as_without_a_cluster(
    image: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a run in a folder that has the name of a pretrained model; the folder is used. A link keeps its name."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(pretrained.HOME / MODEL, tmp_path / MODEL)
    description = json.loads((tmp_path / MODEL / "model.json").read_text())
    assert description["operating_point"] != {"threshold": 0.5}
    (tmp_path / MODEL / "model.json").write_text(json.dumps(description | {"operating_point": {"threshold": 0.5}}))
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "cut.png").write_bytes(b"\x89PNG")
    (tmp_path / "images" / "a.png").symlink_to(image.rename(tmp_path / "scan-1.png"))
    (tmp_path / "regions").mkdir()
    (tmp_path / "excluded").mkdir()
    for name, side in (("regions/a", 90), ("regions/cut", 90), ("excluded/a", 20)):
        polygon = Polygon(np.array([(0, 0), (0, side), (side, side), (side, 0)], float))
        write_geojson(tmp_path / f"{name}.geojson", [SlideObject((polygon,), "annotation")])
    options = ("--spacing-um-px", 1.0, "--device", "cpu", "--threshold", 0.3)
    options = (*options, "--roi", "regions", "--exclude", "excluded")
    images = tmp_path / "images"
    here = call(MODEL, images, "--out", "here", *options)
    there = call(MODEL, images, "--out", "there", *options, "--cluster", "local")
    assert here.exit_code == there.exit_code == 1, there.output
    failures = [re.findall("cut.png failed.*", result.output) for result in (here, there)]
    assert failures[0] == failures[1] != []
    ids, abouts = zip(*(read_results(tmp_path / out / "a.png") for out in ("here", "there")), strict=True)
    assert ids[0] == ids[1]
    assert abouts[0] == abouts[1]
    assert abouts[0]["operating_point"] == {"threshold": 0.3}
    assert {"roi", "exclude"} < set(abouts[0])
    again = call(MODEL, images, "--out", "there", *options, "--cluster", "local")
    assert "a.png: skipped, already done" in again.output


def read_results(folder: Path) -> tuple[set[object], dict[str, object]]:
    """Return the IDs of all objects, and what the summary states about the model and the options."""
    ids = {region.id for region in read_geojson(folder / "objects.geojson")}
    return ids, json.loads((folder / "summary.json").read_text())["about"]


@pytest.mark.usefixtures("workers")
def test_a_slide_whose_worker_dies_is_tried_again_and_then_reported(image: Path, tmp_path: Path) -> None:
    (outcome,) = predict(partial(os._exit, 9), [image], tmp_path / "out")
    assert (outcome.path, outcome.state) == (image, "failed")
    assert (
        outcome.reason
        == "the worker process was killed 2 times, perhaps for lack of memory; use workers with more memory."
    )


@pytest.mark.usefixtures("workers")
def test_a_slide_whose_worker_dies_once_is_predicted_by_another_worker(image: Path, tmp_path: Path) -> None:
    (outcome,) = predict(partial(die_once, tmp_path / "died"), [image], tmp_path / "out")
    assert (tmp_path / "died").exists()
    assert (outcome.state, outcome.reason) == ("done", "")
    assert (outcome.folder / "summary.json").exists()


def die_once(marker: Path) -> Model:
    """Kill this process the first time, then return a model."""
    if not marker.exists():
        marker.touch()
        os._exit(9)
    return prepare_model(MODEL, "cpu")


@pytest.mark.usefixtures("workers")
def test_an_error_in_a_worker_is_the_reason(image: Path, tmp_path: Path) -> None:
    """All slides are reported; nothing is repeated."""
    other = image.with_name("b.png")
    shutil.copy(image, other)
    outcomes = predict(partial(prepare_model, "no-such-model"), [image, other], tmp_path / "out")
    assert [outcome.state for outcome in outcomes] == ["failed", "failed"]
    assert "no-such-model is neither a run folder nor one of the pretrained models" in outcomes[0].reason


def test_workers_work_in_any_folder(
    image: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative paths are those of the folder that the slides are sent from."""
    monkeypatch.chdir(tmp_path)
    workers.submit(os.chdir, "/").result()
    (outcome,) = predict(partial(prepare_model, MODEL, "cpu"), [Path(image.name)], Path("out"))
    assert (outcome.path, outcome.folder) == (Path("a.png"), Path("out/a.png"))
    assert outcome.state == "done", outcome.reason
    assert (tmp_path / "out" / "a.png" / "summary.json").exists()


@pytest.mark.usefixtures("workers")
def test_workers_of_a_cluster_start_no_processes(image: Path, tmp_path: Path) -> None:
    """Dask's workers cannot. On a GPU, processes are started by default."""
    options = FileOptions(PassOptions(everywhere=True, workers=1), spacing_um_px=0.25)
    make_model = partial(prepare_model, "nuclei-kumar-n8", "cpu")
    (outcome,) = predict_on_cluster(make_model, [image], tmp_path / "out", options, "local", at_once=1)
    assert outcome.state == "done", outcome.reason


def test_an_unknown_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match="There is no cluster 'moon'; choose 'local'"), connect("moon", 1):
        pass


def test_two_slides_of_the_same_name_are_refused_before_a_cluster_is_started(tmp_path: Path) -> None:
    slides = [tmp_path / "a.png", tmp_path / "other" / "a.png"]
    with pytest.raises(rp.data.DataError, match=r"several slides named a\.png"):
        list(predict_on_cluster(partial(os._exit, 9), slides, tmp_path, OPTIONS, "moon", 1))
