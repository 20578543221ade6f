"""The ground that nuclei lie in: cells with their cytoplasm and borders, fibrous stroma, gaps, red blood cells.

In: how deep each pixel lies within epithelium, where its cells are, and the manner of the tissue. Out: a canvas of
hematoxylin and eosin concentrations, on which nuclei and figures are stamped.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage
from scipy.spatial import cKDTree

from rotopath.data.synthetic.noise import (
    Field,
    Points,
    draw_directions,
    fibres,
    gradient,
    pixel_positions,
    smooth_noise,
)

FAR_AWAY = np.array([-1e4, -2e4], np.complex64)  # two cells more, so that each place has a nearest one and a next


@dataclass(frozen=True)
class Canvas:
    """Stain concentrations, painted on in place."""

    hematoxylin: Field
    eosin: Field
    spacing_um_px: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.hematoxylin.shape[0], self.hematoxylin.shape[1]


@dataclass(frozen=True)
class Manner:
    """How the tissue of a case is: concentrations of stain, and shares between 0 and 1."""

    cytoplasm: float = 0.55  # eosin
    basophilia: float = 0.2  # hematoxylin in cytoplasm
    granularity: float = 0.2
    foam: float = 0.2  # small holes in cytoplasm
    clearing: float = 0.0  # emptiness of cells towards their middle
    borders: float = 0.1  # eosin at cell borders
    cracks_um: float = 0.5  # width of the gaps that shrinkage tears between cells
    retraction_um: float = 1.0  # and between epithelium and stroma
    basement: float = 0.0  # eosin of the membrane around epithelium
    collagen: float = 0.6  # eosin
    stroma_blue: float = 0.08  # hematoxylin in stroma
    slits: float = 0.3  # gaps between fibres


def lay_tissue(
    rng: np.random.Generator, depth_um: Field, cells: Points, spacing_um_px: float, manner: Manner
) -> tuple[Canvas, Points]:
    """The ground without nuclei, and the direction of its fibres at each pixel.

    Epithelium lies where `depth_um` is positive; fibres run along the lines of equal depth, around nests and glands.
    """
    shape, um = (depth_um.shape[0], depth_um.shape[1]), 1 / spacing_um_px
    drift = (pixel_positions(shape) * draw_directions(rng, 1)[0]).real  # so that fibres rarely close into rings
    waves_um = 5 * smooth_noise(rng, shape, 22 * um) + 1.3 * smooth_noise(rng, shape, 9 * um)
    across = (depth_um + waves_um) * um + 0.35 * drift
    h_stroma, e_stroma = _stroma(rng, across, um, manner)
    h_cells, e_cells = _cytoplasm(rng, shape, np.concatenate([cells, FAR_AWAY]), um, manner)
    edge = depth_um + 0.5 * smooth_noise(rng, shape, 2.5 * um)
    epithelium = ramp(edge / np.float32(0.8) + np.float32(0.5))
    hematoxylin = h_stroma + epithelium * (h_cells - h_stroma)
    eosin = e_stroma + epithelium * (e_cells - e_stroma)
    width = manner.retraction_um * smooth_noise(rng, shape, 15 * um)
    torn = ramp((width / 2 - np.abs(edge + width / 2)) * np.float32(1.5))
    rise = gradient(ndimage.gaussian_filter(across, 2 * um, truncate=2.0))
    canvas = Canvas(hematoxylin, eosin, spacing_um_px)
    clear_away(canvas, torn)
    canvas.eosin[:] += manner.basement * np.exp(-(((edge + np.float32(0.5)) / np.float32(0.6)) ** 2))
    return canvas, np.asarray(rise * 1j / (np.abs(rise) + 1e-6), np.complex64)


def _stroma(rng: np.random.Generator, across: Field, um: float, manner: Manner) -> tuple[Field, Field]:
    shape = (across.shape[0], across.shape[1])
    heading = draw_directions(rng, 1)[0]
    turned = pixel_positions(shape) * heading
    fine = fibres(rng, across, turned.real, max(0.45 * um, 0.8), 12 * um)
    bundles = fibres(rng, across, turned.imag, max(1.3 * um, 1.2), 30 * um)  # ends where fine fibres do not
    patches = smooth_noise(rng, shape, 18 * um)
    grain = smooth_noise(rng, shape, 0.3 * um)
    eosin = manner.collagen * (1 + 0.27 * fine + 0.25 * bundles + 0.12 * patches + 0.12 * grain).clip(0.1)
    gaps = bundles - 0.4 * fine + 0.7 * patches
    slits = ramp((gaps - np.float32(2.4 - 2.4 * manner.slits)) * np.float32(1.5))
    blue = manner.stroma_blue * (1 + 0.4 * fine - 0.4 * patches).clip(0)
    return blue * (1 - slits), eosin * (1 - 0.93 * slits)


def _cytoplasm(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, um: float, manner: Manner
) -> tuple[Field, Field]:
    cell, border_um = territories(rng, shape, cells, um)
    net = np.float32(0.8) - np.abs(smooth_noise(rng, shape, 0.9 * um))  # threads around pale droplets
    mottle = 0.8 * smooth_noise(rng, shape, 0.35 * um) + 1.1 * net + 0.4 * smooth_noise(rng, shape, 0.8 * um)
    clouds = 0.08 * smooth_noise(rng, shape, 3 * um) + 0.1 * smooth_noise(rng, shape, 9 * um)
    uneven = manner.granularity * mottle + clouds
    shade = rng.normal(0, 0.22, len(cells)).clip(-0.4, 0.4).astype(np.float32)[cell]
    e = manner.cytoplasm * (1 + uneven + shade).clip(0.1)
    h = manner.basophilia * (1 + 0.8 * uneven - shade).clip(0.1)
    emptiness = (manner.clearing * rng.uniform(0.5, 1.2, len(cells))).clip(0, 1).astype(np.float32)[cell]
    full = 1 - emptiness * ramp(border_um - np.float32(0.4))
    e = e * full + manner.borders * np.exp(-((border_um / np.float32(0.45)) ** 2))
    h = h * full
    bubbles = smooth_noise(rng, shape, 0.7 * um) + 0.6 * smooth_noise(rng, shape, 6 * um)
    holes = manner.foam * ramp((bubbles - np.float32(0.9)) * np.float32(1.3))
    shrinkage = smooth_noise(rng, shape, 9 * um) + 0.6 * smooth_noise(rng, shape, 2.5 * um)
    cracks = ramp((manner.cracks_um * shrinkage.clip(0, 2.2) - border_um) * np.float32(1.4))
    left = (1 - holes) * (1 - 0.95 * cracks)
    return h * left, e * left


def territories(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, um: float
) -> tuple[NDArray[np.intp], Field]:
    """Which cell each pixel belongs to, and how far in µm it lies from the border with the next."""
    step = 2  # found at half the resolution
    small = (-(-shape[0] // step), -(-shape[1] // step))
    places = pixel_positions(small) * step
    for scale_um, shift_um in ((4.0, 1.1), (1.2, 0.35)):  # borders of cells are not straight
        sideways, down = (smooth_noise(rng, small, scale_um * um / step) for _ in range(2))
        places = places + np.float32(shift_um * um) * (sideways + np.complex64(1j) * down)
    tree = cKDTree(np.stack([cells.real, cells.imag], axis=1))
    away, which = tree.query(np.stack([places.real, places.imag], axis=-1), k=2)
    border = np.asarray((away[..., 1] - away[..., 0]) / 2, np.float32)
    fine = ndimage.zoom(border, step, order=1, grid_mode=True, mode="nearest")[: shape[0], : shape[1]]
    cell = which[..., 0].repeat(step, axis=0).repeat(step, axis=1)[: shape[0], : shape[1]]
    return cell, np.asarray(fine / um, np.float32)


def clear_away(canvas: Canvas, share: Field) -> None:
    """Take the tissue away where `share` is 1: tears, lumens, fat."""
    kept = 1 - np.float32(0.97) * share
    np.multiply(canvas.hematoxylin, kept, out=canvas.hematoxylin)
    np.multiply(canvas.eosin, kept, out=canvas.eosin)


def add_red_cells(rng: np.random.Generator, canvas: Canvas, centres: Points, strength: float = 1.2) -> None:
    """Red blood cells: discs of eosin, paler in the middle, pressed out of shape."""
    um = 1 / canvas.spacing_um_px
    side = int(9 * um) | 1
    for centre in centres:
        window = Window.around(canvas, centre, side)
        if window is None:
            continue
        radius = rng.uniform(2.4, 3.3) * um
        offset = window.offset * draw_directions(rng, 1)[0]
        away = np.abs(offset.real * rng.uniform(1, 1.35) + 1j * offset.imag) / radius
        disc = ramp((1 - away) * np.float32(radius) / np.float32(1.2) + np.float32(0.5))
        eosin = disc * strength * np.float32(rng.uniform(0.7, 1.2)) * (0.7 + 0.4 * away.clip(0, 1))
        np.maximum(window.view(canvas.eosin), eosin, out=window.view(canvas.eosin))


@dataclass(frozen=True)
class Window:
    """A square part of the canvas around a point, cut off at the canvas's edge."""

    rows: slice
    columns: slice
    offset: Points  # of its pixels from the point, in pixels

    @classmethod
    def around(cls, canvas: Canvas, centre: complex, side: int) -> "Window | None":
        """None where the window lies outside."""
        height, width = canvas.shape
        top, left = round(centre.imag) - side // 2, round(centre.real) - side // 2
        rows = slice(max(top, 0), min(top + side, height))
        columns = slice(max(left, 0), min(left + side, width))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return None
        y, x = np.mgrid[rows, columns].astype(np.float32)
        return cls(rows, columns, np.asarray(x + 1j * y - centre, np.complex64))

    def view(self, field: Field) -> Field:
        """The same part of a field; writing to it writes to the field."""
        return field[self.rows, self.columns]


def ramp(field: Field) -> Field:
    """0 below 0, 1 above 1, smooth in between."""
    t = field.clip(0, 1)
    smooth: Field = t * t * (3 - 2 * t)
    return smooth
