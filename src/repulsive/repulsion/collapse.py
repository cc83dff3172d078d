"""A training that has collapsed: its model answers every input alike, so no gradient comes through any more.

Deep Transformers end so when a rate is too high: within a few steps all tokens become the same vector. The loss stays a
number, and nothing else says that the rest of the time is wasted. With repulsion it is worse: heads that get no
gradient are moved by repulsion alone, and grow for as long as it lasts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

_VANISHED = 1e-4  # of the largest gradients so far; in trainings that went well they fell to a 40th
_LOST = 0.02  # of what the loss had fallen by
_IN_A_ROW = 5  # times seen: an easy batch and a hard one can look like it, once


class Collapse:
    """Finds it in what a training logs: gradients of heads vanish, the loss is above where it was, and both stay so.

    A model that has learned its data by heart has no gradients either, but a loss that is as low as ever.

    Example:
        >>> watch = Collapse()
        >>> seen = [(100, 7.0, 3e-3), (200, 5.0, 1e-3), *((step, 6.0, 1e-9 / step) for step in range(300, 900, 100))]
        >>> told = [watch.saw(*each) for each in seen]
        >>> watch.step, sum(words is not None for words in told)
        (300, 1)
    """

    def __init__(self) -> None:
        self.step: int | None = None  # the first of those at which it was seen
        self._first = self._lowest = math.inf
        self._largest = 0.0
        self._suspected: list[int] = []
        self._last = math.nan

    def saw(self, step: int, loss: float, drive: float) -> str | None:
        """What to tell, once.

        Args:
            step: of the training.
            loss: mean since the last time.
            drive: norm of the part of the heads' update that follows the loss, as last measured; a number that is the
                last one again, but for 0, was not measured anew and says nothing.
        """
        stale, self._last = drive == self._last != 0, drive
        if self.step is not None or stale or not (math.isfinite(loss) and math.isfinite(drive)):
            return None
        lowest, largest = self._lowest, self._largest
        self._first = loss if math.isinf(self._first) else self._first
        self._lowest, self._largest = min(loss, lowest), max(drive, largest)
        if drive >= _VANISHED * largest or loss <= lowest + _LOST * (self._first - lowest):
            self._suspected = []
            return None
        self._suspected.append(step)
        if len(self._suspected) < _IN_A_ROW:
            return None
        self.step = self._suspected[0]
        return (
            f"step {self.step}: the model has collapsed. The gradients of its heads are {drive:.1e}, once {largest:.1e}"
            f", and the loss is {loss:.4g}, once {lowest:.4g}: most likely it answers every input alike, and does "
            "not come back. Train anew with a lower learning rate, a longer warm-up or, if heads repel, a lower alpha"
        )

    def read(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """All that was logged so far, line by line as in `metrics.jsonl`."""
        losses: dict[Any, Any] = {}
        for line in lines:
            if line["kind"] == "train":
                losses = {line["step"]: line.get("loss")}
            elif line["kind"] == "heads" and line["step"] in losses:
                with suppress(TypeError, ValueError, OverflowError):  # no numbers: the file is damaged
                    self.saw(line["step"], float(losses[line["step"]]), float(line.get("drive", "nan")))
