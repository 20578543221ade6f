"""Compare fine-tuning with training from scratch, with a fraction of the training images.

.venv/bin/python benchmarks/finetune.py DATA [cuda] [--from mitosis-amida13-n8] [--fraction 0.1] [--seeds 3]
    [--epochs 3] [--scored 200] [--sample NAME]

DATA is a folder of `rotopath data import` with annotated objects (for MIDOG++: the crops of docs/examples.md with
their points, `--classes look-alike=`). For each seed, a random fraction of the training images is kept, and the
network is trained twice with the recipe that `rotopath init --from` writes for them: with and without the weights of
the pretrained model. The number of epochs is smaller, and up to `--scored` images for validation and testing are used.
The scores are those of the test images; several classes have the mean F1 over the classes. NAME is the name of the
data in the table.
"""

import argparse
import csv
import json
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
from record import record

import rotopath as rp
from rotopath.cli.train import draft_recipe
from rotopath.data.manifest import MANIFEST_FILE
from rotopath.data.splits import SPLITS
from rotopath.runs import METRICS

PARENT_KEYS = {"from", "from_rate", "frozen_stages"}


def write_subset(data: Path, out: Path, fraction: float, scored: int, seed: int) -> dict[str, int]:
    """Write a manifest with a random fraction of the training images of a dataset, and other images to score.

    The images to score do not depend on the seed. Returns the number of images in each split.
    """
    with (data / MANIFEST_FILE).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    column = next(name for name in ("points", "outlines") if name in rows[0])
    kept: list[int] = []
    counts: dict[str, int] = {}
    for split in SPLITS:
        numbers = [i for i, row in enumerate(rows) if row["split"] == split]
        counts[split] = max(1, round(fraction * len(numbers))) if split == "train" else min(scored, len(numbers))
        generator = np.random.default_rng(seed if split == "train" else 0)
        kept += generator.permutation(numbers)[: counts[split]].tolist()
    with (out / MANIFEST_FILE).open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        for i in sorted(kept):
            paths = {name: (data / rows[i][name]).resolve().as_posix() for name in ("image", column)}
            writer.writerow({**rows[i], **paths})
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", type=Path)
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--from", dest="parent", default="mitosis-amida13-n8")
    parser.add_argument("--fraction", type=float, default=0.1)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--scored", type=int, default=200)
    parser.add_argument("--sample", default="")
    options = parser.parse_args()
    rows: list[dict[str, object]] = []
    for seed in range(options.seeds):
        with tempfile.TemporaryDirectory() as folder:
            root = Path(folder)
            counts = write_subset(options.data, root, options.fraction, options.scored, seed)
            recipe: dict[str, Any] = tomllib.loads(draft_recipe(root, root / "recipe.toml", None, options.parent, None))
            recipe |= {"seed": seed, "epochs": options.epochs, "keep": "last", "validation_steps": 4}
            recipe |= {"accelerator": "gpu" if options.device == "cuda" else "cpu"}
            scratch = {key: value for key, value in recipe.items() if key not in PARENT_KEYS}
            row: dict[str, object] = {"data": options.sample or options.data.name, "from": options.parent}
            row |= {"training images": counts["train"], "test images": counts["test"]}
            row |= {"steps": recipe["epochs"] * recipe["steps"], "seed": seed}
            for name, settings in (("fine-tuned", recipe), ("from scratch", scratch)):
                rp.train(settings, root / name)
                scores = json.loads((root / name / METRICS).read_text(encoding="utf-8"))["test"]
                row[name] = f"{scores.get('macro_f1', scores['f1']):.3f}"
            rows.append(row)
            print(row, flush=True)
    record("finetune", rows, options.device)


if __name__ == "__main__":
    main()
