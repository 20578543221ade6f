"""Normalization layers for features (B, C, N, H, W), and dropout of whole channels.

The N orientations of a channel share their statistics and weights, so that the layers are equivariant.
`GroupBatchNorm2d` computes the same as `torch.nn.BatchNorm3d`. On a GPU, and in training on the CPU, it computes its
statistics at once, and applies them together with the residual sum, the activation and the pool that follow
(`PendingNorm`, see `nn.fuse`).
"""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn import fuse, triton
from rotopath.nn.features import (
    check_features,
    check_whole_number,
    empty_features,
    is_being_recorded,
    is_channels_last,
    merge_orientations,
    split_orientations,
)
from rotopath.nn.pool import is_fusible_max, is_fusible_rms
from rotopath.nn.triton import has_tangent

CPU_DTYPES = (torch.float32, torch.float64)


class GroupBatchNorm2d(nn.BatchNorm3d):
    """Batch norm with one mean and variance per channel, over batch, orientations and positions.

    (B, C, N, H, W) → (B, C, N, H, W). For channel c, y = γ_c (x - E[x_c]) / √(Var[x_c] + ε) + β_c, with a learned scale
    γ_c and a learned shift β_c. `channels` is C; the other arguments are those of `torch.nn.BatchNorm3d`.

    >>> norm = rp.nn.GroupBatchNorm2d(8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(channels, eps, momentum, affine, track_running_stats, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self, self.num_features)
        normalized = fuse.normalize_deferred(input, self)
        if normalized is not None:
            return normalized
        x = fuse.finish(input)
        on_gpu = triton.can_run_on(x) and triton.can_normalize(x, self)
        if on_gpu or can_normalize_on_cpu(x, self):
            return fuse.defer(self._start(x, on_gpu), self)
        if x.is_cuda and not torch.compiler.is_exporting() and x.numel() > self.num_features:
            return self._normalize_columns(x)
        # On the CPU, torch's batch norm is fastest on contiguous tensors. Channels-last features are contiguous if each
        # position counts as one sample: (B·H·W, C, N).
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalized = super().forward(rows.reshape(-1, *rows.shape[3:], 1, 1))  # (B·H·W, C, N, 1, 1)
        return normalized.view(rows.shape).permute(0, 3, 4, 1, 2)

    def _normalize_columns(self, x: Tensor) -> Tensor:
        """Normalize features x with torch's operations on maps (B, C·N, H, W), which are faster than on 5 axes.

        torch.compile combines these operations with those before and after them.
        """
        maps, n = merge_orientations(x).to(torch.promote_types(x.dtype, torch.float32)), x.shape[2]
        if not self.training and self.running_mean is not None and self.running_var is not None:
            mean, variance = self.running_mean, self.running_var
        else:
            variances, means = torch.var_mean(maps, dim=(0, 2, 3), correction=0)
            variances, means = torch.unflatten(variances, 0, (-1, n)), torch.unflatten(means, 0, (-1, n))
            mean = means.mean(dim=1)
            variance = variances.mean(dim=1) + (means - mean[:, None]).square().mean(dim=1)
            if self.training:
                _update_running_statistics(self, mean.detach(), variance.detach(), count=x.numel() // len(mean))
        scale = (variance + self.eps).rsqrt()
        scale = scale if self.weight is None else scale * self.weight
        normalized = (maps - _per_column(mean, n)) * _per_column(scale, n)
        if self.bias is not None:
            normalized = normalized + _per_column(self.bias, n)
        return split_orientations(normalized.to(x.dtype), n)

    def _start(self, x: Tensor, on_gpu: bool) -> "PendingNorm":
        """Compute the statistics of features x, update the running statistics, and return what is left to compute."""
        with torch.no_grad():
            if on_gpu:
                from rotopath.nn.triton import batch_norm

                with triton.on_device_of(x):
                    compute = batch_norm.compute_statistics
                    statistics = compute(x, self) if self.training else batch_norm.running_statistics(self)
            else:
                statistics = _compute_statistics_on_cpu(x, self)
        return PendingNorm(x, self.weight, self.bias, statistics, self.training, on_gpu)


class GroupNorm2d(nn.GroupNorm):
    """Group norm: normalize each group of channels of a sample over its channels, orientations and positions.

    (B, C, N, H, W) → (B, C, N, H, W). `groups` is the number of groups into which the C = `channels` channels are
    divided. With groups=1, the whole sample is normalized together. With `per_orientation`, each orientation is
    normalized by its own mean and variance instead.

    >>> norm = rp.nn.GroupNorm2d(2, 8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        groups: int,
        channels: int,
        eps: float = 1e-5,
        affine: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        per_orientation: bool = False,
    ) -> None:
        super().__init__(groups, channels, eps, affine, device, dtype)
        self.per_orientation = per_orientation

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self, self.num_channels)
        if not self.per_orientation:
            return super().forward(input)
        samples = input.transpose(1, 2)  # (B, N, C, H, W): each orientation counts as a sample
        return super().forward(samples.flatten(0, 1)).view_as(samples).transpose(1, 2)

    def extra_repr(self) -> str:
        return super().extra_repr() + (", per_orientation=True" if self.per_orientation else "")


