"""A trained network for other software: a folder with a plain model, what it expects, and where it comes from.

In: a run. Out: a folder with the frozen network as TorchScript (for WSInfer and QuPath), ONNX or a program of
`torch.export`. A model is in its place only once it was read back and gave the network's own answers.
"""

import copy
import dataclasses
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rotopath import runs
from rotopath.model_file import RunError, read_json
from rotopath.models import DenseNetwork, freeze
from rotopath.models.protocols import IMAGE_CHANNELS, DenseModule, SlidingModule, unwrap
from rotopath.models.registry import find_window_px, is_equivariant
from rotopath.pretrained import CARD
from rotopath.runs import PACKAGES, Run, describe_software, now
from rotopath.writing import atomic_folder, write_json, write_text

Format = Literal["torchscript", "onnx", "torch"]
CONFIG, README, WEIGHTS = "config.json", "README.md", "model.safetensors"
MODELS: Mapping[str, str] = {"torchscript": "torchscript_model.pt", "onnx": "model.onnx", "torch": "model.pt2"}
TOLERANCE = 1e-4
CHECKED = ((1, 0, 0), (3, 1, 2), (2, 2, 0))  # batch, and steps of the grid by which height and width are larger

Answer = Callable[[Tensor], Tensor]


class PatchClassifier(nn.Module):
    """Logits (B, K) of a patch; of a network with one logit, two: of anything else, and of what it finds.

    A patch as large as the receptive field has one logit z, and sigmoid(z) is what softmax says of (0, z). In a larger
    patch, logits are the mean over its windows.
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


def export(model: Run | Path | str, to: Format = "torchscript", out: Path | str | None = None) -> Path:
    """Write the network of a finished run as torchscript, onnx or torch; gives the folder, which is new or complete."""
    if to not in get_args(Format):
        raise RunError(f"There is no format {to!r} to export to; choose from {', '.join(MODELS)}.")
    if to == "onnx":
        import onnxruntime  # noqa: F401  # with what writes it, onnx and onnxscript: named here if missing, before work
        import onnxscript  # noqa: F401
    run = model if isinstance(model, Run) else runs.load(model)
    place = Path(out) if out else run.out / f"export-{to}"
    if place.exists() and not (place.is_dir() and (_is_export(place) or not any(place.iterdir()))):
        raise RunError(f"{place} exists and is no export of rotopath; choose another folder with --out.")
    plain = _make_model(run, to)
    with atomic_folder(place) as unfinished:
        with _quiet():
            answer = WRITERS[to](plain, run.network, unfinished / MODELS[to])
            check_answers(answer, _make_model(run, to, frozen=False), run.network)
        tensors = {name: tensor.contiguous() for name, tensor in plain.state_dict().items()}
        (unfinished / WEIGHTS).write_bytes(save(tensors))
        config = describe_model(run, to)
        write_json(unfinished / CONFIG, config)
        write_json(unfinished / runs.PROVENANCE, _describe_origin(run, to))
        write_text(unfinished / README, _explain(config, to))
        if (run.folder / CARD).exists():  # terms go with the weights
            shutil.copy(run.folder / CARD, unfinished / CARD)
    return place


def describe_model(run: Run, to: str) -> dict[str, object]:
    """What a program has to know to run the model, by the configuration of WSInfer's model zoo.

    Only a classifier of patches carries `spec_version`: without it WSInfer refuses a model that gives maps.
    """
    task, network = run.task, run.info.network
    geometry, patches = network.geometry, _is_classifier(run, to)
    class_names = ("Other", *task.output_names) if patches and task.outputs == 1 else task.output_names
    # Maps may be of any size, and are usually trained on the network's usual windows.
    window_px = (find_window_px(network.name) or network.window_px) if task.reader.maps else geometry.smallest_px
    resize = {"name": "Resize", "arguments": {"size": window_px}}
    mirrored = "-reflections" if network.options.get("reflections") else ""
    if _takes_windows(run.network):
        output, step = f"logits (B, {len(class_names)}) of a patch", 0
    else:
        output = f"logits (B, {geometry.outputs}, H', W') of a map"
        output, step = f"logits (B, {len(class_names)}) of a patch" if patches else output, geometry.step_px
    return ({"spec_version": "1.0"} if patches else {}) | {
        "name": run.folder.resolve().name,
        "architecture": f"rotopath-{network.name}-N{network.orientations}{mirrored}",
        "num_classes": len(class_names),
        "class_names": class_names,
        "patch_size_pixels": window_px,
        "spacing_um_px": task.spacing_um_px,
        "transform": [resize, {"name": "ToTensor"}],
        "output": output,
        "activation": "softmax" if patches else task.activation,
        "stain": "as it is" if task.stain == "none" else task.stain,
        "image_sides_px": {"smallest": _smallest_image(run.network), "step": step},
        "stride_px": geometry.stride_px,
        "operating_point": dict(run.point),
    }


def check_answers(answer: Answer, expected: Answer, network: DenseNetwork) -> None:
    """See that a model gives the network's answers, in batches and images of several sizes."""
    generator = torch.Generator().manual_seed(0)
    side, step = _smallest_image(network), 0 if _takes_windows(network) else network.geometry.step_px
    for batch, more_rows, more_columns in CHECKED:
        size = (batch, IMAGE_CHANNELS, side + more_rows * step, side + more_columns * step)
        images = torch.randint(0, 256, size, generator=generator).float() / 255
        with torch.no_grad():
            given, wanted = answer(images), expected(images)
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise RunError(
                f"The exported model does not give the network's answers to images of {size}, so nothing was written; "
                f"please report this, with the versions of torch and onnxruntime."
            )


