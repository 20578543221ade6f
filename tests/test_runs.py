"""Runs: devices and precisions, recipes of newer versions, and folders of rotopath 0.1."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, pixels
from safetensors.torch import load, save
from untrained_runs import THRESHOLD, error_of_loading, make_run

import rotopath as rp
from rotopath import runs
from rotopath.inference import predict
from rotopath.model_file import MODEL, WEIGHTS, ModelInfo, RunError, read_json
from rotopath.models import FrozenNetwork
from rotopath.recipe import Recipe
from rotopath.runs import Run, _choose_dtype, find_device
from rotopath.tasks import TUMOR
from rotopath.writing import write_json

pytestmark = pytest.mark.slow

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
WEIGHT = "stages.1.conv.weight"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test may change."""
    return make_run(tmp_path_factory.mktemp("runs") / "tumor")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


# Devices and precisions


@pytest.mark.parametrize(
    ("device", "precision", "dtype"),
    [
        (CUDA, None, torch.float16),
        (CUDA, "16", torch.float16),
        (CUDA, "32", torch.float32),
        (torch.device("cuda", 1), None, torch.float16),
        (CPU, None, torch.float32),
        (CPU, "32", torch.float32),
    ],
)
def test_gpus_use_half_precision_by_default(device: torch.device, precision: str | None, dtype: torch.dtype) -> None:
    assert _choose_dtype(device, precision) == dtype


@pytest.mark.parametrize(("device", "precision"), [(CPU, "16"), (CPU, "64"), (CUDA, "bf16"), (CUDA, "")])
def test_unknown_precisions_are_refused(device: torch.device, precision: str) -> None:
    with pytest.raises(RunError, match=r"choose .*32"):
        _choose_dtype(device, precision)


@pytest.mark.parametrize("device", ["meta", "mps", "xpu", "tpu", ""])
def test_unknown_devices_are_refused(device: str) -> None:
    with pytest.raises(RunError, match="choose cpu or cuda"):
        find_device(device)


def test_preparing_a_run_for_inference_leaves_its_network_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, network = Recipe("tumor", "x", orientations=4), rp.models.tumor(4).eval()
    run = Run(tmp_path, ModelInfo(TUMOR, runs.describe_network(recipe, network), THRESHOLD, None), network)
    model = run.prepare("cpu", "32")
    assert isinstance(model.network, FrozenNetwork)
    assert model.precision == "32"
    assert not isinstance(run.network, FrozenNetwork)
    with pytest.raises(ValueError, match="for GPUs"):
        run.prepare("cpu", "16")
    with pytest.raises(ValueError, match="for GPUs"):
        run.predict(np.zeros((100, 100, 3), np.uint8), spacing_um_px=1.0, device="cpu", precision="16")
    with pytest.raises(RunError, match="There is no backend 'tensorflow'; choose torch or onnxruntime"):
        run.prepare("cpu", backend="tensorflow")
    monkeypatch.setattr(runs, "find_device", lambda _: torch.device("meta"))  # in place of a GPU
    with pytest.raises(RunError, match="onnxruntime is for the CPU, but the device is meta; choose the device cpu"):
        run.prepare("cuda", backend="onnxruntime")


# Recipes of newer versions


@pytest.mark.parametrize(
    ("writer", "is_newer"),
    [("99.0", True), ("0.99.1", True), (rp.__version__, False), ("0.1.0", False), (None, False), (99, False)],
)
def test_a_recipe_of_a_newer_version_is_reported_as_newer_and_not_as_damaged(
    run: Path, writer: object, is_newer: bool
) -> None:
    with (run / runs.RECIPE).open("a") as file:
        file.write("\n[quantum]\nbits = 3\n")
    write_json(run / runs.PROVENANCE, {"rotopath": writer})
    with pytest.raises(RunError) as refused:
        rp.load(run).recipe  # noqa: B018
    sentence = str(refused.value)
    assert str(run) in sentence
    assert ("was trained by rotopath " in sentence and "which is newer than this one" in sentence) == is_newer
    assert ("is damaged" in sentence and "the key 'quantum' is unknown" in sentence) == (not is_newer)


def test_a_run_of_a_newer_version_without_a_model_file_is_reported_as_newer(run: Path) -> None:
    convert_to_old(run)
    (run / runs.RECIPE).write_text('task = "tumor"\ndata = "x"\nzebra = 3\n')
    write_json(run / runs.PROVENANCE, {"rotopath": "99.1"})
    assert error_of_loading(run).startswith(f"{run} was trained by rotopath 99.1, which is newer")


# Run folders of rotopath 0.1, which had no model file

OLD_RECIPE = """task = "{task}"
data = {data}
orientations = 4
kernel = "{kernel}"
pooling = "{pooling}"
upsampling = "nearest"
smoothing = false
reflections = {reflections}
seed = 3
epochs = 20
steps = 500
optimiser = "sgd"
learning_rate = 0.01
momentum = 0.9
weight_decay = 0.0005
schedule = "halve"
keep = "best"
patience = 3
validation_steps = 32
checkpoint_steps = 200
precision = "32"
accelerator = "cpu"
devices = 1
nodes = 1
cache = "auto"
workers = 0

[augmentation]
transpose = true
quarter_turns = true
free_rotation = false
brightness = 0.1
stain = 0.0
"""
OLD_TASKS = {
    "mitosis": {"kernel": "gaussian", "pooling": "max", "reflections": False},
    "nuclei": {"kernel": "bilinear", "pooling": "max-blur", "reflections": False},
    "tumor": {"kernel": "harmonic", "pooling": "rms-blur", "reflections": True},
}


