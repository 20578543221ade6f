"""Read and write the files of a trained model: its description `model.json`, and its weights `weights.safetensors`.

The model file `model.json` contains the task (classes, pixel spacing, stain normalization), the network, the geometry
of the network, the operating point (decision thresholds) and the checksum of the weights. The geometry consists of the
valid image sizes, the distance between adjacent outputs (the stride), and the width of the border of the map that
padding affects (the rim); see `Geometry`. All values are checked when the model file is read. Neither file is a pickle,
because a pickle from an unknown source can execute any code.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError, safe_open
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

import rotopath
from rotopath.images.files import PLAUSIBLE_UM_PX, UnreadableFileError, expect_file
from rotopath.images.stain import Stain
from rotopath.models import DenseNetwork, Geometry
from rotopath.models.protocols import unwrap
from rotopath.recipe import MAX_ORIENTATIONS, MAX_WINDOW_PX
from rotopath.tasks import KINDS, Class, Task, find_kind
from rotopath.writing import parse_json, write_json

MODEL, WEIGHTS = "model.json", "weights.safetensors"
FORMAT = 1  # version of the format of model files
SEAL = "sha256"  # key of the checksum in a safetensors file
REMEDY = "Restore the file from a copy, or train again."
LARGEST_WHOLE = 10**6  # upper limit of whole numbers in a model file, except the size of the weights file in bytes


class RunError(ValueError):
    """Raised if a run or a model cannot be used. The message states the reason and what to do."""


@dataclass(frozen=True)
class NetworkInfo:
    """Description of a network: how to build it, and its geometry."""

    name: str  # registered name, or "package.module:function"
    orientations: int  # N; 1 is an ordinary CNN
    options: Mapping[str, Any]  # options of the network by name, as in the recipe
    window_px: int  # side of the training windows
    geometry: Geometry
    slides: bool = False  # whether the network accepts windows of one size only, and is applied as a sliding window


@dataclass(frozen=True)
class ModelInfo:
    """The content of a model file: everything that prediction needs, except the weights."""

    task: Task
    network: NetworkInfo
    point: Mapping[str, float]  # operating point: decision thresholds, chosen on the validation set
    weights_sha256: str | None  # None for runs of rotopath 0.1, which had no model file


# Model files


def write_model(folder: Path, task: Task, network: NetworkInfo, point: Mapping[str, float], weights: bytes) -> None:
    """Write the model file `model.json` to a folder.

    `point` is the operating point. `weights` is the content of `weights.safetensors`, of which only the checksum and
    the size are written here. In a run folder, write `weights.safetensors` after this call, because a run counts as
    finished as soon as its weights file exists.
    """
    kind = type(task)
    is_built_in = KINDS.get(kind.kind) is kind and kind.__module__.startswith("rotopath.")
    content = {
        "format": FORMAT,
        "rotopath": rotopath.__version__,
        "task": {
            "kind": kind.kind if is_built_in else f"{kind.__module__}:{kind.__qualname__}",
            "name": task.name,
            "classes": [{"name": class_.name, "color": list(class_.color)} for class_ in task.classes],
            "absent": task.background_name,
            "plural": task.objects_name,
            "typed": task.uses_class_names,
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


def read_model(folder: Path) -> ModelInfo:
    """Return the content of the model file in a folder.

    Raises RunError if the file is missing, damaged, or from a newer version of rotopath that uses a newer format. If a
    value is missing or wrong, the message states the key of this value.
    """
    path = folder / MODEL
    content = read_json(path)
    version = content.get("format")
    if type(version) is not int or version < 1:
        raise RunError(
            f"{path} is damaged: the key 'format' must be a whole number, 1 or more; got {version!r}. {REMEDY}"
        )
    if version > FORMAT:
        raise RunError(
            f"{path} was written by rotopath {content.get('rotopath', '?')}, which is newer than this one "
            f"({rotopath.__version__}); upgrade rotopath to use it."
        )
    try:
        task = _parse_task(_get_table(content, "task"))
        network = _parse_network(_get_table(content, "network"))
        point = task.check_operating_point(_get_table(content, "operating_point"))
        weights_sha256 = _parse_checksum(_get_table(content, "weights"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {str(error).rstrip('.')}. {REMEDY}") from None
    return ModelInfo(task, network, point, weights_sha256)


# Parts of a model file. Each function checks the values that it reads, and raises ValueError if a value is wrong.
# `read_model` converts this error to a RunError, whose message also contains the path and the remedy.


def _parse_task(table: Mapping[str, Any]) -> Task:
    kind = find_kind(_get_text(table, "kind"))
    entries = table.get("classes")
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"the key 'classes' must be a list of one class or more; got {entries!r}")
    stain = _get_text(table, "stain")
    if stain not in get_args(Stain):
        raise ValueError(f"the key 'stain' must be one of {', '.join(get_args(Stain))}; got {stain!r}")
    return kind(
        name=_get_text(table, "name"),
        classes=tuple(map(_parse_class, entries)),
        spacing_um_px=_get_number(table, "spacing_um_px", *PLAUSIBLE_UM_PX),
        stain=stain,  # type: ignore[arg-type]
        background_name=_get_text(table, "absent"),
        objects_name=_get_text(table, "plural"),
        uses_class_names=_get_flag(table, "typed"),
    )


def _parse_class(entry: Any) -> Class:
    color = entry.get("color") if isinstance(entry, Mapping) else None
    channels: list[Any] = color if isinstance(color, list) and len(color) == 3 else [None] * 3
    if not all(type(channel) is int and 0 <= channel <= 255 for channel in channels):
        raise ValueError(
            f"a class must have a 'name' and a 'color' of three whole numbers from 0 to 255; got {entry!r}"
        )
    return Class(_get_text(entry, "name"), (channels[0], channels[1], channels[2]))


def _parse_network(table: Mapping[str, Any]) -> NetworkInfo:
    sizes = _get_table(table, "geometry")
    minimums = {"outputs": 1, "smallest_px": 1, "step_px": 1, "stride_px": 1, "rim": 0}
    options = _get_table(table, "options")
    return NetworkInfo(
        name=_get_text(table, "name"),
        orientations=_get_whole(table, "orientations", 1, MAX_ORIENTATIONS),
        options={key: tuple(value) if isinstance(value, list) else value for key, value in options.items()},
        window_px=_get_whole(table, "window_px", 1, MAX_WINDOW_PX),
        geometry=Geometry(**{name: _get_whole(sizes, name, low) for name, low in minimums.items()}),
        slides=_get_flag(table, "slides"),
    )


def _parse_checksum(table: Mapping[str, Any]) -> str:
    if _get_text(table, "file") != WEIGHTS:
        raise ValueError(f"the key 'file' must be {WEIGHTS!r}; got {table['file']!r}")
    if type(table.get("bytes")) is not int or table["bytes"] < 0:
        raise ValueError(f"the key 'bytes' must be a whole number, 0 or more; got {table.get('bytes')!r}")
    return _get_text(table, "sha256")


def _get_table(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if not isinstance(value := table.get(name), dict):
        raise ValueError(f"the key {name!r} must be a JSON object; got {value!r}")
    return value


def _get_text(table: Mapping[str, Any], name: str) -> str:
    if not isinstance(value := table.get(name), str) or not value:
        raise ValueError(f"the key {name!r} must be a string that is not empty; got {value!r}")
    return value


def _get_flag(table: Mapping[str, Any], name: str) -> bool:
    if not isinstance(value := table.get(name), bool):
        raise ValueError(f"the key {name!r} must be true or false; got {value!r}")
    return value


def _get_number(table: Mapping[str, Any], name: str, low: float, high: float) -> float:
    value = table.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"the key {name!r} must be a number from {low:g} to {high:g}; got {value!r}")
    return float(value)


def _get_whole(table: Mapping[str, Any], name: str, low: int, high: int = LARGEST_WHOLE) -> int:
    value = table.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"the key {name!r} must be a whole number from {low} to {high}; got {value!r}")
    return value


# Weights


def pack_weights(network: DenseNetwork | nn.Module, seal: bool = False) -> bytes:
    """Return the weights of a network as the content of a safetensors file.

    The names of the tensors are those in the trained module. If the module is wrapped in a `DenseModule` or a
    `SlidingModule`, the names do not contain the prefix of the wrapper. With `seal`, the file also contains its
    checksum, for files without a model file.
    """
    tensors = {name: tensor.contiguous().cpu() for name, tensor in unwrap(network).state_dict().items()}
    content = save(tensors)
    return save(tensors, {SEAL: hashlib.sha256(content).hexdigest()}) if seal else content


def load_weights(network: DenseNetwork | nn.Module, path: Path, sha256: str | None = None) -> None:
    """Load the weights in the safetensors file `path` into a network.

    `sha256` is the expected SHA-256 checksum of the file; None means that only the checksum in the file is checked, if
    `pack_weights` has written one. Raises RunError
    if the file cannot be read or has another checksum, if the names, shapes or types of the weights are not those of
    the network, or if a weight is not finite. The network is not changed in these cases.
    """
    tensors = read_weights(path, sha256)
    module = unwrap(network)
    if fault := find_weight_fault(tensors, module.state_dict()):
        raise RunError(f"{path} does not contain the weights of this network: {fault}. {REMEDY}")
    module.load_state_dict(tensors)


def read_weights(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """Read the tensors in a safetensors file, by name. Raises RunError if this fails, or if a checksum is wrong."""
    try:
        expect_file(path)
        content = path.read_bytes()
        if sha256 is not None and hashlib.sha256(content).hexdigest() != sha256:
            raise RunError(f"{path} was damaged or replaced: its checksum is not the one in {MODEL}. {REMEDY}")
        tensors = load_tensors(content)
        with safe_open(path, "pt") as file:
            sealed = (file.metadata() or {}).get(SEAL)
    except (SafetensorError, OSError) as error:
        raise RunError(f"{path} is damaged ({str(error).splitlines()[0]}). {REMEDY}") from None
    except RunError:
        raise
    except UnreadableFileError as error:
        raise RunError(str(error)) from None
    except (KeyError, ValueError, RuntimeError) as error:  # of types or shapes that torch does not have
        raise RunError(f"{path} is damaged ({' '.join(str(error).split())}). {REMEDY}") from None
    if sealed is not None and sealed != hashlib.sha256(save(tensors)).hexdigest():
        raise RunError(f"{path} was damaged or replaced: its checksum is not the one in the file. {REMEDY}")
    return tensors


def hash_weights(folder: Path) -> str:
    """Return the SHA-256 checksum of the weights file in a run folder, in hexadecimal."""
    return hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()


def find_weight_fault(tensors: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """Compare the tensors of a file with the tensors that a network expects, both by name.

    Returns a description of the first fault (a missing or unexpected tensor, a wrong shape or type, or a value that is
    not finite), or None if there is no fault.
    """
    for name in sorted(tensors.keys() ^ expected.keys()):
        return f"{name!r} is {'missing' if name in expected else 'not a weight of the network'}"
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape:
            return f"{name!r} must have shape {tuple(expected[name].shape)}; got {tuple(tensor.shape)}"
        if tensor.dtype != expected[name].dtype:
            return f"{name!r} must be of type {_name_dtype(expected[name])}; got {_name_dtype(tensor)}"
        if tensor.is_floating_point() and not tensor.isfinite().all():
            return f"{name!r} has values that are not finite"
    return None


def _name_dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


# JSON


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that contains a JSON object. Raises RunError if it cannot be read or contains anything else."""
    try:
        expect_file(path)
        content = parse_json(path.read_bytes())
    except UnreadableFileError as error:
        raise RunError(str(error)) from None
    except FileNotFoundError:
        raise RunError(f"{path} does not exist. Restore the file from a copy.") from None
    except OSError as error:
        raise RunError(f"{path} cannot be read ({error.strerror}). Restore the file from a copy.") from None
    except ValueError as error:
        raise RunError(f"{path} is damaged: it is not valid JSON ({error}). Restore the file from a copy.") from None
    if not isinstance(content, dict):
        raise RunError(
            f"{path} is damaged: it must contain a JSON object; got {content!r:.40}. Restore the file from a copy."
        )
    return content
