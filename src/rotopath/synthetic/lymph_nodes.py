"""Parts of slides of lymph nodes at 1 µm/px: metastases, lymphoid tissue, capsule, and what lies around a node.

In: a random generator. Out: an image, and where its tumor is. Each slide has an architecture and a look of its own.

Lymph nodes with and without metastases at 1 µm/px, in the layout of PCam.

In: a seed. Out: patches of 96×96 px cut from synthetic slides, balanced over both classes, in HDF5 with a table beside.
A patch is tumor where its central 32×32 px hold tumor. No slide serves two splits.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.splits import SPLITS
from rotopath.synthetic.ground import Manner, add_red_cells, add_vessels, compartments, lay_tissue, territories
from rotopath.synthetic.nuclei import Nuclei, NucleusType, draw_fibroblasts, draw_nuclei, join, stamp
from rotopath.synthetic.painting import (
    AT_10X,
    Field,
    Points,
    StainCanvas,
    clear_away,
    develop,
    draw_look,
    finished_folder,
    keep_away,
    look_up,
    pixel_positions,
    ramp,
    scatter,
    smooth_noise,
    thin_out,
)

SPACING_UM_PX = 1.0
SLIDE_PX = 384
NEAR_UM = 3.0
Shape = tuple[int, int]

LYMPHOCYTE = NucleusType(
    2.35,
    spread=0.14,
    elongation=1.25,
    wrinkles=0.06,
    darkness=1.35,
    darkness_spread=0.25,
    rim=0.25,
    clumps=0.25,
    pallor=0.2,
)
CENTROBLAST = NucleusType(
    3.0, spread=0.18, elongation=1.25, darkness=0.85, rim=0.1, clumps=0.15, pallor=0.35, nucleoli=0.8
)
HISTIOCYTE = NucleusType(
    2.8, spread=0.2, elongation=1.6, wrinkles=0.08, darkness=0.75, rim=0.15, clumps=0.12, pallor=0.35
)


@dataclass(frozen=True)
class NodePlan:
    """Where what lies: depths in µm into each tissue, negative outside of it."""

    tumor_um: Field  # the metastasis with the stroma that it draws in
    nest_um: Field  # its cells
    lumen: Field  # 1 inside of its glands
    lymphoid_um: Field
    outside_um: Field  # beyond the capsule
    empty: Field  # 1 inside of fat cells, and on bare glass
    wisps: Field  # eosin of what floats on the glass


def render_slide(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """A part of a slide, and where its tumor is."""
    shape = (SLIDE_PX, SLIDE_PX)
    plan = _draw_plan(rng, shape)
    metastasis = _draw_metastasis(rng)
    tumor = scatter(rng, shape, metastasis.radius_um * rng.uniform(2.5, 3.4), jitter=0.2)
    tumor = tumor[(look_up(plan.nest_um, tumor) > 1) & (look_up(plan.lumen, tumor) < 0.3)]
    emptiness = np.float32(rng.uniform(0.3, 3.5)) * ramp(plan.outside_um / 12)
    canvas, fibre = lay_tissue(rng, plan.nest_um, tumor, SPACING_UM_PX, _draw_manner(rng), emptiness)
    clear_away(canvas, plan.lumen)
    groups = [draw_nuclei(rng, metastasis, tumor, SPACING_UM_PX), *_fill_node(rng, canvas, plan)]
    spindles = scatter(rng, shape, 9, jitter=0.4)
    beside = (look_up(plan.nest_um, spindles) < -1) & (look_up(plan.lymphoid_um, spindles) < -1)
    presence = np.where(look_up(plan.outside_um, spindles) > 8, rng.uniform(0.04, 0.2), rng.uniform(0.25, 0.75))
    spindles = spindles[beside & (rng.random(len(spindles)) < presence)]
    hollow = rng.permutation(spindles)
    hollow = hollow[:40][thin_out(hollow[:40], 60)][: int(rng.integers(0, 6))]
    spindles = keep_away(spindles, hollow, 6)
    lining, course = add_vessels(rng, canvas, hollow, look_up(fibre, hollow))
    spindles, course = np.concatenate([spindles, lining]), np.concatenate([look_up(fibre, spindles), course])
    groups.append(draw_fibroblasts(rng, spindles, SPACING_UM_PX, course, active=rng.uniform(0.1, 0.7)))
    _bleed(rng, canvas, plan)
    nuclei = join(groups)
    nuclei = nuclei.take(look_up(plan.empty, nuclei.centre) < 0.5)
    stamp(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    clear_away(canvas, plan.empty)
    canvas.eosin[:] += plan.wisps
    canvas.hematoxylin[:] += np.float32(0.3) * plan.wisps
    _mishandle(rng, canvas)
    return develop(rng, canvas, draw_look(rng, AT_10X)), _outline(plan)


def _outline(plan: NodePlan) -> NDArray[np.bool_]:
    """What a pathologist would outline: the cells of the metastasis, and the stroma close to them."""
    outlined: NDArray[np.bool_] = (plan.tumor_um > 0) & (plan.nest_um > -NEAR_UM) & (plan.empty < 0.5)
    return outlined


def _draw_plan(rng: np.random.Generator, shape: Shape) -> NodePlan:
    tumor_um = _zone(rng, shape, rng.uniform(35, 75), rng.uniform(0.35, 0.5))
    outside_um = _zone(rng, shape, rng.uniform(50, 90), rng.choice([0.03, 0.3, 0.6], p=[0.35, 0.35, 0.3]))
    inner_um = -outside_um - rng.uniform(4, 18)  # below the capsule
    trabecula_um = _zone(rng, shape, rng.uniform(20, 45), rng.choice([0.0, 0.03, 0.1]))
    glass, wisps = _glass(rng, shape, outside_um, tumor_um)
    empty = np.maximum(glass, _fat(rng, shape, outside_um - 3 * tumor_um.clip(0)))
    nest_um, lumen = _arrange(rng, shape, tumor_um)
    lymphoid_um = np.minimum(np.minimum(inner_um, -tumor_um - 1), -trabecula_um)
    return NodePlan(tumor_um, nest_um, lumen, lymphoid_um, outside_um, empty, wisps)


def _arrange(rng: np.random.Generator, shape: Shape, tumor_um: Field) -> tuple[Field, Field]:
    """Depth into the metastasis's cells, and its lumens: sheets, nests, cords or glands, with stroma in between."""
    lumen = np.zeros(shape, np.float32)
    pattern = rng.choice(["sheets", "nests", "cords", "glands"], p=[0.4, 0.25, 0.15, 0.2])
    if pattern == "sheets":  # with a strand here and there
        ridge = np.abs(smooth_noise(rng, shape, 24) + 0.3 * smooth_noise(rng, shape, 8)) * 14
        inner_um = ridge - np.float32(rng.uniform(0, 3))
    elif pattern == "cords":
        ridge = np.abs(smooth_noise(rng, shape, 16) + 0.3 * smooth_noise(rng, shape, 6)) * 14
        inner_um = np.float32(rng.uniform(7, 12)) - ridge
    else:
        inner_um = compartments(rng, shape, rng.uniform(32, 60), rng.uniform(2, 9), 1.0)
    nest_um = np.minimum(tumor_um, inner_um + 1.5 * smooth_noise(rng, shape, 6))
    if pattern == "glands":
        wall_um = rng.uniform(7, 11)
        lumen = ramp((nest_um + 1.2 * smooth_noise(rng, shape, 4) - np.float32(wall_um)) / 2)
    return nest_um, lumen


