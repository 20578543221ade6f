"""Samplers: balance, positions of windows, and batches that depend on seed and step only."""

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath.data.dataset import DataError
from rotopath.data.sampling import (
    CenterSampler,
    ClassBalancedSampler,
    ClassQuotas,
    EndlessShuffle,
    ImageSampler,
    ObjectBalancedSampler,
    ObjectCenteredSampler,
    ObjectPositions,
    PatientBalancedSampler,
    Sampler,
    SamplerSettings,
    Windows,
)

THREE = ("fat", "stroma", "tumor")
CELLS = ("mitosis", "lymphocyte", "plasma cell")
MITOSES = (np.array([[64.0, 64.0], [10.0, 100.0]]), np.empty((0, 2)), np.array([[5.0, 5.0]]))
CELL_POSITIONS = (
    np.array([[100.0 * i, 150.0] for i in range(1, 6)]),
    np.array([[200.0, 60.0], [60.0, 200.0]]),
    np.empty((0, 2)),
)
CELL_CLASSES = (np.array([0, 1, 1, 2, 1]), np.array([1, 0]), np.empty(0, int))


def sizes(count: int, height: int, width: int) -> np.ndarray:
    return np.tile(np.array([[height, width]]), (count, 1))


def equal(first: Windows, second: Windows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(first, second, strict=True))


def patches(
    sizes_px: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    batch: int = 20,
    seed: int = 3,
    mined: np.ndarray | None = None,
) -> ClassBalancedSampler:
    """Return a sampler of 50 patches without tumor and 10 with tumor."""
    settings = SamplerSettings(sizes(60, 96, 100) if sizes_px is None else sizes_px, 88, batch, seed)
    labels = np.array([0] * 50 + [1] * 10) if labels is None else labels
    return ClassBalancedSampler(labels, ("normal", "tumor"), settings, mined)


def mitoses(
    positions: Sequence[np.ndarray] = MITOSES,
    sizes_px: np.ndarray | None = None,
    batch: int = 16,
    seed: int = 3,
    **options: object,
) -> ObjectBalancedSampler:
    settings = SamplerSettings(sizes(3, 128, 128) if sizes_px is None else sizes_px, 68, batch, seed)
    classes = [np.zeros(len(points), int) for points in positions]
    objects = ObjectPositions(positions, classes, ("mitosis",), absent_label=0, clearance_px=30)
    return ObjectBalancedSampler(objects, settings, **options)  # type: ignore[arg-type]


def nuclei(batch: int = 16, seed: int = 3) -> PatientBalancedSampler:
    return PatientBalancedSampler(["a", "b", "b", "c"], SamplerSettings(sizes(4, 100, 120), 60, batch, seed), 20)


def three_classes(
    labels: np.ndarray | None = None, batch: int = 8, seed: int = 3, mined: np.ndarray | None = None
) -> ClassBalancedSampler:
    """Return a sampler of 24 images: 12, 8 and 4 of the classes, in mixed order."""
    labels = np.array([0, 1, 0, 2, 0, 1] * 4) if labels is None else labels
    return ClassBalancedSampler(labels, THREE, SamplerSettings(sizes(24, 96, 96), 88, batch, seed), mined)


def three_cells(
    classes: Sequence[np.ndarray] = CELL_CLASSES,
    batch: int = 16,
    seed: int = 3,
    clearance_px: float = 30,
    **options: object,
) -> ObjectBalancedSampler:
    """Return a sampler of two mitoses, four lymphocytes and a plasma cell in two images; a third image has none."""
    objects = ObjectPositions(CELL_POSITIONS, classes, CELLS, absent_label=3, clearance_px=clearance_px)
    return ObjectBalancedSampler(objects, SamplerSettings(sizes(3, 600, 300), 68, batch, seed), **options)  # type: ignore[arg-type]


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 40), st.integers(0, 5))
def test_endless_shuffle_contains_every_number_once_per_pass(count: int, start: int, number: int, seed: int) -> None:
    sequence = EndlessShuffle(count, [seed]).take(0, start + number)
    assert EndlessShuffle(count, [seed]).take(start, number).tolist() == sequence[start:].tolist(), (
        "any section of the sequence"
    )
    for first in range(0, len(sequence) - count + 1, count):
        assert sorted(sequence[first : first + count]) == list(range(count))


