"""Detect repulsion that stays stronger than the loss."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from repulsive.repulsion.measured import Measured

FIRST_STEP = 100  # earlier, q and k may have tiny gradients, which makes the ratio huge
LAST = 5  # number of measurements of which the median counts: a single step says little
_FEWEST = 2  # number of measurements that are enough at the end of a short training
_TOO_STRONG = 1.01  # a target ratio of 1 is measured as 1 up to rounding
_FAR_TOO_STRONG = 10.0  # so far above 1 that two measurements are enough, and one at the end


class StrengthMonitor:
    """Watch the ratio |repulsion| / |drive| of all groups, without synchronising with the device.

    Repulsion is too strong if the median over groups is above 1 in the median of the last five measurements, from step
    100 on, or above 10 in each of the last two. On a GPU a measurement is read when the next one is made.

    Example:
        >>> import torch
        >>> monitor = StrengthMonitor()
        >>> def measure(step: int, ratio: float) -> Measured:
        ...     return Measured(step, {"q": 0}, torch.tensor([[1.0, ratio]]))
        >>> steps = {50: 9.0, 100: 4.0, 150: 0.5, 200: 3.0, 250: 4.0, 300: 5.0, 350: 6.0}
        >>> [monitor.observe(step, [measure(step, ratio)]) for step, ratio in steps.items()]
        [None, None, None, None, None, 4.0, None]
    """

    def __init__(self) -> None:
        self._pending: Sequence[Measured] = ()  # sent to the host, and not read yet
        self._medians: deque[float] = deque(maxlen=LAST)  # medians over groups
        self._is_done = False

    def observe(self, step: int, measured: Sequence[Measured]) -> float | None:
        """Process one measurement.

        Args:
            step: optimizer step.
            measured: the measurement of all groups.

        Returns:
            The median ratio when repulsion is found to be too strong, once; None otherwise.
        """
        if self._is_done or step < FIRST_STEP:
            return None
        self._read()
        for one in measured:
            one.send()
        self._pending = measured
        self._read()
        return self._judge(fewest=LAST, fewest_far=_FEWEST)

    def finish(self) -> float | None:
        """Judge a training that has ended, by fewer measurements if it was short; returns the same as `observe`."""
        if self._is_done:
            return None
        self._read(wait=True)
        return self._judge(fewest=_FEWEST, fewest_far=1)

    def _judge(self, *, fewest: int, fewest_far: int) -> float | None:
        count = len(self._medians)
        is_far = count >= fewest_far and min(list(self._medians)[-fewest_far:]) > _FAR_TOO_STRONG
        if not is_far and (count < fewest or not median(self._medians) > _TOO_STRONG):
            return None
        self._is_done = True
        return median(self._medians)

    def _read(self, *, wait: bool = False) -> None:
        """Store the median of the last measurement if its numbers have arrived."""
        if wait or all(one.has_arrived() for one in self._pending):
            pending, self._pending = self._pending, ()
            if ratios := [ratio for one in pending for ratio in one.ratios()]:
                self._medians.append(median(ratios))
