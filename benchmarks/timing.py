"""Time functions against each other: all in every round, in random order; report medians and quartiles.

In: names and functions without arguments. Out: milliseconds per call, or the reason why a function failed. On a GPU,
CUDA events measure the time, which includes the time of Python wherever the GPU waits for it.
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
    """Remove entries whose name contains one of the words, except those in `kept`, the baselines."""
    return {name: entry for name, entry in entries.items() if name in kept or not any(word in name for word in without)}


def build(name: str, make: Callable[[], Built], device: str) -> tuple[Built, str] | None:
    """Return what `make` returns and its peak GPU memory in MiB; print the error and return None if it fails."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        made = make()
    except Exception as error:  # any error of another library or a compiler; the others are still measured
        first_line = (str(error).splitlines() or [""])[0]
        print(f"{name} is left out: {type(error).__name__}: {first_line}", flush=True)
        return None
    if device != "cuda":
        return made, ""
    torch.cuda.synchronize()
    return made, f"{(torch.cuda.max_memory_allocated() - before) / MIB:.0f}"


def reset_compiler(device: str) -> None:
    """Reset torch.compile, which otherwise compiles for dynamic sizes, or stops, after a few networks or sizes."""
    if device == "cuda":
        torch.compiler.reset()


def reset_peak_memory(name: str, device: str) -> None:
    """Exclude memory used for compiling; a CUDA graph keeps the memory of its recording, which counts."""
    if device == "cuda" and "replayed" not in name:
        torch.cuda.reset_peak_memory_stats()


def measure(calls: dict[str, Callable[[], object]], device: str, rounds: int, repeats: int) -> dict[str, list[float]]:
    """Return milliseconds per call in every round; each round is the mean of `repeats` successive calls."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    generator = random.Random(0)
    for name in names:
        calls[name]()
    for _ in range(rounds):
        for name in generator.sample(names, len(names)):  # so that none always follows the same other one
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
    """Return columns of a table; the ratio to the baseline is the median of the ratios of single rounds."""
    lower, middle, upper = quantiles(times, n=4) if len(times) > 1 else times * 3
    digits = 1 if middle >= 100 else 2
    columns = {"ms": f"{middle:.{digits}f}", "quartiles": f"{lower:.{digits}f}–{upper:.{digits}f}"}
    if baseline is not None:
        columns["× plain CNN"] = f"{median(a / b for a, b in zip(times, baseline, strict=True)):.2f}"
    return columns
