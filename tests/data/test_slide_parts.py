"""Slides as training data: outlined areas of slides are images, and squares in regions with classes have labels."""

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn_slides import MARK, DrawnSlide, draw_slide
from layouts import note_messages, problem_messages, write_csv
from test_custom_task import call, write_recipe
from typer.testing import CliRunner

from rotopath.cli import app
from rotopath.data import Dataset, check, export_data, import_data, open_data
from rotopath.data.annotations import parse_points, read_objects, read_points
from rotopath.data.batches import Batches, SampleReader, open_pixels
from rotopath.data.dataset import annotated_size_px, read_image
from rotopath.data.manifest import MAX_SIDE_PX
from rotopath.data.sampling import Windows
from rotopath.images.outlines import fill_outline
from rotopath.images.slides import open_slide
from rotopath.tasks import MITOSIS, NUCLEI
from rotopath.training.checkpoint import compute_fingerprint

pytestmark = pytest.mark.slow


def polygon(*corners: tuple[float, float], name: str) -> dict[str, Any]:
    """Return the GeoJSON feature of a polygon with corners (row, column)."""
    ring = [[x, y] for y, x in (*corners, corners[0])]
    properties = {"objectType": "annotation", "classification": {"name": name}}
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": [ring]}, "properties": properties}


def rectangle(top: float, left: float, height: float, width: float, name: str = "Region*") -> dict[str, Any]:
    corners = (top, left), (top + height, left), (top + height, left + width), (top, left + width)
    return polygon(*corners, name=name)


def point(row: float, column: float, name: str = "mark") -> dict[str, Any]:
    properties = {"objectType": "annotation", "classification": {"name": name}}
    return {"type": "Feature", "geometry": {"type": "Point", "coordinates": [column, row]}, "properties": properties}


def write_manifest(root: Path, column: str, features: list[dict[str, Any]], image: str = "slide.svs") -> Path:
    (root / "slide.geojson").write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    rows = [("image", column, "group", "split", "spacing"), (image, "slide.geojson", "patient 1", "train", 0.25)]
    return write_csv(root / "manifest.csv", rows)


def squares(dataset: Dataset) -> list[tuple[int, int, int, int]]:
    return [tuple(sample.box) for sample in dataset.samples if sample.box is not None]  # type: ignore[misc]


@pytest.fixture(scope="module", params=["slide.svs", "image.tif"])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrawnSlide:
    """A slide that is read in parts, and the same pixels in an image that is decoded as a whole."""
    return draw_slide(tmp_path_factory.mktemp("slide") / request.param)


def open_marks(drawn: DrawnSlide, *features: dict[str, Any]) -> Dataset:
    marks = [point(*mark) for mark in drawn.marks]
    return open_data(write_manifest(drawn.path.parent, "points", [*features, *marks], drawn.path.name))


# Areas in which objects are annotated


@pytest.mark.parametrize("spacing", [0.25, 0.4, 0.5, 1.0])
def test_marks_are_at_their_positions_in_each_area(drawn: DrawnSlide, spacing: float) -> None:
    """An independent measurement: the center of mass of the dark pixels around each annotated position."""
    dataset = open_marks(drawn, rectangle(251, 253, 518, 521), rectangle(703, 1301, 639.5, 640.2))
    assert [sample.name for sample in dataset.samples] == [
        f"{drawn.path.name} [251:769, 253:774]",
        f"{drawn.path.name} [703:1342, 1301:1941]",
    ]
    assert {(sample.case, sample.split) for sample in dataset.samples} == {("patient 1", "train")}
    for sample, marks in zip(dataset.samples, (drawn.marks[:5], drawn.marks[5:]), strict=True):
        image, points = read_image(sample, spacing), read_points(sample, spacing)
        assert sample.box is not None
        factor = 0.25 / spacing
        expected = (np.array(marks) - sample.box[:2]) * factor - 0.5
        assert np.allclose(points.positions, expected)
        assert image.shape[:2] == (round(sample.box.height_px * factor), round(sample.box.width_px * factor))
        reach = round(16 * factor)
        for row, column in points.positions:
            top, left = round(row) - reach, round(column) - reach
            part = image[top : top + 2 * reach + 1, left : left + 2 * reach + 1].astype(float)
            weights = 255 - part[..., 0] - (255 - 226)
            rows, columns = np.mgrid[: len(part), : part.shape[1]]
            center = [(weights * axis).sum() / weights.sum() for axis in (rows, columns)]
            assert np.allclose(center, (row - top, column - left), atol=0.12)


