"""Seams: regions that tiles cut apart come out whole, once, with their own pixels."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from rotopath.inference.tiling import Region, Seams, Span

NOTHING = (0.0, 1.0)


def cut(size: int, step: int) -> list[Span]:
    return [Span(start, min(start + step, size)) for start in range(0, size, step)]


def put_together(mask: np.ndarray, values: np.ndarray, step: int, folder: Path) -> list[frozenset[tuple[int, int]]]:
    """The pixels of all regions, as tiles and seams tell of them."""
    seams = Seams(mask.shape, NOTHING, folder)
    found: list[Region] = []
    for rows in cut(mask.shape[0], step):
        for columns in cut(mask.shape[1], step):
            place = (slice(*rows), slice(*columns))
            whole = seams.take(rows, columns, mask[place], values[:, *place])
            inside = np.where(whole, values[:, *place], np.array(NOTHING, np.float32)[:, None, None])
            found.append(Region(rows.start, columns.start, inside))
    found += seams.finish()
    regions = []
    for one in found:
        labels, count = ndimage.label(one.values[1] < 1)
        for number in range(1, count + 1):
            here = np.argwhere(labels == number)
            places = here + np.array([one.top, one.left])
            assert np.array_equal(one.values[:, *here.T], values[:, *places.T]), "a region has its own values"
            regions.append(frozenset(map(tuple, places.tolist())))
    return regions


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.integers(1, 23), st.integers(1, 9), st.floats(0.2, 0.8), st.integers(0, 10_000))
def test_regions_are_the_same_however_they_are_cut(
    height: int, width: int, step: int, density: float, seed: int
) -> None:
    import tempfile

    generator = np.random.default_rng(seed)
    mask = generator.random((height, width)) < density
    values = generator.random((2, height, width)).astype(np.float32)
    values[1, ~mask] = 1
    labels, count = ndimage.label(mask)
    expected = {frozenset(map(tuple, np.argwhere(labels == number).tolist())) for number in range(1, count + 1)}
    with tempfile.TemporaryDirectory() as folder:
        regions = put_together(mask, values, step, Path(folder))
    assert len(regions) == len(set(regions)), "each once"
    assert set(regions) == expected


def test_a_tile_that_is_left_out_ends_what_touches_it(tmp_path: Path) -> None:
    seams = Seams((4, 8), NOTHING, tmp_path)
    values = np.zeros((2, 4, 4), np.float32)
    mask = np.zeros((4, 4), bool)
    mask[1, 2:] = True
    whole = seams.take(Span(0, 4), Span(0, 4), mask, np.where(mask, values, 1))
    assert not whole.any(), "it might go on"
    (region,) = seams.finish()
    assert (region.top, region.left, region.values.shape) == (1, 2, (2, 1, 2))


def test_what_is_too_large_stays_in_its_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of 2 × 12 px over three tiles, and a short one of 2 × 2 over two of them."""
    mask = np.zeros((7, 12), bool)
    mask[1:3], mask[4:6, 3:5] = True, True
    values = np.stack([mask, ~mask]).astype(np.float32)
    monkeypatch.setattr("rotopath.inference.tiling.LARGEST_PX", 23)
    seams = Seams(mask.shape, NOTHING, tmp_path)
    for columns in cut(12, 4):
        seams.take(Span(0, 7), columns, mask[:, slice(*columns)], values[:, :, slice(*columns)])
    places = [(one.top, one.left, *one.values.shape[1:]) for one in seams.finish()]
    assert sorted(places) == [(1, 0, 2, 4), (1, 4, 2, 4), (1, 8, 2, 4), (4, 3, 2, 2)]
    monkeypatch.setattr("rotopath.inference.tiling.LARGEST_PX", 24)
    assert sorted((one.left, one.values.shape) for one in seams.finish()) == [(0, (2, 2, 12)), (3, (2, 2, 2))]
