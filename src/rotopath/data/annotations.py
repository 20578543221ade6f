"""Annotations of objects inside images: the places of mitoses, and maps of nuclei.

In: a picture and the spacing at which its objects are wanted. Out: points (row, column) in pixels, or a label map, and
sentences about what the file says that cannot be.
"""

import csv
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath.data.aperio import AnnotationError, paint_labels, read_outlines
from rotopath.data.collection import Picture, scale
from rotopath.images.files import image_size_px, read_labels


def read_points(picture: Picture, spacing_um_px: float) -> NDArray[np.float64]:
    """The objects' places (k, 2) as rows and columns, whole numbers at the centres of pixels; none without a file."""
    points, faults = parse_points(picture)
    if faults:
        raise AnnotationError(picture.annotations[0], f"cannot be used: {faults[0]}")
    return (points + 0.5) * scale(picture, spacing_um_px) - 0.5


def parse_points(picture: Picture) -> tuple[NDArray[np.float64], list[str]]:
    """All places in the file that are good, and a sentence for each line that is not."""
    points: list[tuple[float, float]] = []
    faults: list[str] = []
    if not picture.annotations:
        return np.empty((0, 2)), faults
    height, width = image_size_px(picture.path)
    for number, line in enumerate(_csv_lines(picture.annotations[0]), 1):
        if not any(cell.strip() for cell in line):
            continue
        try:
            row, column = (float(cell) for cell in line[:2])
        except ValueError:
            faults.append(f"line {number} is {','.join(line)!r}, where a row and a column in pixels are expected.")
            continue
        if 0 <= row < height and 0 <= column < width:
            points.append((row, column))
        else:
            faults.append(
                f"line {number} places an object at row {row:g}, column {column:g}, outside of the image of "
                f"{height} × {width} px (rows come first)."
            )
    return np.array(points, np.float64).reshape(-1, 2), faults


def read_nuclei(picture: Picture, spacing_um_px: float) -> NDArray[np.int32]:
    """The label map (H, W) of a picture's nuclei, 0 for background, from a map or from outlines."""
    labels, _ = parse_nuclei(picture, picture.annotations[0])
    factor = scale(picture, spacing_um_px)
    if factor == 1:
        return labels
    height, width = (max(1, round(side * factor)) for side in labels.shape)
    return np.array(Image.fromarray(labels).resize((width, height), Image.Resampling.NEAREST))


def parse_nuclei(picture: Picture, annotation: Path) -> tuple[NDArray[np.int32], list[str]]:
    """The label map at the picture's own spacing, and a sentence for each outline that was left out."""
    height, width = image_size_px(picture.path)
    if annotation.suffix.lower() == ".xml":
        return paint_labels(read_outlines(annotation), height, width)
    labels = read_labels(annotation)
    if labels.shape != (height, width):
        raise AnnotationError(
            annotation,
            f"is a map of {labels.shape[0]} × {labels.shape[1]} px, but its image has {height} × {width} px.",
        )
    return labels, []


def _csv_lines(path: Path) -> list[list[str]]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return list(csv.reader(file))
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except OSError as error:
        raise AnnotationError(path, f"cannot be read ({error.strerror}).") from None
    except (UnicodeDecodeError, csv.Error):
        raise AnnotationError(path, "is no text, where lines of `row,column` are expected.") from None
