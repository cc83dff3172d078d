"""Locks on prepared folders: one process at a time prepares a folder, and cleans up after a killed process."""

from __future__ import annotations

import errno
import os
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from repulsive.errors import DataError, os_reason
from repulsive.safety.files import locked, sync_folder
from repulsive.safety.folders import leftovers

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # errors of network file systems without locks
_CLAIMED: set[Path] = set()  # folders that this process has locked


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Lock a folder that is being prepared, and clean up what a killed process left there.

    The process that holds the lock may claim the folder again.

    Raises:
        DataError: another process is preparing the folder, or its parent folder cannot be written.
    """
    place = Path(os.path.realpath(folder))
    if place in _CLAIMED:
        yield
        return
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(place.with_name(f".{place.name}.lock"), remove=True))
        except BlockingIOError:
            raise DataError(
                f"{folder}: another process is preparing it; wait until it has ended, or choose another --out"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise DataError(f"{folder}: cannot be written ({os_reason(error)})") from None
            warnings.warn(f"{folder}: its disk has no locks; do not prepare it in two processes at once", stacklevel=3)
        _CLAIMED.add(place)
        stack.callback(_CLAIMED.discard, place)
        _restore(place)
        yield


def recover(folder: Path) -> None:
    """Restore a prepared folder that a process was replacing when it was killed; otherwise do nothing."""
    if folder.exists() or not leftovers(Path(os.path.realpath(folder)), "old"):
        return
    with suppress(DataError), claimed(folder):  # fails if another process is preparing it
        pass


def _restore(folder: Path) -> None:
    left = leftovers(folder, "old")
    if not folder.exists() and left:
        with suppress(OSError):
            os.rename(left[0], folder)
            sync_folder(folder.parent)


def clean(folder: Path) -> None:
    """Remove temporary folders that killed processes left behind."""
    for path in leftovers(folder, "new", "old"):
        shutil.rmtree(path)
