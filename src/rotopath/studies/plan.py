"""A study: runs that differ in orientations, training data and seed, described in one TOML file.

In: the file, and single keys to change. Out: its parts, one a task or data set, and the jobs they expand to; or one
sentence about the key that is wrong.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rotopath.recipe import Recipe, RecipeError, make_recipe, read_values

KEYS = ("recipe", "orientations", "regime", "seed", "tta", "set")
PLAIN = 1  # the number of orientations of an ordinary network, which is also tested on turned inputs


@dataclass(frozen=True)
class Job:
    """One run: trained by its recipe, then evaluated; `rotations` of test-time augmentation beside it, if over 1."""

    part: str
    recipe: Recipe
    rotations: int

    @property
    def name(self) -> str:
        """Of its files, below the folder of the study."""
        regime = "" if self.recipe.regime is None else f"-regime{self.recipe.regime!r}".removesuffix(".0")
        return f"{self.part}/N{self.recipe.orientations}{regime}-seed{self.recipe.seed}"


@dataclass(frozen=True)
class Part:
    """Runs of one task on one data set: all combinations of what differs."""

    name: str
    recipe: Recipe
    orientations: tuple[int, ...]
    regimes: tuple[float | None, ...]  # none is all of the training data
    seeds: tuple[int, ...]
    rotations: int

    def job(self, orientations: int, regime: float | None, seed: int) -> Job:
        recipe = replace(self.recipe, orientations=orientations, regime=regime, seed=seed)
        return Job(self.name, recipe, self.rotations if orientations == PLAIN else 1)


@dataclass(frozen=True)
class Study:
    parts: tuple[Part, ...]

    @property
    def jobs(self) -> list[Job]:
        """All of them: a whole study with the first seed, then with the next; in each the largest networks first."""
        seeds = dict.fromkeys(seed for part in self.parts for seed in part.seeds)
        return [
            part.job(orientations, regime, seed)
            for seed in seeds
            for part in self.parts
            if seed in part.seeds
            for orientations in sorted(part.orientations, reverse=True)
            for regime in part.regimes
        ]


def read_study(path: Path, changes: Sequence[str] = ()) -> Study:
    """The study of a TOML file, with changes such as `tumor.seed=[0]` or `tumor.set.steps=100` applied to it."""
    values = read_values(path, changes)
    if not values:
        raise RecipeError(f"{path} has no parts; a part is a table such as [tumor], with the key 'recipe'.")
    try:
        return Study(tuple(_part(name, table, path.parent) for name, table in values.items()))
    except RecipeError as error:
        raise RecipeError(f"{path}: {error}") from None


def _part(name: str, table: Any, folder: Path) -> Part:
    if not isinstance(table, dict):
        raise RecipeError(f"{name!r} is no table; parts are tables such as [tumor], with the key 'recipe'.")
    if not name.replace("-", "").replace("_", "").isalnum():
        raise RecipeError(f"the part {name!r} names a folder; use letters, digits, - and _.")
    if unknown := [key for key in table if key not in KEYS]:
        raise RecipeError(f"the part {name!r} has no key {unknown[0]!r}; keys are {', '.join(KEYS)}.")
    if not isinstance(table.get("recipe"), str):
        raise RecipeError(f"the part {name!r} has to name a file with its key 'recipe'.")
    if not isinstance(table.get("set", {}), dict):
        raise RecipeError(
            f"the key '{name}.set' is {table['set']!r}, where a table of changes to the recipe is expected."
        )
    values = _merged(read_values(folder / table["recipe"]), table.get("set", {}))
    if crossed := [key for key in ("orientations", "regime", "seed") if key in table.get("set", {})]:
        raise RecipeError(f"the key {crossed[0]!r} is one that runs differ in; list it in the part {name!r} itself.")
    recipe = make_recipe({key: value for key, value in values.items() if key != "regime"})
    if recipe.devices * recipe.nodes > 1:
        raise RecipeError(f"the part {name!r} asks for several devices a run; a study gives each run one of them.")
    rotations = table.get("tta", 1)
    if type(rotations) is not int or rotations < 1:
        raise RecipeError(f"the key '{name}.tta' is {rotations!r}, where a whole number of rotations is expected.")
    part = Part(
        name,
        recipe,
        orientations=tuple(_listed(name, table, "orientations", int) or [1, 4, 8, 16]),
        regimes=tuple(float(amount) for amount in _listed(name, table, "regime", int | float)) or (None,),
        seeds=tuple(_listed(name, table, "seed", int) or [0, 1, 2]),
        rotations=rotations,
    )
    try:
        for orientations in part.orientations:
            for seed in part.seeds:
                for regime in part.regimes:
                    part.job(orientations, regime, seed)  # a recipe checks its own keys
    except ValueError as error:
        raise RecipeError(str(error)) from None
    return part


def _listed(part: str, table: Mapping[str, Any], key: str, kind: Any) -> list[Any]:
    values = table.get(key, [])
    right = isinstance(values, list) and all(isinstance(one, kind) and not isinstance(one, bool) for one in values)
    if not right or len(set(values)) < len(values) or (key in table and not values):
        raise RecipeError(f"the key '{part}.{key}' is {values!r}, where a list of different numbers is expected.")
    return list(values)


def _merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Values with those of the changes in their place; tables are merged key by key."""
    merged = dict(values)
    for key, change in changes.items():
        both = isinstance(change, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], change) if both else change
    return merged
