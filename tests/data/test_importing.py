"""Import and export: files in the layouts of other software become a manifest with the same objects, or are refused."""

import contextlib
import csv
import json
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layouts import note_messages, outline_xml, problem_messages, write_csv, write_image, write_text
from PIL import Image
from scipy.io import loadmat, savemat
from sharing import hold_elsewhere
from typer.testing import CliRunner

from rotopath.cli import app
from rotopath.data import DataError, Dataset, check, export_data, import_data, open_data
from rotopath.data.annotations import AnnotationError, parse_objects, parse_points, read_objects, read_points
from rotopath.data.import_masks import _read_mat_arrays, decode_runs, encode_runs
from rotopath.images import UnreadableFileError
from rotopath.images.geojson import SlideObject, read_geojson, write_geojson, write_rows
from rotopath.images.outlines import Point
from rotopath.writing import BusyError, identify_file

SIZE = (60, 80)  # height and width of images
NUCLEI = ((10, 12), (12, 60), (30, 33), (48, 15), (45, 66))  # row and column of the centers of dark discs
RADIUS = 5


def tissue(size: tuple[int, int] = SIZE, nuclei: Any = NUCLEI, seed: int = 0) -> np.ndarray:
    """Return a pink image (H, W, 3) with dark discs, and some noise, so that images with different seeds differ."""
    image = np.random.default_rng(seed).integers(0, 9, (*size, 3)) + np.array([200, 150, 190])
    image[label_map(size, nuclei) > 0] -= (110, 90, 60)
    return image.astype(np.uint8)


def label_map(size: tuple[int, int] = SIZE, nuclei: Any = NUCLEI) -> np.ndarray:
    rows, columns = np.mgrid[: size[0], : size[1]]
    labels = np.zeros(size, np.uint16)
    for number, (row, column) in enumerate(nuclei, 1):
        labels[np.hypot(rows - row, columns - column) <= RADIUS] = number * 10
    return labels


def feature(kind: str, coordinates: Any, name: str = "", **properties: Any) -> dict[str, Any]:
    classification = {"classification": {"name": name, "color": [200, 0, 0]}} if name else {}
    geometry = {"type": kind, "coordinates": coordinates}
    return {
        "type": "Feature",
        "geometry": geometry,
        "properties": {"objectType": "annotation", **classification, **properties},
    }


def square(x: float, y: float, side: float) -> list[list[float]]:
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]


def write_json(path: Path, content: Any) -> Path:
    return write_text(path, json.dumps(content))


def bring(source: Path, *more: Path, **options: Any) -> Dataset:
    """Import sources to the folder `out` beside the first one."""
    return import_data([source, *more], source.parent / "out", **{"spacing_um_px": 0.25, **options})


