"""A slide as a network sees it: at its spacing, mirrored beyond its edges, with stains normalised if that is wanted.

In: an open slide. Out: pixels of any rectangle, and positions on the canvas as positions on level 0.
"""

import math
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray

from rotopath.group import mirror
from rotopath.images import Slide, Tissue
from rotopath.images.stain import Stain, Stains, measure_stains
from rotopath.inference.layout import Span

MEASURED_PX = 2**21  # of tissue: all of a small slide, and samples from all over a larger one
SAMPLE_PX = 256  # the side of each sample
BLOCK_PX, KEPT_BLOCKS = 512, 32  # of pixels that are read together; neighbouring tiles share some, 25 MB in all


class Canvas:
    """Rows and columns of a slide at the spacing that a network wants. Several threads may read it."""

    def __init__(self, slide: Slide, spacing_um_px: float, stain: Stain, tissue: Tissue) -> None:
        self.slide = slide
        self.spacing_um_px = spacing_um_px
        self.size_px = slide.size_at(self.spacing_um_px)
        self.level0_px = self.spacing_um_px / slide.spacing_um_px  # the side of a pixel here, in pixels of level 0
        self.stains = self._measure_stains(tissue) if stain == "macenko" else None
        self._block = lru_cache(KEPT_BLOCKS)(self._read_block)

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Pixels (h, w, 3); beyond its edges the slide is seen mirrored, as images are in training."""
        down, across = (
            mirror(torch.arange(*span), size).numpy() for span, size in zip((rows, columns), self.size_px, strict=True)
        )
        first = [int(places.min()) // BLOCK_PX for places in (down, across)]
        last = [int(places.max()) // BLOCK_PX for places in (down, across)]
        rows_of_blocks = [
            np.concatenate([self._block(i, j) for j in range(first[1], last[1] + 1)], axis=1)
            for i in range(first[0], last[0] + 1)
        ]
        whole = np.concatenate(rows_of_blocks)
        pixels: NDArray[np.uint8] = whole[np.ix_(down - first[0] * BLOCK_PX, across - first[1] * BLOCK_PX)]
        return pixels

    def _read_block(self, row: int, column: int) -> NDArray[np.uint8]:
        """Pixels are always read in the same blocks: what is resampled in another one may differ by a grey level."""
        top, left = row * BLOCK_PX, column * BLOCK_PX
        height, width = (min(BLOCK_PX, size - start) for size, start in zip(self.size_px, (top, left), strict=True))
        pixels = self.slide.read(top, left, height, width, self.spacing_um_px)
        return pixels if self.stains is None else self.stains.normalise(pixels)

    def _measure_stains(self, tissue: Tissue) -> Stains | None:
        """The stains of the slide's tissue; the glass around it has no part in how strong they are."""
        if math.prod(self.size_px) <= MEASURED_PX:
            pixels = self.slide.read(0, 0, *self.size_px, self.spacing_um_px)
            return measure_stains(pixels[self._is_tissue(tissue, Span(0, self.size_px[0]), Span(0, self.size_px[1]))])
        cells = np.argwhere(tissue.mask)
        if not len(cells):
            return None
        count = MEASURED_PX // SAMPLE_PX**2
        chosen = cells[np.linspace(0, len(cells) - 1, min(count, len(cells))).astype(int)]
        middles = np.rint((chosen + 0.5) * tissue.spacing_um_px / self.spacing_um_px).astype(int)
        samples = []
        for row, column in (middles - SAMPLE_PX // 2).tolist():
            pixels = self.slide.read(row, column, SAMPLE_PX, SAMPLE_PX, self.spacing_um_px)
            samples.append(
                pixels[self._is_tissue(tissue, Span(row, row + SAMPLE_PX), Span(column, column + SAMPLE_PX))]
            )
        return measure_stains(np.concatenate(samples))

    def _is_tissue(self, tissue: Tissue, rows: Span, columns: Span) -> NDArray[np.bool_]:
        """Which pixels of a rectangle are tissue on the slide."""
        down, across = (np.arange(*span) for span in (rows, columns))
        there = tissue.at(*(np.asarray((at + 0.5) * self.spacing_um_px, np.float64) for at in (down, across)))
        on_slide = [(at >= 0) & (at < size) for at, size in zip((down, across), self.size_px, strict=True)]
        inside: NDArray[np.bool_] = there & on_slide[0][:, None] & on_slide[1][None, :]
        return inside
