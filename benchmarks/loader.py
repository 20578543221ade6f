"""Compare the time to load a training batch with the time of a training step: tumor network, N = 8, batches of 64.

.venv/bin/python benchmarks/loader.py [cuda] [--patches 16384] [--data FOLDER]

`--data` is a folder with PCam. Without it, the patches are noise, with the size of PCam's patches and in the same file
format. The content of a patch affects the time only by how well it compresses.
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
from rotopath.tasks import TUMOR, TrainingWindow

WINDOW, BATCH = TrainingWindow(window_px=88, target_px=12, stride_px=12), 64


def write_noise(folder: Path, patches: int) -> None:
    """Write a dataset in the format of PCam, with random pixels."""
    generator = np.random.default_rng(0)
    for split, count in (("train", patches), ("valid", 2), ("test", 2)):
        name = f"camelyonpatch_level_2_split_{split}"
        with h5py.File(folder / f"{name}_x.h5", "w") as file:
            pixels = generator.integers(0, 256, (count, 96, 96, 3), dtype=np.uint8)
            file.create_dataset("x", data=pixels, chunks=(1, 96, 96, 3), compression="gzip", compression_opts=1)
        with h5py.File(folder / f"{name}_y.h5", "w") as file:
            file.create_dataset("y", data=(np.arange(count, dtype=np.uint8) % 2).reshape(-1, 1, 1, 1))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_step(batches: Iterator[tuple[Tensor, Tensor]], device: torch.device, rounds: int, steps: int) -> float:
    """Return the time per batch in seconds, including all work on the device: the median over rounds."""
    next(batches)
    durations = []
    for _ in range(rounds):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(steps):
            next(batches)
        synchronize(device)
        durations.append((time.perf_counter() - start) / steps)
    return median(durations)


class Training:
    """A network and its optimizer, as in the paper."""

    def __init__(self, device: torch.device) -> None:
        self.model = rp.models.tumor(orientations=8).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def step(self, images: Tensor, labels: Tensor) -> None:
        logits = self.model(images)[:, 0, 0, 0]
        loss = binary_cross_entropy_with_logits(logits, labels.float())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()

    def train_on(self, batches: Iterator[tuple[Tensor, Tensor]]) -> Iterator[tuple[Tensor, Tensor]]:
        """Train one step on each batch, then yield the batch."""
        for images, labels in batches:
            self.step(images, labels)
            yield images, labels


def repeat_forever(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
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
    for cache, worker_count in caches:
        batches = make_sampled_batches(
            TUMOR, samples, WINDOW, BATCH, seed=0, cache=cache, device=device, augmentation=Augmentation()
        )
        needed = rounds * steps + 1
        if step_s is None:
            first = next(batches.load([0], device))
            step_s = seconds_per_step(training.train_on(repeat_forever(first)), device, rounds, steps)
        load_s = seconds_per_step(batches.load(range(needed), device, worker_count), device, rounds, steps)
        both_s = seconds_per_step(
            training.train_on(batches.load(range(needed), device, worker_count)), device, rounds, steps
        )
        rows.append(
            {
                "cache": cache,
                "workers": worker_count,
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
