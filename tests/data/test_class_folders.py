"""Folders of classes, as in ImageFolder: with or without folders of splits above them, and with a split.csv."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from layouts import pixels, problem_messages, truncate, write_csv, write_image
from PIL import Image

from rotopath.data.dataset import DataError, read_image
from rotopath.data.formats import check, open_data
from rotopath.tasks import Classify, make_task

CLASSES = ("fat", "stroma", "tumor")


def folders(root: Path, count: int = 5, classes: tuple[str, ...] = CLASSES) -> Path:
    for k, name in enumerate(classes):
        for i in range(count):
            write_image(root / name / f"{i}.png", pixels(12, 12, k, i, *root.name.encode()))
    return root


def with_splits(root: Path) -> Path:
    for split, count in (("train", 4), ("valid", 2), ("test", 3)):
        folders(root / split, count)
    return root


def test_class_of_a_patch_is_the_name_of_its_folder(tmp_path: Path) -> None:
    dataset = open_data(folders(tmp_path), spacing_um_px=0.5)
    assert (dataset.annotated, dataset.source, dataset.classes) == ("labels", "class folders", CLASSES)
    assert {(sample.name, sample.label) for sample in dataset.samples} == {
        (f"{c}/{i}.png", c) for c in CLASSES for i in range(5)
    }
    assert {sample.spacing_um_px for sample in dataset.samples} == {0.5}
    first = dataset.samples[0]
    assert np.array_equal(read_image(first, 0.5), np.array(Image.open(tmp_path / first.name)))
    assert problem_messages(check(dataset)) == []


def test_without_splits_classes_are_divided_and_unknown_patients_are_noted(tmp_path: Path) -> None:
    dataset = open_data(folders(tmp_path, 10), spacing_um_px=1.0)
    counts = Counter((sample.split, sample.label) for sample in dataset.samples)
    assert counts == {
        (split, name): number for split, number in (("train", 6), ("valid", 2), ("test", 2)) for name in CLASSES
    }
    assert {sample.case for sample in dataset.samples} == {""}
    (note,) = dataset.findings
    assert not note.is_problem
    assert "patches of one patient may be in two splits" in str(note)
    assert dataset == open_data(tmp_path, spacing_um_px=1.0), "the same split every time"


def test_splits_may_be_folders_above_the_classes(tmp_path: Path) -> None:
    result = check(open_data(with_splits(tmp_path), spacing_um_px=1.0))
    assert {split: tuple(counts[name] for name in ("images", *CLASSES)) for split, counts in result.counts.items()} == {
        "train": (12, 4, 4, 4),
        "valid": (6, 2, 2, 2),
        "test": (9, 3, 3, 3),
    }
    assert result.findings == ()
    assert result.dataset.samples[0].name == "test/fat/0.png"
    assert result.dataset.classes == CLASSES


def test_split_file_assigns_splits_and_patients(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    rows = [("fat/0.png", "train", "p1"), ("fat/1.png", "test", "p2"), ("tumor/0.png", "train", "p1")]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [(sample.name, sample.split, sample.case, sample.label) for sample in dataset.samples] == [
        ("fat/0.png", "train", "p1", "fat"),
        ("fat/1.png", "test", "p2", "fat"),
        ("tumor/0.png", "train", "p1", "tumor"),
    ]
    assert [str(finding) for finding in dataset.findings] == [
        "images without a split are left out: 3 images (stroma/0.png, stroma/1.png, tumor/1.png); to use them, add "
        "them to a split.csv (image,split)."
    ]


def test_split_file_is_compared_with_the_folder_and_leaks_are_reported(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    rows = [
        ("fat/0.png", "train", "p1"),
        ("stroma/0.png", "test", "p1"),
        ("tumor/0.png", "x", ""),
        ("no.png", "test", ""),
    ]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    assert problem_messages(open_data(tmp_path, spacing_um_px=1.0)) == [
        "split.csv: line 4 has the split 'x'; choose from train, valid, test.",
        "split.csv: lists 1 image (no.png) that the folder does not contain; correct these lines.",
        "patient or slide p1 is in train and test; move all of its images to one split.",
    ]


def test_split_file_without_patients(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    write_csv(tmp_path / "split.csv", [("image", "split"), *((f"{name}/0.png", "test") for name in CLASSES)])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [(sample.case, sample.split) for sample in dataset.samples] == [("", "test")] * 3
    assert dataset.findings == ()


@pytest.mark.parametrize("make", [lambda root: folders(root, 100), with_splits], ids=["classes", "splits"])
def test_missing_spacing_is_reported_once(tmp_path: Path, make: object) -> None:
    assert callable(make)
    dataset = open_data(make(tmp_path))
    (message,) = problem_messages(dataset)
    file, _, rest = message.partition(": ")
    assert (tmp_path / file).is_file()
    assert rest == (
        "does not specify its pixel spacing (µm/px); set `data_spacing_um_px` in the recipe, or use "
        "--spacing-um-px with `rotopath data`, or add a column `spacing` to the manifest."
    )
    assert dataset.samples == ()
    assert len(problem_messages(check(dataset))) == 2, "the second says that there is no image at all"


def test_spacing_in_files_takes_precedence(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    Image.fromarray(pixels(12, 12)).save(tmp_path / "fat/0.png", dpi=(50_800, 50_800))
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    spacings = {sample.name: sample.spacing_um_px for sample in dataset.samples}
    assert spacings.pop("fat/0.png") == pytest.approx(0.5, rel=1e-3)
    assert set(spacings.values()) == {1.0}


def test_patches_may_be_at_any_depth_in_the_folder_of_their_class(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    write_image(tmp_path / "fat/slide 7/9.TIF", pixels(12, 12))
    (tmp_path / "fat/._0.png").write_text("Mac OS X")
    (tmp_path / ".cache").mkdir()
    write_image(tmp_path / ".cache/0.png", pixels(12, 12))
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [sample.name for sample in dataset.samples if sample.label == "fat"] == [
        "fat/0.png",
        "fat/1.png",
        "fat/slide 7/9.TIF",
    ]
    assert dataset.classes == CLASSES


def test_damaged_patch_is_reported_and_others_are_counted(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    truncate(tmp_path / "stroma/1.png", 0.02)
    result = check(open_data(tmp_path, spacing_um_px=1.0))
    (message,) = problem_messages(result)
    assert message.startswith("stroma/1.png: is ")
    assert str(tmp_path) not in message
    assert sum(counts["images"] for counts in result.counts.values()) == 5


def test_single_folder_of_images_is_refused(tmp_path: Path) -> None:
    folders(tmp_path, 3, ("images",))
    with pytest.raises(DataError, match=r"is not a dataset of a known format; .*a folder of patches for each class"):
        open_data(tmp_path, spacing_um_px=1.0)


def test_task_takes_its_classes_from_the_folders(tmp_path: Path) -> None:
    dataset = open_data(with_splits(tmp_path), "labels", 1.0)
    assert Classify.find_classes(dataset) == CLASSES
    task = make_task("classify", annotated_classes=Classify.find_classes(dataset))
    assert task.check_data(dataset) == []
    samples = dataset.split("valid")
    assert task.image_targets(samples).tolist() == [0, 0, 1, 1, 2, 2]


def test_manifest_takes_precedence_over_folders_of_classes(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    write_csv(tmp_path / "manifest.csv", [("image", "label", "spacing"), ("fat/0.png", "x", 1)])
    assert [sample.label for sample in open_data(tmp_path).samples] == ["x"]


def test_two_datasets_side_by_side_are_not_classes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(tmp_path / name / "x.png", pixels(12, 12, 1))
        write_csv(tmp_path / name / "manifest.csv", [("image", "label", "split", "spacing"), ("x.png", 1, "train", 1)])
    with pytest.raises(DataError, match="contains more than one dataset"):
        open_data(tmp_path)


def test_images_beside_masks_are_not_classes(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        write_image(tmp_path / name / "x.png", pixels(12, 12, 1))
    with pytest.raises(DataError, match="is not a dataset of a known format"):
        open_data(tmp_path, spacing_um_px=1.0)


def test_split_file_assigns_patients_in_folders_of_splits(tmp_path: Path) -> None:
    with_splits(tmp_path)
    rows = [("train/fat/0.png", "train", "p1"), ("test/tumor/0.png", "test", "p1"), ("valid/fat/0.png", "valid", "p2")]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert {sample.case for sample in dataset.samples} == {"p1", "p2"}
    assert any("patient or slide p1 is in train and test" in message for message in problem_messages(dataset))


@pytest.mark.parametrize("spacing", [-1.0, 0.0, 100.0, float("nan")])
def test_implausible_spacing_is_refused(tmp_path: Path, spacing: float) -> None:
    with pytest.raises(DataError, match=r"expected 0\.05 to 5 µm/px"):
        open_data(folders(tmp_path), spacing_um_px=spacing)
