"""Reading a pyramid returns what was written at every level; a pyramid that fails leaves no file."""

import errno
import io
import os
import re
import tracemalloc
import zlib
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

import numpy as np
import pytest
import tifffile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sharing import pipe_at

from rotopath.images import UnreadableFileError, open_slide
from rotopath.images import pyramid as pyramid_module
from rotopath.images.pyramid import MapFile, MapWriter, StoredMap, write_pyramid


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyramid_module, "TILE_PX", 32)


def _halve(image: np.ndarray) -> np.ndarray:
    """The mean of each square of two by two pixels, or of those that exist; a slow reference implementation."""
    rows, columns = -(-image.shape[0] // 2), -(-image.shape[1] // 2)
    squares = [[image[2 * r : 2 * r + 2, 2 * c : 2 * c + 2] for c in range(columns)] for r in range(rows)]
    return np.array([[square.mean(axis=(0, 1)) for square in row] for row in squares])


def _draw(size: tuple[int, int], kind: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "rgb":
        return rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    return rng.integers(0, 256, size, dtype=np.uint8) if kind == "bytes" else rng.random(size, dtype=np.float32)


@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.tuples(st.integers(1, 150), st.integers(1, 150)),
    kind=st.sampled_from(["map", "bytes", "rgb"]),
    in_file=st.booleans(),
)
def test_every_level_is_read_as_it_was_written(tmp_path: Path, size: tuple[int, int], kind: str, in_file: bool) -> None:
    image = _draw(size, kind)
    with ExitStack() as stack:
        source: MapFile | np.ndarray = image
        if in_file:
            source = MapFile(tmp_path / "map", image.shape, image.dtype)
            stack.callback(source.close)
            source.write(0, 0, image)
        write_pyramid(tmp_path / "a.ome.tif", source, 0.25)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        (series,) = tiff.series
        assert tiff.is_ome
        assert np.array_equal(series.asarray(), image)
        levels = [level.asarray() for level in series.levels]
        assert series.axes == ("YXS" if kind == "rgb" else "YX")
    assert max(levels[-1].shape[:2]) <= 32
    for larger, smaller in pairwise(levels):
        assert np.abs(_halve(larger.astype(float)) - smaller).max() <= (1e-6 if kind == "map" else 0.5)


@pytest.mark.parametrize("size", [(150, 97), (1, 33), (64, 64)])
def test_levels_of_a_label_map_contain_no_other_numbers(tmp_path: Path, size: tuple[int, int]) -> None:
    labels = np.random.default_rng(0).integers(0, 2**32, size, dtype=np.uint32)
    write_pyramid(tmp_path / "a.ome.tif", labels, 0.25)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        levels = [level.asarray() for level in tiff.series[0].levels]
    for level, values in enumerate(levels):
        assert values.dtype == np.uint32
        assert np.array_equal(values, labels[:: 2**level, :: 2**level])
    assert max(levels[-1].shape) <= 32


def test_metadata_is_what_qupath_and_bioformats_read(tmp_path: Path) -> None:
    write_pyramid(tmp_path / "a.ome.tif", _draw((100, 130), "map"), 0.5, name="probability of tumor")
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        metadata = tiff.ome_metadata
        assert len(tiff.pages) == 1  # the lower levels are in its sub-IFDs
        page = tiff.pages[0]
        assert len(page.subifds) == 3
        assert page.tile == (32, 32)
        assert [level.keyframe.subfiletype for level in tiff.series[0].levels[1:]] == [1, 1, 1]
        assert page.get_resolution("MICROMETER") == pytest.approx((2, 2))
    for attribute in ('PhysicalSizeX="0.5"', 'PhysicalSizeYUnit="µm"', 'Name="probability of tumor"', 'Type="float"'):
        assert attribute in metadata
    assert re.search(r'SizeX="130" SizeY="100" SizeC="1"', metadata)


def test_an_image_opens_as_a_slide_with_its_levels(tmp_path: Path) -> None:
    pytest.importorskip("tiffslide")
    image = _draw((100, 130), "rgb")
    write_pyramid(tmp_path / "a.ome.tif", image, 0.25)
    with open_slide(tmp_path / "a.ome.tif") as slide:
        assert slide.spacing_um_px == 0.25
        assert [level.downsample for level in slide.levels] == [1, 2, 4, 8]
        assert np.array_equal(slide.read(0, 0, 100, 130), image)
        assert np.abs(slide.read(0, 0, 50, 65, 0.5) - _halve(image.astype(float))).max() <= 0.5


def test_a_large_file_is_a_bigtiff(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pyramid_module, "MAX_CLASSIC_BYTES", 1000)
    write_pyramid(tmp_path / "a.ome.tif", _draw((50, 50), "map"), 0.25)
    with tifffile.TiffFile(tmp_path / "a.ome.tif") as tiff:
        assert tiff.is_bigtiff


@pytest.mark.parametrize("dtype", [np.float32, np.uint32])
def test_memory_does_not_grow_with_the_map(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: type[np.float32 | np.uint32]
) -> None:
    monkeypatch.setattr(pyramid_module, "TILE_PX", 64)
    monkeypatch.setattr(pyramid_module, "SQUARE_PX", 16)

    def measure_peak(columns: int) -> int:
        numbers = MapFile(tmp_path / "map", (300, columns), dtype)
        for left in range(0, columns, 500):
            numbers.write(0, left, np.random.default_rng(0).integers(0, 9, (300, 500)))
        tracemalloc.start()
        write_pyramid(tmp_path / "a.ome.tif", numbers, 0.25)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        numbers.close()
        return peak

    measure_peak(500)  # imports
    small, large = measure_peak(4000), measure_peak(16_000)
    assert large - small < 0.1 * 300 * 12_000 * 4, "bytes of what the larger map has more"


@pytest.mark.parametrize(
    ("pixels", "sentence"),
    [
        (np.zeros((0, 8), np.uint8), r"got \(0, 8\) of uint8"),
        (np.zeros((10, 8), np.float64), r"of float32, uint8 or uint32; got \(10, 8\) of float64"),
        (np.zeros((10, 8, 4), np.uint8), r"got \(10, 8, 4\) of uint8"),
    ],
)
def test_pixels_of_another_type_leave_the_old_file(tmp_path: Path, pixels: np.ndarray, sentence: str) -> None:
    (tmp_path / "a.ome.tif").write_text("the old file")
    with pytest.raises(ValueError, match=sentence):
        write_pyramid(tmp_path / "a.ome.tif", pixels, 0.25)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ome.tif"]
    assert (tmp_path / "a.ome.tif").read_text() == "the old file"


@pytest.mark.parametrize("square_px", [16, 128])
def test_painting_keeps_the_map_where_values_are_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, square_px: int
) -> None:
    monkeypatch.setattr(pyramid_module, "SQUARE_PX", square_px)
    rng = np.random.default_rng(0)
    painted, expected = MapFile(tmp_path / "map", (40, 65), np.uint32), np.zeros((40, 65), np.uint32)
    for _ in range(30):
        top, left = int(rng.integers(30)), int(rng.integers(30))
        values = rng.integers(1, 9, (10, 20)) * (rng.random((10, 20)) < rng.choice([0, 0.05, 0.5]))
        painted.paint(top, left, values)
        box = expected[top : top + 10, left : left + 20]
        box[values != 0] = values[values != 0]
        np.testing.assert_array_equal(painted.read(), expected)
        np.testing.assert_array_equal(painted.read_part((top, 39), (left, left + 3)), expected[top:39, left : left + 3])
        left += 15  # `write` also writes zeros
        painted.write(top, left, values)
        expected[top : top + 10, left : left + 20] = values
    np.testing.assert_array_equal(painted.read(), expected)
    for top, left in ((-1, 0), (0, -1), (31, 0), (0, 46)):
        with pytest.raises(ValueError, match="not in a map"):
            painted.write(top, left, np.ones((10, 20)))
    painted.close()


