"""Batches: the same bytes from every cache and any number of workers, resumed where they were left."""

import pickle
from pathlib import Path

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
from rotopath.evaluation import make_middle_batches, make_sampled_batches
from rotopath.images.files import UnreadableFileError
from rotopath.tasks import MITOSIS, NUCLEI, PAPER, TUMOR, Class, Detect, Frame, Segment

EVERYTHING = Augmentation(free_rotation=True, stain=0.1)
FRAMES = {"mitosis": Frame(68, 8, 8), "nuclei": Frame(60, 20, 1), "tumor": Frame(88, 8, 8)}
TASKS = tuple(FRAMES)


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
    return make_sampled_batches(PAPER[task], samples, FRAMES[task], **({"batch": 8, "seed": 0} | settings))  # type: ignore[arg-type]


def bytes_of(found: object) -> list[bytes]:
    return [part.contiguous().numpy().tobytes() for batch in found for part in batch]  # type: ignore[attr-defined]


@pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
@pytest.mark.parametrize("task", TASKS)
def test_same_seed_same_bytes_whatever_the_cache_and_the_workers(data: dict[str, Path], task: str) -> None:
    reference = bytes_of(batches(data, task, augmentation=EVERYTHING, cache="memory").load(range(6)))
    assert len(set(reference)) > 6
    for cache, workers in (("none", 0), ("none", 2), ("memory", 1), ("device", 0), ("auto", 0)):
        other = batches(data, task, augmentation=EVERYTHING, cache=cache).load(range(6), workers=workers)
        assert bytes_of(other) == reference, (cache, workers)
    other_seed = batches(data, task, augmentation=EVERYTHING, cache="memory", seed=1).load(range(6))
    assert bytes_of(other_seed) != reference


@pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
@pytest.mark.parametrize("task", TASKS)
def test_a_resumed_epoch_continues_with_the_batches_that_were_left(data: dict[str, Path], task: str) -> None:
    whole = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(10, 18)))
    begun = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(10, 13)))
    rest = bytes_of(batches(data, task, augmentation=EVERYTHING).load(range(13, 18), workers=2))
    assert begun + rest == whole


@pytest.mark.filterwarnings("ignore:stain normalisation left an image unchanged")
def test_targets_of_nuclei_are_the_middle_of_their_windows(data: dict[str, Path]) -> None:
    """Without augmentation the target is the map of parts at the place that was drawn."""
    found = batches(data, "nuclei", cache="memory")
    images, parts = next(found.load([4]))
    assert images.shape == (8, 3, 60, 60)
    assert parts.shape == (8, 20, 20)
    assert parts.dtype == torch.int64
    windows = found[4].windows
    assert torch.equal(parts, windows[:, 3, 20:40, 20:40].long())
    assert torch.equal(images, windows[:, :3].float() / 255)
    assert set(parts.unique().tolist()) == {0, 1, 2}


def test_every_batch_is_augmented_in_its_own_way(data: dict[str, Path]) -> None:
    found = batches(data, "tumor", augmentation=EVERYTHING)
    first, second = found[0].changes, found[1].changes
    assert not torch.equal(first.symmetries, second.symmetries)
    assert not torch.equal(first.brightness, second.brightness)


def test_a_free_rotation_turns_about_the_middle_of_the_window(data: dict[str, Path]) -> None:
    """More is cut out for the corners, around the same middle."""
    plain = batches(data, "mitosis", cache="memory")[3].windows
    wide = batches(data, "mitosis", cache="memory", augmentation=Augmentation(free_rotation=True))[3].windows
    margin = (wide.shape[-1] - 68) // 2
    assert margin == 15
    assert torch.equal(wide[..., margin : margin + 68, margin : margin + 68], plain)


def test_stains_are_normalised_for_nuclei_only() -> None:
    assert NUCLEI.reader == SampleReader(0.25, "macenko", NUCLEI.targets, 1)
    assert NUCLEI.reader.image_only == SampleReader(0.25, "macenko")
    assert MITOSIS.reader == SampleReader(0.25)
    assert TUMOR.reader == SampleReader(1.0)


