"""What bilinear interpolation does to the variance of a signal, orientation by orientation, and through depth.

    .venv/bin/python benchmarks/initialisation.py

First table: the variance that a rotated kernel passes on, relative to the kernel at 0°, for a signal that is constant
over the kernel and for one that is uncorrelated from pixel to pixel. Second table: mean square behind layers of a
network at initialisation with ReLU, averaged over orientations, and its smallest and largest orientation in
parts of that average.
"""

import torch
from record import record
from torch import Tensor

import rotopath as rp
from rotopath import group
from rotopath.evaluation import smooth_images

DEPTHS = (1, 2, 3, 5, 10, 20)


def single_orientations(size: int, orientations: int) -> list[dict[str, object]]:
    rotation = group.rotation_map(size, orientations)
    taps = rotation.shape[2]
    constant = rotation.sum(dim=1).square().sum(dim=1) / taps
    uncorrelated = rotation.square().sum(dim=(1, 2)) / taps
    return [
        {
            "kernel": f"{size}×{size}",
            "N": orientations,
            "angle": f"{group.angles(orientations)[i]:g}°",
            "constant signal": f"{constant[i]:.2f}",
            "uncorrelated signal": f"{uncorrelated[i]:.2f}",
        }
        for i in range(max(orientations // 4, 1))
    ]


def through_depth(size: int, orientations: int, name: str, x: Tensor) -> dict[str, object]:
    """The expected mean square, over four draws, and the spread of single orientations about it."""
    expected, spreads = zip(*(one_draw(size, orientations, x, seed) for seed in range(4)), strict=True)
    mean, spread = torch.stack(expected).mean(dim=0), torch.stack(spreads).mean(dim=0)
    row: dict[str, object] = {"kernel": f"{size}×{size}", "N": orientations, "input": name}
    for depth in DEPTHS:
        lowest, highest = spread[depth - 1].min(), spread[depth - 1].max()
        row[f"layer {depth}"] = f"{mean[depth - 1]:.2f} ({lowest:.2f}–{highest:.2f})"
    return row


def one_draw(size: int, orientations: int, x: Tensor, seed: int) -> tuple[Tensor, Tensor]:
    """Mean squares (depth,) and those of single orientations relative to them (depth, N).

    A network of ordinary width wanders far from the expectation in twenty layers. So gains are measured on 1024
    output channels, of which the next layer reads 16.
    """
    torch.manual_seed(seed)
    gains, spreads = [], []
    for depth in range(max(DEPTHS)):
        convolution = rp.nn.GroupConv2d if depth else rp.nn.LiftConv2d
        layer = convolution(x.shape[1], 1024, size, orientations, padding="same", padding_mode="circular")
        with torch.no_grad():
            y = layer(x).relu()
        squares = y.square().mean(dim=(0, 1, 3, 4))
        gains.append(squares.mean() / x.square().mean())
        spreads.append(squares / squares.mean())
        x = y[:, :16]
    return torch.stack(gains).cumprod(dim=0), torch.stack(spreads)


def main() -> None:
    rows = [row for size in (3, 5) for n in (8, 16) for row in single_orientations(size, n)]
    record("initialisation-orientations", rows)
    inputs = {
        "smooth images": smooth_images(2, 12),
        "white noise": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)),
    }
    rows = [
        through_depth(size, n, name, x) for size, n in ((5, 4), (5, 8), (3, 8), (5, 16)) for name, x in inputs.items()
    ]
    record("initialisation-depth", rows)


if __name__ == "__main__":
    main()
