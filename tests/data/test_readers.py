"""The readers of the benchmarks: what is found in good folders, and what is said of bad ones."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from layouts import (
    amida13,
    box,
    kumar,
    outline_xml,
    pcam,
    pcam_name,
    pixels,
    truncate,
    write_csv,
    write_hdf5,
    write_image,
    write_text,
)
from PIL import Image

from rotopath.data import dataset as hdf5
from rotopath.data.annotations import AnnotationError, read_objects, read_points
from rotopath.data.dataset import DataError, Dataset, problems, read_image, read_run, runs
from rotopath.data.formats import Check, check, open_data
from rotopath.data.kumar import ORGANS, PUBLISHED
from rotopath.images.files import UnreadableFileError, read_rgb


def sentences(found: Check | Dataset) -> list[str]:
    return [str(finding) for finding in problems(found.findings)]


def notes(found: Check | Dataset) -> list[str]:
    return [str(finding) for finding in found.findings if not finding.is_problem]


def checked(path: Path) -> Check:
    return check(open_data(path))


# AMIDA13


def test_amida13_is_split_as_published(tmp_path: Path) -> None:
    found = checked(amida13(tmp_path))
    assert (found.dataset.annotated, found.dataset.objects) == ("points", "mitoses")
    assert {split: (c["images"], c["cases"], c["mitoses"]) for split, c in found.counts.items()} == {
        "train": (16, 8, 16),
        "valid": (8, 4, 8),
        "test": (22, 11, 22),
    }
    assert {p.case for p in found.dataset.split("valid")} == {"03", "05", "07", "10"}
    assert sentences(found) == []


def test_a_field_without_csv_has_no_mitoses(tmp_path: Path) -> None:
    dataset = open_data(amida13(tmp_path, cases=[1]))
    first, second = dataset.samples
    assert read_points(first, 0.25).positions.tolist() == [[10, 20], [30, 40]]
    assert read_points(second, 0.25).positions.shape == (0, 2)
    assert "no CSV, so no mitoses, in 1 field (mitoses_image_data_part_1/01/02.tif)." in notes(dataset)[0]


def test_points_move_with_the_image_to_another_spacing(tmp_path: Path) -> None:
    """At half the resolution, two pixels become one, and a point between them lies at its centre."""
    (sample, _) = open_data(amida13(tmp_path, cases=[1])).samples
    assert read_image(sample, 0.5).shape == (30, 40, 3)
    assert read_points(sample, 0.5).positions.tolist() == [[4.75, 9.75], [14.75, 19.75]]
    assert np.array_equal(read_image(sample, 0.252), read_rgb(sample.path)), "nearly the same spacing"


def test_tupac16_cases_beyond_amida13_are_left_out_unless_a_split_csv_lists_them(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 30])
    dataset = open_data(tmp_path)
    assert {p.case for p in dataset.samples} == {"01"}
    assert any("1 case (30) without a split: left out" in note for note in notes(dataset))
    assert sentences(dataset) == []
    write_csv(tmp_path / "split.csv", [("case", "split"), ("1", "test"), ("30", "train")])
    assert {(p.case, p.split) for p in open_data(tmp_path).samples} == {("01", "test"), ("30", "train")}


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("row,col", "line 2 is 'row,col', where a row and a column in pixels are expected."),
        ("5", "line 2 is '5', where a row and a column in pixels are expected."),
        ("nan,4", "line 2 places an object at row nan"),
        (
            "60,10",
            "line 2 places an object at row 60, column 10, outside of the image of 60 × 80 px (rows come first).",
        ),
        ("-1,10", "line 2 places an object at row -1, column 10, outside of the image"),
    ],
)
def test_bad_coordinates_are_named_and_not_trained_on(tmp_path: Path, line: str, sentence: str) -> None:
    amida13(tmp_path, cases=[1])
    write_text(tmp_path / "mitoses_ground_truth/01/01.csv", f"10,20\n{line}\n30,40\n")
    found = checked(tmp_path)
    assert len(sentences(found)) == 1
    assert sentences(found)[0].startswith(f"mitoses_ground_truth/01/01.csv: {sentence}")
    assert found.counts["train"]["mitoses"] == 2, "the good lines are counted"
    with pytest.raises(AnnotationError, match="cannot be used: line 2"):
        read_points(found.dataset.samples[0], 0.25)


def test_binary_instead_of_csv(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    (tmp_path / "mitoses_ground_truth/01/01.csv").write_bytes(bytes(range(256)))
    assert sentences(checked(tmp_path)) == [
        "mitoses_ground_truth/01/01.csv: is no text, where lines of `row,column` are expected."
    ]


def test_all_problems_are_listed_not_only_the_first(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 2, 3])
    truncate(tmp_path / "mitoses_image_data_part_1/01/01.tif")
    write_text(tmp_path / "mitoses_ground_truth/02/01.csv", "a,b\nc,d\n")
    write_csv(tmp_path / "mitoses_ground_truth/03/77.csv", [(1, 1)])
    write_image(tmp_path / "mitoses_image_data_part_2/03/01.tif", pixels(20, 20))
    found = sentences(checked(tmp_path))
    assert [sentence.partition(":")[0] for sentence in sorted(found)] == [
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/03/77.csv",
        "mitoses_image_data_part_1/01/01.tif",
        "mitoses_image_data_part_2/03/01.tif",
    ]
    assert any("01/01.tif: is damaged and cannot be decoded" in sentence for sentence in found)


def test_without_any_csv_something_is_wrong(tmp_path: Path) -> None:
    """Not a note: every mitosis would be learnt as background."""
    amida13(tmp_path, cases=[1, 13])
    shutil.rmtree(tmp_path / "mitoses_ground_truth")
    assert sentences(checked(tmp_path)) == [
        "mitoses_ground_truth: there is no CSV at all, and without the places of mitoses there is nothing to learn."
    ]


def test_endings_may_be_in_capitals(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    path = tmp_path / "mitoses_ground_truth/01/01.csv"
    path.rename(path.with_suffix(".CSV"))
    image = tmp_path / "mitoses_image_data_part_1/01/01.tif"
    image.rename(image.with_suffix(".TIFF"))
    assert checked(tmp_path).counts["train"] == {"images": 2, "cases": 1, "mitoses": 2}


def test_a_split_csv_is_held_against_what_is_there(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 2, 13])
    write_csv(tmp_path / "split.csv", [("case", "split"), ("1", "train"), ("01", "test"), ("7", "test"), ("13", "x")])
    dataset = open_data(tmp_path)
    assert sentences(dataset) == [
        "split.csv: line 3 lists '01' a second time.",
        "split.csv: line 5 has the split 'x'; choose from train, valid, test.",
        "split.csv: it lists 1 case (07) that the folder does not hold.",
    ]
    assert any("2 cases (02, 13) without a split: left out" in note for note in notes(dataset))
    assert {(p.case, p.split) for p in dataset.samples} == {("01", "train")}
    assert dataset.published == {}, "an own split is not beside published numbers"


def test_links_to_folders_are_followed(tmp_path: Path) -> None:
    amida13(tmp_path / "store", cases=[1])
    (tmp_path / "data/mitoses_image_data_part_1").mkdir(parents=True)
    (tmp_path / "data/mitoses_image_data_part_1/01").symlink_to(tmp_path / "store/mitoses_image_data_part_1/01")
    (tmp_path / "data/mitoses_ground_truth").symlink_to(tmp_path / "store/mitoses_ground_truth")
    assert checked(tmp_path / "data").counts["train"]["mitoses"] == 2


@pytest.mark.parametrize("folder", ["Tissue Images", "mitoses_image_data_part_1"])
def test_an_empty_layout_is_a_problem(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir()
    assert "there is not a single image that can be used." in sentences(checked(tmp_path))


def test_an_empty_split_is_noted(tmp_path: Path) -> None:
    found = checked(amida13(tmp_path, cases=[1, 13]))
    assert "no image is in the split 'valid'." in notes(found)
    assert sentences(found) == []


def test_hidden_files_of_a_mac_are_no_images(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    write_text(tmp_path / "mitoses_image_data_part_1/01/._01.tif", "Mac OS X")
    assert sentences(checked(tmp_path)) == []


# Kumar and MoNuSeg


def test_kumar_is_split_by_its_table(tmp_path: Path) -> None:
    found = checked(kumar(tmp_path, ["a", "b", "c"]))
    assert (found.dataset.annotated, found.dataset.objects) == ("objects", "nuclei")
    assert {split: (c["images"], c["cases"], c["nuclei"]) for split, c in found.counts.items()} == {
        "train": (1, 1, 2),
        "valid": (1, 1, 2),
        "test": (1, 1, 2),
    }
    assert sentences(found) == []
    assert found.dataset.samples[0].stratum == "breast"
    assert found.dataset.published == {}, "an own split is not beside published numbers"


def test_kumar_without_a_table_is_split_by_organ(tmp_path: Path) -> None:
    names = [f"TCGA-{code}-01Z-00-DX1" for codes in ORGANS.values() for code in codes]
    dataset = open_data(kumar(tmp_path, [*names, "TCGA-DK-A2I6-01A-01-TS1"], split_csv=False))
    for split, count in (("train", 3), ("valid", 1), ("test", 2)):
        assert sorted(p.stratum for p in dataset.split(split)) == sorted(list(ORGANS) * count)
    assert dataset.samples[0].case == dataset.samples[0].path.stem[:12]
    assert dataset.published == PUBLISHED
    assert {split: counts["nuclei"] for split, counts in PUBLISHED.items()} == {
        "train": 7337,
        "valid": 1474,
        "test": 4130,
    }
    assert any("1 image (TCGA-DK-A2I6-01A-01-TS1) without a split: left out" in note for note in notes(dataset))
    assert sentences(dataset) == []


def test_fewer_fields_than_published_need_a_table(tmp_path: Path) -> None:
    dataset = open_data(kumar(tmp_path, ["TCGA-A7-A13E-01Z-00-DX1"], split_csv=False))
    assert "'breast' has 1" in sentences(dataset)[0]
    assert "split.csv" in sentences(dataset)[0]


def test_label_maps_win_over_outlines_and_the_two_are_compared(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    labels = np.zeros((40, 40), np.uint16)
    labels[5:11, 8:14] = 7
    labels[20:26, 22:25] = 300  # half of the second nucleus
    labels[30:34, 0:4] = 9  # and one that has no outline
    write_image(tmp_path / "Label Maps/a.png", labels)
    found = checked(tmp_path)
    assert np.array_equal(read_objects(found.dataset.samples[0], 0.25).labels, labels)
    assert found.counts["train"]["nuclei"] == 3
    assert found.agreement == {"Tissue Images/a.tif": pytest.approx((36 + 18) / (36 + 36 + 16))}


def test_nuclei_at_another_spacing_keep_their_numbers(tmp_path: Path) -> None:
    sample = open_data(kumar(tmp_path, ["a", "b", "c"])).samples[0]
    labels = read_objects(sample, 0.5).labels
    expected = np.zeros((20, 20), int)
    expected[2:5, 4:7] = 1  # of rows 5 to 10 and columns 8 to 13, the odd ones
    expected[10:13, 11:14] = 2
    assert labels.shape == read_image(sample, 0.5).shape[:2]
    assert np.array_equal(labels, expected)


def test_two_images_of_one_name_are_told_apart_by_nobody(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    write_image(tmp_path / "Tissue Images/a.png", pixels(40, 40))
    assert sentences(checked(tmp_path)) == [
        "Tissue Images/a.tif: there is Tissue Images/a.png of the same name; this one is left out."
    ]


def test_organs_of_known_images_need_not_be_listed(tmp_path: Path) -> None:
    kumar(tmp_path, ["TCGA-B0-5698-01Z-00-DX1", "mine"], split_csv=False)
    write_csv(tmp_path / "split.csv", [("image", "split"), ("TCGA-B0-5698-01Z-00-DX1.tif", "train"), ("mine", "test")])
    assert [(p.stratum, p.split) for p in open_data(tmp_path).samples] == [("kidney", "train"), ("", "test")]


def test_a_mask_without_numbers_is_a_problem(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    mask = np.zeros((40, 40), np.uint8)
    mask[5:11, 8:14] = mask[20:26, 22:25] = 255
    write_image(tmp_path / "Label Maps/a.png", mask)
    assert sentences(checked(tmp_path)) == [
        "Label Maps/a.png: gives all of its 2 objects one number, so they count as one; number them."
    ]


def test_the_files_tell_the_spacing(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    write_text(tmp_path / "Annotations/a.xml", outline_xml(box(2, 2, 5), spacing=0.5))
    Image.fromarray(pixels(40, 40)).save(tmp_path / "Tissue Images/b.tif", dpi=(25_400, 25_400))
    assert [p.spacing_um_px for p in open_data(tmp_path).samples] == [0.5, pytest.approx(1.0), 0.25]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda root: truncate(root / "Annotations/a.xml"), "Annotations/a.xml: is cut off or no XML"),
        (
            lambda root: write_text(
                root / "Annotations/a.xml", '<!DOCTYPE x [<!ENTITY a "aa"><!ENTITY b "&a;&a;">]><x>&b;</x>'
            ),
            "Annotations/a.xml: holds XML entities",
        ),
        (lambda root: (root / "Annotations/a.xml").unlink(), "a.tif: there is neither a label map nor an XML"),
        (
            lambda root: (root / "Tissue Images/a.tif").unlink(),
            "split.csv: it lists 1 image (a) that the folder does not hold.",
        ),
        (lambda root: truncate(root / "Tissue Images/a.tif", 0.02), "Tissue Images/a.tif: is"),
        (
            lambda root: write_image(root / "Label Maps/a.png", np.zeros((40, 41), np.uint16)),
            "Label Maps/a.png: is a map of 40 × 41 px, but its image has 40 × 40 px.",
        ),
        (lambda root: write_image(root / "Label Maps/a.png", pixels(40, 40)), "Label Maps/a.png: is no label map"),
        (
            lambda root: write_text(root / "split.csv", "image,split\na,training\nb,test\n"),
            "split.csv: line 2 has the split 'training'; choose from train, valid, test.",
        ),
    ],
    ids=["cut off", "entities", "no annotation", "no image", "truncated", "other size", "colours", "split"],
)
def test_bad_fields_of_nuclei(tmp_path: Path, damage: object, sentence: str) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    assert callable(damage)
    damage(tmp_path)
    assert any(sentence in found for found in sentences(checked(tmp_path))), sentences(checked(tmp_path))


def test_outlines_that_cannot_be_painted_are_noted_and_the_others_count(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    bow_tie = [(2, 2), (12, 12), (12, 2), (2, 12)]
    line, outside = [(1, 1), (5, 5), (9, 9)], box(100, 100, 4)
    text = outline_xml(box(20, 20, 8), box(24, 24, 8), bow_tie, line, outside, box(30, 37, 8), box(21, 21, 2))
    write_text(tmp_path / "Annotations/a.xml", text)
    found = checked(tmp_path)
    assert sentences(found) == []
    assert notes(found) == [
        "Annotations/a.xml: region 4 is a line or a point, without an area.",
        "Annotations/a.xml: region 5 covers no pixel of the image.",
        "Annotations/a.xml: region 7 is hidden: others cover all of its pixels.",
    ]
    assert found.counts["train"]["nuclei"] == 4
    labels = read_objects(found.dataset.samples[0], 0.25).labels
    assert (labels == 1).sum() == 64, "the first one keeps its pixels"
    assert (labels == 2).sum() == 64 - 16
    assert (labels == 4).sum() == 3 * 8, "cut off at the border"


def test_one_patient_in_two_splits_is_a_leak(tmp_path: Path) -> None:
    """Seen as soon as the data is opened, not only when all of it is checked."""
    names = ["TCGA-A7-A13E-01Z-00-DX1", "TCGA-A7-A13E-01Z-00-DX2", "TCGA-A7-A13F-01Z-00-DX1"]
    found = sentences(open_data(kumar(tmp_path, names)))
    assert found == ["patient TCGA-A7-A13E is in train and valid; each must be in one split only."]


def monuseg_test(root: Path, names: tuple[str, ...] = ("TCGA-B0-5698-01Z-00-DX1", "TCGA-2Z-A9J9-01A-01-TS1")) -> Path:
    """Images and XML files of the same names in one folder."""
    for i, name in enumerate(names):
        write_image(root / f"{name}.tif", pixels(40, 40, i))
        write_text(root / f"{name}.xml", outline_xml(box(5, 8, 6), box(20, 22, 6)))
    return root


def test_the_flat_folder_of_monusegs_test_set_is_for_testing(tmp_path: Path) -> None:
    found = checked(monuseg_test(tmp_path))
    assert (found.dataset.annotated, found.dataset.objects) == ("objects", "nuclei")
    assert found.counts["test"] == {"images": 2, "cases": 2, "nuclei": 4}
    assert [(p.name, p.case, p.split, p.stratum) for p in found.dataset.samples] == [
        ("TCGA-2Z-A9J9-01A-01-TS1.tif", "TCGA-2Z-A9J9", "test", ""),
        ("TCGA-B0-5698-01Z-00-DX1.tif", "TCGA-B0-5698", "test", "kidney"),
    ]
    assert np.unique(read_objects(found.dataset.samples[0], 0.25).labels).tolist() == [0, 1, 2]
    assert sentences(found) == []
    assert notes(found)[0] == (
        "images and XML files are in one folder, as in MoNuSeg's test set: all are in the split 'test'."
    )
    assert found.dataset.published == {}, "its counts are not those of the paper"


def test_a_flat_folder_may_be_one_level_down_and_have_a_table(tmp_path: Path) -> None:
    root = monuseg_test(tmp_path / "MoNuSegTestData", ("a", "b", "c"))
    assert {p.split for p in open_data(tmp_path).samples} == {"test"}
    write_csv(root / "split.csv", [("image", "split", "organ"), ("a", "train", "colon"), ("b.tif", "valid", "bladder")])
    dataset = open_data(tmp_path)
    assert [(p.path.stem, p.split, p.stratum) for p in dataset.samples] == [
        ("a", "train", "colon"),
        ("b", "valid", "bladder"),
    ]
    assert dataset.published == {}
    assert "1 image (c) without a split: left out" in notes(dataset)[0]


def test_in_a_flat_folder_too_every_image_needs_its_nuclei(tmp_path: Path) -> None:
    monuseg_test(tmp_path, ("a", "b", "c"))
    (tmp_path / "a.xml").unlink()
    (tmp_path / "b.tif").unlink()
    assert sentences(open_data(tmp_path)) == [
        "a.tif: there is neither a label map nor an XML of its nuclei; it is left out.",
        "b.xml: there is no image of this name.",
    ]


# PCam


def test_pcam_is_read_a_patch_at_a_time(tmp_path: Path) -> None:
    found = checked(pcam(tmp_path))
    assert found.dataset.annotated == "labels"
    assert found.dataset.classes == ("normal", "tumor")
    assert {s: (c["images"], c["normal"], c["tumor"]) for s, c in found.counts.items()} == {
        "train": (8, 4, 4),
        "valid": (4, 2, 2),
        "test": (4, 2, 2),
    }
    assert sentences(found) == []
    assert "no leak between splits can be seen" in notes(found)[0]
    import h5py

    with h5py.File(tmp_path / pcam_name("valid", "x")) as file:
        expected = file["x"][3]
    sample = found.dataset.split("valid")[3]
    assert np.array_equal(read_image(sample, 1.0), expected), "0.972 µm/px is near enough to 1"
    assert sample.label == "tumor"


def test_each_process_opens_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 handles do not survive a fork; nor may a file that was written anew be read through an old one."""
    path = pcam(tmp_path) / pcam_name("train", "x")
    first = hdf5._dataset(path, "x")
    assert hdf5._dataset(path, "x") is first
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert hdf5._dataset(path, "x") is not first
    monkeypatch.undo()
    path.unlink()
    write_hdf5(path, "x", np.full((2, 96, 96, 3), 7, np.uint8))
    os.utime(path, ns=(1, 1))
    assert hdf5.read_rows(path, "x", 0, 2).mean() == 7


