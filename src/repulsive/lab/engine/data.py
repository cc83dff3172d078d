"""The `[data]` table that the recipes of several systems share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Data:
    """Prepared data to train on.

    Args:
        folder: what `repulsive prepare` wrote.
        share: fraction of the training items to use, from the first on; for quick trials.
    """

    folder: Path
    share: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"share={self.share} must be above 0 and at most 1")
