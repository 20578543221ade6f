"""Pretrained models: complete, small, without paths, with correct cards; chosen by validation, never by test."""

import hashlib
import json
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from publish import MAX_WEIGHTS_BYTES, publish
from safetensors.torch import load_file
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath import pretrained, runs
from rotopath.cli import app
from rotopath.inference import predict
from rotopath.model_file import MODEL, WEIGHTS, RunError, pack_weights, write_model
from rotopath.recipe import format_recipe, list_recipes, make_recipe
from rotopath.writing import write_bytes, write_json, write_text

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
FILES = {runs.RECIPE, WEIGHTS, MODEL, runs.METRICS, runs.PROVENANCE, pretrained.CARD}
SECTIONS = ["Use", "Data and its terms", "Recipe", "Scores", "Limits"]
A_PATH = re.compile(r"(?<![\w/.])(?:/\w+/|~/|[A-Za-z]:[\\/])|\b(?:runs|data|home)/")
each_model = pytest.mark.parametrize("name", pretrained.list_pretrained())


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "80"})


def list_files() -> list[Path]:
    """Return the files of all pretrained models of the package."""
    return sorted(path for name in pretrained.list_pretrained() for path in (pretrained.HOME / name).iterdir())


def test_there_is_a_pretrained_model_for_each_task() -> None:
    assert {"tumor-pcam-n8", "mitosis-amida13-n8", "nuclei-kumar-n8"} == set(pretrained.list_pretrained())


@each_model
def test_a_pretrained_model_loads_from_any_folder_and_predicts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = rp.load(name)
    assert (run.network.orientations, run.network.training) == (8, False)
    assert name == f"{run.recipe.task}-{name.split('-')[1]}-n8"
    image = np.random.default_rng(0).integers(0, 256, (124, 124, 3), np.uint8)
    upright = predict(run.network, image, torch.device("cpu")).probabilities
    rotated = predict(run.network, np.rot90(image).copy(), torch.device("cpu")).probabilities
    assert np.isfinite(upright).all()
    assert 0 <= upright.min() < upright.max() <= 1
    np.testing.assert_allclose(np.rot90(upright, axes=(1, 2)), rotated, atol=1e-5)
    assert list(tmp_path.iterdir()) == []


@each_model
def test_a_pretrained_model_is_small_and_contains_no_paths(name: str) -> None:
    folder = pretrained.HOME / name
    assert {path.name for path in folder.iterdir()} == FILES
    assert (folder / WEIGHTS).stat().st_size <= MAX_WEIGHTS_BYTES
    for written in FILES - {WEIGHTS}:
        assert not A_PATH.search((folder / written).read_text(encoding="utf-8")), written
    assert "path" not in json.loads((folder / runs.PROVENANCE).read_text())["data"]


def test_paths_are_recognized() -> None:
    for path in ('"path": "/home/a"', 'data = "data/sample"', "~/x", 'C:\\x"', "in /tmp/a"):
        assert A_PATH.search(path), path
    assert not A_PATH.search('data = "Kumar/MoNuSeg", 0.25 µm/px')


@each_model
def test_the_model_card_is_complete_and_agrees_with_the_files(name: str) -> None:
    folder = pretrained.HOME / name
    card = (folder / pretrained.CARD).read_text(encoding="utf-8")
    data = json.loads((folder / runs.PROVENANCE).read_text())["data"]
    run = rp.load(name)
    assert card.startswith(f"# {name}\n")
    assert re.findall(r"^## (.+)$", card, flags=re.MULTILINE) == SECTIONS
    assert "not for clinical use" in card
    assert f"Terms: {data['terms']}." in card
    assert ("inherit the limits of the data" in card) == (not data["commercial"])
    assert f"| spacing | {run.task.spacing_um_px:g} µm/px |" in card
    geometry = run.network.geometry
    assert f"windows of {geometry.smallest_px} px, a prediction every {geometry.stride_px} px |" in card
    assert f"network, 8 orientations, {sum(weight.numel() for weight in run.network.parameters()):,} weights" in card
    score = run.task.score_name
    assert f" | {json.loads((folder / runs.METRICS).read_text())['test'][score]:.3f} (95 % interval " in card
    assert not re.search(r"[{}]|\bnan\b|None", card)
    weights = sum(tensor.numel() for key, tensor in load_file(folder / WEIGHTS).items() if key.endswith("weight"))
    assert weights > 10_000


@each_model
def test_the_docs_link_to_the_model_card(name: str) -> None:
    page = (ROOT / "docs" / "pretrained.md").read_text(encoding="utf-8")
    assert f"| `{name}` |" in page
    assert f"pretrained/{name}/{pretrained.CARD}" in page


