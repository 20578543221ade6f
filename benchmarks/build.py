"""How long it takes to build layers and networks.

.venv/bin/python benchmarks/build.py
"""

import time
from collections.abc import Callable
from statistics import median

from record import record

import rotopath as rp


def seconds(build: Callable[[], object]) -> float:
    build()
    durations = []
    for _ in range(9):
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


def main() -> None:
    builds: dict[str, Callable[[], object]] = {
        "LiftConv2d(3, 64, 5, 8)": lambda: rp.nn.LiftConv2d(3, 64, 5, 8),
        "GroupConv2d(64, 64, 5, 8)": lambda: rp.nn.GroupConv2d(64, 64, 5, 8),
        "GroupConv2d(64, 64, 9, 16)": lambda: rp.nn.GroupConv2d(64, 64, 9, 16),
        "all twelve networks": twelve_networks,
    }
    record("build", [{"what": name, "seconds": f"{seconds(build):.4f}"} for name, build in builds.items()])


if __name__ == "__main__":
    main()
