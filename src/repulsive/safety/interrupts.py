"""End a command with a one-line message on Ctrl-C, also while packages are still being imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from types import FrameType, TracebackType

_MESSAGE = "repulsive: stopped"


def is_command() -> bool:
    """Check whether this process is `repulsive` or `python -m repulsive`; other processes are left alone."""
    words = getattr(sys, "orig_argv", [])
    by_module = any(words[i : i + 2] == ["-m", "repulsive"] for i in range(1, min(len(words), 8)))
    return by_module or os.path.basename(sys.argv[0] if sys.argv else "") in ("repulsive", "repulsive.exe")


def install_interrupt_handler() -> None:
    """Print one line instead of a traceback for an uncaught KeyboardInterrupt; other errors stay as they are.

    During an import Ctrl-C ends the process at once: extension modules abort or raise other errors if a
    KeyboardInterrupt is raised while they are being loaded.
    """
    original = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            print(_MESSAGE, file=sys.stderr)
        else:
            original(kind, error, trace)

    sys.excepthook = show
    is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if is_default and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    if not _is_importing(frame):
        signal.default_int_handler(number, frame)
    if os.environ.get("LOCAL_RANK", "0") == "0":  # under torchrun only one process per machine prints
        print(_MESSAGE, file=sys.stderr, flush=True)
    os._exit(128 + number)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False
