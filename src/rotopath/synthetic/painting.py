"""Common functions for painting synthetic tissue: noise, random points, stain concentrations, RGB images and files.

Sizes and scales are in pixels. Positions and directions are complex numbers x + iy, with x to the right and y down. An
array of the type `Field` (height, width) contains a number for each pixel.

Tissue is painted as concentrations of stains on a `StainCanvas`: painting functions change the arrays of the canvas.
`render_rgb` converts the canvas to the image that a scanner would store. The functions `write_…` write TIFF, PNG,
Aperio XML and CSV files.
"""

import io
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

from rotopath.data.dataset import SYNTHETIC_MARKER
from rotopath.images.files import UM_PER_INCH
from rotopath.writing import atomic_folder, hold_lock

Field = NDArray[np.floating]  # (height, width): a number for each pixel, in single precision
Points = NDArray[np.complexfloating]  # (n,) or (height, width): positions or directions, complex numbers x + iy
Number = TypeVar("Number", bound=np.generic)

BLURRED_NOISE_STD = 0.2821  # standard deviation of white noise after a Gaussian blur with a sigma of one pixel
FIBER_TILE_PX = 256  # side of the square of noise that `fiber_noise` repeats in both directions


# Noise


def smooth_noise(rng: np.random.Generator, shape: tuple[int, int], scale_px: float) -> Field:
    """Return random noise (height, width) with mean 0 and standard deviation 1.

    `shape` is (height, width). `scale_px` is the approximate distance in pixels over which the values change.
    """
    height, width = shape
    step = max(scale_px, 1.0)  # to save time, noise with a large scale is sampled on a coarse grid and then enlarged
    blur = min(scale_px, 1.0)
    coarse = rng.standard_normal((int(height / step) + 7, int(width / step) + 7), np.float32)
    coarse = ndimage.gaussian_filter(coarse, blur, truncate=3.0)
    coarse *= np.float32(blur / BLURRED_NOISE_STD)
    if step == 1.0:
        cropped: Field = coarse[3 : 3 + height, 3 : 3 + width]
        return cropped
    left, top = rng.uniform(2.5, 3.5, 2)  # a random offset makes the coarse grid less visible
    box = (left, top, left + width / step, top + height / step)
    fine = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC, box=box)
    return np.asarray(fine, np.float32)


def fiber_noise(
    rng: np.random.Generator, across_px: Field, along_px: Field, thickness_px: float, length_px: float
) -> Field:
    """Return noise (height, width) with mean 0 and standard deviation 1 that is stretched like fibers.

    `across_px` and `along_px` (height, width) are the coordinates of each pixel across and along the fibers, in pixels.
    `thickness_px` and `length_px` are the typical thickness and length of a fiber.
    """
    tile = rng.standard_normal((FIBER_TILE_PX, FIBER_TILE_PX), np.float32)
    tile = ndimage.gaussian_filter(tile, (1.0, 1.5), mode="wrap")
    tile /= tile.std()
    positions = np.stack([across_px / np.float32(thickness_px), along_px * np.float32(1.5 / length_px)])
    noise: Field = ndimage.map_coordinates(tile, positions, order=1, mode="grid-wrap", output=np.float32)
    return noise


def smoothstep(field: Field) -> Field:
    """Map each value of `field` smoothly to the range from 0 to 1: 0 for values below 0, and 1 for values above 1."""
    t = field.clip(0, 1)
    smooth: Field = t * t * (3 - 2 * t)
    return smooth


def gradient(field: Field) -> Points:
    """Return the gradient (height, width) of `field`: slope to the right + i · slope downwards, both per pixel."""
    down, right = np.gradient(field)
    return np.asarray(right + np.complex64(1j) * down, np.complex64)


def pixel_positions(shape: tuple[int, int]) -> Points:
    """Return an array (height, width) with the position of each pixel: x + iy for the pixel in column x and row y."""
    rows, columns = np.indices(shape, np.float32)
    return columns + np.complex64(1j) * rows


# Points


def sample_directions(rng: np.random.Generator, count: int) -> Points:
    """Sample `count` directions: complex numbers x + iy of length 1. All directions are equally likely."""
    normal = rng.standard_normal(count) + 1j * rng.standard_normal(count)
    return np.asarray(normal / np.abs(normal), np.complex64)


