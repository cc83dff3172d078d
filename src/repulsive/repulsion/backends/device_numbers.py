"""Numbers on the device that Triton kernels read, sent only when they change."""

from __future__ import annotations

import torch

from repulsive.repulsion.backends.addresses import send


class DeviceNumbers:
    """A few numbers on the device, sent only when they change."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.tensor = torch.zeros(size, dtype=torch.float32, device=device)
        self._views = self.tensor.unbind()
        self._values = [0.0] * size

    def set(self, values: list[float]) -> None:
        """Set all numbers. One changed number, or equal numbers, take one launch instead of a transfer."""
        if values == self._values:
            return
        changed = [index for index, (new, old) in enumerate(zip(values, self._values, strict=True)) if new != old]
        if len(changed) == 1:
            self._views[changed[0]].fill_(values[changed[0]])
        elif len(set(values)) == 1:
            self.tensor.fill_(values[0])
        else:
            send(torch.tensor(values, dtype=torch.float32, device="cpu"), self.tensor)
        self._values = values
