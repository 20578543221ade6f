"""Mitotic figures in their phases, and the dying cells that look like them.

In: a canvas and a place. The figure is painted there, in a direction of its own. Shapes are level sets in µm, read at
places that noise has displaced: that gives chromosomes their rough, hairy edge.

Breast cancer at 0.25 µm/px with mitotic figures, in the layout of AMIDA13.

In: a seed. Out: fields of 23 cases as TIFF, and `row,col` of every mitosis in CSV; fields without any have no CSV.
Beside this layout, `look_alikes/CASE/FIELD.csv` holds mitoses and look-alikes with their classes, for each field, and
`manifest-classes.csv` lists all fields as a data set with these classes.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rotopath.data.annotations import Outline, paint_labels
from rotopath.data.splits import amida13_split
from rotopath.synthetic.ground import Manner, add_vessels, lay_tissue
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
    Look,
    Points,
    StainCanvas,
    Window,
    develop,
    draw_directions,
    draw_look,
    finished_folder,
    keep_away,
    look_up,
    ramp,
    scatter,
    smooth_noise,
    thin_out,
    write_table,
    write_tiff,
)

WINDOW_UM = 30.0
Shape = tuple[Field, Field]  # depth below the surface in µm: of the chromatin, and of the cell around it


def add_mitosis(rng: np.random.Generator, canvas: StainCanvas, centre: complex) -> None:
    """A mitotic figure of a random phase: chromatin without a membrane, in a cell that has rounded up and cleared."""
    window = _window(canvas, centre)
    place = _local(rng, window, canvas)
    shape = (place.shape[0], place.shape[1])
    um = 1 / canvas.spacing_um_px
    rough = place
    for scale_um, shift_um in ((0.35, rng.uniform(0.12, 0.35)), (0.9, rng.uniform(0.1, 0.35))):  # hairs and lumps
        rough = rough + np.float32(shift_um) * _displacement(rng, shape, scale_um * um)
    phase = _PHASES[int(rng.choice(len(_PHASES), p=_SHARES))]
    chromatin, cell = phase(rng, rough, place, smooth_noise(rng, shape, 1.0 * um))
    cell = cell + np.float32(0.8) * smooth_noise(rng, shape, 4 * um)
    body = ramp(cell * np.float32(0.6) + np.float32(0.5))
    clearness = rng.uniform(0.0, 0.6)
    window.shade(canvas, body, hematoxylin=1 - clearness, eosin=1 - 0.7 * clearness)
    membrane = np.exp(-((cell / np.float32(0.5)) ** 2)) * np.float32(rng.uniform(0, 0.25))
    window.view(canvas.eosin)[:] += membrane
    focus = np.float32(rng.choice([0.28, 0.5, 1.1], p=[0.55, 0.33, 0.12]))
    mask = ramp(chromatin / (2 * focus) + np.float32(0.5))
    paleness = np.float32(0.65 if focus > 1 else 1.0)  # light from above and below mixes in
    darkness = (
        paleness * np.float32(rng.uniform(2.0, 3.2)) * (1 + np.float32(0.22) * smooth_noise(rng, shape, 0.6 * um))
    )
    window.shade(canvas, mask, hematoxylin=0.1, eosin=0.7)
    window.view(canvas.hematoxylin)[:] += mask * darkness


def add_lookalike(rng: np.random.Generator, canvas: StainCanvas, centre: complex) -> None:
    """A dying cell: one shrunken dark nucleus, or its fragments, in dense pink cytoplasm with a halo around it."""
    window = _window(canvas, centre)
    place = _local(rng, window, canvas)
    shape = (place.shape[0], place.shape[1])
    um = 1 / canvas.spacing_um_px
    place = place + np.float32(0.2) * _displacement(rng, shape, 1.5 * um)
    if rng.random() < 0.5:
        stretch = np.float32(rng.uniform(1, 1.7))
        chromatin = np.float32(rng.uniform(1.7, 3.0)) - np.abs(place.real * stretch + 1j * place.imag)
    else:
        count = int(rng.integers(2, 7))
        spots = rng.uniform(0.4, 3.4, count) * draw_directions(rng, count)
        radii = rng.uniform(0.6, 1.8, count)
        balls = [np.float32(r) - np.abs(place - s) for s, r in zip(spots, radii, strict=True)]
        chromatin = np.max(balls, axis=0)
    cell = np.float32(rng.uniform(3.2, 5.2)) - np.abs(place + np.float32(0.6) * _displacement(rng, shape, 3 * um))
    # Shrinkage tears the cell off on one side more than on the other, and seldom all around.
    side = (place * draw_directions(rng, 1)[0]).real / 5 + 0.5 * smooth_noise(rng, shape, 2.5 * um)
    gap_um = np.float32(rng.uniform(0.4, 1.8)) * (side + np.float32(rng.uniform(-0.3, 0.5))).clip(0)
    halo = ramp((cell + gap_um) * np.float32(1.6)) * np.float32(rng.choice([0.0, 0.5, 0.8], p=[0.4, 0.35, 0.25]))
    window.shade(canvas, halo, hematoxylin=0.15, eosin=0.15)
    body = ramp(cell)
    window.shade(canvas, body, hematoxylin=0.4, eosin=0.5)
    window.view(canvas.eosin)[:] += body * np.float32(rng.uniform(0.2, 0.8))
    mask = ramp(chromatin / np.float32(rng.choice([0.45, 0.7, 1.4])) + np.float32(0.5))
    window.shade(canvas, mask, hematoxylin=0.1, eosin=0.8)
    window.view(canvas.hematoxylin)[:] += mask * np.float32(rng.uniform(1.6, 2.9))


def _prometaphase(rng: np.random.Generator, rough: Points, place: Points, lumps: Field) -> Shape:
    radius = np.float32(rng.uniform(2.2, 3.4))
    clump = radius - np.abs(rough) + np.float32(rng.uniform(0.4, 0.9)) * lumps
    return clump, _round_cell(rng, place)


def _metaphase(rng: np.random.Generator, rough: Points, place: Points, lumps: Field) -> Shape:
    length, thickness = rng.uniform(2.8, 4.6), rng.uniform(1.1, 2.0)
    bowed = rough + 1j * rng.normal(0, 0.03) * rough.real**2
    return _plate(bowed, length, thickness) + np.float32(0.25) * lumps, _round_cell(rng, place)


def _metaphase_end_on(rng: np.random.Generator, rough: Points, place: Points, lumps: Field) -> Shape:
    radius, thickness = rng.uniform(1.6, 2.4), rng.uniform(1.1, 1.5)
    ring = np.float32(thickness) - np.abs(np.abs(rough) - np.float32(radius)) + np.float32(0.5) * lumps
    return ring, _round_cell(rng, place)


def _anaphase(rng: np.random.Generator, rough: Points, place: Points, lumps: Field) -> Shape:
    apart, length = rng.uniform(1.7, 3.0), rng.uniform(2.6, 4.2)
    pair = _pair(rng, rough, apart, length, rng.uniform(0.8, 1.2))
    return pair + np.float32(0.2) * lumps, _round_cell(rng, place.real * 1.1 + 1j * place.imag * 0.9)


def _telophase(rng: np.random.Generator, rough: Points, place: Points, lumps: Field) -> Shape:
    apart, length = rng.uniform(3.6, 5.6), rng.uniform(2.2, 3.4)
    pair = _pair(rng, rough, apart, length, rng.uniform(0.8, 1.2))
    radius = np.float32(rng.uniform(4.2, 5.2))
    daughters = radius - np.abs(place.real + 1j * (np.abs(place.imag) - np.float32(apart)))
    return pair + np.float32(0.15) * lumps, daughters


def _pair(rng: np.random.Generator, rough: Points, apart: float, length: float, thickness: float) -> Field:
    """Two plates, `apart` from the middle to either side, hollow towards their poles."""
    hollow = rng.uniform(-0.01, 0.07)
    folded = rough.real + 1j * (np.abs(rough.imag) - apart - hollow * rough.real**2)
    tilted = folded * np.exp(1j * rng.normal(0, 0.08))
    return _plate(np.asarray(tilted, np.complex64), length, thickness)


def _plate(place: Points, length: float, thickness: float) -> Field:
    ends = (np.abs(place.real) / length) ** 3 + (np.abs(place.imag) / thickness) ** 3
    depth: Field = ((1 - np.cbrt(ends)) * thickness).astype(np.float32)
    return depth


def _round_cell(rng: np.random.Generator, place: Points) -> Field:
    cell: Field = np.float32(rng.uniform(5.8, 8.0)) - np.abs(place).astype(np.float32)
    return cell


_Phase = Callable[[np.random.Generator, Points, Points, Field], Shape]
_PHASES: tuple[_Phase, ...] = (_prometaphase, _metaphase, _metaphase_end_on, _anaphase, _telophase)
_SHARES = (0.26, 0.42, 0.08, 0.13, 0.11)


def _window(canvas: StainCanvas, centre: complex) -> Window:
    window = Window.around(canvas, centre, int(WINDOW_UM / canvas.spacing_um_px))
    if window is None:
        raise ValueError(f"A figure at {centre} lies outside of the image.")
    return window


def _displacement(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Points:
    return smooth_noise(rng, shape, scale_px) + np.complex64(1j) * smooth_noise(rng, shape, scale_px)


def _local(rng: np.random.Generator, window: Window, canvas: StainCanvas) -> Points:
    """Windows in µm around the centre, in the figure's own direction."""
    turned: Points = window.offset * np.float32(canvas.spacing_um_px) * draw_directions(rng, 1)[0]
    return turned


