"""Training of a converted network on classes of one's own: the same care as for the paper's networks."""

import csv
import json
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import write_image

import rotopath as rp
from rotopath import runs
from rotopath.data import DataError, open_data
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.models.protocols import SlidingModule
from rotopath.recipe import Recipe, make_recipe
from rotopath.runs import fingerprint
from rotopath.training import train
from rotopath.training.loop import Keeper

CLASSES = ("fat", "stroma", "tumor")
COLORS = {"fat": (240, 235, 240), "stroma": (230, 160, 200), "tumor": (150, 90, 170)}


def draw_patch(name: str, *seed: int) -> np.ndarray:
    """A patch of 40 px in the colour of its class, with stripes on it."""
    generator = np.random.default_rng([CLASSES.index(name), *seed])
    patch = np.full((40, 40, 3), COLORS[name], np.int64)
    patch[:: int(generator.integers(3, 9))] -= 30
    return np.clip(patch + generator.integers(-15, 16, patch.shape), 0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each class, below one for each split."""
    root = tmp_path_factory.mktemp("patches")
    for number, (split, count) in enumerate({"train": 5, "valid": 3, "test": 3}.items()):
        for name in CLASSES:
            for i in range(count):
                write_image(root / split / name / f"{i}.png", draw_patch(name, number, i))
    return root


def recipe(patches: Path, **changes: object) -> Recipe:
    network = {"network": "resnet18", "network_options": {"width": 4}, "window_px": 32, "orientations": 4}
    length = {"epochs": 2, "steps": 3, "batch": 6, "checkpoint_steps": 2, "accelerator": "cpu", "cache": "memory"}
    data = {"task": "classify", "data": str(patches), "data_spacing_um_px": 1.0}
    return make_recipe({**data, **network, **length, "learning_rate": 0.003, **changes})


def train_and_die(chosen: Recipe, folder: Path, step: int) -> None:
    def killed_at(self: Keeper, trainer: object, *rest: object) -> None:
        if trainer.global_step == step:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, trainer, *rest)

    original = Keeper.on_train_batch_end
    Keeper.on_train_batch_end = killed_at  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    train(chosen, folder)


def killed(chosen: Recipe, folder: Path, step: int) -> None:
    """Trained in a process of its own, which is killed right behind a step, as by a power cut."""
    process = multiprocessing.get_context("fork").Process(target=train_and_die, args=(chosen, folder, step))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def log(folder: Path) -> list[dict[str, str]]:
    with (folder / runs.LOG).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["images_per_second"]
    return rows


@pytest.fixture(scope="module")
def whole(patches: Path, tmp_path_factory: pytest.TempPathFactory) -> rp.runs.Run:
    """A run that nothing interrupted."""
    torch.set_num_threads(1)
    return train(recipe(patches), tmp_path_factory.mktemp("whole") / "run")


def test_a_killed_run_of_a_converted_network_ends_in_the_same_weights(
    patches: Path, whole: rp.runs.Run, tmp_path: Path
) -> None:
    chosen = recipe(patches)
    for step in (1, 3, 5):  # before the first checkpoint, at the end of an epoch, behind a checkpoint of the second
        killed(chosen, tmp_path / "run", step)
        assert not (tmp_path / "run" / WEIGHTS).exists()
    resumed = train(chosen, tmp_path / "run")
    assert resumed.info == whole.info
    assert log(resumed.folder) == log(whole.folder)
    for name in (WEIGHTS, MODEL, runs.METRICS, runs.RECIPE):
        assert (resumed.folder / name).read_bytes() == (whole.folder / name).read_bytes()


def test_the_weights_are_not_those_that_it_began_with(patches: Path, whole: rp.runs.Run) -> None:
    """Or else it would be no wonder that interrupted runs end in the same."""
    chosen = recipe(patches, classes=[*CLASSES])
    begun = runs.build(chosen).module.state_dict()
    ended = whole.network.module.state_dict()
    changed = [name for name, weight in begun.items() if not torch.equal(weight, ended[name])]
    assert changed == [*begun], "all of them have learnt, and all statistics are those of the data"


def test_a_run_of_ones_own_classes_holds_everything(patches: Path, whole: rp.runs.Run) -> None:
    assert isinstance(whole.network, SlidingModule)
    assert whole.network.geometry == rp.models.Geometry(3, 32, 16, 16)
    assert whole.task.class_names == CLASSES
    assert whole.point == {}
    assert repr(whole) == f"Run({str(whole.folder)!r}: classify by resnet18, N=4, classes fat, stroma, tumor)"
    assert whole.recipe == replace(recipe(patches), classes=CLASSES), "with the classes that were found"
    names = {path.name for path in whole.folder.iterdir()}
    assert names == {runs.RECIPE, WEIGHTS, MODEL, runs.METRICS, runs.LOG, runs.PROVENANCE, "tensorboard"}
    metrics = json.loads((whole.folder / runs.METRICS).read_text())
    assert metrics["test"]["confusion"]["classes"] == [*CLASSES]
    assert np.sum(metrics["test"]["confusion"]["rows_are_truth"], axis=1).tolist() == [3, 3, 3]
    about = json.loads((whole.folder / runs.PROVENANCE).read_text())
    assert about["data"]["fingerprint"] == fingerprint(open_data(patches, "labels", 1.0))
    evaluated = rp.evaluate(whole)
    assert {name: evaluated.scores[name] for name in metrics["test"]} == metrics["test"]


def test_its_answers_turn_with_the_patch(whole: rp.runs.Run) -> None:
    patch = torch.from_numpy(draw_patch("tumor", 9)[4:36, 4:36].copy()).permute(2, 0, 1)[None]
    with torch.no_grad():
        upright, turned = (whole.network(each.float() / 255) for each in (patch, patch.rot90(1, (2, 3))))
    torch.testing.assert_close(upright, turned, atol=1e-4, rtol=1e-4)
    assert upright.std() > 1e-3


def test_a_class_of_the_test_set_alone_is_refused_before_anything_is_written(patches: Path, tmp_path: Path) -> None:
    """Whether the task has it or not; it could never be learnt."""
    root = shutil.copytree(patches, tmp_path / "data")
    write_image(root / "test/zebra/0.png", draw_patch("fat", 7))
    with pytest.raises(DataError, match=r"test/zebra/0.png has the label 'zebra'; expected is one of 0 \(fat\), 1"):
        train(recipe(root, classes=[*CLASSES]), tmp_path / "run")
    with pytest.raises(DataError, match="The training images have none of class 'zebra'"):
        train(recipe(root), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_another_network_is_another_run(patches: Path, tmp_path: Path) -> None:
    chosen = recipe(patches)
    killed(chosen, tmp_path / "run", 3)
    with pytest.raises(
        RunError, match=r"was begun with network_options = \{'width': 4\}, and now it is \{'width': 6\}"
    ):
        train(recipe(patches, network_options={"width": 6}), tmp_path / "run")
    with pytest.raises(RunError, match="was begun with window_px = 32, and now it is 64"):
        train(recipe(patches, window_px=64), tmp_path / "run")
    with pytest.raises(RunError, match=r"was begun with classes = .*, and now it is .*'tumor', 'stroma'"):
        train(recipe(patches, classes=["fat", "tumor", "stroma"]), tmp_path / "run")
    train(recipe(patches, classes=[*CLASSES]), tmp_path / "run")