def scatter_points(rng: np.random.Generator, shape: tuple[int, int], spacing_px: float, jitter: float = 0.2) -> Points:
    """Return the points of a randomly rotated hexagonal lattice, each with a random displacement.

    The points are complex numbers x + iy in pixels. `spacing_px` is the distance between neighboring points of the
    lattice. The points cover an image of `shape` (height, width) and a margin around it, which is `spacing_px` wide.
    `jitter` is the standard deviation of the displacements in x and in y, divided by `spacing_px`.
    """
    height, width = shape
    radius = 0.75 * float(np.hypot(height, width)) + 2 * spacing_px
    rows, columns = np.mgrid[-radius : radius : spacing_px * 0.866, -radius:radius:spacing_px]
    columns[1::2] += spacing_px / 2
    lattice = (columns + 1j * rows).ravel() * sample_directions(rng, 1)[0]
    displaced = lattice + jitter * spacing_px * (
        rng.standard_normal(lattice.size) + 1j * rng.standard_normal(lattice.size)
    )
    points = np.asarray(displaced + complex(width, height) / 2, np.complex64)
    margin = spacing_px
    is_inside = (np.abs(points.real - width / 2) < width / 2 + margin) & (
        np.abs(points.imag - height / 2) < height / 2 + margin
    )
    inside: Points = points[is_inside]
    return inside


def values_at(field: NDArray[Number], points: Points) -> NDArray[Number]:
    """Return the values (n,) of `field` (height, width) at the pixels nearest to `points`.

    `points` (n,) are complex numbers x + iy in pixels. For a point outside the image, the nearest pixel is at the edge
    of the image.
    """
    rows = np.rint(points.imag).astype(int).clip(0, field.shape[0] - 1)
    columns = np.rint(points.real).astype(int).clip(0, field.shape[1] - 1)
    values: NDArray[Number] = field[rows, columns]
    return values


def drop_points_near(points: Points, others: Points, distance_px: float) -> Points:
    """Return `points` without the points that are closer than `distance_px` to any point in `others`.

    All points are complex numbers x + iy in pixels.
    """
    if not len(others):
        return points
    kept: Points = points[np.abs(points[:, None] - others).min(axis=1) >= distance_px]
    return kept


def select_spaced(points: Points, distance_px: float) -> NDArray[np.intp]:
    """Select points that are more than `distance_px` apart, and return their indices in ascending order.

    `points` (n,) are complex numbers x + iy in pixels. Points are selected in their order. A point is left out if an
    already selected point is at most `distance_px` away.
    """
    is_kept = np.ones(len(points), bool)
    if len(points):
        tree = cKDTree(np.stack([points.real, points.imag], axis=1))
        pairs = tree.query_pairs(distance_px, output_type="ndarray")  # (pairs, 2), the earlier point first
        for first, second in pairs[np.lexsort((pairs[:, 1], pairs[:, 0]))]:
            is_kept[second] &= not is_kept[first]
    return np.flatnonzero(is_kept)


# The canvas


@dataclass(frozen=True)
class StainCanvas:
    """Concentrations of stains at each pixel, as arrays (height, width). Painting functions change these arrays.

    Concentrations have no unit. A concentration of 1 absorbs about half of the green light.
    """

    hematoxylin: Field
    eosin: Field
    blood: Field  # hemoglobin stained by eosin; it is more orange than other tissue stained by eosin
    spacing_um_px: float

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.hematoxylin.shape[0], self.hematoxylin.shape[1]


def erase_tissue(canvas: StainCanvas, mask: Field) -> None:
    """Remove stains from the canvas, to paint tears, lumens or fat.

    `mask` (height, width) has values from 0 to 1. Where it is 0, nothing is removed; where it is 1, 97 % of each stain
    is removed.
    """
    kept = 1 - np.float32(0.97) * mask
    for field in (canvas.hematoxylin, canvas.eosin, canvas.blood):
        np.multiply(field, kept, out=field)


