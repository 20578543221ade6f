"""The contact sheet: annotations are drawn where they belong, and captions survive any name."""

from pathlib import Path

import numpy as np
import pytest
from layouts import amida13, pixels, write_csv, write_image
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from rotopath.data.opening import open_data
from rotopath.reports.contact_sheet import _draw_tile, draw_contact_sheet, draw_examples
from rotopath.training.mining import Example


def test_circles_lie_on_mitoses(tmp_path: Path) -> None:
    """Mitoses at rows 10 and 30, columns 20 and 40; x is the column."""
    collection = open_data(amida13(tmp_path, cases=[1]))
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(collection, collection.pictures[0], 0.25, axes)
    assert [patch.center for patch in axes.patches if isinstance(patch, Circle)] == [(20, 10), (40, 30)]


def test_outlines_lie_on_nuclei(tmp_path: Path) -> None:
    """A nucleus on rows 20 to 25 and columns 100 to 105 of a wide image, of which the middle is shown."""
    labels = np.zeros((60, 240), np.uint16)
    labels[20:26, 100:106] = 3
    write_image(tmp_path / "a.png", pixels(60, 240))
    write_image(tmp_path / "map.png", labels)
    write_csv(
        tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), ("a.png", "map.png", "train", 0.25)]
    )
    collection = open_data(tmp_path)
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(collection, collection.pictures[0], 0.25, axes)
    (outline,) = (np.concatenate([path.vertices for path in drawn.get_paths()]) for drawn in axes.collections)
    assert (*outline.min(axis=0), *outline.max(axis=0)) == (99.5, 19.5, 105.5, 25.5)
    assert axes.get_xlim() == (88.5, 148.5)


@pytest.mark.parametrize("name", ["a$^$b", "名前", "a [k]", "x" * 80])
def test_any_name_makes_a_caption(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / f"{name}.png", pixels(20, 20))
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), (f"{name}.png", 1, "train", 1)])
    assert draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png").stat().st_size > 1000


def test_hard_examples_are_drawn_about_their_places(tmp_path: Path) -> None:
    collection = open_data(amida13(tmp_path / "data", cases=[1], size=(300, 400)))
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(collection, collection.pictures[0], 0.25, axes, middle=np.array([150.0, 250.0]), note="0.97, ")
    assert axes.get_xlim() == (153.5, 345.5)
    assert axes.get_ylim() == (245.5, 53.5)
    assert axes.get_xlabel().startswith("0.97, ")
    examples = [Example(collection.pictures[i % 2].name, 10 * i, 20 * i, 0.9) for i in range(8)]
    assert draw_examples(collection, examples, tmp_path / "mined.png").stat().st_size > 1000
