"""A model applied to files, folders and whole slides, with a folder of results for each.

In: a run and paths. Out: for every slide objects (GeoJSON and CSV), a heat map (OME-TIFF), an overlay, and a summary
with its provenance. A slide that is done is skipped, one that was cut off is done again, a bad one stops nobody.
"""

import csv
import io
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import JSONDecodeError, loads
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from rotopath import runs
from rotopath.data.dataset import IMAGE_SUFFIXES
from rotopath.images import Slide, UnreadableFileError, open_slide
from rotopath.images.drawing import DRAWN, draw_overlay
from rotopath.images.geojson import Point, SlideObject, write_geojson
from rotopath.images.pyramid import write_pyramid
from rotopath.images.readers import SLIDE_SUFFIXES
from rotopath.inference.slide_pass import Model, PassOptions, SlidePass
from rotopath.model_file import RunError, hash_weights
from rotopath.runs import Device, Precision, Run, describe_machine, describe_software, now
from rotopath.writing import atomic_folder, recover_folder, write_json

GEOJSON, TABLE, HEAT, DEVIATION = "objects.geojson", "objects.csv", "heatmap.ome.tif", "deviation.ome.tif"
OVERLAY, SUMMARY = "overlay.png", "summary.json"
LONGEST_HEAT = 4096  # side of the heat map that an overlay is drawn from; larger ones are thinned out
OnTile = Callable[[Path, int, int], None]  # given the slide, how many of its tiles are done, and how many there are
State = Literal["done", "skipped", "failed"]


@dataclass(frozen=True)
class SlideOutcome:
    """How the prediction of one slide ended."""

    path: Path
    folder: Path
    state: State
    reason: str = ""


def predict(
    model: Run | Path | str,
    images: Path | str | Sequence[Path | str],
    out: Path | str,
    spacing_um_px: float | None = None,
    rotations: int = 1,
    everywhere: bool = False,
    device: Device | str | None = None,
    precision: Precision | None = None,
    on_tile: OnTile = lambda _slide, _done, _all: None,
) -> list[SlideOutcome]:
    """Find what a model was trained for in images, slides or folders of them; results go to a folder for each.

    What is done already is skipped, and a file that cannot be used stops no other. `spacing_um_px` is the side of a
    pixel, for files that do not say it; the rest is as in `rp.load(model).predict`, which keeps results in memory.
    """
    run = model if isinstance(model, Run) else runs.load(model)
    given = [images] if isinstance(images, Path | str) else images
    slides = list_slides([Path(each) for each in given])
    options = PassOptions(rotations, everywhere=everywhere)
    return list(predict_slides(run, slides, Path(out), options, spacing_um_px, device, precision, on_tile))


def list_slides(inputs: Sequence[Path]) -> list[Path]:
    """All slides and images that are named, or lie in a folder that is."""
    found: list[Path] = []
    for given in inputs:
        if given.is_dir():
            inside = sorted(
                path for path in given.iterdir() if path.suffix.lower() in (*SLIDE_SUFFIXES, *IMAGE_SUFFIXES)
            )
            if not inside:
                raise RunError(f"{given} has no slides or images in it; name files, or a folder with some.")
            found += inside
        elif given.exists():
            found.append(given)
        else:
            raise RunError(f"{given} does not exist.")
    return list(dict.fromkeys(found))


def place_results(slides: Sequence[Path], out: Path) -> dict[Path, Path]:
    """The folder of each slide, which has its name."""
    places = {path: out / path.name for path in slides}
    if twice := [name for name, count in Counter(path.name for path in slides).items() if count > 1]:
        raise RunError(f"There are several slides named {twice[0]}; predict those with an --out of their own.")
    return places


