"""Training: runs that survive anything, and folders that hold everything."""

import csv
import json
import multiprocessing
import os
import signal
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam

from rotopath import runs
from rotopath.data import DataError
from rotopath.recipe import Mining, Recipe, read_recipe
from rotopath.runs import RunError
from rotopath.training import train
from rotopath.training.fitting import Fitting, Keeper

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
    return (folder / runs.WEIGHTS).read_bytes()


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
        assert not (tmp_path / "killed" / runs.WEIGHTS).exists()
        for path in (tmp_path / "killed").glob("*.json"):
            json.loads(path.read_text())
    train(chosen, tmp_path / "killed")
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole"), steps
    assert log(tmp_path / "killed") == log(tmp_path / "whole"), steps
    for name in (runs.METRICS, runs.POINT, runs.RECIPE):
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
    train(chosen, tmp_path / "run", lambda _, row: rows.append(row))
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {runs.RECIPE, runs.WEIGHTS, runs.POINT, runs.METRICS, runs.LOG, runs.PROVENANCE, "tensorboard"}
    assert read_recipe(folder / runs.RECIPE) == chosen
    assert [int(row["step"]) for row in log(folder)] == list(range(1, 11))
    assert [row["step"] for row in rows if "validation_loss" in row] == [5, 10]
    assert set(json.loads((folder / runs.METRICS).read_text())) == {"valid", "test"}
    about = json.loads((folder / runs.PROVENANCE).read_text())
    assert about["data"]["fingerprint"]
    assert about["packages"]["torch"] == version("torch")
    assert about["begun"] <= about["finished"]
    run = runs.load(folder)
    assert not run.network.training
    size = run.network.architecture.input_px
    assert torch.isfinite(run.network(torch.rand(1, 3, size, size))).all()
    assert run.point == json.loads((folder / runs.POINT).read_text())


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
    from rotopath.tasks import tumor

    chosen, good = recipe(data), tumor.loss
    calls = iter(range(100))
    monkeypatch.setattr(tumor, "loss", lambda *parts: good(*parts) * (float("nan") if next(calls) == 7 else 1))
    with pytest.raises(RunError, match=r"The loss became nan at step \d+; a lower learning_rate may help"):
        train(chosen, tmp_path / "run")
    monkeypatch.setattr(tumor, "loss", good)
    train(chosen, tmp_path / "run")
    train(chosen, tmp_path / "whole")
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")


def test_a_full_disk_leaves_a_run_that_can_be_resumed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen, write = recipe(data), runs.write_text
    writes = iter(range(100))

    def full(path: Path, text: str) -> None:
        if next(writes) == 3:
            raise OSError(28, "No space left on device", str(path))
        write(path, text)

    monkeypatch.setattr(runs, "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        train(chosen, tmp_path / "run")
    monkeypatch.setattr(runs, "write_text", write)
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
    path = tmp_path / "run" / runs.WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunError, match="does not hold the weights of this network"):
        runs.load(tmp_path / "run")


def test_a_folder_that_was_being_made_when_all_went_dark(data: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.PROVENANCE).write_text("{}")
    (tmp_path / "run" / f".{runs.RECIPE}.unfinished").write_text("task =")
    train(recipe(data, epochs=1), tmp_path / "run")
    assert (tmp_path / "run" / runs.WEIGHTS).exists()
