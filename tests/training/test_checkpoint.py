"""Run folders during a training: they survive anything, resume bit by bit, and belong to one recipe and one dataset."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, pcam_name, pixels, write_csv, write_hdf5, write_image
from safetensors.torch import load, save
from sharing import hold_elsewhere, pipe_at
from short_runs import (
    PATCH_CLASSES,
    converted_recipe,
    read_log,
    read_weights,
    short_recipe,
    train_until_killed,
)
from torch import Tensor

import rotopath as rp
from rotopath import runs
from rotopath.data import DataError, open_data
from rotopath.images import UnreadableFileError
from rotopath.model_file import MODEL, WEIGHTS, RunError
from rotopath.recipe import Mining, Recipe
from rotopath.runs import Run
from rotopath.tasks import classify
from rotopath.training import checkpoint, loop, train
from rotopath.training.checkpoint import FINGERPRINT_PREFIX, KEPT, RESUME, RunRecorder, compute_fingerprint
from rotopath.training.loop import TrainingModule
from rotopath.writing import BusyError, write_json, write_text

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")]


# Resuming


def test_a_killed_run_resumes_to_identical_weights(data: dict[str, Path], tmp_path: Path) -> None:
    recipe = short_recipe(data, epochs=3)
    train(recipe, tmp_path / "uninterrupted")
    for step in (
        1,
        5,
        8,
        14,
    ):  # before the first checkpoint, ending an epoch, at a checkpoint, in the last epoch
        train_until_killed(recipe, tmp_path / "killed", step)
        assert not (tmp_path / "killed" / WEIGHTS).exists()
        for path in (tmp_path / "killed").glob("*.json"):
            json.loads(path.read_text())
    train(recipe, tmp_path / "killed")
    assert read_weights(tmp_path / "killed") == read_weights(tmp_path / "uninterrupted")
    assert read_log(tmp_path / "killed") == read_log(tmp_path / "uninterrupted")
    for name in (runs.METRICS, MODEL, runs.RECIPE):
        assert (tmp_path / "killed" / name).read_text() == (tmp_path / "uninterrupted" / name).read_text()


def test_a_killed_run_of_a_converted_network_resumes_to_identical_weights(
    patches: Path, converted_run: Run, tmp_path: Path
) -> None:
    recipe = converted_recipe(patches)
    for step in (1, 3, 5):  # before the first checkpoint, at the end of an epoch, after a checkpoint of the second
        train_until_killed(recipe, tmp_path / "run", step)
        assert not (tmp_path / "run" / WEIGHTS).exists()
    resumed = train(recipe, tmp_path / "run")
    assert resumed.info == converted_run.info
    assert read_log(resumed.folder) == read_log(converted_run.folder)
    for name in (WEIGHTS, MODEL, runs.METRICS, runs.RECIPE):
        assert (resumed.folder / name).read_bytes() == (converted_run.folder / name).read_bytes()


def test_training_changes_all_weights_and_statistics(patches: Path, converted_run: Run) -> None:
    """Otherwise identical weights would prove nothing."""
    initial = runs.build(converted_recipe(patches, classes=[*PATCH_CLASSES])).module.state_dict()
    final = converted_run.network.module.state_dict()
    changed = [name for name, weight in initial.items() if not torch.equal(weight, final[name])]
    assert changed == [*initial]


def test_checkpoints_of_version_0_1_can_be_resumed(data: dict[str, Path], tmp_path: Path) -> None:
    """The log and the patience are under the name that the callback had then."""
    train_until_killed(short_recipe(data), tmp_path / "run", 7)
    state = torch.load(tmp_path / "run" / RESUME, weights_only=True)["callbacks"]
    assert list(state) == ["Keeper"]
    assert set(state["Keeper"]) == {"best", "worse_epochs", "rows"}
    assert len(state["Keeper"]["rows"]) == 6


@pytest.fixture(scope="module")
def killed(data: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """The recipe and the folder of a training that was killed in its second epoch."""
    recipe, folder = short_recipe(data), tmp_path_factory.mktemp("killed") / "run"
    train_until_killed(recipe, folder, 7)
    return recipe, folder


@pytest.mark.parametrize("name", [RESUME, KEPT])
def test_overwritten_bytes_are_noticed_before_a_training_is_resumed(
    killed: tuple[Recipe, Path], tmp_path: Path, name: str
) -> None:
    folder = shutil.copytree(killed[1], tmp_path / "run")
    content = (folder / name).read_bytes()
    for at in np.linspace(0.3, 0.9, 4):
        start = int(len(content) * at)
        (folder / name).write_bytes(
            content[:start] + bytes(b ^ 1 for b in content[start:][:64]) + content[start + 64 :]
        )
        with pytest.raises(RunError, match=rf"{name} (is|was) damaged") as refused:
            train(killed[0], folder)
        assert str(refused.value).endswith(".")
    for damaged in (b"", b"PK", content[: len(content) // 2], content[:-30]):
        (folder / name).write_bytes(damaged)
        with pytest.raises(RunError, match=f"{name} is damaged"):
            train(killed[0], folder)
    (folder / name).write_bytes(content)
    train(killed[0], folder)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
@pytest.mark.parametrize("name", [RESUME, KEPT])
def test_a_pipe_in_place_of_a_checkpoint_is_refused(killed: tuple[Recipe, Path], tmp_path: Path, name: str) -> None:
    folder = shutil.copytree(killed[1], tmp_path / "run")
    with pipe_at(folder / name), pytest.raises((UnreadableFileError, RunError), match=f"{name} is a pipe"):
        train(killed[0], folder)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda weight: weight.bool(), "must be of type float32; got bool"),
        (lambda weight: weight.to(torch.int8), "must be of type float32; got int8"),
        (lambda weight: weight.to(torch.complex64), "must be of type float32; got complex64"),
        (lambda weight: weight * float("nan"), "has values that are not finite"),
        (lambda weight: weight[:1], "must have shape"),
    ],
)
def test_a_checkpoint_must_contain_the_weights_of_the_network(
    killed: tuple[Recipe, Path], tmp_path: Path, change: Callable[[Tensor], Tensor], fault: str
) -> None:
    folder = shutil.copytree(killed[1], tmp_path / "run")
    state = torch.load(folder / RESUME, weights_only=True)
    name = next(name for name in state["state_dict"] if name.endswith("conv.weight"))
    state["state_dict"][name] = change(state["state_dict"][name])
    torch.save(state, folder / RESUME)
    with pytest.raises(RunError, match=rf"{RESUME} is damaged \('{name.removeprefix('network.')}' {fault}"):
        train(killed[0], folder)


def test_weights_of_older_versions_without_a_checksum_are_resumed(killed: tuple[Recipe, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(killed[1], tmp_path / "run")
    (folder / KEPT).write_bytes(save(load((folder / KEPT).read_bytes())))
    train(killed[0], folder)


def test_a_finished_run_has_no_checkpoint(converted_run: Run) -> None:
    assert not {RESUME, KEPT} & {path.name for path in converted_run.folder.iterdir()}


def test_a_loss_that_is_not_finite_ends_in_one_sentence_and_can_be_resumed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, loss = short_recipe(data), classify.binary_cross_entropy
    calls = iter(range(100))

    def loss_with_nan(*parts: Tensor) -> Tensor:
        return loss(*parts) * (float("nan") if next(calls) == 7 else 1)

    monkeypatch.setattr(classify, "binary_cross_entropy", loss_with_nan)
    with pytest.raises(RunError, match=r"The loss became nan at step \d+; train with a lower learning_rate"):
        train(recipe, tmp_path / "run")
    monkeypatch.setattr(classify, "binary_cross_entropy", loss)
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "uninterrupted")
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "uninterrupted")


def test_a_run_on_a_full_disk_can_be_resumed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = short_recipe(data)
    writes = iter(range(100))

    def write_until_full(path: Path, text: str) -> None:
        if next(writes) == 2:  # after the recipe and the first log
            raise OSError(28, "No space left on device", str(path))
        write_text(path, text)

    monkeypatch.setattr(checkpoint, "write_text", write_until_full)
    with pytest.raises(OSError, match="No space left"):
        train(recipe, tmp_path / "run")
    monkeypatch.setattr(checkpoint, "write_text", write_text)
    assert (tmp_path / "run" / runs.LOG).exists()
    assert not list((tmp_path / "run").glob(".*"))
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "uninterrupted")
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "uninterrupted")


def test_what_a_process_leaves_that_is_killed_near_its_end_is_completed_and_removed(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the last checkpoint and its log, after the mining, and between the weights and the end."""
    recipe, folder = short_recipe(data, epochs=1, mining=Mining(epochs=1, examples=4)), tmp_path / "run"

    def stop(self: RunRecorder) -> None:
        if len(self.rows) == recipe.steps:
            raise KeyboardInterrupt

    def refuse(*_: object, **__: object) -> None:
        pytest.fail("a killed process would leave a temporary file")

    monkeypatch.setattr(tempfile, "mkstemp", refuse)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(RunRecorder, "write_log", stop)
        with pytest.raises(KeyboardInterrupt):
            train(recipe, folder)
    with monkeypatch.context() as interrupted:
        interrupted.setattr(loop, "read_hard_examples", lambda _: raise_interrupt())
        with pytest.raises(KeyboardInterrupt):
            train(recipe, folder)
    (folder / "baseline" / RESUME).touch()
    train(recipe, folder)
    assert [len(read_log(log.parent)) for log in sorted(folder.rglob(runs.LOG))] == [5, 5]
    assert not list(folder.rglob(RESUME))
    for name in (RESUME, KEPT):
        (folder / name).touch()
    with pytest.raises(RunError, match="contains a finished run"):
        train(recipe, folder)
    assert not (folder / RESUME).exists()
    assert not (folder / KEPT).exists()