def _fill_node(rng: np.random.Generator, canvas: StainCanvas, plan: NodePlan) -> list[Nuclei]:
    """Lymphocytes in a thin haze, germinal centres, and sinuses with histiocytes; some wander into other tissue."""
    shape = canvas.shape
    follicle_um = np.minimum(_zone(rng, shape, rng.uniform(30, 50), rng.choice([0.01, 0.1])), plan.lymphoid_um)
    sinus_um = np.minimum(_zone(rng, shape, rng.uniform(12, 26), rng.uniform(0.02, 0.35)), plan.lymphoid_um)
    haze = np.float32(0.9) + 0.3 * smooth_noise(rng, shape, 0.8) + 0.25 * smooth_noise(rng, shape, 2.2)
    gaps = ramp(
        (smooth_noise(rng, shape, 1.6) + 0.6 * smooth_noise(rng, shape, 14)) * 2 - np.float32(rng.uniform(1.3, 3.2))
    )
    haze *= (1 - 0.85 * gaps) * (1 - rng.uniform(0.4, 0.9) * ramp(sinus_um / 4))
    share = ramp(plan.lymphoid_um / 3 + np.float32(0.5))
    canvas.eosin[:] += share * (rng.uniform(0.4, 0.75) * haze - canvas.eosin)
    canvas.hematoxylin[:] += share * (rng.uniform(0.12, 0.4) * haze - canvas.hematoxylin)

    lymphocytes = scatter(rng, shape, rng.uniform(5.8, 6.9), jitter=0.18)
    present = rng.uniform(0.75, 1) * ramp(look_up(plan.lymphoid_um, lymphocytes) / 2)
    present *= (1 - rng.uniform(0.5, 0.95) * ramp(look_up(sinus_um, lymphocytes) / 4)) * (
        1 - 0.85 * ramp(look_up(follicle_um, lymphocytes) / 6)
    )
    in_tumor = look_up(plan.tumor_um, lymphocytes) > 0
    crowd = ramp(look_up(smooth_noise(rng, shape, 14), lymphocytes) - np.float32(rng.uniform(1.0, 3.0)))
    present = np.maximum(present, np.where(in_tumor, 0.5, 0.6) * crowd)
    present = np.maximum(present, np.where(look_up(plan.outside_um, lymphocytes) > 0, 0.004, 0.02))
    lymphocytes = lymphocytes[rng.random(len(lymphocytes)) < present]
    blasts = scatter(rng, shape, rng.uniform(7.5, 9.5), jitter=0.25)
    blasts = blasts[look_up(follicle_um, blasts) > 2]
    histiocytes = scatter(rng, shape, rng.uniform(8, 12), jitter=0.3)
    histiocytes = histiocytes[look_up(sinus_um, histiocytes) > 1]
    _add_bodies(rng, canvas, histiocytes)
    placed = ((LYMPHOCYTE, lymphocytes), (CENTROBLAST, blasts), (HISTIOCYTE, histiocytes))
    return [draw_nuclei(rng, kind, places, SPACING_UM_PX) for kind, places in placed]


