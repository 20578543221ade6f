"""Batches: the same bytes from every cache and with any number of workers, and resumed epochs."""

import hashlib
import pickle
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from layouts import amida13, kumar, pcam, pixels, truncate, write_csv, write_image

from rotopath.data.augmentation import Augmentation
from rotopath.data.batches import (
    Batches,
    DecodedOnDemand,
    DevicePixels,
    HostPixels,
    SampleReader,
    choose_cache,
    open_pixels,
)
from rotopath.data.dataset import DataError
from rotopath.data.formats import open_data
from rotopath.data.sampling import Windows
from rotopath.evaluation import make_center_batches, make_sampled_batches
from rotopath.images.files import UnreadableFileError
from rotopath.tasks import MITOSIS, NUCLEI, PAPER, TUMOR, Class, Detect, Segment, TrainingWindow

pytestmark = pytest.mark.slow

KNOWN = Augmentation(free_rotation=True, stain=0.1)
EVERYTHING = replace(KNOWN, scale=0.1, elastic=3, blur=1, jpeg=60)
TRAINING_WINDOWS = {
    "mitosis": TrainingWindow(68, 8, 8),
    "nuclei": TrainingWindow(60, 20, 1),
    "tumor": TrainingWindow(88, 8, 8),
}
TASKS = tuple(TRAINING_WINDOWS)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("data")
    return {
        "mitosis": amida13(root / "mitosis", cases=[1, 2], size=(90, 110)),
        "nuclei": kumar(root / "nuclei", [f"n{i}" for i in range(6)], size=70),
        "tumor": pcam(root / "tumor"),
    }


def batches(data: dict[str, Path], task: str, **settings: object) -> Batches:
    samples = open_data(data[task]).split("train")
    return make_sampled_batches(PAPER[task], samples, TRAINING_WINDOWS[task], **({"batch": 8, "seed": 0} | settings))  # type: ignore[arg-type]


def bytes_of(result: object) -> list[bytes]:
    return [part.contiguous().numpy().tobytes() for batch in result for part in batch]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
@pytest.mark.parametrize("task", TASKS)
def test_batches_are_the_same_with_every_cache_and_number_of_workers(data: dict[str, Path], task: str) -> None:
    reference = bytes_of(batches(data, task, augmentation=EVERYTHING, cache="memory").load(range(6)))
    assert len(set(reference)) > 6
    for cache, workers in (("none", 0), ("none", 2), ("memory", 1), ("device", 0), ("auto", 0)):
        other = batches(data, task, augmentation=EVERYTHING, cache=cache).load(range(6), workers=workers)
        assert bytes_of(other) == reference, (cache, workers)
    other_seed = batches(data, task, augmentation=EVERYTHING, cache="memory", seed=1).load(range(6))
    assert bytes_of(other_seed) != reference


@pytest.mark.parametrize(("task", "digest"), [("mitosis", "cf3081c64098815b"), ("tumor", "dda06180358b357b")])
def test_known_batches_stay_the_same(data: dict[str, Path], task: str, digest: str) -> None:
    """Bytes, labels and drawn changes; a difference here would silently change every training run."""
    result = batches(data, task, augmentation=KNOWN)
    parts = [part for step in (0, 1) for part in (result[step].windows, result[step].labels, *result[step].changes[:4])]
    assert result[0].changes[4:] == (None, None, None, None)
    content = b"".join(part.contiguous().numpy().tobytes() for part in parts)
    assert hashlib.sha256(content).hexdigest()[:16] == digest


@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
@pytest.mark.parametrize("task", TASKS)
def test_resumed_epoch_continues_with_the_remaining_batches(data: dict[str, Path], task: str) -> None:
    whole = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(10, 18)))
    begun = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(10, 13)))
    rest = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(13, 18), workers=2))
    assert begun + rest == whole


@pytest.mark.filterwarnings("ignore:stain normalization left an image unchanged")
def test_targets_of_nuclei_are_the_centers_of_their_windows(data: dict[str, Path]) -> None:
    """Without augmentation, targets are the map of parts at the positions that were drawn."""
    result = batches(data, "nuclei", cache="memory")
    images, parts = next(result.load([4]))
    assert images.shape == (8, 3, 60, 60)
    assert parts.shape == (8, 20, 20)
    assert parts.dtype == torch.int64
    windows = result[4].windows
    assert torch.equal(parts, windows[:, 3, 20:40, 20:40].long())
    assert torch.equal(images, windows[:, :3].float() / 255)
    assert set(parts.unique().tolist()) == {0, 1, 2}


def test_every_batch_is_augmented_differently(data: dict[str, Path]) -> None:
    result = batches(data, "tumor", augmentation=EVERYTHING)
    first, second = result[0].changes, result[1].changes
    assert not torch.equal(first.symmetries, second.symmetries)
    assert not torch.equal(first.brightness, second.brightness)


