"""Mitotic figures in their phases, and the dying cells that look like them.

In: a canvas and a place. The figure is painted there, in a direction of its own. Shapes are level sets in µm, read at
places that noise has displaced: that gives chromosomes their rough, hairy edge.
"""

from collections.abc import Callable

import numpy as np

from rotopath.data.synthetic.canvas import Canvas, Window, ramp
from rotopath.data.synthetic.noise import Field, Points, draw_directions, smooth_noise

WINDOW_UM = 30.0
Shape = tuple[Field, Field]  # depth below the surface in µm: of the chromatin, and of the cell around it


def add_mitosis(rng: np.random.Generator, canvas: Canvas, centre: complex) -> None:
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


def add_lookalike(rng: np.random.Generator, canvas: Canvas, centre: complex) -> None:
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


def _window(canvas: Canvas, centre: complex) -> Window:
    window = Window.around(canvas, centre, int(WINDOW_UM / canvas.spacing_um_px))
    if window is None:
        raise ValueError(f"A figure at {centre} lies outside of the image.")
    return window


def _displacement(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Points:
    return smooth_noise(rng, shape, scale_px) + np.complex64(1j) * smooth_noise(rng, shape, scale_px)


def _local(rng: np.random.Generator, window: Window, canvas: Canvas) -> Points:
    """Places in µm around the centre, in the figure's own direction."""
    turned: Points = window.offset * np.float32(canvas.spacing_um_px) * draw_directions(rng, 1)[0]
    return turned
