"""N = 1 against N = 8 at equal weights, by the paper's design and the faithful one: three tasks on synthetic tissue.

.venv/bin/python benchmarks/compare.py [cuda] [--steps 300] [--epochs 16] [--at-once 1] [--out FOLDER]

Every run is a `rotopath train` and a `rotopath evaluate --robustness`, with three seeds, on a GPU in bfloat16; an
interrupted comparison goes on.
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
NETWORKS = ((1, "paper"), (8, "paper"), (8, "faithful"))
SEEDS = (0, 1, 2)


def call(*words: str) -> None:
    threads = {"OMP_NUM_THREADS": "2"}  # several runs share the cores
    command = [sys.executable, "-m", "rotopath", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)


def scores(options: argparse.Namespace, job: tuple[str, int, str, int]) -> dict[str, object]:
    """Those of the test split, of one run."""
    task, orientations, preset, seed = job
    run = options.out / f"{task}-N{orientations}-{preset}-seed{seed}"
    recipe = options.out / f"{task}.toml"
    if not (run / "weights.safetensors").exists():
        accelerator = "gpu" if options.device == "cuda" else "cpu"
        changes = {"orientations": orientations, "preset": preset, "seed": seed}
        changes |= {"steps": options.steps, "epochs": options.epochs}
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
    parser.add_argument("--epochs", type=int, default=16)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    for task in TASKS:
        tissue = options.out / f"{task}-tissue"
        if not tissue.exists():
            call("data", "make", "--task", task, "--out", str(tissue))
        # Along a cosine, since so few steps at a rate that is halved every epoch leave both networks half trained.
        precision = "bf16" if options.device == "cuda" else "32"
        settings = {"task": task, "data": tissue, "schedule": "cosine", "keep": "last", "precision": precision}
        (options.out / f"{task}.toml").write_text("".join(f'{key} = "{value}"\n' for key, value in settings.items()))
    jobs = [(task, *network, seed) for task in TASKS for network in NETWORKS for seed in SEEDS]
    with ThreadPoolExecutor(options.at_once) as pool:
        found = dict(zip(jobs, pool.map(partial(scores, options), jobs), strict=True))
    rows = []
    for task, score in TASKS.items():
        for n, preset in NETWORKS:
            runs = [found[task, n, preset, seed] for seed in SEEDS]
            plain = [found[task, *NETWORKS[0], seed] for seed in SEEDS]
            turned, turned_plain = ([run["rotation"]["fair"] for run in some] for some in (runs, plain))  # type: ignore[index]
            better = [run[score] > other[score] for run, other in zip(runs, plain, strict=True)]  # type: ignore[operator]
            scatter, scatter_plain = (mean(one["deviation"] for one in some) for some in (turned, turned_plain))
            rows.append(
                {
                    "task": task,
                    "N": n,
                    "design": preset,
                    "score": score,
                    "test": spread([run[score] for run in runs], 3),  # type: ignore[misc]
                    "deviation over angles": spread([one["deviation"] for one in turned], 4),
                    "N=1 over it": f"{scatter_plain / scatter:.2f}",
                    "decisions that change": spread([one["changed"] for one in turned], 3),
                    "seeds above N=1": "" if n == 1 else f"{sum(better)} of {len(SEEDS)}",
                    "steps": options.steps * options.epochs,
                }
            )
    record("compare", rows, options.device)


if __name__ == "__main__":
    main()
