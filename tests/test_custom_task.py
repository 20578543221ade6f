"""A new kind of task and a user's network: defined in this file only, they work with every command."""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.nn.functional as F
from drawn_slides import DrawnSlide, draw_slide
from layouts import write_csv, write_image
from torch import Tensor, nn
from typer.testing import CliRunner, Result

from rotopath.cli import app
from rotopath.data import Sample
from rotopath.data.sampling import CenterSampler, Ints, Sampler, SamplerSettings, Windows
from rotopath.images.geojson import SlideObject, read_geojson
from rotopath.images.outlines import Point
from rotopath.inference.tiling import Grid, Run, Tile
from rotopath.tasks import Task, TrainingWindow
from rotopath.tasks.task import Evidence, Loss, Map, Scores, check_numbers

pytestmark = pytest.mark.slow

QUICK = {"epochs": 1, "steps": 3, "validation_steps": 1, "accelerator": "cpu", "cache": "memory"}


def darkness_network(outputs: int, width: int = 4) -> nn.Module:
    """Return a user's network, fully convolutional: it reads windows of 20 px and has an output every 2 px."""
    return nn.Sequential(
        nn.Conv2d(3, width, 5, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, width, 7),
        nn.ReLU(),
        nn.Conv2d(width, outputs, 1),
        nn.AvgPool2d(2, 1),
    )


