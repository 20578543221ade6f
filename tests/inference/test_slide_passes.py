"""Slides: objects are the same however the slide is cut, lie where they are, and are those of the whole image."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from drawn_slides import MARK_PX, draw_slide
from eyes import DarkEye
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.distance import cdist
from torch import nn

import rotopath as rp
from rotopath.images.geojson import Point, SlideObject, fill_outline
from rotopath.images.slides import Slide, as_slide, open_slide
from rotopath.images.tissue import find_tissue
from rotopath.inference import predict
from rotopath.inference.slide_pass import Model, PassOptions, SlidePass, SlideView
from rotopath.inference.tiling import Span
from rotopath.metrics import smooth_images
from rotopath.model_file import ModelInfo, NetworkInfo
from rotopath.models import make_dense
from rotopath.models.architecture import ARCHITECTURES, MITOSIS, NUCLEI
from rotopath.models.network import Network
from rotopath.runs import Run
from rotopath.tasks import PAPER, Class, Classify

CPU = torch.device("cpu")
POINT = {"inside": 0.5, "background": 0.5, "least_px": 45}
SPACING = {name: task.spacing_um_px for name, task in PAPER.items()}


def untrained(task: str, orientations: int = 1) -> Network:
    """In float64, so that what tiles round otherwise does not decide."""
    torch.manual_seed(3)
    network = Network(ARCHITECTURES[task], orientations).double().eval()
    with torch.no_grad():
        network.head[0].weight.mul_(8)
    return network


def textured(height: int, width: int, seed: int) -> np.ndarray:
    smooth = smooth_images(1, max(height, width), blur_px=2.5, seed=seed)[0, :, :height, :width]
    return (smooth * 45 + 128).clamp(0, 255).byte().permute(1, 2, 0).numpy()


def middling_point(task: str, network: Network, image: np.ndarray) -> dict[str, float]:
    """Thresholds that part what the network says of the image, so that there is something to find."""
    maps = predict(network, image, CPU).probabilities
    if task == "nuclei":
        inside, _, background = (float(np.quantile(one, q)) for one, q in zip(maps, (0.6, 0.5, 0.5), strict=True))
        return {"inside": inside, "background": background, "least_px": 5}
    return {"threshold": float(np.quantile(maps, 0.6))}


def look_at(
    task: str, network: Network, point: dict[str, float], slide: Slide, **options: int
) -> tuple[list[SlideObject], np.ndarray, np.ndarray | None]:
    model = Model(PAPER[task], network, point, CPU)
    chosen = PassOptions(everywhere=True, **options)  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder, SlidePass(model, slide, Path(folder), chosen) as one:
        objects = list(one.objects())
        heat, deviation = one.heat.read(), None if one.deviation is None else one.deviation.read()
    return objects, heat, deviation


@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
@settings(max_examples=6, deadline=None)
@given(height=st.integers(5, 190), width=st.integers(5, 190), tile_px=st.integers(100, 260), seed=st.integers(0, 99))
@pytest.mark.filterwarnings("ignore:stain normalisation left")
def test_objects_are_the_same_however_the_slide_is_cut(
    task: str, height: int, width: int, tile_px: int, seed: int
) -> None:
    network, image = untrained(task), textured(height, width, seed)
    point = middling_point(task, network, image)
    with as_slide(image, SPACING[task]) as slide:
        whole, heat, _ = look_at(task, network, point, slide, tile_px=4096)
        tiled, tiled_heat, _ = look_at(task, network, point, slide, tile_px=tile_px)
    assert sorted(one.id for one in whole) == sorted(one.id for one in tiled)
    np.testing.assert_allclose(heat, tiled_heat, atol=1e-6)


@pytest.mark.filterwarnings("ignore:stain normalisation left")
def test_nuclei_are_those_of_the_whole_image() -> None:
    network, image = untrained("nuclei"), textured(150, 170, 1)
    point = middling_point("nuclei", network, image)
    with as_slide(image, 0.25) as slide:
        objects, _, _ = look_at("nuclei", network, point, slide, tile_px=100)
        canvas = SlideView(slide, rp.tasks.NUCLEI.spacing_um_px, rp.tasks.NUCLEI.stain, find_tissue(slide))
        seen = canvas.read(Span(0, 150), Span(0, 170))  # stains normalised, if any
    labels = rp.tasks.NUCLEI.decode(predict(network, seen, CPU), point)
    assert labels.max() > 5
    filled = [fill_outline(one.shape, (150, 170)) for one in objects]  # type: ignore[arg-type]
    assert len(filled) == labels.max()
    for number in range(1, labels.max() + 1):
        mine = labels == number
        assert any((mine <= one).all() and (one & (labels > 0) <= mine).all() for one in filled), "but for its holes"


def test_mitoses_are_those_of_the_whole_image() -> None:
    network, image = untrained("mitosis"), textured(180, 230, 2)
    point = middling_point("mitosis", network, image)
    with as_slide(image, 0.25) as slide:
        objects, _, _ = look_at("mitosis", network, point, slide, tile_px=100)
    expected = rp.tasks.MITOSIS.decode(predict(network, image, CPU), point)
    assert len(expected.positions) > 3
    places = sorted((one.shape.row - 0.5, one.shape.column - 0.5) for one in objects if isinstance(one.shape, Point))
    np.testing.assert_allclose(places, sorted(map(tuple, expected.positions.tolist())), atol=1e-6)


@pytest.mark.parametrize("spacing", [0.25, 0.2, 0.3])
def test_objects_land_on_what_they_are(tmp_path: Path, spacing: float) -> None:
    """Dark marks on a drawn slide, whose pixels are smaller or larger than those that the network sees."""
    drawn = draw_slide(tmp_path / "slide.tif", (900, 1100), ((64, 64, 420), (450, 600, 440)), spacing_um_px=spacing)
    marks = np.array(drawn.marks)
    with open_slide(drawn.path) as slide:
        nuclei, _, _ = look_at("nuclei", DarkEye(NUCLEI), POINT, slide, tile_px=300)
        mitoses, _, _ = look_at("mitosis", DarkEye(MITOSIS), {"threshold": 0.05}, slide, tile_px=300)
    found = np.array([middle(one) for one in nuclei if is_a_mark(one, spacing)])
    assert len(found) == len(marks)
    assert cdist(marks, found).min(axis=1).max() <= 1, "within a pixel of level 0"
    places = np.array([one.shape for one in mitoses])
    assert len(places) == len(marks)
    assert cdist(marks, places).min(axis=1).max() < 8 * 0.25 / spacing, "a network of stride 8 knows no better"


def is_a_mark(one: SlideObject, spacing_um_px: float) -> bool:
    """Normalised stains make some grains of a drawn slide as dark, but not as large."""
    return abs(one.measurements["area_um2"] / (MARK_PX * spacing_um_px) ** 2 - 1) < 0.2


def middle(one: SlideObject) -> np.ndarray:
    corners = np.concatenate([part.outer for part in one.shape])  # type: ignore[union-attr]
    centre: np.ndarray = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return centre


@pytest.mark.filterwarnings("ignore:stain normalisation left")
def test_the_deviation_over_rotations_is_nothing_for_an_equivariant_network() -> None:
    image = textured(120, 130, 4)
    deviations = {}
    for orientations in (1, 4):
        network = untrained("mitosis", orientations)
        point = middling_point("mitosis", network, image)
        with as_slide(image, 0.25) as slide:
            objects, heat, deviation = look_at("mitosis", network, point, slide, tile_px=120, rotations=4)
        assert deviation is not None
        assert deviation.shape == heat.shape
        deviations[orientations] = deviation.max()
        assert objects
        assert all("deviation" in one.measurements for one in objects)
    assert deviations[4] < 1e-6
    assert deviations[1] > 1e-3


def test_glass_is_left_out(tmp_path: Path) -> None:
    drawn = draw_slide(tmp_path / "slide.tif", (900, 1100), ((64, 64, 420),))
    eye = DarkEye(NUCLEI)
    with (
        open_slide(drawn.path) as slide,
        SlidePass(Model(PAPER["nuclei"], eye, POINT, CPU), slide, tmp_path, PassOptions(tile_px=200)) as one,
    ):
        assert len([found for found in one.objects() if is_a_mark(found, 0.25)]) == 5
        assert 0 < len(eye.seen) < len(one.grid.tiles) / 2


@pytest.mark.filterwarnings("ignore:stain normalisation left")
@pytest.mark.parametrize("task", ["mitosis", "nuclei", "tumor"])
def test_the_summary_tells_of_all_objects(task: str, tmp_path: Path) -> None:
    network, image = untrained(task), textured(180, 230, 2)
    model = Model(PAPER[task], network, middling_point(task, network, image), CPU)
    chosen = PassOptions(everywhere=True, tile_px=100)
    with as_slide(image, SPACING[task]) as slide, SlidePass(model, slide, tmp_path, chosen) as one:
        objects = list(one.objects())
        told = one.summary()
    assert told["objects"] == len(objects) > 1
    assert told["tissue_mm2"] == one.tissue.area_mm2 > 0
    if task == "tumor":
        area_mm2 = sum(found.measurements["area_mm2"] for found in objects)
        assert told["tumor_mm2"] == pytest.approx(area_mm2)
        assert told["tumor_share"] == pytest.approx(area_mm2 / told["tissue_mm2"])
        assert 0 < told["tumor_share"] < 1
    else:
        name = {"mitosis": "mitoses", "nuclei": "nuclei"}[task]
        assert told[f"{name}_per_mm2"] == pytest.approx(len(objects) / told["tissue_mm2"])


def test_the_likeliest_of_several_classes_wins_everywhere(tmp_path: Path) -> None:
    """The network says which of three colours a pixel has; there are two regions of one, and a hole in another."""
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
    with as_slide(image, 1.0) as slide, SlidePass(model, slide, tmp_path, chosen) as one:
        objects = list(one.objects())
        assert one.winner is not None
        np.testing.assert_array_equal(one.winner.read(), truth)
        assert one.heat.read().min() > 0.99
        told = one.summary()
    assert sorted(found.class_name for found in objects) == ["blue", "blue", "green", "red"]
    for number, name in enumerate(classes):
        mine = [found for found in objects if found.class_name == name]
        assert sum(found.measurements["area_mm2"] for found in mine) == pytest.approx((truth == number).sum() / 1e6)
        assert told[f"{name}_mm2"] == pytest.approx((truth == number).sum() / 1e6)
        assert {found.color for found in mine} == {(number, number, number)}


def test_python_in_three_lines(tmp_path: Path) -> None:
    image = textured(100, 120, 5)
    network = rp.models.tumor(4).eval()
    info = NetworkInfo("tumor", 4, {}, 88, network.geometry)
    run = Run(tmp_path, ModelInfo(PAPER["tumor"], info, {"threshold": 0.5}, None), network)
    result = run.predict(image, spacing_um_px=1.0, everywhere=True)
    assert result.map.shape == (9, 10)
    assert result.show().size == (120, 100)
    result.to_geojson(tmp_path / "out.geojson")
    assert "FeatureCollection" in (tmp_path / "out.geojson").read_text()
    assert "tumor" in repr(result)
    with pytest.raises(ValueError, match="spacing_um_px"):
        run.predict(image)
    with pytest.raises(ValueError, match="bytes"):
        run.predict(image.astype(float), spacing_um_px=1.0)