def test_pixels_are_those_of_the_slide(drawn: DrawnSlide) -> None:
    (sample,) = open_marks(drawn, rectangle(251, 253, 518, 521)).samples
    with open_slide(drawn.path) as slide:
        assert np.array_equal(read_image(sample, 0.25), slide.read(251, 253, 518, 521))


def test_objects_outside_of_the_areas_are_not_used(drawn: DrawnSlide) -> None:
    dataset = open_marks(drawn, rectangle(250, 250, 520, 520))
    assert note_messages(dataset) == [
        f"{drawn.path.name}: objects with their centers outside of the regions (Region*) are not used: 5 of 10, first: "
        "feature 7."
    ]
    result = check(dataset)
    assert result.counts["train"] == {"images": 1, "cases": 1, "objects": 5, "mark": 5}
    assert problem_messages(result) == []


def test_outlines_are_cut_at_the_edge_of_the_area(drawn: DrawnSlide) -> None:
    features = [
        rectangle(300, 400, 200, 100),
        rectangle(290, 410, 30, 20, "tumor"),
        rectangle(350, 450, 10, 10, "stroma"),
        rectangle(900, 900, 10, 10, "stroma"),
    ]
    dataset = open_data(write_manifest(drawn.path.parent, "outlines", features, drawn.path.name))
    (sample,) = dataset.samples
    objects = read_objects(sample, 0.25)
    assert objects.labels.shape == (200, 100)
    assert objects.classes == {1: "tumor", 2: "stroma"}
    assert (objects.labels[:20, 10:30] == 1).all()
    assert (objects.labels == 1).sum() == 400
    assert (objects.labels == 2).sum() == 100
    half = read_objects(sample, 0.5).labels
    assert half.shape == read_image(sample, 0.5).shape[:2] == (100, 50)
    assert (half == 2).sum() == 25


def test_outlines_are_outside_of_an_area_only_if_no_part_is_inside(drawn: DrawnSlide) -> None:
    """The table counts what a training reads: parts of objects at the edge of an area as well."""
    triangle = polygon((300, 300), (500, 300), (500, 500), name="Region*")
    features = [
        triangle,
        rectangle(440, 330, 16, 16, "inside"),
        rectangle(392, 400, 16, 30, "crossing"),
        rectangle(340, 440, 16, 16, "in the bounding box only"),
        rectangle(900, 900, 16, 16, "elsewhere"),
        rectangle(480, 290, 60, 220, "around the corner"),
    ]
    dataset = open_data(write_manifest(drawn.path.parent, "outlines", features, drawn.path.name))
    assert note_messages(dataset) == [
        f"{drawn.path.name}: objects completely outside of the regions (Region*) are not used: 2 of 5, first: "
        "feature 4."
    ]
    assert set(check(dataset).counts["train"]) - {"images", "cases", "objects", "ignored areas"} == {
        "inside",
        "crossing",
        "around the corner",
    }
    labels = NUCLEI.targets(dataset.samples[0])
    assert (labels[40:56, 140:156] == 255).all(), "what is in the bounding box only is ignored"


