"""Measure the equivariance error of kernels, pools, projections and networks at angles between the multiples of 90°.

    .venv/bin/python benchmarks/fidelity.py [cuda]

The condition number and the frequency response of kernels are measured as well. Inputs are smooth random images;
weights are untrained. Errors are medians over nine draws of the weights (seven for networks). "Two layers" are a
lifting convolution and a group convolution. Pools are measured between these layers, after a ReLU. Projections are
measured after both layers and a second ReLU. If escnn is installed, its layers are measured in the same run on the same
images.
"""

import math
import sys
import warnings
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any

import torch
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.group.kernel_families import circular_harmonics
from rotopath.metrics import smooth_images, untrained_errors
from rotopath.nn import center_crop
from rotopath.nn.project import Projection

CHANNELS = 4
# Kernel size in px, N, and rotation of the input in degrees.
CASES = ((3, 8, 45.0), (5, 8, 45.0), (5, 12, 30.0), (5, 16, 45.0), (5, 16, 22.5), (7, 8, 45.0), (9, 8, 45.0))
BETWEEN: dict[str, Callable[[], nn.Module]] = {  # layers to measure between the two convolutions
    "nothing": nn.Identity,
    "GroupMaxPool2d(2)": lambda: rp.nn.GroupMaxPool2d(2),
    "GroupMaxPool2d(2, blur=3)": lambda: rp.nn.GroupMaxPool2d(2, blur=3),
    "GroupMaxPool2d(2, blur=5)": lambda: rp.nn.GroupMaxPool2d(2, blur=5),
    "GroupAvgPool2d(2)": lambda: rp.nn.GroupAvgPool2d(2),
    "GroupAvgPool2d(2, blur=3)": lambda: rp.nn.GroupAvgPool2d(2, blur=3),
    "GroupAvgPool2d(2, power=2)": lambda: rp.nn.GroupAvgPool2d(2, power=2),
    "GroupAvgPool2d(2, blur=3, power=2)": lambda: rp.nn.GroupAvgPool2d(2, blur=3, power=2),
    "GroupAvgPool2d(2, blur=5, power=2)": lambda: rp.nn.GroupAvgPool2d(2, blur=5, power=2),
    "GroupMaxPool2d(3)": lambda: rp.nn.GroupMaxPool2d(3),
    "GroupMaxPool2d(3, blur=7)": lambda: rp.nn.GroupMaxPool2d(3, blur=7),
    "GroupAvgPool2d(3, blur=7, power=2)": lambda: rp.nn.GroupAvgPool2d(3, blur=7, power=2),
    "GroupUpsample2d(2)": lambda: rp.nn.GroupUpsample2d(2),
    "GroupUpsample2d(2, mode='bilinear')": lambda: rp.nn.GroupUpsample2d(2, mode="bilinear"),
}
ESCNN_BETWEEN = {"nothing": "", "PointwiseMaxPool(2)": "max", "PointwiseMaxPoolAntialiased(2)": "smooth max"}
LEARNED: dict[str, tuple[Projection, float]] = {  # projection, and a value for all its weights, as after a training
    "max": ("max", 0.0),
    "mean": ("mean", 0.0),
    "attention, sharpness 1": ("attention", 1.0),
    "attention, sharpness 4": ("attention", 4.0),
    "attention, sharpness 16": ("attention", 16.0),
    "fourier, weights 0.5": ("fourier", 0.5),
    "fourier, weights 2": ("fourier", 2.0),
}
SMOOTHING: dict[str, Callable[[], nn.Module]] = {  # filters of the image before the network
    "nothing": nn.Identity,
    "Smooth2d": rp.nn.Smooth2d,
    "1 2 1 along both axes": lambda: nn.Sequential(nn.AvgPool2d(2, 1), nn.AvgPool2d(2, 1, padding=1)),
}
FREQUENCIES = (0.0, 0.125, 0.25, 0.375, 0.5)  # in cycles per pixel; the last is the Nyquist frequency
NETWORKS: dict[str, dict[str, Any]] = {
    "paper": {},
    "kernel='harmonic'": {"kernel": "harmonic"},
    "pooling='rms-blur'": {"pooling": "rms-blur"},
    "kernel='harmonic', pooling='rms-blur'": {"kernel": "harmonic", "pooling": "rms-blur"},
    "preset='faithful'": {"preset": "faithful"},
}


