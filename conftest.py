"""Settings of all tests, and names that examples in docstrings use without importing them: `torch` and `rp`."""

import functools
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator
from importlib.util import find_spec

import hypothesis
import pytest
import torch

import rotopath

os.environ.setdefault("OMP_NUM_THREADS", "1")  # of processes that tests start, which share the cores, too
collect_ignore_glob = [] if find_spec("triton") else ["src/rotopath/nn/triton/*.py"]
# A suite in the background inherits that Ctrl-C is ignored, and would pass this on to programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
# A forked process must not collect garbage of its parent: objects of ONNX Runtime would wait for threads that only the
# parent has, without end.
os.register_at_fork(after_in_child=gc.freeze)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # run kernels on the CPU, slowly; read when they are imported
torch.set_num_threads(1)  # test processes share the cores; module fixtures run before the fixture below
gc.set_threshold(20_000, 20, 20)  # torch and the tests keep millions of objects; looking at all of them takes long
hypothesis.settings.register_profile("quick", max_examples=10, deadline=None)


def _untraced(function: Callable[..., object]) -> Callable[..., object]:
    """Return the function without measurement of its coverage."""

    @functools.wraps(function)
    def call(*arguments: object, **options: object) -> object:
        trace = sys.gettrace()
        sys.settrace(None)
        try:
            return function(*arguments, **options)
        finally:
            sys.settrace(trace)

    return call


# Exporters run so many lines of torch that tracing them would double the time of the tests that export.
torch.export.export = _untraced(torch.export.export)
torch.onnx.export = _untraced(torch.onnx.export)


def pytest_collection_finish() -> None:
    """Leave all modules and collected tests, which stay until the end, out of garbage collection."""
    gc.freeze()


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Run tests with the marker `no_cover` untraced. In a worker, pytest-cov stops only one of two measurements."""
    trace = sys.gettrace()
    if item.get_closest_marker("no_cover"):
        sys.settrace(None)
    try:
        return (yield)
    finally:
        sys.settrace(trace)


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # so that libraries find their objects released at exit


@pytest.fixture(autouse=True)
def _repeatable(doctest_namespace: dict[str, object]) -> None:
    """Start every test with one thread, the same random numbers, and exact float32 on a GPU."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.cudnn.allow_tf32 = False
    doctest_namespace.update(torch=torch, rp=rotopath)
