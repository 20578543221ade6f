"""Draw predictions on images: a heat map and objects on a slide, or an orientation field on an image.

`draw_overlay` returns a reduced image of a slide that fits on a screen, and `draw_warnings` writes warnings on it. An
orientation field is a strength and an angle at each pixel, for example of fibers. `draw_orientations` returns an
enlarged image on which short lines (strokes) show an orientation field.
"""

import colorsys
import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from rotopath import group
from rotopath.images.geojson import Point, SlideObject
from rotopath.images.slides import Slide

MAX_OVERLAY_PX = 1600  # maximum length of the longer side of an overlay
MAX_HEAT_OPACITY = 0.55  # opacity of the color where the heat map is 1
MAX_OUTLINE_UM_PX = 2.0  # at coarser pixel spacings, outlines of detections are not drawn: they would be only dots
RING_RADIUS_UM, MIN_RING_RADIUS_PX = 15.0, 7  # radius of the rings around points, and its minimum on the overlay
MAX_DRAWN = 20_000  # maximum number of objects that are drawn
WARNING_COLOR = (176, 0, 32)
NOT_IN_FONT = str.maketrans({"µ": "u", "²": "2"})  # Pillow's font does not have these letters
MIN_FONT_PX, FONTS_PER_WIDTH = 11, 60  # the height of letters is the width of the image / 60, but at least 11 px

ORIENTATION_SCALE = 4  # `draw_orientations` enlarges the image by this factor
SUPERSAMPLING = 2  # strokes are drawn larger by this factor and then reduced, for smooth lines
MIN_STROKE = 0.3  # strokes shorter than this fraction of the longest stroke are not drawn
SATURATION = 0.45  # the color saturation of the image is reduced to this fraction, so that strokes stand out


# Heat maps and objects


def draw_overlay(
    slide: Slide,
    heat: NDArray[np.float32],
    top_class: NDArray[np.float32] | None,
    heat_frame: tuple[tuple[float, float], float],
    colors: Sequence[tuple[int, int, int]],
    objects: Iterable[SlideObject],
) -> Image.Image:
    """Draw a heat map and objects on a slide, and return the image, reduced to fit on a screen.

    `heat` (rows, columns) is the heat map, a probability at each pixel. The higher the probability, the more opaque is
    the color of the pixel. `heat_frame` is the upper left corner (row, column) of the heat map and the side of a
    heat-map pixel, both in pixels of level 0. `colors` has the color (red, green, blue) of each class. `top_class`
    (rows, columns) is the index of the most probable class at each pixel of the heat map. If `top_class` is None, the
    whole heat map has the first color. Objects without a color also have the first color. Only the first `MAX_DRAWN`
    objects are drawn.
    """
    spacing = max(slide.spacing_um_px, max(slide.size_px) * slide.spacing_um_px / MAX_OVERLAY_PX)
    height, width = slide.size_at(spacing)
    scale = slide.spacing_um_px / spacing  # side of a pixel of level 0, in pixels of the overlay
    overlay = Image.fromarray(slide.read(0, 0, height, width, spacing))
    (top, left), side = heat_frame
    step = 1 / (scale * side)
    to_heat = (step, 0.0, -left / side, 0.0, step, -top / side)  # from (x, y) on the overlay to the heat map
    opacity = Image.fromarray(heat * np.float32(255 * MAX_HEAT_OPACITY)).transform(
        overlay.size, Image.Transform.AFFINE, to_heat, Image.Resampling.BILINEAR
    )
    color = Image.new("RGB", overlay.size, colors[0])
    if top_class is not None:
        class_colors = np.array(colors, np.uint8)[top_class.astype(np.int64)]
        color = Image.fromarray(class_colors).transform(
            overlay.size, Image.Transform.AFFINE, to_heat, Image.Resampling.NEAREST
        )
    overlay.paste(color, mask=opacity.convert("L"))
    pen = ImageDraw.Draw(overlay)
    for _, item in zip(range(MAX_DRAWN), objects, strict=False):
        _draw_object(pen, item, item.color or colors[0], scale, spacing)
    return overlay