class _AlmostFullDisk(io.FileIO):
    """A file that takes a part of the bytes at a time, as a disk that is almost full, and then none."""

    room = 4 * pyramid_module.SQUARE_PX**2 + 300

    def write(self, content: Any) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = super().write(content[: min(self.room, 5000)])
        self.room -= count
        return count


def test_full_disk_is_an_error_of_the_map_that_is_written(tmp_path: Path) -> None:
    """Writing to a file that is mapped into memory would end the process (SIGBUS)."""
    map_file = MapFile(tmp_path / "map", (10, 20))
    map_file.close()
    map_file._file = _AlmostFullDisk(tmp_path / "map", "rb+")
    map_file.write(0, 0, np.full((3, 20), 7))
    np.testing.assert_array_equal(map_file.read(0, 4), np.repeat([7, 0], [60, 20]).reshape(4, 20))
    with pytest.raises(OSError, match="No space left"):
        map_file.write(3, 5, np.full((3, 10), 7))
    map_file.close()


@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.tuples(st.integers(1, 90), st.integers(1, 90)),
    step=st.integers(3, 60),
    corner=st.tuples(st.integers(0, 80), st.integers(0, 80)),
    seed=st.integers(0, 99),
)
def test_any_rectangle_of_a_stored_map_has_the_bits_that_were_written(
    size: tuple[int, int],
    step: int,
    corner: tuple[int, int],
    seed: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pyramid_module, "BLOCK_PX", 16)
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(3, *size)).astype(np.float32)
    mask = rng.integers(0, 4, (5, 7), dtype=np.uint8)
    with MapWriter(tmp_path / "map.zip") as writer:
        for top in range(0, size[0], step):
            for left in range(0, size[1], step):
                if rng.random() < 0.8:
                    writer.write(top, left, values[:, top : top + step, left : left + step])
                else:  # never written
                    values[:, top : top + step, left : left + step] = 0
        writer.describe({"model": "µ"}, mask)
    rows, columns = ((start, min(start + 40, side)) for start, side in zip(corner, size, strict=True))
    with StoredMap(tmp_path / "map.zip") as stored:
        assert stored.about == {"model": "µ"}
        assert np.array_equal(stored.mask, mask)
        if rows[0] < rows[1] and columns[0] < columns[1]:
            np.testing.assert_array_equal(
                stored.read(rows, columns, 3), values[:, rows[0] : rows[1], columns[0] : columns[1]]
            )


