"""Optimisers and their schedules, as recipes name them.

In: a network and a recipe. Out: an optimiser with decoupled weight decay, and a schedule that moves at every step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LRScheduler, StepLR

from rotopath.recipe import Recipe


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