def manifest(root: Path) -> list[dict[str, str]]:
    with (root / "out" / "manifest.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# GeoJSON


def test_points_of_qupath_keep_their_classes_and_ignored_areas(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    features = [
        feature("Point", [12.5, 10.5], "mitosis"),
        feature("MultiPoint", [[60.25, 12.125], [33.5, 30.5]], "apoptosis"),
        feature("Polygon", [square(1, 40, 9)], "Ignore*"),
        feature("Polygon", [square(0, 0, 80)], "Region*"),
    ]
    write_json(root / "a.geojson", {"type": "FeatureCollection", "features": features})
    dataset = bring(root)
    assert dataset.annotated == "points"
    points = read_points(dataset.samples[0], 0.25)
    assert points.positions.tolist() == [[10, 12], [11.625, 59.75], [30, 33]]
    assert points.classes == ("mitosis", "apoptosis", "apoptosis")
    (area,) = points.ignored
    assert area[0].area_px == 81
    assert read_points(dataset.samples[0], 0.125).ignored[0][0].area_px == 4 * 81
    result = check(dataset)
    assert result.counts["train"] == {
        **dict.fromkeys(("images", "cases", "mitosis", "ignored areas"), 1),
        "objects": 3,
        "apoptosis": 2,
    }
    assert problem_messages(result) == []
    assert manifest(tmp_path)[0] == {
        "image": "../lab/a.png",
        "points": "annotations/a.png.geojson",
        "split": "train",
        "spacing": "0.25",
    }


def test_polygons_are_not_rounded(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "images" / "a.tif", tissue())
    outer, hole, part = square(1.123456789012, 2.5, 20), square(5, 5.3333333333333, 4), square(40, 40, 9)
    features = [
        feature("Polygon", [outer, hole], "tumor", measurements={"score": 0.1}),
        feature("MultiPolygon", [[outer, hole], [part]], "stroma"),
    ]
    write_json(root / "annotations" / "a.geojson", features)
    dataset = bring(root)
    assert dataset.annotated == "objects"
    first, second = read_geojson(tmp_path / "out" / "annotations" / "a.tif.geojson")
    original = read_geojson(root / "annotations" / "a.geojson")
    assert (first.shape, second.shape) == (original[0].shape, original[1].shape)
    assert (first.class_name, first.color, first.measurements) == ("tumor", (200, 0, 0), {"score": 0.1})


def test_areas_around_detected_objects_are_regions(tmp_path: Path) -> None:
    """QuPath exports the annotation in which cells were detected together with the cells."""
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    cells = [feature("Polygon", [square(x, 20, 8)], objectType="detection") for x in (10, 30, 50)]
    write_json(root / "a.geojson", [feature("Polygon", [square(1, 1, 58)]), *cells])
    dataset = bring(root)
    assert read_objects(dataset.samples[0], 0.25).numbers == [1, 2, 3]
    assert any(
        "outlines without a class that contain other objects (1) are regions" in n for n in note_messages(dataset)
    )
    assert len(read_geojson(dataset.samples[0].annotations[0])) == 4


def test_own_predictions_are_found_by_their_folders(tmp_path: Path) -> None:
    """`rotopath predict` writes a folder for each image, with the objects as GeoJSON and as a table."""
    for name in ("a.png", "b.png"):
        write_image(tmp_path / "images" / name, tissue())
        folder = tmp_path / "results" / name
        write_json(
            folder / "objects.geojson", {"type": "FeatureCollection", "features": [feature("Point", [5, 6], "x")]}
        )
        write_text(folder / "objects.csv", "number,id,class,x_px,y_px\n1,1,x,5,6\n")
        write_text(folder / "summary.json", "{}")
        write_image(folder / "overlay.png", tissue())
    dataset = bring(tmp_path / "images", tmp_path / "results")
    assert [sample.name for sample in dataset.samples] == ["../images/a.png", "../images/b.png"]
    assert [len(read_points(sample, 0.25)) for sample in dataset.samples] == [1, 1]
    assert not any("left out" in note for note in note_messages(dataset)), "files of results are not mentioned"


def test_rejected_objects_are_no_objects(tmp_path: Path) -> None:
    """Accepted objects, and those without a mark, are used; all of them are kept in the written file."""
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    marks: list[dict[str, Any]] = [{"accepted": 1}, {"accepted": 0, "score": 0.9}, {"score": 0.8}, {"accepted": False}]
    features = [
        feature("Point", [column + 0.5, row + 0.5], "mitosis", measurements=mark)
        for (row, column), mark in zip(NUCLEI, marks, strict=False)
    ]
    write_json(root / "a.geojson", features)
    dataset = bring(root)
    assert read_points(dataset.samples[0], 0.25).positions.tolist() == [list(NUCLEI[0]), list(NUCLEI[2])]
    assert any("marked: 1 accepted, 2 rejected, which are not used" in note for note in note_messages(dataset))
    assert len(read_geojson(dataset.samples[0].annotations[0])) == 4
    coco_file = export_data(dataset, tmp_path / "coco.json")
    assert len(json.loads(coco_file.read_text())["annotations"]) == 2

    outlines = [
        feature("Polygon", [square(x, 20, 8)], measurements={"accepted": mark}) for x, mark in ((10, 0), (30, 1))
    ]
    write_json(root / "a.geojson", outlines)
    shutil.rmtree(tmp_path / "out")
    labels = read_objects(bring(root).samples[0], 0.25).labels
    assert labels[24, 34] == 1
    assert labels[24, 14] == 0


def results(root: Path, name: str, *features: dict[str, Any], spacing_um_px: float = 0.25) -> None:
    """Write a folder as `rotopath predict` does, with the files that matter."""
    write_json(root / name / "objects.geojson", {"type": "FeatureCollection", "features": list(features)})
    write_json(root / name / "summary.json", {"slide": {"spacing_um_px": spacing_um_px}})


def test_next_round_keeps_the_splits_of_an_earlier_import(tmp_path: Path) -> None:
    """Corrections replace annotations of the earlier import; new images are in the split of their patient, or train."""
    names = [f"P{i}_1.png" for i in range(6)]
    for i, name in enumerate(names):
        write_image(tmp_path / "lab" / name, tissue(seed=i))
        write_json(tmp_path / "lab" / f"{name}.geojson", [feature("Point", [12, 10], "cell")])
    first = import_data([tmp_path / "lab"], tmp_path / "first", patient="(P[0-9]+)_", spacing_um_px=0.25)
    splits = {sample.path.name: sample.split for sample in first.samples}
    tested = next(name for name, split in splits.items() if split == "test")
    for i, name in enumerate([tested.replace("_1", "_2"), "P9_1.png"]):
        write_image(tmp_path / "more" / name, tissue(seed=10 + i))
        results(tmp_path / "results", name, feature("Point", [15, 48], "cell"), spacing_um_px=0.5)
    results(tmp_path / "results", names[0], feature("Point", [15, 48], "cell"), feature("Point", [12, 10], "other"))

    sources = [tmp_path / "first", tmp_path / "more", tmp_path / "results"]
    dataset = import_data(sources, tmp_path / "second", patient="(P[0-9]+)_")
    samples = {sample.path.name: sample for sample in dataset.samples}
    assert len(samples) == 8
    assert {name: samples[name].split for name in splits} == splits
    assert samples[tested.replace("_1", "_2")].split == "test", "the patient is tested"
    assert samples["P9_1.png"].split == "train"
    assert read_points(samples[names[0]], 0.25).classes == ("cell", "other")
    assert samples["P9_1.png"].spacing_um_px == 0.5, "that of the prediction"
    assert samples[names[1]].spacing_um_px == 0.25
    notes = "\n".join(note_messages(dataset))
    assert "the annotations of 1 images of the earlier import are replaced" in notes
    assert "new images: 1 train, 1 test" in notes
    assert problem_messages(check(dataset)) == []

    again = import_data([tmp_path / "second"], tmp_path / "third")
    rows = [(tmp_path / name / "manifest.csv").read_text() for name in ("second", "third")]
    assert rows[0] == rows[1]
    assert len(again.samples) == 8


def predicted_results(root: Path, name: str, count: int = 6) -> Path:
    """Write a folder of results as `rotopath predict` does, with points in a row, and return the file of objects."""
    write_image(root / "more" / name, tissue())
    objects = [SlideObject(Point(30, 10 * i), "detection", "cell") for i in range(count)]
    path = root / "results" / name / "objects.geojson"
    path.parent.mkdir(parents=True)
    write_geojson(path, objects)
    with path.with_name("objects.csv").open("w", newline="", encoding="utf-8") as file:
        assert len(list(write_rows(objects, file))) == count
    files = {path.name: identify_file(path) for path in sorted(path.parent.iterdir())}
    write_json(path.with_name("summary.json"), {"slide": {"spacing_um_px": 0.25}, "files": files})
    return path


def test_notes_state_which_predictions_are_corrected_and_how(tmp_path: Path) -> None:
    """By identifiers, or else by positions. Nobody may have looked at the others, which become annotations, too."""
    names = ["a.png", "b.png", "c.png", "d.png", "e.png"]
    paths = {name: predicted_results(tmp_path, name) for name in names}
    for name in ("c.png", "d.png"):
        features = json.loads(paths[name].read_text())["features"]
        features[0]["geometry"]["coordinates"][0] += 3  # moved
        features[1]["properties"]["classification"]["name"] = "other"
        del features[2:4]
        features += [feature("Point", [70, 50], "cell"), feature("Polygon", [square(0, 0, 80)], "Region*")]
        if name == "d.png":  # an object that has moved without its identifier is deleted and added
            features = [{key: value for key, value in item.items() if key != "id"} for item in features]
        write_json(paths[name], features)
    content = json.loads(paths["e.png"].read_text())
    write_json(paths["e.png"], content)  # saved without a change
    dataset = import_data([tmp_path / "more", tmp_path / "results"], tmp_path / "out", read_as="points")
    assert (
        "2 of 5 files of results are as predicted, and become annotations; if nobody has checked them, delete their "
        "folders, and import again: a.png, b.png."
    ) in note_messages(dataset)
    assert (
        "3 of 5 files of results are corrected: c.png (2 deleted, 1 added, 2 changed of 6 predicted), d.png (3 deleted,"
        " 2 added, 1 changed of 6 predicted), e.png (no object deleted, added or moved of 6 predicted)."
    ) in note_messages(dataset)
    assert problem_messages(dataset) == []
    paths["a.png"].with_name("objects.csv").write_text("edited")
    paths["a.png"].write_text('{"type": "FeatureCollection", "features": []}')
    paths["b.png"].with_name("mine.geojson.gz").touch()
    again = import_data([tmp_path / "more", tmp_path / "results"], tmp_path / "again", read_as="points")
    assert any("4 of 5 files of results are corrected: a.png, c.png (2 del" in note for note in note_messages(again))
    (problem,) = problem_messages(again)
    assert "mine.geojson.gz: is not read, but only objects.geojson beside it; if it contains the corr" in problem


def test_next_round_of_labels(tmp_path: Path) -> None:
    for i in range(8):
        write_image(tmp_path / "lab" / ("tumor" if i % 2 else "stroma") / f"{i}.png", tissue(seed=i))
    first = import_data([tmp_path / "lab"], tmp_path / "first", spacing_um_px=0.5)
    for i in range(2):
        write_image(tmp_path / "more" / ("tumor" if i % 2 else "stroma") / f"new{i}.png", tissue(seed=20 + i))
    dataset = import_data([tmp_path / "first", tmp_path / "more"], tmp_path / "second", spacing_um_px=0.5)
    assert [sample.label for sample in dataset.samples].count("tumor") == 5
    assert {s.path.name: s.split for s in first.samples}.items() <= {
        s.path.name: s.split for s in dataset.samples
    }.items()
    write_json(tmp_path / "objects" / "0.geojson", [feature("Point", [12, 10], "cell")])
    with pytest.raises(DataError, match="has a class for each image, but the other sources describe objects"):
        import_data([tmp_path / "first", tmp_path / "objects"], tmp_path / "third")


def test_images_are_found_beside_annotations(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", tissue())
    write_image(tmp_path / "b.png", tissue(seed=1))
    annotation = write_json(tmp_path / "a.geojson", [feature("Point", [12, 10])])
    assert [sample.path.name for sample in bring(annotation).samples] == ["a.png"]
    results(tmp_path / "results", "b.png", feature("Point", [12, 10]))
    dataset = import_data([tmp_path / "results" / "b.png" / "objects.geojson"], tmp_path / "second")
    assert [sample.path.name for sample in dataset.samples] == ["b.png"]


def test_one_annotation_and_one_image_belong_together(tmp_path: Path) -> None:
    image = write_image(tmp_path / "slide.png", tissue())
    annotation = write_json(tmp_path / "exported.json", [feature("Point", [12, 10])])
    assert len(read_points(bring(image, annotation).samples[0], 0.25)) == 1


# COCO


def coco(root: Path, annotations: list[dict[str, Any]], count: int = 1, names: tuple[str, ...] = ("a", "b")) -> Path:
    images = []
    for i in range(count):
        write_image(root / "images" / f"{i}.png", tissue())
        images.append({"id": i + 1, "file_name": f"{i}.png", "height": SIZE[0], "width": SIZE[1]})
    items = [{"id": i, "image_id": 1, "category_id": 1, **item} for i, item in enumerate(annotations)]
    categories = [{"id": i, "name": name} for i, name in enumerate(names, 1)]
    write_json(root / "annotations.json", {"images": images, "annotations": items, "categories": categories})
    return root


def test_polygons_and_masks_of_coco(tmp_path: Path) -> None:
    mask = np.zeros((9, 12), bool)
    mask[2:7, 3:10] = True
    mask[4, 5], mask[0, 11] = False, True
    whole = np.zeros(SIZE, bool)
    whole[20:29, 30:42] = mask
    root = coco(
        tmp_path / "lab",
        [
            {"segmentation": [[5, 5, 15, 5, 15, 15, 5, 15], [50, 5, 55, 5, 55, 8]], "category_id": 2},
            {"segmentation": {"size": list(SIZE), "counts": encode_runs(whole)}},
            {"segmentation": [[0, 30, 4, 30, 4, 34]], "iscrowd": 1},
        ],
    )
    objects = read_objects(bring(root).samples[0], 0.25)
    assert objects.classes == {1: "b", 2: "a"}
    assert np.array_equal(objects.labels == 2, whole)
    assert objects.labels[5:15, 5:15].min() == objects.labels[5, 52] == 1
    assert len(objects.ignored) == 1


@pytest.mark.parametrize(
    ("corner", "side", "pixels", "parts"), [(20, 10, 200, 2), (15, 10, 175, 1), (12, 10, 136, 1), (10.5, 9, 100, 1)]
)
def test_polygons_of_one_coco_object_may_overlap(
    tmp_path: Path, corner: float, side: int, pixels: int, parts: int
) -> None:
    """As in pycocotools. An outline whose polygons overlap would exclude the pixels that are in both."""
    write_image(tmp_path / "lab" / "a.png", tissue())
    rings = [np.ravel(square(x, x, side)[:-1]).tolist() for x, side in ((10, 10), (corner, side))]
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "segmentation": rings}
    content = {"images": [IMAGE], "annotations": [annotation], "categories": [{"id": 1, "name": "x"}]}
    write_json(tmp_path / "lab" / "coco.json", content)
    dataset = bring(tmp_path / "lab")
    assert (read_objects(dataset.samples[0], 0.25).labels > 0).sum() == pixels
    (item,) = read_geojson(dataset.samples[0].annotations[0])
    assert not isinstance(item.shape, Point)
    assert len(item.shape) == parts


def test_run_lengths_as_pycocotools_writes_them() -> None:
    """The text was written by pycocotools."""
    mask, (top, left) = decode_runs("m05400MM0330000007LM", 9, 12)
    expected = np.zeros((9, 12), bool)
    expected[2:7, 3:10] = True
    expected[4, 5], expected[0, 11] = False, True
    found = np.zeros((9, 12), bool)
    found[top : top + mask.shape[0], left : left + mask.shape[1]] = mask
    assert np.array_equal(found, expected)
    assert encode_runs(expected) == [29, 5, 4, 5, 4, 2, 1, 2, 4, 5, 4, 5, 4, 5, 4, 5, 11, 1, 8]


@pytest.mark.parametrize("counts", [[5, 4], [-1, 109], "m0", "\x00", [108], "o" * 30])
def test_invalid_run_lengths_are_refused(counts: Any) -> None:
    with pytest.raises(ValueError, match="its"):
        decode_runs(counts, 9, 12)


def test_boxes_of_coco_and_of_midog_become_points(tmp_path: Path) -> None:
    """COCO states left, top, width and height; MIDOG left, top, right and bottom."""
    for name, boxes in (("coco", ([10, 10, 4, 6], [50, 40, 10, 10])), ("midog", ([10, 10, 14, 16], [50, 40, 60, 50]))):
        root = coco(
            tmp_path / name / "lab", [{"bbox": box} for box in boxes], names=("mitotic figure", "hard negative")
        )
        dataset = bring(root)
        assert dataset.annotated == "points"
        points = read_points(dataset.samples[0], 0.25)
        assert points.positions.tolist() == [[12.5, 11.5], [44.5, 54.5]]
        assert set(points.classes) == {"mitotic figure"}
        assert any("as in MIDOG" in note for note in note_messages(dataset)) == (name == "midog")


@pytest.mark.parametrize(
    ("boxes", "areas", "are_corners"),
    [
        ([[10, 10, 14, 16], [20, 12, 24, 18]], None, True),  # all of them are 4 × 6 px, but only as corners
        ([[10, 10, 14, 16], [20, 12, 14, 16]], None, False),  # all of them are 14 × 16 px
        ([[10, 10, 14, 16]], None, False),
        ([[10, 10, 14, 16]], [24], True),
        ([[10, 10, 14, 16]], [224], False),
        ([[10, 10, 5, 6], [40, 30, 45, 36]], None, False),
    ],
)
def test_boxes_that_fit_in_both_ways(
    tmp_path: Path, boxes: list[list[int]], areas: list[int] | None, are_corners: bool
) -> None:
    items: list[dict[str, Any]] = [{"bbox": box} for box in boxes]
    for item, area in zip(items, areas or [], strict=False):
        item["area"] = area
    points = read_points(bring(coco(tmp_path / "lab", items)).samples[0], 0.25)
    left, top, right, bottom = boxes[0]
    expected = [(top + bottom) / 2, (left + right) / 2] if are_corners else [top + bottom / 2, left + right / 2]
    assert (points.positions[0] + 0.5).tolist() == expected


@pytest.mark.parametrize("name", ["../0.png", "/etc/0.png", "images/../../0.png", "..\\0.png", "C:/0.png", ""])
def test_names_of_images_outside_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    root = coco(tmp_path / "lab", [])
    content = json.loads((root / "annotations.json").read_text())
    content["images"][0]["file_name"] = name
    write_json(root / "annotations.json", content)
    with pytest.raises(UnreadableFileError, match="outside of its folder"):
        bring(root)
    assert not (tmp_path / "out").exists()


def test_splits_of_coco_are_the_names_of_its_files(tmp_path: Path) -> None:
    for split in ("train", "val", "test"):
        root = tmp_path / "lab" / f"{split}_images"
        write_image(root / f"{split}.png", tissue())
        image = {"id": 1, "file_name": f"{split}.png", "height": SIZE[0], "width": SIZE[1]}
        item = {"image_id": 1, "id": 1, "category_id": 1, "bbox": [1, 1, 9, 9]}
        content = {"images": [image], "annotations": [item], "categories": [{"id": 1, "name": "x"}]}
        write_json(tmp_path / "lab" / "annotations" / f"instances_{split}2017.json", content)
    bring(tmp_path / "lab")
    assert {row["image"][-9:]: row["split"] for row in manifest(tmp_path)} == {
        "/test.png": "test",
        "train.png": "train",
        "s/val.png": "valid",
    }


IMAGE = {"id": 1, "file_name": "a.png", "height": SIZE[0], "width": SIZE[1]}


@pytest.mark.parametrize(
    ("annotation", "message"),
    [
        ({}, "neither a segmentation nor a bounding box"),
        ({"bbox": [1, 2, 3]}, "a bbox that is not a list of four numbers"),
        ({"bbox": [1, 2, 0, 4]}, "neither a segmentation nor a bounding box with an area"),
        ({"image_id": 2}, "the image_id 2, which it does not list"),
        ({"category_id": 7}, "the category_id 7, which it does not list"),
        ({"segmentation": [[1, 2, 3, 4]]}, "a polygon needs at least three vertices"),
        ({"segmentation": {"counts": [10**30], "size": [60, 80]}}, "a number has 31 digits"),
        ({"segmentation": {"counts": [1], "size": [10**6, 10**6]}}, "1000000 × 1000000 px, but its image 60 × 80 px"),
        ({"segmentation": {"counts": [0, 9, 9591], "size": [120, 80]}}, "mask has 120 × 80 px, but its image 60 × 80"),
        ({"segmentation": [[1, 2, 1e300, 4, 5, 6]]}, "with coordinates that are on the image"),
        ({"keypoints": [float("nan"), 2, 2]}, "its keypoint is not on the image"),
        ({"bbox": [1, 2, 1e308, 1e308]}, "neither a segmentation nor a bounding box with an area"),
    ],
)
def test_faulty_coco_files_are_refused(tmp_path: Path, annotation: dict[str, Any], message: str) -> None:
    write_image(tmp_path / "lab" / "a.png", tissue())
    item = {"id": 5, "image_id": 1, "category_id": 1, **annotation}
    content = {"images": [IMAGE], "annotations": [item], "categories": [{"id": 1, "name": "x"}]}
    write_json(tmp_path / "lab" / "coco.json", content)
    with pytest.raises(UnreadableFileError, match=message):
        bring(tmp_path / "lab")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.json", "[" * 100_000, "is cut off or not valid JSON"),
        ("a.geojson", "null", "is not GeoJSON"),
        ("a.geojson", '[{"geometry": {"type": "Point", "coordinates": [1e300, 1]}}]', "larger than any slide"),
        ("a.geojson", '[{"geometry": {"type": "Point", "coordinates": [NaN, 1]}}]', "NaN or infinite"),
        ("coco.json", '{"images": [{"id": 1}], "annotations": []}', "'file_name' is missing or wrong"),
        ("a.xml", '<!DOCTYPE a [<!ENTITY b "c">]><Annotations>&b;</Annotations>', "may be harmful"),
        ("a_mask.png", "text", "is not an image in a supported format"),
    ],
)
def test_faulty_files_are_refused(tmp_path: Path, name: str, text: str, message: str) -> None:
    write_image(tmp_path / "lab" / "a.png", tissue())
    write_text(tmp_path / "lab" / name, text)
    with pytest.raises(UnreadableFileError, match=message):
        bring(tmp_path / "lab")
    assert not (tmp_path / "out").exists()


# Tables


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", "row,col,class\n10,12,mitosis\n30,33,apoptosis\n"),
        ("a.csv", "class;x;y\nmitosis;12,0;10,0\napoptosis;33,0;30,0\n"),
        ("a.tsv", "Label\tcolumn\tRow\nmitosis\t12\t10\napoptosis\t33\t30\n"),
        ("a.txt", "y x type\n10  12  mitosis\n30 33 apoptosis\n"),
        ("a.csv", "id|x_px|y_px|class\n1|12.5|10.5|mitosis\n2|33.5|30.5|apoptosis\n"),
        (
            "all.tsv",
            "Image\tClassification\tCentroid X µm\tCentroid Y µm\n"
            "a.png\tmitosis\t3.125\t2.625\na.png\tapoptosis\t8.375\t7.625\n",
        ),
    ],
)
def test_columns_are_found_by_their_names(tmp_path: Path, name: str, text: str) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_image(root / "b.png", tissue())
    (root / name).write_text(text, encoding="utf-8")
    (sample,) = bring(root).samples
    points = read_points(sample, 0.25)
    assert points.positions.tolist() == [[10, 12], [30, 33]]
    assert points.classes == ("mitosis", "apoptosis")