@each_model
def test_the_seed_with_the_best_validation_score_is_published(name: str) -> None:
    about = json.loads((pretrained.HOME / name / runs.PROVENANCE).read_text())
    best = max(about["chosen"]["seeds"], key=lambda seed: seed["valid"])
    assert best["seed"] == about["seed"] == rp.load(name).recipe.seed


def test_the_wheel_contains_all_pretrained_models_and_recipes() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    for name in pretrained.list_pretrained():
        assert {f"rotopath/pretrained/{name}/{file}" for file in FILES} <= packed
    assert {f"rotopath/recipes/{name}.toml" for name in list_recipes()} <= packed
    assert not [path for path in packed if not path.startswith("rotopath/")]


# Known predictions, computed by commit 361604b from the same weights

KNOWN = {
    "mitosis-amida13-n8": (
        [0.084991, 0.435112, 0.999937, 0.161389, 0.996036, 0.000049, 0.943533, 0.009203, 0.000643, 0.003693],
        (22, 0.280227),
    ),
    "nuclei-kumar-n8": (
        [0.900509, 0.000898, 0.000027, 0.000757, 0.823863, 0.996417, 0.002678, 0.001828, 0.995822, 0.001680],
        (50, 0.151498),
    ),
    "tumor-pcam-n8": (
        [0.999211, 0.971489, 0.904054, 0.979693, 0.991250, 0.916150, 0.667286, 0.988221, 0.049819, 0.986843],
        (3, 0.621293),
    ),
}


def draw_tissue() -> np.ndarray:
    """Draw dark ellipses on pink, many on the left and few on the right, with integers only: the same everywhere."""
    height, width = 260, 380
    generator = np.random.default_rng(7)
    image = np.full((height, width, 3), (222, 178, 212), np.int64)
    rows, columns = np.mgrid[:height, :width]
    for number in range(70):
        right_edge = width if number < 20 else width // 3
        row, column, short, long = generator.integers([0, 0, 4, 6], [height, right_edge, 9, 15])
        tilt, dark = generator.integers([-3, 0], [4, 60])
        down, right = rows - row, columns - column
        along, across = 4 * right + tilt * down, 4 * down - tilt * right
        inside = (along * short) ** 2 + (across * long) ** 2 <= (16 + tilt**2) * (short * long) ** 2
        image[inside] = np.array([96, 62, 140]) - dark
    return np.clip(image + generator.integers(-12, 13, image.shape), 0, 255).astype(np.uint8)


def test_the_drawn_tissue_is_that_of_the_known_predictions() -> None:
    assert hashlib.sha256(draw_tissue().tobytes()).hexdigest().startswith("cad4d6e3fec5bbcf")


@each_model
def test_predictions_are_the_known_ones(name: str) -> None:
    run, image = rp.load(name), draw_tissue()
    wanted, (objects, mean) = KNOWN[name]
    maps = predict(run.network, image, torch.device("cpu")).probabilities
    outputs, height, width = maps.shape
    positions = [(7 * i % outputs, (5 * i + 3) * height // 55, (9 * i + 2) * width // 95) for i in range(10)]
    np.testing.assert_allclose([maps[where] for where in positions], wanted, rtol=0, atol=1e-5)
    result = run.predict(image, spacing_um_px=run.task.spacing_um_px, device="cpu")
    assert len(result.objects) == objects
    assert result.map.mean() == pytest.approx(mean, abs=1e-5)


def test_threads_that_use_one_model_at_once_have_the_known_predictions() -> None:
    """Also those that use it first, while it is frozen to a plain CNN."""
    name = "mitosis-amida13-n8"
    run, image = rp.load(name), draw_tissue()
    with ThreadPoolExecutor(4) as threads:
        predictions = [
            threads.submit(run.predict, image, spacing_um_px=run.task.spacing_um_px, device="cpu") for _ in range(4)
        ]
        results = [prediction.result() for prediction in predictions]
    _, (objects, mean) = KNOWN[name]
    for result in results:
        assert len(result.objects) == objects
        assert result.map.mean() == pytest.approx(mean, abs=1e-5)


# Names


def test_a_folder_has_precedence_over_a_pretrained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tumor-pcam-n8").mkdir()
    with pytest.raises(RunError, match="tumor-pcam-n8 contains no run"):
        rp.load("tumor-pcam-n8")


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("tumor-pcam", "did you mean tumor-pcam-n8?"),
        ("Tumor-PCam-N8", "did you mean"),
        ("zebra", "give the folder of a finished run or one of these names"),
    ],
)
def test_the_error_about_an_unknown_name_lists_the_pretrained_models(name: str, hint: str) -> None:
    with pytest.raises(RunError) as refused:
        rp.load(name)
    assert ", ".join(pretrained.list_pretrained()) in str(refused.value)
    assert hint in str(refused.value)


