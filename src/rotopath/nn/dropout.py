"""Dropout that leaves the symmetry alone: a channel goes with all its orientations and positions."""

from torch import Tensor, nn

from rotopath.nn import expect


class GroupDropout2d(nn.Dropout3d):
    """Zeroes whole fields: a channel of a sample in all orientations and positions, with probability p.

    >>> drop = rp.nn.GroupDropout2d(0.5)
    >>> drop(torch.ones(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        expect.features(input, self)
        return super().forward(input)
