"""How long a frozen network takes, beside a plain CNN of the same widths and layers, and the network it was made of.

.venv/bin/python benchmarks/frozen.py [cuda] [--orientations 8] [--rounds 15]

The plain CNN is what one would write without rotopath: convolutions with a bias, ReLU in place, max pooling, channels
last. In every round each of the three answers in turn, in another order every time; medians over rounds.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath.models import ARCHITECTURES, Architecture, Network
from rotopath.models.architecture import IMAGE_CHANNELS, UP

BUILDERS = {"mitosis": rp.models.mitosis, "nuclei": rp.models.nuclei, "tumor": rp.models.tumor}
IMAGES = {"cpu": ((16, 0), (1, 256)), "cuda": ((256, 0), (4, 1024))}  # batch, and side in pixels; 0 for the smallest
CALLS = {"cpu": 1, "cuda": 10}  # in one measurement


class PlainCNN(nn.Module):
    """The stages of a table with ordinary convolutions, as wide as the channels and orientations of a network."""

    def __init__(self, architecture: Architecture, orientations: int) -> None:
        super().__init__()
        self.table = architecture
        channels = architecture.channels(orientations)
        wide = tuple(c * orientations for c in channels)
        self.convs = nn.ModuleList(
            nn.Conv2d(IMAGE_CHANNELS if i == 0 else architecture.in_channels(i, wide), wide[i], stage.kernel)
            for i, stage in enumerate(architecture.stages)
        )
        self.pools = nn.ModuleList(nn.MaxPool2d(s.pool) if s.pool > 1 else nn.Identity() for s in architecture.stages)
        self.relu = nn.ReLU(inplace=True)
        self.up = nn.Upsample(scale_factor=UP)
        self.head = nn.Conv2d(wide[-1], architecture.outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        before_pools: list[Tensor] = []
        for stage, conv, pool in zip(self.table.stages, self.convs, self.pools, strict=True):
            if stage.skip is not None:
                x = self.up(x)
                skip = before_pools[stage.skip]
                margin = (skip.shape[-1] - x.shape[-1]) // 2
                x = torch.cat([x, skip[..., margin:-margin, margin:-margin]], dim=1)
            x = self.relu(conv(x))
            before_pools.append(x)
            x = pool(x)
        logits: Tensor = self.head(x)
        return logits


@torch.no_grad()
def measure(answer: Callable[[Tensor], Tensor], images: Tensor) -> float:
    """Milliseconds a call."""
    calls = CALLS[images.device.type]
    if images.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        answer(images)
    if images.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1000


def compare(network: Network, images: Tensor, rounds: int) -> dict[str, object]:
    plain = PlainCNN(network.architecture, network.orientations).to(images.device).eval()
    models = {
        "network": network,
        "frozen": rp.freeze(network),
        "plain CNN": plain.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    }
    for model in models.values():
        measure(model, images)
    found: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for _ in range(rounds):
        for name in names:
            found[name].append(measure(models[name], images))
        names = [*names[1:], names[0]]
    middle = {name: median(times) for name, times in found.items()}
    ratio = median(a / b for a, b in zip(found["frozen"], found["plain CNN"], strict=True))
    return {**{f"{name}, ms": f"{value:.2f}" for name, value in middle.items()}, "frozen / plain": f"{ratio:.3f}"}


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
