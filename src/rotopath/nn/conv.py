"""Fixed maps of layers, such as those that turn kernels: buffers that follow from arguments, and are not saved.

Lifting and group convolutions: rotated copies of learned base weights, applied as one ordinary convolution.
"""

import math
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath import group
from rotopath.nn import expect, gpu


class MappedModule(nn.Module):
    """A layer whose fixed maps are on the device and in the dtype of its weights.

    Where these change, a map is made from scratch, since a cast one would keep its rounding. Otherwise it stays where
    it lies in memory: a step that was recorded as a CUDA graph goes on reading it there.
    """

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[str, Callable[[], Tensor]] = {}

    def register_map(self, name: str, make: Callable[[], Tensor]) -> None:
        """Register a map under a name, once there are weights; its maker gives it on the CPU, in float64."""
        self._makers[name] = make
        self.register_buffer(name, self._make(name), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._maps()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._place(before)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # may assign weights on another device or of another dtype
        self._place(self._maps())

    def _maps(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._makers}

    def _place(self, maps: dict[str, Tensor]) -> None:
        for name, known in maps.items():
            weight = self._weight()
            stays = (known.device, known.dtype) == (weight.device, weight.dtype)
            setattr(self, name, known if stays else self._make(name))

    def _make(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # for one that is made there gradients could never be found
            return self._makers[name]().to(self._weight())

    def _weight(self) -> Tensor:
        """A parameter; or a buffer, if someone made buffers of all parameters."""
        buffers = (buffer for name, buffer in self.named_buffers() if name not in self._makers)
        return next(chain(self.parameters(), buffers))


PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
LOCAL_CORRELATION = 0.95  # of what lies under a kernel: benchmarks/initialisation.py measures it, through depth


class _RotatedConv2d(MappedModule):
    """What both convolutions share: arguments, initialisation, and the ordinary convolution underneath."""

    _reads_orientations: ClassVar[bool]
    weight: nn.Parameter
    bias: nn.Parameter | None
    rotation: Tensor

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        orientations: int,
        stride: int = 1,
        padding: int | str = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        kernel: group.Kernel = "bilinear",
        reflections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        expect.whole(self, in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size)
        expect.whole(self, stride=stride, dilation=dilation, groups=groups)
        expect.choice(self, PADDING_MODES, padding_mode=padding_mode)
        expect.choice(self, group.KERNELS, kernel=kernel)
        expect.choice(self, (False, True), reflections=reflections)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"{type(self).__name__} needs channels that groups divides; "
                f"got {in_channels} in, {out_channels} out, {groups} groups."
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.orientations = orientations
        self.stride = stride
        self.padding = self._padding_px(padding, kernel_size, stride, dilation)
        self.dilation = dilation
        self.groups = groups
        self.padding_mode = padding_mode
        self.kernel = kernel
        self.reflections = reflections
        self.order = group.order(orientations, reflections)  # entries of the orientation axis

        taps = int(group.disc(kernel_size).sum())
        axes = (self.order,) if self._reads_orientations else ()
        shape = (out_channels, in_channels // groups, *axes, taps)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_map("rotation", partial(group.rotation_map, kernel_size, orientations, kernel, reflections))
        self.reset_parameters()

    def kernels(self) -> Tensor:
        """The rotated kernels, as the weight of the equivalent `torch.nn.Conv2d` on (B, C, H, W) or (B, C·N, H, W)."""
        rotation = self.rotation.to(self.weight)
        if self._reads_orientations:
            return group.group_kernels(self.weight, rotation, self.reflections)
        return group.lift_kernels(self.weight, rotation)

    def reset_parameters(self) -> None:
        """He's rule with the fan-in that the layer really has: channels of a group, orientations, and the disc."""
        taps = group.effective_taps(self.kernel_size, self.orientations, LOCAL_CORRELATION, self.kernel)
        fan_in = math.prod(self.weight.shape[1:-1]) * taps
        nn.init.normal_(self.weight, std=math.sqrt(2 / fan_in))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        parts = [f"{self.in_channels}, {self.out_channels}", f"kernel_size={self.kernel_size}"]
        parts.append(f"orientations={self.orientations}")
        defaults = {
            "stride": 1,
            "padding": 0,
            "dilation": 1,
            "groups": 1,
            "padding_mode": "zeros",
            "kernel": "bilinear",
            "reflections": False,
        }
        parts += [f"{name}={getattr(self, name)!r}" for name, usual in defaults.items() if getattr(self, name) != usual]
        return ", ".join(parts if self.bias is not None else [*parts, "bias=False"])

    def _padding_px(self, padding: int | str, kernel_size: int, stride: int, dilation: int) -> int:
        if padding == "valid":
            return 0
        if padding == "same":
            if stride > 1:
                raise ValueError(f"{type(self).__name__} pads 'same' at stride 1 only; got stride {stride}.")
            return dilation * (kernel_size - 1) // 2
        if isinstance(padding, str):
            expect.choice(self, ("same", "valid"), padding=padding)
        expect.whole(self, least=0, padding=padding)
        return int(padding)

    def _convolve(self, x: Tensor) -> Tensor:
        """(B, C', H, W) to (B, C, N, H, W), where C' are channels, or channels by orientations."""
        expect.on_grid(x, self, self.kernel_size, self.stride, self.padding, self.dilation)
        kernels = self.kernels_for(x)
        bias = self.bias if self.bias is None else self.bias.repeat_interleave(self.order)
        padding = self.padding
        if self.padding_mode != "zeros" and padding:
            expect.paddable(x, self, padding, self.padding_mode)
            x = F.pad(x, (padding,) * 4, mode=self.padding_mode)
            padding = 0
        # The kernels lie channels-last in memory, and so will the answer: (C, N) unfolds for free, and folds again.
        y = F.conv2d(x, kernels, bias, self.stride, padding, self.dilation, self.groups)  # (B, C·N, H, W)
        return torch.unflatten(y, 1, (self.out_channels, self.order))

    def kernels_for(self, x: Tensor) -> Tensor:
        """Kernels untouched by autocast: they are turned as they are, and cast once, here or by the convolution."""
        if gpu.takes(x) and gpu.can_turn(x, self.weight, self.kernel_size) and not self._has_other_kernels():
            from rotopath.nn.triton import rotate_kernels

            dtype = gpu.precision(x, self.weight)
            with gpu.at(x):
                return rotate_kernels.rotate(self.weight, self.rotation.to(self.weight), self.reflections, dtype)
        if x.is_meta:  # the one device that has no autocast to switch off
            return self.kernels()
        with torch.autocast(x.device.type, enabled=False):
            return self.kernels()

    def _has_other_kernels(self) -> bool:
        """Whether someone makes something else of the weights."""
        return type(self).kernels is not _RotatedConv2d.kernels or "kernels" in vars(self)


class LiftConv2d(_RotatedConv2d):
    """Correlates an image with a kernel turned to N orientations: the way into SE(2).

    Arguments are those of `torch.nn.Conv2d`, each a single number, `orientations`, N, and the family of its `kernel`.
    With `reflections` the kernel is mirrored too: 2N entries in place of N, the N mirrored ones last.
    (k ⋆ f)(x, θ) = Σ_c Σ_x' k_c(R_θ⁻¹(x' - x)) f_c(x'), with (B, C, H, W) → (B, C', N, H', W').

    >>> lift = rp.nn.LiftConv2d(3, 8, kernel_size=5, orientations=4)
    >>> lift(torch.zeros(2, 3, 68, 68)).shape
    torch.Size([2, 8, 4, 64, 64])
    """

    _reads_orientations = False

    def forward(self, x: Tensor) -> Tensor:
        expect.image(x, self, self.in_channels)
        if gpu.takes(x) and gpu.can_lift(x, self):
            from rotopath.nn.triton import lift

            expect.on_grid(x, self, self.kernel_size, self.stride, self.padding)
            with gpu.at(x):
                return lift.lift(x.to(gpu.precision(x)), self.kernels_for(x), self.order)
        return self._convolve(x)


class GroupConv2d(_RotatedConv2d):
    """Correlates SE(2) features with a kernel that is turned and shifted along θ.

    Arguments are those of `torch.nn.Conv2d`, each a single number, `orientations`, N, and the family of its `kernel`.
    With `reflections` the kernel is mirrored too: 2N entries in place of N, the N mirrored ones last.
    (K ⋆ F)(x, θ) = Σ_c Σ_x' Σ_θ' K_c(R_θ⁻¹(x' - x), θ' - θ) F_c(x', θ'), with (B, C, N, H, W) → (B, C', N, H', W').

    >>> conv = rp.nn.GroupConv2d(8, 16, kernel_size=5, orientations=4)
    >>> conv(torch.zeros(2, 8, 4, 32, 32)).shape
    torch.Size([2, 16, 4, 28, 28])
    """

    _reads_orientations = True

    def forward(self, x: Tensor) -> Tensor:
        expect.features(x, self, self.in_channels, self.order)
        return self._convolve(x.flatten(1, 2))
