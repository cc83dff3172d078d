"""Copy numbers from a device to the host without waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopies:
    """The last numbers that were sent to the host. On a GPU they can be read some time later.

    Example:
        >>> copies = HostCopies()
        >>> copies.send([torch.tensor([1.0, float("nan")]), torch.tensor([2.0])])
        >>> copies.read()
        [1.0, 2.0]
        >>> copies.read()
        []
    """

    def __init__(self) -> None:
        self._pending: list[tuple[Tensor, torch.cuda.Event | None]] = []

    def send(self, tensors: Iterable[Tensor]) -> None:
        """Start copying numbers to the host, in place of those that have not been read."""
        by_device: dict[torch.device, list[Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor.detach().reshape(-1))
        self._pending = [_start(some[0] if len(some) == 1 else torch.cat(some)) for some in by_device.values()]

    def read(self, *, wait: bool = False) -> list[float]:
        """Return the numbers once, without NaN; empty if there are none, or if they have not arrived yet.

        Args:
            wait: wait until they have arrived.
        """
        for _, event in self._pending:
            if event is not None and wait:
                event.synchronize()
        if not all(event is None or event.query() for _, event in self._pending):
            return []
        pending, self._pending = self._pending, []
        return [number for values, _ in pending for number in values.tolist() if not math.isnan(number)]


def _start(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Start a copy; return it with the event that marks its completion."""
    if not values.is_cuda:
        return values.cpu(), None
    copy = values.to("cpu", non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return copy, event
