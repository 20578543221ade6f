"""Normalization layers for features (B, C, N, H, W), and dropout of whole channels.

The N orientations of a channel share their statistics and weights, so that the layers are equivariant.
`GroupBatchNorm2d` computes the same as `torch.nn.BatchNorm3d`. In training on the CPU, it calls the faster
`norm_relu_pool_on_cpu`. This function can also compute the ReLU and the max pool that follow (see `nn.fuse`).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rotopath.nn.checks import check_features, check_whole_number, is_being_recorded
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
        if can_normalize_on_cpu(input, self):
            return norm_relu_pool_on_cpu(input, self, relu=False)
        if input.is_cuda:
            return super().forward(input)
        # On the CPU, torch's batch norm is fastest on contiguous tensors. Channels-last features are contiguous if each
        # position counts as one sample: (B·H·W, C, N).
        rows = input.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalized = super().forward(rows.reshape(-1, *rows.shape[3:], 1, 1))  # (B·H·W, C, N, 1, 1)
        return normalized.view(rows.shape).permute(0, 3, 4, 1, 2)


class GroupNorm2d(nn.GroupNorm):
    """Group norm: normalize each group of channels of a sample over its channels, orientations and positions.

    (B, C, N, H, W) → (B, C, N, H, W). `groups` is the number of groups into which the C = `channels` channels are
    divided. With groups=1, the whole sample is normalized together.

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
    ) -> None:
        super().__init__(groups, channels, eps, affine, device, dtype)

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self, self.num_channels)
        return super().forward(input)


class GroupLayerNorm2d(nn.Module):
    """Layer norm: normalize each position of each sample over channels and orientations.

    (B, C, N, H, W) → (B, C, N, H, W). Each channel learns a scale and a shift.

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
    ) -> None:
        super().__init__()
        check_whole_number(self, channels=channels)
        self.channels = channels
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_features(x, self, self.channels)
        rows = x.permute(0, 3, 4, 1, 2)  # (B, H, W, C, N)
        normalized = F.layer_norm(rows, rows.shape[3:], eps=self.eps)
        return (normalized * self.weight[:, None] + self.bias[:, None]).permute(0, 3, 4, 1, 2)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}"


class GroupDropout2d(nn.Dropout3d):
    """Dropout of whole channels: with probability p, set a channel of a sample to 0 at all orientations and positions.

    >>> drop = rp.nn.GroupDropout2d(0.5)
    >>> drop(torch.ones(2, 8, 4, 16, 16)).shape
    torch.Size([2, 8, 4, 16, 16])
    """

    def forward(self, input: Tensor) -> Tensor:
        check_features(input, self)
        return super().forward(input)


# Batch norm, ReLU and max pooling on the CPU, in training. Most of the time is spent on allocating memory. So the code
# allocates few large arrays: without a pool, only the output in the forward pass, and the gradient of the input in the
# backward pass.
#
# Arrays: `x` is the input (B, C, N, H, W). `maps` is a view of it as (B, C·N, H, W). Each of the C·N maps is called a
# column. `y` is the output. `dy` and `dx` are the gradients of the loss with respect to output and input. `weight`,
# `bias`, `mean`, `variance` and `inverse_std` = 1 / √(variance + ε) have one value per channel (C,). `n` is N, the
# number of columns per channel. `pool` is the side of the pooling windows in pixels, or 1 for no pooling.


def can_normalize_on_cpu(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Return whether `norm_relu_pool_on_cpu` can apply this batch norm to features x (B, C, N, H, W)."""
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
        and x.permute(0, 3, 4, 1, 2).is_contiguous()
        and not any(has_tangent(tensor) for tensor in (x, norm.weight, norm.bias))
    )


def norm_relu_pool_on_cpu(x: Tensor, norm: nn.BatchNorm3d, relu: bool = True, pool: int = 1) -> Tensor:
    """Apply batch norm, ReLU if `relu`, and max pooling over windows of pool × pool pixels, in training on the CPU.

    Takes channels-last features (B, C, N, H, W), where H and W are multiples of `pool`. Updates the running statistics
    of the batch norm. Call this only if `can_normalize_on_cpu` returns True.
    """
    y: Tensor = _NormReluPoolOnCpu.apply(x, norm.weight, norm.bias, norm, relu, pool)  # type: ignore[no-untyped-call]
    return y


