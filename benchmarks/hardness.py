"""Measure how difficult the synthetic datasets are: train networks briefly and score them on the validation split.

.venv/bin/python benchmarks/hardness.py [cuda] [--steps 1500]

The score is the fraction of correct predictions: for windows, of which half are positive (mitosis, tumor), or for
pixels of three classes (nuclei).
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from record import record
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import rotopath as rp
from rotopath.data import Augmentation, Dataset, open_data
from rotopath.evaluation import make_sampled_batches
from rotopath.synthetic import make_mitosis, make_nuclei, make_tumor
from rotopath.tasks import MITOSIS, NUCLEI, TUMOR, Task, TrainingWindow

WINDOWS = {MITOSIS: TrainingWindow(68, 8, 8), NUCLEI: TrainingWindow(108, 68, 1), TUMOR: TrainingWindow(88, 12, 12)}
MAKERS: dict[Task, Callable[[Path], None]] = {MITOSIS: make_mitosis, NUCLEI: make_nuclei, TUMOR: make_tumor}
VALIDATION_STEPS = 16


def loss_and_correct(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, and whether each prediction is correct."""
    if targets.ndim == 3:
        return cross_entropy(logits, targets), logits.argmax(dim=1) == targets
    scores = logits[:, 0, 0, 0]
    return binary_cross_entropy_with_logits(scores, targets.float()), (scores > 0) == (targets == 1)


def train_and_score(task: Task, dataset: Dataset, orientations: int, steps: int, device: torch.device) -> float:
    torch.manual_seed(0)
    training, validation = (
        make_sampled_batches(
            task,
            dataset.split(split),
            WINDOWS[task],
            task.default_batch,
            seed=0,
            device=device,
            augmentation=augmentation,
        )
        for split, augmentation in (("train", Augmentation()), ("valid", rp.data.NO_AUGMENTATION))
    )
    network = getattr(rp.models, task.name)(orientations).to(device)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for images, targets in training.load(range(steps), device):
        loss, _ = loss_and_correct(network(images), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    network.eval()
    with torch.no_grad():
        correct = [loss_and_correct(network(x), y)[1] for x, y in validation.load(range(VALIDATION_STEPS), device)]
    return float(torch.cat(correct).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    rows = []
    for task, make in MAKERS.items():
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "tissue")
            dataset = open_data(Path(folder) / "tissue")
            scores = {n: train_and_score(task, dataset, n, options.steps, torch.device(options.device)) for n in (1, 8)}
        columns = {f"N={n}": f"{value:.3f}" for n, value in scores.items()}
        rows.append({"task": task.name, "steps": options.steps} | columns)
    record("hardness", rows, options.device)


if __name__ == "__main__":
    main()
