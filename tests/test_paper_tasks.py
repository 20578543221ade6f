"""Nuclei and mitoses through the commands: mining, other rules, rotated inputs, prediction, the study report."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, write_image
from PIL import Image
from test_pretrained import draw_tissue
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath.cli import app
from rotopath.images.geojson import read_geojson
from rotopath.metrics.matching import OverlapRule
from rotopath.recipe import make_recipe
from rotopath.training import MINED

pytestmark = pytest.mark.slow

SHORT = {"epochs": 1, "steps": 2, "batch": 4, "validation_steps": 1, "accelerator": "cpu", "cache": "memory"}


def call(*words: object) -> Result:
    """Run a command, which must succeed."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    return result


def read_scores(path: Path) -> dict[str, object]:
    scores: dict[str, object] = json.loads(path.read_text())["test"]
    return scores


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs of N=1 and N=4 for nuclei, evaluated with and without rotated inputs."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("nuclei")
    data = kumar(root / "data", ["a", "b", "c"], size=60)
    for n in (1, 4):
        folder = root / "study" / "nuclei" / f"N{n}-seed0"
        rp.train(make_recipe({"task": "nuclei", "data": str(data), "orientations": n, **SHORT}), folder)
        call("evaluate", folder, "--robustness")
    return root / "study"


def test_robustness_of_nuclei_keeps_maps_of_rotated_fields(study: Path) -> None:
    changed = {}
    for n in (1, 4):
        folder = study / "nuclei" / f"N{n}-seed0"
        scores = read_scores(folder / "evaluation-test.json")
        assert scores["rotation"]["inputs"] == "pixels of fields"  # type: ignore[index]
        with np.load(folder / "evaluation-test.npz", allow_pickle=False) as maps:
            assert maps["images"].shape == (1, 60, 60, 3)
            for name in ("objects", "borders"):
                mean, deviation = maps[f"{name}_mean"], maps[f"{name}_deviation"]
                assert mean.shape == deviation.shape == (1, 60, 60)
                assert 0 <= mean.min() <= mean.max() <= 1
            changed[n] = float(maps["objects_deviation"].mean())
    assert 0 < changed[4] < changed[1], "rotation changes an equivariant network less"


def test_an_evaluation_without_robustness_keeps_what_was_measured_before(study: Path) -> None:
    folder = study / "nuclei" / "N4-seed0"
    before = read_scores(folder / "evaluation-test.json")
    call("evaluate", folder)
    assert read_scores(folder / "evaluation-test.json") == before


@pytest.mark.parametrize("rule", ["area", "own-area"])
def test_nuclei_are_counted_by_another_rule(study: Path, rule: OverlapRule) -> None:
    folder = study / "nuclei" / "N1-seed0"
    by_iou = read_scores(folder / "evaluation-test.json")
    output = call("evaluate", folder, "--rule", rule).output
    by_rule = read_scores(folder / f"evaluation-test-{rule}.json")
    assert by_rule["rule"] == rule
    assert by_iou["rule"] == "iou"
    assert f"evaluation-test-{rule}.json" in output
    assert "rotation" not in by_rule, "robustness belongs to the main evaluation"


def test_the_study_page_shows_maps_of_rotated_fields(study: Path, tmp_path: Path) -> None:
    page = rp.report(study, tmp_path / "report")
    assert "maps of rotated fields" in page.read_text(encoding="utf-8")
    image = rp.images.read_rgb(tmp_path / "report" / "figures" / "nuclei-maps.png")
    reddish = (image[..., 0].astype(int) - image[..., 1] > 60) & (image[..., 0].astype(int) - image[..., 2] > 60)
    assert reddish.any(), "deviations are drawn in red"


def test_hard_examples_of_mitoses_are_mined_and_sampled(tmp_path: Path) -> None:
    data = amida13(tmp_path / "data", cases=[1, 2, 3, 13], size=(100, 110))
    recipe = {"task": "mitosis", "data": str(data), "orientations": 1, "mining": {"epochs": 1, "examples": 6}, **SHORT}
    rp.train(make_recipe(recipe), tmp_path / "run")
    with (tmp_path / "run" / MINED).open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert 0 < len(rows) <= 6
    scores = [float(row["score"]) for row in rows]
    assert scores == sorted(scores, reverse=True), "the worst mistakes come first"
    for row in rows:
        assert int(Path(row["image"]).parent.name) in (1, 2), "case 3 validates and case 13 tests"
        position = np.array([int(row["row"]), int(row["column"])])
        assert (position >= 0).all()
        assert (position < (100, 110)).all()
        mitoses = [(10, 20), (30, 40)] if row["image"].endswith("01") else []
        assert all(np.hypot(*(position - mitosis)) > 30 for mitosis in mitoses), "a hit is no mistake"


@pytest.mark.parametrize(("model", "objects"), [("mitosis-amida13-n8", "mitoses"), ("nuclei-kumar-n8", "nuclei")])
def test_pretrained_models_of_objects_predict_files(tmp_path: Path, model: str, objects: str) -> None:
    image = write_image(tmp_path / "tissue.png", draw_tissue())
    out = tmp_path / "results"
    command = ("predict", model, image, "--out", out, "--spacing-um-px", 0.25, "--rotations", 2, "--device", "cpu")
    output = call(*command, "--everywhere").output
    summary = json.loads((out / "tissue.png" / "summary.json").read_text())
    found = list(read_geojson(out / "tissue.png" / "objects.geojson"))
    assert summary["objects"] == len(found) > 0
    assert summary[f"{objects}_per_mm2"] > 0
    assert f"{len(found)} {objects}" in summary["sentence"]
    assert summary["sentence"] in " ".join(output.split())
    with (out / "tissue.png" / "objects.csv").open(newline="") as file:
        assert len(list(csv.DictReader(file))) == len(found)
    assert (out / "tissue.png" / "deviation.ome.tif").exists()
    with Image.open(out / "tissue.png" / "crops.png") as crops:
        assert crops.width > 8 * 128
    assert "skipped" in call(*command, "--everywhere").output
