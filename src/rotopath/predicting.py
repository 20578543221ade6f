"""A model applied to files, folders and whole slides, with a folder of results for each.

In: a run and paths. Out: for every slide objects (GeoJSON and CSV), a heat map (OME-TIFF), an overlay, and a summary
with its provenance. A slide that is done is skipped, one that was cut off is done again, a bad one stops nobody.
"""

import csv
import hashlib
import io
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from json import JSONDecodeError, loads
from pathlib import Path

import numpy as np

from rotopath import runs
from rotopath.data.folders import IMAGE_SUFFIXES
from rotopath.images import Slide, UnreadableFileError, open_slide
from rotopath.images.geojson import Point, SlideObject, write_geojson
from rotopath.images.overlay import DRAWN, draw_overlay
from rotopath.images.pyramid import write_pyramid
from rotopath.images.readers import SLIDE_SUFFIXES
from rotopath.inference.finding import COLORS
from rotopath.inference.slides import Model, Options, SlidePass, heat_frame
from rotopath.runs import Run, RunError
from rotopath.writing import replaced_folder

GEOJSON, TABLE, HEAT, DEVIATION = "objects.geojson", "objects.csv", "heatmap.ome.tif", "deviation.ome.tif"
OVERLAY, SUMMARY = "overlay.png", "summary.json"
LONGEST_HEAT = 4096  # side of the heat map that an overlay is drawn from; larger ones are thinned out
Seen = Callable[[Path, int, int], None]  # told the slide, how many of its tiles are done, and how many there are


@dataclass(frozen=True)
class Outcome:
    """What became of one slide."""

    path: Path
    folder: Path
    state: str  # "done", "skipped" or "failed"
    reason: str = ""


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
    options: Options,
    spacing_um_px: float | None = None,
    device: str | None = None,
    precision: str | None = None,
    seen: Seen = lambda _slide, _done, _all: None,
) -> Iterator[Outcome]:
    """One slide after another; each is told of when it is over."""
    model = run.ready(device, precision)
    out.mkdir(parents=True, exist_ok=True)
    for path, folder in place_results(slides, out).items():
        about = _describe(run, path, options, spacing_um_px) | {"precision": model.precision}
        if _is_done(folder, about, precision):
            yield Outcome(path, folder, "skipped")
            continue
        try:
            if folder.exists() and not (folder / SUMMARY).exists() and any(folder.iterdir()):
                raise RunError(f"{folder} holds something else; choose another folder with --out.")
            with open_slide(path, spacing_um_px) as slide:
                _predict_one(model, slide, folder, options, about, partial(seen, path))
        except (UnreadableFileError, RunError, ValueError) as error:
            yield Outcome(path, folder, "failed", str(error))
        else:
            yield Outcome(path, folder, "done")


