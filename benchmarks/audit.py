"""Audit a pretrained model, a plain CNN, and files of the plain CNN, and compare with `rotopath evaluate --robustness`.

.venv/bin/python benchmarks/audit.py PCAM [--count 96] [--run FOLDER]

PCAM is the folder of PCam, or of a part of it. The plain CNN is the tumor network with one orientation, with as many
weights as the pretrained one, trained for a few minutes; FOLDER is such a run, which is trained if it does not exist.
It is audited as a run, as TorchScript, as ONNX exported by torch.onnx from a plain torch module, and as ONNX written
node by node with onnx.helper. The first `--count` test patches are used.

A second table checks the definition of the effect of interpolation, with a model that is invariant by construction and
notices interpolation: the energy of the pixels in a disc. All of its deviation at the fair angles is an effect of
interpolation, and the table lists which fraction the audit finds.
"""

import argparse
import tempfile
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.evaluation import predict_rotated_inputs, summarize_rotation
from rotopath.group.rotation import SPLINE_REACH
from rotopath.inference.dense import prepare_export

RECIPE = {"task": "tumor", "orientations": 1, "epochs": 4, "steps": 250, "learning_rate": 0.03, "schedule": "cosine"}
CPU = torch.device("cpu")
CASES = ((24, 0.0), (24, 0.5), (24, 0.8), (88, 0.0), (88, 0.5), (88, 0.8))  # window in px, blur of the images in px
IMAGES = 32


def make_plain(run: rp.runs.Run) -> nn.Sequential:
    """Return the network of a run with N=1 as a module of torch's own layers."""
    frozen = rp.freeze(cast(nn.Module, run.network))
    inner = cast(nn.Sequential, frozen.layers)
    layers = [layer for layer in inner if type(layer).__module__.startswith("torch.nn")]
    plain = nn.Sequential(*layers).eval()
    images = torch.rand(2, 3, 88, 88)
    with torch.no_grad():
        difference = float((plain(images) - run.network(images)).abs().max())
    if difference > 1e-4:
        raise SystemExit(f"The plain module computes other logits, which differ by {difference:.2g}.")
    return plain


def write_by_torch(plain: nn.Module, path: Path) -> None:
    with prepare_export():
        program = torch.onnx.export(plain, (torch.zeros(2, 3, 88, 88),), dynamo=True, verbose=False)
    assert program is not None
    program.save(str(path))


