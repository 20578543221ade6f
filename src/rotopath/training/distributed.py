"""Devices and processes: train on one device, or on several devices with distributed data parallel (DDP).

With several devices, there is one process for each device. All processes train the same network, each on its own part
of every batch. Lightning, torchrun or SLURM starts the processes. The run folder must be on a disk that all processes
can access.
"""

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

from rotopath.data import Batches
from rotopath.model_file import RunError
from rotopath.recipe import Recipe
from rotopath.training.checkpoint import LOG_EVERY_STEPS, TENSORBOARD, RunRecorder

BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm  # GroupBatchNorm2d is a BatchNorm3d
DDP_TIMEOUT = timedelta(hours=12)  # longest wait for the first process, which mines hard examples and scores the model


# Processes


def is_first_process() -> bool:
    """Return whether this process has rank 0. Only the process of rank 0 writes files and prints.

    This function also works before the processes are connected to each other.
    """
    rank: int = rank_zero_only.rank  # type: ignore[attr-defined]
    return rank == 0


def expect_processes(count: int) -> None:
    """Raise a RunError if torchrun has started a number of processes that differs from `count`.

    `count` is the number of devices of the recipe, because each device needs one process. Without torchrun, this
    function does nothing.
    """
    started = int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else count
    if started != count:
        raise RunError(
            f"torchrun has started {started} processes, but the recipe has {count} devices (devices · nodes); "
            f"make the two numbers equal, for example with --set devices={started}."
        )


def run_on_first_process(act: Callable[[], None]) -> None:
    """Call the function `act` in the first process only. The other processes wait until `act` has finished."""
    if is_first_process():
        act()
    if dist.is_initialized():
        dist.barrier()


# Lightning


def make_trainer(recipe: Recipe, folder: Path, recorder: RunRecorder) -> Trainer:
    """Return Lightning's trainer for the devices of a recipe. The trainer writes a TensorBoard log into the run folder.

    `recorder` is the callback that writes the log and the checkpoints. Raises RunError if the devices are not
    available.
    """
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    is_distributed = recipe.devices * recipe.nodes > 1
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "GPU available but not used")  # the recipe asks for the CPU
        try:
            return Trainer(
                max_epochs=recipe.epochs,
                accelerator=recipe.accelerator,
                devices=recipe.devices,
                num_nodes=recipe.nodes,
                strategy=DDPStrategy(timeout=DDP_TIMEOUT) if is_distributed else "auto",
                precision="32-true" if recipe.precision == "32" else "bf16-mixed",
                callbacks=[recorder],
                plugins=[CheckpointFiles()],
                logger=TensorBoardLogger(folder, name="", version=TENSORBOARD),
                log_every_n_steps=min(LOG_EVERY_STEPS, recipe.step_count),
                num_sanity_val_steps=0,
                enable_checkpointing=False,  # the recorder writes checkpoints
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            )
        except (MisconfigurationException, ValueError, RuntimeError) as error:
            reason = str(error).rstrip(".")
            raise RunError(
                f"The devices of the recipe are not available: {reason}. Change the keys 'accelerator', 'devices' or "
                f"'nodes' of the recipe."
            ) from None


class CheckpointFiles(TorchCheckpointIO):
    """Writes checkpoints to their path. Lightning would first write a file in the folder for temporary files.

    A process that is killed would leave this file, which nothing removes.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: object = None) -> None:  # noqa: ARG002
        content = io.BytesIO()
        torch.save(checkpoint, content)
        Path(path).write_bytes(content.getvalue())


@contextmanager
def raise_keyboard_interrupt() -> Iterator[None]:
    """Context manager: raise the KeyboardInterrupt that Lightning converts to SystemExit, after Ctrl-C or SIGTERM."""
    try:
        yield
    except SystemExit as end:
        cause = end.__context__
        raise cause if isinstance(cause, KeyboardInterrupt) else KeyboardInterrupt() from None


class EpochLoader:
    """Data loader for Lightning: in each epoch, it yields this process's part of every batch, as images and targets.

    `list_steps` is a function that is called at the start of each epoch. It returns the indices of the steps of this
    epoch or, if the epoch is resumed, the indices of the remaining steps. `count` is the number of steps of a whole
    epoch. `workers` is the number of processes that read the images.
    """

    def __init__(
        self, batches: Batches, list_steps: Callable[[], range], count: int, trainer: Trainer, workers: int
    ) -> None:
        self._batches, self._list_steps, self._count = batches, list_steps, count
        self._trainer, self._workers = trainer, workers

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        part = self._batches.shard(self._trainer.global_rank, self._trainer.world_size)
        return part.load(self._list_steps(), self._trainer.strategy.root_device, self._workers)

    def state_dict(self) -> dict[str, Any]:
        """Return an empty state, because a batch depends only on its step. Lightning needs this to resume an epoch."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


# Batch norm with the statistics of all processes


def synchronize_batch_norms(module: nn.Module) -> None:
    """Replace each batch norm layer in a module by a `SynchronizedBatchNorm` with the same weights, in place."""
    for name, child in module.named_children():
        if isinstance(child, BatchNorm):
            setattr(module, name, SynchronizedBatchNorm(child))
        else:
            synchronize_batch_norms(child)


class SynchronizedBatchNorm(nn.Module):
    """Batch norm for inputs (B, C, ...), with the mean and variance of each channel over the batches of all processes.

    The new layer shares its weights and running statistics with the batch norm layer `norm`, under the same names. The
    batches of the processes may have different sizes. Unlike `torch.nn.SyncBatchNorm`, this layer also runs on CPUs.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, norm: BatchNorm) -> None:
        super().__init__()
        self.channels, self.eps, self.momentum = norm.num_features, norm.eps, norm.momentum
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return F.batch_norm(
                input,
                self.running_mean,
                self.running_var,
                self.weight,
                self.bias,
                training=self.running_mean is None,
                eps=self.eps,
            )
        axes = [0, *range(2, input.ndim)]
        per_channel = (1, -1, *(1 for _ in axes[1:]))  # shape (1, C, 1, ...) in which values per channel broadcast
        values = input.to(torch.promote_types(input.dtype, torch.float32))
        count = values.new_tensor([values.numel() / self.channels])
        totals = _sum_over_processes(torch.cat([values.sum(axes), count]))
        count = totals[-1:]
        mean = totals[:-1] / count
        centered = values - mean.view(per_channel)
        variance = _sum_over_processes(centered.square().sum(axes)) / count
        if self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            momentum = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach(), momentum)
            self.running_var.lerp_((variance * count / (count - 1)).detach(), momentum)
        scale = torch.rsqrt(variance + self.eps)
        normalized = centered * (scale if self.weight is None else scale * self.weight).view(per_channel)
        if self.bias is not None:
            normalized = normalized + self.bias.view(per_channel)
        return normalized.to(input.dtype)

    def extra_repr(self) -> str:
        return f"{self.channels}, eps={self.eps}, momentum={self.momentum}"


class _SumOverProcesses(torch.autograd.Function):
    """Autograd function: sum a tensor over all processes.

    The sum influences the loss of every process. The backward pass therefore also sums the gradients over all
    processes.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor) -> Tensor:  # noqa: ARG004
        total = part.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        return _SumOverProcesses.forward(None, gradients[0])


def _sum_over_processes(part: Tensor) -> Tensor:
    total: Tensor = _SumOverProcesses.apply(part)  # type: ignore[no-untyped-call]
    return total
