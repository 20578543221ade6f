"""Load a trained model from its run folder, apply the model to images, and build the network of a recipe.

A run folder contains the files that a training writes. `load` reads only `model.json` and `weights.safetensors`; all
other files describe the training. Exception: for a run of rotopath 0.1, which has no `model.json`, `load` reads the
recipe and the operating point instead. No file is unpickled, because a pickle from an unknown source can execute any
code.

The *outputs* of a network are the positions of its map of logits. The *geometry* of a network consists of its valid
image sizes, the distance between adjacent outputs, and the width of the border of the map that padding affects (see
`Geometry`). The *operating point* of a model consists of its decision thresholds.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import rotopath
from rotopath import pretrained
from rotopath.data.dataset import SAME_SPACING
from rotopath.data.manifest import MANIFEST
from rotopath.images import Slide
from rotopath.images.geojson import SlideObject
from rotopath.images.slides import as_slide
from rotopath.images.tissue import make_region
from rotopath.inference import dense
from rotopath.inference.dense import Backend
from rotopath.inference.predict_files import (
    FileOptions,
    OnTile,
    SlideOutcome,
    list_slides,
    predict_files,
)
from rotopath.inference.slide_pass import Model, PassOptions, SlideResult, predict_slide
from rotopath.model_file import (
    MODEL,
    WEIGHTS,
    ModelInfo,
    NetworkInfo,
    RunError,
    hash_weights,
    load_weights,
    read_json,
    read_model,
    read_weights,
)
from rotopath.models import DenseNetwork, Geometry
from rotopath.models.protocols import DenseModule, SlidingModule, has_geometry, make_dense, unwrap
from rotopath.models.registry import build_network, find_window_px
from rotopath.recipe import NetworkOptions, Recipe, RecipeError, read_recipe
from rotopath.tasks import Task

RECIPE, METRICS, LOG, PROVENANCE = "recipe.toml", "metrics.json", "log.csv", "provenance.json"
MINED = "mined.csv"  # hard examples
OLD_POINT = "operating_point.json"  # file in runs of rotopath 0.1, which have no model.json
# Network options that decide what a weight means, and their defaults
GROUP_OPTIONS: Mapping[str, Any] = {"kernel": "bilinear", "reflections": False}
MAX_LAYERS_LISTED = 4
Device = Literal["cpu", "cuda"]
Precision = Literal["16", "32"]


# Load and apply a trained model


@dataclass(frozen=True, repr=False)
class Run:
    """A trained model: its run folder, its description from the model file, and its network with weights."""

    folder: Path
    info: ModelInfo
    network: DenseNetwork = field(compare=False)  # in evaluation mode

    def __repr__(self) -> str:
        task, network = self.task, self.info.network
        classes = "" if task.is_single else f", classes {', '.join(task.class_names)}"
        return f"Run({self.name!r}: {task.name} by {network.name}, N={network.orientations}{classes})"

    @property
    def task(self) -> Task:
        """The task that the model was trained for."""
        return self.info.task

    @property
    def point(self) -> Mapping[str, float]:
        """The operating point: decision thresholds by name, chosen on the validation set."""
        return self.info.point

    @cached_property
    def recipe(self) -> Recipe:
        """The recipe of the training, read from the run folder."""
        return read_run_recipe(self.folder)

    @property
    def is_pretrained(self) -> bool:
        """Whether the model is one of the package's pretrained models. Nothing may be written to their folders."""
        return self.folder.parent == pretrained.HOME

    @property
    def name(self) -> str:
        """The name of a pretrained model, or else the path of the run folder. `load` accepts both."""
        return self.folder.name if self.is_pretrained else str(self.folder)

    @property
    def output_folder(self) -> Path:
        """The folder for files that are made from this model, such as scores and exports.

        This is the run folder or, for a pretrained model, `runs/NAME` in the current folder.
        """
        return Path("runs") / self.name if self.is_pretrained else self.folder

    def predict(
        self,
        image: NDArray[np.uint8] | Path | str | Slide,
        spacing_um_px: float | None = None,
        rotations: int = 1,
        everywhere: bool = False,
        device: torch.device | Device | str | None = None,
        precision: Precision | None = None,
        backend: Backend = "torch",
        *,
        override_spacing: bool = False,
        threshold: float | None = None,
        min_area_um2: float | None = None,
        roi: Path | str | Sequence[SlideObject] | None = None,
        exclude: Path | str | Sequence[SlideObject] | None = None,
        classes: Sequence[str] = (),
        embedding: bool = False,
    ) -> SlideResult:
        """Apply the model to an image array (H, W, 3), an image file or an open slide. Returns the result in memory.

        `spacing_um_px` is the pixel spacing of the image in µm/px. It is required for an array, and for a file that
        does not specify its pixel spacing. If it differs by more than 1 % from that of the file, `override_spacing`
        must be True. It is ignored for an open slide. If `rotations` is above 1, each tile is predicted at this number
        of equally spaced angles, and the result contains the mean and the standard deviation over the angles. If
        `everywhere` is False, only tissue is predicted.

        The default of `device` is the first GPU, or the CPU if there is no GPU. `precision` is "16" (default on a GPU)
        or "32" (default on the CPU). `backend` is "torch" or, on the CPU, "onnxruntime".

        `threshold` and `min_area_um2` replace thresholds of the model: the probability (0 to 1) from which objects are
        accepted, and the area in µm² below which outlined objects are left out. `roi` and `exclude` are outlines of the
        area to predict and of areas to leave out: the path of a GeoJSON file of QuPath annotations, or such annotations
        as objects, for example the regions that a "tumor" model has found. Only objects with their center in this area
        are returned; regions of a task such as "tumor" are cut at its border. `classes` are the names of the classes
        whose objects are returned; empty means all. With `embedding`, `result.embedding` contains features of the
        network for each object.
        """
        chosen = self.task.resolve_classes(classes)
        model = self.prepare(device, precision, backend, threshold, min_area_um2)
        with as_slide(image, spacing_um_px, override_spacing) as slide:
            region = make_region(roi, exclude, slide.origin_px)
            options = PassOptions(rotations, everywhere=everywhere, region=region, classes=chosen, embedding=embedding)
            return predict_slide(model, slide, options)

    def prepare(
        self,
        device: torch.device | Device | str | None = None,
        precision: Precision | None = None,
        backend: Backend = "torch",
        threshold: float | None = None,
        min_area_um2: float | None = None,
    ) -> Model:
        """Return a copy of the model for inference, with the network in the form that is fastest on the device.

        The default of `device` is the first GPU, or the CPU if there is no GPU. `precision` is "16" (float16, GPU only)
        or "32" (float32); the default is "16" on a GPU and "32" on the CPU. `backend` is "torch", or "onnxruntime" for
        ONNX Runtime on the CPU, which needs the extra `onnx`.
        `threshold` and `min_area_um2` are those of `predict`. The network of this run is not changed. Raises RunError
        if the device is not available, or does not support the precision or the backend, or if the network cannot be
        converted for the backend. Raises DataError if the task cannot use the threshold or the area.
        """
        point = self.task.adjust_operating_point(self.point, threshold, min_area_um2)
        if backend not in get_args(Backend):
            raise RunError(f"There is no backend {backend!r}; choose {' or '.join(get_args(Backend))}.")
        target = _find_device("cpu" if device is None and backend == "onnxruntime" else device)
        if backend == "onnxruntime" and target.type != "cpu":
            raise RunError(
                f"The backend onnxruntime is for the CPU, but the device is {target.type}; choose the device cpu."
            )
        dtype = _choose_dtype(target, precision)
        try:
            network = dense.prepare(self.network, target, dtype, backend)
        except ValueError as error:
            raise RunError(str(error)) from None
        about = self._describe() | {"operating_point": point}
        return Model(self.task, network, point, target, about)

    def _describe(self) -> dict[str, object]:
        """Return the description of the model for the summary file of a prediction."""
        weights = self.folder / WEIGHTS
        sha256 = self.info.weights_sha256 or (hash_weights(self.folder) if weights.exists() else "")
        return {
            "model": self.folder.resolve().name,
            "task": self.task.name,
            "classes": list(self.task.class_names),
            "network": self.info.network.name,
            "orientations": self.info.network.orientations,
            "weights": sha256[:16],
            "operating_point": dict(self.point),
        }


