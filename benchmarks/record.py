"""Save measurements as a CSV in results/, named by hardware and torch version, and print them as a table."""

import csv
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

RESULTS = Path(__file__).parent.parent / "results"


def hardware(device: str = "cpu") -> str:
    """Return the name of the GPU, or the architecture and core count of the CPU, as part of a file name."""
    if device == "cuda":
        name = torch.cuda.get_device_name()
    else:
        name = f"{platform.machine()} {len(os.sched_getaffinity(0))} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def result_file(name: str, device: str = "cpu") -> Path:
    """Return the path of a CSV in results/, named by hardware and torch version."""
    version = torch.__version__.partition("+")[0]
    return RESULTS / f"{name}-{hardware(device)}-torch{version}.csv"


def read_recorded(name: str, device: str = "cpu") -> list[dict[str, object]]:
    """Return the rows that an earlier run on the same hardware has saved; none if there was no earlier run."""
    path = result_file(name, device)
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return [dict(row) for row in csv.DictReader(file)]


def record(name: str, rows: Sequence[Mapping[str, object]], device: str = "cpu", write: bool = True) -> None:
    """Print rows as a Markdown table, and save them to results/NAME-HARDWARE-torchVERSION.csv."""
    print("| " + " | ".join(rows[0]) + " |")
    print("|" + "---|" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(str(value) for value in row.values()) + " |")
    if not write:
        return
    path = result_file(name, device)
    path.parent.mkdir(exist_ok=True)
    unfinished = path.with_suffix(".part")
    with unfinished.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    unfinished.replace(path)
    print(f"\n{path.relative_to(RESULTS.parent)}\n")
