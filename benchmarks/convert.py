"""Convert CNNs of timm and torchvision, and check that each is exact, can be frozen, exported to ONNX and copied.

    python3 -m venv /tmp/cnns && /tmp/cnns/bin/pip install torch==2.13.0 numpy scipy scikit-image tifffile pillow \
        safetensors pyyaml huggingface_hub typer rich onnx onnxscript onnxruntime
    /tmp/cnns/bin/pip install --no-deps timm==1.0.31
    /tmp/cnns/bin/pip download --no-deps torchvision==0.29.2 -d /tmp/cnns && (cd /tmp/cnns && unzip -q torchvision*.whl)
    PYTHONPATH=src /tmp/cnns/bin/python benchmarks/convert.py /tmp/cnns [NAME ...]

The models of torchvision are read from the files of its wheel, without its compiled operations, which they do not need.
Weights are random, and batch norms have the statistics of random images. Networks have N = 4, computed in float64 where
nothing else is said:

- error 90°: `rp.equivariance_error` of the converted network (`keep="maps"`), and of the plain network.
- frozen, ONNX: largest difference of outputs of `rp.freeze(net)`, and of its ONNX file (float32), relative to the
  largest output.
- copied: largest difference between `weights="copy"` and the mean of the plain network over four rotations, relative.

Networks above 40 million weights are not copied here, because N = 4 multiplies their memory by 16.
"""

import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import torch
from record import read_recorded, record
from torch import Tensor, nn

import rotopath as rp
from rotopath.models.convert import nearest_sizes

CLASSES = 10
SIDE_PX = 96  # about the side of images; inception_v3 needs more than 75
COPIED_WEIGHTS = 40_000_000
TIMM: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnet50d": {},
    "resnetblur50": {},  # anti-aliased
    "resnext50_32x4d": {},
    "seresnet50": {},
    "resnet18 with CBAM": {"model_name": "resnet18", "block_args": {"attn_layer": "cbam"}},
    "skresnet18": {},
    "resnest14d": {},
    "res2net50_26w_4s": {},
    "nf_resnet50": {},  # weight standardization
    "densenet121": {},
    "vgg11_bn": {},
    "mobilenetv2_100": {},
    "mobilenetv3_large_100": {},
    "mnasnet_100": {},
    "efficientnet_b0": {},
    "tf_efficientnet_b0": {},  # padding of TensorFlow
    "ghostnet_100": {},
    "regnety_004": {},
    "convnext_atto": {},
    "darknet53": {},
    "dla34": {},
    "hrnet_w18_small": {},
    "inception_v3": {},
    "xception41": {},
}
TORCHVISION: dict[str, dict[str, Any]] = {
    "resnet18": {},
    "resnext50_32x4d": {},
    "wide_resnet50_2": {},
    "densenet121": {},
    "vgg11_bn": {},
    "alexnet": {},
    "mobilenet_v2": {},
    "mobilenet_v3_large": {},
    "efficientnet_b0": {},
    "efficientnet_v2_s": {},
    "regnet_y_400mf": {},
    "convnext_tiny": {},
    "mnasnet0_5": {},
    "squeezenet1_1": {},
    "shufflenet_v2_x0_5": {},
    "googlenet": {"init_weights": False, "aux_logits": False},
    "inception_v3": {"init_weights": False, "aux_logits": False},
    "deeplabv3_resnet50": {"weights_backbone": None},  # dilated
    "resnet18 with a feature pyramid": {},
}
ATTENTION = {"timm": ("vit_tiny_patch16_224", "swin_tiny_patch4_window7_224"), "torchvision": ("vit_b_16", "maxvit_t")}


def main() -> None:
    add_torchvision(Path(sys.argv[1]))
    names = sys.argv[2:]
    rows = {(row["library"], row["network"]): row for row in read_recorded("convert") if names}  # of other networks
    lists = {"timm": (*TIMM, *ATTENTION["timm"]), "torchvision": (*TORCHVISION, *ATTENTION["torchvision"])}
    for library, networks in lists.items():
        for name in networks:
            if names and name not in names:
                continue
            torch.manual_seed(0)
            rows[library, name] = {"library": library, "network": name, **measure(build(library, name))}
            order = [(library, name) for library, networks in lists.items() for name in networks]
            record("convert", [rows[key] for key in order if key in rows])


