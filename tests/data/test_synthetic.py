"""The synthetic sets: the layouts of the benchmarks, the truth that fits the pixels, and the same bytes for a seed."""

import csv
import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray
from sharing import make_once

from rotopath.data.annotations import paint_labels, read_outlines, read_spacing_um_px
from rotopath.data.formats import open_data
from rotopath.data.splits import amida13_split
from rotopath.images.files import read_labels, read_rgb, spacing_um_px
from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor
from rotopath.synthetic.lymph_nodes import collect_patches, cut_slide, render_slide
from rotopath.synthetic.mitoses import SMUDGED, TUMOR, label_objects
from rotopath.synthetic.mitoses import render_field as render_mitosis
from rotopath.synthetic.nuclei import LYMPHOCYTE, NEEDLE, Nuclei, NucleusType, draw_nuclei, join
from rotopath.synthetic.organs import EPITHELIAL, annotate
from rotopath.synthetic.organs import render_field as render_organ
from rotopath.synthetic.painting import draw_directions, keep_away, smooth_noise, thin_out

SMALL_PX = 192
FEW_PATCHES = {"train": 24, "valid": 12, "test": 13}

MAKERS: dict[str, Callable[[Path, int], None]] = {
    "mitosis": lambda out, seed: make_mitosis(out, seed, fields_per_case=2, size_px=SMALL_PX),
    "nuclei": lambda out, seed: make_nuclei(out, seed, size_px=SMALL_PX),
    "tumor": lambda out, seed: make_tumor(out, seed, patches=FEW_PATCHES),
}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three sets, small, from seed 0."""

    def make_all(folder: Path) -> None:
        for task, make in MAKERS.items():
            make(folder / task, 0)

    return make_once(tmp_path_factory, "synthetic", make_all)


def digests(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def read_rows(path: Path, columns: list[str]) -> list[dict[str, str]]:
    """The rows of a CSV that has exactly these columns."""
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert reader.fieldnames == columns, path
    return rows


def draw_one(kind: NucleusType, centre: complex) -> Nuclei:
    return draw_nuclei(np.random.default_rng(0), kind, np.array([centre], np.complex64), 0.25)


@pytest.mark.parametrize("task", MAKERS)
def test_a_seed_gives_the_same_bytes_and_another_seed_others(task: str, made: Path, tmp_path: Path) -> None:
    MAKERS[task](tmp_path / "again", 0)
    MAKERS[task](tmp_path / "other", 1)
    first, again, other = digests(made / task), digests(tmp_path / "again"), digests(tmp_path / "other")
    assert first == again
    for name in first.keys() & other.keys():
        if Path(name).suffix in (".tif", ".xml", ".h5") and not name.endswith("_y.h5"):
            assert first[name] != other[name], name


def test_an_image_does_not_depend_on_how_many_are_made(made: Path) -> None:
    image, _ = render_mitosis(0, 17, 2, SMALL_PX)
    np.testing.assert_array_equal(image, read_rgb(made / "mitosis/mitoses_image_data_part_2/17/02.tif"))
    few = {patch.image.tobytes() for patch in collect_patches(0, 1, 6)}
    assert few <= {patch.image.tobytes() for patch in collect_patches(0, 1, 30)}


@pytest.mark.parametrize("task", MAKERS)
def test_a_folder_with_something_in_it_is_refused_and_left_alone(task: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("three years")
    with pytest.raises(FileExistsError, match=r"mine exists already and is not an empty folder; choose another place"):
        MAKERS[task](tmp_path / "mine", 0)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


def test_nothing_is_left_behind_when_making_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("rotopath.synthetic.mitoses.write_tiff", fail)
    with pytest.raises(OSError, match="the disk is full"):
        make_mitosis(tmp_path / "out", size_px=64)
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make_tumor(tmp_path / "out", patches={"valid": 2})
    with h5py.File(tmp_path / "out/camelyonpatch_level_2_split_train_x.h5") as file:
        assert file["x"].shape == (0, 96, 96, 3)
    with h5py.File(tmp_path / "out/camelyonpatch_level_2_split_valid_x.h5") as file:
        assert file["x"].shape == (2, 96, 96, 3)


def test_mitosis_has_the_layout_of_amida13(made: Path) -> None:
    root = made / "mitosis"
    for part, cases in (("mitoses_image_data_part_1", range(1, 13)), ("mitoses_image_data_part_2", range(13, 24))):
        expected = [f"{case:02d}/{field:02d}.tif" for case in cases for field in (1, 2)]
        assert sorted(str(p.relative_to(root / part)) for p in (root / part).rglob("*.tif")) == expected
    fields = {p.relative_to(p.parents[1]).with_suffix("") for p in root.rglob("*.tif")}
    tables = {p.relative_to(p.parents[1]).with_suffix("") for p in (root / "mitoses_ground_truth").rglob("*.csv")}
    assert tables
    assert tables < fields  # and some fields hold no mitosis
    assert {path.name for path in root.iterdir()} == {
        *("mitoses_image_data_part_1", "mitoses_image_data_part_2", "mitoses_ground_truth", "SYNTHETIC.txt"),
        *("look_alikes", "manifest-classes.csv"),
    }


def test_mitoses_lie_on_dark_pixels_inside_their_field(made: Path) -> None:
    root = made / "mitosis"
    for table in (root / "mitoses_ground_truth").rglob("*.csv"):
        image = read_rgb(next(root.glob(f"*/{table.parent.name}/{table.stem}.tif"))).mean(axis=2)
        for line in table.read_text().splitlines():
            row, column = (int(number) for number in line.split(","))
            assert 0 <= row < SMALL_PX
            assert 0 <= column < SMALL_PX
            near = image[max(row - 20, 0) : row + 21, max(column - 20, 0) : column + 21]
            assert (near < np.median(image) - 40).sum() > 30, table


def test_cases_differ_in_their_mitoses() -> None:
    counts = [
        sum(found.cell == "mitosis" for field in (1, 2) for found in render_mitosis(0, case, field, 512)[1])
        for case in (4, 10)
    ]
    assert counts[0] > 5
    assert counts[1] == 0


def test_tables_of_look_alikes_hold_every_mitosis_and_the_other_classes(made: Path) -> None:
    root = made / "mitosis"
    found: dict[str, int] = defaultdict(int)
    empty = 0
    for case in range(1, 24):
        for field in ("01", "02"):
            rows = read_rows(root / f"look_alikes/{case:02d}/{field}.csv", ["row", "column", "class"])
            assert all(0 <= int(row[name]) < SMALL_PX for row in rows for name in ("row", "column"))
            mitoses = root / f"mitoses_ground_truth/{case:02d}/{field}.csv"
            expected = mitoses.read_text().splitlines() if mitoses.exists() else []
            assert [f"{row['row']},{row['column']}" for row in rows if row["class"] == "mitosis"] == expected
            for row in rows:
                found[row["class"]] += 1
            empty += not rows
    assert set(found) == {"mitosis", "apoptotic", "smudged", "lymphocyte"}
    assert min(found.values()) > 5
    assert empty  # such a field has a table with only a header
    assert len(list((root / "look_alikes").rglob("*.*"))) == 46


@pytest.mark.parametrize("case", [7, 12, 19])
def test_look_alikes_are_of_their_class(case: int) -> None:
    """Smudged nuclei are darker than lymphocytes, dying cells are in pink cytoplasm, and all lymphocytes are dark."""
    image, objects = render_mitosis(0, case, 1, 512)
    darkness, pinkness = defaultdict(list), defaultdict(list)
    for row, column, cell in objects:
        near, around = (
            image[max(row - reach, 0) : row + reach + 1, max(column - reach, 0) : column + reach + 1].astype(float)
            for reach in (4, 16)
        )
        darkness[cell].append(np.median(image.mean(axis=2)) - near.mean())
        pinkness[cell].append((around[..., 0] - around[..., 2]).mean())
    assert len(darkness["lymphocyte"]) > 20
    assert min(darkness["lymphocyte"]) > 15
    assert np.mean(darkness["smudged"]) > np.mean(darkness["lymphocyte"]) + 10
    assert np.mean(pinkness["apoptotic"]) > np.mean(pinkness["smudged"]) + 4
    assert np.mean(pinkness["apoptotic"]) > np.mean(pinkness["lymphocyte"]) + 4


def test_look_alikes_that_are_hidden_or_outside_are_not_labelled() -> None:
    mitosis, dying = np.array([20 + 20j], np.complex64), np.array([80 + 20j], np.complex64)
    nuclei = join(
        [
            draw_one(TUMOR, 20 + 80j),
            draw_one(LYMPHOCYTE, 60 + 50j),
            draw_one(LYMPHOCYTE, 21 + 80j),  # behind the nucleus of the tumor
            draw_one(LYMPHOCYTE, 63 + 50j),  # behind the other lymphocyte
            draw_one(LYMPHOCYTE, 20 + 25j),  # behind the mitosis
            draw_one(LYMPHOCYTE, 80 + 100j),  # below the last row
            draw_one(SMUDGED, 78.4 + 80.6j),
        ]
    )
    assert label_objects(mitosis, dying, nuclei, 100) == [
        (20, 20, "mitosis"),
        (20, 80, "apoptotic"),
        (50, 60, "lymphocyte"),
        (81, 78, "smudged"),
    ]


def test_the_manifest_of_look_alikes_lists_every_field(made: Path) -> None:
    root = made / "mitosis"
    rows = read_rows(root / "manifest-classes.csv", ["image", "annotation", "group", "split", "spacing"])
    images = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.tif"))
    assert [row["image"] for row in rows] == images
    for row in rows:
        case, field = row["image"].split("/")[1:]
        assert row["annotation"] == f"look_alikes/{case}/{Path(field).stem}.csv"
        assert (root / row["annotation"]).is_file()
        assert (row["group"], row["split"], row["spacing"]) == (case, amida13_split(int(case)), "0.25")


def test_nuclei_have_the_layout_of_kumar(made: Path) -> None:
    root = made / "nuclei"
    rows = read_rows(root / "split.csv", ["image", "organ", "split"])
    names = {row["image"] for row in rows}
    assert len(names) == len(rows) == 24
    for folder, suffixes in (("Tissue Images", [".tif"]), ("Annotations", [".xml"]), ("Label Maps", [".png", ".csv"])):
        assert {path.name for path in (root / folder).iterdir()} == {name + end for name in names for end in suffixes}
    assert {path.name for path in root.iterdir()} == {
        *("Tissue Images", "Annotations", "Label Maps", "split.csv", "SYNTHETIC.txt", "manifest-classes.csv"),
    }
    for organ in ("breast", "kidney", "liver", "prostate"):
        splits = [row["split"] for row in rows if row["organ"] == organ]
        assert sorted(splits) == ["test", "test", "train", "train", "train", "valid"]


def test_outlines_paint_the_label_map_without_problems(made: Path) -> None:
    for xml in sorted((made / "nuclei/Annotations").iterdir()):
        outlines = read_outlines(xml)
        labels, problems = paint_labels(outlines, SMALL_PX, SMALL_PX)
        assert problems == []
        np.testing.assert_array_equal(labels, read_labels(made / "nuclei/Label Maps" / f"{xml.stem}.png"))
        assert labels.max() == len(outlines) >= 1
        assert read_spacing_um_px(xml) == 0.25


def test_label_maps_are_darker_inside_than_outside(made: Path) -> None:
    for png in sorted((made / "nuclei/Label Maps").glob("*.png")):
        inside = read_labels(png) > 0
        red = read_rgb(made / "nuclei/Tissue Images" / f"{png.stem}.tif")[..., 0]
        assert red[inside].mean() < red[~inside].mean() - 12, png.stem


def test_some_nuclei_touch(made: Path) -> None:
    def touching(labels: NDArray[np.int32]) -> int:
        pairs = np.concatenate([np.stack([labels[1:], labels[:-1]]).reshape(2, -1),
                                np.stack([labels[:, 1:], labels[:, :-1]]).reshape(2, -1)], axis=1)  # fmt: skip
        return int(((pairs[0] != pairs[1]) & (pairs > 0).all(axis=0)).sum())

    assert sum(touching(read_labels(png)) > 0 for png in (made / "nuclei/Label Maps").glob("*.png")) > 12


def test_every_object_of_a_label_map_has_a_class(made: Path) -> None:
    found: dict[str, int] = defaultdict(int)
    for png in sorted((made / "nuclei/Label Maps").glob("*.png")):
        labels = read_labels(png)
        rows = read_rows(png.with_suffix(".csv"), ["object", "class"])
        assert [int(row["object"]) for row in rows] == np.unique(labels[labels > 0]).tolist()
        for row in rows:
            found[row["class"]] += 1
    assert set(found) == {"epithelial", "lymphocyte", "fibroblast"}
    assert found["epithelial"] > found["fibroblast"] > found["lymphocyte"] > 10


def test_lymphocytes_are_darker_and_smaller_than_epithelial_nuclei_and_fibroblasts_are_longer(made: Path) -> None:
    compared = 0
    length = defaultdict(list)
    for table in sorted((made / "nuclei/Label Maps").glob("*.csv")):
        labels = read_labels(table.with_suffix(".png"))
        red = read_rgb(made / "nuclei/Tissue Images" / f"{table.stem}.tif")[..., 0]
        brightness, area = defaultdict(list), defaultdict(list)
        for row in read_rows(table, ["object", "class"]):
            mask = labels == int(row["object"])
            brightness[row["class"]].append(red[mask].mean())
            area[row["class"]].append(mask.sum())
            spread = np.linalg.eigvalsh(np.cov(np.nonzero(mask)))
            length[row["class"]].append(np.sqrt(spread[1] / spread[0]))  # in widths
        if min(len(area[name]) for name in ("lymphocyte", "epithelial")) >= 3:
            # In each field on its own, because stains differ between fields.
            assert np.mean(brightness["lymphocyte"]) < np.mean(brightness["epithelial"]) - 15, table.stem
            assert np.mean(area["lymphocyte"]) < 0.5 * np.mean(area["epithelial"]), table.stem
            compared += 1
    assert compared >= 2
    # The median, because the edge of a field cuts some nuclei into slices.
    assert np.median(length["fibroblast"]) > 1.3 * np.median(length["epithelial"])
    assert np.median(length["fibroblast"]) > 1.3 * np.median(length["lymphocyte"])


def test_a_hidden_nucleus_does_not_shift_the_classes_of_others() -> None:
    in_front = draw_one(replace(LYMPHOCYTE, radius_um=6), 30 + 30j)
    hidden, outside = draw_one(replace(EPITHELIAL, radius_um=2), 30 + 30j), draw_one(EPITHELIAL, 200 + 30j)
    visible = annotate(
        join([in_front, hidden, outside, draw_one(NEEDLE, 70 + 70j), draw_one(EPITHELIAL, 30 + 75j)]), 100
    )
    assert [outline.cell for outline in visible] == ["lymphocyte", "fibroblast", "epithelial"]
    labels, problems = paint_labels(visible, 100, 100)
    assert problems == []
    assert [labels[30, 30], labels[70, 70], labels[75, 30]] == [1, 2, 3]


@pytest.mark.parametrize("organ", ["breast", "kidney", "liver", "prostate"])
def test_tables_hold_the_classes_of_the_nuclei_that_were_drawn(organ: str, made: Path) -> None:
    visible = annotate(render_organ(0, organ, 6, SMALL_PX)[1], SMALL_PX)
    rows = read_rows(made / f"nuclei/Label Maps/SYNTH-{organ[:2].upper()}-06.csv", ["object", "class"])
    assert [row["class"] for row in rows] == [outline.cell for outline in visible]


def test_the_manifest_of_nuclei_lists_every_field(made: Path) -> None:
    root = made / "nuclei"
    rows = read_rows(root / "manifest-classes.csv", ["image", "annotation", "group", "split", "spacing", "organ"])
    fields = read_rows(root / "split.csv", ["image", "organ", "split"])
    for row, field in zip(rows, fields, strict=True):
        name = field["image"]
        assert (row["image"], row["annotation"]) == (f"Tissue Images/{name}.tif", f"Label Maps/{name}.png")
        assert (row["group"], row["split"], row["organ"]) == (name, field["split"], field["organ"])
        assert row["spacing"] == "0.25"


@pytest.mark.parametrize(("task", "fields"), [("mitosis", 46), ("nuclei", 24)])
def test_manifests_of_classes_can_be_opened(task: str, fields: int, made: Path) -> None:
    dataset = open_data(made / task / "manifest-classes.csv")
    assert [finding for finding in dataset.findings if finding.is_problem] == []
    assert len(dataset.samples) == fields


def test_nuclei_are_as_dense_as_in_tissue() -> None:
    for organ in ("breast", "kidney", "liver", "prostate"):
        assert 50 < len(render_organ(0, organ, 1, 512)[1]) < 400


def test_tumor_has_the_layout_of_pcam_balanced_and_without_shared_slides(made: Path) -> None:
    slides: dict[str, set[str]] = {}
    for split, count in FEW_PATCHES.items():
        stem = made / "tumor" / f"camelyonpatch_level_2_split_{split}"
        with h5py.File(f"{stem}_x.h5") as x, h5py.File(f"{stem}_y.h5") as y:
            assert x["x"].shape == (count, 96, 96, 3)
            assert x["x"].chunks == (1, 96, 96, 3)
            assert x["x"].dtype == y["y"].dtype == np.uint8
            assert y["y"].shape == (count, 1, 1, 1)
            labels = y["y"][:].ravel()
        assert labels.sum() == count // 2
        assert 0 < labels[: count // 2].sum() < count // 2  # shuffled
        with Path(f"{stem}_meta.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert list(rows[0]) == ["", "coord_y", "coord_x", "tumor_patch", "center_tumor_patch", "wsi"]
        assert [row["center_tumor_patch"] == "True" for row in rows] == [bool(label) for label in labels]
        assert all(row["tumor_patch"] == "True" for row in rows if row["center_tumor_patch"] == "True")
        slides[split] = {row["wsi"] for row in rows}
        assert len(slides[split]) > 1
    assert not slides["train"] & slides["valid"] | slides["train"] & slides["test"] | slides["valid"] & slides["test"]


def test_a_centre_with_a_tenth_of_tumor_is_tumor_and_one_with_less_is_left_out() -> None:
    shares: dict[bool, list[float]] = {True: [], False: []}
    for slide in (1, 2, 3):
        _, tumor = render_slide(np.random.default_rng([0, 3, 0, slide]))
        for label, patches in cut_slide(0, 0, slide).items():
            for row, column in (patch.corner for patch in patches):
                shares[label].append(float(tumor[row + 32 : row + 64, column + 32 : column + 64].mean()))
    assert 0.1 <= min(shares[True]) < 0.4  # there are edges to learn from
    assert set(shares[False]) == {0.0}


@pytest.mark.parametrize(
    "name", ["mitosis/mitoses_image_data_part_1/01/01.tif", "nuclei/Tissue Images/SYNTH-LI-03.tif"]
)
def test_images_know_their_spacing(name: str, made: Path) -> None:
    assert spacing_um_px(made / name) == pytest.approx(0.25)
    assert read_rgb(made / name).shape == (SMALL_PX, SMALL_PX, 3)


@pytest.mark.parametrize("scale_px", [0.5, 1.0, 3.0, 17.3])
def test_smooth_noise_has_mean_0_and_deviation_1(scale_px: float) -> None:
    noise = smooth_noise(np.random.default_rng(0), (500, 700), scale_px)
    assert noise.shape == (500, 700)
    assert noise.mean() == pytest.approx(0, abs=0.1)
    assert noise.std() == pytest.approx(1, abs=0.3)


def test_directions_favour_none() -> None:
    directions = draw_directions(np.random.default_rng(0), 20_000)
    np.testing.assert_allclose(np.abs(directions), 1, rtol=1e-5)
    for harmonic in (1, 2, 4, 8):  # no preference for the pixel grid either
        assert abs((directions**harmonic).mean()) < 0.03


def test_points_keep_away_from_others() -> None:
    points = np.array([0, 3, 6 + 1j], np.complex64)
    np.testing.assert_array_equal(keep_away(points, np.array([4j, 7], np.complex64), 4), [0, 3])
    np.testing.assert_array_equal(keep_away(points, points[:0], 4), points)


def test_thinned_points_keep_their_distance() -> None:
    rng = np.random.default_rng(0)
    points = (rng.uniform(0, 50, 300) + 1j * rng.uniform(0, 50, 300)).astype(np.complex64)
    kept = points[thin_out(points, 5)]
    apart = np.abs(kept[:, None] - kept) + 100 * np.eye(len(kept))
    assert apart.min() >= 5
    assert (np.abs(points[:, None] - kept).min(axis=1) < 5).all()  # and no room is left for another
