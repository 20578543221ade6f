"""Passes over slides: objects do not depend on the tiles, are at the right positions, and glass changes nothing."""

import csv
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from drawn_slides import MARK_PX, draw_slide
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage
from scipy.spatial.distance import cdist
from stub_networks import DarkRegionNetwork
from torch import nn

import rotopath as rp
from rotopath import tasks
from rotopath.data import DataError
from rotopath.images import stain
from rotopath.images.drawing import WARNING_INK
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import Point, Polygon, fill_outline, make_polygon, measure_objects
from rotopath.images.slides import Slide, as_slide, open_slide
from rotopath.images.tissue import Region, find_tissue
from rotopath.inference import predict
from rotopath.inference import slide_pass as slide_pass_module
from rotopath.inference.dense import MixedNetwork
from rotopath.inference.slide_pass import (
    MEASURED_PX,
    Model,
    PassOptions,
    SlidePass,
    SlideView,
    Stopwatch,
    predict_slide,
)
from rotopath.inference.tiling import Span
from rotopath.metrics import smooth_images
from rotopath.model_file import ModelInfo, NetworkInfo
from rotopath.models import make_dense
from rotopath.models.architecture import ARCHITECTURES, MITOSIS, NUCLEI, TUMOR
from rotopath.models.network import Network
from rotopath.runs import Run
from rotopath.tasks import PAPER, Class, Classify, Overrides, make_task

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # tracing them would take minutes

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
POINT = {"inside": 0.5, "background": 0.5, "least_px": 45}
SPACING = {name: task.spacing_um_px for name, task in PAPER.items()}
SIDE_PX = 640  # of the tissue
TISSUE_MM2 = (SIDE_PX * 0.25e-3) ** 2
SLIDES_PX = {"measured all over": (1200, 1600), "measured in samples": (1200, 1900)}
STAINS = np.array([[0.65, 0.27], [0.70, 0.90], [0.29, 0.35]])  # hematoxylin and eosin of another laboratory
RADIUS_PX, APART_PX = 15, 160  # nuclei cover 3 % of the tissue, and less than 1 % of a slide

on_glass = pytest.mark.parametrize("size_px", SLIDES_PX.values(), ids=SLIDES_PX)
everywhere_or_not = pytest.mark.parametrize("everywhere", [False, True], ids=["near tissue", "everywhere"])


def untrained(task: str, orientations: int = 1) -> Network:
    """Return a network in float64, so that rounding in tiles does not move a value across a threshold."""
    torch.manual_seed(3)
    network = Network(ARCHITECTURES[task], orientations).double().eval()
    with torch.no_grad():
        network.head[0].weight.mul_(8)
    return network


