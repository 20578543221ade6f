"""Values at N angles around a circle: the waves that they consist of, and where they are largest.

In: features whose last axis is that of orientations, mirrored ones perhaps behind the others. Out: what stays the same
when the axis shifts, and an angle that shifts along.
"""

import math

import torch
from torch import Tensor

from rotopath.group.elements import order


def amplitude_map(orientations: int, reflections: bool = False) -> Tensor:
    """The map from G entries to parts of the waves of K = ⌊N/2⌋ frequencies, (G, P, K): cosines and sines.

    Squares, summed over P, are squared amplitudes: a² for a cos(kθ - φ), whatever φ. A shift of the axis turns cosines
    and sines into each other, and leaves the sum. With reflections it is the mean over both halves, which a flip swaps.

    >>> values = 3 * torch.cos(2 * torch.pi / 8 * torch.arange(8) - 0.7)
    >>> parts = torch.einsum("g,gpk->pk", values.double(), rp.group.amplitude_map(8))
    >>> [round(float(amplitude), 4) for amplitude in parts.square().sum(0).sqrt()]
    [3.0, 0.0, 0.0, 0.0]
    """
    entries = order(orientations, reflections)
    turns = torch.arange(orientations, device="cpu")
    frequencies = torch.arange(1, orientations // 2 + 1, device="cpu")
    # Reduced to one turn first, so that equal angles are equal numbers.
    angles = 2 * math.pi / orientations * (turns[:, None] * frequencies % orientations).double()  # (N, K)
    waves = torch.stack([angles.cos(), angles.sin()], dim=1) * (2 / orientations)  # (N, 2, K)
    if orientations % 2 == 0:
        waves[..., -1] /= 2  # the fastest wave has no sine, and its cosine counts fully at every angle
    if not reflections:
        return waves
    mapped = waves.new_zeros(entries, 2, 2, orientations // 2)  # of which half, cosine and sine
    mapped[:orientations, 0] = mapped[orientations:, 1] = waves / math.sqrt(2)
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