def test_images_without_areas_beside_images_with_areas(drawn: DrawnSlide) -> None:
    root = drawn.path.parent
    write_manifest(root, "points", [rectangle(250, 250, 520, 520), *(point(*mark) for mark in drawn.marks[:5])])
    (root / "whole.geojson").write_text(json.dumps([point(*drawn.marks[0])]))
    for name in ("x", "y"):
        draw_slide(root / f"{name}.svs", (900, 900), ((256, 256, 512),))
    rows = [(drawn.path.name, "slide.geojson"), ("x.svs", "whole.geojson"), ("y.svs", "whole.geojson")]
    for used, expected in ((rows, 1), (rows[1:], 0), (rows[:1], 0)):
        table = [("image", "points", "split", "spacing"), *((*row, "train", 0.25) for row in used)]
        notes = note_messages(open_data(write_csv(root / "manifest.csv", table)))
        assert notes == expected * [
            "2 of 3 images have no outline of the class Region*, and are used as a whole: all of their objects must be "
            "annotated, first: x.svs."
        ]


def test_outlines_are_points_of_the_area_with_their_centers(drawn: DrawnSlide) -> None:
    features = [rectangle(300, 400, 200, 100), rectangle(290, 410, 18, 20, "a"), rectangle(490, 410, 22, 20, "b")]
    features += [rectangle(290, 450, 22, 20, "c"), rectangle(490, 480, 18, 20, "d")]
    dataset = open_data(write_manifest(drawn.path.parent, "points", features, drawn.path.name))
    points, faults = parse_points(dataset.samples[0])
    assert faults == []
    assert points.classes == ("c", "d")


def test_messages_have_the_numbers_of_features_in_the_file(drawn: DrawnSlide) -> None:
    features = [rectangle(900, 900, 10, 10, "a"), rectangle(300, 400, 200, 100), point(310, 410)]
    dataset = open_data(write_manifest(drawn.path.parent, "outlines", features, drawn.path.name))
    assert note_messages(check(dataset))[1] == "slide.geojson: feature 3 is left out: it is a point, not a polygon."


def test_the_rest_around_an_area_that_is_no_rectangle_is_ignored(drawn: DrawnSlide) -> None:
    """Also with a hole. The ignored area is a mask by the even-odd rule, as elsewhere."""
    triangle = polygon((300, 300), (500, 300), (500, 500), name="Region*")
    hole = [[y, x] for x, y in ((450, 350), (480, 350), (480, 380), (450, 380), (450, 350))]
    triangle["geometry"]["coordinates"].append(hole)
    dataset = open_marks(drawn, triangle)
    (sample,) = dataset.samples
    assert sample.box == (300, 300, 200, 200)
    (area,) = read_points(sample, 0.25).ignored
    mask = fill_outline(area, (200, 200))
    rows, columns = np.mgrid[:200, :200]
    expected = columns > rows
    expected[150:180, 50:80] = True
    off_diagonal = rows != columns
    assert np.array_equal(mask[off_diagonal], expected[off_diagonal])
    (full,) = open_marks(drawn, rectangle(300, 300, 200, 200)).samples
    assert read_points(full, 0.25).ignored == ()


def test_tasks_ignore_what_is_around_an_area_and_its_objects(drawn: DrawnSlide) -> None:
    """An object in the bounding box of an area, but outside of the area, is neither learned nor background."""
    triangle = polygon((300, 300), (500, 300), (500, 500), name="Region*")
    inside, outside = rectangle(440, 330, 16, 16, "cell"), rectangle(340, 440, 16, 16, "cell")
    features = [triangle, inside, outside]
    (sample,) = open_data(write_manifest(drawn.path.parent, "points", features, drawn.path.name)).samples
    positions, _ = MITOSIS.read_points(sample)
    assert positions.tolist() == [[147.5, 37.5]]
    ignored = MITOSIS.read_ignored(sample)
    assert ignored is not None
    assert ignored[48, 148]
    assert not ignored[148, 38]
    (sample,) = open_data(write_manifest(drawn.path.parent, "outlines", features, drawn.path.name)).samples
    targets = NUCLEI.targets(sample)
    assert (targets[40:56, 140:156] == 255).all()
    assert len(np.unique(targets[140:156, 30:46])) > 1


