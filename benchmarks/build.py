"""Measure the time to construct layers and networks, and the tumor network (N = 8) with other libraries.

.venv/bin/python benchmarks/build.py
"""

import time
from collections.abc import Callable
from functools import partial
from statistics import median

from contenders import PlainCNN, peers, straightforward
from record import record

import rotopath as rp
from rotopath.group.kernel_families import circular_harmonics, image_covariance
from rotopath.models import ARCHITECTURES


def seconds(build: Callable[[], object], times: int = 9) -> float:
    """Return the median time of `times` calls, in seconds, after one call to warm up."""
    build()
    durations = []
    for _ in range(times):
        start = time.perf_counter()
        build()
        durations.append(time.perf_counter() - start)
    return median(durations)


def twelve_networks() -> list[rp.models.Network]:
    return [
        network(orientations)
        for network in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor)
        for orientations in (1, 4, 8, 16)
    ]


def compute_harmonics() -> None:
    """Compute the harmonic functions of 5×5 px, which the first layer of this size computes and later ones reuse."""
    circular_harmonics.cache_clear()
    image_covariance.cache_clear()
    circular_harmonics(5)


def main() -> None:
    builds: dict[str, Callable[[], object]] = {
        "LiftConv2d(3, 64, 5, 8)": lambda: rp.nn.LiftConv2d(3, 64, 5, 8),
        "GroupConv2d(64, 64, 5, 8)": lambda: rp.nn.GroupConv2d(64, 64, 5, 8),
        "GroupConv2d(64, 64, 9, 16)": lambda: rp.nn.GroupConv2d(64, 64, 9, 16),
        "harmonic functions of 5×5 px": compute_harmonics,
        "all twelve networks": twelve_networks,
    }
    record("build", [{"what": name, "seconds": f"{seconds(build):.4f}"} for name, build in builds.items()])
    tumor = ARCHITECTURES["tumor"]
    networks: dict[str, Callable[[], object]] = {
        "rotopath": partial(rp.models.tumor, 8),
        "plain CNN": partial(PlainCNN, tumor, 8),
        "straightforward": partial(straightforward, tumor, 8),
        **{name: partial(build, tumor, 8) for name, build in peers().items()},
    }
    rows = [{"what": name, "seconds": f"{seconds(build, times=5):.4f}"} for name, build in networks.items()]
    record("build-peers", rows)


if __name__ == "__main__":
    main()
