"""Building blocks of timm and torchvision, written by hand in their ways, are converted, frozen and copied exactly."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import rotopath as rp
from rotopath.models.convert import nearest_sizes
from rotopath.models.convert.tracing import make_square

C = 8


class NormAct(nn.BatchNorm2d):
    """Norm with an activation, as timm's BatchNormAct2d: `forward` is not that of torch."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.ndim == 4, f"expected 4D input (got {x.ndim}D input)")
        if self.training:
            self.num_batches_tracked.add_(1)
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, self.training, self.momentum, self.eps
        )
        return self.act(self.drop(x))


class Conv2dSame(nn.Conv2d):
    """Padding of TensorFlow, which depends on the size of the image."""

    def forward(self, x: Tensor) -> Tensor:
        pads = []
        for size, kernel, stride in zip(reversed(x.shape[-2:]), self.kernel_size, self.stride, strict=True):
            total = max((-(size // -stride) - 1) * stride + kernel - size, 0)
            pads += [total // 2, total - total // 2]
        return F.conv2d(F.pad(x, pads), self.weight, self.bias, self.stride)


class DropPath(nn.Module):
    def __init__(self, drop_prob: float = 0.5) -> None:
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.drop_prob)


class ConvNeXtBlock(nn.Module):
    """Channels-last maps, LayerNorm and Linear, a learned scale of shape (C,), and drop path."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 3, padding=1, groups=C), nn.LayerNorm(C)
        self.fc1, self.fc2 = nn.Linear(C, 2 * C), nn.Linear(2 * C, C)
        self.gamma = nn.Parameter(torch.rand(C))
        self.drop_path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x).permute(0, 2, 3, 1))
        y = self.fc2(F.gelu(self.fc1(y))).permute(0, 3, 1, 2)
        return x + self.drop_path(y.mul(self.gamma.reshape(1, -1, 1, 1)))


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(C, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class SqueezeExcite(nn.Module):
    """Gate with Linear on vectors, and `view` to and from maps."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Linear(C, 4), nn.ReLU(), nn.Linear(4, C), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        b, c, _, _ = x.size()
        return x * self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1).expand_as(x)


class CBAM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(C, 2, 1), nn.Conv2d(2, C, 1)
        self.conv = nn.Conv2d(2, 1, 7, padding=3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        mean, peak = (self.fc2(self.fc1(s).relu()) for s in (x.mean((2, 3), True), x.amax((2, 3), True)))
        x = x * (mean + peak).sigmoid()
        where = torch.cat([x.mean(dim=1, keepdim=True), x.max(dim=1, keepdim=True)[0]], dim=1)
        return x * self.conv(where).sigmoid()


class Shuffle(nn.Module):
    """Two branches, of which one is convolved, and a channel shuffle, as in ShuffleNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(C // 2, C // 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=1)
        x = torch.cat((first, self.conv(second)), dim=1)
        b, c, h, w = x.shape
        return x.view(b, 2, c // 2, h, w).transpose(1, 2).contiguous().view(b, -1, h, w)


class Split(nn.Module):
    """Parts of different widths, and a slice, as in Res2Net and GhostNet."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cheap = nn.Conv2d(3, 3, 3, padding=1), nn.Conv2d(C, C, 3, padding=1, groups=C)

    def forward(self, x: Tensor) -> Tensor:
        first, second = torch.split(x, [3, C - 3], 1)
        y = torch.cat([self.conv(first), second], 1)
        return torch.cat([y, self.cheap(y)], dim=1)[:, : C + 2, :, :][:, 2:]


class BlurPool(nn.Module):
    """Anti-aliased subsampling, with reflected borders."""

    def __init__(self) -> None:
        super().__init__()
        taps = torch.tensor([1.0, 2.0, 1.0])
        self.register_buffer("filt", (torch.outer(taps, taps) / 16).expand(C, 1, 3, 3).clone())

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, [1] * 4, mode="reflect"), self.filt, stride=2, groups=x.shape[1])


class Pyramid(nn.Module):
    """Maps of two sizes, the coarse one resized to the fine one, as in feature pyramids."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.lateral = nn.Conv2d(C, C, 3, stride=2, padding=1), nn.Conv2d(C, C, 1)

    def forward(self, x: Tensor) -> Tensor:
        coarse = self.down(x)
        return self.lateral(x) + F.interpolate(coarse, size=x.shape[-2:], mode="bilinear")


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.LazyConv2d(C, 3, padding=1), nn.LazyBatchNorm2d()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def norm_act_conv() -> nn.Module:
    return nn.Sequential(NormAct(C), nn.Conv2d(C, C, 3, padding=1))


# Name of the block → the block (C channels to C channels), and whether its weights can be copied.
BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "norm with activation": norm_act_conv,
    "padding of TensorFlow": lambda: Conv2dSame(C, C, 3, stride=2),
    "ConvNeXt": ConvNeXtBlock,
    "layer scale": LayerScale,
    "layer norm": lambda: LayerNorm2d(C),
    "squeeze and excitation": SqueezeExcite,
    "CBAM": CBAM,
    "shuffle": Shuffle,
    "split": Split,
    "blur pool": BlurPool,
    "pyramid": Pyramid,
    "sync batch norm": lambda: nn.SyncBatchNorm(C),
    "reflection padding": lambda: nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(C, C, 3)),
    "dilation": lambda: nn.Conv2d(C, C, 3, padding=2, dilation=2),
    "1x7 and 7x1": lambda: nn.Sequential(
        nn.Conv2d(C, C, (1, 7), padding=(0, 3)), nn.Conv2d(C, C, (7, 1), padding=(3, 0))
    ),
    "patches": lambda: nn.Conv2d(C, C, 3, stride=3, padding=1),
    "even kernel": lambda: nn.Conv2d(C, C, 2),
    "transposed": lambda: nn.ConvTranspose2d(C, C, 4, stride=2, padding=1, groups=2),
    "upsample to a size": lambda: nn.Upsample(size=26, mode="bilinear"),
    "group norm": lambda: nn.GroupNorm(2, C),
    "adaptive pool": lambda: nn.AdaptiveMaxPool2d(5),
}
HEADS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(C, 3)),
    "two layers": lambda: nn.Sequential(
        nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(C, 6), nn.Hardswish(), nn.Dropout(0.2), nn.Linear(6, 3)
    ),
    "of VGG": lambda: nn.Sequential(
        nn.AdaptiveAvgPool2d(3), nn.Flatten(), nn.Linear(9 * C, 6), nn.ReLU(), nn.Dropout(), nn.Linear(6, 3)
    ),
    "of SqueezeNet": lambda: nn.Sequential(nn.Conv2d(C, 3, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "dense": lambda: nn.Conv2d(C, 3, 1),
}


def build(block: nn.Module, head: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, C, 3, padding=1), nn.BatchNorm2d(C), nn.ReLU(), block, head)
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in net.parameters()):
        return net
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d | nn.SyncBatchNorm):
            module.running_mean.normal_(std=0.3)
            module.running_var.uniform_(0.5, 2)
    return net.double().eval()


def mean_over_rotations(net: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    outputs = [net(x.rot90(i, (2, 3))) for i in range(4)]
    return torch.stack([y.rot90(-i, (2, 3)) if y.ndim == 4 else y for i, y in enumerate(outputs)]).mean(dim=0)


def images() -> Tensor:
    return torch.rand(2, 3, 13, 13, dtype=torch.float64)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_of_other_libraries_are_exact_and_can_be_frozen(name: str) -> None:
    net = rp.equivariant(build(BLOCKS[name](), HEADS["linear"]()), 4)
    x = images()
    assert rp.equivariance_error(net, x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), net(x))
    assert rp.equivariance_error(net.train(), x) < 1e-10


@pytest.mark.parametrize(("block", "head"), [*((block, "dense") for block in BLOCKS), *(("CBAM", h) for h in HEADS)])
def test_copied_weights_start_as_the_mean_over_four_rotations(block: str, head: str) -> None:
    plain = build(BLOCKS[block](), HEADS[head]())
    net = rp.equivariant(plain, 4, weights="copy")
    x = images()
    expected = mean_over_rotations(plain, x)
    torch.testing.assert_close(net(x), expected, rtol=1e-9, atol=1e-12)
    assert rp.equivariance_error(net, x) < 1e-10
    torch.testing.assert_close(rp.freeze(net)(x), expected)
    assert not torch.allclose(plain(x), expected, rtol=1e-4), "the plain network does not depend on the rotation"


def test_copied_weights_with_reflections_are_the_mean_over_eight_symmetries() -> None:
    plain = build(CBAM(), HEADS["two layers"]())
    x = images()
    expected = (mean_over_rotations(plain, x) + mean_over_rotations(plain, x.flip(-1))) / 2
    torch.testing.assert_close(rp.equivariant(plain, 4, weights="copy", reflections=True)(x), expected)


def test_copied_networks_can_be_trained_and_orientations_then_read_each_other() -> None:
    net = rp.equivariant(build(norm_act_conv(), HEADS["linear"]()), 4, weights="copy").train()
    conv = net.get_submodule("3.1")
    assert not conv.weight[:, :, 1:].any()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net(images()).square().sum().backward()
    optimizer.step()
    assert conv.weight[:, :, 1:].any()
    assert rp.equivariance_error(net.eval(), images()) < 1e-10


def test_kernels_that_a_family_cannot_represent_are_not_copied() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 4, 5), nn.Conv2d(4, 4, 3))
    with pytest.raises(
        ValueError, match=r"'0' \(Conv2d\): its kernel of 5 × 5 px cannot be copied, .* kernel='square'"
    ):
        rp.equivariant(plain, 4, weights="copy", kernel="harmonic")
    net = rp.equivariant(plain[1:], 4, weights="copy", kernel="harmonic")
    x = torch.rand(1, 4, 9, 9)
    torch.testing.assert_close(net(x), mean_over_rotations(plain[1:], x), rtol=1e-4, atol=1e-5)
    for wrong in ({"keep": "weights"}, {"projection": "max"}, {"strides": "pool"}, {"preset": "faithful"}):
        with pytest.raises(ValueError, match="with weights='copy' needs keep='channels'"):
            rp.equivariant(plain, 4, weights="copy", **wrong)


def test_lazy_layers_get_their_weights() -> None:
    with pytest.raises(
        ValueError, match=r"'0\.conv': it is lazy and has no weights yet; run the network once on an image"
    ):
        rp.equivariant(nn.Sequential(Lazy(), nn.Conv2d(9, 3, 3)), 4)
    net = rp.equivariant(nn.Sequential(Lazy(), nn.Conv2d(C, 3, 3)), 4).eval()
    assert rp.equivariance_error(net, torch.rand(1, 3, 9, 9)) < 1e-5


def test_a_square_kernel_computes_the_same() -> None:
    for size, padding in (((1, 7), (0, 3)), ((5, 1), (2, 0)), ((3, 5), (0, 1))):
        conv = nn.Conv2d(2, 4, size, padding=padding, dilation=1)
        square = make_square(conv)
        x = torch.rand(1, 2, 9, 9)
        assert len(set(square.kernel_size)) == 1
        torch.testing.assert_close(square(x), conv(x))


# Sizes


@pytest.mark.parametrize("strides", ["keep", "pool"])
def test_the_sizes_that_an_error_proposes_work(strides: str) -> None:
    layers = [nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), nn.Conv2d(8, 8, 3, 2, 1), nn.MaxPool2d(2, 2)]
    net = rp.equivariant(nn.Sequential(*layers), 4, strides=strides)
    with pytest.raises(ValueError, match=r"does not accept images of 39 × 39 px, because of ") as error:
        net(torch.zeros(1, 3, 39, 39))
    proposed = nearest_sizes(net, torch.zeros(1, 3, 39, 39), 39)
    assert str(error.value).endswith(f"or use {proposed[0]} or {proposed[1]} px.")
    assert f"strides={'pool' if strides == 'keep' else 'keep'!r}" in str(error.value)
    assert proposed == ([25, 41] if strides == "keep" else [32, 48])
    for size in proposed:
        assert net(torch.zeros(1, 3, size, size)).shape[-1] == net(torch.zeros(1, 3, size, size)).shape[-2]


# Refused


class Wrong(nn.BatchNorm2d):
    """Derived from a batch norm, but computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class WindowAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(C, 3 * C)

    def forward(self, x: Tensor) -> Tensor:
        return x


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight - self.weight.mean((1, 2, 3), keepdim=True), None, padding=1)


