"""Mean training loss since the last log line, and the first loss that is not finite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Meter:
    """Sum of losses, kept on the device so that adding a loss does not synchronise.

    Args:
        device: device of the losses.
    """

    def __init__(self, device: torch.device) -> None:
        self.state = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64, device=device)  # sum, count, first non-finite

    def add(self, loss: Tensor) -> None:
        """Add the loss of one step."""
        total, count, bad = self.state.unbind()
        bad.copy_(torch.where((bad < 0) & ~loss.isfinite(), count, bad))
        total.add_(loss)
        count.add_(1)

    def count(self) -> int:
        """Number of losses since the last reset."""
        return int(self.state[1])

    def mean(self) -> float:
        """Mean of the losses since the last reset."""
        return float(self.state[0] / self.state[1].clamp(min=1))

    def first_bad(self) -> int | None:
        """Index of the first loss since the last reset that is not finite; None if all are finite."""
        bad = int(self.state[2])
        return None if bad < 0 else bad

    def merge(self, accelerator: Any) -> None:
        """Average over all ranks, and take the first bad loss of any rank."""
        ranks = accelerator.gather(self.state.unsqueeze(0))  # [ranks, 3]
        bad = ranks[:, 2][ranks[:, 2] >= 0]
        first_bad = bad.min() if len(bad) else torch.tensor(-1.0, dtype=torch.float64, device=self.state.device)
        self.state.copy_(torch.stack([ranks[:, 0].mean(), ranks[:, 1].mean(), first_bad]))

    def reset(self) -> None:
        """Forget all losses."""
        self.restore(torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64))

    def restore(self, state: Tensor) -> None:
        """Set the state from a checkpoint."""
        self.state.copy_(state)  # in place: CUDA graphs write to this tensor
