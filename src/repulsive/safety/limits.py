"""Limits on the size of models and archives from untrusted files. Environment variables can raise each limit."""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from typing import Any

from repulsive.errors import ConfigError, DataError

PARAMETERS, UNPACKED = "REPULSIVE_MOST_PARAMETERS", "REPULSIVE_MOST_UNPACKED"
MOST_PARAMETERS = 10_000_000_000
MOST_LAYERS = 4_096
_GIB = 1 << 30
_RATIO = 200  # unpacked bytes per byte of archive; ten times the best compression of real text


def most_parameters() -> float:
    """Return the largest allowed number of parameters of a model built from a configuration.

    Raises:
        ConfigError: the environment variable is not a positive number.
    """
    return _from_environment(PARAMETERS, MOST_PARAMETERS)


def check_parameters(count: float, where: str) -> None:
    """Raise an error for a model with too many parameters.

    Raises:
        ConfigError: the model has more parameters than `most_parameters`.
    """
    if count > (most := most_parameters()):
        raise ConfigError(
            f"{where}: describes a model of about {count:.3g} parameters, more than the limit of {most:.3g}; "
            f"if you trust it, set {PARAMETERS}={count:.2g} or more"
        )


def check_layers(count: int, where: str) -> None:
    """Raise an error for a model with so many layers that building its modules would take hours.

    Raises:
        ConfigError: the model has more than `MOST_LAYERS` layers, and the limit on parameters was not raised.
    """
    if count > MOST_LAYERS and PARAMETERS not in os.environ:
        raise ConfigError(
            f"{where}: describes a model of {count:.3g} layers, more than the limit of {MOST_LAYERS:,}; "
            f"if you trust it, set {PARAMETERS} to the number of parameters you expect"
        )


class Unpacked:
    """Counter of the bytes that an archive unpacks to, including archives inside it.

    Args:
        path: the archive, for the error message.
        size: the size of the archive in bytes.
    """

    def __init__(self, path: object, size: int) -> None:
        self._path = path
        self._most = _from_environment(UNPACKED, max(_GIB, _RATIO * size) / _GIB) * _GIB
        self._count = 0

    def add(self, count: int) -> None:
        """Add a number of unpacked bytes to the total.

        Raises:
            DataError: the total exceeds the limit.
        """
        self._count += count
        if self._count > self._most:
            raise DataError(
                f"{self._path}: unpacks to more than {self._most / _GIB:.3g} GiB, the limit for a file of its size; "
                f"if you trust it, set {UNPACKED} to a larger number of GiB"
            )


class Counted(io.RawIOBase):
    """Wrapper of a decompressing file that counts the bytes read from it.

    Args:
        file: the decompressing file.
        unpacked: the counter, shared by all archives inside one file.
    """

    def __init__(self, file: Any, unpacked: Unpacked) -> None:
        self._file = file
        self._unpacked = unpacked

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(len(buffer))
        self._unpacked.add(len(data))
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


def counted(open_file: Callable[[], Any], unpacked: Unpacked) -> io.BufferedReader:
    """Wrap a decompressing file in a buffered reader that counts the bytes read."""
    return io.BufferedReader(Counted(open_file(), unpacked), 1 << 16)


def _from_environment(name: str, default: float) -> float:
    text = os.environ.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"{name}={text!r}: expected a positive number")
    return value
