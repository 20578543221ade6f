"""Export a trained network for other software: TorchScript (for WSInfer and QuPath), ONNX, or a torch.export program.

`export` first converts a network with SE(2) layers to a plain CNN with the same logits; this is called freezing. Then
`export` writes the model to a file in a temporary folder, reads this file, and compares the logits of the exported
model with those of the network. If the logits differ, the temporary folder is removed and an error is raised. Otherwise
the weights, a configuration file, the provenance and a README are added, and the folder gets its final name.
"""

import copy
import dataclasses
import io
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rotopath import runs
from rotopath.environment import PACKAGES, describe_software, now
from rotopath.inference.dense import (
    has_fixed_size,
    load_onnx,
    make_example,
    prepare_export,
    smallest_image_px,
    to_onnx,
)
from rotopath.model_file import RunError, read_json
from rotopath.models import DenseNetwork, freeze
from rotopath.models.protocols import IMAGE_CHANNELS, unwrap
from rotopath.models.registry import find_window_px, is_equivariant
from rotopath.pretrained import CARD
from rotopath.runs import Run
from rotopath.writing import atomic_folder, hold_lock, write_json, write_text

Format = Literal["torchscript", "onnx", "torch"]
CONFIG, README, WEIGHTS = "config.json", "README.md", "model.safetensors"
MODELS: Mapping[Format, str] = {"torchscript": "torchscript_model.pt", "onnx": "model.onnx", "torch": "model.pt2"}
TOLERANCE = 1e-4  # absolute and relative tolerance for exported logits
# Sizes of the batches on which an exported model is checked. (B, k, m) stands for B images that are k steps higher and
# m steps wider than the smallest image. A step is the difference between two successive valid image sides.
CHECKED_SIZES = ((1, 0, 0), (3, 1, 2), (2, 2, 0))

Predict = Callable[[Tensor], Tensor]  # from images (B, 3, H, W) to logits (B, K) or (B, K, h, w)


def export(model: Run | Path | str, to: Format = "torchscript", out: Path | str | None = None) -> Path:
    """Export the network of a finished run or a pretrained model to a folder, and return the path of this folder.

    `model` is a run, the path of a run folder, or the name of a pretrained model. `to` is the format: "torchscript",
    "onnx" or "torch" (a torch.export program). `out` is the folder; by default, it is `export-FORMAT` in
    `run.output_folder`. An older export in the folder is replaced atomically. Raises RunError if the network cannot be
    exported, if the exported model computes other logits than the network, or if the folder exists and is neither empty
    nor an export of rotopath, or contains other files too.
    """
    if to not in get_args(Format):
        raise RunError(f"There is no export format {to!r}; choose from {', '.join(MODELS)}.")
    if to == "onnx":
        import onnxruntime  # noqa: F401  # so that a missing package is reported before any work is done
        import onnxscript  # noqa: F401
    run = model if isinstance(model, Run) else runs.load(model)
    folder = Path(out) if out else run.output_folder / f"export-{to}"
    _expect_replaceable(folder)
    frozen = _make_module(run, to)
    with hold_lock(folder), atomic_folder(folder) as unfinished:
        _expect_replaceable(folder)  # another process may have written to it
        with prepare_export():
            exported = WRITERS[to](frozen, run.network, unfinished / MODELS[to])
            check_outputs(exported, _make_module(run, to, frozen=False), run.network)
        tensors = {name: tensor.contiguous() for name, tensor in frozen.state_dict().items()}
        (unfinished / WEIGHTS).write_bytes(save(tensors))
        config = make_config(run, to)
        write_json(unfinished / CONFIG, config)
        write_json(unfinished / runs.PROVENANCE, _describe_origin(run, to))
        write_text(unfinished / README, _format_readme(config, to))
        if (run.folder / CARD).exists():
            shutil.copy(run.folder / CARD, unfinished / CARD)  # the card contains the terms of use of the weights
    return folder


