"""Randomness in two dimensions: smooth fields, fibres along curved paths, directions, scattered points.

In: a random generator, sizes and scales in pixels. Out: arrays; positions are complex numbers, x + iy.

What tissue is painted on: concentrations of stains, and windows onto parts of them.

In: fields and places. Everything that paints does so in place, on a canvas.

The look of a case: its dyes, its light, its scanner. Concentrations of stains become an RGB image.

In: a canvas. Out: (H, W, 3) bytes, by Beer and Lambert: light falls off exponentially.

Writing data sets whole: a folder appears complete or not at all, and images carry their spacing.

In: pixels, outlines, rows of tables. Out: TIFF and PNG files, Aperio XML, CSV, and a finished folder.
"""

import io
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from scipy.spatial import cKDTree

from rotopath.data.dataset import SYNTHETIC
from rotopath.images.files import UM_PER_INCH

Field = NDArray[np.floating]  # (height, width), in single precision throughout
Points = NDArray[np.complexfloating]  # (n,), x to the right and y downwards, in pixels
Number = TypeVar("Number", bound=np.generic)

DEVIATION_AFTER_UNIT_BLUR = 0.2821  # of white noise, once a Gaussian of one pixel has gone over it
FIBRE_TILE_PX = 256


def smooth_noise(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Field:
    """A field of mean 0 and deviation 1 that changes over about `scale_px`."""
    height, width = shape
    step = max(scale_px, 1.0)  # drawn on a coarse grid, for scales above a pixel, and enlarged
    blur = min(scale_px, 1.0)
    coarse = rng.standard_normal((int(height / step) + 7, int(width / step) + 7), np.float32)
    coarse = ndimage.gaussian_filter(coarse, blur, truncate=3.0)
    coarse *= np.float32(blur / DEVIATION_AFTER_UNIT_BLUR)
    if step == 1.0:
        cut: Field = coarse[3 : 3 + height, 3 : 3 + width]
        return cut
    left, top = rng.uniform(2.5, 3.5, 2)  # the grid itself must not show
    box = (left, top, left + width / step, top + height / step)
    fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.asarray(fine, np.float32)


def fibres(rng: np.random.Generator, across_px: Field, along_px: Field, thickness_px: float, length_px: float) -> Field:
    """Noise of mean 0 and deviation 1, drawn out along the lines of equal `across_px`."""
    tile = rng.standard_normal((FIBRE_TILE_PX, FIBRE_TILE_PX), np.float32)
    tile = ndimage.gaussian_filter(tile, (1.0, 1.5), mode="wrap")
    tile /= tile.std()
    places = np.stack([across_px / np.float32(thickness_px), along_px * np.float32(1.5 / length_px)])
    drawn: Field = ndimage.map_coordinates(tile, places, order=1, mode="grid-wrap", output=np.float32)
    return drawn


def draw_directions(rng: np.random.Generator, count: int) -> Points:
    """Unit complex numbers, every direction as likely as any other."""
    drawn = rng.standard_normal(count) + 1j * rng.standard_normal(count)
    return np.asarray(drawn / np.abs(drawn), np.complex64)


def pixel_positions(shape: tuple[int, int]) -> Points:
    """Where each pixel lies, (height, width), as complex numbers."""
    rows, columns = np.indices(shape, np.float32)
    return columns + np.complex64(1j) * rows


def gradient(field: Field) -> Points:
    """The direction and rate in which the field rises, (height, width), as complex numbers."""
    down, right = np.gradient(field)
    return np.asarray(right + np.complex64(1j) * down, np.complex64)


def look_up(field: NDArray[Number], points: Points) -> NDArray[Number]:
    """The field's values at the pixels nearest to the points, which may lie a little outside."""
    rows = np.rint(points.imag).astype(int).clip(0, field.shape[0] - 1)
    columns = np.rint(points.real).astype(int).clip(0, field.shape[1] - 1)
    values: NDArray[Number] = field[rows, columns]
    return values


def scatter(rng: np.random.Generator, shape: tuple[int, int], spacing_px: float, jitter: float = 0.2) -> Points:
    """Points all over the image and a little beyond: a hexagonal lattice that is turned, bent and shaken."""
    height, width = shape
    reach = 0.75 * float(np.hypot(height, width)) + 2 * spacing_px
    rows, columns = np.mgrid[-reach : reach : spacing_px * 0.866, -reach:reach:spacing_px]
    columns[1::2] += spacing_px / 2
    lattice = (columns + 1j * rows).ravel() * draw_directions(rng, 1)[0]
    shaken = lattice + jitter * spacing_px * (
        rng.standard_normal(lattice.size) + 1j * rng.standard_normal(lattice.size)
    )
    points = np.asarray(shaken + complex(width, height) / 2, np.complex64)
    margin = spacing_px
    inside = (np.abs(points.real - width / 2) < width / 2 + margin) & (
        np.abs(points.imag - height / 2) < height / 2 + margin
    )
    kept: Points = points[inside]
    return kept


def keep_away(points: Points, others: Points, apart_px: float) -> Points:
    """The points that are at least so far from all others."""
    if not len(others):
        return points
    kept: Points = points[np.abs(points[:, None] - others).min(axis=1) >= apart_px]
    return kept


def thin_out(points: Points, apart_px: float) -> NDArray[np.intp]:
    """Positions of points that keep this distance from each other; earlier points go before later ones."""
    kept = np.ones(len(points), bool)
    if len(points):
        tree = cKDTree(np.stack([points.real, points.imag], axis=1))
        pairs = tree.query_pairs(apart_px, output_type="ndarray")  # (pairs, 2), the earlier point first
        for first, second in pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]:
            kept[second] &= not kept[first]
    return np.flatnonzero(kept)


