"""Open files for writing in a folder that may come from anybody: no link is followed, nothing is truncated.

Every file that a run, a sweep or a preparation writes is opened here.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_LINK = "is a symbolic link, which is not followed; put the file or folder itself there"
_NO_LINK = os.O_CLOEXEC | os.O_NOFOLLOW if hasattr(os, "O_NOFOLLOW") else 0
_RIGHTS = 0o666  # the umask takes away what the user does not want to give


def open_new(path: Path) -> BinaryIO:
    """Open a new file for writing; an entry of that name is removed, and what a link leads to is left alone.

    Raises:
        OSError: the file cannot be made.
    """
    path.unlink(missing_ok=True)
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, _RIGHTS), "wb")


def open_append(path: Path) -> BinaryIO:
    """Open a regular file for appending, and make it where there is none.

    Raises:
        OSError: it is a link, a pipe or a device, or cannot be written.
    """
    return _regular(path, os.O_WRONLY | os.O_APPEND, "ab")


def write_synced(path: Path, data: bytes) -> None:
    """Write a new file so that it lasts through a power cut; else a new name may be left on an empty file."""
    with open_new(path) as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file by another, whole or not at all: written aside, synced, renamed.

    Raises:
        OSError: it cannot be written; the file that was there before is untouched.
    """
    aside = path.with_name(f".{path.name}.aside-{os.getpid()}")
    try:
        write_synced(aside, data)
        os.replace(aside, path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Make the content of a file last through a power cut."""
    handle = os.open(path, os.O_RDONLY | _NO_LINK)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_folder(folder: Path) -> None:
    """Make a rename or a new name last through a power cut, where the file system can sync folders."""
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
    """Refuse to write into a folder, or a database, that is a link.

    Raises:
        OSError: it is one.
    """
    if path.is_symlink():
        raise OSError(errno.ELOOP, _LINK, str(path))


@contextmanager
def locked(path: Path, *, remove: bool = False) -> Iterator[None]:
    """Hold an exclusive lock on a file for the length of a block. The lock ends with the process, however that ends.

    Args:
        path: the lock file, made where there is none; its content is not touched.
        remove: remove the lock file at the end of the block.

    Raises:
        BlockingIOError: another process holds the lock.
        OSError: the file is a link, or cannot be made or locked.
    """
    import fcntl

    while True:
        file = _regular(path, os.O_RDWR, "rb+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not remove or _same(file, path):
                break
        except BaseException:
            file.close()
            raise
        file.close()  # its last holder removed it after we had opened it: lock the one that is there now
    with file:
        try:
            yield
        finally:
            if remove:
                path.unlink(missing_ok=True)


def _regular(path: Path, flags: int, mode: str) -> BinaryIO:
    try:
        # O_NONBLOCK: to open a pipe that nobody reads from would wait for ever.
        handle = os.open(path, flags | os.O_CREAT | os.O_NONBLOCK | _NO_LINK, _RIGHTS)
    except OSError as error:
        refuse_link(path)
        raise error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return os.fdopen(handle, mode)  # type: ignore[return-value]


def _same(file: BinaryIO, path: Path) -> bool:
    """Whether an open file is still the one that the path names."""
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), named)
