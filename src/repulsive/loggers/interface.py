"""The interface of loggers: two methods, and what a logger knows about its run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from repulsive.safety.secrets import redact

PROJECT = "repulsive"
_SECRET = re.compile(r"password|passwd|secret|token$|credential|api[_-]?key", re.IGNORECASE)


@runtime_checkable
class Logger(Protocol):
    """Receives numbers during a training. A class with these two methods is a logger; it need not inherit."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name, such as `train/loss`, as those of one step. Steps do not decrease."""

    def finish(self) -> None:
        """Write what is still in memory, and close all files. No other call follows."""


@dataclass(frozen=True)
class LoggedRun:
    """What a logger knows about the run that it logs.

    Args:
        folder: folder of the run; a logger writes to a folder of its own name inside.
        name: name of the run, such as "yelp/svgd/seed-0".
        settings: settings of the run by dotted name, such as `optimizer.lr`; passwords are removed.
        step: a resumed run logs the steps after this one again; -1 for a new run.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    step: int = -1

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", {name: _safe(name, value) for name, value in self.settings.items()})


def _safe(name: str, value: Any) -> Any:
    """Hide a setting whose name looks like that of a secret, and passwords in URLs."""
    if _SECRET.search(name) and isinstance(value, str) and value:
        return "***"
    return redact(value) if isinstance(value, str) else value