def test_any_overwritten_bytes_of_a_stored_map_are_harmless_or_refused(tmp_path: Path) -> None:
    with MapWriter(tmp_path / "map.zip") as writer:
        writer.describe({"a": 1}, np.ones((5, 5), np.uint8))
        writer.write(0, 0, np.ones((1, 4, 4), np.float32))
    content = (tmp_path / "map.zip").read_bytes()
    for start in range(0, len(content), 5):
        (tmp_path / "map.zip").write_bytes(content[:start] + b"\xff" * 4 + content[start + 4 :])
        with suppress(UnreadableFileError), StoredMap(tmp_path / "map.zip") as stored:
            stored.read((0, 4), (0, 4), 1)


def _to_npy(values: np.ndarray) -> bytes:
    with io.BytesIO() as content:
        np.save(content, values)
        return content.getvalue()


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"about.json": b"[]"}, "another type than expected"),
        ({"about.json": b"[" * 100_000}, "nested too deeply"),
        ({"about.json": bytes(2**21)}, "about.json is too large"),
        ({"mask.npy": _to_npy(np.ones((2, 2)))}, "another type than expected"),
        ({"mask.npy": bytes(2**20)}, "mask.npy is too large"),
        (
            {"mask.npy": _to_npy(np.ones(8, np.uint8)).replace(b"(8,), }" + b" " * 12, b"(8000000000000,), }")},
            "allocate",
        ),
        ({"0,0,3,4,99999999999999999999": b""}, "too large to convert"),
        ({"0,0,3,4,-4": b""}, "another type than expected"),
        ({"0,0,3,4,4096": b""}, "a block is larger than 512"),
        ({"0,0,1,4,4": zlib.compress(bytes(64))}, "a block has 1 channels instead of 3"),
        ({"0,0,3,4,4": zlib.compress(bytes(10**8))}, "cannot reshape"),
        ({"0,0,3,4,4": bytes(2**21)}, "0,0,3,4,4 is too large"),
        ({"0,0,3,4,4": b"xyz"}, "incorrect header"),
    ],
)
def test_stored_maps_of_strangers_are_refused_before_they_fill_the_memory(
    parts: dict[str, bytes], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pyramid_module, "MAX_MASK_BYTES", 2**19)
    with ZipFile(tmp_path / "map.zip", "w", ZIP_DEFLATED) as file:
        for name, content in ({"about.json": b"{}", "mask.npy": _to_npy(np.ones((2, 2), np.uint8))} | parts).items():
            file.writestr(name, content)
    sentence = f"is damaged .*{re.escape(message)}.*; predict the slide again"
    with pytest.raises(UnreadableFileError, match=sentence), StoredMap(tmp_path / "map.zip") as stored:
        stored.read((0, 4), (0, 4), 3)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no pipes in folders")
def test_a_pipe_in_place_of_a_stored_map_is_refused(tmp_path: Path) -> None:
    with pipe_at(tmp_path / "map.zip"), pytest.raises(UnreadableFileError, match=r"map\.zip is a pipe"):
        StoredMap(tmp_path / "map.zip")
