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

from rotopath.data.splits import SPLITS
from rotopath.data.synthetic.layout import finished_folder
from rotopath.data.synthetic.slides import SLIDE_PX, render_slide

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
