"""Runs: what a folder says is checked in full, old folders are read, and models are made ready for a device."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, pcam_name, pixels, write_csv, write_hdf5, write_image
from safetensors.torch import load, save
from torch import Tensor, nn

import rotopath as rp
from rotopath import runs
from rotopath.data import open_data
from rotopath.inference import predict
from rotopath.model_file import MODEL, WEIGHTS, ModelInfo, RunError, load_weights, pack_weights, read_json, write_model
from rotopath.models import FrozenNetwork
from rotopath.models.protocols import DenseModule, SlidingModule, unwrap
from rotopath.recipe import Recipe, make_recipe, write_recipe
from rotopath.runs import FINGERPRINT, Run, _choose_dtype, fingerprint
from rotopath.tasks import TUMOR
from rotopath.writing import write_bytes, write_json, write_text

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POINT = {"threshold": 0.375}
POINTS = {
    "classify": POINT,
    "detect": POINT,
    "segment": {"inside": 0.5, "background": 0.25, "least_px": 30},
}
WINDOWS = {"network": "resnet18", "network_options": {"width": 4}, "window_px": 32}
MAPS = {"network": "unet", "network_options": {"width": 4, "depth": 2}, "window_px": 32}


def make_run(folder: Path, task: str = "tumor", data: object = "nowhere", **keys: object) -> Path:
    """A finished run that was never trained."""
    folder.mkdir(parents=True)
    recipe = make_recipe({"task": task, "data": str(data), "orientations": 4, "accelerator": "cpu", **keys})
    network, made = runs.build(recipe), recipe.make_task()
    weights, point = pack_weights(network), POINTS[made.kind] if made.is_single else {}
    write_text(folder / runs.RECIPE, write_recipe(recipe))
    write_json(folder / runs.PROVENANCE, {"seed": 0, "rotopath": rp.__version__})
    write_model(folder, made, runs.describe_network(recipe, network), point, weights)
    write_bytes(folder / WEIGHTS, weights)
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test may change."""
    return make_run(tmp_path_factory.mktemp("runs") / "tumor")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A run to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


def refuse(folder: Path) -> str:
    """The sentence with which a folder is refused."""
    with pytest.raises(RunError) as refused:
        rp.load(folder)
    sentence = str(refused.value)
    assert "\n" not in sentence
    assert sentence.endswith((".", "?"))
    return sentence


# Devices.


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
def test_gpus_compute_in_half_precision_unless_asked_otherwise(
    device: torch.device, precision: str | None, dtype: torch.dtype
) -> None:
    assert _choose_dtype(device, precision) == dtype


@pytest.mark.parametrize(("device", "precision"), [(CPU, "16"), (CPU, "64"), (CUDA, "bf16"), (CUDA, "")])
def test_precisions_that_are_not_there_are_refused(device: torch.device, precision: str) -> None:
    with pytest.raises(RunError, match=r"choose .*'32'"):
        _choose_dtype(device, precision)


def test_a_run_that_is_made_ready_stays_as_it_is(tmp_path: Path) -> None:
    recipe, network = Recipe("tumor", "x", orientations=4), rp.models.tumor(4).eval()
    run = Run(tmp_path, ModelInfo(TUMOR, runs.describe_network(recipe, network), POINT, None), network)
    model = run.ready("cpu", "32")
    assert isinstance(model.network, FrozenNetwork)
    assert model.precision == "32"
    assert not isinstance(run.network, FrozenNetwork)
    with pytest.raises(ValueError, match="for GPUs"):
        run.ready("cpu", "16")
    with pytest.raises(ValueError, match="for GPUs"):
        run.predict(np.zeros((100, 100, 3), np.uint8), spacing_um_px=1.0, device="cpu", precision="16")


# The model file.