class _NormReluPoolOnCpu(torch.autograd.Function):
    """Autograd function of `norm_relu_pool_on_cpu`. It pools first, and normalizes only the pooled values.

    The result is the same as if it normalized first, because batch norm is monotonic in each channel. If the weight of
    a channel is negative, batch norm reverses the order of values. The minimum of each window is then selected.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm3d, relu: bool, pool: int
    ) -> Tensor:
        n, maps = x.shape[2], x.flatten(1, 2)  # (B, C·N, H, W), a view
        mean, variance = _compute_statistics(maps, n)
        _update_running_statistics(norm, mean, variance, count=x.numel() // len(mean))
        inverse_std = (variance + norm.eps).rsqrt()
        scale = weight * inverse_std
        pooled, argmax = (maps, None) if pool == 1 else _pool_extremes(maps, weight.repeat_interleave(n), pool)
        y = _empty_features((*x.shape[:3], *pooled.shape[2:]), x)
        torch.addcmul(_per_column(bias - mean * scale, n), pooled, _per_column(scale, n), out=y.flatten(1, 2))
        if relu:
            y.relu_()
        ctx.save_for_backward(x, weight, bias, mean, inverse_std, pooled, argmax, y if relu else None)
        ctx.eps, ctx.relu, ctx.pool = norm.eps, relu, pool
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse_std, pooled, argmax, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives were requested
            return (*_differentiable_gradients(ctx, x, weight, bias, gradients[0]), None, None, None)
        n, maps = x.shape[2], x.flatten(1, 2)
        dy = gradients[0].flatten(1, 2).contiguous(memory_format=torch.channels_last)
        if ctx.relu:
            dy = torch.ops.aten.threshold_backward(dy, y.flatten(1, 2), 0)
        # Torch's backward pass of batch norm is called for C·N columns, only for the gradients of weight and bias.
        statistics = (
            weight.repeat_interleave(n),
            None,
            None,
            mean.repeat_interleave(n),
            inverse_std.repeat_interleave(n),
        )
        sums = torch.ops.aten.native_batch_norm_backward(dy, pooled, *statistics, True, ctx.eps, [False, True, True])
        d_weight, d_bias = (torch.unflatten(column, 0, (-1, n)).sum(dim=1) for column in sums[1:])
        # dx is scale · dy at the positions that the pool selected, plus slope · x + offset at all positions. The second
        # part exists because the mean and the variance of the batch depend on x.
        scale, count = weight * inverse_std, x.numel() // len(mean)
        slope = -scale * inverse_std * d_weight / count
        offset = -scale * d_bias / count - slope * mean
        # Without ReLU, dy may be the incoming gradient itself, which must not be changed in place.
        d_pooled = torch.mul(dy, _per_column(scale, n), out=dy if ctx.relu else None)
        if argmax is None:
            dx = d_pooled.addcmul_(maps, _per_column(slope, n)).add_(_per_column(offset, n))
        else:
            dx = torch.addcmul(_per_column(offset, n), maps, _per_column(slope, n))
            pixels, argmax, d_pooled = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (dx, argmax, d_pooled))
            pixels.scatter_add_(1, argmax, d_pooled)  # pixels (B, H·W, C·N) is a view of dx
        return torch.unflatten(dx, 1, x.shape[1:3]), d_weight, d_bias, None, None, None


def _empty_features(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Allocate channels-last features (B, C, N, H, W) with the data type and device of `like`.

    They are not a view of another tensor, because an in-place ReLU would copy a view.
    """
    _, channels, n, height, width = shape
    columns = channels * n
    strides = (height * width * columns, n, 1, width * columns, columns)
    return like.new_empty_strided(shape, strides)


def _compute_statistics(maps: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return the mean and the variance of each channel, both (C,), combined from those of its `n` maps.

    `maps` are (B, C·N, H, W), and `n` is N.
    """
    columns = torch.batch_norm_update_stats(maps, None, None, 0.0)
    means, variances = (torch.unflatten(column, 0, (-1, n)) for column in columns)
    between, mean = torch.var_mean(means, dim=1, correction=0)
    return mean, variances.mean(dim=1) + between


def _update_running_statistics(norm: nn.BatchNorm3d, mean: Tensor, variance: Tensor, count: int) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.momentum is not None
        norm.running_mean.lerp_(mean.to(norm.running_mean), norm.momentum)
        norm.running_var.lerp_((variance * count / (count - 1)).to(norm.running_var), norm.momentum)


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


def _differentiable_gradients(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, weight and bias, computed by torch's own layers so that they are differentiable."""
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
    pooled = F.max_pool2d((y.relu() if ctx.relu else y).flatten(1, 2), ctx.pool)
    y = torch.unflatten(pooled, 1, x.shape[1:3])
    inputs = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
    gradients = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    return tuple([next(gradients) if tensor.requires_grad else None for tensor in (x, weight, bias)])
