"""What a frozen network needs and torch has no module for: five layers on ordinary tensors (B, C, H, W).

Features of N orientations are (B, C·N, H, W) here, the orientations of a channel side by side. All of them can be
scripted, traced and exported with any batch, height and width.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting, is_tracing  # type: ignore[attr-defined]

from rotopath.nn import center_crop
from rotopath.nn.pool import root, thin_out
from rotopath.nn.project import add_amplitudes, attend, highest


def is_recorded() -> bool:
    """Whether the call that runs is written down, for any size, rather than answered."""
    return bool(is_tracing()) or torch.compiler.is_exporting()  # type: ignore[no-untyped-call]


class OrientationPool2d(nn.Module):
    """Projects the N orientations of each channel, as `rp.nn.Project` does. (B, C·N, H, W) → (B, C, H, W)."""

    learned: Tensor
    waves: Tensor

    def __init__(
        self, orientations: int, mode: str, learned: Tensor | None = None, waves: Tensor | None = None
    ) -> None:
        super().__init__()
        self.orientations = orientations
        self.mode = mode
        self.register_buffer("learned", _copy(learned), persistent=learned is not None)
        self.register_buffer("waves", _copy(waves), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        # Over the last axis of memory, which is fast and leaves the answer channels-last; over dim 2 it would not be.
        rows = torch.unflatten(x.permute(0, 2, 3, 1), 3, [-1, self.orientations])  # (B, H, W, C, N), a view
        if self.mode == "max":
            pooled = highest(rows)
        elif self.mode == "attention":
            pooled = attend(rows, self.learned)
        elif self.mode == "fourier":
            pooled = add_amplitudes(rows, self.waves, self.learned)
        else:
            pooled = rows.mean(dim=4)
        return pooled.permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.orientations}, {self.mode!r}"


def _copy(values: Tensor | None) -> Tensor:
    return torch.ones(1) if values is None else values.clone()  # scripts want a tensor in any case


class BlurredPool2d(nn.Module):
    """Maxima, means or root mean squares of windows at every pixel, blurred before one in `stride` is kept."""

    taps: Tensor

    def __init__(self, size: int, stride: int, padding: int, mode: str, taps: Tensor | None) -> None:
        super().__init__()
        self.size, self.stride, self.padding, self.mode = size, stride, padding, mode
        self.blurs = taps is not None
        self.window_stride = 1 if self.blurs else stride
        self.register_buffer("taps", _copy(taps), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.mode == "max":
            pooled = F.max_pool2d(x, self.size, self.window_stride, self.padding)
        else:
            values = x.square() if self.mode == "rms" else x
            pooled = F.avg_pool2d(values, self.size, self.window_stride, self.padding)
        if self.blurs:
            pooled = thin_out(pooled, self.taps, self.stride)
        return root(pooled) if self.mode == "rms" else pooled

    def extra_repr(self) -> str:
        return f"{self.size}, stride={self.stride}, padding={self.padding}, {self.mode!r}, taps={len(self.taps)}"


class Scale2d(nn.Module):
    """A line for each channel, y = factor · x + shift: a batch norm that no convolution could take in."""

    factor: Tensor
    shift: Tensor

    def __init__(self, factor: Tensor, shift: Tensor) -> None:
        super().__init__()
        self.register_buffer("factor", factor.view(-1, 1, 1))
        self.register_buffer("shift", shift.view(-1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift, x, self.factor)

    def extra_repr(self) -> str:
        return str(self.factor.shape[0])


class ChannelNorm2d(nn.Module):
    """A layer norm of the channels at each position, with a scale and a shift of each channel."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(bias)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)  # (B, H, W, C), as it lies in memory
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class CenterCrop2d(nn.Module):
    """The middle height × width pixels of maps (..., H, W); what has no middle is refused, unless a graph is made."""

    def forward(self, x: Tensor, height: int, width: int) -> Tensor:
        if not is_scripting():  # noqa: SIM102  # alone: only then a script leaves out what is below
            if not is_recorded():
                return center_crop(x, height, width)
        top, left = (x.size(-2) - height) // 2, (x.size(-1) - width) // 2
        return x[..., top : top + height, left : left + width]
