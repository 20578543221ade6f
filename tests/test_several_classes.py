"""Tasks with several classes, and converted and user-defined networks: from data to slides and exported models."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import write_csv, write_image
from test_custom_task import QUICK, call, write_recipe

import rotopath as rp
from rotopath.data import DataError
from rotopath.images.geojson import read_geojson
from rotopath.images.outlines import Point
from rotopath.models.protocols import make_dense

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing them would take minutes

# Patches of three classes, classified by a converted ResNet

STRIPES, DOTS, PLAIN = "stripes", "dots", "plain"


def draw_patch(name: str, generator: np.random.Generator, size: int = 64) -> np.ndarray:
    """Return a patch in the color of tissue, with stripes, dots or nothing on it."""
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
    """Return a slide whose tissue has stripes in the left half and dots in the right half."""
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


def test_three_classes_by_a_converted_resnet(patches: Path, striped_slide: Path, tmp_path: Path) -> None:
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
    assert areas < 1.2 * summary["tissue_mm2"], "glass is none of the classes; outputs are 32 µm apart"
    objects = read_geojson(tmp_path / "out" / striped_slide.name / "objects.geojson")
    for name, left, right in ((STRIPES, 0, 420), (DOTS, 348, 768)):
        largest = max(
            (region for region in objects if region.class_name == name),
            key=lambda region: region.measurements["area_mm2"],
        )
        assert not isinstance(largest.shape, Point)
        columns = np.concatenate([polygon.outer for polygon in largest.shape])[:, 1]
        assert left < np.median(columns) < right, name

    images = torch.rand(5, 3, 64, 64)
    run = rp.load(folder)
    expected = run.network.module(images).detach().numpy()  # type: ignore[attr-defined]
    frozen = rp.freeze(run.network.module)  # type: ignore[attr-defined]
    assert np.allclose(frozen(images).detach().numpy(), expected, atol=1e-4)
    assert rp.equivariance_error(run.network.module, images) < 1e-4  # type: ignore[attr-defined]
    script = call("export", folder, "--to", "torchscript", "--out", tmp_path / "script")
    assert script.exit_code == 0, script.output
    config = json.loads((tmp_path / "script" / "config.json").read_text())
    assert (config["spec_version"], config["class_names"]) == ("1.0", [DOTS, PLAIN, STRIPES])


def test_a_users_network_from_python(patches: Path, tmp_path: Path) -> None:
    recipe = QUICK | {
        "task": "classify",
        "data": str(patches),
        "data_spacing_um_px": 1.0,
        "network": "test_custom_task:darkness_network",
        "window_px": 20,
        "orientations": 1,
        "classes": [STRIPES, DOTS, PLAIN],
        "colors": ["#ff0000", "#00ff00", "#0000ff"],
        "batch": 6,
    }
    run = rp.train(recipe, tmp_path / "run")
    assert repr(run) == (
        f"Run('{tmp_path / 'run'}': classify by test_custom_task:darkness_network, N=1, classes stripes, dots, plain)"
    )
    assert run.task.colors == ((255, 0, 0), (0, 255, 0), (0, 0, 255))
    evaluation = rp.evaluate(run, split="valid", robustness=True)
    assert evaluation.path == tmp_path / "run" / "evaluation-valid.json"
    assert 0 <= evaluation.scores["accuracy"] <= 1
    image = draw_patch(DOTS, np.random.default_rng(5), 128)
    result = run.predict(image, spacing_um_px=1.0, everywhere=True)
    assert result.map.shape == (64, 64), "an output every 2 px"
    write_image(tmp_path / "images" / "a.png", image)
    (outcome,) = rp.predict(run, tmp_path / "images", tmp_path / "out", spacing_um_px=1.0)
    assert outcome.state == "done"


# Objects with classes

CLASSES = {"round": (70, 40, 110), "long": (110, 60, 70)}


def draw_objects(generator: np.random.Generator, size: int = 96) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Return an image with round violet and long red nuclei that do not touch, its label map, and their classes."""
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
def classed_objects(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a manifest of label maps, each with a table of classes, and a manifest of points."""
    root = tmp_path_factory.mktemp("classed")
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
            centers = [(*np.argwhere(labels == number).mean(axis=0).round(1), kind) for number, kind in classes.items()]
            write_csv(root / "points" / f"{name}.csv", [("row", "column", "class"), *centers])
            objects.append((f"images/{name}.png", f"labels/{name}.png", name, split, 0.25))
            points.append((f"images/{name}.png", f"points/{name}.csv", name, split, 1.0))
    write_csv(root / "points.csv", points)
    write_csv(root / "manifest.csv", objects)
    return root


def test_segmentation_of_several_classes(classed_objects: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "segment.toml",
        task="segment",
        data=str(classed_objects),
        network="nuclei",
        orientations=4,
        batch=8,
        epochs=2,
        steps=30,
        schedule="cosine",
        optimiser="adamw",
        learning_rate=0.01,
    )
    checked = call("data", "check", classed_objects)
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
    assert scores["macro_pq"] == pytest.approx(np.mean([row["pq"] for row in scores["classes"].values()]))

    image, labels, classes = draw_objects(np.random.default_rng(9))
    result = run.predict(image, spacing_um_px=0.25)
    correct = 0
    for detected in result.objects:
        assert not isinstance(detected.shape, Point)
        row, column = np.concatenate([polygon.outer for polygon in detected.shape]).mean(axis=0).astype(int)
        correct += classes.get(int(labels[row, column])) == detected.class_name
    assert correct > len(classes) / 2
    assert {detected.color for detected in result.objects} <= set(run.task.colors)
    assert result.summary["long"] + result.summary["round"] == result.summary["objects"]
    exported = call("export", folder, "--to", "onnx", "--out", tmp_path / "export")
    assert exported.exit_code == 0, exported.output


def test_detection_of_several_classes(classed_objects: Path, tmp_path: Path) -> None:
    recipe = write_recipe(
        tmp_path / "points.toml",
        task="detect",
        data=str(classed_objects / "points.csv"),
        spacing_um_px=1.0,  # so that the matching radius of 7.5 µm is not larger than a nucleus
        network="test_custom_task:darkness_network",
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
    assert scores["macro_f1"] == pytest.approx(np.mean([row["f1"] for row in scores["classes"].values()]))
    assert scores["hits"] == sum(row["hits"] for row in scores["classes"].values())
    assert scores["f1"] > 0.4
    image, _, classes = draw_objects(np.random.default_rng(9))
    result = run.predict(image, spacing_um_px=1.0)
    assert {detected.class_name for detected in result.objects} <= {"long", "round"}
    assert 0 < len(result.objects) < 3 * len(classes)


def test_a_single_class_of_data_with_several_classes(classed_objects: Path, tmp_path: Path) -> None:
    """If the recipe names one class, objects of the other are background."""
    run = rp.train(
        QUICK
        | {"task": "nuclei", "data": str(classed_objects), "classes": ["round"], "stain": "none", "orientations": 1},
        tmp_path / "run",
    )
    assert run.task.outputs == 3
    sample = rp.data.open_data(classed_objects).samples[0]
    labels, _ = run.task.read_objects(sample)  # type: ignore[attr-defined]
    kinds = rp.data.annotations.read_objects(sample, 0.25).classes  # type: ignore[attr-defined]
    assert set(np.unique(labels[labels > 0]).tolist()) == {number for number, kind in kinds.items() if kind == "round"}


def test_objects_without_a_class_are_refused_if_the_task_has_several(classed_objects: Path, tmp_path: Path) -> None:
    for path in (classed_objects / "images").glob("train*.png"):
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
def test_tiles_of_a_padded_network_agree_with_the_whole_image(orientations: int) -> None:
    """Outputs of a padded U-Net differ near the edge of a tile, and the measured overlap covers that."""
    torch.manual_seed(0)
    module = rp.models.build_network("unet", 3, orientations, {"width": 4, "depth": 3}).eval()
    network = make_dense(module, 3, 32)
    image = np.random.default_rng(0).integers(0, 256, (150, 170, 3), np.uint8)
    whole = rp.inference.predict(network, image, torch.device("cpu"), tile_px=1024)
    tiled = rp.inference.predict(network, image, torch.device("cpu"), tile_px=80)
    assert np.allclose(whole.probabilities, tiled.probabilities, atol=1e-5)
    narrow = type(network)(module, rp.models.Geometry(3, 4, 4, 1, rim=2))  # type: ignore[call-arg]
    wrong = rp.inference.predict(narrow, image, torch.device("cpu"), tile_px=80)
    assert not np.allclose(whole.probabilities, wrong.probabilities, atol=1e-5), "a smaller overlap does not"
