"""An orientation field drawn onto its image: strokes along the angles, longer and brighter where the field is strong.

In: an image, and the strength and angle of each of its pixels, or of those in its middle. Out: a picture to be seen.
"""

import colorsys

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageEnhance

from rotopath import group

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
