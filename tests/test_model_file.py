"""Model files: every value is checked, damaged files are reported, and weights must be exactly those of the network."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import pixels
from safetensors.torch import load, save
from torch import Tensor, nn
from untrained_runs import MISSING, POINTS, RESNET, THRESHOLD, UNET, Table, error_of_loading, make_run, with_value

import rotopath as rp
from rotopath import runs
from rotopath.model_file import MODEL, REMEDY, WEIGHTS, RunError, load_weights, read_json
from rotopath.models.protocols import DenseModule, SlidingModule, unwrap
from rotopath.writing import write_json

pytestmark = pytest.mark.slow

RED = {"name": "a", "color": [1, 2, 3]}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that no test may change."""
    return make_run(tmp_path_factory.mktemp("runs") / "tumor")


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of a run, to be damaged."""
    return shutil.copytree(finished, tmp_path / "run")


# Values


@pytest.mark.parametrize(
    ("task", "keys", "wrapped"),
    [
        ("tumor", {}, None),
        ("mitosis", {"kernel": "harmonic", "reflections": True}, None),
        ("nuclei", {"spacing_um_px": 0.5, "stain": "none", "window_px": 60}, None),
        ("classify", {"classes": ["fat", "stroma"], "colors": ["#010203"], **RESNET}, SlidingModule),
        ("segment", {**UNET, "stain": "macenko"}, DenseModule),
    ],
)
def test_a_model_file_is_read_as_it_was_written(
    tmp_path: Path, task: str, keys: dict[str, object], wrapped: type[nn.Module] | None
) -> None:
    folder = make_run(tmp_path / "run", task, **keys)
    recipe = runs.read_run_recipe(folder)
    expected, task_of_recipe = runs.build(recipe), recipe.make_task()
    run = rp.load(folder)
    assert run.task == task_of_recipe
    assert run.point == (POINTS[task_of_recipe.kind] if task_of_recipe.is_single else {})
    assert run.info.network == runs.describe_network(recipe, expected)
    assert run.info.weights_sha256 == hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    assert run.network.geometry == expected.geometry
    assert type(run.network) is (wrapped or rp.models.Network)
    assert not run.network.training
    images = torch.rand(1, 3, run.info.network.window_px, run.info.network.window_px)
    with torch.no_grad():
        assert torch.equal(run.network(images), expected.eval()(images))


def test_a_model_file_and_weights_are_enough_to_predict(run: Path) -> None:
    """The other files only describe the training."""
    image = pixels(100, 100, 1)
    before = rp.load(run).predict(image, spacing_um_px=1.0, everywhere=True, device="cpu")
    for name in (runs.RECIPE, runs.PROVENANCE):
        (run / name).unlink()
    after = rp.load(run).predict(image, spacing_um_px=1.0, everywhere=True, device="cpu")
    assert np.array_equal(before.map, after.map)
    assert repr(rp.load(run)) == f"Run({str(run)!r}: tumor by tumor, N=4)"


WRONG_VALUES = {
    "table": (None, 3, [], "x"),
    "text": (None, 3, "", []),
    "whole": (None, 0, -1, 1.5, True, "4", 10**7),
    "flag": (None, 0, "false"),
}
EXPECTED = {
    "table": "a JSON object",
    "text": "a string that is not empty",
    "whole": "a whole number from 1 to 1000000",
    "flag": "true or false",
}
LARGEST = {"orientations": 128, "window_px": 4096}  # of whole numbers, where it is not 10⁶
TYPES = {
    **dict.fromkeys(("task", "network", "network.options", "network.geometry", "operating_point", "weights"), "table"),
    **{f"task.{name}": "text" for name in ("kind", "name", "stain", "absent", "plural")},
    **dict.fromkeys(("network.name", "weights.sha256"), "text"),
    **dict.fromkeys(("network.orientations", "network.window_px"), "whole"),
    **{f"network.geometry.{name}": "whole" for name in ("outputs", "smallest_px", "step_px", "stride_px")},
    **dict.fromkeys(("task.typed", "network.slides"), "flag"),
}


@pytest.mark.parametrize("key", TYPES)
def test_a_value_of_the_wrong_type_is_named(run: Path, key: str) -> None:
    content = read_json(run / MODEL)
    for value in (MISSING, *WRONG_VALUES[TYPES[key]]):
        write_json(run / MODEL, with_value(content, key, value))
        name, given = key.rpartition(".")[2], None if value is MISSING else value
        expected = EXPECTED[TYPES[key]].replace("1000000", str(LARGEST.get(name, 10**6)))
        message = f"the key {name!r} must be {expected}; got {given!r}. Restore the file from a copy"
        assert f"{run / MODEL} is damaged: {message}" in error_of_loading(run)
    write_json(run / MODEL, content)
    rp.load(run)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format", MISSING, "'format' must be a whole number, 1 or more; got None"),
        ("format", "1", "'format' must be a whole number, 1 or more; got '1'"),
        ("format", 0, "'format' must be a whole number, 1 or more; got 0"),
        ("format", True, "'format' must be a whole number, 1 or more; got True"),
        ("format", 1.0, "'format' must be a whole number, 1 or more; got 1.0"),
        ("network.orientations", 999_999, "'orientations' must be a whole number from 1 to 128; got 999999"),
        ("task.kind", "zebra", "There is no task 'zebra'; choose from"),
        ("task.kind", "clasify", "There is no task 'clasify'; did you mean 'classify'?"),
        ("task.kind", "no.such:Kind", "'no.such:Kind' cannot be imported"),
        ("task.kind", "pathlib:Path", "'pathlib:Path' is not a subclass of rotopath.tasks.Task"),
        ("task.kind", "rotopath.tasks:Task", "'rotopath.tasks:Task'"),
        ("task.classes", MISSING, "'classes' must be a list of one class or more; got None"),
        ("task.classes", [], "'classes' must be a list of one class or more; got []"),
        ("task.classes", {"a": [1, 2, 3]}, "'classes' must be a list of one class or more; got {'a'"),
        ("task.classes", ["a"], "a 'color' of three whole numbers from 0 to 255; got 'a'"),
        ("task.classes", [{"name": "a"}], "a 'color' of three whole numbers from 0 to 255; got {'name': 'a'}"),
        ("task.classes", [{"color": [1, 2, 3]}], "'name' must be a string that is not empty; got None"),
        ("task.classes", [RED | {"color": [1, 2]}], "from 0 to 255; got {'name': 'a', 'color': [1, 2]}"),
        ("task.classes", [RED | {"color": [1, 2, 256]}], "from 0 to 255; got {'name': 'a', 'color': [1, 2, 256]}"),
        ("task.classes", [RED | {"color": [-1, 2, 3]}], "from 0 to 255; got {'name': 'a', 'color': [-1, 2, 3]}"),
        ("task.classes", [RED | {"color": [1.0, 2, 3]}], "from 0 to 255; got {'name': 'a', 'color': [1.0, 2, 3]}"),
        ("task.classes", [RED | {"color": [True, 2, 3]}], "from 0 to 255; got {'name': 'a', 'color': [True, 2, 3]}"),
        ("task.classes", [RED | {"color": "#ffffff"}], "from 0 to 255; got {'name': 'a', 'color': '#ffffff'}"),
        ("task.classes", [RED, RED | {"name": "A"}], "classes of a task must have different names; got a, A"),
        ("task.spacing_um_px", MISSING, "'spacing_um_px' must be a number from 0.05 to 5; got None"),
        ("task.spacing_um_px", 0, "'spacing_um_px' must be a number from 0.05 to 5; got 0."),
        ("task.spacing_um_px", -1, "'spacing_um_px' must be a number from 0.05 to 5; got -1."),
        ("task.spacing_um_px", "1", "'spacing_um_px' must be a number from 0.05 to 5; got '1'."),
        ("task.spacing_um_px", True, "'spacing_um_px' must be a number from 0.05 to 5; got True."),
        ("task.spacing_um_px", 40, "'spacing_um_px' must be a number from 0.05 to 5; got 40."),
        ("task.stain", "reinhard", "'stain' must be one of none, macenko; got 'reinhard'"),
        ("network.geometry.rim", -1, "'rim' must be a whole number from 0 to 1000000; got -1"),
        ("network.geometry.rim", True, "'rim' must be a whole number from 0 to 1000000; got True"),
        ("network.geometry.step_px", 7, "a multiple of its stride_px; got 7 px and 12 px"),
        ("network.geometry.stride_px", 24, "a multiple of its stride_px; got 12 px and 24 px"),
        ("network.geometry.smallest_px", 100, "restore the file, or train again"),
        ("network.geometry.stride_px", 6, "restore the file, or train again"),
        ("network.geometry.outputs", 2, "restore the file, or train again"),
        ("network.geometry.rim", 2, "restore the file, or train again"),
        ("operating_point", {}, "the operating point must contain threshold; got nothing"),
        ("operating_point", {"limit": 0.5}, "the operating point must contain threshold; got limit"),
        ("operating_point.limit", 0.5, "the operating point must contain threshold; got threshold, limit"),
        ("operating_point.threshold", -5, "'threshold' of the operating point is -5; a number from 0 to 1"),
        ("operating_point.threshold", 1.5, "'threshold' of the operating point is 1.5"),
        ("operating_point.threshold", True, "'threshold' of the operating point is True"),
        ("operating_point.threshold", "0.5", "'threshold' of the operating point is '0.5'"),
        ("operating_point.threshold", None, "'threshold' of the operating point is None"),
    ],
)
def test_an_impossible_value_is_named(run: Path, key: str, value: object, message: str) -> None:
    path = run / MODEL
    write_json(path, with_value(read_json(path), key, value))
    sentence = error_of_loading(run)
    assert str(path) in sentence
    assert message in sentence


@pytest.mark.parametrize("key", ["task.spacing_um_px", "operating_point.threshold"])
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity"])
def test_nan_and_infinity_are_named(run: Path, key: str, value: str) -> None:
    """They are not JSON, but Python's json module reads and writes them."""
    path = run / MODEL
    path.write_text(json.dumps(with_value(read_json(path), key, float(value))))
    reason = f"it is not valid JSON (JSON does not allow the number {value})"
    assert error_of_loading(run) == f"{path} is damaged: {reason}. Restore the file from a copy."


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("network.name", "resnet81", "There is no network 'resnet81'; did you mean 'resnet18'?"),
        ("network.name", "no.such:network", "'no.such:network' cannot be imported"),
        ("network.name", "os:system", "'os:system' has no parameter 'outputs'"),
        ("network.options.zebra", 1, "The network 'tumor' has no option 'zebra'"),
        ("network.options.outputs", 3, "The network 'tumor' has no option 'outputs'"),
        (
            "network.options.kernel",
            "cubic",
            "'kernel' of tumor must be 'bilinear' or 'gaussian' or 'harmonic' or 'square'; got 'cubic'",
        ),
        ("network.options.kernel", None, "got None"),
        ("network.options.smoothing", "yes", "'smoothing' of tumor must be False or True; got 'yes'"),
        ("network.options.widths_of", 0, "orientations must be a whole number, 1 or more"),
        ("network.options.widths_of", 999_999, "tumor cannot have 999999 orientations, because no choice of channels"),
    ],
)
def test_a_network_that_cannot_be_built_is_named(run: Path, key: str, value: object, message: str) -> None:
    write_json(run / MODEL, with_value(read_json(run / MODEL), key, value))
    sentence = error_of_loading(run)
    assert sentence.startswith(f"The network of {run} cannot be built: ")
    assert message in sentence


