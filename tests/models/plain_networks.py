"""Plain CNNs as users write them: a ResNet, a DenseNet, and U-Nets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


class ResNet18(nn.Module):
    def __init__(self, widths: tuple[int, ...] = (64, 128, 256, 512), classes: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, widths[0], 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        inputs = widths[0]
        for i, width in enumerate(widths):
            layers = [BasicBlock(inputs if j == 0 else width, width, 2 if i and j == 0 else 1) for j in range(blocks)]
            self.add_module(f"layer{i + 1}", nn.Sequential(*layers))
            inputs = width
        self.stages = len(widths)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for i in range(self.stages):
            x = self.get_submodule(f"layer{i + 1}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int, growth: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, 4 * growth, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(4 * growth)
        self.conv2 = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)
        self.dropout = dropout

    def forward(self, features: list[Tensor]) -> Tensor:
        x = torch.cat(features, 1)
        x = self.conv1(F.relu(self.norm1(x), inplace=True))
        x = self.conv2(F.relu(self.norm2(x), inplace=True))
        return F.dropout2d(x, self.dropout, training=self.training)


class DenseNet(nn.Module):
    def __init__(self, growth: int = 12, blocks: tuple[int, ...] = (3, 4), classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 2 * growth, 3, padding=1, bias=False)
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        width = 2 * growth
        for count in blocks:
            self.blocks.append(nn.ModuleList(DenseLayer(width + i * growth, growth, 0.1) for i in range(count)))
            width += count * growth
            self.transitions.append(nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1)))
            width //= 2
        self.norm = nn.BatchNorm2d(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layers, transition in zip(self.blocks, self.transitions, strict=True):
            features = [x]
            for layer in layers:
                features.append(layer(features))
            x = F.avg_pool2d(transition(torch.cat(features, 1)), 2)
        x = F.relu(self.norm(x))
        x = F.adaptive_avg_pool2d(x, (1, 1)).view(x.size(0), -1)
        return self.classifier(x)


def double_conv(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class UNet(nn.Module):
    """With transposed convolutions, or with bilinear resizing to the size of the skip connection."""

    def __init__(self, width: int = 24, classes: int = 3, transposed: bool = True) -> None:
        super().__init__()
        self.level1, self.level2 = double_conv(3, width), double_conv(width, 2 * width)
        self.level3 = double_conv(2 * width, 4 * width)
        self.pool = nn.MaxPool2d(2)
        self.transposed = transposed
        if transposed:
            self.up2 = nn.ConvTranspose2d(4 * width, 2 * width, 2, stride=2)
            self.up1 = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.back2 = double_conv((4 if transposed else 6) * width, 2 * width)
        self.back1 = double_conv((2 if transposed else 3) * width, width)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.level1(x)
        skip2 = self.level2(self.pool(skip1))
        x = self.level3(self.pool(skip2))
        x = self.back2(torch.cat([skip2, self._enlarge(x, skip2, "up2")], dim=1))
        x = self.back1(torch.cat([skip1, self._enlarge(x, skip1, "up1")], dim=1))
        return self.out(x)

    def _enlarge(self, x: Tensor, skip: Tensor, name: str) -> Tensor:
        if self.transposed:
            return self.get_submodule(name)(x)
        return F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=True)
