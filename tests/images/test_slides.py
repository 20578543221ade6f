"""Slides are read at the right positions at any spacing, tiles fit together, and unusable files are refused."""

import json
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile
from drawn_slides import GLASS, STROMA, DrawnSlide, draw_slide
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from layouts import pixels, truncate
from PIL import Image
from scanner_files import write_dicom, write_mirax, write_ndpi, write_ome_zarr, write_svs
from scipy import ndimage

from rotopath.images import UnreadableImageError, open_slide, read_rgb
from rotopath.images import readers as readers_module
from rotopath.images import slides as slides_module
from rotopath.images.slides import Slide

pytestmark = pytest.mark.slow

SPACINGS = (0.25, 0.3, 0.5, 0.972, 1.0, 1.01, 2.0, 4.0)
EVEN, ODD = (1536, 2048), (1539, 2051)  # odd sizes lead to downsamples that are not whole numbers


def write_ome(path: Path, image: np.ndarray, spacing_um_px: float = 0.25, **options: object) -> Path:
    """Write levels 1 and 2 as sub-IFDs of the first page, which OpenSlide does not read."""
    size = {f"PhysicalSize{axis}{unit}": "µm" if unit else spacing_um_px for axis in "XY" for unit in ("", "Unit")}
    storage = {"tile": (128, 128), "compression": "adobe_deflate", "photometric": "rgb", **options}
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(image, subifds=2, metadata={"axes": "YXS", **size}, **storage)
        for step in (2, 4):
            rows, columns = (side // step for side in image.shape[:2])
            parts = image[: rows * step, : columns * step].reshape(rows, step, columns, step, -1)
            tiff.write(parts.mean(axis=(1, 3)).astype(image.dtype), subfiletype=1, **storage)
    return path


def mark_errors(slide: Slide, drawn: DrawnSlide, spacing: float) -> list[np.ndarray]:
    """The error of the position of each mark, read at a spacing, in pixels of level 0."""
    scale = spacing / slide.spacing_um_px
    radius = 16 + scale / 2
    errors = []
    for row, column in drawn.marks:
        top, left = math.floor((row - radius) / scale), math.floor((column - radius) / scale)
        side = math.ceil(2 * radius / scale) + 1
        mark = STROMA[1] - slide.read(top, left, side, side, spacing)[..., 1].astype(float)
        center = np.array(ndimage.center_of_mass(mark)) + 0.5 + (top, left)
        errors.append(center * scale - (row, column))
    return errors


@pytest.fixture(scope="module", params=["even", "odd", "ome", "image"])
def drawn(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DrawnSlide:
    """The same slide as a pyramid that OpenSlide opens, as one with odd sizes, as an OME-TIFF, and as a PNG."""
    if request.param != "image":
        pytest.importorskip("openslide")
    folder = tmp_path_factory.mktemp("slides")
    slide = draw_slide(folder / "slide.tif", EVEN if request.param == "even" else ODD)
    base = tifffile.imread(slide.path, key=0)
    if request.param == "ome":
        slide = DrawnSlide(write_ome(folder / "slide.ome.tif", base), *list(vars(slide).values())[1:])
    if request.param == "image":
        Image.fromarray(base).save(folder / "slide.png", dpi=(101_600, 101_600), compress_level=1)
        slide = DrawnSlide(folder / "slide.png", *list(vars(slide).values())[1:])
    return slide


@pytest.fixture(scope="module")
def slide(drawn: DrawnSlide) -> Iterator[Slide]:
    with open_slide(drawn.path) as opened:
        yield opened


def test_size_spacing_and_levels_are_read(slide: Slide, drawn: DrawnSlide) -> None:
    assert slide.size_px == drawn.size_px
    assert slide.spacing_um_px == pytest.approx(0.25, rel=1e-4)
    assert slide.origin_px == (0, 0)
    downsamples = {".tif": [1, 4, 16], ".png": [1]}[drawn.path.suffix]
    if drawn.path.name.endswith("ome.tif"):
        downsamples = [1, 2, 4]
    assert [level.downsample for level in slide.levels] == downsamples


def test_level_0_is_read_without_changes(slide: Slide, drawn: DrawnSlide) -> None:
    base = read_rgb(drawn.path) if drawn.path.suffix == ".png" else tifffile.imread(drawn.path, key=0)
    spacing = slide.spacing_um_px
    assert np.array_equal(slide.read(250, 240, 300, 310, spacing), base[250:550, 240:550])
    assert np.array_equal(slide.read(250, 240, 300, 310), base[250:550, 240:550])


@pytest.mark.parametrize("spacing", SPACINGS)
def test_marks_are_at_their_positions(slide: Slide, drawn: DrawnSlide, spacing: float) -> None:
    """To half a pixel of level 0, whatever level is read; on average only, where a pixel is as large as a mark."""
    errors = mark_errors(slide, drawn, spacing)
    assert np.abs(np.mean(errors, axis=0)).max() < 0.5
    assert np.abs(errors).max() < max(0.5, spacing / slide.spacing_um_px / 8)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_tiles_equal_the_whole_rectangle(slide: Slide, data: st.DataObject) -> None:
    spacing = data.draw(st.sampled_from(SPACINGS) | st.floats(0.2, 6.0), label="spacing")
    rows, columns = slide.size_at(spacing)
    top = data.draw(st.integers(-20, rows), label="top")
    left = data.draw(st.integers(-20, columns), label="left")
    height, width = data.draw(st.integers(2, 90), label="height"), data.draw(st.integers(2, 90), label="width")
    cut_row, cut_column = data.draw(st.integers(1, height - 1)), data.draw(st.integers(1, width - 1))
    whole = slide.read(top, left, height, width, spacing).astype(int)
    for rows_cut in ((0, cut_row), (cut_row, height)):
        for columns_cut in ((0, cut_column), (cut_column, width)):
            size = (rows_cut[1] - rows_cut[0], columns_cut[1] - columns_cut[0])
            piece = slide.read(top + rows_cut[0], left + columns_cut[0], *size, spacing)
            part = whole[slice(*rows_cut), slice(*columns_cut)]
            assert np.abs(piece - part).max() <= 1


@pytest.mark.parametrize("spacing", [0.25, 0.972, 2.0])
def test_narrow_and_flat_tiles_of_noise_equal_the_whole_rectangle(tmp_path: Path, spacing: float) -> None:
    """Whichever axis is resampled first, and however far the filter overshoots black and white."""
    noise = np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (300, 300, 3))
    Image.fromarray(noise).save(tmp_path / "noise.png")
    with open_slide(tmp_path / "noise.png", 0.499) as slide:
        rows, columns = slide.size_at(spacing)
        whole = slide.read(0, 0, rows, columns, spacing).astype(int)
        tall = [slide.read(0, left, rows, min(7, columns - left), spacing) for left in range(0, columns, 7)]
        flat = [slide.read(top, 0, min(5, rows - top), columns, spacing) for top in range(0, rows, 5)]
    assert np.abs(np.concatenate(tall, axis=1) - whole).max() <= 1
    assert np.abs(np.concatenate(flat, axis=0) - whole).max() <= 1


def test_large_reads_are_assembled_from_blocks(slide: Slide, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = slide.read(-5, -7, 180, 210, 0.972)
    monkeypatch.setattr(slides_module, "BLOCK_PX", 97)
    assert np.abs(slide.read(-5, -7, 180, 210, 0.972).astype(int) - whole).max() <= 1


def test_the_coarsest_level_that_is_fine_enough_is_read(drawn: DrawnSlide) -> None:
    """A downsample of 4 (1 µm/px) may be read for 0.99 µm/px, which is within 2 %, but not for 0.97."""
    if drawn.path.suffixes != [".tif"]:
        pytest.skip("this file has other levels")
    with open_slide(drawn.path) as slide:
        chosen = [slide._choose_level(spacing)[0] for spacing in (0.1, 0.25, 0.97, 0.99, 1.0, 3.9, 4.0, 16.0)]
    assert chosen == [0, 0, 0, 1, 1, 1, 2, 2]


def test_reduced_pixels_are_means_and_not_samples(tmp_path: Path) -> None:
    stripes = np.zeros((256, 256, 3), np.uint8)
    stripes[:, ::2] = 255
    Image.fromarray(stripes).save(tmp_path / "stripes.png")
    with open_slide(tmp_path / "stripes.png", 0.25) as slide:
        assert np.abs(slide.read(10, 10, 40, 40, 0.75).astype(int) - 127).max() < 25
        assert np.abs(slide.read(2, 2, 28, 28, 2.0).astype(int) - 127).max() < 3


def test_the_size_counts_pixels_with_their_centers_on_the_slide(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (10, 11, 3), dtype=np.uint8)
    Image.fromarray(noise).save(tmp_path / "a.png")
    with open_slide(tmp_path / "a.png", 0.5) as slide:
        assert slide.size_at(0.5) == (10, 11)
        assert slide.size_at(2.0) == (2, 3)  # 2.5 and 2.75 pixels
        assert slide.size_at(1.0) == (5, 5)
        assert slide.size_at(50) == (1, 1)
        assert np.array_equal(slide.read(0, 0, 10, 11), noise)
        assert (slide.read(2, 0, 1, 3, 2.0) == 255).all()


def test_pixels_outside_the_slide_are_white(slide: Slide) -> None:
    rows, columns = slide.size_at(0.5)
    assert (slide.read(-40, -40, 40, 40, 0.5) == 255).all()
    assert (slide.read(rows, 0, 30, 30, 0.5) == 255).all()
    assert (slide.read(10**6, 10**6, 5, 5, 0.5) == 255).all()
    corner = slide.read(rows - 10, columns - 10, 20, 20, 0.5)
    assert np.abs(corner[:10, :10].astype(int) - GLASS).max() <= 1
    assert (corner[10:] == 255).all()
    assert (corner[:, 10:] == 255).all()
    assert slide.read(0, 0, 0, 7, 0.5).shape == (0, 7, 3)


def test_several_threads_read_the_same_pixels(slide: Slide) -> None:
    corners = [(top, left) for top in range(0, 300, 60) for left in range(0, 400, 80)]
    sequential = [slide.read(top, left, 64, 64, 0.972) for top, left in corners]
    with ThreadPoolExecutor(4) as pool:
        parallel = list(pool.map(lambda corner: slide.read(*corner, 64, 64, 0.972), corners))
    assert all(np.array_equal(a, b) for a, b in zip(sequential, parallel, strict=True))


def test_alpha_gray_and_16_bits(tmp_path: Path) -> None:
    rgba = np.zeros((8, 8, 4), np.uint8)
    rgba[:4] = (10, 20, 30, 255)
    Image.fromarray(rgba).save(tmp_path / "alpha.png")
    Image.fromarray(np.full((8, 8), 77, np.uint8)).save(tmp_path / "gray.png")
    Image.fromarray(np.full((8, 8), 77 * 256 + 9, np.uint16)).save(tmp_path / "deep.png")
    with open_slide(tmp_path / "alpha.png", 0.5) as slide:
        assert slide.read(0, 0, 8, 8)[[0, 7], 0].tolist() == [[10, 20, 30], [255, 255, 255]]
    for name in ("gray.png", "deep.png"):
        with open_slide(tmp_path / name, 0.5) as slide:
            assert (slide.read(0, 0, 8, 8) == 77).all()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_pyramids_with_alpha_and_with_16_bits(tmp_path: Path, dtype: type) -> None:
    pytest.importorskip("tiffslide")
    unit = np.iinfo(dtype).max // 255
    rgba = np.zeros((512, 512, 4), dtype)
    rgba[:256] = np.array([10, 20, 30, 255]) * unit
    storage = {"extrasamples": ["unassalpha"]} if dtype == np.uint8 else {}
    image = rgba if dtype == np.uint8 else np.ascontiguousarray(rgba[..., :3])
    with open_slide(write_ome(tmp_path / "a.ome.tif", image, **storage)) as slide:
        assert slide.read(0, 0, 2, 2)[0, 0].tolist() == [10, 20, 30]
        assert slide.read(0, 0, 2, 2, 1.0)[0, 0].tolist() == [10, 20, 30]
        assert slide.read(400, 400, 2, 2)[0, 0].tolist() == ([255] * 3 if dtype == np.uint8 else [0] * 3)


def test_a_pyramid_of_floats_is_not_a_slide(tmp_path: Path) -> None:
    pytest.importorskip("tiffslide")
    with tifffile.TiffWriter(tmp_path / "map.ome.tif", ome=True) as tiff:
        tiff.write(np.zeros((256, 256), np.float32), subifds=1, tile=(128, 128))
        tiff.write(np.zeros((128, 128), np.float32), tile=(128, 128), subfiletype=1)
    with pytest.raises(UnreadableImageError, match=r"contains float32 numbers, but must contain gray"):
        open_slide(tmp_path / "map.ome.tif")


def test_a_file_without_spacing_is_refused_unless_it_is_given(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with pytest.raises(UnreadableImageError, match=r"a.png does not state the size of its pixels, .*--spacing-um-px"):
        open_slide(tmp_path / "a.png")
    with open_slide(tmp_path / "a.png", 0.5) as slide:
        assert slide.spacing_um_px == 0.5
    with pytest.raises(ValueError, match=r"The pixel spacing given .* is 250 µm/px; pass a number from 0.05 to 5"):
        open_slide(tmp_path / "a.png", 250)


def test_a_given_spacing_that_contradicts_the_file_must_override_it(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png", dpi=(101_600, 101_600))
    with open_slide(tmp_path / "a.png") as slide:
        assert slide.spacing_um_px == pytest.approx(0.25, rel=1e-4)
    for spacing in (0.2476, 0.2524):
        with open_slide(tmp_path / "a.png", spacing) as slide:
            assert slide.spacing_um_px == spacing
    for spacing in (0.247, 0.253, 0.5):
        sentence = rf"a.png states a pixel spacing of 0.25 µm/px, but {spacing} µm/px was given; .* --override-spacing"
        with pytest.raises(UnreadableImageError, match=sentence):
            open_slide(tmp_path / "a.png", spacing)
        with open_slide(tmp_path / "a.png", spacing, override_spacing=True) as slide:
            assert slide.spacing_um_px == spacing


def test_pixels_that_are_not_square_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "near.tif", dpi=(101_600, 101_000))
    with open_slide(tmp_path / "near.tif") as slide:
        assert slide.spacing_um_px == pytest.approx((0.25 + 25_400 / 101_000) / 2, rel=1e-4)
    Image.new("RGB", (8, 8)).save(tmp_path / "far.tif", dpi=(101_600, 50_800))
    with pytest.raises(UnreadableImageError, match=r"has pixels 0.5 µm high and 0.25 µm wide, but they must be square"):
        open_slide(tmp_path / "far.tif")
    for spacing in (0.25, 0.5):  # each is the true spacing of one axis only
        with pytest.raises(UnreadableImageError, match="add --override-spacing"):
            open_slide(tmp_path / "far.tif", spacing)


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("kind", ["pyramid", "ome", "png"])
def test_truncated_files_are_refused_in_one_sentence(tmp_path: Path, kind: str, keep: float) -> None:
    pytest.importorskip("openslide")
    image = np.random.default_rng(0).integers(0, 256, (512, 512, 3), dtype=np.uint8)
    if kind == "pyramid":
        path = draw_slide(tmp_path / "slide.tif", (512, 512), ((0, 0, 512),)).path
    elif kind == "ome":
        path = write_ome(tmp_path / "slide.ome.tif", image)
    else:
        path = tmp_path / "slide.png"
        Image.fromarray(image).save(path)

    def read_all() -> None:
        with open_slide(path, 0.25) as slide:
            for spacing in (0.25, 0.5, 1.0, 4.0):
                slide.read(0, 0, *slide.size_at(spacing), spacing)

    read_all()
    truncate(path, keep)
    with pytest.raises(
        UnreadableImageError, match=rf"{path.name} (is damaged|cannot be decoded|is not an image)"
    ) as caught:
        read_all()
    assert "\n" not in str(caught.value)


def test_files_that_are_not_images_are_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "text.svs").write_text("not a slide")
    with pytest.raises(UnreadableImageError, match=r"text.svs is"):
        open_slide(tmp_path / "text.svs")
    with pytest.raises(UnreadableImageError, match=r"missing.svs does not exist"):
        open_slide(tmp_path / "missing.svs")
    with pytest.raises(UnreadableImageError, match="contains neither an OME-Zarr image nor a DICOM slide"):
        open_slide(tmp_path)


@pytest.mark.parametrize("name", ["a.svs", "a.png"])
def test_a_file_without_permission_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).touch()

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UnreadableImageError, match=rf"{name} cannot be read \(Permission denied\)"):
        open_slide(tmp_path / name)


