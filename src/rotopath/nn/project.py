"""Reduce SE(2) features over their orientations: to one value per channel and pixel, or to the dominant angle.

`Project` reduces features (B, C, N, H, W) to maps (B, C, H, W) that rotate with the image. `orientation_field` returns
the largest value over the orientations, and its angle. `project_max`, `project_attention` and `project_fourier` compute
the projections of `Project`. These functions take `rows` (..., C, N): features with the orientations on the last axis.
With reflections, the orientation axis has 2N entries.
"""

from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from rotopath import group
from rotopath.nn import triton
from rotopath.nn.conv import MappedModule
from rotopath.nn.features import check_choice, check_features, check_whole_number
from rotopath.nn.pool import smooth_sqrt

Projection = Literal["max", "mean", "attention", "fourier"]
PROJECTIONS = get_args(Projection)
MIN_POOL_VALUES = 2**22  # on a GPU, max_pool2d is faster than amax for tensors with more values than this


class Project(MappedModule):
    """Reduce features over orientations to maps that rotate with the image. (B, C, N, H, W) → (B, C, H, W).

    The modes, for the value x_θ of channel c at orientation θ:

    - "max" and "mean": maximum or mean over θ.
    - "attention": weighted mean Σ_θ w_θ x_θ with w = softmax_θ(s_c x_θ). Each channel learns a sharpness s_c. For
      s_c = 0, the initial value, the result is the mean; for s_c → ∞ it approaches the maximum.
    - "fourier": mean + Σ_k u_ck a_k, where a_k is the amplitude of frequency k = 1 … ⌊N/4⌋ along θ. Each channel learns
      one weight u_ck per frequency. The initial weights are 0, so that the result is the mean.

    "attention" and "fourier" require `channels`. "fourier" also requires `orientations`, and `reflections=True` for
    features with reflections. "max" and "mean" do not need these arguments, but check the input against those that are
    given.

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
            raise ValueError(f"Project({mode!r}) has weights and requires values for {' and '.join(missing)}.")
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
        """Set all weights to 0, so that "attention" and "fourier" compute the mean."""
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
    """Return the number of weights per channel of a projection with this mode and N = `orientations`.

    With reflections, the number is the same.
    """
    return {"attention": 1, "fourier": group.count_frequencies(orientations)}.get(mode, 0)


def project_max(rows: Tensor) -> Tensor:
    """Return the maximum (..., C) over the N orientations of `rows` (..., C, N)."""
    if not is_scripting():  # noqa: SIM102  # torch.jit.script skips the block only if the condition stands alone
        # On a GPU and over few orientations, a max pool is about four times as fast as amax.
        if triton.can_run_on(rows) and not rows.requires_grad and MIN_POOL_VALUES < rows.numel() < 2**31:
            flat = rows.reshape(1, 1, -1, rows.shape[-2] * rows.shape[-1])
            return F.max_pool2d(flat, (1, rows.shape[-1])).reshape(rows.shape[:-1])
    # amax divides the gradient among equal maxima. max would select the first of them, which is not equivariant.
    return rows.amax(dim=-1)


def project_attention(rows: Tensor, sharpness: Tensor) -> Tensor:
    """Return the weighted mean (..., C) over the N orientations of `rows` (..., C, N).

    `sharpness` (C,) has one number per channel. The weights are softmax(sharpness · value) over the orientations.
    """
    weights = torch.softmax(rows * sharpness[:, None], dim=-1)
    return (weights * rows).sum(dim=-1)


def project_fourier(rows: Tensor, waves: Tensor, weight: Tensor) -> Tensor:
    """Return the mean over the orientations of `rows` (..., C, G), plus a weighted sum of amplitudes of K frequencies.

    G is N, or 2N with reflections. Multiplying rows by `waves` (G, P, K), from `group.fourier_map`, yields P Fourier
    components of each frequency; the amplitude is the root of the sum of their squares. `weight` (C, K) has the weight
    of each frequency in the sum.
    """
    parts = torch.unflatten(rows @ waves.flatten(1), -1, [waves.shape[1], waves.shape[2]])  # (..., C, P, K)
    if parts.dtype == torch.float16:
        parts = parts.float()  # their squares overflow float16
    amplitudes = smooth_sqrt(parts.square().sum(dim=-2))
    return rows.mean(dim=-1) + (amplitudes * weight).sum(dim=-1).to(rows.dtype)


def orientation_field(features: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """Return the largest value over the orientations θ of SE(2) features, and its angle, both as maps (B, C, H, W).

    The angle is the rotation of the kernel with the largest response, in radians from 0 to 2π, counter-clockwise. It is
    interpolated between orientations (`group.interpolate_peak`). Rotating the image by 90° rotates both maps and adds
    π/2 to the angles. For features of layers with reflections, pass `reflections=True`; then flipping the image left to
    right flips both maps and negates the angles. Where all orientations have the same value, the angle is 0.

    >>> lift = rp.nn.LiftConv2d(3, 16, kernel_size=5, orientations=8)
    >>> strength, angle = rp.nn.orientation_field(lift(torch.rand(1, 3, 68, 68)))
    >>> strength.shape, angle.shape
    (torch.Size([1, 16, 64, 64]), torch.Size([1, 16, 64, 64]))
    """
    check_features(features, "orientation_field")
    if reflections and features.shape[2] % 2:
        raise ValueError(
            f"orientation_field with reflections takes features with an even number of orientations; got "
            f"{features.shape[2]} in a tensor of shape {tuple(features.shape)}. Pass reflections=False if the layers "
            f"have no reflections."
        )
    strength, angle = group.interpolate_peak(features.permute(0, 3, 4, 1, 2), reflections)
    return strength.permute(0, 3, 1, 2), angle.permute(0, 3, 1, 2)
