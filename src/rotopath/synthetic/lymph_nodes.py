"""Make patches with and without tumor from synthetic lymph nodes at 1 µm/px, in the layout of PCam.

`make_tumor` writes patches of 96 × 96 px from synthetic slides to HDF5 files, and the positions of the patches to CSV
files. Half of the patches have the label tumor: their central 32 × 32 px contain tumor. All patches of a slide are in
one split. Slides differ in their architecture (metastasis, lymphoid tissue with follicles and sinuses, capsule, fat,
glass) and in their colors. A synthetic slide is an image of only 384 × 384 px, and thus much smaller than a real slide.

A *depth* is the distance of a pixel in µm from the border of a tissue: positive inside the tissue, negative outside.
"""

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.splits import SPLITS
from rotopath.synthetic.ground import (
    TissueStyle,
    assign_cells,
    compartment_depth,
    paint_ground,
    paint_red_cells,
    paint_vessels,
)
from rotopath.synthetic.nuclei import (
    Nuclei,
    NucleusType,
    concatenate_nuclei,
    paint_nuclei,
    sample_fibroblasts,
    sample_nuclei,
)
from rotopath.synthetic.painting import (
    AT_10X,
    Field,
    Points,
    StainCanvas,
    drop_points_near,
    erase_tissue,
    new_dataset_folder,
    pixel_positions,
    render_rgb,
    sample_appearance,
    scatter_points,
    select_spaced,
    smooth_noise,
    smoothstep,
    values_at,
)

SPACING_UM_PX = 1.0  # therefore, lengths in µm and lengths in pixels have the same values in this module
SLIDE_PX = 384  # side of a synthetic slide
NEAR_UM = 3.0  # the tumor mask contains the stroma up to this distance from groups of tumor cells
PATCH_PX = 96
CENTER_PX = 32  # side of the central part of a patch that determines the label
STRIDE_PX = 48  # distance between neighboring patches, which overlap; their central parts do not overlap
MAX_PATCHES_PER_SLIDE = 32
MIN_SLIDES = 3  # the patches of a split are from this many slides or more; from fewer if there are only a few patches
# Lowest fraction of tumor in the central part of a tumor patch. Patches with a lower fraction above 0 are left out.
MIN_TUMOR_FRACTION = 0.1
PATCHES = MappingProxyType({"train": 2000, "valid": 500, "test": 500})  # number of patches in each split
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


# The dataset


@dataclass(frozen=True)
class Patch:
    """A patch of a slide, with its position and labels."""

    image: NDArray[np.uint8]  # (PATCH_PX, PATCH_PX, 3)
    corner: tuple[int, int]  # upper left pixel of the patch: row and column in the slide
    tumor: bool  # whether any part of the patch contains tumor
    center_tumor: bool  # whether the central 32 × 32 px contain tumor; this is the label of the patch
    slide: str  # name of the slide


def make_tumor(out: Path, seed: int = 0, patches: Mapping[str, int] = PATCHES) -> None:
    """Write a dataset of patches of synthetic lymph nodes, with and without tumor, to `out`, a new or empty folder.

    `patches` maps the names of splits (train, valid, test) to numbers of patches. A split that is missing in `patches`
    has 0 patches. The same `seed` gives the same dataset. Raises FileExistsError if `out` exists and is not an empty
    folder.
    """
    with new_dataset_folder(out) as folder:
        for number, split in enumerate(SPLITS):
            _write_split(folder, split, collect_patches(seed, number, patches.get(split, 0)))


