"""Apply a model to a whole slide, and return the objects in it, a heat map, and a summary.

A `SlidePass` predicts a slide tile by tile, and yields each object as soon as the object is complete. The heat map, and
regions that cross tile borders, are kept in temporary files. Memory use therefore does not grow with the slide. Two
functions use a `SlidePass`: `predict_slide` collects all results in memory, and `predict_files` writes them to a
folder.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage
from torch import Tensor

from rotopath.data.dataset import DataError
from rotopath.environment import count_cores, import_for_tables
from rotopath.group import reflect_index
from rotopath.images import Slide, Tissue, find_tissue
from rotopath.images.drawing import Caption, Color, DrawnAs, HeatMap, draw_overlay, reduce_slide
from rotopath.images.geojson import COLUMNS, SlideObject, to_row, write_geojson, write_parquet, write_rows
from rotopath.images.outlines import Point, Polygon, clamp_outline, fill_outline, trace_outlines
from rotopath.images.pyramid import MapFile, MapWriter, StoredMap
from rotopath.images.stain import Stain, Stains, measure_stains
from rotopath.images.tissue import Focus, Region, measure_focus
from rotopath.inference.dense import FeatureNetwork, MixedNetwork, check_rotations
from rotopath.inference.tiling import (
    READERS,
    TILE_PX,
    Grid,
    Run,
    Span,
    Stopwatch,
    Tile,
    compute_ahead,
    pick,
    predict_tiles,
    read_tiles,
    run_here,
    spare_old_objects,
    start_workers,
    switch_threads_often,
)
from rotopath.models import DenseNetwork
from rotopath.writing import atomic_file, temporary_folder

if TYPE_CHECKING:
    import pandas
    import spatialdata

GPU_TILE_PX = 2 * TILE_PX  # with smaller tiles, a GPU waits for Python, which starts its computations one by one
MEASURED_PX = 2**21  # largest number of pixels from which stains are measured; on larger slides, samples are measured
SAMPLE_PX = 256  # side of each of these square samples
BLOCK_PX, CACHED_BLOCKS = 512, 16 * READERS  # slides are read in square blocks, cached for adjacent tiles; 32: 25 MB
BLOCKS_OF_WORKER = 32  # blocks that another process caches: its tiles are seldom adjacent
MAX_WORKERS, MIN_TILES_FOR_WORKERS = 16, 8  # for the number of processes that is chosen if none is requested
MAX_LABELS_PX = 2**28  # largest label map that is kept in memory, which needs 1 GB
MAX_ENLARGEMENT = 1.5  # pixels that are enlarged more than this for the network lack details that it has learned
MIN_FOCUS_MM2 = 0.1  # in less tissue than this, a fraction of tissue that is out of focus means little
MAX_BLURRED, MAX_PEN = 0.1, 0.1  # larger fractions, out of focus or of pen marks, cause a warning
QUALITY_COLORS: dict[str, Color] = {"tissue": (0, 150, 60), "out of focus": (230, 120, 0), "pen marks": (200, 0, 200)}
REGION_COLORS: dict[str, Color] = {"region of interest": (20, 20, 20), "excluded": (130, 130, 130)}
OVERLAY_HEAT_PX = 4096  # heat maps with a longer side are subsampled before they are drawn on an overlay
OnProgress = Callable[[int, int], None]  # number of finished tiles, number of all tiles
Map = NDArray[np.float32]
Item = TypeVar("Item")


class ObjectFinder(Protocol):
    """Finds the objects of a slide in its tiles."""

    def find(self, tiles: Iterable[Tile], run: Run = run_here) -> Generator[SlideObject]:
        """Yield each object as soon as no later tile can change it.

        `tiles` yields the tiles of a slide, row by row. `run` is used like `map`, and may call a function in other
        processes; the function, the items and the results must then be picklable. Close its result if it may not be
        used to the end.
        """
        ...


@runtime_checkable
class LabelPainter(Protocol):
    """An object finder that also paints its objects into a label map of the slide.

    It yields and paints only the objects for which the function `is_wanted` returns True.
    """

    # Number of the object at each output, in the order in which objects are yielded: 1, 2, ...; 0 for background
    labels: MapFile
    is_wanted: Callable[[SlideObject], bool]


@runtime_checkable
class AreaFinder(Protocol):
    """An object finder whose objects are areas of tissue, made of outputs. "area_mm2" is the area of their tissue."""

    tissue_mm2: NDArray[np.float64]  # (rows, columns): area of the tissue in the region, in the cell of each output


class SlideTask(Protocol):
    """The properties and methods of a task that `SlidePass` uses. They are documented in `rotopath.tasks.Task`."""

    @property
    def name(self) -> str: ...
    @property
    def spacing_um_px(self) -> float: ...
    @property
    def stain(self) -> Stain: ...
    @property
    def colors(self) -> tuple[Color, ...]: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def drawn_as(self) -> DrawnAs: ...
    @property
    def object_score(self) -> str: ...
    @property
    def measurement_names(self) -> tuple[str, ...]: ...
    @property
    def heatmap_cell(self) -> int: ...
    @property
    def needs_pixels(self) -> bool: ...
    @property
    def tissue_margin_um(self) -> float: ...
    @property
    def background_probabilities(self) -> tuple[float, ...]: ...
    @property
    def cuts_at_roi(self) -> bool: ...
    @property
    def expects_he(self) -> bool: ...
    def halo(self, stride_px: int) -> int: ...
    def to_probabilities(self, logits: Tensor) -> Tensor: ...
    def make_object_finder(self, grid: Grid, point: Mapping[str, float], folder: Path) -> ObjectFinder: ...
    def class_maps(self, maps: Map) -> Map: ...
    def foreground_map(self, maps: Map) -> Map: ...
    def foreground_deviation(self, deviations: Map) -> Map: ...
    def summarize(self, counts: Counter[str], areas_mm2: Counter[str], tissue_mm2: float) -> dict[str, float]: ...
    def describe_summary(self, summary: Mapping[str, float]) -> str: ...
    def find_implausible_density(self, summary: Mapping[str, float]) -> str: ...


@dataclass(frozen=True)
class Model:
    """A model that is ready for prediction: a task, a network in evaluation mode, and decision thresholds."""

    task: SlideTask
    network: DenseNetwork  # on `device`
    point: Mapping[str, float]  # operating point: the decision thresholds by name
    device: torch.device
    about: Mapping[str, object] = field(default_factory=dict)  # description of the model for the summary of each slide

    @property
    def precision(self) -> str:
        """Floating-point precision of the convolutions in bits: "16" or "32"."""
        return "16" if isinstance(self.network, MixedNetwork) else "32"

    @property
    def tile_px(self) -> int:
        """Default for the largest side of a tile in pixels: large enough to use the full speed of the device."""
        return GPU_TILE_PX if self.device.type == "cuda" and self.precision == "16" else TILE_PX


@dataclass(frozen=True)
class PassOptions:
    """Options for the prediction of a slide."""

    rotations: int = 1  # number of rotations for test-time augmentation; above 1, also return the standard deviation
    tile_px: int | None = None  # largest side of a tile in pixels; by default `Model.tile_px`
    everywhere: bool = False  # if True, also predict where no tissue was detected
    # Number of processes that normalize stains and search tiles for objects; 0: the process of the network does both;
    # None: chosen by `SlidePass`
    workers: int | None = 0
    region: Region | None = None  # the part of the slide to predict; None: the whole slide
    classes: tuple[str, ...] = ()  # names of the classes whose objects are returned; empty: all classes
    embedding: bool = False  # if True, also compute the features of the network for each object (`SlidePass.embed`)

    def __post_init__(self) -> None:
        check_rotations(self.rotations)


# Predict a slide, and keep the results in memory


@dataclass(frozen=True)
class SlideResult:
    """Result for one slide or image, in memory."""

    task: str  # name of the task
    objects: list[SlideObject]  # coordinates are in pixels of level 0
    # Heat map (h, w): the probability that any class is present or, in "classify", of the most probable class
    map: NDArray[np.float32]
    deviation: NDArray[np.float32] | None  # (h, w): standard deviation over rotations; None for one rotation
    map_um: float  # pixel spacing of the map in µm/px
    summary: Mapping[str, float]  # numbers by name, such as "tissue_mm2" and "objects" (number of objects)
    origin_px: tuple[int, int]  # (row, column) on level 0 from which QuPath counts coordinates
    overlay: Image.Image  # the slide with the heat map and the objects drawn on it
    warnings: tuple[str, ...] = ()  # sentences that say why the result may be wrong
    measurement_names: tuple[str, ...] = ()  # of the objects, in order
    # Label map (h, w): the number of the object at each pixel, as in `table`, or 0. None if the task outlines no
    # objects pixel by pixel, or if the map has more than `MAX_LABELS_PX` pixels; `rp.predict` writes maps of any size.
    labels: NDArray[np.uint32] | None = None
    labels_corner_px: tuple[float, float] = (0.0, 0.0)  # upper left corner (row, column) of the label map ...
    labels_side_px: float = 1.0  # ... and side of its pixels, both in pixels of level 0
    embedding: NDArray[np.float32] | None = None  # (objects, F): see `SlidePass.embed`; None unless requested

    def to_geojson(self, path: Path | str) -> None:
        """Write the objects to a GeoJSON file for QuPath. If the file name ends in ".gz", the file is compressed."""
        write_geojson(Path(path), self.objects, self.origin_px)

    def to_csv(self, path: Path | str) -> None:
        """Write the objects to a CSV table, with a row for each object, as `objects.csv` of `rotopath predict`."""
        with atomic_file(Path(path)) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
            for _ in write_rows(self.objects, file, self.origin_px, self.measurement_names):
                pass

    def to_parquet(self, path: Path | str) -> None:
        """Write the objects to a Parquet table with the rows and columns of `to_csv`.

        Raises ModuleNotFoundError if pyarrow is not installed.
        """
        with atomic_file(Path(path)) as unfinished:
            for _ in write_parquet(self.objects, unfinished, self.origin_px, self.measurement_names):
                pass

    @property
    def table(self) -> "pandas.DataFrame":
        """The objects as a pandas table, with a row for each object and the columns of `to_csv`.

        Raises ModuleNotFoundError if pandas is not installed.
        """
        pandas = import_for_tables("pandas")
        rows = [to_row(item, number, self.origin_px) for number, item in enumerate(self.objects, 1)]
        return pandas.DataFrame(rows, columns=None if rows else [*COLUMNS, *self.measurement_names])

    def to_spatialdata(self) -> "spatialdata.SpatialData":
        """Return the objects, their measurements and the label map as a SpatialData object.

        Coordinates are (x, y) in pixels of level 0, minus `origin_px`, as in the files. The shapes "objects" are
        polygons, or circles with a radius of 1 px for points; their index is the number of the object. The table
        "measurements" describes them, and contains the embedding in `obsm`, if there is one. Without objects, there are
        no shapes and no table. Raises ModuleNotFoundError if a package of the extra "tables" is not installed.
        """
        anndata, geopandas, models, shapely, sd, transformations = map(
            import_for_tables,
            ("anndata", "geopandas", "spatialdata.models", "shapely", "spatialdata", "spatialdata.transformations"),
        )
        shapes, tables, labels = {}, {}, {}
        if self.objects:
            rows = self.table.set_index("number", drop=False)
            polygons = [_to_shapely(shapely, item.shape, self.origin_px) for item in self.objects]
            frame = geopandas.GeoDataFrame({"geometry": polygons}, index=rows.index)
            if isinstance(self.objects[0].shape, Point):
                frame["radius"] = 1.0
            shapes["objects"] = models.ShapesModel.parse(frame)
            measured = rows[[name for name in rows.columns if name not in COLUMNS]]
            table = anndata.AnnData(measured.to_numpy(np.float64), obs=rows[list(COLUMNS)].rename(index=str))
            table.var_names = list(measured.columns)
            if self.embedding is not None:
                table.obsm["embedding"] = self.embedding
            table.obs["region"] = "objects"
            table.obs["region"] = table.obs["region"].astype("category")
            keys = {"region": "objects", "region_key": "region", "instance_key": "number"}
            tables["measurements"] = models.TableModel.parse(table, **keys)
        if self.labels is not None:
            side, (top, left) = self.labels_side_px, self.labels_corner_px
            scale = transformations.Scale([side, side], axes=("x", "y"))
            move = transformations.Translation([left - self.origin_px[1], top - self.origin_px[0]], axes=("x", "y"))
            to_level0 = {"global": transformations.Sequence([scale, move])}
            labels["labels"] = models.Labels2DModel.parse(self.labels, dims=("y", "x"), transformations=to_level0)
        return sd.SpatialData(shapes=shapes, tables=tables, labels=labels)

    def show(self) -> Image.Image:
        """Return the overlay: the slide with heat map and objects drawn on it. Notebooks display it."""
        return self.overlay

    def __repr__(self) -> str:
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in self.summary.items())
        warnings = "".join(f"; warning: {warning}" for warning in self.warnings)
        return f"SlideResult({self.task}: {numbers}{warnings})"


def predict_slide(model: Model, slide: Slide, options: PassOptions) -> SlideResult:
    """Predict a slide, and return all results in memory."""
    with SlidePass(model, slide, options) as slide_pass:
        # The copies have no text of files, which would need twice as much memory as the objects.
        objects = [replace(item) for item in slide_pass.objects()]
        labels = slide_pass.labels
        if labels is not None and math.prod(labels.size) > MAX_LABELS_PX:
            labels = None
        return SlideResult(
            task=model.task.name,
            objects=objects,
            map=slide_pass.heat.read(),
            deviation=None if slide_pass.deviation is None else slide_pass.deviation.read(),
            map_um=slide_pass.heat_um_px,
            summary=slide_pass.summary(),
            origin_px=slide.origin_px,
            overlay=slide_pass.draw_overlay(objects),
            labels=None if labels is None else labels.read(),
            labels_corner_px=slide_pass.grid.output_frame()[0],
            labels_side_px=slide_pass.grid.output_frame()[1],
            warnings=slide_pass.warnings(),
            embedding=slide_pass.embed([item.shape for item in objects]) if options.embedding else None,
            measurement_names=slide_pass.measurement_names,
        )


def _to_shapely(shapely: Any, shape: Point | tuple[Polygon, ...], origin_px: tuple[int, int]) -> Any:
    """Convert a shape to a geometry of the package shapely, with `origin_px` (row, column) subtracted."""
    if isinstance(shape, Point):
        return shapely.Point(shape.column - origin_px[1], shape.row - origin_px[0])
    polygons = [
        shapely.Polygon(outer, holes)
        for outer, *holes in ([(ring - origin_px)[:, ::-1] for ring in polygon.rings] for polygon in shape)
    ]
    return polygons[0] if len(polygons) == 1 else shapely.MultiPolygon(polygons)


class SlidePass:
    """Predicts a slide once, tile by tile. Use it in a `with` statement, which removes the temporary files at its end.

    First iterate over `objects()` to the end. After that, `summary()`, `draw_overlay()` and four maps are complete:

    - `heat`: the probability that any class is present or, in "classify", of the most probable class.
    - `winner`: the index of the most probable class; None if the task has one class.
    - `deviation`: the standard deviation over rotations; None with one rotation.
    - `labels`: the label map of the objects: their number in the order of `objects()`, from 1; None unless the task
      outlines objects pixel by pixel.

    The label map has a pixel for each output of the network. Each pixel of the other maps is computed from means over
    `task.heatmap_cell` × `task.heatmap_cell` outputs.

    With `writer`, the probabilities of the network are also written there. With `stored`, which was written in this
    way, they are read from there, and the network does not run. Raises DataError if the stored map is not of this
    slide, or does not cover the area to predict, or if the network has no features for the option `embedding`.
    """

    def __init__(
        self,
        model: Model,
        slide: Slide,
        options: PassOptions,
        writer: MapWriter | None = None,
        stored: StoredMap | None = None,
    ) -> None:
        self.model, self.slide, self.options, self._writer, self._stored = model, slide, options, writer, stored
        task = model.task
        self._features = None
        if options.embedding:
            try:
                self._features = FeatureNetwork(model.network)
            except ValueError as error:
                raise DataError(str(error)) from None
        tissue = find_tissue(slide)
        # Stains are those of all tissue, so that the objects in a region are the same as without a region.
        self.stopwatch = Stopwatch()
        self.predicted_px = 0  # pixels of the predicted tiles, at the pixel spacing of the model
        self.view = SlideView(slide, task.spacing_um_px, task.stain, tissue, self.stopwatch)
        self._tissue_mask = tissue.mask
        self.tissue, self._near_tissue = self._select_area(tissue)  # tissue in the region, and the area to predict
        halo, self._outputs_per_px = task.halo(model.network.geometry.stride_px), task.heatmap_cell
        self.grid = Grid(model.network, self.view, options.tile_px or model.tile_px, halo, self._outputs_per_px)
        if stored is not None:
            self._expect_covered(stored)
        self.heat_um_px = self._outputs_per_px * self.grid.stride_px * self.view.spacing_um_px  # spacing of the maps
        self._clear_counts()
        rows, columns = (-(-size // self._outputs_per_px) for size in self.grid.size)
        with ExitStack() as files:
            folder = files.enter_context(temporary_folder())

            def create_map(name: str) -> MapFile:
                map_file = MapFile(folder / name, (rows, columns))
                files.callback(map_file.close)
                return map_file

            self.heat = create_map("heat")
            self.winner = create_map("winner") if len(task.colors) > 1 else None  # index of the class
            self.deviation = create_map("deviation") if options.rotations > 1 else None
            self._finder = task.make_object_finder(self.grid, model.point, folder)
            self.labels = self._finder.labels if isinstance(self._finder, LabelPainter) else None
            if self.labels is not None:
                files.callback(self.labels.close)
            pool = ThreadPoolExecutor(1)  # focus is measured while the network computes
            files.callback(pool.shutdown, cancel_futures=True)
            self._focus = pool.submit(self._measure_focus)
            self._reduced = pool.submit(reduce_slide, slide)  # for images of the results
            self._files = files.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def objects(self, on_progress: OnProgress = lambda _done, _all: None) -> Iterator[SlideObject]:
        """Predict the tiles of the slide, and yield each object as soon as the object is complete.

        With the option `everywhere`, all tiles are predicted. Otherwise, only tiles that contain tissue or are within
        `task.tissue_margin_um` of tissue are predicted. After each tile, the function `on_progress` is called with the
        number of finished tiles and the number of all tiles to predict.

        With a region, only tiles in the region or near it are predicted. Tasks that outline areas outline only the part
        in the region (`task.cuts_at_roi`). Objects of other tasks are returned whole if their center is in the region.
        """
        self._clear_counts()
        found = self._detect(on_progress)
        self._files.callback(found.close)  # if the caller stops early, all threads end before the slide is closed
        objects: Iterator[SlideObject] = found
        if isinstance(self._finder, LabelPainter):
            self._finder.is_wanted = self._is_wanted
        else:
            objects = filter(self._is_wanted, objects)
        is_area = isinstance(self._finder, AreaFinder)
        if isinstance(self._finder, AreaFinder):
            rows_um, columns_um = (self.grid.edges_um(axis) for axis in (0, 1))
            self._finder.tissue_mm2 = self.tissue.measure_cells(rows_um, columns_um)
        for detected in objects:
            if is_area and not isinstance(detected.shape, Point):  # cells may reach beyond the slide
                detected = replace(detected, shape=clamp_outline(detected.shape, self.slide.size_px))
            self._counts[detected.class_name] += 1
            area_mm2 = detected.measurements.get("area_mm2", 0.0)
            self._areas_mm2[detected.class_name] += area_mm2  # type: ignore[assignment]
            yield detected

    def summary(self) -> dict[str, float]:
        """Return the summary of the slide as a dictionary from names to values.

        "tissue_mm2" is the area of the tissue mask in mm², also with the option `everywhere`. The other values are
        those of `task.summarize`, such as the number of objects and their density per mm² of tissue.
        """
        tissue_mm2 = self.tissue.area_mm2
        return {"tissue_mm2": tissue_mm2, **self.model.task.summarize(self._counts, self._areas_mm2, tissue_mm2)}

    def draw_overlay(self, objects: Iterable[SlideObject]) -> Image.Image:
        """Return an image of the slide with the objects or the heat map drawn on it, a caption and a scale bar."""
        task, (corner, side) = self.model.task, self.heat_frame
        step = -(-max(self.heat.size) // OVERLAY_HEAT_PX)
        winner = None if self.winner is None else self.winner.read_subsampled(step)
        heat = HeatMap(self.heat.read_subsampled(step), winner, (corner, side * step))
        lines = [task.describe_summary(self.summary())]
        if self.options.region is not None:
            lines.append("Only the region of interest was predicted.")
        caption = Caption(self.slide.path.name, lines, self.warnings())
        regions = self._list_regions()
        classes = dict(zip(task.class_names, task.colors, strict=True))
        classes |= {item.class_name: REGION_COLORS[item.class_name] for item in regions}
        slide, drawn = self._reduced.result(), [*regions, *objects]
        return draw_overlay(slide, heat, list(classes.items()), drawn, task.drawn_as, caption)

    def _list_regions(self) -> list[SlideObject]:
        """Return the outlines of the region of interest and of excluded areas as objects, to draw them."""
        region = self.options.region
        if region is None:
            return []
        outlines = zip(REGION_COLORS.items(), (region.roi or (), region.excluded), strict=True)
        return [SlideObject(shape, "annotation", name, color) for (name, color), shapes in outlines for shape in shapes]

    def quality(self) -> dict[str, float]:
        """Return what was measured of the quality of the slide: areas in mm², and fractions of the tissue.

        "pen_share" is the area of pen marks as a fraction of that of tissue and pen marks together; marks of a slide
        that is not H&E, or not known to be, are not found. Focus is measured on the tissue in the region.
        """
        focus, pen_mm2 = self._focus.result(), 0.0
        if self.tissue.pen is not None and self.model.task.expects_he and not self.tissue.stain_doubt:
            pen_mm2 = replace(self.tissue, mask=self.tissue.pen, coverage=None).area_mm2
        whole_mm2 = pen_mm2 + replace(self.tissue, coverage=None).area_mm2
        return {
            "focus_assessed_mm2": focus.assessed_mm2,
            "out_of_focus_share": focus.share,
            "pen_mm2": pen_mm2,
            "pen_share": pen_mm2 / whole_mm2 if whole_mm2 else 0.0,
        }

    def draw_quality(self) -> Image.Image:
        """Return an image of the slide with outlines of the tissue, of tissue out of focus, and of pen marks."""
        quality, focus, tissue = self.quality(), self._focus.result(), self.tissue
        mask = tissue.mask if tissue.coverage is None else tissue.mask & (tissue.coverage > 0)
        pen = tissue.pen if tissue.pen is not None and quality["pen_mm2"] else np.zeros_like(mask)
        masks = ((mask, tissue.spacing_um_px), (focus.is_blurred, focus.cell_um), (pen, tissue.spacing_um_px))
        objects = [
            SlideObject(polygons, "annotation", name, color)
            for (name, color), (mask, um) in zip(QUALITY_COLORS.items(), masks, strict=True)
            for polygons in trace_outlines(ndimage.label(mask)[0], (0.0, 0.0), um / self.slide.spacing_um_px).values()
        ]
        line = f"{tissue.area_mm2:.2f} mm² of tissue, {quality['out_of_focus_share']:.1%} of it out of focus"
        if not quality["focus_assessed_mm2"]:
            line = f"{tissue.area_mm2:.2f} mm² of tissue, whose focus could not be assessed"
        caption = Caption(self.slide.path.name, [f"{line}; {quality['pen_mm2']:.2f} mm² of pen marks"], self.warnings())
        regions = self._list_regions()
        classes = QUALITY_COLORS | {item.class_name: REGION_COLORS[item.class_name] for item in regions}
        slide, drawn = self._reduced.result(), [*regions, *objects]
        return draw_overlay(slide, None, list(classes.items()), drawn, "regions", caption)

    def warnings(self) -> tuple[str, ...]:
        """Return a sentence for each reason why the result may be wrong: the slide is not what the model knows.

        The reasons are pixels that are much larger than those of the network, an image that is not H&E, tissue that is
        out of focus or under pen marks, and a density of objects that does not occur in tissue.
        """
        task, warnings = self.model.task, []
        if not self.tissue.area_mm2 and not self.tissue.stain_doubt:
            where = "on the slide" if self.options.region is None else "in the region of interest"
            warnings.append(f"No tissue was found {where}.")
        if (enlargement := 1 / self.view.level0_px) > MAX_ENLARGEMENT:
            warnings.append(
                f"The slide has {self.slide.spacing_um_px:.3g} µm/px, and was enlarged {enlargement:.2g} times to the "
                f"{task.spacing_um_px:.3g} µm/px of the model; details that the model needs are missing. Check a part "
                f"of the results; scan the slide at a higher magnification, or use a model for its pixel spacing."
            )
        if task.expects_he and self.tissue.stain_doubt:
            warnings.append(f"The slide does not look like H&E, which the model knows: {self.tissue.stain_doubt}.")
        quality = self.quality()
        if quality["out_of_focus_share"] > MAX_BLURRED and quality["focus_assessed_mm2"] >= MIN_FOCUS_MM2:
            warnings.append(
                f"{quality['out_of_focus_share']:.0%} of the tissue is out of focus; results are unreliable there."
            )
        if quality["pen_share"] > MAX_PEN:
            warnings.append(
                f"Pen marks cover {quality['pen_mm2']:.2g} mm², {quality['pen_share']:.0%} of the area of tissue and "
                f"marks; what is below them is not counted as tissue."
            )
        if not self.options.classes and (density := task.find_implausible_density(self.summary())):
            warnings.append(density)
        return tuple(warnings)

    def embed(self, shapes: Sequence[Point | tuple[Polygon, ...]]) -> NDArray[np.float32]:
        """Return the embedding (n, F) of the objects: the mean of the features of the network over each object.

        Features are the input of the last layer of the network (see `FeatureNetwork`), without test-time augmentation.
        The mean is over the outputs inside of an object; at a point, it is the output that is nearest. `shapes` are
        those of all objects, in the order of `objects()`. They are not used, and may be empty, if there is a label map.
        The network runs on all tiles with objects. This needs the option `embedding`.
        """
        assert self._features is not None
        network, grid = self._features, self.grid
        count = len(shapes) if self.labels is None else sum(self._counts.values())
        sums, totals = np.zeros((count, network.channels)), np.zeros((count, 1))
        placed = _PlacedShapes(shapes if self.labels is None else (), grid)
        for rows, columns in grid.tiles:
            if self.labels is None:
                numbers, *outputs = placed.find_outputs(rows, columns)
            else:
                labels = self.labels.read_part(rows, columns).astype(np.int64)
                outputs = list(np.nonzero(labels))
                numbers = labels[*outputs] - 1
            if not len(numbers):
                continue
            _, (all_rows, all_columns), frame = grid.frame_of(rows, columns)
            pixels = torch.from_numpy(self.view.read(*frame)).permute(2, 0, 1)[None].to(self.model.device)
            with torch.no_grad():
                features = network(pixels)[0, :, rows.within(all_rows), columns.within(all_columns)]
            values = features.double().cpu().numpy()[:, *outputs]
            unique, indices = np.unique(numbers, return_inverse=True)
            totals[unique, 0] += np.bincount(indices)
            sums[unique] += np.stack([np.bincount(indices, channel) for channel in values], axis=1)
        return np.asarray(sums / totals, np.float32)

    @property
    def measurement_names(self) -> tuple[str, ...]:
        """Names of the measurements of the objects, in order."""
        names = self.model.task.measurement_names
        return (*names, "deviation") if names and self.options.rotations > 1 else names

    @property
    def labels_um_px(self) -> float:
        """Pixel spacing of the label map, in µm/px."""
        return self.grid.stride_px * self.view.spacing_um_px

    @property
    def heat_frame(self) -> tuple[tuple[float, float], float]:
        """Top left corner (row, column) of the heat map, and side of a heat-map pixel; both in pixels of level 0."""
        corner, side = self.grid.output_frame()
        return corner, side * self._outputs_per_px

    def _measure_focus(self) -> Focus:
        with self.stopwatch.measure("focus"):
            return measure_focus(self.slide, self.tissue, threads=READERS)

    def _clear_counts(self) -> None:
        """Set the number and the area of the objects to 0 for each class whose objects are returned."""
        names = self.options.classes or self.model.task.class_names
        self._counts, self._areas_mm2 = Counter(dict.fromkeys(names, 0)), Counter(dict.fromkeys(names, 0))

    def _select_area(self, tissue: Tissue) -> tuple[Tissue, Tissue | None]:
        """Return the tissue in the region, and the area to predict; the latter is None if it is the whole slide.

        Raises DataError if the region of interest is off the slide.
        """
        task, region = self.model.task, self.options.region
        near = None if self.options.everywhere else tissue.dilate(task.tissue_margin_um)
        if region is None:
            return tissue, near
        coverage = region.measure(tissue, self.slide)
        if not coverage.any() and not replace(region, excluded=()).measure(tissue, self.slide).any():
            height, width = self.slide.size_px
            raise DataError(
                f"The region of interest is outside of {self.slide.path.name}, which has {width} × {height} px; choose "
                f"the annotations of this slide."
            )
        # A pixel of the mask more than necessary, because the region may cut a corner of it.
        margin_um = tissue.spacing_um_px + (0 if task.cuts_at_roi else task.tissue_margin_um)
        area = replace(tissue, mask=coverage > 0).dilate(margin_um)
        return replace(tissue, coverage=coverage), area if near is None else replace(area, mask=area.mask & near.mask)

    @property
    def map_mask(self) -> NDArray[np.uint8]:
        """Mask for a stored map, at the pixels of the tissue mask: 1 where the slide is predicted, plus 2 on tissue."""
        near = np.ones_like(self._tissue_mask) if self._near_tissue is None else self._near_tissue.mask
        return np.asarray(near + 2 * self._tissue_mask, np.uint8)

    def _expect_covered(self, stored: StoredMap) -> None:
        """Raise DataError if the stored map is not of this slide, or does not cover the area to predict."""
        mask, name = self.map_mask, self.slide.path.name
        if not np.array_equal(mask & 2, stored.mask & 2):
            raise DataError(f"{name} has changed since its map was stored; predict it again, with --keep-map.")
        if (mask & ~stored.mask & 1).any():
            raise DataError(
                f"The stored map of {name} does not cover the whole area to predict, because it was stored with "
                f"another region or without --everywhere; predict the slide again, with --keep-map."
            )

    def _is_wanted(self, detected: SlideObject) -> bool:
        """Return whether an object has one of the requested classes and is in the region."""
        if self.options.classes and detected.class_name not in self.options.classes:
            return False
        region = self.options.region
        return (
            region is None or self.model.task.cuts_at_roi or bool(region.contains(detected.center, 1.0, (1, 1))[0, 0])
        )

    def _find_in_region(self, spans: tuple[Span, Span]) -> NDArray[np.bool_] | None:
        """Return which outputs, in a range of rows and of columns, are in the region; None if there is no region."""
        if self.options.region is None:
            return None
        first_um = [
            self.grid.positions_um(Span(span.start, span.start + 1), axis)[0] for axis, span in enumerate(spans)
        ]
        first_px = (first_um[0] / self.slide.spacing_um_px, first_um[1] / self.slide.spacing_um_px)
        _, side_px = self.grid.output_frame()
        return self.options.region.contains(first_px, side_px, (spans[0].size, spans[1].size))

    def _detect(self, on_progress: OnProgress) -> Generator[SlideObject]:
        """Predict the tiles near tissue (see `_is_near_tissue`), write them into the maps, and yield the objects."""
        task = self.model.task
        wanted = [tile for tile in self.grid.tiles if self._is_near_tissue(*tile)]

        def on_tile(done: int) -> None:
            on_progress(done, len(wanted))

        with switch_threads_often, spare_old_objects, start_workers(self._count_workers(len(wanted))) as run:
            if self._stored is None:
                device, rotations = self.model.device, self.options.rotations
                probabilities, needs_pixels = task.to_probabilities, task.needs_pixels
                # Threads read as fast as processes, but cannot normalize stains at the same time: Python is busy then.
                reading = None if self.view.stains is None else run
                tiles = predict_tiles(self.grid, wanted, device, rotations, probabilities, needs_pixels, reading)
            else:
                tiles = read_tiles(self.grid, wanted, self._read_stored, task.needs_pixels)
            # After an error, the traceback refers to the generators, so that only `closing` ends their threads.
            with (
                closing(tiles),
                closing(self._finish_tiles(tiles, on_tile)) as finished,
                closing(self._finder.find(finished, run or run_here)) as found,
            ):
                yield from self.stopwatch.watch("objects", found)

    def _count_workers(self, tiles: int) -> int:
        """Return the number of processes to start for a slide with this number of tiles.

        By default, none are started if the network runs on the CPU, which it keeps busy, or if objects are found
        quickly. On slides of a few tiles, their start would take longer than they save.
        """
        if self.options.workers is not None:
            return self.options.workers
        if self.model.device.type == "cpu" or not self.model.task.needs_pixels or tiles < MIN_TILES_FOR_WORKERS:
            return 0
        return min(MAX_WORKERS, max(1, count_cores() - 2))  # two cores for the network and the files

    def _finish_tiles(self, tiles: Iterable[Tile], on_tile: Callable[[int], None]) -> Generator[Tile]:
        """Yield predicted tiles for the search of objects, and write them into the maps.

        After the search of each tile, or after its start in another process, `on_tile` is called with the number of
        tiles.
        """
        # The network computes the next tile in another thread.
        with closing(compute_ahead(self.stopwatch.watch("network", tiles))) as ahead:
            for done, tile in enumerate(self.stopwatch.watch("waiting", ahead), 1):
                self.predicted_px += tile.rows.size * tile.columns.size * self.grid.stride_px**2
                with self.stopwatch.measure("maps"):
                    if self._writer is not None:
                        self._store(tile, self._writer)
                    cleared = self._clear_glass(tile)
                    self._write_maps(cleared)
                yield cleared
                on_tile(done)

    def _store(self, tile: Tile, writer: MapWriter) -> None:
        """Write the probabilities of a tile, then its standard deviations if there are any. On glass, they are 0."""
        maps = [tile.probabilities] if tile.deviations is None else [tile.probabilities, tile.deviations]
        values = np.concatenate([part[:, *tile.core] for part in maps])
        if (near := self._find_near(tile.rows, tile.columns)) is not None:
            values = values * near
        writer.write(tile.rows.start, tile.columns.start, values)

    def _read_stored(self, rows: Span, columns: Span) -> tuple[Map, Map | None]:
        """Read the probabilities, and the standard deviations if there are several rotations, from the stored map."""
        assert self._stored is not None
        count, has_deviation = len(self.model.task.background_probabilities), self.options.rotations > 1
        values = self._stored.read(rows, columns, count * (1 + has_deviation))
        if not ((values >= 0) & (values <= 1)).all():  # also false for NaN
            raise DataError(
                f"The stored map of {self.slide.path.name} contains values that are not probabilities; predict the "
                f"slide again, with --keep-map."
            )
        return values[:count], values[count:] if has_deviation else None

    def _write_maps(self, tile: Tile) -> None:
        """Write a tile into the maps `heat`, `winner` and `deviation`. Maps that are None are skipped.

        Outputs outside of the region are 0 in `heat` and `deviation`.
        """
        task, in_region = self.model.task, self._find_in_region(tile.with_halo)
        inside = np.float32(1) if in_region is None else in_region.astype(np.float32)
        top, left = tile.rows.start // self._outputs_per_px, tile.columns.start // self._outputs_per_px
        self.heat.write(top, left, self._pool_outputs(tile, task.foreground_map(tile.probabilities) * inside))
        if self.winner is not None:
            classes = [self._pool_outputs(tile, class_map) for class_map in task.class_maps(tile.probabilities)]
            self.winner.write(top, left, np.argmax(classes, axis=0).astype(np.float32))
        if self.deviation is not None and tile.deviations is not None:
            deviations = task.foreground_deviation(tile.deviations) * inside
            self.deviation.write(top, left, self._pool_outputs(tile, deviations))

    def _is_near_tissue(self, rows: Span, columns: Span) -> bool:
        """Return whether a tile contains tissue or is within `task.tissue_margin_um` of tissue, and near the region.

        `rows` and `columns` are the outputs of the tile. With the option `everywhere`, tissue is not necessary.
        """
        if self._near_tissue is None:
            return True
        down, across = (self.grid.extent_um(span, axis) for axis, span in enumerate((rows, columns)))
        return self._near_tissue.touches(down.start, across.start, down.size, across.size)

    def _clear_glass(self, tile: Tile) -> Tile:
        """Return the tile with the task's background probabilities at all outputs on glass.

        An output is on glass if it is farther than `task.tissue_margin_um` from tissue. Outputs that are not near the
        region are treated like glass; if `task.cuts_at_roi`, all outputs outside of the region. The standard deviation
        over rotations becomes 0 there. Without this change, results on glass would depend on the size of the tiles,
        because only tiles near tissue are predicted. With the option `everywhere` and no region, the tile is not
        changed.
        """
        near = self._find_near(*tile.with_halo)
        if near is None:
            return tile
        if self.model.task.cuts_at_roi and (inside := self._find_in_region(tile.with_halo)) is not None:
            near &= inside
        if near.all():
            return tile
        background = np.array(self.model.task.background_probabilities, np.float32)[:, None, None]
        deviations = None if tile.deviations is None else np.where(near, tile.deviations, np.float32(0))
        return tile._replace(probabilities=np.where(near, tile.probabilities, background), deviations=deviations)

    def _find_near(self, rows: Span, columns: Span) -> NDArray[np.bool_] | None:
        """Return which outputs are near tissue and near the region; None if all of them are predicted."""
        if self._near_tissue is None:
            return None
        down, across = (self.grid.positions_um(span, axis) for axis, span in enumerate((rows, columns)))
        return self._near_tissue.is_tissue_at(down, across)

    def _pool_outputs(self, tile: Tile, values: Map) -> Map:
        """Return the heat-map pixels of a tile: remove the halo, and average the outputs over small squares.

        `values` (h, w) has a value for each output of the tile and its halo. A heat-map pixel is the mean over a square
        of `_outputs_per_px` × `_outputs_per_px` outputs, or over fewer outputs at the bottom and right edge of the
        slide.
        """
        means: NDArray[Any] = values[tile.core]
        for axis in (1, 0):  # columns first, whose neighbors are neighbors in memory
            starts = np.arange(0, means.shape[axis], self._outputs_per_px)
            counts = np.minimum(self._outputs_per_px, means.shape[axis] - starts)
            means = np.add.reduceat(means, starts, axis=axis, dtype=np.float64) / np.expand_dims(counts, 1 - axis)
        return means.astype(np.float32)


# The pixels of a slide


class _PlacedShapes:
    """The shapes of objects, in outputs of a grid.

    The output of a point is the nearest; those of an outline have their centers inside. Objects may share outputs.
    """

    def __init__(self, shapes: Sequence[Point | tuple[Polygon, ...]], grid: Grid) -> None:
        corner, side = grid.output_frame()
        is_point = np.array([isinstance(shape, Point) for shape in shapes], bool)
        self._points = np.flatnonzero(is_point)  # numbers of the objects that are points
        positions = np.array([shape for shape in shapes if isinstance(shape, Point)]).reshape(-1, 2)
        cells = np.floor((positions - corner) / side).clip(0, np.array(grid.size) - 1)
        self._cells = cells.astype(np.int64)
        self._outlined = np.flatnonzero(~is_point)  # numbers of the objects that are outlines
        self._outlines = [
            tuple(
                Polygon((polygon.outer - corner) / side, tuple((hole - corner) / side for hole in polygon.holes))
                for polygon in shape
            )
            for shape in shapes
            if not isinstance(shape, Point)
        ]
        vertices = [np.concatenate([polygon.outer for polygon in outline]) for outline in self._outlines]
        self._low = np.array([np.floor(ring.min(axis=0)) for ring in vertices]).reshape(-1, 2).astype(int)
        self._high = np.array([np.ceil(ring.max(axis=0)) for ring in vertices]).reshape(-1, 2).astype(int)

    def find_outputs(self, rows: Span, columns: Span) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Return the number of an object (from 0), row and column in the tile, for each of its outputs in a tile."""
        start, stop = np.array([rows.start, columns.start]), np.array([rows.stop, columns.stop])
        inside = np.all((self._cells >= start) & (self._cells < stop), axis=1)
        numbers, cells = [self._points[inside]], [self._cells[inside] - start]
        for i in np.flatnonzero(np.all((self._low < stop) & (self._high > start), axis=1)):
            low, high = np.maximum(self._low[i], start), np.minimum(self._high[i], stop)
            height, width = (high - low).tolist()
            filled = np.argwhere(fill_outline(self._outlines[i], (height, width), (float(low[0]), float(low[1]))))
            numbers.append(np.full(len(filled), self._outlined[i]))
            cells.append(filled + low - start)
        all_cells = np.concatenate(cells)
        return np.concatenate(numbers), all_cells[:, 0], all_cells[:, 1]


