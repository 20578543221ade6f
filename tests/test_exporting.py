"""Exports: exported models have the outputs of the network, and folders are written atomically."""

import json
import multiprocessing
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sharing import hold_elsewhere
from torch import Tensor, nn
from typer.testing import CliRunner, Result
from untrained_runs import POINTS, THRESHOLD, make_run

import rotopath as rp
from rotopath import exporting
from rotopath.cli import app
from rotopath.exporting import MODELS, check_outputs, export
from rotopath.model_file import RunError
from rotopath.writing import BusyError

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    def run_of(task: str) -> Path:
        if task not in made:
            made[task] = make_run(root / f"{task}-run", task, random_statistics=True)
        return made[task]

    return run_of


def load_script(folder: Path) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", DeprecationWarning
        )  # of TorchScript itself, which WSInfer and QuPath still read
        return torch.jit.load(str(folder / "torchscript_model.pt"))


def read(path: Path) -> dict[str, object]:
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.parametrize(("task", "class_name"), [("mitosis", "Mitosis"), ("tumor", "Tumor")])
def test_the_configuration_is_complete_for_wsinfer(
    trained: Callable[[str], Path], tmp_path: Path, task: str, class_name: str
) -> None:
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
        "class_names": ["Other", class_name],
        "patch_size_pixels": side,
        "spacing_um_px": {"mitosis": 0.25, "tumor": 1.0}[task],
        "transform": [{"name": "Resize", "arguments": {"size": side}}, {"name": "ToTensor"}],
        "operating_point": THRESHOLD,
    }
    assert {key: config[key] for key in expected} == expected
    # As WSInfer and QuPath apply it: patches of floats, softmax.
    model = load_script(place)
    network = rp.load(trained(task)).network
    patches = torch.rand(5, 3, side, side)
    with torch.no_grad():
        probabilities = model(patches).softmax(dim=1)
        expected_logits = network(patches).sigmoid().flatten()
    torch.testing.assert_close(probabilities[:, 1], expected_logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(probabilities.sum(dim=1), torch.ones(5))


def test_a_segmentation_model_is_not_exported_as_a_classifier(trained: Callable[[str], Path], tmp_path: Path) -> None:
    place = export(trained("nuclei"), "torchscript", tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config, "WSInfer requires it, and refuses models without it"
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
        ("fourier", "onnx"),  # this first makes the program that the format "torch" stores
        ("fourier", "torchscript"),
    ],
)
def test_learned_projections_are_exported(tmp_path: Path, projection: str, to: str) -> None:
    """For any batch and size of images."""
    skip_without_extras(to)
    run = make_run(tmp_path / "run", "nuclei", random_statistics=True, projection=projection, reflections=to == "onnx")
    network = rp.load(run).network
    assert network.project.mode == projection
    place = export(run, to, tmp_path / "model")
    model = open_model(place, to)
    field, step = network.receptive_field, network.architecture.size_step
    for batch, rows, columns in ((1, 0, 0), (2, 3, 1), (5, 0, 2)):
        images = torch.rand(batch, 3, field + rows * step, field + columns * step)
        with torch.no_grad():
            torch.testing.assert_close(model(images), network(images), atol=1e-4, rtol=1e-4)
    if to == "onnx":
        assert [path.name for path in place.glob("*.onnx*")] == ["model.onnx"], "weights are inside the file"
        assert b"rotopath/models" not in (place / "model.onnx").read_bytes(), "no paths of this machine"


def test_a_torch_export_program_accepts_any_batch_and_size(trained: Callable[[str], Path], tmp_path: Path) -> None:
    place = export(trained("tumor"), "torch", tmp_path / "model")
    model = torch.export.load(place / "model.pt2").module(check_guards=False)
    network = rp.load(trained("tumor")).network
    for size in ((1, 3, 88, 88), (3, 3, 100, 124)):
        images = torch.rand(size)
        torch.testing.assert_close(model(images), network(images).detach(), atol=1e-5, rtol=1e-5)
    assert read(place / "config.json")["class_names"] == ["Tumor"]
    assert "check_guards=False" in (place / "README.md").read_text()


def test_weights_and_provenance_are_next_to_the_model(trained: Callable[[str], Path]) -> None:
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
    assert origin["operating_point"] == THRESHOLD
    assert origin["trained"] == {"seed": 0, "rotopath": rp.__version__}
    assert origin["recipe"]["orientations"] == 4
    assert "commit" in origin
    assert rp.load(trained("mitosis")).point == THRESHOLD, "the run folder is still valid"


