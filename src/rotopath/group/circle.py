"""Values at N angles around a circle: the waves that they consist of, and where they are largest.

In: features whose last axis is that of orientations, mirrored ones perhaps behind the others. Out: what stays the same
when the axis shifts, and an angle that shifts along; and the angle at which a kernel itself lies.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from rotopath.group.grid import check_orientations


def frequencies(orientations: int) -> int:
    """How many waves along θ are told apart: those that N orientations sample four times or more, k = 1 … ⌊N/4⌋.

    Faster ones, up to N/2, are as exact at steps of the group, but change their amplitudes in between.
    """
    check_orientations(orientations)
    return orientations // 4


def amplitude_map(orientations: int, reflections: bool = False) -> Tensor:
    """The map from G entries to parts of the waves of K frequencies along θ, (G, P, K): cosines and sines.

    Squares, summed over P, are squared amplitudes: a² for a cos(kθ - φ), whatever φ. A shift of the axis turns cosines
    and sines into each other, and leaves the sum. With reflections it is the mean over both halves, which a flip swaps.

    >>> values = 3 * torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> parts = torch.einsum("g,gpk->pk", values.double(), rp.group.amplitude_map(8))
    >>> [round(float(amplitude), 4) for amplitude in parts.square().sum(0).sqrt()]
    [3.0, 0.0]
    """
    turns = torch.arange(orientations, device="cpu")
    waves = torch.arange(1, frequencies(orientations) + 1, device="cpu")
    # Reduced to one turn first, so that equal angles are equal numbers.
    angles = 2 * math.pi / orientations * (turns[:, None] * waves % orientations).double()  # (N, K)
    parts = torch.stack([angles.cos(), angles.sin()], dim=1) * (2 / orientations)  # (N, 2, K)
    if not reflections:
        return parts
    mapped = parts.new_zeros(2 * orientations, 2, 2, len(waves))  # of which half, cosine and sine
    mapped[:orientations, 0] = mapped[orientations:, 1] = parts / math.sqrt(2)
    return mapped.flatten(1, 2)


def find_peak(values: Tensor, reflections: bool = False) -> tuple[Tensor, Tensor]:
    """The largest of values (..., G), and the angle from 0 to 2π at which it lies, between the samples.

    The angle is the crest of the wave b + a cos(θ - φ) through the largest value and its two neighbours. Of a wave it
    is exact, it is never farther than half a step from the largest value, and it shifts along with the axis. Of fewer
    than three orientations it is that of the largest value, and of values that are all the same it is 0.

    >>> values = 1 + torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> round(float(rp.group.find_peak(values)[1]), 4)
    0.7
    """
    halves = torch.unflatten(values, -1, (2 if reflections else 1, -1))  # (..., 1 or 2, N)
    orientations = halves.shape[-1]
    step = 2 * math.pi / orientations
    tops, at = halves.max(dim=-1, keepdim=True)  # (..., 1 or 2, 1)
    angles = at.to(values) * step  # which would be float32 otherwise
    if orientations > 2:
        before, after = (halves.gather(-1, (at + by) % orientations) for by in (-1, 1))
        slope = (after - before) / (2 * math.sin(step))
        bend = (2 * tops - before - after) / (2 - 2 * math.cos(step))
        angles = angles + torch.atan2(slope, bend)
    higher = tops.argmax(dim=-2, keepdim=True)
    angle = angles.gather(-2, higher)[..., 0, 0] % (2 * math.pi)
    largest = values.amax(dim=-1)  # shares the gradient among equal ones
    return largest, torch.where(largest > values.amin(dim=-1), angle, torch.zeros_like(angle))


def line_angle(kernel: Tensor) -> Tensor:
    """How far the lines and edges that a kernel (..., C, S, S) looks for are turned from upright, in radians (...).

    Half the angle of Σ (∂ₓk + i ∂ᵧk)², over channels and positions: from -π/2 to π/2, as lines have no direction.

    >>> bar = torch.tensor([[[0.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 1.0, 0.0]]])
    >>> [round(float(rp.group.line_angle(turned).rad2deg())) for turned in (bar, bar.mT, torch.eye(3)[None])]
    [0, 90, 45]
    """
    around = functional.pad(kernel, (1, 1, 1, 1))
    rightwards = around.roll(-1, -1) - around.roll(1, -1)
    upwards = around.roll(1, -2) - around.roll(-1, -2)
    along, between = rightwards.square() - upwards.square(), 2 * rightwards * upwards
    return torch.atan2(between.sum((-3, -2, -1)), along.sum((-3, -2, -1))) / 2


def describe_line(angle: float) -> tuple[float, float, float]:
    """Of a line turned by so many radians from upright: the part of half a turn, and how far it leans right and up.

    >>> [round(each, 3) for each in rp.group.describe_line(1.25 * torch.pi)]
    [0.25, -0.707, 0.707]
    """
    turn = angle % math.pi
    return turn / math.pi, -math.sin(turn), math.cos(turn)
