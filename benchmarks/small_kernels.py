"""Measure how faithfully 3 × 3 kernels, and networks made of them, rotate by 45°.

    .venv/bin/python benchmarks/small_kernels.py

Kernels: two layers, a lifting and a group convolution with N = 8, as in benchmarks/fidelity.py, on smooth random
images. "5×5, nine weights" are the nine most exact harmonics of 5 × 5 px, so that a kernel has as many weights as a
3 × 3 kernel. Networks: a small ResNet (16, 32 and 64 channels) converted to N = 8 with single options, and with
`preset="faithful"`, at 45° and 22.5°. Errors are medians over nine draws of the weights (five for networks).
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath.group import kernel_families
from rotopath.metrics import smooth_images, untrained_errors

sys.path.append(str(Path(__file__).parent.parent / "tests" / "models"))
from plain_networks import ResNet18  # type: ignore[import-not-found]

WIDTHS = (16, 32, 64)
CHANNELS = 4
SIZES: dict[str, int] = {"bilinear": 3, "square": 3, "gaussian": 3, "harmonic": 3, "5×5, nine weights": 5, "5×5": 5}
NETWORKS: dict[str, dict[str, Any]] = {
    "bilinear, max, strides kept": {},
    "kernel='gaussian'": {"kernel": "gaussian"},
    "kernel='harmonic'": {"kernel": "harmonic"},
    "projection='mean'": {"projection": "mean"},
    "kernel='harmonic', projection='mean'": {"kernel": "harmonic", "projection": "mean"},
    "kernel='harmonic', projection='mean', strides='pool'": {
        "kernel": "harmonic",
        "projection": "mean",
        "strides": "pool",
    },
    "preset='faithful'": {"preset": "faithful"},
}


@contextmanager
def few_harmonics(weights: int) -> Iterator[None]:
    """Return a context manager in which harmonic kernels have this number of base weights, whatever their size."""
    harmonics, count = kernel_families.circular_harmonics, rp.group.count_taps

    def fewest(size: int) -> tuple[Tensor, Tensor]:
        families: Any = kernel_families
        mask, families.disc_mask = families.disc_mask, lambda _: torch.ones(weights, dtype=torch.bool)
        try:
            return harmonics.__wrapped__(size)
        finally:
            families.disc_mask = mask

    kernel_families.circular_harmonics = fewest  # type: ignore[assignment]
    rp.group.count_taps = lambda *_: weights
    try:
        yield
    finally:
        kernel_families.circular_harmonics, rp.group.count_taps = harmonics, count


def two_layers(size: int, kernel: str, relu: bool) -> nn.Module:
    between = [nn.ReLU()] if relu else []
    return nn.Sequential(
        rp.nn.LiftConv2d(3, CHANNELS, size, 8, padding="same", kernel=kernel),  # type: ignore[arg-type]
        *between,
        rp.nn.GroupConv2d(CHANNELS, CHANNELS, size, 8, padding="same", kernel=kernel),  # type: ignore[arg-type]
    )


def measure_kernels() -> None:
    x = smooth_images(4, 64)
    rows = []
    for name, size in SIZES.items():
        kernel = name if size == 3 else "harmonic"
        few = name == "5×5, nine weights"
        errors = []
        for relu in (False, True):
            if few:
                with few_harmonics(9):
                    errors.append(median(untrained_errors(partial(two_layers, 5, "harmonic", relu), x, 45.0)))
            else:
                errors.append(median(untrained_errors(partial(two_layers, size, kernel, relu), x, 45.0)))
        weights = 9 if few else rp.group.count_taps(size, kernel)
        rows.append(
            {
                "kernel": kernel,
                "size": f"{size}×{size}",
                "weights": weights,
                "two layers": f"{errors[0]:.4f}",
                "with ReLU": f"{errors[1]:.4f}",
            }
        )
    record("small-kernels", rows)


def build(options: dict[str, Any]) -> nn.Module:
    return rp.equivariant(ResNet18(WIDTHS), 8, **options)


def measure_networks() -> None:
    rows = []
    for name, options in NETWORKS.items():
        is_even = options.get("strides") == "pool" or "preset" in options
        x = smooth_images(4, 128 if is_even else 129)
        errors = {angle: median(untrained_errors(partial(build, options), x, angle, 5)) for angle in (45.0, 22.5)}
        rows.append({"options": name, **{f"{angle:g}°": f"{error:.4f}" for angle, error in errors.items()}})
    record("small-kernels-networks", rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    measure_kernels()
    measure_networks()
