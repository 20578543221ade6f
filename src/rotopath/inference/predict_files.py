"""Apply a model to image files, folders and whole slides, and write a folder of results for each file.

The folder contains the objects (GeoJSON and CSV), a heat map (OME-TIFF), an overlay, an image of the tissue, its focus
and pen marks (PNG), and a summary (JSON) that also describes the model, the options and the software. It also contains
crops of the objects with the highest scores and of the least certain objects (PNG), unless the objects are regions. If
objects are segmented, it contains their label map (OME-TIFF). With several rotations, it contains a map of the standard
deviation over rotations (OME-TIFF). On request, it contains the outputs of the network (`map.zip`), so that the network
need not run again for other thresholds. Files that already have results for the same model and options are skipped. A
file whose prediction was interrupted is predicted again. If a file fails, for whatever reason, this is reported, and
the prediction continues with the next file; only a full disk stops it. Several processes may write to the same folder
of results: a file that another process is predicting is left until the end.

People correct the objects in QuPath, and save them to the same file. A file of objects that has changed since the
prediction, but is whole, is never replaced. One that is damaged is set aside as `NAME.objects.geojson.old`.

Next to the folder NAME, `.NAME.lock` and `.NAME.pid` are the lock of the process that predicts the file, and the ID of
this process. After an unexpected error, `NAME.log` contains its traceback.
"""

import errno
import hashlib
import heapq
import math
import os
import shutil
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from rotopath.data.dataset import IMAGE_SUFFIXES, DataError
from rotopath.environment import describe_machine, describe_software, import_for_tables, now
from rotopath.images import Slide, UnreadableFileError, open_slide
from rotopath.images.containers import SLIDE_SUFFIXES, is_slide_folder, keep_one_file_per_series
from rotopath.images.drawing import MAX_DRAWN, draw_crops
from rotopath.images.files import expect_file
from rotopath.images.geojson import (
    MAX_JSON_BYTES,
    SlideObject,
    read_json,
    write_geojson,
    write_parquet,
    write_rows,
)
from rotopath.images.outlines import Point, Polygon
from rotopath.images.pyramid import MapWriter, StoredMap, write_pyramid
from rotopath.images.tissue import make_region
from rotopath.inference.slide_pass import Model, PassOptions, SlidePass
from rotopath.writing import (
    BusyError,
    atomic_folder,
    hold_lock,
    identify_file,
    is_disk_full,
    is_unchanged,
    parse_json,
    recover_folder,
    remove_leftovers,
    write_json,
    write_text,
)

# Names of the files in the folder of results
GEOJSON, TABLE, HEAT, DEVIATION = "objects.geojson", "objects.csv", "heatmap.ome.tif", "deviation.ome.tif"
LABELS, OVERLAY, CROPS, SUMMARY = "labels.ome.tif", "overlay.png", "crops.png", "summary.json"
QUALITY = "quality.png"
PARQUET, EMBEDDING = "objects.parquet", "embedding.npy"
MAP = "map.zip"  # the outputs of the network, from which `reuse` finds objects with other thresholds
RESULTS = {GEOJSON, TABLE, HEAT, DEVIATION, LABELS, OVERLAY, CROPS, SUMMARY, QUALITY, PARQUET, EMBEDDING, MAP}
SYSTEM_FILES = {"Thumbs.db", "desktop.ini"}  # which Windows writes; those of other systems begin with a dot
# What takes time: tissue and stains are measured; focus is measured, and pixels are read, and their stains normalized,
# by threads; the network computes, or waits for pixels; its outputs are written into maps; objects are found; and files
# are written.
STAGES = ("tissue", "focus", "reading", "stains", "network", "maps", "objects", "files")
CROP_COUNT = 24  # number of objects with the highest score, and of the least certain objects, that are cropped
OUT_OF_MEMORY = ("not enough memory", "can't allocate memory", "out of memory")  # parts of error messages of torch
HASHED_BYTES = 2**26  # files of results up to this size are compared by checksum, larger ones by size, which is fast
OnTile = Callable[[Path, int, int], None]  # slide, number of finished tiles of the slide, number of all its tiles
OutcomeState = Literal["done", "skipped", "failed", "waiting"]


