"""A study of a task that is not in the paper: classes from folder names, and a converted network."""

import html
import re
import shutil
import tomllib
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import write_image
from matplotlib.figure import Figure
from sharing import make_once
from torch import nn
from typer.testing import CliRunner

import rotopath as rp
from rotopath.cli import app
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.models.protocols import unwrap
from rotopath.recipe import read_recipe
from rotopath.reports import study_figures
from rotopath.reports.study_report import report
from rotopath.runs import RECIPE
from rotopath.studies import plan, read_study
from rotopath.studies.jobs import JobFuture, run_job, run_study
from rotopath.studies.results import read_results

pytestmark = pytest.mark.slow

CLASSES = ("dots", "plain", "stripes")
ORIENTATIONS = (1, 4)
COUNTS = {"train": 4, "valid": 2, "test": 3}  # patches of each class
WINDOW_PX = 32
STAIN, GLASS = (120, 40, 130), 225


def draw_texture(name: str, *seed: int) -> np.ndarray:
    generator = np.random.default_rng(seed)
    patch = np.full((40, 40, 3), GLASS, np.uint8)
    if name == "stripes":
        patch[:, generator.integers(6) :: 6] = STAIN
    if name == "dots":
        for row, column in generator.integers(38, size=(12, 2)):
            patch[row : row + 3, column : column + 3] = STAIN
    return patch


def run_in_this_process(recipe: str, rotations: int, _cwd: str) -> JobFuture:
    """Run a job before returning its future. That jobs have processes is tested in `test_jobs.py`."""
    future: Future[str] = Future()
    run_job(Path(recipe), rotations)
    future.set_result("")
    return future


def _make_study(folder: Path) -> None:
    """Write patches sorted by class, a recipe without classes, and a study of two networks, and run it."""
    for number, (split, count) in enumerate(COUNTS.items()):
        for kind, name in enumerate(CLASSES):
            for i in range(count):
                write_image(folder / "data" / split / name / f"{i}.png", draw_texture(name, number, kind, i))
    (folder / "r.toml").write_text(
        f'task = "classify"\ndata = "{folder / "data"}"\ndata_spacing_um_px = 1.0\nnetwork = "resnet18"\n'
        f"network_options = {{ width = 4 }}\nwindow_px = {WINDOW_PX}\n"
        'epochs = 1\nsteps = 2\nbatch = 6\naccelerator = "cpu"\n'
    )
    (folder / "s.toml").write_text(
        f'[texture]\nrecipe = "r.toml"\norientations = {list(ORIENTATIONS)}\nseed = [0]\ntta = 4\n'
    )
    states = run_study(read_study(folder / "s.toml"), folder / "finished", run_in_this_process)
    assert {job.name: state.state for job, state in states.items()} == {
        "texture/N4-seed0": "done",
        "texture/N1-seed0": "done",
    }, states


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_once(tmp_path_factory, "study-of-a-kind", _make_study)


@pytest.fixture
def study(shared: Path) -> Path:
    return shared / "s.toml"


@pytest.fixture
def finished(shared: Path) -> Path:
    return shared / "finished"


@pytest.fixture(scope="module")
def page(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    return report(shared / "finished", tmp_path_factory.mktemp("report")).read_text()


def test_runs_record_the_classes_of_the_data(study: Path, finished: Path) -> None:
    for n in ORIENTATIONS:
        assert read_recipe(finished / f"texture/N{n}-seed0.toml").classes == (), (
            "the recipe of the study has no classes"
        )
        assert read_recipe(finished / f"texture/N{n}-seed0" / RECIPE).classes == CLASSES
        run = rp.load(finished / f"texture/N{n}-seed0")
        assert run.task.class_names == CLASSES
        assert (run.info.network.name, run.info.network.window_px) == ("resnet18", WINDOW_PX)
    assert read_study(study).jobs[0].recipe.classes == ()


def test_finished_jobs_are_skipped_if_the_classes_come_from_the_data(study: Path, finished: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in finished.glob("texture/*/*.*")}
    states = run_study(read_study(study), finished, lambda *_: pytest.fail("started again"))
    assert [state.state for state in states.values()] == ["done", "done"]
    again = CliRunner().invoke(app, ["study", "run", str(study), "--out", str(finished), "--at-once", "1"])
    assert again.exit_code == 0, again.stderr
    assert "2 of 2 done, 0 running, 0 failed" in again.stdout
    assert {path: path.stat().st_mtime_ns for path in finished.glob("texture/*/*.*")} == before


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ('texture.set.classes=["dots", "plain"]', "classes"),
        ("texture.set.network_options.width=8", "network_options"),
        ("texture.set.network=resnet34", "network"),
        ("texture.set.window_px=40", "window_px"),
    ],
)
def test_another_recipe_is_refused(study: Path, finished: Path, change: str, key: str) -> None:
    with pytest.raises(RunError, match=f"The value of '{key}' in .* differs from this study"):
        run_study(read_study(study, [change]), finished, lambda *_: pytest.fail("started"))


def test_an_interrupted_run_is_resumed_with_the_same_classes(study: Path, finished: Path, tmp_path: Path) -> None:
    """One run has only the files of a killed training; the other is finished."""
    out = tmp_path / "interrupted"
    shutil.copytree(finished, out)
    interrupted = out / "texture/N1-seed0"
    for path in interrupted.iterdir():
        if path.name not in (RECIPE, "provenance.json") and path.is_file():
            path.unlink()
    started: list[str] = []
    states = run_study(read_study(study), out, lambda *job: (started.append(job[0]), run_in_this_process(*job))[1])
    assert [state.state for state in states.values()] == ["done", "done"], states
    assert [Path(recipe).stem for recipe in started] == ["N1-seed0"]
    for name in (WEIGHTS, MODEL):
        assert (interrupted / name).read_bytes() == (finished / "texture/N1-seed0" / name).read_bytes()


