"""Kumar and MoNuSeg: splits by organ, label maps and outlines, flat folders, and messages about faulty files."""

from pathlib import Path

import numpy as np
import pytest
from layouts import (
    box,
    kumar,
    note_messages,
    open_and_check,
    outline_xml,
    pixels,
    problem_messages,
    truncate,
    write_csv,
    write_image,
    write_text,
)
from PIL import Image

from rotopath.data.annotations import read_objects
from rotopath.data.dataset import read_image
from rotopath.data.formats import open_data
from rotopath.data.kumar import ORGANS, PUBLISHED


def test_fields_are_split_by_split_file(tmp_path: Path) -> None:
    result = open_and_check(kumar(tmp_path, ["a", "b", "c"]))
    assert (result.dataset.annotated, result.dataset.objects) == ("objects", "nuclei")
    assert {split: (c["images"], c["cases"], c["nuclei"]) for split, c in result.counts.items()} == {
        "train": (1, 1, 2),
        "valid": (1, 1, 2),
        "test": (1, 1, 2),
    }
    assert problem_messages(result) == []
    assert result.dataset.samples[0].stratum == "breast"
    assert result.dataset.published == {}, "published counts do not apply to another split"


def test_fields_are_split_by_organ_without_a_split_file(tmp_path: Path) -> None:
    names = [f"TCGA-{code}-01Z-00-DX1" for codes in ORGANS.values() for code in codes]
    dataset = open_data(kumar(tmp_path, [*names, "TCGA-DK-A2I6-01A-01-TS1"], split_csv=False))
    for split, count in (("train", 3), ("valid", 1), ("test", 2)):
        assert sorted(sample.stratum for sample in dataset.split(split)) == sorted(list(ORGANS) * count)
    assert dataset.samples[0].case == dataset.samples[0].path.stem[:12]
    assert dataset.published == PUBLISHED
    assert {split: counts["nuclei"] for split, counts in PUBLISHED.items()} == {
        "train": 7337,
        "valid": 1474,
        "test": 4130,
    }
    assert any(
        "without a split are left out: 1 image (TCGA-DK-A2I6-01A-01-TS1);" in note for note in note_messages(dataset)
    )
    assert problem_messages(dataset) == []


def test_fewer_fields_than_published_need_a_split_file(tmp_path: Path) -> None:
    dataset = open_data(kumar(tmp_path, ["TCGA-A7-A13E-01Z-00-DX1"], split_csv=False))
    assert "'breast' has 1" in problem_messages(dataset)[0]
    assert "split.csv" in problem_messages(dataset)[0]