def raise_interrupt() -> None:
    raise KeyboardInterrupt


# The weights to keep


def test_the_best_weights_are_kept_and_training_stops_when_it_has_converged(
    data: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With validation losses as if the third epoch were the best and the next two no better."""
    losses = [3.0, 4.0, 1.0, 2.0, 1.0, 0.5]

    def log_given_loss(self: TrainingModule) -> None:
        self._validation.clear()
        self.log("validation_loss", torch.tensor(losses[self.current_epoch]))
        self.log("validation_accuracy", torch.tensor(0.5))

    def logged_losses(folder: Path) -> list[float]:
        return [float(row["validation_loss"]) for row in read_log(folder) if row["validation_loss"]]

    monkeypatch.setattr(TrainingModule, "on_validation_epoch_end", log_given_loss)
    recipe = short_recipe(data, epochs=6, patience=2, steps=2)
    train(recipe, tmp_path / "run")
    assert logged_losses(tmp_path / "run") == losses[:5]
    train(replace(recipe, epochs=3), tmp_path / "short")
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "short")
    train(replace(recipe, keep="last", epochs=5), tmp_path / "last")
    losses[4] = 0.1  # now the last epoch is the best as well
    train(replace(recipe, epochs=5), tmp_path / "best")
    assert read_weights(tmp_path / "last") == read_weights(tmp_path / "best") != read_weights(tmp_path / "run")
    losses[4] = 1.0
    train(replace(recipe, schedule="cosine"), tmp_path / "cosine")
    assert logged_losses(tmp_path / "cosine") == losses, "a cosine is followed to its end"


# Folders that are refused


def test_a_run_that_another_process_trains_is_refused_and_not_changed(data: dict[str, Path], tmp_path: Path) -> None:
    with hold_elsewhere(tmp_path / "run"), pytest.raises(BusyError, match=r"is writing to .*run; wait until it has"):
        train(short_recipe(data), tmp_path / "run")
    assert not list(tmp_path.iterdir())


def test_folders_that_cannot_be_used_are_refused(data: dict[str, Path], tmp_path: Path) -> None:
    recipe = short_recipe(data, epochs=1)
    train_until_killed(recipe, tmp_path / "run", 3)
    with pytest.raises(RunError, match=r"was started with orientations = 1; the recipe now has 4\. Restore the value"):
        train(replace(recipe, orientations=4), tmp_path / "run")
    with pytest.raises(RunError, match=r"was started with mining = None; the recipe now has Mining"):
        train(replace(recipe, mining=Mining()), tmp_path / "run")
    with pytest.raises(RunError, match="is not finished; run the same training command again"):
        runs.load(tmp_path / "run")
    train(recipe, tmp_path / "run")
    with pytest.raises(RunError, match="contains a finished run"):
        train(recipe, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("x")
    with pytest.raises(RunError, match="exists and is not a run folder of rotopath"):
        train(recipe, tmp_path / "mine")
    with pytest.raises(RunError, match="neither a run folder nor one of the pretrained models"):
        runs.load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="contains no run"):
        runs.load(tmp_path / "mine")


def test_a_folder_is_refused_if_the_network_or_the_classes_have_changed(patches: Path, tmp_path: Path) -> None:
    changed = partial(converted_recipe, patches, orientations=1)  # a plain network
    train_until_killed(changed(), tmp_path / "run", 3)
    with pytest.raises(RunError, match=r"was started with network_options = \{'width': 4\}; .* now has \{'width': 6\}"):
        train(changed(network_options={"width": 6}), tmp_path / "run")
    with pytest.raises(RunError, match="was started with window_px = 32; the recipe now has 64"):
        train(changed(window_px=64), tmp_path / "run")
    with pytest.raises(RunError, match=r"was started with classes = .*; the recipe now has .*'tumor', 'stroma'"):
        train(changed(classes=["fat", "tumor", "stroma"]), tmp_path / "run")
    train(changed(classes=[*PATCH_CLASSES]), tmp_path / "run")


def test_a_folder_is_refused_if_the_data_has_changed_or_is_missing(data: dict[str, Path], tmp_path: Path) -> None:
    root = amida13(tmp_path / "data", cases=[1, 3, 13], size=(100, 110))
    recipe = replace(short_recipe(data, "mitosis"), data=str(root))
    train_until_killed(recipe, tmp_path / "run", 3)
    annotation = root / "mitoses_ground_truth/01/01.csv"
    before = annotation.read_bytes()
    annotation.write_text("10,20\n")
    with pytest.raises(RunError, match="has changed since"):
        train(recipe, tmp_path / "run")
    annotation.write_bytes(before)
    root.rename(tmp_path / "moved")
    with pytest.raises(DataError, match="does not exist"):
        train(recipe, tmp_path / "run")
    (tmp_path / "moved").rename(root)
    train(recipe, tmp_path / "run")


def test_a_folder_is_refused_if_a_byte_of_an_image_has_changed(data: dict[str, Path], tmp_path: Path) -> None:
    root = shutil.copytree(data["mitosis"], tmp_path / "data")
    recipe = replace(short_recipe(data, "mitosis"), data=str(root))
    train_until_killed(recipe, tmp_path / "run", 3)
    path = root / "mitoses_image_data_part_1/01/01.tif"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(RunError, match="has changed since"):
        train(recipe, tmp_path / "run")
    path.write_bytes(content)
    train(recipe, tmp_path / "run")


def test_a_folder_is_refused_if_its_fingerprint_is_old_or_missing(data: dict[str, Path], tmp_path: Path) -> None:
    """Fingerprints of rotopath 0.1 contain names and sizes of files only, so they do not show whether data changed."""
    recipe = short_recipe(data, epochs=1)
    train_until_killed(recipe, tmp_path / "run", 3)
    provenance = json.loads((tmp_path / "run" / runs.PROVENANCE).read_text())
    for wrong, sentence in (
        ("0123456789abcdef", "was started by an older rotopath"),
        (None, "is damaged: it has no finger"),
    ):
        changed = provenance | {"data": provenance["data"] | {"fingerprint": wrong}}
        write_json(tmp_path / "run" / runs.PROVENANCE, changed)
        with pytest.raises(RunError, match=sentence):
            train(recipe, tmp_path / "run")
    write_json(tmp_path / "run" / runs.PROVENANCE, provenance)
    train(recipe, tmp_path / "run")


def test_a_folder_whose_creation_was_interrupted_can_be_used(data: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / runs.PROVENANCE).write_text("{}")
    (tmp_path / "run" / f".{runs.RECIPE}.unfinished").write_text("task =")
    train(short_recipe(data, epochs=1), tmp_path / "run")
    assert (tmp_path / "run" / WEIGHTS).exists()


def test_a_folder_can_be_used_again_while_no_step_was_trained(data: dict[str, Path], tmp_path: Path) -> None:
    """That the data has no mitoses is noticed only when the first windows are sampled."""
    root = amida13(tmp_path / "data", cases=[1, 3, 13], size=(100, 110))
    annotation = root / "mitoses_ground_truth/03/01.csv"
    before = annotation.read_text()
    annotation.write_text("")
    recipe = replace(short_recipe(data, "mitosis", epochs=1), data=str(root))
    with pytest.raises(DataError, match="No Mitosis is annotated in the 2 images of a split"):
        train(recipe, tmp_path / "run")
    annotation.write_text(before)
    train(replace(recipe, seed=1), tmp_path / "run")


def test_a_folder_of_a_training_that_failed_before_its_first_checkpoint_can_be_used_again(
    data: dict[str, Path], tmp_path: Path
) -> None:
    """After several steps, of which TensorBoard's log is left."""
    recipe = short_recipe(data, epochs=1, steps=30, checkpoint_steps=30)
    with pytest.raises(RunError, match=r"became (nan|inf)"):
        train(replace(recipe, learning_rate=100.0, momentum=0.99, optimiser="sgd"), tmp_path / "run")
    assert (tmp_path / "run/tensorboard").exists()
    train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "new")
    assert read_weights(tmp_path / "run") == read_weights(tmp_path / "new")
    assert len(list((tmp_path / "run/tensorboard").iterdir())) == len(list((tmp_path / "new/tensorboard").iterdir()))


