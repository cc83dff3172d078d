"""Detect repulsion that stays stronger than the loss."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from repulsive.particles.rule import Measure

FIRST_STEP = 500  # earlier, q and k may have tiny gradients, which makes the ratio huge
IN_A_ROW = 3  # number of consecutive measurements that trigger a warning
_TOO_STRONG = 1.01  # a target ratio of 1 is measured as 1 up to rounding


class StrengthMonitor:
    """Watch the ratio |repulsion| / |drive| of all groups from step 500 on, without synchronising with the device.

    Repulsion is too strong if more than half of the groups have a ratio above 1 in three measurements in a row.
    On a GPU a measurement is read when the next one is made.

    Example:
        >>> monitor = StrengthMonitor()
        >>> def measure(ratio: float) -> Measure:
        ...     return Measure(torch.ones(2), torch.full((2,), ratio), *(torch.zeros(2) for _ in range(5)))
        >>> [monitor.observe(step, [measure(4.0)]) for step in (450, 500, 550, 600, 650)]
        [None, None, None, 4.0, None]
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.cuda.Event | None]] = []
        self._count = 0  # measurements in a row that were too strong
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
        ratio = self._read_pending()
        if ratio is None:
            self._pending = [_start_copy_to_host(values) for values in _ratios(measures)]
            ratio = self._read_pending()
        self._is_done = ratio is not None
        return ratio

    def _read_pending(self) -> float | None:
        """Count the pending measurement if its numbers have arrived on the host."""
        if not self._pending or not all(event is None or event.query() for _, event in self._pending):
            return None
        ratios = torch.cat([values for values, _ in self._pending])
        self._pending = []
        ratios = ratios[~ratios.isnan()]
        is_too_strong = 2 * int((ratios > _TOO_STRONG).sum()) > ratios.numel()
        self._count = self._count + 1 if is_too_strong else 0
        return float(ratios.median()) if self._count >= IN_A_ROW else None


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
