"""Compare the speed of functions: measure all of them in every round, in random order; report medians and quartiles.

`build` makes a function, or prints the error if that fails. `measure` returns the milliseconds per call of each
function, and `describe` converts them to columns of a table. On a GPU, CUDA events measure the time. It includes the
time in which the GPU waits for Python.
"""

import gc
import random
import time
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from typing import TypeVar

import torch

MIB = 2**20
Built = TypeVar("Built")


def leave_out(entries: dict[str, Built], without: Sequence[str], kept: Sequence[str]) -> dict[str, Built]:
    """Return the entries whose name contains none of the words in `without`, and all baselines, named in `kept`."""
    return {name: entry for name, entry in entries.items() if name in kept or not any(word in name for word in without)}


def build(name: str, make: Callable[[], Built], device: str) -> tuple[Built, str] | None:
    """Call `make`. Return its result, and the peak GPU memory of the call in MiB as a text, which is empty on the CPU.

    If the call raises an error, print the error and return None.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        made = make()
    except Exception as error:  # of any type, from a library or a compiler; the other functions are still measured
        first_line = (str(error).splitlines() or [""])[0]
        print(f"{name} is left out: {type(error).__name__}: {first_line}", flush=True)
        return None
    if device != "cuda":
        return made, ""
    torch.cuda.synchronize()
    return made, f"{(torch.cuda.max_memory_allocated() - before) / MIB:.0f}"


def reset_compiler(device: str) -> None:
    """Reset torch.compile. After a few networks or sizes, it would compile for dynamic sizes or stop compiling."""
    if device == "cuda":
        torch.compiler.reset()


def reset_peak_memory(name: str, device: str) -> None:
    """Exclude memory that was used only for compiling. Replayed models are not reset: graphs keep all their memory."""
    if device == "cuda" and "replayed" not in name:
        torch.cuda.reset_peak_memory_stats()


def measure(calls: dict[str, Callable[[], object]], device: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return the milliseconds per call in each round, by name. Each is the mean of `repeats` successive calls."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    generator = random.Random(0)
    for name in names:
        calls[name]()
    for _ in range(rounds):
        for name in generator.sample(names, len(names)):  # so that no function always runs after the same other one
            times[name].append(_measure_once(calls[name], device, repeats))
    return times


def _measure_once(call: Callable[[], object], device: str, repeats: int) -> float:
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats * 1000
    call()  # the previous function may have left the caches and the clock of the GPU in another state
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / repeats


def describe(times: list[float], baseline: list[float] | None = None) -> dict[str, str]:
    """Return columns of a table from milliseconds per round: median and quartiles, and the ratio to a baseline, if any.

    The ratio is the median of the ratios in single rounds.
    """
    lower, middle, upper = quantiles(times, n=4) if len(times) > 1 else times * 3
    digits = 1 if middle >= 100 else 2
    columns = {"ms": f"{middle:.{digits}f}", "quartiles": f"{lower:.{digits}f}–{upper:.{digits}f}"}
    if baseline is not None:
        columns["× plain CNN"] = f"{median(a / b for a, b in zip(times, baseline, strict=True)):.2f}"
    return columns
