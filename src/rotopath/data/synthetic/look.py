"""The look of a case: its dyes, its light, its scanner. Concentrations of two stains become an RGB image.

In: fields of hematoxylin and eosin. Out: (H, W, 3) bytes, by Beer and Lambert: light falls off exponentially.
"""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from rotopath.data.synthetic.noise import Field, smooth_noise


@dataclass(frozen=True)
class Scanner:
    """What cases from one scanner have in common; pairs are the lowest and the highest value."""

    hematoxylin: tuple[float, float, float]  # densities of the dye in red, green and blue
    eosin: tuple[float, float, float]
    blur_px: tuple[float, float]
    sharpening: tuple[float, float]
    grain: tuple[float, float]


AT_40X = (Scanner((0.57, 0.74, 0.36), (0.18, 0.82, 0.53), (0.6, 1.0), (0.3, 0.9), (0.8, 2.2)),)
AT_10X = (  # detail is lost by reduction, not by blur: such images are crisp
    Scanner((0.58, 0.75, 0.32), (0.25, 0.94, 0.22), (0.25, 0.45), (0.0, 0.4), (1.5, 4.0)),
    Scanner((0.52, 0.69, 0.51), (0.19, 0.78, 0.60), (0.25, 0.45), (0.0, 0.4), (1.5, 4.0)),
)


@dataclass(frozen=True)
class Look:
    hematoxylin: NDArray[np.float32]  # (3,), density of a unit of stain
    eosin: NDArray[np.float32]
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
        strengths=(float(rng.lognormal(0.1, 0.18)), float(rng.lognormal(0.1, 0.32))),
        white=(np.array([247, 243, 246]) + rng.normal(0, 3, 3)).clip(0, 254).astype(np.float32),
        blur_px=float(rng.uniform(*scanner.blur_px)),
        sharpening=float(rng.uniform(*scanner.sharpening)),
        grain=float(rng.uniform(*scanner.grain)),
        jpeg_quality=int(rng.integers(78, 93)),
    )


def develop(rng: np.random.Generator, hematoxylin: Field, eosin: Field, look: Look) -> NDArray[np.uint8]:
    """The image that the scanner stores of these stain concentrations, (H, W, 3)."""
    thickness = 1 + 0.06 * smooth_noise(rng, hematoxylin.shape, 120)  # the knife is never quite even
    h = hematoxylin.clip(0) * thickness * look.strengths[0]
    e = eosin.clip(0) * thickness * look.strengths[1]
    light = np.exp(-(h[..., None] * look.hematoxylin + e[..., None] * look.eosin))  # (H, W, 3), 1 = white
    seen = ndimage.gaussian_filter(light, (look.blur_px, look.blur_px, 0), truncate=3.0)
    veil = ndimage.gaussian_filter(seen, (1.5, 1.5, 0), truncate=2.0)
    seen = 0.985 * (seen + look.sharpening * (seen - veil)) + 0.015  # stray light: nothing is quite black
    grain = smooth_noise(rng, hematoxylin.shape, 0.6)[..., None] * look.grain
    image = (seen * look.white + grain).clip(0, 255).astype(np.uint8)
    stored = io.BytesIO()
    Image.fromarray(image).save(stored, "JPEG", quality=look.jpeg_quality, subsampling=0)
    return np.array(Image.open(stored).convert("RGB"))