def test_rows_are_read_in_runs_that_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = open_data(pcam(tmp_path, counts=(8, 4, 4))).samples
    monkeypatch.setattr("rotopath.data.dataset.ROWS_AT_ONCE", 3)
    found = runs(samples)
    assert [p for run in found for p in run] == list(samples)
    assert max(map(len, found)) == 3
    picked = runs([samples[i] for i in (0, 2, 3, 9)])
    assert [[p.row for p in run] for run in picked] == [[0], [2, 3], [1]]
    for run in picked:
        for sample, image in zip(run, read_run(run), strict=True):
            assert np.array_equal(image, read_image(sample, 1.0))


def test_slides_that_are_half_known_are_noted(tmp_path: Path) -> None:
    pcam(tmp_path)
    write_csv(tmp_path / "camelyonpatch_level_2_split_train_meta.csv", [("", "wsi"), *((i, "s") for i in range(8))])
    assert "without all *_meta.csv files" in notes(open_data(tmp_path))[0]


def test_pcam_slides_are_checked_for_leaks(tmp_path: Path) -> None:
    pcam(tmp_path)
    for split, count in (("train", 8), ("valid", 4), ("test", 4)):
        rows = [(i, 0, 0, True, True, f"slide_{'0' if split == 'test' else split}") for i in range(count)]
        rows[0] = (*rows[0][:5], "slide_0")
        header = ("", "coord_y", "coord_x", "tumor_patch", "center_tumor_patch", "wsi")
        write_csv(tmp_path / f"camelyonpatch_level_2_split_{split}_meta.csv", [header, *rows])
    found = checked(tmp_path)
    assert sentences(found) == ["patient slide_0 is in train and valid and test; each must be in one split only."]
    assert [found.counts[s]["cases"] for s in ("train", "valid", "test")] == [2, 2, 1]


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "images", np.zeros((4, 96, 96, 3), np.uint8)),
            f"{pcam_name('valid', 'x')}: has no data set 'x'; it holds 'images'.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.zeros((3, 1, 1, 1), np.uint8)),
            f"{pcam_name('valid', 'x')}: has 4 patches, but {pcam_name('valid', 'y')} labels of shape (3, 1, 1, 1).",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "x", np.zeros((4, 3, 96, 96), np.uint8)),
            f"{pcam_name('valid', 'x')}: holds an array of shape (4, 3, 96, 96); (n, 96, 96, 3) is expected.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "x"), "x", np.zeros((4, 96, 96, 3), np.float32)),
            f"{pcam_name('valid', 'x')}: holds float32 under 'x', where bytes (uint8) are expected.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.full((4, 1, 1, 1), 2, np.uint8)),
            f"{pcam_name('valid', 'y')}: has the label 2 at row 0; 0 (normal) or 1 (tumor) is expected.",
        ),
        (
            lambda root: write_hdf5(root / pcam_name("valid", "y"), "y", np.uint8(1)),
            f"{pcam_name('valid', 'x')}: has 4 patches, but {pcam_name('valid', 'y')} labels of shape ().",
        ),
        (
            lambda root: truncate(root / pcam_name("valid", "x")),
            f"{pcam_name('valid', 'x')}: is no HDF5 file, or a damaged one",
        ),
        (lambda root: (root / pcam_name("valid", "y")).unlink(), f"{pcam_name('valid', 'y')}: does not exist."),
        (
            lambda root: (root / pcam_name("valid", "x")).rename(root / f"{pcam_name('valid', 'x')}.gz"),
            f"{pcam_name('valid', 'x')}.gz: is still packed; unpack it with `gunzip",
        ),
        (
            lambda root: write_csv(root / "camelyonpatch_level_2_split_valid_meta.csv", [("", "wsi"), (0, "a")]),
            "camelyonpatch_level_2_split_valid_meta.csv: has 1 rows, but there are 4 patches.",
        ),
    ],
    ids=["keys", "lengths", "shape", "floats", "labels", "scalar", "truncated", "missing", "packed", "meta"],
)
def test_bad_hdf5(tmp_path: Path, damage: object, sentence: str) -> None:
    pcam(tmp_path)
    assert callable(damage)
    damage(tmp_path)
    found = checked(tmp_path)
    assert len(sentences(found)) == 1
    assert sentences(found)[0].startswith(sentence)
    assert found.counts["train"]["images"] == 8, "the good splits are counted"
    with pytest.raises(DataError, match="has no images in the split 'valid'"):
        found.dataset.split("valid")


