"""The ground that nuclei lie in: cells with their cytoplasm and borders, fibrous stroma, and the gaps between.

In: how deep each pixel lies within epithelium, where its cells are, and the manner of the tissue. Out: a canvas of
stain concentrations, on which nuclei, vessels and figures are stamped.

Blood: red cells, and the small vessels that carry them.

In: a canvas and places. The cells and vessels are painted there.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.spatial import cKDTree

from rotopath.synthetic.painting import (
    Field,
    Points,
    StainCanvas,
    Window,
    clear_away,
    draw_directions,
    fibres,
    gradient,
    pixel_positions,
    ramp,
    scatter,
    smooth_noise,
)

FAR_AWAY = np.array([-1e4, -2e4], np.complex64)  # two cells more, so that each place has a nearest one and a next


@dataclass(frozen=True)
class Manner:
    """How the tissue of a case is: concentrations of stain, and shares between 0 and 1."""

    cytoplasm: float = 0.5  # eosin
    basophilia: float = 0.2  # hematoxylin in cytoplasm
    granularity: float = 0.2
    foam: float = 0.2  # vacuoles in cytoplasm
    clearing: float = 0.0  # emptiness of cells
    borders: float = 0.1  # eosin at cell borders
    cracks_um: float = 0.5  # width of the gaps that shrinkage tears between cells
    retraction_um: float = 1.0  # and between epithelium and stroma
    basement: float = 0.0  # eosin of the membrane around epithelium
    collagen: float = 0.6  # eosin
    stroma_blue: float = 0.08  # hematoxylin in stroma
    slits: float = 0.3  # gaps between fibres
    looseness: float = 0.2  # share of stroma that is swollen: wisps, and little between them


def lay_tissue(
    rng: np.random.Generator,
    depth_um: Field,
    cells: Points,
    spacing_um_px: float,
    manner: Manner,
    loosened: Field | None = None,
) -> tuple[StainCanvas, Points]:
    """The ground without nuclei, and the direction of its fibres at each pixel.

    Epithelium lies where `depth_um` is positive; `loosened` adds to the looseness of stroma, place by place.
    """
    shape, um = (depth_um.shape[0], depth_um.shape[1]), 1 / spacing_um_px
    along, across = _courses(rng, depth_um, um)
    h_stroma, e_stroma = _stroma(rng, along, across, um, manner, loosened)
    h_cells, e_cells = _cytoplasm(rng, shape, np.concatenate([cells, FAR_AWAY]), um, manner)
    edge = depth_um + 0.5 * smooth_noise(rng, shape, 2.5 * um)
    epithelium = ramp(edge / np.float32(0.8) + np.float32(0.5))
    hematoxylin = h_stroma + epithelium * (h_cells - h_stroma)
    eosin = e_stroma + epithelium * (e_cells - e_stroma)
    width = manner.retraction_um * smooth_noise(rng, shape, 15 * um)
    torn = ramp((width / 2 - np.abs(edge + width / 2)) * np.float32(1.5))
    rise = gradient(ndimage.gaussian_filter(across, 2 * um, truncate=2.0))
    slope = gradient(ndimage.gaussian_filter(depth_um, 1.5 * um, truncate=2.0)) * np.float32(um)
    beside = ramp(depth_um / 5 + np.float32(1.2))  # cells in narrow gaps lie along the epithelium
    rise = rise + 2 * beside * slope * np.sign((rise * slope.conj()).real)
    canvas = StainCanvas(hematoxylin, eosin, np.zeros(shape, np.float32), spacing_um_px)
    clear_away(canvas, torn)
    canvas.eosin[:] += manner.basement * np.exp(-(((edge + np.float32(0.5)) / np.float32(0.6)) ** 2))
    return canvas, np.asarray(rise * 1j / (np.abs(rise) + 1e-6), np.complex64)


def _courses(rng: np.random.Generator, depth_um: Field, um: float) -> tuple[Field, Field]:
    """Coordinates in pixels along and across the fibres.

    One direction holds over the whole image. Nests and waves bend it, but rise less steeply than it does: so fibres
    pass by nests and never close into rings.
    """
    shape = (depth_um.shape[0], depth_um.shape[1])
    straight = pixel_positions(shape) * draw_directions(rng, 1)[0]
    around = 0.6 * ndimage.gaussian_filter(depth_um, 3 * um, truncate=2.0).clip(-14, 4)
    sweep = rng.uniform(8, 20) * smooth_noise(rng, shape, 45 * um) + 3 * smooth_noise(rng, shape, 16 * um)
    crimp = rng.uniform(0.5, 1.6) * smooth_noise(rng, shape, 6 * um)  # collagen is wavy
    across = straight.real + np.float32(um) * (around + sweep + crimp)
    along = straight.imag + np.float32(8 * um) * smooth_noise(rng, shape, 12 * um)
    return along, across


def _stroma(
    rng: np.random.Generator, along: Field, across: Field, um: float, manner: Manner, loosened: Field | None
) -> tuple[Field, Field]:
    shape = (across.shape[0], across.shape[1])
    ripples = smooth_noise(rng, shape, 3.5 * um)
    woven = across + np.float32(0.8 * um) * ripples  # fibrils leave one bundle and join the next
    fibrils = fibres(rng, woven, along, max(0.2 * um, 0.6), 6 * um)
    bundles = fibres(rng, across, along, max(0.9 * um, 1.6), 16 * um)
    broad = fibres(rng, woven, along, max(2.8 * um, 2.5), 26 * um)
    patches = smooth_noise(rng, shape, 28 * um)
    grain = smooth_noise(rng, shape, 0.25 * um)
    frayed = ramp(0.45 + 0.5 * smooth_noise(rng, shape, 9 * um))  # elsewhere fibrils are glued together
    dense = 0.9 + frayed * (0.14 * fibrils + 0.09 * bundles) + 0.09 * broad + 0.1 * grain + 0.05 * ripples
    strands = np.exp(-((bundles / np.float32(0.3)) ** 2)) * (0.35 + 0.3 * broad).clip(0)
    web = np.exp(-((smooth_noise(rng, shape, 6 * um) / np.float32(0.12)) ** 2)) * (0.5 + 0.4 * patches).clip(0)
    swollen = 0.06 + (strands + 0.5 * web) * (1 + 0.3 * fibrils) + 0.05 * grain
    loose = 1.2 * patches + np.float32(4 * manner.looseness - 2.2)
    share = ramp(loose if loosened is None else loose + loosened)
    eosin = manner.collagen * (dense + share * (swollen - dense)).clip(0.03)
    # Bundles part along lines, wide here and closed there.
    opening = (0.2 * bundles + 0.4 * smooth_noise(rng, shape, 8 * um) + np.float32(manner.slits - 0.42)).clip(0, 0.7)
    slits = ramp((opening - np.abs(broad)) * np.float32(4))
    blue = manner.stroma_blue * (1 + 0.4 * fibrils + 0.3 * broad).clip(0)
    return blue * (1 - slits) * (1 - np.float32(0.3) * share), eosin * (1 - 0.93 * slits)


def _cytoplasm(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, um: float, manner: Manner
) -> tuple[Field, Field]:
    cell, border_um = territories(rng, shape, cells, um)
    granules = 0.6 * smooth_noise(rng, shape, 0.28 * um)
    nets = [np.exp(-((smooth_noise(rng, shape, scale * um) / np.float32(0.35)) ** 2)) for scale in (1.3, 0.6)]
    threads = nets[0] + 0.7 * nets[1] - np.float32(0.58)  # and pale meshes between them
    swell = smooth_noise(rng, shape, 4 * um)
    uneven = manner.granularity * (granules + 1.3 * threads + 0.4 * swell)
    within = ramp(border_um * np.float32(um / 2.5))  # the borders of territories are rough, membranes are not
    shade = rng.normal(0, 0.22, len(cells)).clip(-0.45, 0.45).astype(np.float32)[cell] * within
    e = manner.cytoplasm * (1 + uneven + shade).clip(0.08)
    h = manner.basophilia * (1 + 1.3 * uneven - 0.4 * shade).clip(0.05)
    if manner.clearing > 0:  # fluff and strands are left in cells that hold fat or sugar
        emptiness = (manner.clearing * rng.uniform(0.6, 1.2, len(cells))).clip(0, 1).astype(np.float32)[cell] * within
        fluff = ramp(0.25 + 0.35 * swell + 0.3 * smooth_noise(rng, shape, 1.8 * um))
        left = 1 - emptiness * ramp(border_um * np.float32(0.8) - np.float32(0.1)) * (1 - 0.6 * fluff)
        left *= 1 - emptiness * np.float32(0.5) * (1 - ramp(nets[0] * 1.5))
        e, h = e * left, h * left
    membrane = np.exp(-((border_um / np.float32(0.32)) ** 2)) * (0.9 + 0.3 * swell).clip(0.2)
    e = e + manner.borders * membrane
    h = h + np.float32(0.3 * manner.borders) * membrane
    kept = np.ones(shape, np.float32)
    for scale_um in (0.8, 1.4, 2.6):  # vacuoles of several sizes
        if scale_um * um < 1:  # too small to be seen
            continue
        bubbles = smooth_noise(rng, shape, scale_um * um) + 0.25 * swell
        kept *= 1 - np.float32(0.75) * ramp((bubbles - np.float32(2.7 - 1.5 * manner.foam)) * np.float32(1.8))
    shrinkage = 0.9 * smooth_noise(rng, shape, 9 * um) + 0.8 * smooth_noise(rng, shape, 3 * um)
    cracks = ramp((manner.cracks_um * shrinkage.clip(0, 1.6) - border_um) * np.float32(1.4))
    kept *= 1 - np.float32(0.95) * cracks
    return h * kept, e * kept


def territories(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, um: float, step: int = 2
) -> tuple[NDArray[np.intp], Field]:
    """Which cell each pixel belongs to, and how far in µm it lies from the border with the next.

    Both are found once every `step` pixels.
    """
    small = (-(-shape[0] // step), -(-shape[1] // step))
    places = pixel_positions(small) * step
    for scale_um, shift_um in ((4.0, 1.1), (1.2, 0.35)):  # borders of cells are not straight
        sideways, down = (smooth_noise(rng, small, scale_um * um / step) for _ in range(2))
        places = places + np.float32(shift_um * um) * (sideways + np.complex64(1j) * down)
    tree = cKDTree(np.stack([cells.real, cells.imag], axis=1))
    away, which = tree.query(np.stack([places.real, places.imag], axis=-1), k=2)
    border = np.asarray((away[..., 1] - away[..., 0]) / 2, np.float32)
    whole = (small[1] * step, small[0] * step)
    fine = np.asarray(Image.fromarray(border).resize(whole, Image.Resampling.BILINEAR))[: shape[0], : shape[1]]
    cell = which[..., 0].repeat(step, axis=0).repeat(step, axis=1)[: shape[0], : shape[1]]
    return cell, np.asarray(fine / um, np.float32)


def compartments(
    rng: np.random.Generator, shape: tuple[int, int], width_um: float, stroma_um: float, um: float
) -> Field:
    """Depth in µm into rounded compartments of about this width, with stroma of this thickness between them."""
    margin = int(width_um * um)  # seeds beyond the edge, so that compartments are cut off rather than closed
    wide = (shape[0] + 2 * margin, shape[1] + 2 * margin)
    seeds = scatter(rng, wide, width_um * um, jitter=0.2)
    _, border_um = territories(rng, wide, seeds, um, step=4)
    inner = border_um[margin : margin + shape[0], margin : margin + shape[1]]
    smooth = ndimage.gaussian_filter(inner, 3 * um, truncate=2.0)
    uneven = 1 + 0.5 * smooth_noise(rng, shape, 25 * um)
    depth: Field = smooth - np.float32(stroma_um / 2) * uneven.clip(0.2) - np.float32(1.2)
    return depth


def add_red_cells(rng: np.random.Generator, canvas: StainCanvas, centres: Points, strength: float = 2.1) -> None:
    """Red blood cells: discs, paler in the middle, pressed out of shape."""
    um = 1 / canvas.spacing_um_px
    side = int(10 * um) | 1
    for centre in centres:
        window = Window.around(canvas, centre, side)
        if window is None:
            continue
        radius = rng.uniform(2.4, 3.5) * um
        offset = window.offset * draw_directions(rng, 1)[0]
        bulge = 1 + np.float32(rng.normal(0, 0.12)) * (offset / (np.abs(offset) + 1)).real  # egg-shaped, rather
        away = np.abs(offset.real * rng.uniform(1, 1.7) + 1j * offset.imag) / (radius * bulge)
        disc = ramp((1 - away) * np.float32(radius) / np.float32(1.3) + np.float32(0.5))
        hollow = np.float32(rng.uniform(0.2, 0.6))
        stain = disc * np.float32(strength * rng.uniform(0.7, 1.15)) * (1 - hollow * (1 - away**2).clip(0))
        np.maximum(window.view(canvas.blood), stain, out=window.view(canvas.blood))
        window.shade(canvas, disc, hematoxylin=0.3, eosin=0.15)


def add_vessels(
    rng: np.random.Generator, canvas: StainCanvas, centres: Points, directions: Points
) -> tuple[Points, Points]:
    """Small vessels along the fibres: a thin wall, and red cells in its lumen.

    Returned are the places and the directions of the flat nuclei that line them.
    """
    um = 1 / canvas.spacing_um_px
    places, courses = [np.zeros(0, np.complex64)], [np.zeros(0, np.complex64)]
    for centre, direction in zip(centres, directions, strict=True):
        long, short = rng.uniform(6, 20), rng.uniform(2.5, 6.5)
        window = Window.around(canvas, centre, int(2 * (1 + 3 / short) * long * um) | 1)
        if window is None:
            continue
        shape = (window.offset.shape[0], window.offset.shape[1])
        local = window.offset * np.conj(direction) / np.float32(um)
        y = local.imag + np.float32(rng.normal(0, 0.012)) * local.real**2 + 0.5 * smooth_noise(rng, shape, 3 * um)
        level = np.hypot(local.real / np.float32(long), y / np.float32(short))
        depth_um = (1 - level) * np.float32(short)
        lumen = ramp(depth_um + np.float32(0.5))
        window.shade(canvas, lumen, hematoxylin=0.04, eosin=0.06)
        wall = np.exp(-(((depth_um + np.float32(0.9)) / np.float32(0.8)) ** 2))
        window.view(canvas.eosin)[:] += np.float32(rng.uniform(0.1, 0.4)) * wall
        inside = scatter(rng, shape, 4.7 * um, jitter=0.2) - complex(shape[1] // 2, shape[0] // 2)
        turned = inside * np.conj(direction) / um
        held = np.hypot(turned.real / (long - 2), turned.imag / max(short - 1.6, 0.5)) < 1
        held &= rng.random(len(inside)) < rng.choice([0.15, 0.7, 0.95])
        add_red_cells(rng, canvas, centre + inside[held])
        around = draw_directions(rng, int(rng.integers(2, 6)))
        rim = (around.real * (long + 0.5) + 1j * around.imag * (short + 1.2)) * direction * um
        places.append(np.asarray(centre + rim, np.complex64))
        course = (-around.imag * long + 1j * around.real * short) * direction
        courses.append(np.asarray(course / np.abs(course), np.complex64))
    return np.concatenate(places), np.concatenate(courses)
