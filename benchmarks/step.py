"""How long a training step of the tumor network takes, and how much memory: rotopath, a plain CNN as wide, and peers.

    .venv/bin/python benchmarks/step.py [cuda] [--batch 512 64] [--rounds 15] [--without compiled]

A step is forward, loss, backward and SGD with momentum; in bfloat16 (autocast) on a GPU, where cuDNN looks for the
fastest convolutions, in float32 on the CPU. All take turns on the same batch. Errors are those of logits and gradients,
all together, of one more step after the measured ones, against float64 with the same weights; where one is
large, and more than twice that of torch's own layers in the same precision, the run ends with a sentence.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from contenders import PlainCNN, peers, straightforward
from record import record
from timing import build, describe, forget_compiled, forget_peak, leave_out, measure
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import rotopath as rp
from rotopath.models import ARCHITECTURES, Network
from rotopath.training import graphs

TUMOR = ARCHITECTURES["tumor"]
BATCHES = {"cpu": [16], "cuda": [512, 64]}
AT_ONCE = {"cpu": 1, "cuda": 10}
YARDSTICK = "rotopath with torch's batch norm"
# Errors below these are not compared: where a ReLU is given 0 to rounding, either answer is right, and its gradient.
ROUNDING = {"error of logits": 1e-3, "error of gradients": 0.2}


class Training:
    """A network, its optimiser and the batch that it sees at every step."""

    logits: Tensor  # of the last step, which a recorded one writes to where they are

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model = model.to(images.device).train()
        self.images, self.labels = images, labels
        self.optimiser = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def autocast(self) -> torch.autocast:
        mixed = self.images.is_cuda and self.images.dtype == torch.float32  # and not float64
        return torch.autocast(self.images.device.type, torch.bfloat16, enabled=mixed)

    def find_gradients(self) -> None:
        self.optimiser.zero_grad(set_to_none=True)
        with self.autocast():
            logits: Tensor = self.model(self.images)
        loss = binary_cross_entropy_with_logits(logits.flatten().to(self.labels), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.logits = logits.detach()

    def step(self) -> None:
        self.find_gradients()
        self.optimiser.step()

    def answers(self) -> dict[str, Tensor]:
        """What the last step found: logits, and all gradients in one vector, in float64."""
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        return {"logits": self.logits.double(), "gradients": gradients.double()}


def with_torchs_layers(network: Network) -> Network:
    """The same weights and convolutions, with torch's batch norm, which nothing is fused with."""
    network = copy.deepcopy(network)
    for stage in network.stages:
        ours = stage.get_submodule("norm")
        stage.norm = nn.BatchNorm3d(ours.num_features).to(ours.weight)  # type: ignore[arg-type]
        stage.norm.load_state_dict(ours.state_dict())
    return network


def replayed(model: nn.Module, images: Tensor) -> nn.Module:
    """As `rotopath train` runs it on a GPU: recorded as CUDA graphs."""
    model = model.to(images.device).train()
    with torch.autocast("cuda", torch.bfloat16):
        graphs.record(model, images)
    return model


def compiled(model: nn.Module, images: Tensor) -> nn.Module:
    made: nn.Module = torch.compile(model.to(images.device).train(), dynamic=False)  # type: ignore[assignment]
    return made


def models(network: Network, images: Tensor) -> dict[str, Callable[[], nn.Module]]:
    """Every one with weights of its own; those of rotopath start from the same."""
    n = network.orientations

    def plain() -> nn.Module:
        return PlainCNN(network.architecture, n)

    def ours() -> Network:
        return copy.deepcopy(network)

    found: dict[str, Callable[[], nn.Module]] = {"plain CNN": plain, "rotopath": ours}
    if images.is_cuda:
        found |= {
            "plain CNN, compiled": lambda: compiled(plain(), images),
            "plain CNN, replayed": lambda: replayed(plain(), images),
            "plain CNN, whole step replayed": plain,
            "rotopath, replayed": lambda: replayed(ours(), images),
            "rotopath, whole step replayed": ours,
            "rotopath, faithful": lambda: faithful(network),
            "rotopath, faithful, replayed": lambda: replayed(faithful(network), images),
            "rotopath, faithful, whole step replayed": lambda: faithful(network),
        }
    found[YARDSTICK] = lambda: with_torchs_layers(network)
    found["straightforward"] = lambda: straightforward(network.architecture, n)
    found |= {name: partial(make, network.architecture, n) for name, make in peers().items()}
    return found


