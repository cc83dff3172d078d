"""Ctrl-C while the command line is still importing torch: one line, as at any later time."""

from __future__ import annotations

import os
import sys
from types import TracebackType


def is_command() -> bool:
    """Whether this process is `repulsive` or `python -m repulsive`: nothing is changed in any other."""
    words = getattr(sys, "orig_argv", [])
    by_module = any(words[i : i + 2] == ["-m", "repulsive"] for i in range(1, min(len(words), 8)))
    return by_module or os.path.basename(sys.argv[0] if sys.argv else "") in ("repulsive", "repulsive.exe")


def answer_interrupts() -> None:
    """Let a KeyboardInterrupt that nobody catches end the command in one line. Other errors are shown as ever."""
    before = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print("repulsive: stopped", file=sys.stderr)
        else:
            before(kind, error, trace)

    sys.excepthook = show
