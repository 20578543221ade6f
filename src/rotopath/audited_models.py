"""Open any model for an audit: runs, torch modules, functions, WSInfer's model zoo, ONNX, TorchScript and timm.

`open_model` returns an `AuditedModel`. A model of other software gets an `AuditedTask`, so that its rotated images are
predicted exactly as those of a run.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from rotopath import runs
from rotopath.data import Sample
from rotopath.data.sampling import Ints
from rotopath.exporting import CONFIG, MODELS
from rotopath.images.files import PLAUSIBLE_UM_PX
from rotopath.images.stain import Stain
from rotopath.inference.tiling import activate
from rotopath.model_file import MODEL, RunError, find_weight_fault, read_json, read_weights
from rotopath.models import DenseNetwork, Geometry, WindowNetwork
from rotopath.models.foreign import (
    Preprocessed,
    load_function,
    load_onnx,
    load_timm,
    load_torchscript,
    read_model_file,
)
from rotopath.models.protocols import IMAGE_CHANNELS, SlidingModule, in_one_line
from rotopath.runs import Run
from rotopath.tasks import PALETTE, Class, Classify, Task

TIMM = "timm:"  # prefix of names of networks of timm
TORCHSCRIPT_SUFFIXES = (".pt", ".pth", ".ts", ".jit", ".torchscript")
Activation = Literal["auto", "softmax", "sigmoid", "none"]
SUM_TOLERANCE = 1e-3  # outputs of which all sums over classes are 1 up to this are probabilities


@dataclass(frozen=True)
class ModelOptions:
    """What is not known of a model of other software. Values in its own files are the defaults."""

    window_px: int | None = None  # side of its images
    model_spacing_um_px: float | None = None  # pixel spacing that it was trained on; None: that of the images
    classes: tuple[str, ...] = ()  # names of its outputs
    threshold: float | None = None  # probability of the last class from which it is chosen, for one or two outputs
    activation: Activation = "auto"  # "auto": sigmoid or softmax, or none if the outputs are probabilities already
    mean: tuple[float, ...] = ()  # of images from 0 to 1, which are normalized as (image - mean) / std
    std: tuple[float, ...] = ()
    embedding: bool = False  # whether the outputs are features, and not classes
    checkpoint: Path | None = None  # weights (safetensors), for a function or a network of timm
    trust: bool = False  # whether TorchScript may be loaded, which can execute code


@dataclass(frozen=True)
class AuditedModel:
    """A model to audit, with its task. Of a run, these are its own; of other models, the task is an `AuditedTask`."""

    name: str
    source: str  # such as "pretrained model" or "ONNX", for the page
    task: Task
    network: DenseNetwork | WindowNetwork
    point: Mapping[str, float]
    is_run: bool = False
    has_spacing: bool = True  # False: the images are used at their own pixel spacing
    is_embedding: bool = False  # whether the outputs are features, and there are no decisions


@dataclass(frozen=True)
class AuditedTask(Classify):
    """The task of a model of other software: it has outputs with names, and images need no labels."""

    activation_name: Activation = "auto"

    def image_targets(self, samples: Sequence[Sample]) -> Ints:
        return np.zeros(len(samples), np.int64)

    def to_probabilities(self, logits: Tensor) -> Tensor:
        if self.activation_name == "none":
            return logits
        if self.activation_name == "sigmoid":
            return logits.sigmoid()
        return logits.softmax(dim=1) if self.activation_name == "softmax" else activate(logits)

    def decide(self, probabilities: NDArray[np.floating], point: Mapping[str, float]) -> NDArray[np.generic]:
        """Return the most probable class or, for one or two outputs, whether the last one reaches the threshold."""
        if probabilities.shape[-1] > 2:
            return np.asarray(probabilities.argmax(axis=-1))
        return np.asarray(probabilities[..., -1] >= point["threshold"])


def open_model(
    model: Run | nn.Module | Callable[[Tensor], Any] | Path | str, options: ModelOptions | None = None
) -> AuditedModel:
    """Return a model in the form in which it is audited; see `audit`. Raises RunError if it cannot be used."""
    options = options or ModelOptions()
    _check_options(options)
    try:
        if isinstance(model, Path | str):
            return _open_named(str(model), options)
        if isinstance(model, Run):
            return _open_run(model)
        name = getattr(model, "__name__", type(model).__name__)
        return _adapt(model, name, "Python object", options, window_px=getattr(model, "window_px", None))
    except RunError:
        raise
    except ValueError as error:
        raise RunError(str(error)) from None


def _check_options(options: ModelOptions) -> None:
    if options.activation not in get_args(Activation):
        raise RunError(f"There is no activation {options.activation!r}; choose from {', '.join(get_args(Activation))}.")
    if options.threshold is not None and not 0 <= options.threshold <= 1:
        raise RunError(f"The threshold is {options.threshold:g}, but it is a probability; choose a number from 0 to 1.")
    if options.window_px is not None and options.window_px < 1:
        raise RunError(f"The window has a side of {options.window_px} px; choose 1 or more.")
    for name, values in (("mean", options.mean), ("std", options.std)):
        if len(values) not in (0, 1, IMAGE_CHANNELS) or (name == "std" and 0 in values):
            raise RunError(f"The {name} must be one number or three (red, green, blue), and std not 0; got {values}.")


def _open_named(name: str, options: ModelOptions) -> AuditedModel:
    """Open a model by its path or name."""
    path = Path(name)
    if name.startswith(TIMM):
        return _open_timm(name.removeprefix(TIMM), options)
    if path.is_dir() and not (path / MODEL).exists() and (path / CONFIG).exists():
        return _open_exported(path, options)
    if path.is_file():
        if path.suffix.lower() == ".onnx":
            return _open_onnx(path, options, path.stem)
        if path.suffix.lower() in TORCHSCRIPT_SUFFIXES:
            return _open_torchscript(path, options, path.stem)
        raise RunError(
            f"{path} is not a model file that can be audited; give an ONNX file (.onnx) or TorchScript "
            f"({', '.join(TORCHSCRIPT_SUFFIXES)}), or a folder with a run or with a {CONFIG} of WSInfer."
        )
    if ":" in name and not path.exists():
        loaded = load_function(name, len(options.classes) or None)
        window_px = getattr(loaded, "window_px", None)
        if options.checkpoint is not None:
            if not isinstance(loaded, nn.Module):
                raise RunError(f"{name} is a function and not a torch module, so that it has no weights to load.")
            _load_checkpoint(loaded, options.checkpoint)
        return _adapt(loaded, name, "Python", options, window_px=window_px)
    try:
        return _open_run(runs.load(name))
    except RunError as error:
        if path.exists() or path.suffix.lower() not in (".onnx", *TORCHSCRIPT_SUFFIXES):
            raise
        raise RunError(f"{path} does not exist; check the path of the model.") from error


def _open_run(run: Run) -> AuditedModel:
    source = "pretrained model" if run.is_pretrained else "run"
    name = run.name if run.is_pretrained else run.folder.resolve().name
    return AuditedModel(name, source, run.task, run.network, run.point, is_run=True)


def _open_timm(name: str, options: ModelOptions) -> AuditedModel:
    if options.checkpoint is None:
        raise RunError(f"The timm network {name} has no weights; give a safetensors file with --checkpoint.")
    weights = read_weights(options.checkpoint)
    try:
        module, config = load_timm(name, weights)
    except ModuleNotFoundError as error:
        if error.name != "timm":
            raise
        raise RunError("Networks of timm need the package timm; install it with: pip install timm.") from None
    if fault := find_weight_fault(weights, module.state_dict()):
        raise RunError(f"{options.checkpoint} does not contain the weights of {name}: {fault}.")
    module.load_state_dict(weights)
    size = config.get("input_size", (3, None))[1]
    embedding = options.embedding or getattr(module, "num_classes", None) == 0
    mean, std = (tuple(config.get(key, ())) for key in ("mean", "std"))
    return _adapt(module, name, "timm", options, window_px=size, mean=mean, std=std, embedding=embedding)


def _open_exported(folder: Path, options: ModelOptions) -> AuditedModel:
    """Open a folder of WSInfer's model zoo, or an export of rotopath: `config.json` beside TorchScript or ONNX."""
    config = read_json(folder / CONFIG)
    try:
        window_px = int(_get_number(config, "patch_size_pixels"))
        spacing_um_px = _get_number(config, "spacing_um_px", *PLAUSIBLE_UM_PX)
        names = config.get("class_names")
        if not isinstance(names, list) or not names or not all(isinstance(name, str) and name for name in names):
            raise ValueError(f"'class_names' must be a list of names; got {names!r:.60}")
        preprocessing = _parse_transform(config.get("transform"))
        point = config.get("operating_point")
        threshold = point.get("threshold") if isinstance(point, dict) else None
        if threshold is not None and (isinstance(threshold, bool) or not isinstance(threshold, int | float)):
            raise ValueError(f"'threshold' of 'operating_point' must be a number; got {threshold!r:.40}")
    except ValueError as error:
        raise RunError(f"{folder / CONFIG} is not a configuration of WSInfer's model zoo: {error}.") from None
    known: dict[str, Any] = {
        "window_px": window_px,
        "spacing_um_px": spacing_um_px,
        "classes": tuple(names),
        "threshold": threshold,
        "stain": "macenko" if config.get("stain") == "macenko" else "none",
        **preprocessing,
    }
    files = [path for path in sorted(folder.iterdir()) if path.suffix.lower() in (".onnx", *TORCHSCRIPT_SUFFIXES)]
    preferred = [path for path in files if path.name in (MODELS["torchscript"], MODELS["onnx"])] or files
    if len(preferred) != 1:
        found = ", ".join(path.name for path in preferred) or "none"
        raise RunError(f"{folder} must contain one model, {MODELS['torchscript']} or {MODELS['onnx']}; found {found}.")
    opener = _open_onnx if preferred[0].suffix.lower() == ".onnx" else _open_torchscript
    return opener(preferred[0], options, folder.resolve().name, **known)


