"""Checks of annotations: mistakes that are planted in correct data are reported, and correct data is not."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layouts import note_messages, open_and_check, problem_messages, write_csv, write_image
from PIL import Image

from rotopath.data import DataError, open_data
from rotopath.data.dataset import Finding, group_findings
from rotopath.tasks import find_kind, make_task

SIZE = (200, 200)
Positions = list[tuple[int, int]]
SPACING = "0.5"  # nuclei have a diameter of 5 µm


def nuclei(seed: int, count: int = 30) -> Positions:
    """Return positions in the image that are at least 14 px apart, and not symmetric in rows and columns."""
    generator = np.random.default_rng(seed)
    found: Positions = []
    while len(found) < count:
        row, column = (int(value) for value in generator.integers(10, 190, 2))
        if all(np.hypot(row - r, column - c) > 14 for r, c in found):
            found.append((row, column))
    return found


def discs(positions: Positions, radius: float = 5, shift: tuple[int, int] = (0, 0)) -> np.ndarray:
    rows, columns = np.mgrid[: SIZE[0], : SIZE[1]]
    labels = np.zeros(SIZE, np.uint16)
    for number, (row, column) in enumerate(positions, 1):
        labels[np.hypot(rows - row - shift[0], columns - column - shift[1]) <= radius] = number
    return labels


def image(positions: Positions, seed: int) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(0, 12, (*SIZE, 3))
    pixels = noise + np.where(discs(positions)[..., None] > 0, (90, 60, 130), (215, 170, 200))
    pixels[:, 160:][discs(positions)[:, 160:] == 0] = 245  # empty background at the right
    return pixels.clip(0, 255).astype(np.uint8)


def dataset(root: Path, annotate: Callable[[Path, Positions], Path], count: int = 3, **row: Any) -> Path:
    """Write images with annotations, and a manifest with a patient for each image."""
    rows = []
    for i in range(count):
        positions = nuclei(i)
        write_image(root / f"{i}.png", image(positions, i))
        values = {"group": f"patient {i}", "split": ("train", "val", "testing")[i % 3], "spacing": SPACING, **row}
        rows.append((f"{i}.png", annotate(root / f"{i}", positions).name, *values.values()))
    write_csv(root / "manifest.csv", [("image", "annotation", "group", "split", "spacing"), *rows])
    return root


def points(change: Callable[[int, int], tuple[float, float]] = lambda row, column: (row, column)) -> Any:
    return lambda path, positions: write_csv(path.with_suffix(".csv"), [change(*position) for position in positions])


def outlines(change: Callable[[Positions], np.ndarray] = discs) -> Any:
    return lambda path, positions: write_image(path.with_name(f"{path.name}-map.png"), change(positions))


def write_features(path: Path, squares: Sequence[tuple[int, int, int, str]]) -> Path:
    """Write GeoJSON with squares: their upper row, left column, side and class."""
    features = []
    for y, x, s, name in squares:
        ring = [[x, y], [x + s, y], [x + s, y + s], [x, y + s], [x, y]]
        properties = {"classification": {"name": name}} if name else {}
        geometry = {"type": "Polygon", "coordinates": [ring]}
        features.append({"type": "Feature", "geometry": geometry, "properties": properties})
    path.with_suffix(".geojson").write_text(json.dumps(features))
    return path.with_suffix(".geojson")


@pytest.mark.parametrize("annotate", [points(), outlines()])
def test_correct_annotations_cause_no_findings(tmp_path: Path, annotate: Any) -> None:
    assert open_and_check(dataset(tmp_path, annotate)).findings == ()


def test_exchanged_columns_of_points(tmp_path: Path) -> None:
    (problem,) = problem_messages(open_and_check(dataset(tmp_path, points(lambda row, column: (column, row)))))
    assert problem == (
        "row and column are probably exchanged in 3 images (0.png, 1.png, 2.png): 90 objects are on brighter tissue "
        "than the positions with row and column exchanged; exchange the two columns, or their names, in the "
        "annotation files of these images, or state their order with `rotopath data import --columns`."
    )


def test_exchanged_columns_of_one_file_among_others(tmp_path: Path) -> None:
    """Correct files, also those with more objects, do not hide it; and they are not blamed."""
    root = dataset(tmp_path, points(), count=6)
    write_csv(root / "1.csv", [(column, row) for row, column in nuclei(1)])
    (problem,) = problem_messages(open_and_check(root))
    assert problem.startswith("row and column are probably exchanged in 1 image (1.png): 30 objects are on brighter")
    assert problem.endswith("exchange the two columns, or their names, in the annotation files of these images.")


def test_exchanged_columns_of_many_files_with_few_objects(tmp_path: Path) -> None:
    """Nothing can be concluded from one of them, but from all."""
    annotate = points(lambda row, column: (column, row))
    root = dataset(tmp_path, lambda path, positions: annotate(path, positions[:8]), count=6)
    (problem,) = problem_messages(open_and_check(root))
    assert "probably exchanged in 6 images (0.png, 1.png, 2.png, 3.png, 4.png, ...): 48 objects" in problem


def test_points_that_are_outside_unless_exchanged(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", image(nuclei(0), 0)[:100])
    write_csv(tmp_path / "a.csv", [(10, 20), (150, 40), (160, 50), (190, 60)])
    write_csv(
        tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), ("a.png", "a.csv", "train", 0.5)]
    )
    problems = problem_messages(open_and_check(tmp_path))
    assert problems[-1].startswith(
        "3 objects are outside their images, but inside if row and column are exchanged, in "
    )
    assert "1 image (a.png)" in problems[-1]
    for i in range(3):
        write_image(tmp_path / f"b{i}.png", image(nuclei(i), i)[:100])
        write_csv(tmp_path / f"b{i}.csv", [position for position in nuclei(i) if position[0] < 100])
    rows = [(f"{name}.png", f"{name}.csv", "train", 0.5) for name in ("a", "b0", "b1", "b2")]
    write_csv(tmp_path / "manifest.csv", [("image", "annotation", "split", "spacing"), *rows])
    assert problem_messages(open_and_check(tmp_path))[-1] == problems[-1].replace(
        ", or state their order with `rotopath data import --columns`", ""
    )


def test_points_in_um(tmp_path: Path) -> None:
    problems = problem_messages(open_and_check(dataset(tmp_path, points(lambda row, column: (row / 4, column / 4)))))
    assert any("positions are probably in µm" in problem for problem in problems)


def test_points_on_glass(tmp_path: Path) -> None:
    root = dataset(tmp_path, points(lambda row, column: (row, min(column + 60, 199))))
    assert any(
        "objects are on empty background (glass)" in problem for problem in problem_messages(open_and_check(root))
    )


def test_points_that_are_nowhere_in_particular(tmp_path: Path) -> None:
    def move(row: int, column: int) -> tuple[int, int]:
        return (row * 7919 + column) % 200, (column * 104729 + row) % 150

    result = open_and_check(dataset(tmp_path, points(move)))
    assert any("are not darker than random positions" in note for note in note_messages(result))


def test_exchanged_axes_of_outlines(tmp_path: Path) -> None:
    problems = problem_messages(open_and_check(dataset(tmp_path, outlines(lambda positions: discs(positions).T))))
    assert len(problems) == 3
    assert problems[0] == (
        "0.png: its outlines fit the image only if rows and columns are exchanged; exchange x and y in the file."
    )


@pytest.mark.parametrize(
    ("shift", "solution"), [((4, 0), "4 px up and 0 px left"), ((-3, -5), "3 px down and 5 px right")]
)
def test_shifted_outlines(tmp_path: Path, shift: tuple[int, int], solution: str) -> None:
    problems = problem_messages(open_and_check(dataset(tmp_path, outlines(lambda p: discs(p, shift=shift)))))
    assert len(problems) == 3
    assert f"they fit dark objects if they are moved {solution}" in problems[0]


def test_common_shift_of_all_images_is_found_if_it_is_smaller(tmp_path: Path) -> None:
    annotate = outlines(lambda positions: discs(positions, shift=(0, 2)))
    (problem,) = problem_messages(open_and_check(dataset(tmp_path, annotate, count=6)))
    assert problem == (
        "the outlines of most images are shifted: they fit dark objects if they are moved 0 px up and 2 px left; "
        "correct the offset of the annotations."
    )


def test_outlines_of_other_images(tmp_path: Path) -> None:
    result = open_and_check(dataset(tmp_path, outlines(lambda positions: discs(nuclei(positions[0][0] + 100)))))
    assert any("do not follow dark objects" in note for note in note_messages(result))


@pytest.mark.parametrize(
    ("annotate", "objects"), [(outlines(), "objects"), (points(), "the dark objects at the points")]
)
def test_spacing_that_contradicts_the_size_of_objects(tmp_path: Path, annotate: Any, objects: str) -> None:
    """Nuclei of 5 µm, with a pixel spacing that is wrong by a factor of 2."""
    (problem,) = problem_messages(open_and_check(dataset(tmp_path / "small", annotate, spacing="0.25")))
    assert re.fullmatch(
        rf"the median diameter of {objects} is 2\.\d+ µm at the stated pixel spacing: smaller than nuclei .*", problem
    )
    (note,) = note_messages(open_and_check(dataset(tmp_path / "large", annotate, spacing="1")))
    assert re.fullmatch(
        rf"the median diameter of {objects} is 1\d\.?\d* µm .*: larger than nuclei .*; if they are nuclei, correct .*",
        note,
    )


def test_single_images_may_have_small_nuclei(tmp_path: Path) -> None:
    """As in fields of a kidney: most nuclei are small, but those of most images are not."""
    root = dataset(tmp_path, outlines(), count=5)
    for i in range(2):
        write_image(root / f"{i}-map.png", discs(nuclei(i, 60), radius=2))
    assert not any("diameter" in note for note in note_messages(open_and_check(root)))
    write_image(root / "2-map.png", discs(nuclei(2, 60), radius=2))
    assert any("diameter of objects is 2" in problem for problem in problem_messages(open_and_check(root)))


def test_spacing_that_contradicts_the_file(tmp_path: Path) -> None:
    root = dataset(tmp_path, points())
    write_resolution(root / "0.png", 0.25)
    (note,) = note_messages(open_and_check(root))
    assert note.startswith("0.png: the file specifies 0.25 µm/px, but the dataset 0.5 µm/px, which is used")


def test_spacing_that_contradicts_the_files_and_the_size_of_objects(tmp_path: Path) -> None:
    root = dataset(tmp_path, points(), spacing="1")
    for path in root.glob("*.png"):
        write_resolution(path, 0.5)
    (problem,) = problem_messages(open_and_check(root))
    assert (
        "larger than nuclei are in most tissue (3.6 to 10 µm); the pixel spacing in the files fits nuclei; correct"
        in problem
    )


def write_resolution(path: Path, spacing_um_px: float) -> None:
    with Image.open(path) as image:
        image.save(path, dpi=(25_400 / spacing_um_px,) * 2)


def test_copies_in_two_splits(tmp_path: Path) -> None:
    root = dataset(tmp_path, points())
    write_image(root / "2.png", image(nuclei(0), 0))
    write_csv(root / "2.csv", nuclei(0))
    (problem,) = problem_messages(open_and_check(root))
    assert problem == (
        "2.png: has the same pixels as '0.png', but is in the split 'test' instead of 'train'; keep one of the two."
    )


def test_patients_in_two_splits(tmp_path: Path) -> None:
    (problem,) = problem_messages(open_and_check(dataset(tmp_path, points(), group="P1")))
    assert "P1 is in train and valid and test" in problem


def test_objects_of_one_pixel(tmp_path: Path) -> None:
    def with_specks(positions: Positions) -> np.ndarray:
        labels = discs(positions)
        labels[0, 1:20:2] = range(1001, 1011)
        return labels

    (problem,) = problem_messages(open_and_check(dataset(tmp_path, outlines(with_specks))))
    assert problem.startswith("30 of 120 objects consist of one pixel")


def test_rare_classes(tmp_path: Path) -> None:
    header = ("row", "column", "class")
    root = dataset(
        tmp_path,
        lambda path, positions: write_csv(
            path.with_suffix(".csv"), [header, *((*p, "rare" if i == 3 else "common") for i, p in enumerate(positions))]
        ),
        count=12,
    )
    (note,) = note_messages(open_and_check(root))
    assert note.startswith("the split 'train' has too few objects of the class 'rare' (4)")


def test_class_that_no_training_image_shows(tmp_path: Path) -> None:
    """Also if all classes are rare."""
    header = ("row", "column", "class")
    root = dataset(
        tmp_path,
        lambda path, positions: write_csv(
            path.with_suffix(".csv"), [header, *((*p, "common" if path.stem == "0" else "other") for p in positions)]
        ),
    )
    (note,) = note_messages(open_and_check(root))
    assert note.startswith("the split 'train' has too few objects of the class 'other' (0)")


@pytest.mark.parametrize("is_table", [True, False])
def test_objects_without_a_class(tmp_path: Path, is_table: bool) -> None:
    """A model of one class counts them as its objects, as the note says; one of several classes refuses them."""

    def annotate(path: Path, positions: Positions) -> Path:
        names = ["" if path.stem == "1" and i < 2 else "a" for i in range(len(positions))]
        if is_table:
            rows = [(*position, name) for position, name in zip(positions, names, strict=True)]
            return write_csv(path.with_suffix(".csv"), [("row", "column", "class"), *rows])
        return write_features(path, [(r - 4, c - 4, 8, n) for (r, c), n in zip(positions, names, strict=True)])

    root = dataset(tmp_path, annotate)
    result = open_and_check(root)
    row, column = nuclei(1)[0]
    (note,) = note_messages(result)
    assert problem_messages(result) == []
    shown = re.fullmatch(
        r"objects without a class: 2 of 90, first: 1.png, row (\d+), column (\d+); they count as .*", note
    )
    assert shown
    assert np.allclose([int(shown[1]), int(shown[2])], (row, column), atol=1)
    assert "they count as 'a', the only class;" in note
    kind, data = find_kind("detect" if is_table else "segment"), open_data(root)
    assert make_task(kind.kind, annotated_classes=kind.find_classes(data)).class_index("", data.samples[1]) == 0

    path = root / ("2.csv" if is_table else "2.geojson")
    path.write_text(re.sub(r'(,|: ")a(\b)', r"\1b\2", path.read_text()))
    (problem,) = problem_messages(open_and_check(root))
    assert problem.endswith(
        "; a model of several classes cannot be trained with them; give them a class in QuPath, or all of them the "
        "same one with `rotopath data import --classes =NAME`."
    )
    data = open_data(root)
    with pytest.raises(DataError, match="has an object without a class"):
        make_task(kind.kind, annotated_classes=kind.find_classes(data)).class_index("", data.samples[1])


def test_class_names_that_differ_only_in_case(tmp_path: Path) -> None:
    for i in range(3):
        write_image(tmp_path / f"{i}.png", image([], i))
    rows = [(f"{i}.png", label, "train", 0.25) for i, label in enumerate(("Tumor", "stroma", "tumor"))]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    (problem,) = problem_messages(open_and_check(tmp_path))
    assert problem.startswith("the classes 'Tumor' and 'tumor' differ only in upper and lower case")


def test_similar_findings_are_printed_once() -> None:
    same = [Finding("m.csv", f"line {i}: the label 'normal{i}' of a{i}.png is not 0 or 1.") for i in range(321)]
    others = [Finding("", "the split 'valid' contains no images."), Finding("", "the split 'test' contains no images.")]
    assert group_findings([*same, *others]) == [
        "321 times, first: m.csv: line 0: the label 'normal0' of a0.png is not 0 or 1.",
        "the split 'valid' contains no images.",
        "the split 'test' contains no images.",
    ]


def test_the_finding_about_most_objects_is_printed() -> None:
    counts = [1, 233, 3200, 2]
    findings = [Finding(f"{i}.tif", f"objects outside: {n} of 4000.", False, objects=n) for i, n in enumerate(counts)]
    assert group_findings(findings) == ["4 times, 3436 objects, most: 2.tif: objects outside: 3200 of 4000."]


def test_image_of_which_no_object_can_be_used(tmp_path: Path) -> None:
    """Its objects would be background in a training."""
    root = dataset(
        tmp_path, lambda path, positions: write_features(path, [(r - 4, c - 4, 8, "") for r, c in positions])
    )
    assert problem_messages(open_and_check(root)) == []
    geometry = {"type": "MultiPoint", "coordinates": nuclei(1)}
    (root / "1.geojson").write_text(json.dumps([{"type": "Feature", "geometry": geometry, "properties": {}}]))
    (problem,) = problem_messages(open_and_check(root))
    assert problem.startswith("1.geojson: has no object that can be used, so that its image would be one without objec")
    (root / "1.geojson").write_text("[]")
    assert problem_messages(open_and_check(root)) == [], "an image without objects"


def test_outlines_that_cover_others(tmp_path: Path) -> None:
    """A region of tumor in the same file as its nuclei."""

    def annotate(path: Path, positions: Positions) -> Path:
        return write_features(path, [(0, 0, 199, ""), *((row - 4, column - 4, 8, "") for row, column in positions)])

    problems = problem_messages(open_and_check(dataset(tmp_path, annotate)))
    assert problems[0].startswith("0.geojson: has 30 outlines that are completely covered by earlier ones")