@pytest.mark.parametrize(
    ("task", "keys", "changes"),
    [
        (
            "classify",
            RESNET,
            {"outputs": 2, "smallest_px": 48, "step_px": 32, "rim": 1, "window_px": 48, "slides": False},
        ),
        ("segment", UNET, {"outputs": 2, "smallest_px": 4, "step_px": 4, "slides": True}),
        ("tumor", {}, {"window_px": 90, "slides": True}),
    ],
)
def test_a_geometry_that_the_network_does_not_have_is_refused(
    tmp_path: Path, task: str, keys: dict[str, object], changes: dict[str, object]
) -> None:
    """Also for networks that declare no geometry. Predictions would fail, or be at wrong positions."""
    path = make_run(tmp_path / "run", task, **keys) / MODEL
    content = read_json(path)
    for name, value in changes.items():
        table = "network" if name in ("window_px", "slides") else "network.geometry"
        write_json(path, with_value(content, f"{table}.{name}", value))
        assert str(path) in error_of_loading(path.parent), name
    write_json(path, content)
    rp.load(path.parent)


@pytest.mark.parametrize("width", [-4, "wide", None])
def test_a_network_that_cannot_be_built_with_its_options_is_named(tmp_path: Path, width: object) -> None:
    path = make_run(tmp_path / "run", "classify", **RESNET) / MODEL
    write_json(path, with_value(read_json(path), "network.options.width", width))
    assert error_of_loading(path.parent).startswith(f"The network of {path.parent} cannot be built: ")


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "1", "[" * 100_000, b"\xff\xfe\x00", b'{"format": 1, "format'], ids=repr
)
def test_a_model_file_without_a_table_is_damaged(run: Path, content: str | bytes) -> None:
    (run / MODEL).write_bytes(content.encode() if isinstance(content, str) else content)
    assert error_of_loading(run).startswith(f"{run / MODEL} is damaged: it ")