def faithful(network: Network) -> Network:
    """One of the design that turns best off the grid, with as many weights; always the same ones."""
    torch.manual_seed(0)
    return rp.models.tumor(network.orientations, preset="faithful").to(next(network.parameters()).device)


def find_errors(training: Training, step: Callable[[], object], design: Network) -> dict[str, str]:
    """Those of one more step, against what torch's own layers find with the same weights in float64."""
    network = with_torchs_layers(design)
    network.load_state_dict(training.model.state_dict())
    exact = Training(network.double(), training.images.double(), training.labels.double())
    exact.find_gradients()
    step()
    wanted = exact.answers()
    return {
        what: f"{float((got - wanted[what]).norm() / wanted[what].norm()):.1e}"
        for what, got in training.answers().items()
    }


def compare(
    network: Network, batch: int, device: str, rounds: int, without: Sequence[str] = ()
) -> list[dict[str, object]]:
    forget_compiled(device)
    generator = torch.Generator().manual_seed(0)
    side = network.architecture.input_px
    images = torch.rand(batch, 3, side, side, generator=generator).to(device)
    labels = torch.randint(2, (batch,), generator=generator).float().to(device)
    trainings: dict[str, Training] = {}
    steps: dict[str, Callable[[], object]] = {}
    peaks: dict[str, str] = {}

    for name, make in leave_out(models(network, images), without, kept=("plain CNN", YARDSTICK)).items():

        def start(name: str = name, make: Callable[[], nn.Module] = make) -> tuple[Training, Callable[[], None]]:
            training = Training(make(), images, labels)
            for _ in range(3):
                training.step()
            forget_peak(name, device)
            step = graphs.record_step(training.step) if "whole step" in name else training.step
            step()
            return training, step

        if (built := build(f"{name}, batch of {batch}", start, device)) is not None:
            (trainings[name], steps[name]), peaks[name] = built
    times = measure(steps, device, rounds, AT_ONCE[device])
    rows: list[dict[str, object]] = []
    for name, step in steps.items():
        errors = {"logits": "", "gradients": ""}
        if "rotopath" in name:
            errors = find_errors(trainings[name], step, faithful(network) if "faithful" in name else network)
        about = {"what": name, "batch": batch, "precision": "bfloat16" if device == "cuda" else "float32"}
        found = {"peak MiB": peaks[name]} | {f"error of {what}": error for what, error in errors.items()}
        rows.append(about | describe(times[name], times["plain CNN"]) | found)
    return rows


def check(rows: list[dict[str, object]]) -> None:
    yardsticks = {row["batch"]: row for row in rows if row["what"] == YARDSTICK}
    for row in rows:
        for what, rounding in ROUNDING.items():
            allowed = max(2 * float(str(yardsticks[row["batch"]][what])), rounding)
            if row[what] and not float(str(row[what])) <= allowed:
                raise SystemExit(f"{row['what']}, batch of {row['batch']}: {what} is {row[what]}, not {allowed:.1e}.")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="+", default=[], help="words in names to leave out; then no file is written")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    network = rp.models.tumor(options.orientations)
    rows = [
        row
        for batch in options.batch or BATCHES[options.device]
        for row in compare(network.to(options.device), batch, options.device, options.rounds, options.without)
    ]
    record("step", rows, options.device, write=not options.without)
    check(rows)


if __name__ == "__main__":
    main()