def test_order_of_columns_without_a_header_is_never_guessed(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_text(root / "a.csv", "12,10,mitosis\n33,30,apoptosis\n")
    with pytest.raises(UnreadableFileError, match=r"has no header .* state it with --columns, for example"):
        bring(root)
    points = read_points(bring(root, columns="x, y, class").samples[0], 0.25)
    assert points.positions.tolist() == [[10, 12], [30, 33]]
    assert points.classes == ("mitosis", "apoptosis")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,row,y\n1,2,3\n", "two columns for the row of an object, 'row' and 'y'"),
        ("row,col\n1,2\n3,abc\n4,\n", "2 lines do not have two numbers, first: line 3 has row '3' and column 'abc'"),
        ("row,col\nnan,2\n", "line 2 has row 'nan'"),
    ],
)
def test_faulty_tables_are_refused(tmp_path: Path, text: str, message: str) -> None:
    write_image(tmp_path / "lab" / "a.png", tissue())
    write_text(tmp_path / "lab" / "a.csv", text)
    with pytest.raises(UnreadableFileError, match=message):
        bring(tmp_path / "lab")


# XML


def monusac(spacing: float = 0.25) -> str:
    """Return Aperio XML with a layer for each class, as MoNuSAC has."""
    layers = ""
    for name, ring in (
        ("Epithelial", [(7, 5), (17, 5), (17, 15), (7, 15)]),
        ("Lymphocyte", [(55, 7), (65, 7), (65, 17), (55, 17)]),
        ("Neutrophil", [(1, 1), (2, 2)]),
        ("Ambiguous", [(30, 30), (40, 30), (40, 40)]),
    ):
        vertices = "".join(f'<Vertex X="{x}" Y="{y}"/>' for x, y in ring)
        attributes = f'<Attributes><Attribute Name="{name}" Id="0" Value=""/></Attributes>'
        regions = f'<Regions><Region Id="1" NegativeROA="0"><Vertices>{vertices}</Vertices></Region></Regions>'
        layers += f'<Annotation Name="">{attributes}{regions}</Annotation>'
    return f'<Annotations MicronsPerPixel="{spacing}">{layers}</Annotations>'


