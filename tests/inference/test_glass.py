"""The glass around tissue changes nothing: neither its stains, nor its nuclei, nor its area and densities."""

import tempfile
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from eyes import DarkEye
from scipy.spatial.distance import cdist

from rotopath.images import stain
from rotopath.images.geojson import SlideObject
from rotopath.images.slides import as_slide
from rotopath.images.tissue import find_tissue
from rotopath.inference.result import predict_slide
from rotopath.inference.slide_pass import MEASURED_PX, Model, PassOptions, SlidePass, SlideView
from rotopath.inference.tiling import Span
from rotopath.models.architecture import NUCLEI, TUMOR
from rotopath.tasks import PAPER

CPU = torch.device("cpu")
POINT = {"inside": 0.5, "background": 0.5, "least_px": 45}
SIDE_PX = 640  # of the tissue
TISSUE_MM2 = (SIDE_PX * 0.25e-3) ** 2
SLIDES_PX = {"measured all over": (1200, 1600), "measured in samples": (1200, 1900)}
STAINS = np.array([[0.65, 0.27], [0.70, 0.90], [0.29, 0.35]])  # hematoxylin and eosin of another laboratory
RADIUS_PX, APART_PX = 15, 160  # nuclei have 3 % of the tissue, and less than 1 % of a slide

on_glass = pytest.mark.parametrize("size_px", SLIDES_PX.values(), ids=SLIDES_PX)
everywhere_or_not = pytest.mark.parametrize("everywhere", [False, True], ids=["near tissue", "everywhere"])


class Night(DarkEye):
    """With normalised stains nuclei are darker than that, and nothing else is."""

    darkest = 0.45


class Found(NamedTuple):
    objects: list[SlideObject]
    summary: dict[str, float]
    strongest: np.ndarray


