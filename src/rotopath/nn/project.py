"""The way out of SE(2): from features over positions and orientations to maps over positions."""

from torch import Tensor, nn

from rotopath.nn import expect


class Project(nn.Module):
    """Maximum or mean over orientations. (B, C, N, H, W) → (B, C, H, W), turning with the input and no more.

    >>> project = rp.nn.Project("max")
    >>> project(torch.zeros(2, 16, 8, 20, 20)).shape
    torch.Size([2, 16, 20, 20])
    """

    def __init__(self, mode: str = "max") -> None:
        super().__init__()
        expect.choice(self, ("max", "mean"), mode=mode)
        self.mode = mode

    def forward(self, x: Tensor) -> Tensor:
        expect.features(x, self)
        # amax shares the gradient among equal maxima; max would pick the first, which no rotation respects.
        return x.amax(dim=2) if self.mode == "max" else x.mean(dim=2)

    def extra_repr(self) -> str:
        return repr(self.mode)