class DiskFullError(OSError):
    """The disk is full, so that no slide can be predicted. The message is one sentence."""


@dataclass(frozen=True)
class SlideOutcome:
    """Outcome of the prediction of one slide: done, skipped or failed.

    If another process is predicting the slide, the state is first "waiting". After the other process has ended, the
    slide has a second outcome.
    """

    path: Path  # file of the slide
    folder: Path  # folder of results
    state: OutcomeState
    reason: str = ""  # one sentence, if the slide failed or is waiting, or if something of older results was kept

    @property
    def warnings(self) -> list[str]:
        """Sentences that say why the results may be wrong, from `summary.json`. Empty if there are no results."""
        if self.state in ("failed", "waiting"):
            return []
        warnings: list[str] = _read_summary(self.folder).get("warnings", [])
        return warnings


@dataclass(frozen=True)
class FileOptions:
    """Options for the prediction of files."""

    slide: PassOptions = field(default_factory=PassOptions)
    spacing_um_px: float | None = None  # pixel spacing of all files; if None, each file must state its own
    override_spacing: bool = False  # if True, `spacing_um_px` may differ by more than 1 % from that of a file
    same_precision: bool = False  # if True, existing results with another precision (16 or 32 bits) are replaced
    # GeoJSON files of QuPath annotations, or folders with a file for each slide: `slide.svs.geojson` or `slide.geojson`
    roi: Path | None = None  # outlines of the area to predict; None: the whole slide
    exclude: Path | None = None  # outlines of areas that are left out
    parquet: bool = False  # if True, also write the table of objects as a Parquet file
    keep_map: bool = False  # if True, store the outputs of the network beside the results
    reuse: bool = False  # if True, read the outputs of the network from the existing results, and keep them there

    def __post_init__(self) -> None:
        if self.parquet:  # a missing package is reported before any slide is predicted
            import_for_tables("pyarrow")


def list_slides(inputs: Sequence[Path]) -> list[Path]:
    """Return the given files, and the slides and images in the given folders, without duplicates.

    A folder may itself be a slide, in OME-Zarr or in several DICOM files. Raises DataError if a path does not exist, or
    if a folder contains no slides or images.
    """
    slides: list[Path] = []
    for path in inputs:
        if path.is_dir() and not is_slide_folder(path):
            suffixes = (*SLIDE_SUFFIXES, *IMAGE_SUFFIXES)
            inside = [
                entry
                for entry in path.iterdir()
                if (entry.suffix.lower() in suffixes and not entry.is_dir()) or is_slide_folder(entry)
            ]
            if not inside:
                raise DataError(f"{path} contains no slides or images; choose files, or another folder.")
            slides += keep_one_file_per_series(inside)
        elif path.exists():
            slides.append(path)
        else:
            raise DataError(f"{path} does not exist; choose a slide, an image, or a folder.")
    return list(dict.fromkeys(slides))


def assign_folders(slides: Sequence[Path], out: Path) -> dict[Path, Path]:
    """Return the folder of results for each slide: the subfolder of `out` with the file name of the slide.

    Raises DataError if two slides have the same file name, or if `out` is a file.
    """
    if out.exists() and not out.is_dir():
        raise DataError(f"{out} is a file, but the results need a folder; choose a folder with --out.")
    folders = {path: out / path.name for path in slides}
    if repeated := [name for name, count in Counter(path.name for path in slides).items() if count > 1]:
        raise DataError(f"There are several slides named {repeated[0]}; predict each of them with a different --out.")
    return folders


@dataclass(frozen=True)
class RegionFiles:
    """The GeoJSON files that select the region of a slide to predict."""

    roi: Path | None = None
    exclude: Path | None = None

    def describe(self) -> dict[str, object]:
        """Return the names of the files and the start of their SHA-256, for the summary; without files, nothing."""
        files = {"roi": self.roi, "exclude": self.exclude}
        return {
            key: {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()[:16]}
            for key, path in files.items()
            if path is not None
        }