def _make_model(run: Run, to: str, frozen: bool = True) -> nn.Module:
    module = unwrap(run.network)
    try:
        layers = freeze(module) if frozen and is_equivariant(module) else copy.deepcopy(module)
    except ValueError as error:
        raise RunError(f"The network cannot be exported: {error}") from None
    return (PatchClassifier(layers, run.task.outputs) if _is_classifier(run, to) else layers).cpu().eval()


def _takes_windows(network: DenseNetwork) -> bool:
    """Whether the network answers for windows of one size only."""
    return isinstance(network, SlidingModule)


def _is_classifier(run: Run, to: str) -> bool:
    """WSInfer and QuPath, which read TorchScript, know classifiers of patches only; others can use the whole map."""
    one_answer = run.network.geometry.block == 1 and not run.task.reader.maps
    return to == "torchscript" and one_answer


def _smallest_image(network: DenseNetwork) -> int:
    """The smallest image that is worth an answer: of a padded network, one in which some outputs feel no edge."""
    geometry = network.geometry
    is_padded = isinstance(network, DenseModule)
    return geometry.nearest_sizes(geometry.surrounded_px)[-1] if is_padded else geometry.smallest_px


def _write_torchscript(model: nn.Module, network: DenseNetwork, path: Path) -> Answer:
    try:
        script: Any = torch.jit.script(model)
    except Exception:  # of any kind: TorchScript does not know all of Python, but tracing needs only what is computed
        side = _smallest_image(network)
        script = torch.jit.trace(model, torch.zeros(2, IMAGE_CHANNELS, side, side), check_trace=False)  # type: ignore[no-untyped-call]
    script.save(str(path))
    answer: Answer = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return answer


def _write_onnx(model: nn.Module, network: DenseNetwork, path: Path) -> Answer:
    import onnxruntime

    example, shapes = _example(network)
    program = torch.onnx.export(
        *(model, (example,)),
        dynamo=True,
        dynamic_shapes=(shapes,),
        input_names=["image"],
        output_names=["logits"],
        verbose=False,
    )
    assert program is not None
    for node in program.model.graph:
        node.metadata_props.clear()  # among them the paths of this machine
    program.save(str(path), external_data=False)
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"image": images.numpy()})[0])


