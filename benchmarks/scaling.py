"""Measure how a training step and dense inference of the tumor network scale with orientations, batch and image size.

    .venv/bin/python benchmarks/scaling.py [cuda] [--rounds 9]

"Equal weights": networks with about the same number of weights, and so with fewer channels for larger N, as in the
paper. "Equal channels": networks with the channels of N = 8 for every N. Each network is compared with a plain CNN of
the same width, which is channels times orientations. On a GPU, everything runs in bfloat16. Whole steps are replayed as
CUDA graphs, and inference uses the network as `rotopath predict` runs it. On the CPU, inference uses the frozen
network.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import inference
import step
import torch
from contenders import PlainCNN
from record import record
from timing import build, describe, measure
from torch import nn

from rotopath.models import ARCHITECTURES, Architecture, Network
from rotopath.models.freeze import freeze
from rotopath.models.protocols import IMAGE_CHANNELS
from rotopath.nn import graphs

TUMOR = ARCHITECTURES["tumor"]
COMPARED = ("plain CNN", "rotopath")
ORIENTATIONS = (1, 2, 4, 8, 12, 16)
BATCHES = {"cpu": (2, 4, 16), "cuda": (16, 64, 256, 512, 1024)}
SIDES = {"cpu": (88, 196, 400), "cuda": (256, 500, 1000, 2000, 4000)}
DEFAULT = {"cpu": (4, 196), "cuda": (512, 1000)}  # batch size and image side if neither is varied


def cases(device: str) -> Iterator[tuple[str, Architecture, int, int, int]]:
    """Yield the cases to measure.

    Each is a description of what grows, an architecture, N, the batch size of the step (0: measure no step) and the
    image side for inference in px (0: measure no inference).
    """
    batch, side = DEFAULT[device]
    for n in ORIENTATIONS:
        yield "N, equal weights", TUMOR, n, batch, side
    for n in ORIENTATIONS:
        yield "N, equal channels", replace(TUMOR, published={n: TUMOR.published[8]}), n, batch, side
    for batch in BATCHES[device]:
        yield "batch", TUMOR, 8, batch, 0
    for side in SIDES[device]:
        yield "image", TUMOR, 8, 0, side


def make_steps(network: Network, batch: int, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    side = network.architecture.input_px
    images = torch.rand(batch, IMAGE_CHANNELS, side, side, device=device)
    labels = torch.randint(2, (batch,), device=device).float()

    def start(make: Callable[[], nn.Module]) -> Callable[[], object]:
        run = step.Training(make(), images, labels).step
        return graphs.record_step(run) if device == "cuda" else run

    return {name: partial(start, make) for name, make in step.make_models(network, images).items() if name in COMPARED}


def make_predictors(network: Network, side: int, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    size = network.nearest_sizes(side)[0]
    dtype = inference.PRECISIONS[device][0]
    image = torch.rand(1, IMAGE_CHANNELS, size, size, device=device)
    image = image.to(dtype, memory_format=torch.channels_last)
    plain = inference.prepare(PlainCNN(network.architecture, network.orientations, norm=False), image)
    # Like `rotopath predict`: the network itself on a GPU, the frozen network on the CPU.
    rotopath = inference.prepare_mixed(network, image) if image.is_cuda else inference.prepare(freeze(network), image)
    return {"plain CNN": lambda: lambda: plain(image), "rotopath": lambda: lambda: rotopath(image)}


def build_and_call(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Make a function and call it once, so that errors, such as too little memory, occur before the measurement."""
    call = make()
    call()
    return call


def compare(makes: dict[str, Callable[[], Callable[[], object]]], device: str, rounds: int) -> dict[str, str]:
    built = {name: build(name, partial(build_and_call, make), device) for name, make in makes.items()}
    calls = {name: made[0] for name, made in built.items() if made is not None}
    if len(calls) < len(makes):
        return {}
    times = measure(calls, device, rounds, step.REPEATS[device])
    columns = describe(times["rotopath"], times["plain CNN"])
    plain = describe(times["plain CNN"])
    return {"rotopath ms": columns["ms"], "plain ms": plain["ms"], "ratio": columns["× plain CNN"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device, rows = options.device, []
    for grows, architecture, n, batch, side in cases(device):
        network = Network(architecture, n).to(device)
        with torch.no_grad():
            inferred = compare(make_predictors(network, side, device), device, options.rounds) if side else {}
        trained = compare(make_steps(network, batch, device), device, options.rounds) if batch else {}
        columns = ("rotopath ms", "plain ms", "ratio")
        row: dict[str, object] = {"what grows": grows, "N": n, "widest": n * max(architecture.channels(n))}
        row |= {"batch": batch or ""} | {f"step, {column}": trained.get(column, "") for column in columns}
        row |= {"side": side or ""} | {f"inference, {column}": inferred.get(column, "") for column in columns}
        rows.append(row)
        print(*row.values(), flush=True)
    record("scaling", rows, device)


if __name__ == "__main__":
    main()