def two_layers(kernel: str, size: int, orientations: int, between: Callable[[], nn.Module] | None = None) -> nn.Module:
    options = {"bias": False, "kernel": kernel}
    lift = rp.nn.LiftConv2d(3, CHANNELS, size, orientations, **options)  # type: ignore[arg-type]
    conv = rp.nn.GroupConv2d(CHANNELS, CHANNELS, size, orientations, **options)  # type: ignore[arg-type]
    return nn.Sequential(lift, *([] if between is None else [nn.ReLU(), between()]), conv)


def two_layers_projected(kernel: str, orientations: int, project: Callable[[], nn.Module]) -> nn.Module:
    layers = two_layers(kernel, 5, orientations, nn.Identity)
    return nn.Sequential(*layers.children(), nn.ReLU(), project())


def make_projection(mode: Projection, weight: float) -> nn.Module:
    project = rp.nn.Project(mode, CHANNELS, 8)
    for parameter in project.parameters():
        nn.init.constant_(parameter, weight)
    return project


class Amplitude(nn.Module):
    """Replaces a projection: from features to the amplitude of a single frequency along the orientation axis θ."""

    def __init__(self, frequency: int) -> None:
        super().__init__()
        self.frequency = frequency

    def forward(self, x: Tensor) -> Tensor:
        waves: Tensor = torch.fft.rfft(x, dim=2)
        return waves[:, :, self.frequency].abs()


class CroppedNetwork(nn.Module):
    """A network whose map of outputs is cropped by `rim` outputs at each edge."""

    def __init__(self, build: Callable[[], rp.models.Network], rim: int) -> None:
        super().__init__()
        self.network, self.rim = build(), rim

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.network(x)
        return center_crop(outputs, *(side - 2 * self.rim for side in outputs.shape[-2:]))


class Escnn(nn.Module):
    """The same two layers, built with escnn and fields of the regular representation. Returns (B, C, N, H, W).

    Between them are nothing (`between=None`), a ReLU ("") or a ReLU and a pool ("max" or "smooth max").
    """

    def __init__(self, size: int, orientations: int, between: str | None = None) -> None:
        from escnn import gspaces
        from escnn import nn as escnn

        super().__init__()
        space = gspaces.rot2dOnR2(orientations)
        self.images = escnn.FieldType(space, 3 * [space.trivial_repr])
        fields = escnn.FieldType(space, CHANNELS * [space.regular_repr])
        layers = [escnn.R2Conv(self.images, fields, size, bias=False)]
        if between is not None:
            layers.append(escnn.ReLU(fields))
        if between == "max":
            layers.append(escnn.PointwiseMaxPool(fields, 2))
        if between == "smooth max":
            layers.append(escnn.PointwiseMaxPoolAntialiased(fields, 2, 2))
        layers.append(escnn.R2Conv(fields, fields, size, bias=False))
        self.layers = escnn.SequentialModule(*layers)
        self.wrap = escnn.GeometricTensor
        self.weights = layers[0].weights.numel() // (3 * CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layers(self.wrap(x, self.images)).tensor
        return torch.unflatten(y, 1, (CHANNELS, -1))


def error(build: Callable[[], nn.Module], x: Tensor, angle: float, draws: int = 9) -> str:
    return f"{median(untrained_errors(build, x, angle, draws)):.4f}"


def condition(matrix: Tensor) -> str:
    """Return the condition number of a linear map of base weights: its largest gain relative to its smallest gain."""
    values = torch.linalg.svdvals(matrix)
    return f"{float(values[0] / values[-1]):.1f}" if values[-1] > 1e-9 else "inf"