@pytest.mark.parametrize(
    ("block", "sentence"),
    [
        (Wrong(C), r"'1': Wrong does not compute the same as BatchNorm2d, from which it is derived; replace it"),
        (WindowAttention(), r"because 1 \(WindowAttention\) is attention between positions, which has no SE\(2\)"),
        (nn.MultiheadAttention(C, 2), r"because 1 \(MultiheadAttention\) is attention between positions"),
        (Standardized(C, C, 3), r"'conv2d' in 1: its weights are computed .* weight standardization; use Conv2d"),
        (nn.ZeroPad2d((0, 1, 0, 1)), r"it pads by \(0, 1, 0, 1\) px .* not symmetric under rotation"),
        (nn.PixelShuffle(2), r"'1' \(PixelShuffle\): PixelShuffle has no SE\(2\) counterpart"),
    ],
    ids=lambda value: None if isinstance(value, str) else type(value).__name__,
)
def test_blocks_without_counterpart_are_refused_in_one_sentence(block: nn.Module, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as error:
        rp.equivariant(nn.Sequential(nn.Conv2d(3, C, 3, padding=1), block), 4)
    assert str(error.value).count("\n") == 0


# Presets and reports


def test_the_faithful_preset_is_exact_and_rotates_better_between_right_angles() -> None:
    layers = [nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, 2, 1), nn.ReLU()]
    plain = nn.Sequential(*layers, nn.Conv2d(8, 2, 1))
    x = rp.metrics.smooth_images(2, 32)
    errors = {}
    for preset in ("paper", "faithful"):
        torch.manual_seed(0)
        net = rp.equivariant(plain, 8, preset=preset, strides="pool")
        assert rp.equivariance_error(net, x) < 1e-5
        torch.testing.assert_close(rp.freeze(net)(x), net(x), rtol=1e-4, atol=1e-5)
        errors[preset] = rp.equivariance_error(net, x, 45)
    assert errors["faithful"] < 0.5 * errors["paper"]


def test_a_conversion_report_counts_weights_multiplications_and_memory() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
    net = rp.equivariant(plain, 4, keep="channels")
    report = rp.conversion_report(plain, net, torch.rand(2, 3, 10, 10))
    assert report.plain.weights == 3 * 8 * 9 + 8 + 8 * 2 + 2
    assert report.plain.multiplications == 64 * (3 * 8 * 9 + 8 * 2)
    assert report.converted.multiplications == 64 * (4 * 3 * 8 * 9 + 8 * 2)  # the last layer comes after the projection
    assert report.plain.map_bytes == 4 * 64 * (8 + 8 + 2)
    assert report.converted.error_90 < 1e-5 < 1e-2 < report.plain.error_90
    assert str(report).splitlines()[0].split() == ["images", "of", "10", "×", "10", "px", "plain", "converted"]
    assert "× 3.8" in str(report).splitlines()[2]
