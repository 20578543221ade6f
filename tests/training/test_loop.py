"""Train by a recipe: what a run folder contains, how `train` is called, what is refused, optimizers and schedules."""

import json
import math
import shutil
import sys
import tomllib
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, write_image
from short_runs import (
    PATCH_CLASSES,
    converted_recipe,
    draw_patch,
    read_log,
    read_weights,
    short_recipe,
    train_until_killed,
)
from torch import nn

import rotopath as rp
from rotopath import runs
from rotopath.data import DataError, open_data
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.models.protocols import SlidingModule
from rotopath.recipe import Recipe, RecipeError, format_recipe, read_recipe
from rotopath.runs import Run
from rotopath.training import loop, train
from rotopath.training.checkpoint import compute_fingerprint
from rotopath.training.loop import make_optimizer, make_plan, make_schedule

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")]


# The run folder


@pytest.mark.parametrize(("task", "regime"), [("mitosis", 1), ("nuclei", 1), ("tumor", 0.5)])
def test_reduced_training_data_are_the_same_for_all_seeds(data: dict[str, Path], task: str, regime: float) -> None:
    plans = [make_plan(short_recipe(data, task, seed=seed, regime=regime)) for seed in range(4)]
    assert all(plan.samples == plans[0].samples for plan in plans)
    assert 0 < len(plans[0].samples) < len(make_plan(short_recipe(data, task)).samples)


