"""Pools that blur as filters along an axis, in blocks of as many pixels as their stride.

In: a pool. Out: what each of its outputs, one a block, takes of the pixels about it.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rotopath.nn.pool import GroupAvgPool2d


class Filter(NamedTuple):
    """Windows of `size` px at every pixel, blurred by so many taps, of which one in `size` is kept."""

    size: int
    blur: int


def find_both_weights(x: Tensor, pool: Filter) -> tuple[Tensor, Tensor]:
    """Those of rows and of columns."""
    down, across = (_find_weights(pixels // pool.size, pool, x.device) for pixels in x.shape[1:3])
    return down, across


@cache
def _find_weights(blocks: int, pool: Filter, device: torch.device) -> Tensor:
    """What the output at each block along an axis takes of the pixels in it and next to it, (blocks + 2, 3 · size).

    0 beyond the rim.
    """
    few, size = min(blocks, 5), pool.size  # of more, all in the middle are alike
    pixels = few * size
    single = torch.eye(pixels, dtype=torch.float64).view(pixels, 1, 1, pixels, 1).expand(-1, -1, -1, -1, size)
    seen = GroupAvgPool2d(size, blur=pool.blur).double()(single).view(pixels, few)
    windows = F.pad(seen, (0, 0, size, size)).unfold(0, 3 * size, size)  # (blocks, outputs, 3 · size)
    weights = windows.diagonal(dim1=0, dim2=1).T  # (outputs, 3 · size)
    weights = torch.cat([weights[: few // 2], weights[few // 2].expand(blocks - few + 1, -1), weights[few // 2 + 1 :]])
    return F.pad(weights, (0, 0, 1, 1)).to(device, torch.float32).contiguous()