def _add_bodies(rng: np.random.Generator, canvas: StainCanvas, centres: Points) -> None:
    """Pale pink cytoplasm around these cells."""
    spots = np.zeros(canvas.shape, np.float32)
    within = (centres.real >= 0) & (centres.imag >= 0)
    within &= (centres.real < canvas.shape[1] - 1) & (centres.imag < canvas.shape[0] - 1)
    rows, columns = np.rint(centres[within].imag).astype(int), np.rint(centres[within].real).astype(int)
    spots[rows, columns] = 1
    body = ndimage.gaussian_filter(spots, 2.6, truncate=2.5) * np.float32(40) + 0.25 * smooth_noise(
        rng, canvas.shape, 1.5
    )
    canvas.eosin[:] += ramp(body - np.float32(0.3)) * (np.float32(rng.uniform(0.3, 0.5)) - canvas.eosin).clip(0)


def _bleed(rng: np.random.Generator, canvas: StainCanvas, plan: NodePlan) -> None:
    """Red blood cells outside of vessels, in some slides many."""
    red = scatter(rng, canvas.shape, 4.7, jitter=0.2)
    flooded = look_up(smooth_noise(rng, canvas.shape, 16), red) > rng.choice([0.8, 2.0, 3.0], p=[0.08, 0.4, 0.52])
    held = red[flooded & (look_up(plan.nest_um, red) < 0) & (look_up(plan.empty, red) < 0.5)]
    add_red_cells(rng, canvas, held, strength=rng.uniform(0.9, 1.7))


def _draw_metastasis(rng: np.random.Generator) -> NucleusType:
    vesicular = rng.random() < 0.6
    return NucleusType(
        radius_um=rng.uniform(3.6, 4.9),
        spread=rng.uniform(0.1, 0.22),
        elongation=rng.choice([1.3, 1.6, 2.3], p=[0.5, 0.35, 0.15]),
        wrinkles=rng.uniform(0.05, 0.11),
        darkness=rng.uniform(0.5, 0.85) if vesicular else rng.uniform(0.65, 1.05),
        darkness_spread=rng.uniform(0.15, 0.35),
        rim=rng.uniform(0.2, 0.5) if vesicular else 0.1,
        clumps=rng.uniform(0.1, 0.22),
        pallor=rng.uniform(0.3, 0.6) if vesicular else 0.0,
        nucleoli=rng.uniform(0.3, 1.3) if vesicular else 0.2,
        blurred=0.25,
    )


