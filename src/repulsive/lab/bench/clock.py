"""Timing that does not fool itself: warm-up, medians, interleaving step by step, bootstrap intervals."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch

Pairs = Sequence[tuple[float, float]]  # seconds of a variant and of the baseline, one pair a round


@dataclass(frozen=True)
class Ratio:
    """What a variant takes against the baseline, with 95 % bootstrap intervals.

    Args:
        seconds: median seconds of the variant.
        rounds: pairs compared.
        ratio: 1 + median of the differences within rounds / median of the baseline.
        quick: the same by the quickest tenth of either: a busy host only ever adds time, so that this sees further.
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
    """Wait for all work on a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device until it is idle again."""
    synchronise(device)
    start = time.perf_counter()
    function()
    synchronise(device)
    return time.perf_counter() - start


def laps(functions: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Seconds of functions that run one after the other, without waiting for the device in between.

    The device is idle before the first. On a GPU seconds are those between events on the device: where the host is
    ahead, a function takes what its work takes there; where the host is behind, what the host takes.
    """
    synchronise(device)
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
    """Median seconds of one call; on a GPU by events, so that the host's own time counts only where it lags."""
    for _ in range(warm_up):
        function()
    if device.type != "cuda":
        return statistics.median(wall(function, device) for _ in range(repeats))
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
    """Median seconds until a call returns, whatever the device still has to do."""
    times = []
    for _ in range(repeats):
        synchronise(device)
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def replayed(functions: Sequence[Callable[[], object]], times: int = 10) -> float:
    """Seconds a call on the device alone: at least `times` calls captured in one graph, replayed."""
    calls = max(1, times // len(functions))
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            for function in functions:
                function()
    return median_time(graph.replay, torch.device("cuda")) / (calls * len(functions))


@contextmanager
def undisturbed() -> Iterator[None]:
    """No garbage collection, and nothing left over from before for the next one to look at."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def interleaved(
    variants: Mapping[str, Callable[[], float]], rounds: Mapping[str, int], *, baseline: str, warm_up: int = 2
) -> dict[str, Ratio]:
    """Time every variant once a round, in random order, and compare within rounds.

    Args:
        variants: name -> function that does its work and returns the seconds it took.
        rounds: how many rounds count; variants with fewer than the baseline are spread evenly over its rounds.
        baseline: the variant all others are compared with; no other has more rounds.
        warm_up: rounds that do not count.
    """
    source, most = random.Random(0), rounds[baseline]
    seconds: dict[str, dict[int, float]] = {name: {} for name in variants}
    with undisturbed():
        for number in range(-warm_up, most):
            order = [name for name in variants if number < 0 or number % max(1, most // rounds[name]) == 0]
            source.shuffle(order)
            for name in order:
                taken = variants[name]()
                if number >= 0:
                    seconds[name][number] = taken
    base = seconds[baseline]
    return {name: compare([(taken, base[n]) for n, taken in times.items()]) for name, times in seconds.items()}


def compare(pairs: Pairs, draws: int = 2000) -> Ratio:
    """The ratio of paired times, by the median difference and by the quickest tenth."""
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


def copy_rate(device: torch.device, numbers: int | None = None) -> float:
    """Bytes a second of a large copy, read and written both counted: the ceiling for anything bound by memory."""
    count = numbers or (2**28 if device.type == "cuda" else 2**25)
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    return 2 * 4 * count / median_time(lambda: target.copy_(source), device, repeats=10)
