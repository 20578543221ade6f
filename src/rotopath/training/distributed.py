"""Several processes that train one network, each on its share of every batch.

In: a network. Out: one whose batch norms see all shares, so that it learns what a single process would; and which
process this is. Lightning, torchrun or SLURM start the processes; the run folder has to be in the sight of all.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from rotopath.model_file import RunError


def is_first() -> bool:
    """Whether this is the process that writes and prints; also known before the processes have met."""
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank == 0


def expect_processes(count: int) -> None:
    """Refuse to begin where torchrun has started another number of processes than the recipe has devices."""
    started = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else count
    if started != count:
        raise RunError(
            f"torchrun has started {started} processes, but the recipe's devices times nodes are {count}; "
            f"make them equal, as with --set devices={started}."
        )


def first_alone(act: Callable[[], None]) -> None:
    """Let the first process do something, while the others wait."""
    if is_first():
        act()
    if dist.is_initialized():
        dist.barrier()


def share_statistics(module: nn.Module) -> None:
    """Replace the batch norms of a module by ones with the same weights that see the shares of all processes.

    Torch has such a layer for GPUs alone.
    """
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, SharedBatchNorm(child))
        else:
            share_statistics(child)


class SharedBatchNorm(_BatchNorm):
    """Batch norm of (B, C, ...) by the mean and the variance of each channel over the batches of all processes."""

    def __init__(self, norm: _BatchNorm) -> None:
        super().__init__(norm.num_features, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
        self.weight, self.bias = norm.weight, norm.bias
        self.running_mean, self.running_var = norm.running_mean, norm.running_var
        self.num_batches_tracked = norm.num_batches_tracked
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        axes = [0, *range(2, input.ndim)]
        across = (1, -1, *(1 for _ in axes[1:]))  # a value a channel, against the input
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor([values.numel() / self.num_features])
        total = _summed(torch.cat([values.sum(axes), count]))
        count = total[-1:]
        mean = total[:-1] / count
        centred = values - mean.view(across)
        variance = _summed(centred.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), share)
            self.running_var.lerp_((variance * count / (count - 1)).detach(), share)
        scale = torch.rsqrt(variance + self.eps)
        normalised = centred * (scale if self.weight is None else scale * self.weight).view(across)
        if self.bias is not None:
            normalised = normalised + self.bias.view(across)
        return normalised.to(input.dtype)

    def _check_input_dim(self, input: Tensor) -> None: ...


class _Sum(torch.autograd.Function):
    """The sum over processes; each one's loss depends on the shares of all, so gradients are summed as well."""

    @staticmethod
    def forward(ctx: Any, share: Tensor) -> Tensor:  # noqa: ARG004
        total = share.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return _Sum.forward(None, gradients[0])


def _summed(share: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(share)  # type: ignore[no-untyped-call]
    return total