def test_areas_are_cut_at_the_edge_of_the_slide_and_large_ones_are_divided(
    drawn: DrawnSlide, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_SIDE_PX == 4096
    monkeypatch.setattr("rotopath.data.manifest.MAX_SIDE_PX", 1000)
    dataset = open_marks(drawn, rectangle(-50, -50, 5000, 5000), rectangle(9000, 0, 50, 50))
    assert sorted(squares(dataset)) == [
        (top, left, 768, width) for top in (0, 768) for left, width in ((0, 683), (683, 682), (1365, 683))
    ]
    assert sum(len(parse_points(sample)[0]) for sample in dataset.samples) == 10
    bottom = max(dataset.samples, key=lambda sample: sample.box or (0,) * 4)
    for spacing in (0.3, 0.5, 0.7, 1.0):
        assert (read_image(bottom, spacing)[-1] < 250).all(), "nothing is white beyond the edge"


def test_a_whole_slide_needs_areas_but_is_read_in_parts(tmp_path: Path) -> None:
    drawn = draw_slide(tmp_path / "slide.svs", (11_000, 12_000), ((5000, 6000, 640),))
    marks = [point(*mark) for mark in drawn.marks]
    result = check(open_data(write_manifest(tmp_path, "points", marks)))
    assert problem_messages(result) == [
        "slide.svs: is a whole slide of 11000 × 12000 px (height × width), too large to be one image of a dataset; "
        "outline the annotated areas in QuPath with the class Region*."
    ]
    dataset = open_data(write_manifest(tmp_path, "points", [*marks, rectangle(5001, 6001, 638, 638)]))
    assert annotated_size_px(drawn.path) == (11_000, 12_000)
    result = check(dataset)
    assert problem_messages(result) == []
    assert result.counts["train"]["mark"] == 5
    pixel = tuple(read_image(dataset.samples[0], 0.25)[tuple(np.array(drawn.marks[0], int) - (5001, 6001))])
    assert pixel == MARK


def test_a_large_tiff_is_read_in_parts(tmp_path: Path) -> None:
    """Pillow refuses files with so many pixels; their spacing is read by another package."""
    drawn = draw_slide(tmp_path / "large.tif", (14_000, 14_000), ((5000, 6000, 640),))
    features = [rectangle(5001, 6001, 638, 638), *(point(*mark) for mark in drawn.marks)]
    dataset = open_data(write_manifest(tmp_path, "points", features, "large.tif"))
    assert check(dataset).counts["train"]["mark"] == 5
    assert problem_messages(check(open_data(write_manifest(tmp_path, "points", features[1:], "large.tif"))))[
        0
    ].endswith("outline the annotated areas in QuPath with the class Region*.")


# Regions with classes


def label_squares(root: Path, *features: dict[str, Any], size: int = 4096) -> Dataset:
    if not (root / "slide.svs").exists():
        draw_slide(root / "slide.svs", (size, size), ((256, 256, 512),))
    return open_data(write_manifest(root, "regions", list(features)))


def test_squares_in_a_region_have_its_class(tmp_path: Path) -> None:
    """A square has a side of 128 µm: 512 px. At least 75 % of it are inside."""
    dataset = label_squares(tmp_path, rectangle(512, 1024, 1024, 1450, "tumor"), rectangle(2048, 0, 520, 520, "stroma"))
    assert dataset.annotated == "labels"
    boxes = {"tumor": set(), "stroma": set()}  # type: dict[str, set[tuple[int, ...]]]
    for sample in dataset.samples:
        boxes[sample.label or ""].add(tuple(sample.box or ()))
    assert boxes["tumor"] == {(row, column, 512, 512) for row in (512, 1024) for column in (1024, 1536, 2048)}
    assert boxes["stroma"] == {(2048, 0, 512, 512)}
    assert read_image(dataset.samples[0], 1.0).shape == (128, 128, 3)
    result = check(dataset)
    assert problem_messages(result) == []
    assert result.counts["train"] == {"images": 7, "cases": 1, "tumor": 6, "stroma": 1}


def test_the_smaller_of_overlapping_regions_counts_and_ignored_areas_do_not(tmp_path: Path) -> None:
    dataset = label_squares(
        tmp_path,
        rectangle(512, 512, 512, 512, "tumor"),
        rectangle(0, 0, 2048, 2048, "stroma"),
        rectangle(1024, 1024, 1024, 1024, "Ignore*"),
        rectangle(1024, 1024, 600, 600, "tumor"),
    )
    labels = {sample.box[:2]: sample.label for sample in dataset.samples if sample.box}
    assert labels.pop((512, 512)) == "tumor"
    assert set(labels.values()) == {"stroma"}
    assert all(row < 1024 or column < 1024 for row, column in labels)
    assert len(labels) == 16 - 1 - 4
    assert note_messages(dataset) == ["slide.svs: 1 regions are covered by others, or are tiny, and are not used."]


def test_a_small_region_has_one_square_around_its_deepest_point(tmp_path: Path) -> None:
    dataset = label_squares(tmp_path, rectangle(2000, 1000, 260, 390, "duct"), rectangle(0, 3900, 150, 196, "edge"))
    (duct, edge) = sorted(squares(dataset), reverse=True)
    assert abs(duct[0] + 256 - 2130) <= 64
    assert 1000 < duct[1] + 256 < 1390
    assert edge == (0, 4096 - 512, 512, 512)


def test_regions_need_a_class(tmp_path: Path) -> None:
    dataset = label_squares(tmp_path, rectangle(0, 0, 900, 900, ""))
    assert problem_messages(dataset) == [
        "manifest.csv: line 2: 'slide.svs' has 1 regions without a class, first at row and column 450, 450; give each "
        "a class, or the class Ignore*."
    ]


# Use of parts


def test_batches_are_the_same_from_every_cache_and_with_workers(drawn: DrawnSlide) -> None:
    dataset = open_marks(drawn, rectangle(251, 253, 518, 521), rectangle(703, 1301, 639, 640))
    reader = SampleReader(0.5)

    class Corners:
        def draw(self, step: int) -> Windows:
            corners = np.random.default_rng(step).integers(-20, 200, (2, 6))
            return Windows(np.arange(6) % 2, corners[0], corners[1], np.zeros(6, np.int64))

    results = []
    for cache, workers in (("memory", 0), ("none", 0), ("none", 2)):
        pixels = open_pixels(dataset.samples, reader, cache, device=_cpu())  # type: ignore[arg-type]
        assert pixels.sizes_px.tolist() == [[259, 260], [320, 320]]
        results.append([images for images, _ in Batches(pixels, Corners(), 64).load(range(3), workers=workers)])
    for others in results[1:]:
        assert all((first == other).all() for first, other in zip(results[0], others, strict=True))


def _cpu() -> Any:
    import torch

    return torch.device("cpu")


def test_fingerprints_depend_on_the_areas(drawn: DrawnSlide) -> None:
    first = compute_fingerprint(open_marks(drawn, rectangle(251, 253, 518, 521)))
    assert first == compute_fingerprint(open_marks(drawn, rectangle(251, 253, 518, 521)))
    assert first != compute_fingerprint(open_marks(drawn, rectangle(251, 253, 518, 520)))


def test_import_check_show_and_export(tmp_path: Path) -> None:
    """The commands work on slides with areas, and on regions with classes."""
    size = 512
    for number, name in enumerate(("P1_a", "P2_a", "P3_a", "P3_b")):
        lab = tmp_path / "lab"
        lab.mkdir(exist_ok=True)
        drawn = draw_slide(lab / f"{name}.svs", (1600, 1700), ((600, 600, size),), seed=number)
        marks = [rectangle(row - 8, column - 8, 16, 16, "mark") for row, column in drawn.marks]
        features = [*marks, rectangle(590, 590, 540, 540)]
        (lab / f"{name}.geojson").write_text(json.dumps(features))
    words = ["data", "import", lab, "--out", tmp_path / "objects", "--patient", "(P[0-9])_"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    dataset = open_data(tmp_path / "objects")
    assert len(dataset.samples) == 4
    assert len({sample.split for sample in dataset.samples if sample.case == "P3"}) == 1
    export_data(dataset, tmp_path / "exported")
    again = import_data([lab / "P1_a.svs", lab / "P2_a.svs", tmp_path / "exported"], tmp_path / "again")
    assert [sample.name.split("/")[-1] for sample in again.samples] == [
        "P1_a.svs [590:1130, 590:1130]",
        "P2_a.svs [590:1130, 590:1130]",
    ]
    coco = json.loads(export_data(dataset, tmp_path / "coco.json").read_text())
    assert len(coco["images"]) == 4
    show = CliRunner().invoke(app, ["data", "show", str(tmp_path / "objects"), "--out", str(tmp_path / "sheet.png")])
    assert show.exit_code == 0, show.output

    for path in lab.glob("*.geojson"):
        path.write_text(json.dumps([rectangle(0, 0, 1600, 800, "left"), rectangle(0, 800, 1600, 900, "right")]))
    dataset = import_data([lab], tmp_path / "regions", read_as="regions", patient="(P[0-9])_")
    with (tmp_path / "regions" / "manifest.csv").open(newline="") as file:
        assert next(csv.reader(file)) == ["image", "regions", "group", "split", "spacing"]
    counts = Counter(sample.label for sample in dataset.samples)
    assert set(counts) == {"left", "right"}
    assert problem_messages(check(dataset)) == []
    for command in (["check", "--task", "classify"], ["show", "--out", str(tmp_path / "labels.png")]):
        shown = CliRunner().invoke(app, ["data", command[0], str(tmp_path / "regions"), *command[1:]])
        assert shown.exit_code == 0, shown.output
    second = import_data([tmp_path / "regions"], tmp_path / "second")
    assert [sample.box for sample in second.samples] == [sample.box for sample in dataset.samples]


@pytest.mark.parametrize("task", ["tumor", "mitosis", "nuclei"])
def test_training_and_evaluation_on_parts_of_slides(tmp_path: Path, task: str) -> None:
    """From manifests of slides to scores. Pixels are read from the slides by two workers."""
    column = {"tumor": "regions", "mitosis": "points", "nuclei": "outlines"}[task]
    rows = [("image", column, "group", "split", "spacing")]
    for number, split in enumerate(("train", "train", "valid", "test")):
        drawn = draw_slide(tmp_path / f"{number}.svs", (1300, 1300), ((300, 300, 700),), 0.25, seed=number)
        if task == "tumor":
            features = [rectangle(0, 0, 640, 1300, "normal"), rectangle(640, 0, 660, 1300, "tumor")]
        else:
            areas = [rectangle(299, 301, 350, 690), rectangle(661, 301, 331, 690)]
            features = [*areas, *(rectangle(row - 8, column - 8, 16, 16, "mark") for row, column in drawn.marks)]
        (tmp_path / f"{number}.geojson").write_text(json.dumps(features))
        rows.append((f"{number}.svs", f"{number}.geojson", f"patient {number}", split, "0.25"))
    data = write_csv(tmp_path / "mine.csv", rows)
    recipe = write_recipe(
        tmp_path / "recipe.toml", task=task, data=str(data), orientations=1, batch=8, cache="none", workers=2
    )
    trained = call("train", recipe, "--out", tmp_path / "run")
    assert trained.exit_code == 0, trained.output
    evaluated = call("evaluate", tmp_path / "run", "--data", data)
    assert evaluated.exit_code == 0, evaluated.output
    scores = json.loads((tmp_path / "run" / "evaluation-test.json").read_text())
    scores = scores["test"]
    if task == "tumor":
        assert scores["images"] == 4, "two squares of each class"
        assert list(scores["slides"]) == ["patient 3"]
    else:
        assert scores["hits"] + scores["missed"] == 5, "every mark is in one of the two areas"
        assert list(scores["cases"]) == ["patient 3"]