def _expect_replaceable(folder: Path) -> None:
    """Raise RunError if a folder exists and is neither empty nor an export, or is an export with files of the user."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not all((folder / name).is_file() for name in (CONFIG, runs.PROVENANCE, WEIGHTS)):
        raise RunError(f"{folder} exists and is not an export of rotopath; choose another folder with --out.")
    known = {CONFIG, runs.PROVENANCE, WEIGHTS, README, CARD, *MODELS.values()}
    if others := sorted(path.name for path in folder.iterdir() if path.name not in known):
        raise RunError(
            f"{folder} contains {others[0]!r}, which is not part of an export; move it away, or choose another folder "
            f"with --out."
        )


# The module to export


class PatchClassifier(nn.Module):
    """Patch classifier made from a network: it maps images (B, 3, H, W) to logits (B, K).

    If the network returns a map of logits, the patch classifier returns the mean of the logits over all positions.

    A single logit z is returned as two logits (0, z), because WSInfer and QuPath always apply softmax. The softmax of
    (0, z) is (1 - p, p), where p = sigmoid(z) is the probability.
    """

    def __init__(self, network: nn.Module, outputs: int) -> None:
        super().__init__()
        self.network = network
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        logits = self.network(x)
        if logits.dim() == 4:
            logits = logits.mean(dim=(2, 3))  # (B, K)
        return torch.cat([torch.zeros_like(logits), logits], dim=1) if self.outputs == 1 else logits


def _make_module(run: Run, to: Format, frozen: bool = True) -> nn.Module:
    """Return a copy of the network on the CPU, in a `PatchClassifier` if the export is a patch classifier.

    If `frozen` is true, a network with SE(2) layers is converted to a plain CNN with the same logits. Raises RunError
    if this conversion is not possible.
    """
    module = unwrap(run.network)
    try:
        layers = freeze(module) if frozen and is_equivariant(module) else copy.deepcopy(module)
    except ValueError as error:
        raise RunError(f"The network cannot be exported: {error}") from None
    return (PatchClassifier(layers, run.task.outputs) if _is_classifier(run, to) else layers).cpu().eval()


def _is_classifier(run: Run, to: Format) -> bool:
    """Return whether the export is a patch classifier, which returns one prediction per image instead of a map.

    The export is a patch classifier if three conditions hold:

    - The format is TorchScript. This format is for WSInfer and QuPath, which can only run patch classifiers.
    - The network returns a map of 1 × 1 positions for its smallest valid image.
    - The task has one target for each window, not a map of targets.
    """
    has_one_output = run.network.geometry.block == 1 and not run.task.reader.target_maps
    return to == "torchscript" and has_one_output


# Writers: each function writes a model to a file in one format, reads this file, and returns the model that it has read


def _write_torchscript(model: nn.Module, network: DenseNetwork, path: Path) -> Predict:
    try:
        script: Any = torch.jit.script(model)
    except Exception:  # of any type: scripting does not support all of Python, but tracing works
        side_px = smallest_image_px(network)
        example = torch.zeros(2, IMAGE_CHANNELS, side_px, side_px)
        script = torch.jit.trace(model, example, check_trace=False)  # type: ignore[no-untyped-call]
    path.write_bytes(script.save_to_buffer())  # on a full disk, torch would end the process
    exported: Predict = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return exported


def _write_onnx(model: nn.Module, network: DenseNetwork, path: Path) -> Predict:
    path.write_bytes(to_onnx(model, network))
    return load_onnx(path.read_bytes())


def _write_torch_program(model: nn.Module, network: DenseNetwork, path: Path) -> Predict:
    example, dynamic_shapes = make_example(network)
    content = io.BytesIO()
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(dynamic_shapes,)), content)
    path.write_bytes(content.getvalue())  # on a full disk, torch would end the process
    # torch adds checks (guards) of the strides of tensors, which would wrongly reject feature maps of a single pixel.
    exported: Predict = torch.export.load(path).module(check_guards=False)
    return exported


WRITERS: Mapping[Format, Callable[[nn.Module, DenseNetwork, Path], Predict]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "torch": _write_torch_program,
}


def check_outputs(exported: Predict, expected: Predict, network: DenseNetwork) -> None:
    """Compare the logits of an exported model with those of the model before the export, for several image sizes.

    `exported` is the exported model and `expected` the model before the export; both are functions from images to
    logits. `network` states the valid image sizes. Raises RunError if the logits differ in shape, or in value by more
    than `TOLERANCE`.
    """
    generator = torch.Generator().manual_seed(0)
    side, step = smallest_image_px(network), 0 if has_fixed_size(network) else network.geometry.step_px
    for batch, more_rows, more_columns in CHECKED_SIZES:
        size = (batch, IMAGE_CHANNELS, side + more_rows * step, side + more_columns * step)
        images = torch.randint(0, 256, size, generator=generator).float() / 255
        with torch.no_grad():
            logits, expected_logits = exported(images), expected(images)
        if logits.shape != expected_logits.shape or not torch.allclose(
            logits, expected_logits, rtol=TOLERANCE, atol=TOLERANCE
        ):
            raise RunError(
                f"The exported model and the network compute different logits for images of shape {size}, so nothing "
                f"was written; please report this problem with the versions of torch and onnxruntime."
            )


# Files beside the model


def make_config(run: Run, to: Format) -> dict[str, object]:
    """Return the content of `config.json`, which describes inputs and outputs in the format of WSInfer's model zoo.

    WSInfer can only run patch classifiers, and rejects files without the key `spec_version`. The key is therefore left
    out if the export is not a patch classifier (see `_is_classifier`).
    """
    task, network = run.task, run.info.network
    geometry, is_classifier = network.geometry, _is_classifier(run, to)
    class_names = ("Other", *task.output_names) if is_classifier and task.outputs == 1 else task.output_names
    usual_px = find_window_px(network.name) or network.window_px  # used for segmentation, which has no patch size
    window_px = usual_px if task.reader.target_maps else geometry.smallest_px
    resize = {"name": "Resize", "arguments": {"size": window_px}}
    reflections = "-reflections" if network.options.get("reflections") else ""
    if has_fixed_size(run.network):
        output, step = f"logits (B, {len(class_names)}) of a patch", 0
    else:
        output = f"logits (B, {geometry.outputs}, H', W') of a map"
        output, step = f"logits (B, {len(class_names)}) of a patch" if is_classifier else output, geometry.step_px
    return ({"spec_version": "1.0"} if is_classifier else {}) | {
        "name": run.folder.resolve().name,
        "architecture": f"rotopath-{network.name}-N{network.orientations}{reflections}",
        "num_classes": len(class_names),
        "class_names": class_names,
        "patch_size_pixels": window_px,
        "spacing_um_px": task.spacing_um_px,
        "transform": [resize, {"name": "ToTensor"}],
        "output": output,
        "activation": "softmax" if is_classifier else task.activation,
        "stain": "as it is" if task.stain == "none" else task.stain,
        "image_sides_px": {"smallest": smallest_image_px(run.network), "step": step},
        "stride_px": geometry.stride_px,
        "operating_point": dict(run.point),
    }


def _describe_origin(run: Run, to: Format) -> dict[str, object]:
    """Return the provenance of an export: its time and format, the versions of software, and the origin of the model.

    The origin consists of the name, the recipe, the operating point and the provenance of the run. The recipe is None
    if the run folder does not contain it; so is the provenance, which has the key "trained".
    """
    provenance, recipe = run.folder / runs.PROVENANCE, run.folder / runs.RECIPE
    return {
        "exported": now(),
        "format": to,
        **describe_software((*PACKAGES, "onnx", "onnxruntime", "onnxscript")),
        "run": run.name,
        "recipe": dataclasses.asdict(run.recipe) if recipe.exists() else None,
        "operating_point": dict(run.point),
        "trained": read_json(provenance) if provenance.exists() else None,
    }


def _format_readme(config: Mapping[str, object], to: Format) -> str:
    """Return the README of an export, in Markdown: how to load the model, and what its inputs and outputs are."""
    load = {
        "torchscript": 'import torch\nmodel = torch.jit.load("torchscript_model.pt")',
        "onnx": 'import onnxruntime\nmodel = onnxruntime.InferenceSession("model.onnx")  # image in, logits out',
        "torch": 'import torch\nmodel = torch.export.load("model.pt2").module(check_guards=False)',
    }[to]
    if "spec_version" in config:
        use = "The model classifies patches. It runs in WSInfer, and as a local model in QuPath's WSInfer extension."
    else:
        use = "The model returns a map, not a class for a patch; WSInfer and its QuPath extension cannot run it."
    sides: Mapping[str, int] = config["image_sides_px"]  # type: ignore[assignment]
    sides_px = (
        f"{sides['smallest']} + {sides['step']}·k px (k = 0, 1, 2, …)" if sides["step"] else f"{sides['smallest']} px"
    )
    lines = [
        f"# {config['name']}",
        f"{config['architecture']}, exported by rotopath as a plain network without SE(2) layers. {use}",
        f"- Input: RGB images (B, 3, H, W) from 0 to 1 at {config['spacing_um_px']} µm/px; stain: {config['stain']}; "
        f"sides of {sides_px}.",
        f"- Output: {config['output']}; apply {config['activation']}. Classes: {', '.join(config['class_names'])}.",  # type: ignore[arg-type]
        f"```python\n{load}\n```",
        f"`{WEIGHTS}` contains only the weights. `{runs.PROVENANCE}` records how the model was trained and exported.",
    ]
    return "\n\n".join(lines) + "\n"