def test_the_page_names_the_score_of_the_task(page: str, finished: Path) -> None:
    assert "accuracy for each network and amount of training data" in page
    assert "<th>accuracy</th>" in page
    assert "Lafarge et al. (2020) did not study this task, so there is no published score." in page
    for result in read_results(finished):
        label = f"N={result.recipe.orientations}" + (" + 4 rotations" if result.rotations > 1 else "")
        assert f"<td>{label}</td><td>{result.scores['accuracy']:.3f}</td>" in page


def test_the_page_shows_the_settings(page: str) -> None:
    (settings,) = re.findall("<pre>(.*?)</pre>", page, flags=re.DOTALL)
    recipe = tomllib.loads(html.unescape(settings))
    assert recipe["task"] == "classify"
    assert recipe["classes"] == list(CLASSES)
    assert recipe["network"] == "resnet18"
    assert recipe["window_px"] == WINDOW_PX
    assert recipe["data_spacing_um_px"] == 1.0
    assert recipe["network_options"] == {"width": 4}


def test_polar_plots_show_the_class_of_each_window(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: dict[str, Figure] = {}
    save = study_figures.save_figure

    def keep(figure: Figure, path: Path) -> Path:
        drawn[path.name] = figure
        return save(figure, path)

    monkeypatch.setattr(study_figures, "save_figure", keep)
    page = report(finished, tmp_path / "report").read_text()
    assert "texture: predictions for rotated windows" in page
    windows = [axes for axes in drawn["texture-polar.png"].axes if axes.images]
    polar = [axes for axes in drawn["texture-polar.png"].axes if axes.name == "polar"]
    assert len(windows) == len(polar) == study_figures.WINDOWS_SHOWN
    tested = {name: [draw_texture(name, 2, kind, i) for i in range(3)] for kind, name in enumerate(CLASSES)}
    for axes in windows:
        shown = np.asarray(axes.images[0].get_array())
        assert shown.shape == (WINDOW_PX, WINDOW_PX, 3)
        centers = [patch[4:-4, 4:-4] for patch in tested[axes.get_title()]]
        assert any((shown == center).all() for center in centers), f"not a window of {axes.get_title()}"
    assert all(len(axes.lines) == len(ORIENTATIONS) for axes in polar)


def test_the_cost_of_a_converted_network_is_shown(page: str, finished: Path) -> None:
    row = r"<td>classify</td><td>resnet18, N=(\d+)</td>" + 3 * "<td>([^<]*)</td>"
    rows = {n: cells for n, *cells in re.findall(row, page)}
    assert list(rows) == ["1", "4"]
    assert "GFLOP per window" in page
    for result in read_results(finished):
        network = unwrap(rp.load(result.folder).network)
        weights, operations, _ = rows[str(result.recipe.orientations)]
        assert weights == f"{sum(weight.numel() for weight in network.parameters()):,}"
        assert float(operations) == pytest.approx(plan.count_operations(result.recipe) / 1e9, rel=0.06)
    assert 0.8 < int(rows["4"][0].replace(",", "")) / int(rows["1"][0].replace(",", "")) < 1.2, "at equal weights"


def test_operations_are_those_of_all_convolutions(finished: Path) -> None:
    """Those on pixels, and those that rotate filters, which do not depend on the size of windows."""
    for result in read_results(finished):
        on_pixels = count_operations(unwrap(rp.load(result.folder).network))
        counted = plan.count_operations(result.recipe)
        on_four = plan.count_operations(replace(result.recipe, window_px=2 * WINDOW_PX))
        assert on_four - counted == pytest.approx(3 * on_pixels, rel=0.01)
        if result.recipe.orientations == 1:
            assert counted == on_pixels
        else:
            assert counted > on_pixels


def count_operations(network: nn.Module) -> int:
    """Count multiplications and additions of all convolutions and linear layers, for one window, by running it."""
    counted: list[int] = []

    def count(layer: nn.Module, _inputs: object, output: torch.Tensor) -> None:
        weight = layer.get_parameter("weight")
        counted.append(2 * output.numel() * weight[0].numel())

    is_equivariant = any(type(layer).__name__ == "GroupConv2d" for layer in network.modules())
    plain = rp.freeze(network) if is_equivariant else network
    layers = [layer for layer in plain.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    with torch.no_grad():
        plain(torch.zeros(1, 3, WINDOW_PX, WINDOW_PX))
    for hook in hooks:
        hook.remove()
    return sum(counted)


def test_scores_in_the_terminal_have_a_row_for_each_class(finished: Path, tmp_path: Path) -> None:
    words = ["evaluate", str(finished / "texture/N4-seed0"), "--out", str(tmp_path / "scores.json")]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "120"})
    assert done.exit_code == 0, done.stderr
    for name in CLASSES:
        assert re.search(rf"{name}: images +{COUNTS['test']}\n", done.stdout.replace(" \n", "\n"))
        assert f"{name}: recall" in done.stdout
    output = " ".join(done.stdout.split())
    assert "by bootstrap over patches. The slides are unknown. Intervals over slides are usually wider." in output
