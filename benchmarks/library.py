"""Measure training steps and inference of networks of the library, of plain CNNs as wide, and of other libraries.

    .venv/bin/python benchmarks/library.py [cuda] [--networks stack resnet unet] [--rounds 15] [--without compiled]

The networks are the tumor network as a hand-written `nn.Sequential` of layers of `rp.nn`, and a ResNet-18 and a U-Net
that `rp.equivariant` has converted with as many channels times orientations as the plain network has channels. They are
compared with `rp.models.tumor`, with the plain networks, and with the same networks in escnn and e2cnn, if these are
installed. A step is the forward pass, the loss, the backward pass, and SGD with momentum. On a GPU it uses bfloat16
(autocast), on the CPU float32. Modes: "eager", "compiled" (torch.compile), "recorded" (`rp.nn.record_step`) and
"inference". All run in every round on the same batch. Errors are relative errors of all logits and gradients, in one
more step after the measured ones, compared with float64 and the same weights. The script fails if an error of one of
our networks is above LIMITS and above twice that of the plain network. A gradient jumps where a ReLU or a pool compares
numbers that are equal up to rounding. With --networks, the recorded rows of the other networks are kept.
"""

import argparse
import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from contenders import PlainCNN, SteerableResNet, SteerableUNet, peers
from record import read_recorded, record
from step import Training
from timing import build, describe, leave_out, measure, reset_compiler, reset_peak_memory
from torch import Tensor, nn

import rotopath as rp
from rotopath.models import ARCHITECTURES
from rotopath.models.backbones import resnet18, unet

ORIENTATIONS = 8
UNET_WIDTH = 6 * ORIENTATIONS  # channels of the first level of the plain U-Net
TUMOR = ARCHITECTURES["tumor"]
IMAGES = {  # (batch, side) by network, on the CPU and on a GPU
    "stack": {"cpu": (8, 88), "cuda": (512, 88)},
    "resnet": {"cpu": (4, 192), "cuda": (128, 96)},
    "unet": {"cpu": (1, 256), "cuda": (16, 256)},
}
REPEATS = {"cpu": 1, "cuda": 10}  # calls per measurement
LIMITS = {"cpu": 1e-3, "cuda": 0.3}  # relative errors of logits and gradients in the precision of the device


def stack() -> nn.Sequential:
    """Return the layers of the paper's tumor network, one after another, as a user would write them."""
    channels, layers = TUMOR.channels(ORIENTATIONS), []
    for i, stage in enumerate(TUMOR.stages):
        convolution: Any = rp.nn.GroupConv2d if i else rp.nn.LiftConv2d
        layers.append(convolution(channels[i - 1] if i else 3, channels[i], stage.kernel, ORIENTATIONS, bias=False))
        layers += [rp.nn.GroupBatchNorm2d(channels[i]), nn.ReLU(inplace=True)]
        if stage.pool > 1:
            layers.append(rp.nn.GroupMaxPool2d(stage.pool))
    return nn.Sequential(*layers, rp.nn.Project("mean"), nn.Conv2d(channels[-1], 1, 1))


def makers(network: str) -> dict[str, Callable[[], nn.Module]]:
    """Return functions that build a network in all its forms, by name."""
    if network == "stack":
        forms: dict[str, Callable[[], nn.Module]] = {
            "plain": lambda: PlainCNN(TUMOR, ORIENTATIONS),
            "rotopath": stack,
            "rp.models.tumor": lambda: rp.models.tumor(ORIENTATIONS),
        }
        return forms | {name: partial(make, TUMOR, ORIENTATIONS) for name, make in peers().items()}
    plain: Callable[[], nn.Module] = partial(resnet18, 1) if network == "resnet" else partial(unet, 1, UNET_WIDTH)
    forms = {
        "plain": lambda: plain().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        "rotopath": lambda: rp.equivariant(plain(), ORIENTATIONS, keep="maps", strides="pool"),
    }
    steerable: Callable[[str, int], nn.Module] = SteerableResNet
    if network == "unet":
        steerable = partial(SteerableUNet, width=UNET_WIDTH)
    return forms | {name: partial(steerable, name, ORIENTATIONS) for name in peers() if name != "se2cnn"}


