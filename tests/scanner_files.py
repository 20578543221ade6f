"""Slides in the formats of three scanners, as small as they may be: Aperio, Hamamatsu, and MIRAX on a stage."""

import io
import struct
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

TILE_PX = 256
SLIDE_ID = "0123456789ABCDEF"


def write_svs(path: Path, image: np.ndarray, spacing_um_px: float = 0.25) -> Path:
    """Tiled pages, of which the description tells the scanner and the spacing."""
    with tifffile.TiffWriter(path) as tiff:
        for step in (1, 4, 16):
            tiff.write(
                _shrink(image, step),
                photometric="rgb",
                tile=(TILE_PX, TILE_PX),
                compression="adobe_deflate",
                description=f"Aperio Image Library v11.2.1\r\n|AppMag = 40|MPP = {spacing_um_px}",
                metadata=None,
            )
    return path


def write_ndpi(path: Path, image: np.ndarray, spacing_um_px: float = 0.25) -> Path:
    """A page for each of three lenses, of one JPEG each; tags beyond 65420 tell them from those of other files."""
    with tifffile.TiffWriter(path) as tiff:
        for lens, step in ((40.0, 1), (10.0, 4), (2.5, 16)):
            page = _shrink(image, step)
            tags = [(65420, 4, 1, 1, True), (65421, 11, 1, lens, True)]
            tags += [(number, 9, 1, 0, True) for number in (65422, 65423, 65424)]  # where it lies, and how deep
            tiff.write(
                iter([_jpeg(page)]),
                shape=page.shape,
                dtype=np.uint8,
                photometric="ycbcr",
                subsampling=(1, 1),
                compression="jpeg",
                rowsperstrip=page.shape[0],
                resolution=(1e4 / (spacing_um_px * step),) * 2,
                resolutionunit="CENTIMETER",
                metadata=None,
                extratags=tags,
            )
    return path


def write_mirax(
    path: Path,
    image: np.ndarray,
    stage_tiles: tuple[int, int],
    first_tile: tuple[int, int],
    spacing_um_px: float = 0.25,
    levels: int = 3,
) -> Path:
    """The image on a stage that was scanned nowhere else. Tiles of a level cover twice as many pixels as before."""
    folder = path.with_suffix("")
    folder.mkdir()
    path.write_bytes(_jpeg(image[:8, :8]))
    tiles, pages = bytearray(), []
    for level in range(levels):
        step, shrunk, page = 2**level, _shrink(image, 2**level), []
        for top in range(0, shrunk.shape[0], TILE_PX):
            for left in range(0, shrunk.shape[1], TILE_PX):
                row, column = (first + at // TILE_PX * step for first, at in zip(first_tile, (top, left), strict=True))
                part = shrunk[top : top + TILE_PX, left : left + TILE_PX]
                missing = [(0, TILE_PX - side) for side in part.shape[:2]]
                tile = _jpeg(np.pad(part, [*missing, (0, 0)], mode="edge"))
                page.append((row * stage_tiles[1] + column, len(tiles), len(tile), 0))
                tiles += tile
        pages.append(struct.pack("<2i", len(page), 0) + b"".join(struct.pack("<4i", *entry) for entry in page))
    (folder / "Data0000.dat").write_bytes(tiles)
    head = b"01.02" + SLIDE_ID.encode()
    table = len(head) + 8
    pointers, body, at = [], b"", table + 4 * levels
    for listed in pages:
        pointers.append(at)
        body += struct.pack("<2i", 0, at + 8) + listed
        at += 8 + len(listed)
    index = head + struct.pack("<2i", table, 0) + struct.pack(f"<{levels}i", *pointers) + body
    (folder / "Index.dat").write_bytes(index)
    sections = {
        "GENERAL": {
            "SLIDE_VERSION": "01.02",
            "SLIDE_ID": SLIDE_ID,
            "IMAGENUMBER_X": stage_tiles[1],
            "IMAGENUMBER_Y": stage_tiles[0],
            "OBJECTIVE_MAGNIFICATION": 40,
        },
        "HIERARCHICAL": {
            "HIER_COUNT": 1,
            "NONHIER_COUNT": 0,
            "INDEXFILE": "Index.dat",
            "HIER_0_NAME": "Slide zoom level",
            "HIER_0_COUNT": levels,
            **{f"HIER_0_VAL_{level}_SECTION": f"LEVEL_{level}" for level in range(levels)},
        },
        "DATAFILE": {"FILE_COUNT": 1, "FILE_0": "Data0000.dat"},
    }
    for level in range(levels):
        sections[f"LEVEL_{level}"] = {
            "OVERLAP_X": 0,
            "OVERLAP_Y": 0,
            "MICROMETER_PER_PIXEL_X": spacing_um_px * 2**level,
            "MICROMETER_PER_PIXEL_Y": spacing_um_px * 2**level,
            "IMAGE_FORMAT": "JPEG",
            "IMAGE_FILL_COLOR_BGR": 0xFFFFFF,
            "DIGITIZER_WIDTH": TILE_PX,
            "DIGITIZER_HEIGHT": TILE_PX,
            "IMAGE_CONCAT_FACTOR": min(level, 1),
        }
    lines = [
        line for name, keys in sections.items() for line in (f"[{name}]", *(f"{k} = {v}" for k, v in keys.items()))
    ]
    (folder / "Slidedat.ini").write_text("\n".join(lines) + "\n")
    return path


def _shrink(image: np.ndarray, step: int) -> np.ndarray:
    rows, columns = (side // step for side in image.shape[:2])
    parts = image[: rows * step, : columns * step].reshape(rows, step, columns, step, 3)
    return parts.mean(axis=(1, 3)).round().astype(np.uint8)


def _jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()
