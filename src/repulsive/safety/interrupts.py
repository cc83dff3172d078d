"""End a command with a one-line message on Ctrl-C, also while torch is still being imported."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def is_command() -> bool:
    """Check whether this process is `repulsive` or `python -m repulsive`; other processes are left alone."""
    words = getattr(sys, "orig_argv", [])
    by_module = any(words[i : i + 2] == ["-m", "repulsive"] for i in range(1, min(len(words), 8)))
    return by_module or os.path.basename(sys.argv[0] if sys.argv else "") in ("repulsive", "repulsive.exe")


def install_interrupt_handler() -> None:
    """Print one line instead of a traceback for an uncaught KeyboardInterrupt; other errors stay as they are."""
    original = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("repulsive: stopped", file=sys.stderr)
        else:
            original(kind, error, trace)

    sys.excepthook = show