def _predict_one(
    model: Model,
    slide: Slide,
    folder: Path,
    options: Options,
    about: dict[str, object],
    seen: Callable[[int, int], None],
) -> None:
    begun = time.monotonic()
    with (
        replaced_folder(folder) as unfinished,
        tempfile.TemporaryDirectory(prefix="rotopath-") as files,
        SlidePass(model, slide, Path(files), options) as one,
    ):
        drawn: list[SlideObject] = []
        with (unfinished / TABLE).open("w", newline="", encoding="utf-8") as table:
            objects = _write_down(one.objects(seen), table, drawn, slide.origin_px)
            write_geojson(unfinished / GEOJSON, objects, slide.origin_px)
        write_pyramid(unfinished / HEAT, one.heat.bands(), one.heat.size, one.cell_um, "probability")
        if one.deviation is not None:
            write_pyramid(unfinished / DEVIATION, one.deviation.bands(), one.heat.size, one.cell_um, "deviation")
        (corner, side), thin = heat_frame(one), -(-max(one.heat.size) // LONGEST_HEAT)
        heat = np.concatenate([band[::thin, ::thin] for band in one.heat.bands(512 * thin)])
        draw_overlay(slide, heat, (corner, side * thin), COLORS[model.task], drawn).save(unfinished / OVERLAY)
        runs.write_json(
            unfinished / SUMMARY,
            {
                **{name: round(value, 6) for name, value in one.summary().items()},
                "slide": {
                    "size_px": slide.size_px,
                    "spacing_um_px": slide.spacing_um_px,
                    "origin_px": slide.origin_px,
                    "stains_normalised": one.canvas.stains is not None,
                },
                "heatmap": {"spacing_um_px": one.cell_um, "corner_px": corner, "side_px": side},
                "seconds": round(time.monotonic() - begun, 1),
                "written": runs.now(),
                "about": about,
                **runs.describe_software(),
                "hardware": runs.describe_machine(model.device),
            },
        )


def _write_down(
    objects: Iterator[SlideObject], table: io.TextIOBase, drawn: list[SlideObject], origin_px: tuple[int, int]
) -> Iterator[SlideObject]:
    """Objects as they go by: each becomes a row of a table, and some are kept for drawing."""
    rows, columns = csv.writer(table, lineterminator="\n"), ["id", "class", "x_px", "y_px"]
    is_empty = True
    for one in objects:
        if is_empty:
            rows.writerow([*columns, *one.measurements])
            is_empty = False
        x, y = _middle(one, origin_px)
        measured = [f"{value:.6g}" for value in one.measurements.values()]
        rows.writerow([one.id, one.class_name, f"{x:.2f}", f"{y:.2f}", *measured])
        if len(drawn) < DRAWN:
            drawn.append(one)
        yield one
    if is_empty:
        rows.writerow(columns)


def _middle(one: SlideObject, origin_px: tuple[int, int]) -> tuple[float, float]:
    """As x and y, counted as the GeoJSON beside it counts."""
    if isinstance(one.shape, Point):
        row, column = one.shape
    else:
        corners = np.concatenate([polygon.outer for polygon in one.shape])
        row, column = (corners.min(axis=0) + corners.max(axis=0)) / 2
    return column - origin_px[1], row - origin_px[0]


def _describe(run: Run, path: Path, options: Options, spacing_um_px: float | None) -> dict[str, object]:
    """What decides the results: the weights, the operating point, the file, and how it is looked at."""
    weights = hashlib.sha256((run.folder / runs.WEIGHTS).read_bytes()).hexdigest()[:16]
    return {
        "model": run.folder.resolve().name,
        "task": run.recipe.task,
        "orientations": run.recipe.orientations,
        "weights": weights,
        "operating_point": dict(run.point),
        "file": path.name,
        "file_bytes": path.stat().st_size if path.exists() else 0,
        "spacing_um_px": spacing_um_px,
        "options": asdict(options) | {"tile_px": None},  # tiles decide nothing
    }


def _is_done(folder: Path, about: dict[str, object], precision: str | None) -> bool:
    """Whether results are there that were made so, in any precision unless one was asked for: devices may change."""
    try:
        told = loads((folder / SUMMARY).read_text(encoding="utf-8"))["about"]
        return bool((told if precision else told | {"precision": about["precision"]}) == about)
    except (OSError, JSONDecodeError, KeyError, TypeError):
        return False


def read_summary(folder: Path) -> str:
    """What was found, in a few words."""
    told = loads((folder / SUMMARY).read_text(encoding="utf-8"))
    task, tissue = told["about"]["task"], f"{told['tissue_mm2']:.2f} mm² of tissue"
    if task == "tumor":
        return f"tumor in {told['tumor_share']:.1%} of {tissue}"
    name, one = {"mitosis": ("mitoses", "mitosis"), "nuclei": ("nuclei", "nucleus")}[task]
    count = int(told["objects"])
    return f"{count:,} {one if count == 1 else name}, {told[f'{name}_per_mm2']:,.1f} per mm² in {tissue}"
