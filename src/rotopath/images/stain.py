"""Normalize the hematoxylin and eosin (H&E) stain of RGB images by the method of Macenko et al. (2009).

`find_stain_doubt` recognizes images that are not H&E.

Images are (H, W, 3) of uint8. The constants are those in common use. The optical densities of the two stains add up:
the optical density (3,) of a pixel, in red, green and blue, is the matrix of stain vectors (3, 2) times the
concentrations (2,) of hematoxylin and eosin. Normalization replaces the stain vectors by those of a reference. It also
scales the concentrations of each stain, so that their highest value (a percentile over the pixels) equals that of the
reference.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Stain = Literal["none", "macenko"]  # stain normalization of images before a network reads them
WHITE = 240.0  # brightness of empty glass
MIN_DENSITY = 0.15  # pixels with a lower optical density in any channel are background
ANGLE_PERCENT = 1.0  # for each stain, this percentage of the pixels, with the most extreme colors, is ignored as noise
MAX_PERCENTILE = 99.0  # percentile of the concentrations that is used as their highest value
# Rows: red, green, blue. Columns: hematoxylin, eosin.
REFERENCE_STAINS = np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]])
REFERENCE_CONCENTRATIONS = np.array([1.9705, 1.0308])  # highest concentrations of hematoxylin and eosin
DENSITIES = -np.log((np.arange(256.0) + 1) / WHITE)  # optical density of each pixel value
# What a value of red, of green and of blue contributes to the densities of hematoxylin and eosin: 3 tables (256, 2)
STAIN_TABLES = DENSITIES[:, None] * np.linalg.pinv(REFERENCE_STAINS).T[:, None]
CHUNK = 2**14  # number of pixels that are normalized together
MIN_TISSUE_PIXELS = 100  # smallest number of pixels from which two stain vectors are estimated

# Properties by which `find_stain_doubt` recognizes images that are not H&E. They were chosen on images at 8 µm/px: the
# fields of Kumar et al. and CoNSeP, the cases of MIDOG++ and AMIDA13, groups of patches of PCam, and H&E slides of
# OpenSlide, TCGA and MoNuSAC. Up to 9 % of the pixels of these are black; of a fluorescence slide, 71 %. The colors of
# tissue are compared by its mean optical density in red, green and blue, scaled to length 1. In these images, green
# exceeds red by 0.19 or more, and blue by 0.20 or more. With the brown stain DAB, green is 0.2 below blue, and in gray
# images the three are equal.
BLACK_LEVEL = 50  # highest brightness, in the brightest channel, of a black pixel
MAX_BLACK = 0.5  # highest fraction of black pixels, unless there is bright glass or tissue beside a black border
MIN_BRIGHT = 60  # brightness, in the darkest channel, that the brightest tenth of the other pixels exceeds in H&E
MIN_GREEN_EXCESS = 0.1  # smallest difference of the optical densities of green and of red or blue in H&E
MIN_JUDGED_MM2 = 0.01  # areas below, such as patches of 96 px at 1 µm/px, may show mostly mucus, pigment or blood
MIN_STAINED = 0.2  # optical density (length of the three densities) above which a pixel is compared


def macenko(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return an image (H, W, 3) with its stains normalized to the reference stains.

    If the image has too little tissue or only one stain, it is returned unchanged, with a warning.
    """
    stains = measure_stains(image)
    if stains is None:
        warnings.warn(
            "stain normalization left an image unchanged, because it has too little stained tissue, or only one stain.",
            stacklevel=2,
        )
        return image
    return stains.normalize(image)


