"""Timing that does not fool itself: warm-up, medians, interleaving, bootstrap intervals."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Ratio:
    """Median seconds of a variant, and the median over rounds of its time over the baseline's in the same round."""

    seconds: float
    ratio: float
    low: float
    high: float


def synchronise(device: torch.device) -> None:
    """Wait for all work on a GPU; a CPU is never behind."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def wall(function: Callable[[], object], device: torch.device, repeats: int = 1) -> float:
    """Seconds a call, `repeats` calls timed together."""
    synchronise(device)
    start = time.perf_counter()
    for _ in range(repeats):
        function()
    synchronise(device)
    return (time.perf_counter() - start) / repeats


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


def interleaved(
    variants: Mapping[str, Callable[[], float]], rounds: int, *, baseline: str, warm_up: int = 2
) -> dict[str, Ratio]:
    """Time every variant once a round, in random order, and compare within rounds.

    Args:
        variants: name -> function that does its work and returns the seconds it took.
        rounds: how many rounds count.
        baseline: the variant all others are divided by.
        warm_up: rounds that do not count.
    """
    source, order = random.Random(0), list(variants)
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(rounds + warm_up):
        source.shuffle(order)
        for name in order:
            taken = variants[name]()
            if number >= warm_up:
                seconds[name].append(taken)
    return {name: _compare(times, seconds[baseline]) for name, times in seconds.items()}


def _compare(mine: Sequence[float], base: Sequence[float], draws: int = 2000) -> Ratio:
    ratios = [a / b for a, b in zip(mine, base, strict=True)]
    source = random.Random(0)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(draws))
    low, high = medians[int(0.025 * draws)], medians[int(0.975 * draws)]
    return Ratio(statistics.median(mine), statistics.median(ratios), low, high)


def copy_rate(device: torch.device, numbers: int | None = None) -> float:
    """Bytes a second of a large copy, read and written both counted: the ceiling for anything bound by memory."""
    count = numbers or (2**28 if device.type == "cuda" else 2**25)
    source, target = torch.ones(count, device=device), torch.empty(count, device=device)
    return 2 * 4 * count / median_time(lambda: target.copy_(source), device, repeats=10)
