"""Stain: optical density, and Macenko's normalisation of hematoxylin and eosin.

In and out: RGB images, (H, W, 3) bytes. After Macenko et al. (2009), with the constants everyone uses.
"""

import warnings
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Stain = Literal["none", "macenko"]  # how images are stained for a network: as they are, or normalised
WHITE = 240.0  # the intensity of light that met no tissue
FAINTEST_DENSITY = 0.15  # pixels below it in any channel are background
EXTREME_PERCENT = 1.0  # of the stain directions, cut off at either end as noise
STRONGEST_PERCENTILE = 99.0  # of a stain's concentrations, mapped to the reference's
REFERENCE_STAINS = np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]])  # (rgb, hematoxylin and eosin)
REFERENCE_CONCENTRATIONS = np.array([1.9705, 1.0308])
FEWEST_TISSUE_PIXELS = 100  # of which two stain directions can be estimated


def optical_density(image: NDArray[np.uint8]) -> NDArray[np.float64]:
    """How much light each pixel swallows: -ln((I + 1) / 240), in which stains add up."""
    density: NDArray[np.float64] = -np.log((image.astype(np.float64) + 1) / WHITE)
    return density


@dataclass(frozen=True)
class Stains:
    """What was measured of a stain: unit densities of hematoxylin and eosin, and how strong they get."""

    densities: NDArray[np.float64]  # (rgb, 2)
    strongest: NDArray[np.float64]  # (2,) concentrations

    def normalise(self, image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """The image with these stains replaced by the reference's, and their strength scaled to the reference's."""
        concentrations = optical_density(image).reshape(-1, 3) @ np.linalg.pinv(self.densities).T  # (pixels, 2)
        concentrations *= REFERENCE_CONCENTRATIONS / self.strongest
        normalised: NDArray[np.float64] = WHITE * np.exp(-concentrations @ REFERENCE_STAINS.T)
        return normalised.clip(0, 255).astype(np.uint8).reshape(image.shape)


def measure_stains(image: NDArray[np.uint8]) -> Stains | None:
    """The stains of an image, or of pixels (..., 3) of a slide's tissue; none where there are no two of them.

    Glass among the pixels would lower the percentile, and make the same tissue look stronger than it is.
    """
    density = optical_density(image).reshape(-1, 3)
    densities = estimate_stains(density)
    if densities is None:
        return None
    strongest = np.percentile(density @ np.linalg.pinv(densities).T, STRONGEST_PERCENTILE, axis=0)
    return Stains(densities, strongest) if (strongest > 0).all() else None


def macenko(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The image with its two stains replaced by the reference's, and their strength scaled to the reference's.

    An image with too little tissue to tell two stains apart comes back as it is, with a warning.
    """
    stains = measure_stains(image)
    if stains is None:
        warnings.warn(
            "stain normalisation left an image unchanged: too little stained tissue in it, or one stain only.",
            stacklevel=2,
        )
        return image
    return stains.normalise(image)


def estimate_stains(density: NDArray[np.float64]) -> NDArray[np.float64] | None:
    """Unit densities of hematoxylin and eosin, (3, 2), from the optical densities (pixels, 3) of an image.

    Tissue lies near the plane that two stains span; the outermost directions within it are the stains. None where
    there is no such plane.
    """
    tissue = density[(density >= FAINTEST_DENSITY).all(axis=1)]
    if len(tissue) < FEWEST_TISSUE_PIXELS:
        return None
    variances, axes = np.linalg.eigh(np.cov(tissue.T))
    if variances[1] <= 1e-10:  # all pixels on one line, or one colour: no second stain
        return None
    plane = axes[:, [2, 1]]
    plane *= np.where(plane.sum(axis=0) < 0, -1, 1)  # the sign of an eigenvector is arbitrary
    along, across = (tissue @ plane).T
    directions = np.angle(along + 1j * across)
    extremes = np.exp(1j * np.percentile(directions, [EXTREME_PERCENT, 100 - EXTREME_PERCENT]))
    stains: NDArray[np.float64] = plane @ np.stack([extremes.real, extremes.imag])
    return stains if stains[0, 0] > stains[0, 1] else stains[:, ::-1]  # hematoxylin swallows more red