def test_a_damaged_chunk_is_found_and_named(tmp_path: Path) -> None:
    pcam(tmp_path)
    path = tmp_path / pcam_name("train", "x")
    content = bytearray(path.read_bytes())
    content[-3000:-2000] = bytes(1000)
    path.write_bytes(content)
    (found,) = sentences(checked(tmp_path))
    assert "is damaged at rows 0 to 7 of 'x'" in found


def kaggle(root: Path, count: int = 20) -> Path:
    for i in range(count):
        write_image(root / "train" / f"{i:04x}.tif", pixels(96, 96, i))
    write_csv(root / "train_labels.csv", [("id", "label"), *((f"{i:04x}", i % 2) for i in range(count))])
    return root


def test_kaggles_form_is_split_within_each_class(tmp_path: Path) -> None:
    found = checked(kaggle(tmp_path))
    assert {s: (c["normal"], c["tumor"]) for s, c in found.counts.items()} == {
        "train": (8, 8),
        "valid": (1, 1),
        "test": (1, 1),
    }
    assert any("patches of one slide may be in two splits" in note for note in notes(found))
    write_csv(tmp_path / "split.csv", [("id", "split"), ("0003", "test"), ("0001", "train"), ("beef", "test")])
    dataset = open_data(tmp_path)
    assert [(p.path.stem, p.split, p.label) for p in dataset.samples] == [
        ("0001", "train", "tumor"),
        ("0003", "test", "tumor"),
    ]
    assert sentences(dataset) == ["split.csv: it lists 1 id (beef) that the folder does not hold."]
    assert any("18 ids (0000, 0002, 0004, 0005, 0006, ...) without a split" in note for note in notes(dataset))