def load(run: Path | str) -> Run:
    """Load a finished run from its folder, or a pretrained model by its name. The network is in evaluation mode.

    Raises RunError if the run is not finished, if its files are missing or damaged, if the network cannot be built, or
    if the weights do not fit the network.

    >>> rp.load("tumor-pcam-n8")
    Run('tumor-pcam-n8': tumor by tumor, N=8)
    """
    folder = _find_folder(run)
    if not (folder / WEIGHTS).exists():
        if (folder / RECIPE).exists():
            raise RunError(f"The run in {folder} is not finished; run the same training command again to resume it.")
        raise RunError(f"{folder} contains no run ({WEIGHTS} is missing); give the folder of a finished run.")
    info = read_model_info(folder)
    try:
        module = build_network(info.network.name, info.task.outputs, info.network.orientations, info.network.options)
    except Exception as error:  # any type of error, because a function of the user may build the network
        reason = " ".join(str(error).split()) or type(error).__name__
        stop = "" if reason.endswith((".", "?")) else "."
        raise RunError(f"The network of {folder} cannot be built: {reason}{stop}") from None
    load_weights(module, folder / WEIGHTS, info.weights_sha256)
    return Run(folder, info, _wrap_module(module, info.network, folder).eval())


def predict(
    model: Run | Path | str,
    images: Path | str | Sequence[Path | str],
    out: Path | str,
    *,
    spacing_um_px: float | None = None,
    override_spacing: bool = False,
    rotations: int = 1,
    everywhere: bool = False,
    device: torch.device | Device | str | None = None,
    precision: Precision | None = None,
    backend: Backend = "torch",
    threshold: float | None = None,
    min_area_um2: float | None = None,
    roi: Path | str | None = None,
    exclude: Path | str | None = None,
    classes: Sequence[str] = (),
    parquet: bool = False,
    embedding: bool = False,
    keep_map: bool = False,
    reuse: bool = False,
    workers: int = 0,
    on_tile: OnTile = lambda _slide, _done, _all: None,
) -> list[SlideOutcome]:
    """Apply a model to image files, slides or folders of these files, and write the results into the folder `out`.

    `model` is a loaded run, the path of a run folder, or the name of a pretrained model. The results of each file are
    written into a subfolder of `out`. A file is skipped if `out` contains its results for the same model and options
    (and the same precision, if `precision` is not None). A file that fails, for whatever reason, does not stop the
    prediction of the other files; only a full disk does (DiskFullError, an OSError). Files that another process is
    predicting into the same folder are left until the end. Returns the outcome of each file.

    After each tile, the function `on_tile` is called with the path of the file, the number of its finished tiles, and
    the number of all its tiles to predict. `roi` and `exclude` are GeoJSON files of QuPath annotations or, for several
    slides, folders with a file for each slide, such as `slide.svs.geojson` or `slide.geojson`. With `parquet`, the
    table of objects is also written to `objects.parquet`; with `embedding`, features of the network for each object
    are written to `embedding.npy`. With `keep_map`, the outputs of the network are stored in
    `map.zip` beside the results. With `reuse`, they are read from there, and the results are replaced without running
    the network, for example with another threshold. `workers` is the number of processes that find objects while the
    network computes the next tiles; a script that uses them must call this function under
    `if __name__ == "__main__":`. The other arguments are those of `Run.predict`. To predict a single
    image and receive the result in memory, use `Run.predict` instead.
    """
    run = model if isinstance(model, Run) else load(model)
    given = [images] if isinstance(images, Path | str) else images
    slides = list_slides([Path(path) for path in given])
    pass_options = PassOptions(
        rotations,
        everywhere=everywhere,
        classes=run.task.resolve_classes(classes),
        workers=workers,
        embedding=embedding,
    )
    options = FileOptions(
        pass_options,
        spacing_um_px,
        override_spacing,
        same_precision=precision is not None,
        roi=None if roi is None else Path(roi),
        exclude=None if exclude is None else Path(exclude),
        parquet=parquet,
        keep_map=keep_map,
        reuse=reuse,
    )
    ready = run.prepare(device, precision, backend, threshold, min_area_um2)
    outcomes = predict_files(ready, slides, Path(out), options, on_tile)
    return [outcome for outcome in outcomes if outcome.state != "waiting"]