def _draw_manner(rng: np.random.Generator) -> Manner:
    return Manner(
        cytoplasm=rng.uniform(0.35, 0.7),
        basophilia=0.1 + 0.35 * rng.random() ** 2,
        granularity=rng.uniform(0.15, 0.3),
        foam=rng.uniform(0, 0.8),
        clearing=rng.choice([0.0, 0.5], p=[0.85, 0.15]),
        borders=rng.uniform(0, 0.2),
        cracks_um=rng.choice([0.0, 0.6, 1.5]),
        retraction_um=rng.uniform(0, 3),
        collagen=rng.uniform(0.35, 0.65),
        stroma_blue=rng.uniform(0.02, 0.12),
        slits=rng.uniform(0.2, 0.7),
        looseness=rng.uniform(0, 0.7),
    )


def _zone(rng: np.random.Generator, shape: Shape, scale_um: float, share: float) -> Field:
    """Depth in µm into patches of tissue that cover this share of the image."""
    noise = smooth_noise(rng, shape, scale_um) + 0.25 * smooth_noise(rng, shape, scale_um / 4)
    depth: Field = (noise - np.float32(np.quantile(noise[::4, ::4], 1 - share))) * np.float32(scale_um / 2)
    return depth


def _fat(rng: np.random.Generator, shape: Shape, outside_um: Field) -> Field:
    """Fat cells side by side with thin walls in between, 1 inside; mostly outside of the node."""
    zone = _zone(rng, shape, 45, rng.choice([0.03, 0.3, 0.7], p=[0.4, 0.35, 0.25])) + outside_um.clip(-30, 10)
    seeds = scatter(rng, shape, rng.uniform(30, 62), jitter=0.22)
    cell, border_um = territories(rng, shape, seeds, 1.0, step=3)
    rounded = ndimage.gaussian_filter(border_um, 1.5, truncate=2.0) + 0.3 * smooth_noise(rng, shape, 9)
    full = (look_up(zone, seeds) > 0)[cell]
    return full * ramp((rounded - np.float32(rng.uniform(1.7, 2.6))) * np.float32(0.9))


def _glass(rng: np.random.Generator, shape: Shape, outside_um: Field, tumor_um: Field) -> tuple[Field, Field]:
    """1 where nothing lies on the glass, around a node in most slides; and thin shreds that float there."""
    if rng.random() < 0.3:
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    edge = smooth_noise(rng, shape, 25) + 0.2 * smooth_noise(rng, shape, 5) + np.float32(rng.uniform(-0.5, 0.5))
    glass = ramp(edge * 4) * ramp(outside_um / 8) * ramp(-tumor_um / 4)
    course = smooth_noise(rng, shape, 15) + 0.12 * smooth_noise(rng, shape, 4)
    width = np.float32(0.04) + 0.16 * smooth_noise(rng, shape, 12).clip(0)
    shreds = np.exp(-((course / width) ** 2)) * ramp(0.4 + 0.6 * smooth_noise(rng, shape, 22))
    return glass, glass * shreds * np.float32(rng.uniform(0.15, 0.5))


def _mishandle(rng: np.random.Generator, canvas: StainCanvas) -> None:
    """What goes wrong with a slide now and then: a region out of focus, a fold."""
    shape = canvas.shape
    stains = (canvas.hematoxylin, canvas.eosin, canvas.blood)
    if rng.random() < 0.13:
        share = ramp(_zone(rng, shape, 60, 0.35) / 20)
        radius = rng.uniform(0.6, 1.1)
        for stain in stains:
            stain += share * (ndimage.gaussian_filter(stain, radius, truncate=2.5) - stain)
    if rng.random() < 0.12:
        place = pixel_positions(shape) * (rng.standard_normal() + 1j * rng.standard_normal())
        across = place.real / np.abs(place[0, 1] - place[0, 0]) + 10 * smooth_noise(rng, shape, 60)
        away = np.abs(across - np.float32(rng.uniform(np.quantile(across, 0.2), np.quantile(across, 0.8))))
        fold = ramp((np.float32(rng.uniform(4, 12)) - away) / 3)
        for stain in stains:
            stain *= 1 + fold * np.float32(rng.uniform(0.6, 1.2))


