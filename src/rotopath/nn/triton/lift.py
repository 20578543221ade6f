"""Lifting on a GPU, alone or fused with batch norm, ReLU and a pool, with the gradients of kernels and batch norm.

`lift` replaces a `LiftConv2d` where `can_lift` in `rotopath.nn.triton` returns True. `norm_relu_pool` replaces the
lifting, batch norm, ReLU and pool of the first stage of a network. With a max pool, it never stores the lifted
features, which are the largest tensor of the network.

Method: in training, batch norm needs the mean and the variance of the lifted features before the output can be
computed. A kernel covers a *patch* of the image: k × k pixels with C' channels. These k·k·C' values are the *taps* of
the patch. A lifted value is the sum of taps times weights of a kernel. The mean and the variance therefore follow from
the kernels and the *moments* of the images: for each pair of taps, the sum of their product over all patches. The
gradients need the moments too. The moments are in float64, because the variance is a small difference of large numbers.

Sizes: C' input channels, kernels of k × k pixels, C output channels, N orientations. H and W are the height and the
width of the tensor that is described; lifting reduces both by k - 1. T is the number of taps of a patch as the Triton
kernels count them: the k·k·C' values, then a *constant tap* of 1, then unused taps up to a size that Triton supports
(`patches._split_taps`).

Arguments of the Triton kernels; all arrays are contiguous:

- `flat_kernels`: the convolution kernels, flattened from (C·N, C', k, k) to (C·N, k·k·C').
- `columns`: C·N, the length of the last axis of features (B, H, W, C·N). A *column* is an entry of this axis, that is,
  one channel at one orientation. The row of `flat_kernels` with the same index computes it.
- `taps`: the number k·k·C', which is also the index of the constant tap.
- `patches`: the number of all patches of the batch, B·H·W for lifted features with height H and width W.
- `moments`: the moments (T, T). STRIDE is this T.
- `products`: matrix product of kernels and moments (C·N, T). Only the first `taps` entries of each row are used.
- `mean`, `inverse_std`, `weight`, `bias`: batch norm of each channel (C,), with `inverse_std` = 1 / √(variance + ε).
- `scale`, `shift`: the same batch norm for each column (C·N,), as scale · value + shift.
- `batches`, `running_mean`, `running_variance`: number of batches and running statistics of the batch norm, or None.
- `sums`: results (T, C·N) of `patches.sum_products`, for the gradient with respect to the output of batch norm.
- `d_flat_kernels`, `d_weight`, `d_bias`: gradients of the loss with respect to `flat_kernels`, weight and bias.

One program processes one channel with its N orientations. N_BLOCK and TAPS are N and `taps`, rounded up to powers of 2.
"""

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rotopath.nn.norm import PendingNorm
from rotopath.nn.pool import is_fusible_max, is_fusible_rms
from rotopath.nn.triton import blur_pool, can_use_norm, jit, next_power_of_2, on_device_of, patches
from rotopath.nn.triton.batch_norm import running_statistics, update_running_statistics
from rotopath.nn.triton.blur_pool import Filter

TILE_ROWS = 64  # orientations times rows of the moments that a program of `_statistics_kernel` processes at a time
WARPS = 8

Pool = int | Filter  # side of the windows of a max pool in pixels (1: no pool), or a root-mean-square pool


class Statistics(NamedTuple):
    """Statistics of lifted features for batch norm. Those of a batch are computed from the moments of its patches."""

    normalization: Tensor  # (2, C): mean and inverse standard deviation, in float64
    scale_shift: Tensor  # (2, C·N): batch norm of each column as scale · value + shift
    # For the backward pass; None for running statistics:
    moments: Tensor | None = None  # (T, T): sums over patches of the products of all pairs of taps, in float64
    products: Tensor | None = None  # (C·N, T): kernels times moments, in float64