def draw_warnings(overlay: Image.Image, warnings: Sequence[str]) -> Image.Image:
    """Return an overlay with a red frame and, at its top, the given warnings. Without warnings, return it unchanged.

    The size of the image does not change, so that positions on it stay the same.
    """
    if not warnings:
        return overlay
    marked = overlay.copy()
    pen = ImageDraw.Draw(marked)
    size_px = max(MIN_FONT_PX, overlay.width // FONTS_PER_WIDTH)
    font = ImageFont.load_default(size_px)
    line_px = math.ceil(1.3 * size_px)
    letters = max(10, int((overlay.width - 2 * size_px) / font.getlength("n")))
    texts = [f"Warning: {warning}".translate(NOT_IN_FONT) for warning in warnings]
    lines = [line for text in texts for line in textwrap.wrap(text, letters)]
    pen.rectangle((0, 0, overlay.width, line_px * len(lines) + size_px), fill=WARNING_COLOR)
    for number, line in enumerate(lines):
        pen.text((size_px, size_px // 2 + number * line_px), line, fill="white", font=font)
    pen.rectangle((0, 0, overlay.width - 1, overlay.height - 1), outline=WARNING_COLOR, width=max(2, size_px // 3))
    return marked


def _draw_object(
    pen: ImageDraw.ImageDraw, item: SlideObject, color: tuple[int, int, int], scale: float, spacing_um_px: float
) -> None:
    """Draw an object on the overlay: a ring around its position if the object is a point, otherwise its outline.

    Outlines of detections are drawn only if `spacing_um_px`, the pixel spacing of the overlay, is at most
    `MAX_OUTLINE_UM_PX`. `scale` is the side of a pixel of level 0, in pixels of the overlay.
    """
    if isinstance(item.shape, Point):
        row, column = item.shape.row * scale, item.shape.column * scale
        radius = max(MIN_RING_RADIUS_PX, RING_RADIUS_UM / spacing_um_px)
        pen.ellipse((column - radius, row - radius, column + radius, row + radius), outline=color, width=2)
    elif item.kind == "annotation" or spacing_um_px <= MAX_OUTLINE_UM_PX:
        for polygon in item.shape:
            for ring in polygon.rings:
                vertices = [(float(x), float(y)) for y, x in ring * scale]
                pen.line([*vertices, vertices[0]], fill=color, width=2 if item.kind == "annotation" else 1)


# Orientation fields


def draw_orientations(
    image: NDArray[np.uint8],
    strength: NDArray[np.floating],
    angle: NDArray[np.floating],
    every_px: int = 6,
    line_angle: float = 0.0,
) -> Image.Image:
    """Draw an orientation field on an image (H, W, 3), and return the image, enlarged four times.

    `strength` and `angle` (h, w) are the maps of the field. Maps smaller than the image are centered on the image. In
    each square of `every_px` by `every_px` pixels, at most one stroke is drawn, at the pixel with the highest strength.
    The length of a stroke shows the strength, and its color shows the angle. Angles are in radians from vertical,
    counter-clockwise. `line_angle`, also in radians, is added to all angles. If the field was computed from the output
    of a lifting layer, pass `group.line_angle(kernel)` for the layer's kernel: strokes are then parallel to the lines
    that the kernel detects. Raises ValueError if an argument has the wrong type or shape, or if the maps cannot be
    centered on the image.
    """
    top, left = _expect_margins(image, strength, angle, every_px)
    scale = ORIENTATION_SCALE * SUPERSAMPLING
    drawing = ImageEnhance.Color(Image.fromarray(image)).enhance(SATURATION)
    drawing = drawing.resize((image.shape[1] * scale, image.shape[0] * scale), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(drawing)
    full_strength = float(np.quantile(strength, 0.995))  # the maximum might be an outlier
    for row, column in _strongest_pixels(strength, every_px):
        length = min(strength[row, column] / full_strength, 1.0) if full_strength > 0 else 0.0
        if length < MIN_STROKE:
            continue
        fraction, right, up = group.line_direction(float(angle[row, column]) + line_angle)
        radius = length * every_px * scale / 2
        x, y = (left + column + 0.5) * scale, (top + row + 0.5) * scale
        ends = (x - radius * right, y + radius * up, x + radius * right, y - radius * up)
        pen.line(ends, fill=_stroke_color(fraction), width=max(2, round(0.7 * scale)))
    size = (image.shape[1] * ORIENTATION_SCALE, image.shape[0] * ORIENTATION_SCALE)
    return drawing.resize(size, Image.Resampling.BOX)


def _strongest_pixels(strength: NDArray[np.floating], every_px: int) -> Iterator[tuple[int, int]]:
    """Yield the row and column of the highest strength in each square of `every_px` by `every_px` pixels."""
    for top in range(0, strength.shape[0], every_px):
        for left in range(0, strength.shape[1], every_px):
            cell = strength[top : top + every_px, left : left + every_px]
            row, column = np.unravel_index(int(cell.argmax()), cell.shape)
            yield top + int(row), left + int(column)


def _stroke_color(fraction: float) -> tuple[int, int, int]:
    """Return the color (red, green, blue) of an angle, given as a fraction of π. 0 and 1 have the same color."""
    red, green, blue = colorsys.hsv_to_rgb(fraction, 0.95, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def _expect_margins(
    image: NDArray[np.uint8], strength: NDArray[np.floating], angle: NDArray[np.floating], every_px: int
) -> tuple[int, int]:
    """Check the arguments of `draw_orientations`, and return the position of the maps on the image.

    Returns the number of image rows above the maps, and the number of image columns to the left of the maps.
    """
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(
            f"`draw_orientations` expects an image (H, W, 3) of uint8; got an image of shape {image.shape} and type "
            f"{image.dtype}; convert the image first."
        )
    if strength.ndim != 2 or strength.shape != angle.shape:
        raise ValueError(
            f"`draw_orientations` expects maps `strength` and `angle` of the same shape (h, w); got the shapes "
            f"{strength.shape} and {angle.shape}."
        )
    if every_px < 1:
        raise ValueError(f"`draw_orientations` expects `every_px` of 1 or more; got {every_px}.")
    rows, columns = image.shape[0] - strength.shape[0], image.shape[1] - strength.shape[1]
    if min(rows, columns) < 0 or rows % 2 or columns % 2:
        raise ValueError(
            f"The maps `strength` and `angle` of {strength.shape} px cannot be centered on the image of "
            f"{image.shape[:2]} px: they must have the size of the image, or be smaller by an even number of rows and "
            f"of columns; crop the image or the maps."
        )
    return rows // 2, columns // 2
