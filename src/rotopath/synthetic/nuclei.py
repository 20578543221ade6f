"""Sample nuclei with smooth irregular outlines, and paint many nuclei and their chromatin together.

`sample_nuclei` samples the shapes and stains of nuclei at given positions; a `NucleusType` states how large, dark and
uneven the nuclei are. `trace_nuclei` returns the outlines of nuclei, and `paint_nuclei` adds the stain of nuclei to the
tissue. An outline is a bent ellipse with irregularities. The irregularities are harmonics: sine waves of the angle
around the center. Positions are complex numbers x + iy in pixels. Directions are complex numbers x + iy of length 1.
"""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from rotopath.synthetic.painting import Field, Points, sample_directions, smooth_noise

Numbers = NDArray[np.floating]  # (n,): a number for each of n nuclei or pixels
HARMONICS = 5  # number of harmonics of an outline: sine waves with 2, 3, 4, 5 and 6 periods around the nucleus
OUTLINE_VERTICES = 40  # number of vertices of an outline
# Sides of the windows in which nuclei are painted. Each nucleus is painted in the smallest window that contains it.
# Nuclei with windows of the same size are painted together.
WINDOWS_PX = (8, 10, 12, 14, 16, 20, 24, 32, 40, 48, 64, 96, 160)
BATCH_PX = 1 << 20  # maximum number of pixels that are painted together, to limit memory
MEMBRANE_UM = np.float32(0.35)  # apparent width of a nuclear membrane that is in focus
TRANSPARENCY = 0.3  # fraction of the stain of a nucleus that is visible through a nucleus in front


@dataclass(frozen=True)
class NucleusType:
    """Appearance of one type of nuclei. `rim`, `clumps` and `pallor` are fractions of `darkness`."""

    radius_um: float  # typical radius
    spread: float = 0.12  # relative standard deviation of radii
    elongation: float = 1.25  # mean ratio of the long to the short axis
    wrinkles: float = 0.05  # relative deviation of the outline from an ellipse
    bend: float = 0.1  # C-shaped bend of the long axis: standard deviation of (curvature · radius)
    wave: float = 0.0  # S-shaped bend of the long axis: standard deviation of (cubic coefficient · radius²)
    darkness: float = 0.8  # typical concentration of hematoxylin
    darkness_spread: float = 0.15  # relative standard deviation of darkness
    rim: float = 0.5  # additional stain at the nuclear membrane
    clumps: float = 0.35  # contrast of the chromatin clumps
    pallor: float = 0.0  # missing stain inside the nucleus; vesicular nuclei have a high value
    nucleoli: float = 0.0  # mean number of nucleoli in a nucleus; at most three are painted
    blurred: float = 0.06  # fraction of nuclei that are out of focus
    cell: str = ""  # class of the nucleus in annotations; empty if nuclei of this type are not annotated