def measure_kernels(x: Tensor) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for size, orientations, angle in CASES:
        case = {"size": f"{size}×{size}", "N": orientations, "angle": f"{angle:g}°"}
        for kernel in group.KERNELS:
            rotation = group.rotation_map(size, orientations, kernel)
            gains = rotation.square().sum(dim=(1, 2)) / rotation.square().sum(dim=(1, 2)).mean()
            errors = {
                "two layers": error(partial(two_layers, kernel, size, orientations), x, angle),
                "with ReLU": error(partial(two_layers, kernel, size, orientations, nn.Identity), x, angle),
            }
            shape = {
                "gain": f"{float(gains.min()):.2f}–{float(gains.max()):.2f}",
                "condition": condition(rotation.flatten(0, 1)),
                "at the worst angle": max([condition(kernels) for kernels in rotation], key=float),
            }
            rows.append({"kernel": kernel, **case, "weights": rotation.shape[2], **shape, **errors})
        if find_spec("escnn"):
            errors = {
                "two layers": error(partial(Escnn, size, orientations), x, angle),
                "with ReLU": error(partial(Escnn, size, orientations, ""), x, angle),
            }
            weights = Escnn(size, orientations).weights
            unknown = dict.fromkeys(shape, "")
            rows.append({"kernel": "escnn", **case, "weights": weights, **unknown, **errors})
    return rows


def measure_layers_between(x: Tensor) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for name, between in BETWEEN.items():
        errors = {kernel: error(partial(two_layers, kernel, 5, 8, between), x, 45.0) for kernel in group.KERNELS}
        rows.append({"between": name, **errors, "escnn": ""})
    if find_spec("escnn"):
        for name, between_escnn in ESCNN_BETWEEN.items():
            measured = error(partial(Escnn, 5, 8, between_escnn), x, 45.0)
            rows.append({"between": f"escnn: {name}", **dict.fromkeys(group.KERNELS, ""), "escnn": measured})
    return rows


def errors_by_angle(orientations: int, project: Callable[[], nn.Module], x: Tensor) -> dict[str, str]:
    return {
        f"{kernel}, {angle:g}°": error(partial(two_layers_projected, kernel, orientations, project), x, angle)
        for kernel in ("bilinear", "harmonic")
        for angle in (45.0, 22.5, 11.25)
    }


def measure_projections(x: Tensor) -> list[dict[str, object]]:
    return [
        {"projection": name, **errors_by_angle(8, partial(make_projection, *how), x)} for name, how in LEARNED.items()
    ]