@pytest.mark.parametrize(
    ("task", "keys", "wrapped"),
    [
        ("tumor", {}, None),
        ("mitosis", {"kernel": "harmonic", "reflections": True}, None),
        ("nuclei", {"spacing_um_px": 0.5, "stain": "none", "window_px": 60}, None),
        ("classify", {"classes": ["fat", "stroma"], "colors": ["#010203"], **WINDOWS}, SlidingModule),
        ("segment", {**MAPS, "stain": "macenko"}, DenseModule),
    ],
)
def test_what_a_model_file_says_is_read(
    tmp_path: Path, task: str, keys: dict[str, object], wrapped: type[nn.Module] | None
) -> None:
    folder = make_run(tmp_path / "run", task, **keys)
    recipe = runs.read_run_recipe(folder)
    expected, made = runs.build(recipe), recipe.make_task()
    run = rp.load(folder)
    assert run.task == made
    assert run.point == (POINTS[made.kind] if made.is_single else {})
    assert run.info.network == runs.describe_network(recipe, expected)
    assert run.info.weights_sha256 == hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert run.network.geometry == expected.geometry
    assert type(run.network) is (wrapped or rp.models.Network)
    assert not run.network.training
    images = torch.rand(1, 3, run.info.network.window_px, run.info.network.window_px)
    with torch.no_grad():
        assert torch.equal(run.network(images), expected.eval()(images))


def test_a_model_file_and_weights_are_enough_to_predict(run: Path) -> None:
    """The other files say how the model was made."""
    image = pixels(100, 100, 1)
    before = rp.load(run).predict(image, spacing_um_px=1.0, everywhere=True, device="cpu")
    for name in (runs.RECIPE, runs.PROVENANCE):
        (run / name).unlink()
    after = rp.load(run).predict(image, spacing_um_px=1.0, everywhere=True, device="cpu")
    assert np.array_equal(before.map, after.map)
    assert repr(rp.load(run)) == f"Run({str(run)!r}: tumor by tumor, N=4)"


MISSING = object()
ONE = {"name": "a", "color": [1, 2, 3]}
Table = dict[str, Any]


def change(content: Table, keys: str, value: object) -> Table:
    """The table with the value at "table.key" replaced or missing."""
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


WRONG_KINDS = {
    "table": (None, 3, [], "x"),
    "text": (None, 3, "", []),
    "whole": (None, 0, -1, 1.5, True, "4", 10**7),
    "flag": (None, 0, "false"),
}
KINDS = {
    **dict.fromkeys(("task", "network", "network.options", "network.geometry", "operating_point", "weights"), "table"),
    **{f"task.{name}": "text" for name in ("kind", "name", "stain", "absent", "plural")},
    **dict.fromkeys(("network.name", "weights.sha256"), "text"),
    **dict.fromkeys(("network.orientations", "network.window_px"), "whole"),
    **{f"network.geometry.{name}": "whole" for name in ("outputs", "smallest_px", "step_px", "stride_px")},
    **dict.fromkeys(("task.typed", "network.slides"), "flag"),
}


