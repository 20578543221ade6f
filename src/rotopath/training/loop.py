"""Optimisers and their schedules, as recipes name them.

In: a network and a recipe. Out: an optimiser with decoupled weight decay, and a schedule that moves at every step.

Fitting a network: Lightning runs the loop, and a keeper sees to it that nothing is lost.

In: a recipe, a network, batches. Out: files in the run folder: the best weights, a log of every step, and a checkpoint
from which the same command goes on, to the same weights as if nothing had happened.
"""

import csv
import io
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, StepLR

from rotopath import runs
from rotopath.data import Batches
from rotopath.model_file import RunError, load_weights, pack_weights
from rotopath.models import DenseNetwork
from rotopath.models.protocols import unwrap
from rotopath.recipe import Recipe
from rotopath.tasks import Task
from rotopath.tasks.task import Loss
from rotopath.training import graphs
from rotopath.training.distributed import share_statistics
from rotopath.writing import atomic_file, write_bytes, write_text


class DecoupledSGD(SGD):
    """SGD with momentum whose weight decay does not pass through the momentum (Loshchilov and Hutter, 2019).

    w ← (1 - lr · decay) · w, and then the step.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, momentum: float) -> None:
        for group in groups:
            group["decay"] = group.pop("weight_decay")
        super().__init__(groups, lr=lr, momentum=momentum)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        loss = None
        if closure is not None:  # it computes the gradients, so it goes before the weights change
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["decay"]:
                torch._foreach_mul_(group["params"], 1 - group["lr"] * group["decay"])
        super().step()
        return loss


def make_optimiser(network: nn.Module, recipe: Recipe) -> Optimizer:
    """Kernels decay; biases and the scales of batch norm, which do not grow without bounds, do not."""
    kernels = [p for p in network.parameters() if p.ndim > 1]
    others = [p for p in network.parameters() if p.ndim <= 1]
    groups = [{"params": kernels, "weight_decay": recipe.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if recipe.optimiser == "adamw":
        return AdamW(groups, lr=recipe.learning_rate)
    return DecoupledSGD(groups, recipe.learning_rate, recipe.momentum)


def make_schedule(optimiser: Optimizer, recipe: Recipe) -> LRScheduler:
    """The learning rate at every step: halved each epoch, along half a cosine to 0, or as it is."""
    if recipe.schedule == "halve":
        return StepLR(optimiser, step_size=recipe.steps, gamma=0.5)
    if recipe.schedule == "cosine":
        return CosineAnnealingLR(optimiser, T_max=recipe.epochs * recipe.steps)
    return ConstantLR(optimiser, factor=1.0, total_iters=0)


LOOK_EVERY_STEPS = 25  # how often losses are fetched from the device
PATIENCE_WITH_OTHERS = timedelta(hours=12)  # while the first process mines examples
COLUMNS = ("step", "epoch", "loss", "learning_rate", "images_per_second", "validation_loss", "validation_accuracy")
Row = dict[str, float]


class Steps:
    """One process's share of some batches, asked for anew in every epoch; Lightning takes it for a data loader."""

    def __init__(
        self, batches: Batches, steps: Callable[[], range], count: int, trainer: Trainer, workers: int
    ) -> None:
        self._batches, self._steps, self._count = batches, steps, count
        self._trainer, self._workers = trainer, workers

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        share = self._batches.shard(self._trainer.global_rank, self._trainer.world_size)
        return share.load(self._steps(), self._trainer.strategy.root_device, self._workers)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: where to go on follows from the step. That it is here tells Lightning that we can go on."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None: ...


