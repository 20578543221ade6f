"""Normalisation that treats all orientations of a channel alike: statistics and weights are shared over θ.

Dropout that leaves the symmetry alone: a channel goes with all its orientations and positions.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn import cpu, expect


class GroupBatchNorm2d(nn.BatchNorm3d):
    """Batch norm with one mean and variance a channel, taken over batch, space and orientation.

    y = γ_c (x - E[x_c]) / √(Var[x_c] + ε) + β_c, with (B, C, N, H, W) → (B, C, N, H, W).

    >>> norm = rp.nn.GroupBatchNorm2d(8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        expect.features(input, self, self.num_features)
        if cpu.can_normalise(input, self):
            return cpu.norm_relu_pool(input, self, relu=False)
        if input.is_cuda:
            return super().forward(input)
        # On the CPU torch is fastest on contiguous memory, and this is a view of it in channels-last features: every
        # position is one more sample of (C, N).
        rows = input.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalised = super().forward(rows.reshape(-1, *rows.shape[3:], 1, 1))  # (B·H·W, C, N, 1, 1)
        return normalised.view(rows.shape).permute(0, 3, 4, 1, 2)


class GroupNorm2d(nn.GroupNorm):
    """Group norm: each sample is normalised over groups of channels, all orientations and all positions.

    With groups=1 it is a layer norm over the whole sample. (B, C, N, H, W) → (B, C, N, H, W).

    >>> norm = rp.nn.GroupNorm2d(2, 8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(groups, channels, eps, affine, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        expect.features(input, self, self.num_channels)
        return super().forward(input)


class GroupLayerNorm2d(nn.Module):
    """Layer norm: each position of each sample is normalised over its channels and orientations.

    Scale and shift are learned for each channel. (B, C, N, H, W) → (B, C, N, H, W).

    >>> norm = rp.nn.GroupLayerNorm2d(8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect.whole(self, channels=channels)
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        expect.features(x, self, self.channels)
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalised = F.layer_norm(rows, rows.shape[3:], eps=self.eps)
        return (normalised * self.weight[:, None] + self.bias[:, None]).permute(0, 3, 4, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"


class GroupDropout2d(nn.Dropout3d):
    """Zeroes whole fields: a channel of a sample in all orientations and positions, with probability p.

    >>> drop = rp.nn.GroupDropout2d(0.5)
    >>> drop(torch.ones(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        expect.features(input, self)
        return super().forward(input)
