"""Write minimal slides in the formats of three scanners, in DICOM, and in OME-Zarr."""

import io
import struct
from pathlib import Path

import numpy as np
import tifffile
from PIL import Image

TILE_PX = 256
SLIDE_ID = "0123456789ABCDEF"
WHOLE_SLIDE, JPEG_BASELINE = "1.2.840.10008.5.1.4.1.1.77.1.6", "1.2.840.10008.1.2.4.50"  # identifiers of DICOM
VOLUME = "ORIGINAL\\PRIMARY\\VOLUME\\NONE"


def write_svs(path: Path, image: np.ndarray, spacing_um_px: float = 0.25) -> Path:
    """Write an Aperio slide: tiled pages whose description states the scanner and the spacing."""
    with tifffile.TiffWriter(path) as tiff:
        for step in (1, 4, 16):
            tiff.write(
                _reduce(image, step),
                photometric="rgb",
                tile=(TILE_PX, TILE_PX),
                compression="adobe_deflate",
                description=f"Aperio Image Library v11.2.1\r\n|AppMag = 40|MPP = {spacing_um_px}",
                metadata=None,
            )
    return path


def write_ndpi(path: Path, image: np.ndarray, spacing_um_px: float = 0.25) -> Path:
    """Write a Hamamatsu slide: one JPEG page for each of three lenses. Tags from 65420 on identify the format."""
    with tifffile.TiffWriter(path) as tiff:
        for lens, step in ((40.0, 1), (10.0, 4), (2.5, 16)):
            page = _reduce(image, step)
            tags = [(65420, 4, 1, 1, True), (65421, 11, 1, lens, True)]
            tags += [(number, 9, 1, 0, True) for number in (65422, 65423, 65424)]  # offsets and focal depth
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
    """Write a MIRAX slide: the image on a larger stage of which nothing else was scanned.

    Tiles of each level cover twice as many pixels, along both axes, as those of the level before.
    """
    folder = path.with_suffix("")
    folder.mkdir()
    path.write_bytes(_jpeg(image[:8, :8]))
    tiles, pages = bytearray(), []
    for level in range(levels):
        step, reduced, page = 2**level, _reduce(image, 2**level), []
        for top in range(0, reduced.shape[0], TILE_PX):
            for left in range(0, reduced.shape[1], TILE_PX):
                row, column = first_tile[0] + top // TILE_PX * step, first_tile[1] + left // TILE_PX * step
                part = reduced[top : top + TILE_PX, left : left + TILE_PX]
                missing = [(0, TILE_PX - side) for side in part.shape[:2]]
                tile = _jpeg(np.pad(part, [*missing, (0, 0)], mode="edge"))
                page.append((row * stage_tiles[1] + column, len(tiles), len(tile), 0))
                tiles += tile
        pages.append(struct.pack("<2i", len(page), 0) + b"".join(struct.pack("<4i", *entry) for entry in page))
    (folder / "Data0000.dat").write_bytes(tiles)
    header = b"01.02" + SLIDE_ID.encode()
    table = len(header) + 8
    pointers, body, position = [], b"", table + 4 * levels
    for entries in pages:
        pointers.append(position)
        body += struct.pack("<2i", 0, position + 8) + entries
        position += 8 + len(entries)
    index = header + struct.pack("<2i", table, 0) + struct.pack(f"<{levels}i", *pointers) + body
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


