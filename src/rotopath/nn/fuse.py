"""Run a convolution, batch norm, ReLU and a pool in few passes over memory, on CPU and GPU.

To fuse layers means to compute them together, without writing the result of each layer to memory. `run_stage` returns
the same result as calling the layers one after another, up to rounding. The table lists the layers that can be fused.
`run_stage` uses the first row of which all conditions are met. It calls all other layers one by one.

| fused layers | device | used in | data type | conditions are in |
|---|---|---|---|---|
| lifting, batch norm, ReLU, pool | GPU | training; evaluation without gradients | half | `can_fuse_lift` |
| batch norm, ReLU, pool | GPU | training; evaluation without gradients | half, float32 | `can_fuse_norm` |
| batch norm, ReLU, max pool | CPU | training | float32, float64 | `can_fuse_norm` |
| root-mean-square pool alone, with or without blur | GPU | training; evaluation | half, float32 | `run_pool` |

"half" is float16 or bfloat16. A pool is fused with the layers before it if `can_fuse_pool` returns True; otherwise
`run_pool` applies it after them. Features must be channels-last. Layers with hooks and subclasses of the layers are
never fused. Nothing is fused under torch.compile, torch.func or an export.

The GPU kernels and their conditions are in `rotopath.nn.triton`, the CPU code is in `rotopath.nn.norm`.
"""

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # private; tests/nn/test_fuse.py tests that it still works

from rotopath.nn import triton
from rotopath.nn.checks import check_grid, check_image
from rotopath.nn.conv import LiftConv2d
from rotopath.nn.norm import GroupBatchNorm2d, can_normalize_on_cpu, norm_relu_pool_on_cpu
from rotopath.nn.pool import GroupAvgPool2d, GroupMaxPool2d

MAX_POOL_SIZE = 11  # px; the largest window whose argmax (0 … 120) fits in int8


