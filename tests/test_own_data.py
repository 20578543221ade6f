"""docs/own-data.md: its commands lead from images to a model, and from corrections to another one."""

import csv
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
from typer.testing import CliRunner

from rotopath.cli import app
from rotopath.images.files import read_rgb
from rotopath.synthetic import make_mitosis

pytestmark = pytest.mark.slow

PAGE = (Path(__file__).parents[1] / "docs" / "own-data.md").read_text(encoding="utf-8")
QUICK = ("orientations=1", "epochs=1", "steps=4", "batch=8", "validation_steps=1", "accelerator=cpu")
NEW = "patient21-1.svs"
CORNER = (100, 150)  # of the tissue on a slide: row and column
SIDE = 256


def point(row: float, column: float, **measurements: float) -> dict[str, Any]:
    properties = {"objectType": "annotation", "classification": {"name": "mitosis"}, "measurements": measurements}
    return {
        "type": "Feature",
        "geometry": {"type": "Point", "coordinates": [column, row]},
        "properties": properties,
    }


def area() -> dict[str, Any]:
    """Return the outline of the area that a person has annotated: the tissue."""
    (top, left), side = CORNER, SIDE
    ring = [[left, top], [left + side, top], [left + side, top + side], [left, top + side], [left, top]]
    properties = {"objectType": "annotation", "classification": {"name": "Region*"}}
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": properties}


def write_slide(path: Path, tissue: np.ndarray) -> None:
    """Write tissue on glass as a tiled TIFF, which is read as a slide."""
    image = np.full((600, 700, 3), 244, np.uint8)
    image[CORNER[0] : CORNER[0] + SIDE, CORNER[1] : CORNER[1] + SIDE] = tissue
    path.parent.mkdir(exist_ok=True)
    tifffile.imwrite(
        path, image, photometric="rgb", tile=(256, 256), resolution=(4e4, 4e4), resolutionunit="CENTIMETER"
    )


def write_lab(root: Path) -> dict[str, list[tuple[float, float]]]:
    """Write synthetic slides and annotations as a lab keeps them, and return the mitoses of each image."""
    make_mitosis(root / "tissue", seed=0, fields_per_case=1, size_px=SIDE)
    mitoses: dict[str, list[tuple[float, float]]] = {}
    for path in sorted((root / "tissue").glob("mitoses_image_data_part_*/*/01.tif")):
        case = path.parent.name
        name = f"patient{case}-1.svs"
        table = root / "tissue" / "mitoses_ground_truth" / case / "01.csv"
        rows = csv.reader(table.read_text().splitlines()) if table.exists() else ()
        mitoses[name] = [(float(row) + 0.5 + CORNER[0], float(column) + 0.5 + CORNER[1]) for row, column in rows]
        folder = root / ("new-slides" if int(case) > 20 else "slides")
        write_slide(folder / name, read_rgb(path))
        if folder.name == "slides":
            (root / "annotations").mkdir(exist_ok=True)
            features = [area(), *(point(*center) for center in mitoses[name])]
            (root / "annotations" / f"{name}.geojson").write_text(json.dumps(features))
    return mitoses


def correct(results: Path, mitoses: dict[str, list[tuple[float, float]]]) -> None:
    """Do what a person does: reject one object in an image, delete the others, and add those that were missed."""
    for path in sorted(results.glob("*/objects.geojson")):
        features = json.loads(path.read_text())["features"][:1]
        for feature in features:
            feature["properties"].setdefault("measurements", {})["accepted"] = 0
        features += [area(), point(180, 280, accepted=0), *(point(*center) for center in mitoses[path.parent.name])]
        path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))


def test_commands_of_the_page_lead_to_a_second_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    mitoses = write_lab(tmp_path)
    (walk,) = re.findall("```sh\n(.*?)```", PAGE, re.DOTALL)
    outputs = []
    for line in walk.splitlines():
        if line.startswith("# correct"):
            correct(Path("results"), mitoses)
            continue
        program, *words = shlex.split(line, comments=True)
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
    assert re.search(rf"all .*\b{counts}\b", outputs[7]), "rejected objects do not count, and added ones do"