def test_invalid_rectangles_and_spacings_are_refused(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    with open_slide(tmp_path / "a.png", 0.5) as slide:
        with pytest.raises(ValueError, match="A rectangle of -1 × 5 px was requested"):
            slide.read(0, 0, -1, 5, 0.5)
        for spacing in (0, -1, float("nan"), float("inf")):
            with pytest.raises(ValueError, match="it must be above 0"):
                slide.read(0, 0, 1, 1, spacing)


def test_without_openslide_images_open_and_slides_name_the_missing_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = np.full((256, 256, 3), 200, np.uint8)
    Image.fromarray(image).save(tmp_path / "plain.tif")
    pyramid = write_ome(tmp_path / "slide.ome.tif", image)
    (tmp_path / "slide.svs").write_bytes(pyramid.read_bytes())
    monkeypatch.setitem(sys.modules, "openslide", None)
    with open_slide(tmp_path / "plain.tif", 0.5) as slide:
        assert (slide.read(0, 0, 9, 9) == 200).all()
    for name in ("slide.ome.tif", "slide.svs"):
        with pytest.raises(
            UnreadableImageError, match=r"needs OpenSlide; install it: pip install 'rotopath\[slides\]'"
        ):
            open_slide(tmp_path / name)


def test_without_tiffslide_its_pyramids_name_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openslide")
    pyramid = write_ome(tmp_path / "slide.ome.tif", np.full((256, 256, 3), 200, np.uint8))
    monkeypatch.setitem(sys.modules, "tiffslide", None)
    with pytest.raises(UnreadableImageError, match=r"needs tiffslide; install it: pip install 'rotopath\[slides\]'"):
        open_slide(pyramid)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_tiled_images_without_levels(tmp_path: Path, dtype: type) -> None:
    """OpenSlide reads some of them and Pillow others; neither takes floats for colors."""
    value = {np.uint8: 77, np.uint16: 77 * 257, np.float32: 0.5}[dtype]
    tifffile.imwrite(tmp_path / "a.tif", np.full((256, 256), value, dtype), tile=(128, 128))
    if dtype == np.float32:
        with pytest.raises(UnreadableImageError, match="holds floating-point numbers"):
            open_slide(tmp_path / "a.tif", 0.5)
        return
    with open_slide(tmp_path / "a.tif", 0.5) as slide:
        assert (slide.read(0, 0, 256, 256) == 77).all()


@pytest.fixture(scope="module", params=["svs", "ndpi", "mirax"])
def scanned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[DrawnSlide, int]:
    """The drawn slide in the formats of three scanners, and the pixels of the stage above and left of it."""
    pytest.importorskip("openslide")
    folder = tmp_path_factory.mktemp("scanned")
    slide = draw_slide(folder / "slide.tif", EVEN)
    base = tifffile.imread(slide.path, key=0)
    if request.param != "mirax":
        write = {"svs": write_svs, "ndpi": write_ndpi}[request.param]
        return DrawnSlide(write(folder / f"a.{request.param}", base), *list(vars(slide).values())[1:]), 0
    path = write_mirax(folder / "a.mrxs", base, stage_tiles=(16, 20), first_tile=(4, 4))
    marks = tuple((row + 1024, column + 1024) for row, column in slide.marks)
    return DrawnSlide(path, (16 * 256, 20 * 256), 0.25, (), marks), 1024


@pytest.mark.parametrize("spacing", [0.25, 0.5, 0.972, 2.0])
def test_marks_are_at_their_positions_in_files_of_scanners(scanned: tuple[DrawnSlide, int], spacing: float) -> None:
    drawn, _ = scanned
    with open_slide(drawn.path) as slide:
        assert np.abs(mark_errors(slide, drawn, spacing)).max() < 0.5


def test_the_scanned_region_has_an_origin_and_the_stage_is_white(scanned: tuple[DrawnSlide, int]) -> None:
    openslide = pytest.importorskip("openslide")
    drawn, offset = scanned
    vendors = {".svs": "aperio", ".ndpi": "hamamatsu", ".mrxs": "mirax"}
    assert openslide.OpenSlide.detect_format(drawn.path) == vendors[drawn.path.suffix]
    with open_slide(drawn.path) as slide:
        assert (slide.size_px, slide.origin_px) == (drawn.size_px, (offset, offset))
        assert slide.spacing_um_px == pytest.approx(0.25)
        assert len(slide.levels) > 1
        edge = slide.read(offset + 100, offset - 8, 8, 16)
        assert (edge[:, :8] == 255).all()
        assert np.abs(edge[:, 8:].astype(int) - GLASS).max() < 4, "the glass is there, with JPEG artifacts"


def test_downsamples_of_rounded_sizes_are_whole_numbers() -> None:
    sizes = [(32_914, 46_000), (8_228, 11_500), (2_057, 2_875)]
    levels = readers_module._make_levels(sizes, (1.0, 4.000121536217793, 16.00048614487117))
    assert [level.downsample for level in levels] == [1, 4, 16]
    assert readers_module._make_levels([(1000, 1000), (469, 469)], (1.0, 2.1322))[1].downsample == 2.1322


def checkers(rows: int = 640, columns: int = 800) -> np.ndarray:
    """Squares of 32 px in random colors, which JPEG preserves well."""
    colors = np.random.default_rng(0).integers(0, 256, (rows // 32, columns // 32, 3))
    return np.kron(colors, np.ones((32, 32, 1))).astype(np.uint8)


def test_a_dicom_slide_is_a_folder_or_any_of_its_files(tmp_path: Path) -> None:
    """Levels are separate files, from which OpenSlide assembles the slide."""
    pytest.importorskip("openslide")
    image, folder = checkers(), write_dicom(tmp_path / "slide", checkers())
    for path in (folder, *folder.iterdir()):
        with open_slide(path) as slide:
            assert [level.size_px for level in slide.levels] == [(640, 800), (160, 200)]
            assert slide.spacing_um_px == pytest.approx(0.25)
            assert np.abs(slide.read(0, 0, 640, 800).astype(int) - image).max() <= 3
            assert np.abs(slide.read(0, 0, 160, 200, 1.0).astype(int) - image[::4, ::4]).mean() < 1
    write_dicom(folder, image, series="1.2.5")
    with pytest.raises(UnreadableImageError, match="is a folder that contains 2 DICOM slides; choose one"):
        open_slide(folder)


def test_a_dicom_file_that_is_not_damaged_is_not_called_damaged(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    folder = write_dicom(tmp_path / "slide", checkers(), image_type="")
    with pytest.raises(UnreadableImageError) as caught:
        open_slide(folder)
    assert "cannot read (the attribute Image Type is missing or incomplete)" in str(caught.value)
    assert "damaged" not in str(caught.value)
    (tmp_path / "scan.dcm").write_bytes(bytes(128) + b"DICM" + bytes(100))
    with pytest.raises(UnreadableImageError, match=r"scan.dcm is a DICOM file, but not of a whole slide"):
        open_slide(tmp_path / "scan.dcm")


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_ome_zarr(tmp_path: Path, version: str, dtype: type) -> None:
    pytest.importorskip("zarr")
    image = checkers(320, 480)
    channels = tuple((f"Channel {i}", color) for i, color in enumerate(("FF0000", "00ff00", "0000FF")))
    stored = image.astype(dtype) * (np.iinfo(dtype).max // 255)
    path = write_ome_zarr(tmp_path / "a.zarr", stored, version, channels)
    with open_slide(path) as slide:
        assert [level.size_px for level in slide.levels] == [(320, 480), (160, 240), (80, 120)]
        assert slide.spacing_um_px == 0.25
        assert np.array_equal(slide.read(0, 0, 320, 480), image)
        assert np.array_equal(slide.read(30, 70, 50, 90), image[30:80, 70:160])
        assert np.array_equal(slide.read(5, 7, 70, 100, 1.0), image[2::4, 2::4][5:75, 7:107])
    description = slides_module.describe_slide(path)
    assert description.contents.format == f"OME-Zarr {version}"
    assert description.missing == ()
    with open_slide(path) as slide, ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda top: slide.read(top, 0, 10, 480), range(0, 320, 10)))
    assert np.array_equal(np.concatenate(rows), image)


def test_ome_zarr_with_fluorescence_without_units_and_with_several_images(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    image = checkers(320, 480)
    dyes = (("DAPI", "FF0000"), ("FITC", "00FF00"), ("Cy3", "0000FF"))
    with pytest.raises(UnreadableImageError, match=r"contains 3 separate channels \(DAPI, FITC, Cy3\), but must"):
        open_slide(write_ome_zarr(tmp_path / "dyes.zarr", image, channels=dyes))
    with pytest.raises(UnreadableImageError, match="contains float64 numbers, but must contain gray or RGB values"):
        open_slide(write_ome_zarr(tmp_path / "floats.zarr", image.astype(float)))
    with pytest.raises(UnreadableImageError, match="does not state the size of its pixels"):
        open_slide(write_ome_zarr(tmp_path / "pixels.zarr", image, unit=None))
    several = tmp_path / "several.zarr"
    zarr.open_group(several, mode="w", zarr_format=2, attributes={"bioformats2raw.layout": 3})
    write_ome_zarr(several / "0", image[:64, :96], "0.4")
    write_ome_zarr(several / "1", image, "0.4")
    with open_slide(several) as slide:
        assert slide.size_px == (320, 480)
    assert slides_module.describe_slide(several).contents.others == (("0", (64, 96)),)
    zarr.open_group(tmp_path / "other.zarr", mode="w")
    with pytest.raises(UnreadableImageError, match="is a Zarr folder without an OME-Zarr image"):
        open_slide(tmp_path / "other.zarr")


def test_a_slide_of_kilometers_is_refused(tmp_path: Path) -> None:
    """A fuzzer found it: the tissue of such a slide was searched, until the memory was full."""
    pytest.importorskip("zarr")
    path = write_ome_zarr(tmp_path / "a.zarr", checkers(64, 96))
    metadata = path / "0" / "zarr.json"
    content = json.loads(metadata.read_text())
    content["shape"][1] = 10**30
    metadata.write_text(json.dumps(content))
    with pytest.raises(UnreadableImageError, match=r"a.zarr states a side of more than 16777216 px, which"):
        open_slide(path)


def test_a_slide_whose_levels_have_different_shapes_is_refused(tmp_path: Path) -> None:
    """A fuzzer found it: a damaged header stated so many columns that the search for tissue took minutes."""
    pytest.importorskip("zarr")
    path = write_ome_zarr(tmp_path / "a.zarr", checkers(64, 96))
    metadata = path / "0" / "zarr.json"
    content = json.loads(metadata.read_text())
    content["shape"][1] = 10**6
    metadata.write_text(json.dumps(content))
    with pytest.raises(UnreadableImageError, match=r"a level of \d+ × \d+ px cannot show an image of \d+ × \d+ px"):
        open_slide(path)


def test_without_zarr_its_images_name_the_missing_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("zarr")
    path = write_ome_zarr(tmp_path / "a.zarr", checkers(64, 64))
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(UnreadableImageError, match=r"needs zarr; install it: pip install 'rotopath\[slides\]'"):
        open_slide(path)


@pytest.mark.parametrize("openslide", ["installed", "missing"])
@pytest.mark.parametrize("tile", [None, (128, 128)])
@pytest.mark.parametrize(("axes", "what"), [("CYX", "2 separate channels"), ("ZYX", "2 separate focal planes")])
def test_stacks_are_refused_and_not_read_as_gray_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, openslide: str, tile: tuple[int, int] | None, axes: str, what: str
) -> None:
    """OpenSlide and Pillow would read the first channel or plane only."""
    stack = np.zeros((2, 256, 256), np.uint8)
    tifffile.imwrite(
        tmp_path / "a.ome.tif", stack, ome=True, tile=tile, metadata={"axes": axes}, photometric="minisblack"
    )
    if openslide == "missing":
        monkeypatch.setitem(sys.modules, "openslide", None)
    with pytest.raises(
        UnreadableImageError, match=rf"a.ome.tif contains {what}, but must contain one gray or RGB image"
    ):
        open_slide(tmp_path / "a.ome.tif", 0.5)


def test_the_channels_of_an_ome_tiff_and_of_a_qptiff_are_named(tmp_path: Path) -> None:
    named = {"axes": "CYX", "Channel": {"Name": ["DAPI", "FITC"]}}
    stack = np.zeros((2, 64, 64), np.uint8)
    tifffile.imwrite(tmp_path / "a.ome.tif", stack, ome=True, metadata=named, photometric="minisblack")
    with pytest.raises(UnreadableImageError, match=r"contains 2 separate channels \(DAPI, FITC\), but must"):
        open_slide(tmp_path / "a.ome.tif", 0.5)
    with tifffile.TiffWriter(tmp_path / "a.qptiff") as tiff:
        for dye in ("DAPI", "FITC", "Cy3"):
            xml = f"<PerkinElmer-QPI-ImageDescription><ImageType>FullResolution</ImageType><Name>{dye}</Name>"
            description = f"{xml}</PerkinElmer-QPI-ImageDescription>"
            pixels = np.zeros((64, 64), np.uint8)
            tiff.write(pixels, description=description, software="PerkinElmer-QPI", metadata=None)
    with pytest.raises(UnreadableImageError, match=r"contains 3 separate channels \(DAPI, FITC, Cy3\), but must"):
        open_slide(tmp_path / "a.qptiff", 0.5)


def test_the_largest_of_several_images_is_read_and_the_others_are_listed(tmp_path: Path) -> None:
    pytest.importorskip("tiffslide")
    image, label = checkers(256, 320), np.zeros((100, 90, 3), np.uint8)
    path = tmp_path / "a.ome.tif"
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(image, subifds=1, tile=(128, 128), photometric="rgb", metadata={"Name": "slide"})
        tiff.write(image[::2, ::2], tile=(128, 128), photometric="rgb", subfiletype=1)
        tiff.write(label, photometric="rgb", metadata={"Name": "label"})
    with open_slide(path, 0.5) as slide:
        assert np.array_equal(slide.read(0, 0, 256, 320), image)
    assert slides_module.describe_slide(path).contents.others == (("label", (100, 90)),)
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(label, photometric="rgb")
        tiff.write(image, photometric="rgb")
    with open_slide(path, 0.5) as slide:
        assert np.array_equal(slide.read(0, 0, 256, 320), image)
    with tifffile.TiffWriter(path, ome=True) as tiff:
        tiff.write(label, photometric="rgb")
        tiff.write(image, subifds=1, tile=(128, 128), photometric="rgb")
        tiff.write(image[::2, ::2], tile=(128, 128), photometric="rgb", subfiletype=1)
    with pytest.raises(UnreadableImageError, match=r"contains 2 images, of which only .* but the largest is number 2"):
        open_slide(path, 0.5)


def test_the_page_of_an_image_has_its_own_spacing(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "a.tif") as tiff:
        tiff.write(np.zeros((20, 30, 3), np.uint8), resolution=(1e4, 1e4), resolutionunit="CENTIMETER")
        tiff.write(checkers(64, 96), resolution=(4e4, 4e4), resolutionunit="CENTIMETER")
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.spacing_um_px == pytest.approx(0.25)
        assert np.array_equal(slide.read(0, 0, 64, 96), checkers(64, 96))


def test_ome_metadata_state_the_spacing_of_a_tiled_image_without_levels(tmp_path: Path) -> None:
    size = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
    image = checkers(256, 256)
    tifffile.imwrite(tmp_path / "a.ome.tif", image, ome=True, tile=(128, 128), photometric="rgb", metadata=size)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.spacing_um_px == 0.5
    assert slides_module.describe_slide(tmp_path / "a.ome.tif").contents.format == "OME-TIFF"


def test_a_qptiff_of_a_stained_slide_is_read(tmp_path: Path) -> None:
    """Its pages are the image, a thumbnail, and the other levels."""
    pytest.importorskip("tiffslide")
    image = checkers(512, 640)
    storage = {"software": "PerkinElmer-QPI", "photometric": "rgb", "metadata": None, "resolutionunit": "CENTIMETER"}
    with tifffile.TiffWriter(tmp_path / "a.qptiff") as tiff:
        tiff.write(image, tile=(128, 128), resolution=(4e4, 4e4), **storage)
        tiff.write(image[::8, ::8], **storage)
        tiff.write(image[::2, ::2], tile=(128, 128), resolution=(2e4, 2e4), subfiletype=1, **storage)
        tiff.write(image[:100, :90], **storage)
    with open_slide(tmp_path / "a.qptiff") as slide:
        assert [level.size_px for level in slide.levels] == [(512, 640), (256, 320)]
        assert slide.spacing_um_px == pytest.approx(0.25)
        assert np.array_equal(slide.read(0, 0, 512, 640), image)
        assert np.array_equal(slide.read(0, 0, 256, 320, 0.5), image[::2, ::2])
    contents = slides_module.describe_slide(tmp_path / "a.qptiff").contents
    assert contents.format == "QPI-TIFF"
    assert [name for name, _ in contents.others] == ["Thumbnail", "Macro"]


def test_the_description_of_a_slide_states_what_is_missing(tmp_path: Path) -> None:
    pytest.importorskip("openslide")
    Image.new("RGB", (30, 20)).save(tmp_path / "a.png")
    plain = slides_module.describe_slide(tmp_path / "a.png")
    assert (plain.contents.format, plain.pixel_size_um) == ("PNG", None)
    assert plain.contents.reader.startswith("Pillow ")
    assert "--spacing-um-px" in plain.missing[0]
    svs = slides_module.describe_slide(write_svs(tmp_path / "a.svs", checkers(1024, 1024)))
    assert (svs.contents.format, svs.pixel_size_um, svs.missing) == ("aperio", (0.25, 0.25), ())
    assert svs.contents.reader.startswith("OpenSlide ")
    assert svs.levels[0] == ((1024, 1024), 1.0)


def test_every_read_after_a_damaged_tile_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """OpenSlide raises the first error again at any later call, perhaps in another thread."""
    path = write_svs(tmp_path / "a.svs", pixels(400, 500))
    with tifffile.TiffFile(path) as tiff:
        offset = tiff.pages[0].dataoffsets[0]
    content = bytearray(path.read_bytes())
    content[offset + 20 : offset + 60] = bytes(40)
    path.write_bytes(content)
    with open_slide(path) as slide:
        for _ in range(3):
            with pytest.raises(UnreadableImageError, match=r"a\.svs cannot be decoded"):
                slide.read(0, 0, 50, 50)