def collect_patches(seed: int, split: int, count: int) -> list[Patch]:
    """Return `count` patches of a split in random order. Half of the patches, rounded down, have the label tumor.

    `split` is the index of the split in SPLITS.
    """
    # Maximum number of patches with the same label that are used from a slide
    per_slide = -(-count // (2 * max(MIN_SLIDES, -(-count // MAX_PATCHES_PER_SLIDE))))
    collected: dict[bool, list[Patch]] = {True: [], False: []}
    slide = 0
    while min(len(patches) for patches in collected.values()) < count - count // 2:
        slide += 1
        for label, patches in cut_slide(seed, split, slide).items():
            collected[label] += patches[:per_slide]
    balanced = collected[True][: count // 2] + collected[False][: count - count // 2]
    order = np.random.default_rng([seed, 3, split]).permutation(count)
    return [balanced[i] for i in order]


def cut_slide(seed: int, split: int, slide: int) -> dict[bool, list[Patch]]:
    """Render a slide, and return its patches by label. The label True means tumor, and False means no tumor.

    `split` is the index of the split in SPLITS, and `slide` the number of the slide in this split. For each label, at
    most MAX_PATCHES_PER_SLIDE / 2 patches are returned, in random order. The same arguments give the same patches.
    """
    rng = np.random.default_rng([seed, 3, split, slide])
    image, tumor = render_slide(rng)
    name = f"synthetic_{SPLITS[split]}_{slide:03d}"
    by_label: dict[bool, list[Patch]] = {True: [], False: []}
    margin = (PATCH_PX - CENTER_PX) // 2
    starts = np.arange(0, SLIDE_PX - PATCH_PX + 1, STRIDE_PX)
    for row, column in rng.permutation(np.stack(np.meshgrid(starts, starts), axis=-1).reshape(-1, 2)).tolist():
        window = tumor[row : row + PATCH_PX, column : column + PATCH_PX]
        fraction = float(window[margin:-margin, margin:-margin].mean())
        if 0 < fraction < MIN_TUMOR_FRACTION:
            continue
        pixels = image[row : row + PATCH_PX, column : column + PATCH_PX]
        by_label[fraction > 0].append(Patch(pixels, (row, column), bool(window.any()), fraction > 0, name))
    most = MAX_PATCHES_PER_SLIDE // 2
    return {label: patches[:most] for label, patches in by_label.items()}


def _write_split(folder: Path, split: str, patches: list[Patch]) -> None:
    """Write the images and the labels of a split as HDF5 files, and the positions of its patches as a CSV file."""
    import h5py  # an optional package that is slow to import

    stem = f"camelyonpatch_level_2_split_{split}"
    images = np.array([patch.image for patch in patches], np.uint8).reshape(-1, PATCH_PX, PATCH_PX, 3)
    labels = np.array([patch.center_tumor for patch in patches], np.uint8).reshape(-1, 1, 1, 1)
    for key, values in (("x", images), ("y", labels)):
        storage = {"chunks": (1, *values.shape[1:]), "compression": "gzip"} if len(values) else {}
        content = io.BytesIO()
        with h5py.File(content, "w") as file:
            # The time of writing is not stored, so that the same patches give the same bytes.
            file.create_dataset(key, data=values, track_times=False, **storage)
        (folder / f"{stem}_{key}.h5").write_bytes(content.getvalue())  # on a full disk, h5py would crash
    lines = [",coord_y,coord_x,tumor_patch,center_tumor_patch,wsi"]
    for i, patch in enumerate(patches):
        lines.append(f"{i},{patch.corner[0]},{patch.corner[1]},{patch.tumor},{patch.center_tumor},{patch.slide}")
    (folder / f"{stem}_meta.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")


# A slide


@dataclass(frozen=True)
class NodePlan:
    """Architecture of a slide. All attributes are arrays (height, width)."""

    tumor_um: Field  # depth in the metastasis, which consists of groups of tumor cells, and of stroma between them
    nest_um: Field  # depth in groups of tumor cells, which are sheets, nests, cords or glands
    lumen: Field  # mask: 1 in lumens of tumor glands, 0 elsewhere
    lymphoid_um: Field  # depth in lymphoid tissue
    outside_um: Field  # distance in µm from the outer border of the capsule: positive outside the lymph node
    empty: Field  # mask: 1 in fat cells and on bare glass, 0 elsewhere
    shreds: Field  # concentration of eosin in shreds of tissue on the glass


def render_slide(rng: np.random.Generator) -> tuple[NDArray[np.uint8], NDArray[np.bool_]]:
    """Sample a slide of SLIDE_PX × SLIDE_PX pixels, and return its image (H, W, 3) and its tumor mask (H, W).

    The mask is true in tumor, including the stroma close to tumor cells.
    """
    shape = (SLIDE_PX, SLIDE_PX)
    plan = _sample_plan(rng, shape)
    metastasis = _sample_metastasis(rng)
    tumor = scatter_points(rng, shape, metastasis.radius_um * rng.uniform(2.5, 3.4), jitter=0.2)
    tumor = tumor[(values_at(plan.nest_um, tumor) > 1) & (values_at(plan.lumen, tumor) < 0.3)]
    loosening = np.float32(rng.uniform(0.3, 3.5)) * smoothstep(plan.outside_um / 12)
    canvas, fibers = paint_ground(rng, plan.nest_um, tumor, SPACING_UM_PX, _sample_style(rng), loosening)
    erase_tissue(canvas, plan.lumen)
    groups = [sample_nuclei(rng, metastasis, tumor, SPACING_UM_PX), *_paint_lymphoid_tissue(rng, canvas, plan)]
    spindles = scatter_points(rng, shape, 9, jitter=0.4)
    is_stroma = (values_at(plan.nest_um, spindles) < -1) & (values_at(plan.lymphoid_um, spindles) < -1)
    probability = np.where(values_at(plan.outside_um, spindles) > 8, rng.uniform(0.04, 0.2), rng.uniform(0.25, 0.75))
    spindles = spindles[is_stroma & (rng.random(len(spindles)) < probability)]
    vessels = rng.permutation(spindles)[:40]
    vessels = vessels[select_spaced(vessels, 60)][: int(rng.integers(0, 6))]
    spindles = drop_points_near(spindles, vessels, 6)
    endothelium, tangents = paint_vessels(rng, canvas, vessels, values_at(fibers, vessels))
    directions = np.concatenate([values_at(fibers, spindles), tangents])
    spindles = np.concatenate([spindles, endothelium])
    groups.append(sample_fibroblasts(rng, spindles, SPACING_UM_PX, directions, active=rng.uniform(0.1, 0.7)))
    _paint_bleeding(rng, canvas, plan)
    nuclei = concatenate_nuclei(groups)
    nuclei = nuclei.select(values_at(plan.empty, nuclei.center) < 0.5)
    paint_nuclei(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    erase_tissue(canvas, plan.empty)
    canvas.eosin[:] += plan.shreds
    canvas.hematoxylin[:] += np.float32(0.3) * plan.shreds
    _paint_artifacts(rng, canvas)
    return render_rgb(rng, canvas, sample_appearance(rng, AT_10X)), _mask_tumor(plan)


def _mask_tumor(plan: NodePlan) -> NDArray[np.bool_]:
    """Return the mask of the tumor as a pathologist would outline it: tumor cells, and the stroma close to them."""
    tumor: NDArray[np.bool_] = (plan.tumor_um > 0) & (plan.nest_um > -NEAR_UM) & (plan.empty < 0.5)
    return tumor


def _sample_metastasis(rng: np.random.Generator) -> NucleusType:
    """Sample the appearance of the tumor nuclei of a slide: vesicular (pale, with nucleoli) or dense."""
    is_vesicular = rng.random() < 0.6
    return NucleusType(
        radius_um=rng.uniform(3.6, 4.9),
        spread=rng.uniform(0.1, 0.22),
        elongation=rng.choice([1.3, 1.6, 2.3], p=[0.5, 0.35, 0.15]),
        wrinkles=rng.uniform(0.05, 0.11),
        darkness=rng.uniform(0.5, 0.85) if is_vesicular else rng.uniform(0.65, 1.05),
        darkness_spread=rng.uniform(0.15, 0.35),
        rim=rng.uniform(0.2, 0.5) if is_vesicular else 0.1,
        clumps=rng.uniform(0.1, 0.22),
        pallor=rng.uniform(0.3, 0.6) if is_vesicular else 0.0,
        nucleoli=rng.uniform(0.3, 1.3) if is_vesicular else 0.2,
        blurred=0.25,
    )


def _sample_style(rng: np.random.Generator) -> TissueStyle:
    """Sample the appearance of the tissue of a slide."""
    return TissueStyle(
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


# The architecture of a slide


def _sample_plan(rng: np.random.Generator, shape: Shape) -> NodePlan:
    """Sample the architecture of a slide of `shape` (height, width): a part of a lymph node with a metastasis."""
    tumor_um = _sample_region(rng, shape, rng.uniform(35, 75), rng.uniform(0.35, 0.5))
    outside_um = _sample_region(rng, shape, rng.uniform(50, 90), rng.choice([0.03, 0.3, 0.6], p=[0.35, 0.35, 0.3]))
    inside_um = -outside_um - rng.uniform(4, 18)  # depth below the inner border of the capsule
    trabecula_um = _sample_region(rng, shape, rng.uniform(20, 45), rng.choice([0.0, 0.03, 0.1]))
    glass, shreds = _sample_glass(rng, shape, outside_um, tumor_um)
    empty = np.maximum(glass, _sample_fat(rng, shape, outside_um - 3 * tumor_um.clip(0)))
    nest_um, lumen = _sample_nests(rng, shape, tumor_um)
    lymphoid_um = np.minimum(np.minimum(inside_um, -tumor_um - 1), -trabecula_um)
    return NodePlan(tumor_um, nest_um, lumen, lymphoid_um, outside_um, empty, shreds)


def _sample_region(rng: np.random.Generator, shape: Shape, scale_um: float, fraction: float) -> Field:
    """Sample random regions, and return the approximate depth (height, width) of each pixel in µm.

    The depth is positive in the regions, and negative elsewhere. The regions together cover the given `fraction` of the
    image. The size of a region increases with `scale_um`.
    """
    noise = smooth_noise(rng, shape, scale_um) + 0.25 * smooth_noise(rng, shape, scale_um / 4)
    depth: Field = (noise - np.float32(np.quantile(noise[::4, ::4], 1 - fraction))) * np.float32(scale_um / 2)
    return depth


def _sample_nests(rng: np.random.Generator, shape: Shape, tumor_um: Field) -> tuple[Field, Field]:
    """Return the depth in µm of each pixel in groups of tumor cells, and a mask that is 1 in the lumens of glands.

    The groups are only in the metastasis, where `tumor_um` is positive. The pattern of the groups is chosen at random:
    sheets, nests, cords or glands. Only glands have lumens.
    """
    lumen = np.zeros(shape, np.float32)
    pattern = rng.choice(["sheets", "nests", "cords", "glands"], p=[0.4, 0.25, 0.15, 0.2])
    if pattern == "sheets":  # with a few strands of stroma
        ridge = np.abs(smooth_noise(rng, shape, 24) + 0.3 * smooth_noise(rng, shape, 8)) * 14
        inner_um = ridge - np.float32(rng.uniform(0, 3))
    elif pattern == "cords":
        ridge = np.abs(smooth_noise(rng, shape, 16) + 0.3 * smooth_noise(rng, shape, 6)) * 14
        inner_um = np.float32(rng.uniform(7, 12)) - ridge
    else:
        inner_um = compartment_depth(rng, shape, rng.uniform(32, 60), rng.uniform(2, 9), 1.0)
    nest_um = np.minimum(tumor_um, inner_um + 1.5 * smooth_noise(rng, shape, 6))
    if pattern == "glands":
        wall_um = rng.uniform(7, 11)
        lumen = smoothstep((nest_um + 1.2 * smooth_noise(rng, shape, 4) - np.float32(wall_um)) / 2)
    return nest_um, lumen


def _sample_fat(rng: np.random.Generator, shape: Shape, outside_um: Field) -> Field:
    """Return a mask that is 1 in fat cells, and 0 in the thin walls between fat cells and in other tissue.

    `outside_um` is the distance in µm from the outer border of the capsule, positive outside the lymph node. Fat
    cells are more frequent outside the lymph node than inside. The caller lowers `outside_um` in the metastasis, so
    that fat is rare there.
    """
    region = _sample_region(rng, shape, 45, rng.choice([0.03, 0.3, 0.7], p=[0.4, 0.35, 0.25]))
    region = region + outside_um.clip(-30, 10)
    seeds = scatter_points(rng, shape, rng.uniform(30, 62), jitter=0.22)
    cell, border_um = assign_cells(rng, shape, seeds, 1.0, step=3)
    rounded = ndimage.gaussian_filter(border_um, 1.5, truncate=2.0) + 0.3 * smooth_noise(rng, shape, 9)
    is_fat = (values_at(region, seeds) > 0)[cell]
    return is_fat * smoothstep((rounded - np.float32(rng.uniform(1.7, 2.6))) * np.float32(0.9))


def _sample_glass(rng: np.random.Generator, shape: Shape, outside_um: Field, tumor_um: Field) -> tuple[Field, Field]:
    """Return a mask of bare glass outside the lymph node, and the eosin in thin shreds of tissue on this glass.

    The mask is 1 on bare glass and 0 on tissue. The eosin is a concentration. 30 % of slides have no bare glass; both
    arrays are then 0 everywhere.
    """
    if rng.random() < 0.3:
        return np.zeros(shape, np.float32), np.zeros(shape, np.float32)
    edge = smooth_noise(rng, shape, 25) + 0.2 * smooth_noise(rng, shape, 5) + np.float32(rng.uniform(-0.5, 0.5))
    glass = smoothstep(edge * 4) * smoothstep(outside_um / 8) * smoothstep(-tumor_um / 4)
    course = smooth_noise(rng, shape, 15) + 0.12 * smooth_noise(rng, shape, 4)
    width = np.float32(0.04) + 0.16 * smooth_noise(rng, shape, 12).clip(0)
    shreds = np.exp(-((course / width) ** 2)) * smoothstep(0.4 + 0.6 * smooth_noise(rng, shape, 22))
    return glass, glass * shreds * np.float32(rng.uniform(0.15, 0.5))


# Painting a slide


def _paint_lymphoid_tissue(rng: np.random.Generator, canvas: StainCanvas, plan: NodePlan) -> list[Nuclei]:
    """Paint lymphoid tissue without nuclei, and return the nuclei, which the caller must paint.

    This function paints the pale background and the cytoplasm of histiocytes. It returns the nuclei in three groups:
    lymphocytes (some of them outside lymphoid tissue), centroblasts in germinal centers, and histiocytes in sinuses.
    """
    shape = canvas.shape
    follicle_um = _sample_region(rng, shape, rng.uniform(30, 50), rng.choice([0.01, 0.1]))
    follicle_um = np.minimum(follicle_um, plan.lymphoid_um)
    sinus_um = _sample_region(rng, shape, rng.uniform(12, 26), rng.uniform(0.02, 0.35))
    sinus_um = np.minimum(sinus_um, plan.lymphoid_um)
    haze = np.float32(0.9) + 0.3 * smooth_noise(rng, shape, 0.8) + 0.25 * smooth_noise(rng, shape, 2.2)
    gaps = smoothstep(
        (smooth_noise(rng, shape, 1.6) + 0.6 * smooth_noise(rng, shape, 14)) * 2 - np.float32(rng.uniform(1.3, 3.2))
    )
    haze *= (1 - 0.85 * gaps) * (1 - rng.uniform(0.4, 0.9) * smoothstep(sinus_um / 4))
    mask = smoothstep(plan.lymphoid_um / 3 + np.float32(0.5))
    canvas.eosin[:] += mask * (rng.uniform(0.4, 0.75) * haze - canvas.eosin)
    canvas.hematoxylin[:] += mask * (rng.uniform(0.12, 0.4) * haze - canvas.hematoxylin)

    lymphocytes = scatter_points(rng, shape, rng.uniform(5.8, 6.9), jitter=0.18)
    probability = rng.uniform(0.75, 1) * smoothstep(values_at(plan.lymphoid_um, lymphocytes) / 2)
    probability *= (1 - rng.uniform(0.5, 0.95) * smoothstep(values_at(sinus_um, lymphocytes) / 4)) * (
        1 - 0.85 * smoothstep(values_at(follicle_um, lymphocytes) / 6)
    )
    in_tumor = values_at(plan.tumor_um, lymphocytes) > 0
    crowding = smoothstep(values_at(smooth_noise(rng, shape, 14), lymphocytes) - np.float32(rng.uniform(1.0, 3.0)))
    probability = np.maximum(probability, np.where(in_tumor, 0.5, 0.6) * crowding)
    probability = np.maximum(probability, np.where(values_at(plan.outside_um, lymphocytes) > 0, 0.004, 0.02))
    lymphocytes = lymphocytes[rng.random(len(lymphocytes)) < probability]
    centroblasts = scatter_points(rng, shape, rng.uniform(7.5, 9.5), jitter=0.25)
    centroblasts = centroblasts[values_at(follicle_um, centroblasts) > 2]
    histiocytes = scatter_points(rng, shape, rng.uniform(8, 12), jitter=0.3)
    histiocytes = histiocytes[values_at(sinus_um, histiocytes) > 1]
    _paint_cell_bodies(rng, canvas, histiocytes)
    groups = ((LYMPHOCYTE, lymphocytes), (CENTROBLAST, centroblasts), (HISTIOCYTE, histiocytes))
    return [sample_nuclei(rng, kind, centers, SPACING_UM_PX) for kind, centers in groups]


def _paint_cell_bodies(rng: np.random.Generator, canvas: StainCanvas, centers: Points) -> None:
    """Paint pale pink cytoplasm around the centers of cells, which are complex numbers x + iy in pixels."""
    spots = np.zeros(canvas.shape, np.float32)
    is_inside = (centers.real >= 0) & (centers.imag >= 0)
    is_inside &= (centers.real < canvas.shape[1] - 1) & (centers.imag < canvas.shape[0] - 1)
    rows, columns = np.rint(centers[is_inside].imag).astype(int), np.rint(centers[is_inside].real).astype(int)
    spots[rows, columns] = 1
    body = ndimage.gaussian_filter(spots, 2.6, truncate=2.5) * np.float32(40) + 0.25 * smooth_noise(
        rng, canvas.shape, 1.5
    )
    eosin = np.float32(rng.uniform(0.3, 0.5))
    canvas.eosin[:] += smoothstep(body - np.float32(0.3)) * (eosin - canvas.eosin).clip(0)


def _paint_bleeding(rng: np.random.Generator, canvas: StainCanvas, plan: NodePlan) -> None:
    """Paint red blood cells outside vessels: many on some slides, and few on most slides."""
    red_cells = scatter_points(rng, canvas.shape, 4.7, jitter=0.2)
    density = values_at(smooth_noise(rng, canvas.shape, 16), red_cells)
    is_bleeding = density > rng.choice([0.8, 2.0, 3.0], p=[0.08, 0.4, 0.52])
    is_bleeding &= (values_at(plan.nest_um, red_cells) < 0) & (values_at(plan.empty, red_cells) < 0.5)
    paint_red_cells(rng, canvas, red_cells[is_bleeding], strength=rng.uniform(0.9, 1.7))


def _paint_artifacts(rng: np.random.Generator, canvas: StainCanvas) -> None:
    """On some slides, chosen at random, paint artifacts: a region out of focus, a fold of the tissue, or both."""
    shape = canvas.shape
    stains = (canvas.hematoxylin, canvas.eosin, canvas.blood)
    if rng.random() < 0.13:
        mask = smoothstep(_sample_region(rng, shape, 60, 0.35) / 20)
        blur_px = rng.uniform(0.6, 1.1)
        for stain in stains:
            stain += mask * (ndimage.gaussian_filter(stain, blur_px, truncate=2.5) - stain)
    if rng.random() < 0.12:
        rotated = pixel_positions(shape) * (rng.standard_normal() + 1j * rng.standard_normal())
        across = rotated.real / np.abs(rotated[0, 1] - rotated[0, 0]) + 10 * smooth_noise(rng, shape, 60)
        distance = np.abs(across - np.float32(rng.uniform(np.quantile(across, 0.2), np.quantile(across, 0.8))))
        fold = smoothstep((np.float32(rng.uniform(4, 12)) - distance) / 3)
        for stain in stains:
            stain *= 1 + fold * np.float32(rng.uniform(0.6, 1.2))
