"""Nuclei: smooth irregular outlines, and the chromatin inside them, many at a time.

In: positions, directions, and a kind that says how large, dark and uneven they are. Out: outlines, or stain.
The outline of a nucleus is an ellipse, bent, and modulated by a few harmonics of the direction from its centre.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rotopath.synthetic.painting import Field, Points, draw_directions, smooth_noise

Numbers = NDArray[np.floating]  # (n,), one a nucleus
HARMONICS = 5  # of the outline: 2 (oval) to 6 (wrinkled)
OUTLINE_VERTICES = 40
WINDOWS_PX = (8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 160)  # nuclei of like size are painted together
STAMPED_AT_ONCE = 1 << 20  # pixels, to bound memory
MEMBRANE_UM = np.float32(0.35)  # as wide as it looks in focus
SHINE_THROUGH = 0.3  # of the stain of a nucleus behind another


@dataclass(frozen=True)
class NucleusType:
    """How nuclei of a kind look; lengths in µm, stain where 1 is a normally dark nucleus."""

    radius_um: float
    spread: float = 0.12  # relative deviation of radii
    elongation: float = 1.25  # long over short axis, on average
    wrinkles: float = 0.05  # how far the outline leaves the ellipse
    bend: float = 0.1
    wave: float = 0.0  # bent one way at one end, the other way at the other
    darkness: float = 0.8
    darkness_spread: float = 0.15
    rim: float = 0.5  # extra stain at the membrane
    clumps: float = 0.35  # contrast of chromatin
    pallor: float = 0.0  # stain missing in the middle, 0 to 1
    nucleoli: float = 0.0  # how many, on average
    blurred: float = 0.06  # share that lies out of focus
    cell: str = ""  # the class that annotations give it; empty where none do


NEEDLE = NucleusType(  # a fibroblast at rest
    1.9,
    spread=0.28,
    elongation=4.5,
    wrinkles=0.06,
    bend=0.09,
    wave=0.004,
    darkness=1.3,
    darkness_spread=0.3,
    rim=0.15,
    clumps=0.2,
    blurred=0.15,
    cell="fibroblast",
)
PLUMP = NucleusType(  # and an active one
    2.7,
    spread=0.22,
    elongation=2.4,
    wrinkles=0.07,
    bend=0.08,
    wave=0.003,
    darkness=0.85,
    darkness_spread=0.25,
    rim=0.45,
    clumps=0.3,
    pallor=0.45,
    nucleoli=0.6,
    blurred=0.12,
    cell="fibroblast",
)
LYMPHOCYTE = NucleusType(
    2.8, spread=0.14, elongation=1.2, wrinkles=0.06, darkness=1.6, rim=0.1, clumps=0.45, cell="lymphocyte"
)


@dataclass(frozen=True)
class Nuclei:
    centre: Points
    direction: Points  # of the long axis
    long_px: Numbers  # half axes
    short_px: Numbers
    bend: Numbers
    wave: Numbers
    harmonics: NDArray[np.complexfloating]  # (n, HARMONICS)
    darkness: Numbers
    rim: Numbers
    clumps: Numbers
    pallor: Numbers
    softness_px: Numbers  # over which the edge fades
    nucleoli: NDArray[np.complexfloating]  # (n, 3), within the unit disc; far outside where there is none
    cell: NDArray[np.str_]  # the class of each

    def __len__(self) -> int:
        return len(self.centre)

    def take(self, chosen: NDArray[np.generic]) -> "Nuclei":
        """The nuclei at these positions, or under this mask."""
        return Nuclei(*(getattr(self, field.name)[chosen] for field in fields(self)))


def join(groups: list[Nuclei]) -> Nuclei:
    """All nuclei of the groups, in their order."""
    return Nuclei(*(np.concatenate([getattr(group, field.name) for group in groups]) for field in fields(Nuclei)))


def draw_nuclei(
    rng: np.random.Generator, kind: NucleusType, centres: Points, spacing_um_px: float, directions: Points | None = None
) -> Nuclei:
    """Nuclei of a kind at these places, lying in the given directions or in any."""
    n = len(centres)
    radius = kind.radius_um / spacing_um_px * rng.lognormal(0, kind.spread, n)
    stretch = np.sqrt(1 + (kind.elongation - 1) * rng.gamma(3, 1 / 3, n))
    order = np.arange(2, 2 + HARMONICS)
    harmonics = rng.standard_normal((n, HARMONICS)) + 1j * rng.standard_normal((n, HARMONICS))
    blurred = rng.random(n) < kind.blurred
    softness = np.where(blurred, rng.uniform(0.9, 2.2, n), rng.uniform(0.25, 0.5, n)) / spacing_um_px
    places = rng.uniform(0, 0.55, (n, 3)) * draw_directions(rng, 3 * n).reshape(n, 3)
    places[np.arange(3) >= rng.poisson(kind.nucleoli, n)[:, None]] = 100
    shade = kind.darkness * rng.lognormal(0, kind.darkness_spread, n)
    return Nuclei(
        centre=np.asarray(centres, np.complex64),
        direction=draw_directions(rng, n) if directions is None else np.asarray(directions, np.complex64),
        long_px=_float32(radius * stretch),
        short_px=_float32(radius / stretch),
        bend=_float32(rng.normal(0, kind.bend, n) / radius),
        wave=_float32(rng.normal(0, kind.wave, n) / radius**2),
        harmonics=np.asarray(harmonics * (kind.wrinkles * 2.0 / order**1.2), np.complex64),
        darkness=_float32(shade),
        rim=_float32(kind.rim * rng.uniform(0.6, 1.4, n)),
        clumps=_float32(kind.clumps * rng.uniform(0.5, 1.5, n) * np.where(blurred, 0.4, 1)),
        pallor=_float32((kind.pallor * rng.uniform(0.4, 1.5, n) * np.where(blurred, 0.4, 1)).clip(0, 0.9)),
        softness_px=_float32(softness.clip(1.0)),
        nucleoli=np.asarray(places, np.complex64),
        cell=np.full(n, kind.cell),
    )


def draw_fibroblasts(
    rng: np.random.Generator, centres: Points, spacing_um_px: float, directions: Points, active: float = 0.4
) -> Nuclei:
    """Spindle nuclei along these directions, roughly: needles, and this share of plump ones."""
    tilted = directions * np.exp(1j * rng.normal(0, 0.16, len(directions)))
    plump = rng.random(len(centres)) < active
    return join(
        [
            draw_nuclei(rng, kind, centres[chosen], spacing_um_px, tilted[chosen])
            for kind, chosen in ((NEEDLE, ~plump), (PLUMP, plump))
        ]
    )


def outlines(nuclei: Nuclei) -> NDArray[np.complexfloating]:
    """(n, OUTLINE_VERTICES) points around each nucleus, in pixels."""
    around = np.fft.fft(np.eye(1, OUTLINE_VERTICES, 1)[0])  # the roots of unity, once around
    scaled = around * _modulation(nuclei.harmonics[:, :, None], around[None])
    x = nuclei.long_px[:, None] * scaled.real
    y = nuclei.short_px[:, None] * scaled.imag - nuclei.bend[:, None] * x**2 / 2 - nuclei.wave[:, None] * x**3
    return np.asarray(nuclei.centre[:, None] + (x + 1j * y) * nuclei.direction[:, None], np.complex64)


def stamp(rng: np.random.Generator, nuclei: Nuclei, hematoxylin: Field, eosin: Field, spacing_um_px: float) -> None:
    """Put the nuclei into the tissue, the first ones in front; those behind shine through a little."""
    shape = hematoxylin.shape
    front, strongest, cover = (np.zeros(hematoxylin.size, np.float32) for _ in range(3))
    um = 1 / spacing_um_px
    clods = np.tanh(2.2 * smooth_noise(rng, shape, 0.42 * um) - np.float32(0.7)) + np.float32(0.4)  # small and sharp
    grain = 0.5 * smooth_noise(rng, shape, 0.22 * um) + 0.5 * clods + 0.3 * smooth_noise(rng, shape, 1.0 * um)
    bulge = 1 + np.abs(nuclei.harmonics).sum(axis=1)  # no outline leaves the ellipse by more
    reach = 2 * (nuclei.long_px * bulge + nuclei.softness_px + 1)
    window = np.array(WINDOWS_PX)[np.searchsorted(WINDOWS_PX, reach).clip(max=len(WINDOWS_PX) - 1)]
    painted = []
    for side in np.unique(window):
        positions = np.flatnonzero(window == side)
        for part in np.array_split(positions, -(-len(positions) * int(side) ** 2 // STAMPED_AT_ONCE)):
            which, where, stain, mask = _paint(rng, nuclei.take(part), int(side), grain, spacing_um_px)
            rank = (len(nuclei) - part)[which].astype(np.float32)
            painted.append((rank, where, stain, mask))
            np.maximum.at(front, where, np.where(mask > 0.5, rank, 0))
    for rank, where, stain, mask in painted:
        np.maximum.at(strongest, where, np.where(rank >= front[where], stain, SHINE_THROUGH * stain))
        np.maximum.at(cover, where, mask)
    stained, covered = strongest.reshape(shape), cover.reshape(shape)
    hematoxylin *= 1 - 0.9 * covered
    hematoxylin += stained
    eosin *= 1 - 0.2 * covered
    eosin += 0.2 * stained.clip(max=1)


def _paint(
    rng: np.random.Generator, nuclei: Nuclei, side: int, grain: Field, spacing_um_px: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], Numbers, Numbers]:
    """For each pixel of each nucleus: which one, where (flat), the hematoxylin there, and how far it is covered."""
    height, width = grain.shape
    corner_x = np.rint(nuclei.centre.real).astype(int)[:, None, None] - side // 2
    corner_y = np.rint(nuclei.centre.imag).astype(int)[:, None, None] - side // 2
    rows, columns = corner_y + np.arange(side)[:, None], corner_x + np.arange(side)  # (n, side, 1), (n, 1, side)
    n, one = len(nuclei), np.newaxis
    # Single precision from here on: twice as fast, and finer than a pixel.
    across = columns.astype(np.float32) - nuclei.centre.real[:, one, one]
    down = rows.astype(np.float32) - nuclei.centre.imag[:, one, one]
    offset = (across + np.complex64(1j) * down) * nuclei.direction.conj()[:, one, one]
    x = offset.real
    y = offset.imag + nuclei.bend[:, one, one] * x**2 / 2 + nuclei.wave[:, one, one] * x**3
    long, short = nuclei.long_px[:, one, one], nuclei.short_px[:, one, one]
    unit: Points = x / long + np.complex64(1j) * (y / short)
    distance = np.abs(unit) + np.float32(1e-3)
    modulation = _modulation(nuclei.harmonics[..., one, one], np.asarray(unit / distance, np.complex64))
    level = distance / modulation  # 1 on the outline
    slope = np.sqrt((x / long**2) ** 2 + (y / short**2) ** 2) / (distance * modulation) + np.float32(1e-3)
    depth_um = (1 - level) / slope * np.float32(spacing_um_px)  # below the membrane
    soft_um = nuclei.softness_px[:, one, one] * np.float32(spacing_um_px)
    mask = (depth_um / soft_um + np.float32(0.5)).clip(0, 1)
    mask *= mask * (3 - 2 * mask)

    shift = rng.integers(0, min(height, width), (2, n, 1, 1))  # so that neighbours do not share their chromatin
    chromatin = grain[(rows + shift[0]) % height, (columns + shift[1]) % width]
    rim_um = np.float32(0.2) + np.float32(0.4) * soft_um
    rim = (
        nuclei.rim[:, one, one]
        * (MEMBRANE_UM / rim_um)  # no more stain where it is blurred
        * (np.float32(0.75) + np.float32(0.6) * chromatin).clip(0.1)
        * np.exp(-((depth_um / rim_um - np.float32(0.6)) ** 2))
    )
    middle = (depth_um / (np.float32(0.5) + soft_um)).clip(0, 1)  # vesicular: evenly pale, up to the membrane
    inside = 1 - nuclei.pallor[:, one, one] * middle + nuclei.clumps[:, one, one] * chromatin
    for k in range(nuclei.nucleoli.shape[1]):
        spot = nuclei.nucleoli[:, k]
        held = np.flatnonzero(np.abs(spot) < 1)
        size = np.float32((0.85 - 0.17 * k) / spacing_um_px) ** 2  # the first one is the largest
        away = (x[held] - (nuclei.long_px * spot.real)[held, one, one]) ** 2
        away += (y[held] - (nuclei.short_px * spot.imag)[held, one, one]) ** 2
        inside[held] += np.float32(1.1) * np.exp(-((away / size) ** 2))
    stain = nuclei.darkness[:, one, one] * mask * (inside.clip(0.12) + rim)

    seen = np.broadcast_to((rows >= 0) & (rows < height) & (columns >= 0) & (columns < width), mask.shape) & (mask > 0)
    where = np.broadcast_to(rows * width + columns, mask.shape)[seen]
    return np.nonzero(seen)[0], where, stain[seen], mask[seen]


def _modulation(harmonics: NDArray[np.complexfloating], unit: NDArray[np.complexfloating]) -> Numbers:
    """By how much the outline leaves the ellipse in the direction of `unit`: 1 + Re Σ c_k unit^k."""
    total = np.zeros(np.broadcast_shapes(harmonics[:, 0].shape, unit.shape), np.complex64)
    for k in range(HARMONICS - 1, -1, -1):  # Horner's scheme
        total = (total + harmonics[:, k]) * unit
    return _float32((1 + (total * unit).real).clip(0.4, 1.8))


def _float32(numbers: NDArray[np.floating]) -> Numbers:
    return np.asarray(numbers, np.float32)