def test_monusac_has_a_class_for_each_layer(tmp_path: Path) -> None:
    folder = tmp_path / "lab" / "TCGA-A2-A0CV-01Z-00-DX1"
    write_image(folder / "TCGA-A2-A0CV-01Z-00-DX1_1.tif", tissue())
    write_text(folder / "TCGA-A2-A0CV-01Z-00-DX1_1.xml", monusac(0.5))
    dataset = bring(tmp_path / "lab", spacing_um_px=None)
    (sample,) = dataset.samples
    assert (sample.case, sample.spacing_um_px) == ("TCGA-A2-A0CV", 0.5)
    objects = read_objects(sample, 0.5)
    assert objects.classes == {1: "Epithelial", 2: "Lymphocyte"}
    assert len(objects.ignored) == 1
    assert (objects.labels == 1).sum() == 100
    first = read_geojson(sample.annotations[0])[0]
    assert first.bounds_px == (5.5, 7.5, 15.5, 17.5), "whole numbers are pixel centers in XML, and corners in GeoJSON"
    notes = note_messages(dataset)
    assert any("region 1 is left out: it has fewer than 3 vertices" in note for note in notes)
    assert any("the class 'Ambiguous' are ignored areas; --classes Ambiguous=Ambiguous" in note for note in notes)


def test_flat_folder_of_monusegs_images_and_outlines(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / "lab" / f"TCGA-{name}.tif", tissue())
        write_text(tmp_path / "lab" / f"TCGA-{name}.xml", outline_xml([(4, 4), (14, 4), (14, 14), (4, 14)]))
    dataset = bring(tmp_path / "lab", spacing_um_px=None)
    assert [sample.spacing_um_px for sample in dataset.samples] == [0.25, 0.25]
    assert read_objects(dataset.samples[0], 0.25).classes == {}
    assert (read_objects(dataset.samples[0], 0.25).labels > 0).sum() == 100


# Masks


def write_masks(root: Path, mask: np.ndarray, name: str = "masks/a.png") -> Path:
    write_image(root / "images" / "a.png", tissue())
    write_image(root / name, mask)
    return root


