"""For tests and for the examples in docstrings, which may use `torch` and `rp` without importing them."""

import pytest
import torch

import rotopath


@pytest.fixture(autouse=True)
def _repeatable(doctest_namespace: dict[str, object]) -> None:
    torch.set_num_threads(1)  # test processes share the cores
    torch.manual_seed(0)
    doctest_namespace.update(torch=torch, rp=rotopath)
