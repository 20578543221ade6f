"""docs/own-data.md: its commands lead from images to a model, and from corrections to another one."""

import csv
import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from rotopath.cli import app
from rotopath.synthetic import make_mitosis

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[1] / "docs" / "own-data.md").read_text(encoding="utf-8")
QUICK = ("orientations=1", "epochs=1", "steps=4", "batch=8", "validation_steps=1", "accelerator=cpu")
NEW = "patient21-1.tif"


def point(row: float, column: float, **measurements: float) -> dict[str, Any]:
    properties = {"objectType": "annotation", "classification": {"name": "mitosis"}, "measurements": measurements}
    return {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [column, row]},
        "properties": properties,
    }


def write_lab(root: Path) -> dict[str, list[tuple[float, float]]]:
    """Write synthetic tissue as a lab keeps it, and return the mitoses of each image."""
    make_mitosis(root / "tissue", seed=0, fields_per_case=1, size_px=256)
    mitoses: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((root / "tissue").glob("mitoses_image_data_part_*/*/01.tif")):
        case = path.parent.name
        name = f"patient{case}-1.tif"
        table = root / "tissue" / "mitoses_ground_truth" / case / "01.csv"
        rows = csv.reader(table.read_text().splitlines()) if table.exists() else ()
        mitoses[name] = [(float(row) + 0.5, float(column) + 0.5) for row, column in rows]
        folder = root / ("new-slides" if int(case) > 20 else "slides")
        folder.mkdir(exist_ok=True)
        shutil.move(path, folder / name)
        if folder.name == "slides":
            (root / "annotations").mkdir(exist_ok=True)
            features = [point(*center) for center in mitoses[name]]
            (root / "annotations" / f"{name}.geojson").write_text(json.dumps(features))
    return mitoses


def correct(results: Path, mitoses: dict[str, list[tuple[float, float]]]) -> None:
    """Do what a person does: reject one object in an image, delete the others, and add those that were missed."""
    for path in sorted(results.glob("*/objects.geojson")):
        features = json.loads(path.read_text())["features"][:1]
        for feature in features:
            feature["properties"].setdefault("measurements", {})["accepted"] = 0
        features += [point(80, 80, accepted=0), *(point(*center) for center in mitoses[path.parent.name])]
        path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def test_commands_of_the_page_lead_to_a_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mitoses = write_lab(tmp_path)
    (recipe,) = re.findall("```toml\n(.*?)```", PAGE, re.DOTALL)
    Path("cells.toml").write_text(recipe)
    (walk,) = re.findall("```sh\n(.*?)```", PAGE, re.DOTALL)
    outputs = []
    for line in walk.splitlines():
        if line.startswith("# correct"):
            correct(Path("results"), mitoses)
            continue
        program, *words = shlex.split(line)
        assert program == "rotopath"
        if words[0] == "train":
            words += [word for change in QUICK for word in ("--set", change)]
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, f"{line}\n{result.output}"
        outputs.append(result.output)
    first, second = (
        {Path(row["image"]).name: row for row in csv.DictReader(Path(name, "manifest.csv").read_text().splitlines())}
        for name in ("round1", "round2")
    )
    assert len(second) == len(first) + 3 == 23
    assert all(second[name]["split"] == row["split"] for name, row in first.items()), "splits are kept"
    assert {row["split"] for row in first.values()} == {"train", "valid", "test"}
    assert second[NEW]["split"] == "train"
    counts = sum(len(centers) for centers in mitoses.values())
    assert re.search(rf"all .*\b{counts}\b", outputs[6]), "rejected objects do not count, and added ones do"
