"""Read objects from pixels: label maps, masks of classes, the `.mat` files of HoVer-Net, and run lengths of COCO.

Objects become outlines that cover exactly their pixels.
"""

import math
import struct
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rotopath.data.annotations import AnnotationError
from rotopath.images.files import expect_file, open_image, read_labels, read_rgb
from rotopath.images.geojson import MAX_COORDINATE_PX, SlideObject
from rotopath.images.outlines import Point, trace_outlines

MaskKind = Literal["objects", "binary", "classes"]
MASK_KINDS: tuple[MaskKind, ...] = ("objects", "binary", "classes")
MAX_CLASSES = 32  # an image with more colors is not a mask of classes
PARTS_PER_NUMBER = 2  # if few numbers have more parts than this on average, they are not numbers of objects
MAX_MAT_ELEMENTS, MAX_MAT_BYTES = 2**28, 2**31
# Numbers in MATLAB files of version 5 to 7.2, from MathWorks' description of the format
MAT_HEADER = 128  # bytes
MAT_BYTE_ORDERS = {b"\x00\x01IM": "<", b"\x01\x00MI": ">"}  # by the end of the header
MAT_MATRIX, MAT_COMPRESSED, MAT_COMPLEX = 14, 15, 0x800
MAT_NUMBERS = range(6, 16)  # classes of arrays of numbers; others are text, structures, ...
MAT_TYPES = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
MAX_MASK_PX = 2**30
MAX_RUN_BITS = 40
ALL_NEIGHBORS = np.ones((3, 3), int)  # pixels are connected by sides and by corners


class MaskObjects(NamedTuple):
    """The objects of a mask, and its size."""

    objects: list[SlideObject]
    size_px: tuple[int, int] | None  # height and width; None for points


def read_mask(path: Path, kind: MaskKind | None, classes: Mapping[int, str] | None = None) -> MaskObjects:
    """Read the objects of a mask.

    `kind` states what a number in the mask is: the number of an object ("objects"), or of a class whose connected parts
    are objects ("classes"). In a "binary" mask, connected parts of all pixels above 0 are objects. In RGB images, each
    color is a class. `classes` maps the object numbers of a label map to class names. Raises AnnotationError if the
    numbers do not look like numbers of objects and `kind` is None.
    """
    if path.suffix.lower() in (".jpg", ".jpeg"):
        raise AnnotationError(path, "is a mask in JPEG format, which changes numbers and colors; save it as PNG.")
    colors = _read_colors(path)
    if colors is not None:
        return MaskObjects(_split_classes(*colors), (colors[0].shape[0], colors[0].shape[1]))
    labels = _read_numbers(path)
    size_px = labels.shape[0], labels.shape[1]
    if kind is None and not classes:
        _expect_objects(path, labels)
    if kind == "binary":
        labels = ndimage.label(labels > 0, ALL_NEIGHBORS)[0].astype(np.int32)
    if kind == "classes":
        numbers = np.unique(labels[labels > 0]).tolist()
        return MaskObjects(_split_classes(labels, {number: (str(number), None) for number in numbers}), size_px)
    present = np.unique(labels[labels > 0]).tolist()
    if classes and (missing := [number for number in present if number not in classes]):
        raise AnnotationError(path, f"contains the object {missing[0]}, which has no class; list every object.")
    names = classes or {}
    outlines = trace_outlines(labels)
    objects = [SlideObject(outlines[number], "annotation", names.get(number, "")) for number in present]
    return MaskObjects(objects, size_px)


def _read_numbers(path: Path) -> NDArray[np.int32]:
    """Read the numbers (H, W) of a mask: a gray image, a palette image, or an image of one bit."""
    with open_image(path) as image:
        if image.mode in ("1", "P"):
            return np.array(image).astype(np.int32)
    return read_labels(path)


