"""Device, tolerances, features and batch norms for the tests of the Triton kernels."""

import torch
from torch import Tensor

import rotopath as rp

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def features(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    """Return random features (B, C, N, H, W), channels-last as after a convolution, with means far from 0."""
    batch, channels, n, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(batch, height, width, channels, n, generator=generator) * 2
    x = x + 10 * torch.rand(channels, n, generator=generator)
    return x.to(DEVICE, dtype).permute(0, 3, 4, 1, 2)


def make_norm(channels: int, dtype: torch.dtype = torch.float32) -> rp.nn.GroupBatchNorm2d:
    """Return a batch norm with weights of both signs; those near 0 would leave the maximum to rounding."""
    norm = rp.nn.GroupBatchNorm2d(channels, momentum=0.3).to(DEVICE, dtype)
    with torch.no_grad():
        norm.weight.copy_(torch.linspace(0.5, 1.5, channels))
        norm.weight[1::2] *= -1
        norm.bias.copy_(torch.linspace(0.5, -0.5, channels))
    return norm
