"""Errors that users can meet. Each message says what was wrong, where, and what to do next."""

import operator
import sys
import warnings
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from textwrap import shorten
from typing import TypeGuard

# Top-level modules whose lines `warn_user` skips.
_NOT_THE_USER = (
    *("repulsive", "torch", "contextlib", "accelerate", "lightning", "lightning_fabric", "pytorch_lightning"),
    *("transformers", "peft", "trl", "sentence_transformers"),
)


class RepulsiveError(Exception):
    """Base class of the errors of this package."""


class RuleError(RepulsiveError, ValueError):
    """A rule, kernel, bandwidth, prior or schedule got an invalid value."""


class UnknownSetting(RuleError, TypeError):
    """`repel` or a callback got an unknown argument."""


class SelectionError(RepulsiveError, ValueError):
    """`layers`, `parts`, `where`, `particle` or a name pattern is misspelt or selects nothing."""


class NoHeadsFound(RepulsiveError, LookupError):
    """No attention heads of the model are known or could be inferred."""


class HeadLayoutError(RepulsiveError, ValueError):
    """A slice is not the head that it is meant to be, or a weight does not divide into the stated number of heads."""


class UnsupportedWeights(RepulsiveError, TypeError):
    """Weights or gradients are quantised, sparse, or sharded in an unsupported way."""


class NoTwin(RepulsiveError, TypeError):
    """A second model of the same architecture, with new weights, cannot be built."""


class OptimizerError(RepulsiveError, ValueError):
    """The optimizer trains none of the heads, has no step hooks, or repels them already."""


class StateError(RepulsiveError, ValueError):
    """A saved state does not belong to this model, rule or version."""


class DataError(RepulsiveError, ValueError):
    """A data file is damaged, empty, in another format, or does not fit the files it is used with."""


class ConfigError(RepulsiveError, ValueError):
    """A recipe or an environment variable has an unknown key, a wrong type or a value out of range."""


class CheckpointError(RepulsiveError, RuntimeError):
    """A checkpoint could not be written, or no complete one could be read."""


class RunError(RepulsiveError, RuntimeError):
    """A folder belongs to another recipe or process, holds an unfinished run, or is not a run folder."""


class DivergedError(RepulsiveError, ArithmeticError):
    """The loss, weights or activations are NaN or infinite, or the model has collapsed."""


def is_number(value: object) -> TypeGuard[int | float]:
    """Check for a number; True and False are not numbers here."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_whole(name: str, value: object, least: int = 1, error: type[RepulsiveError] = SelectionError) -> None:
    """Raise an error unless an argument is a whole number, at least `least`; True and False are not numbers here.

    Args:
        name: name of the argument.
        value: its value.
        least: smallest allowed value.
        error: type of the error.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise error(f"{name}={short_repr(value)}: must be a whole number, at least {least}")


def short_repr(value: object) -> str:
    """Show a value in a message; by its type if its own text has several lines or more than 60 characters.

    Example:
        >>> short_repr(0.5), short_repr("x" * 100)
        ('0.5', '<str object>')
    """
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"<{type(value).__name__} object>"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return a suggestion for an error message: the most similar known word; empty if none is similar.

    Example:
        >>> did_you_mean("shpere", ("weights", "sphere"))
        "did you mean 'sphere'? "
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def list_first(items: Sequence[object], most: int, separator: str = ", ") -> str:
    """List the first items in a message, and say how many more there are.

    Example:
        >>> list_first(["a", "b", "c", "d"], 2)
        'a, b and 2 more'
    """
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return separator.join(map(str, items[:most])) + more


def short_message(error: BaseException) -> str:
    r"""Format an error of another package for a message: its type and text, as one line of at most 160 characters.

    A final full stop is left out, because the message goes on. A failed import is described by its cause.

    Example:
        >>> short_message(ValueError("first line\nsecond line."))
        'ValueError: first line second line'
        >>> short_message(ValueError())
        'ValueError'
    """
    if isinstance(error, ImportError):
        error = _first_cause(error)
    return shorten(f"{type(error).__name__}: {error}".rstrip(".: \n"), 160, placeholder=" ...")


def _first_cause(error: BaseException) -> BaseException:
    """Return the error that an error was raised from, or that one was raised from, and so on."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def os_reason(error: OSError) -> str:
    """Return what the operating system said, and the file if it named one: on a full disk it does not.

    Example:
        >>> os_reason(PermissionError(13, "Permission denied", "data/x"))
        'Permission denied: data/x'
        >>> os_reason(OSError(28, "No space left on device"))
        'No space left on device'
    """
    reason = error.strerror or str(error)
    return reason if error.filename is None else f"{reason}: {error.filename}"


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, and name the line of the user's code that led here.

    That is the innermost line outside of this package, torch, and the training frameworks above. A fixed `stacklevel`
    would be wrong: hooks run in calls of torch, whose number depends on schedulers and wrappers around the optimizer.

    Args:
        message: the warning.
        category: its class.
    """
    frame = sys._getframe(1)
    while frame.f_globals.get("__name__", "").partition(".")[0] in _NOT_THE_USER and frame.f_back is not None:
        frame = frame.f_back
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    name, file = frame.f_globals.get("__name__", ""), frame.f_code.co_filename
    warnings.warn_explicit(message, category, file, frame.f_lineno, name, registry)