def prepare_model(
    model: Path | str,
    device: torch.device | Device | str | None = None,
    precision: Precision | None = None,
    backend: Backend = "torch",
    threshold: float | None = None,
    min_area_um2: float | None = None,
) -> Model:
    """Load a model by its folder or name, and prepare the model for inference, as `Run.prepare` does.

    Each worker process of a cluster calls this function to load its own copy of the model.
    """
    return load(model).prepare(device, precision, backend, threshold, min_area_um2)


# Build the network of a recipe


def build(recipe: Recipe, task: Task | None = None) -> DenseNetwork:
    """Build the network of a recipe, with random weights that depend on the seed of the recipe.

    If `task` is None, the task is `recipe.make_task()`. The state of torch's random number generator for the CPU is not
    changed.
    """
    task = task or recipe.make_task()
    name, options = recipe.network_name, recipe.network_options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        module = build_network(name, task.outputs, recipe.orientations, options)
        if isinstance(getattr(module, "geometry", None), Geometry):
            return make_dense(module, task.outputs)
        window_px = recipe.window_px or find_window_px(name)
        wrapper, geometry = _measure_geometry(
            name, task.outputs, recipe.orientations, options, window_px, recipe.stride_px
        )
    return wrapper(module, geometry)


@lru_cache(maxsize=64)
def _measure_geometry(
    name: str, outputs: int, orientations: int, options: NetworkOptions, window_px: int | None, stride_px: int | None
) -> tuple[Callable[[nn.Module, Geometry], DenseNetwork], Geometry]:
    """Measure the geometry of a network that has no attribute `geometry`.

    Returns the class that wraps the network, and the geometry. The class is `SlidingModule` for a network that returns
    one prediction for each window, otherwise `DenseModule`. `name` and `options` specify the network; `outputs` is the
    number of logits per position. `window_px` is the side of the images on which the geometry is measured; None means
    the network's attribute `window_px`. `stride_px` is the distance between the windows of a `SlidingModule`; None
    means half a window. The result is cached, because measuring a large network takes seconds.
    """
    network = make_dense(build_network(name, outputs, orientations, options), outputs, window_px, stride_px)
    return SlidingModule if isinstance(network, SlidingModule) else DenseModule, network.geometry


