"""What a model found in an image or on a slide, in memory: for notebooks and scripts.

In: a pass over a slide. Out: its objects, its heat map and a summary, which can be shown and handed to QuPath.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from rotopath.images import Slide
from rotopath.images.drawing import draw_overlay
from rotopath.images.geojson import SlideObject, write_geojson
from rotopath.inference.slide_pass import Model, PassOptions, SlidePass


@dataclass(frozen=True)
class Result:
    """Objects lie in pixels of level 0; the map has one pixel for every `map_um` µm."""

    task: str  # its name
    objects: list[SlideObject]
    map: NDArray[np.float32]  # (h, w): the probability of what the model looks for
    deviation: NDArray[np.float32] | None  # of it over rotations, if several were asked for
    map_um: float
    summary: Mapping[str, float]
    origin_px: tuple[int, int]  # where QuPath begins to count
    overlay: Image.Image

    def to_geojson(self, path: Path | str) -> None:
        """Write the objects as QuPath reads them."""
        write_geojson(Path(path), self.objects, self.origin_px)

    def show(self) -> Image.Image:
        """The slide with what was found on it; a notebook displays it."""
        return self.overlay

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.summary.items())
        return f"Result({self.task}: {numbers})"


def predict_slide(model: Model, slide: Slide, options: PassOptions) -> Result:
    """Everything about a slide at once."""
    with (
        tempfile.TemporaryDirectory(prefix="rotopath-") as folder,
        SlidePass(model, slide, Path(folder), options) as done,
    ):
        objects = list(done.objects())
        heat, deviation = done.heat.read(), None if done.deviation is None else done.deviation.read()
        winner = None if done.winner is None else done.winner.read()
        overlay = draw_overlay(slide, heat, winner, done.heat_frame, model.task.colors, objects)
    return Result(model.task.name, objects, heat, deviation, done.cell_um, done.summary(), slide.origin_px, overlay)
