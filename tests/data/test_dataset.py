"""Datasets: HDF5 files that several processes read, and samples that one read fetches."""

import os
from pathlib import Path

import numpy as np
import pytest
from layouts import pcam, pcam_name, write_hdf5

from rotopath.data import dataset as hdf5
from rotopath.data.dataset import group_for_reading, read_image, read_together
from rotopath.data.formats import open_data


def test_each_process_opens_its_own_hdf5_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDF5 handles do not survive a fork, and a file that was rewritten must not be read through an old handle."""
    path = pcam(tmp_path) / pcam_name("train", "x")
    first = hdf5._open_hdf5_array(path, "x")
    assert hdf5._open_hdf5_array(path, "x") is first
    monkeypatch.setattr("os.getpid", lambda: -1)
    assert hdf5._open_hdf5_array(path, "x") is not first
    monkeypatch.undo()
    path.unlink()
    write_hdf5(path, "x", np.full((2, 96, 96, 3), 7, np.uint8))
    os.utime(path, ns=(1, 1))
    assert hdf5.read_hdf5_rows(path, "x", 0, 2).mean() == 7


def test_rows_are_grouped_into_reads_of_limited_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = open_data(pcam(tmp_path, counts=(8, 4, 4))).samples
    monkeypatch.setattr("rotopath.data.dataset.MAX_ROWS_PER_READ", 3)
    groups = group_for_reading(samples)
    assert [sample for group in groups for sample in group] == list(samples)
    assert max(map(len, groups)) == 3
    picked = group_for_reading([samples[i] for i in (0, 2, 3, 9)])
    assert [[sample.row for sample in group] for group in picked] == [[0], [2, 3], [1]]
    for group in picked:
        for sample, image in zip(group, read_together(group), strict=True):
            assert np.array_equal(image, read_image(sample, 1.0))