def test_bad_labels_in_kaggles_form(tmp_path: Path) -> None:
    kaggle(tmp_path, count=4)
    write_text(tmp_path / "train_labels.csv", "id,label\n0000,1\n0001,yes\n0002,0\n0002,1\nffff,0\n")
    dataset = open_data(tmp_path)
    assert sentences(dataset) == [
        "train_labels.csv: line 3 has the label 'yes'; 0 (normal) or 1 (tumor) is expected.",
        "train_labels.csv: line 5 lists '0002' a second time.",
        "train_labels.csv: there is no image in train for 1 label (ffff).",
    ]
    assert any("no label for 2 images (0001, 0003)" in note for note in notes(dataset))
    write_text(tmp_path / "train_labels.csv", "name,label\n0000,1\n")
    with pytest.raises(UnreadableFileError, match="has no column 'id'; its first line must name id and label"):
        open_data(tmp_path)


# Opening


def test_the_folder_of_an_archive_may_be_one_level_down(tmp_path: Path) -> None:
    pcam(tmp_path / "download" / "pcam")
    assert open_data(tmp_path / "download").root == tmp_path / "download" / "pcam"


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda root: root / "nowhere", "nowhere does not exist."),
        (lambda root: root, "is empty; expected are the unpacked folders of AMIDA13"),
        (lambda root: write_text(root / "notes.txt", "x").parent, "is no data set that is known here; expected are"),
        (lambda root: write_text(root / "notes.txt", "x"), "notes.txt is a file, but no CSV manifest"),
        (lambda root: (pcam(root / "a"), kaggle(root / "b"), root)[-1], "holds more than one data set"),
    ],
    ids=["missing", "empty", "unknown", "file", "two"],
)
def test_what_is_no_data_set_is_refused(tmp_path: Path, make: object, sentence: str) -> None:
    assert callable(make)
    path = make(tmp_path)
    with pytest.raises(DataError, match=sentence.replace("(", r"\(")):
        open_data(path)


def test_a_manifest_goes_before_the_folder_that_it_lies_in(tmp_path: Path) -> None:
    pcam(tmp_path)
    write_image(tmp_path / "a.png", pixels(9, 9))
    write_csv(tmp_path / "manifest.csv", [("image", "label", "spacing"), ("a.png", 1, 1)])
    assert open_data(str(tmp_path)).source == "manifest"


def test_annotations_of_another_kind_are_refused(tmp_path: Path) -> None:
    pcam(tmp_path)
    assert open_data(tmp_path, "labels").annotated == "labels"
    with pytest.raises(DataError) as caught:
        open_data(tmp_path, "objects")
    assert str(caught.value) == (
        f"{tmp_path} (PCam) holds images with a class each, where outlines of objects are needed; choose other data, "
        f"or another task."
    )
