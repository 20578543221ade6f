"""Sampling: balance, where windows may lie, and that a step alone decides what is in it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rotopath.data.collection import DataError
from rotopath.data.sampling import MiddleWindows, MitosisWindows, NucleiWindows, Places, Rounds, Sampler, TumorWindows


def sizes(count: int, height: int, width: int) -> np.ndarray:
    return np.tile(np.array([[height, width]]), (count, 1))


def equal(one: Places, other: Places) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@given(st.integers(1, 20), st.integers(0, 60), st.integers(0, 40), st.integers(0, 5))
def test_rounds_bring_every_number_once_before_any_again(count: int, start: int, number: int, seed: int) -> None:
    sequence = Rounds(count, [seed]).take(0, start + number)
    assert Rounds(count, [seed]).take(start, number).tolist() == sequence[start:].tolist(), "any stretch of it"
    for first in range(0, len(sequence) - count + 1, count):
        assert sorted(sequence[first : first + count]) == list(range(count))


def tumor(**changes: object) -> TumorWindows:
    labels = np.array([0] * 50 + [1] * 10)
    settings = {"labels": labels, "sizes_px": sizes(60, 96, 100), "window_px": 88, "batch": 20, "seed": 3}
    return TumorWindows(**(settings | changes))  # type: ignore[arg-type]


def mitosis(**changes: object) -> MitosisWindows:
    points = [np.array([[64.0, 64.0], [10.0, 100.0]]), np.empty((0, 2)), np.array([[5.0, 5.0]])]
    settings = {"points": points, "sizes_px": sizes(3, 128, 128), "window_px": 68, "batch": 16, "seed": 3}
    return MitosisWindows(**(settings | changes))  # type: ignore[arg-type]


def nuclei(**changes: object) -> NucleiWindows:
    settings = {"patients": ["a", "b", "b", "c"], "sizes_px": sizes(4, 100, 120), "window_px": 60, "target_px": 20}
    return NucleiWindows(**(settings | {"batch": 16, "seed": 3} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [tumor, mitosis, nuclei])
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
        (lambda: tumor(batch=7), "is even; got 7"),
        (lambda: mitosis(batch=7), "is even; got 7"),
        (lambda: tumor(labels=np.ones(60, int)), "have none of class 0"),
        (lambda: mitosis(points=[np.empty((0, 2))] * 3), "None of the 3 fields of a split has a mitosis"),
        (
            lambda: mitosis(points=[np.array([[20.0, 20.0]])], sizes_px=sizes(1, 40, 40)).places(0),
            "next to no place over 30 px away from every mitosis",
        ),
    ],
)
def test_what_cannot_be_sampled_is_said(make: Sampler, sentence: str) -> None:
    with pytest.raises(DataError, match=sentence):
        make()  # type: ignore[operator]
