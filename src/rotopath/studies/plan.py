"""Read the plan of a study: which networks to train, with how much training data and which seeds.

A study consists of parts, for example one part for each task. A part has a recipe and three lists: numbers of
orientations, amounts of training data (*regimes*), and seeds. Each combination of values from these lists is a job: one
training and its evaluations. If the plan has a wrong key or value, a RecipeError names the key.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
from torch.utils.flop_counter import FlopCounterMode

from rotopath import runs
from rotopath.data import DataError, open_data
from rotopath.images.files import UnreadableFileError
from rotopath.inference.dense import MAX_ROTATIONS
from rotopath.models.protocols import unwrap
from rotopath.recipe import (
    LEAST_PASS_STEPS,
    PASS,
    Recipe,
    RecipeError,
    find_recipe,
    make_recipe,
    read_values,
)
from rotopath.tasks import TrainingWindow

KEYS = ("recipe", "orientations", "regime", "seed", "tta", "set")
SPLIT: Literal["test"] = "test"  # the split on which runs are evaluated
# Measured with twelve trainings of tumor networks, N = 8, in batches of 64, on one NVIDIA H200 (docs/study.md): forward
# operations per second, and the time of a step, below which smaller networks hardly get.
H200_OPERATIONS_PER_S, LEAST_STEP_S = 2.1e14, 0.4e-3
PLAIN = 1  # number of orientations of an ordinary CNN; only such CNNs are also evaluated with test-time augmentation


@dataclass(frozen=True)
class Job:
    """One training and its evaluations on the test set."""

    part: str  # name of the part of the study
    recipe: Recipe
    rotations: int  # if above 1, also evaluate with test-time augmentation (mean over this many rotations)

    @property
    def name(self) -> str:
        """Path of the run folder, relative to the folder of the study, such as "tumor/N8-seed0".

        The other files of the job have this path with a suffix, such as "tumor/N8-seed0.toml".
        """
        return f"{self.part}/N{self.recipe.orientations}{name_regime(self.recipe)}-seed{self.recipe.seed}"


def name_regime(recipe: Recipe) -> str:
    """Return the part of file names that states the amount of training data, such as "-regime0.5"; "" for all data."""
    return "" if recipe.regime is None else f"-regime{recipe.regime!r}".removesuffix(".0")


@dataclass(frozen=True)
class Part:
    """A part of a study: one recipe, with all combinations of orientations, regimes and seeds.

    A regime is an amount of training data. Its unit depends on the kind of task: number of cases ("detect"), number of
    fields (annotated images) of each organ ("segment"), or fraction of the patches of each class ("classify").
    """

    name: str
    recipe: Recipe  # settings that all trainings of this part share
    orientations: tuple[int, ...]  # numbers of orientations
    regimes: tuple[float | None, ...]  # None: all training data
    seeds: tuple[int, ...]
    rotations: int  # for test-time augmentation, which is used for ordinary CNNs only; 1: no test-time augmentation

    def job(self, orientations: int, regime: float | None, seed: int) -> Job:
        """Return the job for one combination of number of orientations, regime and seed."""
        recipe = replace(self.recipe, orientations=orientations, regime=regime, seed=seed)
        return Job(self.name, recipe, self.rotations if orientations == PLAIN else 1)


@dataclass(frozen=True)
class Study:
    """The plan of a study: its parts. Each part consists of jobs."""

    parts: tuple[Part, ...]

    @property
    def jobs(self) -> list[Job]:
        """All jobs of all parts: first all jobs with the first seed, then all jobs with the next seed, and so on.

        Jobs with the same seed are ordered by part of the study, as in `parts`. Jobs of the same part are ordered by
        number of orientations (largest first), and then by regime, as in `regimes`.
        """
        seeds = dict.fromkeys(seed for part in self.parts for seed in part.seeds)
        return [
            part.job(orientations, regime, seed)
            for seed in seeds
            for part in self.parts
            if seed in part.seeds
            for orientations in sorted(part.orientations, reverse=True)
            for regime in part.regimes
        ]


def estimate_gpu_hours(study: Study) -> float | None:
    """Return how long the training steps of a study take on an NVIDIA H200, in hours, if several trainings share it.

    The steps of baseline networks that find hard examples are included, one network for each part and amount of
    training data. Validation, the choice of thresholds and evaluations are not included. On small datasets, they take
    longer than the steps; in `studies/samples.toml`, everything together took several times as long.

    None if a network cannot be measured, such as one of the user that fails; its job will report the error. The number
    of steps of a pass is counted in the data; if the data cannot be opened, LEAST_PASS_STEPS is assumed.
    """
    seconds_per_step: dict[Recipe, float] = {}
    seconds = 0.0
    trainings = [job.recipe for job in study.jobs]
    mined = {(job.part, job.recipe.regime): job.recipe.baseline for job in study.jobs if job.recipe.mining is not None}
    for recipe in (*trainings, *mined.values()):
        network = replace(recipe, seed=0, regime=None, steps=1)  # what the time of a step depends on
        try:
            if network not in seconds_per_step:
                operations = recipe.batch_size * count_operations(recipe)
                seconds_per_step[network] = max(LEAST_STEP_S, operations / H200_OPERATIONS_PER_S)
            steps = recipe.epochs * _count_steps(replace(recipe, seed=0, orientations=PLAIN))
        except Exception:  # a user's network may raise anything
            return None
        seconds += steps * seconds_per_step[network]
    return seconds / 3600


@lru_cache(maxsize=256)
def _count_steps(recipe: Recipe) -> int:
    """Return the number of steps per epoch, see `estimate_gpu_hours`."""
    if recipe.steps != PASS:
        return recipe.step_count
    try:
        dataset = open_data(recipe.data, recipe.kind.annotated, recipe.data_spacing_um_px)
        task, samples = recipe.make_task(), dataset.split("train")
        if recipe.regime is not None:
            samples = task.select_training_subset(samples, recipe.regime, 0)
        network = runs.build(recipe, task)
        window_px, geometry = runs.describe_network(recipe, network).window_px, network.geometry
        target_px = geometry.output_size(window_px) * geometry.stride_px
        return recipe.count_steps(task.count_windows(samples, TrainingWindow(window_px, target_px, geometry.stride_px)))
    except (DataError, UnreadableFileError):
        return LEAST_PASS_STEPS


def count_operations(recipe: Recipe) -> int:
    """Return the number of floating-point operations that the network of a recipe needs for one training window."""
    network = runs.build(recipe)
    side = runs.describe_network(recipe, network).window_px
    module = unwrap(network).to("meta").eval()
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        module(torch.empty(1, 3, side, side))
    return int(counter.get_total_flops())


def read_study(path: Path, changes: Sequence[str] = (), parts: Sequence[str] = ()) -> Study:
    """Read a study from a TOML file.

    `changes` are overrides of keys in the file, such as "tumor.seed=[0]" or "tumor.set.steps=100". If `parts` are
    named, all others are left out. Raises RecipeError if the file has no parts, or not these, or if a key or a value is
    wrong.
    """
    values = read_values(path, changes)
    if not values:
        raise RecipeError(f"{path} has no parts; add a table such as [tumor], with the key 'recipe'.")
    if unknown := [name for name in parts if name not in values]:
        raise RecipeError(f"{path} has no part {unknown[0]!r}; choose from {', '.join(values)}.")
    values = {name: table for name, table in values.items() if not parts or name in parts}
    try:
        return Study(tuple(_read_part(name, table, path.parent) for name, table in values.items()))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _read_part(name: str, table: Any, folder: Path) -> Part:
    """Make a part from its name and its TOML table.

    The recipe in the table is a path relative to `folder`, or the name of a recipe of the package.
    """
    if not isinstance(table, dict):
        raise RecipeError(
            f"the top-level key {name!r} must be a table such as [tumor] that contains the key 'recipe'; got {table!r}."
        )
    if not name.replace("-", "").replace("_", "").isalnum():
        raise RecipeError(f"the name of the part {name!r} becomes a folder name; use letters, digits, - and _ only.")
    if unknown := [key for key in table if key not in KEYS]:
        raise RecipeError(f"the part {name!r} has the unknown key {unknown[0]!r}; valid keys are {', '.join(KEYS)}.")
    if not isinstance(table.get("recipe"), str):
        raise RecipeError(
            f"the part {name!r} needs the key 'recipe'; set it to the path of a recipe file, or to the name of one."
        )
    if not isinstance(table.get("set", {}), dict):
        raise RecipeError(f"the key '{name}.set' must be a table with keys of the recipe; got {table['set']!r}.")
    path = find_recipe(Path(table["recipe"]))
    values = _merge(read_values(path if path.is_absolute() else folder / path), table.get("set", {}))
    if misplaced := [key for key in ("orientations", "regime", "seed") if key in table.get("set", {})]:
        raise RecipeError(
            f"the key '{name}.set.{misplaced[0]}' is not allowed; set the key '{name}.{misplaced[0]}' to a list of "
            f"values."
        )
    recipe = make_recipe({key: value for key, value in values.items() if key != "regime"})
    if recipe.devices * recipe.nodes > 1:
        raise RecipeError(
            f"the part {name!r} sets several devices per run, but runs of a study use one device each; remove the keys "
            f"'devices' and 'nodes'."
        )
    rotations = table.get("tta", 1)
    if type(rotations) is not int or not 1 <= rotations <= MAX_ROTATIONS:
        expected = f"a whole number of rotations, from 1 to {MAX_ROTATIONS}"
        raise RecipeError(f"the key '{name}.tta' must be {expected}; got {rotations!r}.")
    part = Part(
        name,
        recipe,
        orientations=tuple(_read_list(name, table, "orientations", int) or [1, 4, 8, 16]),
        regimes=tuple(float(amount) for amount in _read_list(name, table, "regime", int | float)) or (None,),
        seeds=tuple(_read_list(name, table, "seed", int) or [0, 1, 2]),
        rotations=rotations,
    )
    try:
        for orientations in part.orientations:
            for seed in part.seeds:
                for regime in part.regimes:
                    part.job(orientations, regime, seed)  # raises ValueError if a value is wrong
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return part


def _read_list(part: str, table: Mapping[str, Any], key: str, kind: Any) -> list[Any]:
    """Return the list of numbers that is the value of the key `key` in the table of a part; [] if the key is missing.

    `kind` is the required type of the numbers. Raises RecipeError if the value is not a list of one or more different
    numbers of this type. The error message contains `part`, the name of the part.
    """
    values = table.get(key, [])
    is_valid = isinstance(values, list) and all(
        isinstance(value, kind) and not isinstance(value, bool) for value in values
    )
    if not is_valid or len(set(values)) < len(values) or (key in table and not values):
        numbers = "different whole numbers" if kind is int else "different numbers"
        raise RecipeError(
            f"the key '{part}.{key}' must be a list of one or more {numbers}, such as [1, 8]; got {values!r}."
        )
    return list(values)


def _merge(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `values` in which `changes` replace or add values. Nested tables are merged in the same way."""
    merged = dict(values)
    for key, change in changes.items():
        both = isinstance(change, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merge(merged[key], change) if both else change
    return merged
