"""AMIDA13 and TUPAC16: published and custom splits, missing annotations, and messages about faulty files."""

import shutil
from pathlib import Path

import numpy as np
import pytest
from layouts import (
    amida13,
    note_messages,
    open_and_check,
    pixels,
    problem_messages,
    truncate,
    write_csv,
    write_image,
    write_text,
)

from rotopath.data.annotations import AnnotationError, read_points
from rotopath.data.dataset import find_files, read_image
from rotopath.data.formats import open_data
from rotopath.images.files import read_rgb


def test_cases_are_split_as_published(tmp_path: Path) -> None:
    result = open_and_check(amida13(tmp_path))
    assert (result.dataset.annotated, result.dataset.objects) == ("points", "mitoses")
    assert {split: (c["images"], c["cases"], c["mitoses"]) for split, c in result.counts.items()} == {
        "train": (16, 8, 16),
        "valid": (8, 4, 8),
        "test": (22, 11, 22),
    }
    assert {sample.case for sample in result.dataset.split("valid")} == {"03", "05", "07", "10"}
    assert problem_messages(result) == []


def test_field_without_csv_has_no_mitoses(tmp_path: Path) -> None:
    dataset = open_data(amida13(tmp_path, cases=[1]))
    first, second = dataset.samples
    assert read_points(first, 0.25).positions.tolist() == [[10, 20], [30, 40]]
    assert read_points(second, 0.25).positions.shape == (0, 2)
    assert (
        "has no CSV file for 1 field (mitoses_image_data_part_1/01/02.tif); a field without a file counts as a field "
        "without mitoses." in note_messages(dataset)[0]
    )


def test_points_are_scaled_with_their_image(tmp_path: Path) -> None:
    """At half the resolution two pixels become one; a point between them is at its center."""
    (sample, _) = open_data(amida13(tmp_path, cases=[1])).samples
    assert read_image(sample, 0.5).shape == (30, 40, 3)
    assert read_points(sample, 0.5).positions.tolist() == [[4.75, 9.75], [14.75, 19.75]]
    assert np.array_equal(read_image(sample, 0.252), read_rgb(sample.path)), "nearly the same spacing"


def test_tupac16_cases_need_a_split_file(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 30])
    dataset = open_data(tmp_path)
    assert {sample.case for sample in dataset.samples} == {"01"}
    assert any("cases without a split are left out: 1 case (30);" in note for note in note_messages(dataset))
    assert problem_messages(dataset) == []
    write_csv(tmp_path / "split.csv", [("case", "split"), ("1", "test"), ("30", "train")])
    assert {(sample.case, sample.split) for sample in open_data(tmp_path).samples} == {("01", "test"), ("30", "train")}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("row,col", "line 2 is 'row,col'; expected row and column in pixels, such as `120,45`."),
        ("5", "line 2 is '5'; expected row and column in pixels, such as `120,45`."),
        ("nan,4", "line 2 has an object at row nan"),
        (
            "60,10",
            "line 2 has an object at row 60, column 10, outside the image of 60 × 80 px (height × width); check "
            "that positions are in pixels, and that row and column are not swapped.",
        ),
        ("-1,10", "line 2 has an object at row -1, column 10, outside the image"),
    ],
)
def test_invalid_coordinates_are_reported_and_refused_in_training(tmp_path: Path, line: str, message: str) -> None:
    amida13(tmp_path, cases=[1])
    write_text(tmp_path / "mitoses_ground_truth/01/01.csv", f"10,20\n{line}\n30,40\n")
    result = open_and_check(tmp_path)
    assert len(problem_messages(result)) == 1
    assert problem_messages(result)[0].startswith(f"mitoses_ground_truth/01/01.csv: {message}")
    assert result.counts["train"]["mitoses"] == 2, "the good lines are counted"
    with pytest.raises(AnnotationError, match="cannot be used: line 2"):
        read_points(result.dataset.samples[0], 0.25)