def test_freely_rotated_windows_keep_their_center(data: dict[str, Path]) -> None:
    """Larger windows are cut out, for the corners, around the same center."""
    plain = batches(data, "mitosis", cache="memory")[3].windows
    wide = batches(data, "mitosis", cache="memory", augmentation=Augmentation(free_rotation=True))[3].windows
    margin = (wide.shape[-1] - 68) // 2
    assert margin == 15
    assert torch.equal(wide[..., margin : margin + 68, margin : margin + 68], plain)


def test_stains_are_normalized_for_nuclei_only() -> None:
    assert NUCLEI.reader == SampleReader(0.25, "macenko", NUCLEI.targets, 1)
    assert NUCLEI.reader.without_targets == SampleReader(0.25, "macenko")
    assert MITOSIS.reader == SampleReader(0.25)
    assert TUMOR.reader == SampleReader(1.0)


def test_reading_data_does_not_change_global_random_numbers(data: dict[str, Path]) -> None:
    before = torch.random.get_rng_state()
    list(batches(data, "tumor", augmentation=EVERYTHING).load(range(2)))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_file_raises_its_error_message(tmp_path: Path, workers: int) -> None:
    root = amida13(tmp_path, cases=[1], size=(90, 110))
    result = make_sampled_batches(
        MITOSIS, open_data(root).split("train"), TRAINING_WINDOWS["mitosis"], 4, 0, cache="none"
    )
    truncate(root / "mitoses_image_data_part_1/01/01.tif")
    with pytest.raises(UnreadableFileError) as caught:
        list(result.load(range(8), workers=workers))
    assert str(caught.value).startswith(f"{root}/mitoses_image_data_part_1/01/01.tif is damaged")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"batch": 0}, "The batch size must be 1 or more and the seed 0 or more; got 0"),
        ({"seed": -1}, "the seed 0 or more; got 8 and -1"),
        ({"mined": np.array([99])}, "image index 99, but there are 8 training images"),
    ],
)
def test_impossible_settings_are_refused(data: dict[str, Path], settings: dict[str, object], message: str) -> None:
    samples = open_data(data["tumor"]).split("train")
    with pytest.raises(DataError, match=message):
        make_sampled_batches(TUMOR, samples, TRAINING_WINDOWS["tumor"], **({"batch": 8, "seed": 0} | settings))  # type: ignore[arg-type]
    for task, frame in TRAINING_WINDOWS.items():
        with pytest.raises(DataError, match="no images"):
            make_sampled_batches(PAPER[task], [], frame, 8, 0)


def test_batches_can_be_pickled(data: dict[str, Path]) -> None:
    """Workers that are spawned instead of forked receive pickled batches."""
    result = batches(data, "tumor", cache="none")
    copied = pickle.loads(pickle.dumps(result))
    assert bytes_of(copied.load(range(2))) == bytes_of(result.load(range(2)))


def test_center_batches_cover_every_patch_once_in_order(data: dict[str, Path]) -> None:
    samples = open_data(data["tumor"]).split("train")
    result, steps = make_center_batches(TUMOR, samples, 88, batch=3)
    images, labels = (torch.cat(parts) for parts in zip(*result.load(steps), strict=True))
    assert labels.tolist() == [("normal", "tumor").index(sample.label or "") for sample in samples]
    planes = [SampleReader(1.0).read(sample)[4:92, 4:92] for sample in samples]
    assert torch.equal(images, torch.from_numpy(np.stack(planes)).permute(0, 3, 1, 2) / 255)


def test_windows_beyond_the_edge_are_reflected_in_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [pixels(7, 9), pixels(5, 6), pixels(1, 1)]
    windows = Windows(*(np.array(x) for x in ([0, 1, 2, 0, 1], [-3, 2, -4, 40, -30], [4, -5, 2, -3, 3], [0] * 5)))
    expected = []
    for image, top, left in zip(windows.images, windows.tops, windows.lefts, strict=True):
        padded = np.pad(images[image], ((60, 60), (60, 60), (0, 0)), mode="reflect")
        expected.append(padded[60 + top : 68 + top, 60 + left : 68 + left])
    sizes = np.array([image.shape[:2] for image in images])
    monkeypatch.setattr("rotopath.data.batches.MAX_COPIED_PIXELS", 50)
    for cache in (HostPixels(images, sizes), DevicePixels(images, torch.device("cpu"))):
        result = cache.cut(windows, 8)
        assert np.array_equal(result.permute(0, 2, 3, 1).numpy(), np.stack(expected))
        assert result.is_contiguous(memory_format=torch.channels_last)


