"""How hard the synthetic tissue is: networks trained on it for a short while, and scored on windows of its valid split.

.venv/bin/python benchmarks/hardness.py [cuda] [--steps 1500]

The score is the share of right answers among balanced windows (mitosis, tumor) or pixels of all three classes (nuclei).
"""

import argparse
import tempfile
from pathlib import Path

import torch
from record import record
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

import rotopath as rp
from rotopath.data import Augmentation, Collection, Task, open_data, sampled_batches
from rotopath.data.synthetic import make_mitosis, make_nuclei, make_tumor

WINDOWS_PX: dict[Task, tuple[int, int | None]] = {"mitosis": (68, None), "nuclei": (108, 68), "tumor": (88, None)}
VALIDATION_STEPS = 16


def answers(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss, and which answers are right."""
    if targets.ndim == 3:
        return cross_entropy(logits, targets), logits.argmax(dim=1) == targets
    scores = logits[:, 0, 0, 0]
    return binary_cross_entropy_with_logits(scores, targets.float()), (scores > 0) == (targets == 1)


def score(collection: Collection, orientations: int, steps: int, device: torch.device) -> float:
    torch.manual_seed(0)
    window_px, target_px = WINDOWS_PX[collection.task]
    training, validation = (
        sampled_batches(
            collection.task, collection.split(split), window_px, target_px, augmentation=augmentation, device=device
        )
        for split, augmentation in (("train", Augmentation()), ("valid", rp.data.NO_AUGMENTATION))
    )
    network = getattr(rp.models, collection.task)(orientations).to(device)
    optimiser = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for images, targets in training.load(range(steps), device):
        loss, _ = answers(network(images), targets)
        optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        schedule.step()
    network.eval()
    with torch.no_grad():
        right = [answers(network(x), y)[1] for x, y in validation.load(range(VALIDATION_STEPS), device)]
    return float(torch.cat(right).float().mean())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--steps", type=int, default=1500)
    options = parser.parse_args()
    rows = []
    for make in (make_mitosis, make_nuclei, make_tumor):
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "tissue")
            collection = open_data(Path(folder) / "tissue")
            scores = {n: score(collection, n, options.steps, torch.device(options.device)) for n in (1, 8)}
        found = {f"N={n}": f"{value:.3f}" for n, value in scores.items()}
        rows.append({"task": collection.task, "steps": options.steps} | found)
    record("hardness", rows, options.device)


if __name__ == "__main__":
    main()
