"""The contact sheet: annotations are drawn at their positions, classes have colors and names, captions fit."""

import json
from pathlib import Path

import numpy as np
import pytest
from layouts import amida13, pixels, write_csv, write_image
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex, to_rgb
from matplotlib.contour import ContourSet
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Polygon
from PIL import Image

from rotopath.data.dataset import DataError, Dataset
from rotopath.data.formats import open_data
from rotopath.reports import contact_sheet
from rotopath.reports.contact_sheet import (
    COLORS,
    DEFAULT_COLOR,
    ClassColors,
    SheetTile,
    TilePainter,
    draw_contact_sheet,
    draw_hard_examples,
)
from rotopath.reports.figures import save_figure
from rotopath.tasks import HardExample

pytestmark = pytest.mark.slow


def draw_tile(dataset: Dataset, center: tuple[float, float] | None = None, note: str = "") -> Axes:
    """Draw the first sample of a dataset at 0.25 µm/px."""
    axes = Figure().add_axes((0, 0, 1, 1))
    tile = SheetTile(dataset.samples[0], None if center is None else np.array(center), note)
    TilePainter(dataset, 0.25).draw(axes, tile)
    return axes


def test_circles_are_at_mitoses(tmp_path: Path) -> None:
    """Mitoses at rows 10 and 30, columns 20 and 40; x is the column."""
    axes = draw_tile(open_data(amida13(tmp_path, cases=[1])))
    assert [patch.center for patch in axes.patches if isinstance(patch, Circle)] == [(20, 10), (40, 30)]


def test_outlines_are_at_nuclei(tmp_path: Path) -> None:
    """A nucleus on rows 20 to 25 and columns 100 to 105 of a wide image, whose part around it is shown."""
    labels = np.zeros((60, 240), np.uint16)
    labels[20:26, 100:106] = 3
    write_image(tmp_path / "a.png", pixels(60, 240))
    write_image(tmp_path / "map.png", labels)
    write_csv(
        tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), ("a.png", "map.png", "train", 0.25)]
    )
    axes = draw_tile(open_data(tmp_path))
    (outline,) = (np.concatenate([path.vertices for path in drawn.get_paths()]) for drawn in axes.collections)
    assert (*outline.min(axis=0), *outline.max(axis=0)) == (99.5, 19.5, 105.5, 25.5)
    assert axes.get_xlim() == (71.5, 131.5)


@pytest.mark.parametrize("name", ["a$^$b", "名前", "a [k]", "x" * 80])
def test_any_file_name_can_be_a_caption(tmp_path: Path, name: str) -> None:
    write_image(tmp_path / f"{name}.png", pixels(20, 20))
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), (f"{name}.png", 1, "train", 1)])
    assert draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png").stat().st_size > 1000


def test_hard_examples_are_at_the_center_of_their_tiles(tmp_path: Path) -> None:
    dataset = open_data(amida13(tmp_path / "data", cases=[1], size=(300, 400)))
    axes = draw_tile(dataset, center=(150, 250), note="0.97, ")
    assert axes.get_xlim() == (153.5, 345.5)
    assert axes.get_ylim() == (245.5, 53.5)
    assert axes.get_xlabel().startswith("0.97, ")
    examples = [HardExample(dataset.samples[i % 2].name, 10 * i, 20 * i, 0.9) for i in range(8)]
    assert draw_hard_examples(dataset, examples, 0.25, tmp_path / "mined.png").stat().st_size > 1000


CELLS = {"lymphocyte": (40, 40), "stroma": (40, 120), "epithelial": (120, 40)}  # position of the cell of each class
SIDE_PX = 160


def cells(root: Path, annotated: str) -> Path:
    """Fields with a cell of each class; the order of the cells differs between fields, their positions do not."""
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
    """The figures that were saved."""
    figures: list[Figure] = []

    def save(figure: Figure, path: Path) -> Path:
        figures.append(figure)
        return save_figure(figure, path)

    monkeypatch.setattr(contact_sheet, "save_figure", save)
    return figures


def colors_of_cells(sheet: Figure) -> dict[str, set[str]]:
    """The colors in which the cells of each class are marked, by their positions."""
    colors: dict[str, set[str]] = {name: set() for name in CELLS}
    name_at = {(column, row): name for name, (row, column) in CELLS.items()}
    for axes in sheet.axes:
        for mark in (*axes.patches, *axes.collections):
            if isinstance(mark, Circle):
                colors[name_at[mark.center]].add(to_hex(mark.get_edgecolor()))
            else:
                assert isinstance(mark, ContourSet)
                (path,) = mark.get_paths()
                low, high = path.vertices.min(axis=0), path.vertices.max(axis=0)
                colors[name_at[tuple((low + high) / 2)]].add(to_hex(mark.get_edgecolor()[0]))
    return colors


