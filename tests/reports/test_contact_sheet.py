"""The contact sheet: annotations are drawn where they belong, and captions survive any name."""

from pathlib import Path

import numpy as np
import pytest
from layouts import amida13, pixels, write_csv, write_image
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from PIL import Image

from rotopath.data.formats import open_data
from rotopath.reports import contact_sheet
from rotopath.reports.contact_sheet import CLASS_MARKS, Marks, _draw_tile, draw_contact_sheet, draw_examples
from rotopath.reports.figures import save_figure
from rotopath.tasks import Example


def test_circles_lie_on_mitoses(tmp_path: Path) -> None:
    """Mitoses at rows 10 and 30, columns 20 and 40; x is the column."""
    dataset = open_data(amida13(tmp_path, cases=[1]))
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(dataset, dataset.samples[0], 0.25, Marks(), axes)
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
    dataset = open_data(tmp_path)
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(dataset, dataset.samples[0], 0.25, Marks(), axes)
    (outline,) = (np.concatenate([path.vertices for path in drawn.get_paths()]) for drawn in axes.collections)
    assert (*outline.min(axis=0), *outline.max(axis=0)) == (99.5, 19.5, 105.5, 25.5)
    assert axes.get_xlim() == (88.5, 148.5)


@pytest.mark.parametrize("name", ["a$^$b", "名前", "a [k]", "x" * 80])
def test_any_name_makes_a_caption(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / f"{name}.png", pixels(20, 20))
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), (f"{name}.png", 1, "train", 1)])
    assert draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png").stat().st_size > 1000


def test_hard_examples_are_drawn_about_their_places(tmp_path: Path) -> None:
    dataset = open_data(amida13(tmp_path / "data", cases=[1], size=(300, 400)))
    axes = Figure().add_axes((0, 0, 1, 1))
    _draw_tile(dataset, dataset.samples[0], 0.25, Marks(), axes, middle=np.array([150.0, 250.0]), note="0.97, ")
    assert axes.get_xlim() == (153.5, 345.5)
    assert axes.get_ylim() == (245.5, 53.5)
    assert axes.get_xlabel().startswith("0.97, ")
    examples = [Example(dataset.samples[i % 2].name, 10 * i, 20 * i, 0.9) for i in range(8)]
    assert draw_examples(dataset, examples, 0.25, tmp_path / "mined.png").stat().st_size > 1000


CELLS = {"lymphocyte": (40, 40), "stroma": (40, 120), "epithelial": (120, 40)}  # where there is one of each, in pixels
SIDE_PX = 160


def cells(root: Path, annotated: str) -> Path:
    """Fields with a cell of each class; their order differs from field to field, their places do not."""
    rows = [("image", "annotation", "split", "spacing")]
    for field, split in enumerate(("train", "train", "valid", "test")):
        order = sorted(CELLS) if field % 2 else list(CELLS)
        labels = np.zeros((SIDE_PX, SIDE_PX), np.uint16)
        for number, name in enumerate(order, 1):
            row, column = CELLS[name]
            labels[row - 5 : row + 6, column - 5 : column + 6] = number
        write_image(root / f"{field}.png", np.where(labels[..., None] > 0, 90, 230).astype(np.uint8).repeat(3, axis=2))
        if annotated == "points":
            points = [(name, *CELLS[name]) for name in order]
            write_csv(root / f"cells-{field}.csv", [("class", "row", "column"), *points])
        else:
            write_image(root / f"cells-{field}.png", labels)
            write_csv(root / f"cells-{field}.csv", [("object", "class"), *enumerate(order, 1)])
        suffix = "csv" if annotated == "points" else "png"
        rows.append((f"{field}.png", f"cells-{field}.{suffix}", split, "0.25"))
    write_csv(root / "manifest.csv", rows)
    return root


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures, once they are saved."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return save_figure(figure, path)

    monkeypatch.setattr(contact_sheet, "save_figure", save)
    return figures


def colours_of_cells(sheet: Figure) -> dict[str, set[str]]:
    """The colours in which the cells of each class are marked, by where they lie."""
    found: dict[str, set[str]] = {name: set() for name in CELLS}
    at = {(column, row): name for name, (row, column) in CELLS.items()}
    for axes in sheet.axes:
        for mark in (*axes.patches, *axes.collections):
            if isinstance(mark, Circle):
                found[at[mark.center]].add(to_hex(mark.get_edgecolor()))
            else:
                assert isinstance(mark, ContourSet)
                (path,) = mark.get_paths()
                low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
                found[at[tuple((low + high) / 2)]].add(to_hex(mark.get_edgecolor()[0]))
    return found


@pytest.mark.parametrize("annotated", ["points", "objects"])
def test_each_class_has_a_colour_of_its_own_and_is_named_on_the_sheet(
    tmp_path: Path, drawn: list[Figure], annotated: str
) -> None:
    dataset = open_data(cells(tmp_path / "data", annotated))
    assert dataset.annotated == annotated
    sheet = draw_contact_sheet(dataset, tmp_path / "sheet.png")
    named = {text.get_text(): to_hex(box.get_facecolor()) for text in drawn[0].texts if (box := text.get_bbox_patch())}
    assert {name: {colour} for name, colour in named.items()} == colours_of_cells(drawn[0])
    assert len(set(named.values())) == len(CELLS)
    with Image.open(sheet) as image:
        pixels_there = np.asarray(image.convert("RGB")).astype(int)
    for colour in named.values():
        near = np.abs(pixels_there - np.array(to_rgb(colour)) * 255).max(axis=-1) < 4
        assert near.sum() > 500, f"{colour} is in the sample"


def test_names_of_classes_stand_side_by_side_on_the_sheet(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_contact_sheet(open_data(cells(tmp_path, "objects")), tmp_path / "sheet.png")
    FigureCanvasAgg(drawn[0]).draw()
    boxes = [text.get_window_extent() for text in drawn[0].texts]
    for i, box in enumerate(boxes):
        assert drawn[0].bbox.contains(box.x0, box.y0)
        assert drawn[0].bbox.contains(box.x1, box.y1)
        assert not any(box.overlaps(other) for other in boxes[:i])


def test_objects_without_a_class_have_one_colour_and_no_name(tmp_path: Path, drawn: list[Figure]) -> None:
    root = cells(tmp_path, "objects")
    for table in root.glob("cells-*.csv"):
        table.unlink()
    draw_contact_sheet(open_data(root), tmp_path / "sheet.png")
    assert set().union(*colours_of_cells(drawn[0]).values()) == {contact_sheet.MARK}
    assert [text for text in drawn[0].texts if text.get_bbox_patch()] == []


def test_as_many_classes_as_there_are_colours_can_be_told_apart() -> None:
    marks = Marks()
    assert len({marks.of(str(number)) for number in range(len(CLASS_MARKS))}) == len(CLASS_MARKS) >= 6
    assert marks.of("3") == marks.of("3")