class PendingLift(NamedTuple):
    """Lifting of images x (B, C', H, W) for which `can_lift` returns True, not computed yet. See `rotopath.nn.fuse`."""

    x: Tensor
    kernels: Tensor  # (C·N, C', k, k)
    orientations: int  # N

    @property
    def shape(self) -> tuple[int, ...]:
        batch, _, *sides = self.x.shape
        columns, _, side, _ = self.kernels.shape
        return batch, columns // self.orientations, self.orientations, *(size - side + 1 for size in sides)

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return self.x, self.kernels

    def compute(self) -> Tensor:
        with on_device_of(self.x):
            return lift(self.x, self.kernels, self.orientations)

    def activate(self, activation: str) -> None:  # noqa: ARG002
        return None

    def add(self, residual: Tensor) -> None:  # noqa: ARG002
        return None

    def pool(self, pool: nn.Module) -> None:  # noqa: ARG002
        return None

    def normalize(self, norm: nn.Module) -> "PendingLiftNorm | None":
        batch, _, n, height, width = self.shape
        if not isinstance(norm, nn.BatchNorm3d) or not can_use_norm(norm, batch * n * height * width):
            return None
        if not norm.training and torch.is_grad_enabled():
            return None
        with torch.no_grad(), on_device_of(self.x):
            statistics = _compute_statistics(self.x, self.kernels, norm)
        return PendingLiftNorm(self, norm.weight, norm.bias, statistics)


class PendingLiftNorm(NamedTuple):
    """Lifting of images and batch norm, and ReLU if `relu`, not computed yet. See `rotopath.nn.fuse`."""

    lift: PendingLift
    weight: Tensor
    bias: Tensor
    statistics: Statistics
    relu: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.lift.shape

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return *self.lift.inputs, self.weight, self.bias

    def compute(self) -> Tensor:
        if self.relu:
            return self._compute(pool=1)
        statistics, from_batch = self.statistics.normalization.float(), self.statistics.moments is not None
        return PendingNorm(self.lift.compute(), self.weight, self.bias, statistics, from_batch, on_gpu=True).compute()

    def activate(self, activation: str) -> "PendingLiftNorm | None":
        return self._replace(relu=True) if activation == "relu" and not self.relu else None

    def add(self, residual: Tensor) -> None:  # noqa: ARG002
        return None

    def normalize(self, norm: nn.Module) -> None:  # noqa: ARG002
        return None

    def pool(self, pool: nn.Module) -> Tensor | None:
        if self.relu and is_fusible_max(pool):
            return self._compute(pool.size)
        if self.relu and is_fusible_rms(pool):
            return self._compute(blur_pool.filter_of(pool))
        return None

    def _compute(self, pool: Pool) -> Tensor:
        with on_device_of(self.lift.x):
            return norm_relu_pool(self.lift.x, self.lift.kernels, self.weight, self.bias, self.statistics, pool)


def lift(x: Tensor, kernels: Tensor, orientations: int) -> Tensor:
    """Lift images x (B, C', H, W) with kernels (C·N, C', k, k), for N = `orientations`.

    Returns features (B, C, N, H, W) in the data type of x. The gradient with respect to x is not computed.
    """
    y: Tensor = Lift.apply(x, kernels)
    return torch.unflatten(y, -1, (-1, orientations)).permute(0, 3, 4, 1, 2)


def norm_relu_pool(
    x: Tensor, kernels: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics, pool: Pool = 1
) -> Tensor:
    """Lift images x (B, C', H, W) with kernels (C·N, C', k, k), and apply batch norm, ReLU and a pool.

    Returns features (B, C, N, H, W) in the data type of x. With running statistics, the result has no gradients. The
    gradient with respect to x is never computed.
    """
    y: Tensor = LiftNormReluPool.apply(x, kernels, weight, bias, statistics, pool)
    return torch.unflatten(y, -1, (len(weight), -1)).permute(0, 3, 4, 1, 2)


