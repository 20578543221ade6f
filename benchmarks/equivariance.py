"""Measure the equivariance error of each layer and network at 90°, 45° and 22.5°.

    .venv/bin/python benchmarks/equivariance.py [cuda]

Inputs are smooth random images and features; weights are untrained. Each entry is the median over 25 draws of the
weights. Parentheses contain the largest error (at 90°) or the quartiles (at 45° and 22.5°). Layers have 16
orientations, which are 22.5° apart. Networks are applied to 16 images of the size of their receptive field. They then
have one output per image, which needs no resampling (nuclei: 4 × 4 outputs).
"""

import sys
from collections.abc import Callable
from functools import partial
from statistics import median, quantiles

import torch
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath.metrics import smooth_images, untrained_errors

N = 16
LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LiftConv2d 5×5": lambda: rp.nn.LiftConv2d(4, 4, 5, N),
    "GroupConv2d 5×5": lambda: rp.nn.GroupConv2d(4, 4, 5, N),
    "GroupConv2d 3×3": lambda: rp.nn.GroupConv2d(4, 4, 3, N),
    "GroupConv2d 1×1": lambda: rp.nn.GroupConv2d(4, 4, 1, N),
    "GroupConv2d 5×5, padding same": lambda: rp.nn.GroupConv2d(4, 4, 5, N, padding="same"),
    "GroupConv2d 3×3, stride 2": lambda: rp.nn.GroupConv2d(4, 4, 3, N, stride=2, padding=1),
    "GroupConv2d 3×3, dilation 2": lambda: rp.nn.GroupConv2d(4, 4, 3, N, dilation=2),
    "GroupConv2d 5×5, depthwise": lambda: rp.nn.GroupConv2d(4, 4, 5, N, groups=4),
    "GroupBatchNorm2d": lambda: rp.nn.GroupBatchNorm2d(4),
    "GroupNorm2d": lambda: rp.nn.GroupNorm2d(2, 4),
    "GroupLayerNorm2d": lambda: rp.nn.GroupLayerNorm2d(4),
    "GroupMaxPool2d 2": lambda: rp.nn.GroupMaxPool2d(2),
    "GroupAvgPool2d 2": lambda: rp.nn.GroupAvgPool2d(2),
    "GroupUpsample2d 2, nearest": lambda: rp.nn.GroupUpsample2d(2),
    "GroupUpsample2d 2, bilinear": lambda: rp.nn.GroupUpsample2d(2, mode="bilinear"),
    "GroupDropout2d": lambda: rp.nn.GroupDropout2d(0.5),
    "ReLU": nn.ReLU,
    "Project max": lambda: rp.nn.Project("max"),
    "Project mean": lambda: rp.nn.Project("mean"),
    "Project attention": lambda: _with_random_weights(rp.nn.Project("attention", 4)),
    "Project fourier": lambda: _with_random_weights(rp.nn.Project("fourier", 4, N)),
}


def _with_random_weights(project: nn.Module) -> nn.Module:
    """Draw random weights for a projection, and return it. With its initial weights, it would be the mean."""
    for parameter in project.parameters():
        nn.init.normal_(parameter)
    return project


def measure(name: str, build: Callable[[], nn.Module], x: Tensor) -> dict[str, str]:
    """Return the row of one layer or network; `build` makes it with new weights, `x` is its input."""

    def errors(angle: float, x: Tensor = x, training: bool = False) -> list[float]:
        return untrained_errors(build, x, angle, draws=25, training=training)

    def with_worst(errors: list[float]) -> str:
        return f"{median(errors):.0e} ({max(errors):.0e})"

    def with_quartiles(errors: list[float]) -> str:
        lower, middle, upper = quantiles(errors, n=4)
        return f"{middle:.2f} ({lower:.2f}–{upper:.2f})"

    return {
        "what": name,
        "90°, float64": with_worst(errors(90, x.double())),
        "90°, float32": with_worst(errors(90)),
        "90°, float32, training": with_worst(errors(90, training=True)),
        "45°": with_quartiles(errors(45)),
        "22.5°": with_quartiles(errors(22.5)),
    }


def main(device: str = "cpu") -> None:
    torch.backends.cudnn.allow_tf32 = False  # on a GPU, TF32 would round float32 to a mantissa of ten bits
    rows = []
    for name, build in LAYERS.items():
        odd = "stride" in name  # kernels of 3 px at stride 2, padded by 1, are placed symmetrically only on odd sizes
        maps = smooth_images(count=2, size=65 if odd else 64, channels=4 * N)
        x = maps[:, :4] if "Lift" in name else maps.view(len(maps), 4, N, *maps.shape[2:])
        rows.append(measure(name, build, x.to(device)))
    for network in (rp.models.mitosis, rp.models.nuclei, rp.models.tumor):
        for orientations in (1, 4, 8, 16):
            x = smooth_images(count=16, size=network(orientations).receptive_field).to(device)
            build = partial(network, orientations)
            rows.append(measure(f"{network.__name__}, N={orientations}", build, x))
    record("equivariance", rows, device)


if __name__ == "__main__":
    main(*sys.argv[1:])