def test_label_maps_are_preferred_to_outlines_and_compared_with_them(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    labels = np.zeros((40, 40), np.uint16)
    labels[5:11, 8:14] = 7
    labels[20:26, 22:25] = 300  # half of the second nucleus
    labels[30:34, 0:4] = 9  # an object without an outline
    write_image(tmp_path / "Label Maps/a.png", labels)
    result = open_and_check(tmp_path)
    assert np.array_equal(read_objects(result.dataset.samples[0], 0.25).labels, labels)
    assert result.counts["train"]["nuclei"] == 3
    assert result.agreement == {"Tissue Images/a.tif": pytest.approx((36 + 18) / (36 + 36 + 16))}


def test_resampled_nuclei_keep_their_numbers(tmp_path: Path) -> None:
    sample = open_data(kumar(tmp_path, ["a", "b", "c"])).samples[0]
    labels = read_objects(sample, 0.5).labels
    expected = np.zeros((20, 20), int)
    expected[2:5, 4:7] = 1  # of rows 5 to 10 and columns 8 to 13, the odd ones
    expected[10:13, 11:14] = 2
    assert labels.shape == read_image(sample, 0.5).shape[:2]
    assert np.array_equal(labels, expected)


def test_second_image_of_the_same_name_is_a_problem(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    write_image(tmp_path / "Tissue Images/a.png", pixels(40, 40))
    assert problem_messages(open_and_check(tmp_path)) == [
        "Tissue Images/a.tif: is left out, because it has the same name as Tissue Images/a.png; rename one of the two."
    ]


def test_organs_of_published_images_are_known(tmp_path: Path) -> None:
    kumar(tmp_path, ["TCGA-B0-5698-01Z-00-DX1", "mine"], split_csv=False)
    write_csv(tmp_path / "split.csv", [("image", "split"), ("TCGA-B0-5698-01Z-00-DX1.tif", "train"), ("mine", "test")])
    assert [(sample.stratum, sample.split) for sample in open_data(tmp_path).samples] == [
        ("kidney", "train"),
        ("", "test"),
    ]


def test_mask_without_object_numbers_is_a_problem(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    mask = np.zeros((40, 40), np.uint8)
    mask[5:11, 8:14] = mask[20:26, 22:25] = 255
    write_image(tmp_path / "Label Maps/a.png", mask)
    assert problem_messages(open_and_check(tmp_path)) == [
        "Label Maps/a.png: has 2 separate objects with the same number, which count as one; give each object its own "
        "number."
    ]


def test_spacing_is_read_from_files(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    write_text(tmp_path / "Annotations/a.xml", outline_xml(box(2, 2, 5), spacing=0.5))
    Image.fromarray(pixels(40, 40)).save(tmp_path / "Tissue Images/b.tif", dpi=(25_400, 25_400))
    assert [sample.spacing_um_px for sample in open_data(tmp_path).samples] == [0.5, pytest.approx(1.0), 0.25]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda root: truncate(root / "Annotations/a.xml"), "Annotations/a.xml: is incomplete or not XML"),
        (
            lambda root: write_text(
                root / "Annotations/a.xml", '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
            ),
            "Annotations/a.xml: contains XML entities",
        ),
        (
            lambda root: (root / "Annotations/a.xml").unlink(),
            "a.tif: is left out, because it has neither a label map nor an XML file",
        ),
        (
            lambda root: (root / "Tissue Images/a.tif").unlink(),
            "split.csv: lists 1 image (a) that the folder does not contain; correct these lines.",
        ),
        (lambda root: truncate(root / "Tissue Images/a.tif", 0.02), "Tissue Images/a.tif: is"),
        (
            lambda root: write_image(root / "Label Maps/a.png", np.zeros((40, 41), np.uint16)),
            "Label Maps/a.png: is a label map of 40 × 41 px, but the image has 40 × 40 px (height × width); export a "
            "label map of the size of the image.",
        ),
        (lambda root: write_image(root / "Label Maps/a.png", pixels(40, 40)), "Label Maps/a.png: is not a label map"),
        (
            lambda root: write_text(root / "split.csv", "image,split\na,learn\nb,test\n"),
            "split.csv: line 2 has the split 'learn'; choose from train, valid, test.",
        ),
    ],
    ids=["cut off", "entities", "no annotation", "no image", "truncated", "other size", "colors", "split"],
)
def test_damaged_fields_are_problems(tmp_path: Path, damage: object, message: str) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    assert callable(damage)
    damage(tmp_path)
    assert any(message in result for result in problem_messages(open_and_check(tmp_path))), problem_messages(
        open_and_check(tmp_path)
    )


def test_invalid_outlines_are_noted_and_others_are_used(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    bow_tie = [(2, 2), (12, 12), (12, 2), (2, 12)]
    line, outside = [(1, 1), (5, 5), (9, 9)], box(100, 100, 4)
    text = outline_xml(box(20, 20, 8), box(24, 24, 8), bow_tie, line, outside, box(30, 37, 8), box(21, 21, 2))
    write_text(tmp_path / "Annotations/a.xml", text)
    result = open_and_check(tmp_path)
    assert problem_messages(result) == []
    assert note_messages(result) == [
        "Annotations/a.xml: region 4 is left out: it is a line or a point, without an area.",
        "Annotations/a.xml: region 5 is left out: it covers no pixel of the image.",
        "Annotations/a.xml: region 7 is left out: earlier regions cover all of its pixels.",
    ]
    assert result.counts["train"]["nuclei"] == 4
    labels = read_objects(result.dataset.samples[0], 0.25).labels
    assert (labels == 1).sum() == 64, "the first outline keeps its pixels"
    assert (labels == 2).sum() == 64 - 16
    assert (labels == 4).sum() == 3 * 8, "cut off at the border"


def test_patient_in_two_splits_is_a_leak(tmp_path: Path) -> None:
    """Leaks are result when the data is opened, not only when it is checked."""
    names = ["TCGA-A7-A13E-01Z-00-DX1", "TCGA-A7-A13E-01Z-00-DX2", "TCGA-A7-A13F-01Z-00-DX1"]
    result = problem_messages(open_data(kumar(tmp_path, names)))
    assert result == ["patient or slide TCGA-A7-A13E is in train and valid; move all of its images to one split."]


def monuseg_test(root: Path, names: tuple[str, ...] = ("TCGA-B0-5698-01Z-00-DX1", "TCGA-2Z-A9J9-01A-01-TS1")) -> Path:
    """Write images and XML files of the same names into one folder."""
    for i, name in enumerate(names):
        write_image(root / f"{name}.tif", pixels(40, 40, i))
        write_text(root / f"{name}.xml", outline_xml(box(5, 8, 6), box(20, 22, 6)))
    return root


def test_flat_folder_of_monuseg_is_a_test_set(tmp_path: Path) -> None:
    result = open_and_check(monuseg_test(tmp_path))
    assert (result.dataset.annotated, result.dataset.objects) == ("objects", "nuclei")
    assert result.counts["test"] == {"images": 2, "cases": 2, "nuclei": 4}
    assert [(sample.name, sample.case, sample.split, sample.stratum) for sample in result.dataset.samples] == [
        ("TCGA-2Z-A9J9-01A-01-TS1.tif", "TCGA-2Z-A9J9", "test", ""),
        ("TCGA-B0-5698-01Z-00-DX1.tif", "TCGA-B0-5698", "test", "kidney"),
    ]
    assert np.unique(read_objects(result.dataset.samples[0], 0.25).labels).tolist() == [0, 1, 2]
    assert problem_messages(result) == []
    assert note_messages(result)[0] == (
        "images and XML files are in one folder, as in MoNuSeg's test set: all images have the split 'test'; for other "
        "splits, add a split.csv (image,split,organ)."
    )
    assert result.dataset.published == {}, "published counts do not apply to this test set"


def test_flat_folder_may_have_a_split_file(tmp_path: Path) -> None:
    root = monuseg_test(tmp_path / "MoNuSegTestData", ("a", "b", "c"))
    assert {sample.split for sample in open_data(tmp_path).samples} == {"test"}
    write_csv(root / "split.csv", [("image", "split", "organ"), ("a", "train", "colon"), ("b.tif", "valid", "bladder")])
    dataset = open_data(tmp_path)
    assert [(sample.path.stem, sample.split, sample.stratum) for sample in dataset.samples] == [
        ("a", "train", "colon"),
        ("b", "valid", "bladder"),
    ]
    assert dataset.published == {}
    assert "images without a split are left out: 1 image (c);" in note_messages(dataset)[0]


def test_images_in_a_flat_folder_need_annotations(tmp_path: Path) -> None:
    monuseg_test(tmp_path, ("a", "b", "c"))
    (tmp_path / "a.xml").unlink()
    (tmp_path / "b.tif").unlink()
    assert problem_messages(open_data(tmp_path)) == [
        "a.tif: is left out, because it has neither a label map nor an XML file; add one of them.",
        "b.xml: there is no image with this name; add the image, or remove this file.",
    ]