def describe_network(recipe: Recipe, network: DenseNetwork) -> NetworkInfo:
    """Return the description of `network` for the model file. The network was built from `recipe`."""
    name = recipe.network_name
    window_px = recipe.window_px or find_window_px(name) or network.geometry.smallest_px
    slides = isinstance(network, SlidingModule)
    return NetworkInfo(name, recipe.orientations, recipe.network_options, window_px, network.geometry, slides)


# The weights of another model, from which a training starts


@dataclass(frozen=True)
class Parent:
    """A trained model from whose weights a training starts, and which of its weights the new network takes.

    A layer of the new network is taken if the model has a layer of the same name, with weights of the same shapes. The
    layers whose size depends on the classes are fresh, unless task and classes are the same.
    """

    name: str  # name of a pretrained model, or path of a run folder
    info: ModelInfo
    weights_sha256: str
    provenance: Mapping[str, Any]
    taken: Mapping[str, Tensor] = field(compare=False)  # weights by name
    taken_layers: tuple[str, ...]
    fresh_layers: tuple[str, ...]  # they keep their random weights, except for `shared_outputs`
    shared: Mapping[str, Tensor] = field(compare=False)  # weights of fresh layers of which some outputs are taken
    shared_outputs: tuple[str, ...]  # names of these outputs, such as the parts of objects in "segment"

    def load_into(self, network: DenseNetwork) -> None:
        """Replace weights of a network, which was built from the same recipe, by the weights that are taken."""
        unwrap(network).load_state_dict({**unwrap(network).state_dict(), **self.taken, **self.shared})

    def describe(self) -> dict[str, object]:
        """Return the provenance of the weights: the model, the terms of its data, and which layers are taken."""
        data = self.provenance.get("data")
        kept = ("source", "title", "terms", "commercial", "fingerprint", "images")
        known = {key: data[key] for key in kept if key in data} if isinstance(data, dict) else {}
        return {
            "model": self.name,
            "weights": self.weights_sha256,
            "task": self.info.task.name,
            "data": known,
            "taken": list(self.taken_layers),
            "fresh": list(self.fresh_layers),
            "shared_outputs": list(self.shared_outputs),
            "from": self.provenance.get("from"),
        }

    def describe_lines(self, recipe: Recipe) -> list[str]:
        """Return two lines for the user: which weights are taken, and where they come from."""
        total = len(self.taken_layers) + len(self.fresh_layers)
        fresh = ", ".join(self.fresh_layers[:MAX_LAYERS_LISTED])
        more = len(self.fresh_layers) - MAX_LAYERS_LISTED
        shared = f" (except the outputs {', '.join(self.shared_outputs)})" if self.shared_outputs else ""
        fresh_text = f"fresh: {fresh}{f' and {more} more' if more > 0 else ''}{shared}" if fresh else "none is fresh"
        count = recipe.frozen_stages
        frozen = f"; the first {f'{count} stages are' if count > 1 else 'stage is'} frozen" if count else ""
        data = self.describe()["data"]
        assert isinstance(data, dict)
        source = data.get("title") or data.get("source") or "unknown data"
        terms = f" (terms of the data: {data['terms']})" if "terms" in data else " (check the terms of its data)"
        own = self.provenance.get("data")
        if source == MANIFEST and isinstance(own, dict) and "path" in own:  # a user knows the terms of own data
            source, terms = own["path"], ""
        spacing, own = self.info.task.spacing_um_px, recipe.make_task().spacing_um_px
        note = "" if abs(spacing / own - 1) <= SAME_SPACING else f" It reads {spacing:g} µm/px, this training {own:g}."
        return [
            f"{len(self.taken_layers)} of {total} layers start from {self.name}, at {recipe.from_rate:g} of the "
            f"learning rate{frozen}; {fresh_text}.",
            f"{self.name} was trained on {source}{terms}.{note}",
        ]


