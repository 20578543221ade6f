"""Make synthetic breast cancer at 0.25 µm/px with mitotic figures, in the layout of AMIDA13.

`make_mitosis` writes TIFF images of 23 cases (patients). An image is called a field. For each field with mitoses, a CSV
file contains the positions of the mitoses (`row,column` in pixels). In addition, `look_alikes/CASE/FIELD.csv` lists the
mitoses and the look-alikes of each field with their classes. `manifest-classes.csv` lists all fields, for training with
these classes.

Each mitotic figure is painted in one of four phases; a metaphase is seen from the side or from a pole. Look-alikes are
objects that resemble mitotic figures: dying cells, smudged nuclei and lymphocytes. To paint a shape, a function
computes the *depth* of each pixel: the distance in µm of the pixel from the outline of the shape, positive inside and
negative outside. Noise is added to the positions of pixels, so that the edges of chromosomes are rough. Positions are
complex numbers x + iy: in pixels on the image, or in µm relative to the center of a cell.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotopath.data.annotations import Outline, paint_labels
from rotopath.data.splits import amida13_split
from rotopath.synthetic.ground import TissueStyle, paint_ground, paint_vessels
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
    Appearance,
    Field,
    Points,
    StainCanvas,
    Window,
    drop_points_near,
    new_dataset_folder,
    render_rgb,
    sample_appearance,
    sample_directions,
    scatter_points,
    select_spaced,
    smooth_noise,
    smoothstep,
    values_at,
    write_table,
    write_tiff,
)

SPACING_UM_PX = 0.25
CASES = range(1, 24)
CASES_IN_PART_1 = 12  # AMIDA13 has two folders of images; the first contains cases 1 to 12
MARGIN_PX = 20  # mitotic figures are farther than this from the edge of the image, so that they are recognizable
# Mean number of mitoses in a field of 128 µm × 128 µm, for each case. As in reality, a few cases have most mitoses.
MITOSES_PER_FIELD = (6, 4, 4, 7, 2, 6, 5, 1, 0.5, 0, 2, 1, 0.5, 2, 5, 1, 1, 7, 0.5, 0, 6, 5, 3)
MAX_MITOSES = 8  # maximum number of mitoses in a field
LOOK_ALIKES_PER_FIELD = 9  # mean number of dying cells and smudged nuclei in a field of 128 µm × 128 µm
HIDDEN_UM = 3.5  # if the centers of two objects are at most this far apart, only the object in front is annotated
WINDOW_UM = 30.0  # side of the window in which a mitotic figure or dying cell is painted

TUMOR = NucleusType(
    4.3, spread=0.2, elongation=1.35, wrinkles=0.06, darkness=0.75, rim=0.55, clumps=0.4, pallor=0.45, nucleoli=0.9
)
SMUDGED = NucleusType(
    2.7,
    spread=0.25,
    elongation=2.0,
    wrinkles=0.13,
    bend=0.15,
    darkness=2.1,
    darkness_spread=0.22,
    rim=0.0,
    clumps=0.15,
    blurred=0.4,
    cell="smudged",
)
MITOSIS = "mitosis"
APOPTOTIC = "apoptotic"  # a dying cell: a shrunken nucleus, or fragments of a nucleus
LOOK_ALIKE_NUCLEI = (LYMPHOCYTE.cell, SMUDGED.cell)

Depths = tuple[Field, Field]  # depth of each pixel in the chromatin, and depth of each pixel in the cell, both in µm


class LabeledObject(NamedTuple):
    """The center of an object in the image, rounded to whole pixels, and the class of the object."""

    row: int
    column: int
    cell: str


# The dataset


def make_mitosis(out: Path, seed: int = 0, fields_per_case: int = 2, size_px: int = 512) -> None:
    """Write a dataset of synthetic breast cancer with annotated mitoses to `out`, a new or empty folder.

    Each of the 23 cases has `fields_per_case` images of `size_px` × `size_px` pixels. The same `seed` gives the same
    dataset. Raises FileExistsError if `out` exists and is not an empty folder.
    """
    with new_dataset_folder(out) as folder:
        manifest: list[tuple[object, ...]] = []
        for case in CASES:
            part = "mitoses_image_data_part_1" if case <= CASES_IN_PART_1 else "mitoses_image_data_part_2"
            for field in range(1, fields_per_case + 1):
                name = f"{case:02d}/{field:02d}"
                image, objects = render_mitosis_field(seed, case, field, size_px)
                write_tiff(folder / part / f"{name}.tif", image, SPACING_UM_PX)
                if mitoses := [item for item in objects if item.cell == MITOSIS]:
                    table = folder / "mitoses_ground_truth" / f"{name}.csv"
                    table.parent.mkdir(parents=True, exist_ok=True)
                    table.write_text("".join(f"{row},{column}\n" for row, column, _ in mitoses), encoding="utf-8")
                write_table(folder / "look_alikes" / f"{name}.csv", "row,column,class", objects)
                files = (f"{part}/{name}.tif", f"look_alikes/{name}.csv")
                manifest.append((*files, f"{case:02d}", amida13_split(case), SPACING_UM_PX))
        write_table(folder / "manifest-classes.csv", "image,annotation,group,split,spacing", manifest)


def render_mitosis_field(
    seed: int, case: int, field: int, size_px: int
) -> tuple[NDArray[np.uint8], list[LabeledObject]]:
    """Return the image (H, W, 3) of a field, and the objects to annotate: first the mitoses, then the look-alikes.

    `case` (1 to 23) is the number of the case, and `field` the number of the field in this case, from 1. `size_px` is
    the height and width of the image in pixels.
    """
    appearance, style, tumor = _sample_case(np.random.default_rng([seed, 1, case]))
    rng = np.random.default_rng([seed, 1, case, field])
    shape, px_per_um = (size_px, size_px), 1 / SPACING_UM_PX
    scale_um = rng.uniform(30, 60)
    depth_um = (smooth_noise(rng, shape, scale_um * px_per_um) + rng.uniform(0.2, 1.6)) * scale_um / 2
    depth_um = depth_um.astype(np.float32)

    cells = scatter_points(rng, shape, tumor.radius_um * rng.uniform(2.6, 3.3) * px_per_um, jitter=0.22)
    canvas, fibers = paint_ground(rng, depth_um, cells, SPACING_UM_PX, style)
    nest_cells = cells[values_at(depth_um, cells) > 2]
    candidates = _choose_mitosis_candidates(rng, nest_cells, size_px)
    area = (size_px / 512) ** 2  # in units of 128 µm × 128 µm
    count = min(int(rng.poisson(MITOSES_PER_FIELD[case - 1] * area)), MAX_MITOSES)
    mitoses = candidates[: min(count, len(candidates))]
    others = candidates[len(mitoses) : len(mitoses) + int(rng.poisson(LOOK_ALIKES_PER_FIELD * area))]
    apoptotic, smudged = others[::2], others[1::2]

    tumor_cells = drop_points_near(nest_cells, np.concatenate([mitoses, others]), 7.5 * px_per_um)
    stroma = scatter_points(rng, shape, 9 * px_per_um, jitter=0.35)
    stroma = stroma[(values_at(depth_um, stroma) < -2) & (rng.random(len(stroma)) < 0.45)]
    stroma = stroma[select_spaced(stroma, 6 * px_per_um)]
    immune = scatter_points(rng, shape, 7.5 * px_per_um, jitter=0.3)
    crowding = values_at(smooth_noise(rng, shape, 20 * px_per_um), immune)
    crowding = crowding - 0.03 * values_at(depth_um, immune).clip(-10, 25)
    immune = immune[crowding > 1.7]
    vessels = stroma[select_spaced(stroma, 45 * px_per_um)][: round(3 * area)]
    stroma = drop_points_near(stroma, vessels, 7 * px_per_um)
    endothelium, tangents = paint_vessels(rng, canvas, vessels, values_at(fibers, vessels))
    spindles = np.concatenate([stroma, endothelium])
    directions = np.concatenate([values_at(fibers, stroma), tangents])
    nuclei = concatenate_nuclei(
        [
            sample_nuclei(rng, tumor, tumor_cells, SPACING_UM_PX),
            sample_fibroblasts(rng, spindles, SPACING_UM_PX, directions),
            sample_nuclei(rng, LYMPHOCYTE, immune, SPACING_UM_PX),
            sample_nuclei(rng, SMUDGED, smudged, SPACING_UM_PX),
        ]
    )
    paint_nuclei(rng, nuclei, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    for center in apoptotic:
        paint_apoptotic_cell(rng, canvas, complex(center))
    for center in mitoses:
        paint_mitosis(rng, canvas, complex(center))
    image = render_rgb(rng, canvas, appearance)
    return image, label_objects(mitoses, apoptotic, nuclei, size_px)


def label_objects(mitoses: Points, apoptotic: Points, nuclei: Nuclei, size_px: int) -> list[LabeledObject]:
    """Return the objects to annotate: mitoses, apoptotic cells, and look-alike nuclei, in this order.

    `mitoses` and `apoptotic` are the centers of these cells: complex numbers x + iy in pixels. `nuclei` are the nuclei
    of all other cells of the field. A look-alike nucleus is a nucleus with a class in LOOK_ALIKE_NUCLEI. It is left out
    if its center is covered by a nucleus that is not a look-alike, or if the center of an object in front is at most
    HIDDEN_UM away. Objects with a center outside the image are also left out.
    """
    is_look_alike = np.isin(nuclei.cell, LOOK_ALIKE_NUCLEI)
    look_alikes, others = nuclei.select(is_look_alike), nuclei.select(~is_look_alike)
    vertices = [np.stack([ring.real, ring.imag], axis=1).astype(np.float64) for ring in trace_nuclei(others)]
    in_front, _ = paint_labels(tuple(Outline("", polygon) for polygon in vertices), size_px, size_px)
    look_alikes = look_alikes.select(values_at(in_front, look_alikes.center) == 0)
    # Objects are ordered from front to back, because `select_spaced` keeps the first of two close objects. Mitoses and
    # apoptotic cells are far apart, so all of them are kept.
    centers = np.concatenate([mitoses, apoptotic, look_alikes.center])
    classes = [MITOSIS] * len(mitoses) + [APOPTOTIC] * len(apoptotic) + [str(cell) for cell in look_alikes.cell]
    objects = [
        LabeledObject(round(float(centers[i].imag)), round(float(centers[i].real)), classes[i])
        for i in select_spaced(centers, HIDDEN_UM / SPACING_UM_PX)
    ]
    return [item for item in objects if 0 <= item.row < size_px and 0 <= item.column < size_px]


def _sample_case(rng: np.random.Generator) -> tuple[Appearance, TissueStyle, NucleusType]:
    """Sample the colors, the tissue style and the type of tumor nuclei that all fields of a case share."""
    appearance = sample_appearance(rng, AT_40X)
    style = TissueStyle(
        cytoplasm=rng.uniform(0.55, 0.85),
        basophilia=0.1 + 0.45 * rng.random() ** 2,
        granularity=rng.uniform(0.2, 0.38),
        foam=rng.uniform(0, 0.85),
        borders=rng.uniform(0.15, 0.6),
        cracks_um=rng.uniform(0, 1.0),
        retraction_um=rng.uniform(0, 2),
        collagen=rng.uniform(0.5, 0.85),
        slits=rng.uniform(0.2, 0.7),
        looseness=rng.uniform(0, 0.5),
    )
    pallor = rng.uniform(0.15, 0.75)
    tumor = replace(
        TUMOR,
        radius_um=rng.uniform(3.7, 5.0),
        spread=rng.uniform(0.1, 0.26),
        darkness=rng.uniform(0.6, 1.1),
        rim=rng.uniform(0.1, 0.4) + 0.6 * pallor,
        clumps=rng.uniform(0.2, 0.5),
        pallor=pallor,
        nucleoli=rng.uniform(0.2, 1.6),
    )
    return appearance, style, tumor


def _choose_mitosis_candidates(rng: np.random.Generator, cells: Points, size_px: int) -> Points:
    """Return the centers of cells that can be replaced by mitotic figures or look-alikes, in random order.

    `cells` are the centers of all tumor cells. The returned centers are more than MARGIN_PX away from the edge of the
    image, and more than 16 µm away from each other. All centers are complex numbers x + iy in pixels.
    """
    is_inside = (np.abs(cells.real - size_px / 2) < size_px / 2 - MARGIN_PX) & (
        np.abs(cells.imag - size_px / 2) < size_px / 2 - MARGIN_PX
    )
    shuffled = rng.permutation(cells[is_inside])
    return shuffled[select_spaced(shuffled, 16 / SPACING_UM_PX)]


# Mitotic figures and dying cells


def paint_mitosis(rng: np.random.Generator, canvas: StainCanvas, center: complex) -> None:
    """Paint a mitotic figure in a random phase: chromatin without a nuclear membrane, in a round, pale cell.

    `center` is the center of the mitotic figure, x + iy in pixels.
    """
    window = _window_around(canvas, center)
    position = _local_positions(rng, window, canvas)
    shape = (position.shape[0], position.shape[1])
    px_per_um = 1 / canvas.spacing_um_px
    rough = position
    for scale_um, shift_um in ((0.35, rng.uniform(0.12, 0.35)), (0.9, rng.uniform(0.1, 0.35))):  # fine, then coarse
        rough = rough + np.float32(shift_um) * _displacement(rng, shape, scale_um * px_per_um)
    phase = _PHASES[int(rng.choice(len(_PHASES), p=_PHASE_PROBABILITIES))]
    chromatin_um, cell_um = phase(rng, rough, position, smooth_noise(rng, shape, 1.0 * px_per_um))
    cell_um = cell_um + np.float32(0.8) * smooth_noise(rng, shape, 4 * px_per_um)
    body = smoothstep(cell_um * np.float32(0.6) + np.float32(0.5))
    clearing = rng.uniform(0.0, 0.6)
    window.attenuate(canvas, body, hematoxylin=1 - clearing, eosin=1 - 0.7 * clearing)
    membrane = np.exp(-((cell_um / np.float32(0.5)) ** 2)) * np.float32(rng.uniform(0, 0.25))
    window.view(canvas.eosin)[:] += membrane
    blur_um = np.float32(rng.choice([0.28, 0.5, 1.1], p=[0.55, 0.33, 0.12]))
    mask = smoothstep(chromatin_um / (2 * blur_um) + np.float32(0.5))
    contrast = np.float32(0.65 if blur_um > 1 else 1.0)  # objects out of focus are paler
    darkness = (
        contrast
        * np.float32(rng.uniform(2.0, 3.2))
        * (1 + np.float32(0.22) * smooth_noise(rng, shape, 0.6 * px_per_um))
    )
    window.attenuate(canvas, mask, hematoxylin=0.1, eosin=0.7)
    window.view(canvas.hematoxylin)[:] += mask * darkness


def paint_apoptotic_cell(rng: np.random.Generator, canvas: StainCanvas, center: complex) -> None:
    """Paint a dying cell: a shrunken or fragmented dark nucleus in dense pink cytoplasm, often with a pale halo.

    `center` is the center of the cell, x + iy in pixels.
    """
    window = _window_around(canvas, center)
    position = _local_positions(rng, window, canvas)
    shape = (position.shape[0], position.shape[1])
    px_per_um = 1 / canvas.spacing_um_px
    position = position + np.float32(0.2) * _displacement(rng, shape, 1.5 * px_per_um)
    if rng.random() < 0.5:
        stretch = np.float32(rng.uniform(1, 1.7))
        chromatin_um = np.float32(rng.uniform(1.7, 3.0)) - np.abs(position.real * stretch + 1j * position.imag)
    else:
        count = int(rng.integers(2, 7))
        centers = rng.uniform(0.4, 3.4, count) * sample_directions(rng, count)
        radii = rng.uniform(0.6, 1.8, count)
        fragments = [np.float32(r) - np.abs(position - c) for c, r in zip(centers, radii, strict=True)]
        chromatin_um = np.max(fragments, axis=0)
    cell_um = np.float32(rng.uniform(3.2, 5.2)) - np.abs(
        position + np.float32(0.6) * _displacement(rng, shape, 3 * px_per_um)
    )
    # A shrinking cell detaches from its neighbors, usually on one side only.
    side = (position * sample_directions(rng, 1)[0]).real / 5 + 0.5 * smooth_noise(rng, shape, 2.5 * px_per_um)
    gap_um = np.float32(rng.uniform(0.4, 1.8)) * (side + np.float32(rng.uniform(-0.3, 0.5))).clip(0)
    paleness = np.float32(rng.choice([0.0, 0.5, 0.8], p=[0.4, 0.35, 0.25]))
    halo = smoothstep((cell_um + gap_um) * np.float32(1.6)) * paleness
    window.attenuate(canvas, halo, hematoxylin=0.15, eosin=0.15)
    body = smoothstep(cell_um)
    window.attenuate(canvas, body, hematoxylin=0.4, eosin=0.5)
    window.view(canvas.eosin)[:] += body * np.float32(rng.uniform(0.2, 0.8))
    mask = smoothstep(chromatin_um / np.float32(rng.choice([0.45, 0.7, 1.4])) + np.float32(0.5))
    window.attenuate(canvas, mask, hematoxylin=0.1, eosin=0.8)
    window.view(canvas.hematoxylin)[:] += mask * np.float32(rng.uniform(1.6, 2.9))


# Phases of mitosis: each function returns the depth of each pixel in the chromatin and in the cell, in µm. `position`
# contains the position of each pixel relative to the center of the cell, in µm. `rough` is `position` with random
# displacements. `lumps` is noise that makes the outline of the chromatin uneven.


def _prometaphase(rng: np.random.Generator, rough: Points, position: Points, lumps: Field) -> Depths:
    radius = np.float32(rng.uniform(2.2, 3.4))
    clump = radius - np.abs(rough) + np.float32(rng.uniform(0.4, 0.9)) * lumps
    return clump, _round_cell(rng, position)


def _metaphase(rng: np.random.Generator, rough: Points, position: Points, lumps: Field) -> Depths:
    length, thickness = rng.uniform(2.8, 4.6), rng.uniform(1.1, 2.0)
    bent = rough + 1j * rng.normal(0, 0.03) * rough.real**2
    return _plate(bent, length, thickness) + np.float32(0.25) * lumps, _round_cell(rng, position)


def _metaphase_polar_view(rng: np.random.Generator, rough: Points, position: Points, lumps: Field) -> Depths:
    radius, thickness = rng.uniform(1.6, 2.4), rng.uniform(1.1, 1.5)
    ring = np.float32(thickness) - np.abs(np.abs(rough) - np.float32(radius)) + np.float32(0.5) * lumps
    return ring, _round_cell(rng, position)


def _anaphase(rng: np.random.Generator, rough: Points, position: Points, lumps: Field) -> Depths:
    distance, length = rng.uniform(1.7, 3.0), rng.uniform(2.6, 4.2)
    plates = _two_plates(rng, rough, distance, length, rng.uniform(0.8, 1.2))
    return plates + np.float32(0.2) * lumps, _round_cell(rng, position.real * 1.1 + 1j * position.imag * 0.9)


def _telophase(rng: np.random.Generator, rough: Points, position: Points, lumps: Field) -> Depths:
    distance, length = rng.uniform(3.6, 5.6), rng.uniform(2.2, 3.4)
    plates = _two_plates(rng, rough, distance, length, rng.uniform(0.8, 1.2))
    radius = np.float32(rng.uniform(4.2, 5.2))
    daughters = radius - np.abs(position.real + 1j * (np.abs(position.imag) - np.float32(distance)))
    return plates + np.float32(0.15) * lumps, daughters


_Phase = Callable[[np.random.Generator, Points, Points, Field], Depths]
_PHASES: tuple[_Phase, ...] = (_prometaphase, _metaphase, _metaphase_polar_view, _anaphase, _telophase)
_PHASE_PROBABILITIES = (0.26, 0.42, 0.08, 0.13, 0.11)


def _two_plates(rng: np.random.Generator, rough: Points, distance: float, length: float, thickness: float) -> Field:
    """Return the depth of each pixel in two parallel, slightly curved plates of chromosomes, in µm.

    The middle of each plate is `distance` µm from the center of the cell. `rough` contains the position of each pixel
    relative to the center of the cell, in µm, with random displacements. `length` and `thickness` are half the length
    and half the thickness of a plate, in µm.
    """
    curvature = rng.uniform(-0.01, 0.07)
    folded = rough.real + 1j * (np.abs(rough.imag) - distance - curvature * rough.real**2)
    tilted = folded * np.exp(1j * rng.normal(0, 0.08))
    return _plate(np.asarray(tilted, np.complex64), length, thickness)


def _plate(position: Points, length: float, thickness: float) -> Field:
    """Return the approximate depth of each pixel in a plate with rounded ends, in µm: negative outside the plate.

    `position` contains the position of each pixel relative to the center of the plate, in µm. `length` and `thickness`
    are half the length and half the thickness of the plate, in µm.
    """
    level = (np.abs(position.real) / length) ** 3 + (np.abs(position.imag) / thickness) ** 3
    depth: Field = ((1 - np.cbrt(level)) * thickness).astype(np.float32)
    return depth


def _round_cell(rng: np.random.Generator, position: Points) -> Field:
    """Return the depth of each pixel in a round cell of random size, in µm: negative outside the cell.

    `position` contains the position of each pixel relative to the center of the cell, in µm.
    """
    depth_um: Field = np.float32(rng.uniform(5.8, 8.0)) - np.abs(position).astype(np.float32)
    return depth_um


def _window_around(canvas: StainCanvas, center: complex) -> Window:
    """Return the window in which a mitotic figure or a dying cell is painted.

    `center` is the center of the cell, x + iy in pixels. Raises ValueError if the whole window is outside the canvas.
    """
    window = Window.around(canvas, center, int(WINDOW_UM / canvas.spacing_um_px))
    if window is None:
        raise ValueError(
            f"The cell with the center {center} (x + iy in pixels) is outside the image; choose a center in the image."
        )
    return window


def _displacement(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Points:
    """Return a random displacement x + iy for each pixel of an image of `shape` (height, width).

    x and y have mean 0 and standard deviation 1, and change over distances of about `scale_px` pixels.
    """
    return smooth_noise(rng, shape, scale_px) + np.complex64(1j) * smooth_noise(rng, shape, scale_px)


def _local_positions(rng: np.random.Generator, window: Window, canvas: StainCanvas) -> Points:
    """Return the position x + iy of each pixel of `window` relative to the center of the cell, in µm.

    The positions of all pixels are rotated about the center of the cell by the same random angle.
    """
    rotated: Points = window.offset * np.float32(canvas.spacing_um_px) * sample_directions(rng, 1)[0]
    return rotated
