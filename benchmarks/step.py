"""Measure time and memory of a training step of the tumor network, a plain CNN of the same width, and other libraries.

    .venv/bin/python benchmarks/step.py [cuda] [--batch 512 64] [--rounds 15] [--without compiled]

A step is the forward pass, the loss, the backward pass, and SGD with momentum. On a GPU it uses bfloat16 (autocast) and
the fastest convolutions that cuDNN finds, on the CPU float32. All models run in every round on the same batch. Errors
are relative errors of all logits and of all gradients, in one more step after the measured ones, in comparison with
float64 and the same weights. The script fails if an error is above the limit in ROUNDING and also more than twice that
of torch's own layers in the same precision.
"""

import argparse
import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from contenders import PlainCNN, peers, straightforward
from record import record
from timing import build, describe, leave_out, measure, reset_compiler, reset_peak_memory
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import rotopath as rp
from rotopath.models import ARCHITECTURES, Network
from rotopath.nn import graphs

TUMOR = ARCHITECTURES["tumor"]
BATCHES = {"cpu": [16], "cuda": [512, 64]}  # default batch sizes
REPEATS = {"cpu": 1, "cuda": 10}  # calls per measurement
BASELINE = "rotopath with torch's batch norm"
# Errors up to these limits are accepted: if the input of a ReLU is 0 up to rounding, its gradient may be 0 or 1.
ROUNDING = {"error of logits": 1e-3, "error of gradients": 0.2}


class Training:
    """A network, its optimizer, and one batch, which every step uses."""

    logits: Tensor  # of the last step; each replay of a CUDA graph overwrites them

    def __init__(self, model: nn.Module, images: Tensor, labels: Tensor) -> None:
        self.model = model.to(images.device).train()
        self.images, self.labels = images, labels
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def autocast(self) -> torch.autocast:
        mixed = self.images.is_cuda and self.images.dtype == torch.float32  # not for the reference in float64
        return torch.autocast(self.images.device.type, torch.bfloat16, enabled=mixed)

    def compute_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.autocast():
            logits: Tensor = self.model(self.images)
        loss = binary_cross_entropy_with_logits(logits.flatten().to(self.labels), self.labels)
        loss.backward()  # type: ignore[no-untyped-call]
        self.logits = logits.detach()

    def step(self) -> None:
        self.compute_gradients()
        self.optimizer.step()

    def results(self) -> dict[str, Tensor]:
        """Return the logits of the last step, and all gradients in one vector, in float64."""
        gradients = torch.cat([p.grad.flatten() for p in self.model.parameters() if p.grad is not None])
        return {"logits": self.logits.double(), "gradients": gradients.double()}


def use_torch_batch_norm(network: Network) -> Network:
    """Return a copy of the network with the same weights, but with torch's batch norm, which is never fused."""
    network = copy.deepcopy(network)
    for stage in network.stages:
        ours = stage.get_submodule("norm")
        stage.norm = nn.BatchNorm3d(ours.num_features).to(ours.weight)  # type: ignore[arg-type]
        stage.norm.load_state_dict(ours.state_dict())
    return network


def record_graphs(model: nn.Module, images: Tensor) -> nn.Module:
    """Record the forward and backward passes as CUDA graphs, as `rotopath train` does on a GPU."""
    model = model.to(images.device).train()
    with torch.autocast("cuda", torch.bfloat16):
        graphs.record(model, images)
    return model


def compile_model(model: nn.Module, images: Tensor) -> nn.Module:
    compiled: nn.Module = torch.compile(model.to(images.device).train(), dynamic=False)  # type: ignore[assignment]
    return compiled


