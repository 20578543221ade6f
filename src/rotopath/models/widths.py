"""Numbers of channels as unknowns, which sums and skips of a network tie together, and a common factor for them.

In: the widths of a plain network, and which of them must be the same. Out: new widths, with about a given number
of weights.
"""

import math
from collections.abc import Callable, Iterable, Sequence

TOLERANCE = 0.02  # of the number of weights; beyond it single widths may differ from what the common factor makes them
FACTORS = 400  # that are tried


class Width:
    """Channels that are made, and read, together. Behind a concatenation a value has several of these."""

    def __init__(self, plain: int, scales: bool = False, fixed: bool = False) -> None:
        self.plain = plain
        self.scales = scales  # with the factor of the network, as widths of features do
        self.fixed = fixed  # as those of images and answers are, whatever else is tied to them
        self.multiple = 1
        self.parts: Channels = ()  # what it turned out to be: another width, or several

    def scaled(self, factor: float) -> int:
        if self.fixed or not self.scales:
            return self.plain
        return self.multiple * max(1, round(self.plain * factor / self.multiple))


Channels = tuple[Width, ...]


def expand(channels: Iterable[Width]) -> Channels:
    """The unknowns that are left, each in all the places where it counts."""
    return tuple(each for width in channels for each in (expand(width.parts) if width.parts else (width,)))


def plain_size(channels: Channels) -> int:
    return sum(width.plain for width in channels)


def tie(first: Channels, second: Channels) -> None:
    """Make two values equally wide, part by part; one that was made in one piece is divided where it has to be."""
    if plain_size(first) != plain_size(second):
        raise ValueError(f"it puts {plain_size(first)} channels and {plain_size(second)} together")
    while first := expand(first):
        second = expand(second)
        one, other = sorted((first[0], second[0]), key=lambda width: width.plain)
        if one is not other:
            rest = other.plain - one.plain
            for left in (one, other):
                one.scales, one.fixed = one.scales or left.scales, one.fixed or left.fixed
                one.multiple = math.lcm(one.multiple, left.multiple)
            other.parts = (one, _like(other, rest)) if rest else (one,)
        first, second = expand(first), expand(second)
        first, second = first[1:], second[1:]


def _like(width: Width, plain: int) -> Width:
    part = Width(plain, width.scales, width.fixed)
    part.multiple = width.multiple
    return part


def scale(widths: Sequence[Width], factor: float) -> dict[Width, int]:
    return {width: width.scaled(factor) for width in widths}


def keep_weights(
    widths: Sequence[Width], count: Callable[[dict[Width, int]], int], target: int, least: float
) -> dict[Width, int]:
    """Widths with about as many weights as `target`: all by one factor, from `least` to 1, if that comes near enough.

    If it does not, as in small networks, where a channel more in every layer is many weights, the largest ones that
    stay below are widened here and there.
    """
    factors = [least ** (i / FACTORS) for i in range(FACTORS + 1)]  # falling
    counted = [(count(chosen), chosen) for chosen in (scale(widths, factor) for factor in factors)]
    weights, best = min(counted, key=lambda each: abs(each[0] - target))
    if abs(weights - target) <= TOLERANCE * target:
        return best
    below = next((chosen for weights, chosen in counted if weights <= target), best)
    for width in sorted(widths, key=lambda width: -width.plain):
        if width.scales and not width.fixed:
            wider = below | {width: below[width] + width.multiple}
            if count(wider) <= target:
                below = wider
    return min(best, below, key=lambda chosen: abs(count(chosen) - target))
