"""The training loss between two looks, and whether it is still a number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sum of losses since the last look, kept on the device: nobody waits for it."""

    def __init__(self, device: torch.device) -> None:
        self.state = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64, device=device)  # sum, count, first bad

    def add(self, loss: Tensor) -> None:
        total, count, bad = self.state.unbind()
        bad.copy_(torch.where((bad < 0) & ~loss.isfinite(), count, bad))
        total.add_(loss)
        count.add_(1)

    def count(self) -> int:
        return int(self.state[1])

    def mean(self) -> float:
        return float(self.state[0] / self.state[1].clamp(min=1))

    def first_bad(self) -> int | None:
        bad = int(self.state[2])
        return None if bad < 0 else bad

    def merge(self, accelerator: Any) -> None:
        """The mean over processes, and the first bad loss of any."""
        everyone = accelerator.gather(self.state.unsqueeze(0))  # [processes, 3]
        bad = everyone[:, 2][everyone[:, 2] >= 0]
        worst = bad.min() if len(bad) else torch.tensor(-1.0, dtype=torch.float64, device=self.state.device)
        self.state.copy_(torch.stack([everyone[:, 0].mean(), everyone[:, 1].mean(), worst]))

    def reset(self) -> None:
        self.restore(torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))

    def restore(self, state: Tensor) -> None:
        self.state.copy_(state)  # in place: captured graphs write here
