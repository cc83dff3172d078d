"""Find repulsion that stays stronger than the loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from repulsive.particles.rule import Measure

FROM = 500  # optimizer steps; before, q and k may have hardly any gradient, and the ratio is huge
IN_A_ROW = 3  # measurements
_ABOVE = 1.01  # a ratio of 1 that was asked for is measured as 1 give or take rounding


class Strength:
    """Reads the ratio of every measurement from step 500 on, without waiting for the device.

    Repulsion is too strong where in three measurements in a row more than half of the groups have a ratio above 1.
    On a GPU a measurement is read when the next one is made.

    Example:
        >>> watch = Strength()
        >>> def measure(ratio: float) -> Measure:
        ...     return Measure(torch.ones(2), torch.full((2,), ratio), *(torch.zeros(2) for _ in range(5)))
        >>> [watch.saw(step, [measure(4.0)]) for step in (450, 500, 550, 600, 650)]
        [None, None, None, 4.0, None]
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._times = 0
        self._done = False

    def saw(self, step: int, measures: Iterable[Measure]) -> float | None:
        """Take a measurement; return the median ratio when repulsion is found to be too strong, once.

        Args:
            step: of the optimizer.
            measures: batches of groups.
        """
        if self._done or step < FROM:
            return None
        found = self._read()
        if found is None:
            self._pending = [_on_host(values) for values in _ratios(measures)]
            found = self._read()
        self._done = found is not None
        return found

    def _read(self) -> float | None:
        """Count the pending measurement if its numbers have arrived."""
        if not self._pending or not all(event is None or event.query() for _, event in self._pending):
            return None
        ratios = torch.cat([values for values, _ in self._pending])
        self._pending = []
        ratios = ratios[~ratios.isnan()]
        strong = 2 * int((ratios > _ABOVE).sum()) > ratios.numel()
        self._times = self._times + 1 if strong else 0
        return float(ratios.median()) if self._times >= IN_A_ROW else None


def _ratios(measures: Iterable[Measure]) -> list[Tensor]:
    """|repulsion| / |drive| of all groups, one tensor per device."""
    by_device: dict[torch.device, list[Measure]] = {}
    for one in measures:
        by_device.setdefault(one.drive.device, []).append(one)
    return [
        torch.cat([one.repulsion.reshape(-1) for one in some]) / torch.cat([one.drive.reshape(-1) for one in some])
        for some in by_device.values()
    ]


def _on_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy to the host; the event tells when it is done."""
    if not values.is_cuda:
        return values.detach().cpu(), None
    copy = values.detach().to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
