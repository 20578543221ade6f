"""Lymph nodes with and without metastases at 1 µm/px, in the layout of PCam.

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
from rotopath.data.synthetic.layout import finished_folder
from rotopath.data.synthetic.look import AT_10X, develop, draw_look
from rotopath.data.synthetic.noise import Field, Points, look_up, scatter, smooth_noise
from rotopath.data.synthetic.nuclei import FIBROBLAST, Kind, draw_nuclei, join, stamp
from rotopath.data.synthetic.tissue import Manner, add_red_cells, clear_away, lay_tissue, ramp, territories

SPACING_UM_PX = 1.0
PATCH_PX = 96
CENTRE_PX = 32  # the part of a patch that its label speaks of
SLIDE_PX = 384
STRIDE_PX = 48  # patches overlap, but no two centres do
PATCHES_A_SLIDE = 28
FEWEST_SLIDES = 3
TUMOR_SHARE = 0.4  # at least, of a centre that is called tumor; one with less, but some, is left out
PATCHES = MappingProxyType({"train": 2000, "valid": 500, "test": 500})

LYMPHOCYTE = Kind(
    2.75, spread=0.12, elongation=1.15, wrinkles=0.03, darkness=1.2, darkness_spread=0.2, rim=0.1, clumps=0.22
)
CENTROBLAST = Kind(3.8, spread=0.16, elongation=1.2, darkness=0.95, rim=0.5, clumps=0.22, pallor=0.4, nucleoli=0.8)
HISTIOCYTE = Kind(3.7, spread=0.16, elongation=1.5, darkness=0.75, rim=0.5, clumps=0.2, pallor=0.4)


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


def render_slide(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """A part of a slide, and where its tumor is."""
    shape = (SLIDE_PX, SLIDE_PX)
    tumor_um = _zone(rng, shape, rng.uniform(25, 60), rng.uniform(0.35, 0.5))
    stroma_um = np.minimum(_zone(rng, shape, rng.uniform(25, 50), rng.uniform(0.05, 0.35)), 4 - tumor_um)
    fat = _fat(rng, shape)
    cells = _place_cells(rng, tumor_um, stroma_um, fat)
    centres = np.concatenate([places for _, places in cells])
    canvas, fibre = lay_tissue(rng, -stroma_um, centres, SPACING_UM_PX, _draw_manner(rng))
    lymphoid = 1 - ramp(tumor_um / 2)  # lymphocytes have little cytoplasm
    canvas.eosin[:] *= 1 - lymphoid * np.float32(rng.uniform(0.1, 0.6))
    canvas.hematoxylin[:] *= 1 - lymphoid * np.float32(rng.uniform(0.1, 0.6))
    red = scatter(rng, shape, 6, jitter=0.2)
    add_red_cells(rng, canvas, red[(look_up(smooth_noise(rng, shape, 12), red) > 2) & (look_up(stroma_um, red) > 0)])
    fibroblasts = scatter(rng, shape, 9, jitter=0.35)
    fibroblasts = fibroblasts[(look_up(stroma_um, fibroblasts) > 1) & (rng.random(len(fibroblasts)) < 0.5)]
    nuclei = [draw_nuclei(rng, kind, places, SPACING_UM_PX) for kind, places in cells]
    nuclei.append(draw_nuclei(rng, FIBROBLAST, fibroblasts, SPACING_UM_PX, look_up(fibre, fibroblasts)))
    stamp(rng, join(nuclei), canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    clear_away(canvas, fat)
    return develop(rng, canvas.hematoxylin, canvas.eosin, draw_look(rng, AT_10X)), (tumor_um > 0) & (fat < 0.5)


def _place_cells(rng: np.random.Generator, tumor_um: Field, stroma_um: Field, fat: Field) -> list[tuple[Kind, Points]]:
    """Where the cells of each kind lie: metastasis, lymphocytes around and some within, follicles, sinuses."""
    shape = (tumor_um.shape[0], tumor_um.shape[1])
    follicle_um = _zone(rng, shape, rng.uniform(30, 50), rng.uniform(0.05, 0.2))
    sinus_um = _zone(rng, shape, rng.uniform(15, 30), rng.uniform(0.05, 0.3))
    metastasis = _draw_metastasis(rng)
    tumor = scatter(rng, shape, metastasis.radius_um * rng.uniform(2.4, 3.2))
    tumor = tumor[look_up(tumor_um, tumor) > 1]
    lymphocytes = scatter(rng, shape, rng.uniform(6.0, 7.4), jitter=0.17)
    crowding = 0.93 - 0.75 * ramp(look_up(sinus_um, lymphocytes) / 4)
    crowding *= 1 - ramp(look_up(follicle_um, lymphocytes) / 6)
    crowding *= np.where(look_up(stroma_um, lymphocytes) > 0, 0.2, 1)
    crowding *= np.where(look_up(tumor_um, lymphocytes) > 0, rng.choice([0.01, 0.06, 0.15]), 1)
    lymphocytes = lymphocytes[rng.random(len(lymphocytes)) < crowding]
    blasts = scatter(rng, shape, rng.uniform(8, 9.5))
    blasts = blasts[(look_up(follicle_um, blasts) > 2) & _outside(blasts, tumor_um, stroma_um)]
    histiocytes = scatter(rng, shape, rng.uniform(9, 13), jitter=0.3)
    histiocytes = histiocytes[(look_up(sinus_um, histiocytes) > 1) & _outside(histiocytes, tumor_um, stroma_um)]
    kinds = ((LYMPHOCYTE, lymphocytes), (metastasis, tumor), (CENTROBLAST, blasts), (HISTIOCYTE, histiocytes))
    return [(kind, places[look_up(fat, places) < 0.5]) for kind, places in kinds]


def _draw_metastasis(rng: np.random.Generator) -> Kind:
    return Kind(
        radius_um=rng.uniform(4.1, 6.0),
        spread=rng.uniform(0.12, 0.25),
        elongation=1.3,
        wrinkles=0.06,
        darkness=rng.uniform(0.5, 0.95),
        rim=rng.uniform(0.2, 0.7),
        clumps=rng.uniform(0.18, 0.35),
        pallor=rng.uniform(0.2, 0.7),
        nucleoli=rng.uniform(0.2, 1.2),
    )


def _draw_manner(rng: np.random.Generator) -> Manner:
    return Manner(
        cytoplasm=rng.uniform(0.3, 0.65),
        basophilia=0.03 + 0.2 * rng.random() ** 2,
        granularity=0.2,
        foam=rng.uniform(0.2, 0.9),
        cracks_um=rng.uniform(0, 1.4),
        retraction_um=rng.uniform(0, 2.5),
        collagen=rng.uniform(0.3, 0.6),
        stroma_blue=rng.uniform(0.02, 0.1),
        slits=rng.uniform(0.2, 0.95),
    )


def _zone(rng: np.random.Generator, shape: tuple[int, int], scale_um: float, share: float) -> Field:
    """Depth in µm into patches of tissue that cover this share of the image."""
    noise = smooth_noise(rng, shape, scale_um) + 0.25 * smooth_noise(rng, shape, scale_um / 4)
    depth: Field = (noise - np.float32(np.quantile(noise, 1 - share))) * np.float32(scale_um / 2)
    return depth


def _outside(points: Points, *zones_um: Field) -> NDArray[np.bool_]:
    outside: NDArray[np.bool_] = np.logical_and.reduce([look_up(zone, points) < 0 for zone in zones_um])
    return outside


def _fat(rng: np.random.Generator, shape: tuple[int, int]) -> Field:
    """Fat cells side by side with thin walls in between, 1 inside; hardly any in most slides."""
    zone = _zone(rng, shape, 50, rng.choice([0.01, 0.06, 0.25]))
    seeds = scatter(rng, shape, rng.uniform(38, 60), jitter=0.16)
    cell, border_um = territories(rng, shape, seeds, 1.0)
    rounded = ndimage.gaussian_filter(border_um, 3.0, truncate=2.0)
    full = (look_up(zone, seeds) > 0)[cell]
    return full * ramp((rounded - np.float32(2.2)) * np.float32(0.8))


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