class Lift(torch.autograd.Function):
    """Autograd function: correlate images (B, C', H, W) with kernels (C·N, C', k, k) to features (B, H, W, C·N)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.like = kernels.new_empty(0, *kernels.shape[1:])  # empty: keeps only the shape and the data type
        return patches.lift(x, _flatten_kernels(kernels, x))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        products = patches.sum_products(x, gradients[0], ctx.like.shape[-1])
        return None, _unflatten_kernels(products[: math.prod(ctx.like.shape[1:])].t(), ctx.like)


class LiftNormReluPool(torch.autograd.Function):
    """Autograd function: lifting of images (B, C', H, W), batch norm with batch statistics, ReLU and a pool.

    Returns features (B, H, W, C·N). `weight` and `bias` (C,) are those of the batch norm.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernels: Tensor, weight: Tensor, bias: Tensor, statistics: Statistics, pool: Pool
    ) -> Tensor:
        flat_kernels = _flatten_kernels(kernels, x)
        mean_std, scale_shift, moments, products = statistics
        parameters = (*(mean_std.float() if isinstance(pool, Filter) else mean_std), weight, bias)
        y, *kept = _apply(x, flat_kernels, parameters, scale_shift, pool, for_backward=moments is not None)
        if moments is not None:
            ctx.save_for_backward(x, flat_kernels, weight, bias, moments, mean_std, products, *kept)
        side = kernels.shape[-1]
        ctx.like, ctx.pool = kernels.new_empty(0, *kernels.shape[1:]), pool
        ctx.count = x.shape[0] * (x.shape[2] - side + 1) * (x.shape[3] - side + 1)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, flat_kernels, weight, bias, moments, normalization, products, *kept = ctx.saved_tensors
        gradient, side = gradients[0].contiguous(), ctx.like.shape[-1]
        if isinstance(ctx.pool, Filter):
            lifted, y = kept
            parameters = (*normalization.float(), weight, bias)
            d_mean_square = blur_pool.divide_by_root(gradient, y)
            gradient = blur_pool.compute_gradient(lifted, d_mean_square, ctx.pool, parameters)
            sums = patches.sum_products(x, gradient.flatten(-2), side)
        else:
            sums = patches.sum_products(x, gradient, side, ctx.pool, *kept)
        d_flat_kernels = torch.empty_like(flat_kernels, dtype=ctx.like.dtype)
        d_weight, d_bias = torch.empty_like(weight), torch.empty_like(weight)
        columns, taps = flat_kernels.shape
        n = columns // len(weight)
        _gradients_kernel[len(weight),](
            sums=sums,
            moments=moments,
            flat_kernels=flat_kernels,
            weight=weight,
            mean=normalization[0],
            inverse_std=normalization[1],
            products=products,
            d_flat_kernels=d_flat_kernels,
            d_weight=d_weight,
            d_bias=d_bias,
            columns=columns,
            taps=taps,
            patches=ctx.count,
            STRIDE=len(moments),
            N=n,
            N_BLOCK=next_power_of_2(n),
            TAPS=next_power_of_2(taps),
            num_warps=WARPS,
        )
        return None, _unflatten_kernels(d_flat_kernels, ctx.like), d_weight, d_bias, None, None


def _apply(
    x: Tensor,
    flat_kernels: Tensor,
    parameters: tuple[Tensor, ...],
    scale_shift: Tensor,
    pool: Pool,
    for_backward: bool = False,
) -> tuple[Tensor, ...]:
    """Lift images and apply batch norm, ReLU and a pool.

    The batch norm is given in two forms. `parameters` are its mean, inverse standard deviation, weight and bias (C,).
    `scale_shift` (2, C·N) describes it as scale · value + shift. Returns the features (B, H, W, C·N), followed by
    tensors for the backward pass. For a root-mean-square pool, these are the lifted features and the output of the
    pool, both with separate axes C and N. For a max pool, it is the argmax, and only if `for_backward` is True.
    """
    if isinstance(pool, Filter):
        lifted = patches.lift(x, flat_kernels).unflatten(-1, (len(parameters[0]), -1))
        y = blur_pool.apply(lifted, pool, parameters)
        return y.flatten(-2), lifted, y
    y, argmax = patches.lift_and_pool(x, flat_kernels, scale_shift, pool, for_backward)
    return (y,) if argmax is None else (y, argmax)