class GroupLayerNorm2d(nn.Module):
    """Layer norm: normalize each position of each sample over channels and orientations.

    (B, C, N, H, W) → (B, C, N, H, W). Each channel learns a scale and a shift. With `per_orientation`, each orientation
    is normalized over channels only, by its own mean and variance.

    >>> norm = rp.nn.GroupLayerNorm2d(8)
    >>> norm(torch.randn(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        per_orientation: bool = False,
    ) -> None:
        super().__init__()
        check_whole_number(self, channels=channels)
        self.channels = channels
        self.eps = eps
        self.per_orientation = per_orientation
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self, self.channels)
        if self.per_orientation:
            rows = x.permute(0, 2, 3, 4, 1)  # (B, N, H, W, C)
            return F.layer_norm(rows, rows.shape[4:], self.weight, self.bias, self.eps).permute(0, 4, 1, 2, 3)
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalized = F.layer_norm(rows, rows.shape[3:], eps=self.eps)
        return (normalized * self.weight[:, None] + self.bias[:, None]).permute(0, 3, 4, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}" + (", per_orientation=True" if self.per_orientation else "")


class ChannelNorm2d(nn.Module):
    """Layer norm over the channels at each pixel of maps without orientations. (B, C, H, W) → (B, C, H, W).

    Each channel learns a scale and a shift.

    >>> rp.nn.ChannelNorm2d(8)(torch.randn(2, 8, 16, 16)).shape
    torch.Size([2, 8, 16, 16])
    """

    def __init__(
        self,
        channels: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.permute(0, 2, 3, 1)  # (B, H, W, C), contiguous for channels-last x
        return F.layer_norm(rows, self.weight.shape, self.weight, self.bias, self.eps).permute(0, 3, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]}, eps={self.eps}"


class ChannelScale(nn.Module):
    """Multiply each channel by a learned number, and add another one. The shape does not change.

    The input is maps (B, C, H, W), features (B, C, N, H, W) or vectors (B, C). With `bias=False`, nothing is added, as
    in the layer scale of ConvNeXt. `init` is the initial factor of all channels.

    >>> rp.nn.ChannelScale(8, bias=False, init=0.5)(torch.ones(1, 8, 4, 2, 2)).unique()
    tensor([0.5000], grad_fn=<Unique2Backward0>)
    """

    def __init__(
        self,
        channels: int,
        bias: bool = True,
        init: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.full((channels,), init, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        shape = (-1, *(1 for _ in x.shape[2:]))
        scaled = x * self.weight.view(shape)
        return scaled if self.bias is None else scaled + self.bias.view(shape)

    def extra_repr(self) -> str:
        return str(self.channels) + ("" if self.bias is not None else ", bias=False")


class StochasticDepth(nn.Module):
    """Drop whole samples of a residual branch in training: with probability p, set a sample to 0. Shapes do not change.

    The remaining samples are divided by 1 - p. In evaluation mode, nothing is dropped.

    >>> rp.nn.StochasticDepth(0.5).eval()(torch.ones(2, 8, 4, 2, 2)).mean()
    tensor(1.)
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"The probability p of StochasticDepth must be at least 0 and below 1; got {p}.")
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return x
        kept = torch.rand(x.shape[0], device=x.device) >= self.p
        return x * (kept.to(x) / (1 - self.p)).view(-1, *(1 for _ in x.shape[1:]))

    def extra_repr(self) -> str:
        return f"p={self.p}"


