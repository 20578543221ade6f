"""The house is open: a kind of task and a network that only this file knows go through every command.

And what the three kinds do with several classes and with other people's networks, from data to report.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from drawn_slides import DrawnSlide, draw_slide
from layouts import write_csv, write_image
from torch import Tensor, nn
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath.cli import app
from rotopath.data import DataError, Sample
from rotopath.data.sampling import Ints, MiddleWindows, Sampler
from rotopath.images.geojson import OperatingPoint, SlideObject, read_geojson
from rotopath.inference.slide_pass import Grid, Tile
from rotopath.models.protocols import make_dense
from rotopath.tasks import Frame, Task
from rotopath.tasks.task import Evidence, Loss, Map, Scores, expect_numbers

QUICK = {"epochs": 1, "steps": 3, "validation_steps": 1, "accelerator": "cpu", "cache": "memory"}


def darkness_network(outputs: int, width: int = 4) -> nn.Module:
    """A user's own network, plain and fully convolutional: it sees windows of 20 px, every 2 px."""
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
    """The fourth kind: a number from 0 to 1 for each window, how dark it is."""

    kind = "darkness"
    annotated = "labels"
    score_name = "closeness"
    default_network = "test_open_house:darkness_network"
    answers = "window"

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

    def truth(self, sample: Sample) -> float:
        return float(sample.label or "nan")

    def labels(self, samples: Sequence[Sample]) -> Ints:
        return np.array([round(1000 * self.truth(sample)) for sample in samples], np.int64)

    def make_sampler(
        self, samples: Sequence[Sample], sizes_px: Ints, frame: Frame, batch: int, seed: int, mined: Ints | None
    ) -> Sampler:
        del seed, mined
        whole = MiddleWindows(self.labels(samples), sizes_px, frame.window_px, batch)

        class Again:
            def places(self, step: int) -> Any:
                return whole.places(step % len(whole))

        return Again()

    def make_loss(self, samples: Sequence[Sample]) -> Loss:
        del samples
        return lambda logits, targets: F.mse_loss(logits.flatten(1).mean(dim=1).sigmoid(), targets / 1000)

    def accuracy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return 1 - (logits.flatten(1).mean(dim=1).sigmoid() - targets / 1000).abs().double().mean()

    def take_regime(self, samples: Sequence[Sample], amount: float, seed: int) -> tuple[Sample, ...]:
        del seed
        return tuple(samples[: int(amount)])

    def examine(self, prediction: Any, sample: Sample) -> Evidence:
        return sample.name, self.truth(sample), float(np.ravel(prediction)[0])

    def choose_point(self, evidence: Sequence[Evidence], rule: str | None = None) -> dict[str, float]:
        del rule
        return {"threshold": float(np.median([predicted for *_, predicted in evidence]))}

    def check_point(self, point: Mapping[str, object]) -> dict[str, float]:
        return expect_numbers(point, {"threshold": (0.0, 1.0)})

    def score(self, evidence: Sequence[Evidence], point: Mapping[str, float], rule: str | None = None) -> Scores:
        del rule
        errors = {name: abs(truth - predicted) for name, truth, predicted in evidence}
        return {**point, "closeness": 1 - float(np.mean(list(errors.values()))), "errors": errors}

    @classmethod
    def tally(cls, scores: Mapping[str, Any]) -> dict[str, tuple[float, float]]:
        return {name: (1 - error, 1.0) for name, error in scores["errors"].items()}

    def make_finder(self, grid: Grid, point: Mapping[str, float], folder: Path) -> "DarkestFinder":
        del point, folder
        return DarkestFinder(self, grid)

    def class_maps(self, maps: Map) -> Map:
        return maps

    @property
    def nothing(self) -> tuple[float, ...]:
        return (0.0,)

    def summarise(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]:
        del areas_mm2, tissue_mm2
        return {"objects": counts["dark"]}

    def describe(self, summary: Mapping[str, float]) -> str:
        return f"the darkest of {summary['tissue_mm2']:.2f} mm²"


