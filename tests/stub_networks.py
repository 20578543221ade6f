"""Networks with known outputs instead of learned ones, for tests of everything around a network."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from rotopath.models.architecture import Architecture
from rotopath.models.network import Network
from rotopath.nn import center_crop


class BrightnessNetwork(Network):
    """Predicts, as a probability, the brightness at the center of each window; sizes are those of the architecture."""

    def __init__(self, architecture: Architecture) -> None:
        nn.Module.__init__(self)
        self.architecture, self.orientations = architecture, 1
        self.input_sizes: list[tuple[int, int]] = []  # height and width of each image that came in
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.uint8:
            x = x.float() / 255
        height, width = x.shape[-2:]
        self.input_sizes.append((height, width))
        rows, columns = self.output_size(height), self.output_size(width)
        bright = x.mean(dim=1, keepdim=True)
        if self.architecture.outputs > 1:  # one output for each pixel of the center
            bright = center_crop(bright, rows, columns)
            return torch.cat([bright, 1 - bright, torch.ones_like(bright)], dim=1).clamp(min=1e-6).log()
        center = self.receptive_field // 2
        pairs = (bright[..., :-1, :] + bright[..., 1:, :]) / 2
        pairs = (pairs[..., :-1] + pairs[..., 1:]) / 2  # the center of a window of even size is between pixels
        return pairs[..., center - 1 :: self.stride, center - 1 :: self.stride][..., :rows, :columns].logit(eps=1e-6)


class DarkestPixelNetwork(BrightnessNetwork):
    """Predicts the brightness of the darkest pixel in each window."""

    def forward(self, x: Tensor) -> Tensor:
        bright = x.float().mean(dim=1, keepdim=True) / (255 if x.dtype == torch.uint8 else 1)
        window = self.receptive_field - self.output_size(self.receptive_field) + 1
        darkest = -functional.max_pool2d(-bright, window, self.stride)
        if self.architecture.outputs > 1:
            return torch.cat([darkest, 1 - darkest, 1 - darkest], dim=1).clamp(min=1e-6).log()
        return darkest.logit(eps=1e-6)


class DarkRegionNetwork(BrightnessNetwork):
    """Predicts an object wherever the center of a window is dark."""

    darkest = 0.25  # brightness below which there is an object

    def forward(self, x: Tensor) -> Tensor:
        bright = x.float().mean(dim=1, keepdim=True) / (255 if x.dtype == torch.uint8 else 1)
        dark = (bright < self.darkest).float()
        if self.architecture.outputs == 1:
            return super().forward(dark.expand_as(x))
        self.input_sizes.append((x.shape[-2], x.shape[-1]))
        dark = center_crop(dark, *(self.output_size(size) for size in x.shape[-2:]))
        return torch.cat([dark, torch.zeros_like(dark), 1 - dark], dim=1).clamp(min=1e-6).log()