def test_binary_file_instead_of_csv_is_a_problem(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    (tmp_path / "mitoses_ground_truth/01/01.csv").write_bytes(bytes(range(256)))
    assert problem_messages(open_and_check(tmp_path)) == [
        "mitoses_ground_truth/01/01.csv: is not readable text; save it as a CSV file in UTF-8."
    ]


def test_all_problems_are_listed(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 2, 3])
    truncate(tmp_path / "mitoses_image_data_part_1/01/01.tif")
    write_text(tmp_path / "mitoses_ground_truth/02/01.csv", "a,b\nc,d\n")
    write_csv(tmp_path / "mitoses_ground_truth/03/77.csv", [(1, 1)])
    write_image(tmp_path / "mitoses_image_data_part_2/03/01.tif", pixels(20, 20))
    result = problem_messages(open_and_check(tmp_path))
    assert [message.partition(":")[0] for message in sorted(result)] == [
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/03/77.csv",
        "mitoses_image_data_part_1/01/01.tif",
        "mitoses_image_data_part_2/03/01.tif",
    ]
    assert any("01/01.tif: is damaged and cannot be decoded" in message for message in result)


def test_missing_annotation_folder_is_a_problem(tmp_path: Path) -> None:
    """Not only a note: every mitosis would be learned as background."""
    amida13(tmp_path, cases=[1, 13])
    shutil.rmtree(tmp_path / "mitoses_ground_truth")
    assert problem_messages(open_and_check(tmp_path)) == [
        "mitoses_ground_truth: contains no CSV file; at least one file with positions of mitoses is needed."
    ]


def test_suffixes_may_be_in_capitals(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    path = tmp_path / "mitoses_ground_truth/01/01.csv"
    path.rename(path.with_suffix(".CSV"))
    image = tmp_path / "mitoses_image_data_part_1/01/01.tif"
    image.rename(image.with_suffix(".TIFF"))
    assert open_and_check(tmp_path).counts["train"] == {"images": 2, "cases": 1, "mitoses": 2}


def test_split_file_is_compared_with_the_folder(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 2, 13])
    write_csv(tmp_path / "split.csv", [("case", "split"), ("1", "train"), ("01", "test"), ("7", "test"), ("13", "x")])
    dataset = open_data(tmp_path)
    assert problem_messages(dataset) == [
        "split.csv: line 3 repeats '01'; list it once.",
        "split.csv: line 5 has the split 'x'; choose from train, valid, test.",
        "split.csv: lists 1 case (07) that the folder does not contain; correct these lines.",
    ]
    assert any("cases without a split are left out: 2 cases (02, 13);" in note for note in note_messages(dataset))
    assert {(sample.case, sample.split) for sample in dataset.samples} == {("01", "train")}
    assert dataset.published == {}, "published counts do not apply to another split"


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    amida13(tmp_path / "store", cases=[1])
    (tmp_path / "data/mitoses_image_data_part_1").mkdir(parents=True)
    (tmp_path / "data/mitoses_image_data_part_1/01").symlink_to(tmp_path / "store/mitoses_image_data_part_1/01")
    (tmp_path / "data/mitoses_ground_truth").symlink_to(tmp_path / "store/mitoses_ground_truth")
    assert open_and_check(tmp_path / "data").counts["train"]["mitoses"] == 2


def test_links_that_lead_back_are_not_followed_without_end(tmp_path: Path) -> None:
    """Two links in each of two folders: their paths would double at each level."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        write_text(folder / "1.txt", "")
        for number, target in enumerate((*folders, tmp_path)):
            (folder / f"link{number}").symlink_to(target)
    assert find_files(folders[0], {".txt"}) == sorted(
        [folders[0] / "1.txt", *(folders[0] / f"{path}/1.txt" for path in ("link1", "link2/b"))]
    )


def test_hidden_files_are_ignored(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    write_text(tmp_path / "mitoses_image_data_part_1/01/._01.tif", "Mac OS X")
    assert problem_messages(open_and_check(tmp_path)) == []
