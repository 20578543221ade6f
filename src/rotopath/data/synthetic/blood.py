"""Blood: red cells, and the small vessels that carry them.

In: a canvas and places. The cells and vessels are painted there.
"""

import numpy as np

from rotopath.data.synthetic.canvas import Canvas, Window, ramp
from rotopath.data.synthetic.noise import Points, draw_directions, scatter, smooth_noise


def add_red_cells(rng: np.random.Generator, canvas: Canvas, centres: Points, strength: float = 2.1) -> None:
    """Red blood cells: discs, paler in the middle, pressed out of shape."""
    um = 1 / canvas.spacing_um_px
    side = int(10 * um) | 1
    for centre in centres:
        window = Window.around(canvas, centre, side)
        if window is None:
            continue
        radius = rng.uniform(2.4, 3.5) * um
        offset = window.offset * draw_directions(rng, 1)[0]
        bulge = 1 + np.float32(rng.normal(0, 0.12)) * (offset / (np.abs(offset) + 1)).real  # egg-shaped, rather
        away = np.abs(offset.real * rng.uniform(1, 1.7) + 1j * offset.imag) / (radius * bulge)
        disc = ramp((1 - away) * np.float32(radius) / np.float32(1.3) + np.float32(0.5))
        hollow = np.float32(rng.uniform(0.2, 0.6))
        stain = disc * np.float32(strength * rng.uniform(0.7, 1.15)) * (1 - hollow * (1 - away**2).clip(0))
        np.maximum(window.view(canvas.blood), stain, out=window.view(canvas.blood))
        window.shade(canvas, disc, hematoxylin=0.3, eosin=0.15)


def add_vessels(rng: np.random.Generator, canvas: Canvas, centres: Points, directions: Points) -> tuple[Points, Points]:
    """Small vessels along the fibres: a thin wall, and red cells in its lumen.

    Returned are the places and the directions of the flat nuclei that line them.
    """
    um = 1 / canvas.spacing_um_px
    places, courses = [np.zeros(0, np.complex64)], [np.zeros(0, np.complex64)]
    for centre, direction in zip(centres, directions, strict=True):
        long, short = rng.uniform(6, 20), rng.uniform(2.5, 6.5)
        window = Window.around(canvas, centre, int(2 * (1 + 3 / short) * long * um) | 1)
        if window is None:
            continue
        shape = (window.offset.shape[0], window.offset.shape[1])
        local = window.offset * np.conj(direction) / np.float32(um)
        y = local.imag + np.float32(rng.normal(0, 0.012)) * local.real**2 + 0.5 * smooth_noise(rng, shape, 3 * um)
        level = np.hypot(local.real / np.float32(long), y / np.float32(short))
        depth_um = (1 - level) * np.float32(short)
        lumen = ramp(depth_um + np.float32(0.5))
        window.shade(canvas, lumen, hematoxylin=0.04, eosin=0.06)
        wall = np.exp(-(((depth_um + np.float32(0.9)) / np.float32(0.8)) ** 2))
        window.view(canvas.eosin)[:] += np.float32(rng.uniform(0.1, 0.4)) * wall
        inside = scatter(rng, shape, 4.7 * um, jitter=0.2) - complex(shape[1] // 2, shape[0] // 2)
        turned = inside * np.conj(direction) / um
        held = np.hypot(turned.real / (long - 2), turned.imag / max(short - 1.6, 0.5)) < 1
        held &= rng.random(len(inside)) < rng.choice([0.15, 0.7, 0.95])
        add_red_cells(rng, canvas, centre + inside[held])
        around = draw_directions(rng, int(rng.integers(2, 6)))
        rim = (around.real * (long + 0.5) + 1j * around.imag * (short + 1.2)) * direction * um
        places.append(np.asarray(centre + rim, np.complex64))
        course = (-around.imag * long + 1j * around.real * short) * direction
        courses.append(np.asarray(course / np.abs(course), np.complex64))
    return np.concatenate(places), np.concatenate(courses)