def _read_colors(path: Path) -> tuple[NDArray[np.int32], dict[int, tuple[str, tuple[int, int, int] | None]]] | None:
    """Return a map of class numbers of an RGB mask, and the name and the color of each number; None for a gray image.

    The name of a class is its color, such as "#ff0000". Black is the background, or white if no pixel is black.
    """
    with open_image(path) as image:
        if len(image.getbands()) < 3:
            return None
    pixels = read_rgb(path).astype(np.int32)
    codes = pixels[..., 0] << 16 | pixels[..., 1] << 8 | pixels[..., 2]
    present = np.unique(codes)
    if len(present) > MAX_CLASSES:
        raise AnnotationError(
            path,
            f"has {len(present)} colors; expected a mask with at most {MAX_CLASSES} colors, one for each class, or a "
            f"gray label map of object numbers.",
        )
    background = 0 if 0 in present else 0xFFFFFF
    numbers = {code: number for number, code in enumerate((code for code in present.tolist() if code != background), 1)}
    labels = np.zeros(codes.shape, np.int32)
    for code, number in numbers.items():
        labels[codes == code] = number
    return labels, {
        number: (f"#{code:06x}", (code >> 16, code >> 8 & 255, code & 255)) for code, number in numbers.items()
    }


def _split_classes(
    labels: NDArray[np.int32], classes: Mapping[int, tuple[str, tuple[int, int, int] | None]]
) -> list[SlideObject]:
    """Return the connected parts of each class as objects. `classes` has the name and the color of each number."""
    objects = []
    for number, (name, color) in classes.items():
        parts = ndimage.label(labels == number, ALL_NEIGHBORS)[0]
        objects += [SlideObject(outline, "annotation", name, color) for outline in trace_outlines(parts).values()]
    return objects


def _expect_objects(path: Path, labels: NDArray[np.int32]) -> None:
    """Raise AnnotationError if the numbers in a mask do not look like numbers of objects."""
    numbers = np.unique(labels[labels > 0])
    if not 0 < len(numbers) <= MAX_CLASSES:
        return
    parts = sum(ndimage.label(labels == number, ALL_NEIGHBORS)[1] for number in numbers)
    if parts > PARTS_PER_NUMBER * len(numbers):
        one = "the number " + str(numbers[0]) if len(numbers) == 1 else f"{len(numbers)} different numbers"
        likely = "binary" if len(numbers) == 1 else "classes"
        raise AnnotationError(
            path,
            f"contains only {one} in {parts} separate parts; state what they are: --masks {likely} if each part is an "
            f"object{'' if likely == 'binary' else ' and each number a class'}, or --masks objects if each number is "
            f"one object.",
        )


# HoVer-Net


def read_mat(path: Path) -> MaskObjects:
    """Read the objects of a `.mat` file of HoVer-Net.

    The file contains `inst_map` (H, W), a label map; or `inst_centroid` (n, 2), the columns and rows of points. Classes
    are numbers: `inst_type` (n,), in the order of the object numbers, or `type_map` (H, W).
    """
    arrays = _read_mat_arrays(path, ("inst_map", "type_map", "inst_type", "inst_centroid"))
    types = arrays["inst_type"].ravel() if "inst_type" in arrays else None
    if any(name in arrays and not np.isfinite(arrays[name]).all() for name in ("inst_type", "type_map")):
        raise AnnotationError(path, "has a class that is NaN or infinite; save it again.")
    if "inst_map" not in arrays:
        if "inst_centroid" not in arrays:
            raise AnnotationError(
                path, "contains neither `inst_map` nor `inst_centroid`; expected a file of HoVer-Net."
            )
        positions = arrays["inst_centroid"].reshape(-1, 2).astype(np.float64)
        names = [""] * len(positions) if types is None else [str(int(number)) for number in types]
        if len(names) != len(positions) or not (np.abs(positions) < MAX_COORDINATE_PX).all():
            raise AnnotationError(path, "has an `inst_centroid` that does not fit its `inst_type`; save it again.")
        points = (Point(float(y) + 0.5, float(x) + 0.5) for x, y in positions)
        named = zip(points, names, strict=True)
        return MaskObjects([SlideObject(point, "annotation", name) for point, name in named], None)
    values = arrays["inst_map"]
    largest = np.iinfo(np.int32).max
    if values.ndim != 2 or not ((values >= 0).all() and (values <= largest).all() and (values == values.round()).all()):
        raise AnnotationError(
            path, f"has an `inst_map` that is not a label map of whole numbers from 0 to {largest}; save it again."
        )
    labels = values.astype(np.int32)
    numbers = np.unique(labels[labels > 0])
    if types is not None and len(types) == len(numbers):
        names = [str(int(number)) for number in types]
    elif "type_map" in arrays and arrays["type_map"].shape == labels.shape:
        names = []
        for number in numbers:
            present, counts = np.unique(arrays["type_map"][labels == number], return_counts=True)
            names.append(str(int(present[counts.argmax()])))
    elif types is None:
        names = [""] * len(numbers)
    else:
        raise AnnotationError(
            path, f"has {len(types)} classes in `inst_type` for {len(numbers)} objects in `inst_map`; save it again."
        )
    outlines = trace_outlines(labels)
    pairs = zip(numbers.tolist(), names, strict=True)
    objects = [SlideObject(outlines[number], "annotation", name) for number, name in pairs]
    return MaskObjects(objects, (labels.shape[0], labels.shape[1]))


