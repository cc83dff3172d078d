"""SHA-256 of what a run came to: kept in `result.json`, compared whenever a file is read.

They tell of damage and of careless changes. Whoever changes a file and its checksum too is met by `scores`, which
compares the numbers with the answers they are made of.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from repulsive.errors import RunError

SHA256 = "sha256"
_OWN = "result"  # the entry for the numbers of `result.json` itself
_VARYING = ("seconds", SHA256)  # a resumed training takes another time and has the same result


def digest(data: bytes) -> str:
    """SHA-256 as text."""
    return hashlib.sha256(data).hexdigest()


def sealed(result: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """A result with its checksums.

    Args:
        result: what came out.
        files: file -> SHA-256.
    """
    return {**result, SHA256: {**files, _OWN: _own_digest(result)}}


def resealed(result: Mapping[str, Any]) -> dict[str, Any]:
    """A result to which scores were added, with the checksums of its files as they were."""
    files = {name: x for name, x in (result.get(SHA256) or {}).items() if name != _OWN}
    return sealed(result, files) if files else dict(result)


def check_result(result: dict[str, Any], path: Path) -> None:
    """Refuse numbers that are not those the training wrote. A result without checksums passes.

    Raises:
        RunError: they differ from their checksum, or the checksums are damaged.
    """
    sums = result.get(SHA256)
    if sums is None:
        return
    if not isinstance(sums, dict) or sums.get(_OWN) != _own_digest(result):
        raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {_remedy(path)}")


def check_file(result: dict[str, Any] | None, path: Path, data: bytes) -> bool:
    """Refuse a file that is not the one the training wrote.

    Args:
        result: of the run, checked; None while it has none.
        path: of the file.
        data: its content.

    Returns:
        Whether there was a checksum to compare with.

    Raises:
        RunError: the checksum differs.
    """
    expected = (result or {}).get(SHA256, {}).get(path.name)
    if expected is not None and digest(data) != expected:
        raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {_remedy(path)}")
    return expected is not None


def warn_unsealed(path: Path) -> None:
    """Warn that answers cannot be verified."""
    warnings.warn(f"{path}: has no checksum, as run folders of earlier versions; it cannot be verified", stacklevel=3)


def _own_digest(result: Mapping[str, Any]) -> str:
    own = {name: value for name, value in result.items() if name not in _VARYING}
    return digest(json.dumps(own, sort_keys=True).encode())


def _remedy(path: Path) -> str:
    return f"restore the file, or remove {path.parent.name}/result.json and run the command that trained it"