def test_a_missing_model_file_is_named(run: Path) -> None:
    (run / MODEL).unlink()
    assert error_of_loading(run) == f"{run / MODEL} does not exist. Restore the file from a copy."


def test_thresholds_may_be_at_their_bounds(run: Path) -> None:
    """The best threshold of a bad classifier is just above the highest probability."""
    path = run / MODEL
    for value in (0, 1, float(np.nextafter(1, 2))):
        write_json(path, with_value(read_json(path), "operating_point.threshold", value))
        assert rp.load(run).point == {"threshold": value}


@pytest.mark.parametrize(
    ("task", "point", "message"),
    [
        ("mitosis", {"threshold": 1.001}, "'threshold' of the operating point is 1.001"),
        (
            "nuclei",
            {"inside": 0.5, "background": 0.5},
            "the operating point must contain inside, background, least_px; got inside, background",
        ),
        ("nuclei", {"inside": 0.5, "background": -0.5, "least_px": 3}, "'background' of the operating point is -0.5"),
        ("nuclei", {"inside": 0.5, "background": 0.5, "least_px": -3}, "'least_px' of the operating point is -3"),
        ("nuclei", THRESHOLD, "the operating point must contain inside, background, least_px; got threshold"),
    ],
)
def test_operating_points_are_checked_by_the_task(tmp_path: Path, task: str, point: Table, message: str) -> None:
    path = make_run(tmp_path / "run", task, orientations=1) / MODEL
    write_json(path, read_json(path) | {"operating_point": point})
    assert f"{path} is damaged: {message}" in error_of_loading(path.parent)


