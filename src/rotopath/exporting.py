"""A trained network for other software: a folder with a plain model, what it expects, and where it comes from.

In: a run. Out: a folder with the frozen network as TorchScript (for WSInfer and QuPath), ONNX or a program of
`torch.export`. A model is in its place only once it was read back and gave the network's own answers.
"""

import dataclasses
import json
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor, nn

from rotopath import runs
from rotopath.data import MODEL_SPACING_UM_PX, Task
from rotopath.data.batches import reader_of
from rotopath.data.nuclei import CLASSES
from rotopath.models import Network, freeze
from rotopath.models.architecture import IMAGE_CHANNELS
from rotopath.pretrained import CARD
from rotopath.runs import Run, RunError
from rotopath.writing import replaced_folder

CONFIG, README, WEIGHTS = "config.json", "README.md", "model.safetensors"
MODELS = {"torchscript": "torchscript_model.pt", "onnx": "model.onnx", "torch": "model.pt2"}
FOUND: Mapping[Task, str] = {"mitosis": "Mitosis", "tumor": "Tumor"}  # the class of the one logit; QuPath shows it
TOLERANCE = 1e-4
CHECKED = ((1, 0, 0), (3, 1, 2), (2, 2, 0))  # batch, and steps of the grid by which height and width are larger

Answer = Callable[[Tensor], Tensor]


class PatchClassifier(nn.Module):
    """Logits (B, 2) of anything else and of what a network finds; their softmax has the network's probability.

    A patch as large as the receptive field has one logit z, and sigmoid(z) is what softmax says of (0, z). In a larger
    patch, z is the mean over its windows.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        logit = self.network(x).mean(dim=(2, 3))  # (B, 1)
        return torch.cat([torch.zeros_like(logit), logit], dim=1)


def export(folder: Path, to: str, out: Path | None = None) -> Path:
    """Write the network of a finished run as torchscript, onnx or torch; gives the folder, which is new or complete."""
    if to not in MODELS:
        raise RunError(f"There is no format {to!r} to export to; choose from {', '.join(MODELS)}.")
    if to == "onnx":
        import onnxruntime  # noqa: F401  # with what writes it, onnx and onnxscript: named here if missing, before work
        import onnxscript  # noqa: F401
    run = runs.load(folder)
    place = out or run.out / f"export-{to}"
    if place.exists() and not (place.is_dir() and (_is_export(place) or not any(place.iterdir()))):
        raise RunError(f"{place} exists and is no export of rotopath; choose another folder with --out.")
    model = _make_model(run.network, to)
    with replaced_folder(place) as unfinished:
        with _quiet():
            answer = WRITERS[to](model, run.network, unfinished / MODELS[to])
            check_answers(answer, _make_model(run.network, to, frozen=False), run.network)
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        (unfinished / WEIGHTS).write_bytes(save(tensors))
        config = describe_model(run, to)
        runs.write_json(unfinished / CONFIG, config)
        runs.write_json(unfinished / runs.PROVENANCE, _describe_origin(run, to))
        runs.write_text(unfinished / README, _explain(config, to))
        if (run.folder / CARD).exists():  # terms go with the weights
            shutil.copy(run.folder / CARD, unfinished / CARD)
    return place


def describe_model(run: Run, to: str) -> dict[str, object]:
    """What a program has to know to run the model, by the configuration of WSInfer's model zoo.

    Only a classifier of patches carries `spec_version`: without it WSInfer refuses a model that gives maps.
    """
    network, task = run.network, run.recipe.task
    table, patches = network.architecture, _is_classifier(network, to)
    maps = tuple(CLASSES) if task == "nuclei" else (FOUND[task],)
    class_names = ("Other", FOUND[task]) if patches else maps
    resize = {"name": "Resize", "arguments": {"size": table.input_px}}
    return ({"spec_version": "1.0"} if patches else {}) | {
        "name": run.folder.resolve().name,
        "architecture": f"rotopath-{table.name}-N{network.orientations}{'-reflections' * table.reflections}",
        "num_classes": len(class_names),
        "class_names": class_names,
        "patch_size_pixels": table.input_px,
        "spacing_um_px": MODEL_SPACING_UM_PX[task],
        "transform": [resize, {"name": "ToTensor"}],
        "output": "logits (B, 2) of a patch" if patches else f"logits (B, {table.outputs}, H', W') of a map",
        "activation": "softmax" if len(class_names) > 1 else "sigmoid",
        "stain": "macenko" if reader_of(task).normalise_stain else "as it is",
        "image_sides_px": {"smallest": table.receptive_field, "step": table.size_step},
        "stride_px": table.stride,
        "operating_point": run.point,
    }


def check_answers(answer: Answer, expected: Answer, network: Network) -> None:
    """See that a model gives the network's answers, in batches and images of several sizes."""
    generator = torch.Generator().manual_seed(0)
    field, step = network.receptive_field, network.architecture.size_step
    for batch, more_rows, more_columns in CHECKED:
        size = (batch, IMAGE_CHANNELS, field + more_rows * step, field + more_columns * step)
        images = torch.randint(0, 256, size, generator=generator).float() / 255
        with torch.no_grad():
            given, wanted = answer(images), expected(images)
        if given.shape != wanted.shape or not torch.allclose(given, wanted, rtol=TOLERANCE, atol=TOLERANCE):
            raise RunError(
                f"The exported model does not give the network's answers to images of {size}, so nothing was written; "
                f"please report this, with the versions of torch and onnxruntime."
            )