class Darkness(Task):
    """A fourth kind of task: predict how dark a window is, from 0 to 1."""

    kind = "darkness"
    annotated = "labels"
    score_name = "closeness"
    default_network = "test_custom_task:darkness_network"
    prediction_type = "window"

    @property
    def outputs(self) -> int:
        return 1

    @property
    def output_names(self) -> tuple[str, ...]:
        return ("darkness",)

    @classmethod
    def find_classes(cls, dataset: object) -> tuple[str, ...]:
        del dataset
        return ("dark",)

    def read_darkness(self, sample: Sample) -> float:
        return float(sample.label or "nan")

    def image_targets(self, samples: Sequence[Sample]) -> Ints:
        return np.array([round(1000 * self.read_darkness(sample)) for sample in samples], np.int64)

    def make_sampler(
        self, samples: Sequence[Sample], settings: SamplerSettings, window: TrainingWindow, mined: Ints | None
    ) -> Sampler:
        del window, mined
        targets = self.image_targets(samples)
        return RepeatedSampler(CenterSampler(targets, settings.sizes_px, settings.window_px, settings.batch))

    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        del samples
        return lambda logits, targets: F.mse_loss(logits.flatten(1).mean(dim=1).sigmoid(), targets / 1000)

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 1 - (logits.flatten(1).mean(dim=1).sigmoid() - targets / 1000).abs().double().mean()

    def select_training_subset(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        del seed
        return tuple(samples[: int(amount)])

    def collect_evidence(self, prediction: Any, sample: Sample) -> Evidence:
        return sample.name, self.read_darkness(sample), float(np.ravel(prediction)[0])

    def choose_operating_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        del rule
        return {"threshold": float(np.median([predicted for *_, predicted in evidence]))}

    def check_operating_point(self, point: Mapping[str, object]) -> dict[str, float]:
        return check_numbers(point, {"threshold": (0.0, 1.0)})

    def score(self, evidence: Sequence[Evidence], point: Mapping[str, float], rule: str | None = None) -> Scores:
        del rule
        errors = {name: abs(truth - predicted) for name, truth, predicted in evidence}
        return {**point, "closeness": 1 - float(np.mean(list(errors.values()))), "errors": errors}

    @classmethod
    def score_terms(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return {name: (1 - error, 1.0) for name, error in scores["errors"].items()}

    def make_object_finder(self, grid: Grid, point: Mapping[str, float], folder: Path) -> "DarkestFinder":
        del point, folder
        return DarkestFinder(self, grid)

    def class_maps(self, maps: Map) -> Map:
        return maps

    @property
    def background_probabilities(self) -> tuple[float, ...]:
        return (0.0,)

    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        del areas_mm2, tissue_mm2
        return {"objects": counts["dark"]}

    def describe_summary(self, summary: Mapping[str, float]) -> str:
        return f"the darkest of {summary['tissue_mm2']:.2f} mm²"


class RepeatedSampler:
    """Repeats the steps of a sampler."""

    def __init__(self, sampler: CenterSampler) -> None:
        self._sampler = sampler

    def draw(self, step: int) -> Windows:
        return self._sampler.draw(step % len(self._sampler))


class DarkestFinder:
    """Finds the darkest position of a slide."""

    def __init__(self, task: Task, grid: Grid) -> None:
        self._task, self._grid = task, grid
        self._map = np.zeros(grid.size, np.float32)

    def find(self, tiles: Iterable[Tile], run: Run = map) -> Iterator[SlideObject]:
        del run
        for tile in tiles:
            self._map[slice(*tile.rows), slice(*tile.columns)] = tile.probabilities[0][tile.core]
        row, column = np.unravel_index(int(self._map.argmax()), self._map.shape)
        (top, left), side = self._grid.output_frame(int(row), int(column))
        dark = self._task.classes[0]
        yield SlideObject(Point(top + side / 2, left + side / 2), "annotation", dark.name, dark.color)


def call(*words: object) -> Result:
    """Run a command of rotopath."""
    return CliRunner().invoke(app, list(map(str, words)))


def write_recipe(path: Path, **keys: object) -> Path:
    """Write a recipe for a short training."""
    values = QUICK | keys
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items() if not isinstance(value, dict)]
    for name, table in values.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def slide(tmp_path_factory: pytest.TempPathFactory) -> DrawnSlide:
    return draw_slide(tmp_path_factory.mktemp("slide") / "slide.tif", (800, 1000), ((100, 150, 512),))


@pytest.fixture
def shades(tmp_path: Path) -> Path:
    """Return a manifest of gray patches, labeled with how dark they are."""
    generator = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = [("image", "label", "split", "spacing")]
    for split in ("train", "valid", "test"):
        for i in range(8):
            dark = generator.uniform(0.1, 0.9)
            image = np.full((24, 24, 3), round(255 * (1 - dark)), np.uint8)
            write_image(tmp_path / "shades" / f"{split}{i}.png", image)
            rows.append((f"{split}{i}.png", f"{dark:.3f}", split, 0.5))
    return write_csv(tmp_path / "shades" / "manifest.csv", rows)


def test_a_fourth_kind_and_a_users_network_work_with_every_command(
    shades: Path, slide: DrawnSlide, tmp_path: Path
) -> None:
    """Train, evaluate, predict a slide, export, and report, without any change in rotopath."""
    recipe = write_recipe(
        tmp_path / "darkness.toml",
        task="test_custom_task:Darkness",
        data=str(shades),
        spacing_um_px=0.5,
        window_px=20,
        orientations=4,
        batch=8,
        epochs=3,
        steps=40,
        schedule="cosine",
        optimiser="adamw",
        network_options={"width": 6},
    )
    folder = tmp_path / "study" / "darkness" / "N4-seed0"
    trained = call("train", recipe, "--out", folder)
    assert trained.exit_code == 0, trained.output
    model = json.loads((folder / "model.json").read_text())
    assert model["task"]["kind"] == "test_custom_task:Darkness"
    assert model["network"]["name"] == "test_custom_task:darkness_network"
    assert model["network"]["options"] == {"width": 6}

    evaluated = call("evaluate", folder, "--robustness")
    assert evaluated.exit_code == 0, evaluated.output
    scores = json.loads((folder / "evaluation-test.json").read_text())["test"]
    assert scores["closeness"] > 0.8, "always predicting a mean gray has an error of a fifth"
    assert scores["rotation"]["fair"]["deviation"] < 0.01

    predicted = call("predict", folder, slide.path, "--out", tmp_path / "out")
    assert predicted.exit_code == 0, predicted.output
    assert "the darkest of" in predicted.output
    (detected,) = read_geojson(tmp_path / "out" / "slide.tif" / "objects.geojson")
    assert isinstance(detected.shape, Point)
    assert min(np.hypot(*(np.array(mark) - detected.shape)) for mark in slide.marks) < 16, "on one of the dark marks"

    exported = call("export", folder, "--to", "onnx", "--out", tmp_path / "export")
    assert exported.exit_code == 0, exported.output
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["class_names"] == ["darkness"]

    reported = call("study", "report", tmp_path / "study")
    assert reported.exit_code == 0, reported.output
    page = (tmp_path / "study" / "report" / "report.html").read_text()
    assert "closeness" in page


def test_unknown_kinds_and_unfit_networks_are_refused(shades: Path, tmp_path: Path) -> None:
    for keys, sentence in (
        ({"task": "clasify"}, "There is no task 'clasify'; did you mean 'classify'?"),
        ({"task": "test_custom_task:nothing"}, "has no 'nothing'"),
        ({"task": "no_such_module:Kind"}, "cannot be imported"),
        ({"task": "test_custom_task:darkness_network"}, "is not a subclass of rotopath.tasks.Task"),
        ({"task": "classify", "network": "resnet19"}, "There is no network 'resnet19'; did you mean 'resnet18'?"),
        ({"task": "classify", "network": "os:system"}, "has no parameter 'outputs'"),
        (
            {"task": "classify", "network": "test_custom_task:darkness_network"},
            "does not specify the size of its windows",
        ),
        ({"task": "classify", "network": "resnet18", "network_options": {"with": 8}}, "has no option 'with'"),
    ):
        refused = call(
            "train", write_recipe(tmp_path / "bad.toml", data=str(shades), **keys), "--out", tmp_path / "run"
        )
        assert refused.exit_code == 2, (keys, refused.output)
        assert sentence in " ".join(refused.output.split()), refused.output
        assert not (tmp_path / "run").exists()
