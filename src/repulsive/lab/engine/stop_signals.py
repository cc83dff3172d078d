"""Handle Ctrl-C, SIGTERM and SIGUSR1: remember the signal, and stop when the training can be saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

# SLURM sends this signal before a job's time limit (`sbatch --signal=B:USR1@120`); Windows has no such signal.
REQUEUE_SIGNAL: int | None = getattr(signal, "SIGUSR1", None)
_SIGNALS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, REQUEUE_SIGNAL) if number is not None)
_REPEAT_SECONDS = 1.0  # within this time a second Ctrl-C counts as the first one, forwarded by torchrun


class Stopped(Exception):
    """A signal stopped the training. The training is saved, and the same command resumes it.

    Args:
        message: progress of the training.
        number: number of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number

    @property
    def code(self) -> int:
        """Exit code of a process that ends by this signal: 130 for Ctrl-C, 143 for SIGTERM, 138 for SIGUSR1."""
        return 128 + self.number


class Request:
    """A request to stop: `number` is the first signal that arrived, None before that."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._at = 0.0
        self._message: str | None = None

    def note(self, number: int, frame: object = None) -> None:
        """Remember a signal; a second Ctrl-C ends the process at once.

        Raises:
            KeyboardInterrupt: this is the second Ctrl-C.
            Stopped: this is called within an `at_once` block.
        """
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            if self._message is not None:
                raise Stopped(self._message, number)
        elif number == signal.SIGINT and not self._is_forwarded():
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Stop immediately on a signal within a block, because everything is saved.

        Args:
            message: progress of the training.

        Raises:
            Stopped: a signal arrives, or arrived before.
        """
        if self.number is not None:
            raise Stopped(message, self.number)
        self._message = message
        try:
            yield
        finally:
            self._message = None

    def _is_forwarded(self) -> bool:
        """Whether torchrun forwarded this Ctrl-C, which the terminal has also sent to the workers directly."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._at < _REPEAT_SECONDS


@contextmanager
def listening() -> Iterator[Request]:
    """Remember Ctrl-C, SIGTERM and SIGUSR1 within a block instead of ending the process.

    A signal that is ignored, as in a background job, stays ignored. Python allows signal handlers in the main thread
    only; in other threads the request stays empty.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    replaced = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in replaced:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, handler in replaced.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
