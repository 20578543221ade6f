"""Find the tissue on a slide, so that the glass around the tissue does not have to be processed.

The slide is read at a low resolution. Pixels that absorb light are tissue, except pen marks and the black border of a
scan, which are recognized by their colors. `find_tissue` returns a `Tissue`: a mask of the slide, with methods that
return whether there is tissue in a rectangle or at given positions. A `Region` is the part of a slide that a user has
selected by outlines, such as annotations of QuPath. `measure_focus` finds tissue that is out of focus.
"""

import math
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from skimage.filters import threshold_otsu

from rotopath.images.files import UnreadableFileError
from rotopath.images.geojson import SlideObject, read_geojson
from rotopath.images.outlines import Point, Polygon, fill_outline, measure_coverage
from rotopath.images.slides import Slide
from rotopath.images.stain import find_stain_doubt

SPACING_UM_PX = 8.0  # default pixel spacing of the mask
MAX_MASK_PX = 2**20  # masks of large slides get a coarser pixel spacing, to limit memory
# Bounds of the threshold on optical density. Glass is below 0.06; the palest fat and mucus are about 0.14.
DENSITY_BOUNDS = (0.06, 0.14)
GLASS_PERCENTILE = 95  # percentile of the brightness of all pixels that is taken as the brightness of glass
GLASS_BOUNDS = (200, 255)  # bounds of this brightness, because an image without glass may have only darker pixels
BLACK = 50  # maximum brightness of black; no stain is as dark when averaged over a few cells
COLD_INK = 0.24  # blue and green ink: the optical density of red exceeds that of green by more than this
WARM_INK = 1.6  # red ink: minimum optical density of green and of blue; blood has less
SMOOTHING_UM = 12.0  # twice the standard deviation of the Gaussian filter that smooths the density
MIN_PEN_MM2 = 0.01  # smaller specks of the color of ink are pigment, folds or dust
MIN_TISSUE_MM2 = 0.002  # smaller specks are dust or a few detached cells
MAX_HOLE_MM2 = 0.05  # smaller holes are vessels, ducts and fat within the tissue, and are filled
# Focus is measured in squares of FOCUS_CELL_PX pixels at this pixel spacing. On three slides and four fields of other
# slides, the sharpness was 0.28 to 4.3 in 96 % of the squares. After a Gaussian filter with a standard deviation of
# 1 µm, it was 0.03 to 0.47; with 1.5 µm, 0.01 to 0.17; and with 3 µm, below 0.03.
FOCUS_UM_PX, FOCUS_CELL_PX, FOCUS_BLOCK_PX = 1.0, 64, 512
MIN_SHARPNESS = 0.15
MIN_CONTRAST = 2.0  # standard deviation of gray values; a square with less has nothing that could be sharp

Outline = tuple[Polygon, ...]  # polygons of one object, in pixels of level 0


