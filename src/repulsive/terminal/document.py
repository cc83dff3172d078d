"""JSON documents that commands print with `--json`."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def finite(value: Any) -> Any:
    """Replace numbers that are not finite by None, which JSON can represent, and paths by text."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_document(value: Any) -> str:
    r"""Encode a value as JSON in ASCII, with numbers in full precision and null for those that are not finite.

    Example:
        >>> as_document({"mean": 0.5, "deviation": float("nan")})
        '{\\n "mean": 0.5,\\n "deviation": null\\n}'
    """
    return json.dumps(finite(value), indent=1, allow_nan=False)