@pytest.mark.parametrize("name", ["masks/a.png", "Label Maps/a.tif", "images/a_mask.png", "a-label.png", "other/a.png"])
def test_label_maps_keep_every_pixel(tmp_path: Path, name: str) -> None:
    (sample,) = bring(write_masks(tmp_path / "lab", label_map(), name)).samples
    objects, faults = parse_objects(sample, sample.annotations[0])
    assert np.array_equal(objects.labels, label_map() // 10)
    assert faults == []


def test_table_of_all_images_names_the_classes(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "lab", label_map(), "instances/a.png")
    classes = ["epithelial", "other", "epithelial", "other", "other"]
    rows = [("a", number * 10, name) for number, name in enumerate(classes, 1)]
    write_csv(root / "types.csv", [("image", "instance", "type"), *rows])
    (sample,) = bring(root).samples
    assert list(read_objects(sample, 0.25).classes.values()) == classes


def test_binary_masks_need_a_decision(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "lab", np.where(label_map() > 0, 255, 0).astype(np.uint8))
    with pytest.raises(UnreadableFileError, match=r"only the number 255 in 5 separate parts.*--masks binary"):
        bring(root)
    assert len(read_objects(bring(root, masks="binary").samples[0], 0.25).numbers) == 5


def test_masks_of_classes_need_a_decision(tmp_path: Path) -> None:
    mask = np.zeros(SIZE, np.uint8)
    for i, (row, column) in enumerate(NUCLEI * 1):
        mask[row - 3 : row + 3, column - 3 : column + 3] = 1 + i % 2
    mask[20:24, 70:74] = 2
    mask[0:2, 0:2] = 1
    root = write_masks(tmp_path / "lab", mask)
    with pytest.raises(UnreadableFileError, match=r"2 different numbers in 7 separate parts.*--masks classes"):
        bring(root)
    objects = read_objects(bring(root, masks="classes", classes="1=tumor,2=stroma").samples[0], 0.25)
    assert sorted(objects.classes.values()) == ["stroma"] * 3 + ["tumor"] * 4


def test_colors_are_classes(tmp_path: Path) -> None:
    mask = np.zeros((*SIZE, 3), np.uint8)
    mask[label_map() > 0] = (255, 0, 0)
    mask[label_map() == 30] = (0, 128, 255)
    root = write_masks(tmp_path / "lab", mask)
    objects = read_objects(bring(root, classes="#ff0000=tumor").samples[0], 0.25)
    assert sorted(objects.classes.values()) == ["#0080ff"] + ["tumor"] * 4
    assert np.array_equal(objects.labels > 0, label_map() > 0)


@pytest.mark.parametrize("source", ["mask", "coco", "mat"])
def test_annotations_of_another_size_are_refused(tmp_path: Path, source: str) -> None:
    """The image was resized after it was annotated."""
    root = tmp_path / "lab"
    if source == "mask":
        write_masks(root, label_map((120, 160)))
    if source == "coco":
        coco(root, [{"bbox": [1, 1, 9, 9]}])
        write_image(root / "images" / "0.png", tissue()[::2, ::2])
    if source == "mat":
        write_image(root / "a.png", tissue()[::2, ::2])
        savemat(root / "a.mat", hovernet())
    with pytest.raises(
        DataError, match=r"is for an image of (120 × 160|60 × 80) px .* give the image that was annotated"
    ):
        bring(root)


def test_masks_in_jpeg_format_are_refused(tmp_path: Path) -> None:
    root = write_masks(tmp_path / "lab", np.where(label_map() > 0, 255, 0).astype(np.uint8), "masks/a.jpg")
    with pytest.raises(UnreadableFileError, match="JPEG format, which changes numbers"):
        bring(root)


# HoVer-Net


def hovernet(**more: Any) -> dict[str, Any]:
    return {"inst_map": label_map().astype(np.float64), "inst_centroid": np.array([(12.0, 10.0)]), **more}


@pytest.mark.parametrize("version", [5, 7.3])
def test_mat_files_of_hovernet(tmp_path: Path, version: float) -> None:
    root = tmp_path / "lab"
    write_image(root / "Images" / "a.png", tissue())
    arrays = hovernet(inst_type=np.array([[1], [2], [2], [1], [3]]))
    (root / "Labels").mkdir()
    if version == 5:
        savemat(root / "Labels" / "a.mat", arrays)
    else:  # MATLAB 7.3 writes HDF5 with a header of 512 bytes
        with h5py.File(root / "Labels" / "a.mat", "w", userblock_size=512) as file:
            for name, values in arrays.items():
                file[name] = values.T
        with (root / "Labels" / "a.mat").open("r+b") as raw:
            raw.write(b"MATLAB 7.3 MAT-file".ljust(124) + b"\x00\x02IM")
    (sample,) = bring(root, classes="1=epithelial,3=").samples
    objects = read_objects(sample, 0.25)
    assert objects.classes == {1: "epithelial", 2: "2", 3: "2", 4: "epithelial"}
    assert np.array_equal(objects.labels > 0, np.isin(label_map(), (10, 20, 30, 40)))


def test_classes_of_hovernet_may_be_a_map_of_types(tmp_path: Path) -> None:
    write_image(tmp_path / "lab" / "a.png", tissue())
    savemat(tmp_path / "lab" / "a.mat", hovernet(type_map=np.where(label_map() == 20, -(10**12), 2)))
    classes = read_objects(bring(tmp_path / "lab").samples[0], 0.25).classes
    assert classes == {1: "2", 2: "-1000000000000", 3: "2", 4: "2", 5: "2"}


MAT_DTYPES = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8", "?"]


@settings(deadline=None, max_examples=50)
@given(st.sampled_from(MAT_DTYPES), st.integers(0, 40), st.integers(0, 40), st.booleans())
def test_mat_files_are_read_as_by_scipy(dtype: str, rows: int, columns: int, compressed: bool) -> None:
    numbers = np.random.default_rng(rows).integers(0, 100, (rows, columns)).astype(dtype)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mat"
        savemat(path, {"other": "text", "inst_map": numbers, "x": {"a": [1]}}, do_compression=compressed)
        values = _read_mat_arrays(path, ("inst_map", "type_map"))["inst_map"]
        expected = loadmat(path)["inst_map"]
    assert values.shape == expected.shape
    assert np.array_equal(values, expected)


def test_mat_files_of_machines_with_the_other_byte_order(tmp_path: Path) -> None:
    numbers = np.array([[1.5, -2.0, 3.0]])
    parts = struct.pack(">IIII IIii II8s II", 6, 8, 6, 0, 5, 8, 1, 3, 1, 8, b"inst_map", 9, 24)
    matrix = parts + numbers.astype(">f8").tobytes()
    header = b"MATLAB 5.0".ljust(124) + b"\x01\x00MI"
    (tmp_path / "a.mat").write_bytes(header + struct.pack(">II", 14, len(matrix)) + matrix)
    values = _read_mat_arrays(tmp_path / "a.mat", ("inst_map",))["inst_map"]
    assert np.array_equal(values, loadmat(tmp_path / "a.mat")["inst_map"])
    assert values.dtype.isnative
    assert np.array_equal(values, numbers)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**32 - 1), st.booleans(), st.floats(0, 1))