def _reduce(image: np.ndarray, step: int) -> np.ndarray:
    """Return the image reduced by a whole factor; each pixel is a mean."""
    rows, columns = (side // step for side in image.shape[:2])
    squares = image[: rows * step, : columns * step].reshape(rows, step, columns, step, 3)
    return squares.mean(axis=(1, 3)).round().astype(image.dtype)


def _jpeg(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=95, subsampling=0)
    return file.getvalue()


def write_dicom(folder: Path, image: np.ndarray, series: str = "1.2.4", image_type: str = VOLUME) -> Path:
    """Write a whole-slide DICOM of 0.25 µm/px: one file in a folder for each of two levels.

    `series` identifies the slide. `image_type` is an attribute, which is left out if it is empty.
    """
    folder.mkdir(exist_ok=True)
    for number, step in enumerate((1, 4)):
        reduced = _reduce(image, step)
        rows, columns = reduced.shape[:2]
        sides = [(0, -side % TILE_PX) for side in (rows, columns)]
        padded = np.pad(reduced, [*sides, (0, 0)], mode="edge")
        frames = [
            _jpeg(padded[top : top + TILE_PX, left : left + TILE_PX])
            for top in range(0, rows, TILE_PX)
            for left in range(0, columns, TILE_PX)
        ]
        spacing_mm = f"{0.25e-3 * step:.6g}"
        measures = _item(_element(0x0028, 0x0030, "DS", f"{spacing_mm}\\{spacing_mm}"))
        head = _element(0x0002, 0x0002, "UI", WHOLE_SLIDE) + _element(0x0002, 0x0003, "UI", f"{series}.{number}")
        head += _element(0x0002, 0x0010, "UI", JPEG_BASELINE)
        elements = [
            _element(0x0008, 0x0008, "CS", image_type) if image_type else b"",
            _element(0x0008, 0x0016, "UI", WHOLE_SLIDE),
            _element(0x0008, 0x0018, "UI", f"{series}.{number}"),
            _element(0x0020, 0x000E, "UI", series),
            _element(0x0020, 0x9311, "CS", "TILED_FULL"),
            _element(0x0028, 0x0002, "US", struct.pack("<H", 3)),
            _element(0x0028, 0x0004, "CS", "YBR_FULL_422"),
            _element(0x0028, 0x0006, "US", struct.pack("<H", 0)),
            _element(0x0028, 0x0008, "IS", str(len(frames))),
            *(_element(0x0028, tag, "US", struct.pack("<H", TILE_PX)) for tag in (0x0010, 0x0011)),
            *(_element(0x0028, tag, "US", struct.pack("<H", bits)) for tag, bits in ((0x0100, 8), (0x0101, 8))),
            *(_element(0x0028, tag, "US", struct.pack("<H", bits)) for tag, bits in ((0x0102, 7), (0x0103, 0))),
            *(_element(0x0048, tag, "UL", struct.pack("<I", side)) for tag, side in ((6, columns), (7, rows))),
            _element(0x5200, 0x9229, "SQ", _item(_element(0x0028, 0x9110, "SQ", measures))),
            struct.pack("<HH2sHI", 0x7FE0, 0x0010, b"OB", 0, 0xFFFFFFFF),
            *(_item(frame + b"\0" * (len(frame) % 2)) for frame in (b"", *frames)),
            struct.pack("<HHI", 0xFFFE, 0xE0DD, 0),
        ]
        head = _element(0x0002, 0x0000, "UL", struct.pack("<I", len(head))) + head
        (folder / f"{series}-{number}.dcm").write_bytes(bytes(128) + b"DICM" + head + b"".join(elements))
    return folder


def write_ome_zarr(
    folder: Path,
    image: np.ndarray,
    version: str = "0.5",
    channels: tuple[tuple[str, str], ...] = (),
    unit: str | None = "micrometer",
) -> Path:
    """Write an OME-Zarr image (H, W, C) of 0.25 µm/px, with three levels.

    The axes are c, y and x or, in version 0.4, all five, as bioformats2raw writes them. `channels` are the names and
    colors of the channels.
    """
    import zarr

    has_all_axes = version == "0.4"
    root = zarr.open_group(folder, mode="w", zarr_format=3 if version == "0.5" else 2)
    datasets = []
    for level, step in enumerate((1, 2, 4)):
        pixels = np.moveaxis(_reduce(image, step), 2, 0)
        pixels, chunks = (pixels[None, :, None], (1, 1, 1, 100, 100)) if has_all_axes else (pixels, (1, 100, 100))
        root.create_array(str(level), data=pixels, chunks=chunks)
        scale = {"type": "scale", "scale": [1] * (pixels.ndim - 2) + [0.25 * step] * 2}
        datasets.append({"path": str(level), "coordinateTransformations": [scale]})
    space = {"type": "space"} | ({} if unit is None else {"unit": unit})
    axes = [{"name": "c", "type": "channel"}, {"name": "y", **space}, {"name": "x", **space}]
    if has_all_axes:
        axes = [{"name": "t", "type": "time"}, axes[0], {"name": "z", "type": "space"}, *axes[1:]]
    ome = {"version": version, "multiscales": [{"axes": axes, "datasets": datasets}]}
    if channels:
        ome["omero"] = {"channels": [{"label": label, "color": color} for label, color in channels]}
    root.attrs.update({"ome": ome} if version == "0.5" else ome)
    return folder


def _element(group: int, tag: int, kind: str, value: str | bytes) -> bytes:
    """Return an element of a DICOM file: little-endian, with an explicit data type."""
    content = value if isinstance(value, bytes) else value.encode()
    content += (b"\0" if kind == "UI" else b" ") * (len(content) % 2)
    length = struct.pack("<HI", 0, len(content)) if kind == "SQ" else struct.pack("<H", len(content))
    return struct.pack("<HH2s", group, tag, kind.encode()) + length + content


def _item(content: bytes) -> bytes:
    return struct.pack("<HHI", 0xFFFE, 0xE000, len(content)) + content
