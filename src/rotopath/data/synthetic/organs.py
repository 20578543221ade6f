"""Four organs at 0.25 µm/px with every nucleus outlined, in the layout of Kumar et al.

In: a seed. Out: 24 fields as TIFF, their outlines as Aperio XML and 16-bit label maps, and the split. Beside each label
map, a CSV gives the class of every nucleus: epithelial, lymphocyte or fibroblast. `manifest-classes.csv` lists all
fields as a data set with these classes.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rotopath.data.aperio import Outline, paint_labels
from rotopath.data.splits import KUMAR_FIELDS
from rotopath.data.synthetic.architectures import ORGANS, SPACING_UM_PX, UM
from rotopath.data.synthetic.blood import add_red_cells, add_vessels
from rotopath.data.synthetic.canvas import clear_away
from rotopath.data.synthetic.layout import finished_folder, write_annotations, write_labels, write_table, write_tiff
from rotopath.data.synthetic.look import AT_40X, develop, draw_look
from rotopath.data.synthetic.noise import draw_directions, keep_away, look_up, scatter, smooth_noise, thin_out
from rotopath.data.synthetic.nuclei import LYMPHOCYTE, Nuclei, draw_fibroblasts, draw_nuclei, join, outlines, stamp
from rotopath.data.synthetic.tissue import lay_tissue

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
