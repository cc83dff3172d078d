"""Being asked to stop: Ctrl-C and SIGTERM, answered when it is safe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SAME = 1.0  # seconds within which a second Ctrl-C is the first one, passed on


class Stopped(Exception):
    """The user or the system asked the training to stop; it is saved and goes on with the same command.

    Args:
        message: how far it is.
        number: of the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number

    @property
    def code(self) -> int:
        """The exit code that shells know a signal by: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


class Request:
    """What was asked for: `number` is the first signal that came, None as long as none did."""

    def __init__(self) -> None:
        self.number: int | None = None
        self._at = 0.0
        self._message: str | None = None

    def note(self, number: int, frame: object = None) -> None:
        """Remember a signal; a second Ctrl-C ends everything at once.

        Raises:
            KeyboardInterrupt: it is the second.
            Stopped: within `at_once`.
        """
        if self.number is None:
            self.number, self._at = number, time.monotonic()
            if self._message is not None:
                raise Stopped(self._message, number)
        elif number == signal.SIGINT and not self._passed_on():
            raise KeyboardInterrupt

    @contextmanager
    def at_once(self, message: str) -> Iterator[None]:
        """Answer a signal at once within a block: everything is saved, and there is no later moment to wait for.

        Args:
            message: how far the training is.

        Raises:
            Stopped: a signal comes, or came before.
        """
        if self.number is not None:
            raise Stopped(message, self.number)
        self._message = message
        try:
            yield
        finally:
            self._message = None

    def _passed_on(self) -> bool:
        """A terminal sends Ctrl-C to torchrun and to its workers, and torchrun sends it to its workers again."""
        return "TORCHELASTIC_RUN_ID" in os.environ and time.monotonic() - self._at < _SAME


@contextmanager
def listening() -> Iterator[Request]:
    """Note Ctrl-C and SIGTERM instead of dying from them, for the length of a block.

    What ignores a signal goes on ignoring it, as a job in the background does. Only the main thread can listen; in
    another one nothing is ever asked for.
    """
    request = Request()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    heard = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in heard:
        signal.signal(number, request.note)
    try:
        yield request
    finally:
        for number, handler in heard.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
