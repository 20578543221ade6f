"""Training: runs that survive anything, and folders that hold everything."""

import csv
import json
import multiprocessing
import os
import shutil
import signal
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam
from torch import Tensor

import rotopath as rp
from rotopath import runs
from rotopath.data import DataError, open_data
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.recipe import Mining, Recipe, RecipeError, read_recipe, write_recipe
from rotopath.runs import Run, fingerprint
from rotopath.tasks import classify
from rotopath.training import loop, train
from rotopath.training.loop import Fitting, Keeper
from rotopath.writing import write_json, write_text

pytestmark = pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("training")
    return {
        "mitosis": amida13(root / "mitosis", cases=[1, 2, 3, 13], size=(100, 110)),
        "nuclei": kumar(root / "nuclei", [f"n{i}" for i in range(6)], size=70),
        "tumor": pcam(root / "tumor", (16, 8, 8)),
    }


def recipe(data: dict[str, Path], task: str = "tumor", **changes: object) -> Recipe:
    settings = {"orientations": 1, "epochs": 2, "steps": 5, "batch": 4, "validation_steps": 2, "checkpoint_steps": 2}
    chosen = Recipe(task, str(data[task]), accelerator="cpu", cache="memory")  # type: ignore[arg-type]
    return replace(chosen, **(settings | changes))  # type: ignore[arg-type]


def weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def log(folder: Path) -> list[dict[str, str]]:
    with (folder / runs.LOG).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["images_per_second"]
    return rows


def train_and_die(chosen: Recipe, folder: Path, step: int) -> None:
    """In a process of its own, which is killed right behind a step, as by a power cut."""

    def killed_at(self: Keeper, trainer: object, *rest: object) -> None:
        if trainer.global_step == step:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, trainer, *rest)

    original = Keeper.on_train_batch_end
    Keeper.on_train_batch_end = killed_at  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    train(chosen, folder)


def killed(chosen: Recipe, folder: Path, step: int) -> None:
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(chosen, folder, step))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def test_a_killed_run_ends_in_the_same_weights(data: dict[str, Path], tmp_path: Path) -> None:
    chosen = recipe(data, epochs=3)
    train(chosen, tmp_path / "whole")
    generator = np.random.default_rng(os.getpid())
    steps = sorted(generator.choice(np.arange(1, 16), 3, replace=False).tolist())
    for step in steps:
        killed(chosen, tmp_path / "killed", step)
        assert not (tmp_path / "killed" / WEIGHTS).exists()
        for path in (tmp_path / "killed").glob("*.json"):
            json.loads(path.read_text())
    train(chosen, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole"), steps
    assert log(tmp_path / "killed") == log(tmp_path / "whole"), steps
    for name in (runs.METRICS, MODEL, runs.RECIPE):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "whole" / name).read_text()