def _parse_transform(steps: Any) -> dict[str, Any]:
    """Return the preprocessing of a WSInfer configuration. Raises ValueError for any other steps."""
    parsed: dict[str, Any] = {}
    for step in steps if isinstance(steps, list) else [None]:
        name = step.get("name") if isinstance(step, dict) else None
        arguments = step.get("arguments", {}) if isinstance(step, dict) else {}
        if name == "Resize" and isinstance(arguments, dict):
            size = arguments.get("size")
            size = size[0] if isinstance(size, list) and len(set(map(str, size))) == 1 else size
            if type(size) is not int or not 1 <= size <= 10_000:
                raise ValueError(f"'size' of 'Resize' must be a whole number; got {arguments.get('size')!r:.40}")
            parsed["size_px"] = size
        elif name == "Normalize" and isinstance(arguments, dict):
            parsed |= {key: _parse_colors(key, arguments.get(key)) for key in ("mean", "std")}
        elif name != "ToTensor":
            raise ValueError(f"'transform' may have the steps Resize, ToTensor and Normalize; got {name!r:.40}")
    return parsed


def _parse_colors(key: str, values: Any) -> tuple[float, ...]:
    numbers: list[Any] = values if isinstance(values, list) and len(values) == IMAGE_CHANNELS else [None]
    if not all(type(value) in (int, float) for value in numbers) or (key == "std" and 0 in numbers):
        raise ValueError(f"{key!r} of 'Normalize' must be three numbers; got {values!r:.60}")
    return tuple(float(value) for value in numbers)