def test_an_epoch_can_be_a_pass(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("rotopath.recipe.LEAST_PASS_STEPS", 1)
    recipe = short_recipe(data, steps="pass", epochs=1)
    assert make_plan(recipe).recipe.steps == 4, "16 patches in batches of 4"
    assert make_plan(replace(recipe, regime=0.5)).recipe.steps == 2
    mitosis = make_plan(short_recipe(data, "mitosis", steps="pass"))
    points = sum(len(mitosis.task.read_points(sample)[0]) for sample in mitosis.samples)  # type: ignore[attr-defined]
    assert mitosis.recipe.steps == math.ceil(2 * points / 4) > 1, "half of the windows are at points"
    nuclei = make_plan(short_recipe(data, "nuclei", steps="pass"))
    assert nuclei.recipe.steps == math.ceil(len(nuclei.samples) * 70 * 70 // 20**2 / 4) > 1, "targets of 20 × 20 px"
    rows: list[dict[str, float]] = []
    train(recipe, tmp_path / "run", on_progress=lambda stage, row: rows.append(row) if stage == "training" else None)
    assert {row["steps"] for row in rows} == {4}
    assert read_recipe(tmp_path / "run" / runs.RECIPE).steps == 4


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_a_run_folder_is_complete(data: dict[str, Path], tmp_path: Path, task: str) -> None:
    recipe = short_recipe(data, task)
    rows = []
    trained = train(recipe, tmp_path / "run", on_progress=lambda _, row: rows.append(row))
    folder = tmp_path / "run"
    names = {path.name for path in folder.iterdir()}
    assert names == {runs.RECIPE, WEIGHTS, MODEL, runs.METRICS, runs.LOG, runs.PROVENANCE, "tensorboard"}
    assert read_recipe(folder / runs.RECIPE) == recipe
    assert [int(row["step"]) for row in read_log(folder)] == list(range(1, 11))
    assert [row["step"] for row in rows if "validation_loss" in row] == [5, 10]
    assert set(json.loads((folder / runs.METRICS).read_text())) == {"valid", "test"}
    provenance = json.loads((folder / runs.PROVENANCE).read_text())
    assert provenance["data"]["fingerprint"] == compute_fingerprint(open_data(data[task]))
    assert provenance["packages"]["torch"] == version("torch")
    assert provenance["begun"] <= provenance["finished"]
    run = runs.load(folder)
    assert run == trained
    assert not run.network.training
    assert not trained.network.training
    size = run.network.architecture.input_px
    assert torch.isfinite(run.network(torch.rand(1, 3, size, size))).all()
    assert run.point == json.loads((folder / MODEL).read_text())["operating_point"]
    scores = json.loads((folder / runs.METRICS).read_text())["valid"]
    assert {name: scores.get("point", scores)[name] for name in run.point} == run.point


def test_the_run_folder_of_a_converted_network_is_complete(patches: Path, converted_run: Run, tmp_path: Path) -> None:
    run = converted_run
    assert isinstance(run.network, SlidingModule)
    assert run.network.geometry == rp.models.Geometry(3, 32, 16, 16)
    assert run.task.class_names == PATCH_CLASSES
    assert run.point == {}
    assert repr(run) == f"Run({str(run.folder)!r}: classify by resnet18, N=4, classes fat, stroma, tumor)"
    assert run.recipe == replace(converted_recipe(patches), classes=PATCH_CLASSES), "with the classes of the data"
    names = {path.name for path in run.folder.iterdir()}
    assert names == {runs.RECIPE, WEIGHTS, MODEL, runs.METRICS, runs.LOG, runs.PROVENANCE, "tensorboard"}
    metrics = json.loads((run.folder / runs.METRICS).read_text())
    assert metrics["test"]["confusion"]["classes"] == [*PATCH_CLASSES]
    assert np.sum(metrics["test"]["confusion"]["rows_are_truth"], axis=1).tolist() == [3, 3, 3]
    provenance = json.loads((run.folder / runs.PROVENANCE).read_text())
    assert provenance["data"]["fingerprint"] == compute_fingerprint(open_data(patches, "labels", 1.0))
    evaluation = rp.evaluate(run, out=tmp_path / "scores.json")
    assert {name: evaluation.scores[name] for name in metrics["test"]} == metrics["test"]


def test_predictions_of_a_trained_converted_network_are_invariant_to_quarter_rotations(converted_run: Run) -> None:
    patch = torch.from_numpy(draw_patch("tumor", 9)[4:36, 4:36].copy()).permute(2, 0, 1)[None]
    with torch.no_grad():
        upright, rotated = (converted_run.network(x.float() / 255) for x in (patch, patch.rot90(1, (2, 3))))
    torch.testing.assert_close(upright, rotated, atol=1e-4, rtol=1e-4)
    assert upright.std() > 1e-3


def test_the_seed_determines_the_weights(data: dict[str, Path], tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        train(short_recipe(data, epochs=1, seed=seed), tmp_path / name)
    assert read_weights(tmp_path / "a") == read_weights(tmp_path / "b") != read_weights(tmp_path / "c")


def test_a_regime_trains_on_less_data(data: dict[str, Path], tmp_path: Path) -> None:
    train(short_recipe(data, epochs=1, regime=0.25), tmp_path / "less")
    train(short_recipe(data, epochs=1), tmp_path / "all")
    assert read_weights(tmp_path / "less") != read_weights(tmp_path / "all")


def test_damaged_weights_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    train(short_recipe(data, epochs=1), tmp_path / "run")
    path = tmp_path / "run" / WEIGHTS
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RunError, match="was damaged or replaced: its checksum is not the one in"):
        runs.load(tmp_path / "run")


# How `train` is called


def keys_of(recipe: Recipe) -> dict[str, object]:
    """Return the recipe as a table, as users write it."""
    return tomllib.loads(format_recipe(recipe))


def test_train_accepts_a_recipe_its_keys_or_a_file(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = short_recipe(data, epochs=1, steps=2)
    Path("mine.toml").write_text(format_recipe(replace(recipe, seed=5)))
    trained = [
        rp.train(recipe),
        rp.train(keys_of(recipe), "by-keys"),
        rp.train("mine.toml", changes=["seed=0"]),
        rp.train(tmp_path / "mine.toml", tmp_path / "by-path", ["seed=0"]),
    ]
    assert [run.folder for run in trained] == [
        Path("runs/tumor-N1-seed0"),
        Path("by-keys"),
        Path("runs/mine-N1-seed0"),
        tmp_path / "by-path",
    ]
    for run in trained:
        assert isinstance(run, Run)
        assert run == runs.load(run.folder)
        assert run.recipe == recipe
        assert read_weights(run.folder) == read_weights(trained[0].folder)
        assert not run.network.training
    for given in (recipe, keys_of(recipe)):
        with pytest.raises(RecipeError, match="Overrides such as 'seed=0' apply to recipe files only"):
            rp.train(given, "again", ["seed=0"])
    assert rp.train("mine.toml").recipe.seed == 5
    assert {path.name for path in Path("runs").iterdir()} == {"tumor-N1-seed0", "mine-N1-seed0", "mine-N1-seed5"}


# What is refused


def test_data_with_problems_is_refused_before_anything_is_written(data: dict[str, Path], tmp_path: Path) -> None:
    root = amida13(tmp_path / "data", cases=[1, 3, 13])
    (root / "mitoses_ground_truth/01/77.csv").write_text("1,1\n")
    with pytest.raises(DataError, match=r"has problems: mitoses_ground_truth/01/77.csv: there is no image"):
        train(replace(short_recipe(data, "mitosis"), data=str(root)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_class_that_only_the_test_set_has_is_refused_before_anything_is_written(
    patches: Path, tmp_path: Path
) -> None:
    """Whether the recipe names the class or not: without training images it cannot be learned."""
    root = shutil.copytree(patches, tmp_path / "data")
    write_image(root / "test/zebra/0.png", draw_patch("fat", 7))
    with pytest.raises(DataError, match=r"test/zebra/0.png has the label 'zebra'; expected one of 0 \(fat\), 1"):
        train(converted_recipe(root, classes=[*PATCH_CLASSES]), tmp_path / "run")
    with pytest.raises(DataError, match="No training image has an annotation of class 'zebra'"):
        train(converted_recipe(root), tmp_path / "run")
    assert not (tmp_path / "run").exists()


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
        (
            "tumor",
            {"kernel": "cubic"},
            "The option 'kernel' of tumor must be 'bilinear' or 'gaussian' or 'harmonic' or 'square'; got 'cubic'.",
        ),
        ("tumor", {"window_px": 90}, "'window_px' is 90, which the network does not accept; use 88 or 100."),
        ("tumor", {"window_px": 20}, "'window_px' is 20, which the network does not accept; use 88."),
        ("tumor", {"window_px": 100}, "in windows of 100 px the network has 2 × 2 outputs; set 'window_px'"),
        ("nuclei", {"window_px": 61}, "'window_px' is 61, which the network does not accept; use 60 or 64."),
        ("nuclei", UNET | {"window_px": 33}, "does not accept windows of 33 × 33 px: "),
        ("nuclei", UNET | {"window_px": 33, "orientations": 4}, "use 32 or 34 px."),
        (
            "nuclei",
            RESNET,
            "but the network has an output every 48 px; use a network with stride 1, such as 'nuclei' or 'unet'.",
        ),
        ("tumor", UNET, "in windows of 128 px the network has 128 × 128 outputs; set 'window_px'"),
        ("tumor", {"network": "own_networks:one_too_many", "window_px": 40}, "returns 2 logits, but the task needs 1"),
        ("tumor", {"network": "own_networks:fails"}, "'own_networks:fails' cannot be used: no luck today"),
        (
            "tumor",
            {"network": "own_networks:number"},
            "returned an object of type int; it must return a torch.nn.Module.",
        ),
        ("tumor", {"network": "own_networks:zebra"}, "The module own_networks has no 'zebra'"),
        ("tumor", {"network": "own_networks:pooled"}, "has no parameter 'outputs'"),
        ("tumor", CLASSIFY | {"classes": ["fat", "stroma"]}, "has the label 'normal'; expected one of 0 (fat)"),
        (
            "tumor",
            CLASSIFY | {"classes": ["normal", "tumor", "zebra"]},
            "No training image has an annotation of class 'zebra'",
        ),
        ("tumor", {"task": "mitosis"}, "contains a class for each image; expected positions of objects"),
    ],
)
def test_recipes_that_cannot_be_trained_are_refused_before_anything_is_written(
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
    good = keys_of(short_recipe(data, task, epochs=1, steps=1))
    wrong = {name: value for name, value in good.items() if name != "network_options"} | changes
    with pytest.raises((RecipeError, DataError)) as refused:
        rp.train(wrong, tmp_path / "run")
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "run").exists()
    if changes is UNET:  # for one of the mistakes: what is trained is the same for all
        assert rp.train(good, tmp_path / "run").task.name == task, "the corrected command works in the same folder"


def test_a_network_from_a_function_of_the_user_is_trained(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_networks", raising=False)
    Path("own_networks.py").write_text(OWN_NETWORKS)
    run = rp.train(
        keys_of(short_recipe(data, epochs=1)) | {"network": "own_networks:good", "network_options": {}}, "run"
    )
    assert run.network.geometry.smallest_px == 40
    assert run.info.network.name == "own_networks:good"
    assert repr(run) == "Run('run': tumor by own_networks:good, N=1)"


# Classes that are rare


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
@pytest.mark.parametrize(("sampler", "weights"), [("natural", "balanced"), ("balanced", "equal")])
def test_the_sampler_and_the_weights_of_the_loss_can_be_chosen(
    data: dict[str, Path], tmp_path: Path, task: str, sampler: str, weights: str
) -> None:
    recipe = short_recipe(data, task, sampler=sampler, loss_weights=weights, epochs=1, steps=2)
    run = train(recipe, tmp_path / "run")
    assert read_recipe(run.folder / runs.RECIPE) == recipe
    default = train(replace(recipe, sampler=None, loss_weights=None), tmp_path / "default")
    defaults = ("natural", "balanced") if task == "nuclei" else ("balanced", "equal")
    # With a single class of points, both samplers and both weights are the same.
    is_default = task == "mitosis" or (sampler, weights) == defaults
    assert (read_weights(run.folder) == read_weights(default.folder)) == is_default


# Start from the weights of another model


@pytest.fixture(scope="module")
def parent(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return train(short_recipe(data), tmp_path_factory.mktemp("parent") / "run")


def test_frozen_stages_keep_the_weights_and_statistics_of_the_parent(
    data: dict[str, Path], parent: Run, tmp_path: Path
) -> None:
    lines: list[str] = []
    recipe = short_recipe(data, from_=str(parent.folder), frozen_stages=2)
    run = train(recipe, tmp_path / "run", on_message=lines.append)
    before, after = parent.network.state_dict(), run.network.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith(("stages.0.", "stages.1."))}
    assert lines[0] == (
        f"11 of 11 layers start from {parent.folder}, at 0.1 of the learning rate; the first 2 stages are frozen; none "
        f"is fresh."
    )
    provenance = json.loads((run.folder / runs.PROVENANCE).read_text())["from"]
    assert provenance["weights"] == parent.info.weights_sha256
    assert provenance["data"]["source"] == "PCam"
    assert provenance["fresh"] == []
    assert read_recipe(run.folder / runs.RECIPE) == recipe


def test_other_classes_get_a_fresh_head_and_all_else_is_taken(data: dict[str, Path], parent: Run) -> None:
    """Also with as many outputs as the parent: an output for another class is another weight."""
    for task, classes, fresh in (
        ("tumor", ["Other"], ("head.conv",)),
        ("tumor", ["normal", "tumor"], ("head.conv",)),
        ("tumor", ["tumor"], ()),
        ("classify", ["TUMOR"], ()),
    ):
        recipe = replace(short_recipe(data, from_=str(parent.folder)), task=task, classes=tuple(classes))
        made = recipe.make_task()
        network = runs.build(recipe, made)
        found = runs.find_parent(recipe, made, network)
        assert found is not None
        assert found.fresh_layers == fresh, (task, classes)
        own = network.state_dict()
        found.load_into(network)
        for name, weight in network.state_dict().items():
            expected = own if name.rpartition(".")[0] in fresh else parent.network.state_dict()
            assert torch.equal(weight, expected[name])
    recipe = replace(short_recipe(data, from_=str(parent.folder)), task="detect", network="tumor", classes=("tumor",))
    found = runs.find_parent(recipe, recipe.make_task(), runs.build(recipe))
    assert found is not None
    assert found.fresh_layers == ("head.conv",), "another kind of task"


def test_outputs_that_both_tasks_have_are_taken(data: dict[str, Path]) -> None:
    """The parts of objects (inside, border, background) do not depend on the classes of the objects."""
    recipe = short_recipe(data, "nuclei", orientations=8, from_="nuclei-kumar-n8", classes=("a", "b"))
    task, network = recipe.make_task(), runs.build(recipe)
    own = {name: weight.clone() for name, weight in network.state_dict().items()}
    found = runs.find_parent(recipe, task, network)
    assert found is not None
    assert found.fresh_layers == ("head.conv", "head.norm")
    assert found.shared_outputs == ("inside", "border", "background")
    assert (
        "fresh: head.conv, head.norm (except the outputs inside, border, background)."
        in found.describe_lines(recipe)[0]
    )
    for data_of_parent, expected in (
        ({"source": "manifest", "path": "round1"}, "trained on round1."),
        ({"source": "PCam", "path": "pcam"}, "trained on PCam (check the terms of its data)."),
        ({"source": "PCam", "terms": "CC0"}, "trained on PCam (terms of the data: CC0)."),
        ({"title": "ours", "source": "manifest"}, "trained on ours (check the terms of its data)."),
    ):
        line = replace(found, provenance={"data": data_of_parent}).describe_lines(recipe)[1]
        assert line == f"nuclei-kumar-n8 was {expected}"
    found.load_into(network)
    parent = rp.load("nuclei-kumar-n8").network.state_dict()
    for name in ("head.conv.weight", "head.norm.weight", "head.norm.bias", "head.norm.running_mean"):
        weight = network.state_dict()[name]
        assert torch.equal(weight[:3], parent[name])
        assert torch.equal(weight[3:], own[name][3:])
        assert name not in found.taken, "the whole layer learns at the full rate"


def test_a_fine_tuned_run_resumes_to_identical_weights(data: dict[str, Path], parent: Run, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(parent.folder, tmp_path / "parent"))
    recipe = short_recipe(data, from_=str(folder), frozen_stages=1, seed=1)
    torch.set_num_threads(1)  # as in the processes that are killed
    train(recipe, tmp_path / "uninterrupted")
    for step in (1, 5, 8):
        train_until_killed(recipe, tmp_path / "killed", step)
    weights = (folder / WEIGHTS).read_bytes()
    other = short_recipe(data, seed=5, epochs=1)
    shutil.rmtree(folder)
    train(other, folder)
    with pytest.raises(RunError, match="have changed since the training"):
        train(recipe, tmp_path / "killed")
    shutil.rmtree(folder)
    shutil.copytree(parent.folder, folder)
    assert (folder / WEIGHTS).read_bytes() == weights
    train(recipe, tmp_path / "killed")
    assert read_weights(tmp_path / "killed") == read_weights(tmp_path / "uninterrupted")
    assert read_log(tmp_path / "killed") == read_log(tmp_path / "uninterrupted")


@pytest.mark.parametrize(
    ("task", "changes", "sentence"),
    [
        (
            "tumor",
            {"orientations": 4},
            "has orientations = 1, but the recipe has orientations = 4; weights can only be",
        ),
        ("tumor", {"network_options": {"kernel": "harmonic"}}, "set kernel=bilinear, or name another model"),
        ("tumor", {"network_options": {"reflections": True}}, "has reflections = false, but the recipe has"),
        (
            "tumor",
            {"frozen_stages": 6},
            "the network has 6 stages, and the last one must be trained; choose at most 5.",
        ),
        ("nuclei", {}, "No convolution of "),
        ("tumor", {"from": "tumor-pcam"}, "did you mean tumor-pcam-n8?"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_before_anything_is_written(
    data: dict[str, Path], parent: Run, tmp_path: Path, task: str, changes: dict[str, object], sentence: str
) -> None:
    keys = keys_of(short_recipe(data, task)) | {"from": str(parent.folder)} | changes
    with pytest.raises((RecipeError, RunError)) as refused:
        rp.train(keys, tmp_path / "run")
    assert sentence in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_stages_of_a_converted_network_can_be_frozen(patches: Path, converted_run: Run, tmp_path: Path) -> None:
    recipe = converted_recipe(patches, **{"from": str(converted_run.folder), "frozen_stages": 2, "epochs": 1})
    run = train(recipe, tmp_path / "run")
    before, after = converted_run.network.module.state_dict(), run.network.module.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {
        name for name in before if not name.startswith(("conv1.", "bn1.", "layer1.0.conv1.", "layer1.0.bn1."))
    }


def test_weights_of_the_parent_have_a_lower_learning_rate() -> None:
    network = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    network[0].bias.requires_grad_(False)
    optimizer = make_optimizer(network, replace(RECIPE, from_="x", from_rate=0.5), {"0.weight", "0.bias"})
    rates = {id(weight): group["lr"] for group in optimizer.param_groups for weight in group["params"]}
    names = {name: rates.get(id(weight)) for name, weight in network.named_parameters()}
    assert names == {"0.weight": 0.05, "0.bias": None, "1.weight": 0.1, "1.bias": 0.1}


# Optimizers and schedules

RECIPE = Recipe("tumor", "data", learning_rate=0.1, momentum=0.9, weight_decay=0.01, steps=4, epochs=3)


@pytest.mark.parametrize(("scale", "factor"), [("learning-rate", 0.1), ("schedule", 1.0)])
@pytest.mark.parametrize("optimiser", ["sgd", "adamw"])
def test_the_scale_of_weight_decay(scale: str, factor: float, optimiser: str) -> None:
    """Without a gradient, a kernel shrinks by the decay, the scale, and what the schedule has left of the rate."""
    recipe = replace(RECIPE, weight_decay_scale=scale, optimiser=optimiser, steps=1)  # type: ignore[arg-type]
    layer = nn.Linear(1, 1)
    optimizer = make_optimizer(layer, recipe)
    schedule = make_schedule(optimizer, recipe)
    for part in (1.0, 0.5):
        before = layer.weight.item()
        for parameter in layer.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        schedule.step()
        assert layer.weight.item() == pytest.approx(before * (1 - factor * part * 0.01), rel=1e-5)


@pytest.mark.parametrize("multiply", [torch._foreach_mul_, loop._multiply_each], ids=["together", "one by one"])
def test_weight_decay_is_decoupled_from_momentum(monkeypatch: pytest.MonkeyPatch, multiply: object) -> None:
    """Compare with three steps of w ← (1 - lr·decay)·w - lr·v, v ← 0.9·v + g, by hand. Biases do not decay.

    `_foreach_mul_` is private in torch: if it is gone, the first case fails, and training uses the second.
    """
    monkeypatch.setattr(loop, "_multiply_all", multiply)
    layer = nn.Linear(1, 1)
    weight, bias = 2.0, 1.0
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    optimizer = make_optimizer(layer, RECIPE)
    velocity = bias_velocity = 0.0
    for gradient in (0.5, -1.0, 0.25):
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        layer.bias.grad = torch.full_like(layer.bias, gradient)
        optimizer.step()
        velocity, bias_velocity = 0.9 * velocity + gradient, 0.9 * bias_velocity + gradient
        weight = (1 - 0.1 * 0.01) * weight - 0.1 * velocity
        bias -= 0.1 * bias_velocity
    assert layer.weight.item() == pytest.approx(weight, rel=1e-6)
    assert layer.bias.item() == pytest.approx(bias, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("halve", [0.1] * 4 + [0.05] * 4 + [0.025] * 4),
        ("constant", [0.1] * 12),
        ("cosine", [0.05 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]),
    ],
)
def test_learning_rates_follow_the_schedule(schedule: str, expected: list[float]) -> None:
    recipe = replace(RECIPE, schedule=schedule)  # type: ignore[arg-type]
    optimizer = make_optimizer(nn.Linear(1, 1), recipe)
    rates, chosen = [], make_schedule(optimizer, recipe)
    for _ in range(12):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        chosen.step()
    assert rates == pytest.approx(expected)


def test_adamw_is_the_one_of_torch() -> None:
    optimizer = make_optimizer(nn.Linear(2, 2), replace(RECIPE, optimiser="adamw"))
    assert isinstance(optimizer, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