def test_a_model_with_other_outputs_is_not_put_in_place(
    trained: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export(trained("tumor"), "torchscript", tmp_path / "model")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    def write_wrong(model: nn.Module, network: rp.models.DenseNetwork, path: Path) -> Callable[[Tensor], Tensor]:
        del network
        path.write_bytes(b"half a model")
        return lambda images: model(images) + 2e-4

    monkeypatch.setattr(exporting, "WRITERS", {"torchscript": write_wrong})
    with pytest.raises(RunError, match="and the network compute different logits for images of shape"):
        export(trained("tumor"), "torchscript", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"], "nothing half-written is left"


def test_outputs_are_compared_at_several_sizes() -> None:
    network = rp.models.mitosis(1).eval()
    check_outputs(network, network, network)
    for wrong in (lambda x: network(x[:1]), lambda x: network(x) * (1 + 1e-3 * (len(x) > 1)) + 1e-3):
        with pytest.raises(RunError):
            check_outputs(wrong, network, network)


def test_an_export_is_replaced_completely(trained: Callable[[str], Path], tmp_path: Path) -> None:
    out = tmp_path / "new" / "model"
    export(trained("tumor"), "torchscript", out)
    (out / MODELS["onnx"]).write_text("of an older export")
    export(trained("mitosis"), "torchscript", out)
    assert not (out / MODELS["onnx"]).exists()
    assert read(out / "config.json")["patch_size_pixels"] == 68
    assert [path.name for path in out.parent.iterdir()] == ["model"]


def test_an_export_with_files_of_the_user_is_not_replaced(trained: Callable[[str], Path], tmp_path: Path) -> None:
    out = export(trained("tumor"), "torchscript", tmp_path / "model")
    (out / "notes.txt").write_text("important")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(RunError, match=r"model contains 'notes.txt', which is not part of an export; move it away, or"):
        export(trained("mitosis"), "torchscript", out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


# Converted networks


def open_model(place: Path, to: str) -> Callable[[Tensor], Tensor]:
    """Open an exported model as other software does."""
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
def test_a_network_for_windows_of_one_size_is_exported(tmp_path: Path, to: str) -> None:
    """Rotopath applies it as a sliding window; other software gets the network itself, for patches of its size."""
    skip_without_extras(to)
    keys = {"classes": ["fat", "stroma", "tumor"], "network": "resnet18", "network_options": {"width": 4}}
    run = make_run(tmp_path / "run", "classify", random_statistics=True, **keys, window_px=32, spacing_um_px=0.5)
    network = rp.load(run).network
    assert network.geometry.stride_px == 16
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    expected = {
        "architecture": "rotopath-resnet18-N4",
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
    assert ("spec_version" in config) == (to == "torchscript"), "the format that WSInfer and QuPath read"
    assert "sides of 32 px." in (place / "README.md").read_text()
    model = open_model(place, to)
    for batch in (1, 5):
        patches = torch.rand(batch, 3, 32, 32)
        with torch.no_grad():
            logits, expected_logits = model(patches), network(patches).flatten(1)
        assert logits.shape == (batch, 3)
        assert expected_logits.std() > 1e-3, "the comparison means something"
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", ["torchscript", "onnx"])
def test_a_network_for_windows_with_one_class_has_the_outputs_of_its_format(tmp_path: Path, to: str) -> None:
    """WSInfer and QuPath apply softmax to two logits, other software applies sigmoid to one. The network is plain."""
    skip_without_extras(to)
    keys = {"network": "resnet18", "network_options": {"width": 4}, "window_px": 32, "orientations": 1}
    run = make_run(tmp_path / "run", "classify", random_statistics=True, classes=["tumor"], **keys)
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    script = to == "torchscript"
    assert config["architecture"] == "rotopath-resnet18-N1"
    assert config["class_names"] == (["Other", "tumor"] if script else ["tumor"])
    assert config["activation"] == ("softmax" if script else "sigmoid")
    assert config["operating_point"] == THRESHOLD
    patches = torch.rand(3, 3, 32, 32)
    with torch.no_grad():
        logits, expected_logits = open_model(place, to)(patches), rp.load(run).network(patches).sigmoid().flatten()
    probabilities = logits.softmax(dim=1)[:, 1] if script else logits.sigmoid()[:, 0]
    torch.testing.assert_close(probabilities, expected_logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("to", MODELS)
def test_a_converted_network_with_maps_is_exported(tmp_path: Path, to: str) -> None:
    """It accepts images of several sizes; the smallest one is stated in the configuration."""
    skip_without_extras(to)
    keys = {"network": "unet", "network_options": {"width": 4, "depth": 2}, "window_px": 32}
    run = make_run(tmp_path / "run", "segment", random_statistics=True, **keys)
    network = rp.load(run).network
    place = export(run, to, tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config
    assert config["architecture"] == "rotopath-unet-N4"
    assert config["class_names"] == ["inside", "border", "background"]
    assert (config["output"], config["activation"]) == ("logits (B, 3, H', W') of a map", "softmax")
    assert (config["stride_px"], config["image_sides_px"]["step"]) == (1, 2)
    assert config["operating_point"] == POINTS["segment"]
    model = open_model(place, to)
    smallest_px = config["image_sides_px"]["smallest"]
    for size in ((1, 3, 32, 32), (3, 3, 24, 46), (1, 3, smallest_px, smallest_px)):
        images = torch.rand(size)
        with torch.no_grad():
            logits, expected_logits = model(images), network(images)
        assert logits.shape == (size[0], 3, *size[2:])
        assert expected_logits.std() > 1e-3, "the comparison means something"
        torch.testing.assert_close(logits, expected_logits, atol=1e-5, rtol=1e-5)


def test_a_map_with_an_output_for_every_pixel_is_not_exported_as_a_classifier(tmp_path: Path) -> None:
    """A network without pools accepts images of any size, as classifiers of patches do."""
    keys = {"network": "unet", "network_options": {"width": 4, "depth": 1}, "window_px": 32}
    run = make_run(tmp_path / "run", "segment", random_statistics=True, **keys)
    place = export(run, "torchscript", tmp_path / "model")
    config = read(place / "config.json")
    assert "spec_version" not in config
    assert config["output"] == "logits (B, 3, H', W') of a map"
    images = torch.rand(2, 3, 20, 30)
    with torch.no_grad():
        torch.testing.assert_close(load_script(place)(images), rp.load(run).network(images), atol=1e-5, rtol=1e-5)


def test_the_patch_size_is_that_of_one_output_and_not_that_of_the_training_windows(tmp_path: Path) -> None:
    """The operating point is that of a single output, and does not apply to the mean over a larger patch."""
    run = make_run(tmp_path / "run", "mitosis", random_statistics=True, window_px=100)
    config = read(export(run, "torchscript", tmp_path / "model") / "config.json")
    assert config["patch_size_pixels"] == 68
    assert config["transform"][0]["arguments"] == {"size": 68}


@pytest.fixture
def interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(exporting, "_format_readme", stop)


@pytest.mark.usefixtures("interrupted")
def test_an_interrupted_export_leaves_nothing(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        export(trained("tumor"), "torchscript", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_an_export_that_another_process_writes_is_refused(trained: Callable[[str], Path], tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path / "model"), pytest.raises(BusyError, match=r"is writing to .*model; wait until it"):
        export(trained("tumor"), "torchscript", tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("to", ["torchscript", "torch"])
def test_models_are_written_by_python_because_torch_aborts_on_a_full_disk(
    trained: Callable[[str], Path], tmp_path: Path, to: exporting.Format
) -> None:
    """A process with a limit for the size of files, as a full disk has, must not end in C++."""
    resource = pytest.importorskip("resource")
    run = trained("tumor")

    def export_with_limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        torch.set_num_threads(1)
        with pytest.raises(OSError, match="File too large"):
            export(run, to, tmp_path / "model")

    process = multiprocessing.get_context("fork").Process(target=export_with_limit)
    process.start()
    process.join(300)
    assert process.exitcode == 0
    assert list(tmp_path.iterdir()) == []


# The command


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)], env={"COLUMNS": "80"})


def test_the_command_writes_a_folder_and_prints_its_path(trained: Callable[[str], Path], tmp_path: Path) -> None:
    result = command(trained("tumor"), "--out", tmp_path / "model")
    assert result.exit_code == 0, result.stderr
    assert result.stdout.replace("\n", "").startswith("Exported: ")
    assert set(MODELS.values()) & {path.name for path in (tmp_path / "model").iterdir()} == {"torchscript_model.pt"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("{}/none",), "none is neither a run folder nor one of the pretrained models, "),
        (("{}/taken",), "contains no run (weights.safetensors is missing); give the folder of a finished run."),
        (("{run}", "--to", "keras"), "There is no export format 'keras'; choose from torchscript, onnx, torch."),
        (
            ("{run}", "--out", "{}/taken"),
            "taken exists and is not an export of rotopath; choose another folder with --out.",
        ),
        (("{run}", "--out", "{}/file"), "file exists and is not an export of rotopath"),
        (("{run}", "--out", "{}/file/below"), "cannot be read or written"),
        (("{run}", "--out", "{run}"), "exists and is not an export of rotopath"),
    ],
)
def test_mistakes_end_with_one_sentence_and_exit_code_2(
    trained: Callable[[str], Path], tmp_path: Path, arguments: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "thesis.txt").write_text("important")
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
    pytest.importorskip("onnxruntime")  # otherwise it would be the first to be reported
    monkeypatch.setitem(sys.modules, package, None)
    result = command(trained("tumor"), "--to", "onnx", "--out", tmp_path / "model")
    assert result.exit_code == 2
    message = f"This command needs the package {package}; install it with: pip install 'rotopath[onnx]'."
    assert result.stderr == f"rotopath: {message}\n"
    assert list(tmp_path.iterdir()) == []
