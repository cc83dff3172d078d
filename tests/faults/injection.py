"""Commands in which one file operation fails, or is the last thing the process does.

Each command runs in a forked child, so that a stop is one: nothing is flushed, no `finally` runs. Python's audit events
see every open, rename, unlink, mkdir and rmdir, whoever calls them; fsync has none and is wrapped.
"""

import errno
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path

STOPPED = 137  # the exit code of a child that was stopped
BROKEN = 70  # the exit code of a child that ended in a traceback
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_EVENTS = ("os.rename", "os.remove", "os.mkdir", "os.rmdir")


class Injector:
    """Counts file operations below a folder and spoils one of them.

    Args:
        root: the folder.
        number: which operation, from 0; -1 for none.
        stop: end the process there, instead of making the operation fail.
    """

    def __init__(self, root: Path, number: int = -1, stop: bool = False) -> None:
        self.root, self.number, self.stop = str(root), number, stop
        self.count = 0
        self.seen: list[str] = []

    def install(self) -> None:
        """Watch this process from now on; there is no way back."""
        fsync = os.fsync

        def spoiled(handle: int) -> None:
            self._saw("fsync", os.readlink(f"/proc/self/fd/{handle}"))
            fsync(handle)

        os.fsync = spoiled
        sys.addaudithook(self._audit)

    def _audit(self, event: str, given: tuple) -> None:
        if event == "open" and isinstance(given[0], str | bytes | os.PathLike):
            if (given[2] or 0) & _WRITES:
                self._saw("open", given[0])
        elif event in _EVENTS:
            # Within a folder that is open, as shutil.rmtree has it, the path is relative.
            self._saw(event, given[0], inside=given[-1] not in (-1, None) and not os.path.isabs(os.fsdecode(given[0])))

    def _saw(self, what: str, path: str, inside: bool = False) -> None:
        name = os.fsdecode(path)
        if not inside and not os.path.abspath(name).startswith(self.root):
            return
        number, self.count = self.count, self.count + 1
        self.seen.append(f"{what} {name}")
        if number == self.number:
            if self.stop:
                os._exit(STOPPED)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


def run_forked(command: Callable[[], int], injector: Injector | None = None) -> tuple[int, list[str]]:
    """Run a command in a child.

    Returns:
        Its exit code, and the operations that were seen (none where it was stopped).
    """
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Python 3.12, about threads
        child = os.fork()
    if child == 0:
        os.close(reading)
        code = BROKEN
        try:
            if injector is not None:
                injector.install()
            code = command()
            if injector is not None:
                with os.fdopen(writing, "wb") as file:
                    file.write("\n".join(injector.seen).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        seen = file.read().decode().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), seen