@pytest.mark.parametrize("key", KINDS)
def test_a_value_of_the_wrong_kind_is_named(run: Path, key: str) -> None:
    content = read_json(run / MODEL)
    for value in (MISSING, *WRONG_KINDS[KINDS[key]]):
        write_json(run / MODEL, change(content, key, value))
        named = f"{key.rpartition('.')[2]!r} is {None if value is MISSING else value!r}, where a"
        named = named.removesuffix(" a") if KINDS[key] == "flag" else named
        assert f"{run / MODEL} is damaged: {named}" in refuse(run)
    write_json(run / MODEL, content)
    rp.load(run)


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("format", MISSING, "its format is None, where a whole number"),
        ("format", "1", "its format is '1'"),
        ("format", 0, "its format is 0"),
        ("format", True, "its format is True"),
        ("format", 1.0, "its format is 1.0"),
        ("task.kind", "zebra", "There is no task 'zebra'; choose from"),
        ("task.kind", "clasify", "There is no task 'clasify'; did you mean 'classify'?"),
        ("task.kind", "no.such:Kind", "'no.such:Kind' cannot be imported"),
        ("task.kind", "pathlib:Path", "'pathlib:Path' is no class of rotopath.tasks.Task"),
        ("task.kind", "rotopath.tasks:Task", "'rotopath.tasks:Task'"),
        ("task.classes", MISSING, "no list of classes"),
        ("task.classes", [], "no list of classes"),
        ("task.classes", {"a": [1, 2, 3]}, "no list of classes"),
        ("task.classes", ["a"], "a class of its task is 'a', where a name and a colour"),
        ("task.classes", [{"name": "a"}], "a class of its task is {'name': 'a'}"),
        ("task.classes", [{"color": [1, 2, 3]}], "'name' is None, where a text"),
        ("task.classes", [ONE | {"color": [1, 2]}], "'color': [1, 2]}, where a name and a colour of three bytes"),
        ("task.classes", [ONE | {"color": [1, 2, 256]}], "'color': [1, 2, 256]}, where"),
        ("task.classes", [ONE | {"color": [-1, 2, 3]}], "'color': [-1, 2, 3]}, where"),
        ("task.classes", [ONE | {"color": [1.0, 2, 3]}], "'color': [1.0, 2, 3]}, where"),
        ("task.classes", [ONE | {"color": [True, 2, 3]}], "'color': [True, 2, 3]}, where"),
        ("task.classes", [ONE | {"color": "#ffffff"}], "'color': '#ffffff'}, where"),
        ("task.classes", [ONE, ONE | {"name": "A"}], "classes of a task have different names; got a, A"),
        ("task.spacing_um_px", MISSING, "'spacing_um_px' is None, where a number from 0.05 to 5"),
        ("task.spacing_um_px", 0, "'spacing_um_px' is 0, where"),
        ("task.spacing_um_px", -1, "'spacing_um_px' is -1, where"),
        ("task.spacing_um_px", "1", "'spacing_um_px' is '1', where"),
        ("task.spacing_um_px", True, "'spacing_um_px' is True, where"),
        ("task.spacing_um_px", 40, "'spacing_um_px' is 40, where"),
        ("task.stain", "reinhard", "its stain is 'reinhard'; expected is one of none, macenko"),
        ("network.geometry.rim", -1, "'rim' is -1, where a whole number from 0"),
        ("network.geometry.rim", True, "'rim' is True, where"),
        ("network.geometry.step_px", 7, "a multiple of its stride; got 7 px and 12 px"),
        ("network.geometry.stride_px", 24, "a multiple of its stride; got 12 px and 24 px"),
        ("network.geometry.smallest_px", 100, "says another geometry than the network 'tumor' has"),
        ("network.geometry.stride_px", 6, "says another geometry than the network 'tumor' has"),
        ("network.geometry.outputs", 2, "says another geometry than the network 'tumor' has"),
        ("network.geometry.rim", 2, "says another geometry than the network 'tumor' has"),
        ("operating_point", {}, "an operating point has threshold; got nothing"),
        ("operating_point", {"limit": 0.5}, "an operating point has threshold; got limit"),
        ("operating_point.limit", 0.5, "an operating point has threshold; got threshold, limit"),
        ("operating_point.threshold", -5, "'threshold' of the operating point is -5; a number from 0 to 1"),
        ("operating_point.threshold", 1.5, "'threshold' of the operating point is 1.5"),
        ("operating_point.threshold", True, "'threshold' of the operating point is True"),
        ("operating_point.threshold", "0.5", "'threshold' of the operating point is '0.5'"),
        ("operating_point.threshold", None, "'threshold' of the operating point is None"),
    ],
)
def test_a_value_that_cannot_be_is_named(run: Path, key: str, value: object, named: str) -> None:
    path = run / MODEL
    write_json(path, change(read_json(path), key, value))
    sentence = refuse(run)
    assert str(path) in sentence
    assert named in sentence


@pytest.mark.parametrize("key", ["task.spacing_um_px", "operating_point.threshold"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_named(run: Path, key: str, value: str) -> None:
    """JSON has no such words, but Python reads and writes them."""
    path = run / MODEL
    path.write_text(json.dumps(change(read_json(path), key, float(value))))
    assert refuse(run) == f"{path} is damaged: it is no JSON ({value} is no number)."


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("network.name", "resnet81", "There is no network 'resnet81'; did you mean 'resnet18'?"),
        ("network.name", "no.such:network", "'no.such:network' cannot be imported"),
        ("network.name", "os:system", "'os:system' has no parameter 'outputs'"),
        ("network.options.zebra", 1, "The network 'tumor' has no option 'zebra'"),
        ("network.options.outputs", 3, "The network 'tumor' has no option 'outputs'"),
        ("network.options.kernel", "cubic", "tumor knows kernel 'bilinear' or 'gaussian' or 'harmonic'; got 'cubic'"),
        ("network.options.kernel", None, "got None"),
        ("network.options.smoothing", "yes", "tumor knows smoothing False or True; got 'yes'"),
        ("network.options.widths_of", 0, "orientations must be a whole number, 1 or more"),
        ("network.orientations", 999_999, "tumor has no channels for 999999 orientations"),
    ],
)
def test_a_network_that_cannot_be_built_is_named(run: Path, key: str, value: object, named: str) -> None:
    write_json(run / MODEL, change(read_json(run / MODEL), key, value))
    sentence = refuse(run)
    assert sentence.startswith(f"The network of {run} cannot be built: ")
    assert named in sentence