def _make_model(network: Network, to: str, frozen: bool = True) -> nn.Module:
    layers = freeze(network) if frozen else network
    return (PatchClassifier(layers) if _is_classifier(network, to) else layers).eval()


def _is_classifier(network: Network, to: str) -> bool:
    """WSInfer and QuPath, which read TorchScript, know classifiers of patches only; others can use the whole map."""
    return to == "torchscript" and network.architecture.outputs == 1


def _write_torchscript(model: nn.Module, _network: Network, path: Path) -> Answer:
    torch.jit.script(model).save(str(path))  # type: ignore[no-untyped-call]
    answer: Answer = torch.jit.load(str(path))  # type: ignore[no-untyped-call]
    return answer


def _write_onnx(model: nn.Module, network: Network, path: Path) -> Answer:
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


def _write_torch(model: nn.Module, network: Network, path: Path) -> Answer:
    example, shapes = _example(network)
    torch.export.save(torch.export.export(model, (example,), dynamic_shapes=(shapes,)), path)
    # A guard on strides, of every exported convolution, refuses maps of a single pixel, which are as good as others.
    answer: Answer = torch.export.load(path).module(check_guards=False)
    return answer


WRITERS: Mapping[str, Callable[[nn.Module, Network, Path], Answer]] = {
    "torchscript": _write_torchscript,
    "onnx": _write_onnx,
    "torch": _write_torch,
}


def _example(network: Network) -> tuple[Tensor, dict[int, torch.export.Dim]]:
    """Images to follow, and what may be otherwise in others: the batch, and sides on the pooling grid."""
    step, field = network.architecture.size_step, network.receptive_field
    height, width = (torch.export.Dim(name, min=field // step) for name in ("rows", "columns"))
    shapes = {0: torch.export.Dim("batch", min=1), 2: step * height + field % step, 3: step * width + field % step}
    return torch.zeros(2, IMAGE_CHANNELS, field + step, field + 2 * step), shapes


def _describe_origin(run: Run, to: str) -> dict[str, object]:
    trained = run.folder / runs.PROVENANCE
    return {
        "exported": runs.now(),
        "format": to,
        **runs.describe_software((*runs.PACKAGES, "onnx", "onnxruntime", "onnxscript")),
        "run": run.name,
        "recipe": dataclasses.asdict(run.recipe),
        "operating_point": run.point,
        "trained": json.loads(trained.read_text(encoding="utf-8")) if trained.exists() else None,
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
    lines = [
        f"# {config['name']}",
        f"{config['architecture']}, frozen to a plain CNN and exported by rotopath. {use}",
        f"- In: RGB images (B, 3, H, W) from 0 to 1 at {config['spacing_um_px']} µm/px; stain: {config['stain']}; "
        f"sides of {sides['smallest']} + {sides['step']}·k px.",
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