class GroupDropout2d(nn.Dropout3d):
    """Dropout of whole channels: with probability p, set a channel of a sample to 0 at all orientations and positions.

    >>> drop = rp.nn.GroupDropout2d(0.5)
    >>> drop(torch.ones(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self)
        return super().forward(input)


class PendingNorm(NamedTuple):
    """Batch norm of features x (B, C, N, H, W), a residual sum and an activation, not computed yet. See `nn.fuse`."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    statistics: Tensor  # (2, C): mean and inverse standard deviation
    from_batch: bool  # whether the statistics are those of x, and not running statistics
    on_gpu: bool
    residual: Tensor | None = None
    activation: str = "none"

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x.shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        inputs = (self.x, self.weight, self.bias)
        return inputs if self.residual is None else (*inputs, self.residual)

    def compute(self) -> Tensor:
        return self._compute(pool=1)

    def activate(self, activation: str) -> "PendingNorm | None":
        if self.activation != "none" or (activation != "relu" and not self.on_gpu):
            return None
        return self._replace(activation=activation)

    def add(self, residual: Tensor) -> "PendingNorm | None":
        if self.activation != "none" or self.residual is not None or not is_channels_last(residual):
            return None
        return self._replace(residual=residual) if type(residual) is Tensor and not has_tangent(residual) else None

    def normalize(self, norm: nn.Module) -> None:  # noqa: ARG002  (two batch norms in a row are not fused)
        return None

    def pool(self, pool: nn.Module) -> Tensor | None:
        if self.activation != "relu" or self.residual is not None:
            return None
        if is_fusible_max(pool):
            return self._compute(pool.size)
        if self.on_gpu and is_fusible_rms(pool):
            from rotopath.nn.triton import blur_pool

            with triton.on_device_of(self.x):
                return blur_pool.norm_relu_blur(self.x, self.weight, self.bias, self.statistics, self.from_batch, pool)
        return None

    def _compute(self, pool: int) -> Tensor:
        options = _Options(self.from_batch, self.on_gpu, self.activation, pool)
        with triton.on_device_of(self.x) if self.on_gpu else nullcontext():
            y: Tensor = _Normalize.apply(  # type: ignore[no-untyped-call]
                self.x, self.weight, self.bias, self.residual, self.statistics, options
            )
        return y


class _Options(NamedTuple):
    """How `_Normalize` computes; see `PendingNorm`. `pool` is the side of the windows of max pooling, or 1."""

    from_batch: bool
    on_gpu: bool
    activation: str
    pool: int


class _Normalize(torch.autograd.Function):
    """Autograd function: batch norm, residual sum, activation and max pooling of features (B, C, N, H, W)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        residual: Tensor | None,
        statistics: Tensor,
        options: _Options,
    ) -> Tensor:
        pooled = argmax = None
        if options.on_gpu:
            from rotopath.nn.triton import batch_norm

            y = batch_norm.apply(x, weight, bias, residual, statistics, options.activation, options.pool)
        else:
            y, pooled, argmax = _apply_on_cpu(x, weight, bias, residual, statistics, options)
        # ReLU needs the sign of its output, the other activations need their input.
        needs_y = options.activation == "relu" and (residual is not None or not options.on_gpu)
        needs_residual = options.activation in ("silu", "gelu")
        ctx.save_for_backward(
            x, weight, bias, statistics, y if needs_y else None, residual if needs_residual else None, pooled, argmax
        )
        ctx.options, ctx.has_residual = options, residual is not None
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, statistics, y, residual, pooled, argmax = ctx.saved_tensors
        dy, options = gradients[0], ctx.options
        if torch.is_grad_enabled():  # second derivatives were requested
            return (*_differentiable_gradients(ctx, dy), None, None)
        if options.on_gpu:
            from rotopath.nn.triton import batch_norm

            with triton.on_device_of(x):
                dx, d_weight, d_bias, d_residual = batch_norm.compute_gradients(
                    dy, x, weight, bias, residual, y, statistics, options.from_batch, options.activation, options.pool
                )
            if ctx.has_residual and d_residual is None:  # without an activation, it is the incoming gradient
                d_residual = dy
        else:
            dx, d_weight, d_bias, d_residual = _compute_gradients_on_cpu(
                dy, x, weight, statistics, y, pooled, argmax, ctx.has_residual
            )
        return dx, d_weight.to(weight.dtype), d_bias.to(bias.dtype), d_residual, None, None


def _differentiable_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight, bias and residual, computed by torch so that they are differentiable."""
    x, weight, bias, statistics, y, residual, *_ = ctx.saved_tensors
    options = ctx.options
    if ctx.has_residual and residual is None:  # it was not kept, because the gradients do not depend on its values
        residual = torch.zeros_like(x).requires_grad_()
    per_channel = (1, -1, 1, 1, 1)
    wide = x.to(statistics.dtype)
    if options.from_batch:
        variance, mean = torch.var_mean(wide, dim=(0, 2, 3, 4), correction=0)
        inverse_std = (variance - variance.detach() + statistics[1] ** -2).rsqrt()  # 1 / √(variance + ε)
    else:
        mean, inverse_std = statistics
    scale = inverse_std * weight
    z = (wide - mean.view(per_channel)) * scale.view(per_channel) + bias.view(per_channel)
    if residual is not None:
        z = z + residual
    match options.activation:
        case "relu":
            z = z.relu() if y is None or options.pool > 1 else z * (y > 0)
        case "silu":
            z = F.silu(z)
        case "gelu":
            z = F.gelu(z)
    if options.pool > 1:
        z = split_orientations(F.max_pool2d(merge_orientations(z), options.pool), x.shape[2])
    inputs = [t for t, is_needed in zip((x, weight, bias, residual), ctx.needs_input_grad, strict=False) if is_needed]
    gradients = iter(torch.autograd.grad(z, inputs, dy.to(z.dtype), create_graph=True))
    return tuple([next(gradients) if is_needed else None for is_needed in ctx.needs_input_grad[:4]])


