"""N = 1 against N = 8 at equal weights: the three tasks on synthetic tissue, three seeds, by the command line.

.venv/bin/python benchmarks/compare.py [cuda] [--steps 300] [--epochs 8] [--at-once 1] [--out FOLDER]

Every run is a `rotopath train` and a `rotopath evaluate --robustness`; an interrupted comparison goes on.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from statistics import mean, stdev

from record import record

TASKS = {"mitosis": "f1", "nuclei": "f1", "tumor": "accuracy"}
ORIENTATIONS = (1, 8)
SEEDS = (0, 1, 2)


def call(*words: str) -> None:
    threads = {"OMP_NUM_THREADS": "2"}  # several runs share the cores
    command = [sys.executable, "-m", "rotopath", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)


def scores(options: argparse.Namespace, job: tuple[str, int, int]) -> dict[str, object]:
    """Those of the test split, of one run."""
    task, orientations, seed = job
    run = options.out / f"{task}-N{orientations}-seed{seed}"
    recipe = options.out / f"{task}.toml"
    if not (run / "weights.safetensors").exists():
        accelerator = "gpu" if options.device == "cuda" else "cpu"
        changes = {"orientations": orientations, "seed": seed, "steps": options.steps, "epochs": options.epochs}
        words = [word for key, value in changes.items() for word in ("--set", f"{key}={value}")]
        call("train", str(recipe), *words, "--set", f"accelerator={accelerator}", "--out", str(run))
    written = run / "evaluation-test.json"
    if not written.exists():
        call("evaluate", str(run), "--robustness")
    found: dict[str, object] = json.loads(written.read_text())["test"]
    return found


def spread(values: list[float], digits: int) -> str:
    return f"{mean(values):.{digits}f} ± {stdev(values):.{digits}f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        tissue = options.out / f"{task}-tissue"
        if not tissue.exists():
            call("data", "make", "--task", task, "--out", str(tissue))
        # Along a cosine, since so few steps at a rate that is halved every epoch leave both networks half trained.
        (options.out / f"{task}.toml").write_text(f'task = "{task}"\ndata = "{tissue}"\nschedule = "cosine"\n')
    jobs = [(task, n, seed) for task in TASKS for n in ORIENTATIONS for seed in SEEDS]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = dict(zip(jobs, pool.map(partial(scores, options), jobs), strict=True))
    rows = []
    for task, score in TASKS.items():
        for n in ORIENTATIONS:
            runs = [found[task, n, seed] for seed in SEEDS]
            turned = [run["rotation"]["fair"] for run in runs]  # type: ignore[index]
            rows.append(
                {
                    "task": task,
                    "N": n,
                    "score": score,
                    "test": spread([run[score] for run in runs], 3),  # type: ignore[misc]
                    "deviation over angles": spread([one["deviation"] for one in turned], 4),
                    "decisions that change": spread([one["changed"] for one in turned], 3),
                    "steps": options.steps * options.epochs,
                }
            )
    record("compare", rows, options.device)


if __name__ == "__main__":
    main()