@dataclass(frozen=True)
class StainCanvas:
    """Stain concentrations, painted on in place."""

    hematoxylin: Field
    eosin: Field
    blood: Field  # hemoglobin takes eosin up in a hue of its own
    spacing_um_px: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.hematoxylin.shape[0], self.hematoxylin.shape[1]


def clear_away(canvas: StainCanvas, share: Field) -> None:
    """Take the tissue away where `share` is 1: tears, lumens, fat."""
    kept = 1 - np.float32(0.97) * share
    for field in (canvas.hematoxylin, canvas.eosin, canvas.blood):
        np.multiply(field, kept, out=field)


@dataclass(frozen=True)
class Window:
    """A square part of the canvas around a point, cut off at the canvas's edge."""

    rows: slice
    columns: slice
    offset: Points  # of its pixels from the point, in pixels

    @classmethod
    def around(cls, canvas: StainCanvas, centre: complex, side: int) -> "Window | None":
        """None where the window lies outside."""
        height, width = canvas.shape
        top, left = round(centre.imag) - side // 2, round(centre.real) - side // 2
        rows = slice(max(top, 0), min(top + side, height))
        columns = slice(max(left, 0), min(left + side, width))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return None
        y, x = np.mgrid[rows, columns].astype(np.float32)
        return cls(rows, columns, np.asarray(x + 1j * y - centre, np.complex64))

    def view(self, field: Field) -> Field:
        """The same part of a field; writing to it writes to the field."""
        return field[self.rows, self.columns]

    def shade(self, canvas: StainCanvas, mask: Field, hematoxylin: float, eosin: float) -> None:
        """Under the mask, leave so much of the stains that are there."""
        self.view(canvas.hematoxylin)[:] *= 1 - mask * np.float32(1 - hematoxylin)
        self.view(canvas.eosin)[:] *= 1 - mask * np.float32(1 - eosin)


def ramp(field: Field) -> Field:
    """0 below 0, 1 above 1, smooth in between."""
    t = field.clip(0, 1)
    smooth: Field = t * t * (3 - 2 * t)
    return smooth


@dataclass(frozen=True)
class Scanner:
    """What cases from one scanner have in common; pairs are the lowest and the highest value."""

    hematoxylin: tuple[float, float, float]  # densities of the dye in red, green and blue
    eosin: tuple[float, float, float]
    blur_px: tuple[float, float]
    sharpening: tuple[float, float]
    grain: tuple[float, float]
    white: tuple[float, float, float] = (247, 243, 246)  # the light where no tissue is
    orange: float = 0.7  # how far the hue of blood is from that of eosin
    eosin_strength: float = 1.0


AT_40X = (
    Scanner((0.60, 0.73, 0.33), (0.17, 0.84, 0.50), (0.45, 0.8), (0.5, 1.2), (0.8, 2.2)),
    Scanner((0.62, 0.70, 0.36), (0.14, 0.88, 0.45), (0.45, 0.8), (0.5, 1.2), (0.8, 2.2)),
)
AT_10X = (  # detail is lost by reduction, not by blur: such images are crisp
    Scanner((0.62, 0.74, 0.27), (0.22, 0.95, 0.20), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (228, 226, 232), 0.2, 1.35),
    Scanner((0.55, 0.69, 0.47), (0.16, 0.82, 0.53), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (250, 246, 243), 0.4),
    Scanner((0.54, 0.70, 0.46), (0.14, 0.80, 0.56), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (250, 246, 243), 0.4),
)
ORANGE = np.array([0.04, 0.72, 0.69])  # densities of hemoglobin


@dataclass(frozen=True)
class Look:
    hematoxylin: NDArray[np.float32]  # (3,), density of a unit of stain
    eosin: NDArray[np.float32]
    blood: NDArray[np.float32]
    strengths: tuple[float, float]  # of hematoxylin and eosin
    white: NDArray[np.float32]  # (3,), the light where no tissue is
    blur_px: float
    sharpening: float  # what the scanner's software adds back
    grain: float  # deviation of the sensor's noise, in grey levels
    jpeg_quality: int