def run_stage(x: Tensor, conv: nn.Module, norm: nn.Module, relu: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Apply a convolution, batch norm, ReLU and, if given, a pool, in as few passes over memory as possible.

    `x` is the input of the convolution: images (B, C, H, W) for `LiftConv2d`, else features (B, C, N, H, W). Returns
    features.
    """
    if can_fuse_lift(x, conv, norm, relu):
        fused_pool = _select_fusible(x, pool)
        x = lift_norm_relu_pool(x, conv, norm, fused_pool)
    elif can_fuse_norm(x := conv(x), norm, relu):
        fused_pool = _select_fusible(x, pool)
        x = norm_relu_pool(x, norm, fused_pool)
    else:
        fused_pool = None
        x = relu(norm(x))
    return x if pool is None or fused_pool is not None else run_pool(x, pool)


def run_pool(x: Tensor, pool: nn.Module) -> Tensor:
    """Apply a pool to features (B, C, N, H, W). On a GPU, a root-mean-square pool takes one pass over memory."""
    if triton.can_run_on(x) and triton.has_supported_layout(x) and _is_blurred_rms(pool):
        from rotopath.nn.triton import blur_pool

        assert isinstance(pool, GroupAvgPool2d)
        _check_divisible(pool.size, *x.shape[-2:])
        with triton.on_device_of(x):
            return blur_pool.blur(x, pool)
    pooled: Tensor = pool(x)
    return pooled


def can_fuse_lift(x: Tensor, lift: nn.Module, norm: nn.Module, relu: nn.Module) -> bool:
    """Return whether `lift_norm_relu_pool` can replace these layers for images (B, C, H, W)."""
    if type(lift) is not LiftConv2d or not _are_norm_and_relu(norm, relu) or _has_hooks(lift):
        return False
    if not triton.can_run_on(x):
        return False
    assert isinstance(norm, GroupBatchNorm2d)
    height, width = (size - lift.kernel_size + 1 for size in x.shape[-2:])
    return triton.can_lift(x, lift) and triton.can_use_norm(norm, x.shape[0] * lift.order * height * width)


def can_fuse_norm(x: Tensor, norm: nn.Module, relu: nn.Module) -> bool:
    """Return whether `norm_relu_pool` can replace these layers for features (B, C, N, H, W)."""
    if not _are_norm_and_relu(norm, relu):
        return False
    assert isinstance(norm, GroupBatchNorm2d)
    # When `freeze` traces a network in evaluation mode, x is a placeholder without values. Only its type may be read.
    on_cpu = norm.training and can_normalize_on_cpu(x, norm)
    return on_cpu or (triton.can_run_on(x) and triton.can_normalize(x, norm))


def can_fuse_pool(x: Tensor, pool: nn.Module) -> bool:
    """Return whether a pool can be fused: a max pool without blur or, on a GPU, a root-mean-square pool.

    The stride of the pool must equal its window, and the pool must have no padding. The window of a max pool must be at
    most MAX_POOL_SIZE, and the blur of a root-mean-square pool at most 2 · window + 1 taps.
    """
    return _is_plain_max(pool) or (x.is_cuda and _is_blurred_rms(pool))


def lift_norm_relu_pool(x: Tensor, lift: nn.Module, norm: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Apply lifting, batch norm, ReLU and a pool to images (B, C, H, W) in few passes on a GPU.

    Call this only if `can_fuse_lift` and, for a pool, `can_fuse_pool` return True.
    """
    assert isinstance(lift, LiftConv2d)
    assert isinstance(norm, GroupBatchNorm2d)
    from rotopath.nn.triton import blur_pool
    from rotopath.nn.triton import lift as lift_kernels

    check_image(x, lift, lift.in_channels)
    check_grid(x, lift, lift.kernel_size, stride=1, padding=0)
    assert pool is None or isinstance(pool, GroupMaxPool2d | GroupAvgPool2d)
    size = 1 if pool is None else pool.size
    _check_divisible(size, *(side - lift.kernel_size + 1 for side in x.shape[-2:]))
    window = blur_pool.filter_of(pool) if isinstance(pool, GroupAvgPool2d) else size
    with triton.on_device_of(x):
        return lift_kernels.lift_norm_relu_pool(x.to(triton.compute_dtype(x)), lift.kernels_for(x), norm, window)


def norm_relu_pool(x: Tensor, norm: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Apply batch norm, ReLU and a pool to features (B, C, N, H, W) in few passes on CPU or GPU.

    Call this only if `can_fuse_norm` and, for a pool, `can_fuse_pool` return True.
    """
    assert isinstance(norm, GroupBatchNorm2d)
    assert pool is None or isinstance(pool, GroupMaxPool2d | GroupAvgPool2d)
    size = 1 if pool is None else pool.size
    _check_divisible(size, *x.shape[-2:])
    if not x.is_cuda:
        return norm_relu_pool_on_cpu(x, norm, pool=size)
    from rotopath.nn.triton import batch_norm, blur_pool

    with triton.on_device_of(x):
        if isinstance(pool, GroupAvgPool2d):
            return blur_pool.norm_relu_blur(x, norm, pool)
        return batch_norm.norm_relu_pool(x, norm, size)


def _select_fusible(x: Tensor, pool: nn.Module | None) -> nn.Module | None:
    return pool if pool is not None and can_fuse_pool(x, pool) else None


def _are_norm_and_relu(norm: nn.Module, relu: nn.Module) -> bool:
    return type(norm) is GroupBatchNorm2d and type(relu) is nn.ReLU and not _has_hooks(norm, relu)


def _is_plain_max(pool: nn.Module) -> bool:
    return (
        type(pool) is GroupMaxPool2d
        and (pool.stride, pool.padding, pool.blur) == (pool.size, 0, 1)
        and pool.size <= MAX_POOL_SIZE
        and not _has_hooks(pool)
    )


def _is_blurred_rms(pool: nn.Module) -> bool:
    return (
        type(pool) is GroupAvgPool2d
        and (pool.stride, pool.padding, pool.power) == (pool.size, 0, 2)
        and pool.blur <= 2 * pool.size + 1
        and not _has_hooks(pool)
    )


def _check_divisible(size: int, height: int, width: int) -> None:
    if height % size or width % size:
        raise ValueError(
            f"Windows of {size} px do not cover features of {height} × {width} px evenly; use multiples of {size} px."
        )


def _has_hooks(*layers: nn.Module) -> bool:
    """Return whether any of these layers has hooks, or torch has hooks for all modules."""
    return bool(_has_any_global_hook()) or any(  # type: ignore[no-untyped-call]
        layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
        for layer in layers
    )
