"""Open loggers by name, built in or of other packages, as one logger."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import cast

from repulsive.errors import ConfigError, RepulsiveError, did_you_mean, short_message
from repulsive.loggers.interface import LoggedRun, Logger
from repulsive.loggers.quiet import require_package
from repulsive.plugins import LOGGERS as GROUP
from repulsive.plugins import load_plugins

OpenLogger = Callable[[LoggedRun], Logger]
BUILT_IN = {
    "tensorboard": "TensorBoardLogger",
    "wandb": "WandbLogger",
    "mlflow": "MLflowLogger",
    "trackio": "TrackioLogger",
}
DISTRIBUTIONS = {"mlflow": "mlflow-skinny"}  # where it is not the name of the module


class Loggers:
    """Several loggers as one. A logger that fails is closed with one warning; the training goes on.

    Args:
        loggers: loggers by name.
    """

    def __init__(self, loggers: Mapping[str, Logger]) -> None:
        self._loggers = dict(loggers)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the loggers that are open."""
        return tuple(self._loggers)

    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, logger in list(self._loggers.items()):
            self._call(name, partial(logger.log, values, step))

    def finish(self) -> None:
        for name, logger in list(self._loggers.items()):
            self._call(name, logger.finish)
        self._loggers = {}

    def _call(self, name: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # code of another package may raise anything
            self._loggers.pop(name)
            reason = short_message(error)
            warnings.warn(f"logger {name!r} failed and is not used any more ({reason})", stacklevel=4)


def open_loggers(names: Sequence[str], run: LoggedRun) -> Loggers:
    """Open loggers by name.

    Args:
        names: "tensorboard", "wandb", "mlflow", "trackio", or the name of an entry point in `repulsive.loggers`.
        run: the run to log.

    Raises:
        ConfigError: a name is unknown, or its package is not installed or cannot open its files.
    """
    check_loggers(names)
    opened: dict[str, Logger] = {}
    try:
        for name in dict.fromkeys(names):
            opened[name] = _open(name, run)
    except RepulsiveError:
        Loggers(opened).finish()
        raise
    return Loggers(opened)


def check_loggers(names: Iterable[str]) -> None:
    """Raise `ConfigError` if a logger is unknown or its package is not installed, without importing it."""
    for name in names:
        if name in BUILT_IN:
            require_package(name, DISTRIBUTIONS.get(name, name))
        elif name not in (known := known_loggers()):
            raise ConfigError(f"unknown logger {name!r}; {did_you_mean(name, known)}choose from {', '.join(known)}")


def known_loggers() -> dict[str, OpenLogger]:
    """The built-in loggers, then those that other packages add by entry points, by name."""
    added = load_plugins(GROUP, _problem_of)
    return {**{name: _built_in(name) for name in BUILT_IN}, **cast("dict[str, OpenLogger]", added)}


def _built_in(name: str) -> OpenLogger:
    def open_logger(run: LoggedRun) -> Logger:
        module = importlib.import_module(f"repulsive.loggers.{name}")
        return cast(Logger, getattr(module, BUILT_IN[name])(run))

    return open_logger


def _open(name: str, run: LoggedRun) -> Logger:
    make = _built_in(name) if name in BUILT_IN else known_loggers()[name]
    try:
        logger = make(run)
    except RepulsiveError:
        raise
    except Exception as error:  # code of another package may raise anything
        reason = short_message(error)
        raise ConfigError(f"logger {name!r} cannot be opened ({reason}); leave it out, or update its package") from None
    if not isinstance(logger, Logger):
        raise ConfigError(f"logger {name!r}: expected an object with log and finish, got {type(logger).__name__}")
    return logger


def _problem_of(name: str, value: object) -> str:
    if name in BUILT_IN:
        return "a built-in logger has this name; choose another"
    return "" if callable(value) else f"expected a function that takes a LoggedRun, got {type(value).__name__}"