def find_region_files(slides: Sequence[Path], options: FileOptions) -> dict[Path, RegionFiles]:
    """Return the GeoJSON files of the region of each slide, after reading each of them once as a check.

    If `options.exclude` is a folder, slides without a file are predicted whole. Raises a ValueError if another file is
    missing, if a file is not valid, or if one file is given for several slides.
    """
    rois = _assign_geojson("--roi", options.roi, slides)
    excluded = _assign_geojson("--exclude", options.exclude, slides)
    if missing := [path for path in slides if options.roi is not None and path not in rois]:
        raise DataError(
            f"{options.roi} contains no region of interest for {missing[0].name}; save its annotations there as "
            f"{missing[0].name}.geojson."
        )
    regions = {path: RegionFiles(rois.get(path), excluded.get(path)) for path in slides}
    for files in regions.values():
        make_region(files.roi, files.exclude)
    return regions


def _assign_geojson(option: str, path: Path | None, slides: Sequence[Path]) -> dict[Path, Path]:
    """Return the GeoJSON file of each slide that has one, as an absolute path.

    `path` is a file for the only slide, a folder of files, or None. `option` is its name in error messages.
    """
    if path is None:
        return {}
    if not path.is_dir():
        if not path.exists():
            raise DataError(f"{path}, given with {option}, does not exist; choose a GeoJSON file or a folder of them.")
        if len(slides) > 1:
            raise DataError(
                f"{option} is one file, but there are {len(slides)} slides; give a folder with a GeoJSON file for each "
                f"slide, such as {slides[0].name}.geojson."
            )
        return dict.fromkeys(slides, path.absolute())
    found = {}
    for slide in slides:
        names = dict.fromkeys([f"{slide.name}.geojson", f"{slide.stem}.geojson"])
        existing = [path / name for name in names if (path / name).is_file()]
        if existing:
            found[slide] = existing[0].absolute()
    if not found:
        raise DataError(
            f"{path}, given with {option}, contains no GeoJSON file of a slide; name the files like the slides, such "
            f"as {slides[0].name}.geojson."
        )
    return found


def predict_files(
    model: Model,
    slides: Sequence[Path],
    out: Path,
    options: FileOptions,
    on_tile: OnTile = lambda _slide, _done, _all: None,
) -> Iterator[SlideOutcome]:
    """Predict slides one after another, and yield the outcome of each slide.

    The results of a slide are written into the subfolder of `out` that `assign_folders` returns. A slide is skipped if
    this subfolder already contains results for the same file, model and options. A slide that another process is
    predicting has the outcome "waiting", and a second outcome at the end, after the other process has ended. If an
    error of any type occurs, the slide is reported as failed. Only a full disk ends the prediction: it raises
    DiskFullError. After each tile, the function `on_tile` is called with the path of the slide, the number of finished
    tiles and the number of all tiles to predict in this slide. With workers, it is called from another thread.
    """
    folders = assign_folders(slides, out)
    regions = find_region_files(slides, options)
    out.mkdir(parents=True, exist_ok=True)
    waiting = []
    for path, folder in folders.items():
        outcome = _predict_file(model, path, folder, options, regions[path], on_tile, wait_s=0)
        if outcome.state == "waiting":
            waiting.append(path)
        yield outcome
    for path in waiting:
        yield _predict_file(model, path, folders[path], options, regions[path], on_tile, wait_s=None)


