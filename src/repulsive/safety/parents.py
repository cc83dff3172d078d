"""Processes that end with the one that started them, even if that one was killed and could tell nobody."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_EVERY = 0.5  # seconds between two looks


def watch_parent(parent: int, then: Callable[[], None] | None = None) -> None:
    """Watch the parent in a thread of its own; when it is gone, this process ends at once.

    Args:
        parent: its process number, as the parent itself knows it.
        then: what to do instead of ending at once.
    """
    threading.Thread(target=_watch, args=(parent, then or _end), daemon=True).start()


def _watch(parent: int, then: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(_EVERY)
    then()


def _end() -> None:
    os._exit(1)