@pytest.mark.parametrize("make", [patches, mitoses, nuclei, three_classes, three_cells])
def test_windows_depend_on_seed_and_step_only(make: type) -> None:
    first, second = make(), make()
    for step in (5, 0, 17, 5):
        assert equal(first.draw(step), make().draw(step)), "earlier calls do not matter"
    assert not equal(first.draw(1), first.draw(2))
    assert not equal(second.draw(1), make(seed=4).draw(1))


@pytest.mark.parametrize(
    ("make", "options", "digest"),
    [
        (patches, {}, "9d7a650f06a2d5b1"),
        (patches, {"mined": np.array([3, 4, 7])}, "b22b7610d024ef96"),
        (mitoses, {}, "d0aec17398af0351"),
        (mitoses, {"mined": np.array([[1, 50, 60], [1, 70, 80]])}, "c816a4b240302f8c"),
        (nuclei, {}, "fe11872b56544b56"),
        (three_classes, {}, "b6b57a8101000c0b"),
        (three_cells, {}, "0ea93a76a6256d0e"),
    ],
)
def test_known_windows_stay_the_same(make: Callable[..., Sampler], options: dict[str, object], digest: str) -> None:
    """A change here would silently change every training run."""
    sampler = make(**options)
    content = b"".join(np.asarray(part, np.int64).tobytes() for step in (0, 1, 2, 100) for part in sampler.draw(step))
    assert hashlib.sha256(content).hexdigest()[:16] == digest


def test_classes_are_balanced_and_patches_used_equally_often() -> None:
    sampler = patches()
    uses: Counter[int] = Counter()
    for step in range(15):
        windows = sampler.draw(step)
        assert windows.labels.sum() == 10
        uses.update(windows.images.tolist())
    assert {uses[i] for i in range(50)} == {3}
    assert {uses[i] for i in range(50, 60)} == {15}


def test_windows_may_be_anywhere_in_a_patch() -> None:
    tops, lefts = np.concatenate([patches().draw(step)[1:3] for step in range(40)], axis=1)
    assert set(tops) == set(range(9))
    assert set(lefts) == set(range(13))


def test_patch_smaller_than_the_window_is_centered() -> None:
    windows = patches(sizes_px=sizes(60, 80, 88)).draw(0)
    assert set(windows.tops) == {-4}
    assert set(windows.lefts) == {0}


def test_mined_patches_fill_half_of_their_class() -> None:
    sampler = patches(mined=np.array([3, 4, 7]))
    uses = Counter(image for step in range(30) for image in sampler.draw(step).images.tolist())
    assert sum(uses[i] for i in (3, 4, 7)) >= 30 * 5
    assert sum(uses[i] for i in range(50, 60)) == 30 * 10, "the class without mined patches is not affected"
    assert {uses[i] for i in range(50)} - {uses[3], uses[4], uses[7]} == {3}


def test_objects_are_centered_and_negatives_are_away_from_them() -> None:
    sampler = mitoses()
    for step in range(30):
        windows = sampler.draw(step)
        assert windows.labels.tolist() == [1] * 8 + [0] * 8
        centers = np.stack([windows.tops, windows.lefts], axis=1) + 33.5
        for image, center, label in zip(windows.images, centers, windows.labels, strict=True):
            distance = min((np.hypot(*(center - point)) for point in MITOSES[image]), default=np.inf)
            assert (distance <= np.hypot(4.5, 4.5)) if label else (distance > 30 - 1)
    assert {int(i) for step in range(30) for i in sampler.draw(step).images[8:]} == {0, 1, 2}


