"""The run folder: everything about one training, each file whole or not there at all; and what a model file says.

In: a folder. Out: a model that is ready to predict, from `model.json` and the weights alone; and where a run comes
from: versions, data, hardware, time. Weights are safetensors, and nothing that a user hands over is unpickled.
"""

import difflib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

import rotopath
from rotopath import pretrained
from rotopath.images.files import PLAUSIBLE_UM_PX
from rotopath.images.stain import Stain
from rotopath.models import DenseNetwork, Geometry
from rotopath.models.promise import DenseModule, SlidingModule, find_module, has_geometry, make_dense
from rotopath.models.registry import build_network, find_window_px
from rotopath.recipe import NetworkOptions, Recipe, RecipeError, read_recipe
from rotopath.tasks import KINDS, Class, Task, find_kind
from rotopath.writing import replaced

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rotopath.images import Slide
    from rotopath.inference.result import Result
    from rotopath.inference.slides import Model

RECIPE, WEIGHTS, MODEL, METRICS = "recipe.toml", "weights.safetensors", "model.json", "metrics.json"
LOG, PROVENANCE, RESUME, KEPT = "log.csv", "provenance.json", "resume.ckpt", "kept.safetensors"
OLD_POINT = "operating_point.json"  # of runs from before there was a model file
FORMAT = 1  # of model files
Device = Literal["cpu", "cuda"]
Precision = Literal["16", "32"]


class RunError(ValueError):
    """A run or a model that cannot be used, said in one sentence."""


@dataclass(frozen=True)
class NetworkInfo:
    """A network by its name, and what its outputs mean on an image."""

    name: str
    orientations: int
    options: Mapping[str, Any]
    window_px: int  # of the windows that it was trained on
    geometry: Geometry
    slides: bool = False  # whether it answers for whole windows, and is slid over images


@dataclass(frozen=True)
class ModelInfo:
    """What a model file says: everything that prediction has to know besides the weights."""

    task: Task
    network: NetworkInfo
    point: Mapping[str, float]  # thresholds, chosen on the validation set
    weights_sha256: str | None  # None of runs from before there was a model file


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
        from rotopath.inference.slides import Options

        with as_slide(image, spacing_um_px) as slide:
            return predict_slide(self.ready(device, precision), slide, Options(rotations, everywhere=everywhere))

    def ready(self, device: torch.device | Device | str | None = None, precision: Precision | None = None) -> "Model":
        """The model on a device; by default on a GPU, if there is one, in precision "16", and else on the CPU in "32".

        It is a copy in the form that suits it: as it is, for Triton's kernels, or frozen to a plain CNN.
        """
        from rotopath.inference.preparing import prepare
        from rotopath.inference.slides import Model

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


# The model file


def write_model(folder: Path, task: Task, network: NetworkInfo, point: Mapping[str, float], weights: bytes) -> None:
    """Write `model.json`, for weights that are about to be written."""
    kind = type(task)
    known = KINDS.get(kind.kind) is kind and kind.__module__.startswith("rotopath.")
    content = {
        "format": FORMAT,
        "rotopath": rotopath.__version__,
        "task": {
            "kind": kind.kind if known else f"{kind.__module__}:{kind.__qualname__}",
            "name": task.name,
            "classes": [{"name": each.name, "color": list(each.color)} for each in task.classes],
            "absent": task.absent,
            "plural": task.plural,
            "typed": task.typed,
            "spacing_um_px": task.spacing_um_px,
            "stain": task.stain,
        },
        "network": {
            "name": network.name,
            "orientations": network.orientations,
            "options": dict(network.options),
            "window_px": network.window_px,
            "slides": network.slides,
            "geometry": asdict(network.geometry),
        },
        "operating_point": dict(point),
        "weights": {"file": WEIGHTS, "bytes": len(weights), "sha256": hashlib.sha256(weights).hexdigest()},
    }
    write_json(folder / MODEL, content)


def read_info(folder: Path) -> ModelInfo:
    """What the model file of a folder says, checked in full; older runs are read from their other files."""
    path = folder / MODEL
    if not path.exists() and (folder / OLD_POINT).exists():
        return _migrate(folder)
    content = read_json(path)
    form = content.get("format")
    if type(form) is not int or form < 1:
        raise RunError(f"{path} is damaged: its format is {form!r}, where a whole number from 1 is expected.")
    if form > FORMAT:
        raise RunError(
            f"{path} was written by rotopath {content.get('rotopath', '?')}, which is newer than this one "
            f"({rotopath.__version__}); upgrade rotopath to use it."
        )
    try:
        task = _read_task(_table(content, "task"))
        network = _read_network(_table(content, "network"))
        point = task.check_point(_table(content, "operating_point"))
        digest = _read_weights(_table(content, "weights"), folder)
    except ValueError as error:
        raise RunError(f"{path} is damaged: {str(error).rstrip('.')}.") from None
    return ModelInfo(task, network, point, digest)


def _migrate(folder: Path) -> ModelInfo:
    """A run that was finished before there were model files: its recipe and its operating point say the same."""
    recipe = read_run_recipe(folder)
    task = recipe.make_task()
    try:
        point = task.check_point(read_json(folder / OLD_POINT))
    except ValueError as error:
        raise RunError(f"{folder / OLD_POINT} is damaged: {str(error).rstrip('.')}.") from None
    return ModelInfo(task, describe_network(recipe, build(recipe, task)), point, None)


