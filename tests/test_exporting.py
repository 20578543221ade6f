"""Exports: what other software reads gives the network's answers, and a folder is whole or not there."""

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath import exporting, runs
from rotopath.cli import app
from rotopath.exporting import MODELS, check_answers, export
from rotopath.model_file import WEIGHTS, RunError, pack_weights, write_model
from rotopath.models.protocols import unwrap
from rotopath.recipe import make_recipe, write_recipe
from rotopath.writing import write_bytes, write_json, write_text

POINT = {"threshold": 0.375}
POINTS = {"classify": POINT, "detect": POINT, "segment": {"inside": 0.5, "background": 0.25, "least_px": 30}}


def make_run(folder: Path, task: str, orientations: int = 4, **choices: object) -> Path:
    """A finished run that was never trained, with batch norm that does something."""
    folder.mkdir(parents=True)
    recipe = make_recipe({"task": task, "data": "nowhere", "orientations": orientations, **choices})
    network, task = runs.build(recipe), recipe.make_task()
    generator = torch.Generator().manual_seed(0)
    for module in unwrap(network).modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.running_mean.normal_(std=0.2, generator=generator)
            module.running_var.uniform_(0.5, 2, generator=generator)
        if isinstance(module, rp.nn.Project):
            for parameter in module.parameters():
                nn.init.uniform_(parameter, 0.5, 1.5, generator=generator)
    write_text(folder / runs.RECIPE, write_recipe(recipe))
    write_json(folder / runs.PROVENANCE, {"seed": 0})
    weights, point = pack_weights(network), POINTS[task.kind] if task.is_single else {}
    write_model(folder, task, runs.describe_network(recipe, network), point, weights)
    write_bytes(folder / WEIGHTS, weights)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    def give(task: str) -> Path:
        if task not in made:
            made[task] = make_run(root / f"{task}-run", task)
        return made[task]

    return give


