"""Runs made ready: on which device, in which precision."""

from pathlib import Path

import numpy as np
import pytest
import torch

import rotopath as rp
from rotopath.models import FrozenNetwork
from rotopath.runs import Run, RunError, _choose_dtype

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("device", "precision", "dtype"),
    [
        (CUDA, None, torch.float16),
        (CUDA, "16", torch.float16),
        (CUDA, "32", torch.float32),
        (torch.device("cuda", 1), None, torch.float16),
        (CPU, None, torch.float32),
        (CPU, "32", torch.float32),
    ],
)
def test_gpus_compute_in_half_precision_unless_asked_otherwise(
    device: torch.device, precision: str | None, dtype: torch.dtype
) -> None:
    assert _choose_dtype(device, precision) == dtype


@pytest.mark.parametrize(("device", "precision"), [(CPU, "16"), (CPU, "64"), (CUDA, "bf16"), (CUDA, "")])
def test_precisions_that_are_not_there_are_refused(device: torch.device, precision: str) -> None:
    with pytest.raises(RunError, match=r"choose .*'32'"):
        _choose_dtype(device, precision)


def test_a_run_that_is_made_ready_stays_as_it_is(tmp_path: Path) -> None:
    run = Run(tmp_path, rp.recipe.Recipe("tumor", "x"), rp.models.tumor(4).eval(), {"threshold": 0.5})
    model = run.ready("cpu", "32")
    assert isinstance(model.network, FrozenNetwork)
    assert model.precision == "32"
    assert not isinstance(run.network, FrozenNetwork)
    with pytest.raises(ValueError, match="for GPUs"):
        run.ready("cpu", "16")
    with pytest.raises(ValueError, match="for GPUs"):
        run.predict(np.zeros((100, 100, 3), np.uint8), spacing_um_px=1.0, device="cpu", precision="16")
