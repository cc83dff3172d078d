"""Check that a file or folder can be created, and replace a folder atomically.

A folder is replaced by a temporary folder that is written next to it, synced, and renamed into place.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repulsive.safety.files import sync_file, sync_folder


def check_creatable(path: Path) -> None:
    """Check that a file or folder may be created at a path, before work whose result it would hold.

    Raises:
        OSError: the nearest existing parent is not a folder, or may not be written.
    """
    parent = next(each for each in path.absolute().parents if each.exists())
    if not parent.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent))
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(parent))


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a new folder to fill; at the end of the block it takes the place of `folder`.

    If the block fails, `folder` stays as it was. If the process is killed between the two renames, the old folder is
    left beside it as `.NAME.PID.old` (see `leftovers`).

    Args:
        folder: the folder to make or to replace; its parent must exist.

    Raises:
        OSError: the folder cannot be written.
    """
    new, old = (folder.with_name(f".{folder.name}.{os.getpid()}.{kind}") for kind in ("new", "old"))
    try:
        new.mkdir()
        yield new
        _sync(new)
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(new, ignore_errors=True)
        if old.exists() and not folder.exists():
            os.rename(old, folder)
        shutil.rmtree(old, ignore_errors=True)


def leftovers(folder: Path, *kinds: str) -> list[Path]:
    """Find temporary folders that killed processes left beside a folder.

    Args:
        folder: the folder that they were replacing.
        kinds: "new" for unfinished folders, "old" for folders that were being replaced.
    """
    name = re.compile(rf"\.{re.escape(folder.name)}\.\d+\.({'|'.join(kinds)})")
    if not folder.parent.is_dir():
        return []
    return sorted(path for path in folder.parent.iterdir() if name.fullmatch(path.name) and path.is_dir())


def _sync(folder: Path) -> None:
    for path, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync_file(Path(path) / name)
        sync_folder(Path(path))
