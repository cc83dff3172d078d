"""Measurements of a whole training, thinned so that memory, pages and checkpoints stay small."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from repulsive.monitoring.measurement import Measurement, from_json

MOST = 100  # measurements kept


class History:
    """Measurements in order of their steps.

    When there are more than `MOST`, every second one is dropped, except the first and the last.

    Example:
        >>> history = History()
        >>> for step in range(150):
        ...     history.add(Measurement(step, ()))
        >>> len(history), history[0].step, history[-1].step
        (100, 0, 149)
    """

    def __init__(self) -> None:
        self._kept: list[Measurement] = []

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Measurement]:
        return iter(self._kept)

    def __getitem__(self, index: int) -> Measurement:
        return self._kept[index]

    def add(self, measurement: Measurement) -> None:
        """Append a measurement; those of the same or a later step, from before a resume, are dropped."""
        self._kept = [each for each in self._kept if each.step < measurement.step]
        if len(self._kept) >= MOST:
            self._kept = self._kept[::2]
        self._kept.append(measurement)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return all measurements as lists and numbers, for JSON."""
        return [each.as_json() for each in self._kept]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]]) -> None:
        """Restore the result of `state_dict`.

        Raises:
            StateError: the state is not one that `state_dict` wrote.
        """
        self._kept = [from_json(each) for each in state]