@dataclass(frozen=True)
class Tissue:
    """Position and area of the tissue on a slide."""

    mask: NDArray[np.bool_]  # (rows, columns), true where there is tissue, from the upper left corner of the slide
    spacing_um_px: float  # pixel spacing of the mask
    # Height and width of the slide, which can differ from the size of the mask by up to half a mask pixel. If None, the
    # size of the mask is used.
    size_um: tuple[float, float] | None = None
    coverage: NDArray[np.float64] | None = None  # fraction of each mask pixel that is in a region; None: 1 everywhere
    stain_doubt: str = ""  # how the slide differs from H&E, see `find_stain_doubt`; "" if it does not
    pen: NDArray[np.bool_] | None = None  # (rows, columns), true at pen marks, which are not tissue; None: not known

    @property
    def area_mm2(self) -> float:
        """Area of the tissue in mm². Pixels in the last row and column are counted up to the edge of the slide.

        Only the part in the region is counted if `coverage` is not None.
        """
        heights, widths = self._sides_um
        return float(heights @ self._counted @ widths) / 1e6

    def measure_cells(self, rows_um: NDArray[np.float64], columns_um: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the area of the tissue in each cell of a grid, in mm²: (r - 1, c - 1) for r × c lines of the grid.

        `rows_um` (r,) and `columns_um` (c,) are increasing distances of these lines from the top and from the left edge
        of the slide. Areas are exact for the mask, and counted as in `area_mm2`.
        """
        areas = self._counted.astype(np.float64)
        for lines, sides in zip((rows_um, columns_um), self._sides_um, strict=True):
            edges = np.append(0, np.cumsum(sides))
            sums = np.concatenate([np.zeros((1, areas.shape[1])), np.cumsum(areas * sides[:, None], axis=0)])
            lines = lines.clip(0, edges[-1])
            first = (np.searchsorted(edges, lines, side="right") - 1).clip(0, len(sides) - 1)
            fraction = (lines - edges[first]) / sides[first]
            at_lines = sums[first] + fraction[:, None] * (sums[first + 1] - sums[first])
            areas = np.diff(at_lines, axis=0).T  # after both axes, the array is not transposed
        return areas / 1e6

    @property
    def _sides_um(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Heights and widths of the pixels of the mask. The last row and column end at the edge of the slide."""
        heights, widths = (np.full(count, self.spacing_um_px) for count in self.mask.shape)
        if self.size_um is not None:
            for sides, total in zip((heights, widths), self.size_um, strict=True):
                sides[-1] = total - (len(sides) - 1) * self.spacing_um_px
        return heights, widths

    @property
    def _counted(self) -> NDArray[Any]:
        """The fraction of each pixel of the mask that counts as tissue."""
        return self.mask if self.coverage is None else self.mask * self.coverage

    def touches(self, top_um: float, left_um: float, height_um: float, width_um: float) -> bool:
        """Return whether a rectangle on the slide contains tissue.

        `top_um` and `left_um` are distances from the top and from the left edge of the slide. Where the slide extends
        beyond the mask, by up to half a mask pixel, the last row or column of the mask is used.
        """
        spans = []
        for start, length, size in ((top_um, height_um, self.mask.shape[0]), (left_um, width_um, self.mask.shape[1])):
            end = math.ceil((start + length) / self.spacing_um_px)
            first = max(0, math.floor(start / self.spacing_um_px))
            is_beyond = start < (size + 0.5) * self.spacing_um_px and first == size
            spans.append(slice(first - is_beyond, max(end, 0)))
        return bool(self.mask[tuple(spans)].any())

    def is_tissue_at(self, rows_um: NDArray[np.float64], columns_um: NDArray[np.float64]) -> NDArray[np.bool_]:
        """Return a mask (rows, columns) for a grid of positions on the slide: true where there is tissue.

        `rows_um` (rows,) and `columns_um` (columns,) are distances from the top and from the left edge of the slide.
        Positions outside the mask have the value of the nearest mask pixel.
        """
        rows, columns = (
            np.floor(positions / self.spacing_um_px).astype(int).clip(0, size - 1)
            for positions, size in zip((rows_um, columns_um), self.mask.shape, strict=True)
        )
        if not rows.size:
            return np.empty((0, columns.size), bool)
        # First the few rows of the mask that are needed, then copies of whole rows: much faster than both at once.
        needed = self.mask[rows.min() : rows.max() + 1]
        return np.asarray(np.take(np.take(needed, columns, axis=1), rows - rows.min(), axis=0))

    def dilate(self, margin_um: float) -> "Tissue":
        """Return the tissue with a margin of the given width around it."""
        if self.mask.all() or not self.mask.any():
            return self
        is_near = ndimage.distance_transform_edt(~self.mask) * self.spacing_um_px <= margin_um
        return replace(self, mask=is_near)


@dataclass(frozen=True, eq=False)
class Region:
    """The part of a slide inside of a region of interest, and outside of excluded areas.

    Outlines are polygons in pixels of level 0. A position is in the region if at least one outline in `roi` contains
    it, and no outline in `excluded`.
    """

    roi: tuple[Outline, ...] | None  # None: the whole slide
    excluded: tuple[Outline, ...] = ()

    def contains(self, first_px: tuple[float, float], step_px: float, size: tuple[int, int]) -> NDArray[np.bool_]:
        """Return a mask (rows, columns) for a grid of positions on the slide: true where they are in the region.

        `first_px` (row, column) is the first position, and `step_px` the distance between two positions, both in pixels
        of level 0. `size` is the number of rows and of columns of the grid.
        """
        grid = first_px, step_px, size
        inside = np.ones(size, bool) if self.roi is None else _fill_outlines(self.roi, self._roi_bounds, *grid)
        return inside & ~_fill_outlines(self.excluded, self._excluded_bounds, *grid)

    @cached_property
    def _roi_bounds(self) -> NDArray[np.float64]:
        return _find_bounds(self.roi or ())

    @cached_property
    def _excluded_bounds(self) -> NDArray[np.float64]:
        return _find_bounds(self.excluded)

    def measure(self, tissue: Tissue, slide: Slide) -> NDArray[np.float64]:
        """Return the fraction of each pixel of a tissue mask that is in the region, without its part off the slide.

        The fraction is exact, except in pixels that the borders of several outlines cross.
        """
        inside = np.ones(tissue.mask.shape) if self.roi is None else _measure_outlines(self.roi, tissue, slide)
        return inside * (1 - _measure_outlines(self.excluded, tissue, slide))


def select_outlines(objects: Iterable[SlideObject]) -> tuple[Outline, ...]:
    """Return the outlines of all annotations. Points and detections are left out."""
    return tuple(item.shape for item in objects if item.kind == "annotation" and not isinstance(item.shape, Point))


def make_region(
    roi: Path | str | Sequence[SlideObject] | None,
    exclude: Path | str | Sequence[SlideObject] | None,
    origin_px: tuple[int, int] = (0, 0),
) -> Region | None:
    """Return the region of a slide inside of `roi` and outside of `exclude`, or None if both are None.

    Each argument is the path of a GeoJSON file with annotations, or objects in pixels of level 0. `origin_px` (row,
    column) is the position on level 0 from which QuPath counts. Raises UnreadableFileError if a file cannot be read,
    or if there is no annotation with an outline.
    """
    if roi is None and exclude is None:
        return None
    inside = None if roi is None else _find_outlines(roi, origin_px)
    return Region(inside, () if exclude is None else _find_outlines(exclude, origin_px))


def _find_outlines(source: Path | str | Sequence[SlideObject], origin_px: tuple[int, int]) -> tuple[Outline, ...]:
    """Return the outlines of annotations, in pixels of level 0. The arguments are those of `make_region`."""
    if isinstance(source, Path | str):
        name, outlines = str(source), select_outlines(read_geojson(Path(source), origin_px))
    else:
        name, outlines = "The list of objects", select_outlines(source)
    if outlines:
        return outlines
    raise UnreadableFileError(
        name, "contains no annotation with an outline; draw one in QuPath, and export it as GeoJSON."
    )


def _find_bounds(outlines: Sequence[Outline]) -> NDArray[np.float64]:
    """Return the first and the last row and column (n, 2, 2) of n outlines."""
    vertices = [np.concatenate([polygon.outer for polygon in outline]) for outline in outlines]
    return np.array([(each.min(axis=0), each.max(axis=0)) for each in vertices]).reshape(-1, 2, 2)


def _fill_outlines(
    outlines: Sequence[Outline],
    bounds: NDArray[np.float64],
    first_px: tuple[float, float],
    step_px: float,
    size: tuple[int, int],
) -> NDArray[np.bool_]:
    """Return a mask (rows, columns) for a grid of positions, as in `Region.contains`: true inside of any outline.

    `bounds` is the result of `_find_bounds`. By these, outlines that are far from the grid are skipped fast.
    """
    mask = np.zeros(size, bool)
    scaled = (bounds - first_px) / step_px  # in rows and columns of the grid
    firsts = np.floor(scaled[:, 0]).clip(0).astype(int)
    ends = np.minimum(np.ceil(scaled[:, 1]) + 1, size).astype(int)
    for index in np.flatnonzero((firsts < ends).all(axis=1)).tolist():
        (top, left), (bottom, right) = firsts[index], ends[index]
        # Positions of the grid become centers of pixels.
        rings = [[(ring - first_px) / step_px + 0.5 for ring in polygon.rings] for polygon in outlines[index]]
        polygons = [Polygon(outer, tuple(holes)) for outer, *holes in rings]
        mask[top:bottom, left:right] |= fill_outline(polygons, (bottom - top, right - left), (top, left))
    return mask


def _measure_outlines(outlines: Iterable[Outline], tissue: Tissue, slide: Slide) -> NDArray[np.float64]:
    """Return the fraction of each pixel of a tissue mask, without its part off the slide, that is in any outline."""
    side_px = tissue.spacing_um_px / slide.spacing_um_px
    size = (slide.size_px[0] / side_px, slide.size_px[1] / side_px)
    total = np.zeros(tissue.mask.shape)
    for outline in outlines:
        polygons = [
            Polygon(outer, tuple(holes))
            for outer, *holes in ([ring / side_px for ring in polygon.rings] for polygon in outline)
        ]
        covered = measure_coverage(polygons, size)
        for axis, count in enumerate(tissue.mask.shape):  # the slide may extend beyond the mask by part of a pixel
            covered = np.add.reduceat(covered, np.arange(min(count, covered.shape[axis])), axis=axis)
        total[: covered.shape[0], : covered.shape[1]] += covered
    heights, widths = (
        np.diff(np.append(np.arange(count), length)) for count, length in zip(tissue.mask.shape, size, strict=True)
    )
    fractions: NDArray[np.float64] = np.round(total / np.outer(heights, widths), 9).clip(0, 1)  # 0 and 1 are exact
    return fractions


def find_tissue(slide: Slide, spacing_um_px: float | None = None) -> Tissue:
    """Find the tissue on a slide.

    On a blank slide, the mask is false everywhere. In an image without any glass, it is true everywhere.
    `spacing_um_px` is the pixel spacing of the mask. By default it is 8 µm/px, or 16, 32, … µm/px for large slides.
    """
    if spacing_um_px is None:
        spacing_um_px = SPACING_UM_PX
        while math.prod(slide.size_at(spacing_um_px)) > MAX_MASK_PX:
            spacing_um_px *= 2
    image = slide.read(0, 0, *slide.size_at(spacing_um_px), spacing_um_px)
    height, width = slide.size_px
    size_um = (height * slide.spacing_um_px, width * slide.spacing_um_px)
    mask = mask_tissue(image, spacing_um_px)
    doubt = find_stain_doubt(image, mask, spacing_um_px)
    return Tissue(mask, spacing_um_px, size_um, stain_doubt=doubt, pen=mask_pen(image, spacing_um_px))


@dataclass(frozen=True)
class Focus:
    """Which squares of the tissue are out of focus."""

    is_blurred: NDArray[np.bool_]  # (rows, columns), from the upper left corner of the slide
    cell_um: float  # side of a square
    assessed_mm2: float  # area of the tissue in the squares that could be assessed
    blurred_mm2: float  # area of the tissue in those that are out of focus

    @property
    def share(self) -> float:
        """Fraction of the assessed tissue that is out of focus; 0 if none was assessed."""
        return self.blurred_mm2 / self.assessed_mm2 if self.assessed_mm2 else 0.0


def measure_focus(slide: Slide, tissue: Tissue, threads: int = 1) -> Focus:
    """Find the tissue that is out of focus, by the variance of the Laplacian at `FOCUS_UM_PX`.

    The sharpness of a square is the variance of the Laplacian of its gray values, divided by their variance, so that
    pale tissue is not less sharp. Only tissue counts. Squares are assessed if half of them is tissue in the region and
    if they have some contrast. Nothing is assessed on slides with a larger pixel spacing. `threads` is the number of
    threads that read the slide.
    """
    sizes = slide.size_at(FOCUS_UM_PX)
    is_blurred = np.zeros([size // FOCUS_CELL_PX for size in sizes], bool)
    counts = {True: 0, False: 0}  # pixels of tissue in blurred and in sharp squares
    area = tissue if tissue.coverage is None else replace(tissue, mask=tissue.mask & (tissue.coverage > 0))

    def measure(corner: tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.int64]] | None:
        """Return the sharpness of the squares in a block and their pixels of tissue, or None if there is no tissue."""
        height, width = (
            min(FOCUS_BLOCK_PX, size - start) // FOCUS_CELL_PX * FOCUS_CELL_PX
            for size, start in zip(sizes, corner, strict=True)
        )
        if not area.touches(*(FOCUS_UM_PX * value for value in (*corner, height, width))):
            return None
        pixels = slide.read(*corner, height, width, FOCUS_UM_PX)
        rows, columns = (
            np.asarray((start + np.arange(count) + 0.5) * FOCUS_UM_PX, np.float64)
            for start, count in zip(corner, (height, width), strict=True)
        )
        return _measure_sharpness(pixels, area.is_tissue_at(rows, columns))

    tops, lefts = (range(0, size - FOCUS_CELL_PX + 1, FOCUS_BLOCK_PX) for size in sizes)
    corners = list(product(tops, lefts))
    if slide.spacing_um_px > 1.05 * FOCUS_UM_PX:
        corners = []
    with ThreadPoolExecutor(threads) as pool:
        for (top, left), measured in zip(corners, pool.map(measure, corners), strict=True):
            if measured is None:
                continue
            sharpness, tissue_px = measured
            blurred = sharpness < MIN_SHARPNESS  # false where nothing was assessed
            part = is_blurred[top // FOCUS_CELL_PX :, left // FOCUS_CELL_PX :]
            part[: blurred.shape[0], : blurred.shape[1]] = blurred
            counts[True] += int(tissue_px[blurred].sum())
            counts[False] += int(tissue_px[sharpness >= MIN_SHARPNESS].sum())
    pixel_mm2 = FOCUS_UM_PX**2 / 1e6
    cell_um = FOCUS_UM_PX * FOCUS_CELL_PX
    return Focus(is_blurred, cell_um, sum(counts.values()) * pixel_mm2, counts[True] * pixel_mm2)


def _measure_sharpness(
    pixels: NDArray[np.uint8], is_tissue: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the sharpness of each square of an image (H, W, 3), NaN if not assessed, and its pixels of tissue."""
    gray = pixels.sum(axis=2, dtype=np.int32) / 3
    edges = ndimage.laplace(gray)
    shape = (gray.shape[0] // FOCUS_CELL_PX, FOCUS_CELL_PX, gray.shape[1] // FOCUS_CELL_PX, FOCUS_CELL_PX)
    inside = is_tissue.reshape(shape)
    counts = inside.sum(axis=(1, 3))

    def variance(values: NDArray[np.float64]) -> NDArray[np.float64]:
        squares = values.reshape(shape)
        mean = np.sum(squares, axis=(1, 3), where=inside, keepdims=True) / counts.clip(1)[:, None, :, None]
        return np.asarray(np.sum((squares - mean) ** 2, axis=(1, 3), where=inside) / counts.clip(1))

    contrast = variance(gray)
    is_assessed = (counts >= FOCUS_CELL_PX**2 / 2) & (contrast >= MIN_CONTRAST**2)
    return np.where(is_assessed, variance(edges) / contrast.clip(MIN_CONTRAST**2), np.nan), counts


def mask_pen(image: NDArray[np.uint8], spacing_um_px: float) -> NDArray[np.bool_]:
    """Return a mask (H, W) of a low-resolution image (H, W, 3): true at marks of blue, green, red or black ink.

    Black areas that reach the edge of the image are the border of the scan. Small specks are left out.
    """
    is_black = image.max(axis=2) <= BLACK
    if is_black.all():
        return np.zeros(is_black.shape, bool)
    black, _ = ndimage.label(is_black, np.ones((3, 3)))
    border = np.unique(np.concatenate([black[0], black[-1], black[:, 0], black[:, -1]]))
    is_ink = (is_black & ~np.isin(black, border)) | (~is_black & _is_ink(_to_density(image, is_black)))
    marks, count = ndimage.label(is_ink, np.ones((3, 3)))
    is_kept = np.bincount(marks.ravel(), minlength=count + 1) * spacing_um_px**2 / 1e6 >= MIN_PEN_MM2
    is_kept[0] = False
    pen: NDArray[np.bool_] = is_kept[marks]
    return pen


def _to_density(image: NDArray[np.uint8], is_black: NDArray[np.bool_]) -> NDArray[np.float32]:
    """Return the optical density (H, W, 3) of an image, relative to glass. Black pixels are not used."""
    glass = float(np.percentile(image.max(axis=2)[~is_black], GLASS_PERCENTILE).clip(*GLASS_BOUNDS))
    density: NDArray[np.float32] = np.log(glass / image.clip(1).astype(np.float32))
    return density


def mask_tissue(image: NDArray[np.uint8], spacing_um_px: float) -> NDArray[np.bool_]:
    """Return a mask (H, W) of a low-resolution image (H, W, 3): true for tissue.

    `spacing_um_px` is the pixel spacing of the image and of the mask.
    """
    is_black = image.max(axis=2) <= BLACK
    if is_black.all():
        return np.zeros(is_black.shape, bool)
    density = _to_density(image, is_black)
    is_ink = is_black | _is_ink(density)
    # Blue is ignored: old mounting medium is yellow and absorbs only blue, whereas tissue also absorbs red or green.
    absorbed = np.where(is_ink, 0, density[..., :2].max(axis=2)).clip(0)
    absorbed = ndimage.gaussian_filter(absorbed, SMOOTHING_UM / spacing_um_px / 2)
    threshold = _choose_threshold(absorbed[~is_ink])
    pixel_mm2 = spacing_um_px**2 / 1e6
    tissue = _drop_specks((absorbed > threshold) & ~is_ink, MIN_TISSUE_MM2 / pixel_mm2)
    return ~_drop_specks(~tissue, MAX_HOLE_MM2 / pixel_mm2)  # fills small holes, which are specks of glass


def _is_ink(density: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Return a mask (H, W), true for blue, green and red pen marks, from the optical density (H, W, 3).

    Blue and green ink absorb more red than green; stains absorb at least as much green as red. Red ink absorbs more
    blue than eosin and blood do.
    """
    red, green, blue = density[..., 0], density[..., 1], density[..., 2]
    is_cold = red - green > COLD_INK
    is_warm = (np.minimum(green, blue) > WARM_INK) & (red < WARM_INK / 4) & (np.abs(green - blue) < WARM_INK / 4)
    is_ink: NDArray[np.bool_] = is_cold | is_warm
    return is_ink


def _choose_threshold(density: NDArray[np.float32]) -> float:
    """Return the optical density that separates tissue from glass, for the densities (n,) of all pixels without ink.

    The threshold is Otsu's, limited to `DENSITY_BOUNDS`, because Otsu's method also divides images that show only
    glass. If there is no glass, the threshold is the lower bound.
    """
    low, high = DENSITY_BOUNDS
    if not len(density):
        return low
    threshold = float(threshold_otsu(density))  # type: ignore[no-untyped-call]
    has_no_glass = density[density <= threshold].mean() > low
    return low if has_no_glass else min(max(threshold, low), high)


def _drop_specks(mask: NDArray[np.bool_], min_px: float) -> NDArray[np.bool_]:
    """Return a mask (H, W) without its connected components (specks) of fewer than `min_px` pixels.

    Components at the edge of the image are kept, because they may continue outside.
    """
    components, count = ndimage.label(mask, np.ones((3, 3)))
    is_kept = np.bincount(components.ravel(), minlength=count + 1) >= min_px
    for edge in (components[0], components[-1], components[:, 0], components[:, -1]):
        is_kept[edge] = True
    is_kept[0] = False
    kept: NDArray[np.bool_] = is_kept[components]
    return kept
