"""Copy numbers from a device to the host without waiting for the device."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor as it is now. If the tensor is on a GPU, the copy can be read some time later.

    Args:
        values: the tensor, which may be changed afterwards.

    Example:
        >>> values = torch.tensor([1.0, 2.0])
        >>> copy = HostCopy(values)
        >>> _ = values.zero_()
        >>> copy.read()
        tensor([1., 2.])
    """

    def __init__(self, values: Tensor) -> None:
        self._values = values.detach().to("cpu", non_blocking=values.is_cuda, copy=True)
        self._event: torch.cuda.Event | None = None  # marks the arrival of the copy
        if values.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(values.device))

    def has_arrived(self) -> bool:
        """Check whether the copy can be read without waiting."""
        if self._event is not None and self._event.query():
            self._event = None
        return self._event is None

    def read(self) -> Tensor:
        """Wait for the copy, and return it."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values
