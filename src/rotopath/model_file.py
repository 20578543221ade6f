"""The model file: what a model sees and finds, beside its weights; checked in full when it is read.

In: a folder with `model.json` and `weights.safetensors`. Out: task, network and operating point, and weights that are
exactly the network's own. Nothing that a user hands over is unpickled.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save
from torch import Tensor, nn

import rotopath
from rotopath.images.files import PLAUSIBLE_UM_PX
from rotopath.images.stain import Stain
from rotopath.models import DenseNetwork, Geometry
from rotopath.models.protocols import unwrap
from rotopath.tasks import KINDS, Class, Task, find_kind
from rotopath.writing import write_json

MODEL, WEIGHTS = "model.json", "weights.safetensors"
FORMAT = 1  # of model files


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


def read_model(folder: Path) -> ModelInfo:
    """What the model file of a folder says, checked in full."""
    path = folder / MODEL
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
        digest = _read_weights(_table(content, "weights"))
    except ValueError as error:
        raise RunError(f"{path} is damaged: {str(error).rstrip('.')}.") from None
    return ModelInfo(task, network, point, digest)


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


def _read_weights(table: Mapping[str, Any]) -> str:
    """The checksum of the weights, which have to be in the usual file."""
    if _text(table, "file") != WEIGHTS:
        raise ValueError(f"its weights are in {table['file']!r}, where {WEIGHTS!r} is expected")
    if type(table.get("bytes")) is not int or table["bytes"] < 0:
        raise ValueError(f"'bytes' is {table.get('bytes')!r}, where a whole number from 0 is expected")
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


def pack_weights(network: DenseNetwork | nn.Module) -> bytes:
    """The weights as safetensors, under the names that they have in the trained module."""
    state = unwrap(network).state_dict()
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
    module = unwrap(network)
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
