"""Sampling: balance, where windows may lie, and that a step alone decides what is in it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath.data.dataset import DataError
from rotopath.data.sampling import (
    ClassWindows,
    GroupWindows,
    MiddleWindows,
    ObjectWindows,
    Rounds,
    Sampler,
    Shares,
    Windows,
)

THREE = ("fat", "stroma", "tumor")
CELLS = ("mitosis", "lymphocyte", "plasma cell")


def sizes(count: int, height: int, width: int) -> np.ndarray:
    return np.tile(np.array([[height, width]]), (count, 1))


def equal(one: Windows, other: Windows) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 40), st.integers(0, 5))
def test_rounds_bring_every_number_once_before_any_again(count: int, start: int, number: int, seed: int) -> None:
    sequence = Rounds(count, [seed]).take(0, start + number)
    assert Rounds(count, [seed]).take(start, number).tolist() == sequence[start:].tolist(), "any stretch of it"
    for first in range(0, len(sequence) - count + 1, count):
        assert sorted(sequence[first : first + count]) == list(range(count))


def tumor(**changes: object) -> ClassWindows:
    labels = np.array([0] * 50 + [1] * 10)
    settings = {"labels": labels, "names": ("normal", "tumor"), "sizes_px": sizes(60, 96, 100), "window_px": 88}
    return ClassWindows(**(settings | {"batch": 20, "seed": 3} | changes))  # type: ignore[arg-type]


def mitosis(**changes: object) -> ObjectWindows:
    points = [np.array([[64.0, 64.0], [10.0, 100.0]]), np.empty((0, 2)), np.array([[5.0, 5.0]])]
    settings = {"points": points, "names": ("mitosis",), "absent": 0, "sizes_px": sizes(3, 128, 128), "window_px": 68}
    settings |= {"batch": 16, "seed": 3, "beyond_px": 30} | changes
    labels = {"labels": [np.zeros(len(found), int) for found in settings["points"]]}  # type: ignore[attr-defined]
    return ObjectWindows(**(labels | settings))  # type: ignore[arg-type]


def nuclei(**changes: object) -> GroupWindows:
    settings = {"patients": ["a", "b", "b", "c"], "sizes_px": sizes(4, 100, 120), "window_px": 60, "target_px": 20}
    return GroupWindows(**(settings | {"batch": 16, "seed": 3} | changes))  # type: ignore[arg-type]


def three_classes(**changes: object) -> ClassWindows:
    """Of 24 images 12, 8 and 4 are of a class, in no order."""
    labels = np.array([0, 1, 0, 2, 0, 1] * 4)
    settings = {"labels": labels, "names": THREE, "sizes_px": sizes(24, 96, 96), "window_px": 88, "batch": 8, "seed": 3}
    return ClassWindows(**(settings | changes))  # type: ignore[arg-type]


def three_cells(**changes: object) -> ObjectWindows:
    """Two mitoses, four lymphocytes and a plasma cell, far apart, in two images; none in the third."""
    points = [np.array([[100.0 * i, 150.0] for i in range(1, 6)]), np.array([[200.0, 60.0], [60.0, 200.0]])]
    labels = [np.array([0, 1, 1, 2, 1]), np.array([1, 0])]
    settings = {"points": [*points, np.empty((0, 2))], "labels": [*labels, np.empty(0, int)], "names": CELLS}
    settings |= {"absent": 3, "sizes_px": sizes(3, 600, 300), "window_px": 68, "batch": 16, "seed": 3, "beyond_px": 30}
    return ObjectWindows(**(settings | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [tumor, mitosis, nuclei, three_classes, three_cells])
def test_a_step_alone_decides(make: type) -> None:
    first, second = make(), make()
    for step in (5, 0, 17, 5):
        assert equal(first.places(step), make().places(step)), "whatever was asked before"
    assert not equal(first.places(1), first.places(2))
    assert not equal(second.places(1), make(seed=4).places(1))


def test_tumor_windows_are_balanced_and_use_every_patch_alike() -> None:
    sampler = tumor()
    seen: Counter[int] = Counter()
    for step in range(15):
        places = sampler.places(step)
        assert places.labels.sum() == 10
        seen.update(places.images.tolist())
    assert {seen[i] for i in range(50)} == {3}
    assert {seen[i] for i in range(50, 60)} == {15}


def test_tumor_windows_lie_anywhere_inside() -> None:
    tops, lefts = np.concatenate([tumor().places(step)[1:3] for step in range(40)], axis=1)
    assert set(tops) == set(range(9))
    assert set(lefts) == set(range(13))


def test_a_patch_smaller_than_the_window_lies_in_its_middle() -> None:
    places = tumor(sizes_px=sizes(60, 80, 88)).places(0)
    assert set(places.tops) == {-4}
    assert set(places.lefts) == {0}


def test_mined_patches_fill_half_of_their_class() -> None:
    sampler = tumor(mined=np.array([3, 4, 7]))
    seen = Counter(image for step in range(30) for image in sampler.places(step).images.tolist())
    assert sum(seen[i] for i in (3, 4, 7)) >= 30 * 5
    assert sum(seen[i] for i in range(50, 60)) == 30 * 10, "the class without mined ones is as before"
    assert {seen[i] for i in range(50)} - {seen[3], seen[4], seen[7]} == {3}


def test_mitoses_are_in_the_middle_and_negatives_far_from_them() -> None:
    sampler = mitosis()
    points = sampler._points
    for step in range(30):
        places = sampler.places(step)
        assert places.labels.tolist() == [1] * 8 + [0] * 8
        middles = np.stack([places.tops, places.lefts], axis=1) + 33.5
        for image, middle, label in zip(places.images, middles, places.labels, strict=True):
            distance = min((np.hypot(*(middle - point)) for point in points[image]), default=np.inf)
            assert (distance <= np.hypot(4.5, 4.5)) if label else (distance > 30 - 1)
    assert {int(i) for step in range(30) for i in sampler.places(step).images[8:]} == {0, 1, 2}


def test_negatives_lie_in_fields_by_their_area() -> None:
    points = [np.array([[50.0, 50.0]]), np.empty((0, 2))]
    sampler = mitosis(points=points, sizes_px=np.array([[100, 100], [300, 300]]), batch=64)
    images = np.concatenate([sampler.places(step).images[32:] for step in range(40)])
    allowed = 100 * 100 - np.pi * 30**2
    assert (images == 0).mean() == pytest.approx(allowed / (allowed + 300 * 300), abs=0.03)


def test_every_mitosis_is_seen_alike() -> None:
    sampler = mitosis(jitter_px=0)
    seen: Counter[tuple[int, ...]] = Counter()
    for step in range(3):
        seen.update(tuple(map(int, place)) for place in np.stack(sampler.places(step)[:3], axis=1)[:8])
    assert seen == {(0, 31, 31): 8, (0, -23, 67): 8, (2, -28, -28): 8}


def test_mined_places_fill_half_of_the_negatives() -> None:
    sampler = mitosis(mined=np.array([[1, 50, 60], [1, 70, 80]]))
    places = sampler.places(0)
    assert list(zip(places.images[8:12], places.tops[8:12] + 33, places.lefts[8:12] + 33, strict=True)) in (
        [(1, 50, 60), (1, 70, 80)] * 2,
        [(1, 70, 80), (1, 50, 60)] * 2,
        [(1, 50, 60), (1, 70, 80), (1, 70, 80), (1, 50, 60)],
        [(1, 70, 80), (1, 50, 60), (1, 50, 60), (1, 70, 80)],
    )
    assert places.labels.tolist() == [1] * 8 + [0] * 8


def test_patients_are_balanced_whatever_their_number_of_images() -> None:
    sampler = nuclei(batch=15)
    for step in range(10):
        patients = Counter("abbc"[i] for i in sampler.places(step).images)
        assert patients == {"a": 5, "b": 5, "c": 5}
    seen = Counter(i for step in range(200) for i in sampler.places(step).images.tolist())
    assert abs(seen[1] - seen[2]) < 150


def test_targets_of_nuclei_reach_the_edges_and_stay_inside() -> None:
    tops, lefts = np.concatenate([nuclei().places(step)[1:3] for step in range(200)], axis=1) + 20
    assert (tops.min(), tops.max()) == (0, 80)
    assert (lefts.min(), lefts.max()) == (0, 100)


@pytest.mark.parametrize("batch", [3, 7, 8, 9])
def test_a_batch_that_classes_do_not_divide_gives_each_its_part_over_as_many_steps(batch: int) -> None:
    sampler = three_classes(batch=batch)
    for step in range(12):
        counts = np.bincount(sampler.places(step).labels, minlength=3)
        assert counts.sum() == batch
        assert np.ptp(counts) <= 1
        three = np.concatenate([sampler.places(step + k).labels for k in range(3)])
        assert np.bincount(three).tolist() == [batch] * 3, "from any step"


def test_every_image_of_a_class_is_used_as_often_as_the_next_whatever_is_left_over() -> None:
    """Eight windows a step: in nine steps each class has 24 of them, which is two, three and six times its images."""
    sampler = three_classes()
    labels = np.array([0, 1, 0, 2, 0, 1] * 4)
    seen = Counter(image for step in range(9) for image in sampler.places(step).images.tolist())
    for label, times in enumerate((2, 3, 6)):
        assert {seen[image] for image in np.flatnonzero(labels == label)} == {times}
    for step in range(9):
        places = sampler.places(step)
        assert np.array_equal(places.labels, labels[places.images])


@given(st.integers(1, 7), st.integers(0, 20), st.integers(0, 60))
def test_shares_of_a_batch_follow_from_the_step_alone(classes: int, more: int, step: int) -> None:
    batch = classes + more
    shares = Shares(batch, classes)
    assert sum(shares.of(which, step)[1] for which in range(classes)) == batch
    for which in range(classes):
        before = sum(shares.of(which, k)[1] for k in range(step))
        assert shares.of(which, step)[0] == before, "as many as all steps before it had"


def test_mined_images_fill_half_of_their_class_also_where_its_part_is_odd() -> None:
    sampler = three_classes(batch=9, mined=np.array([3, 0]))
    seen: Counter[int] = Counter()
    for step in range(8):
        places = sampler.places(step)
        assert np.bincount(places.labels).tolist() == [3, 3, 3]
        seen.update(places.images.tolist())
    assert seen[0] == 12 + 1, "half of 24, and as one of twelve images that share the other half"
    assert seen[3] == 12 + 3
    assert sum(seen[i] for i in (9, 15, 21)) == 9
    assert {seen[i] for i in (1, 5, 7, 11)} == {3}, "the class without mined ones is as before"


def test_objects_of_every_class_are_drawn_alike_and_negatives_are_none_of_them() -> None:
    """Eight of a batch are objects: 3, 3 and 2 in turn."""
    sampler = three_cells(jitter_px=0)
    of_each: list[Counter[tuple[int, ...]]] = [Counter(), Counter(), Counter()]
    for step in range(6):
        places = sampler.places(step)
        counts = np.bincount(places.labels, minlength=4)
        assert counts[3] == 8
        assert sorted(counts[:3]) == [2, 3, 3]
        assert (places.labels[8:] == 3).all()
        for image, top, left, label in np.stack(places, axis=1).tolist()[:8]:
            of_each[label][image, top + 33, left + 33] += 1
    assert of_each[0] == {(0, 100, 150): 8, (1, 60, 200): 8}
    assert of_each[1] == {(0, 200, 150): 4, (0, 300, 150): 4, (0, 500, 150): 4, (1, 200, 60): 4}
    assert of_each[2] == {(0, 400, 150): 16}


def test_negatives_are_far_from_objects_of_every_class() -> None:
    sampler = three_cells(beyond_px=45)
    for step in range(20):
        places = sampler.places(step)
        middles = np.stack([places.tops, places.lefts], axis=1) + 33.5
        for image, middle in zip(places.images[8:], middles[8:], strict=True):
            away = [np.hypot(*(middle - point)) for point in sampler._points[image]]
            assert min(away, default=np.inf) > 45 - 1
    assert {int(i) for step in range(20) for i in sampler.places(step).images[8:]} == {0, 1, 2}


def test_positions_that_were_mistaken_for_any_class_fill_half_of_the_negatives() -> None:
    places = three_cells(mined=np.array([[2, 50, 60]])).places(1)
    assert places.labels[8:].tolist() == [3] * 8
    assert (
        list(zip(places.images[8:12], places.tops[8:12] + 33, places.lefts[8:12] + 33, strict=True))
        == [(2, 50, 60)] * 4
    )


def test_middle_windows_bring_every_patch_once() -> None:
    sampler = MiddleWindows(np.array([0, 1, 1, 0, 1]), sizes(5, 96, 96), 88, batch=2)
    assert len(sampler) == 3
    places = [sampler.places(step) for step in range(3)]
    assert [p.images.tolist() for p in places] == [[0, 1], [2, 3], [4]]
    assert places[1].labels.tolist() == [1, 0]
    assert places[0].tops.tolist() == [4, 4]


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: mitosis(batch=7), "is even; got 7"),
        (lambda: three_cells(batch=7), "is even; got 7"),
        (lambda: tumor(batch=1), "at least one window of each of the 2 classes; got 1"),
        (lambda: three_classes(batch=2), "at least one window of each of the 3 classes; got 2"),
        (lambda: three_cells(batch=4), "at least one window of each of the 3 classes; got 2"),
        (lambda: tumor(labels=np.ones(60, int)), "have none of class 'normal'; every class is needed"),
        (lambda: three_classes(labels=np.zeros(24, int)), "have none of class 'stroma'"),
        (lambda: mitosis(points=[np.empty((0, 2))] * 3), "None of the 3 images of a split has a mitosis"),
        (
            lambda: three_cells(labels=[np.ones(5, int), np.zeros(2, int), np.empty(0, int)]),
            "None of the 3 images of a split has a plasma cell, but each split needs some",
        ),
        (
            lambda: mitosis(points=[np.array([[20.0, 20.0]])], sizes_px=sizes(1, 40, 40)).places(0),
            "next to no position over 30 px away from every object",
        ),
    ],
)
def test_what_cannot_be_sampled_is_said(make: Sampler, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        make()  # type: ignore[operator]