SPACING_UM_PX = 0.25
CASES = range(1, 24)
CASES_IN_PART_1 = 12
MARGIN_PX = 20  # figures keep away from the edge, so that they can be recognised
# Mitoses in a field of (128 µm)², on average over a case: a few cases hold most of them, as in reality.
MITOSES_A_FIELD = (6, 4, 4, 7, 2, 6, 5, 1, 0.5, 0, 2, 1, 0.5, 2, 5, 1, 1, 7, 0.5, 0, 6, 5, 3)
MOST_MITOSES = 8
LOOKALIKES_A_FIELD = 9  # dying cells and smudged nuclei; lymphocytes and others come on top

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
DYING = "apoptotic"  # a shrunken nucleus, or its fragments
LOOKALIKE_NUCLEI = (LYMPHOCYTE.cell, SMUDGED.cell)
HIDDEN_UM = 3.5  # an object with its centre this close behind another can hardly be seen


class Labelled(NamedTuple):
    """The centre of an object, in whole pixels, and its class."""

    row: int
    column: int
    cell: str


def make_mitosis(out: Path, seed: int = 0, fields_per_case: int = 2, size_px: int = 512) -> None:
    """Write the whole set into `out`, which must not exist or be empty."""
    with finished_folder(out) as folder:
        manifest: list[tuple[object, ...]] = []
        for case in CASES:
            part = "mitoses_image_data_part_1" if case <= CASES_IN_PART_1 else "mitoses_image_data_part_2"
            for field in range(1, fields_per_case + 1):
                place = f"{case:02d}/{field:02d}"
                image, objects = render_field(seed, case, field, size_px)
                write_tiff(folder / part / f"{place}.tif", image, SPACING_UM_PX)
                if mitoses := [found for found in objects if found.cell == MITOSIS]:
                    table = folder / "mitoses_ground_truth" / f"{place}.csv"
                    table.parent.mkdir(parents=True, exist_ok=True)
                    table.write_text("".join(f"{row},{column}\n" for row, column, _ in mitoses), encoding="utf-8")
                write_table(folder / "look_alikes" / f"{place}.csv", "row,column,class", objects)
                files = (f"{part}/{place}.tif", f"look_alikes/{place}.csv")
                manifest.append((*files, f"{case:02d}", amida13_split(case), SPACING_UM_PX))
        write_table(folder / "manifest-classes.csv", "image,annotation,group,split,spacing", manifest)


