"""Make synthetic tissue of four organs at 0.25 µm/px with all nuclei outlined, in the layout of Kumar et al.

`make_nuclei` writes 24 TIFF images. An image is called a field. The nuclei of each field are written as outlines
(Aperio XML) and as a 16-bit label map. `split.csv` contains the organ and the split of each field. A CSV file next to
each label map contains the class of each nucleus: epithelial, lymphocyte or fibroblast. `manifest-classes.csv` lists
all fields, for training with these classes.

Each organ has a function that samples an `OrganPlan`: the positions of epithelium, lumens and cells in a field, and the
appearance of the tissue and its nuclei. The *depth* is the distance of a pixel from the border of the epithelium in µm:
positive in epithelium, negative in stroma. Positions are complex numbers x + iy in pixels.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rotopath.data.annotations import Outline, paint_labels
from rotopath.data.splits import KUMAR_FIELDS
from rotopath.synthetic.ground import TissueStyle, compartment_depth, paint_ground, paint_red_cells, paint_vessels
from rotopath.synthetic.nuclei import (
    LYMPHOCYTE,
    Nuclei,
    NucleusType,
    concatenate_nuclei,
    paint_nuclei,
    sample_fibroblasts,
    sample_nuclei,
    trace_nuclei,
)
from rotopath.synthetic.painting import (
    AT_40X,
    Field,
    Points,
    drop_points_near,
    erase_tissue,
    gradient,
    new_dataset_folder,
    render_rgb,
    sample_appearance,
    sample_directions,
    scatter_points,
    select_spaced,
    smooth_noise,
    smoothstep,
    values_at,
    write_aperio_outlines,
    write_labels,
    write_table,
    write_tiff,
)

SPACING_UM_PX = 0.25
PX_PER_UM = 1 / SPACING_UM_PX
MIN_VISIBLE_PX = 20  # nuclei with fewer visible pixels are not annotated

EPITHELIAL = NucleusType(
    3.6, elongation=1.2, darkness=0.95, rim=0.45, clumps=0.35, pallor=0.3, nucleoli=0.5, cell="epithelial"
)


@dataclass(frozen=True)
class OrganPlan:
    """Architecture of a field, and appearance of the tissue and nuclei in the field."""

    depth_um: Field  # depth of each pixel: positive in epithelium, negative in stroma
    lumen: Field  # mask: 1 in lumens and in fat droplets, which are empty; 0 elsewhere
    cells: Points  # centers of epithelial cells, x + iy in pixels; a cell with two nuclei has two centers
    epithelial: NucleusType  # appearance of the epithelial nuclei
    style: TissueStyle
    stroma_cells: float = 0.4  # density of fibroblasts in stroma, from 0 (none) to 1 (most)
    immune: float = 1.9  # threshold on random noise with standard deviation 1: the higher, the fewer lymphocytes
    red_cells: float = 2.4  # the same for red blood cells in stroma outside vessels: the higher, the fewer
    vessels: int = 3  # maximum number of vessels in a field of 128 µm × 128 µm
    eccentricity_um: float = 0.0  # typical distance of nuclei from the centers of their cells


# The dataset


def make_nuclei(out: Path, seed: int = 0, size_px: int = 512) -> None:
    """Write a dataset of synthetic tissue of four organs with outlined nuclei to `out`, a new or empty folder.

    Each image has `size_px` × `size_px` pixels. The same `seed` gives the same dataset. Raises FileExistsError if `out`
    exists and is not an empty folder.
    """
    splits = [split for split, count in KUMAR_FIELDS.items() for _ in range(count)]
    with new_dataset_folder(out) as folder:
        fields: list[tuple[str, str, str]] = []
        for organ in ORGANS:
            for number, split in enumerate(splits, start=1):
                name = f"SYNTH-{organ[:2].upper()}-{number:02d}"
                image, nuclei = render_organ_field(seed, organ, number, size_px)
                outlines = outline_visible_nuclei(nuclei, size_px)
                labels, _ = paint_labels(outlines, size_px, size_px)
                write_tiff(folder / "Tissue Images" / f"{name}.tif", image, SPACING_UM_PX)
                vertices = [outline.vertices for outline in outlines]
                write_aperio_outlines(folder / "Annotations" / f"{name}.xml", vertices, SPACING_UM_PX)
                write_labels(folder / "Label Maps" / f"{name}.png", labels)
                # `strict` raises an error if the label map lacks a nucleus. Otherwise, nuclei would get wrong classes.
                classes = zip(
                    range(1, int(labels.max()) + 1), (outline.class_name for outline in outlines), strict=True
                )
                write_table(folder / "Label Maps" / f"{name}.csv", "object,class", classes)
                fields.append((name, organ, split))
        write_table(folder / "split.csv", "image,organ,split", fields)
        write_table(
            folder / "manifest-classes.csv",
            "image,annotation,group,split,spacing,organ",
            (
                (f"Tissue Images/{name}.tif", f"Label Maps/{name}.png", name, split, SPACING_UM_PX, organ)
                for name, organ, split in fields
            ),
        )


def render_organ_field(seed: int, organ: str, number: int, size_px: int) -> tuple[NDArray[np.uint8], Nuclei]:
    """Return the image (H, W, 3) of a field, and all nuclei of the field, ordered from front to back.

    `organ` is a key of ORGANS, such as "breast", and `number` the number of the field of this organ, from 1. `size_px`
    is the height and width of the image in pixels.
    """
    rng = np.random.default_rng([seed, 2, list(ORGANS).index(organ), number])
    shape = (size_px, size_px)
    appearance = sample_appearance(rng, AT_40X)
    plan = ORGANS[organ](rng, shape)
    cells = plan.cells[values_at(plan.lumen, plan.cells) < 0.3]
    canvas, fibers = paint_ground(rng, plan.depth_um, plan.cells, SPACING_UM_PX, plan.style)
    erase_tissue(canvas, plan.lumen)

    stroma = scatter_points(rng, shape, 8 * PX_PER_UM, jitter=0.35)
    stroma = stroma[(values_at(plan.depth_um, stroma) < -1) & (rng.random(len(stroma)) < plan.stroma_cells)]
    stroma = stroma[values_at(plan.lumen, stroma) < 0.3]
    stroma = stroma[select_spaced(stroma, 6 * PX_PER_UM)]
    immune = scatter_points(rng, shape, 7 * PX_PER_UM, jitter=0.25)
    crowding = values_at(smooth_noise(rng, shape, 18 * PX_PER_UM), immune)
    crowding = crowding - 0.04 * values_at(plan.depth_um, immune).clip(-10, 25)
    immune = immune[(crowding > plan.immune) & (values_at(plan.lumen, immune) < 0.5)]
    red_cells = scatter_points(rng, shape, 6 * PX_PER_UM, jitter=0.2)
    is_bleeding = values_at(smooth_noise(rng, shape, 12 * PX_PER_UM), red_cells) > plan.red_cells
    paint_red_cells(rng, canvas, red_cells[is_bleeding & (values_at(plan.depth_um, red_cells) < -1)])
    vessels = stroma[select_spaced(stroma, 40 * PX_PER_UM)][: round(plan.vessels * (size_px / 512) ** 2)]
    stroma = drop_points_near(stroma, vessels, 7 * PX_PER_UM)
    cells = drop_points_near(cells, vessels, 8 * PX_PER_UM)
    endothelium, tangents = paint_vessels(rng, canvas, vessels, values_at(fibers, vessels))
    shift = plan.eccentricity_um * PX_PER_UM * sample_directions(rng, len(cells)) * rng.uniform(0.3, 1.2, len(cells))
    spindles = np.concatenate([stroma, endothelium])
    directions = np.concatenate([values_at(fibers, stroma), tangents])
    nuclei = concatenate_nuclei(
        [
            sample_nuclei(rng, LYMPHOCYTE, immune, SPACING_UM_PX),
            sample_fibroblasts(rng, spindles, SPACING_UM_PX, directions),
            sample_nuclei(rng, plan.epithelial, cells + shift, SPACING_UM_PX),
        ]
    )
    paint_nuclei(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    return render_rgb(rng, canvas, appearance), nuclei


def outline_visible_nuclei(nuclei: Nuclei, size_px: int) -> tuple[Outline, ...]:
    """Return the outlines and classes of the visible nuclei in an image of `size_px` × `size_px` pixels.

    `nuclei` must be ordered from front to back, and the outlines have the same order. A nucleus is visible if at least
    MIN_VISIBLE_PX pixels of this nucleus are in the image and not covered by visible nuclei in front. Coordinates are
    rounded to 0.01 px, as in the XML file.
    """
    is_covered = np.zeros((size_px, size_px), bool)
    visible: list[Outline] = []
    for ring, cell in zip(trace_nuclei(nuclei), nuclei.cell, strict=True):
        vertices = np.stack([ring.real, ring.imag], axis=1).astype(np.float64).round(2)
        outline = Outline(str(len(visible) + 1), vertices, str(cell))
        mask = paint_labels((outline,), size_px, size_px)[0] > 0
        if (mask & ~is_covered).sum() >= MIN_VISIBLE_PX:
            is_covered |= mask
            visible.append(outline)
    return tuple(visible)


# Organs


def _breast(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Sample a field of breast: solid nests of epithelial cells in stroma with lymphocytes."""
    scale_um = rng.uniform(25, 50)
    depth = (smooth_noise(rng, shape, scale_um * PX_PER_UM) + rng.uniform(-0.4, 0.6)) * np.float32(scale_um / 2)
    radius = rng.uniform(3.6, 5.2)
    cells = scatter_points(rng, shape, radius * rng.uniform(2.4, 2.9) * PX_PER_UM)
    kind = replace(
        EPITHELIAL,
        radius_um=radius,
        spread=rng.uniform(0.12, 0.25),
        elongation=1.35,
        wrinkles=0.06,
        darkness=rng.uniform(0.85, 1.2),
        pallor=rng.uniform(0.1, 0.6),
        nucleoli=rng.uniform(0.3, 1.3),
    )
    style = TissueStyle(
        cytoplasm=rng.uniform(0.3, 0.55),
        basophilia=0.08 + 0.35 * rng.random() ** 2,
        granularity=rng.uniform(0.2, 0.4),
        foam=rng.uniform(0.1, 0.7),
        borders=rng.uniform(0.1, 0.4),
        cracks_um=rng.uniform(0, 1.3),
        retraction_um=rng.uniform(0, 2),
        collagen=rng.uniform(0.5, 0.9),
        slits=rng.uniform(0.2, 0.6),
        looseness=rng.uniform(0, 0.5),
    )
    inside = cells[values_at(depth, cells) > 2]
    return OrganPlan(depth, np.zeros(shape, np.float32), inside, kind, style, immune=rng.uniform(1.2, 2.2))


