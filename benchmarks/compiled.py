"""Check that compiled training follows eager training: compare the losses of 30 steps.

    .venv/bin/python benchmarks/compiled.py [cuda] [--networks stack resnet unet] [--steps 30]

The networks are those of `library.py`. For each network and batch size, the same steps from the same weights on the
same batch run eager and compiled (`torch.compile`), in float32 and, with autocast, in bfloat16. The learning rate is
low, because training at a high rate is chaotic: it enlarges every rounding error. The largest difference between the
losses of compiled and eager training must not exceed twice the difference that rounding makes: in bfloat16, that
between eager training in bfloat16 and in float32; in float32, that between images that differ in their last bit. The
script fails if it does, or if a loss is not finite.
"""

import argparse
import copy

import torch
from library import IMAGES, makers
from record import record
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

BATCHES = {  # by network
    "stack": {"cpu": [4], "cuda": [4, 64, 512]},
    "resnet": {"cpu": [4], "cuda": [4, 128]},
    "unet": {"cpu": [1], "cuda": [4, 16]},
}
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FLOOR = 2e-3  # differences of losses below this are accepted
LEARNING_RATE = 3e-4


def train(network: nn.Module, images: Tensor, precision: torch.dtype, steps: int, compiled: bool) -> Tensor:
    """Return the losses of training steps with the same batch. The network is not changed."""
    network = copy.deepcopy(network).train()
    model: nn.Module = torch.compile(network, dynamic=False) if compiled else network  # type: ignore[assignment]
    optimizer = torch.optim.SGD(network.parameters(), lr=LEARNING_RATE, momentum=0.9)
    losses, labels = [], None
    for _ in range(steps):
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, torch.bfloat16, enabled=precision == torch.bfloat16):
            logits = model(images).flatten().float()
        if labels is None:
            labels = torch.rand(len(logits), generator=torch.Generator().manual_seed(1)).round().to(logits)
        loss = binary_cross_entropy_with_logits(logits, labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def compare(name: str, batch: int, device: str, steps: int) -> list[dict[str, object]]:
    torch.compiler.reset()
    torch.manual_seed(0)
    network = makers(name)["rotopath"]().to(device)
    side = IMAGES[name][device][1]
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    eager = {what: train(network, images, dtype, steps, compiled=False) for what, dtype in PRECISIONS.items()}
    nearby = train(network, images * (1 + torch.finfo(torch.float32).eps), torch.float32, steps, compiled=False)
    rounding = {"bfloat16": eager["bfloat16"] - eager["float32"], "float32": nearby - eager["float32"]}
    rows: list[dict[str, object]] = []
    for what, dtype in PRECISIONS.items():
        losses = train(network, images, dtype, steps, compiled=True)
        difference, allowed = float((losses - eager[what]).abs().max()), float(rounding[what].abs().max())
        row: dict[str, object] = {"network": name, "batch": batch, "side px": side, "precision": what, "steps": steps}
        row |= {"first loss": f"{losses[0]:.4f}", "last loss": f"{losses[-1]:.4f}"}
        row |= {"last loss, eager": f"{eager[what][-1]:.4f}", "largest difference": f"{difference:.1e}"}
        rows.append(row | {"by rounding": f"{allowed:.1e}", "follows": difference <= max(2 * allowed, FLOOR)})
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    rows = [
        row
        for name in options.networks
        for batch in BATCHES[name][options.device]
        for row in compare(name, batch, options.device, options.steps)
    ]
    record("compiled", rows, options.device, write=options.networks == list(BATCHES))
    if not all(row["follows"] for row in rows):
        raise SystemExit("Compiled training does not follow eager training.")


if __name__ == "__main__":
    main()
