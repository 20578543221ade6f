"""For tests and for the examples in docstrings, which may use `torch` and `rp` without importing them."""

import os
import signal
from importlib.util import find_spec

import pytest
import torch

import rotopath

collect_ignore_glob = [] if find_spec("triton") else ["src/rotopath/nn/triton/*.py"]
# A suite in the background inherits that Ctrl-C is ignored, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels then run on the CPU, slowly; read when they are imported


@pytest.fixture(autouse=True)
def _repeatable(doctest_namespace: dict[str, object]) -> None:
    torch.set_num_threads(1)  # test processes share the cores
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False  # float32 is meant where it is said, on a GPU too
    doctest_namespace.update(torch=torch, rp=rotopath)