def _kidney(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Sample a field of kidney: closely packed tubules with small lumens, or groups of clear cells; many vessels."""
    is_clear = rng.random() < 0.4
    depth = compartment_depth(rng, shape, rng.uniform(42, 58), 1.5 if is_clear else 2.0, PX_PER_UM)
    wall_um = rng.uniform(9, 12)
    lumen = np.zeros(shape, np.float32) if is_clear else _lumen(rng, depth, wall_um)
    if is_clear:
        cells = scatter_points(rng, shape, rng.uniform(12, 15) * PX_PER_UM)
        cells = cells[values_at(depth, cells) > 2]
    else:
        cells = _cells_at_depth(rng, shape, depth, rng.uniform(4.5, 6), 9)
    kind = replace(EPITHELIAL, radius_um=rng.uniform(3.0, 3.6), elongation=1.1, wrinkles=0.035, clumps=0.3)
    if is_clear:  # small dark nuclei, away from the centers of their cells
        kind = replace(
            kind,
            radius_um=rng.uniform(2.6, 3.3),
            spread=0.17,
            elongation=1.25,
            wrinkles=0.06,
            darkness=1.3,
            pallor=0.15,
        )
    style = TissueStyle(
        cytoplasm=rng.uniform(0.35, 0.5) if is_clear else rng.uniform(0.4, 0.7),
        basophilia=rng.uniform(0.05, 0.2),
        granularity=0.35,
        foam=rng.uniform(0.2, 0.6),
        clearing=rng.uniform(0.75, 1.0) if is_clear else 0.0,
        borders=rng.uniform(0.2, 0.45) if is_clear else 0.12,
        cracks_um=0.15 if is_clear else 0.4,
        retraction_um=0.8,
        basement=0.25,
        looseness=0.1,
    )
    eccentricity_um = 2.8 if is_clear else 0.4
    return OrganPlan(
        depth,
        lumen,
        cells,
        kind,
        style,
        stroma_cells=0.7,
        red_cells=1.5,
        vessels=7,
        eccentricity_um=eccentricity_um,
    )


def _liver(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Sample a field of liver: plates of large cells with round nuclei, gaps (sinusoids) between the plates, fat."""
    ridges = np.abs(smooth_noise(rng, shape, 14 * PX_PER_UM) + 0.5 * smooth_noise(rng, shape, 7 * PX_PER_UM))
    depth = ridges * 9 - np.float32(rng.uniform(1.0, 2.2))
    cells = scatter_points(rng, shape, rng.uniform(13, 16) * PX_PER_UM, jitter=0.15)
    cells = cells[values_at(depth, cells) > 1.5]
    binucleate = cells[rng.random(len(cells)) < 0.12]
    second_nuclei = binucleate + np.float32(7 * PX_PER_UM) * sample_directions(rng, len(binucleate))
    cells = np.concatenate([cells, second_nuclei])
    fat = scatter_points(rng, shape, 26 * PX_PER_UM, jitter=0.3)
    fat = fat[rng.random(len(fat)) < rng.choice([0.02, 0.4])]
    droplets = _fat_droplets(rng, fat, shape)
    kind = replace(
        EPITHELIAL,
        radius_um=rng.uniform(3.5, 4.2),
        spread=0.14,
        elongation=1.05,
        wrinkles=0.02,
        pallor=rng.uniform(0.3, 0.7),
        nucleoli=1.1,
    )
    style = TissueStyle(
        cytoplasm=rng.uniform(0.4, 0.65),
        basophilia=rng.uniform(0.1, 0.3),
        granularity=rng.uniform(0.2, 0.4),
        foam=rng.uniform(0.2, 0.75),
        borders=rng.uniform(0.15, 0.35),
        cracks_um=rng.uniform(0.1, 0.5),
        retraction_um=1.0,
        collagen=0.3,
        slits=0.8,
        looseness=0.8,
    )
    return OrganPlan(
        depth, droplets, cells, kind, style, stroma_cells=0.9, immune=2.2, red_cells=0.7, eccentricity_um=0.8
    )


def _prostate(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Sample a field of prostate: glands in stroma. A lumen has wavy edges and one or two rows of cells around it."""
    depth = compartment_depth(rng, shape, rng.uniform(60, 95), rng.uniform(4, 10), PX_PER_UM)
    wall_um = rng.uniform(11, 16)
    cells = _cells_at_depth(rng, shape, depth, rng.uniform(4.5, 6), 6.6)
    if rng.random() < 0.5:  # a second row of cells behind the first row
        cells = np.concatenate([cells, _cells_at_depth(rng, shape, depth, 11, 9)])
        cells = cells[select_spaced(cells, 5.5 * PX_PER_UM)]
    kind = replace(
        EPITHELIAL,
        radius_um=rng.uniform(3.1, 3.9),
        elongation=1.15,
        wrinkles=0.03,
        pallor=rng.uniform(0.2, 0.6),
        nucleoli=rng.uniform(0.4, 1.2),
    )
    style = TissueStyle(
        cytoplasm=rng.uniform(0.3, 0.55),
        basophilia=rng.uniform(0.1, 0.25),
        granularity=rng.uniform(0.25, 0.4),
        foam=rng.uniform(0.3, 0.8),
        clearing=rng.choice([0.0, 0.35, 0.7]),
        borders=rng.uniform(0.15, 0.35),
        cracks_um=0.2,
        retraction_um=1.2,
        basement=0.2,
        collagen=rng.uniform(0.45, 0.75),
        slits=rng.uniform(0.3, 0.6),
        looseness=rng.uniform(0, 0.4),
    )
    return OrganPlan(depth, _lumen(rng, depth, wall_um), cells, kind, style)


# By organ: a function that samples the plan of a field. Its arguments are the random generator and (height, width).
ORGANS: dict[str, Callable[[np.random.Generator, tuple[int, int]], OrganPlan]] = {
    "breast": _breast,
    "kidney": _kidney,
    "liver": _liver,
    "prostate": _prostate,
}


def _lumen(rng: np.random.Generator, depth_um: Field, wall_um: float) -> Field:
    """Return a mask that is 1 in lumens and 0 elsewhere. Random noise makes the edges of lumens wavy.

    A lumen is a region where the depth exceeds `wall_um`. Therefore, `wall_um` is the approximate thickness of the
    epithelium around a lumen.
    """
    shape = (depth_um.shape[0], depth_um.shape[1])
    waves = 1.6 * smooth_noise(rng, shape, 5 * PX_PER_UM) + 0.6 * smooth_noise(rng, shape, 1.5 * PX_PER_UM)
    return smoothstep((depth_um + waves - np.float32(wall_um)) * np.float32(1.2))


def _cells_at_depth(
    rng: np.random.Generator, shape: tuple[int, int], depth_um: Field, target_um: float, distance_um: float
) -> Points:
    """Return random centers of cells at a depth of about `target_um`.

    The centers are complex numbers x + iy in pixels, and more than `distance_um` apart. `depth_um` (height, width) is
    the depth of each pixel.
    """
    points = rng.permutation(scatter_points(rng, shape, 0.45 * distance_um * PX_PER_UM, jitter=0.3))
    points = points[np.abs(values_at(depth_um, points) - target_um) < 4]
    slope = gradient(depth_um)
    targets = target_um + rng.normal(0, 0.9, len(points))
    for _ in range(2):
        rise = values_at(slope, points)
        step = (targets - values_at(depth_um, points)) * rise / (np.abs(rise) ** 2 + 1e-3)
        points = np.asarray(points + step / np.maximum(np.abs(step) / (3 * PX_PER_UM), 1), np.complex64)
    points = points[np.abs(values_at(depth_um, points) - target_um) < 3]
    kept: Points = points[select_spaced(points, distance_um * PX_PER_UM)]
    return kept


def _fat_droplets(rng: np.random.Generator, centers: Points, shape: tuple[int, int]) -> Field:
    """Return a mask that is 1 in droplets of fat and 0 elsewhere. There is one droplet around each of `centers`.

    `centers` (n,) are complex numbers x + iy in pixels. Sizes are random; most droplets are small. The edges are
    irregular.
    """
    dents = 1.1 * smooth_noise(rng, shape, 4 * PX_PER_UM) + 0.5 * smooth_noise(rng, shape, 1.5 * PX_PER_UM)
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    mask = np.zeros(shape, np.float32)
    for center in centers:
        radius = min(1.2 + float(rng.exponential(3)), 11) * PX_PER_UM
        distance = np.hypot((columns - center.real) * rng.uniform(0.85, 1.15), rows - center.imag)
        depth = radius - distance.astype(np.float32) + np.float32(radius / 12) * dents
        np.maximum(mask, smoothstep(depth / 2), out=mask)
    return mask