@dataclass(frozen=True)
class Window:
    """A square part of a canvas around a point. At the edge of the canvas, the part outside the canvas is cut off."""

    rows: slice
    columns: slice
    offset: Points  # (rows, columns): vector x + iy from the point to each pixel of the window, in pixels

    @classmethod
    def around(cls, canvas: StainCanvas, center: complex, side: int) -> "Window | None":
        """Return the window of `side` × `side` pixels around the point `center`, which is x + iy in pixels.

        Returns None if the whole window is outside the canvas.
        """
        height, width = canvas.shape
        top, left = round(center.imag) - side // 2, round(center.real) - side // 2
        rows = slice(max(top, 0), min(top + side, height))
        columns = slice(max(left, 0), min(left + side, width))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return None
        y, x = np.mgrid[rows, columns].astype(np.float32)
        return cls(rows, columns, np.asarray(x + 1j * y - center, np.complex64))

    def view(self, field: Field) -> Field:
        """Return the part of `field` (height, width) in this window, as a view: changes to it also change `field`."""
        return field[self.rows, self.columns]

    def attenuate(self, canvas: StainCanvas, mask: Field, hematoxylin: float, eosin: float) -> None:
        """Multiply hematoxylin and eosin in this window by the factors `hematoxylin` and `eosin`, where `mask` is 1.

        `mask` (rows, columns) has the size of the window and values from 0 to 1. Where it is 0, the stains do not
        change; between 0 and 1, the factors are interpolated. The concentration of blood does not change.
        """
        self.view(canvas.hematoxylin)[:] *= 1 - mask * np.float32(1 - hematoxylin)
        self.view(canvas.eosin)[:] *= 1 - mask * np.float32(1 - eosin)


# From stains to an RGB image


@dataclass(frozen=True)
class Scanner:
    """Properties of a scanner and of the stains in its laboratory. `sample_appearance` varies them at random.

    A pair of numbers is a range (lowest, highest).
    """

    hematoxylin: tuple[float, float, float]  # relative optical densities of the dye in red, green and blue
    eosin: tuple[float, float, float]  # as for hematoxylin
    blur_px: tuple[float, float]  # standard deviation of the Gaussian blur
    sharpening: tuple[float, float]  # strength of the unsharp mask (sharpening filter)
    grain: tuple[float, float]  # standard deviation of the sensor noise, in gray levels
    white: tuple[float, float, float] = (247, 243, 246)  # color (red, green, blue) where there is no tissue
    orange: float = 0.7  # hue of blood, from 0 (the hue of eosin) to 1 (the hue of HEMOGLOBIN)
    eosin_strength: float = 1.0  # factor that multiplies the concentration of eosin


# Scanners at 0.25 µm/px (40x) and at 1 µm/px (10x)
AT_40X = (
    Scanner((0.60, 0.73, 0.33), (0.17, 0.84, 0.50), (0.45, 0.8), (0.5, 1.2), (0.8, 2.2)),
    Scanner((0.62, 0.70, 0.36), (0.14, 0.88, 0.45), (0.45, 0.8), (0.5, 1.2), (0.8, 2.2)),
)
AT_10X = (  # less blur than at 40x, because downsampling makes images sharper
    Scanner((0.62, 0.74, 0.27), (0.22, 0.95, 0.20), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (228, 226, 232), 0.2, 1.35),
    Scanner((0.55, 0.69, 0.47), (0.16, 0.82, 0.53), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (250, 246, 243), 0.4),
    Scanner((0.54, 0.70, 0.46), (0.14, 0.80, 0.56), (0.25, 0.45), (0.4, 1.1), (0.5, 1.6), (250, 246, 243), 0.4),
)
HEMOGLOBIN = np.array([0.04, 0.72, 0.69])  # relative optical densities in red, green and blue


@dataclass(frozen=True)
class Appearance:
    """Colors of the stains and properties of the scanner, for all images of a case or for one image."""

    hematoxylin: NDArray[np.float32]  # (3,): optical densities in red, green and blue for a concentration of 1
    eosin: NDArray[np.float32]  # (3,), as for hematoxylin
    blood: NDArray[np.float32]  # (3,), as for hematoxylin
    strengths: tuple[float, float]  # factors that multiply the concentrations of hematoxylin and eosin
    white: NDArray[np.float32]  # (3,), color (red, green, blue) where there is no tissue, from 0 to 254
    blur_px: float  # standard deviation of the Gaussian blur
    sharpening: float  # strength of the unsharp mask (sharpening filter) of the scanner
    grain: float  # standard deviation of the sensor noise, in gray levels
    jpeg_quality: int