def load_script(folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of TorchScript itself, which WSInfer and QuPath still read
        return torch.jit.load(str(folder / "torchscript_model.pt"))


def read(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(("task", "found"), [("mitosis", "Mitosis"), ("tumor", "Tumor")])
def test_wsinfer_finds_what_it_asks_for(trained: Callable[[str], Path], tmp_path: Path, task: str, found: str) -> None:
    place = export(trained(task), "torchscript", tmp_path / "model")
    files = {"torchscript_model.pt", "config.json", "model.safetensors", "provenance.json", "README.md"}
    assert {path.name for path in place.iterdir()} == files
    config = read(place / "config.json")
    side = {"mitosis": 68, "tumor": 88}[task]
    expected = {
        "spec_version": "1.0",
        "name": f"{task}-run",
        "architecture": f"rotopath-{task}-N4",
        "num_classes": 2,
        "class_names": ["Other", found],
        "patch_size_pixels": side,
        "spacing_um_px": {"mitosis": 0.25, "tumor": 1.0}[task],
        "transform": [{"name": "Resize", "arguments": {"size": side}}, {"name": "ToTensor"}],
        "operating_point": POINT,
    }
    assert {key: config[key] for key in expected} == expected
    # As WSInfer and QuPath apply it: patches of floats, softmax.
    model = load_script(place)
    network = rp.load(trained(task)).network
    patches = torch.rand(5, 3, side, side)
    with torch.no_grad():
        probabilities = model(patches).softmax(dim=1)
        wanted = network(patches).sigmoid().flatten()
    torch.testing.assert_close(probabilities[:, 1], wanted, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(5))


def test_a_segmentation_model_does_not_pass_for_a_classifier(trained: Callable[[str], Path], tmp_path: Path) -> None:
    place = export(trained("nuclei"), "torchscript", tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config, "WSInfer requires it, and refuses what has none"
    assert config["class_names"] == ["inside", "border", "background"]
    assert config["output"] == "logits (B, 3, H', W') of a map"
    assert config["stain"] == "macenko"
    assert "not a class for a patch" in (place / "README.md").read_text()
    model, network = load_script(place), rp.load(trained("nuclei")).network
    for images in (torch.rand(1, 3, 44, 60), (torch.rand(2, 3, 60, 60) * 255).byte()):
        with torch.no_grad():
            torch.testing.assert_close(model(images), network(images), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("projection", "to"),
    [
        ("attention", "onnx"),
        ("attention", "torchscript"),
        ("fourier", "onnx"),
        ("fourier", "torchscript"),
        ("fourier", "torch"),
    ],
)
def test_learned_projections_are_exported(tmp_path: Path, projection: str, to: str) -> None:
    """Exports check themselves against the network."""
    if to == "onnx":
        pytest.importorskip("onnxruntime")
    run = make_run(tmp_path / "run", "nuclei", projection=projection, reflections=to == "onnx")
    assert rp.load(run).network.project.mode == projection
    place = export(run, to, tmp_path / "model")
    assert (place / MODELS[to]).exists()


def test_onnx_takes_any_batch_and_size(trained: Callable[[str], Path], tmp_path: Path) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    place = export(trained("nuclei"), "onnx", tmp_path / "model")
    session = onnxruntime.InferenceSession(str(place / "model.onnx"), providers=["CPUExecutionProvider"])
    network = rp.load(trained("nuclei")).network
    field, step = network.receptive_field, network.architecture.size_step
    for batch, rows, columns in ((1, 0, 0), (2, 3, 1), (5, 0, 2)):
        images = torch.rand(batch, 3, field + rows * step, field + columns * step)
        (logits,) = session.run(["logits"], {"image": images.numpy()})
        with torch.no_grad():
            torch.testing.assert_close(torch.from_numpy(logits), network(images), atol=1e-4, rtol=1e-4)
    assert [path.name for path in place.glob("*.onnx*")] == ["model.onnx"], "weights are inside"
    assert b"rotopath/models" not in (place / "model.onnx").read_bytes(), "and paths of this machine are not"


def test_a_program_of_torch_export(trained: Callable[[str], Path], tmp_path: Path) -> None:
    place = export(trained("tumor"), "torch", tmp_path / "model")
    model = torch.export.load(place / "model.pt2").module(check_guards=False)
    network = rp.load(trained("tumor")).network
    for size in ((1, 3, 88, 88), (3, 3, 100, 124)):
        images = torch.rand(size)
        torch.testing.assert_close(model(images), network(images).detach(), atol=1e-5, rtol=1e-5)
    assert read(place / "config.json")["class_names"] == ["Tumor"]
    assert "check_guards=False" in (place / "README.md").read_text()


def test_weights_and_provenance_lie_beside_the_model(trained: Callable[[str], Path]) -> None:
    place = export(trained("mitosis"), "torchscript")
    assert place == trained("mitosis") / "export-torchscript"
    classifier = exporting.PatchClassifier(rp.freeze(rp.models.mitosis(4)), outputs=1)
    classifier.load_state_dict(load_file(place / "model.safetensors"))
    patches = torch.rand(2, 3, 68, 68)
    model = load_script(place)
    torch.testing.assert_close(model(patches), classifier.eval()(patches))
    origin = read(place / "provenance.json")
    assert origin["rotopath"] == rp.__version__
    assert origin["run"] == str(trained("mitosis"))
    assert origin["operating_point"] == POINT
    assert origin["trained"] == {"seed": 0}
    assert origin["recipe"]["orientations"] == 4
    assert "commit" in origin
    assert rp.load(trained("mitosis")).point == POINT, "the run is still one"


def test_a_model_that_answers_otherwise_is_not_put_in_place(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(trained("tumor"), "torchscript", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def write_wrong(model: nn.Module, network: rp.models.DenseNetwork, path: Path) -> Callable[[Tensor], Tensor]:
        del network
        path.write_bytes(b"half a model")
        return lambda images: model(images) + 2e-4

    monkeypatch.setattr(exporting, "WRITERS", {"torchscript": write_wrong})
    with pytest.raises(RunError, match="does not give the network's answers to images of"):
        export(trained("tumor"), "torchscript", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing half-written is left"


def test_answers_are_checked_at_several_sizes() -> None:
    network = rp.models.mitosis(1).eval()
    check_answers(network, network, network)
    for wrong in (lambda x: network(x[:1]), lambda x: network(x) * (1 + 1e-3 * (len(x) > 1)) + 1e-3):
        with pytest.raises(RunError):
            check_answers(wrong, network, network)


def test_an_export_is_replaced_as_a_whole(trained: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    export(trained("tumor"), "torchscript", out)
    (out / "leftover.txt").write_text("of the old one")
    export(trained("mitosis"), "torchscript", out)
    assert not (out / "leftover.txt").exists()
    assert read(out / "config.json")["patch_size_pixels"] == 68
    assert [path.name for path in out.parent.iterdir()] == ["model"]


# Networks that were converted.


def open_model(place: Path, to: str) -> Callable[[Tensor], Tensor]:
    """An exported model as others open it."""
    if to == "torchscript":
        return load_script(place)
    if to == "torch":
        model: Callable[[Tensor], Tensor] = torch.export.load(place / MODELS[to]).module(check_guards=False)
        return model
    import onnxruntime

    session = onnxruntime.InferenceSession(str(place / MODELS[to]), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"image": images.numpy()})[0])


def skip_without_extras(to: str) -> None:
    if to == "onnx":
        pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("to", MODELS)
@pytest.mark.parametrize("orientations", [1, 4])
def test_a_network_for_windows_of_one_size_is_exported(tmp_path: Path, to: str, orientations: int) -> None:
    """It is slid over slides, but others get the network itself, for patches of its size."""
    skip_without_extras(to)
    keys = {"classes": ["fat", "stroma", "tumor"], "network": "resnet18", "network_options": {"width": 4}}
    run = make_run(tmp_path / "run", "classify", orientations, **keys, window_px=32, spacing_um_px=0.5)
    network = rp.load(run).network
    assert network.geometry.stride_px == 16
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    expected = {
        "architecture": f"rotopath-resnet18-N{orientations}",
        "num_classes": 3,
        "class_names": ["fat", "stroma", "tumor"],
        "patch_size_pixels": 32,
        "spacing_um_px": 0.5,
        "transform": [{"name": "Resize", "arguments": {"size": 32}}, {"name": "ToTensor"}],
        "output": "logits (B, 3) of a patch",
        "activation": "softmax",
        "image_sides_px": {"smallest": 32, "step": 0},
        "operating_point": {},
    }
    assert {key: config[key] for key in expected} == expected
    assert ("spec_version" in config) == (to == "torchscript"), "which WSInfer and QuPath read"
    assert "sides of 32 px." in (place / "README.md").read_text()
    model = open_model(place, to)
    for batch in (1, 5):
        patches = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            logits, wanted = model(patches), network(patches).flatten(1)
        assert logits.shape == (batch, 3)
        assert wanted.std() > 1e-3, "there is something to compare"
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", MODELS)
def test_a_network_for_windows_with_one_class_answers_as_its_format_asks(tmp_path: Path, to: str) -> None:
    """WSInfer and QuPath take the softmax of two; others the sigmoid of one."""
    skip_without_extras(to)
    keys = {"classes": ["tumor"], "network": "resnet18", "network_options": {"width": 4}, "window_px": 32}
    run = make_run(tmp_path / "run", "classify", **keys)
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    script = to == "torchscript"
    assert config["class_names"] == (["Other", "tumor"] if script else ["tumor"])
    assert config["activation"] == ("softmax" if script else "sigmoid")
    assert config["operating_point"] == POINT
    patches = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        logits, wanted = open_model(place, to)(patches), rp.load(run).network(patches).sigmoid().flatten()
    probabilities = logits.softmax(dim=1)[:, 1] if script else logits.sigmoid()[:, 0]
    torch.testing.assert_close(probabilities, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", MODELS)
@pytest.mark.parametrize("orientations", [1, 4])
def test_a_converted_network_with_maps_is_exported(tmp_path: Path, to: str, orientations: int) -> None:
    skip_without_extras(to)
    keys = {"network": "unet", "network_options": {"width": 4, "depth": 2}, "window_px": 32}
    run = make_run(tmp_path / "run", "segment", orientations, **keys)
    network = rp.load(run).network
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config
    assert config["architecture"] == f"rotopath-unet-N{orientations}"
    assert config["class_names"] == ["inside", "border", "background"]
    assert (config["output"], config["activation"]) == ("logits (B, 3, H', W') of a map", "softmax")
    assert (config["stride_px"], config["image_sides_px"]["step"]) == (1, 2)
    assert config["operating_point"] == POINTS["segment"]
    model = open_model(place, to)
    for size in ((1, 3, 32, 32), (3, 3, 24, 46)):
        images = torch.rand(size)
        with torch.no_grad():
            logits, wanted = model(images), network(images)
        assert logits.shape == (size[0], 3, *size[2:])
        assert wanted.std() > 1e-3, "there is something to compare"
        torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


def test_a_map_with_an_answer_for_every_pixel_does_not_pass_for_a_classifier(tmp_path: Path) -> None:
    """A network without pools takes images of any size, as classifiers of patches do."""
    keys = {"network": "unet", "network_options": {"width": 4, "depth": 1}, "window_px": 32}
    run = make_run(tmp_path / "run", "segment", **keys)
    place = export(run, "torchscript", tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config
    assert config["output"] == "logits (B, 3, H', W') of a map"
    images = torch.rand(2, 3, 20, 30)
    with torch.no_grad():
        torch.testing.assert_close(load_script(place)(images), rp.load(run).network(images), atol=1e-5, rtol=1e-5)


def test_a_patch_is_as_large_as_one_answer_needs_and_not_as_the_windows_of_training(tmp_path: Path) -> None:
    """In a larger patch, the mean over its windows would be far from an operating point that holds for single ones."""
    run = make_run(tmp_path / "run", "mitosis", window_px=100)
    config = read(export(run, "torchscript", tmp_path / "model") / "config.json")
    assert config["patch_size_pixels"] == 68
    assert config["transform"][0]["arguments"] == {"size": 68}


@pytest.mark.parametrize("to", MODELS)
def test_the_smallest_image_that_is_named_is_taken(tmp_path: Path, to: str) -> None:
    skip_without_extras(to)
    keys = {"network": "unet", "network_options": {"width": 4, "depth": 2}, "window_px": 32}
    run = make_run(tmp_path / "run", "segment", **keys)
    place = export(run, to, tmp_path / "model")
    side = read(place / "config.json")["image_sides_px"]["smallest"]
    images = torch.rand(1, 3, side, side)
    with torch.no_grad():
        logits, wanted = open_model(place, to)(images), rp.load(run).network(images)
    torch.testing.assert_close(logits, wanted, atol=1e-5, rtol=1e-5)


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_explain", stop)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_export_leaves_nothing(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(trained("tumor"), "torchscript", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


# The command.


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_writes_a_folder_and_says_where(trained: Callable[[str], Path], tmp_path: Path) -> None:
    result = command(trained("tumor"), "--out", tmp_path / "model")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.replace("\n", "").startswith("Exported: ")
    assert set(MODELS.values()) & {path.name for path in (tmp_path / "model").iterdir()} == {"torchscript_model.pt"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("{}/none",), "none is neither a run folder nor one of the pretrained models, "),
        (("{}/taken",), "holds no run."),
        (("{run}", "--to", "keras"), "There is no format 'keras' to export to; choose from torchscript, onnx, torch."),
        (
            ("{run}", "--out", "{}/taken"),
            "taken exists and is no export of rotopath; choose another folder with --out.",
        ),
        (("{run}", "--out", "{}/file"), "file exists and is no export of rotopath"),
        (("{run}", "--out", "{}/file/below"), "cannot be read or written"),
        (("{run}", "--out", "{run}"), "exists and is no export of rotopath"),
    ],
)
def test_mistakes_get_one_sentence_and_exit_code_2(
    trained: Callable[[str], Path], tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("dear to somebody")
    (tmp_path / "file").write_text("a file")
    run = trained("tumor")
    before = sorted([*tmp_path.rglob("*"), *run.rglob("*")])
    result = command(*[word.format(tmp_path, run=run) for word in arguments])
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert sorted([*tmp_path.rglob("*"), *run.rglob("*")]) == before


@pytest.mark.parametrize("package", ["onnxruntime", "onnxscript"])
def test_a_missing_extra_is_named(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    pytest.importorskip("onnxruntime")  # or else it is the first to be missed
    monkeypatch.setitem(sys.modules, package, None)
    result = command(trained("tumor"), "--to", "onnx", "--out", tmp_path / "model")
    assert result.exit_code == 2
    assert result.stderr == f"rotopath: This needs {package}: pip install 'rotopath[onnx]'.\n"
    assert list(tmp_path.iterdir()) == []
