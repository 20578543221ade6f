"""The way out of SE(2): from features over positions and orientations to maps over positions."""

from functools import partial
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit import is_scripting  # type: ignore[attr-defined]

from rotopath import group
from rotopath.nn import expect, gpu
from rotopath.nn.conv import MappedModule
from rotopath.nn.pool import root

Projection = Literal["max", "mean", "attention", "fourier"]
PROJECTIONS = get_args(Projection)
MANY = 2**22  # numbers, above which it counts how fast a maximum is found, and not how soon


class Project(MappedModule):
    """Forgets orientations, and turns with the input and no more. (B, C, N, H, W) → (B, C, H, W).

    - "max" and "mean" over θ.
    - "attention": Σ_θ w_θ x_θ with w = softmax_θ(s_c x_θ). Each channel learns a sharpness s_c: 0, which is the mean,
      at the start; towards ∞ it is the maximum.
    - "fourier": the mean + Σ_k u_ck a_k, with a_k the amplitude of frequency k = 1 … ⌊N/4⌋ along θ. Each channel learns
      a weight u_ck for each of them: 0, which is the mean, at the start.

    What learns has to know `channels`, and "fourier" also `orientations` and `reflections`; the others check what they
    are told.

    >>> project = rp.nn.Project("fourier", channels=16, orientations=8)
    >>> project(torch.zeros(2, 16, 8, 20, 20)).shape, project.weight.shape
    (torch.Size([2, 16, 20, 20]), torch.Size([16, 2]))
    """

    sharpness: nn.Parameter  # of attention
    weight: nn.Parameter  # of fourier
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
        expect.choice(self, PROJECTIONS, mode=mode)
        expect.choice(self, (False, True), reflections=reflections)
        needed = {"attention": {"channels": channels}, "fourier": {"channels": channels, "orientations": orientations}}
        missing = [name for name, value in needed.get(mode, {}).items() if value is None]
        if missing:
            raise ValueError(f"Project({mode!r}) has weights, so it needs to be told {' and '.join(missing)}.")
        if channels is not None:
            expect.whole(self, channels=channels)
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
            each = learned_weights(mode, orientations)
            self.weight = nn.Parameter(torch.zeros(channels, each, device=device, dtype=dtype))
            self.register_map("waves", partial(group.amplitude_map, orientations, reflections))

    def forward(self, x: Tensor) -> Tensor:
        expect.features(x, self, self.channels, self.order)
        if self.mode == "max":
            return highest(x.permute(0, 3, 4, 1, 2)).permute(0, 3, 1, 2)
        if self.mode == "mean":
            return x.mean(dim=2)
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N), as convolutions lay it out in memory
        if self.mode == "attention":
            return attend(rows, self.sharpness).permute(0, 3, 1, 2)
        return add_amplitudes(rows, self.waves.to(self.weight), self.weight).permute(0, 3, 1, 2)

    def reset_parameters(self) -> None:
        """Weights with which a projection is the mean."""
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def extra_repr(self) -> str:
        parts = [repr(self.mode)]
        if self.mode in ("attention", "fourier"):
            parts.append(str(self.channels))
        if self.mode == "fourier":
            parts.append(f"orientations={self.orientations}" + (", reflections=True" if self.reflections else ""))
        return ", ".join(parts)


def learned_weights(mode: str, orientations: int) -> int:
    """How many weights a projection has for each channel; reflections do not count."""
    return {"attention": 1, "fourier": group.frequencies(orientations)}.get(mode, 0)


def highest(rows: Tensor) -> Tensor:
    """Maximum over the last axis of (..., C, N)."""
    if not is_scripting():  # noqa: SIM102  # alone: only then a script leaves out what is below
        # On a GPU a pool takes a quarter of the time that amax takes over so few orientations.
        if gpu.takes(rows) and not rows.requires_grad and MANY < rows.numel() < 2**31:
            flat = rows.reshape(1, 1, -1, rows.shape[-2] * rows.shape[-1])
            return F.max_pool2d(flat, (1, rows.shape[-1])).reshape(rows.shape[:-1])
    # amax shares the gradient among equal maxima; max would pick the first, which no rotation respects.
    return rows.amax(dim=-1)


def attend(rows: Tensor, sharpness: Tensor) -> Tensor:
    """Mean over the last axis of (..., C, N), weighted by a softmax of sharpness times value."""
    weights = torch.softmax(rows * sharpness[:, None], dim=-1)
    return (weights * rows).sum(dim=-1)


def add_amplitudes(rows: Tensor, waves: Tensor, weight: Tensor) -> Tensor:
    """Mean over the last axis of (..., C, G), and the amplitudes along it by `group.amplitude_map`, weighted."""
    parts = torch.unflatten(rows @ waves.flatten(1), -1, [waves.shape[1], waves.shape[2]])  # (..., C, P, K)
    if parts.dtype == torch.float16:
        parts = parts.float()  # whose squares are soon more than halves can tell
    amplitudes = root(parts.square().sum(dim=-2))
    return rows.mean(dim=-1) + (amplitudes * weight).sum(dim=-1).to(rows.dtype)


def orientation_field(features: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """Strength and angle of SE(2) features, both (B, C, H, W): the maximum over θ, and where along θ it lies.

    Angles are radians from 0 to 2π, counter-clockwise: by so much the kernel of a channel is turned where it answers
    most, found between orientations by `group.find_peak`. Turning the image by 90° turns the field, and adds π/2 to its
    angles; with reflections, a flip takes them to their negatives. Where all orientations answer alike the angle is 0.

    >>> lift = rp.nn.LiftConv2d(3, 16, kernel_size=5, orientations=8)
    >>> strength, angle = rp.nn.orientation_field(lift(torch.rand(1, 3, 68, 68)))
    >>> strength.shape, angle.shape
    (torch.Size([1, 16, 64, 64]), torch.Size([1, 16, 64, 64]))
    """
    expect.features(features, "orientation_field")
    if reflections and features.shape[2] % 2:
        raise ValueError(
            f"orientation_field takes an even number of entries for reflections; got {features.shape[2]} in "
            f"{tuple(features.shape)}."
        )
    strength, angle = group.find_peak(features.permute(0, 3, 4, 1, 2), reflections)
    return strength.permute(0, 3, 1, 2), angle.permute(0, 3, 1, 2)