def test_negatives_are_drawn_in_proportion_to_image_areas() -> None:
    points = [np.array([[50.0, 50.0]]), np.empty((0, 2))]
    sampler = mitoses(points, sizes_px=np.array([[100, 100], [300, 300]]), batch=64)
    images = np.concatenate([sampler.draw(step).images[32:] for step in range(40)])
    allowed = 100 * 100 - np.pi * 30**2
    assert (images == 0).mean() == pytest.approx(allowed / (allowed + 300 * 300), abs=0.03)


def test_objects_are_used_equally_often() -> None:
    sampler = mitoses(jitter_px=0)
    uses: Counter[tuple[int, ...]] = Counter()
    for step in range(3):
        uses.update(tuple(map(int, position)) for position in np.stack(sampler.draw(step)[:3], axis=1)[:8])
    assert uses == {(0, 31, 31): 8, (0, -23, 67): 8, (2, -28, -28): 8}


def test_mined_positions_fill_half_of_the_negatives() -> None:
    sampler = mitoses(mined=np.array([[1, 50, 60], [1, 70, 80]]))
    windows = sampler.draw(0)
    assert list(zip(windows.images[8:12], windows.tops[8:12] + 33, windows.lefts[8:12] + 33, strict=True)) in (
        [(1, 50, 60), (1, 70, 80)] * 2,
        [(1, 70, 80), (1, 50, 60)] * 2,
        [(1, 50, 60), (1, 70, 80), (1, 70, 80), (1, 50, 60)],
        [(1, 70, 80), (1, 50, 60), (1, 50, 60), (1, 70, 80)],
    )
    assert windows.labels.tolist() == [1] * 8 + [0] * 8


def test_patients_are_balanced_for_any_number_of_images() -> None:
    sampler = nuclei(batch=15)
    for step in range(10):
        patients = Counter("abbc"[i] for i in sampler.draw(step).images)
        assert patients == {"a": 5, "b": 5, "c": 5}
    uses = Counter(i for step in range(200) for i in sampler.draw(step).images.tolist())
    assert abs(uses[1] - uses[2]) < 150


def test_targets_reach_the_edges_of_images_and_stay_inside() -> None:
    tops, lefts = np.concatenate([nuclei().draw(step)[1:3] for step in range(200)], axis=1) + 20
    assert (tops.min(), tops.max()) == (0, 80)
    assert (lefts.min(), lefts.max()) == (0, 100)


@pytest.mark.parametrize("batch", [3, 7, 8, 9])
def test_remainder_of_a_batch_is_balanced_over_several_steps(batch: int) -> None:
    sampler = three_classes(batch=batch)
    for step in range(12):
        counts = np.bincount(sampler.draw(step).labels, minlength=3)
        assert counts.sum() == batch
        assert np.ptp(counts) <= 1
        three = np.concatenate([sampler.draw(step + k).labels for k in range(3)])
        assert np.bincount(three).tolist() == [batch] * 3, "beginning with any step"


def test_images_of_a_class_are_used_equally_often_with_a_remainder() -> None:
    """Eight windows per step: in nine steps each class has 24, number is two, three and six times its images."""
    sampler = three_classes()
    labels = np.array([0, 1, 0, 2, 0, 1] * 4)
    uses = Counter(image for step in range(9) for image in sampler.draw(step).images.tolist())
    for label, times in enumerate((2, 3, 6)):
        assert {uses[image] for image in np.flatnonzero(labels == label)} == {times}
    for step in range(9):
        windows = sampler.draw(step)
        assert np.array_equal(windows.labels, labels[windows.images])


@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 60))
def test_class_quotas_depend_on_the_step_only(classes: int, more: int, step: int) -> None:
    batch = classes + more
    quotas = ClassQuotas(batch, classes)
    assert sum(quotas.at(number, step)[1] for number in range(classes)) == batch
    for number in range(classes):
        before = sum(quotas.at(number, k)[1] for k in range(step))
        assert quotas.at(number, step)[0] == before, "the sum over all earlier steps"


