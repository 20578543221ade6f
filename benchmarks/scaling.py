"""How a training step and dense inference of the tumor network grow: with orientations, batches and images.

    .venv/bin/python benchmarks/scaling.py [cuda] [--rounds 9]

Equal weights: channels become fewer as N grows, as in the paper. Equal channels: those of N = 8 at every N. Each is
measured beside a plain CNN as wide as channels times orientations, in turns. All is in bfloat16 on a GPU: whole steps
are replayed as CUDA graphs, inference is by the network as `rotopath predict` runs it; on the CPU, by the frozen one.
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
from rotopath.training import graphs

TUMOR = ARCHITECTURES["tumor"]
COMPARED = ("plain CNN", "rotopath")
ORIENTATIONS = (1, 2, 4, 8, 12, 16)
BATCHES = {"cpu": (2, 4, 16), "cuda": (16, 64, 256, 512, 1024)}
SIDES = {"cpu": (88, 196, 400), "cuda": (256, 500, 1000, 2000, 4000)}
USUAL = {"cpu": (4, 196), "cuda": (512, 1000)}  # batch and side where neither grows


def cases(device: str) -> Iterator[tuple[str, Architecture, int, int, int]]:
    """What grows, a table, N, a batch for the step (0 for none) and a side for inference (0 for none)."""
    batch, side = USUAL[device]
    for n in ORIENTATIONS:
        yield "N, equal weights", TUMOR, n, batch, side
    for n in ORIENTATIONS:
        yield "N, equal channels", replace(TUMOR, published={n: TUMOR.published[8]}), n, batch, side
    for several in BATCHES[device]:
        yield "batch", TUMOR, 8, several, 0
    for large in SIDES[device]:
        yield "image", TUMOR, 8, 0, large


def steps(network: Network, batch: int, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    side = network.architecture.input_px
    images = torch.rand(batch, IMAGE_CHANNELS, side, side, device=device)
    labels = torch.randint(2, (batch,), device=device).float()

    def start(make: Callable[[], nn.Module]) -> Callable[[], object]:
        taken = step.Training(make(), images, labels).step
        return graphs.record_step(taken) if device == "cuda" else taken

    return {name: partial(start, make) for name, make in step.models(network, images).items() if name in COMPARED}


def answers(network: Network, side: int, device: str) -> dict[str, Callable[[], Callable[[], object]]]:
    size = network.nearest_sizes(side)[0]
    dtype = inference.PRECISIONS[device][0]
    image = torch.rand(1, IMAGE_CHANNELS, size, size, device=device)
    image = image.to(dtype, memory_format=torch.channels_last)
    plain = inference.prepared(PlainCNN(network.architecture, network.orientations, norm=False), image)
    # As `rotopath predict` runs it.
    ours = inference.mixed(network, image) if image.is_cuda else inference.prepared(freeze(network), image)
    return {"plain CNN": lambda: lambda: plain(image), "rotopath": lambda: lambda: ours(image)}


def started(make: Callable[[], Callable[[], object]]) -> Callable[[], object]:
    """Called once, so that what does not work, or does not fit into memory, is found before the clock runs."""
    call = make()
    call()
    return call


def compare(makes: dict[str, Callable[[], Callable[[], object]]], device: str, rounds: int) -> dict[str, str]:
    built = {name: build(name, partial(started, make), device) for name, make in makes.items()}
    calls = {name: made[0] for name, made in built.items() if made is not None}
    if len(calls) < len(makes):
        return {}
    times = measure(calls, device, rounds, step.AT_ONCE[device])
    ratio = describe(times["rotopath"], times["plain CNN"])
    return {"rotopath ms": ratio["ms"], "plain ms": describe(times["plain CNN"])["ms"], "ratio": ratio["× plain CNN"]}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device, rows = options.device, []
    for grows, table, n, batch, side in cases(device):
        network = Network(table, n).to(device)
        with torch.no_grad():
            inferred = compare(answers(network, side, device), device, options.rounds) if side else {}
        trained = compare(steps(network, batch, device), device, options.rounds) if batch else {}
        columns = ("rotopath ms", "plain ms", "ratio")
        row: dict[str, object] = {"what grows": grows, "N": n, "widest": n * max(table.channels(n))}
        row |= {"batch": batch or ""} | {f"step, {column}": trained.get(column, "") for column in columns}
        row |= {"side": side or ""} | {f"inference, {column}": inferred.get(column, "") for column in columns}
        rows.append(row)
        print(*row.values(), flush=True)
    record("scaling", rows, device)


if __name__ == "__main__":
    main()
