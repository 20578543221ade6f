"""Faults that showed only where several rooms meet: images without a spacing, many classes, several networks."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from layouts import pixels, write_csv, write_image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from typer.testing import CliRunner, Result

import rotopath as rp
from rotopath.cli import app
from rotopath.data.formats import open_data
from rotopath.recipe import NetworkOptions, Recipe, RecipeError
from rotopath.reports import contact_sheet, study_report
from rotopath.studies import Study
from rotopath.studies.results import StudyResult

SMALL = (
    *("orientations=1", "steps=3", "epochs=1", "batch=6", "accelerator=cpu", "network=resnet18"),
    *("network_options.width=4", "window_px=32"),
)


def train(tmp_path: Path, *more: str) -> Result:
    """On patches in folders of classes, whose files do not say how large their pixels are."""
    for split, count in (("train", 4), ("valid", 2), ("test", 2)):
        for k, name in enumerate(("dots", "plain", "stripes")):
            for i in range(count):
                write_image(tmp_path / "data" / split / name / f"{i}.png", pixels(40, 40, k, i, count))
    (tmp_path / "r.toml").write_text(f'task = "classify"\ndata = "{tmp_path / "data"}"\ndata_spacing_um_px = 1\n')
    words = [word for setting in (*SMALL, *more) for word in ("--set", setting)]
    return CliRunner().invoke(app, ["train", str(tmp_path / "r.toml"), *words, "--out", str(tmp_path / "run")])


def test_hard_examples_of_images_that_do_not_say_their_spacing_are_drawn(tmp_path: Path) -> None:
    done = train(tmp_path, "mining.epochs=1")
    assert done.exit_code == 0, done.exception
    assert (tmp_path / "run/mined.png").exists()


def test_the_data_of_a_run_may_be_named(tmp_path: Path) -> None:
    train(tmp_path)
    done = CliRunner().invoke(app, ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "data")])
    assert done.exit_code == 0, done.output
    (tmp_path / "data").rename(tmp_path / "elsewhere")
    words = ["evaluate", str(tmp_path / "run"), "--data", str(tmp_path / "elsewhere")]
    assert CliRunner().invoke(app, words).exit_code == 2, "other data has to say its spacing"
    done = CliRunner().invoke(app, [*words, "--spacing-um-px", "1"])
    assert done.exit_code == 0, done.output


def test_a_manifest_without_groups_does_not_know_slides(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / f"{i}.png", pixels(96, 96, i))
    rows = [(f"{i}.png", i % 2, "test", 1) for i in range(6)]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    scores = rp.evaluate("tumor-pcam-n8", tmp_path, out=tmp_path / "scores.json").scores
    assert scores["interval_over"] == "patches"


def test_networks_of_two_parts_of_one_task_cost_what_each_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    options = NetworkOptions(width=4)
    narrow = Recipe(
        "classify", "d", ("a", "b"), network="resnet18", orientations=1, window_px=32, network_options=options
    )
    wide = replace(narrow, network_options=NetworkOptions(width=8))
    about = {"begun": "2020-01-01T00:00:00", "finished": "2020-01-01T00:01:00", "hardware": {"device": "x"}}
    monkeypatch.setattr(StudyResult, "provenance", about)
    results = [StudyResult(part, Path("nowhere"), recipe, 1, {}) for part, recipe in (("a", narrow), ("b", wide))]
    _, first, second = study_report._cost(results).table
    assert (first[1], second[1]) == ("resnet18, N=1, width 4", "resnet18, N=1, width 8")
    assert int(first[2].replace(",", "")) < int(second[2].replace(",", ""))


@pytest.mark.parametrize("count", [3, 8, 9])
def test_all_classes_are_named_on_the_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    drawn: list[Figure] = []

    def keep(figure: Figure, path: Path) -> Path:
        drawn.append(figure)
        return path

    monkeypatch.setattr(contact_sheet, "save_figure", keep)
    write_image(tmp_path / "a.png", pixels(160, 160))
    places = [(10 + 15 * i, 80, f"class {i}") for i in range(count)]
    write_csv(tmp_path / "p.csv", [("row", "column", "class"), *places])
    head = ("image", "annotation", "split", "spacing")
    write_csv(tmp_path / "manifest.csv", [head, ("a.png", "p.csv", "train", 0.25)])
    contact_sheet.draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png")
    FigureCanvasAgg(drawn[0]).draw()
    boxes = [text.get_window_extent() for text in drawn[0].texts]
    for i, box in enumerate(boxes):
        assert drawn[0].bbox.contains(box.x0, box.y0)
        assert not any(box.overlaps(other) for other in boxes[:i])
    for text in drawn[0].texts:
        if box := text.get_bbox_patch():
            contrast = np.abs(np.array(to_rgb(text.get_color())) - np.array(box.get_facecolor()[:3]))
            assert contrast.max() > 0.3, "it can be read"


def test_changes_of_a_study_that_is_read_already_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="Changes are for studies in files"):
        rp.study(Study(()), tmp_path, changes=["tumor.seed=[0]"])
