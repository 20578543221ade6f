"""Read images of every kind, their spacing, and label maps; files that cannot be read are refused in one sentence."""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from rotopath.images import UnreadableImageError, read_labels, read_rgb, resample, spacing_um_px
from rotopath.images.files import image_size_px


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (12, 20, 3), dtype=np.uint8)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("a.png", {}),
        ("a.tif", {}),
        ("a.tif", {"compression": "tiff_lzw"}),
        ("a.tif", {"compression": "tiff_adobe_deflate"}),
        ("a.bmp", {}),
    ],
)
def test_reading_rgb_returns_the_pixels_that_were_written(
    tmp_path: Path, pixels: np.ndarray, name: str, options: dict[str, str]
) -> None:
    Image.fromarray(pixels).save(tmp_path / name, **options)
    assert np.array_equal(read_rgb(tmp_path / name), pixels)
    assert image_size_px(tmp_path / name) == (12, 20)


def test_gray_palette_and_bilevel_images_become_rgb(tmp_path: Path) -> None:
    gray = np.arange(48, dtype=np.uint8).reshape(6, 8)
    Image.fromarray(gray).save(tmp_path / "gray.png")
    assert np.array_equal(read_rgb(tmp_path / "gray.png"), np.repeat(gray[:, :, None], 3, axis=2))
    Image.fromarray(gray).convert("P").save(tmp_path / "palette.png")
    assert read_rgb(tmp_path / "palette.png").shape == (6, 8, 3)
    Image.fromarray(gray > 20).save(tmp_path / "bilevel.png")
    assert set(np.unique(read_rgb(tmp_path / "bilevel.png"))) == {0, 255}


def test_transparent_pixels_are_laid_on_white(tmp_path: Path) -> None:
    rgba = np.zeros((2, 2, 4), np.uint8)
    rgba[0, 0] = (10, 20, 30, 255)
    rgba[0, 1] = (0, 0, 0, 128)
    Image.fromarray(rgba).save(tmp_path / "a.png")
    image = read_rgb(tmp_path / "a.png")
    assert image[0, 0].tolist() == [10, 20, 30]
    assert image[0, 1].tolist() == pytest.approx([127, 127, 127], abs=1)
    assert image[1, 1].tolist() == [255, 255, 255]


def test_sixteen_bits_are_reduced_to_eight(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 255, 256, 65535]], np.uint16)).save(tmp_path / "a.png")
    assert read_rgb(tmp_path / "a.png")[0, :, 0].tolist() == [0, 0, 1, 255]
    Image.fromarray(np.array([[-5, 256, 70_000]], np.int32)).save(tmp_path / "a.tif")
    assert read_rgb(tmp_path / "a.tif")[0, :, 0].tolist() == [0, 1, 255]


@pytest.mark.parametrize(
    ("dtype", "name"), [(np.uint8, "a.png"), (np.uint16, "a.png"), (np.uint16, "a.tif"), (np.int32, "a.tif")]
)
def test_labels_keep_their_numbers(tmp_path: Path, dtype: type, name: str) -> None:
    labels = np.array([[0, 1, 200], [7, 7, np.iinfo(dtype).max if dtype != np.int32 else 70_000]], dtype)
    Image.fromarray(labels).save(tmp_path / name)
    read = read_labels(tmp_path / name)
    assert read.dtype == np.int32
    assert np.array_equal(read, labels)


def test_a_color_image_is_not_a_label_map(tmp_path: Path, pixels: np.ndarray) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    with pytest.raises(
        UnreadableImageError, match="is not a label map: its Pillow mode is RGB, but object numbers need one gray"
    ):
        read_labels(tmp_path / "a.png")


