"""Synthetic nuclei of four organs: the layout of Kumar et al., and outlines, label maps and classes that fit."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from synthetic_datasets import SMALL_PX, read_rows, sample_nucleus

from rotopath.data.annotations import paint_labels, read_aperio_outlines, read_aperio_spacing_um_px
from rotopath.images.files import read_labels, read_rgb
from rotopath.synthetic.nuclei import LYMPHOCYTE, NEEDLE, concatenate_nuclei
from rotopath.synthetic.organs import EPITHELIAL, outline_visible_nuclei, render_organ_field

pytestmark = pytest.mark.slow

ORGANS = ("breast", "kidney", "liver", "prostate")


def test_files_have_the_layout_of_kumar(datasets: Path) -> None:
    root = datasets / "nuclei"
    rows = read_rows(root / "split.csv", ["image", "organ", "split"])
    names = {row["image"] for row in rows}
    assert len(names) == len(rows) == 24
    for folder, suffixes in (("Tissue Images", [".tif"]), ("Annotations", [".xml"]), ("Label Maps", [".png", ".csv"])):
        assert {path.name for path in (root / folder).iterdir()} == {name + end for name in names for end in suffixes}
    assert {path.name for path in root.iterdir()} == {
        *("Tissue Images", "Annotations", "Label Maps", "split.csv", "SYNTHETIC.txt", "manifest-classes.csv"),
    }
    for organ in ORGANS:
        splits = [row["split"] for row in rows if row["organ"] == organ]
        assert sorted(splits) == ["test", "test", "train", "train", "train", "valid"]


def test_outlines_paint_the_label_map_without_problems(datasets: Path) -> None:
    for xml in sorted((datasets / "nuclei/Annotations").iterdir()):
        outlines = read_aperio_outlines(xml)
        labels, problems = paint_labels(outlines, SMALL_PX, SMALL_PX)
        assert problems == []
        np.testing.assert_array_equal(labels, read_labels(datasets / "nuclei/Label Maps" / f"{xml.stem}.png"))
        assert labels.max() == len(outlines) >= 1
        assert read_aperio_spacing_um_px(xml) == 0.25


def test_images_are_darker_inside_nuclei_than_outside(datasets: Path) -> None:
    for png in sorted((datasets / "nuclei/Label Maps").glob("*.png")):
        inside = read_labels(png) > 0
        red = read_rgb(datasets / "nuclei/Tissue Images" / f"{png.stem}.tif")[..., 0]
        assert red[inside].mean() < red[~inside].mean() - 12, png.stem


def test_some_nuclei_touch(datasets: Path) -> None:
    def touching_pixels(labels: NDArray[np.int32]) -> int:
        vertical = np.stack([labels[1:], labels[:-1]]).reshape(2, -1)
        horizontal = np.stack([labels[:, 1:], labels[:, :-1]]).reshape(2, -1)
        pairs = np.concatenate([vertical, horizontal], axis=1)
        return int(((pairs[0] != pairs[1]) & (pairs > 0).all(axis=0)).sum())

    assert sum(touching_pixels(read_labels(png)) > 0 for png in (datasets / "nuclei/Label Maps").glob("*.png")) > 12


def test_every_object_of_a_label_map_has_a_class(datasets: Path) -> None:
    counts: dict[str, int] = defaultdict(int)
    for png in sorted((datasets / "nuclei/Label Maps").glob("*.png")):
        labels = read_labels(png)
        rows = read_rows(png.with_suffix(".csv"), ["object", "class"])
        assert [int(row["object"]) for row in rows] == np.unique(labels[labels > 0]).tolist()
        for row in rows:
            counts[row["class"]] += 1
    assert set(counts) == {"epithelial", "lymphocyte", "fibroblast"}
    assert counts["epithelial"] > counts["fibroblast"] > counts["lymphocyte"] > 10


def test_lymphocytes_are_darker_and_smaller_than_epithelial_nuclei_and_fibroblasts_are_longer(datasets: Path) -> None:
    compared = 0
    elongation = defaultdict(list)
    for table in sorted((datasets / "nuclei/Label Maps").glob("*.csv")):
        labels = read_labels(table.with_suffix(".png"))
        red = read_rgb(datasets / "nuclei/Tissue Images" / f"{table.stem}.tif")[..., 0]
        brightness, area = defaultdict(list), defaultdict(list)
        for row in read_rows(table, ["object", "class"]):
            mask = labels == int(row["object"])
            brightness[row["class"]].append(red[mask].mean())
            area[row["class"]].append(mask.sum())
            variances = np.linalg.eigvalsh(np.cov(np.nonzero(mask)))
            elongation[row["class"]].append(np.sqrt(variances[1] / variances[0]))
        if min(len(area[name]) for name in ("lymphocyte", "epithelial")) >= 3:
            # Compared within each field, because stains differ between fields.
            assert np.mean(brightness["lymphocyte"]) < np.mean(brightness["epithelial"]) - 15, table.stem
            assert np.mean(area["lymphocyte"]) < 0.5 * np.mean(area["epithelial"]), table.stem
            compared += 1
    assert compared >= 2
    # The median, because the edge of a field cuts some nuclei into slices.
    assert np.median(elongation["fibroblast"]) > 1.3 * np.median(elongation["epithelial"])
    assert np.median(elongation["fibroblast"]) > 1.3 * np.median(elongation["lymphocyte"])


def test_a_hidden_nucleus_does_not_shift_the_classes_of_others() -> None:
    in_front = sample_nucleus(replace(LYMPHOCYTE, radius_um=6), 30 + 30j)
    hidden = sample_nucleus(replace(EPITHELIAL, radius_um=2), 30 + 30j)
    outside = sample_nucleus(EPITHELIAL, 200 + 30j)
    others = [sample_nucleus(NEEDLE, 70 + 70j), sample_nucleus(EPITHELIAL, 30 + 75j)]
    visible = outline_visible_nuclei(concatenate_nuclei([in_front, hidden, outside, *others]), 100)
    assert [outline.class_name for outline in visible] == ["lymphocyte", "fibroblast", "epithelial"]
    labels, problems = paint_labels(visible, 100, 100)
    assert problems == []
    assert [labels[30, 30], labels[70, 70], labels[75, 30]] == [1, 2, 3]


@pytest.mark.parametrize("organ", ORGANS)
def test_tables_contain_the_classes_of_the_nuclei_that_were_painted(organ: str, datasets: Path) -> None:
    visible = outline_visible_nuclei(render_organ_field(0, organ, 6, SMALL_PX)[1], SMALL_PX)
    rows = read_rows(datasets / f"nuclei/Label Maps/SYNTH-{organ[:2].upper()}-06.csv", ["object", "class"])
    assert [row["class"] for row in rows] == [outline.class_name for outline in visible]


def test_the_manifest_lists_every_field(datasets: Path) -> None:
    root = datasets / "nuclei"
    rows = read_rows(root / "manifest-classes.csv", ["image", "annotation", "group", "split", "spacing", "organ"])
    fields = read_rows(root / "split.csv", ["image", "organ", "split"])
    for row, field in zip(rows, fields, strict=True):
        name = field["image"]
        assert (row["image"], row["annotation"]) == (f"Tissue Images/{name}.tif", f"Label Maps/{name}.png")
        assert (row["group"], row["split"], row["organ"]) == (name, field["split"], field["organ"])
        assert row["spacing"] == "0.25"


def test_nuclei_are_as_dense_as_in_tissue() -> None:
    for organ in ORGANS:
        assert 50 < len(render_organ_field(0, organ, 1, 512)[1]) < 400
