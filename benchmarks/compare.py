"""Compare networks with N = 1 orientation (ordinary CNNs) and N = 8 on synthetic tissue, at equal numbers of weights.

.venv/bin/python benchmarks/compare.py [cuda] [--steps 300] [--epochs 16] [--at-once 1] [--out FOLDER]

N = 8 is trained with the presets "paper" and "faithful". For each of three tasks, `rotopath train` and `rotopath
evaluate --robustness` run with three seeds, in bfloat16 on a GPU. Training uses one synthetic dataset. Scores are means
over the test split of this dataset and those of three more datasets, which `rotopath data make` creates with other
seeds. Run the same command again to resume an interrupted comparison.
"""

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from record import record

from rotopath.model_file import WEIGHTS
from rotopath.recipe import find_changed_key, read_recipe
from rotopath.runs import RECIPE

TASKS = {"mitosis": "f1", "nuclei": "f1", "tumor": "accuracy"}  # task → main score
NETWORKS = ((1, "paper"), (8, "paper"), (8, "faithful"))  # N and preset
SEEDS = (0, 1, 2)
TISSUES = (0, 1, 2, 3)  # seeds of `rotopath data make`; the first is for training, validation and robustness
# In the paper's windows of 60 px, every output of the faithful network would read pixels outside of the window.
SETTINGS: dict[str, dict[str, object]] = {"nuclei": {"window_px": 124}}


def run_command(*words: str) -> None:
    """Run a rotopath command in a process of its own."""
    threads = {"OMP_NUM_THREADS": "2"}  # several runs share the cores
    command = [sys.executable, "-m", "rotopath", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)


def tissue_folder(options: argparse.Namespace, task: str, tissue: int) -> Path:
    folder: Path = options.out / f"{task}-tissue{tissue}"
    return folder


def make_tissue(options: argparse.Namespace, dataset: tuple[str, int]) -> None:
    """Create the synthetic dataset for a task and a seed, unless it exists."""
    task, tissue = dataset
    if not (folder := tissue_folder(options, task, tissue)).exists():
        run_command("data", "make", "--task", task, "--seed", str(tissue), "--out", str(folder))


def train_and_evaluate(options: argparse.Namespace, job: tuple[str, int, str, int]) -> dict[str, Any]:
    """Train a network and evaluate it on all datasets. Results that exist are not computed again.

    `job` is task, orientations, preset and seed. Returns the mean score over all test splits, and the robustness on the
    test split of the dataset for training.
    """
    task, orientations, preset, seed = job
    run = options.out / f"{task}-N{orientations}-{preset}-seed{seed}"
    recipe = options.out / f"{task}.toml"
    keys = {"orientations": orientations, "preset": preset, "seed": seed}
    keys |= {"steps": options.steps, "epochs": options.epochs}
    keys["accelerator"] = "gpu" if options.device == "cuda" else "cpu"
    changes = [f"{key}={value}" for key, value in keys.items()]
    if not (run / WEIGHTS).exists():
        run_command(
            "train", str(recipe), *(word for change in changes for word in ("--set", change)), "--out", str(run)
        )
    elif key := find_changed_key(read_recipe(run / RECIPE), read_recipe(recipe, changes)):
        raise SystemExit(f"{run} was trained with another {key!r}; delete it, or choose another folder with --out.")
    results = []
    for tissue in TISSUES:
        report = run / f"test-{tissue}.json"
        if not report.exists():
            folder = tissue_folder(options, task, tissue)
            robustness = ["--robustness"] if tissue == TISSUES[0] else []
            run_command("evaluate", str(run), "--data", str(folder), *robustness, "--out", str(report))
        results.append(json.loads(report.read_text())["test"])
    return {"score": mean(result[TASKS[task]] for result in results), "rotation": results[0]["rotation"]["fair"]}


def mean_and_deviation(values: list[float], digits: int) -> str:
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
        precision = "bf16" if options.device == "cuda" else "32"
        data = str(tissue_folder(options, task, TISSUES[0]))
        settings: dict[str, object] = {
            "task": task,
            "data": data,
            "schedule": "cosine",  # the default halves the learning rate every epoch, too early for so few steps
            "keep": "last",
            "precision": precision,
        }
        settings |= SETTINGS.get(task, {})
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        (options.out / f"{task}.toml").write_text("".join(lines))
    jobs = [(task, *network, seed) for task in TASKS for network in NETWORKS for seed in SEEDS]
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(partial(make_tissue, options), product(TASKS, TISSUES)))
        results = dict(zip(jobs, pool.map(partial(train_and_evaluate, options), jobs), strict=True))
    rows = []
    for task, score in TASKS.items():
        for n, preset in NETWORKS:
            runs = [results[task, n, preset, seed] for seed in SEEDS]
            plain = [results[task, *NETWORKS[0], seed] for seed in SEEDS]
            better = [run["score"] > other["score"] for run, other in zip(runs, plain, strict=True)]
            deviations, plain_deviations = ([run["rotation"]["deviation"] for run in group] for group in (runs, plain))
            rows.append(
                {
                    "task": task,
                    "N": n,
                    "design": preset,
                    "score": score,
                    "test": mean_and_deviation([run["score"] for run in runs], 3),
                    "deviation over angles": mean_and_deviation(deviations, 4),
                    "N=1 over it": f"{mean(plain_deviations) / mean(deviations):.2f}",
                    "decisions that change": mean_and_deviation([run["rotation"]["changed"] for run in runs], 3),
                    "seeds above N=1": "" if n == 1 else f"{sum(better)} of {len(SEEDS)}",
                    "steps": options.steps * options.epochs,
                }
            )
    record("compare", rows, options.device)


if __name__ == "__main__":
    main()