@pytest.mark.parametrize(
    ("task", "keys", "key", "value"),
    [
        ("classify", WINDOWS, "network.geometry.outputs", 2),
        ("classify", WINDOWS, "network.geometry.smallest_px", 48),
        ("classify", WINDOWS, "network.geometry.step_px", 32),
        ("classify", WINDOWS, "network.geometry.rim", 1),
        ("classify", WINDOWS, "network.window_px", 48),
        ("classify", WINDOWS, "network.slides", False),
        ("segment", MAPS, "network.geometry.outputs", 2),
        ("segment", MAPS, "network.geometry.smallest_px", 4),
        ("segment", MAPS, "network.geometry.step_px", 4),
        ("segment", MAPS, "network.slides", True),
        ("tumor", {}, "network.window_px", 90),
        ("tumor", {}, "network.slides", True),
    ],
)
def test_a_geometry_that_the_network_does_not_have_is_refused(
    tmp_path: Path, task: str, keys: dict[str, object], key: str, value: object
) -> None:
    """Also of networks that do not know their own; predictions would end in errors, or be somewhere else."""
    path = make_run(tmp_path / "run", task, **keys) / MODEL
    content = read_json(path)
    write_json(path, change(content, key, value))
    assert str(path) in refuse(path.parent)
    write_json(path, content)
    rp.load(path.parent)


@pytest.mark.parametrize("width", [-4, "wide", None])
def test_a_network_that_fails_while_it_is_built_is_named(tmp_path: Path, width: object) -> None:
    path = make_run(tmp_path / "run", "classify", **WINDOWS) / MODEL
    write_json(path, change(read_json(path), "network.options.width", width))
    assert refuse(path.parent).startswith(f"The network of {path.parent} cannot be built: ")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "1", "[" * 100_000, b"\xff\xfe\x00", b'{"format": 1, "format'], ids=repr
)
def test_a_model_file_that_holds_no_table_is_damaged(run: Path, content: str | bytes) -> None:
    (run / MODEL).write_bytes(content.encode() if isinstance(content, str) else content)
    assert refuse(run).startswith(f"{run / MODEL} is damaged: it ")


def test_a_model_file_that_is_missing_is_named(run: Path) -> None:
    (run / MODEL).unlink()
    assert refuse(run) == f"{run / MODEL} does not exist."


def test_thresholds_may_lie_at_their_bounds(run: Path) -> None:
    """The best threshold of a bad classifier lies just above the highest probability that there is."""
    path = run / MODEL
    for value in (0, 1, float(np.nextafter(1, 2))):
        write_json(path, change(read_json(path), "operating_point.threshold", value))
        assert rp.load(run).point == {"threshold": value}


@pytest.mark.parametrize(
    ("task", "point", "named"),
    [
        ("mitosis", {"threshold": 1.001}, "'threshold' of the operating point is 1.001"),
        ("nuclei", {"inside": 0.5, "background": 0.5}, "an operating point has inside, background, least_px; got ins"),
        ("nuclei", {"inside": 0.5, "background": -0.5, "least_px": 3}, "'background' of the operating point is -0.5"),
        ("nuclei", {"inside": 0.5, "background": 0.5, "least_px": -3}, "'least_px' of the operating point is -3"),
        ("nuclei", POINT, "an operating point has inside, background, least_px; got threshold"),
    ],
)
def test_operating_points_are_those_of_the_task(tmp_path: Path, task: str, point: Table, named: str) -> None:
    path = make_run(tmp_path / "run", task, orientations=1) / MODEL
    write_json(path, read_json(path) | {"operating_point": point})
    assert f"{path} is damaged: {named}" in refuse(path.parent)


