"""Networks that were not trained but made, to see with them what happens around a network."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotopath.models.architecture import Architecture
from rotopath.models.network import Network
from rotopath.nn import center_crop


class Eye(Network):
    """Has the sizes of a network, but answers with the brightness in the middle of each window, as a probability."""

    def __init__(self, architecture: Architecture) -> None:
        nn.Module.__init__(self)
        self.architecture, self.orientations = architecture, 1
        self.seen: list[tuple[int, int]] = []
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float() / 255
        height, width = x.shape[-2:]
        self.seen.append((height, width))
        rows, columns = self.output_size(height), self.output_size(width)
        bright = x.mean(dim=1, keepdim=True)
        if self.architecture.outputs > 1:  # one output for each pixel of the middle
            bright = center_crop(bright, rows, columns)
            return torch.cat([bright, 1 - bright, torch.ones_like(bright)], dim=1).clamp(min=1e-6).log()
        middle = self.receptive_field // 2
        pairs = (bright[..., :-1, :] + bright[..., 1:, :]) / 2
        pairs = (pairs[..., :-1] + pairs[..., 1:]) / 2  # an even window's middle lies between pixels
        return pairs[..., middle - 1 :: self.stride, middle - 1 :: self.stride][..., :rows, :columns].logit(eps=1e-6)


class Pessimist(Eye):
    """Answers with the darkest pixel of each window."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.float().mean(dim=1, keepdim=True) / (255 if x.dtype == torch.uint8 else 1)
        window = self.receptive_field - self.output_size(self.receptive_field) + 1
        darkest = -functional.max_pool2d(-bright, window, self.stride)
        if self.architecture.outputs > 1:
            return torch.cat([darkest, 1 - darkest, 1 - darkest], dim=1).clamp(min=1e-6).log()
        return darkest.logit(eps=1e-6)


class DarkEye(Eye):
    """Says that there is something where the middle of a window is dark."""

    darkest = 0.25  # of the brightness: below it there is something

    def forward(self, x: Tensor) -> Tensor:
        bright = x.float().mean(dim=1, keepdim=True) / (255 if x.dtype == torch.uint8 else 1)
        dark = (bright < self.darkest).float()
        if self.architecture.outputs == 1:
            return super().forward(dark.expand_as(x))
        self.seen.append((x.shape[-2], x.shape[-1]))
        dark = center_crop(dark, *(self.output_size(size) for size in x.shape[-2:]))
        return torch.cat([dark, torch.zeros_like(dark), 1 - dark], dim=1).clamp(min=1e-6).log()
