"""Lifting and group convolution.

Both layers rotate their learned kernels to N orientations and apply all copies in one ordinary convolution.
`rotopath.group.kernel_families` computes the rotated kernels from the learned base weights.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, ClassVar, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode  # private; tested in tests/nn/test_fuse.py

from rotopath import group
from rotopath.nn import fuse, triton
from rotopath.nn.features import (
    channels_last_strides,
    check_choice,
    check_features,
    check_grid,
    check_image,
    check_padding,
    check_whole_number,
    is_being_recorded,
    is_channels_last,
    merge_orientations,
    split_orientations,
)

PADDING_MODES = ("zeros", "reflect", "replicate", "circular")
LOCAL_CORRELATION = 0.95  # typical correlation of the pixels under a kernel; measured by benchmarks/initialisation.py


class MappedModule(nn.Module):
    """Layer with constant matrices (*maps*), such as the matrix that rotates kernels.

    Maps are buffers on the device and in the data type of the weights. They are not saved. When the device or the data
    type of the weights changes, maps are computed again: casting a map would keep the rounding errors of the old data
    type. Otherwise maps keep their memory address, because recorded CUDA graphs read from that address.
    """

    def __init__(self) -> None:
        super().__init__()
        self._makers: dict[str, Callable[[], Tensor]] = {}

    def register_map(self, name: str, make: Callable[[], Tensor]) -> None:
        """Add a map as the buffer `name`. `make` is a function that returns the map in float64 on the CPU.

        Create the weights of the layer first, because the buffer gets their device and data type.
        """
        self._makers[name] = make
        self.register_buffer(name, self._make(name), persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        before = self._maps()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._update_maps(before)
        return self

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # may replace the device or data type of the weights
        self._update_maps(self._maps())

    def _maps(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self._makers}

    def _update_maps(self, maps: dict[str, Tensor]) -> None:
        """Set the buffers to the tensors of `maps` (name: map), but compute a map again if it does not fit the weights.

        A map fits if it has the device and the data type of the weights.
        """
        for name, current in maps.items():
            weight = self._weight()  # inside the loop, because a layer without maps may have no weights
            matches = (current.device, current.dtype) == (weight.device, weight.dtype)
            setattr(self, name, current if matches else self._make(name))

    def _make(self, name: str) -> Tensor:
        with torch.inference_mode(False):  # an inference tensor could not be used in training later
            return self._makers[name]().to(self._weight())

    def _weight(self) -> Tensor:
        """Return a tensor that has the device and the data type of the weights.

        It is any parameter or, if all parameters were converted to buffers, any buffer that is not a map.
        """
        buffers = (buffer for name, buffer in self.named_buffers() if name not in self._makers)
        return next(chain(self.parameters(), buffers))


class _RotatedConv2d(MappedModule):
    """Base class of lifting and group convolution: arguments, initialization, rotated kernels and convolution."""

    _reads_orientations: ClassVar[bool]  # whether the input has an orientation axis
    weight: nn.Parameter
    bias: nn.Parameter | None
    rotation: Tensor
    _stored: "_StoredKernels | None" = None  # kernels of the last call on the CPU

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
        pool: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_whole_number(self, in_channels=in_channels, out_channels=out_channels, kernel_size=kernel_size)
        check_whole_number(self, stride=stride, dilation=dilation, groups=groups, pool=pool)
        check_choice(self, PADDING_MODES, padding_mode=padding_mode)
        check_choice(self, group.KERNELS, kernel=kernel)
        check_choice(self, (False, True), reflections=reflections)
        if in_channels % groups or out_channels % groups:
            raise ValueError(
                f"The numbers of channels of {type(self).__name__} must be multiples of the number of groups; "
                f"got {in_channels} input channels, {out_channels} output channels and {groups} groups."
            )
        if pool > 1 and (stride > 1 or dilation > 1):
            raise ValueError(
                f"{type(self).__name__} with pool={pool} needs stride=1 and dilation=1; got stride={stride} and "
                f"dilation={dilation}. Put a GroupAvgPool2d behind the layer instead."
            )
        self.in_channels = in_channels
        self.out_channels = out_channels
        self.kernel_size = kernel_size
        self.orientations = orientations
        self.stride = stride
        self.pool = pool
        self.padding = self._padding_px(padding, kernel_size, stride, dilation)
        self.dilation = dilation
        self.groups = groups
        self.padding_mode = padding_mode
        self.kernel = kernel
        self.reflections = reflections
        self.order = group.order(orientations, reflections)  # length of the orientation axis

        taps = group.count_taps(kernel_size, kernel)
        axes = (self.order,) if self._reads_orientations else ()
        shape = (out_channels, in_channels // groups, *axes, taps)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_channels, device=device, dtype=dtype)) if bias else None
        self.register_map("rotation", self._make_rotation)
        self.reset_parameters()

    @property
    def window_px(self) -> int:
        """Side of the rotated kernels in pixels: the kernel size, enlarged by the window of `pool`."""
        return self.kernel_size + self.pool - 1

    def _make_rotation(self) -> Tensor:
        rotation = group.rotation_map(self.kernel_size, self.orientations, self.kernel, self.reflections)
        return rotation if self.pool == 1 else group.average_map(rotation, self.pool)

    def kernels(self) -> Tensor:
        """Return the weight of the equivalent `torch.nn.Conv2d`: all kernels at all orientations.

        For lifting, the shape is (C'·N, C, k, k) and the equivalent layer convolves images (B, C, H, W). For group
        convolution, it is (C'·N, C·N, k, k) and the equivalent layer convolves features (B, C·N, H, W). C and C' are
        the input and output channels, k is the kernel size, and N includes reflected entries. With several groups, the
        weight has only the input channels of one group, as in torch. With `pool`, kernels are averaged over the window
        of the pool, so k is the kernel size + pool - 1, and the equivalent layer has the stride `pool`.
        """
        weight, rotation = self.weight, self.rotation.to(self.weight)
        if not self._reads_orientations:
            return group.lift_kernels(weight, rotation)
        return group.group_kernels(weight, rotation, self.reflections)

    def reset_parameters(self) -> None:
        """Draw random weights with He initialization, and set the bias to 0.

        The fan-in is the number of input channels of a group, times the input orientations, times the effective number
        of taps of a kernel (`group.effective_taps`).
        """
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
            "pool": 1,
        }
        for name, default in defaults.items():
            if getattr(self, name) != default:
                parts.append(f"{name}={getattr(self, name)!r}")
        return ", ".join(parts if self.bias is not None else [*parts, "bias=False"])

    def _padding_px(self, padding: int | str, kernel_size: int, stride: int, dilation: int) -> int:
        """Return the number of pixels to pad at each border, given a number, "same" or "valid"."""
        if padding == "valid":
            return 0
        if padding == "same":
            if stride > 1:
                raise ValueError(
                    f"{type(self).__name__} accepts padding 'same' at stride 1 only; got stride {stride}. Give the "
                    f"padding as a number of pixels."
                )
            if dilation * (kernel_size - 1) % 2:
                raise ValueError(
                    f"{type(self).__name__} accepts padding 'same' for odd kernels only, because an even kernel of "
                    f"{kernel_size} px would need different padding at both ends. Give the padding as a number of "
                    f"pixels, or use an odd kernel_size."
                )
            return dilation * (kernel_size - 1) // 2
        if isinstance(padding, str):
            check_choice(self, ("same", "valid"), padding=padding)
        check_whole_number(self, minimum=0, padding=padding)
        return int(padding)

    def _convolve(self, x: Tensor) -> Tensor:
        """Convolve images (B, C, H, W) or flattened features (B, C·N, H, W) to features (B, C', N, H', W')."""
        check_grid(x, self, self.window_px, self.stride * self.pool, self.padding, self.dilation)
        bias = self.bias if self.bias is None else self.bias.repeat_interleave(self.order)
        padding = self.padding
        if self.padding_mode != "zeros" and padding:
            check_padding(x, self, padding, self.padding_mode)
            x = F.pad(x, (padding,) * 4, mode=self.padding_mode)
            padding = 0
        # Kernels are channels-last in memory, so the output is too, and (C', N) can be split and merged as views.
        if self._can_store_kernels(x):
            y: Tensor = _ConvolveOnCpu.apply(x, self.weight, bias, self, padding)  # type: ignore[no-untyped-call]
        else:
            y = F.conv2d(x, self.kernels_for(x), bias, self.stride * self.pool, padding, self.dilation, self.groups)
        return split_orientations(y, self.order)  # (B, C'·N, H', W') → (B, C', N, H', W')

    def kernels_for(self, x: Tensor) -> Tensor:
        """Return the rotated kernels for a convolution of x, with the shape of `kernels`.

        On a GPU, a Triton kernel computes them if possible, in the data type of the convolution. Otherwise `kernels`
        computes them without autocast, because interpolation in half precision is less exact.
        """
        if torch.compiler.is_compiling() and x.is_cuda and not torch.compiler.is_exporting():
            return self._kernels_for_compiler(x)
        if self._can_rotate_on_gpu(x):
            from rotopath.nn.triton import rotate_kernels

            dtype = triton.compute_dtype(x, self.weight)
            with triton.on_device_of(x):
                return rotate_kernels.rotate(self.weight, self.rotation.to(self.weight), self.reflections, dtype)
        if x.is_meta:  # torch has no autocast for this device
            return self.kernels()
        with torch.autocast(x.device.type, enabled=False):
            return self.kernels()

    def _can_rotate_on_gpu(self, x: Tensor) -> bool:
        """Return whether a Triton kernel can compute the rotated kernels for a convolution of x."""
        can_rotate = triton.can_run_on(x) and triton.can_rotate(x, self.weight, self.window_px)
        return can_rotate and not self._overrides_kernels()

    def _can_store_kernels(self, x: Tensor) -> bool:
        """Return whether `_ConvolveOnCpu` can convolve x."""
        weight = self.weight
        return (
            self._reads_orientations
            and not triton.can_run_on(x)
            and x.device.type == weight.device.type == "cpu"
            and x.dtype == weight.dtype
            and type(x) is Tensor
            and type(weight) in (Tensor, nn.Parameter)
            and not torch.is_autocast_enabled("cpu")
            and not is_being_recorded()
            and _get_current_dispatch_mode() is None
            and not triton.has_tangent(x)
            and not triton.has_tangent(weight)
            and not self._overrides_kernels()
        )

    @torch.no_grad()
    def _store_kernels(self) -> Tensor:
        """Compute `kernels` on the CPU, without gradients, in memory that the layer keeps. The next call overwrites it.

        In evaluation, the kernels of the last call are returned if the weights are the same.
        """
        weight, stored = self.weight.detach(), self._stored
        if stored is not None and (stored.shape, stored.kernels.dtype) != (weight.shape, weight.dtype):
            stored = None
        # Weights are compared by value. Torch's version counters do not see every change, such as those of `.data`.
        if stored is not None and stored.weight is not None and not self.training and stored.weight.equal(weight):
            return stored.kernels
        with torch.inference_mode(False):  # changes of inference tensors are not counted
            memory = None if stored is None else stored.kernels
            kernels = group.write_group_kernels(weight, self.rotation.to(weight), self.reflections, out=memory)
            self._stored = _StoredKernels(kernels, weight.shape, None if self.training else weight.clone())
        return kernels

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_stored": None}  # copies and saved modules compute their own kernels

    def _kernels_for_compiler(self, x: Tensor) -> Tensor:
        """Return the rotated kernels on a GPU for torch.compile, contiguous.

        On a GPU in half precision, torch's compiler (2.11) computes wrong gradients of convolutions whose weights are
        computed channels-last; benchmarks/compiled.py compares compiled with eager training.
        """
        if triton.is_installed() and self.window_px <= triton.MAX_KERNEL_SIZE and not self._overrides_kernels():
            from rotopath.nn.triton import rotate_kernels

            dtype = triton.compute_dtype(x, self.weight)
            rotation = self.rotation.to(self.weight)
            rotated: Tensor = rotate_kernels.rotate_in_graph(self.weight, rotation, self.reflections, dtype)
            return rotated
        with torch.autocast(x.device.type, enabled=False):
            return self.kernels().contiguous()

    def _overrides_kernels(self) -> bool:
        """Return whether a subclass or this instance replaces `kernels`."""
        return type(self).kernels is not _RotatedConv2d.kernels or "kernels" in vars(self)


class _StoredKernels(NamedTuple):
    """Rotated kernels that a layer keeps, and the base weights that they were computed from."""

    kernels: Tensor
    shape: torch.Size  # of the base weights
    weight: Tensor | None  # the base weights; in training, they are not kept


class _ConvolveOnCpu(torch.autograd.Function):
    """Autograd function: convolve maps x (B, C·N, H, W) with the rotated kernels of a `GroupConv2d`.

    `weight` are the base weights of the layer, and `bias` has one value for each of the C'·N maps of the output. The
    layer keeps the memory of its kernels, because to allocate it again in every step takes time.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "GroupConv2d", padding: int) -> Tensor:
        kernels = layer._store_kernels()
        ctx.save_for_backward(x, weight, bias)
        ctx.kernels, ctx.version = kernels, kernels._version
        ctx.rotation, ctx.reflections = layer.rotation.to(weight), layer.reflections
        ctx.options = (layer.stride * layer.pool, padding, layer.dilation, layer.groups)
        return F.conv2d(x, kernels, bias, *ctx.options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        is_differentiable = torch.is_grad_enabled()  # second derivatives were requested
        if is_differentiable:
            kernels = group.group_kernels(weight, ctx.rotation, ctx.reflections)
        elif ctx.version == ctx.kernels._version:
            kernels = ctx.kernels
        else:  # the layer has overwritten them since the forward pass
            kernels = group.write_group_kernels(weight, ctx.rotation, ctx.reflections)
        stride, padding, dilation, groups = ctx.options
        sizes, pairs = bias if bias is None else [len(bias)], [[size] * 2 for size in (stride, padding, dilation)]
        dx, d_kernels, d_bias = torch.ops.aten.convolution_backward(
            gradients[0], x, kernels, sizes, *pairs, False, [0, 0], groups, ctx.needs_input_grad[:3]
        )
        d_weight = None
        if ctx.needs_input_grad[1] and is_differentiable:
            (d_weight,) = torch.autograd.grad(kernels, weight, d_kernels, create_graph=True)
        elif ctx.needs_input_grad[1]:
            d_weight = group.group_kernels_gradient(d_kernels, ctx.rotation, ctx.reflections)
        return dx, d_weight, d_bias, None, None


class _ConvolveOnGpu(torch.autograd.Function):
    """Autograd function: a `GroupConv2d` on a GPU, from features (B, C, N, H, W) to features (B, C', N, H', W').

    It computes the same as `kernels_for`, `F.conv2d` and views of their input and output. But as one function, it takes
    less time in Python, for which a GPU waits in networks of small layers. `dtype` is the data type of the convolution.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: "GroupConv2d", dtype: torch.dtype
    ) -> Tensor:
        from rotopath.nn.triton import rotate_kernels

        with triton.on_device_of(x):
            kernels = rotate_kernels.compute(weight, layer.rotation.to(weight), layer.reflections, dtype)
        kernels = kernels.permute(0, 3, 1, 2)
        columns = None if bias is None else bias.repeat_interleave(layer.order).to(dtype)
        options = (layer.stride * layer.pool, layer.padding, layer.dilation, layer.groups)
        y = F.conv2d(_merge(x).to(dtype), kernels, columns, *options)
        ctx.save_for_backward(x, weight, bias, kernels)
        ctx.layer, ctx.options = layer, options
        return _split(y, layer.order)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from rotopath.nn.triton import rotate_kernels

        x, weight, bias, kernels = ctx.saved_tensors
        layer: GroupConv2d = ctx.layer
        if torch.is_grad_enabled():  # second derivatives were requested
            inputs = [t for t, is_needed in zip((x, weight, bias), ctx.needs_input_grad, strict=False) if is_needed]
            with torch.autocast(x.device.type, enabled=False), triton.on_device_of(x):
                rotation = layer.rotation.to(weight)
                # From the saved weights, which need not be those that the layer has now (torch.func.functional_call).
                rotated = rotate_kernels.rotate(weight, rotation, layer.reflections, kernels.dtype)
                columns = None if bias is None else bias.repeat_interleave(layer.order).to(kernels.dtype)
                maps = F.conv2d(merge_orientations(x).to(kernels.dtype), rotated, columns, *ctx.options)
                y = split_orientations(maps, layer.order)
            results = iter(torch.autograd.grad(y, inputs, gradients[0], create_graph=True))
            return *(next(results) if is_needed else None for is_needed in ctx.needs_input_grad[:3]), None, None
        stride, padding, dilation, groups = ctx.options
        sizes, pairs = bias if bias is None else [len(kernels)], [[size] * 2 for size in (stride, padding, dilation)]
        dx, d_kernels, d_columns = torch.ops.aten.convolution_backward(
            _merge(gradients[0]), _merge(x).to(kernels.dtype), kernels, sizes, *pairs, False, [0, 0], groups,
            ctx.needs_input_grad[:3],
        )  # fmt: skip
        d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            rotation = layer.rotation.to(weight)
            with triton.on_device_of(x):
                d_weight = rotate_kernels.compute_gradient(
                    d_kernels.permute(0, 2, 3, 1), rotation, layer.reflections, weight.shape, weight.dtype
                )
        if ctx.needs_input_grad[2]:
            d_bias = d_columns.float().view(-1, layer.order).sum(dim=1).to(bias.dtype)
        return None if dx is None else split_orientations(dx.to(x.dtype), x.shape[2]), d_weight, d_bias, None, None


def _merge(features: Tensor) -> Tensor:
    """Return features (B, C, N, H, W) as maps (B, C·N, H, W), channels-last. Call this without gradients."""
    batch, channels, n, height, width = features.shape
    columns = channels * n
    if not is_channels_last(features):
        return merge_orientations(features).contiguous(memory_format=torch.channels_last)
    return features.as_strided((batch, columns, height, width), (height * width * columns, 1, width * columns, columns))


def _split(maps: Tensor, orientations: int) -> Tensor:
    """Return maps (B, C·N, H, W) as features (B, C, N, H, W), in the same memory. Call this without gradients.

    The result of an autograd function must not be a view, because torch refuses to change such a view in place.
    """
    batch, columns, height, width = maps.shape
    shape = (batch, columns // orientations, orientations, height, width)
    maps = maps.contiguous(memory_format=torch.channels_last)
    return maps.new_empty(0).set_(maps.untyped_storage(), maps.storage_offset(), shape, channels_last_strides(shape))


class LiftConv2d(_RotatedConv2d):
    """Lift images to SE(2) features: correlate the images with N rotated copies of each kernel.

    (B, C, H, W) → (B, C', N, H', W') with C' = `out_channels` and N = `orientations`. The arguments are those of
    `torch.nn.Conv2d`, but each size is one number for height and width. `kernel` is the family of kernels: "bilinear",
    "gaussian", "harmonic" or "square" (`rotopath.group.kernel_families`). With `reflections`, the orientation axis has
    2N entries: N for rotated kernels, then N for mirrored and rotated kernels.

    With `pool` = s, the output is averaged over windows of s × s pixels with a stride of s. This is faster than a
    `GroupAvgPool2d(s)` after the layer, and the result is the same, because both are computed as one convolution.

    For an image f with channels f_c, a kernel k and the rotation R_θ by the angle θ, the response at position x is
    (k ⋆ f)(x, θ) = Σ_c Σ_x' k_c(R_θ⁻¹(x' - x)) f_c(x'), with a sum over all positions x'.

    >>> lift = rp.nn.LiftConv2d(3, 8, kernel_size=5, orientations=4)
    >>> lift(torch.zeros(2, 3, 68, 68)).shape
    torch.Size([2, 8, 4, 64, 64])
    """

    _reads_orientations = False

    def forward(self, x: Tensor) -> Tensor:
        check_image(x, self, self.in_channels)
        if triton.can_run_on(x) and triton.can_lift(x, self):
            from rotopath.nn.triton.lift import PendingLift

            check_grid(x, self, self.window_px, self.stride, self.padding)
            return fuse.defer(PendingLift(x.to(triton.compute_dtype(x)), self.kernels_for(x), self.order), self)
        return self._convolve(x)


class GroupConv2d(_RotatedConv2d):
    """Convolve SE(2) features: correlate the features with kernels that are rotated and shifted along θ.

    (B, C, N, H, W) → (B, C', N, H', W') with C' = `out_channels` and N = `orientations`. The arguments are those of
    `torch.nn.Conv2d`, but each size is one number for height and width. `kernel` is the family of kernels: "bilinear",
    "gaussian", "harmonic" or "square" (`rotopath.group.kernel_families`). With `reflections`, the orientation axis has
    2N entries: N for rotated kernels, then N for mirrored and rotated kernels.

    With `pool` = s, the output is averaged over windows of s × s pixels with a stride of s. This is faster than a
    `GroupAvgPool2d(s)` after the layer, and the result is the same, because both are computed as one convolution.

    For features F with channels F_c, a kernel K and the rotation R_θ by the angle θ, the response at position x is
    (K ⋆ F)(x, θ) = Σ_c Σ_x' Σ_θ' K_c(R_θ⁻¹(x' - x), θ' - θ) F_c(x', θ'), with sums over all positions x' and all
    orientations θ' of the input.

    >>> conv = rp.nn.GroupConv2d(8, 16, kernel_size=5, orientations=4)
    >>> conv(torch.zeros(2, 8, 4, 32, 32)).shape
    torch.Size([2, 16, 4, 28, 28])
    """

    _reads_orientations = True

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self, self.in_channels, self.order)
        x = fuse.finish(x)
        if self._can_rotate_on_gpu(x) and (self.padding_mode == "zeros" or not self.padding):
            dtype = triton.compute_dtype(x, self.weight)
            if x.dtype == dtype or torch.is_autocast_enabled("cuda"):  # otherwise torch reports the data types
                check_grid(x, self, self.window_px, self.stride * self.pool, self.padding, self.dilation)
                y: Tensor = _ConvolveOnGpu.apply(x, self.weight, self.bias, self, dtype)  # type: ignore[no-untyped-call]
                return y
        return self._convolve(merge_orientations(x))


class GroupConvTranspose2d(_RotatedConv2d):
    """Enlarge SE(2) features by the factor `stride` with learned kernels that are rotated and shifted along θ.

    (B, C, N, H, W) → (B, C', N, H', W') with H' = (H - 1) · stride - 2 · padding + dilation · (kernel_size - 1) + 1.
    The arguments are those of `torch.nn.ConvTranspose2d`, but each size is one number for height and width, and there
    is no `output_padding`, because it is added at one end only. The layer inserts stride - 1 zeros between neighboring
    pixels and convolves the result as `GroupConv2d` does. It accepts features of any height and width.

    >>> up = rp.nn.GroupConvTranspose2d(8, 4, kernel_size=2, orientations=4, stride=2)
    >>> up(torch.zeros(2, 8, 4, 16, 16)).shape
    torch.Size([2, 4, 4, 32, 32])
    """

    _reads_orientations = True

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        orientations: int,
        stride: int = 1,
        padding: int = 0,
        dilation: int = 1,
        groups: int = 1,
        bias: bool = True,
        kernel: group.Kernel = "bilinear",
        reflections: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_whole_number(self, minimum=0, padding=padding)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            orientations,
            stride,
            padding,
            dilation,
            groups,
            bias,
            kernel=kernel,
            reflections=reflections,
            device=device,
            dtype=dtype,
        )

    def transposed_kernels(self) -> Tensor:
        """Return the weight (C·N, C'·N, k, k) of the equivalent `torch.nn.ConvTranspose2d` on (B, C·N, H, W).

        torch's transposed convolution correlates with the kernel rotated by 180°. With several groups, the weight has
        only the output channels of one group, as in torch.
        """
        return self._transpose(self.kernels())

    def _transpose(self, kernels: Tensor) -> Tensor:
        grouped: Tensor = torch.unflatten(
            kernels.flip(-2, -1), 0, (self.groups, -1)
        )  # (groups, C'·N / groups, C·N / groups, k, k)
        return grouped.transpose(1, 2).flatten(0, 1)

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self, self.in_channels, self.order)
        maps = merge_orientations(fuse.finish(x))
        bias = self.bias if self.bias is None else self.bias.repeat_interleave(self.order)
        weight = self._transpose(self.kernels_for(maps))
        y = F.conv_transpose2d(maps, weight, bias, self.stride, self.padding, 0, self.groups, self.dilation)
        return split_orientations(y, self.order)