def test_the_models_command_lists_pretrained_models_before_networks() -> None:
    shown = command("models").stdout
    lines = [shown.index(name) for name in pretrained.list_pretrained()]
    assert max(lines) < shown.index("detects mitotic figures")
    assert "not commercial" in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert "pcam" not in command("models", "tumor").stdout


@each_model
def test_the_models_command_prints_a_model_card(name: str) -> None:
    shown = command("models", name)
    assert shown.exit_code == 0
    assert all(section in shown.stdout for section in SECTIONS)
    assert "Receptive field" not in shown.stdout


def test_evaluate_requires_data_and_export_does_not_change_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from layouts import pcam

    monkeypatch.chdir(tmp_path)
    before = list_files()
    refused = command("evaluate", "tumor-pcam-n8")
    assert refused.exit_code == 2
    assert "does not include its training data; give a dataset for the task tumor with --data." in refused.stderr
    evaluated = command("evaluate", "tumor-pcam-n8", "--data", str(pcam(tmp_path / "mine", (4, 4, 4))))
    assert evaluated.exit_code == 0, evaluated.stderr
    assert Path("runs/tumor-pcam-n8/evaluation-test-on-mine.json").exists()
    exported = command("export", "mitosis-amida13-n8", "--to", "torch")
    assert exported.exit_code == 0, exported.stderr
    place = Path("runs/mitosis-amida13-n8/export-torch")
    assert "not commercially" in (place / pretrained.CARD).read_text(encoding="utf-8"), (
        "the terms of use are exported with the weights"
    )
    assert json.loads((place / runs.PROVENANCE).read_text())["run"] == "mitosis-amida13-n8"
    assert list_files() == before


# Publishing

POINTS = {"detect": {"threshold": 0.5}, "segment": {"inside": 0.5, "background": 0.5, "least_px": 30}}


def make_run(part: Path, seed: int, valid: float, test: float, images: int = 1329, **keys: object) -> Path:
    recipe = make_recipe({"task": "mitosis"} | {"data": "/home/somebody/data", "seed": seed, "workers": 7, **keys})
    regime = "" if recipe.regime is None else f"-regime{recipe.regime:g}"
    folder = part / f"N{recipe.orientations}{regime}-seed{seed}"
    folder.mkdir(parents=True)
    scores = {"threshold": 0.5, "precision": 0.5}
    metrics = {
        "valid": {"f1": valid, "images": 126, **scores},
        "test": {"f1": test, "images": 608, "f1_interval": [test - 0.1, test + 0.1], **scores},
    }
    write_text(folder / runs.RECIPE, format_recipe(recipe))
    write_json(folder / runs.METRICS, metrics)
    about = {"source": "AMIDA13", "path": "/home/somebody/data", "images": images, "fingerprint": "f"}
    write_json(folder / runs.PROVENANCE, {"seed": seed, "data": about})
    network, task = runs.build(recipe), recipe.make_task()
    weights = pack_weights(network)
    write_model(folder, task, runs.describe_network(recipe, network), POINTS[task.kind], weights)
    write_bytes(folder / WEIGHTS, weights)
    return folder


def test_publishing_chooses_by_validation_and_never_by_test(tmp_path: Path) -> None:
    make_run(tmp_path / "part", seed=0, valid=0.70, test=0.99)
    best = make_run(tmp_path / "part", seed=1, valid=0.90, test=0.60)
    make_run(tmp_path / "part", seed=2, valid=0.80, test=0.75)
    (tmp_path / "part" / "N8-seed3").mkdir()  # not finished
    make_run(tmp_path / "part", seed=0, valid=0.99, test=0.99, orientations=4)
    make_run(tmp_path / "part", seed=0, valid=0.99, test=0.99, regime=4)
    place = publish(tmp_path / "part", tmp_path / "home")
    assert place == tmp_path / "home" / "mitosis-amida13-n8"
    assert {path.name for path in place.iterdir()} == FILES
    assert (place / WEIGHTS).read_bytes() == (best / WEIGHTS).read_bytes()
    card = (place / pretrained.CARD).read_text(encoding="utf-8")
    assert "| test F1 | 0.600 (95 % interval 0.500 to 0.700) |" in card
    assert "| test F1 over seeds | 0.780 ± 0.197 (mean and standard deviation of 3 seeds) |" in card
    assert "| 1 (this model) | 0.900 | 0.600 |" in card
    assert "595 fields for training,\n126 for validation, 608 for testing" in card
    written = "".join((place / name).read_text(encoding="utf-8") for name in FILES - {WEIGHTS})
    assert not A_PATH.search(written)
    run = rp.load(place)
    assert run.recipe.workers == 0
    assert run.info == rp.load(best).info
    assert run.info.weights_sha256 == hashlib.sha256((best / WEIGHTS).read_bytes()).hexdigest()