class _OnceRead:
    """Pixels that are read when they are first needed, and only once, even if several threads need them at once."""

    def __init__(self, read: Callable[[], NDArray[np.uint8]]) -> None:
        self._read, self._lock = read, Lock()
        self._pixels: NDArray[np.uint8] | None = None

    def get(self) -> NDArray[np.uint8]:
        with self._lock:
            if self._pixels is None:
                self._pixels = self._read()
        return self._pixels


class SlideView:
    """Reads rectangles of a slide at a pixel spacing. Thread-safe.

    If `stain` is "macenko", the stains are normalized, unless they cannot be measured.
    """

    def __init__(
        self, slide: Slide, spacing_um_px: float, stain: Stain, tissue: Tissue, stopwatch: Stopwatch | None = None
    ) -> None:
        self.slide, self.origin_px = slide, slide.origin_px
        self.stopwatch = stopwatch or Stopwatch()
        self.spacing_um_px = spacing_um_px
        self.size_px = slide.size_at(self.spacing_um_px)
        self.level0_px = self.spacing_um_px / slide.spacing_um_px  # side of a pixel of the view, in pixels of level 0
        self.stains = self._measure_stains(tissue) if stain == "macenko" else None
        self._is_level = slide.has_level(spacing_um_px)  # if False, pixels are resampled, in blocks
        self._cache_blocks(CACHED_BLOCKS)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_blocks"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._cache_blocks(BLOCKS_OF_WORKER)

    def _cache_blocks(self, count: int) -> None:
        self._blocks = lru_cache(count)(lambda row, column: _OnceRead(partial(self._read_block, row, column)))

    def read(self, rows: Span, columns: Span) -> NDArray[np.uint8]:
        """Return the pixels (h, w, 3) in a range of rows and of columns, both counted at the view's pixel spacing.

        The slide is reflected beyond its edges, as in training.
        """
        down, across = (
            reflect_index(torch.arange(*span), size).numpy()
            for span, size in zip((rows, columns), self.size_px, strict=True)
        )
        (top, bottom), (left, right) = ((int(indices.min()), int(indices.max()) + 1) for indices in (down, across))
        if self._is_level:
            return pick(self._read(top, left, bottom - top, right - left), down - top, across - left)
        pixels = np.empty((bottom - top, right - left, 3), np.uint8)
        for row in range(top // BLOCK_PX, -(-bottom // BLOCK_PX)):
            for column in range(left // BLOCK_PX, -(-right // BLOCK_PX)):
                block = self._blocks(row, column).get()
                first = row * BLOCK_PX - top, column * BLOCK_PX - left  # of the block, in `pixels`; may be below 0
                part = pixels[max(first[0], 0) : first[0] + len(block), max(first[1], 0) : first[1] + block.shape[1]]
                part[:] = block[max(-first[0], 0) :, max(-first[1], 0) :][: part.shape[0], : part.shape[1]]
        return pick(pixels, down - top, across - left)

    def _read_block(self, row: int, column: int) -> NDArray[np.uint8]:
        """Return the pixels of block (row, column).

        The positions of blocks do not depend on the tiles. If they did, results would depend on the tiles, too: the
        value of a pixel may differ by one gray level if the pixel is resampled as part of another rectangle.
        """
        top, left = row * BLOCK_PX, column * BLOCK_PX
        height, width = (min(BLOCK_PX, size - start) for size, start in zip(self.size_px, (top, left), strict=True))
        return self._read(top, left, height, width)

    def _read(self, top: int, left: int, height: int, width: int) -> NDArray[np.uint8]:
        """Return the pixels of a rectangle on the slide, with normalized stains unless `stains` is None."""
        with self.stopwatch.measure("reading"):
            pixels = self.slide.read(top, left, height, width, self.spacing_um_px)
        if self.stains is None:
            return pixels
        with self.stopwatch.measure("stains"):
            return self.stains.normalize(pixels)

    def _measure_stains(self, tissue: Tissue) -> Stains | None:
        """Return the stains of the tissue, or None if there is too little tissue or only one stain.

        On slides of more than `MEASURED_PX` pixels, stains are measured on samples of tissue. Pixels of glass are left
        out, because glass would make the stains seem weaker.
        """
        if math.prod(self.size_px) <= MEASURED_PX:
            pixels = self.slide.read(0, 0, *self.size_px, self.spacing_um_px)
            return measure_stains(pixels[self._is_tissue(tissue, Span(0, self.size_px[0]), Span(0, self.size_px[1]))])
        mask_pixels = np.argwhere(tissue.mask)
        if not len(mask_pixels):
            return None
        count = MEASURED_PX // SAMPLE_PX**2
        chosen = mask_pixels[np.linspace(0, len(mask_pixels) - 1, min(count, len(mask_pixels))).astype(int)]
        centers = np.rint((chosen + 0.5) * tissue.spacing_um_px / self.spacing_um_px).astype(int)
        samples = []
        for row, column in (centers - SAMPLE_PX // 2).tolist():
            pixels = self.slide.read(row, column, SAMPLE_PX, SAMPLE_PX, self.spacing_um_px)
            rows, columns = Span(row, row + SAMPLE_PX), Span(column, column + SAMPLE_PX)
            samples.append(pixels[self._is_tissue(tissue, rows, columns)])
        return measure_stains(np.concatenate(samples))

    def _is_tissue(self, tissue: Tissue, rows: Span, columns: Span) -> NDArray[np.bool_]:
        """Return a mask (h, w) of a rectangle: true for pixels that are inside the slide and show tissue."""
        pixels = [np.arange(*span) for span in (rows, columns)]
        down_um, across_um = (np.asarray((indices + 0.5) * self.spacing_um_px, np.float64) for indices in pixels)
        down, across = ((indices >= 0) & (indices < size) for indices, size in zip(pixels, self.size_px, strict=True))
        mask: NDArray[np.bool_] = tissue.is_tissue_at(down_um, across_um) & down[:, None] & across[None, :]
        return mask
