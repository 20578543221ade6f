"""Manifests of your own images: every type of annotation, and a message for every invalid line."""

from pathlib import Path

import numpy as np
import pytest
from layouts import box, outline_xml, pixels, write_csv, write_image, write_text
from PIL import Image

from rotopath.data.annotations import read_objects, read_points
from rotopath.data.dataset import DataError, TableError, problems, read_image
from rotopath.data.formats import check, open_data
from rotopath.data.splits import SPLITS


def test_labels_are_classes_of_whole_images(tmp_path: Path) -> None:
    for name in "abc":
        write_image(tmp_path / f"images/{name}.png", pixels(50, 60, ord(name)))
    header = ("image", "label", "group", "split", "spacing")
    rows = [(f"images/{n}.png", i % 2, n, s, 0.5) for i, (n, s) in enumerate(zip("abc", SPLITS, strict=True))]
    path = write_csv(tmp_path / "mine.csv", [header, *rows])
    dataset = open_data(path)
    assert dataset.annotated == "labels"
    assert [(p.name, p.label, p.case, p.split, p.spacing_um_px) for p in dataset.samples] == [
        ("images/a.png", "0", "a", "train", 0.5),
        ("images/b.png", "1", "b", "valid", 0.5),
        ("images/c.png", "0", "c", "test", 0.5),
    ]
    assert read_image(dataset.samples[0], 1.0).shape == (25, 30, 3)
    result = check(dataset)
    assert result.findings == ()
    assert result.counts["valid"] == {"images": 1, "cases": 1, "1": 1}


def test_labels_may_be_any_text(tmp_path: Path) -> None:
    """A task decides later whether the label is one of its classes."""
    for i in range(3):
        write_image(tmp_path / f"{i}.png", pixels(9, 9, i))
    rows = [(f"{i}.png", label, "train", 1) for i, label in enumerate(("Gleason 3+4", "7", "Ödem"))]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    dataset = open_data(tmp_path)
    assert [sample.label for sample in dataset.samples] == ["Gleason 3+4", "7", "Ödem"]
    assert dataset.findings == ()
    assert check(dataset).counts["train"] == {"images": 3, "cases": 3, "Gleason 3+4": 1, "7": 1, "Ödem": 1}


def test_csv_annotations_are_points_and_may_be_missing(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(50, 60))
    write_image(tmp_path / "b.png", pixels(50, 60, 1))
    write_csv(tmp_path / "a.csv", [(4, 5)])
    write_text(tmp_path / "manifest.csv", "image,annotation,split,spacing\na.png,a.csv,train,0.25\nb.png,,test,0.25\n")
    dataset = open_data(tmp_path, "points")
    assert read_points(dataset.samples[0], 0.25).positions.tolist() == [[4, 5]]
    assert read_points(dataset.samples[1], 0.25).positions.shape == (0, 2)


def test_label_maps_and_outlines_are_objects(tmp_path: Path) -> None:
    for name in "ab":
        Image.fromarray(pixels(30, 30, ord(name))).save(tmp_path / f"{name}.tif", dpi=(50_800, 50_800))
    labels = np.zeros((30, 30), np.uint16)
    labels[3:9, 4:10] = 5
    write_image(tmp_path / "a-map.png", labels)
    write_text(tmp_path / "b.xml", outline_xml(box(3, 4, 6)))
    write_text(tmp_path / "manifest.csv", "image,annotation,split\na.tif,a-map.png,train\nb.tif,b.xml,test\n")
    first, second = open_data(tmp_path, "objects").samples
    assert first.spacing_um_px == pytest.approx(0.5), "as in the file"
    assert np.array_equal(read_objects(first, 0.5).labels > 0, read_objects(second, 0.5).labels > 0)
    assert read_objects(first, 0.25).labels.shape == (60, 60)
    assert (read_objects(first, 0.25).labels == 5).sum() == 4 * 36
    assert read_objects(first, 0.25).classes == read_objects(second, 0.25).classes == {}


def test_without_a_split_column_groups_are_split_and_never_divided(tmp_path: Path) -> None:
    rows = [("image", "label", "group", "spacing")]
    for group in range(20):
        for image in range(3):
            write_image(tmp_path / f"{group}-{image}.png", pixels(8, 8, group, image))
            rows.append((f"{group}-{image}.png", str(group % 2), f"patient {group}", "1"))
    write_csv(tmp_path / "manifest.csv", rows)
    result = check(open_data(tmp_path))
    assert {split: (c["images"], c["cases"], c["1"]) for split, c in result.counts.items()} == {
        "train": (36, 12, 18),
        "valid": (12, 4, 6),
        "test": (12, 4, 6),
    }
    assert problems(result.findings) == []
    assert open_data(tmp_path) == open_data(tmp_path)