def _predict_file(
    model: Model,
    path: Path,
    folder: Path,
    options: FileOptions,
    region: RegionFiles,
    on_tile: OnTile,
    wait_s: float | None,
) -> SlideOutcome:
    """Predict a slide, write its folder of results, and return its outcome.

    If another process is predicting the slide, wait up to `wait_s` seconds, or without end if it is None.
    """
    try:
        about = _describe(model, path, options) | region.describe()
        if _is_done(recover_folder(folder), about, options):
            remove_leftovers(folder)
            return SlideOutcome(path, folder, "skipped", _describe_corrections(folder))
        with hold_lock(folder, wait_s):
            if _is_done(folder, about, options):  # the other process has just finished the slide
                return SlideOutcome(path, folder, "skipped", _describe_corrections(folder))
            _expect_same_model(folder, about)
            _expect_replaceable(folder)
            with open_slide(path, options.spacing_um_px, options.override_spacing) as slide:
                area = make_region(region.roi, region.exclude, slide.origin_px)
                in_region = replace(options, slide=replace(options.slide, region=area))
                with _open_map(folder, about, options) if options.reuse else nullcontext() as stored:
                    if stored is not None:
                        about["precision"] = stored.about["precision"]
                    kept = _write_results(model, slide, in_region, folder, about, partial(on_tile, path), stored)
            _log_file(folder).unlink(missing_ok=True)
        return SlideOutcome(path, folder, "done", kept)
    except BusyError as error:
        reason = (
            f"another process (ID {error.process_id}) is predicting this slide; this command waits for it at the end."
        )
        return SlideOutcome(path, folder, "waiting", reason)
    except Exception as error:
        if is_disk_full(error):
            raise DiskFullError(
                f"The disk of {folder.parent} or of the folder for temporary files ({tempfile.gettempdir()}) is full; "
                f"free some space, and run the same command again: finished slides are skipped."
            ) from error
        if is_out_of_memory(error) and model.device.type == "cuda":
            torch.cuda.empty_cache()  # frees memory for the next slide
        return SlideOutcome(path, folder, "failed", _describe_error(error, model, folder))


