"""Measure how many parallel trainings use one GPU best: images per second of all runs together.

.venv/bin/python benchmarks/together.py [--runs 1 3 6 12] [--orientations 8] [--steps 1500]

Each run is a `rotopath train` of the tumor network on synthetic tissue in bfloat16, in its own process with one thread,
like the runs of `rotopath study run`. Speeds are from the logs of the runs, over the second half of the steps, when all
runs are training. NVIDIA's Multi-Process Service (MPS) makes parallel processes faster; the first column states whether
it is active.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from record import record

from rotopath import runs

THREADS = {"OMP_NUM_THREADS": "1"}


def start_training(recipe: Path, out: Path, seed: int, steps: int, orientations: int) -> subprocess.Popen[bytes]:
    changes = {"seed": seed, "steps": steps, "epochs": 1, "orientations": orientations, "keep": "last"}
    words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "rotopath", "train", str(recipe), *words, "--out", str(out)]
    return subprocess.Popen(command, env=os.environ | THREADS, stdout=subprocess.DEVNULL)


def read_speed(out: Path) -> float:
    """Return the mean speed of a run in images per second, over the second half of its steps."""
    with (out / runs.LOG).open(newline="") as file:
        speeds = [float(row["images_per_second"]) for row in csv.DictReader(file)]
    return mean(speeds[len(speeds) // 2 :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, nargs="+", default=[1, 3, 6, 12])
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--device", default="cuda", choices=["cpu", "cuda"])
    options = parser.parse_args()
    rows = []
    with TemporaryDirectory() as folder:
        tissue, recipe = Path(folder) / "tissue", Path(folder) / "recipe.toml"
        make = [sys.executable, "-m", "rotopath", "data", "make", "--task", "tumor", "--out", str(tissue)]
        subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
        precision = "bf16" if options.device == "cuda" else "32"
        recipe.write_text(f'task = "tumor"\ndata = "{tissue}"\nprecision = "{precision}"\n')
        for count in options.runs:
            outs = [Path(folder) / f"{count}-{seed}" for seed in range(count)]
            processes = [
                start_training(recipe, out, seed, options.steps, options.orientations) for seed, out in enumerate(outs)
            ]
            if any(process.wait() for process in processes):
                raise SystemExit(f"One of {count} parallel trainings failed; its error message is printed above.")
            speeds = [read_speed(out) for out in outs]
            mps = "yes" if Path("/tmp/nvidia-mps/control").exists() else "no"
            together = f"{sum(speeds):.0f}"
            rows.append({"MPS": mps, "runs": count, "images/s each": f"{mean(speeds):.0f}", "together": together})
    record("together", rows, options.device)


if __name__ == "__main__":
    main()