def make_models(network: Network, images: Tensor) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build the models, by name.

    Models of rotopath have the weights of `network`, except for those with the preset "faithful".
    """
    n = network.orientations

    def plain() -> nn.Module:
        return PlainCNN(network.architecture, n)

    def copied() -> Network:
        return copy.deepcopy(network)

    makers: dict[str, Callable[[], nn.Module]] = {"plain CNN": plain, "rotopath": copied}
    if images.is_cuda:
        makers |= {
            "plain CNN, compiled": lambda: compile_model(plain(), images),
            "plain CNN, replayed": lambda: record_graphs(plain(), images),
            "plain CNN, whole step replayed": plain,
            "rotopath, replayed": lambda: record_graphs(copied(), images),
            "rotopath, whole step replayed": copied,
            "rotopath, faithful": lambda: make_faithful(network),
            "rotopath, faithful, replayed": lambda: record_graphs(make_faithful(network), images),
            "rotopath, faithful, whole step replayed": lambda: make_faithful(network),
        }
    makers[BASELINE] = lambda: use_torch_batch_norm(network)
    makers["straightforward"] = lambda: straightforward(network.architecture, n)
    makers |= {name: partial(make, network.architecture, n) for name, make in peers().items()}
    return makers


def make_faithful(network: Network) -> Network:
    """Return a network with the preset "faithful" and as many weights as `network`.

    The weights have the same random values in every call.
    """
    torch.manual_seed(0)
    return rp.models.tumor(network.orientations, preset="faithful").to(next(network.parameters()).device)


def measure_errors(training: Training, step: Callable[[], object], architecture: Network) -> dict[str, str]:
    """Run one more step, and return its errors in comparison with float64.

    The reference is a copy of `architecture` with torch's own batch norm and the weights of `training`.
    """
    network = use_torch_batch_norm(architecture)
    network.load_state_dict(training.model.state_dict())
    exact = Training(network.double(), training.images.double(), training.labels.double())
    exact.compute_gradients()
    step()
    expected = exact.results()
    return {
        what: f"{float((actual - expected[what]).norm() / expected[what].norm()):.1e}"
        for what, actual in training.results().items()
    }


def compare(
    network: Network, batch: int, device: str, rounds: int, without: Sequence[str] = ()
) -> list[dict[str, object]]:
    reset_compiler(device)
    generator = torch.Generator().manual_seed(0)
    side = network.architecture.input_px
    images = torch.rand(batch, 3, side, side, generator=generator).to(device)
    labels = torch.randint(2, (batch,), generator=generator).float().to(device)
    trainings: dict[str, Training] = {}
    steps: dict[str, Callable[[], object]] = {}
    peaks: dict[str, str] = {}

    for name, make in leave_out(make_models(network, images), without, kept=("plain CNN", BASELINE)).items():

        def start(name: str = name, make: Callable[[], nn.Module] = make) -> tuple[Training, Callable[[], None]]:
            training = Training(make(), images, labels)
            for _ in range(3):
                training.step()
            reset_peak_memory(name, device)
            step = graphs.record_step(training.step) if "whole step" in name else training.step
            step()
            return training, step

        if (built := build(f"{name}, batch of {batch}", start, device)) is not None:
            (trainings[name], steps[name]), peaks[name] = built
    times = measure(steps, device, rounds, REPEATS[device])
    rows: list[dict[str, object]] = []
    for name, step in steps.items():
        errors = {"logits": "", "gradients": ""}
        if "rotopath" in name:
            errors = measure_errors(trainings[name], step, make_faithful(network) if "faithful" in name else network)
        about = {"what": name, "batch": batch, "precision": "bfloat16" if device == "cuda" else "float32"}
        columns = {"peak MiB": peaks[name]} | {f"error of {what}": error for what, error in errors.items()}
        rows.append(about | describe(times[name], times["plain CNN"]) | columns)
    return rows


def check_errors(rows: list[dict[str, object]]) -> None:
    """Exit with an error message if an error is above its limit: ROUNDING, or twice the baseline's error if larger."""
    baselines = {row["batch"]: row for row in rows if row["what"] == BASELINE}
    for row in rows:
        for what, rounding in ROUNDING.items():
            allowed = max(2 * float(str(baselines[row["batch"]][what])), rounding)
            if row[what] and not float(str(row[what])) <= allowed:
                raise SystemExit(
                    f"{row['what']}, batch of {row['batch']}: {what} is {row[what]}, above the limit of {allowed:.1e}."
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--orientations", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--without",
        nargs="+",
        default=[],
        help="leave out models whose names contain one of these words; no file is written in this case",
    )
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
    check_errors(rows)


if __name__ == "__main__":
    main()