# Fingerprints of data


def overwrite(path: Path, content: bytes) -> None:
    """Overwrite a file without changing its name, size and times."""
    before = path.stat()
    assert len(content) == before.st_size
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def fingerprint(root: Path) -> str:
    text = compute_fingerprint(open_data(root))
    assert text.startswith(FINGERPRINT_PREFIX)
    return text


@pytest.fixture
def fields(tmp_path: Path) -> Path:
    return amida13(tmp_path / "data", cases=[1, 3, 13])


def test_a_fingerprint_changes_with_a_single_pixel(fields: Path) -> None:
    before = fingerprint(fields)
    path = fields / "mitoses_image_data_part_1/01/02.tif"
    image = rp.images.read_rgb(path)
    content = bytearray(path.read_bytes())  # not compressed
    content[content.index(image[30, 40].tobytes() + image[30, 41].tobytes())] ^= 1
    overwrite(path, bytes(content))
    assert (rp.images.read_rgb(path) != image).sum() == 1
    assert fingerprint(fields) != before


def test_a_fingerprint_changes_with_an_annotation(fields: Path) -> None:
    before = fingerprint(fields)
    path = fields / "mitoses_ground_truth/03/01.csv"
    content = path.read_bytes()
    overwrite(path, content.replace(b"10,20", b"10,21"))
    assert fingerprint(fields) != before
    overwrite(path, content)
    assert fingerprint(fields) == before
    path.unlink()
    assert fingerprint(fields) != before


