"""What may be done to a kernel: N turns, and with reflections as many turns of its mirror image.

Entry i of an orientation axis is Rᵢ, the turn by θᵢ; entry N + i is Rᵢ M, which mirrors left and right first. As
M Rⱼ = R₋ⱼ M, these 2N are a group: the symmetries of a polygon with N corners, the dihedral group.
"""

import torch
from torch import Tensor

from rotopath.group.grid import check_orientations


def order(orientations: int, reflections: bool = False) -> int:
    """How many entries the orientation axis has.

    >>> rp.group.order(8), rp.group.order(8, reflections=True)
    (8, 16)
    """
    check_orientations(orientations)
    return 2 * orientations if reflections else orientations


def products(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """The table of the group, (G, G): which entry is g after h, from Rᵢ Mᵐ Rⱼ Mⁿ = R_{i ± j} Mᵐ⁺ⁿ, minus where m is 1.

    >>> rp.group.products(1, reflections=True).tolist()
    [[0, 1], [1, 0]]
    """
    entries = torch.arange(order(orientations, reflections), device=device)
    turn, mirrored = entries % orientations, entries // orientations
    sign = 1 - 2 * mirrored
    turns = (turn[:, None] + sign[:, None] * turn[None, :]) % orientations
    return turns + orientations * ((mirrored[:, None] + mirrored[None, :]) % 2)


def inverses(orientations: int, reflections: bool = False, device: torch.device | None = None) -> Tensor:
    """Which entry undoes which, (G,): the turn back; a mirrored one undoes itself."""
    entries = torch.arange(order(orientations, reflections), device=device)
    return torch.where(entries < orientations, -entries % orientations, entries)


def orientation_shift(orientations: int, device: torch.device | None = None, reflections: bool = False) -> Tensor:
    """The θ part of the shift-twist, (G, G): output entry g reads input h with kernel slice g⁻¹h.

    For turns alone that is (j - i) mod N.
    """
    return products(orientations, reflections, device)[inverses(orientations, reflections, device)]
