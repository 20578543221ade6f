"""Regions that tiles cut are merged: each comes out complete, once, with its own pixels."""

import pickle
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from rotopath.inference.tiling import Span
from rotopath.tasks.segment import Rectangle, Seams, split_tile

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing them would take minutes

BACKGROUND = (0.0, 1.0)


def cut(size: int, step: int) -> list[Span]:
    return [Span(start, min(start + step, size)) for start in range(0, size, step)]


def add_tile(
    seams: Seams, size: tuple[int, ...], folder: Path, rows: Span, columns: Span, mask: np.ndarray, values: np.ndarray
) -> np.ndarray:
    """Return the mask of the complete regions of a tile."""
    number = len(list(folder.iterdir()))
    complete, parts = split_tile(size, folder, number, (rows, columns), mask, values)
    seams.join(pickle.loads(pickle.dumps(parts)))  # another process may have split the tile
    return complete


def find_regions(mask: np.ndarray, values: np.ndarray, step: int, folder: Path) -> list[frozenset[tuple[int, int]]]:
    """Return the pixels of all regions, found in tiles of `step` pixels a side."""
    seams = Seams(BACKGROUND, folder)
    found: list[Rectangle] = []
    for rows in cut(mask.shape[0], step):
        for columns in cut(mask.shape[1], step):
            tile = (slice(*rows), slice(*columns))
            complete = add_tile(seams, mask.shape, folder, rows, columns, mask[tile], values[:, *tile])
            inside = np.where(complete, values[:, *tile], np.array(BACKGROUND, np.float32)[:, None, None])
            found.append(Rectangle(rows.start, columns.start, inside))
    found += seams.finish()
    regions = []
    for region in found:
        labels, count = ndimage.label(region.values[1] < 1)
        for number in range(1, count + 1):
            pixels = np.argwhere(labels == number)
            positions = pixels + np.array([region.top, region.left])
            assert np.array_equal(region.values[:, *pixels.T], values[:, *positions.T]), "a region has its own values"
            regions.append(frozenset(map(tuple, positions.tolist())))
    return regions


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 23), st.integers(1, 23), st.integers(1, 9), st.floats(0.2, 0.8), st.integers(0, 10_000))
def test_regions_do_not_depend_on_the_tiles(height: int, width: int, step: int, density: float, seed: int) -> None:
    import tempfile

    generator = np.random.default_rng(seed)
    mask = generator.random((height, width)) < density
    values = generator.random((2, height, width)).astype(np.float32)
    values[1, ~mask] = 1
    labels, count = ndimage.label(mask)
    expected = {frozenset(map(tuple, np.argwhere(labels == number).tolist())) for number in range(1, count + 1)}
    with tempfile.TemporaryDirectory() as folder:
        regions = find_regions(mask, values, step, Path(folder))
    assert len(regions) == len(set(regions)), "each region comes out once"
    assert set(regions) == expected


def test_a_region_ends_at_a_tile_that_is_skipped(tmp_path: Path) -> None:
    seams = Seams(BACKGROUND, tmp_path)
    values = np.zeros((2, 4, 4), np.float32)
    mask = np.zeros((4, 4), bool)
    mask[1, 2:] = True
    complete = add_tile(seams, (4, 8), tmp_path, Span(0, 4), Span(0, 4), mask, np.where(mask, values, 1))
    assert not complete.any(), "the region might continue in the next tile"
    (region,) = seams.finish()
    assert (region.top, region.left, region.values.shape) == (1, 2, (2, 1, 2))


def test_a_region_as_large_as_the_slide_is_never_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.tasks.segment.LARGEST_PX", 64**2)
    side, values = 512, np.zeros((2, 512, 512), np.float32)
    seams = Seams(BACKGROUND, tmp_path)
    for rows in cut(side, 64):
        for columns in cut(side, 64):
            tile = values[:, slice(*rows), slice(*columns)]
            add_tile(seams, (side, side), tmp_path, rows, columns, tile[1] < 1, tile)
    tracemalloc.start()
    assert sum(region.values[0].size for region in seams.finish()) == side**2
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * values.nbytes, "16 of the 64 tiles are cached"


def test_regions_that_would_be_too_large_stay_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bar of 2 × 12 px across three tiles, and a short one of 2 × 2 px across two of them."""
    mask = np.zeros((7, 12), bool)
    mask[1:3], mask[4:6, 3:5] = True, True
    values = np.stack([mask, ~mask]).astype(np.float32)
    monkeypatch.setattr("rotopath.tasks.segment.LARGEST_PX", 23)
    seams = Seams(BACKGROUND, tmp_path)
    for columns in cut(12, 4):
        tile = (slice(None), slice(*columns))
        add_tile(seams, mask.shape, tmp_path, Span(0, 7), columns, mask[tile], values[:, *tile])
    boxes = [(region.top, region.left, *region.values.shape[1:]) for region in seams.finish()]
    assert sorted(boxes) == [(1, 0, 2, 4), (1, 4, 2, 4), (1, 8, 2, 4), (4, 3, 2, 2)]
    monkeypatch.setattr("rotopath.tasks.segment.LARGEST_PX", 24)
    merged = sorted((region.left, region.values.shape) for region in seams.finish())
    assert merged == [(0, (2, 2, 12)), (3, (2, 2, 2))]
