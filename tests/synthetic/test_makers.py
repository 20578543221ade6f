"""All three makers: the same bytes for a seed, and a folder that is complete or does not exist."""

import hashlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

import h5py
import numpy as np
import pytest
from sharing import hold_elsewhere
from synthetic_datasets import MAKERS, SMALL_PX

from rotopath.data.formats import open_data
from rotopath.images.files import read_rgb, spacing_um_px
from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor
from rotopath.synthetic.lymph_nodes import collect_patches
from rotopath.synthetic.mitoses import render_mitosis_field
from rotopath.writing import BusyError

pytestmark = pytest.mark.slow


def digests(folder: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path within the folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


TINY_MAKERS = {  # of less than is needed to see what the images show
    "mitosis": partial(make_mitosis, fields_per_case=1, size_px=96),
    "nuclei": partial(make_nuclei, size_px=96),
    "tumor": partial(make_tumor, patches={"train": 6, "valid": 2, "test": 3}),
}


@pytest.mark.parametrize("task", TINY_MAKERS)
def test_a_seed_makes_the_same_bytes_and_another_seed_other_bytes(task: str, tmp_path: Path) -> None:
    for name, seed in (("first", 0), ("again", 0), ("other", 1)):
        TINY_MAKERS[task](tmp_path / name, seed)
    first, again, other = (digests(tmp_path / name) for name in ("first", "again", "other"))
    assert first == again
    for name in first.keys() & other.keys():
        if Path(name).suffix in (".tif", ".xml", ".h5") and not name.endswith("_y.h5"):
            assert first[name] != other[name], name


def test_an_image_does_not_depend_on_the_number_of_images(datasets: Path) -> None:
    image, _ = render_mitosis_field(0, 17, 2, SMALL_PX)
    np.testing.assert_array_equal(image, read_rgb(datasets / "mitosis/mitoses_image_data_part_2/17/02.tif"))
    few = {patch.image.tobytes() for patch in collect_patches(0, 1, 6)}
    assert few <= {patch.image.tobytes() for patch in collect_patches(0, 1, 30)}


@pytest.mark.parametrize("task", MAKERS)
def test_a_folder_with_files_is_refused_and_not_changed(task: str, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("three years")
    with pytest.raises(FileExistsError, match=r"mine exists already and is not an empty folder; choose another folder"):
        MAKERS[task](tmp_path / "mine", 0)
    assert [path.name for path in tmp_path.rglob("*")] == ["mine", "thesis.txt"]


def test_nothing_is_left_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("rotopath.synthetic.mitoses.write_tiff", fail)
    with pytest.raises(OSError, match="the disk is full"):
        make_mitosis(tmp_path / "out", size_px=64)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("make", [partial(make_tumor, patches={"train": 20}), partial(make_mitosis, size_px=64)])
def test_a_full_disk_is_an_error_of_the_operating_system(
    make: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Libraries write to memory: h5py would crash, and libtiff would not report the reason."""

    def fail(self: Path, _: bytes) -> None:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(OSError, match="No space left"):
        make(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_another_process_writes_is_refused(tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path / "out"), pytest.raises(BusyError, match="is writing to"):
        make_tumor(tmp_path / "out", patches={})
    assert not list(tmp_path.iterdir())


def test_an_empty_folder_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    make_tumor(tmp_path / "out", patches={"valid": 2})
    with h5py.File(tmp_path / "out/camelyonpatch_level_2_split_train_x.h5") as file:
        assert file["x"].shape == (0, 96, 96, 3)
    with h5py.File(tmp_path / "out/camelyonpatch_level_2_split_valid_x.h5") as file:
        assert file["x"].shape == (2, 96, 96, 3)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(("task", "fields"), [("mitosis", 46), ("nuclei", 24)])
def test_manifests_with_classes_can_be_opened(task: str, fields: int, datasets: Path) -> None:
    dataset = open_data(datasets / task / "manifest-classes.csv")
    assert [finding for finding in dataset.findings if finding.is_problem] == []
    assert len(dataset.samples) == fields


@pytest.mark.parametrize(
    "name", ["mitosis/mitoses_image_data_part_1/01/01.tif", "nuclei/Tissue Images/SYNTH-LI-03.tif"]
)
def test_images_state_their_spacing(name: str, datasets: Path) -> None:
    assert spacing_um_px(datasets / name) == pytest.approx(0.25)
    assert read_rgb(datasets / name).shape == (SMALL_PX, SMALL_PX, 3)