# Batch norm on the CPU. Most of the time is spent on allocating memory. So the code allocates few large arrays: without
# a pool, only the output in the forward pass, and the gradients in the backward pass. With a pool, it pools first, and
# normalizes only the pooled values. The result is the same, because batch norm is monotonic in each channel. If the
# weight of a channel is negative, batch norm reverses the order of values. The minimum of each window is then selected.
#
# Arrays: `x` is the input (B, C, N, H, W). `maps` is a view of it as (B, C·N, H, W). Each of the C·N maps is called a
# column. `y` is the output. `dy` and `dx` are the gradients of the loss with respect to output and input. `weight`,
# `bias`, `mean`, `variance` and `inverse_std` = 1 / √(variance + ε) have one value per channel (C,). `n` is N, the
# number of columns per channel. `pool` is the side of the pooling windows in pixels, or 1 for no pooling.


def can_normalize_on_cpu(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Return whether the functions below can apply this batch norm to features x (B, C, N, H, W)."""
    return (
        not is_being_recorded()
        and norm.training
        and norm.affine
        and norm.momentum is not None
        and type(x) is Tensor  # subclasses may only record operations
        and x.device.type == "cpu"
        and x.dtype in CPU_DTYPES
        and x.dtype == norm.weight.dtype
        and x.numel() > norm.num_features  # a single value per channel has no variance; torch's layer raises the error
        and is_channels_last(x)
        and not any(has_tangent(tensor) for tensor in (x, norm.weight, norm.bias))
    )


def _compute_statistics_on_cpu(x: Tensor, norm: nn.BatchNorm3d) -> Tensor:
    """Return the mean and the inverse standard deviation (2, C) of x, and update the running statistics."""
    mean, variance = _compute_mean_and_variance(merge_orientations(x), n=x.shape[2])
    _update_running_statistics(norm, mean, variance, count=x.numel() // len(mean))
    return torch.stack([mean, (variance + norm.eps).rsqrt()])


def _apply_on_cpu(
    x: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, statistics: Tensor, options: _Options
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the output of batch norm, residual sum, activation and max pooling, and two tensors for the gradients.

    These are the input maps after the pool (B, C·N, H', W'), because the pool is computed first, and the positions that
    the pool selected, of the same shape. Without a pool, they are the input maps and None.
    """
    n, maps = x.shape[2], merge_orientations(x)
    mean, inverse_std = statistics
    scale = weight * inverse_std
    pooled, argmax = (
        (maps, None) if options.pool == 1 else _pool_extremes(maps, weight.repeat_interleave(n), options.pool)
    )
    y = empty_features((*x.shape[:3], *pooled.shape[2:]), x)
    torch.addcmul(_per_column(bias - mean * scale, n), pooled, _per_column(scale, n), out=merge_orientations(y))
    if residual is not None:
        y.add_(residual)
    if options.activation == "relu":
        y.relu_()
    return y, pooled, argmax


def _compute_gradients_on_cpu(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    statistics: Tensor,
    y: Tensor | None,
    pooled: Tensor,
    argmax: Tensor | None,
    has_residual: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients with respect to x, weight, bias and residual. `y` is the output, if it is after ReLU."""
    n, maps = x.shape[2], merge_orientations(x)
    mean, inverse_std = statistics
    dy = merge_orientations(dy).contiguous(memory_format=torch.channels_last)
    if y is not None:
        dy = torch.ops.aten.threshold_backward(dy, merge_orientations(y), 0)
    # Torch's backward pass of batch norm is called for C·N columns, only for the gradients of weight and bias.
    columns = (weight.repeat_interleave(n), None, None, mean.repeat_interleave(n), inverse_std.repeat_interleave(n))
    sums = torch.ops.aten.native_batch_norm_backward(dy, pooled, *columns, True, 0.0, [False, True, True])
    d_weight, d_bias = (torch.unflatten(column, 0, (-1, n)).sum(dim=1) for column in sums[1:])
    # dx is scale · dy at the positions that the pool selected, plus slope · x + offset at all positions. The second
    # part exists because the mean and the variance of the batch depend on x.
    scale, count = weight * inverse_std, x.numel() // len(mean)
    slope = -scale * inverse_std * d_weight / count
    offset = -scale * d_bias / count - slope * mean
    # The incoming gradient and that of the residual must not be changed in place.
    d_pooled = torch.mul(dy, _per_column(scale, n), out=None if y is None or has_residual else dy)
    if argmax is None:
        dx = d_pooled.addcmul_(maps, _per_column(slope, n)).add_(_per_column(offset, n))
    else:
        dx = torch.addcmul(_per_column(offset, n), maps, _per_column(slope, n))
        pixels, argmax, d_pooled = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (dx, argmax, d_pooled))
        pixels.scatter_add_(1, argmax, d_pooled)  # pixels (B, H·W, C·N) is a view of dx
    d_residual = split_orientations(dy, n) if has_residual else None
    return split_orientations(dx, n), d_weight, d_bias, d_residual


def _compute_mean_and_variance(maps: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel, both (C,), combined from those of its `n` maps.

    `maps` are (B, C·N, H, W), and `n` is N.
    """
    columns = torch.batch_norm_update_stats(maps, None, None, 0.0)
    means, variances = (torch.unflatten(column, 0, (-1, n)) for column in columns)
    between, mean = torch.var_mean(means, dim=1, correction=0)
    return mean, variances.mean(dim=1) + between


def _update_running_statistics(norm: nn.BatchNorm3d, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics of a batch norm. `count` is the number of values of a channel."""
    if not norm.track_running_stats:
        return
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if norm.running_mean is not None and norm.running_var is not None:
        momentum: Tensor | float | None = norm.momentum
        if momentum is None:  # the mean over all batches
            assert norm.num_batches_tracked is not None
            momentum = (1.0 / norm.num_batches_tracked).to(norm.running_mean)
        unbiased = variance * count / (count - 1)
        for running, value in ((norm.running_mean, mean), (norm.running_var, unbiased)):
            running.add_(momentum * (value.to(running) - running))


def _pool_extremes(maps: Tensor, weight: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    """Return the maximum of each window of pool × pool pixels, and its position in the map.

    `maps` are (B, C·N, H, W), and `weight` (C·N,) has one value for each of the C·N maps. For maps with a negative
    weight, the minimum is returned instead. The position of a pixel is y · W + x, for its row y and its column x.
    """
    if not bool((weight < 0).any()):
        pooled, argmax = F.max_pool2d(maps, pool, return_indices=True)
        return pooled, argmax
    sign = torch.where(weight < 0, -1, 1).to(maps).view(-1, 1, 1)
    pooled, argmax = F.max_pool2d(maps * sign, pool, return_indices=True)
    return pooled.mul_(sign), argmax


def _per_column(channels: Tensor, n: int) -> Tensor:
    """Repeat values (C,), one per channel, for the `n` maps of each channel, and return them as (1, C·N, 1, 1)."""
    return channels.repeat_interleave(n).view(1, -1, 1, 1)