def write_by_helper(plain: nn.Sequential, path: Path) -> None:
    """Write a sequence of convolutions, ReLU and max pools as ONNX, one node for each."""
    nodes, weights, last = [], [], "image"
    for i, layer in enumerate(plain):
        name = f"x{i}"
        if isinstance(layer, nn.Conv2d):
            inputs = [last]
            for key, value in layer.state_dict().items():
                weights.append(numpy_helper.from_array(value.contiguous().numpy(), f"{key}{i}"))
                inputs.append(f"{key}{i}")
            nodes.append(helper.make_node("Conv", inputs, [name], strides=list(layer.stride)))
        elif isinstance(layer, nn.MaxPool2d):
            side = [int(layer.kernel_size)] * 2  # type: ignore[arg-type]
            nodes.append(helper.make_node("MaxPool", [last], [name], kernel_shape=side, strides=side))
        elif isinstance(layer, nn.ReLU):
            nodes.append(helper.make_node("Relu", [last], [name]))
        else:
            raise SystemExit(f"There is no node for {type(layer).__name__}.")
        last = name
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, ["batch", 3, 88, 88])
    output = helper.make_tensor_value_info(last, TensorProto.FLOAT, ["batch", 1, 1, 1])
    graph = helper.make_graph(nodes, "plain", [image], [output], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.checker.check_model(model, full_check=True)
    path.write_bytes(model.SerializeToString())


def audit_files(data: Path, folder: Path, count: int) -> list[dict[str, object]]:
    """Audit all models, and return a row for each, with the figures of an evaluation of the same weights."""
    samples = rp.data.open_data(data).split("test")
    names = {"pretrained": "tumor-pcam-n8", "plain": str(folder)}
    loaded = {key: rp.load(name) for key, name in names.items()}
    expected = {}
    for key, run in loaded.items():
        summary = summarize_rotation(predict_rotated_inputs(run, samples, CPU, count))
        expected[key] = summary["fair"]
        print(key, summary["fair"], flush=True)
    rows: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary)
        plain = make_plain(loaded["plain"])
        write_by_torch(plain, root / "torch.onnx")
        write_by_helper(plain, root / "helper.onnx")
        exported = {key: rp.export(run, "torchscript", root / key) for key, run in loaded.items()}
        threshold = loaded["plain"].point["threshold"]
        of_files = {"threshold": threshold, "model_spacing_um_px": 1.0, "window_px": 88}
        for title, key, model, options in (
            ("tumor-pcam-n8, run", "pretrained", names["pretrained"], {}),
            ("tumor-pcam-n8, TorchScript", "pretrained", exported["pretrained"], {"trust": True}),
            ("plain CNN, run", "plain", names["plain"], {}),
            ("plain CNN, TorchScript", "plain", exported["plain"], {"trust": True}),
            ("plain CNN, ONNX by torch.onnx", "plain", root / "torch.onnx", of_files),
            ("plain CNN, ONNX by onnx.helper", "plain", root / "helper.onnx", of_files),
            ("average of the plain CNN over 4", "plain", rp.symmetrize(plain, 4, "probabilities"), of_files),
        ):
            figures = rp.audit(model, data, count=count, **options).figures["decisions"]
            same: dict[str, float] = expected[key] if "average" not in title else {}  # type: ignore[assignment]
            row: dict[str, object] = {"model": title}
            row["evaluate: changed"] = f"{same['changed']:.4f}" if same else ""
            row["audit: changed"] = f"{figures['fair']['changed']:.4f}"
            row["evaluate: deviation"] = f"{same['deviation']:.5f}" if same else ""
            row["audit: deviation"] = f"{figures['fair']['deviation']:.5f}"
            row["90°: changed"] = f"{figures['grid']['changed']:.4f}"
            row["90°: deviation"] = f"{figures['grid']['deviation']:.1e}"
            row["interpolation"] = f"{figures['resampling']['fraction']:.3f}"
            row["beyond: changed"] = f"{figures['beyond']['changed']:.4f}"
            rows.append(row)
            print(row, flush=True)
    return rows


def check_interpolation() -> list[dict[str, object]]:
    """Audit a model that is invariant by construction on images of different sharpness."""
    rows: list[dict[str, object]] = []
    for window_px, blur_px in CASES:
        disc = group.inscribed_disc(window_px, window_px, inner=0.7).float()

        def energy(images: Tensor, disc: Tensor = disc) -> Tensor:
            return ((images - 0.5).square().mean(dim=1) * disc).sum(dim=(1, 2))[:, None] / disc.sum()

        side = group.covering_size(window_px) + 2 * SPLINE_REACH
        generator = torch.Generator().manual_seed(0)
        noise = torch.randn(IMAGES, 3, side, side, generator=generator)
        smooth = rp.metrics.smooth_images(IMAGES, side, blur_px=blur_px) if blur_px else noise
        images = (smooth * 40 + 128).clamp(0, 255).byte().permute(0, 2, 3, 1).numpy()
        figures = rp.audit(energy, np.ascontiguousarray(images), window_px=window_px, activation="none").figures
        decisions = figures["decisions"]
        row: dict[str, object] = {"window": f"{window_px} px", "blur": f"{blur_px:g} px"}
        for title, key in (("90°", "grid"), ("plain angles", "plain"), ("fair angles", "fair")):
            row[title] = f"{decisions[key]['deviation']:.1e}"
        row["found"] = f"{decisions['resampling']['fraction']:.2f}"
        row["left"] = f"{decisions['beyond']['deviation']:.1e}"
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("--count", type=int, default=96)
    parser.add_argument("--run", type=Path, default=Path("runs/audit-plain"))
    options = parser.parse_args()
    record("audit-interpolation", check_interpolation(), "cpu")
    if not (options.run / "weights.safetensors").exists():
        rp.train({**RECIPE, "data": str(options.data), "keep": "last", "accelerator": "cpu"}, options.run)
    record("audit", audit_files(options.data, options.run, options.count), "cpu")


if __name__ == "__main__":
    main()
