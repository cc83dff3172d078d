"""Detect a model that has collapsed: it gives the same output for every input, and gradients vanish.

This happens to deep Transformers when the learning rate is too high: within a few steps all tokens become the same
vector. The loss stays finite, so nothing else shows that the rest of the training is wasted. Repulsion makes it worse:
heads without a gradient are moved by repulsion alone, and their weights grow.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

_VANISHED = 1e-4  # share of the largest gradient norm so far; in successful training runs it fell to 1 / 40
_LOSS_MARGIN = 0.02  # share of the decrease of the loss so far
_IN_A_ROW = 5  # observations: a single one can look like a collapse, if a hard batch follows an easy one


class CollapseDetector:
    """Detect a collapsed model from logged losses and gradient norms.

    A model has collapsed if the gradients of its heads vanish while the loss is above its minimum, five times in a row.
    A model that has memorised its data has no gradients either, but its loss stays at the minimum.

    Attributes:
        step: the first step of the collapse; None before one is detected.

    Example:
        >>> detector = CollapseDetector()
        >>> log = [(100, 7.0, 3e-3), (200, 5.0, 1e-3), *((step, 6.0, 1e-9 / step) for step in range(300, 900, 100))]
        >>> warnings = [detector.observe(*line) for line in log]
        >>> detector.step, sum(warning is not None for warning in warnings)
        (300, 1)
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._first_loss = self._lowest_loss = math.inf
        self._largest_drive = 0.0
        self._last_drive = math.nan
        self._suspected: list[int] = []  # steps that looked like a collapse, in a row

    def observe(self, step: int, loss: float, drive: float) -> str | None:
        """Process one line of the training log.

        Args:
            step: training step.
            loss: mean loss since the last line.
            drive: norm of the part of the heads' update that follows the loss, as last measured. A repeated value other
                than 0 is not a new measurement and is ignored.

        Returns:
            A warning message when the collapse is detected, once; None otherwise.
        """
        is_repeated, self._last_drive = drive == self._last_drive != 0, drive
        if self.step is not None or is_repeated or not (math.isfinite(loss) and math.isfinite(drive)):
            return None
        lowest, largest = self._lowest_loss, self._largest_drive
        self._first_loss = loss if math.isinf(self._first_loss) else self._first_loss
        self._lowest_loss, self._largest_drive = min(loss, lowest), max(drive, largest)
        if drive >= _VANISHED * largest or loss <= lowest + _LOSS_MARGIN * (self._first_loss - lowest):
            self._suspected = []
            return None
        self._suspected.append(step)
        if len(self._suspected) < _IN_A_ROW:
            return None
        self.step = self._suspected[0]
        return (
            f"step {self.step}: the model has collapsed. The gradient norm of its heads is {drive:.1e}, down from "
            f"{largest:.1e}, and the loss is {loss:.4g}, up from {lowest:.4g}: most likely the output is the same for "
            "every input, and the model will not recover. Restart with a lower learning rate, a longer warm-up or, if "
            "heads repel, a lower alpha"
        )

    def read_log(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Process all lines of a `metrics.jsonl` file."""
        losses: dict[Any, Any] = {}
        for line in lines:
            if line["kind"] == "train":
                losses = {line["step"]: line.get("loss")}
            elif line["kind"] == "heads" and line["step"] in losses:
                with suppress(TypeError, ValueError, OverflowError):  # not numbers: the file is damaged
                    self.observe(line["step"], float(losses[line["step"]]), float(line.get("drive", "nan")))