def measure_frequencies(x: Tensor) -> list[dict[str, object]]:
    cases = [(n, k) for n in (8, 16) for k in range(1, n // 2 + 1)]
    return [{"N": n, "k": k, **errors_by_angle(n, partial(Amplitude, k), x)} for n, k in cases]


def measure_response(size: int = 5, orientations: int = 16) -> list[dict[str, object]]:
    """Return the mean power of random kernels for waves along their own axis, relative to frequency 0.

    Base weights are white noise. Rows are the kernel families at 0°, 22.5° and 45°; columns are frequencies.
    """
    rows: list[dict[str, object]] = []
    offsets = torch.arange(size, dtype=torch.float64) - size // 2
    for kernel in group.KERNELS:
        rotation = group.rotation_map(size, orientations, kernel).to(torch.complex128)
        for i in range(3):
            angle = 2 * math.pi * i / orientations
            along = (math.cos(angle) * offsets[None, :] - math.sin(angle) * offsets[:, None]).flatten()
            waves = torch.exp(2j * math.pi * torch.tensor(FREQUENCIES, dtype=torch.float64)[:, None] * along)
            power = (waves @ rotation[i]).abs().square().sum(dim=1)
            columns = {f"{f:g}": f"{float(p / power[0]):.3f}" for f, p in zip(FREQUENCIES, power, strict=True)}
            rows.append({"kernel": kernel, "angle": f"{math.degrees(angle):g}°", **columns})
    return rows


def measure_smoothing(device: str) -> list[dict[str, object]]:
    """Return two effects of each filter: the amplitude that waves keep, and the equivariance error at 45°.

    The amplitude is that of waves with a period of four pixels, at three angles. The error is that of the filter and a
    lifting convolution, for images with several amounts of blur (px).
    """
    rows: list[dict[str, object]] = []
    for name, smooth in SMOOTHING.items():
        kept = {f"{angle:g}°": f"{kept_amplitude(smooth(), angle):.3f}" for angle in (0.0, 22.5, 45.0)}
        images = {px: smooth_images(count=2, size=64, blur_px=px).to(device) for px in (0.5, 0.7, 1.0, 2.0)}
        errors = {f"{px:g} px": error(partial(smooth_and_lift, smooth), x, 45.0) for px, x in images.items()}
        rows.append({"filter": name, **kept, **errors})
    return rows


def kept_amplitude(smooth: nn.Module, angle: float, period_px: int = 4, size: int = 65) -> float:
    """Return the amplitude that a wave of amplitude 1 keeps after the filter, at its crest in the center of an image.

    `angle` is the direction of the wave in degrees.
    """
    position = torch.arange(size, dtype=torch.float64) - size // 2
    along = math.cos(math.radians(angle)) * position + math.sin(math.radians(angle)) * position[:, None]
    wave = torch.cos(2 * math.pi * along / period_px)[None, None]
    return float(smooth(wave)[0, 0, size // 2, size // 2])


def smooth_and_lift(smooth: Callable[[], nn.Module]) -> nn.Module:
    return nn.Sequential(smooth(), rp.nn.LiftConv2d(3, CHANNELS, 5, 8, bias=False, kernel="harmonic"))


def describe_harmonics() -> list[dict[str, object]]:
    """Return the gains of the circular harmonics of each kernel size, relative to the largest; m is the frequency."""
    rows: list[dict[str, object]] = []
    for size in (3, 5, 7, 9):
        kernels, frequencies = circular_harmonics(size)
        gains = kernels.norm(dim=0) / kernels.norm(dim=0).max()
        for m in sorted({int(frequency) for frequency in frequencies}):
            listed = ", ".join(f"{float(gain):.2f}" for gain in gains[frequencies == m])
            rows.append({"size": f"{size}×{size}", "m": m, "gains": listed})
    return rows


def measure_networks(device: str) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    for network in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor):
        networks = [network(8, **choices) for choices in NETWORKS.values()]
        widest = max(networks, key=lambda network: network.geometry.context_px)
        x = smooth_images(count=16, size=widest.nearest_sizes(widest.geometry.context_px)[-1]).to(device)
        for name, choices in NETWORKS.items():
            build = partial(CroppedNetwork, partial(network, 8, **choices), widest.architecture.rim)
            errors = {f"{angle:g}°": error(build, x, angle, draws=7) for angle in (45.0, 22.5)}
            rows.append({"network": network.__name__, "choices": name, **errors})
    return rows


def main(device: str = "cpu") -> None:
    warnings.simplefilter("ignore")  # escnn raises warnings
    torch.backends.cudnn.allow_tf32 = False
    x = smooth_images(count=2, size=64).to(device)
    record("fidelity-kernels", measure_kernels(x), device)
    record("fidelity-between", measure_layers_between(x), device)
    record("fidelity-projections", measure_projections(x), device)
    record("fidelity-frequencies", measure_frequencies(x), device)
    record("fidelity-response", measure_response(), device)
    record("fidelity-harmonics", describe_harmonics(), device)
    record("fidelity-smoothing", measure_smoothing(device), device)
    record("fidelity-networks", measure_networks(device), device)


if __name__ == "__main__":
    main(*sys.argv[1:])
