"""PCam: patches in HDF5 files and in the form of Kaggle, slides, and messages about faulty files."""

from pathlib import Path

import h5py
import numpy as np
import pytest
from layouts import (
    kaggle,
    note_messages,
    open_and_check,
    pcam,
    pcam_name,
    problem_messages,
    truncate,
    write_csv,
    write_hdf5,
    write_text,
)

from rotopath.data.dataset import DataError, read_image
from rotopath.data.formats import open_data
from rotopath.images.files import UnreadableFileError


def test_single_patches_are_read(tmp_path: Path) -> None:
    result = open_and_check(pcam(tmp_path))
    assert result.dataset.annotated == "labels"
    assert result.dataset.classes == ("normal", "tumor")
    assert {s: (c["images"], c["normal"], c["tumor"]) for s, c in result.counts.items()} == {
        "train": (8, 4, 4),
        "valid": (4, 2, 2),
        "test": (4, 2, 2),
    }
    assert problem_messages(result) == []
    assert "rotopath cannot check that no slide is in two splits" in note_messages(result)[0]
    with h5py.File(tmp_path / pcam_name("valid", "x")) as file:
        expected = file["x"][3]
    sample = result.dataset.split("valid")[3]
    assert np.array_equal(read_image(sample, 1.0), expected), "0.972 µm/px is nearly 1"
    assert sample.label == "tumor"


def test_incomplete_slide_names_are_noted(tmp_path: Path) -> None:
    pcam(tmp_path)
    write_csv(tmp_path / "camelyonpatch_level_2_split_train_meta.csv", [("", "wsi"), *((i, "s") for i in range(8))])
    assert "without a *_meta.csv file for each split" in note_messages(open_data(tmp_path))[0]


def test_slides_are_checked_for_leaks(tmp_path: Path) -> None:
    pcam(tmp_path)
    for split, count in (("train", 8), ("valid", 4), ("test", 4)):
        rows = [(i, 0, 0, True, True, f"slide_{'0' if split == 'test' else split}") for i in range(count)]
        rows[0] = (*rows[0][:5], "slide_0")
        header = ("", "coord_y", "coord_x", "tumor_patch", "center_tumor_patch", "wsi")
        write_csv(tmp_path / f"camelyonpatch_level_2_split_{split}_meta.csv", [header, *rows])
    result = open_and_check(tmp_path)
    assert problem_messages(result) == [
        "patient or slide slide_0 is in train and valid and test; move all of its images to one split."
    ]
    assert [result.counts[s]["cases"] for s in ("train", "valid", "test")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "images", np.zeros((4, 96, 96, 3), np.uint8)),
            f"{pcam_name('valid', 'x')}: has no array 'x'; it contains 'images'; download it again.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.zeros((3, 1, 1, 1), np.uint8)),
            f"{pcam_name('valid', 'x')}: has 4 patches, but the labels in {pcam_name('valid', 'y')} have shape "
            "(3, 1, 1, 1); download both again.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "x", np.zeros((4, 3, 96, 96), np.uint8)),
            f"{pcam_name('valid', 'x')}: contains an array of shape (4, 3, 96, 96); expected (n, 96, 96, 3).",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "x", np.zeros((4, 96, 96, 3), np.float32)),
            f"{pcam_name('valid', 'x')}: has an array 'x' of type float32; expected bytes (uint8); download it again.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.full((4, 1, 1, 1), 2, np.uint8)),
            f"{pcam_name('valid', 'y')}: has the label 2 at row 0; expected 0 (normal) or 1 (tumor).",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.uint8(1)),
            f"{pcam_name('valid', 'x')}: has 4 patches, but the labels in {pcam_name('valid', 'y')} have shape (); "
            "download both again.",
        ),
        (
            lambda root: truncate(root / pcam_name("valid", "x")),
            f"{pcam_name('valid', 'x')}: is not an HDF5 file, or is damaged",
        ),
        (lambda root: (root / pcam_name("valid", "y")).unlink(), f"{pcam_name('valid', 'y')}: does not exist."),
        (
            lambda root: (root / pcam_name("valid", "x")).rename(root / f"{pcam_name('valid', 'x')}.gz"),
            f"{pcam_name('valid', 'x')}.gz: is still compressed; unpack it with `gunzip",
        ),
        (
            lambda root: write_csv(root / "camelyonpatch_level_2_split_valid_meta.csv", [("", "wsi"), (0, "a")]),
            "camelyonpatch_level_2_split_valid_meta.csv: has 1 rows, but there are 4 patches; download it again.",
        ),
    ],
    ids=["keys", "lengths", "shape", "floats", "labels", "scalar", "truncated", "missing", "packed", "meta"],
)
def test_damaged_hdf5_files_are_problems(tmp_path: Path, damage: object, message: str) -> None:
    pcam(tmp_path)
    assert callable(damage)
    damage(tmp_path)
    result = open_and_check(tmp_path)
    assert len(problem_messages(result)) == 1
    assert problem_messages(result)[0].startswith(message)
    assert result.counts["train"]["images"] == 8, "the good splits are counted"
    with pytest.raises(DataError, match="has no images in the split 'valid'"):
        result.dataset.split("valid")