def _expect_same_model(folder: Path, about: Mapping[str, object]) -> None:
    """Raise DataError if a folder contains results of another model. Those of other options are replaced."""
    try:
        written = _read_summary(folder)["about"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return
    if written != about.get("model", written):
        raise DataError(f"{folder} contains results of the model {written!r}; choose another folder with --out.")


def _is_corrected(folder: Path, hashed_bytes: float = math.inf) -> bool:
    """Return whether the file of objects has changed since the prediction, but is whole: a person has saved it.

    Files of more than `hashed_bytes` are compared by size only. Returns False if it is not known what was written.
    """
    try:
        if is_unchanged(folder / GEOJSON, _read_summary(folder)["files"][GEOJSON], hashed_bytes):
            return False
        if (folder / GEOJSON).stat().st_size > MAX_JSON_BYTES:  # it cannot be read as a whole, and may be valid
            return True
        return isinstance(read_json(folder / GEOJSON), dict | list)  # a person may draw shapes that are not used here
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _describe_corrections(folder: Path) -> str:
    """Return a sentence that says that the corrections of a slide are kept, or "" if there are none."""
    if not _is_corrected(folder, HASHED_BYTES):
        return ""
    return (
        f"{GEOJSON} has changed since the prediction, such as by corrections, and is kept; to predict the slide again, "
        f"choose another folder with --out, or delete {folder}."
    )


def _expect_replaceable(folder: Path) -> None:
    """Raise DataError if a folder contains the work of a person: corrected objects, or files that are not results."""
    if not folder.exists():
        return
    names = [path.name for path in folder.iterdir()]
    if names and SUMMARY not in names:
        raise DataError(f"{folder} contains files that are not results; choose another folder with --out.")
    try:
        written = set(_read_summary(folder).get("files", ()))
    except (OSError, ValueError):
        written = set()
    if others := sorted(set(names) - RESULTS - SYSTEM_FILES - written - {n for n in names if n.startswith(".")}):
        raise DataError(
            f"{folder} contains {others[0]}, which is not a result, and would be lost; move it, or choose another "
            f"folder with --out."
        )
    if _is_corrected(folder):
        raise DataError(
            f"{folder / GEOJSON} has changed since the prediction, such as by corrections, which would be lost; choose "
            f"another folder with --out, or delete {folder}."
        )


def _set_aside(folder: Path, unfinished: Path) -> str:
    """Keep a copy of the file of objects if it may contain the work of a person, and say so in a sentence.

    This is a damaged file, or one of which it is not known whether it is as predicted. `unfinished` is the folder that
    will replace `folder`. Returns "" if nothing would be lost.
    """
    old = folder / GEOJSON
    if not old.is_file() or not old.stat().st_size:
        return ""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        if is_unchanged(old, _read_summary(folder)["files"][GEOJSON]):
            return ""
    if is_unchanged(old, identify_file(unfinished / GEOJSON)):
        return ""
    names = (f"{folder.name}.{GEOJSON}.old{number or ''}" for number in count())
    kept = next(path for path in map(folder.with_name, names) if not path.exists())
    _link_file(old, kept)
    return f"the old {GEOJSON} was damaged or of unknown origin, and is kept as {kept}."


def _open_map(folder: Path, about: Mapping[str, object], options: FileOptions) -> StoredMap:
    """Return the stored map in a folder of results. Raises DataError if it is not what the network would predict.

    `about` describes the requested prediction. `SlidePass` checks that the map covers the area to predict.
    """
    if not (folder / MAP).exists():
        raise DataError(f"{folder} contains no stored map; predict the slide with --keep-map first.")
    stored = StoredMap(folder / MAP)
    names = ("weights", "file", "file_bytes", "spacing_um_px", "rotations", "precision")
    of_map, requested = (
        {**given, **(chosen if isinstance(chosen := given.get("options"), dict) else {})}
        for given in (stored.about, about)
    )
    for name in names if options.same_precision or "precision" not in of_map else names[:-1]:
        if name not in of_map or of_map[name] != requested[name]:
            stored.close()
            raise DataError(
                f"The map in {folder} was stored with {name} {of_map.get(name)}, but {requested[name]} is requested; "
                f"predict the slide again, with --keep-map."
            )
    return stored


def _describe_error(error: Exception, model: Model, folder: Path) -> str:
    """Return an error that ended the prediction of a slide as one sentence.

    The traceback of an unexpected error, which may be an error in rotopath, is written next to the folder of results.
    """
    if isinstance(error, UnreadableFileError | DataError):
        return str(error)
    if is_out_of_memory(error):
        memory = "the GPU's memory" if model.device.type == "cuda" else "memory"
        return f"{memory} is too small for this slide; use a machine with more memory."
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return "its file name is too long for the names of the results; give the slide a shorter name."
    if isinstance(error, OSError) and error.errno is not None:
        return f"{error.filename or 'a file'} cannot be read or written ({error.strerror})."
    sentence = " ".join(str(error).split()).rstrip(".")
    with suppress(OSError):
        write_text(log := _log_file(folder), "".join(traceback.format_exception(error)))
        return f"{type(error).__name__}{f': {sentence}' if sentence else ''}; the traceback is in {log}."
    return f"{type(error).__name__}{f': {sentence}' if sentence else ''}."


def _log_file(folder: Path) -> Path:
    """Return the file for the traceback of an unexpected error."""
    return folder.with_name(f"{folder.name}.log")


def read_sentence(folder: Path) -> str:
    """Return the sentence that summarizes the slide, from `summary.json` in a folder of results."""
    sentence: str = _read_summary(folder)["sentence"]
    return sentence


def read_stages(folder: Path) -> tuple[float, dict[str, float]]:
    """Return the number of predicted megapixels, and the seconds of each stage (`STAGES`), from `summary.json`."""
    summary = _read_summary(folder)
    return summary["predicted_mpx"], summary["seconds_of_stages"]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error of Python or torch means that there is not enough memory."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | BrokenProcessPool):  # the system has killed a worker
        return True
    return any(message in str(error) for message in OUT_OF_MEMORY)


def _write_results(
    model: Model,
    slide: Slide,
    options: FileOptions,
    folder: Path,
    about: dict[str, object],
    on_progress: Callable[[int, int], None],
    stored: StoredMap | None,
) -> str:
    """Predict a slide, and write all results into a folder atomically. Return what `_set_aside` says of older results.

    `about` is the dictionary that `_describe` returns; it is saved in the summary. After each tile, `on_progress` is
    called with the number of finished tiles and the number of all tiles to predict. If the outputs of the
    network are given as `stored`, the network does not run, and their file is kept.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        unfinished = stack.enter_context(atomic_folder(folder))
        writer = stack.enter_context(MapWriter(unfinished / MAP)) if options.keep_map and stored is None else None
        slide_pass = stack.enter_context(SlidePass(model, slide, options.slide, writer, stored))
        if stored is not None:
            _link_file(folder / MAP, unfinished / MAP)
            stack.callback(stored.close)  # before the old folder is replaced: Windows renames no folder of open files
        if writer is not None:
            writer.describe(about, slide_pass.map_mask)
        prepared = time.perf_counter()
        drawn: list[SlideObject] = []
        shapes: list[Point | tuple[Polygon, ...]] = []
        score = model.task.object_score
        best = _Shortlist(lambda item: item.measurements[score])
        least_certain = _Shortlist(lambda item: item.measurements.get("deviation", -item.measurements[score]))
        with slide_pass.stopwatch.measure("files"):
            with (unfinished / TABLE).open("w", newline="", encoding="utf-8") as table:
                shape_of_table = slide.origin_px, slide_pass.measurement_names
                objects = write_rows(slide_pass.objects(on_progress), table, *shape_of_table)
                if options.parquet:
                    objects = write_parquet(objects, unfinished / PARQUET, *shape_of_table)
                if options.slide.embedding and slide_pass.labels is None:
                    objects = _collect_shapes(objects, shapes)
                if model.task.drawn_as != "regions":
                    objects = least_certain.watch(best.watch(objects))
                write_geojson(unfinished / GEOJSON, _collect_first(objects, drawn), slide.origin_px)
            if options.slide.embedding:
                np.save(unfinished / EMBEDDING, slide_pass.embed(shapes))
            with ThreadPoolExecutor() as pool:  # compressing pixels leaves Python to other threads
                finished = [
                    pool.submit(write_pyramid, unfinished / name, map_file, um_px, values)
                    for name, map_file, um_px, values in (
                        (LABELS, slide_pass.labels, slide_pass.labels_um_px, "number in objects.csv"),
                        (HEAT, slide_pass.heat, slide_pass.heat_um_px, "probability"),
                        (DEVIATION, slide_pass.deviation, slide_pass.heat_um_px, "deviation"),
                    )
                    if map_file is not None
                ]
                images = [(OVERLAY, slide_pass.draw_overlay(drawn)), (QUALITY, slide_pass.draw_quality())]
                if best.items:
                    groups = {f"Highest {score}": best.items}
                    if len(best.items) == CROP_COUNT:  # with fewer objects, both groups would be the same
                        groups["Least certain"] = least_certain.items
                    images.append((CROPS, draw_crops(slide, groups, score)))
                finished += [pool.submit(image.save, unfinished / name) for name, image in images]
                for future in finished:
                    future.result()
        ended = time.perf_counter()
        stages = {"tissue": prepared - started, **slide_pass.stopwatch.seconds}
        summary = slide_pass.summary()
        corner_px, side_px = slide_pass.heat_frame
        write_json(
            unfinished / SUMMARY,
            {
                **{name: round(value, 6) for name, value in summary.items()},
                "sentence": model.task.describe_summary(summary),
                "warnings": slide_pass.warnings(),
                "quality": {name: round(value, 6) for name, value in slide_pass.quality().items()},
                "slide": {
                    "size_px": slide.size_px,
                    "spacing_um_px": slide.spacing_um_px,
                    "origin_px": slide.origin_px,
                    "stains_normalised": slide_pass.view.stains is not None,
                },
                "reused_map": stored is not None,
                "heatmap": {"spacing_um_px": slide_pass.heat_um_px, "corner_px": corner_px, "side_px": side_px},
                "seconds": round(ended - started, 1),
                "predicted_mpx": round(slide_pass.predicted_px / 1e6, 3),
                "seconds_of_stages": {name: round(stages.get(name, 0.0), 3) for name in STAGES},
                "written": now(),
                "about": about,
                # The stored map is not finished yet. It contains checksums, which are compared when it is read.
                "files": {
                    path.name: identify_file(path, math.inf if path.name == GEOJSON else HASHED_BYTES)
                    for path in sorted(unfinished.iterdir())
                    if path.name != MAP
                },
                **describe_software(),
                "hardware": describe_machine(model.device),
            },
        )
        _expect_replaceable(folder)  # again, because a person may have saved corrections in the meantime
        return _set_aside(folder, unfinished)


def _link_file(source: Path, target: Path) -> None:
    """Give a file a second path or, on file systems without links, copy it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


class _Shortlist:
    """Keeps the CROP_COUNT objects with the highest values of a key, out of a stream of objects."""

    def __init__(self, key: Callable[[SlideObject], float]) -> None:
        self._key = key
        self._heap: list[tuple[float, int, SlideObject]] = []  # the lowest key first; in a tie, the latest object

    @property
    def items(self) -> list[tuple[int, SlideObject]]:
        """The objects and their numbers in the stream, from 1, sorted from the highest key to the lowest."""
        return [(-number, item) for _, number, item in sorted(self._heap, reverse=True)]

    def watch(self, objects: Iterable[SlideObject]) -> Iterator[SlideObject]:
        """Yield objects, and keep those with the highest keys."""
        for number, item in enumerate(objects, 1):
            entry = (self._key(item), -number, item)
            if len(self._heap) < CROP_COUNT:
                heapq.heappush(self._heap, entry)
            else:
                heapq.heappushpop(self._heap, entry)
            yield item


def _collect_shapes(objects: Iterable[SlideObject], shapes: list[Point | tuple[Polygon, ...]]) -> Iterator[SlideObject]:
    """Yield all objects, and append their shapes to a list."""
    for item in objects:
        shapes.append(item.shape)
        yield item


def _collect_first(objects: Iterable[SlideObject], drawn: list[SlideObject]) -> Iterator[SlideObject]:
    """Yield all objects, and append the first `MAX_DRAWN` of them to the list `drawn`, for the overlay.

    The copies have no measurements and no text of files, which would need five times as much memory as the shapes.
    """
    for item in objects:
        if len(drawn) < MAX_DRAWN:
            drawn.append(replace(item, measurements={}))
        yield item


def _describe(model: Model, path: Path, options: FileOptions) -> dict[str, object]:
    """Return a dictionary of everything that the results depend on: the model, file, options and precision.

    The files of the region are added by `predict_files`. The requested classes are included only if there are any, so
    that results of versions without this option still count as finished.
    """
    chosen = options.slide
    classes = {"classes": list(chosen.classes)} if chosen.classes else {}
    return {
        **model.about,
        "file": path.name,
        "file_bytes": path.stat().st_size if path.is_file() else 0,
        "spacing_um_px": options.spacing_um_px,
        # Results do not depend on the tile size.
        "options": {"rotations": chosen.rotations, "tile_px": None, "everywhere": chosen.everywhere, **classes},
        "precision": model.precision,
    }


def _is_done(folder: Path, about: dict[str, object], options: FileOptions) -> bool:
    """Return whether a folder contains undamaged results for `about`, with all files that `options` request.

    Objects that a person has corrected are undamaged.

    `about` is the dictionary that `_describe` returns. Unless `options.same_precision` is true, the results may have
    been computed with another precision. Files that only some options write may be missing if they are not requested.
    Results of versions that did not record the files in the summary are not compared with it.
    """
    requested = {MAP: options.keep_map, PARQUET: options.parquet, EMBEDDING: options.slide.embedding}
    if any(is_requested and not (folder / name).exists() for name, is_requested in requested.items()):
        return False
    try:
        summary = _read_summary(folder)
        written = summary["about"]
        if (written if options.same_precision else written | {"precision": about["precision"]}) != about:
            return False
        files = summary.get("files", {}).items()
        kept = ((name, identity) for name, identity in files if name not in requested or (folder / name).exists())
        return all(
            is_unchanged(folder / name, identity, HASHED_BYTES)
            or (name == GEOJSON and _is_corrected(folder, HASHED_BYTES))
            for name, identity in kept
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _read_summary(folder: Path) -> dict[str, Any]:
    """Return the content of `summary.json` in a folder of results. Raises ValueError or OSError if it is damaged.

    Summaries of earlier versions may lack keys; those of the values that are read here have the right types.
    """
    expect_file(folder / SUMMARY)
    summary = parse_json((folder / SUMMARY).read_bytes())
    if not isinstance(summary, dict):
        raise ValueError("the summary is not a JSON object")
    for key, expected in (("about", dict), ("files", dict), ("sentence", str), ("warnings", list)):
        if not isinstance(summary.get(key, expected()), expected):
            raise ValueError(f"the key {key!r} has a wrong type")
    if not all(isinstance(warning, str) for warning in summary.get("warnings", [])):
        raise ValueError("a warning is not a string")
    return summary
