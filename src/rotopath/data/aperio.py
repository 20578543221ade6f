"""Aperio ImageScope annotations, as Kumar et al. and MoNuSeg publish them: outlines of nuclei in XML.

In: an XML file. Out: its spacing, polygons in pixels, and a label map painted from them; problems in sentences.
"""

from dataclasses import dataclass
from pathlib import Path
from xml.etree.ElementTree import Element, ParseError

import numpy as np
from numpy.typing import NDArray
from skimage.draw import polygon2mask

from rotopath.images.files import UnreadableFileError, is_plausible


class AnnotationError(UnreadableFileError):
    """An annotation file that cannot be used."""


@dataclass(frozen=True)
class Outline:
    region: str  # its Id in the file
    vertices: NDArray[np.float64]  # (k, 2): x to the right and y downwards, in pixels, whole numbers at their centres


def read_outlines(path: Path) -> tuple[Outline, ...]:
    """All outlines of the file, in its order; regions that ImageScope marks as holes are left out."""
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    try:
        root = defusedxml.ElementTree.parse(path).getroot()
    except FileNotFoundError:
        raise AnnotationError(path, "does not exist.") from None
    except ParseError as error:
        raise AnnotationError(path, f"is cut off or no XML ({error}); download or export it anew.") from None
    except DefusedXmlException as error:
        raise AnnotationError(
            path, f"holds XML entities ({type(error).__name__}), which annotations have no use for; it is not read."
        ) from None
    except OSError as error:
        raise AnnotationError(path, f"cannot be read ({error.strerror}).") from None
    except (ValueError, LookupError) as error:
        raise AnnotationError(path, f"is in an encoding that XML cannot have ({error}); save it as UTF-8.") from None
    if root is None or root.tag != "Annotations":
        found = "nothing" if root is None else f"<{root.tag}>"
        raise AnnotationError(path, f"is no Aperio annotation: it begins with {found}, not with <Annotations>.")
    regions = [region for region in root.iter("Region") if region.get("NegativeROA", "0") == "0"]
    return tuple(_outline(region, path) for region in regions)


def read_spacing_um_px(path: Path) -> float | None:
    """The spacing that the head of the file tells; None where it has none or cannot be read."""
    import defusedxml.ElementTree
    from defusedxml import DefusedXmlException

    try:
        with path.open("rb") as file:
            for _, root in defusedxml.ElementTree.iterparse(file, events=("start",)):
                spacing = _number(root, "MicronsPerPixel", path)
                return spacing if is_plausible(spacing) else None
    except (OSError, ParseError, DefusedXmlException, ValueError, LookupError):
        pass
    return None


def paint_labels(outlines: tuple[Outline, ...], height: int, width: int) -> tuple[NDArray[np.int32], list[str]]:
    """Object numbers (height, width), from 1 in the order of the outlines, and a sentence for each one left out.

    A pixel belongs to the outline that its centre lies in; where outlines overlap, the first one keeps it.
    """
    labels = np.zeros((height, width), np.int32)
    problems: list[str] = []
    number = 0
    for outline in outlines:
        if len(outline.vertices) < 3:
            problems.append(f"region {outline.region} has {len(outline.vertices)} vertices; an outline needs three.")
            continue
        if np.linalg.matrix_rank(outline.vertices - outline.vertices[0]) < 2:
            problems.append(f"region {outline.region} is a line or a point, without an area.")
            continue
        rows, columns = _pixels_inside(outline.vertices, height, width)
        free = labels[rows, columns] == 0
        if not len(rows):
            problems.append(f"region {outline.region} covers no pixel of the image.")
        elif not free.any():
            problems.append(f"region {outline.region} is hidden: others cover all of its pixels.")
        else:
            number += 1
            labels[rows[free], columns[free]] = number
    return labels, problems


def _outline(region: Element, path: Path) -> Outline:
    vertices = [(_number(vertex, "X", path), _number(vertex, "Y", path)) for vertex in region.iter("Vertex")]
    return Outline(region.get("Id", "?"), np.array(vertices, np.float64).reshape(-1, 2))


def _number(element: Element, attribute: str, path: Path) -> float:
    text = element.get(attribute, "")
    try:
        number = float(text)
    except ValueError:
        number = np.nan
    if not np.isfinite(number):
        raise AnnotationError(path, f"has {attribute}={text!r} in a <{element.tag}>, where a number is expected.")
    return number


def _pixels_inside(vertices: NDArray[np.float64], height: int, width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the pixels whose centres lie inside, by the even-odd rule."""
    left, top = np.floor(vertices.min(axis=0)).clip(0).astype(int)
    right, bottom = np.minimum(np.floor(vertices.max(axis=0)) + 1, (width, height)).astype(int)
    if right <= left or bottom <= top:
        return np.empty(0, np.intp), np.empty(0, np.intp)
    # Pixel centres at whole numbers: so XML and label maps of the same image agree.
    mask = polygon2mask((bottom - top, right - left), vertices[:, ::-1] - (top, left))  # type: ignore[no-untyped-call]
    rows, columns = np.nonzero(mask)
    return rows + top, columns + left
