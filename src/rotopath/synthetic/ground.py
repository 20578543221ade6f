"""Paint synthetic tissue without nuclei: cytoplasm, cell borders, fibrous stroma, gaps in the tissue, and blood.

`paint_ground` paints a canvas of stain concentrations from the positions of cells, the style of the tissue, and the
*depth* of each pixel. The depth is the distance of a pixel from the border of the epithelium in µm: positive in
epithelium and negative in stroma. `paint_vessels` and `paint_red_cells` add vessels and red blood cells to a canvas, at
given positions. Afterwards, other modules paint nuclei and mitotic figures on the canvas. Positions are complex numbers
x + iy in pixels.
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
    erase_tissue,
    fiber_noise,
    gradient,
    pixel_positions,
    sample_directions,
    scatter_points,
    smooth_noise,
    smoothstep,
)

# Two cells far outside the image. They are added to the cells of each image, because `assign_cells` needs at least two.
FAR_AWAY = np.array([-1e4, -2e4], np.complex64)


@dataclass(frozen=True)
class TissueStyle:
    """Appearance of epithelium and stroma in an image, without the nuclei.

    Eosin and hematoxylin are given as concentrations of these stains, and widths in µm. All other numbers are from 0
    (none) to 1 (much).
    """

    cytoplasm: float = 0.5  # eosin in cytoplasm
    basophilia: float = 0.2  # hematoxylin in cytoplasm
    granularity: float = 0.2  # contrast of the granules and threads in cytoplasm
    foam: float = 0.2  # amount of vacuoles in cytoplasm
    clearing: float = 0.0  # typical fraction of the cytoplasm that is empty
    borders: float = 0.1  # eosin at cell borders
    cracks_um: float = 0.5  # typical half-width of the gaps between cells, which are due to shrinkage
    retraction_um: float = 1.0  # typical width of the gaps between epithelium and stroma
    basement: float = 0.0  # eosin of the basement membrane
    collagen: float = 0.6  # eosin in the fibers of stroma
    stroma_blue: float = 0.08  # hematoxylin in stroma
    slits: float = 0.3  # amount of gaps between bundles of fibers
    looseness: float = 0.2  # amount of edematous stroma, which has thin, widely separated strands


# Epithelium and stroma


def paint_ground(
    rng: np.random.Generator,
    depth_um: Field,
    cells: Points,
    spacing_um_px: float,
    style: TissueStyle,
    loosening: Field | None = None,
) -> tuple[StainCanvas, Points]:
    """Paint tissue without nuclei on a new canvas; return the canvas and the direction of the fibers at each pixel.

    `depth_um` (height, width) is the depth of each pixel: positive in epithelium and negative in stroma. `cells` (n,)
    are the centers of epithelial cells, complex numbers x + iy in pixels. `loosening` (height, width) makes more of the
    stroma edematous than `style.looseness` alone: where it is 0, nothing changes, and where it is 4, most of the stroma
    is edematous. None means 0 everywhere. The directions (height, width) are complex numbers x + iy of length 1.
    """
    shape, px_per_um = (depth_um.shape[0], depth_um.shape[1]), 1 / spacing_um_px
    along, across = _fiber_coordinates(rng, depth_um, px_per_um)
    stroma_hematoxylin, stroma_eosin = _paint_stroma(rng, along, across, px_per_um, style, loosening)
    cell_hematoxylin, cell_eosin = _paint_cytoplasm(rng, shape, np.concatenate([cells, FAR_AWAY]), px_per_um, style)
    edge = depth_um + 0.5 * smooth_noise(rng, shape, 2.5 * px_per_um)
    epithelium = smoothstep(edge / np.float32(0.8) + np.float32(0.5))
    hematoxylin = stroma_hematoxylin + epithelium * (cell_hematoxylin - stroma_hematoxylin)
    eosin = stroma_eosin + epithelium * (cell_eosin - stroma_eosin)
    gap_um = style.retraction_um * smooth_noise(rng, shape, 15 * px_per_um)
    gap = smoothstep((gap_um / 2 - np.abs(edge + gap_um / 2)) * np.float32(1.5))
    rise = gradient(ndimage.gaussian_filter(across, 2 * px_per_um, truncate=2.0))
    slope = gradient(ndimage.gaussian_filter(depth_um, 1.5 * px_per_um, truncate=2.0)) * np.float32(px_per_um)
    near = smoothstep(depth_um / 5 + np.float32(1.2))  # close to epithelium, fibers are parallel to it
    rise = rise + 2 * near * slope * np.sign((rise * slope.conj()).real)
    canvas = StainCanvas(hematoxylin, eosin, np.zeros(shape, np.float32), spacing_um_px)
    erase_tissue(canvas, gap)
    canvas.eosin[:] += style.basement * np.exp(-(((edge + np.float32(0.5)) / np.float32(0.6)) ** 2))
    return canvas, np.asarray(rise * 1j / (np.abs(rise) + 1e-6), np.complex64)


def _fiber_coordinates(rng: np.random.Generator, depth_um: Field, px_per_um: float) -> tuple[Field, Field]:
    """Return the coordinate of each pixel along the fibers of the stroma, and the coordinate across the fibers.

    Both arrays (height, width) are in pixels. All fibers in the image have the same main direction, but they are wavy
    and bend around epithelium. The bending is limited, so that fibers do not form rings around epithelium. `depth_um`
    (height, width) is the depth of each pixel: positive in epithelium and negative in stroma.
    """
    shape = (depth_um.shape[0], depth_um.shape[1])
    straight = pixel_positions(shape) * sample_directions(rng, 1)[0]
    around = 0.6 * ndimage.gaussian_filter(depth_um, 3 * px_per_um, truncate=2.0).clip(-14, 4)
    sweep = rng.uniform(8, 20) * smooth_noise(rng, shape, 45 * px_per_um)
    sweep = sweep + 3 * smooth_noise(rng, shape, 16 * px_per_um)
    crimp = rng.uniform(0.5, 1.6) * smooth_noise(rng, shape, 6 * px_per_um)  # short waves, as in collagen
    across = straight.real + np.float32(px_per_um) * (around + sweep + crimp)
    along = straight.imag + np.float32(8 * px_per_um) * smooth_noise(rng, shape, 12 * px_per_um)
    return along, across


def _paint_stroma(
    rng: np.random.Generator,
    along: Field,
    across: Field,
    px_per_um: float,
    style: TissueStyle,
    loosening: Field | None,
) -> tuple[Field, Field]:
    """Return the concentrations (height, width) of hematoxylin and of eosin in stroma that fills the whole image.

    The stroma contains dense bundles of fibers, edematous regions, and slits between the bundles. `along` and `across`
    are the coordinates of each pixel along and across the fibers, in pixels. Where `loosening` (height, width) is
    above 0, more of the stroma is edematous; None means 0 everywhere.
    """
    shape = (across.shape[0], across.shape[1])
    ripples = smooth_noise(rng, shape, 3.5 * px_per_um)
    woven = across + np.float32(0.8 * px_per_um) * ripples  # fibrils are not exactly parallel to the bundles
    fibrils = fiber_noise(rng, woven, along, max(0.2 * px_per_um, 0.6), 6 * px_per_um)
    bundles = fiber_noise(rng, across, along, max(0.9 * px_per_um, 1.6), 16 * px_per_um)
    broad = fiber_noise(rng, woven, along, max(2.8 * px_per_um, 2.5), 26 * px_per_um)
    patches = smooth_noise(rng, shape, 28 * px_per_um)
    grain = smooth_noise(rng, shape, 0.25 * px_per_um)
    frayed = smoothstep(0.45 + 0.5 * smooth_noise(rng, shape, 9 * px_per_um))  # 0: only broad bundles are visible
    dense = 0.9 + frayed * (0.14 * fibrils + 0.09 * bundles) + 0.09 * broad + 0.1 * grain + 0.05 * ripples
    strands = np.exp(-((bundles / np.float32(0.3)) ** 2)) * (0.35 + 0.3 * broad).clip(0)
    web = np.exp(-((smooth_noise(rng, shape, 6 * px_per_um) / np.float32(0.12)) ** 2)) * (0.5 + 0.4 * patches).clip(0)
    edematous = 0.06 + (strands + 0.5 * web) * (1 + 0.3 * fibrils) + 0.05 * grain
    loose = 1.2 * patches + np.float32(4 * style.looseness - 2.2)
    looseness = smoothstep(loose if loosening is None else loose + loosening)
    eosin = style.collagen * (dense + looseness * (edematous - dense)).clip(0.03)
    # Slits of varying width separate the bundles.
    width = 0.2 * bundles + 0.4 * smooth_noise(rng, shape, 8 * px_per_um) + np.float32(style.slits - 0.42)
    slits = smoothstep((width.clip(0, 0.7) - np.abs(broad)) * np.float32(4))
    hematoxylin = style.stroma_blue * (1 + 0.4 * fibrils + 0.3 * broad).clip(0)
    return hematoxylin * (1 - slits) * (1 - np.float32(0.3) * looseness), eosin * (1 - 0.93 * slits)


def _paint_cytoplasm(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, px_per_um: float, style: TissueStyle
) -> tuple[Field, Field]:
    """Return the concentrations (height, width) of hematoxylin and of eosin in cytoplasm that fills the whole image.

    `cells` are the centers of at least two epithelial cells, complex numbers x + iy in pixels. The caller uses the
    result only in epithelium.
    """
    cell, border_um = assign_cells(rng, shape, cells, px_per_um)
    granules = 0.6 * smooth_noise(rng, shape, 0.28 * px_per_um)
    nets = [np.exp(-((smooth_noise(rng, shape, scale * px_per_um) / np.float32(0.35)) ** 2)) for scale in (1.3, 0.6)]
    threads = nets[0] + 0.7 * nets[1] - np.float32(0.58)  # pale between the threads
    swelling = smooth_noise(rng, shape, 4 * px_per_um)
    unevenness = style.granularity * (granules + 1.3 * threads + 0.4 * swelling)
    within = smoothstep(border_um * np.float32(px_per_um / 2.5))  # 0 at cell borders, which are blocky in `cell`
    shade = rng.normal(0, 0.22, len(cells)).clip(-0.45, 0.45).astype(np.float32)[cell] * within
    eosin = style.cytoplasm * (1 + unevenness + shade).clip(0.08)
    hematoxylin = style.basophilia * (1 + 1.3 * unevenness - 0.4 * shade).clip(0.05)
    if style.clearing > 0:  # fat or glycogen has been dissolved, so that only strands of cytoplasm remain
        emptiness = (style.clearing * rng.uniform(0.6, 1.2, len(cells))).clip(0, 1).astype(np.float32)[cell] * within
        wisps = smoothstep(0.25 + 0.35 * swelling + 0.3 * smooth_noise(rng, shape, 1.8 * px_per_um))
        rest = 1 - emptiness * smoothstep(border_um * np.float32(0.8) - np.float32(0.1)) * (1 - 0.6 * wisps)
        rest *= 1 - emptiness * np.float32(0.5) * (1 - smoothstep(nets[0] * 1.5))
        eosin, hematoxylin = eosin * rest, hematoxylin * rest
    membrane = np.exp(-((border_um / np.float32(0.32)) ** 2)) * (0.9 + 0.3 * swelling).clip(0.2)
    eosin = eosin + style.borders * membrane
    hematoxylin = hematoxylin + np.float32(0.3 * style.borders) * membrane
    kept = np.ones(shape, np.float32)
    for scale_um in (0.8, 1.4, 2.6):  # vacuoles of several sizes
        if scale_um * px_per_um < 1:  # too small to be visible
            continue
        bubbles = smooth_noise(rng, shape, scale_um * px_per_um) + 0.25 * swelling
        kept *= 1 - np.float32(0.75) * smoothstep((bubbles - np.float32(2.7 - 1.5 * style.foam)) * np.float32(1.8))
    shrinkage = 0.9 * smooth_noise(rng, shape, 9 * px_per_um) + 0.8 * smooth_noise(rng, shape, 3 * px_per_um)
    cracks = smoothstep((style.cracks_um * shrinkage.clip(0, 1.6) - border_um) * np.float32(1.4))
    kept *= 1 - np.float32(0.95) * cracks
    return hematoxylin * kept, eosin * kept


# Regions


def assign_cells(
    rng: np.random.Generator, shape: tuple[int, int], cells: Points, px_per_um: float, step: int = 2
) -> tuple[NDArray[np.intp], Field]:
    """Assign each pixel to the nearest cell; return the index of the cell and the distance to the cell border in µm.

    Both results are arrays (height, width). `cells` are the centers of at least two cells, complex numbers x + iy in
    pixels. The indices are indices in `cells`. The distances are approximate. Noise makes the borders irregular. To
    save time, both arrays are computed at every `step`-th row and column only, and then enlarged to the image size
    `shape` (height, width).
    """
    small = (-(-shape[0] // step), -(-shape[1] // step))
    positions = pixel_positions(small) * step
    for scale_um, shift_um in ((4.0, 1.1), (1.2, 0.35)):
        right, down = (smooth_noise(rng, small, scale_um * px_per_um / step) for _ in range(2))
        positions = positions + np.float32(shift_um * px_per_um) * (right + np.complex64(1j) * down)
    tree = cKDTree(np.stack([cells.real, cells.imag], axis=1))
    distances, nearest = tree.query(np.stack([positions.real, positions.imag], axis=-1), k=2)
    border = np.asarray((distances[..., 1] - distances[..., 0]) / 2, np.float32)
    enlarged = (small[1] * step, small[0] * step)
    fine = np.asarray(Image.fromarray(border).resize(enlarged, Image.Resampling.BILINEAR))[: shape[0], : shape[1]]
    cell = nearest[..., 0].repeat(step, axis=0).repeat(step, axis=1)[: shape[0], : shape[1]]
    return cell, np.asarray(fine / px_per_um, np.float32)


def compartment_depth(
    rng: np.random.Generator, shape: tuple[int, int], width_um: float, stroma_um: float, px_per_um: float
) -> Field:
    """Sample compartments, and return the depth (height, width) of each pixel in µm.

    Compartments are rounded regions of epithelium, such as nests, tubules or glands. The depth is positive in
    compartments, and negative in the stroma between compartments. `width_um` is the approximate distance between the
    centers of neighboring compartments, and `stroma_um` is the approximate thickness of the stroma.
    """
    margin = int(width_um * px_per_um)  # so that compartments extend beyond the edge of the image
    padded = (shape[0] + 2 * margin, shape[1] + 2 * margin)
    seeds = scatter_points(rng, padded, width_um * px_per_um, jitter=0.2)
    _, border_um = assign_cells(rng, padded, seeds, px_per_um, step=4)
    inner = border_um[margin : margin + shape[0], margin : margin + shape[1]]
    smooth = ndimage.gaussian_filter(inner, 3 * px_per_um, truncate=2.0)
    unevenness = 1 + 0.5 * smooth_noise(rng, shape, 25 * px_per_um)
    depth: Field = smooth - np.float32(stroma_um / 2) * unevenness.clip(0.2) - np.float32(1.2)
    return depth


# Blood


def paint_red_cells(rng: np.random.Generator, canvas: StainCanvas, centers: Points, strength: float = 2.1) -> None:
    """Paint red blood cells on `canvas` at `centers`: discs of irregular shape that are paler in the middle.

    `centers` (n,) are complex numbers x + iy in pixels. `strength` is the approximate concentration of stained
    hemoglobin at the edges of the discs.
    """
    px_per_um = 1 / canvas.spacing_um_px
    side = int(10 * px_per_um) | 1
    for center in centers:
        window = Window.around(canvas, center, side)
        if window is None:
            continue
        radius = rng.uniform(2.4, 3.5) * px_per_um
        offset = window.offset * sample_directions(rng, 1)[0]
        bulge = 1 + np.float32(rng.normal(0, 0.12)) * (offset / (np.abs(offset) + 1)).real  # somewhat egg-shaped
        distance = np.abs(offset.real * rng.uniform(1, 1.7) + 1j * offset.imag) / (radius * bulge)
        disc = smoothstep((1 - distance) * np.float32(radius) / np.float32(1.3) + np.float32(0.5))
        hollow = np.float32(rng.uniform(0.2, 0.6))
        stain = disc * np.float32(strength * rng.uniform(0.7, 1.15)) * (1 - hollow * (1 - distance**2).clip(0))
        np.maximum(window.view(canvas.blood), stain, out=window.view(canvas.blood))
        window.attenuate(canvas, disc, hematoxylin=0.3, eosin=0.15)


def paint_vessels(
    rng: np.random.Generator, canvas: StainCanvas, centers: Points, directions: Points
) -> tuple[Points, Points]:
    """Paint small vessels on `canvas`: a thin wall, and red blood cells in the lumen.

    `centers` (n,) are the centers of the vessels, complex numbers x + iy in pixels. `directions` (n,) are the
    directions of the long axes of the vessels, complex numbers x + iy of length 1. Returns two arrays for the
    endothelial nuclei in the walls of all vessels: the positions of the nuclei, as complex numbers x + iy in pixels,
    and the directions of the long axes of the nuclei, as complex numbers of length 1. The caller must paint the nuclei.
    """
    px_per_um = 1 / canvas.spacing_um_px
    endothelium, tangents = [np.zeros(0, np.complex64)], [np.zeros(0, np.complex64)]
    for center, direction in zip(centers, directions, strict=True):
        long, short = rng.uniform(6, 20), rng.uniform(2.5, 6.5)  # semi-axes of the lumen in µm
        window = Window.around(canvas, center, int(2 * (1 + 3 / short) * long * px_per_um) | 1)
        if window is None:
            continue
        shape = (window.offset.shape[0], window.offset.shape[1])
        local = window.offset * np.conj(direction) / np.float32(px_per_um)
        y = local.imag + np.float32(rng.normal(0, 0.012)) * local.real**2
        y = y + 0.5 * smooth_noise(rng, shape, 3 * px_per_um)
        level = np.hypot(local.real / np.float32(long), y / np.float32(short))
        depth_um = (1 - level) * np.float32(short)
        lumen = smoothstep(depth_um + np.float32(0.5))
        window.attenuate(canvas, lumen, hematoxylin=0.04, eosin=0.06)
        wall = np.exp(-(((depth_um + np.float32(0.9)) / np.float32(0.8)) ** 2))
        window.view(canvas.eosin)[:] += np.float32(rng.uniform(0.1, 0.4)) * wall
        red_cells = scatter_points(rng, shape, 4.7 * px_per_um, jitter=0.2) - complex(shape[1] // 2, shape[0] // 2)
        rotated = red_cells * np.conj(direction) / px_per_um
        is_inside = np.hypot(rotated.real / (long - 2), rotated.imag / max(short - 1.6, 0.5)) < 1
        is_inside &= rng.random(len(red_cells)) < rng.choice([0.15, 0.7, 0.95])
        paint_red_cells(rng, canvas, center + red_cells[is_inside])
        around = sample_directions(rng, int(rng.integers(2, 6)))
        in_wall = (around.real * (long + 0.5) + 1j * around.imag * (short + 1.2)) * direction * px_per_um
        endothelium.append(np.asarray(center + in_wall, np.complex64))
        tangent = (-around.imag * long + 1j * around.real * short) * direction
        tangents.append(np.asarray(tangent / np.abs(tangent), np.complex64))
    return np.concatenate(endothelium), np.concatenate(tangents)
