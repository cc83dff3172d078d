"""End a process when its parent process is gone, even if the parent was killed."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_INTERVAL = 0.5  # seconds between checks


def watch_parent(parent: int, then: Callable[[], None] | None = None) -> None:
    """Watch the parent in a background thread; end this process at once when the parent is gone.

    Args:
        parent: process id of the parent, passed on by the parent itself.
        then: called instead of ending the process.
    """
    threading.Thread(target=_watch, args=(parent, then or _end), daemon=True).start()


def _watch(parent: int, then: Callable[[], None]) -> None:
    while os.getppid() == parent:
        time.sleep(_INTERVAL)
    then()


def _end() -> None:
    os._exit(1)
