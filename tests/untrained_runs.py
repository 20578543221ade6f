"""Run folders of models that were never trained, complete enough to load, evaluate and export them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rotopath as rp
from rotopath import runs
from rotopath.model_file import WEIGHTS, RunError, pack_weights, write_model
from rotopath.models.protocols import unwrap
from rotopath.recipe import format_recipe, make_recipe
from rotopath.writing import write_bytes, write_json, write_text

THRESHOLD = {"threshold": 0.375}
POINTS = {  # operating points by kind, for a single class
    "classify": THRESHOLD,
    "detect": THRESHOLD,
    "segment": {"inside": 0.5, "background": 0.25, "least_px": 30},
}
RESNET = {"network": "resnet18", "network_options": {"width": 4}, "window_px": 32}
UNET = {"network": "unet", "network_options": {"width": 4, "depth": 2}, "window_px": 32}
MISSING = object()
Table = dict[str, Any]


def make_run(
    folder: Path, task: str = "tumor", data: object = "nowhere", random_statistics: bool = False, **keys: object
) -> Path:
    """Write a run folder, and return it. `keys` are those of the recipe.

    With `random_statistics` batch norms and learned projections do not have their neutral initial values.
    """
    folder.mkdir(parents=True)
    recipe = make_recipe({"task": task, "data": str(data), "orientations": 4, "accelerator": "cpu", **keys})
    network, made_task = runs.build(recipe), recipe.make_task()
    if random_statistics:
        _randomize_statistics(unwrap(network))
    several = {"classify": {}, "detect": {f"threshold {name}": 0.375 for name in made_task.class_names}}
    weights, point = pack_weights(network), POINTS[made_task.kind]
    if not made_task.is_single:
        point = several.get(made_task.kind, point)
    write_text(folder / runs.RECIPE, format_recipe(recipe))
    write_json(folder / runs.PROVENANCE, {"seed": 0, "rotopath": rp.__version__})
    write_model(folder, made_task, runs.describe_network(recipe, network), point, weights)
    write_bytes(folder / WEIGHTS, weights)
    return folder


def _randomize_statistics(module: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for layer in module.modules():
        if isinstance(layer, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
            layer.running_mean.normal_(std=0.2, generator=generator)
            layer.running_var.uniform_(0.5, 2, generator=generator)
        if isinstance(layer, rp.nn.Project):
            for parameter in layer.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)


def error_of_loading(folder: Path) -> str:
    """Return the message with which a folder is refused: one sentence."""
    with pytest.raises(RunError) as refused:
        rp.load(folder)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


def with_value(content: Table, keys: str, value: object) -> Table:
    """Return the table with the value at "table.key" replaced or, if it is MISSING, removed."""
    changed = deepcopy(content)
    *tables, key = keys.split(".")
    inside = changed
    for table in tables:
        inside = inside[table]
    if value is MISSING:
        del inside[key]
    else:
        inside[key] = value
    return changed