def find_parent(recipe: Recipe, task: Task, network: DenseNetwork) -> Parent | None:
    """Read the model in the key `from` of a recipe, and find which of its weights `network` can take.

    Returns None if the recipe has no such key. Raises RunError if the model cannot be read, or if it does not fit: its
    number of orientations, its family of kernels and whether it has reflections must be those of the recipe, because
    equal weights mean other filters otherwise; and the weights of at least one convolution must fit.
    """
    if recipe.from_ is None:
        return None
    folder = _find_folder(recipe.from_)
    name = folder.name if folder.parent == pretrained.HOME else str(folder)
    if not (folder / WEIGHTS).exists():
        raise RunError(f"{name} in the key 'from' is not a finished run; finish its training, or name another model.")
    info = read_model_info(folder)
    pairs = {"orientations": (info.network.orientations, recipe.orientations)}
    for key, default in GROUP_OPTIONS.items():
        pairs[key] = info.network.options.get(key, default), recipe.network_options.get(key, default)
    for key, (parent_value, value) in pairs.items():
        if parent_value != value:
            raise RunError(
                f"{name} has {key} = {_format(parent_value)}, but the recipe has {key} = {_format(value)}; weights can "
                f"only be taken if both are equal: set {key}={_format(parent_value)}, or name another model in 'from'."
            )
    weights = read_weights(folder / WEIGHTS, info.weights_sha256)
    state = unwrap(network).state_dict()
    is_same_task = info.task.kind == task.kind and _fold(info.task.class_names) == _fold(task.class_names)
    head = set() if is_same_task else _find_head(recipe, task, state)
    layers: dict[str, list[str]] = {}
    for weight in state:
        layers.setdefault(weight.rpartition(".")[0], []).append(weight)
    fits = {
        layer: all(
            key not in head
            and key in weights
            and (weights[key].shape, weights[key].dtype) == (state[key].shape, state[key].dtype)
            and bool(weights[key].isfinite().all())
            for key in keys
        )
        for layer, keys in layers.items()
    }
    shared = {} if is_same_task else _share_outputs(info.task, task, weights, {key: state[key] for key in head})
    taken = {key: weights[key] for layer, keys in layers.items() if fits[layer] for key in keys}
    if not any(weight.ndim > 1 for weight in taken.values()):
        raise RunError(
            f"No convolution of {name} (network {info.network.name!r}) fits the network {recipe.network_name!r} of the "
            f"recipe; use the same network and the same options, or name another model in 'from'."
        )
    return Parent(
        name,
        info,
        info.weights_sha256 or hash_weights(folder),
        read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {},
        taken,
        tuple(layer for layer in layers if fits[layer]),
        tuple(layer for layer in layers if not fits[layer]),
        shared,
        tuple(name for name in task.output_names if name in info.task.output_names) if shared else (),
    )