def test_several_classes_have_no_threshold(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "classify", classes=["a", "b", "c"], orientations=1)
    assert rp.load(folder).point == {}
    write_json(folder / MODEL, read_json(folder / MODEL) | {"operating_point": POINT})
    assert "an operating point has no numbers; got threshold" in refuse(folder)


# Newer versions.


def test_a_model_file_of_a_newer_version_is_called_so(run: Path) -> None:
    """Whatever else is in it is not for this version to judge."""
    newer = {"format": 2, "rotopath": "7.0.1", "task": "otherwise"}
    write_json(run / MODEL, newer)
    assert refuse(run) == (
        f"{run / MODEL} was written by rotopath 7.0.1, which is newer than this one ({rp.__version__}); "
        f"upgrade rotopath to use it."
    )


@pytest.mark.parametrize(
    ("writer", "is_newer"),
    [("99.0", True), ("0.99.1", True), (rp.__version__, False), ("0.1.0", False), (None, False), (99, False)],
)
def test_a_recipe_of_a_newer_version_is_called_so_and_not_damaged(run: Path, writer: object, is_newer: bool) -> None:
    with (run / runs.RECIPE).open("a") as file:
        file.write("\n[quantum]\nbits = 3\n")
    write_json(run / runs.PROVENANCE, {"rotopath": writer})
    with pytest.raises(RunError) as refused:
        rp.load(run).recipe  # noqa: B018
    sentence = str(refused.value)
    assert str(run) in sentence
    assert ("was trained by rotopath " in sentence and "which is newer than this one" in sentence) == is_newer
    assert ("is damaged" in sentence and "there is no key 'quantum'" in sentence) == (not is_newer)


def test_a_run_of_a_newer_version_that_has_no_model_file_is_called_so(run: Path) -> None:
    age(run)
    (run / runs.RECIPE).write_text('task = "tumor"\ndata = "x"\nzebra = 3\n')
    write_json(run / runs.PROVENANCE, {"rotopath": "99.1"})
    assert refuse(run).startswith(f"{run} was trained by rotopath 99.1, which is newer")


# Weights.


def put(run: Path, content: bytes) -> None:
    """Write weights, and a model file that describes them."""
    path = run / MODEL
    (run / WEIGHTS).write_bytes(content)
    write_json(path, change(read_json(path), "weights.sha256", hashlib.sha256(content).hexdigest()))


WEIGHT, COUNT = "stages.1.conv.weight", "stages.0.norm.num_batches_tracked"


def put_changed(run: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load((run / WEIGHTS).read_bytes())
    put(run, save(tensors | {name: change(tensors[name]).contiguous()}))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "complex64", "float64"])
def test_weights_of_another_type_are_refused(run: Path, dtype: str) -> None:
    put_changed(run, WEIGHT, lambda weight: weight.to(getattr(torch, dtype)))
    assert refuse(run) == (
        f"{run / WEIGHTS} does not hold the weights of this network: {WEIGHT!r} is of type {dtype}, and not float32."
    )