def test_mined_images_fill_half_of_their_class_if_its_quota_is_odd() -> None:
    sampler = three_classes(batch=9, mined=np.array([3, 0]))
    uses: Counter[int] = Counter()
    for step in range(8):
        windows = sampler.draw(step)
        assert np.bincount(windows.labels).tolist() == [3, 3, 3]
        uses.update(windows.images.tolist())
    assert uses[0] == 12 + 1, "half of 24, and a twelfth of the other half"
    assert uses[3] == 12 + 3
    assert sum(uses[i] for i in (9, 15, 21)) == 9
    assert {uses[i] for i in (1, 5, 7, 11)} == {3}, "the class without mined patches is not affected"


def test_objects_of_several_classes_are_balanced() -> None:
    """A batch has eight objects: 3, 3 and 2 of the classes, in changing order."""
    sampler = three_cells(jitter_px=0)
    by_class: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    for step in range(6):
        windows = sampler.draw(step)
        counts = np.bincount(windows.labels, minlength=4)
        assert counts[3] == 8
        assert sorted(counts[:3]) == [2, 3, 3]
        assert (windows.labels[8:] == 3).all()
        for image, top, left, label in np.stack(windows, axis=1).tolist()[:8]:
            by_class[label][image, top + 33, left + 33] += 1
    assert by_class[0] == {(0, 100, 150): 8, (1, 60, 200): 8}
    assert by_class[1] == {(0, 200, 150): 4, (0, 300, 150): 4, (0, 500, 150): 4, (1, 200, 60): 4}
    assert by_class[2] == {(0, 400, 150): 16}


def test_negatives_are_away_from_objects_of_every_class() -> None:
    sampler = three_cells(clearance_px=45)
    for step in range(20):
        windows = sampler.draw(step)
        centers = np.stack([windows.tops, windows.lefts], axis=1) + 33.5
        for image, center in zip(windows.images[8:], centers[8:], strict=True):
            away = [np.hypot(*(center - point)) for point in CELL_POSITIONS[image]]
            assert min(away, default=np.inf) > 45 - 1
    assert {int(i) for step in range(20) for i in sampler.draw(step).images[8:]} == {0, 1, 2}


def test_mined_positions_fill_half_of_the_negatives_of_several_classes() -> None:
    windows = three_cells(mined=np.array([[2, 50, 60]])).draw(1)
    assert windows.labels[8:].tolist() == [3] * 8
    assert (
        list(zip(windows.images[8:12], windows.tops[8:12] + 33, windows.lefts[8:12] + 33, strict=True))
        == [(2, 50, 60)] * 4
    )


