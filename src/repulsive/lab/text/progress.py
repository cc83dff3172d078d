"""The callback that reports progress during a preparation."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # the current stage, how many items are done, the total (0: unknown)


def silent(stage: str, done: int, total: int) -> None:
    """Report nothing."""