def _read_mat_arrays(path: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers from a MATLAB file. Arrays of any other type are refused, and other names are not read."""
    expect_file(path)
    try:
        with path.open("rb") as file:
            header, is_hdf5 = file.read(MAT_HEADER), False
            if header[:4] == b"\x89HDF" or header[124:128] in (b"\x00\x02IM", b"\x02\x00MI"):  # MATLAB 7.3
                is_hdf5 = True
            elif header[124:128] not in MAT_BYTE_ORDERS:
                raise ValueError("its header is not that of a MATLAB file of version 5 to 7.3")
            else:
                found = dict(_read_mat_variables(file, MAT_BYTE_ORDERS[header[124:128]], names))
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except (OSError, ValueError, zlib.error, struct.error) as error:
        raise AnnotationError(path, f"is damaged or not a MATLAB file ({error}); save it again.") from None
    if is_hdf5:
        found = _read_hdf5_arrays(path, names)
    if wrong := [name for name, values in found.items() if values.dtype.kind not in "uifb"]:
        raise AnnotationError(path, f"has an array `{wrong[0]}` of type {found[wrong[0]].dtype}; expected numbers.")
    if large := [name for name, values in found.items() if values.size > MAX_MAT_ELEMENTS]:
        raise AnnotationError(path, f"has an array `{large[0]}` of more than {MAX_MAT_ELEMENTS} numbers.")
    return found


def _read_mat_variables(file: BinaryIO, order: str, names: Collection[str]) -> Iterator[tuple[str, NDArray[Any]]]:
    """Yield the names and values of the variables of a MATLAB file of version 5 to 7.2 that are in `names`.

    `file` is at the end of the header, and `order` is its byte order, "<" or ">". Variables that are not arrays of real
    numbers are yielded as an empty array of type object. Raises ValueError, zlib.error or struct.error if the file is
    damaged. SciPy's reader is not used, because damaged bytes can end the process in it.
    """
    while tag := file.read(8):
        kind, size = struct.unpack(order + "II", tag)
        content = file.read(min(size, MAX_MAT_BYTES))
        if len(content) < size:
            raise ValueError("it is cut off")
        if kind == MAT_COMPRESSED:
            unpacker = zlib.decompressobj()
            content = unpacker.decompress(content, MAX_MAT_BYTES)
            if unpacker.unconsumed_tail:
                raise ValueError(f"a variable has more than {MAX_MAT_BYTES >> 20} MB")
            if not unpacker.eof:
                raise ValueError("it is cut off")
            kind, size = struct.unpack_from(order + "II", content)
            content = content[8 : 8 + size]
        if kind != MAT_MATRIX:
            raise ValueError("it contains something that is not a variable")
        elements = _read_mat_elements(content, order)
        flags, shape, name = (next(elements, (0, b""))[1] for _ in range(3))
        if (text := name.decode("latin-1")) not in names:
            continue
        (flag,) = struct.unpack_from(order + "I", flags)
        if flag & 0xFF not in MAT_NUMBERS or flag & MAT_COMPLEX:
            yield text, np.empty(0, object)
            continue
        stored, values = next(elements, (0, b""))
        if stored not in MAT_TYPES:
            raise ValueError(f"its array {text} has numbers of an unknown type")
        sizes = np.frombuffer(shape, order + "i4").tolist()
        array = np.frombuffer(values, order + MAT_TYPES[stored])
        if min(sizes, default=-1) < 0 or math.prod(sizes) != len(array):
            raise ValueError(f"its array {text} has {len(array)} numbers for the shape {sizes}")
        yield text, array.reshape(sizes, order="F").astype(MAT_TYPES[stored])


def _read_mat_elements(content: bytes, order: str) -> Iterator[tuple[int, bytes]]:
    """Yield the types and bytes of the parts of a variable. Raises ValueError if the last one is cut off."""
    position = 0
    while position < len(content):
        kind, size = struct.unpack_from(order + "II", content, position)
        if kind >> 16:  # a small part: size and type have 16 bits each, and the bytes take the place of the size
            kind, size, begin, after = kind & 0xFFFF, kind >> 16, position + 4, position + 8
        else:
            begin, after = position + 8, position + 8 + -(-size // 8) * 8  # the next part begins at a multiple of 8
        if begin + size > min(after, len(content)):
            raise ValueError("a part of it is cut off")
        yield kind, content[begin : begin + size]
        position = after


def _read_hdf5_arrays(path: Path, names: Collection[str]) -> dict[str, NDArray[Any]]:
    """Read arrays of numbers from an HDF5 file of MATLAB, which stores columns before rows."""
    import h5py

    try:
        with h5py.File(path, "r") as file:
            present = {name: file[name] for name in names if isinstance(file.get(name), h5py.Dataset)}
            return {
                name: array[()].T
                for name, array in present.items()
                if array.dtype.kind in "uifb" and array.size <= MAX_MAT_ELEMENTS
            }
    except OSError as error:
        raise AnnotationError(path, f"is damaged ({error}); save it again.") from None


# Run lengths of COCO


def decode_runs(counts: str | Sequence[int], height: int, width: int) -> tuple[NDArray[np.int32], tuple[int, int]]:
    """Decode a mask in COCO's run lengths: lengths of runs of 0 and 1 in turn, column by column.

    `counts` is a list, or a string in the compressed form of pycocotools. Returns the smallest part of the mask that
    contains all pixels, and the row and column of its upper left pixel. Raises ValueError if the mask is invalid.
    """
    if not (isinstance(height, int) and isinstance(width, int) and 0 < height * width <= MAX_MASK_PX):
        raise ValueError(f"its mask has an implausible size of {height} × {width} px")
    try:
        lengths = np.array(_decompress(counts) if isinstance(counts, str) else counts, np.int64)
    except OverflowError:
        raise ValueError("its run lengths contain a number that is too large") from None
    if (lengths < 0).any() or lengths.sum() != height * width:
        raise ValueError(f"its run lengths do not add up to the {height * width} px of its mask")
    ends = np.cumsum(lengths)[1::2]
    starts = ends - lengths[1::2]
    is_run = ends > starts
    starts, ends = starts[is_run], ends[is_run]
    if not len(starts):
        raise ValueError("its mask is empty")
    left, right = int(starts[0]) // height, (int(ends[-1]) - 1) // height + 1
    changes = np.zeros((right - left) * height + 1, np.int32)
    np.add.at(changes, starts - left * height, 1)
    np.add.at(changes, ends - left * height, -1)
    mask = np.cumsum(changes[:-1], dtype=np.int32).reshape(right - left, height).T
    rows = np.flatnonzero(mask.any(axis=1))
    return np.ascontiguousarray(mask[rows[0] : rows[-1] + 1]), (int(rows[0]), left)


def encode_runs(mask: NDArray[np.bool_]) -> list[int]:
    """Return the run lengths of a mask (H, W), as `decode_runs` reads them."""
    pixels = np.concatenate([[False], mask.T.ravel(), [not mask.T.ravel()[-1]]])
    ends = np.flatnonzero(pixels[1:] != pixels[:-1])
    return [int(length) for length in np.diff(ends, prepend=0)]


def _decompress(text: str) -> list[int]:
    """Return the run lengths in the compressed form of pycocotools.

    Each letter holds 5 bits of a number, the lowest first, and whether another letter follows. From the fourth on,
    numbers are differences to the length two before.
    """
    lengths: list[int] = []
    value = bits = 0
    for letter in text:
        code = ord(letter) - 48
        if not 0 <= code < 64:
            raise ValueError("its run lengths contain a letter that is not allowed")
        value |= (code & 31) << bits
        bits += 5
        if code & 32:
            if bits > MAX_RUN_BITS:
                raise ValueError("its run lengths contain a number that is too large")
            continue
        if code & 16:
            value -= 1 << bits
        lengths.append(value + (lengths[-2] if len(lengths) > 2 else 0))
        value = bits = 0
    return lengths
