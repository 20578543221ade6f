"""Draw predictions on images: objects and a heat map on a slide, crops of objects, or an orientation field on an image.

`draw_overlay` draws on an image of a slide that fits on a screen, and adds a caption and a scale bar. `draw_crops`
returns a sheet of crops around objects. An orientation field is a strength and an angle at each pixel, for example of
fibers. `draw_orientations` returns an enlarged image on which short lines (strokes) show an orientation field.
"""

import colorsys
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance, ImageFont

from rotopath import group
from rotopath.images.geojson import SlideObject
from rotopath.images.outlines import Point
from rotopath.images.slides import Slide

MAX_OVERLAY_PX = 1600  # maximum length of the longer side of an overlay
MIN_OVERLAY_PX = 480  # smaller overlays are widened to the right, because a caption needs space
MAX_HEAT_OPACITY = 0.4  # opacity of the color where the heat map is 1; the tissue must stay visible
MAX_OUTLINE_UM_PX = 2.0  # at coarser pixel spacings, outlines of detections are not drawn: they would be only dots
WIDE_UM_PX = 0.5  # at this pixel spacing or a finer one, outlines of detections are 2 px wide
RING_RADIUS_UM, MIN_RING_RADIUS_PX = 15.0, 7  # radius of the rings around points, and its minimum on the overlay
MAX_DRAWN = 20_000  # maximum number of objects that are drawn
FONT_PX, MARGIN_PX = 16, 12  # size of the text, and distance between text and edges, in pixels
CHARACTER_PX = 8.5  # mean width of a character
INK, WARNING_INK, PAPER = (30, 30, 40), (180, 20, 20), (255, 255, 255)  # colors of text, warnings and background
REPLACEMENTS = str.maketrans({"µ": "u", "²": "2", "×": "x"})  # for fonts without these characters
CROP_PX, CROPS_PER_ROW = 128, 8  # side of a crop on a sheet, and number of crops in a row
MIN_CROP_UM = 32.0  # side of the smallest crop
CROP_INK, TICK_PX = (255, 255, 255), 9  # color of the outline in a crop; length of the marks at its edges

ORIENTATION_SCALE = 4  # `draw_orientations` enlarges the image by this factor
SUPERSAMPLING = 2  # strokes are drawn larger by this factor and then reduced, for smooth lines
MIN_STROKE = 0.3  # strokes shorter than this fraction of the longest stroke are not drawn
SATURATION = 0.45  # the color saturation of the image is reduced to this fraction, so that strokes stand out


DrawnAs = Literal["regions", "outlines", "points"]  # what the objects of a task are, which decides how they are drawn
Color = tuple[int, int, int]  # red, green, blue


@dataclass(frozen=True)
class HeatMap:
    """A heat map, and its position on the slide."""

    values: NDArray[np.float32]  # (rows, columns), a probability at each pixel
    top_class: NDArray[np.float32] | None  # (rows, columns), index of the most probable class; None for one class
    frame: tuple[tuple[float, float], float]  # upper left corner (row, column) and side of a pixel, in level 0 pixels


@dataclass(frozen=True)
class Caption:
    """Text above an overlay."""

    title: str
    lines: Sequence[str] = ()
    warnings: Sequence[str] = ()


# Slides


@dataclass(frozen=True)
class ReducedSlide:
    """An image of a slide that fits on a screen."""

    image: Image.Image
    spacing_um_px: float  # pixel spacing of the image
    scale: float  # side of a pixel of level 0, in pixels of the image


def reduce_slide(slide: Slide) -> ReducedSlide:
    """Read a slide, reduced so that its longer side has at most `MAX_OVERLAY_PX` pixels."""
    spacing = max(slide.spacing_um_px, max(slide.size_px) * slide.spacing_um_px / MAX_OVERLAY_PX)
    pixels = slide.read(0, 0, *slide.size_at(spacing), spacing)
    return ReducedSlide(Image.fromarray(pixels), spacing, slide.spacing_um_px / spacing)


def draw_overlay(
    slide: ReducedSlide,
    heat: HeatMap | None,
    classes: Sequence[tuple[str, Color]],
    objects: Iterable[SlideObject],
    drawn_as: DrawnAs,
    caption: Caption,
) -> Image.Image:
    """Draw objects on an image of a slide, and return the new image, with a caption and a scale bar.

    `classes` has the name and the color of each class, for the legend. Objects without a color have the color of the
    first class. Only the first `MAX_DRAWN` objects are drawn. If the objects are regions, such as tumor, the heat map
    is drawn too: the higher the probability, the more opaque is the color. Other objects are drawn without the heat
    map, because a tint would change the colors of the tissue that is to be judged. An exception are outlines on an
    image that is reduced so much that outlines would be only dots: then only the heat map is drawn.
    """
    overlay, spacing, scale = slide.image.copy(), slide.spacing_um_px, slide.scale
    if heat is not None and (drawn_as == "regions" or (drawn_as == "outlines" and spacing > MAX_OUTLINE_UM_PX)):
        _draw_heat(overlay, heat, [color for _, color in classes], scale)
    pen = ImageDraw.Draw(overlay)
    for _, item in zip(range(MAX_DRAWN), objects, strict=False):
        _draw_object(pen, item, item.color or classes[0][1], scale, spacing)
    return _frame(overlay, caption, classes, spacing)


