"""What was found, drawn onto a picture of the slide that fits on a screen.

In: a slide, a heat map, and objects in pixels of level 0. Out: a picture with the heat map laid over it, and outlines
and places drawn where they are large enough to be seen.

An orientation field drawn onto its image: strokes along the angles, longer and brighter where the field is strong.

In: an image, and the strength and angle of each of its pixels, or of those in its middle. Out: a picture to be seen.
"""

import colorsys
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance

from rotopath import group
from rotopath.images.geojson import Point, SlideObject
from rotopath.images.slides import Slide

LONGEST_PX = 1600  # side of the picture
STRONGEST = 0.55  # of the heat map's colour, where it is 1
FINEST_OUTLINES_UM_PX = 2.0  # above it the outline of a nucleus is a dot
RING_UM, LEAST_RING_PX = 15.0, 7
DRAWN = 20_000  # objects at most, of those that are outlined or ringed


def draw_overlay(
    slide: Slide,
    heat: NDArray[np.float32],
    winner: NDArray[np.float32] | None,
    heat_px: tuple[tuple[float, float], float],
    colors: Sequence[tuple[int, int, int]],
    objects: Iterable[SlideObject],
) -> Image.Image:
    """The heat map in the colour of the class that is the likeliest, the `winner`, at each of its pixels.

    Its first corner and the side of its pixels are given in pixels of level 0.
    """
    spacing = max(slide.spacing_um_px, max(slide.size_px) * slide.spacing_um_px / LONGEST_PX)
    height, width = slide.size_at(spacing)
    scale = slide.spacing_um_px / spacing  # from level 0 to the picture
    picture = Image.fromarray(slide.read(0, 0, height, width, spacing))
    (top, left), side = heat_px
    # Pillow asks where each pixel of the picture lies in the map.
    step = 1 / (scale * side)
    place = (step, 0.0, -left / side, 0.0, step, -top / side)
    strength = Image.fromarray(heat * np.float32(255 * STRONGEST)).transform(
        picture.size, Image.Transform.AFFINE, place, Image.Resampling.BILINEAR
    )
    ink = Image.new("RGB", picture.size, colors[0])
    if winner is not None:
        palette = np.array(colors, np.uint8)[winner.astype(np.int64)]
        ink = Image.fromarray(palette).transform(picture.size, Image.Transform.AFFINE, place, Image.Resampling.NEAREST)
    picture.paste(ink, mask=strength.convert("L"))
    pen = ImageDraw.Draw(picture)
    for _, one in zip(range(DRAWN), objects, strict=False):
        line = one.color or colors[0]
        if isinstance(one.shape, Point):
            row, column = one.shape.row * scale, one.shape.column * scale
            radius = max(LEAST_RING_PX, RING_UM / spacing)
            pen.ellipse((column - radius, row - radius, column + radius, row + radius), outline=line, width=2)
        elif one.kind == "annotation" or spacing <= FINEST_OUTLINES_UM_PX:
            for polygon in one.shape:
                for ring in polygon.rings:
                    corners = [(float(x), float(y)) for y, x in ring * scale]
                    pen.line([*corners, corners[0]], fill=line, width=2 if one.kind == "annotation" else 1)
    return picture


SCALE = 4  # pixels of the picture for one of the image
FINENESS = 2  # strokes are drawn larger by this, and made smaller again, for smooth lines
FAINTEST = 0.3  # strokes of less, in parts of the longest, are left out
PALE = 0.45  # how much is left of the colours of the image beneath


def draw_orientations(
    image: NDArray[np.uint8],
    strength: NDArray[np.floating],
    angle: NDArray[np.floating],
    every_px: int = 6,
    own_angle: float = 0.0,
) -> Image.Image:
    """A picture four times as large as the image (H, W, 3), with a stroke for each cell of `every_px` pixels.

    A stroke stands where its cell is strongest. It points upwards at angle 0, and is turned counter-clockwise;
    `own_angle`, in radians, turns all strokes further, to where the structures lie that a kernel at 0 looks for. The
    colour tells the angle, a stroke and its opposite being alike. Maps smaller than the image lie in its middle.
    """
    top, left = _margins(image, strength, angle, every_px)
    scale = SCALE * FINENESS
    picture = ImageEnhance.Color(Image.fromarray(image)).enhance(PALE)
    picture = picture.resize((image.shape[1] * scale, image.shape[0] * scale), Image.Resampling.BICUBIC)
    pen = ImageDraw.Draw(picture)
    largest = float(np.quantile(strength, 0.995))
    for row, column in _strongest(strength, every_px):
        length = min(strength[row, column] / largest, 1.0) if largest > 0 else 0.0
        if length < FAINTEST:
            continue
        part, right, up = group.describe_line(float(angle[row, column]) + own_angle)
        reach = length * every_px * scale / 2
        x, y = (left + column + 0.5) * scale, (top + row + 0.5) * scale
        ends = (x - reach * right, y + reach * up, x + reach * right, y - reach * up)
        pen.line(ends, fill=_colour(part), width=max(2, round(0.7 * scale)))
    return picture.resize((image.shape[1] * SCALE, image.shape[0] * SCALE), Image.Resampling.BOX)


def _strongest(strength: NDArray[np.floating], every_px: int) -> list[tuple[int, int]]:
    """Row and column of the largest value in each cell."""
    found = []
    for top in range(0, strength.shape[0], every_px):
        for left in range(0, strength.shape[1], every_px):
            cell = strength[top : top + every_px, left : left + every_px]
            row, column = np.unravel_index(int(cell.argmax()), cell.shape)
            found.append((top + int(row), left + int(column)))
    return found


def _colour(part: float) -> tuple[int, int, int]:
    """Half a turn goes once around the colours."""
    red, green, blue = colorsys.hsv_to_rgb(part, 0.95, 0.85)
    return round(255 * red), round(255 * green), round(255 * blue)


def _margins(
    image: NDArray[np.uint8], strength: NDArray[np.floating], angle: NDArray[np.floating], every_px: int
) -> tuple[int, int]:
    """Pixels of the image above and left of the maps."""
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise ValueError(
            f"draw_orientations takes an image (H, W, 3) of bytes; got {image.dtype} of shape {image.shape}."
        )
    if strength.ndim != 2 or strength.shape != angle.shape:
        raise ValueError(
            f"draw_orientations takes strength and angle of one channel, (H, W) both; got {strength.shape} and "
            f"{angle.shape}."
        )
    if every_px < 1:
        raise ValueError(f"draw_orientations needs every_px as 1 or more; got {every_px}.")
    rows, columns = image.shape[0] - strength.shape[0], image.shape[1] - strength.shape[1]
    if min(rows, columns) < 0 or rows % 2 or columns % 2:
        raise ValueError(
            f"draw_orientations takes maps that lie in the middle of the image, but {strength.shape} do not in "
            f"{image.shape[:2]} px; crop the image or the maps."
        )
    return rows // 2, columns // 2