@pytest.mark.parametrize(
    ("name", "wrong", "fault"),
    [
        (COUNT, lambda count: count.int(), "is of type int32, and not int64"),
        (COUNT, lambda count: count.reshape(1), "has shape (1,), and not ()"),
        (WEIGHT, lambda weight: weight[:1], "has shape (1, 19, 4, 21), and not (19, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight.transpose(2, 3), "has shape (19, 19, 21, 4), and not (19, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight.flatten(), "has shape (30324,), and not (19, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight[:0], "has shape (0, 19, 4, 21), and not (19, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight.index_fill(0, torch.tensor(3), float("nan")), "that are no finite numbers"),
        (WEIGHT, lambda weight: weight.index_fill(0, torch.tensor(3), float("inf")), "that are no finite numbers"),
        ("head.conv.bias", lambda bias: bias - float("inf"), "that are no finite numbers"),
    ],
)
def test_weights_that_are_not_the_networks_are_refused(
    run: Path, name: str, wrong: Callable[[Tensor], Tensor], fault: str
) -> None:
    put_changed(run, name, wrong)
    sentence = refuse(run)
    assert sentence.startswith(f"{run / WEIGHTS} does not hold the weights of this network: {name!r} ")
    assert fault in sentence


def test_missing_and_additional_weights_are_refused(run: Path) -> None:
    tensors = load((run / WEIGHTS).read_bytes())
    put(run, save(tensors | {"zebra": torch.zeros(3)}))
    assert refuse(run).endswith("does not hold the weights of this network: 'zebra' is not a weight of it.")
    del tensors[WEIGHT]
    put(run, save(tensors))
    assert refuse(run).endswith(f"does not hold the weights of this network: {WEIGHT!r} is missing.")
    put(run, save({}))
    assert refuse(run).endswith("is missing.")


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 5000, -1])
@pytest.mark.parametrize("described", [True, False])
def test_truncated_weights_are_refused(run: Path, kept: int, described: bool) -> None:
    content = (run / WEIGHTS).read_bytes()[:kept]
    if described:
        put(run, content)
        assert refuse(run).startswith(f"{run / WEIGHTS} is damaged (")
    else:
        (run / WEIGHTS).write_bytes(content)
        assert refuse(run).startswith(f"{run / WEIGHTS} is not the file that its model file describes")


@pytest.mark.parametrize("at", [0, 50, 4000, -1])
def test_one_flipped_byte_is_noticed(run: Path, at: int) -> None:
    content = bytearray((run / WEIGHTS).read_bytes())
    content[at] ^= 1
    (run / WEIGHTS).write_bytes(content)
    assert refuse(run) == (
        f"{run / WEIGHTS} is not the file that its model file describes: it was damaged or replaced; restore it "
        f"from a copy, or train again."
    )


def test_good_weights_of_another_run_are_not_taken_for_its_own(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=1)
    shutil.copyfile(other / WEIGHTS, run / WEIGHTS)
    assert "is not the file that its model file describes" in refuse(run)
    shutil.copyfile(other / MODEL, run / MODEL)
    rp.load(run)


@pytest.mark.parametrize("broken", ["type", "shape", "additional", "no number", "truncated"])
def test_nothing_is_loaded_of_weights_that_are_refused(tmp_path: Path, broken: str) -> None:
    """The good tensors among them would change the network."""
    network = rp.models.tumor(4)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    tensors = {name: tensor + 1 for name, tensor in before.items()}
    last = "head.conv.bias"
    assert [*before][-1] == last
    wrong = {
        "type": {last: tensors[last].double()},
        "shape": {last: torch.zeros(2)},
        "additional": {"zebra": torch.zeros(2)},
        "no number": {last: torch.full((1,), torch.nan)},
        "truncated": {},
    }
    content = save(tensors | wrong[broken])
    (tmp_path / "w.safetensors").write_bytes(content[:-4] if broken == "truncated" else content)
    with pytest.raises(RunError):
        load_weights(network, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in network.state_dict().items())
    (tmp_path / "w.safetensors").write_bytes(save(tensors))
    load_weights(network, tmp_path / "w.safetensors")
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in network.state_dict().items())


def test_weights_have_the_names_of_the_module_that_was_trained(tmp_path: Path) -> None:
    """And not of what slides it over an image, so that others can use them."""
    for task, keys in (("classify", WINDOWS), ("segment", MAPS)):
        folder = make_run(tmp_path / task, task, **keys)
        network = rp.load(folder).network
        names = load((folder / WEIGHTS).read_bytes()).keys()
        assert names == unwrap(network).state_dict().keys() != network.state_dict().keys()


# Folders as rotopath 0.1 wrote them.

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


def age(folder: Path) -> Path:
    """The folder as it would be without a model file, with an operating point in place of it."""
    write_json(folder / runs.OLD_POINT, read_json(folder / MODEL)["operating_point"])
    (folder / MODEL).unlink()
    return folder


def make_old(folder: Path, new: Path, task: str, data: object) -> Path:
    shutil.copytree(new, folder)
    words = {**OLD_TASKS[task], "reflections": json.dumps(OLD_TASKS[task]["reflections"])}
    (folder / runs.RECIPE).write_text(OLD_RECIPE.format(task=task, data=json.dumps(str(data)), **words))
    return age(folder)


