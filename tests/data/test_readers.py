"""The readers of the benchmarks: what is found in good folders, and what is said of bad ones."""

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

from rotopath.data.annotations import read_nuclei, read_points
from rotopath.data.aperio import AnnotationError
from rotopath.data.check import Check, check
from rotopath.data.collection import Collection, DataError, problems, read_image
from rotopath.data.kumar import ORGANS
from rotopath.data.opening import open_data
from rotopath.images.files import UnreadableFileError, read_rgb


def sentences(found: Check | Collection) -> list[str]:
    return [str(finding) for finding in problems(found.findings)]


def notes(found: Check | Collection) -> list[str]:
    return [str(finding) for finding in found.findings if not finding.is_problem]


def checked(path: Path) -> Check:
    return check(open_data(path))


# AMIDA13


def test_amida13_is_split_as_published(tmp_path: Path) -> None:
    found = checked(amida13(tmp_path))
    assert found.collection.task == "mitosis"
    assert {split: (c["images"], c["cases"], c["mitoses"]) for split, c in found.counts.items()} == {
        "train": (16, 8, 16),
        "valid": (8, 4, 8),
        "test": (22, 11, 22),
    }
    assert {p.case for p in found.collection.split("valid")} == {"03", "05", "07", "10"}
    assert sentences(found) == []


def test_a_field_without_csv_has_no_mitoses(tmp_path: Path) -> None:
    collection = open_data(amida13(tmp_path, cases=[1]))
    first, second = collection.pictures
    assert read_points(first, 0.25).tolist() == [[10, 20], [30, 40]]
    assert read_points(second, 0.25).shape == (0, 2)
    assert "no CSV, so no mitoses, in 1 field (mitoses_image_data_part_1/01/02.tif)." in notes(collection)[0]


def test_points_move_with_the_image_to_another_spacing(tmp_path: Path) -> None:
    """At half the resolution, two pixels become one, and a point between them lies at its centre."""
    (picture, _) = open_data(amida13(tmp_path, cases=[1])).pictures
    assert read_image(picture, 0.5).shape == (30, 40, 3)
    assert read_points(picture, 0.5).tolist() == [[4.75, 9.75], [14.75, 19.75]]
    assert np.array_equal(read_image(picture, 0.252), read_rgb(picture.path)), "nearly the same spacing"


def test_tupac16_cases_beyond_amida13_are_left_out_unless_a_split_csv_lists_them(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1, 30])
    collection = open_data(tmp_path)
    assert {p.case for p in collection.pictures} == {"01"}
    assert any("1 case (30) without a split: left out" in note for note in notes(collection))
    assert sentences(collection) == []
    write_csv(tmp_path / "split.csv", [("case", "split"), ("1", "test"), ("30", "train")])
    assert {(p.case, p.split) for p in open_data(tmp_path).pictures} == {("01", "test"), ("30", "train")}


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
        read_points(found.collection.pictures[0], 0.25)


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
    write_image(tmp_path / "mitoses_image_data_part_2/extra/01.tif", pixels(20, 20))
    found = sentences(checked(tmp_path))
    assert [sentence.partition(":")[0] for sentence in sorted(found)] == [
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/02/01.csv",
        "mitoses_ground_truth/03/77.csv",
        "mitoses_image_data_part_1/01/01.tif",
        "mitoses_image_data_part_2/03/01.tif",
        "mitoses_image_data_part_2/extra/01.tif",
    ]
    assert any("01/01.tif: is damaged and cannot be decoded" in sentence for sentence in found)


def test_hidden_files_of_a_mac_are_no_images(tmp_path: Path) -> None:
    amida13(tmp_path, cases=[1])
    write_text(tmp_path / "mitoses_image_data_part_1/01/._01.tif", "Mac OS X")
    assert sentences(checked(tmp_path)) == []


# Kumar and MoNuSeg


def test_kumar_is_split_by_its_table(tmp_path: Path) -> None:
    found = checked(kumar(tmp_path, ["a", "b", "c"]))
    assert found.collection.task == "nuclei"
    assert {split: (c["images"], c["cases"], c["nuclei"]) for split, c in found.counts.items()} == {
        "train": (1, 1, 2),
        "valid": (1, 1, 2),
        "test": (1, 1, 2),
    }
    assert sentences(found) == []
    assert found.collection.pictures[0].stratum == "breast"


def test_kumar_without_a_table_is_split_by_organ(tmp_path: Path) -> None:
    names = [f"TCGA-{code}-01Z-00-DX1" for codes in ORGANS.values() for code in codes]
    collection = open_data(kumar(tmp_path, [*names, "TCGA-DK-A2I6-01A-01-TS1"], split_csv=False))
    for split, count in (("train", 3), ("valid", 1), ("test", 2)):
        assert sorted(p.stratum for p in collection.split(split)) == sorted(list(ORGANS) * count)
    assert collection.pictures[0].case == collection.pictures[0].path.stem[:12]
    assert any("1 image (TCGA-DK-A2I6-01A-01-TS1) without a split: left out" in note for note in notes(collection))
    assert sentences(collection) == []


