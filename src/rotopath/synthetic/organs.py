"""Architectures of four organs: where epithelium, lumens and cells lie, and what nuclei and ground look like.

In: a random generator and a shape. Out: a plan of the field, from which it is rendered.

Four organs at 0.25 µm/px with every nucleus outlined, in the layout of Kumar et al.

In: a seed. Out: 24 fields as TIFF, their outlines as Aperio XML and 16-bit label maps, and the split. Beside each label
map, a CSV gives the class of every nucleus: epithelial, lymphocyte or fibroblast. `manifest-classes.csv` lists all
fields as a data set with these classes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rotopath.data.annotations import Outline, paint_labels
from rotopath.data.splits import KUMAR_FIELDS
from rotopath.synthetic.ground import Manner, add_red_cells, add_vessels, compartments, lay_tissue
from rotopath.synthetic.nuclei import (
    LYMPHOCYTE,
    Nuclei,
    NucleusType,
    draw_fibroblasts,
    draw_nuclei,
    join,
    outlines,
    stamp,
)
from rotopath.synthetic.painting import (
    AT_40X,
    Field,
    Points,
    clear_away,
    develop,
    draw_directions,
    draw_look,
    finished_folder,
    gradient,
    keep_away,
    look_up,
    ramp,
    scatter,
    smooth_noise,
    thin_out,
    write_annotations,
    write_labels,
    write_table,
    write_tiff,
)

SPACING_UM_PX = 0.25
UM = 1 / SPACING_UM_PX  # pixels

EPITHELIAL = NucleusType(
    3.6, elongation=1.2, darkness=0.95, rim=0.45, clumps=0.35, pallor=0.3, nucleoli=0.5, cell="epithelial"
)


@dataclass(frozen=True)
class OrganPlan:
    """The architecture of a field."""

    depth_um: Field  # into the epithelium; negative in stroma
    lumen: Field  # 1 where it is empty
    cells: Points  # epithelial ones
    epithelial: NucleusType
    manner: Manner
    stroma_cells: float = 0.4  # share of places in stroma that hold a fibroblast
    immune: float = 1.9  # how rare lymphocytes are, in deviations
    red_cells: float = 2.4  # how rare bleeding into stroma is, likewise
    vessels: int = 3  # at most, in a field of (128 µm)²
    eccentric_um: float = 0.0  # how far nuclei lie from the middle of their cells


def _breast(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
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
    inside = cells[look_up(depth, cells) > 2]
    return OrganPlan(depth, np.zeros(shape, np.float32), inside, kind, manner, immune=rng.uniform(1.2, 2.2))


def _kidney(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Tubules back to back, of cuboidal cells around a small lumen; or clear cells in a net of vessels."""
    clear = rng.random() < 0.4
    depth = compartments(rng, shape, rng.uniform(42, 58), 1.5 if clear else 2.0, UM)
    wall_um = rng.uniform(9, 12)
    lumen = np.zeros(shape, np.float32) if clear else _lumen(rng, depth, wall_um)
    if clear:
        cells = scatter(rng, shape, rng.uniform(12, 15) * UM)
        cells = cells[look_up(depth, cells) > 2]
    else:
        cells = _layer(rng, shape, depth, rng.uniform(4.5, 6), 9)
    kind = replace(EPITHELIAL, radius_um=rng.uniform(3.0, 3.6), elongation=1.1, wrinkles=0.035, clumps=0.3)
    if clear:  # small dark nuclei, pushed about
        kind = replace(
            kind,
            radius_um=rng.uniform(2.6, 3.3),
            spread=0.17,
            elongation=1.25,
            wrinkles=0.06,
            darkness=1.3,
            pallor=0.15,
        )
    manner = Manner(
        cytoplasm=rng.uniform(0.35, 0.5) if clear else rng.uniform(0.4, 0.7),
        basophilia=rng.uniform(0.05, 0.2),
        granularity=0.35,
        foam=rng.uniform(0.2, 0.6),
        clearing=rng.uniform(0.75, 1.0) if clear else 0.0,
        borders=rng.uniform(0.2, 0.45) if clear else 0.12,
        cracks_um=0.15 if clear else 0.4,
        retraction_um=0.8,
        basement=0.25,
        looseness=0.1,
    )
    aside_um = 2.8 if clear else 0.4
    return OrganPlan(
        depth, lumen, cells, kind, manner, stroma_cells=0.7, red_cells=1.5, vessels=7, eccentric_um=aside_um
    )