class DarkestFinder:
    """Where the answer is the highest."""

    def __init__(self, task: Task, grid: Grid) -> None:
        self._task, self._grid = task, grid
        self._map = np.zeros(grid.size, np.float32)

    def take(self, tile: Tile) -> Iterator[SlideObject]:
        self._map[slice(*tile.rows), slice(*tile.columns)] = tile.probabilities[0][tile.core]
        yield from ()

    def finish(self) -> Iterator[SlideObject]:
        row, column = np.unravel_index(int(self._map.argmax()), self._map.shape)
        (top, left), side = self._grid.output_frame(int(row), int(column))
        each = self._task.classes[0]
        yield SlideObject(OperatingPoint(top + side / 2, left + side / 2), "annotation", each.name, each.color)


def call(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def write_recipe(path: Path, **keys: object) -> Path:
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
    """Patches of grey, each with how dark it is."""
    generator = np.random.default_rng(0)
    rows: list[tuple[object, ...]] = [("image", "label", "split", "spacing")]
    for split in ("train", "valid", "test"):
        for i in range(8):
            dark = generator.uniform(0.1, 0.9)
            image = np.full((24, 24, 3), round(255 * (1 - dark)), np.uint8)
            write_image(tmp_path / "shades" / f"{split}{i}.png", image)
            rows.append((f"{split}{i}.png", f"{dark:.3f}", split, 0.5))
    return write_csv(tmp_path / "shades" / "manifest.csv", rows)


def test_a_fourth_kind_and_a_network_of_ones_own(shades: Path, slide: DrawnSlide, tmp_path: Path) -> None:
    """Trained, evaluated, run over a slide, exported and reported, and nothing in src knows of them."""
    recipe = write_recipe(
        tmp_path / "darkness.toml",
        task="test_open_house:Darkness",
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
    assert model["task"]["kind"] == "test_open_house:Darkness"
    assert model["network"]["name"] == "test_open_house:darkness_network"
    assert model["network"]["options"] == {"width": 6}

    evaluated = call("evaluate", folder, "--robustness")
    assert evaluated.exit_code == 0, evaluated.output
    scores = json.loads((folder / "evaluation-test.json").read_text())["test"]
    assert scores["closeness"] > 0.8, "a mean grey would be off by a fifth"
    assert scores["rotation"]["fair"]["deviation"] < 0.01

    predicted = call("predict", folder, slide.path, "--out", tmp_path / "out")
    assert predicted.exit_code == 0, predicted.output
    assert "the darkest of" in predicted.output
    (found,) = read_geojson(tmp_path / "out" / "slide.tif" / "objects.geojson")
    assert isinstance(found.shape, OperatingPoint)
    assert min(np.hypot(*(np.array(mark) - found.shape)) for mark in slide.marks) < 16, "on one of the dark marks"

    exported = call("export", folder, "--to", "onnx", "--out", tmp_path / "export")
    assert exported.exit_code == 0, exported.output
    config = json.loads((tmp_path / "export" / "config.json").read_text())
    assert config["class_names"] == ["darkness"]

    reported = call("study", "report", tmp_path / "study")
    assert reported.exit_code == 0, reported.output
    page = (tmp_path / "study" / "report" / "report.html").read_text()
    assert "closeness" in page


def test_an_unknown_kind_and_an_unfit_function_are_refused(shades: Path, tmp_path: Path) -> None:
    for keys, sentence in (
        ({"task": "clasify"}, "There is no task 'clasify'; did you mean 'classify'?"),
        ({"task": "test_open_house:nothing"}, "has no 'nothing'"),
        ({"task": "no_such_module:Kind"}, "cannot be imported"),
        ({"task": "test_open_house:darkness_network"}, "is no class of rotopath.tasks.Task"),
        ({"task": "classify", "network": "resnet19"}, "There is no network 'resnet19'; did you mean 'resnet18'?"),
        ({"task": "classify", "network": "os:system"}, "has no parameter 'outputs'"),
        ({"task": "classify", "network": "test_open_house:darkness_network"}, "does not say the side of its windows"),
        ({"task": "classify", "network": "resnet18", "network_options": {"with": 8}}, "has no option 'with'"),
    ):
        refused = call(
            "train", write_recipe(tmp_path / "bad.toml", data=str(shades), **keys), "--out", tmp_path / "run"
        )
        assert refused.exit_code == 2, (keys, refused.output)
        assert sentence in " ".join(refused.output.split()), refused.output
        assert not (tmp_path / "run").exists()


# Patches of three classes, by a converted ResNet


STRIPES, DOTS, PLAIN = "stripes", "dots", "plain"


def draw_patch(name: str, generator: np.random.Generator, size: int = 64) -> np.ndarray:
    """Tissue-coloured, with stripes, dots or nothing on it."""
    rows, columns = np.mgrid[:size, :size]
    image = np.full((size, size, 3), (220, 150, 190), np.float64) + generator.normal(0, 4, (size, size, 3))
    if name == STRIPES:
        angle = generator.uniform(0, np.pi)
        wave = np.sin((rows * np.cos(angle) + columns * np.sin(angle)) * 2 * np.pi / 12)
        image -= 90 * (wave > 0.3)[..., None]
    if name == DOTS:
        for _ in range(10):
            row, column = generator.uniform(0, size, 2)
            image -= 90 * (np.hypot(rows - row, columns - column) < 4)[..., None]
    return image.clip(0, 255).astype(np.uint8)


@pytest.fixture(scope="module")
def patches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("patches")
    generator = np.random.default_rng(1)
    for split, count in (("train", 12), ("valid", 6), ("test", 6)):
        for name in (STRIPES, DOTS, PLAIN):
            for i in range(count):
                write_image(root / split / name / f"{i}.png", draw_patch(name, generator))
    return root


@pytest.fixture(scope="module")
def striped_slide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The left half has stripes, the right half dots, on glass."""
    import tifffile

    generator = np.random.default_rng(2)
    image = np.full((512, 768, 3), 244, np.uint8)
    for row in range(128, 384, 64):
        for column in range(128, 640, 64):
            name = STRIPES if column < 384 else DOTS
            image[row : row + 64, column : column + 64] = draw_patch(name, generator)
    path = tmp_path_factory.mktemp("striped") / "striped.tif"
    tifffile.imwrite(
        path, image, photometric="rgb", tile=(256, 256), resolution=(1e4, 1e4), resolutionunit="CENTIMETER"
    )
    return path


def test_a_resnet_of_three_classes(patches: Path, striped_slide: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "stripes.toml",
        task="classify",
        data=str(patches),
        data_spacing_um_px=1.0,
        network="resnet18",
        orientations=4,
        window_px=64,
        stride_px=32,
        batch=12,
        epochs=2,
        steps=20,
        schedule="cosine",
        optimiser="adamw",
        learning_rate=0.003,
        network_options={"width": 8},
    )
    folder = tmp_path / "run"
    trained = call("train", recipe, "--out", folder)
    assert trained.exit_code == 0, trained.output
    assert rp.recipe.read_recipe(folder / "recipe.toml").classes == (DOTS, PLAIN, STRIPES)
    evaluated = call("evaluate", folder)
    assert evaluated.exit_code == 0, evaluated.output
    scores = json.loads((folder / "evaluation-test.json").read_text())["test"]
    assert scores["accuracy"] > 0.7
    assert scores["balanced_accuracy"] == pytest.approx(scores["accuracy"]), "as many of each class"
    assert scores["auc"] > 0.8
    confusion = np.array(scores["confusion"]["rows_are_truth"])
    assert confusion.sum(axis=1).tolist() == [6, 6, 6]
    assert np.trace(confusion) == round(18 * scores["accuracy"])
    assert set(scores["classes"]) == {DOTS, PLAIN, STRIPES}
    assert "stripes: recall" in evaluated.output

    predicted = call("predict", folder, striped_slide, "--out", tmp_path / "out")
    assert predicted.exit_code == 0, predicted.output
    summary = json.loads((tmp_path / "out" / striped_slide.name / "summary.json").read_text())
    assert summary["stripes_share"] > 0.2
    assert summary["dots_share"] > 0.2
    areas = sum(summary[f"{name}_mm2"] for name in (STRIPES, DOTS, PLAIN))
    assert areas < 1.2 * summary["tissue_mm2"], "glass is none of the classes; outputs are cells of 32 µm"
    objects = read_geojson(tmp_path / "out" / striped_slide.name / "objects.geojson")
    for name, left, right in ((STRIPES, 0, 420), (DOTS, 348, 768)):
        largest = max(
            (each for each in objects if each.class_name == name), key=lambda each: each.measurements["area_mm2"]
        )
        assert not isinstance(largest.shape, OperatingPoint)
        columns = np.concatenate([polygon.outer for polygon in largest.shape])[:, 1]
        assert left < np.median(columns) < right, name

    export = rp.export(folder, "onnx", tmp_path / "export")  # which compares the two to 1e-4
    import onnxruntime

    session = onnxruntime.InferenceSession(str(export / "model.onnx"))
    images = torch.rand(5, 3, 64, 64)
    run = rp.load(folder)
    expected = run.network.module(images).detach().numpy()  # type: ignore[attr-defined]
    assert np.allclose(session.run(None, {"image": images.numpy()})[0], expected, atol=1e-4)
    frozen = rp.freeze(run.network.module)  # type: ignore[attr-defined]
    assert np.allclose(frozen(images).detach().numpy(), expected, atol=1e-4)
    assert rp.equivariance_error(run.network.module, images) < 1e-4  # type: ignore[attr-defined]
    script = call("export", folder, "--to", "torchscript", "--out", tmp_path / "script")
    assert script.exit_code == 0, script.output
    config = json.loads((tmp_path / "script" / "config.json").read_text())
    assert (config["spec_version"], config["class_names"]) == ("1.0", [DOTS, PLAIN, STRIPES])


def test_from_python_the_same(patches: Path, tmp_path: Path) -> None:
    recipe = QUICK | {
        "task": "classify",
        "data": str(patches),
        "data_spacing_um_px": 1.0,
        "network": "test_open_house:darkness_network",
        "window_px": 20,
        "orientations": 1,
        "classes": [STRIPES, DOTS, PLAIN],
        "colors": ["#ff0000", "#00ff00", "#0000ff"],
        "batch": 6,
    }
    run = rp.train(recipe, tmp_path / "run")
    assert repr(run) == (
        f"Run('{tmp_path / 'run'}': classify by test_open_house:darkness_network, N=1, classes stripes, dots, plain)"
    )
    assert run.task.colors == ((255, 0, 0), (0, 255, 0), (0, 0, 255))
    found = rp.evaluate(run, split="valid", robustness=True)
    assert found.path == tmp_path / "run" / "evaluation-valid.json"
    assert 0 <= found.scores["accuracy"] <= 1
    image = draw_patch(DOTS, np.random.default_rng(5), 128)
    result = run.predict(image, spacing_um_px=1.0, everywhere=True)
    assert result.map.shape == (64, 64), "an answer every 2 px"
    write_image(tmp_path / "images" / "a.png", image)
    (outcome,) = rp.predict(run, tmp_path / "images", tmp_path / "out", spacing_um_px=1.0)
    assert outcome.state == "done"


# Typed objects


CLASSES = {"round": (70, 40, 110), "long": (110, 60, 70)}


def draw_objects(generator: np.random.Generator, size: int = 96) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Tissue with round violet and long red nuclei that do not touch."""
    rows, columns = np.mgrid[:size, :size]
    image = np.full((size, size, 3), (225, 170, 200), np.float64) + generator.normal(0, 3, (size, size, 3))
    labels, classes = np.zeros((size, size), np.uint16), {}
    for row in range(12, size - 8, 24):
        for column in range(12, size - 8, 24):
            name = str(generator.choice(list(CLASSES)))
            angle = generator.uniform(0, np.pi)
            along = (rows - row) * np.cos(angle) + (columns - column) * np.sin(angle)
            across = (columns - column) * np.cos(angle) - (rows - row) * np.sin(angle)
            axes = (7, 7) if name == "round" else (10, 4)
            inside = (along / axes[0]) ** 2 + (across / axes[1]) ** 2 < 1
            number = len(classes) + 1
            labels[inside], classes[number] = number, name
            image[inside] = CLASSES[name]
    return image.clip(0, 255).astype(np.uint8), labels, classes


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of label maps, each with a table of classes beside it, and one of points."""
    root = tmp_path_factory.mktemp("typed")
    generator = np.random.default_rng(3)
    objects: list[tuple[object, ...]] = [("image", "annotation", "group", "split", "spacing")]
    points = list(objects)
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        for i in range(count):
            name = f"{split}{i}"
            image, labels, classes = draw_objects(generator)
            write_image(root / "images" / f"{name}.png", image)
            write_image(root / "labels" / f"{name}.png", labels)
            write_csv(root / "labels" / f"{name}.csv", [("object", "class"), *classes.items()])
            middles = [(*np.argwhere(labels == number).mean(axis=0).round(1), kind) for number, kind in classes.items()]
            write_csv(root / "points" / f"{name}.csv", [("row", "column", "class"), *middles])
            objects.append((f"images/{name}.png", f"labels/{name}.png", name, split, 0.25))
            points.append((f"images/{name}.png", f"points/{name}.csv", name, split, 1.0))
    write_csv(root / "points.csv", points)
    write_csv(root / "manifest.csv", objects)
    return root


def test_typed_nuclei_from_data_to_slide(typed: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "typed.toml",
        task="segment",
        data=str(typed),
        network="nuclei",
        orientations=4,
        batch=8,
        epochs=2,
        steps=30,
        schedule="cosine",
        optimiser="adamw",
        learning_rate=0.01,
    )
    checked = call("data", "check", typed)
    assert checked.exit_code == 0, checked.output
    assert "round" in checked.output
    folder = tmp_path / "run"
    trained = call("train", recipe, "--out", folder)
    assert trained.exit_code == 0, trained.output
    run = rp.load(folder)
    assert run.task.class_names == ("long", "round")
    assert run.task.output_names == ("inside", "border", "background", "long", "round")
    scores = rp.evaluate(run).scores
    assert scores["f1"] > 0.6
    assert scores["classes"].keys() == {"long", "round"}
    for name in ("long", "round"):
        assert scores["classes"][name]["f1"] > 0.4, name
        assert 0 < scores["classes"][name]["pq"] < scores["classes"][name]["f1"]
    assert scores["macro_pq"] == pytest.approx(np.mean([each["pq"] for each in scores["classes"].values()]))

    image, labels, classes = draw_objects(np.random.default_rng(9))
    result = run.predict(image, spacing_um_px=0.25)
    right = 0
    for each in result.objects:
        assert not isinstance(each.shape, OperatingPoint)
        row, column = np.concatenate([polygon.outer for polygon in each.shape]).mean(axis=0).astype(int)
        right += classes.get(int(labels[row, column])) == each.class_name
    assert right > len(classes) / 2
    assert {each.color for each in result.objects} <= set(run.task.colors)
    assert result.summary["long"] + result.summary["round"] == result.summary["objects"]
    exported = call("export", folder, "--to", "onnx", "--out", tmp_path / "export")
    assert exported.exit_code == 0, exported.output


def test_detection_of_several_classes(typed: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "points.toml",
        task="detect",
        data=str(typed / "points.csv"),
        spacing_um_px=1.0,  # at which 7.5 µm, within which a detection is a hit, are no more than a nucleus
        network="test_open_house:darkness_network",
        window_px=20,
        orientations=4,
        batch=32,
        epochs=2,
        steps=60,
        schedule="cosine",
        optimiser="adamw",
        learning_rate=0.01,
        network_options={"width": 8},
    )
    folder = tmp_path / "run"
    trained = call("train", recipe, "--out", folder)
    assert trained.exit_code == 0, trained.output
    run = rp.load(folder)
    assert run.task.output_names == ("long", "round", "other")
    assert set(run.point) == {"threshold long", "threshold round"}
    scores = rp.evaluate(run, rule="one-to-one").scores
    assert scores["classes"].keys() == {"long", "round"}
    assert scores["macro_f1"] == pytest.approx(np.mean([each["f1"] for each in scores["classes"].values()]))
    assert scores["hits"] == sum(each["hits"] for each in scores["classes"].values())
    assert scores["f1"] > 0.4
    image, _, classes = draw_objects(np.random.default_rng(9))
    result = run.predict(image, spacing_um_px=1.0)
    assert {each.class_name for each in result.objects} <= {"long", "round"}
    assert 0 < len(result.objects) < 3 * len(classes)


def test_one_class_of_typed_data(typed: Path, tmp_path: Path) -> None:
    """Naming one class finds that one only: the other is background."""
    run = rp.train(
        QUICK | {"task": "nuclei", "data": str(typed), "classes": ["round"], "stain": "none", "orientations": 1},
        tmp_path / "run",
    )
    assert run.task.outputs == 3
    sample = rp.data.open_data(typed).samples[0]
    labels, _ = run.task.read_objects(sample)  # type: ignore[attr-defined]
    kinds = rp.data.annotations.read_objects(sample, 0.25).classes  # type: ignore[attr-defined]
    assert set(np.unique(labels[labels > 0]).tolist()) == {number for number, kind in kinds.items() if kind == "round"}


def test_objects_without_a_class_are_refused_where_classes_are_needed(typed: Path, tmp_path: Path) -> None:
    for path in (typed / "images").glob("train*.png"):
        write_image(tmp_path / path.name, np.array(rp.images.read_rgb(path)))
    labels = np.zeros((96, 96), np.uint16)
    labels[10:20, 10:20] = 4
    write_image(tmp_path / "map.png", labels)
    rows = [("image", "annotation", "split", "spacing"), ("train0.png", "map.png", "train", 0.25)]
    write_csv(tmp_path / "manifest.csv", [*rows, ("train1.png", "map.png", "valid", 0.25)])
    recipe = QUICK | {"task": "segment", "data": str(tmp_path), "classes": ["a", "b"], "orientations": 1}
    with pytest.raises(DataError, match=r"train0.png has an object without a class, but the task has the classes a, b"):
        rp.train(recipe, tmp_path / "run")


@pytest.mark.parametrize("orientations", [1, 4])
def test_a_measured_geometry_gives_the_same_answers_in_tiles(orientations: int) -> None:
    """A padded U-Net: near the edge of a tile outputs differ, and the measured rim covers that."""
    torch.manual_seed(0)
    module = rp.models.build_network("unet", 3, orientations, {"width": 4, "depth": 3}).eval()
    network = make_dense(module, 3, 32)
    image = np.random.default_rng(0).integers(0, 256, (150, 170, 3), np.uint8)
    whole = rp.inference.predict(network, image, torch.device("cpu"), tile_px=1024)
    tiled = rp.inference.predict(network, image, torch.device("cpu"), tile_px=80)
    assert np.allclose(whole.probabilities, tiled.probabilities, atol=1e-5)
    narrow = type(network)(module, rp.models.Geometry(3, 4, 4, 1, rim=2))  # type: ignore[call-arg]
    wrong = rp.inference.predict(narrow, image, torch.device("cpu"), tile_px=80)
    assert not np.allclose(whole.probabilities, wrong.probabilities, atol=1e-5), "and a smaller one would not"