def test_images_are_resampled_before_windows_are_cut(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / f"{i}.png", np.full((192, 192, 3), 40 * i, np.uint8))
    rows = [(f"{i}.png", i % 2, f"g{i}", "train", 0.5) for i in range(6)]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "group", "split", "spacing"), *rows])
    samples = open_data(tmp_path).split("train")
    for cache in ("none", "memory", "device"):
        result = open_pixels(samples, SampleReader(1.0), cache, torch.device("cpu"))  # type: ignore[arg-type]
        assert result.sizes_px.tolist() == [[96, 96]] * 6
    windows = make_sampled_batches(TUMOR, samples, TRAINING_WINDOWS["tumor"], 4, 0)[0].windows
    assert windows.shape == (4, 3, 88, 88)
    assert set(windows.unique().tolist()) <= {0, 40, 80, 120, 160, 200}


def test_decoded_images_are_limited_in_memory(data: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.data.batches.KEPT_BYTES", 3 * 96 * 96 * 3)
    images = DecodedOnDemand(open_data(data["tumor"]).split("train"), SampleReader(1.0))
    first = images[0].copy()
    for i in (1, 2, 3, 4, 2):
        images[i]
    assert len(images._kept) == 3
    assert np.array_equal(images[0], first)


def test_cache_is_chosen_by_size() -> None:
    cpu = torch.device("cpu")
    assert choose_cache(10**6, cpu) == "memory"
    assert choose_cache(10**15, cpu) == "none"


def test_cache_takes_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000))
    assert [choose_cache(size, torch.device("cpu")) for size in (500, 501)] == ["memory", "none"]


def test_free_memory_is_assumed_without_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    """Installations for prediction do without the extra `train`."""
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert [choose_cache(size, torch.device("cpu")) for size in (2 * 2**30, 2 * 2**30 + 1)] == ["memory", "none"]


def test_unknown_cache_is_refused(data: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="Unknown cache mode 'disk'; choose from auto, device, memory, none"):
        batches(data, "tumor", cache="disk")


def test_objects_of_several_classes_have_two_target_maps(tmp_path: Path) -> None:
    """Maps of parts and classes move with the image; outside of objects the class is unknown."""
    labels = np.zeros((70, 70), np.uint16)
    labels[10:30, 10:30], labels[40:60, 35:60] = 1, 2
    image = np.full((70, 70, 3), 255, np.uint8)
    image[labels == 1], image[labels == 2] = 100, 0
    write_image(tmp_path / "map.png", labels)
    write_csv(tmp_path / "map.csv", [("object", "class"), (1, "b"), (2, "a")])
    write_image(tmp_path / "a.png", image)
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "map.png", "train", 0.25)]
    samples = open_data(write_csv(tmp_path / "manifest.csv", rows)).split("train")
    task = Segment("segment", (Class("a", (0, 0, 0)), Class("b", (0, 0, 0))), 0.25, uses_class_names=True)
    rotated = Augmentation(brightness=0.0)
    result = make_sampled_batches(task, samples, TrainingWindow(60, 20, 1), 8, 0, augmentation=rotated)
    images, targets = (torch.cat(parts) for parts in zip(*result.load(range(4)), strict=True))
    assert targets.shape == (32, 2, 20, 20)
    assert targets.dtype == torch.int64
    center = (images[:, 0, 20:40, 20:40] * 255).round()
    expected = torch.full_like(targets[:, 1], 255)
    expected[center == 0], expected[center == 100] = 0, 1
    assert torch.equal(targets[:, 1], expected)
    assert torch.equal(targets[:, 0] == 2, expected == 255), "pixels outside of objects are background"
    assert set(targets[:, 1].unique().tolist()) == {0, 1, 255}


def test_labels_of_several_classes_of_objects_are_their_numbers(tmp_path: Path) -> None:
    image = np.full((200, 200, 3), 200, np.uint8)
    image[46:54, 46:54], image[146:154, 146:154] = 0, 100
    write_image(tmp_path / "a.png", image)
    write_csv(tmp_path / "a.csv", [("class", "x", "y"), ("dark", 49.5, 49.5), ("grey", 149.5, 149.5)])
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "a.csv", "train", 0.25)]
    samples = open_data(write_csv(tmp_path / "manifest.csv", rows)).split("train")
    task = Detect("detect", (Class("dark", (0, 0, 0)), Class("grey", (0, 0, 0))), 0.25, uses_class_names=True)
    result = make_sampled_batches(task, samples, TrainingWindow(20, 8, 8), 8, 0)
    images, labels = next(result.load([0]))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    darkest = (images[:4].amin(dim=(1, 2, 3)) * 255).round()
    assert darkest.tolist() == [0, 0, 100, 100]