class Batch(Training):
    """A network in training with one batch of images; labels have the shape of the logits."""

    def __init__(self, model: nn.Module, images: Tensor) -> None:
        super().__init__(model, images, torch.zeros(()))
        self.original = model
        with torch.no_grad(), self.autocast():
            shape = copy.deepcopy(self.model)(images[:2]).shape[1:]
        generator = torch.Generator().manual_seed(1)
        labels = torch.randint(2, (len(images), *shape), generator=generator)
        self.labels = labels.flatten().to(images)

    def errors(self, step: Callable[[], object]) -> dict[str, str]:
        """Run one more step, and return its relative errors compared with float64 and separate layers."""
        before = copy.deepcopy(self.original)
        step()
        exact = Batch(before.double(), self.images.double())
        # Trying out all algorithms would take minutes in float64.
        with rp.nn.disable_fusion(), torch.backends.cudnn.flags(enabled=True, benchmark=False):
            exact.compute_gradients()
        expected = exact.results()
        return {
            what: f"{float((actual - expected[what]).norm() / expected[what].norm()):.1e}"
            for what, actual in self.results().items()
        }


def compare(network: str, device: str, arguments: argparse.Namespace) -> list[dict[str, object]]:
    reset_compiler(device)
    torch.backends.cudnn.benchmark = True
    batch, side = IMAGES[network][device]
    images = torch.rand(batch, 3, side, side, generator=torch.Generator().manual_seed(0)).to(device)
    modes = ("eager", "compiled", "recorded", "inference") if device == "cuda" else ("eager", "inference")
    names = {
        f"{form}, {mode}": (form, mode)
        for mode in modes
        for form in makers(network)
        if form not in peers() or mode in ("eager", "inference")
    }
    trainings: dict[str, Batch] = {}
    steps: dict[str, Callable[[], object]] = {}
    peaks: dict[str, str] = {}
    for name, (form, mode) in leave_out(names, arguments.without, kept=("plain, eager",)).items():

        def start(form: str = form, mode: str = mode) -> tuple[Batch, Callable[[], object]]:
            torch.manual_seed(0)
            training = Batch(makers(network)[form]().to(device), images)
            if mode == "inference":
                training.model.eval()
                return training, lambda: infer(training)
            if mode == "compiled":
                training.model = torch.compile(training.model, dynamic=False)  # type: ignore[assignment]
            for _ in range(3):
                training.step()
            reset_peak_memory(mode, device)
            step = rp.nn.record_step(training.step) if mode == "recorded" else training.step
            step()
            return training, step

        built = build(f"{network}, {name}", start, device)
        if built is not None:
            (trainings[name], steps[name]), peaks[name] = built
    times = measure(steps, device, arguments.rounds, REPEATS[device])
    rows: list[dict[str, object]] = []
    for name, step in steps.items():
        form, mode = names[name]
        errors = {"logits": "", "gradients": ""}
        if form in ("plain", "rotopath", "rp.models.tumor") and mode != "inference" and not arguments.fast:
            errors = trainings[name].errors(step)
        about = {"network": network, "batch": batch, "side px": side, "what": form, "mode": mode}
        baseline = times.get("plain, inference" if mode == "inference" else "plain, eager")
        columns = {"peak MiB": peaks[name]} | {f"error of {what}": error for what, error in errors.items()}
        rows.append(about | describe(times[name], baseline) | columns)
        print(rows[-1], flush=True)
    return rows


@torch.no_grad()
def infer(training: Batch) -> None:
    with training.autocast():
        training.model(training.images)


def check_errors(rows: list[dict[str, object]], device: str) -> None:
    """Exit with an error message if an error of one of our networks is above its limit.

    The limit is LIMITS or, if it is larger, twice the error of the plain network in the same precision.
    """
    plain = {row["network"]: row for row in rows if (row["what"], row["mode"]) == ("plain", "eager")}
    for row in rows:
        for what in ("error of logits", "error of gradients"):
            allowed = max(LIMITS[device], 2 * float(str(plain[row["network"]][what] or 0)))
            if row[what] and row["what"] != "plain" and not float(str(row[what])) <= allowed:
                raise SystemExit(
                    f"{row['network']}, {row['what']}, {row['mode']}: the {what} is {row[what]}, above {allowed:.1e}."
                )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("device", nargs="?", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--networks", nargs="+", default=list(IMAGES), choices=list(IMAGES))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="+", default=[], help="leave out forms and modes whose names contain these")
    parser.add_argument("--fast", action="store_true", help="do not compute errors, and write no file")
    arguments = parser.parse_args()
    rows: list[dict[str, object]] = []
    others = [row for row in read_recorded("library", arguments.device) if row["network"] not in arguments.networks]
    for network in arguments.networks:
        rows += compare(network, arguments.device, arguments)
        record("library", others + rows, arguments.device, write=not arguments.fast)
    check_errors(rows, arguments.device)


if __name__ == "__main__":
    main()