def measure(plain: nn.Module) -> dict[str, object]:
    """Return what converting a network gives, as a row of the table."""
    names = ("weights", "strides", "px", "error 90°", "plain error 90°", "frozen", "ONNX", "copied", "message")
    row: dict[str, object] = dict.fromkeys(names, "")
    weights = sum(p.numel() for p in plain.parameters())
    row["weights"] = weights
    image = torch.rand(1, 3, SIDE_PX, SIDE_PX, dtype=torch.float64)
    try:
        for strides in ("keep", "pool"):
            net = rp.equivariant(plain, 4, keep="maps", strides=strides)
            if sizes := nearest_sizes(net, image, SIDE_PX):
                break  # with "keep", resizing by nearest neighbors in feature pyramids accepts no size
    except ValueError as error:
        return row | {"message": str(error)}
    if not sizes:
        return row | {"message": "no size of images fits its strides"}
    row |= {"strides": strides, "px": sizes[-1]}
    calibrate(net, sizes[-1])
    x = torch.rand(2, 3, sizes[-1], sizes[-1], dtype=torch.float64)
    row["error 90°"] = f"{rp.equivariance_error(of_tensor(net), x):.1e}"
    row["plain error 90°"] = f"{rp.equivariance_error(of_tensor(plain), x):.1e}"
    frozen = rp.freeze(net)
    with torch.no_grad():
        expected = of_tensor(net)(x)
        row["frozen"] = f"{difference(of_tensor(frozen)(x), expected):.1e}"
        row["ONNX"] = f"{difference(run_onnx(frozen.float(), x.float()), expected):.1e}"
    del net, frozen
    if weights > COPIED_WEIGHTS:
        return row
    try:
        net = rp.equivariant(plain, 4, weights="copy")
        sizes = nearest_sizes(net, image, SIDE_PX)
        if not sizes:
            return row | {"copied": "", "message": "copied: no size of images fits its strides"}
        x = torch.rand(1, 3, sizes[-1], sizes[-1], dtype=torch.float64)
        with torch.no_grad():
            row["copied"] = f"{difference(of_tensor(net)(x), mean_over_rotations(of_tensor(plain), x)):.1e}"
    except ValueError as error:
        row["message"] = f"copied: {error}"
    return row


def mean_over_rotations(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    outputs = [model(x.rot90(i, (2, 3))) for i in range(4)]
    aligned = [y.rot90(-i, (2, 3)) if y.ndim == 4 else y for i, y in enumerate(outputs)]
    return torch.stack(aligned).mean(dim=0)


def of_tensor(model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the model as a function with a single output: the first of several (the finest map of a pyramid)."""

    def first(x: Tensor) -> Tensor:
        output = model(x)
        while not isinstance(output, Tensor):
            output = next(iter(output.values() if isinstance(output, dict) else output))
        return output

    return first


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.double() - expected.double()).abs().max() / expected.abs().max())


def run_onnx(frozen: nn.Module, x: Tensor) -> Tensor:
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        path = Path(folder) / "net.onnx"
        torch.onnx.export(frozen.eval(), (x,), path, dynamo=True, verbose=False)
        session = onnxruntime.InferenceSession(path)
        outputs = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(outputs[0])


def build(library: str, name: str) -> nn.Module:
    """Return a network in evaluation mode, in float64, with random statistics of batch norms."""
    if library == "timm":
        import timm  # type: ignore[import-not-found]

        options = {"model_name": name, "num_classes": CLASSES, **TIMM.get(name, {})}
        net: nn.Module = timm.create_model(**options)
    elif name == "resnet18 with a feature pyramid":
        from torchvision.models.detection.backbone_utils import resnet_fpn_backbone  # type: ignore[import-not-found]

        net = resnet_fpn_backbone(backbone_name="resnet18", weights=None, norm_layer=nn.BatchNorm2d)
    else:
        from torchvision.models import get_model  # type: ignore[import-not-found]

        net = get_model(name, weights=None, num_classes=CLASSES, **TORCHVISION.get(name, {}))
    return calibrate(net.double(), 224 if "vgg" in name or name in ATTENTION[library] else 128)


def calibrate(net: nn.Module, side_px: int) -> nn.Module:
    """Set the statistics of batch norms to those of random images, so that outputs depend on the image."""
    norms = [m for m in net.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm3d)]
    momentums = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        net.train()(torch.rand(4, 3, side_px, side_px, dtype=torch.float64))
    for norm, momentum in zip(norms, momentums, strict=True):
        norm.momentum = momentum
    return net.eval()


def add_torchvision(folder: Path) -> None:
    """Make the Python files of torchvision in a folder importable, without its compiled operations."""
    package = types.ModuleType("torchvision")
    package.__path__ = [str(folder / "torchvision")]
    package.__spec__ = ModuleSpec("torchvision", None, is_package=True)
    sys.modules["torchvision"] = package


if __name__ == "__main__":
    main()
