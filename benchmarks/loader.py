"""What a training batch costs beside the training step that it feeds: tumor network, N = 8, batch of 64.

.venv/bin/python benchmarks/loader.py [cuda] [--patches 16384] [--data FOLDER]

Patches are noise of PCam's size, in memory or written to HDF5 files as PCam is, unless a PCam folder is given; their
content does not matter to the clock, but for how well they pack.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import h5py
import numpy as np
import torch
from record import record
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

import rotopath as rp
from rotopath.data import Augmentation, Sample, open_data
from rotopath.data.batches import Cache
from rotopath.evaluation import make_sampled_batches
from rotopath.tasks import TUMOR, Frame

FRAME, BATCH = Frame(window_px=88, target_px=12, stride_px=12), 64


def write_noise(folder: Path, patches: int) -> None:
    generator = np.random.default_rng(0)
    for split, count in (("train", patches), ("valid", 2), ("test", 2)):
        name = f"camelyonpatch_level_2_split_{split}"
        with h5py.File(folder / f"{name}_x.h5", "w") as file:
            pixels = generator.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
            file.create_dataset("x", data=pixels, chunks=(1, 96, 96, 3), compression="gzip", compression_opts=1)
        with h5py.File(folder / f"{name}_y.h5", "w") as file:
            file.create_dataset("y", data=(np.arange(count, dtype=np.uint8) % 2).reshape(-1, 1, 1, 1))


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_a_step(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, rounds: int, steps: int) -> float:
    """The median over rounds of the time that a batch takes, started and finished on the device."""
    next(batches)
    durations = []
    for _ in range(rounds):
        wait(device)
        start = time.perf_counter()
        for _ in range(steps):
            next(batches)
        wait(device)
        durations.append((time.perf_counter() - start) / steps)
    return median(durations)


class Training:
    """One network and its optimiser, as the paper trains them."""

    def __init__(self, device: torch.device) -> None:
        self.model = rp.models.tumor(orientations=8).to(device)
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        logits = self.model(images)[:, 0, 0, 0]
        loss = binary_cross_entropy_with_logits(logits, labels.float())
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimiser.step()

    def on(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        for images, labels in batches:
            self.step(images, labels)
            yield images, labels


def forever(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield batch


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--patches", type=int, default=16_384)
    parser.add_argument("--data", type=Path)
    options = parser.parse_args()
    device = torch.device(options.device)
    rounds, steps, workers = (9, 20, 8) if device.type == "cuda" else (3, 2, 2)
    with tempfile.TemporaryDirectory() as folder:
        if options.data is None:
            write_noise(Path(folder), options.patches)
        samples = open_data(options.data or Path(folder), TUMOR.annotated).split("train")
        record("loader", measure(samples, device, rounds, steps, workers), options.device)


def measure(
    samples: tuple[Sample, ...], device: torch.device, rounds: int, steps: int, workers: int
) -> list[dict[str, object]]:
    training = Training(device)
    rows: list[dict[str, object]] = []
    step_s: float | None = None
    caches: list[tuple[Cache, int]]
    caches = [("device", 0), ("memory", 0), ("none", 0), ("none", workers)]
    for cache, at_work in caches:
        batches = make_sampled_batches(
            TUMOR, samples, FRAME, BATCH, seed=0, cache=cache, device=device, augmentation=Augmentation()
        )
        needed = rounds * steps + 1
        if step_s is None:
            first = next(batches.load([0], device))
            step_s = seconds_a_step(training.on(forever(first)), device, rounds, steps)
        load_s = seconds_a_step(batches.load(range(needed), device, at_work), device, rounds, steps)
        both_s = seconds_a_step(training.on(batches.load(range(needed), device, at_work)), device, rounds, steps)
        rows.append(
            {
                "cache": cache,
                "workers": at_work,
                "patches": len(samples),
                "batch ms": f"{1e3 * load_s:.2f}",
                "step ms": f"{1e3 * step_s:.2f}",
                "batch / step": f"{load_s / step_s:.3f}",
                "training with it ms": f"{1e3 * both_s:.2f}",
            }
        )
    return rows


if __name__ == "__main__":
    main()
