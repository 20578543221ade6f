"""What tissue is painted on: concentrations of stains, and windows onto parts of them.

In: fields and places. Everything that paints does so in place, on a canvas.
"""

from dataclasses import dataclass

import numpy as np

from rotopath.data.synthetic.noise import Field, Points


@dataclass(frozen=True)
class Canvas:
    """Stain concentrations, painted on in place."""

    hematoxylin: Field
    eosin: Field
    blood: Field  # hemoglobin takes eosin up in a hue of its own
    spacing_um_px: float

    @property
    def shape(self) -> tuple[int, int]:
        return self.hematoxylin.shape[0], self.hematoxylin.shape[1]


def clear_away(canvas: Canvas, share: Field) -> None:
    """Take the tissue away where `share` is 1: tears, lumens, fat."""
    kept = 1 - np.float32(0.97) * share
    for field in (canvas.hematoxylin, canvas.eosin, canvas.blood):
        np.multiply(field, kept, out=field)


@dataclass(frozen=True)
class Window:
    """A square part of the canvas around a point, cut off at the canvas's edge."""

    rows: slice
    columns: slice
    offset: Points  # of its pixels from the point, in pixels

    @classmethod
    def around(cls, canvas: Canvas, centre: complex, side: int) -> "Window | None":
        """None where the window lies outside."""
        height, width = canvas.shape
        top, left = round(centre.imag) - side // 2, round(centre.real) - side // 2
        rows = slice(max(top, 0), min(top + side, height))
        columns = slice(max(left, 0), min(left + side, width))
        if rows.start >= rows.stop or columns.start >= columns.stop:
            return None
        y, x = np.mgrid[rows, columns].astype(np.float32)
        return cls(rows, columns, np.asarray(x + 1j * y - centre, np.complex64))

    def view(self, field: Field) -> Field:
        """The same part of a field; writing to it writes to the field."""
        return field[self.rows, self.columns]

    def shade(self, canvas: Canvas, mask: Field, hematoxylin: float, eosin: float) -> None:
        """Under the mask, leave so much of the stains that are there."""
        self.view(canvas.hematoxylin)[:] *= 1 - mask * np.float32(1 - hematoxylin)
        self.view(canvas.eosin)[:] *= 1 - mask * np.float32(1 - eosin)


def ramp(field: Field) -> Field:
    """0 below 0, 1 above 1, smooth in between."""
    t = field.clip(0, 1)
    smooth: Field = t * t * (3 - 2 * t)
    return smooth