def test_default_spacing_applies_to_images_without_one(tmp_path: Path) -> None:
    """The spacing in the table takes precedence, then the spacing in the file."""
    for name in "ab":
        write_image(tmp_path / f"{name}.png", pixels(8, 8, ord(name)))
    Image.fromarray(pixels(8, 8)).save(tmp_path / "c.tif", dpi=(50_800, 50_800))
    rows = [("a.png", 1, "train", ""), ("b.png", 1, "train", 2), ("c.tif", 1, "train", "")]
    path = write_csv(tmp_path / "manifest.csv", [("image", "label", "split", "spacing"), *rows])
    dataset = open_data(path, spacing_um_px=0.25)
    assert [p.spacing_um_px for p in dataset.samples] == [0.25, 2, pytest.approx(0.5)]
    assert dataset.findings == ()
    assert [p.path.name for p in open_data(path).samples] == ["b.png", "c.tif"], (
        "without a default, one image is left out"
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("b.png,,g,train,0.5", "the column `label` is empty; write the class of the image."),
        ("b.png,1,g,learn,0.5", "the column `split` is 'learn'; choose from train, valid, test."),
        ("b.png,1,g,train,coarse", "the column `spacing` is 'coarse'; expected a number from 0.05 to 5 (µm/px)."),
        ("b.png,1,g,train,-1", "the column `spacing` is '-1'; expected a number from 0.05 to 5 (µm/px)."),
        ("b.png,1,g,train,nan", "the column `spacing` is 'nan'; expected a number from 0.05 to 5 (µm/px)."),
        (
            "b.png,1,g,train,",
            "'b.png' does not specify its pixel spacing (µm/px); set `data_spacing_um_px` in the recipe, or use "
            "--spacing-um-px with `rotopath data`, or add a column `spacing` to the manifest.",
        ),
        (",1,g,train,0.5", "the column `image` is empty; write the path of the image."),
        ("a.png,1,g,train,0.5", "'a.png' is listed already in line 2; list each image once."),
    ],
)
def test_invalid_lines_are_reported_and_others_are_used(tmp_path: Path, line: str, message: str) -> None:
    for name in "abc":
        write_image(tmp_path / f"{name}.png", pixels(9, 9, ord(name)))
    write_text(
        tmp_path / "manifest.csv", f"Image, Label,group,split,spacing\na.png,1,h,test,1\n{line}\n\nc.png,0,i,test,1\n"
    )
    dataset = open_data(tmp_path)
    assert [str(finding) for finding in dataset.findings] == [f"manifest.csv: line 3: {message}"]
    assert [p.path.name for p in dataset.samples] == ["a.png", "c.png"]


def test_missing_images_and_leaks_are_reported(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(9, 9))
    write_text(tmp_path / "manifest.csv", "image,label,group,split,spacing\na.png,1,g,test,1\nb.png,0,g,train,1\n")
    result = check(open_data(tmp_path))
    assert [str(finding) for finding in result.findings] == [
        "patient or slide g is in train and test; move all of its images to one split.",
        "b.png: does not exist.",
        "the split 'valid' contains no images.",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no column 'image'"),
        ("path,label\na.png,1\n", "has no column 'image'; its first line must contain 'image'."),
        ("image,label\n", "lists no images; add a line for each image."),
        ("image\na.png\n", "needs either a column `label`"),
        ("image,label,annotation\na.png,1,a.csv\n", "but only one of them; it has `label` and `annotation`"),
        (
            "image,annotation\na.png,a.csv\nb.png,b.xml\n",
            "annotation files of these types: .csv, .xml; use either CSV files",
        ),
        ("image,annotation\na.png,\n", "lists annotation files of these types: none"),
        ("image,label\na.png,1,2\n", "has 3 cells in line 2, but only 2 columns; remove the additional cells"),
        ("\x00", "has no column 'image'"),
    ],
)
def test_invalid_manifests_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = write_text(tmp_path / "manifest.csv", text)
    with pytest.raises((DataError, TableError)) as caught:
        open_data(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


@pytest.mark.parametrize(
    "text",
    [
        "image;label;split;spacing\r\na.png;1;train;0,5\r\n".replace("0,5", "0.5"),
        "image\tlabel\tsplit\tspacing\na.png\t1\ttrain\t0.5\n",
        "\ufeffimage,label,split,spacing,,\n\na.png,1,train,0.5,,\n",
        "\n,,,\nimage,label,split,spacing\na.png,1,train,0.5\n",
    ],
    ids=["semicolons", "tabs", "BOM and empty columns", "empty lines"],
)
def test_tables_of_spreadsheets_are_read(tmp_path: Path, text: str) -> None:
    write_image(tmp_path / "a.png", pixels(9, 9))
    (tmp_path / "manifest.csv").write_bytes(text.encode())
    (sample,) = open_data(tmp_path).samples
    assert (sample.label, sample.split, sample.spacing_um_px) == ("1", "train", 0.5)


def test_two_spellings_of_a_path_are_one_image(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(9, 9))
    write_text(tmp_path / "manifest.csv", "image,label,split,spacing\na.png,1,train,1\n./a.png,1,test,1\n")
    dataset = open_data(tmp_path)
    assert [str(f) for f in dataset.findings] == [
        "manifest.csv: line 3: './a.png' is listed already in line 2; list each image once."
    ]


def test_organs_become_strata(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(9, 9))
    write_image(tmp_path / "m.png", np.ones((9, 9), np.uint8))
    write_text(tmp_path / "manifest.csv", "image,annotation,organ,split,spacing\na.png,m.png,breast,train,1\n")
    assert open_data(tmp_path).samples[0].stratum == "breast"


def test_binary_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_bytes(bytes(range(256)))
    with pytest.raises(TableError, match="is not readable text; save it as a CSV file in UTF-8"):
        open_data(path)
