"""How a network's outputs come to lie on an image of any size, and how an image is divided into tiles.

In: a network and a size. Out: spans of pixels that the network has to see, on its pooling grid, and spans of outputs.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from rotopath.models import Geometry


class Span(NamedTuple):
    """A stretch along one side, in pixels or outputs, of which some may lie outside of the image."""

    start: int
    stop: int

    def widened(self, by: int) -> "Span":
        return Span(self.start - by, self.stop + by)

    def moved(self, by: int) -> "Span":
        return Span(self.start + by, self.stop + by)

    def within(self, whole: "Span") -> slice:
        """Where it lies in a longer one."""
        return slice(self.start - whole.start, self.stop - whole.start)

    @property
    def size(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """How outputs come to lie along one side of an image."""

    frame_px: Span  # that the network sees, on the pooling grid and about the middle of the image
    outputs: int  # in that frame
    kept: Span  # those outputs that lie on the image
    first_px: float  # of the first one that is kept

    def seen_px(self, geometry: Geometry, outputs: Span) -> Span:
        """The pixels that the network sees for some outputs, whole blocks of them."""
        stride = geometry.stride_px
        return Span(outputs.start * stride, outputs.stop * stride + geometry.lost_px).moved(self.frame_px.start)


def lay_out(geometry: Geometry, size_px: int) -> Layout:
    """The layout of outputs along a side of `size_px` pixels, which is mirrored beyond its ends."""
    framed = geometry.nearest_sizes(size_px + geometry.lost_px)[-1]
    # As much on either side, so that a rotated image gets a rotated frame: exactly, where an even number is added.
    before = (framed - size_px) // 2
    outputs, stride = geometry.output_size(framed), geometry.stride_px
    first = (framed - 1 - (outputs - 1) * stride) / 2 - before
    places = first + stride * np.arange(outputs)
    on_image = np.flatnonzero((places >= -0.5) & (places <= size_px - 0.5))
    kept = Span(int(on_image[0]), int(on_image[-1]) + 1)
    return Layout(Span(-before, framed - before), outputs, kept, float(places[kept.start]))


def divide(
    geometry: Geometry, wanted: Span, outputs: int, tile_px: int, multiple: int = 1
) -> Iterator[tuple[Span, Span]]:
    """Where tiles lie along a side, in outputs: all of one size but for the last, however many there are.

    The second span of each is what the network has to answer for it: blocks of outputs on the pooling grid, and
    further, where outputs feel the edge of a tile. Tiles begin at multiples of `multiple` from the first output.
    """
    if tile_px < geometry.smallest_px:
        raise ValueError(f"Tiles have at least the {geometry.smallest_px} px that an answer needs; got {tile_px}.")
    block = geometry.block
    rim = -(-geometry.rim // block) * block
    uneven = 0 if wanted.start % block == multiple % block == 0 else 2 * (block - 1)
    most = max(multiple, geometry.output_size(geometry.nearest_sizes(tile_px)[0]) - 2 * rim - uneven)
    for start in range(wanted.start, wanted.stop, step := most - most % multiple):
        tile = Span(start, min(start + step, wanted.stop))
        yield tile, cover(geometry, tile, outputs)


def cover(geometry: Geometry, wanted: Span, outputs: int) -> Span:
    """What the network has to answer, of all outputs, for some that are wanted to be as they are in the whole image."""
    block = geometry.block
    rim = -(-geometry.rim // block) * block
    first, last = wanted.start // block * block, -(-wanted.stop // block) * block
    return Span(max(0, first - rim), min(outputs, last + rim))