def test_damaged_files_are_refused_in_one_sentence(tmp_path: Path, pixels: np.ndarray) -> None:
    for name in ("a.tif", "a.png", "a.jpg"):
        path = tmp_path / name
        Image.fromarray(np.tile(pixels, (20, 20, 1))).save(path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(UnreadableImageError, match=rf"{name} is (damaged|not an image)"):
            read_rgb(path)
    (tmp_path / "text.tif").write_text("not an image")
    with pytest.raises(UnreadableImageError, match=r"text.tif is not an image"):
        read_rgb(tmp_path / "text.tif")
    with pytest.raises(UnreadableImageError, match=r"missing.png does not exist"):
        read_rgb(tmp_path / "missing.png")
    with pytest.raises(UnreadableImageError, match="cannot be read \\(Is a directory\\)"):
        read_rgb(tmp_path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["a.tif", "a.png", "a.jpg"])
def test_any_wrong_byte_is_harmless_or_refused_in_one_sentence(tmp_path: Path, name: str, pixels: np.ndarray) -> None:
    """Change each byte of the header and some after it: the result is an image or an error message, never a crash."""
    path = tmp_path / name
    Image.fromarray(pixels).save(path)
    good = path.read_bytes()
    generator = np.random.default_rng(0)
    for position in [*range(60), *generator.integers(60, len(good), 140)]:
        bad = bytearray(good)
        bad[position % len(good)] = generator.integers(256)
        path.write_bytes(bytes(bad))
        with suppress(UnreadableImageError):
            read_rgb(path)


def test_numbers_that_are_neither_labels_nor_colors_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.full((3, 3), -1, np.int32)).save(tmp_path / "ignore.tif")
    with pytest.raises(
        UnreadableImageError,
        match=r"ignore.tif is not a label map: it contains numbers from -1 to -1, but object numbers are 0 to",
    ):
        read_labels(tmp_path / "ignore.tif")
    Image.fromarray(np.full((3, 3), 0.5, np.float32)).save(tmp_path / "float.tif")
    with pytest.raises(UnreadableImageError, match=r"float.tif holds floating-point numbers"):
        read_rgb(tmp_path / "float.tif")


def test_huge_images_have_to_be_opened_as_slides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pixels: np.ndarray
) -> None:
    Image.fromarray(pixels).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(UnreadableImageError, match="too large to be read as a whole"):
        read_rgb(tmp_path / "a.png")


@pytest.mark.parametrize(
    ("name", "options", "spacing"),
    [
        ("plain.tif", {}, None),
        ("screen.png", {"dpi": (72, 72)}, None),
        ("inch.tif", {"dpi": (101_600, 101_600)}, 0.25),
        ("centimeter.tif", {"resolution_unit": 3, "x_resolution": 40_000, "y_resolution": 40_000}, 0.25),
        ("aperio.tif", {"description": "Aperio Image Library|AppMag = 40|MPP = 0.2520|Left = 1"}, 0.252),
        ("ome.tif", {"description": '<OME><Pixels PhysicalSizeX="0.5" PhysicalSizeY="0.5"/></OME>'}, 0.5),
        ("broken.tif", {"description": "Aperio|MPP = unknown|Left = 1"}, None),
        ("dots.tif", {"description": "Aperio|MPP = 0.25.|Left = 1"}, 0.25),
        ("nm.tif", {"description": '<Pixels PhysicalSizeX="250" PhysicalSizeXUnit="nm"/>'}, 0.25),
    ],
)
def test_spacing_is_read_from_the_metadata(
    tmp_path: Path, pixels: np.ndarray, name: str, options: dict[str, object], spacing: float | None
) -> None:
    Image.fromarray(pixels).save(tmp_path / name, **options)
    assert spacing_um_px(tmp_path / name) == (None if spacing is None else pytest.approx(spacing, rel=1e-3))


@pytest.mark.parametrize("resolution", [(0, 0), (1, 0), (0, 1), (2**32 - 1, 1)])
def test_an_impossible_resolution_is_no_spacing(tmp_path: Path, resolution: tuple[int, int]) -> None:
    """As in a damaged header."""
    pixels = np.zeros((8, 8, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", pixels, resolution=((7, 1), (7, 1)), resolutionunit="INCH")
    content = (tmp_path / "a.tif").read_bytes()
    wanted = struct.pack("<2I", *resolution)
    assert content.count(struct.pack("<2I", 7, 1)) == 2
    (tmp_path / "a.tif").write_bytes(content.replace(struct.pack("<2I", 7, 1), wanted))
    assert spacing_um_px(tmp_path / "a.tif") is None


def test_resampling_keeps_positions_and_does_not_alias() -> None:
    image = np.zeros((40, 60, 3), np.uint8)
    image[10:20, 30:40] = 200
    half = resample(image, 0.5)
    assert half.shape == (20, 30, 3)
    assert half[7, 17].tolist() == pytest.approx([200] * 3, abs=5)
    assert half[2, 2].tolist() == [0, 0, 0]
    assert resample(image, 1.0) is image
    stripes = np.zeros((64, 64, 3), np.uint8)
    stripes[:, ::2] = 255
    assert np.abs(resample(stripes, 0.4)[5:-5, 5:-5].astype(int) - 127).max() < 20
