"""Normalize the hematoxylin and eosin (H&E) stain of RGB images by the method of Macenko et al. (2009).

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
CHUNK = 2**14  # number of pixels that are normalized together
MIN_TISSUE_PIXELS = 100  # smallest number of pixels from which two stain vectors are estimated


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
    densities: NDArray[np.float64] = optical_density(pixels) @ np.linalg.pinv(REFERENCE_STAINS).T
    return densities


def optical_density(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the optical density of each pixel and channel of an image, in an array of the same shape.

    The optical density measures how much light the tissue absorbs. For a pixel value I, it is -ln((I + 1) / 240).
    """
    densities: NDArray[np.float64] = DENSITIES[image]
    return densities
