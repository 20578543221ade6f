"""What the tests of Triton's kernels share: where they run, how exact precisions are, features and batch norms."""

import torch
from torch import Tensor

import rotopath as rp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def features(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """(B, C, N, H, W) as they lie in memory behind a convolution, with means far from 0."""
    batch, channels, n, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height, width, channels, n, generator=generator) * 2
    x = x + 10 * torch.rand(channels, n, generator=generator)
    return x.to(DEVICE, dtype).permute(0, 3, 4, 1, 2)


def norm_of(channels: int, dtype: torch.dtype = torch.float32) -> rp.nn.GroupBatchNorm2d:
    norm = rp.nn.GroupBatchNorm2d(channels, momentum=0.3).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.weight[1::2] *= -1  # turns features upside down; near 0 the highest would be a matter of rounding
        norm.bias.copy_(torch.linspace(0.5, -0.5, channels))
    return norm