def test_a_fingerprint_changes_with_labels_splits_spacings_and_names(tmp_path: Path) -> None:
    rows = [["image", "label", "split", "spacing"], *([f"{i}.png", str(i % 2), "train", "1"] for i in range(4))]
    for i in range(4):
        write_image(tmp_path / f"{i}.png", pixels(8, 8, i))
    table = write_csv(tmp_path / "manifest.csv", rows)
    fingerprints = [fingerprint(tmp_path)]
    for row, column, value in ((2, 1, "0"), (3, 2, "test"), (1, 3, "2"), (4, 0, "3b.png")):
        rows[row][column] = value
        if value == "3b.png":
            shutil.copyfile(tmp_path / "3.png", tmp_path / value)
        write_csv(table, rows)
        fingerprints.append(fingerprint(tmp_path))
    assert len({*fingerprints}) == len(fingerprints)


def test_a_fingerprint_changes_with_the_table_of_classes_next_to_a_label_map(tmp_path: Path) -> None:
    write_image(tmp_path / "a.png", pixels(8, 8, 1))
    write_image(tmp_path / "labels/a.png", np.eye(8, dtype=np.uint8))
    table = write_csv(tmp_path / "labels/a.csv", [("object", "class"), (1, "lymphocyte")])
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "labels/a.png", "train", "1")]
    write_csv(tmp_path / "manifest.csv", rows)
    before = fingerprint(tmp_path)
    content = table.read_bytes()
    overwrite(table, content.replace(b"lymphocyte", b"macrophage"))
    assert fingerprint(tmp_path) != before
    overwrite(table, content)
    assert fingerprint(tmp_path) == before
    table.unlink()
    assert fingerprint(tmp_path) != before