def test_a_run_killed_while_it_mines_ends_in_the_same_weights(data: dict[str, Path], tmp_path: Path) -> None:
    chosen = recipe(data, epochs=1, mining=Mining(epochs=1, examples=4))
    train(chosen, tmp_path / "whole")
    killed(chosen, tmp_path / "killed", 3)
    train(chosen, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")
    assert (tmp_path / "killed/mined.csv").read_text() == (tmp_path / "whole/mined.csv").read_text()


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_a_run_folder_holds_everything(data: dict[str, Path], tmp_path: Path, task: str) -> None:
    chosen = recipe(data, task)
    rows = []
    trained = train(chosen, tmp_path / "run", on_progress=lambda _, row: rows.append(row))
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {runs.RECIPE, WEIGHTS, MODEL, runs.METRICS, runs.LOG, runs.PROVENANCE, "tensorboard"}
    assert read_recipe(folder / runs.RECIPE) == chosen
    assert [int(row["step"]) for row in log(folder)] == list(range(1, 11))
    assert [row["step"] for row in rows if "validation_loss" in row] == [5, 10]
    assert set(json.loads((folder / runs.METRICS).read_text())) == {"valid", "test"}
    about = json.loads((folder / runs.PROVENANCE).read_text())
    assert about["data"]["fingerprint"] == fingerprint(open_data(data[task]))
    assert about["packages"]["torch"] == version("torch")
    assert about["begun"] <= about["finished"]
    run = runs.load(folder)
    assert run == trained
    assert not run.network.training
    assert not trained.network.training
    size = run.network.architecture.input_px
    assert torch.isfinite(run.network(torch.rand(1, 3, size, size))).all()
    assert run.point == json.loads((folder / MODEL).read_text())["operating_point"]
    scores = json.loads((folder / runs.METRICS).read_text())["valid"]
    assert {name: scores.get("point", scores)[name] for name in run.point} == run.point


def test_the_best_weights_are_kept_and_training_stops_when_converged(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Validation losses as if the third epoch were the best, and two more no better."""
    pretended = [3.0, 4.0, 1.0, 2.0, 1.0, 0.5]

    def log_pretended(self: Fitting) -> None:
        self._validation.clear()
        self.log("validation_loss", torch.tensor(pretended[self.current_epoch]))
        self.log("validation_accuracy", torch.tensor(0.5))

    monkeypatch.setattr(Fitting, "on_validation_epoch_end", log_pretended)
    chosen = recipe(data, epochs=6, patience=2)
    train(chosen, tmp_path / "run")
    losses = [float(row["validation_loss"]) for row in log(tmp_path / "run") if row["validation_loss"]]
    assert losses == pretended[:5]
    train(replace(chosen, epochs=3), tmp_path / "short")
    assert weights(tmp_path / "run") == weights(tmp_path / "short")
    train(replace(chosen, keep="last", epochs=5), tmp_path / "last")
    pretended[4] = 0.1  # then it is the best as well
    train(replace(chosen, epochs=5), tmp_path / "best")
    assert weights(tmp_path / "last") == weights(tmp_path / "best") != weights(tmp_path / "run")
    pretended[4] = 1.0
    train(replace(chosen, schedule="cosine"), tmp_path / "cosine")
    losses = [float(row["validation_loss"]) for row in log(tmp_path / "cosine") if row["validation_loss"]]
    assert losses == pretended, "a cosine is followed to its end"


def test_the_seed_decides(data: dict[str, Path], tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(recipe(data, epochs=1, seed=seed), tmp_path / name)
    assert weights(tmp_path / "a") == weights(tmp_path / "b") != weights(tmp_path / "c")


def test_a_regime_trains_on_less(data: dict[str, Path], tmp_path: Path) -> None:
    train(recipe(data, epochs=1, regime=0.25), tmp_path / "less")
    train(recipe(data, epochs=1), tmp_path / "all")
    assert weights(tmp_path / "less") != weights(tmp_path / "all")


def test_a_loss_that_is_no_number_ends_in_a_sentence_and_can_be_resumed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, good = recipe(data), classify.binary_cross_entropy
    calls = iter(range(100))

    def spoil(*parts: Tensor) -> Tensor:
        return good(*parts) * (float("nan") if next(calls) == 7 else 1)

    monkeypatch.setattr(classify, "binary_cross_entropy", spoil)
    with pytest.raises(RunError, match=r"The loss became nan at step \d+; a lower learning_rate may help"):
        train(chosen, tmp_path / "run")
    monkeypatch.setattr(classify, "binary_cross_entropy", good)
    train(chosen, tmp_path / "run")
    train(chosen, tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_full_disk_leaves_a_run_that_can_be_resumed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, write = recipe(data), write_text
    writes = iter(range(100))

    def full(path: Path, text: str) -> None:
        if next(writes) == 1:
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(loop, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        train(chosen, tmp_path / "run")
    monkeypatch.setattr(loop, "write_text", write)
    assert not list((tmp_path / "run").glob(".*"))
    train(chosen, tmp_path / "run")
    train(chosen, tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_folders_that_cannot_be_used_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    chosen = recipe(data, epochs=1)
    killed(chosen, tmp_path / "run", 3)
    with pytest.raises(RunError, match="was begun with orientations = 1, and now it is 4; choose another folder"):
        train(replace(chosen, orientations=4), tmp_path / "run")
    with pytest.raises(RunError, match=r"was begun with mining = None, and now it is Mining"):
        train(replace(chosen, mining=Mining()), tmp_path / "run")
    with pytest.raises(RunError, match="is not finished; run the same command again"):
        runs.load(tmp_path / "run")
    train(chosen, tmp_path / "run")
    with pytest.raises(RunError, match="holds a finished run"):
        train(chosen, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(RunError, match="exists and is no run of rotopath"):
        train(chosen, tmp_path / "mine")
    with pytest.raises(RunError, match="neither a run folder nor one of the pretrained models"):
        runs.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="holds no run"):
        runs.load(tmp_path / "mine")


def test_data_that_changed_or_vanished_is_noticed(data: dict[str, Path], tmp_path: Path) -> None:
    root = amida13(tmp_path / "data", cases=[1, 3, 13], size=(100, 110))
    chosen = replace(recipe(data, "mitosis"), data=str(root))
    killed(chosen, tmp_path / "run", 3)
    truth = root / "mitoses_ground_truth/01/01.csv"
    before = truth.read_bytes()
    truth.write_text("10,20\n")
    with pytest.raises(RunError, match="has changed since"):
        train(chosen, tmp_path / "run")
    truth.write_bytes(before)
    root.rename(tmp_path / "away")
    with pytest.raises(DataError, match="does not exist"):
        train(chosen, tmp_path / "run")
    (tmp_path / "away").rename(root)
    train(chosen, tmp_path / "run")


def test_data_with_problems_is_not_trained_on(data: dict[str, Path], tmp_path: Path) -> None:
    root = amida13(tmp_path / "data", cases=[1, 3, 13])
    (root / "mitoses_ground_truth/01/77.csv").write_text("1,1\n")
    with pytest.raises(DataError, match=r"has problems: mitoses_ground_truth/01/77.csv: there is no image"):
        train(replace(recipe(data, "mitosis"), data=str(root)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_damaged_weights_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    train(recipe(data, epochs=1), tmp_path / "run")
    path = tmp_path / "run" / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunError, match="is not the file that its model file describes: it was damaged or replaced"):
        runs.load(tmp_path / "run")


def test_a_folder_that_was_being_made_when_all_went_dark(data: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.PROVENANCE).write_text("{}")
    (tmp_path / "run" / f".{runs.RECIPE}.unfinished").write_text("task =")
    train(recipe(data, epochs=1), tmp_path / "run")
    assert (tmp_path / "run" / WEIGHTS).exists()


# How it is called, and what is refused.


def keys_of(chosen: Recipe) -> dict[str, object]:
    """The recipe as a table that a user writes."""
    return tomllib.loads(write_recipe(chosen))


def test_train_takes_a_recipe_its_keys_or_a_file(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    chosen = recipe(data, epochs=1, steps=2)
    Path("mine.toml").write_text(write_recipe(replace(chosen, seed=5)))
    made = [
        rp.train(chosen),
        rp.train(keys_of(chosen), "by-keys"),
        rp.train("mine.toml", changes=["seed=0"]),
        rp.train(tmp_path / "mine.toml", tmp_path / "by-path", ["seed=0"]),
    ]
    assert [run.folder for run in made] == [
        Path("runs/tumor-N1-seed0"),
        Path("by-keys"),
        Path("runs/mine-N1-seed0"),
        tmp_path / "by-path",
    ]
    for run in made:
        assert isinstance(run, Run)
        assert run == runs.load(run.folder)
        assert run.recipe == chosen
        assert weights(run.folder) == weights(made[0].folder)
        assert not run.network.training
    for given in (chosen, keys_of(chosen)):
        with pytest.raises(RecipeError, match="Changes are for recipes in files"):
            rp.train(given, "again", ["seed=0"])
    assert rp.train("mine.toml").recipe.seed == 5
    assert {path.name for path in Path("runs").iterdir()} == {"tumor-N1-seed0", "mine-N1-seed0", "mine-N1-seed5"}


OWN_NETWORKS = """
from torch import nn


def pooled(*layers):
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), *layers)


