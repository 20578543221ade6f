"""The look of a case: its dyes, its light, its scanner. Concentrations of stains become an RGB image.

In: a canvas. Out: (H, W, 3) bytes, by Beer and Lambert: light falls off exponentially.
"""

import io
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from rotopath.data.synthetic.canvas import Canvas
from rotopath.data.synthetic.noise import smooth_noise


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


def develop(rng: np.random.Generator, canvas: Canvas, look: Look) -> NDArray[np.uint8]:
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
