"""The run folder: everything about one training, each file whole or not there at all.

In: a folder. Out: its recipe, its trained network and its operating point; and what it is made of: versions, data,
hardware, time. Weights are safetensors, and nothing that a user hands over is unpickled.
"""

import difflib
import hashlib
import json
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

import rotopath
from rotopath import models, pretrained
from rotopath.data.collection import Collection
from rotopath.models import Network
from rotopath.recipe import Recipe, RecipeError, read_recipe
from rotopath.writing import replaced

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rotopath.images import Slide
    from rotopath.inference.result import Result
    from rotopath.inference.slides import Model

RECIPE, WEIGHTS, POINT, METRICS = "recipe.toml", "weights.safetensors", "operating_point.json", "metrics.json"
LOG, PROVENANCE, RESUME, KEPT = "log.csv", "provenance.json", "resume.ckpt", "kept.safetensors"
PACKAGES = ("torch", "numpy", "scipy", "scikit-image", "lightning", "safetensors")


class RunError(ValueError):
    """A run that cannot be used, or cannot go on, said in one sentence."""


@dataclass(frozen=True)
class Run:
    """A trained network with what belongs to it."""

    folder: Path
    recipe: Recipe
    network: Network  # in evaluation mode
    point: Mapping[str, float]  # thresholds, chosen on the validation set

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
        device: torch.device | str | None = None,
        precision: str | None = None,
    ) -> "Result":
        """What the model finds in an image (H, W, 3), a file or an open slide; pixels have `spacing_um_px` µm a side.

        With several `rotations` of every tile, probabilities are their mean, and the deviation is told too. Places
        without tissue are left out, unless they are asked for. Device and precision are those of `ready`.
        """
        from rotopath.images.slides import as_slide
        from rotopath.inference.result import predict_slide
        from rotopath.inference.slides import Options

        with as_slide(image, spacing_um_px) as slide:
            return predict_slide(self.ready(device, precision), slide, Options(rotations, everywhere=everywhere))

    def ready(self, device: torch.device | str | None = None, precision: str | None = None) -> "Model":
        """The model on a device; by default on a GPU, if there is one, in precision "16", and else on the CPU in "32".

        It is a copy in the form that suits it: as it is, for Triton's kernels, or frozen to a plain CNN.
        """
        from rotopath.inference.preparing import prepare
        from rotopath.inference.slides import Model

        chosen = _find_device(device)
        dtype = _choose_dtype(chosen, precision)
        return Model(self.recipe.task, prepare(self.network, chosen, dtype), self.point, chosen)

    @property
    def name(self) -> str:
        """What a user calls it."""
        return self.folder.name if self.is_pretrained else str(self.folder)

    @property
    def out(self) -> Path:
        """Where that goes which is made of it."""
        return Path("runs") / self.name if self.is_pretrained else self.folder


def load(run: Path | str) -> Run:
    """A finished run, or a pretrained model, by its name, ready to predict.

    >>> rp.load("tumor-pcam-n8").network.orientations
    8
    """
    folder = _find(run)
    if not (folder / WEIGHTS).exists():
        state = "is not finished; run the same command again" if (folder / RECIPE).exists() else "holds no run"
        raise RunError(f"{folder} {state}.")
    try:
        recipe = read_recipe(folder / RECIPE)
        point = json.loads((folder / POINT).read_text(encoding="utf-8"))
    except (RecipeError, OSError, json.JSONDecodeError) as error:
        raise RunError(f"{folder} is damaged: {error}") from None
    network = build(recipe)
    load_weights(network, folder / WEIGHTS)
    return Run(folder, recipe, network.eval(), point)


def _find(run: Path | str) -> Path:
    """The folder of a run; where there is none, that of the pretrained model of that name."""
    if (folder := Path(run)).is_dir():
        return folder
    if found := pretrained.find(str(run)):
        return found
    names = pretrained.list_names()
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
    if precision not in (None, "16", "32"):
        raise RunError(f"There is no precision {precision!r}; choose '16' or '32'.")
    if precision == "16" and device.type != "cuda":
        raise RunError(f"Precision '16' is for GPUs, but the device is {device.type}; choose '32', or leave it out.")
    return torch.float16 if device.type == "cuda" and precision != "32" else torch.float32


def build(recipe: Recipe) -> Network:
    """The network of a recipe, with the weights that its seed draws."""
    networks = {"mitosis": models.mitosis, "nuclei": models.nuclei, "tumor": models.tumor}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        choices: models.Choices = {
            "kernel": recipe.kernel,
            "pooling": recipe.pooling,
            "upsampling": recipe.upsampling,
            "smoothing": recipe.smoothing,
            "reflections": recipe.reflections,
            "widths_of": recipe.widths_of,
        }
        if recipe.projection is not None:
            choices["projection"] = recipe.projection
        return networks[recipe.task](recipe.orientations, **choices)


def save_weights(network: Network, path: Path) -> None:
    tensors = {name: tensor.contiguous().cpu() for name, tensor in network.state_dict().items()}
    with replaced(path) as unfinished:
        unfinished.write_bytes(save(tensors))


def load_weights(network: Network, path: Path) -> None:
    try:
        network.load_state_dict(load_file(path))
    except (SafetensorError, OSError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
        raise RunError(f"{path} does not hold the weights of this network ({reason}).") from None


def write_text(path: Path, text: str) -> None:
    with replaced(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, content: object) -> None:
    write_text(path, json.dumps(content, indent=1, allow_nan=False) + "\n")


def fingerprint(collection: Collection) -> str:
    """A short text that changes when images, annotations, labels or splits do; files are known by name and size."""
    digest = hashlib.sha256(collection.task.encode())
    sizes: dict[Path, int] = {}
    for picture in collection.pictures:
        for path in (picture.path, *picture.annotations):
            if path not in sizes:
                sizes[path] = path.stat().st_size
        known = [sizes[path] for path in (picture.path, *picture.annotations)]
        about = (picture.name, picture.case, picture.split, picture.row, picture.label, picture.spacing_um_px, known)
        digest.update(repr(about).encode())
    return digest.hexdigest()[:16]


def describe(recipe: Recipe, collection: Collection) -> dict[str, object]:
    """Where a run comes from: versions, commit, seed, data."""
    return {
        "begun": now(),
        **describe_software(),
        "seed": recipe.seed,
        "data": {
            "source": collection.source,
            "path": str(collection.root),
            "fingerprint": fingerprint(collection),
            "images": len(collection.pictures),
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
