"""Detect heads that move apart by growing."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from repulsive.repulsion.measured import Measured

TOO_FAR = 3.0  # times the first distance; heads of a plain Transformer grew to 1.4 times their first norm


class GrowthMonitor:
    """Watch the distance between heads, without synchronising with the device.

    Heads move too far apart if the median over groups of their mean distance is three times that of the first
    measurement. On a GPU a measurement is read when the next one is made.

    Example:
        >>> import torch
        >>> monitor = GrowthMonitor()
        >>> def measure(distance: float) -> Measured:
        ...     return Measured(0, {"q": 0}, torch.full((1, 7), distance))
        >>> [monitor.observe([measure(distance)]) for distance in (2.0, 4.0, 6.0, 8.0)]
        [None, None, 3.0, None]
    """

    def __init__(self) -> None:
        self._pending: Sequence[Measured] = ()  # sent to the host, and not read yet
        self._first: float | None = None
        self._is_done = False

    def observe(self, measured: Sequence[Measured]) -> float | None:
        """Process one measurement of all groups.

        Returns:
            The distance over the first one when it is found to be too large, once; None otherwise.
        """
        if self._is_done:
            return None
        growth = self._read()
        for one in measured:
            one.send()
        self._pending = measured
        growth = self._read() or growth
        if growth is None or growth < TOO_FAR:
            return None
        self._is_done = True
        return growth

    def _read(self) -> float | None:
        """Compare the last measurement with the first one if its numbers have arrived."""
        if not all(one.has_arrived() for one in self._pending):
            return None
        pending, self._pending = self._pending, ()
        if not (distances := [distance for one in pending for distance in one.distances()]):
            return None
        distance = median(distances)
        if self._first is None:
            self._first = distance
        return distance / self._first if self._first else None