def text_boxes(sheet: Figure) -> list[str]:
    """The texts with a colored background, which are names of classes."""
    return [text.get_text() for text in sheet.texts if text.get_bbox_patch()]


def assert_texts_do_not_overlap(sheet: Figure) -> None:
    FigureCanvasAgg(sheet).draw()
    boxes = [text.get_window_extent() for text in sheet.texts]
    for i, box in enumerate(boxes):
        assert sheet.bbox.contains(box.x0, box.y0)
        assert sheet.bbox.contains(box.x1, box.y1)
        assert not any(box.overlaps(other) for other in boxes[:i])


@pytest.mark.parametrize("annotated", ["points", "objects"])
def test_each_class_has_its_own_color_and_is_named(tmp_path: Path, drawn: list[Figure], annotated: str) -> None:
    dataset = open_data(cells(tmp_path / "data", annotated))
    assert dataset.annotated == annotated
    sheet = draw_contact_sheet(dataset, tmp_path / "sheet.png")
    named = {text.get_text(): to_hex(box.get_facecolor()) for text in drawn[0].texts if (box := text.get_bbox_patch())}
    assert {name: {color} for name, color in named.items()} == colors_of_cells(drawn[0])
    assert len(set(named.values())) == len(CELLS)
    with Image.open(sheet) as image:
        values = np.asarray(image.convert("RGB")).astype(int)
    for color in named.values():
        near = np.abs(values - np.array(to_rgb(color)) * 255).max(axis=-1) < 4
        assert near.sum() > 500, f"{color} is not in the image"


def test_names_of_classes_do_not_overlap(tmp_path: Path, drawn: list[Figure]) -> None:
    draw_contact_sheet(open_data(cells(tmp_path, "objects")), tmp_path / "sheet.png")
    assert len(text_boxes(drawn[0])) == len(CELLS)
    assert_texts_do_not_overlap(drawn[0])


@pytest.mark.parametrize("count", [3, 8, 9])
def test_names_of_many_classes_are_legible(tmp_path: Path, drawn: list[Figure], count: int) -> None:
    write_image(tmp_path / "a.png", pixels(160, 160))
    points = [(10 + 15 * i, 80, f"class {i}") for i in range(count)]
    write_csv(tmp_path / "p.csv", [("row", "column", "class"), *points])
    header = ("image", "annotation", "split", "spacing")
    write_csv(tmp_path / "manifest.csv", [header, ("a.png", "p.csv", "train", 0.25)])
    draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png")
    assert len(text_boxes(drawn[0])) == count
    assert_texts_do_not_overlap(drawn[0])
    for text in drawn[0].texts:
        if box := text.get_bbox_patch():
            contrast = np.abs(np.array(to_rgb(text.get_color())) - np.array(box.get_facecolor()[:3]))
            assert contrast.max() > 0.3


def test_objects_without_a_class_have_the_default_color_and_no_name(tmp_path: Path, drawn: list[Figure]) -> None:
    root = cells(tmp_path, "objects")
    for table in root.glob("cells-*.csv"):
        table.unlink()
    draw_contact_sheet(open_data(root), tmp_path / "sheet.png")
    assert set().union(*colors_of_cells(drawn[0]).values()) == {DEFAULT_COLOR}
    assert text_boxes(drawn[0]) == []


def test_as_many_classes_as_colors_have_different_colors() -> None:
    colors = ClassColors()
    assert len({colors.color_of(str(number)) for number in range(len(COLORS))}) == len(COLORS) >= 6
    assert colors.color_of("3") == colors.color_of("3")


def test_ignored_areas_are_dashed(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(60, 80))
    area = {"type": "Polygon", "coordinates": [[[10, 20], [30, 20], [30, 40], [10, 20]]]}
    feature = {"type": "Feature", "geometry": area, "properties": {"classification": {"name": "Ignore*"}}}
    (tmp_path / "a.geojson").write_text(json.dumps([feature]))
    write_csv(
        tmp_path / "manifest.csv", [("image", "points", "split", "spacing"), ("a.png", "a.geojson", "train", 0.25)]
    )
    (patch,) = draw_tile(open_data(tmp_path)).patches
    assert isinstance(patch, Polygon)
    assert patch.get_xy()[:3].tolist() == [[9.5, 19.5], [29.5, 19.5], [29.5, 39.5]], "(0, 0) is a pixel center here"
    assert patch.get_linestyle() == "--"


def texts(sheet: Figure) -> list[str]:
    return [text.get_text() for text in sheet.texts]


