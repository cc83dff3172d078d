"""Reliable timing: warm-up, medians, interleaved variants, bootstrap intervals."""

from __future__ import annotations

import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch

Pairs = Sequence[tuple[float, float]]  # seconds of a variant and of the baseline, one pair for each round
WARM_UP = 2  # rounds that are not counted


@dataclass(frozen=True)
class Ratio:
    """Time of a variant relative to the baseline, with 95 % bootstrap intervals.

    Args:
        seconds: median seconds of the variant.
        rounds: number of compared pairs.
        ratio: 1 + median of the differences within rounds / median of the baseline.
        low: lower end of the interval of `ratio`.
        high: upper end of the interval of `ratio`.
        quick: ratio of the fastest tenths (10th percentiles); less noisy, because a busy host only adds time.
        quick_low: lower end of the interval of `quick`.
        quick_high: upper end of the interval of `quick`.
    """

    seconds: float
    rounds: int
    ratio: float
    low: float
    high: float
    quick: float
    quick_low: float
    quick_high: float


def synchronise(device: torch.device) -> None:
    """Wait for all work on a GPU; do nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall_time(function: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds of one call, including its work on the device."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def time_each(functions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Measure the seconds of each function, run one after the other without synchronising before or in between.

    On a GPU the seconds are between events on the device: the time of the device's work if the host is ahead, and of
    the host's work if it is behind.
    """
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for function in functions:
            function()
            marks.append(time.perf_counter())
        return [end - start for start, end in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(len(functions) + 1)]
    events[0].record()
    for function, event in zip(functions, events[1:], strict=True):
        function()
        event.record()
    synchronise(device)
    return [start.elapsed_time(end) / 1e3 for start, end in pairwise(events)]


def median_time(function: Callable[[], object], device: torch.device, repeats: int = 30, warm_up: int = 5) -> float:
    """Measure the median seconds of a call; on a GPU between events, so that only a slower host adds host time."""
    for _ in range(warm_up):
        function()
    if device.type != "cuda":
        return statistics.median(wall_time(function, device) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def host_time(function: Callable[[], object], device: torch.device, repeats: int = 200) -> float:
    """Measure the median seconds until a call returns, without waiting for the device."""
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def replayed(functions: Sequence[Callable[[], object]]) -> float:
    """Measure seconds per call on the device alone: about ten calls, replayed as one CUDA graph."""
    calls = max(1, 10 // len(functions))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            for function in functions:
                function()
    return median_time(graph.replay, torch.device("cuda")) / (calls * len(functions))


@contextmanager
def paused_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, and exclude existing objects from later collections."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


@contextmanager
def one_core() -> Iterator[None]:
    """Run all threads of this process on one core, on systems where a process can choose it.

    The main thread and that of the backward pass take turns. On different cores they wait for each other to wake up:
    steps that are limited by the host took 15 to 25 % longer there (BERT-base, a virtual machine with an H200), and
    varied more.
    """
    folder = Path("/proc/self/task")
    if not hasattr(os, "sched_setaffinity") or not folder.is_dir():
        yield
        return
    before = os.sched_getaffinity(0)
    _run_threads_on(folder, {max(before)})
    try:
        yield
    finally:
        _run_threads_on(folder, before)


def _run_threads_on(folder: Path, cores: set[int]) -> None:
    for thread in folder.iterdir():
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread.name), cores)


def interleaved(
    variants: Mapping[str, Callable[[], float]], rounds: Mapping[str, int], *, baseline: str
) -> dict[str, Ratio]:
    """Time every variant once a round, in random order, and compare within rounds, after `WARM_UP` rounds.

    Args:
        variants: name -> function that does its work and returns the seconds it took.
        rounds: name -> number of counted rounds; a variant with fewer rounds than the baseline has them spread evenly.
        baseline: the variant that all others are compared with; it has the most rounds.
    """
    source, most = random.Random(0), rounds[baseline]
    seconds: dict[str, dict[int, float]] = {name: {} for name in variants}
    with paused_garbage_collection():
        for number in range(-WARM_UP, most):
            order = [name for name in variants if number < 0 or number % max(1, most // rounds[name]) == 0]
            source.shuffle(order)
            for name in order:
                elapsed = variants[name]()
                if number >= 0:
                    seconds[name][number] = elapsed
    base = seconds[baseline]
    return {name: compare([(elapsed, base[n]) for n, elapsed in times.items()]) for name, times in seconds.items()}


def compare(pairs: Pairs, draws: int = 2000) -> Ratio:
    """Compare paired times, by the median difference and by the fastest tenths."""
    ratio, quick = _interval(_by_difference, pairs, draws), _interval(_by_quickest, pairs, draws)
    return Ratio(statistics.median(mine for mine, _ in pairs), len(pairs), *ratio, *quick)


def _interval(statistic: Callable[[Pairs], float], pairs: Pairs, draws: int) -> tuple[float, float, float]:
    source = random.Random(0)
    drawn = sorted(statistic(source.choices(pairs, k=len(pairs))) for _ in range(draws))
    return statistic(pairs), drawn[int(0.025 * draws)], drawn[int(0.975 * draws)]


def _by_difference(pairs: Pairs) -> float:
    return 1 + statistics.median(mine - base for mine, base in pairs) / statistics.median(base for _, base in pairs)


def _by_quickest(pairs: Pairs) -> float:
    tenth = len(pairs) // 10
    return sorted(mine for mine, _ in pairs)[tenth] / sorted(base for _, base in pairs)[tenth]


def copy_rate(device: torch.device) -> float:
    """Measure the memory bandwidth: bytes per second of a large copy, counting reads and writes."""
    count = 2**28 if device.type == "cuda" else 2**25
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    return 2 * 4 * count / median_time(lambda: target.copy_(source), device, repeats=10)
