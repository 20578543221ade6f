"""What was found, drawn onto a picture of the slide that fits on a screen.

In: a slide, a heat map, and objects in pixels of level 0. Out: a picture with the heat map laid over it, and outlines
and places drawn where they are large enough to be seen.
"""

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

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