@dataclass(frozen=True)
class Stains:
    """Measured stains of an image: stain vector and highest concentration of hematoxylin and of eosin."""

    vectors: NDArray[np.float64]  # (3, 2), stain vectors, as in REFERENCE_STAINS; each column has length 1
    max_concentrations: NDArray[np.float64]  # (2,), percentile MAX_PERCENTILE of the concentrations

    def normalize(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return an image (H, W, 3) with these stains replaced by the reference stains.

        The concentrations are scaled, so that their highest values equal those of the reference.
        """
        # From densities to concentrations, scaled, and back to densities, in one matrix (3, 3)
        scales = REFERENCE_CONCENTRATIONS / self.max_concentrations
        to_normalized = np.linalg.pinv(self.vectors).T * scales @ REFERENCE_STAINS.T
        pixels = image.reshape(-1, 3)
        result = np.empty_like(pixels)
        for start in range(0, len(pixels), CHUNK):  # small arrays stay in the cache of the processor
            values = -optical_density(pixels[start : start + CHUNK]) @ to_normalized
            np.exp(values, out=values)
            values *= WHITE
            result[start : start + CHUNK] = np.minimum(values, 255, out=values)
        return result.reshape(image.shape)


def measure_stains(image: NDArray[np.uint8]) -> Stains | None:
    """Measure the stain vectors and the highest concentrations of hematoxylin and eosin in pixels (..., 3).

    Returns None if there is too little tissue or only one stain. The stain vectors are estimated from pixels of tissue
    only. The highest concentrations are percentiles over all pixels of `image`. Pixels of empty glass lower them, so
    leave out as much glass as possible.
    """
    density = optical_density(image).reshape(-1, 3)
    vectors = estimate_stain_vectors(density)
    if vectors is None:
        return None
    strongest = np.percentile(density @ np.linalg.pinv(vectors).T, MAX_PERCENTILE, axis=0)
    return Stains(vectors, strongest) if (strongest > 0).all() else None


def estimate_stain_vectors(density: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Estimate the stain vectors (3, 2) of hematoxylin and eosin from optical densities (pixels, 3).

    The optical density of tissue is a mixture of the two stain vectors. The densities of tissue pixels are therefore
    near a plane through the origin. The two most extreme directions of the pixels in this plane are the stain vectors.
    Returns None if fewer than `MIN_TISSUE_PIXELS` pixels are tissue, or if there is only one stain.
    """
    tissue = density[(density >= MIN_DENSITY).all(axis=1)]
    if len(tissue) < MIN_TISSUE_PIXELS:
        return None
    variances, axes = np.linalg.eigh(np.cov(tissue.T))
    if variances[1] <= 1e-10:  # the colors are on one line, or all equal: there is no second stain
        return None
    plane = axes[:, [2, 1]]
    plane *= np.where(plane.sum(axis=0) < 0, -1, 1)  # the sign of an eigenvector is arbitrary
    first, second = (tissue @ plane).T
    angles = np.angle(first + 1j * second)
    extremes = np.exp(1j * np.percentile(angles, [ANGLE_PERCENT, 100 - ANGLE_PERCENT]))
    vectors: NDArray[np.float64] = plane @ np.stack([extremes.real, extremes.imag])
    return vectors if vectors[0, 0] > vectors[0, 1] else vectors[:, ::-1]  # hematoxylin absorbs more red


def stain_densities(pixels: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the optical densities (..., 2) of hematoxylin and eosin at pixels (..., 3).

    The optical density of a pixel is divided into those of the two reference stains (`REFERENCE_STAINS`), to which
    normalized images are normalized. On other images, it is an estimate, because stains of laboratories differ.

    >>> glass, nucleus = (240, 240, 240), (90, 60, 120)
    >>> stain_densities(np.array([glass, nucleus], np.uint8)).round(1).tolist()
    [[-0.0, -0.0], [1.7, 0.1]]
    """
    red, green, blue = (np.take(table, pixels[..., i], axis=0) for i, table in enumerate(STAIN_TABLES))
    densities: NDArray[np.float64] = red + green + blue
    return densities


def find_stain_doubt(image: NDArray[np.uint8], tissue: NDArray[np.bool_], spacing_um_px: float) -> str:
    """Return how a low-resolution image of a slide differs from hematoxylin and eosin (H&E); "" if it does not.

    `image` (H, W, 3) has pixels of several µm. `tissue` (H, W) is true where there is tissue. An area of tissue, or an
    image, that is too small to be judged does not differ.
    """
    pixel_mm2 = spacing_um_px**2 / 1e6
    is_black = image.max(axis=2) <= BLACK_LEVEL
    if is_black.mean() > MAX_BLACK and is_black.size * pixel_mm2 >= MIN_JUDGED_MM2:
        darkest_channel = image[~is_black].min(axis=1)
        if not len(darkest_channel) or np.percentile(darkest_channel, 90) < MIN_BRIGHT:
            return "its background is dark, as in fluorescence"
    # Glass that is not white, for example because the mounting medium is old and yellow, also colors the tissue.
    glass = image[~tissue & (image.max(axis=2) > WHITE - BLACK_LEVEL)]
    white = np.median(glass, axis=0) if len(glass) >= MIN_TISSUE_PIXELS else WHITE
    density = np.log((white + 1) / (image[tissue & ~is_black].astype(np.float64) + 1)).clip(0)
    density = density[np.linalg.norm(density, axis=1) > MIN_STAINED]
    if len(density) * pixel_mm2 < MIN_JUDGED_MM2:
        return ""
    mean = density.mean(axis=0)
    red, green, blue = mean / np.linalg.norm(mean)
    if green - blue < MIN_GREEN_EXCESS:
        return "its tissue is brown or gray, as with DAB"
    if green - red < MIN_GREEN_EXCESS:
        return "its tissue is blue, green or gray, as without eosin"
    return ""


def optical_density(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the optical density of each pixel and channel of an image, in an array of the same shape.

    The optical density measures how much light the tissue absorbs. For a pixel value I, it is -ln((I + 1) / 240).
    """
    densities: NDArray[np.float64] = DENSITIES[image]
    return densities