def _draw_heat(overlay: Image.Image, heat: HeatMap, colors: Sequence[Color], scale: float) -> None:
    """Draw a heat map on an overlay, in place. `scale` is the side of a pixel of level 0, in pixels of the overlay."""
    (top, left), side = heat.frame
    step = 1 / (scale * side)
    to_heat = (step, 0.0, -left / side, 0.0, step, -top / side)  # from (x, y) on the overlay to the heat map
    opacity = Image.fromarray(heat.values * np.float32(255 * MAX_HEAT_OPACITY)).transform(
        overlay.size, Image.Transform.AFFINE, to_heat, Image.Resampling.BILINEAR
    )
    color = Image.new("RGB", overlay.size, colors[0])
    if heat.top_class is not None:
        class_colors = np.array(colors, np.uint8)[heat.top_class.astype(np.int64)]
        color = Image.fromarray(class_colors).transform(
            overlay.size, Image.Transform.AFFINE, to_heat, Image.Resampling.NEAREST
        )
    overlay.paste(color, mask=opacity.convert("L"))


def _draw_object(pen: ImageDraw.ImageDraw, item: SlideObject, color: Color, scale: float, spacing_um_px: float) -> None:
    """Draw an object on the overlay: a ring around its position if the object is a point, otherwise its outline.

    Rings and regions have a white edge, so that they are visible on tissue of any color. Outlines of detections are
    drawn only if `spacing_um_px`, the pixel spacing of the overlay, is at most `MAX_OUTLINE_UM_PX`. `scale` is the side
    of a pixel of level 0, in pixels of the overlay.
    """
    if isinstance(item.shape, Point):
        row, column = item.shape.row * scale, item.shape.column * scale
        radius = max(MIN_RING_RADIUS_PX, RING_RADIUS_UM / spacing_um_px)
        for extra, ink, line_px in ((1, PAPER, 4), (0, color, 2)):
            r = radius + extra
            pen.ellipse((column - r, row - r, column + r, row + r), outline=ink, width=line_px)
    elif item.kind == "annotation" or spacing_um_px <= MAX_OUTLINE_UM_PX:
        for polygon in item.shape:
            for ring in polygon.rings:
                line = (np.concatenate([ring, ring[:1]])[:, ::-1] * scale).ravel().tolist()  # x, y, x, y, ...
                if item.kind == "annotation":
                    pen.line(line, fill=PAPER, width=4, joint="curve")
                pen.line(line, fill=color, width=2 if item.kind == "annotation" or spacing_um_px <= WIDE_UM_PX else 1)


def _frame(
    overlay: Image.Image, caption: Caption, classes: Sequence[tuple[str, Color]], spacing_um_px: float
) -> Image.Image:
    """Return an overlay with its caption and a legend of the classes above it, and a scale bar below it.

    With warnings, the caption has a red frame.
    """
    width = max(overlay.width, MIN_OVERLAY_PX)
    characters = int((width - 2 * MARGIN_PX) / CHARACTER_PX)
    texts = [(line, INK) for line in textwrap.wrap(caption.title, characters)]
    texts += [(line, INK) for text in caption.lines for line in textwrap.wrap(text, characters)]
    texts += [
        (line, WARNING_INK) for text in caption.warnings for line in textwrap.wrap(f"Warning: {text}", characters)
    ]
    line_px = FONT_PX + MARGIN_PX // 2
    top = 2 * MARGIN_PX + line_px * (len(texts) + 1)
    framed = Image.new("RGB", (width, top + overlay.height + 2 * MARGIN_PX + line_px), PAPER)
    framed.paste(overlay, (0, top))
    pen = ImageDraw.Draw(framed)
    y = MARGIN_PX
    for text, ink in texts:
        _write(pen, (MARGIN_PX, y), text, ink)
        y += line_px
    x = float(MARGIN_PX)
    for name, color in classes:
        pen.rectangle((x, y + 2, x + FONT_PX, y + 2 + FONT_PX), fill=color, outline=INK)
        x += FONT_PX + 6 + _write(pen, (x + FONT_PX + 6, y), name) + 2 * MARGIN_PX
    bar_um = scale_bar_um(overlay.width * spacing_um_px / 4)
    y = top + overlay.height + MARGIN_PX
    pen.rectangle((MARGIN_PX, y + 6, MARGIN_PX + bar_um / spacing_um_px, y + 11), fill=INK)
    label = f"{bar_um / 1000:g} mm" if bar_um >= 1000 else f"{bar_um:g} µm"
    _write(pen, (2 * MARGIN_PX + bar_um / spacing_um_px, y), label)
    if caption.warnings:
        pen.rectangle((0, 0, framed.width - 1, top - 1), outline=WARNING_INK, width=4)
    return framed