def _read_task(table: Mapping[str, Any]) -> Task:
    kind = find_kind(_text(table, "kind"))
    classes = table.get("classes")
    if not isinstance(classes, list) or not classes:
        raise ValueError("its task has no list of classes")
    found = []
    for each in classes:
        color = each.get("color") if isinstance(each, Mapping) else None
        parts: list[Any] = color if isinstance(color, list) and len(color) == 3 else [None] * 3
        if not all(type(part) is int and 0 <= part <= 255 for part in parts):
            raise ValueError(f"a class of its task is {each!r}, where a name and a colour of three bytes are expected")
        found.append(Class(_text(each, "name"), (parts[0], parts[1], parts[2])))
    stain = _text(table, "stain")
    if stain not in get_args(Stain):
        raise ValueError(f"its stain is {stain!r}; expected is one of {', '.join(get_args(Stain))}")
    spacing = _number(table, "spacing_um_px", *PLAUSIBLE_UM_PX)
    absent, plural, typed = _text(table, "absent"), _text(table, "plural"), _flag(table, "typed")
    return kind(_text(table, "name"), tuple(found), spacing, stain, absent, plural, typed)  # type: ignore[arg-type]


def _read_weights(table: Mapping[str, Any], folder: Path) -> str:
    """The checksum of the weights, which have to be in their file and of their size."""
    if _text(table, "file") != WEIGHTS:
        raise ValueError(f"its weights are in {table['file']!r}, where {WEIGHTS!r} is expected")
    found = (folder / WEIGHTS).stat().st_size if (folder / WEIGHTS).exists() else None
    if type(table.get("bytes")) is not int or table["bytes"] < 0:
        raise ValueError(f"'bytes' is {table.get('bytes')!r}, where a whole number from 0 is expected")
    if found is not None and found != table["bytes"]:
        raise ValueError(f"{WEIGHTS} has {found} bytes, and not {table['bytes']}: it was damaged or replaced")
    return _text(table, "sha256")


def _read_network(table: Mapping[str, Any]) -> NetworkInfo:
    sizes = _table(table, "geometry")
    least = {"outputs": 1, "smallest_px": 1, "step_px": 1, "stride_px": 1, "rim": 0}
    geometry = Geometry(**{name: _whole(sizes, name, low) for name, low in least.items()})
    return NetworkInfo(
        _text(table, "name"),
        _whole(table, "orientations", 1),
        {key: tuple(value) if isinstance(value, list) else value for key, value in _table(table, "options").items()},
        _whole(table, "window_px", 1),
        geometry,
        _flag(table, "slides"),
    )


def _table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(found := table.get(name), dict):
        raise ValueError(f"{name!r} is {found!r}, where a table is expected")
    return found


def _text(table: Mapping[str, Any], name: str) -> str:
    if not isinstance(found := table.get(name), str) or not found:
        raise ValueError(f"{name!r} is {found!r}, where a text is expected")
    return found


def _flag(table: Mapping[str, Any], name: str) -> bool:
    if not isinstance(found := table.get(name), bool):
        raise ValueError(f"{name!r} is {found!r}, where true or false is expected")
    return found


def _number(table: Mapping[str, Any], name: str, low: float, high: float) -> float:
    found = table.get(name)
    if isinstance(found, bool) or not isinstance(found, int | float) or not low <= found <= high:
        raise ValueError(f"{name!r} is {found!r}, where a number from {low:g} to {high:g} is expected")
    return float(found)


def _whole(table: Mapping[str, Any], name: str, low: int) -> int:
    found = table.get(name)
    if type(found) is not int or not low <= found <= 10**6:
        raise ValueError(f"{name!r} is {found!r}, where a whole number from {low} is expected")
    return found


# Weights


def pack_weights(network: DenseNetwork | nn.Module) -> bytes:
    """The weights as safetensors, under the names that they have in the trained module."""
    state = find_module(network).state_dict()
    return save({name: tensor.contiguous().cpu() for name, tensor in state.items()})


def load_weights(network: DenseNetwork | nn.Module, path: Path, sha256: str | None = None) -> None:
    """Read weights into a network, which must be exactly its own: names, shapes, types, finite numbers, checksum."""
    try:
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise RunError(
                f"{path} is not the file that its model file describes: it was damaged or replaced; restore it from a "
                f"copy, or train again."
            )
        tensors = load_tensors(content)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged ({str(error).splitlines()[0]}); restore it, or train again.") from None
    module = find_module(network)
    if fault := _find_fault(tensors, module.state_dict()):
        raise RunError(f"{path} does not hold the weights of this network: {fault}.")
    module.load_state_dict(tensors)


def hash_weights(folder: Path) -> str:
    """The checksum of the weights of a run."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def _find_fault(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    for name in sorted(tensors.keys() ^ expected.keys()):
        return f"{name!r} is {'missing' if name in expected else 'not a weight of it'}"
    for name, tensor in tensors.items():
        wanted = expected[name]
        if tensor.shape != wanted.shape:
            return f"{name!r} has shape {tuple(tensor.shape)}, and not {tuple(wanted.shape)}"
        if tensor.dtype != wanted.dtype:
            return f"{name!r} is of type {_name_dtype(tensor)}, and not {_name_dtype(wanted)}"
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return f"{name!r} has values that are no finite numbers"
    return None


def _name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# Files


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file whose content is a table."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"), parse_constant=_refuse_constant)
    except FileNotFoundError:
        raise RunError(f"{path} does not exist.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}).") from None
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is damaged: it is no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise RunError(f"{path} is damaged: it holds a {type(content).__name__}, where a table is expected.")
    return content


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")


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


def write_text(path: Path, text: str) -> None:
    with replaced(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_bytes(path: Path, content: bytes) -> None:
    with replaced(path) as unfinished:
        unfinished.write_bytes(content)


def write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