def sample_appearance(rng: np.random.Generator, scanners: tuple[Scanner, ...]) -> Appearance:
    """Sample an appearance: choose one of `scanners` at random, and vary its properties at random."""
    scanner = scanners[int(rng.integers(len(scanners)))]
    hematoxylin, eosin = (np.array(dye) + rng.normal(0, 0.04, 3) for dye in (scanner.hematoxylin, scanner.eosin))
    return Appearance(
        hematoxylin=(hematoxylin / np.linalg.norm(hematoxylin)).astype(np.float32),
        eosin=(eosin / np.linalg.norm(eosin)).astype(np.float32),
        blood=(scanner.orange * HEMOGLOBIN + (1 - scanner.orange) * eosin / np.linalg.norm(eosin)).astype(np.float32),
        strengths=(float(rng.lognormal(0.1, 0.18)), float(scanner.eosin_strength * rng.lognormal(0.0, 0.2))),
        white=(np.array(scanner.white) + rng.normal(0, 3, 3)).clip(0, 254).astype(np.float32),
        blur_px=float(rng.uniform(*scanner.blur_px)),
        sharpening=float(rng.uniform(*scanner.sharpening)),
        grain=float(rng.uniform(*scanner.grain)),
        jpeg_quality=int(rng.integers(78, 93)),
    )


def render_rgb(rng: np.random.Generator, canvas: StainCanvas, appearance: Appearance) -> NDArray[np.uint8]:
    """Convert a canvas to the image (H, W, 3) that a scanner would store.

    The light decreases exponentially with the concentrations (Beer-Lambert law). Then the image is blurred and
    sharpened, noise is added, and the image is compressed with JPEG.
    """
    thickness = 1 + 0.06 * smooth_noise(rng, canvas.shape, 120)  # sections have an uneven thickness
    density = (canvas.hematoxylin.clip(0) * thickness * appearance.strengths[0])[..., None] * appearance.hematoxylin
    density += (canvas.eosin.clip(0) * thickness * appearance.strengths[1])[..., None] * appearance.eosin
    density += (canvas.blood * thickness)[..., None] * appearance.blood
    light = np.exp(-density)  # (H, W, 3), 1 is white
    light = ndimage.gaussian_filter(light, (appearance.blur_px, appearance.blur_px, 0), truncate=3.0)
    blurred = ndimage.gaussian_filter(light, (1.5, 1.5, 0), truncate=2.0)
    # Because of stray light, no pixel is black.
    light = 0.985 * (light + appearance.sharpening * (light - blurred)) + 0.015
    grain = smooth_noise(rng, canvas.shape, 0.6)[..., None] * appearance.grain
    image = (light * appearance.white + grain).clip(0, 255).astype(np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(image).save(jpeg, "JPEG", quality=appearance.jpeg_quality, subsampling=0)
    return np.array(Image.open(jpeg).convert("RGB"))


# Files


@contextmanager
def new_dataset_folder(out: Path) -> Iterator[Path]:
    """Yield a temporary folder for the files of a dataset, and rename it to `out` at the end of the `with` block.

    Before the folder is renamed, a file is added that states that the tissue is synthetic. If the block raises an
    error, the temporary folder is removed. Raises FileExistsError if `out` exists and is not an empty folder.
    """
    with hold_lock(out):
        if out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise FileExistsError(
                f"{out} exists already and is not an empty folder; choose another folder, or delete {out}."
            )
        with atomic_folder(out) as unfinished:
            yield unfinished
            (unfinished / SYNTHETIC_MARKER).write_text(
                "Synthetic tissue, made by rotopath. It is not from a patient.\n", encoding="utf-8"
            )


def write_tiff(path: Path, image: NDArray[np.uint8], spacing_um_px: float) -> None:
    """Write an RGB image (H, W, 3) as a TIFF file with the pixel spacing in the resolution tags."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dots_per_inch = UM_PER_INCH / spacing_um_px
    content = io.BytesIO()
    Image.fromarray(image).save(content, "TIFF", compression="tiff_adobe_deflate", dpi=(dots_per_inch, dots_per_inch))
    path.write_bytes(content.getvalue())  # libtiff would not report that the disk is full


def write_labels(path: Path, labels: NDArray[np.int32]) -> None:
    """Write a label map as a 16-bit grayscale PNG file.

    `labels` (height, width) contains the number of the object at each pixel; 0 means no object.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(labels.astype(np.uint16)).save(path)


def write_table(path: Path, header: str, rows: Iterable[Iterable[object]]) -> None:
    """Write a CSV file from rows of values.

    `header` is the first line of the file, such as "row,column". Each of `rows` contains the values of one line. Values
    are not quoted, so they must not contain commas.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [header, *(",".join(map(str, row)) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_aperio_outlines(path: Path, outlines: list[NDArray[np.float64]], spacing_um_px: float) -> None:
    """Write outlines to an XML file in the format of Aperio ImageScope.

    Each outline is an array (k, 2) with x and y of its k vertices, in pixels.
    """
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