def _write(pen: ImageDraw.ImageDraw, position: tuple[float, float], text: str, ink: Color = INK) -> float:
    """Write a line of text with its upper left corner at a position (x, y), and return its length in pixels."""
    font, is_complete = _load_font()
    if not is_complete:
        text = text.translate(REPLACEMENTS)
    pen.text(position, text, fill=ink, font=font)
    return pen.textlength(text, font=font)


@cache
def _load_font() -> tuple[ImageFont.FreeTypeFont | ImageFont.ImageFont, bool]:
    """Return a font, and whether it has all characters in REPLACEMENTS. Pillow's own font does not have them."""
    names = ["DejaVuSans.ttf", "Arial.ttf", "arial.ttf"]
    if (matplotlib := find_spec("matplotlib")) is not None and matplotlib.origin is not None:
        names.insert(0, str(Path(matplotlib.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf"))
    for name in names:
        with suppress(OSError):  # this font is not installed
            return ImageFont.truetype(name, FONT_PX - 1), True
    return ImageFont.load_default(FONT_PX), False


def scale_bar_um(longest_um: float) -> float:
    """Return the length of a scale bar: the largest of 1, 2, 5, 10, 20, 50, … µm that is at most `longest_um`."""
    power = 10.0 ** np.floor(np.log10(longest_um))
    return float(power * max(step for step in (1, 2, 5) if step * power <= longest_um))


def draw_crops(slide: Slide, groups: Mapping[str, Sequence[tuple[int, SlideObject]]], measurement: str) -> Image.Image:
    """Return a sheet of crops around objects, each with the outline of its object, or with marks that point to it.

    The outline is thin, and the marks are at the edges, because the pixels of the object are to be judged.

    `groups` maps titles to objects and their numbers. Each crop is centered on an object, and has a side of MIN_CROP_UM
    or is large enough for the object. The text below a crop is the number of the object, the value of its
    `measurement`, and the side of the crop in µm if it is not MIN_CROP_UM.
    """
    line_px = FONT_PX + MARGIN_PX // 2
    cell_width, cell_height = CROP_PX + MARGIN_PX, CROP_PX + line_px + MARGIN_PX // 2
    heights = [line_px + -(-len(objects) // CROPS_PER_ROW) * cell_height + MARGIN_PX for objects in groups.values()]
    sheet = Image.new("RGB", (CROPS_PER_ROW * cell_width + MARGIN_PX, sum(heights) + MARGIN_PX), PAPER)
    pen, top, size = ImageDraw.Draw(sheet), MARGIN_PX, f"Crops are {MIN_CROP_UM:g} µm wide unless stated."
    for (title, objects), height in zip(groups.items(), heights, strict=True):
        _write(pen, (MARGIN_PX, top), f"{title}: number and {measurement} of the object in the middle. {size}")
        for i, (number, item) in enumerate(objects):
            x = MARGIN_PX + i % CROPS_PER_ROW * cell_width
            y = top + line_px + i // CROPS_PER_ROW * cell_height
            crop, side_um = _crop(slide, item)
            sheet.paste(crop, (x, y))
            text = f"{number}: {item.measurements[measurement]:.2f}"
            _write(pen, (x, y + CROP_PX + 2), text if side_um == MIN_CROP_UM else f"{text} · {side_um:.0f} µm")
        top += height
    return sheet


def _crop(slide: Slide, item: SlideObject) -> tuple[Image.Image, float]:
    """Return the square around an object, as an image of CROP_PX × CROP_PX pixels, and its side in µm."""
    top, left, bottom, right = item.bounds_px
    side_um = max(MIN_CROP_UM, 1.5 * max(bottom - top, right - left) * slide.spacing_um_px)
    spacing = side_um / CROP_PX
    row, column = (
        round(middle * slide.spacing_um_px / spacing - CROP_PX / 2)
        for middle in ((top + bottom) / 2, (left + right) / 2)
    )
    crop = Image.fromarray(slide.read(row, column, CROP_PX, CROP_PX, spacing))
    pen, middle, end = ImageDraw.Draw(crop), CROP_PX // 2, CROP_PX - 1
    if isinstance(item.shape, Point):
        for width, ink in ((3, PAPER), (1, INK)):
            for line in ((0, TICK_PX), (end - TICK_PX, end)):
                pen.line((line[0], middle, line[1], middle), fill=ink, width=width)
                pen.line((middle, line[0], middle, line[1]), fill=ink, width=width)
        return crop, side_um
    for polygon in item.shape:
        for ring in polygon.rings:
            vertices = np.concatenate([ring, ring[:1]]) * slide.spacing_um_px / spacing - (row, column)
            pen.line(vertices[:, ::-1].ravel().tolist(), fill=CROP_INK, width=1)
    return crop, side_um


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
