"""Fine-tune networks from copied weights, and compare with training from scratch and with the plain network.

    .venv/bin/python benchmarks/copied.py PCAM LABELED

PCAM is the folder of PCam, and LABELED a folder of `rotopath data import` with images of two classes (for MIDOG++:
atypical mitoses, docs/examples.md). A small plain CNN is trained on PCam, with random rotations by 90° and flips. From
its weights, each of these is trained on the labeled images, with three seeds:

- plain: the plain network itself, also tested with the mean over four rotations;
- copied: `rp.equivariant(plain, 4, weights="copy")`, which starts as this mean.

"scratch" starts from new weights: the plain network, and the same equivariant network (all channels, N = 4). All
trainings augment with rotations by 90° and flips, and have the same number of steps and the same learning rates. The
epoch with the best AUC of the validation images is tested. "changed" is the fraction of test images whose decision
differs between the four rotations of the image.
"""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import mean, stdev

import numpy as np
import torch
import torch.nn.functional as F
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath.data import open_data, read_image

WINDOW_PX = 64  # at the center of each image
FACTOR = 2  # by which windows are reduced
BATCH = 64
PRETRAINING_EPOCHS = 4
EPOCHS = 4
RATE = 1e-3
SEEDS = (0, 1, 2)
Data = dict[str, tuple[Tensor, Tensor]]


def build_plain() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in (12, 24, 32, 48):
        layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if width < 48 else []
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1))


def read(folder: Path) -> Data:
    """Return the windows (n, 3, H, W), in uint8, and the labels (n,) of each split."""
    dataset = open_data(folder)
    classes = sorted({sample.label for sample in dataset.samples if sample.label}) or ["0", "1"]
    data = {}
    for split in ("train", "valid", "test"):
        samples = dataset.split(split)
        images = np.stack([read_image(sample, sample.spacing_um_px) for sample in samples])
        margin = (images.shape[1] - WINDOW_PX) // 2
        windows = images[:, margin : margin + WINDOW_PX, margin : margin + WINDOW_PX]
        labels = torch.tensor([float(classes.index(str(sample.label))) for sample in samples])
        maps = torch.from_numpy(windows).permute(0, 3, 1, 2).float()
        data[split] = F.avg_pool2d(maps, FACTOR).round().to(torch.uint8), labels
    return data


def train(net: nn.Module, data: Data, epochs: int, rate: float, seed: int) -> tuple[nn.Module, float]:
    """Train a network, and return its state with the best AUC of the validation images, and this AUC."""
    torch.manual_seed(seed)
    images, labels = data["train"]
    by_class = [torch.nonzero(labels == label).flatten() for label in (0, 1)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=1e-4)
    steps = epochs * (len(images) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    best, best_auc = copy.deepcopy(net), 0.0
    for step in range(steps):
        net.train()
        # Both classes equally often.
        drawn = torch.cat([group[torch.randint(len(group), (BATCH // 2,))] for group in by_class])
        x = rotate_and_flip(images[drawn].float() / 255)
        loss = F.binary_cross_entropy_with_logits(net(x).flatten(), labels[drawn])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if (step + 1) % (len(images) // BATCH) == 0:
            current = auc(predict(net, data["valid"][0]), data["valid"][1])
            if current > best_auc:
                best, best_auc = copy.deepcopy(net), current
    return best, best_auc


def rotate_and_flip(x: Tensor) -> Tensor:
    """Rotate and flip each image of a batch at random."""
    codes = torch.randint(8, (len(x),))
    out = torch.empty_like(x)
    for code in range(8):
        rows = codes == code
        part = x[rows].rot90(code % 4, (2, 3))
        out[rows] = part.flip(-1) if code >= 4 else part
    return out


def predict(net: Callable[[Tensor], Tensor], images: Tensor, quarter_turns: int = 0) -> Tensor:
    if isinstance(net, nn.Module):
        net.eval()
    with torch.no_grad():
        parts = [net((part.float() / 255).rot90(quarter_turns, (2, 3))).flatten() for part in torch.split(images, 256)]
    return torch.cat(parts)


def auc(logits: Tensor, labels: Tensor) -> float:
    positive, negative = logits[labels == 1], logits[labels == 0]
    difference = positive[:, None] - negative[None]
    return float((difference > 0).double().mean() + 0.5 * (difference == 0).double().mean())


def average_over_rotations(net: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.stack([net(x.rot90(i, (2, 3))) for i in range(4)]).mean(dim=0)


def score(net: Callable[[Tensor], Tensor], data: Data) -> tuple[float, float]:
    images, labels = data["test"]
    logits = torch.stack([predict(net, images, i) for i in range(4)])
    decisions = logits > 0
    changed = (decisions != decisions[:1]).any(dim=0).double().mean()
    return auc(logits[0], labels), float(changed)


def main() -> None:
    pcam, labeled = read(Path(sys.argv[1])), read(Path(sys.argv[2]))
    torch.manual_seed(0)
    pretrained, valid_auc = train(build_plain(), pcam, PRETRAINING_EPOCHS, 2e-3, 0)
    print(f"pretrained: AUC {valid_auc:.3f} of the validation images of PCam", flush=True)
    start = rp.equivariant(pretrained.eval(), 4, weights="copy")
    x = labeled["test"][0][:64].float() / 255
    with torch.no_grad():
        difference = (start(x) - average_over_rotations(pretrained)(x)).abs().max()
    print(f"copied weights differ from the mean over four rotations by {float(difference):.1e}", flush=True)
    arms: dict[str, Callable[[], nn.Module]] = {
        "plain, fine-tuned": lambda: copy.deepcopy(pretrained),
        "copied, fine-tuned": lambda: rp.equivariant(pretrained, 4, weights="copy"),
        "plain, from scratch": build_plain,
        "equivariant, from scratch": lambda: rp.equivariant(build_plain(), 4, keep="channels", projection="mean"),
    }
    scores: dict[str, list[tuple[float, float]]] = {}
    weights: dict[str, int] = {}
    for seed in SEEDS:
        for name, build in arms.items():
            torch.manual_seed(seed)
            net, _ = train(build(), labeled, EPOCHS, RATE, seed)
            scores.setdefault(name, []).append(score(net, labeled))
            weights[name] = sum(p.numel() for p in net.parameters())
            print(seed, name, scores[name][-1], flush=True)
            if name == "plain, fine-tuned":
                averaged = f"{name}, mean over rotations"
                scores.setdefault(averaged, []).append(score(average_over_rotations(net), labeled))
                weights[averaged] = weights[name]
    rows = []
    for name, pairs in scores.items():
        aucs, changed = zip(*pairs, strict=True)
        rows.append(
            {
                "network": name,
                "weights": weights[name],
                "AUC": f"{mean(aucs):.3f}",
                "standard deviation": f"{stdev(aucs):.3f}",
                "of seeds": " ".join(f"{value:.3f}" for value in aucs),
                "changed": f"{mean(changed):.3f}",
            }
        )
    record("copied", rows)


if __name__ == "__main__":
    main()
