"""N = 1 against N = 8 at equal weights, by the paper's design and the faithful one: three tasks on synthetic tissue.

.venv/bin/python benchmarks/compare.py [cuda] [--steps 300] [--epochs 16] [--at-once 1] [--out FOLDER]

Every run is a `rotopath train` on one tissue and a `rotopath evaluate --robustness`, with three seeds, on a GPU in
bfloat16. Scores are means over its test split and those of three other tissues, which `rotopath data make` makes with
other seeds. An interrupted comparison goes on.
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
from rotopath.recipe import changed_key, read_recipe
from rotopath.runs import RECIPE

TASKS = {"mitosis": "f1", "nuclei": "f1", "tumor": "accuracy"}
NETWORKS = ((1, "paper"), (8, "paper"), (8, "faithful"))
SEEDS = (0, 1, 2)
TISSUES = (0, 1, 2, 3)  # seeds of `rotopath data make`; the first is for training, validation and how answers turn
# Of 60 px, the paper's windows, all outputs of the faithful network lie where its filters reach beyond them.
SETTINGS: dict[str, dict[str, object]] = {"nuclei": {"window_px": 124}}


def call(*words: str) -> None:
    threads = {"OMP_NUM_THREADS": "2"}  # several runs share the cores
    command = [sys.executable, "-m", "rotopath", *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=os.environ | threads)


def place_tissue(options: argparse.Namespace, task: str, tissue: int) -> Path:
    place: Path = options.out / f"{task}-tissue{tissue}"
    return place


def make_tissue(options: argparse.Namespace, which: tuple[str, int]) -> None:
    task, tissue = which
    if not (place := place_tissue(options, task, tissue)).exists():
        call("data", "make", "--task", task, "--seed", str(tissue), "--out", str(place))


def assess(options: argparse.Namespace, job: tuple[str, int, str, int]) -> dict[str, Any]:
    """What one run scores on all test splits, and how its answers turn on that of its own tissue."""
    task, orientations, preset, seed = job
    run = options.out / f"{task}-N{orientations}-{preset}-seed{seed}"
    recipe = options.out / f"{task}.toml"
    keys = {"orientations": orientations, "preset": preset, "seed": seed}
    keys |= {"steps": options.steps, "epochs": options.epochs}
    keys["accelerator"] = "gpu" if options.device == "cuda" else "cpu"
    changes = [f"{key}={value}" for key, value in keys.items()]
    if not (run / WEIGHTS).exists():
        call("train", str(recipe), *(word for change in changes for word in ("--set", change)), "--out", str(run))
    elif key := changed_key(read_recipe(run / RECIPE), read_recipe(recipe, changes)):
        raise SystemExit(f"{run} was trained with another {key!r}; delete it, or choose another folder with --out.")
    found = []
    for tissue in TISSUES:
        written = run / f"test-{tissue}.json"
        if not written.exists():
            place = place_tissue(options, task, tissue)
            turned = ["--robustness"] if tissue == TISSUES[0] else []
            call("evaluate", str(run), "--data", str(place), *turned, "--out", str(written))
        found.append(json.loads(written.read_text())["test"])
    return {"score": mean(one[TASKS[task]] for one in found), "rotation": found[0]["rotation"]["fair"]}


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
        # Along a cosine, since so few steps at a rate that is halved every epoch leave both networks half trained.
        precision = "bf16" if options.device == "cuda" else "32"
        data = str(place_tissue(options, task, TISSUES[0]))
        settings: dict[str, object] = {
            "task": task,
            "data": data,
            "schedule": "cosine",
            "keep": "last",
            "precision": precision,
        }
        settings |= SETTINGS.get(task, {})
        lines = [f"{key} = {json.dumps(value)}\n" for key, value in settings.items()]
        (options.out / f"{task}.toml").write_text("".join(lines))
    jobs = [(task, *network, seed) for task in TASKS for network in NETWORKS for seed in SEEDS]
    with ThreadPoolExecutor(options.at_once) as pool:
        list(pool.map(partial(make_tissue, options), product(TASKS, TISSUES)))
        found = dict(zip(jobs, pool.map(partial(assess, options), jobs), strict=True))
    rows = []
    for task, score in TASKS.items():
        for n, preset in NETWORKS:
            runs = [found[task, n, preset, seed] for seed in SEEDS]
            plain = [found[task, *NETWORKS[0], seed] for seed in SEEDS]
            better = [run["score"] > other["score"] for run, other in zip(runs, plain, strict=True)]
            deviations, plain_deviations = ([run["rotation"]["deviation"] for run in some] for some in (runs, plain))
            rows.append(
                {
                    "task": task,
                    "N": n,
                    "design": preset,
                    "score": score,
                    "test": spread([run["score"] for run in runs], 3),
                    "deviation over angles": spread(deviations, 4),
                    "N=1 over it": f"{mean(plain_deviations) / mean(deviations):.2f}",
                    "decisions that change": spread([run["rotation"]["changed"] for run in runs], 3),
                    "seeds above N=1": "" if n == 1 else f"{sum(better)} of {len(SEEDS)}",
                    "steps": options.steps * options.epochs,
                }
            )
    record("compare", rows, options.device)


if __name__ == "__main__":
    main()