def test_fewer_fields_than_published_need_a_table(tmp_path: Path) -> None:
    collection = open_data(kumar(tmp_path, ["TCGA-A7-A13E-01Z-00-DX1"], split_csv=False))
    assert "'breast' has 1" in sentences(collection)[0]
    assert "split.csv" in sentences(collection)[0]


def test_label_maps_win_over_outlines_and_the_two_are_compared(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    labels = np.zeros((40, 40), np.uint16)
    labels[5:11, 8:14] = 7
    labels[20:26, 22:25] = 300  # half of the second nucleus
    labels[30:34, 0:4] = 9  # and one that has no outline
    write_image(tmp_path / "Label Maps/a.png", labels)
    found = checked(tmp_path)
    assert np.array_equal(read_nuclei(found.collection.pictures[0], 0.25), labels)
    assert found.counts["train"]["nuclei"] == 3
    assert found.agreement == {"Tissue Images/a.tif": pytest.approx((36 + 18) / (36 + 36 + 16))}


def test_nuclei_at_another_spacing_keep_their_numbers(tmp_path: Path) -> None:
    picture = open_data(kumar(tmp_path, ["a", "b", "c"])).pictures[0]
    labels = read_nuclei(picture, 0.5)
    expected = np.zeros((20, 20), int)
    expected[2:5, 4:7] = 1  # of rows 5 to 10 and columns 8 to 13, the odd ones
    expected[10:13, 11:14] = 2
    assert labels.shape == read_image(picture, 0.5).shape[:2]
    assert np.array_equal(labels, expected)


def test_the_files_tell_the_spacing(tmp_path: Path) -> None:
    kumar(tmp_path, ["a", "b", "c"])
    write_text(tmp_path / "Annotations/a.xml", outline_xml(box(2, 2, 5), spacing=0.5))
    Image.fromarray(pixels(40, 40)).save(tmp_path / "Tissue Images/b.tif", dpi=(25_400, 25_400))
    assert [p.spacing_um_px for p in open_data(tmp_path).pictures] == [0.5, pytest.approx(1.0), 0.25]


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
        (lambda root: (root / "Tissue Images/a.tif").unlink(), "split.csv: it lists 'a', but there is no such image."),
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
    labels = read_nuclei(found.collection.pictures[0], 0.25)
    assert (labels == 1).sum() == 64, "the first one keeps its pixels"
    assert (labels == 2).sum() == 64 - 16
    assert (labels == 4).sum() == 3 * 8, "cut off at the border"


def test_one_patient_in_two_splits_is_a_leak(tmp_path: Path) -> None:
    names = ["TCGA-A7-A13E-01Z-00-DX1", "TCGA-A7-A13E-01Z-00-DX2", "TCGA-A7-A13F-01Z-00-DX1"]
    found = sentences(checked(kumar(tmp_path, names)))
    assert found == ["patient TCGA-A7-A13E is in train and valid; each must be in one split only."]


# PCam


def test_pcam_is_read_a_patch_at_a_time(tmp_path: Path) -> None:
    found = checked(pcam(tmp_path))
    assert found.collection.task == "tumor"
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
    picture = found.collection.split("valid")[3]
    assert np.array_equal(read_image(picture, 1.0), expected), "0.972 µm/px is near enough to 1"
    assert picture.label == 1


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
    ids=["keys", "lengths", "shape", "floats", "labels", "truncated", "missing", "packed", "meta"],
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
        found.collection.split("valid")


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
        write_image(root / "train" / f"{i:04x}.tif", pixels(96, 96))
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
    write_csv(tmp_path / "split.csv", [("id", "split"), ("0003", "test"), ("0001", "train")])
    assert [(p.path.stem, p.split, p.label) for p in open_data(tmp_path).pictures] == [
        ("0001", "train", 1),
        ("0003", "test", 1),
    ]


def test_bad_labels_in_kaggles_form(tmp_path: Path) -> None:
    kaggle(tmp_path, count=4)
    write_text(tmp_path / "train_labels.csv", "id,label\n0000,1\n0001,yes\n0002,0\n0002,1\nffff,0\n")
    collection = open_data(tmp_path)
    assert sentences(collection) == [
        "train_labels.csv: line 3 has the label 'yes'; 0 (normal) or 1 (tumor) is expected.",
        "train_labels.csv: line 5 lists '0002' a second time.",
        "train_labels.csv: line 6 has 'ffff', but there is no train/ffff.tif.",
    ]
    assert any("no label for 2 images (0001, 0003)" in note for note in notes(collection))
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
        (lambda root: root, "is empty; expected are the folders of AMIDA13"),
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


def test_a_folder_of_another_task_is_refused(tmp_path: Path) -> None:
    pcam(tmp_path)
    assert open_data(tmp_path, "tumor").task == "tumor"
    with pytest.raises(DataError, match="holds PCam data for the task tumor, but nuclei is asked for"):
        open_data(tmp_path, "nuclei")