def convert_to_old(folder: Path) -> Path:
    """Replace the model file of a folder by a file with the operating point, and return the folder."""
    write_json(folder / runs.OLD_POINT, read_json(folder / MODEL)["operating_point"])
    (folder / MODEL).unlink()
    return folder


def make_old_run(folder: Path, new: Path, task: str, data: object) -> Path:
    shutil.copytree(new, folder)
    values = {**OLD_TASKS[task], "reflections": json.dumps(OLD_TASKS[task]["reflections"])}
    (folder / runs.RECIPE).write_text(OLD_RECIPE.format(task=task, data=json.dumps(str(data)), **values))
    return convert_to_old(folder)


def make_data(task: str, root: Path) -> Path:
    if task == "mitosis":
        return amida13(root, cases=[1, 3, 13], size=(80, 90))
    if task == "nuclei":
        return kumar(root, ["n0", "n1", "n2"], size=70)
    return pcam(root, (4, 4, 6))


@pytest.mark.parametrize("task", OLD_TASKS)
@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
def test_a_run_of_rotopath_0_1_predicts_evaluates_and_exports_like_a_new_one(tmp_path: Path, task: str) -> None:
    data = make_data(task, tmp_path / "data")
    new = make_run(tmp_path / "new", task, data, seed=3, network_options=OLD_TASKS[task])
    old = make_old_run(tmp_path / "old", new, task, data)
    assert {path.name for path in old.iterdir()} == {runs.RECIPE, WEIGHTS, runs.OLD_POINT, runs.PROVENANCE}
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    new_run, old_run = rp.load(new), rp.load(old)
    assert old_run.info == replace(new_run.info, weights_sha256=None)
    assert old_run.recipe == new_run.recipe
    image = pixels(120, 130, 5)
    maps = [predict(run.network, image, CPU).probabilities for run in (new_run, old_run)]
    assert np.array_equal(*maps)
    assert maps[0].std() > 0
    spacing_um_px = new_run.task.spacing_um_px
    results = [run.predict(image, spacing_um_px, everywhere=True, device="cpu") for run in (new_run, old_run)]
    assert np.array_equal(results[0].map, results[1].map)
    assert len(results[0].objects) == len(results[1].objects)
    assert dict(results[0].summary) == dict(results[1].summary)
    scores = [rp.evaluate(folder, out=tmp_path / f"{folder.name}.json").scores for folder in (new, old)]
    assert scores[0] == scores[1]
    exported = [rp.export(folder, "torchscript", tmp_path / f"{folder.name}-model") for folder in (new, old)]
    states = [(folder / "model.safetensors").read_bytes() for folder in exported]
    assert states[0] == states[1]
    configs = [read_json(folder / "config.json") | {"name": ""} for folder in exported]
    assert configs[0] == configs[1]
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before, "nothing is written to it"


def test_a_model_file_has_precedence_over_an_old_operating_point(run: Path) -> None:
    write_json(run / runs.OLD_POINT, {"threshold": 0.9})
    assert rp.load(run).point == THRESHOLD


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (runs.OLD_POINT, '{"threshold": -5}', "is damaged: 'threshold' of the operating point is -5"),
        (runs.OLD_POINT, '{"threshold": true}', "is damaged: 'threshold' of the operating point is True"),
        (runs.OLD_POINT, "{}", "is damaged: the operating point must contain threshold; got nothing"),
        (runs.OLD_POINT, "[0.5]", "is damaged: it must contain a JSON object; got [0.5]. Restore"),
        (
            runs.OLD_POINT,
            '{"threshold": NaN}',
            "is damaged: it is not valid JSON (JSON does not allow the number NaN). Restore",
        ),
        (runs.RECIPE, 'task = "tumor"\n', "the required key 'data' is missing"),
        (runs.RECIPE, 'task = "tumor"\ndata = "d"\nkernel = "cubic"\n', "'kernel' of tumor must be"),
        (runs.RECIPE, "task = ", "is not valid TOML"),
    ],
)
def test_damaged_files_of_old_runs_are_named(run: Path, name: str, content: str, message: str) -> None:
    convert_to_old(run)
    (run / name).write_text(content)
    sentence = error_of_loading(run)
    assert str(run / name) in sentence
    assert message in sentence


def test_weights_of_old_runs_are_checked_too(run: Path) -> None:
    """There is no checksum, but names, shapes, types and numbers are checked."""
    convert_to_old(run)
    tensors = load((run / WEIGHTS).read_bytes())
    tensors[WEIGHT][0, 0, 0, 0] = torch.nan
    (run / WEIGHTS).write_bytes(save(tensors))
    assert "has values that are not finite" in error_of_loading(run)
    (run / WEIGHTS).write_bytes(save(tensors | {WEIGHT: tensors[WEIGHT].double()}))
    assert "must be of type float32; got float64" in error_of_loading(run)
