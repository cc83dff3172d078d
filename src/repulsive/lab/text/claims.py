"""One process at a time prepares a folder, and the next one repairs what a killed one left."""

from __future__ import annotations

import errno
import os
import re
import shutil
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from repulsive.errors import DataError
from repulsive.safety.files import locked, sync_folder

_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # of some network file systems
_CLAIMED: set[Path] = set()  # by this process


@contextmanager
def claimed(folder: Path) -> Iterator[None]:
    """Keep other processes from preparing the same folder, and repair what a killed one left.

    The process that holds the folder may claim it again.

    Raises:
        DataError: another process is preparing it, or its parent folder cannot be written.
    """
    place = Path(os.path.realpath(folder))
    if place in _CLAIMED:
        yield
        return
    with ExitStack() as stack:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(_lock_of(place), remove=True))
        except BlockingIOError:
            raise DataError(
                f"{folder}: another process is preparing it; wait until it has ended, or choose another --out"
            ) from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise DataError(f"{folder}: cannot be written ({error.strerror}: {error.filename})") from None
            warnings.warn(f"{folder}: its disk has no locks; let no other process prepare it meanwhile", stacklevel=3)
        _CLAIMED.add(place)
        stack.callback(_CLAIMED.discard, place)
        _bring_back(place)
        yield


def recover(folder: Path) -> None:
    """Bring back a prepared folder that a process was replacing when it was killed; nothing where there is none."""
    if folder.exists() or not _left(Path(os.path.realpath(folder)), "old"):
        return
    with suppress(DataError), claimed(folder):  # another process may be at it
        pass


def _bring_back(folder: Path) -> None:
    left = _left(folder, "old")
    if not folder.exists() and left:
        with suppress(OSError):
            os.rename(left[0], folder)
            sync_folder(folder.parent)


def _lock_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.lock")


def clean(folder: Path) -> None:
    """Remove what killed processes left behind."""
    for path in _left(folder, "new|old"):
        shutil.rmtree(path)


def _left(folder: Path, kinds: str) -> list[Path]:
    """Folders that killed processes left beside a folder."""
    name = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.({kinds})")
    if not folder.parent.is_dir():
        return []
    return sorted(path for path in folder.parent.iterdir() if name.fullmatch(path.name) and path.is_dir())