@cache
def draw_tissue() -> tuple[np.ndarray, np.ndarray]:
    """Eosin of several strengths, and round nuclei of hematoxylin that keep apart; and the middles of the nuclei."""
    random = np.random.default_rng(0)
    eosin = random.uniform(0.7, 1.1, (SIDE_PX // 8, SIDE_PX // 8)).repeat(8, 0).repeat(8, 1)
    hematoxylin = 0.05 * random.random((SIDE_PX, SIDE_PX))
    rows, columns = np.mgrid[:SIDE_PX, :SIDE_PX]
    middles = np.stack(np.meshgrid(*[np.arange(APART_PX // 2, SIDE_PX, APART_PX)] * 2), axis=-1).reshape(-1, 2)
    middles = middles + random.integers(-8, 9, middles.shape)
    for row, column in middles:
        inside = np.hypot(rows - row, columns - column) < RADIUS_PX
        hematoxylin[inside] = random.uniform(1.4, 1.6, inside.sum())
    intensity = stain.WHITE * np.exp(-np.stack([hematoxylin, eosin], axis=2) @ STAINS.T) - 1
    return intensity.clip(0, 255).round().astype(np.uint8), middles.astype(float)


def put_on_glass(image: np.ndarray, size_px: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """The image in the middle of a slide, and where its corner came to lie."""
    slide = np.full((*size_px, 3), 244, np.uint8)
    top, left = ((size - side) // 2 for size, side in zip(size_px, image.shape, strict=False))
    slide[top : top + image.shape[0], left : left + image.shape[1]] = image
    return slide, np.array([top, left])


def look_at(image: np.ndarray, everywhere: bool) -> Found:
    model = Model(PAPER["nuclei"], Night(NUCLEI), POINT, CPU)
    with (
        as_slide(image, 0.25) as slide,
        tempfile.TemporaryDirectory() as folder,
        SlidePass(model, slide, Path(folder), PassOptions(everywhere=everywhere)) as one,
    ):
        objects = list(one.objects())
        assert one.canvas.stains is not None
        return Found(objects, one.summary(), one.canvas.stains.strongest)


def middles_of(objects: list[SlideObject]) -> np.ndarray:
    corners = [np.concatenate([part.outer for part in one.shape]) for one in objects]  # type: ignore[union-attr]
    return np.array([(each.min(axis=0) + each.max(axis=0)) / 2 for each in corners])


@on_glass
@everywhere_or_not
def test_tissue_has_the_same_stains_and_nuclei_with_and_without_glass(
    size_px: tuple[int, int], everywhere: bool
) -> None:
    """Measured with the glass, hematoxylin would seem to be a fraction as strong, and become darker everywhere."""
    image, middles = draw_tissue()
    slide, corner = put_on_glass(image, size_px)
    assert (np.prod(size_px) <= MEASURED_PX) == (size_px == SLIDES_PX["measured all over"])
    tight, wide = look_at(image, everywhere), look_at(slide, everywhere)
    np.testing.assert_allclose(wide.strongest, tight.strongest, rtol=0.05)
    with_glass = stain.measure_stains(slide)
    assert with_glass is not None
    assert with_glass.strongest[0] < tight.strongest[0] / 2, "or there would be nothing to see"
    for found, shift in ((tight, np.zeros(2)), (wide, corner)):
        assert len(found.objects) == len(middles)
        assert cdist(middles + 0.5 + shift, middles_of(found.objects)).min(axis=1).max() <= 1
    areas = [sum(one.measurements["area_um2"] for one in found.objects) for found in (tight, wide)]
    assert areas[1] == pytest.approx(areas[0], rel=0.02)


@on_glass
def test_glass_between_slender_pieces_of_tissue_has_no_part_in_stains(size_px: tuple[int, int]) -> None:
    """Every sample of a slide is mostly glass, and two of four strips have nuclei."""
    image, _ = draw_tissue()
    strips = [image[:, left : left + 64] for left in (48, 128, 208, 288)]
    spread = np.full((*size_px, 3), 244, np.uint8)
    for i, strip in enumerate(strips):
        spread[280 : 280 + SIDE_PX, 100 + 400 * i : 164 + 400 * i] = strip
    strongest = []
    for pixels in (np.hstack(strips), spread):
        with as_slide(pixels, 0.25) as slide:
            stains = SlideView(slide, 0.25, "macenko", find_tissue(slide)).stains
        assert stains is not None
        strongest.append(stains.strongest)
    np.testing.assert_allclose(strongest[1], strongest[0], rtol=0.1)


@on_glass
def test_stains_do_not_depend_on_where_is_looked(size_px: tuple[int, int]) -> None:
    slide, _ = put_on_glass(draw_tissue()[0], size_px)
    near, all_over = (look_at(slide, everywhere) for everywhere in (False, True))
    np.testing.assert_array_equal(near.strongest, all_over.strongest)
    assert sorted(one.id for one in near.objects) == sorted(one.id for one in all_over.objects)


@everywhere_or_not
def test_the_area_is_that_of_tissue_and_not_of_the_slide(everywhere: bool) -> None:
    image, middles = draw_tissue()
    size_px = SLIDES_PX["measured all over"]
    told = look_at(put_on_glass(image, size_px)[0], everywhere).summary
    slide_mm2 = np.prod(size_px) * 0.25e-3**2
    assert told["tissue_mm2"] == pytest.approx(TISSUE_MM2, rel=0.15)
    assert told["tissue_mm2"] < slide_mm2 / 3
    assert told["objects"] == len(middles)
    assert told["nuclei_per_mm2"] == pytest.approx(len(middles) / told["tissue_mm2"])


@everywhere_or_not
def test_the_share_of_tumor_is_one_of_the_tissue(everywhere: bool) -> None:
    """What is dark is called tumor: all of the tissue, and none of the glass."""
    pink = np.full((320, 320, 3), (90, 40, 70), np.uint8)
    slide, _ = put_on_glass(pink, (640, 960))
    model = Model(PAPER["tumor"], Night(TUMOR), {"threshold": 0.5}, CPU)
    with as_slide(slide, 1.0) as opened:
        told = predict_slide(model, opened, PassOptions(everywhere=everywhere)).summary
    assert told["tumor_mm2"] == pytest.approx(0.32**2, rel=0.1)
    assert told["tissue_mm2"] == pytest.approx(0.32**2, rel=0.15)
    assert told["tumor_share"] == pytest.approx(told["tumor_mm2"] / told["tissue_mm2"])
    assert told["tumor_share"] > 0.8


@pytest.mark.parametrize("size_px", [(500, 500), (333, 500), (17, 90)])
@everywhere_or_not
def test_an_image_full_of_tissue_has_no_more_tissue_than_image(size_px: tuple[int, int], everywhere: bool) -> None:
    """Pixels of a mask are 8 µm wide, and 125 µm are no multiple of it."""
    image = draw_tissue()[0][: size_px[0], : size_px[1]]
    told = look_at(image, everywhere).summary
    assert told["tissue_mm2"] == pytest.approx(np.prod(size_px) * 0.25e-3**2, rel=1e-9)


@pytest.mark.parametrize("size_px", [(300, 400), (1500, 1500)])
def test_a_blank_slide_has_no_stains_to_normalise(size_px: tuple[int, int]) -> None:
    with as_slide(np.full((*size_px, 3), 244, np.uint8), 0.25) as slide:
        assert SlideView(slide, 0.25, "macenko", find_tissue(slide)).stains is None


def test_stains_are_normalised_where_a_task_asks_for_it() -> None:
    with as_slide(draw_tissue()[0], 0.25) as slide:
        tissue = find_tissue(slide)
        as_it_is, normalised = (SlideView(slide, 0.25, how, tissue) for how in ("none", "macenko"))
        rows = columns = Span(0, 64)
        np.testing.assert_array_equal(as_it_is.read(rows, columns), slide.read(0, 0, 64, 64, 0.25))
        assert as_it_is.stains is None
        assert normalised.stains is not None
        expected = normalised.stains.normalise(slide.read(0, 0, 64, 64, 0.25))
        np.testing.assert_array_equal(normalised.read(rows, columns), expected)