def field_of_points(root: Path, distance_px: int, size: int = 600) -> Path:
    """An image of glass with five points around its lower left corner, and one far from them."""
    row, column = size - 100, 100
    steps = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1))
    positions = [(100, 500), *((row + i * distance_px, column + k * distance_px) for i, k in steps)]
    write_image(root / "a.png", np.full((size, size, 3), 240, np.uint8))
    ring = [[300, 300], [320, 300], [320, 320], [300, 300]]
    area = {
        "geometry": {"type": "Polygon", "coordinates": [ring]},
        "properties": {"classification": {"name": "Ignore*"}},
    }
    points = [
        {"geometry": {"type": "Point", "coordinates": [x + 0.5, y + 0.5]}, "properties": {}} for y, x in positions
    ]
    (root / "a.geojson").write_text(json.dumps([{"type": "Feature", **feature} for feature in (*points, area)]))
    header = ("image", "points", "split", "spacing")
    write_csv(root / "manifest.csv", [header, ("a.png", "a.geojson", "train", 0.25)])
    return root


@pytest.mark.parametrize(("distance_px", "radius_um"), [(20, 1.75), (8, 1.5), (70, 7.5)])
def test_circles_of_crowded_points_are_smaller(
    tmp_path: Path, drawn: list[Figure], distance_px: int, radius_um: float
) -> None:
    """Circles of 7.5 µm would hide the nuclei, and overlap. A cross is at each position."""
    draw_contact_sheet(open_data(field_of_points(tmp_path, distance_px)), tmp_path / "sheet.png")
    (axes,) = drawn[0].axes
    circles = [patch for patch in axes.patches if isinstance(patch, Circle)]
    assert {round(circle.radius * 0.25, 6) for circle in circles} == {radius_um}
    crosses = [(float(line.get_xdata()[0]), float(line.get_ydata()[0])) for line in axes.lines]
    assert crosses == [circle.center for circle in circles]
    legend = texts(drawn[0])[-1]
    assert ("is a true positive" in legend) == (radius_um == 7.5)
    assert "Ignore*" not in legend, "no ignored area is in the tile"


def test_circles_of_one_pair_among_single_points_are_not_smaller(tmp_path: Path, drawn: list[Figure]) -> None:
    write_csv(tmp_path / "pair.csv", [(20, 20), (20, 40)])
    rows = [(f"{i}.png", "pair.csv" if i == 0 else "one.csv", "train", 0.25) for i in range(4)]
    write_csv(tmp_path / "one.csv", [(20, 20)])
    for image, *_ in rows:
        write_image(tmp_path / image, pixels(60, 60))
    write_csv(tmp_path / "manifest.csv", [("image", "points", "split", "spacing"), *rows])
    draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png")
    assert "is a true positive" in texts(drawn[0])[-1]


def test_tiles_show_most_objects_and_the_legend_explains_dashed_lines(tmp_path: Path, drawn: list[Figure]) -> None:
    root = field_of_points(tmp_path, 20)
    draw_contact_sheet(open_data(root), tmp_path / "sheet.png")
    (axes,) = drawn[0].axes
    assert axes.get_xlim() == (3.5, 195.5), "the point in the middle of five"
    assert axes.get_ylim() == (595.5, 403.5)
    (root / "a.geojson").write_text(json.dumps(json.loads((root / "a.geojson").read_text())[-1:]))
    draw_contact_sheet(open_data(root), tmp_path / "sheet.png")
    assert any("dashed: edges of ignored areas" in text for text in texts(drawn[1])), "the center of the image"


def test_chosen_images_have_a_row_of_tiles(tmp_path: Path, drawn: list[Figure]) -> None:
    """Names are those of the dataset or of files; the title is the name of the folder."""
    dataset = open_data(field_of_points(tmp_path / "lab", 20))
    for image in ("a.png", "a", str(dataset.samples[0].path)):
        draw_contact_sheet(dataset, tmp_path / "sheet.png", images=[image])
        first, second = drawn[-1].axes
        assert first.get_xlim() == (3.5, 195.5)
        assert second.get_xlim() == (403.5, 595.5)
        assert texts(drawn[-1])[:2] == ["lab: points", "train: a.png"]
    with pytest.raises(DataError, match=r"--image b is no image of .*lab; choose from its 1 file \(a.png\)"):
        draw_contact_sheet(dataset, tmp_path / "other.png", images=["a", "b"])
    assert not (tmp_path / "other.png").exists()


def test_rows_state_how_many_images_they_leave_out(tmp_path: Path, drawn: list[Figure]) -> None:
    for name in "abcdefgh":
        write_image(tmp_path / f"{name}.png", pixels(20, 20))
    rows = [(f"{name}.png", "x", "train" if name < "h" else "test", 1) for name in "abcdefgh"]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    draw_contact_sheet(open_data(tmp_path), tmp_path / "sheet.png")
    assert texts(drawn[0])[1:3] == ["train (6 of 7 images)", "test"]