def _get_number(config: Mapping[str, Any], key: str, low: float = 1, high: float = 100_000) -> float:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{key!r} must be a number from {low:g} to {high:g}; got {value!r:.40}")
    return value


def _open_onnx(path: Path, options: ModelOptions, name: str, **known: Any) -> AuditedModel:
    module = load_onnx(read_model_file(path))
    if module.window_px is not None and "size_px" not in known:
        known["size_px"] = module.window_px
    return _adapt(module, name, "ONNX", options, **{"window_px": module.window_px, **known})


def _open_torchscript(path: Path, options: ModelOptions, name: str, **known: Any) -> AuditedModel:
    if not options.trust:
        raise RunError(
            f"{path} is TorchScript, a program that can execute code on this computer; if you trust its source, say so "
            f"with --trust."
        )
    return _adapt(load_torchscript(path), name, "TorchScript", options, **known)


def _load_checkpoint(module: nn.Module, path: Path) -> None:
    weights = read_weights(path)
    if fault := find_weight_fault(weights, module.state_dict()):
        raise RunError(f"{path} does not contain the weights of this network: {fault}.")
    module.load_state_dict(weights)


def _adapt(
    model: nn.Module | Callable[[Tensor], Any],
    name: str,
    source: str,
    options: ModelOptions,
    *,
    window_px: int | None = None,
    spacing_um_px: float | None = None,
    classes: tuple[str, ...] = (),
    threshold: float | None = None,
    stain: Stain = "none",
    size_px: int | None = None,
    mean: tuple[float, ...] = (),
    std: tuple[float, ...] = (),
    embedding: bool = False,
) -> AuditedModel:
    """Return a model of other software with a task. Keyword arguments are what its own files state."""
    geometry = getattr(model, "geometry", None)
    is_prepared = isinstance(geometry, Geometry) and geometry.block == 1 and not (size_px or mean or options.mean)
    if is_prepared and options.window_px is None and isinstance(geometry, Geometry):
        window_px = geometry.smallest_px
    side = options.window_px or window_px or (geometry.context_px if isinstance(geometry, Geometry) else None)
    if side is None:
        raise RunError(f"The size of the images of {name} is not known; give the side of its windows with --window-px.")
    if isinstance(model, nn.Module):
        model.eval()
    module = Preprocessed(model, side, size_px, options.mean or mean or (0.0,), options.std or std or (1.0,))
    shape, sums_to_one = _probe(module, name)
    outputs, names = shape[1], options.classes or classes
    if names and len(names) != outputs:
        raise RunError(f"{name} has {outputs} outputs, but {len(names)} classes are named: {', '.join(names)}.")
    activation: Activation = options.activation
    if embedding or options.embedding:
        activation = "none"
    elif activation == "auto":
        activation = "none" if sums_to_one and outputs > 1 else "auto"
    spacing = options.model_spacing_um_px or spacing_um_px
    if spacing is not None and not PLAUSIBLE_UM_PX[0] <= spacing <= PLAUSIBLE_UM_PX[1]:
        raise RunError(f"The pixel spacing of the model is {spacing:g} µm/px; expected 0.05 to 5 µm/px.")
    task = AuditedTask(
        "audited",
        tuple(
            Class(member, PALETTE[i % len(PALETTE)])
            for i, member in enumerate(names or [f"output {i + 1}" for i in range(outputs)])
        ),
        spacing_um_px=spacing or 1.0,
        stain=stain,
        activation_name=activation,
    )
    chosen = threshold if options.threshold is None else options.threshold
    point = {"threshold": 0.5 if chosen is None else float(chosen)}
    network: DenseNetwork | WindowNetwork
    if is_prepared and isinstance(model, DenseNetwork):
        network = model
    elif len(shape) == 4 and max(shape[2:]) > 1:
        if embedding or options.embedding:
            raise RunError(f"{name} returns maps and not embeddings; leave out --embedding.")
        network = module
        if shape[2] != shape[3]:
            raise RunError(f"{name} returns a map of {shape[2]} × {shape[3]} for a square image; it must be square.")
    else:
        network = SlidingModule(module, Geometry(outputs, side, side, side)).eval()
    return AuditedModel(
        name,
        source,
        task,
        network,
        point,
        has_spacing=spacing is not None,
        is_embedding=embedding or options.embedding,
    )


def _probe(module: Preprocessed, name: str) -> tuple[torch.Size, bool]:
    """Return the shape of the outputs for two images, and whether these are probabilities that sum to 1."""
    images = torch.rand(
        2, IMAGE_CHANNELS, module.window_px, module.window_px, generator=torch.Generator().manual_seed(0)
    )
    weight = next(module.model.parameters(), None) if isinstance(module.model, nn.Module) else None
    try:
        with torch.no_grad():
            outputs = module(images if weight is None else images.to(weight.device)).float()
    except Exception as error:  # of any type, because it is code of others
        raise RunError(
            f"{name} cannot predict images of {module.window_px} × {module.window_px} px ({in_one_line(error):.300}); "
            f"check --window-px."
        ) from None
    if len(outputs) != len(images):
        raise RunError(
            f"{name} returns an output of shape {tuple(outputs.shape)} for two images; it must return (B, K) or maps "
            f"(B, K, h, w)."
        )
    is_one = bool(((outputs.sum(dim=1) - 1).abs() < SUM_TOLERANCE).all())
    return outputs.shape, is_one and float(outputs.min()) >= 0