def test_reading_data_leaves_random_numbers_alone(data: dict[str, Path]) -> None:
    before = torch.random.get_rng_state()
    list(batches(data, "tumor", augmentation=EVERYTHING).load(range(2)))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("workers", [0, 2])
def test_an_unreadable_file_ends_in_its_sentence(tmp_path: Path, workers: int) -> None:
    root = amida13(tmp_path, cases=[1], size=(90, 110))
    found = make_sampled_batches(MITOSIS, open_data(root).split("train"), FRAMES["mitosis"], 4, 0, cache="none")
    truncate(root / "mitoses_image_data_part_1/01/01.tif")
    with pytest.raises(UnreadableFileError) as caught:
        list(found.load(range(8), workers=workers))
    assert str(caught.value).startswith(f"{root}/mitoses_image_data_part_1/01/01.tif is damaged")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"batch": 0}, "A batch has 1 or more windows"),
        ({"seed": -1}, "a seed is 0 or more; got 8 and -1"),
        ({"mined": np.array([99])}, "name images that are not among the 8 of the training set"),
    ],
)
def test_impossible_settings_are_refused(data: dict[str, Path], settings: dict[str, object], sentence: str) -> None:
    samples = open_data(data["tumor"]).split("train")
    with pytest.raises(DataError, match=sentence):
        make_sampled_batches(TUMOR, samples, FRAMES["tumor"], **({"batch": 8, "seed": 0} | settings))  # type: ignore[arg-type]
    for task, frame in FRAMES.items():
        with pytest.raises(DataError, match="no images"):
            make_sampled_batches(PAPER[task], [], frame, 8, 0)


def test_batches_survive_pickling(data: dict[str, Path]) -> None:
    """Workers that are started anew, not forked, get them that way."""
    found = batches(data, "tumor", cache="none")
    copied = pickle.loads(pickle.dumps(found))
    assert bytes_of(copied.load(range(2))) == bytes_of(found.load(range(2)))


def test_middle_batches_cover_every_patch_once_in_order(data: dict[str, Path]) -> None:
    samples = open_data(data["tumor"]).split("train")
    found, steps = make_middle_batches(TUMOR, samples, 88, batch=3)
    images, labels = (torch.cat(parts) for parts in zip(*found.load(steps), strict=True))
    assert labels.tolist() == [("normal", "tumor").index(sample.label or "") for sample in samples]
    planes = [SampleReader(1.0).planes(sample)[4:92, 4:92] for sample in samples]
    assert torch.equal(images, torch.from_numpy(np.stack(planes)).permute(0, 3, 1, 2) / 255)


def test_windows_beyond_the_edge_are_mirrored_alike_in_all_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [pixels(7, 9), pixels(5, 6), pixels(1, 1)]
    places = Windows(*(np.array(x) for x in ([0, 1, 2, 0, 1], [-3, 2, -4, 40, -30], [4, -5, 2, -3, 3], [0] * 5)))
    expected = []
    for image, top, left in zip(places.images, places.tops, places.lefts, strict=True):
        padded = np.pad(images[image], ((60, 60), (60, 60), (0, 0)), mode="reflect")
        expected.append(padded[60 + top : 68 + top, 60 + left : 68 + left])
    sizes = np.array([image.shape[:2] for image in images])
    monkeypatch.setattr("rotopath.data.batches.COPIED_PIXELS", 50)
    for found in (HostPixels(images, sizes), DevicePixels(images, torch.device("cpu"))):
        windows = found.windows(places, 8)
        assert np.array_equal(windows.permute(0, 2, 3, 1).numpy(), np.stack(expected))
        assert windows.is_contiguous(memory_format=torch.channels_last)


def test_images_of_another_spacing_are_resampled_before_windows_are_cut(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / f"{i}.png", np.full((192, 192, 3), 40 * i, np.uint8))
    rows = [(f"{i}.png", i % 2, f"g{i}", "train", 0.5) for i in range(6)]
    write_csv(tmp_path / "manifest.csv", [("image", "label", "group", "split", "spacing"), *rows])
    samples = open_data(tmp_path).split("train")
    for cache in ("none", "memory", "device"):
        found = open_pixels(samples, SampleReader(1.0), cache, torch.device("cpu"))  # type: ignore[arg-type]
        assert found.sizes_px.tolist() == [[96, 96]] * 6
    windows = make_sampled_batches(TUMOR, samples, FRAMES["tumor"], 4, 0)[0].windows
    assert windows.shape == (4, 3, 88, 88)
    assert set(windows.unique().tolist()) <= {0, 40, 80, 120, 160, 200}


