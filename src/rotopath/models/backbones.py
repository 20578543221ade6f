"""Well-known plain networks that recipes can name: ResNets that classify images, and a U-Net that predicts maps.

Each function returns a network of torch's layers with fresh weights. `equivariant` converts this network to SE(2,N).
The layers of the ResNets have the same names as in torchvision, so the unconverted ResNets can load torchvision's
pretrained weights.
"""

from typing import Any

import torch
from torch import Tensor, nn


def resnet18(outputs: int, width: int = 64) -> "ResNet":
    """Build a ResNet-18, which returns `outputs` logits per image. Its first layer has `width` channels."""
    return ResNet(BasicBlock, (2, 2, 2, 2), outputs, width)


def resnet34(outputs: int, width: int = 64) -> "ResNet":
    """Build a ResNet-34, which returns `outputs` logits per image. Its first layer has `width` channels."""
    return ResNet(BasicBlock, (3, 4, 6, 3), outputs, width)


def resnet50(outputs: int, width: int = 64) -> "ResNet":
    """Build a ResNet-50, which returns `outputs` logits per image. Its first layer has `width` channels."""
    return ResNet(Bottleneck, (3, 4, 6, 3), outputs, width)


def unet(outputs: int, width: int = 32, depth: int = 4) -> "UNet":
    """Build a U-Net for images (B, 3, H, W) that returns `outputs` logits for every pixel.

    The network has `depth` levels. The first level, at full resolution, has `width` channels. Each further level has
    half the resolution and twice as many channels as the level before.
    """
    return UNet(outputs, width, depth)


class ResNet(nn.Module):
    """ResNet of He et al. (2016): maps images (B, 3, H, W) to K = `outputs` logits per image, (B, K).

    `block` is the class of the residual blocks: `BasicBlock` or `Bottleneck`. `depths` are the numbers of blocks in the
    stages of the network, "layer1" to "layer4". The first layer has `width` channels.
    """

    def __init__(self, block: Any, depths: tuple[int, ...], outputs: int, width: int = 64) -> None:
        super().__init__()
        _expect_positive_integers(outputs=outputs, width=width)
        self.conv1 = nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = width
        for i, depth in enumerate(depths):
            block_width = width * 2**i
            blocks = []
            for j in range(depth):
                blocks.append(block(inputs, block_width, stride=2 if i and not j else 1))
                inputs = block_width * block.expansion
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(inputs, outputs)
        self._layers = len(depths)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self._layers):
            x = self.get_submodule(f"layer{i + 1}")(x)
        logits: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return logits


class BasicBlock(nn.Module):
    """Residual block of two 3 × 3 convolutions with a shortcut around them.

    `inputs` is the number of input channels, and `width` the number of output channels. The first convolution has the
    stride `stride`.
    """

    expansion = 1  # output channels divided by `width`

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _build_shortcut(inputs, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        activated: Tensor = self.relu(y + shortcut)
        return activated


class Bottleneck(nn.Module):
    """Residual block of a 1 × 1, a 3 × 3 and a 1 × 1 convolution with a shortcut around them.

    `inputs` is the number of input channels, and `width` the number of channels of the 3 × 3 convolution, which has the
    stride `stride`. The block has 4 · `width` output channels.
    """

    expansion = 4  # output channels divided by `width`

    def __init__(self, inputs: int, width: int, stride: int = 1) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _build_shortcut(inputs, outputs, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(y)))))
        activated: Tensor = self.relu(y + shortcut)
        return activated


class UNet(nn.Module):
    """U-Net of Ronneberger et al. (2015): maps images (B, 3, H, W) to K = `outputs` logits per pixel, (B, K, H, W).

    Convolutions are padded, so that the output has the size of the image. H and W must be multiples of
    2^(`depth` - 1). `width` is the number of channels of the first of the `depth` levels.
    """

    def __init__(self, outputs: int, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        _expect_positive_integers(outputs=outputs, width=width, depth=depth)
        widths = [width * 2**i for i in range(depth)]
        self.down = nn.ModuleList(_double_conv(i, o) for i, o in zip([3, *widths[:-1]], widths, strict=True))
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.Upsample(scale_factor=2.0, mode="bilinear") for _ in widths[1:])
        self.back = nn.ModuleList(
            _double_conv(widths[i] + widths[i - 1], widths[i - 1]) for i in range(depth - 1, 0, -1)
        )
        self.head = nn.Conv2d(width, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips: list[Tensor] = []
        for i, layers in enumerate(self.down):
            x = layers(self.pool(x) if i else x)
            skips.append(x)
        for i, (up, layers) in enumerate(zip(self.up, self.back, strict=True)):
            x = layers(torch.cat([skips[len(skips) - 2 - i], up(x)], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _build_shortcut(inputs: int, outputs: int, stride: int) -> nn.Module | None:
    """Return the layers of a shortcut: a 1 × 1 convolution and a batch norm.

    Return None if the shortcut needs no layers, because input and output of the block have the same shape.
    """
    if stride == 1 and inputs == outputs:
        return None
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))


def _double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
        nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def _expect_positive_integers(**sizes: object) -> None:
    for name, value in sizes.items():
        if type(value) is not int or value < 1:
            raise ValueError(f"The option {name!r} must be a whole number, 1 or more; got {value!r}.")
