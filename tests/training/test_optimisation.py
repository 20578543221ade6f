"""Optimisers and schedules against the formulas that they stand for."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from rotopath.recipe import Recipe
from rotopath.training.loop import make_optimiser, make_schedule

RECIPE = Recipe("tumor", "data", learning_rate=0.1, momentum=0.9, weight_decay=0.01, steps=4, epochs=3)


def test_weight_decay_is_decoupled_from_momentum() -> None:
    """Three steps of w ← (1 - lr·decay)·w - lr·v with v ← 0.9·v + g, by hand; biases do not decay."""
    layer = nn.Linear(1, 1)
    weight, bias = 2.0, 1.0
    nn.init.constant_(layer.weight, weight)
    nn.init.constant_(layer.bias, bias)
    optimiser = make_optimiser(layer, RECIPE)
    velocity = bias_velocity = 0.0
    for gradient in (0.5, -1.0, 0.25):
        layer.weight.grad = torch.full_like(layer.weight, gradient)
        layer.bias.grad = torch.full_like(layer.bias, gradient)
        optimiser.step()
        velocity, bias_velocity = 0.9 * velocity + gradient, 0.9 * bias_velocity + gradient
        weight = (1 - 0.1 * 0.01) * weight - 0.1 * velocity
        bias -= 0.1 * bias_velocity
    assert layer.weight.item() == pytest.approx(weight, rel=1e-6)
    assert layer.bias.item() == pytest.approx(bias, rel=1e-6)


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("halve", [0.1] * 4 + [0.05] * 4 + [0.025] * 4),
        ("constant", [0.1] * 12),
        ("cosine", [0.05 * (1 + math.cos(math.pi * step / 12)) for step in range(12)]),
    ],
)
def test_learning_rates(schedule: str, expected: list[float]) -> None:
    recipe = replace(RECIPE, schedule=schedule)  # type: ignore[arg-type]
    optimiser = make_optimiser(nn.Linear(1, 1), recipe)
    rates, chosen = [], make_schedule(optimiser, recipe)
    for _ in range(12):
        rates.append(optimiser.param_groups[0]["lr"])
        optimiser.step()
        chosen.step()
    assert rates == pytest.approx(expected)


def test_adamw_is_torchs() -> None:
    optimiser = make_optimiser(nn.Linear(2, 2), replace(RECIPE, optimiser="adamw"))
    assert isinstance(optimiser, torch.optim.AdamW)
    assert [group["weight_decay"] for group in optimiser.param_groups] == [0.01, 0.0]