def test_decoded_images_are_dropped_when_they_grow_too_many(
    data: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rotopath.data.batches.KEPT_BYTES", 3 * 96 * 96 * 3)
    images = DecodedOnDemand(open_data(data["tumor"]).split("train"), SampleReader(1.0))
    first = images[0].copy()
    for i in (1, 2, 3, 4, 2):
        images[i]
    assert len(images._kept) == 3
    assert np.array_equal(images[0], first)


def test_the_cache_is_chosen_by_size() -> None:
    cpu = torch.device("cpu")
    assert choose_cache(10**6, cpu) == "memory"
    assert choose_cache(10**15, cpu) == "none"


def test_an_unknown_cache_is_refused(data: dict[str, Path]) -> None:
    with pytest.raises(DataError, match="There is no cache 'disk'; choose from auto, device, memory, none"):
        batches(data, "tumor", cache="disk")


def test_objects_of_several_classes_have_two_target_maps(tmp_path: Path) -> None:
    """The parts of objects, and their classes, move with the image; outside of objects the class is not known."""
    labels = np.zeros((70, 70), np.uint16)
    labels[10:30, 10:30], labels[40:60, 35:60] = 1, 2
    image = np.full((70, 70, 3), 255, np.uint8)
    image[labels == 1], image[labels == 2] = 100, 0
    write_image(tmp_path / "map.png", labels)
    write_csv(tmp_path / "map.csv", [("object", "class"), (1, "b"), (2, "a")])
    write_image(tmp_path / "a.png", image)
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "map.png", "train", 0.25)]
    samples = open_data(write_csv(tmp_path / "manifest.csv", rows)).split("train")
    task = Segment("segment", (Class("a", (0, 0, 0)), Class("b", (0, 0, 0))), 0.25, typed=True)
    turned = Augmentation(brightness=0.0)
    found = make_sampled_batches(task, samples, Frame(60, 20, 1), 8, 0, augmentation=turned)
    images, targets = (torch.cat(parts) for parts in zip(*found.load(range(4)), strict=True))
    assert targets.shape == (32, 2, 20, 20)
    assert targets.dtype == torch.int64
    middle = (images[:, 0, 20:40, 20:40] * 255).round()
    expected = torch.full_like(targets[:, 1], 255)
    expected[middle == 0], expected[middle == 100] = 0, 1
    assert torch.equal(targets[:, 1], expected)
    assert torch.equal(targets[:, 0] == 2, expected == 255), "what is no object is background"
    assert set(targets[:, 1].unique().tolist()) == {0, 1, 255}


def test_labels_of_several_classes_of_objects_are_their_numbers(tmp_path: Path) -> None:
    image = np.full((200, 200, 3), 200, np.uint8)
    image[46:54, 46:54], image[146:154, 146:154] = 0, 100
    write_image(tmp_path / "a.png", image)
    write_csv(tmp_path / "a.csv", [("class", "x", "y"), ("dark", 49.5, 49.5), ("grey", 149.5, 149.5)])
    rows = [("image", "annotation", "split", "spacing"), ("a.png", "a.csv", "train", 0.25)]
    samples = open_data(write_csv(tmp_path / "manifest.csv", rows)).split("train")
    task = Detect("detect", (Class("dark", (0, 0, 0)), Class("grey", (0, 0, 0))), 0.25, typed=True)
    found = make_sampled_batches(task, samples, Frame(20, 8, 8), 8, 0)
    images, labels = next(found.load([0]))
    assert labels.tolist() == [0, 0, 1, 1, 2, 2, 2, 2]
    darkest = (images[:4].amin(dim=(1, 2, 3)) * 255).round()
    assert darkest.tolist() == [0, 0, 100, 100]
