"""Macenko normalization agrees with an independent implementation and leaves images without two stains unchanged."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rotopath.images import stain


def stained(stains: np.ndarray, strength: tuple[float, float], seed: int = 0, side: int = 64) -> np.ndarray:
    """Tissue with random concentrations of both stains at each pixel."""
    random = np.random.default_rng(seed)
    concentrations = random.beta(0.6, 1.2, size=(side * side, 2)) * strength
    intensity = stain.WHITE * np.exp(-concentrations @ stains.T) - 1
    return intensity.clip(0, 255).round().astype(np.uint8).reshape(side, side, 3)


def macenko_step_by_step(image: np.ndarray) -> np.ndarray:
    """The published method as it is usually written, with other eigenvectors, arc tangents and least squares."""
    density = -np.log((image.reshape(-1, 3).astype(float) + 1) / 240)
    tissue = density[~np.any(density < 0.15, axis=1)]
    _, vectors = np.linalg.eigh(np.cov(tissue.T))
    vectors = vectors[:, 1:3]
    vectors = vectors * np.sign(vectors.sum(axis=0))
    projected = tissue @ vectors
    phi = np.arctan2(projected[:, 0], projected[:, 1])
    low, high = np.percentile(phi, 1), np.percentile(phi, 99)
    first = vectors @ np.array([np.sin(low), np.cos(low)])
    second = vectors @ np.array([np.sin(high), np.cos(high)])
    he = np.array([first, second]).T if first[0] > second[0] else np.array([second, first]).T
    concentrations = np.linalg.lstsq(he, density.T, rcond=None)[0]
    strongest = np.array([np.percentile(concentrations[0], 99), np.percentile(concentrations[1], 99)])
    concentrations = concentrations / (strongest / np.array([1.9705, 1.0308]))[:, None]
    reference = np.array([[0.5626, 0.2159], [0.7201, 0.8012], [0.4062, 0.5581]])
    normalized = 240 * np.exp(-reference @ concentrations)
    return np.clip(normalized, 0, 255).T.reshape(image.shape).astype(np.uint8)


OTHER_STAINS = np.array([[0.65, 0.07], [0.70, 0.99], [0.29, 0.11]])


@pytest.mark.parametrize("seed", range(3))
def test_agrees_with_the_published_method_step_by_step(seed: int) -> None:
    image = stained(OTHER_STAINS, (1.5, 0.9), seed)
    difference = stain.macenko(image).astype(int) - macenko_step_by_step(image)
    assert np.abs(difference).max() <= 1


def test_images_of_the_same_tissue_from_two_scanners_become_similar() -> None:
    """The same concentrations with two pairs of stain vectors and strengths."""
    first, second = stained(OTHER_STAINS, (1.6, 1.0)), stained(stain.REFERENCE_STAINS, (1.2, 0.7))
    before = np.abs(first.astype(int) - second).mean()
    after = np.abs(stain.macenko(first).astype(int) - stain.macenko(second)).mean()
    assert after < before / 2


def test_known_stain_vectors_are_estimated() -> None:
    density = stain.optical_density(stained(OTHER_STAINS, (1.6, 1.2), side=128)).reshape(-1, 3)
    vectors = stain.estimate_stain_vectors(density)
    expected = OTHER_STAINS / np.linalg.norm(OTHER_STAINS, axis=0)
    assert vectors is not None
    cosines = (vectors * expected).sum(axis=0)
    assert (cosines > 0.98).all()


@pytest.mark.parametrize(
    "image",
    [
        np.full((32, 32, 3), 255, np.uint8),
        np.full((32, 32, 3), 243, np.uint8),
        np.zeros((32, 32, 3), np.uint8),
        np.full((32, 32, 3), (120, 60, 110), np.uint8),
        np.repeat(np.linspace(0, 255, 32 * 32).astype(np.uint8).reshape(32, 32, 1), 3, axis=2),
        np.zeros((0, 0, 3), np.uint8),
    ],
    ids=["white", "nearly white", "black", "one color", "gray", "empty"],
)
def test_images_without_two_stains_are_unchanged_with_a_warning(image: np.ndarray) -> None:
    with pytest.warns(UserWarning, match="stain normalization left an image unchanged"):
        assert np.array_equal(stain.macenko(image), image)


def test_a_speck_of_tissue_on_white_is_too_little() -> None:
    image = np.full((64, 64, 3), 250, np.uint8)
    image[:5, :5] = stained(OTHER_STAINS, (1.5, 0.9), side=5)
    with pytest.warns(UserWarning, match="too little stained tissue"):
        assert np.array_equal(stain.macenko(image), image)


@given(st.integers(0, 10_000), st.floats(0.0, 3.0), st.floats(0.0, 3.0))
@settings(deadline=None, max_examples=30)
@pytest.mark.filterwarnings("ignore:stain normalization left")
def test_any_strength_of_stains_is_normalized(seed: int, hematoxylin: float, eosin: float) -> None:
    image = stained(OTHER_STAINS, (hematoxylin, eosin), seed, side=24)
    normalized = stain.macenko(image)
    assert normalized.shape == image.shape
    assert normalized.dtype == np.uint8


def test_densities_of_mixed_stains_are_their_concentrations() -> None:
    concentrations = np.random.default_rng(0).uniform(0, 0.9, (40, 50, 2))
    intensity = stain.WHITE * np.exp(-concentrations @ stain.REFERENCE_STAINS.T) - 1
    densities = stain.stain_densities(intensity.round().astype(np.uint8))
    assert densities.shape == (40, 50, 2)
    assert np.abs(densities - concentrations).max() < 0.03, "gray levels are rounded"
    assert abs(densities - concentrations).mean() < 0.005


def test_densities_follow_the_formula() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (7, 3), dtype=np.uint8)
    expected = np.linalg.lstsq(stain.REFERENCE_STAINS, stain.optical_density(pixels).T, rcond=None)[0].T
    np.testing.assert_allclose(stain.stain_densities(pixels), expected, atol=1e-12)
