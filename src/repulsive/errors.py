"""Errors a user can meet. Each message names what was wrong, where, and what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches


class RepulsiveError(Exception):
    """Base of every error this package raises on purpose."""


class RuleError(RepulsiveError, ValueError):
    """A rule, kernel, bandwidth, prior or schedule was given a value it cannot take."""


class UnknownSetting(RuleError, TypeError):
    """`repel` or a callback was given an argument that it does not have."""


class SelectionError(RepulsiveError, ValueError):
    """`layers`, `parts`, `where`, `particle` or a name pattern selects nothing or is misspelt."""


class NoHeadsFound(RepulsiveError, LookupError):
    """The model has no attention heads that are known or could be inferred."""


class HeadLayoutError(RepulsiveError, ValueError):
    """A slice is not the head it claims to be, or a weight does not divide into the heads claimed."""


class UnsupportedWeights(RepulsiveError, TypeError):
    """Quantised, sparse, sharded or otherwise unreadable weights or gradients."""


class NoTwin(RepulsiveError, TypeError):
    """A model cannot be built again with fresh weights."""


class OptimizerError(RepulsiveError, ValueError):
    """The optimiser owns none of the heads, has no step hook, or is repulsive already."""


class StateError(RepulsiveError, ValueError):
    """A saved state does not belong to this model, rule or version."""


class DataError(RepulsiveError, ValueError):
    """A data file is damaged, empty, not in the format claimed, or does not fit what it is used with."""


class ConfigError(RepulsiveError, ValueError):
    """A recipe or an environment variable has an unknown key, a wrong type or a value out of range."""


class CheckpointError(RepulsiveError, RuntimeError):
    """A checkpoint could not be written, or none that is whole could be read."""


class RunError(RepulsiveError, RuntimeError):
    """A run folder belongs to another recipe or process, is unfinished, or is none."""


class DivergedError(RepulsiveError, ArithmeticError):
    """The loss stopped being a number."""


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """The part of an error message that suggests the nearest known word; empty where none is near.

    Example:
        >>> did_you_mean("shpere", ("weights", "sphere"))
        "did you mean 'sphere'? "
    """
    near = get_close_matches(str(word), list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""
