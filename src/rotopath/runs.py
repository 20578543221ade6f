"""Where a run comes from: versions, commit, data, hardware, time.

In: a recipe's seed, a dataset, a device. Out: what goes into `provenance.json`; and a fingerprint of data, by which
a change of it is noticed.

The run folder: everything about one training, each file whole or not there at all; and what a model file says.

In: a folder. Out: a model that is ready to predict, from `model.json` and the weights alone; and where a run comes
from: versions, data, hardware, time. Weights are safetensors, and nothing that a user hands over is unpickled.
"""

import difflib
import hashlib
import platform
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import nn

import rotopath
from rotopath import pretrained
from rotopath.data.annotations import class_table
from rotopath.data.dataset import Dataset
from rotopath.images.files import UnreadableFileError
from rotopath.model_file import (
    MODEL,
    WEIGHTS,
    ModelInfo,
    NetworkInfo,
    RunError,
    load_weights,
    read_json,
    read_model,
)
from rotopath.models import DenseNetwork, Geometry
from rotopath.models.protocols import DenseModule, SlidingModule, has_geometry, make_dense
from rotopath.models.registry import build_network, find_window_px
from rotopath.recipe import NetworkOptions, Recipe, RecipeError, read_recipe
from rotopath.tasks import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rotopath.images import Slide
    from rotopath.inference.result import Result
    from rotopath.inference.slide_pass import Model


PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "lightning", "safetensors")
FINGERPRINT = "content:"  # what fingerprints begin with that look at the content of files
BLOCK_BYTES = 2**20


def fingerprint(dataset: Dataset) -> str:
    """A short text that changes when the bytes of images or annotations, labels or splits do."""
    tables = {table for sample in dataset.samples for table in map(class_table, sample.annotations)}
    tables = {table for table in tables if table.is_file()}
    files = {
        sample: [
            sample.path,
            *sample.annotations,
            *(t for t in map(class_table, sample.annotations) if t in tables),
        ]
        for sample in dataset.samples
    }
    paths = sorted({path for found in files.values() for path in found})
    with ThreadPoolExecutor() as pool:
        contents = dict(zip(paths, pool.map(_hash_file, paths), strict=True))
    digest = hashlib.sha256(dataset.annotated.encode())
    for sample, found in files.items():
        about = (sample.name, sample.case, sample.split, sample.row, sample.label, sample.spacing_um_px)
        digest.update(repr((*about, sample.stratum, [contents[path] for path in found])).encode())
    return FINGERPRINT + digest.hexdigest()[:16]


def _hash_file(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        raise UnreadableFileError(path, f"cannot be read ({error.strerror}).") from None
    return digest.hexdigest()


def describe_training(seed: int, dataset: Dataset) -> dict[str, object]:
    """Where a training begins: versions, commit, seed, data."""
    return {
        "begun": now(),
        **describe_software(),
        "seed": seed,
        "data": {
            "source": dataset.source,
            "path": str(dataset.root),
            "fingerprint": fingerprint(dataset),
            "images": len(dataset.samples),
        },
    }


def describe_software(packages: Sequence[str] = PACKAGES) -> dict[str, object]:
    """Versions of what computes, and its commit."""
    return {
        "rotopath": rotopath.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: found for name in packages if (found := _version(name))},
    }


def describe_machine(device: torch.device) -> dict[str, object]:
    """What a run was computed on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "threads": torch.get_num_threads()}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The commit of the source that runs, marked where it was changed; none for an installed package."""
    if not _git("ls-files", Path(__file__).name):
        return None  # whatever repository an environment lies in, this file is not of it
    return _git("describe", "--always", "--dirty", "--abbrev=12")