def _share_outputs(
    parent: Task, task: Task, weights: Mapping[str, Tensor], head: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return weights of the last layers with the rows of `weights` for the outputs that both tasks have.

    The other rows are those of `head`, the random weights of the new network. Outputs are shared by tasks of the same
    kind with several outputs: then, an output is compared with others, and means the same in both tasks.
    """
    names, own = list(parent.output_names), list(task.output_names)
    common = [name for name in own if name in names]
    if parent.kind != task.kind or len(names) == 1 or len(own) == 1 or not common:
        return {}
    shared = {}
    for key, random in head.items():
        given = weights.get(key)
        if given is not None and given.shape == (len(names), *random.shape[1:]) and len(random) == len(own):
            shared[key] = random.clone()
            shared[key][[own.index(name) for name in common]] = given[[names.index(name) for name in common]]
    return shared


def _find_head(recipe: Recipe, task: Task, state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the weights in `state` whose shapes depend on the number of outputs of the network."""
    with torch.random.fork_rng(devices=[]):
        other = build_network(recipe.network_name, task.outputs + 1, recipe.orientations, recipe.network_options)
    shapes = {name: weight.shape for name, weight in other.state_dict().items()}
    return {name for name, weight in state.items() if shapes.get(name) != weight.shape}


def _fold(names: Sequence[str]) -> list[str]:
    return [name.casefold() for name in names]


def _format(value: object) -> str:
    """Format a value as on the command line: true, not True."""
    return str(value).lower() if isinstance(value, bool) else str(value)


# Read the files of a run


def read_model_info(folder: Path) -> ModelInfo:
    """Read the description of a model from its folder. Raises RunError if a file is missing or damaged.

    Runs of rotopath 0.1 have no model file. For these runs, the description is made from the recipe and the file with
    the operating point.
    """
    if not (folder / MODEL).exists() and (folder / OLD_POINT).exists():
        return _read_old_run(folder)
    return read_model(folder)


def read_run_recipe(folder: Path) -> Recipe:
    """Read the recipe of a run. Raises RunError if the file is missing, damaged, or not valid in this version.

    If a newer version of rotopath trained the run, the message of this error asks to upgrade rotopath.
    """
    try:
        return read_recipe(folder / RECIPE)
    except RecipeError as error:
        provenance = read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}
        writer = provenance.get("rotopath")
        if isinstance(writer, str) and _is_newer(writer):
            raise RunError(
                f"{folder} was trained by rotopath {writer}, which is newer than this one ({rotopath.__version__}); "
                f"upgrade rotopath to use this run."
            ) from None
        raise RunError(f"The recipe of the run is damaged: {error} Restore the recipe file, or train again.") from None