def test_damaged_mat_files_are_read_or_refused(seed: int, compressed: bool, cut: float) -> None:
    """Each in a sentence. Some of such bytes end SciPy's reader, and with it the process."""
    random = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.mat"
        savemat(path, {"inst_map": label_map()[:16, :16], "inst_type": np.arange(3)}, do_compression=compressed)
        content = bytearray(path.read_bytes())
        for position in random.integers(0, min(len(content), 400), random.integers(1, 8)):
            content[position] = random.choice([0, 1, 2, 14, 15, 127, 128, 255])
        path.write_bytes(content[: int(len(content) * cut)] if seed % 2 else content)
        with contextlib.suppress(AnnotationError):
            _read_mat_arrays(path, ("inst_map", "inst_type"))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": np.zeros(3)}, "contains neither `inst_map` nor `inst_centroid`"),
        ({"inst_map": np.array([[{"a": 1}]], object)}, "of type object; expected numbers"),
        ({"inst_map": np.full((9, 9), 0.5)}, "not a label map of whole numbers"),
        ({"inst_map": np.full((9, 9), 3e9)}, "not a label map of whole numbers from 0 to 2147483647"),
        ({"inst_map": label_map(), "inst_type": np.arange(3)}, "has 3 classes in `inst_type` for 5 objects"),
        ({"inst_map": label_map(), "inst_type": np.full(5, np.nan)}, "a class that is NaN or infinite"),
        ({"inst_centroid": np.full((2, 2), 1e300)}, "an `inst_centroid` that does not fit"),
    ],
)
def test_faulty_mat_files_are_refused(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    write_image(tmp_path / "lab" / "a.png", tissue())
    savemat(tmp_path / "lab" / "a.mat", arrays)
    with pytest.raises(UnreadableFileError, match=message):
        bring(tmp_path / "lab")
    write_text(tmp_path / "lab" / "a.mat", "text")
    with pytest.raises(UnreadableFileError, match="is damaged or not a MATLAB file"):
        bring(tmp_path / "lab")


# Folders of classes


def test_folders_of_classes_keep_their_splits(tmp_path: Path) -> None:
    for split, count in (("Training", 3), ("val", 2), ("test", 2)):
        for k, name in enumerate(("stroma", "tumor", "debris")):
            for i in range(count):
                write_image(tmp_path / "lab" / split / name / f"{i}.png", tissue(nuclei=NUCLEI[: i + k]))
    write_image(tmp_path / "lab" / "val" / "tumor" / "0.png", np.full((20, 20, 3), 250, np.uint8))
    dataset = bring(tmp_path / "lab", classes="debris=,stroma=normal")
    rows = manifest(tmp_path)
    assert {(row["split"], row["label"]) for row in rows} == {
        (split, label) for split in ("train", "valid", "test") for label in ("normal", "tumor")
    }
    assert len(dataset.samples) == len(rows) == 14


def test_one_class_is_kept(tmp_path: Path) -> None:
    for name in "ab":
        write_image(tmp_path / "lab" / name / "1.png", tissue())
    with pytest.raises(DataError, match="--classes leaves out all images; keep at least one class"):
        bring(tmp_path / "lab", classes="a=,b=")


def test_classes_with_few_patches_do_not_prevent_a_split(tmp_path: Path) -> None:
    for k, (name, count) in enumerate((("stroma", 2), ("tumor", 2), ("debris", 2))):
        for i in range(count):
            write_image(tmp_path / "lab" / name / f"{i}.png", tissue(seed=2 * k + i))
    dataset = bring(tmp_path / "lab")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [4, 1, 1]


# Patients, splits and classes


def patients(root: Path, count: int = 10, images: int = 3) -> Path:
    for patient in range(count):
        for i in range(images):
            write_image(root / f"P{patient:02d}_{i}.png", tissue(seed=images * patient + i))
            write_text(root / f"P{patient:02d}_{i}.csv", "row,col\n10,12\n")
    return root


def test_patients_are_found_by_a_pattern_and_never_divided(tmp_path: Path) -> None:
    dataset = bring(patients(tmp_path / "lab"), patient=r"(P\d+)_")
    splits = {sample.case: sample.split for sample in dataset.samples}
    assert len(splits) == 10
    assert all(splits[sample.case] == sample.split for sample in dataset.samples)
    assert {split: list(splits.values()).count(split) for split in splits.values()} == {
        "train": 6,
        "valid": 2,
        "test": 2,
    }


def test_proposed_split_shows_every_class_in_each_set_if_possible(tmp_path: Path) -> None:
    """Three of ten patients have a rare class."""
    for i in range(10):
        write_image(tmp_path / "lab" / f"P{i}.png", tissue(seed=i))
        name = "rare" if i in (3, 4, 5) else "common"
        write_text(tmp_path / "lab" / f"P{i}.csv", f"row,col,class\n10,12,{name}\n12,60,common\n")
    dataset = bring(tmp_path / "lab")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [6, 2, 2]
    counts = check(dataset).counts
    assert [counts[split]["rare"] for split in ("train", "valid", "test")] == [1, 1, 1]


def test_table_states_patients_and_splits(tmp_path: Path) -> None:
    root = patients(tmp_path / "lab", count=3)
    for path in root.glob("*.csv"):
        write_text(path, "10,12\n")
    rows = [(f"crops/P{i:02d}_0.jpg", f"case {i}", split) for i, split in enumerate(("Training", "val", "testing"))]
    table = write_csv(root / "crops.csv", [("crop", "case", "split"), *rows])
    dataset = bring(root, table=table, columns="row,column")
    assert [(sample.case, sample.split) for sample in dataset.samples] == [
        *(("case 0", "train"), ("case 1", "valid"), ("case 2", "test"))
    ]
    assert any("left out 6 images" in note for note in note_messages(dataset))


def test_table_may_have_any_columns_but_none_twice(tmp_path: Path) -> None:
    root = patients(tmp_path / "lab", count=1)
    for path in root.glob("*.csv"):
        write_text(path, "10,12\n")
    table = tmp_path / "table.csv"

    def refusal(*rows: tuple[str, ...]) -> str:
        write_csv(table, list(rows))
        with pytest.raises(DataError) as refused:
            bring(root, table=table, columns="row,column")
        assert not (tmp_path / "out").exists()
        return str(refused.value)

    header = ("Image", "Patient ID", "Age")
    assert "columns for the group of an image, 'patient id' and 'case'" in refusal((*header[:2], "Case"), ("a", "", ""))
    twice = refusal(header, ("P00_0.png", "A", "1"), ("P00_0.png", "B", "1"))
    assert "lists the image P00_0.png again in line 3, with other values; keep one line" in twice
    for spacing in ("abc", "-1", "nan", "0,25", "1e9"):
        message = refusal(("image", "spacing"), ("P00_0.png", spacing))
        assert message.startswith(f"The pixel spacing of P00_0.png is {spacing!r}"), message
    write_csv(table, [header, ("P00_0.png", "A", "1"), ("P00_0.png", "A", "2")])
    dataset = bring(root, table=table, columns="row,column")
    assert [sample.case for sample in dataset.samples] == ["A"]
    assert any("did not use 1 column (age) of" in note for note in note_messages(dataset))


def test_links_keep_their_names_and_do_not_form_loops(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(tmp_path / "store" / "0.png", tissue()).rename(tmp_path / "store" / "0")
    write_json(tmp_path / "store" / "1", {"type": "FeatureCollection", "features": [feature("Point", [3, 3])]})
    root.mkdir()
    for name in "ab":
        (root / f"{name}.png").symlink_to(tmp_path / "store" / "0")
        (root / f"{name}.geojson").symlink_to(tmp_path / "store" / "1")
        (root / f"latest-{name}").symlink_to(root)
    bring(root)
    assert [(row["image"], row["points"]) for row in manifest(tmp_path)] == [
        (f"../lab/{name}.png", f"annotations/{name}.png.geojson") for name in "ab"
    ]


def label_table(root: Path, column: str = "class") -> Path:
    """Write images in a folder for each patient, with annotations of objects, and a table with the class of each."""
    rows = []
    for i in range(6):
        write_image(root / "images" / f"{i // 2:03d}" / f"{i}.png", tissue(seed=i))
        write_text(root / "points" / f"{i // 2:03d}" / f"{i}.csv", "row,col\n10,12\n")
        rows.append((f"{i // 2:03d}/{i}.jpg", f"P{i // 2}", ("train", "val", "test")[i // 2], i % 2, 7))
    return write_csv(
        root / "crops.csv", [("crop", "case", "split", column, "other"), *rows[:-1], (*rows[-1][:3], "", 7)]
    )


def test_column_of_a_table_states_the_class_of_each_image(tmp_path: Path) -> None:
    table = label_table(tmp_path / "lab", "Atypical")
    dataset = bring(tmp_path / "lab", table=table, label="atypical", classes="0=normal,1=atypical")
    assert [(Path(s.name).name, s.label, s.case, s.split) for s in dataset.samples] == [
        ("0.png", "normal", "P0", "train"),
        ("1.png", "atypical", "P0", "train"),
        ("2.png", "normal", "P1", "valid"),
        ("3.png", "atypical", "P1", "valid"),
        ("4.png", "normal", "P2", "test"),
    ]
    notes = note_messages(check(dataset))
    assert "left out 1 image (5.png) without a class." in notes
    assert any(note.startswith("did not use 1 column (other)") for note in notes)
    with pytest.raises(DataError, match="has no column 'grade' for --label; it has 5 columns"):
        import_data([tmp_path / "lab"], tmp_path / "new", table=table, label="grade")
    with pytest.raises(DataError, match="--label atypical is a column of --table"):
        import_data([tmp_path / "lab"], tmp_path / "new", label="atypical")


def test_column_class_of_a_table_is_used_if_there_are_no_objects(tmp_path: Path) -> None:
    table = label_table(tmp_path / "lab")
    dataset = bring(tmp_path / "lab" / "images", table=table)
    assert [sample.label for sample in dataset.samples] == ["0", "1", "0", "1", "0"]
    assert import_data([tmp_path / "lab"], tmp_path / "out", table=table, spacing_um_px=0.25).annotated == "points"


def test_table_of_new_images_leaves_out_no_images_of_an_earlier_import(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(tmp_path / name / f"{name}.png", tissue(seed=len(name)))
        write_text(tmp_path / name / f"{name}.csv", "row,col\n10,12\n")
    first = bring(tmp_path / "a")
    table = write_csv(tmp_path / "new.csv", [("image", "patient"), ("b.png", "P7")])
    dataset = import_data([first.root, tmp_path / "b"], tmp_path / "second", table=table, spacing_um_px=0.25)
    assert [(sample.path.name, sample.case) for sample in dataset.samples][1:] == [("b.png", "P7")]
    assert dataset.samples[0].path.name == "a.png"


def test_name_of_a_single_folder_is_no_split(tmp_path: Path) -> None:
    """A lab that tries the software in a folder `test` does not want all images to be test images."""
    source = tmp_path / "test" / "lab"
    for i in range(10):
        write_image(source / f"P{i}.png", tissue(seed=i))
        write_text(source / f"P{i}.csv", "row,col\n10,12\n")
    for k, path in enumerate((source.parent, source)):
        dataset = import_data([path], tmp_path / f"out{k}", spacing_um_px=0.25)
        assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [6, 2, 2]
        notes = [note for note in note_messages(check(dataset)) if "is not used as a split" in note]
        assert notes == (
            [
                "the name 'test' is not used as a split, because nothing beside it is named as another split; for one "
                "split only, give a table with the column `split` (--table), or edit the manifest."
            ]
            if path.name == "test"
            else []
        )


def test_name_of_a_folder_beside_that_of_another_split_is_a_split(tmp_path: Path) -> None:
    """CoNSeP has the folders `Train` and `Test`, which may be imported one by one."""
    for name in ("Train", "Test"):
        write_image(tmp_path / name / "Images" / "1.png", tissue())
        write_text(tmp_path / name / "Points" / "1.csv", "row,col\n10,12\n")
    dataset = import_data([tmp_path / "Test"], tmp_path / "out", spacing_um_px=0.25)
    assert [sample.split for sample in dataset.samples] == ["test"]


def test_patients_in_two_splits_are_reported(tmp_path: Path) -> None:
    root = patients(tmp_path / "lab", count=2)
    rows = [(f"P{i:02d}_{k}.png", f"case {i}", split) for i in (0, 1) for k, split in enumerate(("train", "valid"))]
    table = write_csv(tmp_path / "crops.csv", [("image", "patient", "split"), *rows])
    assert problem_messages(bring(root, table=table)) == [
        f"patient or slide case {i} is in train and valid; move all of its images to one split." for i in (0, 1)
    ]


def test_validation_patients_are_taken_from_training_patients(tmp_path: Path) -> None:
    for split, count in (("Train", 10), ("Test", 4)):
        for i in range(count):
            write_image(tmp_path / "lab" / split / "Images" / f"{i}.png", tissue())
            write_text(tmp_path / "lab" / split / "Points" / f"{i}.csv", "row,col\n10,12\n")
    dataset = bring(tmp_path / "lab")
    assert [len(dataset.split(split)) for split in ("train", "valid", "test")] == [8, 2, 4]
    assert any("20 % of the training patients are proposed" in note for note in note_messages(dataset))


# Refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"classes": "tumour=x"}, "--classes renames 'tumour', but the sources have no such class; they have"),
        ({"classes": "mitosis"}, "--classes contains 'mitosis'; expected OLD=NEW"),
        ({"classes": "="}, "--classes contains '='; expected OLD=NEW, or OLD= to leave out the class OLD, or =NEW for"),
        ({"classes": "=tumor"}, "--classes contains '=tumor', but the sources have nothing without a class; they have"),
        ({"spacing_um_px": None, "override_spacing": True}, "--override-spacing needs the spacing to use; add --spac"),
        ({"read_as": "boxes"}, "--as is 'boxes'; choose points, outlines, regions"),
        ({"masks": "x"}, "--masks is 'x'; choose objects, binary, classes"),
        ({"spacing_um_px": None, "read_as": "points"}, "The pixel spacing of 1 image .* give it with --spacing-um-px"),
        ({"spacing_um_px": 50}, "--spacing-um-px is 50 µm/px"),
        ({"patient": "(", "read_as": "points"}, "is not a regular expression"),
        ({"patient": "P1", "read_as": "points"}, "--patient 'P1' does not match the path"),
        ({"patient": r"(P\d)?a\.png", "read_as": "points"}, "matches the path .* but its first group is empty there"),
        ({}, r"both points or boxes \(1\) and outlines \(1\); choose --as points"),
    ],
)
def test_mistakes_are_refused_before_anything_is_written(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_json(
        root / "a.geojson", [feature("Point", [3, 3], "mitosis"), feature("Polygon", [square(9, 9, 9)], "tumor")]
    )
    with pytest.raises(DataError, match=message):
        bring(root, **options)
    assert not (tmp_path / "out").exists()


def test_pairs_that_are_not_certain_are_refused(tmp_path: Path) -> None:
    points = [feature("Point", [3, 3])]
    root = tmp_path / "lab"
    write_json(root / "a.geojson", points)
    with pytest.raises(DataError, match="No images were found in"):
        bring(root)
    write_image(root / "other" / "b.png", tissue())
    write_image(root / "other" / "c.png", tissue())
    with pytest.raises(DataError, match=r"No image was found for 1 annotation \(a.geojson\)"):
        bring(root)
    write_image(root / "x" / "a.png", tissue())
    write_image(root / "y" / "a.png", tissue())
    with pytest.raises(DataError, match="the sources have 2 images"):
        bring(root)
    (root / "a.geojson").rename(root / "x" / "a.geojson")
    assert [sample.name for sample in bring(root).samples] == ["../lab/x/a.png"]
    with pytest.raises(DataError, match="exists and is not empty"):
        bring(root)
    write_text(root / "x" / "a.xml", outline_xml(square(3, 3, 9)))  # type: ignore[arg-type]
    with pytest.raises(DataError, match="give only one of the two"):
        import_data([root], tmp_path / "out2", spacing_um_px=0.25)


def test_a_folder_that_another_process_imports_to_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_json(root / "a.geojson", [feature("Point", [3, 3])])
    with hold_elsewhere(tmp_path / "out"), pytest.raises(BusyError, match="is writing to"):
        bring(root)
    assert [path.name for path in tmp_path.iterdir()] == ["lab"]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bring(root, finish=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["lab"], "a dataset without its last file is not published"


def test_only_an_earlier_import_can_be_replaced(tmp_path: Path) -> None:
    """A folder with other files is kept, also if it has a manifest; and no source is deleted."""
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_json(root / "a.geojson", [feature("Point", [12, 10], "one")])
    out = root / "mine"  # a folder in a source: its files are no sources
    import_data([root], out, spacing_um_px=0.25)
    before = (out / "manifest.csv").read_text()
    write_json(root / "a.geojson", [feature("Point", [12, 10], "two")])
    with pytest.raises(DataError, match="choose a new folder, or add --overwrite to replace this earlier import"):
        import_data([root], out, spacing_um_px=0.25)
    dataset = import_data([root], out, spacing_um_px=0.25, overwrite=True)
    assert read_points(dataset.samples[0], 0.25).classes == ("two",)
    assert (out / "manifest.csv").read_text() == before
    with pytest.raises(DataError, match="renames 'three', but"):
        import_data([root], out, classes="three=3", spacing_um_px=0.25, overwrite=True)
    assert (out / "manifest.csv").read_text() == before, "a failed import replaces nothing"
    with pytest.raises(DataError, match="contains the source"):
        import_data([out], out, overwrite=True)
    write_text(out / "notes.txt", "mine")
    with pytest.raises(DataError, match="is not a folder that `rotopath data import` has written; choose a new folder"):
        import_data([root], out, spacing_um_px=0.25, overwrite=True)
    assert (out / "notes.txt").exists()


def test_spacing_that_contradicts_a_file_is_refused_or_overrides_it(tmp_path: Path) -> None:
    """As in `rotopath predict`. A table, or an earlier import, states the spacing of single images."""
    root = tmp_path / "lab"
    write_image(root / "a.tif", tissue())
    with Image.open(root / "a.tif") as image:
        image.save(root / "a.tif", dpi=(25_400 / 0.25,) * 2)
    write_json(root / "a.geojson", [feature("Point", [12, 10])])
    with pytest.raises(UnreadableFileError, match=r"a.tif states a pixel spacing of 0.25 µm/px, but 0.5 µm/px was giv"):
        bring(root, spacing_um_px=0.5)
    assert not (tmp_path / "out").exists()
    assert bring(root, spacing_um_px=0.2501).samples[0].spacing_um_px == 0.25
    right = bring(root, spacing_um_px=0.5, override_spacing=True, overwrite=True)
    assert right.samples[0].spacing_um_px == 0.5
    assert any("the file specifies 0.25 µm/px, but the dataset 0.5 µm/px" in n for n in note_messages(check(right)))
    table = write_csv(tmp_path / "t.csv", [("image", "spacing"), ("a.tif", 0.4)])
    assert bring(root, spacing_um_px=0.5, table=table, overwrite=True).samples[0].spacing_um_px == 0.4
    again = import_data([tmp_path / "out"], tmp_path / "again", spacing_um_px=0.5)
    assert again.samples[0].spacing_um_px == 0.4
    write_text(root / "a.csv", "Centroid X µm,Centroid Y µm\n3,2.5\n")
    (root / "a.geojson").unlink()
    with pytest.raises(DataError, match="states positions in µm, which --override-spacing makes ambiguous"):
        bring(root, spacing_um_px=0.5, override_spacing=True, overwrite=True)


def test_spacing_that_contradicts_an_annotation_file_is_refused(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_text(root / "a.xml", monusac(0.25))
    with pytest.raises(UnreadableFileError, match=r"a.xml states a pixel spacing of 0.25 µm/px, but 0.5 µm/px"):
        bring(root, spacing_um_px=0.5)
    assert bring(root, spacing_um_px=0.5, override_spacing=True).samples[0].spacing_um_px == 0.5


def test_objects_without_a_class_can_get_one(tmp_path: Path) -> None:
    """But not the outline around them, which QuPath exports as well."""
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    squares = [feature("Polygon", [square(x, 20, 8)], "tumor" * (x == 10)) for x in (10, 30, 50)]
    write_json(root / "a.geojson", [feature("Polygon", [square(1, 1, 58)]), *squares])
    result = check(bring(root, classes="=stroma"))
    assert result.counts["train"]["tumor"] == 1
    assert result.counts["train"]["stroma"] == 2
    ignored = bring(root, classes="=Ignore*", overwrite=True)
    assert check(ignored).counts["train"] == {"images": 1, "cases": 1, "objects": 1, "tumor": 1, "ignored areas": 2}
    table = write_csv(tmp_path / "t.csv", [("image", "class"), ("a.png", ""), ("b.png", "tumor")])
    write_image(root / "b.png", tissue(seed=1))
    (root / "a.geojson").unlink()
    labeled = bring(root, classes="=stroma", table=table, overwrite=True)
    assert [sample.label for sample in labeled.samples] == ["stroma", "tumor"]


def test_images_with_points_only_are_left_out_of_outlines(tmp_path: Path) -> None:
    """They would be images without objects. An image that has none in its file is kept."""
    root = tmp_path / "lab"
    for name in "abcd":
        write_image(root / f"{name}.png", tissue(seed=ord(name)))
    point, outline = feature("Point", [3, 3], "x"), feature("Polygon", [square(9, 9, 9)], "x")
    for name, objects in (("a", [point, point]), ("b", [outline, point]), ("c", [outline]), ("d", [])):
        write_json(root / f"{name}.geojson", objects)
    dataset = bring(root, read_as="outlines")
    assert [sample.path.name for sample in dataset.samples] == ["b.png", "c.png", "d.png"]
    result = check(dataset)
    assert sum(count["objects"] for count in result.counts.values()) == 2
    assert problem_messages(result) == []
    notes = note_messages(result)
    assert "points are left out, because --as is outlines: 3." in notes
    assert "left out 1 image (a.png) with points only, because --as is outlines." in notes
    assert not any("it is a point" in note for note in notes)
    with pytest.raises(DataError, match="All images have points only, but --as outlines needs outlines"):
        import_data([root / "a.png", root / "a.geojson"], tmp_path / "none", read_as="outlines", spacing_um_px=0.25)


def test_mixed_objects_can_be_points_or_outlines(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    write_image(root / "a.png", tissue())
    write_json(
        root / "a.geojson", [feature("Point", [3, 3], "mitosis"), feature("Polygon", [square(9, 9, 9)], "tumor")]
    )
    assert len(read_points(bring(root, read_as="points").samples[0], 0.25)) == 2
    outlines = import_data([root], tmp_path / "outlines", read_as="outlines", spacing_um_px=0.25)
    assert read_objects(outlines.samples[0], 0.25).classes == {1: "tumor"}
    points = import_data([root], tmp_path / "points", classes="tumor=", spacing_um_px=0.25)
    assert parse_points(points.samples[0])[0].classes == ("mitosis",)


# Export


def test_export_of_geojson_and_back_is_the_identity(tmp_path: Path) -> None:
    root = tmp_path / "lab"
    for name in ("x/a.png", "y/a.png"):
        write_image(root / name, tissue())
    outer, hole = square(1.123456789012, 2.5, 20), square(5, 5.3333333333333, 4)
    write_json(root / "x" / "a.geojson", [feature("Polygon", [outer, hole], "tumor", measurements={"p": 0.3})])
    write_json(root / "y" / "a.geojson", [feature("MultiPolygon", [[square(3, 3, 9)], [outer]], "stroma")])
    first = export_data(bring(root), tmp_path / "export")
    again = import_data([root / "x" / "a.png", root / "y" / "a.png", first], tmp_path / "again", spacing_um_px=0.25)
    second = export_data(again, tmp_path / "export2")
    names = sorted(path.relative_to(first).as_posix() for path in first.rglob("*.geojson"))
    assert names == ["x/a.png.geojson", "y/a.png.geojson"]
    assert [(first / name).read_bytes() for name in names] == [(second / name).read_bytes() for name in names]
    assert read_geojson(first / names[0])[0].shape == read_geojson(root / "x" / "a.geojson")[0].shape


@pytest.mark.parametrize("are_points", [True, False])
def test_export_of_coco_and_back_is_the_identity(tmp_path: Path, are_points: bool) -> None:
    root = tmp_path / "lab"
    for i in range(4):
        write_image(root / f"P{i}.png", tissue())
        shapes = [
            feature("Point", [3.1 + i, 3.7], "mitosis"),
            feature("Polygon", [square(0.1, 0.7, 0.3 + i)], "box"),
            feature("Polygon", [[[3, 3], [9.123456789, 4], [8, 10], [3, 3]]], "Ignore*"),
        ]
        outlines = [
            feature("Polygon", [square(20.3, 5.1, 30), square(25.5, 10.2, 9)], "hole"),
            feature("MultiPolygon", [[square(1.1, 1, 5)], [square(60.5, 40.25, 7)]], "parts"),
        ]
        write_json(root / f"P{i}.geojson", shapes if are_points else [*shapes[1:], *outlines])
    first = export_data(bring(root, patient="P.", read_as="points" if are_points else None), tmp_path / "first.json")
    again = import_data([root / f"P{i}.png" for i in range(4)] + [first], tmp_path / "again")
    assert again.annotated == ("points" if are_points else "objects")
    second = export_data(again, tmp_path / "second.json")
    assert json.loads(first.read_text()) == json.loads(second.read_text())
    content = json.loads(first.read_text())
    assert [image["file_name"] for image in content["images"]] == ["P0.png", "P1.png", "P2.png", "P3.png"]
    assert {image["split"] for image in content["images"]} == {"train", "valid", "test"}
    assert len(content["annotations"]) == 4 * (3 if are_points else 4)


def test_other_datasets_can_be_exported(tmp_path: Path) -> None:
    """Positions in CSV files, label maps with classes, and XML."""
    for name in "abc":
        write_image(tmp_path / f"{name}.png", tissue())
    write_image(tmp_path / "a-map.png", label_map())
    rows = [(number * 10, "x") for number in range(1, 6)]
    write_csv(tmp_path / "a-map.csv", [("object", "class"), *rows])
    write_text(tmp_path / "b.xml", outline_xml([(4, 4), (14, 4), (14, 14), (4, 14)]))
    header = "image,annotation,split,spacing\n"
    write_text(tmp_path / "m.csv", f"{header}a.png,a-map.png,train,0.25\nb.png,b.xml,test,0.25\n")
    out = export_data(open_data(tmp_path / "m.csv"), tmp_path / "out")
    assert {item.class_name for item in read_geojson(out / "a.png.geojson")} == {"x"}
    assert len(read_geojson(out / "b.png.geojson")) == 1
    write_text(tmp_path / "c.csv", "10,12\n")
    write_text(tmp_path / "p.csv", f"{header}c.png,c.csv,train,0.25\n")
    export_data(open_data(tmp_path / "p.csv"), tmp_path / "points")
    assert read_geojson(tmp_path / "points" / "c.png.geojson")[0].shape == Point(10.5, 12.5)


# The command


def test_command_prints_what_it_understood(tmp_path: Path) -> None:
    root = patients(tmp_path / "lab", count=5)
    words = [
        "data",
        "import",
        str(root),
        "--out",
        str(tmp_path / "out"),
        "--patient",
        "P[0-9]+",
        "--spacing-um-px",
        "0.5",
    ]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "read 15 tables of positions." in result.output
    assert "a random split by patient is proposed" in result.output
    assert "0.5 µm/px" in result.output
    assert (tmp_path / "out" / "contact-sheet.png").stat().st_size > 10_000
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code == 2
    assert "exists and is not empty; choose a new folder, or add --overwrite" in refused.output
    exported = CliRunner().invoke(app, ["data", "export", str(tmp_path / "out"), "--out", str(tmp_path / "coco.json")])
    assert exported.exit_code == 0, exported.output
    assert len(json.loads((tmp_path / "coco.json").read_text())["images"]) == 15


def test_command_says_how_to_repeat_an_import_with_problems(tmp_path: Path) -> None:
    """The folder is there to look at the problems. Lines are counted, and not the findings in them."""
    root, out = tmp_path / "lab", tmp_path / "out"
    write_image(root / "a.png", tissue((60, 160)))
    specks = [square(100 + 2.5 * x, 2, 1) for x in range(12)]
    squares = [square(column - 5, row - 5, 10) for row, column in NUCLEI]
    objects = [feature("Polygon", [ring], "x") for ring in squares + specks]
    thin = [feature("Polygon", [square(100 + 5 * x, 20.6, 0.2)], "x") for x in range(5)]
    write_json(root / "a.geojson", [*objects, *thin])
    words = ["data", "import", str(root), "--out", str(out), "--spacing-um-px", "0.5"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 1, result.output
    assert "\n1 problem\n- 12 of 17 objects consist of one pixel" in result.output
    lines = result.output.splitlines()
    title = next(i for i, line in enumerate(lines) if line.endswith(" notes"))
    listed = lines[title + 1 : lines.index("", title)]
    assert lines[title] == f"{len(listed)} notes"
    assert any(line.startswith("- 5 times, first: ") for line in listed)
    assert (
        lines[-1] == f"The dataset in {out} has problems; solve them, and run the same command again with --overwrite."
    )
    assert (out / "contact-sheet.png").is_file()
    write_json(root / "a.geojson", objects[:5])
    repeated = CliRunner().invoke(app, [*words, "--overwrite"])
    assert repeated.exit_code == 0, repeated.output
    assert "No problems." in repeated.output


def test_slide_files_are_read_as_images(tmp_path: Path) -> None:
    """MoNuSAC's images are SVS files. Pillow opens this one as a TIFF file, but not those with JPEG 2000."""
    root = tmp_path / "lab"
    root.mkdir()
    description = "Aperio Image Library\r\n80x60|AppMag = 40|MPP = 0.2500"
    Image.fromarray(tissue()).save(root / "a.tif", description=description)
    (root / "a.tif").rename(root / "a.svs")
    write_text(root / "a.xml", monusac(0.3))
    dataset = bring(root, spacing_um_px=None)
    assert dataset.samples[0].spacing_um_px == 0.25, "the image has priority over the XML file"
    assert problem_messages(check(dataset)) == []
