"""Folders of classes, as ImageFolder has them: with splits above the classes or without, and with a table of splits."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from layouts import pixels, truncate, write_csv, write_image
from PIL import Image

from rotopath.data.dataset import DataError, Dataset, problems, read_image
from rotopath.data.formats import Check, check, open_data
from rotopath.tasks import Classify, make_task

CLASSES = ("fat", "stroma", "tumor")


def sentences(found: Check | Dataset) -> list[str]:
    return [str(finding) for finding in problems(found.findings)]


def folders(root: Path, count: int = 5, classes: tuple[str, ...] = CLASSES) -> Path:
    for k, name in enumerate(classes):
        for i in range(count):
            write_image(root / name / f"{i}.png", pixels(12, 12, k, i))
    return root


def with_splits(root: Path) -> Path:
    for split, count in (("train", 4), ("valid", 2), ("test", 3)):
        folders(root / split, count)
    return root


def test_the_folder_of_a_patch_is_its_class(tmp_path: Path) -> None:
    dataset = open_data(folders(tmp_path), spacing_um_px=0.5)
    assert (dataset.annotated, dataset.source, dataset.classes) == ("labels", "class folders", CLASSES)
    assert {(p.name, p.label) for p in dataset.samples} == {(f"{c}/{i}.png", c) for c in CLASSES for i in range(5)}
    assert {p.spacing_um_px for p in dataset.samples} == {0.5}
    first = dataset.samples[0]
    assert np.array_equal(read_image(first, 0.5), np.array(Image.open(tmp_path / first.name)))
    assert sentences(check(dataset)) == []


def test_without_splits_every_class_is_divided_and_that_patients_are_not_known_is_noted(tmp_path: Path) -> None:
    dataset = open_data(folders(tmp_path, 10), spacing_um_px=1.0)
    counts = Counter((p.split, p.label) for p in dataset.samples)
    assert counts == {
        (split, name): number for split, number in (("train", 6), ("valid", 2), ("test", 2)) for name in CLASSES
    }
    assert {p.case for p in dataset.samples} == {""}
    (note,) = dataset.findings
    assert not note.is_problem
    assert "patches of one patient may be in two splits" in str(note)
    assert dataset == open_data(tmp_path, spacing_um_px=1.0), "always the same ones"


def test_splits_may_be_folders_above_the_classes(tmp_path: Path) -> None:
    found = check(open_data(with_splits(tmp_path), spacing_um_px=1.0))
    assert {split: tuple(counts[name] for name in ("images", *CLASSES)) for split, counts in found.counts.items()} == {
        "train": (12, 4, 4, 4),
        "valid": (6, 2, 2, 2),
        "test": (9, 3, 3, 3),
    }
    assert found.findings == ()
    assert found.dataset.samples[0].name == "test/fat/0.png"
    assert found.dataset.classes == CLASSES


def test_a_table_gives_splits_and_patients(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    rows = [("fat/0.png", "train", "p1"), ("fat/1.png", "test", "p2"), ("tumor/0.png", "train", "p1")]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [(p.name, p.split, p.case, p.label) for p in dataset.samples] == [
        ("fat/0.png", "train", "p1", "fat"),
        ("fat/1.png", "test", "p2", "fat"),
        ("tumor/0.png", "train", "p1", "tumor"),
    ]
    assert [str(finding) for finding in dataset.findings] == [
        "3 images (stroma/0.png, stroma/1.png, tumor/1.png) without a split: left out; a split.csv (image,split) gives "
        "them a place."
    ]


def test_a_table_is_held_against_what_is_there_and_leaks_are_found(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    rows = [
        ("fat/0.png", "train", "p1"),
        ("stroma/0.png", "test", "p1"),
        ("tumor/0.png", "x", ""),
        ("no.png", "test", ""),
    ]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    assert sentences(open_data(tmp_path, spacing_um_px=1.0)) == [
        "split.csv: line 4 has the split 'x'; choose from train, valid, test.",
        "split.csv: it lists 1 image (no.png) that the folder does not hold.",
        "patient p1 is in train and test; each must be in one split only.",
    ]


def test_a_table_needs_no_patients(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    write_csv(tmp_path / "split.csv", [("image", "split"), *((f"{name}/0.png", "test") for name in CLASSES)])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [(p.case, p.split) for p in dataset.samples] == [("", "test")] * 3
    assert dataset.findings == ()


@pytest.mark.parametrize("make", [lambda root: folders(root, 100), with_splits], ids=["classes", "splits"])
def test_without_a_spacing_there_is_one_problem_and_not_one_for_each_patch(tmp_path: Path, make: object) -> None:
    assert callable(make)
    dataset = open_data(make(tmp_path))
    (sentence,) = sentences(dataset)
    file, _, rest = sentence.partition(": ")
    assert (tmp_path / file).is_file()
    assert rest == (
        "does not say its resolution; give it as `data_spacing_um_px` in the recipe (--spacing-um-px of `rotopath "
        "data`), or in a column `spacing` (µm/px) of a manifest."
    )
    assert dataset.samples == ()
    assert len(sentences(check(dataset))) == 2, "and that there is no image at all"


def test_files_that_say_their_spacing_are_believed(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    Image.fromarray(pixels(12, 12)).save(tmp_path / "fat/0.png", dpi=(50_800, 50_800))
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    spacings = {p.name: p.spacing_um_px for p in dataset.samples}
    assert spacings.pop("fat/0.png") == pytest.approx(0.5, rel=1e-3)
    assert set(spacings.values()) == {1.0}


def test_patches_lie_at_any_depth_below_their_class(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    write_image(tmp_path / "fat/slide 7/9.TIF", pixels(12, 12))
    (tmp_path / "fat/._0.png").write_text("Mac OS X")
    (tmp_path / ".cache").mkdir()
    write_image(tmp_path / ".cache/0.png", pixels(12, 12))
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert [p.name for p in dataset.samples if p.label == "fat"] == ["fat/0.png", "fat/1.png", "fat/slide 7/9.TIF"]
    assert dataset.classes == CLASSES


def test_a_damaged_patch_is_named_and_the_others_count(tmp_path: Path) -> None:
    folders(tmp_path, 2)
    truncate(tmp_path / "stroma/1.png", 0.02)
    found = check(open_data(tmp_path, spacing_um_px=1.0))
    (sentence,) = sentences(found)
    assert sentence.startswith("stroma/1.png: is ")
    assert str(tmp_path) not in sentence
    assert sum(counts["images"] for counts in found.counts.values()) == 5


def test_one_folder_of_images_is_no_data_set(tmp_path: Path) -> None:
    folders(tmp_path, 3, ("images",))
    with pytest.raises(DataError, match=r"is no data set that is known here; .*a folder of patches for each class"):
        open_data(tmp_path, spacing_um_px=1.0)


def test_the_classes_of_the_folders_become_those_of_a_task(tmp_path: Path) -> None:
    dataset = open_data(with_splits(tmp_path), "labels", 1.0)
    assert Classify.find_classes(dataset) == CLASSES
    task = make_task("classify", found=Classify.find_classes(dataset))
    assert task.check_data(dataset) == []
    samples = dataset.split("valid")
    assert task.labels(samples).tolist() == [0, 0, 1, 1, 2, 2]


def test_a_manifest_in_a_folder_of_classes_goes_first(tmp_path: Path) -> None:
    folders(tmp_path, 1)
    write_csv(tmp_path / "manifest.csv", [("image", "label", "spacing"), ("fat/0.png", "x", 1)])
    assert [p.label for p in open_data(tmp_path).samples] == ["x"]


def test_two_data_sets_side_by_side_are_no_classes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_image(tmp_path / name / "x.png", pixels(12, 12, 1))
        write_csv(tmp_path / name / "manifest.csv", [("image", "label", "split", "spacing"), ("x.png", 1, "train", 1)])
    with pytest.raises(DataError, match="holds more than one data set"):
        open_data(tmp_path)


def test_images_beside_masks_are_no_classes(tmp_path: Path) -> None:
    for name in ("images", "masks"):
        write_image(tmp_path / name / "x.png", pixels(12, 12, 1))
    with pytest.raises(DataError, match="is no data set that is known here"):
        open_data(tmp_path, spacing_um_px=1.0)


def test_a_table_of_splits_brings_patients_into_folders_of_splits(tmp_path: Path) -> None:
    with_splits(tmp_path)
    rows = [("train/fat/0.png", "train", "p1"), ("test/tumor/0.png", "test", "p1"), ("valid/fat/0.png", "valid", "p2")]
    write_csv(tmp_path / "split.csv", [("image", "split", "group"), *rows])
    dataset = open_data(tmp_path, spacing_um_px=1.0)
    assert {sample.case for sample in dataset.samples} == {"p1", "p2"}
    assert any("patient p1 is in train and test" in sentence for sentence in sentences(dataset))


@pytest.mark.parametrize("spacing", [-1.0, 0.0, 100.0, float("nan")])
def test_an_implausible_spacing_is_refused(tmp_path: Path, spacing: float) -> None:
    with pytest.raises(DataError, match=r"microscopes have 0\.05 to 5"):
        open_data(folders(tmp_path), spacing_um_px=spacing)
