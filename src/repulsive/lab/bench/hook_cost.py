"""Time inside the hooks of `repel`: of the host, and of the device's own work.

The ratio of two step times is noisy; the time inside hooks is not. If the host is the bottleneck of a model, the host's
time is the cost of the rule; otherwise the device's time is. Their sum over the plain step is an upper bound of both.

The hooks are those of the optimizer's step and, for `space="logits"`, of the forward pass. In a compiled model the
forward hooks are compiled too, and their time is not included.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from repulsive.lab.bench.clock import paused_garbage_collection, synchronise
from repulsive.lab.bench.training_variants import TrainingVariant
from repulsive.lab.bench.turns import average, over_training
from repulsive.repulsion.logits.module_hook import Hook

AHEAD = 40_000_000  # GPU cycles, about 20 ms: the device waits this long, while the host launches the work of a hook


@dataclass(frozen=True)
class HookCost:
    """Median seconds inside the hooks of a step, by kind of period, and their average over a training.

    The seconds of a rule that acts in one of several steps are means over the steps of a period.

    Args:
        host: kind of period -> seconds of the host.
        device: kind of period -> seconds of the device; None on a CPU.
        average: seconds of host and device together, of an average step.
    """

    host: dict[str, float]
    device: dict[str, float] | None
    average: float


def measure_hooks(variant: TrainingVariant, turns: int) -> HookCost:
    """Measure the time inside the hooks of a rule that has been warmed up, in turns that do not count for the ratio.

    Plain training that clips has no hooks; the time of its clipping is measured instead.
    """
    shared = variant.shared
    with paused_garbage_collection():
        host = _median_by_kind(variant, turns, _HostClock(shared.device))
        device = _median_by_kind(variant, turns, _DeviceClock()) if shared.on_gpu else None
    both = {kind: seconds + (0.0 if device is None else device[kind]) for kind, seconds in host.items()}
    renewing = both.get("renewing")
    periods = variant.renewals, variant.act_every, variant.active
    mean = average(both["measuring"], both["ordinary"], renewing, *periods)
    return HookCost(host, device, over_training(mean, both.get("off"), variant.active))


class _HostClock:
    """Sum the seconds until calls return. The device is idle before: a full queue of work would block the host."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._spent = 0.0

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        synchronise(self._device)
        started = time.perf_counter()
        try:
            return function(*args)
        finally:
            self._spent += time.perf_counter() - started

    def reset(self) -> float:
        spent, self._spent = self._spent, 0.0
        return spent


class _DeviceClock:
    """Sum the seconds of the device's work, without waiting for the host, which is ahead of the device."""

    def __init__(self) -> None:
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(AHEAD)
        start.record()
        result = function(*args)
        end.record()
        self._events.append((start, end))
        return result

    def reset(self) -> float:
        torch.cuda.synchronize()
        spent = sum(start.elapsed_time(end) / 1e3 for start, end in self._events)
        self._events = []
        return spent


def _median_by_kind(variant: TrainingVariant, turns: int, clock: _HostClock | _DeviceClock) -> dict[str, float]:
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(turns):
        with variant.attached(), _timed_hooks(variant, clock):
            for kind in variant.periods:
                synchronise(variant.shared.device)
                variant.take_period(kind)
                seconds[kind].append(clock.reset() / variant.act_every)
    return {kind: statistics.median(values) for kind, values in seconds.items()}


@contextmanager
def _timed_hooks(variant: TrainingVariant, clock: _HostClock | _DeviceClock) -> Iterator[None]:
    """Let a clock call the attached hooks: those of the optimizer, those of the forward pass, and clipping."""

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args: clock.call(function, *args)

    optimizer, forward = variant.shared.optimizer, Hook.__call__
    hooks: list[dict[int, Callable[..., Any]]] = [
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
    ]
    originals = [dict(some) for some in hooks]
    try:
        for some in hooks:
            some.update({key: timed(function) for key, function in some.items()})
        if not variant.shared.is_compiled:  # the hooks come and go, so their class is changed
            Hook.__call__ = lambda hook, *args: clock.call(forward, hook, *args)  # type: ignore[method-assign]
        if variant.max_norm is not None:
            variant.clip = timed(variant.clip)  # type: ignore[method-assign]
        yield
    finally:
        for some, before in zip(hooks, originals, strict=True):
            some.update(before)
        Hook.__call__ = forward  # type: ignore[method-assign]
        variant.__dict__.pop("clip", None)