def one_too_many(outputs):
    return pooled(nn.Linear(4, outputs + 1))


def fails(outputs):
    raise RuntimeError("no luck\\ntoday")


def number(outputs):
    return 3


def good(outputs):
    return pooled(nn.Linear(4, outputs))


good.window_px = 40
"""
RESNET = {"network": "resnet18", "network_options": {"width": 2}}
UNET = {"network": "unet", "network_options": {"width": 2, "depth": 2}}
CLASSIFY = {"task": "classify"}


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        ("tumor", RESNET | {"network_options": {"widht": 4}}, "has no option 'widht'; did you mean 'width'?"),
        ("tumor", RESNET | {"network_options": {"width": -4}}, "The network 'resnet18' cannot be used: "),
        ("tumor", {"kernel": "cubic"}, "tumor knows kernel 'bilinear' or 'gaussian' or 'harmonic'; got 'cubic'."),
        ("tumor", {"window_px": 90}, "'window_px' is 90, which is off the network's grid; use 88 or 100."),
        ("tumor", {"window_px": 20}, "'window_px' is 20, which is off the network's grid; use 88."),
        ("tumor", {"window_px": 100}, "in windows of 100 px the network gives 2 × 2; set 'window_px' to the smallest"),
        ("nuclei", {"window_px": 61}, "'window_px' is 61, which is off the network's grid; use 60 or 64."),
        ("nuclei", UNET | {"window_px": 33}, "does not take windows of 33 × 33 px: "),
        ("nuclei", UNET | {"window_px": 33, "orientations": 4}, "use 32 or 34 px."),
        ("nuclei", RESNET, "but the network answers every 48 px; use one such as 'nuclei' or 'unet'."),
        ("tumor", UNET, "in windows of 128 px the network gives 128 × 128; set 'window_px' to the smallest"),
        ("tumor", {"network": "own_networks:one_too_many", "window_px": 40}, "gives 2 logits, where the task needs 1"),
        ("tumor", {"network": "own_networks:fails"}, "'own_networks:fails' cannot be used: no luck today"),
        ("tumor", {"network": "own_networks:number"}, "has to be a torch.nn.Module; its function gave int."),
        ("tumor", {"network": "own_networks:zebra"}, "The module own_networks has no 'zebra'"),
        ("tumor", {"network": "own_networks:pooled"}, "has no parameter 'outputs'"),
        ("tumor", CLASSIFY | {"classes": ["fat", "stroma"]}, "has the label 'normal'; expected is one of 0 (fat)"),
        ("tumor", CLASSIFY | {"classes": ["normal", "tumor", "zebra"]}, "none of class 'zebra'"),
        ("tumor", {"task": "mitosis"}, "holds images with a class each, where positions of objects are needed"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_anything_is_written(
    data: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    changes: dict[str, object],
    sentence: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    Path("own_networks.py").write_text(OWN_NETWORKS)
    good = keys_of(recipe(data, task, epochs=1, steps=1))
    wrong = {name: value for name, value in good.items() if name != "network_options"} | changes
    with pytest.raises((RecipeError, DataError)) as refused:
        rp.train(wrong, tmp_path / "run")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    assert rp.train(good, tmp_path / "run").task.name == task, "the corrected command works in the same folder"


def test_a_folder_stays_free_while_nothing_was_trained(data: dict[str, Path], tmp_path: Path) -> None:
    """Only while windows are drawn it turns out that there is nothing to find."""
    root = amida13(tmp_path / "data", cases=[1, 3, 13], size=(100, 110))
    truth = root / "mitoses_ground_truth/03/01.csv"
    before = truth.read_text()
    truth.write_text("")
    chosen = replace(recipe(data, "mitosis", epochs=1), data=str(root))
    with pytest.raises(DataError, match="None of the 2 images of a split has a Mitosis"):
        train(chosen, tmp_path / "run")
    truth.write_text(before)
    train(replace(chosen, seed=1), tmp_path / "run")


def test_a_network_of_ones_own_is_trained(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    Path("own_networks.py").write_text(OWN_NETWORKS)
    run = rp.train(keys_of(recipe(data, epochs=1)) | {"network": "own_networks:good", "network_options": {}}, "run")
    assert run.network.geometry.smallest_px == 40
    assert run.info.network.name == "own_networks:good"
    assert repr(run) == "Run('run': tumor by own_networks:good, N=1)"


def test_a_run_that_an_older_version_began_is_not_taken_on(data: dict[str, Path], tmp_path: Path) -> None:
    """Its fingerprint knows files by name and size alone, and cannot say whether they have changed."""
    chosen = recipe(data, epochs=1)
    killed(chosen, tmp_path / "run", 3)
    about = json.loads((tmp_path / "run" / runs.PROVENANCE).read_text())
    for wrong, sentence in (
        ("0123456789abcdef", "was begun by an older rotopath"),
        (None, "is damaged: it has no finger"),
    ):
        write_json(tmp_path / "run" / runs.PROVENANCE, about | {"data": about["data"] | {"fingerprint": wrong}})
        with pytest.raises(RunError, match=sentence):
            train(chosen, tmp_path / "run")
    write_json(tmp_path / "run" / runs.PROVENANCE, about)
    train(chosen, tmp_path / "run")


def test_images_that_changed_in_place_are_noticed(data: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(data["mitosis"], tmp_path / "data")
    chosen = replace(recipe(data, "mitosis"), data=str(root))
    killed(chosen, tmp_path / "run", 3)
    path = root / "mitoses_image_data_part_1/01/01.tif"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="has changed since"):
        train(chosen, tmp_path / "run")
    path.write_bytes(content)
    train(chosen, tmp_path / "run")
