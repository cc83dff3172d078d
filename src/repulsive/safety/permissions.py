"""Give safetensors files the permissions of ordinary files.

The package safetensors writes a temporary file that only its owner may read, and renames it.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from repulsive.safety.files import NO_LINK, open_new


@contextmanager
def ordinary_permissions(folder: Path) -> Iterator[None]:
    """Give the safetensors files that a block writes into a folder the permissions that `open(path, "w")` gives.

    A new file gets what the umask leaves; a file that replaces another keeps the permissions of the old file.

    Args:
        folder: the folder that the block writes into; the block may create it. Subfolders are not changed.

    Raises:
        OSError: the permissions cannot be changed.
    """
    before = _modes(folder) if folder.is_dir() else {}
    yield
    after = _modes(folder)
    usual = _mode_of_new_file(folder) if after.keys() - before.keys() else 0
    for name, mode in after.items():
        if mode != (wanted := before.get(name, usual)):
            _set_mode(folder / name, wanted)


def _modes(folder: Path) -> dict[str, int]:
    """Return the permissions of the safetensors files in a folder, without links."""
    with os.scandir(folder) as entries:
        files = [each for each in entries if each.name.endswith(".safetensors") and each.is_file(follow_symlinks=False)]
        return {each.name: stat.S_IMODE(each.stat(follow_symlinks=False).st_mode) for each in files}


def _mode_of_new_file(folder: Path) -> int:
    """Create a file and read its mode. To read the umask, a process must change it, which other threads would see."""
    probe = folder / f".permissions-{os.getpid()}-{threading.get_ident()}"
    with open_new(probe) as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    probe.unlink()
    return mode


def _set_mode(path: Path, mode: int) -> None:
    handle = os.open(path, os.O_RDONLY | NO_LINK)
    try:
        os.fchmod(handle, mode)
    finally:
        os.close(handle)
