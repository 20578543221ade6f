"""Lifting with batch norm, ReLU and pooling, and the gradients of all four.

In: images, and kernels turned to all orientations. Out: what the layers give one after another. Lifting is linear: its
statistics, and the part of its gradient that batch norm adds, follow from the second moments of the image's patches.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.kernels import patches, strips
from rotopath.nn.kernels.statistics import recall, track


def lift(x: Tensor, kernels: Tensor, orientations: int) -> Tensor:
    """Images (B, C', H, W) and kernels (C·N, C', k, k) to features (B, C, N, H, W), in the precision of the images."""
    y: Tensor = Lift.apply(x, kernels)
    return torch.unflatten(y, -1, (-1, orientations)).permute(0, 3, 4, 1, 2)


def lift_norm_relu_pool(x: Tensor, kernels: Tensor, norm: nn.BatchNorm3d, pool: int = 1, blur: int = 0) -> Tensor:
    """The same, with batch norm, ReLU, and the maximum over windows or, if it is to be blurred, a root mean square."""
    n = kernels.shape[0] // norm.num_features
    if norm.training:
        y: Tensor = LiftNormReluPool.apply(x, kernels, norm.weight, norm.bias, *track(norm), pool, blur)
    else:
        y, *_ = _apply(x, _flatten(kernels, x), recall(norm), pool, blur)
    return torch.unflatten(y, -1, (-1, n)).permute(0, 3, 4, 1, 2)


class Lift(torch.autograd.Function):
    """Correlation of images (B, C', H, W) with kernels (C·N, C', k, k): features (B, H, W, C·N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.like = kernels.new_empty(0, *kernels.shape[1:])
        return patches.lift(x, _flatten(kernels, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        products = patches.find_products(x, gradients[0], ctx.like.shape[-1])
        return None, _unflatten(products[:, :-1], ctx.like)


class LiftNormReluPool(torch.autograd.Function):
    """The same, with batch norm by the statistics of the batch, ReLU and pooling."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        kernels: Tensor,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor | None,
        running_variance: Tensor | None,
        momentum: float,
        eps: float,
        pool: int,
        blur: int,
    ) -> Tensor:
        flat = _flatten(kernels, x)
        sums, squares, count = patches.find_moments(x, kernels.shape[-1])
        lines = flat.double().unflatten(0, (weight.shape[0], -1))  # (C, N, taps)
        means = lines @ (sums / count)  # of each orientation
        mean = means.mean(1)
        spread = squares / count - torch.outer(sums, sums) / count**2
        variance = ((lines @ spread) * lines).sum(2).clamp(min=0).add((means - mean[:, None]).square()).mean(1)
        inverse = (variance + eps).rsqrt()
        if running_mean is not None and running_variance is not None:
            seen = count * lines.shape[1]
            running_mean.lerp_(mean.to(running_mean), momentum)
            running_variance.lerp_((variance * seen / (seen - 1)).to(running_variance), momentum)
        y, *kept = _apply(x, flat, (mean, inverse, weight, bias), pool, blur, remember=True)
        ctx.save_for_backward(x, lines, mean, inverse, weight, bias, sums, squares, *kept)
        ctx.like, ctx.pool, ctx.blur, ctx.count = kernels.new_empty(0, *kernels.shape[1:]), pool, blur, count
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, lines, mean, inverse, weight, bias, sums, squares, *kept = ctx.saved_tensors
        gradient, side = gradients[0].contiguous(), ctx.like.shape[-1]
        if ctx.blur:
            line = (mean.float(), inverse.float(), weight, bias)
            lifted, y = kept
            gradient = strips.find_gradient(lifted, strips.halve(gradient, y), ctx.pool, ctx.blur, line)
            products = patches.find_products(x, gradient.flatten(-2), side)
        else:
            products = patches.find_products(x, gradient, side, ctx.pool, *kept)
        products = products.unflatten(0, lines.shape[:2])
        products, totals = products[..., :-1], products[..., -1]
        d_bias = totals.sum(1)
        d_weight = inverse * ((products * lines).sum((1, 2)) - mean * d_bias)
        # What batch norm takes from each gradient: its mean, and what goes along with the normalised feature.
        count = ctx.count * lines.shape[1]
        level, slope = (d_bias / count)[:, None, None], (d_weight / count * inverse)[:, None, None]
        d_lines = products - level * sums - slope * (lines @ squares - mean[:, None, None] * sums)
        d_kernels = _unflatten(((weight * inverse)[:, None, None] * d_lines).flatten(0, 1), ctx.like)
        return None, d_kernels, d_weight.to(weight), d_bias.to(weight), *[None] * 6


def _apply(
    x: Tensor, flat: Tensor, line: tuple[Tensor, Tensor, Tensor, Tensor], pool: int, blur: int, remember: bool = False
) -> tuple[Tensor, ...]:
    """Features (B, H, W, C·N) for mean, inverse deviation, weight and bias of batch norm, and what gradients need."""
    mean, inverse, weight, bias = line
    if blur:
        lifted = patches.lift(x, flat).unflatten(-1, (len(weight), -1))
        y = strips.apply(lifted, pool, blur, (mean.float(), inverse.float(), weight, bias))
        return y.flatten(-2), lifted, y
    factor = weight * inverse
    by_column = torch.stack([factor, bias - mean * factor]).float().repeat_interleave(len(flat) // len(weight), 1)
    y, winners = patches.lift_and_pool(x, flat, by_column, pool, remember)
    return (y,) if winners is None else (y, winners)


def _flatten(kernels: Tensor, x: Tensor) -> Tensor:
    """Kernels (C·N, C', k, k) as taps (C·N, k·k·C') in the precision of the images."""
    return kernels.permute(0, 2, 3, 1).flatten(1).to(x.dtype).contiguous()


def _unflatten(flat: Tensor, like: Tensor) -> Tensor:
    channels, side, _ = like.shape[1:]
    return torch.unflatten(flat, 1, (side, side, channels)).permute(0, 3, 1, 2).to(like.dtype)
