"""Batch norm, ReLU and max pooling on the CPU in training, with little memory between them.

In: features (B, C, N, H, W) that lie channels-last. Out: what the layers give one after another, to rounding. Fresh
memory is what costs time here: forward, the answer alone takes some, and backward the gradient of the features.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.forward_ad import unpack_dual

DTYPES = (torch.float32, torch.float64)


def can_normalise(x: Tensor, norm: nn.BatchNorm3d) -> bool:
    """Whether `norm_relu_pool` takes these features and this batch norm; what it does not, torch's layers do."""
    return (
        not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]
        and not torch._C._are_functorch_transforms_active()
        and norm.training
        and norm.affine
        and norm.momentum is not None
        and type(x) is Tensor  # not one that only records what is done to it
        and x.device.type == "cpu"
        and x.dtype in DTYPES
        and x.dtype == norm.weight.dtype
        and x.numel() > norm.num_features  # of a single value there is no variance, and torch says so
        and x.permute(0, 3, 4, 1, 2).is_contiguous()
        and not any(_has_tangent(tensor) for tensor in (x, norm.weight, norm.bias))
    )


def _has_tangent(tensor: Tensor) -> bool:
    """Whether derivatives are carried forward with the tensor."""
    return unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def norm_relu_pool(x: Tensor, norm: nn.BatchNorm3d, relu: bool = True, pool: int = 1) -> Tensor:
    """Batch norm by the statistics of the batch, ReLU if asked for, and the maximum over windows of pool × pool."""
    y: Tensor = _NormReluPool.apply(x, norm.weight, norm.bias, norm, relu, pool)  # type: ignore[no-untyped-call]
    return y


class _NormReluPool(torch.autograd.Function):
    """Pools what comes in: batch norm is a line, so the highest (or, where it falls, the lowest) stays so."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, norm: nn.BatchNorm3d, relu: bool, pool: int
    ) -> Tensor:
        n, maps = x.shape[2], x.flatten(1, 2)  # (B, C·N, H, W), as it lies in memory
        mean, variance = _find_statistics(maps, n)
        _track(norm, mean, variance, count=x.numel() // len(mean))
        inverse = (variance + norm.eps).rsqrt()
        factor = weight * inverse
        chosen, places = (maps, None) if pool == 1 else _pool(maps, weight.repeat_interleave(n), pool)
        y = _empty_features((*x.shape[:3], *chosen.shape[2:]), x)
        torch.addcmul(_column(bias - mean * factor, n), chosen, _column(factor, n), out=y.flatten(1, 2))
        if relu:
            y.relu_()
        ctx.save_for_backward(x, weight, bias, mean, inverse, chosen, places, y if relu else None)
        ctx.eps, ctx.relu, ctx.pool = norm.eps, relu, pool
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse, chosen, places, y = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of these gradients will be asked for
            found = _differentiable_gradients(ctx, x, weight, bias, gradients[0])
            return (*found, None, None, None)
        n, maps = x.shape[2], x.flatten(1, 2)
        dy = gradients[0].flatten(1, 2).contiguous(memory_format=torch.channels_last)
        if ctx.relu:
            dy = torch.ops.aten.threshold_backward(dy, y.flatten(1, 2), 0)
        # Of torch's own backward pass of batch norm only the sums, over every column by itself.
        line = (weight.repeat_interleave(n), None, None, mean.repeat_interleave(n), inverse.repeat_interleave(n))
        sums = torch.ops.aten.native_batch_norm_backward(dy, chosen, *line, True, ctx.eps, [False, True, True])
        d_weight, d_bias = (torch.unflatten(column, 0, (-1, n)).sum(dim=1) for column in sums[1:])
        factor, count = weight * inverse, x.numel() // len(mean)
        slope = -factor * inverse * d_weight / count
        level = -factor * d_bias / count - slope * mean
        passed_on = torch.mul(
            dy, _column(factor, n), out=dy if ctx.relu else None
        )  # what came in is not ours to change
        if places is None:
            dx = passed_on.addcmul_(maps, _column(slope, n)).add_(_column(level, n))
        else:
            dx = torch.addcmul(_column(level, n), maps, _column(slope, n))
            pixels, places, passed_on = (t.permute(0, 2, 3, 1).flatten(1, 2) for t in (dx, places, passed_on))
            pixels.scatter_add_(1, places, passed_on)  # (B, H·W, C·N), the memory of dx
        return torch.unflatten(dx, 1, x.shape[1:3]), d_weight, d_bias, None, None, None


def _empty_features(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Memory for channels-last features that is no view of another shape: ReLU can change it in place at no cost."""
    _, channels, n, height, width = shape
    columns = channels * n
    strides = (height * width * columns, n, 1, width * columns, columns)
    return like.new_empty_strided(shape, strides)


def _find_statistics(maps: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Mean and variance of each channel: those of its N columns, and how far the columns lie apart."""
    columns = torch.batch_norm_update_stats(maps, None, None, 0.0)
    means, variances = (torch.unflatten(column, 0, (-1, n)) for column in columns)
    between, mean = torch.var_mean(means, dim=1, correction=0)
    return mean, variances.mean(dim=1) + between


def _track(norm: nn.BatchNorm3d, mean: Tensor, variance: Tensor, count: int) -> None:
    if norm.num_batches_tracked is not None:
        norm.num_batches_tracked.add_(1)
    if norm.running_mean is not None and norm.running_var is not None:
        assert norm.momentum is not None
        norm.running_mean.lerp_(mean.to(norm.running_mean), norm.momentum)
        norm.running_var.lerp_((variance * count / (count - 1)).to(norm.running_var), norm.momentum)


def _pool(maps: Tensor, weight: Tensor, pool: int) -> tuple[Tensor, Tensor]:
    """What lies highest behind a line of that slope in every window, and where."""
    if not bool((weight < 0).any()):
        chosen, places = F.max_pool2d(maps, pool, return_indices=True)
        return chosen, places
    sign = torch.where(weight < 0, -1, 1).to(maps).view(-1, 1, 1)
    chosen, places = F.max_pool2d(maps * sign, pool, return_indices=True)
    return chosen.mul_(sign), places


def _column(channels: Tensor, n: int) -> Tensor:
    return channels.repeat_interleave(n).view(1, -1, 1, 1)


def _differentiable_gradients(
    ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor
) -> tuple[Tensor | None, ...]:
    """The same gradients by torch's own layers, of which it knows the gradients in turn."""
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=ctx.eps)
    pooled = F.max_pool2d((y.relu() if ctx.relu else y).flatten(1, 2), ctx.pool)
    y = torch.unflatten(pooled, 1, x.shape[1:3])
    inputs = [tensor for tensor in (x, weight, bias) if tensor.requires_grad]
    found = iter(torch.autograd.grad(y, inputs, dy, create_graph=True))
    return tuple([next(found) if tensor.requires_grad else None for tensor in (x, weight, bias)])