def render_field(seed: int, case: int, field: int, size_px: int) -> tuple[NDArray[np.uint8], list[Labelled]]:
    """One field, and its mitoses and look-alikes, the mitoses first."""
    look, manner, tumor = _draw_case(np.random.default_rng([seed, 1, case]))
    rng = np.random.default_rng([seed, 1, case, field])
    shape, um = (size_px, size_px), 1 / SPACING_UM_PX
    scale_um = rng.uniform(30, 60)
    depth_um = ((smooth_noise(rng, shape, scale_um * um) + rng.uniform(0.2, 1.6)) * scale_um / 2).astype(np.float32)

    cells = scatter(rng, shape, tumor.radius_um * rng.uniform(2.6, 3.3) * um, jitter=0.22)
    canvas, fibre = lay_tissue(rng, depth_um, cells, SPACING_UM_PX, manner)
    in_nest = look_up(depth_um, cells) > 2
    marked = _spread_figures(rng, cells[in_nest], size_px)
    area = (size_px / 512) ** 2
    count = min(int(rng.poisson(MITOSES_A_FIELD[case - 1] * area)), MOST_MITOSES)
    mitoses = marked[: min(count, len(marked))]
    others = marked[len(mitoses) : len(mitoses) + int(rng.poisson(LOOKALIKES_A_FIELD * area))]

    tumor_cells = keep_away(cells[in_nest], np.concatenate([mitoses, others]), 7.5 * um)
    stroma = scatter(rng, shape, 9 * um, jitter=0.35)
    stroma = stroma[(look_up(depth_um, stroma) < -2) & (rng.random(len(stroma)) < 0.45)]
    stroma = stroma[thin_out(stroma, 6 * um)]
    immune = scatter(rng, shape, 7.5 * um, jitter=0.3)
    crowd = look_up(smooth_noise(rng, shape, 20 * um), immune) - 0.03 * look_up(depth_um, immune).clip(-10, 25)
    immune = immune[crowd > 1.7]
    dying, smudged = others[::2], others[1::2]
    hollow = stroma[thin_out(stroma, 45 * um)][: round(3 * area)]  # vessels
    stroma = keep_away(stroma, hollow, 7 * um)
    lining, course = add_vessels(rng, canvas, hollow, look_up(fibre, hollow))
    stroma, course = np.concatenate([stroma, lining]), np.concatenate([look_up(fibre, stroma), course])
    groups = join(
        [
            draw_nuclei(rng, tumor, tumor_cells, SPACING_UM_PX),
            draw_fibroblasts(rng, stroma, SPACING_UM_PX, course),
            draw_nuclei(rng, LYMPHOCYTE, immune, SPACING_UM_PX),
            draw_nuclei(rng, SMUDGED, smudged, SPACING_UM_PX),
        ]
    )
    stamp(rng, groups, canvas.hematoxylin, canvas.eosin, SPACING_UM_PX)
    for centre in dying:
        add_lookalike(rng, canvas, complex(centre))
    for centre in mitoses:
        add_mitosis(rng, canvas, complex(centre))
    image = develop(rng, canvas, look)
    return image, label_objects(mitoses, dying, groups, size_px)


