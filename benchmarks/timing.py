"""Clocks for what competes: each in turn, in another order every round, medians with quartiles.

In: names and functions without arguments. Out: milliseconds a call, or why there are none. On a GPU events are the
clock, and the processor's part is in it wherever the GPU has to wait for it.
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


def leave_out(all_: dict[str, Built], without: Sequence[str], kept: Sequence[str]) -> dict[str, Built]:
    """Those without any of the words in their names; and what the others are measured by."""
    return {name: one for name, one in all_.items() if name in kept or not any(word in name for word in without)}


def build(name: str, make: Callable[[], Built], device: str) -> tuple[Built, str] | None:
    """What is made, and the peak of memory (MiB) that it took on a GPU; nothing, with a word, where it fails."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    try:
        made = make()
    except Exception as error:  # a peer's or a compiler's, of whatever kind; the others go on
        first_line = (str(error).splitlines() or [""])[0]
        print(f"{name} is left out: {type(error).__name__}: {first_line}", flush=True)
        return None
    if device != "cuda":
        return made, ""
    torch.cuda.synchronize()
    return made, f"{(torch.cuda.max_memory_allocated() - before) / MIB:.0f}"


def forget_compiled(device: str) -> None:
    """After a few networks or sizes of the same code torch would compile for any size, or no more."""
    if device == "cuda":
        torch.compiler.reset()


def forget_peak(name: str, device: str) -> None:
    """What compiling took does not count; but what is replayed lies in memory that was taken when it was recorded."""
    if device == "cuda" and "replayed" not in name:
        torch.cuda.reset_peak_memory_stats()


def measure(calls: dict[str, Callable[[], object]], device: str, rounds: int, at_once: int) -> dict[str, list[float]]:
    """Milliseconds a call in every round; a round takes the mean of calls that follow each other."""
    names = list(calls)
    found: dict[str, list[float]] = {name: [] for name in names}
    order = random.Random(0)
    for name in names:
        calls[name]()
    for _ in range(rounds):
        for name in order.sample(names, len(names)):  # so that none always comes behind the same one
            found[name].append(_measure_once(calls[name], device, at_once))
    return found


def _measure_once(call: Callable[[], object], device: str, at_once: int) -> float:
    if device != "cuda":
        start = time.perf_counter()
        for _ in range(at_once):
            call()
        return (time.perf_counter() - start) / at_once * 1000
    call()  # what was run before may have left the caches, and the clock of the GPU, in another state
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(at_once):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / at_once


def describe(times: list[float], yardstick: list[float] | None = None) -> dict[str, str]:
    """Columns of a table; the ratio is the median of those of single rounds, in which both saw the same machine."""
    lower, middle, upper = quantiles(times, n=4) if len(times) > 1 else times * 3
    digits = 1 if middle >= 100 else 2
    columns = {"ms": f"{middle:.{digits}f}", "quartiles": f"{lower:.{digits}f}–{upper:.{digits}f}"}
    if yardstick is not None:
        columns["× plain CNN"] = f"{median(a / b for a, b in zip(times, yardstick, strict=True)):.2f}"
    return columns
