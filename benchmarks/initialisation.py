"""Measure how the bilinear interpolation of rotated kernels changes the variance of a signal.

    .venv/bin/python benchmarks/initialisation.py

Weights are those at initialization.

- First table: variance of the output of a rotated kernel, relative to the kernel at 0°. The signal is constant under
  the kernel, or uncorrelated between pixels.
- Second table: mean square of the features after several layers of convolution and ReLU, averaged over orientations.
  Parentheses contain the smallest and the largest mean square of an orientation, relative to that average.
- Third table: correlation of the pixels under a kernel, for the inputs of these layers.
"""

import torch
from record import record
from torch import Tensor, nn

import rotopath as rp
from rotopath import group
from rotopath.metrics import smooth_images

DEPTHS = (1, 2, 3, 5, 10, 20)  # numbers of layers


def single_orientations(size: int, orientations: int) -> list[dict[str, object]]:
    """Return the rows of the first table for one kernel size."""
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


def over_depth(size: int, orientations: int, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return three tensors, with one row for each layer: the numbers for the second and the third table.

    They are the mean squares relative to that of the input x (depth,), the mean squares of single orientations relative
    to their mean (depth, N), and the correlations of the inputs (depth,). All are means over four draws of the weights.
    Over twenty layers, a single network of ordinary width would deviate far from the expected value. So each gain is
    measured on 1024 output channels, of which the next layer reads 16.
    """
    draws = []
    for seed in range(4):
        torch.manual_seed(seed)
        features, gains, spreads, correlations = x, [], [], []
        for depth in range(max(DEPTHS)):
            correlations.append(local_correlation(features, size, orientations))
            convolution = rp.nn.GroupConv2d if depth else rp.nn.LiftConv2d
            layer = convolution(features.shape[1], 1024, size, orientations, padding="same", padding_mode="circular")
            with torch.no_grad():
                y = layer(features).relu()
            squares = y.square().mean(dim=(0, 1, 3, 4))
            gains.append(squares.mean() / features.square().mean())
            spreads.append(squares / squares.mean())
            features = y[:, :16]
        draws.append((torch.stack(gains).cumprod(dim=0), torch.stack(spreads), torch.stack(correlations)))
    mean_squares, mean_spreads, mean_correlations = (torch.stack(p).mean(dim=0) for p in zip(*draws, strict=True))
    return mean_squares, mean_spreads, mean_correlations


def local_correlation(x: Tensor, size: int, orientations: int) -> Tensor:
    """Return the correlation of the pixels of x under a kernel: 0 if they are uncorrelated, 1 if they are equal.

    It is derived from the gain of rotated kernels, which is lower for uncorrelated pixels.
    """
    rotation = group.rotation_map(size, orientations)
    uncorrelated, constant = (group.effective_taps(size, orientations, correlation) for correlation in (0.0, 1.0))
    patches = nn.functional.unfold(x.reshape(-1, 1, *x.shape[-2:]).double(), size)  # (maps, n², L)
    gain = torch.einsum("irp,mrl->mipl", rotation, patches).square().sum(dim=2).mean() / patches.square().mean()
    return (gain - uncorrelated) / (constant - uncorrelated)


def main() -> None:
    rows = [row for size in (3, 5) for n in (8, 16) for row in single_orientations(size, n)]
    record("initialisation-orientations", rows)
    noise = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
    inputs = {"smooth images": smooth_images(2, 12), "white noise": noise}
    variances: list[dict[str, object]] = []
    correlations: list[dict[str, object]] = []
    for size, n in ((5, 4), (5, 8), (3, 8), (5, 16)):
        for name, x in inputs.items():
            case: dict[str, object] = {"kernel": f"{size}×{size}", "N": n, "input": name}
            squares, spreads, correlation = over_depth(size, n, x)
            variances.append(
                case
                | {
                    f"layer {d}": f"{squares[d - 1]:.2f} ({spreads[d - 1].min():.2f}–{spreads[d - 1].max():.2f})"
                    for d in DEPTHS
                }
            )
            if n > 4:  # rotations by 90° preserve the variance of every signal, so it does not reveal the correlation
                correlations.append(case | {f"layer {d}": f"{correlation[d - 1]:.2f}" for d in DEPTHS})
    record("initialisation-depth", variances)
    record("initialisation-correlation", correlations)


if __name__ == "__main__":
    main()