class Fitting(LightningModule):
    """What Lightning needs to know about a network, its loss and its optimiser."""

    def __init__(self, recipe: Recipe, network: nn.Module, loss: Loss, accuracy: Loss) -> None:
        super().__init__()
        self.recipe, self.network, self.loss, self.accuracy = recipe, network, loss, accuracy
        self._recorded = False
        self._validation: list[Tensor] = []  # of each batch its loss, its accuracy and 1, times its windows

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        images, targets = batch
        if not self._recorded and images.is_cuda and self.trainer.world_size == 1:
            graphs.record(self.network, images)
            self._recorded = True
        return self.loss(self.network(images), targets)

    def on_train_end(self) -> None:
        graphs.forget(self.network)

    def validation_step(self, batch: tuple[Tensor, Tensor], _: int) -> None:
        images, targets = batch
        if len(images):  # the last batch may be too small for every process to have a share
            logits = self.network(images)
            found = torch.stack([self.loss(logits, targets), self.accuracy(logits, targets), targets.new_ones(())])
            self._validation.append(found.double() * len(images))

    def on_validation_epoch_end(self) -> None:
        own = torch.stack(self._validation).sum(dim=0) if self._validation else torch.zeros(3, device=self.device)
        self._validation.clear()
        *totals, windows = self.trainer.strategy.reduce(own.double(), reduce_op="sum")
        for name, total in zip(("validation_loss", "validation_accuracy"), totals, strict=True):
            self.log(name, (total / windows).float(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimiser = make_optimiser(self.network, self.recipe)
        schedule = {"scheduler": make_schedule(optimiser, self.recipe), "interval": "step"}
        return {"optimizer": optimiser, "lr_scheduler": schedule}


class Keeper(Callback):
    """Keeps the log, the best weights and the checkpoint, and stops when the validation loss has converged."""

    def __init__(self, folder: Path, recipe: Recipe, seen: Callable[[Row], None]) -> None:
        self._folder, self._recipe, self._seen = folder, recipe, seen
        self.best, self.worse_epochs = math.inf, 0
        self.rows: list[Row] = []
        self._pending: list[tuple[int, float, Tensor]] = []  # step, learning rate, and a loss still on the device
        self._rate, self._since = recipe.learning_rate, time.perf_counter()

    def state_dict(self) -> dict[str, Any]:
        return {"best": self.best, "worse_epochs": self.worse_epochs, "rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.best, self.worse_epochs = state_dict["best"], state_dict["worse_epochs"]
        self.rows = list(state_dict["rows"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        trainer.should_stop = self._has_converged()  # before it was interrupted
        self._since = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self._rate = trainer.optimizers[0].param_groups[0]["lr"]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:  # noqa: ARG002
        step = trainer.global_step
        self._pending.append((step, self._rate, outputs["loss"].detach()))
        if step % LOOK_EVERY_STEPS == 0:
            self._look(trainer)
        ends_epoch = step % self._recipe.steps == 0  # its checkpoint follows its validation
        if step % self._recipe.checkpoint_steps == 0 and not ends_epoch:
            self._keep(trainer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look(trainer)
        loss, accuracy = (float(trainer.callback_metrics[name]) for name in COLUMNS[-2:])
        _check_finite(loss, trainer.global_step, "validation loss")
        self.rows[-1] |= {"validation_loss": loss, "validation_accuracy": accuracy}
        self._seen(dict(self.rows[-1]))
        better = loss < self.best
        self.best, self.worse_epochs = (loss, 0) if better else (self.best, self.worse_epochs + 1)
        if (better or self._recipe.keep == "last") and trainer.is_global_zero:
            assert isinstance(pl_module, Fitting)
            write_bytes(self._folder / runs.KEPT, pack_weights(pl_module.network))
        self._since = time.perf_counter()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:  # noqa: ARG002
        trainer.should_stop = self._has_converged()
        self._keep(trainer)

    def _has_converged(self) -> bool:
        # Along a cosine the rate is high until late, and so is the validation loss: its end is what it is for.
        stops = self._recipe.keep == "best" and self._recipe.schedule != "cosine"
        return stops and self.worse_epochs >= self._recipe.patience

    def _look(self, trainer: Trainer) -> None:
        """Fetch the losses of the last steps, and write them down."""
        if not self._pending:
            return
        shares = torch.stack([loss for _, _, loss in self._pending])
        losses = trainer.strategy.reduce(shares, reduce_op="mean").tolist()
        pace = self._recipe.windows * len(losses) / (time.perf_counter() - self._since)
        for (step, rate, _), loss in zip(self._pending, losses, strict=True):
            _check_finite(loss, step, "loss")
            epoch = (step - 1) // self._recipe.steps
            row = dict(zip(COLUMNS, (step, epoch, loss, rate, round(pace, 1)), strict=False))
            self.rows.append(row)
        for logger in trainer.loggers:
            logger.log_metrics({"loss": losses[-1], "learning_rate": self._rate}, self._pending[-1][0])
        self._seen(dict(self.rows[-1]))
        self._pending.clear()
        self._since = time.perf_counter()

    def _keep(self, trainer: Trainer) -> None:
        """A point from which the same command goes on."""
        self._look(trainer)
        resume = self._folder / runs.RESUME
        with atomic_file(resume) if trainer.is_global_zero else nullcontext(resume) as unfinished:
            trainer.save_checkpoint(unfinished)  # all processes take part, the first one writes
        if trainer.is_global_zero:
            text = io.StringIO()
            writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(self.rows)
            write_text(self._folder / runs.LOG, text.getvalue())


def fit(
    recipe: Recipe,
    network: DenseNetwork,
    task: Task,
    loss: Loss,
    batches: Callable[[torch.device], tuple[Batches, Batches, int]],
    folder: Path,
    seen: Callable[[Row], None] = lambda _: None,
) -> torch.device:
    """Train until the validation loss has converged, or epochs are over; the network then has the weights to keep.

    `batches` gives those of training and of validation, and how many of the latter there are, once the device is known;
    that is returned.
    """
    trainer = _make_trainer(recipe, folder, seen)
    module = unwrap(network)
    if recipe.devices * recipe.nodes > 1:
        share_statistics(module)
    device = trainer.strategy.root_device
    training, validation, validation_steps = batches(device)

    def left_in_epoch() -> range:
        done = trainer.global_step
        return range(done, (done // recipe.steps + 1) * recipe.steps)

    resume = folder / runs.RESUME
    with warnings.catch_warnings(), _interrupts():
        warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)  # between Lightning and torch
        warnings.filterwarnings("ignore", "The AccumulateGrad node's stream")  # graphs are recorded on one of their own
        trainer.fit(
            Fitting(recipe, module, loss, task.accuracy),
            Steps(training, left_in_epoch, recipe.steps, trainer, recipe.workers),
            Steps(validation, lambda: range(validation_steps), validation_steps, trainer, recipe.workers),
            ckpt_path=resume if resume.exists() else None,
            weights_only=True,
        )
    load_weights(network, folder / runs.KEPT)
    return device


def _make_trainer(recipe: Recipe, folder: Path, seen: Callable[[Row], None]) -> Trainer:
    for talkative in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(talkative).setLevel(logging.WARNING)
    several = recipe.devices * recipe.nodes > 1
    try:
        return Trainer(
            max_epochs=recipe.epochs,
            accelerator=recipe.accelerator,
            devices=recipe.devices,
            num_nodes=recipe.nodes,
            strategy=DDPStrategy(timeout=PATIENCE_WITH_OTHERS) if several else "auto",
            precision="32-true" if recipe.precision == "32" else "bf16-mixed",
            callbacks=[Keeper(folder, recipe, seen)],
            logger=_tensorboard(folder),
            log_every_n_steps=min(LOOK_EVERY_STEPS, recipe.steps),
            num_sanity_val_steps=0,
            enable_checkpointing=False,  # the keeper does it
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise RunError(f"The devices that the recipe asks for cannot be had: {error}") from None


@contextmanager
def _interrupts() -> Iterator[None]:
    """Lightning turns Ctrl-C into the end of the program; here it is turned back, for the caller to say a word."""
    try:
        yield
    except SystemExit:
        raise KeyboardInterrupt from None


def _tensorboard(folder: Path) -> Any:
    from lightning.pytorch.loggers import TensorBoardLogger

    return TensorBoardLogger(folder, name="", version="tensorboard")


def _check_finite(loss: float, step: int, name: str) -> None:
    if not math.isfinite(loss):
        raise RunError(
            f"The {name} became {loss} at step {step}; a lower learning_rate may help. The run can be resumed from its "
            f"last checkpoint, with the same command."
        )