def _git(*arguments: str) -> str | None:
    command = ["git", "-C", str(Path(__file__).parent), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


RECIPE, METRICS = "recipe.toml", "metrics.json"
LOG, PROVENANCE, RESUME, KEPT = "log.csv", "provenance.json", "resume.ckpt", "kept.safetensors"
OLD_POINT = "operating_point.json"  # of runs from before there was a model file
Device = Literal["cpu", "cuda"]
Precision = Literal["16", "32"]


@dataclass(frozen=True, repr=False)
class Run:
    """A trained model with what belongs to it."""

    folder: Path
    info: ModelInfo
    network: DenseNetwork = field(compare=False)  # in evaluation mode

    def __repr__(self) -> str:
        task, network = self.task, self.info.network
        classes = "" if task.is_single else f", classes {', '.join(task.class_names)}"
        return f"Run({self.name!r}: {task.name} by {network.name}, N={network.orientations}{classes})"

    @property
    def task(self) -> Task:
        return self.info.task

    @property
    def point(self) -> Mapping[str, float]:
        """The operating point: thresholds, chosen on the validation set."""
        return self.info.point

    @cached_property
    def recipe(self) -> Recipe:
        """How it was trained."""
        return read_run_recipe(self.folder)

    @property
    def is_pretrained(self) -> bool:
        """Whether it is part of the package, where its data is not, and nothing is to be written."""
        return self.folder.parent == pretrained.HOME

    def predict(
        self,
        image: "NDArray[np.uint8] | Path | str | Slide",
        spacing_um_px: float | None = None,
        rotations: int = 1,
        everywhere: bool = False,
        device: torch.device | Device | str | None = None,
        precision: Precision | None = None,
    ) -> "Result":
        """What the model finds in an image (H, W, 3), a file or an open slide; pixels have `spacing_um_px` µm a side.

        With several `rotations` of every tile, probabilities are their mean, and their deviation is given too. Glass is
        left out, unless `everywhere` is asked for. Device and precision are those of `ready`.
        """
        from rotopath.images.slides import as_slide
        from rotopath.inference.result import predict_slide
        from rotopath.inference.slide_pass import PassOptions

        with as_slide(image, spacing_um_px) as slide:
            return predict_slide(self.ready(device, precision), slide, PassOptions(rotations, everywhere=everywhere))

    def ready(self, device: torch.device | Device | str | None = None, precision: Precision | None = None) -> "Model":
        """The model on a device; by default on a GPU, if there is one, in precision "16", and else on the CPU in "32".

        It is a copy in the form that suits it: as it is, for Triton's kernels, or frozen to a plain CNN.
        """
        from rotopath.inference.dense import prepare
        from rotopath.inference.slide_pass import Model

        chosen = _find_device(device)
        dtype = _choose_dtype(chosen, precision)
        return Model(self.task, prepare(self.network, chosen, dtype), self.point, chosen)

    @property
    def name(self) -> str:
        """What a user calls it."""
        return self.folder.name if self.is_pretrained else str(self.folder)

    @property
    def out(self) -> Path:
        """The folder for files derived from this run."""
        return Path("runs") / self.name if self.is_pretrained else self.folder


def load(run: Path | str) -> Run:
    """A finished run, or a pretrained model, by its name, ready to predict.

    >>> rp.load("tumor-pcam-n8")
    Run('tumor-pcam-n8': tumor by tumor, N=8)
    """
    folder = _find(run)
    if not (folder / WEIGHTS).exists():
        state = "is not finished; run the same command again" if (folder / RECIPE).exists() else "holds no run"
        raise RunError(f"{folder} {state}.")
    info = read_info(folder)
    try:
        module = build_network(info.network.name, info.task.outputs, info.network.orientations, info.network.options)
    except Exception as error:  # of any kind: it may be a user's function that builds it
        reason = " ".join(str(error).split()) or type(error).__name__
        stop = "" if reason.endswith((".", "?")) else "."
        raise RunError(f"The network of {folder} cannot be built: {reason}{stop}") from None
    load_weights(module, folder / WEIGHTS, info.weights_sha256)
    return Run(folder, info, _wrap(module, info.network, folder).eval())


def _wrap(module: nn.Module, network: NetworkInfo, folder: Path) -> DenseNetwork:
    declared = getattr(module, "geometry", None)
    if isinstance(declared, Geometry):
        fits = declared == network.geometry and declared.fits(network.window_px) and not network.slides
    else:
        fits = has_geometry(module, network.geometry, network.window_px, network.slides)
    if not fits:
        raise RunError(f"{folder / MODEL} says another geometry than the network {network.name!r} has.")
    if isinstance(declared, Geometry):
        return module  # type: ignore[return-value]
    return SlidingModule(module, network.geometry) if network.slides else DenseModule(module, network.geometry)


def _find(run: Path | str) -> Path:
    """The folder of a run; where there is none, that of the pretrained model of that name."""
    if (folder := Path(run)).is_dir():
        return folder
    if found := pretrained.find(str(run)):
        return found
    names = pretrained.list_pretrained()
    near = difflib.get_close_matches(folder.name.lower(), names, n=1)
    hint = f"did you mean {near[0]}?" if near else "name one of these, or a folder."
    raise RunError(f"{run} is neither a run folder nor one of the pretrained models, {', '.join(names)}; {hint}")


def _find_device(device: torch.device | str | None) -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise RunError(f"There is no device {device!r}; choose cpu or cuda.") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise RunError(f"The device {device!r} is not there; `rotopath doctor` shows what is.")
    return found


def _choose_dtype(device: torch.device, precision: str | None) -> torch.dtype:
    """What a device computes with: halves on a GPU unless asked otherwise, which keep the bits that TF32 keeps."""
    if precision not in (None, *get_args(Precision)):
        raise RunError(f"There is no precision {precision!r}; choose '16' or '32'.")
    if precision == "16" and device.type != "cuda":
        raise RunError(f"Precision '16' is for GPUs, but the device is {device.type}; choose '32', or leave it out.")
    return torch.float16 if device.type == "cuda" and precision != "32" else torch.float32


# The network of a recipe


def build(recipe: Recipe, task: Task | None = None) -> DenseNetwork:
    """The network of a recipe, with the weights that its seed draws."""
    task = task or recipe.make_task()
    name, options = recipe.network_name, recipe.network_options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        module = build_network(name, task.outputs, recipe.orientations, options)
        if isinstance(getattr(module, "geometry", None), Geometry):
            return make_dense(module, task.outputs)
        window_px = recipe.window_px or find_window_px(name)
        wrap, geometry = _measure(name, task.outputs, recipe.orientations, options, window_px, recipe.stride_px)
    return wrap(module, geometry)


@lru_cache(maxsize=64)
def _measure(
    name: str, outputs: int, orientations: int, options: NetworkOptions, window_px: int | None, stride_px: int | None
) -> tuple[Callable[[nn.Module, Geometry], DenseNetwork], Geometry]:
    """How a network becomes dense, and its geometry; measured once, since that takes seconds for large networks."""
    network = make_dense(build_network(name, outputs, orientations, options), outputs, window_px, stride_px)
    return SlidingModule if isinstance(network, SlidingModule) else DenseModule, network.geometry


def describe_network(recipe: Recipe, network: DenseNetwork) -> NetworkInfo:
    """The network of a recipe as a model file describes it."""
    name = recipe.network_name
    window_px = recipe.window_px or find_window_px(name) or network.geometry.smallest_px
    slides = isinstance(network, SlidingModule)
    return NetworkInfo(name, recipe.orientations, recipe.network_options, window_px, network.geometry, slides)


def read_info(folder: Path) -> ModelInfo:
    """What a model says; a run from before there were model files is read from its other files."""
    if not (folder / MODEL).exists() and (folder / OLD_POINT).exists():
        return _migrate(folder)
    return read_model(folder)


def _migrate(folder: Path) -> ModelInfo:
    """A run that was finished before there were model files: its recipe and its operating point say the same."""
    recipe = read_run_recipe(folder)
    task = recipe.make_task()
    try:
        point = task.check_point(read_json(folder / OLD_POINT))
    except ValueError as error:
        raise RunError(f"{folder / OLD_POINT} is damaged: {str(error).rstrip('.')}.") from None
    return ModelInfo(task, describe_network(recipe, build(recipe, task)), point, None)


def read_run_recipe(folder: Path) -> Recipe:
    """The recipe of a run. One that a newer version wrote is called so."""
    try:
        return read_recipe(folder / RECIPE)
    except RecipeError as error:
        about = read_json(folder / PROVENANCE) if (folder / PROVENANCE).exists() else {}
        writer = about.get("rotopath")
        if isinstance(writer, str) and _is_newer(writer):
            raise RunError(
                f"{folder} was trained by rotopath {writer}, which is newer than this one ({rotopath.__version__}); "
                f"upgrade rotopath to use it."
            ) from None
        raise RunError(f"{folder} is damaged: {error}") from None


def _is_newer(writer: str) -> bool:
    def parts(text: str) -> list[int]:
        return [int(part) for part in text.split(".") if part.isdecimal()]

    return parts(writer) > parts(rotopath.__version__)
