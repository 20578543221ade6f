"""Layers that follow each other, computed in fewer passes where that is faster: convolution, batch norm, ReLU, pooling.

In: images or SE(2) features, on a GPU for Triton's kernels, on the CPU for torch's. Out: what the layers give one after
another, to rounding. Everywhere else (compile, export, other dtypes and layouts) the layers are the way.
"""

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from rotopath.nn import cpu, expect, gpu
from rotopath.nn.conv import LiftConv2d
from rotopath.nn.norm import GroupBatchNorm2d
from rotopath.nn.pool import GroupAvgPool2d, GroupMaxPool2d

WIDEST = 11  # windows whose places a byte can tell


def run_stage(x: Tensor, conv: nn.Module, norm: nn.Module, relu: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """A convolution, batch norm, ReLU and a pool, in as few passes as they can be done in."""
    if can_lift(x, conv, norm, relu):
        taken = pool if pool is not None and can_pool(x, pool) else None
        x = lift_norm_relu_pool(x, conv, norm, taken)
        return x if pool is None or taken is not None else pool_alone(x, pool)
    x = conv(x)
    if not can_fuse(x, norm, relu):
        x = relu(norm(x))
    elif pool is not None and can_pool(x, pool):
        return norm_relu_pool(x, norm, pool)
    else:
        x = norm_relu_pool(x, norm)
    return x if pool is None else pool_alone(x, pool)


def can_lift(x: Tensor, lift: nn.Module, norm: nn.Module, relu: nn.Module) -> bool:
    """Whether `lift_norm_relu_pool` does for these images (B, C', H, W) what these layers do."""
    if type(lift) is not LiftConv2d or not _are_ours(norm, relu) or _hooked(lift) or not gpu.takes(x):
        return False
    assert isinstance(norm, GroupBatchNorm2d)
    height, width = (size - lift.kernel_size + 1 for size in x.shape[-2:])
    return gpu.can_lift(x, lift) and gpu.can_use(norm, x.shape[0] * lift.order * height * width)


def can_fuse(x: Tensor, norm: nn.Module, relu: nn.Module) -> bool:
    """Whether `norm_relu_pool` does for these features (B, C, N, H, W) what these two layers do."""
    if not _are_ours(norm, relu):
        return False
    assert isinstance(norm, GroupBatchNorm2d)
    # In evaluation features may be no tensor: `freeze` follows the network with none.
    on_cpu = norm.training and cpu.can_normalise(x, norm)
    return on_cpu or (gpu.takes(x) and gpu.can_normalise(x, norm))


def can_pool(x: Tensor, pool: nn.Module) -> bool:
    """Whether `norm_relu_pool` takes this pool along: a plain maximum or, on a GPU, a blurred root mean square."""
    return _is_plain_maximum(pool) or (x.is_cuda and _is_blurred_root(pool))


def lift_norm_relu_pool(x: Tensor, lift: nn.Module, norm: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Lifting, batch norm, ReLU, and a pool if there is one that can be taken along."""
    assert isinstance(lift, LiftConv2d)
    assert isinstance(norm, GroupBatchNorm2d)
    from rotopath.nn.triton import blur_pool
    from rotopath.nn.triton import lift as lift_kernels

    expect.image(x, lift, lift.in_channels)
    expect.on_grid(x, lift, lift.kernel_size, 1, 0)
    assert pool is None or isinstance(pool, GroupMaxPool2d | GroupAvgPool2d)
    size = 1 if pool is None else pool.size
    _expect_windows(size, *(side - lift.kernel_size + 1 for side in x.shape[-2:]))
    taken = blur_pool.filter_of(pool) if isinstance(pool, GroupAvgPool2d) else size
    with gpu.at(x):
        return lift_kernels.lift_norm_relu_pool(x.to(gpu.precision(x)), lift.kernels_for(x), norm, taken)


def norm_relu_pool(x: Tensor, norm: nn.Module, pool: nn.Module | None = None) -> Tensor:
    """Batch norm, ReLU, and a pool if there is one that can be taken along."""
    assert isinstance(norm, GroupBatchNorm2d)
    assert pool is None or isinstance(pool, GroupMaxPool2d | GroupAvgPool2d)
    size = 1 if pool is None else pool.size
    _expect_windows(size, *x.shape[-2:])
    if not x.is_cuda:
        return cpu.norm_relu_pool(x, norm, pool=size)
    from rotopath.nn.triton import batch_norm, blur_pool

    with gpu.at(x):
        if isinstance(pool, GroupAvgPool2d):
            return blur_pool.norm_relu_blur(x, norm, pool)
        return batch_norm.norm_relu_pool(x, norm, size)


def pool_alone(x: Tensor, pool: nn.Module) -> Tensor:
    """What the pool gives, on a GPU in one pass where several would be slow."""
    if gpu.takes(x) and gpu.lies_well(x) and _is_blurred_root(pool):
        from rotopath.nn.triton import blur_pool

        assert isinstance(pool, GroupAvgPool2d)
        _expect_windows(pool.size, *x.shape[-2:])
        with gpu.at(x):
            return blur_pool.blur(x, pool)
    pooled: Tensor = pool(x)
    return pooled


def _are_ours(norm: nn.Module, relu: nn.Module) -> bool:
    return type(norm) is GroupBatchNorm2d and type(relu) is nn.ReLU and not _hooked(norm, relu)


def _is_plain_maximum(pool: nn.Module) -> bool:
    return (
        type(pool) is GroupMaxPool2d
        and (pool.stride, pool.padding, pool.blur) == (pool.size, 0, 1)
        and pool.size <= WIDEST
        and not _hooked(pool)
    )


def _is_blurred_root(pool: nn.Module) -> bool:
    return (
        type(pool) is GroupAvgPool2d
        and (pool.stride, pool.padding, pool.power) == (pool.size, 0, 2)
        and pool.blur <= 2 * pool.size + 1
        and not _hooked(pool)
    )


def _expect_windows(size: int, height: int, width: int) -> None:
    if height % size or width % size:
        raise ValueError(f"Windows of {size} do not cover features of {height} × {width} px evenly.")


def _hooked(*layers: nn.Module) -> bool:
    """Whether someone looks at what goes into a layer or comes out of it."""
    return bool(_has_any_global_hook()) or any(  # type: ignore[no-untyped-call]
        layer._forward_pre_hooks or layer._forward_hooks or layer._backward_pre_hooks or layer._backward_hooks
        for layer in layers
    )
