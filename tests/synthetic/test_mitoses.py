"""Synthetic mitoses: the layout of AMIDA13, labels that fit the pixels, and look-alikes with their classes."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from synthetic_datasets import SMALL_PX, read_rows, sample_nucleus

from rotopath.data.splits import amida13_split
from rotopath.images.files import read_rgb
from rotopath.synthetic.mitoses import SMUDGED, TUMOR, label_objects, render_mitosis_field
from rotopath.synthetic.nuclei import LYMPHOCYTE, concatenate_nuclei

pytestmark = pytest.mark.slow


def test_files_have_the_layout_of_amida13(datasets: Path) -> None:
    root = datasets / "mitosis"
    for part, cases in (("mitoses_image_data_part_1", range(1, 13)), ("mitoses_image_data_part_2", range(13, 24))):
        expected = [f"{case:02d}/{field:02d}.tif" for case in cases for field in (1, 2)]
        assert sorted(str(p.relative_to(root / part)) for p in (root / part).rglob("*.tif")) == expected
    fields = {p.relative_to(p.parents[1]).with_suffix("") for p in root.rglob("*.tif")}
    tables = {p.relative_to(p.parents[1]).with_suffix("") for p in (root / "mitoses_ground_truth").rglob("*.csv")}
    assert tables
    assert tables < fields  # some fields have no mitosis
    assert {path.name for path in root.iterdir()} == {
        *("mitoses_image_data_part_1", "mitoses_image_data_part_2", "mitoses_ground_truth", "SYNTHETIC.txt"),
        *("look_alikes", "manifest-classes.csv"),
    }


def test_mitoses_are_on_dark_pixels_inside_their_field(datasets: Path) -> None:
    root = datasets / "mitosis"
    for table in (root / "mitoses_ground_truth").rglob("*.csv"):
        image = read_rgb(next(root.glob(f"*/{table.parent.name}/{table.stem}.tif"))).mean(axis=2)
        for line in table.read_text().splitlines():
            row, column = (int(number) for number in line.split(","))
            assert 0 <= row < SMALL_PX
            assert 0 <= column < SMALL_PX
            near = image[max(row - 20, 0) : row + 21, max(column - 20, 0) : column + 21]
            assert (near < np.median(image) - 40).sum() > 30, table


def test_cases_differ_in_their_number_of_mitoses() -> None:
    counts = [
        sum(item.cell == "mitosis" for field in (1, 2) for item in render_mitosis_field(0, case, field, 512)[1])
        for case in (4, 10)
    ]
    assert counts[0] > 5
    assert counts[1] == 0


def test_tables_of_look_alikes_contain_every_mitosis_and_all_other_classes(datasets: Path) -> None:
    root = datasets / "mitosis"
    counts: dict[str, int] = defaultdict(int)
    empty = 0
    for case in range(1, 24):
        for field in ("01", "02"):
            rows = read_rows(root / f"look_alikes/{case:02d}/{field}.csv", ["row", "column", "class"])
            assert all(0 <= int(row[name]) < SMALL_PX for row in rows for name in ("row", "column"))
            mitoses = root / f"mitoses_ground_truth/{case:02d}/{field}.csv"
            expected = mitoses.read_text().splitlines() if mitoses.exists() else []
            assert [f"{row['row']},{row['column']}" for row in rows if row["class"] == "mitosis"] == expected
            for row in rows:
                counts[row["class"]] += 1
            empty += not rows
    assert set(counts) == {"mitosis", "apoptotic", "smudged", "lymphocyte"}
    assert min(counts.values()) > 5
    assert empty  # the table of such a field has only a header
    assert len(list((root / "look_alikes").rglob("*.*"))) == 46


@pytest.mark.parametrize("case", [7, 12, 19])
def test_look_alikes_look_like_their_class(case: int) -> None:
    """Smudged nuclei are darker than lymphocytes, apoptotic cells have pink cytoplasm, all lymphocytes are dark."""
    image, objects = render_mitosis_field(0, case, 1, 512)
    darkness, pinkness = defaultdict(list), defaultdict(list)
    for row, column, cell in objects:
        near, around = (
            image[max(row - radius, 0) : row + radius + 1, max(column - radius, 0) : column + radius + 1].astype(float)
            for radius in (4, 16)
        )
        darkness[cell].append(np.median(image.mean(axis=2)) - near.mean())
        pinkness[cell].append((around[..., 0] - around[..., 2]).mean())
    assert len(darkness["lymphocyte"]) > 20
    assert min(darkness["lymphocyte"]) > 15
    assert np.mean(darkness["smudged"]) > np.mean(darkness["lymphocyte"]) + 10
    assert np.mean(pinkness["apoptotic"]) > np.mean(pinkness["smudged"]) + 4
    assert np.mean(pinkness["apoptotic"]) > np.mean(pinkness["lymphocyte"]) + 4


def test_look_alikes_that_are_hidden_or_outside_are_not_labeled() -> None:
    mitosis, apoptotic = np.array([20 + 20j], np.complex64), np.array([80 + 20j], np.complex64)
    nuclei = concatenate_nuclei(
        [
            sample_nucleus(TUMOR, 20 + 80j),
            sample_nucleus(LYMPHOCYTE, 60 + 50j),
            sample_nucleus(LYMPHOCYTE, 21 + 80j),  # behind the nucleus of the tumor
            sample_nucleus(LYMPHOCYTE, 63 + 50j),  # behind the other lymphocyte
            sample_nucleus(LYMPHOCYTE, 20 + 25j),  # behind the mitosis
            sample_nucleus(LYMPHOCYTE, 80 + 100j),  # below the last row
            sample_nucleus(SMUDGED, 78.4 + 80.6j),
        ]
    )
    assert label_objects(mitosis, apoptotic, nuclei, 100) == [
        (20, 20, "mitosis"),
        (20, 80, "apoptotic"),
        (50, 60, "lymphocyte"),
        (81, 78, "smudged"),
    ]


def test_the_manifest_lists_every_field(datasets: Path) -> None:
    root = datasets / "mitosis"
    rows = read_rows(root / "manifest-classes.csv", ["image", "annotation", "group", "split", "spacing"])
    images = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.tif"))
    assert [row["image"] for row in rows] == images
    for row in rows:
        case, field = row["image"].split("/")[1:]
        assert row["annotation"] == f"look_alikes/{case}/{Path(field).stem}.csv"
        assert (root / row["annotation"]).is_file()
        assert (row["group"], row["split"], row["spacing"]) == (case, amida13_split(int(case)), "0.25")