def test_publishing_accepts_runs_of_rotopath_0_1(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "part", seed=0, valid=0.7, test=0.8)
    info = rp.load(folder).info
    (folder / MODEL).unlink()
    write_json(folder / runs.OLD_POINT, dict(info.point))
    place = publish(tmp_path / "part", tmp_path / "home")
    assert {path.name for path in place.iterdir()} == FILES
    assert rp.load(place).info == info


def test_publishing_reports_too_few_cases_for_an_interval(tmp_path: Path) -> None:
    folder = make_run(tmp_path, seed=0, valid=0.7, test=0.8)
    metrics = json.loads((folder / runs.METRICS).read_text())
    metrics["test"]["f1_interval"] = None
    write_json(folder / runs.METRICS, metrics)
    card = (publish(tmp_path, tmp_path / "home") / pretrained.CARD).read_text(encoding="utf-8")
    assert "| test F1 | 0.800 (too few cases for an interval) |" in card


def test_publishing_supports_nuclei(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "part", seed=0, valid=0.7, test=0.8, task="nuclei", regime=3)
    metrics = json.loads((folder / runs.METRICS).read_text())
    for split, fields in (("valid", 4), ("test", 8)):
        metrics[split] |= {"images": {f"field {i}": {"f1": 0.5} for i in range(fields)}, "aji_plus": 0.5}
    write_json(folder / runs.METRICS, metrics)
    about = {"source": "Kumar/MoNuSeg", "path": "/home/somebody/data", "images": 24, "fingerprint": "f"}
    write_json(folder / runs.PROVENANCE, {"seed": 0, "data": about})
    place = publish(tmp_path / "part", tmp_path / "home")
    assert place.name == "nuclei-kumar-n8"
    card = (place / pretrained.CARD).read_text(encoding="utf-8")
    assert "12 fields\nfor training, 4 for validation, 8 for testing" in card
    assert "Terms: CC BY-NC-SA 4.0. **The weights inherit the limits of the data" in card
    assert "AJI+ 0.500" in card
    assert "stain normalized by Macenko's method" in card


def test_publishing_chooses_the_runs_with_the_most_training_data(tmp_path: Path) -> None:
    make_run(tmp_path, seed=0, valid=0.99, test=0.99, regime=2)
    best = make_run(tmp_path, seed=0, valid=0.7, test=0.7, regime=8)
    place = publish(tmp_path, tmp_path / "home")
    assert (place / WEIGHTS).read_bytes() == (best / WEIGHTS).read_bytes()
    assert "0.700 (a single seed)" in (place / pretrained.CARD).read_text(encoding="utf-8")


def test_publishing_refuses_missing_unknown_mixed_and_damaged_runs(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has no finished run with 8 orientations and all training data"):
        publish(tmp_path, tmp_path / "home")
    make_run(tmp_path / "other", seed=0, valid=0.7, test=0.7, images=99)
    with pytest.raises(SystemExit, match="has no entry for AMIDA13 with 99 images"):
        publish(tmp_path / "other", tmp_path / "home")
    make_run(tmp_path / "mixed", seed=0, valid=0.7, test=0.7)
    make_run(tmp_path / "mixed", seed=1, valid=0.7, test=0.7, steps=7)
    with pytest.raises(SystemExit, match="differ in more than their seed"):
        publish(tmp_path / "mixed", tmp_path / "home")
    make_run(tmp_path / "converted", seed=0, valid=0.7, test=0.7, network="resnet18", network_options={"width": 2})
    with pytest.raises(SystemExit, match="has the task 'mitosis' and the network 'resnet18', which no card describes"):
        publish(tmp_path / "converted", tmp_path / "home")
    weights = make_run(tmp_path / "damaged", seed=0, valid=0.7, test=0.7) / WEIGHTS
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RunError, match="was damaged or replaced"):
        publish(tmp_path / "damaged", tmp_path / "home")
    assert not (tmp_path / "home").exists()
