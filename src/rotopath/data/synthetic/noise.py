"""Randomness in two dimensions: smooth fields, fibres along curved paths, directions, scattered points.

In: a random generator, sizes and scales in pixels. Out: arrays; positions are complex numbers, x + iy.
"""

from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.spatial import cKDTree

Field = NDArray[np.floating]  # (height, width), in single precision throughout
Points = NDArray[np.complexfloating]  # (n,), x to the right and y downwards, in pixels
Number = TypeVar("Number", bound=np.generic)

DEVIATION_AFTER_UNIT_BLUR = 0.2821  # of white noise, once a Gaussian of one pixel has gone over it
FIBRE_TILE_PX = 256


def smooth_noise(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Field:
    """A field of mean 0 and deviation 1 that changes over about `scale_px`."""
    height, width = shape
    step = max(scale_px, 1.0)  # drawn on a coarse grid, for scales above a pixel, and enlarged
    blur = min(scale_px, 1.0)
    coarse = rng.standard_normal((int(height / step) + 7, int(width / step) + 7), np.float32)
    coarse = ndimage.gaussian_filter(coarse, blur, truncate=3.0)
    coarse *= np.float32(blur / DEVIATION_AFTER_UNIT_BLUR)
    if step == 1.0:
        cut: Field = coarse[3 : 3 + height, 3 : 3 + width]
        return cut
    left, top = rng.uniform(2.5, 3.5, 2)  # the grid itself must not show
    box = (left, top, left + width / step, top + height / step)
    fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.asarray(fine, np.float32)


def fibres(rng: np.random.Generator, across_px: Field, along_px: Field, thickness_px: float, length_px: float) -> Field:
    """Noise of mean 0 and deviation 1, drawn out along the lines of equal `across_px`."""
    tile = rng.standard_normal((FIBRE_TILE_PX, FIBRE_TILE_PX), np.float32)
    tile = ndimage.gaussian_filter(tile, (1.0, 1.5), mode="wrap")
    tile /= tile.std()
    places = np.stack([across_px / np.float32(thickness_px), along_px * np.float32(1.5 / length_px)])
    drawn: Field = ndimage.map_coordinates(tile, places, order=1, mode="grid-wrap", output=np.float32)
    return drawn


def draw_directions(rng: np.random.Generator, count: int) -> Points:
    """Unit complex numbers, every direction as likely as any other."""
    drawn = rng.standard_normal(count) + 1j * rng.standard_normal(count)
    return np.asarray(drawn / np.abs(drawn), np.complex64)


def pixel_positions(shape: tuple[int, int]) -> Points:
    """Where each pixel lies, (height, width), as complex numbers."""
    rows, columns = np.indices(shape, np.float32)
    return columns + np.complex64(1j) * rows


def gradient(field: Field) -> Points:
    """The direction and rate in which the field rises, (height, width), as complex numbers."""
    down, right = np.gradient(field)
    return np.asarray(right + np.complex64(1j) * down, np.complex64)


def look_up(field: NDArray[Number], points: Points) -> NDArray[Number]:
    """The field's values at the pixels nearest to the points, which may lie a little outside."""
    rows = np.rint(points.imag).astype(int).clip(0, field.shape[0] - 1)
    columns = np.rint(points.real).astype(int).clip(0, field.shape[1] - 1)
    values: NDArray[Number] = field[rows, columns]
    return values


def scatter(rng: np.random.Generator, shape: tuple[int, int], spacing_px: float, jitter: float = 0.2) -> Points:
    """Points all over the image and a little beyond: a hexagonal lattice that is turned, bent and shaken."""
    height, width = shape
    reach = 0.75 * float(np.hypot(height, width)) + 2 * spacing_px
    rows, columns = np.mgrid[-reach : reach : spacing_px * 0.866, -reach:reach:spacing_px]
    columns[1::2] += spacing_px / 2
    lattice = (columns + 1j * rows).ravel() * draw_directions(rng, 1)[0]
    shaken = lattice + jitter * spacing_px * (
        rng.standard_normal(lattice.size) + 1j * rng.standard_normal(lattice.size)
    )
    points = np.asarray(shaken + complex(width, height) / 2, np.complex64)
    margin = spacing_px
    inside = (np.abs(points.real - width / 2) < width / 2 + margin) & (
        np.abs(points.imag - height / 2) < height / 2 + margin
    )
    kept: Points = points[inside]
    return kept


def keep_away(points: Points, others: Points, apart_px: float) -> Points:
    """The points that are at least so far from all others."""
    if not len(others):
        return points
    kept: Points = points[np.abs(points[:, None] - others).min(axis=1) >= apart_px]
    return kept


def thin_out(points: Points, apart_px: float) -> NDArray[np.intp]:
    """Positions of points that keep this distance from each other; earlier points go before later ones."""
    kept = np.ones(len(points), bool)
    if len(points):
        tree = cKDTree(np.stack([points.real, points.imag], axis=1))
        pairs = tree.query_pairs(apart_px, output_type="ndarray")  # (pairs, 2), the earlier point first
        for first, second in pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]:
            kept[second] &= not kept[first]
    return np.flatnonzero(kept)