def _read_old_run(folder: Path) -> ModelInfo:
    """Return the description of a model that was trained with rotopath 0.1, and therefore has no model file.

    The description is made from two other files in the run folder: the recipe, and the file with the operating point.
    It contains no checksum of the weights. Raises RunError if one of these files is missing or damaged.
    """
    recipe = read_run_recipe(folder)
    task = recipe.make_task()
    try:
        point = task.check_operating_point(read_json(folder / OLD_POINT))
    except ValueError as error:
        reason = str(error).rstrip(".")
        raise RunError(f"{folder / OLD_POINT} is damaged: {reason}. Restore the file, or train again.") from None
    return ModelInfo(task, describe_network(recipe, build(recipe, task)), point, None)


def _is_newer(writer: str) -> bool:
    """Return whether the version `writer` of rotopath, such as "0.3.1", is newer than the installed version."""

    def parts(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdecimal()]

    return parts(writer) > parts(rotopath.__version__)


def _find_folder(run: Path | str) -> Path:
    """Return `run` if it is a folder, else the folder of the pretrained model with this name.

    Raises RunError if `run` is neither.
    """
    if (folder := Path(run)).is_dir():
        return folder
    if pretrained_folder := pretrained.find_folder(str(run)):
        return pretrained_folder
    names = pretrained.list_pretrained()
    near = difflib.get_close_matches(folder.name.lower(), names, n=1)
    hint = f"did you mean {near[0]}?" if near else "give the folder of a finished run or one of these names."
    raise RunError(f"{run} is neither a run folder nor one of the pretrained models, {', '.join(names)}; {hint}")


def _wrap_module(module: nn.Module, network: NetworkInfo, folder: Path) -> DenseNetwork:
    """Return the module as a dense network, which accepts images of many sizes.

    `network` is the description in the model file. Raises RunError if the module has another geometry than this
    description, because predictions would then fail or be at wrong positions. If the module has no attribute
    `geometry`, only the shapes of its logits are compared with the description.
    """
    declared = getattr(module, "geometry", None)
    if isinstance(declared, Geometry):
        fits = declared == network.geometry and declared.fits(network.window_px) and not network.slides
    else:
        fits = has_geometry(module, network.geometry, network.window_px, network.slides)
    if not fits:
        raise RunError(
            f"{folder / MODEL} specifies another geometry than the network {network.name!r} has (valid image sizes, "
            f"distance between outputs, border that padding affects, number of logits); restore the file, or train "
            f"again."
        )
    if isinstance(declared, Geometry):
        return module  # type: ignore[return-value]
    return SlidingModule(module, network.geometry) if network.slides else DenseModule(module, network.geometry)


def _find_device(device: torch.device | str | None) -> torch.device:
    """Return `device` as a torch device. None means the first GPU or, if there is no GPU, the CPU.

    Raises RunError if the device does not exist or is not available.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
    except RuntimeError:
        raise RunError(f"There is no device {device!r}; choose cpu or cuda.") from None
    if target.type not in get_args(Device):
        raise RunError(f"The device {device!r} is not supported; choose cpu or cuda.")
    if target.type == "cuda" and (target.index or 0) >= torch.cuda.device_count():
        raise RunError(f"The device {device!r} is not available; run `rotopath doctor` to list the available devices.")
    return target


def _choose_dtype(device: torch.device, precision: str | None) -> torch.dtype:
    """Return the data type for inference: float32 on the CPU or if `precision` is "32", else float16.

    On GPUs, float16 is about as precise as float32: by default, GPUs round the inputs of float32 convolutions to TF32,
    which has as many mantissa bits as float16. Raises RunError for "16" on the CPU, and for any other precision than
    "16", "32" and None.
    """
    if precision not in (None, *get_args(Precision)):
        raise RunError(f"There is no precision {precision!r}; choose 16 or 32 bits.")
    if precision == "16" and device.type != "cuda":
        raise RunError(f"A precision of 16 bits is for GPUs, but the device is {device.type}; choose 32.")
    return torch.float16 if device.type == "cuda" and precision != "32" else torch.float32
