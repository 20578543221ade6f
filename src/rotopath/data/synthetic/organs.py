"""Four organs at 0.25 µm/px with every nucleus outlined, in the layout of Kumar et al.

In: a seed. Out: 24 fields as TIFF, their outlines as Aperio XML and 16-bit label maps, and the split.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.aperio import Outline, paint_labels
from rotopath.data.splits import KUMAR_FIELDS
from rotopath.data.synthetic.layout import finished_folder, write_annotations, write_labels, write_tiff
from rotopath.data.synthetic.look import AT_40X, develop, draw_look
from rotopath.data.synthetic.noise import (
    Field,
    Points,
    draw_directions,
    gradient,
    look_up,
    scatter,
    smooth_noise,
    thin_out,
)
from rotopath.data.synthetic.nuclei import FIBROBLAST, LYMPHOCYTE, Kind, Nuclei, draw_nuclei, join, outlines, stamp
from rotopath.data.synthetic.tissue import Manner, add_red_cells, clear_away, lay_tissue, ramp, territories

SPACING_UM_PX = 0.25
UM = 1 / SPACING_UM_PX  # pixels
FEWEST_VISIBLE_PX = 20  # of a nucleus behind others or at the edge, or it is not annotated

EPITHELIAL = Kind(3.6, elongation=1.2, darkness=0.95, rim=0.45, clumps=0.35, pallor=0.3, nucleoli=0.5)


@dataclass(frozen=True)
class Plan:
    """The architecture of a field."""

    depth_um: Field  # into the epithelium; negative in stroma
    lumen: Field  # 1 where it is empty
    cells: Points  # epithelial ones
    epithelial: Kind
    manner: Manner
    stroma_cells: float = 0.5  # share of places in stroma that hold a fibroblast
    immune: float = 1.9  # how rare lymphocytes are, in deviations
    red_cells: float = 2.0  # how rare red blood cells are in stroma, likewise


def make_nuclei(out: Path, seed: int = 0, size_px: int = 512) -> None:
    """Write the whole set into `out`, which must not exist or be empty."""
    splits = [split for split, count in KUMAR_FIELDS.items() for _ in range(count)]
    with finished_folder(out) as folder:
        table = ["image,organ,split"]
        for organ in ORGANS:
            for number, split in enumerate(splits, start=1):
                name = f"SYNTH-{organ[:2].upper()}-{number:02d}"
                image, nuclei = render_field(seed, organ, number, size_px)
                visible = annotate(nuclei, size_px)
                labels, _ = paint_labels(visible, size_px, size_px)
                write_tiff(folder / "Tissue Images" / f"{name}.tif", image, SPACING_UM_PX)
                vertices = [outline.vertices for outline in visible]
                write_annotations(folder / "Annotations" / f"{name}.xml", vertices, SPACING_UM_PX)
                write_labels(folder / "Label Maps" / f"{name}.png", labels)
                table.append(f"{name},{organ},{split}")
        (folder / "split.csv").write_text("\n".join(table) + "\n", encoding="utf-8")


def annotate(nuclei: Nuclei, size_px: int) -> tuple[Outline, ...]:
    """The outlines of the nuclei that can be seen, rounded as the file will hold them."""
    taken = np.zeros((size_px, size_px), bool)
    kept: list[Outline] = []
    for around in outlines(nuclei):
        vertices = np.stack([around.real, around.imag], axis=1).astype(np.float64).round(2)
        outline = Outline(str(len(kept) + 1), vertices)
        mask = paint_labels((outline,), size_px, size_px)[0] > 0
        if (mask & ~taken).sum() >= FEWEST_VISIBLE_PX:
            taken |= mask
            kept.append(outline)
    return tuple(kept)


def render_field(seed: int, organ: str, number: int, size_px: int) -> tuple[NDArray[np.uint8], Nuclei]:
    """One field and its nuclei, those in front first."""
    rng = np.random.default_rng([seed, 2, list(ORGANS).index(organ), number])
    shape = (size_px, size_px)
    look = draw_look(rng, AT_40X)
    plan = ORGANS[organ](rng, shape)
    cells = plan.cells[look_up(plan.lumen, plan.cells) < 0.3]
    canvas, fibre = lay_tissue(rng, plan.depth_um, plan.cells, SPACING_UM_PX, plan.manner)
    clear_away(canvas, plan.lumen)

    stroma = scatter(rng, shape, 8 * UM, jitter=0.35)
    stroma = stroma[(look_up(plan.depth_um, stroma) < -1) & (rng.random(len(stroma)) < plan.stroma_cells)]
    stroma = stroma[look_up(plan.lumen, stroma) < 0.3]
    stroma = stroma[thin_out(stroma, 6 * UM)]
    immune = scatter(rng, shape, 7 * UM, jitter=0.25)
    crowd = look_up(smooth_noise(rng, shape, 18 * UM), immune) - 0.04 * look_up(plan.depth_um, immune).clip(-10, 25)
    immune = immune[(crowd > plan.immune) & (look_up(plan.lumen, immune) < 0.5)]
    nuclei = join(
        [
            draw_nuclei(rng, LYMPHOCYTE, immune, SPACING_UM_PX),
            draw_nuclei(rng, FIBROBLAST, stroma, SPACING_UM_PX, look_up(fibre, stroma)),
            draw_nuclei(rng, plan.epithelial, cells, SPACING_UM_PX),
        ]
    )
    red = scatter(rng, shape, 6 * UM, jitter=0.2)
    flooded = look_up(smooth_noise(rng, shape, 12 * UM), red) > plan.red_cells
    add_red_cells(rng, canvas, red[flooded & (look_up(plan.depth_um, red) < -1)])
    stamp(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    return develop(rng, canvas.hematoxylin, canvas.eosin, look), nuclei


def _breast(rng: np.random.Generator, shape: tuple[int, int]) -> Plan:
    """Solid nests and ducts of pleomorphic cells in dense stroma with lymphocytes."""
    scale_um = rng.uniform(25, 50)
    depth = (smooth_noise(rng, shape, scale_um * UM) + rng.uniform(-0.4, 0.6)) * np.float32(scale_um / 2)
    radius = rng.uniform(3.6, 5.2)
    cells = scatter(rng, shape, radius * rng.uniform(2.4, 2.9) * UM)
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
    manner = Manner(
        cytoplasm=rng.uniform(0.5, 0.8),
        basophilia=0.08 + 0.3 * rng.random() ** 2,
        cracks_um=rng.uniform(0, 1.3),
        retraction_um=rng.uniform(0, 2),
        collagen=rng.uniform(0.55, 0.95),
        slits=rng.uniform(0.1, 0.5),
    )
    inside = cells[look_up(depth, cells) > 2]
    return Plan(depth, np.zeros(shape, np.float32), inside, kind, manner, immune=rng.uniform(1.2, 2.2))


def _kidney(rng: np.random.Generator, shape: tuple[int, int]) -> Plan:
    """Tubules back to back, of cuboidal cells around a small lumen; or clear cells in a net of vessels."""
    clear = rng.random() < 0.4
    depth = _compartments(rng, shape, rng.uniform(42, 58), 1.5 if clear else 2.0)
    wall_um = rng.uniform(9, 12)
    lumen = np.zeros(shape, np.float32) if clear else _lumen(rng, depth, wall_um)
    if clear:
        cells = scatter(rng, shape, rng.uniform(12, 15) * UM)
        cells = cells[look_up(depth, cells) > 2]
    else:
        cells = _layer(rng, shape, depth, rng.uniform(4.5, 6), 9)
    kind = replace(EPITHELIAL, radius_um=rng.uniform(3.0, 3.6), elongation=1.08, wrinkles=0.03, clumps=0.3)
    manner = Manner(
        cytoplasm=rng.uniform(0.45, 0.8),
        basophilia=rng.uniform(0.05, 0.2),
        granularity=0.22,
        clearing=0.85 if clear else 0.0,
        borders=0.35 if clear else 0.08,
        cracks_um=0.4,
        retraction_um=0.8,
        basement=0.25,
    )
    return Plan(depth, lumen, cells, kind, manner, stroma_cells=0.7, red_cells=1.2)


def _liver(rng: np.random.Generator, shape: tuple[int, int]) -> Plan:
    """Plates of large polygonal cells with round nuclei, and sinusoids between them; some fat."""
    ridges = np.abs(smooth_noise(rng, shape, 14 * UM) + 0.5 * smooth_noise(rng, shape, 7 * UM))
    depth = ridges * 9 - np.float32(rng.uniform(1.0, 2.2))
    cells = scatter(rng, shape, rng.uniform(13, 16) * UM, jitter=0.15)
    cells = cells[look_up(depth, cells) > 1.5]
    pair = cells[rng.random(len(cells)) < 0.12]  # cells with two nuclei
    cells = np.concatenate([cells, pair + np.float32(7 * UM) * draw_directions(rng, len(pair))])
    fat = scatter(rng, shape, 26 * UM, jitter=0.3)
    fat = fat[rng.random(len(fat)) < rng.choice([0.02, 0.4])]
    lumen = _discs(fat, rng.uniform(2, 8, len(fat)) * UM, shape)
    kind = replace(
        EPITHELIAL,
        radius_um=rng.uniform(3.5, 4.2),
        spread=0.14,
        elongation=1.05,
        wrinkles=0.02,
        pallor=rng.uniform(0.3, 0.7),
        nucleoli=1.1,
    )
    manner = Manner(
        cytoplasm=rng.uniform(0.5, 0.85),
        basophilia=rng.uniform(0.1, 0.3),
        granularity=0.28,
        foam=0.25,
        borders=0.12,
        cracks_um=0.2,
        retraction_um=1.0,
        collagen=0.35,
        slits=0.9,
    )
    return Plan(depth, lumen, cells, kind, manner, stroma_cells=0.9, immune=2.2, red_cells=0.6)


def _prostate(rng: np.random.Generator, shape: tuple[int, int]) -> Plan:
    """Glands: columnar cells with their nuclei at the base, a frilled lumen, and muscular stroma around."""
    depth = _compartments(rng, shape, rng.uniform(60, 95), rng.uniform(4, 10))
    wall_um = rng.uniform(11, 16)
    cells = _layer(rng, shape, depth, rng.uniform(4.5, 6), 6.6)
    if rng.random() < 0.5:  # a second row behind the first
        cells = np.concatenate([cells, _layer(rng, shape, depth, 11, 9)])
        cells = cells[thin_out(cells, 5.5 * UM)]
    kind = replace(
        EPITHELIAL,
        radius_um=rng.uniform(3.1, 3.9),
        elongation=1.15,
        wrinkles=0.03,
        pallor=rng.uniform(0.2, 0.6),
        nucleoli=rng.uniform(0.4, 1.2),
    )
    manner = Manner(
        cytoplasm=rng.uniform(0.35, 0.65),
        basophilia=rng.uniform(0.1, 0.25),
        clearing=rng.uniform(0, 0.5),
        borders=0.12,
        cracks_um=0.2,
        retraction_um=1.2,
        basement=0.2,
        collagen=rng.uniform(0.55, 0.8),
    )
    return Plan(depth, _lumen(rng, depth, wall_um), cells, kind, manner)


ORGANS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Plan]] = {
    "breast": _breast,
    "kidney": _kidney,
    "liver": _liver,
    "prostate": _prostate,
}


def _compartments(rng: np.random.Generator, shape: tuple[int, int], width_um: float, stroma_um: float) -> Field:
    """Depth into rounded compartments of about this width, with stroma of this thickness between them."""
    margin = int(width_um * UM)  # seeds beyond the edge, so that compartments are cut off rather than closed
    wide = (shape[0] + 2 * margin, shape[1] + 2 * margin)
    seeds = scatter(rng, wide, width_um * UM, jitter=0.2)
    _, border_um = territories(rng, wide, seeds, UM)
    inner = border_um[margin : margin + shape[0], margin : margin + shape[1]]
    smooth = ndimage.gaussian_filter(inner, 3 * UM, truncate=2.0)
    uneven = 1 + 0.5 * smooth_noise(rng, shape, 25 * UM)
    depth: Field = smooth - np.float32(stroma_um / 2) * uneven.clip(0.2) - np.float32(1.2)
    return depth


def _lumen(rng: np.random.Generator, depth_um: Field, wall_um: float) -> Field:
    shape = (depth_um.shape[0], depth_um.shape[1])
    frill = 1.6 * smooth_noise(rng, shape, 5 * UM) + 0.6 * smooth_noise(rng, shape, 1.5 * UM)
    return ramp((depth_um + frill - np.float32(wall_um)) * np.float32(1.2))


def _layer(rng: np.random.Generator, shape: tuple[int, int], depth_um: Field, at_um: float, apart_um: float) -> Points:
    """Points at about this depth, side by side."""
    points = rng.permutation(scatter(rng, shape, 0.45 * apart_um * UM, jitter=0.3))
    near = np.abs(look_up(depth_um, points) - at_um) < 4
    points = points[near]
    slope = gradient(depth_um)
    goal = at_um + rng.normal(0, 0.9, len(points))
    for _ in range(2):
        rise = look_up(slope, points)
        step = (goal - look_up(depth_um, points)) * rise / (np.abs(rise) ** 2 + 1e-3)
        points = np.asarray(points + step / np.maximum(np.abs(step) / (3 * UM), 1), np.complex64)
    points = points[np.abs(look_up(depth_um, points) - at_um) < 3]
    kept: Points = points[thin_out(points, apart_um * UM)]
    return kept


def _discs(centres: Points, radii_px: NDArray[np.float64], shape: tuple[int, int]) -> Field:
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    covered = np.zeros(shape, np.float32)
    for centre, radius in zip(centres, radii_px, strict=True):
        away = np.hypot(columns - centre.real, rows - centre.imag)
        np.maximum(covered, ramp((radius - away).astype(np.float32) / 2), out=covered)
    return covered
