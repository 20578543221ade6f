"""Projection from SE(2) features (B, C, N, H, W) to maps (B, C, H, W), and the orientation of features."""

from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from rotopath import group
from rotopath.nn import triton
from rotopath.nn.checks import check_choice, check_features, check_whole_number
from rotopath.nn.conv import MappedModule
from rotopath.nn.pool import smooth_sqrt

Projection = Literal["max", "mean", "attention", "fourier"]
PROJECTIONS = get_args(Projection)
MIN_POOL_VALUES = 2**22  # a maximum over more values than these is faster as a pool on a GPU; smaller ones by amax


class Project(MappedModule):
    """Project features over orientations: the result rotates with the input. (B, C, N, H, W) → (B, C, H, W).

    - "max" and "mean" over θ.
    - "attention": Σ_θ w_θ x_θ with w = softmax_θ(s_c x_θ). Each channel learns a sharpness s_c. It starts at 0, which
      is the mean, and approaches the maximum for s_c → ∞.
    - "fourier": the mean + Σ_k u_ck a_k, with a_k the amplitude of frequency k = 1 … ⌊N/4⌋ along θ. Each channel learns
      a weight u_ck per frequency. They start at 0, which is the mean.

    "attention" and "fourier" have weights and require `channels`; "fourier" also requires `orientations`, and
    `reflections` if the features have them. "max" and "mean" only check these arguments against the input, if given.

    >>> project = rp.nn.Project("fourier", channels=16, orientations=8)
    >>> project(torch.zeros(2, 16, 8, 20, 20)).shape, project.weight.shape
    (torch.Size([2, 16, 20, 20]), torch.Size([16, 2]))
    """

    sharpness: nn.Parameter  # of "attention"
    weight: nn.Parameter  # of "fourier"
    waves: Tensor

    def __init__(
        self,
        mode: Projection = "max",
        channels: int | None = None,
        orientations: int | None = None,
        reflections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_choice(self, PROJECTIONS, mode=mode)
        check_choice(self, (False, True), reflections=reflections)
        needed = {"attention": {"channels": channels}, "fourier": {"channels": channels, "orientations": orientations}}
        missing = [name for name, value in needed.get(mode, {}).items() if value is None]
        if missing:
            raise ValueError(f"Project({mode!r}) has weights and requires the arguments {' and '.join(missing)}.")
        if channels is not None:
            check_whole_number(self, channels=channels)
        self.mode = mode
        self.channels = channels
        self.orientations = orientations
        self.reflections = reflections
        self.order = None if orientations is None else group.order(orientations, reflections)
        if mode == "attention":
            assert channels is not None
            self.sharpness = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))
        if mode == "fourier":
            assert channels is not None
            assert orientations is not None
            frequencies = weights_per_channel(mode, orientations)
            self.weight = nn.Parameter(torch.zeros(channels, frequencies, device=device, dtype=dtype))
            self.register_map("waves", partial(group.fourier_map, orientations, reflections))

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self, self.channels, self.order)
        if self.mode == "mean":
            return x.mean(dim=2)
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), contiguous for channels-last features
        if self.mode == "max":
            projected = project_max(rows)
        elif self.mode == "attention":
            projected = project_attention(rows, self.sharpness)
        else:
            projected = project_fourier(rows, self.waves.to(self.weight), self.weight)
        return projected.permute(0, 3, 1, 2)

    def reset_parameters(self) -> None:
        """Set all weights to 0, so that the projection is the mean."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        parts = [repr(self.mode)]
        if self.mode in ("attention", "fourier"):
            parts.append(str(self.channels))
        if self.mode == "fourier":
            parts.append(f"orientations={self.orientations}" + (", reflections=True" if self.reflections else ""))
        return ", ".join(parts)


def weights_per_channel(mode: str, orientations: int) -> int:
    """Return the number of weights of a projection per channel, which does not depend on reflections."""
    return {"attention": 1, "fourier": group.count_frequencies(orientations)}.get(mode, 0)


def project_max(rows: Tensor) -> Tensor:
    """Return the maximum over the last axis of (..., C, N)."""
    if not is_scripting():  # noqa: SIM102  # torch.jit.script skips the block only if the condition stands alone
        # On a GPU and over few orientations, a max pool is about four times as fast as amax.
        if triton.can_run_on(rows) and not rows.requires_grad and MIN_POOL_VALUES < rows.numel() < 2**31:
            flat = rows.reshape(1, 1, -1, rows.shape[-2] * rows.shape[-1])
            return F.max_pool2d(flat, (1, rows.shape[-1])).reshape(rows.shape[:-1])
    # amax divides the gradient among equal maxima. max would select the first one, which is not equivariant.
    return rows.amax(dim=-1)


def project_attention(rows: Tensor, sharpness: Tensor) -> Tensor:
    """Return the mean over the last axis of (..., C, N), weighted by a softmax of sharpness (C,) times value."""
    weights = torch.softmax(rows * sharpness[:, None], dim=-1)
    return (weights * rows).sum(dim=-1)


def project_fourier(rows: Tensor, waves: Tensor, weight: Tensor) -> Tensor:
    """Return the mean over the last axis of (..., C, G) plus the weighted amplitudes of the waves along it.

    `waves` is `group.fourier_map`; `weight` is (C, K) for K frequencies.
    """
    parts = torch.unflatten(rows @ waves.flatten(1), -1, [waves.shape[1], waves.shape[2]])  # (..., C, P, K)
    if parts.dtype == torch.float16:
        parts = parts.float()  # their squares overflow float16
    amplitudes = smooth_sqrt(parts.square().sum(dim=-2))
    return rows.mean(dim=-1) + (amplitudes * weight).sum(dim=-1).to(rows.dtype)


def orientation_field(features: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """Return the strength and the angle of SE(2) features, both (B, C, H, W).

    The strength is the maximum over θ. The angle is the rotation of the kernel at that maximum, in radians from 0 to
    2π, counter-clockwise, interpolated between orientations by `group.interpolate_peak`. Rotating the image by 90°
    rotates the field and adds π/2 to its angles. With reflections, flipping the image negates the angles. Where all
    orientations have the same value, the angle is 0.

    >>> lift = rp.nn.LiftConv2d(3, 16, kernel_size=5, orientations=8)
    >>> strength, angle = rp.nn.orientation_field(lift(torch.rand(1, 3, 68, 68)))
    >>> strength.shape, angle.shape
    (torch.Size([1, 16, 64, 64]), torch.Size([1, 16, 64, 64]))
    """
    check_features(features, "orientation_field")
    if reflections and features.shape[2] % 2:
        raise ValueError(
            f"orientation_field takes an even number of entries for reflections; got {features.shape[2]} in "
            f"{tuple(features.shape)}."
        )
    strength, angle = group.interpolate_peak(features.permute(0, 3, 4, 1, 2), reflections)
    return strength.permute(0, 3, 1, 2), angle.permute(0, 3, 1, 2)