def make_data(task: str, root: Path) -> Path:
    if task == "mitosis":
        return amida13(root, cases=[1, 3, 13], size=(80, 90))
    if task == "nuclei":
        return kumar(root, ["n0", "n1", "n2"], size=70)
    return pcam(root, (4, 4, 6))


@pytest.mark.parametrize("task", OLD_TASKS)
@pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
def test_a_run_of_rotopath_0_1_is_used_as_any_other(tmp_path: Path, task: str) -> None:
    data = make_data(task, tmp_path / "data")
    new = make_run(tmp_path / "new", task, data, seed=3, network_options=OLD_TASKS[task])
    old = make_old(tmp_path / "old", new, task, data)
    assert {path.name for path in old.iterdir()} == {runs.RECIPE, WEIGHTS, runs.OLD_POINT, runs.PROVENANCE}
    before = {path.name: path.read_bytes() for path in old.iterdir()}
    ours, theirs = rp.load(new), rp.load(old)
    assert theirs.info == replace(ours.info, weights_sha256=None)
    assert theirs.recipe == ours.recipe
    image = pixels(120, 130, 5)
    maps = [predict(each.network, image, CPU).probabilities for each in (ours, theirs)]
    assert np.array_equal(*maps)
    assert maps[0].std() > 0
    found = [each.predict(image, ours.task.spacing_um_px, everywhere=True, device="cpu") for each in (ours, theirs)]
    assert np.array_equal(found[0].map, found[1].map)
    assert len(found[0].objects) == len(found[1].objects)
    assert dict(found[0].summary) == dict(found[1].summary)
    scores = [rp.evaluate(each, out=tmp_path / f"{each.name}.json").scores for each in (new, old)]
    assert scores[0] == scores[1]
    exported = [rp.export(each, "torchscript", tmp_path / f"{each.name}-model") for each in (new, old)]
    states = [(place / "model.safetensors").read_bytes() for place in exported]
    assert states[0] == states[1]
    configs = [read_json(place / "config.json") | {"name": ""} for place in exported]
    assert configs[0] == configs[1]
    assert {path.name: path.read_bytes() for path in old.iterdir()} == before, "it is left as it was"


def test_the_model_file_goes_before_an_old_operating_point(run: Path) -> None:
    write_json(run / runs.OLD_POINT, {"threshold": 0.9})
    assert rp.load(run).point == POINT


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        (runs.OLD_POINT, '{"threshold": -5}', "is damaged: 'threshold' of the operating point is -5"),
        (runs.OLD_POINT, '{"threshold": true}', "is damaged: 'threshold' of the operating point is True"),
        (runs.OLD_POINT, "{}", "is damaged: an operating point has threshold; got nothing"),
        (runs.OLD_POINT, "[0.5]", "is damaged: it holds a list"),
        (runs.OLD_POINT, '{"threshold": NaN}', "is damaged: it is no JSON (NaN is no number)"),
        (runs.RECIPE, 'task = "tumor"\n', "the key 'data' is missing"),
        (runs.RECIPE, 'task = "tumor"\ndata = "d"\nkernel = "cubic"\n', "tumor knows kernel"),
        (runs.RECIPE, "task = ", "is no TOML file"),
    ],
)
def test_damaged_files_of_old_runs_are_named(run: Path, name: str, content: str, named: str) -> None:
    age(run)
    (run / name).write_text(content)
    sentence = refuse(run)
    assert str(run / name) in sentence
    assert named in sentence


def test_weights_of_old_runs_are_checked_too(run: Path) -> None:
    """All but the checksum, which they have none of."""
    age(run)
    tensors = load((run / WEIGHTS).read_bytes())
    tensors[WEIGHT][0, 0, 0, 0] = torch.nan
    (run / WEIGHTS).write_bytes(save(tensors))
    assert "has values that are no finite numbers" in refuse(run)
    (run / WEIGHTS).write_bytes(save(tensors | {WEIGHT: tensors[WEIGHT].double()}))
    assert "is of type float64, and not float32" in refuse(run)


# Fingerprints.


