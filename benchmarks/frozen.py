"""How long a frozen network takes, beside a plain CNN of the same widths and layers, and the network it was made of.

.venv/bin/python benchmarks/frozen.py [cuda] [--orientations 8] [--rounds 15]

The plain CNN does the same work without rotopath: convolutions with a bias, channels last, maxima, and ReLU in place
behind them, as freezing puts it. In every round each of the three answers in turn, in another order every time;
medians over rounds.
"""

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median

import torch
from contenders import PlainCNN
from record import record
from timing import measure
from torch import Tensor

import rotopath as rp
from rotopath.models import ARCHITECTURES, Network
from rotopath.models.protocols import IMAGE_CHANNELS

BUILDERS = {"mitosis": rp.models.mitosis, "nuclei": rp.models.nuclei, "tumor": rp.models.tumor}
IMAGES = {"cpu": ((16, 0), (1, 256)), "cuda": ((256, 0), (4, 1024))}  # batch, and side in pixels; 0 for the smallest
CALLS = {"cpu": 1, "cuda": 10}  # in one measurement


@torch.no_grad()
def compare(network: Network, images: Tensor, rounds: int) -> dict[str, object]:
    plain = PlainCNN(network.architecture, network.orientations, norm=False, relu_last=True).to(images.device).eval()
    models = {"network": network, "frozen": rp.freeze(network), "plain CNN": plain}
    calls: dict[str, Callable[[], object]] = {name: partial(model, images) for name, model in models.items()}
    device = images.device.type
    found = measure(calls, device, rounds, CALLS[device])
    ratio = median(a / b for a, b in zip(found["frozen"], found["plain CNN"], strict=True))
    middle = {f"{name}, ms": f"{median(times):.2f}" for name, times in found.items()}
    return {**middle, "frozen / plain": f"{ratio:.3f}"}


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