def textured(height: int, width: int, seed: int) -> np.ndarray:
    smooth = smooth_images(1, max(height, width), blur_px=2.5, seed=seed)[0, :, :height, :width]
    return (smooth * 45 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()


def choose_point(task: str, network: Network, image: np.ndarray) -> dict[str, float]:
    """Return thresholds between the predictions of the network, so that there are objects to find."""
    maps = predict(network, image, CPU).probabilities
    if task == "nuclei":
        inside, _, background = (
            float(np.quantile(probabilities, q)) for probabilities, q in zip(maps, (0.6, 0.5, 0.5), strict=True)
        )
        return {"inside": inside, "background": background, "least_fraction": 0.5, "least_px": 10**6}
    return {"threshold": float(np.quantile(maps, 0.6))}


def predict_objects(
    task: str, network: Network, point: dict[str, float], slide: Slide, **options: int
) -> tuple[list[SlideObject], np.ndarray, np.ndarray | None]:
    model = Model(PAPER[task], network, point, CPU)
    chosen = PassOptions(everywhere=True, **options)  # type: ignore[arg-type]
    with SlidePass(model, slide, chosen) as slide_pass:
        objects = list(slide_pass.objects())
        deviation = None if slide_pass.deviation is None else slide_pass.deviation.read()
        return objects, slide_pass.heat.read(), deviation


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
@settings(max_examples=6, deadline=None)
@given(height=st.integers(5, 190), width=st.integers(5, 190), tile_px=st.integers(100, 260), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:stain normalization left")
def test_objects_do_not_depend_on_the_tiles(task: str, height: int, width: int, tile_px: int, seed: int) -> None:
    network, image = untrained(task), textured(height, width, seed)
    point = choose_point(task, network, image)
    with as_slide(image, SPACING[task]) as slide:
        whole, heat, _ = predict_objects(task, network, point, slide, tile_px=4096)
        tiled, tiled_heat, _ = predict_objects(task, network, point, slide, tile_px=tile_px)
    assert sorted(nucleus.id for nucleus in whole) == sorted(nucleus.id for nucleus in tiled)
    measurements = {nucleus.id: nucleus.measurements for nucleus in tiled}
    for nucleus in whole:
        assert nucleus.measurements == pytest.approx(measurements[nucleus.id], abs=1e-6)
    np.testing.assert_allclose(heat, tiled_heat, atol=1e-6)


@pytest.mark.filterwarnings("ignore:stain normalization left")
@pytest.mark.parametrize("tile_px", [100, 4096])
def test_nuclei_are_those_of_the_whole_image(tile_px: int) -> None:
    """Their pixels in the label map, their order, their outlines, and what is measured on them."""
    network, image = untrained("nuclei"), textured(150, 170, 1)
    point = choose_point("nuclei", network, image)
    model, options = Model(PAPER["nuclei"], network, point, CPU), PassOptions(everywhere=True, tile_px=tile_px)
    with as_slide(image, 0.25) as slide, SlidePass(model, slide, options) as slide_pass:
        assert (len(slide_pass.grid.tiles) > 3) == (tile_px == 100)
        objects = list(slide_pass.objects())
        pixels = slide_pass.view.read(Span(0, 150), Span(0, 170))  # with normalized stains, if there are any
        assert slide_pass.labels is not None
        found = slide_pass.labels.read()
        assert slide_pass.labels_um_px == 0.25
    prediction = predict(network, pixels, CPU)
    labels = rp.tasks.NUCLEI.decode(prediction, point)
    assert labels.max() == len(objects) > 5
    pairs = np.unique(np.stack([labels, found.astype(int)], axis=-1).reshape(-1, 2), axis=0)
    assert len(pairs) == labels.max() + 1, "the same pixels belong to the same object"
    foreground = rp.tasks.NUCLEI.foreground_map(prediction.probabilities)
    expected = measure_objects(labels, foreground, None, pixels.transpose(2, 0, 1), 0.25)
    for number, (truth, shown) in enumerate(pairs.tolist()):
        if number == 0:
            assert (truth, shown) == (0, 0)
            continue
        nucleus = objects[shown - 1]
        assert nucleus.measurements == pytest.approx({name: values[truth - 1] for name, values in expected.items()})
        filled = fill_outline(nucleus.shape, (150, 170))  # type: ignore[arg-type]
        pixels_of_it = ndimage.binary_fill_holes(labels == truth)
        assert (filled & pixels_of_it).sum() / (filled | pixels_of_it).sum() > 0.6, "a small object may become rounder"


def test_mitoses_are_those_of_the_whole_image() -> None:
    network, image = untrained("mitosis"), textured(180, 230, 2)
    point = choose_point("mitosis", network, image)
    with as_slide(image, 0.25) as slide:
        objects, _, _ = predict_objects("mitosis", network, point, slide, tile_px=100)
    expected = rp.tasks.MITOSIS.decode(predict(network, image, CPU), point)
    assert len(expected.positions) > 3
    points = [mitosis.shape for mitosis in objects if isinstance(mitosis.shape, Point)]
    positions = sorted((point.row - 0.5, point.column - 0.5) for point in points)
    np.testing.assert_allclose(positions, sorted(map(tuple, expected.positions.tolist())), atol=1e-6)


@pytest.mark.parametrize("spacing", [0.25, 0.2, 0.3])
def test_objects_are_at_the_positions_of_what_they_mark(tmp_path: Path, spacing: float) -> None:
    """Dark marks on a drawn slide, whose pixels are smaller or larger than those of the network."""
    drawn = draw_slide(tmp_path / "slide.tif", (900, 1100), ((64, 64, 420), (450, 600, 440)), spacing_um_px=spacing)
    marks = np.array(drawn.marks)
    with open_slide(drawn.path) as slide:
        nuclei, _, _ = predict_objects("nuclei", DarkRegionNetwork(NUCLEI), POINT, slide, tile_px=300)
        mitoses, _, _ = predict_objects("mitosis", DarkRegionNetwork(MITOSIS), {"threshold": 0.05}, slide, tile_px=300)
    centers = np.array([find_center(nucleus) for nucleus in nuclei if is_a_mark(nucleus, spacing)])
    assert len(centers) == len(marks)
    assert cdist(marks, centers).min(axis=1).max() <= 1, "within a pixel of level 0"
    points = np.array([mitosis.shape for mitosis in mitoses])
    assert len(points) == len(marks)
    assert cdist(marks, points).min(axis=1).max() < 8 * 0.25 / spacing, "as exact as a stride of 8 px allows"


def is_a_mark(nucleus: SlideObject, spacing_um_px: float) -> bool:
    """Whether an object is as large as a mark. Normalized stains make some grains of a drawn slide as dark as marks."""
    return abs(nucleus.measurements["area_um2"] / (MARK_PX * spacing_um_px) ** 2 - 1) < 0.2


def find_center(nucleus: SlideObject) -> np.ndarray:
    """Return the center (row, column) of the bounding box."""
    corners = np.concatenate([polygon.outer for polygon in nucleus.shape])  # type: ignore[union-attr]
    center: np.ndarray = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return center


@pytest.mark.filterwarnings("ignore:stain normalization left")
def test_the_deviation_over_rotations_is_rounding_for_an_equivariant_network() -> None:
    image = textured(120, 130, 4)
    deviations = {}
    for orientations in (1, 4):
        network = untrained("mitosis", orientations)
        point = choose_point("mitosis", network, image)
        with as_slide(image, 0.25) as slide:
            objects, heat, deviation = predict_objects("mitosis", network, point, slide, tile_px=120, rotations=4)
        assert deviation is not None
        assert deviation.shape == heat.shape
        deviations[orientations] = deviation.max()
        assert objects
        assert all("deviation" in mitosis.measurements for mitosis in objects)
    assert deviations[4] < 1e-6
    assert deviations[1] > 1e-3


def test_glass_is_skipped(tmp_path: Path) -> None:
    drawn = draw_slide(tmp_path / "slide.tif", (900, 1100), ((64, 64, 420),))
    network = DarkRegionNetwork(NUCLEI)
    with (
        open_slide(drawn.path) as slide,
        SlidePass(Model(PAPER["nuclei"], network, POINT, CPU), slide, PassOptions(tile_px=200)) as slide_pass,
    ):
        assert len([nucleus for nucleus in slide_pass.objects() if is_a_mark(nucleus, 0.25)]) == 5
        assert 0 < len(network.input_sizes) < len(slide_pass.grid.tiles) / 2


@pytest.mark.filterwarnings("ignore:stain normalization left")
@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_the_summary_counts_all_objects(task: str) -> None:
    network, image = untrained(task), textured(180, 230, 2)
    model = Model(PAPER[task], network, choose_point(task, network, image), CPU)
    chosen = PassOptions(everywhere=True, tile_px=100)
    with as_slide(image, SPACING[task]) as slide, SlidePass(model, slide, chosen) as slide_pass:
        objects = list(slide_pass.objects())
        summary = slide_pass.summary()
    assert summary["objects"] == len(objects) > 1
    assert summary["tissue_mm2"] == slide_pass.tissue.area_mm2 > 0
    if task == "tumor":
        area_mm2 = sum(region.measurements["area_mm2"] for region in objects)
        assert summary["tumor_mm2"] == pytest.approx(area_mm2)
        assert summary["tumor_share"] == pytest.approx(area_mm2 / summary["tissue_mm2"])
        assert 0 < summary["tumor_share"] < 1
    else:
        name = {"mitosis": "mitoses", "nuclei": "nuclei"}[task]
        assert summary[f"{name}_per_mm2"] == pytest.approx(len(objects) / summary["tissue_mm2"])


def test_the_most_likely_of_several_classes_wins_everywhere() -> None:
    """The network predicts which of three colors a pixel has: two blue regions on red, one with a green hole."""
    classes = ("red", "green", "blue")
    task = Classify("colors", tuple(Class(name, (i, i, i)) for i, name in enumerate(classes)), spacing_um_px=1.0)
    module = nn.Conv2d(3, 3, 1, bias=False)
    with torch.no_grad():
        module.weight.copy_(30 * torch.eye(3)[..., None, None])
    truth = np.zeros((60, 90), int)
    truth[10:30, 20:40], truth[40:50, 60:80], truth[15:20, 25:35] = 2, 2, 1
    image = (150 + 60 * np.eye(3)[truth]).astype(np.uint8)
    model = Model(task, make_dense(module.eval(), 3, 8), {}, CPU)
    chosen = PassOptions(everywhere=True, tile_px=32, rotations=4)
    with as_slide(image, 1.0) as slide, SlidePass(model, slide, chosen) as slide_pass:
        objects = list(slide_pass.objects())
        assert slide_pass.winner is not None
        np.testing.assert_array_equal(slide_pass.winner.read(), truth)
        assert slide_pass.heat.read().min() > 0.99
        summary = slide_pass.summary()
    assert sorted(region.class_name for region in objects) == ["blue", "blue", "green", "red"]
    for number, name in enumerate(classes):
        regions = [region for region in objects if region.class_name == name]
        assert sum(region.measurements["area_mm2"] for region in regions) == pytest.approx(
            (truth == number).sum() / 1e6
        )
        assert summary[f"{name}_mm2"] == pytest.approx((truth == number).sum() / 1e6)
        assert {region.color for region in regions} == {(number, number, number)}


def test_the_area_of_tumor_is_that_of_its_tissue() -> None:
    """Where all is tumor, it is as much as the tissue, although 12 µm outputs cover glass and reach off the slide."""
    model = Model(PAPER["tumor"], untrained("tumor").float(), {"threshold": 0.0}, CPU)
    image = np.full((310, 403, 3), 244, np.uint8)
    image[60:211, 100:333] = textured(151, 233, 3) // 2 + (100, 40, 80)
    for pixels in (image, image[60:211, 100:333]):
        with as_slide(pixels, 1.0) as slide:
            result = predict_slide(model, slide, PassOptions())
        summary = result.summary
        (region,) = result.objects
        assert summary["tumor_mm2"] == pytest.approx(summary["tissue_mm2"], rel=1e-6 if pixels is image else 0.05)
        assert summary["tumor_mm2"] == pytest.approx(151 * 233 / 1e6, rel=0.1 if pixels is image else 0.05)
        assert region.measurements["area_mm2"] == summary["tumor_mm2"]
        top, left, bottom, right = region.bounds_px
        assert top >= 0
        assert left >= 0
        assert bottom <= pixels.shape[0]
        assert right <= pixels.shape[1]
        (polygon,) = region.shape  # type: ignore[misc]
        assert (polygon.area_px / 1e6 > 1.2 * summary["tumor_mm2"]) == (pixels is image)


def test_the_region_of_interest_is_drawn() -> None:
    model = Model(PAPER["tumor"], untrained("tumor").float(), {"threshold": 1.0}, CPU)
    boxes = [Polygon(np.array(box, float)) for box in ([(50, 60), (50, 300), (250, 300), (250, 60)],)]
    hole = Polygon(np.array([(100, 100), (100, 150), (150, 150), (150, 100)], float))
    region = Region((tuple(boxes),), ((hole,),))
    with (
        as_slide(textured(300, 480, 1), 1.0) as slide,
        SlidePass(model, slide, PassOptions(everywhere=True, region=region)) as slide_pass,
    ):
        objects = list(slide_pass.objects())
        pages = [slide_pass.draw_overlay(objects), slide_pass.draw_quality()]
    for page in pages:
        pixels = np.asarray(page)
        top = len(pixels) - 300 - 2 * 12 - 22
        for color, corner, last in (((20, 20, 20), (50, 60), (250, 300)), ((130, 130, 130), (100, 100), (150, 150))):
            rows, columns = np.nonzero((pixels[top : top + 300] == color).all(axis=2))
            assert np.abs(np.subtract((rows.min(), columns.min()), corner)).max() <= 2
            assert np.abs(np.subtract((rows.max(), columns.max()), last)).max() <= 2


def test_a_run_predicts_an_array_in_memory(tmp_path: Path) -> None:
    image = textured(100, 120, 5)
    network = rp.models.tumor(4).eval()
    info = NetworkInfo("tumor", 4, {}, 88, network.geometry)
    run = Run(tmp_path, ModelInfo(PAPER["tumor"], info, {"threshold": 0.5}, None), network)
    result = run.predict(image, spacing_um_px=1.0, everywhere=True)
    assert result.map.shape == (9, 10)
    overlay = result.show()
    assert overlay.width >= 120
    assert overlay.height > 100, "there is a caption above the image"
    result.to_geojson(tmp_path / "out.geojson")
    assert "FeatureCollection" in (tmp_path / "out.geojson").read_text()
    assert "tumor" in repr(result)
    with pytest.raises(ValueError, match="spacing_um_px"):
        run.predict(image)
    with pytest.raises(ValueError, match=r"image \(H, W, 3\) of uint8"):
        run.predict(image.astype(float), spacing_um_px=1.0)


def test_results_in_memory_are_tables_and_label_maps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, _ = draw_tissue()
    model = Model(PAPER["nuclei"], DarkerRegionNetwork(NUCLEI), POINT, CPU)
    with as_slide(pixels, 0.25) as slide:
        result = predict_slide(model, slide, PassOptions())
        monkeypatch.setattr(slide_pass_module, "MAX_LABELS_PX", SIDE_PX**2 - 1)
        assert predict_slide(model, slide, PassOptions()).labels is None
    assert result.labels is not None
    assert result.labels.dtype == np.uint32
    assert result.labels.shape == (SIDE_PX, SIDE_PX)
    areas = np.bincount(result.labels.ravel())[1:] * 0.25**2
    assert areas.tolist() == pytest.approx([nucleus.measurements["area_um2"] for nucleus in result.objects], abs=1e-4)
    result.to_csv(tmp_path / "a.csv")
    with (tmp_path / "a.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["number"]) for row in rows] == list(range(1, len(result.objects) + 1))
    for row in rows:
        y, x = np.argwhere(result.labels == int(row["number"])).mean(axis=0) + 0.5
        assert (float(row["x_px"]), float(row["y_px"])) == pytest.approx((x, y), abs=1.5)
    densities = [nucleus.measurements["hematoxylin_mean"] for nucleus in result.objects]
    assert min(densities) > 1.5, "nuclei were drawn in hematoxylin, which is normalized to a maximum of 1.97"
    assert max(nucleus.measurements["eosin_mean"] for nucleus in result.objects) < 0.4


class ColorFeatures(nn.Module):
    """Predicts an object where a pixel is dark, by a last layer whose input are the color and the darkness."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.head = nn.Conv2d(4, outputs, 1)
        with torch.no_grad():
            self.head.weight.zero_()
            self.head.weight[:, 3, 0, 0] = torch.tensor([9.0, 0, -9][:outputs])
            self.head.bias.zero_()  # type: ignore[union-attr]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype == torch.uint8:
            x = x.float() / 255
        return self.head(torch.cat([x, 0.6 - x.mean(dim=1, keepdim=True)], dim=1))


@pytest.mark.parametrize("tile_px", [4096, 100])
def test_the_embedding_is_the_mean_of_the_features_over_each_object(tile_px: int) -> None:
    """For objects with a label map; some cross the borders of tiles."""
    rng = np.random.default_rng(1)
    image = rng.integers(200, 256, (150, 230, 3), dtype=np.uint8)
    for top, left in ((10, 10), (88, 92), (60, 180), (120, 30)):
        image[top : top + 20, left : left + 25] = rng.integers(0, 90, (20, 25, 3))
    network = make_dense(ColorFeatures(3).eval(), 3, 8)
    task = replace(PAPER["nuclei"], stain="none")
    options = PassOptions(everywhere=True, tile_px=tile_px, embedding=True)
    with as_slide(image, 0.25) as slide:
        result = predict_slide(Model(task, network, POINT, CPU), slide, options)
    assert result.labels is not None
    assert result.embedding is not None
    assert len(result.objects) == 4
    for number, embedding in enumerate(result.embedding, 1):
        color = image[result.labels == number].mean(axis=0) / 255
        np.testing.assert_allclose(embedding, [*color, 0.6 - color.mean()], atol=1e-5)


def test_the_embedding_of_points_and_regions_is_that_of_their_outputs() -> None:
    image = np.full((96, 160, 3), 230, np.uint8)
    image[16:48, 24:72] = (90, 40, 120)
    image[64:88, 104:136] = (20, 60, 10)
    task = Classify("dark", (Class("dark", (0, 0, 0)),), spacing_um_px=1.0)
    options = PassOptions(everywhere=True, tile_px=40, embedding=True)
    network = make_dense(ColorFeatures(1).eval(), 1, 8)
    with as_slide(image, 1.0) as slide:
        result = predict_slide(Model(task, network, {"threshold": 0.55}, CPU), slide, options)
    assert result.embedding is not None
    np.testing.assert_allclose(result.embedding[:, :3] * 255, [(90, 40, 120), (20, 60, 10)], atol=1e-3)
    point = rp.load("mitosis-amida13-n8")
    pixels, _ = draw_tissue()
    found = point.predict(pixels[:420, :420], 0.25, device="cpu", threshold=0.01, everywhere=True, embedding=True)
    assert found.embedding is not None
    assert found.embedding.shape == (len(found.objects), 16)
    assert len(found.objects) > 3
    with torch.no_grad():
        for item, embedding in zip(found.objects, found.embedding, strict=True):
            score = point.network.head(torch.from_numpy(embedding)[None, :, None, None]).sigmoid()  # type: ignore[operator]
            assert abs(float(score) - item.measurements["score"]) < 0.4, "the score is that of a smoothed map"


@pytest.mark.parametrize("tile_px", [16, 48, 4096])
def test_objects_may_share_outputs_of_the_embedding(tile_px: int) -> None:
    """Two points at one output, and outlines across the borders of tiles, one of which is inside of the other."""
    image = np.random.default_rng(0).integers(0, 256, (96, 120, 3), dtype=np.uint8)
    task = Classify("dark", (Class("dark", (0, 0, 0)),), spacing_um_px=1.0)
    model = Model(task, make_dense(ColorFeatures(1).eval(), 1, 8), {"threshold": 0.5}, CPU)
    square = make_polygon(np.array([(10, 20), (10, 80), (70, 80), (70, 20)]))
    with_hole = make_polygon(square.outer, [np.array([(20, 30), (20, 70), (60, 70), (60, 30)])])
    shapes = [Point(40.2, 50.1), (with_hole,), Point(40.4, 50.3), Point(-3, 500), (square,)]
    with as_slide(image, 1.0) as slide:
        options = PassOptions(everywhere=True, tile_px=tile_px, embedding=True)
        with SlidePass(model, slide, options) as slide_pass:
            found = slide_pass.embed(shapes)
    mask = np.zeros((96, 120), bool)
    mask[10:70, 20:80] = True
    ring = mask.copy()
    ring[20:60, 30:70] = False
    expected = np.array(
        [image[40, 50], image[ring].mean(axis=0), image[40, 50], image[0, 119], image[mask].mean(axis=0)]
    )
    np.testing.assert_allclose(found[:, :3] * 255, expected, atol=1e-3)


@pytest.mark.parametrize("orientations", [1, 4])
def test_the_embedding_does_not_change_under_rotation(orientations: int) -> None:
    """By 90°, of an SE(2) network; that of an ordinary network does."""
    network, image = untrained("nuclei", orientations).float(), textured(128, 128, 1)
    task = replace(PAPER["nuclei"], stain="none")
    model = Model(task, network, choose_point("nuclei", network, image), CPU)
    results = []
    for turned in (image, np.ascontiguousarray(np.rot90(image))):
        with as_slide(turned, 0.25) as slide:
            results.append(predict_slide(model, slide, PassOptions(everywhere=True, embedding=True)))
    first, second = results
    assert first.labels is not None
    assert second.labels is not None
    assert first.embedding is not None
    assert second.embedding is not None
    back = np.rot90(second.labels, -1)
    pairs = [np.bincount(back[first.labels == number]).argmax() for number in range(1, len(first.objects) + 1)]
    same = [
        np.abs(first.embedding[i] - second.embedding[j - 1]).max()
        for i, j in enumerate(pairs)
        if j and np.array_equal(back == j, first.labels == i + 1)
    ]
    if orientations == 4:
        assert len(same) == len(first.objects) > 5
        assert max(same) < 1e-4
    else:
        difference = [np.abs(first.embedding[i] - second.embedding[j - 1]).max() for i, j in enumerate(pairs) if j]
        assert np.median(difference) > 0.01


def test_networks_without_known_features_are_refused() -> None:
    class Rooted(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.float() / 255 if x.dtype == torch.uint8 else x).mean(dim=1, keepdim=True)

    network = make_dense(nn.Sequential(Rooted(), nn.ConvTranspose2d(1, 1, 1)).eval(), 1, 8)
    task = Classify("dark", (Class("dark", (0, 0, 0)),), spacing_um_px=1.0)
    with (
        as_slide(textured(60, 60, 1), 1.0) as slide,
        pytest.raises(DataError, match="The last layer of the network is"),
    ):
        predict_slide(Model(task, network, {"threshold": 0.5}, CPU), slide, PassOptions(embedding=True))


def test_a_table_without_pandas_names_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    blank = np.full((100, 100, 3), 250, np.uint8)
    with as_slide(blank, 0.25) as slide:
        result = predict_slide(Model(PAPER["nuclei"], DarkRegionNetwork(NUCLEI), POINT, CPU), slide, PassOptions())
    for read in (lambda: result.table, result.to_spatialdata):
        with pytest.raises(ModuleNotFoundError, match=r"needs the package .*: pip install 'rotopath\[tables\]'"):
            read()


@pytest.mark.filterwarnings("ignore")  # of packages that rotopath does not require
def test_results_as_pandas_table_and_spatialdata() -> None:
    pandas = pytest.importorskip("pandas")
    pixels, centers = draw_tissue()
    with as_slide(pixels, 0.5) as slide:
        model = Model(PAPER["nuclei"], DarkerRegionNetwork(NUCLEI), POINT, CPU)
        result = predict_slide(model, slide, PassOptions())
    table = result.table
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns)[:6] == ["number", "id", "class", "x_px", "y_px", "area_um2"]
    assert len(table) == len(result.objects) == len(centers)
    result = replace(result, embedding=np.arange(2 * len(table), dtype=np.float32).reshape(-1, 2))
    pytest.importorskip("spatialdata")
    data = result.to_spatialdata()
    assert list(data.shapes["objects"].index) == table["number"].tolist()
    assert data.tables["measurements"].obs["number"].tolist() == table["number"].tolist()
    assert data.tables["measurements"].to_df()["area_um2"].tolist() == table["area_um2"].tolist()
    np.testing.assert_array_equal(data.tables["measurements"].obsm["embedding"], result.embedding)
    areas = data.shapes["objects"].area.to_numpy() * 0.5**2
    np.testing.assert_allclose(areas, table["area_um2"], rtol=0.02)
    transformation = data.labels["labels"].attrs["transform"]["global"].to_affine_matrix(("x", "y"), ("x", "y"))
    np.testing.assert_allclose(transformation, np.diag([0.5, 0.5, 1]), atol=1e-9)
    with as_slide(np.full((100, 100, 3), 250, np.uint8), 0.25) as slide:
        blank = predict_slide(model, slide, PassOptions())
    assert len(blank.table) == 0
    assert list(blank.to_spatialdata().labels) == ["labels"]


class DarkerRegionNetwork(DarkRegionNetwork):
    """Detects nuclei with normalized stains, which are darker than this, and nothing else."""

    darkest = 0.45


class GlassResult(NamedTuple):
    objects: list[SlideObject]
    summary: dict[str, float]
    max_concentrations: np.ndarray


@cache
def draw_tissue() -> tuple[np.ndarray, np.ndarray]:
    """Draw eosin of several strengths, and round nuclei of hematoxylin apart; return pixels and centers of nuclei."""
    random = np.random.default_rng(0)
    eosin = random.uniform(0.7, 1.1, (SIDE_PX // 8, SIDE_PX // 8)).repeat(8, 0).repeat(8, 1)
    hematoxylin = 0.05 * random.random((SIDE_PX, SIDE_PX))
    rows, columns = np.mgrid[:SIDE_PX, :SIDE_PX]
    centers = np.stack(np.meshgrid(*[np.arange(APART_PX // 2, SIDE_PX, APART_PX)] * 2), axis=-1).reshape(-1, 2)
    centers = centers + random.integers(-8, 9, centers.shape)
    for row, column in centers:
        inside = np.hypot(rows - row, columns - column) < RADIUS_PX
        hematoxylin[inside] = random.uniform(1.4, 1.6, inside.sum())
    intensity = stain.WHITE * np.exp(-np.stack([hematoxylin, eosin], axis=2) @ STAINS.T) - 1
    return intensity.clip(0, 255).round().astype(np.uint8), centers.astype(float)


def put_on_glass(image: np.ndarray, size_px: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Return a slide of glass with the image at its center, and the position of the image's corner."""
    slide = np.full((*size_px, 3), 244, np.uint8)
    top, left = ((size - side) // 2 for size, side in zip(size_px, image.shape, strict=False))
    slide[top : top + image.shape[0], left : left + image.shape[1]] = image
    return slide, np.array([top, left])


def predict_nuclei(image: np.ndarray, everywhere: bool) -> GlassResult:
    model = Model(PAPER["nuclei"], DarkerRegionNetwork(NUCLEI), POINT, CPU)
    options = PassOptions(everywhere=everywhere)
    with as_slide(image, 0.25) as slide, SlidePass(model, slide, options) as slide_pass:
        objects = list(slide_pass.objects())
        assert slide_pass.view.stains is not None
        return GlassResult(objects, slide_pass.summary(), slide_pass.view.stains.max_concentrations)


@on_glass
@everywhere_or_not
def test_tissue_has_the_same_stains_and_nuclei_with_and_without_glass(
    size_px: tuple[int, int], everywhere: bool
) -> None:
    """If glass were measured too, hematoxylin would seem weaker, and normalization would darken it everywhere."""
    image, centers = draw_tissue()
    slide, corner = put_on_glass(image, size_px)
    assert (np.prod(size_px) <= MEASURED_PX) == (size_px == SLIDES_PX["measured all over"])
    tight, wide = predict_nuclei(image, everywhere), predict_nuclei(slide, everywhere)
    np.testing.assert_allclose(wide.max_concentrations, tight.max_concentrations, rtol=0.05)
    with_glass = stain.measure_stains(slide)
    assert with_glass is not None
    assert with_glass.max_concentrations[0] < tight.max_concentrations[0] / 2, "or glass would make no difference"
    for result, shift in ((tight, np.zeros(2)), (wide, corner)):
        assert len(result.objects) == len(centers)
        assert (
            cdist(centers + 0.5 + shift, np.array([find_center(nucleus) for nucleus in result.objects]))
            .min(axis=1)
            .max()
            <= 1
        )
    areas = [sum(nucleus.measurements["area_um2"] for nucleus in result.objects) for result in (tight, wide)]
    assert areas[1] == pytest.approx(areas[0], rel=0.02)


@on_glass
def test_glass_between_narrow_pieces_of_tissue_does_not_change_stains(size_px: tuple[int, int]) -> None:
    """Most of each sample is glass, and two of four strips have nuclei."""
    image, _ = draw_tissue()
    strips = [image[:, left : left + 64] for left in (48, 128, 208, 288)]
    spread = np.full((*size_px, 3), 244, np.uint8)
    for i, strip in enumerate(strips):
        spread[280 : 280 + SIDE_PX, 100 + 400 * i : 164 + 400 * i] = strip
    concentrations = []
    for pixels in (np.hstack(strips), spread):
        with as_slide(pixels, 0.25) as slide:
            stains = SlideView(slide, 0.25, "macenko", find_tissue(slide)).stains
        assert stains is not None
        concentrations.append(stains.max_concentrations)
    np.testing.assert_allclose(concentrations[1], concentrations[0], rtol=0.1)


@on_glass
def test_stains_do_not_depend_on_the_predicted_area(size_px: tuple[int, int]) -> None:
    slide, _ = put_on_glass(draw_tissue()[0], size_px)
    near, all_over = (predict_nuclei(slide, everywhere) for everywhere in (False, True))
    np.testing.assert_array_equal(near.max_concentrations, all_over.max_concentrations)
    assert sorted(nucleus.id for nucleus in near.objects) == sorted(nucleus.id for nucleus in all_over.objects)


@everywhere_or_not
def test_areas_and_densities_are_those_of_tissue(everywhere: bool) -> None:
    image, centers = draw_tissue()
    size_px = SLIDES_PX["measured all over"]
    summary = predict_nuclei(put_on_glass(image, size_px)[0], everywhere).summary
    slide_mm2 = np.prod(size_px) * 0.25e-3**2
    assert summary["tissue_mm2"] == pytest.approx(TISSUE_MM2, rel=0.15)
    assert summary["tissue_mm2"] < slide_mm2 / 3
    assert summary["objects"] == len(centers)
    assert summary["nuclei_per_mm2"] == pytest.approx(len(centers) / summary["tissue_mm2"])


@everywhere_or_not
def test_the_fraction_of_tumor_is_that_of_tissue(everywhere: bool) -> None:
    """Everything dark is predicted as tumor: all of the tissue, and no glass."""
    pink = np.full((320, 320, 3), (90, 40, 70), np.uint8)
    slide, _ = put_on_glass(pink, (640, 960))
    model = Model(PAPER["tumor"], DarkerRegionNetwork(TUMOR), {"threshold": 0.5}, CPU)
    with as_slide(slide, 1.0) as opened:
        summary = predict_slide(model, opened, PassOptions(everywhere=everywhere)).summary
    assert summary["tumor_mm2"] == pytest.approx(0.32**2, rel=0.1)
    assert summary["tissue_mm2"] == pytest.approx(0.32**2, rel=0.15)
    assert summary["tumor_share"] == pytest.approx(summary["tumor_mm2"] / summary["tissue_mm2"])
    assert summary["tumor_share"] > 0.8


@pytest.mark.parametrize("size_px", [(500, 500), (333, 500), (17, 90)])
@everywhere_or_not
def test_an_image_full_of_tissue_has_no_more_tissue_than_image(size_px: tuple[int, int], everywhere: bool) -> None:
    """Pixels of a mask are 8 µm wide, and 125 µm are no multiple of it."""
    image = draw_tissue()[0][: size_px[0], : size_px[1]]
    summary = predict_nuclei(image, everywhere).summary
    assert summary["tissue_mm2"] == pytest.approx(np.prod(size_px) * 0.25e-3**2, rel=1e-9)


@pytest.mark.parametrize("size_px", [(300, 400), (1500, 1500)])
def test_a_blank_slide_has_no_stains_to_normalise(size_px: tuple[int, int]) -> None:
    with as_slide(np.full((*size_px, 3), 244, np.uint8), 0.25) as slide:
        assert SlideView(slide, 0.25, "macenko", find_tissue(slide)).stains is None


def test_stains_are_normalized_if_the_task_requires_it() -> None:
    with as_slide(draw_tissue()[0], 0.25) as slide:
        tissue = find_tissue(slide)
        unchanged, normalized = (SlideView(slide, 0.25, how, tissue) for how in ("none", "macenko"))
        rows = columns = Span(0, 64)
        np.testing.assert_array_equal(unchanged.read(rows, columns), slide.read(0, 0, 64, 64, 0.25))
        assert unchanged.stains is None
        assert normalized.stains is not None
        expected = normalized.stains.normalize(slide.read(0, 0, 64, 64, 0.25))
        np.testing.assert_array_equal(normalized.read(rows, columns), expected)


def test_tiles_for_a_gpu_are_larger_in_half_precision() -> None:
    network = untrained("mitosis")
    half = MixedNetwork(network, torch.float16)
    sides = {
        (device.type, form is half): Model(tasks.MITOSIS, form, {}, device).tile_px
        for device in (CPU, CUDA)
        for form in (half, network)
    }
    assert sides.pop(("cuda", True)) == 2048
    assert set(sides.values()) == {1024}


def test_a_pass_removes_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it fails before it is entered."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = Model(PAPER["nuclei"], DarkRegionNetwork(NUCLEI), POINT, CPU)
    with as_slide(textured(60, 70, 1), 0.25) as slide:
        with SlidePass(model, slide, PassOptions(everywhere=True, rotations=4)) as slide_pass:
            list(slide_pass.objects())
            assert len(list(tmp_path.glob("*/*"))) >= 3, "maps and regions"
        assert list(tmp_path.iterdir()) == []
        monkeypatch.setattr(Path, "open", raise_disk_full)
        with pytest.raises(OSError, match="disk full"):
            SlidePass(model, slide, PassOptions(everywhere=True))
        assert list(tmp_path.iterdir()) == []


def raise_disk_full(*_: object, **__: object) -> None:
    raise OSError("disk full")


def test_a_stopwatch_adds_the_seconds_of_threads_and_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    stopwatch = Stopwatch()
    assert list(stopwatch.watch("items", "abc")) == ["a", "b", "c"]
    assert stopwatch.seconds == {"items": 4}, "the end of the items takes time, too"
    with pytest.raises(KeyError), stopwatch.measure("block"):
        raise KeyError
    assert stopwatch.seconds == {"items": 4, "block": 1}
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: time_block(stopwatch), range(20)))
    assert stopwatch.seconds["threads"] >= 20


def time_block(stopwatch: Stopwatch) -> None:
    with stopwatch.measure("threads"):
        pass


def test_large_heat_maps_are_subsampled_for_the_overlay(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model(PAPER["tumor"], untrained("tumor"), {"threshold": 0.5}, CPU)
    image = textured(300, 260, 1)
    with as_slide(image, 1.0) as slide, SlidePass(model, slide, PassOptions(everywhere=True)) as slide_pass:
        objects = list(slide_pass.objects())
        heat = slide_pass.heat.read()
        np.testing.assert_array_equal(slide_pass.heat.read_subsampled(3), heat[::3, ::3])
        whole = slide_pass.draw_overlay(objects)
        monkeypatch.setattr("rotopath.inference.slide_pass.OVERLAY_HEAT_PX", 10)
        subsampled = slide_pass.draw_overlay(objects)
        assert set(slide_pass.stopwatch.seconds) == {"waiting", "focus", "reading", "network", "maps", "objects"}
    assert whole.size == subsampled.size
    assert np.asarray(whole).tobytes() != np.asarray(subsampled).tobytes()


@pytest.mark.parametrize(
    ("task", "device", "requested", "tiles", "cores", "expected"),
    [
        ("nuclei", "cuda", None, 50, 16, 14),
        ("nuclei", "cuda", None, 50, 64, 16),
        ("nuclei", "cuda", None, 50, 4, 2),
        ("nuclei", "cuda", None, 7, 16, 0),
        ("nuclei", "cpu", None, 50, 16, 0),
        ("mitosis", "cuda", None, 50, 16, 0),
        ("mitosis", "cpu", 3, 1, 2, 3),
        ("nuclei", "cuda", 0, 50, 16, 0),
    ],
)
def test_workers_are_started_where_they_help(
    task: str,
    device: str,
    requested: int | None,
    tiles: int,
    cores: int,
    expected: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slide_pass_module, "count_cores", lambda: cores)
    model = Model(
        PAPER[task], untrained(task), dict.fromkeys(("threshold", "inside", "background", "least_px"), 0.5), CPU
    )
    options = PassOptions(workers=requested)
    with as_slide(textured(100, 100, 1), 0.25) as slide, SlidePass(model, slide, options) as slide_pass:
        slide_pass.model = replace(model, device=torch.device(device))
        assert slide_pass._count_workers(tiles) == expected


@pytest.mark.parametrize("failing", ["search", "caller"])
def test_after_an_error_no_thread_reads_from_the_closed_slide(failing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read, is_closed, late = Slide.read, False, []

    def read_slowly(*arguments: object) -> np.ndarray:
        time.sleep(0.05)
        late.append(is_closed)
        return read(*arguments)  # type: ignore[arg-type]

    def fail(*_: object) -> None:
        raise RuntimeError("in the middle")

    model = Model(PAPER["nuclei"], DarkRegionNetwork(NUCLEI), POINT, CPU)
    image, before = textured(600, 600, 1), set(threading.enumerate())
    monkeypatch.setattr(Slide, "read", read_slowly)
    if failing == "search":
        monkeypatch.setattr("rotopath.tasks.segment.InstanceSearch.search_tile", fail)
    try:
        with as_slide(image, 0.25) as slide:
            with SlidePass(model, slide, PassOptions(tile_px=200, everywhere=True)) as slide_pass:
                for _ in slide_pass.objects(fail if failing == "caller" else lambda _done, _all: None):
                    pass
            is_closed = True
    except RuntimeError:  # its traceback refers to the generators, as in `predict_files`
        is_closed, running = True, set(threading.enumerate())
    assert running == before
    time.sleep(0.2)
    assert not any(late)
    assert late


def test_objects_in_memory_do_not_keep_the_text_of_files() -> None:
    model = Model(PAPER["nuclei"], DarkRegionNetwork(NUCLEI), POINT, CPU)
    image = np.full((200, 200, 3), 200, np.uint8)
    image[80:110, 80:110] = 20
    with as_slide(image, 0.25) as slide:
        (item,) = predict_slide(model, slide, PassOptions(everywhere=True)).objects
    assert set(vars(item)) == {field.name for field in fields(item)}


def test_threads_read_each_block_of_a_slide_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rotopath.inference.slide_pass.BLOCK_PX", 64)
    image, read = textured(300, 260, 1), []
    read_block = SlideView._read_block

    def count(view: SlideView, row: int, column: int) -> np.ndarray:
        read.append((row, column))
        time.sleep(0.01)  # so that other threads ask for the same block
        return read_block(view, row, column)

    monkeypatch.setattr(SlideView, "_read_block", count)
    with as_slide(image, 0.5) as slide:
        view = SlideView(slide, 0.4, "none", find_tissue(slide))
        rows, columns = view.size_px
        whole = SlideView(slide, 0.4, "none", find_tissue(slide)).read(Span(0, rows), Span(0, columns))
        read.clear()
        spans = [(Span(top, top + 150), Span(left, left + 130)) for top in (-20, 90, 200) for left in (-50, 64, 170)]
        with ThreadPoolExecutor(4) as pool:
            parts = list(pool.map(lambda rectangle: view.read(*rectangle), spans))
    reflected = np.pad(whole, ((20, 50), (50, 40), (0, 0)), mode="reflect")
    for (rows, columns), part in zip(spans, parts, strict=True):
        expected = reflected[rows.start + 20 : rows.stop + 20, columns.start + 50 : columns.stop + 50]
        np.testing.assert_array_equal(part, expected)
    assert sorted(read) == sorted(set(read))
    assert len(read) > 20


# The region of a slide, and the classes that a user requests

ROI = 7 * np.array([(30, 20), (20, 150), (120, 165), (140, 40)], float)
HOLE = 7 * np.array([(60, 60), (60, 100), (90, 100), (90, 60)], float)
REGION = Region(((Polygon(ROI),),), ((Polygon(HOLE),),))


def is_inside(positions: np.ndarray, polygon: np.ndarray) -> np.ndarray:
    """Return whether positions (k, 2) are inside a convex polygon: on the same side of all edges."""
    edges = np.roll(polygon, -1, axis=0) - polygon
    offsets = positions[:, None] - polygon
    sides = edges[:, 0] * offsets[..., 1] - edges[:, 1] * offsets[..., 0]
    inside: np.ndarray = (sides > 0).all(axis=1) | (sides < 0).all(axis=1)
    return inside


@pytest.mark.parametrize(("name", "tile_px"), [("mitosis", 4096), ("nuclei", 200)])
def test_objects_in_a_region_are_those_of_the_whole_slide_with_their_center_in_it(name: str, tile_px: int) -> None:
    task, image = PAPER[name], np.tile(draw_tissue()[0], (2, 2, 1))
    point = POINT if name == "nuclei" else {"threshold": 0.05}
    model = Model(task, DarkerRegionNetwork(ARCHITECTURES[name]), point, CPU)
    with as_slide(image, 0.25) as slide:
        whole = predict_slide(model, slide, PassOptions(tile_px=tile_px, everywhere=True))
        part = predict_slide(model, slide, PassOptions(tile_px=tile_px, everywhere=True, region=REGION))
    centers = np.array([item.center for item in whole.objects])
    wanted = is_inside(centers, ROI) & ~is_inside(centers, HOLE)
    assert 10 < wanted.sum() < len(wanted)
    assert {item.id for item in part.objects} == {
        item.id for item, is_wanted in zip(whole.objects, wanted, strict=True) if is_wanted
    }
    area_mm2 = (Polygon(ROI).area_px - Polygon(HOLE).area_px) * 0.25e-3**2
    assert part.summary["tissue_mm2"] == pytest.approx(area_mm2, rel=0.01)
    density = part.summary[f"{task.objects_name}_per_mm2"]
    assert density == pytest.approx(wanted.sum() / part.summary["tissue_mm2"])
    # The heat map is that of the whole slide in the region, and 0 outside.
    positions_px = (np.indices(part.map.shape).reshape(2, -1).T + 0.5) * part.map_um / 0.25
    inside, near = (
        is_inside(positions_px, resize(ROI, by_px)) & ~is_inside(positions_px, resize(HOLE, -by_px))
        for by_px in (-40, 40)
    )
    inside, near = inside.reshape(part.map.shape), near.reshape(part.map.shape)
    assert inside.mean() > 0.2
    assert (~near).mean() > 0.2
    assert (part.map[~near] == 0).all()
    assert part.map[inside].max() > 0.1
    np.testing.assert_allclose(part.map[inside], whole.map[inside], atol=1e-6)


def resize(polygon: np.ndarray, by_px: float) -> np.ndarray:
    """Move the corners of a polygon outwards, or inwards if `by_px` is negative."""
    return polygon + by_px * np.sign(polygon - polygon.mean(axis=0))


def test_an_object_at_the_border_of_a_region_is_returned_whole() -> None:
    """A disc of 40 µm, with its center 1 µm inside of the region or 1 µm outside."""
    rows, columns = np.mgrid[:600, :600]
    image = np.full((600, 600, 3), (230, 160, 200), np.uint8)
    image[np.hypot(rows + 0.5 - 300, columns + 0.5 - 304) < 80] = 20
    task = replace(PAPER["nuclei"], stain="none")
    model = Model(task, DarkRegionNetwork(NUCLEI), POINT, CPU)
    outlines = {}
    for right in (None, 308, 300):
        box = None if right is None else np.array([(100, 100), (100, right), (500, right), (500, 100)], float)
        region = None if box is None else Region(((Polygon(box),),))
        with as_slide(image, 0.25) as slide:
            outlines[right] = [item.id for item in predict_slide(model, slide, PassOptions(region=region)).objects]
    assert len(outlines[None]) == 1
    assert outlines[308] == outlines[None]
    assert outlines[300] == []


def test_tiles_outside_of_a_region_are_not_computed(tmp_path: Path) -> None:
    drawn = draw_slide(tmp_path / "slide.tif", (900, 1100), ((64, 64, 420), (450, 600, 440)))
    square = np.array([(70, 70), (70, 270), (270, 270), (270, 70)], float)
    counts, expected = [], []
    for region in (None, Region(((Polygon(square),),)), Region(None, ((Polygon(4 * square),),))):
        network = DarkRegionNetwork(NUCLEI)
        options = PassOptions(tile_px=100, everywhere=True, region=region)
        model = Model(PAPER["nuclei"], network, POINT, CPU)
        with open_slide(drawn.path) as slide, SlidePass(model, slide, options) as slide_pass:
            list(slide_pass.objects())
            spans = [
                [slide_pass.grid.extent_um(span, axis) for axis, span in enumerate(tile)]
                for tile in slide_pass.grid.tiles
            ]
        counts.append(len(network.input_sizes))
    # Tiles that touch the square with a margin of 32 µm, and up to two pixels of the mask more. Inside of the larger
    # square, all tiles are left out that are farther from its border.
    for margin_um in (32, 48):
        expected.append(
            sum(all(a.start < 67.5 + margin_um and a.stop > 17.5 - margin_um for a in tile) for tile in spans)
        )
        left_out = sum(all(a.stop < 270 - margin_um and a.start > 70 + margin_um for a in tile) for tile in spans)
        expected.append(len(spans) - left_out)
    assert counts[0] == len(spans)
    assert expected[0] <= counts[1] <= expected[2] < len(spans) / 2
    assert expected[1] <= counts[2] <= expected[3] < len(spans)


def test_a_region_of_tumor_is_cut_at_the_border() -> None:
    """Everything is tumor. Its area is that of the region of interest, though it extends beyond it."""
    dark = np.full((600, 800, 3), (90, 40, 70), np.uint8)
    square = np.array([(120, 240), (120, 480), (360, 480), (360, 240)], float)
    model = Model(PAPER["tumor"], DarkerRegionNetwork(TUMOR), {"threshold": 0.5}, CPU)
    with as_slide(dark, 1.0) as slide:
        result = predict_slide(model, slide, PassOptions(region=Region(((Polygon(square),),))))
    (region,) = result.objects
    corners = np.concatenate([polygon.outer for polygon in region.shape])  # type: ignore[union-attr]
    assert np.abs(corners.min(axis=0) - (120, 240)).max() <= 12
    assert np.abs(corners.max(axis=0) - (360, 480)).max() <= 12
    assert result.summary["tumor_mm2"] == pytest.approx(0.24**2, rel=0.1)
    assert result.summary["tissue_mm2"] == pytest.approx(0.24**2, rel=0.02)


def test_a_region_of_interest_off_the_slide_is_refused() -> None:
    model = Model(PAPER["nuclei"], DarkRegionNetwork(NUCLEI), POINT, CPU)
    with as_slide(textured(60, 70, 1), 0.25) as slide, pytest.raises(DataError, match=r"outside of image.*70 × 60 px"):
        SlidePass(model, slide, PassOptions(region=Region(((Polygon(ROI + 200),),))))


def test_small_regions_of_tumor_are_left_out() -> None:
    white = np.full((400, 400, 3), 235, np.uint8)
    white[100:130, 100:130] = 30
    white[200:330, 200:330] = 30
    areas = {}
    for min_area_um2 in (None, 5000):
        point = PAPER["tumor"].adjust_operating_point({"threshold": 0.5}, None, min_area_um2)
        model = Model(PAPER["tumor"], DarkerRegionNetwork(TUMOR), point, CPU)
        with as_slide(white, 1.0) as slide:
            result = predict_slide(model, slide, PassOptions(everywhere=True))
        areas[min_area_um2] = [region.measurements["area_mm2"] for region in result.objects]
        assert result.summary["tumor_mm2"] == pytest.approx(sum(areas[min_area_um2]))
    assert len(areas[None]) == 2
    assert areas[5000] == [max(areas[None])]


@pytest.mark.parametrize("kind", ["segment", "classify"])
def test_only_requested_classes_are_returned_and_counted(kind: str) -> None:
    task = make_task(kind, Overrides(classes=("red", "green", "blue"), spacing_um_px=1.0))
    truth = np.zeros((60, 90), int)
    truth[10:30, 20:40], truth[40:50, 60:80], truth[15:20, 65:75] = 2, 2, 1
    image = (150 + 60 * np.eye(3)[truth]).astype(np.uint8)
    module = nn.Conv2d(3, task.outputs, 1, bias=False)
    with torch.no_grad():
        module.weight.zero_()
        module.weight[-3:] = 30 * torch.eye(3)[..., None, None]
        if kind == "segment":
            module.weight[0, 1:], module.weight[0, 0], module.weight[2, 0] = 30, -30, 30
    point = {"inside": 0.5, "background": 0.5, "least_px": 5} if kind == "segment" else {}
    model = Model(task, make_dense(module.eval(), task.outputs, 8), point, CPU)
    results = {}
    for classes in ((), ("blue",), ("green", "blue")):
        with as_slide(image, 1.0) as slide:
            results[classes] = predict_slide(model, slide, PassOptions(everywhere=True, classes=classes))
    everything = results.pop(())
    for classes, result in results.items():
        expected = [item.id for item in everything.objects if item.class_name in classes]
        assert [item.id for item in result.objects] == expected != []
        assert result.summary["objects"] == len(expected)
        sentence = task.describe_summary(result.summary)
        assert all((name in sentence) == (name in classes) for name in task.class_names)
    assert len(results["blue",].objects) < len(everything.objects)


# Warnings


def warn(image: np.ndarray, spacing_um_px: float, task: str = "nuclei", **options: object) -> tuple[str, ...]:
    network = DarkerRegionNetwork(ARCHITECTURES[task])
    point = POINT if task == "nuclei" else {"threshold": 0.05}
    with as_slide(image, spacing_um_px) as slide:
        result = predict_slide(Model(PAPER[task], network, point, CPU), slide, PassOptions(**options))  # type: ignore[arg-type]
    assert all(warning in repr(result) for warning in result.warnings)
    frame = np.asarray(result.overlay)[0]
    assert (frame == WARNING_INK).all() == bool(result.warnings)
    return result.warnings


def test_normal_tissue_has_no_warning() -> None:
    image, _ = draw_tissue()
    assert warn(image, 0.25, everywhere=True) == ()
    assert warn(image, 0.37) == ()
    assert warn(image, 0.1) == (), "smaller pixels lose no detail"


def test_a_slide_without_tissue_is_reported() -> None:
    assert warn(np.full((300, 300, 3), 240, np.uint8), 0.25) == ("No tissue was found on the slide.",)


def test_enlarged_pixels_are_reported() -> None:
    (warning,) = warn(draw_tissue()[0][:200, :200], 0.5)
    assert warning == (
        "The slide has 0.5 µm/px, and was enlarged 2 times to the 0.25 µm/px of the model; details that the model "
        "needs are missing. Check a part of the results; scan the slide at a higher magnification, or use a model for "
        "its pixel spacing."
    )


def test_a_slide_that_is_not_h_and_e_is_reported_unless_the_model_is_for_other_stains() -> None:
    image, _ = draw_tissue()
    fluorescence = np.where(image.mean(axis=2, keepdims=True) < 100, (0, 0, 255), 0).astype(np.uint8)
    (warning,) = warn(fluorescence, 0.25, "tumor", everywhere=True)
    assert warning.startswith("The slide does not look like H&E, which the model knows: its background is dark")
    brown = image[..., [0, 2, 1]]
    (warning,) = warn(brown, 0.25, "mitosis")
    assert "brown" in warning
    task = make_task("segment")
    model = Model(task, DarkRegionNetwork(NUCLEI), POINT, CPU)
    with as_slide(brown, 0.25) as slide:
        assert predict_slide(model, slide, PassOptions()).warnings == ()


def test_a_density_that_does_not_occur_is_reported() -> None:
    """Sixteen dark nuclei, which the network detects as mitoses, in 0.1 mm²."""
    image, centers = draw_tissue()
    image = np.tile(image, (2, 2, 1))
    (warning,) = warn(image, 0.25, "mitosis", everywhere=True)
    per_mm2 = 4 * len(centers) / (4 * TISSUE_MM2)
    assert warning == f"{per_mm2:,.0f} mitoses per mm² are not plausible: tissue has at most about 100."
    assert warn(image[:SIDE_PX], 0.25, "mitosis", everywhere=True) == (), "too little tissue"
