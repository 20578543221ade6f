"""Short trainings: recipes, patches of three classes, and processes that are killed in the middle of a training."""

import csv
import multiprocessing
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from layouts import write_image

from rotopath import runs
from rotopath.model_file import WEIGHTS
from rotopath.recipe import Recipe, make_recipe
from rotopath.training import train
from rotopath.training.checkpoint import RunRecorder

PATCH_COLORS = {"fat": (240, 235, 240), "stroma": (230, 160, 200), "tumor": (150, 90, 170)}
PATCH_CLASSES = tuple(PATCH_COLORS)


def short_recipe(data: dict[str, Path], task: str = "tumor", **changes: object) -> Recipe:
    """Return a recipe of two epochs of five steps, with a checkpoint after every second step."""
    settings = {"orientations": 1, "epochs": 2, "steps": 5, "batch": 4, "validation_steps": 2, "checkpoint_steps": 2}
    recipe = Recipe(task, str(data[task]), accelerator="cpu", cache="memory")  # type: ignore[arg-type]
    return replace(recipe, **(settings | changes))  # type: ignore[arg-type]


def converted_recipe(patches: Path, **changes: object) -> Recipe:
    """Return a recipe for a converted ResNet on patches: two epochs of three steps."""
    network = {"network": "resnet18", "network_options": {"width": 4}, "window_px": 32, "orientations": 4}
    length = {"epochs": 2, "steps": 3, "batch": 6, "checkpoint_steps": 2, "accelerator": "cpu", "cache": "memory"}
    data = {"task": "classify", "data": str(patches), "data_spacing_um_px": 1.0}
    return make_recipe({**data, **network, **length, "learning_rate": 0.003, **changes})


def draw_patch(name: str, *seed: int) -> np.ndarray:
    """Return a patch of 40 px in the color of its class, with stripes."""
    generator = np.random.default_rng([PATCH_CLASSES.index(name), *seed])
    patch = np.full((40, 40, 3), PATCH_COLORS[name], np.int64)
    patch[:: int(generator.integers(3, 9))] -= 30
    return np.clip(patch + generator.integers(-15, 16, patch.shape), 0, 255).astype(np.uint8)


def write_patches(root: Path) -> Path:
    """Write patches of all classes for training, validation and test."""
    for number, (split, count) in enumerate({"train": 5, "valid": 3, "test": 3}.items()):
        for name in PATCH_CLASSES:
            for i in range(count):
                write_image(root / split / name / f"{i}.png", draw_patch(name, number, i))
    return root


def read_weights(folder: Path) -> bytes:
    return (folder / WEIGHTS).read_bytes()


def read_log(folder: Path) -> list[dict[str, str]]:
    """Return the rows of the log, without the column that depends on the speed of the machine."""
    with (folder / runs.LOG).open(newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        del row["images_per_second"]
    return rows


def train_until_killed(recipe: Recipe, folder: Path, step: int) -> None:
    """Train in another process, which is killed right after a step, before anything of this step is recorded."""
    method = "spawn" if torch.cuda.is_initialized() else "fork"  # forked processes cannot use the GPU of their parent
    process = multiprocessing.get_context(method).Process(target=_train_and_kill, args=(recipe, folder, step))
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def _train_and_kill(recipe: Recipe, folder: Path, step: int) -> None:
    def kill_at_step(self: RunRecorder, trainer: object, *rest: object) -> None:
        if trainer.global_step == step:  # type: ignore[attr-defined]
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, trainer, *rest)

    original = RunRecorder.on_train_batch_end
    RunRecorder.on_train_batch_end = kill_at_step  # type: ignore[method-assign, assignment]
    torch.set_num_threads(1)
    train(recipe, folder)
