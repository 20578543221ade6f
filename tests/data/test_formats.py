"""Formats: which reader opens a path, what is refused, and what a check reports about every format."""

from collections.abc import Callable
from pathlib import Path

import pytest
from layouts import (
    amida13,
    kaggle,
    kumar,
    note_messages,
    open_and_check,
    pcam,
    pixels,
    problem_messages,
    write_csv,
    write_image,
    write_text,
)

from rotopath.data.dataset import DataError
from rotopath.data.formats import FORMATS, open_data


def manifest(root: Path) -> Path:
    write_image(root / "a.png", pixels(9, 9))
    write_csv(root / "manifest.csv", [("image", "label", "spacing"), ("a.png", 1, 1)])
    return root


def class_folders(root: Path) -> Path:
    for name in ("stroma", "tumor"):
        write_image(root / name / "a.png", pixels(9, 9))
    return root


@pytest.mark.parametrize(
    ("make", "source"),
    [
        (manifest, "manifest"),
        (lambda root: amida13(root, cases=[1]), "AMIDA13"),
        (pcam, "PCam"),
        (kaggle, "PCam in Kaggle's form"),
        (lambda root: kumar(root, ["a", "b", "c"]), "Kumar/MoNuSeg"),
        (class_folders, "class folders"),
    ],
)
def test_every_format_is_recognized_by_one_row(tmp_path: Path, make: Callable[[Path], Path], source: str) -> None:
    """Folders of classes are a fallback, so other formats may look like them."""
    root = make(tmp_path)
    assert open_data(root, spacing_um_px=1.0).source == source
    matches = [known for known in FORMATS if known.detect(root)]
    assert len([known for known in matches if not known.fallback] or matches) == 1


def test_every_row_has_a_test_of_recognition() -> None:
    """The test above covers six formats: add new ones there."""
    assert len(FORMATS) == 6


def test_dataset_may_be_one_folder_further_down(tmp_path: Path) -> None:
    pcam(tmp_path / "download" / "pcam")
    assert open_data(tmp_path / "download").root == tmp_path / "download" / "pcam"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: root / "nowhere", "nowhere does not exist."),
        (lambda root: root, "is empty; expected a folder with a manifest.csv; or the unpacked folders of AMIDA13"),
        (
            lambda root: write_text(root / "notes.txt", "x").parent,
            "is not a dataset of a known format; expected a folder",
        ),
        (lambda root: write_text(root / "notes.txt", "x"), "notes.txt is a file, but not a CSV manifest"),
        (lambda root: (pcam(root / "a"), kaggle(root / "b"), root)[-1], "contains more than one dataset"),
    ],
    ids=["missing", "empty", "unknown", "file", "two"],
)
def test_paths_without_a_dataset_are_refused(tmp_path: Path, make: object, message: str) -> None:
    assert callable(make)
    path = make(tmp_path)
    with pytest.raises(DataError, match=message.replace("(", r"\(")):
        open_data(path)


def test_manifest_takes_precedence_over_other_formats(tmp_path: Path) -> None:
    assert open_data(str(manifest(pcam(tmp_path)))).source == "manifest"


def test_other_annotation_types_are_refused(tmp_path: Path) -> None:
    pcam(tmp_path)
    assert open_data(tmp_path, "labels").annotated == "labels"
    with pytest.raises(DataError) as caught:
        open_data(tmp_path, "objects")
    assert str(caught.value) == (
        f"{tmp_path} (PCam) contains a class for each image; expected outlines of objects; choose other data, or "
        f"another task."
    )


@pytest.mark.parametrize("folder", ["Tissue Images", "mitoses_image_data_part_1"])
def test_dataset_without_images_is_a_problem(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert "the dataset contains no image that can be used." in problem_messages(open_and_check(tmp_path))


def test_empty_split_is_noted(tmp_path: Path) -> None:
    result = open_and_check(amida13(tmp_path, cases=[1, 13]))
    assert "the split 'valid' contains no images." in note_messages(result)
    assert problem_messages(result) == []