def test_a_fingerprint_changes_with_the_organ(tmp_path: Path) -> None:
    """A regime takes fields of each organ, so the organs decide which fields a network is trained on."""
    root = kumar(tmp_path / "data", [f"n{i}" for i in range(6)])
    before = fingerprint(root)
    text = (root / "split.csv").read_text()
    (root / "split.csv").write_text(text.replace("n0,breast", "n0,kidney"))
    assert fingerprint(root) != before


def test_a_fingerprint_changes_with_the_labels_of_pcam(tmp_path: Path) -> None:
    first, same, other = (pcam(tmp_path / name) for name in ("first", "same", "other"))
    write_hdf5(other / pcam_name("valid", "y"), "y", np.array([0, 1, 1, 1], np.uint8).reshape(-1, 1, 1, 1))
    assert fingerprint(first) == fingerprint(same) != fingerprint(other)


def test_a_fingerprint_does_not_change_with_file_times_location_or_unrelated_files(
    fields: Path, tmp_path: Path
) -> None:
    before = fingerprint(fields)
    for path in fields.rglob("*"):
        path.touch()
        os.utime(path, (1, 1))
    assert fingerprint(fields) == before
    assert fingerprint(shutil.copytree(fields, tmp_path / "elsewhere")) == before
    (fields / "notes.txt").write_text("not part of the dataset")
    assert fingerprint(fields) == before