PATCH_PX = 96
CENTRE_PX = 32  # the part of a patch that its label speaks of
STRIDE_PX = 48  # patches overlap, but no two centres do
PATCHES_A_SLIDE = 32
FEWEST_SLIDES = 3
TUMOR_SHARE = 0.1  # at least, of a centre that is called tumor; one with less, but some, is left out
PATCHES = MappingProxyType({"train": 2000, "valid": 500, "test": 500})


def make_tumor(out: Path, seed: int = 0, patches: Mapping[str, int] = PATCHES) -> None:
    """Write the whole set into `out`, which must not exist or be empty; `patches` says how many in each split."""
    with finished_folder(out) as folder:
        for number, split in enumerate(SPLITS):
            _write_split(folder, split, collect_patches(seed, number, patches.get(split, 0)))


@dataclass(frozen=True)
class Patch:
    image: NDArray[np.uint8]
    corner: tuple[int, int]  # row and column within its slide
    tumor: bool  # anywhere
    centre_tumor: bool
    slide: str


def collect_patches(seed: int, split: int, count: int) -> list[Patch]:
    """So many patches, half of them tumor, from several slides, in a random order."""
    each = -(-count // (2 * max(FEWEST_SLIDES, -(-count // PATCHES_A_SLIDE))))
    chosen: dict[bool, list[Patch]] = {True: [], False: []}
    slide = 0
    while min(len(patches) for patches in chosen.values()) < count - count // 2:
        slide += 1
        for label, patches in cut_slide(seed, split, slide).items():
            chosen[label] += patches[:each]
    balanced = chosen[True][: count // 2] + chosen[False][: count - count // 2]
    order = np.random.default_rng([seed, 3, split]).permutation(count)
    return [balanced[i] for i in order]


def cut_slide(seed: int, split: int, slide: int) -> dict[bool, list[Patch]]:
    """Patches of a slide by their label, each in a random order."""
    rng = np.random.default_rng([seed, 3, split, slide])
    image, tumor = render_slide(rng)
    name = f"synthetic_{SPLITS[split]}_{slide:03d}"
    found: dict[bool, list[Patch]] = {True: [], False: []}
    margin = (PATCH_PX - CENTRE_PX) // 2
    starts = np.arange(0, SLIDE_PX - PATCH_PX + 1, STRIDE_PX)
    for row, column in rng.permutation(np.stack(np.meshgrid(starts, starts), axis=-1).reshape(-1, 2)).tolist():
        window = tumor[row : row + PATCH_PX, column : column + PATCH_PX]
        share = float(window[margin:-margin, margin:-margin].mean())
        if 0 < share < TUMOR_SHARE:
            continue
        pixels = image[row : row + PATCH_PX, column : column + PATCH_PX]
        found[share > 0].append(Patch(pixels, (row, column), bool(window.any()), share > 0, name))
    most = PATCHES_A_SLIDE // 2
    return {label: patches[:most] for label, patches in found.items()}


def _write_split(folder: Path, split: str, patches: list[Patch]) -> None:
    import h5py  # heavy, and in an extra

    stem = f"camelyonpatch_level_2_split_{split}"
    images = np.array([patch.image for patch in patches], np.uint8).reshape(-1, PATCH_PX, PATCH_PX, 3)
    labels = np.array([patch.centre_tumor for patch in patches], np.uint8).reshape(-1, 1, 1, 1)
    for key, values in (("x", images), ("y", labels)):
        storage = {"chunks": (1, *values.shape[1:]), "compression": "gzip"} if len(values) else {}
        with h5py.File(folder / f"{stem}_{key}.h5", "w") as file:  # without times, so that bytes repeat
            file.create_dataset(key, data=values, track_times=False, **storage)
    lines = [",coord_y,coord_x,tumor_patch,center_tumor_patch,wsi"]
    for i, patch in enumerate(patches):
        lines.append(f"{i},{patch.corner[0]},{patch.corner[1]},{patch.tumor},{patch.centre_tumor},{patch.slide}")
    (folder / f"{stem}_meta.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
