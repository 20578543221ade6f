"""Compare the speed of a frozen network, a plain CNN of the same width, and the network before freezing.

.venv/bin/python benchmarks/frozen.py [cuda] [--orientations 8] [--rounds 15]

The plain CNN does the same work as the frozen network, without rotopath: channels-last convolutions with a bias, max
pools, and ReLU after each pool, as in a frozen network. On the CPU, the frozen network is also measured in ONNX
Runtime, if this is installed (`rotopath predict --backend onnxruntime`). In every round, all run in random order. The
table has medians over rounds.
"""

import argparse
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median

import torch
from contenders import PlainCNN
from record import record
from timing import measure
from torch import Tensor

import rotopath as rp
from rotopath.inference.dense import prepare
from rotopath.models import ARCHITECTURES, Network
from rotopath.models.protocols import IMAGE_CHANNELS

BUILDERS = {"mitosis": rp.models.mitosis, "nuclei": rp.models.nuclei, "tumor": rp.models.tumor}
# Batch size, and side in px (0: the smallest)
IMAGES = {"cpu": ((16, 0), (1, 256), (1, 1024)), "cuda": ((256, 0), (4, 1024))}
CALLS = {"cpu": 1, "cuda": 10}  # calls per measurement


@torch.no_grad()
def compare(network: Network, images: Tensor, rounds: int) -> dict[str, object]:
    plain = PlainCNN(network.architecture, network.orientations, norm=False, relu_last=True).to(images.device).eval()
    models = {"network": network, "frozen": rp.freeze(network), "plain CNN": plain}
    calls: dict[str, Callable[[], object]] = {name: partial(model, images) for name, model in models.items()}
    device = images.device.type
    if device == "cpu" and find_spec("onnxruntime") and find_spec("onnxscript"):
        calls["ONNX Runtime"] = partial(prepare(network, images.device, backend="onnxruntime"), images)
    times = measure(calls, device, rounds, CALLS[device])
    ratio = median(a / b for a, b in zip(times["frozen"], times["plain CNN"], strict=True))
    medians = {f"{name}, ms": f"{median(values):.2f}" for name, values in times.items()}
    return {**medians, "frozen / plain": f"{ratio:.3f}"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    rows = []
    for name, architecture in ARCHITECTURES.items():
        network = BUILDERS[name](options.orientations).to(options.device).eval()
        for batch, side in IMAGES[options.device]:
            size = network.nearest_sizes(side)[-1]
            images = torch.rand(batch, IMAGE_CHANNELS, size, size, device=options.device)
            widths = max(c * options.orientations for c in architecture.channels(options.orientations))
            about = {"network": name, "N": options.orientations, "widest": widths, "images": f"{batch} × {size} px"}
            rows.append(about | compare(network, images, options.rounds))
    record("frozen", rows, options.device)


if __name__ == "__main__":
    main()