def _liver(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Plates of large polygonal cells with round nuclei, and sinusoids between them; some fat."""
    ridges = np.abs(smooth_noise(rng, shape, 14 * UM) + 0.5 * smooth_noise(rng, shape, 7 * UM))
    depth = ridges * 9 - np.float32(rng.uniform(1.0, 2.2))
    cells = scatter(rng, shape, rng.uniform(13, 16) * UM, jitter=0.15)
    cells = cells[look_up(depth, cells) > 1.5]
    pair = cells[rng.random(len(cells)) < 0.12]  # cells with two nuclei
    cells = np.concatenate([cells, pair + np.float32(7 * UM) * draw_directions(rng, len(pair))])
    fat = scatter(rng, shape, 26 * UM, jitter=0.3)
    fat = fat[rng.random(len(fat)) < rng.choice([0.02, 0.4])]
    lumen = _droplets(rng, fat, shape)
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
    return OrganPlan(depth, lumen, cells, kind, manner, stroma_cells=0.9, immune=2.2, red_cells=0.7, eccentric_um=0.8)


def _prostate(rng: np.random.Generator, shape: tuple[int, int]) -> OrganPlan:
    """Glands: columnar cells with their nuclei at the base, a frilled lumen, and muscular stroma around."""
    depth = compartments(rng, shape, rng.uniform(60, 95), rng.uniform(4, 10), UM)
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
    return OrganPlan(depth, _lumen(rng, depth, wall_um), cells, kind, manner)


ORGANS: dict[str, Callable[[np.random.Generator, tuple[int, int]], OrganPlan]] = {
    "breast": _breast,
    "kidney": _kidney,
    "liver": _liver,
    "prostate": _prostate,
}


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


def _droplets(rng: np.random.Generator, centres: Points, shape: tuple[int, int]) -> Field:
    """1 within drops of fat: most small, some large, pressed out of round by their neighbours."""
    dents = 1.1 * smooth_noise(rng, shape, 4 * UM) + 0.5 * smooth_noise(rng, shape, 1.5 * UM)
    rows, columns = np.ogrid[: shape[0], : shape[1]]
    covered = np.zeros(shape, np.float32)
    for centre in centres:
        radius = min(1.2 + float(rng.exponential(3)), 11) * UM
        away = np.hypot((columns - centre.real) * rng.uniform(0.85, 1.15), rows - centre.imag)
        depth = radius - away.astype(np.float32) + np.float32(radius / 12) * dents
        np.maximum(covered, ramp(depth / 2), out=covered)
    return covered


FEWEST_VISIBLE_PX = 20  # of a nucleus behind others or at the edge, or it is not annotated


@dataclass(frozen=True)
class TypedOutline(Outline):
    cell: str  # the class of the nucleus


def make_nuclei(out: Path, seed: int = 0, size_px: int = 512) -> None:
    """Write the whole set into `out`, which must not exist or be empty."""
    splits = [split for split, count in KUMAR_FIELDS.items() for _ in range(count)]
    with finished_folder(out) as folder:
        fields: list[tuple[str, str, str]] = []
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
                # Strict: a nucleus missing from the map would shift the classes of all that follow.
                classes = zip(range(1, int(labels.max()) + 1), (outline.cell for outline in visible), strict=True)
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


def annotate(nuclei: Nuclei, size_px: int) -> tuple[TypedOutline, ...]:
    """The outlines and classes of the nuclei that can be seen, rounded as the file will hold them."""
    taken = np.zeros((size_px, size_px), bool)
    kept: list[TypedOutline] = []
    for around, cell in zip(outlines(nuclei), nuclei.cell, strict=True):
        vertices = np.stack([around.real, around.imag], axis=1).astype(np.float64).round(2)
        outline = TypedOutline(str(len(kept) + 1), vertices, str(cell))
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
    red = scatter(rng, shape, 6 * UM, jitter=0.2)
    flooded = look_up(smooth_noise(rng, shape, 12 * UM), red) > plan.red_cells
    add_red_cells(rng, canvas, red[flooded & (look_up(plan.depth_um, red) < -1)])
    hollow = stroma[thin_out(stroma, 40 * UM)][: round(plan.vessels * (size_px / 512) ** 2)]
    stroma = keep_away(stroma, hollow, 7 * UM)
    cells = keep_away(cells, hollow, 8 * UM)
    lining, course = add_vessels(rng, canvas, hollow, look_up(fibre, hollow))
    aside = plan.eccentric_um * UM * draw_directions(rng, len(cells)) * rng.uniform(0.3, 1.2, len(cells))
    spindles = np.concatenate([stroma, lining])
    nuclei = join(
        [
            draw_nuclei(rng, LYMPHOCYTE, immune, SPACING_UM_PX),
            draw_fibroblasts(rng, spindles, SPACING_UM_PX, np.concatenate([look_up(fibre, stroma), course])),
            draw_nuclei(rng, plan.epithelial, cells + aside, SPACING_UM_PX),
        ]
    )
    stamp(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    return develop(rng, canvas, look), nuclei
