"""Device, tolerances, features and batch norms for the tests of the Triton kernels."""

import pytest
import torch
from torch import Tensor, nn

import rotopath as rp
from rotopath.nn import triton

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


def apply_fused(
    x: Tensor,
    norm: rp.nn.GroupBatchNorm2d,
    pool: nn.Module | None = None,
    residual: Tensor | None = None,
    activation: str = "relu",
) -> Tensor:
    """Apply batch norm, a residual sum, an activation and a pool by the Triton kernels, on any device."""
    pending = norm._start(x, on_gpu=True)
    if residual is not None:
        pending = pending.add(residual)
    if activation != "none":
        pending = pending.activate(activation)
    y = pending.compute() if pool is None else pending.pool(pool)
    assert y is not None
    return y


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let layers use the Triton kernels on any device."""
    monkeypatch.setattr(triton, "can_run_on", lambda x: type(x) is Tensor)