def keep_times(path: Path, content: bytes) -> None:
    """Overwrite a file so that its name, size and times stay."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def find(data: Path) -> str:
    found = fingerprint(open_data(data))
    assert found.startswith(FINGERPRINT)
    return found


@pytest.fixture
def fields(tmp_path: Path) -> Path:
    return amida13(tmp_path / "data", cases=[1, 3, 13])


def test_a_fingerprint_changes_with_a_single_pixel(fields: Path) -> None:
    before = find(fields)
    path = fields / "mitoses_image_data_part_1/01/02.tif"
    image = rp.images.read_rgb(path)
    content = bytearray(path.read_bytes())  # not compressed
    content[content.index(image[30, 40].tobytes() + image[30, 41].tobytes())] ^= 1
    keep_times(path, bytes(content))
    assert (rp.images.read_rgb(path) != image).sum() == 1
    assert find(fields) != before


def test_a_fingerprint_changes_with_an_annotation(fields: Path) -> None:
    before = find(fields)
    path = fields / "mitoses_ground_truth/03/01.csv"
    content = path.read_bytes()
    keep_times(path, content.replace(b"10,20", b"10,21"))
    assert find(fields) != before
    keep_times(path, content)
    assert find(fields) == before
    path.unlink()
    assert find(fields) != before


def test_a_fingerprint_changes_with_a_label_and_a_split(tmp_path: Path) -> None:
    rows = [["image", "label", "split", "spacing"], *([f"{i}.png", str(i % 2), "train", "1"] for i in range(4))]
    for i in range(4):
        write_image(tmp_path / f"{i}.png", pixels(8, 8, i))
    table = write_csv(tmp_path / "manifest.csv", rows)
    found = [find(tmp_path)]
    for row, column, value in ((2, 1, "0"), (3, 2, "test"), (1, 3, "2"), (4, 0, "3b.png")):
        rows[row][column] = value
        if value == "3b.png":
            shutil.copyfile(tmp_path / "3.png", tmp_path / value)
        write_csv(table, rows)
        found.append(find(tmp_path))
    assert len({*found}) == len(found)


def test_a_fingerprint_changes_with_the_classes_beside_a_label_map(tmp_path: Path) -> None:
    """A table of the same name has the class of each object; the map itself stays."""
    write_image(tmp_path / "a.png", pixels(8, 8, 1))
    write_image(tmp_path / "labels/a.png", np.eye(8, dtype=np.uint8))
    table = write_csv(tmp_path / "labels/a.csv", [("object", "class"), (1, "lymphocyte")])
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "labels/a.png", "train", "1")]
    write_csv(tmp_path / "manifest.csv", rows)
    before = find(tmp_path)
    content = table.read_bytes()
    keep_times(table, content.replace(b"lymphocyte", b"macrophage"))
    assert find(tmp_path) != before
    keep_times(table, content)
    assert find(tmp_path) == before
    table.unlink()
    assert find(tmp_path) != before


def test_a_fingerprint_changes_with_the_organ(tmp_path: Path) -> None:
    """A regime takes fields of each organ, so that it decides on which of them a network is trained."""
    root = kumar(tmp_path / "data", [f"n{i}" for i in range(6)])
    before = find(root)
    text = (root / "split.csv").read_text()
    (root / "split.csv").write_text(text.replace("n0,breast", "n0,kidney"))
    assert find(root) != before


def test_a_fingerprint_changes_with_the_labels_of_pcam(tmp_path: Path) -> None:
    one, same, other = (pcam(tmp_path / name) for name in ("one", "same", "other"))
    write_hdf5(other / pcam_name("valid", "y"), "y", np.array([0, 1, 1, 1], np.uint8).reshape(-1, 1, 1, 1))
    assert find(one) == find(same) != find(other)


def test_a_fingerprint_stays_when_files_are_touched_or_lie_elsewhere(fields: Path, tmp_path: Path) -> None:
    before = find(fields)
    for path in fields.rglob("*"):
        path.touch()
        os.utime(path, (1, 1))
    assert find(fields) == before
    assert find(shutil.copytree(fields, tmp_path / "elsewhere")) == before
    (fields / "notes.txt").write_text("nothing that a reader looks at")
    assert find(fields) == before