def label_objects(mitoses: Points, dying: Points, nuclei: Nuclei, size_px: int) -> list[Labelled]:
    """All mitoses and dying cells, and the look-alikes among the nuclei whose centres can be seen in the field."""
    is_alike = np.isin(nuclei.cell, LOOKALIKE_NUCLEI)
    alike, others = nuclei.take(is_alike), nuclei.take(~is_alike)
    vertices = [np.stack([around.real, around.imag], axis=1).astype(np.float64) for around in outlines(others)]
    in_front, _ = paint_labels(tuple(Outline("", polygon) for polygon in vertices), size_px, size_px)
    alike = alike.take(look_up(in_front, alike.centre) == 0)
    # From front to back, so that of two objects at nearly the same place the one behind is left out. Mitoses and dying
    # cells are far apart, and always stay.
    centres = np.concatenate([mitoses, dying, alike.centre])
    classes = [MITOSIS] * len(mitoses) + [DYING] * len(dying) + [str(cell) for cell in alike.cell]
    objects = [
        Labelled(round(float(centres[i].imag)), round(float(centres[i].real)), classes[i])
        for i in thin_out(centres, HIDDEN_UM / SPACING_UM_PX)
    ]
    return [found for found in objects if 0 <= found.row < size_px and 0 <= found.column < size_px]


def _draw_case(rng: np.random.Generator) -> tuple[Look, Manner, NucleusType]:
    look = draw_look(rng, AT_40X)
    manner = Manner(
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
    return look, manner, tumor


def _spread_figures(rng: np.random.Generator, cells: Points, size_px: int) -> Points:
    """Cells that may hold a figure, in a random order: inside of the image, and apart from each other."""
    inside = (np.abs(cells.real - size_px / 2) < size_px / 2 - MARGIN_PX) & (
        np.abs(cells.imag - size_px / 2) < size_px / 2 - MARGIN_PX
    )
    shuffled = rng.permutation(cells[inside])
    return shuffled[thin_out(shuffled, 16 / SPACING_UM_PX)]