def test_center_sampler_covers_every_patch_once() -> None:
    sampler = CenterSampler(np.array([0, 1, 1, 0, 1]), sizes(5, 96, 96), 88, batch=2)
    assert len(sampler) == 3
    windows = [sampler.draw(step) for step in range(3)]
    assert [batch.images.tolist() for batch in windows] == [[0, 1], [2, 3], [4]]
    assert windows[1].labels.tolist() == [1, 0]
    assert windows[0].tops.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: mitoses(batch=7), r"batch size \(`batch`\) is 7; expected an even number"),
        (lambda: three_cells(batch=7), r"batch size \(`batch`\) is 7; expected an even number"),
        (lambda: patches(batch=1), "1 windows for 2 classes; increase `batch`"),
        (lambda: three_classes(batch=2), "2 windows for 3 classes; increase `batch`"),
        (lambda: three_cells(batch=4), "2 windows for 3 classes; increase `batch`"),
        (lambda: patches(labels=np.ones(60, int)), "No image of the training set has the class 'normal'; add images"),
        (lambda: three_classes(labels=np.zeros(24, int)), "No image of the training set has the class 'stroma'"),
        (lambda: mitoses([np.empty((0, 2))] * 3), "No mitosis is annotated in the 3 images of a split"),
        (
            lambda: three_cells([np.ones(5, int), np.zeros(2, int), np.empty(0, int)]),
            "No plasma cell is annotated in the 3 images of a split, but training and validation need",
        ),
        (
            lambda: mitoses([np.array([[20.0, 20.0]])], sizes(1, 40, 40)).draw(0),
            "need a center more than 30 px away from every object",
        ),
    ],
)
def test_impossible_samplers_are_refused(make: Sampler, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make()  # type: ignore[operator]


# Samplers that a recipe can choose


def test_the_natural_sampler_draws_every_image_equally_often() -> None:
    labels = np.array([0, 1, 0, 2, 0, 1] * 4)
    sampler = ImageSampler(labels, SamplerSettings(sizes(24, 96, 96), 88, 8, 3, "natural"))
    drawn = [sampler.draw(step) for step in range(6)]
    images = np.concatenate([windows.images for windows in drawn])
    assert np.bincount(images).tolist() == [2] * 24
    assert np.array_equal(np.concatenate([windows.labels for windows in drawn]), labels[images])
    assert np.array_equal(sampler.draw(4).images, drawn[4].images), "the order of calls does not matter"
    mined = ImageSampler(labels, SamplerSettings(sizes(24, 96, 96), 88, 8, 3), mined=np.array([3, 9]))
    assert (np.isin(mined.draw(0).images, [3, 9])).sum() >= 4


def test_the_natural_sampler_draws_every_object_equally_often() -> None:
    objects = ObjectPositions(CELL_POSITIONS, CELL_CLASSES, CELLS, absent_label=3, clearance_px=30)
    counts = np.bincount(np.concatenate(CELL_CLASSES), minlength=3)
    sampler = ObjectBalancedSampler(objects, SamplerSettings(sizes(3, 600, 300), 68, 2 * counts.sum(), 3, "natural"))
    for step in range(3):
        assert np.bincount(sampler.draw(step).labels).tolist() == [*counts, counts.sum()]


def test_windows_without_an_object_have_no_center_in_an_ignored_area() -> None:
    mask = np.zeros((128, 128), bool)
    mask[:, :100] = True
    positions = [np.array([[64.0, 64.0]]), np.empty((0, 2))]
    classes = [np.zeros(len(points), int) for points in positions]
    settings = SamplerSettings(sizes(2, 128, 128), 68, 64, 3)
    for ignored, is_possible in (([None, mask], False), ((), True)):
        objects = ObjectPositions(positions, classes, ("mitosis",), 0, 30, ignored)
        windows = ObjectBalancedSampler(objects, settings).draw(0)
        away = (windows.labels == 0) & (windows.images == 1)
        centers = windows.lefts[away] + 34
        assert away.sum() > 2
        assert (centers < 99).any() == is_possible


def test_half_of_the_windows_show_objects_of_every_class_equally_often() -> None:
    centers = np.array([[0, 5, 5], [0, 90, 40], [1, 50, 60], [1, 99, 119], [1, 20, 20]], float)
    classes = np.array([0, 0, 0, 0, 1])
    settings = SamplerSettings(sizes(2, 100, 120), 60, 8, 3, "balanced")
    others = PatientBalancedSampler(["a", "b"], settings, 20)
    sampler = ObjectCenteredSampler(others, centers, classes, ("x", "y"), settings, 20)
    rare = 0
    for step in range(20):
        windows = sampler.draw(step)
        assert np.array_equal(windows.tops[4:], others.draw(step).tops[4:])
        tops, lefts = windows.tops[:4] + 20, windows.lefts[:4] + 20  # of the target regions
        assert (tops >= 0).all()
        assert (tops <= 80).all()
        assert (lefts <= 100).all()
        for image, top, left in zip(windows.images[:4], tops, lefts, strict=True):
            inside = (centers[:, 0] == image) & (abs(centers[:, 1] - top - 9.5) <= 10.5)
            assert (inside & (abs(centers[:, 2] - left - 9.5) <= 10.5)).any()
        rare += (windows.images[:4] == 1)[2:].sum()
    assert rare == 40, "two of four windows of every step show the only object of the class y"
    with pytest.raises(DataError, match="No z is annotated"):
        ObjectCenteredSampler(others, centers, classes, ("x", "y", "z"), settings, 20)