def draw_look(rng: np.random.Generator, scanners: tuple[Scanner, ...]) -> Look:
    """A case's look, around that of one of the scanners."""
    scanner = scanners[int(rng.integers(len(scanners)))]
    hematoxylin, eosin = (np.array(dye) + rng.normal(0, 0.04, 3) for dye in (scanner.hematoxylin, scanner.eosin))
    return Look(
        hematoxylin=(hematoxylin / np.linalg.norm(hematoxylin)).astype(np.float32),
        eosin=(eosin / np.linalg.norm(eosin)).astype(np.float32),
        blood=(scanner.orange * ORANGE + (1 - scanner.orange) * eosin / np.linalg.norm(eosin)).astype(np.float32),
        strengths=(float(rng.lognormal(0.1, 0.18)), float(scanner.eosin_strength * rng.lognormal(0.0, 0.2))),
        white=(np.array(scanner.white) + rng.normal(0, 3, 3)).clip(0, 254).astype(np.float32),
        blur_px=float(rng.uniform(*scanner.blur_px)),
        sharpening=float(rng.uniform(*scanner.sharpening)),
        grain=float(rng.uniform(*scanner.grain)),
        jpeg_quality=int(rng.integers(78, 93)),
    )


def develop(rng: np.random.Generator, canvas: StainCanvas, look: Look) -> NDArray[np.uint8]:
    """The image that the scanner stores of these stain concentrations, (H, W, 3)."""
    thickness = 1 + 0.06 * smooth_noise(rng, canvas.shape, 120)  # the knife is never quite even
    density = (canvas.hematoxylin.clip(0) * thickness * look.strengths[0])[..., None] * look.hematoxylin
    density += (canvas.eosin.clip(0) * thickness * look.strengths[1])[..., None] * look.eosin
    density += (canvas.blood * thickness)[..., None] * look.blood
    light = np.exp(-density)  # (H, W, 3), 1 = white
    seen = ndimage.gaussian_filter(light, (look.blur_px, look.blur_px, 0), truncate=3.0)
    veil = ndimage.gaussian_filter(seen, (1.5, 1.5, 0), truncate=2.0)
    seen = 0.985 * (seen + look.sharpening * (seen - veil)) + 0.015  # stray light: nothing is quite black
    grain = smooth_noise(rng, canvas.shape, 0.6)[..., None] * look.grain
    image = (seen * look.white + grain).clip(0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "JPEG", quality=look.jpeg_quality, subsampling=0)
    return np.array(Image.open(stored).convert("RGB"))


@contextmanager
def finished_folder(out: Path) -> Iterator[Path]:
    """A folder to write into, which becomes `out` once everything in it is written."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise FileExistsError(f"{out} exists already and is not an empty folder; choose another place, or remove it.")
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield unfinished
        (unfinished / SYNTHETIC).write_text("Tissue of no patient, made by rotopath.\n", encoding="utf-8")
        unfinished.chmod(0o755)  # mkdtemp keeps others out; a data set is for sharing
        if out.exists():
            out.rmdir()
        unfinished.rename(out)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def write_tiff(path: Path, image: NDArray[np.uint8], spacing_um_px: float) -> None:
    """An RGB TIFF that says how large its pixels are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    density = UM_PER_INCH / spacing_um_px
    Image.fromarray(image).save(path, "TIFF", compression="tiff_adobe_deflate", dpi=(density, density))


def write_labels(path: Path, labels: NDArray[np.int32]) -> None:
    """Object numbers as a grey PNG of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.astype(np.uint16)).save(path)


def write_table(path: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    """A CSV with a header; also where there are no rows. No cell may contain a comma."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_annotations(path: Path, outlines: list[NDArray[np.float64]], spacing_um_px: float) -> None:
    """Outlines (k, 2), x and y in pixels, as Aperio ImageScope stores them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        f'<Annotations MicronsPerPixel="{spacing_um_px:.6f}">',
        '<Annotation Id="1" Name="" ReadOnly="0" NameReadOnly="0" LineColorReadOnly="0" Incremental="0" Type="4"'
        ' LineColor="65280" Visible="1" Selected="1" MarkupImagePath="" MacroName="">',
        "<Regions>",
        "<RegionAttributeHeaders>",
        '<AttributeHeader Id="9999" Name="Region" ColumnWidth="-1"/>',
        "</RegionAttributeHeaders>",
    ]
    for number, vertices in enumerate(outlines, start=1):
        lines.append(
            f'<Region Id="{number}" Type="0" Zoom="1" Selected="0" ImageLocation="" ImageFocus="0" Text=""'
            f' NegativeROA="0" InputRegionId="0" Analyze="1" DisplayId="{number}">'
        )
        lines.append("<Vertices>")
        lines += [f'<Vertex X="{x:.2f}" Y="{y:.2f}" Z="0"/>' for x, y in vertices]
        lines += ["</Vertices>", "</Region>"]
    lines += ["</Regions>", "</Annotation>", "</Annotations>"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