NEEDLE = NucleusType(  # resting fibroblasts
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
PLUMP = NucleusType(  # active fibroblasts
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
    """Shapes and stains of n nuclei. Each array has one entry for each nucleus."""

    center: Points  # complex numbers x + iy, in pixels
    direction: Points  # directions of the long axes, complex numbers of length 1
    long_px: Numbers  # half the length of the long axis
    short_px: Numbers  # half the length of the short axis
    bend: Numbers  # C-shaped bend: curvature of the long axis, in 1 / px
    wave: Numbers  # S-shaped bend: cubic coefficient of the long axis, in 1 / px²
    harmonics: NDArray[np.complexfloating]  # (n, HARMONICS): amplitudes and phases of the irregularities of the outline
    darkness: Numbers  # concentration of hematoxylin
    rim: Numbers  # additional stain at the nuclear membrane, as a fraction of `darkness`
    clumps: Numbers  # contrast of the chromatin clumps, as a fraction of `darkness`
    pallor: Numbers  # missing stain inside the nucleus, as a fraction of `darkness`
    softness_px: Numbers  # width over which the edge fades
    # (n, 3): positions x + iy of nucleoli relative to the center: x along the long axis, divided by `long_px`, and y
    # along the short axis, divided by `short_px`; 100 stands for a missing nucleolus
    nucleoli: NDArray[np.complexfloating]
    cell: NDArray[np.str_]  # class of the nucleus in annotations; empty if it is not annotated

    def __len__(self) -> int:
        return len(self.center)

    def select(self, chosen: NDArray[np.generic]) -> "Nuclei":
        """Return the chosen nuclei. `chosen` is an array of their indices, or a mask (n,) that is true for them."""
        return Nuclei(*(getattr(self, field.name)[chosen] for field in fields(self)))


def concatenate_nuclei(groups: list[Nuclei]) -> Nuclei:
    """Return the nuclei of all groups together, in the order of the groups."""
    return Nuclei(*(np.concatenate([getattr(group, field.name) for group in groups]) for field in fields(Nuclei)))


# Sampling


def sample_nuclei(
    rng: np.random.Generator, kind: NucleusType, centers: Points, spacing_um_px: float, directions: Points | None = None
) -> Nuclei:
    """Sample a nucleus of the type `kind` at each of `centers`.

    `centers` (n,) are complex numbers x + iy in pixels. `directions` (n,) are the directions of the long axes of the
    nuclei: complex numbers x + iy of length 1. If `directions` is None, the directions are random.
    """
    n = len(centers)
    radius = kind.radius_um / spacing_um_px * rng.lognormal(0, kind.spread, n)
    stretch = np.sqrt(1 + (kind.elongation - 1) * rng.gamma(3, 1 / 3, n))
    order = np.arange(2, 2 + HARMONICS)
    harmonics = rng.standard_normal((n, HARMONICS)) + 1j * rng.standard_normal((n, HARMONICS))
    is_blurred = rng.random(n) < kind.blurred
    softness = np.where(is_blurred, rng.uniform(0.9, 2.2, n), rng.uniform(0.25, 0.5, n)) / spacing_um_px
    nucleoli = rng.uniform(0, 0.55, (n, 3)) * sample_directions(rng, 3 * n).reshape(n, 3)
    nucleoli[np.arange(3) >= rng.poisson(kind.nucleoli, n)[:, None]] = 100
    darkness = kind.darkness * rng.lognormal(0, kind.darkness_spread, n)
    return Nuclei(
        center=np.asarray(centers, np.complex64),
        direction=sample_directions(rng, n) if directions is None else np.asarray(directions, np.complex64),
        long_px=_float32(radius * stretch),
        short_px=_float32(radius / stretch),
        bend=_float32(rng.normal(0, kind.bend, n) / radius),
        wave=_float32(rng.normal(0, kind.wave, n) / radius**2),
        harmonics=np.asarray(harmonics * (kind.wrinkles * 2.0 / order**1.2), np.complex64),
        darkness=_float32(darkness),
        rim=_float32(kind.rim * rng.uniform(0.6, 1.4, n)),
        clumps=_float32(kind.clumps * rng.uniform(0.5, 1.5, n) * np.where(is_blurred, 0.4, 1)),
        pallor=_float32((kind.pallor * rng.uniform(0.4, 1.5, n) * np.where(is_blurred, 0.4, 1)).clip(0, 0.9)),
        softness_px=_float32(softness.clip(1.0)),
        nucleoli=np.asarray(nucleoli, np.complex64),
        cell=np.full(n, kind.cell),
    )


def sample_fibroblasts(
    rng: np.random.Generator, centers: Points, spacing_um_px: float, directions: Points, active: float = 0.4
) -> Nuclei:
    """Sample the nucleus of a fibroblast at each of `centers`.

    `centers` (n,) are complex numbers x + iy in pixels. `directions` (n,) are the approximate directions of the long
    axes of the nuclei: complex numbers x + iy of length 1. `active` is the expected fraction of active fibroblasts,
    which have plump nuclei. The order of the nuclei is not that of `centers`: resting fibroblasts are first.
    """
    tilted = directions * np.exp(1j * rng.normal(0, 0.16, len(directions)))
    is_plump = rng.random(len(centers)) < active
    return concatenate_nuclei(
        [
            sample_nuclei(rng, kind, centers[chosen], spacing_um_px, tilted[chosen])
            for kind, chosen in ((NEEDLE, ~is_plump), (PLUMP, is_plump))
        ]
    )


def trace_nuclei(nuclei: Nuclei) -> NDArray[np.complexfloating]:
    """Return the vertices (n, OUTLINE_VERTICES) of the outlines of nuclei, as complex numbers x + iy in pixels."""
    circle = np.fft.fft(np.eye(1, OUTLINE_VERTICES, 1)[0])  # points on the unit circle
    scaled = circle * _outline_scale(nuclei.harmonics[:, :, None], circle[None])
    x = nuclei.long_px[:, None] * scaled.real
    y = nuclei.short_px[:, None] * scaled.imag - nuclei.bend[:, None] * x**2 / 2 - nuclei.wave[:, None] * x**3
    return np.asarray(nuclei.center[:, None] + (x + 1j * y) * nuclei.direction[:, None], np.complex64)


# Painting


def paint_nuclei(
    rng: np.random.Generator, nuclei: Nuclei, hematoxylin: Field, eosin: Field, spacing_um_px: float
) -> None:
    """Paint nuclei: change the concentrations `hematoxylin` and `eosin` (height, width) in place.

    The first nucleus is in front of all other nuclei, and the last nucleus is behind all other nuclei. Where nuclei
    overlap, the nuclei behind are partly visible.
    """
    shape = hematoxylin.shape
    front, strongest, cover = (np.zeros(hematoxylin.size, np.float32) for _ in range(3))
    px_per_um = 1 / spacing_um_px
    clumps = np.tanh(2.2 * smooth_noise(rng, shape, 0.42 * px_per_um) - np.float32(0.7)) + np.float32(0.4)
    grain = 0.5 * smooth_noise(rng, shape, 0.22 * px_per_um) + 0.5 * clumps
    grain = grain + 0.3 * smooth_noise(rng, shape, 1.0 * px_per_um)
    bulge = 1 + np.abs(nuclei.harmonics).sum(axis=1)  # upper bound of (size of the outline / size of the ellipse)
    size = 2 * (nuclei.long_px * bulge + nuclei.softness_px + 1)
    window = np.array(WINDOWS_PX)[np.searchsorted(WINDOWS_PX, size).clip(max=len(WINDOWS_PX) - 1)]
    painted = []
    for side in np.unique(window):
        indices = np.flatnonzero(window == side)
        for batch in np.array_split(indices, -(-len(indices) * int(side) ** 2 // BATCH_PX)):
            nucleus, pixel, stain, mask = _stain_pixels(rng, nuclei.select(batch), int(side), grain, spacing_um_px)
            rank = (len(nuclei) - batch)[nucleus].astype(np.float32)  # higher is closer to the front
            painted.append((rank, pixel, stain, mask))
            np.maximum.at(front, pixel, np.where(mask > 0.5, rank, 0))
    for rank, pixel, stain, mask in painted:
        np.maximum.at(strongest, pixel, np.where(rank >= front[pixel], stain, TRANSPARENCY * stain))
        np.maximum.at(cover, pixel, mask)
    stained, covered = strongest.reshape(shape), cover.reshape(shape)
    hematoxylin *= 1 - 0.9 * covered
    hematoxylin += stained
    eosin *= 1 - 0.2 * covered
    eosin += 0.2 * stained.clip(max=1)


def _stain_pixels(
    rng: np.random.Generator, nuclei: Nuclei, side: int, grain: Field, spacing_um_px: float
) -> tuple[NDArray[np.intp], NDArray[np.intp], Numbers, Numbers]:
    """Compute the stain of nuclei in windows of `side` × `side` pixels around the centers of the nuclei.

    `grain` (height, width) is the texture of chromatin. Returns four arrays with an entry for each pair of a nucleus
    and a pixel in the image that this nucleus stains: the index of the nucleus in `nuclei`, the index of the pixel in
    the flattened image, the concentration of hematoxylin, and the opacity of the nucleus at the pixel, from 0 to 1.
    """
    height, width = grain.shape
    corner_x = np.rint(nuclei.center.real).astype(int)[:, None, None] - side // 2
    corner_y = np.rint(nuclei.center.imag).astype(int)[:, None, None] - side // 2
    rows, columns = corner_y + np.arange(side)[:, None], corner_x + np.arange(side)  # (n, side, 1), (n, 1, side)
    n, new = len(nuclei), np.newaxis
    # Single precision from here on: it is twice as fast, and its errors are far smaller than a pixel.
    right = columns.astype(np.float32) - nuclei.center.real[:, new, new]
    down = rows.astype(np.float32) - nuclei.center.imag[:, new, new]
    offset = (right + np.complex64(1j) * down) * nuclei.direction.conj()[:, new, new]
    x = offset.real
    y = offset.imag + nuclei.bend[:, new, new] * x**2 / 2 + nuclei.wave[:, new, new] * x**3
    long, short = nuclei.long_px[:, new, new], nuclei.short_px[:, new, new]
    relative: Points = x / long + np.complex64(1j) * (y / short)  # of length 1 on the ellipse
    distance = np.abs(relative) + np.float32(1e-3)
    outline = _outline_scale(nuclei.harmonics[..., new, new], np.asarray(relative / distance, np.complex64))
    level = distance / outline  # 1 on the outline
    slope = np.sqrt((x / long**2) ** 2 + (y / short**2) ** 2) / (distance * outline) + np.float32(1e-3)
    depth_um = (1 - level) / slope * np.float32(spacing_um_px)  # approximate distance from the outline
    softness_um = nuclei.softness_px[:, new, new] * np.float32(spacing_um_px)
    mask = (depth_um / softness_um + np.float32(0.5)).clip(0, 1)
    mask *= mask * (3 - 2 * mask)

    shift = rng.integers(0, min(height, width), (2, n, 1, 1))  # so that adjacent nuclei have different chromatin
    chromatin = grain[(rows + shift[0]) % height, (columns + shift[1]) % width]
    rim_um = np.float32(0.2) + np.float32(0.4) * softness_um
    rim = (
        nuclei.rim[:, new, new]
        * (MEMBRANE_UM / rim_um)  # blur does not change the total stain of the membrane
        * (np.float32(0.75) + np.float32(0.6) * chromatin).clip(0.1)
        * np.exp(-((depth_um / rim_um - np.float32(0.6)) ** 2))
    )
    interior = (depth_um / (np.float32(0.5) + softness_um)).clip(0, 1)  # vesicular nuclei are pale up to the membrane
    inside = 1 - nuclei.pallor[:, new, new] * interior + nuclei.clumps[:, new, new] * chromatin
    for k in range(nuclei.nucleoli.shape[1]):
        position = nuclei.nucleoli[:, k]
        present = np.flatnonzero(np.abs(position) < 1)
        size = np.float32((0.85 - 0.17 * k) / spacing_um_px) ** 2  # the first nucleolus is the largest
        distance2 = (x[present] - (nuclei.long_px * position.real)[present, new, new]) ** 2
        distance2 += (y[present] - (nuclei.short_px * position.imag)[present, new, new]) ** 2
        inside[present] += np.float32(1.1) * np.exp(-((distance2 / size) ** 2))
    stain = nuclei.darkness[:, new, new] * mask * (inside.clip(0.12) + rim)

    in_image = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    is_painted = np.broadcast_to(in_image, mask.shape) & (mask > 0)
    pixel = np.broadcast_to(rows * width + columns, mask.shape)[is_painted]
    return np.nonzero(is_painted)[0], pixel, stain[is_painted], mask[is_painted]


def _outline_scale(harmonics: NDArray[np.complexfloating], unit: NDArray[np.complexfloating]) -> Numbers:
    """Return the ratio (distance from the center to the outline) / (distance from the center to the ellipse) of nuclei.

    The ellipse is the outline without irregularities. The ratio is computed for each direction in `unit`. A direction
    is a complex number of length 1, in coordinates in which the ellipse is the unit circle. The ratio is
    1 + Re Σ c_k unit^k for k = 2 to 6, limited to the range from 0.4 to 1.8. The second axis of `harmonics` contains
    the coefficients c_k.
    """
    total = np.zeros(np.broadcast_shapes(harmonics[:, 0].shape, unit.shape), np.complex64)
    for k in range(HARMONICS - 1, -1, -1):  # Horner's method
        total = (total + harmonics[:, k]) * unit
    return _float32((1 + (total * unit).real).clip(0.4, 1.8))


def _float32(numbers: NDArray[np.floating]) -> Numbers:
    return np.asarray(numbers, np.float32)