def predict_slides(
    run: Run,
    slides: Sequence[Path],
    out: Path,
    options: PassOptions,
    spacing_um_px: float | None = None,
    device: Device | str | None = None,
    precision: Precision | None = None,
    on_tile: OnTile = lambda _slide, _done, _all: None,
) -> Iterator[SlideOutcome]:
    """One slide after another, each with how it ended."""
    model = run.ready(device, precision)
    out.mkdir(parents=True, exist_ok=True)
    for path, folder in place_results(slides, out).items():
        about = _describe(run, path, options, spacing_um_px) | {"precision": model.precision}
        if _is_done(recover_folder(folder), about, precision):
            yield SlideOutcome(path, folder, "skipped")
            continue
        try:
            if folder.exists() and not (folder / SUMMARY).exists() and any(folder.iterdir()):
                raise RunError(f"{folder} holds something else; choose another folder with --out.")
            with open_slide(path, spacing_um_px) as slide:
                _predict_one(model, slide, folder, options, about, partial(on_tile, path))
        except (UnreadableFileError, RunError, ValueError) as error:
            yield SlideOutcome(path, folder, "failed", str(error))
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            if model.device.type == "cuda":
                torch.cuda.empty_cache()  # for the next slide
            where = "the GPU's memory" if model.device.type == "cuda" else "memory"
            yield SlideOutcome(path, folder, "failed", f"{where} was not enough for it; use a machine with more of it.")
        else:
            yield SlideOutcome(path, folder, "done")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was used up, as Python, torch and its CPU allocator report it."""
    said = ("not enough memory", "can't allocate memory", "out of memory")
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(each in str(error) for each in said)


def _predict_one(
    model: Model,
    slide: Slide,
    folder: Path,
    options: PassOptions,
    about: dict[str, object],
    on_tile: Callable[[int, int], None],
) -> None:
    begun = time.monotonic()
    with (
        atomic_folder(folder) as unfinished,
        tempfile.TemporaryDirectory(prefix="rotopath-") as files,
        SlidePass(model, slide, Path(files), options) as done,
    ):
        drawn: list[SlideObject] = []
        with (unfinished / TABLE).open("w", newline="", encoding="utf-8") as table:
            objects = _write_down(done.objects(on_tile), table, drawn, slide.origin_px)
            write_geojson(unfinished / GEOJSON, objects, slide.origin_px)
        write_pyramid(unfinished / HEAT, done.heat.bands(), done.heat.size, done.cell_um, "probability")
        if done.deviation is not None:
            write_pyramid(unfinished / DEVIATION, done.deviation.bands(), done.heat.size, done.cell_um, "deviation")
        (corner, side), thin = done.heat_frame, -(-max(done.heat.size) // LONGEST_HEAT)
        heat, winner = (
            None if map_file is None else np.concatenate([band[::thin, ::thin] for band in map_file.bands(512 * thin)])
            for map_file in (done.heat, done.winner)
        )
        assert heat is not None
        picture = draw_overlay(slide, heat, winner, (corner, side * thin), model.task.colors, drawn)
        picture.save(unfinished / OVERLAY)
        summary = done.summary()
        write_json(
            unfinished / SUMMARY,
            {
                **{name: round(value, 6) for name, value in summary.items()},
                "sentence": model.task.describe(summary),
                "slide": {
                    "size_px": slide.size_px,
                    "spacing_um_px": slide.spacing_um_px,
                    "origin_px": slide.origin_px,
                    "stains_normalised": done.canvas.stains is not None,
                },
                "heatmap": {"spacing_um_px": done.cell_um, "corner_px": corner, "side_px": side},
                "seconds": round(time.monotonic() - begun, 1),
                "written": now(),
                "about": about,
                **describe_software(),
                "hardware": describe_machine(model.device),
            },
        )


def _write_down(
    objects: Iterator[SlideObject], table: io.TextIOBase, drawn: list[SlideObject], origin_px: tuple[int, int]
) -> Iterator[SlideObject]:
    """Objects as they go by: each becomes a row of a table, and some are kept for drawing."""
    rows, columns = csv.writer(table, lineterminator="\n"), ["id", "class", "x_px", "y_px"]
    is_empty = True
    for found in objects:
        if is_empty:
            rows.writerow([*columns, *found.measurements])
            is_empty = False
        x, y = _middle(found, origin_px)
        measured = [f"{value:.6g}" for value in found.measurements.values()]
        rows.writerow([found.id, found.class_name, f"{x:.2f}", f"{y:.2f}", *measured])
        if len(drawn) < DRAWN:
            drawn.append(found)
        yield found
    if is_empty:
        rows.writerow(columns)


def _middle(found: SlideObject, origin_px: tuple[int, int]) -> tuple[float, float]:
    """As x and y, counted as the GeoJSON beside it counts."""
    if isinstance(found.shape, Point):
        row, column = found.shape
    else:
        corners = np.concatenate([polygon.outer for polygon in found.shape])
        row, column = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return column - origin_px[1], row - origin_px[0]


def _describe(run: Run, path: Path, options: PassOptions, spacing_um_px: float | None) -> dict[str, object]:
    """What decides the results: the model, the file, and how it is looked at."""
    return {
        "model": run.folder.resolve().name,
        "task": run.task.name,
        "classes": list(run.task.class_names),
        "network": run.info.network.name,
        "orientations": run.info.network.orientations,
        "weights": hash_weights(run.folder)[:16],
        "operating_point": dict(run.point),
        "file": path.name,
        "file_bytes": path.stat().st_size if path.exists() else 0,
        "spacing_um_px": spacing_um_px,
        "options": asdict(options) | {"tile_px": None},  # tiles decide nothing
    }


def _is_done(folder: Path, about: dict[str, object], precision: str | None) -> bool:
    """Whether results are there that were made so, in any precision unless one was asked for: devices may change."""
    try:
        written = loads((folder / SUMMARY).read_text(encoding="utf-8"))["about"]
        return bool((written if precision else written | {"precision": about["precision"]}) == about)
    except (OSError, JSONDecodeError, KeyError, TypeError):
        return False


def read_summary(folder: Path) -> str:
    """What was found, in one line."""
    sentence: str = loads((folder / SUMMARY).read_text(encoding="utf-8"))["sentence"]
    return sentence