def test_damaged_chunk_is_reported_with_its_rows(tmp_path: Path) -> None:
    pcam(tmp_path)
    path = tmp_path / pcam_name("train", "x")
    content = bytearray(path.read_bytes())
    content[-3000:-2000] = bytes(1000)
    path.write_bytes(content)
    (result,) = problem_messages(open_and_check(tmp_path))
    assert "is damaged at rows 0 to 7 of 'x'" in result


@pytest.mark.parametrize("fill", [0, 255, 1])
def test_any_overwritten_bytes_of_an_hdf5_file_are_harmless_or_a_problem(tmp_path: Path, fill: int) -> None:
    """No error of another type: h5py raises many. Fails without `_hdf5_errors`."""
    root = pcam(tmp_path / "pcam", (3, 2, 2), size=8)
    path = root / pcam_name("train", "x")
    content = path.read_bytes()
    for start in range(0, len(content), 23):
        path.write_bytes(content[:start] + bytes([fill]) * min(8, len(content) - start) + content[start + 8 :])
        for message in problem_messages(open_and_check(root)):
            assert message.endswith(".")
            assert "\n" not in message


def test_an_array_of_impossible_size_is_a_problem(tmp_path: Path) -> None:
    root = pcam(tmp_path / "pcam", (3, 2, 2), size=8)
    with h5py.File(root / pcam_name("train", "x"), "w") as file:
        file.create_dataset("x", (3, 10**6, 10**6, 3), np.uint8, chunks=(1, 8, 8, 3))
    assert "its images would have the shape (1000000, 1000000, 3)" in problem_messages(open_and_check(root))[0]


def test_kaggle_patches_are_split_within_each_class(tmp_path: Path) -> None:
    result = open_and_check(kaggle(tmp_path))
    assert {s: (c["normal"], c["tumor"]) for s, c in result.counts.items()} == {
        "train": (8, 8),
        "valid": (1, 1),
        "test": (1, 1),
    }
    assert any("patches of one slide may be in two splits" in note for note in note_messages(result))
    write_csv(tmp_path / "split.csv", [("id", "split"), ("0003", "test"), ("0001", "train"), ("beef", "test")])
    dataset = open_data(tmp_path)
    assert [(sample.path.stem, sample.split, sample.label) for sample in dataset.samples] == [
        ("0001", "train", "tumor"),
        ("0003", "test", "tumor"),
    ]
    assert problem_messages(dataset) == [
        "split.csv: lists 1 id (beef) that the folder does not contain; correct these lines."
    ]
    assert any(
        "ids without a split are left out: 18 ids (0000, 0002, 0004, 0005, 0006, ...);" in note
        for note in note_messages(dataset)
    )


def test_invalid_kaggle_labels_are_problems(tmp_path: Path) -> None:
    kaggle(tmp_path, count=4)
    write_text(tmp_path / "train_labels.csv", "id,label\n0000,1\n0001,yes\n0002,0\n0002,1\nffff,0\n")
    dataset = open_data(tmp_path)
    assert problem_messages(dataset) == [
        "train_labels.csv: line 3 has the label 'yes'; expected 0 (normal) or 1 (tumor).",
        "train_labels.csv: line 5 repeats '0002'; list it once.",
        "train_labels.csv: there is no image in train for 1 label (ffff); add the images, or remove the labels.",
    ]
    assert any("images without a label are left out: 2 images (0001, 0003);" in note for note in note_messages(dataset))
    write_text(tmp_path / "train_labels.csv", "name,label\n0000,1\n")
    with pytest.raises(UnreadableFileError, match="has no column 'id'; its first line must contain 'id' and 'label'"):
        open_data(tmp_path)