def _write_torch(model: nn.Module, network: DenseNetwork, path: Path) -> Answer:
    example, shapes = _example(network)
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(shapes,)), path)
    # A guard on strides, of every exported convolution, refuses maps of a single pixel, which are as good as others.
    answer: Answer = torch.export.load(path).module(check_guards=False)
    return answer


WRITERS: Mapping[str, Callable[[nn.Module, DenseNetwork, Path], Answer]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "torch": _write_torch,
}


def _example(network: DenseNetwork) -> tuple[Tensor, dict[int, Any]]:
    """Images to follow, and what may be otherwise in others: the batch, and sides on the pooling grid."""
    step, side = network.geometry.step_px, _smallest_image(network)
    batch = torch.export.Dim("batch", min=1)
    if _takes_windows(network):
        return torch.zeros(2, IMAGE_CHANNELS, side, side), {0: batch}
    height, width = (torch.export.Dim(name, min=side // step) for name in ("rows", "columns"))
    shapes = {0: batch, 2: step * height + side % step, 3: step * width + side % step}
    return torch.zeros(2, IMAGE_CHANNELS, side + step, side + 2 * step), shapes


def _describe_origin(run: Run, to: str) -> dict[str, object]:
    trained, recipe = run.folder / runs.PROVENANCE, run.folder / runs.RECIPE
    return {
        "exported": now(),
        "format": to,
        **describe_software((*PACKAGES, "onnx", "onnxruntime", "onnxscript")),
        "run": run.name,
        "recipe": dataclasses.asdict(run.recipe) if recipe.exists() else None,
        "operating_point": dict(run.point),
        "trained": read_json(trained) if trained.exists() else None,
    }


def _explain(config: Mapping[str, object], to: str) -> str:
    """A page for whoever finds the folder."""
    load = {
        "torchscript": 'import torch\nmodel = torch.jit.load("torchscript_model.pt")',
        "onnx": 'import onnxruntime\nmodel = onnxruntime.InferenceSession("model.onnx")  # image in, logits out',
        "torch": 'import torch\nmodel = torch.export.load("model.pt2").module(check_guards=False)',
    }[to]
    if "spec_version" in config:
        use = "It classifies patches, and runs in WSInfer, and in QuPath as a local model of the WSInfer extension."
    else:
        use = "It gives a map for an image, and not a class for a patch, so WSInfer and its extension cannot run it."
    sides: Mapping[str, int] = config["image_sides_px"]  # type: ignore[assignment]
    on_grid = f"{sides['smallest']} + {sides['step']}·k px" if sides["step"] else f"{sides['smallest']} px"
    lines = [
        f"# {config['name']}",
        f"{config['architecture']}, frozen to a plain CNN and exported by rotopath. {use}",
        f"- In: RGB images (B, 3, H, W) from 0 to 1 at {config['spacing_um_px']} µm/px; stain: {config['stain']}; "
        f"sides of {on_grid}.",
        f"- Out: {config['output']}, to be passed through {config['activation']}, of the classes "
        f"{', '.join(config['class_names'])}.",  # type: ignore[arg-type]
        f"```python\n{load}\n```",
        f"`{WEIGHTS}` holds the same weights; `{runs.PROVENANCE}` says where they come from.",
    ]
    return "\n\n".join(lines) + "\n"


def _is_export(folder: Path) -> bool:
    return (folder / CONFIG).exists() and (folder / runs.PROVENANCE).exists() and (folder / WEIGHTS).exists()


@contextmanager
def _quiet() -> Iterator[None]:
    """Exporters talk of their own future, of packages that nobody asked for, and of strides that are as they should."""
    talkative = logging.getLogger("torch.onnx._internal.exporter._registration")
    level = talkative.level
    talkative.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.simplefilter("ignore", FutureWarning)
            warnings.filterwarnings("ignore", "No complete tensor found in the group", UserWarning)
            yield
    finally:
        talkative.setLevel(level)