def _flatten_kernels(kernels: Tensor, x: Tensor) -> Tensor:
    """Flatten kernels (C·N, C', k, k) to (C·N, k·k·C'), in the data type of the images."""
    return kernels.permute(0, 2, 3, 1).flatten(1).to(x.dtype).contiguous()


def _unflatten_kernels(flat_kernels: Tensor, like: Tensor) -> Tensor:
    """Reshape flattened kernels (C·N, k·k·C') to the shape of `like`, in the data type of `like`."""
    channels, side, _ = like.shape[1:]
    return torch.unflatten(flat_kernels, 1, (side, side, channels)).permute(0, 3, 1, 2).to(like.dtype)


def _compute_statistics(x: Tensor, kernels: Tensor, norm: nn.BatchNorm3d) -> Statistics:
    """Return the statistics of lifted features for a batch norm. In training, this updates its running statistics."""
    channels, columns = norm.num_features, len(kernels)
    n = columns // channels
    if not norm.training:
        mean, inverse_std = running_statistics(norm)
        scale = norm.weight * inverse_std
        scale_shift = torch.stack([scale, norm.bias - mean * scale]).float().repeat_interleave(n, 1)
        return Statistics(torch.stack([mean, inverse_std]).double(), scale_shift)
    flat_kernels = _flatten_kernels(kernels, x)
    taps = flat_kernels.shape[1]
    moments, patch_count = patches.sum_moments(x, kernels.shape[-1])
    side_length = len(moments)
    statistics = Statistics(
        normalization=torch.empty(2, channels, device=flat_kernels.device, dtype=torch.float64),
        scale_shift=torch.empty(2, columns, device=flat_kernels.device, dtype=torch.float32),
        moments=moments,
        products=torch.empty(columns, side_length, device=flat_kernels.device, dtype=torch.float64),
    )
    n_block = next_power_of_2(n)
    _statistics_kernel[channels,](
        moments=moments,
        flat_kernels=flat_kernels,
        weight=norm.weight,
        bias=norm.bias,
        mean=statistics.normalization[0],
        inverse_std=statistics.normalization[1],
        scale=statistics.scale_shift[0],
        shift=statistics.scale_shift[1],
        products=statistics.products,
        batches=norm.num_batches_tracked,
        running_mean=norm.running_mean,
        running_variance=norm.running_var,
        taps=taps,
        patches=patch_count,
        momentum=norm.momentum,
        eps=norm.eps,
        STRIDE=side_length,
        N=n,
        N_BLOCK=n_block,
        TAPS=next_power_of_2(taps),
        ROWS=max(1, TILE_ROWS // n_block),
        num_warps=WARPS,
    )
    return statistics


@triton.jit
def _load_taps(flat_kernels, column, taps, tap, n, N: tl.constexpr):
    """Load taps of the N kernels of one channel, as a tile (len(n), len(tap)) in float64.

    `tap` are the indices of the taps, `n` those of the orientations. `column` are the rows of `flat_kernels` for
    these orientations. Taps and orientations that do not exist are 0.
    """
    mask = (n < N)[:, None] & (tap < taps)[None, :]
    return tl.load(flat_kernels + column[:, None] * taps + tap[None, :], mask=mask, other=0.0).to(tl.float64)


@jit
def _statistics_kernel(
    moments, flat_kernels, weight, bias, mean, inverse_std, scale, shift, products,
    batches, running_mean, running_variance, taps, patches, momentum, eps,
    STRIDE: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Write the statistics of one channel over its N orientations, and update its running statistics.

    Reads `moments`, `flat_kernels`, `weight` and `bias`. Row `taps` of the moments (constant tap) contains the sums of
    single taps. Writes `mean`, `inverse_std`, `scale`, `shift` and `products`. In each step, the loop reads ROWS rows
    of moments.
    """
    channel = tl.program_id(0)
    n, tap = tl.arange(0, N_BLOCK), tl.arange(0, TAPS)
    column = channel * N + n
    kernel = _load_taps(flat_kernels, column, taps, tap, n, N)
    sums = tl.load(moments + taps * STRIDE + tap, mask=tap < taps, other=0.0)  # sum of each tap over all patches
    count = tl.zeros([], tl.float64) + patches
    means = tl.sum(kernel * sums[None, :], axis=1) / count
    squared_deviations = tl.zeros([N_BLOCK], tl.float64)
    for first in range(0, taps, ROWS):
        row = first + tl.arange(0, ROWS)
        offset = row[:, None] * STRIDE + tap[None, :]
        squares = tl.load(moments + offset, mask=(row < taps)[:, None] & (tap < taps)[None, :], other=0.0)
        product = tl.sum(kernel[:, None, :] * squares[None, :, :], axis=2)  # (N_BLOCK, ROWS)
        row_sums = tl.load(moments + taps * STRIDE + row, mask=row < taps, other=0.0)
        centered = product - means[:, None] * row_sums[None, :]
        squared_deviations += tl.sum(_load_taps(flat_kernels, column, taps, row, n, N) * centered, axis=1)
        tl.store(
            products + column[:, None] * STRIDE + row[None, :], product, mask=(n < N)[:, None] & (row < taps)[None, :]
        )
    average = tl.sum(means, axis=0) / N
    deviation = tl.where(n < N, means - average, 0.0)
    variances = tl.maximum(squared_deviations / count, 0.0, propagate_nan=tl.PropagateNan.ALL) + deviation * deviation
    variance = tl.sum(variances, axis=0) / N
    inverse = 1.0 / tl.sqrt(variance + eps)
    tl.store(mean + channel, average)
    tl.store(inverse_std + channel, inverse)
    channel_scale = tl.load(weight + channel).to(tl.float64) * inverse
    channel_shift = tl.load(bias + channel).to(tl.float64) - average * channel_scale
    tl.store(scale + column, channel_scale + tl.zeros([N_BLOCK], tl.float64), mask=n < N)
    tl.store(shift + column, channel_shift + tl.zeros([N_BLOCK], tl.float64), mask=n < N)
    values = count * N
    unbiased = variance * values / (values - 1)
    update_running_statistics(batches, running_mean, running_variance, channel, average, unbiased, momentum)


@jit
def _gradients_kernel(
    sums, moments, flat_kernels, weight, mean, inverse_std, products, d_flat_kernels, d_weight, d_bias,
    columns, taps, patches, STRIDE: tl.constexpr, N: tl.constexpr, N_BLOCK: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the kernels, the weight and the bias of one channel.

    Reads `sums`, whose row `taps` (constant tap) contains the sums of the gradients, and the arrays that
    `_statistics_kernel` has read and written.
    """
    channel = tl.program_id(0)
    n, tap = tl.arange(0, N_BLOCK), tl.arange(0, TAPS)
    column = channel * N + n
    mask = (n < N)[:, None] & (tap < taps)[None, :]
    kernel = _load_taps(flat_kernels, column, taps, tap, n, N)
    gradients = tl.load(sums + tap[None, :] * columns + column[:, None], mask=mask, other=0.0)
    center, inverse = tl.load(mean + channel), tl.load(inverse_std + channel)
    total = tl.sum(tl.load(sums + taps * columns + column, mask=n < N, other=0.0), axis=0)
    slope = inverse * (tl.sum(tl.sum(gradients * kernel, axis=1), axis=0) - center * total)
    tl.store(d_bias + channel, total)
    tl.store(d_weight + channel, slope)
    # The backward pass of batch norm subtracts, from the gradient with respect to its output, the mean of this gradient
    # and its part that is proportional to the normalized features.
    values = (tl.zeros([], tl.float64) + patches) * N
    tap_sums = tl.load(moments + taps * STRIDE + tap, mask=tap < taps, other=0.0)[None, :]
    centered = tl.load(products + column[:, None] * STRIDE + tap[None, :], mask=mask, other=0.0) - center * tap_sums
    gradients -= total / values * tap_sums + slope / values * inverse * centered
    gradients *= tl.load(weight + channel).to(tl.float64) * inverse
    tl.store(d_flat_kernels + column[:, None] * taps + tap[None, :], gradients, mask=mask)