def test_several_classes_have_no_threshold(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", "classify", classes=["a", "b", "c"], orientations=1)
    assert rp.load(folder).point == {}
    write_json(folder / MODEL, read_json(folder / MODEL) | {"operating_point": THRESHOLD})
    assert "the operating point must contain no numbers; got threshold" in error_of_loading(folder)


def test_a_model_file_of_a_newer_version_is_reported_as_newer(run: Path) -> None:
    """Whatever else it contains: its format is unknown to this version."""
    newer = {"format": 2, "rotopath": "7.0.1", "task": "otherwise"}
    write_json(run / MODEL, newer)
    assert error_of_loading(run) == (
        f"{run / MODEL} was written by rotopath 7.0.1, which is newer than this one ({rp.__version__}); "
        f"upgrade rotopath to use it."
    )


# Weights


def write_weights(run: Path, content: bytes) -> None:
    """Write weights, and a model file that describes them."""
    path = run / MODEL
    (run / WEIGHTS).write_bytes(content)
    write_json(path, with_value(read_json(path), "weights.sha256", hashlib.sha256(content).hexdigest()))


WEIGHT, COUNT = "stages.1.conv.weight", "stages.0.norm.num_batches_tracked"


def change_weight(run: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    tensors = load((run / WEIGHTS).read_bytes())
    write_weights(run, save(tensors | {name: change(tensors[name]).contiguous()}))


@pytest.mark.parametrize("dtype", ["bool", "int8", "float16", "bfloat16", "complex64", "float64"])
def test_weights_of_another_type_are_refused(run: Path, dtype: str) -> None:
    change_weight(run, WEIGHT, lambda weight: weight.to(getattr(torch, dtype)))
    fault = f"{WEIGHT!r} must be of type float32; got {dtype}"
    assert error_of_loading(run) == (f"{run / WEIGHTS} does not contain the weights of this network: {fault}. {REMEDY}")


@pytest.mark.parametrize(
    ("name", "wrong", "fault"),
    [
        (COUNT, lambda count: count.int(), "must be of type int64; got int32"),
        (COUNT, lambda count: count.reshape(1), "must have shape (); got (1,)"),
        (WEIGHT, lambda weight: weight[:1], "must have shape (19, 19, 4, 21); got (1, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight.transpose(2, 3), "must have shape (19, 19, 4, 21); got (19, 19, 21, 4)"),
        (WEIGHT, lambda weight: weight.flatten(), "must have shape (19, 19, 4, 21); got (30324,)"),
        (WEIGHT, lambda weight: weight[:0], "must have shape (19, 19, 4, 21); got (0, 19, 4, 21)"),
        (WEIGHT, lambda weight: weight.index_fill(0, torch.tensor(3), float("nan")), "that are not finite"),
        (WEIGHT, lambda weight: weight.index_fill(0, torch.tensor(3), float("inf")), "that are not finite"),
        ("head.conv.bias", lambda bias: bias - float("inf"), "that are not finite"),
    ],
)
def test_weights_with_wrong_shapes_types_or_numbers_are_refused(
    run: Path, name: str, wrong: Callable[[Tensor], Tensor], fault: str
) -> None:
    change_weight(run, name, wrong)
    sentence = error_of_loading(run)
    assert sentence.startswith(f"{run / WEIGHTS} does not contain the weights of this network: {name!r} ")
    assert fault in sentence


def test_missing_and_additional_weights_are_refused(run: Path) -> None:
    tensors = load((run / WEIGHTS).read_bytes())
    write_weights(run, save(tensors | {"zebra": torch.zeros(3)}))
    sentence = error_of_loading(run)
    assert sentence.endswith(f"the weights of this network: 'zebra' is not a weight of the network. {REMEDY}")
    del tensors[WEIGHT]
    write_weights(run, save(tensors))
    assert error_of_loading(run).endswith(
        f"does not contain the weights of this network: {WEIGHT!r} is missing. {REMEDY}"
    )
    write_weights(run, save({}))
    assert error_of_loading(run).endswith(f"is missing. {REMEDY}")


@pytest.mark.parametrize("kept", [0, 5, 8, 100, 5000, -1])
@pytest.mark.parametrize("described", [True, False])
def test_truncated_weights_are_refused(run: Path, kept: int, described: bool) -> None:
    content = (run / WEIGHTS).read_bytes()[:kept]
    if described:
        write_weights(run, content)
        assert error_of_loading(run).startswith(f"{run / WEIGHTS} is damaged (")
    else:
        (run / WEIGHTS).write_bytes(content)
        assert error_of_loading(run).startswith(f"{run / WEIGHTS} was damaged or replaced: its checksum is")


@pytest.mark.parametrize("at", [0, 50, 4000, -1])
def test_a_flipped_bit_is_noticed(run: Path, at: int) -> None:
    content = bytearray((run / WEIGHTS).read_bytes())
    content[at] ^= 1
    (run / WEIGHTS).write_bytes(content)
    assert error_of_loading(run) == (
        f"{run / WEIGHTS} was damaged or replaced: its checksum is not the one in model.json. {REMEDY}"
    )


def test_weights_of_another_run_are_refused(run: Path, tmp_path: Path) -> None:
    other = make_run(tmp_path / "other", seed=1)
    shutil.copyfile(other / WEIGHTS, run / WEIGHTS)
    assert "its checksum is not the one in model.json" in error_of_loading(run)
    shutil.copyfile(other / MODEL, run / MODEL)
    rp.load(run)


@pytest.mark.parametrize("broken", ["type", "shape", "additional", "no number", "truncated"])
def test_refused_weights_leave_the_network_unchanged(tmp_path: Path, broken: str) -> None:
    """Even if some of the tensors are good."""
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
    """Not of the wrapper that makes it dense, so that other software can use the weights."""
    for task, keys in (("classify", RESNET), ("segment", UNET)):
        folder = make_run(tmp_path / task, task, **keys)
        network = rp.load(folder).network
        names = load((folder / WEIGHTS).read_bytes()).keys()
        assert names == unwrap(network).state_dict().keys() != network.state_dict().keys()
