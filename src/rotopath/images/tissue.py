"""Tissue: where on a slide there is any, so that the glass around it need not be looked at.

In: a slide, read at a low resolution. Out: a mask, its area, and whether a rectangle touches it. Tissue swallows light,
and glass does not; pen and the black around a scan swallow light as well, and are known by their colour.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from skimage.filters import threshold_otsu

from rotopath.images.slides import Slide

SPACING_UM_PX = 8.0
MOST_PX = 2**20  # of a mask: that of a larger slide is coarser, so that it takes no more memory
DENSITY_BOUNDS = (0.06, 0.14)  # glass is below, the palest fat and mucus about the upper one
GLASS_BOUNDS = (200, 255)  # how bright glass can be; a picture without any has a darker brightest part
GLASS_PERCENTILE = 95
BLACKEST = 50  # of the brightest channel: no stain gets as dark over a few cells
COLD_INK = 0.24  # by which blue and green ink swallow red more than green, in optical density
WARM_INK = 1.6  # of green and of blue, which red ink swallows alike, and more than blood does
SMOOTH_UM = 12.0
LEAST_MM2 = 0.002  # a speck that is smaller is dust, or a few lost cells
LARGEST_HOLE_MM2 = 0.05  # vessels, ducts and fat within tissue are filled


@dataclass(frozen=True)
class Tissue:
    """A mask (rows, columns) of where tissue is, from the upper left corner of the slide."""

    mask: NDArray[np.bool_]
    spacing_um_px: float
    size_um: tuple[float, float] | None = None  # height and width of the slide, which the mask covers to half a pixel

    @property
    def area_mm2(self) -> float:
        """Only what is on the slide counts: its last row and column of pixels end where the slide does."""
        down, across = (np.full(count, self.spacing_um_px) for count in self.mask.shape)
        if self.size_um is not None:
            for sides, whole in zip((down, across), self.size_um, strict=True):
                sides[-1] = whole - (len(sides) - 1) * self.spacing_um_px
        return float(down @ self.mask @ across) / 1e6

    def touches(self, top_um: float, left_um: float, height_um: float, width_um: float) -> bool:
        """Whether there is tissue anywhere in a rectangle that overlaps with the slide.

        Up to half a pixel of the slide lies beyond the mask, and is like what is next to it.
        """
        spans = []
        for start, length, size in ((top_um, height_um, self.mask.shape[0]), (left_um, width_um, self.mask.shape[1])):
            end = math.ceil((start + length) / self.spacing_um_px)
            first = max(0, math.floor(start / self.spacing_um_px))
            is_beyond = start < (size + 0.5) * self.spacing_um_px and first == size
            spans.append(slice(first - is_beyond, max(end, 0)))
        return bool(self.mask[tuple(spans)].any())

    def at(self, rows_um: NDArray[np.float64], columns_um: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Whether there is tissue at each of some rows in each of some columns."""
        down, across = (
            np.floor(places / self.spacing_um_px).astype(int).clip(0, size - 1)
            for places, size in zip((rows_um, columns_um), self.mask.shape, strict=True)
        )
        found: NDArray[np.bool_] = self.mask[np.ix_(down, across)]
        return found

    def widened(self, by_um: float) -> "Tissue":
        """With a margin all around."""
        if self.mask.all() or not self.mask.any():
            return self
        near = ndimage.distance_transform_edt(~self.mask) * self.spacing_um_px <= by_um
        return Tissue(near, self.spacing_um_px, self.size_um)


def find_tissue(slide: Slide, spacing_um_px: float | None = None) -> Tissue:
    """Where the slide has tissue; all of it where it is a picture of nothing else, nothing where it is blank.

    The mask has a pixel for every 8 µm, or for 16, 32 … on large slides, unless another spacing is asked for.
    """
    if spacing_um_px is None:
        spacing_um_px = SPACING_UM_PX
        while math.prod(slide.size_at(spacing_um_px)) > MOST_PX:
            spacing_um_px *= 2
    image = slide.read(0, 0, *slide.size_at(spacing_um_px), spacing_um_px)
    height, width = slide.size_px
    size_um = (height * slide.spacing_um_px, width * slide.spacing_um_px)
    return Tissue(mask_tissue(image, spacing_um_px), spacing_um_px, size_um)


def mask_tissue(image: NDArray[np.uint8], spacing_um_px: float) -> NDArray[np.bool_]:
    """The tissue (H, W) in a picture (H, W, 3) of few pixels."""
    brightest = image.max(axis=2)
    black = brightest <= BLACKEST
    if black.all():
        return np.zeros(black.shape, bool)
    glass = float(np.percentile(brightest[~black], GLASS_PERCENTILE).clip(*GLASS_BOUNDS))
    density = np.log(glass / image.clip(1).astype(np.float32))
    ink = black | _is_ink(density)
    # Old mounting medium is yellow, and swallows blue only; tissue swallows red or green at least.
    swallowed = np.where(ink, 0, density[..., :2].max(axis=2)).clip(0)
    swallowed = ndimage.gaussian_filter(swallowed, SMOOTH_UM / spacing_um_px / 2)
    least = _part_glass(swallowed[~ink])
    pixel_mm2 = spacing_um_px**2 / 1e6
    tissue = _drop_specks((swallowed > least) & ~ink, LEAST_MM2 / pixel_mm2)
    return ~_drop_specks(~tissue, LARGEST_HOLE_MM2 / pixel_mm2)  # holes are specks of glass


def _is_ink(density: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Blue, green or red pen. Stains swallow green about as much as red or more, and eosin and blood spare blue."""
    red, green, blue = density[..., 0], density[..., 1], density[..., 2]
    cold = red - green > COLD_INK
    warm = (np.minimum(green, blue) > WARM_INK) & (red < WARM_INK / 4) & (np.abs(green - blue) < WARM_INK / 4)
    ink: NDArray[np.bool_] = cold | warm
    return ink


def _part_glass(density: NDArray[np.float32]) -> float:
    """The least density of tissue: Otsu's, within bounds, since it also parts pictures of glass or of tissue alone."""
    palest, darkest = DENSITY_BOUNDS
    if not len(density):
        return palest
    parting = float(threshold_otsu(density))  # type: ignore[no-untyped-call]
    no_glass = density[density <= parting].mean() > palest
    return palest if no_glass else min(max(parting, palest), darkest)


def _drop_specks(mask: NDArray[np.bool_], least_px: float) -> NDArray[np.bool_]:
    """Without small parts, save those that the edge of the picture cuts: nobody knows how large they are."""
    parts, count = ndimage.label(mask, np.ones((3, 3)))
    kept = np.bincount(parts.ravel(), minlength=count + 1) >= least_px
    for edge in (parts[0], parts[-1], parts[:, 0], parts[:, -1]):
        kept[edge] = True
    kept[0] = False
    remaining: NDArray[np.bool_] = kept[parts]
    return remaining
