"""Detect repulsion that stays stronger than the loss."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from repulsive.particles.rule import Measure

FIRST_STEP = 100  # earlier, q and k may have tiny gradients, which makes the ratio huge
LAST = 5  # number of measurements of which the median counts: a single step says little
_FEWEST = 2  # number of measurements that are enough at the end of a short training
_TOO_STRONG = 1.01  # a target ratio of 1 is measured as 1 up to rounding


class StrengthMonitor:
    """Watch the ratio |repulsion| / |drive| of all groups, without synchronising with the device.

    Repulsion is too strong if the median over groups is above 1 in the median of the last five measurements, from step
    100 on. On a GPU a measurement is read when the next one is made.

    Example:
        >>> monitor = StrengthMonitor()
        >>> def measure(ratio: float) -> Measure:
        ...     return Measure(torch.ones(2), torch.full((2,), ratio), *(torch.zeros(2) for _ in range(5)))
        >>> steps = {50: 9.0, 100: 4.0, 150: 0.5, 200: 3.0, 250: 4.0, 300: 5.0, 350: 6.0}
        >>> [monitor.observe(step, [measure(ratio)]) for step, ratio in steps.items()]
        [None, None, None, None, None, 4.0, None]
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._medians: deque[float] = deque(maxlen=LAST)  # medians over groups
        self._is_done = False

    def observe(self, step: int, measures: Iterable[Measure]) -> float | None:
        """Process one measurement.

        Args:
            step: optimizer step.
            measures: one `Measure` for each batch of groups.

        Returns:
            The median ratio when repulsion is found to be too strong, once; None otherwise.
        """
        if self._is_done or step < FIRST_STEP:
            return None
        self._read_pending()
        self._pending = [_start_copy_to_host(values) for values in _ratios(measures)]
        self._read_pending()
        return self._judge(fewest=LAST)

    def finish(self) -> float | None:
        """Judge a training that has ended, by fewer measurements if it was short; returns the same as `observe`."""
        if self._is_done:
            return None
        for _, event in self._pending:
            if event is not None:
                event.synchronize()
        self._read_pending()
        return self._judge(fewest=_FEWEST)

    def _judge(self, *, fewest: int) -> float | None:
        if len(self._medians) < fewest or not median(self._medians) > _TOO_STRONG:
            return None
        self._is_done = True
        return median(self._medians)

    def _read_pending(self) -> None:
        """Store the median of the pending measurement if its numbers have arrived on the host."""
        if not self._pending or not all(event is None or event.query() for _, event in self._pending):
            return
        ratios = [ratio for values, _ in self._pending for ratio in values.tolist() if not math.isnan(ratio)]
        self._pending = []
        if ratios:
            self._medians.append(median(ratios))


def _ratios(measures: Iterable[Measure]) -> list[Tensor]:
    """Compute |repulsion| / |drive| of all groups, one tensor per device."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for measure in measures:
        ratios = (measure.repulsion / measure.drive).reshape(-1)
        by_device.setdefault(ratios.device, []).append(ratios)
    return [some[0] if len(some) == 1 else torch.cat(some) for some in by_device.values()]


def _start_copy_to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start copying values to the host; return the copy, and the event that marks its completion."""
    if not values.is_cuda:
        return values.detach().cpu(), None
    copy = values.detach().to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
