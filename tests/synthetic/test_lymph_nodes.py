"""Synthetic lymph nodes: the layout of PCam, balanced classes, separate slides, and labels that fit the tumor."""

import csv
from pathlib import Path

import h5py
import numpy as np
import pytest
from synthetic_datasets import FEW_PATCHES

from rotopath.synthetic.lymph_nodes import cut_slide, render_slide

pytestmark = pytest.mark.slow


def test_files_have_the_layout_of_pcam_balanced_and_without_shared_slides(datasets: Path) -> None:
    slides: dict[str, set[str]] = {}
    for split, count in FEW_PATCHES.items():
        stem = datasets / "tumor" / f"camelyonpatch_level_2_split_{split}"
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


def test_a_center_with_a_tenth_of_tumor_is_tumor_and_a_center_with_less_is_left_out() -> None:
    fractions: dict[bool, list[float]] = {True: [], False: []}
    for slide in (1, 2, 3):
        _, tumor = render_slide(np.random.default_rng([0, 3, 0, slide]))
        for label, patches in cut_slide(0, 0, slide).items():
            for row, column in (patch.corner for patch in patches):
                fractions[label].append(float(tumor[row + 32 : row + 64, column + 32 : column + 64].mean()))
    assert 0.1 <= min(fractions[True]) < 0.4  # some patches show the edge of a tumor
    assert set(fractions[False]) == {0.0}
