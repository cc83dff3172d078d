"""SHA-256 checksums of results: stored in `result.json`, and compared whenever a file is read.

Checksums detect damage and careless changes. If a checksum is changed as well, `scores` still compares the metrics
with the stored answers.
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
_OWN = "result"  # key of the checksum of `result.json` itself
_VARYING = ("seconds", SHA256)  # excluded from the checksum: a resumed training gives another time


def digest(data: bytes) -> str:
    """Compute the SHA-256 of bytes as a hexadecimal string."""
    return hashlib.sha256(data).hexdigest()


def with_checksums(result: Mapping[str, Any], files: Mapping[str, str]) -> dict[str, Any]:
    """Add checksums to a result.

    Args:
        result: metrics and other values.
        files: file name -> SHA-256.
    """
    return {**result, SHA256: {**files, _OWN: _own_digest(result)}}


def with_new_checksum(result: Mapping[str, Any]) -> dict[str, Any]:
    """Update the checksum of a result to which scores were added; the checksums of its files do not change."""
    files = {name: x for name, x in (result.get(SHA256) or {}).items() if name != _OWN}
    return with_checksums(result, files) if files else dict(result)


def check_result(result: dict[str, Any], path: Path) -> None:
    """Check that a result is the one that the training wrote. A result without checksums passes.

    Raises:
        RunError: the result differs from its checksum, or the checksums are damaged.
    """
    if SHA256 not in result:
        return
    sums = result[SHA256]
    if not isinstance(sums, dict) or sums.get(_OWN) != _own_digest(result):
        raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {_remedy(path)}")


def check_file(result: dict[str, Any] | None, path: Path, data: bytes) -> bool:
    """Check that a file is the one that the training wrote.

    Args:
        result: result of the run, after `check_result`; None before the end of the training.
        path: path of the file.
        data: content of the file.

    Returns:
        Whether the result has a checksum of this file.

    Raises:
        RunError: the checksum differs.
    """
    expected = (result or {}).get(SHA256, {}).get(path.name)
    if expected is not None and digest(data) != expected:
        raise RunError(f"{path}: was changed after the training wrote it (its checksum differs); {_remedy(path)}")
    return expected is not None


def warn_unverified(path: Path) -> None:
    """Warn that answers cannot be verified."""
    warnings.warn(f"{path}: has no checksum (run folder of an earlier version); it cannot be verified", stacklevel=3)


def _own_digest(result: Mapping[str, Any]) -> str:
    own = {name: value for name, value in result.items() if name not in _VARYING}
    return digest(json.dumps(own, sort_keys=True).encode())


def _remedy(path: Path) -> str:
    return f"restore the file, or remove {path.parent.name}/result.json and run the command that trained it"
