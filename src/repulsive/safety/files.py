"""Write files safely in an untrusted folder: links are not followed, and existing files are not truncated.

Every file that a run, a sweep or a data preparation writes is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

_LINK = "is a symbolic link, which is not followed; put the file or folder itself there"
NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0
_MODE = 0o666  # before the umask


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing. An existing file or link of that name is removed; the target of a link is kept.

    Raises:
        OSError: the file cannot be created.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK, _MODE), "wb")


def open_append(path: Path) -> BinaryIO:
    """Open a regular file for appending; create it if it does not exist.

    Raises:
        OSError: the file is a link, a pipe or a device, or cannot be written.
    """
    return _open_regular(path, os.O_WRONLY | os.O_APPEND, "ab")


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file and sync it to disk, so that its content survives a power failure."""
    with open_new(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file atomically: write a temporary file, sync it and rename it.

    Raises:
        OSError: the file cannot be written; the previous file is unchanged.
    """
    temporary = path.with_name(f".{path.name}.aside-{os.getpid()}")
    try:
        write_synced(temporary, data)
        os.replace(temporary, path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        if error.filename == str(temporary):
            error.filename = str(path)  # what the caller asked for
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Sync the content of a file to disk."""
    handle = os.open(path, os.O_RDONLY | NO_LINK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Sync new and renamed entries of a folder to disk, if the file system supports it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def refuse_link(path: Path) -> None:
    """Raise an error if a folder or database is a symbolic link.

    Raises:
        OSError: the path is a symbolic link.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


@contextmanager
def locked(path: Path, *, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file during a block. The lock is released when the process ends, even if it crashes.

    Args:
        path: the lock file; created if it does not exist, and its content is kept.
        remove: remove the lock file at the end of the block.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file is a link, or cannot be created or locked.
    """
    import fcntl

    while True:
        file = _open_regular(path, os.O_RDWR, "rb+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not remove or _is_file_at(file, path):
                break
        except BaseException:
            file.close()
            raise
        file.close()  # its last holder removed it after we opened it: lock the new file instead
    with file:
        try:
            yield
        finally:
            if remove:
                path.unlink(missing_ok=True)


def _open_regular(path: Path, flags: int, mode: str) -> BinaryIO:
    try:
        # O_NONBLOCK: opening a pipe without a reader would block.
        handle = os.open(path, flags | os.O_CREAT | os.O_NONBLOCK | NO_LINK, _MODE)
    except OSError as error:
        refuse_link(path)
        raise error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, mode)  # type: ignore[return-value]


def _is_file_at(file: BinaryIO, path: Path) -> bool:
    """Check whether an open file is still the file at the path."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), named)
